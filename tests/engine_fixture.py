"""One real MaxText engine for all tests that need one: importing it takes 10 to 17 s, compiling 10 s.

Import `engine_kit` into a test file (or list this module in `pytest_plugins`) and ask for it as a fixture.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
from typing import Any

import pytest

import tunix_standin

PAD_ID, EOS_ID, VOCAB, LAYERS, EXPERTS, TOP_K = 0, 1, 512, 1, 8, 2

# Qwen3.5 with every dimension shrunk; one layer with interval 1 is an attention + MoE layer.
MODEL_FLAGS = (
    "model_name=qwen3.5-35b-a3b override_model_config=true base_num_decoder_layers=1 "
    "inhomogeneous_layer_cycle_interval=1 base_emb_dim=64 base_num_query_heads=4 base_num_kv_heads=2 head_dim=16 "
    "base_mlp_dim=32 base_moe_mlp_dim=32 num_experts=8 num_experts_per_tok=2 vocab_size=512 use_mrope=false "
    "gdn_conv_kernel_dim=4 gdn_key_head_dim=16 gdn_value_head_dim=16 gdn_num_key_heads=2 gdn_num_value_heads=4 "
    "gdn_chunk_size=16 attention=dot_product sparse_matmul=false megablox=false dtype=float32 weight_dtype=float32 "
    "grad_dtype=float32 scan_layers=true enable_checkpointing=false skip_jax_distributed_system=true hardware=cpu "
    "ici_fsdp_parallelism=2 ici_expert_parallelism=2 per_device_batch_size=1 max_target_length=64 run_name=test "
    "profiler_steps=0 enable_tensorboard=false init_weights_seed=42 learning_rate=1e-3 steps=100 "
    "use_weight_converter=false base_output_directory=/tmp/unused"
)


@dataclasses.dataclass
class EngineKit:
    """The mesh, and `build(extra flags)` for an engine of that config on it."""

    mesh: Any
    config: Any

    def build(self, *flags: str) -> Any:
        """Return a new engine whose config differs by `key=value` flags."""
        from maxtext.training_engine.maxtext_engine import MaxTextTrainingEngine

        with self.mesh, contextlib.redirect_stdout(io.StringIO()):
            return MaxTextTrainingEngine(
                make_config(*flags), mesh=self.mesh, wrap_with_tunix_adapter=True, tokenizer_pad_id=PAD_ID
            )


def make_config(*flags: str) -> Any:
    """Return MaxText's config of the shrunk model; later flags win."""
    from maxtext.configs import pyconfig

    pairs = dict(flag.split("=", 1) for flag in (*MODEL_FLAGS.split(), *flags))
    with contextlib.redirect_stdout(io.StringIO()):
        return pyconfig.initialize(["test", _base_config(), *(f"{k}={v}" for k, v in pairs.items())])


def _base_config() -> str:
    import importlib.util
    import os

    found = importlib.util.find_spec("maxtext").submodule_search_locations
    return os.path.join(list(found)[0], "configs", "base.yml")


@pytest.fixture(scope="session")
def engine_kit() -> EngineKit:
    """The real engine's mesh and builder, imported once per run."""
    pytest.importorskip("maxtext", reason="MaxText is not installed")
    tunix_standin.install()
    from jax.sharding import Mesh
    from maxtext.utils import maxtext_utils

    config = make_config()
    return EngineKit(mesh=Mesh(maxtext_utils.create_device_mesh(config), config.mesh_axes), config=config)
