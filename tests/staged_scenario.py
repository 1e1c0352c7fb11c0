"""What test_staged_engine runs on the real engine, on any number of devices; also a program of its own.

python tests/staged_scenario.py        # four virtual devices, set before JAX starts; prints `4 devices: same bits`
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

import numpy as np

ROWS, WIDTH, COUNT, STEPS = 4, 32, 2, 2  # rows divide fsdp 2 x expert 2
PROGRAMS = ["jit(fwd_bwd)", "jit(fwd_bwd_accum)", "jit(update)"]


def make_engine(devices: int, compiled: bool = True) -> Any:
    """Return a real engine of the shrunk model with the GRPO loss, on the first `devices` devices."""
    import jax
    from engine_fixture import PAD_ID, make_config

    import bench_runtime
    import tunix_standin

    tunix_standin.install()
    assert len(jax.devices()) >= devices, f"{len(jax.devices())} devices where {devices} are to be tested"
    half = 2 if devices == 4 else 1
    config = make_config(f"ici_fsdp_parallelism={half}", f"ici_expert_parallelism={half}", f"max_target_length={WIDTH}")
    mesh = bench_runtime.make_mesh(config, jax.devices()[:devices])
    engine = bench_runtime.make_engine(config, mesh, PAD_ID)
    engine.with_loss_fn(tunix_standin.grpo_loss_fn, has_aux=True)
    algo = tunix_standin.GRPOConfig(temperature=1.0, beta=0.0, loss_agg_mode="token-mean", use_rollout_logps=False)
    engine.with_gen_model_input_fn(tunix_standin.build_gen_model_input_fn(algo, PAD_ID, PAD_ID))
    if compiled:
        engine.compile(None)
    return engine


def payloads(count: int = COUNT * STEPS, width: int = WIDTH) -> list[Any]:
    """Return distinct packed micro-batches with forced experts."""
    from engine_fixture import EOS_ID, EXPERTS, LAYERS, PAD_ID, TOP_K, VOCAB

    import bench_payload
    import bench_routing
    import tunix_standin

    spec = bench_payload.PayloadSpec(
        rows=ROWS, prompt_length=width // 4, completion_length=width - width // 4, packed=True, max_segments=4,
        vocab_size=VOCAB, pad_id=PAD_ID, eos_id=EOS_ID, num_layers=LAYERS, num_experts=EXPERTS, top_k=TOP_K,
        num_generations=2, lengths=f"uniform:{width // 4}:{width}", with_old_logps=True, with_rollout_logps=False,
        with_ref_logps=False, with_overlong=False, row_width=width,
    )  # fmt: skip
    routing = bench_routing.RoutingSpec((None,) * LAYERS, 2, 2, 1)
    batches = [bench_payload.build_micro_batch(spec, routing, 7, i) for i in range(count)]
    return [tunix_standin.RLTrainerPayload(**batch) for batch in batches]


class Recorder:
    """What a run leaves behind: weights, losses, gradient norms, metric writes in order, compiles."""

    def __init__(self, engine: Any):
        import jax
        from flax import nnx

        import bench_runtime

        engine._refresh_pure_state()
        engine._place_state_on_mesh()  # as a compiled engine does; eager ones start with counters on one device
        self.engine, self.writes, self.compiles = engine, [], bench_runtime.CompileLog()
        self._write, self._start = engine._metrics_logger.write_metrics, snapshot(engine)
        engine._metrics_logger.write_metrics = self._on_write
        # Operation by operation, JAX chooses the layout of what an update returns, and sums follow the layout.
        self._layout = jax.tree.map(lambda leaf: leaf.sharding, nnx.state(engine.state))
        self.compiles.take()

    def _on_write(self, buffer: Any, **named: Any) -> None:
        self.writes.append((buffer.id, sorted(buffer.weighted_metrics), sorted(buffer.scalar_metrics)))

    def reset(self) -> None:
        """Put the engine back to where it was, its compiled programs kept."""
        import jax
        from flax import nnx

        engine = self.engine
        engine._throttler.wait_for_all()
        nnx.update(engine.state, jax.tree.map(_placed, nnx.state(engine.state), self._start, self._layout))
        engine._refresh_pure_state()
        engine.train_step = 0
        engine.get_metrics()
        self.writes.clear()
        self.compiles.take()

    def result(self, metrics: list[Any]) -> dict[str, Any]:
        """Return everything that must be the same bits; drains the queue."""
        import jax

        self.engine._throttler.wait_for_all()
        losses = [buffer.weighted_metrics["loss"].unreduced_sum for buffer in metrics]
        norms = [buffer.scalar_metrics["gradient_norm"] for buffer in metrics]
        programs = [name for name, _ in self.compiles.take() if name in PROGRAMS]
        return {"weights": jax.tree.leaves(snapshot(self.engine)), "losses": losses, "norms": norms,
                "writes": list(self.writes), "compiles": sorted(programs)}  # fmt: skip


def snapshot(engine: Any) -> Any:
    """Return the whole train state on the host, random keys as their words."""
    import jax
    from flax import nnx

    return jax.tree.map(lambda x: np.array(jax.random.key_data(x) if _is_key(x) else x), nnx.state(engine.state))


def _is_key(leaf: Any) -> bool:
    import jax

    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _placed(now: Any, start: np.ndarray, layout: Any) -> Any:
    import jax

    return jax.device_put(jax.random.wrap_key_data(start) if _is_key(now) else start, layout)


def train(recorder: Recorder, batches: list[Any], staged: str | None, worker: Any = None) -> dict[str, Any]:
    """Run STEPS steps of COUNT micro-batches; `staged` is None, "before" or "after" (the update).

    Args:
      worker: has `fwd_bwd` and `update` and enters the mesh by itself; None calls the engine, under the mesh, because
        JAX compiles for the mesh that it is called under.
    """
    import jax

    engine, metrics = recorder.engine, []
    recorder.compiles.take()  # JAX tells of every compile in the process, those of other engines too
    with contextlib.nullcontext() if worker else engine._mesh:
        first = engine.prepare_fwd_bwd_input(batches[0]) if staged else batches[0]
        for step in range(STEPS):
            following = batches[((step + 1) * COUNT) % len(batches)]
            chosen = [first, *batches[step * COUNT + 1 : (step + 1) * COUNT]]
            first = _step(engine, worker or engine, chosen, following, staged)
            metrics.append(jax.device_get(engine.get_metrics()))
        return recorder.result(metrics)


def _step(engine: Any, worker: Any, chosen: list[Any], following: Any, staged: str | None) -> Any:
    """Run one step and return what begins the next: `following`, or that staged before or after the update."""
    for item in chosen:
        worker.fwd_bwd(item)
    for moment in ("before", "after"):
        if staged == moment:
            following = engine.prepare_fwd_bwd_input(following)
            engine.wait_for_device()
        if moment == "before":
            worker.update()
    return following


def difference(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Return the names of what is not the same bits."""
    found = [name for name in ("writes", "compiles") if a[name] != b[name]]
    for name in ("weights", "losses", "norms"):
        bits = [[np.asarray(value).tobytes() for value in arm[name]] for arm in (a, b)]
        same = bits[0] == bits[1]
        found += [] if same else [name]
    return found


def main() -> int:
    """Compare staged with unstaged training on four devices; return 1 where a bit differs."""
    import jax

    import staged_engine

    if len(jax.devices()) != 4:
        print(f"{len(jax.devices())} devices, not 4")
        return 1
    engine, batches = make_engine(4), payloads()
    staged_engine.attach(engine)
    recorder = Recorder(engine)
    staged = train(recorder, batches, "before")
    recorder.reset()
    plain = train(recorder, batches, None)
    compiled, staged["compiles"] = staged["compiles"], []
    differs = difference(staged, plain) + ([] if compiled == PROGRAMS else compiled)
    print(f"{len(jax.devices())} devices: {', '.join(differs) or 'same bits'}")
    return bool(differs)


if __name__ == "__main__":
    # The tests' own flags, where they start this: they are part of the key of the compilation cache.
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    os.environ["JAX_PLATFORMS"] = "cpu"
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    raise SystemExit(main())
