"""The Makefile: its list of commands, and the set-up with uv, without it, and where it fails."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
# Stand for the programs in .venv/bin: each call is a line of `log`, and fails where its environment says so.
STUBS = {
    "python": 'echo "python $*" >> log; case "$*" in *" uv") exit $FAIL_GET_UV;; *) exit $FAIL_PIP;; esac',
    "uv": 'echo "uv $*" >> log; exit $FAIL_UV',
    "ruff": 'echo "ruff $*" >> log',
}
UV, PIP = "uv pip install", "python -m pip install -q --disable-pip-version-check"
PACKAGES = "-c constraints.txt -e .[aot,plot,test]"


def make(folder: Path, *words: str, **fail: int) -> subprocess.CompletedProcess[str]:
    switches = {name: str(fail.get(name, 0)) for name in ("FAIL_GET_UV", "FAIL_UV", "FAIL_PIP")}
    return subprocess.run(["make", f"PYTHON={sys.executable}", *words], cwd=folder, capture_output=True, text=True,
                          env={"PATH": "/usr/local/bin:/usr/bin:/bin", **switches})  # fmt: skip


@pytest.fixture
def checkout(tmp_path):
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    for name, text in STUBS.items():
        (tmp_path / ".venv" / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / ".venv" / "bin" / name).chmod(0o755)
    return tmp_path


def test_make_alone_lists_the_commands(checkout):
    done = make(checkout)
    assert (done.returncode, done.stderr) == (0, "")
    names = [line.split()[:2] for line in done.stdout.splitlines()]
    assert {"demo", "test", "lint", "clean"} < {name for _, name in names} and {word for word, _ in names} == {"make"}


@pytest.mark.parametrize(
    ("fail", "installs"),
    [
        ({}, [UV]),
        ({"FAIL_GET_UV": 1}, [PIP]),
        ({"FAIL_UV": 1}, [UV, PIP]),  # an index that pip is configured for and uv does not know
        ({"FAIL_GET_UV": 1, "FAIL_PIP": 1}, [PIP]),
    ],
)
def test_the_set_up_happens_once_with_uv_or_with_pip(checkout, fail, installs):
    done = make(checkout, "lint", **fail)
    fine = "FAIL_PIP" not in fail
    assert (done.returncode == 0) == fine and (checkout / ".venv" / ".installed").exists() == fine
    calls = (checkout / "log").read_text().splitlines()
    assert len(calls) == 1 + len(installs) + 2 * fine  # the attempt to get uv, and both ruff commands
    for call, program in zip(calls[1:], installs, strict=False):
        assert call.startswith(program) and call.endswith(PACKAGES)
    if fine:
        (checkout / "log").unlink()
        assert make(checkout, "lint").returncode == 0
        assert (checkout / "log").read_text().splitlines() == ["ruff check .", "ruff format --check ."]


def test_an_interpreter_that_does_not_fit_is_named_in_one_line(checkout):
    (checkout / "python3").write_text("#!/bin/sh\necho 'pyenv: python3: command not found'\nexit 127\n")
    (checkout / "python3").chmod(0o755)
    done = make(checkout, "lint", f"PYTHON={checkout}/python3")
    assert done.returncode == 2 and not (checkout / "log").exists()
    assert done.stderr.startswith("make: no Python >= 3.12 found; name one: make PYTHON=")
