"""The two Tunix runtimes of the driver behind one surface: `TrainerProgram`.

With Tunix from git (the trainer image) its own parser, config builder, engine factory, TrainerWorker and
algorithm are used; with the PyPI release, `tunix_standin` around the same MaxText engine. The signatures
moved several times; `_WorkerCalls` asks with `inspect` which ones are installed and is the only place that
adapts. Both produce the same step: N x fwd_bwd, one update, one metrics fetch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import bench_config
from bench_common import BenchError, mask
from bench_config import Setting

TRAINER_NODES = (  # newest first
    "tunix.experimental.examples.common.run_trainer_node",
    "tunix.experimental.examples.math_gsm8k_dist.run_trainer_node",
)


@dataclasses.dataclass
class Job:
    """What to build: a launch's argv and environment, and what the bench changed in them."""

    trainer_argv: list[str]
    orch_argv: list[str]
    trainer: Any  # argparse.Namespace of the trainer's flags
    orch: Any
    settings: list[Setting]  # MaxText keys, later ones win
    pad_id: int
    own_config: bool = False  # built from `settings`, also beside Tunix's builder: --cpu-smoke, dropped keys
    not_the_same_program: list[str] = dataclasses.field(default_factory=list)


def installed(module: str) -> bool:
    """Return whether a module can be imported, without importing it (its parents are)."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def has_tunix_experimental() -> bool:
    """Return whether the installed Tunix brings the distributed trainer (git), rather than the PyPI release."""
    spec = importlib.util.find_spec("tunix")  # tunix/__init__ imports every learner (6 s): look at its folder instead
    places = list(spec.submodule_search_locations or ()) if spec else []
    return any(os.path.exists(os.path.join(place, "experimental", "worker", "trainer_worker.py")) for place in places)


# ---------------------------------------------------------------------------------------------
# JAX's backend


def through_pathways(env: Mapping[str, str]) -> bool:
    """Return whether JAX reaches the slice through a Pathways proxy, as Tunix's K8sJaxContext decides it."""
    return "proxy" in env.get("JAX_PLATFORMS", "") and bool(env.get("JAX_BACKEND_TARGET"))


def start_backend() -> None:
    """Start JAX's backend as the trainer node's process does before it builds anything (K8sJaxContext.initialize).

    Under Pathways pathwaysutils makes the profiler trace the slice instead of this process, restores checkpoints
    through the workers where ENABLE_PATHWAYS_PERSISTENCE=1, and switches this process's compilation cache off.

    Raises:
      BenchError: the backend does not start.
    """
    import jax

    if through_pathways(os.environ):
        import pathwaysutils

        pathwaysutils.initialize()
    try:
        jax.devices()
    except RuntimeError as error:
        raise BenchError(f"JAX does not start: {' '.join(str(error).split())[:400]}",
                         where=f"JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')}",
                         todo="look at the logs of the pod's pathways-proxy and pathways-rm") from error  # fmt: skip


# ---------------------------------------------------------------------------------------------
# MaxText


def known_maxtext_keys() -> set[str]:
    """Return every key the installed MaxText's config takes."""
    from maxtext.configs import types

    return set(types.MaxTextConfig.model_fields)


def check_keys(settings: Sequence[Setting], known: set[str], drop: bool) -> tuple[list[Setting], list[str]]:
    """Return the settings the installed MaxText knows, and a line for each key that had to go.

    Raises:
      BenchError: keys it does not know, all of them, unless `drop`. Keys that only Tunix's own builder adds
        unasked go without asking, but never without a line.
    """
    unknown = [setting for setting in settings if setting.key not in known]
    asked = [setting for setting in unknown if setting.key not in bench_config.TUNIX_ONLY_KEYS]
    if asked and not drop:
        version = package_version("maxtext")
        raise BenchError(f"MaxText {version} does not know {', '.join(sorted({s.key for s in asked}))}",
                         where=asked[0].source, todo="use the trainer image's MaxText, or "
                         "--drop-unknown-maxtext-keys to run without them (another program)")  # fmt: skip
    lines = [f"MaxText key dropped, unknown here: {setting.key}={mask(setting.key, setting.value)} ({setting.source})"
             for setting in unknown]  # fmt: skip
    return [setting for setting in settings if setting.key in known], lines


