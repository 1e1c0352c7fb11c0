"""bench_runtime: every known TrainerWorker, payload classes, unknown keys, float32 masters, compile events."""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

import bench_runtime
from bench_common import BenchError
from bench_config import Setting

BATCH = {
    "prompt_ids": np.zeros((2, 0), np.int32),
    "prompt_mask": np.zeros((2, 0), np.float32),
    "completion_ids": np.arange(8, dtype=np.int32).reshape(2, 4),
    "completion_mask": np.ones((2, 4), np.float32),
    "advantages": np.ones((2, 4), np.float32),
    "routed_experts": None,
}


class Mesh:
    """A context manager that counts how deep it is entered."""

    depth = 0

    def __enter__(self):
        self.depth += 1

    def __exit__(self, *_):
        self.depth -= 1


class Base:
    """What every version of TrainerWorker has."""

    def __init__(self, trainer_factory, *, worker_id="trainer_worker"):
        self.engine, self.log = trainer_factory(), []

    def initialize(self):
        self.log.append("initialize")

    def compile(self, dummy_data=None):
        self.log.append(("compile", dummy_data))

    def with_loss_fn(self, loss_fn, has_aux=False):
        self.log.append(("loss", has_aux))

    def with_gen_model_input_fn(self, fn):
        self.log.append("input")

    def update(self, **kwargs):
        self.log.append("update")
        return 1

    def get_metrics(self):
        return types.SimpleNamespace(weighted_metrics={}, scalar_metrics={})

    def stop(self):
        self.log.append("stop")


class FirstAugust(Base):
    """`update` inside fwd_bwd."""

    def fwd_bwd(self, payload=None, **kwargs):
        self.log.append(("fwd_bwd", payload, kwargs))


class LateAugust(Base):
    """`update` is a call of its own."""

    def fwd_bwd(self, payload, **kwargs):
        self.log.append(("fwd_bwd", payload, kwargs))


@dataclasses.dataclass
class TrainRequest:
    payload: object
    request_id: str = ""
    metadata: dict = dataclasses.field(default_factory=dict)


class September(Base):
    """A request object, and the worker enters the mesh itself."""

    def __init__(self, trainer_factory, *, worker_id="w", logps_chunk_size=0, execution_context=None):
        super().__init__(trainer_factory)
        self.context, self.chunk = execution_context, logps_chunk_size

    def fwd_bwd(self, request, **kwargs):
        self.log.append(("fwd_bwd", request, kwargs))


def calls(worker_class, mesh=None, **names):
    datatypes = types.SimpleNamespace(**({"TrainRequest": TrainRequest} if not names else names))
    options = {"worker_id": "w", "logps_chunk_size": 512}
    return bench_runtime._WorkerCalls(worker_class, datatypes, lambda: "engine", mesh or Mesh(), **options)


def test_update_inside_is_told_which_micro_batch_is_the_last():
    found = calls(FirstAugust)
    found.fwd_bwd("a", last=False)
    found.fwd_bwd("b", last=True)
    assert found.update() is None
    flags = [entry[2] for entry in found.worker.log]
    assert flags == [
        {"accumulate_gradients": True, "apply_optimizer": False},
        {"accumulate_gradients": True, "apply_optimizer": True},
    ]
    assert found.ignored == ["logps_chunk_size"]


def test_update_outside():
    mesh = Mesh()
    found = calls(LateAugust, mesh)
    found.fwd_bwd("a", last=True)
    found.update()
    assert found.worker.log == [("fwd_bwd", "a", {}), "update"]
    assert not found.binds_mesh


def test_calls_of_workers_that_do_not_bind_the_mesh_run_under_it():
    mesh = Mesh()

    class Looks(LateAugust):
        def update(self, **kwargs):
            return mesh.depth

    assert calls(Looks, mesh).update() == 1
    assert mesh.depth == 0


