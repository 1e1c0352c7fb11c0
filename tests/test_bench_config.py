"""bench_config and bench_plan: argv to batch sizes, MaxText keys, expert layout, and what a smoke run shrinks."""

from __future__ import annotations

import pytest
from launches import launch

import bench_config
from bench_common import BenchError
from bench_plan import plan_launch


def trainer(*extra, name="launch_dryrun"):
    return bench_config.parse_trainer_argv([*launch(name)[0], *extra])


def orch(*extra, name="launch_dryrun"):
    return bench_config.parse_orch_argv([*launch(name)[1], *extra])


def keys(*extra, env=None, name="launch_dryrun", devices=256):
    args = trainer(*extra, name=name)
    plan = bench_config.batch_plan(args, orch(name=name))
    settings = bench_config.maxtext_settings(args, plan, env if env is not None else launch(name)[2], devices)
    return {key: setting.value for key, setting in bench_config.effective(settings).items()}


def test_published_batch():
    # facts of the 128-chip shape: rows = fsdp 32 x expert 2, 65,536 tokens, R = 16 groups x 16 generations
    plan = bench_config.batch_plan(trainer(), orch())
    assert (plan.packed, plan.rows, plan.row_width, plan.slots) == (True, 64, 65_536, 4_194_304)
    assert plan.rollouts_per_step == 16 * 16
    assert plan.micro_batches(64) == 4
    assert bench_config.batch_plan(trainer(), orch("--mini_batch_size=64")).micro_batches(64) == 16  # as published


def test_padded_batch():
    args = trainer("--max_seq_token_per_tpu=0", "--train_micro_batch_size=32")
    other = orch()
    other.max_seq_token_per_tpu = None
    plan = bench_config.batch_plan(args, other)
    assert (plan.packed, plan.rows, plan.row_width, plan.max_segments) == (False, 32, 65_536, 0)
    assert plan.micro_batches(32) == 8  # ceil(256 / 32)


def test_last_flag_wins_and_both_spellings():
    assert trainer("--mesh_fsdp=4", "--mesh_fsdp", "8").mesh_fsdp == 8
    assert trainer("--learning_rate=3e-6").optimizer_learning_rate == 3e-6
    assert trainer("--maxtext_skip_step_on_nan").maxtext_skip_step_on_nan is True


def test_orchestrator_values_may_be_words_of_their_own():
    argv = "--batch_size 6 --top_k -1 --no-shuffle --kl_clamp_value -1.5 --no-use_rollout_logps stray --wandb_name x"
    found = bench_config.parse_orch_argv(argv.split())
    assert (found.batch_size, found.kl_clamp_value, found.use_rollout_logps) == (6, -1.5, False)
    assert found.unread == ["--top_k", "--no-shuffle", "stray", "--wandb_name"]
    with pytest.raises(BenchError, match="ORCH_ARGV: argument --batch_size: expected one argument"):
        bench_config.parse_orch_argv(["--batch_size", "--epsilon=0.3"])


BARE = ["--trainer_backend=maxtext", "--mesh_fsdp=3"]


