"""Which buffers are alive when a kernel's memory peaks: read from the compiler's own reports.

With `xla_dump_to` libtpu writes, beside the optimized HLO, `...live-range.txt` (what lives at the peak) and
`...buffer-assignment.txt` (each buffer with its size, shape and memory space). `peak_buffers` joins the two with the
HLO text, which knows the operation and the source line. Standard library only.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Mapping
from typing import Any

from aot_memory import gib

CHUNK = 512  # --compute_logps_chunk_size of Tunix's own recipes, suggested where a launch has none
_PEAK = re.compile(r"^\s*Live ranges at \d+ \(peak\):$", re.MULTILINE)
_LIVE = re.compile(r"^\s+(\S+?)\{([\d,]*)\}: (\d+) bytes \(cumulative", re.MULTILINE)
# ` value: <31 copy.16 @1> (size=4194304,offset=0): f32[512,2048]{1,0:T(8,128)S(1)}`
_VALUE = re.compile(
    r"^ value: <\d+ (\S+?)(?:\{([\d,]*)\})?(?: \(phi\))? @(\d+)> \(size=(\d+),offset=\d+\): (\(|[^\s{(]+)", re.MULTILINE
)
_KIND = re.compile(r"^allocation \d+: size \d+,(?P<what>[^\n]*)$", re.MULTILINE)
_NAME = re.compile(r"^\s*(?:ROOT )?%?([^\s=(){},]+) = ")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_TABLE_ROW = re.compile(r"^(\d+) (.*)$")
_SHAPE = re.compile(r"([a-z]\w*)\[([\d,]*)\]")


def peak_buffers(dump_dir: str, hlo_text: str, limit: int = 10) -> list[dict[str, Any]]:
    """Return the largest HBM buffers alive at a kernel's peak, largest first.

    Args:
      dump_dir: where libtpu wrote its reports; empty where the compile ended before they were written.
      hlo_text: the optimized HLO of the same compile; empty leaves operation and source unknown.

    Returns:
      dicts with name, bytes, dtype, dims, kind (argument, output, temporary), op_name and source.
    """
    live, assigned = _newest(dump_dir, "live-range"), _newest(dump_dir, "buffer-assignment")
    if not live or not assigned:
        return []
    values = _values(assigned)
    begin = _PEAK.search(live)
    if begin is None:
        return []
    end = live.find("Stack trace breakdown", begin.end())
    rows = []
    for match in _LIVE.finditer(live, begin.end(), len(live) if end < 0 else end):
        value = values.get((match[1], match[2]))
        if value is not None and value["space"] == 0 and value["shape"]:
            rows.append({"name": match[1], "bytes": value["bytes"], **value["shape"], "kind": value["kind"]})
    rows.sort(key=lambda row: (-row["bytes"], row["name"]))
    chosen = rows[:limit]
    described = describe(hlo_text, {row["name"] for row in chosen})
    return [{**row, **described.get(row["name"], {"op_name": None, "source": None})} for row in chosen]


def _newest(dump_dir: str, report: str) -> str:
    paths = glob.glob(os.path.join(glob.escape(dump_dir), f"*after_optimizations-{report}.txt"))
    if not paths:
        return ""
    with open(max(paths, key=os.path.getmtime), encoding="utf-8", errors="replace") as stream:
        return stream.read()


def dumped_hlo(dump_dir: str) -> str:
    """Return the optimized HLO text that libtpu wrote beside its reports, also of a module that did not fit."""
    paths = glob.glob(os.path.join(glob.escape(dump_dir), "*.after_optimizations.txt"))
    if not paths:
        return ""
    with open(max(paths, key=os.path.getmtime), encoding="utf-8", errors="replace") as stream:
        return stream.read()


def _values(assignment: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Return (instruction, index) -> bytes, memory space, shape and kind."""
    kinds = [(match.start(), match["what"]) for match in _KIND.finditer(assignment)]
    found, at = {}, -1
    for match in _VALUE.finditer(assignment):
        while at + 1 < len(kinds) and kinds[at + 1][0] < match.start():
            at += 1
        what = kinds[at][1] if at >= 0 else ""
        kind = "argument" if " parameter " in what else "output" if "maybe-live-out" in what else "temporary"
        found.setdefault((match[1], match[2] or ""), {
            "bytes": int(match[4]), "space": int(match[3]), "shape": read_array(match[5]), "kind": kind})  # fmt: skip
    return found


