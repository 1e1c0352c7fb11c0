"""Read HLO text: modules, computations and instructions, and the small languages inside an instruction.

`read_modules` makes one pass over the lines and keeps, per instruction, its name, opcode, text and line
number, nothing else; shapes, operands, attributes and replica groups are read from the text when they
are asked for, because a module of 50 MB has some 200,000 instructions and a question about overlap looks
closely at a few thousand. An instruction is

    [ROOT] [%]name = shape opcode(operands), attribute=value, ...

on one line as XLA prints it, or wrapped freely as people write tests; names come with and without `%`,
operands with and without their shapes. The opcode decides what an instruction is, never its name.
Standard library only, and bench_common for the one-line errors.
"""

from __future__ import annotations

import bisect
import re
import sys
from collections.abc import Iterator
from typing import NamedTuple

from bench_common import BenchError
from hlo_shapes import Array, Shape, read_shape

# `  ROOT %fusion.3 = (bf16[8,128]{1,0:T(8,128)(2,1)S(1)}, u32[]) fusion(%p.1), kind=kLoop, calls=%c` : the shape is
# one word, or a tuple in brackets; inside a tuple no blank is followed by a lower-case word and a bracket.
_INSTRUCTION = re.compile(
    r"[ \t]*(ROOT[ ]+)?%?([^\s=(){},]+)[ ]*=[ ]*(?:[^\s(]\S*+|\((?:[^)]*+\))+?)[ ]+([a-z][a-z0-9\-]*)\("
)
# A whole line of it as XLA prints it, which no other line continues: those end in an open bracket or a blank. It is
# tried on every line of a file, so it asks for no more than it takes to tell such a line from any other.
_PRINTED_LINE = re.compile(
    r"^ *+(?:ROOT )?+%?+([^ ]++) = (?:[^ (][^ ]*+|\((?:[^)\n]*+\))+?) ([a-z][a-z0-9\-]*+)\(.*+(?<![{(\[ ])\n",
    re.MULTILINE,
)
# `%body (p: (s32[], f32[4])) -> (s32[], f32[4]) {`, `ENTRY test {`, `wide.body {`
_HEADER_NAME = re.compile(r"[ \t]*(ENTRY[ \t]+)?%?([^\s=(){},\"]+)[ \t\n]*(?=[({])")
_MODULE = re.compile(r"HloModule[ \t]+([^\s,]+)")
_ASSIGNS = re.compile(r"[ \t]*(?:ROOT[ ]+)?%?[^\s=(){},\"]+[ ]+=[ ]")
_THREAD = re.compile(r"\bexecution_thread=\"([^\"]*)\"")
# Quantifiers are possessive, so that cut-off quotes and comments cost no more than whole ones.
_STRING_OR_BRACKET = re.compile(r"\"[^\"\\]*+(?:\\.[^\"\\]*+)*+(?:\"|\Z)|/\*[^*]*+\*/|[()\[\]{},]", re.DOTALL)
_COMMENT = re.compile(r"/\*[^*]*+\*/")
_MAX_WRAPPED_LINES = 400  # of one instruction in hand-written text, and
_MAX_HEADER_LINES = 20  # of a header: they bound the time on broken files
_MAX_DIGITS = 18  # a longer number is no size, count or position


