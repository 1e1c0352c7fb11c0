"""The synthetic micro-batch of the bench, or a recorded one. Numpy only; the routing is bench_routing's.

Fields, shapes and dtypes are those of Tunix's `RLTrainerPayload`: int32 ids, float32 masks, advantages and log-probs,
int16 `routed_experts` [rows, tokens, layers, top_k]. A batch is a dict of FIELDS: array, int (num_segments) or None.
Seed and index decide every byte, on any machine with this numpy: integers come from integers and from `+ - * / sqrt`
(exact in IEEE 754), never from a reduction of floats or from the C library.

Lengths SPEC, in tokens per sequence, prompt included:
  full                     every sequence as long as prompt and response limit (or the row) allow
  N or fixed:N             N tokens each
  uniform:LOW:HIGH         both ends included
  lognormal:MEDIAN:SIGMA   longer ones are cut at the limit and count as truncated
  FILE                     recorded lengths, one a line (or item of a .json list): LENGTH or PROMPT,COMPLETION

Advantages have zero mean in each group of `num_generations`; one sequence in 16 is truncated; sampler log-probs lie
near the policy's own once the driver knows them (`with_logps`), so that the gates of the loss do not empty the batch.
"""

from __future__ import annotations

import math
import os
import tempfile
import zlib
from dataclasses import dataclass
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np

from bench_common import BenchError
from bench_routing import (
    TILE_TOKENS,
    UNSET,
    LoadTable,
    RoutingSpec,
    build_routing,
    check_load,
    check_routing,
    exp,
    generator,
    measure_load,
    normal,
    number,
    parse_routing_load,
    read_table,
    require,
)

__all__ = [
    "FIELDS",
    "LoadTable",
    "PayloadSpec",
    "RoutingSpec",
    "build_micro_batch",
    "check_batch",
    "check_load",
    "check_specs",
    "expected_arrays",
    "gradient_share",
    "load_npz",
    "measure_load",
    "parse_lengths",
    "parse_routing_load",
    "real_tokens",
    "save_npz",
    "validate_batch",
    "with_logps",
]

TRUNCATED_EVERY = 16  # one sequence in so many has no end token, as if the response limit had cut it
LOGPS_SPREAD = 0.02  # nats; a token's ratio stays in 0.96..1.04, inside the clip of 0.2 and the error gate of 2.0
FIELDS = tuple(
    """prompt_ids prompt_mask completion_ids completion_mask advantages segment_ids segment_positions num_segments
    ref_per_token_logps old_per_token_logps rollout_per_token_logps sampler_is_weights returns old_values overlong
    routed_experts""".split()
)
Batch = dict[str, Any]


@dataclass(frozen=True)
class PayloadSpec:
    """Shape and content of a micro-batch; lengths in tokens, `lengths` a lengths SPEC.

    Packed: rows of `row_width` tokens (0: prompt + completion length) hold up to `max_segments` sequences, each
    starting at a multiple of `segment_alignment`. Padded: a row is one sequence, the prompt padded on its left, the
    completion on its right. `num_experts` 0: no routed_experts. `masks_overlong`: the loss drops truncated sequences.
    """

    rows: int
    prompt_length: int
    completion_length: int
    packed: bool
    max_segments: int
    vocab_size: int
    pad_id: int
    eos_id: int
    num_layers: int
    num_experts: int
    top_k: int
    num_generations: int
    lengths: str
    with_old_logps: bool
    with_rollout_logps: bool
    with_ref_logps: bool
    with_overlong: bool
    segment_alignment: int = 1
    row_width: int = 0
    masks_overlong: bool = True

    @property
    def width(self) -> int:
        """Token slots of a row: T when packed, P + C when padded."""
        return self.row_width if self.packed and self.row_width else self.prompt_length + self.completion_length

    @property
    def longest(self) -> int:
        """Most tokens of a sequence, prompt included."""
        return min(self.prompt_length + self.completion_length, self.width)


