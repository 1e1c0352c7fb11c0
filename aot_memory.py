"""What a compiled kernel needs of a TPU's memory, and whether that fits: statistics, capacities, shortages.

A `Kernel` holds what the compiler said about one program, per JAX device and in bytes: arguments, outputs, what
of both is one buffer (aliased), temporaries, code, and its peak where it told one. `verdict` adds what stays
resident beside the kernel and compares with what a device can hold. `find_shortages` reads the forms in which
XLA, libtpu and the TPU runtime say that memory ran out, and tells HBM, vmem, smem and SparseCore apart.
Standard library only; sizes in texts are binary (`94.74G` is 94.74 x 2^30 bytes).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

GIB = 2**30
KERNELS = ("update", "fwd_bwd", "fwd_bwd_accum")  # MaxText's engine has these three; here cheapest to compile first


class Capacity(NamedTuple):
    """What a JAX device of a TPU type can hold, as the compiler counts: HBM less what the runtime keeps."""

    usable_gib: float  # per JAX device
    devices_per_chip: int
    source: str


# The limits that compile errors name: published ones, and libtpu 0.0.52's own of each type, provoked by asking for
# 384 GiB (tests/data/aot/oom_by_type.log). They agree but for 0.01 GiB of v6e and v5p; other versions name 15.75 of v3.
CAPACITIES = {  # by the prefix of MaxText's compile_topology names; devices per chip from jax/_src/tpu_info.py
    "tpu7x": Capacity(94.74, 2, "libtpu 0.0.52's limit; the chip has 192 GiB (cloud.google.com/tpu/docs/tpu7x)"),
    "v6e": Capacity(
        31.25, 1, "compile errors (libtpu 0.0.52: 31.24); the chip has 32 GiB (cloud.google.com/tpu/docs/v6e)"
    ),
    "v5p": Capacity(
        95.74, 1, "compile errors (libtpu 0.0.52: 95.73); the chip has 95 GB (cloud.google.com/tpu/docs/v5p)"
    ),
    "v5e": Capacity(15.75, 1, "libtpu 0.0.52's limit; the chip has 16 GiB (cloud.google.com/tpu/docs/v5e)"),
    "v4": Capacity(30.75, 1, "libtpu 0.0.52's limit; the chip has 32 GiB (cloud.google.com/tpu/docs/v4)"),
    "v3": Capacity(15.48, 2, "libtpu 0.0.52's limit; the chip has 32 GiB (cloud.google.com/tpu/docs/v3)"),
    "v2": Capacity(7.48, 2, "libtpu 0.0.52's limit; the chip has 16 GiB (cloud.google.com/tpu/docs/v2)"),
}
_OTHER_NAMES = {"v5": "v5p", "v5litepod": "v5e", "v5lite": "v5e", "7x": "tpu7x", "v7x": "tpu7x"}


def capacity_of(topology: str) -> Capacity | None:
    """Return the capacity of a slice by its type; None for an unknown one.

    Args:
      topology: MaxText's `tpu7x-256`, a launcher's `tpuv5e:2x2`, an accelerator type such as `v5litepod-8`.
    """
    kind = re.split("[-:]", topology.strip().lower())[0]
    kind = kind if kind in CAPACITIES else kind.removeprefix("tpu")
    return CAPACITIES.get(_OTHER_NAMES.get(kind, kind))


# --- shortages: memory that ran out -----------------------------------------------------------------


@dataclass(frozen=True)
class Shortage:
    """One "out of memory" of the compiler or the runtime; bytes per device, None where it does not say."""

    space: str  # HBM, vmem, smem, SparseCore (its part of HBM), SparseCore spmem, host, or as the text names it
    when: str  # "compile" or "run"
    what: str | None  # what was too large, in the compiler's words
    needed_bytes: int | None
    available_bytes: int | None
    over_bytes: int | None
    module: str | None = None  # jit_fwd_bwd

    @property
    def kernel(self) -> str | None:
        """The kernel of a module name, without `jit_`."""
        return self.module.removeprefix("jit_") if self.module else None


_UNITS = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"(?P<{}>\d[\d.,]*\s?(?:[KMGT]i?B?|B|bytes)?|unknown size)"


def read_size(text: str | None) -> int | None:
    """Return the bytes of `63.80G`, `420.0K`, `0B`, `68719476736`, `1.5 GiB`; None for `unknown size` or nothing."""
    match = re.fullmatch(r"(\d[\d.,]*?)\s?(?:bytes|([KMGT]?)i?B?)", (text or "").strip())
    if match is None:
        return None
    try:
        return round(float(match[1].replace(",", "")) * _UNITS[match[2] or ""])
    except (ValueError, OverflowError):  # a number of hundreds of digits is no size
        return None


def _sizes(template: str, *names: str) -> re.Pattern[str]:
    """Compile a pattern in which `%s` stands for a size and any blank for blanks and line breaks."""
    for name in names:
        template = template.replace("%s", _SIZE.format(name), 1)
    return re.compile(template.replace(" ", r"\s+"), re.IGNORECASE)


# Sample lines that the patterns must match, by the letter of the form in the facts file of this project:
#  a  Ran out of memory in memory space hbm. Used 33.27G of 30.75G hbm. Exceeded hbm capacity by 2.52G.
#  b  Ran out of memory on HBM, the total memory required for HLO temporaries (635.83G) exceeds available HBM (94.74G).
#  c  Allocation (size=103079215104) would exceed memory (size=34359738368) :: #allocation3 [...] space=vmem
#  d  TPU TensorCore Hbm usage: 34.82G, SparseCore Hbm usage 174.10G, exceeding available bytes: 95.74G
#  e  Attempting to reserve 2.25G at the bottom of memory. ... There are 1.94G free, 0B reserved, and 1.94G reservable.
#     Attempting to allocate 129.50M. That was not possible. There are 78.17M free.
#  f  Ran out of memory in memory space vmem. ... Scoped allocation with size 24.00M and limit 16.00M exceeded scoped
#     vmem limit by 8.00M
_FORMS: tuple[tuple[str, str, re.Pattern[str]], ...] = (
    ("scoped", "compile", _sizes(
        r"Scoped allocation with size %s and limit %s exceeded scoped (?P<space>\w+) limit(?: by %s)?",
        "needed", "available", "over")),
    ("used", "compile", _sizes(
        r"Ran out of memory in memory space (?P<space>\w+)[^\n]{0,200}?\.? Used %s of %s \w+\."
        r"(?: Exceeded \w+ capacity by %s)?", "needed", "available", "over")),
    ("total", "compile", _sizes(
        r"Ran out of memory on (?P<space>\w+)[^(]{0,60}memory required for (?P<what>[^(]{1,80}?) \(%s\) exceeds "
        r"available \w+ \(%s\)", "needed", "available")),
    ("total", "compile", _sizes(
        r"(?P<what>HLO temporaries|program|arguments|outputs) \(%s\) exceeds available (?P<space>\w+) \(%s\)",
        "needed", "available")),
    ("sparse", "compile", _sizes(
        r"TensorCore Hbm usage:? %s, SparseCore Hbm usage:? %s, exceeding available bytes:? %s",
        "tensor", "sparse", "available")),
    ("allocation", "compile", _sizes(
        r"Allocation \(size=%s\) would exceed memory \(size=%s\)(?P<rest>[\s\S]{0,300})", "needed", "available")),
    ("reserve", "run", _sizes(
        r"Attempting to (?:reserve|allocate) %s\b[\s\S]{0,200}?There are %s free(?:, %s reserved, and %s reservable)?",
        "needed", "available", "reserved", "reservable")),
)  # fmt: skip
_MODULE = re.compile(r"HLO\s+module:?\s+([\w.-]+?)(?:\.cl_\d+)?[\s.,]", re.IGNORECASE)
_ANY = re.compile(r"xceed|ttempting\s|Used\s")  # one of these is in every form
_ESCAPE = re.compile(r"\x1b\[[\d;]*[A-Za-z]")  # colours of a terminal
_PREFIX = re.compile(  # what stands in front of a line, any number of them
    r"^(?:\[(?:pod|container)/[^\]\n]{1,200}\] ?"  # kubectl logs --prefix
    r"|\d{4}-\d\d-\d\d[T ][\d:.,]{5,20}(?:Z|[+-]\d\d:?\d\d)?:? ?"  # kubectl logs --timestamps, TensorFlow
    r"|\([^()\n]{1,60}pid=\d+[^()\n]{0,60}\) ?"  # ray
    r"|[DEFIW](?:\d{4} [\d:.]+ +\d+)? [\w./-]+:\d+\] ?"  # glog, TensorFlow
    r"|(?:DEBUG|INFO|WARNING|ERROR|CRITICAL):[\w.]+: ?)+", re.MULTILINE)  # Python's logging  # fmt: skip
_SPACES = {  # as the texts name it -> here; spmem and tilespmem are memories of the SparseCore
    "hbm": "HBM", "vmem": "vmem", "smem": "smem", "cmem": "cmem", "sflag": "sync flags", "host": "host",
    "spmem": "SparseCore spmem", "tilespmem": "SparseCore tilespmem", "tile_spmem": "SparseCore tilespmem",
}  # fmt: skip


def plain_text(log: str) -> str:
    """Return a log without colours, carriage returns and what loggers, kubectl and ray put in front of its lines."""
    return _PREFIX.sub("", _ESCAPE.sub("", log).replace("\r\n", "\n"))


def find_shortages(text: str) -> list[Shortage]:
    """Return every "out of memory" in a text, in order, one for each place.

    What plain_text takes off is passed over, and a message may be broken at any blank. The same shortage told twice
    (once by the compiler, once by Python) counts once.
    """
    if not _ANY.search(text):
        return []
    plain = plain_text(text)
    found: dict[int, Shortage] = {}
    taken: list[tuple[int, int]] = []
    for form, when, pattern in _FORMS:
        for match in pattern.finditer(plain):
            if any(begin < match.end() and match.start() < end for begin, end in taken):
                continue
            taken.append(match.span())
            found[match.start()] = _shortage(form, when, match, plain)
    unique: list[Shortage] = []
    for _, one in sorted(found.items()):
        if not any(one.space == other.space and one.needed_bytes == other.needed_bytes
                   and one.available_bytes == other.available_bytes
                   and one.module in (None, other.module) for other in unique):  # fmt: skip
            unique.append(one)
    return unique


def _shortage(form: str, when: str, match: re.Match[str], text: str) -> Shortage:
    parts = match.groupdict()
    needed, available = read_size(parts.get("needed")), read_size(parts.get("available"))
    space, what = _space(parts.get("space") or "hbm"), parts.get("what")
    if form == "sparse":
        tensor, sparse = read_size(parts["tensor"]), read_size(parts["sparse"])
        needed = None if tensor is None or sparse is None else tensor + sparse
        larger = tensor is not None and sparse is not None and sparse > tensor
        space, what = (
            "SparseCore" if larger else "HBM",
            f"TensorCore {parts['tensor']} and SparseCore {parts['sparse']}",
        )
    elif form == "allocation":
        named = re.search(r"(?:space=|memory space )(\w+)", parts["rest"])
        space = _space(named[1]) if named else "vmem or smem"
        what = "one allocation"
    elif form == "scoped":
        what = "scoped allocation of a kernel"
    elif form == "reserve":
        what = "one allocation at run time"
        available = read_size(parts.get("reservable")) or available
    over = read_size(parts.get("over"))
    if over is None and needed is not None and available is not None:
        over = needed - available
    nearby = _MODULE.search(text, match.end(), match.end() + 400) or None
    return Shortage(space, when, " ".join(what.split()) if what else None, needed, available, over,
                    nearby[1] if nearby else None)  # fmt: skip


def _space(name: str) -> str:
    return _SPACES.get(name.lower(), name)


# --- kernels ------------------------------------------------------------------------------------


@dataclass
class Kernel:
    """One program: what its compile told. Bytes are per JAX device, padded and tiled as the device holds them."""

    name: str
    status: str = "compiled"  # or: lowered, out of memory, failed
    compile_seconds: float | None = None
    argument_bytes: int | None = None
    output_bytes: int | None = None
    alias_bytes: int | None = None
    temp_bytes: int | None = None
    code_bytes: int | None = None
    # peak_memory_in_bytes of jaxlib from 0.5, never in the printed statistics. What libtpu 0.0.52 keeps in vmem counts
    # (up to 112 MiB on v5e: gone with xla_tpu_scoped_vmem_limit_kib=131072), holes between temporaries do not.
    told_peak_bytes: int | None = None
    host_bytes: int | None = None  # all host_* fields together: what was offloaded
    flops: float | None = None
    bytes_accessed: float | None = None
    shortages: list[Shortage] = field(default_factory=list)
    error: str | None = None
    buffers: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)  # what only a compile of ours knows: lowering, HLO file

    @property
    def formula_bytes(self) -> int | None:
        """argument + output - alias + temp; None where one is unknown."""
        parts = (self.argument_bytes, self.output_bytes, self.alias_bytes, self.temp_bytes)
        return None if None in parts else parts[0] + parts[1] - parts[2] + parts[3]

    @property
    def peak_bytes(self) -> int | None:
        """The compiler's own peak where it told one, else the sum by formula."""
        return self.formula_bytes if self.told_peak_bytes is None else self.told_peak_bytes

    @property
    def peak_source(self) -> str | None:
        """Where peak_bytes comes from."""
        if self.told_peak_bytes is not None:
            return "compiler"
        return None if self.peak_bytes is None else "argument + output - alias + temp"


