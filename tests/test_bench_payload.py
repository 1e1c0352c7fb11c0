"""The synthetic micro-batch: Tunix's shapes and dtypes, sound segments, zero-mean groups, gates that keep it, files."""

from __future__ import annotations

import dataclasses
import math
import os
import stat

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import bench_payload
from bench_common import BenchError
from bench_payload import PayloadSpec, RoutingSpec, build_micro_batch, gradient_share, parse_lengths, validate_batch

PACKED = PayloadSpec(
    rows=4,
    prompt_length=16,
    completion_length=112,
    packed=True,
    max_segments=6,
    vocab_size=1000,
    pad_id=0,
    eos_id=1,
    num_layers=3,
    num_experts=16,
    top_k=4,
    num_generations=4,
    lengths="lognormal:30:0.6",
    with_old_logps=True,
    with_rollout_logps=True,
    with_ref_logps=True,
    with_overlong=True,
    row_width=128,
)
PADDED = dataclasses.replace(PACKED, packed=False, row_width=0)
ROUTING = RoutingSpec((1.3, 1.0, None), 4, 2, 2)
DENSE = {"num_experts": 0}


def build(spec=PACKED, seed=1, index=0, routing=ROUTING):
    return build_micro_batch(spec, routing, seed, index)


def sequences(batch):
    """Yield (row, slots, prompt tokens) of every sequence, slots being token positions of the row."""
    if batch["segment_ids"] is None:
        prompt = batch["prompt_mask"].shape[1]
        for row, (left, right) in enumerate(zip(batch["prompt_mask"], batch["completion_mask"], strict=True)):
            slots = np.concatenate([np.nonzero(left)[0], prompt + np.nonzero(right)[0]])
            yield row, slots, int(left.sum())
        return
    for row, ids in enumerate(batch["segment_ids"]):
        for segment in range(1, ids.max() + 1):
            slots = np.nonzero(ids == segment)[0]
            yield row, slots, int((batch["completion_mask"][row, slots] == 0).sum())


def test_packed_shapes_and_dtypes_are_tunix_s():
    batch = build()
    shapes = {name: (value.shape, value.dtype.name) for name, value in batch.items() if hasattr(value, "shape")}
    wide = ((4, 128), "float32")
    assert shapes == {
        "prompt_ids": ((4, 0), "int32"),
        "prompt_mask": ((4, 0), "float32"),
        "completion_ids": ((4, 128), "int32"),
        "completion_mask": wide,
        "advantages": wide,
        "segment_ids": ((4, 128), "int32"),
        "segment_positions": ((4, 128), "int32"),
        "ref_per_token_logps": wide,
        "old_per_token_logps": wide,
        "rollout_per_token_logps": wide,
        "overlong": wide,
        "routed_experts": ((4, 128, 3, 4), "int16"),
    }
    assert batch["num_segments"] == 7 and type(batch["num_segments"]) is int
    assert tuple(batch) == bench_payload.FIELDS


def test_padded_shapes_and_dtypes_are_tunix_s():
    batch = build(PADDED)
    assert batch["prompt_ids"].shape == batch["prompt_mask"].shape == (4, 16)
    for name in ("completion_ids", "completion_mask", "advantages", "old_per_token_logps"):
        assert batch[name].shape == (4, 112)
    assert batch["routed_experts"].shape == (4, 128, 3, 4) and batch["overlong"].shape == (4,)
    assert batch["segment_ids"] is batch["segment_positions"] is batch["num_segments"] is None


def test_what_the_run_does_not_carry_is_none():
    off = dict.fromkeys(("with_old_logps", "with_rollout_logps", "with_ref_logps", "with_overlong"), False)
    batch = build(dataclasses.replace(PACKED, **off, **DENSE), routing=None)
    names = ("old_per_token_logps", "rollout_per_token_logps", "ref_per_token_logps", "overlong", "routed_experts")
    assert [batch[name] for name in names] == [None] * 5


