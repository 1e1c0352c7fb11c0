"""Write the script that a bench's client container runs: driver files by heredoc, then one start-up command.

The format is fixed, because launch_render reads it back: each file as a heredoc (where all of them would
not fit into one argument, the modules as one archive in base64), a line `(`, the assignments of
the launcher as it wrote them (one a line, quotes and live `$` kept), TRAINER_ARGV and ORCH_ARGV as shell
words, the BENCH_* provenance, the driver and its flags, and `) & PID=$!` with a wrapper that hands SIGTERM
on and keeps the exit status. All of it is text for the kubelet, which makes `$` of `$$` and expands
`$(NAME)`: what is not meant for it is escaped.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import shlex
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from bench_common import BenchError, decode, read_bytes
from launch_render import ARCHIVE_FILE, DRIVER_FILE, HEREDOC_MARKER, Word, kube_escape, kube_expand

# Linux passes no single argument longer than this with its final NUL (MAX_ARG_STRLEN in binfmts.h, 32 pages of 4 KiB).
MAX_ARGUMENT_BYTES = 128 * 2**10
MAX_DRIVER_BYTES = 2**20
PROVENANCE = (
    "BENCH_INPUT_SHA256",
    "BENCH_DRIVER_SHA256",
    "BENCH_FILES_SHA256",
    "BENCH_RENDER_VERSION",
    "BENCH_RENDER_OPTIONS",
)
CARRIED = ("TRAINER_ARGV", "ORCH_ARGV")

HEAD = """\
# The trainer bench, rendered from a launcher's dry run. As process 1 of the container this script writes
# the driver's files, starts the driver with the trainer's environment, hands a SIGTERM on to it and ends
# with its exit status.
BENCH_DIR=$(mktemp -d /tmp/trainer-bench.XXXXXX)
PID= STOPPING=
_sigterm() { STOPPING=1; if [ -n "$PID" ]; then kill -TERM "$PID" 2>/dev/null; else exit 143; fi; }
trap _sigterm TERM
"""
UNPACK = f"""\
{{python}} -c "import bz2, json, sys
for name, text in json.load(bz2.open(sys.argv[1] + '/{ARCHIVE_FILE}')).items():
    open(sys.argv[1] + '/' + name, 'w', encoding='utf-8').write(text)" "$BENCH_DIR"
"""
TAIL = """\
) & PID=$!
wait "$PID"
EXIT_CODE=$?
while [ -n "$STOPPING" ]; do
  # The signal ended the wait early: wait on for the status of the driver itself (127: it was had before).
  STOPPING=
  wait "$PID" 2>/dev/null
  STATUS=$?
  [ "$STATUS" -eq 127 ] || EXIT_CODE=$STATUS
