"""The knobs check: what a numerics option does to loss, log-probs, router, gradients and one update.

Each setting is run as MaxText's engine runs it (fwd_bwd, update) and once forward, and held against two others: the
launch's own setting, and float32 throughout. Between them stands the noise floor: the launch's own program with the
hidden features and the rows in other orders, which is the same mathematics in other orders of summation.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import bench_config
import numerics_measures as measures
from bench_common import BenchError
from numerics_checks import Finding, always, at_most, more_than, rounded

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
COLUMNS = (  # of the table: the two lines of its head, and its width
    ("loss", "ulps", 7), ("logp", "ulps", 7), ("", "p99.9", 7), ("KL", "nats", 8), ("top-k", "flips", 6),
    ("grad", "ulps", 7), ("", "p99.9", 7), ("", "error", 8), ("", "cosine", 11), ("update", "error", 8),
)  # fmt: skip
DRAWS = 3  # orders of summation that make up the noise floor
OWN = "(the launch's own)"  # in place of a knob: the launch's setting run a second time
NOISE_FACTOR = 4.0  # times the floor still counts as noise: the floor is the largest of a few draws


SAME, NOISE, CHANGES, UNKNOWN = "bit identical", "within noise", "changes numerics", "unknown here"  # the verdicts


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


def over_noise(apart: Distance, floor: Distance) -> tuple[float, str]:
    """Return the largest measure in units of its noise floor, 0 where nothing differs, and which measure it is."""
    noise = floor.as_dict()
    # KL and relative errors of float32 results have a floor of their own: the rounding of float32 itself.
    least = {"kl_nats_max": 1e-12, "grad_relative": 2.0**-24, "update_relative": 2.0**-24, "logp_nats_max": 2.0**-21}
    ratios = {name: size / max(noise[name], least.get(name, 1.0 if "ulps" in name else 1e-9))
              for name, size in apart.as_dict().items() if name != "grad_cosine"}  # fmt: skip
    ratios = {name: math.inf if math.isnan(ratio) else ratio for name, ratio in ratios.items()}
    worst = max(ratios, key=lambda name: ratios[name])
    return ratios[worst], worst


def verdict(apart: Distance, floor: Distance) -> tuple[str, str]:
    """Return SAME, NOISE or CHANGES, and for CHANGES the figure that says so."""
    ratio, worst = over_noise(apart, floor)
    if ratio == 0:
        return SAME, ""
    if ratio <= NOISE_FACTOR:
        return NOISE, ""
    return CHANGES, f"{worst} {apart.as_dict()[worst]:.3g}, {ratio:.3g} x the noise floor"


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

    knob: str
    own: str | None  # the launch's value; None where it sets none
    tried: str | None
    verdict: str  # SAME, NOISE, CHANGES or UNKNOWN
    detail: str  # the figure of CHANGES, the reason of UNKNOWN
    asked: bool  # given with --knob: CHANGES then counts as different
    to_launch: Distance | None = None
    to_float32: Distance | None = None
    error_ratio: float | None = None  # gradient error against float32, over that of the launch's own setting

    @property
    def title(self) -> str:
        """The knob, what was tried and what came of it, in a line."""
        change = f"{self.knob}={self.own or '(default)'} -> {self.tried or '?'}" if self.knob != OWN else OWN
        return f"{change}: {': '.join(filter(None, [self.verdict, self.detail]))}"

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name, distances as dictionaries of their own."""
        return dataclasses.asdict(self)


def measure(
    lab: Any, asked: Sequence[tuple[str, str]], known: set[str], try_knobs: bool = True, spoil: bool = False
) -> tuple[list[Row], Distance]:
    """Return a row for the launch's setting, each one asked for and each numerics option of the launch; and the noise.

    Args:
      asked: (key, value) of each --knob.
      known: keys of the installed MaxText.
      try_knobs: False runs the launch's setting and float32 alone.
      spoil: make the launch's second run another one, which must show.
    """
    values = launch_values(lab.launch.job.settings)
    here = {key: value for key, value in values.items() if key in KNOBS and key in known and _runs_here(key, value)}
    base = [f"{key}={value}" for key, value in here.items()]
    launch, reference = run_setting(lab, base), run_setting(lab, REFERENCE)
    floor = farthest([distance(run_setting(lab, base, draw), launch) for draw in range(DRAWS)])
    again = distance(run_setting(lab, base, spoil=spoil), launch)
    rows = [Row(OWN, None, None, *verdict(again, floor), False, again, distance(launch, reference))]
    if not try_knobs:
        return rows, floor
    keys = {key for key, _ in asked}
    tried = [(key, value, True) for key, value in asked]
    tried += [(key, alternative(key, value), False) for key, value in values.items() if key not in keys]
    for key, value, wanted in tried:
        reason = _unknown(key, values.get(key), value, here, known)
        if reason:
            rows.append(Row(key, values.get(key), value, UNKNOWN, reason, wanted))
            continue
        try:
            outcome = run_setting(lab, [*base, f"{key}={value}"])
        except (BenchError, NotImplementedError, ValueError) as error:
            rows.append(Row(key, values.get(key), value, UNKNOWN, str(error).splitlines()[0][:160], wanted))
            continue
        apart, off = distance(outcome, launch), distance(outcome, reference)
        before = rows[0].to_float32.grad_relative
        rows.append(Row(key, values.get(key), value, *verdict(apart, floor), wanted, apart, off,
                        off.grad_relative / before if before else None))  # fmt: skip
    return rows, floor


