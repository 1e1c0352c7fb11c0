"""Time an optimizer step of bench_driver's loop against a bare loop over the same engine and micro-batches.

The driver goes through Tunix's TrainerWorker, times every call, watches for signals and compiles, checks each step and
writes it down. The bare loop calls MaxText's engine itself: N x fwd_bwd, update, wait, fetch the metrics, nothing else.
Both run in one process on one engine, a step of each in turn, so that other load on the machine meets both alike.

In: nothing; examples/launch_tiny.yaml, shrunk as --cpu-smoke does it, on four virtual CPU devices.
Out: a table, or JSON with --json: median seconds of a step of both, and the median of their ratios, pair by pair.

Exit codes: 0 within the limit (1.02 x the bare loop), 1 beyond it, 2 could not run.

Examples:
  python benchmarks/driver_overhead.py
  python benchmarks/driver_overhead.py --steps 60 --json
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import os
import pathlib
import shlex
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

LIMIT = 1.02  # x the bare loop
WARMUP = 3  # steps of each before the first that counts: compiles, and what the second update compiles


def build_parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="of each loop (default: 40)")
    parser.add_argument("--json", action="store_true", help="write one JSON document")
    return parser


def launch_environment() -> None:
    """Set the environment as the bench of examples/launch_tiny.yaml has it."""
    from launch_render import clients, read_render

    path = ROOT / "examples" / "launch_tiny.yaml"
    found = {c.role: c for doc in read_render(path.read_text(), path.name).documents for c in clients(doc)}
    for name, role in (("TRAINER_ARGV", "trainer"), ("ORCH_ARGV", "orchestrator")):
        os.environ[name] = shlex.join(word.value for word in found[role].argv)
    os.environ["MAXTEXT_EXTRA_FLAGS"] = found["trainer"].env["MAXTEXT_EXTRA_FLAGS"]


def make_run() -> Any:
    """Return a bench_loop.Run with plan, micro-batches and a started program, as bench_driver makes it."""
    import bench_driver
    import bench_loop
    import bench_runtime
    from bench_plan import make_micro_batches

    options = bench_driver.build_parser().parse_args(["--cpu-smoke"])
    bench_driver.set_up_platform(options)
    run = bench_loop.Run(options)
    run.plan = bench_driver.plan_run(options)
    run.batches, run.count, run.load = make_micro_batches(run.plan, options)
    run.program = bench_runtime.build_program(run.plan.job)
    bench_driver.fill_sampler_logps(run)
    return run


def bare_step(run: Any, payloads: Sequence[Any], index: int) -> None:
    """Run one optimizer step on the engine itself."""
    import jax

    engine, orch = run.program.engine, run.plan.job.orch
    with run.program.mesh:
        for i in range(run.count):
            which = (index * run.count + i) % len(payloads)
            if run.plan.logps_pass:
                run.program.per_token_logps(run.batches[which], orch.temperature, run.plan.job.pad_id)
            engine.fwd_bwd(payloads[which])
        engine.update()
        jax.block_until_ready(engine.optimizer.step[...])
        jax.device_get(engine.get_metrics())


def driver_step(run: Any, payloads: Sequence[Any], index: int, compiles: Any, watch: Any, handle: int) -> None:
    """Run one optimizer step as bench_loop.drive does: timed, written down, checked and reported."""
    import bench_loop
    import bench_report

    with watch.step(index, None):
        step = bench_loop.run_step(run, index, payloads, compiles, None, watch)
    run.steps.append(step)
    bench_loop.append_step(handle, dataclasses.asdict(step), run.options)
    bench_loop.check_step(step, run.count, len(run.batches))
    with contextlib.redirect_stdout(io.StringIO()):
        bench_loop.say(bench_report.step_line(step, None))


def alternate(steps: int, first: Callable[[int], None], second: Callable[[int], None]) -> list[tuple[float, float]]:
    """Return (seconds of the first, of the second) per pair; each goes first every other time."""
    pairs = []
    for index in range(steps + WARMUP):
        seconds = {}
        for loop in (first, second) if index % 2 else (second, first):
            begin = time.perf_counter()
            loop(index)
            seconds[loop] = time.perf_counter() - begin
        if index >= WARMUP:
            pairs.append((seconds[first], seconds[second]))
    return pairs


def measure(steps: int) -> list[tuple[float, float]]:
    """Return (driver seconds, bare seconds) per pair of steps."""
    from bench_faults import Watch
    from bench_runtime import CompileLog

    launch_environment()
    warnings.filterwarnings("ignore", ".*with mesh", DeprecationWarning)  # the context that the worker enters, too
    run = make_run()
    payloads = [run.program.payload(batch) for batch in run.batches]
    compiles = CompileLog()
    with Watch(lambda reason, code: None) as watch, tempfile.TemporaryFile() as file:
        pairs = alternate(
            steps,
            lambda index: driver_step(run, payloads, index, compiles, watch, file.fileno()),
            lambda index: bare_step(run, payloads, index),
        )
    compiles.close()
    run.program.stop()
    return pairs


def summary(pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Return the medians in seconds, and the ratio of neighbours with its quartiles."""
    low, middle, high = statistics.quantiles([driver / bare for driver, bare in pairs], n=4)
    return {
        "schema": "driver-overhead/1",
        "steps": len(pairs),
        "driver_step_seconds": statistics.median(driver for driver, _ in pairs),
        "bare_step_seconds": statistics.median(bare for _, bare in pairs),
        "ratio": middle,
        "ratio_quartiles": [low, high],
        "limit": LIMIT,
        "met": middle <= LIMIT,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; see the module's docstring."""
    from bench_common import BenchError, dump_json, emit, run_tool

    args = build_parser().parse_args(argv)

    def body() -> int:
        if args.steps < 4:
            raise BenchError(f"--steps {args.steps} gives no quartiles", todo="give 4 or more")
        with contextlib.redirect_stdout(sys.stderr):  # MaxText prints its config
            found = summary(measure(args.steps))
        low, high = found["ratio_quartiles"]
        lines = [
            f"bench_driver's loop  {found['driver_step_seconds'] * 1000:8.1f} ms per optimizer step",
            f"bare loop            {found['bare_step_seconds'] * 1000:8.1f} ms, {found['steps']} steps of each in turn",
            f"ratio {found['ratio']:.3f} (quartiles {low:.3f} to {high:.3f}; at most {LIMIT})",
        ]
        emit(dump_json(found) if args.json else "\n".join(lines) + "\n")
        return 0 if found["met"] else 1

    return run_tool("driver_overhead", body)


if __name__ == "__main__":
    raise SystemExit(main())
