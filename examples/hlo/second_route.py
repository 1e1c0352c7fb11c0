"""Work out the answer for a module by another route than hlo_overlap's, and print it as JSON.

XLA's own parser (jaxlib) reads the text; the route goes forward from each start along the users of its
value, as XLA's objects give them, while hlo_overlap reads text and goes backward from each done. Sizes come
from XLA's shapes, contents of fusions from XLA's opcodes. It serves the forms of the example modules only:
plain collectives, async starts around a called computation, TPU async collective fusions, all-reduce-scatter
fusions, counted loops; anything else stops it. What it prints is kept beside the module as NAME.expected.json
and compared by tests/test_hlo_overlap.py.

  python examples/hlo/second_route.py examples/hlo/dense_fsdp_v5e.txt > examples/hlo/dense_fsdp_v5e.expected.json
"""

from __future__ import annotations

import gzip
import json
import math
import re
import sys

from jaxlib import _hlo

OP = _hlo.HloOpcode
KINDS = {
    OP.kAllGather: "all-gather",
    OP.kAllReduce: "all-reduce",
    OP.kReduceScatter: "reduce-scatter",
    OP.kAllToAll: "all-to-all",
    OP.kCollectivePermute: "collective-permute",
}
FREE = {OP.kParameter, OP.kConstant, OP.kBitcast, OP.kGetTupleElement, OP.kTuple, OP.kPartitionId}
FREE_CALLS = ("AllocateBuffer", "ConcatBitcast", "AssumeGatherIndicesInBound", "AsyncCollectiveStart",
              "AsyncCollectiveDone")  # fmt: skip
SIZES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}


def bytes_of(instruction) -> int:
    """Bytes of a result, from the printed type of XLA's own shape."""
    arrays = re.findall(r"(\w+)\[([\d,]*)\]", str(instruction.shape))
    return sum(SIZES[kind] * math.prod(int(size) for size in dims.split(",") if size) for kind, dims in arrays)


