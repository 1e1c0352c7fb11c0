"""The GRPO loss of the stand-in, with Tunix's options, per-token log-probs and metrics.

Written from the semantics of both lines of Tunix development, held against google-tunix 0.1.7's own loss in
tests/test_tunix_standin.py. Rows are padded (prompt left, completion right) or packed (segments in a row);
log-probs come in chunks of the sequence where the vocabulary is too wide for whole rows; experts are forced
where the payload says which. Used through `tunix_standin`, and deleted with it. A library: no main, no output.

Errors: BenchError for options, batches and models that do not fit together.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx, struct

from bench_common import BenchError

Array = Any  # a numpy or JAX array
_fixed = jax.lax.stop_gradient


# ---- What a loss is made of


@struct.dataclass
class WeightedMetric:
    """A sum and the weight to divide it by (float32 scalars), kept apart so that micro-batches pool exactly.

    `eps` is added to the denominator, `min_denom` bounds it from below; both are static.
    """

    unreduced_sum: Array
    denominator: Array
    eps: float | None = struct.field(default=None, pytree_node=False)
    min_denom: float | None = struct.field(default=None, pytree_node=False)

    def compute_scale(self) -> Array:
        """Return 1 / denominator after `eps` and `min_denom`, and 0 where that is 0."""
        weight = self.denominator if self.eps is None else self.denominator + self.eps
        weight = weight if self.min_denom is None else jnp.maximum(weight, self.min_denom)
        return jnp.where(weight == 0, 0.0, 1.0 / jnp.where(weight == 0, 1.0, weight))

    def compute(self) -> Array:
        """Return the reduced value; 0 where there is no weight."""
        return self.unreduced_sum * self.compute_scale()


@struct.dataclass
class LossOutput:
    """What a loss returns to the engine: the loss to differentiate, and metrics by name."""

    primary_loss: WeightedMetric
    aux_metrics: Mapping[str, Any]


# ---- Options

_CHOICES = {
    "algo_variant": ("grpo", "drgrpo", "gspo-token", "dapo"),
    "advantage_estimator": ("grpo", "gae", "drgrpo", "rloo", "grpo-loo"),
    "policy_loss_fn": ("grpo",),
    "loss_agg_mode": ("token-mean", "sequence-mean-token-mean", "sequence-mean-token-scale", "seq-mean-token-sum",
                      "sequence-mean-token-sum-norm"),
    "loss_algo": ("grpo", "gspo-token"),
    "kl_loss_mode": ("kl", "mse_kl", "low_var_kl"),
    "sampler_is": (None, "token"),
    "sampler_rs": (None, "geometric", "token"),
    "truncated_importance_sampling_type": (None, "seq-mask-tis"),
}  # fmt: skip


def wrong(what: str, todo: str = "", where: str = "GRPO options") -> BenchError:
    return BenchError(what, where=where, todo=todo)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GRPOConfig:
    """The GRPO options that change the program, of both lines of Tunix development, with Tunix's defaults.

    Frozen and compared by value: the engine closes over it, and a new value compiles again. One line has
    `truncated_importance_sampling_*` and `overlong_loss_masking`, the other `sampler_rs*` and
    `force_on_policy_ratio`. epsilon_high None means epsilon; temperature None is refused by the input function.
    """

    algo_variant: str = "grpo"
    advantage_estimator: str = "grpo"
    policy_loss_fn: str = "grpo"
    loss_agg_mode: str = "sequence-mean-token-mean"
    loss_algo: str = "grpo"
    num_generations: int = 2
    num_iterations: int = 1
    beta: float | None = 0.04
    force_compute_kl: bool = False
    kl_loss_mode: str = "kl"
    kl_clamp_value: float | None = None
    epsilon: float = 0.2
    epsilon_high: float | None = None
    epsilon_c: float | None = None
    temperature: float | None = None
    use_rollout_logps: bool = True
    force_on_policy_ratio: bool = False
    log_sampler_trainer_agreement: bool = False
    sampler_is: str | None = None
    sampler_is_threshold: float | None = 2.0
    sampler_rs: str | None = None
    sampler_rs_min: float | None = None
    sampler_rs_max: float | None = None
    seq_logprob_error_threshold: float | None = None
    overlong_loss_masking: bool = False
    truncated_importance_sampling_type: str | None = None
    truncated_importance_sampling_ratio_min: float | None = None
    truncated_importance_sampling_ratio: float | None = None

    def __post_init__(self) -> None:
        if self.epsilon_high is None:
            object.__setattr__(self, "epsilon_high", self.epsilon)
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise wrong(f"{name} is {getattr(self, name)!r}", f"use one of {', '.join(map(str, allowed))}")
        for what, fails in self._conflicts().items():
            if fails:
                raise wrong(what)

    def _conflicts(self) -> dict[str, Any]:
        tis, threshold = self.truncated_importance_sampling_type, self.seq_logprob_error_threshold
        drops = self.overlong_loss_masking or threshold is not None
        lowest = min(self.epsilon, self.epsilon_high, self.temperature or 0)
        bands = {
            "truncated_importance_sampling_ratio": (
                tis, self.truncated_importance_sampling_ratio_min, self.truncated_importance_sampling_ratio),
            "sampler_rs": (self.sampler_rs, self.sampler_rs_min, self.sampler_rs_max),
        }  # fmt: skip
        return {
            "num_generations is below 2": self.num_generations < 2,
            "epsilon, epsilon_high or temperature is negative": lowest < 0,
            "seq_logprob_error_threshold is below 1, which exp|x| never is": threshold is not None and threshold < 1,
            "sampler_is_threshold is not above 0; None means no cap": self.sampler_is_threshold is not None
            and self.sampler_is_threshold <= 0,
            "truncated_importance_sampling_type, sampler_is and sampler_rs set the same weights; use one": tis
            and (self.sampler_is or self.sampler_rs),
            "seq-mask-tis with use_rollout_logps counts the sampler's ratio twice; set use_rollout_logps=False": tis
            and self.use_rollout_logps,
            "sequence-mean-token-sum-norm divides by a constant, which a dropped sequence cannot leave; use another "
            "loss_agg_mode, or no gate": self.loss_agg_mode == "sequence-mean-token-sum-norm" and drops,
            **{
                f"the band of {name} needs both ends, not below 0 and not reversed": (used or low is not high)
                if low is None or high is None
                else not 0 <= low <= high
                for name, (used, low, high) in bands.items()
            },
        }


def build_gen_model_input_fn(algo_config: GRPOConfig, pad_id: int, eos_id: int) -> Callable[[Any], dict[str, Any]]:
    """Return the function that maps a payload to the keyword arguments of `grpo_loss_fn`.

    Raises:
      BenchError: the temperature is not set; the loss must score at the temperature that sampled.
    """
    if algo_config.temperature is None:
        raise wrong("temperature is not set", "set it to the sampling temperature")
    constant = {"algo_config": algo_config, "pad_id": pad_id, "eos_id": eos_id}
    return lambda payload: {"train_example": payload, **constant}


# ---- Per-token log-probabilities


def process_ids(
    prompt_ids: Array, completion_ids: Array, pad_id: int, segment_ids: Array, segment_positions: Array
) -> tuple[Array, Array, Array, Array]:
    """Return tokens, positions, attention mask and segment ids [B, T] as the model is to see them.

    Packed rows bring segments and positions and need no mask (None). Padded rows get segment 1 on every token
    that is not `pad_id`, positions that count those, and a causal [B, T, T] mask over them.
    """
    tokens = jnp.concatenate([prompt_ids, completion_ids], axis=1)
    if segment_ids is not None:
        if segment_positions is None:
            raise wrong("packed rows without segment_positions", "give both or neither", where="payload")
        return tokens, segment_positions, None, segment_ids
    real = tokens != pad_id
    counted = jnp.cumsum(real, axis=-1)
    causal = real[:, None, :] & jnp.tri(tokens.shape[1], dtype=bool)
    return tokens, counted - (counted >= 1), causal, real.astype(jnp.int32)


def compute_per_token_logps(
    model: nnx.Module, prompt_ids: Array, completion_ids: Array, *, pad_id: int, segment_ids: Array = None,
    segment_positions: Array = None, routed_experts: Array = None, temperature: float = 1.0, chunk_size: int = 0,
    return_entropy: bool = False,
) -> Any:  # fmt: skip
    """Return each completion token's log-probability, float32 [B, C] (packed: [B, T], the first token's is 0).

    With `chunk_size` > 0 the vocabulary head runs on [B, chunk_size, D] slices of the hidden states inside a
    rematerialised scan, so that [B, chunk_size, V] is the most there is of logits. The model runs once, on a
    copy: what it sows stays there. With `return_entropy`, also the entropy at each position, same shape.

    Raises:
      BenchError: the model returns no logits, gives no hidden states, or takes no routed experts.
    """
    model = nnx.merge(*nnx.split(model))
    tokens, positions, mask, segments = process_ids(prompt_ids, completion_ids, pad_id, segment_ids, segment_positions)
    options = {"positions": positions, "cache": None, "attention_mask": mask}
    if _accepts(model, "segment_ids"):
        options["segment_ids"] = segments
    if routed_experts is not None:
        if not _accepts(model, "forced_routed_experts"):
            raise wrong("this model cannot be told its routed experts", "leave them out", where="payload")
        options["forced_routed_experts"] = jnp.asarray(routed_experts, jnp.int32)
    keep = completion_ids.shape[1] - (segment_ids is not None)
    before, targets = slice(-keep - 1, -1), tokens[:, -keep:]  # the position before a token predicts it
    score = functools.partial(_score, temperature=temperature, return_entropy=return_entropy)
    if chunk_size > 0:
        hidden, head = run_without_head(model, tokens, options)
        out = _score_in_chunks(head, hidden[:, before], targets, chunk_size, score)
    else:
        logits, _ = model(tokens, **options)
        if logits is None:
            raise wrong("num_vocab_tiling > 1 leaves no logits", "set a chunk size, or 1", where="log-probs")
        out = score(logits[:, before], targets)
    return out if segment_ids is None else jax.tree.map(lambda values: jnp.pad(values, ((0, 0), (1, 0))), out)


def _accepts(model: nnx.Module, argument: str) -> bool:
    parameters = inspect.signature(type(model).__call__).parameters
    return argument in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _score(logits: Array, targets: Array, *, temperature: float, return_entropy: bool) -> Any:
    logits = logits if temperature in (0.0, 1.0) else logits / temperature
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0].astype(jnp.float32)
    logps = picked - jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1)
    if not return_entropy:
        return logps
    all_logps = jax.nn.log_softmax(logits, axis=-1)
    return logps, -jnp.sum(jnp.exp(all_logps) * all_logps, axis=-1)


def run_without_head(model: nnx.Module, tokens: Array, options: dict[str, Any]) -> tuple[Array, Callable]:
    """Return the hidden states [B, T, D] in front of the vocabulary head, and the head.

    Newer adapters skip the head when asked. The decoder of 0.2.5 sows its hidden states where
    num_vocab_tiling > 1; elsewhere the head of this one instance is replaced for its first call.
    """
    if _accepts(model, "skip_lm_head") and hasattr(model, "compute_final_logits"):
        return model(tokens, skip_lm_head=True, **options)[0], model.compute_final_logits
    base = getattr(model, "base", None)
    head = getattr(base, "logits_from_hidden_states_for_vocab_tiling", None)
    if head is None:
        raise wrong("this model gives no hidden states", "set the chunk size to 0", where="log-probs")
    found: list[Array] = []

    def keep_hidden(shared_embedding: Any, y: Array, *rest: Any, **named: Any) -> None:
        del base.decoder.apply_output_head  # from here on the class's own again
        found.append(y)

    base.decoder.apply_output_head = keep_hidden
    model(tokens, **options)
    vars(base.decoder).pop("apply_output_head", None)
    sown = nnx.to_flat_state(nnx.pop(model, nnx.Intermediate))
    found += [value.get_value()[-1] for path, value in sown if path[-1] == "hidden_states"]
    return found[0], lambda hidden: head(hidden, True, "train")


def _score_in_chunks(head: Callable, hidden: Array, targets: Array, chunk_size: int, score: Callable) -> Any:
    (rows, width, size), chunks = hidden.shape, -(-targets.shape[1] // chunk_size)
    fill = (0, chunks * chunk_size - width)
    hidden = jnp.pad(hidden, ((0, 0), fill, (0, 0))).reshape(rows, chunks, chunk_size, size)
    targets = jnp.pad(targets, ((0, 0), fill)).reshape(rows, chunks, chunk_size)

    @jax.checkpoint
    def one_chunk(carry: None, part: tuple[Array, Array]) -> tuple[None, Any]:
        return carry, score(head(part[0]).astype(jnp.float32), part[1])

    _, out = jax.lax.scan(one_chunk, None, (hidden.swapaxes(0, 1), targets.swapaxes(0, 1)))
    return jax.tree.map(lambda values: values.swapaxes(0, 1).reshape(rows, -1)[:, :width], out)


# ---- The GRPO loss


@dataclasses.dataclass(frozen=True)
class Sequences:
    """The sequences of a batch: its rows, or the segments of packed rows (of which number 0 is padding)."""

    ids: Array = None  # int32 [B, T], packed rows only
    count: int | None = None

    def total(self, values: Array) -> Array:
        """[B, T] -> [B, S]: the sum over each sequence; S is 1 unless packed."""
        if self.ids is None:
            return values.sum(axis=-1, keepdims=True)
        return jax.vmap(functools.partial(jax.ops.segment_sum, num_segments=self.count))(values, self.ids)

    def spread(self, values: Array) -> Array:
        """[B, S] -> [B, T], or [B, 1], which broadcasts: each token gets its sequence's value."""
        return values if self.ids is None else jnp.take_along_axis(values, self.ids, axis=1)

    def mean(self, values: Array, mask: Array) -> Array:
        """[B, T] -> [B, S]: the mean over each sequence's masked tokens, 0 where there are none."""
        return self.total(values * mask) / jnp.maximum(self.total(mask), 1.0)

    def active(self, mask: Array) -> Array:
        """[B, T] -> [B, S]: 1.0 for each sequence with a masked token, 0.0 for padding."""
        some = (self.total(mask) > 0).astype(jnp.float32)
        return some if self.ids is None else some.at[:, 0].set(0.0)


