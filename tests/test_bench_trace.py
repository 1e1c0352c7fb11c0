"""Where traces go, and what a trace must hold; a real one is taken in test_bench_driver."""

from __future__ import annotations

import os
import pathlib
import shlex
import subprocess
import sys

import pytest
from launches import driver_environment

import bench_runtime
import bench_trace
from bench_common import BenchError
from bench_trace import trace_folder

ROOT = pathlib.Path(__file__).resolve().parent.parent


def test_traces_go_where_whoever_writes_them_can():
    assert trace_folder(None, "gs://b/out/", True) == "gs://b/out/profile"
    assert trace_folder("gs://b/mine", "/local", True) == "gs://b/mine"
    assert trace_folder(None, "gs://b/out", False) == bench_trace.LOCAL_FOLDER  # this process writes it itself
    assert trace_folder("here", "", False) == "here"
    for asked, output in ((None, ""), (None, "/tmp/out"), ("/tmp/mine", "gs://b/out")):
        with pytest.raises(BenchError, match="to a bucket only; name a gs:// folder"):
            trace_folder(asked, output, True)


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"JAX_PLATFORMS": "proxy,cpu", "JAX_BACKEND_TARGET": "grpc://localhost:29000"}, True),
        ({"JAX_PLATFORMS": "proxy,cpu"}, False),
        ({"JAX_PLATFORMS": "tpu,cpu", "JAX_BACKEND_TARGET": "grpc://localhost:29000"}, False),
        ({}, False),
    ],
)
def test_pathways_is_told_as_tunix_tells_it(env, expected):
    assert bench_runtime.through_pathways(env) is expected


def session(folder: pathlib.Path, name: str, **sizes: int) -> None:
    place = folder / "plugins" / "profile" / name
    place.mkdir(parents=True)
    for host, size in sizes.items():
        (place / f"{host}.xplane.pb").write_bytes(b"x" * size)


def test_the_last_session_counts_also_in_a_bucket(tmp_path, monkeypatch):
    epath = pytest.importorskip("etils.epath")
    assert bench_trace._largest_of_the_last(str(tmp_path), "--profile 1:1") == (None, 0)
    session(tmp_path, "2026_11_30_09_00_01", worker0=900)
    session(tmp_path, "2026_11_30_09_00_02", client=20, worker0=300, worker1=200)
    expected = tmp_path / "plugins/profile/2026_11_30_09_00_02/worker0.xplane.pb"
    assert bench_trace._largest_of_the_last(str(tmp_path), "--profile 1:1") == (expected, 300)
    real = epath.Path
    monkeypatch.setattr(epath, "Path", lambda name: real(name.replace("gs://bucket", str(tmp_path))))
    path, size = bench_trace._largest_of_the_last("gs://bucket", "--profile 1:1")
    assert (os.fspath(path), size) == (str(expected), 300)


def test_a_bucket_that_cannot_be_read_is_one_line(monkeypatch):
    epath = pytest.importorskip("etils.epath")

    def refuse(name):
        raise PermissionError("403 storage.objects.list")

    monkeypatch.setattr(epath, "Path", refuse)
    with pytest.raises(BenchError, match="--profile 1:1: cannot look for the trace in gs://b: 403 storage.*look with"):
        bench_trace._largest_of_the_last("gs://b", "--profile 1:1")


def test_without_its_proxy_a_pod_says_so():
    """The real pathwaysutils and JAX's real proxy client, with nobody at the other end."""
    pytest.importorskip("pathwaysutils")
    names = {"JAX_PLATFORMS": "proxy,cpu", "JAX_BACKEND_TARGET": "grpc://localhost:1",
             "PATHWAYS_PROXY_CONNECTION_TIMEOUT_SECS": "1", "PATH": os.environ["PATH"]}  # fmt: skip
    command = [sys.executable, str(ROOT / "bench_driver.py"), "--steps=1"]
    done = subprocess.run(command, env=driver_environment("launch_tiny") | names, capture_output=True, text=True)
    assert done.returncode == 2 and "Traceback" not in done.stderr, shlex.join(command)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("bench_driver: JAX_PLATFORMS=proxy,cpu: JAX does not start: Unable to initialize backend")
    assert last.endswith("; look at the logs of the pod's pathways-proxy and pathways-rm")