def number(text: str) -> int | None:
    """Return a plain decimal number of sensible length, or None."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS else None


class Computation:
    """One computation: parallel lists, one entry per instruction, in the order of the text."""

    __slots__ = (
        "name",
        "entry",
        "thread",
        "line",
        "opcodes",
        "texts",
        "root",
        "closed",
        "extra_lines",
        "known_operands",
        "known_bodies",
        "known_names",
        "_index",
    )

    def __init__(self, name: str, entry: bool, line: int):
        self.name, self.entry = name, entry
        self.line = line  # of its header, 1-based
        self.thread = ""  # of `}, execution_thread="sparsecore"`; empty is the main thread
        self.opcodes: list[str] = []
        self.texts: list[str] = []
        self.root = -1
        self.closed = False
        self.extra_lines: list[int] = []  # a line that begins no instruction: how many instructions it follows
        self.known_operands: dict[int, Operands] = {}
        self.known_bodies: dict[int, list[Computation]] = {}  # what an instruction runs, see hlo_program
        self.known_names: list[str] = []
        self._index: dict[str, int] | None = None

    def __len__(self) -> int:
        return len(self.opcodes)

    def __bool__(self) -> bool:
        return True  # also without instructions

    @property
    def names(self) -> list[str]:
        """The names of the instructions, without `%`."""
        if len(self.known_names) != len(self.texts):
            match = _NAME.match
            self.known_names = [found[1] if (found := match(text)) else "" for text in self.texts]
        return self.known_names

    def index(self, name: str) -> int | None:
        """Return the position of the first instruction of this name, or None."""
        names = self.names
        if len(names) <= _FEW:
            return names.index(name) if name in names else None
        if self._index is None:
            self._index = dict(zip(names[::-1], range(len(names) - 1, -1, -1), strict=True))  # the first one wins
        return self._index.get(name)

    def line_of(self, at: int) -> int:
        """Return the line of instruction `at` in the file, 1-based."""
        return self.line + 1 + at + bisect.bisect_right(self.extra_lines, at)

    @property
    def root_index(self) -> int:
        """Position of the ROOT, else of the last instruction; -1 when there is none."""
        return self.root if self.root >= 0 else len(self.opcodes) - 1


_NAME = re.compile(r"[ \t]*(?:ROOT[ ]+)?%?([^\s=(){},]+)")
_FEW = 24  # names that are found sooner by looking through them than by making a dictionary first


class Module:
    """One HloModule of a file."""

    __slots__ = ("name", "line", "header", "computations", "by_name", "truncated", "counts")

    def __init__(self, name: str, line: int, header: str):
        self.name, self.line, self.header = name, line, header
        self.computations: list[Computation] = []
        self.by_name: dict[str, Computation] = {}
        self.truncated = False  # no ENTRY, no header, a computation that never closes, or a loop whose body is missing
        self.counts = {name: int(value) for name, value in _COUNTS.findall(header)}

    @property
    def scheduled(self) -> bool:
        """Whether the order of the text is the order of execution."""
        return bool(re.search(r"\bis_scheduled=true\b", self.header))

    @property
    def entry(self) -> Computation | None:
        return next((computation for computation in self.computations if computation.entry), None)

    def count(self, key: str) -> int | None:
        """Return `replica_count` or `num_partitions`: 1 when only the other is there, None when neither is."""
        return self.counts.get(key, 1) if self.counts else None


_COUNTS = re.compile(r"\b(replica_count|num_partitions)=(\d{1,18})\b")


def read_modules(text: str, source: str) -> list[Module]:
    """Read every module of a text.

    Args:
      text: HLO as XLA prints it or as written by hand; log lines before the first module are passed over.
      source: how messages name the input.

    Raises:
      BenchError: no HLO in it, or an instruction that cannot be read (named by line).
    """
    reader = _Reader(source)
    reader.run(text)
    modules = [module for module in reader.modules if module.computations or module.header]
    if not any(module.computations for module in modules):
        raise BenchError(
            "holds no HLO computation", where=source, todo="give scheduled HLO text: an XLA dump or compiled.as_text()"
        )
    for module in modules:
        open_left = any(not computation.closed for computation in module.computations)
        module.truncated = module.truncated or open_left or module.entry is None or not module.header
    return modules


class _Reader:
    """The line loop of `read_modules`: which computation is open, and what a line continues."""

    def __init__(self, source: str):
        self.source = source
        self.modules: list[Module] = []
        self.open: Computation | None = None
        self.pending: list[str] = []  # lines of an instruction or header that is not complete yet
        self.pending_line = 0
        self.wrapped: _Balance | None = None  # brackets of the last instruction, once lines continue it
        self.wrapped_lines = 0
        self.broken: Computation | None = None  # holds a bracket that never closes: look no further in it
        self.closers: list[int] = []  # lines that begin with a closing bracket
        self.careful_until = 0  # the line up to which bodies are read line by line

    def run(self, text: str) -> None:
        instruction = _INSTRUCTION.match
        lines = text.split("\n")
        del text
        self.closers = [at for at, line in enumerate(lines) if line[:1] == "}"]
        number, total = 0, len(lines)
        while number < total:
            line = lines[number]
            number += 1
            here = self.open
            if here is None or self.pending:
                if not line and not self.pending:
                    continue
                number = self._other(lines, number - 1)
                if self.open is not None and self.open is not here:
                    number = self._plain_body(self.open, lines, number)
                continue
            match = instruction(line)
            if match is None:
                number = self._other(lines, number - 1)
                continue
            is_root, _, opcode = match.groups()
            if is_root:
                here.root = len(here.opcodes)
            here.opcodes.append(sys.intern(opcode))
            here.texts.append(line)
            self.wrapped = None
            end = line[-1]
            if end in "{([ " or (end == '"' and line.count('"') & 1):
                if here is not self.broken:
                    number = self._until_balanced(lines, number)
        if self.open is None and self.modules:
            last = self.pending[0] if self.pending else next((line for line in reversed(lines) if line), "")
            if last.startswith(("%", "ENTRY ")):  # the text ends within a signature
                self.modules[-1].truncated = True

    def _plain_body(self, here: Computation, lines: list[str], at: int) -> int:
        """Read the body that begins at line `at` in one go when every line of it is an instruction, as XLA prints it.

        Returns the next line to read, which is `at` when the body needs to be read line by line.
        """
        if at < self.careful_until:
            return at
        place = bisect.bisect_left(self.closers, at)
        if place == len(self.closers):
            return at
        end = self.closers[place]
        body = lines[at:end]
        text = "\n".join([*body, ""])
        found = _PRINTED_LINE.findall(text)
        quoted = '"\n' in text and any(line.count('"') % 2 for line in body if line.endswith('"'))
        if len(found) != len(body) or not body or quoted:  # quoted: a text that goes on behind the line
            self.careful_until = end  # or each of many headers without an end would look as far
            return at
        names, opcodes = zip(*found, strict=True)
        here.texts, here.known_names, here.opcodes = body, list(names), list(map(sys.intern, opcodes))
        here.root = len(body) - 1
        while here.root >= 0 and not body[here.root].lstrip().startswith("ROOT "):
            here.root -= 1
        self.wrapped = None
        if lines[end] == "}" and self._last_is_closed(here):
            here.closed, self.open = True, None
            return end + 1
        return end

    def _other(self, lines: list[str], at: int) -> int:
        """Handle line `at`, which is not an instruction by itself; return the next line to read."""
        line, here = lines[at], self.open
        if here is None and not self.pending:
            if line[0] == "%" and line[-1] == "{" and ") -> " in line:  # `%body (p: f32[4]) -> f32[4] {`
                name, blank, rest = line.partition(" ")
                if blank and rest[0] == "(" and _NAME.fullmatch(name):
                    self._open(Computation(name[1:], False, at + 1))
                    return at + 1
        bare = line.strip()
        if bare.startswith("HloModule "):
            self._give_up_pending()
            return self._module(lines, at)
        if not bare or bare.startswith("//"):
            if here is not None:
                here.extra_lines.append(len(here.opcodes))
            return at + 1
        if here is None:
            self._outside(line, at)
        elif self.pending:
            self._pending_more(line)
        elif bare[0] == "}" and self._last_is_closed(here):
            here.closed, self.open = True, None
            thread = _THREAD.search(bare)
            here.thread = thread[1] if thread else ""
        elif bare[-1] == "{" and _header(line) and (self._last_is_closed(here) or _is_top_header(line)):
            self.open = None  # the one before was cut off
            self._outside(line, at)
        elif _ASSIGNS.match(line) and self._last_is_closed(here):
            self.pending, self.pending_line = [line], at + 1
        elif here.texts:
            return self._continue(here, lines, at)
        return at + 1

    def _continue(self, here: Computation, lines: list[str], at: int) -> int:
        """Line `at` continues the last instruction; return the next line to read."""
        if self._last_is_closed(here) or here is self.broken:
            if self.wrapped_lines < _MAX_WRAPPED_LINES:
                here.texts[-1] += "\n" + lines[at]
            self.wrapped_lines += 1
            self._balance(here).feed("\n" + lines[at])
            here.extra_lines.append(len(here.opcodes))
            return at + 1
        after = self._until_balanced(lines, at)
        if after > at:
            return after
        here.extra_lines.append(len(here.opcodes))
        return at + 1

    def _module(self, lines: list[str], at: int) -> int:
        header, first = [lines[at].strip()], at
        self.open = None
        at += 1
        while at < len(lines) and lines[at][:1] in (" ", "\t") and "=" in lines[at] and not _header(lines[at]):
            if len(header) > _MAX_WRAPPED_LINES:
                break
            header.append(lines[at].strip())
            at += 1
        text = " ".join(header)
        name = _MODULE.match(text)
        self.modules.append(Module(name[1] if name else "", first + 1, text))
        return at

    def _outside(self, line: str, at: int) -> None:
        """A line between computations: a header, part of one, a table row or noise."""
        text = "\n".join((*self.pending, line)) if self.pending else line
        header = _header(text)
        if header is not None:
            self.pending = []
            self._open(Computation(header[1], header[0], at + 1))
            return
        begins = _HEADER_NAME.match(text)
        wanted = begins is not None and " = " not in text and text.rstrip()[-1:] in ("(", ",", ")", "]", ">")
        self.pending = [*self.pending, line] if wanted and len(self.pending) < _MAX_HEADER_LINES else []

    def _open(self, computation: Computation) -> None:
        if not self.modules:
            self.modules.append(Module("", computation.line, ""))
        module = self.modules[-1]
        module.computations.append(computation)
        module.by_name.setdefault(computation.name, computation)
        self.open, self.wrapped = computation, None

    def _pending_more(self, line: str) -> None:
        """An instruction whose shape is wrapped over several lines."""
        here = self.open
        assert here is not None
        self.pending.append(line)
        text = " ".join(part.strip() for part in self.pending)
        found = _INSTRUCTION.match(text) if not _ASSIGNS.match(line) else None
        if found is not None:
            if found[1]:
                here.root = len(here.opcodes)
            here.opcodes.append(sys.intern(found[3]))
            here.texts.append(text)
            here.extra_lines += [len(here.opcodes)] * (len(self.pending) - 1)
            self.pending, self.wrapped = [], None
        elif len(self.pending) > _MAX_WRAPPED_LINES or line.strip() == "}" or _ASSIGNS.match(line):
            self._give_up_pending()

    def _give_up_pending(self) -> None:
        if self.pending and self.open is not None:
            raise BenchError(
                f"cannot read this instruction: {self.pending[0].strip()[:60]}",
                where=f"{self.source}:{self.pending_line}",
                todo="give HLO text as XLA prints it",
            )
        self.pending = []

    def _until_balanced(self, lines: list[str], at: int) -> int:
        """Join lines to the last instruction until its brackets and quotes close; return the next line to read.

        A bracket that never closes swallows nothing: reading goes on behind the line that opened it.
        """
        here = self.open
        assert here is not None
        state = self._balance(here)
        parts, begin = [here.texts[-1]], at
        while not state.closed and at < len(lines) and not _is_top_header(lines[at]):
            state.feed("\n" + lines[at])
            parts.append(lines[at])
            at += 1
        if not state.closed:
            self.broken, self.wrapped = here, None
            return begin
        here.texts[-1] = "\n".join(parts)
        here.extra_lines += [len(here.opcodes)] * (at - begin)
        return at

    def _balance(self, here: Computation) -> _Balance:
        """Return the brackets of the last instruction as read so far."""
        if self.wrapped is None:
            self.wrapped, self.wrapped_lines = _Balance(), 0
            self.wrapped.feed(here.texts[-1])
        return self.wrapped

    def _last_is_closed(self, here: Computation) -> bool:
        if not here.texts or here is self.broken:
            return True
        if self.wrapped is None:
            text = here.texts[-1]
            if text.count("{") == text.count("}") and text.count("(") == text.count(")"):
                return True
        return self._balance(here).closed


def _header(text: str) -> tuple[bool, str] | None:
    """Return (is the entry, name) when a text opens a computation, else None."""
    bare = text.rstrip()
    if bare[-1:] != "{":
        return None
    match = _HEADER_NAME.match(bare)
    if match is None or match[2] in ("ROOT", "HloModule"):
        return None
    rest = bare[match.end() : -1].strip()
    return (bool(match[1]), match[2]) if not rest or rest[0] == "(" and "->" in rest else None


def _is_top_header(line: str) -> bool:
    """Whether a line begins a module or computation even when a bracket before it is still open."""
    if line[:1] in (" ", "\t", "}", ""):
        return False
    return line.startswith("HloModule ") or (_header(line) is not None and ("->" in line or line.startswith("ENTRY ")))


class _Balance:
    """Brackets and quotes seen so far in the pieces of one instruction."""

    def __init__(self) -> None:
        self.depth, self.quoted = 0, False

    def feed(self, piece: str) -> None:
        position, size = 0, len(piece)
        while position < size:
            if self.quoted:
                end = _QUOTED.match(piece, position).end()  # type: ignore[union-attr]  # matches the empty string
                self.quoted = piece[end : end + 1] != '"'
                position = end + 1  # behind the quote, or behind a backslash that ends the piece
                continue
            match = _QUOTE_OR_BRACKET.search(piece, position)
            if match is None:
                return
            position, char = match.end(), match[0]
            if char == '"':
                self.quoted = True
            else:
                self.depth += 1 if char in "([{" else -1

    @property
    def closed(self) -> bool:
        return self.depth <= 0 and not self.quoted


_QUOTED = re.compile(r"[^\"\\]*+(?:\\.[^\"\\]*+)*+", re.DOTALL)
_QUOTE_OR_BRACKET = re.compile(r"[\"()\[\]{}]")


def shape_text(computation: Computation, at: int) -> str:
    """Return the shape of instruction `at` as printed."""
    text = computation.texts[at]
    return text[text.index("=") + 1 : text.index(f" {computation.opcodes[at]}(")].strip()


def _operands_begin(computation: Computation, at: int) -> int:
    """Return where the operands of instruction `at` begin, behind the bracket."""
    opcode = computation.opcodes[at]
    return computation.texts[at].index(f" {opcode}(") + len(opcode) + 2


def operands_end(text: str, begin: int) -> int:
    """Return the position behind the bracket that closes the operands which begin at `begin`."""
    depth = 1
    for match in _STRING_OR_BRACKET.finditer(text, begin):
        char = match[0]
        if char in ("(", "[", "{"):
            depth += 1
        elif char in (")", "]", "}"):
            depth -= 1
            if not depth:
                return match.end()
    return len(text)


def _pieces(text: str, begin: int, end: int) -> Iterator[str]:
    """Yield the parts of text[begin:end] between its commas outside brackets and quotes."""
    depth, start = 0, begin
    for match in _STRING_OR_BRACKET.finditer(text, begin, end):
        char = match[0]
        if char in ("(", "[", "{"):
            depth += 1
        elif char in (")", "]", "}"):
            depth -= 1
        elif char == "," and depth <= 0:
            yield text[start : match.start()]
            start = match.end()
    yield text[start:end]


def header_pieces(module: Module) -> list[str]:
    """Return what a module's first line says behind its name, such as `num_partitions=8`, in order."""
    return [piece.strip() for piece in _pieces(module.header, 0, len(module.header))][1:]


