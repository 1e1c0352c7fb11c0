"""tunix_standin: the loss against google-tunix 0.1.7 and against plain numpy loops, the worker, the real engine."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import math
import sys
import threading
import warnings

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="needs JAX (the extra `cpu`)")
pytest.importorskip("flax", reason="needs Flax (the extra `cpu`)")

import jax.numpy as jnp  # noqa: E402
from flax import nnx  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

import grpo_loss  # noqa: E402
import tunix_standin as standin  # noqa: E402
from bench_common import BenchError  # noqa: E402
from tests.engine_fixture import EXPERTS, PAD_ID, TOP_K, engine_kit  # noqa: E402, F401
from tunix_standin import GRPOConfig, RLTrainerPayload, WeightedMetric  # noqa: E402

VOCAB, WIDTH = 23, 8
PLAIN = {"temperature": 1.0, "beta": 0.0, "loss_agg_mode": "token-mean"}

# float32 rounds at 1.2e-7; a sum of a few hundred terms, in another order, is off by some ten times that. A
# wrong term would be off by one part in a few hundred. Gradients are held against each leaf's largest entry.
CLOSE = 3e-6


# A tiny model with MaxText's surfaces ----------------------------------------------------------------------


class TinyDecoder(nnx.Module):
    """Causal averaging inside a segment, experts added, and MaxText 0.2.5's two ways to end."""

    def __init__(self, rngs, tiling):
        self.mix = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.out = nnx.Linear(WIDTH, VOCAB, use_bias=False, rngs=rngs)
        self.experts = nnx.Param(jax.random.normal(rngs.params(), (EXPERTS, WIDTH)))
        self.tiling = tiling

    def __call__(self, shared_embedding, tokens, positions, segments, experts):
        same = (segments[:, :, None] == segments[:, None, :]) & (segments[:, None, :] > 0)
        weights = (same & jnp.tri(tokens.shape[1], dtype=bool)).astype(jnp.float32)
        weights = weights / jnp.maximum(weights.sum(-1, keepdims=True), 1.0)
        hidden = shared_embedding(tokens) + 0.1 * jnp.sin(positions[..., None] / (1.0 + jnp.arange(WIDTH)))
        if experts is not None:
            used = self.experts.get_value()[jnp.maximum(experts, 0)] * (experts >= 0)[..., None]
            hidden = hidden + used.sum((-3, -2))
        hidden = jnp.tanh(self.mix(weights @ hidden)) + hidden
        if self.tiling > 1:
            with warnings.catch_warnings():  # MaxText 0.2.5 sows like this, which newer Flax deprecates
                warnings.simplefilter("ignore", DeprecationWarning)
                self.sow(nnx.Intermediate, "hidden_states", hidden)
            return None
        return self.apply_output_head(shared_embedding, hidden, True, "train")

    def apply_output_head(self, shared_embedding, y, deterministic, model_mode):
        return self.out(jnp.tanh(y))


class TinyBase(nnx.Module):
    def __init__(self, rngs, tiling):
        self.token_embedder = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.decoder = TinyDecoder(rngs, tiling)

    def __call__(self, tokens, positions, segments, experts):
        return self.decoder(self.token_embedder, tokens, positions, segments, experts)

    def logits_from_hidden_states_for_vocab_tiling(self, hidden, deterministic, model_mode):
        return self.decoder.apply_output_head(self.token_embedder, hidden, deterministic, model_mode)


class TinyAdapter(nnx.Module):
    """The call signature of TunixMaxTextAdapter 0.2.5."""

    def __init__(self, seed=0, tiling=1):
        self.base = TinyBase(nnx.Rngs(seed), tiling)

    def __call__(
        self, input_tokens, positions, cache, attention_mask, forced_routed_experts=None, segment_ids=None
    ):  # fmt: skip
        return self.base(input_tokens, positions, segment_ids, forced_routed_experts), None


class NewAdapter(TinyAdapter):
    """The surface that came after 0.2.5: the head is skipped on request."""

    def __call__(self, input_tokens, positions, cache, attention_mask, segment_ids=None, skip_lm_head=False):
        if not skip_lm_head:
            return self.base(input_tokens, positions, segment_ids, None), None
        self.base.decoder.tiling = 2
        self.base(input_tokens, positions, segment_ids, None)
        self.base.decoder.tiling = 1
        return self.base.decoder.hidden_states.get_value()[-1], None

    def compute_final_logits(self, hidden):
        return self.base.logits_from_hidden_states_for_vocab_tiling(hidden, True, "train")


class NoHidden(nnx.Module):
    """A model with nothing but logits, and no routed experts."""

    def __init__(self):
        self.table = nnx.Param(jnp.ones((VOCAB, VOCAB)))

    def __call__(self, input_tokens, positions, cache, attention_mask):
        return self.table.get_value()[input_tokens], None


# Batches ---------------------------------------------------------------------------------------------------


def padded(seed=0, rows=4, prompt=5, width=11, cut=True, **fields):
    """Return a padded batch of random tokens, left-padded prompts and, if `cut`, completions of two lengths."""
    rng = np.random.default_rng(seed)
    prompts = rng.integers(1, VOCAB, (rows, prompt)).astype(np.int32)
    prompts[1, :2] = PAD_ID
    completions = rng.integers(1, VOCAB, (rows, width)).astype(np.int32)
    mask = np.ones((rows, width), np.float32)
    if cut:
        completions[1, 7:], mask[1, 7:] = PAD_ID, 0
        mask[2, 3:5] = 0  # a tool's answer inside a trajectory is not scored
    values = {
        "prompt_ids": prompts, "prompt_mask": (prompts != PAD_ID).astype(np.float32), "completion_ids": completions,
        "completion_mask": mask, "advantages": rng.normal(size=(rows, width)).astype(np.float32),
    }  # fmt: skip
    return RLTrainerPayload(**{**values, **fields})


def packed(seed=0, lengths=((4, 6, 3), (9, 5)), width=16, **fields):
    """Return packed rows of sequences with these lengths; each sequence's first two tokens are its prompt."""
    rng = np.random.default_rng(seed)
    shape = (len(lengths), width)
    ids, segments, places = (np.zeros(shape, np.int32) for _ in range(3))
    mask, advantages = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    for row, row_lengths in enumerate(lengths):
        start = 0
        for number, length in enumerate(row_lengths, 1):
            part = (row, slice(start, start + length))
            ids[part], segments[part] = rng.integers(1, VOCAB, length), number
            places[part], mask[row, start + 2 : start + length] = np.arange(length), 1
            advantages[part] = rng.normal()
            start += length
    empty = np.zeros((len(lengths), 0))
    values = {
        "prompt_ids": empty.astype(np.int32), "prompt_mask": empty.astype(np.float32), "completion_ids": ids,
        "completion_mask": mask, "advantages": advantages, "segment_ids": segments, "segment_positions": places,
        "num_segments": max(map(len, lengths)) + 2,
    }  # fmt: skip
    return RLTrainerPayload(**{**values, **fields})


