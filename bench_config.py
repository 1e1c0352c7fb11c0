"""From a trainer's argv to batch sizes and MaxText keys, without JAX: what the driver runs, as data.

Tunix's trainer node and orchestrator parse the flags below (tunix/experimental/examples/common/
run_trainer_node.py, .../deepswe_dist/run_deepswe_dist.py) and hand them to build_maxtext_config
(tunix/utils/maxtext_utils.py). Where that Tunix is installed the driver calls it; where it is not
(PyPI), the functions here do the same from the same sources: trainer argv, environment,
MAXTEXT_EXTRA_FLAGS last. `shrink_for_cpu` is what --cpu-smoke changes, each change with its reason.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench_common import BenchError

# Flags of the process runtime (tunix/experimental/distributed/runtime/main.py); it takes them off
# the argv before the trainer or the orchestrator sees it.
RUNTIME_FLAGS = ("process_executor", "process_main", "discovery_id", "discovery_port", "discovery_addrs")

# Trainer flags that shape the program: name -> (type, default of run_trainer_node).
TRAINER_FLAGS: dict[str, tuple[type, Any]] = {
    "trainer_backend": (str, "tunix"), "worker_id": (str, "trainer-0"),
    "mesh_fsdp": (int, 2), "mesh_tp": (int, 1), "mesh_expert": (int, 1), "mesh_context": (int, 1),
    "max_prompt_length": (int, 512), "max_response_length": (int, 128), "max_seq_token_per_tpu": (int, 0),
    "mini_batch_size": (int, 1), "num_generations": (int, 1), "train_micro_batch_size": (int, 1),
    "compute_logps_micro_batch_size": (int, 1), "compute_logps_chunk_size": (int, 0),
    "maxtext_model_name": (str, "qwen3-0.6b"), "maxtext_ckpt_path": (str, ""), "maxtext_output_directory": (str, ""),
    "maxtext_padded_moe_mlp_dim": (int, 0), "maxtext_warmup_steps_fraction": (float, 0.0),
    "maxtext_attention": (str, ""), "maxtext_skip_step_interval": (int, 128),
    "maxtext_skip_step_scaling_factor": (float, 6.0), "base_num_kv_heads": (int, 0), "rollout_mesh_tp": (int, 0),
    "remat_policy": (str, ""), "learning_rate_final_fraction": (float, None), "trainable_parameters_mask": (str, ""),
    "optimizer_learning_rate": (float, 2.0e-7), "optimizer_b1": (float, 0.9), "optimizer_b2": (float, 0.999),
    "optimizer_eps": (float, 1e-8), "optimizer_weight_decay": (float, 0.0), "optimizer_opt_chain_type": (str, ""),
    "optimizer_chain_kwargs": (str, ""), "checkpoint_save_interval_steps": (int, 1),
    "checkpoint_max_to_keep": (int, 10), "profiler_steps": (int, 0), "skip_first_n_profiler_steps": (int, 1),
    "profiler_period": (int, -1),
}  # fmt: skip
TRAINER_BOOLS = {
    "use_lora": False, "debug": False, "prefuse_moe_weights": False, "use_weight_converter": True,
    "maxtext_skip_step_on_spikes": False, "maxtext_skip_step_on_nan": True, "maxtext_fp32_master_weights": True,
}  # fmt: skip
# Read by the other trainer backend, by weight sync or by the tokenizer; no device program depends on them.
TRAINER_INERT = (
    "port", "model_name", "model_id", "model_dir", "tokenizer_path", "eval_every_n_steps", "optimizer_opt_type",
    "optimizer_schedule_type", "optimizer_value", "optimizer_init_value", "optimizer_peak_value", "optimizer_end_value",
    "optimizer_warmup_steps", "optimizer_decay_steps", "lora_rank", "lora_alpha", "sampler_type",
    "checkpoint_root_directory",
)  # fmt: skip

# Orchestrator flags that shape the trainer's program: name -> (type, default of run_deepswe_dist).
ORCH_FLAGS: dict[str, tuple[type, Any]] = {
    "batch_size": (int, 1), "mini_batch_size": (int, None), "num_generations": (int, 2), "temperature": (float, 1.0),
    "max_prompt_length": (int, 1024), "max_response_length": (int, 1024), "train_micro_batch_size": (int, 1),
    "max_seq_token_per_tpu": (int, None), "max_segments_per_packed_row": (int, None), "trainer_fsdp": (int, None),
    "trainer_dp": (int, None), "trainer_expert": (int, None), "beta": (float, 0.0), "epsilon": (float, 0.2),
    "epsilon_high": (float, None), "epsilon_c": (float, None), "loss_agg_mode": (str, "sequence-mean-token-mean"),
    "loss_algo": (str, "grpo"), "advantage_estimator": (str, "grpo"), "kl_loss_mode": (str, "kl"),
    "kl_clamp_value": (float, None), "num_iterations": (int, 1), "seq_logprob_error_threshold": (float, None),
    "truncated_importance_sampling_type": (str, None), "truncated_importance_sampling_ratio_min": (float, None),
    "truncated_importance_sampling_ratio": (float, None), "sampler_is": (str, None),
    "sampler_is_threshold": (float, 2.0), "sampler_rs": (str, None), "sampler_rs_min": (float, None),
    "sampler_rs_max": (float, None), "seed": (int, 42),
}  # fmt: skip
ORCH_BOOLS = {
    "use_rollout_logps": True, "overlong_loss_masking": False, "force_on_policy_ratio": False,
    "force_compute_kl": False, "log_sampler_trainer_agreement": False,
}  # fmt: skip


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are ours: one line that names the argv, exit code 2."""

    def error(self, message: str) -> Any:
        raise BenchError(message, where=self.prog, todo="give the flags as the launcher writes them")