def test_request_objects_and_execution_context():
    mesh = Mesh()
    found = calls(September, mesh)
    found.fwd_bwd("a", last=True)
    assert found.worker.log[0][1] == TrainRequest("a", "bench")
    assert (found.worker.context, found.worker.chunk, found.ignored) == (mesh, 512, [])


def test_a_request_class_that_is_not_there_is_named():
    with pytest.raises(BenchError, match="TrainRequest"):
        calls(September, other=1)


@pytest.mark.parametrize("name", ["update", "get_metrics", "with_loss_fn"])
def test_a_missing_method_is_named(name):
    broken = type("Broken", (LateAugust,), {name: None})
    with pytest.raises(BenchError, match=f"TrainerWorker has no {name}"):
        calls(broken)


def test_an_unknown_fwd_bwd_is_named():
    class Future(Base):
        def fwd_bwd(self, micro_batches):
            pass

    with pytest.raises(BenchError, match=r"fwd_bwd\(micro_batches\)"):
        calls(Future)


def program(payload_class, worker_class=LateAugust):
    found = calls(worker_class)
    return bench_runtime.TrainerProgram("tunix", found, lambda: found.worker.engine, Mesh(), payload_class, None)


class Scoring(LateAugust):
    def per_token_logps(self, items):
        return types.SimpleNamespace(per_token_logps=self.engine.scores)


@dataclasses.dataclass
class LogprobsRequest:
    prompt_tokens: object
    completion_tokens: object
    pad_id: int


def test_the_log_prob_pass_is_the_workers_where_the_engine_has_what_it_calls():
    for engine in (types.SimpleNamespace(scores=3, model_scope=1), types.SimpleNamespace(scores=3, per_token_logps=1)):
        made = program(Newest, Scoring)
        made._logps_request, made.calls.worker.engine = LogprobsRequest, engine
        assert made.per_token_logps(BATCH, 1.0, 0) == 3
    made.calls.worker.engine = types.SimpleNamespace(scores=3, fwd_only=1)  # maxtext 0.2.5
    with pytest.raises(BenchError, match="engine has none of model_scope, per_token_logps; .*synthetic"):
        made.per_token_logps(BATCH, 1.0, 0)
    with pytest.raises(BenchError, match="TrainerWorker has no per_token_logps"):
        program(Newest).per_token_logps(BATCH, 1.0, 0)


def test_bring_up_order():
    made = program(object)
    made.start(lambda: None, lambda payload: {})
    assert made.calls.worker.log == ["initialize", ("compile", None), ("loss", True), "input"]


@dataclasses.dataclass
class Newest:
    prompt_ids: object
    prompt_mask: object
    completion_ids: object
    completion_mask: object
    advantages: object
    routed_experts: object = None
    metadata: dict = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class August:
    token_ids: object
    token_mask: object
    loss_mask: object
    advantages: object
    prompt_ids: object = None
    prompt_mask: object = None
    completion_ids: object = None
    completion_mask: object = None


def test_payload_by_field_name():
    import jax

    payload = program(Newest).payload(BATCH)
    assert payload.completion_ids is BATCH["completion_ids"]
    assert not jax.tree_util.all_leaves([payload])  # a pytree now: its arrays are traced, not constants


def test_payload_of_august_gets_its_whole_rows():
    payload = program(August).payload({**BATCH, "prompt_ids": np.full((2, 1), 9), "prompt_mask": np.ones((2, 1))})
    assert payload.token_ids.tolist() == [[9, 0, 1, 2, 3], [9, 4, 5, 6, 7]]
    assert payload.loss_mask.tolist() == [[0, 1, 1, 1, 1]] * 2


def test_a_field_that_would_be_lost_is_an_error():
    batch = {**BATCH, "routed_experts": np.zeros((2, 4, 1, 1), np.int16)}
    with pytest.raises(BenchError, match="no routed_experts"):
        program(August).payload(batch)


def test_a_field_nobody_knows_is_an_error():
    odd = dataclasses.make_dataclass("Odd", ["advantages", "reward_model"])
    with pytest.raises(BenchError, match="no completion_ids"):
        program(odd).payload(BATCH)
    odd = dataclasses.make_dataclass("Odd", [*BATCH, "reward_model"])
    with pytest.raises(BenchError, match="needs reward_model"):
        program(odd).payload(BATCH)


