"""Read launch renders: what a Tunix launcher prints under DRY_RUN=true, and the bench JobSet made of it.

`read_render` finds the Kubernetes objects in a stream full of log lines, `clients` takes apart the
container that runs a Python program (its assignments, program and flags, word by word), and a few
small functions read the formats inside it: shell words, the kubelet's `$(NAME)`, flags, key=value
lists. Reading only: what a bench changes is in render_edit.py. Standard library and PyYAML.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from bench_common import BenchError, mask

MAX_DEPTH = 100  # of nesting; a JobSet has some 20
MAX_RENDER_BYTES = 16 * 2**20  # a launch render is some 50 KB; beyond this it is something else


class Document(NamedTuple):
    """One Kubernetes object of a render."""

    data: dict[str, Any]
    source: str  # how messages name the input
    line: int  # 1-based line of its apiVersion in the input

    @property
    def kind(self) -> str:
        return str(self.data.get("kind", ""))

    @property
    def name(self) -> str:
        metadata = self.data.get("metadata")
        return str(metadata.get("name", "")) if isinstance(metadata, dict) else ""

    @property
    def where(self) -> str:
        return f"{self.source}:{self.line}"


class Render(NamedTuple):
    """The objects of one stream in order, and what was passed over on the way (for stderr)."""

    documents: list[Document]
    notes: list[str]
    ended: bool = True  # the last line has its line break; a stream cut short in a line has not


_SEPARATOR = re.compile(r"---([ \t]+#.*|[ \t]*)$")
_START = re.compile(r"(apiVersion|kind)[ \t]*:")
# Top-level keys of the kinds of object that launchers print or that a capture may hold beside them.
_TOP_LEVEL = re.compile(
    r"(apiVersion|kind|metadata|spec|data|stringData|type|rules|subjects|roleRef|secrets|status)[ \t]*:"
)
_OPEN = re.compile(r"^[ \t]*\([ \t]*$", re.MULTILINE)
_CLOSE = re.compile(r"^[ \t]*\)[ \t]*&[ \t]*PID=\$!", re.MULTILINE)


def read_render(text: str, source: str) -> Render:
    """Read every Kubernetes object of a launcher's output, passing over what is not YAML.

    Launchers print log lines before, between and inside the documents, and captures made with
    `2>&1` hold more. Each piece between `---` lines starts at its first `apiVersion:` in column 0;
    column-0 lines that are no top-level key of a Kubernetes object are passed over with a note; each
    piece is parsed on its own.

    Raises:
      BenchError: a piece is not YAML or was cut short, with file and line; a line break inside a
        start-up command; or no object at all.
    """
    documents: list[Document] = []
    notes: list[str] = []
    for first_line, lines in _pieces(text):
        document = _read_piece(lines, first_line, source, notes)
        if document is not None:
            documents.append(document)
    if not documents:
        raise BenchError(
            "no Kubernetes object in this input", where=source, todo="give the launcher's DRY_RUN=true output"
        )
    return Render(documents, notes, text.endswith("\n"))


def _pieces(text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield (first line number, lines) between separators; a second `apiVersion:` starts a new piece too."""
    start, lines, has_object = 1, [], False
    for number, line in enumerate(text.split("\n"), start=1):
        if _SEPARATOR.match(line):
            yield start, lines
            start, lines, has_object = number + 1, [], False
            continue
        if line.startswith("apiVersion:"):
            if has_object:
                yield start, lines
                start, lines = number, []
            has_object = True
        lines.append(line)
    yield start, lines


def _read_piece(lines: list[str], first_line: int, source: str, notes: list[str]) -> Document | None:
    begin = next((i for i, line in enumerate(lines) if _START.match(line)), None)
    if begin is None:
        text = [(first_line + i, line) for i, line in enumerate(lines) if line.strip() and not line.startswith("#")]
        if text:
            notes.append(
                f"{source}:{text[0][0]}: {len(text)} line(s) without an object passed over: {_short(text[0][1])}"
            )
        elif first_line > 1:
            notes.append(f"{source}:{first_line}: a document without content; did the launcher's generator fail?")
        return None
    for i, line in enumerate(lines[:begin]):
        if line.strip() and not line.startswith("#"):
            notes.append(f"{source}:{first_line + i}: log line passed over: {_short(line)}")
    kept = _object_lines(lines[begin:], first_line + begin, source, notes)
    data = _parse_yaml("\n".join(kept) + "\n", source, first_line + begin, notes)
    return Document(data, source, first_line + begin)


