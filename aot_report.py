"""What aot_bench says: the document (schema aot-bench/1), its text and markdown, and predictions side by side.

The document is made once; text and markdown are made from it, so that they cannot disagree. Bytes are per JAX device;
null is unknown. Standard library only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from aot_memory import GIB, Beside, Kernel, Shortage, Total, Verdict, gib
from bench_common import BenchError, mask

SCHEMA = "aot-bench/1"
WIDTH = 80
COST_DOUBTS = ("FLOPs and bytes are the compiler's own: the body of a loop counts once however often it runs "
               "(a scan over layers, over token chunks), a Pallas kernel counts as nothing.")  # fmt: skip


_PLUMBING = re.compile(r"\.(?:inner_states\.\w+|inner_state|inner|opt_state|base)(?:\[\d+\])?(?=\.|$)")


def kernel_document(total: Total) -> dict[str, Any]:
    """Return one kernel's part of the document."""
    kernel = total.kernel
    return {
        "name": kernel.name, "status": kernel.status, "compile_seconds": kernel.compile_seconds,
        "argument_bytes": kernel.argument_bytes, "output_bytes": kernel.output_bytes,
        "alias_bytes": kernel.alias_bytes, "temp_bytes": kernel.temp_bytes, "code_bytes": kernel.code_bytes,
        "peak_bytes": kernel.peak_bytes, "peak_source": kernel.peak_source, "host_bytes": kernel.host_bytes,
        "beside": [{"name": one.name, "bytes": one.bytes, "at_least": one.at_least} for one in total.beside],
        "total_bytes": total.total_bytes, "headroom_bytes": total.headroom_bytes, "fits": total.fits,
        "flops": kernel.flops, "bytes_accessed": kernel.bytes_accessed,
        "shortages": [_shortage(one) for one in kernel.shortages], "error": kernel.error,
        "largest_buffers": kernel.buffers, "notes": kernel.notes, **kernel.extra,
    }  # fmt: skip


def _shortage(one: Any) -> dict[str, Any]:
    return {"space": one.space, "when": one.when, "what": one.what, "needed_bytes": one.needed_bytes,
            "available_bytes": one.available_bytes, "over_bytes": one.over_bytes, "module": one.module}  # fmt: skip


