"""Run every benchmark of this folder and print one table: what is promised, what it is today, met or not.

Each number is a ratio against a reference that ran beside it (a plain copy, `import yaml`, PyYAML's own parse, a bare
loop, MaxText's own compile), so that it says something on a busy or slow machine too; speeds in MB/s are per processor
second. The machine and its load are described with the table.

In: nothing. Out: the table, or with --json one document (schema bench-table/1); progress on stderr.
What takes minutes or 11 GB of memory runs only with --full: a micro-batch of production's size, a 2 GiB log, compiles.

Exit codes: 0 every target met, 1 one was missed, 2 a benchmark could not run.

Examples:
  python benchmarks/run_all.py
  python benchmarks/run_all.py --full --json > table.json
  python benchmarks/run_all.py --only hlo_parse,diffs
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

SCHEMA = "bench-table/1"


class Row(NamedTuple):
    """One promise and what became of it."""

    what: str
    measured: float
    unit: str
    reference: str  # what it was measured against, in the same run
    target: float
    at_least: bool = False  # the target is a floor

    @property
    def met(self) -> bool:
        return self.measured >= self.target if self.at_least else self.measured <= self.target

    def as_json(self, benchmark: str) -> dict[str, Any]:
        """Return the row of the JSON document."""
        kind = "at least" if self.at_least else "at most"
        named = {"benchmark": benchmark, "what": self.what, "measured": self.measured, "unit": self.unit}
        return named | {"reference": self.reference, "target": self.target, "target_is": kind, "met": self.met}


def payload_rows(found: Mapping[str, Any]) -> list[Row]:
    """Return the rows of payload_build's document."""
    size = f"{found['array_bytes'] / 1e9:.2f} GB"
    copy = f"numpy.copyto of the same {size}, {found['copy_touched_s']:.3f} s"
    return [
        Row("routed micro-batch, time to build", found["build_over_copy"], "x", copy, 12.0),
        Row("routed micro-batch, peak memory", found["resident_over_array"], "x", f"the array's {size}", 1.5),
    ]


def render_rows(found: Mapping[str, Any]) -> list[Row]:
    """Return the rows of render_start's document."""
    yaml = found["import_yaml_ms"]["median"]
    reference = f'`python -c "import yaml"` {yaml:.0f} ms, ratio {found["ratio"]:.2f}'
    return [Row("render_bench, whole process", found["render_bench_ms"]["median"], "ms", reference, found["limit_ms"])]


def diff_rows(found: Mapping[str, Any]) -> list[Row]:
    """Return the rows of diffs' document."""
    rows = []
    for one in found["results"]:
        if "times_floor" in one:
            floor = f"`diff -u` and PyYAML's parse of both, {one['floor_seconds']:.2f} s"
            rows.append(Row("diff_render, 780 KB", one["times_floor"], "x", floor, one["target_times_floor"]))
        elif "megabytes_per_second" in one:
            log, target = f"{one['input_bytes'] / 1e6:.0f} MB log", one["target_megabytes_per_second"]
            rows.append(Row("diff_config", one["megabytes_per_second"], "MB/s", log, target, True))
        else:
            log, target = f"{one['input_bytes'] / 2**30:.0f} GiB log", one["target_peak_mebibytes"]
            rows.append(Row("diff_config, peak memory", one["peak_mebibytes"], "MiB", log, target))
    return rows


def hlo_rows(found: Mapping[str, Any]) -> list[Row]:
    """Return the rows of hlo_parse's document."""
    rows = []
    for one in found["results"]:
        size = f"{one['bytes'] / 1e6:.0f} MB of {one['input'].split('.')[0]}"
        split = f"str.splitlines {one['splitlines_mb_per_second']:.0f} MB/s; {size}"
        rows.append(Row("hlo_overlap", one["mb_per_second"], "MB/s", split, 25.0, True))
        rows.append(Row("hlo_overlap, peak memory", one["peak_per_file_byte"], "x", size, 12.0))
    return rows


def driver_rows(found: Mapping[str, Any]) -> list[Row]:
    """Return the rows of driver_overhead's document."""
    bare = f"a bare loop over the engine, {found['bare_step_seconds'] * 1000:.0f} ms"
    return [Row("bench_driver, a step", found["ratio"], "x", bare, found["limit"])]


