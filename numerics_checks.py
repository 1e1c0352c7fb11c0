"""The checks of check_numerics_cpu on MaxText's own model: each a function from the lab to findings.

A check takes the lab and the name of a fault. With a fault it must find something wrong, or it cannot fail and is a
defect itself; `--audit` runs them all. The docstring of a check is what --list prints. Tolerances stand beside their
reasons, in the findings.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import bench_payload
import numerics_lab
import numerics_measures as measures

# float32 sums of up to 512 terms in another order. On this model they differ by 2 to 16; the faults of --audit show
# from 1,000 up; and a dot product over the 72 hidden features may be off by 36 ulps of its terms' magnitudes.
ROUNDING_ULPS = 64.0
WHY_ROUNDING = "float32 sums in another order: 2 to 16 measured, faults show from 1,000"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One number against its limit.

    status: pass or FAIL; `known limit` for what the installed MaxText, or a CPU, cannot do; `note` where nothing was
    held against a limit.
    """

    what: str
    value: float | None  # None where there is no number
    unit: str
    limit: str
    why: str  # the reason for the limit
    status: str = "pass"

    @property
    def ok(self) -> bool:
        """Whether it does not count against the launch."""
        return self.status != "FAIL"


def at_most(what: str, value: float, limit: float, unit: str, why: str) -> Finding:
    """Return the finding that a value may not exceed a limit; NaN does."""
    return Finding(what, float(value), unit, f"<= {limit:g}", why, "pass" if value <= limit else "FAIL")


def more_than(what: str, value: float, limit: float, unit: str, why: str) -> Finding:
    """Return the finding that a value must exceed a limit, for controls."""
    return Finding(what, float(value), unit, f"> {limit:g}", why, "pass" if value > limit else "FAIL")


def none_of(what: str, found: list[str], why: str) -> Finding:
    """Return the finding that a list of complaints must be empty; the first is quoted."""
    shown = f"{what}: {found[0]}" if found else what
    return Finding(shown, float(len(found)), "complaints", "<= 0", why, "FAIL" if found else "pass")


def note(what: str, why: str) -> Finding:
    """Return a remark: nothing was compared."""
    return Finding(what, None, "", "", why, "note")


UNBROKEN = "nothing"  # as a fault: what the faults break, unbroken; a check that fails then has noticed no fault


def always(lab: Any, fault: str) -> bool:
    """Return that a fault can be injected whatever the launch."""
    return True


@dataclasses.dataclass(frozen=True)
class Check:
    """A check, the faults it must notice (name -> what is done to its input), and whether a lab can have a fault."""

    name: str
    run: Callable[..., list[Finding]]
    faults: Mapping[str, str]
    applies: Callable[[Any, str], bool] = always

    @property
    def doc(self) -> str:
        """What it checks, in a line."""
        return (self.run.__doc__ or "").strip().splitlines()[0]


def rounding(what: str, got: Any, want: Any, limit: float = ROUNDING_ULPS) -> Finding:
    """Compare log-probs, entropies or a loss: ulps of each number."""
    return at_most(what, measures.summary(measures.ulps(got, want))["max"], limit, "ulps", WHY_ROUNDING)


def gradients(what: str, got: Mapping[str, Any], want: Mapping[str, Any], limit: float = ROUNDING_ULPS) -> Finding:
    """Compare gradients or weights: ulps of the largest entry of each array."""
    worst = measures.summary(measures.leaf_ulps(got, want))["max"]
    return at_most(what, worst, limit, "ulps of the leaf's largest", WHY_ROUNDING)


def _scored(values: np.ndarray, batch: Mapping[str, Any]) -> np.ndarray:
    return np.asarray(values)[batch["completion_mask"] > 0]


# ---------------------------------------------------------------------------------------------
# chunking


