"""Read the log of somebody's ahead-of-time compile, or of a run that ran out of memory, without JAX.

    --- fwd_bwd ---                                        maxtext.training_engine.maxtext_engine_compile
    Cost analysis: {'flops': 3.55e12, 'bytes accessed': 1.2e11}
    Memory analysis: CompiledMemoryStats(generated_code_size_in_bytes=1642496, argument_size_in_bytes=...)
    Total memory size: 22.2 GB, Output size: 8.1 GB, Temp size: 14.0 GB, Argument size: 8.2 GB, Host temp size: 0.0 GB.

`read_log` returns the kernels in order, the topology of its `Config param` lines, and puts each shortage with the
kernel it names. A log without `--- name ---` lines is one of train_compile or train: its kernel is `train_step`.
Statistics have five fields (jaxlib to 0.4.30) or ten. Standard library only.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aot_buffers import short_path
from aot_memory import GIB, Beside, Kernel, find_shortages, plain_text, read_size, take_statistics
from bench_common import BenchError

ORDER = ("fwd_bwd", "fwd_bwd_accum", "update")  # in which MaxText's engine compiles, printing only when all are done

_HEADER = re.compile(r"^[^\n]{0,160}?--- (\w+) ---\s*$", re.MULTILINE)  # behind a prefix that plain_text leaves
_COST = re.compile(r"Cost analysis: (.*)")
_QUOTED = r"\"[^\"\n]*\"|'[^'\n]*'"
_MEMORY = re.compile(rf"CompiledMemoryStats\(((?:[^()\"']++|{_QUOTED}|\([^()]*\))*+)\)")
_FIELD = re.compile(rf"{_QUOTED}|(\w+)\s*=\s*(\d+)(?=\s*(?:,|$))")  # what is quoted is no field
_UNFORMED = re.compile(r"RESOURCE_EXHAUSTED\b[^\n]{0,200}?\b(?:memory|hbm|vmem|smem)\b[^\n]{0,400}", re.IGNORECASE)
_TOTAL = re.compile(r"Total (?:estimated )?memory size: [\d.]+ GB,[^\n]*")
_PART = re.compile(r"(Output|Temp|Argument|Host temp) size: ([\d.]+) GB")
_CONFIG = re.compile(r"Config param (\w+): (.*)")
_DRIVER = re.compile(r"program HBM usage: (\S+) / (\S+)")
_ALLOCATION = re.compile(
    r"^\s*\d+\. Size: (?P<size>\S+)\s*\n(?P<body>(?:(?!^\s*=====|^\s*\d+\. Size:)[^\n]*\n){1,12})", re.MULTILINE
)


@dataclass
class Log:
    """What a log tells of a compile."""

    kernels: list[Kernel] = field(default_factory=list)
    config: dict[str, str] = field(default_factory=dict)
    topology: str | None = None
    notes: list[str] = field(default_factory=list)


def read_log(text: str, source: str) -> Log:
    """Read a log, whatever loggers, kubectl and ray put in front of its lines.

    Raises:
      BenchError: it tells nothing of any kernel's memory.
    """
    text = plain_text(text)
    log = Log(config={match[1]: match[2].strip() for match in _CONFIG.finditer(text)})
    log.topology = log.config.get("compile_topology") or None
    text = _CONFIG.sub("", text)  # whatever a config holds, it is no statistics and no error
    for begin, end, name in _sections(text):
        part = text[begin:end]
        kernels = _kernels(part, name)
        log.kernels += kernels
        _add_shortages(part, log, None if kernels else name)
    if (driver := _DRIVER.search(text)) and log.kernels:
        log.notes.append(f"the driver's own report: program HBM usage {driver[1]} of {driver[2]}")
    if not log.kernels:
        raise BenchError("no memory analysis and no shortage of memory in this log", where=source,
                         todo="give what maxtext_engine_compile or train_compile printed, stderr too")  # fmt: skip
    return log


def _sections(text: str) -> list[tuple[int, int, str | None]]:
    """Return (begin, end, kernel name) of the parts of a log; the part before the first header has no name."""
    heads = [(match.start(), match[1]) for match in _HEADER.finditer(text)]
    edges = [0, *(start for start, _ in heads), len(text)]
    return list(zip(edges, edges[1:], [None, *(name for _, name in heads)], strict=False))


def _kernels(part: str, name: str | None) -> list[Kernel]:
    """Return the kernels of a part: one per memory statistics, or one of the printed sizes."""
    cost = [_cost(match[1]) for match in _COST.finditer(part)]
    kernels = []
    for index, match in enumerate(_MEMORY.finditer(part)):
        kernel = Kernel(name or ("train_step" if index == 0 else f"train_step {index + 1}"))
        take_statistics(kernel, {found[1]: int(found[2]) for found in _FIELD.finditer(match[1]) if found[1]})
        if index < len(cost):
            kernel.flops, kernel.bytes_accessed = cost[index].get("flops"), cost[index].get("bytes accessed")
        kernels.append(kernel)
    total = _TOTAL.search(part)
    if total and not kernels:
        sizes = {match[1]: round(float(match[2]) * GIB) for match in _PART.finditer(total[0])}
        kernel = Kernel(name or "train_step", argument_bytes=sizes.get("Argument"), output_bytes=sizes.get("Output"),
                        temp_bytes=sizes.get("Temp"), host_bytes=sizes.get("Host temp"))  # fmt: skip
        stated = float(re.search(r"size: ([\d.]+)", total[0])[1]) * GIB
        if None not in (kernel.argument_bytes, kernel.output_bytes, kernel.temp_bytes):
            rest = kernel.argument_bytes + kernel.output_bytes + kernel.temp_bytes - stated
            kernel.alias_bytes = max(0, round(rest))  # the log prints only the sum, and rounds each size to 0.1
        kernel.notes.append("sizes as the log rounds them, to 0.1 GiB each")
        kernels.append(kernel)
    return kernels


def _cost(text: str) -> Mapping[str, Any]:
    """Return the cost dict of a line, a dict or a list of one; {} where it is neither."""
    plain = re.sub(r"(?<![\w'\"])(-?inf|nan)(?![\w'\"])", "None", text.strip())
    try:
        value = ast.literal_eval(plain)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return {}
    value = value[0] if isinstance(value, list) and value else value
    return value if isinstance(value, dict) else {}


def _add_shortages(part: str, log: Log, name: str | None) -> None:
    """Put what ran out of memory in a part of a log with the kernel it names, else the one of that name."""
    shortages = find_shortages(part)
    unformed = None if shortages else _UNFORMED.search(part)
    if not shortages and unformed is None:
        return
    known = {kernel.name: kernel for kernel in log.kernels}

    def out_of_memory(shortage_of: str | None) -> Kernel:
        kernel_name = shortage_of or name or _unnamed(known)
        if kernel_name not in known:
            known[kernel_name] = Kernel(kernel_name)
            log.kernels.append(known[kernel_name])
        known[kernel_name].status = "out of memory"
        return known[kernel_name]

    for shortage in shortages:
        kernel = out_of_memory(shortage.kernel)
        if shortage not in kernel.shortages:
            kernel.shortages.append(shortage)
        kernel.buffers = kernel.buffers or reported_allocations(part)
    if unformed is not None:
        out_of_memory(None).error = unformed[0].strip()


def _unnamed(known: Mapping[str, Kernel]) -> str:
    """Return the kernel a shortage without a module name belongs to, as far as the order of compiles tells."""
    ours = [name for name in ORDER if name in known]
    return "unnamed kernel" if not ours or len(ours) == len(ORDER) else ORDER[len(ours)]


def reported_allocations(text: str) -> list[dict[str, Any]]:
    """Return the compiler's own "Largest program allocations in hbm" of an out-of-memory message."""
    begin = text.find("Largest program allocations in hbm")
    rows = []
    for match in _ALLOCATION.finditer(text, begin) if begin >= 0 else ():
        body = match["body"]

        def take(pattern: str, body: str = body) -> str | None:
            found = re.search(pattern, body)
            return found[1] if found else None

        shape = re.search(r"Shape: ([a-z]\w*)\[([\d,]*)\]", body)
        file, line = take(r'source_file="([^"]*)"'), take(r"source_line=(\d+)")
        label = take(r"XLA label: (?:%)?([^\s=]+)")
        rows.append({
            "name": label or take(r"Allocation type: ([^\n]+)") or "?", "bytes": read_size(match["size"]),
            "dtype": shape[1] if shape else None,
            "dims": [int(part) for part in shape[2].split(",") if part] if shape else None,
            "kind": (take(r"Allocation type: ([^\n]+)") or "unknown").strip(), "op_name": take(r'op_name="([^"]*)"'),
            "source": short_path(f"{file}:{line}") if file else None,
        })  # fmt: skip
    return rows


def beside_of_log(kernels: Sequence[Kernel]) -> dict[str, list[Beside]]:
    """Return what a log's own kernels tell of each other's residents, lower bounds.

    `update` gives its whole state back in place, so its aliased bytes are the train state; a forward/backward holds
    the part of it that is none of its arguments.
    """
    sizes = {kernel.name: kernel for kernel in kernels if kernel.status == "compiled"}
    update = sizes.get("update")
    if update is None or not update.alias_bytes:
        return {}
    beside = {}
    for name in ("fwd_bwd", "fwd_bwd_accum"):
        kernel = sizes.get(name)
        if kernel is None or kernel.argument_bytes is None:
            continue
        accumulated = kernel.alias_bytes or 0  # the accumulator is donated: not part of the state
        outside = update.alias_bytes - (kernel.argument_bytes - accumulated)
        if outside > 0:
            beside[name] = [Beside("optimizer state", outside, at_least=True)]
    return beside
