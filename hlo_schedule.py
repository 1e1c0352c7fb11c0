"""Every collective of a scheduled HLO module: its kind, class, bytes and how often it runs in a step.

`analyse` finds collectives in whichever form they were scheduled: a plain operation, a `-start`/`-done`
pair, a three-step start/update/done, an operation wrapped in an async computation, a TPU async collective
fusion, an all-reduce-scatter fusion. It judges what lies between by opcode and contents, multiplies by
loop trip counts and counts wire bytes. Pure: no printing, no clock. Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import hlo_shapes
import hlo_text
from bench_common import BenchError
from hlo_pairs import Window, find_starts, half_of, trace_back, window_of
from hlo_program import (
    COLLECTIVES,
    EMPTY_TARGETS,
    END,
    MOVES,
    NEVER,
    NO_WORK,
    NOTHING,
    ONCE,
    SORT,
    TARGET,
    UNKNOWN,
    Cover,
    Program,
    Segment,
    Times,
    collective_base,
    thread_of,
    unescaped,
    user_half,
)
from hlo_text import Computation, Module

# Pallas kernels carry their configuration; a true flag is printed, a false one is left out (jax tpu_custom_call.py).
_TALKS = re.compile(r'"has_communication"\s*:\s*true|"collective_id"\s*:|"remote_bytes_transferred"\s*:\s*"?[1-9]')
_IS_SYNC = re.compile(r'"is_sync"\s*:\s*true')
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_MAX_FUSED = 256  # instructions of an all-reduce-scatter fusion; real ones have a handful
_MAX_MESH_WORK = 1 << 20  # devices times combinations of axes that are tried for a name
_SPACES = {0: "HBM", 1: "VMEM", 2: "SMEM", 5: "host"}  # XLA docs, shapes and layout
CLASSES = ("sync", "async_empty", "async_light", "async_compute", "unmatched")
EXPOSED = ("sync", "async_empty", "unmatched")  # what nothing in the text shows to be hidden
LOCAL_TARGETS = re.compile(  # libraries that work on one device
    r"__cublas|__cudnn|__onednn|__triton|__gpu\$|cusolver|cub_|cu_threefry|hipsolver|lapack_|blas_|ducc_|TopK$|PadToStatic$"
    r"|SliceToDynamic$|InvertDiagBlocksLowerTriangular$|Eigh?$|Qr$|ProductOfElementaryHouseholderReflectors$"
)


class Between(NamedTuple):
    """The work in a window."""

    instructions: int
    cover: Cover
    opcodes: dict[str, int]
    loops: int  # whole `while` loops among the instructions


NOTHING_BETWEEN = Between(0, NOTHING, {}, 0)


class Collective(NamedTuple):
    """One collective of the text and the answer about it."""

    computation: Computation
    at: int  # position of the operation, or of its start
    kind: str
    is_async: bool  # begun by a start, whether or not its done is in the text
    group_size: int | None
    axes: tuple[str, ...]
    output_bytes: int | None
    wire_bytes: int | None
    op_name: str
    thread: str
    per_call: Times = ONCE  # inside a wrapped computation with loops of its own
    groups: hlo_shapes.Groups | None = None
    category: str | None = None  # one of CLASSES; None when the module is not scheduled
    window: Window | None = None
    between: Between | None = None
    executions: Times = UNKNOWN

    @property
    def name(self) -> str:
        return self.computation.names[self.at]

    @property
    def line(self) -> int:
        return self.computation.line_of(self.at)

    @property
    def wire_per_step(self) -> Times:
        if self.wire_bytes is None:
            return NEVER if self.executions.high == 0 else UNKNOWN
        return self.executions.times(Times(self.wire_bytes, self.wire_bytes))


class Loop(NamedTuple):
    """One `while`."""

    computation: Computation  # its body
    where: Computation
    at: int
    trip_count: int | None


class Copy(NamedTuple):
    """An asynchronous copy or slice, such as HBM to VMEM: never a collective."""

    computation: Computation
    at: int
    source: str
    target: str
    output_bytes: int | None


class Hidden(NamedTuple):
    """A custom call that may communicate, as far as the text tells."""

    computation: Computation
    at: int
    target: str
    reason: str


class Union(NamedTuple):
    """The windows of one computation laid over each other."""

    computation: Computation
    windows: int
    instructions: int  # of the computation, without plumbing
    covered: int  # of those inside at least one window
    cover: Cover  # the work inside
    total: Cover  # the work of the computation


class Report:
    """All there is to say about one module."""

    def __init__(self, module: Module, program: Program):
        self.module, self.program = module, program
        self.order: list[Computation] = []  # what runs as a schedule, callers first
        self.collectives: list[Collective] = []
        self.loops: list[Loop] = []
        self.copies: list[Copy] = []
        self.hidden: list[Hidden] = []
        self.unions: list[Union] = []
        self.executions: dict[str, Times] = {}
        self.roots: frozenset[str] = frozenset()  # what nothing in the text calls
        self.orphans = 0  # dones whose start is not in the text


def wire_bytes(kind: str, output: int | None, group: int | None) -> int | None:
    """Return the bytes one device receives for one execution by the ring algorithms; None when unknown.

    Args:
      kind: a member of COLLECTIVES.
      output: bytes of the result on one device.
      group: devices that take part together; 1 moves nothing.

    A send's bytes are counted at its recv. A ragged all-to-all counts its whole output: an upper bound.
    """
    if kind == "send" or group == 1:
        return 0
    if output is None or group == 0:  # a group of nobody is broken text
        return None
    if kind in ("collective-permute", "collective-broadcast", "collective-reduce", "recv"):
        return output
    if group is None:
        return None
    if kind == "reduce-scatter":
        return (group - 1) * output
    return (2 if kind == "all-reduce" else 1) * (group - 1) * output // group


def analyse(module: Module, assume_trips: int | None = None, overlap: bool = True) -> Report:
    """Return everything about a module.

    Args:
      module: as read by hlo_text.
      assume_trips: trip count for loops whose own the text does not tell; None leaves those unknown.
      overlap: False for modules that are not scheduled: counts and bytes, no classes.
    """
    program = Program(module, assume_trips)
    report = Report(module, program)
    order = report.order = scheduled_computations(program, report)
    found: list[Collective] = []
    starts: set[tuple[int, int]] = set()
    for computation in order:
        for at in program.digest(computation).moves:
            here = collectives_at(program, computation, at)
            if here:
                starts.add((id(computation), at))
                found += here
        for at, opcode in enumerate(computation.opcodes):
            if END[opcode] == "start" and (id(computation), at) not in starts:
                copy = memory_copy(program, computation, at)
                if copy:
                    report.copies.append(copy)
    report.hidden = hidden_calls(program)
    if overlap:
        windows = pair_windows(program, order, starts, report)
        found = [_classified(program, one, windows.get((id(one.computation), one.at))) for one in found]
        report.unions = window_unions(program, order, windows)
    axes = name_axes(found)
    for one, names in zip(found, axes, strict=True):
        runs = report.executions.get(one.computation.name, UNKNOWN)
        report.collectives.append(one._replace(axes=names, executions=runs.times(one.per_call)))
    return report


def scheduled_computations(program: Program, report: Report) -> list[Computation]:
    """Return the computations that run as a schedule, callers first, and fill in loops and executions.

    Those are the entry, loop bodies and conditions, branches and called computations; without an entry, all
    that nothing calls, run an unknown number of times.
    """
    module = program.module
    roots = [module.entry] if module.entry else _uncalled(program)
    report.roots = frozenset(root.name for root in roots)
    post: list[Computation] = []
    state: dict[int, int] = {}
    for root in roots:
        _visit(program, root, state, post, report)
    order = post[::-1]
    executions = {id(computation): NEVER for computation in order}
    for root in roots:
        executions[id(root)] = ONCE if module.entry else UNKNOWN
    for computation in order:
        for callee, times, _ in schedule_calls(program, computation):
            here = executions[id(computation)].times(times)
            executions[id(callee)] = executions[id(callee)].plus(here)
    report.executions = {computation.name: executions[id(computation)] for computation in order}
    return order


def schedule_calls(program: Program, computation: Computation) -> Iterator[tuple[Computation, Times, int]]:
    """Yield (callee, times per run, position) for the callees of a computation that run as schedules."""
    for at in program.digest(computation).work:
        opcode = computation.opcodes[at]
        if opcode in ("while", "call", "conditional"):
            times = program.runs(computation, at)
            for body in program.bodies(computation, at):
                yield body, times, at
            if opcode == "while":
                for condition in program.called(computation, at).get("condition", []):
                    yield condition, times.plus(ONCE), at


def _visit(program: Program, root: Computation, state: dict[int, int], post: list[Computation], report: Report) -> None:
    """Depth-first walk from a root: callees before callers in `post`; a circle is an error."""
    if id(root) in state:
        return
    stack = [(root, schedule_calls(program, root))]
    state[id(root)] = 1
    while stack:
        computation, calls = stack[-1]
        step = next(calls, None)
        if step is None:
            stack.pop()
            state[id(computation)] = 2
            post.append(computation)
            continue
        callee, _, at = step
        if computation.opcodes[at] == "while" and callee in program.bodies(computation, at):
            trips = program.trips(computation, at)
            report.loops.append(Loop(callee, computation, at, trips))
        program.callers.setdefault(id(callee), (computation, at))
        if state.get(id(callee)) == 1:
            raise BenchError(
                f"computation {callee.name} calls itself",
                where=program.module.name or "module",
                todo="give the text as the compiler wrote it",
            )
        if id(callee) not in state:
            state[id(callee)] = 1
            stack.append((callee, schedule_calls(program, callee)))


def _uncalled(program: Program) -> list[Computation]:
    """Return the computations that no instruction names, in the order of the text."""
    named: set[int] = set()
    for computation in program.module.computations:
        for at, text in enumerate(computation.texts):
            if "=%" in text or SORT[computation.opcodes[at]] == "caller" or "to_apply=" in text:
                for found in program.called(computation, at).values():
                    named.update(id(callee) for callee in found)
    return [computation for computation in program.module.computations if id(computation) not in named]


def collectives_at(program: Program, computation: Computation, at: int) -> list[Collective]:
    """Return the collectives that instruction `at` of a schedule stands for: none, one, or a wrapped group."""
    opcode = computation.opcodes[at]
    base = collective_base(opcode)
    if base in ("send", "recv") and "is_host_transfer=true" in computation.texts[at]:
        return []
    if base:
        return [_collective(program, computation, at, computation, at, ONCE)]
    if opcode == "custom-call":
        user = user_half(computation.texts[at])
        if user:
            return [_user_collective(computation, at, user[0])] if user[1] == "start" else []
    if opcode in ("while", "call", "conditional") or SORT[opcode] != "caller":
        return []
    bodies = program.bodies(computation, at)
    if not program.communicates(bodies):
        return []
    if opcode == "fusion":
        half = half_of(program, computation, at)
        if half == "done" or (half is None and _carried_only(program, computation, at)):
            return []
    return [
        _collective(program, computation, at, where, place, times)
        for body in bodies
        for where, place, times in program.collectives_in(body)
    ]


def _carried_only(program: Program, computation: Computation, at: int) -> bool:
    """Whether the collective inside a fusion was started by another one, whose state the fusion takes in."""
    refs = hlo_text.operands(computation, at)
    for body in program.bodies(computation, at):
        for where, place, _ in program.collectives_in(body):
            inner = hlo_text.operands(where, place)
            parameter = where.index(inner[0].name) if where is body and inner else None
            if parameter is None or where.opcodes[parameter] != "parameter":
                continue
            position = hlo_text.number(hlo_text.literal(where, parameter))
            if position is not None and position < len(refs):
                starts = trace_back(program, computation, refs[position])
                if any(half_of(program, start.computation, start.at) == "start" for start in starts):
                    return True
    return False


def _user_collective(computation: Computation, at: int, kind: str) -> Collective:
    """Return the collective of a user-level `custom_call_target="all-gather-start"`, before it is rewritten.

    Its groups are in no attribute of its own; its result is the done's.
    """
    name = _OP_NAME.search(computation.texts[at])
    return Collective(computation, at, kind, True, None, (), None, None, name[1] if name else "", "")


def _collective(
    program: Program, home: Computation, at: int, where: Computation, place: int, times: Times
) -> Collective:
    """Return the record of the collective at (where, place), which instruction `at` of `home` runs."""
    opcode = where.opcodes[place]
    kind = collective_base(opcode) or opcode
    shape = _output_shape(where, place)
    begun = home.opcodes[at]
    if kind == "all-reduce" and (begun == "fusion" or _looks_fused(program, where)):
        part = _scattered(where, place)
        if part is not None:
            kind, shape = "reduce-scatter", part
    size, axes, groups = group_of(program.module, where, place, kind)
    output = hlo_shapes.bytes_of(shape)
    found = _OP_NAME.search(home.texts[at]) or _OP_NAME.search(where.texts[place])
    thread, op_name = thread_of(home, at) or where.thread, found[1] if found else ""
    wire = wire_bytes(kind, output, size)
    is_async = END[begun] == "start" or begun in ("send", "recv") or half_of(program, home, at) == "start"
    return Collective(home, at, kind, is_async, size, axes, output, wire, op_name, thread, times, groups)


def _output_shape(where: Computation, place: int) -> hlo_shapes.Shape:
    """Return the shape of a collective's result: of a start's tuple the part that is the result."""
    shape, opcode = hlo_text.shape_of(where, place), where.opcodes[place]
    if isinstance(shape, hlo_shapes.Array) or not shape:
        return shape
    if opcode in ("send", "recv"):
        return shape[0]
    if not opcode.endswith("-start"):
        return shape
    if opcode == "all-reduce-start" and isinstance(shape[0], hlo_shapes.Array):
        return shape  # its result is the output alone, also when several are combined
    return shape[1] if len(shape) > 1 else shape


def _looks_fused(program: Program, where: Computation) -> bool:
    """Whether a computation whose caller is cut off is an all-reduce-scatter fusion: it ends in a dynamic-slice."""
    alone = not where.entry and id(where) not in program.callers
    return alone and len(where) <= _MAX_FUSED and where.opcodes[where.root_index] == "dynamic-slice"


def _scattered(where: Computation, place: int) -> hlo_shapes.Shape | None:
    """Return the shape of the dynamic-slice that takes this all-reduce apart, or None."""
    names = {where.names[place]}
    for at in range(place + 1, min(len(where), place + _MAX_FUSED)):
        opcode = where.opcodes[at]
        if opcode not in ("dynamic-slice", "bitcast", "copy", "convert", "reshape", "get-tuple-element"):
            continue
        refs = hlo_text.operands(where, at)
        if refs and refs[0].name in names:
            if opcode == "dynamic-slice":
                return hlo_text.shape_of(where, at)
            names.add(where.names[at])
    return None


def group_of(
    module: Module, where: Computation, place: int, kind: str
) -> tuple[int | None, tuple[str, ...], hlo_shapes.Groups | None]:
    """Return (devices per group, named mesh axes, groups as written) of a collective."""
    if kind in ("send", "recv"):
        return None, (), None
    if kind == "collective-permute":
        return hlo_shapes.permute_ring(hlo_text.attribute(where, place, "source_target_pairs")), (), None
    value = hlo_text.attribute(where, place, "replica_groups")
    if not value:  # as people write tests: everybody; or else the end of a text that was cut off
        if not where.closed and place == len(where) - 1:
            return None, (), None
        value = "{}"
    groups = hlo_shapes.read_groups(value)
    size = groups.size if groups.mesh else _group_size(module, where, place, kind, groups.size)
    return size, groups.axes, groups


def _group_size(module: Module, where: Computation, place: int, kind: str, written: int | None) -> int | None:
    """Return the devices per group from the ids per group; None is `{}`, everybody.

    Ids are devices, replicas or partitions by the modes of XLA (collective_ops_utils.h, CollectiveOpGroupMode). With
    one replica they are taken for devices, as no compiler leaves a collective of one replica in a schedule.
    """
    replicas, partitions = module.count("replica_count"), module.count("num_partitions")
    if replicas is None or partitions is None:
        return written
    if replicas == 1:
        return partitions if written is None else written
    if not hlo_text.attribute(where, place, "channel_id"):
        return replicas if written is None else written
    if hlo_text.attribute(where, place, "use_global_device_ids"):
        return replicas * partitions if written is None else written
    if kind in ("all-gather", "all-reduce", "reduce-scatter"):  # cross-replica-and-partition: all partitions take part
        return (replicas if written is None else written) * partitions
    return partitions if written is None else written


def name_axes(collectives: list[Collective]) -> list[tuple[str, ...]]:
    """Return the axes of each collective; groups written as lists or over a flattened mesh get them by comparison.

    A group is the axis "expert" when its members are exactly those of that axis of a named mesh with as many
    devices; the mesh is the one whose axes have names of their own (not axis_0) and the most of them.
    """
    meshes = {one.groups.mesh for one in collectives if one.groups and _real_mesh(one.groups.mesh)}
    if not meshes:
        return [one.axes for one in collectives]
    mesh = max(sorted(meshes), key=len)
    table: dict[frozenset, tuple[str, ...]] = {}
    real, devices = [name for name, size in mesh if size > 1], 1
    for _, size in mesh:
        devices *= size
    while real and devices << len(real) > _MAX_MESH_WORK:
        real.pop()
    for choice in range(1, 1 << len(real)):
        axes = tuple(name for bit, name in enumerate(real) if choice >> bit & 1)
        members = hlo_shapes.mesh_members(mesh, axes)
        if members is not None:
            table.setdefault(frozenset(frozenset(group) for group in members), axes)
    cache: dict[hlo_shapes.Groups, tuple[str, ...]] = {}
    found = []
    for one in collectives:
        groups = one.groups
        if not groups or not groups.members or _real_mesh(groups.mesh):
            found.append(one.axes)
            continue
        if groups not in cache:
            cache[groups] = table.get(frozenset(frozenset(group) for group in groups.members), ())
        found.append(cache[groups] or one.axes)
    return found


def _real_mesh(mesh: tuple[tuple[str, int], ...]) -> bool:
    return bool(mesh) and not any(re.fullmatch(r"axis_\d+", name) for name, _ in mesh)


def memory_copy(program: Program, computation: Computation, at: int) -> Copy | None:
    """Return the copy or slice that an async start runs, if it does nothing but move data."""
    opcode = computation.opcodes[at]
    base = opcode[:-6]
    if base in ("async", "call", "fusion", "custom-call"):
        bodies = program.bodies(computation, at)
        inner = [op for body in bodies for op in body.opcodes if op not in NO_WORK]
        if not inner or any(op not in MOVES for op in inner):
            return None
    elif base not in MOVES:
        return None
    shape = hlo_text.shape_of(computation, at)
    if isinstance(shape, hlo_shapes.Array) or len(shape) < 2:
        return None
    target, source = (shape[0], shape[1]) if base == "copy" else (shape[1], shape[0])
    return Copy(computation, at, _space(source), _space(target), hlo_shapes.bytes_of(target))


def _space(shape: hlo_shapes.Shape) -> str:
    first = next(hlo_shapes.arrays(shape), None)
    return "?" if first is None else _SPACES.get(first.space, f"S({first.space})")


def hidden_calls(program: Program) -> list[Hidden]:
    """Return the custom calls that may communicate without being collectives of HLO."""
    found = []
    for computation in program.module.computations:
        for at in program.digest(computation).work:
            if computation.opcodes[at] not in ("custom-call", "custom-call-start"):
                continue
            text = computation.texts[at]
            match = TARGET.search(text)
            target = match[1] if match else "?"
            if target in EMPTY_TARGETS or LOCAL_TARGETS.match(target):
                continue
            if user_half(text) or program.bodies(computation, at):
                continue
            reason = _may_talk(target, text)
            if reason:
                found.append(Hidden(computation, at, target, reason))
    return found


def _may_talk(target: str, text: str) -> str | None:
    if target != "tpu_custom_call":
        return "unknown target"
    bare = unescaped(text)
    if _TALKS.search(bare):
        return "kernel with communication"
    return None if '"custom_call_config"' in bare else "kernel without its configuration"


def pair_windows(
    program: Program, order: list[Computation], starts: set[tuple[int, int]], report: Report
) -> dict[tuple[int, int], Window]:
    """Return the window of each start that has a done: the most direct pairing, the earliest done."""
    best: dict[tuple[int, int], tuple[int, Window]] = {}
    for computation in order:
        for at, opcode in enumerate(computation.opcodes):
            plain = END[opcode] == "done"
            if not plain and (opcode not in ("fusion", "custom-call") or half_of(program, computation, at) != "done"):
                continue
            found = find_starts(program, computation, at)
            if not found and (not plain or opcode[:-5] in COLLECTIVES):
                report.orphans += 1
            for start in found:
                key = (id(start.computation), start.at)
                if key in starts:
                    choice = window_of(start, computation, at)
                    if key not in best or choice[0] < best[key][0]:
                        best[key] = choice
    return {key: window for key, (_, window) in best.items()}


def _classified(program: Program, collective: Collective, window: Window | None) -> Collective:
    """Return a collective with its class and what lies between."""
    if not collective.is_async:
        return collective._replace(category="sync")
    text = collective.computation.texts[collective.at]
    if "is_sync" in text and _IS_SYNC.search(unescaped(text)):
        return collective._replace(category="sync", window=window)
    if window is None:
        return collective._replace(category="unmatched")
    if collective.computation.opcodes[collective.at] == "custom-call":
        output = hlo_shapes.bytes_of(hlo_text.shape_of(*window.done))
        wire = wire_bytes(collective.kind, output, collective.group_size)
        collective = collective._replace(output_bytes=output, wire_bytes=wire)
    cover, count = NOTHING, 0
    opcodes: dict[str, int] = {}
    for segment in window.segments:
        track = program.track(segment.computation)
        work, inside = track.window(segment, collective.thread)
        cover, count = cover.plus(work), count + inside
        for name, number in track.histogram(segment).items():
            opcodes[name] = opcodes.get(name, 0) + number
    heavy = cover.matmuls or cover.kernels
    category = "async_compute" if heavy else "async_light" if cover.light else "async_empty"
    between = Between(count, cover, dict(sorted(opcodes.items())), opcodes.get("while", 0))
    return collective._replace(category=category, window=window, between=between)


def window_unions(program: Program, order: list[Computation], windows: dict[tuple[int, int], Window]) -> list[Union]:
    """Return, per computation with windows, their union: how much of its schedule runs under a collective."""
    segments: dict[int, list[Segment]] = {}
    for window in windows.values():
        for segment in window.segments:
            segments.setdefault(id(segment.computation), []).append(segment)
    found = []
    for computation in order:
        mine = sorted(segments.get(id(computation), []), key=lambda segment: segment.after)
        if not mine:
            continue
        track = program.track(computation)
        covered, cover, reach = 0, NOTHING, -1
        for segment in mine:
            begin = max(segment.after, reach)
            if segment.before > begin + 1:
                part = Segment(computation, begin, segment.before)
                covered += sum(track.histogram(part).values())
                cover = cover.plus(track.own(part))
            reach = max(reach, segment.before - 1)
        total = track.own(Segment(computation, -1, len(computation)))
        found.append(Union(computation, len(mine), len(track.busy), covered, cover, total))
    return found
