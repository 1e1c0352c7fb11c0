"""The renderer: what it changes, what it refuses, and that the rendered command runs the trainer's own program."""

import contextlib
import copy
import functools
import io
import json
import os
import pathlib
import random
import re
import shlex
import signal
import subprocess
import sys
import time
import tomllib

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import bench_script
import kube_yaml
import launch_render as lr
import render_bench
import render_check
import render_edit
import render_slice
from bench_common import BenchError

ROOT = pathlib.Path(__file__).resolve().parent.parent
FIXTURES = ROOT / "tests" / "fixtures"
DRYRUN = ROOT / "examples" / "launch_dryrun.yaml"  # fail-fast, dynamic slicing, three carriers of libtpu flags
TINY = ROOT / "examples" / "launch_tiny.yaml"
GSM8K = FIXTURES / "launch_gsm8k_v5p.txt"
V5P = FIXTURES / "launch_397b_v5p.txt"
AUGUST = FIXTURES / "launch_august.txt"
INDENT = " " * 14  # of a container's variables in the examples
STREAMS = [DRYRUN, TINY, GSM8K, V5P, AUGUST]


def yaml_load(text):
    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))


@pytest.fixture(scope="session")
def driver(tmp_path_factory):
    """A small driver with a module beside it, to keep renders fast; its text is hard to carry."""
    folder = tmp_path_factory.mktemp("driver")
    (folder / "helper_module.py").write_text("X = '$(JOBSET_NAME) $$ BENCH_DRIVER_EOF'  \n\n\tY = \"`a`\"  \n")
    (folder / "unused_module.py").write_text("")
    (folder / "bench_driver.py").write_text(
        '"""A stand-in."""\nimport os\n\n\ndef f():\n    import helper_module as h\n'
    )
    return folder / "bench_driver.py"


class Result:
    """What a run of the tool gave."""

    def __init__(self, code, out, err):
        self.code, self.out, self.err = code, out, err

    @functools.cached_property
    def data(self):
        return yaml_load(self.out)

    @functools.cached_property
    def client(self):
        (document,) = lr.read_render(self.out, "out").documents
        (client,) = lr.clients(document)
        return client

    @property
    def argv(self):
        return dict(lr.flag_items(self.client.carried_argv("TRAINER_ARGV")))


@pytest.fixture
def run(driver, tmp_path):
    """Return a function that renders a stream (a path, or text) with options."""

    def render(stream, *options, name="flags-a", driver_file=driver):
        if isinstance(stream, str):
            file = tmp_path / "stream.txt"
            file.write_text(stream)
            stream = file
        return call(["--launch-render", str(stream), "--name", name, "--driver", str(driver_file), *map(str, options)])

    return render


def call(argv):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = render_bench.main(argv)
    return Result(code, out.getvalue(), err.getvalue())


def trainer_of(stream):
    """Return the trainer's document and client of a stream, found here by its name."""
    text = stream if isinstance(stream, str) else stream.read_text()
    (document,) = [d for d in lr.read_render(text, "in").documents if d.name.endswith("-train")]
    (client,) = lr.clients(document)
    return document, client


def leaves(node, path=()):
    """Yield (path, value) of everything in a document."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else None
    if items is None or not node:
        yield path, node
        return
    for key, item in items:
        yield from leaves(item, (*path, key))


def differences(old, new):
    """Return {path: (old, new)} of two documents, by position."""
    a, b = dict(leaves(old)), dict(leaves(new))
    return {
        p: (a.get(p), b.get(p))
        for p in [*a, *b]
        if a.get(p, ...) != b.get(p, ...) or type(a.get(p)) is not type(b.get(p))
    }


def pod(document, job):
    return next(j for j in document["spec"]["replicatedJobs"] if j["name"] == job)["template"]["spec"]["template"][
        "spec"
    ]


def box(document, name):
    for job in document["spec"]["replicatedJobs"]:
        spec = job["template"]["spec"]["template"]["spec"]
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            if container["name"] == name:
                return container
    raise AssertionError(name)


# --- exactly what was asked ---


@pytest.mark.parametrize("stream", STREAMS, ids=lambda p: p.stem)
def test_only_names_restarts_and_the_client_differ(run, stream):
    document, client = trainer_of(stream)
    result = run(stream, "--quiet")
    assert result.code == 0
    left = {}
    for path, (old, new) in differences(document.data, result.data).items():
        if path == ("spec", "failurePolicy", "maxRestarts"):
            assert new == 0
        elif path == ("metadata", "labels", "scheduling.x-k8s.io/gang-id") or old == document.name:
            assert new == "flags-a"
        elif path[-2:] == ("command", 2):
            assert new.startswith("# The trainer bench")
        else:
            left[path] = (old, new)
    assert left == {}
    assert result.data["spec"]["failurePolicy"]["maxRestarts"] == 0
    assert document.name not in [value for path, value in leaves(result.data)]
    assert list(result.data) == list(document.data) and list(result.data["spec"]) == list(document.data["spec"])


@pytest.mark.parametrize("stream", STREAMS, ids=lambda p: p.stem)
def test_stdin_out_file_and_second_run_give_the_same_bytes(run, stream, driver, tmp_path, monkeypatch):
    first = run(stream)
    assert first.out == run(stream).out
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stream.read_bytes())))
    assert first.out == run("-" and pathlib.Path("-")).out
    written = tmp_path / "out.yaml"
    assert run(stream, "--out", written).out == "" and written.read_text() == first.out
    monkeypatch.setenv("LAUNCH_RENDER", str(stream))
    assert call(["--name", "flags-a", "--driver", str(driver)]).out == first.out


def test_affinity_and_gang_of_a_static_render(run):
    result = run(TINY)
    selectors = re.findall(r"jobset-name\n +operator: (In|NotIn)\n +values:\n +- (.*)", result.out)
    assert selectors == [("In", "flags-a"), ("In", "flags-a"), ("NotIn", "flags-a")]
    assert result.data["metadata"]["labels"]["scheduling.x-k8s.io/gang-id"] == "flags-a"
    assert result.data["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "tpu-queue"


def test_names_are_replaced_as_whole_values_only(run):
    text = TINY.read_text().replace("tiny", "al")
    text = text.replace("gs://example-rl/pathways-scratch", "gs://x/al-train/al-train-2")
    text = text.replace(
        "  - name: XCLOUD_ENVIRONMENT\n                value: GCP", "  - name: OWN\n                value: al-train"
    )
    result = run(text)
    assert "gs://x/al-train/al-train-2" in result.out
    assert {"name": "OWN", "value": "flags-a"} in box(result.data, "pathways-worker")["env"]


def test_labels_and_selectors_that_carry_the_name(run):
    """Whatever key selects the production pods must not attract those of the bench; a queue may be called the same."""
    text = TINY.read_text().replace("kueue.x-k8s.io/queue-name: tpu-queue", "kueue.x-k8s.io/queue-name: tiny-train")
    pods = "          metadata:\n            labels:\n              app: tiny-train\n"
    text = text.replace("          metadata:\n            annotations:\n", pods + "            annotations:\n")
    text = text.replace("- key: jobset.sigs.k8s.io/jobset-name", "- key: app")
    result = run(text)
    assert re.findall(r"key: app\n +operator: (In|NotIn)\n +values:\n +- (.*)", result.out) == [
        ("In", "flags-a"), ("In", "flags-a"), ("NotIn", "flags-a")]  # fmt: skip
    assert result.out.count("app: flags-a") == pods.count("app") * len(result.data["spec"]["replicatedJobs"])
    assert result.data["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "tiny-train"
    assert "metadata.labels.kueue.x-k8s.io/queue-name is still tiny-train" in result.err


def test_a_host_of_the_production_jobset_that_is_left_is_named(run):
    text = TINY.read_text().replace("value: GCP", "value: tiny-train-proc-0-0.tiny-train:29001")
    assert "env.4.value still names a host of tiny-train" not in run(TINY).err
    assert "still names a host of tiny-train" in run(text).err


def test_the_client_keeps_environment_and_flags(run):
    _, client = trainer_of(DRYRUN)
    new = run(DRYRUN).client
    kept = {name: word.raw for name, word in client.assignments if name != "HF_TOKEN"}
    assert {name: word.raw for name, word in new.assignments if name in kept} == kept
    changed = {
        "--discovery_addrs": None,
        "--worker_id": "flags-a",
        "--checkpoint_save_interval_steps": "0",
        "--maxtext_output_directory": "gs://example-rl/maxtext/bench/flags-a",
    }
    argv = new.carried_argv("TRAINER_ARGV")
    want = [
        f"{f}={changed.get(f, v)}" if v is not None else f for f, v in lr.flag_items([w.value for w in client.argv])
    ]
    assert argv == [word for word in want if not word.startswith("--discovery_addrs")]
    orchestrator = next(lr.clients(lr.read_render(DRYRUN.read_text(), "in").documents[0]))
    assert new.carried_argv("ORCH_ARGV") == [word.value for word in orchestrator.argv]


def test_maxtext_edits_keep_place_and_order(run):
    old = dict(lr.key_values(trainer_of(DRYRUN)[1].env["MAXTEXT_EXTRA_FLAGS"]))
    result = run(
        DRYRUN, "--maxtext", "sa_block_q=512", "--maxtext", "new_knob=a=b", "--maxtext-unset", "packing",
        "--maxtext", "sa_block_q=2048", "--maxtext", "dq_reduction_steps=3", "--maxtext-unset", "never_there",
    )  # fmt: skip
    new = dict(lr.key_values(result.client.env["MAXTEXT_EXTRA_FLAGS"]))
    expected = {key: "2048" if key == "sa_block_q" else value for key, value in old.items() if key != "packing"}
    assert list(new.items()) == [*expected.items(), ("new_knob", "a=b")]
    assert "MAXTEXT_EXTRA_FLAGS sa_block_q: 1024 -> 2048" in result.err
    assert "MAXTEXT_EXTRA_FLAGS packing: True -> (removed)" in result.err
    assert "MAXTEXT_EXTRA_FLAGS new_knob: (absent) -> a=b" in result.err
    assert "--maxtext dq_reduction_steps changes nothing" in result.err
    assert "--maxtext never_there changes nothing" in result.err


@pytest.mark.parametrize(
    ("kind", "name", "read"),
    [
        ("maxtext", "megablox", lambda r: dict(lr.key_values(r.client.env["MAXTEXT_EXTRA_FLAGS"]))),
        ("trainer-arg", "lora_rank", lambda r: {key[2:]: value for key, value in r.argv.items()}),
        ("orch-arg", "beta", lambda r: {k[2:]: v for k, v in lr.flag_items(r.client.carried_argv("ORCH_ARGV"))}),
        (
            "libtpu",
            "xla_tpu_overlap_compute_collective_tc",
            lambda r: {k[2:]: v for k, v in lr.flag_items(r.client.env["LIBTPU_INIT_ARGS"].split())},
        ),
    ],
)
def test_of_setting_and_unsetting_a_name_the_last_one_counts(run, kind, name, read):
    given = [f"--{kind}-unset", name], [f"--{kind}", f"{name}=7"]
    kept, gone = run(TINY, *given[0], *given[1]), run(TINY, *given[1], *given[0])
    assert kept.code == gone.code == 0, kept.err + gone.err
    before = read(run(TINY))
    assert read(kept) == {**before, name: "7"} and list(read(kept)) == list(before)
    assert read(gone) == {key: value for key, value in before.items() if key != name}


def test_variables_of_the_container_are_edited_like_assignments(run):
    """The container's own `env:` reaches the program where no assignment overrules it, as of older templates."""
    assignment = re.search(r'MAXTEXT_EXTRA_FLAGS="([^"]*)" +', TINY.read_text())
    entry = f'{INDENT}- name: MAXTEXT_EXTRA_FLAGS\n{INDENT}  value: "{assignment[1]}"\n'
    here = INDENT + "- name: RAIDEN_BROADCAST_K\n"
    text = TINY.read_text().replace(assignment[0], "").replace(here, entry + here)
    before = dict(lr.key_values(assignment[1]))
    result = run(text, "--maxtext", "megablox=true", "--maxtext-unset", "num_vocab_tiling")
    wanted = {key: value for key, value in before.items() if key != "num_vocab_tiling"}
    assert dict(lr.key_values(result.client.env["MAXTEXT_EXTRA_FLAGS"])) == {**wanted, "megablox": "true"}
    assert "MAXTEXT_EXTRA_FLAGS megablox: false -> true" in result.err
    assert "MAXTEXT_EXTRA_FLAGS" not in run(text).client.env  # nothing asked for: the container's own stays
    assert run(text, "--maxtext", "ici_fsdp_parallelism=3").code == 2


