"""From a launch render and options to a plan: which trainer, which orchestrator, and is what was asked possible?

`find_trainer` and `orchestrator_argv` read the launch, `make_plan` checks the options one by one, and
`check_trainer` the job that they make. All of them refuse in one line; nothing here changes a document.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Callable, Iterable
from typing import Any

import bench_script
from bench_common import BenchError, decode, mask, read_bytes, shown_name
from launch_render import (
    MAX_RENDER_BYTES,
    Client,
    Document,
    Render,
    Word,
    client_containers,
    parse_client,
    read_render,
    script_role,
    slice_of,
    walk,
)
from render_edit import (
    CHECKPOINT_FLAG,
    CHECKPOINT_KEYS,
    GANG_LABEL,
    OUTPUT_FLAG,
    RUN_FLAGS,
    WORKER_CONTAINER,
    Edit,
    Plan,
    Trainer,
    flag_values,
    maxtext_keys,
    output_directory,
    trainer_words,
)
from render_slice import Slice, mesh_devices, parse_slice

RENDER_VERSION = "0.1.0"  # the project's version, in pyproject.toml
LABEL_BYTES = 63  # Kubernetes: length of a label's value, a pod's name, a host name

# What the bench decides itself: flag or key -> what to do instead.
OWN_FLAGS = {
    "worker_id": "use --name",
    "maxtext_output_directory": "use --output-directory",
    "checkpoint_save_interval_steps": "leave it: a bench saves no checkpoints",
    "process_main": "leave it: the driver takes its place",
}
OWN_KEYS = {
    "run_name": "use --name",
    "base_output_directory": "use --output-directory",
    "enable_checkpointing": "leave it: a bench saves no checkpoints",
}
OWN_ENV = {"MAXTEXT_EXTRA_FLAGS": "use --maxtext", "LIBTPU_INIT_ARGS": "use --libtpu (there are three copies)"}


# --- finding the trainer and the orchestrator -----------------------------------------------------


def find_trainer(launch: Render, name: str | None = None) -> Trainer:
    """Return the trainer of a launch.

    Args:
      name: of its JobSet, where there may be several.

    Raises:
      BenchError: none, several, or one that is no whole Pathways JobSet.
    """
    roles = [(script_role(script), doc, path, box, script) for doc in _distinct(launch.documents)
             for path, box, script in client_containers(doc)]  # fmt: skip
    found = [entry for entry in roles if entry[0] == "trainer" and name in (None, entry[1].name)]
    if not found:
        raise _no_trainer(launch, [(role, doc) for role, doc, *_ in roles], name)
    if len(found) > 1:
        names = [doc.name for _, doc, *_ in found]
        todo = "choose with --trainer NAME" if len(set(names)) == len(names) else "give the dry run of one launch"
        raise BenchError(f"{len(found)} trainers: {', '.join(names)}", where=found[1][1].where, todo=todo)
    _, document, path, container, script = found[0]
    _check_shape(launch, document, path)
    jobs = document.data["spec"]["replicatedJobs"]
    workers = [i for i, job in enumerate(jobs) if WORKER_CONTAINER in map(container_name, pod_of(job)["containers"])]
    if not workers:
        raise BenchError(
            f"trainer {document.name} has no Pathways worker group (a container {WORKER_CONTAINER})",
            where=document.where,
            todo="a bench needs a Pathways trainer: launch it with a jobset.pathways template",
        )
    client = parse_client(container, path, script, document.where)
    return Trainer(document, client, tuple(path[:3]), ("spec", "replicatedJobs", workers[0]))


def _distinct(documents: Iterable[Document]) -> list[Document]:
    """Return documents without the exact repeats that a capture of two dry runs holds."""
    distinct: list[Document] = []
    for document in documents:
        if all(document.data != other.data for other in distinct):
            distinct.append(document)
    return distinct


def _no_trainer(launch: Render, roles: list[tuple[str, Document]], name: str | None) -> BenchError:
    where = launch.documents[0].where.rpartition(":")[0]
    trainers = [doc.name for role, doc in roles if role == "trainer"]
    if trainers:
        return BenchError(f"no trainer named {name}", where=where, todo=f"there is {', '.join(trainers)}")
    for role, doc in roles:
        if role == "mock_trainer":
            todo = "capture the dry run of the real trainer"
            return BenchError(f"{doc.name} is a mock trainer, without a device program", where=doc.where, todo=todo)
        if role == "bench":
            return BenchError(f"{doc.name} is a bench already", where=doc.where, todo="give the launcher's dry run")
    return BenchError(
        "no trainer in this input (a JobSet whose client runs run_trainer_node.main)",
        where=where,
        todo=_failed_generator(launch) or "capture the launcher's whole dry run",
    )


def _failed_generator(launch: Render) -> str:
    """Return what the reader noted of a document without content, empty where it met none."""
    return next((note.partition(": ")[2] for note in launch.notes if "without content" in note), "")


def _check_shape(launch: Render, document: Document, path: tuple[str | int, ...]) -> None:
    """Refuse a trainer that is no JobSet of the form that launchers print, or whose end is missing."""
    pod = ("template", "spec", "template", "spec", "containers")
    if document.kind != "JobSet" or path[:2] != ("spec", "replicatedJobs") or path[3:-1] != pod:
        raise BenchError(
            f"the trainer runs in a {document.kind} of an unknown form", where=document.where, todo="expected a JobSet"
        )
    jobs = document.data["spec"]["replicatedJobs"]
    whole = document.name and all(pod_of(job) is not None and isinstance(job.get("name"), str) for job in jobs)
    in_last_line = document is launch.documents[-1] and not launch.ended  # a capture in a shell variable ends so, too
    if not whole or not _has_end(document.data["spec"], in_last_line):
        raise BenchError(
            f"the JobSet {document.name} was cut short", where=document.where, todo="capture the whole dry run"
        )
    for place, node in walk(document.data):
        form = _FORMS.get(place[-1]) if place else None
        if form is not None and not form(node):
            shown = ".".join(map(str, place))
            raise BenchError(f"{shown} of {document.name} is not of its kind", where=document.where, todo="mend it")


def _has_end(spec: dict[str, Any], in_last_line: bool) -> bool:
    """Return whether a trainer's spec has what every Pathways template ends with: the jobs that a success takes.

    Args:
      in_last_line: the stream ends without a line break, so that its last word may be half a word.
    """
    policy = spec.get("successPolicy")
    targets = policy.get("targetReplicatedJobs") if isinstance(policy, dict) else None
    if not in_last_line:
        return bool(targets) or len(spec["replicatedJobs"]) == 1
    last = list(spec)[-1] == "successPolicy" and isinstance(policy, dict) and list(policy)[-1] == "targetReplicatedJobs"
    names = [job["name"] for job in spec["replicatedJobs"]]
    return last and isinstance(targets, list) and bool(targets) and targets[-1] in names


def _all(kind: type, node: Any, key: str | None = None) -> bool:
    return isinstance(node, list) and all(
        isinstance(item, kind) and (key is None or isinstance(item.get(key), str)) for item in node
    )


def _is_strings(node: Any) -> bool:
    return node is None or (isinstance(node, dict) and all(isinstance(value, str) for value in node.values()))


def _is_count(node: Any) -> bool:
    return type(node) is int and node >= 0


# What the fields that a render reads or writes must be, as Kubernetes has them; null stands for absent.
_FORMS: dict[Any, Callable[[Any], bool]] = {
    **dict.fromkeys(("env", "containers", "initContainers"), lambda node: node is None or _all(dict, node, "name")),
    **dict.fromkeys(("args", "command"), lambda node: node is None or _all(str, node)),
    **dict.fromkeys(("labels", "annotations", "nodeSelector"), _is_strings),
    **dict.fromkeys(("failurePolicy", "coordinator", "network"), lambda node: node is None or isinstance(node, dict)),
    **dict.fromkeys(("replicas", "completions", "parallelism", "maxRestarts"), _is_count),
}


def pod_of(job: Any) -> dict[str, Any] | None:
    """Return the pod spec of a replicatedJob; None where it has none with a list of containers."""
    for key in ("template", "spec", "template", "spec"):
        job = job.get(key) if isinstance(job, dict) else None
    containers = job.get("containers") if isinstance(job, dict) else None
    return job if isinstance(containers, list) and all(isinstance(box, dict) for box in containers) else None


def container_name(container: dict[str, Any]) -> str:
    return str(container.get("name", ""))


def find_orchestrator(launch: Render, trainer: Client) -> Client | None:
    """Return the client of the orchestrator; None where the stream has none.

    Raises:
      BenchError: several, none of which is the one that the trainer looks for.
    """
    found = [(doc, path, box, script) for doc in _distinct(launch.documents)
             for path, box, script in client_containers(doc) if script_role(script) == "orchestrator"]  # fmt: skip
    parsed = [(doc, parse_client(box, path, script, doc.where)) for doc, path, box, script in found]
    if len(parsed) > 1:
        wanted = orchestrator_host(trainer)
        parsed = [(doc, client) for doc, client in parsed if client.flags.get("--discovery_id") == wanted]
    if len(parsed) == 1:
        return parsed[0][1]
    if found:
        names = ", ".join(doc.name for doc, *_ in found)
        raise BenchError(f"several orchestrators: {names}", where=found[0][0].where, todo="name one with --orch-render")
    return None


def orchestrator_host(trainer: Client) -> str:
    """Return the JobSet of the orchestrator that a trainer looks for; empty where it names none."""
    return (trainer.flags.get("--discovery_addrs") or "").partition(":")[0]


def orchestrator_argv(args: argparse.Namespace, launch: Render, trainer: Client) -> list[Word]:
    """Return the words of the orchestrator's argv, from the launch or from --orch-render; none for --orch-defaults.

    Raises:
      BenchError: no orchestrator where one was to be.
    """
    source = shown_name(args.launch_render)
    if args.orch_render is not None:
        source = shown_name(args.orch_render)
        if args.orch_render == args.launch_render == "-":
            raise BenchError("stdin cannot be both launch and orchestrator render", todo="save one to a file")
        launch = read_render(decode(read_bytes(args.orch_render, MAX_RENDER_BYTES), source), source)
    client = find_orchestrator(launch, trainer)
    if client is not None:
        return client.argv
    if args.orch_defaults and args.orch_render is None:
        return []
    todo = "name another capture with --orch-render, or take the defaults with --orch-defaults"
    failed = _failed_generator(launch)
    raise BenchError(
        "no orchestrator in this input, and its flags hold the loss options",
        where=source,
        todo=f"{failed} Else {todo}" if failed else todo,
    )


# --- from options to a plan -----------------------------------------------------------------------


# Option -> what its value looks like. Kubernetes: a namespace is an RFC 1123 label, a priority class a subdomain,
# and the queue a label's value.
_JOB_VALUES = {
    "image": (r"[!-~]+", "one word"),
    "output_directory": (r"[!-~]+", "one word"),
    "namespace": (r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", "lower-case letters, digits and hyphens"),
    "priority": (r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", "lower-case letters, digits, hyphens and points"),
    "queue": (r"[A-Za-z0-9]([\w.-]{0,61}[A-Za-z0-9])?", "at most 63 letters, digits, hyphens and points"),
}


def make_plan(args: argparse.Namespace, trainer: Trainer, launch: Render, input_sha256: str) -> Plan:
    """Return what is to be done, checked.

    Raises:
      BenchError: an option that is malformed or breaks a limit; a driver that cannot be read.
    """
    new_slice = parse_slice(args.slice) if args.slice else None
    check_name(args.name, trainer, launch, new_slice)
    edits = last_edits(parse_edit(option, text) for option, text in args.edits)
    check_options(args, edits)
    files = bench_script.embedded_files(args.driver)
    flags = driver_flags(args)
    if args.routing_load is not None:
        flag, extra = routing_load(args.routing_load)
        flags.append(flag)
        files = {**extra, **files}
    provenance = {
        "BENCH_INPUT_SHA256": input_sha256,
        "BENCH_DRIVER_SHA256": bench_script.sha256(files[bench_script.DRIVER_FILE]),
        "BENCH_FILES_SHA256": bench_script.files_sha256(files),
        "BENCH_RENDER_VERSION": RENDER_VERSION,
        "BENCH_RENDER_OPTIONS": options_json(args),
    }
    return Plan(
        name=args.name,
        old_name=trainer.document.name,
        edits=tuple(edits),
        slice=new_slice,
        image=args.image,
        namespace=args.namespace,
        queue=args.queue,
        priority=args.priority,
        output_directory=args.output_directory,
        load_checkpoint=args.load_checkpoint == "keep",
        sidecars_init=args.sidecars == "init",
        keep_secrets=frozenset(name.lstrip("-") for name in args.keep_secret),
        driver_flags=tuple(flags),
        files=files,
        provenance=tuple(provenance.items()),
    )


def check_options(args: argparse.Namespace, edits: Iterable[Edit]) -> None:
    """Refuse what is no name to Kubernetes, and options that contradict each other."""
    for option, (form, what) in _JOB_VALUES.items():
        value = getattr(args, option)
        if value is not None and not re.fullmatch(form, value):
            raise BenchError(f"--{option.replace('_', '-')} {value!r} is no name", todo=f"give {what}")
    loads = {("trainer-arg", CHECKPOINT_FLAG[2:]), *(("maxtext", key) for key in CHECKPOINT_KEYS)}
    loading = [edit for edit in edits if (edit.kind, edit.key) in loads and not edit.unset]
    if loading and args.load_checkpoint == "none":
        asked = f"--{loading[0].kind} {loading[0].key}"
        raise BenchError(f"--load-checkpoint none and {asked} contradict each other", todo="leave one out")


def check_name(name: str, trainer: Trainer, launch: Render, new_slice: Slice | None) -> None:
    """Refuse a name that is taken, or too long for what Kubernetes and JobSet make of it."""
    if not re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", name):
        raise BenchError(f"--name {name!r} is no name of a JobSet", todo="lower-case letters, digits and hyphens")
    for document in launch.documents:
        metadata = document.data.get("metadata")
        labels = metadata.get("labels") if isinstance(metadata, dict) else None
        gang = labels.get(GANG_LABEL) if isinstance(labels, dict) else None
        if name in (document.name, gang):
            what = document.kind if name == document.name else "gang"
            raise BenchError(f"--name {name} is a {what} of this launch", where=document.where, todo="choose another")
    if name == orchestrator_host(trainer.client):
        raise BenchError(f"--name {name} is the orchestrator of this launch", todo="choose another")
    spec = trainer.document.data["spec"]
    longest = {}
    coordinator = spec.get("coordinator")
    if isinstance(coordinator, dict):
        # JobSet's webhook checks the label it will put on every pod (validateCoordinatorLabelValue).
        host = (
            f"{{}}-{coordinator.get('replicatedJob')}-{coordinator.get('jobIndex', 0)}-{coordinator.get('podIndex', 0)}"
        )
        domain = (spec.get("network") or {}).get("subdomain")
        own = "{}" if domain in (None, trainer.document.name) else domain
        longest["coordinator label"] = f"{host}.{own}"
    for i, job in enumerate(spec["replicatedJobs"]):
        pods = job["template"]["spec"].get("completions", 1)
        if new_slice is not None and ("spec", "replicatedJobs", i) == trainer.workers:
            pods = new_slice.hosts
        longest[f"pods of {job['name']}"] = f"{{}}-{job['name']}-{job.get('replicas', 1) - 1}-{pods - 1}-abcde"
    for what, form in longest.items():
        places = form.count("{}")
        most = (LABEL_BYTES - len(form) + 2 * places) // places
        if len(name) > most:
            raise BenchError(
                f"--name {name} has {len(name)} characters, and the {what} ({form.format('NAME', 'NAME')},"
                f" at most {LABEL_BYTES}) leaves room for {most}",
                todo="choose a shorter one",
            )


_NAMES = {  # kind of edit -> what a name looks like
    "maxtext": r"[A-Za-z_]\w*",
    "libtpu": r"[A-Za-z_]\w*",
    "trainer-arg": r"[A-Za-z][\w-]*",
    "orch-arg": r"[A-Za-z][\w-]*",
    "env": r"[A-Za-z_][A-Za-z0-9_]*",
}


def parse_edit(option: str, text: str) -> Edit:
    """Return the edit of an option such as `--maxtext KEY=VALUE`.

    Raises:
      BenchError: malformed, or a thing that the bench decides itself.
    """
    kind, unset = option[2:].removesuffix("-unset"), option.endswith("-unset")
    name, equals, value = text.partition("=")
    key = name.strip() if kind in ("maxtext", "env") else name.strip().lstrip("-")
    shown = f"{name}={mask(key, value)}" if equals else name
    bare = kind in ("trainer-arg", "orch-arg")
    if not re.fullmatch(_NAMES[kind], key) or (unset and equals) or not (unset or equals or bare):
        form = "NAME" if unset else "NAME[=VALUE]" if bare else "NAME=VALUE"
        raise BenchError(f"{option} {shown!r} is not of the form {form}", todo=f"write {option} {form}")
    if re.search(r"[\x00-\x1f\x7f]", value) or (kind in ("maxtext", "libtpu") and re.search(r"\s", value)):
        raise BenchError(f"{option} {shown!r}: a value with a blank in it", todo="such a list is split at blanks")
    own = {"maxtext": {} if unset else OWN_KEYS, "trainer-arg": OWN_FLAGS, "env": OWN_ENV}.get(kind, {})
    if key in own:
        raise BenchError(f"{option} {key}: the bench sets this itself", todo=own[key])
    if kind == "trainer-arg" and RUN_FLAGS.fullmatch(f"--{key}"):
        raise BenchError(f"{option} {key} belongs to the RL run around the trainer", todo="leave it out")
    if kind == "env" and (key in (*bench_script.CARRIED, *bench_script.PROVENANCE) or key.startswith("BENCH_LIVE_")):
        raise BenchError(f"{option} {key}: the bench uses this name itself", todo="choose another")
    return Edit(kind, key, None if unset or not equals else value, unset)


def last_edits(edits: Iterable[Edit]) -> list[Edit]:
    """Return the edits that count: the last one of each kind and name, in the order of the first."""
    return list({(edit.kind, edit.key): edit for edit in edits}.values())


def driver_flags(args: argparse.Namespace) -> list[str]:
    """Return the driver's flags that were asked for, as text for the shell."""
    forms = {
        "steps": r"[1-9]\d*",
        "warmup": r"\d+",
        "micro_batches": r"[1-9]\d*",
        "seed": r"\d+",
        "profile": r"\d+:[1-9]\d*",
    }
    flags = []
    for option, form in forms.items():
        value = getattr(args, option)
        if value is None:
            continue
        name = f"--{option.replace('_', '-')}"
        if not re.fullmatch(form, value, re.ASCII):
            what = "FIRST:COUNT" if option == "profile" else "a whole number" + (" from 1" if "[1-9]" in form else "")
            raise BenchError(f"{name} {value!r} is not {what}", todo="mend the number")
        flags.append(f"{name}={value}")
    return flags + (["--stage-before-update"] if args.stage_before_update else [])


