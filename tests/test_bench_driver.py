"""bench_driver: the loop, its faults and its document on a fake device; the real engine at the end of the file."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from fake_trainer import FakeProgram, install
from launches import driver_environment

import bench_driver
import bench_plan
from bench_common import BenchError

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def tiny(monkeypatch):
    """The environment of a rendered bench of the tiny launch."""
    for name, value in driver_environment("launch_tiny").items():
        monkeypatch.setenv(name, value)
    return monkeypatch


@pytest.fixture
def fake(tiny):
    """Return a function that runs the driver on a fake trainer: (code, document, stdout, program)."""

    def run(*argv, misbehave="", seconds=0.002):
        program = FakeProgram(misbehave, seconds)
        install(program, tiny.setattr)
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            code = bench_driver.main(list(argv))
        text = out.getvalue()
        return code, json.loads(text.splitlines()[-1]), text, program

    return run


# --- the program -------------------------------------------------------------------------------


def test_a_step_is_n_fwd_bwd_one_update_one_metrics_fetch(fake):
    code, document, _, program = fake("--steps=2")
    assert program.log == ["logps"] * 3 + (["fwd_bwd"] * 3 + ["update", "wait", "metrics"]) * 2
    assert (code, document["micro_batches_per_step"]) == (1, 3)  # two steps are no claim


def test_micro_batches_overrides_n(fake):
    assert fake("--steps=1", "--micro-batches=5")[3].log.count("fwd_bwd") == 5


def test_no_log_prob_pass_where_nothing_reads_the_samplers(fake, tiny):
    tiny.setenv("ORCH_ARGV", "--no-use_rollout_logps --batch_size=3 --num_generations=4 --max_seq_token_per_tpu=256")
    assert "logps" not in fake("--steps=1")[3].log


@pytest.mark.parametrize(
    ("flags", "asked"),
    [
        ("--use_rollout_logps --log_sampler_trainer_agreement", True),
        ("--use_rollout_logps --num_iterations=2", True),
        ("--use_rollout_logps --mini_batch_size=1", True),
        ("--use_rollout_logps", False),  # the loss does it on the way
        ("--no-use_rollout_logps --log_sampler_trainer_agreement", False),
    ],
)
def test_the_actors_log_prob_pass_runs_before_each_micro_batch_where_asked(fake, tiny, flags, asked):
    tiny.setenv("ORCH_ARGV", f"--batch_size=3 --num_generations=4 --max_seq_token_per_tpu=256 {flags}")
    _, document, _, program = fake("--steps=1", "--micro-batches=2", "--sampler-logps=synthetic")
    assert program.log == (["logps", "fwd_bwd"] if asked else ["fwd_bwd"]) * 2 + ["update", "wait", "metrics"]
    assert document["logps_pass_per_micro_batch"] is asked


def test_ok_verdict_needs_steady_steps(fake):
    code, document, text, _ = fake("--steps=30", seconds=0.01)
    assert (code == 0) == (document["verdict"] == "ok")
    assert document["status"] == "ok"
    assert f"verdict: {document['verdict']}" in text


def test_warmup_is_taken_as_told(fake):
    document = fake("--steps=8", "--warmup=3")[1]
    assert document["headline"]["measured_steps"] == [3, 4, 5, 6, 7]
    assert document["headline"]["excluded_steps"]["0"] == "warm-up (--warmup)"


def test_until_ci_stops_at_a_limit(fake):
    assert len(fake("--steps=5", "--until-ci=0.0001%", "--max-steps=9")[1]["steps"]) == 9


def test_until_ci_that_was_not_reached_is_not_enough(fake):
    code, document, text, _ = fake("--steps=6", "--until-ci=0.0001%", "--max-steps=7", seconds=0.01)
    assert (code, document["verdict"]) == (1, "not enough")
    assert any("--until-ci asked for 0.0001%: raise --max-steps" in line for line in document["reasons"])
    assert "  because the interval is" in text


def test_until_ci_stops_when_tight(fake):
    _, document, _, _ = fake("--steps=8", "--until-ci=40%", "--max-steps=60", seconds=0.02)
    assert document["status"] == "ok", document["error"]  # the looks themselves do not count against the clock
    tight = document["headline"]["ci95_half_width"] <= 0.4
    assert len(document["steps"]) == 60 or (tight and document["verdict"] == "ok")


def test_times_of_single_calls_are_marked_as_throttled(fake):
    step = fake("--steps=1")[1]["steps"][0]
    assert len(step["fwd_bwd_seconds_throttled"]) == 3 and min(step["fwd_bwd_seconds_throttled"]) >= 0.002
    assert step["dispatch_seconds"] >= sum(step["fwd_bwd_seconds_throttled"])


@pytest.mark.parametrize(("value", "on"), [("1", True), ("true", True), ("Yes", True), ("0", False), ("", False)])
def test_switches_in_the_environment(monkeypatch, value, on):
    monkeypatch.setenv("STAGE_BEFORE_UPDATE", value)
    monkeypatch.setenv("BENCH_CPU_SMOKE", value)
    options = bench_driver.build_parser().parse_args([])
    assert (options.stage_before_update, options.cpu_smoke) == (on, on)


def test_text_and_json_agree(fake):
    _, document, text, _ = fake("--steps=7")
    assert f"median {document['headline']['median_step_seconds']:.4f} s" in text
    for step in document["steps"]:
        assert f"step {step['index']}/7: {step['seconds']:.4f} s" in text
    assert max(len(line) for line in text.splitlines() if line.startswith(" ")) <= 80


def test_document_says_what_it_may_not_be_used_for(fake):
    document = fake("--steps=1")[1]
    assert document["schema"] == "trainer-bench/1"
    assert document["config"] == {"hf_access_token": "***", "sa_block_q": 512}
    assert document["memory"]["peak_bytes_max"] == 7
    assert any("only the trainer ran" in line for line in document["may_not_be_used_to_claim"])
    assert document["slots_per_step"] == 3 * 4 * 256


def test_secrets_are_masked_in_every_spelling(fake, tiny):
    tiny.setenv(
        "ORCH_ARGV", os.environ["ORCH_ARGV"] + " --wandb_api_key s3cret --hf_token=s3cret --no-shuffle --name x"
    )
    tiny.setenv("MAXTEXT_EXTRA_FLAGS", os.environ["MAXTEXT_EXTRA_FLAGS"] + " hf_access_token=s3cret  ici_x=1")
    _, document, text, _ = fake("--steps=1")
    assert "s3cret" not in text
    assert document["orch_argv"][-6:] == ["--wandb_api_key", "***", "--hf_token=***", "--no-shuffle", "--name", "x"]
    assert document["flags"]["MAXTEXT_EXTRA_FLAGS"].endswith(" hf_access_token=***  ici_x=1")


def test_provenance_is_copied(fake, tiny):
    tiny.setenv("BENCH_INPUT_SHA256", "0" * 64)
    assert fake("--steps=1")[1]["provenance"]["input_sha256"] == "0" * 64


def test_out_is_the_last_line(fake, tmp_path):
    _, document, text, _ = fake("--steps=1", f"--out={tmp_path}/result.json")
    assert (tmp_path / "result.json").read_text() == text.splitlines(keepends=True)[-1]


@pytest.mark.parametrize("option", ["--out", "--plot", "--steps-file", "--save-payload", "--save-numerics"])
@pytest.mark.parametrize("name", ["missing/x.png", "folder.png"])
def test_a_file_that_cannot_be_written_is_refused_before_the_run(tiny, capsys, tmp_path, option, name):
    (tmp_path / "folder.png").mkdir()
    program = FakeProgram()
    install(program, tiny.setattr)
    assert bench_driver.main(["--steps=1", f"{option}={tmp_path}/{name}"]) == 2
    out, err = capsys.readouterr()
    assert (out, program.log) == ("", [])
    assert f"{name}: cannot write: " in err and err.count("\n") == 1


@pytest.mark.parametrize("option", ["--out", "--plot"])
def test_a_disk_that_fills_up_loses_no_result(fake, tiny, capsys, tmp_path, option):
    def full(path, data):
        raise BenchError("cannot write: No space left on device", where=path)

    tiny.setattr(bench_driver, "write_whole", full)
    code, document, _, _ = fake("--steps=3", f"{option}={tmp_path}/x.png")
    assert (code, len(document["steps"])) == (2, 3)
    assert "No space left on device" in capsys.readouterr().err


def test_a_trace_of_steps_that_are_not_run_is_refused_before_the_run(tiny, capsys):
    program = FakeProgram()
    install(program, tiny.setattr)
    assert bench_driver.main(["--steps=5", "--profile=3:3"]) == 2
    assert capsys.readouterr() == (
        "",
        "bench_driver: --profile 3:3: the run ends after step 4; run --steps 6, or trace earlier ones\n",
    )
    assert program.log == []


@pytest.mark.parametrize("name", ["steps.gif", "steps"])
def test_a_plot_is_png_or_svg(tiny, capsys, name):
    assert bench_driver.main(["--steps=1", f"--plot={name}"]) == 2
    assert "not .png or .svg" in capsys.readouterr().err


def test_plot(fake, tmp_path):
    pytest.importorskip("matplotlib")
    fake("--steps=6", f"--plot={tmp_path}/steps.svg")
    assert "<svg" in (tmp_path / "steps.svg").read_text()


def test_time_between_the_steps_fails_the_clock_audit(fake, tiny):
    tiny.setattr(bench_driver.bench_report, "step_line", lambda *args: time.sleep(0.05) or "slow")
    code, document, _, _ = fake("--steps=3")
    assert (code, document["status"]) == (2, "failed")
    assert "clock audit: the step times miss" in document["error"]


# --- faults ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("misbehave", "status", "piece"),
    [
        ("nan", "failed", "step 0: loss is not finite"),
        ("zero", "failed", "gradient norm is 0"),
        ("same", "failed", "all 3 micro-batches have the loss"),
        ("raise", "failed", "worker is in state ERROR"),
        (
            "unforced",
            "failed",
            "MaxText cannot run this: Forced routing is only supported for decoder_block in (...);"
            " --routing-load none leaves it to the router",
        ),
        ("oom", "out_of_memory", "out of memory after 0 steps"),
    ],
)
def test_faults_end_with_a_result_and_a_stopped_worker(fake, capsys, misbehave, status, piece):
    code, document, _, program = fake("--steps=2", misbehave=misbehave)
    assert (code, document["status"], document["verdict"]) == (2, status, "not enough")
    assert piece in document["error"]
    assert capsys.readouterr().err.splitlines()[-1].startswith("bench_driver: ")
    assert program.stopped == 1


def test_devices_that_report_no_memory_lose_no_result(fake):
    """As behind a Pathways proxy, whose devices are no PjRt devices and raise."""
    code, document, _, _ = fake("--steps=2", misbehave="no memory stats")
    assert (code, document["status"]) == (1, "ok")
    unknown = {"id": 0, "peak_bytes": None, "limit_bytes": None}
    assert document["memory"] == {"peak_bytes_max": None, "devices": [unknown]}


def test_a_worker_that_does_not_stop_loses_no_result(fake):
    code, document, text, _ = fake("--steps=2", misbehave="unstoppable")
    assert (code, document["status"], len(document["steps"])) == (1, "ok", 2)
    assert "the worker did not stop: ValueError: no such worker" in text


def test_an_interrupted_payload_is_one_line(tiny, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    tiny.setattr(bench_driver, "make_micro_batches", interrupted)
    assert bench_driver.main(["--payload-only", "--cpu-smoke"]) == 130
    assert capsys.readouterr() == ("", "bench_driver: interrupted by SIGINT\n")


def test_out_of_memory_while_the_engine_is_built_has_the_memory_table(fake, tiny):
    jax = pytest.importorskip("jax")

    def full(job):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 3 bytes too many")

    install(FakeProgram(), tiny.setattr)
    tiny.setattr(bench_driver.bench_runtime, "build_program", full)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert bench_driver.main(["--steps=1"]) == 2
    document = json.loads(out.getvalue().splitlines()[-1])
    assert document["status"] == "out_of_memory" and "3 bytes too many" in document["error"]
    assert [row["id"] for row in document["memory"]["devices"]] == [device.id for device in jax.devices()]
    assert (document["config"], document["mesh"]) == (None, None)


def test_a_host_stall_is_named(fake):
    document = fake("--steps=14", "--warmup=2", misbehave="stall", seconds=0.01)[1]
    assert any("step 8:" in line and "inside update without a compile" in line for line in document["host_stalls"])


def test_steps_file_gets_each_step_and_keeps_older_runs(fake, tmp_path):
    path = tmp_path / "steps.jsonl"
    fake("--steps=2", f"--steps-file={path}")
    fake("--steps=1", f"--steps-file={path}", "--seed=4")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line.get("index", line.get("schema")) for line in lines] == [
        "trainer-bench-steps/1", 0, 1, "trainer-bench-steps/1", 0,
    ]  # fmt: skip


def test_no_space_for_the_steps_file(fake, capsys):
    code, document, _, program = fake("--steps=2", "--steps-file=/dev/full")
    assert (code, document["status"]) == (2, "failed")
    assert "/dev/full: cannot write: No space left" in capsys.readouterr().err
    assert program.stopped == 1


def start(*argv, misbehave=""):
    """Start a driver process on the fake trainer."""
    command = [sys.executable, str(ROOT / "tests" / "fake_trainer.py"), misbehave, *argv]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def after_steps(path, count, process):
    """Wait until a steps file holds so many steps."""
    for _ in range(600):
        if path.exists() and len(path.read_text().splitlines()) > count:
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    pytest.fail("the driver made no steps")


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_end_with_what_was_measured(tmp_path, signum, code):
    path = tmp_path / "steps.jsonl"
    process = start("--steps=100000", f"--steps-file={path}")
    after_steps(path, 3, process)
    process.send_signal(signum)
    out, err = process.communicate(timeout=60)
    document = json.loads(out.splitlines()[-1])
    assert (process.returncode, document["status"]) == (code, "interrupted")
    assert len(document["steps"]) >= 3
    assert len(document["steps"]) == len(path.read_text().splitlines()) - 1
    assert err.splitlines()[-1].startswith(f"bench_driver: interrupted by {signum.name}")


def test_kill_9_leaves_steps_that_parse(tmp_path):
    path = tmp_path / "steps.jsonl"
    process = start("--steps=100000", f"--steps-file={path}")
    after_steps(path, 3, process)
    process.kill()
    process.communicate()
    lines = path.read_text().splitlines()
    assert [json.loads(line)["index"] for line in lines[1:]] == list(range(len(lines) - 1))


def test_a_hung_step_ends_with_a_result(tmp_path):
    process = start("--steps=100", "--step-timeout=2", misbehave="hang")
    out, err = process.communicate(timeout=120)
    document = json.loads(out.splitlines()[-1])
    assert (process.returncode, document["status"], len(document["steps"])) == (2, "hung", 2)
    assert document["memory"] is None  # a device that hangs is not asked again
    assert "step 2 did not end within --step-timeout" in err


# --- input ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "argv", "piece"),
    [
        ({"TRAINER_ARGV": None}, [], "TRAINER_ARGV is not set"),
        ({"TRAINER_ARGV": "--mesh_fsdp='2"}, [], "TRAINER_ARGV: cannot split into words"),
        ({"TRAINER_ARGV": "--nope=1"}, [], "unrecognized arguments: --nope=1"),
        ({"MAXTEXT_EXTRA_FLAGS": "x"}, [], "MAXTEXT_EXTRA_FLAGS: token 'x' is not key=value"),
        ({}, ["--sequence-lengths=sometimes"], "unknown lengths 'sometimes'"),
        ({}, ["--routing-load=7.5"], "7.5"),
        ({}, ["--replay=/nonexistent.npz"], "/nonexistent.npz: not a readable .npz"),
    ],
)
def test_bad_input(tiny, capsys, change, argv, piece):
    for name, value in change.items():
        tiny.delenv(name) if value is None else tiny.setenv(name, value)
    assert bench_driver.main(["--payload-only", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("bench_driver: ") and piece in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "argv",
    [
        ["--seed=-1"],
        ["--step-timeout=-3"],
        ["--step-timeout=x"],
        ["--max-seconds=nan"],
        ["--steps=0"],
        ["--steps=x"],
        ["--profile=3"],
        ["--until-ci=0%"],
        ["--micro-batchs=3"],
        ["--routing-skew=x"],
    ],
)
def test_bad_options(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        bench_driver.main(argv)
    assert stop.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_payload_only_is_the_same_bytes_again_and_replays(tiny, tmp_path, capsys):
    argv = ["--payload-only", "--cpu-smoke", "--routing-load=1.2", "--sequence-lengths=lognormal:90:0.4", "--seed=23"]
    for name in "ab":
        assert bench_driver.main([*argv, f"--save-payload={tmp_path}/{name}.npz"]) == 0
    a, b = (np.load(tmp_path / f"{name}.npz") for name in "ab")
    assert sorted(a.files) == sorted(b.files) and "routed_experts" in a.files
    assert all((a[name] == b[name]).all() for name in a.files)
    assert bench_driver.main([*argv, f"--replay={tmp_path}/a.npz"]) == 0
    assert "routing load: 1 layers, 8 experts over 2 shards" in capsys.readouterr().out


def test_payload_only_of_the_production_launch_counts_16_micro_batches(monkeypatch, capsys):
    environment = driver_environment("launch_dryrun")
    environment["ORCH_ARGV"] += " --mini_batch_size=64"
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MAXTEXT_EXTRA_FLAGS", environment["MAXTEXT_EXTRA_FLAGS"] + " base_num_decoder_layers=1")
    assert bench_driver.main(["--payload-only"]) == 0
    out = capsys.readouterr().out
    assert "64 rows x 65536 tokens" in out and "the argv make 16 micro-batches per optimizer step" in out


def test_routing_out_of_tolerance_is_answer_1_before_any_device(fake, capsys):
    # 2 row groups of 512 tokens x top-2 over 2 shards: loads are whole numbers of 1024, so 0.001 % cannot be met
    code, document, _, program = fake("--steps=1", "--routing-load=1.2345", "--routing-tolerance=0.001%")
    assert (code, document["status"], program.log) == (1, "out_of_tolerance", [])
    assert "layer 0" in capsys.readouterr().err


def test_a_step_trains_the_rollouts_of_the_argv_and_no_more(fake):
    # 12 rollouts of 100 tokens: two in each of 4 rows make 8, so the second micro-batch holds the other 4
    document = fake("--steps=1", "--sequence-lengths=fixed:100")[1]
    assert (document["micro_batches_per_step"], document["real_tokens_per_step"]) == (2, 12 * 100)
    assert document["slots_per_step"] == 2 * 4 * 256
    document = fake("--steps=1", "--sequence-lengths=fixed:40")[1]  # 16 would fit, 12 are asked for
    assert (document["micro_batches_per_step"], document["real_tokens_per_step"]) == (1, 12 * 40)
    document = fake("--steps=1", "--sequence-lengths=fixed:100", "--micro-batches=3")[1]
    assert document["real_tokens_per_step"] == 3 * 8 * 100  # full ones


def test_the_saved_micro_batch_is_the_runs_own(fake, tiny, tmp_path):
    for name, argv in (("run", ["--steps=1"]), ("only", ["--payload-only", "--cpu-smoke"])):
        argv += ["--sequence-lengths=fixed:40", f"--save-payload={tmp_path}/{name}.npz"]
        fake(*argv) if name == "run" else bench_driver.main(argv)
    assert (tmp_path / "run.npz").read_bytes() == (tmp_path / "only.npz").read_bytes()


def test_a_recorded_batch_gets_log_probs_that_the_gates_keep(fake, tmp_path):
    path = f"{tmp_path}/batch.npz"
    fake("--steps=1", f"--save-payload={path}")
    _, document, _, program = fake("--steps=1", f"--replay={path}")
    assert program.log.count("logps") == 1 and document["distinct_micro_batches"] == 1
    assert "logps" not in fake("--steps=1", f"--replay={path}", "--sampler-logps=synthetic")[3].log


def test_truncated_sequences_carry_gradient_unless_the_loss_masks_them(fake, tiny):
    argv = "--batch_size=3 --num_generations=4 --max_seq_token_per_tpu=256 --no-use_rollout_logps"
    for flag, error in (("", None), ("--overlong_loss_masking", "no token of the micro-batch carries gradient")):
        tiny.setenv("ORCH_ARGV", f"{argv} {flag}")
        document = fake("--steps=1", "--sequence-lengths=lognormal:9999:0.1")[1]  # every one is cut
        assert document["gradient_share"] == (None if error else 1.0)
        assert document["error"] is None if error is None else error in document["error"]


def test_fewer_distinct_batches_where_memory_is_short(tiny):
    tiny.setattr(bench_plan, "host_memory_bytes", lambda: 1)
    options = bench_driver.build_parser().parse_args(["--cpu-smoke", "--payload-only"])
    batches, count, _ = bench_plan.make_micro_batches(bench_driver.plan_run(options), options)
    assert (len(batches), count) == (1, 3)


def test_help_runs_without_the_engine():
    environment = {"PATH": os.environ["PATH"]}
    result = subprocess.run([sys.executable, "bench_driver.py", "--help"], cwd=ROOT, env=environment,
                            capture_output=True, text=True)  # fmt: skip
    assert result.returncode == 0 and "Exit status: 0" in result.stdout and result.stderr == ""


# --- the real engine -------------------------------------------------------------------------------


def real(*argv):
    """Run the driver in this process on four virtual devices; return (code, document)."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = bench_driver.main(["--cpu-smoke", *argv])
    return code, json.loads(out.getvalue().splitlines()[-1])


