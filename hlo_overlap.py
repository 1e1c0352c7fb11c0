"""Say which collectives of a compiled step hide behind compute and which are exposed, from its HLO text.

Input: scheduled HLO (TPU or GPU): a file of an XLA dump such as
`module_0267.jit_train_step.after_optimizations.txt`, or what `compiled.as_text()` printed. No device, no
profile. The printed order is the order of execution, so what stands between a start and its done is what
can run meanwhile; whether it is long enough, only a profile tells.

Output: per module a table of the collectives by kind and class with their count in the text, per step
(loops multiplied out) and their wire bytes per step and device; then the worst exposed ones. Classes:
  sync             nothing can run meanwhile
  async: nothing   a start and a done with nothing between: exposed like sync
  async: light     only data movement or elementwise operations between
  async: compute   a matrix product, or a kernel of unknown length, between
  unmatched        a start without its done in the text: counted as exposed
Another collective, a parameter, a constant or tuple plumbing is no cover; asynchronous work on the
collective's own thread is none either. Wire bytes are what a ring moves per device: all-gather (n-1)/n of
the output, reduce-scatter n-1 times the output, all-reduce 2(n-1)/n, all-to-all (n-1)/n, a permute its
output; a send counts at its recv. kB is 1000 bytes. Unknown is `?` in tables and null in JSON.

Exit status: 0 answered, every gate held, --diff found the same program; 1 a gate is exceeded or --diff
found another program; 2 not answered: no HLO, not scheduled (see --unscheduled), cut off (see --partial).

Examples:
  # what is exposed, and where
  hlo_overlap.py dump/module_0267.jit_train_step.after_optimizations.txt
  # in CI: at most 2 GB exposed per step, at most a tenth of all bytes
  hlo_overlap.py --gate exposed-bytes=2GB --gate share=10% step.txt
  # did the flag change the program, and what did it buy
  hlo_overlap.py before.txt --diff after.txt
  # the schedule as a picture for a trace viewer
  hlo_overlap.py step.txt.gz --trace step.trace.json
"""

from __future__ import annotations

import argparse
import gc
import re
from typing import NamedTuple

import hlo_schedule
import hlo_text
from bench_common import (
    EXIT_CANNOT,
    EXIT_DIFFERENT,
    EXIT_OK,
    BenchError,
    complain,
    decode,
    dump_json,
    emit,
    read_bytes,
    run_tool,
    shown_name,
    write_whole,
)
from hlo_compare import compare, render_compare
from hlo_report import WIDTH, Answer, answer, module_json, render, share, show_size, trace_json

TOOL = "hlo_overlap"
SCHEMA = "hlo-overlap/1"


class Gate(NamedTuple):
    """One limit for CI."""

    key: str  # "exposed-bytes", "share" or "sync"
    limit: float
    text: str


_UNITS = {"": 1, "B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_GATE = re.compile(r"(exposed-bytes|share|sync)=(\d+(?:\.\d+)?(?:[eE]\d+)?)\s*(%|[kKMGT]?i?B)?$")


def gate(text: str) -> Gate:
    """Read `exposed-bytes=2GB`, `share=0.1`, `share=10%`, `share=10` or `sync=3`; a share above 1 is in percent."""
    match = _GATE.match(text)
    key, number, unit = match.groups() if match else ("", "0", "")
    unit = unit or ""
    fits = {"exposed-bytes": unit in _UNITS, "share": unit in ("", "%"), "sync": unit == ""}
    if not fits.get(key):
        raise argparse.ArgumentTypeError(f"{text!r} is not exposed-bytes=N[GB], share=P[%] or sync=N")
    limit = float(number) * _UNITS.get(unit, 1)
    if unit == "%" or (key == "share" and limit > 1):
        limit /= 100
    if key == "share" and limit > 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a share is at most 1, or 100%")
    return Gate(key, limit, text)


def exceeded(found: Answer, one: Gate) -> str | None:
    """Return how a module exceeds a gate, or None.

    Raises:
      BenchError: the limit is not reached by what is known, and something is unknown.
    """
    where = f"{found.file}: {found.report.module.name or 'module'}"
    if one.key == "sync":
        count = sum(row.static for row in found.rows if row.category == "sync")
        return f"{where}: {count} sync collectives, {one.text} allowed" if count > one.limit else None
    low, high = found.exposed.size
    if one.key == "exposed-bytes":
        if (low if high is None else high) > one.limit:
            return f"{where}: {show_size(found.exposed.size)} exposed per step, {one.text} allowed"
        if high is not None:
            return None
    else:
        part = share(found.exposed.size, found.all.size)
        if part is not None or found.all.size.high == 0:
            over = part is not None and part > one.limit
            return f"{where}: {100 * (part or 0):.1f} % of the bytes exposed, {one.text} allowed" if over else None
    raise BenchError(
        f"cannot decide {one.text}: a trip count, group or element size is not in the text",
        where=found.file,
        todo="give --assume-trips N, or the whole text",
    )


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=TOOL, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="HLO text, also gzipped, or - for stdin")
    parser.add_argument("--format", choices=("text", "json", "markdown"), default="text", help="default: text")
    parser.add_argument("--json", action="store_const", const="json", dest="format", help="short for --format json")
    parser.add_argument("--top", type=_count, default=5, metavar="N", help="list the N worst exposed (default: 5)")
    parser.add_argument("--wide", action="store_true", help="do not cut names to 80 columns")
    parser.add_argument(
        "--gate",
        type=gate,
        action="append",
        default=[],
        metavar="KEY=LIMIT",
        help="exposed-bytes=N[GB], share=P[%%] or sync=N; exit 1 when a module is over; repeatable",
    )
    parser.add_argument(
        "--diff", metavar="OTHER", help="compare with the module of another file; exit 1 unless the same"
    )
    parser.add_argument("--trace", metavar="OUT.json", help="also write the schedule as a Chrome/Perfetto trace")
    parser.add_argument(
        "--assume-trips", type=_count, metavar="N", help="trip count of loops whose own is not in the text"
    )
    parser.add_argument(
        "--unscheduled", action="store_true", help="accept unscheduled HLO: counts and bytes, no classes"
    )
    parser.add_argument("--partial", action="store_true", help="a truncated module is an answer too: exit 0")
    return parser