def initialize_config(settings: Sequence[Setting]) -> Any:
    """Return MaxText's HyperParameters for the settings.

    Raises:
      BenchError: MaxText refuses them; its first line is quoted.
    """
    from maxtext.configs import pyconfig

    base = os.path.join(bench_config.maxtext_configs(), "base.yml")
    try:
        return pyconfig.initialize(["bench_driver", base, *map(str, settings)])
    except (ValueError, AssertionError, TypeError) as error:  # pydantic's ValidationError is a ValueError
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise BenchError(f"MaxText refuses this config: {' '.join(lines[:4])[:400]}", where="MaxText config",
                         todo="correct the key it names") from error  # fmt: skip


def make_mesh(config: Any, devices: Sequence[Any] | None = None) -> Any:
    """Return the jax Mesh of a MaxText config, as Tunix's create_maxtext_mesh does.

    Raises:
      BenchError: the mesh product is not the number of devices.
    """
    from jax.sharding import Mesh
    from maxtext.utils import maxtext_utils

    try:
        return Mesh(maxtext_utils.create_device_mesh(config, devices), config.mesh_axes)
    except (AssertionError, ValueError, NotImplementedError) as error:
        raise BenchError(f"the mesh does not fit the devices: {str(error)[:300]}", where="TRAINER_ARGV",
                         todo="make --mesh_* multiply to the JAX devices (a v7x chip is two)") from error  # fmt: skip


def make_engine(config: Any, mesh: Any, pad_id: int, float32_masters: bool = True) -> Any:
    """Return MaxText's training engine as Tunix's create_maxtext_engine builds it, with the Tunix adapter.

    Args:
      float32_masters: for bfloat16 weights, keep float32 master weights in the optimizer.
    """
    from maxtext.training_engine.maxtext_engine import MaxTextTrainingEngine

    class Engine(MaxTextTrainingEngine):
        def _build_optimizer(self, tx: Any) -> Any:
            return super()._build_optimizer(with_masters(tx, config, float32_masters))

    with mesh:
        return Engine(config, mesh=mesh, wrap_with_tunix_adapter=True, tokenizer_pad_id=pad_id)


def with_masters(tx: Any, config: Any, wanted: bool) -> Any:
    """Return the optax transformation with `float32_master` around it where wanted and the weights are bfloat16."""
    return float32_master(tx) if wanted and str(config.weight_dtype) == "bfloat16" else tx


def float32_master(inner: Any) -> Any:
    """Return an optax transformation that keeps float32 masters of narrower parameters and float32 moments.

    At a learning rate of 1e-6 an update is smaller than a bfloat16 ulp of the weight, so without masters
    nothing would be trained (tunix.utils.maxtext_utils). Leaves that are float32 already are not copied:
    the copy would alias the donated parameter.
    """
    import jax
    import jax.numpy as jnp
    import optax

    def full(params: Any, masters: Any) -> Any:
        return jax.tree.map(lambda p, m: p if m is None else m, params, masters)

    def init(params: Any) -> Any:
        masters = jax.tree.map(lambda p: None if p.dtype == jnp.float32 else p.astype(jnp.float32), params)
        return {"masters": masters, "inner": inner.init(full(params, masters))}

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        wide = full(params, state["masters"])
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        updates, new_inner = inner.update(grads, state["inner"], wide, **extra)
        moved = optax.apply_updates(wide, updates)
        masters = jax.tree.map(lambda p, m: None if p.dtype == jnp.float32 else m, params, moved)
        # optax.apply_updates adds in the wider type and casts back, so the parameter becomes its rounded master.
        steps = jax.tree.map(lambda p, m: m - p.astype(jnp.float32), params, moved)
        return steps, {"masters": masters, "inner": new_inner}

    return optax.GradientTransformationExtraArgs(init, update)


# ---------------------------------------------------------------------------------------------
# The program


_WORKER_METHODS = "initialize compile with_loss_fn with_gen_model_input_fn fwd_bwd update get_metrics stop".split()
_SCORING_METHODS = ("model_scope", "per_token_logps")  # of the engine, for the worker's log-prob pass
_STAGING_METHODS = "stage_fwd_bwd fwd_bwd_staged apply_deferred_update".split()