class Route:
    def __init__(self, text: str):
        # XLA's parser wants a schedule it can verify; the wrappers of the sugared async starts break that.
        self.module = _hlo.hlo_module_from_text(text.replace(", is_scheduled=true", "", 1))
        self.text = text
        self.computations = {computation.name: computation for computation in self.module.computations()}
        self.entry = re.search(r"^ENTRY %(\S+)", text, re.MULTILINE)[1]
        self.lines = {}
        for number, line in enumerate(text.split("\n"), 1):
            found = re.match(r"\s+(?:ROOT )?%(\S+) = ", line)
            if found:
                self.lines.setdefault(found[1], number)

    def named(self, instruction, *keys: str):
        """The computations an instruction names under one of the keys."""
        printed = instruction.to_string()
        for key in keys:
            found = re.search(rf"\b{key}=\{{?%([^\s,}}]+)", printed)
            if found:
                return list(self.computations[found[1]].instructions())
        return []

    def body(self, instruction):
        if instruction.opcode == OP.kAsyncStart:
            return self.body(instruction.async_wrapped_root())
        return self.named(instruction, "calls", "to_apply", "called_computations")

    def communicates(self, instruction):
        """The collective that runs inside an instruction, or None."""
        if instruction.opcode in KINDS:
            return instruction
        if instruction.opcode in (OP.kFusion, OP.kAsyncStart, OP.kCall, OP.kCustomCall):
            for inner in self.body(instruction):
                found = self.communicates(inner)
                if found is not None:
                    return found
        return None

    def target(self, instructions) -> str:
        """Which half of an async collective a fused computation is: "Start", "Done" or ""."""
        found = re.search(r'"AsyncCollective(Start|Done)"', "".join(i.to_string() for i in instructions))
        return found[1] if found else ""

    def work(self, instruction) -> tuple[int, int, int]:
        """(matrix products, other kernels, light operations) of an instruction."""
        opcode = instruction.opcode
        if opcode in FREE or opcode in KINDS or opcode in (OP.kAsyncUpdate, OP.kAsyncDone, OP.kCopyDone):
            return 0, 0, 0
        if opcode in (OP.kDot, OP.kConvolution):
            return 1, 0, 0
        if opcode == OP.kCustomCall:
            free = any(f'"{name}"' in instruction.to_string() for name in FREE_CALLS)
            return (0, 0, 0) if free else (0, 1, 0)
        if opcode == OP.kFusion:
            inner = self.body(instruction)
            total = tuple(sum(column) for column in zip(*(self.work(i) for i in inner), strict=True))
            carries = inner[-1].opcode == OP.kTuple or any(i.opcode == OP.kTuple for i in inner)
            fused = self.communicates(instruction) is not None and not carries
            return (total[0], total[1], 0) if fused else total
        if opcode == OP.kAsyncStart:
            return (0, 0, 1) if "slice-start(" in instruction.to_string() else (0, 0, 0)  # else: same thread
        return 0, 0, 1

    def done_of(self, start):
        """(first update or the start, done) by walking the users forward."""
        seen, queue, update = set(), [start], start
        while queue:
            now = queue.pop(0)
            for user in now.users():
                if user.name in seen:
                    continue
                seen.add(user.name)
                if user.opcode == OP.kAsyncUpdate and update is start and not start.operands():
                    update = user
                fused = user.opcode == OP.kFusion and self.communicates(user) is not None
                if user.opcode == OP.kAsyncDone or (fused and self.target(self.body(user)) == "Done"):
                    return update, user
                if fused or user.opcode in (OP.kAsyncUpdate, OP.kGetTupleElement):
                    queue.append(user)
        raise SystemExit(f"{start.name}: no done")

    def trips(self, loop) -> int:
        """Run the loop's counter: compare against its bound, add its step, until it ends."""
        condition, body = self.named(loop, "condition"), self.named(loop, "body")
        compare = [i for i in condition if i.opcode == OP.kCompare][-1]
        counter, bound = compare.operands()
        place = int(re.search(r"index=(\d+)", counter.to_string())[1])
        root = [i for i in body if i.opcode == OP.kTuple][-1]
        while root.users():
            root = root.users()[0]
        step = root.operands()[place]
        assert "direction=LT" in compare.to_string() and step.opcode == OP.kAdd, step.to_string()
        value = self.constant(loop.operands()[0].operands()[place])
        count, limit = 0, self.constant(bound)
        stride = [self.constant(o) for o in step.operands() if self.settles(o)]
        while value < limit:
            value, count = value + stride[0], count + 1
        return count

    def settles(self, instruction) -> bool:
        while instruction.opcode == OP.kCopy:
            instruction = instruction.operands()[0]
        return instruction.opcode == OP.kConstant

    def constant(self, instruction) -> int:
        while instruction.opcode == OP.kCopy:
            instruction = instruction.operands()[0]
        return int(re.search(r"constant\((-?\d+)\)", instruction.to_string())[1])

    def group(self, collective) -> tuple[int, int]:
        """(devices per group, groups) of a collective, counted out."""
        printed = collective.to_string()
        mesh = re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", printed)
        if mesh:
            sizes = dict((name, int(size)) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh[1]))
            count = math.prod(sizes[name] for name in re.findall(r"'([^']+)'", mesh[2]))
            return count, math.prod(sizes.values()) // count
        iota = re.search(r"replica_groups=\[(\d+),(\d+)\]", printed)
        if iota:
            return int(iota[2]), int(iota[1])
        listed = re.search(r"replica_groups=\{\{([\d,]+)\}", printed)
        return len(listed[1].split(",")), 0

    def answer(self) -> dict:
        runs, todo, loops = {self.entry: 1}, [self.entry], []
        records = []
        while todo:
            name = todo.pop(0)
            schedule = list(self.computations[name].instructions())
            place = {instruction.name: at for at, instruction in enumerate(schedule)}
            carried = set()
            for instruction in schedule:
                if instruction.opcode == OP.kWhile:
                    inner = re.search(r"body=%([^\s,]+)", instruction.to_string())[1]
                    count = self.trips(instruction)
                    loops.append({"computation": inner, "trip_count": count})
                    runs[inner] = runs[name] * count
                    todo.append(inner)
                elif instruction.opcode in (OP.kConditional, OP.kCall):
                    raise SystemExit(f"{instruction.opcode} is not served")
                collective = self.communicates(instruction)
                if collective is None or instruction.name in carried:
                    continue
                records.append(self.record(instruction, collective, schedule, place, carried, name, runs[name]))
        return {"computations": len(re.findall(r"^(?:ENTRY )?%\S+ \(.*\{$", self.text, re.MULTILINE)),
                "instructions": len(re.findall(r"^\s+(?:ROOT )?%\S+ = ", self.text, re.MULTILINE)),
                "loops": loops, "collectives": sorted(records, key=lambda one: one["line"])}  # fmt: skip

    def record(self, instruction, collective, schedule, place, carried, name, runs) -> dict:
        kind, output = KINDS[collective.opcode], bytes_of(collective)
        size, _ = self.group(collective)
        between = None
        role = self.target(self.body(instruction)) if instruction.opcode == OP.kFusion else ""
        if instruction.opcode == OP.kAsyncStart or role == "Start":
            begin, done = self.done_of(instruction)
            inside = schedule[place[begin.name] + 1 : place[done.name]]
            if role:
                last = place[done.name]
                carried.update(i.name for i in schedule[: last + 1] if self.carries(i, instruction))
            total = [sum(column) for column in zip((0, 0, 0), *(self.work(i) for i in inside), strict=True)]
            free = [i for i in inside if i.opcode not in FREE]
            between = {"instructions": len(free), "matmuls": total[0], "unknown_kernels": total[1]}
            heavy = total[0] or total[1]
            category = "async_compute" if heavy else "async_light" if total[2] else "async_empty"
        else:
            category = "sync"
            if instruction.opcode == OP.kFusion:  # all-reduce and dynamic-slice: a reduce-scatter of the slice
                assert kind == "all-reduce"
                kind, output = "reduce-scatter", bytes_of(instruction)
        wire = {"all-gather": output * (size - 1) / size, "reduce-scatter": output * (size - 1),
                "all-reduce": 2 * output * (size - 1) / size}[kind]  # fmt: skip
        return {"computation": name, "name": instruction.name, "line": self.lines[instruction.name], "kind": kind,
                "class": category, "group_size": size, "output_bytes": output, "wire_bytes": int(wire),
                "executions_per_step": runs, "between": between}  # fmt: skip

    def carries(self, instruction, start) -> bool:
        """Whether a fusion holds the same collective as the start, by its channel."""
        if instruction.opcode != OP.kFusion or instruction.name == start.name:
            return False
        inner, first = self.communicates(instruction), self.communicates(start)
        channel = re.compile(r"channel_id=(\d+)")
        return inner is not None and channel.findall(inner.to_string()) == channel.findall(first.to_string())


def main(argv: list[str]) -> int:
    opener = gzip.open if argv[0].endswith(".gz") else open
    with opener(argv[0], "rt") as stream:
        print(json.dumps(Route(stream.read()).answer(), indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
