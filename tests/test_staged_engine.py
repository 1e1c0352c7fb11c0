"""staged_engine and bench_boundary on the real engine: the same bits staged or not, and mistakes that are caught."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import types

import jax
import numpy as np
import pytest
import staged_scenario as scenario
from hypothesis import given, settings
from hypothesis import strategies as st

import bench_boundary
import staged_engine
from bench_common import BenchError

PROGRAMS = scenario.PROGRAMS


class Case:
    """An engine with the hooks, its micro-batches, and the run in which it was fresh and staged."""

    def __init__(self, devices: int, compiled: bool):
        self.engine, self.batches = scenario.make_engine(devices, compiled), scenario.payloads()
        self.attached = staged_engine.attach(self.engine)
        self.recorder = scenario.Recorder(self.engine)
        self.staged = self.run("before")

    def run(self, staged: str | None, batches=None, worker=None) -> dict:
        """Train from the start again and return what that leaves behind."""
        result = scenario.train(self.recorder, batches or self.batches, staged, worker)
        self.recorder.reset()
        return result


_CASES: dict[tuple[int, bool], Case] = {}


# Operation by operation: XLA compiles each one of some thousand, which takes a minute or two.
KINDS = [(4, True), *(pytest.param(kind, marks=pytest.mark.slow) for kind in ((1, True), (1, False), (4, False)))]
each = pytest.mark.parametrize("case", KINDS, indirect=True, ids=["4-jit", "1-jit", "1-op", "4-op"])


@pytest.fixture
def case(request) -> Case:
    """Each of one and four devices, compiled and operation by operation; made once."""
    pytest.importorskip("maxtext", reason="MaxText is not installed")
    if request.param not in _CASES:
        _CASES[request.param] = Case(*request.param)
    return _CASES[request.param]


@pytest.fixture
def four() -> Case:
    """Four devices, compiled."""
    pytest.importorskip("maxtext", reason="MaxText is not installed")
    if (4, True) not in _CASES:
        _CASES[4, True] = Case(4, True)
    return _CASES[4, True]


def test_the_devices_are_there():
    assert len(jax.devices()) == 4, "conftest sets them before JAX starts; with one, nothing here would be tested"


@each
def test_prepared_trains_like_unprepared_to_the_bit(case):
    plain = case.run(None)
    assert scenario.difference(case.staged | {"compiles": []}, plain) == []
    assert len(plain["losses"]) == scenario.STEPS and plain["losses"][0].shape == (scenario.COUNT,)
    assert all(np.isfinite(norm).all() and norm > 0 for norm in plain["norms"])


@each
def test_staging_after_the_update_is_staging_before_it(case):
    assert scenario.difference(case.staged | {"compiles": []}, case.run("after")) == []


def test_the_programs_are_compiled_once_each_and_before_any_compile_preparing_is_right(four):
    assert four.staged["compiles"] == PROGRAMS


def test_a_token_is_seen(four):
    ids = four.batches[0].completion_ids.copy()
    ids[0, 1] = ids[0, 1] % 500 + 2
    changed = four.run("before", [four.batches[0].replace(completion_ids=ids), *four.batches[1:]])
    assert {"losses", "weights", "norms"} <= set(scenario.difference(four.staged, changed))


def test_the_other_micro_batch_is_seen(four):
    swapped = [four.batches[1], four.batches[0], *four.batches[2:]]
    assert "losses" in scenario.difference(four.staged, four.run("before", swapped))


@pytest.mark.slow
def test_four_devices_in_a_process_of_its_own():
    clean = {
        name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "XLA_FLAGS") or "JAX" in name
    }
    done = subprocess.run([sys.executable, scenario.__file__], env=clean, capture_output=True, text=True, timeout=900)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "4 devices: same bits"), done.stderr[-2000:]


def test_through_the_worker(four):
    import tunix_standin

    worker = tunix_standin.TrainerWorker(lambda: four.engine, execution_context=four.engine._mesh)
    worker.initialize()

    def fwd_bwd(item):
        worker.fwd_bwd(tunix_standin.TrainRequest(payload=item))

    calls = types.SimpleNamespace(fwd_bwd=fwd_bwd, update=worker.update)
    plain = four.run(None, worker=calls)
    assert plain["compiles"] == []
    assert scenario.difference(plain, four.run("before", worker=calls)) == []
    assert scenario.difference(plain, four.staged | {"compiles": []}) == []


# What preparing and waiting leave alone -----------------------------------------------------------------------


def queue_of(engine):
    return [(id(computation), id(metrics)) for computation, metrics in engine._throttler._inflight_queue.queue]


@contextlib.contextmanager
def two_in_flight(case):
    """Two micro-batches dispatched, so that the in-flight queue is full; put back afterwards. Under the mesh."""
    with case.engine._mesh:
        case.engine.fwd_bwd(case.batches[0])
        case.engine.fwd_bwd(case.batches[1])
        try:
            yield case.engine
        finally:
            case.engine.update()
            case.recorder.reset()


@each
def test_the_wait_leaves_queue_and_metrics_as_they_were(case):
    with two_in_flight(case) as engine:
        before = queue_of(engine), engine._throttler._pending_metrics, list(case.recorder.writes)
        waited = engine.wait_for_device()
        assert len(before[0]) == 2
        assert (queue_of(engine), engine._throttler._pending_metrics, case.recorder.writes) == before
        assert waited > 0
        assert all(leaf.is_ready() for leaf in jax.tree.leaves(engine._accumulated_grads))
        assert all(leaf.is_ready() for leaf in jax.tree.leaves(engine._cached_losses))


def test_the_wait_covers_the_update(four):
    with two_in_flight(four) as engine:
        engine.update()
        engine.wait_for_device()
        leaves = [leaf for leaf in jax.tree.leaves(engine._state_pure) if hasattr(leaf, "is_ready")]  # keys have none
        assert len(leaves) > 50 and all(leaf.is_ready() for leaf in leaves)


@each
def test_preparing_changes_nothing_in_the_engine(case):
    with two_in_flight(case) as engine:
        before = {name: id(value) for name, value in vars(engine).items()}, queue_of(engine)
        prepared = engine.prepare_fwd_bwd_input(case.batches[2])
        assert ({name: id(value) for name, value in vars(engine).items()}, queue_of(engine)) == before
        assert prepared.nbytes == sum(leaf.nbytes for leaf in jax.tree.leaves(case.batches[2]))


def test_preparing_leaves_a_wrapped_engine_s_own_queue_handling_alone(four):
    engine, waits = four.engine, []
    kept = engine._prepare_batch
    engine._prepare_batch = lambda payload: waits.append(payload) or kept(payload)  # Tunix's waits on the throttler
    try:
        engine.prepare_fwd_bwd_input(four.batches[0])
    finally:
        engine._prepare_batch = kept
    assert waits == []


def test_a_prepared_input_moves_no_data(four):
    prepared = four.engine.prepare_fwd_bwd_input(four.batches[0])
    with jax.transfer_guard_host_to_device("disallow"), jax.transfer_guard_device_to_device("disallow"):
        params, rest = four.engine._params_pure, four.engine._rest_pure
        traced = {"train_example": prepared._inputs["train_example"]}
        with four.engine._mesh, four.engine._sharding_ctx():
            four.engine._compiled_fwd_bwd(params, rest, traced)
            with pytest.raises(Exception, match="[Dd]isallowed"):
                four.engine._compiled_fwd_bwd(params, rest, {"train_example": four.batches[0]})


def test_the_closed_over_half_is_the_input_function_s_own(four):
    inputs = four.engine.prepare_fwd_bwd_input(four.batches[0])._inputs
    assert inputs["algo_config"] is four.engine._gen_model_input_fn(four.batches[0])["algo_config"]
    assert sorted(inputs) == ["algo_config", "eos_id", "pad_id", "train_example"]


# Controls ---------------------------------------------------------------------------------------------------


def test_a_stale_one_is_refused(four):
    with two_in_flight(four) as engine:
        prepared = engine.prepare_fwd_bwd_input(four.batches[2])
        engine.fwd_bwd(prepared)
        assert prepared.used and prepared.nbytes == 0
        with pytest.raises(BenchError, match="trained already"):
            engine.fwd_bwd(prepared)


def test_the_wrong_micro_batch_is_refused(four):
    prepared = four.engine.prepare_fwd_bwd_input(four.batches[2])
    assert prepared.expect(four.batches[2]) is prepared
    with pytest.raises(BenchError, match="another micro-batch than the one to be trained"):
        prepared.expect(four.batches[1])


def test_another_shape_is_refused_and_compiles_nothing(four):
    wide = scenario.payloads(1, 2 * scenario.WIDTH)[0]
    with pytest.raises(BenchError, match="not those the engine is compiled for"):
        four.engine.prepare_fwd_bwd_input(wide)
    prepared = four.engine.prepare_fwd_bwd_input(four.batches[0])
    signature = four.engine._compiled_signature
    four.engine._compiled_signature = (signature[0], signature[1][1:], signature[2])  # compiled for another since
    try:
        with pytest.raises(BenchError, match="not those the engine is compiled for"):
            four.engine.fwd_bwd(prepared)
    finally:
        four.engine._compiled_signature = signature
    assert [name for name, _ in four.recorder.compiles.take() if name in PROGRAMS] == []


def test_an_input_function_set_since_is_refused(four):
    engine, kept = four.engine, four.engine._gen_model_input_fn
    prepared = engine.prepare_fwd_bwd_input(four.batches[0])
    engine._gen_model_input_fn = lambda payload: kept(payload)
    try:
        with pytest.raises(BenchError, match="another engine or input function"):
            engine.fwd_bwd(prepared)
    finally:
        engine._gen_model_input_fn = kept


def test_a_prepared_input_is_not_prepared_again(four):
    with pytest.raises(BenchError, match="prepared already"):
        four.engine.prepare_fwd_bwd_input(four.engine.prepare_fwd_bwd_input(four.batches[0]))


def test_attach_and_detach_touch_one_instance(four):
    engine = four.engine
    assert four.attached == staged_engine.attach(engine) == "attached"
    mine = {name for name in vars(engine) if name in (*staged_engine.METHODS, "_prepare_batch")}
    staged_engine.detach(engine)
    try:
        assert mine == {*staged_engine.METHODS, "_prepare_batch"}
        assert not mine & set(vars(engine)) and not any(hasattr(type(engine), name) for name in staged_engine.METHODS)
    finally:
        staged_engine.attach(engine)


def test_an_engine_s_own_methods_are_used():
    own = type("Engine", (), {"prepare_fwd_bwd_input": lambda self, p: p, "wait_for_device": lambda self: 0.5})()
    assert staged_engine.attach(own) == "own" and vars(own) == {}


def test_something_else_is_refused():
    with pytest.raises(BenchError, match="staged_engine: SimpleNamespace has no _prepare_batch"):
        staged_engine.attach(types.SimpleNamespace())


# The driver's step boundary -----------------------------------------------------------------------------------


class FakeEngine:
    """An engine with hooks of its own that notes what is asked of it."""

    def __init__(self, log, waits=()):
        self._log, self._waits = log, list(waits)

    def prepare_fwd_bwd_input(self, payload):
        self._log.append(f"prepare {payload}")
        return f"prepared {payload}"

    def wait_for_device(self):
        self._log.append("wait")
        return self._waits.pop(0) if self._waits else 1.0


def fake_run(log, count=2, waits=(), worker=None, asked=True):
    """Return what bench_driver's Run gives the boundary."""
    calls = types.SimpleNamespace(
        stages=worker is not None, worker=worker, argument=lambda method, payload: payload,
        call=lambda name, *args, **named: log.append(" ".join([name, *map(str, args), *map(str, named)])),
    )  # fmt: skip
    program = types.SimpleNamespace(
        calls=calls, engine=FakeEngine(log, waits), update=lambda: log.append("update"),
        fwd_bwd=lambda payload, last: log.append(f"fwd_bwd {payload}{' last' if last else ''}"),
    )  # fmt: skip
    options = types.SimpleNamespace(stage_before_update=asked)
    return types.SimpleNamespace(options=options, program=program, count=count, staging={"asked": False})


