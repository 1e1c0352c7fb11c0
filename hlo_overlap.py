"""Say which collectives of a compiled step hide behind compute and which are exposed, from its HLO text.

Input: scheduled HLO (TPU or GPU): a file of an XLA dump such as
`module_0267.jit_train_step.after_optimizations.txt`, or what `compiled.as_text()` printed. No device, no
profile. The printed order is the order of execution, so what stands between a start and its done is what
can run meanwhile; whether it is long enough, only a profile tells.

Output: per module a table of the collectives by kind and class with their count in the text, per step
(loops multiplied out) and their wire bytes per step and device; then the worst exposed ones. Classes:
  sync             nothing can run meanwhile
  async: nothing   a start and a done with nothing between: exposed like sync
  async: light     only data movement or elementwise operations between
  async: compute   a matrix product, or a kernel of unknown length, between
  unmatched        a start without its done in the text: counted as exposed
Another collective, a parameter, a constant or tuple plumbing is no cover; asynchronous work on the
collective's own thread is none either. Wire bytes are what a ring moves per device: all-gather (n-1)/n of
the output, reduce-scatter n-1 times the output, all-reduce 2(n-1)/n, all-to-all (n-1)/n, a permute its
output; a send counts at its recv. kB is 1000 bytes. Unknown is `?` in tables and null in JSON.

Exit status: 0 answered, every gate held, --diff found the same program; 1 a gate is exceeded or --diff
found another program; 2 not answered: no HLO, not scheduled (see --unscheduled), cut off (see --partial).

Examples:
  # what is exposed, and where
  hlo_overlap.py dump/module_0267.jit_train_step.after_optimizations.txt
  # in CI: at most 2 GB exposed per step, at most a tenth of all bytes
  hlo_overlap.py --gate exposed-bytes=2GB --gate share=10% step.txt
  # did the flag change the program, and what did it buy
  hlo_overlap.py before.txt --diff after.txt
  # the schedule as a picture for a trace viewer
  zcat step.txt.gz | hlo_overlap.py - --trace step.trace.json
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import hlo_schedule
import hlo_text
from bench_common import (
    EXIT_CANNOT,
    EXIT_DIFFERENT,
    EXIT_OK,
    BenchError,
    complain,
    dump_json,
    emit,
    read_text,
    run_tool,
    shown_name,
    write_whole,
)
from hlo_program import NO_WORK, SORT, Segment, Times, collective_base, start_in_place
from hlo_schedule import CLASSES, EXPOSED, Collective, Report

TOOL = "hlo_overlap"
SCHEMA = "hlo-overlap/1"
SCHEMA_DIFF = "hlo-overlap-diff/1"
WIDTH = 80
CLASS_NAMES = {
    "sync": "sync",
    "async_empty": "async: nothing",
    "async_light": "async: light",
    "async_compute": "async: compute",
    "unmatched": "unmatched",
    None: "not scheduled",
}
SHORT = {  # what people write in run-length schedules
    "all-gather": "ag",
    "all-reduce": "ar",
    "all-to-all": "a2a",
    "collective-broadcast": "cb",
    "collective-permute": "cp",
    "ragged-all-to-all": "ra2a",
    "reduce-scatter": "rs",
}


# --- numbers ------------------------------------------------------------------------------------------------------


def show_bytes(value: int | None) -> str:
    """Return a count of bytes with three figures and a decimal unit; `?` for unknown."""
    if value is None:
        return "?"
    for unit, scale in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}" if value < 999.5 * scale else f"{value / scale:.0f} {unit}"
    return f"{value} B"


def show_times(value: Times) -> str:
    """Return how often: `4`, `0-4` for a conditional, `?` or `4+` when a loop's trips are unknown."""
    if value.high is None:
        return f"{value.low}+" if value.low else "?"
    return str(value.high) if value.low == value.high else f"{value.low}-{value.high}"


def show_size(value: Times) -> str:
    """Return bytes per step, the same way."""
    if value.high is None:
        return f"{show_bytes(value.low)}+" if value.low else "?"
    return show_bytes(value.high) if value.low == value.high else f"{show_bytes(value.low)}-{show_bytes(value.high)}"


def share(part: Times, whole: Times) -> float | None:
    """Return part / whole of the most bytes per step; None when either is unknown or the whole is nothing."""
    if part.high is None or not whole.high:
        return None
    return part.high / whole.high


def show_share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f} %" if value in (0, 1) else f"{100 * value:.1f} %"


# --- one module's answer ------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """One line of the table."""

    kind: str
    category: str | None
    static: int
    count: Times
    size: Times


