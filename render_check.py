"""The renderer's second pass: what differs between the trainer and its bench, and was each change asked for?

`changes` reads the finished YAML back, lays both JobSets out as flat paths (list items by their name,
flags by theirs), works out from the plan what each path must hold, and refuses any other difference.
It shares the plan with the first pass, and the tables of what belongs where, but none of the editing.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import bench_script
from bench_common import BenchError, mask
from launch_render import (
    ARCHIVE_FILE,
    Client,
    Word,
    client_containers,
    flag_items,
    kube_escape,
    list_tokens,
    parse_client,
    read_render,
)
from render_edit import (
    CHECKPOINT_FLAG,
    CHECKPOINT_KEYS,
    GANG_LABEL,
    OUTPUT_FLAG,
    PROXY_CONTAINER,
    PROXY_FLAGS,
    QUEUE_LABEL,
    RUN_FLAGS,
    WORKER_CONTAINER,
    Plan,
    Trainer,
    at,
    carries_name,
    libtpu_carriers,
    output_directory,
    own_orch_edits,
    variable,
)
from render_slice import slice_value, topology_of

Path = tuple[str, ...]
Real = tuple[str | int, ...]  # a path of the trainer's own document
Flat = dict[Path, tuple[Any, Real]]
Flattened = tuple[Flat, dict[Path, list[str]]]  # and the order of what is in each mapping and list


class Change(NamedTuple):
    """One difference between the trainer and its bench, as the summary shows it, secrets masked."""

    where: str
    old: str | None  # None: was not there
    new: str | None


class _Missing:
    def __repr__(self) -> str:
        return "(absent)"


MISSING: Any = _Missing()
ANY: Any = object()  # a value that another check looks into


def changes(trainer: Trainer, orch_argv: Sequence[Word], plan: Plan, text: str) -> list[Change]:
    """Compare the trainer with the rendered bench.

    Args:
      text: the finished YAML.

    Returns:
      Every difference, in the order of the bench's fields.

    Raises:
      BenchError: a difference that the plan does not explain, or a change of the plan that is not there.
    """
    documents = read_render(text, "the rendered JobSet").documents
    _require(len(documents) == 1, "the output is not one document")
    bench = documents[0].data
    path = (*trainer.client.path[:-1], 0) if plan.sidecars_init else trainer.client.path
    clients = list(client_containers(documents[0]))
    _require([place for place, *_ in clients] == [path], "the client is not in its place")
    client = parse_client(clients[0][1], path, clients[0][2], "the rendered JobSet")
    old = _flatten(trainer.document.data, trainer.client.path if plan.sidecars_init else None)
    new = _flatten(bench, None)
    found = _document_changes(old, new, trainer, plan)
    held, after = _libtpu_held(old[0], trainer.client), _libtpu_held(new[0], client)
    for carrier in held:
        # The containers' fields are in the list already; this looks into them, flag by flag.
        flags = _check_map(held[carrier], after[carrier], _wanted_libtpu(carrier, held, plan), f"{carrier} libtpu flag")
        found += flags if carrier != "proxy" else []
    if plan.sidecars_init:
        found += _moved(trainer)
    return found + _client_changes(trainer, client, orch_argv, plan)


def _moved(trainer: Trainer) -> list[Change]:
    """Return the change of place of the containers beside the client (`_flatten` has put them there in the old one)."""
    pod, place = at(trainer.document.data, trainer.client.path[:-2]), trainer.client.path[-1]
    names = [box.get("name") for i, box in enumerate(pod["containers"]) if i != place]
    return [Change(f"sidecar {name}", "containers", "initContainers") for name in names]


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise BenchError(f"internal error: {what}", todo="nothing was printed; please report it")


def _name_path(path: Path) -> str:
    return "".join(part if part[:1] == "[" else f".{part}" for part in path).lstrip(".")


def _show(path: Path, value: Any) -> str | None:
    """Return a value for a message, masked where what it belongs to is a secret."""
    if value is MISSING:
        return None
    owner = path[-2] if path[-1] == "value" and len(path) > 1 else path[-1]
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return mask(owner.strip("[]"), text)


# --- the document ---------------------------------------------------------------------------------


def _document_changes(old: Flattened, new: Flattened, trainer: Trainer, plan: Plan) -> list[Change]:
    found = []
    for path in dict.fromkeys([*new[0], *old[0]]):
        before, real = old[0].get(path, (MISSING, ()))
        after, _ = new[0].get(path, (MISSING, ()))
        want = _wanted(path, before, real, trainer, plan)
        if want is not ANY and (type(want) is not type(after) or want != after):
            _require(False, f"{_name_path(path)} is not as asked ({_show(path, before)} -> {_show(path, after)})")
        flag_by_flag = path[-2:-1] == ("command",) or "[LIBTPU_INIT_ARGS]" in path
        if before != after and before not in _MARKS and after not in _MARKS and not flag_by_flag:
            found.append(Change(_name_path(path), _show(path, before), _show(path, after)))
    for path, keys in new[1].items():
        was = [key for key in old[1].get(path, ()) if key in keys]
        _require([key for key in keys if key in was] == was, f"the order of {_name_path(path)} changed")
    return found


_MARKS = ("{}", "[]")  # what `_flatten` puts at the path of a mapping and of a list


def _flatten(document: dict[str, Any], moving: Real | None) -> Flattened:
    """Return path -> (value, real path), and path -> the order of what is in it, for every node of a document.

    Args:
      moving: path of a client whose neighbours are to be seen among the init containers; None moves nothing.
    """
    flat: Flat = {}
    order: dict[Path, list[str]] = {}

    def visit(node: Any, path: Path, real: Real) -> None:
        if not isinstance(node, dict | list):
            flat[path] = (node, real)
            return
        flat.setdefault(path, ("{}" if isinstance(node, dict) else "[]", real))
        names = [_segment(key) for key in node] if isinstance(node, dict) else _item_names(node, path)
        for name, (key, item) in zip(names, node.items() if isinstance(node, dict) else enumerate(node), strict=True):
            place = path
            if moving is not None and real == moving[:-1] and key != moving[-1]:
                place = (*path[:-1], "initContainers")
                flat.setdefault(place, ("[]", real))
            order.setdefault(place, []).append(name)
            is_flag = path[-1:] == ("args",) and isinstance(item, str) and "=" in item
            visit(item.partition("=")[2] if is_flag else item, (*place, name), (*real, key))

    visit(document, (), ())
    del flat[()]  # the document itself
    return flat, order


def _segment(key: Any) -> str:
    text = str(key)
    return text if text.isidentifier() else f"[{text}]"


def _item_names(items: list[Any], path: Path) -> list[str]:
    """Name the items of a list: by their `name`, by their flag, else by position; repeats get a number."""
    seen: dict[str, int] = {}
    names = []
    for i, item in enumerate(items):
        name = str(i)
        if isinstance(item, dict) and isinstance(item.get("name"), str):
            name = item["name"]
        elif isinstance(item, str) and item.startswith("--") and path[-1:] == ("args",):
            name = item.partition("=")[0]
        seen[name] = seen.get(name, 0) + 1
        names.append(f"[{name}]" if seen[name] == 1 else f"[{name}#{seen[name]}]")
    return names


def _wanted(path: Path, before: Any, real: Real, trainer: Trainer, plan: Plan) -> Any:
    """Return what a path of the bench must hold: MISSING for nothing, ANY where another check looks."""
    labels = ("metadata", "labels")
    fixed: dict[Path, Any] = {
        ("metadata", "name"): plan.name,
        ("spec", "failurePolicy"): "{}",
        ("spec", "failurePolicy", "maxRestarts"): 0,
    }
    if before is not MISSING and path[-1] == f"[{GANG_LABEL}]":
        return plan.name
    if plan.queue is not None:
        fixed |= {labels: "{}", (*labels, f"[{QUEUE_LABEL}]"): plan.queue}
    if plan.namespace is not None:
        fixed[("metadata", "namespace")] = plan.namespace
    if path in fixed:
        return fixed[path]
    if plan.priority is not None and path[-2:] == ("spec", "priorityClassName"):
        return plan.priority
    if plan.of_kind("libtpu") and _carries_libtpu(path):
        return ANY
    if plan.sidecars_init and path[-3:-2] == ("initContainers",) and path[-1] == "restartPolicy":
        return "Always"
    return MISSING if before is MISSING else _wanted_of_old(path, before, real, trainer, plan)


def _wanted_of_old(path: Path, before: Any, real: Real, trainer: Trainer, plan: Plan) -> Any:
    """Return the same for a path that the trainer's document has, too."""
    client = trainer.client
    if real[: len(client.path)] == client.path:
        inside = real[len(client.path) :]
        if inside == ("command", len(client.container["command"]) - 1):
            return ANY
        if inside == ("image",) and plan.image is not None:
            return plan.image
        if (
            inside[:1] == ("env",)
            and len(inside) > 1
            and plan.drops(client.container["env"][inside[1]].get("name", ""))
        ):
            return MISSING
    if before == plan.old_name and (carries_name(trainer.document.data, real) or path[-2:-1] == ("args",)):
        return plan.name
    if plan.slice is not None:
        want = slice_value(
            real, at(trainer.document.data, real), trainer.workers, topology_of(trainer.document), plan.slice
        )
        if want is not None:
            return want.partition("=")[2] if path[-2:-1] == ("args",) else want
    return before


