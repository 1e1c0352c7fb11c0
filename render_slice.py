"""What a TPU slice means to a Pathways trainer JobSet: one table, and the fields that carry it.

`parse_slice` takes `TYPE:TOPOLOGY` as launchers do, `set_slice` writes every field that depends on it,
whether the render uses dynamic slicing or not, and `slice_fields` tells the values, for the renderer's
second pass. What a render does not have is not added: the form of the scheduling fields is the
launcher's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from bench_common import BenchError
from launch_render import Document, slice_of, walk

CHIPS_PER_HOST = 4  # google.com/tpu of a worker pod, in every launcher template


class TpuType(NamedTuple):
    """One TPU type: its names in launchers, and what each field calls it.

    Sources: Tunix's yaml_generator.py for the names; cloud.google.com/tpu/docs for cores per chip and
    dimensions of a topology. JAX has one device per core, and a v5p's two cores count as one (megacore).
    tpuv6ea is taken to be as tpuv6e; no public page describes it.
    """

    names: tuple[str, ...]
    accelerator: str  # nodeSelector cloud.google.com/gke-tpu-accelerator
    pathways: str  # resource manager's --instance_type
    devices_per_chip: int
    dimensions: int


TPU_TYPES = (
    TpuType(("tpu7x", "tpu-v7x-slice"), "tpu7x", "tpu7x", 2, 3),
    TpuType(("tpuv5", "tpuv5p", "tpu-v5p-slice"), "tpu-v5p-slice", "tpuv5", 1, 3),
    TpuType(("tpuv5e", "tpu-v5-lite-podslice"), "tpu-v5-lite-podslice", "tpuv5e", 1, 2),
    TpuType(("tpuv6e", "tpu-v6e-slice"), "tpu-v6e-slice", "tpuv6e", 1, 2),
    TpuType(("tpuv6ea", "tpu-v6ea-slice"), "tpu-v6ea-slice", "tpuv6ea", 1, 2),
)

ACCELERATOR = "cloud.google.com/gke-tpu-accelerator"
TOPOLOGY = "cloud.google.com/gke-tpu-topology"
RESERVATION = "cloud.google.com/reservation-name"
SLICE_TOPOLOGY = "cloud.google.com/gke-tpu-slice-topology"
REQUIRED_TOPOLOGY = "kueue.x-k8s.io/podset-slice-required-topology"
SLICE_SIZE = "kueue.x-k8s.io/podset-slice-size"
PARTITION_ID = re.compile(r"(cloud\.google\.com/gke-tpu-partition-)[0-9x]+(-id)")
PARTITION_STATE = re.compile(r"(cloud\.google\.com/gke-tpu-partition-)[0-9x]+(-state)")


class Slice(NamedTuple):
    """A TPU slice: its type and topology (`4x4x8`)."""

    tpu: TpuType
    topology: str

    @property
    def chips(self) -> int:
        return math.prod(int(side) for side in self.topology.split("x"))

    @property
    def hosts(self) -> int:
        return self.chips // CHIPS_PER_HOST

    @property
    def devices(self) -> int:
        """JAX devices of the slice."""
        return self.chips * self.tpu.devices_per_chip

    @property
    def partition(self) -> str:
        """Topology of the sub-slices that dynamic slicing puts together; tpu7x has cubes of 64 chips."""
        return "4x4x4" if self.tpu.pathways == "tpu7x" and self.chips > 64 else self.topology

    @property
    def partition_hosts(self) -> int:
        return math.prod(int(side) for side in self.partition.split("x")) // CHIPS_PER_HOST

    def __str__(self) -> str:
        return f"{self.tpu.pathways}:{self.topology}"


def parse_slice(text: str) -> Slice:
    """Return the slice of `TYPE:TOPOLOGY`.

    Raises:
      BenchError: unknown type, no topology, wrong number of dimensions, or chips that fill no hosts.
    """
    name, colon, topology = text.partition(":")
    tpu = next((t for t in TPU_TYPES if name in t.names), None)
    known = ", ".join(t.names[0] for t in TPU_TYPES)
    if tpu is None:
        raise BenchError(f"--slice {text}: unknown TPU type {name!r}", todo=f"one of {known}")
    if not colon or not re.fullmatch(r"[1-9][0-9]{0,3}(x[1-9][0-9]{0,3})*", topology):
        raise BenchError(f"--slice {text}: no topology", todo=f"write it like {name}:2x2x1")
    result = Slice(tpu, topology)
    if topology.count("x") + 1 != tpu.dimensions:
        raise BenchError(f"--slice {text}: a {name} topology has {tpu.dimensions} sides", todo="mend the topology")
    if result.chips % CHIPS_PER_HOST:
        raise BenchError(
            f"--slice {text}: {result.chips} chips fill no whole hosts of {CHIPS_PER_HOST}", todo="mend the topology"
        )
    return result


def topology_of(document: Document) -> str:
    """Return the topology of a trainer's slice as its resource manager has it (`4x4x8`); empty where it has none."""
    return (slice_of(document) or "").partition(":")[2]


