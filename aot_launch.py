"""From a render or two argv to compile jobs: the launch, its slice in MaxText's names, its libtpu flags.

Reading only, no JAX. `read_launch` takes a launch render or a bench render apart and applies the edits that the
renderer knows; `check_flags` compiles a toy to find out which flags are compiler options, and which none at all.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aot_children
import bench_config
import bench_plan
import render_plan
from bench_common import BenchError, complain, decode, read_bytes, shown_name
from launch_render import (
    MAX_RENDER_BYTES,
    Client,
    Render,
    client_containers,
    list_tokens,
    parse_client,
    read_render,
    script_role,
    slice_of,
)
from render_edit import Edit, edit_list
from render_slice import parse_slice

# A Pathways instance type in libtpu's own topology names (maxtext/utils/accelerator_to_spec_map.py uses those).
LIBTPU_TYPES = {"tpu7x": "tpu7x", "tpuv5": "v5", "tpuv5e": "v5e", "tpuv6e": "v6e"}


@dataclass(frozen=True)
class Launch:
    """What to compile: words, variables and the slice, as MaxText names it."""

    trainer_argv: list[str]
    orch_argv: list[str]
    env: dict[str, str]  # MAXTEXT_EXTRA_FLAGS and all other variables of the trainer
    libtpu: list[str]  # the words of LIBTPU_INIT_ARGS
    topology: str
    devices: int
    target: Any = field(repr=False, default=None)  # MaxText's SystemCharacteristics

    def digest(self, flags: Flags) -> str:
        """Return a short hash of all that decides the compiled program."""
        parts = [self.trainer_argv, self.orch_argv, sorted(self.env.items()), self.topology, flags.options,
                 flags.init_args]  # fmt: skip
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Flags:
    """libtpu flags by the way they reach the compiler."""

    options: dict[str, str]  # per compile, by name: a refused one is named in the error
    init_args: list[str]  # LIBTPU_INIT_ARGS: what is no compiler option


def read_launch(options: argparse.Namespace) -> Launch:
    """Return the launch that the command line names, edits applied.

    Raises:
      BenchError: no trainer, no slice, a malformed edit.
    """
    edits = [render_plan.parse_edit(option, text) for option, text in options.edits]
    if options.launch_render:
        trainer, orch, env, slice_text = _from_render(options)
    else:
        env = {name: os.environ[name] for name in ("MAXTEXT_EXTRA_FLAGS", "LIBTPU_INIT_ARGS") if name in os.environ}
        trainer, orch, slice_text = [], None, None
    trainer = _words("--trainer-argv", options.trainer_argv) if options.trainer_argv else trainer
    orch = _words("--orch-argv", options.orch_argv) if options.orch_argv else orch
    if orch is None:
        if not options.orch_defaults:
            raise BenchError("no orchestrator's flags, and they hold the loss options",
                             todo="give --orch-argv, or --orch-defaults")  # fmt: skip
        orch = []
    slice_text = options.slice or slice_text
    if not slice_text:
        raise BenchError("no slice in this input", todo="give --slice TYPE:TOPOLOGY, such as tpu7x:4x4x8")
    env = dict(_edited(env.items(), edits, "env", lambda item: item[0], lambda edit: (edit.key, edit.value)))
    keys = _edited(list_tokens(env.get("MAXTEXT_EXTRA_FLAGS", "")), edits, "maxtext", _key, _pair)
    libtpu = _edited(env.pop("LIBTPU_INIT_ARGS", "").split(), edits, "libtpu", _key, _flag)
    env["MAXTEXT_EXTRA_FLAGS"] = " ".join(keys)
    topology, target = find_topology(slice_text)
    return Launch(_edited(trainer, edits, "trainer-arg", _key, _flag), _edited(orch, edits, "orch-arg", _key, _flag),
                  env, libtpu, topology, target.devices_per_slice, target)  # fmt: skip


def _edited(items: Iterable[Any], edits: Sequence[Edit], kind: str, key_of: Any, make: Any) -> list[Any]:
    """Return a list with the edits of a kind applied; say which of them change nothing, as render_bench does."""
    now = list(items)
    for edit in edits:
        if edit.kind == kind:
            before, now = now, edit_list(now, [edit], key_of, make)
            if now == before:
                complain("aot_bench", f"--{kind} {edit.key} changes nothing: it is so already")
    return now


def _key(word: str) -> str:
    return word.partition("=")[0].lstrip("-")


def _pair(edit: Edit) -> str:
    return f"{edit.key}={edit.value}"


def _flag(edit: Edit) -> str:
    return f"--{edit.key}" if edit.value is None else f"--{edit.key}={edit.value}"


def _words(option: str, text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise BenchError(f"cannot split into words: {error}", where=option, todo="quote as a shell does") from error


def _from_render(options: argparse.Namespace) -> tuple[list[str], list[str] | None, dict[str, str], str | None]:
    """Return trainer argv, orchestrator argv (None: there is none), environment and slice of a render."""
    source = shown_name(options.launch_render)
    render = read_render(decode(read_bytes(options.launch_render, MAX_RENDER_BYTES), source), source)
    for note in render.notes:
        complain("aot_bench", note)
    bench = _find_bench(render)
    if bench is not None:
        document, client = bench
        return (client.carried_argv("TRAINER_ARGV"), client.carried_argv("ORCH_ARGV"), _environment(client),
                slice_of(document))  # fmt: skip
    trainer = render_plan.find_trainer(render, options.trainer)
    orch = None
    if not options.orch_argv and not options.orch_defaults:
        orch = [word.value for word in render_plan.orchestrator_argv(options, render, trainer.client)]
    elif options.orch_defaults:
        found = render_plan.find_orchestrator(render, trainer.client)
        orch = [word.value for word in found.argv] if found else None
    return [word.value for word in trainer.client.argv], orch, _environment(trainer.client), slice_of(trainer.document)


def _find_bench(render: Render) -> tuple[Any, Client] | None:
    for document in render.documents:
        for path, container, script in client_containers(document):
            if script_role(script) == "bench":
                return document, parse_client(container, path, script, document.where)
    return None


def _environment(client: Client) -> dict[str, str]:
    """Return the variables that the client's program sees: the container's own, then the assignments before it.

    Raises:
      BenchError: MaxText's or libtpu's flags are known only when the pod runs.
    """
    own = {entry["name"]: str(entry["value"]) for entry in client.container.get("env") or ()
           if isinstance(entry, dict) and "name" in entry and "value" in entry}  # fmt: skip
    for name, word in client.assignments:
        if word.live and name in ("MAXTEXT_EXTRA_FLAGS", "LIBTPU_INIT_ARGS"):
            raise BenchError(f"{name} holds what is known only when the pod runs", todo="write its value out")
    return {**own, **client.env}


# ---------------------------------------------------------------------------------------------
# The slice


def find_topology(text: str) -> tuple[str, Any]:
    """Return MaxText's compile_topology name of a slice, and its characteristics.

    Args:
      text: `tpu7x:4x4x8` or `tpuv5e:2x2` as launchers write it, libtpu's `v5e:2x2`, or MaxText's own `tpu7x-256`.

    Raises:
      BenchError: a malformed slice, or one that MaxText has no topology for.
    """
    known = {name: spec for name, spec in _maxtext_topologies().items() if spec.platform == "tpu"}
    if text in known:
        return text, known[text]
    if ":" not in text:
        raise BenchError(f"--slice {text}: not known to MaxText", todo="write it like tpu7x:4x4x8 or tpu7x-256")
    by_libtpu = {spec.topology_name: topology for topology, spec in reversed(known.items())}  # the first name wins
    if (topology := by_libtpu.get(text.replace("v5p:", "v5:"))) is not None:
        return topology, known[topology]
    wanted = parse_slice(text)
    name = f"{LIBTPU_TYPES.get(wanted.tpu.pathways)}:{wanted.topology}"
    if name in by_libtpu:
        return by_libtpu[name], known[by_libtpu[name]]
    kind = next((topology.partition("-")[0] for topology, spec in known.items()
                 if spec.topology_name.partition(":")[0] == name.partition(":")[0]), "")  # fmt: skip
    some = [spec.topology_name.partition(":")[2] for topology, spec in known.items() if topology.startswith(kind + "-")]
    raise BenchError(f"--slice {text}: MaxText has no topology for it",
                     todo=f"one of {', '.join(some[:12])}" if kind else "choose another type")  # fmt: skip


def _maxtext_topologies() -> Mapping[str, Any]:
    """Return MaxText's table of topologies, from its one file: importing the package takes 10 s and JAX."""
    path = os.path.join(os.path.dirname(bench_config.maxtext_configs()), "utils", "accelerator_to_spec_map.py")
    spec = importlib.util.spec_from_file_location("_aot_bench_topologies", path)
    if spec is None or spec.loader is None or not os.path.exists(path):
        raise BenchError("this MaxText has no accelerator_to_spec_map", where="MaxText", todo="install maxtext 0.2.5")
    module = sys.modules["_aot_bench_topologies"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.UserFacingNameToSystemCharacteristics


# ---------------------------------------------------------------------------------------------
# Checks before anything takes minutes


def check_plan(launch: Launch, options: argparse.Namespace) -> bench_plan.Plan:
    """Plan the launch as the driver does, without MaxText's list of keys.

    Raises:
      BenchError: flags, batch or mesh that cannot run, in a second instead of half a minute.
    """
    plan = bench_plan.plan_launch(launch.trainer_argv, launch.orch_argv, launch.env, launch.devices,
                                  routing_load=options.routing_load)  # fmt: skip
    final = {setting.key: setting.value for setting in plan.job.settings}
    axes = {key: int(value) for key, value in final.items()
            if key.startswith("ici_") and key.endswith("_parallelism") and value.lstrip("-").isdigit()}  # fmt: skip
    product = 1
    for size in axes.values():
        product *= size
    if product > 0 and product != launch.devices:
        shown = " x ".join(f"{key[4:-12]} {size}" for key, size in axes.items() if size != 1)
        raise BenchError(f"the mesh {shown} has {product} devices, {launch.topology} has {launch.devices}",
                         where="TRAINER_ARGV", todo="make --mesh_* multiply to the JAX devices")  # fmt: skip
    return plan


def split_flags(words: Sequence[str]) -> Flags:
    """Return flags as compiler options where they may be ones (--xla_*), else as LIBTPU_INIT_ARGS."""
    options, init_args = {}, []
    for word in words:
        name, equals, value = word.lstrip("-").partition("=")
        if word.startswith("--xla_"):
            options[name] = value if equals else "true"
        else:
            init_args.append(word)
    return Flags(options, init_args)


def check_flags(launch: Launch, work_dir: str, timeout: float | None) -> Flags:
    """Compile a toy with the launch's flags, and return by which way each reaches the compiler.

    A flag that is no compiler option is tried in LIBTPU_INIT_ARGS, where a wrong one ends the process.

    Raises:
      BenchError: libtpu knows a flag by neither way, refuses a value, or is not there.
    """
    flags = split_flags(launch.libtpu)
    for attempt in ("flags", "flags again"):
        outcome = _toy(launch, flags, work_dir, attempt, timeout)
        if outcome.error:
            raise BenchError(outcome.error, where="LIBTPU_INIT_ARGS", todo="correct or --libtpu-unset the flag")
        if outcome.result["status"] != "flags":
            raise BenchError(" ".join(outcome.result["error"].split())[:500])
        rejected = outcome.result["rejected"]
        if not rejected:
            return flags
        complain("aot_bench", f"no compiler option, tried in LIBTPU_INIT_ARGS: {', '.join(rejected)}")
        kept = {name: value for name, value in flags.options.items() if name not in rejected}
        moved = [f"--{name}={flags.options[name]}" for name in rejected]
        flags = Flags(kept, [*flags.init_args, *moved])
    return flags


def _toy(launch: Launch, flags: Flags, work_dir: str, name: str, timeout: float | None) -> aot_children.Outcome:
    target = launch.target
    job = {"do": "flags", "libtpu_topology": target.topology_name, "chip_config": target.chip_config_name,
           "host_bounds": target.chips_per_host_bounds, "wrap": target.wrap, "options": flags.options}  # fmt: skip
    env = aot_children.child_environment(os.environ, launch.env, flags.init_args, work_dir)
    return aot_children.run({name: job}, env, work_dir, timeout_seconds=timeout)[0]


def make_jobs(launch: Launch, flags: Flags, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the children's jobs by name, cheapest first: a kernel to compile each.

    What is not compiled is lowered by the first of them (importing and building costs more than lowering), or by a
    child of its own where nothing is compiled.
    """
    from aot_memory import KERNELS

    common = {
        "trainer_argv": launch.trainer_argv, "orch_argv": launch.orch_argv, "env": launch.env,
        "topology": launch.topology, "drop_unknown": options.drop_unknown_maxtext_keys,
        "routing_load": options.routing_load, "options": flags.options,
    }  # fmt: skip
    compiled = () if options.lower_only else options.kernels
    folder = os.path.abspath(options.hlo_dir) if options.hlo_dir else None
    jobs, rest = {}, [name for name in KERNELS if name not in compiled]
    for name in compiled:
        file = os.path.join(folder, hlo_name(launch, flags, name)) if folder else None
        jobs[name] = {**common, "do": "compile", "compile": name, "kernels": [name, *rest], "hlo_file": file}
        rest = []
    return jobs or {"lowered": {**common, "do": "lower", "kernels": rest}}


def hlo_name(launch: Launch, flags: Flags, kernel: str) -> str:
    """Return the name of a kernel's HLO file: kernel, topology, and a hash of what decides the program."""
    return f"{kernel}.{launch.topology}.{launch.digest(flags)}.hlo.txt"