class _WorkerCalls:
    """Calls a TrainerWorker of whichever Tunix version is installed; the one place that adapts.

    Known: `fwd_bwd(payload=None, **kw)` that also updates when told `apply_optimizer` (August 2026, first),
    `fwd_bwd(payload)` with an `update` of its own, `fwd_bwd(request: TrainRequest)`; a constructor with and
    without `execution_context`; `get_metrics` on the device and off it.
    """

    def __init__(self, worker_class: type, datatypes: Any, factory: Callable[[], Any], mesh: Any, **options: Any):
        accepted = inspect.signature(worker_class.__init__).parameters
        self.binds_mesh = "execution_context" in accepted
        if self.binds_mesh:
            options["execution_context"] = mesh
        self.ignored = sorted(name for name in options if name not in accepted)
        self._mesh = contextlib.nullcontext if self.binds_mesh else (lambda: mesh)
        with self._mesh():
            self.worker = worker_class(factory, **{k: v for k, v in options.items() if k in accepted})
        missing = [name for name in _WORKER_METHODS if not callable(getattr(self.worker, name, None))]
        parameters = list(inspect.signature(self.worker.fwd_bwd).parameters.values())
        first = parameters[0] if parameters else None
        if missing or first is None or first.name not in ("payload", "request"):
            what = ", ".join(missing) or f"fwd_bwd({first.name if first else ''}) of a form known here"
            raise BenchError(f"the installed Tunix's TrainerWorker has no {what}", where=worker_class.__module__,
                             todo="use a Tunix of August to October 2026")  # fmt: skip
        self._request = getattr(datatypes, "TrainRequest", None) if first.name == "request" else None
        if first.name == "request" and self._request is None:
            raise BenchError("fwd_bwd takes a TrainRequest that tunix...datatypes does not have", where="Tunix")
        self.updates_inside = first.name == "payload" and first.default is None
        self.stages = all(hasattr(self.worker, name) for name in _STAGING_METHODS)

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the worker under the mesh."""
        with self._mesh():
            return getattr(self.worker, name)(*args, **kwargs)

    def argument(self, method: str, payload: Any) -> Any:
        """Return the payload as a method of the worker takes it: wrapped where its first parameter is a request."""
        first = next(iter(inspect.signature(getattr(self.worker, method)).parameters), "")
        return self._wrapped(payload) if first == "request" and self._request is not None else payload

    def _wrapped(self, payload: Any) -> Any:
        named = {"request_id": "bench"} if "request_id" in inspect.signature(self._request).parameters else {}
        return self._request(payload=payload, **named)

    def fwd_bwd(self, payload: Any, last: bool) -> Any:
        """Run one micro-batch; `last` says that the update follows."""
        if self._request is not None:
            return self.call("fwd_bwd", self._wrapped(payload))
        if self.updates_inside:
            return self.call("fwd_bwd", payload, accumulate_gradients=True, apply_optimizer=last)
        return self.call("fwd_bwd", payload)

    def update(self) -> Any:
        """Run the optimizer update, where fwd_bwd has not done so."""
        return None if self.updates_inside else self.call("update")


class TrainerProgram:
    """Tunix's TrainerWorker around MaxText's engine, driven as the orchestrator drives it."""

    def __init__(self, runtime: str, calls: _WorkerCalls, engine: Callable[[], Any], mesh: Any, payload_class: type,
                 config: Any, logps_request: Any = None):  # fmt: skip
        self.runtime = runtime  # "tunix" or "standin"
        self.calls, self.mesh, self._config = calls, mesh, config
        self._engine, self._payload_class, self._logps_request = engine, payload_class, logps_request

    @property
    def engine(self) -> Any:
        """MaxText's engine inside the worker; some workers make it when they are initialized."""
        return self._engine()

    @property
    def config(self) -> Any:
        """The resolved MaxText config, the engine's own where Tunix's trainer node built it."""
        return self._config if self._config is not None else getattr(self.engine, "_config", None)

    def start(self, loss_fn: Callable[..., Any], model_input_fn: Callable[[Any], dict[str, Any]]) -> None:
        """Bring the worker up in the orchestrator's order; compile(None) defers to the first fwd_bwd payload."""
        self.calls.call("initialize")
        self.calls.call("compile", None)
        self.calls.call("with_loss_fn", loss_fn, has_aux=True)
        self.calls.call("with_gen_model_input_fn", model_input_fn)

    def payload(self, batch: Mapping[str, Any]) -> Any:
        """Return a micro-batch, a dict of the payload's own field names, as Tunix's payload object.

        Raises:
          BenchError: the installed payload class lacks a field the batch fills, or needs one it has not.
        """
        import numpy as np

        fields = {field.name: field for field in dataclasses.fields(self._payload_class)}
        lost = sorted(name for name, value in batch.items() if value is not None and name not in fields)
        if lost:
            raise BenchError(f"the installed Tunix's RLTrainerPayload has no {', '.join(lost)}", where="payload",
                             todo="use a newer Tunix, or --routing-load none and padded rows")  # fmt: skip
        values = {name: value for name, value in batch.items() if name in fields}
        whole = np.concatenate([batch["prompt_ids"], batch["completion_ids"]], axis=1)
        scored = np.concatenate([np.zeros_like(batch["prompt_mask"]), batch["completion_mask"]], axis=1)
        older = {"token_ids": whole, "token_mask": np.ones_like(scored), "loss_mask": scored}  # August 2026
        for name, field in fields.items():
            required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
            if name not in values and required:
                if name not in older:
                    raise BenchError(f"the installed Tunix's RLTrainerPayload needs {name}", where="payload",
                                     todo="extend bench_runtime.TrainerProgram.payload")  # fmt: skip
                values[name] = older[name]
        payload = self._payload_class(**values)
        _make_pytree(payload)
        return payload

    def fwd_bwd(self, payload: Any, last: bool) -> None:
        """Dispatch one micro-batch."""
        self.calls.fwd_bwd(payload, last)

    def update(self) -> None:
        """Dispatch the optimizer update."""
        self.calls.update()

    def wait_for_update(self) -> None:
        """Block until the update has finished on the device: its step counter comes out of the same executable."""
        import jax

        counter = getattr(getattr(self.engine, "optimizer", None), "step", None)
        if counter is not None:
            jax.block_until_ready(counter[...] if hasattr(counter, "__getitem__") else counter)

    def metrics(self) -> dict[str, list[float]]:
        """Fetch the step's metrics (blocks) and return them reduced: one value per micro-batch or update."""
        import jax

        buffer = jax.device_get(self.calls.call("get_metrics"))
        found = {name: _floats(metric.unreduced_sum, metric.denominator)
                 for name, metric in getattr(buffer, "weighted_metrics", {}).items()}  # fmt: skip
        found.update({name: _floats(value, 1.0) for name, value in getattr(buffer, "scalar_metrics", {}).items()})
        return found

    def per_token_logps(self, batch: Mapping[str, Any], temperature: float, pad_id: int) -> Any:
        """Return the policy's per-token log-probs, float32 [B, C] (packed: [B, T]), by the worker's own pass.

        Raises:
          BenchError: the installed worker has no such pass, or calls what the installed MaxText's engine lacks.
        """
        if self._logps_request is None or not hasattr(self.calls.worker, "per_token_logps"):
            raise BenchError("the installed Tunix's TrainerWorker has no per_token_logps", where="Tunix",
                             todo="--no-use_rollout_logps, or --sampler-logps synthetic")  # fmt: skip
        # Tunix's worker scores through model_scope, or earlier through per_token_logps; MaxText 0.2.5 has neither, and
        # the AttributeError would leave the worker in ERROR for good.
        if self.runtime == "tunix" and not any(hasattr(self.engine, name) for name in _SCORING_METHODS):
            raise BenchError(f"the installed MaxText's engine has none of {', '.join(_SCORING_METHODS)}",
                             where="MaxText", todo="use a newer MaxText, or --no-use_rollout_logps and "
                             "--sampler-logps synthetic")  # fmt: skip
        known = {field.name for field in dataclasses.fields(self._logps_request)}
        values = {"prompt_tokens": batch["prompt_ids"], "completion_tokens": batch["completion_ids"],
                  "temperature": temperature, "model_role": "actor", "pad_id": pad_id, "eos_id": pad_id,
                  "segment_ids": batch.get("segment_ids"), "segment_positions": batch.get("segment_positions"),
                  "routed_experts": batch.get("routed_experts"), "request_id": "bench"}  # fmt: skip
        request = self._logps_request(**{name: value for name, value in values.items() if name in known})
        return self.calls.call("per_token_logps", request).per_token_logps

    def stop(self) -> None:
        """Stop the worker; a second call, or one after an error, is harmless."""
        with contextlib.suppress(RuntimeError):
            self.calls.call("stop")


