"""Every tool against bad input, bad output and a bad environment: one line, the right stream, the right exit code.

READERS names every way a text or file enters a tool, WRITERS every file a tool writes, TOOLS one good command of each.
A new tool or a new file option belongs into these tables; `test_every_tool_is_here` sees a tool that is missing.
Time is bounded as processor time of this process (ITIMER_PROF), so that a busy machine fails nothing.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import json
import os
import random
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from fake_trainer import FakeProgram, install
from launches import driver_environment
from test_hlo_overlap import mutate

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES, DATA, FIXTURES = ROOT / "examples", ROOT / "tests" / "data", ROOT / "tests" / "fixtures"
TINY, BIG = EXAMPLES / "launch_tiny.yaml", EXAMPLES / "launch_dryrun.yaml"
LOG, LOG_B = EXAMPLES / "config_a.log", EXAMPLES / "config_b.log"
HLO = EXAMPLES / "hlo" / "dense_fsdp_v5e.txt"
AOT_LOG = DATA / "aot" / "oom_by_type.log"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PAYLOAD = ["--payload-only", "--cpu-smoke"]  # what bench_driver does without an engine
WORK_SECONDS = 20  # of processor time for one input, the largest of which is 20 MB


class Reader(NamedTuple):
    """A way into a tool: its options, with `{}` where the input's name stands, and a good input."""

    tool: str
    options: list[str]
    good: bytes


def allow_list() -> bytes:
    return (EXAMPLES / "allow_bench.yaml").read_bytes()


READERS = {
    "render_bench": Reader("render_bench", ["--name=x", "--quiet", "--launch-render={}"], TINY.read_bytes()),
    "render_bench, orchestrator": Reader(
        "render_bench", ["--name=x", "--quiet", f"--launch-render={TINY}", "--orch-render={}"], TINY.read_bytes()
    ),
    "diff_render, A": Reader("diff_render", ["{}", str(TINY)], BIG.read_bytes()),
    "diff_render, B": Reader("diff_render", [str(TINY), "{}"], TINY.read_bytes()),
    "diff_render, allowed": Reader("diff_render", [str(TINY), str(TINY), "--allow={}"], allow_list()),
    "diff_config, A": Reader("diff_config", ["{}", str(LOG)], LOG_B.read_bytes()),
    "diff_config, B": Reader("diff_config", [str(LOG), "{}"], LOG_B.read_bytes()),
    "diff_config, result": Reader(
        "diff_config", [str(LOG), "{}"], b'{"schema": "trainer-bench/1", "config": {"a": 1}}'
    ),
    "diff_config, asked": Reader("diff_config", [str(LOG), "--asked={}"], TINY.read_bytes()),
    "diff_config, allowed": Reader(
        "diff_config", [str(LOG), str(LOG_B), "--allow={}"], b"- path: steps\n  reason: shorter\n"
    ),
    "hlo_overlap": Reader("hlo_overlap", ["{}"], HLO.read_bytes()),
    "hlo_overlap, other": Reader("hlo_overlap", [str(HLO), "--diff={}"], HLO.read_bytes()),
    "bench_driver, routing": Reader("bench_driver", [*PAYLOAD, "--routing-load={}"], b"layer,max_over_mean\n0,1.2\n"),
    "bench_driver, routing JSON": Reader("bench_driver", [*PAYLOAD, "--routing-load={}"], b"[1.2]"),
    "bench_driver, lengths": Reader("bench_driver", [*PAYLOAD, "--sequence-lengths={}"], b"90\n100\n110\n"),
    "bench_driver, replay": Reader("bench_driver", [*PAYLOAD, "--replay={}"], b""),  # filled in by `good`
    "aot_bench": Reader("aot_bench", ["--launch-render={}", "--lower-only"], TINY.read_bytes()),
    "aot_bench, log": Reader("aot_bench", ["--summarize={}"], AOT_LOG.read_bytes()),
    "aot_bench, prediction": Reader("aot_bench", ["--prediction={}"], b""),
    "aot_bench, other": Reader("aot_bench", [f"--summarize={AOT_LOG}", "--compare={}"], b""),
    "aot_bench, measured": Reader("aot_bench", [f"--summarize={AOT_LOG}", "--measured={}"], b""),
    "check_numerics_cpu": Reader("check_numerics_cpu", ["--launch-render={}"], TINY.read_bytes()),
    "check_numerics_cpu, A": Reader("check_numerics_cpu", ["--compare", "{}", "{good}"], b""),
    "check_numerics_cpu, B": Reader("check_numerics_cpu", ["--compare", "{good}", "{}"], b""),
}
STARTS_AN_ENGINE = ("aot_bench", "check_numerics_cpu")  # a good launch is not for these tests
# A good command of each tool that prints something and starts no engine.
TOOLS = {
    "render_bench": ["--name=x", "--quiet", f"--launch-render={TINY}"],
    "diff_render": [str(TINY), str(BIG)],
    "diff_config": [str(LOG), str(LOG_B)],
    "hlo_overlap": [str(HLO)],
    "bench_driver": PAYLOAD,
    "aot_bench": [f"--summarize={AOT_LOG}"],
    "check_numerics_cpu": ["--compare", "{good}", "{good}"],
}
LIGHT = {"render_bench": ["yaml"], "diff_render": ["yaml"], "diff_config": ["yaml"], "hlo_overlap": []}
ACCELERATED = ("jax", "jaxlib", "maxtext", "tunix", "flax", "optax", "libtpu")