class Ref(NamedTuple):
    """An operand: an instruction's name, and the element for a folded `%tuple.3#1`."""

    name: str
    element: int | None


class Operands:
    """The operands of an instruction, read one by one when they are asked for: loops carry hundreds of them."""

    __slots__ = ("words",)

    def __init__(self, words: list[str]):
        self.words = words

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, place: int) -> Ref:
        word = self.words[place]
        if "/*" in word:
            word = word.rpartition("*/")[2]
        name, _, element = word.strip().removeprefix("%").partition("#")
        return Ref(name, number(element) if element else None)


def operands(computation: Computation, at: int) -> Operands:
    """Return the operands of instruction `at`, whether they are printed with their shapes or not."""
    found = computation.known_operands.get(at)
    if found is None:
        found = computation.known_operands[at] = Operands(_operand_words(computation, at))
    return found


def _operand_words(computation: Computation, at: int) -> list[str]:
    text, begin = computation.texts[at], _operands_begin(computation, at)
    end = text.find(")", begin)
    inside = text[begin:end] if end >= 0 else text[begin:]
    with_shapes = "[" in inside or "(" in inside or "{" in inside or '"' in inside
    if not with_shapes and ("/*" not in inside or inside.count("/*") == inside.count("/*index=")):
        return inside.split(",") if inside.strip() else []
    pieces = _pieces(text, begin, operands_end(text, begin) - 1)
    words = [(_COMMENT.sub(" ", piece).split() or [""])[-1] for piece in pieces]
    return [word for word in words if word]


