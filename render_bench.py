#!/usr/bin/env python3
"""Render the JobSet of a trainer bench out of a Tunix launcher's dry run.

The bench is the trainer JobSet of that launch with its scheduling fields and Pathways containers, field for
field, under a name of its own, never restarted, and with a client that runs bench_driver.py on the trainer's
own environment and flags. What else is to differ is asked for below; a second pass compares input and output
and prints nothing if anything changed that was not.

Input: the launcher's DRY_RUN=true output, log lines and all (`-` is stdin; default $LAUNCH_RENDER).
Output: the JobSet as YAML on stdout, or in --out; on stderr every change as `field: old -> new`.
Not carried over: secrets (HF_TOKEN ...), the orchestrator's address, weight sync, saving of checkpoints; the
output directory and the run's name become the bench's own.
Exit status: 0 rendered; 2 could not be rendered, nothing printed.

Examples:
  # the trainer as it is, for fifteen steps
  DRY_RUN=true ./launch.sh | render_bench.py --launch-render - --name base --steps 15 | kubectl apply -f -
  # two MaxText flags changed, one libtpu flag on a smaller slice
  render_bench.py --launch-render run.yaml --name flags-a --maxtext num_moe_token_chunks=4 --maxtext sa_block_q=512
  render_bench.py --launch-render run.yaml --name half --slice tpu7x:4x4x4 --trainer-arg mesh_fsdp=16 \\
      --orch-arg trainer_fsdp=16 --libtpu xla_tpu_scoped_vmem_limit_kib=81920 | diff_render.py run.yaml -
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

from bench_common import EXIT_OK, BenchError, complain, decode, emit, read_bytes, run_tool, shown_name, write_whole

TOOL = "render_bench"


class _EditAction(argparse.Action):
    """Collects --maxtext, --maxtext-unset ... into one list, because their order counts."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        namespace.edits = [*namespace.edits, (self.option_strings[0], values)]


def build_parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(
        prog=TOOL, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--launch-render", metavar="FILE|-", default=os.environ.get("LAUNCH_RENDER"), help="default: $LAUNCH_RENDER")
    add("--name", required=True, help="of the bench's JobSet, its gang and its run")
    add("--trainer", metavar="NAME", help="which trainer JobSet, where there are several")
    add("--orch-render", metavar="FILE", help="another capture, with the orchestrator")
    add("--orch-defaults", action="store_true", help="there is no orchestrator: take the loss options' defaults")
    add("--out", metavar="FILE", help="write the JobSet there (default: stdout)")
    add("--quiet", action="store_true", help="no summary of the changes on stderr")
    parser.set_defaults(edits=[])
    edits = parser.add_argument_group("changes of flags (repeatable; the last one of a name counts)")
    what = {
        "maxtext": ("KEY=VALUE", "a key of MAXTEXT_EXTRA_FLAGS"),
        "libtpu": ("FLAG=VALUE", "a libtpu/XLA flag, in client, workers and proxy"),
        "trainer-arg": ("FLAG[=VALUE]", "a flag of the trainer"),
        "orch-arg": ("FLAG[=VALUE]", "a flag of the orchestrator (the loss options)"),
        "env": ("NAME=VALUE", "a variable of the client"),
    }
    for kind, (metavar, text) in what.items():
        edits.add_argument(f"--{kind}", action=_EditAction, metavar=metavar, help=f"set {text}")
        if kind != "env":
            name = metavar.partition("=")[0].rstrip("[")
            edits.add_argument(f"--{kind}-unset", action=_EditAction, metavar=name, help="remove it")
    _add_job_options(parser)
    _add_driver_options(parser)
    return parser


def _add_job_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("changes of the job").add_argument
    add("--slice", metavar="TYPE:TOPOLOGY", help="another TPU slice, such as tpu7x:4x4x8")
    add("--image", help="of the client's container")
    add("--namespace", help="of the JobSet")
    add("--queue", metavar="NAME", help="Kueue's local queue")
    add("--priority", metavar="CLASS", help="priorityClassName of all pods")
    add("--output-directory", metavar="DIR", help="default: bench/NAME beside the trainer's")
    add("--load-checkpoint", choices=("keep", "none"), default="keep", help="the trainer's weights (default: keep)")
    add("--sidecars", choices=("keep", "init"), default="keep",
        help="init: make the Pathways sidecars of the head end with the client (default: keep)")  # fmt: skip
    add("--keep-secret", action="append", default=[], metavar="NAME", help="carry this secret over (repeatable)")


def _add_driver_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("what the driver does (see bench_driver.py --help)").add_argument
    add("--steps", metavar="N", help="optimizer steps")
    add("--warmup", metavar="N", help="opening steps to exclude")
    add("--micro-batches", metavar="N", help="micro-batches of a step")
    add("--seed", metavar="N", help="of the micro-batches")
    add("--profile", metavar="FIRST:COUNT", help="trace these steps")
    add("--routing-load", metavar="SPEC", help="the MoE routing load; a file's content travels with the driver")
    add("--stage-before-update", action="store_true", help="stage the next step's input before the update")
    add("--driver", metavar="FILE", default=os.path.join(os.path.dirname(os.path.abspath(__file__)), "bench_driver.py"),
        help="the driver to embed (default: bench_driver.py beside this file)")  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Render a bench; return the exit status."""
    args = build_parser().parse_args(_join_dashes(sys.argv[1:] if argv is None else argv))
    return run_tool(TOOL, lambda: _run(args))


def _join_dashes(argv: Sequence[str]) -> list[str]:
    """Let `--libtpu --xla_flag=1` be written as it is: argparse would take the value for an option of its own."""
    takes_dashes = r"--(libtpu|trainer-arg|orch-arg)(-unset)?|--keep-secret"
    joined: list[str] = []
    for word in argv:
        if joined and re.fullmatch(takes_dashes, joined[-1]) and word.startswith("-"):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def _run(args: argparse.Namespace) -> int:
    import hashlib

    # Imported here, so that --help and a mistyped option are answered at once.
    import kube_yaml
    import render_check
    import render_edit
    import render_plan
    import render_report
    from launch_render import MAX_RENDER_BYTES, read_render

    if not args.launch_render:
        raise BenchError("no launch render", todo="give --launch-render FILE, - for stdin, or $LAUNCH_RENDER")
    data = read_bytes(args.launch_render, MAX_RENDER_BYTES)
    source = shown_name(args.launch_render)
    launch = read_render(decode(data, source), source)
    trainer = render_plan.find_trainer(launch, args.trainer)
    orch_argv = render_plan.orchestrator_argv(args, launch, trainer.client)
    plan = render_plan.make_plan(args, trainer, launch, hashlib.sha256(data).hexdigest())
    render_plan.check_trainer(trainer, plan)
    document = render_edit.render(trainer, orch_argv, plan)
    text = kube_yaml.dump(document)
    changes = render_check.changes(trainer, orch_argv, plan, text)
    if args.out and args.out != "-":
        write_whole(args.out, text)
    else:
        emit(text)
    lines = [] if args.quiet else [*launch.notes, *render_report.summary(trainer, plan, changes)]
    for line in lines + render_report.warnings(trainer, orch_argv, plan, document, changes):
        complain(TOOL, line)
    return EXIT_OK


if __name__ == "__main__":
    raise SystemExit(main())
