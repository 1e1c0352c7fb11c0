"""Stands in for aot_compile.py in tests: reads a job and does what its `act` says, in milliseconds."""

from __future__ import annotations

import json
import os
import signal
import sys
import time


def main() -> int:
    """Play one child."""
    job = json.loads(sys.stdin.readline())
    act = job.get("act", "compile")

    def say(**event):
        print(json.dumps(event), flush=True)

    if act == "refuse-flag":
        print("ERROR: Unknown command line flag 'xla_tpu_no_such_flag'", file=sys.stderr)
        return 1
    if act == "events":  # replay what a real child said
        with open(job["events"], encoding="utf-8") as stream:
            lines = stream.read().splitlines()
        for line in lines:
            if '"status": "compiled"' in line:
                sys.stdin.readline()
            print(line, flush=True)
        return 0
    name = job["kernels"][0]
    say(event="built", seconds=0.1)
    say(event="lowered", seconds=0.2, kernels={name: {"lowered_operations": 1000}})
    sys.stdin.readline()
    if act == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if act == "abort":
        print("F1130 06:00:00.0 12 llo_module.cc:76] Check failed: TakeStatus() is OK", file=sys.stderr, flush=True)
        os.abort()
    if act == "hang":
        time.sleep(60)
    say(event="result", status="compiled", seconds=0.3, go_at=time.monotonic())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