def aggregate_loss(values: Array, mask: Array, mode: str, sequences: Sequences) -> WeightedMetric:
    """Return per-token values [B, T] pooled as `loss_agg_mode` says, numerator and denominator apart.

    Raises:
      BenchError: sequence-mean-token-scale on packed rows, whose width is nobody's response length.
    """
    values = values.astype(jnp.float32) * mask
    active = sequences.active(mask)
    if mode == "token-mean":
        return WeightedMetric(values.sum(), mask.sum(), min_denom=1.0)
    if mode == "sequence-mean-token-sum-norm":
        weight = jnp.float32(mask.shape[0]) if sequences.ids is None else active.sum()
        return WeightedMetric(values.sum(), weight, min_denom=1e-6)
    if mode == "sequence-mean-token-scale" and sequences.ids is not None:
        raise wrong(f"{mode} has no length to scale by in packed rows", "use another loss_agg_mode")
    sums = sequences.mean(values, mask) if mode == "sequence-mean-token-mean" else sequences.total(values)
    sums = sums / mask.shape[1] if mode == "sequence-mean-token-scale" else sums
    return WeightedMetric((sums * active).sum(), active.sum(), min_denom=1e-6 if mode == "seq-mean-token-sum" else 1.0)


def grpo_loss_fn(
    model: nnx.Module, train_example: Any, algo_config: GRPOConfig, pad_id: int, eos_id: int,
    compute_logps_chunk_size: int = 0,
) -> LossOutput:  # fmt: skip
    """Return the GRPO loss of one micro-batch and about 90 metrics, in the order of Tunix's distributed run.

    One forward gives the log-probs; sequences are gated by how far the sampler's own are from them; the ratio
    to the old log-probs (without them: to itself) is clipped; importance weights, aggregation and beta * KL
    follow. `eos_id` is unused, as in Tunix.

    Raises:
      BenchError: an option needs a field that the batch does not carry.
    """
    ex, cfg = train_example, algo_config
    sampler, fused = _sampler_logps(ex, cfg)
    sequences = Sequences(ex.segment_ids, ex.num_segments)
    logps, entropy = compute_per_token_logps(
        model, ex.prompt_ids, ex.completion_ids, pad_id=pad_id, segment_ids=ex.segment_ids,
        segment_positions=ex.segment_positions, routed_experts=ex.routed_experts, temperature=cfg.temperature,
        chunk_size=compute_logps_chunk_size, return_entropy=True,
    )  # fmt: skip
    scored = jnp.asarray(ex.completion_mask, jnp.float32)
    drift = None if sampler is None else _fixed(logps) - jnp.asarray(sampler, jnp.float32)
    kept, error = _keep_sequences(ex, cfg, sequences, scored, drift)
    corrects = cfg.sampler_is or cfg.sampler_rs or cfg.seq_logprob_error_threshold
    on_policy = ex.old_per_token_logps is None or cfg.force_on_policy_ratio or (fused and corrects)
    old = _fixed(logps) if on_policy else jnp.asarray(ex.old_per_token_logps, jnp.float32)
    advantages = jnp.asarray(ex.advantages, jnp.float32)
    advantages = advantages if advantages.ndim == 2 else advantages[:, None]
    mask = scored * sequences.spread(kept)
    mask = jnp.where(jnp.isfinite(logps) & jnp.isfinite(old) & jnp.isfinite(advantages), mask, 0.0)

    def inside(values: Array) -> Array:  # a select, so that 0 * inf never meets a gradient
        return jnp.where(mask > 0, values, 0.0)

    policy = _policy_loss(cfg, sequences, inside(logps), inside(old), inside(advantages), mask)
    weights, rejected = _importance_weights(ex, cfg, sequences, scored, drift, kept)
    loss = policy["loss"] if weights is None else policy["loss"] * weights
    pool = functools.partial(aggregate_loss, mask=mask, mode=cfg.loss_agg_mode, sequences=sequences)
    primary = total = pool(inside(loss))
    aux = _loss_metrics(policy, total, pool, mask, scored)
    aux |= _gate_metrics(cfg, sequences.active(scored), kept, error, rejected, weights, scored)
    aux |= _drift_metrics(sequences, scored, drift, sampler)
    aux["entropy"] = pool(jnp.where((mask > 0) & jnp.isfinite(entropy), _fixed(entropy), 0.0))
    if ex.ref_per_token_logps is not None:
        kl = inside(compute_kl(logps, ex.ref_per_token_logps, cfg.kl_loss_mode, cfg.kl_clamp_value))
        aux |= {"kl": WeightedMetric(kl.sum(), mask.sum(), min_denom=1.0), "kl_loss": pool(kl)}
        if cfg.beta:
            primary = total.replace(unreduced_sum=total.unreduced_sum + cfg.beta * aux["kl_loss"].unreduced_sum)
    return LossOutput(primary_loss=primary, aux_metrics=aux)