def _object_lines(lines: list[str], first_line: int, source: str, notes: list[str]) -> list[str]:
    """Return the lines with those that cannot belong to the object made empty, so that numbers stay right."""
    kept, in_command, in_traceback = [], False, False
    for number, line in enumerate(lines, start=first_line):
        stray = bool(line) and line[0] not in " \t#" and not _TOP_LEVEL.match(line)
        stray = stray and not re.match(r"-(\s|$)", line)  # an item of a list in column 0
        if stray and in_command:
            raise BenchError(
                f"a line break inside the start-up command, before {_short(line)!r}",
                where=f"{source}:{number}",
                todo="a flag's value holds a newline: mend the launcher's variable and capture the dry run again",
            )
        if "(" in line or ")" in line:
            in_command = _OPEN.match(line) is not None or (in_command and not line.lstrip().startswith(")"))
        in_traceback = line.startswith("Traceback (") or (in_traceback and line.startswith(" "))
        if stray:
            notes.append(f"{source}:{number}: line inside a document passed over: {_short(line)}")
        kept.append("" if stray or in_traceback else line)
    return kept


def _short(line: str) -> str:
    """Return a line of the input for a message: cut, and with the values of secrets masked."""
    masked = re.sub(r"(?<![\w.-])([\w.-]+)([=:]\s*)(\S+)", lambda m: m[1] + m[2] + mask(m[1], m[3]), line.strip())
    return masked if len(masked) <= 72 else masked[:69] + "..."


def _parse_yaml(text: str, source: str, first_line: int, notes: list[str]) -> dict[str, Any]:
    import yaml

    loader = _loader_class()(text)
    try:
        node = loader.get_single_node()
        problem = _check_nodes(node, lambda key, line: notes.append(
            f"{source}:{first_line + line}: duplicate key {key!r}, the last one counts"
        ))  # fmt: skip
        if problem:
            raise BenchError(problem[0], where=f"{source}:{first_line + problem[1]}", todo="write the object out")
        data = loader.construct_document(node) if node is not None else None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        last = text.rstrip().count("\n")  # an end that is missing is reported after it
        line = first_line + (min(mark.line, last) if mark else 0)
        problem = getattr(error, "problem", None) or str(error)
        raise BenchError(
            f"not YAML: {problem}", where=f"{source}:{line}", todo="was it cut short? capture the dry run again"
        ) from error
    except (RecursionError, ValueError) as error:  # ValueError: a number or a character out of range
        raise BenchError(
            f"not an object of Kubernetes: {type(error).__name__}",
            where=f"{source}:{first_line}",
            todo="capture the dry run again",
        ) from error
    finally:
        loader.dispose()
    if not isinstance(data, dict) or not isinstance(data.get("kind"), str):
        raise BenchError("an object without a kind", where=f"{source}:{first_line}", todo="was the render cut short?")
    return data


def _check_nodes(root: Any, on_duplicate: Callable[[str, int], None]) -> tuple[str, int] | None:
    """Report duplicate keys, and return (problem, line) where there is an alias (it could grow without bound)."""
    seen, stack = set(), [(root, 0)]
    while stack:
        node, depth = stack.pop()
        if node is None or isinstance(node.value, str):
            continue
        if id(node) in seen:
            return "a YAML alias, which no launcher prints", node.start_mark.line
        if depth > MAX_DEPTH:
            return "nested too deeply", node.start_mark.line
        seen.add(id(node))
        if node.id == "sequence":
            stack.extend((item, depth + 1) for item in reversed(node.value))
            continue
        keys = set()
        for key, _ in node.value:
            if isinstance(key.value, str) and key.value in keys:
                on_duplicate(key.value, key.start_mark.line)
            elif isinstance(key.value, str):
                keys.add(key.value)
        stack.extend((part, depth + 1) for pair in reversed(node.value) for part in pair)
    return None


