"""Every transcript in README.md and docs/ is run, and must still say what the page shows.

A transcript is a block fenced as ```console: lines `$ command` (continued with a backslash at the end of the line),
each followed by exactly what the command prints, stdout and stderr together. A line `...` alone stands for lines left
out. The commands of a page run in order, in one shell, in an empty folder where the scripts and `examples` are links.
Blocks fenced as ```console slow run only in the slow suite, and are compared without their numbers.

After a change of a tool, `python tests/test_docs.py README.md docs/walkthrough.md` writes the new outputs into the
pages (`--slow` too for the slow blocks; what has a `...` is left alone): read the diff before you commit it.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MUST_SHOW = ("README.md", "docs/walkthrough.md")  # pages that are nothing without their transcripts
FENCE = re.compile(r"^```([^\n`]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
END = "\0end of command\0"
NUMBER = re.compile(r"-?\d[\d.,e+-]*")


class Step(NamedTuple):
    """One command of a page and what the page says it prints."""

    line: int
    command: str
    output: str
    slow: bool


def steps_of(text: str) -> list[Step]:
    """Return the commands of a page's console blocks, in order.

    Raises:
      ValueError: a block that does not begin with a command.
    """
    found = []
    for fence in FENCE.finditer(text):
        if fence[1].split()[:1] != ["console"]:
            continue
        line = text.count("\n", 0, fence.start(2)) + 1
        found += _steps_of_block(fence[2].splitlines(), line, fence[1].split()[1:] == ["slow"])
    return found


def _steps_of_block(lines: list[str], first_line: int, slow: bool) -> list[Step]:
    found, index = [], 0
    while index < len(lines):
        if not lines[index].startswith("$ "):
            raise ValueError(f"line {first_line + index}: a console block begins with `$ command`")
        start = index
        while lines[index].endswith("\\") and index + 1 < len(lines):
            index += 1
        command = "\n".join(lines[start : index + 1]).removeprefix("$ ")
        index += 1
        output_start = index
        while index < len(lines) and not lines[index].startswith("$ "):
            index += 1
        found.append(Step(first_line + start, command, "\n".join(lines[output_start:index]), slow))
    return found


def set_up(folder: Path) -> dict[str, str]:
    """Link the scripts and the examples into the folder; return the environment of its shell."""
    for path in [*ROOT.glob("*.py"), ROOT / "examples"]:
        (folder / path.name).symlink_to(path)
    commands = folder / ".bin"
    commands.mkdir()
    for name in ("python", "python3"):  # a link would lose the packages of a virtual environment
        (commands / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        (commands / name).chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("BENCH_", "TRAINER_"))}
    environment |= {"PATH": f"{commands}:{os.environ['PATH']}", "COLUMNS": "80", "LC_ALL": "C.UTF-8", "TERM": "dumb"}
    environment.pop("LAUNCH_RENDER", None)
    return environment


def run(steps: list[Step], folder: Path) -> list[str]:
    """Run the commands in one shell in the folder; return what each printed, without newlines at its ends."""
    end = END.replace("\0", "\\0")
    script = "".join(f"{step.command}\nstatus=$?; printf '{end}'; (exit $status)\n" for step in steps)
    process = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env=set_up(folder),
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    outputs = process.stdout.split(END)
    assert len(outputs) == len(steps) + 1, f"the shell stopped early:\n{process.stdout[-2000:]}"
    return [output.strip("\n") for output in outputs[:-1]]


def drift(step: Step, printed: str) -> str:
    """Return how the output differs from the page, as a diff; empty if it does not."""
    shown, happened = step.output.strip("\n"), printed
    if step.slow:
        shown, happened = numberless(shown), numberless(happened)
    lines = [r"(?:[^\n]*\n)*" if line == "..." else re.escape(line + "\n") for line in shown.split("\n")]
    if re.fullmatch("".join(lines), happened + "\n"):
        return ""
    diff = difflib.unified_diff(shown.splitlines(), happened.splitlines(), "page", "command", lineterm="")
    return f"line {step.line}: $ {step.command}\n" + "\n".join(diff)


def numberless(text: str) -> str:
    """Return the text with N for every number, blanks run together, so that two runs of a program compare equal."""
    return "\n".join(re.sub(r"[ \t]+", " ", NUMBER.sub("N", line)).strip() for line in text.splitlines())


def check(page: Path, folder: Path, slow: bool) -> None:
    """Run a page's commands (with `slow` the slow blocks as well) and fail with every difference."""
    steps = [step for step in steps_of(page.read_text()) if slow or not step.slow]
    drifted = [drift(step, printed) for step, printed in zip(steps, run(steps, folder), strict=True)]
    if any(drifted):
        pytest.fail(f"{page.name} is out of date:\n" + "\n\n".join(filter(None, drifted)), pytrace=False)