def policy_logps(model, batch, config):
    """Return (log-probs, entropy) as float64 numpy, from the model's plain logits, by numpy's own softmax."""
    tokens = np.concatenate([batch.prompt_ids, batch.completion_ids], axis=1)
    if batch.segment_ids is None:
        segments = (tokens != PAD_ID).astype(np.int32)
        places = np.maximum(np.cumsum(segments, axis=1) - 1, 0)
    else:
        segments, places = batch.segment_ids, batch.segment_positions
    logits, _ = model(jnp.asarray(tokens), jnp.asarray(places), None, None, segment_ids=jnp.asarray(segments))
    logits = np.asarray(logits, np.float64) / config.temperature
    everything = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    entropy = -(np.exp(everything) * everything).sum(-1)
    picked = np.take_along_axis(everything[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]
    keep = batch.completion_ids.shape[1]
    if batch.segment_ids is not None:
        return np.pad(picked, ((0, 0), (1, 0))), np.pad(entropy[:, :-1], ((0, 0), (1, 0)))
    return picked[:, -keep:], entropy[:, :-1][:, -keep:]


def sequences_of(batch):
    """Return the (row, columns) of each sequence of a batch, in order; padding is none."""
    rows, width = batch.completion_ids.shape
    if batch.segment_ids is None:
        return [(row, np.arange(width)) for row in range(rows)]
    return [
        (row, np.flatnonzero(batch.segment_ids[row] == number))
        for row in range(rows)
        for number in range(1, batch.segment_ids[row].max() + 1)
    ]


def numpy_grpo(config, batch, logps):
    """Return (numerator, denominator) of the loss by loops over sequences and tokens, in float64."""
    sampler = batch.rollout_per_token_logps
    fused = sampler is None and config.use_rollout_logps and batch.sampler_is_weights is None
    sampler = batch.old_per_token_logps if fused else sampler
    corrects = config.sampler_is or config.sampler_rs or config.seq_logprob_error_threshold
    on_policy = batch.old_per_token_logps is None or config.force_on_policy_ratio or (fused and corrects)
    per_sequence = []  # (sum of losses, scored tokens) of those that are left
    for row, columns in sequences_of(batch):
        scored = [t for t in columns if batch.completion_mask[row, t] > 0]
        if not scored:
            continue
        if (
            config.overlong_loss_masking
            and np.ravel(np.atleast_2d(batch.overlong.T).T[row])[scored[0] if np.ndim(batch.overlong) == 2 else 0]
        ):
            continue
        drift = {t: logps[row, t] - float(sampler[row, t]) for t in scored} if sampler is not None else {}
        if config.seq_logprob_error_threshold is not None:
            error = sum(math.exp(abs(x)) if math.isfinite(x) else math.inf for x in drift.values()) / len(scored)
            if not error <= config.seq_logprob_error_threshold:
                continue
        old = logps if on_policy else batch.old_per_token_logps.astype(np.float64)
        good = [t for t in scored if np.isfinite(old[row, t]) and np.isfinite(batch.advantages[row, t])]
        ratios = {t: min(max(logps[row, t] - old[row, t], -20), 20) for t in good}
        if config.loss_algo == "gspo-token" and good:
            mean = sum(ratios.values()) / len(good)
            ratios = {t: min(max(mean, -20), 10) for t in good}
        finite = {t: x if math.isfinite(x) else 0.0 for t, x in drift.items()}
        geomean = math.exp(sum(finite.values()) / len(scored)) if drift else 1.0
        total = 0.0
        for t in good:
            ratio, advantage = math.exp(ratios[t]), float(batch.advantages[row, t])
            low, high = 1 - config.epsilon, 1 + config.epsilon_high
            loss = max(-advantage * ratio, -advantage * min(max(ratio, low), high))
            if config.epsilon_c is not None and advantage < 0:
                loss = min(loss, -config.epsilon_c * advantage)
            total += loss * numpy_weight(config, batch, row, t, drift.get(t), geomean)
        per_sequence.append((total, len(good)))
    return numpy_pool(config.loss_agg_mode, [s for s in per_sequence if s[1]], batch)


def numpy_weight(config, batch, row, t, drift, geomean):
    """Return the importance weight of one token."""
    if config.truncated_importance_sampling_type:
        low, high = config.truncated_importance_sampling_ratio_min, config.truncated_importance_sampling_ratio
        return math.exp(drift) if math.isfinite(drift) and low <= geomean <= high else 0.0
    if batch.sampler_is_weights is not None:
        return float(batch.sampler_is_weights[row, t])
    if not (config.sampler_is or config.sampler_rs):
        return 1.0
    if not math.isfinite(drift):
        return 0.0
    compared = math.exp(drift) if config.sampler_rs == "token" else geomean
    if config.sampler_rs and not config.sampler_rs_min <= compared <= config.sampler_rs_max:
        return 0.0
    cap = math.inf if config.sampler_is_threshold is None else config.sampler_is_threshold
    return min(math.exp(drift), cap) if config.sampler_is else 1.0


def numpy_pool(mode, per_sequence, batch):
    """Return numerator and denominator of per-sequence (sum, tokens) pairs under a loss_agg_mode."""
    sums, tokens = sum(s for s, _ in per_sequence), sum(n for _, n in per_sequence)
    rows, width = batch.completion_mask.shape
    return {
        "token-mean": (sums, tokens),
        "sequence-mean-token-mean": (sum(s / n for s, n in per_sequence), len(per_sequence)),
        "sequence-mean-token-scale": (sums / width, len(per_sequence)),
        "seq-mean-token-sum": (sums, len(per_sequence)),
        "sequence-mean-token-sum-norm": (sums, rows if batch.segment_ids is None else len(per_sequence)),
    }[mode]


def run_loss(model, batch, config, chunk=0):
    """Return LossOutput and the gradient of the reduced loss.

    Not jitted: every test has its own options, and a compile costs more than all the small operations, which
    JAX compiles once per shape; so the batches of this file have one shape per layout.
    """

    def loss(state):
        out = standin.grpo_loss_fn(nnx.merge(graph, state), batch, config, PAD_ID, PAD_ID, chunk)
        return out.primary_loss.compute(), out

    graph, state = nnx.split(model)
    (_, out), gradient = jax.value_and_grad(loss, has_aux=True)(state)
    return out, gradient


def forward(model, batch, config):
    """Return LossOutput alone."""
    return standin.grpo_loss_fn(model, batch, config, PAD_ID, PAD_ID)


def assert_gradients_close(left, right, tolerance=CLOSE):
    """Compare leaf by leaf against the leaf's largest entry; the left must not be all zero."""
    pairs = list(zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True))
    assert max(float(jnp.abs(a).max()) for a, _ in pairs) > 0
    scale = max(float(jnp.abs(b).max()) for _, b in pairs)
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * scale)


def near(logps, seed, size=0.3):
    """Return float32 log-probs at a random distance from the policy's."""
    return (logps + np.random.default_rng(seed).normal(size=logps.shape) * size).astype(np.float32)


# The loss against google-tunix 0.1.7 -----------------------------------------------------------------------

