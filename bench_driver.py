"""Run the trainer half of a Tunix GRPO run alone and say how long an optimizer step takes, and how sure that is.

One optimizer step is N x fwd_bwd, one update and one metrics fetch, through Tunix's TrainerWorker around MaxText's
engine, with the GRPO loss, the mesh and the flags of the launch, on a synthetic micro-batch whose MoE routing load is
calibrated to production. In a pod render_bench.py sets everything; on a laptop --cpu-smoke shrinks the model.

Input (environment, or the options of the same name): TRAINER_ARGV and ORCH_ARGV, the argv of the launch as one
shell-quoted string each; MAXTEXT_EXTRA_FLAGS and the trainer's other variables as they are.

Output: [TrainerBench] lines while it runs, a table of the steps, the verdict, and as the last line of stdout one JSON
document (schema trainer-bench/1) with every step, versions, flags, the resolved config and the load table:
    [TrainerBench] step 7/10: 0.0812 s, loss 0.0021..0.0043, grad norm 0.3341
    {"schema": "trainer-bench/1", "status": "ok", "verdict": "ok", ...}

Exit status: 0 the verdict is ok; 1 the steps do not support a claim (verdict `not enough`: too few, drifting, a
compile inside the window), or the routing load is out of tolerance; 2 could not run (bad input, out of memory, NaN, a
hung device); 143 or 130 after SIGTERM or SIGINT, with what was measured written out.

Examples:
    # the rendered command on a laptop: real engine, small model, four virtual devices
    bench_driver.py --cpu-smoke --steps 8 --trainer-argv "$TRAINER_ARGV" --orch-argv "$ORCH_ARGV"
    # only the first micro-batch, to look at or to replay
    bench_driver.py --payload-only --save-payload batch.npz --routing-load 1.35
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
import shlex
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import bench_config
import bench_report
import bench_runtime
import bench_stats
import bench_trace
from bench_common import (
    EXIT_CANNOT,
    EXIT_DIFFERENT,
    EXIT_OK,
    BenchError,
    complain,
    emit,
    missing_package,
    run_tool,
    write_whole,
)
from bench_faults import EXIT_BY_SIGNAL, Interrupted, Watch, is_out_of_memory
from bench_loop import Run, drive, say
from bench_plan import OutOfTolerance, Plan, make_micro_batches, mesh_product, plan_launch

# ---------------------------------------------------------------------------------------------
# Options


def build_parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(prog="bench_driver", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    add = parser.add_argument
    add("--trainer-argv", default=os.environ.get("TRAINER_ARGV"), help="the trainer's flags (default: $TRAINER_ARGV)")
    add("--orch-argv", default=os.environ.get("ORCH_ARGV"), help="the orchestrator's flags (default: $ORCH_ARGV)")
    add("--steps", type=_count, default=12, help="optimizer steps to run (default: 12)")
    add("--warmup", type=_count_or_zero, help="opening steps to exclude (default: detected)")
    add("--micro-batches", type=_count, help="N per step (default: from the argv)")
    add("--seed", type=_count_or_zero, default=0, help="of micro-batches and bootstrap (default: 0)")
    add("--until-ci", type=_percent, metavar="P%", help="go on until the 95 %% interval is +-P%% of the median")
    add("--max-steps", type=_count, default=1000, help="with --until-ci (default: 1000)")
    add("--max-seconds", type=_seconds, default=3600.0, help="with --until-ci (default: 3600)")
    add(
        "--sequence-lengths",
        default="full",
        metavar="SPEC",
        help="full, fixed:N, uniform:LOW:HIGH, lognormal:MEDIAN:SIGMA or a file (default: full)",
    )
    add(
        "--routing-load",
        default="uniform",
        metavar="SPEC",
        help="none, uniform, a max/mean ratio, a JSON or CSV file, or a MaxText log (default: uniform)",
    )
    add("--routing-skew", choices=("lognormal", "powerlaw", "flat"), default="lognormal", help="within a shard")
    add("--routing-tolerance", type=_percent, default=0.01, metavar="P%", help="around the target (default: 1%%)")
    add(
        "--routing-leave-unset",
        action="store_true",
        help="-1 on padding and on each sequence's last token, as Tunix has it; the router decides there",
    )
    add(
        "--sampler-logps",
        choices=("policy", "synthetic"),
        default="policy",
        help="sampler log-probs near the policy's own (one extra pass before step 0), or as the batch has them",
    )
    add("--replay", metavar="FILE.npz", help="a recorded micro-batch instead of a synthetic one")
    add("--save-payload", metavar="FILE.npz", help="write the first micro-batch")
    add("--payload-only", action="store_true", help="stop after that; no engine, no device work")
    add("--save-numerics", metavar="FILE.npz", help="losses, gradient norms, log-probs and a sample of the weights")
    add(
        "--cpu-smoke",
        action="store_true",
        default=_switched_on("BENCH_CPU_SMOKE"),
        help="virtual CPU devices and a shrunk model (default: $BENCH_CPU_SMOKE)",
    )
    add("--devices", type=_count, default=4, help="virtual devices of --cpu-smoke (default: 4)")
    add("--drop-unknown-maxtext-keys", action="store_true", help="run without keys the installed MaxText lacks")
    add("--allow-standin", action="store_true", help="run on an accelerator without Tunix from git")
    add(
        "--stage-before-update",
        action="store_true",
        default=_switched_on("STAGE_BEFORE_UPDATE"),
        help="stage the next step's first micro-batch before the update (default: $STAGE_BEFORE_UPDATE)",
    )
    add("--profile", type=_window, metavar="FIRST:COUNT", help="trace these optimizer steps with jax.profiler")
    add("--profile-dir", metavar="DIR",
        help=f"where traces go (default: {bench_trace.LOCAL_FOLDER}; Pathways: output directory/profile)")  # fmt: skip
    add("--step-timeout", type=_seconds, metavar="SECONDS", help="give a step up as hung after this long")
    add("--steps-file", metavar="FILE", help="append each step as one JSON line")
    add("--out", metavar="FILE", help="also write the result document there")
    add("--plot", metavar="FILE", help="draw the step times (png or svg; needs matplotlib)")
    return parser


def _switched_on(name: str) -> bool:
    return os.environ.get(name, "").strip().lower() in ("1", "true", "yes", "on")


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a whole number from 1 expected, got {text!r}")
    return int(text)


def _count_or_zero(text: str) -> int:
    return 0 if text == "0" else _count(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"seconds expected, got {text!r}") from error
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"seconds above 0 expected, got {text!r}")
    return value


def _percent(text: str) -> float:
    try:
        value = float(text.rstrip("%")) / 100
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"a percentage expected, got {text!r}") from error
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"between 0% and 100%, got {text!r}")
    return value


def _window(text: str) -> tuple[int, int]:
    first, colon, count = text.partition(":")
    if not (colon and first.isdigit() and count.isdigit() and int(count)):
        raise argparse.ArgumentTypeError(f"FIRST:COUNT expected, got {text!r}")
    return int(first), int(count)


# ---------------------------------------------------------------------------------------------
# Setting up


def check_outputs(options: argparse.Namespace) -> None:
    """Refuse what cannot be written before anything runs.

    Raises:
      BenchError: a directory, or a file in a folder that is missing or read-only; a plot that cannot be drawn; a
        trace of steps that will not be run.
    """
    if options.profile and not options.until_ci and sum(options.profile) > options.steps:
        first, count = options.profile
        raise BenchError(f"the run ends after step {options.steps - 1}", where=f"--profile {first}:{count}",
                         todo=f"run --steps {first + count}, or trace earlier ones")  # fmt: skip
    for path in (options.out, options.plot, options.steps_file, options.save_payload, options.save_numerics):
        folder = os.path.dirname(os.path.realpath(path)) if path else None
        if path and (os.path.isdir(path) or not os.access(folder, os.W_OK)):
            why = "Is a directory" if os.path.isdir(path) else f"no folder {folder} to write into"
            raise BenchError(f"cannot write: {why}", where=path, todo="choose a writable place")
    if options.plot and not options.plot.endswith((".png", ".svg")):
        raise BenchError("not .png or .svg", where=f"--plot {options.plot}", todo="name the file by its format")
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        raise BenchError("matplotlib is not installed", where="--plot", todo="install the extra `plot`, or leave it")


def set_up_platform(options: argparse.Namespace) -> None:
    """Choose the backend before JAX is imported: virtual CPU devices for a smoke run, else what the pod says.

    Raises:
      BenchError: JAX runs on other devices already, or the backend does not start.
    """
    if not options.cpu_smoke:
        bench_runtime.start_backend()
        return
    if "jax" not in sys.modules:
        flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split()
                 if not flag.startswith("--xla_force_host_platform_device_count")]  # fmt: skip
        flags.append(f"--xla_force_host_platform_device_count={options.devices}")
        os.environ["XLA_FLAGS"] = " ".join(flags)
        os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    if jax.default_backend() != "cpu" or jax.device_count() != options.devices:
        here = f"{jax.device_count()} {jax.default_backend()} devices"
        raise BenchError(f"JAX already runs on {here}", where="--cpu-smoke", todo="start a new process, or --devices")


def launch_argv(options: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Return the two argv as words.

    Raises:
      BenchError: one is missing, or its quotes do not close.
    """
    words = []
    for name, text in (("TRAINER_ARGV", options.trainer_argv), ("ORCH_ARGV", options.orch_argv)):
        if text is None:
            raise BenchError(f"{name} is not set", todo="run a rendered command, or give --trainer-argv, --orch-argv")
        try:
            words.append(shlex.split(text))
        except ValueError as error:
            raise BenchError(f"cannot split into words: {error}", where=name, todo="quote as a shell does") from error
    return words[0], words[1]