# Lines of a MaxText log that the driver takes a routing load from (bench_routing.py); logs are long.
_LOAD_LINE = re.compile(r"REQUIRED_RBF|moe_max_load_ratio")


def routing_load(spec: str) -> tuple[str, dict[str, str]]:
    """Return the driver's --routing-load flag, and the file that has to travel with it."""
    if not os.path.isfile(spec):
        if re.search(r"[/\x00-\x20]|\.(json|csv|log|txt)$", spec):
            raise BenchError(f"--routing-load {spec}: no such file", todo="name a file, a ratio, uniform or none")
        return f"--routing-load={bench_script.quote(spec)}", {}
    text = bench_script.read_source(spec)
    lines = [line for line in text.splitlines(keepends=True) if _LOAD_LINE.search(line)]
    ending = next((e for e in (".json", ".csv") if spec.endswith(e)), ".txt")
    name = f"routing_load{ending}"
    return f'--routing-load="$BENCH_DIR/{name}"', {name: "".join(lines) if lines and ending == ".txt" else text}


def options_json(args: argparse.Namespace) -> str:
    """Return the options that shape the output as JSON: no file names, so that stdin and file agree; no secrets."""
    left_out = ("launch_render", "orch_render", "out", "quiet", "driver", "edits")
    unset = (None, False, [], "keep")
    options: dict[str, Any] = {k: v for k, v in vars(args).items() if k not in left_out and v not in unset}
    if args.routing_load is not None and os.path.isfile(args.routing_load):
        options["routing_load"] = os.path.basename(args.routing_load)
    if args.edits:
        options["edits"] = [[option, _masked(text)] for option, text in args.edits]
    return json.dumps(options, ensure_ascii=True)


