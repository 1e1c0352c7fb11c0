"""Measure how fast hlo_overlap answers, in MB of HLO text per second on one core, and its memory.

Makes one module of about the wanted size by repeating a real one: every copy gets names of its own, and a
new entry calls each. Then times, in child processes of their own, the whole tool on that file (start-up,
reading, parsing, analysis, report) and a plain `str.splitlines` pass over the same file, and prints both:
the second says how fast this machine is today. Best of the rounds; memory is the child's peak.

  python benchmarks/hlo_parse.py                                     # the MaxText MoE step of the tests, 50 MB
  python benchmarks/hlo_parse.py --size 10 examples/hlo/dense_fsdp_v5e.txt
  python benchmarks/hlo_parse.py --json

Output, one line per input; the target is 25 MB/s and 12 times the file:
  maxtext_moe_fwd_bwd.txt.gz  50.3 MB  3.1 s  16.2 MB/s  memory 4.4 x file  (splitlines 410 MB/s)

Exit status: 0 measured; 1 below --at-least MB/s; 2 could not measure.
"""

from __future__ import annotations

import argparse
import gzip
import json
import pathlib
import re
import resource
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
DEFAULT = [ROOT / "tests" / "data" / "hlo" / "maxtext_moe_fwd_bwd.txt.gz"]
NAME = re.compile(r"%([\w.\-]+)")
ENTRY = re.compile(r"^ENTRY %(\S+) ", re.MULTILINE)
SPLITLINES = "import sys; text = open(sys.argv[1]).read(); import time; a = time.perf_counter(); text.splitlines(); "
SPLITLINES += "print(time.perf_counter() - a)"


def repeated(text: str, size: int) -> str:
    """Return a module of about `size` bytes: copies of a module's computations under names of their own."""
    header, _, body = text.partition("\n")
    first = re.search(r"^%", body, re.MULTILINE)
    entry = ENTRY.search(body)
    if first is None or entry is None:
        raise SystemExit("hlo_parse: the input is no module as XLA prints it; give compiled.as_text()")
    body = body[first.start() :]
    copies = max(1, round(size / len(body)))
    pieces, calls = [header, ""], ["ENTRY %all () -> () {"]
    for copy in range(copies):
        pieces.append(NAME.sub(rf"%\1.r{copy}", body).replace("\nENTRY ", "\n", 1))
        calls.append(f"  %call.{copy} = () call(), to_apply=%{entry[1]}.r{copy}")
    return "\n".join([*pieces, *calls, "  ROOT %end = () tuple()", "}", ""])


def timed(command: list[str]) -> tuple[float, int, str]:
    """Run a command; return (seconds, peak bytes of it and all children before it, stdout)."""
    begin = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024  # Linux counts KiB
    return time.perf_counter() - begin, peak, done.stdout


def measure(path: pathlib.Path, size: int, rounds: int, folder: str) -> dict[str, object]:
    """Return the figures for one real module."""
    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
    file = pathlib.Path(folder) / "module.txt"
    file.write_text(repeated(text, size))
    bytes_ = file.stat().st_size
    tool = [sys.executable, str(ROOT / "hlo_overlap.py"), str(file), "--top", "5"]
    runs = [timed(tool) for _ in range(rounds)]
    seconds = min(run[0] for run in runs)
    split = min(float(timed([sys.executable, "-c", SPLITLINES, str(file)])[2]) for _ in range(rounds))
    return {
        "input": path.name,
        "bytes": bytes_,
        "seconds": round(seconds, 3),
        "mb_per_second": round(bytes_ / 1e6 / seconds, 1),
        "peak_bytes": runs[0][1],
        "peak_per_file_byte": round(runs[0][1] / bytes_, 2),
        "splitlines_mb_per_second": round(bytes_ / 1e6 / split, 1),
        "rounds": rounds,
    }


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=pathlib.Path, default=DEFAULT, help="real modules, text or .gz")
    parser.add_argument("--size", type=float, default=50.0, metavar="MB", help="size of the module made (default: 50)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each, the best counts (default: 3)")
    parser.add_argument("--at-least", type=float, default=0.0, metavar="MB/S", help="exit 1 when slower")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    return parser


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        found = [measure(path, int(args.size * 1e6), max(1, args.rounds), folder) for path in args.files]
    if args.json:
        print(json.dumps({"schema": "hlo-parse-benchmark/1", "results": found}, indent=2))
    else:
        for one in found:
            print(
                f"{one['input']}  {one['bytes'] / 1e6:.1f} MB  {one['seconds']:.2f} s  {one['mb_per_second']} MB/s"
                f"  memory {one['peak_per_file_byte']} x file  (splitlines {one['splitlines_mb_per_second']:.0f} MB/s)"
            )
    return 1 if any(one["mb_per_second"] < args.at_least for one in found) else 0


if __name__ == "__main__":
    raise SystemExit(main())