def _truth(text: str) -> bool:
    """Return a flag's value as Tunix reads booleans."""
    if text.lower() in ("yes", "true", "t", "y", "1"):
        return True
    if text.lower() in ("no", "false", "f", "n", "0"):
        return False
    raise argparse.ArgumentTypeError(f"true or false expected, got {text!r}")


def _typed(kind: type, default: Any) -> dict[str, Any]:
    return {"type": kind, "default": default}


def _argv_parser(name: str, typed: Mapping[str, tuple[type, Any]], inert: Sequence[str]) -> _Parser:
    parser = _Parser(prog=name, add_help=False, allow_abbrev=False)
    for flag, (kind, default) in typed.items():
        parser.add_argument(f"--{flag}", **_typed(kind, default))
    for flag in (*inert, *RUNTIME_FLAGS):
        parser.add_argument(f"--{flag}", **_typed(str, ""))
    return parser


def _flag_names(argv: Sequence[str]) -> set[str]:
    return {word.partition("=")[0].removeprefix("--") for word in argv if word.startswith("--")}


def parse_trainer_argv(argv: Sequence[str]) -> argparse.Namespace:
    """Return the trainer's flags with run_trainer_node's defaults; `given` holds the names that were in the argv.

    Raises:
      BenchError: a flag that no known version of the trainer node has, a bad value, or a trainer that is
        not MaxText's (`--trainer_backend=tunix` has no MaxText flags to measure; LoRA has no engine path).
    """
    parser = _argv_parser("TRAINER_ARGV", TRAINER_FLAGS, TRAINER_INERT)
    for flag, default in TRAINER_BOOLS.items():
        parser.add_argument(f"--{flag}", type=_truth, nargs="?", const=True, default=default)
    for alias, flag in (("learning_rate", "optimizer_learning_rate"), ("weight_decay", "optimizer_weight_decay")):
        parser.add_argument(f"--{alias}", dest=flag, type=float, default=argparse.SUPPRESS)
    args = parser.parse_args(list(argv))
    args.given = _flag_names(argv)
    if args.trainer_backend != "maxtext":
        raise BenchError(f"--trainer_backend={args.trainer_backend} is not the MaxText trainer", where="TRAINER_ARGV",
                         todo="bench a launch with --trainer_backend=maxtext")  # fmt: skip
    if args.use_lora:
        raise BenchError("--use_lora: MaxText's engine trains all parameters", where="TRAINER_ARGV", todo="drop it")
    return args


def parse_orch_argv(argv: Sequence[str]) -> argparse.Namespace:
    """Return the orchestrator's flags that shape the loss and the batch; `given` as in `parse_trainer_argv`.

    The orchestrator has some seventy more (datasets, sandboxes, rollout); they do not reach the trainer, so
    flags unknown here are listed in the result's `unread` attribute rather than refused.

    Raises:
      BenchError: a bad value.
    """
    parser = _argv_parser("ORCH_ARGV", ORCH_FLAGS, ())
    for flag, default in ORCH_BOOLS.items():
        parser.add_argument(f"--{flag}", action=argparse.BooleanOptionalAction, default=default)
    takes_value = {option: action.nargs != 0 for action in parser._actions for option in action.option_strings}
    mine: list[str] = []
    unread: list[str] = []
    known = awaits_value = False
    for word in argv:  # --name=value, --name value, or --name alone
        name = word.partition("=")[0]
        if word.startswith("--"):
            known = name in takes_value
            awaits_value = "=" not in word and takes_value.get(name, True)
            (mine if known else unread).append(word if known else name)
        elif awaits_value:
            mine += [word] if known else []
            awaits_value = False
        else:
            unread.append(word)
    args = parser.parse_args(mine)
    args.unread, args.given = unread, _flag_names(argv)
    return args