def _make_pytree(payload: Any) -> None:
    """Register the payload's class as a pytree where it is none (Tunix of August 2026).

    MaxText's engine traces a payload's arrays; an unregistered object would be closed over as a constant, and
    every micro-batch would compile a program of its own.
    """
    import jax

    if jax.tree_util.all_leaves([payload]):
        names = [field.name for field in dataclasses.fields(payload)]
        static = [name for name in names if name in ("metadata", "num_segments")]
        jax.tree_util.register_dataclass(type(payload), [name for name in names if name not in static], static)


def _floats(total: Any, weight: Any) -> list[float]:
    import numpy as np

    totals, weights = np.broadcast_arrays(np.asarray(total, np.float64), np.asarray(weight, np.float64))
    return [float(t / w) if w else 0.0 for t, w in zip(totals.ravel(), weights.ravel(), strict=True)]


EngineMaker = Callable[[Any, Any, int, bool], Any]  # (MaxText config, mesh, pad id, float32 masters) -> engine


def build_program(
    job: Job, devices: Sequence[Any] | None = None, make_engine: EngineMaker | None = None
) -> TrainerProgram:
    """Build and start the program with whichever Tunix is installed.

    Args:
      devices: of the mesh; None takes all of this process. Given ones need a job with own_config.
      make_engine: builds the engine of a job with own_config; None takes this module's.

    Raises:
      BenchError: what is missing, or what MaxText or the mesh refuses.
    """
    return (_build_tunix if has_tunix_experimental() else _build_standin)(job, devices, make_engine)


