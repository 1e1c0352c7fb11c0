"""Compare two results of bench_driver --save-numerics: losses, gradient norms, log-probs and a sample of the weights.

Both must come from the same micro-batches and the same number of steps. The limit is that of another order of
summation in float32; what a knob may change beyond it is for the reader to judge, so every distance is printed.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

import numerics_measures as measures
from bench_common import BenchError
from numerics_checks import ROUNDING_ULPS, WHY_ROUNDING, Finding, at_most
from numerics_file import load_numerics

WHY_LATER = "after an update the runs have other weights; rounding grows from step to step"


def compare(a_path: str, b_path: str) -> list[dict[str, Any]]:
    """Return the findings, B against A, as rows of a report.

    Raises:
      BenchError: unreadable, or runs that cannot be compared.
    """
    (about_a, a), (about_b, b) = load_numerics(a_path), load_numerics(b_path)
    where = f"{a_path} and {b_path}"
    if about_a["micro_batches_sha256"] != about_b["micro_batches_sha256"]:
        raise BenchError("different micro-batches", where=where, todo="run both with the same argv sizes and --seed")
    if a["losses"].shape != b["losses"].shape:
        raise BenchError(f"losses {list(a['losses'].shape)} and {list(b['losses'].shape)}", where=where,
                         todo="run both with the same --steps and --micro-batches")  # fmt: skip
    names = sorted(name for name in a if name.startswith("weights/"))
    if names != sorted(name for name in b if name.startswith("weights/")):
        raise BenchError("different weights", where=where, todo="compare runs of one model")
    found = [
        _ulps("losses of the first step", b["losses"][0], a["losses"][0], WHY_ROUNDING),
        _ulps("losses of all steps", b["losses"], a["losses"], WHY_LATER),
        _ulps("gradient norm of the first step", b["gradient_norms"][:1], a["gradient_norms"][:1], WHY_ROUNDING),
        _ulps("gradient norms of all steps", b["gradient_norms"], a["gradient_norms"], WHY_LATER),
        *_logps(a, b),
    ]
    ours, theirs = {name: a[name] for name in names}, {name: b[name] for name in names}
    weights = measures.leaf_ulps(theirs, ours)
    worst = max(weights, key=lambda name: float(weights[name].max(initial=0.0)))
    size = measures.summary(weights)
    found += [
        at_most(f"weights after the last step, worst {worst.removeprefix('weights/')}", size["max"], ROUNDING_ULPS,
                "ulps of the leaf's largest", WHY_LATER),
        Finding("weights: p99.9", size["p99.9"], "ulps of the leaf's largest", "", "for comparison"),
        Finding("weights: relative difference", measures.relative_error(theirs, ours), "", "", "for comparison"),
    ]  # fmt: skip
    return [{"check": "compare", **dataclasses.asdict(finding)}
            for finding in (*found, *_options(about_a["maxtext"], about_b["maxtext"]))]  # fmt: skip


def _options(a: dict[str, str], b: dict[str, str]) -> list[Finding]:
    """Return a note for each MaxText option that the two runs set differently."""
    changed = sorted(key for key in {*a, *b} if a.get(key) != b.get(key))
    return [Finding(f"MaxText option {key}: {a.get(key, '(unset)')} -> {b.get(key, '(unset)')}", None, "", "",
                    "what was changed") for key in changed]  # fmt: skip


def _ulps(what: str, got: np.ndarray, want: np.ndarray, why: str) -> Finding:
    return at_most(what, measures.summary(measures.ulps(got, want))["max"], ROUNDING_ULPS, "ulps", why)


def _logps(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> list[Finding]:
    if "logps" not in a or "logps" not in b:
        return [Finding("log-probs before step 0", None, "", "", "not saved: --sampler-logps synthetic, or a replay")]
    scored = a["mask"] > 0
    ours, theirs = a["logps"][scored].astype(np.float64), b["logps"][scored].astype(np.float64)
    apart = theirs - ours
    size = measures.summary(measures.ulps(theirs, ours))
    return [
        at_most("log-probs before step 0", size["max"], ROUNDING_ULPS, "ulps", WHY_ROUNDING),
        Finding("log-probs: p99.9", size["p99.9"], "ulps", "", "for comparison"),
        Finding("log-probs: largest difference", float(np.abs(apart).max(initial=0.0)), "nats", "", "for comparison"),
        Finding("log-probs: KL estimate (k3) over the scored tokens", float((np.exp(apart) - 1 - apart).mean()), "nats",
                "", "an estimate: only the scored tokens' log-probs are saved"),
    ]  # fmt: skip
