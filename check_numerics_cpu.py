"""Check on a laptop that a launch's micro-batch is sound and that a numerics option is safe, before it costs a slice.

MaxText's real engine and model run on four virtual CPU devices, shrunk as bench_driver --cpu-smoke shrinks them. Every
verdict is a number against a limit, printed with the reason for the limit. A check that cannot fail is a defect:
--audit breaks the input of each one on purpose and shows that it is noticed.

Input: --launch-render FILE, what a launcher prints under DRY_RUN=true (or - for stdin), or a built-in tiny launch.
Output: one line per finding; `known limit` is what the installed MaxText cannot do, shown but not counted:
    pass        chunking: chunk 7 (a divisor): log-probs             2 <= 64 ulps
    known limit routing: unset tokens ... fall back to the gate      1 <= 0 share

Checks: payload, chunking, packing, accumulation, padding, routing, grpo, knobs (--list says what each one does).
`knobs` tries the alternative of every numerics option of the launch, and each --knob KEY=VALUE: distances to the
launch's own setting and to float32, next to the noise floor, and a verdict: bit identical, within noise, changes
numerics, or unknown here (TPU only, or a newer MaxText).

The first run compiles for minutes; JAX_COMPILATION_CACHE_DIR=DIR keeps what it compiled for the next one.

Exit status: 0 all pass; 1 something differs, or --audit found a check that cannot fail; 2 could not check.

Examples:
    # may the router's logits be bfloat16?
    check_numerics_cpu.py --launch-render launch.yaml --only knobs --knob float32_gate_logits=false
    # two driver runs, before and after a change of flags
    check_numerics_cpu.py --compare before.npz after.npz
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import logging
import os
import shlex
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import bench_plan
import bench_runtime
import launch_render
from bench_common import EXIT_DIFFERENT, EXIT_OK, BenchError, complain, dump_json, emit, read_text, run_tool

SCHEMA = "trainer-bench-numerics/1"
NAMES = ("payload", "chunking", "packing", "accumulation", "padding", "routing", "grpo", "knobs")
# Four devices are the smallest mesh of fsdp 2 x expert 2. LLVM's optimisations take half of the time of such small
# programs and change no rounding that a limit here could see. Excess precision off: else XLA keeps bfloat16 values in
# float32 where it can, and an option that rounds would look as if it did not.
XLA_FLAGS = ("--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0 "
             "--xla_llvm_disable_expensive_passes=true --xla_allow_excess_precision=false")  # fmt: skip
# A launch of the shape the bench is made for, as small as it goes: what runs without --launch-render.
TINY_TRAINER = (
    "--trainer_backend=maxtext --maxtext_model_name=qwen3.5-35b-a3b --mesh_fsdp=2 --mesh_expert=2 --num_generations=4 "
    "--mini_batch_size=3 --train_micro_batch_size=4 --max_prompt_length=64 --max_response_length=192 "
    "--max_seq_token_per_tpu=256 --compute_logps_chunk_size=64 --remat_policy=full --optimizer_learning_rate=1e-6"
)
TINY_ORCH = (
    "--batch_size=3 --mini_batch_size=3 --num_generations=4 --max_prompt_length=64 --max_response_length=192 "
    "--train_micro_batch_size=4 --max_seq_token_per_tpu=256 --max_segments_per_packed_row=4 --trainer_fsdp=2 "
    "--trainer_expert=2 --epsilon_high=0.28 --loss_agg_mode=token-mean --no-use_rollout_logps"
)
TINY_ENV = {"MAXTEXT_EXTRA_FLAGS": "num_vocab_tiling=2 mu_dtype=float32 grad_dtype=float32", "FLOAT32_LOGITS": "true"}


# ---------------------------------------------------------------------------------------------
# Options


def build_parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(prog="check_numerics_cpu", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    add = parser.add_argument
    add("--launch-render", metavar="FILE", help="the launch to check (default: a built-in tiny one)")
    add("--only", type=_names, action="extend", default=[], metavar="A,B", help="only these checks; repeatable")
    add("--skip", type=_names, action="extend", default=[], metavar="A,B", help="all but these checks; repeatable")
    add(
        "--knob",
        type=_knob,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a MaxText option to try; repeatable",
    )
    add(
        "--routing-load", default="uniform", metavar="SPEC", help="of the payload, as bench_driver's (default: uniform)"
    )
    add("--routing-tolerance", type=_percent, default=0.01, metavar="P%", help="around the target (default: 1%%)")
    add("--seed", type=_seed, default=0, help="of the micro-batches (default: 0)")
    add("--list", action="store_true", help="say what each check does, and which faults --audit injects; run none")
    add("--audit", action="store_true", help="break the input of each check and see that it notices")
    add("--compare", nargs=2, metavar=("A.npz", "B.npz"), help="two results of bench_driver --save-numerics")
    add("--format", choices=("text", "json", "markdown"), default="text", help="of the report (default: text)")
    add("--json", action="store_const", const="json", dest="format", help="short for --format json")
    return parser


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise argparse.ArgumentTypeError(f"no check {unknown[0]!r}; known are {', '.join(NAMES)}")
    return names


def _knob(text: str) -> tuple[str, str]:
    key, _, value = (part.strip() for part in text.partition("="))
    if not (key and value):
        raise argparse.ArgumentTypeError(f"KEY=VALUE expected, got {text!r}")
    return key, value


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"a whole number from 0 expected, got {text!r}")
    return int(text)


def _percent(text: str) -> float:
    try:
        value = float(text.rstrip("%")) / 100
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"a percentage expected, got {text!r}") from error
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"between 0% and 100%, got {text!r}")
    return value


# ---------------------------------------------------------------------------------------------
# The launch and the lab


@dataclasses.dataclass(frozen=True)
class Launch:
    """What a launch says about its trainer."""

    name: str
    trainer: list[str]
    orch: list[str]
    env: Mapping[str, str]


def read_launch(path: str | None) -> Launch:
    """Return the trainer's and orchestrator's argv and the trainer's environment of a launch render.

    Raises:
      BenchError: unreadable, or no trainer or orchestrator in it.
    """
    if path is None:
        return Launch("built-in tiny launch", shlex.split(TINY_TRAINER), shlex.split(TINY_ORCH), TINY_ENV)
    shown = "<stdin>" if path == "-" else path
    render = launch_render.read_render(read_text(path, launch_render.MAX_RENDER_BYTES), shown)
    found = {client.role: client for document in render.documents for client in launch_render.clients(document)}
    if "bench" in found:
        bench = found["bench"]
        return Launch(path, bench.carried_argv("TRAINER_ARGV"), bench.carried_argv("ORCH_ARGV"), bench.env)
    for role in ("trainer", "orchestrator"):
        if role not in found:
            raise BenchError(f"no {role} in this render", where=shown, todo="give the launcher's whole DRY_RUN output")
    argv = {role: [word.value for word in found[role].argv] for role in ("trainer", "orchestrator")}
    return Launch(path, argv["trainer"], argv["orchestrator"], found["trainer"].env)


@contextlib.contextmanager
def jax_on_cpu() -> Iterator[None]:
    """Set up JAX for this process: CPU, virtual devices, a compile cache; the environment is put back afterwards.

    Whatever a launch exported, these checks are about a CPU: of XLA_FLAGS not even the names of TPU flags are known to
    it. The cache makes programs that two settings share compile once, and lasts as long as the check, or longer where
    JAX_COMPILATION_CACHE_DIR says where. JAX reads all this when it is first imported, so that in a process which has
    imported it before, its devices have to do.
    """
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # MaxText logs what it raises, which is said once already
    with tempfile.TemporaryDirectory(prefix="check-numerics-") as folder:
        set_here = {"JAX_PLATFORMS": "cpu"} | ({} if "jax" in sys.modules else {"XLA_FLAGS": XLA_FLAGS})
        unless_set = {
            "JAX_COMPILATION_CACHE_DIR": folder,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",  # most of the programs take less than JAX's 1
            "TF_CPP_MIN_LOG_LEVEL": "3",  # XLA's notes about shardings of shrunk shapes
            "TRANSFORMERS_VERBOSITY": "error",  # MaxText imports it; it has advice about other frameworks
        }
        changed = {name: value for name, value in unless_set.items() if name not in os.environ} | set_here
        before = {name: os.environ.get(name) for name in changed}
        os.environ.update(changed)
        try:
            yield
        finally:
            for name, value in before.items():
                del os.environ[name]
                if value is not None:
                    os.environ[name] = value


def make_lab(launch: Launch, options: argparse.Namespace) -> tuple[Any, set[str]]:
    """Return the lab for a launch, and the keys of the installed MaxText.

    Raises:
      BenchError: MaxText is missing, or refuses the launch.
    """
    if not bench_runtime.installed("maxtext"):
        raise BenchError("MaxText is not installed here", where="maxtext", todo="pip install 'rl-trainer-bench[cpu]'")
    import numerics_lab

    if not bench_runtime.has_tunix_experimental():
        import tunix_standin

        tunix_standin.install()
    with contextlib.redirect_stdout(io.StringIO()):  # MaxText prints; stdout is for the report
        known = bench_runtime.known_maxtext_keys()
        said = (launch.trainer, launch.orch, launch.env)
        own = bench_plan.plan_launch(*said, bench_plan.mesh_product(launch.trainer), routing_load=options.routing_load,
                                     tolerance=options.routing_tolerance)  # fmt: skip
        small = bench_plan.plan_launch(*said, numerics_lab.DEVICES, cpu_smoke=True, known_keys=known, drop_unknown=True)
        return numerics_lab.Lab(small, own, options.seed), known


# ---------------------------------------------------------------------------------------------
# Running


def all_checks(known: set[str], knobs: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Return every check by name, in order."""
    import numerics_checks
    import numerics_grpo
    import numerics_knobs

    found = [*numerics_checks.CHECKS, numerics_grpo.GRPO, numerics_knobs.make_check(knobs, known)]
    by_name = {check.name: check for check in found}
    return {name: by_name[name] for name in NAMES}