_STATISTICS = {  # field of CompiledMemoryStats, without `_size_in_bytes` -> ours
    "argument": "argument_bytes", "output": "output_bytes", "alias": "alias_bytes", "temp": "temp_bytes",
    "generated_code": "code_bytes",
}  # fmt: skip


def take_statistics(kernel: Kernel, statistics: Mapping[str, int]) -> None:
    """Fill a kernel from the fields of a CompiledMemoryStats, five or ten of them.

    Nothing but zeros is a backend that does not tell (GPU, jaxlib 0.4.20): unknown, not a kernel without memory.
    """
    if not any(statistics.values()):
        return
    for name, ours in _STATISTICS.items():
        setattr(kernel, ours, statistics.get(f"{name}_size_in_bytes"))
    host = [value for name, value in statistics.items() if name.startswith("host_") and "alias" not in name]
    kernel.host_bytes = sum(host) if host else None
    kernel.told_peak_bytes = statistics.get("peak_memory_in_bytes") or None  # 0 where the backend does not tell


# --- the verdict ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Beside:
    """Something that stays on the device while a kernel runs and is none of its arguments."""

    name: str
    bytes: int
    at_least: bool = False  # a lower bound, all that a log tells


@dataclass
class Total:
    """A kernel and what stays beside it, against the capacity."""

    kernel: Kernel
    beside: list[Beside]
    total_bytes: int | None
    headroom_bytes: int | None
    fits: bool | None


