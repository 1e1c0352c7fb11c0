"""Read the configuration a MaxText run logged: its `Config param KEY: VALUE` lines, wherever they stand.

    I0317 09:59:16.236806 125344476638336 pyconfig.py:413] Config param adam_b1: 0.9
    [pod/alice-train-proc-0-0/main] INFO:maxtext.configs.pyconfig:Config param adam_b1: 0.9
    Config param mesh_axes: ['data', 'stage', 'fsdp', 'fsdp_tra
    nspose']                                      <- wrapped by a terminal, in the middle of a word

`read_configs` finds the lines whatever stands before them (also in the lines of a JSON log), joins wrapped
values, and puts the keys back into blocks: MaxText prints the keys of one configuration in sorted order, so
a key that is not greater than the one before it starts another block, and interleaved processes come apart.
Neighbours that share no key are one block after all: lines that somebody picked, in an order of his own. It
also reads the `config` of a bench result JSON and plain key=value text. A log is streamed: memory does not
grow with its size. Standard library only.
"""

from __future__ import annotations

import json
import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from bench_common import BenchError, decode, shown_name

MARKER = b"Config param"
CHUNK_BYTES = 4 * 2**20
GAP_BYTES = 64 * 2**10  # how much of the text after a marked line is kept to look for the rest of its value
LONGEST_LINE_BYTES = 2**20  # a longer line without a line end is cut: it is no log line
OTHER_FORMS_BYTES = 16 * 2**20  # a result JSON or a key=value file is far smaller
BLOCK_REACH_LINES = 50_000  # a key this far behind its block belongs to another one
NEVER_LOGGED = ("hf_access_token",)  # KEYS_NO_LOGGING of MaxText's pyconfig; a result JSON has it, masked
MOST_LINES_OF_A_VALUE = 400
NARROWEST_TERMINAL = 60  # columns; shorter lines are not taken for wrapped ones
NEIGHBOUR_LINES = 100  # between two parts of one configuration
MAX_INTERLEAVED = 64  # processes that nothing tells apart and whose lines are mixed
MAX_BLOCKS = 1024  # 128 hosts x 8 restarts; bounds the memory


@dataclass
class Block:
    """One configuration as one process logged it."""

    process: str  # what tells its process apart: pod, pid or thread; "" where the log says nothing
    first_line: int
    last_line: int
    last_key: str = ""
    values: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ConfigLog:
    """What one file holds.

    `rounds` are the configurations in time: several blocks in one round are several processes that logged
    the same initialisation, a second round is a second one (a restart, a second model).
    """

    source: str
    rounds: list[list[Block]]
    notes: list[str]


# --- lines ---------------------------------------------------------------------------------------


def marked_lines(stream: BinaryIO, head: bytes = b"") -> Iterator[tuple[int, bytes, bytes]]:
    """Yield (line number, line, the text after it up to the next marked line) for each marked line.

    Reads big pieces and searches them with bytes.find, so that other lines cost no Python loop. The
    text after a line is cut at GAP_BYTES; a line without its line end, at the end of the stream, is last.
    """
    rest, number, pending = head, 1, None
    while True:
        chunk = stream.read(CHUNK_BYTES)
        buffer = rest + chunk
        end = buffer.rfind(b"\n") + 1 if chunk else len(buffer)
        if chunk and len(buffer) - end > LONGEST_LINE_BYTES:
            end = len(buffer)
        position = counted = 0
        while (hit := buffer.find(MARKER, position, end)) >= 0:
            start = max(buffer.rfind(b"\n", position, hit) + 1, position)
            stop = buffer.find(b"\n", hit, end)
            stop = end if stop < 0 else stop + 1
            if pending:
                yield pending[0], pending[1], pending[2] + buffer[position:start][: GAP_BYTES - len(pending[2])]
            number += buffer.count(b"\n", counted, start)
            counted, position = start, stop
            pending = number, buffer[start:stop], b""
        if pending and len(pending[2]) < GAP_BYTES:
            gap = pending[2] + buffer[position : min(end, position + GAP_BYTES - len(pending[2]))]
            pending = pending[0], pending[1], gap
        number += buffer.count(b"\n", counted, end)
        rest = buffer[end:]
        if not chunk:
            break
    if pending:
        yield pending


