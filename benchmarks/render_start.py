#!/usr/bin/env python3
"""Measure what a render costs as a whole process, next to the least that any reader of YAML costs.

A renderer sits in a pipe between the launcher and kubectl, so its start-up counts. The command is
`render_bench.py` on a launch stream of at least 46 KB (examples/launch_dryrun.yaml with its rollout document
repeated under other names); the yardstick is `python -c "import yaml"` on the same interpreter, taken in turns
with it so that other load on the machine meets both alike.

Output: median and range in milliseconds of both, and the median of their ratios, run by run, with its quartiles.
Exit status: 0 measured; 2 could not be measured.

Examples:
  python benchmarks/render_start.py
  python benchmarks/render_start.py --runs 40 --json
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

from bench_common import EXIT_OK, BenchError, dump_json, emit, read_text, run_tool, write_whole  # noqa: E402

STREAM_BYTES = 46_000  # of the largest of the real dry-run streams, of a 397B job
LIMIT_MS = 350  # what the project promises on an idle machine


def build_parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20, help="of each command (default: 20)")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of text")
    return parser


def launch_stream() -> str:
    """Return a launch stream of at least STREAM_BYTES."""
    text = read_text(os.path.join(ROOT, "examples", "launch_dryrun.yaml"))
    rollout = text[text.rindex("---\n") :]
    number = 0
    while len(text.encode()) < STREAM_BYTES:
        number += 1
        text += rollout.replace("ada-roll", f"ada-roll-{number}")
    return text


def milliseconds(command: Sequence[str]) -> float:
    """Return the wall time of a command in milliseconds."""
    begin = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False)
    elapsed = (time.perf_counter() - begin) * 1000
    if done.returncode:
        raise BenchError(f"{command[1]} ended with {done.returncode}: {done.stderr.decode(errors='replace')[-200:]}")
    return elapsed


def measure(runs: int) -> dict[str, list[float]]:
    """Return the times of both commands in milliseconds, after one run of each to fill the caches."""
    with tempfile.TemporaryDirectory() as folder:
        launch = os.path.join(folder, "launch.yaml")
        write_whole(launch, launch_stream())
        script = os.path.join(ROOT, "render_bench.py")
        commands = {
            "render_bench": [sys.executable, script, "--launch-render", launch, "--name", "bench", "--quiet"],
            "import_yaml": [sys.executable, "-c", "import yaml"],
        }
        times: dict[str, list[float]] = {name: [] for name in commands}
        for run in range(runs + 1):
            for name, command in commands.items():
                elapsed = milliseconds(command)
                if run:
                    times[name].append(elapsed)
    return times


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; return the exit status."""
    args = build_parser().parse_args(argv)
    return run_tool("render_start", lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    if args.runs < 2:
        raise BenchError(f"--runs {args.runs} gives no range", todo="give 2 or more")
    times = measure(args.runs)
    ratios = [a / b for a, b in zip(times["render_bench"], times["import_yaml"], strict=True)]
    quartiles = statistics.quantiles(ratios, n=4)
    if args.json:
        document = {"schema": "render-start/1", "runs": args.runs, "stream_bytes": len(launch_stream().encode())}
        document |= {
            f"{name}_ms": {"median": statistics.median(t), "min": min(t), "max": max(t)} for name, t in times.items()
        }
        document |= {"ratio": quartiles[1], "ratio_quartiles": [quartiles[0], quartiles[2]], "limit_ms": LIMIT_MS}
        emit(dump_json(document))
        return EXIT_OK
    lines = [f"{'command':<16} {'median':>8} {'min':>8} {'max':>8}   ms of {args.runs} runs"]
    lines += [f"{n:<16} {statistics.median(t):>8.0f} {min(t):>8.0f} {max(t):>8.0f}" for n, t in times.items()]
    low, middle, high = quartiles
    lines.append(f"ratio {middle:.2f} (quartiles {low:.2f} to {high:.2f}); promised: {LIMIT_MS} ms when idle")
    emit("\n".join(lines) + "\n")
    return EXIT_OK


if __name__ == "__main__":
    raise SystemExit(main())