@dataclass
class Verdict:
    """Whether a program fits, and by how much."""

    totals: list[Total]
    peak: Total | None  # the kernel that needs most
    capacity_bytes: int | None  # usable HBM per JAX device, reserve not yet taken off
    reserve_bytes: int
    fits: bool | None  # None: not known, because a kernel or the capacity is missing
    reasons: list[str]


def verdict(
    kernels: Sequence[Kernel], beside: Mapping[str, Sequence[Beside]], capacity_bytes: int | None,
    reserve_bytes: int = 0,
) -> Verdict:  # fmt: skip
    """Decide whether every kernel fits beside what stays resident.

    Args:
      kernels: compiled, lowered, failed or out of memory.
      beside: for each kernel's name what stays on the device and is none of its arguments.
      capacity_bytes: usable HBM of a JAX device; None where it is not known.
      reserve_bytes: kept free for what is not modelled (the runtime, fragmentation).

    Returns:
      fits False as soon as one kernel is known not to fit; True when every kernel is compiled and fits; else None.
    """
    limit = None if capacity_bytes is None else capacity_bytes - reserve_bytes
    totals = [_total(kernel, list(beside.get(kernel.name, ())), limit) for kernel in kernels]
    known = [total for total in totals if total.total_bytes is not None]
    peak = max(known, key=lambda total: total.total_bytes, default=None)
    reasons = [reason for total in totals for reason in _reasons(total, limit)]
    if any(total.fits is False for total in totals):
        fits = False
    else:
        fits = True if totals and all(total.fits for total in totals) else None
    return Verdict(totals, peak, capacity_bytes, reserve_bytes, fits, reasons)


