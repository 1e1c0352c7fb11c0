"""The knobs check: what a numerics option does to loss, log-probs, router, gradients and one update.

Each setting is run as MaxText's engine runs it (fwd_bwd, update) and once forward, and held against two others: the
launch's own setting, and float32 throughout. Between them stands the noise floor: the launch's own program with the
hidden features and the rows in other orders, which is the same mathematics in other orders of summation.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import bench_config
import numerics_measures as measures
from bench_common import BenchError
from numerics_checks import Finding, at_most, more_than, rounded

TRUTH = ("true", "false")
FLOATS = ("float32", "bfloat16")
# Numerics options of MaxText and the values to try against each other.
KNOBS: dict[str, tuple[str, ...]] = {
    "float32_gate_logits": TRUTH, "float32_logits": TRUTH, "float32_qk_product": TRUTH, "float32_weight_sum": TRUTH,
    "logits_dot_in_fp32": TRUTH, "cast_logits_to_fp32": TRUTH, "activations_in_float32": TRUTH,
    "normalize_embedding_logits": TRUTH, "cast_grads_after_all_reduce": TRUTH, "dtype": FLOATS, "weight_dtype": FLOATS,
    "grad_dtype": FLOATS, "mu_dtype": FLOATS, "grad_accumulation_dtype": FLOATS,
    "matmul_precision": ("default", "highest"), "remat_policy": ("full", "minimal"), "num_vocab_tiling": ("1", "2"),
}  # fmt: skip
# Options that change numerics but are kernels or layouts of a TPU; a CPU runs neither side of them.
TPU_KNOBS = (
    "quantization", "attention", "sparse_matmul", "megablox", "use_tokamax_gmm", "use_gmm_v2", "use_tokamax_splash",
    "use_splash_scheduler", "sa_fuse_reciprocal", "sa_use_base2_exp", "dq_reduction_steps", "use_ring_of_experts",
    "num_moe_token_chunks", "use_ragged_sort", "use_custom_sort_vjp", "use_gdn_kernel", "gdn_cp_mode",
    "context_parallel_strategy", "ring_of_experts_row_major_reduce_scatter", "merge_gating_gmm", "moe_chunk_pipeline",
)  # fmt: skip
REFERENCE = ("dtype=float32", "weight_dtype=float32", "grad_dtype=float32", "mu_dtype=float32", "num_vocab_tiling=1",
             "float32_gate_logits=true", "float32_logits=true", "float32_qk_product=true", "matmul_precision=highest",
             "logits_dot_in_fp32=true")  # fmt: skip
WIDTHS = (12, 11, 10, 8, 10, 12, 10)  # of the table's columns
DRAWS = 3  # orders of summation that make up the noise floor
NOISE_FACTOR = 4.0  # times the floor still counts as noise: the floor is the largest of a few draws


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one setting gives."""

    loss: float
    logps: np.ndarray  # of scored tokens
    logits: np.ndarray  # [scored tokens, V]
    experts: np.ndarray  # bool [tokens, experts], the router's own choice
    grads: dict[str, np.ndarray]
    update: dict[str, np.ndarray]  # weights after two updates, less before


@dataclasses.dataclass(frozen=True)
class Distance:
    """How far one outcome is from another."""

    loss_ulps: float
    logp_ulps_max: float
    logp_ulps_p999: float
    logp_nats_max: float
    kl_nats_max: float
    router_flips: float  # share of tokens
    grad_ulps_max: float
    grad_ulps_p999: float
    grad_relative: float
    grad_cosine: float
    update_relative: float

    def as_dict(self) -> dict[str, float]:
        """Return the fields by name, unit in the name where there is one."""
        return dataclasses.asdict(self)


