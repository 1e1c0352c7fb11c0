"""Build a trainer on a TPU topology without a TPU, lower its kernels and compile one: aot_bench's child process.

A compiler crash, a bad libtpu flag or a kill ends the process it happens in, so aot_bench starts this file once per
kernel. It reads one JSON job from its first line of stdin and answers with JSON lines on stdout ({"event": ...});
what MaxText and libtpu print goes to stderr. It waits for a second line before it compiles, so that the next child can
import and lower while the one before compiles.

The program is the driver's: bench_plan plans the launch, bench_runtime builds config, mesh, loss and worker; only the
devices (of a topology) and the engine (shapes instead of arrays) are replaced, in `build`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import math
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from aot_memory import KERNELS
from bench_common import BenchError

AOT_KEYS = (  # nothing is loaded, saved, logged or cached by a compile
    ("compile_topology_num_slices", "1"), ("jax_cache_dir", "''"), ("load_parameters_path", "''"),
    ("enable_checkpointing", "False"), ("base_output_directory", "''"), ("enable_tensorboard", "False"),
    ("skip_jax_distributed_system", "True"),
)  # fmt: skip


# ---------------------------------------------------------------------------------------------
# The abstract engine


@contextlib.contextmanager
def shapes_without_shardings() -> Iterator[None]:
    """Let flax trace MaxText's optimizer by shape alone.

    AbstractMaxTextEngine._trace_train_state calls nnx.eval_shape under MaxText's rules, and flax (0.12.12,
    nnx/transforms/transforms.py _to_variable) then makes a sharding of every variable's logical axis names, one name at
    a time: the last rule of a name wins, a name without a rule stays, two names may become one mesh axis. With the
    rules of Qwen3.5 that is no sharding at all (DuplicateSpecError, or "Resource axis: norm ... is not found in mesh"),
    and an optimizer state that trainable_parameters_mask left out has no shape to shard (AttributeError: MaskedNode).
    MaxText keeps only the graph of that call; the shardings that are compiled come from a second trace. So none are
    made here, and the program is the same (tests/test_aot_bench.py lowers a dense model both ways).
    """
    import jax
    from flax.nnx.transforms import transforms

    original, marked = transforms._to_variable, transforms.ValueMetadata

    def to_variable(node: Any) -> Any:
        def one(leaf: Any) -> Any:
            return leaf.var_type._new(leaf.value, leaf.metadata) if isinstance(leaf, marked) else leaf

        return jax.tree.map(one, node, is_leaf=lambda leaf: isinstance(leaf, marked))

    transforms._to_variable = to_variable
    try:
        yield
    finally:
        transforms._to_variable = original


def make_abstract_engine(config: Any, mesh: Any, pad_id: int, float32_masters: bool = True) -> Any:
    """Return MaxText's engine of shapes, wrapped and with an optimizer as bench_runtime.make_engine builds it.

    Args: as bench_runtime.make_engine takes them.

    Raises:
      BenchError: MaxText or flax refuses to build it.
    """
    from maxtext.integration.tunix.tunix_adapter import TunixMaxTextAdapter
    from maxtext.training_engine.maxtext_engine_compile import AbstractMaxTextEngine

    import bench_runtime

    class Engine(AbstractMaxTextEngine):
        def _build_model(self, wrap_with_tunix_adapter: bool, tokenizer_pad_id: int | None) -> Any:
            plain = super()._build_model(wrap_with_tunix_adapter, tokenizer_pad_id)
            # As model_creation_utils.from_pretrained wraps, which this engine does not call.
            no_op = "maxtext_config" in config.vllm_additional_config
            model = TunixMaxTextAdapter(base_model=plain, use_no_op_mappings=no_op, pad_id=pad_id)
            model.config = None
            return model

        def _build_optimizer(self, tx: Any) -> Any:
            with shapes_without_shardings():
                return super()._build_optimizer(bench_runtime.with_masters(tx, config, float32_masters))

    return Engine(config, mesh)


def topology_devices(topology: str) -> list[Any]:
    """Return the JAX devices of a MaxText compile_topology name. Loads libtpu.

    Raises:
      BenchError: an unknown name, or no libtpu.
    """
    from jax.experimental.topologies import get_topology_desc
    from maxtext.utils import accelerator_to_spec_map

    spec = accelerator_to_spec_map.UserFacingNameToSystemCharacteristics.get(topology)
    if spec is None or spec.platform != "tpu":
        raise BenchError(f"MaxText knows no TPU topology {topology!r}", where="--slice", todo="name another slice")
    return load_topology(spec.topology_name, spec.chip_config_name, spec.chips_per_host_bounds, spec.wrap,
                         get_topology_desc)  # fmt: skip


def load_topology(name: str, chip_config: str, host_bounds: Sequence[int], wrap: Sequence[bool], describe: Any) -> Any:
    """Return the devices of a topology by libtpu's own names. Raises BenchError where libtpu is missing."""
    try:
        return describe(platform="tpu", topology_name=name, chip_config_name=chip_config,
                        chips_per_host_bounds=host_bounds, num_slices=1, wrap=wrap).devices  # fmt: skip
    except Exception as error:  # RuntimeError, JaxRuntimeError or NotImplementedError, by the version of JAX
        raise BenchError(f"no TPU compiler here: {' '.join(str(error).split())[:300]}", where="libtpu",
                         todo="pip install libtpu (extra aot)") from error  # fmt: skip


