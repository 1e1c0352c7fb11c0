"""Give a MaxText engine that lacks them `prepare_fwd_bwd_input(payload)` and `wait_for_device()`.

A micro-batch normally reaches the device inside `fwd_bwd`, by the compiled call's own transfers. Preparing it
earlier, while the device still computes the previous step's last micro-batch, hides that transfer:

    engine.fwd_bwd(last)
    prepared = engine.prepare_fwd_bwd_input(first_of_next_step)   # maps it and starts the transfer; does not wait
    waited = engine.wait_for_device()                             # seconds; near 0: nothing was hidden
    engine.update()
    engine.fwd_bwd(prepared)                                      # the same program, on data that is there already

`attach(engine)` sets three attributes of that one instance (the two methods, and a `_prepare_batch` that knows
prepared inputs); `detach(engine)` takes them away again. No class is changed; an engine that has its own methods
keeps them. `fwd_bwd` stays the engine's own, so TrainerWorker's `fwd_bwd` takes prepared inputs too.

Preparing reads the payload and nothing else, so before or after `update` it gives the same input; it changes no
state of the engine. It costs one micro-batch of inputs in device memory until that one is trained. A prepared input
is good for one use, on the engine that made it, with the input function it was made with, and for the shapes the
engine is compiled for. Until then the payload's arrays may not change: a CPU device can share their memory.

Limits: one controller process (a laptop, or Pathways); MaxText 0.2.5's engine or a later one of its structure.
A library: no main, no output. Errors: BenchError.
"""

from __future__ import annotations

import time
from typing import Any

from bench_common import BenchError

METHODS = ("prepare_fwd_bwd_input", "wait_for_device")
_USED = ("_prepare_batch", "_gen_model_input_fn", "_batch_data_shardings", "_sharding_ctx", "_throttler")
_OUTPUTS = ("_accumulated_grads", "_accumulated_denominator", "_cached_losses", "_rest_pure", "_state_pure")
_WHERE = "prepared micro-batch"


class PreparedInput:
    """A micro-batch mapped to the loss's arguments, its arrays on the device; `engine.fwd_bwd` takes it once.

    Args:
      engine: what it was prepared for.
      payload: what it was prepared from.
      inputs: the loss's arguments, arrays placed, the rest as the input function returned it.
    """

    def __init__(self, engine: Any, payload: Any, inputs: Any):
        self._engine, self._payload, self._inputs = engine, payload, inputs
        self._input_fn = engine._gen_model_input_fn

    @property
    def used(self) -> bool:
        """Whether a fwd_bwd has had it."""
        return self._inputs is None

    @property
    def nbytes(self) -> int:
        """Bytes it holds, over all devices a sharded array once; 0 once used."""
        import jax

        return sum(leaf.nbytes for leaf in jax.tree.leaves(self._inputs) if isinstance(leaf, jax.Array))

    def expect(self, payload: Any) -> PreparedInput:
        """Return self if it was prepared from exactly this payload object.

        Raises:
          BenchError: it was prepared from another one.
        """
        if payload is not self._payload:
            raise BenchError("another micro-batch than the one to be trained was prepared", where=_WHERE,
                             todo="prepare the next one in the order of training")  # fmt: skip
        return self

    def take(self, engine: Any) -> Any:
        """Return the loss's arguments and let go of them.

        Raises:
          BenchError: used before, made for another engine or input function, or of other shapes than compiled for.
        """
        if self.used:
            raise BenchError("it was trained already", where=_WHERE, todo="prepare each micro-batch anew")
        if engine is not self._engine or engine._gen_model_input_fn is not self._input_fn:
            raise BenchError("it was made for another engine or input function", where=_WHERE, todo="prepare it anew")
        _refuse_recompile(engine, self._inputs)
        inputs, self._inputs, self._payload = self._inputs, None, None
        return inputs


def attach(engine: Any) -> str:
    """Give an engine the two methods where it lacks them.

    Returns:
      "own" where the engine has both, else "attached". A second call changes nothing.

    Raises:
      BenchError: not an engine of MaxText's structure.
    """
    if all(callable(getattr(type(engine), name, None)) for name in METHODS):
        return "own"
    missing = [name for name in _USED if not hasattr(engine, name)]
    if missing or not hasattr(engine._throttler, "_inflight_queue"):
        raise BenchError(f"{type(engine).__name__} has no {', '.join(missing) or 'in-flight queue'}",
                         where="staged_engine", todo="stage only on MaxText's training engine")  # fmt: skip
    if not hasattr(engine, "wait_for_device"):
        engine.wait_for_device = lambda: wait_for_device(engine)
    if not hasattr(engine, "prepare_fwd_bwd_input"):
        original = engine._prepare_batch  # bound, so that a subclass's own one is kept

        def prepare_batch(payload: Any) -> Any:
            return payload.take(engine) if isinstance(payload, PreparedInput) else original(payload)

        engine._prepare_batch = prepare_batch
        engine.prepare_fwd_bwd_input = lambda payload: prepare(engine, payload)
    return "attached"