CASES = {
    "on-policy": ({}, {}),
    "clipping both ways": ({"epsilon": 0.1, "epsilon_high": 0.15}, {"old": 0.3}),
    "uncut rows, temperature": ({"temperature": 0.7}, {"old": 0.2, "cut": False}),
    "kl": ({"beta": 0.04, "kl_loss_mode": "kl"}, {"old": 0.1, "ref": 0.3}),
    "low-variance kl, clamped": ({"beta": 0.1, "kl_loss_mode": "low_var_kl", "kl_clamp_value": 0.05}, {"ref": 0.5}),
    "squared kl": ({"beta": 0.5, "kl_loss_mode": "mse_kl"}, {"ref": 0.4}),
    "reference without beta": ({}, {"ref": 0.4}),
    "dual clip": ({"epsilon_c": 1.1, "epsilon": 0.5}, {"old": 1.0}),
    "gspo": ({"loss_algo": "gspo-token", "epsilon": 0.05}, {"old": 0.4}),
    "weights from upstream": ({"use_rollout_logps": False}, {"old": 0.2, "weights": True}),
    "one advantage per row": ({}, {"old": 0.2, "flat": True}),
    "sequence means": ({"loss_agg_mode": "sequence-mean-token-mean"}, {"old": 0.2}),
    "scaled": ({"loss_agg_mode": "sequence-mean-token-scale"}, {"old": 0.2}),
    "sums": ({"loss_agg_mode": "seq-mean-token-sum"}, {"old": 0.2}),
    "sum norm": ({"loss_agg_mode": "sequence-mean-token-sum-norm"}, {"old": 0.2}),
}


@pytest.fixture(scope="module")
def tunix_core():
    """google-tunix 0.1.7's own algo_core, an independent implementation."""
    standin.install()
    return pytest.importorskip("tunix.rl.algo_core", reason="google-tunix is not installed")


@pytest.mark.parametrize("case", list(CASES))
def test_loss_and_gradients_agree_with_tunix(case, tunix_core):
    options, how = CASES[case]
    seed = list(CASES).index(case)
    config, model = GRPOConfig(**{**PLAIN, **options}), TinyAdapter(seed)
    batch = padded(seed, cut=how.get("cut", True))
    logps, _ = policy_logps(model, batch, config)
    fields = {
        "old_per_token_logps": near(logps, 1, how["old"]) if "old" in how else None,
        "ref_per_token_logps": near(logps, 2, how["ref"]) if "ref" in how else None,
        "sampler_is_weights": np.exp(near(logps * 0, 3)) if "weights" in how else None,
        "advantages": batch.advantages[:, 0] if "flat" in how else batch.advantages,
    }
    batch = dataclasses.replace(batch, **fields)
    out, gradient = run_loss(model, batch, config)

    def reference(state):
        loss, aux = tunix_core.grpo_loss_fn(nnx.merge(graph, state), batch, config, PAD_ID, PAD_ID)
        return loss, aux

    graph, state = nnx.split(model)
    (expected, aux), expected_gradient = jax.value_and_grad(reference, has_aux=True)(state)
    assert abs(float(out.primary_loss.compute() - expected)) < CLOSE * max(1.0, abs(float(expected)))
    assert_gradients_close(gradient, expected_gradient)
    shared = {name: value for name, value in aux.items() if name in out.aux_metrics and name != "entropy"}
    assert len(shared) >= 17
    for name, value in {**shared, "entropy": aux["entropy"]}.items():
        mine = out.aux_metrics[name]
        mine = mine.compute() if isinstance(mine, WeightedMetric) else mine
        np.testing.assert_allclose(mine, value, rtol=2e-5, atol=2e-6, err_msg=name)


def test_the_clipping_cases_do_clip(tunix_core):
    config, model = GRPOConfig(**PLAIN, epsilon=0.1, epsilon_high=0.15), TinyAdapter(1)
    batch = padded(1)
    logps, _ = policy_logps(model, batch, config)
    out = forward(model, dataclasses.replace(batch, old_per_token_logps=near(logps, 1)), config)
    assert 0.1 < float(out.aux_metrics["pg_clipfrac"].compute()) < 0.9


# The loss against plain loops: every gate and mode, padded and packed --------------------------------------

TIS = {
    "truncated_importance_sampling_type": "seq-mask-tis", "truncated_importance_sampling_ratio_min": 0.95,
    "truncated_importance_sampling_ratio": 1.15, "use_rollout_logps": False,
}  # fmt: skip
GATES = {
    "none": ({}, {}),
    "error threshold": ({"seq_logprob_error_threshold": 1.25}, {"rollout": 0.3}),
    "overlong": ({"overlong_loss_masking": True}, {"overlong": True}),
    "overlong and threshold": (
        {"overlong_loss_masking": True, "seq_logprob_error_threshold": 1.3}, {"overlong": True, "rollout": 0.3}),
    "tis": (TIS, {"rollout": 0.3}),
    "the published recipe": (
        {**TIS, "overlong_loss_masking": True, "seq_logprob_error_threshold": 2.0, "epsilon_high": 0.28},
        {"rollout": 0.3, "overlong": True}),
    "token weights, fused": ({"sampler_is": "token", "sampler_is_threshold": 1.1}, {"old": 0.3}),
    "token weights, uncapped": ({"sampler_is": "token", "sampler_is_threshold": None}, {"old": 0.3}),
    "geometric rejection": ({"sampler_rs": "geometric", "sampler_rs_min": 0.9, "sampler_rs_max": 1.1}, {"old": 0.3}),
    "token rejection": ({"sampler_rs": "token", "sampler_rs_min": 0.8, "sampler_rs_max": 1.2}, {"old": 0.3}),
    "weights and rejection": (
        {"sampler_is": "token", "sampler_rs": "geometric", "sampler_rs_min": 0.95, "sampler_rs_max": 1.1},
        {"old": 0.3}),
    "threshold, fused": ({"seq_logprob_error_threshold": 1.25}, {"old": 0.3}),
    "forced on-policy": ({"force_on_policy_ratio": True, "use_rollout_logps": False}, {"old": 0.3}),
    "weights from upstream": ({"sampler_is": "token"}, {"old": 0.2, "weights": True}),
    "gspo": ({"loss_algo": "gspo-token", "use_rollout_logps": False}, {"old": 0.3}),
    "dual clip": ({"epsilon_c": 1.05, "use_rollout_logps": False}, {"old": 0.8}),
}  # fmt: skip


def gated(kind, gate, model, config):
    """Return the batch of a gate's case: the sampler's log-probs and so on at a distance from the policy's."""
    batch = padded(3) if kind == "padded" else packed(3)
    how = GATES[gate][1]
    logps, _ = policy_logps(model, batch, config)
    fields = {}
    if "rollout" in how:
        fields["rollout_per_token_logps"] = near(logps, 4, how["rollout"])
    if "old" in how:
        fields["old_per_token_logps"] = near(logps, 5, how["old"])
    if "weights" in how:
        fields["sampler_is_weights"] = np.exp(near(logps * 0, 6))
    if "overlong" in how:
        per_row = np.array([0, 1, 0, 0], np.float32)
        fields["overlong"] = per_row if kind == "padded" else (batch.segment_ids == 2).astype(np.float32)
    return dataclasses.replace(batch, **fields), logps


