"""A trainer without a device, for tests of faults and of the loop: each call sleeps, and misbehaves when told.

Run as a script it is a driver process whose program is this one, for tests that send real signals:
`python fake_trainer.py MISBEHAVIOUR [driver options]`. The driver, its loop, files and exit codes are the real ones.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import bench_driver  # noqa: E402
import bench_loop  # noqa: E402
import bench_plan  # noqa: E402
import bench_runtime  # noqa: E402


class FakeProgram:
    """The surface of bench_runtime.TrainerProgram."""

    runtime = "fake"
    config = SimpleNamespace(get_keys=lambda: {"hf_access_token": "abc", "sa_block_q": 512})

    def __init__(self, misbehave: str = "", seconds: float = 0.002):
        self.misbehave, self.seconds, self.log, self.stopped = misbehave, seconds, [], 0
        device = SimpleNamespace(id=0, device_kind="fake", platform="fake", memory_stats=self.memory_stats)
        self.mesh = SimpleNamespace(shape={"fsdp": 1}, devices=SimpleNamespace(flat=[device]))
        self.losses = []

    def memory_stats(self):
        if self.misbehave == "no memory stats":
            import jax

            raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: only supported for addressable PjRt devices")
        return {"peak_bytes_in_use": 7}

    def payload(self, batch):
        return batch

    def fwd_bwd(self, payload, last):
        self.log.append("fwd_bwd")
        time.sleep(self.seconds)
        self.losses.append(float("nan") if self.misbehave == "nan" else 0.5 + len(self.losses) / 7)
        if self.misbehave == "raise":
            raise RuntimeError("worker is in state ERROR")
        if self.misbehave == "unforced":
            raise NotImplementedError("Forced routing is only supported for decoder_block in (...)")
        if self.misbehave == "oom":
            import jax.numpy as jnp

            jnp.zeros((1 << 46,), jnp.float32).block_until_ready()  # 256 TiB: a real RESOURCE_EXHAUSTED
        if self.misbehave == "hang" and self.log.count("update") == 2:
            time.sleep(3600)

    def update(self):
        self.log.append("update")
        time.sleep(self.seconds * (50 if self.misbehave == "stall" and self.log.count("update") == 9 else 1))

    def wait_for_update(self):
        self.log.append("wait")

    def metrics(self):
        self.log.append("metrics")
        losses, self.losses = self.losses, []
        losses = [losses[0]] * len(losses) if self.misbehave == "same" else losses
        return {"loss": losses, "gradient_norm": [0.0 if self.misbehave == "zero" else 1.5]}

    def per_token_logps(self, batch, temperature, pad_id):
        self.log.append("logps")
        return -3 * batch["completion_mask"]

    def stop(self):
        self.stopped += 1
        if self.misbehave == "unstoppable":
            raise ValueError("no such worker")


def install(program: FakeProgram, patch=setattr) -> None:
    """Put the fake where the driver builds its program; the plan stays the real one, without MaxText."""

    def plan_run(options):
        trainer, orch = bench_driver.launch_argv(options)
        return bench_plan.plan_launch(
            trainer, orch, os.environ, 4, cpu_smoke=True, lengths=options.sequence_lengths,
            routing_load=options.routing_load, tolerance=options.routing_tolerance,
        )  # fmt: skip

    patch(bench_runtime, "build_program", lambda job: program)
    patch(bench_runtime, "versions", dict)
    patch(bench_driver, "plan_run", plan_run)
    patch(bench_driver, "set_up_platform", lambda options: None)
    patch(bench_loop, "CompileLog", lambda: SimpleNamespace(take=lambda: [], close=lambda: None))


if __name__ == "__main__":
    from launches import driver_environment

    for name, value in driver_environment("launch_tiny").items():
        os.environ[name] = value
    install(FakeProgram(sys.argv[1], seconds=0.02))
    raise SystemExit(bench_driver.main(sys.argv[2:]))
