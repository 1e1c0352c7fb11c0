"""Stand in for the Tunix modules that the Tunix release on PyPI lacks, so that MaxText's own engine can train.

MaxText 0.2.5 imports four names from Tunix that google-tunix 0.1.7 does not have; `install()` puts them in
place. The rest is what an orchestrator would bring: the worker around the engine, the GRPO options of both
lines of Tunix development, and the GRPO loss with chunked log-probs, packed rows and forced experts. Model,
MoE layers and optimizer are MaxText's own. Delete this file the day the release has these modules:
`install()` refuses to run beside a real `tunix.experimental`. A library: no main, no output.

How a driver wires it (the worker enters the mesh in every method, and to build the engine):

    tunix_standin.install()                                  # before anything imports MaxText's engine
    from maxtext.training_engine.maxtext_engine import MaxTextTrainingEngine
    worker = TrainerWorker(
        lambda: MaxTextTrainingEngine(cfg, mesh=mesh, wrap_with_tunix_adapter=True, tokenizer_pad_id=pad_id),
        logps_chunk_size=512, execution_context=mesh)
    worker.initialize()
    worker.compile(None)                                     # builds nothing yet: the first fwd_bwd does
    worker.with_loss_fn(grpo_loss_fn, has_aux=True)
    worker.with_gen_model_input_fn(build_gen_model_input_fn(GRPOConfig(temperature=1.0), pad_id, eos_id))
    for payload in micro_batches:                            # RLTrainerPayload of numpy arrays
        worker.fwd_bwd(TrainRequest(payload=payload))
    worker.update()
    metrics = worker.get_metrics()                           # blocks; .weighted_metrics, .scalar_metrics
    worker.stop()

Errors: BenchError for options, batches and models that do not fit together; RuntimeError for a worker in
the wrong state, as in Tunix. An exception in compile, fwd_bwd, update or per_token_logps leaves it in ERROR.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import importlib.machinery
import importlib.util
import sys
import threading
import time
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, struct

from grpo_loss import (
    GRPOConfig,
    LossOutput,
    WeightedMetric,
    build_gen_model_input_fn,
    compute_per_token_logps,
    grpo_loss_fn,
    process_ids,
    run_without_head,
    wrong,
)

__all__ = [  # the stand-in is one surface: what an orchestrator brings is found here
    "GRPOConfig", "LogprobsRequest", "LogprobsResponse", "LossOutput", "RLTrainerPayload", "Response", "TrainRequest",
    "TrainerPayload", "TrainerWorker", "WeightedMetric", "WorkerState", "build_gen_model_input_fn",
    "compute_per_token_logps", "grpo_loss_fn", "install", "process_ids", "run_without_head",
]  # fmt: skip

Array = Any  # a numpy or JAX array


# ---- The names MaxText imports, with LossOutput and WeightedMetric of grpo_loss


@struct.dataclass(frozen=True, kw_only=True)
class TrainerPayload:
    """The empty base of payloads."""


@struct.dataclass(frozen=True, kw_only=True)
class RLTrainerPayload(TrainerPayload):
    """One micro-batch: B rows of P prompt and C completion columns, T = P + C. Packed rows: P = 0, C = T.

    ids int32 [B, P] and [B, C]; masks, log-probs, weights float32 [B, C]; advantages [B, C] or [B];
    segment_ids (0 is padding) and segment_positions int32 [B, T], packed rows only; overlong float32 [B], or
    [B, T] when packed; routed_experts int16 [B, T, layers, top_k], -1 unset. The last three are static: a
    new value compiles again. num_segments bounds the segments of a row from above, padding included.
    """

    prompt_ids: Array
    prompt_mask: Array
    completion_ids: Array
    completion_mask: Array
    advantages: Array
    segment_ids: Array = None
    segment_positions: Array = None
    ref_per_token_logps: Array = None
    old_per_token_logps: Array = None
    sampler_is_weights: Array = None
    rollout_per_token_logps: Array = None
    overlong: Array = None
    routed_experts: Array = None
    returns: Array = None
    old_values: Array = None
    num_segments: int | None = struct.field(default=None, pytree_node=False)
    sampler_agreement_applied: bool = struct.field(default=False, pytree_node=False)
    metadata: dict[str, Any] = struct.field(default_factory=dict, pytree_node=False)


_DATATYPES = "tunix.experimental.common.datatypes"


def install() -> None:
    """Make the four names importable where MaxText looks for them; a second call changes nothing.

    An installed google-tunix keeps all it has, but its top module, which imports every learner and sampler
    (6 s), runs only once an attribute of it is asked for. Without google-tunix an empty `tunix` is made.

    Raises:
      BenchError: the installed Tunix has a `tunix.experimental`, or loss classes of its own.
    """
    if getattr(sys.modules.get(_DATATYPES), "RLTrainerPayload", None) is RLTrainerPayload:
        return
    search = list((sys.modules.get("tunix") or _late_package("tunix")).__path__)
    if "tunix.experimental" in sys.modules or importlib.machinery.PathFinder.find_spec("tunix.experimental", search):
        raise wrong("the installed Tunix has tunix.experimental", "use Tunix's own", where="tunix_standin")
    utils = importlib.import_module("tunix.sft.utils") if search else _new_module("tunix.sft.utils")
    if hasattr(utils, "LossOutput"):
        raise wrong("tunix.sft.utils has its own LossOutput", "install google-tunix 0.1.7", where="tunix_standin")
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
    module.__path__, module.__spec__ = [], importlib.machinery.ModuleSpec(name, None, is_package=True)
    if parent:
        setattr(sys.modules.get(parent) or _new_module(parent), child, module)
    sys.modules[name] = module
    return module


# ---- The worker

_NEXT_STATES = {
    "PENDING": ("INITIALIZING", "STOPPED", "ERROR"),
    "INITIALIZING": ("READY", "STOPPED", "ERROR"),
    "COMPILING": ("READY", "STOPPED", "ERROR"),
    "READY": ("COMPILING", "SYNCING", "DRAINING", "STOPPED", "ERROR"),
    "SYNCING": ("READY", "STOPPED", "ERROR"),
    "DRAINING": ("STOPPED", "ERROR"),
    "STOPPED": (),
    "ERROR": ("STOPPED",),
}
WorkerState = enum.StrEnum("WorkerState", {name: name for name in _NEXT_STATES})


@dataclasses.dataclass(kw_only=True)
class _Message:
    request_id: str = ""
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(kw_only=True)
class Response(_Message):
    """An answer: the request's id, and what the worker says about itself."""

    error: Any = None


