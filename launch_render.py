"""Read launch renders: what a Tunix launcher prints under DRY_RUN=true, and the bench JobSet made of it.

`read_render` finds the Kubernetes objects in a stream full of log lines, `clients` takes apart the
container that runs a Python program (its assignments, program and flags, word by word), and a few
small functions read the formats inside it: shell words, the kubelet's `$(NAME)`, flags, key=value
lists. Reading only: what a bench changes is in render_bench.py. Standard library and PyYAML.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from bench_common import BenchError, mask

MAX_RENDER_BYTES = 16 * 2**20  # a launch render is some 50 KB; beyond this it is something else


@dataclass(frozen=True)
class Document:
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


@dataclass(frozen=True)
class Render:
    """The objects of one stream in order, and what was passed over on the way (for stderr)."""

    documents: list[Document]
    notes: list[str]


_SEPARATOR = re.compile(r"---[ \t]*$")
_TOP_LEVEL = re.compile(r"(apiVersion|kind|metadata|spec)[ \t]*:")


def read_render(text: str, source: str) -> Render:
    """Read every Kubernetes object of a launcher's output, passing over what is not YAML.

    Launchers print log lines before, between and inside the documents, and captures made with
    `2>&1` hold more. Each piece between `---` lines starts at its first `apiVersion:` in column 0;
    column-0 lines that are no top-level key of a Kubernetes object are passed over with a note; each
    piece is parsed on its own.

    Raises:
      BenchError: a piece is not YAML or was cut short, with file and line; or it has no object at all.
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
    return Render(documents, notes)


def _pieces(text: str) -> Iterator[tuple[int, list[str]]]:
    start, lines = 1, []
    for number, line in enumerate(text.split("\n"), start=1):
        if _SEPARATOR.match(line):
            yield start, lines
            start, lines = number + 1, []
        else:
            lines.append(line)
    yield start, lines


def _read_piece(lines: list[str], first_line: int, source: str, notes: list[str]) -> Document | None:
    begin = next((i for i, line in enumerate(lines) if line.startswith("apiVersion:")), None)
    if begin is None:
        text = [(first_line + i, line) for i, line in enumerate(lines) if line.strip() and not line.startswith("#")]
        if text:
            notes.append(
                f"{source}:{text[0][0]}: {len(text)} line(s) without an object passed over: {_short(text[0][1])}"
            )
        return None
    for i, line in enumerate(lines[:begin]):
        if line.strip() and not line.startswith("#"):
            notes.append(f"{source}:{first_line + i}: log line passed over: {_short(line)}")
    kept = []
    for i, line in enumerate(lines[begin:], start=first_line + begin):
        stray = line and line[0] not in " \t#-" and not _TOP_LEVEL.match(line)
        if stray:
            notes.append(f"{source}:{i}: line inside a document passed over: {_short(line)}")
        kept.append("" if stray else line)  # an empty line keeps the line numbers of errors right
    data = _parse_yaml("\n".join(kept) + "\n", source, first_line + begin, notes)
    return Document(data, source, first_line + begin)


def _short(line: str) -> str:
    """Return a line of the input for a message: cut, and with the values of secrets masked."""
    masked = re.sub(r"([\w.-]+)([=:]\s*)(\S+)", lambda m: m[1] + m[2] + mask(m[1], m[3]), line.strip())
    return masked if len(masked) <= 72 else masked[:69] + "..."


def _parse_yaml(text: str, source: str, first_line: int, notes: list[str]) -> dict[str, Any]:
    import yaml

    loader = _loader_class()(text)
    loader.on_duplicate = lambda key, mark: notes.append(
        f"{source}:{first_line + mark.line}: duplicate key {key!r}, the last one counts"
    )
    try:
        data = loader.get_single_data()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = first_line + (mark.line if mark else 0)
        problem = getattr(error, "problem", None) or str(error)
        raise BenchError(f"not YAML: {problem}", where=f"{source}:{line}", todo="capture the dry run again") from error
    except RecursionError as error:
        raise BenchError(
            "nested too deeply", where=f"{source}:{first_line}", todo="capture the dry run again"
        ) from error
    finally:
        loader.dispose()
    if not isinstance(data, dict) or not isinstance(data.get("kind"), str):
        raise BenchError("an object without a kind", where=f"{source}:{first_line}", todo="was the render cut short?")
    return data


