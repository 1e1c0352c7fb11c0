"""diff_config and config_log: every form of a logged configuration, what values mean, verdicts, formats.

Run: python -m pytest tests/test_diff_config.py. Expected values are written out by hand; the log of
MaxText itself is checked against the values that MaxText's own config object holds.
"""

from __future__ import annotations

import io
import json
import os
import pathlib
import random
import re
import subprocess
import sys
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import allow_list
import bench_config
import config_keys
import config_log
import diff_config
import launch_render
from bench_common import BenchError
from config_keys import meaning, same_value
from diff_config import main

ROOT = pathlib.Path(__file__).parent.parent
FIXTURES = ROOT / "tests" / "fixtures_diff"

BASE = {
    "adam_b1": "0.9", "audio_path": "", "dataset_name": "c4/en:3.1.0", "ici_fsdp_parallelism": "32",
    "ici_parallelism": "[1, 32]", "mesh_axes": "['data', 'fsdp']", "num_experts": "512",
    "remat_policy": "custom", "run_name": "alice", "z_loss_multiplier": "0.0",
}  # fmt: skip

GLOG = "I0317 09:59:16.236806 125344476638336 pyconfig.py:413] "
PREFIXES = {
    "none": "", "pasted": "# ", "glog": GLOG, "logger": "INFO:maxtext.configs.pyconfig:",
    "kubectl": "[pod/alice-train-proc-0-0-abcde/main] " + GLOG,
    "timestamps": "2026-03-17T09:59:16.236806123Z " + GLOG,
    "kubectl timestamps": "[pod/a/main] 2026-03-17T09:59:16Z INFO:maxtext.configs.pyconfig:",
    "ray": "(TrainerActor pid=4123, ip=10.0.0.7) " + GLOG,
    "ansi": "\x1b[36m(Trainer pid=41)\x1b[0m \x1b[1mINFO\x1b[0m:",
}  # fmt: skip


def log(values: dict[str, str], prefix: str = GLOG, end: str = "\n") -> str:
    return "".join(f"{prefix}Config param {key}: {value}{end}" for key, value in sorted(values.items()))


@pytest.fixture
def files(tmp_path):
    def write(*texts):
        paths = []
        for index, text in enumerate(texts):
            path = tmp_path / f"{'abcdef'[index]}.log"
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


def values_of(path) -> list[dict[str, str]]:
    return [block.values for blocks in config_log.read_configs(str(path)).rounds for block in blocks]


# --- reading -------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["\n", "\r\n", " \n"])
@pytest.mark.parametrize("prefix", PREFIXES.values(), ids=PREFIXES)
def test_reads_every_prefix(files, prefix, end):
    text = "hello\n" + log(BASE, prefix, end) + "step 0, loss 3.2\nSystem Information: x\n"
    assert values_of(*files(text)) == [BASE]


def test_reads_wrapped_values():
    (values,) = values_of(FIXTURES / "wrapped.log")
    assert values == {
        "adam_b1": "0.9",
        "audio_path": "",
        "data_sharding": "(('data', 'stage', 'fsdp', 'fsdp_transpose', 'context', 'tensor', 'expert'),)",
        "dataset_name": "c4/en:3.1.0",
        "image_placeholder": "<|image|>",
        "multi_tier_checkpointing_backup_interval_minutes": "30",
        "tokenizer_path": "assets/tokenizers/tokenizer.llama2",
        "vllm_hf_overrides": "{'architectures':['Qwen3', 'it]em'], 'note': 'a: b'}",
        "z_loss_multiplier": "0.0",
    }


@pytest.mark.parametrize("prefix", [p for p in PREFIXES.values() if len(p) < 62 and "\x1b" not in p])
@pytest.mark.parametrize("width", [78, 100])
def test_terminal_wrapping_changes_nothing(files, prefix, width):
    values = BASE | {
        "chat": "x" * 300,
        "rules": str([("a" * 20, ("b" * 10,))] * 9),
        "w" * 60: "7",
        "x": "[]",
    }
    wrapped = "".join(
        line[i : i + width] + "\n"
        for line in log(values, prefix).splitlines()
        for i in range(0, max(len(line), 1), width)
    )
    assert values_of(*files(wrapped + "\ntraining starts\n")) == [values]


@pytest.mark.parametrize(
    ("before", "prefix", "value"),
    [
        ("1", GLOG, "onetwo"),  # the longest line: a terminal of that width wrapped it
        ("1" * 99, GLOG, "one\ntwo"),  # no terminal did: a longer line stands whole
        ("1", "", "one"),  # too short a line for a terminal's, and nothing tells a value from what others print
    ],
)
def test_lines_between_two_keys(files, before, prefix, value):
    text = log({"a": before}, prefix) + f"{prefix}Config param chat_template: one\ntwo\n" + log({"d": "2"}, prefix)
    path = files(text + "bare line\n")[0]
    assert values_of(path) == [{"a": before, "chat_template": value, "d": "2"}]
    notes = config_log.read_configs(path).notes
    assert notes == ([] if prefix else [f"{path}:2: what follows this key is taken for no part of its value"])


NOISE = ["base_emb_dim: 8192", "System Information: Jax Version: 0.12.0.1", "TFRT TPU v5", "  indented", "", "x" * 200,
         "W0317 09:59:16.2 1 x.py:1] slow", "Traceback (most recent call last):"]  # fmt: skip


