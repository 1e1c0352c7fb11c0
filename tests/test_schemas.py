"""Real documents of every tool keep the JSON Schema of their kind; a key that a schema does not name fails.

The tools run in this process on the examples, bench_driver on the fake trainer. What only a real engine or a compile
prints (memory, staging, resident bytes) is held to the same schemas by the tests that run those.
"""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import pytest
from test_bench_driver import fake, tiny  # noqa: F401  (fixtures)
from test_robustness import AOT_LOG, BIG, HLO, LOG, LOG_B, PROJECT, TINY, numerics  # noqa: F401

jsonschema = pytest.importorskip("jsonschema")
ROOT = Path(__file__).resolve().parent.parent
SCHEMAS = sorted((ROOT / "schemas").glob("*.schema.json"))
OTHER_HLO = ROOT / "examples" / "hlo" / "moe_ring_tpu7x.txt"
ALLOW = ROOT / "examples" / "allow_bench.yaml"


def schema_of(name: str) -> dict:
    return json.loads((ROOT / "schemas" / f"{name.replace('/', '-')}.schema.json").read_text())


def check(document: dict, name: str) -> None:
    """Assert that a document says first what it is, and keeps that schema."""
    assert next(iter(document.items())) == ("schema", name)
    jsonschema.Draft202012Validator(schema_of(name)).validate(document)


@pytest.fixture
def ask(capsys, numerics):  # noqa: F811
    """Return a function that runs a tool with --json and returns its one document."""

    def call(tool: str, *options: object) -> dict:
        options = [str(option).replace("{good}", str(numerics)) for option in options]
        assert importlib.import_module(tool).main([*options, "--json"]) in (0, 1)
        return json.loads(capsys.readouterr().out)

    return call


DOCUMENTS = {
    "diff-render/1": [
        ("diff_render", TINY, BIG),
        ("diff_render", TINY, TINY),
        ("diff_render", TINY, BIG, "--allow", ALLOW, "--strict", "--select", "all"),
        ("diff_render", TINY, BIG, "--summary"),
    ],
    "diff-config/1": [
        ("diff_config", LOG, LOG_B),
        ("diff_config", LOG, LOG, "--summary"),
        ("diff_config", LOG, "--asked", BIG),
        ("diff_config", ROOT / "tests" / "fixtures_diff" / "two_processes.log", LOG, "--block", "all"),
    ],
    "hlo-overlap/1": [("hlo_overlap", HLO), ("hlo_overlap", OTHER_HLO, HLO), ("hlo_overlap", OTHER_HLO, "--top=0")],
    "hlo-overlap-diff/1": [("hlo_overlap", HLO, "--diff", OTHER_HLO), ("hlo_overlap", HLO, "--diff", HLO)],
    "aot-bench/1": [("aot_bench", "--summarize", AOT_LOG), ("aot_bench", "--summarize", AOT_LOG, "--hbm-gib=30")],
    "trainer-bench-numerics/1": [
        ("check_numerics_cpu", "--compare", "{good}", "{good}"),
        ("check_numerics_cpu", "--list"),
    ],
}
CASES = [(name, command) for name, commands in DOCUMENTS.items() for command in commands]


@pytest.mark.parametrize(("name", "command"), CASES, ids=lambda value: value if isinstance(value, str) else None)
def test_document(ask, name, command):
    check(ask(*command), name)


def test_an_aot_document_beside_others(ask, tmp_path):
    before, run = tmp_path / "before.json", tmp_path / "run.json"
    before.write_text(json.dumps(ask("aot_bench", "--summarize", AOT_LOG)))
    memory = {"peak_bytes_max": 7 << 30, "devices": [{"id": 0, "peak_bytes": 7 << 30, "limit_bytes": 94 << 30}]}
    run.write_text(json.dumps({"schema": "trainer-bench/1", "memory": memory}))
    check(ask("aot_bench", "--summarize", AOT_LOG, "--compare", before, "--measured", run), "aot-bench/1")


