"""Trace exactly the optimizer steps of --profile FIRST:COUNT with jax.profiler, and check the trace.

Traced steps are excluded from the headline. A trace that is missing, empty or shorter than its window is an error:
profilers drop events silently when a buffer overflows.
"""

from __future__ import annotations

import argparse
import glob
import os
import time
from typing import Any

from bench_common import BenchError


class Tracer:
    """Starts and stops the profiler around the window; the seconds it takes are outside every step."""

    def __init__(self, options: argparse.Namespace):
        self.first, self.count = options.profile or (None, 0)
        self.folder = options.profile_dir
        self.active = False
        self._began = 0.0
        self._traced_seconds: float | None = None

    def before(self, index: int) -> float:
        """Start the trace where the window begins; return the seconds that took."""
        if self.first is None or index != self.first:
            return 0.0
        import jax

        begin = time.perf_counter()
        jax.profiler.start_trace(self.folder)
        self.active = True
        self._began = time.perf_counter()
        return self._began - begin

    def after(self, index: int) -> float:
        """Stop the trace where the window ends; return the seconds that took."""
        if not self.active or index != self.first + self.count - 1:
            return 0.0
        return self.stop()

    def stop(self) -> float:
        """Stop a running trace; return the seconds that took."""
        import jax

        begin = time.perf_counter()
        self._traced_seconds = begin - self._began
        jax.profiler.stop_trace()
        self.active = False
        return time.perf_counter() - begin

    def result(self) -> dict[str, Any] | None:
        """Return where the trace is and what it covers; None where none was asked for.

        Raises:
          BenchError: the window was not reached, or the trace is missing, empty, or shorter than its window.
        """
        if self.first is None:
            return None
        where = f"--profile {self.first}:{self.count}"
        if self.active or self._traced_seconds is None:
            if self.active:
                self.stop()
            raise BenchError("the run ended before the window did", where=where, todo="run more --steps")
        found = sorted(glob.glob(os.path.join(self.folder, "**", "*.xplane.pb"), recursive=True), key=os.path.getmtime)
        if not found or os.path.getsize(found[-1]) == 0:
            raise BenchError("no trace was written", where=where, todo=f"is {self.folder} writable?")
        events, span = _coverage(found[-1])
        if span is not None and (events == 0 or span < 0.5 * self._traced_seconds):
            held = f"the trace holds {events} events over {span:.3f} s of {self._traced_seconds:.3f} s"
            raise BenchError(held, where=where, todo="trace fewer steps; a full buffer drops events")
        return {"file": found[-1], "bytes": os.path.getsize(found[-1]), "first_step": self.first, "steps": self.count,
                "window_seconds": self._traced_seconds, "events": events, "covered_seconds": span}  # fmt: skip


def _coverage(path: str) -> tuple[int | None, float | None]:
    """Return (events, seconds from the first to the last) of an xplane file; None where jaxlib cannot read it."""
    try:
        from jax.profiler import ProfileData
    except ImportError:
        return None, None
    events, begin, end = 0, float("inf"), 0.0
    for plane in ProfileData.from_file(path).planes:
        for line in plane.lines:
            for event in line.events:
                events += 1
                begin, end = min(begin, event.start_ns), max(end, event.start_ns + event.duration_ns)
    return events, (end - begin) / 1e9 if events else 0.0