def _count(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def read_hlo(file: str) -> str:
    """Return the text of a file or of stdin, which may be compressed with gzip.

    Raises:
      BenchError: unreadable, not text, or a damaged gzip file.
    """
    data, source = read_bytes(file), shown_name(file)
    if data.startswith(b"\x1f\x8b"):
        import gzip  # most dumps are plain text
        import zlib

        try:
            data = gzip.decompress(data)
        except (EOFError, OSError, zlib.error) as error:
            raise BenchError(f"cannot decompress: {error}", where=source, todo="copy the file again") from error
    return decode(data, source)


def read_answers(file: str, args: argparse.Namespace) -> list[Answer]:
    """Return the answers about every module of a file.

    Raises:
      BenchError: unreadable, not HLO, or not scheduled without --unscheduled.
    """
    source = shown_name(file)
    modules = hlo_text.read_modules(read_hlo(file), source)
    for module in modules:
        if not module.scheduled and not args.unscheduled:
            what = (
                f"module {module.name} is not scheduled"
                if module.header
                else "no HloModule line says is_scheduled=true"
            )
            raise BenchError(
                f"{what}: the order of its text is not the order of execution",
                where=f"{source}:{module.line}",
                todo="take the after_optimizations dump, or give --unscheduled for counts without overlap",
            )
    found = []
    for module in modules:
        overlap = module.scheduled
        found.append(answer(source, hlo_schedule.analyse(module, args.assume_trips, overlap)))
    return found


def report_on(args: argparse.Namespace) -> int:
    """Print the report of every module; return the exit code."""
    answers = [found for file in args.files for found in read_answers(file, args)]
    width = None if args.wide else WIDTH
    if args.format == "json":
        emit(dump_json({"schema": SCHEMA, "modules": [module_json(found) for found in answers]}))
    else:
        emit("\n".join(render(found, args.format, args.top, width) for found in answers))
    if args.trace:
        write_whole(args.trace, dump_json(trace_json(answers), indent=None))
    cut_off = [found for found in answers if found.report.module.truncated]
    if cut_off and not args.partial:
        name = cut_off[0].report.module.name or "a module"
        complain(TOOL, f"{cut_off[0].file}: {name} is truncated; give --partial to accept an answer on what is there")
        return EXIT_CANNOT
    return judge(answers, args.gate)


def judge(answers: list[Answer], gates: list[Gate]) -> int:
    """Say on stderr which gates are exceeded; return the exit code."""
    over = [text for found in answers for one in gates if (text := exceeded(found, one))]
    for text in over:
        complain(TOOL, text)
    hidden = sum(len(found.report.hidden) for found in answers)
    if gates and hidden and not over:
        complain(TOOL, f"gates held for the collectives seen; {hidden} custom calls may communicate beside them")
    return EXIT_DIFFERENT if over else EXIT_OK


def compare_two(args: argparse.Namespace) -> int:
    """Print the comparison of two modules; return the exit code."""
    sides = []
    for file in (args.files[0], args.diff):
        found = read_answers(file, args)
        if len(found) != 1:
            raise BenchError(f"holds {len(found)} modules", where=shown_name(file), todo="compare files of one module")
        if found[0].report.module.truncated and not args.partial:
            raise BenchError("is truncated", where=shown_name(file), todo="give the whole text, or --partial")
        sides.append(found[0])
    result = compare(*sides)
    if args.format == "json":
        emit(dump_json(result))
    else:
        emit(render_compare(result, args.format, None if args.wide else WIDTH))
    return EXIT_OK if result["same_program"] else EXIT_DIFFERENT


def main(argv: list[str] | None = None) -> int:
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.diff and (args.gate or args.trace):
        parser.error("--diff cannot be combined with --gate or --trace")
    if args.diff and len(args.files) != 1:
        parser.error("--diff compares two files: give one FILE and --diff OTHER")
    if args.unscheduled and (args.gate or args.trace):
        parser.error("--unscheduled gives no overlap: it cannot be combined with --gate or --trace")
    if args.trace == "-":
        parser.error("--trace needs the name of a file: stdout has the report")
    if [*args.files, args.diff].count("-") > 1:
        parser.error("- (stdin) can be read once")
    collecting = gc.isenabled()
    gc.disable()  # nothing here makes circles; on 50 MB the collector would walk millions of live objects
    try:
        return run_tool(TOOL, lambda: compare_two(args) if args.diff else report_on(args))
    finally:
        if collecting:
            gc.enable()


if __name__ == "__main__":
    raise SystemExit(main())