def _loader_class() -> type:
    """Return a safe loader (the C one where it is built in) that reports duplicate keys."""
    import yaml

    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        on_duplicate: Callable[[Any, Any], None]

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            seen = set()
            for key_node, _ in node.value:
                if key_node.value.__hash__ and key_node.value in seen:
                    self.on_duplicate(key_node.value, key_node.start_mark)
                elif key_node.value.__hash__:
                    seen.add(key_node.value)
            return super().construct_mapping(node, deep=deep)

    return Loader


# --- the client: the container of a document that runs a Python program ------------------------

RUNTIME_MODULE = "tunix.experimental.distributed.runtime.main"
TRAINER_MAIN = "run_trainer_node.main"  # the end of --process_main; its package moved between versions
MOCK_TRAINER_MAIN = "run_mock_trainer_node.main"
HEREDOC_MARKER = "BENCH_DRIVER_EOF"


@dataclass(frozen=True)
class Word:
    """One word of a shell command."""

    raw: str  # as written, quotes and all
    value: str  # as bash passes it on, `$` left as it is
    live: bool = False  # holds a `$` or a backquote that bash expands when the pod runs
    operator: bool = False  # `&&`, `;`, `|`, `(` ... rather than a word


@dataclass(frozen=True)
class Client:
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
    sources: dict[str, str] = field(default_factory=dict)  # file name -> text of embedded heredocs

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
        return self.program[-1].value.endswith("bench_driver.py")

    @property
    def role(self) -> str:
        """`trainer`, `mock_trainer`, `bench`, or the last part of the process_main (`run_rollout_node`)."""
        if self.is_bench:
            return "bench"
        main = self.flags.get("--process_main") or ""
        if main.endswith(MOCK_TRAINER_MAIN):
            return "mock_trainer"
        return "trainer" if main.endswith(TRAINER_MAIN) else (main.split(".")[-2:-1] or [""])[0]


_OPEN = re.compile(r"^[ \t]*\([ \t]*$", re.MULTILINE)
_CLOSE = re.compile(r"^[ \t]*\)[ \t]*&[ \t]*PID=\$!", re.MULTILINE)
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_HEREDOC = re.compile(rf"^cat > \S*?([\w.]+\.py)\"? <<'({HEREDOC_MARKER}\w*)'\n(.*?)^\2$", re.MULTILINE | re.DOTALL)


def client_containers(document: Document) -> Iterator[tuple[tuple[str | int, ...], dict[str, Any], str]]:
    """Yield (path, container, script) of each container whose `bash -c` script starts a runtime or the bench."""
    for path, node in walk(document.data):
        command = node.get("command") if isinstance(node, dict) else None
        if isinstance(command, list) and command and isinstance(command[-1], str):
            if RUNTIME_MODULE in command[-1] or "bench_driver.py" in command[-1]:
                yield path, node, command[-1]


def clients(document: Document) -> Iterator[Client]:
    """Yield the clients of a document, taken apart. Raises BenchError where one cannot be read."""
    for path, container, script in client_containers(document):
        yield parse_client(container, path, script, document.where)