def plan_run(options: argparse.Namespace) -> Plan:
    """Return the plan of this process's launch. Imports JAX and MaxText unless --payload-only."""
    trainer_argv, orch_argv = launch_argv(options)
    common = {"lengths": options.sequence_lengths, "routing_load": options.routing_load, "skew": options.routing_skew,
              "tolerance": options.routing_tolerance, "leave_unset": options.routing_leave_unset,
              "cpu_smoke": options.cpu_smoke}  # fmt: skip
    if options.payload_only:
        devices = options.devices if options.cpu_smoke else mesh_product(trainer_argv)
        return plan_launch(trainer_argv, orch_argv, os.environ, devices, **common)
    import jax

    if not options.cpu_smoke and jax.default_backend() != "cpu" and not bench_runtime.has_tunix_experimental() \
            and not options.allow_standin:  # fmt: skip
        raise BenchError("Tunix here has no tunix.experimental: the stand-in would run in its place", where="Tunix",
                         todo="install Tunix from git, or --allow-standin")  # fmt: skip
    return plan_launch(
        trainer_argv, orch_argv, os.environ, jax.device_count(), known_keys=bench_runtime.known_maxtext_keys(),
        drop_unknown=options.drop_unknown_maxtext_keys, payload_fields=bench_runtime.payload_fields(),
        pad_id=bench_runtime.pad_id(trainer_argv, options.cpu_smoke), **common)  # fmt: skip


