"""The GRPO loss once more, in float64 and one sequence at a time: what the vectorised one is held against.

Written from the formulas (PPO's clipped ratio, the dual clip, Schulman's three KL estimators, GRPO's and DAPO's means)
and from the order of the gates in Tunix's distributed run, not from its code. Loops on purpose.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

import numerics_lab
from numerics_checks import UNBROKEN, Check, Finding, at_most, more_than, note

SUM_ERROR = 1e-5  # of the sum of magnitudes
WHY_GATE = "a gate that keeps all, or none, is not tested"
WHY_SUM = "some hundred float32 terms: 2^-24 each, and exp and log to a few ulps"
# Options that a Tunix can have only where its payload has the field they look at.
NEEDED_FIELDS = {"overlong_loss_masking": "overlong", "seq_logprob_error_threshold": "rollout_per_token_logps",
                 "truncated_importance_sampling_type": "rollout_per_token_logps"}  # fmt: skip


def sequences(batch: Mapping[str, Any]) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (row, scored positions in the completion part) of each sequence that has a scored token."""
    for row, scored in enumerate(batch["completion_mask"] > 0):
        ids = np.ones_like(scored, int) if batch["segment_ids"] is None else batch["segment_ids"][row]
        for number in range(1, ids.max(initial=0) + 1):
            places = np.flatnonzero(scored & (ids == number))
            if places.size:
                yield row, places


def loss(
    logps: np.ndarray, batch: Mapping[str, Any], options: Any, fixed: np.ndarray | None = None
) -> tuple[float, float]:
    """Return (numerator, denominator) of the loss.

    Args:
      logps: float64 [B, C or T], the policy's.
      batch: the payload's fields; advantages and old_per_token_logps [B, C or T].
      options: a GRPOConfig, read by attribute.
      fixed: the log-probs that gates and importance weights see, which no gradient goes through; None is logps.
    """
    fixed, old = logps if fixed is None else fixed, batch["old_per_token_logps"].astype(np.float64)
    tokens, means, sums, count, scored = 0.0, 0.0, 0.0, 0, 0
    for row, at in sequences(batch):
        if not _kept(fixed, batch, options, row, at):
            continue
        values = _token_losses(logps[row, at], old[row, at], batch["advantages"][row, at].astype(np.float64), options)
        values = values * _weights(fixed, batch, options, row, at)
        if options.beta:
            reference = batch["ref_per_token_logps"][row, at].astype(np.float64)
            values = values + options.beta * _kl(logps[row, at], reference, options)
        tokens, means, sums = tokens + values.sum(), means + values.mean(), sums + values.sum()
        count, scored = count + 1, scored + at.size
    if options.loss_agg_mode == "token-mean":
        return tokens, float(scored)
    if options.loss_agg_mode == "sequence-mean-token-mean":
        return means, float(count)
    if options.loss_agg_mode == "seq-mean-token-sum":
        return sums, float(count)
    rows = count if batch["segment_ids"] is not None else len(batch["completion_mask"])
    return tokens, float(rows)  # sequence-mean-token-sum-norm


def _kept(logps: np.ndarray, batch: Mapping[str, Any], options: Any, row: int, at: np.ndarray) -> bool:
    if options.overlong_loss_masking:
        flag = batch["overlong"][row]
        if np.any(flag if np.ndim(flag) == 0 else flag[at]):
            return False
    if options.seq_logprob_error_threshold is None:
        return True
    drift = logps[row, at] - batch["rollout_per_token_logps"][row, at]
    return float(np.exp(np.abs(drift)).mean()) <= options.seq_logprob_error_threshold


def _token_losses(logps: np.ndarray, old: np.ndarray, advantages: np.ndarray, options: Any) -> np.ndarray:
    found = np.empty_like(logps)
    for i, (mine, before, advantage) in enumerate(zip(logps, old, advantages, strict=True)):
        ratio = math.exp(min(max(mine - before, -20.0), 20.0))
        clipped = min(max(ratio, 1.0 - options.epsilon), 1.0 + options.epsilon_high)
        gain = min(ratio * advantage, clipped * advantage)  # PPO keeps the smaller gain
        if options.epsilon_c is not None and advantage < 0:
            gain = max(gain, options.epsilon_c * advantage)  # the dual clip bounds the loss of a bad token
        found[i] = -gain
    return found


