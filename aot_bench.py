#!/usr/bin/env python3
"""Say whether a trainer fits its TPUs, before a slice is booked: compile its kernels for the slice on this machine.

The three programs of MaxText's training engine (first forward/backward, accumulating forward/backward, optimizer
update) are compiled by the real libtpu, without a TPU, with the GRPO loss, the payload, the mesh and the flags of a
launch; then what each needs is added to what stays on the device beside it.

Input: a launch or bench render (--launch-render), or --trainer-argv, --orch-argv and --slice; flags are changed as in
render_bench. With --summarize the log of somebody's maxtext_engine_compile, train_compile or out-of-memory run.
Output, GiB per JAX device (a v7x chip is two), and as JSON with --json (schema aot-bench/1):
    kernel    argument   output  aliased     temp     code     peak    total
    update       1.272    0.763    0.763    0.007    0.003    1.534    1.557
    usable HBM per JAX device: 94.74 GiB, 2 devices per chip
Progress goes to stderr. Each compile has a process of its own; nothing is cached, uploaded or run.

Exit status: 0 fits (with --lower-only or --kernels: nothing that was looked at speaks against it); 1 does not fit,
also when the compiler says so; 2 not known: bad input, a flag libtpu refuses, a compile that failed or took too
long; 130 interrupted.

Examples:
  # does the launch fit?
  DRY_RUN=true ./launch.sh | aot_bench.py --launch-render -
  # state, gradients and micro-batch in two minutes; then also with the real update
  aot_bench.py --launch-render run.yaml --lower-only
  aot_bench.py --launch-render run.yaml --kernels update --maxtext num_moe_token_chunks=4 --json
  # what hides behind compute, if it were run
  aot_bench.py --launch-render run.yaml --kernels fwd_bwd --hlo-dir hlo --overlap
  # somebody else's compile
  aot_bench.py --summarize compile.log --cap-gib 94.74
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import aot_report
from aot_memory import CAPACITIES, GIB, KERNELS, Beside, Kernel, capacity_of, find_shortages, take_statistics, verdict
from bench_common import (
    EXIT_CANNOT,
    EXIT_DIFFERENT,
    EXIT_OK,
    BenchError,
    complain,
    dump_json,
    emit,
    read_bytes,
    read_text,
    run_tool,
    shown_name,
    write_whole,
)

TOOL = "aot_bench"


# ---------------------------------------------------------------------------------------------
# Options


class _Edit(argparse.Action):
    """Collects --maxtext, --libtpu-unset ... into one list, because their order counts."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        namespace.edits = [*namespace.edits, (self.option_strings[0], values)]