@pytest.fixture(autouse=True)
def tiny_launch(monkeypatch):
    """The environment of a rendered bench of the tiny launch."""
    for name, value in driver_environment("launch_tiny").items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("LAUNCH_RENDER", raising=False)


@pytest.fixture(scope="session")
def numerics(tmp_path_factory) -> Path:
    """A file as bench_driver --save-numerics writes it."""
    path = tmp_path_factory.mktemp("numerics") / "good.npz"
    about = {"schema": "trainer-numerics/1", "micro_batches_sha256": "0" * 64, "seed": 0, "versions": {}, "maxtext": {}}
    np.savez(path, about=np.array(json.dumps(about)), losses=np.full((3, 2), 0.5), gradient_norms=np.ones(3),
             **{"weights/decoder.kernel": np.ones((4, 4), np.float32)})  # fmt: skip
    return path


class Bounded(Exception):
    """An input took too much work."""


@contextlib.contextmanager
def work_limit(seconds: float = WORK_SECONDS):
    """Raise Bounded in the middle of what takes more processor time than this."""

    def stop(*_):
        raise Bounded(f"more than {seconds} s of work")

    old = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, old)


@pytest.fixture
def run(capsys, numerics):
    """Return a function that runs a tool in this process under the work limit: (code, stdout, stderr)."""

    def call(tool: str, options: list[str]) -> tuple[int, str, str]:
        options = [option.replace("{good}", str(numerics)) for option in options]
        with work_limit():
            code = importlib.import_module(tool).main(options)
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def read(run, tmp_path):
    """Return a function that gives a reader an input by its name or bytes: (code, stdout, stderr)."""

    def call(name: str, content: bytes | Path) -> tuple[int, str, str]:
        path = content if isinstance(content, Path) else tmp_path / ("input.json" if "JSON" in name else "input")
        if isinstance(content, bytes):
            path.write_bytes(content)
        reader = READERS[name]
        return run(reader.tool, [option.replace("{}", str(path)) for option in reader.options])

    return call


def refused(tool: str, answer: tuple[int, str, str], piece: str = "") -> None:
    """Assert exit code 2, nothing on stdout, one line on stderr that names the tool and what is wrong."""
    code, out, err = answer
    assert (code, out) == (2, ""), answer
    assert err.startswith(f"{tool}: ") and err.endswith("\n") and err.count("\n") == 1, err
    assert piece in err and len(err) < 2000, err[:3000]