def walk(node: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Yield (path, node) for a parsed document and all that it holds, parents first."""
    yield path, node
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, item in items:
        yield from walk(item, (*path, key))


def parse_client(container: dict[str, Any], path: tuple[str | int, ...], script: str, where: str) -> Client:
    """Take a client's script apart.

    Raises:
      BenchError: the start-up command is not found where launchers put it, or is not exactly
        assignments, one python program, flags; the message names the token.
    """
    sources = {m[1]: kube_expand(m[3], {}) for m in _HEREDOC.finditer(script)}
    opening = list(_OPEN.finditer(script, max((m.end() for m in _HEREDOC.finditer(script)), default=0)))
    closing = _CLOSE.search(script, opening[-1].end()) if opening else None
    if closing is None:
        raise BenchError(
            "the client's script has no start-up command between a line `(` and a line `) & PID=$!`",
            where=where,
            todo="was the render cut short, or is it not a Pathways trainer?",
        )
    start, end = opening[-1].end() + 1, closing.start()
    words = shell_words(script[start:end].replace("\\\n", " "), where)
    split = next((i for i, word in enumerate(words) if not _ASSIGNMENT.match(word.raw)), len(words))
    assignments = [_assignment(word) for word in words[:split]]
    program, argv = _program(words[split:], where)
    return Client(
        container, path, script, script[:start], script[start:end], script[end:], assignments, program, argv, sources
    )


def _assignment(word: Word) -> tuple[str, Word]:
    name, _, raw = word.raw.partition("=")
    return name, Word(raw, word.value.partition("=")[2], word.live)


def _program(words: list[Word], where: str) -> tuple[list[Word], list[Word]]:
    todo = "expected NAME=VALUE assignments, one `python -m ...runtime.main`, and --flags"
    size = 3 if len(words) > 1 and words[1].value == "-m" else 2
    program = words[:size]
    known = bool(program) and (program[-1].value == RUNTIME_MODULE or program[-1].value.endswith("bench_driver.py"))
    if not known or not re.fullmatch(r"\S*python[0-9.]*", program[0].value):
        token = words[0].raw if words else "(nothing)"
        raise BenchError(f"unexpected token {_short(token)!r} in the start-up command", where=where, todo=todo)
    for word in words[size:]:
        if word.operator or not word.value.startswith("--"):
            raise BenchError(
                f"unexpected token {_short(word.raw)!r} after the start-up program", where=where, todo=todo
            )
    return program, words[size:]


def shell_words(text: str, where: str = "") -> list[Word]:
    """Split a simple shell command into words the way bash does, keeping each word as it was written.

    Raises:
      BenchError: a quote that does not close.
    """
    words: list[Word] = []
    position = 0
    for match in re.finditer(r"[ \t\n]+|&&|\|\||[;&|()<>]", text):
        if match.start() < position:
            continue  # a blank or an operator inside the quoted word just read
        if match.start() > position:
            word, position = _read_word(text, position, where)
            words.append(word)
            if position > match.start():
                continue
        if match[0].strip():
            words.append(Word(match[0], match[0], operator=True))
        position = match.end()
    if position < len(text):
        words.append(_read_word(text, position, where)[0])
    return words


def _read_word(text: str, start: int, where: str) -> tuple[Word, int]:
    value, live, i = [], False, start
    while i < len(text) and text[i] not in " \t\n;&|()<>":
        char = text[i]
        if char == "'":
            end = text.find("'", i + 1)
            value.append(text[i + 1 : end])
        elif char == '"':
            part, part_live, end = _read_double_quoted(text, i)
            value.append(part)
            live = live or part_live
        elif char == "\\":
            end = i + 1
            value.append(text[end : end + 1])
        else:
            end = i
            value.append(char)
            live = live or char in "$`"
        if end < 0:
            raise BenchError(
                f"a quote opened at {_short(text[i : i + 40])!r} does not close",
                where=where,
                todo="was the render cut short, or is there a line break in a flag?",
            )
        i = end + 1
    return Word(text[start:i], "".join(value), live), i


def _read_double_quoted(text: str, start: int) -> tuple[str, bool, int]:
    value, live, i = [], False, start + 1
    while i < len(text) and text[i] != '"':
        if text[i] == "\\" and text[i + 1 : i + 2] in ("$", "`", '"', "\\"):
            i += 1
        else:
            live = live or text[i] in "$`"
        value.append(text[i])
        i += 1
    return "".join(value), live, i if i < len(text) else -1


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