specs = st.builds(
    PayloadSpec,
    rows=st.integers(1, 5),
    prompt_length=st.integers(1, 12),
    completion_length=st.integers(1, 40),
    packed=st.booleans(),
    max_segments=st.integers(1, 7),
    vocab_size=st.integers(3, 50),
    pad_id=st.integers(0, 2),
    eos_id=st.integers(0, 2),
    num_layers=st.just(2),
    num_experts=st.just(0),
    top_k=st.just(2),
    num_generations=st.integers(1, 9),
    lengths=st.sampled_from(["full", "2", "uniform:2:2", "lognormal:9:1", "lognormal:500:2"]),
    with_old_logps=st.booleans(),
    with_rollout_logps=st.booleans(),
    with_ref_logps=st.booleans(),
    with_overlong=st.just(False),
    segment_alignment=st.sampled_from([1, 1, 4, 64]),
    row_width=st.integers(2, 90),
)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(specs, st.integers(0, 2**32), st.integers(0, 99))
def test_any_batch_is_sound(spec, seed, index):
    batch = build(spec, seed, index, None)
    assert validate_batch(batch, spec) == []
    ids = np.concatenate([batch["prompt_ids"], batch["completion_ids"]], axis=1)
    found = list(sequences(batch))
    assert {row for row, _, _ in found} == set(range(spec.rows))  # no row is empty
    assert sum(slots.size for _, slots, _ in found) == bench_payload.real_tokens(batch)
    for row, slots, prompt in found:
        assert np.array_equal(slots, np.arange(slots[0], slots[0] + slots.size))
        assert 1 <= prompt <= spec.prompt_length and 1 <= slots.size - prompt <= spec.completion_length
        assert not (set(ids[row, slots[:-1]].tolist()) & {spec.pad_id, spec.eos_id})
    again = build(spec, seed, index, None)
    assert all(np.array_equal(batch[name], again[name]) for name in batch)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.booleans(), st.booleans(), st.integers(0, 2**32))
def test_routing_of_a_batch_is_sound_and_within_tolerance(packed, leave_unset, seed):
    spec = PACKED if packed else PADDED
    routing = dataclasses.replace(ROUTING, leave_unset=leave_unset)
    batch = build(spec, seed, 0, routing)
    assert [text for text in validate_batch(batch, spec) if "gradient" not in text] == []
    unset = (batch["routed_experts"] < 0).all(axis=(2, 3))
    real = np.zeros((4, 128), bool)
    for row, slots, _ in sequences(batch):
        real[row, slots[:-1]] = True
    assert np.array_equal(unset, ~real if leave_unset else np.zeros_like(real))
    # The smallest blocks here hold some 50 assignments per shard: half of one is 1 %.
    table = bench_payload.measure_load(batch["routed_experts"], 16, dataclasses.replace(routing, tolerance=0.02))
    assert table.out_of_tolerance == [] or leave_unset


def test_advantages_have_zero_mean_in_every_group():
    for count, group in ((12, 4), (13, 4), (14, 4), (3, 16), (16, 16), (2, 2)):
        advantages = bench_payload._advantages(count, group, np.random.default_rng(0))
        starts = [first for first in range(0, count, group) if count - first > 1]
        for first, end in zip(starts, [*starts[1:], count], strict=True):
            part = advantages[first:end].tolist()
            assert sum(part) == 0 and max(part) > 0 > min(part) and max(map(abs, part)) <= 1
    assert bench_payload._advantages(5, 1, np.random.default_rng(0)).tolist() == [1, -1, 1, -1, 1]


def test_every_micro_batch_differs_and_the_seed_decides():
    first, second, other = build(index=0), build(index=1), build(seed=2)
    for name in ("completion_ids", "advantages", "routed_experts", "rollout_per_token_logps"):
        assert (first[name] != second[name]).any() and (first[name] != other[name]).any()
        assert np.array_equal(first[name], build()[name])


def test_one_sequence_in_sixteen_is_truncated_and_has_no_end_token():
    spec = dataclasses.replace(PACKED, rows=16, lengths="fixed:16", max_segments=8, **DENSE)
    batch = build(spec)
    ends = [(row, slots[-1]) for row, slots, _ in sequences(batch)]
    assert len(ends) == 16 * 8
    cut = [batch["overlong"][place] == 1 for place in ends]
    assert sum(cut) == 8
    assert [batch["completion_ids"][place] != 1 for place in ends] == cut
    kept = gradient_share(batch)
    assert kept <= 1 - 8 / 128 and kept > 0.7


