"""The loop: whole optimizer steps as the orchestrator drives them, timed, checked and written down one by one.

N x fwd_bwd, one update, one metrics fetch; nothing else happens inside a step. Between steps come only the step's
line, its record and the decision to go on, and the clock audit holds them to 2 % of the wall clock.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import bench_report
import bench_stats
from bench_boundary import make_boundary
from bench_common import BenchError, emit
from bench_faults import Watch
from bench_plan import Plan
from bench_report import StepRecord
from bench_runtime import CompileLog, TrainerProgram
from bench_trace import Tracer

TAG = "[TrainerBench]"
CLOCK_GAP_LIMIT = 0.02  # of wall clock; more means that the step times do not cover what happened
CLOCK_SLACK_SECONDS = 0.01  # per step, for the driver's own line and record; 2 % of a step of half a second
SIGNATURE = "trainer-bench-steps/1"


@dataclasses.dataclass
class Run:
    """Everything one run has come to know; the result document is made of it at any moment."""

    options: argparse.Namespace
    plan: Plan | None = None
    program: TrainerProgram | None = None
    count: int = 0  # micro-batches per step
    batches: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    load: dict[str, Any] | None = None
    steps: list[StepRecord] = dataclasses.field(default_factory=list)
    wall_seconds: float = 0.0
    paused_seconds: float = 0.0  # profiler start and stop, looks at the interval; outside every step
    next_look: int = 0  # step count at which --until-ci looks at the interval again
    policy_logps: Any = None
    staging: dict[str, Any] = dataclasses.field(default_factory=lambda: {"asked": False, "stopped_at_step": None})
    trace_folder: str = ""  # of --profile
    trace: dict[str, Any] | None = None
    status: str = "ok"
    error: str | None = None
    gave_up: bool = False  # the main thread is inside a device call that does not come back


def say(message: str) -> None:
    """Print one [TrainerBench] line to stdout, where pods' logs are read; the JSON stays the last line."""
    emit(f"{TAG} {message}\n")


def live(message: str) -> None:
    """Show what is going on in one line that is overwritten; only on a terminal, never in a log."""
    if sys.stderr.isatty():
        print(f"\r{TAG} {message:<60}", end="", file=sys.stderr, flush=True)


def run_step(
    run: Run, index: int, payloads: Sequence[Any], compiles: CompileLog, staged: Any, watch: Watch
) -> StepRecord:
    """Drive one optimizer step exactly as the orchestrator does and time it.

    Where the argv asks for it, the actor's log-prob pass runs before each micro-batch and blocks, as there; what it
    returns is not fed back, because the orchestrator would change values with it and no shape.

    Args:
      payloads: the run's distinct micro-batches, as payload objects; the step takes the next N of them.
      staged: a StepBoundary that may have the first one on the device already, or None.
    """
    program, calls = run.program, []
    boundary = {"device_wait_seconds": None, "h2d_seconds": None}
    collected = watch.gc_seconds()

    def timed(name: str, call: Callable[..., Any], *args: Any) -> None:
        begin = time.perf_counter()
        call(*args)
        calls.append((time.perf_counter() - begin, name))
        watch.check()

    orch, pad_id = run.plan.job.orch, run.plan.job.pad_id
    start = time.perf_counter()
    for i in range(run.count):
        live(f"step {index}: micro-batch {i + 1} of {run.count}")
        which, last = (index * run.count + i) % len(payloads), i == run.count - 1
        if run.plan.logps_pass:
            timed("per_token_logps", program.per_token_logps, run.batches[which], orch.temperature, pad_id)
        if staged is not None:
            timed("fwd_bwd (staged)" if staged.ready else "fwd_bwd", staged.fwd_bwd, last, payloads[which])
        else:
            timed("fwd_bwd", program.fwd_bwd, payloads[which], last)
    if staged is not None:
        boundary = staged.cross(run, index)
    timed("update", staged.update if staged is not None else program.update)
    program.wait_for_update()
    ready = time.perf_counter()
    metrics = program.metrics()
    end = time.perf_counter()
    events = compiles.take()
    seconds, name = max(calls)
    norms = metrics.get("gradient_norm") or metrics.get("grad_norm") or [None]
    return StepRecord(
        index=index, seconds=end - start, update_ready_seconds=ready - start,
        dispatch_seconds=sum(seconds for seconds, _ in calls), metrics_seconds=end - ready,
        fwd_bwd_seconds_throttled=[spent for spent, what in calls if what.startswith("fwd_bwd")],
        longest_call_seconds=seconds, longest_call=name, gc_seconds=watch.gc_seconds() - collected,
        compiles=[{"program": name, "seconds": seconds} for name, seconds in events],
        losses=metrics.get("loss", []), gradient_norm=norms[-1],
        micro_batches_differ=any(len(values) == run.count and len(set(values)) > 1 for values in metrics.values()),
        gradient_share=gradient_share(metrics), **boundary,
    )  # fmt: skip


def gradient_share(metrics: Mapping[str, Sequence[float]]) -> float | None:
    """Return the share of scored tokens past the loss's gates, averaged over the micro-batches; None if not told.

    The product of the loss's own metrics: advantages that are not zero, sequences kept by the sequence masks,
    sequences inside the band of seq-mask-tis.
    """
    shares = [metrics[name] for name in ("advantage/nonzero_frac", "sample_mask/kept_frac") if name in metrics]
    shares += [[1 - value for value in metrics[name]] for name in ("tis/is_oob_ratio",) if name in metrics]
    return math.prod(sum(values) / len(values) for values in shares) if shares else None