@dataclass
class Answer:
    """A report with its sums, ready to print."""

    file: str
    report: Report
    rows: list[Row]
    totals: hlo_schedule.Totals
    single: int  # collectives of one device, left out

    @property
    def all(self) -> hlo_schedule.Amount:
        return self.totals.get(("all",), hlo_schedule.NONE)

    @property
    def exposed(self) -> hlo_schedule.Amount:
        return self.totals.get(("exposed",), hlo_schedule.NONE)


def answer(file: str, report: Report) -> Answer:
    """Return the sums of a report."""
    totals = hlo_schedule.per_step(report)
    counted = [collective for collective in report.collectives if collective.group_size != 1]
    static = Counter((collective.kind, collective.category) for collective in counted)
    order = {category: place for place, category in enumerate(CLASSES)}
    rows = []
    for kind, category in sorted(static, key=lambda key: (key[0], order.get(key[1], -1))):
        amount = totals.get(("row", kind, category), hlo_schedule.NONE)
        rows.append(Row(kind, category, static[(kind, category)], amount.count, amount.size))
    return Answer(file, report, rows, totals, len(report.collectives) - len(counted))


def worst(found: Answer) -> list[Collective]:
    """Return the collectives by wire bytes per step: exposed ones first, then those with light cover."""
    ranks = {category: 0 for category in EXPOSED} | {"async_light": 1}
    listed = [one for one in found.report.collectives if one.category in ranks and one.group_size != 1]

    def key(one: Collective) -> tuple:
        size = one.wire_per_step
        known = size.low if size.high is None else size.high
        return (ranks[one.category], -known, -(one.wire_bytes or 0), one.line)

    return sorted(listed, key=key)


# --- what lies between, in one line -------------------------------------------------------------------------------


def label(report: Report, segment: Segment, at: int) -> str:
    """Return what instruction `at` is called in a run-length line."""
    computation = segment.computation
    opcode, name = computation.opcodes[at], computation.names[at]
    for mark in ("-start", "-done"):
        base = opcode.removesuffix(mark)
        if opcode.endswith(mark) and base in SHORT:
            return f"{mark[1].upper()}:{SHORT[base]}"
    if opcode in SHORT:
        return SHORT[opcode]
    if opcode.endswith(("-done", "-update")):
        start, _ = start_in_place(computation, at)
        shown = label(report, segment, start) if start is not None else opcode
        return ("D:" if opcode.endswith("-done") else "U:") + shown.removeprefix("S:")
    if opcode == "while":
        trips = report.program.trips(computation, at)
        return f"while[x{'?' if trips is None else trips}]"
    stem = re.sub(r"(\.\d+)+$", "", name)
    if SORT[opcode] in ("caller", "matmul"):
        cover = report.program.cover(computation, at)
        if cover.matmuls:
            return f"mm:{stem}"
        if cover.kernels:
            return f"kernel:{stem}"
        inside = [
            collective_base(where.opcodes[place])
            for body in report.program.bodies(computation, at)
            for where, place, _ in report.program.collectives_in(body)
        ]
        if inside:
            return f"{'S:' if opcode.endswith('-start') else ''}{SHORT.get(inside[0] or '', inside[0])}"
        return stem if opcode == "fusion" else opcode
    return opcode


def between_line(report: Report, collective: Collective, limit: int) -> str:
    """Return a window as a run-length line: `S:ag mm:fusion x3 copy D:ag`; at most `limit` characters or so."""
    if collective.window is None:
        return ""
    short = SHORT.get(collective.kind, collective.kind)
    words, size, last, run = [f"S:{short}"], len(short) * 2 + 10, "", 0
    for segment, at in _inside(collective):
        word = label(report, segment, at)
        if word == last:
            run += 1
            continue
        words += _run(last, run)
        last, run = word, 1
        size += len(word) + 5
        if size > limit:
            words.append("...")
            last = ""
            break
    words += _run(last, run)
    return " ".join([*words, f"D:{short}"])


def _inside(collective: Collective) -> Iterator[tuple[Segment, int]]:
    assert collective.window is not None
    for segment in collective.window.segments:
        for at in range(segment.after + 1, segment.before):
            if segment.computation.opcodes[at] not in NO_WORK:
                yield segment, at


def _run(word: str, count: int) -> list[str]:
    return [] if not word else [word] if count == 1 else [f"{word} x{count}"]


# --- text and markdown --------------------------------------------------------------------------------------------


class Table(NamedTuple):
    """Cells to print: the first `words` columns are words, the rest numbers."""

    head: list[str]
    rows: list[list[str]]
    words: int


