"""check_numerics_cpu: measures worked out by hand, reports, every check on MaxText's own model, every fault noticed."""

from __future__ import annotations

import argparse
import copy
import io
import json
import math
import re
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import check_numerics_cpu as tool
import numerics_checks
import numerics_compare
import numerics_file
import numerics_grpo
import numerics_knobs
import numerics_lab
import numerics_measures as measures
from bench_common import BenchError
from numerics_checks import Finding

ROOT = Path(__file__).parent.parent
TINY = ROOT / "examples" / "launch_tiny.yaml"
QUICK = ("payload", "routing")  # the others compile 20 s to three minutes of programs each


# Measures -----------------------------------------------------------------------------------------------------


def test_ulps_count_float32_neighbours():
    one, tiny = np.float32(1), np.finfo(np.float32).smallest_subnormal
    a = np.array([one, one, tiny, 0.0, np.nan, np.nan, np.inf], np.float32)
    b = np.array([np.nextafter(one, np.float32(2)), one, -tiny, -0.0, np.nan, 1.0, np.inf], np.float32)
    assert measures.ulps(a, b).tolist() == [1, 0, 2, 0, 0, 2.0**32, 0]
    assert measures.ulps(1.0, 2.0) == 2**23  # one binade of float32


def test_scaled_ulps_are_those_of_the_largest_entry():
    b = np.array([4.0, 1e-3])  # float32 steps at 4 are 2^-21
    assert measures.scaled_ulps(b + [0, 2.0**-21], b).tolist() == [0, 1]
    assert measures.scaled_ulps([np.nan, 1.0], [1.0, 1.0]).tolist() == [measures.INFINITE, 0]
    assert measures.scaled_ulps([0.0], [0.0]).tolist() == [0]


def test_kl_cosine_flips_and_summaries_by_hand():
    half, quarter = np.log([0.5, 0.5]), np.log([0.25, 0.75])
    assert math.isclose(float(measures.kl_divergence(half, quarter)), 0.5 * math.log(4 / 3), rel_tol=1e-12)
    assert measures.cosine({"a": [1.0, 0.0], "b": [1.0]}, {"a": [1.0, 0.0], "b": [0.0]}) == pytest.approx(0.5**0.5)
    assert math.isnan(measures.cosine([0.0], [1.0]))
    assert measures.flip_share([[1, 0, 1], [0, 1, 1]], [[1, 0, 1], [1, 0, 1]]) == 0.5
    assert measures.summary(np.arange(2000)) == {"max": 1999.0, "p99.9": 1998.0}
    assert measures.summary({}) == {"max": 0.0, "p99.9": 0.0}
    assert measures.relative_error([3.0, 0.0], [0.0, 4.0]) == pytest.approx(5 / 4)


@settings(deadline=None, derandomize=True, max_examples=200)
@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=20), st.integers(0, 40))
def test_ulps_are_a_distance(values, steps):
    a = np.array(values, np.float32)
    b = a.copy()
    for _ in range(steps):
        b = np.where(np.isfinite(b), np.nextafter(b, np.float32(np.inf)), b)
    apart = measures.ulps(a, b)
    assert (apart == measures.ulps(b, a)).all() and (measures.ulps(a, a) == 0).all()
    finite = np.isfinite(a) & np.isfinite(b)
    assert (apart[finite & (a != 0)] <= steps).all() and (apart[finite] >= steps - 1).all()


# The independent loss -----------------------------------------------------------------------------------------


def one_sequence(**fields):
    """A batch of one padded row with two scored tokens, advantage 1."""
    batch = dict.fromkeys(numerics_checks.bench_payload.FIELDS)
    batch |= {"completion_mask": np.ones((1, 2), np.float32), "advantages": np.ones((1, 2), np.float32),
              "old_per_token_logps": np.log([[0.5, 0.5]])}  # fmt: skip
    return batch | fields


def options(**changes):
    plain = {"epsilon": 0.2, "epsilon_high": 0.28, "epsilon_c": None, "beta": 0.0, "loss_agg_mode": "token-mean",
             "overlong_loss_masking": False, "seq_logprob_error_threshold": None, "kl_clamp_value": None,
             "truncated_importance_sampling_type": None, "truncated_importance_sampling_ratio_min": None,
             "truncated_importance_sampling_ratio": None, "kl_loss_mode": "kl"}  # fmt: skip
    return types.SimpleNamespace(**plain | changes)