def fill_sampler_logps(run: Run) -> None:
    """Put sampler log-probs near the policy's own into every micro-batch, so that the loss's gates keep it.

    One forward pass per micro-batch before the first step, with the worker's own log-prob method; never inside a
    step. Without it seq-mask-tis (0.999 to 1.002) would reject every sequence and the gradient would be zero, of a
    recorded batch as well, whose sampler had other weights.
    """
    orch = run.plan.job.orch
    gated = orch.use_rollout_logps or orch.seq_logprob_error_threshold or orch.truncated_importance_sampling_type \
        or orch.sampler_is or orch.sampler_rs  # fmt: skip
    if not (gated or run.options.save_numerics) or run.options.sampler_logps == "synthetic":
        return
    import bench_payload

    say(f"one forward pass over {len(run.batches)} micro-batches for the sampler's log-probs")
    for i, batch in enumerate(run.batches):
        logps = run.program.per_token_logps(batch, orch.temperature, run.plan.job.pad_id)
        run.policy_logps = logps if i == 0 else run.policy_logps
        run.batches[i] = bench_payload.with_logps(batch, logps, run.options.seed + i)


# ---------------------------------------------------------------------------------------------
# The result


def result_document(run: Run) -> dict[str, Any]:
    """Return the result document of a run at any moment (schema trainer-bench/1)."""
    options, plan, program = run.options, run.plan, run.program
    summary = bench_stats.summarize([step.time() for step in run.steps], options.warmup, options.seed)
    reasons = [*summary.reasons, *_not_as_tight_as_asked(summary, options.until_ci)]
    reasons = reasons if run.status == "ok" else [run.error or run.status]
    document: dict[str, Any] = {
        "schema": bench_report.SCHEMA, "status": run.status,
        "verdict": "ok" if run.status == "ok" and not reasons else "not enough", "reasons": reasons, "error": run.error,
        "runtime": program.runtime if program else None, "versions": versions_of(run),
        "trainer_argv": bench_report.masked_argv(plan.job.trainer_argv) if plan else None,
        "orch_argv": bench_report.masked_argv(plan.job.orch_argv) if plan else None,
        "flags": bench_report.flag_variables(os.environ),
        "seed": options.seed, "micro_batches_per_step": run.count or None, "distinct_micro_batches": len(run.batches),
        **_batch_document(run), "routing_load": plan.routing_load if plan else None, "load": _without_text(run.load),
        "headline": bench_report.headline(summary, _rates(run)),
        "first_step_compile_seconds": sum(c["seconds"] for c in run.steps[0].compiles) if run.steps else None,
        "wall_seconds": run.wall_seconds or None, "paused_seconds": run.paused_seconds,
        "host_stalls": bench_report.host_stalls(run.steps, summary), "staged_boundary": run.staging,
        "profile": run.trace, "steps": [dataclasses.asdict(step) for step in run.steps],
        "shrunk": [dataclasses.asdict(item) for item in plan.shrunk] if plan else [],
        "not_the_same_program": plan.job.not_the_same_program if plan else [],
        "may_not_be_used_to_claim": bench_report.claims(
            program.runtime if program else None, options.cpu_smoke, bool(options.replay),
            plan.routing_load if plan else "none", bool(plan and _real_weights(plan))),
        "provenance": bench_report.provenance(os.environ),
    }  # fmt: skip
    devices = _devices(run)
    document["mesh"] = {axis: size for axis, size in program.mesh.shape.items() if size > 1} if program else None
    document["devices"] = _devices_document(devices)
    # A device that hangs may not answer; what was asked of it before is in the document already.
    document["memory"] = bench_report.device_memory(devices) if devices and not run.gave_up else None
    document["config"] = bench_report.config_document(program.config) if program else None
    return document