def read_array(text: str) -> dict[str, Any] | None:
    """Return dtype and dims of an array shape such as `bf16[8,128]`; None for a tuple."""
    match = _SHAPE.match(text)
    if match is None:
        return None
    return {"dtype": match[1], "dims": [int(part) for part in match[2].split(",") if part]}


def describe(hlo_text: str, names: set[str]) -> dict[str, dict[str, str | None]]:
    """Return for instructions of an HLO text their operation's name and `file:line`, None where it has none."""
    frames, found = _source_lines(hlo_text), {}
    lines = hlo_text.splitlines() if names else []
    for index, line in enumerate(lines):
        match = _NAME.match(line)
        if match is None or match[1] not in names or match[1] in found:
            continue
        text = line
        for more in lines[index + 1 : index + 100]:  # a Pallas kernel's metadata goes over many lines
            if _NAME.match(more) or more.strip() in ("}", ""):
                break
            text += more
        op_name, frame = _OP_NAME.search(text), _FRAME.search(text)
        source = re.search(r'source_file="([^"]*)" source_line=(\d+)', text)
        place = f"{source[1]}:{source[2]}" if source else frames.get(int(frame[1])) if frame else None
        found[match[1]] = {"op_name": op_name[1].replace("\\'", "'") if op_name else None, "source": short_path(place)}
    return found


def short_path(place: str | None) -> str | None:
    """Return a `file:line` from its package on: no path of the machine that compiled."""
    if place is None:
        return None
    _, found, rest = place.rpartition("site-packages/")
    return rest if found else os.path.basename(place)


def _source_lines(hlo_text: str) -> dict[int, str]:
    """Return frame id -> `file:line` from the tables behind the module's header (jaxlib from about 0.8)."""
    tables: dict[str, dict[int, str]] = {}
    rows: dict[int, str] | None = None
    for line in hlo_text[: hlo_text.find("\n%") + 1 or len(hlo_text)].splitlines():
        if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            rows = tables.setdefault(line, {})
        elif rows is not None and (match := _TABLE_ROW.match(line)):
            rows[int(match[1])] = match[2]
    files, places = tables.get("FileNames", {}), tables.get("FileLocations", {})

    def number(text: str, field: str) -> int:
        found = re.search(rf"{field}=(\d+)", text)
        return int(found[1]) if found else 0

    lines = {}
    for frame, text in tables.get("StackFrames", {}).items():
        place = places.get(number(text, "file_location_id"), "")
        file = files.get(number(place, "file_name_id"), "").strip('"')
        if file:
            lines[frame] = f"{file}:{number(place, 'line')}"
    return lines


# --- what a change would save ----------------------------------------------------------------------


def savings(buffer: Mapping[str, Any], facts: Mapping[str, Any]) -> list[str]:
    """Return what changes would save of a buffer, only where that follows from its shape.

    Args:
      buffer: one of peak_buffers.
      facts: rows_per_device, width_per_device, scored_per_device (tokens), chunk_size, layers and vocab of the
        program; None where unknown.
    """
    lines, dims, size = [], buffer["dims"], buffer["bytes"]
    path = buffer.get("op_name") or ""
    if buffer["kind"] == "argument" and path.startswith("acc_grads") and buffer["dtype"] == "f32":
        lines.append(f"saves {gib(size // 2)}, half: grad_dtype=bfloat16")
    rows = facts.get("rows_per_device")
    if buffer["kind"] == "temporary" and rows and rows > 1 and rows % 2 == 0 and rows in dims[:2]:
        lines.append(f"saves {gib(size // 2)}, half: half the rows per micro-batch")
    chunk = facts.get("chunk_size")
    vocab, scored = facts.get("vocab") or 0, facts.get("scored_per_device") or 0
    logits = any(dim > 128 and vocab % dim == 0 and dim * 64 >= vocab for dim in dims)  # sharded or whole
    if buffer["kind"] == "temporary" and logits and chunk in dims:
        lines.append(f"saves {gib(size // 2)}, half: --compute_logps_chunk_size={max(1, chunk // 2)}")
    if buffer["kind"] == "temporary" and logits and not chunk and scored > CHUNK and scored in dims:
        lines.append(f"saves {gib(size - size * CHUNK // scored)}: --compute_logps_chunk_size={CHUNK}")
    layers, width = facts.get("layers") or 0, facts.get("width_per_device")
    if buffer["kind"] == "temporary" and layers > 1 and dims[:1] == [layers] and width in dims:
        lines.append(f"saves {gib(size)}: a remat_policy that offloads or recomputes it")
    return lines