@pytest.mark.parametrize("prefix", PREFIXES.values(), ids=PREFIXES)
@pytest.mark.parametrize("start", range(len(NOISE)))
def test_what_others_print_between_two_keys_is_in_no_value(files, prefix, start):
    lines = log(BASE, prefix).splitlines()
    text = "".join(f"{line}\n{NOISE[(start + i) % len(NOISE)]}\n" for i, line in enumerate(lines))
    assert values_of(*files(text)) == [BASE]


@pytest.mark.parametrize("prefix", ["# ", "    ", "[rank0]: ", "main-1  | ", "[pod/p/main] ", "(pid=7) "])
def test_every_line_of_a_wrapped_value_may_carry_the_prefix(files, prefix):
    lines = ["Config param axes: ['data', 'fs", "dp', 'stage'", "]", "Config param b: 1"]
    text = "".join(f"{prefix}{line}\n" for line in lines)
    assert values_of(*files(text)) == [{"axes": "['data', 'fsdp', 'stage']", "b": "1"}]


def test_a_log_line_of_the_same_process_is_no_part_of_a_value(files):
    """The logger's own prefix, to the letter, before a line that would close the bracket."""
    prefix = "[rank0]: INFO:maxtext.configs.pyconfig:"
    text = log({"a": "[1, 2", "b": "3"}, prefix) + f"{prefix}3]\n"
    assert values_of(*files(text.replace("[1, 2\n", f"[1, 2\n{prefix}3]\n"))) == [{"a": "[1, 2", "b": "3"}]


@settings(deadline=None, max_examples=30, derandomize=True)
@given(st.integers(2, 4), st.integers(0, 2**32))
def test_wrapped_values_of_interleaved_processes_come_apart(count, seed):
    """The lines of a wrapped value follow each other in their process only; others write in between."""
    shuffle = random.Random(seed)
    configs = [
        BASE | {"mesh_axes": f"['data', 'fsdp', '{i}']", "path": f"gs://bucket/{'x' * 60}{i}"} for i in range(count)
    ]
    queues = [
        [
            f"[pod/p{i}/main] {line[at : at + 50]}\n"
            for line in log(config, "").splitlines()
            for at in range(0, len(line), 50)
        ]
        for i, config in enumerate(configs)
    ]
    lines = []
    while any(queues):
        lines.append(shuffle.choice([queue for queue in queues if queue]).pop(0))
    (blocks,) = config_log._read(io.BytesIO("".join(lines).encode()), "x").rounds
    assert {block.process: block.values for block in blocks} == {f"pod/p{i}/main": c for i, c in enumerate(configs)}


def test_an_unclosed_bracket_does_not_swallow_the_log(files):
    text = log({"a": "[1, 2", "b": "3"}) + "step 1\n" * 5
    assert values_of(*files(text)) == [{"a": "[1, 2", "b": "3"}]


def test_blocks_of_one_process_in_turn(files):
    text = log(BASE) + "restart\n" + log(BASE | {"remat_policy": "full"})
    rounds = config_log.read_configs(files(text)[0]).rounds
    assert [len(blocks) for blocks in rounds] == [1, 1]
    assert [blocks[0].values["remat_policy"] for blocks in rounds] == ["custom", "full"]


UNSORTED = ["remat_policy", "adam_b1", "run_name", "num_experts", "dataset_name"]


@pytest.mark.parametrize("prefixes", [[GLOG], list(PREFIXES.values())], ids=["one prefix", "every prefix"])
def test_picked_lines_are_one_configuration(files, prefixes):
    """A few lines that somebody picked, in any order and from any stream: no key twice, so one configuration."""
    lines = [f"{prefixes[i % len(prefixes)]}Config param {key}: {BASE[key]}\n" for i, key in enumerate(UNSORTED)]
    assert values_of(*files("".join(lines))) == [{key: BASE[key] for key in UNSORTED}]


def test_json_lines(files):
    """A log as Cloud Logging or a container runtime writes it: one JSON object a line."""
    cloud = [json.dumps({"severity": "INFO", "message": f"Config param {k}: {v}", "time": 1}) for k, v in BASE.items()]
    docker = [json.dumps({"log": GLOG + f"Config param {k}: {v}\n", "stream": "stderr"}) for k, v in BASE.items()]
    assert [values_of(path) for path in files("\n".join(cloud), "\n".join(docker))] == [[BASE], [BASE]]


def test_interleaved_processes_come_apart():
    (blocks,) = config_log.read_configs(str(FIXTURES / "two_processes.log")).rounds
    assert [(block.process, block.values["remat_policy"]) for block in blocks] == [
        ("pod/alice-train-proc-0-0-x1/main", "custom"), ("pod/alice-train-proc-1-0-x2/main", "full"),
    ]  # fmt: skip


@settings(deadline=None, max_examples=40, derandomize=True)
@given(st.integers(2, 5), st.integers(0, 2**32), st.booleans())
def test_any_interleaving_comes_apart(count, seed, named):
    """Processes that agree give the same configuration however their lines are shuffled together."""
    shuffle = random.Random(seed)
    queues = [log(BASE, f"[pod/p{i}/main] " if named else "").splitlines() for i in range(count)]
    lines = []
    while any(queues):
        lines.append(shuffle.choice([queue for queue in queues if queue]).pop(0))
    text = "\n".join(lines).encode() + b"\n"
    log_read = config_log._read(io.BytesIO(text), "x")
    assert [block.values for blocks in log_read.rounds for block in blocks] == [BASE] * count
    if named:
        assert [len(blocks) for blocks in log_read.rounds] == [count]


