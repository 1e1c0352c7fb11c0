"""Compare two results of bench_driver --save-numerics: losses, gradient norms, log-probs and a sample of the weights.

Both must come from the same micro-batches and the same number of steps. The limit is that of another order of
summation in float32; what a knob may change beyond it is for the reader to judge, so every distance is printed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

import numerics_measures as measures
from bench_common import BenchError
from numerics_checks import ROUNDING_ULPS, WHY_ROUNDING, Finding, at_most, note
from numerics_file import load_numerics

WHY_LATER = "after an update the runs have other weights; rounding grows from step to step"
WHY_FINITE = "NaN equals NaN only in that both runs are broken"


def compare(a_path: str, b_path: str) -> list[dict[str, Any]]:
    """Return the findings, B against A, as rows of a report.

    Raises:
      BenchError: unreadable, or runs that cannot be compared.
    """
    (about_a, a), (about_b, b) = load_numerics(a_path), load_numerics(b_path)
    _refuse_other_runs(about_a, a, about_b, b, where=f"{a_path} and {b_path}")
    found = [
        *_series("losses", "losses", a["losses"], b["losses"]),
        *_series("gradient norm", "gradient norms", a["gradient_norms"], b["gradient_norms"]),
        *_logps(a, b),
        *_weights(_named_weights(a), _named_weights(b)),
        note("top-k flips of the router, cosine of the gradient", "a run saves neither; --only knobs measures both"),
        *_options(about_a["maxtext"], about_b["maxtext"]),
    ]
    return [{"check": "compare", **dataclasses.asdict(finding)} for finding in found]


def _refuse_other_runs(about_a: Mapping[str, Any], a: Mapping[str, np.ndarray], about_b: Mapping[str, Any],
                       b: Mapping[str, np.ndarray], where: str) -> None:  # fmt: skip
    """Raise a BenchError where two runs differ in more than their numbers."""
    if about_a["micro_batches_sha256"] != about_b["micro_batches_sha256"]:
        raise BenchError("different micro-batches", where=where, todo="run both with the same argv sizes and --seed")
    if a["losses"].shape != b["losses"].shape:
        raise BenchError(f"losses {list(a['losses'].shape)} and {list(b['losses'].shape)}", where=where,
                         todo="run both with the same --steps and --micro-batches")  # fmt: skip
    ours, theirs = ({name: value.shape for name, value in _named_weights(run).items()} for run in (a, b))
    apart = sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))
    if apart:
        sizes = " and ".join(str(list(run[apart[0]])) if apart[0] in run else "none" for run in (ours, theirs))
        raise BenchError(f"different weights: {apart[0]} {sizes}", where=where, todo="compare runs of one model")
    if "mask" in a and "mask" in b and not np.array_equal(a["mask"], b["mask"]):
        raise BenchError("different scored tokens", where=where, todo="compare runs of the same micro-batches")


def _named_weights(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name.removeprefix("weights/"): value for name, value in arrays.items() if name.startswith("weights/")}


def _series(one: str, many: str, a: np.ndarray, b: np.ndarray) -> list[Finding]:
    """Compare what each step gives, [steps] or [steps, micro-batches]."""
    if np.isnan(a).all() and np.isnan(b).all() and many != "losses":
        return [note(many, "neither run recorded them")]
    broken = float((~np.isfinite(a) & ~np.isfinite(b)).sum())
    return [
        _ulps(f"{one} of the first step", b[:1], a[:1], WHY_ROUNDING),
        _ulps(f"{many} of all steps", b, a, WHY_LATER),
        compared(f"{many}: relative difference", measures.relative_error(b, a), ""),
        at_most(f"{many}: not finite in both runs", broken, 0, "numbers", WHY_FINITE),
    ]


def compared(what: str, value: float, unit: str, why: str = "for comparison") -> Finding:
    """Return a number without a limit; None where it is not finite."""
    return Finding(what, value if math.isfinite(value) else None, unit, "", why, "note")


def _logps(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]) -> list[Finding]:
    without = [name for name, run in (("A", a), ("B", b)) if "logps" not in run]
    if without:
        return [note("log-probs before step 0", f"not saved in {' and '.join(without)}: "
                     "--sampler-logps synthetic, or a replay")]  # fmt: skip
    scored = a["mask"] > 0
    ours, theirs = a["logps"][scored].astype(np.float64), b["logps"][scored].astype(np.float64)
    if not ours.size:
        return [note("log-probs before step 0", "no token is scored")]
    apart = theirs - ours
    size = measures.summary(measures.ulps(theirs, ours))
    return [
        at_most("log-probs before step 0", size["max"], ROUNDING_ULPS, "ulps", WHY_ROUNDING),
        compared("log-probs: p99.9", size["p99.9"], "ulps"),
        compared("log-probs: largest difference", float(np.abs(apart).max()), "nats"),
        compared("log-probs: relative difference", measures.relative_error(theirs, ours), ""),
        compared("log-probs: KL estimate (k3) over the scored tokens", float((np.exp(apart) - 1 - apart).mean()),
                 "nats", "an estimate: only the scored tokens' log-probs are saved"),
    ]  # fmt: skip


def _weights(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> list[Finding]:
    if not a:
        return [note("weights after the last step", "neither run saved any")]
    apart = measures.leaf_ulps(b, a)
    worst = max(apart, key=lambda name: float(apart[name].max(initial=0.0)))
    size = measures.summary(apart)
    return [
        at_most(f"weights after the last step, worst {worst}", size["max"], ROUNDING_ULPS, "ulps of the leaf's largest",
                WHY_LATER),
        compared("weights: p99.9", size["p99.9"], "ulps of the leaf's largest"),
        compared("weights: relative difference", measures.relative_error(b, a), ""),
        compared("weights: cosine", measures.cosine(b, a), ""),
    ]  # fmt: skip


def _options(a: Mapping[str, str], b: Mapping[str, str]) -> list[Finding]:
    """Return a note for each MaxText option that the two runs set differently."""
    changed = sorted(key for key in {*a, *b} if a.get(key) != b.get(key))
    return [note(f"MaxText option {key}: {a.get(key, '(unset)')} -> {b.get(key, '(unset)')}", "what was changed")
            for key in changed]  # fmt: skip


def _ulps(what: str, got: np.ndarray, want: np.ndarray, why: str) -> Finding:
    return at_most(what, measures.summary(measures.ulps(got, want))["max"], ROUNDING_ULPS, "ulps", why)
