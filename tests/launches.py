"""The argv of the two example launches, for tests that need a launch but not its YAML."""

from __future__ import annotations

import shlex
from pathlib import Path

from launch_render import clients, read_render

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def launch(name: str) -> tuple[list[str], list[str], dict[str, str]]:
    """Return (trainer argv, orchestrator argv, trainer environment) of examples/NAME.yaml."""
    found = {}
    path = EXAMPLES / f"{name}.yaml"
    for document in read_render(path.read_text(), path.name).documents:
        for client in clients(document):
            found[client.role] = client
    argv = {role: [word.value for word in client.argv] for role, client in found.items()}
    return argv["trainer"], argv["orchestrator"], found["trainer"].env


def driver_environment(name: str) -> dict[str, str]:
    """Return the environment a bench of that launch starts its driver with."""
    trainer, orch, env = launch(name)
    return {
        "TRAINER_ARGV": shlex.join(trainer),
        "ORCH_ARGV": shlex.join(orch),
        "MAXTEXT_EXTRA_FLAGS": env["MAXTEXT_EXTRA_FLAGS"],
        "LIBTPU_INIT_ARGS": env["LIBTPU_INIT_ARGS"],  # part of JAX's cache key: programs are compiled once per run
    }