@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
def test_pieces_of_any_size_read_the_same(monkeypatch, chunk):
    whole = [values_of(FIXTURES / name) for name in ("wrapped.log", "two_processes.log")]
    monkeypatch.setattr(config_log, "CHUNK_BYTES", chunk)
    monkeypatch.setattr(config_log, "_json_values", lambda *_: None)
    assert [values_of(FIXTURES / name) for name in ("wrapped.log", "two_processes.log")] == whole


def test_reads_a_bench_result_and_key_values(files):
    config = {"a": 1, "b": True, "c": None, "d": ["x", 2.5], "e": "text", "hf_access_token": "***"}
    result = json.dumps({"schema": "trainer-bench/1", "config": config})
    output = f"[TrainerBench] step 1: 3.2 s\n{result}\n"
    lines = "# asked\n\na = 1\nb=True c=None\nexport d=['x', 2.5]\ne=\"text\"\n"
    expected = {"a": "1", "b": "True", "c": "None", "d": "['x', 2.5]", "e": "text"}
    assert [values_of(path) for path in files(result, output, lines)] == [[expected]] * 3


class Endless(io.RawIOBase):
    """A log of `size` bytes with one configuration near its end, made while it is read."""

    def __init__(self, size):
        self.left, self.tail = size, log(BASE).encode() + b"done\n"

    def read(self, count=-1):
        if self.left > 0:
            count = min(count, self.left)
            self.left -= count
            return (b"I0317 step: 12, seconds: 30.1, loss: 1.234567\n" * (count // 46 + 1))[: count - 1] + b"\n"
        self.tail, tail = b"", self.tail
        return tail


def test_memory_does_not_grow_with_the_log():
    tracemalloc.start()
    (blocks,) = config_log._read(Endless(300 * 2**20), "big").rounds
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert blocks[0].values == BASE
    assert peak < 40 * 2**20


def test_a_line_without_end_is_not_kept_whole():
    stream = io.BytesIO(b"x" * (20 * 2**20) + b"\n" + log(BASE).encode())
    assert config_log._read(stream, "x").rounds[0][0].values == BASE


def test_line_numbers_are_right(files):
    text = "one\ntwo\n" + log({"a": "1"}) + "four\n" + log({"b": "2"})
    block = config_log.read_configs(files(text)[0]).rounds[0][0]
    assert (block.first_line, block.last_line) == (3, 5)


# --- values --------------------------------------------------------------------------------------

SAME = [
    ("7", "7.0"), ("1e-06", "0.000001"), ("1e-6", "1.0e-6"), ("true", "True"), ("False", "FALSE"), ("None", ""),
    ("null", "None"), ("RematLocation.DEVICE", "device"), ("RematLocation.DEVICE", "RematLocation.DEVICE"),
    ("QuantizationType.NONE", ""), ("QuantizationType.NONE", "None"), ("CustomRule.DEFAULT", ""),
    ("CustomRule.CP_AS_EP", "cp-as-ep"), ("RopeType.LLAMA3_1", "llama3.1"), ("('a', 1)", "['a', 1.0]"), ("(4,)", "[4]"),
    ("{'a': 1, 'b': None}", "{'b': None, 'a': 1.0}"), ("[<RematLocation.DEVICE: 'device'>]", "['device']"),
    ("inf", "inf"), ("nan", "nan"), ("[inf, nan]", "(inf, nan)"), ("-1", "-1.0"), ("[1,  2]", "[1, 2]"),
]  # fmt: skip
DIFFERENT = [
    ("1", "True"), ("0", "False"), ("0", ""), ("0", "None"), ("7", "8"), ("a", "A"), ("64", "sixty-four"),
    ("[1, 2]", "[2, 1]"),
    ("[1]", "1"), ("9" * 5000, "9" * 5001),
    ("['1']", "[1]"), ("{'a': 1}", "{'a': 2}"), ("RematLocation.DEVICE", "RematLocation.REMAT"),
    ("RematLocation.DEVICE", "remat"), ("none", "None"), ("False", "None"), ("[True]", "[1]"), ("1.10.0", "1.1.0"),
    ("full", ""), ("[]", "None"), ("CustomRule.DEFAULT", "cp-as-ep"),
]  # fmt: skip


@pytest.mark.parametrize(("a", "b"), SAME)
def test_one_value_in_two_spellings(run_json, files, a, b):
    assert same_value(a, b) and same_value(b, a)
    code, document, _ = run_json(*files(log(BASE | {"k": a}), log(BASE | {"k": b})))
    assert code == 0 and document["same"] and document["changed"] == []
    assert [item["key"] for item in document["spelling"]] == ([] if a == b else ["k"])


@pytest.mark.parametrize(("a", "b"), DIFFERENT)
def test_two_values(run_json, files, a, b):
    assert not same_value(a, b) and not same_value(b, a)
    code, document, _ = run_json(*files(log(BASE | {"k": a}), log(BASE | {"k": b})))
    assert code == 1 and [(i["key"], i["a"], i["b"]) for i in document["changed"]] == [("k", a, b)]


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None, max_examples=100, derandomize=True)
@given(VALUES)
def test_what_python_prints_is_read_back(value):
    if isinstance(value, str):
        return
    assert config_keys._same(meaning(str(value)), value)


# --- comparing -----------------------------------------------------------------------------------


def test_the_examples_differ_as_they_were_made(run):
    code, out, err = run(ROOT / "examples/config_a.log", ROOT / "examples/config_b.log")
    assert (code, err) == (1, "")
    assert out == (
        "A: 59 keys, one configuration\n"
        "B: 59 keys, one configuration\n"
        "\n"
        "changed (4)\n"
        "  remat      context  RematLocation.REMAT -> RematLocation.OFFLOAD\n"
        "  remat      remat_policy  full -> custom\n"
        "  moe        num_moe_token_chunks  1 -> 2\n"
        "  batch      per_device_batch_size  1 -> 2\n"
        "\n"
        "derived: they follow from others (4)\n"
        "  batch      global_batch_size_to_train_on  8 -> 16\n"
        "  batch      micro_batch_size_to_train_on  8 -> 16\n"
        "  remat      tensors_on_device  None -> ['decoder_layer_input']\n"
        "  remat      tensors_to_offload  None -> ['context']\n"
        "\n"
        "volatile: names and places of the run, not counted (3)\n"
        "  checkpoint_dir, run_name, tensorboard_dir\n"
        "\n"
        "different: 4 changed, 4 derived; 48 keys unchanged, 3 volatile\n"
    )


def test_json_has_the_promised_fields(run_json, files):
    a = BASE | {"gone": "1", "emb_dim": "64", "n": "7"}
    b = BASE | {"new": "2", "emb_dim": "128", "n": "7.0", "run_name": "bench", "num_experts": "256"}
    code, document, _ = run_json(*files(log(a), log(b)))
    assert code == 1 and next(iter(document)) == "schema" and document["schema"] == "diff-config/1"
    assert document["changed"] == [{"key": "num_experts", "group": "moe", "a": "512", "b": "256", "allowed": None}]
    assert document["only_a"] == [{"key": "gone", "group": "other", "a": "1", "allowed": None}]
    assert document["only_b"] == [{"key": "new", "group": "other", "b": "2", "allowed": None}]
    assert [item["key"] for item in document["derived"]] == ["emb_dim"]
    assert [item["key"] for item in document["volatile"]] == ["run_name"]
    assert [item["key"] for item in document["spelling"]] == ["n"]
    assert document["unchanged"] == 8 and document["disagreements"] == [] and document["asked"] == []
    assert document["counts"]["changed"] == 1 and document["counts"]["unchanged"] == 8


@pytest.mark.parametrize("kind", ["a log that lost its first keys", "a new version's keys"])
def test_only_in_one_counts(run_json, files, kind):
    code, document, _ = run_json(*files(log(BASE), log({k: v for k, v in BASE.items() if k > "b"})))
    assert code == 1 and [item["key"] for item in document["only_a"]] == ["adam_b1", "audio_path"]


def test_derived_alone_is_still_a_difference(run_json, files):
    code, document, _ = run_json(*files(log(BASE), log(BASE | {"ici_parallelism": "[1, 64]"})))
    assert code == 1 and document["changed"] == [] and len(document["derived"]) == 1


def test_program_keys_come_first(run_json, files):
    a = {"zz": "1", "remat_policy": "a", "dtype": "a", "ici_fsdp_parallelism": "1", "attention": "a", "steps": "1",
         "num_moe_token_chunks": "1", "model_name": "a", "adam_b1": "1", "aaa": "1"}  # fmt: skip
    _, document, _ = run_json(*files(log(a), log(dict.fromkeys(a, "9"))))
    assert [item["key"] for item in document["changed"]] == [
        "ici_fsdp_parallelism", "dtype", "remat_policy", "num_moe_token_chunks", "attention", "steps", "model_name",
        "adam_b1", "aaa", "zz",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("key", "volatile"),
    [("run_name", True), ("base_output_directory", True), ("dump_hlo_gcs_dir", True), ("wandb_run_name", True),
     ("jax_distributed_coordinator_address", True), ("load_from_prefill_dir", False), ("load_parameters_path", False),
     ("optimizer_memory_host_offload", False), ("checkpoint_storage_device_host_concurrent_gb", False)],
)  # fmt: skip
def test_volatile_keys(run, files, key, volatile):
    pair = files(log(BASE | {key: "x1"}), log(BASE | {key: "x2"}))
    assert run(*pair)[0] == (0 if volatile else 1)
    assert run(*pair, "--no-default-ignore")[0] == 1
    assert run(*pair, "--no-default-ignore", "--ignore", key[:4] + "*")[0] == 0


def test_secrets_are_masked_everywhere(run, files):
    a = {"hf_access_token": "hf_AAA", "rl": "{'api_key': 'hf_AAA', 'n': 1}", "z": "[{'token': 'hf_AAA'}]"}
    b = {"hf_access_token": "hf_BBB", "rl": "{'api_key': 'hf_BBB', 'n': 1}", "z": "[{'token': 'hf_BBB'}]"}
    for form in ("text", "json", "markdown"):
        code, out, err = run(*files(log(a), log(b)), "--format", form)
        assert code == 1 and "hf_access_token" in out and "hf_AAA" not in out + err and "hf_BBB" not in out + err


def test_disagreeing_processes_are_an_error_of_their_own(run, run_json, files):
    path = FIXTURES / "two_processes.log"
    code, document, _ = run_json(path, path)
    assert code == 1 and document["changed"] == []
    assert [(d["key"], d["file"]) for d in document["disagreements"]] == [("remat_policy", "a"), ("remat_policy", "b")]
    assert document["disagreements"][0]["values"] == [
        {"value": "custom", "processes": ["pod/alice-train-proc-0-0-x1/main"]},
        {"value": "full", "processes": ["pod/alice-train-proc-1-0-x2/main"]},
    ]
    assert "processes of one log that disagree (2)" in run(path, path)[1]
    agreeing = log(BASE, "[pod/a/m] ") + log(BASE, "[pod/b/m] ")
    assert run(*files(agreeing, log(BASE)))[0] == 0


def test_block_chooses_the_configuration(run, run_json, files):
    two = log(BASE | {"steps": "1"}) + log(BASE | {"steps": "2"})
    one = log(BASE | {"steps": "2"})
    assert run(*files(two, one))[0] == 0
    assert run(*files(two, one), "--block", "1")[0] == 1
    code, document, _ = run_json(*files(two, two.replace("steps: 1", "steps: 5")), "--block", "all")
    assert code == 1 and [(i["key"], i["block"]) for i in document["changed"]] == [("steps", 1)]
    code, document, _ = run_json(*files(two, one), "--block", "all")
    assert code == 1 and {i["block"] for i in document["only_a"]} == {2}
    for number, message in ((3, "a.log: --block 3, but only 2 configuration"), (2, None)):
        code, _, err = run(*files(two, one), "--block", number)  # the one of B offers no choice
        assert (code == 2 and message in err) if message else (code, err) == (0, "")
    code, _, err = run(*files(one, one), "--block", "2")
    assert code == 2 and "--block 2, but only 1 configuration" in err
    result = json.dumps({"config": BASE | {"steps": 1}})
    assert run(*files(two, result), "--block", "1")[0] == 0


def test_a_fragment_after_the_configuration_is_noted(run, files):
    code, _, err = run(*files(log(BASE) + log({"adam_b1": "1"}), log({"adam_b1": "1"})))
    assert code == 0 and "configuration 2 has 1 keys, another has 10" in err


def test_a_cut_last_line_is_said(run, files):
    whole = log(BASE | {"z_loss_multiplier": "12.5"})
    code, out, err = run(*files(whole, whole[:-3]))
    assert code == 1 and "z_loss_multiplier" in out and "the log ends inside this line" in err
    code, out, err = run(*files(whole, whole[:-1]))
    assert code == 0 and err.count("\n") == 1


# --- allow lists ---------------------------------------------------------------------------------

ALLOW = "- path: remat_policy\n  reason: the knob under test\n"


def test_allowed_differences_pass_with_their_reason(run, run_json, files):
    paths = files(log(BASE), log(BASE | {"remat_policy": "full"}), ALLOW)
    code, document, _ = run_json(*paths[:2], "--allow", paths[2])
    assert code == 0 and document["changed"][0]["allowed"] == "the knob under test"
    assert "allowed: the knob under test" in run(*paths[:2], "--allow", paths[2])[1]


@pytest.mark.parametrize(
    ("entry", "code"),
    [("from: custom\n  to: full", 0), ("from: custom\n  to: minimal", 1), ("to: f*", 0), ("kind: only_a", 1),
     ("kind: changed", 0), ("optional: true", 0), ('from: "c?stom"', 0), ("from: null", 1)],
)  # fmt: skip
def test_allow_from_to_kind(run, files, entry, code):
    paths = files(log(BASE), log(BASE | {"remat_policy": "full"}), f"{ALLOW}  {entry}\n")
    assert run(*paths[:2], "--allow", paths[2])[0] == code


@pytest.mark.parametrize(
    ("value", "wanted", "code"),
    [("1e-06", "1.0e-6", 0), ("1e-06", "1e-6", 1), ("2.0", "2", 0), ("True", "true", 0), ("True", "1", 1),
     ("None", "null", 0), ("", "null", 0), ("['a']", "[a]", 0), ("x", ".nan", 1)],
)  # fmt: skip
def test_allowed_values_are_compared_as_yaml_has_them(run, files, value, wanted, code):
    """`1e-6` is text to YAML 1.1 and matches as written; `1.0e-6` is a number and matches any spelling."""
    texts = log(BASE | {"k": "start"}), log(BASE | {"k": value}), f"- path: k\n  to: {wanted}\n  reason: r\n"
    paths = files(*texts)
    assert run(*paths[:2], "--allow", paths[2])[0] == code


def test_what_does_not_count_may_be_allowed_too(run, files):
    """An entry for a volatile key, or one that is only spelled differently, matches something: it is not stale."""
    allow = "- path: run_name\n  reason: r\n- path: num_*\n  reason: r\n"
    paths = files(log(BASE), log(BASE | {"run_name": "b", "num_experts": "512.0"}), allow)
    assert run(*paths[:2], "--allow", paths[2])[0] == 0


def test_a_list_without_entries_allows_nothing(run, files):
    paths = files(log(BASE), log(BASE), log(BASE | {"steps": "1"}), "[]\n")
    assert run(*paths[:2], "--allow", paths[3])[0] == 0 and run(paths[0], paths[2], "--allow", paths[3])[0] == 1


def test_a_stale_allowance_fails(run, run_json, files):
    paths = files(log(BASE), log(BASE), ALLOW, ALLOW + "  optional: true\n")
    code, document, _ = run_json(*paths[:2], "--allow", paths[2])
    assert code == 1 and [entry["path"] for entry in document["stale_allowances"]] == ["remat_policy"]
    assert "stale allowances (1)" in run(*paths[:2], "--allow", paths[2])[1]
    assert run(*paths[:2], "--allow", paths[3])[0] == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [("- path: a\n", "c.log:1: an allowance without a reason"), ("- reason: b\n", "without a path"),
    ("a: b\n", "no list"),
     ("- path: a\n  reason: b\n- 3\n", "c.log:3: an allowance is a mapping"), ("", "no list of allowances"),
     ("- path: a\n  reason: b\n  form: c\n", "unknown field 'form'"), ("- [\n", "not YAML"),
     ("- path: a\n  reason: b\n  optional: 1\n", "not true or false"),
     ("- path: a\n  reason: ''\n", "without a reason"),
     ("- path: a\n  reason: b\n  kind: change\n", "no kind of difference: 'change'; use changed, only_a")],
)  # fmt: skip
def test_bad_allow_lists(run, files, text, message):
    paths = files(log(BASE), log(BASE), text)
    code, out, err = run(*paths[:2], "--allow", paths[2])
    assert (code, out) == (2, "") and message in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("pattern", "path", "matches"),
    [("a/*/c", "a/b/c", True), ("a/*/c", "a/b/b/c", True), ("a/*/c", "a/b/d", False), ("a/**/c", "a/b/b/c", True),
     ("**/c", "c", True), ("**/c", "a/c", True), ("**/c", "abc", False), ("**", "a/b", True), ("*c", "a/bc", True),
     (".../b/c", "a/a/b/c", True), (".../c", "c", True), (".../c", "abc", False), ("a.c", "abc", False),
     ("a[1]*", "a[1]x", True), ("a?", "ab", True), ("a?", "a", False)],
)  # fmt: skip
def test_globs(pattern, path, matches):
    assert bool(allow_list.glob(pattern).fullmatch(path)) is matches