def test_the_independent_loss_by_hand():
    ratios = np.log([[0.5 * 1.1, 0.5 * 1.5]])  # 1.1 is inside the clip, 1.5 is cut to 1.28
    assert numerics_grpo.loss(ratios, one_sequence(), options()) == pytest.approx((-2.38, 2))
    assert numerics_grpo.loss(
        ratios, one_sequence(), options(loss_agg_mode="sequence-mean-token-mean")
    ) == pytest.approx((-1.19, 1))
    bad = one_sequence(advantages=-np.ones((1, 2), np.float32))  # nothing clips a bad token's ratio from above
    assert numerics_grpo.loss(ratios, bad, options())[0] == pytest.approx(2.6)
    assert numerics_grpo.loss(ratios, bad, options(epsilon_c=1.2))[0] == pytest.approx(2.3)
    far = one_sequence(ref_per_token_logps=ratios - 0.5)
    assert numerics_grpo.loss(ratios, far, options(beta=0.1))[0] == pytest.approx(-2.38 + 0.1)
    assert numerics_grpo.loss(ratios, one_sequence(overlong=np.ones(1)), options(overlong_loss_masking=True)) == (0, 0)


def test_the_gates_of_the_independent_loss_by_hand():
    logps = np.log([[0.5, 0.5]])
    drifted = one_sequence(rollout_per_token_logps=logps - np.log([[1.5, 1.5]]))
    assert numerics_grpo.loss(logps, drifted, options(seq_logprob_error_threshold=1.6)) == pytest.approx((-2, 2))
    assert numerics_grpo.loss(logps, drifted, options(seq_logprob_error_threshold=1.4)) == (0, 0)
    tis = {"truncated_importance_sampling_type": "seq-mask-tis", "truncated_importance_sampling_ratio_min": 1.0}
    kept = options(**tis, truncated_importance_sampling_ratio=2.0)
    assert numerics_grpo.loss(logps, drifted, kept) == pytest.approx((-3, 2))  # weights 1.5
    rejected = options(**tis, truncated_importance_sampling_ratio=1.4)
    assert numerics_grpo.loss(logps, drifted, rejected) == (0, 2)  # keeps its place in the denominator


# Options and reports ------------------------------------------------------------------------------------------

BAD_OPTIONS = [
    (["--only", "payloads"], "no check 'payloads'"),
    (["--skip", ",".join(tool.NAMES)], "leave no check"),
    (["--knob", "dtype"], "KEY=VALUE expected, got 'dtype'"),
    (["--knob", "dtype="], "KEY=VALUE expected"),
    (["--routing-tolerance", "x"], "a percentage expected"),
    (["--routing-tolerance", "0"], "between 0% and 100%"),
    (["--compare", "a.npz"], "expected 2 arguments"),
    *(
        (["--compare", "a.npz", "b.npz", *more], "--compare runs no check")
        for more in (["--audit"], ["--list"], ["--knob", "a=b"], ["--only", "payload"], ["--skip", "grpo"])
    ),
    (["--knob", "dtype=float32", "--only", "payload"], "--knob is for the check `knobs`"),
    (["--knob", "dtype=float32", "--audit"], "--knob is for the check `knobs`"),
    (["--knob", " = "], "KEY=VALUE expected"),
    (["--seed", "-1"], "a whole number from 0 expected"),
    (["--typo"], "unrecognized arguments"),
]