def chosen(options: argparse.Namespace) -> list[str]:
    """Return the names of the checks to run, in order."""
    return [name for name in NAMES if name in (options.only or NAMES) and name not in options.skip]


def run_checks(lab: Any, checks: Mapping[str, Any], names: Sequence[str]) -> list[dict[str, Any]]:
    """Run checks and return their findings as rows; progress goes to stderr."""
    rows = []
    for name in names:
        complain("check_numerics_cpu", f"{name}: {checks[name].doc}")
        with contextlib.redirect_stdout(io.StringIO()):
            found = checks[name].run(lab)
        rows += [{"check": name, **dataclasses.asdict(finding)} for finding in found]
    return rows


def run_audit(lab: Any, checks: Mapping[str, Any], names: Sequence[str]) -> list[dict[str, Any]]:
    """Run each check with each fault its launch can have and return who noticed, with the first finding that did.

    A check that fails with nothing broken notices nothing.
    """
    from numerics_checks import UNBROKEN

    rows = []
    for name in names:
        faults = {fault: what for fault, what in checks[name].faults.items() if checks[name].applies(lab, fault)}
        before = _failing(checks[name], lab, UNBROKEN) if faults else []
        for fault, what in faults.items():
            complain("check_numerics_cpu", f"{name} with a fault: {what}")
            try:
                wrong = [] if before else _failing(checks[name], lab, fault)
            except BenchError as error:  # refused; unbroken it was not
                wrong = [str(error)]
            by = f"nothing: with nothing broken it fails too, {before[0]}" if before else (wrong or ["nothing"])[0]
            rows.append({"check": name, "fault": fault, "done": what, "noticed": bool(wrong), "by": by})
    return rows


