"""Run compile jobs in child processes: one kernel each, a few at a time, none of them able to take the others along.

Each child (aot_compile.py) imports and lowers at once and then waits; `run` lets `--jobs` of them compile at a time and
keeps one more warm. A child that dies, hangs or is killed costs its own kernel only, and what it left behind (its exit
status, its stderr, libtpu's fatal log) becomes one line. Standard library only.
"""

from __future__ import annotations

import glob
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench_common import is_secret

# What makes libtpu compile quietly on a machine without a TPU. The accelerator type is not the target of the compile;
# any valid one keeps libtpu from asking the machine. ALLOW_MULTIPLE_LIBTPU_LOAD lets two compiles run side by side.
QUIET = {
    "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "JAX_ENABLE_COMPILATION_CACHE": "false",
    "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1",
}  # fmt: skip
# Of the launch's variables these stay behind: they choose a machine, a place or a plug-in, not a program.
_LEFT_BEHIND = re.compile(
    r"(JAX_(PLATFORMS|COMPILATION_CACHE.*|ENABLE_COMPILATION_CACHE)|TPU_.*|PJRT_.*|LIBTPU_INIT_ARGS|TRAINER_ARGV|ORCH_ARGV"
    r"|PATH|HOME|TMPDIR|LD_.*|PYTHON.*|HF_.*|BENCH_.*)$"
)
# Compile time of a forward/backward per 1000 lowered operations on two cores: 50 s for 5,400 of one small layer, over
# 20 min for 24,000 of Qwen3.5-35B at 64 rows x 65,536 (libtpu 0.0.52); shapes count as much as operations.
SECONDS_PER_1000 = (9.0, 75.0)
TICK_SECONDS = 30.0  # between lines that say a compile is still going