def _runs_here(key: str, value: str) -> bool:
    return value in KNOBS[key] or (key == "num_vocab_tiling" and value.isdigit())


def _unknown(key: str, own: str | None, value: str | None, here: Mapping[str, str], known: set[str]) -> str:
    """Return why a knob cannot be judged on this machine; empty where it can."""
    if key not in known:
        return "not an option of the installed MaxText"
    if key in TPU_KNOBS:
        return "a TPU kernel or layout, which a CPU does not run"
    if key in KNOBS and own is not None and key not in here:
        return f"a CPU does not run the launch's own {key}={own}, so there is nothing to hold it against"
    return "" if value else "no other value to try"


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
        if row.asked and row.to_launch is None:
            found.append(Finding(row.title, None, "", "", "not judged", "known limit"))
        elif row.asked:
            ratio, worst = over_noise(row.to_launch, floor)
            found.append(at_most(row.title, ratio, NOISE_FACTOR, f"x the noise floor of {worst}",
                                 "the floor is the largest of a few draws"))  # fmt: skip
    return found


def lines(rows: Sequence[Row], floor: Distance) -> list[str]:
    """Return the table as text, at most 80 columns."""
    found = ["knobs: distance to the launch's own setting (L), to float32 (F), noise floor (N)"]
    found += ["    " + "".join(f"{column[at]:>{column[2]}}" for column in COLUMNS) for at in (0, 1)]
    found.append(_line("N", floor))
    for row in rows:
        found.append(row.title)
        if row.to_launch is not None:
            found += [_line("L", row.to_launch), _line("F", row.to_float32)]
        if row.error_ratio is not None:
            found.append(f"    gradient error against float32 x {row.error_ratio:.3g}")
    return found


def _line(name: str, d: Distance) -> str:
    cosine = "?" if math.isnan(d.grad_cosine) else f"{d.grad_cosine:.7f}"
    cells = (_short(d.loss_ulps), _short(d.logp_ulps_max), _short(d.logp_ulps_p999), _short(d.kl_nats_max),
             f"{_short(100 * d.router_flips)}%", _short(d.grad_ulps_max), _short(d.grad_ulps_p999),
             _short(d.grad_relative), cosine, _short(d.update_relative))  # fmt: skip
    return f"  {name:<2}" + "".join(f"{cell:>{width}}" for cell, (*_, width) in zip(cells, COLUMNS, strict=True))


def _short(value: float) -> str:
    """Return a number of two digits in at most 7 characters: 12, 0.5, 1.2e5, 1.2e-13."""
    if value == 0 or 0.1 <= value < 1e4:
        return f"{value:.3g}" if value < 1000 else f"{value:.0f}"
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa}e{int(exponent)}" if exponent else mantissa


SPOILED = "rounded weights"
FAULTS = {SPOILED: "the second of two equal runs has its weights rounded to float8"}


@dataclasses.dataclass
class KnobCheck:
    """The check as check_numerics_cpu runs it; keeps the rows and their table for the report."""

    asked: Sequence[tuple[str, str]]
    known: set[str]
    name: str = "knobs"
    doc: str = "Every numerics option of the launch, and each --knob, against float32 and against the launch itself."
    faults: Mapping[str, str] = dataclasses.field(default_factory=lambda: dict(FAULTS))
    applies: Callable[[Any, str], bool] = always
    table: list[str] = dataclasses.field(default_factory=list)
    rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    noise_floor: dict[str, float] | None = None

    def run(self, lab: Any, fault: str = "") -> list[Finding]:
        """Measure and return the findings that count; with a fault only the control is run."""
        rows, floor = measure(lab, self.asked, self.known, try_knobs=not fault, spoil=fault == SPOILED)
        self.table = lines(rows, floor)
        self.rows, self.noise_floor = [row.as_dict() for row in rows], floor.as_dict()
        return findings(rows, floor)


def make_check(asked: Sequence[tuple[str, str]], known: set[str]) -> KnobCheck:
    """Return the check for these --knob pairs on a MaxText that knows these keys."""
    return KnobCheck(list(dict.fromkeys(asked)), known)