# --- asked against effective ---------------------------------------------------------------------


def render(argv: str, assignments: str = "") -> str:
    script = (
        f"set -e\n(\n{assignments} python -m tunix.experimental.distributed.runtime.main "
        f"--process_main=x.run_trainer_node.main --trainer_backend=maxtext {argv}\n) & PID=$!\nwait\n"
    )
    spec = {"containers": [{"name": "main", "command": ["bash", "-c", script]}]}
    return f"apiVersion: jobset.x-k8s.io/v1alpha2\nkind: JobSet\nmetadata: {{name: t}}\nspec: {json.dumps(spec)}\n"


ASKED_ARGV = (
    "--mesh_fsdp=4 --mesh_expert=2 --remat_policy=full --train_micro_batch_size=8 --maxtext_model_name=qwen3-30b-a3b"
)
LOGGED = {
    "ici_expert_parallelism": "2", "ici_fsdp_parallelism": "4", "model_name": "qwen3-30b-a3b",
    "per_device_batch_size": "1.0", "remat_policy": "RematPolicy.FULL", "num_moe_token_chunks": "2",
    "mu_dtype": "float32",
    "gradient_accumulation_steps": "1", "trainable_parameters_mask": "['^(?!.*gate).*']",
}  # fmt: skip


def test_asked_and_in_effect(run, files):
    paths = files(render(ASKED_ARGV, "MAXTEXT_EXTRA_FLAGS='num_moe_token_chunks=2'"), log(LOGGED))
    code, out, err = run(paths[1], "--asked", paths[0])
    assert (code, err) == (0, ""), out