def _failing(check: Any, lab: Any, fault: str) -> list[str]:
    """Return the findings of a check that count against a launch, each in a line."""
    with contextlib.redirect_stdout(io.StringIO()):
        found = check.run(lab, fault)
    return [f"{one.what}: {_number(one.value)} {one.unit}, limit {one.limit}" for one in found if not one.ok]


# ---------------------------------------------------------------------------------------------
# Writing


def document(kind: str, rows: Sequence[Mapping[str, Any]], **more: Any) -> dict[str, Any]:
    """Return the JSON document of a report."""
    return {"schema": SCHEMA, "kind": kind, "verdict": verdict(kind, rows), **more, "rows": list(rows)}


def verdict(kind: str, rows: Sequence[Mapping[str, Any]]) -> str | None:
    """Return `pass` or `differs`; None for a list, which judges nothing."""
    if kind == "list":
        return None
    if kind == "audit":
        return "pass" if all(row["noticed"] for row in rows) else "differs"
    return "differs" if any(row["status"] == "FAIL" for row in rows) else "pass"


def as_text(report: Mapping[str, Any]) -> str:
    """Return a report as text of at most 80 columns."""
    lines: list[str] = []
    if report["kind"] == "list":
        for row in report["rows"]:
            lines += textwrap.wrap(f"{row['check']}: {row['doc']}", 80, subsequent_indent="    ")
            lines += [f"    --audit: {what}" for what in row["faults"].values()]
        return "\n".join(lines) + "\n"
    if report["kind"] == "audit":
        for row in report["rows"]:
            lines += _wrapped("noticed" if row["noticed"] else "MISSED", f"{row['check']}: {row['done']}")
            lines += _wrapped("", f"by {row['by']}")
    else:
        reasons: dict[str, int] = {}
        for row in report["rows"]:
            note = reasons.setdefault(row["why"], len(reasons) + 1)
            known = row["value"] is not None
            number = [_number(row["value"]), row["limit"], row["unit"]] if known else []
            lines += _wrapped(row["status"], f"{row['check']}: {row['what']}")
            lines += _wrapped("", " ".join(filter(None, [*number, f"[{note}]"])))
        for why, note in reasons.items():
            lines += textwrap.wrap(f"[{note}] {why}", 80, subsequent_indent=" " * 5)
    for line in report.get("table", []):
        lines += [line] if len(line) <= 80 else textwrap.wrap(line, 80, subsequent_indent="    ")
    counts = [row for row in report["rows"] if row.get("status") == "known limit"]
    limits = f"; {len(counts)} known limits of the installed MaxText" if counts else ""
    return "\n".join([*lines, f"verdict: {report['verdict']} ({len(report['rows'])} rows{limits})"]) + "\n"


