"""What a bench changes in a trainer JobSet: the plan, and the first pass that carries it out.

A `Plan` holds everything that was asked for; `render` applies it to a copy of the trainer's document.
That nothing else changed is checked by render_check.py, which derives it from the plan anew.
"""

from __future__ import annotations

import copy
import posixpath
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import bench_script
from bench_common import BenchError, is_secret
from launch_render import Client, Document, Word, kube_escape, list_tokens, slice_of, walk
from render_slice import Slice, orchestrator_topology, set_slice, topology_of

GANG_LABEL = "scheduling.x-k8s.io/gang-id"
KUEUE_PREFIX = "kueue.x-k8s.io/"
QUEUE_LABEL = f"{KUEUE_PREFIX}queue-name"
JOBSET_LABEL = "jobset.sigs.k8s.io/jobset-name"
WORKER_CONTAINER = "pathways-worker"
PROXY_CONTAINER = "pathways-proxy"

# Trainer flags that tie a process to the RL run around it: the orchestrator's address and weight sync.
RUN_FLAGS = re.compile(r"--(no-)?(discovery|weight_sync|raiden)_\w+")
CHECKPOINT_FLAG = "--maxtext_ckpt_path"
CHECKPOINT_KEYS = ("load_parameters_path", "load_full_state_path")  # MaxText's names for the same
OUTPUT_FLAG = "--maxtext_output_directory"
TOPOLOGY_FLAG = "--tpu_topology"  # of the orchestrator: the slices of trainer and rollout
# Flags of the proxy itself in the container's args; all others there are compiler flags.
PROXY_FLAGS = ("server_port", "resource_manager_address", "gcs_scratch_location", "temporary_flags_for_debugging")
WORKER_ONLY = ("megascale_", "xprof_")  # launchers give these to the workers alone


class Edit(NamedTuple):
    """One asked-for change of a list of flags, keys or variables."""

    kind: str  # maxtext, libtpu, trainer-arg, orch-arg, env
    key: str
    value: str | None  # None: a flag without a value
    unset: bool = False


class Plan(NamedTuple):
    """What was asked for, checked."""

    name: str
    old_name: str
    edits: tuple[Edit, ...] = ()
    slice: Slice | None = None
    image: str | None = None
    namespace: str | None = None
    queue: str | None = None
    priority: str | None = None
    output_directory: str | None = None  # None: a folder beside the original
    load_checkpoint: bool = True
    sidecars_init: bool = False
    keep_secrets: frozenset[str] = frozenset()
    driver_flags: tuple[str, ...] = ()  # as text for the shell
    files: dict[str, str] = {}
    provenance: tuple[tuple[str, str], ...] = ()

    def of_kind(self, kind: str) -> list[Edit]:
        return [edit for edit in self.edits if edit.kind == kind]

    def drops(self, name: str) -> bool:
        """Return whether a variable or flag of this name is a secret that must not travel."""
        if not is_secret(name):
            return False
        bare = name.lstrip("-")
        return bare not in self.keep_secrets and not any(edit.key == bare and not edit.unset for edit in self.edits)


class Trainer(NamedTuple):
    """The trainer of a launch, and where its parts are."""

    document: Document
    client: Client
    head: tuple[str | int, ...]  # path of the replicatedJob with the client
    workers: tuple[str | int, ...]  # path of the replicatedJob with the TPU workers


def at(node: Any, path: Iterable[str | int]) -> Any:
    """Return what stands at a path that is known to exist."""
    for key in path:
        node = node[key]
    return node


def render(trainer: Trainer, orch_argv: Sequence[Word], plan: Plan) -> dict[str, Any]:
    """Return the bench JobSet: a copy of the trainer's document with the plan carried out.

    Raises:
      BenchError: something asked for cannot be carried out.
    """
    document = copy.deepcopy(trainer.document.data)
    _rename(document, plan)  # before the edits: a value that was asked for stays what it is
    container = at(document, trainer.client.path)
    libtpu = _LibtpuEdits(document, trainer, plan)
    container["command"][-1] = bench_script.compose(
        plan.files,
        bench_script.Startup(
            assignments=_assignments(trainer.client, plan, libtpu.client_raw()),
            trainer_argv=trainer_words(trainer.client, plan),
            orch_argv=orch_words(orch_argv, trainer, plan),
            provenance=plan.provenance,
            flags=plan.driver_flags,
            python=trainer.client.program[0].raw,
        ),
    )
    libtpu.edit_containers()
    if plan.image is not None:
        container["image"] = plan.image
    if isinstance(container.get("env"), list):
        container["env"] = [entry for entry in container["env"] if not plan.drops(entry.get("name", ""))]
    _set_restarts(document)
    _set_scheduling(document, plan)
    if plan.slice is not None:
        set_slice(document, trainer.workers, topology_of(trainer.document), plan.slice)
    if plan.sidecars_init:
        _move_sidecars(document, trainer)
    return document