def _masked(text: str) -> str:
    name, equals, value = text.partition("=")
    return name + equals + mask(name, value)


def check_trainer(trainer: Trainer, plan: Plan) -> None:
    """Refuse a trainer that is not MaxText's, and a mesh that no longer fits the slice it was changed with."""
    flags = flag_values(trainer_words(trainer.client, plan))
    backend = flags.get("--trainer_backend", "maxtext")
    if backend != "maxtext":
        raise BenchError(
            f"trainer {trainer.document.name} has --trainer_backend={backend}, and this bench runs MaxText's",
            where=trainer.document.where,
            todo="render a launch with TRAINER_BACKEND=maxtext",
        )
    original = trainer.client.flags.get(OUTPUT_FLAG)
    if original and output_directory(trainer.client, plan).rstrip("/") == original.rstrip("/"):
        raise BenchError(f"--output-directory {original} is the launch's own", todo="choose another")
    touched = plan.slice is not None or any(edit.key.startswith(("mesh_", "ici_")) for edit in plan.edits)
    problem = mesh_problem(trainer, plan)
    if touched and problem:
        raise BenchError(problem, todo="set --slice and the --trainer-arg mesh_* together")


def mesh_problem(trainer: Trainer, plan: Plan) -> str | None:
    """Return why the mesh of the bench does not fit its slice; None where it does, or where that is unknown."""
    flags = flag_values(trainer_words(trainer.client, plan))
    mesh = mesh_devices(flags, maxtext_keys(trainer.client, plan))
    try:
        here = plan.slice or parse_slice(slice_of(trainer.document) or "")
    except BenchError:
        return None
    if mesh is None or (here.devices % mesh[0] == 0 if mesh[1] else here.devices == mesh[0]):
        return None
    per_chip = here.tpu.devices_per_chip
    return (
        f"the mesh has {mesh[0]} devices, and {here} has {here.devices} JAX devices"
        f" ({here.chips} chips, {per_chip} per chip)"
    )