@dataclasses.dataclass
class Built:
    """A trainer on a topology: its plan, its engine of shapes, one micro-batch of shapes."""

    plan: Any
    engine: Any
    payload: Any
    config: Any


def build(job: Mapping[str, Any]) -> Built:
    """Build the driver's program with a topology's devices and an engine of shapes.

    Args:
      job: trainer_argv, orch_argv, env, maxtext (key=value words), topology, devices, drop_unknown, routing_load.
    """
    import bench_runtime
    from bench_config import Setting
    from bench_plan import plan_launch

    devices = topology_devices(job["topology"])
    plan = plan_launch(
        job["trainer_argv"], job["orch_argv"], job["env"], len(devices), routing_load=job["routing_load"],
        known_keys=bench_runtime.known_maxtext_keys(), drop_unknown=job["drop_unknown"],
        payload_fields=bench_runtime.payload_fields(),  # pad_id stays 0: a constant, and no tokenizer to fetch
    )  # fmt: skip
    ours = [("compile_topology", job["topology"]), *AOT_KEYS]
    plan.job.settings += [Setting(key, value, "aot_bench") for key, value in ours]
    plan.job.own_config = True  # config and engine are built by bench_runtime itself, also beside Tunix from git
    program = bench_runtime.build_program(plan.job, devices, make_abstract_engine)
    return Built(plan, program.engine, _shapes_of_batch(program, plan.spec), program.config)


def _shapes_of_batch(program: Any, spec: Any) -> Any:
    """Return the payload the driver would hand over, every array a jax.ShapeDtypeStruct."""
    import jax
    import numpy as np

    import bench_payload

    batch = dict.fromkeys(bench_payload.FIELDS)
    for name, (shape, dtype, required) in bench_payload.expected_arrays(spec).items():
        if required:
            batch[name] = np.broadcast_to(np.zeros((), dtype), shape)  # a view of one element: no memory
    if spec.packed:
        batch["num_segments"] = spec.max_segments + 1  # as bench_payload fills it
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), program.payload(batch))


# ---------------------------------------------------------------------------------------------
# Lowering


@dataclasses.dataclass
class Arguments:
    """The kernels' arguments as avals with shardings, by the names that the compiled modules use for them."""

    params: Any
    rest: Any
    dynamic: Any  # the micro-batch
    acc_grads: Any
    state_pure: Any

    def of(self, kernel: str) -> dict[str, Any]:
        """Return the arguments of a kernel that take memory, by name."""
        if kernel == "update":
            return {"state_pure": self.state_pure, "accumulated_grads": self.acc_grads}
        first = {"params": self.params, "rest": self.rest, "dynamic": self.dynamic}
        return {**first, "acc_grads": self.acc_grads} if kernel == "fwd_bwd_accum" else first