def test_sequences_longer_than_the_limit_are_cut_and_count_as_truncated():
    batch = build(dataclasses.replace(PADDED, lengths="lognormal:100000:0.1", with_overlong=True, **DENSE))
    assert batch["overlong"].tolist() == [1] * 4 and batch["completion_mask"].all() and batch["prompt_mask"].all()
    with pytest.raises(BenchError, match="no token of the micro-batch carries gradient; every advantage is 0 or every"):
        bench_payload.check_batch(batch)
    assert validate_batch(batch, dataclasses.replace(PADDED, **DENSE)) == ["no token that carries gradient"]


def test_gradient_share_counts_scored_tokens_by_hand():
    mask = np.array([[1, 1, 0, 1], [1, 1, 1, 1]], np.float32)
    advantages = np.array([[0.5, 0, 9, -1], [1, 1, 1, 1]], np.float32)
    batch = dict.fromkeys(bench_payload.FIELDS) | {"completion_mask": mask, "advantages": advantages}
    assert gradient_share(batch) == 6 / 7
    assert bench_payload.check_batch(batch | {"overlong": np.array([0, 1], np.float32)}) == 2 / 7
    assert gradient_share(batch | {"overlong": np.array([[0, 0, 0, 1], [0] * 4], np.float32)}) == 5 / 7
    assert gradient_share(batch | {"completion_mask": mask * 0}) == 0
    cut = batch | {"overlong": np.ones(2, np.float32)}
    assert gradient_share(cut) == 0  # with --overlong_loss_masking
    assert gradient_share(cut, masks_overlong=False) == 6 / 7


@pytest.mark.parametrize("spec", [PACKED, PADDED])
@pytest.mark.parametrize("level", [-241.0, -0.5])  # where random weights put the log-probs, and a trained policy
def test_sampler_logps_stay_inside_the_gates(spec, level):
    batch = build(spec)
    rng = np.random.default_rng(0)
    policy = (level + rng.standard_normal(batch["completion_mask"].shape)).astype(np.float32)
    near = bench_payload.with_logps(batch, policy, seed=3)
    assert near["completion_ids"] is batch["completion_ids"]
    for row, slots, prompt in sequences(batch):
        scored = slots[prompt:] - (batch["prompt_ids"].shape[1] if spec is PADDED else 0)
        for name in ("old_per_token_logps", "rollout_per_token_logps", "ref_per_token_logps"):
            difference = policy[row, scored].astype(np.float64) - near[name][row, scored]
            assert 0 < np.abs(difference).max() < 0.05 or scored.size == 1
            assert 0.9999 < math.exp(difference.mean()) < 1.0001  # the band of seq-mask-tis is 0.999 to 1.002
            assert np.exp(np.abs(difference)).mean() < 1.05  # the threshold of the sequence error is 2.0
    assert (near["rollout_per_token_logps"] != near["old_per_token_logps"]).any()
    assert (near["rollout_per_token_logps"][batch["completion_mask"] == 0] == 0).all()
    assert near["rollout_per_token_logps"].dtype == np.float32


def test_logps_of_another_shape_or_not_finite_are_refused():
    batch = build()
    with pytest.raises(BenchError, match=r"log-probs \(4, 3\) for scored tokens \(4, 128\)"):
        bench_payload.with_logps(batch, np.zeros((4, 3)), 0)
    with pytest.raises(BenchError, match="not finite"):
        bench_payload.with_logps(batch, np.full((4, 128), np.nan), 0)
    nowhere_scored = np.where(batch["completion_mask"] > 0, -1.0, np.nan)
    assert np.isfinite(bench_payload.with_logps(batch, nowhere_scored, 0)["old_per_token_logps"]).all()


# --- The lengths SPEC ---


@pytest.mark.parametrize(
    ("lengths", "low", "high"),
    [("full", 128, 128), ("77", 77, 77), ("fixed:77", 77, 77), ("uniform:20:60", 20, 60), ("lognormal:30:0.5", 2, 128)],
)
def test_lengths_follow_the_spec(lengths, low, high):
    batch = build(dataclasses.replace(PADDED, rows=400, lengths=lengths, **DENSE), routing=None)
    total = batch["prompt_mask"].sum(axis=1) + batch["completion_mask"].sum(axis=1)
    assert low <= total.min() and total.max() <= high
    if lengths.startswith("lognormal"):
        assert np.median(total) == pytest.approx(30, rel=0.1)
        logs = np.log(total)
        assert logs.std() == pytest.approx(0.5, rel=0.1)
    if lengths.startswith("uniform"):
        assert total.mean() == pytest.approx(40, rel=0.05) and len(set(total.tolist())) == 41