# [pod/NAME/CONTAINER] of `kubectl logs --prefix`, a timestamp of `--timestamps`, `(Trainer pid=12, ip=..)` of ray
_OUTER = re.compile(
    r"\s*(?P<pod>\[pod/[^\]]+\])?\s*(?P<time>\d{4}-\d\d-\d\d[T ][\d:.,]+(?:Z|[+-]\d\d:?\d\d)?)?\s*"
    r"(?P<ray>\([^()]*\bpid=\d+[^()]*\))?\s?"
)
_GLOG = re.compile(r"[IWEF]\d{4} [\d:.]+\s+(?P<thread>\d+) \S+:\d+\] ?")
_LEVEL = re.compile(r"\[?(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\b")
_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_PARAM = re.compile(r"Config param (?P<key>[A-Za-z_][\w.]*) ?:(?: (?P<value>.*))?$", re.DOTALL)
_BRACKETS = ("(", "[", "{")
_FREE_TEXT = re.compile(r"(prompt|template)$")  # keys whose values may hold line ends
_CUT_IN_KEY = re.compile(r"Config param ?(?:[A-Za-z_][\w.]*)?$")


@dataclass
class _Entry:
    """A marked line, and what may still turn out to belong to its value."""

    line: int
    process: str
    key: str
    value: str
    width: int  # characters of the last line read so far
    tail: list[str]  # lines after it that may belong to the value
    bare: bool  # those lines carry no prefix at all, though the marked line does
    others: list[tuple[str, str]]  # (process, line) of what other processes wrote in between
    ended: bool  # the line has its line end
    wrapped_at: int = 0  # the terminal's width, where a bracket or a key goes on in the next line; else 0
    is_open: bool = False  # a bracket of the value is still open
    is_over: bool = False  # its process has written a log line since
    next_key: str = ""  # of the same process
    block: Block | None = None


def _clean(raw: bytes) -> str:
    text = raw.decode("utf-8", "replace").rstrip("\r\n")
    text = _ANSI.sub("", text) if "\x1b" in text else text
    return _message(text) if text.startswith("{") else text