def _own_engine(
    job: Job, devices: Sequence[Any] | None, maker: EngineMaker | None
) -> tuple[Any, Any, Callable[[], Any]]:
    """Return (config, mesh, engine factory) from the job's own settings."""
    config = initialize_config(job.settings)
    mesh, make = make_mesh(config, devices), maker or make_engine
    return config, mesh, lambda: make(config, mesh, job.pad_id, job.trainer.maxtext_fp32_master_weights)


def _kept(factory: Callable[[], Any]) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return the factory, and a function that returns what it made; workers hold the engine privately."""
    made: list[Any] = []

    def make() -> Any:
        made.append(factory())
        return made[-1]

    return make, lambda: made[-1]


def _build_standin(job: Job, devices: Sequence[Any] | None, maker: EngineMaker | None) -> TrainerProgram:
    import tunix_standin

    tunix_standin.install()
    config, mesh, factory = _own_engine(job, devices, maker)
    factory, engine = _kept(factory)
    calls = _WorkerCalls(tunix_standin.TrainerWorker, tunix_standin, factory, mesh, worker_id=job.trainer.worker_id,
                         logps_chunk_size=job.trainer.compute_logps_chunk_size,
                         logps_micro_batch_size=job.trainer.compute_logps_micro_batch_size)  # fmt: skip
    program = TrainerProgram("standin", calls, engine, mesh, tunix_standin.RLTrainerPayload, config,
                             tunix_standin.LogprobsRequest)  # fmt: skip
    algo = tunix_standin.GRPOConfig(**grpo_options(tunix_standin.GRPOConfig, job))
    # Assemblers have no eos_id, so the orchestrator hands pad_id for both (facts of configure_worker).
    program.start(tunix_standin.grpo_loss_fn, tunix_standin.build_gen_model_input_fn(algo, job.pad_id, job.pad_id))
    return program


def grpo_options(config_class: type, job: Job) -> dict[str, Any]:
    """Return the orchestrator's GRPO options that a config class has.

    Raises:
      BenchError: an option that was asked for and that this class lacks.
    """
    fields = {field.name for field in dataclasses.fields(config_class)}
    defaults = vars(bench_config.parse_orch_argv([]))
    wanted = {name: value for name, value in vars(job.orch).items() if name in _GRPO_NAMES}
    lost = sorted(name for name, value in wanted.items() if name not in fields and value != defaults[name])
    if lost:
        raise BenchError(f"this Tunix's GRPOConfig has no {', '.join(lost)}", where="ORCH_ARGV",
                         todo="use the Tunix line the launch was made for")  # fmt: skip
    return {name: value for name, value in wanted.items() if name in fields}


_GRPO_NAMES = {
    "beta", "epsilon", "epsilon_high", "epsilon_c", "loss_agg_mode", "loss_algo", "advantage_estimator", "kl_loss_mode",
    "kl_clamp_value", "num_iterations", "num_generations", "temperature", "use_rollout_logps", "overlong_loss_masking",
    "seq_logprob_error_threshold", "truncated_importance_sampling_type", "truncated_importance_sampling_ratio_min",
    "truncated_importance_sampling_ratio", "sampler_is", "sampler_is_threshold", "sampler_rs", "sampler_rs_min",
    "sampler_rs_max", "force_on_policy_ratio", "force_compute_kl", "log_sampler_trainer_agreement",
}  # fmt: skip


# ---------------------------------------------------------------------------------------------
# Tunix from git


def payload_fields() -> set[str] | None:
    """Return the field names of the installed Tunix's RLTrainerPayload; None where the stand-in serves."""
    if not has_tunix_experimental():
        return None
    payload = _need("tunix.experimental.common.datatypes", "RLTrainerPayload").RLTrainerPayload
    return {field.name for field in dataclasses.fields(payload)}


