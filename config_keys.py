"""What the keys and the values of a logged MaxText configuration mean; diff_config.py sorts differences by it.

Keys: which group of the report a key belongs to, which ones follow from others, which ones only name the
run and its places. Values: MaxText logs Python's str() of them, and releases differ in spelling (7 and 7.0,
`remat` and RematLocation.REMAT, lists and tuples); `same_value` compares what they mean. Names are those of
MaxText 0.2.5, configs/types.py. Standard library only.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Iterable
from typing import Any

from allow_list import glob

# First match wins; the order is that of the report.
GROUPS = (
    ("mesh", "ici_* dcn_* mesh_* custom_mesh* *logical_axis_rules* *sharding* shard_* *_shard_on_* num_slices "
             "allow_split_physical_axes *context_parallel* compile_topology* using_pipeline_parallelism "
             "subslice_shape use_2d_fsdp*"),
    ("dtype", "*dtype* *quantiz* quantization* matmul_precision *_in_float32 float32_* cast_* *fp8* *_fp32*"),
    ("remat", "remat_policy* decoder_layer_input *host_offload* tensors_on_device tensors_to_offload context *_proj "
              "query_wa_proj kv_wa_proj mlpwi* mlpwo moe_mlpw* attention_out engram gdn gdn_conv gdn_states "
              "set_remat_* scan_layers* *_offload"),
    ("moe", "*moe* *expert* megablox sparse_matmul use_gmm_* *gmm* capacity_factor *ring_of_experts* *ragged* *rout* "
            "wi_tile_* wo_tile_* *_wi_tile_* *_wo_tile_* load_balance_* use_custom_sort_vjp topk_*"),
    ("attention", "*attention* *attn* sa_* *_sa_* *splash* gdn_* *gdn* dq_reduction_steps *rope* sliding_window* "
                  "*window_size max_position_embeddings head_dim *mla* *_lora_rank fused_qkv fused_mlp indexer_*"),
    ("batch", "*batch_size* *batch* gradient_accumulation_steps max_target_length packing max_segments* *microbatch* "
              "*vocab_tiling* steps"),
    ("model", "model_name decoder_block base_*_dim base_num_* emb_dim mlp_dim num_*layers* num_*heads* vocab_size* "
              "override_model* logits_* normalize* *_layer_interval use_qk_norm* *_activations use_iota_embed"),
    ("optimizer", "opt_* adam* *learning_rate* *gradient* warmup_* skip_step_* *weight_decay mu_* muon* "
                  "trainable_parameters_mask *optimizer*"),
    ("other", "*"),
)  # fmt: skip

# Follow from other keys: class DerivedValues of configs/types.py, less the directories.
DERIVED = (
    "emb_dim mlp_dim moe_mlp_dim num_decoder_layers num_kv_heads num_query_heads num_diloco_replicas ici_parallelism "
    "dcn_parallelism using_pipeline_parallelism num_target_devices num_slices global_batch_size_to_* "
    "micro_batch_size_to_* rampup_end_step rampup_samples_per_increment_to_load tensors_on_device tensors_to_offload"
).split()

# Name the run and its places, not its program. load_from_prefill_dir is a switch in spite of its name.
VOLATILE = (
    "run_name *_run_name goodput_job_name *_dir *_directory *hostname* *_host *_host_* *coordinator_address* "
    "*coordinator_ip* *_project *_project_name *_region dump_hlo_xla_flags"
).split()
NOT_VOLATILE = ("load_from_prefill_dir", "*_host_offload", "*_device_host_*")


def any_glob(patterns: Iterable[str]) -> Callable[[str], bool]:
    """Return a function that says whether a key matches one of these globs."""
    compiled = re.compile("|".join(f"(?:{glob(pattern).pattern})" for pattern in patterns) or r"(?!)")
    return lambda key: compiled.fullmatch(key) is not None


def group_of() -> Callable[[str], str]:
    """Return a function from a key to its group's name."""
    tests = [(name, any_glob(patterns.split())) for name, patterns in GROUPS]
    return lambda key: next(name for name, matches in tests if matches(key))


# --- what values mean ----------------------------------------------------------------------------

_ENUM = re.compile(r"[A-Z]\w*\.(\w+)")
_ENUM_REPR = re.compile(r"<[A-Z]\w*\.\w+: ([^<>]+)>")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|[+-]?(inf|nan)", re.IGNORECASE | re.ASCII)
_NOT_FINITE = re.compile(r"\b(inf|nan)\b")  # what Python prints and literal_eval does not read
_ONE_WORD = {"None": None, "null": None, "": None}
LONGEST_NUMBER = 400  # digits; a longer one is compared as text (and Python refuses to read it)
# Members whose name is not their value (configs/types.py): CustomRule.DEFAULT and TEGroupedGemm...EMPTY are ''.
_EMPTY_MEMBERS = ("NONE", "EMPTY", "DEFAULT")


def meaning(text: str) -> Any:
    """Return the Python value of a logged text: numbers, True, None, lists, dicts, else the text itself."""
    text = text.strip()
    if text in _ONE_WORD or text.lower() in ("true", "false"):
        return _ONE_WORD.get(text, text.lower() == "true")
    if _NUMBER.fullmatch(text) and len(text) < LONGEST_NUMBER:
        return float(text) if any(c in text.lower() for c in ".einf") else int(text)
    if text[:1] in ("(", "[", "{"):
        plain = _ENUM_REPR.sub(r"\1", text)
        for literal in (plain, _NOT_FINITE.sub(lambda m: "1e999" if m[0] == "inf" else "'nan'", plain)):
            try:
                return ast.literal_eval(literal)
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                continue
        return " ".join(text.split())
    return text


def same_value(a: str, b: str) -> bool:
    """Return whether two logged texts mean the same value."""
    if a == b:
        return True
    for one, other in ((a, b), (b, a)):
        member = _ENUM.fullmatch(one.strip())
        if member:
            return _same_member(member[1], other.strip())
    return _same(meaning(a), meaning(b))


def _same_member(member: str, other: str) -> bool:
    other_member = _ENUM.fullmatch(other)
    name = other_member[1] if other_member else other
    if member in _EMPTY_MEMBERS and name.lower() in ("", "none", "null"):
        return True
    return _folded(member) == _folded(name)


def _folded(name: str) -> str:
    return re.sub(r"[-_.]", "", name.lower())


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, int | float) and isinstance(b, int | float):
        return a == b or (math.isnan(a) and math.isnan(b))
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    return type(a) is type(b) and a == b