def check_specs(spec: PayloadSpec, routing: RoutingSpec | None) -> None:
    """Raise a BenchError when sizes contradict each other or a routing target is unattainable."""
    for name in ("rows", "prompt_length", "completion_length", "num_generations", "segment_alignment"):
        require(getattr(spec, name) >= 1, f"{name} is {getattr(spec, name)}, must be at least 1")
    require(not spec.packed or spec.max_segments >= 1, "max_segments must be at least 1 when packed")
    require(spec.longest >= 2, "a row must hold a prompt token and a completion token")
    require(spec.vocab_size >= 3, f"vocab_size is {spec.vocab_size}, must be at least 3")
    if spec.num_experts:
        require(routing is not None, "a model with experts needs a routing load")
        check_routing((spec.rows, spec.width, spec.num_layers, spec.top_k), spec.num_experts, routing)


class Lengths(NamedTuple):
    """kind: full, fixed, uniform, lognormal or recorded. recorded: (prompt, rest) tokens, prompt 0 = not recorded."""

    kind: str
    first: float = 0.0
    second: float = 0.0
    recorded: tuple[tuple[int, int], ...] = ()


def parse_lengths(spec: str) -> Lengths:
    """Read a lengths SPEC.

    Raises:
      BenchError: unknown form, a length below 2 tokens, an unreadable or empty file.
    """
    kind, *numbers = ("fixed:" + spec if spec.isdigit() else spec).split(":")
    if len(numbers) == {"full": 0, "fixed": 1, "uniform": 2, "lognormal": 2}.get(kind):
        first, second, *_ = [number(text, f"lengths {spec}") for text in numbers] + [2.0, 2.0]
        valid = 0 <= second <= 4 if kind == "lognormal" else not first % 1 and not second % 1
        valid = valid and first >= 2 and (kind != "uniform" or second >= first)
        require(valid, f"lengths {spec}: whole tokens, at least 2, LOW <= HIGH, SIGMA 0 to 4")
        return Lengths(kind, first, second)
    if not (os.path.exists(spec) or "." in spec or "/" in spec):
        todo = "give full, fixed:N, uniform:LOW:HIGH, lognormal:MEDIAN:SIGMA or a file"
        raise BenchError(f"unknown lengths {spec!r}", where="payload", todo=todo)
    table, recorded = read_table(spec), []
    backwards = len(table.header) == 2 and "prompt" in table.header[1]
    for line, cells in table.rows:
        pair = (0, *cells) if len(cells) == 1 else tuple(reversed(cells)) if backwards else tuple(cells)
        if len(pair) != 2 or sum(pair) < 2 or min(pair) < 0 or any(value % 1 for value in pair):
            raise BenchError(f"{cells} is no length", where=f"{spec}:{line}", todo="give LENGTH or PROMPT,COMPLETION")
        recorded.append((int(pair[0]), int(pair[1])))
    return Lengths("recorded", recorded=tuple(recorded))


# --- The micro-batch ---


class _Sequence(NamedTuple):
    """Where a sequence lies: `start` is the token slot of its first token, the others are tokens and a flag."""

    row: int
    start: int
    prompt: int
    completion: int
    truncated: bool


def build_micro_batch(
    spec: PayloadSpec, routing: RoutingSpec | None, seed: int, index: int, sequences: int | None = None
) -> Batch:
    """Build micro-batch number `index` (0, 1, ...) of a run.

    Args:
      sequences: most that it may hold; None holds what fits. A step's last one may have fewer, and empty rows, as in
        Tunix.

    Returns:
      A dict with the keys FIELDS; None for what the run does not carry, an int for num_segments.

    Raises:
      BenchError: the sizes contradict each other, or a routing target is unattainable.
    """
    check_specs(spec, routing)
    placed = _place(spec, seed, index, sequences)
    batch = _fill(spec, placed, seed, index)
    if spec.num_experts:
        assigned = np.full((spec.rows, spec.width), not routing.leave_unset)
        for item in placed:
            assigned[item.row, item.start : item.start + item.prompt + item.completion - 1] = True
        shape = (spec.rows, spec.width, spec.num_layers, spec.top_k)
        batch["routed_experts"] = build_routing(shape, spec.num_experts, routing, assigned, seed, index)
    return batch


