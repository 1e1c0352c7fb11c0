"""How far apart two sets of numbers are, in the units a numerics engineer asks for. Numpy only.

Distances are in float32 ulps (steps between neighbouring float32 numbers) of each number, or, for gradients and
weights, whose small entries are differences of large ones, of the largest entry of their array.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

INFINITE = 2.0**32  # the distance to a NaN or between infinities of two signs: more than any two finite float32


def ulps(a: Any, b: Any) -> np.ndarray:
    """Return float64, the number of float32 steps between each pair; NaN against NaN is 0, against a number 2**32."""
    with np.errstate(over="ignore"):  # beyond float32 is infinite
        left, right = np.asarray(a).astype(np.float32), np.asarray(b).astype(np.float32)
    distance = np.abs(_ordered(left) - _ordered(right)).astype(np.float64)
    nans = np.isnan(left), np.isnan(right)
    return np.where(nans[0] | nans[1], np.where(nans[0] & nans[1], 0.0, INFINITE), distance)


def _ordered(values: np.ndarray) -> np.ndarray:
    """Map float32 to int64 so that neighbours differ by 1 and both zeros are 0."""
    bits = values.view(np.int32).astype(np.int64)
    return np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


def scaled_ulps(a: Any, b: Any) -> np.ndarray:
    """Return float64 |a - b| in float32 ulps of the largest entry of b; NaN counts as 2**32."""
    left, right = np.asarray(a, np.float64), np.asarray(b, np.float64)
    largest = np.max(np.abs(right), initial=0.0)
    if not math.isfinite(largest):
        return np.where(left == right, 0.0, INFINITE)
    step = float(np.spacing(np.float32(max(largest, np.finfo(np.float32).tiny))))
    return np.nan_to_num(np.abs(left - right) / step, nan=INFINITE, posinf=INFINITE)


def relative_error(a: Any, b: Any) -> float:
    """Return |a - b| / |b| in the Euclidean norm, over all arrays of two mappings or two arrays."""
    left, right = _flat(a), _flat(b)
    size = float(np.linalg.norm(right))
    with np.errstate(invalid="ignore", over="ignore"):  # infinities: the error is NaN or infinite, and says so
        apart = float(np.linalg.norm(left - right))
    return apart / size if size else (0.0 if apart == 0 else math.inf)


def cosine(a: Any, b: Any) -> float:
    """Return the cosine between two gradients (mappings of arrays, or arrays); NaN where one is zero."""
    left, right = _flat(a), _flat(b)
    size = float(np.linalg.norm(left)) * float(np.linalg.norm(right))
    return float(left @ right) / size if size else math.nan


def kl_divergence(p_logits: Any, q_logits: Any) -> np.ndarray:
    """Return float64 [...], KL(p || q) in nats of the softmax over the last axis, by float64 arithmetic."""
    log_p, log_q = _log_softmax(p_logits), _log_softmax(q_logits)
    return np.maximum((np.exp(log_p) * (log_p - log_q)).sum(axis=-1), 0.0)


def _log_softmax(logits: Any) -> np.ndarray:
    wide = np.asarray(logits, np.float64)
    wide = wide - wide.max(axis=-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))


def flip_share(a: Any, b: Any) -> float:
    """Return the share (0.0 to 1.0) of tokens whose set of experts differs; bool or int [..., experts]."""
    differs = (np.asarray(a) != np.asarray(b)).any(axis=-1)
    return float(differs.mean()) if differs.size else 0.0


def summary(distances: Any) -> dict[str, float]:
    """Return `max` and `p99.9` of ulp distances; 0 where there are none."""
    flat = np.concatenate([np.ravel(values) for values in _arrays(distances)] or [np.zeros(0)])
    if not flat.size:
        return {"max": 0.0, "p99.9": 0.0}
    return {"max": float(flat.max()), "p99.9": float(np.quantile(flat, 0.999, method="higher"))}


def leaf_ulps(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return the scaled ulps of every array of two mappings with the same names."""
    return {name: scaled_ulps(a[name], b[name]) for name in b}


def _arrays(values: Any) -> list[np.ndarray]:
    if isinstance(values, Mapping):
        return [np.asarray(values[name]) for name in sorted(values)]
    return [np.asarray(values)]


def _flat(values: Any) -> np.ndarray:
    return np.concatenate([np.ravel(array).astype(np.float64) for array in _arrays(values)])
