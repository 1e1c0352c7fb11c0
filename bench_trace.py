"""Trace exactly the optimizer steps of --profile FIRST:COUNT with jax.profiler, and check the trace.

Traced steps are excluded from the headline. A trace that is missing, empty or shorter than its window is an error:
profilers drop events silently when a buffer overflows. Under Pathways the workers write it, to a bucket only.
"""

from __future__ import annotations

import pathlib
import time
from typing import Any

from bench_common import BenchError

LOCAL_FOLDER = "/tmp/trainer-bench-profile"


def trace_folder(asked: str | None, output_directory: str, pathways: bool) -> str:
    """Return where traces go.

    Args:
      asked: --profile-dir.
      output_directory: of the trainer; the bench's own in a rendered bench.
      pathways: pathwaysutils has replaced jax.profiler.start_trace, which then takes gs:// folders alone.

    Raises:
      BenchError: a folder that is not in a bucket, under Pathways.
    """
    folder = asked or (f"{output_directory.rstrip('/')}/profile" if pathways else LOCAL_FOLDER)
    if pathways and not folder.startswith("gs://"):
        raise BenchError("Pathways writes traces to a bucket only", where=f"--profile-dir {folder}",
                         todo="name a gs:// folder")  # fmt: skip
    return folder


class Tracer:
    """Starts and stops the profiler around the window; the seconds it takes are outside every step."""

    def __init__(self, window: tuple[int, int] | None, folder: str):
        self.first, self.count = window or (None, 0)
        self.folder = folder
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
        file, size = _largest_of_the_last(self.folder, where)
        if file is None or size == 0:
            raise BenchError("no trace was written", where=where, todo=f"is {self.folder} writable?")
        events, span = _coverage(file)
        if span is not None and (events == 0 or span < 0.5 * self._traced_seconds):
            held = f"the trace holds {events} events over {span:.3f} s of {self._traced_seconds:.3f} s"
            raise BenchError(held, where=where, todo="trace fewer steps; a full buffer drops events")
        return {"file": str(file), "bytes": size, "first_step": self.first, "steps": self.count,
                "window_seconds": self._traced_seconds, "events": events, "covered_seconds": span}  # fmt: skip


def _largest_of_the_last(folder: str, where: str) -> tuple[Any, int]:
    """Return (path, bytes) of the largest host's part of the last session below a folder; (None, 0) where none is.

    Raises:
      BenchError: a bucket that cannot be looked into.
    """
    if "://" not in folder:
        return _largest(pathlib.Path(folder))
    from etils import epath  # as MaxText reads buckets

    try:
        return _largest(epath.Path(folder))
    except Exception as error:  # of whichever file system serves the bucket
        raise BenchError(f"cannot look for the trace in {folder}: {' '.join(str(error).split())[:300]}", where=where,
                         todo="it may be there all the same; look with gcloud storage ls") from error  # fmt: skip


def _largest(folder: Any) -> tuple[Any, int]:
    # JAX names a session by its time and a host's part by the host: plugins/profile/2026_11_30_09_12_48/HOST.xplane.pb
    parts = sorted(folder.glob("plugins/profile/*/*.xplane.pb"), key=str)
    sizes = [(_size(part), part) for part in parts if part.parent == parts[-1].parent]
    return max(sizes, key=lambda item: item[0])[::-1] if sizes else (None, 0)


def _size(path: Any) -> int:
    stat = path.stat()
    return stat.st_size if hasattr(stat, "st_size") else stat.length  # pathlib's and epath's names of it


def _coverage(path: Any) -> tuple[int | None, float | None]:
    """Return (events, seconds from the first to the last) of an xplane file; None where jaxlib cannot read it."""
    try:
        from jax.profiler import ProfileData
    except ImportError:
        return None, None
    events, begin, end = 0, float("inf"), 0.0
    for plane in ProfileData.from_serialized_xspace(path.read_bytes()).planes:
        for line in plane.lines:
            for event in line.events:
                events += 1
                begin, end = min(begin, event.start_ns), max(end, event.start_ns + event.duration_ns)
    return events, (end - begin) / 1e9 if events else 0.0