def test_a_dollar_in_a_libtpu_flag_reaches_every_carrier_as_it_was_given(run):
    result = run(DRYRUN, "--libtpu", "xla_new=$(JOB_INDEX)$$")
    env = {entry["name"]: entry.get("value", "7") for entry in box(result.data, "pathways-worker")["env"]}
    flags = [
        lr.kube_expand(result.client.env["LIBTPU_INIT_ARGS"], {}),
        lr.kube_expand(env["LIBTPU_INIT_ARGS"], {**env, "JOB_INDEX": "7"}),
        lr.kube_expand(box(result.data, "pathways-proxy")["args"][-1], {"JOB_INDEX": "7"}),
    ]
    assert all("--xla_new=$(JOB_INDEX)$" in text for text in flags), flags


def test_an_asked_for_value_that_is_the_production_name_stays(run):
    result = run(DRYRUN, "--libtpu", "xla_new=ada-train", "--trainer-arg", "note=ada-train", "--env", "NOTE=ada-train")
    assert result.code == 0, result.err
    assert box(result.data, "pathways-proxy")["args"][-1] == "--xla_new=ada-train"
    assert result.argv["--note"] == result.client.env["NOTE"] == "ada-train"


def test_a_duplicate_key_or_flag_is_changed_where_it_counts(run):
    text = TINY.read_text().replace('MAXTEXT_EXTRA_FLAGS="', 'MAXTEXT_EXTRA_FLAGS="gdn_chunk_size=16 ')
    result = run(text, "--maxtext", "gdn_chunk_size=32")
    keys = lr.key_values(result.client.env["MAXTEXT_EXTRA_FLAGS"])
    assert [value for key, value in keys if key == "gdn_chunk_size"] == ["16", "32"]
    argv = run(GSM8K, "--trainer-arg", "remat_policy=custom").client.carried_argv("TRAINER_ARGV")
    assert [word for word in argv if word.startswith("--remat")] == ["--remat_policy=full", "--remat_policy=custom"]
    argv = run(GSM8K, "--trainer-arg-unset", "remat_policy").client.carried_argv("TRAINER_ARGV")
    assert not any(word.startswith("--remat") for word in argv)


def test_maxtext_flags_where_the_launch_has_none(run):
    result = run(GSM8K, "--maxtext", "num_vocab_tiling=8")
    assert result.client.env["MAXTEXT_EXTRA_FLAGS"] == "num_vocab_tiling=8"


def test_libtpu_flags_change_in_all_three_carriers(run):
    result = run(
        DRYRUN, "--libtpu", "xla_tpu_scoped_vmem_limit_kib=81920", "--libtpu", "--xla_new=1",
        "--libtpu-unset", "xla_latency_hiding_scheduler_rerun",
    )  # fmt: skip
    client = result.client.env["LIBTPU_INIT_ARGS"].split()
    (worker,) = [
        e["value"].split() for e in box(result.data, "pathways-worker")["env"] if e["name"] == "LIBTPU_INIT_ARGS"
    ]
    proxy = [arg for arg in box(result.data, "pathways-proxy")["args"] if arg.startswith("--xla")]
    assert client[0] == "--DANGEROUS_tpu_runtime_abi_verification_disabled=true" and client[1:] == proxy
    assert worker == [*client, "--megascale_port=-1", "--xprof_compress_jftrace=true"]
    assert proxy[3] == "--xla_tpu_scoped_vmem_limit_kib=81920" and proxy[-1] == "--xla_new=1"
    assert not any("rerun" in arg for arg in proxy)
    assert (
        result.client.assignments[-7][1].raw != "" and "'" == dict(result.client.assignments)["LIBTPU_INIT_ARGS"].raw[0]
    )
    where = [line.split(": ")[1].strip() for line in result.err.splitlines() if "scoped_vmem" in line]
    assert where[:1] == ["spec.replicatedJobs[proc].template.spec.template.spec.initContainers[pathways-proxy]"
                         ".args[--xla_tpu_scoped_vmem_limit_kib]"]  # fmt: skip
    assert where[1:] == [
        "client libtpu flag xla_tpu_scoped_vmem_limit_kib",
        "worker libtpu flag xla_tpu_scoped_vmem_limit_kib",
    ]


@pytest.mark.parametrize(
    ("flag", "carriers"),
    [
        ("megascale_port=7", {"worker"}),
        ("xprof_new=1", {"worker"}),
        ("DANGEROUS_tpu_runtime_abi_verification_disabled=false", {"client", "worker"}),
        ("tpu_new_flag=1", {"client", "worker"}),
        ("xla_new=1", {"client", "worker", "proxy"}),
    ],
)
@pytest.mark.parametrize("stream", [DRYRUN, V5P], ids=lambda p: p.stem)
def test_libtpu_flags_of_one_carrier_stay_there(run, stream, flag, carriers):
    result = run(stream, "--libtpu", flag)
    worker = [e["value"] for e in box(result.data, "pathways-worker")["env"] if e["name"] == "LIBTPU_INIT_ARGS"]
    texts = {
        "client": result.client.env["LIBTPU_INIT_ARGS"].split(),
        "worker": worker[0].split(),
        "proxy": box(result.data, "pathways-proxy")["args"],
    }
    assert {carrier for carrier, text in texts.items() if f"--{flag}" in text} == carriers


def test_libtpu_flags_where_the_launch_has_none(run):
    result = run(GSM8K, "--libtpu", "xla_a=1", "--libtpu-unset", "xla_b")
    assert result.client.env["LIBTPU_INIT_ARGS"] == "--xla_a=1"
    env = box(result.data, "pathways-worker")["env"]
    assert env[4] == {"name": "LIBTPU_INIT_ARGS", "value": "--xla_a=1"} and "valueFrom" in env[5]
    assert box(result.data, "pathways-proxy")["args"][-1] == "--xla_a=1"
    assert "LIBTPU" not in run(GSM8K, "--libtpu-unset", "xla_b").out


def test_a_new_proxy_flag_goes_before_the_sidecars_name(run):
    assert box(run(V5P, "--libtpu", "xla_a=1").data, "pathways-proxy")["args"][-2:] == [
        "--xla_a=1",
        "--sidecar_name=external",
    ]