def _wrapped(head: str, text: str) -> list[str]:
    return textwrap.wrap(text, 80, initial_indent=f"{head:<12}", subsequent_indent=" " * 12)


_FINDINGS = (("status", "check", "finding", "value", "limit", "unit", "why"),
             ("status", "check", "what", "value", "limit", "unit", "why"))  # fmt: skip
COLUMNS = {  # of the Markdown table of each kind of report: heads and keys
    "checks": _FINDINGS, "compare": _FINDINGS,
    "audit": (("check", "fault", "noticed", "by"), ("check", "done", "noticed", "by")),
    "list": (("check", "what it checks", "faults of --audit"), ("check", "doc", "faults")),
}  # fmt: skip


def as_markdown(report: Mapping[str, Any]) -> str:
    """Return a report as a Markdown table."""
    head, keys = COLUMNS[report["kind"]]
    lines = [f"| {' | '.join(head)} |", "|" + " --- |" * len(keys)]
    for row in report["rows"]:
        cells = [_number(row[key]) if key == "value" else "; ".join(row[key].values()) if key == "faults" else
                 str(row[key]) for key in keys]  # fmt: skip
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    if report["kind"] == "list":
        return "\n".join(lines) + "\n"
    table = ["", "```", *report["table"], "```"] if report.get("table") else []
    return "\n".join([*lines, *table, "", f"Verdict: {report['verdict']}."]) + "\n"


def _number(value: float | None) -> str:
    return "?" if value is None else f"{value:.6g}"


WRITERS = {"text": as_text, "markdown": as_markdown, "json": dump_json}


def listing(checks: Mapping[str, Any], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return a row for each check: what it does, and what --audit breaks."""
    return [{"check": name, "doc": checks[name].doc, "faults": dict(checks[name].faults)} for name in names]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; see the module's docstring."""
    parser = build_parser()
    options = parser.parse_args(argv)
    if options.compare and (options.audit or options.knob or options.launch_render or options.list or options.only
                            or options.skip):  # fmt: skip
        parser.error("--compare runs no check: it goes with --format and --json alone")
    if not options.compare and not chosen(options):
        parser.error("--only and --skip leave no check")
    if options.knob and (options.audit or "knobs" not in chosen(options)):
        parser.error("--knob is for the check `knobs`, which --audit, --only or --skip leave out")
    return run_tool("check_numerics_cpu", lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    if options.compare:
        import numerics_compare

        report = document("compare", numerics_compare.compare(*options.compare))
    elif options.list:
        report = document("list", listing(all_checks(set(), []), chosen(options)))
    else:
        with jax_on_cpu():
            report = _check(options)
    emit(WRITERS[options.format](report))
    return EXIT_DIFFERENT if report["verdict"] == "differs" else EXIT_OK


def _check(options: argparse.Namespace) -> dict[str, Any]:
    launch = read_launch(options.launch_render)
    lab, known = make_lab(launch, options)
    checks, names = all_checks(known, options.knob), chosen(options)
    common = {"launch": launch.name, "versions": bench_runtime.versions(),
              "shrunk": [dataclasses.asdict(change) for change in lab.plan.shrunk]}  # fmt: skip
    if options.audit:
        return document("audit", run_audit(lab, checks, names), **common)
    rows = run_checks(lab, checks, names)
    if "knobs" in names:
        knobs = checks["knobs"]
        common |= {"table": knobs.table, "knobs": knobs.rows, "noise_floor": knobs.noise_floor}
    return document("checks", rows, **common)


if __name__ == "__main__":
    raise SystemExit(main())