@pytest.mark.parametrize(("argv", "message"), BAD_OPTIONS)
def test_bad_options(argv, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        tool.main(argv)
    out, err = capsys.readouterr()
    assert stopped.value.code == 2 and out == "" and message in err


BAD_INPUTS = [
    (["--launch-render", "missing.yaml"], "missing.yaml: cannot read"),
    (["--launch-render", "{dir}/empty.yaml"], "no Kubernetes object"),
    (["--launch-render", "{dir}/other.yaml"], "no trainer in this render"),
    (["--compare", "missing.npz", "missing.npz"], "missing.npz: cannot read"),
    (["--compare", "{dir}/empty.yaml", "{dir}/empty.yaml"], "no saved numerics"),
    (["--compare", "{dir}/other.npz", "{dir}/other.npz"], "no saved numerics"),
]


@pytest.mark.parametrize(("argv", "message"), BAD_INPUTS)
def test_bad_inputs(argv, message, capsys, tmp_path):
    (tmp_path / "empty.yaml").write_text("")
    (tmp_path / "other.yaml").write_text("apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: a\n")
    np.savez(tmp_path / "other.npz", losses=np.zeros(3))
    assert tool.main([word.format(dir=tmp_path) for word in argv]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("check_numerics_cpu: ") and message in err


class StubCheck:
    """A check with given findings; with the fault it finds what `noticing` says, unbroken what `found` does."""

    doc = "Stub."

    def __init__(self, name, found, noticing):
        self.name, self._found, self._noticing, self.faults = name, found, noticing, {"broken": "something is broken"}
        self.table, self.rows = ["a table"], []

    def run(self, lab, fault=""):
        return self._noticing if fault == "broken" else self._found

    def applies(self, lab, fault):
        return True


PASS = Finding("a thing", 1.0, "ulps", "<= 64", "rounding")
FAIL = Finding("another", 99.5, "ulps", "<= 64", "rounding", "FAIL")
LIMIT = Finding("a third", None, "", "", "not in this version", "known limit")


@pytest.fixture
def stub(monkeypatch):
    """Run main on a stub lab whose only check has these findings."""

    def run(found, noticing=(FAIL,), argv=()):
        monkeypatch.setattr(tool, "make_lab", lambda launch, options: (types.SimpleNamespace(
            plan=types.SimpleNamespace(shrunk=[])), set()))  # fmt: skip
        check = StubCheck("payload", list(found), list(noticing))
        monkeypatch.setattr(tool, "all_checks", lambda known, knobs: {"payload": check})
        return tool.main(["--only", "payload", *argv])

    return run


def test_a_report_in_text(stub, capsys):
    assert stub([PASS, FAIL, LIMIT]) == 1
    out, err = capsys.readouterr()
    assert out == (
        "pass        payload: a thing\n            1 <= 64 ulps [1]\n"
        "FAIL        payload: another\n            99.5 <= 64 ulps [1]\n"
        "known limit payload: a third\n            [2]\n"
        "[1] rounding\n[2] not in this version\n"
        "verdict: differs (3 rows; 1 known limits of the installed MaxText)\n"
    )
    assert err == "check_numerics_cpu: payload: Stub.\n"


def test_passes_and_known_limits_are_exit_0(stub):
    assert stub([PASS, LIMIT]) == 0


def test_json_agrees_with_the_text(stub, capsys):
    assert stub([PASS, FAIL, LIMIT], argv=["--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert next(iter(report)) == "schema" and report["schema"] == tool.SCHEMA and report["verdict"] == "differs"
    assert [(row["status"], row["value"]) for row in report["rows"]] == [
        ("pass", 1.0), ("FAIL", 99.5), ("known limit", None)]  # fmt: skip
    assert stub([Finding("n", math.nan, "ulps", "<= 1", "w", "FAIL")], argv=["--format", "json"]) == 1
    assert json.loads(capsys.readouterr().out)["rows"][0]["value"] is None


def test_markdown(stub, capsys):
    assert stub([PASS], argv=["--format", "markdown"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "| pass | payload | a thing | 1 | <= 64 | ulps | rounding |" and lines[-1] == "Verdict: pass."


def test_a_check_that_does_not_notice_its_fault_fails_the_audit(stub, capsys):
    assert stub([PASS], noticing=[PASS], argv=["--audit"]) == 1
    assert capsys.readouterr().out.startswith("MISSED      payload: something is broken\n            by nothing\n")
    assert stub([PASS], noticing=[FAIL], argv=["--audit"]) == 0
    assert "by another: 99.5 ulps, limit <= 64" in capsys.readouterr().out
    # What fails whether broken or not has noticed nothing.
    assert stub([FAIL], noticing=[FAIL], argv=["--audit", "--json"]) == 1
    row = json.loads(capsys.readouterr().out)["rows"][0]
    assert not row["noticed"] and row["by"].startswith("nothing: with nothing broken it fails too, another: 99.5 ulps")


def test_list_names_every_check_and_fault(capsys):
    assert tool.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines if not line.startswith(" ")] == list(tool.NAMES)
    assert sum(line.startswith("    --audit: ") for line in lines) == 25


def test_a_list_takes_a_choice_and_a_format(capsys):
    assert tool.main(["--list", "--only", "grpo", "--only", "knobs,payload", "--skip", "knobs", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["kind"], report["verdict"]) == ("list", None)
    assert [row["check"] for row in report["rows"]] == ["payload", "grpo"]
    assert report["rows"][1]["faults"] == dict(numerics_grpo.GRPO.faults)
    assert tool.main(["--list", "--only", "knobs", "--format", "markdown"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and lines[2].startswith("| knobs | Every numerics option of the launch")


def test_a_launch_from_a_file_from_stdin_and_built_in(monkeypatch):
    launch = tool.read_launch(str(TINY))
    monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(buffer=io.BytesIO(TINY.read_bytes())))
    piped = tool.read_launch("-")
    assert (piped.trainer, piped.orch, piped.env) == (launch.trainer, launch.orch, launch.env)
    assert "--mesh_expert=2" in launch.trainer and launch.env["FLOAT32_LOGITS"] == "true"
    assert "--mesh_expert=2" in tool.read_launch(None).trainer


def test_a_bench_render_carries_the_launch(tmp_path):
    import render_bench

    out = tmp_path / "bench.yaml"
    assert render_bench.main(["--launch-render", str(TINY), "--name", "tiny-bench", "--out", str(out)]) == 0
    carried, launch = tool.read_launch(str(out)), tool.read_launch(str(TINY))
    same = set(launch.trainer) & set(carried.trainer)
    assert len(same) > len(launch.trainer) - 5 and set(carried.orch) <= set(launch.orch) and carried.orch
    assert carried.env["MAXTEXT_EXTRA_FLAGS"] == launch.env["MAXTEXT_EXTRA_FLAGS"]


def test_the_environment_of_jax_is_ours_and_put_back(monkeypatch):
    """A launch's flags would end the process: a CPU's XLA does not know --xla_tpu_..., and says so by aborting."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_tpu_enable_async_collective_fusion=true")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/kept")
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
    monkeypatch.delitem(sys.modules, "jax", raising=False)
    before = dict(tool.os.environ)
    with tool.jax_on_cpu():
        inside = dict(tool.os.environ)
    assert inside["XLA_FLAGS"] == tool.XLA_FLAGS and inside["JAX_PLATFORMS"] == "cpu"
    assert inside["JAX_COMPILATION_CACHE_DIR"] == "/kept" and inside["TF_CPP_MIN_LOG_LEVEL"] == "3"
    assert dict(tool.os.environ) == before


def test_help_in_a_clean_process():
    done = subprocess.run([sys.executable, str(ROOT / "check_numerics_cpu.py"), "--help"], env={"PATH": "/usr/bin"},
                          capture_output=True, text=True, timeout=120)  # fmt: skip
    assert done.returncode == 0 and "Exit status" in done.stdout and done.stderr == ""


# Saved numerics -----------------------------------------------------------------------------------------------


def saved(path, **changes):
    """Write a file as save_numerics would, of two steps of two micro-batches; an array of None is left out."""
    options = changes.pop("maxtext", {})
    about = {"schema": numerics_file.SCHEMA, "micro_batches_sha256": changes.pop("sha", "ab"), "seed": 0,
             "versions": {}, "maxtext": None if options is None else {"dtype": "float32"} | options}  # fmt: skip
    arrays = {"losses": np.array([[1.0, 2.0], [3.0, 4.0]]), "gradient_norms": np.array([1.0, 2.0]),
              "logps": np.full((2, 3), -6.0, np.float32), "mask": np.ones((2, 3), np.float32),
              "weights/a.kernel": np.ones(4, np.float32)}  # fmt: skip
    given = {name: value for name, value in (arrays | changes).items() if value is not None}
    np.savez(path, about=np.array(json.dumps(about)), **given)
    return str(path)


def test_equal_runs_compare_equal(tmp_path, capsys):
    a, b = saved(tmp_path / "a.npz"), saved(tmp_path / "b.npz", maxtext={"dtype": "bfloat16"})
    assert tool.main(["--compare", a, b, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    numbers = {row["what"]: row["value"] for row in rows}
    assert numbers.pop("weights: cosine") == 1 and not any(numbers.values())
    assert rows[-1]["what"] == "MaxText option dtype: float32 -> bfloat16"
    assert {row["status"] for row in rows if not row["limit"]} == {"note"}


def test_what_neither_run_knows_is_said(tmp_path, capsys):
    """A norm that no run recorded is no distance of 0, and two losses of NaN are no agreement."""
    unknown = {"gradient_norms": np.full(2, np.nan)}
    a, b = saved(tmp_path / "a.npz", **unknown), saved(tmp_path / "b.npz", **unknown)
    assert tool.main(["--compare", a, b, "--json"]) == 0
    rows = {row["what"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert rows["gradient norms"]["value"] is None and rows["gradient norms"]["status"] == "note"
    broken = {"losses": np.array([[1.0, np.nan], [np.inf, 4.0]])}
    a, b = saved(tmp_path / "a.npz", **broken), saved(tmp_path / "b.npz", **broken)
    assert tool.main(["--compare", a, b, "--json"]) == 1
    rows = {row["what"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert rows["losses: not finite in both runs"]["value"] == 2
    assert rows["losses: relative difference"]["value"] is None


def test_distances_of_two_runs_by_hand(tmp_path, capsys):
    a = saved(tmp_path / "a.npz", **{"weights/a.kernel": np.array([3.0, 4.0, 0, 0], np.float32)})
    b = saved(tmp_path / "b.npz", **{"weights/a.kernel": np.array([4.0, 3.0, 0, 0], np.float32)},
              logps=np.full((2, 3), -6.5, np.float32))  # fmt: skip
    assert tool.main(["--compare", a, b, "--json"]) == 1
    values = {row["what"]: row["value"] for row in json.loads(capsys.readouterr().out)["rows"]}
    assert values["weights: cosine"] == pytest.approx(24 / 25)
    assert values["weights: relative difference"] == pytest.approx(2**0.5 / 5)
    assert values["log-probs: largest difference"] == 0.5
    assert values["log-probs before step 0"] == 2**20  # float32 has 2^21 steps of 2^-21 between 6 and 7
    kl = math.exp(-0.5) - 0.5
    assert values["log-probs: KL estimate (k3) over the scored tokens"] == pytest.approx(kl)


@pytest.mark.parametrize("change, what", [
    ({"losses": np.array([[1.0, 2.001], [3.0, 4.0]])}, "losses of the first step"),
    ({"losses": np.array([[1.0, 2.0], [3.0, 4.001]])}, "losses of all steps"),
    ({"gradient_norms": np.array([1.001, 2.0])}, "gradient norm of the first step"),
    ({"logps": np.full((2, 3), -6.01, np.float32)}, "log-probs before step 0"),
    ({"weights/a.kernel": np.array([1, 1, 1, 1.001], np.float32)}, "weights after the last step, worst a.kernel"),
])  # fmt: skip
def test_a_difference_is_named(tmp_path, capsys, change, what):
    a, b = saved(tmp_path / "a.npz"), saved(tmp_path / "b.npz", **change)
    assert tool.main(["--compare", a, b, "--json"]) == 1
    failed = [row["what"] for row in json.loads(capsys.readouterr().out)["rows"] if row["status"] == "FAIL"]
    assert what in failed and len(failed) <= 2


@pytest.mark.parametrize("change, message", [
    ({"sha": "cd"}, "different micro-batches"),
    ({"losses": np.ones((3, 2)), "gradient_norms": np.ones(3)}, "losses [2, 2] and [3, 2]"),
    ({"weights/b": np.ones(1)}, "different weights: b none and [1]"),
    ({"weights/a.kernel": np.ones(5)}, "different weights: a.kernel [4] and [5]"),
    ({"weights/a.kernel": np.ones(1)}, "different weights: a.kernel [4] and [1]"),
    ({"mask": np.zeros((2, 3))}, "different scored tokens"),
    ({"sha": None}, "damaged: no micro_batches_sha256"), ({"maxtext": None}, "damaged: no maxtext"),
    ({"losses": None}, "damaged: no losses"), ({"gradient_norms": None}, "damaged: no gradient_norms"),
    ({"losses": np.ones((0, 2))}, "damaged: losses [0, 2]"), ({"losses": np.float64(1)}, "damaged: losses []"),
    ({"gradient_norms": np.ones(1)}, "damaged: 2 steps of losses, 1 of gradient norms"),
    ({"mask": None}, "damaged: log-probs and mask only come together"),
    ({"mask": np.ones((2, 4))}, "damaged: log-probs [2, 3], mask [2, 4]"),
    ({"losses": np.array([["a", "b"]] * 2)}, "damaged: losses is <U1"),
])  # fmt: skip
def test_runs_that_cannot_be_compared(tmp_path, change, message):
    a, b = saved(tmp_path / "a.npz"), saved(tmp_path / "b.npz", **change)
    with pytest.raises(BenchError, match=re.escape(message)):
        numerics_compare.compare(a, b)


def test_saving_needs_a_step(tmp_path):
    with pytest.raises(BenchError, match="no step to save"):
        numerics_file.save_numerics(str(tmp_path / "x.npz"), types.SimpleNamespace(steps=[]))


def test_a_run_is_saved_and_read_back(lab, tmp_path):
    from flax import nnx

    model = lab[0].model()  # an engine's, without the quarter of a minute in which MaxText makes one
    engine = types.SimpleNamespace(model=nnx.merge(model.graph, model.params, model.rest, copy=True))
    batches = [lab[0].batch(packed=True)]
    run = types.SimpleNamespace(
        steps=[types.SimpleNamespace(losses=[0.5, 0.25], gradient_norm=2.0)],
        policy_logps=batches[0]["completion_mask"], batches=batches, options=types.SimpleNamespace(seed=3),
        plan=lab[0].plan, program=types.SimpleNamespace(engine=engine),
    )  # fmt: skip
    path = str(tmp_path / "run.npz")
    numerics_file.save_numerics(path, run)
    about, arrays = numerics_file.load_numerics(path)
    assert arrays["losses"].tolist() == [[0.5, 0.25]] and arrays["gradient_norms"].tolist() == [2.0]
    assert about["seed"] == 3 and about["maxtext"]["override_model_config"] == "true"
    whole = numerics_lab.flat(model.params)
    name = "base.decoder.logits_dense.kernel"
    assert (arrays[f"weights/{name}"] == whole[name][::18, ::128]).all()  # 4 of 72 and 4 of 512
    assert {key.removeprefix("weights/") for key in arrays if key.startswith("weights/")} == set(whole)
    assert tool.main(["--compare", path, path]) == 0


# Knobs, without running any ------------------------------------------------------------------------------------


def far(**changes):
    """A distance that is 0 but for some measures."""
    names = numerics_knobs.Distance.__dataclass_fields__
    return numerics_knobs.Distance(**dict.fromkeys(names, 0.0) | {"grad_cosine": 1.0} | changes)


def test_verdicts():
    floor = far(grad_relative=1e-6, logp_ulps_max=3.0)
    assert numerics_knobs.verdict(far(), floor) == ("bit identical", "")
    assert numerics_knobs.verdict(far(grad_relative=3.9e-6), floor) == ("within noise", "")
    assert numerics_knobs.verdict(far(grad_relative=5e-6), floor) == (
        "changes numerics", "grad_relative 5e-06, 5 x the noise floor")  # fmt: skip
    word, figure = numerics_knobs.verdict(far(router_flips=0.01), floor)
    assert word == "changes numerics" and figure.startswith("router_flips 0.01, ")
    assert numerics_knobs.verdict(far(logp_ulps_max=12.0), floor) == ("within noise", "")
    assert numerics_knobs.verdict(far(update_relative=math.nan), floor)[0] == "changes numerics"
    assert numerics_knobs.over_noise(far(logp_ulps_max=12.0, grad_relative=1e-6), floor) == (4.0, "logp_ulps_max")


def test_the_launch_s_own_options_are_found_before_the_smoke_run_changed_them():
    from bench_config import Setting

    pairs = [Setting("dtype", "bfloat16", "build_maxtext_config"), Setting("dtype", "float32", "cpu-smoke"),
             Setting("float32_logits", "True", "env"), Setting("run_name", "x", "")]  # fmt: skip
    assert numerics_knobs.launch_values(pairs) == {"dtype": "bfloat16", "float32_logits": "true"}
    assert numerics_knobs.alternative("dtype", "bfloat16") == "float32"
    assert numerics_knobs.alternative("remat_policy", "custom") == "full"
    assert numerics_knobs.alternative("attention", "flash") is None


def knob_row(verdict="bit identical", detail="", asked=False, **distances):
    """A row of the knobs check whose knob is `k`, tried as `b` instead of `a`."""
    return numerics_knobs.Row("k", "a", "b", verdict, detail, asked, **distances)


def test_only_knobs_that_were_asked_for_count():
    own = knob_row(to_launch=far(), to_float32=far(grad_cosine=0.999))
    away = {"to_launch": far(grad_relative=1.0), "to_float32": far()}
    found = numerics_knobs.findings([own, knob_row("changes numerics", "much", **away)], far())
    assert all(finding.ok for finding in found) and len(found) == 4
    asked = numerics_knobs.findings([own, knob_row("changes numerics", "much", asked=True, **away)], far())
    assert [finding.status for finding in asked].count("FAIL") == 1
    assert asked[-1].what == "k=a -> b: changes numerics: much"
    assert asked[-1].value == 2.0**24 and asked[-1].limit == "<= 4"  # 1.0 over float32's own rounding
    unknown = numerics_knobs.findings([own, knob_row("unknown here", "a TPU kernel", asked=True)], far())
    assert unknown[-1].status == "known limit" and unknown[-1].value is None  # not judged: neither pass nor FAIL
    poor = knob_row(to_launch=far(), to_float32=far(grad_cosine=0.9))
    assert not all(finding.ok for finding in numerics_knobs.findings([poor], far()))


def test_knobs_that_this_machine_cannot_judge():
    known = {"dtype", "megablox", "remat_policy", "steps"}

    def reason(key, own, value, here=()):
        return numerics_knobs._unknown(key, own, value, dict(here), known)

    assert reason("no_such_option", None, "1") == "not an option of the installed MaxText"
    assert reason("megablox", "true", None) == "a TPU kernel or layout, which a CPU does not run"
    # The launch runs custom, which names memory spaces of a TPU: full against full would be no answer.
    assert reason("remat_policy", "custom", "full").startswith("a CPU does not run the launch's own remat_policy=cust")
    assert reason("dtype", "float32", "bfloat16", {"dtype": "float32"}) == reason("steps", None, "3") == ""


def test_every_knob_given_is_tried_once():
    pairs = [("dtype", "float32"), ("dtype", "bfloat16"), ("dtype", "float32")]
    assert numerics_knobs.make_check(pairs, set()).asked == pairs[:2]


def test_the_table_fits_80_columns_and_holds_every_measure():
    d = far(loss_ulps=1, logp_ulps_max=12345678, logp_ulps_p999=9999, kl_nats_max=1.23e-13, router_flips=1,
            grad_ulps_max=45678.9, grad_ulps_p999=0.5, grad_relative=1.5e-10, grad_cosine=-0.5,
            update_relative=0.25)  # fmt: skip
    rows = [numerics_knobs.Row("k", "a", "b", "within noise", "", False, d, d, 1.25)]
    table = numerics_knobs.lines(rows, d)
    assert max(map(len, table)) <= 80
    assert table[5].split() == ["L", "1", "1.2e7", "9999", "1.2e-13", "100%", "4.6e4", "0.5", "1.5e-10",
                                "-0.5000000", "0.25"]  # fmt: skip
    assert len({len(line) for line in table[2:4]} | {len(line) for line in table[5:7]}) == 1  # columns end together


# On MaxText's own model ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lab():
    """The built-in launch's lab, and MaxText's keys; models are built when a check asks for them."""
    pytest.importorskip("maxtext", reason="MaxText is not installed")
    options = argparse.Namespace(routing_load="1.3", routing_tolerance=0.01, seed=0)
    return tool.make_lab(tool.read_launch(str(TINY)), options)


def check(name, known, knobs=None):
    return tool.all_checks(known, knobs or [])[name]


EACH = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in tool.NAMES]


@pytest.mark.parametrize("name", EACH)
def test_each_check_passes_on_maxtext(lab, name):
    found = check(name, lab[1]).run(lab[0])
    assert [finding for finding in found if finding.status == "FAIL"] == []
    assert len(found) >= 4
    limits = {finding.what.split(":")[0] for finding in found if finding.status == "known limit"}
    assert limits <= {"Gated DeltaNet", "unset tokens that do not fall back to the gate"}


@pytest.mark.parametrize("name", EACH)
def test_each_fault_is_noticed(lab, name):
    rows = tool.run_audit(lab[0], {name: check(name, lab[1])}, [name])
    assert rows and [row["fault"] for row in rows if not row["noticed"]] == []


def variant(lab, **changes):
    """The lab with some attributes changed, its models shared; what it found out about experts is forgotten."""
    other = copy.copy(lab[0])
    vars(other).pop("forces_experts", None)
    vars(other).update(changes)
    return other


def test_a_dense_model_has_no_router_and_no_faults_of_one(lab):
    dense = variant(lab, experts=0)
    assert dense.batch(packed=True)["routed_experts"] is None
    assert [one.status for one in check("routing", lab[1]).run(dense)] == ["note"]
    assert tool.run_audit(dense, tool.all_checks(lab[1], []), ["routing"]) == []


def test_a_model_whose_experts_cannot_be_forced_is_a_known_limit(lab):
    def refuse(batch):
        raise NotImplementedError

    other = variant(lab, model=lambda: types.SimpleNamespace(trace=refuse))
    assert other.batch(packed=True)["routed_experts"] is None
    assert [one.status for one in check("routing", lab[1]).run(other)] == ["known limit"]


@pytest.mark.parametrize("name, broken", [
    ("routed_experts", lambda value: None), ("advantages", lambda value: value[:, :-1]),
    ("overlong", lambda value: value[0]), ("segment_positions", lambda value: None),
])  # fmt: skip
def test_a_payload_of_other_shapes_is_a_finding(lab, monkeypatch, name, broken):
    build = numerics_checks.bench_payload.build_micro_batch

    def build_broken(*args):
        batch = build(*args)
        return batch | {name: broken(batch[name])}

    monkeypatch.setattr(numerics_checks.bench_payload, "build_micro_batch", build_broken)
    found = check("payload", lab[1]).run(lab[0])
    assert [one.status for one in found] == ["FAIL"] and name in found[0].what


@pytest.mark.parametrize("seed", [2, 3, 5, 17, 24, 66])
def test_gates_clips_and_kl_are_felt_whatever_the_seed(lab, seed):
    other = variant(lab, seed=seed, forces_experts=True)
    tables = {packed: numerics_grpo.table_batch(other, packed) for packed in (False, True)}
    found = []
    for name, (packed, options) in numerics_grpo.make_cases().items():
        found += numerics_grpo._gates_bite(name, *tables[packed], options)
        found += numerics_grpo._options_matter(name, *tables[packed], options)
    assert [one.what for one in found if not one.ok] == []
    felt = "the clip", "epsilon_c", "kl_clamp_value", "beta", "overlong", "seq_logprob_error", "truncated_importance"
    assert all(any(f"control: {option}" in one.what for one in found) for option in felt)


def test_a_real_run_through_main(lab, capsys, monkeypatch):
    monkeypatch.setattr(tool, "make_lab", lambda launch, options: lab)
    assert tool.main(["--only", "payload,routing", "--launch-render", str(TINY)]) == 0
    out = capsys.readouterr().out
    assert "pass        payload: fullest shard over balanced, 40 layers, worst" in out and "for 1.3000\n" in out
    assert "pass        routing: tokens that used other experts than forced\n            0 <= 0 share" in out
    assert out.splitlines()[-1].startswith("verdict: pass (") and max(map(len, out.splitlines())) <= 80


@pytest.mark.slow
def test_a_knob_that_changes_numerics_is_exit_1(lab, capsys, monkeypatch):
    monkeypatch.setattr(tool, "make_lab", lambda launch, options: lab)
    argv = ["--only", "knobs", "--knob", "float32_gate_logits=false", "--knob", "no_such_option=1"]
    assert tool.main(argv) == 1
    out = " ".join(capsys.readouterr().out.split())  # rows are folded at 80 columns, anywhere
    assert "float32_gate_logits=true -> false: changes numerics" in out
    assert "no_such_option=(default) -> 1: unknown here: not an option of the installed MaxText" in out
    assert "megablox=false -> ?: unknown here: a TPU kernel" in out
    assert "remat_policy=full -> minimal: bit identical" in out