def child_environment(
    base: Mapping[str, str], launch: Mapping[str, str], init_args: Sequence[str], work_dir: str
) -> dict[str, str]:
    """Return the environment of a child: this process's, the launch's own variables, and QUIET over both."""
    kept = {name: value for name, value in base.items()
            if name not in ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_COMPILATION_CACHE_DIR")}  # fmt: skip
    carried = {name: value for name, value in launch.items() if not _LEFT_BEHIND.match(name) and not is_secret(name)}
    ours = {**QUIET, "TPU_LOG_DIR": work_dir, "LIBTPU_INIT_ARGS": " ".join(init_args)}
    return {**kept, **carried, **ours}


@dataclass
class Outcome:
    """How a child ended: its last event, or what is known of a child that died without one."""

    name: str
    events: list[dict[str, Any]] = field(default_factory=list)
    result: dict[str, Any] | None = None
    error: str | None = None  # of a child that gave no result

    def event(self, kind: str) -> dict[str, Any]:
        """Return the last event of a kind; {} if there was none."""
        return next((event for event in reversed(self.events) if event.get("event") == kind), {})


PROGRAM = (sys.executable, os.path.join(os.path.dirname(os.path.abspath(__file__)), "aot_compile.py"))


class _Child:
    def __init__(self, name: str, job: Mapping[str, Any], env: Mapping[str, str], work_dir: str, inbox: queue.Queue,
                 program: Sequence[str]):  # fmt: skip
        self.outcome, self.work_dir = Outcome(name), work_dir
        self.compiles = job["do"] == "compile"
        self.phase, self.since = "starting", time.monotonic()
        self.log_path = os.path.join(work_dir, "stderr.log")
        with open(self.log_path, "wb") as log:
            self.process = subprocess.Popen(list(program), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                                            env=dict(env), cwd=work_dir, start_new_session=True)  # fmt: skip
        self._write(json.dumps(job) + "\n")
        threading.Thread(target=self._read, args=(inbox,), daemon=True).start()

    def _write(self, line: str) -> None:
        try:
            self.process.stdin.write(line.encode())
            self.process.stdin.flush()
        except (BrokenPipeError, ValueError):
            pass  # it has died already; its end arrives as an event

    def _read(self, inbox: queue.Queue) -> None:
        with open(os.path.join(self.work_dir, "events.jsonl"), "wb") as kept:
            for line in self.process.stdout:
                kept.write(line)
                try:
                    inbox.put((self, json.loads(line)))
                except ValueError:
                    continue  # cut off in the middle of a line
        inbox.put((self, None))

    def enter(self, phase: str) -> None:
        self.phase, self.since = phase, time.monotonic()

    def go(self) -> None:
        self.enter("compiling")
        self._write("go\n")

    def seconds(self) -> float:
        return time.monotonic() - self.since

    def kill(self) -> None:
        if self.process.poll() is None:
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.wait()

    def finish(self) -> None:
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            try:
                stream.close()
            except BrokenPipeError:
                pass
        if self.outcome.result is None and self.outcome.error is None:
            self.outcome.error = why_died(self.process.returncode, self.phase, self.log_path, self.work_dir)


def run(
    jobs: Mapping[str, Mapping[str, Any]], env: Mapping[str, str], work_dir: str, *, at_a_time: int = 1,
    timeout_seconds: float | None = None, say: Callable[[str], None] = lambda line: None,
    program: Sequence[str] = PROGRAM,
) -> list[Outcome]:  # fmt: skip
    """Run jobs in children, in order, and return how each ended.

    Args:
      jobs: name -> the job that aot_compile.serve takes.
      env: of the children.
      work_dir: an empty folder; each child gets one of its own in it.
      at_a_time: how many may compile at once; one more imports and lowers meanwhile.
      timeout_seconds: for each phase of a child; one that takes longer is killed.
      say: called with a line per event, and every half minute while something compiles.
      program: what to start; tests have their own.
    """
    inbox: queue.Queue = queue.Queue()
    waiting, alive, outcomes = list(jobs), [], []
    try:
        while waiting or alive:
            while waiting and len(alive) < at_a_time + 1:
                name = waiting.pop(0)
                place = os.path.join(work_dir, re.sub(r"\W+", "_", name))
                os.makedirs(place, exist_ok=True)
                job = {**jobs[name], "dump_dir": os.path.join(place, "dump")}
                alive.append(_Child(name, job, {**env, "TPU_LOG_DIR": place}, place, inbox, program))
            for child in [child for child in alive if child.phase != "ending"][:at_a_time]:  # cheapest first
                if child.phase == "lowered":
                    child.go()
                    say(f"{child.outcome.name}: compiling")
            _one_event(inbox, alive, outcomes, timeout_seconds, say)
    finally:
        for child in alive:
            child.kill()
    return outcomes


def _one_event(inbox: queue.Queue, alive: list[_Child], outcomes: list[Outcome], timeout: float | None,
               say: Callable[[str], None]) -> None:  # fmt: skip
    """Take one event, or find after a while that nothing came: say what goes on, and kill what takes too long."""
    rest = [timeout - child.seconds() for child in alive if timeout is not None and child.phase != "lowered"]
    try:
        child, event = inbox.get(timeout=max(0.05, min([TICK_SECONDS, *rest])))
    except queue.Empty:
        for child in alive:
            if timeout is not None and child.phase != "lowered" and child.seconds() >= timeout:
                child.outcome.error = f"{child.phase} took longer than --timeout {timeout:g} s"
                child.kill()
            elif child.phase not in ("lowered", "ending"):
                say(f"{child.outcome.name}: {child.phase}, {child.seconds():.0f} s{_memory(child.process.pid)}")
        return
    name = child.outcome.name
    if event is None:
        child.finish()
        alive.remove(child)
        outcomes.append(child.outcome)
        if child.outcome.error:
            say(f"{name}: {child.outcome.error}")
        return
    child.outcome.events.append(event)
    kind = event.get("event")
    if kind == "built":
        child.enter("lowering")
        say(f"{name}: built in {event['seconds']:.1f} s, lowering")
    elif kind == "lowered":
        child.enter("lowered" if child.compiles else "ending")
        say(f"{name}: lowered after {event['seconds']:.1f} s{_estimate(event, name) if child.compiles else ''}")
    elif kind == "result":
        child.outcome.result = event
        child.enter("ending")
        if event["status"] == "compiled":
            say(f"{name}: compiled in {event['seconds']:.1f} s")


def _estimate(event: Mapping[str, Any], name: str) -> str:
    operations = event["kernels"].get(name, {}).get("lowered_operations")
    if not operations or name == "update":
        return ""
    low, high = (operations / 1000 * seconds for seconds in SECONDS_PER_1000)
    return (
        f"; {operations} operations, some {max(1, low / 60):.0f} to {max(2, high / 60):.0f} min to compile on 2 cores"
    )


def _memory(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as stream:
            pages = int(stream.read().split()[1])
    except (OSError, ValueError, IndexError):
        return ""
    return f", {pages * os.sysconf('SC_PAGE_SIZE') / 2**30:.1f} GiB of this machine's memory"


_LIBTPU_SAYS = re.compile(r"ERROR: ((?:Unknown command line flag|Illegal value) .*)|Unknown flag in XLA_FLAGS: (.*)")


def why_died(code: int, phase: str, log_path: str, work_dir: str) -> str:
    """Return why a child ended without a result: the flag that libtpu refused, the signal, or its last words."""
    with open(log_path, encoding="utf-8", errors="replace") as stream:
        log = stream.read()
    if refused := _LIBTPU_SAYS.search(log):
        return f"libtpu refuses a flag: {' '.join((refused[1] or refused[2]).split())}"
    fatal = ""
    for path in sorted(glob.glob(os.path.join(glob.escape(work_dir), "*FATAL*"))):
        with open(path, encoding="utf-8", errors="replace") as stream:
            fatal = next((line for line in stream if re.match(r"F\d{4}", line)), fatal)
    words = fatal or next((line for line in reversed(log.splitlines()) if "Check failed" in line), "")
    said = f": {' '.join(words.split())[:300]}" if words else ""
    if code < 0:
        name = signal.Signals(-code).name if -code in signal.Signals.__members__.values() else f"signal {-code}"
        hint = " (this machine ran out of memory, or somebody killed it)" if name == "SIGKILL" else ""
        return f"the compiler was ended by {name} while {phase}{hint}{said}"
    last = next((line for line in reversed(log.splitlines()) if line.strip()), "")
    return f"the compiler's process ended with status {code} while {phase}{said or ': ' + ' '.join(last.split())[:300]}"