def test_unknown_keys_are_listed_or_dropped_with_a_line():
    settings = [Setting("a", "1", "x"), Setting("gdn_cp_mode", "head", "MAXTEXT_EXTRA_FLAGS"), Setting("zz", "1", "x")]
    with pytest.raises(BenchError, match="does not know gdn_cp_mode, zz"):
        bench_runtime.check_keys(settings, {"a"}, drop=False)
    kept, lines = bench_runtime.check_keys(settings, {"a"}, drop=True)
    assert kept == settings[:1]
    assert len(lines) == 2 and "gdn_cp_mode=head (MAXTEXT_EXTRA_FLAGS)" in lines[0]


def test_a_dropped_secret_is_masked():
    _, lines = bench_runtime.check_keys([Setting("hub_token", "s3cret", "MAXTEXT_EXTRA_FLAGS")], set(), drop=True)
    assert lines == ["MaxText key dropped, unknown here: hub_token=*** (MAXTEXT_EXTRA_FLAGS)"]


def test_tunixs_own_key_goes_without_asking_but_with_a_line():
    kept, lines = bench_runtime.check_keys([Setting("skip_step_on_nan", "True", "x")], set(), drop=False)
    assert kept == [] and "skip_step_on_nan" in lines[0]


def test_grpo_options_refuse_what_the_class_lacks():
    small = dataclasses.make_dataclass("GRPOConfig", ["beta", "epsilon", "temperature"])
    orch = bench_runtime.bench_config.parse_orch_argv(["--epsilon=0.3"])
    job = argparse.Namespace(orch=orch)
    assert bench_runtime.grpo_options(small, job) == {"beta": 0.0, "epsilon": 0.3, "temperature": 1.0}
    job.orch = bench_runtime.bench_config.parse_orch_argv(["--overlong_loss_masking"])
    with pytest.raises(BenchError, match="no overlong_loss_masking"):
        bench_runtime.grpo_options(small, job)


def test_float32_masters_keep_what_bfloat16_loses():
    jax, optax = pytest.importorskip("jax"), pytest.importorskip("optax")
    import jax.numpy as jnp

    params = {"narrow": jnp.full((4,), 1.0, jnp.bfloat16), "wide": jnp.full((4,), 1.0, jnp.float32)}
    grads = jax.tree.map(jnp.ones_like, params)
    plain, master = optax.sgd(1e-4), bench_runtime.float32_master(optax.sgd(1e-4))
    state, now = master.init(params), params
    assert state["masters"]["wide"] is None and state["masters"]["narrow"].dtype == jnp.float32
    for _ in range(100):
        steps, state = master.update(grads, state, now)
        now = optax.apply_updates(now, steps)
    assert now["narrow"].dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(now["narrow"], np.float32), 0.99, atol=2**-8)
    np.testing.assert_allclose(state["masters"]["narrow"], 0.99, rtol=1e-5)
    lost, _ = plain.update(grads, plain.init(params), params)
    assert optax.apply_updates(params, lost)["narrow"][0] == 1.0  # without masters nothing would be trained


def test_compiles_are_named():
    jax = pytest.importorskip("jax")
    log = bench_runtime.CompileLog()
    try:

        @jax.jit
        def quite_new(x):
            return x * 23 + 7

        quite_new(np.ones(11)).block_until_ready()
        events = log.take()
        assert any("quite_new" in name for name, _ in events)
        assert all(seconds > 0 for _, seconds in events)
        quite_new(np.ones(11)).block_until_ready()
        assert log.take() == []
    finally:
        log.close()


def test_versions_name_what_decides():
    found = bench_runtime.versions()
    assert found["numpy"] == np.__version__
    assert found["maxtext_git_revision"] is None or len(found["maxtext_git_revision"]) == 40


