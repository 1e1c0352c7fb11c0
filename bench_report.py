"""What a driver run says: the result document, the line of a step, the table, the verdict, the plot.

The JSON document (`schema: trainer-bench/1`) and the text are made from the same records, so that they cannot
disagree. Seconds, bytes and tokens are in the key names; unknown is null.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import bench_stats
from bench_common import MASKED, dump_json, is_secret, mask

SCHEMA = "trainer-bench/1"
DEVICES_PER_CHIP = {"TPU v2": 2, "TPU v3": 2, "TPU7x": 2}  # jax device_kind; every other TPU has one (jax tpu_info.py)
PROVENANCE = "BENCH_"  # what render_bench.py writes into the client's environment


@dataclasses.dataclass
class StepRecord:
    """One optimizer step as it was measured. All times are seconds."""

    index: int
    seconds: float  # first dispatch to the end of the metrics fetch
    update_ready_seconds: float  # first dispatch to the update's readiness on the device
    dispatch_seconds: float  # host time inside fwd_bwd and update; blocks when two computations are in flight
    metrics_seconds: float
    fwd_bwd_seconds_throttled: list[
        float
    ]  # host time of each call: once two computations are in flight, the throttle's
    longest_call_seconds: float
    longest_call: str
    gc_seconds: float  # Python's garbage collector
    device_wait_seconds: float | None  # at the staged boundary; null when nothing was staged
    h2d_seconds: float | None  # placing the staged micro-batch; null where transfers hide in dispatch
    compiles: list[dict[str, Any]]  # program, seconds
    losses: list[float]
    micro_batches_differ: bool  # in the loss or any other metric of the loss
    gradient_norm: float | None
    gradient_share: float | None  # of scored tokens, past the loss's gates, estimated from its own metrics
    profiled: bool = False

    def time(self) -> bench_stats.StepTime:
        """Return the record as the statistics take it."""
        return bench_stats.StepTime(self.index, self.seconds, bool(self.compiles), "profiled" if self.profiled else "")


def step_line(step: StepRecord, total: int | None) -> str:
    """Return the line printed when a step ends."""
    of = f"/{total}" if total else ""
    loss = f"{min(step.losses):.4g}..{max(step.losses):.4g}" if step.losses else "?"
    norm = "?" if step.gradient_norm is None else f"{step.gradient_norm:.4g}"
    notes = [f"{len(step.compiles)} compiles {sum(c['seconds'] for c in step.compiles):.1f} s"] if step.compiles else []
    notes += ["profiled"] if step.profiled else []
    return ", ".join([f"step {step.index}{of}: {step.seconds:.4f} s", f"loss {loss}", f"grad norm {norm}", *notes])


def headline(summary: bench_stats.Summary, job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the headline: median step time, its interval, and rates over real tokens and over slots.

    Args:
      summary: of the run's steps.
      job: slots_per_step, real_tokens_per_step, devices, devices_per_chip.
    """

    def rate(tokens: float | None) -> float | None:
        return None if summary.median is None or tokens is None else tokens / summary.median

    def rate_per_chip(tokens: float | None) -> float | None:
        if summary.median is None or tokens is None:
            return None
        return bench_stats.per_chip(tokens, summary.median, job["devices"], job["devices_per_chip"])

    real, slots = job["real_tokens_per_step"], job["slots_per_step"]
    return {
        "median_step_seconds": summary.median, "ci95_low_seconds": summary.low, "ci95_high_seconds": summary.high,
        "ci95_half_width": summary.half_width, "spread_max_min_over_median": summary.spread, "mad_seconds": summary.mad,
        "drift_over_window": summary.drift, "measured_steps": summary.window.indexes,
        "excluded_steps": {str(index): why for index, why in sorted(summary.window.excluded.items())},
        "real_tokens_per_second": rate(real), "slots_per_second": rate(slots),
        "real_tokens_per_second_per_chip": rate_per_chip(real), "slots_per_second_per_chip": rate_per_chip(slots),
    }  # fmt: skip


