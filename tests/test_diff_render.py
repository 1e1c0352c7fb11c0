"""diff_render and render_tree: single flags, keyed lists, renames, noise, allow lists, formats, properties.

Run: python -m pytest tests/test_diff_render.py. tests/fixtures_diff/launch.yaml and bench.yaml are a launch
and its bench written by hand; what differs between them is written out below by hand as well.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import io
import json
import pathlib
import random
import re
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import allow_list
import diff_render
import launch_render
import render_bench
import render_tree
from diff_render import main
from render_tree import Leaf, Map, flag_map, plain

ROOT = pathlib.Path(__file__).parent.parent
FIXTURES = ROOT / "tests" / "fixtures_diff"
LAUNCH, BENCH = FIXTURES / "launch.yaml", FIXTURES / "bench.yaml"
RENDERS = [LAUNCH, BENCH, ROOT / "examples/launch_dryrun.yaml", ROOT / "examples/launch_tiny.yaml"]
MAIN = "trainer/spec/replicatedJobs/proc/template/spec/template/spec/containers/main"
COMMAND = f"{MAIN}/command"


@pytest.fixture
def files(tmp_path):
    def write(*texts):
        paths = []
        for index, text in enumerate(texts):
            path = tmp_path / f"{'abcdef'[index]}.yaml"
            path.write_bytes(text if isinstance(text, bytes) else text.encode())
            paths.append(str(path))
        return paths

    return write


@pytest.fixture
def run(capsys):
    def call(*argv):
        code = main([str(arg) for arg in argv])
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture
def run_json(run):
    def call(*argv):
        code, out, err = run(*argv, "--json")
        return code, json.loads(out), err

    return call


@pytest.fixture
def edited(run_json, files):
    """Compare the hand-written launch with itself after replacements; return (code, document)."""

    def call(*pairs, options=()):
        text = LAUNCH.read_text()
        for old, new in pairs:
            assert text.count(old) >= 1, old
            text = text.replace(old, new, 1)
        code, document, _ = run_json(LAUNCH, *files(text), *options)
        return code, document

    return call


def brief(document) -> list[tuple]:
    return [(c["kind"], c["path"], c["a"], c["b"]) for c in document["changes"]]


# --- a launch and its bench ----------------------------------------------------------------------


def test_launch_against_bench(run_json):
    code, document, err = run_json(LAUNCH, BENCH)
    assert code == 1 and document["schema"] == "diff-render/1" and document["select"] == "trainer"
    changes = {c["path"]: (c["kind"], c["a"], c["b"]) for c in document["changes"]}
    hosts = (
        "trainer/spec/replicatedJobs/proc/template/spec/template/spec/affinity/podAffinity/"
        "requiredDuringSchedulingIgnoredDuringExecution/kubernetes.io~1hostname/labelSelector/matchExpressions/"
        "jobset.sigs.k8s.io~1jobset-name In/values"
    )
    wrapper = {path: changes.pop(f"{COMMAND}/wrapper/{path}") for path in ("before", "after")}
    assert wrapper["before"][1] == "# runs the trainer\nexport HF_HOME=/tmp/hf\n(\n"
    sources = changes.pop(f"{COMMAND}/sources")
    assert re.fullmatch(r"sha256:[0-9a-f]{64} \(2 lines\)", sources[2]["bench_driver.py"])
    assert changes == {
        "trainer/metadata/name": ("renamed", "ada-train", "ada-bench"),
        "trainer/metadata/labels/scheduling.x-k8s.io~1gang-id": ("changed", "ada", "ada-bench"),
        "trainer/spec/failurePolicy/maxRestarts": ("changed", 3, 0),
        hosts: ("renamed", ["ada-train"], ["ada-bench"]),
        f"{COMMAND}/program": (
            "changed", "python -m tunix.experimental.distributed.runtime.main", 'python "$BENCH_DIR/bench_driver.py"',
        ),
        f"{COMMAND}/argv/--worker_id": ("renamed", "ada-train", "ada-bench"),
        f"{COMMAND}/MAXTEXT_EXTRA_FLAGS/num_moe_token_chunks": ("changed", "2", "4"),
        f"{COMMAND}/driver": ("added", None, {"--steps": "5", "--warmup": "2"}),
        f"{COMMAND}/BENCH_RENDER_VERSION": ("added", None, "0.1.0"),
    }  # fmt: skip
    assert "kubectl delete" in err


def test_golden_text(run):
    code, out, _ = run(LAUNCH, BENCH)
    assert code == 1 and out == (FIXTURES / "launch_bench.txt").read_text()
    assert max(map(len, out.splitlines())) <= 80


def test_sources_are_shown_on_request(run, run_json, files):
    other = files(BENCH.read_text().replace("$$5, and", "$$6, and"))[0]
    path = f"{COMMAND}/sources/bench_driver.py"
    _, document, _ = run_json(BENCH, other)
    assert [(c["path"], c["a"][:7]) for c in document["changes"]] == [(path, "sha256:")]
    _, document, _ = run_json(BENCH, other, "--show-sources")
    assert document["changes"][0]["a"] == 'def main():\n    print("$5, and $(no)")\n'
    assert '-    print("$5' not in run(BENCH, other)[1]
    assert '| -    print("$5, and $(no)")' in run(BENCH, other, "--show-sources")[1]
    assert '+    print("$6, and $(no)")' in run(BENCH, other, "--show-sources", "--format", "markdown")[1]


# --- single changes ------------------------------------------------------------------------------

ONE_CHANGE = [
    (("megablox=true", "megablox=false"), "changed", f"{COMMAND}/MAXTEXT_EXTRA_FLAGS/megablox", "true", "false"),
    (("megablox=true ", ""), "removed", f"{COMMAND}/MAXTEXT_EXTRA_FLAGS/megablox", "true", None),
    (("megablox=true ", "megablox=true new=1 "), "added", f"{COMMAND}/MAXTEXT_EXTRA_FLAGS/new", None, "1"),
    (("--mesh_fsdp=32", "--mesh_fsdp=16"), "changed", f"{COMMAND}/argv/--mesh_fsdp", "32", "16"),
    ((" --debug ", " "), "removed", f"{COMMAND}/argv/--debug", None, None),
    ((" --debug ", " --debug=true "), "changed", f"{COMMAND}/argv/--debug", None, "true"),
    (("limit_kib=65536 --mega", "limit_kib=98304 --mega"), "changed",
     f"{COMMAND}/LIBTPU_INIT_ARGS/--xla_tpu_scoped_vmem_limit_kib", "65536", "98304"),
    (("- --xla_tpu_scoped_vmem_limit_kib=65536", "- --xla_tpu_scoped_vmem_limit_kib=98304"), "changed",
     MAIN.replace("main", "pathways-proxy") + "/args/--xla_tpu_scoped_vmem_limit_kib", "65536", "98304"),
    (("value: --xla_tpu_enable_async_collective_fusion=true", "value: --xla_tpu_enable_async_collective_fusion=false"),
     "changed", "trainer/spec/replicatedJobs/pw-node/template/spec/template/spec/containers/pathways-worker/env/"
     "LIBTPU_INIT_ARGS/--xla_tpu_enable_async_collective_fusion", "true", "false"),
    (("--epsilon=0.2", "--epsilon=0.28"), "changed", "orchestrator/argv/--epsilon", "0.2", "0.28"),
    (("--no-shuffle", ""), "removed", "orchestrator/argv/--no-shuffle", None, None),
    (("PYTHONUNBUFFERED=1", "PYTHONUNBUFFERED=0"), "changed", f"{COMMAND}/PYTHONUNBUFFERED", "1", "0"),
    (("(?!.*gate)", "(?!.*gates)"), "changed", f"{COMMAND}/argv/--trainable_parameters_mask", "^(?!.*gate).*",
     "^(?!.*gates).*"),
    (("STEP_SIZE, value: \"1e-6\"", "STEP_SIZE, value: \"1.0e-6\""),
    "changed", f"{MAIN}/env/STEP_SIZE", "1e-6", "1.0e-6"),
    (("DEVICES, value: \"4\"", "DEVICES, value: 4"), "changed", f"{MAIN}/env/DEVICES", "4", 4),
    (("maxRestarts: 3", "maxRestarts: 4"), "changed", "trainer/spec/failurePolicy/maxRestarts", 3, 4),
    (("maxRestarts: 3", "maxRestarts: true"), "changed", "trainer/spec/failurePolicy/maxRestarts", 3, True),
    (("example/proxy:1.10", "example/proxy:1.1"), "changed", MAIN.replace("main", "pathways-proxy") + "/image",
     "example/proxy:1.10", "example/proxy:1.1"),
    (("completions: 32", "completions: 64"),
    "changed", "trainer/spec/replicatedJobs/pw-node/template/spec/completions", 32, 64),
    (("mountPath: /tmp, name", "mountPath: /scratch, name"), None, None, None, None),
    (("values: [0, 75]", "values: [0, 76]"),
    "changed", "trainer/spec/replicatedJobs/proc/template/spec/podFailurePolicy/"
     "rules/FailJob onExitCodes/onExitCodes/values", [0, 75], [0, 76]),
    (("'metadata.labels['job-index']'".replace("'metadata", "\"metadata").replace("]'", "]\""), "spec.nodeName"),
    "changed",
     f"{MAIN}/env/JOB_INDEX/valueFrom/fieldRef/fieldPath", "metadata.labels['job-index']", "spec.nodeName"),
]  # fmt: skip


@pytest.mark.parametrize(("edit", "kind", "path", "a", "b"), ONE_CHANGE, ids=[edit[0][1] for edit in ONE_CHANGE])
def test_one_edit_is_one_change(edited, edit, kind, path, a, b):
    code, document = edited(edit)
    assert code == 1
    if kind is None:  # the key of a list item: the old item is gone, a new one is there
        assert [c["kind"] for c in document["changes"]] == ["removed", "added"]
    else:
        assert brief(document) == [(kind, path, a, b)] and document["changes"][0]["noise"] is None


def test_a_container_that_moves_between_the_lists_is_one_change(edited):
    head = "            - name: main\n              image: example/tunix:nightly\n              ports"
    _, document = edited(
        ("            initContainers:\n", "            containers:\n"),
        ("            containers:\n" + head, head),
    )
    path = MAIN.replace("main", "pathways-proxy")
    assert brief(document) == [("changed", f"{path}/(list)", "initContainers", "containers")]


def test_a_whole_container_is_one_change(edited):
    worker = "            - name: pathways-worker\n"
    _, document = edited((worker, "            - {name: extra, image: x}\n" + worker))
    path = "trainer/spec/replicatedJobs/pw-node/template/spec/template/spec/containers/extra"
    value = {"name": "extra", "image": "x", "(list)": "containers"}
    assert brief(document) == [("added", path, None, value)]


def test_a_container_under_another_name_is_a_rename(edited):
    _, document = edited(("- name: pathways-proxy\n", "- name: proxy\n"), ("limit_kib=65536\n", "limit_kib=98304\n"))
    path = MAIN.replace("main", "pathways-proxy|proxy")
    assert brief(document) == [
        ("renamed", f"{path}/name", "pathways-proxy", "proxy"),
        ("changed", f"{path}/args/--xla_tpu_scoped_vmem_limit_kib", "65536", "98304"),
    ]


NO_EFFECT = [
    (("--mesh_fsdp=32 --mesh_expert=2", "--mesh_expert=2 --mesh_fsdp=32"), "reordered", f"{COMMAND}/argv", "order"),
    (("megablox=true num_moe_token_chunks=2", "num_moe_token_chunks=2 megablox=true"), "reordered",
     f"{COMMAND}/MAXTEXT_EXTRA_FLAGS", "order"),
    (("--mesh_fsdp=32", "--mesh_fsdp=8 --mesh_fsdp=32"),
    "added", f"{COMMAND}/argv/--mesh_fsdp (overridden 1)", "superseded"),
    (("--optimizer_eps=1.0e-8", "--optimizer_eps=1e-8"), "changed", f"{COMMAND}/argv/--optimizer_eps", "same number"),
    (("buffer_factor=2.0", "buffer_factor=2"),
    "changed", f"{COMMAND}/MAXTEXT_EXTRA_FLAGS/ragged_buffer_factor", "same number"),
    (("packing=True", "packing=true"), "changed", f"{COMMAND}/MAXTEXT_EXTRA_FLAGS/packing", "same truth value"),
    (("completions: 32", "completions: 32.0"),
    "changed", "trainer/spec/replicatedJobs/pw-node/template/spec/completions",
     "same number"),
    (("values: [0, 75]", "values: [75, 0]"),
    "reordered", "trainer/spec/replicatedJobs/proc/template/spec/podFailurePolicy/"
     "rules/FailJob onExitCodes/onExitCodes/values", "order"),
    (("- --server_port=29000\n              - --xla_tpu_enable_async_collective_fusion=true",
      "- --xla_tpu_enable_async_collective_fusion=true\n              - --server_port=29000"), "reordered",
     MAIN.replace("main", "pathways-proxy") + "/args", "order"),
    (("PYTHONUNBUFFERED=1 HF_TOKEN=hf_aaa", "HF_TOKEN=hf_aaa PYTHONUNBUFFERED=1"), "reordered", COMMAND, "order"),
]  # fmt: skip


@pytest.mark.parametrize(("edit", "kind", "path", "noise"), NO_EFFECT, ids=[edit[0][1][:30] for edit in NO_EFFECT])
def test_what_has_no_effect_is_told_apart(edited, edit, kind, path, noise):
    code, document = edited(edit)
    assert [(c["kind"], c["path"], c["noise"]) for c in document["changes"]] == [(kind, path, noise)]
    assert code == 0 and document["same"] and document["counts"]["no_effect"] == 1
    assert edited(edit, options=["--strict"])[0] == 1


NOTHING = [
    ("packing=True\" LIB", "packing=True  \" LIB"), ("2.0   packing", "2.0 packing"),
    ("--worker_id=ada-train", "--worker_id='ada-train'"),
    ("HF_TOKEN=hf_aaa", "HF_TOKEN=\"hf_aaa\""),
    ("{key: workload, operator: Equal, value: cpu", "{value: cpu, operator: Equal, key: workload"),
    ("# the trainer", "# another comment"), ("\"4\"}", "'4'}"), ("replicas: 1", "replicas:    1"),
]  # fmt: skip


@pytest.mark.parametrize("edit", NOTHING, ids=[edit[1][:20] for edit in NOTHING])
def test_what_is_no_difference(edited, edit):
    code, document = edited(edit)
    assert code == 0 and document["changes"] == []


@pytest.mark.parametrize(
    ("edit", "paths"),
    [
        # the last one wins: a different last value is a real change
        (("--mesh_fsdp=32", "--mesh_fsdp=32 --mesh_fsdp=8"),
         [("changed", "--mesh_fsdp", "32", "8", None),
         ("added", "--mesh_fsdp (overridden 1)", None, "32", "superseded")]),
        # a live `$` is not a quoted one
        (("--model_name=Qwen3", "--model_name=\"$MODEL\""),
        [("changed", "--model_name", "Qwen3", "$MODEL [expanded when it runs]", None)]),
        (("--model_name=Qwen3", "--model_name='$MODEL'"), [("changed", "--model_name", "Qwen3", "$MODEL", None)]),
        (("--model_name=Qwen3", "--model_name=3e0"), [("changed", "--model_name", "Qwen3", "3e0", None)]),
    ],
)  # fmt: skip
def test_last_wins_and_live_words(edited, edit, paths):
    code, document = edited(edit)
    found = [
        (c["kind"], c["path"].removeprefix(f"{COMMAND}/argv/"), c["a"], c["b"], c["noise"]) for c in document["changes"]
    ]
    assert code == 1 and found == paths


def test_first_match_of_rules_counts(edited):
    count = "          - action: Count\n            onExitCodes: {containerName: main, operator: In, values: [75]}\n"
    code, document = edited((count, ""), ("values: [0, 75]}\n", "values: [0, 75]}\n" + count))
    path = "trainer/spec/replicatedJobs/proc/template/spec/podFailurePolicy/rules"
    assert code == 1 and [(c["kind"], c["path"], c["noise"]) for c in document["changes"]] == [
        ("reordered", path, None)
    ]


def test_env_given_twice(edited):
    again = '              - {name: DEVICES, value: "4"}\n'
    code, document = edited((again, '              - {name: DEVICES, value: "2"}\n' + again))
    assert code == 0 and [(c["path"], c["noise"]) for c in document["changes"]] == [
        (f"{MAIN}/env/DEVICES (overridden 1)", "superseded")
    ]
    assert edited((again, again + '              - {name: DEVICES, value: "2"}\n'))[0] == 1


# --- documents -----------------------------------------------------------------------------------


def test_select(run, run_json, files):
    other = files(LAUNCH.read_text().replace("ada-orch", "eve-orch").replace("--seed=42", "--seed=7"))[0]
    _, document, _ = run_json(LAUNCH, other, "--select", "all")
    root = "JobSet:ada-orch|eve-orch"
    argv = f"{root}/spec/replicatedJobs/proc/template/spec/template/spec/containers/main/command/argv"
    assert brief(document) == [
        ("renamed", f"{root}/metadata/name", "ada-orch", "eve-orch"),
        ("renamed", f"{argv}/--discovery_id", "ada-orch", "eve-orch"),
        ("changed", f"{argv}/--seed", "42", "7"),
    ]
    assert len(run_json(LAUNCH, other, "--select", "eve-orch")[1]["changes"]) == 3
    assert run(LAUNCH, other, "--select", "ada-train")[0] == 0
    code, out, err = run(LAUNCH, other, "--select", "nobody")
    assert (code, out) == (2, "") and "no document named nobody" in err
    code, out, err = run(LAUNCH, ROOT / "examples/launch_tiny.yaml", "--select", "trainer")
    assert code == 1


def test_trainer_asked_for_and_missing(run, files):
    orchestrator = LAUNCH.read_text().split("---")[1]
    code, out, err = run(LAUNCH, *files(orchestrator), "--select", "trainer")
    assert (code, out) == (2, "") and "not exactly one trainer here" in err.splitlines()[-1]
    code, out, _ = run(LAUNCH, *files(orchestrator))
    assert code == 1 and out.startswith("all documents:") and "removed    JobSet:ada-train" in out


def rename_all(text: str) -> str:
    return re.sub(r"\bada-", "bob-", text).replace('"ada"', '"bob"')


def test_a_renamed_launch_is_renames_only(run_json, files):
    _, document, _ = run_json(LAUNCH, *files(rename_all(LAUNCH.read_text())), "--select", "all")
    assert {c["kind"] for c in document["changes"]} == {"renamed", "changed"}
    assert [c["path"].split("/")[-1] for c in document["changes"] if c["kind"] == "changed"] == [
        "scheduling.x-k8s.io~1gang-id"
    ]


# --- public manifests: commands that are no client of ours -----------------------------------------

RECIPE = """\
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata: {name: r}
spec:
  containers:
  - name: main
    command:
    - bash
    - -c
    - |
      set -e; trap 'echo "it'"'"'s over"' EXIT
      # don't stop here
      export LIBTPU_INIT_ARGS='--xla_a=true --xla_b=1
        --xla_c=2'
      (set +e && export ENABLE_PJRT=true && echo "$(date)" && for i in 1 2; do echo "$i"; done
      JAX_X=1 python3 -m maxtext.train base.yml model_name=deepseek3 ici_fsdp_parallelism=64 \\
        dataset_path=gs://b/d packing=True | tee log; STATUS=${PIPESTATUS[0]}; exit $STATUS) & PID=$!
      exit $?
"""
RECIPE_CASES = [
    ("ici_fsdp_parallelism=64", "ici_fsdp_parallelism=32", ["run 1/argv/ici_fsdp_parallelism"]),
    ("--xla_c=2", "--xla_c=3", ["LIBTPU_INIT_ARGS/--xla_c"]),
    ("ENABLE_PJRT=true", "ENABLE_PJRT=false", ["ENABLE_PJRT"]),
    ("JAX_X=1", "JAX_X=2", ["run 1/JAX_X"]),
    ("| tee log", "| tee other", ["script"]),
    ("maxtext.train ", "maxtext.pretrain ", ["run 1/program"]),
    ("in 1 2;", "in 1 2 3;", ["script"]),
    ("don't stop", "don't end", ["script"]),
    ("--xla_a=true --xla_b=1\n        --xla_c=2", "--xla_b=1 --xla_c=2 --xla_a=true", []),
    (" dataset_path=gs://b/d packing=True", " packing=True dataset_path=gs://b/d", []),
]


@pytest.mark.parametrize("one_line", [False, True])
@pytest.mark.parametrize(("old", "new", "steps"), RECIPE_CASES, ids=[case[1].strip()[:20] for case in RECIPE_CASES])
def test_scripts_that_are_no_client(run_json, files, old, new, steps, one_line):
    """A public training recipe: the script of a container, on lines of its own or all on one."""
    assert old in RECIPE
    texts = [RECIPE, RECIPE.replace(old, new)]
    if one_line:
        texts = [re.sub(r"- \|\n(.*)", lambda m: "- " + json.dumps(m[1]), text, flags=re.DOTALL) for text in texts]
    code, document, _ = run_json(*files(*texts))
    real = [c["path"].partition("/command/")[2] for c in document["changes"] if not c["noise"]]
    assert real == steps and code == (1 if steps else 0)


@pytest.mark.parametrize(
    ("old", "new", "step"),
    [
        ("mesh_fsdp=32", "mesh_fsdp=16", "argv/--mesh_fsdp"),
        ("PYTHONUNBUFFERED=1", "PYTHONUNBUFFERED=0", "PYTHONUNBUFFERED"),
        ("megablox=true", "megablox=false", "MAXTEXT_EXTRA_FLAGS/megablox"),
        ("install x", "install y", "program"),
    ],
)
def test_a_client_after_another_command_comes_apart_too(run_json, files, old, new, step):
    """BOOTSTRAP_CMD of the launchers stands among the assignments: `A=1 pip install x && B=2 python ...`."""
    odd = LAUNCH.read_text().replace("PYTHONUNBUFFERED=1", "PYTHONUNBUFFERED=1 pip install x &&")
    code, document, err = run_json(*files(odd, odd.replace(old, new)), "--select", "ada-train")
    (change,) = document["changes"]
    assert code == 1 and change["path"].partition("/command/run ")[2].partition("/")[2] == step
    assert "unexpected token 'pip'" in err and "compared as text" in err


def container(**fields) -> str:
    spec = {"containers": [{"name": "main", "image": "i", **fields}]}
    return f"apiVersion: v1\nkind: Pod\nmetadata: {{name: p}}\nspec: {json.dumps(spec)}\n"


PYTHON = ["python", "-m", "x.y", "--version=1.10", "--size", "4", "--debug", "steps=1.0", "run_name=1e-6"]
OTHER_COMMANDS = [
    ({"command": PYTHON}, ("1.10", "1.1"), ["command/argv/--version"]),
    ({"command": PYTHON}, ('"4"', '"5"'), ["command/argv/--size"]),
    ({"command": PYTHON}, ("x.y", "x.z"), ["command/program"]),
    ({"command": PYTHON}, ("steps=1.0", "steps=1"), []),
    ({"command": PYTHON}, ("run_name=1e-6", "run_name=1.0e-6"), ["command/argv/run_name"]),
    ({"command": ["sleep", "3"]}, ('"3"', '"4"'), ["command/program"]),
    ({"args": ["--port", "-1", "--v"]}, ('"-1"', '"-2"'), ["args/--port"]),
    ({"command": ["sh", "-c"], "args": ["export A=1\npython x.py --a=1\n"]}, ("A=1", "A=2"), ["command/A"]),
    ({"command": ["sh", "-c"], "args": ["python x.py --a 1"]}, ("--a 1", "--a 2"), ["command/run 1/argv/--a"]),
    ({"command": ["sh", "-c"], "args": ["python x"]}, ('], "args": [', ", "), []),
]


@pytest.mark.parametrize(("fields", "edit", "steps"), OTHER_COMMANDS)
def test_other_ways_to_write_a_command(run_json, files, fields, edit, steps):
    text = container(**fields)
    assert edit[0] in text
    code, document, _ = run_json(*files(text, text.replace(*edit)))
    assert [c["path"].partition("/main/")[2] for c in document["changes"] if not c["noise"]] == steps
    assert code == (1 if steps else 0)


def test_a_launch_and_its_bench_are_partners_among_all_documents(run_json):
    _, document, _ = run_json(LAUNCH, BENCH, "--select", "all")
    found = {c["path"]: c["kind"] for c in document["changes"]}
    root = "JobSet:ada-bench|ada-train"
    assert found["JobSet:ada-orch"] == "removed" and found[f"{root}/metadata/name"] == "renamed"
    assert found[COMMAND.replace("trainer", root) + "/MAXTEXT_EXTRA_FLAGS/num_moe_token_chunks"] == "changed"
    assert COMMAND.replace("trainer", root) + "/argv/--mesh_fsdp" not in found


# --- where order has a meaning ---------------------------------------------------------------------


def test_a_variable_that_is_used_before_it_is_set(run_json, files, edited):
    """Kubernetes resolves $(A), and a shell $A, only from what stands before."""
    before = container(env=[{"name": "A", "value": "1"}, {"name": "B", "value": "$(A)/x"}])
    after = container(env=[{"name": "B", "value": "$(A)/x"}, {"name": "A", "value": "1"}])
    path = "Pod:p/spec/containers/main/env/B (set before)"
    for pair, change in (
        ((before, after), ("added", path, None, ["A"])),
        ((after, before), ("removed", path, ["A"], None)),
    ):
        code, document, _ = run_json(*files(*pair))
        assert code == 1 and brief(document) == [change]
    assert run_json(*files(before.replace("$(A)", "$$(A)"), after.replace("$(A)", "$$(A)")))[0] == 0  # escaped

    live = ("PYTHONUNBUFFERED=1", 'PYTHONUNBUFFERED=1 X="$PYTHONUNBUFFERED"'), ("x", "x")
    code, document = edited(("PYTHONUNBUFFERED=1", 'X="$PYTHONUNBUFFERED" PYTHONUNBUFFERED=1'))
    early = [c for c in document["changes"] if c["path"].endswith("/X (set before)")]
    assert code == 1 and [(c["kind"], c["b"]) for c in early] == [("added", ["PYTHONUNBUFFERED"])]
    _, document = edited(*live)
    assert [c["path"].rpartition("/")[2] for c in document["changes"]] == ["X"]


# --- allow lists ---------------------------------------------------------------------------------

ALLOW_ALL_BUT_CHUNKS = """\
- {path: "**", kind: renamed, reason: the bench has a name of its own}
- {path: trainer/metadata/labels/scheduling.x-k8s.io/gang-id, reason: a gang of its own}
- {path: trainer/spec/failurePolicy/maxRestarts, to: 0, reason: a failed bench is seen}
- {path: "**/main/command/wrapper/*", reason: the driver is written here}
- {path: "**/command/program", from: "python -m **", reason: the driver runs}
- {path: "**/command/sources", kind: added, reason: the driver}
- {path: "**/command/driver", reason: its flags}
- {path: "**/command/BENCH_*", reason: provenance}
"""


def test_allow(run, run_json, files):
    allow = files(ALLOW_ALL_BUT_CHUNKS)[0]
    code, document, _ = run_json(LAUNCH, BENCH, "--allow", allow)
    left = [c["path"] for c in document["changes"] if not c["allowed"]]
    assert code == 1 and left == [f"{COMMAND}/MAXTEXT_EXTRA_FLAGS/num_moe_token_chunks"]
    assert document["counts"]["allowed"] == 11 and document["stale_allowances"] == []
    more = ALLOW_ALL_BUT_CHUNKS + '- {path: "**/num_moe_token_chunks", from: 2, to: 4, reason: the knob}\n'
    allow = files(more)[0]
    assert run(LAUNCH, BENCH, "--allow", allow)[0] == 0
    code, out, _ = run(LAUNCH, BENCH, "--allow", files(more + "- {path: nothing, reason: x}\n")[0])
    assert code == 1 and "stale allowances (1)" in out and ":10: nothing" in out
    code, out, _ = run(LAUNCH, BENCH, "--allow", files(more.replace("from: 2", "from: 3"))[0])
    assert code == 1


@pytest.fixture(scope="module")
def benches(tmp_path_factory):
    """Render the bench of each launch there is, with a small driver; return (launch, function of more options)."""
    folder = tmp_path_factory.mktemp("driver")
    (folder / "bench_driver.py").write_text('"""A stand-in."""\n')

    @functools.cache
    def render(launch, *options):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            argv = ["--launch-render", str(launch), "--name", "bench-x", "--driver", str(folder / "bench_driver.py")]
            assert render_bench.main([*argv, *options]) == 0, err.getvalue()
        return out.getvalue()

    return render


ALLOW_BENCH = ROOT / "examples" / "allow_bench.yaml"
LAUNCHES = [*sorted((ROOT / "examples").glob("launch_*.yaml")), *sorted((ROOT / "tests/fixtures").glob("launch_*"))]


@pytest.mark.parametrize("launch", LAUNCHES, ids=lambda path: path.stem)
def test_a_launch_and_its_bench_differ_in_what_is_allowed(run, run_json, files, benches, launch):
    """examples/allow_bench.yaml says the truth, whole: nothing beyond it, nothing stale in it."""
    code, document, _ = run_json(launch, *files(benches(launch)), "--allow", ALLOW_BENCH)
    assert [c for c in document["changes"] if not c["allowed"]] == []
    text = run(launch, *files(benches(launch)), "--allow", ALLOW_BENCH)[1]
    assert max(len(line) for line in text.splitlines() if not line.startswith("      | ")) <= 80
    assert code == 0 and document["counts"]["allowed"] >= 10 and document["stale_allowances"] == []


@pytest.mark.parametrize("launch", LAUNCHES, ids=lambda path: path.stem)
def test_every_knob_of_the_renderer_is_seen(run_json, files, benches, launch):
    """Each thing asked of render_bench is reported, at every place it changed, and nothing else is."""
    options = "--maxtext new_knob=7 --trainer-arg mini_batch_size=5 --orch-arg beta=0.25 --env SOME_NAME=x --image i:2"
    _, document, _ = run_json(launch, *files(benches(launch, *options.split())), "--allow", ALLOW_BENCH)
    found = {c["path"].rpartition("/")[2]: c["b"] for c in document["changes"] if not c["allowed"]}
    if "MAXTEXT_EXTRA_FLAGS" in found:  # the launch has none: the whole variable is new
        found |= found.pop("MAXTEXT_EXTRA_FLAGS")
    assert found == {"new_knob": "7", "--mini_batch_size": "5", "--beta": "0.25", "SOME_NAME": "x", "image": "i:2"}


@settings(deadline=None, max_examples=20, derandomize=True)
@given(st.data())
def test_a_flag_changed_behind_the_renderer_is_seen(benches, data):
    """Change one flag of a bench by hand: under the allow list exactly that one difference is left."""
    launch = data.draw(st.sampled_from(LAUNCHES))
    text = launch.read_text()
    bench = benches(launch)
    argv = bench[bench.index("TRAINER_ARGV=") :]
    start, end = bench.index("TRAINER_ARGV="), bench.index("TRAINER_ARGV=") + argv.index("BENCH_INPUT_SHA256")
    flags = [m for m in FLAG.finditer(bench, start, end) if m[1] and m[2] not in ("process_main", "worker_id")]
    match = data.draw(st.sampled_from(flags))
    edited = bench[: match.end()] + "9x" + bench[match.end() :]
    allowed = allow_list.load_allow_list(str(ALLOW_BENCH), diff_render.KINDS)
    changes = changes_between(text, edited, "trainer")
    left = [c for c in changes if not allowed.reason(render_tree.path_text(c.path), c.kind, c.a, c.b)]
    covered = match[2] in ("maxtext_output_directory", "checkpoint_save_interval_steps")
    names = [c.path[-1].partition(" (overridden")[0] for c in left]
    assert names == ([f"--{match[2]}"] if not covered or names else [])


# --- secrets -------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["text", "json", "markdown"])
def test_secrets_are_masked(run, files, form):
    text = (
        LAUNCH.read_text()
        .replace("hf_aaa", "hf_SECRET1")
        .replace("export HF_HOME=", "export MY_PASSWORD=pw_SECRET3 X=")
    )
    other = files(text.replace("wandb-aaa", "wandb_SECRET2"))[0]
    for select in ("trainer", "all"):
        code, out, err = run(LAUNCH, other, "--select", select, "--format", form)
        assert code == 1 and "HF_TOKEN" in out and "SECRET" not in out + err and "hf_aaa" not in out + err
    _, out, _ = run(LAUNCH, ROOT / "examples/launch_tiny.yaml", "--select", "all", "--format", form)
    assert "hf_aaa" not in out and "wandb-aaa" not in out


def script(text: str) -> str:
    return container(command=["sh", "-c", text])


SECRET = "S3CR3T"
HIDING_PLACES = {
    "flag, two words": script(f"python x.py --hf_token {SECRET}"),
    "another program": script(f"hf login --token '{SECRET}' && wandb login --api-key={SECRET}"),
    "quoted in part": script(f'export WANDB_API_KEY=a"{SECRET}"'),
    "after an apostrophe": script(f"X=don't HF_TOKEN={SECRET} isn't"),
    "header": script(f'curl -H "Authorization: Bearer {SECRET}" x'),
    "url": script(f"git clone https://user:{SECRET}@host/x"),
    "json": script("echo '" + json.dumps({"api_key": SECRET}) + "'"),
    "args": container(args=["--api_key", SECRET]),
    "command": container(command=["python", "x.py", "--hf_token", SECRET]),
    "env command": container(command=["env", f"HF_TOKEN={SECRET}", "python"]),
    "script in args": container(command=["sh", "-c"], args=[f"HF_TOKEN={SECRET} python x.py"]),
    "dictionary": container(args=["--kwargs={'api_key': '" + SECRET + "'}"]),
    "env entry in JSON": container(env=[{"name": "X", "value": json.dumps([{"name": "HF_TOKEN", "value": SECRET}])}]),
    "secret": f"apiVersion: v1\nkind: Secret\nmetadata: {{name: p}}\ndata: {{x: {SECRET}}}\n"
    f"stringData: {{y: {SECRET}}}\n",
    "odd client": LAUNCH.read_text().replace(" --debug ", f" --hf_token {SECRET} "),
}


@pytest.mark.parametrize("text", HIDING_PLACES.values(), ids=HIDING_PLACES)
def test_secrets_are_masked_wherever_they_hide(run, files, text):
    """Added whole, removed, and changed to another one; the difference itself is always reported."""
    assert SECRET in text
    paths = files(LAUNCH.read_text(), text, text.replace(SECRET, SECRET + "9"))
    for a, b, form in ((0, 1, "json"), (1, 0, "json"), (1, 2, "json"), (1, 2, "text"), (1, 2, "markdown")):
        code, out, err = run(paths[a], paths[b], "--select", "all", "--format", form)
        assert code == 1 and SECRET not in out + err and ("***" in out or form != "json")


@settings(deadline=None, derandomize=True)
@given(st.text(st.sampled_from("aK_=\"'\\ :-,\n{$"), max_size=40))
def test_masking_touches_secrets_only(text):
    assert render_tree.mask_text(text) == text


@pytest.mark.parametrize("text", ["a" * 10**6, "a-" * 10**6, "\\" * 10**6, "TOKEN='" + "a" * 10**6])
def test_masking_takes_time_in_proportion(text):
    """A quadratic search would not come back from a ConfigMap of a megabyte."""
    assert len(render_tree.mask_text(text)) <= len(text)


# --- formats, streams, errors --------------------------------------------------------------------


def test_summary_and_markdown(run, run_json):
    code, out, _ = run(LAUNCH, BENCH, "--summary")
    assert code == 1 and out.splitlines()[-1] == "different: 12 different" and "num_moe" not in out
    _, document, _ = run_json(LAUNCH, BENCH, "--summary")
    assert "changes" not in document and document["counts"]["different"] == 12
    _, out, _ = run(LAUNCH, BENCH, "--format", "markdown")
    assert out.startswith("**different: 12 different**\n") and "### differences (12)" in out
    assert "| trainer/proc/main/command/MAXTEXT_EXTRA_FLAGS/num_moe_token_chunks | changed | 2 | 4 |  |" in out


def test_stdin_equals_file(run, monkeypatch):
    expected = run(LAUNCH, BENCH)[:2]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(BENCH.read_bytes())))
    assert run(LAUNCH, "-")[:2] == expected
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(LAUNCH.read_bytes())))
    assert run("-", BENCH)[:2] == expected


def test_same_bytes_twice(run):
    for form in ("text", "json", "markdown"):
        assert run(*RENDERS[2:], "--format", form) == run(*RENDERS[2:], "--format", form)


BAD = [
    (b"", "no Kubernetes object"), (b"hello\n", "no Kubernetes object"), (b"apiVersion: v1\nkind: [\n", "not YAML"),
    (b"\xff\xfe\0", "not UTF-8"), (b"apiVersion: v1\nmetadata: {}\n", "without a kind"),
]  # fmt: skip


@pytest.mark.parametrize(("data", "message"), BAD)
def test_bad_input_is_one_line(run, files, data, message):
    good, bad = files("apiVersion: v1\nkind: A\nmetadata: {name: x}\n", data)
    for order in ((good, bad), (bad, good)):
        code, out, err = run(*order)
        assert (code, out) == (2, "") and message in err and err.count("\n") == 1 and err.startswith("diff_render: ")


@pytest.mark.parametrize("path", ["missing.yaml", "."])
def test_unreadable_input(run, path):
    code, out, err = run(LAUNCH, path)
    assert (code, out) == (2, "") and err.count("\n") == 1 and "cannot read" in err


@pytest.mark.parametrize("argv", [[], ["a"], ["a", "b", "c"], ["-", "-"], ["a", "-", "--allow", "-"], ["--typo"]])
def test_bad_options(capsys, argv):
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2 and capsys.readouterr().out == ""


def test_help_runs_alone():
    """The one subprocess test: --help in a clean environment, without anything heavy imported."""
    code = (
        "import sys, runpy; sys.argv = ['diff-render', '--help']\n"
        "try: runpy.run_path('diff_render.py', run_name='__main__')\n"
        "finally: assert not {'jax', 'numpy', 'yaml', 'maxtext'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env={}, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""
    assert "Exit status" in done.stdout and done.stdout.count("    diff-render ") >= 2


# --- properties ----------------------------------------------------------------------------------


def documents(path) -> list[dict]:
    return [document.data for document in launch_render.read_render(path.read_text(), path.name).documents]


def render_of(docs: list[dict]) -> launch_render.Render:
    return launch_render.Render([launch_render.Document(doc, "x", 1) for doc in docs], [])


def changes_between(a, b, what="all") -> list[diff_render.Change]:
    """Compare two renders, each a text or parsed documents."""
    renders = [launch_render.read_render(x, "x") if isinstance(x, str) else render_of(x) for x in (a, b)]
    chosen = diff_render.select(*renders, what, [])
    return diff_render.mark_renames(list(diff_render.compare(chosen.left, chosen.right)), chosen.names)


def shuffled(value, shuffle: random.Random, key: str = ""):
    """Return a parsed document with its keys, and its lists that have keys, in another order."""
    if isinstance(value, dict):
        keys = list(value)
        shuffle.shuffle(keys)
        return {k: shuffled(value[k], shuffle, k) for k in keys}
    if isinstance(value, list):
        items = [shuffled(item, shuffle) for item in value]
        if key in ("containers", "initContainers", "env", "volumes", "volumeMounts", "ports", "tolerations",
                   "replicatedJobs", "onPodConditions", "matchExpressions"):  # fmt: skip
            shuffle.shuffle(items)
        return items
    return value


@pytest.mark.parametrize("path", RENDERS, ids=lambda path: path.stem)
@pytest.mark.parametrize("seed", range(5))
def test_order_of_documents_keys_and_keyed_lists_is_nothing(path, seed):
    shuffle = random.Random(seed)
    docs = [shuffled(doc, shuffle) for doc in documents(path)]
    shuffle.shuffle(docs)
    text = path.read_text()
    assert changes_between(text, docs) == []
    if path != BENCH:
        assert changes_between(text, docs, "trainer") == []


@pytest.mark.parametrize("path", RENDERS, ids=lambda path: path.stem)
def test_self_diff_is_empty(path):
    assert changes_between(path.read_text(), path.read_text()) == []
    assert changes_between(path.read_text(), path.read_text(), "trainer") == []


FLAG = re.compile(r"(?<![\w'\"@{$.-])(--)?([A-Za-z][\w.-]*)=([\w./:-]+)")


@settings(deadline=None, max_examples=30, derandomize=True)
@given(st.data())
def test_one_random_flag_changed_is_that_one_change(data):
    """Change one random flag, key or variable anywhere in the text of a render: exactly that one is reported."""
    text = data.draw(st.sampled_from(RENDERS)).read_text()
    first = text.index("apiVersion")
    match = data.draw(st.sampled_from([m for m in FLAG.finditer(text, first) if m[2] != "process_main"]))
    (change,) = changes_between(text, text[: match.end()] + "9x" + text[match.end() :])
    name = (match[1] or "") + match[2]
    last = change.path[-1].partition(" (overridden")[0]
    in_script = last in ("before", "after")
    assert last == name or in_script
    assert change.kind == "changed" and change.noise in (None, diff_render.SUPERSEDED)
    if not in_script and "***" not in (change.a, change.b):
        assert change.a.partition(" [exp")[0].startswith(match[3]) and "9x" in change.b


def leaves(value, path=()):
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        yield path, value
    for key, item in items or ():
        yield from leaves(item, (*path, key))


def with_leaf(docs, path, new):
    docs = copy.deepcopy(docs)
    node = docs
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = new
    return docs


@settings(deadline=None, max_examples=30, derandomize=True)
@given(st.data())
def test_one_random_field_changed_is_one_change(data):
    """Change one random scalar anywhere in the parsed objects: one change (two where it is an item's key)."""
    docs = documents(data.draw(st.sampled_from(RENDERS)))
    path, value = data.draw(st.sampled_from([leaf for leaf in leaves(docs) if leaf[0][-1] not in ("kind",)]))
    new = not value if isinstance(value, bool) else value + 1 if isinstance(value, int) else f"{value or ''}9"
    found = changes_between(docs, with_leaf(docs, path, new))
    keys = ("name", "key", "mountPath", "containerPort", "type", "topologyKey", "effect", "action", "operator")
    is_key = isinstance(path[-2], int) and path[-1] in keys
    if is_key and len(found) == 2:
        assert sorted(change.kind for change in found) == ["added", "removed"]
    elif "command" in path and path[-1] == 2 and len(found) == 1:
        assert found[0].path[-2:] == ("wrapper", "after")
    else:
        assert [change.noise for change in found] == [None]
        assert found[0].kind in ("changed", "renamed")


def rebuild(changes: list[diff_render.Change], tree: dict) -> dict:
    """Apply the changes of a JSON report to the plain tree of A; gives the plain tree of B, order included."""
    entries = json.loads(json.dumps([change.as_json(None) for change in changes]))
    for entry in entries:
        entry["steps"] = render_tree.path_steps(entry["path"]) if entry["path"] else []
        join_renamed(tree, entry["steps"])
    for entry in entries:
        parent = find(tree, entry["steps"][:-1])
        if entry["kind"] == "removed":
            del parent[entry["steps"][-1]]
        elif entry["kind"] in ("changed", "renamed"):
            parent[entry["steps"][-1]] = entry["b"]
    for entry in (entry for entry in entries if entry["kind"] == "added"):
        parent = find(tree, entry["steps"][:-1])
        items = list(parent.items())
        items.insert(entry.get("at", len(items)), (entry["steps"][-1], entry["b"]))
        replace_items(parent, items)
    for entry in (entry for entry in entries if entry["kind"] == "reordered"):
        node = find(tree, entry["steps"])
        if isinstance(node, dict):
            replace_items(node, [(step, node[step]) for step in entry["b"]])
        else:  # a set of values in another order
            find(tree, entry["steps"][:-1])[entry["steps"][-1]] = entry["b"]
    for entry in entries:
        if entry["kind"] == "renamed" and len(entry["steps"]) > 2 and "|" in entry["steps"][-2]:
            parent, joined = find(tree, entry["steps"][:-2]), entry["steps"][-2]
            replace_items(parent, [(entry["b"] if step == joined else step, node) for step, node in parent.items()])
    return tree


def join_renamed(tree, steps):
    """Give an item that is reported under OLD|NEW that name."""
    for step in steps[:-1]:
        old = next((part for part in step.split("|") if part in tree), None)
        if step not in tree and old is not None:
            replace_items(tree, [(step if name == old else name, node) for name, node in tree.items()])
        tree = tree[step] if step in tree else {}


def replace_items(node: dict, items: list) -> None:
    node.clear()
    node.update(items)


def find(tree, steps):
    for step in steps:
        tree = tree[step]
    return tree


def same_order(node, plain_tree) -> bool:
    if isinstance(node, Leaf):
        return True
    if node.order and list(node.children) != list(plain_tree):
        return False
    return all(same_order(child, plain_tree[step]) for step, child in node.children.items())


def check_mirror_and_rebuild(left: Map, right: Map) -> None:
    forth, back = list(diff_render.compare(left, right)), list(diff_render.compare(right, left))
    swap = {"added": "removed", "removed": "added"}
    mirrored = [(c.path, swap.get(c.kind, c.kind), c.b, c.a, c.noise, c.at) for c in back]
    key = repr
    assert sorted(((c.path, c.kind, c.a, c.b, c.noise, c.at) for c in forth), key=key) == sorted(mirrored, key=key)
    rebuilt = rebuild(forth, json.loads(json.dumps(plain(left))))
    assert rebuilt == json.loads(json.dumps(plain(right)))
    assert same_order(right, rebuilt)


@pytest.mark.parametrize("a", RENDERS, ids=lambda path: path.stem)
@pytest.mark.parametrize("b", RENDERS, ids=lambda path: path.stem)
def test_mirror_and_rebuild_of_renders(a, b):
    renders = [launch_render.read_render(path.read_text(), path.name) for path in (a, b)]
    for what in ("trainer", "all"):
        chosen = diff_render.select(*renders, what, [])
        check_mirror_and_rebuild(chosen.left, chosen.right)


WORDS = st.lists(
    st.sampled_from(["--a=1", "--a=2", "--b=1", "--b", "--c=1e-6", "--c=1.0e-6", "--steps=1.0", "--steps=1", "x",
    "y=1"]),
    max_size=6,
)  # fmt: skip
SCALARS = st.none() | st.booleans() | st.integers(0, 3) | st.sampled_from(["a", "1", "", "1.0"]) | st.just(1.0)
ITEMS = st.fixed_dictionaries({"name": st.sampled_from("abc")}, optional={"value": SCALARS, "args": WORDS})
OBJECTS = st.recursive(
    SCALARS | WORDS | st.lists(ITEMS, max_size=4),
    lambda inner: st.dictionaries(
        st.sampled_from(["env", "containers", "initContainers", "rules", "values", "args", "x/y", "p~q", "HF_TOKEN"]),
        inner,
        max_size=3,
    ),
    max_leaves=8,
)


@settings(deadline=None, max_examples=120, derandomize=True)
@given(OBJECTS, OBJECTS)
def test_mirror_and_rebuild_of_any_objects(a, b):
    left, right = (
        render_tree.document_tree(launch_render.Document({"kind": "X", "spec": value}, "x", 1), []) for value in (a, b)
    )
    check_mirror_and_rebuild(left, right)
    assert list(diff_render.compare(left, left)) == []


@settings(deadline=None, max_examples=60, derandomize=True)
@given(WORDS, WORDS)
def test_flags_are_the_same_exactly_when_their_last_values_are(a, b):
    """What argparse would see decides: no real change if and only if the last values and loose words agree."""

    def seen(words):
        parser = argparse.ArgumentParser(allow_abbrev=False)
        for name in ("--a", "--b", "--c", "--steps"):
            parser.add_argument(name, nargs="?", const="(bare)", type=float if name == "--steps" else str)
        parser.add_argument("loose", nargs="*")
        return vars(parser.parse_intermixed_args(words))

    found = list(diff_render.compare(flag_map(a, "flag"), flag_map(b, "flag")))
    real = [change for change in found if not change.noise and change.kind != "reordered"]
    assert (not real) == (seen(a) == seen(b))
    assert (not found) == (a == b)


PATHS = st.lists(st.text(st.sampled_from("ab/~01 "), min_size=1, max_size=5), min_size=1, max_size=4)


@settings(deadline=None, derandomize=True)
@given(PATHS)
def test_paths_read_back(steps):
    assert render_tree.path_steps(render_tree.path_text(steps)) == steps