def test_git_revision_of_a_checkout(tmp_path, monkeypatch):
    package = tmp_path / "src" / "somepackage"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    for command in (["init", "-q"], ["add", "."], ["-c", "user.name=t", "-c", "user.email=t@e", "commit", "-qm", "x"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    monkeypatch.syspath_prepend(str(tmp_path / "src"))
    assert len(bench_runtime.git_revision("somepackage")) == 40


NEWEST_TUNIX = {  # the names and signatures of October 2026, and a log of who was called with what
    "log.py": "LOG = []",
    "experimental/common/datatypes.py": """
        import dataclasses
        @dataclasses.dataclass
        class TrainRequest: payload: object; request_id: str = ""
        @dataclasses.dataclass
        class LogprobsRequest: prompt_tokens: object; completion_tokens: object; temperature: float; pad_id: int = 0
        @dataclasses.dataclass
        class RLTrainerPayload: prompt_ids: object; completion_ids: object; routed_experts: object = None
        """,
    "experimental/worker/trainer_worker.py": """
        from tunix.log import LOG
        class TrainerWorker:
            def __init__(self, trainer_factory, *, worker_id="w", logps_chunk_size=0, logps_micro_batch_size=None,
                         execution_context=None):
                self.factory = trainer_factory
                LOG.append(["worker", worker_id, logps_chunk_size, execution_context])
            def initialize(self): self.engine = self.factory()  # lazily, as in the recipe line
            def compile(self, dummy_data=None): LOG.append(["compile", dummy_data])
            def with_loss_fn(self, fn, has_aux=False): LOG.append(["loss", fn, has_aux])
            def with_gen_model_input_fn(self, fn): LOG.append(["input", fn])
            def fwd_bwd(self, request, **kwargs): LOG.append(["fwd_bwd", request.payload])
            def update(self, **kwargs): LOG.append(["update"])
            def get_metrics(self): pass
            def stop(self): pass
        """,
    "experimental/examples/common/run_trainer_node.py": """
        import types
        from tunix.log import LOG
        def _parse_args(argv): LOG.append(["parse", argv]); return types.SimpleNamespace(argv=argv)
        def _create_trainer_factory(args): return (lambda: types.SimpleNamespace(_config="resolved")), "mesh"
        """,
    "rl/algorithm_config.py": """
        import dataclasses
        @dataclasses.dataclass(frozen=True)
        class GRPOConfig:
            beta: float = 0.04; epsilon: float = 0.2; epsilon_high: float = None; temperature: float = None
            num_generations: int = 2; use_rollout_logps: bool = True; loss_agg_mode: str = ""
        """,
    "experimental/orchestrator/algorithm_adapter.py": """
        class GRPOAdapter:
            def __init__(self, algo_config=None): self.algo_config = algo_config
            def loss_fn(self): return "tunix loss"
            def build_gen_model_input_fn(self, pad_id, eos_id):
                return [pad_id, eos_id, self.algo_config.epsilon_high, self.algo_config.loss_agg_mode]
        """,
    "utils/maxtext_utils.py": "def get_tokenizer_pad_id(model_id, tokenizer_path, model_dir): return len(model_id)",
}


def test_newest_tunix_brings_its_own_parser_factory_worker_and_algorithm(tmp_path):
    import json
    import textwrap

    for name, text in NEWEST_TUNIX.items():
        path = tmp_path / "tunix" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        for parent in path.relative_to(tmp_path).parents:
            (tmp_path / parent / "__init__.py").touch()
    script = """
import json, bench_config, bench_runtime
trainer_argv = ["--trainer_backend=maxtext", "--discovery_addrs", "o:1", "--process_main=x.main", "--model_id", "abc",
                "--worker_id=flags-a", "--compute_logps_chunk_size=512", "--profiler_steps=5"]
orch_argv = ["--epsilon_high=0.28", "--loss_agg_mode=token-mean", "--no-use_rollout_logps"]
job = bench_runtime.Job(trainer_argv, orch_argv, bench_config.parse_trainer_argv(trainer_argv),
                        bench_config.parse_orch_argv(orch_argv), [], bench_runtime.pad_id(trainer_argv, False))
program = bench_runtime.build_program(job)
program.fwd_bwd("batch", True); program.update()
from tunix.log import LOG
print(json.dumps([program.runtime, program.config, program.mesh, job.not_the_same_program, LOG]))
"""
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(__file__).parent.parent}"}
    result = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    runtime, config, mesh, differs, log = json.loads(result.stdout)
    trainer_argv = ("--trainer_backend=maxtext --model_id abc --worker_id=flags-a --compute_logps_chunk_size=512"
                    " --profiler_steps=5 --profiler_steps=0").split()  # fmt: skip
    assert (runtime, config, mesh, differs) == ("tunix", "resolved", "mesh", [])
    assert log == [
        ["parse", trainer_argv],
        ["worker", "flags-a", 512, "mesh"], ["compile", None], ["loss", "tunix loss", True],
        ["input", [3, 3, 0.28, "token-mean"]], ["fwd_bwd", "batch"], ["update"],
    ]  # fmt: skip


@pytest.mark.parametrize(("flag", "masters"), [("true", True), ("false", False)])
def test_a_config_of_ours_takes_the_callers_devices_and_engine(monkeypatch, flag, masters):
    """As the AOT check does on a topology, and a run with dropped keys, which Tunix's builder would pass."""
    monkeypatch.setattr(bench_runtime, "initialize_config", lambda settings: settings)
    monkeypatch.setattr(bench_runtime, "make_mesh", lambda config, devices: (config, devices))
    monkeypatch.setattr(bench_runtime, "installed", lambda name: pytest.fail(f"asked for {name}"))
    trainer = bench_runtime.bench_config.parse_trainer_argv(
        ["--trainer_backend=maxtext", f"--maxtext_fp32_master_weights={flag}"]
    )
    job = bench_runtime.Job([], [], trainer, None, ["a=1"], 7, own_config=True)
    made = bench_runtime._tunix_engine(job, ["tpu"], lambda *what: what)
    assert made[:2] == (["a=1"], (["a=1"], ["tpu"]))
    assert made[2]() == (["a=1"], (["a=1"], ["tpu"]), 7, masters)


@pytest.mark.slow
def test_real_tunix_from_git_drives_the_real_engine(tmp_path):
    """Padded rows of the checkout's own TrainerWorker and loss around MaxText's engine, in a process of its own."""
    source = os.environ.get("TUNIX_SRC", "")
    if not (Path(source) / "tunix" / "experimental" / "worker" / "trainer_worker.py").exists():
        pytest.skip("TUNIX_SRC names no Tunix checkout with tunix.experimental")
    import json

    from launches import launch

    trainer, orch, env = launch("launch_tiny")
    keep = ("--beta", "--epsilon", "--num_generations", "--batch_size", "--mini_batch_size", "--temperature")
    orch = [word for word in orch if word.partition("=")[0] in keep] + ["--no-use_rollout_logps"]
    trainer = [w for w in trainer if "max_seq_token" not in w] + ["--compute_logps_chunk_size=0"]
    flags = env["MAXTEXT_EXTRA_FLAGS"].replace("num_vocab_tiling=2", "")
    command = [sys.executable, "bench_driver.py", "--cpu-smoke", "--steps=2", "--routing-load=none",
               f"--trainer-argv={' '.join(w for w in trainer if ' ' not in w and '(' not in w)}",
               f"--orch-argv={' '.join(orch)}", f"--out={tmp_path}/r.json"]  # fmt: skip
    result = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": source, "MAXTEXT_EXTRA_FLAGS": flags}, capture_output=True, text=True,
        cwd=Path(__file__).parent.parent,
    )  # fmt: skip
    assert result.returncode == 1, result.stderr[-3000:]  # two steps run, and support no claim
    document = json.loads((tmp_path / "r.json").read_text())
    assert (document["status"], document["runtime"], len(document["steps"])) == ("ok", "tunix", 2)
