"""Measure how fast hlo_overlap answers, in MB of HLO text per second on one core, and its memory.

Makes one module of about the wanted size by repeating a real one: every copy gets names of its own, and a
new entry calls each. Then times, in child processes of their own, the whole tool on that file (start-up,
reading, parsing, analysis, report) and a plain `str.splitlines` pass over the same file: the second says how
fast this machine is today. Speed is file size over the processor seconds of the child, the fastest round; on
a machine that does other work beside, the wall clock is longer. Memory is the child's peak.

  python benchmarks/hlo_parse.py                                     # both example modules, 50 MB each
  python benchmarks/hlo_parse.py --size 10 step.txt
  python benchmarks/hlo_parse.py --json

Output, one line per input; the target is 25 MB/s and 12 times the file:
  moe_ring_tpu7x.txt  50.0 MB  25.1 MB/s  (1.99 s cpu, 2.04 s wall)  memory 4.4 x  splitlines 410 MB/s

Exit status: 0 measured; 1 below --at-least MB/s; 2 could not measure.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).resolve().parent.parent
DEFAULT = [ROOT / "examples" / "hlo" / "dense_fsdp_v5e.txt", ROOT / "examples" / "hlo" / "moe_ring_tpu7x.txt"]
NAME = re.compile(r"%([\w.\-]+)")
ENTRY = re.compile(r"^ENTRY %(\S+) ", re.MULTILINE)
SPLITLINES = "import sys, time; text = open(sys.argv[1]).read(); a = time.process_time(); text.splitlines(); "
SPLITLINES += "print(time.process_time() - a)"


def repeated(text: str, size: int) -> str:
    """Return a module of about `size` bytes: copies of a module's computations under names of their own."""
    header, _, body = text.partition("\n")
    first = re.search(r"^%", body, re.MULTILINE)
    entry = ENTRY.search(body)
    if first is None or entry is None:
        print("hlo_parse: the input is no module as XLA prints it; give compiled.as_text()", file=sys.stderr)
        raise SystemExit(2)
    body = body[first.start() :]
    copies = max(1, round(size / len(body)))
    pieces, calls = [header, ""], ["ENTRY %all () -> () {"]
    for copy in range(copies):
        pieces.append(NAME.sub(rf"%\1.r{copy}", body).replace("\nENTRY ", "\n", 1))
        calls.append(f"  %call.{copy} = () call(), to_apply=%{entry[1]}.r{copy}")
    return "\n".join([*pieces, *calls, "  ROOT %end = () tuple()", "}", ""])


class Run(NamedTuple):
    """What a child process took."""

    cpu: float  # seconds of user and system time
    wall: float  # seconds
    peak: int  # bytes
    out: str


def timed(command: list[str]) -> Run:
    """Run a command to its end."""
    begin = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        out = child.stdout.read()
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        print(f"hlo_parse: {command[1]} ended with {child.returncode}", file=sys.stderr)
        raise SystemExit(2)
    wall = time.perf_counter() - begin
    return Run(usage.ru_utime + usage.ru_stime, wall, usage.ru_maxrss * 1024, out)  # Linux counts KiB


def measure(path: pathlib.Path, size: int, rounds: int, folder: str) -> dict[str, Any]:
    """Return the figures for one real module."""
    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
    file = pathlib.Path(folder) / "module.txt"
    file.write_text(repeated(text, size))
    bytes_ = file.stat().st_size
    runs = [timed([sys.executable, str(ROOT / "hlo_overlap.py"), str(file)]) for _ in range(rounds)]
    best = min(runs)
    split = min(float(timed([sys.executable, "-c", SPLITLINES, str(file)]).out) for _ in range(rounds))
    return {
        "input": path.name,
        "bytes": bytes_,
        "mb_per_second": round(bytes_ / 1e6 / best.cpu, 1),
        "cpu_seconds": round(best.cpu, 2),
        "wall_seconds": round(best.wall, 2),
        "peak_bytes": best.peak,
        "peak_per_file_byte": round(best.peak / bytes_, 2),
        "splitlines_mb_per_second": round(bytes_ / 1e6 / split, 1),
        "rounds": rounds,
    }


def positive(text: str) -> float:
    value = float(text)
    if not 0 < value < 1000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size in MB")
    return value


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=pathlib.Path, default=DEFAULT, help="real modules, text or .gz")
    parser.add_argument(
        "--size", type=positive, default=50.0, metavar="MB", help="size of the module made (default: 50)"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        choices=range(1, 100),
        metavar="N",
        default=3,
        help="runs of each, the best counts (default: 3)",
    )
    parser.add_argument("--at-least", type=float, default=0.0, metavar="MB/S", help="exit 1 when slower")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    return parser


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        found = [measure(path, int(args.size * 1e6), args.rounds, folder) for path in args.files]
    if args.json:
        print(json.dumps({"schema": "hlo-parse-benchmark/1", "results": found}, indent=2))
    else:
        for one in found:
            print(
                f"{one['input']}  {one['bytes'] / 1e6:.1f} MB  {one['mb_per_second']} MB/s"
                f"  ({one['cpu_seconds']:.2f} s cpu, {one['wall_seconds']:.2f} s wall)"
                f"  memory {one['peak_per_file_byte']:.1f} x  splitlines {one['splitlines_mb_per_second']:.0f} MB/s"
            )
    return 1 if any(one["mb_per_second"] < args.at_least for one in found) else 0


if __name__ == "__main__":
    raise SystemExit(main())