def lower(engine: Any, payload: Any, names: Sequence[str]) -> tuple[dict[str, Any], Arguments]:
    """Lower some of the engine's kernels, as MaxTextTrainingEngine._lower_kernels lowers all.

    `fwd_bwd` is traced in any case: the gradients that the other two take are read off its outputs.
    """
    import jax
    import jax.numpy as jnp
    from maxtext.training_engine import maxtext_engine

    if set(maxtext_engine.KERNEL_NAMES) != set(KERNELS):
        raise BenchError(f"this MaxText's engine has the kernels {', '.join(maxtext_engine.KERNEL_NAMES)}",
                         where="MaxText", todo=f"aot_bench knows {', '.join(KERNELS)}: use maxtext 0.2.5")  # fmt: skip
    dynamic, static = maxtext_engine._split_static_and_dynamic(engine._prepare_batch(payload))
    engine._compile_for_batch(dynamic, static)
    aval = maxtext_engine._to_aval
    state = jax.tree.map(aval, engine._read_state_pure())
    params, rest = (jax.tree.map(aval, part) for part in engine._read_model_pure(engine.state.model))
    batch = jax.tree.map(aval, dynamic)
    mean_loss = jax.ShapeDtypeStruct((), jnp.float32) if engine._config.skip_step_on_spikes else None
    with engine._sharding_ctx():
        first = engine._jitted_kernels["fwd_bwd"].trace(params, rest, batch)
        _, _, _, grads, denominator = first.out_info
        arguments = {"fwd_bwd_accum": (params, rest, batch, grads, denominator),
                     "update": (state, grads, denominator, mean_loss)}  # fmt: skip
        lowered = {name: first.lower() if name == "fwd_bwd" else
                   engine._jitted_kernels[name].lower(*arguments[name]) for name in names}  # fmt: skip

    def placed(tree: Any, shardings: Any) -> Any:
        return jax.tree.map(lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
                            tree, shardings)  # fmt: skip

    gradients = placed(grads, jax.tree.map(engine._mesh_sharding, params))
    return lowered, Arguments(params, rest, placed(batch, engine._batch_data_shardings(dynamic)), gradients, state)


def leaf_bytes(leaf: Any) -> tuple[int, bool]:
    """Return (bytes per device, whether they are in host memory) of an aval; without a sharding it counts whole.

    Logical bytes: the device may pad and tile them to more.
    """
    sharding = getattr(leaf, "sharding", None)
    shape = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
    on_host = str(getattr(sharding, "memory_kind", None) or "").endswith("host")
    return math.prod(shape) * leaf.dtype.itemsize, on_host


def bytes_per_device(tree: Any, on_host: bool = False) -> int:
    """Return the bytes per device of a tree of avals that are in device (or host) memory."""
    import jax

    sizes = [leaf_bytes(leaf) for leaf in jax.tree.leaves(tree) if hasattr(leaf, "dtype")]
    return sum(size for size, host in sizes if host == on_host)


def state_bytes(arguments: Arguments) -> dict[str, Any]:
    """Return what the trainer holds on a device between kernels, in bytes, and the micro-batch field by field."""
    import jax

    whole, weights = bytes_per_device(arguments.state_pure), bytes_per_device(arguments.params)
    others = bytes_per_device(arguments.rest)
    fields = {jax.tree_util.keystr(path[-1:]).strip(".[]'"): leaf_bytes(leaf)[0]
              for path, leaf in jax.tree_util.tree_leaves_with_path(arguments.dynamic)}  # fmt: skip
    return {
        "parameters_bytes": weights, "other_model_state_bytes": others,
        "optimizer_bytes": whole - weights - others, "train_state_bytes": whole,
        "gradients_bytes": bytes_per_device(arguments.acc_grads), "micro_batch_bytes": sum(fields.values()),
        "micro_batch_fields_bytes": dict(sorted(fields.items())),
        "on_host_bytes": bytes_per_device(arguments.state_pure, on_host=True),
        "parameter_count": sum(leaf.size for leaf in jax.tree.leaves(arguments.params)),
    }  # fmt: skip


