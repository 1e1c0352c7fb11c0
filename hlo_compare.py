"""Compare two HLO modules: are they the same program, and what do they move.

`program_hash` is over what a module computes in which order, with names, ids, channel numbers and source
lines removed, so that two compilations of one program agree. Standard library only.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import hlo_text
from hlo_report import CLASS_NAMES, Answer, Table, cut, render_table, share, show_bytes, show_share
from hlo_schedule import CLASSES

SCHEMA_DIFF = "hlo-overlap-diff/1"

_DROP = ("metadata", "channel_id", "origin")
_IDS = re.compile(  # numbers that a compiler hands out: they differ between two compilations of one program
    r'"(?:id|offload_id|binary_offset|program_offset|trace_op_offset|log_op_offset|fingerprint[a-z_]*)"\s*:\s*'
    r'(?:"[^"]*"|\d+)'
)
_NAME = re.compile(r"%?([A-Za-z_][\w.\-]*)")
_HEADER_DROP = ("frontend_attributes", "origin_recovery_table")  # fingerprints and source places


def program_hash(module: hlo_text.Module) -> str:
    """Return a hash of what a module computes in which order: names, ids, channels and source lines removed."""
    import hashlib  # slow to load, and only a comparison needs it

    header = [piece for piece in hlo_text.header_pieces(module) if piece.partition("=")[0] not in _HEADER_DROP]
    digest = hashlib.sha256(", ".join(header).encode())
    numbers = {computation.name: place for place, computation in enumerate(module.computations)}
    for computation in module.computations:
        digest.update(f"\n{'ENTRY' if computation.entry else 'comp'} {computation.thread}\n".encode())
        local = {name: place for place, name in enumerate(computation.names)}
        for at in range(len(computation)):
            digest.update(_plain(computation, at, local, numbers).encode())
    return digest.hexdigest()[:16]


def _plain(computation: hlo_text.Computation, at: int, local: dict[str, int], numbers: dict[str, int]) -> str:
    """Return an instruction with positions for names and without what does not change what it does."""

    def name(match: re.Match[str]) -> str:
        word = match[1]
        if word in local:
            return f"#{local[word]}"
        return f"@{numbers[word]}" if word in numbers else match[0]

    opcode = computation.opcodes[at]
    if opcode in ("parameter", "constant"):
        inner = hlo_text.literal(computation, at)
    else:
        refs = hlo_text.operands(computation, at)
        inner = ",".join(f"{local.get(ref.name, ref.name)}.{ref.element}" for ref in refs)
    words = [f"{at == computation.root_index} {hlo_text.shape_text(computation, at)} {opcode} {inner}"]
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
                "instructions": sum(len(computation) for computation in module.computations),
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