def _sampler_logps(ex: Any, cfg: GRPOConfig) -> tuple[Array, bool]:
    """Return the sampler's log-probs or None, and whether they came as the old log-probs (one line's way)."""
    applied = ex.sampler_is_weights is not None or ex.sampler_agreement_applied
    fused = ex.rollout_per_token_logps is None and cfg.use_rollout_logps and not applied
    sampler = ex.old_per_token_logps if fused else ex.rollout_per_token_logps
    gates = cfg.seq_logprob_error_threshold is not None or cfg.sampler_is or cfg.sampler_rs
    needs_sampler = cfg.truncated_importance_sampling_type or (gates and not applied)
    missing = {
        "rollout_per_token_logps": needs_sampler and sampler is None,
        "overlong": cfg.overlong_loss_masking and ex.overlong is None,
        "ref_per_token_logps": cfg.beta and ex.ref_per_token_logps is None,
        "num_segments": ex.segment_ids is not None and ex.num_segments is None,
    }
    for name, is_missing in missing.items():
        if is_missing:
            raise wrong(f"no {name}, which the options or packed rows need", "fill it", where="payload")
    return sampler, fused and sampler is not None


def _keep_sequences(ex: Any, cfg: GRPOConfig, sequences: Sequences, scored: Array, drift: Array) -> tuple[Array, Array]:
    """Return [B, S] 1.0 where a sequence stays in numerator and denominator, and, if gated, mean exp|drift|."""
    kept, error = jnp.ones_like(sequences.total(scored)), None
    if cfg.overlong_loss_masking:
        overlong = jnp.asarray(ex.overlong, jnp.float32)
        if overlong.ndim == 2 and sequences.ids is not None:
            overlong = sequences.active(overlong)
        kept = kept * (1.0 - overlong.reshape(scored.shape[0], -1))
    if cfg.seq_logprob_error_threshold is not None and drift is not None:
        left = scored * sequences.spread(kept)
        apart = jnp.exp(jnp.where(left > 0, jnp.abs(drift), 0.0))  # an infinity stays one and is dropped
        error = sequences.mean(apart, left)
        kept = kept * (error <= cfg.seq_logprob_error_threshold)
    return kept, error


