"""A launch made ready to run: from two argv and an environment to config, batch, payload and routing.

What the driver, the AOT check and the numerics check have in common, so that the three look at one program.
Nothing here touches a device, and nothing imports JAX; numpy is imported where a plan is made, so that `--help` works
without it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import bench_config
import bench_runtime
from bench_common import BenchError
from bench_runtime import Job

if TYPE_CHECKING:
    import bench_payload
    import bench_routing


class OutOfTolerance(BenchError):
    """The routing load misses its target: an answer (exit 1), not a failure to look."""


@dataclasses.dataclass
class Plan:
    """A launch made ready to run: flags, batch, payload and routing, before anything touches a device."""

    job: Job
    batch: bench_config.BatchPlan
    sizes: bench_config.ModelSizes
    spec: bench_payload.PayloadSpec
    routing: bench_routing.RoutingSpec | None
    routing_load: str
    shrunk: list[bench_config.Shrunk]

    @property
    def logps_pass(self) -> bool:
        """Whether the orchestrator asks for the actor's log-probs before each micro-batch.

        It does where rollout log-probs are the old ones, unless the loss can do it on the way: one iteration, one
        update per batch, no logging of the agreement (rl_program._apply_sampler_trainer_agreement).
        """
        orch = self.job.orch
        one_update = (orch.mini_batch_size or orch.batch_size) >= orch.batch_size
        fused = orch.num_iterations == 1 and one_update and not orch.log_sampler_trainer_agreement
        return orch.use_rollout_logps and not fused


def plan_launch(
    trainer_argv: Sequence[str], orch_argv: Sequence[str], env: Mapping[str, str], num_devices: int, *,
    cpu_smoke: bool = False, known_keys: set[str] | None = None, drop_unknown: bool = False,
    lengths: str = "full", routing_load: str = "uniform", skew: str = "lognormal", tolerance: float = 0.01,
    leave_unset: bool = False, pad_id: int = 0, payload_fields: set[str] | None = None,
) -> Plan:  # fmt: skip
    """Turn a launch's argv and environment into what the driver, the AOT check and the numerics check run.

    Args:
      trainer_argv, orch_argv: flag words.
      env: MAXTEXT_EXTRA_FLAGS and the trainer's other variables.
      num_devices: JAX devices of the slice, or of --cpu-smoke.
      known_keys: keys of the installed MaxText; None checks nothing (no MaxText needed).
      drop_unknown: drop keys outside known_keys instead of refusing them.
      payload_fields: fields of the installed RLTrainerPayload; None means all.

    Raises:
      BenchError: flags, batch, routing or keys that cannot be run, in one line.
    """
    import bench_payload
    import bench_routing

    trainer, orch = bench_config.parse_trainer_argv(trainer_argv), bench_config.parse_orch_argv(orch_argv)
    shrunk: list[bench_config.Shrunk] = []
    if cpu_smoke:
        trainer, orch, shrunk = bench_config.shrink_for_cpu(trainer, orch, num_devices)
    batch = bench_config.batch_plan(trainer, orch)
    settings = bench_config.maxtext_settings(trainer, batch, env, num_devices)
    lost: list[str] = []
    if cpu_smoke:
        settings, changed = bench_config.cpu_settings(settings, known_keys)
        shrunk += changed
    if known_keys is not None:
        settings, lost = bench_runtime.check_keys(settings, known_keys, drop_unknown)
    own_config = cpu_smoke or (drop_unknown and bool(lost))  # Tunix's builder would pass what was dropped
    differs = lost + bench_config.disagreements(trainer, orch)
    job = Job(list(trainer_argv), list(orch_argv), trainer, orch, settings, pad_id, own_config, differs)
    sizes = bench_config.model_sizes(settings)
    if sizes.num_experts <= 1 and routing_load not in ("none", "uniform"):
        raise BenchError(f"--routing-load {routing_load}, but {trainer.maxtext_model_name} has no experts",
                         where="TRAINER_ARGV", todo="drop --routing-load")  # fmt: skip
    has = (lambda name: True) if payload_fields is None else payload_fields.__contains__
    routed = sizes.num_experts > 1 and routing_load != "none"
    spec = bench_payload.PayloadSpec(
        rows=batch.rows, prompt_length=batch.prompt_length, completion_length=batch.completion_length,
        packed=batch.packed, max_segments=batch.max_segments, vocab_size=sizes.vocab_size, pad_id=pad_id,
        eos_id=1 if pad_id != 1 else 2, num_layers=sizes.num_layers, num_experts=sizes.num_experts if routed else 0,
        top_k=sizes.top_k, num_generations=batch.num_generations, lengths=lengths,
        with_old_logps=orch.use_rollout_logps, with_rollout_logps=has("rollout_per_token_logps"),
        with_ref_logps=orch.beta != 0 or orch.force_compute_kl, with_overlong=has("overlong"),
        row_width=batch.row_width, masks_overlong=orch.overlong_loss_masking,
    )  # fmt: skip
    layout = bench_config.expert_layout(settings, num_devices)
    routing = bench_routing.RoutingSpec(
        bench_routing.parse_routing_load(routing_load, sizes.num_layers), layout.shards, layout.row_groups,
        layout.token_chunks, skew, tolerance, layout.sequence_shards, leave_unset) if routed else None  # fmt: skip
    bench_payload.check_specs(spec, routing)
    return Plan(job, batch, sizes, spec, routing, routing_load if routed else "none", shrunk)


def make_micro_batches(
    plan: Plan, options: argparse.Namespace, first_only: bool = False
) -> tuple[list[dict[str, Any]], int, dict | None]:
    """Build the run's distinct micro-batches, on the host, and check their routing load.

    A step holds the rollouts that the argv say and no more, so its last micro-batch may have empty rows;
    --micro-batches asks for full ones.

    Returns:
      (batches, N per step, load table or None). All N differ; fewer than N are built only where host memory would
      not hold them, and then they take turns. With `first_only`, the first alone.

    Raises:
      OutOfTolerance: the routing load misses its target.
      BenchError: no token carries gradient, or --replay does not fit the launch.
    """
    import bench_payload
    import bench_routing

    rollouts = None if options.micro_batches else plan.batch.rollouts_per_step
    if options.replay:
        first = bench_payload.load_npz(options.replay, plan.spec)
    else:
        first = bench_payload.build_micro_batch(plan.spec, plan.routing, options.seed, 0, rollouts)
    held = count_sequences(first)
    count = options.micro_batches or plan.batch.micro_batches(held)
    load = None
    if first["routed_experts"] is not None:
        table = bench_routing.measure_load(first["routed_experts"], plan.sizes.num_experts, plan.routing)
        if not options.replay:
            _check_load(table)
        load = {**table.as_dict(), "text": table.lines()}
    bench_payload.check_batch(first, plan.spec.masks_overlong)
    if options.replay or first_only:
        return [first], count, load
    size = sum(value.nbytes for value in first.values() if hasattr(value, "nbytes"))
    distinct = max(1, min(count, int(host_memory_bytes() * 0.5) // max(size, 1)))
    batches = [first]
    for i in range(1, distinct):
        # At least a group, so that advantages have a mean to differ from: an estimate of N can leave nothing over.
        left = None if rollouts is None else max(rollouts - held, plan.spec.num_generations)
        batches.append(bench_payload.build_micro_batch(plan.spec, plan.routing, options.seed, i, left))
        held += count_sequences(batches[-1])
    return batches, count, load


def _check_load(table: bench_routing.LoadTable) -> None:
    import bench_routing

    try:
        bench_routing.check_load(table)
    except BenchError as error:
        raise OutOfTolerance(error.what, where=error.where, todo=error.todo) from error


def count_sequences(batch: Mapping[str, Any]) -> int:
    """Return how many rollouts a micro-batch holds."""
    if batch["segment_ids"] is not None:
        return int(batch["segment_ids"].max(axis=1).sum())  # segments are numbered 1..k in each row
    return int((batch["completion_mask"] > 0).any(axis=1).sum())


def host_memory_bytes() -> int:
    """Return the memory this container may use: its cgroup limit, else the machine's."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError), open(path, encoding="ascii") as stream:
            return min(machine, int(stream.read()))
    return machine


def mesh_product(trainer_argv: Sequence[str]) -> int:
    """Return the JAX devices that a launch's mesh needs."""
    trainer = bench_config.parse_trainer_argv(trainer_argv)
    return trainer.mesh_fsdp * trainer.mesh_tp * trainer.mesh_expert * trainer.mesh_context