def test_argv_environment_and_job_options(run):
    result = run(
        TINY, "--trainer-arg", "debug", "--trainer-arg", "--remat_policy=custom a", "--trainer-arg-unset", "lora_rank",
        "--orch-arg", "beta=0.1", "--orch-arg-unset", "epsilon_high", "--env", "NEW=a b$(JOBSET_NAME)'\"$x",
        "--env", "FLOAT32_LOGITS=false", "--image", "reg/img:2", "--namespace", "perf", "--queue", "q2",
        "--priority", "high",
        "--steps", 5, "--warmup", 0, "--micro-batches", 3, "--seed", 7, "--profile", "2:3", "--stage-before-update",
        "--routing-load", "1.35",
    )  # fmt: skip
    argv = result.argv
    assert argv["--debug"] is None and argv["--remat_policy"] == "custom a" and "--lora_rank" not in argv
    orch = dict(lr.flag_items(result.client.carried_argv("ORCH_ARGV")))
    assert orch["--beta"] == "0.1" and "--epsilon_high" not in orch and orch["--epsilon"] == "0.2"
    assert result.client.env["NEW"] == "a b$(JOBSET_NAME)'\"$x" and result.client.env["FLOAT32_LOGITS"] == "false"
    assert box(result.data, "main")["image"] == "reg/img:2"
    assert box(result.data, "pathways-proxy")["image"] != "reg/img:2"
    assert result.data["metadata"]["namespace"] == "perf"
    assert result.data["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "q2"
    assert [pod(result.data, job)["priorityClassName"] for job in ("proc", "pw-node")] == ["high", "high"]
    assert [word.value for word in result.client.argv] == [
        "--steps=5", "--warmup=0", "--micro-batches=3", "--seed=7", "--profile=2:3", "--stage-before-update",
        "--routing-load=1.35",
    ]  # fmt: skip


def test_a_trace_that_pathways_could_not_write_is_named(run):
    told = "--profile will be refused in the pod: Pathways writes traces to a bucket only"
    assert told not in run(TINY, "--profile", "2:3").err
    assert (
        f"{told}, and the output directory is /mnt/out;"
        in run(TINY, "--profile", "2:3", "--output-directory", "/mnt/out").err
    )
    assert told not in run(TINY, "--output-directory", "/mnt/out").err


def test_fields_that_a_launch_lacks_are_added_when_asked_for(run):
    result = run(AUGUST, "--queue", "q", "--namespace", "perf", "--priority", "high")
    assert result.data["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "q"}
    assert pod(result.data, "pw-node")["priorityClassName"] == "high"
    assert result.data["spec"]["failurePolicy"] == {"restartStrategy": "Recreate", "maxRestarts": 0}
    assert "no --trainer_backend" in result.err


def test_what_changes_nothing_is_reported(run):
    result = run(
        TINY, "--maxtext", "packing=True", "--libtpu-unset", "xla_none", "--trainer-arg", "mesh_tp=1",
        "--orch-arg", "beta=0.0",
        "--env", "FLOAT32_LOGITS=true", "--namespace", "default", "--queue", "tpu-queue", "--priority", "medium",
        "--slice", "tpu-v5p-slice:2x2x1", "--image", "us-docker.pkg.dev/example-project/tunix/tunix:nightly",
        "--load-checkpoint", "none", "--keep-secret", "HF_TOKEN",
    )  # fmt: skip
    assert result.code == 0
    idle = re.findall(r"(--\S+(?: [\w-]+)?) changes nothing: it is so already", result.err)
    assert idle == [
        "--maxtext packing", "--libtpu xla_none", "--trainer-arg mesh_tp", "--orch-arg beta", "--env FLOAT32_LOGITS",
        "--namespace", "--queue", "--image", "--priority", "--slice", "--load-checkpoint none",
    ]  # fmt: skip
    assert "HF_TOKEN is no secret of this launch" in result.err
    assert result.out == run(TINY, "--keep-secret", "HF_TOKEN").out or "BENCH_RENDER_OPTIONS" in result.out


# --- nothing of production is written to ---


@pytest.mark.parametrize(
    ("original", "expected"),
    [
        ("gs://b/maxtext/al", "gs://b/maxtext/bench/flags-a"),
        ("gs://b/maxtext/al/", "gs://b/maxtext/bench/flags-a"),
        ("gs://b", "gs://b/bench/flags-a"),
        ("/data/al", "/data/bench/flags-a"),
        ("al", "bench/flags-a"),
        ("", ""),
    ],
)
def test_the_output_directory_stands_beside_the_original(run, original, expected):
    text = TINY.read_text().replace("gs://example-rl/maxtext/tiny  ", f"{original}  ")
    assert run(text).argv["--maxtext_output_directory"] == expected


def test_output_directory_checkpoint_and_run_name(run):
    result = run(DRYRUN, "--output-directory", "gs://mine/x", "--load-checkpoint", "none")
    assert result.argv["--maxtext_output_directory"] == "gs://mine/x"
    assert "--maxtext_ckpt_path" not in result.argv and "--maxtext_ckpt_path" in run(DRYRUN).argv
    result = run(DRYRUN, "--trainer-arg", "maxtext_ckpt_path=gs://other/0")
    assert result.argv["--maxtext_ckpt_path"] == "gs://other/0"


def test_keys_of_production_in_the_extra_flags_become_the_benchs(run):
    extra = "run_name=tiny base_output_directory=gs://p/tiny enable_checkpointing=true "
    extra += "load_parameters_path=gs://c hf_access_token=s3cr3t "
    text = TINY.read_text().replace('MAXTEXT_EXTRA_FLAGS="', f'MAXTEXT_EXTRA_FLAGS="{extra}')
    keys = dict(lr.key_values(run(text).client.env["MAXTEXT_EXTRA_FLAGS"]))
    assert keys["run_name"] == "flags-a" and keys["base_output_directory"] == "gs://example-rl/maxtext/bench/flags-a"
    assert keys["enable_checkpointing"] == "false" and keys["load_parameters_path"] == "gs://c"
    result = run(text, "--load-checkpoint", "none")
    keys = dict(lr.key_values(result.client.env["MAXTEXT_EXTRA_FLAGS"]))
    assert "load_parameters_path" not in keys and "hf_access_token" not in keys
    assert "s3cr3t" not in result.out + result.err


def test_what_still_points_into_the_production_folder_is_named(run):
    extra = "dump_hlo_gcs_path=gs://example-rl/maxtext/tiny/hlo load_parameters_path=gs://example-rl/maxtext/tiny/0 "
    text = TINY.read_text().replace('MAXTEXT_EXTRA_FLAGS="', f'MAXTEXT_EXTRA_FLAGS="{extra}')
    text = text.replace(
        "--port=20002", "--port=20002 --other=gs://example-rl/maxtext/tiny-2 --notes=gs://example-rl/maxtext/tiny"
    )
    named = re.findall(r"(\S+) still points into gs://example-rl/maxtext/tiny, ", run(text).err)
    assert named == ["dump_hlo_gcs_path", "--notes"]
    fixed = run(text, "--maxtext-unset", "dump_hlo_gcs_path", "--trainer-arg", "notes=gs://mine")
    assert "still points into" not in fixed.err


def test_run_flags_leave_the_trainers_argv(run):
    text = TINY.read_text().replace("--port=20002", "--port=20002 --weight_sync_mode=raiden --no-weight_sync_async")
    argv = run(text).argv
    assert not any(re.match("--(no-)?(weight_sync|discovery|raiden)", flag) for flag in argv) and "--port" in argv


# --- secrets ---


def test_secrets_are_dropped_named_and_masked(run):
    text = DRYRUN.read_text().replace("not-a-real-token", "s3cr3t-token").replace("not-a-real-key", "s3cr3t-key")
    text = text.replace(
        "              - name: RAIDEN_BROADCAST_K\n",
        f"{INDENT}- name: WANDB_API_KEY\n{INDENT}  value: s3cr3t-env\n{INDENT}- name: RAIDEN_BROADCAST_K\n",
    )
    text = text.replace("--rpc_timeout_s=10800", "--rpc_timeout_s=10800 --wandb_api_key=s3cr3t-flag")
    result = run(text)
    assert "s3cr3t" not in result.out + result.err
    assert "not carried over, being secrets: --wandb_api_key, HF_TOKEN" in result.err
    assert (
        "client env HF_TOKEN: *** -> (removed)" in result.err
        and ".env[WANDB_API_KEY].value: *** -> (removed)" in result.err
    )
    kept = run(text, "--keep-secret", "HF_TOKEN", "--keep-secret", "WANDB_API_KEY")
    assert kept.client.env["HF_TOKEN"] == "s3cr3t-token" and "s3cr3t" not in kept.err
    assert {"name": "WANDB_API_KEY", "value": "s3cr3t-env"} in box(kept.data, "main")["env"]


def test_every_secret_can_be_kept_by_the_name_that_was_shown(run):
    text = TINY.read_text().replace('MAXTEXT_EXTRA_FLAGS="', 'MAXTEXT_EXTRA_FLAGS="hf_access_token=s3cr3t ')
    text = text.replace("--port=20002", "--port=20002 --hf_token=s3cr3t").replace(
        "--seed=42", "--seed=42 --api_key=s3cr3t"
    )
    shown = re.search(r"being secrets: (.*) \(--keep", run(text).err)[1].split(", ")
    assert shown == ["--api_key", "--hf_token", "hf_access_token"]
    kept = run(text, *(word for name in shown for word in ("--keep-secret", name)))
    assert kept.out.count("s3cr3t") == 3 and "s3cr3t" not in kept.err
    assert "changes nothing" not in kept.err and "not carried over" not in kept.err


def test_a_secret_that_is_asked_for_is_masked_everywhere_else(run):
    result = run(DRYRUN, "--env", "HF_TOKEN=s3cr3t", "--env", "MY_KEY=s3cr3t")
    assert result.client.env["HF_TOKEN"] == "s3cr3t" and result.out.count("s3cr3t") == 2
    assert "s3cr3t" not in result.err and "client env MY_KEY: (absent) -> ***" in result.err


def test_a_secret_key_reference_is_dropped_too(run):
    lines = ["- name: HF_TOKEN", "  valueFrom:", "    secretKeyRef:", "      name: hf", "      key: token"]
    entry = "".join(f"{INDENT}{line}\n" for line in lines)
    text = TINY.read_text().replace(
        "              - name: RAIDEN_BROADCAST_K\n", entry + "              - name: RAIDEN_BROADCAST_K\n"
    )
    assert "secretKeyRef" not in run(text).out and "secretKeyRef" in run(text, "--keep-secret", "HF_TOKEN").out


# --- slices ---


@pytest.mark.parametrize(
    ("text", "accelerator", "instance", "hosts", "devices", "partition", "size"),
    [
        # facts of 22 generator runs; JAX devices: two per chip on tpu7x
        ("tpu7x:2x2x1", "tpu7x", "tpu7x:2x2x1", 1, 8, "2x2x1", 1),
        ("tpu-v7x-slice:4x4x4", "tpu7x", "tpu7x:4x4x4", 16, 128, "4x4x4", 16),
        ("tpu7x:4x4x8", "tpu7x", "tpu7x:4x4x8", 32, 256, "4x4x4", 16),
        ("tpuv5:2x2x2", "tpu-v5p-slice", "tpuv5:2x2x2", 2, 8, "2x2x2", 2),
        ("tpuv5p:4x8x8", "tpu-v5p-slice", "tpuv5:4x8x8", 64, 256, "4x8x8", 64),
        ("tpu-v5p-slice:8x8x8", "tpu-v5p-slice", "tpuv5:8x8x8", 128, 512, "8x8x8", 128),
        ("tpuv5e:4x4", "tpu-v5-lite-podslice", "tpuv5e:4x4", 4, 16, "4x4", 4),
        ("tpu-v6e-slice:8x8", "tpu-v6e-slice", "tpuv6e:8x8", 16, 64, "8x8", 16),
        ("tpuv6ea:4x4", "tpu-v6ea-slice", "tpuv6ea:4x4", 4, 16, "4x4", 4),
    ],
)
@pytest.mark.parametrize("stream", [DRYRUN, V5P, AUGUST], ids=lambda p: p.stem)
def test_every_field_of_a_slice(run, stream, text, accelerator, instance, hosts, devices, partition, size):
    mesh = (
        "--trainer-arg",
        f"mesh_fsdp={devices}",
        "--trainer-arg",
        "mesh_expert=1",
        "--trainer-arg",
        "mesh_context=1",
    )
    result = run(stream, "--slice", text, *mesh)
    assert result.code == 0, result.err
    old, new = trainer_of(stream)[0].data, result.data
    job = new["spec"]["replicatedJobs"][1]["template"]["spec"]
    assert (job["completions"], job["parallelism"]) == (hosts, hosts)
    assert new["spec"]["replicatedJobs"][0]["template"]["spec"]["completions"] == 1
    assert f"--instance_type={instance}" in box(new, "pathways-rm")["args"]
    topology = instance.partition(":")[2]
    for name in ("proc", "pw-node"):
        selector, before = pod(new, name).get("nodeSelector", {}), pod(old, name).get("nodeSelector", {})
        assert list(selector) == list(before)
        assert selector.get("cloud.google.com/gke-tpu-accelerator", accelerator) == accelerator
        assert selector.get("cloud.google.com/gke-tpu-topology", topology) == topology
    if stream is DRYRUN:
        annotations = job["template"]["metadata"]["annotations"]
        assert annotations["cloud.google.com/gke-tpu-slice-topology"] == topology
        key = "kueue.x-k8s.io/podset-slice-required-topology"
        assert annotations[key] == f"cloud.google.com/gke-tpu-partition-{partition}-id"
        assert annotations["kueue.x-k8s.io/podset-slice-size"] == str(size)
        assert f"key: cloud.google.com/gke-tpu-partition-{partition}-state" in result.out


def test_the_orchestrators_copy_of_the_slice_follows(run):
    mesh = ("--trainer-arg", "mesh_fsdp=16")
    topology = lambda r: dict(lr.flag_items(r.client.carried_argv("ORCH_ARGV"))).get("--tpu_topology")  # noqa: E731
    result = run(DRYRUN, "--slice", "tpu-v7x-slice:4x4x4", *mesh)
    assert topology(run(DRYRUN)) == "tpu7x:4x4x8+tpu7x:2x2x4"
    assert topology(result) == "tpu7x:4x4x4+tpu7x:2x2x4"
    assert "orchestrator argv --tpu_topology: tpu7x:4x4x8+tpu7x:2x2x4 -> tpu7x:4x4x4+tpu7x:2x2x4" in result.err
    asked = run(DRYRUN, "--slice", "tpu7x:4x4x4", *mesh, "--orch-arg", "tpu_topology=mine")
    assert topology(asked) == "mine"
    gone = run(DRYRUN, "--slice", "tpu7x:4x4x4", *mesh, "--orch-arg-unset", "tpu_topology")
    assert topology(gone) is None
    other = DRYRUN.read_text().replace("--tpu_topology=tpu7x:4x4x8", "--tpu_topology=tpu7x:8x8x8")
    assert topology(run(other, "--slice", "tpu7x:4x4x4", *mesh)) == "tpu7x:8x8x8+tpu7x:2x2x4"


def test_rows_that_no_longer_follow_the_mesh_are_named(run):
    mesh = ("--slice", "tpu7x:4x4x4", "--trainer-arg", "mesh_fsdp=16")
    assert "--mesh_fsdp is 16, and the orchestrator's --trainer_fsdp, which sets the rows" in run(DRYRUN, *mesh).err
    assert "sets the rows" not in run(DRYRUN, *mesh, "--orch-arg", "trainer_fsdp=16").err + run(DRYRUN).err


def test_a_slice_of_another_type_says_what_it_keeps(run):
    result = run(DRYRUN, "--slice", "tpuv5p:4x8x8")
    form = "the scheduling fields keep the form of {}: check that the cluster offers {} so"
    assert form.format("tpu7x:4x4x8, dynamic slicing", "tpuv5:4x8x8") in result.err
    assert "the reservation example-block stays, and the launch asked it for tpu7x:4x4x8" in result.err
    static = run(TINY, "--slice", "tpu7x:2x2x1", "--trainer-arg", "mesh_fsdp=4")
    assert form.format("tpuv5:2x2x1, node pools of one topology", "tpu7x:2x2x1") in static.err
    assert "scheduling fields" not in run(TINY, "--slice", "tpuv5:2x2x2", "--trainer-arg", "mesh_fsdp=4").err


def test_a_mesh_that_does_not_fit_the_slice_is_refused(run):
    result = run(DRYRUN, "--slice", "tpu7x:4x4x4")
    assert (result.code, result.out) == (2, "")
    assert "the mesh has 256 devices, and tpu7x:4x4x4 has 128 JAX devices (64 chips, 2 per chip)" in result.err
    assert run(DRYRUN, "--slice", "tpu7x:4x4x4", "--trainer-arg", "mesh_fsdp=16").code == 0
    assert run(DRYRUN, "--trainer-arg", "mesh_fsdp=16").code == 2
    assert "the mesh has 16 devices" in run(DRYRUN, "--trainer-arg-unset", "mesh_fsdp").err  # Tunix's default is 2
    assert run(DRYRUN, "--maxtext", "ici_fsdp_parallelism=16").code == 2
    assert run(DRYRUN, "--maxtext", "ici_fsdp_parallelism=-1").code == 0
    assert run(DRYRUN, "--maxtext", "ici_fsdp_parallelism=16", "--slice", "tpu7x:4x4x4").code == 0


def test_a_mesh_that_did_not_fit_before_is_only_named(run):
    result = run(TINY.read_text().replace("--mesh_fsdp=2 ", "--mesh_fsdp=4 "))
    assert result.code == 0 and "the mesh has 8 devices, and tpuv5:2x2x1 has 4 JAX devices" in result.err


def test_a_slice_of_one_host_grows(run):
    text = re.sub(r"4x4x8", "2x2x1", DRYRUN.read_text())
    text = text.replace("completions: 32", "completions: 1").replace("parallelism: 32", "parallelism: 1")
    result = run(text, "--slice", "tpu7x:4x4x4", "--trainer-arg", "mesh_fsdp=16")
    assert 'gke-tpu-slice-topology: "4x4x4"' in result.out
    job = result.data["spec"]["replicatedJobs"][1]["template"]["spec"]
    assert (job["completions"], job["parallelism"]) == (16, 16)


def test_the_gang_is_left_on_pods_too(run):
    label = 'annotations:\n              scheduling.x-k8s.io/gang-id: "tiny"\n              cluster-autoscaler'
    result = run(TINY.read_text().replace("annotations:\n              cluster-autoscaler", label))
    assert result.out.count("gang-id: flags-a") == 3 and 'gang-id: "tiny"' not in result.out


def test_older_dynamic_slicing_that_names_one_host_is_kept(run):
    text = re.sub(r"(gke-tpu-slice-topology): 4x4x8", r"\1: 2x2x1", DRYRUN.read_text())
    assert 'gke-tpu-slice-topology: "2x2x1"' in run(text, "--slice", "tpu7x:4x4x4", "--trainer-arg", "mesh_fsdp=16").out


# --- sidecars and the wrapper ---


def test_plain_sidecars_are_named_and_moved_when_asked(run):
    result = run(TINY)
    assert "pathways-rm, pathways-proxy are plain containers" in result.err
    moved = run(TINY, "--sidecars", "init")
    assert "are plain containers" not in moved.err
    head = pod(moved.data, "proc")
    assert [c["name"] for c in head["initContainers"]] == ["pathways-rm", "pathways-proxy"]
    assert [c["name"] for c in head["containers"]] == ["main"]
    assert all(c["restartPolicy"] == "Always" for c in head["initContainers"])
    assert head["initContainers"] == pod(result.data, "proc")["containers"][:2]
    assert "sidecar pathways-rm: containers -> initContainers" in moved.err
    already = run(DRYRUN, "--sidecars", "init")
    assert "--sidecars init changes nothing" in already.err and already.data == run(DRYRUN, "--sidecars", "init").data


def test_fail_fast_fields_are_kept(run):
    old, new = trainer_of(DRYRUN)[0].data, run(DRYRUN).data
    assert new["spec"]["failurePolicy"] == {**old["spec"]["failurePolicy"], "maxRestarts": 0}
    job = new["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert job["podFailurePolicy"] == old["spec"]["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]
    assert box(new, "main")["command"][:2] == ["bash", "-c"] and "FT_REGISTERED" not in run(DRYRUN).out


# --- the rendered command, executed ---

STUB = (
    f"""#!/bin/bash
[ "$1" != -c ] || exec {sys.executable} "$@"
"""
    + """\
printf '%s\\0' "$@" > "$RECORD/argv"
env -0 > "$RECORD/env"
[ ! -f "$1" ] || cp -r "$(dirname "$1")" "$RECORD/files"
exit ${STUB_EXIT:-0}
"""
)


def execute(command, container, folder, stub=STUB, **extra):
    """Run a command as the kubelet would, with a `python` that records; return (argv, environment, exit code)."""
    bin_dir = folder / "bin"
    bin_dir.mkdir(parents=True)
    (bin_dir / "python").write_text(stub)
    (bin_dir / "python").chmod(0o755)
    declared = {e["name"]: str(e.get("value", f"field-{e['name']}")) for e in container.get("env", [])}
    base = {"PATH": f"{bin_dir}:/usr/bin:/bin", "RECORD": str(folder), **extra}
    text = lr.kube_expand(command, declared)
    done = subprocess.run(["bash", "-c", text], env={**base, **declared}, capture_output=True, cwd=folder)
    argv = (folder / "argv").read_bytes().decode().split("\0")[:-1]
    env = dict(item.split("=", 1) for item in (folder / "env").read_bytes().decode().split("\0")[:-1])
    for name in ("_", "PWD", "SHLVL", "OLDPWD", "PATH", "RECORD", "STUB_EXIT"):
        env.pop(name, None)
    return argv, env, done.returncode


def live_stream():
    """A launch with what bash expands in its flags and variables."""
    text = TINY.read_text()
    text = text.replace('MAXTEXT_EXTRA_FLAGS="', 'MAXTEXT_EXTRA_FLAGS="dump_step=$JOB_INDEX host=$(echo a.b) ')
    text = text.replace("--port=20002", '--port="2000${JOB_INDEX:0:0}2" --note="it\'s $(echo "a  b") \\"x\\""')
    text = text.replace("--lora_rank=64", "--lora_rank='$(POD_INDEX)'").replace(
        "RAIDEN_USE_FFI=1", "RAIDEN_USE_FFI=$POD_INDEX"
    )
    return text


@pytest.mark.parametrize("stream", [*STREAMS, "live"], ids=lambda p: getattr(p, "stem", p))
def test_the_command_passes_what_the_launchers_own_passes(run, stream, tmp_path, driver):
    stream = live_stream() if stream == "live" else stream
    document, client = trainer_of(stream)
    argv, env, _ = execute(f"({client.startup})", client.container, tmp_path / "old")
    result = run(stream, "--steps", 2)
    new_argv, new_env, code = execute(result.client.script, result.client.container, tmp_path / "new")
    assert code == 0
    assert argv[:2] == ["-m", lr.RUNTIME_MODULE] and new_argv[1:] == ["--steps=2"]
    files = {p.name: p.read_text() for p in (tmp_path / "new" / "files").iterdir()}
    assert files == {p.name: p.read_text() for p in driver.parent.iterdir() if p.name != "unused_module.py"}
    assert not pathlib.Path(new_argv[0]).exists() and new_argv[0].startswith("/tmp/trainer-bench.")

    trainer_argv, orch_argv = (shlex.split(new_env.pop(name)) for name in ("TRAINER_ARGV", "ORCH_ARGV"))
    provenance = {name: new_env.pop(name) for name in bench_script.PROVENANCE}
    assert all(provenance.values())
    assert json.loads(provenance["BENCH_RENDER_OPTIONS"]) == {"name": "flags-a", "steps": "2"}
    assert new_env == {k: v for k, v in env.items() if k != "HF_TOKEN"}
    own = {"--worker_id": "flags-a", "--checkpoint_save_interval_steps": "0",
           "--maxtext_output_directory": "gs://example-rl/maxtext/bench/flags-a"}  # fmt: skip
    expected = [f"{f}={own[f]}" if f in own else f"{f}={v}" if v is not None else f for f, v in lr.flag_items(argv[2:])]
    expected = [word for word in expected if not word.startswith("--discovery_addrs=")]
    assert trainer_argv == expected + (["--worker_id=flags-a"] if stream is AUGUST else [])
    (orchestrator,) = [
        c
        for d in lr.read_render(result_text(stream), "in").documents
        for c in lr.clients(d)
        if c.role == "orchestrator"
    ]
    assert orch_argv == [word.value for word in orchestrator.argv]


def result_text(stream):
    return stream if isinstance(stream, str) else stream.read_text()


def test_live_words_stay_live_beside_edits(run, tmp_path):
    result = run(
        live_stream(),
        "--maxtext",
        "host=$x`y`",
        "--maxtext",
        'n="q"',
        "--trainer-arg",
        "note=$(date)",
        "--env",
        "Z=$(JOB_INDEX)",
    )
    _, env, _ = execute(result.client.script, result.client.container, tmp_path / "new")
    assert env["MAXTEXT_EXTRA_FLAGS"].startswith("dump_step=field-JOB_INDEX host=$x`y` ") and env[
        "MAXTEXT_EXTRA_FLAGS"
    ].endswith('n="q"')
    assert "--note=$(date)" in shlex.split(env["TRAINER_ARGV"]) and env["Z"] == "$(JOB_INDEX)"
    assert "--lora_rank=field-POD_INDEX" in shlex.split(env["TRAINER_ARGV"])


@pytest.mark.parametrize("python", ["python3", "/opt/venv/bin/python3.12", '"$VIRTUAL_ENV/bin/python"'])
def test_the_launchers_interpreter_runs_the_driver(run, python, tmp_path):
    result = run(TINY.read_text().replace("python -m tunix", f"{python} -m tunix"))
    assert result.code == 0, result.err
    assert f'\n{python} "$BENCH_DIR/bench_driver.py"\n' in result.client.script
    (tmp_path / "bench_driver.py").write_text("import big_module\n")
    (tmp_path / "big_module.py").write_text("".join(f"x{i} = {i * i}\n" for i in range(12000)))
    packed = run(TINY.read_text().replace("python -m tunix", f"{python} -m tunix"),
                 driver_file=tmp_path / "bench_driver.py")  # fmt: skip
    assert f'\n{python} -c "import bz2' in packed.client.script and lr.script_role(packed.client.script) == "bench"


def test_the_wrapper_prints_nothing_of_its_own(run, tmp_path):
    """The driver's last line of stdout is its result; nothing may follow it."""
    client = run(DRYRUN).client
    execute(client.script, client.container, tmp_path / "x")
    done = subprocess.run(
        ["bash", "-c", lr.kube_expand(client.script, {})],
        env={"PATH": f"{tmp_path}/x/bin:/usr/bin:/bin", "RECORD": str(tmp_path)},
        capture_output=True,
    )
    assert (done.stdout, done.stderr) == (b"", b"")


@pytest.mark.parametrize("status", [0, 3, 75, 127, 143])
def test_the_wrapper_keeps_the_exit_status(run, tmp_path, status):
    client = run(DRYRUN).client
    assert execute(client.script, client.container, tmp_path / "x", STUB_EXIT=str(status))[2] == status


def test_the_wrapper_hands_sigterm_on_and_waits(run, tmp_path):
    client = run(DRYRUN).client
    stub = tmp_path / "bin" / "python"
    stub.parent.mkdir()
    stub.write_text(
        '#!/bin/bash\ntrap \'sleep 0.3; touch "$RECORD/stopped"; exit 9\' TERM\ntouch "$RECORD/up"\n'
        "for i in $(seq 200); do sleep 0.1; done\n"
    )
    stub.chmod(0o755)
    env = {"PATH": f"{stub.parent}:/usr/bin:/bin", "RECORD": str(tmp_path)}
    process = subprocess.Popen(["bash", "-c", lr.kube_expand(client.script, {})], env=env, stdout=subprocess.DEVNULL)
    for _ in range(400):
        if (tmp_path / "up").exists():
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 9 and (tmp_path / "stopped").exists()


# --- the embedded files ---


def test_files_too_long_for_one_argument_are_packed(run, tmp_path):
    (tmp_path / "bench_driver.py").write_text("import big_module\nimport small_module\n")
    (tmp_path / "big_module.py").write_text("".join(f"x{i} = {i * i} # $(A)\n" for i in range(8000)))
    (tmp_path / "small_module.py").write_text("y = 1")
    result = run(TINY, driver_file=tmp_path / "bench_driver.py")
    assert result.client.sources == {
        "big_module.py": (tmp_path / "big_module.py").read_text(),
        "small_module.py": "y = 1\n",
        "bench_driver.py": "import big_module\nimport small_module\n",
    }
    assert 'base64 -d > "$BENCH_DIR/modules.json.bz2"' in result.out
    assert 'cat > "$BENCH_DIR/bench_driver.py"' in result.out and "small_module.py" not in result.out
    assert len(lr.kube_expand(result.client.script, {})) < 2**17
    argv, _, code = execute(result.client.script, result.client.container, tmp_path / "new")
    assert code == 0
    for name in ("big_module.py", "bench_driver.py"):
        assert (tmp_path / "new" / "files" / name).read_text() == (tmp_path / name).read_text()


def test_files_that_do_not_fit_even_packed_are_refused(run, tmp_path):
    noise = random.Random(1)
    (tmp_path / "bench_driver.py").write_text(
        "x = '" + "".join(chr(noise.randrange(33, 126)) for _ in range(200000)) + "'\n"
    )
    result = run(TINY, driver_file=tmp_path / "bench_driver.py")
    assert result.code == 2 and result.out == "" and "131072 that Linux gives one argument" in result.err


def test_the_real_driver_travels_whole(run):
    result = run(TINY, driver_file=ROOT / "bench_driver.py")
    assert result.code == 0
    for name, text in result.client.sources.items():
        assert text == (ROOT / name).read_text()
    for text in result.client.sources.values():
        for module in re.findall(r"^\s*(?:from|import) (\w+)", text, re.MULTILINE):
            assert not (ROOT / f"{module}.py").exists() or f"{module}.py" in result.client.sources
    digests = subprocess.run(
        ["sha256sum", *sorted(result.client.sources)], cwd=ROOT, capture_output=True, check=True
    ).stdout
    digest = subprocess.run(["sha256sum"], input=digests, capture_output=True, check=True).stdout.split()[0].decode()
    assert result.client.env["BENCH_FILES_SHA256"] == digest
    driver = subprocess.run(["sha256sum", "bench_driver.py"], cwd=ROOT, capture_output=True, check=True).stdout
    assert result.client.env["BENCH_DRIVER_SHA256"] == driver.split()[0].decode()


def test_an_installed_driver_takes_none_of_its_neighbours_along(run, tmp_path):
    (tmp_path / "bench_driver.py").write_text("import six, helper\n")
    for name in ("six", "helper"):
        (tmp_path / f"{name}.py").write_text("")
    info = tmp_path / "rl_trainer_bench-0.1.0.dist-info"
    info.mkdir()
    (info / "top_level.txt").write_text("bench_driver\nhelper\n")
    result = run(TINY, driver_file=tmp_path / "bench_driver.py")
    assert list(result.client.sources) == ["helper.py", "bench_driver.py"]


def test_provenance(run):
    result = run(TINY, "--maxtext", "a=1", "--env", "X_TOKEN=s3cr3t", "--keep-secret", "A_KEY")
    digest = subprocess.run(["sha256sum", str(TINY)], capture_output=True, check=True).stdout.split()[0].decode()
    assert result.client.env["BENCH_INPUT_SHA256"] == digest
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert result.client.env["BENCH_RENDER_VERSION"] == project["version"]
    assert json.loads(result.client.env["BENCH_RENDER_OPTIONS"]) == {
        "name": "flags-a", "keep_secret": ["A_KEY"], "edits": [["--maxtext", "a=1"], ["--env", "X_TOKEN=***"]],
    }  # fmt: skip


@pytest.mark.parametrize(("ending", "text", "kept"), [
    (".json", "[1.1, 1.2]", "[1.1, 1.2]\n"),
    (".csv", "layer,ratio\n0,1.5\n", "layer,ratio\n0,1.5\n"),
    (".log", "noise\nx REQUIRED_RBF y per_layer=[1, 2]\nnoise $(A)\n", "x REQUIRED_RBF y per_layer=[1, 2]\n"),
    (".ratios", "1.5 1.6\n", "1.5 1.6\n"),
])  # fmt: skip
def test_the_content_of_a_routing_load_file_travels(run, tmp_path, ending, text, kept):
    file = tmp_path / f"load{ending}"
    file.write_text(text)
    result = run(TINY, "--routing-load", file)
    name = "routing_load" + (ending if ending in (".json", ".csv") else ".txt")
    assert result.client.sources[name] == kept
    argv, _, _ = execute(result.client.script, result.client.container, tmp_path / "new")
    assert argv[1] == f"--routing-load={os.path.dirname(argv[0])}/{name}"
    assert (tmp_path / "new" / "files" / name).read_text() == kept
    assert str(tmp_path) not in result.out


# --- streams of all kinds ---


def test_a_capture_with_stderr_and_crlf_reads_the_same(run):
    text = DRYRUN.read_text()
    clean = run(text)
    noisy = 'Switched to context "x".\nerror: no context exists with the name: "x".\n' + text
    noisy = noisy.replace("\n\n---\n# Rollout", "\n\n[launcher] cache\nWARNING: no checkpoint\n---\n# Rollout")
    other = run(noisy.replace("\n", "\r\n"))
    assert (
        other.code == 0 and yaml_load(other.out)["spec"]["replicatedJobs"][1] == clean.data["spec"]["replicatedJobs"][1]
    )
    strip = lambda out: re.sub(r"BENCH_INPUT_SHA256=\w+", "", out)  # noqa: E731
    assert strip(other.out) == strip(clean.out)


def test_a_stream_without_its_last_line_break(run):
    """`$(./launch.sh)` takes it away; a stream that was cut inside its last word looks alike."""
    text = TINY.read_text()
    whole = text[: text.index("\n---\n# Rollout")].rstrip("\n")
    assert whole.endswith("\n    - proc")
    result = run(whole)
    assert result.code == 0 and result.data == yaml_load(
        run(TINY).out.replace(run(TINY).client.env["BENCH_INPUT_SHA256"], result.client.env["BENCH_INPUT_SHA256"])
    )
    for less in (1, 4, 8, 12, 40):
        assert run(whole[:-less]).code == 2 and "cut short" in run(whole[:-less]).err, less


def test_documents_in_another_order(run):
    pieces = TINY.read_text().split("---\n")
    assert len(pieces) == 4
    other = run(pieces[0] + "".join("---\n" + piece for piece in pieces[:0:-1]))
    assert other.code == 0 and other.data == yaml_load(
        re.sub(r"(?<=BENCH_INPUT_SHA256=)\w+", other.client.env["BENCH_INPUT_SHA256"], run(TINY).out)
    )


def test_duplicate_labels_are_reported(run):
    text = TINY.read_text()
    start = text.index("  name: tiny-train\n")
    text = text[:start] + "  labels:\n    a: b\n" + text[start:]
    result = run(text)
    assert "duplicate key 'labels', the last one counts" in result.err and "a" not in result.data["metadata"]["labels"]


def test_the_comment_beside_max_restarts_is_no_obstacle(run):
    assert "# overridden by fail-fast:     maxRestarts: 3" in DRYRUN.read_text()
    assert run(DRYRUN).out.count("maxRestarts") == 1


def test_several_trainers(run):
    pieces = TINY.read_text().split("---\n")
    text = TINY.read_text() + "---\n" + pieces[2].replace("tiny-train", "b-train").replace("fsdp=2", "fsdp=4")
    result = run(text)
    assert result.code == 2 and "2 trainers: tiny-train, b-train; choose with --trainer NAME" in result.err
    assert run(text, "--trainer", "b-train").argv["--mesh_fsdp"] == "4"
    assert "no trainer named c; there is tiny-train, b-train" in run(text, "--trainer", "c").err


def test_a_launch_that_was_captured_twice(run):
    text = TINY.read_text()
    assert run(text + text).code == 0
    result = run(text + text.replace("--mesh_tp=1", "--mesh_tp=1 --note=2"))
    assert "2 trainers: tiny-train, tiny-train; give the dry run of one launch" in result.err


def test_an_orchestrator_that_the_trainer_does_not_look_for_is_named(run):
    pieces = TINY.read_text().split("---\n")
    text = TINY.read_text() + "---\n" + pieces[2].replace("tiny-", "b-")
    result = run(text, "--trainer", "b-train")
    assert "the loss options are those of tiny-orch, and b-train looks for b-orch" in result.err
    assert "looks for" not in run(text, "--trainer", "tiny-train").err


def test_the_orchestrator_may_come_from_elsewhere(run, tmp_path):
    pieces = TINY.read_text().split("---\n")
    alone = "---\n" + pieces[2]
    assert "no orchestrator in this input" in run(alone).err
    other = run(alone, "--orch-render", TINY)
    assert other.code == 0 and other.client.carried_argv("ORCH_ARGV") == run(TINY).client.carried_argv("ORCH_ARGV")
    defaults = run(alone, "--orch-defaults", "--orch-arg", "beta=0.5")
    assert defaults.client.carried_argv("ORCH_ARGV") == ["--beta=0.5"]
    assert run(alone, "--orch-defaults").client.carried_argv("ORCH_ARGV") == []
    assert "is the orchestrator of this launch" in run(alone, "--orch-defaults", name="tiny-orch").err
    (tmp_path / "alone").write_text(alone)
    assert run(alone, "--orch-render", tmp_path / "alone").code == 2


def test_the_orchestrator_that_the_trainer_looks_for_is_taken(run):
    pieces = TINY.read_text().split("---\n")
    second = pieces[1].replace("tiny-orch", "other-orch").replace("--beta=0.0", "--beta=0.9")
    result = run(TINY.read_text() + "---\n" + second)
    assert "--beta=0.0" in result.client.carried_argv("ORCH_ARGV")
    result = run((TINY.read_text() + "---\n" + second).replace("--discovery_addrs=tiny-orch", "--discovery_addrs=x"))
    assert result.code == 2 and "several orchestrators: tiny-orch, other-orch" in result.err


def test_a_live_word_of_the_orchestrator_cannot_be_kept(run):
    text = TINY.read_text().replace("--seed=42", '--seed="$SEED"')
    result = run(text)
    assert result.code == 2 and "'--seed=\"$SEED\"' is known only when its own pod runs" in result.err
    assert "--seed=1" in run(text, "--orch-arg", "seed=1").client.carried_argv("ORCH_ARGV")


def edit(old, new, count=-1):
    """Return a function that replaces text in the tiny example's trainer."""

    def change(text):
        before, trainer = text.split("# Trainer:")
        assert old in trainer, old
        return before + "# Trainer:" + trainer.replace(old, new, count)

    return change


def cut(marker, keep=0):
    return lambda text: text[: text.index(marker, text.index("# Trainer:")) + keep]


REFUSED = {
    "no trainer": (lambda t: t.split("---\n")[1], "no trainer in this input"),
    "failed generator": (
        lambda t: "---\n" + t.split("---\n")[1] + "---\n\n---\n" + t.split("---\n")[3],
        "did the launcher's generator fail?",
    ),
    "failed generator of the orchestrator": (
        lambda t: "---\n\n---\n" + t.split("---\n")[2],
        "did the launcher's generator fail? Else name another capture",
    ),
    "mock trainer": (edit("run_trainer_node.main", "run_mock_trainer_node.main"), "tiny-train is a mock trainer"),
    "no workers": (edit("pathways-worker", "worker"), "no Pathways worker group"),
    "tunix backend": (edit("--trainer_backend=maxtext", "--trainer_backend=tunix"), "--trainer_backend=tunix"),
    "bootstrap": (edit("TUNIX_IS_INTERNAL_ENV", "pip install x && TUNIX_IS_INTERNAL_ENV"), "unexpected token 'pip'"),
    "cache preamble": (edit("PYTHONUNBUFFERED=1", "mkdir -p /c; PYTHONUNBUFFERED=1"), "unexpected token 'mkdir'"),
    "ray": (edit("(\n", "(\n                      if [ \"${POD_INDEX}\" = 0 ]; then\n"), "unexpected token 'if'"),
    "positional": (edit("--port=20002", "--port 20002"), "unexpected token '20002'"),
    "newline in a value": (edit("--port=20002", "--port=20002\nx"), "a line break inside the start-up command"),
    "newline in quotes": (edit("megablox=false ", "megablox=false\n"), "a line break inside the start-up command"),
    "several words": (edit("--port=20002", "--port=$PORT"), "bash may make several words"),
    "cut in the script": (cut("--mesh_fsdp"), "cut short"),
    "cut in a word": (cut("    operator: All", 12), "cut short"),
    "cut in a line": (lambda t: t[: t.index("# Rollout") - 7], "cut short"),
    "cut before the end": (cut("  successPolicy:"), "cut short"),
    "live directory": (edit("=gs://example-rl/maxtext/tiny", '="gs://$B/tiny"'), "known only when the pod runs"),
    "LeaderWorkerSet": (edit("kind: JobSet", "kind: LeaderWorkerSet"), "runs in a LeaderWorkerSet"),
    "no metadata": (edit("metadata:\n  name: tiny-train", "metadata:\n  nome: tiny-train"), "cut short"),
    "not YAML": (edit("replicas: 1", "replicas: [1"), "not YAML"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_streams_that_are_refused(run, case):
    change, message = REFUSED[case]
    result = run(change(TINY.read_text()))
    assert (result.code, result.out) == (2, "")
    assert message in result.err and result.err.count("\n") == 1 and result.err.startswith("render_bench: ")


def test_documents_out_of_form_are_rendered_or_refused_in_one_line(run, tmp_path):
    """Nodes of a launch are replaced at random: no traceback, and nothing on stdout with exit code 2."""
    noise = random.Random(7)
    launch = [document.data for document in lr.read_render(TINY.read_text(), "in").documents]
    values = [None, [], {}, "x", 1, True, -1, 1.5, ["x"], [1], {"a": 1}, [None], "--a=1"]
    codes = []
    for _ in range(60):
        documents = copy.deepcopy(launch)
        document = noise.choice([documents[1], documents[1], documents[0]])
        *above, last = noise.choice([path for path, _ in lr.walk(document) if path])
        parent = functools.reduce(lambda node, key: node[key], above, document)
        if noise.random() < 0.3:
            del parent[last]
        else:
            parent[last] = noise.choice(values)
        stream = "".join("---\n" + kube_yaml.dump(data) for data in documents)
        result = run(stream, "--libtpu", "xla_a=1", "--queue", "q", "--quiet")
        codes.append(result.code)
        assert result.code == 0 or (result.code == 2 and not result.out and result.err.count("\n") == 1)
    assert {0, 2} == set(codes)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("        completions: 1\n", '        completions: "1"\n', "completions of tiny-train is not of its kind"),
        ("  - --server_port=29000", "  - 29000", "args of tiny-train is not of its kind"),
        ('gang-id: "tiny"', "gang-id: 1", "labels of tiny-train is not of its kind"),
    ],
)
def test_fields_that_are_not_of_their_kind(run, old, new, message):
    assert message in run(TINY.read_text().replace(old, new)).err


def test_a_bench_is_no_launch(run):
    result = run(run(TINY).out)
    assert result.code == 2 and "flags-a is a bench already" in result.err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no Kubernetes object"),
        (b"\xff\xfe", "not UTF-8"),
        (b"a: \x00\n", "no Kubernetes object"),
        (None, "Is a directory"),
    ],
)
def test_files_that_are_no_streams(tmp_path, driver, content, message):
    file = tmp_path / "f"
    file.mkdir() if content is None else file.write_bytes(content)
    result = call(["--launch-render", str(file), "--name", "x", "--driver", str(driver)])
    assert (result.code, result.out) == (2, "") and message in result.err and result.err.count("\n") == 1