def document(verdict: Verdict, rest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the whole document.

    Args:
      verdict: of the kernels.
      rest: source ("compile" or "log"), capacity_source, topology, mesh, batch, resident, config, flags, versions,
        notes ...; what is missing becomes null.
    """
    peak = verdict.peak
    words = {True: "fits", False: "does not fit", None: "not known"}
    named = ("topology", "devices", "devices_per_chip", "mesh", "batch", "runtime", "resident", "flags", "versions",
             "config_sha256", "config")  # fmt: skip
    return {
        "schema": SCHEMA, "source": rest["source"], "fits": verdict.fits, "verdict": words[verdict.fits],
        "reasons": verdict.reasons, "peak_bytes": peak.total_bytes if peak else None,
        "peak_kernel": peak.kernel.name if peak else None, "capacity_bytes": verdict.capacity_bytes,
        "capacity_source": rest.get("capacity_source"),
        "reserve_bytes": verdict.reserve_bytes, "headroom_bytes": peak.headroom_bytes if peak else None,
        "kernels": [kernel_document(total) for total in verdict.totals],
        "not_the_same_program": list(rest.get("not_the_same_program") or ()), "notes": list(rest.get("notes") or ()),
        **{name: rest.get(name) for name in named},
    }  # fmt: skip


# --- text -----------------------------------------------------------------------------------------


def _cell(count: float | None) -> str:
    return "?" if count is None else f"{count / GIB:.3f}"


_COLUMNS = ("argument", "output", "alias", "temp", "code", "peak", "total")


def _row(kernel: Mapping[str, Any]) -> list[str]:
    return [kernel["name"], *(_cell(kernel[f"{column}_bytes"]) for column in _COLUMNS)]


def render(doc: Mapping[str, Any], style: str = "text", top: int = 5) -> str:
    """Return the report as text or markdown.

    Args:
      doc: an aot-bench/1 document.
      style: "text" (at most 80 columns) or "markdown".
      top: how many of the largest buffers to list.
    """
    lines = [*_heading(doc), ""]
    heads = ["kernel", "argument", "output", "aliased", "temp", "code", "peak", "total"]
    lines += _table(heads, [_row(kernel) for kernel in doc["kernels"]], style)
    lines += ["", *_under_table(doc)]
    lines += _resident_lines(doc)
    lines += _capacity_lines(doc)
    lines += _buffer_lines(doc, top)
    lines += _cost_lines(doc)
    lines += [f"not the same program: {line}" for line in _merged(doc["not_the_same_program"])]
    lines += [f"note: {line}" for line in doc["notes"]]
    lines += [f"note: {kernel['name']}: {line}" for kernel in doc["kernels"] for line in kernel["notes"]]
    lines += ["", *(f"because {reason}" for reason in doc["reasons"]), f"verdict: {_verdict_line(doc)}"]
    return "\n".join(line for long in lines for line in wrap(long, style)) + "\n"


def _merged(lines: Sequence[str]) -> list[str]:
    """Return lines with those that begin alike up to their last `: ` put into one."""
    merged: dict[str, list[str]] = {}
    for line in lines:
        head, colon, rest = line.rpartition(": ")
        merged.setdefault(head + colon, []).append(rest)
    return [head + ", ".join(rest) for head, rest in merged.items()]


def wrap(line: str, style: str) -> list[str]:
    """Return a line cut at blanks to 80 columns; markdown and rows of tables are left alone."""
    if style == "markdown" or len(line) <= WIDTH:
        return [line]
    import textwrap

    return textwrap.wrap(line, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _heading(doc: Mapping[str, Any]) -> list[str]:
    mesh = " x ".join(f"{axis} {size}" for axis, size in (doc["mesh"] or {}).items())
    parts = [f"{doc['topology']}: {doc['devices']} JAX devices" if doc["devices"] else doc["topology"] or "a log"]
    parts += [f"mesh {mesh}"] if mesh else []
    if doc["batch"]:
        batch = doc["batch"]
        parts.append(f"{batch['rows']} {'packed' if batch['packed'] else 'padded'} rows x {batch['row_width']} tokens")
    return [", ".join(parts)]


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], style: str) -> list[str]:
    if style == "markdown":
        return [f"| {' | '.join(heads)} |", "|---" + "|---:" * (len(heads) - 1) + "|",
                *(f"| {' | '.join(row)} |" for row in rows)]  # fmt: skip
    first = max(len(row[0]) for row in [heads, *rows])
    return ["".join([row[0].ljust(first), *(cell.rjust(9) for cell in row[1:])]) for row in [heads, *rows]]


def _under_table(doc: Mapping[str, Any]) -> list[str]:
    sources = {kernel["peak_source"] for kernel in doc["kernels"] if kernel["peak_source"]}
    vmem = ", which counts vmem too" if any(_above_its_sum(kernel) for kernel in doc["kernels"]) else ""
    told = {"compiler": f"peak is the compiler's own figure{vmem}"}
    how = "; ".join(
        sorted(told.get(source, f"peak is {source}, a sum that tends to be too high") for source in sources)
    )
    lines = ["GiB per JAX device; total is peak + code + what stays beside the kernel" + (f"; {how}" if how else "")]
    for kernel in doc["kernels"]:
        if kernel["status"] == "lowered":
            lines.append(f"{kernel['name']}: lowered only; total is its arguments and what stays beside: a lower bound")
        elif kernel["status"] != "compiled":
            told = "; total is what the compiler asked for" if kernel["total_bytes"] is not None else ""
            lines.append(f"{kernel['name']}: {kernel['status']}{told}")
        if kernel["compile_seconds"] is not None:
            lines.append(f"{kernel['name']}: compiled in {kernel['compile_seconds']:.1f} s")
        if kernel.get("routing"):
            lines.append(f"{kernel['name']}: {kernel['routing']}")
    return lines


def _above_its_sum(kernel: Mapping[str, Any]) -> bool:
    """Return whether a kernel's peak is more than all its HBM buffers together."""
    sizes = [kernel[field] for field in ("argument_bytes", "output_bytes", "alias_bytes", "temp_bytes", "peak_bytes")]
    return None not in sizes and sizes[4] > sizes[0] + sizes[1] - sizes[2] + sizes[3]


def _resident_lines(doc: Mapping[str, Any]) -> list[str]:
    lines = []
    if doc["resident"]:
        held = doc["resident"]
        lines.append(
            f"resident: train state {gib(held['train_state_bytes'])} (parameters {gib(held['parameters_bytes'])}, "
            f"optimizer {gib(held['optimizer_bytes'])}), accumulated gradients {gib(held['gradients_bytes'])}, "
            f"one micro-batch {gib(held['micro_batch_bytes'])}{_fields(held)}"
        )
    for kernel in doc["kernels"]:
        if kernel["beside"]:
            parts = [f"{one['name']} {'at least ' if one['at_least'] else ''}{gib(one['bytes'])}"
                     for one in kernel["beside"]]  # fmt: skip
            lines.append(f"beside {kernel['name']}: {', '.join(parts)}")
    return lines


def _fields(held: Mapping[str, Any]) -> str:
    """Return the two largest fields of a micro-batch and its reference log-probs, where it has them."""
    fields = {name: count for name, count in (held.get("micro_batch_fields_bytes") or {}).items() if count}
    largest = sorted(fields, key=lambda name: (-fields[name], name))[:2]
    shown = [*largest, *(name for name in fields if name.startswith("ref_") and name not in largest)]
    return f" ({', '.join(f'{name} {gib(fields[name])}' for name in shown)})" if shown else ""


def _capacity_lines(doc: Mapping[str, Any]) -> list[str]:
    if doc["capacity_bytes"] is None:
        return ["usable HBM: not known; give --cap-gib"]
    per_chip = f", {doc['devices_per_chip']} devices per chip" if (doc["devices_per_chip"] or 1) > 1 else ""
    why = f" ({doc['capacity_source']})" if doc["capacity_source"] else ""
    reserve = f", {gib(doc['reserve_bytes'])} kept in reserve" if doc["reserve_bytes"] else ""
    return [f"usable HBM per JAX device: {gib(doc['capacity_bytes'])}{per_chip}{why}{reserve}"]


def _buffer_lines(doc: Mapping[str, Any], top: int) -> list[str]:
    kernel = next((kernel for kernel in doc["kernels"] if kernel["name"] == doc["peak_kernel"]), None)
    if kernel is None or not kernel["largest_buffers"]:
        kernel = next((kernel for kernel in doc["kernels"] if kernel["largest_buffers"]), None)
    if kernel is None or not top:
        return []
    lines = ["", f"largest buffers at the peak of {kernel['name']}:"]
    for buffer in kernel["largest_buffers"][:top]:
        shape = "" if buffer["dims"] is None else f" {buffer['dtype']}[{','.join(map(str, buffer['dims']))}]"
        lines.append(f"  {gib(buffer['bytes']):>10} {buffer['kind']}{shape}")
        told = [readable(buffer["op_name"] or buffer["name"]), buffer.get("sharding"), buffer["source"]]
        told += buffer.get("savings") or ()
        lines += [f"             {_middle(line, WIDTH - 13)}" for line in told if line]
    return lines


def readable(name: str) -> str:
    """Return `state_pure['optimizer']['opt_state']['inner'][0]['mu']['base']['norm'].value` as `optimizer.mu.norm`.

    What wraps a parameter's place (the adapter's base, optax's inner states) tells nothing; the JSON has it whole.
    """
    if "['" not in name or "/" in name:
        return name
    plain = name.removesuffix(".value").replace("']['", ".").replace("['", ".").replace("']", "")
    return _PLUMBING.sub("", plain).removeprefix("state_pure.")


def _middle(text: str, width: int) -> str:
    """Return a text cut in its middle: both ends of a parameter's path tell which it is."""
    if len(text) <= width:
        return text
    head = (width - 3) // 3
    return f"{text[:head]}...{text[head + 3 - width :]}"


def _cost_lines(doc: Mapping[str, Any]) -> list[str]:
    known = [kernel for kernel in doc["kernels"] if kernel["flops"] is not None]
    if not known:
        return []
    lines = [f"{kernel['name']}: {kernel['flops']:.3g} FLOPs" + (
        "" if kernel["bytes_accessed"] is None else f", {kernel['bytes_accessed']:.3g} bytes accessed")
        for kernel in known]  # fmt: skip
    return ["", *lines, COST_DOUBTS]


def _verdict_line(doc: Mapping[str, Any]) -> str:
    short = [f"{kernel['name']} runs out of {one['space']}" for kernel in doc["kernels"] for one in kernel["shortages"]]
    if short:
        return f"{doc['verdict']}: {', '.join(dict.fromkeys(short))}"
    if doc["peak_bytes"] is None:
        return doc["verdict"]
    head = doc["headroom_bytes"]
    room = "" if head is None else f", {gib(abs(head))} {'to spare' if head >= 0 else 'too much'}"
    bound = "" if all(kernel["status"] == "compiled" for kernel in doc["kernels"]) else "at least "
    return f"{doc['verdict']}: {bound}{gib(doc['peak_bytes'])} per JAX device in {doc['peak_kernel']}{room}"


# --- side by side -----------------------------------------------------------------------------------


def check_document(doc: Any, where: str) -> dict[str, Any]:
    """Return an aot-bench/1 document that holds at least what a comparison needs.

    Raises:
      BenchError: it is something else.
    """
    kernels = doc.get("kernels") if isinstance(doc, dict) and doc.get("schema") == SCHEMA else None
    if not isinstance(kernels, list) or not all(
            isinstance(one, dict) and isinstance(one.get("name"), str) for one in kernels):  # fmt: skip
        raise BenchError(f"no {SCHEMA} document", where=where, todo="give what aot_bench --json wrote")
    sizes = [kernel.get(field) for kernel in kernels for field in ("temp_bytes", "peak_bytes", "total_bytes")]
    known = isinstance(doc.get("config") or {}, dict) and doc.get("fits") in (True, False, None)
    if not known or not all(size is None or (isinstance(size, int) and size >= 0) for size in sizes):
        raise BenchError(f"a damaged {SCHEMA} document", where=where, todo="give what aot_bench --json wrote")
    return doc


_SIZES = ("argument_bytes", "output_bytes", "alias_bytes", "temp_bytes", "code_bytes", "host_bytes")
_EXTRA = ("logical_argument_bytes", "routing", "lowered_operations", "hlo_file")  # of a compile, not of a log


def read_document(doc: Any, where: str) -> tuple[dict[str, Any], list[Kernel], dict[str, list[Beside]]]:
    """Return a whole aot-bench/1 document, its kernels, and what stays beside each, to be judged again.

    Raises:
      BenchError: it is something else, or a field is missing or of another kind. What can be rendered is whole.
    """
    check_document(doc, where)
    try:
        kernels = [_kernel_of(one) for one in doc["kernels"]]
        beside = {one["name"]: [Beside(item["name"], _size(item["bytes"]), item["at_least"]) for item in one["beside"]]
                  for one in doc["kernels"]}  # fmt: skip
        render(doc)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise BenchError(f"a damaged {SCHEMA} document: {type(error).__name__} {error}", where=where,
                         todo="give what aot_bench --json wrote") from error  # fmt: skip
    return doc, kernels, beside


def _kernel_of(one: Mapping[str, Any]) -> Kernel:
    return Kernel(
        one["name"], one["status"], one["compile_seconds"], **{field: _size(one[field]) for field in _SIZES},
        told_peak_bytes=_size(one["peak_bytes"]) if one["peak_source"] == "compiler" else None, flops=one["flops"],
        bytes_accessed=one["bytes_accessed"], shortages=[_shortage_of(told) for told in one["shortages"]],
        error=one["error"], buffers=one["largest_buffers"], notes=one["notes"],
        extra={field: one[field] for field in _EXTRA if field in one},
    )  # fmt: skip


def _shortage_of(told: Mapping[str, Any]) -> Shortage:
    sizes = {field: _size(told[field]) for field in ("needed_bytes", "available_bytes", "over_bytes")}
    return Shortage(**{**told, **sizes})


def _size(value: Any) -> int | None:
    if value is None or (isinstance(value, int) and value >= 0):
        return value
    raise ValueError(f"{value!r} is no number of bytes")


def _is_size(value: Any) -> bool:
    """Return whether a JSON value is a number of bytes above zero."""
    return isinstance(value, int | float) and math.isfinite(value) and value > 0


def measured_document(doc: Mapping[str, Any], result: Any, where: str) -> dict[str, Any]:
    """Return a prediction against the peak that a driver run reported.

    Raises:
      BenchError: not a trainer-bench/1 document, or one without a peak (a CPU reports none).
    """
    if not isinstance(result, dict) or not str(result.get("schema", "")).startswith("trainer-bench/"):
        raise BenchError("no trainer-bench document", where=where, todo="give the driver's --out")
    memory = result.get("memory")
    memory = memory if isinstance(memory, dict) else {}
    rows = memory.get("devices")
    rows = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    peaks = [row["peak_bytes"] for row in rows if _is_size(row.get("peak_bytes"))]
    limits = [row["limit_bytes"] for row in rows if _is_size(row.get("limit_bytes"))]
    peak = memory.get("peak_bytes_max") or max(peaks, default=None)
    if not _is_size(peak):
        raise BenchError("that run reported no peak memory", where=where, todo="give one that ran on a TPU")
    predicted = doc["peak_bytes"]
    return {"peak_bytes": peak, "limit_bytes": min(limits, default=None), "predicted_bytes": predicted,
            "predicted_over_measured": predicted / peak if predicted else None}  # fmt: skip


def measured_line(found: Mapping[str, Any]) -> str:
    """Return the comparison with a measured peak as a line."""
    ratio = found["predicted_over_measured"]
    return (f"measured peak {gib(found['peak_bytes'])}, predicted {gib(found['predicted_bytes'])}"
            + ("" if ratio is None else f": {ratio:.3f} of it"))  # fmt: skip


def compare(ours: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return two predictions side by side: totals by kernel, and what differs in slice, flags and config."""
    rows = []
    by_name = {kernel["name"]: kernel for kernel in other["kernels"]}
    names = [kernel["name"] for kernel in ours["kernels"]]
    for name in [*names, *(name for name in by_name if name not in names)]:
        mine = next((kernel for kernel in ours["kernels"] if kernel["name"] == name), {})
        theirs = by_name.get(name, {})
        row = {"name": name}
        for field in ("temp_bytes", "peak_bytes", "total_bytes"):
            this, that = mine.get(field), theirs.get(field)
            row[field] = {"this": this, "other": that, "difference": None if None in (this, that) else this - that}
        rows.append(row)
    config = _differences(ours.get("config") or None, other.get("config") or None)
    return {"kernels": rows, "topology": {"this": ours.get("topology"), "other": other.get("topology")},
            "flags": _differences(_flags(ours), _flags(other)), "config": config,
            "fits": {"this": ours["fits"], "other": other.get("fits")}}  # fmt: skip


def _flags(doc: Mapping[str, Any]) -> dict[str, str] | None:
    """Return a document's libtpu flags by name, by whichever way they reached the compiler; None: a log's."""
    flags = doc.get("flags")
    if not isinstance(flags, dict):
        return None
    options, words = flags.get("compiler_options"), flags.get("libtpu_init_args")
    pairs = [str(word).lstrip("-").partition("=") for word in (words if isinstance(words, list) else ())]
    return {**(options if isinstance(options, dict) else {}), **{name: value for name, _, value in pairs}}


def _differences(
    mine: Mapping[str, Any] | None, theirs: Mapping[str, Any] | None
) -> dict[str, dict[str, str | None]]:  # fmt: skip
    """Return the keys of two mappings that differ, masked; none where one of the two is not known at all."""
    if mine is None or theirs is None:
        return {}

    def shown(key: str, side: Mapping[str, Any]) -> str | None:
        return mask(key, str(side[key])) if key in side else None

    differing = sorted(key for key in {*mine, *theirs} if mine.get(key) != theirs.get(key))
    return {key: {"this": shown(key, mine), "other": shown(key, theirs)} for key in differing}


def compare_lines(found: Mapping[str, Any], style: str = "text") -> list[str]:
    """Return two predictions side by side as lines."""
    rows = []
    for kernel in found["kernels"]:
        for field in ("temp_bytes", "peak_bytes", "total_bytes"):
            cell = kernel[field]
            change = "?" if cell["difference"] is None else f"{cell['difference'] / GIB:+.3f}"
            rows.append(
                [f"{kernel['name']} {field.removesuffix('_bytes')}", _cell(cell["this"]), _cell(cell["other"]), change]
            )
    words = {True: "fits", False: "does not fit", None: "not known"}
    lines = ["", *_table(["GiB per JAX device", "this", "other", "change"], rows, style)]
    slices = found["topology"]
    changed = {"slice": slices} if slices["this"] != slices["other"] else {}
    for key, pair in {**changed, **found["flags"], **found["config"]}.items():
        other, this = ("absent" if side is None else side for side in (pair["other"], pair["this"]))
        lines.append(f"{key}: {other} -> {this}")
    return [*lines, f"this {words[found['fits']['this']]}, the other {words[found['fits']['other']]}"]


def beside_of_state(resident: Mapping[str, Any], kernels: Sequence[Kernel]) -> dict[str, list[Beside]]:
    """Return what stays on a device beside each kernel and is none of its arguments.

    The engine hands parameters and micro-batch to both forward/backwards, the accumulated gradients to the second and
    to the update, the whole train state to the update. One more micro-batch waits on the device, because the host runs
    ahead (max_inflight_computations is 2), and every other program's code stays loaded.
    """
    staged = Beside("one staged micro-batch", resident["micro_batch_bytes"])
    optimizer = Beside("optimizer state", resident["optimizer_bytes"])
    result = {"fwd_bwd": [optimizer, staged], "fwd_bwd_accum": [optimizer, staged], "update": [staged]}
    for name, items in result.items():
        code = sum(kernel.code_bytes or 0 for kernel in kernels if kernel.name != name)
        if code:
            items.append(Beside("code of the other kernels", code))
    return {name: [item for item in items if item.bytes] for name, items in result.items()}