def _weights(logps: np.ndarray, batch: Mapping[str, Any], options: Any, row: int, at: np.ndarray) -> Any:
    if options.truncated_importance_sampling_type is None:
        return 1.0
    drift = logps[row, at] - batch["rollout_per_token_logps"][row, at]
    mean = math.exp(drift.mean())  # the geometric mean of the ratios
    low, high = options.truncated_importance_sampling_ratio_min, options.truncated_importance_sampling_ratio
    return np.exp(drift) if low <= mean <= high else 0.0


def _kl(logps: np.ndarray, reference: np.ndarray, options: Any) -> np.ndarray:
    apart = logps - reference
    estimators = {"kl": apart, "mse_kl": apart**2 / 2, "low_var_kl": np.exp(-apart) - 1 + apart}
    found = estimators[options.kl_loss_mode]
    return found if options.kl_clamp_value is None else np.clip(found, -options.kl_clamp_value, options.kl_clamp_value)


def log_probs(logits: np.ndarray, batch: Mapping[str, Any]) -> np.ndarray:
    """Return float64 [B, C or T] log-probs of the completion tokens under logits [B, P + C, V] of every position."""
    wide = logits.astype(np.float64)
    wide = wide - wide.max(axis=-1, keepdims=True)
    table = wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    tokens = np.concatenate([batch["prompt_ids"], batch["completion_ids"]], axis=1)
    found = np.zeros(batch["completion_ids"].shape)
    first = tokens.shape[1] - found.shape[1]
    for row in range(len(found)):
        for i in range(found.shape[1]):
            if first + i > 0:
                found[row, i] = table[row, first + i - 1, tokens[row, first + i]]
    return found


# ---------------------------------------------------------------------------------------------
# The check


# The case that each fault is injected into, and what it does to the options of the vectorised loss there.
PLAIN, GATED = "clipped ratio, token-mean", "packed, overlong and TIS"
FAULTY: dict[str, tuple[str, dict[str, Any]]] = {
    "no clip": (PLAIN, {"epsilon": 10.0, "epsilon_high": 10.0}),
    "sum instead of mean": (PLAIN, {"loss_agg_mode": "seq-mean-token-sum"}),
    "shifted target": (PLAIN, {}), "a neighbour's advantage": (PLAIN, {}),
    "no KL": ("KL (k1)", {"beta": 0.0}),
    "overlong ones kept": (GATED, {"overlong_loss_masking": False}),
    "no TIS": (GATED, {"truncated_importance_sampling_type": None}),
}  # fmt: skip


def make_cases() -> dict[str, tuple[bool, dict[str, Any]]]:
    """Return name -> (packed, GRPO options) of the losses that are compared."""
    kl = {"beta": 0.04, "kl_clamp_value": None}
    tis = {"truncated_importance_sampling_type": "seq-mask-tis", "truncated_importance_sampling_ratio_min": 0.97,
           "truncated_importance_sampling_ratio": 1.03}  # fmt: skip
    return {
        PLAIN: (False, {}),
        "sequence-mean-token-mean": (False, {"loss_agg_mode": "sequence-mean-token-mean"}),
        "seq-mean-token-sum": (False, {"loss_agg_mode": "seq-mean-token-sum"}),
        "sequence-mean-token-sum-norm": (False, {"loss_agg_mode": "sequence-mean-token-sum-norm"}),
        "dual clip": (False, {"epsilon_c": 1.3}),
        "KL (k1)": (False, kl | {"kl_loss_mode": "kl"}),
        "KL (k2)": (False, kl | {"kl_loss_mode": "mse_kl"}),
        "KL (k3), clamped": (False, kl | {"kl_loss_mode": "low_var_kl", "kl_clamp_value": 0.1}),
        "packed, sequence means": (True, {"loss_agg_mode": "sequence-mean-token-mean"}),
        "packed, error gate": (True, {"seq_logprob_error_threshold": 1.35}),
        GATED: (True, {"overlong_loss_masking": True, **tis}),
        "padded, overlong and TIS": (False, {"overlong_loss_masking": True, **tis}),
    }  # fmt: skip


