"""Time the building of a micro-batch's routing against a plain copy of the same bytes.

The routing is by far the largest field of a packed micro-batch (5.03 GB of int16 for 64 x 65,536 tokens, 60 layers,
top-10 of 512 experts), and the trainer waits for it before every step of a bench. Three times are taken in one run:
building it calibrated, `numpy.copyto` of the finished array (into a fresh array, and into one already in memory), and
the naive way, a random top-k by `argpartition` per token, on a sample of tokens and extrapolated.

In: nothing. Out: a table, or JSON with --json; seconds, and ratios to `numpy.copyto` into an array already in memory,
the harder of the two. Resident is the peak of the process up to the end of the build, over the array's bytes.

Exit codes: 0 within both limits (12 x the copy, 1.5 x the bytes), 1 beyond one of them, 2 could not run.

Examples:
  python benchmarks/payload_build.py              # 8 rows, 0.63 GB: seconds
  python benchmarks/payload_build.py --rows 64    # the 397B shape, 5.03 GB: needs 11 GB of memory
"""

from __future__ import annotations

import argparse
import pathlib
import resource
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np

COPY_LIMIT = 12.0  # x the time of numpy.copyto
RESIDENT_LIMIT = 1.5  # x the bytes of the array
EXPERTS, TOP_K = 512, 10  # qwen3.5-397b-a17b
SHARDS, CONTEXT, CHUNKS = 8, 4, 2  # expert 2 x context 4 under cp-as-ep; num_moe_token_chunks


def build_parser() -> argparse.ArgumentParser:
    """Return the argument parser."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8, help="rows, an even number (default 8; 64 is the full shape)")
    parser.add_argument("--tokens", type=int, default=65536, help="tokens per row, a multiple of 8 (default 65536)")
    parser.add_argument("--layers", type=int, default=60, help="MoE layers (default 60)")
    parser.add_argument("--naive-tokens", type=int, default=2000, help="tokens of one layer sampled (default 2000)")
    parser.add_argument("--json", action="store_true", help="write one JSON document")
    return parser


def seconds(work: Callable[[], object]) -> tuple[float, object]:
    """Return (seconds, result) of one call."""
    begin = time.perf_counter()
    result = work()
    return time.perf_counter() - begin, result


def measure(rows: int, tokens: int, layers: int, naive_tokens: int) -> dict[str, float | int]:
    """Run the three ways once each; return seconds, bytes and ratios by name."""
    import bench_routing

    shape = (rows, tokens, layers, TOP_K)
    targets = tuple(1.1 + 0.4 * layer / layers for layer in range(layers))
    routing = bench_routing.RoutingSpec(targets, SHARDS, rows // 2, CHUNKS, sequence_shards=CONTEXT)
    bench_routing.require(naive_tokens >= 1, f"--naive-tokens is {naive_tokens}, must be at least 1")
    bench_routing.check_routing(shape, EXPERTS, routing)
    assigned = np.ones(shape[:2], bool)
    build, routed = seconds(lambda: bench_routing.build_routing(shape, EXPERTS, routing, assigned, 0, 0))
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    target = np.empty_like(routed)
    fresh, _ = seconds(lambda: np.copyto(target, routed))
    touched = min(seconds(lambda: np.copyto(target, routed))[0] for _ in range(3))
    rng = np.random.default_rng(0)
    sample, _ = seconds(lambda: np.argpartition(rng.random((naive_tokens, EXPERTS), np.float32), -TOP_K)[:, -TOP_K:])
    count, table = seconds(lambda: bench_routing.measure_load(routed, EXPERTS, routing))
    return {
        "rows": rows,
        "tokens_per_row": tokens,
        "layers": layers,
        "array_bytes": routed.nbytes,
        "build_s": build,
        "copy_fresh_s": fresh,
        "copy_touched_s": touched,
        "naive_extrapolated_s": sample / naive_tokens * rows * tokens * layers,
        "measure_load_s": count,
        "build_over_copy": build / touched,
        "build_over_copy_fresh": build / fresh,
        "resident_over_array": resident / routed.nbytes,
        "layers_out_of_tolerance": len(table.out_of_tolerance),
    }


def lines(result: dict[str, float | int]) -> list[str]:
    """Return the table, at most 80 columns."""
    shape = f"{result['rows']} x {result['tokens_per_row']} tokens, {result['layers']} layers, top {TOP_K} of {EXPERTS}"
    copy = result["copy_touched_s"]
    table = [
        ("numpy.copyto, array in memory", copy),
        ("numpy.copyto, fresh array", result["copy_fresh_s"]),
        ("build, calibrated", result["build_s"]),
        ("measure the load", result["measure_load_s"]),
        ("naive argpartition, extrapolated", result["naive_extrapolated_s"]),
    ]
    text = [f"{shape}: {result['array_bytes'] / 1e9:.2f} GB", f"{'':<34}{'seconds':>10}{'x copy':>10}"]
    text += [f"{name:<34}{value:>10.3f}{value / copy:>10.1f}" for name, value in table]
    text.append(f"resident {result['resident_over_array']:.2f} x the array (limit {RESIDENT_LIMIT})")
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; see the module's docstring."""
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
    from bench_common import dump_json, emit, run_tool

    args = build_parser().parse_args(argv)

    def body() -> int:
        result = measure(args.rows, args.tokens, args.layers, args.naive_tokens)
        document = {"schema": "payload_build/1", **result}
        emit(dump_json(document) if args.json else "\n".join(lines(result)) + "\n")
        slow = result["build_over_copy"] > COPY_LIMIT or result["resident_over_array"] > RESIDENT_LIMIT
        return 1 if slow or result["layers_out_of_tolerance"] else 0

    return run_tool("payload_build", body)


if __name__ == "__main__":
    raise SystemExit(main())
