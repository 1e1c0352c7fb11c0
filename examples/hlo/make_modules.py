"""Compile the two example modules for TPU topologies, on a CPU with libtpu from PyPI and no TPU.

  dense_fsdp_v5e.txt   a dense model of 4 scanned layers, parameters sharded over fsdp=8, one training step
  moe_ring_tpu7x.txt   one MoE layer as a ring of experts in two token chunks, mesh fsdp=4 x expert=2

Each is `compiled.as_text()` without the tables of file names behind its first line (FileNames,
FunctionNames, FileLocations, StackFrames) and the references to them: they say nothing about the schedule,
and they name the machine.

Run where jax and libtpu are installed (here jax 0.12.0.1, libtpu 0.0.52); other versions give other text:

  JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 TPU_WORKER_HOSTNAMES=localhost \\
    TPU_ACCELERATOR_TYPE=v5litepod-8 python examples/hlo/make_modules.py OUTPUT_DIRECTORY
"""

from __future__ import annotations

import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

TABLES = re.compile(r"\n(?:FileNames|FunctionNames|FileLocations|StackFrames)\n(?:\d.*\n)*| stack_frame_id=\d+")


def topology_mesh(topology: str, shape: tuple[int, ...], names: tuple[str, ...]) -> Mesh:
    """Return a mesh over the devices of a TPU topology that this host does not own."""
    devices = topologies.get_topology_desc(topology, platform="tpu").devices
    return Mesh(np.array(devices).reshape(shape), names)


def placed(shape: tuple[int, ...], mesh: Mesh, *axes: str | tuple[str, ...] | None) -> jax.ShapeDtypeStruct:
    """Return a bf16 argument of this global shape and sharding."""
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P(*axes)))


def train_step(loss, mesh: Mesh, params: dict, batch: jax.ShapeDtypeStruct) -> str:
    """Return the text of a compiled step of gradient descent on `loss(params, batch)`."""

    def step(weights, inputs):
        value, grads = jax.value_and_grad(loss)(weights, inputs)
        return value, jax.tree.map(lambda w, g: (w - 0.01 * g).astype(w.dtype), weights, grads)

    out = (NamedSharding(mesh, P()), jax.tree.map(lambda leaf: leaf.sharding, params))
    lowered = jax.jit(step, donate_argnums=0, out_shardings=out).lower(params, batch)
    return lowered.compile().as_text()


def dense_fsdp() -> str:
    """4 layers of 2048 x 4096, scanned and rematerialised; 8 rows of 512 tokens over fsdp=8."""
    mesh = topology_mesh("v5e:2x4", (8,), ("fsdp",))
    layers, width, hidden = 4, 2048, 4096
    rows = NamedSharding(mesh, P("fsdp", None, None))

    def layer(x, w):
        x = jax.lax.with_sharding_constraint(x, rows)
        return x + jax.nn.relu(x @ w["wi"]) @ w["wo"], None

    def loss(params, x):
        y, _ = jax.lax.scan(jax.checkpoint(layer), x, params)
        return jnp.mean(jnp.square(y.astype(jnp.float32)))

    params = {
        "wi": placed((layers, width, hidden), mesh, None, "fsdp", None),
        "wo": placed((layers, hidden, width), mesh, None, None, "fsdp"),
    }
    return train_step(loss, mesh, params, placed((8, 512, width), mesh, "fsdp", None, None))


def moe_ring() -> str:
    """8 experts of 1024 x 512, top-2 routing; 8192 tokens in two chunks, gathered over the expert axis and
    scattered back; expert weights sharded over expert and fsdp."""
    mesh = topology_mesh("tpu7x:2x2x1", (4, 2), ("fsdp", "expert"))
    experts, width, hidden, tokens, chunks = 8, 1024, 512, 8192, 2

    def chunk(x, gate, wi, wo):
        x = jax.lax.all_gather(x, "expert", axis=0, tiled=True)
        scores = jax.nn.softmax((x @ gate).astype(jnp.float32), axis=-1)
        best, chosen = jax.lax.top_k(scores, 2)
        mine = jax.lax.axis_index("expert") * (experts // 2) + jnp.arange(experts // 2)
        weight = jnp.sum(jnp.where(chosen[:, :, None] == mine, best[:, :, None], 0.0), axis=1).astype(x.dtype)
        inner = jax.nn.silu(jnp.einsum("td,edf->etf", x, wi))
        out = jnp.einsum("etf,efd,te->td", inner, wo, weight)
        return jax.lax.psum_scatter(out, "expert", scatter_dimension=0, tiled=True)

    def ring(x, gate, wi, wo):
        wi = jax.lax.all_gather(wi, "fsdp", axis=1, tiled=True)
        wo = jax.lax.all_gather(wo, "fsdp", axis=1, tiled=True)
        parts = [chunk(part, gate, wi, wo) for part in jnp.split(x, chunks)]
        return jnp.concatenate(parts)

    def loss(params, x):
        specs = (P(("fsdp", "expert"), None), P(), P("expert", "fsdp", None), P("expert", "fsdp", None))
        run = jax.shard_map(ring, mesh=mesh, in_specs=specs, out_specs=specs[0])
        y = x + run(x, params["gate"], params["wi"], params["wo"])
        return jnp.mean(jnp.square(y.astype(jnp.float32)))

    params = {
        "gate": placed((width, experts), mesh),
        "wi": placed((experts, width, hidden), mesh, "expert", "fsdp", None),
        "wo": placed((experts, hidden, width), mesh, "expert", "fsdp", None),
    }
    return train_step(loss, mesh, params, placed((tokens, width), mesh, ("fsdp", "expert"), None))


def main(argv: list[str]) -> int:
    target = pathlib.Path(argv[0] if argv else ".")
    for name, make in (("dense_fsdp_v5e", dense_fsdp), ("moe_ring_tpu7x", moe_ring)):
        text = TABLES.sub("", make())
        (target / f"{name}.txt").write_text(text)
        print(f"{name}.txt: {len(text)} bytes")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
