"""What a run's step times support: the measured window, the median and its interval, drift, and a verdict.

A trainer step is not a micro-benchmark sample: one process, seconds each, neighbours alike (autocorrelated),
the first ones compile, and the machine may still be settling. So the window is found, not assumed; the
interval is a moving-block bootstrap; and where the steps do not support a claim the verdict says
`not enough`, why, and what to do. Pure functions; times are seconds.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

MIN_STEPS = 5  # lowest to highest of five is a 94 % interval of the median (2 * 0.5**5 = 6 %), of four only 87 %
OUTLIER_MADS = 3.5  # modified z-score of Iglewicz and Hoaglin (1993)
MAD_TO_SIGMA = 1.4826  # of a normal distribution
SETTLED_BAND = 0.01  # a step within 1 % of the later median is never called transient
DRIFT_LIMIT = 0.02  # change over the window, relative to the median, that voids a claim
MAX_HALF_WIDTH = 0.05  # an interval wider than +-5 % separates nothing; peers gate regressions at 5 %
RESAMPLES = 2000


@dataclass(frozen=True)
class StepTime:
    """One optimizer step as the statistics see it."""

    index: int
    seconds: float
    compiled: bool = False  # a compile event fell into it
    excluded: str = ""  # why it may not be measured (profiled, host stall), if so


@dataclass(frozen=True)
class Window:
    """The steps that count, and why the others do not."""

    indexes: list[int]
    excluded: dict[int, str]  # step index -> reason


@dataclass(frozen=True)
class Summary:
    """The headline and its doubt. Every time is in seconds; None where it cannot be said."""

    window: Window
    median: float | None = None
    low: float | None = None  # 95 % bootstrap interval of the median
    high: float | None = None
    spread: float | None = None  # (max - min) / median
    mad: float | None = None  # median absolute deviation
    drift: float | None = None  # Theil-Sen slope times window length, relative to the median
    drifting: bool = False
    reasons: list[str] = field(default_factory=list)  # why the verdict is "not enough"; empty: ok

    @property
    def verdict(self) -> str:
        return "not enough" if self.reasons else "ok"

    @property
    def half_width(self) -> float | None:
        """Half the interval's width, relative to the median."""
        return None if self.low is None else (self.high - self.low) / 2 / self.median