@pytest.mark.parametrize("kind", ["padded", "packed"])
@pytest.mark.parametrize("gate", list(GATES))
def test_every_gate_equals_plain_loops(kind, gate):
    config, model = GRPOConfig(**{**PLAIN, **GATES[gate][0]}), TinyAdapter(3)
    batch, logps = gated(kind, gate, model, config)
    out = forward(model, batch, config)
    top, bottom = numpy_grpo(config, batch, logps)
    np.testing.assert_allclose(out.primary_loss.unreduced_sum, top, rtol=2e-5, atol=2e-5)
    assert float(out.primary_loss.denominator) == bottom > 0
    if "rejection" in gate or "tis" in gate:  # the case must reject some and keep some
        name = "tis/is_oob_ratio" if "tis" in gate else "sampler_rs/rejected_fraction"
        share = out.aux_metrics[name]
        share = float(share.compute() if isinstance(share, WeightedMetric) else share)
        assert 0 < share < 1
    if "threshold" in gate or gate == "overlong":
        assert 0 < float(out.aux_metrics["sample_mask/kept_frac"].compute()) < 1


@pytest.mark.parametrize("kind", ["padded", "packed"])
@pytest.mark.parametrize("mode", grpo_loss._CHOICES["loss_agg_mode"])
def test_every_aggregation_equals_plain_loops(kind, mode):
    config = GRPOConfig(**{**PLAIN, "loss_agg_mode": mode, "use_rollout_logps": False})
    model = TinyAdapter(4)
    batch = padded(4) if kind == "padded" else packed(4)
    logps, _ = policy_logps(model, batch, config)
    batch = dataclasses.replace(batch, old_per_token_logps=near(logps, 7))
    if kind == "packed" and mode == "sequence-mean-token-scale":
        with pytest.raises(BenchError, match="no length to scale by"):
            forward(model, batch, config)
        return
    out = forward(model, batch, config)
    top, bottom = numpy_grpo(config, batch, logps)
    np.testing.assert_allclose(out.primary_loss.unreduced_sum, top, rtol=2e-5, atol=2e-5)
    assert float(out.primary_loss.denominator) == bottom


def test_a_row_without_scored_tokens_counts_nowhere():
    batch = padded(5)
    mask = batch.completion_mask.copy()
    mask[3] = 0
    config = GRPOConfig(**{**PLAIN, "loss_agg_mode": "sequence-mean-token-mean"})
    out, _ = run_loss(TinyAdapter(5), dataclasses.replace(batch, completion_mask=mask), config)
    assert float(out.primary_loss.denominator) == 3
    nothing, gradient = run_loss(TinyAdapter(5), dataclasses.replace(batch, completion_mask=mask * 0), config)
    assert float(nothing.primary_loss.compute()) == 0
    assert all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves((nothing, gradient)))


def test_importance_weights_carry_no_gradient():
    config, model = GRPOConfig(**{**PLAIN, **TIS}), TinyAdapter(3)
    batch, logps = gated("padded", "tis", model, config)
    _, gradient = run_loss(model, batch, config)
    weights = np.zeros_like(batch.completion_mask)
    for row, columns in sequences_of(batch):
        drift = logps[row] - batch.rollout_per_token_logps[row]
        scored = batch.completion_mask[row] > 0
        keep = 0.95 <= math.exp(drift[scored].mean()) <= 1.15
        weights[row, columns] = np.exp(drift) * keep
    plain = GRPOConfig(**PLAIN, use_rollout_logps=False)
    _, expected = run_loss(model, dataclasses.replace(batch, sampler_is_weights=weights), plain)
    assert_gradients_close(gradient, expected)


@pytest.mark.parametrize("where", ["old_per_token_logps", "rollout_per_token_logps", "advantages"])
def test_what_is_not_finite_is_left_out(where):
    config = GRPOConfig(**{**PLAIN, "seq_logprob_error_threshold": 3.0, "use_rollout_logps": False})
    model = TinyAdapter(6)
    batch = padded(6)
    logps, _ = policy_logps(model, batch, config)
    fields = {"old_per_token_logps": near(logps, 1, 0.1), "rollout_per_token_logps": near(logps, 2, 0.1)}
    batch = dataclasses.replace(batch, **fields)
    spoiled = getattr(batch, where).copy()
    spoiled[0, 3], spoiled[2, 1], spoiled[3, 4] = np.nan, np.inf, -np.inf  # all scored
    spoiled[1, 9] = np.inf  # padding
    batch = dataclasses.replace(batch, **{where: spoiled})
    out, gradient = run_loss(model, batch, config)
    top, bottom = numpy_grpo(config, batch, logps)
    np.testing.assert_allclose(out.primary_loss.unreduced_sum, top, rtol=2e-5, atol=2e-5)
    assert float(out.primary_loss.denominator) == bottom < batch.completion_mask.sum()
    assert all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(gradient))


# Chunks, packing, experts ----------------------------------------------------------------------------------

MODELS = {"head replaced": TinyAdapter, "hidden states sown": lambda seed: TinyAdapter(seed, 2), "newer": NewAdapter}


@pytest.mark.parametrize(
    ("name", "kind", "chunk"),
    [
        *(("head replaced", "padded", chunk) for chunk in (1, 4, 11, 64)),  # non-divisor, the whole row, more
        ("head replaced", "packed", 5),
        ("hidden states sown", "padded", 4),
        ("newer", "packed", 5),
    ],
)
def test_chunked_equals_unchunked(name, kind, chunk):
    batch = padded(7) if kind == "padded" else packed(7)
    config = GRPOConfig(**{**PLAIN, "temperature": 0.8})
    model = MODELS[name](7)
    out, gradient = run_loss(model, batch, config, chunk)
    expected, expected_gradient = run_loss(TinyAdapter(7), batch, config)
    np.testing.assert_allclose(out.primary_loss.unreduced_sum, expected.primary_loss.unreduced_sum, rtol=1e-6)
    entropy = out.aux_metrics["entropy"].compute()
    np.testing.assert_allclose(entropy, expected.aux_metrics["entropy"].compute(), rtol=1e-6)
    assert_gradients_close(gradient, expected_gradient)


def test_chunks_leave_no_full_logits():
    def shapes(chunk):
        state_and_batch = nnx.split(TinyAdapter(0))[1], padded(0)
        loss = functools.partial(_loss_of, nnx.split(TinyAdapter(0))[0], chunk)
        return str(jax.make_jaxpr(jax.grad(loss))(*state_and_batch))

    assert f"f32[4,11,{VOCAB}]" in shapes(0)
    chunked = shapes(4)
    assert f"f32[4,4,{VOCAB}]" in chunked
    assert f"f32[4,11,{VOCAB}]" not in chunked and f"f32[4,16,{VOCAB}]" not in chunked


def _loss_of(graph, chunk, state, batch):
    model = nnx.merge(graph, state)
    return standin.grpo_loss_fn(model, batch, GRPOConfig(**PLAIN), PAD_ID, PAD_ID, chunk).primary_loss.compute()


@pytest.mark.parametrize("name", list(MODELS))
def test_the_model_is_left_as_it_was(name):
    model = MODELS[name](0)
    before = jax.tree.structure(nnx.split(model))
    standin.grpo_loss_fn(model, padded(0), GRPOConfig(**PLAIN), PAD_ID, PAD_ID, 4)
    assert jax.tree.structure(nnx.split(model)) == before
    assert not nnx.to_flat_state(nnx.state(model, nnx.Intermediate))
    assert "apply_output_head" not in vars(model.base.decoder)


