"""Sum the collectives and copies of an analysed module up to one step.

`per_step` multiplies what each computation holds by the trips of the loops around it, follows calls, and
adds for a conditional the range over its branches. Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from hlo_program import NEVER, ONCE, UNKNOWN, Times
from hlo_schedule import EXPOSED, Collective, Report, schedule_calls


class Amount(NamedTuple):
    """Executions per step and wire bytes per step."""

    count: Times
    size: Times

    def plus(self, other: Amount) -> Amount:
        return Amount(self.count.plus(other.count), self.size.plus(other.size))

    def times(self, often: Times) -> Amount:
        return Amount(self.count.times(often), self.size.times(often))


NONE = Amount(NEVER, NEVER)
Totals = dict[tuple, Amount]


def keys_of(collective: Collective) -> Iterator[tuple]:
    """Yield what a collective is counted under: its kind and class, its axes, and the whole."""
    category = collective.category
    yield ("row", collective.kind, category)
    yield ("axes", collective.axes, category in EXPOSED)
    yield ("all",)
    if category in EXPOSED:
        yield ("exposed",)


def per_step(report: Report) -> Totals:
    """Return the amounts of one step by key (see keys_of; copies under ("copy", operation, from, to)).

    A loop multiplies by its trip count; of a conditional's branches one runs, so it adds the range from the
    least to the most of them. Collectives of a single device are left out.
    """
    own: dict[int, Totals] = {}
    for collective in report.collectives:
        if collective.group_size == 1:
            continue
        size = UNKNOWN if collective.wire_bytes is None else Times(collective.wire_bytes, collective.wire_bytes)
        amount = Amount(collective.per_call, collective.per_call.times(size))
        for key in keys_of(collective):
            _add(own.setdefault(id(collective.computation), {}), key, amount)
    for copy in report.copies:
        size = UNKNOWN if copy.output_bytes is None else Times(copy.output_bytes, copy.output_bytes)
        operation = copy.computation.opcodes[copy.at].removesuffix("-start")
        key = ("copy", operation, copy.source, copy.target)
        _add(own.setdefault(id(copy.computation), {}), key, Amount(ONCE, size))
    whole: dict[int, Totals] = {}
    for computation in reversed(report.order):
        total = dict(own.get(id(computation), {}))
        branches: dict[int, list[Totals]] = {}
        for callee, times, at in schedule_calls(report.program, computation):
            inner = whole.get(id(callee), {})
            if computation.opcodes[at] == "conditional":
                branches.setdefault(at, []).append(inner)
                continue
            for key, amount in inner.items():
                _add(total, key, amount.times(times))
        for choices in branches.values():
            for key in {key for choice in choices for key in choice}:
                _add(total, key, _range([choice.get(key, NONE) for choice in choices]))
        whole[id(computation)] = total
    return _whole_program(report, whole)


def _whole_program(report: Report, whole: dict[int, Totals]) -> Totals:
    if report.module.entry:
        return whole.get(id(report.module.entry), {})
    total: Totals = {}
    for computation in report.order:  # the entry is not in the text: nobody knows how often each part runs
        if computation.name in report.roots:
            for key, amount in whole[id(computation)].items():
                _add(total, key, amount.times(UNKNOWN))
    return total


def _add(total: Totals, key: tuple, amount: Amount) -> None:
    total[key] = total[key].plus(amount) if key in total else amount


def _range(choices: list[Amount]) -> Amount:
    def span(values: list[Times]) -> Times:
        highs = [value.high for value in values]
        return Times(min(value.low for value in values), None if None in highs else max(highs))

    return Amount(span([choice.count for choice in choices]), span([choice.size for choice in choices]))
