"""Read the configuration a MaxText run logged: its `Config param KEY: VALUE` lines, wherever they stand.

    I0317 09:59:16.236806 125344476638336 pyconfig.py:413] Config param adam_b1: 0.9
    [pod/alice-train-proc-0-0/main] INFO:maxtext.configs.pyconfig:Config param adam_b1: 0.9
    Config param mesh_axes: ['data', 'stage', 'fsdp', 'fsdp_tra
    nspose']                                      <- wrapped by a terminal, in the middle of a word

`read_configs` finds the lines whatever stands before them, joins wrapped values, and puts the keys back
into blocks: MaxText prints the keys of one configuration in sorted order, so a key that is not greater
than the one before it starts another block, and interleaved processes come apart. It also reads the
`config` of a bench result JSON and plain key=value text. A log is streamed: memory does not grow with its size.
Standard library only.
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
    cut_key: str | None = None  # the log ends inside this key's line


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
_CUT_IN_KEY = re.compile(r"Config param ?(?:[A-Za-z_][\w.]*)?$")


@dataclass(frozen=True)
class _Entry:
    line: int
    process: str
    key: str
    value: str
    width: int  # of the last line read so far
    wrapped_at: int  # the terminal's width, where a bracket or a key goes on in the next line; else 0
    tail: tuple[str, ...]  # lines after it that carry no log prefix, where they may belong to the value
    prefixed: bool  # the marked line itself carried a prefix
    ended: bool  # the line has its line end


def _clean(raw: bytes) -> str:
    text = raw.decode("utf-8", "replace").rstrip("\r\n")
    return _ANSI.sub("", text) if "\x1b" in text else text


def _entry(number: int, raw: bytes, gap: bytes) -> _Entry | None:
    line = _clean(raw)
    at = line.find("Config param")
    prefix, text = line[:at], line[at:]
    outer = _OUTER.match(prefix)
    tail = _tail(gap, outer) if gap else []
    width, wrapped_at = len(line), 0
    match = _PARAM.match(text)
    if match is None and tail and _CUT_IN_KEY.match(text):
        match, width, wrapped_at = _PARAM.match(text + tail[0]), len(tail[0]), len(line)
        tail = tail[1:]
    if match is None:
        return None
    value = match["value"] or ""
    if value[:1] and value[0] in "([{":
        closed = _closed(value, tail)
        wrapped_at = wrapped_at or (len(line) if len(closed) > len(value) else 0)
        value, tail = closed, []
    process, ended = _process(prefix, outer), raw.endswith(b"\n")
    return _Entry(number, process, match["key"], value.rstrip(), width, wrapped_at, tuple(tail), bool(prefix), ended)


def _closed(value: str, tail: list[str]) -> str:
    """Return a bracketed value with as many of the next lines as close its brackets; itself if none do."""
    if not _open_brackets(value):
        return value
    for count in range(1, len(tail) + 1):
        joined = value + "".join(tail[:count])
        if not _open_brackets(joined):
            return joined
    return value


def _process(prefix: str, outer: re.Match[str] | None) -> str:
    names = [outer[name].strip("[]()") for name in ("pod", "ray") if outer and outer[name]]
    glog = _GLOG.search(prefix)
    return ", ".join(names) or (f"thread {glog['thread']}" if glog else "")


def _tail(gap: bytes, outer: re.Match[str] | None) -> list[str]:
    """Return the lines at the start of `gap` that carry no log prefix of their own: the rest of a value."""
    lines = []
    for raw in gap.split(b"\n")[:400]:
        line = _clean(raw)
        own = _OUTER.match(line)
        if own and (own["pod"] or own["time"] or own["ray"]):
            if outer is None or own["pod"] != outer["pod"] or own["ray"] != outer["ray"]:
                break
            line = line[own.end() :]
        if not line.strip() or _GLOG.match(line) or _LEVEL.match(line):
            break
        lines.append(line)
    return lines


def _open_brackets(text: str) -> bool:
    """Return whether a bracket of a Python value is still open at the end, quoted text aside."""
    depth, quote, skip = 0, "", False
    for char in text:
        if skip:
            skip = False
        elif quote:
            skip = char == "\\"
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
    return depth > 0 or bool(quote)


def _whole_value(entry: _Entry, following: _Entry | None, widths: set[int]) -> str:
    """Return an entry's value with the lines that belong to it.

    A line as wide as the terminal that wrapped other lines goes on in the next one. In a log whose
    lines carry prefixes, bare lines between two keys of one process are a value of several lines.
    """
    value, tail, width = entry.value, list(entry.tail), entry.width
    while tail and width in widths:
        width = len(tail[0])
        value += tail.pop(0)
    between = following and following.process == entry.process and following.key > entry.key
    if tail and between and entry.prefixed and following.prefixed and len(tail) < 400:
        value = "\n".join([value, *tail])
    return value.rstrip() if entry.value else value.strip()


# --- blocks --------------------------------------------------------------------------------------


def _blocks(entries: Iterator[_Entry], source: str) -> tuple[list[Block], _Entry | None]:
    blocks: list[Block] = []
    last = None
    pool: dict[str, str] = {}  # equal texts are kept once
    waiting: list[tuple[Block, _Entry, _Entry | None]] = []
    open_blocks: dict[str, deque[Block]] = {}
    widths: set[int] = set()
    for entry in entries:
        if waiting and waiting[-1][2] is None:
            waiting[-1] = (waiting[-1][0], waiting[-1][1], entry)
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
        block.last_key, block.last_line = entry.key, entry.line
        block.values[pool.setdefault(entry.key, entry.key)] = pool.setdefault(entry.value, entry.value)
        if entry.wrapped_at:
            widths.add(entry.wrapped_at)
        if entry.tail:
            waiting.append((block, entry, None))
        last = entry
    for block, entry, following in waiting:
        block.values[entry.key] = _whole_value(entry, following, widths)
    return blocks, last


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
    blocks, last = _blocks(entries, source)
    if not blocks:
        last_line = head.rstrip().rpartition(b"\n")[2]  # the driver's output ends with its result
        values = _json_values(last_line, source) if last_line.startswith(b"{") else None
        return _one_block(values or _key_values(head, source), source)
    notes = []
    cut = last.key if last and not last.ended else None
    if cut:
        notes.append(f"{source}:{last.line}: the log ends inside this line; is the value of {cut} whole?")
    return ConfigLog(source, _rounds(blocks), notes, cut)


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


def _key_values(data: bytes, source: str) -> dict[str, str]:
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
        pairs = pairs if all(pairs) else [_PAIR.fullmatch(line)]
        if not all(pairs):
            raise nothing
        values.update((pair[1], pair[2]) for pair in pairs)
    if not values:
        raise nothing
    return values