def _carries_libtpu(path: Path) -> bool:
    """Return whether a path is a carrier of libtpu flags in the workers' or the proxy's container."""
    if f"[{WORKER_CONTAINER}]" in path:
        return "[LIBTPU_INIT_ARGS]" in path or path[-1] == "env"
    if f"[{PROXY_CONTAINER}]" not in path:
        return False
    return path[-1] == "args" or (path[-2] == "args" and _flag_name(path[-1]) not in PROXY_FLAGS)


def _flag_name(segment: str) -> str:
    return segment.strip("[]-").partition("#")[0]


def _libtpu_held(flat: Flat, client: Client) -> dict[str, dict[str, Any]]:
    """Return carrier -> flag -> value of a document; the client's as its program sees them, the others as written."""
    env = {path[-4]: value for path, (value, _) in flat.items() if path[-2:] == ("[LIBTPU_INIT_ARGS]", "value")}
    proxy = {}
    for path, (value, _) in flat.items():
        if f"[{PROXY_CONTAINER}]" in path and path[-2] == "args" and _flag_name(path[-1]) not in PROXY_FLAGS:
            proxy[_flag_name(path[-1])] = None if str(value).startswith("--") else value
    return {
        "client": _flag_map(variable(client, "LIBTPU_INIT_ARGS")),
        "worker": _flag_map(env.get(f"[{WORKER_CONTAINER}]", "")),
        "proxy": proxy,
    }


