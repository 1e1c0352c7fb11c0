"""Run the client command of a rendered bench JobSet on this machine, as the kubelet would start it.

Takes the `bash -c` string out of the rendered YAML, applies Kubernetes' `$$` and `$(NAME)` rules with the
container's own environment, and runs it in a scratch directory. Used by `make demo` and by the tests; the
environment of this process is added to the container's, so BENCH_CPU_SMOKE=1 makes the driver run on the CPU.

Exit status: the command's own; 2 where the render cannot be read.

Example:
    BENCH_CPU_SMOKE=1 python examples/run_client.py demo.yaml
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from bench_common import BenchError, read_text, run_tool, shown_name  # noqa: E402
from launch_render import client_containers, kube_expand, read_render  # noqa: E402


def main(argv: list[str] | None = None) -> int:
    """Run the tool; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("render", help="a bench JobSet, or - for stdin")
    options = parser.parse_args(argv)
    return run_tool("run_client", lambda: run_client(options.render))


def run_client(path: str) -> int:
    """Run the first client command of a render and return its exit code."""
    source = shown_name(path)
    for document in read_render(read_text(path), source).documents:
        for _, container, _ in client_containers(document):
            env = {item["name"]: str(item["value"]) for item in container.get("env") or [] if "value" in item}
            command = [kube_expand(word, env) for word in container["command"]]
            with tempfile.TemporaryDirectory(prefix="trainer-bench-demo-") as scratch:
                return subprocess.run(command, env={**env, **os.environ}, cwd=scratch, check=False).returncode
    raise BenchError("no client command in this render", where=source, todo="give what render_bench.py printed")


if __name__ == "__main__":
    raise SystemExit(main())
