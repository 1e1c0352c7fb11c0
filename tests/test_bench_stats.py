"""bench_stats: the window, the interval, drift, and the verdicts that refuse a claim."""

from __future__ import annotations

import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import bench_stats
from bench_stats import StepTime, find_window, per_chip, summarize


def steps(*seconds, compiled=(), excluded=()):
    return [StepTime(i, s, i in compiled, "profiled" if i in excluded else "") for i, s in enumerate(seconds)]


def noisy(n, middle=1.0, spread=0.002, seed=23):
    source = random.Random(seed)
    return [middle * (1 + source.uniform(-spread, spread)) for _ in range(n)]


def test_published_rate():
    # MaxText's README: 16 micro-batches of 64 x 65,536 in 201.43 s on 128 v7x chips = 2,603 tokens/s/chip.
    assert round(per_chip(16 * 64 * 65_536, 201.43, devices=256, devices_per_chip=2)) == 2603


def test_compile_and_transient_are_found():
    window = find_window(steps(60.0, 1.5, 1.2, *noisy(9), compiled=(0, 1)))
    assert window.excluded == {0: "warm-up (compile)", 1: "warm-up (compile)", 2: "warm-up (transient)"}
    assert window.indexes == list(range(3, 12))


def test_step_before_a_late_opening_compile_is_warm_up():
    window = find_window(steps(1.0, 2.0, *noisy(8), compiled=(1,)))
    assert window.excluded[0] == "warm-up (before a compile)"


def test_warmup_option_overrides_detection():
    assert find_window(steps(*noisy(8)), warmup=3).indexes == [3, 4, 5, 6, 7]


def test_profiled_steps_do_not_count():
    window = find_window(steps(*noisy(6), excluded=(2, 3)))
    assert window.indexes == [0, 1, 4, 5]
    assert window.excluded == {2: "profiled", 3: "profiled"}


def test_quiet_run_is_ok():
    values = noisy(12)
    summary = summarize(steps(*values))
    assert summary.verdict == "ok"
    assert summary.low <= statistics.median(values) <= summary.high
    assert summary.half_width < 0.01


@pytest.mark.parametrize(
    ("times", "compiled", "piece"),
    [
        (noisy(4), (), "4 measured steps"),
        ([1 + 0.01 * i for i in range(12)], (), "drifting"),
        (noisy(14), (11,), "a compile inside the window (step 11)"),
        ([1.0, 1.3] * 6, (), "the interval is +-"),
        ([], (), "no step is left"),
    ],
)
def test_not_enough(times, compiled, piece):
    summary = summarize(steps(*times, compiled=compiled))
    assert summary.verdict == "not enough"
    assert piece in " ".join(summary.reasons)


def test_no_interval_of_too_few_steps():
    assert summarize(steps(*noisy(4))).low is None  # unknown, not made up


def test_noise_without_trend_is_no_drift():
    assert not summarize(steps(*noisy(30, spread=0.02))).drifting


def test_clock_gap():
    assert bench_stats.clock_gap([1.0, 2.0], 3.0) == 0
    assert bench_stats.clock_gap([0.2], 1.8) > 0.8  # the case of maxtext#1217


@settings(max_examples=12, deadline=None, derandomize=True)  # 4,000 resamples each
@given(st.lists(st.floats(0.01, 100), min_size=5, max_size=30))
def test_interval_lies_among_the_steps_and_is_the_same_again(values):
    first = bench_stats.bootstrap_interval(values, seed=1)
    assert first == bench_stats.bootstrap_interval(values, seed=1)
    assert min(values) <= first[0] <= first[1] <= max(values)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=25), st.sets(st.integers(0, 24)))
def test_every_step_is_counted_or_explained(values, compiled):
    window = find_window(steps(*values, compiled=compiled))
    assert sorted([*window.indexes, *window.excluded]) == list(range(len(values)))


# Ranks of the two-sided 95 % interval of a median, from tables of the sign test.
@pytest.mark.parametrize(("n", "rank"), [(5, 1), (6, 1), (8, 1), (9, 2), (10, 2), (12, 3), (15, 4), (20, 6), (30, 10)])
def test_the_interval_is_no_narrower_than_order_statistics(n, rank):
    assert bench_stats.median_rank(n) == rank
    values = [1.0 + 0.01 * ((7 * i) % n) for i in range(n)] if n % 7 else [1.0 + 0.01 * i for i in range(n)]
    low, high = bench_stats.bootstrap_interval(values)
    assert low <= sorted(values)[rank - 1] and high >= sorted(values)[n - rank]