def answered_or_refused(tool: str, answer: tuple[int, str, str]) -> None:
    """Assert exit code 0 or 1, or 2 with nothing on stdout and a last line that names the tool; never a traceback."""
    code, out, err = answer
    assert code in (0, 1, 2), answer
    assert "Traceback" not in err
    if code == 2:
        # A module that is cut off is shown as far as it goes: the code says that it is no answer (--partial).
        assert out == "" or "give --partial to accept" in err, answer
        assert err.splitlines()[-1].startswith(f"{tool}: "), answer
    assert all(line.startswith((f"{tool}: ", "  ")) and len(line) < 2000 for line in err.splitlines()), err


def test_every_tool_is_here():
    scripts = {target.partition(":")[0] for target in PROJECT["project"]["scripts"].values()}
    assert set(TOOLS) == scripts == {reader.tool for reader in READERS.values()}


# --- input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", READERS)
def test_missing_file(read, tmp_path, name):
    refused(READERS[name].tool, read(name, tmp_path / "missing"), "missing: ")


@pytest.mark.parametrize("name", READERS)
def test_directory(read, tmp_path, name):
    refused(READERS[name].tool, read(name, tmp_path), str(tmp_path))


BAD = {
    "empty": b"",
    "blank": b"\n \n",
    "binary": bytes(range(255, -1, -1)) * 64,
    "utf-16": "\ufeffapiVersion: v1\nConfig param a: 1\nHloModule x\n".encode("utf-16-le"),
    "latin-1": b"apiVersion: v1\nname: caf\xe9\n",
    "zip": b"PK\x03\x04" + bytes(200),
    "gzip": b"\x1f\x8b\x08\x00" + bytes(200),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("name", READERS)
def test_not_what_it_reads(read, name, kind):
    refused(READERS[name].tool, read(name, BAD[kind]))


@pytest.mark.parametrize(
    "name", [name for name in READERS if "bench_driver" not in name and "check_numerics_cpu," not in name]
)
def test_nothing_on_stdin(run, monkeypatch, name):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"")))
    reader = READERS[name]
    refused(reader.tool, run(reader.tool, [option.replace("{}", "-") for option in reader.options]), "<stdin>: ")


def good(name: str, numerics: Path, tmp_path: Path, run) -> bytes:
    """Return the good input of a reader; some have to be made."""
    if name == "bench_driver, replay":
        assert run("bench_driver", [*PAYLOAD, f"--save-payload={tmp_path}/batch.npz"])[0] == 0
        return (tmp_path / "batch.npz").read_bytes()
    if name in ("aot_bench, prediction", "aot_bench, other"):
        return run("aot_bench", [f"--summarize={AOT_LOG}", "--json"])[1].encode()
    if name == "aot_bench, measured":
        return json.dumps({"schema": "trainer-bench/1", "memory": {"peak_bytes_max": 7 << 30}}).encode()
    if name.startswith("check_numerics_cpu,"):
        return numerics.read_bytes()
    return READERS[name].good


@pytest.mark.parametrize("name", READERS)
def test_truncated_input(read, run, numerics, tmp_path, name):
    """Cut anywhere: an answer or a refusal; what was cut in its middle is never a silent 0 for JSON and archives."""
    whole = good(name, numerics, tmp_path, run)
    assert whole
    tool = READERS[name].tool
    for share in (0.02, 0.3, 0.5, 0.77, 0.95):
        part = whole[: int(len(whole) * share)]
        if tool in STARTS_AN_ENGINE and READERS[name].good == TINY.read_bytes() and share > 0.9:
            continue  # may be a whole launch already
        answered_or_refused(tool, read(name, part))
        if whole.startswith((b"{", b"PK")):
            refused(tool, read(name, part))