def test_a_stream_over_the_limit_is_not_read(tmp_path, driver):
    file = tmp_path / "f"
    with file.open("wb") as stream:
        stream.truncate(lr.MAX_RENDER_BYTES + 1)
    result = call(["--launch-render", str(file), "--name", "x", "--driver", str(driver)])
    assert result.code == 2 and "larger than 16 MiB" in result.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--maxtext", "a"], "--maxtext 'a' is not of the form NAME=VALUE"),
        (["--maxtext", "=1"], "is not of the form"),
        (["--maxtext", "a b=1"], "is not of the form"),
        (["--maxtext", "a=1 b=2"], "a value with a blank in it"),
        (["--maxtext-unset", "a=1"], "is not of the form NAME"),
        (["--libtpu", "--xla_a"], "is not of the form NAME=VALUE"),
        (["--libtpu", "xla_a=1 2"], "a value with a blank in it"),
        (["--trainer-arg", "a b"], "is not of the form NAME[=VALUE]"),
        (["--trainer-arg", "a=1\n2"], "a value with a blank in it"),
        (["--env", "A-B=1"], "is not of the form"),
        (["--env", "HF-TOKEN=s3cr3t"], "--env 'HF-TOKEN=***' is not of the form"),
        (["--env", "TRAINER_ARGV=1"], "the bench uses this name itself"),
        (["--env", "LIBTPU_INIT_ARGS=1"], "use --libtpu"),
        (["--env", "MAXTEXT_EXTRA_FLAGS=1"], "use --maxtext"),
        (["--trainer-arg", "worker_id=x"], "use --name"),
        (["--trainer-arg-unset", "maxtext_output_directory"], "use --output-directory"),
        (["--trainer-arg", "checkpoint_save_interval_steps=5"], "a bench saves no checkpoints"),
        (["--trainer-arg", "discovery_addrs=x"], "belongs to the RL run"),
        (["--maxtext", "base_output_directory=gs://p"], "use --output-directory"),
        (["--maxtext", "enable_checkpointing=true"], "a bench saves no checkpoints"),
        (["--trainer-arg", "trainer_backend=tunix"], "--trainer_backend=tunix"),
        (["--slice", "tpu7x"], "no topology"),
        (["--slice", "tpuv4:2x2x1"], "unknown TPU type 'tpuv4'"),
        (["--slice", "tpu7x:4x4"], "a tpu7x topology has 3 sides"),
        (["--slice", "tpuv5e:1x2"], "fill no whole hosts"),
        (["--slice", "tpu7x:0x4x4"], "no topology"),
        (["--steps", "0"], "--steps '0' is not a whole number from 1"),
        (["--warmup", "-1"], "--warmup '-1' is not a whole number"),
        (["--profile", "3"], "is not FIRST:COUNT"),
        (["--profile", "3:0"], "is not FIRST:COUNT"),
        (["--image", "a b"], "--image 'a b' is no name"),
        (["--namespace", "Perf"], "--namespace 'Perf' is no name"),
        (["--queue", "a" * 64], "is no name; give at most 63"),
        (["--priority", "high_"], "--priority 'high_' is no name"),
        (["--load-checkpoint", "none", "--trainer-arg", "maxtext_ckpt_path=gs://c"], "contradict each other"),
        (["--maxtext", "load_parameters_path=gs://c", "--load-checkpoint", "none"], "contradict each other"),
        (["--output-directory", "gs://example-rl/maxtext/tiny"], "is the launch's own"),
        (["--routing-load", "no/such.json"], "no such file"),
        (["--driver", "no/such.py"], "cannot read"),
        (["--orch-render", "no/such"], "cannot read"),
        (["--out", "no/such/dir/file"], "cannot write"),
    ],
)  # fmt: skip
def test_options_that_are_refused(run, options, message):
    result = run(TINY, *options)
    assert (result.code, result.out) == (2, "")
    last = result.err.splitlines()[-1]
    assert message in last and last.startswith("render_bench: ")
    assert "s3cr3t" not in result.err and (result.err.count("\n") == 1 or options[0] == "--out")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tiny-train", "is a JobSet of this launch"),
        ("tiny-roll", "is a JobSet of this launch"),
        ("tiny", "is a gang of this launch"),
        ("a" * 27, "leaves room for 26"),
        ("Bench", "is no name of a JobSet"),
        ("1a", "is no name"),
        ("a-", "is no name"),
        ("", "is no name"),
        ("a.b", "is no name"),
    ],
)
def test_names_that_are_refused(run, name, message):
    result = run(TINY, name=name)
    assert (result.code, result.out) == (2, "") and message in result.err and result.err.count("\n") == 1