# ---------------------------------------------------------------------------------------------
# The batch


@dataclass(frozen=True)
class BatchPlan:
    """The shape of one optimizer step. Rows and tokens are global, over the whole mesh."""

    packed: bool
    rows: int  # B, rows per micro-batch
    row_width: int  # T when packed, else prompt + completion
    prompt_length: int  # longest prompt
    completion_length: int  # longest completion
    max_segments: int  # per packed row; 0 when padded
    num_generations: int  # rollouts per prompt group
    rollouts_per_step: int  # R = mini_batch_size x num_generations

    @property
    def slots(self) -> int:
        """Token slots of one micro-batch, padding included."""
        return self.rows * self.row_width

    def micro_batches(self, sequences: int) -> int:
        """Return N for micro-batches that hold this many rollouts each.

        Padded rows hold one rollout each, so N = ceil(R / B); packed ones as many as the packer fits
        (tunix/experimental/orchestrator/batch_assembly.py).
        """
        return max(1, math.ceil(self.rollouts_per_step / max(sequences, 1)))


def batch_plan(trainer: argparse.Namespace, orch: argparse.Namespace) -> BatchPlan:
    """Return the step's shape by the rules of Tunix's create_batch_assembler and build_maxtext_config.

    Raises:
      BenchError: a packing budget shorter than one sequence, or rows that do not divide over the mesh.
    """
    shared = {flag: _shared_value(trainer, orch, flag) for flag in SHARED_FLAGS}
    budget = shared["max_seq_token_per_tpu"] or 0
    prompt, response, rows = (shared[flag] for flag in ("max_prompt_length", "max_response_length",
                                                        "train_micro_batch_size"))  # fmt: skip
    if budget and budget < prompt + response:
        raise BenchError(f"--max_seq_token_per_tpu={budget} is shorter than the longest sequence "
                         f"({prompt + response} tokens)", where="TRAINER_ARGV",
                         todo=f"set it to at least {prompt + response}")  # fmt: skip
    if rows <= 0 or rows % trainer.mesh_fsdp:
        raise BenchError(f"--train_micro_batch_size={rows} is not a multiple of --mesh_fsdp={trainer.mesh_fsdp}",
                         where="TRAINER_ARGV", todo="MaxText shards rows over fsdp")  # fmt: skip
    if budget and (orch.trainer_fsdp or orch.trainer_dp):
        # tunix#2343: rows must cover every axis that MaxText's MoE shards the batch over.
        rows = (orch.trainer_fsdp or 1) * (orch.trainer_dp or 1) * (orch.trainer_expert or 1)
    segments = orch.max_segments_per_packed_row or budget
    generations = orch.num_generations
    if "num_generations" not in orch.given and "num_generations" in trainer.given:
        generations = trainer.num_generations
    return BatchPlan(
        packed=bool(budget), rows=rows, row_width=budget or prompt + response, prompt_length=prompt,
        completion_length=response, max_segments=segments if budget else 0, num_generations=generations,
        rollouts_per_step=_prompt_groups(trainer, orch) * generations,
    )  # fmt: skip


# Both argv carry these. A launcher writes the same value into both; where an edited launch has two, the trainer's,
# which sizes the MaxText config, decides, and the result says so.
SHARED_FLAGS = ("max_seq_token_per_tpu", "max_prompt_length", "max_response_length", "train_micro_batch_size")


def _shared_value(trainer: argparse.Namespace, orch: argparse.Namespace, flag: str) -> int | None:
    if flag in trainer.given and getattr(trainer, flag):
        return getattr(trainer, flag)
    return getattr(orch, flag) if flag in orch.given else getattr(trainer, flag)


def _prompt_groups(trainer: argparse.Namespace, orch: argparse.Namespace) -> int:
    """Return the prompt groups of an optimizer step: mini_batch_size, or the whole batch."""
    if not {"mini_batch_size", "batch_size"} & orch.given and "mini_batch_size" in trainer.given:
        return trainer.mini_batch_size
    return orch.mini_batch_size or orch.batch_size


