"""Stand in for the Tunix modules that the Tunix release on PyPI lacks, so that MaxText's own engine can train.

MaxText 0.2.5 imports four names from Tunix which google-tunix 0.1.7 does not have. `install()` puts them in
place; the rest of this file is what an orchestrator would bring: the worker around the engine, the GRPO
options of both lines of Tunix development, and the GRPO loss with chunked log-probs, packed rows and forced
experts. Model, MoE layers and optimizer are MaxText's own. Delete this file the day the release has these
modules: `install()` refuses to run beside a real `tunix.experimental`. Deciders only: no main, no output.

How a driver wires it (each worker method enters the mesh by itself; the engine is built under it too):

    tunix_standin.install()                                  # before anything imports MaxText's engine
    from maxtext.training_engine.maxtext_engine import MaxTextTrainingEngine
    def factory():
        return MaxTextTrainingEngine(cfg, mesh=mesh, wrap_with_tunix_adapter=True, tokenizer_pad_id=pad_id)
    worker = TrainerWorker(factory, logps_chunk_size=512, execution_context=mesh)
    worker.initialize()
    worker.compile(None)                                     # builds nothing yet: the first fwd_bwd does
    worker.with_loss_fn(grpo_loss_fn, has_aux=True)
    worker.with_gen_model_input_fn(build_gen_model_input_fn(GRPOConfig(temperature=1.0), pad_id, eos_id))
    worker.start()
    for payload in micro_batches:                            # RLTrainerPayload of numpy arrays
        worker.fwd_bwd(TrainRequest(payload=payload))
    worker.update()
    metrics = worker.get_metrics()                           # blocks; .weighted_metrics, .scalar_metrics
    worker.stop()

Errors: BenchError for options, batches and models that do not fit together; RuntimeError for a worker in
the wrong state, as in Tunix. Any exception in fwd_bwd, update or per_token_logps leaves the worker in ERROR.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import importlib
import importlib.machinery
import importlib.util
import inspect
import sys
import threading
import time
import types
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, struct

from bench_common import BenchError

Array = Any  # a numpy or JAX array


# The four names MaxText imports ----------------------------------------------------------------------------


@struct.dataclass
class WeightedMetric:
    """A sum and the weight to divide it by, kept apart so that micro-batches can be pooled exactly.

    `unreduced_sum` and `denominator` are float32 scalars. `eps` is added to the denominator, `min_denom`
    bounds it from below; both are static.
    """

    unreduced_sum: Array
    denominator: Array
    eps: float | None = struct.field(default=None, pytree_node=False)
    min_denom: float | None = struct.field(default=None, pytree_node=False)

    def compute_scale(self) -> Array:
        """Return 1 / denominator after `eps` and `min_denom`, and 0 where that is 0."""
        weight = self.denominator if self.eps is None else self.denominator + self.eps
        weight = weight if self.min_denom is None else jnp.maximum(weight, self.min_denom)
        empty = weight == 0
        return jnp.where(empty, 0.0, 1.0 / jnp.where(empty, 1.0, weight))

    def compute(self) -> Array:
        """Return the reduced value; 0 where there is no weight."""
        return self.unreduced_sum * self.compute_scale()


@struct.dataclass
class LossOutput:
    """What a loss returns to the engine: the loss to differentiate, and metrics by name."""

    primary_loss: WeightedMetric
    aux_metrics: Mapping[str, Any]


@struct.dataclass(frozen=True, kw_only=True)
class TrainerPayload:
    """The empty base of payloads; MaxText only names it."""


@struct.dataclass(frozen=True, kw_only=True)
class RLTrainerPayload(TrainerPayload):
    """One micro-batch. B rows, P prompt and C completion columns, T = P + C; packed rows have P = 0, C = T.

    ids are int32 [B, P] and [B, C]; masks, log-probs and weights float32 [B, C] (prompt_mask [B, P]);
    advantages [B, C] or [B]; segment_ids (0 is padding) and segment_positions int32 [B, T], packed rows only;
    overlong float32 [B], or [B, T] when packed; routed_experts int16 [B, T, layers, top_k], -1 is unset.
    num_segments (an upper bound that counts the padding segment), sampler_agreement_applied and metadata are
    static: a new value compiles again.
    """

    prompt_ids: Array
    prompt_mask: Array
    completion_ids: Array
    completion_mask: Array
    advantages: Array
    segment_ids: Array | None = None
    segment_positions: Array | None = None
    ref_per_token_logps: Array | None = None
    old_per_token_logps: Array | None = None
    sampler_is_weights: Array | None = None
    rollout_per_token_logps: Array | None = None
    overlong: Array | None = None
    routed_experts: Array | None = None
    returns: Array | None = None
    old_values: Array | None = None
    num_segments: int | None = struct.field(default=None, pytree_node=False)
    sampler_agreement_applied: bool = struct.field(default=False, pytree_node=False)
    metadata: dict[str, Any] = struct.field(default_factory=dict, pytree_node=False)


_DATATYPES = "tunix.experimental.common.datatypes"


def install() -> None:
    """Make the four names importable where MaxText looks for them; a second call changes nothing.

    An installed google-tunix keeps all it has, but its top module, which imports every learner and sampler
    (6 s), runs only when an attribute of it is asked for. Without google-tunix an empty `tunix` is made.

    Raises:
      BenchError: the installed Tunix has a `tunix.experimental` or loss classes of its own.
    """
    if getattr(sys.modules.get(_DATATYPES), "RLTrainerPayload", None) is RLTrainerPayload:
        return
    tunix = sys.modules.get("tunix") or _late_package("tunix")
    search = list(tunix.__path__)
    if "tunix.experimental" in sys.modules or importlib.machinery.PathFinder.find_spec("tunix.experimental", search):
        raise BenchError("the installed Tunix has tunix.experimental", where="tunix_standin", todo="use Tunix's own")
    utils = importlib.import_module("tunix.sft.utils") if search else _new_module("tunix.sft.utils")
    if hasattr(utils, "LossOutput"):
        raise BenchError(
            "tunix.sft.utils has a LossOutput of its own", where="tunix_standin", todo="install google-tunix 0.1.7"
        )
    utils.LossOutput, utils.WeightedMetric = LossOutput, WeightedMetric
    datatypes = _new_module(_DATATYPES)
    datatypes.RLTrainerPayload, datatypes.TrainerPayload = RLTrainerPayload, TrainerPayload


def _late_package(name: str) -> types.ModuleType:
    """Register a package without running it; a missing attribute runs it. Empty if it is not installed."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.loader is None:
        return _new_module(name)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)

    def run_first(attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(f"module {name!r} has no attribute {attribute!r}")
        del module.__getattr__
        spec.loader.exec_module(module)
        return getattr(module, attribute)

    module.__getattr__ = run_first
    return module


def _new_module(name: str) -> types.ModuleType:
    """Register an empty module and, where missing, its parents."""
    parent, _, child = name.rpartition(".")
    module = types.ModuleType(name)
    module.__path__ = []
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    if parent:
        setattr(sys.modules.get(parent) or _new_module(parent), child, module)
    sys.modules[name] = module
    return module


# Options ---------------------------------------------------------------------------------------------------

LOSS_AGG_MODES = (
    "token-mean",
    "sequence-mean-token-mean",
    "sequence-mean-token-scale",
    "seq-mean-token-sum",
    "sequence-mean-token-sum-norm",
)
KL_LOSS_MODES = ("kl", "mse_kl", "low_var_kl")
_CHOICES = {
    "algo_variant": ("grpo", "drgrpo", "gspo-token", "dapo"),
    "advantage_estimator": ("grpo", "gae", "drgrpo", "rloo", "grpo-loo"),
    "policy_loss_fn": ("grpo",),
    "loss_agg_mode": LOSS_AGG_MODES,
    "loss_algo": ("grpo", "gspo-token"),
    "kl_loss_mode": KL_LOSS_MODES,
    "sampler_is": (None, "token"),
    "sampler_rs": (None, "geometric", "token"),
    "truncated_importance_sampling_type": (None, "seq-mask-tis"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GRPOConfig:
    """The GRPO options of both lines of Tunix development that change the program, with Tunix's defaults.

    Frozen and compared by value: the engine closes over it, and a new value compiles again.
    `truncated_importance_sampling_*`, `overlong_loss_masking` and `sampler_is_length_buckets` belong to one
    line, `sampler_rs*` and `force_on_policy_ratio` to the other. epsilon_high None means epsilon.
    """

    algo_variant: str = "grpo"
    advantage_estimator: str = "grpo"
    policy_loss_fn: str = "grpo"
    loss_agg_mode: str = "sequence-mean-token-mean"
    loss_algo: str = "grpo"
    num_generations: int = 2
    num_iterations: int = 1
    beta: float | None = 0.04
    kl_loss_mode: str = "kl"
    kl_clamp_value: float | None = None
    epsilon: float = 0.2
    epsilon_high: float | None = None
    epsilon_c: float | None = None
    temperature: float | None = None
    use_rollout_logps: bool = True
    force_on_policy_ratio: bool = False
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
    sampler_is_length_buckets: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.epsilon_high is None:
            object.__setattr__(self, "epsilon_high", self.epsilon)
        if self.sampler_is_length_buckets is not None:
            object.__setattr__(self, "sampler_is_length_buckets", tuple(self.sampler_is_length_buckets))
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                known = ", ".join(str(value) for value in allowed)
                raise BenchError(f"{name} is {getattr(self, name)!r}", where="GRPO options", todo=f"use one of {known}")
        for wrong, what in self._conflicts():
            if wrong:
                raise BenchError(what, where="GRPO options")

    def _conflicts(self) -> list[tuple[bool, str]]:
        low, high = self.truncated_importance_sampling_ratio_min, self.truncated_importance_sampling_ratio
        floor, ceiling = self.sampler_rs_min, self.sampler_rs_max
        tis = self.truncated_importance_sampling_type is not None
        threshold, edges = self.seq_logprob_error_threshold, self.sampler_is_length_buckets
        drops = self.overlong_loss_masking or threshold is not None
        return [
            (self.num_generations < 2, f"num_generations is {self.num_generations}; a group needs at least 2"),
            (self.epsilon < 0 or self.epsilon_high < 0, "epsilon and epsilon_high must not be negative"),
            (self.temperature is not None and self.temperature < 0, "temperature must not be negative"),
            (
                threshold is not None and not threshold >= 1,
                "seq_logprob_error_threshold is a mean of exp|x|, at least 1",
            ),
            (
                self.sampler_is_threshold is not None and not self.sampler_is_threshold > 0,
                "sampler_is_threshold must be above 0, or None for no cap",
            ),
            ((low is None) != (high is None), "truncated_importance_sampling_ratio_min and _ratio go together"),
            (
                low is not None and high is not None and low > high,
                "truncated_importance_sampling_ratio_min is above _ratio",
            ),
            (tis and low is None, "seq-mask-tis needs truncated_importance_sampling_ratio_min and _ratio"),
            (
                tis and (self.sampler_is is not None or self.sampler_rs is not None),
                "truncated_importance_sampling_type and sampler_is or sampler_rs set the same weights; use one",
            ),
            (tis and self.use_rollout_logps, "seq-mask-tis needs use_rollout_logps=False: the ratio would count twice"),
            ((floor is None) != (ceiling is None), "sampler_rs_min and sampler_rs_max go together"),
            (
                floor is not None and ceiling is not None and not 0 <= floor <= ceiling,
                "0 <= sampler_rs_min <= _max fails",
            ),
            (self.sampler_rs is not None and floor is None, "sampler_rs needs sampler_rs_min and sampler_rs_max"),
            (
                drops and self.loss_agg_mode == "sequence-mean-token-sum-norm",
                "sequence-mean-token-sum-norm divides by a constant, so dropped sequences could not leave the "
                "denominator; use another loss_agg_mode",
            ),
            (
                edges is not None
                and (not edges or edges[0] <= 0 or any(b <= a for a, b in zip(edges, edges[1:], strict=False))),
                "sampler_is_length_buckets must be rising positive token counts",
            ),
        ]


def build_gen_model_input_fn(algo_config: GRPOConfig, pad_id: int, eos_id: int) -> Callable[[Any], dict[str, Any]]:
    """Return the function that maps a payload to the keyword arguments of `grpo_loss_fn`.

    Raises:
      BenchError: the temperature is not set; the loss must score at the temperature that sampled.
    """
    if algo_config.temperature is None:
        raise BenchError("temperature is not set", where="GRPO options", todo="set it to the sampling temperature")
    constant = {"algo_config": algo_config, "pad_id": pad_id, "eos_id": eos_id}
    return lambda payload: {"train_example": payload, **constant}


# Per-token log-probabilities -------------------------------------------------------------------------------


def process_ids(
    prompt_ids: Array, completion_ids: Array, pad_id: int, segment_ids: Array | None, segment_positions: Array | None
) -> tuple[Array, Array, Array | None, Array]:
    """Return tokens, positions, attention mask and segment ids of the rows as the model is to see them.

    Packed rows bring their own segments and positions and need no mask. Padded rows get a segment of ones
    on every token that is not `pad_id`, positions that count them, and a causal [B, T, T] mask over them.
    """
    tokens = jnp.concatenate([prompt_ids, completion_ids], axis=1)
    if segment_ids is not None:
        if segment_positions is None:
            raise BenchError("packed rows without segment_positions", where="payload", todo="give both or neither")
        return tokens, segment_positions, None, segment_ids
    real = tokens != pad_id
    counted = jnp.cumsum(real, axis=-1)
    causal = real[:, None, :] & jnp.tri(tokens.shape[1], dtype=bool)
    return tokens, counted - (counted >= 1), causal, real.astype(jnp.int32)


def compute_per_token_logps(
    model: nnx.Module,
    prompt_ids: Array,
    completion_ids: Array,
    *,
    pad_id: int,
    segment_ids: Array | None = None,
    segment_positions: Array | None = None,
    routed_experts: Array | None = None,
    temperature: float = 1.0,
    chunk_size: int = 0,
    return_entropy: bool = False,
) -> Array | tuple[Array, Array]:
    """Return each completion token's log-probability, float32 [B, C] (packed: [B, T], 0 for the first token).

    With `chunk_size` > 0 the vocabulary head runs on [B, chunk_size, D] slices of the hidden states inside a
    rematerialised scan, so logits of [B, chunk_size, V] are the most that is alive. The model itself runs
    once, on a copy: nothing it sows stays behind.

    Args:
      return_entropy: also return the entropy of each position's distribution, same shape.

    Raises:
      BenchError: the model returns no logits, or offers no way to its hidden states.
    """
    model = nnx.merge(*nnx.split(model))
    tokens, positions, mask, segments = process_ids(prompt_ids, completion_ids, pad_id, segment_ids, segment_positions)
    options = {"positions": positions, "cache": None, "attention_mask": mask}
    if _accepts(model, "segment_ids"):
        options["segment_ids"] = segments
    if routed_experts is not None:
        if not _accepts(model, "forced_routed_experts"):
            raise BenchError("this model cannot be told its routed experts", where="payload", todo="leave them out")
        options["forced_routed_experts"] = jnp.asarray(routed_experts, jnp.int32)
    keep = tokens.shape[1] - 1 if segment_ids is not None else completion_ids.shape[1]
    scored = slice(-keep - 1, -1)  # the position before a token predicts it
    score = functools.partial(_score, temperature=temperature, return_entropy=return_entropy)
    if chunk_size > 0:
        hidden, head = _run_without_head(model, tokens, options)
        out = _score_in_chunks(head, hidden[:, scored], tokens[:, -keep:], chunk_size, score)
    else:
        logits, _ = model(tokens, **options)
        if logits is None:
            raise BenchError(
                "num_vocab_tiling > 1 leaves no logits",
                where="log-probs",
                todo="set a chunk size or num_vocab_tiling=1",
            )
        out = score(logits[:, scored], tokens[:, -keep:])
    if segment_ids is not None:
        out = jax.tree.map(lambda values: jnp.pad(values, ((0, 0), (1, 0))), out)
    return out


def _accepts(model: nnx.Module, argument: str) -> bool:
    parameters = inspect.signature(type(model).__call__).parameters
    return argument in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _score(logits: Array, targets: Array, *, temperature: float, return_entropy: bool) -> Array | tuple[Array, Array]:
    logits = logits if temperature in (0.0, 1.0) else logits / temperature
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0].astype(jnp.float32)
    logps = picked - jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1)
    if not return_entropy:
        return logps
    everything = jax.nn.log_softmax(logits, axis=-1)
    return logps, -jnp.sum(jnp.exp(everything) * everything, axis=-1)


def _run_without_head(model: nnx.Module, tokens: Array, options: dict[str, Any]) -> tuple[Array, Callable]:
    """Return the hidden states [B, T, D] in front of the vocabulary head, and the head.

    Newer adapters skip the head when asked. In 0.2.5 the decoder sows its hidden states where
    num_vocab_tiling > 1; elsewhere its head, reached through the instance, is replaced for the one call.
    """
    if _accepts(model, "skip_lm_head") and hasattr(model, "compute_final_logits"):
        return model(tokens, skip_lm_head=True, **options)[0], model.compute_final_logits
    base = getattr(model, "base", None)
    head = getattr(base, "logits_from_hidden_states_for_vocab_tiling", None)
    if head is None:
        raise BenchError(
            "this model does not give its hidden states", where="log-probs", todo="set the chunk size to 0"
        )
    found: list[Array] = []

    def keep_hidden(shared_embedding: Any, y: Array, *rest: Any, **named: Any) -> None:
        del base.decoder.apply_output_head  # from here on the class's own again
        found.append(y)

    base.decoder.apply_output_head = keep_hidden
    model(tokens, **options)
    vars(base.decoder).pop("apply_output_head", None)
    for path, sown in nnx.to_flat_state(nnx.pop(model, nnx.Intermediate)):
        if path[-1] == "hidden_states" and not found:
            found.append(sown.get_value()[-1])
    if not found:
        raise BenchError("the decoder sowed no hidden states", where="log-probs", todo="set the chunk size to 0")
    return found[0], lambda hidden: head(hidden, True, "train")


def _score_in_chunks(head: Callable, hidden: Array, targets: Array, chunk_size: int, score: Callable) -> Any:
    rows, width, size = hidden.shape
    chunks = -(-width // chunk_size)
    padding = (0, chunks * chunk_size - width)
    hidden = jnp.pad(hidden, ((0, 0), padding, (0, 0))).reshape(rows, chunks, chunk_size, size)
    targets = jnp.pad(targets, ((0, 0), padding)).reshape(rows, chunks, chunk_size)

    @jax.checkpoint
    def one_chunk(carry: None, part: tuple[Array, Array]) -> tuple[None, Any]:
        return carry, score(head(part[0]).astype(jnp.float32), part[1])

    _, out = jax.lax.scan(one_chunk, None, (hidden.swapaxes(0, 1), targets.swapaxes(0, 1)))
    return jax.tree.map(lambda values: values.swapaxes(0, 1).reshape(rows, -1)[:, :width], out)


# The GRPO loss ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Sequences:
    """The sequences of a batch: its rows, or the segments of packed rows, of which number 0 is padding."""

    ids: Array | None  # int32 [B, T], packed rows only
    count: int | None

    def total(self, values: Array) -> Array:
        """[B, T] -> [B, S]: the sum over each sequence; S is 1 unless packed."""
        if self.ids is None:
            return values.sum(axis=-1, keepdims=True)
        return jax.vmap(functools.partial(jax.ops.segment_sum, num_segments=self.count))(values, self.ids)

    def spread(self, values: Array) -> Array:
        """[B, S] -> [B, T] (or [B, 1], which broadcasts): each token gets its sequence's value."""
        return values if self.ids is None else jnp.take_along_axis(values, self.ids, axis=1)

    def scored(self, mask: Array) -> Array:
        """[B, T] mask -> [B, S]: 1.0 for each sequence with a scored token, never for padding."""
        active = (self.total(mask) > 0).astype(jnp.float32)
        return active if self.ids is None else active.at[:, 0].set(0.0)


def aggregate_loss(values: Array, mask: Array, mode: str, sequences: _Sequences) -> WeightedMetric:
    """Return per-token values [B, T] pooled as `loss_agg_mode` says, numerator and denominator apart.

    Raises:
      BenchError: sequence-mean-token-scale on packed rows, where the row width is nobody's response length.
    """
    values = values.astype(jnp.float32) * mask
    if mode == "token-mean":
        return WeightedMetric(values.sum(), mask.sum(), min_denom=1.0)
    if mode == "sequence-mean-token-sum-norm":
        weight = jnp.float32(mask.shape[0]) if sequences.ids is None else sequences.scored(mask).sum()
        return WeightedMetric(values.sum(), weight, min_denom=1e-6)
    active, sums = sequences.scored(mask), sequences.total(values)
    if mode == "sequence-mean-token-mean":
        sums = sums / jnp.maximum(sequences.total(mask), 1.0)
    elif mode == "sequence-mean-token-scale":
        if sequences.ids is not None:
            raise BenchError(f"{mode} has no length to scale by in packed rows", where="GRPO options")
        sums = sums / mask.shape[1]
    floor = 1e-6 if mode == "seq-mean-token-sum" else 1.0
    return WeightedMetric((sums * active).sum(), active.sum(), min_denom=floor)


def grpo_loss_fn(
    model: nnx.Module,
    train_example: Any,
    algo_config: GRPOConfig,
    pad_id: int,
    eos_id: int,
    compute_logps_chunk_size: int = 0,
) -> LossOutput:
    """Return the GRPO loss of one micro-batch and about 90 metrics, in the order of Tunix's distributed run.

    One forward gives the log-probs; sequences are gated against the sampler's own; the ratio to the old
    log-probs (without them: to itself) is clipped; importance weights, aggregation and beta * KL follow.
    `train_example` is an RLTrainerPayload; `eos_id` is part of the signature and unused, as in Tunix.

    Raises:
      BenchError: an option needs a field that the batch does not carry.
    """
    ex, cfg = train_example, algo_config
    sampler, fused = _sampler_logps(ex, cfg)
    sequences = _Sequences(ex.segment_ids, getattr(ex, "num_segments", None))
    if sequences.ids is not None and sequences.count is None:
        raise BenchError("packed rows without num_segments", where="payload", todo="set it to the most segments + 1")
    logps, entropy = compute_per_token_logps(
        model,
        ex.prompt_ids,
        ex.completion_ids,
        pad_id=pad_id,
        segment_ids=ex.segment_ids,
        segment_positions=ex.segment_positions,
        routed_experts=getattr(ex, "routed_experts", None),
        temperature=cfg.temperature,
        chunk_size=compute_logps_chunk_size,
        return_entropy=True,
    )
    scored = jnp.asarray(ex.completion_mask, jnp.float32)
    fixed = jax.lax.stop_gradient(logps)
    drift = None if sampler is None else fixed - jnp.asarray(sampler, jnp.float32)
    kept, error = _keep_sequences(ex, cfg, sequences, scored, drift)
    corrects = cfg.sampler_is or cfg.sampler_rs or cfg.seq_logprob_error_threshold
    on_policy = ex.old_per_token_logps is None or cfg.force_on_policy_ratio or (fused and corrects)
    old = fixed if on_policy else jnp.asarray(ex.old_per_token_logps, jnp.float32)
    advantages = jnp.asarray(ex.advantages, jnp.float32)
    advantages = advantages if advantages.ndim == 2 else advantages[:, None]
    mask = scored * sequences.spread(kept)
    mask = jnp.where(jnp.isfinite(logps) & jnp.isfinite(old) & jnp.isfinite(advantages), mask, 0.0)
    advantages = jnp.where(mask > 0, advantages, 0.0)
    log_ratio = jnp.where(mask > 0, logps, 0.0) - jnp.where(mask > 0, old, 0.0)
    policy = _policy_loss(cfg, sequences, log_ratio, jnp.where(mask > 0, logps, 0.0), advantages, mask)
    weights, rejected = _importance_weights(ex, cfg, sequences, scored, drift, kept)
    loss = policy["loss"] if weights is None else policy["loss"] * jnp.where(weights != 0, weights, 0.0)
    pool = functools.partial(aggregate_loss, mask=mask, mode=cfg.loss_agg_mode, sequences=sequences)
    total = pool(jnp.where(mask > 0, loss, 0.0))
    aux = _loss_metrics(policy, total, pool, log_ratio, advantages, mask, scored)
    aux |= _drift_metrics(cfg, sequences, scored, drift, sampler, getattr(ex, "overlong", None))
    aux |= _gate_metrics(cfg, sequences.scored(scored), kept, error, rejected, weights, scored)
    aux["entropy"] = pool(jnp.where((mask > 0) & jnp.isfinite(entropy), jax.lax.stop_gradient(entropy), 0.0))
    if ex.ref_per_token_logps is not None:
        kl = compute_kl(logps, ex.ref_per_token_logps, cfg.kl_loss_mode, cfg.kl_clamp_value)
        kl = jnp.where(mask > 0, kl, 0.0)
        aux["kl"], aux["kl_loss"] = WeightedMetric(kl.sum(), mask.sum(), min_denom=1.0), pool(kl)
        if cfg.beta:
            total = total.replace(unreduced_sum=total.unreduced_sum + cfg.beta * aux["kl_loss"].unreduced_sum)
    return LossOutput(primary_loss=total, aux_metrics=aux)


def _sampler_logps(ex: Any, cfg: GRPOConfig) -> tuple[Array | None, bool]:
    """Return the sampler's log-probs if the batch has them, and whether they came as the old log-probs.

    Raises:
      BenchError: an option needs a field that is None.
    """
    sampler, weights = getattr(ex, "rollout_per_token_logps", None), getattr(ex, "sampler_is_weights", None)
    applied = weights is not None or getattr(ex, "sampler_agreement_applied", False)
    fused = sampler is None and cfg.use_rollout_logps and not applied and ex.old_per_token_logps is not None
    sampler = ex.old_per_token_logps if fused else sampler
    gates = cfg.seq_logprob_error_threshold is not None or cfg.sampler_is or cfg.sampler_rs
    missing = {
        "rollout_per_token_logps": sampler is None
        and (bool(cfg.truncated_importance_sampling_type) or (bool(gates) and not applied)),
        "overlong": cfg.overlong_loss_masking and getattr(ex, "overlong", None) is None,
        "ref_per_token_logps": bool(cfg.beta) and ex.ref_per_token_logps is None,
    }
    for name, is_missing in missing.items():
        if is_missing:
            raise BenchError(f"the GRPO options need {name}", where="payload", todo="fill it, or unset the option")
    return sampler, fused


def _keep_sequences(
    ex: Any, cfg: GRPOConfig, sequences: _Sequences, scored: Array, drift: Array | None
) -> tuple[Array, Array | None]:
    """Return 1.0 per sequence that stays in numerator and denominator [B, S], and mean exp|drift| if gated."""
    kept, error = jnp.ones_like(sequences.total(scored)), None
    if cfg.overlong_loss_masking:
        overlong = jnp.asarray(ex.overlong, jnp.float32)
        if overlong.ndim == 2 and sequences.ids is not None:
            overlong = (sequences.total(overlong * (sequences.ids > 0)) > 0).astype(jnp.float32)
        kept = kept * (1.0 - overlong.reshape(scored.shape[0], -1))
    if cfg.seq_logprob_error_threshold is not None and drift is not None:
        left = scored * sequences.spread(kept)
        apart = jnp.exp(jnp.where(left > 0, jnp.abs(drift), 0.0))  # an infinity stays one and is dropped
        tokens = sequences.total(left)
        error = jnp.where(tokens > 0, sequences.total(apart * left) / jnp.maximum(tokens, 1.0), 0.0)
        kept = kept * (error <= cfg.seq_logprob_error_threshold)
    return kept, error


def _policy_loss(
    cfg: GRPOConfig, sequences: _Sequences, delta: Array, logps: Array, advantages: Array, mask: Array
) -> dict[str, Array]:
    """Return the clipped loss per token, and the ratio and both branches for the metrics; all [B, T], finite."""
    log_ratio = jnp.clip(delta, -20.0, 20.0)
    if cfg.loss_algo == "gspo-token":  # a sequence's mean as the value, each token's own gradient
        mean = sequences.total(log_ratio) / jnp.maximum(sequences.total(mask), 1.0)
        own = logps - jax.lax.stop_gradient(logps)
        log_ratio = own + jax.lax.stop_gradient(sequences.spread(mean))
        log_ratio = jnp.where(mask > 0, jnp.clip(log_ratio, -20.0, 10.0), 0.0)
    ratio = jnp.exp(log_ratio)
    plain = -advantages * ratio
    clipped = -advantages * jnp.clip(ratio, 1 - cfg.epsilon, 1 + cfg.epsilon_high)
    loss = jnp.maximum(plain, clipped)
    ceiling = loss if cfg.epsilon_c is None else -cfg.epsilon_c * advantages
    lower = (loss > ceiling) & (advantages < 0)
    loss = jnp.where(advantages < 0, jnp.minimum(ceiling, loss), loss)
    return {"loss": loss, "ratio": ratio, "log_ratio": log_ratio, "plain": plain, "clipped": clipped, "lower": lower}


def _importance_weights(
    ex: Any, cfg: GRPOConfig, sequences: _Sequences, scored: Array, drift: Array | None, kept: Array
) -> tuple[Array | None, WeightedMetric | None]:
    """Return detached weights [B, T] for the sampler's drift, and the share of what the keep-band rejected."""
    given = getattr(ex, "sampler_is_weights", None)
    tis = cfg.truncated_importance_sampling_type is not None
    if drift is None or not (tis or (given is None and (cfg.sampler_is or cfg.sampler_rs))):
        return (None if given is None else jnp.asarray(given, jnp.float32)), None
    valid = (scored > 0) & jnp.isfinite(drift)
    safe = jnp.where(valid, drift, 0.0)
    ratio = jnp.where(valid, jnp.exp(jnp.clip(safe, -20.0, 20.0)), 0.0)
    cap = None if tis else cfg.sampler_is_threshold
    weights = ratio if cap is None else jnp.minimum(ratio, cap)
    weights = weights if tis or cfg.sampler_is else valid.astype(jnp.float32)
    low, high = cfg.sampler_rs_min, cfg.sampler_rs_max
    if tis:
        low, high = cfg.truncated_importance_sampling_ratio_min, cfg.truncated_importance_sampling_ratio
    rejected = None
    if tis or cfg.sampler_rs == "geometric":  # a rejected sequence keeps its place in the denominator
        mean = _geometric_mean(sequences, safe, scored)
        keep, counted = (mean >= low) & (mean <= high), kept * sequences.scored(scored)
        rejected = WeightedMetric((counted * ~keep).sum(), counted.sum(), min_denom=1.0)
        weights = weights * sequences.spread(keep.astype(jnp.float32))
    elif cfg.sampler_rs == "token":
        keep = valid & (ratio >= low) & (ratio <= high)
        rejected = WeightedMetric((scored * ~keep).sum(), scored.sum(), min_denom=1.0)
        weights = weights * keep
    return jax.lax.stop_gradient(weights), rejected


def _geometric_mean(sequences: _Sequences, drift: Array, scored: Array) -> Array:
    mean = sequences.total(drift * scored) / jnp.maximum(sequences.total(scored), 1.0)
    return jnp.exp(jnp.clip(mean, -20.0, 20.0))


def compute_kl(logps: Array, reference: Array, mode: str, clamp: float | None) -> Array:
    """Return the per-token KL estimate of the policy against a reference, clamped to +-`clamp` if set."""
    apart = logps - jnp.asarray(reference, jnp.float32)
    if mode == "mse_kl":
        kl = 0.5 * jnp.square(apart)
    else:
        kl = jnp.exp(-apart) + apart - 1 if mode == "low_var_kl" else apart
    return kl if clamp is None else jnp.clip(kl, -clamp, clamp)


# Metrics: they cost host time per micro-batch in the full run, so they are all here -------------------------


def _mean(values: Array, mask: Array) -> Array:
    return (values * mask).sum() / (mask.sum() + 1e-8)


def _extremes(name: str, values: Array, mask: Array, empty: float = 0.0) -> dict[str, Array]:
    some = (mask > 0).any()
    top = jnp.max(jnp.where(mask > 0, values, -jnp.inf))
    bottom = jnp.min(jnp.where(mask > 0, values, jnp.inf))
    return {f"{name}max": jnp.where(some, top, empty), f"{name}min": jnp.where(some, bottom, empty)}


def _loss_metrics(
    policy: dict[str, Array],
    total: WeightedMetric,
    pool: Callable,
    delta: Array,
    advantages: Array,
    mask: Array,
    scored: Array,
) -> dict[str, Any]:
    advantages = jnp.broadcast_to(advantages, mask.shape)
    tokens = mask.sum()
    zero = WeightedMetric(jnp.float32(0.0), jnp.float32(1.0))
    clipped = (policy["clipped"] > policy["plain"]).astype(jnp.float32)
    return {
        "kl": zero,
        "kl_loss": zero,
        "reduced_pg_loss": total.compute(),
        "unreduced_pg_loss": total,
        "pg_clipfrac": WeightedMetric((clipped * mask).sum(), tokens, min_denom=1.0),
        "pg_clipfrac_lower": pool(policy["lower"]),
        "ppo_kl": WeightedMetric(-delta.sum(), tokens, min_denom=1.0),
        "is_ratio/mean": _mean(policy["ratio"], scored),
        **_extremes("is_ratio/", policy["ratio"], scored),
        "log_ratio/abs_mean": _mean(jnp.abs(policy["log_ratio"]), mask),
        "pg_loss/unclipped_mean": _mean(policy["plain"], mask),
        "pg_loss/clipped_mean": _mean(policy["clipped"], mask),
        "advantage/abs_mean": _mean(jnp.abs(advantages), scored),
        **_extremes("advantage/", advantages, scored),
        "advantage/nonzero_frac": _mean(jnp.abs(advantages) > 1e-8, mask),
    }


def _gate_metrics(
    cfg: GRPOConfig,
    active: Array,
    kept: Array,
    error: Array | None,
    rejected: WeightedMetric | None,
    weights: Array | None,
    scored: Array,
) -> dict[str, Any]:
    aux: dict[str, Any] = {"sample_mask/kept_frac": WeightedMetric((kept * active).sum(), active.sum(), min_denom=1.0)}
    if error is not None:
        seen = (error > 0) & jnp.isfinite(error)
        finite = jnp.where(seen, error, 0.0)
        aux["sample_mask/mult_prob_error_mean"] = WeightedMetric(finite.sum(), seen.sum() * 1.0, min_denom=1.0)
        aux["sample_mask/mult_prob_error_max"] = finite.max()
    if rejected is not None:
        tis = cfg.truncated_importance_sampling_type
        aux["tis/is_oob_ratio" if tis else "sampler_rs/rejected_fraction"] = rejected.compute() if tis else rejected
    weights = jnp.ones_like(scored) if weights is None else weights
    aux["sampler_is/weight_mean"] = _mean(weights, scored)
    aux["sampler_is/weight_min"] = _extremes("", weights, scored)["min"]
    return aux


_DRIFT_EDGES = (-10.0, -5.0, -2.0, -1.0, -0.5, -0.2, -0.05, 0.0, 0.05, 0.2, 0.5, 1.0, 2.0, 5.0)  # nats
_SURE_EDGES = (-1.0, -0.1, -0.01)  # nats of the sampler's own log-prob
_OUTLIER_NATS = 10.0
_POSITIONS = 8  # equal parts of a sequence's scored tokens


def _drift_metrics(
    cfg: GRPOConfig, sequences: _Sequences, scored: Array, drift: Array | None, sampler: Array | None, overlong: Any
) -> dict[str, Array]:
    """Return where trainer and sampler disagree: by size, place in the row, the sampler's confidence, length."""
    sampler = jnp.zeros_like(scored) if sampler is None else jnp.asarray(sampler, jnp.float32)
    drift = jnp.zeros_like(scored) if drift is None else jnp.nan_to_num(drift, nan=0.0, posinf=0.0, neginf=0.0)
    tokens, active = jnp.maximum(scored.sum(), 1.0), sequences.scored(scored)
    count = jnp.maximum(active.sum(), 1.0)
    place = (jnp.cumsum(scored, axis=-1) - 1) / jnp.maximum(scored.sum(axis=-1, keepdims=True), 1.0)
    groups = {
        "hist": (jnp.searchsorted(jnp.asarray(_DRIFT_EDGES), drift, side="right"), len(_DRIFT_EDGES) + 1),
        "pos": (jnp.clip((place * _POSITIONS).astype(jnp.int32), 0, _POSITIONS - 1), _POSITIONS),
        "conf": (jnp.searchsorted(jnp.asarray(_SURE_EDGES), sampler, side="right"), len(_SURE_EDGES) + 1),
    }
    aux = {"token_logdiff_mean": (drift * scored).sum() / tokens, "scored_tokens_per_seq": tokens / count}
    for name, (group, size) in groups.items():
        for i in range(size):
            chosen = scored * (group == i)
            own = jnp.maximum(chosen.sum(), 1.0)
            if name != "pos":
                aux[f"{name}_frac/{i}"] = chosen.sum() / tokens
            else:
                aux[f"pos_absmean/{i}"] = (jnp.abs(drift) * chosen).sum() / own
            kind, weight = ("mass", tokens) if name == "hist" else ("signed", own)
            aux[f"{name}_{kind}/{i}"] = (drift * chosen).sum() / weight
    outliers = scored * (jnp.abs(drift) > _OUTLIER_NATS)
    ratio, mean = jnp.exp(drift), _geometric_mean(sequences, drift, scored)
    aux |= {
        "token_logdiff_absmean": _mean(jnp.abs(drift), scored),
        "token_logdiff_abs_max": jnp.max(jnp.abs(drift) * scored),
        "token_outlier_frac": outliers.sum() / tokens,
        "token_outliers_per_seq": outliers.sum() / count,
        "token_weight_mean": _mean(ratio, scored),
        **_extremes("token_weight_", ratio, scored, 1.0),
        "seq_geomean_mean": (mean * active).sum() / count,
        **_extremes("seq_geomean_", mean, active, 1.0),
    }
    if cfg.sampler_is_length_buckets:
        aux |= _length_metrics(cfg.sampler_is_length_buckets, sequences, scored, drift, overlong)
    return {f"sampler_is/{name}": value for name, value in aux.items()}


def _length_metrics(
    edges: tuple[int, ...], sequences: _Sequences, scored: Array, drift: Array, overlong: Any
) -> dict[str, Array]:
    """Return sums per length bucket and status that tell noise (shrinks with length) from bias; 0 when packed."""
    length = scored.sum(axis=-1)
    some = jnp.maximum(length, 1.0)
    mean = (drift * scored).sum(axis=-1) / some
    spread = (jnp.square(drift - mean[:, None]) * scored).sum(axis=-1) / some
    cut = (
        jnp.zeros_like(length) if overlong is None or sequences.ids is not None else jnp.asarray(overlong, jnp.float32)
    )
    aux = {}
    for low, high in zip((0, *edges), (*edges, None), strict=True):
        inside = (length > low) & (length <= (jnp.inf if high is None else high)) & (sequences.ids is None)
        bucket = f"gt{low}" if high is None else f"le{high}"
        for status, share in {"complete": inside * (1 - cut), "truncated": inside * cut}.items():
            sums = {"count": 1.0, "len_sum": length, "logmean_sum": mean, "logmean_sq_sum": mean**2}
            for name, value in {**sums, "iid_var_sum": spread / some}.items():
                aux[f"lenscale/{bucket}/{status}/{name}"] = (share * value).sum()
    return aux


# The worker ------------------------------------------------------------------------------------------------


class WorkerState(enum.StrEnum):
    """Where a worker is in its life."""

    PENDING = "PENDING"
    INITIALIZING = "INITIALIZING"
    COMPILING = "COMPILING"
    READY = "READY"
    SYNCING = "SYNCING"
    DRAINING = "DRAINING"
    STOPPED = "STOPPED"
    ERROR = "ERROR"

    def can_transition_to(self, new: WorkerState) -> bool:
        """Return whether Tunix allows this step; an ERROR can only be stopped."""
        return new.value in _NEXT_STATES[self.value].split()


_NEXT_STATES = {
    "PENDING": "INITIALIZING STOPPED ERROR",
    "INITIALIZING": "READY STOPPED ERROR",
    "COMPILING": "READY STOPPED ERROR",
    "READY": "COMPILING SYNCING DRAINING STOPPED ERROR",
    "SYNCING": "READY STOPPED ERROR",
    "DRAINING": "STOPPED ERROR",
    "STOPPED": "",
    "ERROR": "STOPPED",
}


@dataclasses.dataclass(kw_only=True)
class Response:
    """An answer: the request's id, and what the worker says about itself."""

    request_id: str = ""
    error: Any = None
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(kw_only=True)
class TrainRequest:
    """One micro-batch to train on."""

    payload: TrainerPayload
    request_id: str = ""
    target_policy_version: int = 0
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(kw_only=True)
class LogprobsRequest:
    """Rows to score under the live weights; the fields of a payload of the same names."""

    prompt_tokens: Array
    completion_tokens: Array
    temperature: float
    pad_id: int | None = None
    eos_id: int | None = None
    segment_ids: Array | None = None
    segment_positions: Array | None = None
    routed_experts: Array | None = None
    model_role: str = "actor"
    request_id: str = ""
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(kw_only=True)
class LogprobsResponse(Response):
    """Host float32 [B, C] log-probs, and the version of the weights that gave them."""

    per_token_logps: np.ndarray
    model_version: int = 0


@dataclasses.dataclass(kw_only=True)
class WorkerInfo:
    """What a worker is."""

    worker_id: str
    roles: frozenset[str]
    resources: dict[str, Any]


@dataclasses.dataclass(kw_only=True)
class HealthReport:
    """How a worker is."""

    state: WorkerState
    policy_version: int
    last_error: str | None
    heartbeat_unix_s: float


def _in_context(method: Callable) -> Callable:
    """Run a method inside the worker's execution context, entered once per thread however deep the calls."""

    @functools.wraps(method)
    def inside(self: TrainerWorker, *args: Any, **kwargs: Any) -> Any:
        with self._context():
            return method(self, *args, **kwargs)

    return inside


def _scoring(method: Callable) -> Callable:
    """Run a method that needs READY; any exception in it leaves the worker in ERROR for good."""

    @_in_context
    @functools.wraps(method)
    def guarded(self: TrainerWorker, *args: Any, **kwargs: Any) -> Any:
        self._ensure_ready()
        try:
            result = method(self, *args, **kwargs)
        except Exception as error:
            self._fail(error)
            raise
        self._last_error = None
        return result

    return guarded


@functools.partial(jax.jit, static_argnames=("pad_id", "temperature", "chunk_size"))
def _jitted_logps(graph: Any, state: Any, *rows: Array, **options: Any) -> Array:
    return compute_per_token_logps(nnx.merge(graph, state), *rows, **options)


class TrainerWorker:
    """The orchestrator's handle on a trainer, with the methods and states of Tunix's own.

    Args:
      trainer_factory: builds the engine; called at once, inside the execution context.
      logps_chunk_size: positions per slice of the vocabulary head, in the loss and in `per_token_logps`;
        0 scores the whole row at once.
      logps_micro_batch_size: rows per forward of `per_token_logps`; None is all of them.
      execution_context: a context manager such as the mesh, a function that returns one, a sequence of
        those, or None; every method runs inside.
    """

    def __init__(
        self,
        trainer_factory: Callable[[], Any],
        *,
        worker_id: str = "trainer_worker",
        logps_chunk_size: int = 0,
        logps_micro_batch_size: int | None = None,
        execution_context: Any = None,
    ):
        self._execution_context, self._entered = execution_context, threading.local()
        self._worker_id, self._state, self._last_error = worker_id, WorkerState.PENDING, None
        self._logps_chunk_size, self._logps_micro_batch_size = logps_chunk_size, logps_micro_batch_size
        with self._context():
            self._trainer = trainer_factory()

    @contextlib.contextmanager
    def _context(self):
        if getattr(self._entered, "now", False):
            yield
            return
        given = self._execution_context
        with contextlib.ExitStack() as stack:
            for one in given if isinstance(given, list | tuple) else [given]:
                if one is not None:
                    stack.enter_context(one if hasattr(one, "__enter__") else one())
            self._entered.now = True
            stack.callback(setattr, self._entered, "now", False)
            yield

    @property
    def state(self) -> WorkerState:
        """The state; setting one that Tunix does not allow raises RuntimeError."""
        return self._state

    @state.setter
    def state(self, new: WorkerState) -> None:
        if new != self._state and not self._state.can_transition_to(new):
            raise RuntimeError(f"Invalid transition from {self._state.value} to {new.value}")
        self._state = new

    def _policy_version(self) -> int:
        return int(getattr(self._trainer, "policy_version", 0))

    def _response(self, request: Any = None, **metadata: Any) -> Response:
        about = {"worker_id": self._worker_id, "state": self.state.value, "policy_version": self._policy_version()}
        asked = {} if request is None else request.metadata or {}
        return Response(request_id=getattr(request, "request_id", ""), metadata=about | metadata | asked)

    def _fail(self, error: Exception) -> None:
        self._last_error = str(error)
        self.state = WorkerState.ERROR

    def _ensure_ready(self) -> None:
        if self.state == WorkerState.PENDING:
            self.initialize()
        if self.state != WorkerState.READY:
            raise RuntimeError(f"TrainerWorker is not ready: {self.state.value}.")

    @_in_context
    def initialize(self) -> Response:
        """Make the worker READY."""
        if self.state != WorkerState.READY:
            self.state = WorkerState.INITIALIZING
            self.state = WorkerState.READY
        return self._response(initialized=True)

    @_in_context
    def compile(self, dummy_data: Any = None) -> Response:
        """Compile for a payload of these shapes; without one the engine compiles on its first fwd_bwd."""
        self._ensure_ready()
        self.state = WorkerState.COMPILING
        try:
            self._trainer.compile(dummy_data)
        except Exception as error:
            self._fail(error)
            raise
        self.state = WorkerState.READY
        return self._response(compiled=True)

    @_in_context
    def start(self) -> Response:
        """Check that the worker can be used."""
        self._ensure_ready()
        return self._response(started=True)

    @_in_context
    def stop(self) -> Response:
        """Close the engine; the second call does nothing."""
        if self.state == WorkerState.STOPPED:
            return self._response(stopped=True, already_stopped=True)
        if self.state == WorkerState.READY:
            self.state = WorkerState.DRAINING
        self._trainer.close()
        self.state = WorkerState.STOPPED
        return self._response(stopped=True)

    def info(self) -> WorkerInfo:
        """Return what this worker is."""
        about = {"trainer": type(self._trainer).__name__, "policy_version": self._policy_version()}
        return WorkerInfo(worker_id=self._worker_id, roles=frozenset({"trainer", "weight_sync"}), resources=about)

    def heartbeat(self) -> HealthReport:
        """Return the state and the last error."""
        return HealthReport(
            state=self.state,
            policy_version=self._policy_version(),
            last_error=self._last_error,
            heartbeat_unix_s=time.time(),
        )

    @_in_context
    def with_loss_fn(self, loss_fn: Callable, has_aux: bool = False) -> Response:
        """Set the loss of fwd_bwd."""
        self._trainer.with_loss_fn(loss_fn, has_aux)
        return self._response(loss_fn_configured=True)

    @_in_context
    def with_gen_model_input_fn(self, gen_model_input_fn: Callable[[Any], dict[str, Any]]) -> Response:
        """Set what maps a payload to the loss's arguments; the chunk size is added unless it is there."""
        chunk = {"compute_logps_chunk_size": self._logps_chunk_size} if self._logps_chunk_size > 0 else {}
        self._trainer.with_gen_model_input_fn(lambda payload: {**chunk, **gen_model_input_fn(payload)})
        return self._response(gen_model_input_fn_configured=True)

    @_scoring
    def fwd_bwd(self, request: TrainRequest, **kwargs: Any) -> Response:
        """Queue one forward and backward pass, accumulating gradients."""
        kwargs.pop("skip_jit", None)
        self._trainer.fwd_bwd(request.payload, **kwargs)
        return self._response(request, queued=True)

    @_scoring
    def update(self, **kwargs: Any) -> int:
        """Queue the optimizer update over the accumulated gradients; return the train step."""
        return self._trainer.update(**kwargs)

    @_scoring
    def per_token_logps(self, items: LogprobsRequest, **kwargs: Any) -> LogprobsResponse:
        """Score rows under the live weights, in slices of rows; blocks until they are on the host.

        Raises:
          ValueError: an empty batch, or no pad_id or eos_id.
        """
        if items.pad_id is None or items.eos_id is None:
            raise ValueError("per_token_logps requires pad_id and eos_id")
        rows = {
            "prompt": np.asarray(items.prompt_tokens, np.int32),
            "completion": np.asarray(items.completion_tokens, np.int32),
        }
        for name, dtype in (("segment_ids", np.int32), ("segment_positions", np.int32), ("routed_experts", np.int16)):
            if getattr(items, name) is not None:
                rows[name] = np.asarray(getattr(items, name), dtype)
        count = len(rows["prompt"])
        if count == 0:
            raise ValueError("per_token_logps requires a non-empty batch")
        options = {
            "pad_id": items.pad_id,
            "temperature": float(items.temperature),
            "chunk_size": self._logps_chunk_size,
        }
        step = self._logps_micro_batch_size or count
        parts = []
        for start in range(0, count, step):
            named = {name: value[start : start + step] for name, value in rows.items()}
            ids = named.pop("prompt"), named.pop("completion")
            parts.append(self._trainer.fwd_only(_score_live, *ids, **named, **options))
        logps = np.asarray(jnp.concatenate(parts), np.float32)
        return LogprobsResponse(
            request_id=items.request_id, per_token_logps=logps, model_version=self._policy_version()
        )

    @_in_context
    def get_metrics(self) -> Any:
        """Return the newest step's metrics on the host; blocks until the device has them."""
        return jax.device_get(self._trainer.get_metrics())


def _score_live(model: nnx.Module, *rows: Array, **options: Any) -> Array:
    return _jitted_logps(*nnx.split(model), *rows, **options)