def _rename(document: dict[str, Any], plan: Plan) -> None:
    document["metadata"]["name"] = plan.name
    for path, value in list(walk(document)):
        if path[-1:] == (GANG_LABEL,) or (value == plan.old_name and carries_name(document, path)):
            at(document, path[:-1])[path[-1]] = plan.name
        elif isinstance(value, str) and value.endswith(f"={plan.old_name}") and path[-2:-1] == ("args",):
            at(document, path[:-1])[path[-1]] = value[: -len(plan.old_name)] + plan.name


def carries_name(document: dict[str, Any], path: tuple[str | int, ...]) -> bool:
    """Return whether a JobSet's own name is meant where it stands as the whole value at a path."""
    if len(path) < 2:
        return False
    if path[-2] == "values":  # of a selector's expression: of pods by their labels, or of nodes by theirs
        return at(document, path[:-2]).get("key") == JOBSET_LABEL or "labelSelector" in path
    if path[-2] in ("labels", "matchLabels"):
        return not str(path[-1]).startswith(KUEUE_PREFIX)
    return path[-1] == JOBSET_LABEL or path[-2:] == ("network", "subdomain") or (path[-1] == "value" and "env" in path)


def _set_restarts(document: dict[str, Any]) -> None:
    policy = document["spec"].get("failurePolicy")
    if not isinstance(policy, dict):
        policy = document["spec"]["failurePolicy"] = {}
    policy["maxRestarts"] = 0


def _set_scheduling(document: dict[str, Any], plan: Plan) -> None:
    metadata = document["metadata"]
    if plan.namespace is not None:
        metadata["namespace"] = plan.namespace
    if plan.queue is not None:
        if not isinstance(metadata.get("labels"), dict):
            metadata["labels"] = {}
        metadata["labels"][QUEUE_LABEL] = plan.queue
    if plan.priority is not None:
        for job in document["spec"]["replicatedJobs"]:
            job["template"]["spec"]["template"]["spec"]["priorityClassName"] = plan.priority


def _move_sidecars(document: dict[str, Any], trainer: Trainer) -> None:
    """Make every container beside the client a native sidecar, which ends with it."""
    pod = at(document, trainer.client.path[:-2])
    others = [c for i, c in enumerate(pod["containers"]) if i != trainer.client.path[-1]]
    for container in others:
        container["restartPolicy"] = "Always"
    pod["containers"] = [pod["containers"][trainer.client.path[-1]]]
    pod["initContainers"] = [*(pod.get("initContainers") or []), *others]
    if not pod["initContainers"]:
        del pod["initContainers"]


# --- lists of flags, keys and variables -----------------------------------------------------------

Item = TypeVar("Item")


def edit_list(
    items: Iterable[Item], edits: Iterable[Edit], key_of: Callable[[Item], str], make: Callable[[Edit], Item]
) -> list[Item]:
    """Apply edits in order: the last item of a key is replaced in place, a new key is appended, `unset` takes all."""
    keyed = [(key_of(item), item) for item in items]
    for edit in edits:
        places = [i for i, (key, _) in enumerate(keyed) if key == edit.key]
        if edit.unset:
            keyed = [pair for pair in keyed if pair[0] != edit.key]
        elif places:
            keyed[places[-1]] = (edit.key, make(edit))
        else:
            keyed.append((edit.key, make(edit)))
    return [item for _, item in keyed]


def flag_of(word: Word) -> str:
    """Return the name of a `--flag=value` word without its dashes."""
    return word.text.partition("=")[0].removeprefix("--")


def flag_values(words: Iterable[Word]) -> dict[str, str]:
    """Return `--flag` -> value as argparse sees them, the last one winning; empty for a bare flag."""
    return {f"--{flag_of(word)}": word.value.partition("=")[2] for word in words}