def unpacked(batch):
    """Return packed rows as padded ones, in the shape `padded` has, and where each token went."""
    parts = sequences_of(batch)
    prompts, completions = np.full((len(parts), 5), PAD_ID, np.int32), np.full((len(parts), 11), PAD_ID, np.int32)
    mask, advantages = np.zeros(completions.shape, np.float32), np.zeros(completions.shape, np.float32)
    for i, (row, columns) in enumerate(parts):
        start, end = columns[0], columns[-1] + 1
        prompts[i, -2:] = batch.completion_ids[row, start : start + 2]
        completions[i, : end - start - 2] = batch.completion_ids[row, start + 2 : end]
        mask[i, : end - start - 2] = batch.completion_mask[row, start + 2 : end]
        advantages[i, : end - start - 2] = batch.advantages[row, start + 2 : end]
    return RLTrainerPayload(
        prompt_ids=prompts, prompt_mask=(prompts != PAD_ID) * np.float32(1), completion_ids=completions,
        completion_mask=mask, advantages=advantages,
    )  # fmt: skip


FOUR = ((4, 10), (9, 5))  # four sequences, the longest of 2 + 8


@pytest.mark.parametrize("chunk", [0, 4])
def test_a_packed_sequence_scores_as_on_its_own(chunk):
    """The tiny model isolates segments, so packing must not change a log-prob, nor an entropy."""
    model, batch = TinyAdapter(8), packed(8, FOUR)
    score = functools.partial(standin.compute_per_token_logps, model, pad_id=PAD_ID, return_entropy=True)
    together = score(
        batch.prompt_ids, batch.completion_ids, segment_ids=batch.segment_ids,
        segment_positions=batch.segment_positions, chunk_size=chunk,
    )  # fmt: skip
    flat = unpacked(batch)
    alone = score(flat.prompt_ids, flat.completion_ids)
    for packed_values, padded_values in zip(map(np.asarray, together), map(np.asarray, alone), strict=True):
        assert packed_values.shape == batch.completion_ids.shape and not packed_values[:, 0].any()
        for i, (row, columns) in enumerate(sequences_of(batch)):
            scored = columns[2:]
            np.testing.assert_allclose(packed_values[row, scored], padded_values[i, : len(scored)], rtol=1e-5)


@pytest.mark.parametrize("mode", ["token-mean", "sequence-mean-token-mean", "seq-mean-token-sum"])
def test_packed_and_padded_losses_agree(mode):
    """The same sequences give the same loss however they are laid out."""
    model, batch = TinyAdapter(9), packed(9, FOUR)
    config = GRPOConfig(**{**PLAIN, "loss_agg_mode": mode})
    one, one_gradient = run_loss(model, batch, config)
    other, other_gradient = run_loss(model, unpacked(batch), config)
    np.testing.assert_allclose(one.primary_loss.compute(), other.primary_loss.compute(), rtol=1e-5, atol=1e-6)
    assert_gradients_close(one_gradient, other_gradient)


def test_routed_experts_reach_the_model():
    model, batch = TinyAdapter(10), padded(10)
    shape = (4, 16, 1, TOP_K)
    experts = np.random.default_rng(0).integers(0, EXPERTS, shape).astype(np.int16)
    free, unset, forced = (
        np.asarray(
            standin.compute_per_token_logps(
                model, batch.prompt_ids, batch.completion_ids, pad_id=PAD_ID, routed_experts=routed
            )
        )
        for routed in (None, np.full(shape, -1, np.int16), experts)
    )
    np.testing.assert_array_equal(free, unset)
    assert (free != forced).all()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 2), min_size=14, max_size=14))
def test_padded_ids_equal_plain_loops(drawn):
    tokens = np.array(drawn, np.int32).reshape(2, 7)  # one shape, so that JAX compiles once
    ids, positions, mask, segments = standin.process_ids(tokens[:, :3], tokens[:, 3:], 0, None, None)
    np.testing.assert_array_equal(ids, tokens)
    np.testing.assert_array_equal(segments, tokens != 0)
    positions, mask = np.asarray(positions), np.asarray(mask)
    for row in range(2):
        for t in range(7):
            assert positions[row, t] == max(np.count_nonzero(tokens[row, : t + 1]) - 1, 0)
            for other in range(7):
                assert mask[row, t, other] == (other <= t and tokens[row, other] != 0)


# Metrics ---------------------------------------------------------------------------------------------------


def test_metrics_are_as_many_as_in_the_full_run_and_consistent():
    config = GRPOConfig(**{**PLAIN, **GATES["the published recipe"][0]})
    model = TinyAdapter(3)
    batch, logps = gated("packed", "the published recipe", model, config)
    out = forward(model, batch, config)
    values = {
        name: float(value.compute() if isinstance(value, WeightedMetric) else value)
        for name, value in out.aux_metrics.items()
    }
    assert len(values) == 90  # 18 + 3 gates + 56 + 10 + 2 + entropy; the engine adds loss, rate and gradient norm
    assert all(math.isfinite(value) for value in values.values())
    drift = (logps - batch.rollout_per_token_logps)[batch.completion_mask > 0]
    of = {name.removeprefix("sampler_is/"): value for name, value in values.items()}
    assert of["token_logdiff_mean"] == pytest.approx(drift.mean(), rel=1e-4)
    assert of["token_logdiff_absmean"] == pytest.approx(np.abs(drift).mean(), rel=1e-4)
    assert of["token_weight_max"] == pytest.approx(np.exp(drift).max(), rel=1e-4)
    assert sum(of[f"hist_signed/{i}"] for i in range(15)) == pytest.approx(of["token_logdiff_mean"], rel=1e-4)
    for group, size in (("hist", 15), ("conf", 4)):
        assert sum(of[f"{group}_frac/{i}"] for i in range(size)) == pytest.approx(1.0, rel=1e-5)
    edges = [-math.inf, *grpo_loss._DRIFT_EDGES, math.inf]
    for i in range(15):
        inside = (drift >= edges[i]) & (drift < edges[i + 1])
        assert of[f"hist_frac/{i}"] == pytest.approx(inside.mean(), abs=1e-6)
    assert values["sample_mask/kept_frac"] == pytest.approx(3 / 5)


def test_metrics_without_a_sampler_are_neutral():
    out = forward(TinyAdapter(0), padded(0), GRPOConfig(**PLAIN))
    aux = out.aux_metrics
    assert len(aux) == 87  # the three gate metrics come with their gates
    assert float(aux["sampler_is/token_logdiff_absmean"]) == 0
    assert float(aux["sampler_is/token_weight_mean"]) == pytest.approx(1)
    assert float(aux["sampler_is/weight_min"]) == 1
    assert float(aux["is_ratio/max"]) == float(aux["is_ratio/min"]) == 1


def test_weighted_metric_divides_safely():
    assert float(WeightedMetric(jnp.float32(6), jnp.float32(4)).compute()) == 1.5
    assert float(WeightedMetric(jnp.float32(6), jnp.float32(0)).compute()) == 0
    assert float(WeightedMetric(jnp.float32(6), jnp.float32(0), min_denom=2.0).compute()) == 3
    assert float(WeightedMetric(jnp.float32(6), jnp.float32(2), eps=1.0).compute()) == 2
    gradient = jax.grad(lambda x: WeightedMetric(x, x * 0).compute())(jnp.float32(3))
    assert float(gradient) == 0