def _message(line: str) -> str:
    """Return what a line of a JSON log says (`{"severity": "INFO", "message": "Config param ..."}`), else the line."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        return line
    texts = fields.values() if isinstance(fields, dict) else ()
    return next((text.rstrip() for text in texts if isinstance(text, str) and "Config param" in text), line)


def _entry(number: int, raw: bytes, gap: bytes) -> _Entry | None:
    line = _clean(raw)
    at = line.find("Config param")
    prefix, text = line[:at], line[at:]
    outer = _OUTER.match(prefix)
    process = _process(prefix, outer)
    tail, bare, others = _lines_after(gap, prefix, process) if gap else ([], False, [])
    width, wrapped_at = len(line), 0
    match = _PARAM.match(text)
    if match is None and tail and _CUT_IN_KEY.match(text):
        match, width, wrapped_at = _PARAM.match(text + tail[0]), len(tail[0]), len(line)
        tail = tail[1:]
    if match is None:
        return None
    entry = _Entry(number, process, match["key"], match["value"] or "", width, tail, bare, others, raw.endswith(b"\n"))
    entry.wrapped_at = wrapped_at
    _close(entry)
    return entry


def _close(entry: _Entry) -> None:
    """Give a bracketed value as many of the next lines as close its brackets; none if none do."""
    if entry.value[:1] not in _BRACKETS:
        return
    scanner = _Brackets()
    entry.is_open = scanner.open_after(entry.value)
    for count, line in enumerate(entry.tail if entry.is_open else (), start=1):
        if not scanner.open_after(line):
            entry.wrapped_at = entry.wrapped_at or entry.width
            entry.value += "".join(entry.tail[:count])
            entry.is_open = False
            break
    if not entry.is_open:
        entry.tail = []


def _process(prefix: str, outer: re.Match[str] | None) -> str:
    names = [outer[name].strip("[]()") for name in ("pod", "ray") if outer and outer[name]]
    glog = _GLOG.search(prefix)
    return ", ".join(names) or (f"thread {glog['thread']}" if glog else "")


def _lines_after(gap: bytes, prefix: str, process: str) -> tuple[list[str], bool, list[tuple[str, str]]]:
    """Return the lines after a marked one that may be the rest of its value.

    They stop at the first line that is a log line of its own. Lines of other processes, told by their
    prefix, are passed over and returned as well: (lines, whether all of them are bare, [(process, line)]).
    """
    lines: list[str] = []
    others: list[tuple[str, str]] = []
    bare, more = bool(prefix), True
    logger = bool(_GLOG.search(prefix) or _LEVEL.search(prefix))
    for raw in gap.split(b"\n")[:MOST_LINES_OF_A_VALUE]:
        line = _clean(raw)
        own = _OUTER.match(line)
        if own and (own["pod"] or own["time"] or own["ray"]):
            writer, line = _process(line, own), line[own.end() :]
            if writer != process and (own["pod"] or own["ray"]):
                others.append((writer, line))
                continue
        elif prefix and line.startswith(prefix):  # `# `, `[rank0]: `: every line of the paste or process has it
            more, bare, line = more and not logger, False, line[len(prefix) :]
        more = more and not _is_log_line(line)
        if more:
            lines.append(line)
    return lines, bare, others


def _is_log_line(line: str) -> bool:
    return not line.strip() or bool(_GLOG.match(line) or _LEVEL.match(line))


@dataclass
class _Brackets:
    """Follows the brackets of a Python value through its lines, quoted text aside."""

    depth: int = 0
    quote: str = ""
    skip: bool = False  # a backslash in a quote came last

    def open_after(self, text: str) -> bool:
        """Return whether a bracket or a quote is still open after this further text."""
        for char in text:
            if self.skip:
                self.skip = False
            elif self.quote:
                self.skip = char == "\\"
                self.quote = "" if char == self.quote else self.quote
            elif char in "'\"":
                self.quote = char
            elif char in "([{":
                self.depth += 1
            elif char in ")]}":
                self.depth -= 1
        return self.depth > 0 or bool(self.quote)


def _whole_value(entry: _Entry, widths: set[int], longest: int) -> tuple[str, int]:
    """Return an entry's value with the lines that belong to it, and how many lines between two keys do not.

    A line as wide as the terminal that wrapped other lines goes on in the next one. So does, between two
    keys, the longest line of a log, in the rest of a word: a terminal that showed a longer line whole would
    not have wrapped it. Else, in a log whose lines carry prefixes, bare lines between two keys are the
    further lines of a prompt or a template; after any other key they are what somebody else printed.

    Args:
      entry: its brackets, if any, are closed.
      widths: the widths of terminals that certainly wrapped lines of this log, in characters.
      longest: of all lines of the log that carry keys, in characters.
    """
    if entry.value[:1] in _BRACKETS:
        return entry.value.rstrip(), 0
    value, tail, width = entry.value, list(entry.tail), entry.width
    between = entry.next_key > entry.key
    while tail and (width in widths or (between and width == longest and _is_rest_of_word(tail[0], width))):
        width = len(tail[0])
        value += tail.pop(0)
    if tail and between and entry.bare and len(tail) < MOST_LINES_OF_A_VALUE and _FREE_TEXT.search(entry.key):
        value, tail = "\n".join([value, *tail]), []
    return value.rstrip() if entry.value else value.strip(), len(tail) if between else 0


def _is_rest_of_word(line: str, width: int) -> bool:
    """Return whether a line looks like what a terminal of this width wrapped in the middle of a word."""
    return width >= max(NARROWEST_TERMINAL, len(line)) and " " not in line


# --- blocks --------------------------------------------------------------------------------------


def _blocks(entries: Iterator[_Entry], source: str, notes: list[str]) -> tuple[list[Block], _Entry | None]:
    blocks: list[Block] = []
    pool: dict[str, str] = {}  # equal texts are kept once
    unfinished: list[_Entry] = []  # followed by lines that may belong to the value
    open_blocks: dict[str, deque[Block]] = {}
    latest: dict[str, _Entry] = {}  # of each process
    widths: set[int] = set()
    longest, entry = 0, None
    for entry in entries:
        if entry.process in latest:
            latest[entry.process].next_key = entry.key
        mine = open_blocks.setdefault(entry.process, deque(maxlen=MAX_INTERLEAVED))
        block = _block_of(entry, mine)
        if block is None:
            if len(blocks) == MAX_BLOCKS:
                raise BenchError(
                    f"more than {MAX_BLOCKS} configurations",
                    where=f"{source}:{entry.line}",
                    todo="cut the log to one run",
                )
            block = Block(entry.process, entry.line, entry.line)
            blocks.append(block)
            mine.append(block)
        block.last_key, block.last_line, text = entry.key, entry.line, entry.value.rstrip()
        block.values[pool.setdefault(entry.key, entry.key)] = pool.setdefault(text, text)
        entry.block, latest[entry.process] = block, entry
        longest = max(longest, entry.width)
        if entry.wrapped_at:
            widths.add(entry.wrapped_at)
        if entry.tail or entry.is_open:
            unfinished.append(entry)
        unfinished += _give(entry.others, latest)
    strays = _finish(unfinished, widths, longest)
    if strays:
        rest = f" (and {len(strays) - 1} more such places)" if len(strays) > 1 else ""
        notes.append(f"{source}:{strays[0]}: what follows this key is taken for no part of its value{rest}")
    return _joined(blocks), entry


def _give(lines: list[tuple[str, str]], latest: dict[str, _Entry]) -> list[_Entry]:
    """Give lines to the last entry of the process that wrote them; return the entries that had none before."""
    first = []
    for process, line in lines:
        entry = latest.get(process)
        if entry is None or entry.is_over:
            continue
        entry.is_over = _is_log_line(line) or len(entry.tail) == MOST_LINES_OF_A_VALUE
        if not entry.is_over:
            if not entry.tail and not entry.is_open:
                first.append(entry)
            entry.tail.append(line)
    return first


def _finish(unfinished: list[_Entry], widths: set[int], longest: int) -> list[int]:
    """Put whole values in place, now that the lines of other processes and all widths are known.

    Returns the numbers of the lines after which other lines, of no value, stand between two keys.
    """
    strays = []
    for entry in unfinished:
        _close(entry)
    widths = widths | {entry.wrapped_at for entry in unfinished if entry.wrapped_at}
    for entry in unfinished:
        entry.block.values[entry.key], left = _whole_value(entry, widths, longest)
        strays += [entry.line] if left else []
    return strays


def _joined(blocks: list[Block]) -> list[Block]:
    """Return the blocks, one for neighbours that share no key.

    Nobody logs half a configuration: they are lines that are not sorted, or one process's under several prefixes.
    """
    joined: list[Block] = []
    for block in sorted(blocks, key=lambda block: block.first_line):
        last = joined[-1] if joined else None
        near = last is not None and block.first_line - last.last_line <= NEIGHBOUR_LINES
        if near and last.values.keys().isdisjoint(block.values):
            last.values.update(block.values)
            last.last_line = max(last.last_line, block.last_line)
            last.process = last.process if last.process == block.process else ""
        else:
            joined.append(block)
    return joined


def _block_of(entry: _Entry, blocks: Iterable[Block]) -> Block | None:
    """Return the one of a process's open blocks that this key continues: whose last key is next before it."""
    fitting = [b for b in blocks if b.last_key < entry.key and entry.line - b.last_line <= BLOCK_REACH_LINES]
    return max(fitting, key=lambda block: (block.last_key, block.last_line), default=None)