def disagreements(trainer: argparse.Namespace, orch: argparse.Namespace) -> list[str]:
    """Return a line for each flag that shapes the batch and has two values, one in each argv."""
    pairs = [(flag, getattr(trainer, flag), getattr(orch, flag), "trainer's") for flag in SHARED_FLAGS]
    pairs += [(flag, getattr(trainer, flag), getattr(orch, flag), "orchestrator's")
              for flag in ("num_generations", "mini_batch_size")]  # fmt: skip
    return [f"the argv disagree on --{flag} (trainer {one}, orchestrator {other}): the {whose} was taken"
            for flag, one, other, whose in pairs if {flag} <= trainer.given & orch.given and one != other]  # fmt: skip


# ---------------------------------------------------------------------------------------------
# The MaxText config


@dataclass(frozen=True)
class Setting:
    """One `key=value` of a MaxText command line and where it came from. Later settings win."""

    key: str
    value: str
    source: str

    def __str__(self) -> str:
        return f"{self.key}={self.value}"

    def whole(self) -> int:
        """Return the value as a whole number. Raises BenchError where it is none."""
        try:
            return int(self.value)
        except ValueError as error:
            raise BenchError(f"{self} is no whole number", where=self.source, todo="correct it") from error


FIXED_KEYS = (  # what build_maxtext_config always passes
    ("scan_layers", "True"), ("convert_checkpoint_if_possible", "False"), ("skip_jax_distributed_system", "True"),
    ("allow_split_physical_axes", "True"), ("use_tokamax_gmm", "true"), ("use_gmm_v2", "true"), ("dtype", "bfloat16"),
    ("weight_dtype", "bfloat16"), ("grad_dtype", "float32"), ("mu_dtype", "float32"), ("enable_tensorboard", "False"),
    ("record_internal_nn_metrics", "False"), ("init_weights_seed", "42"),
)  # fmt: skip
# Keys that some versions of build_maxtext_config pass unasked and some MaxText releases lack; the driver
# leaves them out of a MaxText that lacks them and writes each into the result's not_the_same_program.
TUNIX_ONLY_KEYS = ("skip_step_on_nan", "pathways_checkpointing_impl")


def maxtext_settings(
    trainer: argparse.Namespace, plan: BatchPlan, env: Mapping[str, str], num_devices: int
) -> list[Setting]:
    """Return every MaxText key the full run sets, in build_maxtext_config's order.

    Args:
      trainer: the parsed trainer argv.
      plan: the batch; only its row width is used here.
      env: the trainer's environment (TRAINER_MAXTEXT_ATTENTION, FLOAT32_*, CHECKPOINT_ASYNC,
        CKPT_D2H_CONCURRENT_GB, ENABLE_PATHWAYS_PERSISTENCE, OVERRIDE_MODEL_CONFIG, MAXTEXT_EXTRA_FLAGS).
      num_devices: JAX devices of the slice.

    Raises:
      BenchError: a MAXTEXT_EXTRA_FLAGS token that is not key=value.
    """
    settings: list[Setting] = []

    def put(key: str, value: Any, source: str) -> None:
        if value is not None and value != "":
            settings.append(Setting(key, str(value), source))

    put("model_name", trainer.maxtext_model_name, "--maxtext_model_name")
    put("run_name", trainer.worker_id or "tunix_maxtext", "--worker_id")
    put("base_output_directory", trainer.maxtext_output_directory or "/tmp/maxtext", "--maxtext_output_directory")
    put("load_parameters_path", trainer.maxtext_ckpt_path, "--maxtext_ckpt_path")
    saving = trainer.checkpoint_save_interval_steps > 0
    put("enable_checkpointing", saving, "--checkpoint_save_interval_steps")
    if saving:
        put("checkpoint_period", trainer.checkpoint_save_interval_steps, "--checkpoint_save_interval_steps")
        put("max_num_checkpoints_to_keep", trainer.checkpoint_max_to_keep, "--checkpoint_max_to_keep")
    # The bench profiles whole optimizer steps itself; the engine's profiler counts micro-steps, and base.yml's
    # profiler_steps=5 would trace unasked.
    settings += [Setting("profiler", "''", "bench"), Setting("profiler_steps", "0", "bench"),
                 Setting("skip_first_n_steps_for_profiler", "-1", "bench")]  # fmt: skip
    for key, value in FIXED_KEYS:
        put(key, value, "build_maxtext_config")
    put("per_device_batch_size", trainer.train_micro_batch_size / num_devices, "--train_micro_batch_size / devices")
    accumulation = max(1, math.ceil(trainer.mini_batch_size / trainer.train_micro_batch_size))
    put("gradient_accumulation_steps", accumulation, "--mini_batch_size / --train_micro_batch_size")
    put("max_target_length", plan.row_width, "row width")
    attention = trainer.maxtext_attention or env.get("TRAINER_MAXTEXT_ATTENTION") or "dot_product"
    put("attention", attention, "--maxtext_attention")
    put("remat_policy", trainer.remat_policy, "--remat_policy")
    for axis, flag in (("fsdp", "fsdp"), ("tensor", "tp"), ("expert", "expert"), ("context", "context")):
        put(f"ici_{axis}_parallelism", getattr(trainer, f"mesh_{flag}"), f"--mesh_{flag}")
    if trainer.mesh_context > 1:
        put("context_parallel_load_balance", "False", "--mesh_context")
    settings += _model_settings(trainer)
    settings += _optimizer_settings(trainer)
    put("prefuse_moe_weights", trainer.prefuse_moe_weights, "--prefuse_moe_weights")
    put("use_weight_converter", trainer.use_weight_converter, "--use_weight_converter")
    put("rollout_tensor_parallelism", trainer.rollout_mesh_tp or None, "--rollout_mesh_tp")
    put("trainable_parameters_mask", trainer.trainable_parameters_mask, "--trainable_parameters_mask")
    settings += _environment_settings(env)
    return settings