def pad_id(trainer_argv: Sequence[str], shrunk: bool) -> int:
    """Return the pad token id: the tokenizer's, as Tunix resolves it; 0 for a shrunk vocabulary or without Tunix."""
    if shrunk or not installed("tunix.utils.maxtext_utils"):
        return 0
    trainer = bench_config.parse_trainer_argv(trainer_argv)
    names = trainer.model_id, trainer.tokenizer_path, trainer.model_dir
    return int(_need("tunix.utils.maxtext_utils", "get_tokenizer_pad_id").get_tokenizer_pad_id(*names))


def _build_tunix(job: Job, devices: Sequence[Any] | None, maker: EngineMaker | None) -> TrainerProgram:
    datatypes = _need("tunix.experimental.common.datatypes", "RLTrainerPayload")
    worker_module = _need("tunix.experimental.worker.trainer_worker", "TrainerWorker")
    loss_fn, model_input_fn = _tunix_algorithm(job)
    config, mesh, factory = _tunix_engine(job, devices, maker)
    factory, engine = _kept(factory)
    calls = _WorkerCalls(worker_module.TrainerWorker, datatypes, factory, mesh, worker_id=job.trainer.worker_id,
                         logps_chunk_size=job.trainer.compute_logps_chunk_size,
                         logps_micro_batch_size=job.trainer.compute_logps_micro_batch_size)  # fmt: skip
    program = TrainerProgram("tunix", calls, engine, mesh, datatypes.RLTrainerPayload, config,
                             getattr(datatypes, "LogprobsRequest", None))  # fmt: skip
    if "logps_chunk_size" in calls.ignored and job.trainer.compute_logps_chunk_size:
        model_input_fn = _with_chunk_size(model_input_fn, job.trainer.compute_logps_chunk_size)
    program.start(loss_fn, model_input_fn)
    return program


def _need(module: str, *names: str) -> Any:
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise BenchError(f"cannot import {module}: {error}", where="Tunix", todo="is the checkout whole?") from error
    missing = [name for name in names if not hasattr(found, name)]
    if missing:
        raise BenchError(f"{module} has no {', '.join(missing)}", where="Tunix", todo="use a newer Tunix")
    return found


def _tunix_engine(
    job: Job, devices: Sequence[Any] | None, maker: EngineMaker | None
) -> tuple[Any, Any, Callable[[], Any]]:
    """Return (config or None, mesh, engine factory): the trainer node's own, unless the job's config is ours."""
    for name in () if job.own_config else TRAINER_NODES:
        node = _need(name) if installed(name) else None
        if hasattr(node, "_create_trainer_factory") and hasattr(node, "_parse_args"):
            argv = _without_runtime_flags(job.trainer_argv)
            # As bench_config has it: the engine's profiler counts micro-steps, and the bench traces whole steps.
            argv += ["--profiler_steps=0"] if job.trainer.profiler_steps else []
            factory, mesh = node._create_trainer_factory(node._parse_args(argv))
            return None, mesh, factory
    if not job.own_config:
        job.not_the_same_program.append("the installed Tunix has no trainer node with a MaxText backend: config and "
                                        "engine are built here")  # fmt: skip
    return _own_engine(job, devices, maker)