def aot_rows(found: Mapping[str, Any]) -> list[Row]:
    """Return the rows of aot_vs_maxtext's document."""
    maxtext = f"maxtext_engine_compile, {found['seconds']['maxtext']:.0f} s"
    return [Row("aot_bench --jobs 1, three kernels", found["jobs1_over_maxtext"], "x", maxtext, found["limit"])]


class Benchmark(NamedTuple):
    """How a script of this folder is run; None where it runs only with --full."""

    rows: Callable[[Mapping[str, Any]], list[Row]]
    options: Sequence[str] | None
    full: Sequence[str]


BENCHMARKS = {
    "render_start": Benchmark(render_rows, (), ("--runs", "40")),
    "diffs": Benchmark(diff_rows, (), ("--big", "--repeats", "5")),
    "hlo_parse": Benchmark(hlo_rows, (), ("--rounds", "5")),
    "payload_build": Benchmark(payload_rows, (), ("--rows", "64")),
    "driver_overhead": Benchmark(driver_rows, (), ("--steps", "60")),
    "aot_vs_maxtext": Benchmark(aot_rows, None, ("--repeats", "2")),
}


def machine() -> dict[str, Any]:
    """Return what the numbers were taken on: processor, cores, memory, Python, load over the last minute."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    model = platform.processor() or platform.machine()
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return {
        "processor": model,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": memory,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "load_1min_before": round(os.getloadavg()[0], 2),
    }


def run(name: str, options: Sequence[str]) -> Mapping[str, Any]:
    """Run one benchmark and return its JSON document.

    Raises:
      BenchError: it could not run, with the last line it wrote to stderr.
    """
    from bench_common import BenchError

    command = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), *options, "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        why = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise BenchError(f"ended with {done.returncode}: {why}", where=name)
    try:
        return json.loads(done.stdout)
    except ValueError as error:
        raise BenchError("printed no JSON", where=name) from error


def table(document: Mapping[str, Any]) -> str:
    """Return the document as text."""
    about = document["machine"]
    lines = [
        f"{about['processor']}, {about['cores']} cores, {about['memory_bytes'] / 2**30:.0f} GiB, "
        f"{about['system']}, Python {about['python']}",
        f"load {about['load_1min_before']} before, {about['load_1min_after']} after",
        "",
        f"{'what':<35}{'measured':>12}{'target':>12}  {'':<8}against",
    ]
    for row in document["rows"]:
        measured = f"{row['measured']:.3g} {row['unit']}"
        target = f"{'>=' if row['target_is'] == 'at least' else '<='} {row['target']:g} {row['unit']}"
        lines.append(
            f"{row['what']:<35}{measured:>12}{target:>12}  {'met' if row['met'] else 'MISSED':<8}{row['reference']}"
        )
    lines += [f"not run: {line}" for line in document["not_run"]]
    return "\n".join(lines) + "\n"


def build_parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="also what needs minutes or much memory")
    parser.add_argument("--only", metavar="A,B", help=f"some of {', '.join(BENCHMARKS)}")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    return parser


def collect(names: Sequence[str], full: bool) -> tuple[dict[str, Any], bool]:
    """Run benchmarks; return the document, and whether all could run."""
    from bench_common import BenchError, complain

    rows, not_run, whole = [], [], True
    about = machine()
    for name in names:
        benchmark = BENCHMARKS[name]
        options = benchmark.full if full else benchmark.options
        if options is None:
            not_run.append(f"{name}: only with --full")
            continue
        complain("run_all", " ".join((name, *options)))
        try:
            rows += [row.as_json(name) for row in benchmark.rows(run(name, options))]
        except BenchError as error:
            complain("run_all", str(error))
            not_run.append(str(error))
            whole = False
    about["load_1min_after"] = round(os.getloadavg()[0], 2)
    return {"schema": SCHEMA, "machine": about, "rows": rows, "not_run": not_run}, whole


def main(argv: Sequence[str] | None = None) -> int:
    """Run and print; see the module's docstring."""
    from bench_common import dump_json, emit, run_tool

    parser = build_parser()
    args = parser.parse_args(argv)
    names = args.only.split(",") if args.only else list(BENCHMARKS)
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"--only: no benchmark {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")

    def body() -> int:
        document, whole = collect(names, args.full)
        emit(dump_json(document) if args.json else table(document))
        if not whole:
            return 2
        return 0 if all(row["met"] for row in document["rows"]) else 1

    return run_tool("run_all", body)


if __name__ == "__main__":
    raise SystemExit(main())