def _not_as_tight_as_asked(summary: bench_stats.Summary, until_ci: float | None) -> list[str]:
    if until_ci is None or summary.half_width is None or summary.half_width <= until_ci:
        return []
    return [f"the interval is +-{summary.half_width:.2%} of the median, --until-ci asked for {until_ci * 100:g}%: "
            "raise --max-steps or --max-seconds"]  # fmt: skip


def versions_of(run: Run) -> dict[str, str | None]:
    """Return the versions of what ran; none are looked up before a program was built."""
    return bench_runtime.versions() if run.program else {}


def _devices(run: Run) -> list[Any]:
    """Return the devices of the mesh; before there is one, those that the plan was made for, if JAX knows them."""
    if run.program is not None:
        return list(run.program.mesh.devices.flat)
    return list(sys.modules["jax"].devices()) if run.plan is not None and "jax" in sys.modules else []


def _devices_document(devices: Sequence[Any]) -> dict[str, Any] | None:
    if not devices:
        return None
    kind = devices[0].device_kind
    return {"count": len(devices), "kind": kind, "platform": devices[0].platform,
            "per_chip": bench_report.DEVICES_PER_CHIP.get(kind, 1)}  # fmt: skip


def _rates(run: Run) -> dict[str, Any]:
    devices = _devices_document(_devices(run)) or {"count": 1, "per_chip": 1}
    batch = _batch_document(run)
    return {"slots_per_step": batch["slots_per_step"], "real_tokens_per_step": batch["real_tokens_per_step"],
            "devices": devices["count"], "devices_per_chip": devices["per_chip"]}  # fmt: skip