def detach(engine: Any) -> None:
    """Take away what `attach` gave; prepared inputs can no longer be trained."""
    if "prepare_fwd_bwd_input" in vars(engine):
        del engine._prepare_batch
    for name in METHODS:
        vars(engine).pop(name, None)


def prepare(engine: Any, payload: Any) -> PreparedInput:
    """Map a payload to the loss's arguments and start moving the arrays to where fwd_bwd's program wants them.

    The traced half goes onto the shardings that the compiled program has, which follow from config and mesh alone,
    so that it is right before the first compile too. The closed-over half stays as it is. An engine that was never
    told to compile runs operation by operation and places inputs by itself; then only the copy is made early.

    Raises:
      BenchError: a prepared input, or a micro-batch of other shapes or options than the engine is compiled for.
    """
    import jax

    if isinstance(payload, PreparedInput):
        raise BenchError("it is prepared already", where=_WHERE, todo="give the payload")
    engine_module = _engine_module()
    # The class's own mapping: Tunix wraps an instance's to wait on the in-flight queue, which must stay as it is.
    mapped = engine_module.MaxTextTrainingEngine._prepare_batch(engine, payload)
    traced, closed_over = engine_module._split_static_and_dynamic(mapped)
    if getattr(engine, "_compile_requested", True) and engine._mesh is not None:
        targets = jax.tree.map(_without_mesh, traced, engine._batch_data_shardings(traced))
        placed = jax.device_put(traced, targets)
    else:
        with engine._sharding_ctx():
            placed = jax.tree.map(jax.device_put, traced)
    inputs = {**placed, **closed_over} if isinstance(placed, dict) else placed
    _refuse_recompile(engine, inputs)
    return PreparedInput(engine, payload, inputs)


def _without_mesh(leaf: Any, target: Any) -> Any:
    """Return a sharding that lays a leaf out as `target` does, without naming the mesh.

    JAX counts a mesh as part of an array's type. The program was traced for host arrays, which have none; an array
    laid out by a NamedSharding is another type, and the first staged fwd_bwd would trace and compile a second program.
    """
    import jax
    from jax.extend.sharding import GSPMDSharding
    from jax.sharding import AxisType, NamedSharding

    explicit = AxisType.Explicit in target.mesh.axis_types
    if explicit or isinstance(getattr(leaf, "sharding", None), NamedSharding):
        return target
    layout = target._to_xla_hlo_sharding(jax.numpy.ndim(leaf))
    return GSPMDSharding(tuple(target.mesh.devices.flat), layout, memory_kind=target.memory_kind)


def wait_for_device(engine: Any) -> float:
    """Block until every computation the engine has dispatched is finished; return the seconds waited.

    It looks at the in-flight queue without taking from it and writes no metrics. It blocks, rather than polls: under
    Pathways a poll is a remote call and may answer "not ready" for finished work.
    """
    import jax

    begin = time.perf_counter()
    jax.block_until_ready(_outstanding(engine))
    return time.perf_counter() - begin


def _outstanding(engine: Any) -> list[Any]:
    """Return the live arrays that a dispatched computation may still have to write; donated ones are gone."""
    import jax

    with engine._throttler._inflight_queue.mutex:
        queued = [computation for computation, _ in engine._throttler._inflight_queue.queue]
    buffers = getattr(getattr(engine, "_metrics_recorder", None), "_metrics_buffer", ())
    metrics = [(buffer.weighted_metrics, buffer.scalar_metrics) for buffer in buffers]
    state = [getattr(engine, name, None) for name in _OUTPUTS]
    leaves = jax.tree.leaves((queued, metrics, state))
    return [leaf for leaf in leaves if isinstance(leaf, jax.Array) and not leaf.is_deleted()]


def _refuse_recompile(engine: Any, inputs: Any) -> None:
    """Raise a BenchError where the engine has a program and these inputs would make it compile another."""
    previous = getattr(engine, "_compiled_signature", None)
    if not getattr(engine, "_compiled", False) or previous is None:
        return
    engine_module = _engine_module()
    signature = engine_module._batch_signature(*engine_module._split_static_and_dynamic(inputs))
    try:
        same = signature == previous
    except ValueError:  # options that hold arrays compare elementwise: the engine compiles on every call, and says so
        return
    if not same:
        raise BenchError("its shapes, dtypes or options are not those the engine is compiled for", where=_WHERE,
                         todo="stage micro-batches of one shape; fwd_bwd(payload) compiles for another")  # fmt: skip


def _engine_module() -> Any:
    from maxtext.training_engine import maxtext_engine

    return maxtext_engine
