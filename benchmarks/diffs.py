"""Measure diff_render and diff_config against what the work costs at least, on one core.

    diff_render  780 KB of YAML against an edited copy, beside `diff -u` of the two and PyYAML's own parse of both
    diff_config  a 100 MB log, and with --big a log of 2 GiB with its peak of memory

Each line names the target of the project's issue and whether it was met; wall seconds, best of N runs, as every
other number on a machine shared with others is noise. Exit status: 0 all targets met, 1 not.

    python benchmarks/diffs.py
    python benchmarks/diffs.py --big --repeats 5 --json
"""

from __future__ import annotations

import argparse
import io
import json
import pathlib
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

RENDER_BYTES = 780 * 1000  # the larger size that diffyml publishes figures for
LOG_BYTES = 100 * 10**6
BIG_LOG_BYTES = 2 * 2**30
MOST_TIMES_FLOOR = 3.0
LEAST_MB_PER_SECOND = 60.0
MOST_MIB = 200.0


def best(repeats: int, action: Callable[[], object]) -> float:
    """Return the least wall time of some runs, seconds."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return min(times)


def renders(folder: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """Write a render of RENDER_BYTES, documents of many names, and a copy with one flag changed in each trainer."""
    example = (ROOT / "examples" / "launch_dryrun.yaml").read_text()
    pieces = re.sub(r"^(?!apiVersion:|kind:|metadata:|spec:|---|[ #]).+\n", "", example, flags=re.MULTILINE)
    pieces = pieces.split("\n---\n")[1:]  # without the launcher's log lines, which PyYAML cannot read
    text, number = "", 0
    while len(text) < RENDER_BYTES:
        text += "".join("---\n" + re.sub(r"\bada-", f"ada{number}-", piece) + "\n" for piece in pieces)
        number += 1
    paths = folder / "a.yaml", folder / "b.yaml"
    paths[0].write_text(text)
    paths[1].write_text(text.replace("num_moe_token_chunks=2", "num_moe_token_chunks=4"))
    return paths


def log(path: pathlib.Path, size: int) -> None:
    """Write a training log of `size` bytes: the example's configuration, then step lines."""
    config = (ROOT / "examples" / "config_a.log").read_bytes()
    line = b"I1130 05:10:46.758053 140349100919680 metric_logger.py:196] completed step: %d, seconds: 30.125, TFLOP/s/device: 301.5, loss: 1.342\n"  # noqa: E501
    block = b"".join(line % step for step in range(100_000, 108_000))
    with open(path, "wb") as stream:
        stream.write(config)
        for _ in range((size - len(config)) // len(block)):
            stream.write(block)


def quietly(main: Callable[[list[str]], int], *argv: str) -> int:
    """Run a tool in this process, its output thrown away."""
    out, err, sys.stdout, sys.stderr = sys.stdout, sys.stderr, io.StringIO(), io.StringIO()
    try:
        return main(list(argv))
    finally:
        sys.stdout, sys.stderr = out, err


def measure_render(folder: pathlib.Path, repeats: int) -> dict[str, object]:
    """Return the seconds of diff_render and of its floor (diff -u plus PyYAML's parse of both files)."""
    import yaml

    import diff_render

    a, b = renders(folder)
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

    def parse() -> None:
        for path in (a, b):
            list(yaml.load_all(path.read_text(), loader))

    line_diff = best(repeats, lambda: subprocess.run(["diff", "-u", a, b], stdout=subprocess.DEVNULL, check=False))
    floor = line_diff + best(repeats, parse)
    ours = best(repeats, lambda: quietly(diff_render.main, str(a), str(b)))
    return {
        "name": "diff_render", "input_bytes": a.stat().st_size, "seconds": ours, "floor_seconds": floor,
        "times_floor": ours / floor, "target_times_floor": MOST_TIMES_FLOOR, "met": ours / floor <= MOST_TIMES_FLOOR,
    }  # fmt: skip


def measure_config(folder: pathlib.Path, repeats: int) -> dict[str, object]:
    """Return the speed of diff_config on a large log against a small one."""
    import diff_config

    path = folder / "large.log"
    log(path, LOG_BYTES)
    ours = best(repeats, lambda: quietly(diff_config.main, str(path), str(ROOT / "examples" / "config_a.log")))
    speed = path.stat().st_size / 1e6 / ours
    path.unlink()
    return {
        "name": "diff_config", "input_bytes": LOG_BYTES, "seconds": ours, "megabytes_per_second": speed,
        "target_megabytes_per_second": LEAST_MB_PER_SECOND, "met": speed >= LEAST_MB_PER_SECOND,
    }  # fmt: skip


def measure_memory(folder: pathlib.Path) -> dict[str, object]:
    """Return the peak resident memory of diff_config, a process of its own, on a log of BIG_LOG_BYTES."""
    path = folder / "big.log"
    log(path, BIG_LOG_BYTES)
    start = time.perf_counter()
    small = str(ROOT / "examples" / "config_a.log")
    subprocess.run(
        [sys.executable, str(ROOT / "diff_config.py"), str(path), small], stdout=subprocess.DEVNULL, check=True
    )  # noqa: E501
    seconds = time.perf_counter() - start
    path.unlink()
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**10  # KiB on Linux
    return {
        "name": "diff_config, 2 GiB", "input_bytes": BIG_LOG_BYTES, "seconds": seconds, "peak_mebibytes": peak,
        "target_peak_mebibytes": MOST_MIB, "met": peak <= MOST_MIB,
    }  # fmt: skip


def build_parser() -> argparse.ArgumentParser:
    """Return the argument parser."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each, the best counts (default: 3)")
    parser.add_argument("--big", action="store_true", help="also the 2 GiB log (takes 2 GiB of disk for a while)")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Measure and print; return 0 where every target was met."""
    args = build_parser().parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        results = [measure_memory(folder)] if args.big else []
        results += [measure_render(folder, args.repeats), measure_config(folder, args.repeats)]
    if args.json:
        print(json.dumps({"schema": "bench-diffs/1", "results": results}, indent=2))
    for result in [] if args.json else results:
        numbers = ", ".join(f"{key} {value:.3g}" for key, value in result.items() if isinstance(value, float))
        print(f"{result['name']:<20} {'met' if result['met'] else 'MISSED':<7} {numbers}")
    return 0 if all(result["met"] for result in results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