@dataclasses.dataclass(kw_only=True)
class TrainRequest(_Message):
    """One micro-batch to train on."""

    payload: RLTrainerPayload


@dataclasses.dataclass(kw_only=True)
class LogprobsRequest(_Message):
    """Rows to score under the live weights: tokens as in a payload, packed or padded."""

    prompt_tokens: Array
    completion_tokens: Array
    temperature: float
    pad_id: int | None = None
    eos_id: int | None = None
    segment_ids: Array = None
    segment_positions: Array = None
    routed_experts: Array = None
    model_role: str = "actor"


@dataclasses.dataclass(kw_only=True)
class LogprobsResponse(Response):
    """Log-probs on the host, float32 [B, C], and the version of the weights that gave them."""

    per_token_logps: np.ndarray
    model_version: int = 0


def _inside(method: Callable) -> Callable:
    """Run a method inside the worker's execution context, entered once per thread however deep the calls."""

    @functools.wraps(method)
    def call(self: TrainerWorker, *args: Any, **kwargs: Any) -> Any:
        with self._context():
            return method(self, *args, **kwargs)

    return call


def _running(method: Callable) -> Callable:
    """Run a method that needs READY; any exception in it leaves the worker in ERROR for good."""

    @_inside
    @functools.wraps(method)
    def call(self: TrainerWorker, *args: Any, **kwargs: Any) -> Any:
        self._ensure_ready()
        try:
            result = method(self, *args, **kwargs)
        except Exception as error:
            self._last_error, self.state = str(error), WorkerState.ERROR
            raise
        self._last_error = None
        return result

    return call