@pytest.mark.parametrize(
    ("extra", "argv", "found"),
    [
        ("num_moe_token_chunks=4", "", [("num_moe_token_chunks", "lost", "4", "MAXTEXT_EXTRA_FLAGS", "2")]),
        ("use_gdn_kernel=true", "", [("use_gdn_kernel", "unknown", "true", "MAXTEXT_EXTRA_FLAGS", None)]),
        ("remat_policy=full", "--remat_policy=custom", [("remat_policy", "overridden", "custom", "--remat_policy",
        "RematPolicy.FULL")]),
        ("num_moe_token_chunks=4 num_moe_token_chunks=2", "",
         [("num_moe_token_chunks", "overridden", "4", "MAXTEXT_EXTRA_FLAGS", "2")]),
        ("mu_dtype=float32", "", []),
        ("trainable_parameters_mask=^(?!.*gate).*", "", []),
    ],
)  # fmt: skip
def test_asked_but_not_in_effect(run_json, files, extra, argv, found):
    paths = files(render(f"{ASKED_ARGV} {argv}", f"MAXTEXT_EXTRA_FLAGS='{extra}'"), log(LOGGED))
    code, document, _ = run_json(paths[1], "--asked", paths[0])
    assert [(i["key"], i["status"], i["asked"], i["source"], i["effective"]) for i in document["asked"]] == found
    assert code == (1 if found else 0)


