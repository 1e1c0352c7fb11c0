"""Write what hlo_schedule found: tables in text or markdown, a JSON document, a trace to look at.

`answer` sums a report up; `render`, `module_json` and `trace_json` print from the same sums, so they cannot
disagree. Text keeps to 80 columns unless the width is None. Standard library only.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import hlo_text
import hlo_totals
from hlo_program import NO_WORK, SORT, Segment, Times, collective_base, start_in_place
from hlo_schedule import CLASSES, EXPOSED, NOTHING_BETWEEN, Collective, Report

WIDTH = 80
CLASS_NAMES = {
    "sync": "sync",
    "async_empty": "async: nothing",
    "async_light": "async: light",
    "async_compute": "async: compute",
    "unmatched": "unmatched",
    None: "not scheduled",
}
_MAX_SHOWN = 150  # instructions of a window that are looked at for its line
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


class Answer(NamedTuple):
    """A report with its sums, ready to print."""

    file: str
    report: Report
    rows: list[Row]
    totals: hlo_totals.Totals
    single: int  # collectives of one device, left out

    @property
    def all(self) -> hlo_totals.Amount:
        return self.totals.get(("all",), hlo_totals.NONE)

    @property
    def exposed(self) -> hlo_totals.Amount:
        return self.totals.get(("exposed",), hlo_totals.NONE)


def answer(file: str, report: Report) -> Answer:
    """Return the sums of a report."""
    totals = hlo_totals.per_step(report)
    counted = [collective for collective in report.collectives if collective.group_size != 1]
    static = Counter((collective.kind, collective.category) for collective in counted)
    order = {category: place for place, category in enumerate(CLASSES)}
    rows = []
    for kind, category in sorted(static, key=lambda key: (key[0], order.get(key[1], -1))):
        amount = totals.get(("row", kind, category), hlo_totals.NONE)
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
        for at in range(segment.after + 1, min(segment.before, segment.after + _MAX_SHOWN)):
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
        exposed = found.totals.get(("axes", names, True), hlo_totals.NONE)
        other = found.totals.get(("axes", names, False), hlo_totals.NONE)
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
    instructions = sum(len(computation) for computation in module.computations)
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
        "instructions": sum(len(computation) for computation in module.computations),
        "loops": [
            {
                "computation": loop.computation.name,
                "trip_count": loop.trip_count,
                "inside": loop.where.name,
                "line": loop.where.line_of(loop.at),
            }
            for loop in report.loops
        ],
        "collectives": [collective_json(found, one) for one in report.collectives],
        "hidden": [
            {
                "computation": hidden.computation.name,
                "name": hidden.computation.names[hidden.at],
                "line": hidden.computation.line_of(hidden.at),
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
        "between": between_json(found, one),
    }


def between_json(found: Answer, one: Collective) -> dict[str, Any] | None:
    """Return what can run meanwhile: nothing for a synchronous collective, null where it is unknown."""
    between = NOTHING_BETWEEN if one.category == "sync" else one.between
    if between is None:
        return None
    return {
        "instructions": between.instructions,
        "matmuls": between.cover.matmuls,
        "unknown_kernels": between.cover.kernels,
        "light": between.cover.light,
        "loops": between.loops,
        "matmul_flops": None if between.cover.no_flops else between.cover.flops,
        "flops_unknown": between.cover.no_flops,
        "opcodes": between.opcodes,
        "line": between_line(found.report, one, 400) if one.between else None,
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
        exposed = found.totals.get(("axes", names, True), hlo_totals.NONE)
        whole = exposed.plus(found.totals.get(("axes", names, False), hlo_totals.NONE))
        listed.append(
            {
                "axes": list(names),
                "per_step": whole.count.high,
                "wire_bytes_per_step": whole.size.high,
                "exposed_bytes_per_step": exposed.size.high,
            }
        )
    return listed


def copy_json(key: tuple, amount: hlo_totals.Amount) -> dict[str, Any]:
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
        shown = [one for one in found.report.order if any(opcode not in NO_WORK for opcode in one.opcodes)]
        ids = {id(computation): process + place for place, computation in enumerate(shown, 1)}
        process += len(shown)
        for computation in shown:
            times = show_times(found.report.executions[computation.name])
            mine = ids[id(computation)]
            events.append(_named("process_name", mine, 0, f"{computation.name} ({times} per step)"))
            events.append(_named("thread_name", mine, 0, "compute"))
            for at, opcode in enumerate(computation.opcodes):
                if opcode not in NO_WORK:
                    events.append(_slice(mine, 0, computation, at, at, at + 1))
            events += _async_events(found.report, computation, ids)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "otherData": {"unit": "1 us = one position in the printed schedule; lengths are not times"},
    }


def _async_events(report: Report, computation: hlo_text.Computation, ids: dict[int, int]) -> Iterator[dict[str, Any]]:
    """Yield the windows that begin in a computation, on their threads, with arrows from start to done."""
    lanes: dict[str, list[int]] = {}  # thread -> where each of its tracks is free again
    tracks: dict[tuple[str, int], int] = {}
    process, size = ids[id(computation)], len(computation)
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
        yield _slice(process, track, computation, one.at, begin, end) | {"name": name}
        if one.window:
            home, done = one.window.done
            arrow = {"id": f"{process}.{one.at}", "cat": "collective", "name": one.kind}
            yield {"ph": "s", "pid": process, "tid": 0, "ts": begin, **arrow}
            yield {"ph": "f", "bp": "e", "pid": ids[id(home)], "tid": 0, "ts": done, **arrow}


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def _slice(
    process: int, track: int, computation: hlo_text.Computation, at: int, begin: int, end: int
) -> dict[str, Any]:
    opcode = computation.opcodes[at]
    where = {"name": computation.names[at], "opcode": opcode, "line": computation.line_of(at)}
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
