"""The routing load: exact targets, distinct experts, the same bytes everywhere, and a measurement one can trust."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import bench_routing
from bench_common import BenchError
from bench_routing import RoutingSpec, build_routing, check_load, check_routing, measure_load, parse_routing_load


def build(shape, experts, routing, seed=0, index=0, assigned=None):
    check_routing(shape, experts, routing)
    assigned = np.ones(shape[:2], bool) if assigned is None else assigned
    return build_routing(shape, experts, routing, assigned, seed, index)


def blocks_by_hand(routed, routing):
    """Yield the assignments int [tokens, layers, top_k] of every block, by plain loops over rows and tokens."""
    rows, width = routed.shape[:2]
    part = width // routing.sequence_shards // routing.token_chunks
    for group in range(routing.row_groups):
        for chunk in range(routing.token_chunks):
            chosen = [
                routed[row, token]
                for row in range(rows)
                if row * routing.row_groups // rows == group
                for token in range(width)
                if token // part % routing.token_chunks == chunk
            ]
            yield np.array(chosen)


def ratio_by_hand(routed, experts, routing):
    """Return per layer the largest of fullest shard / (assignments / shards) over the blocks."""
    per_shard = experts // routing.shards
    ratios = []
    for layer in range(routed.shape[2]):
        found = []
        for block in blocks_by_hand(routed, routing):
            ids = [int(i) for i in block[:, layer].ravel() if i >= 0]
            loads = [sum(i // per_shard == shard for i in ids) for shard in range(routing.shards)]
            if ids:
                found.append(max(loads) * routing.shards / len(ids))
        ratios.append(max(found))
    return ratios


def assert_distinct(routed):
    ordered = np.sort(routed, axis=-1)
    assert not ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any()


@st.composite
def layouts(draw):
    """A shape, a number of experts and a routing whose every target is attainable; at most some 2,000 assignments."""
    shards = draw(st.integers(1, 6))
    experts = shards * draw(st.integers(1, 7))
    top_k = draw(st.integers(1, min(experts, 6)))
    groups, per_group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    chunks, sequence = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    width = chunks * sequence * draw(st.integers(1, 12))
    limit = shards * min(top_k, experts // shards) / top_k
    targets = draw(st.lists(st.floats(1, limit), min_size=1, max_size=4))
    skew = draw(st.sampled_from(["lognormal", "powerlaw", "flat"]))
    routing = RoutingSpec(tuple(targets), shards, groups, chunks, skew, 0.01, sequence)
    return (groups * per_group, width, len(targets), top_k), experts, routing


@pytest.mark.parametrize("leave", [0, 100])
def test_under_cp_as_ep_the_ratio_is_the_same_over_contiguous_chunks(leave):
    # 2 row groups x 2 chunks of 4 context shards: a block is 4 rows x 200 tokens x top-8 over 8 shards, 800 a shard
    routing = RoutingSpec((1.0, 1.2, 1.75, 3.3), 8, 2, 2, "lognormal", 0.01, 4, bool(leave))
    assigned = np.ones((8, 400), bool)
    assigned[:, 400 - leave :] = False  # the last context shard
    routed = build((8, 400, 4, 8), 64, routing, assigned=assigned)
    assert_distinct(routed)
    assert ratio_by_hand(routed, 64, routing) == pytest.approx(routing.targets, rel=0.005)
    contiguous = dataclasses.replace(routing, sequence_shards=1)
    assert ratio_by_hand(routed, 64, contiguous) == pytest.approx(routing.targets, rel=0.005)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(layouts(), st.integers(0, 2**32), st.integers(0, 50))
def test_any_attainable_load_is_met_exactly_with_distinct_experts(layout, seed, index):
    shape, experts, routing = layout
    routed = build(shape, experts, routing, seed, index)
    assert routed.shape == shape and routed.dtype == np.int16
    assert routed.min() >= 0 and routed.max() < experts
    assert_distinct(routed)
    # Blocks are equal here, and a count is an integer: the nearest to the target, or the least a fullest shard can be.
    size = shape[0] * shape[1] // (routing.row_groups * routing.token_chunks) * shape[3]
    got = measure_load(routed, experts, routing).measures["shard_max_over_mean"]
    for target, ratio in zip(routing.targets, got, strict=True):
        nearest = max(math.floor(target * size / routing.shards + 0.5), -(-size // routing.shards))
        most = size // shape[3] * min(shape[3], experts // routing.shards)
        assert ratio == pytest.approx(min(nearest, most) * routing.shards / size, rel=1e-12)
    assert build(shape, experts, routing, seed, index).tobytes() == routed.tobytes()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(layouts(), st.integers(0, 2**32), st.data())
def test_unset_tokens_stay_unset_and_the_measurement_agrees_with_counting_by_hand(layout, seed, data):
    shape, experts, routing = layout
    bits = data.draw(st.lists(st.booleans(), min_size=shape[0] * shape[1], max_size=shape[0] * shape[1]))
    assigned = np.array(bits).reshape(shape[:2])
    routed = build(shape, experts, routing, seed, 0, assigned)
    assert (routed[~assigned] == -1).all() and (routed[assigned] >= 0).all()
    assert_distinct(routed)
    table = measure_load(routed, experts, routing)
    assert table.assignments == assigned.sum() * shape[2] * shape[3]
    assert table.unset_share == pytest.approx(1 - assigned.mean())
    got = table.measures["shard_max_over_mean"]
    if assigned.any():
        assert got.tolist() == pytest.approx(ratio_by_hand(routed, experts, routing))
    else:
        assert np.isnan(got).all() and table.errors == [None] * shape[2]


def test_a_large_block_repeats_tokens_and_still_meets_the_target():
    shape, routing = (1, 8203, 2, 4), RoutingSpec((1.2345, 1.0), 2, 1, 1)  # 8203 = 8 x 1025 + 3
    assert 8203 * 4 >= 2 * bench_routing.REPEAT_FROM
    routed = build(shape, 16, routing)
    assert_distinct(routed)
    assert ratio_by_hand(routed, 16, routing) == pytest.approx([1.2345, 1.0], rel=1e-3)
    assert len(np.unique(routed.reshape(8203, -1), axis=0)) > 250  # 17 tiles, a new set about every expert


def test_targets_far_below_chance_and_at_the_limit_are_met():
    # Chance alone gives 256 tokens a fullest shard some 10 % over the mean; top-2 of 4 per shard allow 8 at most.
    shape, routing = (4, 128, 3, 2), RoutingSpec((1.0, 1.001, 8.0), 8, 2, 1)
    table = measure_load(build(shape, 32, routing), 32, routing)
    assert table.measures["shard_max_over_mean"].tolist() == pytest.approx([1.0, 1.0, 8.0], abs=0.008)
    assert table.out_of_tolerance == []


def test_other_blocks_are_below_the_worst_and_the_fullest_shard_moves_from_layer_to_layer():
    routing = RoutingSpec((1.5,) * 8, 8, 4, 2)
    routed = build((8, 512, 8, 4), 64, routing)
    table = measure_load(routed, 64, routing)
    assert sorted(table.fullest_shard) == list(range(8))
    loads = [np.bincount(block[:, 0].ravel() // 8, minlength=8) for block in blocks_by_hand(routed, routing)]
    ratios = sorted(max(load) * 8 / sum(load) for load in loads)
    assert ratios[-1] == pytest.approx(1.5, rel=0.001)
    assert 1.2 < ratios[0] < ratios[-2] < 1.5  # half of the excess and more, and not all alike
    assert len(set(ratios)) > 4


def test_every_micro_batch_and_every_row_differs():
    shape, routing = (4, 256, 2, 4), RoutingSpec((1.1, 1.2), 4, 1, 1)
    first, second = build(shape, 16, routing, 3, 0), build(shape, 16, routing, 3, 1)
    assert (first != second).any() and (build(shape, 16, routing, 4, 0) != first).any()
    assert len({row.tobytes() for row in first}) == 4


def test_skew_shapes_the_experts_within_a_shard():
    spread = {}
    for skew in ("flat", "lognormal", "powerlaw"):
        routing = RoutingSpec((1.0,), 4, 1, 1, skew)
        spread[skew] = measure_load(build((2, 2048, 1, 4), 128, routing), 128, routing).measures["expert_cv"][0]
    assert spread["flat"] < 0.01 < 0.2 < spread["lognormal"] < 0.5 < spread["powerlaw"]


def test_uniform_has_the_noise_of_independent_draws():
    # A share of 1/8 of n tokens uses an expert: standard deviation sqrt(n/8 * 7/8), over a mean of n/8.
    tokens, routing = 4096, RoutingSpec((None,) * 20, 4, 1, 1)
    routed = build((1, tokens, 20, 8), 64, routing)
    assert_distinct(routed)
    table = measure_load(routed, 64, routing)
    want = math.sqrt(tokens / 8 * 7 / 8) / (tokens / 8)
    assert np.median(table.measures["expert_cv"]) == pytest.approx(want, rel=0.1)
    assert table.errors == [None] * 20 and table.out_of_tolerance == []


def test_one_shard_is_always_balanced():
    routing = RoutingSpec((1.0,), 1, 1, 1)
    table = measure_load(build((2, 8, 1, 2), 4, routing), 4, routing)
    assert table.measures["shard_max_over_mean"].tolist() == [1.0] and table.measures["shard_cv"].tolist() == [0.0]


def test_same_seed_same_bytes_on_any_machine():
    # Recorded once; the same with numpy 2.4 and 2.5, Python 3.11 and 3.12, and with numpy's AVX paths switched off.
    digest = hashlib.sha256()
    for skew in ("lognormal", "powerlaw", "flat"):
        digest.update(build((4, 96, 3, 4), 16, RoutingSpec((1.3, 1.05, None), 4, 2, 2, skew), 7, 5).tobytes())
    assert digest.hexdigest() == "841e526203d3a321a29c9dc3e33343089508ff09adb9ccf3d46cc5d109927284"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"targets": (1.1, 9.0)},
            "layer 1: routing load 9 is unattainable; 4 shards of 8 experts, top 2, allow 1 to",
        ),
        ({"targets": (0.9, 1.1)}, "layer 0: routing load 0.9 is unattainable"),
        ({"targets": (1.1,)}, "1 routing targets for 2 layers"),
        ({"shards": 3}, "8 experts cannot be laid evenly over 3 shards"),
        ({"shards": 16}, "8 experts cannot be laid evenly over 16 shards"),
        ({"shards": 0}, "must be at least 1"),
        ({"shards": 1}, "layer 0: routing load 1.1 is unattainable; 1 shards"),
        ({"row_groups": 3}, "4 rows cannot be split over 3 fsdp indexes"),
        ({"token_chunks": 5}, "rows of 16 tokens cannot be split into 5 token chunks"),
        ({"token_chunks": 4, "sequence_shards": 8}, "rows of 16 tokens cannot be split into 32 token chunks"),
        ({"skew": "zipf"}, "unknown routing skew 'zipf'"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_in_one_line(change, message):
    routing = RoutingSpec(**{"targets": (1.1, 1.2), "shards": 4, "row_groups": 2, "token_chunks": 2, **change})
    with pytest.raises(BenchError) as error:
        check_routing((4, 16, 2, 2), 8, routing)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_top_k_must_fit_the_experts_and_int16():
    for top_k, experts in ((9, 8), (0, 8), (2, 2**15)):
        with pytest.raises(BenchError, match="impossible"):
            check_routing((4, 16, 1, top_k), experts, RoutingSpec((1.0,), 1, 1, 1))


# --- Measuring ---


def test_measures_of_a_batch_counted_by_hand():
    # Two rows are two blocks of three tokens, top-1 of 4 experts over 2 shards (experts 0, 1 and 2, 3).
    routed = np.array([[0, 0, 2], [3, -1, -1]], np.int16).reshape(2, 3, 1, 1)
    table = measure_load(routed, 4, RoutingSpec((2.0,), 2, 2, 1))
    got = {name: float(values[0]) for name, values in table.measures.items()}
    # Row 0: shards 2 and 1, ratio 4/3. Row 1: shards 0 and 1, ratio 2: the worst. In all: shards 2 and 2.
    # Experts, row 0: 2 0 1 0, ratio 8/3; row 1: 0 0 0 1, ratio 4, std sqrt(3)/4 over a mean of 1/4; in all 2 0 1 1.
    assert got == pytest.approx(
        {
            "shard_max_over_mean": 2,
            "shard_maxvio": 1,
            "shard_cv": 1,
            "shard_max_over_mean_batch": 1,
            "expert_max_over_mean": 4,
            "expert_maxvio": 3,
            "expert_cv": math.sqrt(3),
            "expert_max_over_mean_batch": 2,
        }
    )
    assert (table.assignments, table.worst_block[0], table.fullest_shard[0]) == (4, 1, 1)
    assert table.unset_share == pytest.approx(1 / 3) and table.errors == [0.0]


def test_text_and_json_tell_the_same_and_fit_80_columns():
    routing = RoutingSpec((1.5, None), 2, 1, 1)
    table = measure_load(build((2, 32, 2, 2), 8, routing), 8, routing)
    text, document = table.lines(), json.loads(json.dumps(table.as_dict(), allow_nan=False))
    assert max(map(len, text)) <= 80
    assert text[:4] == [
        "routing load: 2 layers, 8 experts over 2 shards",
        "  blocks: 1 row groups x 1 token chunks; 0.00% unset",
        "  over the layers                    min    median       max",
        "  target                          1.5000    1.5000    1.5000",
    ]
    assert text[-1] == "  furthest from target: layer 0, 0.000% (tolerance 1.000%)"
    for name, values in document["summary"].items():
        line = next(line for line in text if line.split()[0] == name)
        assert [float(cell) for cell in line.split()[1:]] == [round(v, 4) for v in values.values()]
    assert document["layers"][0]["target"] == 1.5 and document["layers"][1]["target"] is None
    assert document["out_of_tolerance_layers"] == [] and document["unset_share"] == 0


def test_no_tokens_are_unknown_not_zero():
    routing = RoutingSpec((1.5,), 2, 1, 1)
    table = measure_load(np.full((1, 4, 1, 2), -1, np.int16), 4, routing)
    assert table.as_dict()["layers"][0]["shard_max_over_mean"] is None
    assert table.summary()["shard_cv"] == {"min": None, "median": None, "max": None}
    assert any(line.split()[1:] == ["?", "?", "?"] for line in table.lines())
    check_load(table)  # nothing is known, so nothing is out of tolerance
    assert measure_load(np.empty((0, 0, 1, 2), np.int16), 4, routing).unset_share == 0


def test_out_of_tolerance_fails_and_names_the_layer():
    # 5 assignments over 2 shards cannot be even: 3 against 2.5.
    routing = RoutingSpec((1.0,), 2, 1, 1)
    table = measure_load(build((1, 5, 1, 1), 4, routing), 4, routing)
    assert table.out_of_tolerance == [0]
    with pytest.raises(BenchError, match=r"1 layers out of tolerance, first layer 0: 1.2000"):
        check_load(table)
    check_load(measure_load(build((1, 6, 1, 1), 4, routing), 4, routing))


@pytest.mark.parametrize("wrong", [-2, 4, 300])
@pytest.mark.parametrize("experts", [4, 2**14])
def test_an_id_that_is_no_expert_is_refused(wrong, experts):
    routed = np.zeros((1, 4, 5, 1), np.int16)
    routed[0, 3, 1, 0] = wrong if experts == 4 else -2
    with pytest.raises(BenchError, match="ids outside"):
        measure_load(routed, experts, RoutingSpec((1.0,) * 5, 1, 1, 1))


def test_many_bins_are_counted_like_few():
    # 5 layers of 2**14 experts are more bins than 16 bits number.
    routed = np.array([0, 1, 2**14 - 1, -1], np.int16).reshape(1, 4, 1, 1).repeat(5, axis=2)
    table = measure_load(routed, 2**14, RoutingSpec((1.0,) * 5, 2, 1, 1))
    assert table.measures["shard_max_over_mean"].tolist() == pytest.approx([4 / 3] * 5) and table.assignments == 15


# --- The SPEC ---

LOG = """\
I1030 12:00:01 pyconfig.py:584] Config param num_experts: 512
completed step: 0, seconds: 9.100, loss: 3.100, moe_max_load_ratio: 9.0000, moe_max_load_ratio_mean: 2.0000
completed step: 1, seconds: 1.100, loss: 3.000, moe_max_load_ratio: 2.0000, moe_max_load_ratio_mean: 1.4000
completed step: 2, seconds: 1.100, loss: 2.900, moe_max_load_ratio: 1.8000, moe_max_load_ratio_mean: 1.3000, mtp: 1
"""
RBF = """\
REQUIRED_RBF step=3 max=1.4000 per_layer=[1.2000,1.4000,1.0500] program=normal
REQUIRED_RBF step=4 max=1.6000 per_layer=[1.3000,1.6000,1.0500] program=dropless
"""


@pytest.mark.parametrize(
    ("name", "text", "want"),
    [
        ("a.json", "[1.1, 1.2, 1.3]", (1.1, 1.2, 1.3)),
        ("b.json", '{"per_layer": [1.1, 1.2, 1.3]}', (1.1, 1.2, 1.3)),
        ("a.csv", "1.1\n1.2\n1.3\n", (1.1, 1.2, 1.3)),
        ("b.csv", "layer,ratio\r\n2,1.3\r\n0,1.1\r\n1,1.2  # the middle\r\n", (1.1, 1.2, 1.3)),
        ("a.txt", "# layer ratio\n0 1.1\n1 1.2\n2 1.3\n", (1.1, 1.2, 1.3)),
        ("c.csv", "1.1, 1.2, 1.3\n", (1.1, 1.2, 1.3)),
        ("d.csv", '"Ratio";"Layer"\n1.3;3\n1.1;1\n1.2;2\n', (1.1, 1.2, 1.3)),
        ("e.csv", "layer,cv,shard_max_over_mean\n0,0.5,1.1\n1,0.5,1.2\n2,0.5,1.3\n", (1.1, 1.2, 1.3)),
        ("c.json", '{"2": 1.3, "0": 1.1, "1": 1.2}', (1.1, 1.2, 1.3)),
        (
            "d.json",
            '[{"layer": 1, "ratio": 1.2}, {"ratio": 1.3, "layer": 2}, {"layer": 0, "ratio": 1.1}]',
            (1.1, 1.2, 1.3),
        ),
        ("e.json", '{"run": "a", "ratios": [[2, 1.3], [0, 1.1], [1, 1.2]]}', (1.1, 1.2, 1.3)),
        ("rbf.log", RBF, (1.25, 1.5, 1.05)),
        ("max.log", LOG, (2.0, 1.1, 1.1)),  # median of max 2.0, of mean 1.4: 3 x 1.4 = 2.0 + 1.1 + 1.1
        ("both.log", LOG + RBF, (1.25, 1.5, 1.05)),
    ],
)
def test_ratios_are_read_from_files(tmp_path, name, text, want):
    (tmp_path / name).write_text(text)
    assert parse_routing_load(str(tmp_path / name), 3) == pytest.approx(want)


def test_ratios_without_a_file():
    assert parse_routing_load("uniform", 2) == (None, None)
    assert parse_routing_load("1.25", 3) == parse_routing_load("125e-2", 3) == (1.25,) * 3


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "[1.1, 1.2", "a.json:1: not JSON"),
        ("a.json", "[1.1, true, 1.2]", "a.json:2: True is not a number"),
        ("a.json", "[" * 100_000, "a.json: not JSON to read"),
        ("a.json", "[" + "9" * 5000 + "]", "a.json: not JSON to read"),
        ("a.json", "[" + "9" * 4000 + "]", "a.json:1: 9999"),
        ("a.txt", "1.1\n" + "x" * 100_000, "a.txt:2: 'xxxx"),
        ("a.json", '{"layers": 3}', "not a JSON list"),
        ("a.json", "[1.1]", "1 ratios for 3 layers"),
        ("a.csv", "1.1\n1.2\nnan\n", "a.csv:3: 'nan' is not a number"),
        ("a.csv", "layer,ratio\n", "no number in it"),
        ("a.csv", "", "no number in it"),
        ("a.csv", "0,1.1\n1,1.2\n1,1.3\n", "the layers are not 0, 1, 2 ..., each once"),
        ("a.csv", "0,1.1\n1,1.2\n3,1.3\n", "the layers are not 0, 1, 2 ..., each once"),
        ("a.csv", "layer,cv,spread\n0,1,2\n1,1,2\n2,1,2\n", "which column is the ratio?"),
        ("a.csv", "0,1.1\n1,1.2,9\n2,1.3\n", "which column is the ratio?"),
        ("a.json", '[{"ratio": 1.1}, {"ratio": 1.2}, {"load": 1.3}]', "objects of different keys"),
        ("a.log", "completed step: 3, seconds: 1.0\n", "a log without moe_max_load_ratio and without REQUIRED_RBF"),
        ("a.log", RBF + "REQUIRED_RBF step=5 max=1 per_layer=[1.0] program=normal\n", "lines of different lengths"),
        ("a.log", "REQUIRED_RBF step=5 max=nan per_layer=[nan,1.0,1.0] program=normal\n", "'nan' is not a number"),
    ],
)
def test_a_bad_file_is_one_line(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(BenchError) as error:
        parse_routing_load(str(tmp_path / name), 3)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("spec", ["1.2.3", "no_such_file.json", "unifrm", "nan", "inf"])
def test_a_bad_spec_is_refused(spec):
    with pytest.raises(BenchError):
        parse_routing_load(spec, 3)