def _model_settings(trainer: argparse.Namespace) -> list[Setting]:
    """KV heads replicated, and the MoE width padded, to what the rollout's tensor parallelism needs."""
    settings, kv_heads, tp = [], trainer.base_num_kv_heads, trainer.rollout_mesh_tp
    padded = trainer.maxtext_padded_moe_mlp_dim
    model = model_file(trainer.maxtext_model_name) if tp > 0 and not (kv_heads and padded) else {}
    kv_heads = kv_heads or int(model.get("base_num_kv_heads") or 0)
    if kv_heads and tp > kv_heads:
        if tp % kv_heads:
            raise BenchError(f"--rollout_mesh_tp={tp} is not a multiple of {kv_heads} KV heads", where="TRAINER_ARGV")
        kv_heads = tp
    if not padded and tp > 0 and model.get("base_moe_mlp_dim"):
        padded = padded_moe_mlp_dim(int(model["base_moe_mlp_dim"]), tp)
    if padded:
        settings.append(Setting("padded_base_moe_mlp_dim", str(padded), "--rollout_mesh_tp"))
    if kv_heads:
        settings.append(Setting("base_num_kv_heads", str(kv_heads), "--base_num_kv_heads"))
        settings.append(Setting("override_model_config", "true", "--base_num_kv_heads"))
    return settings


