"""The numbers of a run on disk, for check_numerics_cpu --compare: losses, gradient norms, log-probs, some weights.

An .npz of plain arrays (never unpickled), written whole or not at all:
    losses float64 [steps, micro-batches]      gradient_norms float64 [steps]
    logps float32 [rows, tokens], the policy's before step 0, with mask float32 of the scored tokens; where taken
    weights/PATH float32, at most 4 evenly spaced entries along each dimension, after the last step
    about: a JSON text with schema, sha256 of the micro-batches, seed, versions and MaxText keys
"""

from __future__ import annotations

import hashlib
import json
import math
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np

import bench_payload
from bench_common import BenchError, mask
from bench_runtime import versions

SCHEMA = "trainer-numerics/1"
SAMPLED = 4  # entries per dimension: 256 of a scanned attention weight, a kilobyte a leaf, and no leaf is gathered


def save_numerics(path: str, run: Any) -> None:
    """Write what a driver run has computed.

    Args:
      path: the .npz.
      run: bench_loop.Run with .steps, .policy_logps, .batches, .options, .plan and .program.

    Raises:
      BenchError: no step was run, or the file cannot be written.
    """
    if not run.steps:
        raise BenchError("no step to save", where=path, todo="run at least one step")
    settings = {setting.key: mask(setting.key, setting.value) for setting in run.plan.job.settings}
    about = {"schema": SCHEMA, "micro_batches_sha256": digest(run.batches), "seed": run.options.seed,
             "versions": versions(), "maxtext": settings}  # fmt: skip
    arrays: dict[str, Any] = {
        "about": np.array(json.dumps(about, sort_keys=True)),
        "losses": np.array([step.losses for step in run.steps], np.float64),
        "gradient_norms": np.array([math.nan if s.gradient_norm is None else s.gradient_norm for s in run.steps]),
    }
    if run.policy_logps is not None:
        arrays["logps"] = np.asarray(run.policy_logps, np.float32)
        arrays["mask"] = np.asarray(run.batches[0]["completion_mask"], np.float32)
    arrays |= {f"weights/{name}": values for name, values in sample_weights(run.program.engine).items()}
    bench_payload.save_npz(path, arrays)


def digest(batches: Any) -> str:
    """Return the sha256 of micro-batches without their log-probs, which are the policy's and not the input's."""
    total = hashlib.sha256()
    for batch in batches:
        for name in sorted(batch):
            if isinstance(batch[name], np.ndarray) and not name.endswith("per_token_logps"):
                total.update(name.encode() + batch[name].tobytes())
    return total.hexdigest()


def sample_weights(engine: Any) -> dict[str, np.ndarray]:
    """Return name -> float32 sample of each parameter, cut out on the devices so that none is gathered."""
    import jax
    from flax import nnx

    found = {}
    for path, variable in nnx.to_flat_state(nnx.state(engine.model, nnx.Param)):
        value = variable.get_value()
        places = tuple(slice(None, None, max(1, -(-size // SAMPLED))) for size in value.shape)
        found[".".join(map(str, path))] = np.asarray(jax.device_get(value[places]), np.float32)
    return found


def load_numerics(path: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return (about, arrays by name) of a file that `save_numerics` wrote.

    Raises:
      BenchError: unreadable, or not such a file.
    """
    todo = "give a file that bench_driver --save-numerics wrote"
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        about = json.loads(str(arrays.pop("about")))
    except OSError as error:
        raise BenchError(f"cannot read: {error.strerror or error}", where=path, todo=todo) from error
    except (ValueError, KeyError, AttributeError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise BenchError("no saved numerics", where=path, todo=todo) from error
    if not isinstance(about, Mapping) or about.get("schema") != SCHEMA:
        raise BenchError(f"not of schema {SCHEMA}", where=path, todo=todo)
    wrong = _defect(about, arrays)
    if wrong:
        raise BenchError(f"damaged: {wrong}", where=path, todo=todo)
    return dict(about), arrays


def _defect(about: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> str | None:
    """Return what keeps a file from being one that `save_numerics` wrote, or None."""
    for key, kind in (("micro_batches_sha256", str), ("maxtext", dict)):
        if not isinstance(about.get(key), kind):
            return f"no {key}"
    for name, dimensions in (("losses", 2), ("gradient_norms", 1)):
        if name not in arrays:
            return f"no {name}"
        if arrays[name].ndim != dimensions or not arrays[name].size:
            return f"{name} {list(arrays[name].shape)}"
    if len(arrays["gradient_norms"]) != len(arrays["losses"]):
        return f"{len(arrays['losses'])} steps of losses, {len(arrays['gradient_norms'])} of gradient norms"
    if ("logps" in arrays) != ("mask" in arrays):
        return "log-probs and mask only come together"
    if "logps" in arrays and arrays["logps"].shape != arrays["mask"].shape:
        return f"log-probs {list(arrays['logps'].shape)}, mask {list(arrays['mask'].shape)}"
    return next((f"{name} is {array.dtype}" for name, array in arrays.items() if array.dtype.kind not in "fiu"), None)