def table_batch(lab: Any, packed: bool) -> tuple[dict[str, Any], np.ndarray]:
    """Return a micro-batch with all log-prob fields filled, and float32 logits [B, P + C, V] of every position."""
    batch = {**lab.batch(packed), "routed_experts": None}
    rng = np.random.default_rng(lab.seed + packed)
    shape = batch["completion_mask"].shape
    width = batch["prompt_ids"].shape[1] + shape[1]
    logits = rng.normal(size=(shape[0], width, lab.sizes.vocab_size)).astype(np.float32)
    mine = log_probs(logits, batch)
    for name, spread in (("old", 0.25), ("ref", 0.3)):
        batch[f"{name}_per_token_logps"] = (mine + spread * rng.normal(size=shape)).astype(np.float32)
    batch["rollout_per_token_logps"] = (mine - _drift(rng, batch)).astype(np.float32)
    rows = np.zeros(shape[0], np.float32)
    rows[1] = 1.0  # one truncated sequence, or the first one of a packed row
    ids = batch["segment_ids"]
    batch["overlong"] = rows if ids is None else ((ids == 1) * rows[:, None]).astype(np.float32)
    return batch, logits


def _drift(rng: np.random.Generator, batch: Mapping[str, Any]) -> np.ndarray:
    """Return how far the policy is from the sampler, in nats: in turn near it, above, spread out, and below.

    Whatever the seed, the band of TIS (0.97 to 1.03) keeps the first and the third, whose mean is 0, and the error
    gate (mean of exp|drift| up to 1.35) drops the third.
    """
    drift = np.zeros(batch["completion_mask"].shape)
    for number, (row, at) in enumerate(sequences(batch)):
        noise = rng.normal(size=at.size)
        shift, spread = ((0.0, 0.15), (0.1, 0.15), (0.0, 1.0), (-0.1, 0.15))[number % 4]
        drift[row, at] = shift + spread * (noise - noise.mean())
    return drift


def grpo(lab: Any, fault: str = "") -> list[Finding]:
    """The GRPO loss against an independent one: clip, ratio, KL, means, TIS and overlong gates; and google-tunix's."""
    found, ours = [], {}
    broken_case, changes = FAULTY.get(fault, ("", {}))
    for name, (packed, options) in make_cases().items():
        if fault and name != broken_case and not (fault == UNBROKEN and name in dict(FAULTY.values())):
            continue
        batch, logits = table_batch(lab, packed)
        given, table = dict(batch), logits
        if fault == "shifted target":
            table = np.roll(logits, 1, axis=1)
        if fault == "a neighbour's advantage":
            given["advantages"] = np.roll(batch["advantages"], 1, axis=0)
        ours[name] = _ours(table, given, numerics_lab.plain_grpo(**options | changes), lab.pad_id)
        found += _compare(name, batch, logits, numerics_lab.plain_grpo(**options), *ours[name])
        found += _gates_bite(name, batch, logits, options) + _options_matter(name, batch, logits, options)
    return found if fault else found + _against_tunix(lab, ours)


def _ours(logits: np.ndarray, batch: Mapping[str, Any], options: Any, pad_id: int) -> tuple[float, float, np.ndarray]:
    """Return (numerator, denominator, gradient by the logits) of tunix_standin's loss on a model that is a table."""
    import jax

    _, params = _table_model(logits)
    (total, weight), gradient = _program(options, pad_id)(params, numerics_lab.payload_of(batch))
    return float(total), float(weight), np.asarray(jax.tree.leaves(gradient)[0])


@functools.lru_cache
def _program(options: Any, pad_id: int) -> Any:
    """Return the jitted loss and gradient of a table, of (its parameters, a payload)."""
    import jax
    from flax import nnx

    import tunix_standin

    graph, _ = _table_model(np.zeros((1, 1, 1), np.float32))

    def value(params: Any, payload: Any) -> tuple[Any, Any]:
        out = tunix_standin.grpo_loss_fn(nnx.merge(graph, params), payload, options, pad_id, pad_id)
        return out.primary_loss.unreduced_sum, out.primary_loss.denominator

    return jax.jit(jax.value_and_grad(value, has_aux=True))


