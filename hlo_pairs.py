"""Pair asynchronous starts with their dones by following the data, and say what lies between.

A done reaches its start through updates, tuple elements, the fusions that carry a TPU async collective on,
and at most one loop boundary (a start in one trip, its done in the next). Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import hlo_text
from hlo_program import MAX_HOPS, Program, Segment, collective_base, user_half
from hlo_text import Computation, Ref
from hlo_trips import PASS_ON


class Window(NamedTuple):
    """What lies between a start and its done; more than one segment when a loop carries the start."""

    segments: tuple[Segment, ...]
    done: tuple[Computation, int]


class Crossing(NamedTuple):
    """A step over the boundary of a loop: to the end of its body, or out to where it stands."""

    home: Computation
    at: int
    body: Computation
    into: bool


class Found(NamedTuple):
    """A start reached from a done, and the first update on the way (None without)."""

    computation: Computation
    at: int
    update: int | None
    crossed: Crossing | None  # the loop boundary on the way


def find_starts(program: Program, computation: Computation, done: int) -> list[Found]:
    """Return the starts whose value can reach a done: one, or two when a loop carries it.

    The value is followed backwards through updates, tuple elements, fusions that carry it on, and at most
    one loop boundary.
    """
    refs = hlo_text.operands(computation, done)
    return trace_back(program, computation, refs[0]) if refs else []


def trace_back(program: Program, computation: Computation, ref: Ref) -> list[Found]:
    """Return the starts that a value comes from; see find_starts."""
    walks: list[tuple[Computation, Ref, tuple[int, ...], int | None, Crossing | None]]
    walks = [(computation, ref, (), None, None)]
    found: list[Found] = []
    hops = 0
    while walks and hops < MAX_HOPS:
        hops += 1
        where, ref, path, update, crossed = walks.pop()
        at = where.index(ref.name)
        if at is None:
            continue
        path = path if ref.element is None else (ref.element, *path)
        opcode = where.opcodes[at]
        if opcode.endswith("-start") or opcode in ("send", "recv") or half_of(program, where, at) == "start":
            found.append(Found(where, at, update, crossed))
            continue
        for nxt, step_path, loop in _steps_back(program, where, at, path):
            if loop is not None and crossed is not None:
                continue
            place = where if loop is None else loop.body if loop.into else loop.home
            walks.append((place, nxt, step_path, at if opcode.endswith("-update") else update, loop or crossed))
    return found


def _steps_back(
    program: Program, where: Computation, at: int, path: tuple[int, ...]
) -> Iterator[tuple[Ref, tuple[int, ...], Crossing | None]]:
    """Yield (operand, path of tuple elements, loop boundary crossed) one step back from instruction `at`."""
    opcode, refs = where.opcodes[at], hlo_text.operands(where, at)
    if opcode == "get-tuple-element" and refs:
        index = hlo_text.element_index(where, at)
        if index is not None:
            yield refs[0], (index, *path), None
    elif opcode == "tuple":
        if path and path[0] < len(refs):
            yield refs[path[0]], path[1:], None
    elif (opcode.endswith("-update") or opcode in PASS_ON) and refs:
        yield refs[0], path, None
    elif opcode == "fusion":
        back = _through_fusion(program, where, at, path)
        if back is not None:
            yield back[0], back[1], None
    elif opcode == "while":
        for body in program.bodies(where, at)[:1]:
            if body.root_index >= 0:
                yield Ref(body.names[body.root_index], None), path, Crossing(where, at, body, True)
    elif opcode == "parameter" and id(where) in program.callers and path:
        home, position = program.callers[id(where)]
        outer = hlo_text.operands(home, position)
        if home.opcodes[position] == "while" and outer:
            yield outer[0], path, Crossing(home, position, where, False)
            yield Ref(where.names[where.root_index], None), path, Crossing(home, position, where, True)


def _through_fusion(
    program: Program, where: Computation, at: int, path: tuple[int, ...]
) -> tuple[Ref, tuple[int, ...]] | None:
    """Return the operand of a carrying fusion from which element `path` of its result came."""
    bodies = program.bodies(where, at)
    refs = hlo_text.operands(where, at)
    if not bodies:
        return None
    body, position = bodies[0], bodies[0].root_index
    for _ in range(MAX_HOPS):
        if position is None or position < 0:
            return None
        opcode, inner = body.opcodes[position], hlo_text.operands(body, position)
        if opcode == "parameter":
            place = hlo_text.number(hlo_text.literal(body, position))
            return (refs[place], path) if place is not None and place < len(refs) else None
        if opcode == "tuple":
            if not path or path[0] >= len(inner):
                return None
            nxt, path = inner[path[0]], path[1:]
        elif inner and (collective_base(opcode) or opcode in PASS_ON):
            nxt = inner[0]
        else:
            return None
        position = body.index(nxt.name)
    return None


def half_of(program: Program, computation: Computation, at: int) -> str | None:
    """Return "start" or "done" for a fusion or custom call that begins or ends a transfer, else None.

    A fusion does so by a custom call inside (TPU async collective fusions), a custom call by its own target
    (`"all-gather-start"`, as users write it).
    """
    opcode = computation.opcodes[at]
    if opcode == "fusion":
        bodies = program.bodies(computation, at)
        return program.async_half(bodies[0]) if bodies else None
    user = user_half(computation.texts[at]) if opcode == "custom-call" else None
    return user[1] if user else None


def window_of(found: Found, home: Computation, done: int) -> tuple[int, Window]:
    """Return (preference, window) for a start and done; lower preference is the more direct pairing."""
    begin = found.at
    if found.update is not None and not hlo_text.operands(found.computation, found.at):
        begin = found.update  # late binding: before the update there is nothing to move
    size = len(found.computation)
    if found.crossed is None:
        return 0, Window((Segment(home, begin, done),), (home, done))
    loop_home, loop_at, body, _ = found.crossed
    if found.computation is body and home is body:  # carried into the next trip
        return 1, Window((Segment(body, begin, size), Segment(body, -1, done)), (home, done))
    if found.computation is body:  # started in the last trip, done behind the loop
        return 2, Window((Segment(body, begin, size), Segment(home, loop_at, done)), (home, done))
    return 2, Window((Segment(loop_home, begin, loop_at), Segment(body, -1, done)), (home, done))