def shardings_by_name(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Return the argument names of a compiled module, such as `params['base']...value`, with their PartitionSpec."""
    import jax

    return {f"{name}{jax.tree_util.keystr(path)}": str(leaf.sharding.spec)
            for name, tree in arguments.items() for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
            if getattr(leaf, "sharding", None) is not None}  # fmt: skip


def check_routing(name: str, text: str, spec: Any) -> str | None:
    """Return a line that says whether the payload's experts decide the routing of a lowered kernel.

    Raises:
      BenchError: the payload names experts, and the program still picks its own (a top-k is left).
    """
    if name == "update" or spec.num_experts == 0:
        return None
    left = text.count("top_k")
    if left:
        raise BenchError(f"forced routing did not take effect: {left} top-k operations left in the lowered text",
                         where=name, todo="this MaxText ignores routed_experts; use --routing-load none")  # fmt: skip
    return "routing is forced: no top-k is left in the lowered text"


# ---------------------------------------------------------------------------------------------
# The child


def describe_lowered(built: Built, lowered: Mapping[str, Any], arguments: Arguments, seconds: float) -> dict[str, Any]:
    """Return the event that says what was lowered."""
    import bench_report
    import bench_runtime

    kernels = {}
    for name, one in lowered.items():
        text = one.as_text()
        kernels[name] = {
            "argument_bytes": sum(bytes_per_device(tree) for tree in arguments.of(name).values()),
            "lowered_operations": text.count(" = "), "routing": check_routing(name, text, built.plan.spec),
        }  # fmt: skip
    batch, trainer, orch = built.plan.batch, built.plan.job.trainer, built.plan.job.orch
    return {
        "event": "lowered", "seconds": seconds, "kernels": kernels, "resident": state_bytes(arguments),
        "mesh": {axis: size for axis, size in built.engine._mesh.shape.items() if size > 1},
        "config": without_folder(bench_report.config_document(built.config), os.getcwd()),
        "versions": bench_runtime.versions(),
        "runtime": "tunix" if bench_runtime.has_tunix_experimental() else "standin",
        "not_the_same_program": built.plan.job.not_the_same_program,
        "loss": {"reference_logps": built.plan.spec.with_ref_logps, "separate_logps_pass": needs_logps_pass(orch)},
        "batch": {
            "rows": batch.rows, "row_width": batch.row_width, "packed": batch.packed,
            "completion_length": batch.row_width if batch.packed else batch.completion_length,
            "chunk_size": trainer.compute_logps_chunk_size,
        },
    }  # fmt: skip


def without_folder(config: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """Return a config whose paths in the child's temporary folder are relative: two runs have the same config."""
    return {
        key: value.replace(folder + os.sep, "") if isinstance(value, str) else value for key, value in config.items()
    }


def needs_logps_pass(orch: Any) -> bool:
    """Return whether the orchestrator has the trainer score each micro-batch in a pass of its own before it trains.

    Tunix fuses that into the loss unless it must log the agreement, or takes several steps over one batch
    (can_fuse_agreement_in_loss of its orchestrator).
    """
    several = orch.num_iterations > 1 or (orch.mini_batch_size or orch.batch_size) < orch.batch_size
    return orch.use_rollout_logps and (orch.log_sampler_trainer_agreement or several)


def compile_kernel(engine: Any, lowered: Any, options: Mapping[str, str], dump_dir: str, hlo_file: str | None) -> dict:
    """Compile one lowered kernel and return what the compiler told of it.

    Args:
      options: compiler options by name, without dashes.
      dump_dir: an empty folder for the compiler's own memory reports.
      hlo_file: where to write the optimized HLO text, or None.
    """
    import aot_buffers
    from bench_common import write_whole

    begin = time.monotonic()
    # pyconfig narrows dumps to jit_train_step through XLA_FLAGS, asked or not: widen again.
    reports = {"xla_dump_to": dump_dir, "xla_dump_hlo_module_re": ".*"}
    with engine._sharding_ctx():
        compiled = lowered.compile(compiler_options={**options, **reports})
    seconds = time.monotonic() - begin
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis()
    cost = cost[0] if isinstance(cost, list) else cost or {}
    names = [name for name in dir(memory) if name.endswith("_in_bytes")]
    text = compiled.as_text()
    if hlo_file:
        write_whole(hlo_file, text)
    return {
        "event": "result", "status": "compiled", "seconds": seconds,
        "statistics": {name: getattr(memory, name) for name in names},
        "flops": cost.get("flops"), "bytes_accessed": cost.get("bytes accessed"), "hlo_bytes": len(text),
        "buffers": aot_buffers.peak_buffers(dump_dir, text),
    }  # fmt: skip


def check_flags(job: Mapping[str, Any]) -> dict[str, Any]:
    """Compile a toy for the topology with the job's compiler options: is the toolchain alive, are the flags known?

    Returns:
      an event with `rejected`: flags that are no compile options here, to be tried in LIBTPU_INIT_ARGS.

    Raises:
      BenchError: a flag's value is refused.
    """
    import re

    import jax
    import jax.numpy as jnp
    from jax.experimental.topologies import get_topology_desc

    devices = load_topology(job["libtpu_topology"], job["chip_config"], job["host_bounds"], job["wrap"],
                            get_topology_desc)  # fmt: skip
    one = jax.sharding.SingleDeviceSharding(devices[0])
    lowered = jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((8, 128), jnp.float32, sharding=one))
    options, rejected = dict(job["options"]), []
    while True:
        try:
            lowered.compile(compiler_options=options)
            return {"event": "result", "status": "flags", "rejected": rejected, "device_kind": devices[0].device_kind}
        except Exception as error:
            text = str(error)
        if (unknown := re.search(r"No such compile option: '([^']+)'", text)) and unknown[1] in options:
            rejected.append(unknown[1])
            del options[unknown[1]]
        elif refused := re.search(r"Failed to parse '(.*?)' into flag (\w+)", text):
            raise BenchError(f"{refused[1]!r} is no value of --{refused[2]}", where="libtpu flags", todo="correct it")
        else:
            raise BenchError(" ".join(text.split())[:400], where="libtpu", todo="is libtpu whole?")