def test_a_token_that_maxtext_never_logs_is_not_missed(run, files):
    paths = files(render(ASKED_ARGV, "MAXTEXT_EXTRA_FLAGS='hf_access_token=hf_AAA'"), log(LOGGED))
    code, out, err = run(paths[1], "--asked", paths[0])
    assert (code, err) == (0, "") and "hf_" not in out


def test_asked_reads_both_examples(run_json, files):
    """Every option of the production example is named as unknown against a log that knows one key."""
    (path,) = files(log({"remat_policy": "custom"}))
    code, document, _ = run_json(path, "--asked", ROOT / "examples/launch_dryrun.yaml")
    assert code == 1 and {item["status"] for item in document["asked"]} <= {"unknown", "lost"}
    keys = {item["key"] for item in document["asked"]}
    assert {"ici_fsdp_parallelism", "num_moe_token_chunks", "use_ring_of_experts", "base_output_directory"} <= keys


def test_a_render_that_cannot_run_is_named(run, files):
    paths = files(render(ASKED_ARGV.replace("mesh_fsdp=4", "mesh_fsdp=16")), log(LOGGED))
    code, out, err = run(paths[1], "--asked", paths[0])
    assert (code, out) == (2, "") and err.startswith(
        f"diff_config: {paths[0]}: TRAINER_ARGV: --train_micro_batch_size=8"
    )


