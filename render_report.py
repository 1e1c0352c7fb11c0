"""What the renderer says on stderr: the changes, and what the user should know beside them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from bench_common import MASKED, BenchError, is_secret
from bench_script import DRIVER_FILE
from launch_render import Word, slice_of, walk
from render_check import Change
from render_edit import (
    CHECKPOINT_FLAG,
    CHECKPOINT_KEYS,
    OUTPUT_FLAG,
    QUEUE_LABEL,
    Plan,
    Trainer,
    at,
    flag_of,
    flag_values,
    maxtext_keys,
    orch_words,
    output_directory,
    trainer_words,
    variable,
)
from render_plan import container_name, mesh_problem, orchestrator_host, pod_of
from render_slice import RESERVATION, TOPOLOGY, parse_slice

# kubectl apply keeps the object as JSON in an annotation; Kubernetes allows 256 KiB of annotations.
MAX_APPLY_BYTES = 240 * 2**10


def summary(trainer: Trainer, plan: Plan, changes: Sequence[Change]) -> list[str]:
    """Return the changes as lines: what, old -> new."""
    lines = [
        f"{plan.name}: the trainer {trainer.document.name} ({trainer.document.where}), {len(changes)} changes",
        f"  client command: the launcher's -> {DRIVER_FILE}",
    ]
    for change in changes:
        old = "(absent)" if change.old is None else change.old
        new = "(removed)" if change.new is None else change.new
        lines.append(f"  {change.where}: {_cut(old)} -> {_cut(new)}")
    return lines


def _cut(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else line[:57] + "..."


def warnings(
    trainer: Trainer, orch_argv: Sequence[Word], plan: Plan, document: dict[str, Any], changes: Sequence[Change]
) -> list[str]:
    """Return what the user should know beside the changes."""
    lines = [f"{option} changes nothing: it is so already" for option in idle_options(plan, changes)]
    secrets = sorted({change.where.split()[-1] for change in changes if change.new is None and change.old == MASKED})
    if secrets:
        lines.append(f"not carried over, being secrets: {', '.join(secrets)} (--keep-secret NAME keeps one)")
    lines += [f"{name} is no secret of this launch, and --keep-secret changes nothing"
              for name in sorted(plan.keep_secrets - _secrets(trainer, orch_argv))]  # fmt: skip
    pod = pod_of(trainer.document.data["spec"]["replicatedJobs"][trainer.client.path[2]])
    beside = [container_name(box) for box in pod["containers"] if box is not trainer.client.container]
    if beside and not plan.sidecars_init:
        lines.append(
            f"{', '.join(beside)} are plain containers beside the client: they hold the slice after the bench ends,"
            " until the JobSet is deleted; --sidecars init lets them end with it"
        )
    problem = mesh_problem(trainer, plan)
    if problem:
        lines.append(f"{problem}, as in the launch")
    if "--trainer_backend" not in trainer.client.flags:
        lines.append("no --trainer_backend in the trainer's flags: check that it runs MaxText")
    folder = output_directory(trainer.client, plan) or "not set"
    if any(flag.startswith("--profile=") for flag in plan.driver_flags) and not folder.startswith("gs://"):
        lines.append(f"--profile will be refused in the pod: Pathways writes traces to a bucket only, and the output"
                     f" directory is {folder}; give --output-directory gs://...")  # fmt: skip
    lines += _orchestrator_strays(trainer, orch_argv, plan)
    lines += _slice_strays(trainer, plan) if plan.slice is not None else []
    lines += _leftovers(document, plan) + _production_folders(trainer, plan)
    size = len(json.dumps(document, separators=(",", ":")).encode())
    if size > MAX_APPLY_BYTES:
        lines.append(f"{size / 1024:.0f} KiB as JSON: too large for kubectl apply; use kubectl apply --server-side")
    return lines


def idle_options(plan: Plan, changes: Sequence[Change]) -> list[str]:
    """Return the options that ask for what is so already."""
    where = {change.where for change in changes}
    labels = {"maxtext": "MAXTEXT_EXTRA_FLAGS {}", "env": "client env {}", "trainer-arg": "trainer argv --{}",
              "orch-arg": "orchestrator argv --{}"}  # fmt: skip
    idle = []
    for edit in dict.fromkeys((edit.kind, edit.key) for edit in plan.edits):
        kind, key = edit
        if kind == "libtpu":
            changed = any(w.endswith((f"libtpu flag {key}", f".args[--{key}]")) for w in where)
        else:
            changed = labels[kind].format(key) in where
        if not changed:
            idle.append(f"--{kind} {key}")
    ends = {"namespace": "metadata.namespace", "queue": f"[{QUEUE_LABEL}]", "image": "].image",
            "priority": ".priorityClassName", "slice": ".args[--instance_type]"}  # fmt: skip
    idle += [f"--{option}" for option, end in ends.items()
             if getattr(plan, option) is not None and not any(w.endswith(end) for w in where)]  # fmt: skip
    if not plan.load_checkpoint and not any(w.endswith((CHECKPOINT_FLAG, *CHECKPOINT_KEYS)) for w in where):
        idle.append("--load-checkpoint none")
    if plan.sidecars_init and not any(change.new == "initContainers" for change in changes):
        idle.append("--sidecars init")
    return idle


def _secrets(trainer: Trainer, orch_argv: Sequence[Word]) -> set[str]:
    """Return the names of the secrets that a bench of this launch could carry."""
    client = trainer.client
    names = {key for key, _ in client.assignments} | {flag_of(word) for word in (*client.argv, *orch_argv)}
    names |= {entry.get("name", "") for entry in client.container.get("env") or []}
    names |= {token.partition("=")[0] for token in variable(client, "MAXTEXT_EXTRA_FLAGS").split()}
    return {name for name in names if is_secret(name)}


def _orchestrator_strays(trainer: Trainer, orch_argv: Sequence[Word], plan: Plan) -> list[str]:
    """Name what no longer agrees between the trainer and the orchestrator's flags that the bench carries."""
    lines = []
    orch, flags = flag_values(orch_words(orch_argv, trainer, plan)), flag_values(trainer_words(trainer.client, plan))
    looked_for, found = orchestrator_host(trainer.client), orch.get("--discovery_id")
    if looked_for and found and found != looked_for:
        lines.append(f"the loss options are those of {found}, and {trainer.document.name} looks for {looked_for}")
    before = flag_values(orch_argv)
    for axis in ("fsdp", "expert"):  # rows of a packed micro-batch are trainer_fsdp x trainer_expert
        mine, theirs = flags.get(f"--mesh_{axis}"), orch.get(f"--trainer_{axis}")
        agreed = trainer.client.flags.get(f"--mesh_{axis}") == before.get(f"--trainer_{axis}")
        if agreed and theirs is not None and mine != theirs:
            lines.append(
                f"--mesh_{axis} is {mine or 'unset'}, and the orchestrator's --trainer_{axis}, which sets the rows of a"
                f" micro-batch, stays {theirs}; --orch-arg trainer_{axis}=N changes it"
            )
    return lines