class TrainerWorker:
    """The orchestrator's handle on a trainer, with the methods and states of Tunix's own.

    Args:
      trainer_factory: builds the engine; called at once, inside the execution context.
      logps_chunk_size: positions per slice of the vocabulary head, in the loss and in `per_token_logps`;
        0 scores whole rows at once.
      logps_micro_batch_size: rows per forward of `per_token_logps`; None is all of them.
      execution_context: the mesh or another context manager, a function that returns one, a sequence of
        those, or None; every method runs inside.
    """

    def __init__(
        self, trainer_factory: Callable[[], Any], *, worker_id: str = "trainer_worker", logps_chunk_size: int = 0,
        logps_micro_batch_size: int | None = None, execution_context: Any = None,
    ):  # fmt: skip
        self._execution_context, self._entered = execution_context, threading.local()
        self._worker_id, self._state, self._last_error = worker_id, WorkerState.PENDING, None
        self._logps_chunk_size, self._logps_micro_batch_size = logps_chunk_size, logps_micro_batch_size
        with self._context():
            self._trainer = trainer_factory()

    @contextlib.contextmanager
    def _context(self):
        with contextlib.ExitStack() as stack:
            if not getattr(self._entered, "now", False):
                given = self._execution_context
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
        if new != self._state and new not in _NEXT_STATES[self._state]:
            raise RuntimeError(f"Invalid transition from {self._state} to {new}")
        self._state = new

    def _about(self) -> dict[str, Any]:
        version = int(getattr(self._trainer, "policy_version", 0))
        return {"worker_id": self._worker_id, "state": self.state.value, "policy_version": version}

    def _response(self, request: Any = None, **metadata: Any) -> Response:
        asked = (request.metadata or {}) if request else {}
        return Response(request_id=request.request_id if request else "", metadata=self._about() | metadata | asked)

    def _ensure_ready(self) -> None:
        if self.state == WorkerState.PENDING:
            self.initialize()
        if self.state != WorkerState.READY:
            raise RuntimeError(f"TrainerWorker is not ready: {self.state}.")

    def initialize(self) -> Response:
        """Make the worker READY."""
        if self.state != WorkerState.READY:
            self.state = WorkerState.INITIALIZING
            self.state = WorkerState.READY
        return self._response(initialized=True)

    @_running
    def compile(self, dummy_data: Any = None) -> Response:
        """Compile for a payload of these shapes; without one the engine compiles on its first fwd_bwd."""
        self.state = WorkerState.COMPILING
        self._trainer.compile(dummy_data)
        self.state = WorkerState.READY
        return self._response(compiled=True)

    def start(self) -> Response:
        """Check that the worker can be used."""
        self._ensure_ready()
        return self._response(started=True)

    @_inside
    def stop(self) -> Response:
        """Close the engine; the second call does nothing."""
        if self.state != WorkerState.STOPPED:
            if self.state == WorkerState.READY:
                self.state = WorkerState.DRAINING
            self._trainer.close()
            self.state = WorkerState.STOPPED
        return self._response(stopped=True)

    def info(self) -> types.SimpleNamespace:
        """Return worker_id, roles and resources."""
        resources = {"trainer": type(self._trainer).__name__, "policy_version": self._about()["policy_version"]}
        return types.SimpleNamespace(worker_id=self._worker_id, roles=frozenset({"trainer"}), resources=resources)

    def heartbeat(self) -> types.SimpleNamespace:
        """Return state, policy_version, last_error and heartbeat_unix_s."""
        health = {"policy_version": self._about()["policy_version"], "last_error": self._last_error}
        return types.SimpleNamespace(state=self.state, heartbeat_unix_s=time.time(), **health)

    @_inside
    def with_loss_fn(self, loss_fn: Callable, has_aux: bool = False) -> Response:
        """Set the loss of fwd_bwd."""
        self._trainer.with_loss_fn(loss_fn, has_aux)
        return self._response(loss_fn_configured=True)

    @_inside
    def with_gen_model_input_fn(self, gen_model_input_fn: Callable[[Any], dict[str, Any]]) -> Response:
        """Set what maps a payload to the loss's arguments; the chunk size is added unless it is there."""
        chunk = {"compute_logps_chunk_size": self._logps_chunk_size} if self._logps_chunk_size > 0 else {}
        self._trainer.with_gen_model_input_fn(lambda payload: chunk | gen_model_input_fn(payload))
        return self._response(gen_model_input_fn_configured=True)

    @_running
    def fwd_bwd(self, request: TrainRequest, **kwargs: Any) -> Response:
        """Queue one forward and backward pass; gradients accumulate until `update`."""
        kwargs.pop("skip_jit", None)
        self._trainer.fwd_bwd(request.payload, **kwargs)
        return self._response(request, queued=True)

    @_running
    def update(self, **kwargs: Any) -> int:
        """Queue the optimizer update over the accumulated gradients; return the train step."""
        return self._trainer.update(**kwargs)

    @_running
    def per_token_logps(self, items: LogprobsRequest, **kwargs: Any) -> LogprobsResponse:
        """Score rows under the live weights, some rows at a time; blocks until they are on the host.

        Raises:
          ValueError: an empty batch, or no pad_id or eos_id.
        """
        rows = {
            name: np.asarray(getattr(items, name), np.int16 if name == "routed_experts" else np.int32)
            for name in ("prompt_tokens", "completion_tokens", "segment_ids", "segment_positions", "routed_experts")
            if getattr(items, name) is not None
        }
        count = len(rows["prompt_tokens"])
        if count == 0 or items.pad_id is None or items.eos_id is None:
            raise ValueError("per_token_logps requires rows, pad_id and eos_id")
        constant = {"pad_id": items.pad_id, "temperature": float(items.temperature)}
        constant["chunk_size"] = self._logps_chunk_size
        step, parts = self._logps_micro_batch_size or count, []
        for start in range(0, count, step):
            some = {name: value[start : start + step] for name, value in rows.items()}
            ids = some.pop("prompt_tokens"), some.pop("completion_tokens")
            parts.append(self._trainer.fwd_only(_score_live, *ids, **some, **constant))
        logps, version = np.asarray(jnp.concatenate(parts), np.float32), self._about()["policy_version"]
        return LogprobsResponse(request_id=items.request_id, per_token_logps=logps, model_version=version)

    @_inside
    def get_metrics(self) -> Any:
        """Return the newest step's metrics on the host; blocks until the device has them."""
        return jax.device_get(self._trainer.get_metrics())


def _score_live(model: nnx.Module, *ids: Array, **options: Any) -> Array:
    return _jitted_logps(*nnx.split(model), *ids, **options)


@functools.partial(jax.jit, static_argnames=("pad_id", "temperature", "chunk_size"))
def _jitted_logps(graph: Any, state: Any, *ids: Array, **options: Any) -> Array:
    return compute_per_token_logps(nnx.merge(graph, state), *ids, **options)