@pytest.mark.parametrize("misbehave", ["", "raise", "nan"])
def test_trainer_bench(fake, tmp_path, misbehave):  # noqa: F811
    options = ["--steps=9", "--warmup=2", "--routing-load=1.2", f"--steps-file={tmp_path}/steps"]
    document = fake(*options, misbehave=misbehave)[1]
    check(document, "trainer-bench/1")
    lines = [json.loads(line) for line in (tmp_path / "steps").read_text().splitlines()]
    validator = jsonschema.Draft202012Validator(schema_of("trainer-bench-steps/1"))
    for line in lines:
        validator.validate(line)
    assert lines[0]["schema"] == next(iter(lines[0].values())) == "trainer-bench-steps/1"
    assert lines[1:] == document["steps"]


@pytest.mark.parametrize("broken", [{"MAXTEXT_EXTRA_FLAGS": "x"}, {"TRAINER_ARGV": "'"}])
def test_trainer_bench_of_a_run_that_could_not_start(fake, tiny, broken):  # noqa: F811
    for name, value in broken.items():
        tiny.setenv(name, value)
    document = fake("--steps=1")[1]
    assert document["status"] == "failed" and document["batch"] is None
    check(document, "trainer-bench/1")


def test_numerics_of_every_kind():
    """The rows of checks and audits, without running the engine."""
    import dataclasses

    module = importlib.import_module("check_numerics_cpu")
    finding = importlib.import_module("numerics_checks").Finding("a", None, "ulps", "<= 1", "rounding")
    row = {"check": "payload", **dataclasses.asdict(finding)}
    noticed = {"check": "payload", "fault": "x", "done": "y", "noticed": True, "by": "z"}
    more = {"launch": "tiny", "versions": {"jax": "1"}, "shrunk": []}
    knobs = importlib.import_module("numerics_knobs")
    same = knobs.Distance(*[0.0] * len(dataclasses.fields(knobs.Distance)))
    tried = [knobs.Row("dtype", None, "float32", *knobs.verdict(same, same), True, same, same, 1.0),
             knobs.Row("b", None, None, knobs.UNKNOWN, "not an option", True)]  # fmt: skip
    more_of_knobs = {"table": ["a"], "knobs": [one.as_dict() for one in tried], "noise_floor": same.as_dict()}
    check(module.document("checks", [row], **more, **more_of_knobs), "trainer-bench-numerics/1")
    check(module.document("audit", [noticed], **more), "trainer-bench-numerics/1")


# --- the schemas themselves ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SCHEMAS, ids=lambda path: path.name)
def test_schema(path):
    schema = json.loads(path.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert path.name == schema["title"].replace("/", "-") + ".schema.json"
    for form in schema.get("oneOf", [schema]):
        assert form["additionalProperties"] is False and form["required"]


def test_every_schema_that_a_tool_prints_is_here():
    """A name and version in the sources (`trainer-bench/1`) has a schema, but for what is a file of numbers."""
    printed = set()
    for path in ROOT.glob("*.py"):
        printed |= set(re.findall(r'^(?:SCHEMA\w*|SIGNATURE) = "([\w-]+/\d+)"$', path.read_text(), re.MULTILINE))
    assert printed - {"trainer-numerics/1"} == {json.loads(path.read_text())["title"] for path in SCHEMAS}


@pytest.mark.parametrize("name", ["trainer-bench/1", "diff-render/1", "hlo-overlap/1"])
def test_an_unknown_key_and_a_missing_key_are_seen(ask, fake, name):  # noqa: F811
    document = fake("--steps=1")[1] if name == "trainer-bench/1" else ask(*DOCUMENTS[name][0])
    known = list(document)[1]
    for broken in ({**document, "new": 1}, {key: value for key, value in document.items() if key != known}):
        with pytest.raises(jsonschema.ValidationError):
            check(broken, name)


def test_every_tool_with_a_report_is_covered():
    scripts = {target.partition(":")[0] for target in PROJECT["project"]["scripts"].values()}
    covered = {command[0] for commands in DOCUMENTS.values() for command in commands} | {"bench_driver"}
    assert scripts - covered == {"render_bench"}  # it prints YAML