done
rm -rf "$BENCH_DIR"
exit "$EXIT_CODE"
"""


class Startup(NamedTuple):
    """The parts of a bench's start-up command.

    Attributes:
      assignments: (name, text for the shell) of the launcher's and the asked-for environment.
      trainer_argv, orch_argv: the words that TRAINER_ARGV and ORCH_ARGV carry.
      provenance: (name, value) of PROVENANCE.
      flags: the driver's own flags, as text for the shell.
      python: the interpreter as the launcher wrote it.
    """

    assignments: Sequence[tuple[str, str]]
    trainer_argv: Sequence[Word]
    orch_argv: Sequence[Word]
    provenance: Sequence[tuple[str, str]]
    flags: Sequence[str]
    python: str


def compose(files: dict[str, str], startup: Startup) -> str:
    """Return the client's script.

    Args:
      files: file name -> text of what is written into the pod; each text ends with a line break.

    Raises:
      BenchError: the script is too long to be an argument; a live word that cannot be carried.
    """
    live: list[str] = []
    carried = [
        f"{name}={_carried(words, live)}"
        for name, words in zip(CARRIED, (startup.trainer_argv, startup.orch_argv), strict=True)
    ]
    lines = [
        *(f"{name}={raw}" for name, raw in startup.assignments),
        *carried,
        *(f"{name}={quote(value)}" for name, value in startup.provenance),
        " ".join([startup.python, f'"$BENCH_DIR/{DRIVER_FILE}"', *startup.flags]),
    ]
    rest = "".join(live) + "(\n" + " \\\n".join(lines) + "\n" + TAIL
    room = MAX_ARGUMENT_BYTES - 1 - len(kube_expand(HEAD + rest, {}).encode())
    return HEAD + _heredocs(files, room, startup.python) + rest


def _heredocs(files: dict[str, str], room: int, python: str) -> str:
    """Return what writes the files, in no more than `room` bytes: as they are, else the modules packed, else all."""
    for packed in ([], [name for name in files if name != DRIVER_FILE], list(files)):
        parts = [_archive({name: files[name] for name in packed}, python)] if packed else []
        parts += [_heredoc(name, text) for name, text in files.items() if name not in packed]
        size = sum(len(part.replace("$$", "$").encode()) for part in parts)  # the kubelet takes the escapes away
        if size <= room:
            return "".join(parts)
    raise BenchError(
        f"the files of the client's script take {size} bytes packed, and {room} are left of the"
        f" {MAX_ARGUMENT_BYTES} that Linux gives one argument",
        todo="make the driver or the routing-load file smaller",
    )


def _heredoc(name: str, text: str) -> str:
    marker, number = HEREDOC_MARKER, 1
    while marker in text:
        number += 1
        marker = f"{HEREDOC_MARKER}_{number}"
    return f"cat > \"$BENCH_DIR/{name}\" <<'{marker}'\n{kube_escape(text)}{marker}\n"


def unpack(python: str) -> str:
    """Return the command that writes the files of the archive with an interpreter."""
    return UNPACK.format(python=python)


def _archive(files: dict[str, str], python: str) -> str:
    """Return the lines that write files out of a packed JSON object (bzip2: the smallest of sources, and quick)."""
    import base64
    import bz2

    packed = base64.encodebytes(bz2.compress(json.dumps(files, ensure_ascii=False).encode())).decode()
    write = f"base64 -d > \"$BENCH_DIR/{ARCHIVE_FILE}\" <<'{HEREDOC_MARKER}'\n{packed}{HEREDOC_MARKER}\n"
    return write + unpack(python)


def _carried(words: Iterable[Word], live: list[str]) -> str:
    """Return shell text whose value is the words, joined for shlex; live words go through a variable each."""
    text: list[str] = []  # alternating: static, live, static ...
    static: list[str] = []
    for word in words:
        if not word.live:
            static.append(shlex.quote(word.value))
            continue
        if word.bare:
            raise BenchError(
                f"bash may make several words of the argv token {word.raw!r} when the pod runs",
                todo="put it in double quotes, or give its value with --trainer-arg or --orch-arg",
            )
        variable = f"BENCH_LIVE_{len(live)}"
        live.append(f"{variable}={word.raw}\n")
        text += [" ".join([*static, ""]), variable]
        static = [""]
    text.append(" ".join(static))
    return "".join(f'"${{{part}@Q}}"' if i % 2 else kube_escape(shlex.quote(part)) for i, part in enumerate(text))


def quote(value: str) -> str:
    """Return a value as the kubelet and bash must find it to pass it on unchanged."""
    if re.fullmatch(r"[A-Za-z0-9_.,:/@%+=-]*", value):
        return value
    return kube_escape(f'"{value}"' if not re.search(r'["$`\\!]', value) else shlex.quote(value))


def embedded_files(driver: str) -> dict[str, str]:
    """Return file name -> text of the driver and of those modules beside it that it imports, the driver last.

    Raises:
      BenchError: a file is missing, too large, no UTF-8, or no Python.
    """
    folder = os.path.dirname(os.path.abspath(driver))
    own = _installed_modules(folder)
    found: dict[str, str] = {}
    pending = [os.path.basename(driver)]
    while pending:
        name = pending.pop()
        text = read_source(driver if name == os.path.basename(driver) else os.path.join(folder, name))
        found[name] = text
        for module in sorted(_imports(text)):
            file = f"{module}.py"
            ours = own is None or module in own
            if file not in found and file not in pending and ours and os.path.isfile(os.path.join(folder, file)):
                pending.append(file)
    last = found.pop(os.path.basename(driver))
    if DRIVER_FILE in found:
        raise BenchError(f"it imports another {DRIVER_FILE}", where=driver, todo=f"name the driver {DRIVER_FILE}")
    return {**{name: found[name] for name in sorted(found)}, DRIVER_FILE: last}


def _installed_modules(folder: str) -> set[str] | None:
    """Return the modules of this project where it is installed in a folder, among everybody's; None in a checkout."""
    for path in glob.glob(os.path.join(glob.escape(folder), "rl_trainer_bench-*.dist-info", "top_level.txt")):
        return set(decode(read_bytes(path), path).split())
    return None


def read_source(path: str) -> str:
    """Return the text of a file that is to travel: UTF-8, no NUL, ending with a line break."""
    text = decode(read_bytes(path, MAX_DRIVER_BYTES), path)
    if "\0" in text:
        raise BenchError("holds a NUL byte", where=path, todo="give a text file")
    return text if text.endswith("\n") else text + "\n"


_IMPORT = re.compile(r"^[ \t]*(?:from[ \t]+([\w.]+)[ \t]+import\b|import[ \t]+([^\n#]+))", re.MULTILINE)


def _imports(text: str) -> set[str]:
    """Return the modules that import statements of a Python source name, at any depth of indentation.

    By lines rather than by a parser, which would take most of the renderer's time; a line of a docstring that
    looks like an import can only add a module of ours that exists.
    """
    modules = set()
    for one, several in _IMPORT.findall(text):
        names = [one] if one else [part.split(" as ")[0].strip() for part in several.split(",")]
        modules.update(name.partition(".")[0] for name in names)
    return modules


def sha256(text: str) -> str:
    """Return the hash of a file with this text, as `sha256sum` prints it."""
    return hashlib.sha256(text.encode()).hexdigest()


def files_sha256(files: dict[str, str]) -> str:
    """Return the hash of all files: that of what `sha256sum *.py` prints for them in a folder, names sorted."""
    return sha256("".join(f"{sha256(text)}  {name}\n" for name, text in sorted(files.items())))