def _flag_map(text: Any) -> dict[str, str | None]:
    return {name.lstrip("-"): value for name, value in flag_items(list_tokens(str(text)))}


def _wanted_libtpu(carrier: str, held: Mapping[str, Mapping[str, Any]], plan: Plan) -> dict[str, Any]:
    wanted = {}
    for edit in plan.of_kind("libtpu"):
        if carrier in libtpu_carriers(edit.key, {c for c, flags in held.items() if edit.key in flags}):
            value = edit.value if carrier == "client" else kube_escape(edit.value or "")
            wanted[edit.key] = MISSING if edit.unset else value
    return wanted


def _check_map(old: Mapping[str, Any], new: Mapping[str, Any], wanted: Mapping[str, Any], what: str) -> list[Change]:
    """Check that `new` is `old` with `wanted` put into it, in the same order; return the differences."""

    def show(key: str, value: Any) -> str | None:
        return None if value is MISSING else mask(key, value) if isinstance(value, str) else "(bare)"

    found = []
    for key in dict.fromkeys([*old, *new, *wanted]):
        before, after = old.get(key, MISSING), new.get(key, MISSING)
        if wanted.get(key, before) != after:
            _require(False, f"{what} {key} is not as asked ({show(key, before)} -> {show(key, after)})")
        if before != after:
            found.append(Change(f"{what} {key}", show(key, before), show(key, after)))
    same = [key for key in old if key in new] == [key for key in new if key in old]
    _require(same, f"the order of the {what}s changed")
    return found


# --- the client -----------------------------------------------------------------------------------