def test_the_longest_name(run):
    assert run(TINY, name="a" * 26).code == 0
    text = TINY.read_text()
    start = text.index("  coordinator:", text.index("# Trainer:"))
    bare = text[:start] + text[start:].replace("  coordinator:\n    replicatedJob: proc\n", "", 1)
    # Without a coordinator a pod's name decides: NAME-pw-node-0-0-abcde in 63.
    assert run(bare, name="a" * 45).code == 0 and "leaves room for 45" in run(bare, name="a" * 46).err
    domain = text.replace("publishNotReadyAddresses: true", "subdomain: s\n    publishNotReadyAddresses: true")
    assert run(domain, name="a" * 45).code == 0  # NAME-proc-0-0.s leaves 51


def test_an_annotation_too_large_for_client_side_apply_is_named(run, tmp_path):
    (tmp_path / "bench_driver.py").write_text("#" + '\\"' * 62000 + "\n")
    result = run(TINY, driver_file=tmp_path / "bench_driver.py")
    assert result.code == 0 and "use kubectl apply --server-side" in result.err
    assert "server-side" not in run(TINY).err


# --- the second pass ---


TAMPERED = {
    "a field": lambda d: d["spec"]["network"].update(enableDNSHostnames=False),
    "a type": lambda d: box(d, "pathways-worker")["env"][0].update(value=0),
    "a new field": lambda d: d["spec"].update(suspend=True),
    "a lost field": lambda d: d["spec"].pop("startupPolicy"),
    "a container": lambda d: pod(d, "proc")["containers"].pop(0),
    "an order": lambda d: pod(d, "proc")["containers"].reverse(),
    "an env order": lambda d: box(d, "pathways-worker")["env"].reverse(),
    "a proxy flag": lambda d: box(d, "pathways-proxy")["args"].append("--xla_x=1"),
    "a name": lambda d: d["metadata"].update(name="other"),
    "restarts": lambda d: d["spec"]["failurePolicy"].update(maxRestarts=1),
    "restarts as a boolean": lambda d: d["spec"]["failurePolicy"].update(maxRestarts=False),
    "the gang": lambda d: d["metadata"]["labels"].update({"scheduling.x-k8s.io/gang-id": "tiny"}),
}
SCRIPT_TAMPERED = {
    "a maxtext key": ("megablox=false", "megablox=true"),
    "an order of keys": ("megablox=false sparse_matmul=false", "sparse_matmul=false megablox=false"),
    "a variable": ("FLOAT32_LOGITS=true", "FLOAT32_LOGITS=false"),
    "a lost variable": ("FLOAT32_LOGITS=true \\\n", ""),
    "a new variable": ("FLOAT32_LOGITS=true \\\n", "FLOAT32_LOGITS=true \\\nX=1 \\\n"),
    "a trainer flag": ("--mesh_tp=1", "--mesh_tp=2"),
    "an address": ("--mesh_tp=1", "--mesh_tp=1 --discovery_addrs=tiny-orch:20000"),
    "an orchestrator flag": ("--epsilon=0.2", "--epsilon=0.3"),
    "a source": ("A stand-in.", "Another."),
    "a driver flag": ("bench_driver.py\"\n", "bench_driver.py\" --steps=9\n"),
    "provenance": ("BENCH_RENDER_VERSION=0", "BENCH_RENDER_VERSION=9"),
    "the wrapper": ("exit \"$EXIT_CODE\"", "exit 0"),
    "a libtpu flag": ("--xla_tpu_overlap_compute_collective_tc=true", "--xla_tpu_overlap_compute_collective_tc=false"),
}  # fmt: skip


