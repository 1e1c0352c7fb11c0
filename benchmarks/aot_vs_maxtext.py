"""Time aot_bench against MaxText's own maxtext_engine_compile: three kernels of one dense model, for v5e-4, in one run.

MaxText compiles its three kernels one after the other in one process; aot_bench starts a process per kernel, so that a
crash costs one kernel, and must not pay for that in wall time: the next process imports and lowers while the one before
compiles. Both get the same MaxText keys; MaxText's loss is its cross-entropy, aot_bench's is GRPO. Seconds of wall
clock from start to exit, imports and all, least of --repeats.

Exit codes: 0 one job takes at most as long as MaxText's own; 1 longer; 2 could not run.

Examples:
  python benchmarks/aot_vs_maxtext.py
  python benchmarks/aot_vs_maxtext.py --repeats 3 --json
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

LIMIT = 1.0  # x the wall time of maxtext_engine_compile
TOKENS, ROWS = 512, 4
MODEL = "override_model_config=true base_num_decoder_layers=2 vocab_size=32768 num_vocab_tiling=1"
TRAINER = (
    "--trainer_backend=maxtext --maxtext_model_name=qwen3-0.6b --mesh_fsdp=4 --max_prompt_length=128 "
    f"--max_response_length={TOKENS - 128} --max_seq_token_per_tpu={TOKENS} --train_micro_batch_size={ROWS} "
    "--maxtext_attention=flash --remat_policy=full --compute_logps_chunk_size=128"
)
ORCH = f"--batch_size=4 --num_generations=4 --max_seq_token_per_tpu={TOKENS} --max_segments_per_packed_row=4"
# google-tunix of PyPI lacks four names that MaxText imports: tunix_standin has them.
MAXTEXT = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import tunix_standin
tunix_standin.install()
from absl import app
from maxtext.training_engine import maxtext_engine_compile
app.run(maxtext_engine_compile.main)
"""


def maxtext_argv() -> list[str]:
    """Return the argv of MaxText's compile with the keys that aot_bench would pass."""
    import bench_config
    from bench_plan import plan_launch

    plan = plan_launch(TRAINER.split(), ORCH.split(), {"MAXTEXT_EXTRA_FLAGS": MODEL}, 4, routing_load="none")
    left_out = (*bench_config.TUNIX_ONLY_KEYS, "base_output_directory", "enable_checkpointing", "checkpoint_period",
                "max_num_checkpoints_to_keep")  # fmt: skip
    keys = [str(setting) for setting in plan.job.settings if setting.key not in left_out]
    base = os.path.join(bench_config.maxtext_configs(), "base.yml")
    ours = "compile_topology=v5e-4 compile_topology_num_slices=1 jax_cache_dir='' enable_checkpointing=false"
    return [sys.executable, "-c", MAXTEXT, str(ROOT), base, *keys, *ours.split()]


def timed(command: list[str], env: dict[str, str], log: pathlib.Path) -> float:
    """Return the wall seconds of a command; its output goes to a file.

    Raises:
      SystemExit: it failed.
    """
    begin = time.perf_counter()
    with open(log, "wb") as stream:
        code = subprocess.run(command, env=env, cwd=log.parent, stdout=stream, stderr=stream).returncode
    if code:
        print(f"aot_vs_maxtext: {log.stem} ended with {code}; its output:", file=sys.stderr)
        print(log.read_text(errors="replace")[-3000:], file=sys.stderr)
        raise SystemExit(2)
    return time.perf_counter() - begin


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=1, help="runs of each (default: 1)")
    parser.add_argument("--keep", metavar="DIR", help="keep the logs there")
    parser.add_argument("--json", action="store_true", help="write one JSON document")
    options = parser.parse_args(argv)
    import aot_children

    env = {**os.environ, **aot_children.QUIET}
    for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_COMPILATION_CACHE_DIR"):
        env.pop(name, None)
    ours = [sys.executable, str(ROOT / "aot_bench.py"), "--trainer-argv", TRAINER, "--orch-argv", ORCH,
            "--slice", "v5e-4", "--json"]  # fmt: skip
    commands = {"maxtext": maxtext_argv(), "jobs1": [*ours, "--jobs", "1"], "jobs2": [*ours, "--jobs", "2"]}
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    with tempfile.TemporaryDirectory() as folder:
        place = pathlib.Path(options.keep or folder)
        place.mkdir(parents=True, exist_ok=True)
        for _ in range(options.repeats):
            for name, command in commands.items():
                flags = {} if name == "maxtext" else {"MAXTEXT_EXTRA_FLAGS": MODEL}
                seconds[name].append(timed(command, {**env, **flags}, place / f"{name}.log"))
    best = {name: min(times) for name, times in seconds.items()}
    ratio = best["jobs1"] / best["maxtext"]
    if options.json:
        found = {"schema": "aot-vs-maxtext/1", "seconds": best, "jobs1_over_maxtext": ratio, "limit": LIMIT,
                 "jobs2_over_maxtext": best["jobs2"] / best["maxtext"], "met": ratio <= LIMIT}  # fmt: skip
        print(json.dumps(found, indent=2))
        return 0 if ratio <= LIMIT else 1
    print(f"maxtext_engine_compile      {best['maxtext']:7.1f} s")
    print(f"aot_bench --jobs 1          {best['jobs1']:7.1f} s   {ratio:.2f} x (at most {LIMIT:.2f})")
    print(f"aot_bench --jobs 2          {best['jobs2']:7.1f} s   {best['jobs2'] / best['maxtext']:.2f} x")
    return 0 if ratio <= LIMIT else 1


if __name__ == "__main__":
    raise SystemExit(main())
