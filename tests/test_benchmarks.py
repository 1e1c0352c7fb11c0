"""The table of benchmarks: every script is in it, a target that is missed says so. No time is measured here."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def load(name: str):
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", ROOT / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


RUN_ALL = load("run_all")
DOCUMENTS = {
    "payload_build": {"array_bytes": 6e8, "copy_touched_s": 0.1, "build_over_copy": 9.0, "resident_over_array": 1.4},
    "render_start": {"import_yaml_ms": {"median": 60}, "render_bench_ms": {"median": 120}, "ratio": 2, "limit_ms": 350},
    "diffs": {
        "results": [
            {"times_floor": 2.5, "floor_seconds": 1.0, "target_times_floor": 3.0},
            {"megabytes_per_second": 70.0, "input_bytes": 1e8, "target_megabytes_per_second": 60.0},
            {"peak_mebibytes": 90.0, "input_bytes": 2**31, "target_peak_mebibytes": 200.0},
        ]
    },
    "hlo_parse": {
        "results": [
            {"input": "a.txt", "bytes": 5e7, "mb_per_second": 26.0, "splitlines_mb_per_second": 400.0,
             "peak_per_file_byte": 4.0}
        ]
    },
    "driver_overhead": {"ratio": 1.01, "bare_step_seconds": 0.1, "limit": 1.02},
    "aot_vs_maxtext": {"seconds": {"maxtext": 50.0}, "jobs1_over_maxtext": 0.9, "limit": 1.0},
}  # fmt: skip


@pytest.fixture
def canned(monkeypatch):
    """Documents as the benchmarks print them, in place of running them."""
    documents = json.loads(json.dumps(DOCUMENTS))
    monkeypatch.setattr(RUN_ALL, "run", lambda name, options: documents[name])
    return documents


def test_every_benchmark_is_in_the_table():
    assert {path.stem for path in (ROOT / "benchmarks").glob("*.py")} == {*RUN_ALL.BENCHMARKS, "run_all"}


@pytest.mark.parametrize("name", sorted(RUN_ALL.BENCHMARKS))
def test_options_of_the_table_exist(name, capsys):
    with pytest.raises(SystemExit) as stop:
        load(name).main(["--help"])
    assert stop.value.code == 0
    help_text = capsys.readouterr().out
    for options in (RUN_ALL.BENCHMARKS[name].options or (), RUN_ALL.BENCHMARKS[name].full, ("--json",)):
        assert all(option in help_text for option in options if option.startswith("-"))


def test_table_and_json_agree(canned, capsys):
    assert RUN_ALL.main(["--full", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "bench-table/1" and document["not_run"] == []
    assert RUN_ALL.main(["--full"]) == 0
    text = capsys.readouterr().out
    assert len(document["rows"]) == 10
    for row in document["rows"]:
        assert f"{row['what']:<35}" in text and f"{row['measured']:.3g} {row['unit']}" in text
    assert "MISSED" not in text and document["machine"]["cores"] >= 1


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [("payload_build", "build_over_copy", 12.1), ("payload_build", "resident_over_array", 1.6),
     ("driver_overhead", "ratio", 1.03), ("aot_vs_maxtext", "jobs1_over_maxtext", 1.01)],
)  # fmt: skip
def test_a_missed_target_is_exit_1(canned, capsys, name, key, value):
    canned[name][key] = value
    assert RUN_ALL.main(["--full"]) == 1
    assert capsys.readouterr().out.count("MISSED") == 1


@pytest.mark.parametrize(("place", "key", "value"), [(0, "times_floor", 3.1), (1, "megabytes_per_second", 59.0)])
def test_a_missed_target_among_several_results(canned, capsys, place, key, value):
    canned["diffs"]["results"][place][key] = value
    assert RUN_ALL.main(["--only=diffs"]) == 1
    assert capsys.readouterr().out.count("MISSED") == 1


def test_long_ones_only_with_full(canned, capsys):
    assert RUN_ALL.main([]) == 0
    assert "not run: aot_vs_maxtext: only with --full" in capsys.readouterr().out


def test_a_benchmark_that_cannot_run_is_exit_2(monkeypatch, capsys):
    monkeypatch.setitem(RUN_ALL.BENCHMARKS, "no_such", RUN_ALL.Benchmark(list, (), ()))
    assert RUN_ALL.main(["--only=no_such"]) == 2
    assert "no_such: ended with 2: " in capsys.readouterr().out


def test_alternate_pairs_the_loops_and_leaves_the_warm_up_out():
    overhead, calls = load("driver_overhead"), []
    pairs = overhead.alternate(4, lambda i: calls.append(("a", i)), lambda i: calls.append(("b", i)))
    assert len(pairs) == 4 and len(calls) == 2 * (4 + overhead.WARMUP)
    assert {calls[0][0], calls[2][0]} == {"a", "b"}  # each goes first every other time


@pytest.mark.parametrize(("driver", "met"), [(1.01, True), (1.05, False)])
def test_overhead_is_the_median_ratio_of_neighbours(driver, met):
    found = load("driver_overhead").summary([(driver, 1.0), (driver * 2, 2.0), (driver * 4, 4.0), (9.0, 1.0), (1, 1)])
    assert found["ratio"] == pytest.approx(driver) and found["met"] is met