def _slice_strays(trainer: Trainer, plan: Plan) -> list[str]:
    """Name what a slice of another type would need, and the renderer cannot know."""
    try:
        old = parse_slice(slice_of(trainer.document) or "")
    except BenchError:
        return []
    if old.tpu == plan.slice.tpu:
        return []
    selector = pod_of(at(trainer.document.data, trainer.workers)).get("nodeSelector") or {}
    form = "node pools of one topology" if TOPOLOGY in selector else "dynamic slicing"
    lines = [f"the scheduling fields keep the form of {old}, {form}: check that the cluster offers {plan.slice} so"]
    if RESERVATION in selector:
        lines.append(f"the reservation {selector[RESERVATION]} stays, and the launch asked it for {old}")
    return lines


def _production_folders(trainer: Trainer, plan: Plan) -> list[str]:
    """Name what the trainer is still told to put, or to look for, in the folder that the launch writes to."""
    original = (trainer.client.flags.get(OUTPUT_FLAG) or "").rstrip("/")
    if not original:
        return []
    asked = {edit.key: edit.value or "" for edit in plan.of_kind("env")}
    given = {**trainer.client.env, **asked, **maxtext_keys(trainer.client, plan)}
    given |= flag_values(trainer_words(trainer.client, plan))
    known = (OUTPUT_FLAG, CHECKPOINT_FLAG, *CHECKPOINT_KEYS)  # the bench's own folder, and what is only read
    return [f"{name} still points into {original}, the launch's own folder" for name, value in given.items()
            if name not in known and f"{value.rstrip('/')}/".startswith(f"{original}/")]  # fmt: skip


def _leftovers(document: dict[str, Any], plan: Plan) -> list[str]:
    """Name the fields that still hold the name of the production JobSet, or of one of its hosts."""
    host = re.compile(rf"(?<![\w-]){re.escape(plan.old_name)}-[a-z0-9-]+-\d+-\d+\b")
    lines = []
    for path, value in walk(document):
        if value == plan.old_name:
            lines.append(f"{'.'.join(map(str, path))} is still {plan.old_name}")
        elif isinstance(value, str) and host.search(value):
            lines.append(f"{'.'.join(map(str, path))} still names a host of {plan.old_name}")
    return lines