def serve(job: Mapping[str, Any], say: Any, wait: Any) -> None:
    """Do one job; `say` sends an event, `wait` blocks until the parent wants the compile."""
    import aot_buffers

    if job["do"] == "flags":
        say(check_flags(job))
        return
    begin = time.monotonic()
    built = build(job)
    say({"event": "built", "seconds": time.monotonic() - begin})
    lowered, arguments = lower(built.engine, built.payload, job["kernels"])
    say(describe_lowered(built, lowered, arguments, time.monotonic() - begin))
    if job["do"] == "lower":
        say({"event": "result", "status": "lowered"})
    elif wait():
        name = job["compile"]
        try:
            result = compile_kernel(built.engine, lowered[name], job["options"], job["dump_dir"], job["hlo_file"])
        except Exception as error:  # the compiler's words; its memory reports are there when memory was what lacked
            text = f"{type(error).__name__}: {error}"[:20000]
            result = {"event": "result", "status": "error", "error": text, "buffers": aot_buffers.peak_buffers(
                job["dump_dir"], aot_buffers.dumped_hlo(job["dump_dir"]))}  # fmt: skip
        specs = shardings_by_name(arguments.of(name))
        for buffer in result["buffers"]:
            buffer["sharding"] = specs.get(buffer["op_name"])
        say(result)


def main() -> int:
    """Serve one job; see the module's docstring."""
    events = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # MaxText and libtpu print: the events have a descriptor of their own

    def say(event: Mapping[str, Any]) -> None:
        events.write(json.dumps(event) + "\n")
        events.flush()

    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: never compile on for a parent that is gone
    gc.disable()  # one job and an end: the collector would take 12 % of the CPU, on millions of objects that all live
    job = json.loads(sys.stdin.readline())
    try:
        serve(job, say, lambda: bool(sys.stdin.readline()))
    except BenchError as error:
        say({"event": "result", "status": "refused", "error": str(error)})
    except Exception as error:  # of JAX, MaxText or the compiler: the text is the answer, the traceback is in the log
        import traceback

        traceback.print_exc()
        say({"event": "result", "status": "error", "error": f"{type(error).__name__}: {error}"[:20000]})
    sys.stderr.flush()
    os._exit(0)  # MaxText's threads outlive an ordinary exit and print tracebacks


if __name__ == "__main__":
    raise SystemExit(main())