# Options and batches that do not fit -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_agg_mode": "mean"}, "loss_agg_mode is 'mean'; use one of token-mean, "),
        ({"loss_algo": "ppo"}, "loss_algo"),
        ({"kl_loss_mode": "k3"}, "kl_loss_mode"),
        ({"policy_loss_fn": "ppo"}, "policy_loss_fn"),
        ({"algo_variant": "ppo"}, "algo_variant"),
        ({"advantage_estimator": "best"}, "advantage_estimator"),
        ({"sampler_is": "sequence"}, "sampler_is"),
        ({"sampler_rs": "row"}, "sampler_rs"),
        ({"truncated_importance_sampling_type": "tis"}, "truncated_importance_sampling_type"),
        ({"num_generations": 1}, "num_generations is below 2"),
        ({"epsilon": -0.1}, "negative"),
        ({"epsilon_high": -0.1}, "negative"),
        ({"temperature": -1.0}, "negative"),
        ({"seq_logprob_error_threshold": 0.5}, "seq_logprob_error_threshold is below 1"),
        ({"sampler_is_threshold": 0.0}, "sampler_is_threshold is not above 0"),
        ({**TIS, "truncated_importance_sampling_ratio": None}, "truncated_importance_sampling_ratio needs both ends"),
        ({**TIS, "truncated_importance_sampling_ratio": 0.9}, "reversed"),
        ({"truncated_importance_sampling_ratio": 0.9}, "both ends"),
        ({**TIS, "sampler_is": "token"}, "use one"),
        ({**TIS, "sampler_rs": "token", "sampler_rs_min": 0.5, "sampler_rs_max": 2.0}, "use one"),
        ({**TIS, "use_rollout_logps": True}, "set use_rollout_logps=False"),
        ({"sampler_rs": "token"}, "sampler_rs needs both ends"),
        ({"sampler_rs_min": 0.5}, "sampler_rs needs both ends"),
        ({"sampler_rs_min": -0.5, "sampler_rs_max": 1.0}, "not below 0"),
        ({"loss_agg_mode": "sequence-mean-token-sum-norm", "overlong_loss_masking": True}, "another loss_agg_mode"),
        ({"loss_agg_mode": "sequence-mean-token-sum-norm", "seq_logprob_error_threshold": 2.0}, "another loss_agg"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(BenchError) as caught:
        GRPOConfig(**options)
    text = str(caught.value)
    assert message in text and "\n" not in text and text.startswith("GRPO options: ")


def test_options_are_compared_by_value():
    assert GRPOConfig(epsilon=0.1) == GRPOConfig(epsilon=0.1) != GRPOConfig(epsilon=0.2)
    assert len({GRPOConfig(), GRPOConfig(), GRPOConfig(beta=0.0)}) == 2
    assert GRPOConfig(epsilon=0.3).epsilon_high == 0.3 and GRPOConfig(epsilon_high=0.28).epsilon_high == 0.28
    with pytest.raises(dataclasses.FrozenInstanceError):
        GRPOConfig().beta = 1.0


@pytest.mark.parametrize(
    ("options", "batch", "message"),
    [
        ({"beta": 0.1}, padded, "no ref_per_token_logps"),
        ({"overlong_loss_masking": True}, padded, "no overlong"),
        ({"seq_logprob_error_threshold": 2.0}, padded, "no rollout_per_token_logps"),
        ({"sampler_is": "token"}, padded, "no rollout_per_token_logps"),
        ({"sampler_rs": "token", "sampler_rs_min": 0.5, "sampler_rs_max": 2.0}, packed, "no rollout_per_token_logps"),
        (TIS, packed, "no rollout_per_token_logps"),
        ({}, functools.partial(packed, num_segments=None), "no num_segments"),
        ({}, functools.partial(packed, segment_positions=None), "packed rows without segment_positions"),
    ],
)
def test_batches_that_do_not_fit_are_refused(options, batch, message):
    with pytest.raises(BenchError, match=message):
        standin.grpo_loss_fn(TinyAdapter(), batch(), GRPOConfig(**{**PLAIN, **options}), PAD_ID, PAD_ID)


def test_what_was_applied_upstream_is_not_asked_for_again():
    config = GRPOConfig(**{**PLAIN, "seq_logprob_error_threshold": 2.0})
    batch = padded(0, sampler_agreement_applied=True)
    out = standin.grpo_loss_fn(TinyAdapter(), batch, config, PAD_ID, PAD_ID)
    assert float(out.primary_loss.denominator) == batch.completion_mask.sum()


@pytest.mark.parametrize(
    ("model", "chunk", "fields", "message"),
    [
        (NoHidden, 4, {}, "gives no hidden states; set the chunk size to 0"),
        (NoHidden, 0, {"routed_experts": np.zeros((4, 16, 1, 2), np.int16)}, "cannot be told its routed experts"),
        (lambda: TinyAdapter(0, 2), 0, {}, "num_vocab_tiling > 1 leaves no logits"),
    ],
)
def test_models_that_do_not_fit_are_refused(model, chunk, fields, message):
    with pytest.raises(BenchError, match=message):
        standin.grpo_loss_fn(model(), padded(0, **fields), GRPOConfig(**PLAIN), PAD_ID, PAD_ID, chunk)


def test_input_function_gives_the_loss_its_arguments():
    config = GRPOConfig(**PLAIN)
    made = standin.build_gen_model_input_fn(config, 3, 4)("payload")
    assert made == {"train_example": "payload", "algo_config": config, "pad_id": 3, "eos_id": 4}
    with pytest.raises(BenchError, match="temperature is not set"):
        standin.build_gen_model_input_fn(GRPOConfig(), 3, 4)


# install() -------------------------------------------------------------------------------------------------


@pytest.fixture
def no_tunix():
    """Take Tunix out of sys.modules for one test, and put it back."""
    saved = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "tunix"}
    for name in saved:
        del sys.modules[name]
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "tunix"]:
        del sys.modules[name]
    sys.modules.update(saved)


def check_installed():
    datatypes = importlib.import_module("tunix.experimental.common.datatypes")
    utils = importlib.import_module("tunix.sft.utils")
    assert datatypes.RLTrainerPayload is RLTrainerPayload and datatypes.TrainerPayload is standin.TrainerPayload
    assert utils.LossOutput is standin.LossOutput and utils.WeightedMetric is WeightedMetric
    return utils


def test_install_twice_is_install_once():
    standin.install()
    before = dict(sys.modules)
    standin.install()
    assert dict(sys.modules) == before
    check_installed()


def test_install_keeps_what_tunix_has_and_does_not_run_it_all(no_tunix):
    pytest.importorskip("humanize", reason="google-tunix is not installed")
    standin.install()
    utils = check_installed()
    assert utils.build_positions_from_mask  # Tunix's own
    assert "tunix.rl.rl_cluster" not in sys.modules


def test_install_works_without_tunix(no_tunix, monkeypatch):
    monkeypatch.setattr(standin.importlib.util, "find_spec", lambda name: None)
    standin.install()
    check_installed()
    standin.install()
    assert not sys.modules["tunix"].__path__