def drive(run, boundary, payloads, steps):
    """Run steps as bench_driver does and return what cross returned."""
    crossed = []
    for index in range(steps):
        for i in range(run.count):
            boundary.fwd_bwd(i == run.count - 1, payloads[(index * run.count + i) % len(payloads)])
        crossed.append(boundary.cross(run, index))
        boundary.update()
    return crossed


def test_no_boundary_unless_asked():
    assert bench_boundary.make_boundary(fake_run([], asked=False), ["a"]) is None


def test_the_order_at_the_boundary():
    log = []
    run = fake_run(log)
    crossed = drive(run, bench_boundary.make_boundary(run, ["a", "b", "c"]), ["a", "b", "c"], 2)
    assert log == ["fwd_bwd a", "fwd_bwd b last", "prepare c", "wait", "update",
                   "fwd_bwd prepared c", "fwd_bwd a last", "prepare b", "wait", "update"]  # fmt: skip
    assert [one["device_wait_seconds"] for one in crossed] == [1.0, 1.0] and crossed[0]["h2d_seconds"] >= 0
    assert run.staging == {"asked": True, "through": "engine", "boundaries": 2, "device_wait_seconds": [1.0, 1.0],
                           "stopped_at_step": None}  # fmt: skip


def test_staging_stops_where_the_device_is_idle():
    log = []
    run = fake_run(log, count=1, waits=[0.02, 0.0002])
    crossed = drive(run, bench_boundary.make_boundary(run, ["a", "b"]), ["a", "b"], 4)
    assert run.staging["stopped_at_step"] == 1 and run.staging["boundaries"] == 2
    assert log[-2:] == ["fwd_bwd b last", "update"]
    assert crossed[2] == {"device_wait_seconds": None, "h2d_seconds": None}
    assert log.count("wait") == 2 and "fwd_bwd prepared a last" in log  # what is staged already is trained