def _batch_document(run: Run) -> dict[str, Any]:
    import bench_payload

    plan, batches = run.plan, run.batches
    real = None
    if batches and run.count:
        real = sum(bench_payload.real_tokens(batch) for batch in batches) * run.count / len(batches)
    return {"batch": dataclasses.asdict(plan.batch) if plan else None,
            "slots_per_step": plan.batch.slots * run.count if plan and run.count else None,
            "real_tokens_per_step": real,
            "gradient_share": bench_payload.gradient_share(batches[0], plan.spec.masks_overlong) if batches else None,
            "logps_pass_per_micro_batch": plan.logps_pass if plan else None}  # fmt: skip


def _without_text(load: dict[str, Any] | None) -> dict[str, Any] | None:
    return None if load is None else {name: value for name, value in load.items() if name != "text"}


def _real_weights(plan: Plan) -> bool:
    path = bench_config.effective(plan.job.settings).get("load_parameters_path")
    return path is not None and path.value != ""


def write_result(run: Run) -> dict[str, Any]:
    """Print table, verdict and the JSON line; write --out and --plot. Returns the document.

    Raises:
      BenchError: a file cannot be written; the JSON line has been printed all the same.
    """
    summary = bench_stats.summarize([step.time() for step in run.steps], run.options.warmup, run.options.seed)
    document = result_document(run)
    if run.steps:
        emit(bench_report.table(run.steps, summary) + "\n")
    for line in bench_report.closing_lines(document):
        say(line)
    text = bench_report.one_line(document)
    try:
        if run.options.out:
            write_whole(run.options.out, text)
        if run.options.plot and run.steps:
            write_whole(run.options.plot, bench_report.plot(run.options.plot, run.steps, summary))
    finally:
        emit(text)
    return document


# ---------------------------------------------------------------------------------------------
# Main


def payload_only(options: argparse.Namespace) -> int:
    """Build and describe the first micro-batch, and write it where asked."""
    import bench_payload

    check_outputs(options)
    plan = plan_run(options)
    try:
        batches, count, load = make_micro_batches(plan, options, first_only=True)
    except OutOfTolerance as error:
        complain("bench_driver", str(error))
        return EXIT_DIFFERENT
    describe_payload(batches[0], plan, load)
    say(f"the argv make {count} micro-batches per optimizer step")
    if options.save_payload:
        bench_payload.save_npz(options.save_payload, batches[0])
        say(f"written: {options.save_payload}")
    return EXIT_OK


def describe_payload(batch: Mapping[str, Any], plan: Plan, load: dict[str, Any] | None) -> None:
    """Say what a micro-batch holds."""
    import bench_payload

    slots = plan.batch.slots
    real = bench_payload.real_tokens(batch)
    share = bench_payload.gradient_share(batch, plan.spec.masks_overlong)
    say(f"micro-batch: {plan.batch.rows} rows x {plan.batch.row_width} tokens, {real} of {slots} slots real, "
        f"{share:.1%} of scored tokens carry gradient")  # fmt: skip
    for line in load["text"] if load else ():
        say(line)