def _draw(spec: PayloadSpec, lengths: Lengths, rng: np.random.Generator, count: int) -> list[list[int]]:
    """Return `count` of [prompt tokens, completion tokens, 1 if the limit cut it]."""
    prompt = np.zeros(count, np.int64)
    if lengths.kind == "uniform":
        total = rng.integers(int(lengths.first), int(lengths.second), size=count, endpoint=True)
    elif lengths.kind == "lognormal":
        total = (lengths.first * exp(lengths.second * normal(rng, count))).astype(np.int64)
    elif lengths.kind == "recorded":
        prompt, rest = np.array(lengths.recorded)[rng.integers(0, len(lengths.recorded), size=count)].T
        total = prompt + rest
    else:
        total = np.full(count, spec.longest if lengths.kind == "full" else int(lengths.first))
    cut, total = total > spec.longest, np.clip(total, 2, spec.longest)
    low = np.maximum(1, total - spec.completion_length)
    high = np.minimum(spec.prompt_length, np.maximum(low, total // 3))  # a short sequence is not all prompt
    drawn = rng.integers(np.maximum(low, high // 2), high, endpoint=True)
    prompt = np.where(prompt > 0, np.clip(prompt, low, np.minimum(spec.prompt_length, total - 1)), drawn)
    return np.stack([prompt, total - prompt, cut], axis=1).tolist()


def _place(spec: PayloadSpec, seed: int, index: int, sequences: int | None) -> list[_Sequence]:
    """Draw sequences and give each its place: one a row when padded, first-fit decreasing when packed, as in Tunix."""
    rng, lengths = generator(seed, index, 1), parse_lengths(spec.lengths)
    asked = lengths.second if lengths.kind == "uniform" else lengths.first if lengths.kind == "fixed" else 0
    require(asked <= spec.longest, f"lengths {spec.lengths}: a sequence has at most {spec.longest} tokens")
    pool, tokens = _draw(spec, lengths, rng, spec.rows), 0
    while spec.packed and len(pool) < spec.rows * spec.max_segments:
        tokens += sum(p + c for p, c, _ in pool[-spec.rows :])
        if tokens >= spec.rows * spec.width:
            break
        pool += _draw(spec, lengths, rng, spec.rows)
    pool = pool[:sequences]
    for i in range(TRUNCATED_EVERY // 2, len(pool), TRUNCATED_EVERY):
        pool[i][2] = 1
    if not spec.packed:
        return [_Sequence(row, spec.prompt_length - p, p, c, bool(cut)) for row, (p, c, cut) in enumerate(pool)]
    used, held = np.zeros(spec.rows, np.int64), np.zeros(spec.rows, np.int64)
    placed: dict[int, _Sequence] = {}
    for i in sorted(range(len(pool)), key=lambda i: -pool[i][0] - pool[i][1]):
        prompt, completion, cut = pool[i]
        start = -(-used // spec.segment_alignment) * spec.segment_alignment
        fits = (start + prompt + completion <= spec.width) & (held < spec.max_segments)
        row = int(fits.argmax())
        if fits[row]:
            placed[i] = _Sequence(row, int(start[row]), prompt, completion, bool(cut))
            used[row], held[row] = start[row] + prompt + completion, held[row] + 1
    return [placed[i] for i in sorted(placed)]


def _advantages(count: int, group: int, rng: np.random.Generator) -> np.ndarray:
    """Return float32 [count]: over every `group` consecutive sequences the sum is exactly 0 and not all are 0.

    Rewards 0..7 less their mean, scaled by a power of two, so that float32 holds them exactly. A last group of one
    joins the group before it; sequences without a group get +1 and -1 in turn.
    """
    if group == 1 or count == 1:
        return np.where(np.arange(count) % 2, -1, 1).astype(np.float32)
    starts = [first for first in range(0, count, group) if count - first > 1]
    centred = np.zeros(count, np.int64)
    for first, end in zip(starts, [*starts[1:], count], strict=True):
        reward = rng.integers(0, 8, size=end - first)
        reward[0], reward[-1] = 0, 7
        centred[first:end] = reward * (end - first) - reward.sum()
    return (centred / 2 ** (7 * (group + 1)).bit_length()).astype(np.float32)


def _fill(spec: PayloadSpec, placed: list[_Sequence], seed: int, index: int) -> Batch:
    """Return all fields but routed_experts."""
    rng, shape = generator(seed, index, 2), (spec.rows, spec.width)
    special = sorted({token for token in (spec.pad_id, spec.eos_id) if 0 <= token < spec.vocab_size})
    ids = rng.integers(0, spec.vocab_size - len(special), size=shape, dtype=np.int32)
    for token in special:  # no ordinary token is the pad or the end token
        ids += ids >= token
    advantage = _advantages(len(placed), spec.num_generations, rng).tolist()
    segments, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    scored, advantages, overlong = (np.zeros(shape, np.float32) for _ in range(3))
    held = [0] * spec.rows
    for item, value in sorted(zip(placed, advantage, strict=True)):
        first, end = item.start + item.prompt, item.start + item.prompt + item.completion
        held[item.row] += 1
        segments[item.row, item.start : end] = held[item.row]
        positions[item.row, item.start : end] = np.arange(end - item.start)
        overlong[item.row, item.start : end] = item.truncated
        scored[item.row, first:end], advantages[item.row, first:end] = 1, value
        if not item.truncated:
            ids[item.row, end - 1] = spec.eos_id
    ids[segments == 0] = spec.pad_id
    split = 0 if spec.packed else spec.prompt_length
    batch: Batch = dict.fromkeys(FIELDS)
    batch["prompt_ids"], batch["completion_ids"] = ids[:, :split].copy(), ids[:, split:].copy()
    batch["prompt_mask"] = (segments[:, :split] > 0).astype(np.float32)
    batch["completion_mask"], batch["advantages"] = scored[:, split:].copy(), advantages[:, split:].copy()
    if spec.packed:
        batch |= {"segment_ids": segments, "segment_positions": positions, "num_segments": spec.max_segments + 1}
    if spec.with_overlong:
        batch["overlong"] = overlong if spec.packed else overlong.max(axis=1)
    for name in ("ref", "old", "rollout"):
        if getattr(spec, f"with_{name}_logps"):
            batch[f"{name}_per_token_logps"] = scored
    # Until the policy's own are known: those of a policy that knows nothing, -ln(vocab_size).
    return with_logps(batch, np.full_like(batch["advantages"], -math.log(spec.vocab_size)), seed + index)


def with_logps(batch: Batch, policy_logps: np.ndarray, seed: int, spread: float = LOGPS_SPREAD) -> Batch:
    """Return the batch with its old, rollout and reference log-probs near the policy's own; None stays None.

    Each token moves by at most 2 * spread nats and each sequence's mean by rounding alone, so that the gates of the
    loss keep the batch: the clip, the sequence error threshold (2.0), the band of the sequence's geometric mean ratio
    (0.999 to 1.002).

    Args:
      policy_logps: [rows, C or T], the trainer's own per-token log-probs in nats.

    Raises:
      BenchError: another shape, or not finite on a scored token.
    """
    mask = batch["completion_mask"] > 0
    policy_logps = np.asarray(policy_logps)
    require(policy_logps.shape == mask.shape, f"log-probs {policy_logps.shape} for scored tokens {mask.shape}")
    require(bool(np.isfinite(policy_logps[mask]).all()), "the policy's log-probs are not finite")
    key = np.arange(len(mask))[:, None] + np.zeros_like(mask, int)
    if batch["segment_ids"] is not None:
        key = key * batch["num_segments"] + batch["segment_ids"]
    key, result = key[mask], dict(batch)
    for purpose, name in enumerate(("old_per_token_logps", "rollout_per_token_logps", "ref_per_token_logps"), 4):
        if batch[name] is not None:
            noise = generator(seed, 0, purpose).integers(-(2**15), 2**15, size=key.size) * (spread / 2**15)
            mean = np.bincount(key, weights=noise) / np.maximum(np.bincount(key), 1)  # adds in order of the tokens
            near = np.zeros(mask.shape)
            near[mask] = policy_logps[mask] + (noise - mean[key])
            result[name] = near.astype(np.float32)
    return result


def real_tokens(batch: Batch) -> int:
    """Return the number of tokens that are not padding, prompts included."""
    names = ("prompt_mask", "completion_mask") if batch["segment_ids"] is None else ("segment_ids",)
    return int(sum(np.count_nonzero(batch[name]) for name in names))


def gradient_share(batch: Batch, masks_overlong: bool = True) -> float:
    """Return the share of scored tokens that carry gradient (0.0 to 1.0): advantage not 0, sequence not masked.

    Args:
      masks_overlong: whether the loss leaves truncated sequences out (--overlong_loss_masking).
    """
    scored = batch["completion_mask"] > 0
    kept = scored & (batch["advantages"].reshape(len(scored), -1) != 0)
    if masks_overlong and batch["overlong"] is not None:
        kept &= batch["overlong"].reshape(len(scored), -1) == 0
    return float(np.count_nonzero(kept) / max(np.count_nonzero(scored), 1))


def check_batch(batch: Batch, masks_overlong: bool = True) -> float:
    """Return `gradient_share(batch, masks_overlong)`.

    Raises:
      BenchError: no token carries gradient: the step would time an empty program.
    """
    share = gradient_share(batch, masks_overlong)
    if share == 0:
        todo = "every advantage is 0 or every sequence truncated: change --sequence-lengths or --replay"
        raise BenchError("no token of the micro-batch carries gradient", where="payload", todo=todo)
    return share


# --- Validation and files ---


def expected_arrays(spec: PayloadSpec) -> dict[str, tuple[tuple[int, ...], str, bool]]:
    """Return field -> (shape, dtype name, required) of every array that a batch of this spec may have."""
    prompt = 0 if spec.packed else spec.prompt_length
    wide = (spec.rows, spec.width - prompt)
    fields = {"prompt_ids": ((spec.rows, prompt), "int32", True), "prompt_mask": ((spec.rows, prompt), "float32", True)}
    fields |= {"completion_ids": (wide, "int32", True), "completion_mask": (wide, "float32", True)}
    fields["advantages"] = (wide, "float32", True)
    for name in ("ref", "old", "rollout"):
        fields[f"{name}_per_token_logps"] = (wide, "float32", getattr(spec, f"with_{name}_logps"))
    fields |= {name: (wide, "float32", False) for name in ("sampler_is_weights", "returns", "old_values")}
    fields["overlong"] = (wide if spec.packed else wide[:1], "float32", spec.with_overlong)
    if spec.packed:
        fields |= {"segment_ids": (wide, "int32", True), "segment_positions": (wide, "int32", True)}
    if spec.num_experts:
        fields["routed_experts"] = ((spec.rows, spec.width, spec.num_layers, spec.top_k), "int16", True)
    return fields


def validate_batch(batch: Batch, spec: PayloadSpec) -> list[str]:
    """Return what is wrong with a batch, one line each: shapes, dtypes, masks, segments, distinct experts, -1."""
    found = _shape_findings(batch, spec)
    if found:
        return found
    scored, ids = batch["completion_mask"], np.concatenate([batch["prompt_ids"], batch["completion_ids"]], axis=1)
    if spec.packed:
        segments = batch["segment_ids"]
        real = segments > 0
        last = real & (np.pad(segments, ((0, 0), (0, 1)))[:, 1:] != segments)
        found += _segment_findings(segments, batch["segment_positions"], spec)
    else:  # an observation inside a completion is real though not scored, and an end token may be the pad token
        token = (scored > 0) | (batch["completion_ids"] != spec.pad_id)
        end = np.where(token, np.arange(1, scored.shape[1] + 1), 0).max(axis=1, keepdims=True)
        real = np.concatenate([batch["prompt_mask"] > 0, np.arange(scored.shape[1]) < end], axis=1)
        last = real & (np.cumsum(real[:, ::-1], axis=1)[:, ::-1] == 1)
    masks = [batch[name] for name in ("prompt_mask", "completion_mask", "overlong") if batch[name] is not None]
    floats = [value for value in batch.values() if isinstance(value, np.ndarray) and value.dtype == np.float32]
    checks = {
        f"token ids outside 0..{spec.vocab_size - 1}": ((ids < 0) | (ids >= spec.vocab_size)).any(),
        f"padding that is not pad_id {spec.pad_id}": (ids[~real] != spec.pad_id).any(),
        "masks or overlong with values other than 0 and 1": any(((mask != 0) & (mask != 1)).any() for mask in masks),
        "prompt_mask not padded on the left": (np.diff(batch["prompt_mask"], axis=1) < 0).any(),
        "completion_mask on padding": (scored > 0)[~real[:, -scored.shape[1] :]].any(),
        "advantages or log-probs that are not finite": not all(np.isfinite(value).all() for value in floats),
        "no token that carries gradient": gradient_share(batch, spec.masks_overlong) == 0,
    }
    found += [what for what, wrong in checks.items() if wrong]
    if not spec.num_experts:
        return found
    recorded = _has_routing(batch, spec) if spec.packed else True
    return found + _routing_findings(batch["routed_experts"], real & ~last & recorded, spec)


def _has_routing(batch: Batch, spec: PayloadSpec) -> np.ndarray:
    """Return bool [rows, tokens]: in a segment with any token routed. Tunix packs trajectories whose routing was not
    recorded beside those whose routing was."""
    segments = np.clip(batch["segment_ids"], 0, spec.max_segments)
    segments = segments + np.arange(spec.rows)[:, None] * (spec.max_segments + 1)
    found = np.zeros(spec.rows * (spec.max_segments + 1), bool)
    found[segments[batch["routed_experts"][:, :, 0, 0] >= 0]] = True
    return found[segments]


def _shape_findings(batch: Batch, spec: PayloadSpec) -> list[str]:
    expected, want = expected_arrays(spec), spec.max_segments + 1 if spec.packed else None
    found = [f"{name}: not a payload field" for name in sorted(set(batch) - set(FIELDS))]
    if batch.get("num_segments") != want:
        found.append(f"num_segments: {batch.get('num_segments')}, expected {want}")
    for name in sorted(set(FIELDS) - {"num_segments"}):
        value, (shape, dtype, required) = batch.get(name), expected.get(name, (None, "", False))
        if value is None:
            found += [f"{name}: missing"] if required else []
        elif shape is None:
            found.append(f"{name}: present, but a {'packed' if spec.packed else 'padded'} batch of this model has none")
        elif name == "advantages" and not spec.packed and value.shape == shape[:1] and value.dtype == dtype:
            continue  # one a row is legal too
        elif (value.shape, value.dtype) != (shape, dtype):
            found.append(f"{name}: {value.dtype} {list(value.shape)}, expected {dtype} {list(shape)}")
    return found


def _segment_findings(ids: np.ndarray, positions: np.ndarray, spec: PayloadSpec) -> list[str]:
    starts = (ids > 0) & (ids != np.pad(ids, ((0, 0), (1, 0)))[:, :-1])
    steps = np.where((ids > 0) & ~starts, np.pad(positions, ((0, 0), (1, 0)))[:, :-1] + 1, 0)
    checks = {
        f"segment_ids outside 0..{spec.max_segments}": ids.min() < 0 or ids.max() > spec.max_segments,
        "segment_ids that are not 1, 2, 3 ... in contiguous runs": (ids != np.cumsum(starts, axis=1))[ids > 0].any(),
        f"segments not aligned to {spec.segment_alignment}": (np.nonzero(starts)[1] % spec.segment_alignment).any(),
        "segment_positions that are not 0, 1, 2 ... in a segment and 0 on padding": (positions != steps).any(),
    }
    return [what for what, wrong in checks.items() if wrong]


def _routing_findings(routed: np.ndarray, must: np.ndarray, spec: PayloadSpec) -> list[str]:
    """`must` bool [rows, tokens]: the tokens that may not be unset."""
    found: set[str] = set()
    for row in range(spec.rows):
        for first in range(0, spec.width, TILE_TOKENS):
            here = must[row, first : first + TILE_TOKENS]
            tile = np.sort(routed[row, first : first + TILE_TOKENS], axis=-1)
            same = (tile[..., 1:] == tile[..., :-1]) & (tile[..., 1:] >= 0)
            checks = {
                f"ids outside -1..{spec.num_experts - 1}": tile.min() < UNSET or tile.max() >= spec.num_experts,
                "a token with some experts unset and some not": ((tile[..., 0] < 0) != (tile[..., -1] < 0)).any(),
                "-1 on a token that is neither padding nor the last of its sequence": (tile[..., 0] < 0)[here].any(),
                "a token that has the same expert twice": same.any(),
            }
            found |= {f"routed_experts: {what}" for what, wrong in checks.items() if wrong}
    return sorted(found)


def save_npz(path: str, batch: Batch) -> None:
    """Write a batch whole or not at all, each field under its own name; fields that are None are left out.

    Raises:
      BenchError: the file cannot be written, or is not an ordinary one.
    """
    temporary = ""
    try:
        target = os.path.realpath(path)
        if os.path.exists(target) and not os.path.isfile(target):  # a rename would put a file in place of the device
            raise BenchError("cannot write: not an ordinary file", where=path, todo="choose a writable place")
        with tempfile.NamedTemporaryFile(
            dir=os.path.dirname(target), prefix=".", suffix=".part", delete=False
        ) as stream:
            temporary = stream.name
            np.savez(stream, **{name: value for name, value in batch.items() if value is not None})
        os.chmod(temporary, 0o644)
        os.replace(temporary, target)
    except BaseException as error:
        if temporary:
            os.unlink(temporary)
        if isinstance(error, OSError):
            raise BenchError(f"cannot write: {error.strerror}", where=path, todo="choose a writable place") from error
        raise


def load_npz(path: str, spec: PayloadSpec) -> Batch:
    """Read a batch of `save_npz`, or one recorded under the payload's own field names. Never unpickles.

    Raises:
      BenchError: unreadable, or fields that do not fit the spec; each is named.
    """
    try:
        with open(path, "rb") as stream, np.load(stream, allow_pickle=False) as archive:
            batch: Batch = dict.fromkeys(FIELDS) | {name: archive[name] for name in archive.files}
        if batch["num_segments"] is not None:
            batch["num_segments"] = int(batch["num_segments"])
    except (OSError, ValueError, TypeError, AttributeError, EOFError, RuntimeError, BadZipFile, zlib.error) as error:
        raise BenchError(f"not a readable .npz: {error}", where=path, todo="write one with --save-payload") from error
    found = validate_batch(batch, spec)
    if found:
        raise BenchError("; ".join(found), where=path, todo="replay a batch of the same argv and model")
    return batch
