"""The MoE routing of a micro-batch, calibrated to production, and the load it puts on the expert shards. Numpy only.

A block is (rows of one fsdp index, token chunk): what one expert-parallel group holds at a time. Experts lie
contiguously over the shards. A layer's ratio is the fullest shard of its worst block over a balanced one: MaxText's
own probe, and what the trainer waits for. Each block gets exact counts per shard, then per expert; the runs of all
experts, one after another, are cut into top_k slots of n tokens; no run is longer than n, so no token meets an expert
twice, and a ratio below what chance would give is met like any other. Padding is routed too: an unset (-1) token goes
to the model's own router or to no expert, so that the trainer would feel another ratio than the one asked for;
`RoutingSpec.leave_unset` leaves padding and the last token of a sequence at -1, as Tunix's assemblers do.
tests/test_routing_felt.py compares both with MaxText's probes.

Routing SPEC:
  uniform        the noise of uniform random top-k; nothing is calibrated, the load is still measured
  1.3            one max/mean ratio for all layers
  FILE           a line per layer, RATIO or LAYER,RATIO (# comments are skipped; a header may name the columns), or
                 .json: a list of the same, or an object of ratios by layer
  LOG            a MaxText log that has lines of one of these forms (the median of them is taken):
    REQUIRED_RBF step=7 max=1.4100 per_layer=[1.2034,1.4100] program=normal
                 (log_required_ragged_buffer_factor; in the order of MaxText's scanned blocks, which for a model of
                 mixed layers is not the order of the depth)
    completed step: 7, ..., moe_max_load_ratio: 1.4100, moe_max_load_ratio_mean: 1.2500
                 (moe_log_max_load_ratio; the first layer gets the maximum, the others what gives the mean)
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from bench_common import BenchError, read_text

UNSET = -1  # Tunix's UNSET_ROUTED_EXPERT
TILE_TOKENS = 1400  # most tokens handled at a time: 60 layers x top-10 of them (1.7 MB) stay in the cache
TILE_RUN = 25  # mean tokens of a tile that share an expert in a row of it: shorter is more varied, and slower
REPEATS = 8  # in a large block each built token goes to so many places: an eighth of the building
REPEAT_FROM = 2**13  # least balanced load of a shard for that: a repeated assignment is then < 0.1 % of it
EVEN_FROM = 2**15  # tokens of a block: from here on its parts are alike without care, tiles being so much smaller
LOGNORMAL_SIGMA = 0.32  # hottest of 512 experts near 2.5 x the mean, as llama.cpp#28544 saw on a 512-expert model
SHARD_SIGMA = 0.25  # spread among the shards that are not the fullest: a choice, only the fullest is calibrated


@dataclass(frozen=True)
class RoutingSpec:
    """The routing load to build and to measure.

    `targets`: a max/mean ratio per layer, None = uniform random. `shards`: expert-parallel degree. `row_groups`: fsdp
    indexes, contiguous blocks of rows. `token_chunks`: num_moe_token_chunks. `sequence_shards`: context shards inside
    the expert-parallel group (cp-as-ep), each of which gives its own c-th part to chunk c. `skew`: of the experts
    within a shard: lognormal, powerlaw or flat. `tolerance`: relative.
    """

    targets: tuple[float | None, ...]
    shards: int
    row_groups: int
    token_chunks: int
    skew: str = "lognormal"
    tolerance: float = 0.01
    sequence_shards: int = 1
    leave_unset: bool = False


def check_routing(shape: tuple[int, int, int, int], num_experts: int, routing: RoutingSpec) -> None:
    """Raise a BenchError when routed_experts of this shape [rows, tokens, layers, top_k] cannot have that load."""
    rows, width, layers, top_k = shape
    possible = layers >= 1 and 1 <= top_k <= num_experts < 2**15
    require(possible, f"{layers} layers with top {top_k} of {num_experts} experts are impossible, or not int16")
    _check_layout(rows, width, layers, num_experts, routing)
    limit = routing.shards * min(top_k, num_experts // routing.shards) / top_k
    for layer, target in enumerate(routing.targets):
        if target is not None and not 1 - routing.tolerance <= target <= limit * (1 + routing.tolerance):
            todo = f"{routing.shards} shards of {num_experts} experts, top {top_k}, allow 1 to {limit:.4g}"
            raise BenchError(f"layer {layer}: routing load {target:g} is unattainable", where="payload", todo=todo)


def _check_layout(rows: int, width: int, layers: int, experts: int, routing: RoutingSpec) -> None:
    parts = routing.token_chunks * routing.sequence_shards
    least = min(routing.shards, routing.row_groups, routing.token_chunks, routing.sequence_shards)
    require(least >= 1, "shards, row groups, token chunks and sequence shards must be at least 1")
    require(len(routing.targets) == layers, f"{len(routing.targets)} routing targets for {layers} layers")
    require(experts % routing.shards == 0, f"{experts} experts cannot be laid evenly over {routing.shards} shards")
    require(rows % routing.row_groups == 0, f"{rows} rows cannot be split over {routing.row_groups} fsdp indexes")
    require(width % parts == 0, f"rows of {width} tokens cannot be split into {parts} token chunks")
    require(routing.skew in ("lognormal", "powerlaw", "flat"), f"unknown routing skew {routing.skew!r}")


def require(condition: bool, what: str) -> None:
    """Raise a BenchError that says `what` unless the condition holds."""
    if not condition:
        raise BenchError(what, where="payload")


def parse_routing_load(spec: str, num_layers: int) -> tuple[float | None, ...]:
    """Read a routing SPEC into one max/mean ratio per layer; None = uniform random.

    Raises:
      BenchError: unreadable, no ratio in it, or not as many ratios as layers.
    """
    if spec == "uniform":
        return (None,) * num_layers
    if _is_number(spec):
        return (number(spec, "routing load"),) * num_layers
    ratios = [] if spec.endswith((".json", ".csv")) else _ratios_of_log(spec, num_layers)
    ratios = ratios or _ratios_of_table(read_table(spec), num_layers, spec)
    if len(ratios) != num_layers:
        todo = "give one ratio per layer, or a single number"
        raise BenchError(f"{len(ratios)} ratios for {num_layers} layers", where=spec, todo=todo)
    return tuple(ratios)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


RATIO_COLUMNS = (
    "ratio",
    "max_over_mean",
    "shard_max_over_mean",
    "max_load_ratio",
    "moe_max_load_ratio",
    "load",
    "target",
)


def _ratios_of_table(table: Table, num_layers: int, path: str) -> list[float]:
    """Return the ratios of a table in the order of the layers.

    Raises:
      BenchError: no column that must be the ratio, or layers that are not 0, 1, 2 ... (or 1, 2, 3 ...), each once.
    """
    rows = [cells for _, cells in table.rows]
    if len(rows) == 1 and not table.header and len(rows[0]) == num_layers > 1:
        return rows[0]  # one line that holds them all
    names = table.header or {1: ["ratio"], 2: ["layer", "ratio"]}.get(len(rows[0]), [])
    layer = [i for i, name in enumerate(names) if "layer" in name]
    ratio = [i for i, name in enumerate(names) if i not in layer]
    if len(ratio) > 1:
        ratio = [i for known in RATIO_COLUMNS for i in ratio if names[i] == known]
    if not ratio or len(layer) > 1 or any(len(cells) != len(names) for cells in rows):
        raise BenchError("which column is the ratio?", where=path, todo="give RATIO or LAYER,RATIO, one layer a line")
    if not layer:
        return [cells[ratio[0]] for cells in rows]
    found = sorted((cells[layer[0]], cells[ratio[0]]) for cells in rows)
    if [number for number, _ in found] not in (list(range(len(found))), list(range(1, len(found) + 1))):
        raise BenchError("the layers are not 0, 1, 2 ..., each once", where=path, todo="give each layer one line")
    return [value for _, value in found]


def _ratios_of_log(path: str, num_layers: int) -> list[float]:
    text = read_text(path)
    rows = []
    for line in text.split("\n") if "REQUIRED_RBF" in text else ():  # no pattern: a broken line may be megabytes long
        _, _, values = line.partition("REQUIRED_RBF")[2].partition("per_layer=[")
        if "]" in values:
            rows.append([number(cell, path) for cell in values.partition("]")[0].split(",")])
    if rows:
        if len({len(row) for row in rows}) > 1:
            raise BenchError("REQUIRED_RBF lines of different lengths", where=path, todo="give the log of one run")
        return [statistics.median(column) for column in zip(*rows, strict=True)]
    pairs = re.findall(r"(?<!\w)moe_max_load_ratio: ([\d.]+), moe_max_load_ratio_mean: ([\d.]+)", text)
    if pairs:
        top, mean = (statistics.median(number(cell, path) for cell in column) for column in zip(*pairs, strict=True))
        rest = max(1.0, (mean * num_layers - top) / max(num_layers - 1, 1))
        return [top] + [rest] * (num_layers - 1)
    if "Config param" in text or "completed step" in text:
        todo = "log it with moe_log_max_load_ratio=true or log_required_ragged_buffer_factor=true"
        raise BenchError("a log without moe_max_load_ratio and without REQUIRED_RBF", where=path, todo=todo)
    return []


class Table(NamedTuple):
    """Numbers of a file: names of the columns in lower case, [] where it has none, and (line or item, numbers)."""

    header: list[str]
    rows: list[tuple[int, list[float]]]


def read_table(path: str) -> Table:
    """Return the table of a text file or of a .json file; never empty.

    In text, commas, semicolons or blanks separate, cells may be in double quotes, `#` starts a comment, and a first
    line of words is the header. In JSON: a list of numbers, of lists or of objects, alone or as the only list (or
    `per_layer`) of an object; or an object of numbers by layer.

    Raises:
      BenchError: unreadable, or something that is not a finite number; the message names the line.
    """
    text = read_text(path)
    header, rows = _json_cells(text, path) if path.endswith(".json") else _text_cells(text)
    if not rows:
        raise BenchError("no number in it", where=path, todo="write one a line")
    return Table([name.lower() for name in header], [(i, [number(cell, f"{path}:{i}") for cell in row])
                                                     for i, row in rows])  # fmt: skip


def _text_cells(text: str) -> tuple[list[str], list[tuple[int, list[Any]]]]:
    lines = [(i, line.split("#")[0].strip()) for i, line in enumerate(text.splitlines(), 1)]
    rows = [(i, [cell.strip('"') for cell in re.split(r"[,;\s]+", line)]) for i, line in lines if line]
    named = bool(rows) and any(cell[:1].isalpha() and not _is_number(cell) for cell in rows[0][1])
    return (rows[0][1], rows[1:]) if named else ([], rows)


def _json_cells(text: str, path: str) -> tuple[list[str], list[tuple[int, list[Any]]]]:
    try:
        items = json.loads(text)
    except json.JSONDecodeError as error:
        raise BenchError(f"not JSON: {error.msg}", where=f"{path}:{error.lineno}", todo="give a list") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of brackets
        raise BenchError(f"not JSON to read: {error}", where=path, todo="give a list of numbers") from error
    if isinstance(items, dict) and items and all(key.isdecimal() for key in items):
        return ["layer", "ratio"], [(i, list(pair)) for i, pair in enumerate(items.items(), 1)]
    if isinstance(items, dict):
        lists = [items["per_layer"]] if "per_layer" in items else [v for v in items.values() if isinstance(v, list)]
        items = lists[0] if len(lists) == 1 else None
    if not isinstance(items, list):
        raise BenchError("not a JSON list", where=path, todo="give a list of numbers")
    names = list(items[0]) if items and isinstance(items[0], dict) else []
    if names and any(not isinstance(item, dict) or set(item) != set(names) for item in items):
        raise BenchError("objects of different keys", where=path, todo="give each the same keys")
    return names, [(i, [item[name] for name in names] if names else item if isinstance(item, list) else [item])
                   for i, item in enumerate(items, 1)]  # fmt: skip


def number(text: Any, where: str) -> float:
    """Return a finite number, or raise a BenchError that names the place."""
    try:
        value = float(text)
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if isinstance(text, bool) or not math.isfinite(value):
        shown = repr(text) if len(repr(text)) <= 40 else repr(text)[:37] + "..."
        raise BenchError(f"{shown} is not a number", where=where, todo="give finite numbers")
    return value


# --- Random numbers that are the same everywhere ---


def generator(seed: int, index: int, purpose: int, part: int = 0) -> np.random.Generator:
    """Return the stream of random numbers for one purpose of one micro-batch; the same on every machine."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence((seed, index, purpose, part))))


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Nearly normal float64: sums of 12 uniform 16-bit integers, within 6 sigma."""
    return (rng.integers(0, 2**16, size=(*shape, 12)).sum(axis=-1) - 12 * 32767.5) / 65536


def exp(x: np.ndarray) -> np.ndarray:
    """e**x within 1e-5 for |x| <= 24, by additions and multiplications alone."""
    x = x / 64
    series = 1 + x * (1 + x / 2 * (1 + x / 3 * (1 + x / 4 * (1 + x / 5 * (1 + x / 6)))))
    for _ in range(6):
        series = series * series
    return series


def apportion(total: np.ndarray, weights: np.ndarray, cap: np.ndarray) -> np.ndarray:
    """Split integers `total` [...] by integer `weights` [..., m] into counts of at most `cap` [...] that sum to it.

    Needs total <= cap * m. What a cap cuts off goes to the first parts that have room.
    """
    cumulative = np.cumsum(np.maximum(weights, 1), axis=-1)
    counts = np.diff(total[..., None] * cumulative // cumulative[..., -1:], axis=-1, prepend=0)
    capped = np.minimum(counts, cap[..., None])
    room = cap[..., None] - capped
    spill = (counts - capped).sum(axis=-1, keepdims=True)
    return capped + np.clip(spill - (np.cumsum(room, axis=-1) - room), 0, room)


# --- Routing ---


def build_routing(
    shape: tuple[int, int, int, int],
    num_experts: int,
    routing: RoutingSpec,
    assigned: np.ndarray,
    seed: int,
    index: int,
) -> np.ndarray:
    """Return routed_experts int16 of shape [rows, tokens, layers, top_k], -1 where not `assigned`.

    Args:
      assigned: bool [rows, tokens].
      seed, index: of the run and of the micro-batch.
    """
    (rows, width, layers, top_k), shards = shape, routing.shards
    slots = layers * top_k
    routed = np.empty((rows * width, slots), np.int16)
    if not assigned.all():
        routed.fill(UNSET)

    def assigned_places(layout: RoutingSpec) -> list[np.ndarray]:
        places = [(np.arange(rows)[block_rows, None] * width + tokens).ravel()
                  for block_rows, tokens in _blocks(rows, width, layout)]  # fmt: skip
        return [part[assigned.ravel()[part]] for part in places]

    blocks = assigned_places(routing)
    rng, most = generator(seed, index, 3), max(block.size for block in blocks)
    worst = rng.choice([i for i, block in enumerate(blocks) if block.size == most], size=layers)
    fullest = np.concatenate([rng.permutation(shards) for _ in range(-(-layers // shards))])[:layers]
    skew = _skew_weights(routing.skew, rng, (layers, shards, num_experts // shards))
    every_chunk, layout = _holds_in_every_chunk(routing, most * top_k), routing
    if every_chunk and most < EVEN_FROM:
        chunks = routing.token_chunks * routing.sequence_shards
        layout = dataclasses.replace(routing, token_chunks=chunks, sequence_shards=1)
        blocks = assigned_places(layout)
    whole = routed.view(f"V{2 * slots}").ravel()  # one item = all experts of one token, moved as one piece
    for i, block in enumerate(blocks):
        rng = generator(seed, index, 3, i + 1)
        is_worst = worst // routing.token_chunks == i // layout.token_chunks if every_chunk else worst == i
        large = block.size * top_k >= shards * REPEAT_FROM
        cut = block.size - block.size % REPEATS if large else 0
        for places in (block[:cut].reshape(REPEATS, -1), block[None, cut:]):
            if places.size:
                loads = _shard_loads(routing, places.shape[1], top_k, num_experts // shards, is_worst, fullest, rng)
                counts = _expert_counts(routing, places.shape, top_k, loads, skew, rng)
                _deal(whole, places, counts, top_k, rng)
    return routed.reshape(shape)


def _blocks(rows: int, width: int, routing: RoutingSpec) -> Iterator[tuple[slice, np.ndarray]]:
    """Yield (rows, tokens) of every block, row group by row group."""
    tokens = np.arange(width).reshape(routing.sequence_shards, routing.token_chunks, -1)
    height = rows // routing.row_groups
    for group in range(routing.row_groups):
        for chunk in range(routing.token_chunks):
            yield slice(group * height, (group + 1) * height), tokens[:, chunk].ravel()


def _holds_in_every_chunk(routing: RoutingSpec, assignments: int) -> bool:
    """Return whether all chunks of a layer's worst row group get the target's load, rather than one of them.

    Where context shards belong to the expert-parallel group, MaxText's chunk is a c-th of each of them. With the load
    in every chunk, and each context shard's part of it built alike, the ratio is the same over contiguous chunks, and
    nobody who counts those finds another. A part is off by half an assignment at most: blocks of too few
    `assignments` for the tolerance are left as they are.
    """
    rounding = 0.5 * routing.sequence_shards * routing.shards / max(assignments, 1)
    return min(routing.sequence_shards, routing.token_chunks) > 1 and rounding <= routing.tolerance / 2


def _skew_weights(skew: str, rng: np.random.Generator, shape: tuple[int, int, int]) -> np.ndarray:
    """Return int64 weights [layers, shards, experts of a shard]."""
    if skew == "flat":
        return np.ones(shape, np.int64)
    if skew == "lognormal":
        return (exp(LOGNORMAL_SIGMA * normal(rng, *shape)) * 2**16).astype(np.int64)
    # rank ** -0.75: TensorRT-LLM#19148 takes -0.8; square roots alone give 0.75.
    root = np.sqrt(1.0 + np.argsort(rng.integers(0, 2**32, size=shape), axis=-1, kind="stable"))
    return (2**20 / (root * np.sqrt(root))).astype(np.int64)


def _shard_loads(
    routing: RoutingSpec,
    tokens: int,
    top_k: int,
    shard_experts: int,
    is_worst: np.ndarray,
    fullest: np.ndarray,
    rng: np.random.Generator,
) -> np.ndarray:
    """Return int64 [layers, shards]: the assignments of a block of `tokens` tokens to each shard.

    A layer's fullest shard has the target's load in its worst block, and half or more of the excess in the others.
    """
    layers, shards, size = len(routing.targets), routing.shards, tokens * top_k
    target = np.array([1.0 if value is None else value for value in routing.targets])
    load = (1 + (target - 1) * np.where(is_worst, 1, rng.integers(512, 960, size=layers) / 1024)) * size / shards
    most = np.where(is_worst, np.floor(load + 0.5), np.floor(load)).astype(np.int64)
    most = np.clip(most, -(-size // shards), tokens * min(top_k, shard_experts))
    loads = np.tile(most[:, None], (1, shards))
    if shards > 1:
        weights = (exp(SHARD_SIGMA * normal(rng, layers, shards - 1)) * 2**16).astype(np.int64)
        loads[np.arange(shards) != fullest[:, None]] = apportion(size - most, weights, most).ravel()
    return loads


def _expert_counts(
    routing: RoutingSpec,
    places: tuple[int, int],
    top_k: int,
    loads: np.ndarray,
    skew: np.ndarray,
    rng: np.random.Generator,
) -> np.ndarray:
    """Return int64 [layers, experts]: how often n tokens use each expert, at most n times; `places` is (repeats, n).

    A layer without a target gets counts of the mean and variance of independent uniform top-k draws, repeats counted.
    """
    (repeats, tokens), layers = places, len(routing.targets)
    counts = apportion(loads, skew, np.full_like(loads, tokens)).reshape(layers, -1)
    natural = [value is None for value in routing.targets]
    if any(natural):
        share = top_k / counts.shape[1]
        deviation = math.sqrt(repeats * tokens * share * (1 - share)) / repeats
        drawn = np.maximum(tokens * share + deviation * normal(rng, *counts.shape), 0)
        total, cap = np.full(layers, tokens * top_k), np.full(layers, tokens)
        counts[natural] = apportion(total, (drawn * 1024).astype(np.int64), cap)[natural]
    return counts


def _deal(whole: np.ndarray, places: np.ndarray, counts: np.ndarray, top_k: int, rng: np.random.Generator) -> None:
    """Deal a block's experts out to its tokens, in tiles that stay in the cache.

    Args:
      whole: void [slots of the micro-batch], an item = int16 [layers, top_k] of a token; written here.
      places: int64 [repeats, n], the block's token slots; each of n tokens built goes to all its repeats.
      counts: int64 [layers, experts], how often the n tokens use each expert: each at most n, n * top_k in sum.

    Assignment number i of a layer, expert by expert in shuffled order, goes to token i mod n. A tile is the tokens that
    are equal modulo the number of tiles: it holds its share of every expert within one (`before` counts them), so at
    most its size; within it the same rule holds, with experts reordered once more and tokens in shuffled places.
    """
    tokens, (layers, experts) = places.shape[1], counts.shape
    tiles = -(-tokens // min(TILE_TOKENS, max(64, TILE_RUN * experts // top_k)))
    shuffle = np.argsort(rng.integers(0, 2**32, size=counts.shape), axis=1, kind="stable")
    line = np.pad(np.cumsum(np.take_along_axis(counts, shuffle, axis=1), axis=1), ((0, 0), (1, 0)))
    turns, left = np.divmod(line, tokens)
    names, first = shuffle.astype(np.int16), 0
    for j in range(tiles):
        size = (tokens - j + tiles - 1) // tiles
        before = turns * size + (left + (tiles - 1 - j)) // tiles
        order = rng.permutation(experts)
        times = np.diff(before, axis=1).take(order, axis=1)
        pattern = np.repeat(names.take(order, axis=1).ravel(), times.ravel()).reshape(layers * top_k, size)
        tile = np.ascontiguousarray(pattern.T).view(whole.dtype).ravel()
        for row in places[:, first : first + size]:
            whole[row[rng.permutation(size)]] = tile
        first += size


# --- Measuring the load ---

FORMULAS = {
    "max_over_mean": "max / mean over shards (or experts) of the worst block",
    "maxvio": "(max - mean) / mean, the same block",
    "cv": "standard deviation / mean, the same block",
    "max_over_mean_batch": "max / mean over the whole micro-batch",
}


@dataclass(frozen=True)
class LoadTable:
    """Achieved against target routing load.

    `measures`: `shard_` or `expert_` + name of FORMULAS -> float64 [layers], NaN = no tokens.
    """

    routing: RoutingSpec
    num_experts: int
    assignments: int
    unset_share: float
    measures: dict[str, np.ndarray]
    worst_block: np.ndarray
    fullest_shard: np.ndarray

    @property
    def errors(self) -> list[float | None]:
        """Relative error of each layer's ratio against its target; None without a target or without tokens."""
        pairs = zip(self.measures["shard_max_over_mean"].tolist(), self.routing.targets, strict=True)
        return [None if want is None or math.isnan(got) else got / want - 1 for got, want in pairs]

    @property
    def out_of_tolerance(self) -> list[int]:
        """Layers whose ratio is further from the target than the tolerance."""
        return [i for i, error in enumerate(self.errors) if error is not None and abs(error) > self.routing.tolerance]

    def summary(self) -> dict[str, dict[str, float | None]]:
        """Return min, median and max over the layers of the targets and of every measure."""
        targets = np.array([math.nan if want is None else want for want in self.routing.targets])
        result = {}
        for name, values in {"target": targets, **self.measures}.items():
            known = values[np.isfinite(values)]
            three = ("min", np.min), ("median", np.median), ("max", np.max)
            result[name] = {key: round(float(f(known)), 6) if known.size else None for key, f in three}
        return result

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON-ready form; ratios have no unit, null is unknown."""
        layers = []
        for i, (want, error) in enumerate(zip(self.routing.targets, self.errors, strict=True)):
            values = {name: round(float(column[i]), 6) for name, column in self.measures.items()}
            known = {name: None if math.isnan(value) else value for name, value in values.items()}
            places = {"worst_block": int(self.worst_block[i]), "fullest_shard": int(self.fullest_shard[i])}
            layers.append({"layer": i, "target": want, "relative_error": error, **places, **known})
        layout = {name: getattr(self.routing, name) for name in RoutingSpec.__dataclass_fields__ if name != "targets"}
        return {
            "formulas": FORMULAS,
            "num_experts": self.num_experts,
            **layout,
            "assignments": self.assignments,
            "unset_share": round(self.unset_share, 6),
            "out_of_tolerance_layers": self.out_of_tolerance,
            "summary": self.summary(),
            "layers": layers,
        }

    def lines(self) -> list[str]:
        """Return the text form, at most 80 columns."""
        spec = self.routing
        text = [
            f"routing load: {len(spec.targets)} layers, {self.num_experts} experts over {spec.shards} shards",
            f"  blocks: {spec.row_groups} row groups x {spec.token_chunks} token chunks; {self.unset_share:.2%} unset",
            f"  {'over the layers':<28}{'min':>10}{'median':>10}{'max':>10}",
        ]
        for name, values in self.summary().items():
            cells = "".join(f"{'?' if value is None else f'{value:.4f}':>10}" for value in values.values())
            text.append(f"  {name:<28}{cells}")
        text += [f"  {name} = {formula}" for name, formula in FORMULAS.items()]
        known = [(abs(error), i) for i, error in enumerate(self.errors) if error is not None]
        if known:
            error, layer = max(known)
            text.append(f"  furthest from target: layer {layer}, {error:.3%} (tolerance {spec.tolerance:.3%})")
        return text


def measure_load(routed: np.ndarray, num_experts: int, routing: RoutingSpec) -> LoadTable:
    """Count a finished `routed_experts` [rows, tokens, layers, top_k]; -1 is left out, an empty block has no ratio.

    Raises:
      BenchError: the array does not fit the layout, or holds an id that is neither -1 nor an expert.
    """
    rows, width, layers, _ = routed.shape
    _check_layout(rows, width, layers, num_experts, routing)
    by_expert = np.stack([_count(routed, *block, num_experts) for block in _blocks(rows, width, routing)])
    by_shard = by_expert.reshape(*by_expert.shape[:2], routing.shards, -1).sum(axis=-1)
    measures: dict[str, np.ndarray] = {}
    for name, counts in (("expert", by_expert), ("shard", by_shard)):  # [blocks, layers, experts or shards]
        ratio, at = _max_over_mean(counts)
        worst = counts[at, np.arange(layers)]
        variation = worst.std(axis=-1) / np.where(np.isnan(ratio), np.nan, worst.mean(axis=-1))
        batch = _max_over_mean(counts.sum(axis=0, keepdims=True))[0]
        columns = zip(FORMULAS, (ratio, ratio - 1, variation, batch), strict=True)
        measures = {f"{name}_{key}": column for key, column in columns} | measures
    total = int(by_shard.sum())
    unset = 1 - total / routed.size if routed.size else 0.0
    return LoadTable(routing, num_experts, total, unset, measures, at, worst.argmax(axis=-1))


def _count(routed: np.ndarray, rows: slice, tokens: np.ndarray, num_experts: int) -> np.ndarray:
    """Return int64 [layers, experts] of one block, counted a tile of tokens at a time."""
    layers, top_k = routed.shape[2:]
    bins = layers * (num_experts + 1)  # bin 0 of a layer counts its -1
    kind = np.uint16 if bins <= 2**16 else np.int64  # 16 bits wrap -1 to where it belongs, and are quicker
    offset = np.repeat(np.arange(1, bins, num_experts + 1, dtype=kind), top_k)
    counts = np.zeros(bins, np.int64)
    for row in routed[rows]:
        for first in range(0, tokens.size, TILE_TOKENS):
            tile = row[tokens[first : first + TILE_TOKENS]].reshape(-1, layers * top_k)
            known = tile.min() >= UNSET and tile.max() < num_experts
            require(known, f"routed_experts has ids outside -1..{num_experts - 1}")
            counts += np.bincount((tile.astype(kind) + offset).ravel(), minlength=bins)
    return counts.reshape(layers, -1)[:, 1:]


def _max_over_mean(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (largest max/mean over the blocks, its block) of int64 [blocks, layers, parts]; NaN if all are empty."""
    total = counts.sum(axis=-1)
    ratio = counts.max(axis=-1) * counts.shape[-1] / np.maximum(total, 1)
    return np.where(total.any(axis=0), ratio.max(axis=0), np.nan), ratio.argmax(axis=0)


def check_load(table: LoadTable) -> None:
    """Raise a BenchError when a layer is out of tolerance, before any device time is spent."""
    out = table.out_of_tolerance
    if out:
        got, want = table.measures["shard_max_over_mean"][out[0]], table.routing.targets[out[0]]
        what = f"{len(out)} layers out of tolerance, first layer {out[0]}: {got:.4f} against {want:.4f}"
        todo = "blocks of more tokens come closer, or widen --routing-tolerance"
        raise BenchError(what, where="routing load", todo=todo)