@pytest.fixture(scope="module")
def real_runs(tmp_path_factory):
    """Two runs of the real engine with one seed: a plain one, and one traced and staged at the step boundary.

    Every engine compiles and traces anew, so there are no more. `seen` is what went into the stand-in's worker and came
    out of it in the plain run: micro-batches and metrics.
    """
    pytest.importorskip("maxtext", reason="MaxText is not installed")
    import tunix_standin

    folder, seen = tmp_path_factory.mktemp("real"), {"fwd_bwd": [], "get_metrics": []}
    worker = tunix_standin.TrainerWorker
    fwd_bwd, get_metrics = worker.fwd_bwd, worker.get_metrics

    @functools.wraps(fwd_bwd)
    def noted_fwd_bwd(self, request, **options):
        seen["fwd_bwd"].append(request.payload)
        return fwd_bwd(self, request, **options)

    @functools.wraps(get_metrics)
    def noted_get_metrics(self):
        seen["get_metrics"].append(get_metrics(self))
        return seen["get_metrics"][-1]

    argv = ["--steps=4", "--routing-load=1.2", "--sequence-lengths=lognormal:100:0.5"]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in driver_environment("launch_tiny").items():
            patch.setenv(name, value)
        with pytest.MonkeyPatch.context() as spy:
            spy.setattr(worker, "fwd_bwd", noted_fwd_bwd)
            spy.setattr(worker, "get_metrics", noted_get_metrics)
            plain = real(*argv)
        again = real(*argv, "--stage-before-update", "--profile=2:1", f"--profile-dir={folder}/trace")
    return {"plain": plain[1], "again": again[1], "seen": seen}