def _policy_loss(
    cfg: GRPOConfig, sequences: Sequences, logps: Array, old: Array, advantages: Array, mask: Array
) -> dict[str, Array]:
    """Return the clipped loss per token, and what its metrics need; all [B, T] and finite."""
    log_ratio = jnp.clip(logps - old, -20.0, 20.0)
    if cfg.loss_algo == "gspo-token":  # a sequence's mean as the value, each token's own gradient
        log_ratio = logps - _fixed(logps) + _fixed(sequences.spread(sequences.mean(log_ratio, mask)))
        log_ratio = jnp.where(mask > 0, jnp.clip(log_ratio, -20.0, 10.0), 0.0)
    ratio = jnp.exp(log_ratio)
    plain, clipped = -advantages * ratio, -advantages * jnp.clip(ratio, 1 - cfg.epsilon, 1 + cfg.epsilon_high)
    loss = jnp.maximum(plain, clipped)
    ceiling = loss if cfg.epsilon_c is None else -cfg.epsilon_c * advantages
    return {
        "loss": jnp.where(advantages < 0, jnp.minimum(ceiling, loss), loss), "ratio": ratio, "log_ratio": log_ratio,
        "plain": plain, "clipped": clipped, "lower": (loss > ceiling) & (advantages < 0), "kl": old - logps,
        "advantages": advantages,
    }  # fmt: skip