def distance(a: Outcome, b: Outcome) -> Distance:
    """Return how far `a` is from `b`."""
    logps = measures.summary(measures.ulps(a.logps, b.logps))
    grads = measures.summary(measures.leaf_ulps(a.grads, b.grads))
    return Distance(
        loss_ulps=float(measures.ulps(a.loss, b.loss)), logp_ulps_max=logps["max"], logp_ulps_p999=logps["p99.9"],
        logp_nats_max=float(np.abs(a.logps.astype(np.float64) - b.logps).max()),
        kl_nats_max=float(measures.kl_divergence(b.logits, a.logits).max()),
        router_flips=measures.flip_share(a.experts, b.experts), grad_ulps_max=grads["max"],
        grad_ulps_p999=grads["p99.9"], grad_relative=measures.relative_error(a.grads, b.grads),
        grad_cosine=measures.cosine(a.grads, b.grads), update_relative=measures.relative_error(a.update, b.update),
    )  # fmt: skip


def farthest(distances: Sequence[Distance]) -> Distance:
    """Return the largest of every measure, and the smallest cosine."""
    columns = {name: [one.as_dict()[name] for one in distances] for name in distances[0].as_dict()}
    return Distance(**{name: min(found) if name == "grad_cosine" else max(found) for name, found in columns.items()})


def verdict(apart: Distance, floor: Distance) -> str:
    """Return `bit identical`, `within noise`, or `changes numerics` with the figure that says so."""
    sizes, noise = apart.as_dict(), floor.as_dict()
    sizes.pop("grad_cosine"), noise.pop("grad_cosine")
    if not any(sizes.values()):
        return "bit identical"
    # KL and relative errors of float32 results have a floor of their own: the rounding of float32 itself.
    least = {"kl_nats_max": 1e-12, "grad_relative": 2.0**-24, "update_relative": 2.0**-24, "logp_nats_max": 2.0**-21}
    ratios = {name: size / max(noise[name], least.get(name, 1.0 if "ulps" in name else 1e-9))
              for name, size in sizes.items()}  # fmt: skip
    worst = max(ratios, key=lambda name: ratios[name])
    if ratios[worst] <= NOISE_FACTOR:
        return "within noise"
    return f"changes numerics: {worst} {sizes[worst]:.3g}, {ratios[worst]:.3g} x the noise floor"


def launch_values(settings: Sequence[bench_config.Setting]) -> dict[str, str]:
    """Return KEY -> value of the launch's own numerics options, before --cpu-smoke's changes."""
    own = bench_config.effective([setting for setting in settings if setting.source != "cpu-smoke"])
    return {key: own[key].value.strip().lower() for key in (*KNOBS, *TPU_KNOBS) if key in own}


def alternative(key: str, value: str) -> str | None:
    """Return the value to try against the launch's; None where there is none to try."""
    return next((other for other in KNOBS.get(key, ()) if other != value), None)


def run_setting(lab: Any, changes: Sequence[str], draw: int | None = None, spoil: bool = False) -> Outcome:
    """Run one setting: forward, two micro-batches accumulated, and two updates (the first does not see mu_dtype).

    Args:
      changes: KEY=VALUE, later ones win.
      draw: None, or the number of another order of hidden features and rows; the outcome is in the first order again.
      spoil: round the weights of the forward pass through float8 first, which must show.

    Raises:
      BenchError: MaxText refuses the setting on a CPU.
    """
    import jax

    model = lab.model(*changes)
    batches = [lab.batch(packed=True, index=index) for index in (0, 1)]
    rows, features = slice(None), np.arange(model.config.emb_dim)
    if draw is not None:
        rows, features = slice(None, None, -1), np.random.default_rng(draw).permutation(features)
    given = [{name: value[rows] if isinstance(value, np.ndarray) else value for name, value in batch.items()}
             for batch in batches]  # fmt: skip
    change, back = model.permute(features), np.argsort(features)
    with model.context():
        params = jax.tree.map(change, model.params)
    params = rounded(params, to="float8_e4m3fn") if spoil else params
    free = {**given[0], "routed_experts": None}
    forward = model.view(free, chunk=model.chunk, grads=False, logits=True, params=params)
    used = model.which_experts(free, params)[rows]
    trainer = lab.trainer(model)
    with model.context():
        trained = trainer.train(given, updates=2, change=change, from_zero=True)
    moved = {name: reorder(values, back) - trainer.weights[name] for name, values in trained.weights.items()}
    scored, real = batches[0]["completion_mask"] > 0, batches[0]["segment_ids"][:, :-1] > 0
    grads = {name: reorder(values, back) for name, values in trained.grads.items()}
    logps, logits = forward.logps[rows][scored], forward.logits[rows][scored[:, 1:]]
    return Outcome(float(trained.losses[0]), logps, logits, used[real], grads, moved)