def curve(document):
    return [(step["losses"], step["gradient_norm"]) for step in document["steps"]]


def test_real_engine_trains(real_runs):
    document = real_runs["plain"]
    assert document["status"] == "ok", document["error"]
    assert document["runtime"] in ("standin", "tunix")
    assert document["mesh"] == {"fsdp": 2, "expert": 2}
    norms = [step["gradient_norm"] for step in document["steps"]]
    assert min(norms) > 0 and len(set(norms)) == 4
    assert document["steps"][0]["compiles"] and not document["steps"][-1]["compiles"]
    assert document["load"]["layers"][0]["target"] == 1.2
    assert abs(document["load"]["layers"][0]["relative_error"]) <= 0.01
    assert document["config"]["profiler_steps"] == 0  # else the engine traces micro-steps 1 to 5 unasked
    assert document["versions"]["maxtext"]
    assert document["staged_boundary"] == {"asked": False, "stopped_at_step": None}


def test_real_engine_pools_the_metrics_of_every_micro_batch(real_runs):
    """Each step's metrics hold one value per micro-batch, weighted by the tokens that it scores and the loss keeps."""
    document, seen = real_runs["plain"], real_runs["seen"]
    if document["runtime"] != "standin":
        pytest.skip("Tunix from git has a worker of its own")
    count = document["micro_batches_per_step"]
    assert (len(seen["fwd_bwd"]), len(seen["get_metrics"])) == (4 * count, 4) and count >= 2
    for step, metrics in enumerate(seen["get_metrics"]):
        loss = metrics.weighted_metrics["loss"]
        batches = seen["fwd_bwd"][step * count : (step + 1) * count]
        kept = [((b.completion_mask > 0) & (b.overlong == 0)).sum() for b in batches]  # --overlong_loss_masking
        assert loss.denominator.tolist() == kept
        assert len(set(loss.unreduced_sum.tolist())) == count
        assert len(metrics.weighted_metrics) + len(metrics.scalar_metrics) >= 90


def test_real_documents_keep_their_schema(real_runs):
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((ROOT / "schemas" / "trainer-bench-1.schema.json").read_text())
    for name in ("plain", "again"):
        jsonschema.Draft202012Validator(schema).validate(real_runs[name])


def test_one_seed_twice_is_the_same_bit_for_bit_and_neither_trace_nor_staging_changes_a_number(real_runs):
    assert curve(real_runs["plain"]) == curve(real_runs["again"])


def test_profiled_steps_are_excluded_and_the_trace_is_there(real_runs):
    document = real_runs["again"]
    assert document["status"] == "ok", document["error"]
    assert document["headline"]["excluded_steps"]["2"] == "profiled"
    assert document["profile"]["bytes"] > 0 and document["profile"]["events"] > 0
    assert os.path.exists(document["profile"]["file"])


def test_a_staged_run_reports_the_wait_at_each_boundary(real_runs):
    staging, steps = real_runs["again"]["staged_boundary"], real_runs["again"]["steps"]
    assert staging["asked"] and staging["boundaries"] >= 1
    waits = [step["device_wait_seconds"] for step in steps if step["device_wait_seconds"] is not None]
    assert staging["device_wait_seconds"] == waits and len(waits) == staging["boundaries"]
