"""What can go wrong while a run is under way: signals, a hung device, a full device, garbage collection.

A signal asks the run to stop between two calls; a thread watches that this happens, because a main thread that waits
in a device call cannot run Python's signal handler. When the step (or the grace after a signal) takes too long, that
thread writes the result and ends the process itself.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

GRACE_SECONDS = 60.0  # after a signal; launchers give a pod 360 s (terminationGracePeriodSeconds)
EXIT_BY_SIGNAL = {signal.SIGTERM: 143, signal.SIGINT: 130}  # 128 + signal number, as shells report it


class Interrupted(Exception):
    """A signal asked the run to stop."""

    def __init__(self, signum: int):
        super().__init__(signal.Signals(signum).name)
        self.code = EXIT_BY_SIGNAL[signal.Signals(signum)]


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether JAX says that a device, or the compiler for it, ran out of memory."""
    return type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError", "MemoryError") and (
        "RESOURCE_EXHAUSTED" in str(error) or isinstance(error, MemoryError))  # fmt: skip


class Watch:
    """Watches a run: signals, the time of a step, and the garbage collector.

    Use as a context manager around the run; `give_up(reason, code)` is called on the watching thread when the main
    thread does not come back, and must write the result; the process ends with `code` right after it.
    """

    def __init__(self, give_up: Callable[[str, int], None]):
        self._give_up = give_up
        self._signum: int | None = None
        self._deadline: float | None = None
        self._doing = "start-up"
        self._gc_seconds, self._gc_began = 0.0, 0.0
        self._done = False

    def __enter__(self) -> Watch:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._old = {}
        if threading.current_thread() is threading.main_thread():  # in-process callers on a thread keep their handlers
            self._old = {signum: signal.signal(signum, self._on_signal) for signum in EXIT_BY_SIGNAL}
            self._old_fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        gc.callbacks.append(self._on_gc)
        self._thread = threading.Thread(target=self._watch, name="bench-watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done = True
        gc.callbacks.remove(self._on_gc)
        if self._old:
            signal.set_wakeup_fd(self._old_fd)
            for signum, handler in self._old.items():
                signal.signal(signum, handler)
        os.write(self._write, b"\0")
        self._thread.join()
        os.close(self._read)
        os.close(self._write)

    def check(self) -> None:
        """Raise Interrupted if a signal has come."""
        if self._signum is not None:
            raise Interrupted(self._signum)

    @contextlib.contextmanager
    def step(self, index: int, timeout: float | None) -> Iterator[None]:
        """Give a step this many seconds; None is no limit."""
        self.check()
        self._doing = f"step {index}"
        if timeout is not None:
            self._deadline = time.monotonic() + timeout
            os.write(self._write, b"\0")  # wakes the thread, so that it sees the new deadline
        try:
            yield
        finally:
            self._deadline = None

    def gc_seconds(self) -> float:
        """Return the seconds spent in Python's garbage collector so far."""
        return self._gc_seconds

    def _on_signal(self, signum: int, _frame: object) -> None:
        self._signum = self._signum or signum

    def _on_gc(self, phase: str, _info: dict) -> None:
        if phase == "start":
            self._gc_began = time.perf_counter()
        else:
            self._gc_seconds += time.perf_counter() - self._gc_began

    def _watch(self) -> None:
        signalled: tuple[int, float] | None = None  # signal number, when to give up
        while not self._done:
            deadline = min((d for d in (self._deadline, signalled and signalled[1]) if d), default=None)
            patience = None if deadline is None else max(0.0, deadline - time.monotonic())
            readable, _, _ = select.select([self._read], [], [], patience)
            for byte in os.read(self._read, 4096) if readable else b"":
                if byte in EXIT_BY_SIGNAL and signalled is None:
                    signalled = (byte, time.monotonic() + GRACE_SECONDS)
            if self._done:
                return
            now = time.monotonic()
            if signalled and now >= signalled[1]:
                self._end(f"interrupted by {signal.Signals(signalled[0]).name} during {self._doing}",
                          EXIT_BY_SIGNAL[signal.Signals(signalled[0])])  # fmt: skip
            if self._deadline is not None and now >= self._deadline:
                self._end(f"{self._doing} did not end within --step-timeout", 2)

    def _end(self, reason: str, code: int) -> None:
        try:
            self._give_up(reason, code)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)  # the main thread is inside a device call and cannot be unwound