@pytest.mark.parametrize("case", [*TAMPERED, *SCRIPT_TAMPERED])
def test_the_second_pass_refuses_what_was_not_asked_for(run, monkeypatch, case):
    """The first pass is made to err; nothing may be printed."""
    honest = render_edit.render

    def tampered(*args):
        document = honest(*args)
        if case in TAMPERED:
            TAMPERED[case](document)
        else:
            command = box(document, "main")["command"]
            old, new = SCRIPT_TAMPERED[case]
            assert old in command[-1]
            command[-1] = command[-1].replace(old, new)
        return document

    monkeypatch.setattr(render_edit, "render", tampered)
    result = run(TINY)
    assert (result.code, result.out) == (2, "") and "internal error: " in result.err and result.err.count("\n") == 1


def test_the_second_pass_misses_no_change_that_was_asked_for(run, monkeypatch):
    monkeypatch.setattr(render_edit, "set_slice", lambda *args: None)
    result = run(TINY, "--slice", "tpuv5:2x2x2", "--trainer-arg", "mesh_fsdp=4")
    assert result.code == 2 and "internal error: " in result.err


# --- the summary ---

SUMMARY = """\
flags-a: the trainer ada-train (examples/launch_dryrun.yaml:99), 8 changes
  client command: the launcher's -> bench_driver.py
  metadata.name: ada-train -> flags-a
  metadata.labels[scheduling.x-k8s.io/gang-id]: ada -> flags-a
  spec.failurePolicy.maxRestarts: 3 -> 0
  client env HF_TOKEN: *** -> (removed)
  trainer argv --discovery_addrs: ada-orch:20000 -> (removed)
  trainer argv --worker_id: ada-train -> flags-a
  trainer argv --checkpoint_save_interval_steps: 1 -> 0
  trainer argv --maxtext_output_directory: gs://example-rl/maxtext/ada -> gs://example-rl/maxtext/bench/flags-a
not carried over, being secrets: HF_TOKEN (--keep-secret NAME keeps one)
"""