def _flag(edit: Edit) -> Word:
    text = f"--{edit.key}" if edit.value is None else f"--{edit.key}={edit.value}"
    return Word(kube_escape(shlex.quote(text)), kube_escape(text))


def trainer_words(client: Client, plan: Plan) -> list[Word]:
    """Return the argv that the driver is to run with."""
    words = [word for word in client.argv if not RUN_FLAGS.fullmatch(f"--{flag_of(word)}")]
    words = [word for word in words if not plan.drops(flag_of(word))]
    return edit_list(words, [*own_edits(client, plan), *plan.of_kind("trainer-arg")], flag_of, _flag)


def orch_words(argv: Sequence[Word], trainer: Trainer, plan: Plan) -> list[Word]:
    """Return the orchestrator's argv that the bench carries; its --tpu_topology follows --slice.

    Raises:
      BenchError: a word that bash was to expand in the orchestrator's container, whose variables the bench lacks.
    """
    words = [word for word in argv if not plan.drops(flag_of(word))]
    words = edit_list(words, [*own_orch_edits(words, trainer, plan), *plan.of_kind("orch-arg")], flag_of, _flag)
    live = next((word for word in words if word.live), None)
    if live is not None:
        raise BenchError(
            f"the orchestrator's {live.raw!r} is known only when its own pod runs",
            todo=f"give its value with --orch-arg {flag_of(live)}=VALUE, or --orch-arg-unset {flag_of(live)}",
        )
    return words


def own_orch_edits(words: Iterable[Word], trainer: Trainer, plan: Plan) -> list[Edit]:
    """Return the edits of the orchestrator's argv that --slice brings along."""
    text = flag_values(words).get(TOPOLOGY_FLAG)
    if plan.slice is None or text is None:
        return []
    followed = orchestrator_topology(text, slice_of(trainer.document), plan.slice)
    return [Edit("orch-arg", TOPOLOGY_FLAG[2:], followed)] if followed != text else []


def own_edits(client: Client, plan: Plan) -> list[Edit]:
    """Return the edits of the trainer's argv that make a run the bench's own: name, output, no saving."""
    flags = client.flags
    edits = [Edit("trainer-arg", flag[2:], plan.name) for flag, value in flags.items() if value == plan.old_name]
    edits.append(Edit("trainer-arg", "worker_id", plan.name))
    directory = output_directory(client, plan)
    if directory is not None:
        edits.append(Edit("trainer-arg", OUTPUT_FLAG[2:], directory))
    if any(flag.startswith(("--checkpoint_", "--trainer_backend")) for flag in flags):
        edits.append(Edit("trainer-arg", "checkpoint_save_interval_steps", "0"))
    if not plan.load_checkpoint:
        edits.append(Edit("trainer-arg", CHECKPOINT_FLAG[2:], None, unset=True))
    return edits


def own_maxtext_edits(client: Client, plan: Plan, keys: Iterable[str]) -> list[Edit]:
    """Return the same for MAXTEXT_EXTRA_FLAGS, which overrule the argv, where it has such keys."""
    wanted = {"run_name": plan.name, "enable_checkpointing": "false"}
    directory = output_directory(client, plan)
    if directory is not None:
        wanted["base_output_directory"] = directory
    edits = []
    for key in dict.fromkeys(keys):
        if key in wanted:
            edits.append(Edit("maxtext", key, wanted[key]))
        elif plan.drops(key) or (key in CHECKPOINT_KEYS and not plan.load_checkpoint):
            edits.append(Edit("maxtext", key, None, unset=True))
    return edits


def output_directory(client: Client, plan: Plan) -> str | None:
    """Return where the bench writes: as asked, else `bench/NAME` beside the original; None where there is none."""
    if plan.output_directory is not None:
        return plan.output_directory
    words = [word for word in client.argv if f"--{flag_of(word)}" == OUTPUT_FLAG]
    original = words[-1].value.partition("=")[2].rstrip("/") if words else ""
    if not original:
        return None
    if words[-1].live:
        raise BenchError(
            f"the output directory {original!r} is known only when the pod runs", todo="give --output-directory"
        )
    scheme, separator, path = original.rpartition("://")
    parent = posixpath.dirname(path) or (path if separator else "")
    return f"{scheme}{separator}{posixpath.join(parent, 'bench', plan.name)}"