def build_parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(
        prog=TOOL, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    launch = parser.add_argument_group("the launch").add_argument
    launch("--launch-render", metavar="FILE|-", help="a launcher's dry run, or a bench made of it")
    launch("--trainer", metavar="NAME", help="which trainer JobSet, where there are several")
    launch("--orch-render", metavar="FILE", help="another capture, with the orchestrator")
    launch("--orch-defaults", action="store_true", help="there is no orchestrator: take the loss options' defaults")
    launch("--trainer-argv", metavar="WORDS", help="the trainer's flags, instead of a render's")
    launch("--orch-argv", metavar="WORDS", help="the orchestrator's flags, instead of a render's")
    launch("--slice", metavar="TYPE:TOPOLOGY", help="tpu7x:4x4x8 (also MaxText's tpu7x-256), instead of the render's")
    parser.set_defaults(edits=[])
    for kind, metavar, what in (
        ("maxtext", "KEY=VALUE", "a key of MAXTEXT_EXTRA_FLAGS"),
        ("libtpu", "FLAG=VALUE", "a libtpu flag"),
        ("trainer-arg", "FLAG[=VALUE]", "a flag of the trainer"),
        ("orch-arg", "FLAG[=VALUE]", "a flag of the orchestrator"),
        ("env", "NAME=VALUE", "a variable"),
    ):
        launch(f"--{kind}", action=_Edit, metavar=metavar, help=f"set {what}; repeatable, the last one counts")
        if kind != "env":
            launch(f"--{kind}-unset", action=_Edit, metavar=metavar[:4].rstrip("=["), help="remove it")
    launch("--routing-load", choices=("uniform", "none"), default="uniform",
           help="none: the router decides, no routed_experts in the payload (default: uniform)")  # fmt: skip
    launch("--drop-unknown-maxtext-keys", action="store_true", help="compile without keys this MaxText lacks")
    _add_compile_options(parser.add_argument_group("the compile").add_argument)
    _add_report_options(parser.add_argument_group("the report").add_argument)
    return parser


def _add_compile_options(add: Any) -> None:
    add("--kernels", type=_kernels, default=KERNELS, metavar="LIST",
        help=f"compile these, lower the others (default: {','.join(KERNELS)})")  # fmt: skip
    add("--lower-only", action="store_true", help="compile nothing: config, mesh, lowering and exact state bytes")
    add("--jobs", type=_count, default=1, metavar="N", help="compile N kernels side by side (default: 1)")
    add("--timeout", type=_seconds, metavar="SECONDS", help="give a kernel up after this long (default: never)")
    add("--hlo-dir", metavar="DIR", help="keep the optimized HLO text of each kernel there")
    add("--log-dir", metavar="DIR", help="keep what MaxText and libtpu printed there")
    add("--overlap", action="store_true", help="also say which collectives are hidden (hlo_overlap)")


def _add_report_options(add: Any) -> None:
    add("--summarize", metavar="LOG|-", help="read a log instead of compiling; needs no JAX")
    add("--prediction", metavar="FILE.json", help="take an earlier aot-bench/1 document instead of compiling")
    add("--hbm-gib", "--cap-gib", type=_gib, metavar="G",
        help="usable HBM per JAX device (default: by the slice's TPU type)")  # fmt: skip
    add("--reserve-gib", type=_gib, metavar="G", help="keep this much free (default: 0)")
    add("--measured", metavar="RESULT.json", help="compare with the peak that a driver run reported")
    add("--compare", metavar="OTHER.json", help="an earlier aot-bench/1 document, side by side")
    add("--top", type=_count, default=5, metavar="N", help="list the N largest buffers (default: 5)")
    add("--format", choices=("text", "json", "markdown"), default="text", help="default: text")
    add("--json", action="store_const", const="json", dest="format", help="short for --format json")
    add("--out", metavar="FILE", help="also write the JSON document there")


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a whole number from 1 expected, got {text!r}")
    return int(text)


def _gib(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e6:
        raise argparse.ArgumentTypeError(f"a size in GiB expected, got {text!r}")
    return value


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"seconds above 0 expected, got {text!r}")
    return value


def _kernels(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    wrong = [name for name in names if name not in KERNELS]
    if wrong or not names:
        raise argparse.ArgumentTypeError(f"{text!r}: the kernels are {', '.join(KERNELS)}")
    return tuple(name for name in KERNELS if name in names)


def _join_dashes(argv: Sequence[str]) -> list[str]:
    """Let `--libtpu --xla_flag=1` be written as it is: argparse would take the value for an option of its own."""
    joined: list[str] = []
    for word in argv:
        if joined and word.startswith("-") and joined[-1].removesuffix("-unset") in (
                "--libtpu", "--trainer-arg", "--orch-arg", "--trainer-argv", "--orch-argv"):  # fmt: skip
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


# ---------------------------------------------------------------------------------------------
# Compiling


def _say(line: str) -> None:
    complain(TOOL, line)


def compile_launch(options: argparse.Namespace) -> tuple[list[Kernel], dict[str, Any]]:
    """Compile a launch's kernels in child processes.

    Returns:
      kernels and the rest of the document.

    Raises:
      BenchError: the launch cannot be read or planned, or libtpu refuses a flag.
    """
    import aot_children
    import aot_launch

    launch = aot_launch.read_launch(options)
    aot_launch.check_plan(launch, options)
    make_folders(options)
    with tempfile.TemporaryDirectory(prefix="aot_bench_") as work_dir:
        with _kept_logs(work_dir, options.log_dir):
            flags = aot_launch.check_flags(launch, work_dir, options.timeout)
            env = aot_children.child_environment(os.environ, launch.env, flags.init_args, work_dir)
            jobs = aot_launch.make_jobs(launch, flags, options)
            outcomes = aot_children.run(jobs, env, work_dir, at_a_time=options.jobs, timeout_seconds=options.timeout,
                                        say=_say)  # fmt: skip
    return collect(launch, flags, outcomes, options)


def make_folders(options: argparse.Namespace) -> None:
    """Make the folders that the options name, before anything takes minutes.

    Raises:
      BenchError: one cannot be made or written, or the one of --out is not there.
    """
    try:
        for folder in filter(None, (options.hlo_dir, options.log_dir)):
            os.makedirs(folder, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        if options.out:
            folder = os.path.dirname(os.path.abspath(options.out))
            os.stat(folder)
    except OSError as error:
        raise BenchError(f"cannot write: {error.strerror}", where=folder, todo="choose a writable place") from error


@contextlib.contextmanager
def _kept_logs(work_dir: str, log_dir: str | None) -> Any:
    """Copy what the children wrote (stderr, events) to --log-dir at the end, whatever the end is."""
    try:
        yield
    finally:
        for child in sorted(os.listdir(work_dir)) if log_dir else ():
            for name in ("stderr.log", "events.jsonl"):
                kept = os.path.join(work_dir, child, name)
                if os.path.exists(kept):
                    write_whole(os.path.join(log_dir, f"{child}.{name}"), read_bytes(kept))


def collect(
    launch: Any, flags: Any, outcomes: Sequence[Any], options: argparse.Namespace
) -> tuple[list[Kernel], dict[str, Any]]:
    """Turn the children's outcomes into kernels and the rest of the document."""
    import aot_launch

    told = next((outcome.event("lowered") for outcome in outcomes if outcome.event("lowered")), {})
    kernels = {kernel.name: kernel for outcome in outcomes for kernel in kernels_of(outcome, told)}
    for name, kernel in kernels.items() if options.hlo_dir else ():
        path = os.path.join(options.hlo_dir, aot_launch.hlo_name(launch, flags, name))
        kernel.extra["hlo_file"] = path if kernel.status == "compiled" else None
    if not told:
        refused = next((outcome for outcome in outcomes if outcome.result), None)
        error = refused.result["error"] if refused else outcomes[0].error
        raise BenchError(" ".join(str(error).split())[:600], todo="--log-dir DIR keeps the whole log")
    rest = {
        "topology": launch.topology, "devices": launch.devices, "mesh": told.get("mesh"), "batch": told.get("batch"),
        "runtime": told.get("runtime"), "resident": told.get("resident"), "versions": told.get("versions"),
        "config_sha256": launch.digest(flags), "config": told.get("config"),
        "flags": {"compiler_options": flags.options, "libtpu_init_args": flags.init_args},
        "not_the_same_program": told.get("not_the_same_program"), "notes": notes_of(told),
    }  # fmt: skip
    lost = "not lowered: the process that was to do it ended before"
    return [kernels.get(name) or Kernel(name, "failed", error=lost) for name in KERNELS], rest


def kernels_of(outcome: Any, told: Mapping[str, Any]) -> list[Kernel]:
    """Return the kernels of one child: the one it was to compile, and what else it lowered."""
    lowered = outcome.event("lowered").get("kernels", {})
    others = [Kernel(name, "lowered", argument_bytes=one["argument_bytes"], extra=_extra(one))
              for name, one in lowered.items() if name != outcome.name]  # fmt: skip
    if outcome.name not in KERNELS:  # a child that only lowers
        return others
    return [compiled_kernel(outcome, lowered.get(outcome.name, {}), told), *others]


def compiled_kernel(outcome: Any, lowered: Mapping[str, Any], told: Mapping[str, Any]) -> Kernel:
    """Return the kernel that a child was to compile: compiled, out of memory or failed."""
    kernel, result = Kernel(outcome.name, extra=_extra(lowered)), outcome.result
    text = outcome.error if result is None else result.get("error")
    if text is not None:
        kernel.shortages = find_shortages(text)
        kernel.status = "out of memory" if kernel.shortages or "RESOURCE_EXHAUSTED" in text else "failed"
        kernel.error = " ".join(text.split())[:600]
        kernel.buffers = with_savings(result or {}, told) if kernel.shortages else []
        return kernel
    kernel.compile_seconds = result["seconds"]
    take_statistics(kernel, result["statistics"])
    kernel.flops, kernel.bytes_accessed = result["flops"], result["bytes_accessed"]
    kernel.buffers = with_savings(result, told)
    return kernel


def with_savings(result: Mapping[str, Any], told: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a child's largest buffers, each with what a change would save of it."""
    import aot_buffers

    facts = buffer_facts(told)
    return [{**buffer, "savings": aot_buffers.savings(buffer, facts)} for buffer in result.get("buffers") or ()]


def _extra(lowered: Mapping[str, Any]) -> dict[str, Any]:
    return {"logical_argument_bytes": lowered.get("argument_bytes"), "routing": lowered.get("routing"),
            "lowered_operations": lowered.get("lowered_operations")}  # fmt: skip


def buffer_facts(told: Mapping[str, Any]) -> dict[str, Any]:
    """Return what aot_buffers.savings needs to know of the program, from a child's `lowered` event."""
    mesh, batch, config = told.get("mesh") or {}, told.get("batch") or {}, told.get("config") or {}
    context = mesh.get("context", 1)
    rows = batch.get("rows", 0) // max(1, mesh.get("data", 1) * mesh.get("fsdp", 1) * mesh.get("expert", 1))
    return {"rows_per_device": rows or None, "width_per_device": batch.get("row_width", 0) // context or None,
            "scored_per_device": batch.get("completion_length", 0) // context or None,
            "chunk_size": batch.get("chunk_size") or None, "layers": config.get("num_decoder_layers"),
            "vocab": config.get("vocab_size")}  # fmt: skip


def notes_of(told: Mapping[str, Any]) -> list[str]:
    """Return what the reader of a verdict must know."""
    config, resident, lines = told.get("config") or {}, told.get("resident") or {}, []
    if config.get("compile_xla_flags"):
        lines.append("compile_xla_flags is left out: the trainer compiles at its first micro-batch, where MaxText does "
                     "not read it; use LIBTPU_INIT_ARGS")  # fmt: skip
    if config.get("optimizer_memory_host_offload") and not resident.get("on_host_bytes"):
        lines.append("optimizer_memory_host_offload has no effect in this MaxText's engine: the state counts as HBM")
    loss = told.get("loss") or {}
    if loss.get("reference_logps"):
        lines.append("reference log-probs are in the micro-batch; the reference model has a worker of its own")
    if loss.get("separate_logps_pass"):
        lines.append("the trainer also scores each micro-batch in a program of its own, which is not compiled here")
    if told.get("runtime") == "standin":
        lines.append("loss and payload are tunix_standin's: the installed Tunix has no tunix.experimental")
    return lines


# ---------------------------------------------------------------------------------------------
# Main


def summarize(options: argparse.Namespace) -> tuple[list[Kernel], dict[str, Any]]:
    """Read a log instead of compiling."""
    import aot_log

    log = aot_log.read_log(read_text(options.summarize), shown_name(options.summarize))
    rest = {"topology": options.slice or log.topology, "config": log.config or None, "notes": log.notes,
            "beside": aot_log.beside_of_log(log.kernels)}  # fmt: skip
    if rest["beside"]:
        rest["notes"].append("a log tells what stays beside a kernel only from below: the optimizer state that is not "
                             "among its arguments; a staged micro-batch is not in it")  # fmt: skip
    return log.kernels, rest


def make_document(options: argparse.Namespace) -> dict[str, Any]:
    """Return the document: of a compile, of a log, or an earlier one, judged again where the options say how."""
    if options.prediction:
        doc, kernels, beside = aot_report.read_document(_load(options.prediction), shown_name(options.prediction))
        if options.hbm_gib is None and options.reserve_gib is None:
            return dict(doc)
        return judge(kernels, beside, doc, options)
    kernels, rest = summarize(options) if options.summarize else compile_launch(options)
    beside = rest.get("beside")
    if beside is None:
        beside = aot_report.beside_of_state(rest["resident"], kernels)
    return judge(kernels, beside, {"source": "log" if options.summarize else "compile", **rest}, options)


def judge(
    kernels: Sequence[Kernel], beside: Mapping[str, Sequence[Beside]], rest: Mapping[str, Any],
    options: argparse.Namespace,
) -> dict[str, Any]:  # fmt: skip
    """Return the document of kernels, held against the HBM of --hbm-gib, of `rest`, of the slice or of the compiler."""
    by_type = capacity_of(rest["topology"]) if rest.get("topology") else None
    named = (one.available_bytes for kernel in kernels for one in kernel.shortages
             if one.space == "HBM" and one.when == "compile")  # fmt: skip
    if options.hbm_gib is not None:
        usable, source = round(options.hbm_gib * GIB), "--hbm-gib"
    elif rest.get("capacity_bytes") is not None:
        usable, source = rest["capacity_bytes"], rest.get("capacity_source")
    elif by_type:
        usable, source = round(by_type.usable_gib * GIB), by_type.source
    else:
        usable = next((count for count in named if count is not None), None)
        source = None if usable is None else "as the compiler named it"
    reserve = rest.get("reserve_bytes") or 0
    if options.reserve_gib is not None:
        reserve = round(options.reserve_gib * GIB)
    facts = {**rest, "capacity_source": source, "devices_per_chip": by_type.devices_per_chip if by_type else None}
    return aot_report.document(verdict(kernels, beside, usable, reserve), facts)


def _load(path: str) -> Any:
    try:
        return json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise BenchError(f"not JSON: {error}", where=shown_name(path), todo="give what a --json run wrote") from error


def overlap(doc: Mapping[str, Any], style: str) -> tuple[dict[str, Any] | None, str]:
    """Return hlo_overlap's document on the kernels' HLO files, and its report; None where it has no answer."""
    import hlo_overlap
    import hlo_report

    files = [kernel["hlo_file"] for kernel in doc["kernels"] if kernel.get("hlo_file")]
    if not files:
        return None, "no HLO to look at"
    args = hlo_overlap.build_parser().parse_args([*files, "--format", style])
    try:
        answers = [found for file in files for found in hlo_overlap.read_answers(file, args)]
    except BenchError as error:
        complain(TOOL, str(error))
        return None, "no HLO that can be read"
    modules = [hlo_report.module_json(found) for found in answers]
    text = "\n".join(hlo_report.render(found, style, args.top, hlo_overlap.WIDTH) for found in answers)
    return {"schema": hlo_overlap.SCHEMA, "modules": modules}, text


def _run(options: argparse.Namespace) -> int:
    sources = [name for name in ("summarize", "prediction", "launch_render", "trainer_argv") if getattr(options, name)]
    if not sources:
        raise BenchError("nothing to look at", todo="give --launch-render, --trainer-argv, --summarize or --prediction")
    if len(sources) > 1 and sources[:2] != ["launch_render", "trainer_argv"]:
        raise BenchError(f"--{sources[0]} and --{sources[1]} are two inputs".replace("_", "-"), todo="give one")
    if options.overlap and not options.hlo_dir and not options.prediction:
        raise BenchError("--overlap reads the kernels' HLO files", todo="say where to keep them with --hlo-dir DIR")
    other = _load(options.compare) if options.compare else None
    if other is not None:
        aot_report.check_document(other, shown_name(options.compare))
    result = _load(options.measured) if options.measured else None
    doc = make_document(options)
    text = []
    if result is not None:
        doc["measured"] = aot_report.measured_document(doc, result, shown_name(options.measured))
        text.append(aot_report.measured_line(doc["measured"]))
    if other is not None:
        doc["compared"] = aot_report.compare(doc, other)
        text += aot_report.compare_lines(doc["compared"], options.format)
    if options.overlap:
        doc["overlap"], report = overlap(doc, "markdown" if options.format == "markdown" else "text")
        text += ["", report.rstrip()]
    if options.format == "json":
        emit(dump_json(doc))
    else:
        emit(aot_report.render(doc, options.format, options.top) + "".join(f"{line}\n" for line in text))
    if options.out:  # printed first: what took an hour is not lost with a full disk
        write_whole(options.out, dump_json(doc))
    return exit_code(doc)


def exit_code(doc: Mapping[str, Any]) -> int:
    """Return 1 where something does not fit, 2 where something is missing, else 0.

    A kernel that was only lowered is not missing: --lower-only and --kernels asked for that.
    """
    if doc["fits"] is False:
        return EXIT_DIFFERENT
    if doc["capacity_bytes"] is None:
        known = ", ".join(CAPACITIES)
        complain(TOOL, f"no verdict: usable HBM is not known; give --cap-gib (there is a figure for {known})")
        return EXIT_CANNOT
    if any(kernel.get("total_bytes") is None for kernel in doc["kernels"]):
        complain(TOOL, f"no verdict: {'; '.join(doc['reasons'])[:300]}")
        return EXIT_CANNOT
    return EXIT_OK


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; see the module's docstring."""
    options = build_parser().parse_args(_join_dashes(sys.argv[1:] if argv is None else argv))
    try:
        return run_tool(TOOL, lambda: _run(options))
    except KeyboardInterrupt:  # the children are gone by then
        complain(TOOL, "interrupted")
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