def set_slice(document: dict[str, Any], workers: tuple[str | int, ...], old: str, new: Slice) -> None:
    """Write a slice into every field of a Pathways trainer that depends on it, in place.

    Args:
      workers: path of the replicatedJob that holds the TPU workers.
      old: topology that the document was made for.
    """
    for path, node in list(walk(document)):
        if isinstance(node, dict | list):
            for key, value in list(node.items() if isinstance(node, dict) else enumerate(node)):
                wanted = slice_value((*path, key), value, workers, old, new)
                if wanted is not None:
                    node[key] = wanted


def slice_value(path: tuple[str | int, ...], value: Any, workers: tuple[str | int, ...], old: str, new: Slice) -> Any:
    """Return what a field must hold for a slice, or None where the field does not depend on it.

    Args:
      path, value: of the field in the trainer's document.
      workers, old: as in `set_slice`.
    """
    key = path[-1]
    if key in ("completions", "parallelism") and path[:-1] == (*workers, "template", "spec"):
        return new.hosts
    if key == ACCELERATOR and "nodeSelector" in path:
        return new.tpu.accelerator
    if key == TOPOLOGY or (key == SLICE_TOPOLOGY and value == old):  # older launchers name one host there
        return new.topology
    if key == SLICE_SIZE:
        return str(new.partition_hosts)
    if isinstance(value, str) and value.startswith("--instance_type="):
        return f"--instance_type={new}"
    if isinstance(value, str) and (key == REQUIRED_TOPOLOGY or key == "key"):
        pattern = PARTITION_ID if key == REQUIRED_TOPOLOGY else PARTITION_STATE
        if pattern.fullmatch(value):
            return pattern.sub(rf"\g<1>{new.partition}\g<2>", value)
    return None


def orchestrator_topology(text: str, old: str | None, new: Slice) -> str:
    """Return the orchestrator's --tpu_topology, `TRAINER+ROLLOUT` of `TYPE:TOPOLOGY` each, for another trainer slice.

    Args:
      old: the trainer's slice before; a text that does not start with it is returned as it is.
    """
    trainer, plus, rollout = text.partition("+")
    try:
        follows = parse_slice(trainer) == parse_slice(old or "")
    except BenchError:
        follows = False
    return f"{new}{plus}{rollout}" if follows else text


def mesh_devices(flags: Mapping[str, str | None], keys: Mapping[str, str]) -> tuple[int, bool] | None:
    """Return (product of the mesh axes, whether one axis takes what is left) of a trainer; None if unknown.

    A missing axis has the default of Tunix's run_trainer_node: 2 for fsdp, 1 for the others.

    Args:
      flags: the trainer's argv, `--mesh_*` among it.
      keys: MAXTEXT_EXTRA_FLAGS, whose `ici_*_parallelism` overrule the argv.
    """
    if not any(flag.startswith("--mesh_") for flag in flags):
        return None
    axes = {"fsdp": "fsdp", "tp": "tensor", "expert": "expert", "context": "context"}
    mesh = {axis: flags.get(f"--mesh_{name}") or ("2" if name == "fsdp" else "1") for name, axis in axes.items()}
    for key, value in keys.items():
        if match := re.fullmatch(r"ici_(\w+)_parallelism", key):
            mesh[match[1]] = value
    try:
        sizes = [int(value) for value in mesh.values()]
    except ValueError:
        return None
    return math.prod(size for size in sizes if size > 0), -1 in sizes