def padded_moe_mlp_dim(width: int, tensor_parallelism: int, lanes: int = 128) -> int:
    """Return the expert MLP width that GMM_v2 takes: each shard a multiple of 2 x 128 lanes (maxtext convert_utils)."""
    step = 2 * lanes * tensor_parallelism
    return width if (width // tensor_parallelism) % (2 * lanes) == 0 else max(1, math.ceil(width / step)) * step


def _optimizer_settings(trainer: argparse.Namespace) -> list[Setting]:
    clip = None
    if trainer.optimizer_opt_chain_type == "clip_by_global_norm" and trainer.optimizer_chain_kwargs:
        try:
            clip = ast.literal_eval(trainer.optimizer_chain_kwargs)["max_norm"]
        except (ValueError, SyntaxError, KeyError, TypeError) as error:
            raise BenchError(f"--optimizer_chain_kwargs={trainer.optimizer_chain_kwargs!r} names no max_norm",
                             where="TRAINER_ARGV", todo="write {'max_norm': NUMBER}") from error  # fmt: skip
    spikes = trainer.maxtext_skip_step_on_spikes
    pairs = (
        ("learning_rate", trainer.optimizer_learning_rate, "--optimizer_learning_rate"),
        ("warmup_steps_fraction", trainer.maxtext_warmup_steps_fraction, "--maxtext_warmup_steps_fraction"),
        ("learning_rate_final_fraction", trainer.learning_rate_final_fraction, "--learning_rate_final_fraction"),
        ("adam_b1", trainer.optimizer_b1, "--optimizer_b1"),
        ("adam_b2", trainer.optimizer_b2, "--optimizer_b2"),
        ("adam_eps", trainer.optimizer_eps, "--optimizer_eps"),
        ("adam_weight_decay", trainer.optimizer_weight_decay, "--optimizer_weight_decay"),
        ("gradient_clipping_threshold", clip, "--optimizer_chain_kwargs"),
        ("skip_step_on_nan", trainer.maxtext_skip_step_on_nan, "--maxtext_skip_step_on_nan"),
        ("skip_step_on_spikes", True if spikes else None, "--maxtext_skip_step_on_spikes"),
        ("skip_step_interval", trainer.maxtext_skip_step_interval if spikes else None, "--maxtext_skip_step_interval"),
        ("skip_step_scaling_factor", trainer.maxtext_skip_step_scaling_factor if spikes else None,
         "--maxtext_skip_step_scaling_factor"),
    )  # fmt: skip
    return [Setting(key, str(value), source) for key, value, source in pairs if value is not None]


def _environment_settings(env: Mapping[str, str]) -> list[Setting]:
    settings = []
    fp8 = env.get("ROLLOUT_MOE_FP8", "").strip().lower() in ("1", "true", "yes")
    gates = (("float32_gate_logits", "FLOAT32_GATE_LOGITS", True), ("float32_logits", "FLOAT32_LOGITS", fp8 or None))
    for key, name, default in gates:
        text = env.get(name, "").strip().lower()
        value = True if text in ("1", "true", "yes") else False if text in ("0", "false", "no") else default
        if value is not None:
            settings.append(Setting(key, str(value), f"env {name}"))
    if env.get("ENABLE_PATHWAYS_PERSISTENCE") == "1":
        impl = env.get("PATHWAYS_CHECKPOINTING_IMPL", "").strip() or "persistence"
        settings += [Setting("pathways_checkpointing_impl", impl, "env ENABLE_PATHWAYS_PERSISTENCE"),
                     Setting("checkpoint_storage_use_ocdbt", "false", "env ENABLE_PATHWAYS_PERSISTENCE"),
                     Setting("checkpoint_storage_use_zarr3", "false", "env ENABLE_PATHWAYS_PERSISTENCE")]  # fmt: skip
    for key, name in (("async_checkpointing", "CHECKPOINT_ASYNC"),
                      ("checkpoint_storage_device_host_concurrent_gb", "CKPT_D2H_CONCURRENT_GB")):  # fmt: skip
        if env.get(name, "").strip():
            settings.append(Setting(key, env[name].strip(), f"env {name}"))
    if env.get("OVERRIDE_MODEL_CONFIG", "").lower() in ("1", "true"):
        settings.append(Setting("override_model_config", "true", "env OVERRIDE_MODEL_CONFIG"))
    for token in env.get("MAXTEXT_EXTRA_FLAGS", "").split():
        key, equals, value = token.partition("=")
        if not equals or not key:
            raise BenchError(f"token {token!r} is not key=value", where="MAXTEXT_EXTRA_FLAGS", todo="write key=value")
        settings.append(Setting(key, value, "MAXTEXT_EXTRA_FLAGS"))
    return settings


def effective(settings: Sequence[Setting]) -> dict[str, Setting]:
    """Return the setting that wins for each key: the last one."""
    return {setting.key: setting for setting in settings}


# ---------------------------------------------------------------------------------------------
# The model


def maxtext_configs() -> str:
    """Return the folder of the installed MaxText's config files, without importing MaxText.

    Raises:
      BenchError: MaxText is not installed.
    """
    spec = importlib.util.find_spec("maxtext")
    places = list(spec.submodule_search_locations or ()) if spec else []
    for place in places:
        folder = os.path.join(place, "configs")
        if os.path.exists(os.path.join(folder, "base.yml")):
            return folder
    raise BenchError("MaxText is not installed here", todo="install the cpu extra, or run in the trainer image")


def model_file(model_name: str) -> dict[str, Any]:
    """Return the keys of MaxText's own model file (sizes, experts, layers); {} where it has none.

    Raises:
      BenchError: MaxText is not installed.
    """
    import yaml

    path = os.path.join(maxtext_configs(), "models", f"{model_name}.yml")
    if not os.path.exists(path):
        return {}
    with open(path, encoding="utf-8") as stream:
        return yaml.safe_load(stream) or {}


@dataclass(frozen=True)
class ModelSizes:
    """What the payload needs to know of the model."""

    num_layers: int
    num_experts: int  # 1 or less: no router, no routed_experts
    top_k: int
    vocab_size: int


def model_sizes(settings: Sequence[Setting]) -> ModelSizes:
    """Return the model's sizes from MaxText's model file and the settings that override it.

    Raises:
      BenchError: the model file and the settings leave layers or vocabulary unknown.
    """
    final = effective(settings)
    sizes = model_file(final["model_name"].value)

    def read(key: str, default: int | None) -> int:
        value = final[key].whole() if key in final else sizes.get(key, default)
        if value is None:
            raise BenchError(f"the MaxText model {final['model_name'].value!r} does not say {key}",
                             todo="set it in MAXTEXT_EXTRA_FLAGS")  # fmt: skip
        return int(value)

    return ModelSizes(read("base_num_decoder_layers", None), read("num_experts", 1), read("num_experts_per_tok", 1),
                      read("vocab_size", None))  # fmt: skip


@dataclass(frozen=True)
class ExpertLayout:
    """How MaxText lays out experts and rows, for the routing load."""

    shards: int  # expert-parallel degree
    row_groups: int  # distinct data x fsdp indexes, each with rows of its own in the MoE
    token_chunks: int
    sequence_shards: int  # context shards inside the expert-parallel group


def expert_layout(settings: Sequence[Setting], num_devices: int) -> ExpertLayout:
    """Return the expert layout of the mesh.

    With custom_mesh_and_rule=cp-as-ep the context axis counts as expert parallelism in the MoE
    (maxtext/configs/custom_mesh_and_rule/cp-as-ep.yml: `exp` over context and expert, the MoE batch over data and
    fsdp). An axis of -1 takes the devices that the others leave, as in MaxText.

    Args:
      settings: what the full run sets, the mesh among it.
      num_devices: JAX devices of the slice.
    """
    final = effective(settings)
    sizes = {key: setting.whole() for key, setting in final.items()
             if key.startswith(("ici_", "dcn_")) and key.endswith("_parallelism")}  # fmt: skip
    known = math.prod(size for size in sizes.values() if size > 0)

    def axis(name: str) -> int:
        size = sizes.get(f"ici_{name}_parallelism", 1)
        return size if size > 0 else max(1, num_devices // known)

    rule, chunks = final.get("custom_mesh_and_rule"), final.get("num_moe_token_chunks")
    context = axis("context") if rule and rule.value == "cp-as-ep" else 1
    return ExpertLayout(axis("expert") * context, axis("data") * axis("fsdp") * axis("fsdp_transpose"),
                        chunks.whole() if chunks else 1, context)  # fmt: skip


# ---------------------------------------------------------------------------------------------
# --cpu-smoke

_CPU_MODEL = (  # small enough for two cores, real enough to hold attention, MoE and router
    ("override_model_config", "true", "lets the sizes below override the model file"),
    ("base_emb_dim", "64", "size"), ("base_num_query_heads", "4", "size"), ("base_num_kv_heads", "2", "size"),
    ("head_dim", "16", "size"), ("base_mlp_dim", "32", "size"), ("base_moe_mlp_dim", "32", "size"),
    ("vocab_size", "512", "size"), ("base_num_decoder_layers", "1", "size"),
    ("inhomogeneous_layer_cycle_interval", "1", "one attention + MoE layer, no Gated DeltaNet"),
    ("num_experts", "8", "size"), ("num_experts_per_tok", "2", "size"), ("gdn_key_head_dim", "16", "size"),
    ("gdn_value_head_dim", "16", "size"), ("gdn_num_key_heads", "2", "size"), ("gdn_num_value_heads", "4", "size"),
    ("gdn_chunk_size", "16", "size"), ("use_mrope", "false", "text only"),
    ("attention", "dot_product", "flash is a TPU kernel"), ("sparse_matmul", "false", "GMM is a TPU kernel"),
    ("megablox", "false", "GMM is a TPU kernel"), ("use_tokamax_gmm", "false", "GMM is a TPU kernel"),
    ("use_gmm_v2", "false", "GMM is a TPU kernel"), ("use_ring_of_experts", "false", "needs the ragged TPU sort"),
    ("num_moe_token_chunks", "1", "needs ring of experts"), ("use_ragged_sort", "false", "a TPU kernel"),
    ("ragged_buffer_factor", "-1.0", "needs the ragged TPU sort"), ("use_tokamax_splash", "false", "a TPU kernel"),
    ("optimizer_memory_host_offload", "false", "one memory space on a CPU"),
    ("quantization", "", "FP8 kernels are TPU kernels"),
    ("remat_policy", "full", "offload and custom policies name TPU memory spaces"),
    ("padded_base_moe_mlp_dim", None, "follows from the size"),
    ("custom_mesh_and_rule", "", "the CPU mesh has no context axis"),
    ("load_parameters_path", "", "random weights of the small model"),
    ("base_output_directory", "/tmp/trainer-bench", "no bucket"),
    ("jax_cache_dir", "", "JAX_COMPILATION_CACHE_DIR decides"),
    ("dtype", "float32", "bfloat16 matmuls are emulated on a CPU"),
    ("weight_dtype", "float32", "bfloat16 matmuls are emulated on a CPU"),
    ("enable_checkpointing", "False", "a smoke run writes nothing"), ("hardware", "cpu", "the device"),
    ("enable_multi_controller", None, "one process"), ("use_weight_converter", "false", "no weight sync"),
    ("prefuse_moe_weights", "false", "no weight sync"),
)  # fmt: skip
_CPU_EXPERTS = ("num_experts", "num_experts_per_tok", "base_moe_mlp_dim")  # a dense model stays dense
CPU_ROWS, CPU_WIDTH = 8, 512  # most rows and tokens per row that a smoke run keeps


@dataclass(frozen=True)
class Shrunk:
    """What a smoke run changed: (what, from, to, why), for the result."""

    what: str
    was: str
    now: str
    why: str


def shrink_for_cpu(
    trainer: argparse.Namespace, orch: argparse.Namespace, devices: int
) -> tuple[argparse.Namespace, argparse.Namespace, list[Shrunk]]:
    """Scale mesh, rows and row width of a launch to a few CPU devices.

    The mesh keeps 2 of each axis it uses, expert before the others, and the rest goes to fsdp; rows stay a
    multiple of fsdp x expert; a row wider than 512 tokens becomes 256 with the prompt's share kept.

    Returns:
      new trainer flags, new orchestrator flags, and what changed.
    """
    plan = batch_plan(trainer, orch)
    trainer, orch = argparse.Namespace(**vars(trainer)), argparse.Namespace(**vars(orch))
    before = {**vars(trainer)}
    expert = 2 if trainer.mesh_expert > 1 and devices % 2 == 0 else 1
    trainer.mesh_expert, trainer.mesh_tp, trainer.mesh_context = expert, 1, 1
    trainer.mesh_fsdp = devices // expert
    step = trainer.mesh_fsdp * expert
    trainer.train_micro_batch_size = max(step, min(before["train_micro_batch_size"], CPU_ROWS) // step * step)
    trainer.max_prompt_length, trainer.max_response_length = plan.prompt_length, plan.completion_length
    trainer.max_seq_token_per_tpu = plan.row_width if plan.packed else 0
    if plan.row_width > CPU_WIDTH:
        longest = plan.prompt_length + plan.completion_length
        trainer.max_prompt_length = max(1, 256 * plan.prompt_length // longest)
        trainer.max_response_length = 256 - trainer.max_prompt_length
        trainer.max_seq_token_per_tpu = 256 if plan.packed else 0
    trainer.compute_logps_chunk_size = min(before["compute_logps_chunk_size"], max(plan.row_width // 4, 1), 64)
    trainer.given = trainer.given | set(SHARED_FLAGS)
    orch.max_seq_token_per_tpu = trainer.max_seq_token_per_tpu or None
    if orch.trainer_fsdp or orch.trainer_dp:
        orch.trainer_fsdp, orch.trainer_dp, orch.trainer_expert = trainer.train_micro_batch_size // expert, None, expert
    scale = trainer.train_micro_batch_size / plan.rows  # keeps the number of micro-batches
    orch.mini_batch_size = max(1, math.ceil(_prompt_groups(trainer, orch) * scale))
    orch.given = orch.given | {"mini_batch_size"}
    changed = [Shrunk(f"--{flag}", str(before[flag]), str(value), "scaled to the CPU devices")
               for flag, value in vars(trainer).items() if flag != "given" and before[flag] != value]  # fmt: skip
    return trainer, orch, changed


def cpu_settings(settings: Sequence[Setting], known_keys: set[str] | None) -> tuple[list[Setting], list[Shrunk]]:
    """Override a launch's MaxText settings with a model that two cores can run.

    Args:
      settings: the launch's own settings.
      known_keys: keys of the installed MaxText; overrides of others are left out. None leaves none out.

    Returns:
      the settings to run, and every key whose value they change or add.
    """
    before = effective(settings)
    dropped = {key: why for key, value, why in _CPU_MODEL if value is None}
    dropped |= {setting.key: "the CPU mesh has the axes of --mesh_*" for setting in settings
                if setting.key.startswith(("ici_", "dcn_")) and setting.source == "MAXTEXT_EXTRA_FLAGS"}  # fmt: skip
    kept = [setting for setting in settings if setting.key not in dropped or setting.source.startswith("--mesh")]
    shrunk = [Shrunk(key, before[key].value, "(unset)", why) for key, why in dropped.items() if key in before]
    dense = model_sizes(settings).num_experts <= 1
    for key, value, why in _CPU_MODEL:
        unknown = (known_keys is not None and key not in known_keys) or (dense and key in _CPU_EXPERTS)
        if value is None or unknown or (value == "" and key not in before and key != "jax_cache_dir"):
            continue
        was = before[key].value if key in before else "(model file or base.yml)"
        if was != value:
            kept.append(Setting(key, value, "cpu-smoke"))
            shrunk.append(Shrunk(key, was, value, why))
    return kept, shrunk