def _table_model(logits: np.ndarray) -> Any:
    """Return (graph, parameters) of a model whose logits are its only parameter."""
    import jax.numpy as jnp
    from flax import nnx

    class Table(nnx.Module):
        def __init__(self, values: np.ndarray):
            self.values = nnx.Param(jnp.asarray(values))

        def __call__(self, tokens: Any, positions: Any = None, cache: Any = None, attention_mask: Any = None) -> Any:
            return self.values[...], None

    return nnx.split(Table(logits))


def _compare(name: str, batch: Mapping[str, Any], logits: np.ndarray, options: Any, value: float, weight: float,
             gradient: np.ndarray) -> list[Finding]:  # fmt: skip
    mine = log_probs(logits, batch)
    total, count = loss(mine, batch, options)
    size = float(np.abs(batch["advantages"][batch["completion_mask"] > 0]).sum())
    found = [
        at_most(f"{name}: numerator", abs(value - total) / size, SUM_ERROR, "of sum |advantage|", WHY_SUM),
        at_most(f"{name}: denominator", abs(weight - count), 0, "tokens or sequences", "a count is exact"),
    ]
    slopes, ours = [], []
    first = logits.shape[1] - batch["completion_ids"].shape[1]
    for row, at in list(sequences(batch))[:: max(1, len(batch["completion_ids"]) // 2)]:
        for column in at[1 :: max(1, at.size // 3)]:
            at_logits = row, first + column - 1
            slopes.append(_slope(logits[at_logits], (row, column), batch, options, mine))
            ours.append(float(gradient[at_logits][batch["completion_ids"][row, column]]))
    worst = float(np.abs(np.subtract(slopes, ours)).max() / max(np.abs(slopes).max(), 1e-12))
    return [*found, at_most(f"{name}: gradient at {len(slopes)} tokens", worst, 1e-4, "of the largest",
                            "central differences of 1e-5 in float64 are exact to 1e-9; float32 to 1e-5")]  # fmt: skip


def _gates_bite(name: str, batch: Mapping[str, Any], logits: np.ndarray, options: Mapping[str, Any]) -> list[Finding]:
    """Return the control that each gate of a case drops some sequences and keeps some."""
    mine, found = log_probs(logits, batch), []
    groups = [[key for key in options if key.startswith(start)] for start in ("overlong", "seq_logprob", "truncated")]
    for keys in filter(None, groups):
        only = numerics_lab.plain_grpo(**{key: options[key] for key in keys})
        kept = [_kept(mine, batch, only, *one) and bool(np.any(_weights(mine, batch, only, *one)))
                for one in sequences(batch)]  # fmt: skip
        share = float(np.mean(kept))
        found += [more_than(f"{name}: control: {keys[0]} keeps some", share, 0, "share", WHY_GATE),
                  at_most(f"{name}: control: {keys[0]} drops some", share, 1 - 1e-9, "share", WHY_GATE)]  # fmt: skip
    return found


def _options_matter(
    name: str, batch: Mapping[str, Any], logits: np.ndarray, options: Mapping[str, Any]
) -> list[Finding]:
    """Return the control that a case's clips and KL are felt: without them the independent loss is another one."""
    mine, plain, found = log_probs(logits, batch), numerics_lab.plain_grpo(**options), []
    without: dict[str, dict[str, Any]] = {"epsilon_c": {"epsilon_c": None}, "kl_clamp_value": {"kl_clamp_value": None},
                                          "beta": {"beta": 0.0, "kl_clamp_value": None}}  # fmt: skip
    off = {key: without[key] for key in options if options[key] is not None and key in without}
    if name == PLAIN:
        off = {"the clip": {"epsilon": 1e6, "epsilon_high": 1e6}}
    for key, changes in off.items():
        other = loss(mine, batch, dataclasses.replace(plain, **changes))[0]
        found.append(more_than(f"{name}: control: {key} matters", abs(loss(mine, batch, plain)[0] - other), 0,
                               "of the numerator", "what no token feels is not tested"))  # fmt: skip
    return found


def _slope(vector: np.ndarray, place: tuple[int, int], batch: Mapping[str, Any], options: Any,
           logps: np.ndarray) -> float:  # fmt: skip
    """Return d numerator / d logit of a scored token, by central differences.

    Args:
      vector: [V] logits that predict the token at `place` (row, column of the completion part) and no other.
      logps: float64 log-probs of all; gates and importance weights go on seeing these.
    """
    token, ends = batch["completion_ids"][place], []
    for step in (1e-5, -1e-5):
        moved, given = vector.astype(np.float64), logps.copy()
        moved[token] += step
        given[place] = moved[token] - moved.max() - math.log(np.exp(moved - moved.max()).sum())
        ends.append(loss(given, batch, options, logps)[0])
    return (ends[0] - ends[1]) / 2e-5


def _against_tunix(lab: Any, ours: Mapping[str, tuple[float, float, np.ndarray]]) -> list[Finding]:
    """Compare with the loss of the installed Tunix in every case that it has; `ours` is _ours by the case's name."""
    import bench_runtime

    if not bench_runtime.installed("tunix.rl"):
        return [note("Tunix's own loss", "not installed: compared with the independent loss only")]
    tunix = f"google-tunix {bench_runtime.package_version('google-tunix')}"
    if bench_runtime.has_tunix_experimental():
        tunix = f"Tunix from git {(bench_runtime.git_revision('tunix') or '')[:9]}".strip()
    from tunix.rl import algo_core

    payload, found = _tunix_payload(), []
    fields = {field.name for field in dataclasses.fields(payload)}
    for name, (packed, options) in make_cases().items():
        if any(needed not in fields for option, needed in NEEDED_FIELDS.items() if option in options):
            continue
        if packed and "num_segments" not in fields:  # its means are over rows, not over the sequences in them
            continue
        batch, logits = table_batch(lab, packed)
        total, weight, gradient = ours[name]
        batch |= {"loss_mask": batch["completion_mask"], "action_mask": batch["completion_mask"]}
        given = {field: value for field, value in batch.items() if field in fields and field != "routed_experts"}
        theirs, slope = _theirs(algo_core.grpo_loss_fn, logits, payload(**given), numerics_lab.plain_grpo(**options),
                                lab.pad_id)  # fmt: skip
        apart = float(np.abs(slope * weight - gradient).max() / np.abs(gradient).max())
        found += [
            at_most(f"{tunix}, {name}: loss", abs(theirs - total / weight), 1e-5, "", WHY_SUM),
            at_most(f"{tunix}, {name}: gradient", apart, 1e-4, "of the largest", WHY_SUM),
        ]
    return found


def _tunix_payload() -> Any:
    """Return the class of the installed Tunix's payload: that of its distributed run once that knows packed rows."""
    from tunix.rl import common

    import bench_runtime

    if bench_runtime.has_tunix_experimental():
        from tunix.experimental.common import datatypes

        if any(field.name == "num_segments" for field in dataclasses.fields(datatypes.RLTrainerPayload)):
            return datatypes.RLTrainerPayload
    return common.TrainExample


def _theirs(loss_fn: Any, logits: np.ndarray, example: Any, options: Any, pad_id: int) -> tuple[float, np.ndarray]:
    """Return (loss, gradient by the logits) of Tunix's loss, whether it returns a scalar or what is to be divided."""
    import jax
    from flax import nnx

    graph, params = _table_model(logits)

    def value(params: Any) -> Any:
        out = loss_fn(nnx.merge(graph, params), example, options, pad_id, pad_id)
        primary = getattr(out, "primary_loss", None)
        return out[0] if primary is None else primary.compute()

    total, gradient = jax.value_and_grad(value)(params)
    return float(total), np.asarray(jax.tree.leaves(gradient)[0])


GRPO = Check("grpo", grpo, {
    "no clip": "the ratio is not clipped", "shifted target": "logits are one position late",
    "sum instead of mean": "another aggregation", "a neighbour's advantage": "rows of advantages shifted by one",
    "no KL": "beta is 0", "overlong ones kept": "truncated sequences count",
    "no TIS": "no importance weights, and nothing rejected"})  # fmt: skip