@pytest.mark.parametrize(
    ("trainer_flags", "orch_flags", "rows", "width", "rollouts"),
    [
        # padded: B = train_micro_batch_size, width P + C, R = mini_batch_size x num_generations
        ("--train_micro_batch_size=9 --max_prompt_length=7 --max_response_length=30",
         "--batch_size=22 --mini_batch_size=11 --num_generations=5", 9, 37, 55),
        # the same, said by the orchestrator alone
        ("", "--train_micro_batch_size=9 --max_prompt_length=7 --max_response_length=30 --batch_size=11"
         " --num_generations=5", 9, 37, 55),
        # and by the trainer alone
        ("--train_micro_batch_size=9 --max_prompt_length=7 --max_response_length=30 --mini_batch_size=11"
         " --num_generations=5", "", 9, 37, 55),
        # packed: B = fsdp x dp x expert, width the budget
        ("--train_micro_batch_size=9 --max_prompt_length=7 --max_response_length=30",
         "--max_seq_token_per_tpu=101 --trainer_fsdp=3 --trainer_dp=2 --trainer_expert=5 --batch_size=3", 30, 101, 6),
        # packed without mesh flags: B = train_micro_batch_size
        ("--train_micro_batch_size=9 --max_prompt_length=7 --max_response_length=30 --max_seq_token_per_tpu=101",
         "--batch_size=3 --num_generations=7", 9, 101, 21),
    ],
)  # fmt: skip
def test_rows_width_and_rollouts_follow_the_argv_that_says_them(trainer_flags, orch_flags, rows, width, rollouts):
    args = bench_config.parse_trainer_argv([*BARE, *trainer_flags.split()])
    plan = bench_config.batch_plan(args, bench_config.parse_orch_argv(orch_flags.split()))
    assert (plan.rows, plan.row_width, plan.rollouts_per_step) == (rows, width, rollouts)
    assert plan.micro_batches(plan.rows) == -(-rollouts // rows)


def test_two_argv_that_disagree_are_told_apart():
    argv, orchestrator, env = launch("launch_tiny")
    plan = plan_launch([*argv, "--max_prompt_length=40"], [*orchestrator, "--num_generations=6"], env, 4)
    assert (plan.batch.prompt_length, plan.batch.num_generations) == (40, 6)
    assert plan.job.not_the_same_program == [
        "the argv disagree on --max_prompt_length (trainer 40, orchestrator 64): the trainer's was taken",
        "the argv disagree on --num_generations (trainer 4, orchestrator 6): the orchestrator's was taken",
    ]
    assert plan_launch(argv, orchestrator, env, 4).job.not_the_same_program == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("num_experts=many", "MAXTEXT_EXTRA_FLAGS: num_experts=many is no whole number"),
        ("num_moe_token_chunks=", "MAXTEXT_EXTRA_FLAGS: num_moe_token_chunks= is no whole number"),
        ("ici_fsdp_parallelism=1.5", "ici_fsdp_parallelism=1.5 is no whole number"),
        ("num_experts=1", "--routing-load 1.2, but qwen3.5-35b-a3b has no experts"),
    ],
)
def test_sizes_that_cannot_be_run_are_refused(flags, message):
    argv, orchestrator, env = launch("launch_tiny")
    env = {"MAXTEXT_EXTRA_FLAGS": f"{env['MAXTEXT_EXTRA_FLAGS']} {flags}"}
    with pytest.raises(BenchError, match=message):
        plan_launch(argv, orchestrator, env, 4, routing_load="1.2")


def test_orchestrator_flags_that_do_not_reach_the_trainer_are_listed():
    assert "--wandb_project" in orch().unread
    assert "--epsilon_high" not in orch().unread


@pytest.mark.parametrize(
    ("flag", "piece"),
    [
        ("--mesh_fdsp=32", "unrecognized arguments: --mesh_fdsp=32"),
        ("--mesh_fsdp=many", "invalid int value"),
        ("--trainer_backend=tunix", "not the MaxText trainer"),
        ("--use_lora", "trains all parameters"),
        ("--prefuse_moe_weights=perhaps", "true or false expected"),
    ],
)
def test_refused_flags(flag, piece):
    with pytest.raises(BenchError, match=piece):
        trainer(flag)


@pytest.mark.parametrize(
    ("flag", "piece"),
    [("--max_seq_token_per_tpu=4096", "shorter than the longest"), ("--train_micro_batch_size=33", "not a multiple")],
)
def test_refused_batches(flag, piece):
    with pytest.raises(BenchError, match=piece):
        bench_config.batch_plan(trainer(flag), orch())


def test_keys_of_build_maxtext_config():
    found = keys()
    wanted = {  # facts section 5.2, read off Tunix's builder
        "model_name": "qwen3.5-397b-a17b", "per_device_batch_size": "0.25", "max_target_length": "65536",
        "ici_fsdp_parallelism": "32", "ici_context_parallelism": "4", "ici_expert_parallelism": "2",
        "ici_tensor_parallelism": "1", "context_parallel_load_balance": "false", "attention": "flash",
        "remat_policy": "custom", "learning_rate": "1e-06", "adam_b2": "0.999", "adam_eps": "1e-08",
        "gradient_clipping_threshold": "0.125", "base_num_kv_heads": "2", "override_model_config": "true",
        "weight_dtype": "bfloat16", "grad_dtype": "float32", "float32_gate_logits": "True", "profiler_steps": "0",
        "trainable_parameters_mask": "^(?!.*routed_experts/gate/kernel).*", "skip_step_on_nan": "True",
        "checkpoint_storage_device_host_concurrent_gb": "8", "async_checkpointing": "true",
        "custom_mesh_and_rule": "cp-as-ep", "num_moe_token_chunks": "2",
    }  # fmt: skip
    assert {key: found.get(key) for key in wanted} == wanted


def test_extra_flags_come_last_and_win():
    assert (
        keys(env={"MAXTEXT_EXTRA_FLAGS": "attention=dot_product sa_block_q=8 sa_block_q=16"})["attention"]
        == "dot_product"
    )
    assert keys(env={"MAXTEXT_EXTRA_FLAGS": "sa_block_q=8 sa_block_q=16"})["sa_block_q"] == "16"
    assert keys(env={"MAXTEXT_EXTRA_FLAGS": "a=b=c"})["a"] == "b=c"
    with pytest.raises(BenchError, match="MAXTEXT_EXTRA_FLAGS: token 'oops' is not key=value"):
        keys(env={"MAXTEXT_EXTRA_FLAGS": "oops"})