HUGE_LINES = [
    "x",
    "a: ",
    "[",
    "{",
    '{"a":',
    '"',
    "'",
    "- ",
    "(",
    "%a = f32[2]{0} add(",
    "Config param a: [",
    "9",
    "\\",
    "&a *a ",
    "REQUIRED_RBF per_layer=[",
    "moe_max_load_ratio: 1.",
    "CompiledMemoryStats(temp_size_in_bytes=",
    "Ran out of memory in memory space hbm. Used ",
    "TRAINER_ARGV=",
]


@pytest.mark.parametrize("name", READERS)
def test_huge_line(read, name):
    refused(READERS[name].tool, read(name, b"x" * 4_000_000))


# One of each kind: two options that read one format share its code.
FORMATS = ("render_bench", "diff_render, A", "diff_render, allowed", "diff_config, A", "hlo_overlap",
           "aot_bench, log", "aot_bench, other", "bench_driver, routing", "bench_driver, routing JSON",
           "bench_driver, lengths")  # fmt: skip


@pytest.mark.parametrize("name", [name for name in READERS if name in FORMATS])
def test_long_lines_of_what_nests(read, name):
    """Fifty kilobytes of one opening after the other: no recursion error, no quadratic time."""
    for part in HUGE_LINES:
        answered_or_refused(READERS[name].tool, read(name, part.encode() * (50_000 // len(part))))


@pytest.mark.slow
@pytest.mark.parametrize("part", HUGE_LINES)
@pytest.mark.parametrize("name", READERS)
def test_huge_line_of_what_nests(read, name, part):
    answered_or_refused(READERS[name].tool, read(name, part.encode() * (10_000_000 // len(part))))


YAML = b"apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: x\ndata:\n  a: "
TRAPS = {
    "number of 5000 digits": YAML + b"9" * 5000,
    "date that is none": YAML + b"2001-99-99",
    "time that is none": YAML + b"2001-01-01 25:61:61",
    "sexagesimal": YAML + b"190:20:30:99",
    "python object": YAML + b"!!python/object/apply:os.system [echo]",
    "binary tag": YAML + b"!!binary zzz",
    "set of lists": YAML + b"!!set {[a]: 1}",
    "key that is a list": YAML + b"{[a, b]: 1}",
    "circle": YAML + b"&a [*a]",
    "merge of a circle": YAML + b"&a {<<: *a}",
    "laughs": YAML + b"&a0 x\n" + b"".join(b"  a%d: &a%d [*a%d, *a%d]\n" % (n, n, n - 1, n - 1) for n in range(1, 99)),
    "deep list": YAML + b"[" * 300 + b"]" * 300,
    "deep map": b"".join(b" " * n + b"a:\n" for n in range(600)),
    "null byte": YAML + b"\0",
    "tab": YAML + b"\n\tb: 1",
    "carriage returns": YAML.replace(b"\n", b"\r"),
    "surrogate": YAML + b'"\\ud800"',
    "JSON number of 5000 digits": b'{"schema": "trainer-bench/1", "config": {"a": ' + b"9" * 5000 + b"}}",
    "JSON NaN": b'{"schema": "trainer-bench/1", "config": {"a": NaN}, "memory": NaN, "kernels": Infinity}',
    "JSON list": b"[1, 2]",
    "JSON string": b'"x"',
    "JSON of another kind": b'{"schema": "trainer-bench/1", "config": [], "memory": [], "kernels": 1, "verdict": {}}',
    "aot JSON of another kind": b'{"schema": "aot-bench/1", "kernels": {"a": 1}, "devices": [], "verdict": 3}',
    "surrogate in JSON": b'{"schema": "trainer-bench/1", "config": {"a": "\\ud800", "\\ud800": 1}}',
    "unknown schema": b'{"schema": "trainer-bench/99"}',
    "config lines": b"Config param a: \xff\xfe\nConfig param \nConfig param : \nConfig param a: " + b"[" * 4000,
    "config number of 5000 digits": b"Config param a: " + b"9" * 5000 + b"\n",
}  # fmt: skip


@pytest.mark.parametrize("trap", TRAPS)
def test_traps(read, trap):
    """Inputs that readers of YAML, JSON and Python values are known to trip over, for every reader."""
    for name in READERS:
        answered_or_refused(READERS[name].tool, read(name, TRAPS[trap]))


@pytest.mark.parametrize("name", [name for name in READERS if READERS[name].tool not in STARTS_AN_ENGINE])
def test_the_good_inputs_are_good(read, run, numerics, tmp_path, name):
    """Else the tests above would refuse for another reason."""
    code, out, err = read(name, good(name, numerics, tmp_path, run))
    assert code in (0, 1) and (out or code), err


# --- damaged text --------------------------------------------------------------------------------------------------

TOKENS = (
    ": |- |>|\t|---|...|&a|*a|!!str |!!python/none|? |<<: |'|\"|# |%YAML 9|\0|\ufeff|\x85|\u2028|\ud7ff|\r|$(A)|`|=|--"
)
FUZZED = {
    "render_bench": ("launch", [TINY, BIG, *sorted(FIXTURES.glob("*.txt"))]),
    "diff_render, A": ("launch", [TINY, BIG, *sorted(FIXTURES.glob("*.txt"))]),
    "diff_render, allowed": ("allowances", [EXAMPLES / "allow_bench.yaml"]),
    "diff_config, A": ("config log", [LOG, *sorted((ROOT / "tests" / "fixtures_diff").glob("*.log"))]),
    "diff_config, asked": ("launch", [TINY]),
    "aot_bench, log": ("compile log", [AOT_LOG]),
    "bench_driver, routing": ("routing", []),
}
ROUTING = [b"layer,max_over_mean\n0,1.2\n", b'{"layers": [1.2]}', b"[1.2]", b"completed step: 1, moe_load: 1.2\n"]


def damage(text: bytes, rng: random.Random) -> bytes:
    """Return the text with one to three damages: cut, shuffled, corrupted, tokens in wrong places, raw bytes."""
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        kind = rng.randrange(5)
        if kind < 2:
            text = (mutate(text.decode(errors="replace"), rng) if text else "").encode(errors="replace")
        elif kind == 2:
            tokens = [token.encode(errors="replace") for token in TOKENS.split("|")]
            for _ in range(rng.randrange(1, 20)):
                at = rng.randrange(len(text) + 1)
                text = text[:at] + rng.choice(tokens) + text[at:]
        elif kind == 3:  # indents are structure in YAML
            lines = text.split(b"\n")
            for _ in range(rng.randrange(1, 6)):
                at = rng.randrange(len(lines))
                lines[at] = rng.choice(
                    [b"  " + lines[at], lines[at].lstrip(), lines[at][2:], lines[at] + b"\n" + lines[at]]
                )
            text = b"\n".join(lines)
        elif text:
            data = bytearray(text)
            for _ in range(rng.randrange(1, 4)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            text = bytes(data)
    return text


def fuzz(read, name: str, seeds: range) -> None:
    """Give a reader one damaged input per seed."""
    sources = [path.read_bytes() for path in FUZZED[name][1]] or ROUTING
    for seed in seeds:
        content = damage(sources[seed % len(sources)], random.Random(f"{name} {seed}"))
        try:
            answered_or_refused(READERS[name].tool, read(name, content))
        except BaseException as error:
            raise AssertionError(f"{name}: seed {seed}") from error


@pytest.mark.parametrize("name", FUZZED)
def test_fuzz(read, name):
    fuzz(read, name, range(22))  # with the 100 of test_hlo_overlap.test_fuzz: some 250 a run


@pytest.mark.slow
@pytest.mark.parametrize("name", FUZZED)
def test_fuzz_long(read, name):
    fuzz(read, name, range(100, 500))  # 2,800; test_hlo_overlap.test_fuzz_long adds 5,900


# --- output --------------------------------------------------------------------------------------------------------

WRITERS = {
    "render_bench --out": ("render_bench", [*TOOLS["render_bench"], "--out={}"]),
    "hlo_overlap --trace": ("hlo_overlap", [*TOOLS["hlo_overlap"], "--trace={}"]),
    "bench_driver --save-payload": ("bench_driver", [*PAYLOAD, "--save-payload={}"]),
    "bench_driver --out": ("bench_driver", ["--steps=1", "--out={}"]),
    "bench_driver --steps-file": ("bench_driver", ["--steps=1", "--steps-file={}"]),
    "aot_bench --out": ("aot_bench", [*TOOLS["aot_bench"], "--out={}"]),
}


@pytest.fixture
def write(run, monkeypatch):
    """Return a function that has a tool write a file: (code, stdout, stderr)."""
    install(FakeProgram(), monkeypatch.setattr)

    def call(name: str, path: Path) -> tuple[int, str, str]:
        tool, options = WRITERS[name]
        return run(tool, [option.replace("{}", str(path)) for option in options])

    return call


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("place", ["missing/file", "folder", "file/below"])
def test_unwritable_output(write, tmp_path, name, place):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("kept")
    code, _, err = write(name, tmp_path / place)
    assert code == 2 and "Traceback" not in err
    assert re.search(rf"^{WRITERS[name][0]}: .*{place}: cannot write: ", err.splitlines()[-1])
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"] and os.listdir(tmp_path / "folder") == []
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_device_is_an_error_and_stays_a_device(write, tmp_path, name):
    before = os.stat("/dev/full")
    link = tmp_path / "full"  # through a link: a tool that renames over its output would replace only this
    link.symlink_to("/dev/full")
    code, _, err = write(name, link)
    assert code == 2 and re.search(r"full: cannot write: ", err.splitlines()[-1]), err
    assert link.is_symlink() and os.stat("/dev/full").st_rdev == before.st_rdev


@pytest.mark.parametrize("name", [name for name in WRITERS if "bench_driver" not in name])
def test_bad_input_leaves_the_output_alone(run, tmp_path, name):
    tool, options = WRITERS[name]
    (tmp_path / "out").write_text("kept")
    (tmp_path / "bad").write_text("\n")
    places = {str(TINY): str(tmp_path / "bad"), str(HLO): str(tmp_path / "bad"), str(AOT_LOG): str(tmp_path / "bad")}
    for old, new in places.items():
        options = [option.replace(old, new) for option in options]
    refused(tool, run(tool, [option.replace("{}", str(tmp_path / "out")) for option in options]))
    assert sorted(os.listdir(tmp_path)) == ["bad", "out"] and (tmp_path / "out").read_text() == "kept"


def program(tool: str, options: list[str], numerics: Path, **more) -> subprocess.Popen:
    command = [
        sys.executable,
        str(ROOT / f"{tool}.py"),
        *(option.replace("{good}", str(numerics)) for option in options),
    ]
    return subprocess.Popen(command, text=True, stderr=subprocess.PIPE, **more)


def ended(process: subprocess.Popen) -> tuple[int, str]:
    err = process.communicate()[1]
    return process.returncode, err


@pytest.mark.parametrize("tool", TOOLS)
def test_closed_pipe_is_quiet_and_the_verdict_still_counts(run, numerics, tool):
    """A pipe whose reader has gone before the first byte: harsher than `| head -1`, and the same each time."""
    code, out, err = run(tool, TOOLS[tool])
    assert out and code in (0, 1)
    reader, writer = os.pipe()
    os.close(reader)
    process = program(tool, TOOLS[tool], numerics, stdout=writer)
    os.close(writer)
    assert ended(process) == (code, err)


@pytest.mark.parametrize("tool", TOOLS)
def test_full_stdout_is_one_line_and_exit_2(run, numerics, tool):
    notes = run(tool, TOOLS[tool])[2].splitlines(keepends=True)
    with open("/dev/full", "w") as full:
        code, err = ended(program(tool, TOOLS[tool], numerics, stdout=full))
    *before, last = err.splitlines(keepends=True)
    assert (code, last) == (2, f"{tool}: stdout: cannot write: No space left on device\n")
    assert before == notes[: len(before)]  # what a tool notes before it writes


# --- command line and environment ----------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["--no-such-option", "--no-such=1", "-Z"])
@pytest.mark.parametrize("tool", TOOLS)
def test_unknown_option(capsys, tool, option):
    with pytest.raises(SystemExit) as stop:
        importlib.import_module(tool).main([*TOOLS[tool], option])
    out, err = capsys.readouterr()
    assert (stop.value.code, out) == (2, "")
    assert err.splitlines()[-1].startswith(f"{tool}: error: ") and option.partition("=")[0] in err.splitlines()[-1]


@pytest.mark.parametrize("tool", TOOLS)
def test_help_names_exit_codes_and_two_examples(capsys, tool):
    with pytest.raises(SystemExit) as stop:
        importlib.import_module(tool).main(["--help"])
    out, err = capsys.readouterr()
    assert (stop.value.code, err) == (0, "")
    assert re.search(r"^Exit (status|codes): ", out, re.MULTILINE)
    examples = out[out.index("Examples:") : out.index("\noptions:")]
    assert len(re.findall(rf"^.*\b{tool.replace('_', '[-_]')}(\.py)? ", examples, re.MULTILINE)) >= 2


@pytest.mark.parametrize("tool", LIGHT)
def test_light_tools_run_with_their_declared_dependencies_alone(run, numerics, tmp_path, tool):
    """Python without site-packages: the standard library, the repository and, where declared, PyYAML's own folder."""
    for package in LIGHT[tool]:
        (tmp_path / package).symlink_to(Path(importlib.import_module(package).__file__).parent)
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path)}
    code, out, err = run(tool, TOOLS[tool])
    for options, expected in ((TOOLS[tool], (code, out, err)), (["--help"], None)):
        done = subprocess.run([sys.executable, "-S", str(ROOT / f"{tool}.py"), *options], capture_output=True,
                              text=True, env=environment)  # fmt: skip
        if expected:
            assert (done.returncode, done.stdout, done.stderr) == expected
        else:
            assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("usage: ")


ENGINE_TOOLS = {
    "bench_driver": ["--cpu-smoke"],
    "aot_bench": [f"--launch-render={TINY}"],
    "check_numerics_cpu": ["--only=payload"],
}


@pytest.mark.parametrize("tool", ENGINE_TOOLS)
def test_engine_tools_name_what_the_light_installation_lacks(tmp_path, tool):
    """`pip install .` brings all seven commands and PyYAML alone: help is there, and what is missing is one line."""
    (tmp_path / "yaml").symlink_to(Path(importlib.import_module("yaml").__file__).parent)
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path), **driver_environment("launch_tiny")}
    run = functools.partial(subprocess.run, capture_output=True, text=True, env=environment)
    done = run([sys.executable, "-S", str(ROOT / f"{tool}.py"), "--help"])
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("usage: ")
    done = run([sys.executable, "-S", str(ROOT / f"{tool}.py"), *ENGINE_TOOLS[tool]])
    assert done.returncode == 2 and "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert re.fullmatch(rf"{tool}: .*(MaxText|numpy|jax) is not installed here; .*install.*", last)


@pytest.mark.parametrize("tool", TOOLS)
def test_help_imports_no_accelerator_package(tool):
    code = (
        "import runpy, sys\n"
        "sys.argv = sys.argv[1:]\n"
        "try:\n    runpy.run_path(sys.argv[0], run_name='__main__')\n"
        f"except SystemExit as stop:\n    sys.exit(stop.code or ' '.join(set(sys.modules) & set({ACCELERATED})) or 0)\n"
    )
    command = [sys.executable, "-c", code, str(ROOT / f"{tool}.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={"PATH": os.environ["PATH"]})
    assert (done.returncode, done.stderr) == (0, "")