def render_table(table: Table, style: str, width: int | None) -> list[str]:
    """Return a table's lines; in text the widest word column is cut to keep within `width`."""
    if style == "markdown":
        marks = ["---" if place < table.words else "---:" for place in range(len(table.head))]
        rows = [table.head, marks, *table.rows]
        return ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    sizes = [max(len(row[place]) for row in [table.head, *table.rows]) for place in range(len(table.head))]
    over = sum(sizes) + 2 * (len(sizes) - 1) - (width or 10**9)
    if over > 0:
        widest = max(range(table.words), key=lambda place: sizes[place])
        sizes[widest] = max(6, sizes[widest] - over)
    lines = []
    for row in [table.head, *table.rows]:
        cells = [
            cut(cell, size).ljust(size) if place < table.words else cell.rjust(size)
            for place, (cell, size) in enumerate(zip(row, sizes, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def cut(text: str, size: int | None) -> str:
    """Return text of at most `size` characters, with the middle left out when it is longer."""
    if size is None or len(text) <= size:
        return text
    left = (size - 2) * 2 // 3
    return text[:left] + ".." + text[len(text) - (size - 2 - left) :]


def main_table(found: Answer) -> Table:
    """Return the table of collectives by kind and class."""
    whole = found.all.size
    rows = []
    for row in found.rows:
        part = share(row.size, whole)
        exposed = part if row.category in EXPOSED else None if part is None or row.category is None else 0.0
        rows.append(
            [
                row.kind,
                CLASS_NAMES[row.category],
                str(row.static),
                show_times(row.count),
                show_size(row.size),
                show_share(part),
                show_share(exposed),
            ]
        )
    total = share(found.exposed.size, whole) if all(row.category for row in found.rows) else None
    rows.append(
        [
            "total",
            "",
            str(sum(row.static for row in found.rows)),
            show_times(found.all.count),
            show_size(whole),
            show_share(share(whole, whole)),
            show_share(total),
        ]
    )
    return Table(["kind", "class", "static", "per step", "wire/step", "share", "exposed"], rows, 2)


def axes_table(found: Answer) -> Table | None:
    """Return wire bytes by mesh axes, or None when the groups name none."""
    axes = sorted({key[1] for key in found.totals if key[0] == "axes"})
    if not any(axes):
        return None
    rows = []
    for names in axes:
        exposed = found.totals.get(("axes", names, True), hlo_schedule.NONE)
        other = found.totals.get(("axes", names, False), hlo_schedule.NONE)
        whole = exposed.plus(other)
        part = share(exposed.size, whole.size) if all(row.category for row in found.rows) else None
        shown = "+".join(names) or "no name"
        rows.append([shown, show_times(whole.count), show_size(whole.size), show_share(part)])
    return Table(["mesh axes", "per step", "wire/step", "exposed"], rows, 1)


def copies_table(found: Answer) -> Table | None:
    """Return the asynchronous copies between memory spaces, or None without any."""
    rows = []
    for key in sorted(key for key in found.totals if key[0] == "copy"):
        amount = found.totals[key]
        rows.append([f"{key[2]} to {key[3]}", key[1], show_times(amount.count), show_size(amount.size)])
    return Table(["memory", "operation", "per step", "bytes/step"], rows, 2) if rows else None


def unions_table(found: Answer) -> Table | None:
    """Return what runs under the windows of each computation, or None without windows."""
    rows = []
    for union in found.report.unions:
        matmuls = f"{union.cover.matmuls} of {union.total.matmuls}"
        covered = f"{union.covered} of {union.instructions}"
        rows.append([union.computation.name, str(union.windows), covered, matmuls])
    return Table(["computation", "windows", "instructions inside", "matmuls inside"], rows, 1) if rows else None


def worst_lines(found: Answer, top: int, width: int | None) -> list[str]:
    """Return the worst exposed collectives with where they are and what lies between."""
    listed = worst(found)
    if not listed or not top:
        return []
    lines = [f"worst exposed, {min(top, len(listed))} of {len(listed)}:"]
    for one in listed[:top]:
        lines.append(
            f"  {show_size(one.wire_per_step)}  {one.kind}  {CLASS_NAMES[one.category]}"
            f"  {show_times(one.executions)} x {show_bytes(one.wire_bytes)}"
        )
        place = f"    line {one.line} of {one.computation.name}: {one.name}"
        for text in (place, f"    {one.op_name}" if one.op_name else ""):
            if text:
                lines.append(cut(text, width))
        if one.window is not None:
            lines.append(cut("    " + between_line(found.report, one, (width or 10**9) - 4), width))
    return lines


def heading(found: Answer) -> list[str]:
    """Return what the module is: name, size, schedule, loops."""
    report, module = found.report, found.report.module
    order = "scheduled" if module.scheduled else "NOT SCHEDULED: counts without overlap"
    instructions = sum(len(computation.names) for computation in module.computations)
    lines = [
        f"{found.file}: {module.name or 'no module name'}",
        f"{order}; {len(module.computations)} computations, {instructions} instructions",
    ]
    if module.truncated:
        lines.append("truncated: no ENTRY, or a computation is cut off; this covers what is there")
    if report.loops:
        counts = Counter(loop.trip_count for loop in report.loops)
        known = [f"{n} of {trips} trips" for trips, n in sorted((t, n) for t, n in counts.items() if t is not None)]
        unknown = [f"{counts[None]} of unknown trip count"] if None in counts else []
        lines.append(f"loops: {len(report.loops)} ({', '.join(known + unknown)})")
    return lines


def notes(found: Answer) -> list[str]:
    """Return what the reader must know beside the table."""
    report = found.report
    lines = []
    if not found.rows and not report.hidden and not report.orphans:
        lines.append("no collective in this module")
    if report.hidden:
        seen = Counter((hidden.target, hidden.reason) for hidden in report.hidden)
        lines.append(f"{len(report.hidden)} custom calls may communicate and are not in the table:")
        lines += [f"  {count} x {target} ({reason})" for (target, reason), count in sorted(seen.items())]
    if found.single:
        lines.append(f"{found.single} collectives of one device left out: they move nothing")
    if report.orphans:
        lines.append(f"{report.orphans} dones have no start in the text")
    if any(loop.trip_count is None for loop in report.loops):
        lines.append("a loop's trip count is not in the text: give --assume-trips N to count it")
    return lines


def render(found: Answer, style: str, top: int, width: int | None) -> str:
    """Return the report of one module as text or markdown."""
    head = heading(found)
    if style == "markdown":
        lines = [f"### {head[0]}", "", *[line + "  " for line in head[1:]]]
    else:
        lines = [cut(line, width) for line in head]
    for table in (main_table(found), axes_table(found), unions_table(found), copies_table(found)):
        if table is not None and (found.rows or table.head[0] != "kind"):
            lines += ["", *render_table(table, style, width)]
    tail = worst_lines(found, top, width)
    for block in (tail, [cut(line, width) for line in notes(found)]):
        if block:
            lines += ["", *(["```", *block, "```"] if style == "markdown" and block is tail else block)]
    return "\n".join(lines) + "\n"


# --- JSON ---------------------------------------------------------------------------------------------------------


def module_json(found: Answer) -> dict[str, Any]:
    """Return one module of the JSON document."""
    report, module = found.report, found.report.module
    return {
        "file": found.file,
        "name": module.name or None,
        "scheduled": module.scheduled,
        "truncated": module.truncated,
        "computations": len(module.computations),
        "instructions": sum(len(computation.names) for computation in module.computations),
        "loops": [
            {
                "computation": loop.computation.name,
                "trip_count": loop.trip_count,
                "inside": loop.where.name,
                "line": loop.where.lines[loop.at],
            }
            for loop in report.loops
        ],
        "collectives": [collective_json(found, one) for one in report.collectives],
        "hidden": [
            {
                "computation": hidden.computation.name,
                "name": hidden.computation.names[hidden.at],
                "line": hidden.computation.lines[hidden.at],
                "target": hidden.target,
                "reason": hidden.reason,
            }
            for hidden in report.hidden
        ],
        "totals": [row_json(row) for row in found.rows],
        "wire_bytes_per_step": found.all.size.high,
        "wire_bytes_per_step_min": found.all.size.low,
        "exposed_bytes_per_step": found.exposed.size.high,
        "exposed_bytes_per_step_min": found.exposed.size.low,
        "exposed_share": share(found.exposed.size, found.all.size),
        "axes": axes_json(found),
        "copies": [copy_json(key, found.totals[key]) for key in sorted(k for k in found.totals if k[0] == "copy")],
        "windows": [
            {
                "computation": union.computation.name,
                "windows": union.windows,
                "instructions": union.instructions,
                "instructions_inside": union.covered,
                "matmuls": union.total.matmuls,
                "matmuls_inside": union.cover.matmuls,
                "unknown_kernels": union.total.kernels,
                "unknown_kernels_inside": union.cover.kernels,
            }
            for union in report.unions
        ],
        "dones_without_start": report.orphans,
    }


def collective_json(found: Answer, one: Collective) -> dict[str, Any]:
    """Return one collective of the JSON document."""
    between = one.between
    return {
        "computation": one.computation.name,
        "name": one.name,
        "line": one.line,
        "kind": one.kind,
        "class": one.category,
        "group_size": one.group_size,
        "axes": list(one.axes),
        "output_bytes": one.output_bytes,
        "wire_bytes": one.wire_bytes,
        "executions_per_step": one.executions.high,
        "executions_per_step_min": one.executions.low,
        "op_name": one.op_name or None,
        "thread": one.thread or None,
        "between": None
        if between is None
        else {
            "instructions": between.instructions,
            "matmuls": between.cover.matmuls,
            "unknown_kernels": between.cover.kernels,
            "light": between.cover.light,
            "loops": between.loops,
            "matmul_flops": None if between.cover.no_flops else between.cover.flops,
            "flops_unknown": between.cover.no_flops,
            "opcodes": between.opcodes,
            "line": between_line(found.report, one, 400),
        },
    }


def row_json(row: Row) -> dict[str, Any]:
    return {
        "kind": row.kind,
        "class": row.category,
        "static": row.static,
        "per_step": row.count.high,
        "per_step_min": row.count.low,
        "wire_bytes_per_step": row.size.high,
        "wire_bytes_per_step_min": row.size.low,
        "exposed": None if row.category is None else row.category in EXPOSED,
    }


def axes_json(found: Answer) -> list[dict[str, Any]]:
    listed = []
    for names in sorted({key[1] for key in found.totals if key[0] == "axes"}):
        exposed = found.totals.get(("axes", names, True), hlo_schedule.NONE)
        whole = exposed.plus(found.totals.get(("axes", names, False), hlo_schedule.NONE))
        listed.append(
            {
                "axes": list(names),
                "per_step": whole.count.high,
                "wire_bytes_per_step": whole.size.high,
                "exposed_bytes_per_step": exposed.size.high,
            }
        )
    return listed


def copy_json(key: tuple, amount: hlo_schedule.Amount) -> dict[str, Any]:
    return {
        "operation": key[1],
        "from": key[2],
        "to": key[3],
        "per_step": amount.count.high,
        "bytes_per_step": amount.size.high,
    }


# --- trace --------------------------------------------------------------------------------------------------------


def trace_json(answers: list[Answer]) -> dict[str, Any]:
    """Return the schedules as a Chrome trace: 1 us is one position in the schedule, not a time.

    Each computation that runs as a schedule is a process, each loop body shown once; track 0 is compute,
    then one track per async thread, further tracks where windows of a thread overlap.
    """
    events: list[dict[str, Any]] = []
    process = 0
    for found in answers:
        for computation in found.report.order:
            work = [at for at, opcode in enumerate(computation.opcodes) if opcode not in NO_WORK]
            if not work:
                continue
            process += 1
            times = show_times(found.report.executions[computation.name])
            events.append(_named("process_name", process, 0, f"{computation.name} ({times} per step)"))
            events.append(_named("thread_name", process, 0, "compute"))
            for at in work:
                if not computation.opcodes[at].endswith(("-start", "-update", "-done")):
                    events.append(_slice(process, 0, computation, at, at, at + 1))
            events += _async_events(found.report, computation, process)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "otherData": {"unit": "1 us = one position in the printed schedule; lengths are not times"},
    }


def _async_events(report: Report, computation: hlo_text.Computation, process: int) -> Iterator[dict[str, Any]]:
    """Yield the windows that begin in a computation, on their threads, with arrows from start to done."""
    lanes: dict[str, list[int]] = {}  # thread -> where each of its tracks is free again
    tracks: dict[tuple[str, int], int] = {}
    size = len(computation.names)
    for one in sorted(report.collectives, key=lambda one: one.at):
        if one.computation is not computation or one.category in ("sync", None):
            continue
        first = one.window.segments[0] if one.window else None
        begin = first.after if first else one.at
        end = min(first.before, size) if first else one.at + 1
        thread = one.thread or "async"
        free = lanes.setdefault(thread, [])
        lane = next((place for place, until in enumerate(free) if until <= begin), len(free))
        free[lane:] = [end, *free[lane + 1 :]]
        if (thread, lane) not in tracks:
            tracks[(thread, lane)] = len(tracks) + 1
            shown = thread if not lane else f"{thread} ({lane + 1})"
            yield _named("thread_name", process, tracks[(thread, lane)], shown)
        track, name = tracks[(thread, lane)], f"{one.kind} {CLASS_NAMES[one.category]}"
        event = _slice(process, track, computation, one.at, begin, end) | {"name": name}
        yield event
        if one.window:
            identity = {"id": f"{process}.{one.at}", "cat": "collective", "name": one.kind, "pid": process}
            yield {"ph": "s", "tid": track, "ts": begin, **identity}
            yield {"ph": "f", "bp": "e", "tid": 0, "ts": end, **identity}


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def _slice(
    process: int, track: int, computation: hlo_text.Computation, at: int, begin: int, end: int
) -> dict[str, Any]:
    opcode = computation.opcodes[at]
    where = {"name": computation.names[at], "opcode": opcode, "line": computation.lines[at]}
    size = {"ts": begin, "dur": end - begin}
    return {
        "ph": "X",
        "name": computation.names[at],
        "cat": opcode,
        "pid": process,
        "tid": track,
        **size,
        "args": where,
    }


# --- gates --------------------------------------------------------------------------------------------------------


class Gate(NamedTuple):
    """One limit for CI."""

    key: str  # "exposed-bytes", "share" or "sync"
    limit: float
    text: str


_UNITS = {"": 1, "B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_GATE = re.compile(r"(exposed-bytes|share|sync)=(\d+(?:\.\d+)?(?:[eE]\d+)?)\s*(%|[kKMGT]?i?B)?$")


def gate(text: str) -> Gate:
    """Read `exposed-bytes=2GB`, `share=0.1`, `share=10%` or `sync=3`."""
    match = _GATE.match(text)
    key, number, unit = match.groups() if match else ("", "0", "")
    unit = unit or ""
    fits = {"exposed-bytes": unit in _UNITS, "share": unit in ("", "%"), "sync": unit == ""}
    if not fits.get(key):
        raise argparse.ArgumentTypeError(f"{text!r} is not exposed-bytes=N[GB], share=P[%] or sync=N")
    limit = float(number) * (0.01 if unit == "%" else _UNITS.get(unit, 1))
    if key == "share" and limit > 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a share is at most 1, or 100%")
    return Gate(key, limit, text)


def exceeded(found: Answer, one: Gate) -> str | None:
    """Return how a module exceeds a gate, or None.

    Raises:
      BenchError: the limit is not reached by what is known, and something is unknown.
    """
    where = f"{found.file}: {found.report.module.name or 'module'}"
    if one.key == "sync":
        count = sum(row.static for row in found.rows if row.category == "sync")
        return f"{where}: {count} sync collectives, {one.text} allowed" if count > one.limit else None
    low, high = found.exposed.size
    if one.key == "exposed-bytes":
        if (low if high is None else high) > one.limit:
            return f"{where}: {show_size(found.exposed.size)} exposed per step, {one.text} allowed"
        if high is not None:
            return None
    else:
        part = share(found.exposed.size, found.all.size)
        if part is not None or found.all.size.high == 0:
            over = part is not None and part > one.limit
            return f"{where}: {100 * (part or 0):.1f} % of the bytes exposed, {one.text} allowed" if over else None
    raise BenchError(
        f"cannot decide {one.text}: a trip count, group or element size is not in the text",
        where=found.file,
        todo="give --assume-trips N, or the whole text",
    )


# --- comparing two programs ---------------------------------------------------------------------------------------

_DROP = ("metadata", "channel_id", "origin")
_IDS = re.compile(  # numbers that a compiler hands out: they differ between two compilations of one program
    r'"(?:id|offload_id|binary_offset|program_offset|trace_op_offset|log_op_offset|fingerprint[a-z_]*)"\s*:\s*'
    r'(?:"[^"]*"|\d+)'
)
_NAME = re.compile(r"%?([A-Za-z_][\w.\-]*)")
_HEADER_DROP = re.compile(r"^HloModule\s+[^\s,]+,?|frontend_attributes=\{[^{}]*\},?|origin_recovery_table=\{.*?\},?")


def program_hash(module: hlo_text.Module) -> str:
    """Return a hash of what a module computes in which order: names, ids, channels and source lines removed."""
    digest = hashlib.sha256(_HEADER_DROP.sub("", module.header).strip().encode())
    numbers = {computation.name: place for place, computation in enumerate(module.computations)}
    for computation in module.computations:
        digest.update(f"\n{'ENTRY' if computation.entry else 'comp'} {computation.thread}\n".encode())
        local = {name: place for place, name in enumerate(computation.names)}
        for at in range(len(computation.names)):
            digest.update(_plain(computation, at, local, numbers).encode())
    return digest.hexdigest()[:16]


def _plain(computation: hlo_text.Computation, at: int, local: dict[str, int], numbers: dict[str, int]) -> str:
    """Return an instruction with positions for names and without what does not change what it does."""

    def name(match: re.Match[str]) -> str:
        word = match[1]
        if word in local:
            return f"#{local[word]}"
        return f"@{numbers[word]}" if word in numbers else match[0]

    piece = hlo_text.parts(computation, at)
    if piece.opcode in ("parameter", "constant"):
        inner = hlo_text.literal(computation, at)
    else:
        refs = hlo_text.operands(computation, at)
        inner = ",".join(f"{local.get(ref.name, ref.name)}.{ref.element}" for ref in refs)
    words = [f"{at == computation.root_index} {piece.shape} {piece.opcode} {inner}"]
    for key, value in sorted(hlo_text.attributes(computation, at).items()):
        if key in _DROP:
            continue
        if key in hlo_text.CALL_KEYS or key == "control-predecessors":
            value = _NAME.sub(name, value)
        elif key == "backend_config":
            value = _IDS.sub("", value)
        words.append(f"{key}={value}")
    return " ".join(words) + "\n"


def compare(left: Answer, right: Answer) -> dict[str, Any]:
    """Return two modules side by side as JSON."""
    sides = []
    for side in (left, right):
        module = side.report.module
        sides.append(
            {
                "file": side.file,
                "name": module.name or None,
                "program_hash": program_hash(module),
                "instructions": sum(len(computation.names) for computation in module.computations),
                "whiles": len(side.report.loops),
                "trip_counts": [loop.trip_count for loop in side.report.loops],
                "collectives": sum(row.static for row in side.rows),
                "wire_bytes_per_step": side.all.size.high,
                "exposed_bytes_per_step": side.exposed.size.high,
                "exposed_share": share(side.exposed.size, side.all.size),
                "hidden": len(side.report.hidden),
            }
        )
    rows = {}
    for place, side in enumerate((left, right)):
        for row in side.rows:
            pair = rows.setdefault((row.kind, row.category), [None, None])
            pair[place] = {
                "static": row.static,
                "per_step": row.count.high,
                "wire_bytes_per_step": row.size.high,
            }
    order = {category: place for place, category in enumerate(CLASSES)}
    keys = sorted(rows, key=lambda key: (key[0], order.get(key[1], -1)))
    return {
        "schema": SCHEMA_DIFF,
        "same_program": sides[0]["program_hash"] == sides[1]["program_hash"],
        "same_whiles": sorted(map(str, sides[0]["trip_counts"])) == sorted(map(str, sides[1]["trip_counts"])),
        "left": sides[0],
        "right": sides[1],
        "rows": [
            {"kind": kind, "class": category, "left": a, "right": b}
            for kind, category in keys
            for a, b in [rows[(kind, category)]]
        ],
    }


def render_compare(found: dict[str, Any], style: str, width: int | None) -> str:
    """Return a comparison as text or markdown."""
    left, right = found["left"], found["right"]
    verdict = "same program" if found["same_program"] else "different programs"
    whiles = "the same loops" if found["same_whiles"] else "different loops"
    hashes = (
        f"({left['program_hash']})" if found["same_program"] else f"({left['program_hash']}, {right['program_hash']})"
    )
    lines = [
        cut(f"left   {left['file']}: {left['name']}", width),
        cut(f"right  {right['file']}: {right['name']}", width),
    ]
    lines += [f"{verdict} {hashes}, {whiles}", ""]
    facts = [
        ["instructions", str(left["instructions"]), str(right["instructions"])],
        ["whiles", *(_trips(side["trip_counts"]) for side in (left, right))],
        ["collectives", str(left["collectives"]), str(right["collectives"])],
        ["wire bytes per step", *(show_bytes(side["wire_bytes_per_step"]) for side in (left, right))],
        ["exposed per step", *(show_bytes(side["exposed_bytes_per_step"]) for side in (left, right))],
        ["exposed share", *(show_share(side["exposed_share"]) or "?" for side in (left, right))],
        ["calls that may communicate", str(left["hidden"]), str(right["hidden"])],
    ]
    lines += render_table(Table(["", "left", "right"], facts, 1), style, width)
    cells = []
    for row in found["rows"]:
        sides = [row[side] or {"static": 0, "per_step": 0, "wire_bytes_per_step": 0} for side in ("left", "right")]
        counts = [f"{_known(side['static'])}/{_known(side['per_step'])}" for side in sides]
        sizes = [show_bytes(side["wire_bytes_per_step"]) for side in sides]
        cells.append([row["kind"], CLASS_NAMES[row["class"]], *counts, *sizes])
    head = ["kind", "class", "left", "right", "left bytes", "right bytes"]
    if cells:
        lines += ["", *render_table(Table(head, cells, 2), style, width), "", "counts are static/per step"]
    return "\n".join(lines) + "\n"


def _known(value: int | None) -> str:
    return "?" if value is None else str(value)


def _trips(counts: list[int | None]) -> str:
    if not counts:
        return "0"
    shown = [f"{number} x{_known(trips)}" for trips, number in sorted(Counter(counts).items(), key=str)]
    return f"{len(counts)} ({', '.join(shown)})"


# --- the tool -----------------------------------------------------------------------------------------------------


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=TOOL, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="HLO text, or - for stdin")
    parser.add_argument("--format", choices=("text", "json", "markdown"), default="text", help="default: text")
    parser.add_argument("--json", action="store_const", const="json", dest="format", help="short for --format json")
    parser.add_argument("--top", type=_count, default=5, metavar="N", help="list the N worst exposed (default: 5)")
    parser.add_argument("--wide", action="store_true", help="do not cut names to 80 columns")
    parser.add_argument(
        "--gate",
        type=gate,
        action="append",
        default=[],
        metavar="KEY=LIMIT",
        help="exposed-bytes=N[GB], share=P[%%] or sync=N; exit 1 when a module is over; repeatable",
    )
    parser.add_argument(
        "--diff", metavar="OTHER", help="compare with the module of another file; exit 1 unless the same"
    )
    parser.add_argument("--trace", metavar="OUT.json", help="also write the schedule as a Chrome/Perfetto trace")
    parser.add_argument(
        "--assume-trips", type=_count, metavar="N", help="trip count of loops whose own is not in the text"
    )
    parser.add_argument(
        "--unscheduled", action="store_true", help="accept unscheduled HLO: counts and bytes, no classes"
    )
    parser.add_argument("--partial", action="store_true", help="a truncated module is an answer too: exit 0")
    return parser


def _count(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def read_answers(file: str, args: argparse.Namespace) -> list[Answer]:
    """Return the answers about every module of a file.

    Raises:
      BenchError: unreadable, not HLO, or not scheduled without --unscheduled.
    """
    source = shown_name(file)
    modules = hlo_text.read_modules(read_text(file), source)
    for module in modules:
        if not module.scheduled and not args.unscheduled:
            what = (
                f"module {module.name} is not scheduled"
                if module.header
                else "no HloModule line says is_scheduled=true"
            )
            raise BenchError(
                f"{what}: the order of its text is not the order of execution",
                where=f"{source}:{module.line}",
                todo="take the after_optimizations dump, or give --unscheduled for counts without overlap",
            )
    found = []
    for module in modules:
        overlap = module.scheduled
        found.append(answer(source, hlo_schedule.analyse(module, args.assume_trips, overlap)))
    return found


def report_on(args: argparse.Namespace) -> int:
    """Print the report of every module; return the exit code."""
    answers = [found for file in args.files for found in read_answers(file, args)]
    width = None if args.wide else WIDTH
    if args.format == "json":
        emit(dump_json({"schema": SCHEMA, "modules": [module_json(found) for found in answers]}))
    else:
        emit("\n".join(render(found, args.format, args.top, width) for found in answers))
    if args.trace:
        write_whole(args.trace, dump_json(trace_json(answers), indent=None))
    cut_off = [found for found in answers if found.report.module.truncated]
    if cut_off and not args.partial:
        name = cut_off[0].report.module.name or "a module"
        complain(TOOL, f"{cut_off[0].file}: {name} is truncated; give --partial to accept an answer on what is there")
        return EXIT_CANNOT
    return judge(answers, args.gate)


def judge(answers: list[Answer], gates: list[Gate]) -> int:
    """Say on stderr which gates are exceeded; return the exit code."""
    over = [text for found in answers for one in gates if (text := exceeded(found, one))]
    for text in over:
        complain(TOOL, text)
    hidden = sum(len(found.report.hidden) for found in answers)
    if gates and hidden and not over:
        complain(TOOL, f"gates held for the collectives seen; {hidden} custom calls may communicate beside them")
    return EXIT_DIFFERENT if over else EXIT_OK


def compare_two(args: argparse.Namespace) -> int:
    """Print the comparison of two modules; return the exit code."""
    sides = []
    for file in (args.files[0], args.diff):
        found = read_answers(file, args)
        if len(found) != 1:
            raise BenchError(f"holds {len(found)} modules", where=shown_name(file), todo="compare files of one module")
        if found[0].report.module.truncated and not args.partial:
            raise BenchError("is truncated", where=shown_name(file), todo="give the whole text, or --partial")
        sides.append(found[0])
    result = compare(*sides)
    if args.format == "json":
        emit(dump_json(result))
    else:
        emit(render_compare(result, args.format, None if args.wide else WIDTH))
    return EXIT_OK if result["same_program"] else EXIT_DIFFERENT


def main(argv: list[str] | None = None) -> int:
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.diff and (args.gate or args.trace):
        parser.error("--diff cannot be combined with --gate or --trace")
    if args.diff and len(args.files) != 1:
        parser.error("--diff compares two files: give one FILE and --diff OTHER")
    if args.unscheduled and (args.gate or args.trace):
        parser.error("--unscheduled gives no overlap: it cannot be combined with --gate or --trace")
    if [*args.files, args.diff].count("-") > 1:
        parser.error("- (stdin) can be read once")
    collecting = gc.isenabled()
    gc.disable()  # nothing here makes circles; on 50 MB the collector would walk millions of live objects
    try:
        return run_tool(TOOL, lambda: compare_two(args) if args.diff else report_on(args))
    finally:
        if collecting:
            gc.enable()


if __name__ == "__main__":
    raise SystemExit(main())