def _importance_weights(
    ex: Any, cfg: GRPOConfig, sequences: Sequences, scored: Array, drift: Array, kept: Array
) -> tuple[Array, WeightedMetric | None]:
    """Return detached weights [B, T] against the sampler's drift, and the share that the keep-band rejected."""
    tis, given = cfg.truncated_importance_sampling_type, ex.sampler_is_weights
    if drift is None or not (tis or (given is None and (cfg.sampler_is or cfg.sampler_rs))):
        return (None if given is None else jnp.asarray(given, jnp.float32)), None
    valid = (scored > 0) & jnp.isfinite(drift)
    drift = jnp.where(valid, drift, 0.0)
    ratio = jnp.where(valid, jnp.exp(jnp.clip(drift, -20.0, 20.0)), 0.0)
    cap = None if tis else cfg.sampler_is_threshold
    weights = ratio if cap is None else jnp.minimum(ratio, cap)
    weights = weights if tis or cfg.sampler_is else valid.astype(jnp.float32)
    low, high, counted, rejected = cfg.sampler_rs_min, cfg.sampler_rs_max, scored, None
    if tis:
        low, high = cfg.truncated_importance_sampling_ratio_min, cfg.truncated_importance_sampling_ratio
    if tis or cfg.sampler_rs:  # what is rejected keeps its place in the denominator
        if cfg.sampler_rs != "token":
            ratio, counted = _geometric_mean(sequences, drift, scored), kept * sequences.active(scored)
        keep = ((ratio >= low) & (ratio <= high)).astype(jnp.float32)
        rejected = WeightedMetric((counted * (1 - keep)).sum(), counted.sum(), min_denom=1.0)
        weights = weights * (keep if cfg.sampler_rs == "token" else sequences.spread(keep))
    return _fixed(weights), rejected


