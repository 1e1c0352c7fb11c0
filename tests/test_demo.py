"""The main job, whole: render the tiny launch, run the rendered client command itself, read its result.

Slow for a test (one process imports MaxText and compiles), so everything about it is asked of one run. The
transcript in the README is compared with this run, numbers aside.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import render_bench

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The finished process of the rendered command, and its last line as JSON."""
    pytest.importorskip("maxtext", reason="MaxText is not installed")
    render = tmp_path_factory.mktemp("demo") / "demo.yaml"
    argv = ["--launch-render", str(ROOT / "examples" / "launch_tiny.yaml"), "--name", "demo", "--steps", "3"]
    assert render_bench.main([*argv, "--out", str(render), "--quiet"]) == 0
    environment = {**os.environ, "BENCH_CPU_SMOKE": "1"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    process = subprocess.run([sys.executable, "examples/run_client.py", str(render)], cwd=ROOT, env=environment,
                             capture_output=True, text=True)  # fmt: skip
    assert process.returncode in (0, 1), process.stderr[-4000:]
    return process, json.loads(process.stdout.splitlines()[-1])


def test_three_steps_of_three_micro_batches_on_four_devices(demo):
    process, document = demo
    assert document["schema"] == "trainer-bench/1"
    assert document["status"] == "ok", document["error"]
    assert [step["index"] for step in document["steps"]] == [0, 1, 2]
    assert all(len(step["losses"]) == 3 for step in document["steps"])
    assert document["mesh"] == {"fsdp": 2, "expert": 2}
    assert document["verdict"] == "not enough" and process.returncode == 1  # three steps support no claim


def test_what_was_rendered_is_what_ran(demo):
    _, document = demo
    assert "--mesh_expert=2" in document["trainer_argv"]
    assert "--loss_agg_mode=token-mean" in document["orch_argv"]
    assert "num_vocab_tiling=2" in document["flags"]["MAXTEXT_EXTRA_FLAGS"]
    assert document["flags"]["LIBTPU_INIT_ARGS"].startswith("--xla_tpu_")
    assert document["config"]["gradient_clipping_threshold"] == 0.125
    assert re.fullmatch("[0-9a-f]{64}", document["provenance"]["input_sha256"])


def test_it_says_what_it_shrank(demo):
    _, document = demo
    shrunk = {item["what"]: item["now"] for item in document["shrunk"]}
    assert shrunk["num_experts"] == "8"
    assert any("--cpu-smoke" in line for line in document["may_not_be_used_to_claim"])


def numberless(text):
    """Replace every number, so that two runs of one program compare equal; drop MaxText's own lines."""
    lines = [line for line in text.splitlines() if not line.startswith(("[NO-OP]", "{"))]
    return [re.sub(r"\s+", " ", re.sub(r"-?\d[\d.,e+-]*", "N", line)).strip() for line in lines]


def test_readme_transcript_is_this_run(demo):
    process, _ = demo
    readme = (ROOT / "README.md").read_text()
    block = re.search(r"<!-- demo: begin -->\n```\n(.*?)```\n<!-- demo: end -->", readme, re.DOTALL)
    assert block, "README.md has no demo transcript"
    shown = numberless(block[1])
    assert len(shown) > 10
    happened = numberless(process.stdout)
    missing = [line for line in shown if line not in happened and line != "..." and not line.startswith(("{", "=="))]
    assert missing == []