def reorder(values: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Return an array with every axis of this length in this order."""
    for axis, size in enumerate(values.shape):
        values = np.take(values, order, axis=axis) if size == len(order) else values
    return values


@dataclasses.dataclass(frozen=True)
class Row:
    """One knob: what was tried, and how far it is from the launch's setting and from float32."""

    knob: str  # KEY=FROM -> TO
    verdict: str
    asked: bool  # given with --knob: `changes numerics` then counts as different
    to_launch: Distance | None = None
    to_float32: Distance | None = None
    moves: str = ""  # nearer to float32, or further away


def measure(lab: Any, asked: Mapping[str, str], known: set[str], spoil: bool = False) -> tuple[list[Row], Distance]:
    """Return a row for each numerics option of the launch and each one asked for, and the noise floor."""
    values = launch_values(lab.launch.job.settings)
    here = {key: value for key, value in values.items() if key in KNOBS and key in known and _runs_here(key, value)}
    base = [f"{key}={value}" for key, value in here.items()]
    launch, reference = run_setting(lab, base), run_setting(lab, REFERENCE)
    floor = farthest([distance(run_setting(lab, base, draw), launch) for draw in range(DRAWS)])
    again = distance(run_setting(lab, base, spoil=spoil), launch)
    rows = [Row("(the launch's own)", "the setting itself", False, again, distance(launch, reference))]
    tried = {} if spoil else dict(asked) | {key: asked.get(key, "") for key in values}
    for key, value in tried.items():
        rows.append(_row(lab, key, values.get(key), value, base, launch, reference, floor, known))
    return rows, floor


def _runs_here(key: str, value: str) -> bool:
    return value in KNOBS[key] or key in ("num_vocab_tiling",)


def _row(lab: Any, key: str, own: str | None, asked: str, base: list[str], launch: Outcome, reference: Outcome,
         floor: Distance, known: set[str]) -> Row:  # fmt: skip
    to = asked or alternative(key, own or "")
    name = f"{key}={own or '(default)'} -> {to or '?'}"
    if key not in known:
        return Row(name, "unknown here: not an option of the installed MaxText", bool(asked))
    if key in TPU_KNOBS:
        return Row(name, "unknown here: a TPU kernel or layout, which a CPU does not run", bool(asked))
    if to is None:
        return Row(name, "unknown here: its value needs a TPU's memory spaces", bool(asked))
    try:
        outcome = run_setting(lab, [*base, f"{key}={to}"])
    except (BenchError, NotImplementedError, ValueError) as error:
        return Row(name, f"unknown here: {str(error).splitlines()[0][:160]}", bool(asked))
    apart, off = distance(outcome, launch), distance(outcome, reference)
    before = distance(launch, reference).grad_relative
    moves = (
        ""
        if not before or not off.grad_relative
        else f"gradient error against float32 x {off.grad_relative / before:.3g}"
    )
    return Row(name, verdict(apart, floor), bool(asked), apart, off, moves)


def findings(rows: Sequence[Row], floor: Distance) -> list[Finding]:
    """Return what counts for the exit code: the control, the launch against float32, and the knobs asked for."""
    own = rows[0]
    found = [
        at_most("the noise floor of the gradient", floor.grad_relative, 0.1, "relative",
                "another order of summation is rounding; more would be another model"),
        at_most("the same program twice", max(v for k, v in own.to_launch.as_dict().items() if k != "grad_cosine"), 0,
                "any measure", "one program on one machine is deterministic"),
        more_than("the launch's gradient against float32", own.to_float32.grad_cosine, 0.99, "cosine",
                  "bfloat16 keeps 8 bits: an error of 2^-8 in each factor turns a gradient by about 1 %"),
        at_most("the launch's log-probs against float32", own.to_float32.logp_nats_max, 0.25, "nats",
                "a ratio of exp(0.25) is the edge of a clip at 0.28: beyond it rounding alone clips tokens"),
    ]  # fmt: skip
    for row in rows[1:]:
        if row.asked:
            ok = not row.verdict.startswith("changes numerics")
            value = None if row.to_launch is None else row.to_launch.grad_relative
            why = f"{NOISE_FACTOR:g} x the launch's own noise floor"
            found.append(Finding(f"{row.knob}: {row.verdict}", value, "relative gradient error", "within noise", why,
                                 "pass" if ok else "FAIL"))  # fmt: skip
    return found


def lines(rows: Sequence[Row], floor: Distance) -> list[str]:
    """Return the table as text, at most 80 columns."""
    names = zip(("logp ulps", "logp nats", "KL nats", "flips", "grad err", "cosine", "update"), WIDTHS, strict=True)
    head = "    " + "".join(f"{name:>{width}}" for name, width in names)
    found = ["knobs: distance to the launch's own setting (L), to float32 (F), noise (N)", head, _line("N", floor)]
    for row in rows:
        found.append(f"{row.knob}: {row.verdict}")
        if row.to_launch is not None:
            found += [_line("L", row.to_launch), _line("F", row.to_float32)]
        if row.moves:
            found.append(f"    {row.moves}")
    return found


def _line(name: str, d: Distance) -> str:
    cosine = "?" if math.isnan(d.grad_cosine) else f"{d.grad_cosine:.7f}"
    cells = (f"{d.logp_ulps_max:.6g}", f"{d.logp_nats_max:.2e}", f"{d.kl_nats_max:.1e}", f"{d.router_flips:.2%}",
             f"{d.grad_relative:.1e}", cosine, f"{d.update_relative:.1e}")  # fmt: skip
    return f"  {name:<2}" + "".join(f"{cell:>{width}}" for cell, width in zip(cells, WIDTHS, strict=True))


FAULTS = {"rounded weights": "the second of two equal runs has its weights rounded to float8"}


@dataclasses.dataclass
class KnobCheck:
    """The check as check_numerics_cpu runs it; keeps the rows and their table for the report."""

    asked: Mapping[str, str]
    known: set[str]
    name: str = "knobs"
    doc: str = "Every numerics option of the launch, and each --knob, against float32 and against the launch itself."
    faults: Mapping[str, str] = dataclasses.field(default_factory=lambda: dict(FAULTS))
    table: list[str] = dataclasses.field(default_factory=list)
    rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def run(self, lab: Any, fault: str = "") -> list[Finding]:
        """Measure and return the findings that count; with a fault only the control is run."""
        rows, floor = measure(lab, self.asked, self.known, spoil=bool(fault))
        self.table = lines(rows, floor)
        self.rows = [{"knob": "(noise floor)", **floor.as_dict()}, *(_as_dict(row) for row in rows)]
        return findings(rows, floor)


def _as_dict(row: Row) -> dict[str, Any]:
    found: dict[str, Any] = {"knob": row.knob, "verdict": row.verdict, "asked": row.asked, "note": row.moves}
    for name, apart in (("to_launch", row.to_launch), ("to_float32", row.to_float32)):
        found[name] = None if apart is None else apart.as_dict()
    return found


def make_check(asked: Mapping[str, str], known: set[str]) -> KnobCheck:
    """Return the check for these --knob values on a MaxText that knows these keys."""
    return KnobCheck(asked, known)