def _geometric_mean(sequences: Sequences, drift: Array, scored: Array) -> Array:
    return jnp.exp(jnp.clip(sequences.mean(drift, scored), -20.0, 20.0))


def compute_kl(logps: Array, reference: Array, mode: str, clamp: float | None) -> Array:
    """Return the per-token KL estimate of the policy against a reference, clamped to +-`clamp` if set."""
    apart = logps - jnp.asarray(reference, jnp.float32)
    kl = 0.5 * jnp.square(apart) if mode == "mse_kl" else apart
    kl = jnp.exp(-apart) + apart - 1 if mode == "low_var_kl" else kl
    return kl if clamp is None else jnp.clip(kl, -clamp, clamp)


# ---- Metrics: they cost host time per micro-batch in the full run, so as many are here


def _mean(values: Array, mask: Array) -> Array:
    return (values * mask).sum() / (mask.sum() + 1e-8)


def _extremes(name: str, values: Array, mask: Array, empty: float = 0.0) -> dict[str, Array]:
    top, bottom = (jnp.where(mask > 0, values, end) for end in (-jnp.inf, jnp.inf))
    some = (mask > 0).any()
    return {f"{name}max": jnp.where(some, top.max(), empty), f"{name}min": jnp.where(some, bottom.min(), empty)}


