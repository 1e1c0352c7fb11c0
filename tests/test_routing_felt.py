"""The ratio that bench_routing builds is the one that MaxText's own probes report from inside the MoE layer.

A `RoutedMoE` of the installed MaxText runs on four CPU devices with forced routing, ring of experts and token chunks.
Without `sequence_shards` the chunks of context-sharded rows would be other tokens, and unset tokens would dilute the
load: both controls must disagree, or the comparison proves nothing.
"""

from __future__ import annotations

import os

import numpy as np
import pytest

import bench_routing
from bench_routing import RoutingSpec

ROWS, WIDTH, EXPERTS, TOP_K = 4, 32, 8, 2  # eight experts, top 2: mixtral-8x7b's, its widths shrunk
EXPERT_PARALLEL = {"ici_fsdp_parallelism": 2, "ici_expert_parallelism": 2}
CP_AS_EP = {
    "custom_mesh_and_rule": "cp-as-ep",
    "ici_fsdp_parallelism": 1,
    "ici_context_parallelism": 2,
    "ici_expert_parallelism": 2,
    "context_parallel_load_balance": False,
}
WIDTHS = {"base_emb_dim": 32, "base_mlp_dim": 32, "base_moe_mlp_dim": 32}
SWITCHES = {
    "sparse_matmul": True,
    "megablox": True,
    "use_ring_of_experts": True,
    "use_ragged_sort": True,
    "ragged_buffer_factor": 4.0,
    "moe_log_max_load_ratio": True,
    "log_required_ragged_buffer_factor": True,
}


def probes(mesh_flags, chunks, forced, folder):
    """Run the layer once; return (moe_max_load_ratio, moe_required_rbf) as MaxText's probes report them."""
    maxtext = pytest.importorskip("maxtext", reason="needs MaxText (extra cpu)")
    jax = pytest.importorskip("jax")
    from flax import nnx
    from flax.linen import partitioning
    from maxtext.configs import pyconfig
    from maxtext.layers import moe
    from maxtext.layers.initializers import nd_dense_init
    from maxtext.utils import maxtext_utils

    config = pyconfig.initialize(
        ["", os.path.join(maxtext.__path__[0], "configs", "base.yml")],
        model_name="mixtral-8x7b",
        override_model_config=True,
        run_name="felt",
        base_output_directory=str(folder),
        enable_checkpointing=False,
        log_config=False,
        skip_jax_distributed_system=True,
        dtype="float32",
        weight_dtype="float32",
        per_device_batch_size=ROWS / 4,
        max_target_length=WIDTH,
        num_moe_token_chunks=chunks,
        **WIDTHS,
        **SWITCHES,
        **mesh_flags,
    )
    mesh = jax.sharding.Mesh(maxtext_utils.create_device_mesh(config), config.mesh_axes)
    with jax.set_mesh(mesh), partitioning.axis_rules(config.logical_axis_rules):
        layer = moe.RoutedMoE(
            config=config,
            num_experts=EXPERTS,
            num_experts_per_tok=TOP_K,
            mesh=mesh,
            kernel_init=nd_dense_init(1.0, "fan_in", "truncated_normal"),
            kernel_axes=("embed", "mlp"),
            intermediate_dim=config.moe_mlp_dim,
            dtype=config.dtype,
            weight_dtype=config.weight_dtype,
            rngs=nnx.Rngs(params=0),
        )
        layer(np.zeros((ROWS, WIDTH, 32), np.float32), forced_routed_experts=forced[:, :, 0].astype(np.int32))
        sown = nnx.pop(layer, nnx.Intermediate).to_pure_dict()
    names = ("moe_max_load_ratio", "moe_required_rbf")
    return [float(np.max(maxtext_utils.collect_intermediates_by_suffix(sown, name)[0])) for name in names]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # MaxText's own
@pytest.mark.parametrize(
    ("mesh_flags", "routing", "felt"),
    [
        (EXPERT_PARALLEL, RoutingSpec((1.25,), 2, 2, 2), True),
        (CP_AS_EP, RoutingSpec((1.75,), 4, 1, 2, sequence_shards=2), True),
        (CP_AS_EP, RoutingSpec((1.75,), 4, 1, 2), False),
        (CP_AS_EP, RoutingSpec((1.75,), 4, 1, 2, sequence_shards=2, leave_unset=True), False),
    ],
    ids=["fsdp x expert", "cp-as-ep", "control: contiguous chunks", "control: unset tokens"],
)
def test_maxtext_reports_the_ratio_that_was_built(tmp_path, mesh_flags, routing, felt):
    assigned = np.ones((ROWS, WIDTH), bool)
    if routing.leave_unset:
        assigned[:, ::2] = False
    forced = bench_routing.build_routing((ROWS, WIDTH, 1, TOP_K), EXPERTS, routing, assigned, 0, 0)
    built = bench_routing.measure_load(forced, EXPERTS, routing).measures["shard_max_over_mean"][0]
    assert built == pytest.approx(routing.targets[0])
    agree = probes(mesh_flags, routing.token_chunks, forced, tmp_path) == pytest.approx([built, built])
    assert agree is felt