def pages_with(slow: bool) -> list[Path]:
    return [page for page in PAGES if page.exists() and any(step.slow == slow for step in steps_of(page.read_text()))]


@pytest.mark.parametrize("page", pages_with(slow=False), ids=lambda page: page.name)
def test_page(page, tmp_path):
    check(page, tmp_path, slow=False)


@pytest.mark.slow
@pytest.mark.parametrize("page", pages_with(slow=True), ids=lambda page: page.name)
def test_page_with_its_slow_blocks(page, tmp_path):
    pytest.importorskip("maxtext", reason="MaxText is not installed")
    check(page, tmp_path, slow=True)


@pytest.mark.parametrize("name", MUST_SHOW)
def test_there_are_transcripts_to_run(name):
    assert len(steps_of((ROOT / name).read_text())) >= 3


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_transcript_escapes(page):
    """A `$ command` in a block of another kind would never be run."""
    for fence in FENCE.finditer(page.read_text()):
        if fence[1].split()[:1] != ["console"]:
            assert not re.search(r"^\$ ", fence[2], re.MULTILINE), fence[0]
        else:
            assert fence[1] in ("console", "console slow"), f"```{fence[1]}"


GOOD = "# page\n```console\n$ echo a b | tr -d \\\n  ' '\nab\n$ false\n$ echo $?\n1\n```\n"


@pytest.mark.parametrize(
    ("text", "piece"),
    [
        (GOOD, None),
        (GOOD.replace("\nab\n", "\nabc\n"), "-abc\n+ab"),
        (GOOD.replace("\n1\n", "\n1\n2\n"), "-2"),
        (GOOD.replace("echo a b", "echo a b >&2; echo a b"), "+a b"),
        ("```console\n$ seq 9\n1\n...\n9\n```\n", None),
        ("```console\n$ seq 9\n1\n...\n```\n", None),
        ("```console\n$ seq 9\n1\n...\n8\n```\n", "+9"),
        ("```console\n$ echo took 3.1e-3 s\ntook 3.2 s\n```\n", "-took 3.2 s"),
        ("```console slow\n$ echo took 3.1e-3   s\ntook 3.2 s\n```\n", None),
        ("```console slow\n$ echo took 3.1e-3 s\ntook 3.2 ms\n```\n", "-took N ms"),
    ],
)
def test_drift_is_seen(tmp_path, text, piece):
    page = tmp_path / "page.md"
    page.write_text(text)
    folder = tmp_path / "folder"
    folder.mkdir()
    if piece is None:
        check(page, folder, slow=True)
        return
    with pytest.raises(pytest.fail.Exception) as failure:
        check(page, folder, slow=True)
    assert piece in str(failure.value)


def test_a_block_without_a_command_is_an_error():
    with pytest.raises(ValueError, match="line 2"):
        steps_of("```console\nls\n```\n")


def update(page: Path, slow: bool) -> None:
    """Write what the commands print now into the page."""
    text = page.read_text()
    steps = [step for step in steps_of(text) if slow or not step.slow]
    with tempfile.TemporaryDirectory() as folder:
        printed = run(steps, Path(folder))
    lines = text.splitlines()
    for step, output in reversed(list(zip(steps, printed, strict=True))):
        if "..." in step.output.splitlines():
            continue
        start = step.line - 1 + len(step.command.splitlines())
        lines[start : start + len(step.output.splitlines())] = output.splitlines()
    page.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="write the outputs of the commands into these pages")
    parser.add_argument("--slow", action="store_true")
    parser.add_argument("page", nargs="+", type=Path)
    arguments = parser.parse_args()
    for name in arguments.page:
        update(name, arguments.slow)