def find_window(steps: Sequence[StepTime], warmup: int | None = None) -> Window:
    """Return the measured steps.

    Everything up to the last compile of the opening steps is warm-up, and so is the transient after it: while
    the next step lies outside both 1 % and 3.5 MADs of the median of those after it. At most half the steps
    are given to the transient. A compile later than that stays in the window, and voids the claim.

    Args:
      steps: in order.
      warmup: number of opening steps to exclude; None detects it.
    """
    excluded = {step.index: step.excluded for step in steps if step.excluded}
    usable = [step for step in steps if not step.excluded]
    if warmup is not None:
        start = sum(1 for step in usable if step.index < warmup)
        excluded.update({step.index: "warm-up (--warmup)" for step in usable[:start]})
        return Window([step.index for step in usable[start:]], excluded)
    opening = usable[: max(2, len(usable) // 2)]
    start = max((i + 1 for i, step in enumerate(opening) if step.compiled), default=0)
    excluded.update({step.index: "warm-up (compile)" if step.compiled else "warm-up (before a compile)"
                     for step in usable[:start]})  # fmt: skip
    limit = start + (len(usable) - start) // 2
    while start < limit and _transient(usable[start].seconds, [step.seconds for step in usable[start + 1 :]]):
        excluded[usable[start].index] = "warm-up (transient)"
        start += 1
    return Window([step.index for step in usable[start:]], excluded)


def _transient(value: float, later: Sequence[float]) -> bool:
    if len(later) < 3:
        return False
    middle = statistics.median(later)
    sigma = MAD_TO_SIGMA * statistics.median(abs(x - middle) for x in later)
    return abs(value - middle) > max(SETTLED_BAND * middle, OUTLIER_MADS * sigma)


def summarize(steps: Sequence[StepTime], warmup: int | None = None, seed: int = 0) -> Summary:
    """Return the headline of a run, or why it has none.

    Args:
      steps: every step in order.
      warmup: see `find_window`.
      seed: of the bootstrap; same steps, same interval.
    """
    window = find_window(steps, warmup)
    inside = [step for step in steps if step.index in set(window.indexes)]
    values = [step.seconds for step in inside]
    if not values:
        return Summary(window, reasons=["no step is left to measure: run more --steps"])
    median = statistics.median(values)
    mad = statistics.median(abs(x - median) for x in values)
    drift, drifting = _drift(values, median)
    low, high = bootstrap_interval(values, seed) if len(values) >= MIN_STEPS else (None, None)
    reasons = []
    if len(values) < MIN_STEPS:
        reasons.append(f"{len(values)} measured steps, at least {MIN_STEPS} are needed: run more --steps")
    compiled = [step.index for step in inside if step.compiled]
    if low is not None and (high - low) / 2 > MAX_HALF_WIDTH * median:
        doubt = (high - low) / 2 / median
        reasons.append(f"the interval is +-{doubt:.1%} of the median: run more --steps, or on a quieter machine")
    if compiled:
        reasons.append(f"a compile inside the window (step {compiled[0]}): find what changed shape, or raise --warmup")
    if drifting:
        reasons.append(f"still drifting ({drift:+.1%} over the window): run more --steps or raise --warmup")
    return Summary(window, median, low, high, (max(values) - min(values)) / median, mad, drift, drifting, reasons)


def bootstrap_interval(values: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """Return the 95 % interval of the median by a moving-block bootstrap, never narrower than the order statistics'.

    Blocks of n**(1/3) neighbours are drawn, so that steps that resemble their neighbours do not make the
    interval too narrow (Kuensch 1989). 2000 resamples, percentile interval. With few steps that alone is too
    narrow: of independent normal samples it held the true median in 81 % (n = 5 and 10), 88 % (15) and 92 % (60), and
    widened to the ranks of the sign test in 93, 98, 96 and 97 % (600 samples each).
    """
    n = len(values)
    block = max(1, round(n ** (1 / 3)))
    source = random.Random(seed)
    medians = []
    for _ in range(RESAMPLES):
        sample: list[float] = []
        while len(sample) < n:
            start = source.randrange(n - block + 1)
            sample.extend(values[start : start + block])
        medians.append(statistics.median(sample[:n]))
    medians.sort()
    low, high = medians[round(0.025 * (RESAMPLES - 1))], medians[round(0.975 * (RESAMPLES - 1))]
    ordered, rank = sorted(values), median_rank(n)
    return min(low, ordered[rank - 1]), max(high, ordered[n - rank])


def median_rank(n: int) -> int:
    """Return the rank, from 1, whose value and its mirror image hold the median of n samples in 95 % or more.

    The interval that inverts the sign test (Conover, Practical Nonparametric Statistics): the chance that fewer than
    `rank` of n samples lie below the median, twice, is at most 5 %. Below six samples no rank reaches that; it is 1.
    """
    rank, tail = 0, math.comb(n, 0) / 2**n
    while 2 * tail <= 0.05:
        rank += 1
        tail += math.comb(n, rank) / 2**n
    return max(rank, 1)


def _drift(values: Sequence[float], median: float) -> tuple[float | None, bool]:
    """Return the relative change over the window (Theil-Sen) and whether it is real (Mann-Kendall, 5 %) and large."""
    n = len(values)
    if n < MIN_STEPS:
        return None, False
    pairs = [(values[j] - values[i], j - i) for i in range(n) for j in range(i + 1, n)]
    slope = statistics.median(rise / run for rise, run in pairs)
    score = sum((rise > 0) - (rise < 0) for rise, _ in pairs)
    deviation = math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    change = slope * (n - 1) / median
    return change, abs(score) > 1.96 * deviation and abs(change) > DRIFT_LIMIT


def per_chip(tokens: float, seconds: float, devices: int, devices_per_chip: int) -> float:
    """Return tokens per second and chip.

    A v7x chip is two JAX devices: 16 micro-batches of 64 x 65,536 slots in 201.43 s on 256 devices are
    2,603 slots/s/chip, the published figure.
    """
    return tokens / seconds / (devices / devices_per_chip)


def clock_gap(step_seconds: Sequence[float], wall_seconds: float) -> float:
    """Return by how much the sum of the step times differs from the wall clock around them, relative to the latter."""
    return abs(sum(step_seconds) - wall_seconds) / wall_seconds if wall_seconds else 0.0