def _loss_metrics(
    policy: dict[str, Array], total: WeightedMetric, pool: Callable, mask: Array, scored: Array
) -> dict[str, Any]:
    advantages = jnp.broadcast_to(policy["advantages"], mask.shape)
    zero = WeightedMetric(jnp.float32(0.0), jnp.float32(1.0))

    def per_token(values: Array) -> WeightedMetric:
        return WeightedMetric((values * mask).sum(), mask.sum(), min_denom=1.0)

    return {
        "kl": zero, "kl_loss": zero, "reduced_pg_loss": total.compute(), "unreduced_pg_loss": total,
        "pg_clipfrac": per_token(policy["clipped"] > policy["plain"]), "pg_clipfrac_lower": pool(policy["lower"]),
        "ppo_kl": per_token(policy["kl"]), "is_ratio/mean": _mean(policy["ratio"], scored),
        **_extremes("is_ratio/", policy["ratio"], scored),
        "log_ratio/abs_mean": _mean(jnp.abs(policy["log_ratio"]), mask),
        "pg_loss/unclipped_mean": _mean(policy["plain"], mask), "pg_loss/clipped_mean": _mean(policy["clipped"], mask),
        "advantage/abs_mean": _mean(jnp.abs(advantages), scored), **_extremes("advantage/", advantages, scored),
        "advantage/nonzero_frac": _mean(jnp.abs(advantages) > 1e-8, mask),
    }  # fmt: skip