def host_stalls(steps: Sequence[StepRecord], summary: bench_stats.Summary) -> list[str]:
    """Name the measured steps that one host call made slow, with nothing compiled: a stall is not device time."""
    if summary.median is None:
        return []
    found, usual = [], summary.median
    for step in (steps[i] for i in summary.window.indexes if i < len(steps)):
        excess = step.seconds - usual
        if excess <= max(0.05 * usual, 3.5 * bench_stats.MAD_TO_SIGMA * (summary.mad or 0)):
            continue
        if step.gc_seconds > excess / 2:
            found.append(f"step {step.index}: {step.gc_seconds:.2f} s in Python's garbage collector")
        elif step.longest_call_seconds > excess / 2 + usual / 2:
            found.append(
                f"step {step.index}: {step.longest_call_seconds:.2f} s of {step.seconds:.2f} s inside "
                f"{step.longest_call} without a compile (profiler export, checkpoint, host contention?)"
            )
    return found


def provenance(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what the renderer wrote about itself: sha256 of its input and of the driver, version, options."""
    return {name.removeprefix(PROVENANCE).lower(): value for name, value in sorted(environ.items())
            if name.startswith(PROVENANCE) and name != "BENCH_CPU_SMOKE"}  # fmt: skip


def config_document(config: Any) -> dict[str, Any]:
    """Return the resolved MaxText config as JSON values, secrets masked."""
    plain = (str, int, float, bool, type(None))
    keys = config.get_keys() if hasattr(config, "get_keys") else {}
    return {key: mask(key, value) if is_secret(key) and isinstance(value, str) else
            value if isinstance(value, plain) else str(value) for key, value in sorted(keys.items())}  # fmt: skip


def masked_argv(argv: Sequence[str]) -> list[str]:
    """Return words of `--name=value`, `--name value` or `name=value` with the values of secret names masked."""
    shown, hides_next = [], False
    for word in argv:
        name, equals, value = word.partition("=")
        if hides_next and not word.startswith("--"):
            shown.append(MASKED)
        else:
            shown.append(name + (f"={mask(name, value)}" if equals else ""))
        hides_next = word.startswith("--") and not equals and is_secret(name)
    return shown


def flag_variables(environ: Mapping[str, str]) -> dict[str, str | None]:
    """Return the variables whose flags decide what was measured, secrets masked; None where one is not set."""
    names = ("MAXTEXT_EXTRA_FLAGS", "LIBTPU_INIT_ARGS", "XLA_FLAGS")
    return {name: " ".join(masked_argv(environ[name].split(" "))) if name in environ else None for name in names}


def device_memory(devices: Sequence[Any]) -> dict[str, Any]:
    """Return the peak bytes per device, and the fullest device; null where the backend reports none (CPU, Pathways)."""
    rows = []
    for device in devices:
        stats = _memory_stats(device)
        peak, limit = stats.get("peak_bytes_in_use"), stats.get("bytes_limit")
        rows.append({"id": device.id, "peak_bytes": peak, "limit_bytes": limit})
    peaks = [row["peak_bytes"] for row in rows if row["peak_bytes"] is not None]
    return {"peak_bytes_max": max(peaks, default=None), "devices": rows}


def _memory_stats(device: Any) -> dict[str, int]:
    try:
        return device.memory_stats() or {}
    except RuntimeError:  # JaxRuntimeError "only supported for addressable PjRt devices": all behind a Pathways proxy
        return {}


def claims(runtime: str | None, shrunk: bool, replayed: bool, routing: str, real_weights: bool) -> list[str]:
    """Return what the numbers may not be used to claim."""
    lines = ["anything about rollout, rewards, weight sync or the orchestrator: only the trainer ran"]
    if not replayed:
        lines.append("model quality or convergence: the micro-batches are synthetic")
    if routing == "none":
        lines.append("MoE load: the model's own router decided, on random tokens")
    elif not replayed:
        lines.append(f"production's routing beyond its load (--routing-load {routing}): the experts are synthetic")
    if not real_weights:
        lines.append("numerics of the trained model: the weights are random")
    if runtime == "standin":
        lines.append("speed or memory of Tunix from git: tunix_standin ran in its place")
    if shrunk:
        lines.append("anything about a TPU: --cpu-smoke shrank model, mesh and batch")
    return lines


def table(steps: Sequence[StepRecord], summary: bench_stats.Summary) -> str:
    """Return the table of steps, at most 80 columns; long runs show their ends."""
    inside = set(summary.window.indexes)
    lines = ["  step   seconds  to update  dispatch  compiles  grad norm  counted"]
    shown = list(steps) if len(steps) <= 24 else [*steps[:12], None, *steps[-11:]]
    for step in shown:
        if step is None:
            lines.append(f"   ...   ({len(steps) - 23} steps not shown; all are in the JSON)")
            continue
        norm = "?" if step.gradient_norm is None else f"{step.gradient_norm:.4g}"
        why = "yes" if step.index in inside else summary.window.excluded.get(step.index, "no")
        times = f"{step.seconds:9.4f} {step.update_ready_seconds:10.4f} {step.dispatch_seconds:9.4f}"
        lines.append(f"{step.index:6d} {times} {len(step.compiles):9d} {norm:>10}  {why}")
    return "\n".join(lines)


def closing_lines(document: Mapping[str, Any]) -> list[str]:
    """Return the headline and verdict as text."""
    head, lines = document["headline"], []
    if head["median_step_seconds"] is not None:
        doubt = "" if head["ci95_low_seconds"] is None else (
            f" (95 % CI {head['ci95_low_seconds']:.4f} to {head['ci95_high_seconds']:.4f})")  # fmt: skip
        count = len(head["measured_steps"])
        lines.append(
            f"median {head['median_step_seconds']:.4f} s per optimizer step{doubt}, {count} step{'s' * (count != 1)}"
        )
        rates = f"{head['slots_per_second_per_chip']:,.0f} slots/s/chip, "
        rates += f"{head['real_tokens_per_second_per_chip']:,.0f} real tokens/s/chip, "
        drift = "" if head["drift_over_window"] is None else f", drift {head['drift_over_window']:+.1%}"
        lines.append(f"{rates}spread {head['spread_max_min_over_median']:.1%}{drift}")
    lines.append(f"status: {document['status']}; verdict: {document['verdict']}")
    lines += [f"  because {reason}" for reason in document["reasons"]]
    lines += [f"  stall: {stall}" for stall in document["host_stalls"]]
    lines += [f"  not the same program: {line}" for line in document["not_the_same_program"]]
    lines += [f"  may not be used to claim {line}" for line in document["may_not_be_used_to_claim"]]
    return lines


def one_line(document: Any) -> str:
    """Return a document as one line of JSON."""
    return dump_json(document, indent=None)


def append_line(handle: int, document: Any) -> None:
    """Append one JSON line with a single write, so that a kill at any moment leaves whole lines."""
    os.write(handle, one_line(document).encode())


def plot(path: str, steps: Sequence[StepRecord], summary: bench_stats.Summary) -> bytes:
    """Return a drawing of the step times, the window and the interval, in the format that the path ends in.

    Needs matplotlib (extra `plot`).
    """
    import io

    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4))
    inside = set(summary.window.indexes)
    for counted, colour, label in ((True, "tab:blue", "measured"), (False, "tab:grey", "excluded")):
        chosen = [step for step in steps if (step.index in inside) == counted]
        axes.plot([s.index for s in chosen], [s.seconds for s in chosen], "o", color=colour, label=label)
    if summary.median is not None:
        axes.axhline(summary.median, color="tab:blue", linewidth=1)
    if summary.low is not None:
        axes.axhspan(summary.low, summary.high, alpha=0.2, label="95 % CI of the median")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("seconds")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.tight_layout()
    drawing = io.BytesIO()
    figure.savefig(drawing, format=path.rpartition(".")[2])
    pyplot.close(figure)
    return drawing.getvalue()