def test_the_summary(run, monkeypatch):
    monkeypatch.chdir(ROOT)
    lines = run(pathlib.Path("examples/launch_dryrun.yaml")).err.splitlines(keepends=True)
    assert [line.removeprefix("render_bench: ") for line in lines[2:]] == SUMMARY.splitlines(keepends=True)
    assert all("passed over" in line for line in lines[:2])
    quiet = run(DRYRUN, "--quiet").err
    assert quiet == "render_bench: " + SUMMARY.splitlines(keepends=True)[-1]


# --- what an API server says ---


@pytest.fixture(scope="session")
def schema_check():
    """Return a function that validates a JobSet as a server with the CRD does; None where the CRD is not at hand."""
    file = ROOT.parent / "shared" / "crd" / "jobset.x-k8s.io_jobsets.yaml"
    if not file.exists():
        return None
    import jsonschema

    crd = yaml_load(file.read_text())
    schema = strict(crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    validator = jsonschema.Draft202012Validator(schema)
    return lambda data: validator.validate(pruned(data))


@pytest.fixture
def validate(schema_check):
    if schema_check is None:
        pytest.skip("the JobSet CRD is not beside this checkout (../shared/crd)")
    return schema_check


def pruned(node):
    """Return an object without its nulls, which an API server takes away first."""
    if isinstance(node, list):
        return [pruned(item) for item in node]
    return {k: pruned(v) for k, v in node.items() if v is not None} if isinstance(node, dict) else node


def strict(node):
    """Turn a structural schema into JSON schema: unknown fields rejected, int-or-string honoured."""
    if isinstance(node, list):
        return [strict(item) for item in node]
    if not isinstance(node, dict):
        return node
    node = {key: strict(item) for key, item in node.items() if key != "format"}
    if node.pop("x-kubernetes-int-or-string", False) is True:
        node.pop("anyOf", None)
        node["type"] = ["integer", "string"]
    keeps = node.get("x-kubernetes-preserve-unknown-fields") is True
    if node.get("type") == "object" and "properties" in node and "additionalProperties" not in node and not keeps:
        node["additionalProperties"] = False
    return node


@pytest.mark.parametrize("stream", STREAMS, ids=lambda p: p.stem)
def test_rendered_jobsets_are_valid(run, validate, stream):
    options = ("--slice", "tpuv5e:4x4", "--queue", "q", "--priority", "p", "--sidecars", "init", "--libtpu", "xla_a=1")
    mesh = (
        "--trainer-arg",
        "mesh_fsdp=16",
        "--trainer-arg",
        "mesh_expert=1",
        "--trainer-arg",
        "mesh_context=1",
        "--trainer-arg",
        "mesh_tp=1",
    )
    validate(run(stream).data)
    result = run(stream, *options, *mesh)
    assert result.code == 0, result.err
    validate(result.data)


def test_the_schema_check_can_fail(run, validate):
    import jsonschema

    for change in (TAMPERED["a type"], lambda d: d["spec"].update(unknown=1)):
        data = copy.deepcopy(run(TINY).data)
        change(data)
        with pytest.raises(jsonschema.ValidationError):
            validate(data)


# --- random launches ---

KEYS = st.from_regex(r"[a-z][a-z_]{0,12}", fullmatch=True)
PLAIN = st.text(alphabet="abcXYZ019._:/@%+-,=^(){}[]!?*'", min_size=1, max_size=16)
SHELL = st.text(alphabet="ab $`\"'\\!(){}", max_size=12)
LIBTPU = ["xla_a", "xprof_b", "c", "megascale_port", "xla_tpu_overlap_compute_collective_tc"]
JOB_OPTIONS = ["--queue", "--image", "--priority", "--namespace"]
OPTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("--maxtext"), st.tuples(KEYS, PLAIN).map("=".join)),
        st.tuples(st.just("--maxtext-unset"), st.sampled_from(["megablox", "packing", "aaa"])),
        st.tuples(st.just("--libtpu"), st.tuples(st.sampled_from(LIBTPU), PLAIN).map("=".join)),
        st.tuples(st.just("--libtpu-unset"), st.sampled_from(LIBTPU)),
        st.tuples(st.just("--trainer-arg"), st.tuples(KEYS.map(lambda k: "x_" + k), PLAIN).map("=".join)),
        st.tuples(st.just("--orch-arg"), st.tuples(st.sampled_from(["beta", "epsilon", "new"]), PLAIN).map("=".join)),
        st.tuples(st.just("--env"), st.tuples(KEYS.map(str.upper), SHELL).map("=".join)),
        st.tuples(st.sampled_from(JOB_OPTIONS), st.sampled_from(["a", "b1", "1e-6", "on"])),
        st.tuples(st.just("--sidecars"), st.just("init")),
    ),
    max_size=6,
)  # fmt: skip