def _gate_metrics(
    cfg: GRPOConfig, active: Array, kept: Array, error: Array, rejected: WeightedMetric | None, weights: Array,
    scored: Array,
) -> dict[str, Any]:  # fmt: skip
    aux: dict[str, Any] = {"sample_mask/kept_frac": WeightedMetric((kept * active).sum(), active.sum(), min_denom=1.0)}
    if error is not None:
        seen = ((error > 0) & jnp.isfinite(error)).astype(jnp.float32)
        finite = jnp.where(seen > 0, error, 0.0)
        aux["sample_mask/mult_prob_error_mean"] = WeightedMetric(finite.sum(), seen.sum(), min_denom=1.0)
        aux["sample_mask/mult_prob_error_max"] = finite.max()
    if rejected is not None:
        tis = cfg.truncated_importance_sampling_type
        aux["tis/is_oob_ratio" if tis else "sampler_rs/rejected_fraction"] = rejected.compute() if tis else rejected
    weights = jnp.ones_like(scored) if weights is None else weights
    return aux | {
        "sampler_is/weight_mean": _mean(weights, scored),
        "sampler_is/weight_min": _extremes("", weights, scored)["min"],
    }


_DRIFT_EDGES = (-10.0, -5.0, -2.0, -1.0, -0.5, -0.2, -0.05, 0.0, 0.05, 0.2, 0.5, 1.0, 2.0, 5.0)  # nats, as in Tunix
_SURE_EDGES = (-1.0, -0.1, -0.01)  # nats of the sampler's own log-prob, as in Tunix
_OUTLIER_NATS = 10.0  # as in Tunix
_PLACES = 8  # equal parts of a row's scored tokens, as in Tunix


def _drift_metrics(sequences: Sequences, scored: Array, drift: Array, sampler: Array) -> dict[str, Array]:
    """Return where trainer and sampler disagree: by size, place in the row, and the sampler's confidence."""
    sampler = jnp.zeros_like(scored) if sampler is None else jnp.asarray(sampler, jnp.float32)
    drift = jnp.zeros_like(scored) if drift is None else jnp.nan_to_num(drift, nan=0.0, posinf=0.0, neginf=0.0)
    tokens, active = jnp.maximum(scored.sum(), 1.0), sequences.active(scored)
    count = jnp.maximum(active.sum(), 1.0)
    place = (jnp.cumsum(scored, axis=-1) - 1) / jnp.maximum(scored.sum(axis=-1, keepdims=True), 1.0)
    groups = {
        "hist": (jnp.searchsorted(jnp.asarray(_DRIFT_EDGES), drift, side="right"), len(_DRIFT_EDGES) + 1),
        "pos": (jnp.clip((place * _PLACES).astype(jnp.int32), 0, _PLACES - 1), _PLACES),
        "conf": (jnp.searchsorted(jnp.asarray(_SURE_EDGES), sampler, side="right"), len(_SURE_EDGES) + 1),
    }
    aux = {"token_logdiff_mean": (drift * scored).sum() / tokens, "scored_tokens_per_seq": tokens / count}
    for name, (group, size) in groups.items():
        for i in range(size):
            chosen = scored * (group == i)
            own = jnp.maximum(chosen.sum(), 1.0)
            share = (jnp.abs(drift) * chosen).sum() / own if name == "pos" else chosen.sum() / tokens
            aux[f"{name}_{'absmean' if name == 'pos' else 'frac'}/{i}"] = share
            aux[f"{name}_signed/{i}"] = (drift * chosen).sum() / (tokens if name == "hist" else own)
    outliers = scored * (jnp.abs(drift) > _OUTLIER_NATS)
    ratio, mean = jnp.exp(drift), _geometric_mean(sequences, drift, scored)
    aux |= {
        "token_logdiff_absmean": _mean(jnp.abs(drift), scored), "token_weight_mean": _mean(ratio, scored),
        "token_logdiff_abs_max": jnp.max(jnp.abs(drift) * scored), "token_outlier_frac": outliers.sum() / tokens,
        "token_outliers_per_seq": outliers.sum() / count, **_extremes("token_weight_", ratio, scored, 1.0),
        "seq_geomean_mean": (mean * active).sum() / count, **_extremes("seq_geomean_", mean, active, 1.0),
    }  # fmt: skip
    return {f"sampler_is/{name}": value for name, value in aux.items()}