def test_unknown_trainer_flags_are_noted(run, files):
    paths = files(render(f"{ASKED_ARGV} --brand_new=1"), log(LOGGED))
    code, _, err = run(paths[1], "--asked", paths[0])
    assert code == 0 and "--brand_new is not a trainer flag known here" in err


# --- formats, streams, errors --------------------------------------------------------------------


def test_markdown_agrees_with_json(run, run_json, files):
    paths = files(log(BASE), log(BASE | {"remat_policy": "a|b"}))
    _, out, _ = run(*paths, "--format", "markdown")
    assert "| remat | remat_policy | custom | a\\|b |  |" in out and out.startswith("**different: 1 changed; ")


def test_summary_leaves_the_lists_out(run, run_json, files):
    paths = files(log(BASE), log(BASE | {"remat_policy": "full"}))
    code, out, _ = run(*paths, "--summary")
    assert code == 1 and "remat_policy" not in out and "different: 1 changed; 9 keys unchanged" in out
    code, document, _ = run_json(*paths, "--summary")
    assert code == 1 and "changed" not in document and document["counts"]["changed"] == 1


def test_text_stays_within_80_columns(run):
    _, out, _ = run(ROOT / "examples/config_a.log", ROOT / "examples/config_b.log", "--no-default-ignore")
    assert max(map(len, out.splitlines())) <= 80


def test_stdin_equals_file(run, files, monkeypatch):
    paths = files(log(BASE), log(BASE | {"steps": "3"}))
    expected = run(*paths)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(pathlib.Path(paths[1]).read_bytes())))
    assert run(paths[0], "-") == expected


BAD = [
    (b"", "an empty file"), (b"hello\nworld\n", "no `Config param` line"), (b"\x7fELF\0\0\1" * 99, "binary file"),
    (b'{"schema": "trainer-bench/1"}', "a JSON document without a config"), (b"\0" * (6 * 2**20), "binary file"),
    (b"a=1\nnot a pair\n", "no `Config param` line"), (b"Config param : x\n", "no `Config param` line"),
    (b"a = \xff\xfe", "not UTF-8"), (b"# only a comment=1\n", "no `Config param` line"),
    (b"[1, 2]", "no `Config param`"),
]  # fmt: skip


@pytest.mark.parametrize(("data", "message"), BAD)
def test_bad_input_is_one_line(run, files, data, message):
    paths = files(log(BASE), data)
    for order in (paths, paths[::-1]):
        code, out, err = run(*order)
        assert (code, out) == (2, "") and message in err and err.count("\n") == 1 and "Traceback" not in err


@pytest.mark.parametrize("path", ["missing.log", "."])
def test_unreadable_input(run, files, path):
    code, out, err = run(files(log(BASE))[0], path)
    assert (code, out) == (2, "") and err.count("\n") == 1 and "cannot read" in err


@pytest.mark.parametrize(
    "argv", [[], ["a"], ["a", "b", "c"], ["-", "-"], ["a", "b", "--block", "0"], ["a", "b", "--block", "first"],
    ["--typo"]]
)  # fmt: skip
def test_bad_options(capsys, argv):
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2 and capsys.readouterr().out == ""


def test_help_runs_alone():
    """The one subprocess test: --help in a clean environment, without anything heavy imported."""
    code = (
        "import sys, runpy; sys.argv = ['diff-config', '--help']\n"
        "try: runpy.run_path('diff_config.py', run_name='__main__')\n"
        "finally: assert not {'jax', 'numpy', 'yaml', 'maxtext'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env={}, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""
    assert "Exit status" in done.stdout and done.stdout.count("    diff-config ") >= 2


# --- properties ----------------------------------------------------------------------------------

KEYS = st.sampled_from([*BASE, "aa", "bb", "moe_x", "tensorboard_dir", "emb_dim", "hf_access_token"])
TEXTS = st.sampled_from(
    ["1", "1.0", "True", "true", "", "None", "x", "[1, 2]", "(1, 2)", "RematLocation.REMAT", "remat"]
)
CONFIGS = st.dictionaries(KEYS, TEXTS, min_size=1)


def compared(a: dict, b: dict) -> diff_config.Comparison:
    result = diff_config.Comparison()
    rules = diff_config.make_rules([], True, allow_list.AllowList())
    diff_config.compare(a, b, rules, result)
    return result


@settings(deadline=None, max_examples=60, derandomize=True)
@given(CONFIGS)
def test_self_diff_is_empty(config):
    result = compared(config, dict(reversed(config.items())))
    assert result == diff_config.Comparison(unchanged=len(config))


def mirrored(items: list[dict]) -> list[dict]:
    swap = {"a": "b", "b": "a"}
    return [{swap.get(key, key): value for key, value in item.items()} for item in items]


@settings(deadline=None, max_examples=100, derandomize=True)
@given(CONFIGS, CONFIGS)
def test_mirror_and_rebuild(a, b):
    forth, back = compared(a, b), compared(b, a)
    for one, other in (("changed", "changed"), ("only_a", "only_b"), ("derived", "derived"), ("volatile", "volatile"),
                       ("spelling", "spelling")):  # fmt: skip
        assert mirrored(getattr(forth, one)) == getattr(back, other)
    rebuilt = dict(a)
    for name in ("changed", "only_a", "only_b", "derived", "volatile", "spelling"):
        for item in getattr(forth, name):
            rebuilt.pop(item["key"], None)
            if "b" in item:
                rebuilt[item["key"]] = item["b"]
    shown = {key: diff_config.shown_value(key, value) for key, value in b.items()}
    assert {key: diff_config.shown_value(key, value) for key, value in rebuilt.items()} == shown


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.data())
def test_one_mutation_is_one_difference(data):
    """Change, drop or add one random key of a real log: exactly that one is reported."""
    text = (ROOT / "examples/config_a.log").read_text()
    a = config_log._read(io.BytesIO(text.encode()), "a").rounds[0][0].values
    key = data.draw(st.sampled_from(sorted(a)))
    how = data.draw(st.sampled_from(["change", "drop", "add"]))
    line = next(line for line in text.splitlines() if f"Config param {key}:" in line)
    added = line.split("Config param")[0] + f"Config param {key}_: 1"
    new = {"change": line + "9", "drop": None, "add": line + "\n" + added}[how]
    b_text = text.replace(line + "\n", new + "\n" if new else "")
    b = config_log._read(io.BytesIO(b_text.encode()), "b").rounds[0][0].values
    result = compared(a, b)
    found = [item for name in ("changed", "only_a", "only_b", "derived", "volatile") for item in getattr(result, name)]
    assert [item["key"] for item in found] == [key + "_" if how == "add" else key]


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.lists(st.binary(max_size=30) | st.sampled_from([b"Config param a: [", b"\nConfig param b: 1", b"]\n", b"'"])))
def test_any_bytes_give_a_configuration_or_one_clear_error(pieces):
    try:
        assert config_log._read(io.BytesIO(b"".join(pieces)), "x").rounds
    except BenchError as error:
        assert "\n" not in str(error) and str(error).startswith("x")