def execute(run: Run, watch: Watch) -> None:
    """Plan, build, and drive a run; fills it."""
    import bench_payload

    options = run.options
    if not options.cpu_smoke or "maxtext" not in sys.modules:
        say("importing JAX and MaxText")
    set_up_platform(options)
    run.plan = plan_run(options)
    for why in dict.fromkeys(item.why for item in run.plan.shrunk):
        items = [f"{item.what}={item.now}" for item in run.plan.shrunk if item.why == why]
        say(f"cpu-smoke, {why}: {' '.join(items)}")
    if options.profile:
        output, pathways = run.plan.job.trainer.maxtext_output_directory, bench_runtime.through_pathways(os.environ)
        run.trace_folder = bench_trace.trace_folder(options.profile_dir, output, pathways)
    run.batches, run.count, run.load = make_micro_batches(run.plan, options)
    describe_payload(run.batches[0], run.plan, run.load)
    if options.save_payload:
        bench_payload.save_npz(options.save_payload, run.batches[0])
    watch.check()
    say("building the engine")
    run.program = bench_runtime.build_program(run.plan.job)
    mesh = " x ".join(f"{axis} {size}" for axis, size in run.program.mesh.shape.items() if size > 1) or "one device"
    say(f"runtime {run.program.runtime}; mesh {mesh}; {run.count} micro-batches per optimizer step")
    fill_sampler_logps(run)
    watch.check()
    say("compiling and running step 0")
    drive(run, watch)
    if options.save_numerics:
        from numerics_file import save_numerics

        save_numerics(options.save_numerics, run)


def bench(options: argparse.Namespace) -> int:
    """Run the bench and write its result whatever happens. Returns the exit code."""
    check_outputs(options)
    run = Run(options)
    run.staging["asked"] = options.stage_before_update

    def give_up(reason: str, code: int) -> None:
        run.status, run.error, run.gave_up = ("hung" if code == EXIT_CANNOT else "interrupted"), reason, True
        write_result(run)
        complain("bench_driver", reason)

    with Watch(give_up) as watch:
        try:
            code = _guarded(run, watch)
        finally:
            _stop_worker(run)
        document = write_result(run)
    if code != EXIT_OK:
        complain("bench_driver", run.error)
        return code
    return EXIT_OK if document["verdict"] == "ok" else EXIT_DIFFERENT


def _stop_worker(run: Run) -> None:
    try:
        if run.program is not None:
            run.program.stop()
    except Exception as error:  # whatever a worker raises while it ends: the result is written all the same
        say(f"the worker did not stop: {type(error).__name__}: {' '.join(str(error).split())[:300]}")


def _guarded(run: Run, watch: Watch) -> int:
    """Execute the run; turn what can go wrong into a status, a message and an exit code."""
    try:
        execute(run, watch)
        return EXIT_OK
    except Interrupted as stop:
        run.status, run.error = "interrupted", f"interrupted by {stop} after {len(run.steps)} steps"
        return stop.code
    except OutOfTolerance as error:
        run.status, run.error = "out_of_tolerance", str(error)
        return EXIT_DIFFERENT
    except BenchError as error:
        run.status, run.error = "failed", str(error)
    except ModuleNotFoundError as error:
        run.status, run.error = "failed", str(missing_package(error))
    except NotImplementedError as error:  # how MaxText says that it cannot run a config; the words are the cause
        todo = "; --routing-load none leaves it to the router" if "routing" in str(error) else ""
        run.status, run.error = "failed", f"MaxText cannot run this: {' '.join(str(error).split())[:600]}{todo}"
    except Exception as error:
        if is_out_of_memory(error):
            run.status = "out_of_memory"
            run.error = f"out of memory after {len(run.steps)} steps: {' '.join(str(error).split())[:600]}"
        else:
            run.status, run.error = "failed", f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"
            traceback.print_exc()  # of Tunix, MaxText or JAX: their message is where the cause is
    return EXIT_CANNOT


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; see the module's docstring."""
    options = build_parser().parse_args(argv)
    try:
        return run_tool("bench_driver", lambda: payload_only(options) if options.payload_only else bench(options))
    except KeyboardInterrupt:  # --payload-only, or before the run watches for signals
        complain("bench_driver", "interrupted by SIGINT")
        return EXIT_BY_SIGNAL[signal.SIGINT]


if __name__ == "__main__":
    raise SystemExit(main())