def _rounds(blocks: list[Block]) -> list[list[Block]]:
    """Put blocks into rounds: the n-th configuration of every process, overlapping ones together."""
    rounds: list[list[Block]] = []
    for process in dict.fromkeys(block.process for block in blocks):
        index, reach = -1, -1
        for block in (b for b in blocks if b.process == process):
            if block.first_line > reach:
                index += 1
            reach = max(reach, block.last_line)
            while len(rounds) <= index:
                rounds.append([])
            rounds[index].append(block)
    return rounds


# --- files ---------------------------------------------------------------------------------------


def read_configs(path: str) -> ConfigLog:
    """Read the configurations of a MaxText log, a bench result JSON or a key=value file (`-`: stdin).

    Raises:
      BenchError: cannot be read, or holds no configuration; one line says what it is instead.
    """
    source = shown_name(path)
    try:
        if path == "-":
            return _read(sys.stdin.buffer, source)
        with open(path, "rb") as stream:
            return _read(stream, source)
    except OSError as error:
        raise BenchError(
            f"cannot read: {error.strerror}", where=path, todo="name a readable file, or - for stdin"
        ) from error


def _read(stream: BinaryIO, source: str) -> ConfigLog:
    head = stream.read(CHUNK_BYTES)
    if head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):
        head += stream.read(OTHER_FORMS_BYTES)
        values = _json_values(head, source)
        if values is not None:
            return _one_block(values, source)
    entries = (e for number, raw, gap in marked_lines(stream, head) if (e := _entry(number, raw, gap)))
    notes: list[str] = []
    blocks, last = _blocks(entries, source, notes)
    if not blocks:
        last_line = head.rstrip().rpartition(b"\n")[2]  # the driver's output ends with its result
        values = _json_values(last_line, source) if last_line.startswith(b"{") else None
        return _one_block(values or _key_values(head, source), source)
    if last and not last.ended:
        notes.append(f"{source}:{last.line}: the log ends inside this line; is the value of {last.key} whole?")
    return ConfigLog(source, _rounds(blocks), notes)


