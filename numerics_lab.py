"""MaxText's real engine and model, small, on virtual CPU devices: what the numerics checks measure on.

The model is the launch's own, shrunk as bench_driver --cpu-smoke shrinks it (one attention + MoE layer, 8 experts, 512
words), in float32. A `View` of a micro-batch is the GRPO loss, its gradients and each token's log-prob; one compiled
program per shape and chunk size. `which_experts` finds out which experts a token really used by changing one expert
after the other: it needs no probe inside MaxText, whose names move.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import bench_payload
import bench_plan
import bench_routing
import bench_runtime
from bench_common import BenchError
from bench_config import Setting

DEVICES = 4  # fsdp 2 x expert 2, the smallest mesh with both
ROWS, PROMPT, WIDTH = 4, 16, 64  # of the lab's own micro-batches: rows divide the mesh, a second or two per compile
HIDDEN = 72  # hidden features; no other axis of a weight is as long (heads x head_dim is 64), see Model.permute
PAYLOAD_BYTES = 2**28  # of routed_experts: 3 of 60 layers of 64 x 65,536 tokens, built in some seconds
PERTURB = -3.0  # factor on an expert's output weights; any number other than 1 shows who used it


@dataclasses.dataclass(frozen=True)
class View:
    """What one program computes of a micro-batch, on the host. log-probs and entropies in nats."""

    loss: np.float32  # the unreduced sum
    denominator: np.float32
    grads: dict[str, np.ndarray]  # empty for a forward pass
    logps: np.ndarray  # [B, C or T]
    entropy: np.ndarray
    logits: np.ndarray | None = None  # [B, T - 1 or C, V], forward passes only


class Lab:
    """The launch's model on a CPU.

    Args:
      plan: the launch's, shrunk (bench_plan.plan_launch(..., cpu_smoke=True)).
      launch: the launch's, as it is; only its payload is built.
      seed: of the lab's micro-batches.
    """

    def __init__(self, plan: bench_plan.Plan, launch: bench_plan.Plan, seed: int = 0):
        import jax

        self.plan, self.launch, self.seed, self.pad_id = plan, launch, seed, plan.job.pad_id
        if len(jax.devices()) < DEVICES:
            raise BenchError(f"{len(jax.devices())} CPU devices, {DEVICES} needed", where="JAX",
                             todo="unset XLA_FLAGS, or start no other JAX program in this process")  # fmt: skip
        self.devices = jax.devices()[:DEVICES]
        self.experts = plan.sizes.num_experts if plan.sizes.num_experts > 1 else 0
        self._models: dict[tuple[str, ...], Model] = {}
        self._trainers: dict[tuple[int, str], Trainer] = {}

    @property
    def sizes(self) -> Any:
        """Layers, top-k and vocabulary of the shrunk model."""
        return self.plan.sizes

    @functools.cached_property
    def forces_experts(self) -> bool:
        """Whether the installed MaxText can force experts in this model: MaxText 0.2.5 does in some decoder blocks."""
        if not self.experts:
            return False
        try:
            self.model().trace(self._build(self._spec(packed=True, routed=True), index=0))
        except NotImplementedError:
            return False
        return True

    def model(self, *changes: str, own_weights: bool = False) -> Model:
        """Return the lab's model with `KEY=VALUE` changes, built once; all but those of other layers share weights."""
        if changes not in self._models:
            source = None if not changes or own_weights else self.model()
            self._models[changes] = Model(self, self.settings(changes), self.devices, source)
        return self._models[changes]

    def settings(self, changes: Sequence[str] = ()) -> list[Setting]:
        """Return the MaxText settings of a lab model: the shrunk launch in float32, then the changes."""
        own = [f"base_emb_dim={HIDDEN}", f"max_target_length={WIDTH}", f"per_device_batch_size={ROWS / DEVICES}",
               "dtype=float32", "weight_dtype=float32", "grad_dtype=float32", "num_vocab_tiling=1",
               "steps=100"]  # fmt: skip
        return [*self.plan.job.settings, *(Setting(*pair.split("=", 1), "lab") for pair in [*own, *changes])]

    def trainer(self, model: Model, name: str = "") -> Trainer:
        """Return MaxText's engine around a model's weights; each name has its own, which keeps its compiled shape."""
        key = (id(model), name)
        if key not in self._trainers:
            self._trainers[key] = Trainer(model)
        return self._trainers[key]

    def launch_payload(self) -> tuple[Any, Any, list[int]]:
        """Return (spec, routing or None, layer numbers) of the launch's own micro-batch, at its own size.

        Only as many layers of routing are built as PAYLOAD_BYTES hold, the ones with the highest target load.
        """
        spec, routing = self.launch.spec, self.launch.routing
        if routing is None:
            return spec, None, []
        fits = int(max(1, PAYLOAD_BYTES // (spec.rows * spec.width * spec.top_k * 2)))
        order = sorted(range(spec.num_layers), key=lambda layer: (-(routing.targets[layer] or 0.0), layer))
        layers = sorted(order[:fits])
        targets = tuple(routing.targets[layer] for layer in layers)
        return (
            dataclasses.replace(spec, num_layers=len(layers)),
            dataclasses.replace(routing, targets=targets),
            layers,
        )

    def batch(self, packed: bool, index: int = 0) -> dict[str, Any]:
        """Return a micro-batch of the lab's size, with forced experts where MaxText takes them.

        Packed rows hold about two sequences.
        """
        return self._build(self.spec(packed), index)

    def spec(self, packed: bool) -> Any:
        """Return the PayloadSpec of the lab's micro-batches."""
        return self._spec(packed, routed=self.forces_experts)

    def _build(self, spec: Any, index: int) -> dict[str, Any]:
        layers = (None,) * spec.num_layers
        routing = bench_routing.RoutingSpec(layers, 2, 2, 1, leave_unset=True) if spec.num_experts else None
        return bench_payload.build_micro_batch(spec, routing, self.seed, index)

    def _spec(self, packed: bool, routed: bool) -> Any:
        return bench_payload.PayloadSpec(
            rows=ROWS, prompt_length=PROMPT, completion_length=WIDTH - PROMPT, packed=packed, max_segments=4,
            vocab_size=self.sizes.vocab_size, pad_id=self.pad_id, eos_id=1 if self.pad_id != 1 else 2,
            num_layers=self.sizes.num_layers, num_experts=self.experts if routed else 0, top_k=self.sizes.top_k,
            num_generations=2, lengths=f"uniform:20:{WIDTH // 2 if packed else WIDTH - 4}", with_old_logps=True,
            with_rollout_logps=False, with_ref_logps=False, with_overlong=False, row_width=WIDTH,
        )  # fmt: skip


class Model:
    """One configuration of the model with its weights on a mesh. `source` gives the weights; None draws them."""

    def __init__(self, lab: Lab, settings: list[Setting], devices: Sequence[Any], source: Model | None):
        from flax import nnx

        self.lab, self._jitted = lab, {}
        with contextlib.redirect_stdout(io.StringIO()):
            self.config = bench_runtime.initialize_config(settings)
            self.mesh = bench_runtime.make_mesh(self.config, devices)
            module = build_module(self.config, self.mesh, lab.pad_id, draw=source is None)
        # Where the head is tiled the decoder returns hidden states, not logits, and only chunks can be scored.
        self.chunk = WIDTH // 4 if self.config.num_vocab_tiling > 1 else 0
        self.graph, params, rest = nnx.split(module, nnx.Param, ...)
        if source is not None:
            params, rest = _filled(params, source.params), _filled(rest, source.rest)
        self.params, self.rest = params, rest

    @contextlib.contextmanager
    def context(self):
        """The mesh and logical axis rules MaxText's layers are traced under, as its engine enters them."""
        import jax
        from flax.core.spmd import logical_axis_rules

        with jax.set_mesh(self.mesh), logical_axis_rules(self.config.logical_axis_rules):
            yield

    def view(self, batch: Mapping[str, Any], *, chunk: int = 0, grads: bool = True, params: Any = None,
             logits: bool = False) -> View:  # fmt: skip
        """Compute a View.

        Args:
          batch: the payload's fields.
          chunk: compute_logps_chunk_size; 0 is whole rows.
          grads: whether to differentiate.
          params: other weights of the same structure.
          logits: also return them; grads must be off.
        """
        import jax

        with self.context():
            placed, run = self._place(payload_of(batch)), self._program(chunk, grads, logits)
            out = jax.device_get(run(self.params if params is None else params, self.rest, placed))
        loss, denominator, gradient, logps, entropy, scores = out
        return View(loss, denominator, flat(gradient) if grads else {}, logps, entropy, scores)

    def trace(self, batch: Mapping[str, Any]) -> None:
        """Trace the program of `view(batch)`, without compiling it, to see what MaxText says to it."""
        import jax

        with self.context():
            jax.eval_shape(self._program(0, True, False), self.params, self.rest, self._place(payload_of(batch)))

    def _program(self, *key: Any) -> Any:
        """Return the jitted `_view` for (chunk, grads, logits); it compiles once for each shape."""
        import jax

        if key not in self._jitted:
            self._jitted[key] = jax.jit(functools.partial(_view, self.graph, self.lab.pad_id, key))
        return self._jitted[key]

    def _place(self, payload: Any) -> Any:
        """Put a payload's arrays where the engine's compiled step wants them; rows that do not divide are copied."""
        import jax
        from jax.sharding import NamedSharding, PartitionSpec
        from maxtext.utils import sharding

        axes = tuple(sharding.get_input_data_sharding(self.config, self.mesh).spec)

        def put(leaf: Any) -> Any:
            size = int(np.prod([self.mesh.shape[name] for name in np.ravel(axes[0] or ()).tolist()] or [1]))
            spec = [axes[0] if leaf.shape[0] % size == 0 else None, *axes[1:]][: leaf.ndim]
            return jax.device_put(leaf, NamedSharding(self.mesh, PartitionSpec(*spec)))

        return jax.tree.map(put, payload)

    def permute(self, order: np.ndarray) -> Callable[[Any], Any]:
        """Return a function that reorders the hidden features of an array: the same model, summed in another order.

        An axis as long as the hidden state is one of its features: HIDDEN is chosen so that no other axis is.
        """
        import jax
        import jax.numpy as jnp

        def change(leaf: Any) -> Any:
            if not hasattr(leaf, "shape") or jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                return leaf
            moved = leaf
            for axis, size in enumerate(leaf.shape):
                moved = jnp.take(moved, order, axis=axis) if size == len(order) else moved
            return moved if moved is leaf else jax.device_put(moved, leaf.sharding)

        return change

    def which_experts(self, batch: Mapping[str, Any], params: Any = None) -> np.ndarray:
        """Return bool [B, T - 1 or C, experts]: whose output weights the logits after a token depend on.

        No experts in a dense model.

        Exact for a model of one layer: there a token's logits depend on its own experts and on no other token's.
        """
        params = self.params if params is None else params
        plain = self.view(batch, chunk=self.chunk, grads=False, logits=True, params=params).logits
        used = []
        for expert in range(self.lab.experts):
            other = self._perturbed(params, expert)
            changed = self.view(batch, chunk=self.chunk, grads=False, logits=True, params=other).logits
            used.append((changed != plain).any(axis=-1))
        return np.stack(used, axis=-1) if used else np.zeros((*plain.shape[:-1], 0), bool)

    def _perturbed(self, params: Any, expert: int) -> Any:
        """Return the weights with one expert's output matrix times PERTURB."""
        import jax
        import jax.numpy as jnp

        experts, found = self.lab.experts, []

        def change(path: Any, leaf: Any) -> Any:
            names = [str(getattr(part, "key", getattr(part, "name", part))) for part in path]
            if not any(name in ("wo", "['wo']") for name in names) or experts not in leaf.shape:
                return leaf
            found.append(names)
            axis = leaf.shape.index(experts)
            factor = jnp.where(jnp.arange(experts) == expert, PERTURB, 1.0).astype(leaf.dtype)
            return leaf * factor.reshape([-1 if i == axis else 1 for i in range(leaf.ndim)])

        with self.context():
            changed = jax.tree.map_with_path(change, params)
        if not found:
            raise BenchError("no expert output weights `wo` in this model", where="lab", todo="--skip routing,knobs")
        return changed


@dataclasses.dataclass(frozen=True)
class Trained:
    """What MaxText's engine has after some micro-batches and one update, on the host."""

    losses: np.ndarray  # one per micro-batch, reduced
    denominator: float
    grads: dict[str, np.ndarray]  # accumulated before the first update, unreduced
    weights: dict[str, np.ndarray]  # after the last update; float32 masters where there are any


class Trainer:
    """MaxText's training engine around a model's weights, which every `train` starts from."""

    def __init__(self, model: Model):
        import jax
        import jax.numpy as jnp
        from flax import nnx
        from maxtext.training_engine import abstract_engine, maxtext_engine

        module = nnx.merge(model.graph, *jax.tree.map(jnp.copy, (model.params, model.rest)))

        class Engine(maxtext_engine.MaxTextTrainingEngine):
            def _build_model(self, *_: Any) -> Any:
                return module

            def _build_optimizer(self, tx: Any) -> Any:
                narrow = str(self._config.weight_dtype) == "bfloat16"
                return super()._build_optimizer(bench_runtime.float32_master(tx) if narrow else tx)

        with model.mesh, contextlib.redirect_stdout(io.StringIO()):
            self.engine = Engine(model.config, mesh=model.mesh, wrap_with_tunix_adapter=True,
                                 tokenizer_pad_id=model.lab.pad_id)  # fmt: skip
        self.engine.with_loss_fn(functools.partial(_engine_loss, abstract_engine), has_aux=True)
        chunk = {"compute_logps_chunk_size": model.chunk} if model.chunk else {}
        constant = {"algo_config": plain_grpo(), "pad_id": model.lab.pad_id, "eos_id": model.lab.pad_id, **chunk}
        self.engine.with_gen_model_input_fn(lambda payload: {"train_example": payload, **constant})
        self.engine.compile(None)
        self.engine._refresh_pure_state()
        self.engine._place_state_on_mesh()
        self._start = jax.tree.map(jnp.copy, nnx.state(self.engine.state))
        self.weights = full_weights(self.engine.state)  # that every `train` starts from

    def train(
        self, batches: Sequence[Mapping[str, Any]], updates: int = 1, change: Callable[[Any], Any] | None = None,
        from_zero: bool = False,
    ) -> Trained:  # fmt: skip
        """Run fwd_bwd on each micro-batch and an update, as often as asked, and go back to the start.

        Args:
          change: maps each array of the train state (weights, masters, moments) before the first micro-batch.
          from_zero: begin with gradients of zero, so that all micro-batches take the accumulating kernel and the one
            that a first micro-batch takes need not be compiled; 0 + g is g.
        """
        import jax

        engine = self.engine
        if change is not None:
            self._set(jax.tree.map(change, self._start))
        first: list[Any] = []
        for _ in range(updates):
            if from_zero:
                self._begin_with_zero()
            for batch in batches:
                engine.fwd_bwd(payload_of(batch))
            sums = flat(engine._accumulated_grads), float(engine._accumulated_denominator)
            engine.update()
            first.append((jax.device_get(engine.get_metrics()).weighted_metrics["loss"], *sums))
        weights = full_weights(engine.state)
        self._set(self._start)
        engine.train_step = 0
        loss, grads, denominator = first[0]
        return Trained(np.asarray(loss.unreduced_sum) / np.asarray(loss.denominator), denominator, grads, weights)

    def _begin_with_zero(self) -> None:
        import jax
        import jax.numpy as jnp

        engine = self.engine
        engine._accumulated_grads = jax.tree.map(
            lambda leaf: jax.device_put(jnp.zeros(leaf.shape, engine._config.grad_dtype), leaf.sharding),
            engine._params_pure)  # fmt: skip
        engine._accumulated_denominator = jnp.float32(0)

    def _set(self, state: Any) -> None:
        """Put a train state into the engine; it is copied, because an update gives its arrays away."""
        import jax
        import jax.numpy as jnp
        from flax import nnx

        nnx.update(self.engine.state, jax.tree.map(jnp.copy, state))
        self.engine._refresh_pure_state()


def full_weights(state: Any) -> dict[str, np.ndarray]:
    """Return a train state's weights by name, float32 masters in place of the rounded weights where it has them."""
    from flax import nnx

    found = flat(nnx.state(state.model, nnx.Param))
    for path, variable in nnx.to_flat_state(nnx.state(state.optimizer)):
        if "masters" in path:
            found[".".join(map(str, path[path.index("masters") + 1 :]))] = np.asarray(variable.get_value())
    return found


def _engine_loss(classes: Any, model: Any, **inputs: Any) -> Any:
    """Return the stand-in's loss as MaxText's engine takes it, in the classes of whichever Tunix is installed."""
    import tunix_standin

    out = tunix_standin.grpo_loss_fn(model, **inputs)
    primary = classes.WeightedMetric(unreduced_sum=out.primary_loss.unreduced_sum,
                                     denominator=out.primary_loss.denominator)  # fmt: skip
    return classes.LossOutput(primary_loss=primary, aux_metrics={})


def build_module(config: Any, mesh: Any, pad_id: int, draw: bool) -> Any:
    """Return MaxText's model in its Tunix adapter; with `draw` off it has shapes and shardings for weights."""
    import jax
    from maxtext.common import common_types
    from maxtext.integration.tunix.tunix_adapter import TunixMaxTextAdapter
    from maxtext.utils import maxtext_utils_nnx, model_creation_utils

    key = jax.random.PRNGKey(config.init_weights_seed)
    create, shapes = model_creation_utils.create_nnx_abstract_model(
        config, mesh, None, common_types.MODEL_MODE_TRAIN, key)  # fmt: skip
    base = maxtext_utils_nnx.create_nnx_sharded_model(shapes, create, mesh=mesh) if draw else shapes
    with mesh:
        module = TunixMaxTextAdapter(base_model=base, pad_id=pad_id)
    module.config = None
    return module


def _filled(shapes: Any, values: Any) -> Any:
    """Return `values` in the dtypes and shardings of `shapes`, two states of the same paths."""
    import jax
    from flax import nnx

    given = {path: variable.get_value() for path, variable in nnx.to_flat_state(values)}

    def fill(path: Any, variable: Any) -> Any:
        want = variable.get_value()
        if path not in given or given[path].shape != want.shape:
            raise BenchError(f"this setting changes the weights {'.'.join(map(str, path))}", where="lab",
                             todo="compare knobs that leave the model's shape alone")  # fmt: skip
        value = given[path]
        return variable.replace(jax.device_put(value if value.dtype == want.dtype else value.astype(want.dtype),
                                               want.sharding))  # fmt: skip

    return nnx.from_flat_state([(path, fill(path, variable)) for path, variable in nnx.to_flat_state(shapes)])


def _view(graph: Any, pad_id: int, key: tuple[Any, ...], params: Any, rest: Any, example: Any) -> tuple[Any, ...]:
    import jax
    from flax import nnx

    import tunix_standin

    chunk, grads, want_logits = key

    def loss(params: Any) -> tuple[Any, Any]:
        model = nnx.merge(graph, params, rest, copy=True)
        out = tunix_standin.grpo_loss_fn(model, example, plain_grpo(), pad_id, pad_id, compute_logps_chunk_size=chunk)
        logps, entropy = score(model, example, pad_id, chunk)
        return out.primary_loss.unreduced_sum, (out.primary_loss.denominator, logps, entropy)

    if want_logits:
        model = nnx.merge(graph, params, rest, copy=True)
        logps, entropy = score(model, example, pad_id, chunk)
        return 0.0, 0.0, None, logps, entropy, logits_of(model, example, pad_id)
    if not grads:
        value, (denominator, logps, entropy) = loss(params)
        return value, denominator, None, logps, entropy, None
    (value, (denominator, logps, entropy)), gradient = jax.value_and_grad(loss, has_aux=True)(params)
    return value, denominator, gradient, logps, entropy, None


def score(model: Any, example: Any, pad_id: int, chunk: int) -> Any:
    """Return (log-probs, entropies) of a payload's completion tokens under a model."""
    import tunix_standin

    return tunix_standin.compute_per_token_logps(
        model, example.prompt_ids, example.completion_ids, pad_id=pad_id, segment_ids=example.segment_ids,
        segment_positions=example.segment_positions, routed_experts=example.routed_experts, chunk_size=chunk,
        return_entropy=True,
    )  # fmt: skip


def logits_of(model: Any, example: Any, pad_id: int) -> Any:
    """Return the logits that predict the completion tokens, float32 [B, C (packed: T - 1), V]."""
    import jax.numpy as jnp
    from flax import nnx

    import tunix_standin

    model = nnx.merge(*nnx.split(model))
    tokens, positions, mask, segments = tunix_standin.process_ids(
        example.prompt_ids, example.completion_ids, pad_id, example.segment_ids, example.segment_positions)  # fmt: skip
    options = {"positions": positions, "cache": None, "attention_mask": mask, "segment_ids": segments}
    if example.routed_experts is not None:
        options["forced_routed_experts"] = jnp.asarray(example.routed_experts, jnp.int32)
    hidden, head = tunix_standin.run_without_head(model, tokens, options)
    keep = example.completion_ids.shape[1] - (example.segment_ids is not None)
    return head(hidden[:, -keep - 1 : -1]).astype(jnp.float32)


def plain_grpo(**options: Any) -> Any:
    """Return GRPO options of the plainest kind: clipped ratio, no KL, token-mean."""
    import tunix_standin

    plain = {"temperature": 1.0, "beta": 0.0, "loss_agg_mode": "token-mean", "use_rollout_logps": False,
             "epsilon": 0.2, "epsilon_high": 0.28}  # fmt: skip
    return tunix_standin.GRPOConfig(**{**plain, **options})


def payload_of(batch: Mapping[str, Any]) -> Any:
    """Return a batch as the payload the stand-in's loss takes."""
    import tunix_standin

    return tunix_standin.RLTrainerPayload(**batch)


def flat(state: Any) -> dict[str, np.ndarray]:
    """Return path -> array of an nnx State, values on the host, floats as float32."""
    from flax import nnx

    found = {}
    for path, variable in nnx.to_flat_state(state):
        value = np.asarray(variable.get_value() if hasattr(variable, "get_value") else variable)
        found[".".join(map(str, path))] = value.astype(np.float32)
    return found