@pytest.mark.parametrize(
    ("name", "text", "want"),
    [
        ("a.txt", "# tokens\n30\n40\n\n", ((0, 30), (0, 40))),
        ("a.csv", "prompt,completion\n10,20\n5,35\n", ((10, 20), (5, 35))),
        ("a.json", "[30, [10, 20]]", ((0, 30), (10, 20))),
    ],
)
def test_recorded_lengths_are_read(tmp_path, name, text, want):
    (tmp_path / name).write_text(text)
    assert parse_lengths(str(tmp_path / name)).recorded == want
    spec = dataclasses.replace(PADDED, rows=50, lengths=str(tmp_path / name), **DENSE)
    batch = build(spec, routing=None)
    prompts, completions = (batch[f"{part}_mask"].sum(axis=1).tolist() for part in ("prompt", "completion"))
    pairs = set(zip(prompts, completions, strict=True))
    assert {sum(pair) for pair in pairs} == {sum(pair) for pair in want}
    assert {pair for pair in want if pair[0]} <= pairs


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", "unknown lengths ''"),
        ("gauss:3", "unknown lengths 'gauss:3'; give full, fixed:N"),
        ("uniform:5", "unknown lengths"),
        ("fixed:x", "'x' is not a number"),
        ("fixed:1", "at least 2"),
        ("fixed:3.5", "whole tokens"),
        ("uniform:9:5", "LOW <= HIGH"),
        ("lognormal:9:-1", "SIGMA 0 to 4"),
        ("lognormal:inf:1", "'inf' is not a number"),
        ("no/such/file.csv", "no/such/file.csv: cannot read"),
    ],
)
def test_a_bad_lengths_spec_is_one_line(spec, message):
    with pytest.raises(BenchError) as error:
        parse_lengths(spec)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["", "# nothing\n", "1\n", "3,4,5\n", "3.5\n", "-4\n", "12\nabc\n"])
