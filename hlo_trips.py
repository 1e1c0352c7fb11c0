"""Read the trip count of a `while` off its condition, body and initial value.

XLA for CPU and GPU writes `known_trip_count` beside the loop; libtpu does not. `TripReader` recognises
`for (i = init; i DIR bound; i += step)` with constants, through the tuples, copies, fusions and calls
that a compiler puts between. What is not of that form stays unknown. Standard library only.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

import hlo_text
from hlo_text import Computation, Ref

if TYPE_CHECKING:
    from hlo_program import Program

PASS_ON = frozenset(
    "bitcast copy opt-barrier optimization-barrier add-dependency".split()
)  # the value is the operand's
_MAX_STEPS = 150  # a trip count is read through at most this many instructions; real ones need a dozen


class Line(NamedTuple):
    """A value as `slope * element + offset`, where element is a loop-carried tuple element; slope 0 is a constant."""

    element: int | None
    slope: int
    offset: int


class Frame(NamedTuple):
    """Where a computation's parameters come from: the instruction that calls it."""

    computation: Computation
    at: int
    outer: Frame | None


class TripReader:
    """Reads `for (i = init; i DIR bound; i += step)` off the condition, body and init of a while."""

    def __init__(self, program: Program):
        self.program = program
        self.budget = _MAX_STEPS

    def read(self, computation: Computation, at: int) -> int | None:
        """Return the trip count, or None when the loop is not of that form with constants."""
        found = self.program.called(computation, at)
        condition, body = found.get("condition", []), found.get("body", [])
        inits = hlo_text.operands(computation, at)
        if not condition or not body or not inits:
            return None
        compared = self._comparison(condition[0], condition[0].root_index, None)
        if compared is None:
            return None
        left, right, direction = compared
        if left.element is None:
            left, right, direction = right, left, _MIRRORED.get(direction, "")
        if left.element is None or right.slope or left.slope != 1:
            # The bound may be carried round the loop unchanged.
            right = self._carried(right, computation, inits[0], body[0])
            if right is None or left.element is None or left.slope != 1:
                return None
        step = self._step(body[0], left.element)
        init = self._element(computation, inits[0], left.element, None)
        if step is None or init is None or init.slope:
            return None
        return _count_trips(init.offset + left.offset, right.offset, step, direction)

    def _carried(self, bound: Line, where: Computation, init: Ref, body: Computation) -> Line | None:
        if bound.element is None or bound.slope != 1 or self._step(body, bound.element) != 0:
            return None
        value = self._element(where, init, bound.element, None)
        return None if value is None or value.slope else Line(None, 0, value.offset + bound.offset)

    def _comparison(self, where: Computation, at: int, frame: Frame | None) -> tuple[Line, Line, str] | None:
        if at < 0:
            return None
        opcode = where.opcodes[at]
        if opcode in ("fusion", "call"):
            bodies = self.program.bodies(where, at)
            return self._comparison(bodies[0], bodies[0].root_index, Frame(where, at, frame)) if bodies else None
        if opcode in PASS_ON:
            inner = hlo_text.operands(where, at)
            place = where.index(inner[0].name) if inner else None
            self.budget -= 1
            return self._comparison(where, place, frame) if place is not None and self.budget > 0 else None
        if opcode != "compare":
            return None
        refs = hlo_text.operands(where, at)
        if len(refs) != 2:
            return None
        left, right = self._value(where, refs[0], frame), self._value(where, refs[1], frame)
        direction = hlo_text.attribute(where, at, "direction")
        return (left, right, direction) if left and right else None

    def _step(self, body: Computation, element: int) -> int | None:
        """Return what one trip adds to a carried element; None when it is not a constant."""
        if body.root_index < 0:
            return None
        value = self._element(body, Ref(body.names[body.root_index], None), element, None)
        return value.offset if value and value.element == element and value.slope == 1 else None

    def _element(self, where: Computation, ref: Ref, element: int, frame: Frame | None) -> Line | None:
        """Return element `element` of a tuple value."""
        return self._value(where, Ref(ref.name, element), frame) if ref.element is None else None

    def _value(self, where: Computation, ref: Ref, frame: Frame | None) -> Line | None:
        self.budget -= 1
        at = where.index(ref.name)
        if at is None or self.budget <= 0:
            return None
        opcode = where.opcodes[at]
        if opcode == "constant" and ref.element is None:
            text = hlo_text.literal(where, at)
            return Line(None, 0, int(text)) if _INTEGER.match(text) else None
        if opcode == "parameter":
            return self._parameter(where, at, ref, frame)
        refs = hlo_text.operands(where, at)
        if opcode == "get-tuple-element" and ref.element is None and refs:
            index = hlo_text.element_index(where, at)
            return None if index is None else self._element(where, refs[0], index, frame)
        if opcode == "tuple" and ref.element is not None:
            return self._value(where, refs[ref.element], frame) if ref.element < len(refs) else None
        if opcode in ("copy", "bitcast", "convert", "reshape", "opt-barrier", "optimization-barrier") and refs:
            element = refs[0].element if ref.element is None else ref.element
            return self._value(where, Ref(refs[0].name, element), frame)
        if opcode in ("add", "subtract") and len(refs) == 2 and ref.element is None:
            left, right = self._value(where, refs[0], frame), self._value(where, refs[1], frame)
            return _combine(left, right, -1 if opcode == "subtract" else 1)
        if opcode in ("fusion", "call"):
            bodies = self.program.bodies(where, at)
            if bodies and bodies[0].root_index >= 0:
                inner = Ref(bodies[0].names[bodies[0].root_index], ref.element)
                return self._value(bodies[0], inner, Frame(where, at, frame))
        return None

    def _parameter(self, where: Computation, at: int, ref: Ref, frame: Frame | None) -> Line | None:
        """A fusion's parameter is its operand; a loop's is the carried element itself."""
        if frame is not None:
            place = hlo_text.number(hlo_text.literal(where, at))
            refs = hlo_text.operands(frame.computation, frame.at)
            if place is None or place >= len(refs):
                return None
            given = refs[place]
            inner = Ref(given.name, given.element if ref.element is None else ref.element)
            return self._value(frame.computation, inner, frame.outer)
        return None if ref.element is None else Line(ref.element, 1, 0)


_INTEGER = re.compile(r"-?[0-9]{1,18}$")
_MIRRORED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE"}


def _combine(left: Line | None, right: Line | None, sign: int) -> Line | None:
    if left is None or right is None or (left.element is not None and right.element is not None):
        return None
    element = left.element if left.element is not None else right.element
    return Line(element, left.slope + sign * right.slope, left.offset + sign * right.offset)


def _count_trips(first: int, bound: int, step: int, direction: str) -> int | None:
    """Return how often `for (i = first; i direction bound; i += step)` runs; None when it never ends."""
    if direction == "NE" and step and (bound - first) % step == 0 and (bound - first) // step >= 0:
        return (bound - first) // step
    if direction in ("LE", "GE"):
        bound += 1 if direction == "LE" else -1
    if direction in ("LT", "LE") and step > 0:
        return max(0, -(-(bound - first) // step))
    if direction in ("GT", "GE") and step < 0:
        return max(0, -(-(first - bound) // -step))
    return None