CHANGES = [
    ("    maxRestarts: 3\n", ""),
    ("  labels:\n", '  labels:\n    x: "1e-6"\n'),
    ("PYTHONUNBUFFERED=1 ", "A='$x y' B=$HOME "),
    ("priorityClassName: medium", 'priorityClassName: "yes"'),
    ("            serviceAccountName: rl-sa\n", ""),
    ("--port=20002", '--port="${JOB_INDEX}"'),
    ("value: GCP", 'value: "0o17"'),
    ("annotations: {}", "annotations:"),
    ("\n---\n", "\nkubectl something\n---\n"),
    ("\n---\n", "\n\n--- \n"),
    ("  replicatedJobs:", "# overridden: x\n  replicatedJobs:"),
]


@st.composite
def launches(draw):
    """Return a stream made from one of the known forms: other names, flags, quotes, log lines, line ends, fields."""
    text = draw(st.sampled_from(STREAMS)).read_text()
    old = re.search(r"name: ([\w-]+)-train\n", text)[1]
    prefix = draw(st.from_regex(r"[a-z]{3,5}(-[a-z0-9]{1,5})?", fullmatch=True).filter(lambda p: p not in ("flags-a",)))
    text = re.sub(rf"\b{old}\b(?!\.)", prefix, text)
    extra = draw(
        st.lists(st.tuples(KEYS, st.text(alphabet="abc019._,=$-", min_size=1, max_size=8)).map("=".join), max_size=5)
    )
    tokens = " ".join(token.replace("$", "\\$") for token in extra)
    text = text.replace('MAXTEXT_EXTRA_FLAGS="', f'MAXTEXT_EXTRA_FLAGS="{tokens} ')
    for _ in range(draw(st.integers(0, 3))):
        change = draw(st.sampled_from(CHANGES))
        text = text.replace(*change)
    return text.replace("\n", "\r\n") if draw(st.booleans()) else text


@pytest.fixture(scope="session")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("launches")


@settings(max_examples=32, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(launches(), OPTIONS)
def test_random_launches(scratch, driver, schema_check, text, options):
    file = scratch / "launch.txt"
    file.write_bytes(text.encode())
    options = [option for pair in options for option in pair]
    if options.count("--sidecars") > 1:
        options = options[: options.index("--sidecars")]
    argv = ["--launch-render", str(file), "--name", "flags-a", "--driver", str(driver), *options]
    result = call(argv)
    assert result.code == 0, result.err
    assert call(argv).out == result.out
    if schema_check is not None:
        schema_check(result.data)
    script = lr.kube_expand(result.client.script, {})
    assert subprocess.run(["bash", "-n"], input=script.encode(), capture_output=True).stderr == b""
    keys = dict(lr.key_values(result.client.env.get("MAXTEXT_EXTRA_FLAGS", "")))
    for option, value in zip(options[::2], options[1::2], strict=True):
        key = value.partition("=")[0]
        last = [
            (o, v)
            for o, v in zip(options[::2], options[1::2], strict=True)
            if o.startswith("--maxtext") and v.partition("=")[0] == key
        ]
        if option == "--maxtext" and last[-1] == (option, value):
            assert keys[key] == value.partition("=")[2]
    document, _ = trainer_of(text.replace("\r\n", "\n"))
    permitted = permitted_paths(options)
    if "init" not in options:
        for path in differences(document.data, result.data):
            assert any(re.search(pattern, "/".join(map(str, path))) for pattern in permitted), path


def permitted_paths(options):
    """Return patterns of the paths that may differ under some options."""
    paths = ["^metadata/name$", "gang-id$", "maxRestarts$", "/command/2$", "matchExpressions/./values/0$"]
    by_option = {
        "--libtpu": ["/env/", "/args/"], "--libtpu-unset": ["/env/", "/args/"], "--queue": ["metadata/labels"],
        "--image": ["containers/./image$"], "--priority": ["priorityClassName$"],
        "--namespace": ["^metadata/namespace$"],
    }  # fmt: skip
    return paths + [path for option in options for path in by_option.get(option, [])]


# --- the process ---


def test_help_of_the_script_as_a_program():
    run = subprocess.run(
        [sys.executable, "-E", "-s", str(ROOT / "render_bench.py"), "--help"],
        capture_output=True,
        env={"PATH": "/usr/bin:/bin"},
    )
    assert run.returncode == 0 and run.stderr == b""
    text = run.stdout.decode()
    assert "Exit status: 0 rendered; 2" in text and text.count("render_bench.py --launch-render") >= 2


def test_nothing_heavy_is_imported():
    code = "import sys, render_bench; print(*sorted({'yaml', 'jax', 'numpy', 'tunix', 'maxtext'} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=ROOT, check=True)
    assert run.stdout == b"\n"


def test_slice_table_and_mesh_are_plain_data():
    assert render_slice.parse_slice("tpu7x:4x4x8").devices == 256
    assert render_slice.mesh_devices({"--mesh_fsdp": "2", "--mesh_tp": "x"}, {}) is None
    assert render_slice.mesh_devices({}, {}) is None and render_slice.mesh_devices({"--mesh_tp": "2"}, {}) == (4, False)
    with pytest.raises(BenchError):
        render_slice.parse_slice("")
    assert repr(render_check.MISSING) == "(absent)"