def _total(kernel: Kernel, beside: list[Beside], limit: int | None) -> Total:
    own = kernel.peak_bytes
    if own is None and kernel.status == "lowered" and kernel.argument_bytes is not None:
        own = kernel.argument_bytes  # a lower bound: outputs and temporaries are known only after a compile
    if own is None and kernel.status == "out of memory":
        own = wanted_bytes(kernel)
        beside = []
    total = None if own is None else own + (kernel.code_bytes or 0) + sum(item.bytes for item in beside)
    headroom = None if total is None or limit is None else limit - total
    fits = None if headroom is None else headroom >= 0
    if fits and kernel.status != "compiled":
        fits = None
    if kernel.status == "out of memory":
        fits = False
    return Total(kernel, beside, total, headroom, fits)


def wanted_bytes(kernel: Kernel) -> int | None:
    """Return how much HBM the compiler said a kernel wants, a lower bound of what it needs; None where it did not."""
    told = [
        one.needed_bytes for one in kernel.shortages if one.when == "compile" and one.space in ("HBM", "SparseCore")
    ]
    return max((needed for needed in told if needed is not None), default=None)


def _reasons(total: Total, limit: int | None) -> list[str]:
    kernel, lines = total.kernel, []
    for one in kernel.shortages:
        unit = one.available_bytes  # one unit for all three
        needed = "an unknown size" if one.needed_bytes is None else gib(one.needed_bytes, unit)
        of = "" if one.available_bytes is None else f" of {gib(one.available_bytes, unit)}"
        over = "" if one.over_bytes is None else f", {gib(one.over_bytes, unit)} too much"
        what = f" for {one.what}" if one.what else ""
        lines.append(f"{kernel.name}: out of {one.space} at {one.when} time: wants {needed}{of}{what}{over}")
    if kernel.status == "out of memory" and not kernel.shortages:
        lines.append(f"{kernel.name}: out of memory: {kernel.error}")
    if kernel.status == "failed":
        lines.append(f"{kernel.name}: not known, {kernel.error}")
    if kernel.status == "compiled" and total.total_bytes is None:
        lines.append(f"{kernel.name}: not known, its memory statistics are not complete")
    if total.fits is False and not kernel.shortages and total.headroom_bytes is not None and total.headroom_bytes < 0:
        lines.append(f"{kernel.name}: {gib(total.total_bytes)} needed, {gib(limit)} usable, "
                     f"{gib(-total.headroom_bytes)} too much")  # fmt: skip
    formula = kernel.formula_bytes
    if total.fits is not None and kernel.told_peak_bytes is not None and formula is not None and limit is not None:
        by_sum = total.total_bytes - kernel.told_peak_bytes + formula
        if total.fits and by_sum > limit:
            lines.append(f"{kernel.name}: in doubt: the compiler's peak fits, its buffers add up to {gib(by_sum)}")
        elif not total.fits and by_sum <= limit:
            lines.append(f"{kernel.name}: in doubt: the compiler's peak counts vmem too, the HBM buffers add up to "
                         f"{gib(by_sum)}, and that fits")  # fmt: skip
    return lines


def gib(count: int | float | None, like: int | float | None = None) -> str:
    """Return bytes as text in GiB, MiB, KiB or B, three significant digits or more; `?` for unknown.

    Args:
      count: bytes.
      like: another size, in whose unit to tell this one.
    """
    if count is None:
        return "?"
    for unit, size in (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(like or count) >= size / 10:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} B"