def _one_block(values: dict[str, str], source: str) -> ConfigLog:
    return ConfigLog(source, [[Block("", 1, 1, values=values)]], [])


def _json_values(data: bytes, source: str) -> dict[str, str] | None:
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return None  # a log that happens to start with a brace
    config = document.get("config") if isinstance(document, dict) else None
    if not isinstance(config, dict) or not config:
        raise BenchError("a JSON document without a config", where=source, todo="give a bench result (trainer-bench/1)")
    return {str(key): as_logged(value) for key, value in config.items() if key not in NEVER_LOGGED}


def as_logged(value: Any) -> str:
    """Return a JSON value as MaxText would log it: True, None, ['a', 1]."""
    return value if isinstance(value, str) else str(value)


_PAIR = re.compile(r"([A-Za-z_][\w.]*)=(.*)")
_PAIR_LINE = re.compile(r"(?:export\s+)?([A-Za-z_][\w.]*)\s*=\s*(.*)")


def _key_values(data: bytes, source: str) -> dict[str, str]:
    """Read `key=value` text: one pair a line, as in an env file or an ini file, or several without blanks in them."""
    nothing = BenchError(
        "no `Config param` line" if data.strip() else "an empty file",
        where=source,
        todo="give a MaxText log (log_config=true), a bench result JSON or a key=value file",
    )
    if b"\0" in data:
        raise BenchError("no `Config param` line in this binary file", where=source, todo="give the log as text")
    if len(data) >= CHUNK_BYTES or b"=" not in data:
        raise nothing
    values: dict[str, str] = {}
    for line in decode(data, source).split("\n"):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        pairs = [_PAIR.fullmatch(token) for token in line.split()]
        if not all(pairs):
            pairs = [_PAIR_LINE.fullmatch(line)]
        if not all(pairs):
            raise nothing
        values.update((pair[1], _unquoted(pair[2])) for pair in pairs)
    if not values:
        raise nothing
    return values


def _unquoted(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text