def _without_runtime_flags(argv: Sequence[str]) -> list[str]:
    """Return an argv without the flags of the process runtime, and without the words that are their values."""
    kept, value_follows = [], False
    for word in argv:
        name, equals, _ = word.partition("=")
        if name.lstrip("-") in bench_config.RUNTIME_FLAGS:
            value_follows = not equals
            continue
        if not value_follows or word.startswith("--"):
            kept.append(word)
        value_follows = False
    return kept


def _tunix_algorithm(job: Job) -> tuple[Callable[..., Any], Callable[[Any], dict[str, Any]]]:
    """Return (loss, model input function) as the orchestrator of ORCH_ARGV would set them."""
    if installed("tunix.rl.algorithm_config") and hasattr(_need("tunix.rl.algorithm_config"), "GRPOConfig"):
        options = grpo_options(_need("tunix.rl.algorithm_config", "GRPOConfig").GRPOConfig, job)
        adapter = _need("tunix.experimental.orchestrator.algorithm_adapter", "GRPOAdapter").GRPOAdapter
        algo = adapter(algo_config=_need("tunix.rl.algorithm_config").GRPOConfig(**options))
        return algo.loss_fn(), algo.build_gen_model_input_fn(job.pad_id, job.pad_id)
    # August 2026: the orchestrator script built a plain namespace, which algo_core reads by attribute.
    options = {name: value for name, value in vars(job.orch).items() if name in _GRPO_NAMES}
    options["epsilon_high"] = options["epsilon"] if options["epsilon_high"] is None else options["epsilon_high"]
    config = dataclasses.make_dataclass("AlgoConfig", list(options), frozen=True)(**options)
    constant = {"algo_config": config, "pad_id": job.pad_id, "eos_id": job.pad_id}
    loss_fn = _need("tunix.rl.algo_core", "grpo_loss_fn").grpo_loss_fn
    return loss_fn, lambda payload: {"train_example": payload, **constant}


def _with_chunk_size(model_input_fn: Callable[[Any], dict[str, Any]], size: int) -> Callable[[Any], dict[str, Any]]:
    """Add the chunk size that a TrainerWorker without logps_chunk_size does not pass on."""
    return lambda payload: {**model_input_fn(payload), "compute_logps_chunk_size": size}


# ---------------------------------------------------------------------------------------------
# What ran


class CompileLog:
    """Every XLA compile, or load from the compilation cache, since it was made or last asked."""

    def __init__(self) -> None:
        import jax.monitoring

        self.events: list[tuple[str, float]] = []
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, seconds: float, **details: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            self.events.append((str(details.get("fun_name", "unknown")), seconds))

    def take(self) -> list[tuple[str, float]]:
        """Return (program name, seconds) of the compiles since the last call."""
        events, self.events = self.events, []
        return events

    def close(self) -> None:
        """Stop listening."""
        import jax.monitoring

        jax.monitoring.unregister_event_duration_listener(self._on_event)


def package_version(package: str) -> str | None:
    """Return an installed distribution's version; None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    """Return the versions that decide what was measured, and git revisions where the packages came from git."""
    packages = "jax jaxlib libtpu maxtext google-tunix flax optax numpy pathwaysutils".split()
    found = {name: package_version(name) for name in packages}
    for package in ("maxtext", "tunix"):
        found[f"{package}_git_revision"] = git_revision(package)
    return found


def git_revision(package: str) -> str | None:
    """Return the commit a package was installed from, or whose checkout it is imported from; None if neither."""
    import json
    import subprocess

    for name in {"tunix": ("google-tunix", "tunix")}.get(package, (package,)):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError, ValueError, TypeError):
            direct = json.loads(importlib.metadata.distribution(name).read_text("direct_url.json") or "null")
            if direct and direct.get("vcs_info"):
                return direct["vcs_info"].get("commit_id")
    spec = importlib.util.find_spec(package)
    places = list(spec.submodule_search_locations or ()) if spec else []
    if not places or "site-packages" in places[0]:
        return None
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["git", "-C", places[0], "rev-parse", "HEAD"]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10)
        return answer.stdout.strip() or None
    return None