def test_the_boundary_refuses_another_micro_batch():
    run = fake_run([])
    boundary = bench_boundary.make_boundary(run, ["a", "b", "c"])
    boundary.cross(run, 0)
    assert boundary.ready
    with pytest.raises(BenchError, match="step boundary: another micro-batch"):
        boundary.fwd_bwd(False, "b")


def test_a_worker_with_staging_of_its_own_is_used():
    class Worker:
        def fwd_bwd(self, payload, apply_optimizer=False, defer_update=False): ...

        def stage_fwd_bwd(self, payload): ...

        def fwd_bwd_staged(self, payload): ...

        def apply_deferred_update(self): ...

    log = []
    run = fake_run(log, worker=Worker())
    drive(run, bench_boundary.make_boundary(run, ["a", "b", "c", "d"]), ["a", "b", "c", "d"], 2)
    assert log == ["fwd_bwd a", "fwd_bwd b apply_optimizer defer_update", "stage_fwd_bwd c", "wait",
                   "apply_deferred_update", "fwd_bwd_staged c", "fwd_bwd d apply_optimizer defer_update",
                   "stage_fwd_bwd a", "wait", "apply_deferred_update"]  # fmt: skip
    assert run.staging["through"] == "worker"


@settings(deadline=None, derandomize=True, max_examples=60)
@given(count=st.integers(1, 5), distinct=st.integers(1, 7), steps=st.integers(1, 5))
def test_what_is_staged_is_what_the_step_trains(count, distinct, steps):
    log, payloads = [], [f"m{i}" for i in range(distinct)]
    run = fake_run(log, count=count)
    drive(run, bench_boundary.make_boundary(run, payloads), payloads, steps)  # a mismatch raises
    trained = [line.split()[-2 if line.endswith(" last") else -1] for line in log if line.startswith("fwd_bwd")]
    assert trained == [payloads[i % distinct] for i in range(steps * count)]
    assert sum("prepared" in line for line in log) == steps - 1


def test_the_boundary_on_the_real_engine(four):
    with two_in_flight(four) as engine:
        log = []
        run = fake_run(log)
        run.program.engine = engine
        run.program.fwd_bwd = lambda payload, last: engine.fwd_bwd(payload)
        boundary = bench_boundary.make_boundary(run, four.batches)
        assert run.staging["through"] == "staged_engine"
        assert boundary.cross(run, 0)["device_wait_seconds"] >= 0
        boundary.update()
        boundary.fwd_bwd(False, four.batches[2])
        assert not boundary.ready and log == ["update"]