_INDEX = re.compile(r"\), index=(\d+)")


def element_index(computation: Computation, at: int) -> int | None:
    """Return the `index=` of a get-tuple-element."""
    found = _INDEX.search(computation.texts[at])
    return number(found[1] if found else attributes(computation, at).get("index", ""))


def literal(computation: Computation, at: int) -> str:
    """Return what stands between the brackets of `constant(4)` or `parameter(0)`."""
    text, begin = computation.texts[at], _operands_begin(computation, at)
    return text[begin : operands_end(text, begin) - 1].strip()


def attributes(computation: Computation, at: int) -> dict[str, str]:
    """Return the attributes behind the operands of instruction `at`, as printed."""
    text = computation.texts[at]
    begin = operands_end(text, _operands_begin(computation, at))
    found: dict[str, str] = {}
    last = ""
    for piece in _pieces(text, begin, len(text)):
        key, equals, value = piece.partition("=")
        key = key.strip()
        if key == "device_ids" and last:  # belongs to the mesh before: mesh['x'=2], device_ids=(..) {'x'}
            found[last] += "," + piece
        elif equals:
            found.setdefault(key, value.strip())
            last = key
    return found


def attribute(computation: Computation, at: int, key: str) -> str:
    """Return one attribute of instruction `at` as printed, empty when it has none."""
    text = computation.texts[at]
    mark = f" {key}="
    place = text.find(mark)
    if place < 0:
        return attributes(computation, at).get(key, "") if f"{key}=" in text else ""
    if text[place - 1] != "," or text.find('"', 0, place) >= 0:
        return attributes(computation, at).get(key, "")  # it may stand inside a quoted text or another attribute
    value = next(_pieces(text, place + len(mark), len(text)))
    after = place + len(mark) + len(value)
    if text.startswith(", device_ids=", after):
        return attributes(computation, at).get(key, "")
    return value.strip()