def check_step(step: StepRecord, micro_batches: int, distinct: int) -> None:
    """Refuse a step that trained nothing or nonsense.

    Raises:
      BenchError: a loss or gradient norm that is not finite, a gradient norm of zero, equal losses.
    """
    where = f"step {step.index}"
    if len(step.losses) != micro_batches:
        raise BenchError(f"{len(step.losses)} losses for {micro_batches} micro-batches", where=where,
                         todo="the worker does not report what the engine ran")  # fmt: skip
    if not all(math.isfinite(loss) for loss in step.losses):
        raise BenchError(f"loss is not finite: {step.losses}", where=where, todo="try check_numerics_cpu on the flags")
    if step.gradient_norm is None or not math.isfinite(step.gradient_norm):
        raise BenchError(f"gradient norm is {step.gradient_norm}", where=where, todo="try check_numerics_cpu")
    if step.gradient_norm == 0:
        raise BenchError("gradient norm is 0: no token carries gradient", where=where,
                         todo="the loss's gates dropped the batch; use --sampler-logps policy")  # fmt: skip
    if distinct > 1 and not step.micro_batches_differ:
        raise BenchError(f"all {micro_batches} micro-batches have the loss {step.losses[0]} and equal metrics",
                         where=where, todo="does each batch reach the loss?")  # fmt: skip


def drive(run: Run, watch: Watch) -> None:
    """Run whole optimizer steps until the plan, the interval or a limit says stop; fills `run`.

    Raises:
      BenchError: a step that trained nothing, or a clock that does not add up.
      Interrupted: a signal asked to stop; the step in flight is abandoned.
    """
    options, program = run.options, run.program
    steps_handle = open_steps_file(options)
    compiles = CompileLog()
    try:
        payloads = [program.payload(batch) for batch in run.batches]
        staged = make_boundary(run, payloads)
        tracer = Tracer(options.profile, run.trace_folder)
        begin = time.perf_counter()
        while True:
            index = len(run.steps)
            run.paused_seconds += tracer.before(index)
            with watch.step(index, options.step_timeout):
                step = run_step(run, index, payloads, compiles, staged, watch)
            step.profiled = tracer.active
            run.paused_seconds += tracer.after(index)
            run.steps.append(step)
            run.wall_seconds = time.perf_counter() - begin
            append_step(steps_handle, dataclasses.asdict(step), options)
            check_step(step, run.count, len(run.batches))
            say(bench_report.step_line(step, None if options.until_ci else options.steps))
            asked = time.perf_counter()
            done = _done(run)
            run.paused_seconds += time.perf_counter() - asked  # the bootstrap of --until-ci is no step
            if done:
                break
        run.trace = tracer.result()
    finally:
        compiles.close()
        if steps_handle is not None:
            os.close(steps_handle)
    audit_clock(run)


def audit_clock(run: Run) -> None:
    """Compare the sum of the step times with the wall clock around them.

    Raises:
      BenchError: they are more than 2 % apart, and more than the driver itself needs between two steps.
    """
    wall = run.wall_seconds - run.paused_seconds
    gap = bench_stats.clock_gap([step.seconds for step in run.steps], wall)
    if gap > CLOCK_GAP_LIMIT and gap * wall > CLOCK_SLACK_SECONDS * len(run.steps):
        raise BenchError(f"the step times miss {gap:.1%} of the wall clock", where="clock audit",
                         todo="something ran between the steps; look for a busy host")  # fmt: skip


def _done(run: Run) -> bool:
    options, count = run.options, len(run.steps)
    if not options.until_ci:
        return count >= options.steps
    if count >= options.max_steps or run.wall_seconds >= options.max_seconds:
        return True
    if count < max(options.steps, run.next_look):
        return False
    run.next_look = count + 1 + count // 10  # a look costs some milliseconds a step, so they become rarer
    summary = bench_stats.summarize([step.time() for step in run.steps], options.warmup, options.seed)
    return summary.verdict == "ok" and summary.half_width is not None and summary.half_width <= options.until_ci


def open_steps_file(options: argparse.Namespace) -> int | None:
    """Open --steps-file for appending and mark the start of this run; one write per line from here on.

    Raises:
      BenchError: it cannot be written.
    """
    if not options.steps_file:
        return None
    try:
        handle = os.open(options.steps_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        raise _cannot_write(options, error) from error
    append_step(handle, {"schema": SIGNATURE, "seed": options.seed, "steps": options.steps}, options)
    return handle


def append_step(handle: int | None, document: Mapping[str, Any], options: argparse.Namespace) -> None:
    """Append one line to --steps-file, if there is one.

    Raises:
      BenchError: it cannot be written any more, such as on a full disk.
    """
    if handle is None:
        return
    try:
        bench_report.append_line(handle, document)
    except OSError as error:
        raise _cannot_write(options, error) from error


def _cannot_write(options: argparse.Namespace, error: OSError) -> BenchError:
    return BenchError(f"cannot write: {error.strerror}", where=options.steps_file, todo="free space, or choose another")