def chunking(lab: Any, fault: str = "") -> list[Finding]:
    """Log-probs, entropy, loss and gradients are the same for every compute_logps_chunk_size."""
    model, batch, found = lab.model(), lab.batch(packed=True), []
    whole = model.view(batch)
    width = batch["completion_ids"].shape[1] - 1  # packed rows score every token but the first
    sizes = {
        "1": 1,
        "a divisor": _divisor(width),
        "a non-divisor": _divisor(width + 1),
        "longer than the row": 2 * width,
    }
    for name, size in sizes.items():
        given, params = dict(batch), None
        if fault == "shifted target":
            given["completion_ids"] = np.roll(batch["completion_ids"], 1, axis=1)
        if fault == "bf16 head":
            params = rounded(model.params, "token_embedder", "logits_dense")
        view, label = model.view(given, chunk=size, params=params), f"chunk {size} ({name})"
        found += [
            rounding(f"{label}: log-probs", _scored(view.logps, batch), _scored(whole.logps, batch)),
            rounding(f"{label}: entropy", _scored(view.entropy, batch), _scored(whole.entropy, batch)),
            rounding(f"{label}: loss", view.loss, whole.loss),
            gradients(f"{label}: gradients", view.grads, whole.grads),
        ]
        if fault:
            break
    return found


def _divisor(number: int) -> int:
    return next(size for size in range(int(number**0.5), 0, -1) if number % size == 0)


def rounded(params: Any, *names: str, to: str = "bfloat16") -> Any:
    """Return weights in which the leaves under these names (all, without names) went through a narrower type."""
    import jax

    def change(path: Any, leaf: Any) -> Any:
        where = jax.tree_util.keystr(path)
        return leaf.astype(to).astype(leaf.dtype) if not names or any(n in where for n in names) else leaf

    return jax.tree.map_with_path(change, params)


# ---------------------------------------------------------------------------------------------
# packing


def packing(lab: Any, fault: str = "") -> list[Finding]:
    """Packed rows give what the same sequences give one by one, each in a padded row of its own."""
    packed = lab.batch(packed=True)
    alone, places = one_by_one(packed, numerics_lab.PROMPT, numerics_lab.WIDTH - numerics_lab.PROMPT, lab.pad_id)
    model, given = lab.model(), _broken_segments(packed, fault)
    together, apart = model.view(given), model.view(alone)
    token = np.array([together.logps[row, column] for row, column, *_ in places])
    single = np.array([apart.logps[row, column] for *_, row, column in places])
    found = [
        rounding("log-probs of scored tokens", token, single),
        rounding("loss, summed over tokens", together.loss, apart.loss),
        at_most("denominator", abs(float(together.denominator - apart.denominator)), 0, "tokens", "a count is exact"),
        gradients("gradients", together.grads, apart.grads),
    ]
    return found if fault else found + _delta_net(lab)


def _broken_segments(packed: Mapping[str, Any], fault: str) -> dict[str, Any]:
    given = dict(packed)
    if fault == "swapped segment":  # the first token of the second sequence counts as the first's
        ids = given["segment_ids"].copy()
        ids[0, np.flatnonzero(ids[0] == 2)[0]] = 1
        given["segment_ids"] = ids
    if fault == "one segment":
        given["segment_ids"] = (given["segment_ids"] > 0).astype(np.int32)
    if fault == "a position skipped":  # a constant offset would not show: RoPE sees differences only
        positions = given["segment_positions"]
        given["segment_positions"] = np.where(positions >= 10, positions + 5, positions).astype(np.int32)
    return given