def test_kv_heads_and_moe_width_follow_the_rollout():
    found = keys("--rollout_mesh_tp=4", name="launch_tiny", devices=4)
    assert found["base_num_kv_heads"] == "4"  # raised from 2 to the rollout's tensor parallelism
    assert found["padded_base_moe_mlp_dim"] == "1024"  # 512 padded so that each of 4 shards is 2 x 128 lanes
    assert bench_config.padded_moe_mlp_dim(1024, 1) == 1024


def test_context_counts_as_expert_parallel_under_cp_as_ep():
    args = trainer()
    settings = bench_config.maxtext_settings(
        args, bench_config.batch_plan(args, orch()), launch("launch_dryrun")[2], 256
    )
    assert bench_config.expert_layout(settings, 256) == bench_config.ExpertLayout(8, 32, 2, 4)
    plain = [setting for setting in settings if setting.key != "custom_mesh_and_rule"]
    assert bench_config.expert_layout(plain, 256).shards == 2


def test_dropped_keys_make_the_config_ours():
    argv, orchestrator, env = launch("launch_tiny")
    known = set(bench_config.effective(plan_launch(argv, orchestrator, env, 4).job.settings)) - {"packing"}
    with pytest.raises(BenchError, match="does not know packing"):
        plan_launch(argv, orchestrator, env, 4, known_keys=known)
    job = plan_launch(argv, orchestrator, env, 4, known_keys=known, drop_unknown=True).job
    assert job.own_config and job.not_the_same_program == [
        "MaxText key dropped, unknown here: packing=True (MAXTEXT_EXTRA_FLAGS)"
    ]
    assert "packing" not in bench_config.effective(job.settings)
    assert not plan_launch(argv, orchestrator, env, 4, known_keys=known | {"packing"}, drop_unknown=True).job.own_config


def test_mesh_axes_of_the_extra_flags_count():
    argv, orchestrator, env = launch("launch_tiny")
    flags = "ici_data_parallelism=3 ici_fsdp_parallelism=-1 ici_expert_parallelism=4"
    args = bench_config.parse_trainer_argv(argv)
    plan = bench_config.batch_plan(args, bench_config.parse_orch_argv(orchestrator))
    settings = bench_config.maxtext_settings(args, plan, {"MAXTEXT_EXTRA_FLAGS": flags}, 24)
    assert bench_config.expert_layout(settings, 24) == bench_config.ExpertLayout(4, 3 * 2, 1, 1)  # fsdp: 24 / 3 / 4
    smoke = plan_launch(argv, orchestrator, {"MAXTEXT_EXTRA_FLAGS": flags}, 4, cpu_smoke=True)
    assert smoke.routing.shards * smoke.routing.row_groups == 4  # the CPU's own mesh
    assert {item.what for item in smoke.shrunk} >= {"ici_data_parallelism", "ici_fsdp_parallelism"}


def test_smoke_keeps_what_a_laptop_can_keep_and_says_the_rest():
    argv, orchestrator, env = launch("launch_dryrun")
    plan = plan_launch(argv, orchestrator, env, 4, cpu_smoke=True)
    assert (plan.batch.rows, plan.batch.row_width, plan.batch.packed) == (8, 256, True)
    assert plan.batch.micro_batches(8) == 4  # as many as the launch has with full rows
    changed = {item.what: (item.was, item.now) for item in plan.shrunk}
    assert changed["--mesh_fsdp"] == ("32", "2")
    assert changed["--mesh_context"] == ("4", "1")
    assert changed["num_experts"] == ("(model file or base.yml)", "8")
    assert plan.job.orch.epsilon_high == 0.28  # the loss is the launch's own


def test_plan_needs_a_model_that_has_sizes():
    argv, orchestrator, env = launch("launch_dryrun")
    with pytest.raises(BenchError, match="does not say base_num_decoder_layers"):
        plan_launch([*argv, "--maxtext_model_name=default"], orchestrator, env, 256)


def test_model_sizes_come_from_maxtexts_file():
    argv, orchestrator, env = launch("launch_dryrun")
    assert plan_launch(argv, orchestrator, env, 256).sizes == bench_config.ModelSizes(60, 512, 10, 248_320)


@pytest.mark.parametrize(("model", "experts"), [("llama3.1-8b", 1), ("qwen3.5-35b-a3b", 8)])
def test_a_smoke_run_keeps_a_dense_model_dense(model, experts):
    pytest.importorskip("maxtext", reason="MaxText is not installed")
    settings, shrunk = bench_config.cpu_settings([bench_config.Setting("model_name", model, "test")], None)
    assert bench_config.model_sizes(settings).num_experts == experts
    assert ("num_experts" in {item.what for item in shrunk}) is (experts > 1)
