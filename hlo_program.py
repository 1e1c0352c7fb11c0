"""What the computations of an HLO module contain: work that can hide a transfer, collectives, loops.

`Program` answers for one instruction or one computation, and remembers: what it calls, how much work it
holds (matrix products, kernels of unknown length, data movement and elementwise), which collectives run
inside it, how often a loop runs; and for a scheduled computation the work by position and by thread.
What something is, is decided by opcodes and by what fusions and calls contain. Standard library only.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

import hlo_shapes
import hlo_text
from bench_common import BenchError
from hlo_text import Computation, Module
from hlo_trips import PASS_ON, TripReader

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "collective-reduce",
    "ragged-all-to-all",
    "recv",
    "reduce-scatter",
    "send",
)

# Neither time nor work: the four of XLA's ConvertAsyncCollectivesToSync, and others that only name values.
NO_WORK = frozenset(
    "parameter constant bitcast get-tuple-element tuple after-all partition-id replica-id opt-barrier "
    "optimization-barrier add-dependency domain".split()
)
MOVES = frozenset("copy slice dynamic-slice dynamic-update-slice concatenate pad reshape transpose".split())
_MATMULS = frozenset("convolution dot ragged-dot scaled-dot".split())
# Data movement and elementwise (XLA, hlo_opcode.h). What is in no list, such as fft, cholesky, triangular-solve or an
# opcode newer than this one, is a kernel of unknown length.
_LIGHT = MOVES | frozenset(
    "abs acos acosh add and asin asinh atan2 atanh batch-norm-grad batch-norm-inference batch-norm-training "
    "bitcast-convert broadcast cbrt ceil clamp compare complex convert cosh cosine count-leading-zeros divide "
    "dynamic-reshape erf exp2 exponential exponential-minus-one floor gather get-dimension-size imag infeed iota "
    "is-finite log log-plus-one log2 logistic map maximum minimum mulhi multiply negate not or outfeed popcnt power "
    "real reduce reduce-precision reduce-window remainder reverse rng rng-bit-generator rng-get-and-update-state "
    "round-nearest-afz round-nearest-even rsqrt scatter select select-and-scatter set-dimension-size shift-left "
    "shift-right-arithmetic shift-right-logical shuffle sign sine sinh sort sqrt stochastic-convert subtract tan tanh "
    "topk xor".split()
)
# Custom calls that do nothing at run time (seen in TPU modules), and matrix products by library.
EMPTY_TARGETS = frozenset(
    "AllocateBuffer AssumeGatherIndicesInBound AsyncCollectiveDone AsyncCollectiveStart ConcatBitcast "
    "LayoutConstraint SPMDFullToShardShape "
    "SPMDShardToFullShape Sharding annotate_device_placement".split()
)
_HALVES = {"AsyncCollectiveStart": "start", "AsyncCollectiveDone": "done"}
_MATMUL_TARGETS = re.compile(r"__cublas\$|__cudnn\$conv|__onednn\$matmul|__triton_gemm")
TARGET = re.compile(r'custom_call_target="([^"]*)"')
_KNOWN_TRIPS = re.compile(r'"known_trip_count"\s*:\s*\{\s*"n"\s*:\s*"?(\d{1,18})\b')
_THREAD = re.compile(r'async_execution_thread="([^"]*)"')
_CALLEE = re.compile(r", (calls|to_apply|body|condition|called_computations)=\{?%?([^\s,{}]+)(?=[,}\s]|$)")
_CUSTOM_CALL_KEYS = ("called_computations=", "calls=", "to_apply=")
MAX_COUNT = 1 << 100  # more executions, bytes or operations than that are nonsense
_MAX_DEPTH = 150  # of computations inside computations; real modules stay under 20
MAX_HOPS = 64  # from a done back to its start; real ones need a tuple element, a fusion or two and an update


class Cover(NamedTuple):
    """Work: how many instructions of each sort, and the FLOPs of the matrix products."""

    matmuls: int = 0
    kernels: int = 0  # custom calls and library routines of unknown length
    light: int = 0  # data movement and elementwise
    flops: int = 0
    no_flops: int = 0  # matrix products and kernels whose FLOPs the text does not tell

    def plus(self, other: Cover) -> Cover:
        if other is NOTHING:
            return self
        a, b, c, d, e = self
        f, g, h, i, j = other
        return Cover(a + f, b + g, c + h, d + i, e + j)

    def times(self, count: int) -> Cover:
        return Cover(*(min(value * count, MAX_COUNT) for value in self))


NOTHING = Cover()


@cache
def _light(count: int) -> Cover:
    """Return the cover of so many light instructions: most fusions hold nothing else, and the same few numbers."""
    return Cover(light=count)


def _rank(cover: Cover) -> tuple[int, int, int]:
    """Order covers by what they hide: products and kernels before light work, FLOPs last."""
    return cover.matmuls + cover.kernels, cover.light, cover.flops


class Times(NamedTuple):
    """How often, or how much, per step: at least `low`, at most `high`; high None is unknown."""

    low: int
    high: int | None

    def times(self, other: Times) -> Times:
        if other is ONCE:
            return self
        if 0 in (self.high, other.high):
            return NEVER
        high = None if self.high is None or other.high is None else self.high * other.high
        return _sane(self.low * other.low, high)

    def plus(self, other: Times) -> Times:
        if self is NEVER:
            return other
        high = None if self.high is None or other.high is None else self.high + other.high
        return _sane(self.low + other.low, high)


def _sane(low: int, high: int | None) -> Times:
    """Numbers no machine reaches come from broken text: they are unknown."""
    if high is not None and low <= high <= MAX_COUNT:
        return Times(low, high)
    return Times(min(low, MAX_COUNT), None if high is None or high > MAX_COUNT else high)


ONCE, NEVER, UNKNOWN = Times(1, 1), Times(0, 0), Times(0, None)


class Segment(NamedTuple):
    """A stretch of one computation: the instructions strictly between two positions."""

    computation: Computation
    after: int
    before: int


_CALLERS = frozenset("fusion call async custom-call while conditional".split())


class _Sorts(dict):
    """What an opcode is to this tool: "none", "collective", "matmul", "kernel", "caller" or "light".

    A start is what it starts; dones and updates are "none", and so is whatever only names values.
    """

    def __missing__(self, opcode: str) -> str:
        base = opcode.removesuffix("-start")
        if opcode in NO_WORK or opcode.endswith(("-done", "-update")):
            sort = "none"
        elif collective_base(opcode):
            sort = "collective"
        elif base in _MATMULS:
            sort = "matmul"
        elif base in _CALLERS:
            sort = "caller"
        else:
            sort = "light" if base in _LIGHT else "kernel"
        self[opcode] = sort
        return sort


class _Ends(dict):
    """The part of an asynchronous operation that an opcode names: "start", "update", "done" or ""."""

    def __missing__(self, opcode: str) -> str:
        end = opcode.rpartition("-")[2]
        self[opcode] = end if end in ("start", "update", "done") else ""
        return self[opcode]


SORT = _Sorts()
END = _Ends()
_FIXED_COVER = {
    "none": NOTHING,
    "collective": NOTHING,
    "kernel": Cover(kernels=1, no_flops=1),
    "light": Cover(light=1),
}


def collective_base(opcode: str) -> str | None:
    """Return the kind of a collective opcode, plain or `-start`; None for anything else and for dones."""
    base = opcode[:-6] if opcode.endswith("-start") else opcode
    return base if base in COLLECTIVES else None


class Prefix:
    """Sums of Cover over positions of a computation, so that a window costs a look-up."""

    def __init__(self) -> None:
        self.positions: list[int] = []
        self.sums: list[Cover] = [NOTHING]

    def add(self, position: int, cover: Cover) -> None:
        self.positions.append(position)
        self.sums.append(self.sums[-1].plus(cover))

    def upto(self, position: int) -> Cover:
        """Return the sum over positions below `position`."""
        return self.sums[bisect.bisect_left(self.positions, position)]

    def between(self, after: int, before: int) -> Cover:
        """Return the sum over positions strictly between the two."""
        a, b, c, d, e = self.upto(after + 1)
        f, g, h, i, j = self.upto(before)
        return Cover(f - a, g - b, h - c, i - d, j - e)


def count_inside(positions: list[int], segment: Segment) -> int:
    """Return how many of the sorted positions lie in a segment."""
    return max(0, bisect.bisect_left(positions, segment.before) - bisect.bisect_right(positions, segment.after))


class Track:
    """The work of one scheduled computation by position, and by thread for what runs asynchronously."""

    def __init__(self) -> None:
        self.main = Prefix()  # all but the light instructions, whose positions are enough
        self.light: list[int] = []
        self.started: dict[str, Prefix] = {}
        self.running: dict[str, Prefix] = {}
        self.opcodes: dict[str, list[int]] = {}
        self.busy: list[int] = []  # positions of what is not plumbing

    def window(self, segment: Segment, thread: str) -> tuple[Cover, int]:
        """Return the work inside a segment for a collective on `thread`, and the instructions inside.

        Work on other threads counts when it starts inside or is still running at the beginning; work on
        the collective's own thread waits for it and counts for nothing.
        """
        cover = self.own(segment)
        for name, prefix in self.started.items():
            if name and name == thread:
                continue
            cover = cover.plus(prefix.between(segment.after, segment.before))
            cover = cover.plus(self.running[name].upto(segment.after))
        return cover, count_inside(self.busy, segment)

    def own(self, segment: Segment) -> Cover:
        """Return the work of the main thread inside a segment."""
        light = count_inside(self.light, segment)
        return self.main.between(segment.after, segment.before).plus(Cover(light=light))

    def histogram(self, segment: Segment) -> dict[str, int]:
        """Return how many instructions of each opcode lie in a segment, plumbing left out."""
        found = {}
        for opcode, positions in self.opcodes.items():
            count = count_inside(positions, segment)
            if count:
                found[opcode] = count
        return found


class Digest(NamedTuple):
    """The light instructions of a computation by number, the others by position."""

    light: int
    work: list[int]  # matrix products, kernels, and what calls computations
    moves: list[int]  # collectives, and what calls computations


class Program:
    """A module with what has been found out about its computations so far."""

    def __init__(self, module: Module, assume_trips: int | None = None):
        self.module = module
        self.assume_trips = assume_trips
        self.callers: dict[int, tuple[Computation, int]] = {}  # id of a computation -> who calls it (one of them)
        self._called: dict[tuple[int, int], dict[str, list[Computation]]] = {}
        self._digests: dict[int, Digest] = {}
        self._inside: dict[int, Cover] = {}
        self._collectives: dict[int, list[tuple[Computation, int, Times]]] = {}
        self._trips: dict[tuple[int, int], int | None] = {}
        self._tracks: dict[int, Track] = {}
        self._dones: dict[int, dict[int, int]] = {}
        self._halves: dict[int, str | None] = {}
        self._depth = 0

    # --- what an instruction calls and contains ---

    def called(self, computation: Computation, at: int) -> dict[str, list[Computation]]:
        key = (id(computation), at)
        found = self._called.get(key)
        if found is None:
            found = self._called[key] = self._plainly_called(computation, at)
            if found is None:
                found = self._called[key] = hlo_text.called(computation, at, self.module)
        return found

    def _plainly_called(self, computation: Computation, at: int) -> dict[str, list[Computation]] | None:
        """Return what an instruction names, without taking its attributes apart; None where that needs care."""
        text, opcode = computation.texts[at], computation.opcodes[at]
        if opcode == "custom-call" and not any(key in text for key in _CUSTOM_CALL_KEYS):
            return {}
        if opcode == "conditional":
            return None
        found: dict[str, list[Computation]] = {}
        for match in _CALLEE.finditer(text):
            place = match.start()
            if text.count('"', 0, place) % 2:
                continue  # inside a quoted string
            if text.find("\\", 0, place) >= 0 or match[2] not in self.module.by_name:
                return None
            found[match[1]] = [self.module.by_name[match[2]]]
            if opcode != "while" or len(found) == 2:
                break
        return found or None

    def bodies(self, computation: Computation, at: int) -> list[Computation]:
        """Return the computations that instruction `at` runs: what it calls, but no loop condition or reducer."""
        found = computation.known_bodies.get(at)
        if found is None:
            found = computation.known_bodies[at] = self._read_bodies(computation, at)
        return found

    def _read_bodies(self, computation: Computation, at: int) -> list[Computation]:
        opcode = computation.opcodes[at]
        if opcode == "fusion":  # most of all: XLA prints its callee before anything quoted
            text = computation.texts[at]
            place = text.find(", calls=%")
            if place >= 0 and text.find('"', 0, place) < 0:
                callee = self.module.by_name.get(text[place + len(", calls=%") :].partition(",")[0])
                if callee is not None:
                    return [callee]
        found = self.called(computation, at)
        if opcode == "while":
            return found.get("body", [])
        if opcode == "conditional":
            keys = ("branch_computations", "true_computation", "false_computation")
            return [branch for key in keys for branch in found.get(key, [])]
        if opcode == "call" or opcode in ("call-start", "async-start"):
            return [*found.get("to_apply", []), *found.get("calls", [])]
        return [*found.get("calls", []), *found.get("called_computations", [])]

    def _descend(self) -> None:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise BenchError(
                f"computations call each other in a circle, or deeper than {_MAX_DEPTH}",
                where=self.module.name or "module",
                todo="give the text as the compiler wrote it",
            )

    def digest(self, computation: Computation) -> Digest:
        """Return which instructions of a computation deserve a closer look."""
        found = self._digests.get(id(computation))
        if found is None:
            sorts = list(map(SORT.__getitem__, computation.opcodes))
            light = sorts.count("light")
            work: list[int] = []
            moves: list[int] = []
            if light + sorts.count("none") < len(sorts):
                work = [at for at, sort in enumerate(sorts) if sort in ("matmul", "kernel", "caller")]
                moves = [at for at, sort in enumerate(sorts) if sort in ("collective", "caller")]
            found = self._digests[id(computation)] = Digest(light, work, moves)
        return found

    def inside(self, computation: Computation) -> Cover:
        """Return the work of one run of a computation."""
        key = id(computation)
        if key not in self._inside:
            self._descend()
            digest = self.digest(computation)
            total = _light(digest.light)
            for at in digest.work:
                total = total.plus(self.cover(computation, at))
            self._inside[key] = total
            self._depth -= 1
        return self._inside[key]

    def cover(self, computation: Computation, at: int) -> Cover:
        """Return the work of one instruction; for an async start, the work that it starts."""
        opcode = computation.opcodes[at]
        sort = SORT[opcode]
        if sort == "matmul":
            flops = matmul_flops(computation, at)
            flops = None if flops is None or flops > MAX_COUNT else flops
            return Cover(matmuls=1, flops=flops or 0, no_flops=int(flops is None))
        if sort == "caller":
            return self._cover_of_caller(computation, at, opcode.removesuffix("-start"))
        return _FIXED_COVER[sort]

    def _cover_of_caller(self, computation: Computation, at: int, base: str) -> Cover:
        bodies = self.bodies(computation, at)
        if base == "custom-call" and not bodies:
            return custom_call_cover(computation.texts[at])
        covers = [self.inside(body) for body in bodies]
        if base == "while":
            trips = self.trips(computation, at)
            return covers[0].times(1 if trips is None else trips) if covers else Cover(light=1)
        if base == "conditional":  # what is sure to run
            return min(covers, key=_rank) if covers else Cover(light=1)
        total = covers[0] if covers else Cover(light=1)
        for cover in covers[1:]:
            total = total.plus(cover)
        if self.communicates(bodies) and not self._carries(bodies):
            total = total._replace(light=0)  # the plumbing of a fused collective is no cover for another
        return total

    def communicates(self, bodies: list[Computation]) -> bool:
        """Whether a collective runs inside any of the computations."""
        for body in bodies:
            if self.collectives_in(body):
                return True
        return False

    def _carries(self, bodies: list[Computation]) -> bool:
        """Whether a fusion does work of its own while it carries an async collective on."""
        return any(body.opcodes and body.opcodes[body.root_index] == "tuple" for body in bodies)

    def collectives_in(self, computation: Computation) -> list[tuple[Computation, int, Times]]:
        """Return the collectives inside a computation that runs as one piece, with how often each runs in it."""
        key = id(computation)
        if key not in self._collectives:
            self._descend()
            found: list[tuple[Computation, int, Times]] = []
            for at in self.digest(computation).moves:
                if SORT[computation.opcodes[at]] == "collective":
                    found.append((computation, at, ONCE))
                    continue
                times = self.runs(computation, at)
                for body in self.bodies(computation, at):
                    inside = self.collectives_in(body)
                    found += [(where, place, times.times(inner)) for where, place, inner in inside]
            self._collectives[key] = found
            self._depth -= 1
        return self._collectives[key]

    def async_half(self, computation: Computation) -> str | None:
        """Return "start" or "done" for the inside of a fusion that begins or ends a TPU async collective, else None."""
        key = id(computation)
        if key not in self._halves:
            calls = [at for at in self.digest(computation).work if computation.opcodes[at] == "custom-call"]
            targets = [TARGET.search(computation.texts[at]) for at in calls]
            self._halves[key] = next((_HALVES[found[1]] for found in targets if found and found[1] in _HALVES), None)
        return self._halves[key]

    def runs(self, computation: Computation, at: int) -> Times:
        """Return how often instruction `at` runs each of its computations."""
        opcode = computation.opcodes[at]
        if opcode == "while":
            trips = self.trips(computation, at)
            return UNKNOWN if trips is None else Times(trips, trips)
        return Times(0, 1) if opcode == "conditional" else ONCE

    # --- loops ---

    def trips(self, computation: Computation, at: int) -> int | None:
        """Return the trip count of the `while` at `at`: as XLA says, else read off its condition, body and init."""
        key = (id(computation), at)
        if key not in self._trips:
            self._trips[key] = None  # a loop that depends on itself stays unknown
            known = _KNOWN_TRIPS.search(unescaped(computation.texts[at]))
            self._trips[key] = int(known[1]) if known else TripReader(self).read(computation, at)
        trips = self._trips[key]
        return self.assume_trips if trips is None else trips

    # --- schedule ---

    def track(self, computation: Computation) -> Track:
        """Return the work of a scheduled computation by position."""
        key = id(computation)
        if key in self._tracks:
            return self._tracks[key]
        track = self._tracks[key] = Track()
        events: dict[str, list[tuple[int, Cover]]] = {}
        for at, opcode in enumerate(computation.opcodes):
            if opcode in NO_WORK:
                continue
            track.busy.append(at)
            track.opcodes.setdefault(opcode, []).append(at)
            sort = SORT[opcode]
            if sort == "light":
                track.light.append(at)
                continue
            work = self.cover(computation, at) if sort != "none" else NOTHING
            if work is NOTHING or work == NOTHING:
                continue
            if END[opcode] != "start":
                track.main.add(at, work)
                continue
            thread = thread_of(computation, at)
            track.started.setdefault(thread, Prefix()).add(at, work)
            if work.light == 1 == sum(work):
                continue  # one copy covers where it is issued, not while it flies
            done = self._done_of(computation, at)
            events.setdefault(thread, []).append((at, work))
            if done is not None:
                events[thread].append((done, work.times(-1)))
        for thread in track.started:
            running = track.running[thread] = Prefix()
            for position, change in sorted(events.get(thread, []), key=lambda event: event[0]):
                running.add(position, change)
        return track

    def _done_of(self, computation: Computation, at: int) -> int | None:
        """Return the position of the done of an async start that is no collective."""
        key = id(computation)
        if key not in self._dones:
            found: dict[int, int] = {}
            for position, opcode in enumerate(computation.opcodes):
                if END[opcode] == "done":
                    start, _ = start_in_place(computation, position)
                    if start is not None:
                        found.setdefault(start, position)
            self._dones[key] = found
        return self._dones[key].get(at)


def unescaped(text: str) -> str:
    """Return an instruction with the JSON of its backend_config bare: XLA once printed it as a quoted string."""
    return text.replace('\\"', '"') if '\\"' in text else text


def thread_of(computation: Computation, at: int) -> str:
    """Return the thread an async start runs on; empty when the text names none."""
    text = computation.texts[at]
    place = text.find('async_execution_thread="')
    found = _THREAD.match(text, place) if place >= 0 else None
    return found[1] if found else ""


def user_half(text: str) -> tuple[str, str] | None:
    """Return (kind, "start" or "done") of a custom call whose target is half a collective."""
    target = TARGET.search(text)
    kind, _, half = target[1].rpartition("-") if target else ("", "", "")
    return (kind, half) if half in ("start", "done") and kind in COLLECTIVES else None


def custom_call_cover(text: str) -> Cover:
    """Return the work of a custom call that names no computation, by its target."""
    found = TARGET.search(text)
    target = found[1] if found else ""
    if target in EMPTY_TARGETS or user_half(text):
        return NOTHING
    if _MATMUL_TARGETS.search(target):
        return Cover(matmuls=1, no_flops=1)
    return Cover(kernels=1, no_flops=1)


def start_in_place(computation: Computation, done: int) -> tuple[int | None, int | None]:
    """Return (start, first update) of a done whose chain stays plain within its computation."""
    at, update = done, None
    for _ in range(MAX_HOPS):
        refs = hlo_text.operands(computation, at)
        found = computation.index(refs[0].name) if refs else None
        if found is None or found == at:
            return None, update
        at = found
        opcode = computation.opcodes[at]
        if opcode.endswith("-update"):
            update = at
        elif opcode.endswith("-start") or opcode in ("send", "recv"):
            return at, update
        elif opcode not in PASS_ON:
            return None, update
    return None, update


# --- matrix products ----------------------------------------------------------------------------------------------

_CONTRACTING = re.compile(r"\{([\d,]*)\}")
_DIM_LABELS = re.compile(r"[^_]*_([^-]*)->")
_WINDOW_SIZE = re.compile(r"\bsize=([\dx]+)")


def matmul_flops(computation: Computation, at: int) -> int | None:
    """Return 2*M*N*K of a dot or convolution from its shapes; None when the text does not tell.

    A convolution with padding or batch in its window dimensions does less: then this is an upper bound.
    """
    refs = hlo_text.operands(computation, at)
    output = hlo_shapes.elements(hlo_text.shape_of(computation, at))
    if len(refs) < 2:
        return None
    opcode = computation.opcodes[at]
    if opcode == "ragged-dot":
        return None  # whether the ragged dimension is contracted changes the count
    if opcode in ("dot", "scaled-dot"):
        left = hlo_text.shape_of_ref(computation, refs[0])
        dims = _CONTRACTING.match(hlo_text.attribute(computation, at, "lhs_contracting_dims"))
        if not isinstance(left, hlo_shapes.Array) or dims is None:
            return None
        places = [int(place) for place in re.findall(r"\d{1,9}", dims[1])]
        if any(place >= len(left.dims) for place in places):
            return None
        return 2 * output * _product(left.dims[place] for place in places)
    right = hlo_text.shape_of_ref(computation, refs[1])
    labels = _DIM_LABELS.match(hlo_text.attribute(computation, at, "dim_labels"))
    if not isinstance(right, hlo_shapes.Array) or labels is None or len(labels[1]) != len(right.dims):
        return None
    return 2 * output * _product(size for label, size in zip(labels[1], right.dims, strict=True) if label != "o")


def _product(sizes: Iterable[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total