def _assignments(client: Client, plan: Plan, libtpu: str | None) -> list[tuple[str, str]]:
    """Return (name, text for the shell) of the environment that the driver is to run with."""
    items = [
        (name, plan.name if word.value == plan.old_name else word.raw)
        for name, word in client.assignments
        if not plan.drops(name)
    ]
    edits = [edit._replace(value=bench_script.quote(edit.value or "")) for edit in plan.of_kind("env")]
    raw = maxtext_raw(client, plan)
    carried = {"MAXTEXT_EXTRA_FLAGS": raw, "LIBTPU_INIT_ARGS": libtpu}
    edits += [Edit("env", name, text) for name, text in carried.items() if text is not None]
    return edit_list(items, edits, lambda item: item[0], lambda edit: (edit.key, edit.value or ""))


def last_word(client: Client, name: str) -> Word | None:
    """Return the assignment of a name that counts, else the container's own variable as a word; None for neither."""
    for key, word in reversed(client.assignments):
        if key == name:
            return word
    entry = _env_entry(client.container, name)
    text = _value_of(entry)
    return Word(f"'{text}'", text, live="$(" in text.replace("$$", "")) if entry is not None else None


def variable(client: Client, name: str) -> str:
    """Return the value of a variable as the program sees it; empty where it is not set."""
    word = last_word(client, name)
    return word.value if word is not None else ""


def maxtext_keys(client: Client, plan: Plan) -> dict[str, str]:
    """Return the keys of MAXTEXT_EXTRA_FLAGS that the bench runs with, the last one of a name winning."""
    tokens = [token.partition("=") for token in variable(client, "MAXTEXT_EXTRA_FLAGS").split()]
    items = [(key, value) for key, _, value in tokens]
    edits = _maxtext_edits(client, plan)
    return dict(edit_list(items, edits, lambda item: item[0], lambda edit: (edit.key, edit.value or "")))


def _maxtext_edits(client: Client, plan: Plan) -> list[Edit]:
    word = last_word(client, "MAXTEXT_EXTRA_FLAGS")
    keys = [token.partition("=")[0] for token in (word.text.split() if word else ())]
    return [*own_maxtext_edits(client, plan, keys), *plan.of_kind("maxtext")]


def maxtext_raw(client: Client, plan: Plan) -> str | None:
    """Return the new text of MAXTEXT_EXTRA_FLAGS, None where it stays as it is."""
    word = last_word(client, "MAXTEXT_EXTRA_FLAGS")
    edits = _maxtext_edits(client, plan)
    return edit_tokens("MAXTEXT_EXTRA_FLAGS", word, edits, lambda edit: f"{edit.key}={edit.value}") if edits else None


def edit_tokens(name: str, word: Word | None, edits: Iterable[Edit], write: Callable[[Edit], str]) -> str:
    """Return the shell text of a blank-separated list with the edits applied; what is live in it stays as written."""

    def key_of(token: str) -> str:
        return token.partition("=")[0].lstrip("-")

    if word is None or not word.live:
        tokens = edit_list(word.value.split() if word else [], edits, key_of, write)
        single = word is not None and word.raw.startswith("'")
        return _single(" ".join(tokens)) if single else bench_script.quote(" ".join(tokens))
    match = re.fullmatch(r"""(["'])([^"'\\]*)\1""", word.raw)
    if match is None:
        raise BenchError(
            f"{name} mixes quotes and what bash expands, and cannot be edited",
            todo="write it in one pair of quotes in the launcher",
        )
    quote, text = match.groups()
    escape = (lambda t: re.sub(r'(["\\`$])', r"\\\1", t)) if quote == '"' else (lambda t: t.replace("'", "'\"'\"'"))
    tokens = edit_list(list_tokens(text), edits, key_of, lambda edit: kube_escape(escape(write(edit))))
    return quote + " ".join(tokens) + quote


def _single(text: str) -> str:
    quoted = shlex.quote(text)
    return kube_escape(quoted if quoted.startswith("'") else f"'{quoted}'")


# --- libtpu flags: three carriers -----------------------------------------------------------------


def libtpu_carriers(flag: str, holders: set[str]) -> set[str]:
    """Return which of client, worker and proxy a libtpu flag belongs to, given which hold it already.

    The proxy compiles under Pathways and takes the --xla_ flags; the client's and the workers'
    LIBTPU_INIT_ARGS hold the same and more.
    """
    if flag.startswith("xla_"):
        return {"client", "worker", "proxy"}
    if holders:
        return holders
    return {"worker"} if flag.startswith(WORKER_ONLY) else {"client", "worker"}