def test_install_refuses_a_real_tunix_experimental(no_tunix, tmp_path, monkeypatch):
    (tmp_path / "tunix" / "experimental").mkdir(parents=True)
    (tmp_path / "tunix" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(BenchError, match="has tunix.experimental; use Tunix's own"):
        standin.install()


def test_install_refuses_a_tunix_with_loss_classes_of_its_own(no_tunix, tmp_path, monkeypatch):
    (tmp_path / "tunix" / "sft").mkdir(parents=True)
    (tmp_path / "tunix" / "__init__.py").write_text("")
    (tmp_path / "tunix" / "sft" / "utils.py").write_text("LossOutput = object\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(BenchError, match="its own LossOutput"):
        standin.install()


def test_a_late_package_runs_when_it_is_asked(tmp_path, monkeypatch):
    (tmp_path / "late_one").mkdir()
    (tmp_path / "late_one" / "__init__.py").write_text("value = 7\n")
    (tmp_path / "late_one" / "part.py").write_text("other = 8\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        late = standin._late_package("late_one")
        assert importlib.import_module("late_one.part").other == 8
        assert "value" not in vars(late)
        with pytest.raises(AttributeError):
            _ = late.__wrapped__
        assert late.value == 7
        with pytest.raises(AttributeError):
            _ = late.nothing
    finally:
        for name in ("late_one", "late_one.part"):
            sys.modules.pop(name, None)


# The worker ------------------------------------------------------------------------------------------------


class FakeEngine:
    """Records the calls an engine gets, in which context, and fails on demand."""

    def __init__(self, context=None):
        self.calls, self.context, self.failing, self.policy_version = [], context, set(), 5

    def _note(self, name, *what):
        self.calls.append((name, *what, self.context.depth if self.context else 0))
        if name in self.failing:
            raise RuntimeError(f"{name} broke")

    def compile(self, dummy):
        self._note("compile", dummy)

    def fwd_bwd(self, payload, **kwargs):
        self._note("fwd_bwd", payload, kwargs)

    def update(self, **kwargs):
        self._note("update")
        return 3

    def with_loss_fn(self, loss, has_aux):
        self._note("with_loss_fn", loss, has_aux)

    def with_gen_model_input_fn(self, make):
        self.make = make

    def fwd_only(self, score, *args, **kwargs):
        self._note("fwd_only", len(args[0]))
        return score(TinyAdapter(11), *args, **kwargs)

    def get_metrics(self):
        return {"loss": jnp.float32(2.0)}

    def close(self):
        self._note("close")


class Counted:
    """A context that must not be entered twice at once."""

    def __init__(self):
        self.depth, self.entered = 0, 0

    def __enter__(self):
        assert self.depth == 0
        self.depth, self.entered = 1, self.entered + 1

    def __exit__(self, *error):
        self.depth = 0


def make_worker(**options):
    engine = FakeEngine(options.get("execution_context"))
    return standin.TrainerWorker(lambda: engine, **options), engine


def request(**fields):
    return standin.TrainRequest(payload="rows", **fields)


ALLOWED = {  # WorkerState of Tunix, as the facts have it
    ("PENDING", "INITIALIZING"), ("PENDING", "STOPPED"), ("PENDING", "ERROR"), ("INITIALIZING", "READY"),
    ("INITIALIZING", "STOPPED"), ("INITIALIZING", "ERROR"), ("COMPILING", "READY"), ("COMPILING", "STOPPED"),
    ("COMPILING", "ERROR"), ("READY", "COMPILING"), ("READY", "SYNCING"), ("READY", "DRAINING"), ("READY", "STOPPED"),
    ("READY", "ERROR"), ("SYNCING", "READY"), ("SYNCING", "STOPPED"), ("SYNCING", "ERROR"), ("DRAINING", "STOPPED"),
    ("DRAINING", "ERROR"), ("ERROR", "STOPPED"),
}  # fmt: skip


@pytest.mark.parametrize("old", list(standin.WorkerState))
@pytest.mark.parametrize("new", list(standin.WorkerState))
def test_states_move_as_in_tunix(old, new):
    worker, _ = make_worker()
    worker._state = old
    if old == new or (old.value, new.value) in ALLOWED:
        worker.state = new
        assert worker.state == new
    else:
        with pytest.raises(RuntimeError, match=f"Invalid transition from {old.value} to {new.value}"):
            worker.state = new


def test_the_worker_drives_a_step():
    worker, engine = make_worker(worker_id="w")
    assert worker.state == "PENDING"
    assert worker.initialize().metadata == {
        "worker_id": "w", "state": "READY", "policy_version": 5, "initialized": True
    }  # fmt: skip
    worker.compile(None)
    worker.with_loss_fn("loss", has_aux=True)
    assert worker.start().metadata["started"]
    answer = worker.fwd_bwd(request(request_id="r1", metadata={"n": 1}), skip_jit=True, other=2)
    assert (answer.request_id, answer.metadata["queued"], answer.metadata["n"]) == ("r1", True, 1)
    assert worker.update() == 3
    metrics = worker.get_metrics()
    assert isinstance(metrics["loss"], np.ndarray | np.generic)
    assert worker.info().worker_id == "w" and worker.info().resources["trainer"] == "FakeEngine"
    assert worker.heartbeat().last_error is None
    assert worker.stop().metadata["state"] == "STOPPED"
    worker.stop()
    assert [call[0] for call in engine.calls] == ["compile", "with_loss_fn", "fwd_bwd", "update", "close"]
    assert engine.calls[2][1:3] == ("rows", {"other": 2})
    with pytest.raises(RuntimeError, match="not ready: STOPPED"):
        worker.fwd_bwd(request())


@pytest.mark.parametrize("name", ["compile", "fwd_bwd", "update", "fwd_only"])
def test_an_error_is_for_good(name):
    worker, engine = make_worker()
    engine.failing.add(name)
    calls = {
        "compile": lambda: worker.compile(None), "fwd_bwd": lambda: worker.fwd_bwd(request()),
        "update": worker.update, "fwd_only": lambda: worker.per_token_logps(rows_to_score(padded())),
    }  # fmt: skip
    with pytest.raises(RuntimeError, match="broke"):
        calls[name]()
    assert worker.state == "ERROR" and worker.heartbeat().last_error == f"{name} broke"
    engine.failing.clear()
    for call in calls.values():
        with pytest.raises(RuntimeError, match="not ready: ERROR"):
            call()
    assert worker.heartbeat().last_error == f"{name} broke"
    worker.stop()
    assert worker.state == "STOPPED"


def test_a_pending_worker_initializes_itself():
    worker, _ = make_worker()
    worker.fwd_bwd(request())
    assert worker.state == "READY"


def test_methods_run_inside_the_context_entered_once():
    context = Counted()
    built = []
    worker = standin.TrainerWorker(
        lambda: built.append(context.depth) or FakeEngine(context), execution_context=context
    )
    worker.compile(None)  # initializes inside: one entry, not two
    worker.fwd_bwd(request())
    worker.stop()
    assert built == [1] and [call[-1] for call in worker._trainer.calls] == [1, 1, 1]
    assert context.entered == 4 and context.depth == 0


def test_a_context_is_left_after_an_error_and_entered_in_each_thread():
    context = Counted()
    worker, engine = make_worker(execution_context=context)
    engine.failing.add("update")
    with pytest.raises(RuntimeError):
        worker.update()
    assert context.depth == 0
    thread = threading.Thread(target=worker.stop)
    thread.start()
    thread.join()
    assert engine.calls[-1] == ("close", 1)


def test_contexts_may_be_functions_and_sequences():
    entered = []

    @contextlib.contextmanager
    def noted(name):
        entered.append(name)
        yield

    worker, _ = make_worker(execution_context=None)
    worker._execution_context = (lambda: noted("a"), None, lambda: noted("b"))
    worker.get_metrics()
    assert entered == ["a", "b"]


def test_the_chunk_size_is_a_default():
    worker, engine = make_worker(logps_chunk_size=16)
    worker.with_gen_model_input_fn(lambda payload: {"x": payload})
    assert engine.make(1) == {"x": 1, "compute_logps_chunk_size": 16}
    worker.with_gen_model_input_fn(lambda payload: {"compute_logps_chunk_size": 4})
    assert engine.make(1) == {"compute_logps_chunk_size": 4}
    worker, engine = make_worker()
    worker.with_gen_model_input_fn(lambda payload: {"x": payload})
    assert engine.make(1) == {"x": 1}


def rows_to_score(batch, **fields):
    values = {
        "prompt_tokens": batch.prompt_ids, "completion_tokens": batch.completion_ids, "temperature": 1.0, "pad_id": 0,
        "eos_id": 0, "segment_ids": batch.segment_ids, "segment_positions": batch.segment_positions,
    }  # fmt: skip
    return standin.LogprobsRequest(**{**values, **fields})


@pytest.mark.parametrize("chunk", [0, 4])
@pytest.mark.parametrize("kind", [padded, packed])
def test_scoring_in_row_slices(kind, chunk):
    batch = kind(11)
    worker, engine = make_worker(logps_chunk_size=chunk, logps_micro_batch_size=1)
    answer = worker.per_token_logps(rows_to_score(batch, request_id="q"))
    expected, _ = policy_logps(TinyAdapter(11), batch, GRPOConfig(**PLAIN))
    expected[:, 0] = 0 if batch.segment_ids is not None else expected[:, 0]
    assert answer.request_id == "q" and answer.per_token_logps.dtype == np.float32 and answer.model_version == 5
    np.testing.assert_allclose(answer.per_token_logps, expected, rtol=1e-5, atol=1e-5)
    assert [call[1] for call in engine.calls] == [1] * len(batch.prompt_ids)


@pytest.mark.parametrize("fields", [{"pad_id": None}, {"eos_id": None}, {"prompt_tokens": np.zeros((0, 2))}])
def test_scoring_refuses_half_a_request(fields):
    worker, _ = make_worker()
    with pytest.raises(ValueError, match="requires rows, pad_id and eos_id"):
        worker.per_token_logps(rows_to_score(padded(), **fields))


# The real engine -------------------------------------------------------------------------------------------


# MaxText 0.2.5 and the mesh context it wants use what newer JAX and Flax deprecate.
quiet = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def engine_batch(seed):
    """Return 4 rows of 16 + 48 tokens, one cut at 30, with forced experts: the batch of the facts."""
    rng = np.random.default_rng(seed)
    batch = padded(seed, rows=4, prompt=16, width=48, cut=False)
    mask = np.ones((4, 48), np.float32)
    ids = rng.integers(1, 512, (4, 48)).astype(np.int32)
    ids[1, 30:], mask[1, 30:] = PAD_ID, 0
    experts = np.argsort(rng.random((4, 64, 1, EXPERTS)), axis=-1)[..., :TOP_K].astype(np.int16)
    return dataclasses.replace(batch, completion_ids=ids, completion_mask=mask, routed_experts=experts)


@pytest.fixture(scope="module")
def worker(engine_kit):  # noqa: F811
    """A worker around the real engine, chunked, with the loss set; num_vocab_tiling is 1."""
    made = standin.TrainerWorker(engine_kit.build, logps_chunk_size=16, execution_context=engine_kit.mesh)
    made.initialize()
    made.compile(None)
    made.with_loss_fn(standin.grpo_loss_fn, has_aux=True)
    made.with_gen_model_input_fn(standin.build_gen_model_input_fn(GRPOConfig(**PLAIN, epsilon_high=0.28), 0, 0))
    made.start()
    yield made
    made.stop()


def on_engine(engine, function, *arrays):
    """Return jit(function)(model, *arrays) of the engine's live model, placed and traced as its own kernels are."""

    def run(model, *arrays):
        graph, state = nnx.split(model)
        return jax.jit(lambda state, *arrays: function(nnx.merge(graph, state), *arrays))(state, *arrays)

    return engine.fwd_only(run, *arrays)


def with_gradient(loss):
    """Return model, batch -> the reduced loss and its gradients by the parameters."""

    def both(model, batch):
        graph, params, rest = nnx.split(model, nnx.Param, ...)
        return jax.value_and_grad(lambda params: loss(nnx.merge(graph, params, rest), batch))(params)

    return both


class Tiled:
    """A MaxText config with num_vocab_tiling=2: the decoder sows its hidden states (a second engine costs 20 s)."""

    def __init__(self, config):
        self._config, self.num_vocab_tiling = config, 2

    def __getattr__(self, name):
        return getattr(self._config, name)


@quiet
def test_real_engine_losses_agree_with_tunix(worker, engine_kit, tunix_core):  # noqa: F811
    """Chunked by the replaced head, chunked by sown hidden states, and Tunix's own, which is not chunked: one loss.

    bench_driver's tests train with it, on the same engine; each kernel more costs ten seconds.
    """
    config, batch = GRPOConfig(**PLAIN, epsilon_high=0.28), dataclasses.replace(engine_batch(0), routed_experts=None)

    def ours(chunk, model, batch):
        return standin.grpo_loss_fn(model, batch, config, 0, 0, chunk).primary_loss.compute()

    def theirs(model, batch):
        return tunix_core.grpo_loss_fn(model, batch, config, 0, 0)[0]

    def sown(model, batch):
        model.base.decoder.config = Tiled(model.base.decoder.config)
        return ours(16, model, batch)

    with engine_kit.mesh:
        engine = worker._trainer
        expected, expected_gradient = on_engine(engine, with_gradient(theirs), batch)
        loss, gradient = on_engine(engine, with_gradient(functools.partial(ours, 16)), batch)
        tiled = on_engine(engine, sown, batch)
    assert abs(float(expected)) > 0.01
    for mine in (loss, tiled):
        assert float(mine) == pytest.approx(float(expected), abs=CLOSE)
    assert_gradients_close(gradient, expected_gradient, 1e-5)


@quiet
def test_real_engine_scores_as_it_trains(worker, engine_kit):  # noqa: F811
    """The separate pass, chunked and in slices of two rows, gives the log-probs of one plain forward."""
    batch = engine_batch(3)
    worker._logps_micro_batch_size = 2
    logps = worker.per_token_logps(rows_to_score(batch, routed_experts=batch.routed_experts)).per_token_logps

    def plain(model, prompts, completions, experts):
        return standin.compute_per_token_logps(model, prompts, completions, pad_id=0, routed_experts=experts)

    with engine_kit.mesh:
        arrays = batch.prompt_ids, batch.completion_ids, batch.routed_experts
        expected = on_engine(worker._trainer, plain, *arrays)
    assert logps.shape == (4, 48) and (logps < 0).all()
    np.testing.assert_allclose(logps, expected, rtol=1e-5, atol=1e-5)