def _loader_class() -> type:
    """Return a safe loader, the C one where it is built in, that takes dates and `1:30` for strings as Go does."""
    import yaml

    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        yaml_implicit_resolvers = {
            first: [
                (tag, _NO_COLON[tag] if tag in _NO_COLON else pattern)
                for tag, pattern in resolvers
                if tag != "tag:yaml.org,2002:timestamp"
            ]
            for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

    return Loader


# PyYAML's own patterns for numbers, without the base-60 ones of YAML 1.1.
_NO_COLON = {
    "tag:yaml.org,2002:int": re.compile(r"[-+]?(?:0b[01_]+|0x[0-9a-fA-F_]+|0[0-7_]+|0|[1-9][0-9_]*)$"),
    "tag:yaml.org,2002:float": re.compile(
        r"(?:[-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+][0-9]+)?|\.[0-9][0-9_]*(?:[eE][-+][0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
    ),
}


# --- the client: the container of a document that runs a Python program ------------------------

RUNTIME_MODULE = "tunix.experimental.distributed.runtime.main"
TRAINER_MAIN = "run_trainer_node.main"  # the end of --process_main; its package moved between versions
MOCK_TRAINER_MAIN = "run_mock_trainer_node.main"
HEREDOC_MARKER = "BENCH_DRIVER_EOF"
DRIVER_FILE = "bench_driver.py"
ARCHIVE_FILE = "modules.json.bz2"  # where the files of a bench are too long to be written out


class Word(NamedTuple):
    """One word of a shell command that stands in a container's `command`."""

    raw: str  # as written, quotes and all
    text: str  # without the quotes
    live: bool = False  # bash or the kubelet changes it when the pod runs: `$X`, `$(X)`, a backquote
    bare: bool = False  # one such stands outside quotes, or a `{a,b}`: bash may make several words of it
    operator: bool = False  # `&&`, `;`, `|`, `(` ... rather than a word

    @property
    def value(self) -> str:
        """What the program gets, but for what is live: the kubelet makes `$` of `$$`."""
        return kube_expand(self.text, {})


class Client(NamedTuple):
    """What a client container runs, taken apart.

    `script` is the `bash -c` string. Its start-up command stands between a line `(` and a line
    `) & PID=$!`: `before` and `after` are the script around it. `assignments` and `argv` keep order and
    duplicates (the last one wins, in bash as in argparse).
    """

    container: dict[str, Any]
    path: tuple[str | int, ...]  # of the container in the document
    script: str
    before: str
    startup: str
    after: str
    assignments: list[tuple[str, Word]]  # name, and its word whose value is what follows the `=`
    program: list[Word]  # ["python", "-m", RUNTIME_MODULE] or ["python", ".../bench_driver.py"]
    argv: list[Word]
    sources: dict[str, str] = {}  # file name -> text of embedded heredocs

    @property
    def env(self) -> dict[str, str]:
        """The assignments as python sees them, the last one of a name winning."""
        return {name: word.value for name, word in self.assignments}

    @property
    def flags(self) -> dict[str, str | None]:
        """The argv as argparse sees it, the last one winning; None for a bare flag."""
        return dict(flag_items([word.value for word in self.argv]))

    @property
    def is_bench(self) -> bool:
        return self.program[-1].value.endswith(DRIVER_FILE)

    @property
    def role(self) -> str:
        """`trainer`, `mock_trainer`, `orchestrator`, `bench`, or what else its process_main is."""
        return script_role(self.script)

    def carried_argv(self, name: str) -> list[str]:
        """Return the argv that a bench carries in TRAINER_ARGV or ORCH_ARGV; words that are live as written.

        Raises:
          BenchError: the assignment's quotes do not close.
        """
        live = {m[1]: m[2] for m in _LIVE_WORD.finditer(self.before)}
        try:
            words = shlex.split(self.env.get(name, ""))
        except ValueError as error:
            raise BenchError(f"{name} is no shell words: {error}", todo="was the render edited?") from error
        return [
            shell_words(live[m[1]])[0].value if (m := _LIVE_USE.fullmatch(w)) and m[1] in live else w for w in words
        ]


_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_HEREDOC = re.compile(
    rf"^(?:cat|base64 -d) > \"\$BENCH_DIR/([\w.-]+)\" <<'({HEREDOC_MARKER}\w*)'\n(.*?)^\2$", re.MULTILINE | re.DOTALL
)
_LIVE_WORD = re.compile(r"^(BENCH_LIVE_[0-9]+)=(.*)$", re.MULTILINE)
_LIVE_USE = re.compile(r"\$\{(BENCH_LIVE_[0-9]+)@Q\}")
_PROCESS_MAIN = re.compile(r"--process_main=[\"']?([\w.]+)")


def script_role(script: str) -> str:
    """Return what a client script runs, without taking it apart.

    `trainer`, `mock_trainer`, `orchestrator` (the one process that others discover), `bench`, or the last
    module of its process_main (`run_rollout_node`); empty where it runs none.
    """
    if _BENCH_PROGRAM.search(script):
        return "bench"
    mains = _PROCESS_MAIN.findall(script)
    if not mains:
        return ""
    if mains[-1].endswith(MOCK_TRAINER_MAIN):
        return "mock_trainer"
    if mains[-1].endswith(TRAINER_MAIN):
        return "trainer"
    if "--discovery_id=" in script and "--discovery_addrs=" not in script:
        return "orchestrator"
    return (mains[-1].split(".")[-2:-1] or [""])[0]


_BENCH_PROGRAM = re.compile(rf"^\S*python[0-9.]*[\"']? \S*{re.escape(DRIVER_FILE)}", re.MULTILINE)


def client_containers(document: Document) -> Iterator[tuple[tuple[str | int, ...], dict[str, Any], str]]:
    """Yield (path, container, script) of each container whose `bash -c` script starts a runtime or the bench."""
    for path, node in walk(document.data):
        command = node.get("command") if isinstance(node, dict) else None
        if isinstance(command, list) and command and isinstance(command[-1], str):
            if RUNTIME_MODULE in command[-1] or DRIVER_FILE in command[-1]:
                yield path, node, command[-1]


def clients(document: Document) -> Iterator[Client]:
    """Yield the clients of a document, taken apart. Raises BenchError where one cannot be read."""
    for path, container, script in client_containers(document):
        yield parse_client(container, path, script, document.where)


def walk(node: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Yield (path, node) for a parsed document and all that it holds, parents first."""
    stack = [(path, node)]
    while stack:
        here, node = stack.pop()
        yield here, node
        if isinstance(node, dict):
            stack.extend([((*here, key), item) for key, item in node.items()][::-1])
        elif isinstance(node, list):
            stack.extend([((*here, i), item) for i, item in enumerate(node)][::-1])


def parse_client(container: dict[str, Any], path: tuple[str | int, ...], script: str, where: str) -> Client:
    """Take a client's script apart.

    Raises:
      BenchError: the start-up command is not found where launchers put it, or is not exactly
        assignments, one python program, flags; the message names the token.
    """
    heredocs = list(_HEREDOC.finditer(script))
    sources = dict(item for m in heredocs for item in _sources(m[1], m[3], where))
    opening = list(_OPEN.finditer(script, heredocs[-1].end() if heredocs else 0))
    closing = _CLOSE.search(script, opening[-1].end()) if opening else None
    if closing is None:
        raise BenchError(
            "the client's script has no start-up command between a line `(` and a line `) & PID=$!`",
            where=where,
            todo="was the render cut short, or is it not a Pathways trainer?",
        )
    start, end = opening[-1].end() + 1, closing.start()
    words = shell_words(script[start:end], where)
    split = next((i for i, word in enumerate(words) if not _ASSIGNMENT.match(word.raw)), len(words))
    assignments = [_assignment(word) for word in words[:split]]
    program, argv = _program(words[split:], where)
    return Client(
        container, path, script, script[:start], script[start:end], script[end:], assignments, program, argv, sources
    )


def _sources(name: str, text: str, where: str) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of the file that a heredoc writes, or of each one in an archive."""
    if name != ARCHIVE_FILE:
        yield name, kube_expand(text, {})
        return
    import base64
    import bz2

    try:
        files = dict(json.loads(bz2.decompress(base64.b64decode(text))))
        if not all(isinstance(content, str) for content in files.values()):
            raise ValueError("a file that is no text")
    except (ValueError, TypeError, OSError, RecursionError) as error:
        raise BenchError(f"{name} of the client cannot be unpacked", where=where, todo="was it edited?") from error
    yield from files.items()


def _assignment(word: Word) -> tuple[str, Word]:
    name, _, raw = word.raw.partition("=")
    return name, Word(raw, word.text.partition("=")[2], word.live, word.bare)


def _program(words: list[Word], where: str) -> tuple[list[Word], list[Word]]:
    todo = "expected NAME=VALUE assignments, one `python -m ...runtime.main`, and --flags"
    size = 3 if len(words) > 1 and words[1].value == "-m" else 2
    program = words[:size]
    known = bool(program) and (program[-1].value == RUNTIME_MODULE or program[-1].value.endswith(DRIVER_FILE))
    is_python = bool(program) and re.fullmatch(r"\S*python[0-9.]*", program[0].value) is not None
    if not known or not is_python:
        wrong = words[size - 1 : size] if is_python else words[:1]
        token = wrong[0].raw if wrong else "(nothing)"
        raise BenchError(f"unexpected token {_short(token)!r} in the start-up command", where=where, todo=todo)
    for word in words[size:]:
        if word.operator or not word.text.startswith("--") or word.text == "--process":
            raise BenchError(
                f"unexpected token {_short(word.raw)!r} after the start-up program", where=where, todo=todo
            )
    return program, words[size:]


_BLANKS = re.compile(r"(?:[ \t\n]|\\\n)+")
_OPERATORS = re.compile(r"&&|\|\||[;&|()<>]")
_PLAIN = re.compile(r"[^ \t\n;&|()<>'\"\\$`]+")
_PLAIN_QUOTED = re.compile(r"[^\"\\$`]+")
_BRACES = re.compile(r"(?<!\$)\{[^{}]*(?:,|\.\.)[^{}]*\}")


def shell_words(text: str, where: str = "") -> list[Word]:
    """Split a simple shell command into words the way bash does, keeping each word as it was written.

    Raises:
      BenchError: a quote that does not close.
    """
    words: list[Word] = []
    position = 0
    while position < len(text):
        if blanks := _BLANKS.match(text, position):
            position = blanks.end()
        elif operator := _OPERATORS.match(text, position):
            words.append(Word(operator[0], operator[0], operator=True))
            position = operator.end()
        else:
            word, position = _read_word(text, position, where)
            words.append(word)
    return words


_PLAIN_RUN = re.compile(r"[^\s;&|()<>'\"\\$`]*")  # characters that mean themselves, outside quotes and inside
_QUOTED_RUN = re.compile(r"[^\"\\$`]*")


def _read_word(text: str, start: int, where: str) -> tuple[Word, int]:
    """Return the word that starts at `start`, and where it ends."""
    parts, unquoted, live, bare, i = [], [], False, False, start
    while i < len(text) and text[i] not in " \t\n;&|()<>":
        char, begin = text[i], i
        if plain := _PLAIN.match(text, i):  # most of a word, in one step
            i = plain.end()
            parts.append(plain[0])
            unquoted.append(plain[0])
        elif char == "'":
            i = _closing(text, i, where)
            parts.append(text[begin + 1 : i])
            i += 1
        elif char == '"':
            part, part_live, i = _read_double_quoted(text, i, where)
            parts.append(part)
            live = live or part_live
        elif char == "\\":
            parts.append(text[i + 1 : i + 2].replace("\n", ""))
            i += 2
        else:
            end = _expansion_end(text, i, where)
            i = end or _PLAIN_RUN.match(text, i + 1).end()
            parts.append(text[begin:i])
            unquoted.append(text[begin:i])
            bare = bare or end is not None
    value = "".join(parts)
    bare = bare or bool(_BRACES.search("".join(unquoted)))
    live = live or bare or "$(" in value.replace("$$", "")  # `$(NAME)`: the kubelet knows no quotes
    return Word(text[start:i], value, live, bare), i


def _read_double_quoted(text: str, start: int, where: str) -> tuple[str, bool, int]:
    """Return (text without quotes, whether bash expands something in it, where it ends)."""
    value, live, i = [], False, start + 1
    while i < len(text) and text[i] != '"':
        begin = i
        if plain := _PLAIN_QUOTED.match(text, i):
            i = plain.end()
            value.append(plain[0])
        elif text[i] == "\\" and text[i + 1 : i + 2] in ("$", "`", '"', "\\", "\n"):
            value.append(text[i + 1].replace("\n", ""))
            i += 2
        else:
            end = _expansion_end(text, i, where)
            i = end or _QUOTED_RUN.match(text, i + 1).end()
            value.append(text[begin:i])
            live = live or end is not None
    if i >= len(text):
        raise _unclosed(text, start, where)
    return "".join(value), live, i + 1


def _expansion_end(text: str, start: int, where: str) -> int | None:
    """Return the end of the `$X`, `${X}`, `$(command)` or backquotes that open at `start`; None if none do."""
    if text[start] == "`":
        return _closing(text, start, where) + 1
    if variable := _VARIABLE.match(text, start):
        return variable.end()
    if not text.startswith("$(", start):
        return None
    depth, i = 0, start + 1
    while i < len(text):
        if text[i] in "'\"":
            i = _closing(text, i, where)
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        i += 1
        if depth == 0:
            return i
    raise _unclosed(text, start, where)


_VARIABLE = re.compile(r"\$(?:\{[^}]*\}|[A-Za-z_][A-Za-z0-9_]*|[0-9?!#@*$-])")


def _closing(text: str, start: int, where: str) -> int:
    """Return where the quote that opens at `start` closes again."""
    end = text.find(text[start], start + 1)
    if end < 0:
        raise _unclosed(text, start, where)
    return end


def _unclosed(text: str, start: int, where: str) -> BenchError:
    name, equals, value = text[max(text.rfind(" ", 0, start), text.rfind("\n", 0, start)) + 1 : start + 40].partition(
        "="
    )
    return BenchError(
        f"a quote opened in {name + equals + mask(name, value)!r} does not close",
        where=where,
        todo="was the render cut short, or is there a line break in a flag?",
    )


def kube_expand(text: str, env: Mapping[str, str]) -> str:
    """Expand `$(NAME)` and `$$` as the kubelet does in `command` and `args`.

    A name that is not in `env` stays as written; `$$` becomes `$` and hides what follows it.
    Source: Kubernetes API reference, Container.command.
    """
    return re.sub(r"\$\$|\$\(([^)]*)\)", lambda m: "$" if m[0] == "$$" else env.get(m[1], m[0]), text)


def kube_escape(text: str) -> str:
    """Return text that `kube_expand` turns back into `text`, whatever the environment holds."""
    return text.replace("$", "$$")


# --- flags ---------------------------------------------------------------------------------------


def flag_items(argv: list[str]) -> list[tuple[str, str | None]]:
    """Return an argv of `--name=value` and bare `--name` words as pairs in order, duplicates kept."""
    return [(name, value if equals else None) for name, equals, value in (word.partition("=") for word in argv)]


_LIST_TOKEN = re.compile(r"(?:\$\([^)]*\)|\$\{[^}]*\}|`[^`]*`|\S)+")


def list_tokens(text: str) -> list[str]:
    """Split a list such as MAXTEXT_EXTRA_FLAGS at its blanks, but not those in a `$(command)` that bash is to run."""
    return _LIST_TOKEN.findall(text)


def key_values(text: str) -> list[tuple[str, str]]:
    """Return the `key=value` tokens of a MAXTEXT_EXTRA_FLAGS string in order, duplicates kept.

    Tokens are split at blanks and at the first `=`, as Tunix's build_maxtext_config does.

    Raises:
      BenchError: a token without `=`.
    """
    pairs = []
    for token in text.split():
        key, equals, value = token.partition("=")
        if not equals or not key:
            raise BenchError(f"MAXTEXT_EXTRA_FLAGS token {_short(token)!r} is not key=value", todo="write key=value")
        pairs.append((key, value))
    return pairs


def slice_of(document: Document) -> str | None:
    """Return the Pathways slice of a trainer as `TYPE:TOPOLOGY` (`tpu7x:4x4x8`), None where it has none.

    Read from the resource manager's `--instance_type`, the one place that every template version has.
    """
    for _, node in walk(document.data):
        args = node.get("args") if isinstance(node, dict) else None
        for arg in args if isinstance(args, list) else ():
            if isinstance(arg, str) and arg.startswith("--instance_type="):
                return arg.partition("=")[2]
    return None