def libtpu_name(token: str) -> str:
    """Return the name of a `--flag=value` token."""
    return token.partition("=")[0].lstrip("-")


class _LibtpuEdits:
    """The libtpu edits of a plan, spread over the carriers of one document."""

    def __init__(self, document: dict[str, Any], trainer: Trainer, plan: Plan):
        self.client_word = last_word(trainer.client, "LIBTPU_INIT_ARGS")
        self.worker = _container(at(document, trainer.workers), WORKER_CONTAINER)
        self.proxy = _container(at(document, trainer.head), PROXY_CONTAINER)
        worker_entry = _env_entry(self.worker, "LIBTPU_INIT_ARGS")
        self.held = {
            "client": {libtpu_name(token) for token in variable(trainer.client, "LIBTPU_INIT_ARGS").split()},
            "worker": {libtpu_name(token) for token in _value_of(worker_entry).split()},
            "proxy": {libtpu_name(a) for a in self.proxy.get("args") or [] if isinstance(a, str)} - set(PROXY_FLAGS),
        }
        self.edits = plan.of_kind("libtpu")

    def _of(self, carrier: str) -> list[Edit]:
        return [
            edit
            for edit in self.edits
            if carrier in libtpu_carriers(edit.key, {c for c, flags in self.held.items() if edit.key in flags})
        ]

    def client_raw(self) -> str | None:
        """Return the new text of the client's LIBTPU_INIT_ARGS assignment, None where it stays as it is."""
        edits = self._of("client")
        if not edits or (self.client_word is None and all(edit.unset for edit in edits)):
            return None
        return edit_tokens("LIBTPU_INIT_ARGS", self.client_word or Word("''", ""), edits, _libtpu_token)

    def edit_containers(self) -> None:
        """Edit the workers' LIBTPU_INIT_ARGS and the proxy's args, in place."""
        edits = [edit._replace(value=kube_escape(edit.value or "")) for edit in self._of("worker")]
        entry = _env_entry(self.worker, "LIBTPU_INIT_ARGS")
        if edits and (entry is not None or not all(edit.unset for edit in edits)):
            if entry is None:
                entry = _add_env(self.worker, "LIBTPU_INIT_ARGS")
            entry["value"] = " ".join(_edit_before(_value_of(entry).split(), edits, WORKER_ONLY))
        edits = [edit._replace(value=kube_escape(edit.value or "")) for edit in self._of("proxy")]
        if edits:
            self.proxy["args"] = _edit_before(list(self.proxy.get("args") or []), edits, ("sidecar_name",))


def _libtpu_token(edit: Edit) -> str:
    return f"--{edit.key}={edit.value}"


def _edit_before(tokens: list[str], edits: Iterable[Edit], last: tuple[str, ...]) -> list[str]:
    """Edit a list of flags; new ones go before those that launchers put last."""
    known = {libtpu_name(token) for token in tokens}
    edited = edit_list(tokens, edits, libtpu_name, _libtpu_token)
    new = [token for token in edited if libtpu_name(token) not in known]
    old = [token for token in edited if libtpu_name(token) in known]
    place = next((i for i, token in enumerate(old) if libtpu_name(token).startswith(last)), len(old))
    return old[:place] + new + old[place:]


def _container(job: dict[str, Any], name: str) -> dict[str, Any]:
    pod = job["template"]["spec"]["template"]["spec"]
    for container in (pod.get("initContainers") or []) + pod["containers"]:
        if container.get("name") == name:
            return container
    return {}


def _env_entry(container: dict[str, Any], name: str) -> dict[str, Any] | None:
    return next((entry for entry in reversed(container.get("env") or []) if entry.get("name") == name), None)


def _value_of(entry: dict[str, Any] | None) -> str:
    value = entry.get("value") if entry else None
    return value if isinstance(value, str) else ""


def _add_env(container: dict[str, Any], name: str) -> dict[str, Any]:
    """Add a variable where launchers put theirs: after the constants, before what the pod's fields give."""
    env = container["env"] = container.get("env") or []
    place = next((i for i, entry in enumerate(env) if "valueFrom" in entry), len(env))
    env.insert(place, {"name": name, "value": ""})
    return env[place]