def _client_changes(trainer: Trainer, new: Client, orch_argv: Sequence[Word], plan: Plan) -> list[Change]:
    old = trainer.client
    _require(new.is_bench, "the client does not run the driver")
    _require(new.sources == plan.files, "the embedded files are not what was read")
    _require(new.before.startswith(bench_script.HEAD), "the wrapper's opening changed")
    packed = f'/{ARCHIVE_FILE}" <<' in new.before
    python = old.program[0].raw
    _require(new.program[0].raw == python, "another interpreter runs the driver")
    _require(packed == (bench_script.unpack(python) in new.before), "the archive is not unpacked as it should be")
    _require(new.after == bench_script.TAIL, "the wrapper's end changed")
    found = _env_changes(old, new, plan)
    argv = dict(flag_items(new.carried_argv("TRAINER_ARGV")))
    found += _check_map(old.flags, argv, _wanted_flags(old, plan), "trainer argv")
    orch = dict(flag_items([word.value for word in orch_argv]))
    wanted = {flag: MISSING for flag in orch if plan.drops(flag)}
    asked = [*own_orch_edits(orch_argv, trainer, plan), *plan.of_kind("orch-arg")]
    wanted |= {f"--{edit.key}": MISSING if edit.unset else edit.value for edit in asked}
    found += _check_map(orch, dict(flag_items(new.carried_argv("ORCH_ARGV"))), wanted, "orchestrator argv")
    flags = [text for flag in plan.driver_flags for text in shlex.split(flag)]
    _require([word.value for word in new.argv] == flags, "the driver's flags are not as asked")
    return found


def _wanted_flags(old: Client, plan: Plan) -> dict[str, Any]:
    wanted: dict[str, Any] = {flag: plan.name for flag, value in old.flags.items() if value == plan.old_name}
    wanted |= {flag: MISSING for flag in old.flags if RUN_FLAGS.fullmatch(flag) or plan.drops(flag)}
    wanted["--worker_id"] = plan.name
    directory = output_directory(old, plan)
    if directory is not None:
        wanted[OUTPUT_FLAG] = directory
    if any(flag.startswith(("--checkpoint_", "--trainer_backend")) for flag in old.flags):
        wanted["--checkpoint_save_interval_steps"] = "0"
    if not plan.load_checkpoint:
        wanted[CHECKPOINT_FLAG] = MISSING
    return wanted | {f"--{edit.key}": MISSING if edit.unset else edit.value for edit in plan.of_kind("trainer-arg")}


def _env_changes(old: Client, new: Client, plan: Plan) -> list[Change]:
    """Check every assignment before the program, and the flags inside the two lists among them one by one."""
    before = {name: word.raw for name, word in old.assignments}
    after = {name: word.raw for name, word in new.assignments}
    for name, value in plan.provenance:
        _require(new.env.get(name) == value, f"{name} is not what was meant")
    wanted: dict[str, Any] = {name: MISSING for name in before if plan.drops(name)}
    for name, word in old.assignments:
        if word.value == plan.old_name and not plan.drops(name):
            wanted[name] = plan.name
    wanted |= {edit.key: bench_script.quote(edit.value or "") for edit in plan.of_kind("env")}
    maxtext, libtpu = "MAXTEXT_EXTRA_FLAGS", "LIBTPU_INIT_ARGS"
    apart = {*bench_script.CARRIED, *bench_script.PROVENANCE}
    apart |= {name for kind, name in (("maxtext", maxtext), ("libtpu", libtpu)) if before.get(name) != after.get(name)}
    kept = [{name: raw for name, raw in env.items() if name not in apart} for env in (before, after)]
    found = _check_map(*kept, wanted, "client env")
    keys = [_flag_map(variable(client, maxtext)) for client in (old, new)]
    return found + _check_map(*keys, _wanted_keys(old, keys[0], plan), maxtext)


def _wanted_keys(old: Client, keys: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    wanted: dict[str, Any] = {key: MISSING for key in keys if plan.drops(key)}
    if not plan.load_checkpoint:
        wanted |= {key: MISSING for key in CHECKPOINT_KEYS}
    own = {"run_name": plan.name, "enable_checkpointing": "false", "base_output_directory": output_directory(old, plan)}
    wanted |= {key: value for key, value in own.items() if key in keys and value is not None}
    return wanted | {edit.key: MISSING if edit.unset else edit.value for edit in plan.of_kind("maxtext")}