def test_a_bad_lengths_file_is_one_line(tmp_path, text):
    path = tmp_path / "lengths.csv"
    path.write_text(text)
    with pytest.raises(BenchError) as error:
        parse_lengths(str(path))
    assert str(error.value).startswith(str(path)) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": 0}, "rows is 0"),
        ({"max_segments": 0}, "max_segments"),
        ({"row_width": 1}, "a row must hold"),
        ({"vocab_size": 2}, "vocab_size is 2"),
        ({"lengths": "fixed:129"}, "a sequence has at most 128 tokens"),
        ({"lengths": "uniform:2:200"}, "a sequence has at most 128 tokens"),
        ({"num_layers": 2}, "3 routing targets for 2 layers"),
        ({"rows": 3}, "3 rows cannot be split over 2 fsdp indexes"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused(change, message):
    with pytest.raises(BenchError, match=message):
        build(dataclasses.replace(PACKED, **change))


def test_experts_need_a_routing_load():
    with pytest.raises(BenchError, match="needs a routing load"):
        build(PACKED, routing=None)


# --- Validation: each check has a batch that trips it ---


def spoil(name, place, value):
    def change(batch):
        array = batch[name].copy()
        array[place] = value
        batch[name] = array

    return change


def put(name, value):
    return lambda batch: batch.__setitem__(name, value)


def swap_experts(batch):
    routed = batch["routed_experts"].copy()
    routed[0, 0, 0, 0] = routed[0, 0, 0, 1]
    batch["routed_experts"] = routed


WRONG = [
    (put("extra", np.zeros(1)), "extra: not a payload field"),
    (put("num_segments", 9), "num_segments: 9, expected 7"),
    (put("advantages", None), "advantages: missing"),
    (put("completion_ids", np.zeros((4, 128), np.int64)), "completion_ids: int64 [4, 128], expected int32 [4, 128]"),
    (put("overlong", np.zeros(4, np.float32)), "overlong: float32 [4], expected float32 [4, 128]"),
    (spoil("completion_ids", (0, 0), 1000), "token ids outside 0..999"),
    (spoil("completion_mask", (0, 20), 0.5), "masks or overlong with values other than 0 and 1"),
    (spoil("overlong", (0, 0), 2), "masks or overlong with values other than 0 and 1"),
    (spoil("old_per_token_logps", (0, 0), np.inf), "advantages or log-probs that are not finite"),
    (spoil("advantages", ..., 0), "no token that carries gradient"),
    (spoil("segment_ids", (0, 0), 7), "segment_ids outside 0..6"),
    (spoil("segment_ids", (0, 5), 2), "segment_ids that are not 1, 2, 3 ... in contiguous runs"),
    (spoil("segment_positions", (0, 3), 9), "segment_positions that are not 0, 1, 2 ... in a segment and 0 on padding"),
    (swap_experts, "routed_experts: a token that has the same expert twice"),
    (spoil("routed_experts", (0, 0, 0, 0), -1), "routed_experts: a token with some experts unset and some not"),
    (spoil("routed_experts", (0, 0), -1), "routed_experts: -1 on a token that is neither padding nor the last of its"),
    (spoil("routed_experts", (0, 0, 0, 0), 16), "routed_experts: ids outside -1..15"),
    (spoil("routed_experts", (0, 0, 0, 0), -2), "routed_experts: ids outside -1..15"),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_a_packed_batch_that_is_wrong_is_found(change, message):
    batch = build()
    change(batch)
    assert any(text.startswith(message) for text in validate_batch(batch, PACKED))


def test_padding_must_be_pad_tokens_that_nothing_scores():
    spec = dataclasses.replace(PACKED, lengths="fixed:50")  # 100 of 128 tokens
    batch = build(spec)
    spoil("completion_ids", (0, 127), 5)(batch)
    spoil("completion_mask", (0, 126), 1)(batch)
    assert validate_batch(batch, spec) == ["padding that is not pad_id 0", "completion_mask on padding"]


def test_segments_must_be_aligned_where_the_model_asks_for_it():
    aligned = dataclasses.replace(PACKED, segment_alignment=16)
    assert validate_batch(build(aligned), aligned) == []
    assert validate_batch(build(), aligned) == ["segments not aligned to 16"]


def test_a_padded_batch_that_is_wrong_is_found():
    batch = build(PADDED)
    spoil("prompt_mask", (0, slice(-2, None)), 0)(batch)
    assert "prompt_mask not padded on the left" in validate_batch(batch, PADDED)
    packed_field = build(PADDED) | {"segment_ids": np.zeros((4, 112), np.int32)}
    assert validate_batch(packed_field, PADDED) == ["segment_ids: present, but a padded batch of this model has none"]


def test_an_observation_inside_a_completion_and_a_pad_token_at_its_end_are_real():
    batch = build(PADDED)
    spoil("completion_mask", (0, slice(1, 3)), 0)(batch)  # not scored, between scored tokens
    assert validate_batch(batch, PADDED) == []
    same = dataclasses.replace(PADDED, eos_id=PADDED.pad_id)  # as the orchestrator has it
    assert validate_batch(build(same), same) == []


# --- Files ---


@pytest.mark.parametrize("spec", [PACKED, PADDED])
def test_a_saved_batch_comes_back_and_saves_to_the_same_bytes(tmp_path, spec):
    batch, path = build(spec), str(tmp_path / "batch.npz")
    bench_payload.save_npz(path, batch)
    assert [name.name for name in tmp_path.iterdir()] == ["batch.npz"]
    with np.load(path) as archive:
        assert set(archive.files) == {name for name, value in batch.items() if value is not None}
    back = bench_payload.load_npz(path, spec)
    assert tuple(back) == bench_payload.FIELDS
    for name, value in batch.items():
        assert np.array_equal(back[name], value) if value is not None else back[name] is None
    assert back["num_segments"] is None or type(back["num_segments"]) is int
    bench_payload.save_npz(str(tmp_path / "again.npz"), back)
    assert (tmp_path / "again.npz").read_bytes() == (tmp_path / "batch.npz").read_bytes()


def test_optional_fields_may_be_there_or_not_on_replay(tmp_path):
    path = str(tmp_path / "batch.npz")
    bench_payload.save_npz(path, build() | {"ref_per_token_logps": None})
    lean = dataclasses.replace(PACKED, with_ref_logps=False, with_old_logps=False)
    assert bench_payload.load_npz(path, lean)["old_per_token_logps"] is not None
    with pytest.raises(BenchError, match="ref_per_token_logps: missing"):
        bench_payload.load_npz(path, PACKED)


def test_a_recorded_batch_may_hold_what_only_tunix_fills(tmp_path):
    """Weights of the sampler, one advantage a row, and a packed trajectory whose routing was not recorded."""
    path, batch = str(tmp_path / "batch.npz"), build()
    batch["sampler_is_weights"] = batch["completion_mask"]
    batch["routed_experts"][0][batch["segment_ids"][0] == 1] = -1
    bench_payload.save_npz(path, batch)
    assert np.array_equal(bench_payload.load_npz(path, PACKED)["sampler_is_weights"], batch["completion_mask"])
    batch["routed_experts"][0, np.flatnonzero(batch["segment_ids"][0] == 1)[2]] = [0, 1, 2, 3]  # now one token of it
    assert "-1 on a token that is neither" in " ".join(validate_batch(batch, PACKED))
    batch = build(PADDED)
    batch["advantages"] = batch["advantages"].max(axis=1)
    bench_payload.save_npz(path, batch)
    assert bench_payload.load_npz(path, PADDED)["advantages"].shape == (4,)


def test_a_step_holds_no_more_sequences_than_asked_for():
    short = dataclasses.replace(PACKED, lengths="fixed:16")  # 8 would fit in each of 4 rows
    for most in (1, 3, 7):
        batch = build_micro_batch(short, ROUTING, 0, 0, most)
        assert batch["segment_ids"].max(axis=1).sum() == most
        assert validate_batch(batch, short) == []
    full = build(short)
    assert np.array_equal(build_micro_batch(short, ROUTING, 1, 0, 99)["completion_ids"], full["completion_ids"])
    rows = build_micro_batch(PADDED, ROUTING, 0, 0, 3)
    assert (rows["completion_mask"] > 0).any(axis=1).tolist() == [True, True, True, False]
    assert validate_batch(rows, PADDED) == []


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path):
    (tmp_path / "taken").mkdir()
    for path in (tmp_path / "none" / "batch.npz", tmp_path / "taken"):
        with pytest.raises(BenchError, match="cannot write"):
            bench_payload.save_npz(str(path), build())
    assert [name.name for name in tmp_path.iterdir()] == ["taken"]


def damaged_files(folder):
    """Write files that are no batch; return their names."""
    np.savez(folder / "objects.npz", advantages=np.array([{}], dtype=object))
    np.save(folder / "single.npy", np.zeros(3))
    np.savez(folder / "segments.npz", num_segments=np.zeros(3))
    (folder / "text.npz").write_text("not a zip\n")
    (folder / "empty.npz").write_bytes(b"")
    bench_payload.save_npz(str(folder / "cut.npz"), build())
    (folder / "cut.npz").write_bytes((folder / "cut.npz").read_bytes()[:-400])
    return ["objects.npz", "single.npy", "segments.npz", "text.npz", "empty.npz", "cut.npz", "missing.npz", ""]


def test_saving_to_a_device_leaves_the_device(tmp_path):
    """As root a rename would replace /dev/full itself; here a named pipe stands for it."""
    os.mkfifo(tmp_path / "pipe.npz")
    with pytest.raises(BenchError, match="not an ordinary file"):
        bench_payload.save_npz(str(tmp_path / "pipe.npz"), build())
    assert stat.S_ISFIFO(os.stat(tmp_path / "pipe.npz").st_mode)
    assert os.listdir(tmp_path) == ["pipe.npz"]


def test_saving_through_a_link_writes_what_it_points_to(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link.npz").symlink_to(tmp_path / "real" / "batch.npz")
    bench_payload.save_npz(str(tmp_path / "link.npz"), build())
    assert (tmp_path / "link.npz").is_symlink() and (tmp_path / "real" / "batch.npz").is_file()


def test_a_file_that_is_no_batch_is_one_line(tmp_path):
    for name in damaged_files(tmp_path):
        with pytest.raises(BenchError) as error:
            bench_payload.load_npz(str(tmp_path / name), PACKED)
        assert "not a readable .npz" in str(error.value) and "\n" not in str(error.value)


def test_a_batch_of_another_model_names_every_field(tmp_path):
    path = str(tmp_path / "batch.npz")
    bench_payload.save_npz(path, build() | {"metadata": np.zeros(1)})
    with pytest.raises(BenchError) as error:
        bench_payload.load_npz(path, dataclasses.replace(PACKED, num_layers=5, rows=8))
    assert "metadata: not a payload field" in str(error.value)
    assert "routed_experts: int16 [4, 128, 3, 4], expected int16 [8, 128, 5, 4]" in str(error.value)
