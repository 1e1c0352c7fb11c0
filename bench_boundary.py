"""The step boundary of STAGE_BEFORE_UPDATE: stage the next step's first micro-batch while the device computes.

    fwd_bwd(last) -> prepare(first of the next step) -> wait for the device -> update -> fwd_bwd(prepared)

Three ways, the first that is there: the installed Tunix's worker (stage_fwd_bwd, fwd_bwd_staged,
apply_deferred_update), the engine's own prepare_fwd_bwd_input and wait_for_device, or staged_engine's. The wait says
whether anything was hidden: where the device is idle at the boundary, staging only delays the update and stops.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Sequence
from typing import Any

import staged_engine
from bench_common import BenchError

# A device that still has work keeps the host waiting for the rest of a micro-batch, seconds on a slice and tens of
# milliseconds on a CPU; asking an idle one costs tens of microseconds here and a round trip under Pathways.
IDLE_SECONDS = 1e-3


def make_boundary(run: Any, payloads: Sequence[Any]) -> StepBoundary | None:
    """Return the boundary of a driver run; None unless run.options.stage_before_update.

    Args:
      run: bench_loop.Run, with options, program, count and staging.
      payloads: the run's distinct micro-batches, as payload objects.

    Raises:
      BenchError: neither the worker nor the engine can stage.
    """
    return StepBoundary(run, payloads) if run.options.stage_before_update else None


class StepBoundary:
    """Crosses from one optimizer step to the next with the next first micro-batch on the device already.

    `ready`: whether it is. Call `fwd_bwd` for each micro-batch, `cross` after a step's last one, then `update`.
    """

    def __init__(self, run: Any, payloads: Sequence[Any]):
        self._program, self._payloads, self._staging = run.program, payloads, run.staging
        self._next: Any = None  # the payload that is staged
        self._prepared: Any = None
        self._deferred = False
        calls, hooks = run.program.calls, staged_engine.attach(run.program.engine)
        self._through_worker = calls.stages
        self._defers = calls.stages and "defer_update" in inspect.signature(calls.worker.fwd_bwd).parameters
        through = "worker" if calls.stages else "engine" if hooks == "own" else "staged_engine"
        self._staging.update(asked=True, through=through, boundaries=0, device_wait_seconds=[], stopped_at_step=None)

    @property
    def ready(self) -> bool:
        """Whether the next step's first micro-batch is staged."""
        return self._next is not None

    def fwd_bwd(self, last: bool, payload: Any = None) -> None:
        """Dispatch one micro-batch: the staged one, or, where none is, `payload`.

        Args:
          last: whether the update follows.
          payload: what is to be trained; None takes the staged one unchecked.

        Raises:
          BenchError: another micro-batch was staged than `payload`.
        """
        if self.ready:
            self._run_staged(last, payload)
        elif last and self._defers:
            calls = self._program.calls
            calls.call("fwd_bwd", calls.argument("fwd_bwd", payload), apply_optimizer=True, defer_update=True)
            self._deferred = True
        else:
            self._program.fwd_bwd(payload, last)

    def _run_staged(self, last: bool, payload: Any) -> None:
        staged, prepared, self._next, self._prepared = self._next, self._prepared, None, None
        if payload is not None and payload is not staged:
            raise BenchError("another micro-batch than the one to be trained was staged", where="step boundary",
                             todo="stage in the order of training")  # fmt: skip
        if not self._through_worker:
            self._program.fwd_bwd(prepared, last)
            return
        calls = self._program.calls
        deferring = {"apply_optimizer": True, "defer_update": True} if last and self._defers else {}
        self._deferred = bool(deferring)
        calls.call("fwd_bwd_staged", calls.argument("fwd_bwd_staged", staged), **deferring)

    def cross(self, run: Any, index: int) -> dict[str, float | None]:
        """Stage the first micro-batch of step `index` + 1 and wait for the device.

        Returns:
          device_wait_seconds, and h2d_seconds: the host's time in staging, which starts the transfer and does not
          wait for it; both None once staging has stopped.
        """
        if self._staging["stopped_at_step"] is not None:
            return {"device_wait_seconds": None, "h2d_seconds": None}
        self._next = self._payloads[((index + 1) * run.count) % len(self._payloads)]
        calls, engine = self._program.calls, self._program.engine
        begin = time.perf_counter()
        if self._through_worker:
            calls.call("stage_fwd_bwd", calls.argument("stage_fwd_bwd", self._next))
        else:
            self._prepared = engine.prepare_fwd_bwd_input(self._next)
        h2d = time.perf_counter() - begin
        wait = engine.wait_for_device()
        self._staging["boundaries"] += 1
        self._staging["device_wait_seconds"].append(wait)
        if wait < IDLE_SECONDS:
            self._staging["stopped_at_step"] = index
        return {"device_wait_seconds": wait, "h2d_seconds": h2d}

    def update(self) -> None:
        """Dispatch the optimizer update."""
        if self._deferred:
            self._program.calls.call("apply_deferred_update")
            self._deferred = False
        else:
            self._program.update()
