"""The conventions every tool of the bench keeps: errors, exit codes, streams, JSON, masked secrets.

`BenchError` is the user's problem in one line, `run_tool` turns it into exit code 2, `read_text` and
`emit` are stdin and stdout, `write_whole` writes files whole or not at all, `dump_json` is the one rule
for JSON, `mask` keeps secrets out of reports. Standard library only, and it travels into the pod with
the driver. What several tools read, the launch render, has a module of its own: launch_render.py.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

EXIT_OK = 0  # fine, no difference, fits
EXIT_DIFFERENT = 1  # the answer is "different", "does not fit", "out of tolerance"
EXIT_CANNOT = 2  # could not do the job
LONGEST_MESSAGE = 2000  # characters; what is wrong may quote somebody's 20 MB line


class BenchError(Exception):
    """The user's problem, told in one line: where it is, what is wrong, what to do about it."""

    def __init__(self, what: str, *, where: str = "", todo: str = ""):
        self.what, self.where, self.todo = what, where, todo
        line = f"{where}: {what}" if where else what
        super().__init__(" ".join((f"{line}; {todo}" if todo else line).split()))


def run_tool(tool: str, body: Callable[[], int]) -> int:
    """Run a tool's body; a BenchError or a package that is not installed becomes one line on stderr and exit code 2.

    Any other exception is a defect of ours and keeps its traceback. A closed stdout (`| head`)
    never raises here, because data is written by `emit`.
    """
    try:
        return body()
    except ModuleNotFoundError as error:
        complain(tool, str(missing_package(error)))
    except BenchError as error:
        complain(tool, str(error))
    return EXIT_CANNOT


def missing_package(error: ModuleNotFoundError) -> BenchError:
    """Return what to tell somebody whose environment lacks a package, as the light installation lacks numpy and JAX."""
    todo = "pip install 'rl-trainer-bench[cpu]', or [aot] for aot_bench"
    return BenchError(f"the Python package {error.name} is not installed here", todo=todo)


def complain(tool: str, message: str) -> None:
    """Write one line `tool: message` to stderr, a long one without its middle; a closed stderr is nobody's problem."""
    if len(message) > LONGEST_MESSAGE:
        message = f"{message[: LONGEST_MESSAGE // 2]} [...] {message[-LONGEST_MESSAGE // 4 :]}"
    try:
        print(f"{tool}: {message}", file=sys.stderr, flush=True)
    except (BrokenPipeError, ValueError):
        pass


def emit(text: str) -> None:
    """Write data to stdout. When the reader has gone away, go on quietly: the verdict still counts.

    Where the locale's encoding lacks a character, all goes on in UTF-8, which JSON and YAML are anyway.

    Raises:
      BenchError: stdout cannot be written for another reason, such as a full disk.
    """
    try:
        try:
            sys.stdout.write(text)
        except UnicodeEncodeError:
            sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")  # half a surrogate pair: `\\ud800`
            sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes stdout once more at exit; give it somewhere harmless to write to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        raise BenchError(f"cannot write: {error.strerror}", where="stdout") from error


def read_bytes(path: str, limit: int | None = None) -> bytes:
    """Return the bytes of a file, or of stdin for `-`.

    Args:
      path: a file name, or `-`.
      limit: most bytes to accept; None accepts any size.

    Raises:
      BenchError: missing, unreadable, a directory, or larger than `limit`.
    """
    try:
        if path == "-":
            data = sys.stdin.buffer.read() if limit is None else sys.stdin.buffer.read(limit + 1)
        else:
            with open(path, "rb") as stream:
                data = stream.read() if limit is None else stream.read(limit + 1)
    except OSError as error:
        raise BenchError(
            f"cannot read: {error.strerror}", where=path, todo="name a readable file, or - for stdin"
        ) from error
    if limit is not None and len(data) > limit:
        raise BenchError(f"larger than {limit / 2**20:.0f} MiB", where=shown_name(path), todo="name the right file")
    return data


def decode(data: bytes, source: str) -> str:
    """Return bytes as UTF-8 text with `\\n` line ends, without a byte-order mark.

    Raises:
      BenchError: not UTF-8; the message names the line.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise BenchError(
            f"not UTF-8 text (byte 0x{data[error.start]:02x})", where=f"{source}:{line}", todo="give a text file"
        ) from error
    return text.replace("\r\n", "\n") if "\r\n" in text else text


def read_text(path: str, limit: int | None = None) -> str:
    """Return the text of a file, or of stdin for `-`. See `read_bytes` and `decode` for the errors."""
    return decode(read_bytes(path, limit), shown_name(path))


def shown_name(path: str) -> str:
    """Return how a message names an input: `<stdin>` for `-`, else the path as given."""
    return "<stdin>" if path == "-" else path


def write_whole(path: str, data: str | bytes) -> None:
    """Write a file whole or not at all: a temporary file beside it, then a rename.

    Raises:
      BenchError: the file or its directory cannot be written; an existing file is left as it was.
    """
    payload = data.encode(errors="backslashreplace") if isinstance(data, str) else data
    try:
        if os.path.exists(path) and not os.path.isfile(path):  # a device or a pipe has no "beside"
            with open(path, "wb") as stream:
                stream.write(payload)
            return
        _replace_file(os.path.realpath(path), payload)
    except OSError as error:
        raise BenchError(f"cannot write: {error.strerror}", where=path, todo="choose a writable place") from error


def _replace_file(path: str, payload: bytes) -> None:
    import tempfile  # 13 ms that most runs of the light tools do not need

    handle, temporary = tempfile.mkstemp(prefix=".", suffix=".part", dir=os.path.dirname(path))
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(payload)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)  # mkstemp makes files private; ours are ordinary ones
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def dump_json(document: Any, indent: int | None = 2) -> str:
    """Return one JSON document and a newline: keys in the order given, non-finite numbers as null."""
    return json.dumps(_finite(document), indent=indent, allow_nan=False, ensure_ascii=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


MASKED = "***"
# Whole words of a name: HF_TOKEN, WANDB_API_KEY, hf_access_token, apiKey; not num_moe_token_chunks,
# max_seq_token_per_tpu or tokenizer_path, which carry numbers and names an engineer must see.
_SECRET_LAST = re.compile(r"(^|[_.-])(token|key|apikey|passwd|pwd)$", re.IGNORECASE)
_SECRET_ANYWHERE = re.compile(r"(^|[_.-])(secrets?|passwords?|credentials?)($|[_.-])", re.IGNORECASE)
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def is_secret(name: str) -> bool:
    """Return whether a variable, flag or key of this name holds a secret (`HF_TOKEN`, `api_key`)."""
    words = _CAMEL.sub("_", name.strip("-"))
    if words.lower() == "key":  # the Kubernetes field of tolerations and expressions
        return False
    return bool(_SECRET_LAST.search(words) or _SECRET_ANYWHERE.search(words))


def mask(name: str, value: str) -> str:
    """Return the value as a report may show it: `***` where the name says it is a secret."""
    return MASKED if value and is_secret(name) else value