# --- MaxText's own output ------------------------------------------------------------------------

MAXTEXT = """
import json, os, sys
from absl import logging
logging.set_verbosity(logging.INFO); logging.use_absl_handler()
from maxtext.configs import pyconfig, types
base = os.path.join(os.path.dirname(pyconfig.__file__), "base.yml")
known = set(types.MaxTextConfig.model_fields)
shown, unknown = [], []
for extra in json.load(sys.stdin):
    unknown += [key for key, value in extra if key not in known]
    config = pyconfig.initialize(["x", base, *(f"{key}={value}" for key, value in extra if key in known)])
    shown.append({key: str(value) for key, value in config.get_keys().items()})
json.dump([shown, unknown], sys.stdout)
"""
COMMON = {"run_name": "t", "skip_jax_distributed_system": "true", "enable_checkpointing": "false",
          "base_output_directory": "gs://bucket/out"}  # fmt: skip
LAUNCH_TINY = ROOT / "examples" / "launch_tiny.yaml"


def settings_of_the_launch() -> list[tuple[str, str]]:
    """Return what the tiny launch's trainer sets, as the driver sets it."""
    clients = [c for d in launch_render.read_render(LAUNCH_TINY.read_text(), "x").documents for c in
               launch_render.clients(d)]  # fmt: skip
    argv = {client.role: [word.value for word in client.argv] for client in clients}
    env = next(client.env for client in clients if client.role == "trainer")
    trainer = bench_config.parse_trainer_argv(argv["trainer"])
    plan = bench_config.batch_plan(trainer, bench_config.parse_orch_argv(argv["orchestrator"]))
    found = bench_config.effective(bench_config.maxtext_settings(trainer, plan, env, num_devices=4))
    return [(s.key, s.value) for s in found.values() if s.key != "load_parameters_path"]


def test_a_log_of_maxtext_itself(tmp_path, run_json):
    """MaxText writes the log, and says by itself what its values are; the reader must find just that."""
    pytest.importorskip("maxtext")
    first = COMMON | {"remat_policy": "full"}
    second = COMMON | {"remat_policy": "custom", "context": "offload", "model_name": "qwen3-30b-a3b"}
    runs = [list(first.items()), list(second.items()), settings_of_the_launch()]
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "HOME": str(tmp_path)}
    env["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
    done = subprocess.run([sys.executable, "-c", MAXTEXT], env=env, cwd=tmp_path, capture_output=True, text=True,
                          input=json.dumps(runs))  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    path = tmp_path / "maxtext.log"
    path.write_text(done.stderr)
    expected, unknown = json.loads(done.stdout)
    rounds = config_log.read_configs(str(path)).rounds
    assert [len(blocks) for blocks in rounds] == [1, 1, 1]
    for blocks, values in zip(rounds, expected, strict=True):
        values.pop("hf_access_token", None)
        assert blocks[0].values == {key: value.rstrip() for key, value in values.items()}

    code, document, _ = run_json(path, path, "--block", "all")
    assert code == 0 and document["unchanged"] == sum(map(len, expected))

    starts = [match.start() for match in re.finditer("^.*Config param abort_on_inf_loss", done.stderr, re.MULTILINE)]
    paths = [tmp_path / "1.log", tmp_path / "2.log"]
    paths[0].write_text(done.stderr[: starts[1]])
    paths[1].write_text(done.stderr[starts[1] : starts[2]])
    code, document, _ = run_json(*paths)
    changed = {item["key"]: (item["a"], item["b"]) for item in document["changed"]}
    assert code == 1 and changed["remat_policy"] == ("full", "custom")
    assert changed["context"] == ("RematLocation.REMAT", "RematLocation.OFFLOAD")
    assert document["only_a"] == document["only_b"] == []

    code, document, _ = run_json(path, "--asked", LAUNCH_TINY)
    assert {item["key"]: item["status"] for item in document["asked"]} == dict.fromkeys(unknown, "unknown")
    assert code == (1 if unknown else 0)