def one_by_one(
    packed: Mapping[str, Any], prompt: int, completion: int, pad_id: int
) -> tuple[dict[str, Any], list[tuple[int, int, int, int]]]:
    """Return the sequences of a packed batch as a padded one, and where each scored token went.

    Args:
      prompt, completion: widths of the two parts; every sequence must fit.

    Returns:
      (padded batch with a multiple of 4 rows, [(packed row, packed column, padded row, padded column)]); columns count
      within completion_ids.
    """
    pieces = [(row, np.flatnonzero(ids == number)) for row, ids in enumerate(packed["segment_ids"])
              for number in range(1, ids.max() + 1)]  # fmt: skip
    rows = -(-len(pieces) // 4) * 4
    batch: dict[str, Any] = dict.fromkeys(bench_payload.FIELDS)
    ids, scored = (
        np.full((rows, prompt + completion), pad_id, np.int32),
        np.zeros((rows, prompt + completion), np.float32),
    )
    floats = {name: np.zeros((rows, prompt + completion), np.float32) for name in ("advantages", "old_per_token_logps")}
    routed = packed["routed_experts"]
    experts = None if routed is None else np.full((rows, prompt + completion, *routed.shape[2:]), -1, np.int16)
    places = []
    for number, (row, at) in enumerate(pieces):
        first = int(np.flatnonzero(packed["completion_mask"][row, at])[0])  # tokens of the prompt
        to = np.arange(len(at)) + prompt - first
        ids[number, to], scored[number, to] = packed["completion_ids"][row, at], packed["completion_mask"][row, at]
        for name, values in floats.items():
            values[number, to] = packed[name][row, at]
        if experts is not None:
            experts[number, to] = routed[row, at]
        places += [(row, int(a), number, int(t) - prompt) for a, t in zip(at, to, strict=True) if scored[number, t]]
    batch |= {"prompt_ids": ids[:, :prompt], "completion_ids": ids[:, prompt:], "completion_mask": scored[:, prompt:],
              "prompt_mask": (ids[:, :prompt] != pad_id).astype(np.float32), "routed_experts": experts,
              **{name: values[:, prompt:] for name, values in floats.items()}}  # fmt: skip
    return batch, places


def _delta_net(lab: Any) -> list[Finding]:
    """Show whether the state of Gated DeltaNet crosses the segments of a packed row."""
    if "qwen3.5" not in str(lab.model().config.model_name):
        return []
    mixed = lab.model("base_num_decoder_layers=2", "inhomogeneous_layer_cycle_interval=2", own_weights=True)
    packed = {**lab.batch(packed=True), "routed_experts": None}
    alone, places = one_by_one(packed, numerics_lab.PROMPT, numerics_lab.WIDTH - numerics_lab.PROMPT, lab.pad_id)
    together, apart = mixed.view(packed, grads=False).logps, mixed.view(alone, grads=False).logps
    apart_by = {1: 0.0, 2: 0.0}
    for row, column, to_row, to_column in places:
        later = 1 if packed["segment_ids"][row, column] == 1 else 2
        apart_by[later] = max(apart_by[later], abs(float(together[row, column] - apart[to_row, to_column])))
    carries = apart_by[2] > 1e-3
    return [Finding(
        "Gated DeltaNet: later segments of a row against the same alone", apart_by[2], "nats", "<= 0.001",
        "its state is to start anew in each segment; this MaxText masks padding only" if carries else
        "its state starts anew in each segment", "known limit" if carries else "pass")]  # fmt: skip


# ---------------------------------------------------------------------------------------------
# accumulation

# An Adam whose step is smooth in the gradient. The launch's own eps of 1e-8 makes the first step g / |g|: there a
# gradient of rounding size, of either sign, moves a weight by the whole learning rate.
GENTLE = ("adam_eps=0.01", "gradient_clipping_threshold=0.0", "learning_rate=0.01", "skip_step_on_spikes=false")


def accumulation(lab: Any, fault: str = "") -> list[Finding]:
    """One micro-batch of N rows trains like N of one row, in any order; denominators are summed, not averaged."""
    model, batch = lab.model(*GENTLE), lab.batch(packed=True)
    one_row, four_rows = lab.trainer(model, "one row"), lab.trainer(model, "four rows")
    single = [{name: value[i : i + 1] if isinstance(value, np.ndarray) else value for name, value in batch.items()}
              for i in range(4)]  # fmt: skip
    if fault == "a micro-batch dropped":
        single = single[:-1]
    if fault == "a micro-batch twice":
        single = [*single[:-1], single[0]]
    whole, parts = four_rows.train([batch]), one_row.train(single)
    if fault == "means averaged":
        parts = dataclasses.replace(parts, grads=_mean_of_means(one_row, single, parts.denominator))
    found = [
        at_most("denominator: N rows against the sum of N", abs(whole.denominator - parts.denominator), 0, "tokens",
                "counts of tokens are exact in float32"),
        gradients("gradients: N rows against N of one row", parts.grads, whole.grads),
        gradients("weights after the update", parts.weights, whole.weights),
    ]  # fmt: skip
    if fault:
        return found
    turned = one_row.train(single[::-1])
    counts = [float(part["completion_mask"].sum()) for part in single]
    return [
        *found, gradients("gradients: another order", turned.grads, parts.grads),
        gradients("weights after the update: another order", turned.weights, parts.weights),
        more_than("control: rows differ in tokens", max(counts) - min(counts), 0, "tokens",
                  "rows of equal length could not tell a sum of denominators from their mean"),
    ]  # fmt: skip


def _mean_of_means(trainer: Any, parts: list[dict[str, Any]], denominator: float) -> dict[str, np.ndarray]:
    """Return what the gradients would be if each micro-batch were divided by its own count."""
    each = [trainer.train([part]) for part in parts]
    return {name: sum(one.grads[name] / one.denominator for one in each) * (denominator / len(each))
            for name in each[0].grads}  # fmt: skip


# ---------------------------------------------------------------------------------------------
# padding


def padding(lab: Any, fault: str = "") -> list[Finding]:
    """Extra padding rows and columns change nothing; padding that is attended to is caught."""
    model, found, in_rows = lab.model(), [], lab.batch(packed=True)
    # The same sequences padded, in the shape that `packing` has compiled.
    alone, _ = one_by_one(in_rows, numerics_lab.PROMPT, numerics_lab.WIDTH - numerics_lab.PROMPT, lab.pad_id)
    for kind, batch in (("padded", alone), ("packed", in_rows)):
        packed, wrong_id = kind == "packed", lab.pad_id + 3
        more = padded(batch, wrong_id if fault == "wrong pad id" else lab.pad_id, rows=4, columns=8)
        if fault == "padding scored":
            more["completion_mask"] = np.where(more["completion_ids"] == lab.pad_id, 1.0, more["completion_mask"])
            more["completion_mask"] = more["completion_mask"].astype(np.float32)
        plain, wide = model.view(batch), model.view(more)
        rows, columns = batch["completion_ids"].shape
        at = np.ix_(np.arange(rows), np.arange(columns))
        found += [
            rounding(f"{kind}: log-probs", _scored(wide.logps[at], batch), _scored(plain.logps, batch)),
            rounding(f"{kind}: loss", wide.loss, plain.loss),
            at_most(f"{kind}: denominator", abs(float(wide.denominator - plain.denominator)), 0, "tokens", "a count"),
            gradients(f"{kind}: gradients", wide.grads, plain.grads),
        ]
        if not packed and not fault:
            attended = model.view(padded(batch, wrong_id, rows=4, columns=8)).logps[at]
            apart = measures.summary(measures.ulps(_scored(attended, batch), _scored(plain.logps, batch)))["max"]
            found.append(more_than("control: a wrong pad id shows", apart, 10 * ROUNDING_ULPS, "ulps",
                                   "padding that is attended to changes the log-probs"))  # fmt: skip
    return found


def padded(batch: Mapping[str, Any], pad_id: int, rows: int, columns: int) -> dict[str, Any]:
    """Return a batch with more padding: rows below, columns left of prompts and right of completions."""
    wider = {}
    for name, value in batch.items():
        if not isinstance(value, np.ndarray):
            wider[name] = value
            continue
        prompt_part = name in ("prompt_ids", "prompt_mask")
        if name == "routed_experts":
            left = columns if batch["prompt_ids"].shape[1] else 0
            grow, fill = [(0, rows), (left, columns), (0, 0), (0, 0)], -1
        else:
            side = (columns, 0) if prompt_part else (0, columns)
            side = (0, 0) if prompt_part and not value.shape[1] else side
            grow, fill = [(0, rows), side], pad_id if name.endswith("_ids") and name != "segment_ids" else 0
        wider[name] = np.pad(value, grow[: value.ndim], constant_values=fill)
    return wider


# ---------------------------------------------------------------------------------------------
# routing


def routing(lab: Any, fault: str = "") -> list[Finding]:
    """Forced experts are the ones used, unset tokens fall back to the gate, duplicates are refused."""
    if not lab.forces_experts:
        return [_no_forcing(lab)]
    model, batch = lab.model(), lab.batch(packed=True)
    forced, experts = batch["routed_experts"][:, :-1, 0], lab.experts
    asked = (forced[..., None] == np.arange(experts)).any(axis=-2)
    set_here = (forced >= 0).all(axis=-1) & (batch["segment_ids"][:, :-1] > 0)
    given = dict(batch)
    if fault == "experts of the next token":
        given["routed_experts"] = np.roll(batch["routed_experts"], 1, axis=1)
    if fault == "duplicated expert":
        given["routed_experts"] = np.repeat(
            batch["routed_experts"][..., :1], batch["routed_experts"].shape[-1], axis=-1
        )
    used = model.which_experts(given)
    free = model.which_experts({**batch, "routed_experts": None})
    differ = float((used != asked)[set_here].any(axis=-1).mean())
    found = [
        at_most("tokens that used other experts than forced", differ, 0, "share", "routing is discrete"),
        more_than("control: the gate alone would choose others", measures.flip_share(free[set_here], asked[set_here]),
                  0.1, "share", "else forcing could not be told from the gate"),
    ]  # fmt: skip
    if fault:
        return found
    unset = (forced < 0).all(axis=-1) & (batch["segment_ids"][:, :-1] > 0)
    same, no_expert = (used == free).all(axis=-1), ~used.any(axis=-1)
    falls_back = bool(same[unset].all())
    skips = bool(no_expert[unset].all())
    why = "this MaxText gives an unset token no expert at all: set every token" if skips else "as in Tunix's replay"
    value = float((~same[unset]).mean()) if unset.any() else None
    status = "pass" if falls_back else "known limit" if skips else "FAIL"
    found.append(Finding("unset tokens that do not fall back to the gate", value, "share", "<= 0", why, status))
    twice = dict(batch)
    twice["routed_experts"] = batch["routed_experts"].copy()
    row, column = np.argwhere(set_here)[0]
    twice["routed_experts"][row, column, 0] = twice["routed_experts"][row, column, 0, 0]
    refused = any("same expert twice" in line for line in bench_payload.validate_batch(twice, lab.spec(packed=True)))
    found.append(Finding("a duplicated expert is refused", float(refused), "(1 is yes)", "= 1",
                         "MaxText itself would add the two weights up", "pass" if refused else "FAIL"))  # fmt: skip
    return found


def _no_forcing(lab: Any) -> Finding:
    """Return why there is nothing to force."""
    if not lab.experts:
        return note("no router in this model", "a dense model")
    return Finding("experts cannot be forced in this model", None, "", "",
                   "this MaxText forces experts in some decoder blocks only", "known limit")  # fmt: skip


# ---------------------------------------------------------------------------------------------
# payload


def payload(lab: Any, fault: str = "") -> list[Finding]:
    """The micro-batch the driver sends for this launch is sound, and has the routing load that was asked for."""
    spec, plan_routing, layers = lab.launch_payload()
    batch = functools.partial(bench_payload.build_micro_batch, spec, plan_routing)(lab.seed, 0)
    _break_payload(batch, spec, fault)
    defects = bench_payload.validate_batch(batch, spec)
    found = [none_of("shapes, dtypes, masks, segments, positions, distinct experts, -1", defects,
                     "a defect in the payload is a defect in every number")]  # fmt: skip
    if defects:  # the counts below are of a sound batch
        return found
    found += [
        more_than("scored tokens that carry gradient", bench_payload.gradient_share(batch), 0, "share",
                  "a step without gradient times nothing"),
        none_of("advantages: one a sequence, summing to 0 over all rollouts", _uncentred_advantages(batch),
                "GRPO's advantages are centred in each group of rollouts"),
    ]  # fmt: skip
    return found + (_load_findings(batch, spec, plan_routing, layers) if plan_routing is not None else [])


def _break_payload(batch: dict[str, Any], spec: Any, fault: str) -> None:
    if fault == "swapped segment":
        name = "segment_ids" if spec.packed else "completion_mask"
        row = batch[name][0]
        row[0], row[-1] = row[0] + 1, row[-1] + 1
    elif fault == "dropped mask":
        batch["completion_mask"][:] = 1
        batch["completion_ids"][0, -2:] = spec.pad_id
    elif fault == "duplicated expert" and batch["routed_experts"] is not None:
        batch["routed_experts"][0, 0, 0, :] = batch["routed_experts"][0, 0, 0, 0]
    elif fault == "a hot shard" and batch["routed_experts"] is not None:
        half = spec.width // 2
        batch["routed_experts"][:, :half] = np.arange(spec.top_k, dtype=np.int16)
    elif fault == "no advantage":
        batch["advantages"][:] = 0


def _payload_can_have(lab: Any, fault: str) -> bool:
    return lab.launch.routing is not None or fault not in ("duplicated expert", "a hot shard")


def _uncentred_advantages(batch: Mapping[str, Any]) -> list[str]:
    values = []
    for row, scored in enumerate(batch["completion_mask"] > 0):
        ids = np.ones_like(scored, int) if batch["segment_ids"] is None else batch["segment_ids"][row]
        for number in range(1, int(ids.max(initial=0)) + 1):
            mine = np.unique(batch["advantages"][row][scored & (ids == number)])
            if mine.size > 1:
                return [f"row {row}, sequence {number}: {mine.size} advantages in one sequence"]
            values += mine.tolist()
    total = float(np.sum(values))
    return [f"sum {total:g} over {len(values)} rollouts"] if abs(total) > 1e-3 * max(len(values), 1) else []


def _load_findings(batch: Mapping[str, Any], spec: Any, plan: Any, layers: list[int]) -> list[Finding]:
    """Return the layers furthest from their targets, and the most uneven one of those without a target."""
    loads = [_shard_load(batch["routed_experts"][:, :, at], spec, plan) for at in range(len(layers))]
    rows = list(zip(loads, plan.targets, layers, strict=True))
    aimed = [(abs(load / target - 1), load, target, layer) for load, target, layer in rows if target is not None]
    natural = [(load, layer) for load, target, layer in rows if target is None]
    of, found = f"{len(layers)} layers", []
    if aimed:
        error, load, target, layer = max(aimed)
        found.append(at_most(f"fullest shard over balanced, {of}, worst {layer}: {load:.4f} for {target:.4f}", error,
                             plan.tolerance, "relative", "--routing-tolerance"))  # fmt: skip
    if natural:
        load, layer = max(natural)
        slots = spec.rows // plan.row_groups * spec.width // plan.token_chunks * spec.top_k / plan.shards
        found.append(at_most(f"fullest shard over balanced, {of}, worst {layer}", load, 1 + 6 * slots**-0.5, "ratio",
                             "6 standard deviations of uniform top-k"))  # fmt: skip
    return found


def _shard_load(routed: np.ndarray, spec: Any, plan: Any) -> float:
    """Count a layer's load [rows, tokens, top_k] once more, so that builder and checker do not share a mistake."""
    tokens = np.arange(spec.width).reshape(plan.sequence_shards, plan.token_chunks, -1)
    height, size, worst = spec.rows // plan.row_groups, spec.num_experts // plan.shards, 0.0
    for group in range(plan.row_groups):
        for chunk in range(plan.token_chunks):
            block = routed[group * height : (group + 1) * height, tokens[:, chunk].ravel()]
            counts = np.bincount(block[block >= 0] // size, minlength=plan.shards)
            worst = max(worst, float(counts.max() / max(counts.mean(), 1e-9)))
    return worst


CHECKS = [
    Check("payload", payload, applies=_payload_can_have, faults={
        "swapped segment": "two tokens change their segment", "dropped mask": "padding and prompts are scored",
        "duplicated expert": "a token meets one expert twice", "a hot shard": "half the tokens go to the first experts",
        "no advantage": "every advantage is 0"}),
    Check("chunking", chunking, {
        "shifted target": "chunked targets are one token late",
        "bf16 head": "the weights of the chunked head are rounded to bfloat16"}),
    Check("packing", packing, {
        "swapped segment": "a token belongs to its neighbour's segment", "one segment": "a row is one segment",
        "a position skipped": "positions jump by 5 inside a sequence"}),
    Check("accumulation", accumulation, {
        "a micro-batch dropped": "N - 1 of N", "a micro-batch twice": "the first in place of the last",
        "means averaged": "each micro-batch is divided by its own count"}),
    Check("padding", padding, {
        "wrong pad id": "the padding is of another id than the loss is told",
        "padding scored": "the mask covers padding"}),
    Check("routing", routing, applies=lambda lab, fault: lab.forces_experts, faults={
        "experts of the next token": "routed_experts shifted by one", "duplicated expert": "one expert in all slots"}),
]  # fmt: skip