CALL_KEYS = (
    "calls",
    "to_apply",
    "body",
    "condition",
    "branch_computations",
    "true_computation",
    "false_computation",
    "called_computations",
)
_REFERENCE = re.compile(r"%?([^\s,{}%]+)")


def called(computation: Computation, at: int, module: Module) -> dict[str, list[Computation]]:
    """Return the computations that instruction `at` names, by attribute; inline ones are made on the way.

    Where a loop, branch, call or start names one that is not in the text, the module is marked as truncated.
    """
    found: dict[str, list[Computation]] = {}
    for key, value in attributes(computation, at).items():
        if key not in CALL_KEYS:
            continue
        if value.startswith("{") and " = " in value:
            found[key] = [inline_computation(value, computation, at)]
            continue
        names = _REFERENCE.findall(value)
        found[key] = [module.by_name[name] for name in names if name in module.by_name]
        if len(found[key]) < len(names) and computation.opcodes[at] in _RUNS:
            module.truncated = True
    return found


_RUNS = frozenset("while conditional call call-start async-start custom-call-start".split())


_INLINE_SPLIT = re.compile(r"(?:^|[ \t\n])(ROOT[ ]+)?%?([^\s=(){},]+)[ ]*=[ ]+(?=[(a-z])")


def inline_computation(value: str, outer: Computation, at: int) -> Computation:
    """Return the computation written inside an attribute: `to_apply={ a = f32[] parameter(0) ... }`."""
    made = Computation(f"{outer.names[at]}.inline", False, outer.line_of(at))
    body = value.strip()[1:-1]
    starts = [match.start() for match in _INLINE_SPLIT.finditer(body)]
    for begin, end in zip(starts, [*starts[1:], len(body)], strict=True):
        text = body[begin:end].strip()
        found = _INSTRUCTION.match(text)
        if found is not None:
            if found[1]:
                made.root = len(made.opcodes)
            made.opcodes.append(found[3])
            made.texts.append(text)
    made.closed = True
    return made


def shape_of(computation: Computation, at: int) -> Shape:
    """Return the shape of instruction `at`."""
    return read_shape(shape_text(computation, at))


def shape_of_ref(computation: Computation, ref: Ref) -> Shape | None:
    """Return the shape of an operand, of one element for `%x#3`; None when it is not in the computation."""
    at = computation.index(ref.name)
    if at is None:
        return None
    shape = shape_of(computation, at)
    if ref.element is None:
        return shape
    if isinstance(shape, Array) or not 0 <= ref.element < len(shape):
        return None
    return shape[ref.element]
