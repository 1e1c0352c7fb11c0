"""aot_bench: what it reads, what it decides, how its children may end; and, marked slow, real compiles.

The stored files under tests/data/aot are what real runs of libtpu 0.0.52 and MaxText 0.2.5 wrote (where a child of its
own lowered what was not compiled, its answer stands with the first child's, which does that now). Expected numbers are
worked out in the comments beside them, not taken from the tool. Run: pytest tests/test_aot_bench.py -m "not slow"
"""

# ruff: noqa: E501 - a compiler's message is a long line
from __future__ import annotations

import io
import json
import math
import os
import pathlib
import random
import re
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import aot_bench
import aot_buffers
import aot_children
import aot_launch
import aot_memory
import aot_report
from aot_memory import GIB, Beside, Kernel
from bench_common import BenchError

ROOT = pathlib.Path(__file__).resolve().parent.parent
DATA = ROOT / "tests" / "data" / "aot"
FAKE_CHILD = (sys.executable, str(ROOT / "tests" / "fake_compile_child.py"))

FIVE = (
    "CompiledMemoryStats(generated_code_size_in_bytes=1048576, argument_size_in_bytes=2147483648, "
    "output_size_in_bytes=1073741824, alias_size_in_bytes=1073741824, temp_size_in_bytes=4294967296)"
)
TEN = FIVE[:-1] + (
    ", host_generated_code_size_in_bytes=0, host_argument_size_in_bytes=524288, host_output_size_in_bytes=0, "
    "host_alias_size_in_bytes=0, host_temp_size_in_bytes=0)"
)


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    """Run the tool in an empty directory; return (code, out, err)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(aot_children, "TICK_SECONDS", 0.2)

    def call(*argv: str) -> tuple[int, str, str]:
        try:
            code = aot_bench.main(list(argv))
        except SystemExit as stop:  # argparse
            code = stop.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def engine_log(update: str = TEN, first: str = TEN, accumulating: str = TEN) -> str:
    """A log as maxtext_engine_compile prints it."""
    parts = (("fwd_bwd", first), ("fwd_bwd_accum", accumulating), ("update", update))
    cost = "{'flops': 3.5e12, 'bytes accessed': 1.25e11, 'optimal_seconds': -12.99, 'utilization0{}': inf}"
    body = "".join(f"--- {name} ---\nCost analysis: {cost}\nMemory analysis: {text}\n" for name, text in parts)
    head = "Config param compile_topology: tpu7x-8\nConfig param compile_xla_flags: --xla_a=b --xla_c=d=e\n"
    return head + "Jitting and compilation complete!\n" + body


# --- sizes and shortages ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("63.80G", round(63.80 * 2**30)), ("530.00M", 530 * 2**20), ("420.0K", 420 * 2**10), ("0B", 0),
        ("68719476736", 2**36), ("1.5 GiB", 3 * 2**29), ("2T", 2**41), ("17 bytes", 17), ("1,024", 1024),
        ("unknown size", None), ("", None), (None, None), ("G", None), ("1.2.3G", None),
    ],
)  # fmt: skip
def test_sizes_in_texts_are_binary(text, expected):
    assert aot_memory.read_size(text) == expected


# The forms of the facts file: (text, space, when, needed, available, kernel), sizes in GiB.
FORMS = {
    "a": ("Ran out of memory in memory space hbm. Used 33.27G of 30.75G hbm. Exceeded hbm capacity by 2.52G.",
          "HBM", "compile", 33.27, 30.75, None),
    "a, permanent": ("XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 215.17G of 31.25G hbm. Exceeded hbm capacity by 183.92G.",
                     "HBM", "compile", 215.17, 31.25, None),
    "a, coded and broken": ("RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom:\nRan out of memory in memory space hbm. Used\n17.17G of 15.75G hbm. Exceeded\nhbm capacity by 1.42G.",
                            "HBM", "compile", 17.17, 15.75, None),
    "b": ("RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO temporaries (635.83G) exceeds available HBM (94.74G). HLO module: jit_fwd_bwd.\nSee https://openxla.org/xla/errors/error_1000 for more details.",
          "HBM", "compile", 635.83, 94.74, "fwd_bwd"),
    "b, short": ("HLO temporaries (100.13G) exceeds available HBM (94.74G)", "HBM", "compile", 100.13, 94.74, None),
    "c": ("Allocation (size=103079215104) would exceed memory (size=34359738368) :: #allocation3 [space=hbm]",
          "HBM", "compile", 96.0, 32.0, None),
    "d": ("TPU TensorCore Hbm usage: 34.82G, SparseCore Hbm usage 174.10G, exceeding available bytes: 95.74G",
          "SparseCore", "compile", 34.82 + 174.10, 95.74, None),
    "e, reserve": ("Attempting to reserve 2.25G at the bottom of memory. That was not possible. There are 1.94G free, 0B reserved, and 1.90G reservable.",
                   "HBM", "run", 2.25, 1.90, None),
    "e, allocate": ("RESOURCE_EXHAUSTED: Error allocating device buffer: Attempting to allocate 129.50M. That was not possible. There are 78.17M free.; (0x0x0_HBM0)",
                    "HBM", "run", 129.50 / 1024, 78.17 / 1024, None),
    "f, vmem": ("Ran out of memory in memory space vmem. Used 24.00M of 16.00M vmem. Exceeded vmem capacity by 8.00M.",
                "vmem", "compile", 24 / 1024, 16 / 1024, None),
    "f, scoped": ("Ran out of memory in memory space vmem while allocating on stack for %k. Scoped allocation with size 24.00M and limit 16.00M exceeded scoped vmem limit by 8.00M.",
                  "vmem", "compile", 24 / 1024, 16 / 1024, None),
    "f, smem": ("Ran out of memory in memory space smem. Used 1.50M of 1.00M smem. Exceeded smem capacity by 512.0K.",
                "smem", "compile", 1.50 / 1024, 1 / 1024, None),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_every_out_of_memory_form_is_read(form):
    text, space, when, needed, available, kernel = FORMS[form]
    (one,) = aot_memory.find_shortages(f"before\n{text}\nafter\n")
    assert (one.space, one.when, one.kernel) == (space, when, kernel)
    assert math.isclose(one.needed_bytes, needed * GIB, abs_tol=4)
    assert math.isclose(one.available_bytes, available * GIB, abs_tol=4)
    assert math.isclose(
        one.over_bytes, (needed - available) * GIB, rel_tol=0.02, abs_tol=0.01 * 2**20
    )  # the texts round


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_read_wherever_one_line_breaks(form):
    text = FORMS[form][0]
    (whole,) = aot_memory.find_shortages(text)
    for at in (at for at, char in enumerate(text) if char == " "):
        assert aot_memory.find_shortages(f"{text[:at]}\n(worker pid=12) {text[at + 1 :]}") == [whole], text[:at]


@pytest.mark.parametrize(
    ("text", "space", "needed", "available"),
    [
        ("Ran out of memory in memory space hbm. Used unknown size of 15.75G hbm. Exceeded hbm capacity by unknown size.", "HBM", None, round(15.75 * GIB)),
        ("Ran out of memory in memory space spmem. Used 9.00M of 8.00M spmem. Exceeded spmem capacity by 1.00M.", "SparseCore spmem", 9 * 2**20, 8 * 2**20),
        ("Allocation (size=600000) would exceed memory (size=524288) :: #allocation1 [space=tilespmem]", "SparseCore tilespmem", 600000, 2**19),
        ("Ran out of memory in memory space sflag. Used 2.0K of 1.0K sflag.", "sync flags", 2048, 1024),
    ],
)  # fmt: skip
def test_a_shortage_of_another_memory_or_of_unknown_size_is_read(run, tmp_path, text, space, needed, available):
    (tmp_path / "x.log").write_text(f"Config param compile_topology: v5e-4\nRESOURCE_EXHAUSTED: {text}\n")
    code, out, _ = run("--summarize", "x.log", "--json")
    (one,) = json.loads(out)["kernels"][0]["shortages"]
    assert (code, one["space"], one["needed_bytes"], one["available_bytes"]) == (1, space, needed, available)


def test_a_shortage_in_no_known_words_is_one_all_the_same(run, tmp_path):
    text = "jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory while planning."
    (tmp_path / "x.log").write_text(f"Config param compile_topology: v5e-4\n{text}\n")
    code, out, _ = run("--summarize", "x.log")
    assert code == 1 and "RESOURCE_EXHAUSTED: Out of memory while planning." in " ".join(out.split())
    (tmp_path / "x.log").write_text("RESOURCE_EXHAUSTED: quota of requests per minute\n")  # not of memory
    assert run("--summarize", "x.log")[0] == 2


def test_the_sizes_of_a_shortage_share_a_unit(run, tmp_path):
    """134,217,728 bytes are 128 MiB; 0.12 GiB of 64 MiB would leave the reader to do the sum."""
    (tmp_path / "x.log").write_text("Allocation (size=134217728) would exceed memory (size=67108864) [space=vmem]\n")
    out = " ".join(run("--summarize", "x.log")[1].split())
    assert "wants 128.00 MiB of 64.00 MiB for one allocation, 64.00 MiB too much" in out


@pytest.mark.parametrize(
    ("count", "like", "shown"),
    [(0, None, "0 B"), (1, None, "1 B"), (512, None, "0.50 KiB"), (3 * 2**29, None, "1.50 GiB"),
     (2**27, 2**26, "128.00 MiB"), (None, 5, "?")],
)  # fmt: skip
def test_bytes_in_words(count, like, shown):
    assert aot_memory.gib(count, like) == shown


def test_real_limits_per_type_are_the_table():
    """The stored log is one of real compiles, a type at a time: 384.25 GiB asked of each."""
    text = (DATA / "oom_by_type.log").read_text()
    found = aot_memory.find_shortages(text)
    hbm = [one for one in found if one.space == "HBM"]
    assert [round(one.needed_bytes / GIB, 2) for one in hbm] == [384.25] * 7
    limits = [one.available_bytes / GIB for one in hbm]
    table = [aot_memory.CAPACITIES[name].usable_gib for name in ("v2", "v3", "v4", "v5e", "v5p", "v6e", "tpu7x")]
    assert limits == pytest.approx(table, abs=0.0101)  # a version's 95.73 is another's 95.74
    (vmem,) = [one for one in found if one.space == "vmem"]
    assert (vmem.needed_bytes, vmem.available_bytes) == (8192 * 8192 * 4, 64 * 2**20)


@pytest.mark.parametrize(
    ("topology", "gib", "devices_per_chip"),
    [
        ("v2-8", 7.48, 2), ("v3-8", 15.48, 2), ("v4-8", 30.75, 1), ("v5e-4", 15.75, 1), ("v5p-8", 95.74, 1), ("v6e-4", 31.25, 1),
        ("tpu7x-256", 94.74, 2), ("v5litepod-16", 15.75, 1), ("tpuv5e:2x2", 15.75, 1), ("tpuv5:4x4x8", 95.74, 1),
        ("tpuv6e:4x8", 31.25, 1), ("tpu7x:4x4x8", 94.74, 2), ("h100-8", None, None), ("", None, None),
    ],
)  # fmt: skip
def test_usable_memory_by_any_name_of_a_slice(topology, gib, devices_per_chip):
    """The facts' table, per JAX device."""
    found = aot_memory.capacity_of(topology)
    assert (found and found.usable_gib, found and found.devices_per_chip) == (gib, devices_per_chip)


def test_one_shortage_told_twice_counts_once():
    text = FORMS["b"][0]
    assert (
        len(
            aot_memory.find_shortages(
                f"E1130 06:00:00.0 12 compiler.cc:9] {text}\nTraceback\njax.errors.JaxRuntimeError: {text}\n"
            )
        )
        == 1
    )


def test_text_without_a_shortage_has_none():
    assert aot_memory.find_shortages("Used 3.09G of memory; HBM is fine (94.74G)\n") == []


PREFIXES = [
    "", "(worker pid=12, ip=10.0.0.1) ", "E1130 06:00:00.123456 77 tpu_compiler.cc:120] ", "INFO:maxtext.configs.pyconfig:",
    "2026-11-30T06:00:00.123456789Z ", "[pod/trainer-0-abcde/main] I1130 06:00:00.1 7 a.py:3] ",
    "2026-11-30 06:00:00.123456: E external/xla/tpu.cc:9] ", "\x1b[36m(TrainWorker pid=12)\x1b[0m 2026-11-30T06:00:00Z ",
]  # fmt: skip


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    needed=st.integers(1, 10**6), available=st.integers(1, 10**6), seed=st.integers(0, 2**32),
    prefix=st.sampled_from(PREFIXES),
)  # fmt: skip
def test_a_shortage_is_found_wherever_lines_break(needed, available, seed, prefix):
    text = f"Ran out of memory in memory space hbm. Used {needed / 100:.2f}G of {available / 100:.2f}G hbm. Exceeded hbm capacity by 1.00G."
    choose = random.Random(seed)
    broken = "".join("\n" + prefix if char == " " and choose.random() < 0.3 else char for char in text)
    noise = "".join(choose.choice(" abcG()=0.\n") for _ in range(200))
    found = [one for one in aot_memory.find_shortages(f"{noise}\n{prefix}{broken}\n{noise}") if one.space == "HBM"]
    assert [(one.needed_bytes, one.available_bytes) for one in found] == [
        (round(needed / 100 * GIB), round(available / 100 * GIB))
    ]


# --- the verdict --------------------------------------------------------------------------------------


def kernel(name: str, gib: float, **more) -> Kernel:
    """A compiled kernel whose temporaries are this large."""
    return Kernel(
        name, argument_bytes=GIB, output_bytes=GIB, alias_bytes=GIB, temp_bytes=round(gib * GIB), code_bytes=0, **more
    )


def test_peak_is_the_compilers_own_else_the_sum():
    plain = kernel("update", 3.0)
    assert (plain.peak_bytes, plain.peak_source) == (4 * GIB, "argument + output - alias + temp")
    told = kernel("update", 3.0, told_peak_bytes=7 * GIB)
    assert (told.peak_bytes, told.peak_source) == (7 * GIB, "compiler")
    assert Kernel("update", argument_bytes=1).peak_bytes is None


@pytest.mark.parametrize(
    ("temp", "beside", "reserve", "fits", "headroom"),
    [
        (5.0, 3.0, 0.0, True, 1.0),
        (5.0, 4.0, 0.0, True, 0.0),
        (5.0, 4.5, 0.0, False, -0.5),
        (5.0, 3.0, 1.5, False, -0.5),
    ],
)
def test_a_kernel_fits_with_what_stays_beside_it(temp, beside, reserve, fits, headroom):
    """1 argument + 1 output - 1 aliased + temp, against 10 GiB."""
    found = aot_memory.verdict(
        [kernel("fwd_bwd", temp)], {"fwd_bwd": [Beside("state", round(beside * GIB))]}, 10 * GIB, round(reserve * GIB)
    )
    assert found.fits is fits
    assert found.peak.headroom_bytes == headroom * GIB


def test_one_kernel_that_does_not_fit_decides_and_one_that_is_missing_leaves_it_open():
    big, small = kernel("fwd_bwd", 20.0), kernel("update", 1.0)
    assert aot_memory.verdict([small, big], {}, 10 * GIB).fits is False
    assert aot_memory.verdict([small, Kernel("fwd_bwd", "failed", error="killed")], {}, 10 * GIB).fits is None
    assert aot_memory.verdict([big, Kernel("update", "failed", error="killed")], {}, 10 * GIB).fits is False
    assert aot_memory.verdict([small], {}, None).fits is None
    assert aot_memory.verdict([Kernel("fwd_bwd", "lowered", argument_bytes=GIB), small], {}, 10 * GIB).fits is None
    assert aot_memory.verdict([Kernel("fwd_bwd", "lowered", argument_bytes=11 * GIB)], {}, 10 * GIB).fits is False


def test_doubt_is_said_where_the_sum_does_not_fit():
    found = aot_memory.verdict([kernel("fwd_bwd", 10.5, told_peak_bytes=9 * GIB)], {}, 10 * GIB)
    assert found.fits is True
    assert "in doubt" in found.reasons[0] and "11.50 GiB" in found.reasons[0]


def test_doubt_is_said_where_only_vmem_is_too_much():
    """1 + 1 - 1 + 8 = 9 GiB of HBM buffers fit 10; 11 GiB of HBM and vmem do not."""
    found = aot_memory.verdict([kernel("fwd_bwd", 8.0, told_peak_bytes=11 * GIB)], {}, 10 * GIB)
    assert found.fits is False
    assert "in doubt" in found.reasons[-1] and "9.00 GiB, and that fits" in found.reasons[-1]


def test_what_stays_beside_each_kernel():
    resident = {
        "optimizer_bytes": 30,
        "micro_batch_bytes": 4,
        "train_state_bytes": 40,
        "parameters_bytes": 10,
        "gradients_bytes": 20,
    }
    kernels = [Kernel("update", code_bytes=1), Kernel("fwd_bwd", code_bytes=2), Kernel("fwd_bwd_accum", code_bytes=3)]
    beside = aot_report.beside_of_state(resident, kernels)
    sums = {name: sum(item.bytes for item in items) for name, items in beside.items()}
    # The update has state and gradients as arguments; both others have parameters, batch and (one) gradients.
    assert sums == {"update": 4 + 2 + 3, "fwd_bwd": 30 + 4 + 1 + 3, "fwd_bwd_accum": 30 + 4 + 1 + 2}


# --- logs -----------------------------------------------------------------------------------------------


def test_a_log_of_three_kernels_with_ten_fields(run, tmp_path):
    """2 + 1 - 1 + 4 = 6 GiB each, and 1 MiB of code; beside the forwards: 1 (aliased by update) - (2 - 1), nothing."""
    (tmp_path / "x.log").write_text(engine_log())
    code, out, err = run("--summarize", "x.log", "--json")
    doc = json.loads(out)
    assert (code, err) == (0, "")
    assert [(k["name"], k["peak_bytes"], k["code_bytes"], k["host_bytes"]) for k in doc["kernels"]] == [
        (name, 6 * GIB, 2**20, 524288) for name in ("fwd_bwd", "fwd_bwd_accum", "update")
    ]
    assert doc["topology"] == "tpu7x-8" and doc["capacity_bytes"] == round(94.74 * GIB)
    assert doc["config"]["compile_xla_flags"] == "--xla_a=b --xla_c=d=e"
    assert doc["kernels"][0]["flops"] == 3.5e12 and doc["fits"] is True
    assert list(doc)[0] == "schema" and doc["schema"] == "aot-bench/1"


def test_a_state_larger_than_the_arguments_stays_beside_the_forwards(run, tmp_path):
    """update returns 9 GiB in place, fwd_bwd takes 2 of them: 7 stay; accum takes 2, 1 of them its own accumulator: 8."""
    state = TEN.replace("alias_size_in_bytes=1073741824", f"alias_size_in_bytes={9 * GIB}", 1).replace(
        "argument_size_in_bytes=2147483648", f"argument_size_in_bytes={10 * GIB}", 1
    )
    first = TEN.replace("alias_size_in_bytes=1073741824", "alias_size_in_bytes=0", 1)
    (tmp_path / "x.log").write_text(engine_log(update=state, first=first))
    _, out, _ = run("--summarize", "x.log", "--json")
    beside = {k["name"]: k["beside"] for k in json.loads(out)["kernels"]}
    assert beside["fwd_bwd"] == [{"name": "optimizer state", "bytes": 7 * GIB, "at_least": True}]
    assert beside["fwd_bwd_accum"][0]["bytes"] == 8 * GIB
    assert beside["update"] == []


def test_a_real_log_of_maxtexts_own_compile(run):
    """Sums by hand from its fields: argument + output - alias + temp; the state is 130,077,696 bytes in place, and each
    forward takes 32,535,040 of it as arguments."""
    code, out, err = run("--summarize", str(DATA / "maxtext_engine_compile.log"), "--json")
    doc = json.loads(out)
    assert (code, err, doc["topology"], doc["capacity_bytes"]) == (0, "", "v5e-4", round(15.75 * GIB))
    peaks = {k["name"]: k["peak_bytes"] for k in doc["kernels"]}
    assert peaks == {"fwd_bwd": 171277824, "fwd_bwd_accum": 172670464, "update": 198734336}
    beside = {k["name"]: sum(one["bytes"] for one in k["beside"]) for k in doc["kernels"]}
    assert beside == {"fwd_bwd": 97542656, "fwd_bwd_accum": 97542656, "update": 0}
    assert doc["peak_kernel"] == "fwd_bwd_accum" and doc["peak_bytes"] == 172670464 + 20612096 + 97542656
    assert doc["kernels"][0]["flops"] == 165213683712.0 and doc["fits"] is True


def test_old_statistics_and_a_fused_step(run, tmp_path):
    (tmp_path / "x.log").write_text(f"Cost analysis: [{{'flops': 1.0}}]\nMemory analysis: {FIVE}\n")
    code, out, err = run("--summarize", "x.log", "--cap-gib", "5", "--json")
    (only,) = json.loads(out)["kernels"]
    assert (code, only["name"], only["peak_bytes"], only["host_bytes"], only["flops"]) == (
        1,
        "train_step",
        6 * GIB,
        None,
        1.0,
    )


def test_a_log_is_read_where_nothing_is_installed(run, tmp_path, monkeypatch):
    for name in ("jax", "jaxlib", "flax", "maxtext", "numpy", "tunix"):
        monkeypatch.setitem(sys.modules, name, None)  # an import of it fails
    (tmp_path / "x.log").write_text(engine_log())
    assert run("--summarize", "x.log")[0] == 0


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("end", ["\n", "\r\n", "\x1b[0m\n"])
def test_a_log_tells_the_same_behind_any_prefix(run, tmp_path, prefix, end):
    plain = engine_log() + LARGEST
    (tmp_path / "x.log").write_text(plain)
    (tmp_path / "y.log").write_bytes("".join(f"{prefix}{line}{end}" for line in plain.splitlines()).encode())
    expected = run("--summarize", "x.log", "--json")
    assert run("--summarize", "y.log", "--json") == expected
    assert len(json.loads(expected[1])["kernels"][-1]["largest_buffers"]) == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace(", ", ",\n    "),
        lambda text: text.replace("=", " = "),
        lambda text: text[:-1] + ", total_allocation_bytes=7, peak_memory_in_bytes=0)",
        lambda text: text[:-1] + ", note='temp_size_in_bytes=1, (x)', inner=Other(argument_size_in_bytes=3))",
    ],
)
def test_statistics_in_other_spellings(run, tmp_path, change):
    """2 + 1 - 1 + 4 = 6 GiB in each."""
    (tmp_path / "x.log").write_text(f"Config param compile_topology: v4-8\nMemory analysis: {change(TEN)}\n")
    code, out, _ = run("--summarize", "x.log", "--json")
    assert code == 0 and [k["peak_bytes"] for k in json.loads(out)["kernels"]] == [6 * GIB]


@pytest.mark.parametrize(
    "statistics",
    [
        re.sub(r"=\d+", "=0", TEN),  # a GPU's backend that tells nothing
        TEN.replace("argument_size_in_bytes=2147483648", "argument_size_in_bytes=-1"),
        "CompiledMemoryStats(generated_code_size_in_bytes=5)",
    ],
)
def test_statistics_that_tell_nothing_are_no_verdict(run, tmp_path, statistics):
    (tmp_path / "x.log").write_text(engine_log(update=statistics))
    code, out, err = run("--summarize", "x.log", "--json")
    doc = json.loads(out)
    assert (code, doc["fits"], doc["kernels"][2]["peak_bytes"]) == (2, None, None)
    assert err.count("\n") == 1 and "update: not known" in err


def test_a_config_value_is_neither_statistics_nor_a_shortage(run, tmp_path):
    value = f"{FIVE} RESOURCE_EXHAUSTED: {FORMS['a'][0]}"
    (tmp_path / "x.log").write_text(f"Config param run_name: {value}\n" + engine_log())
    code, out, _ = run("--summarize", "x.log", "--json")
    doc = json.loads(out)
    assert code == 0 and len(doc["kernels"]) == 3 and doc["config"]["run_name"] == value


def test_the_capacity_of_a_log_without_a_topology(run, tmp_path):
    (tmp_path / "x.log").write_text(f"Memory analysis: {TEN}\n")
    code, out, _ = run("--summarize", "x.log", "--slice", "tpuv5e:2x2", "--json")
    assert (code, json.loads(out)["capacity_bytes"]) == (0, round(15.75 * GIB))
    (tmp_path / "x.log").write_text(FORMS["b"][0])
    code, out, _ = run("--summarize", "x.log", "--json")
    assert (code, json.loads(out)["capacity_bytes"]) == (1, round(94.74 * GIB))  # the compiler's own words


def test_sizes_that_train_prints(run, tmp_path):
    """22.2 = 8.1 + 14.0 + 8.2 - 8.1 aliased."""
    (tmp_path / "x.log").write_text(
        "I1130 06:00:00.0 1 max_utils.py:1] Total memory size: 22.2 GB, Output size: 8.1 GB, Temp size: 14.0 GB, Argument size: 8.2 GB, Host temp size: 0.0 GB.\n"
    )
    code, out, _ = run("--summarize", "x.log", "--cap-gib", "22.1", "--json")
    doc = json.loads(out)
    assert code == 1 and round(doc["peak_bytes"] / GIB, 2) == 22.2
    assert "rounds" in doc["kernels"][0]["notes"][0]


@pytest.mark.parametrize("form", FORMS)
def test_a_log_that_ends_out_of_memory_does_not_fit(run, tmp_path, form):
    (tmp_path / "x.log").write_text(f"Jitting and compiling the engine's kernels...\n{FORMS[form][0]}\n")
    code, out, err = run("--summarize", "x.log", "--json")
    doc = json.loads(out)
    assert (code, doc["fits"], err) == (1, False, "")
    assert doc["kernels"][0]["shortages"][0]["space"] == FORMS[form][1]
    assert FORMS[form][1] in doc["reasons"][0]


def test_kernels_that_compiled_before_the_shortage_are_kept(run, tmp_path):
    text = f"--- update ---\nMemory analysis: {TEN}\n{FORMS['b'][0]}\n"
    (tmp_path / "x.log").write_text(text)
    code, out, _ = run("--summarize", "x.log", "--cap-gib", "94.74")
    assert code == 1
    assert "update" in out and "fwd_bwd: out of HBM at compile time: wants 635.83 GiB of 94.74 GiB" in " ".join(
        out.split()
    )


@pytest.mark.parametrize(
    ("log", "kernel"),
    [
        (f"--- fwd_bwd ---\n{FORMS['a'][0]}\n", "fwd_bwd"),
        (f"--- update ---\nMemory analysis: {TEN}\n--- fwd_bwd ---\n{FORMS['a'][0]}\n", "fwd_bwd"),
        (f"--- fwd_bwd ---\nMemory analysis: {TEN}\n{FORMS['a'][0]}\n", "fwd_bwd_accum"),  # the next in MaxText's order
        (f"--- update ---\n{FORMS['b'][0]}\n", "fwd_bwd"),  # the message names its module
        (FORMS["f, vmem"][0], "unnamed kernel"),
    ],
)  # fmt: skip
def test_the_kernel_that_ran_out_is_named(run, tmp_path, log, kernel):
    (tmp_path / "x.log").write_text(log)
    code, out, _ = run("--summarize", "x.log", "--cap-gib", "95", "--json")
    short = [k["name"] for k in json.loads(out)["kernels"] if k["shortages"]]
    assert (code, short) == (1, [kernel])


LARGEST = """Ran out of memory in memory space hbm. Used 17.17G of 15.75G hbm. Exceeded hbm capacity by 1.42G.

Total hbm usage >= 17.43G:
    reserved        258.00M
    program          17.17G
    arguments            0B

Program hbm requirement 17.17G:
    HLO temp         17.17G (100.0% utilization: Unpadded (17.10G) Padded (17.10G), 0.0% fragmentation (0B))

  Largest program allocations in hbm:

  1. Size: 4.00G
     Operator: op_name="jit(step)/dot_general" source_file="/usr/lib/site-packages/a/b.py" source_line=7
     Shape: f32[32768,32768]{1,0:T(8,128)}
     Unpadded size: 4.00G
     XLA label: fusion.12 = fusion(param.1), kind=kOutput
     Allocation type: HLO temp
     ==========================

  2. Size: 512.00M
     Shape: bf16[16384,16384]{1,0:T(8,128)(2,1)}
     Allocation type: HLO temp
     ==========================
"""


def test_the_compilers_own_largest_allocations_are_shown(run, tmp_path):
    (tmp_path / "x.log").write_text(LARGEST)
    code, out, _ = run("--summarize", "x.log", "--json")
    first, second = json.loads(out)["kernels"][0]["largest_buffers"]
    assert (first["bytes"], first["dims"], first["dtype"], first["name"]) == (
        4 * GIB,
        [32768, 32768],
        "f32",
        "fusion.12",
    )
    assert (first["op_name"], first["source"]) == ("jit(step)/dot_general", "a/b.py:7")
    assert (second["bytes"], second["source"]) == (512 * 2**20, None)
    code, out, _ = run("--summarize", "x.log")
    assert "f32[32768,32768]" in out and max(map(len, out.splitlines())) <= 80


def test_no_capacity_is_no_verdict_but_the_table_is_printed(run, tmp_path):
    (tmp_path / "x.log").write_text(f"Memory analysis: {TEN}\n")
    code, out, err = run("--summarize", "x.log")
    assert code == 2 and "train_step" in out and err.count("\n") == 1 and "--cap-gib" in err


def test_stdin_is_a_file(run, tmp_path, monkeypatch):
    (tmp_path / "x.log").write_text(engine_log())
    expected = run("--summarize", "x.log")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(engine_log().encode())))
    assert run("--summarize", "-") == expected


def test_text_and_json_tell_the_same(run, tmp_path):
    (tmp_path / "x.log").write_text(engine_log())
    _, text, _ = run("--summarize", "x.log")
    doc = json.loads(run("--summarize", "x.log", "--json")[1])
    row = next(line.split() for line in text.splitlines() if line.startswith("update"))
    fields = ("argument_bytes", "output_bytes", "alias_bytes", "temp_bytes", "code_bytes", "peak_bytes", "total_bytes")
    assert row[1:] == [f"{doc['kernels'][2][field] / GIB:.3f}" for field in fields]
    assert max(map(len, text.splitlines())) <= 80


def test_markdown_is_a_table(run, tmp_path):
    (tmp_path / "x.log").write_text(engine_log())
    _, out, _ = run("--summarize", "x.log", "--format", "markdown")
    assert "| kernel | argument |" in out and "| update | 2.000 | 1.000 |" in out


GOLDEN = """\
tpu7x-8

kernel        argument   output  aliased     temp     code     peak    total
fwd_bwd          2.000    1.000    1.000    4.000    0.001    6.000    6.001
fwd_bwd_accum    2.000    1.000    1.000    4.000    0.001    6.000    6.001
update           2.000    1.000    1.000    4.000    0.001    6.000    6.001

GiB per JAX device; total is peak + code + what stays beside the kernel; peak is
  argument + output - alias + temp, a sum that tends to be too high
usable HBM per JAX device: 94.74 GiB, 2 devices per chip (libtpu 0.0.52's limit;
  the chip has 192 GiB (cloud.google.com/tpu/docs/tpu7x))

fwd_bwd: 3.5e+12 FLOPs, 1.25e+11 bytes accessed
fwd_bwd_accum: 3.5e+12 FLOPs, 1.25e+11 bytes accessed
update: 3.5e+12 FLOPs, 1.25e+11 bytes accessed
FLOPs and bytes are the compiler's own: the body of a loop counts once however
  often it runs (a scan over layers, over token chunks), a Pallas kernel counts
  as nothing.

verdict: fits: 6.00 GiB per JAX device in fwd_bwd, 88.74 GiB to spare
"""


def test_golden_report(run, tmp_path):
    (tmp_path / "x.log").write_text(engine_log())
    assert run("--summarize", "x.log")[1] == GOLDEN


# --- largest buffers ----------------------------------------------------------------------------------------


def test_the_buffers_at_the_peak_of_a_real_module():
    """The module scans tanh(c @ b) 16 times over f32[512,2048] per device and stacks the carries: 16 x 4 MiB = 64 MiB;
    b is gathered whole to bf16[2048,2048] = 8 MiB; the arguments are 4 and 2 MiB. VMEM copies do not count."""
    text = (DATA / "dump_toy" / "jit_f.hlo.txt").read_text()
    rows = aot_buffers.peak_buffers(str(DATA / "dump_toy"), text, limit=4)
    assert [(row["bytes"], row["dtype"], row["dims"], row["kind"]) for row in rows] == [
        (64 * 2**20, "f32", [16, 512, 2048], "temporary"), (8 * 2**20, "bf16", [2048, 2048], "temporary"),
        (4 * 2**20, "f32", [512, 2048], "argument"), (2 * 2**20, "f32", [256, 2048], "argument"),
    ]  # fmt: skip
    assert rows[0]["source"] == "example/toy.py:14" and "dynamic_update_slice" in rows[0]["op_name"]
    assert rows[2]["op_name"] == "a"


def test_metadata_behind_a_kernels_own_lines_is_found():
    text = """HloModule m, is_scheduled=true

%main (p: bf16[8]) -> bf16[8] {
  %gmm.6 = bf16[8]{0} custom-call(%p), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"dims.size_k":128,
}}, metadata={op_name="jit(f)/gmm" source_file="/x/site-packages/m/moe.py" source_line=3}
  %bare.1 = bf16[8]{0} copy(%p)
}
"""
    found = aot_buffers.describe(text, {"gmm.6", "bare.1", "absent"})
    assert found == {
        "gmm.6": {"op_name": "jit(f)/gmm", "source": "m/moe.py:3"},
        "bare.1": {"op_name": None, "source": None},
    }


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("state_pure['optimizer']['opt_state']['inner']['inner_states']['trainable']['inner_state'][0]['mu']['base']['wi'].value", "optimizer.mu.wi"),
        ("state_pure['optimizer']['opt_state']['masters']['base']['a']['wi'].value", "optimizer.masters.a.wi"),
        ("params['base']['decoder']['norm'].value", "params.decoder.norm"),
        ("jit(f)/while/body/dot_general", "jit(f)/while/body/dot_general"), ("copy.945", "copy.945"),
    ],
)  # fmt: skip
def test_a_parameters_place_is_readable(name, shown):
    assert aot_report.readable(name) == shown


def test_lines_that_begin_alike_are_merged():
    lines = ["key dropped, unknown here: a=1 (x)", "other: thing", "key dropped, unknown here: b=2 (y)"]
    assert aot_report._merged(lines) == ["key dropped, unknown here: a=1 (x), b=2 (y)", "other: thing"]


def test_no_reports_no_buffers(tmp_path):
    assert aot_buffers.peak_buffers(str(tmp_path), "") == []


def test_savings_only_where_they_follow_from_the_shape():
    facts = {
        "rows_per_device": 2,
        "width_per_device": 4096,
        "chunk_size": 512,
        "layers": 40,
        "vocab": 1000,
        "vocab_per_device": None,
    }
    buffer = {"name": "x", "bytes": 1000, "dtype": "f32", "kind": "temporary", "op_name": None}
    assert "half" in aot_buffers.savings({**buffer, "dims": [2, 512, 7]}, facts)[0]
    assert "--compute_logps_chunk_size=256" in aot_buffers.savings({**buffer, "dims": [3, 512, 1000]}, facts)[0]
    assert "remat_policy" in aot_buffers.savings({**buffer, "dims": [40, 1, 4096, 8]}, facts)[0]
    assert (
        "grad_dtype=bfloat16"
        in aot_buffers.savings({**buffer, "kind": "argument", "dims": [7], "op_name": "acc_grads['a']"}, facts)[0]
    )
    assert aot_buffers.savings({**buffer, "dims": [7, 9]}, facts) == []
    assert aot_buffers.savings({**buffer, "dims": [7, 9]}, {}) == []


# --- predictions side by side --------------------------------------------------------------------------------


def stored(run, tmp_path, name: str, **kernels) -> dict:
    (tmp_path / "log").write_text(engine_log(**kernels))
    run("--summarize", "log", "--out", name)
    return json.loads((tmp_path / name).read_text())


def test_two_predictions_side_by_side(run, tmp_path):
    stored(run, tmp_path, "a.json")
    stored(
        run, tmp_path, "b.json", update=TEN.replace("temp_size_in_bytes=4294967296", f"temp_size_in_bytes={6 * GIB}", 1)
    )
    code, out, _ = run("--prediction", "b.json", "--compare", "a.json")
    assert code == 0
    assert ["update", "temp", "6.000", "4.000", "+2.000"] in [line.split() for line in out.splitlines()]
    doc = json.loads(run("--prediction", "b.json", "--compare", "a.json", "--json")[1])
    assert doc["compared"]["kernels"][2]["temp_bytes"] == {"this": 6 * GIB, "other": 4 * GIB, "difference": 2 * GIB}


def test_what_differs_between_two_predictions_is_named(run, tmp_path):
    doc = stored(run, tmp_path, "a.json")
    doc["flags"] = {"compiler_options": {"xla_a": "1", "xla_b": "2"}, "libtpu_init_args": ["--c=3"]}
    other = {**doc, "topology": "v5e-4", "config": {**doc["config"], "chunks": "4", "hf_access_token": "hf_x"}}
    other["flags"] = {"compiler_options": {"xla_a": "5"}, "libtpu_init_args": ["--c=3", "--d"]}
    for name, one in (("a.json", doc), ("b.json", other)):
        (tmp_path / name).write_text(json.dumps(one))
    found = json.loads(run("--prediction", "b.json", "--compare", "a.json", "--json")[1])["compared"]
    assert found["topology"] == {"this": "v5e-4", "other": "tpu7x-8"}
    assert found["flags"] == {
        "d": {"this": "", "other": None}, "xla_a": {"this": "5", "other": "1"}, "xla_b": {"this": None, "other": "2"},
    }  # fmt: skip
    assert found["config"]["chunks"] == {"this": "4", "other": None}
    lines = run("--prediction", "b.json", "--compare", "a.json")[1].splitlines()
    assert {"slice: tpu7x-8 -> v5e-4", "xla_a: 1 -> 5", "xla_b: 2 -> absent", "chunks: absent -> 4"} <= set(lines)
    assert "hf_x" not in json.dumps(found)


@pytest.mark.parametrize(
    "log", [engine_log(), FORMS["a"][0], f"--- update ---\nMemory analysis: {FIVE}\n{FORMS['f, vmem'][0]}"]
)
@pytest.mark.parametrize(
    "options", [("--hbm-gib", "7"), ("--hbm-gib", "5.9"), ("--hbm-gib", "20", "--reserve-gib", "15")]
)
def test_an_earlier_prediction_is_judged_by_the_options_given_now(run, tmp_path, log, options):
    (tmp_path / "x.log").write_text(log)
    expected = run("--summarize", "x.log", "--json", *options)
    run("--summarize", "x.log", "--cap-gib", "94", "--out", "a.json")
    assert run("--prediction", "a.json", "--json", *options) == expected


GONE = object()


@pytest.mark.parametrize("options", [(), ("--hbm-gib", "5")])
@pytest.mark.parametrize(
    "damage",
    [{"argument_bytes": "9"}, {"beside": 3}, {"shortages": [{"space": "HBM"}]}, {"status": GONE}, {"notes": GONE},
     {"flops": "x"}, {"largest_buffers": [{}]}, {"name": []}, {"peak_bytes": 10**400}],
)  # fmt: skip
def test_a_damaged_prediction_is_one_line(run, tmp_path, damage, options):
    doc = stored(run, tmp_path, "a.json")
    changed = {**doc["kernels"][1], **damage}
    doc["kernels"][1] = {key: value for key, value in changed.items() if value is not GONE}
    (tmp_path / "a.json").write_text(json.dumps(doc))
    code, out, err = run("--prediction", "a.json", *options)
    assert (code, out) == (2, "") and "aot-bench/1 document" in err and err.count("\n") == 1


def test_a_comparison_needs_only_the_fields_it_shows(run, tmp_path):
    stored(run, tmp_path, "a.json")
    other = {"schema": "aot-bench/1", "kernels": [{"name": "update", "peak_bytes": 5 * GIB}]}
    (tmp_path / "b.json").write_text(json.dumps(other))
    code, out, _ = run("--prediction", "a.json", "--compare", "b.json")
    assert code == 0 and ["update", "peak", "6.000", "5.000", "+1.000"] in [line.split() for line in out.splitlines()]


def test_overlap_of_a_predictions_hlo(run, tmp_path):
    doc = stored(run, tmp_path, "a.json")
    example = ROOT / "examples" / "hlo" / "dense_fsdp_v5e.txt"
    doc["kernels"][0]["hlo_file"] = str(example)
    (tmp_path / "a.json").write_text(json.dumps(doc))
    assert run("--prediction", "a.json", "--overlap")[1].count("all-gather") >= 1
    found = json.loads(run("--prediction", "a.json", "--overlap", "--json")[1])["overlap"]
    assert found["schema"].startswith("hlo-overlap/")
    run("--prediction", "a.json", "--overlap", "--out", "b.json")
    assert json.loads((tmp_path / "b.json").read_text())["overlap"] == found  # the document, whatever is printed
    doc["kernels"][0]["hlo_file"] = "gone.txt"
    (tmp_path / "a.json").write_text(json.dumps(doc))
    _, out, err = run("--prediction", "a.json", "--overlap", "--json")
    assert json.loads(out)["overlap"] is None and err.count("\n") == 1 and "gone.txt" in err


def test_predicted_against_measured(run, tmp_path):
    stored(run, tmp_path, "a.json")
    result = {
        "schema": "trainer-bench/1",
        "memory": {"peak_bytes_max": 5 * GIB, "devices": [{"id": 0, "peak_bytes": 5 * GIB, "limit_bytes": 90 * GIB}]},
    }
    (tmp_path / "r.json").write_text(json.dumps(result))
    code, out, _ = run("--prediction", "a.json", "--measured", "r.json", "--json")
    found = json.loads(out)["measured"]
    predicted = 6 * GIB + 2**20
    assert code == 0 and found == {
        "peak_bytes": 5 * GIB,
        "limit_bytes": 90 * GIB,
        "predicted_bytes": predicted,
        "predicted_over_measured": predicted / (5 * GIB),
    }
    assert "1.200 of it" in run("--prediction", "a.json", "--measured", "r.json")[1]
    del result["memory"]["peak_bytes_max"]  # then the fullest device's
    (tmp_path / "r.json").write_text(json.dumps(result))
    assert json.loads(run("--prediction", "a.json", "--measured", "r.json", "--json")[1])["measured"] == found


# --- bad input ---------------------------------------------------------------------------------------------------

TRAINER = "--trainer_backend=maxtext --maxtext_model_name=qwen3-0.6b --mesh_fsdp=4 --max_prompt_length=128 --max_response_length=128 --train_micro_batch_size=4"
ORCH = "--batch_size=4 --num_generations=4"


@pytest.mark.parametrize(
    ("argv", "piece"),
    [
        ([], "nothing to look at"),
        (["--summarize", "missing.log"], "missing.log"),
        (["--summarize", "empty.log"], "no memory analysis"),
        (["--summarize", "empty.log", "--prediction", "x.json"], "two inputs"),
        (["--prediction", "empty.log"], "not JSON"),
        (["--prediction", "other.json"], "aot-bench/1"),
        (["--prediction", "good.json", "--measured", "other.json"], "trainer-bench"),
        (["--prediction", "good.json", "--measured", "cpu.json"], "no peak memory"),
        (["--prediction", "good.json", "--compare", "other.json"], "aot-bench/1"),
        (["--launch-render", "empty.log"], "no Kubernetes object"),
        (["--summarize", "empty.log", "--overlap"], "--hlo-dir"),
        (["--trainer-argv", TRAINER, "--orch-argv", ORCH], "no slice"),
        (["--trainer-argv", TRAINER, "--slice", "v5e:2x2"], "--orch-argv"),
        (["--trainer-argv", TRAINER, "--orch-argv", ORCH, "--slice", "tpuv5e:3x3"], "fill no whole hosts"),
        (["--trainer-argv", TRAINER, "--orch-argv", ORCH, "--slice", "v9-4"], "not known to MaxText"),
        (["--trainer-argv", TRAINER, "--orch-argv", ORCH, "--slice", "tpuv5e:2x2x1"], "2 sides"),
        (["--trainer-argv", TRAINER, "--orch-argv", ORCH, "--slice", "tpu7x:2x2x2"], "16"),
        (["--trainer-argv", TRAINER + " --mesh_expert=2", "--orch-argv", ORCH, "--slice", "v5e-4"], "8 devices"),
        (["--trainer-argv", "'open", "--orch-argv", ORCH, "--slice", "v5e-4"], "cannot split"),
        (["--trainer-argv", TRAINER + " --no_such=1", "--orch-argv", ORCH, "--slice", "v5e-4"], "--no_such"),
        (["--trainer-argv", TRAINER, "--orch-argv", ORCH, "--slice", "v5e-4", "--maxtext", "bare"], "NAME=VALUE"),
    ],
)
def test_bad_input_is_one_line(run, tmp_path, argv, piece):
    pytest.importorskip("maxtext", reason="MaxText is not installed")
    (tmp_path / "empty.log").write_text("nothing here\n")
    (tmp_path / "other.json").write_text('{"schema": "something-else/1"}')
    (tmp_path / "cpu.json").write_text('{"schema": "trainer-bench/1", "memory": {"peak_bytes_max": null}}')
    stored(run, tmp_path, "good.json")
    code, out, err = run(*argv)
    assert (code, out) == (2, "")
    assert err.startswith("aot_bench: ") and err.count("\n") == 1 and piece in err


@pytest.mark.parametrize("argv", [("--hlo-dir", "file"), ("--log-dir", "file/below"), ("--out", "no/such.json")])
def test_a_place_that_cannot_be_written_is_said_before_anything_compiles(run, tmp_path, monkeypatch, argv):
    pytest.importorskip("maxtext", reason="MaxText is not installed")
    monkeypatch.setattr(aot_children, "run", lambda *args, **options: pytest.fail("compiled"))
    (tmp_path / "file").write_text("kept")
    code, out, err = run("--trainer-argv", TRAINER, "--orch-argv", ORCH, "--slice", "v5e-4", *argv)
    assert (code, out) == (2, "") and "cannot write" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "argv",
    [
        ["--kernels", "all"],
        ["--jobs", "0"],
        ["--hbm-gib", "-1"],
        ["--typo"],
        ["--top", "x"],
        ["--timeout", "nan"],
        ["--timeout", "0"],
        ["--timeout", "soon"],
    ],
)
def test_bad_options_are_argparses(run, argv):
    code, out, err = run("--summarize", "x", *argv)
    assert code == 2 and out == "" and "usage" in err


def test_help_from_the_command_line():
    env = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME")}
    done = subprocess.run(
        [sys.executable, str(ROOT / "aot_bench.py"), "--help"], capture_output=True, text=True, env=env
    )
    assert done.returncode == 0 and done.stderr == ""
    assert (
        "Exit status: 0 fits" in done.stdout
        and "does not fit" in done.stdout
        and done.stdout.count("aot_bench.py --launch-render") >= 3
    )


# --- children -----------------------------------------------------------------------------------------------


def children(tmp_path, jobs: dict, **options):
    """Run jobs with the fake child; return name -> outcome, and the lines said."""
    said: list[str] = []
    full = {name: {"do": "compile", "kernels": [name], **job} for name, job in jobs.items()}
    outcomes = aot_children.run(full, dict(os.environ), str(tmp_path), say=said.append, program=FAKE_CHILD, **options)
    return {outcome.name: outcome for outcome in outcomes}, said


@pytest.mark.parametrize(
    ("act", "piece"),
    [
        ("killed", "SIGKILL while compiling (this machine ran out of memory, or somebody killed it)"),
        ("abort", "SIGABRT while compiling: F1130 06:00:00.0 12 llo_module.cc:76] Check failed"),
        ("refuse-flag", "libtpu refuses a flag: Unknown command line flag 'xla_tpu_no_such_flag'"),
    ],
)
def test_a_child_that_dies_costs_its_own_kernel_only(tmp_path, act, piece):
    found, said = children(tmp_path, {"update": {}, "fwd_bwd": {"act": act}, "fwd_bwd_accum": {}})
    assert piece in found["fwd_bwd"].error
    assert [found[name].result["status"] for name in ("update", "fwd_bwd_accum")] == ["compiled", "compiled"]
    assert any(piece in line for line in said)


def test_a_child_that_hangs_is_killed_and_waiting_does_not_count(tmp_path):
    """At one at a time the second waits behind the first for longer than its own limit, and is not killed for it."""
    found, _ = children(tmp_path, {"update": {"act": "hang"}, "fwd_bwd": {}}, timeout_seconds=1.5)
    assert "compiling took longer than --timeout 1.5 s" in found["update"].error
    assert found["fwd_bwd"].result["status"] == "compiled"


def test_children_compile_in_order_and_lines_are_said(tmp_path):
    found, said = children(tmp_path, {"update": {}, "fwd_bwd": {}, "fwd_bwd_accum": {}})
    times = [found[name].result["go_at"] for name in ("update", "fwd_bwd", "fwd_bwd_accum")]
    assert times == sorted(times)
    assert [line for line in said if line.startswith("update")] == [
        "update: built in 0.1 s, lowering", "update: lowered after 0.2 s", "update: compiling", "update: compiled in 0.3 s",
    ]  # fmt: skip
    assert any("1000 operations" in line for line in said if line.startswith("fwd_bwd:"))


def test_no_child_outlives_an_interrupted_parent(tmp_path):
    started: list[int] = []

    def say(line: str) -> None:
        if line.endswith("compiling"):
            started.extend(int(pid) for pid in os.listdir("/proc") if pid.isdigit() and is_child(pid))
            raise KeyboardInterrupt

    def is_child(pid: str) -> bool:
        try:
            return "fake_compile_child" in pathlib.Path(f"/proc/{pid}/cmdline").read_text()
        except OSError:
            return False

    with pytest.raises(KeyboardInterrupt):
        aot_children.run(
            {"update": {"do": "compile", "kernels": ["update"], "act": "hang"}},
            dict(os.environ),
            str(tmp_path),
            say=say,
            program=FAKE_CHILD,
        )
    assert started and not any(is_child(str(pid)) for pid in started)


def test_the_childs_environment(tmp_path):
    launch = {
        "FLOAT32_LOGITS": "true",
        "HF_TOKEN": "x",
        "JAX_PLATFORMS": "tpu,proxy",
        "TPU_NAME": "t",
        "LIBTPU_INIT_ARGS": "--a=1",
        "PATH": "/nowhere",
    }
    base = {"PATH": "/bin", "XLA_FLAGS": "--xla_backend_optimization_level=0", "JAX_COMPILATION_CACHE_DIR": "/cache"}
    env = aot_children.child_environment(base, launch, ["--b=2"], str(tmp_path))
    assert env["FLOAT32_LOGITS"] == "true" and env["JAX_PLATFORMS"] == "cpu" and env["PATH"] == "/bin"
    assert env["LIBTPU_INIT_ARGS"] == "--b=2" and env["ALLOW_MULTIPLE_LIBTPU_LOAD"] == "1"
    assert not {"HF_TOKEN", "TPU_NAME", "XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR"} & set(env)


# --- the launch ----------------------------------------------------------------------------------------------


def launch_of(*argv: str) -> aot_launch.Launch:
    pytest.importorskip("maxtext", reason="MaxText is not installed")
    return aot_launch.read_launch(aot_bench.build_parser().parse_args(aot_bench._join_dashes(argv)))


def test_a_launch_render_and_the_bench_made_of_it_are_one_program(capsys, tmp_path):
    import render_bench

    example = str(ROOT / "examples" / "launch_dryrun.yaml")
    edits = ["--maxtext", "num_moe_token_chunks=4", "--libtpu", "--xla_tpu_scoped_vmem_limit_kib=81920"]
    assert (
        render_bench.main(
            ["--launch-render", example, "--name", "b", "--quiet", "--out", str(tmp_path / "b.yaml"), *edits]
        )
        == 0
    )
    direct, carried = (
        launch_of("--launch-render", example, *edits),
        launch_of("--launch-render", str(tmp_path / "b.yaml")),
    )
    capsys.readouterr()
    assert (direct.topology, direct.devices) == (carried.topology, carried.devices) == ("tpu7x-256", 256)
    assert (
        "num_moe_token_chunks=4" in direct.env["MAXTEXT_EXTRA_FLAGS"]
        and "num_moe_token_chunks=2" not in direct.env["MAXTEXT_EXTRA_FLAGS"]
    )
    assert "--xla_tpu_scoped_vmem_limit_kib=81920" in direct.libtpu and direct.libtpu == carried.libtpu
    own = ("enable_checkpointing", "run_name", "base_output_directory", "load_parameters_path")
    keys = [word for word in carried.env["MAXTEXT_EXTRA_FLAGS"].split() if not word.startswith(own)]
    assert keys == direct.env["MAXTEXT_EXTRA_FLAGS"].split()
    assert "--mesh_context=4" in direct.trainer_argv and "--mesh_context=4" in carried.trainer_argv
    assert (
        direct.orch_argv == carried.orch_argv
        and "--truncated_importance_sampling_type=seq-mask-tis" in direct.orch_argv
    )


def test_edits_reach_argv_and_slice():
    launch = launch_of(
        "--trainer-argv", TRAINER, "--orch-argv", ORCH, "--slice", "tpuv5e:2x2", "--trainer-arg", "mesh_fsdp=2",
        "--orch-arg", "beta=0.1", "--orch-arg-unset", "batch_size", "--env", "FLOAT32_LOGITS=true",
    )  # fmt: skip
    assert "--mesh_fsdp=2" in launch.trainer_argv and "--mesh_fsdp=4" not in launch.trainer_argv
    assert launch.orch_argv == ["--num_generations=4", "--beta=0.1"]
    assert (launch.topology, launch.devices, launch.env["FLOAT32_LOGITS"]) == ("v5e-4", 4, "true")


def test_an_edit_that_changes_nothing_is_said(capsys):
    launch_of("--trainer-argv", TRAINER, "--orch-argv", ORCH, "--slice", "v5e-4", "--maxtext-unset", "typo",
              "--trainer-arg", "mesh_fsdp=4", "--libtpu", "--xla_a=1", "--libtpu-unset", "xla_a")  # fmt: skip
    said = capsys.readouterr().err.splitlines()
    assert said == [
        f"aot_bench: --{edit} changes nothing: it is so already" for edit in ("maxtext typo", "trainer-arg mesh_fsdp")
    ]


@pytest.mark.parametrize(
    ("text", "topology", "devices"),
    [
        ("tpu7x:4x4x8", "tpu7x-256", 256),
        ("tpu7x:2x2x1", "tpu7x-8", 8),
        ("tpuv5:4x4x8", "v5p-256", 128),
        ("tpuv6e:4x8", "v6e-32", 32),
        ("tpuv5e:16x16", "v5e-256", 256),
        ("v5e:2x2", "v5e-4", 4),
        ("v5p:4x4x8", "v5p-256", 128),
        ("v4-8", "v4-8", 4),
    ],
)
def test_slices_in_maxtexts_names(text, topology, devices):
    pytest.importorskip("maxtext", reason="MaxText is not installed")
    name, target = aot_launch.find_topology(text)
    assert (name, target.devices_per_slice) == (topology, devices)


def test_flags_are_split_by_the_way_they_reach_the_compiler():
    flags = aot_launch.split_flags(["--xla_a=1", "--xla_b", "--DANGEROUS_c=true", "--xla_a=2"])
    assert flags.options == {"xla_a": "2", "xla_b": "true"} and flags.init_args == ["--DANGEROUS_c=true"]


def test_a_flag_that_is_no_compiler_option_is_tried_the_other_way(monkeypatch, capsys):
    asked = []

    def toy(launch, flags, work_dir, name, timeout):
        asked.append(flags)
        outcome = aot_children.Outcome(name)
        if "xla_late" in flags.options:
            outcome.result = {"status": "flags", "rejected": ["xla_late"]}
        elif "--xla_late=1" in flags.init_args and "--xla_wrong=1" not in flags.init_args:
            outcome.result = {"status": "flags", "rejected": []}
        return outcome

    monkeypatch.setattr(aot_launch, "_toy", toy)
    launch = aot_launch.Launch([], [], {}, ["--xla_fine=3", "--xla_late=1"], "v5e-4", 4)
    flags = aot_launch.check_flags(launch, "", None)
    assert (flags.options, flags.init_args) == ({"xla_fine": "3"}, ["--xla_late=1"]) and len(asked) == 2
    assert "tried in LIBTPU_INIT_ARGS: xla_late" in capsys.readouterr().err


def test_a_misspelt_flag_is_one_line(monkeypatch, run):
    pytest.importorskip("maxtext", reason="MaxText is not installed")

    def toy(launch, flags, work_dir, name, timeout):
        error = "libtpu refuses a flag: Unknown command line flag 'xla_tpu_no_such_flag'"
        result = None if flags.init_args else {"status": "flags", "rejected": ["xla_tpu_no_such_flag"]}
        return aot_children.Outcome(name, result=result, error=error if flags.init_args else None)

    monkeypatch.setattr(aot_launch, "_toy", toy)
    code, out, err = run(
        "--trainer-argv", TRAINER, "--orch-argv", ORCH, "--slice", "v5e-4", "--libtpu", "--xla_tpu_no_such_flag=1"
    )
    assert code == 2 and out == "" and "Unknown command line flag 'xla_tpu_no_such_flag'" in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ((), {"update": ["update"], "fwd_bwd": ["fwd_bwd"], "fwd_bwd_accum": ["fwd_bwd_accum"]}),
        (("--kernels", "fwd_bwd"), {"fwd_bwd": ["fwd_bwd", "update", "fwd_bwd_accum"]}),
        (("--kernels", "fwd_bwd,update"), {"update": ["update", "fwd_bwd_accum"], "fwd_bwd": ["fwd_bwd"]}),
        (("--lower-only",), {"lowered": ["update", "fwd_bwd", "fwd_bwd_accum"]}),
    ],
)
def test_the_first_child_lowers_what_no_child_compiles(argv, expected):
    options = aot_bench.build_parser().parse_args(argv)
    jobs = aot_launch.make_jobs(aot_launch.Launch([], [], {}, [], "v5e-4", 4), aot_launch.Flags({}, []), options)
    assert {name: job["kernels"] for name, job in jobs.items()} == expected
    assert [job.get("compile") for job in jobs.values()] == [None if name == "lowered" else name for name in expected]


def test_a_child_compiles_one_of_the_kernels_it_lowers(monkeypatch):
    import argparse

    import aot_compile

    arguments = argparse.Namespace(of=lambda kernel: kernel)
    for name, answer in (
        ("build", lambda job: argparse.Namespace(engine="engine", payload="payload")),
        ("lower", lambda engine, payload, kernels: ({kernel: f"lowered {kernel}" for kernel in kernels}, arguments)),
        ("describe_lowered", lambda built, lowered, arguments, seconds: {"event": "lowered", "kernels": list(lowered)}),
        (
            "compile_kernel",
            lambda engine, lowered, *rest: {"event": "result", "buffers": [{"op_name": "a"}], "of": lowered},
        ),
        ("shardings_by_name", lambda kernel: {"a": f"of {kernel}"}),
    ):
        monkeypatch.setattr(aot_compile, name, answer)
    said = []
    job = {"do": "compile", "compile": "fwd_bwd", "kernels": ["fwd_bwd", "update"], "options": {}, "dump_dir": "",
           "hlo_file": None}  # fmt: skip
    aot_compile.serve(job, said.append, lambda: True)
    assert [event["event"] for event in said] == ["built", "lowered", "result"]
    assert said[1]["kernels"] == ["fwd_bwd", "update"] and said[2]["of"] == "lowered fwd_bwd"
    assert said[2]["buffers"] == [{"op_name": "a", "sharding": "of fwd_bwd"}]


def test_a_router_that_still_decides_is_refused():
    import argparse

    import aot_compile

    routed, plain = argparse.Namespace(num_experts=8), argparse.Namespace(num_experts=0)
    assert "no top-k is left" in aot_compile.check_routing("fwd_bwd", "stablehlo.dot_general", routed)
    assert aot_compile.check_routing("update", "chlo.top_k", routed) is None
    assert aot_compile.check_routing("fwd_bwd", "chlo.top_k", plain) is None
    with pytest.raises(BenchError, match="2 top-k operations left"):
        aot_compile.check_routing("fwd_bwd", "chlo.top_k chlo.top_k", routed)


def test_a_config_has_no_path_of_the_child():
    import aot_compile

    config = {"metrics_dir": "/tmp/x1/update/out/metrics/", "steps": 3, "tokenizer_path": "gs://b/t"}
    assert aot_compile.without_folder(config, "/tmp/x1/update") == {
        "metrics_dir": "out/metrics/",
        "steps": 3,
        "tokenizer_path": "gs://b/t",
    }


@pytest.mark.parametrize(
    ("orch", "expected"),
    [(ORCH, False), (ORCH + " --no-use_rollout_logps --num_iterations=2", False), (ORCH + " --num_iterations=2", True),
     (ORCH + " --mini_batch_size=2", True), (ORCH + " --log_sampler_trainer_agreement", True)],
)  # fmt: skip
def test_when_the_trainer_scores_in_a_pass_of_its_own(orch, expected):
    import aot_compile
    import bench_config

    assert aot_compile.needs_logps_pass(bench_config.parse_orch_argv(orch.split())) is expected


# --- what real children said, replayed ---------------------------------------------------------------------


def replay(monkeypatch, folder: str, *argv: str) -> None:
    """Answer every child's job with the events that a real run's children wrote."""

    def fake_run(jobs, env, work_dir, **options):
        outcomes = []
        for name, job in jobs.items():
            outcome = aot_children.Outcome(name)
            if job["do"] == "flags":
                outcome.result = {"event": "result", "status": "flags", "rejected": []}
            else:
                lines = (DATA / folder / f"{name}.events.jsonl").read_text().splitlines()
                outcome.events = [json.loads(line) for line in lines]
                last = outcome.events[-1]
                outcome.result = last if last["event"] == "result" else None
                outcome.error = None if outcome.result else "the compiler was ended by SIGKILL while compiling"
            outcomes.append(outcome)
        return outcomes

    pytest.importorskip("maxtext", reason="MaxText is not installed")
    monkeypatch.setattr(aot_children, "run", fake_run)


DENSE = ("--trainer-argv", TRAINER, "--orch-argv", ORCH, "--slice", "tpuv5e:2x2")


def test_a_dense_compile_for_v5e(run, monkeypatch):
    """Parameters by hand, bfloat16 over 4 devices: 2 layers of Qwen3-0.6B and a tied table of 32,768 x 1,024.

    Layer: q 1024x16x128, k and v 1024x8x128 each, o 16x128x1024, two norms of 1024, q and k norms of 128, and
    3 x 1024x3072; then the final norm of 1024.
    """
    layer = 1024 * 128 * (16 + 8 + 8 + 16) + 2 * 1024 + 2 * 128 + 3 * 1024 * 3072
    count = 2 * layer + 1024 + 32768 * 1024
    replay(monkeypatch, "dense_v5e")
    code, out, err = run(*DENSE, "--json")
    doc = json.loads(out)
    held = doc["resident"]
    assert code == 0 and doc["fits"] is True and err == ""
    assert held["parameter_count"] == count
    assert held["parameters_bytes"] == pytest.approx(count * 2 / 4, rel=1e-3)  # the norms are whole on each device
    assert held["gradients_bytes"] == 2 * held["parameters_bytes"]  # float32
    assert held["optimizer_bytes"] == pytest.approx(6 * held["parameters_bytes"], rel=1e-4)  # master, mu, nu in float32
    update = doc["kernels"][0]
    # State and gradients go in, the state comes out in place; the device pads a little.
    assert update["argument_bytes"] == pytest.approx(held["train_state_bytes"] + held["gradients_bytes"], rel=0.01)
    assert update["alias_bytes"] == pytest.approx(held["train_state_bytes"], rel=0.01)
    assert [k["name"] for k in doc["kernels"]] == ["update", "fwd_bwd", "fwd_bwd_accum"]
    assert all(
        k["total_bytes"] == k["peak_bytes"] + k["code_bytes"] + sum(b["bytes"] for b in k["beside"])
        for k in doc["kernels"]
    )
    assert doc["capacity_bytes"] == round(15.75 * GIB) and doc["devices"] == 4 and doc["devices_per_chip"] == 1
    assert {"config", "flags", "versions", "resident", "capacity_bytes", "peak_bytes"} <= set(doc)


def test_the_text_of_a_compile_is_narrow_and_the_same_every_time(run, monkeypatch):
    replay(monkeypatch, "dense_v5e")
    first, second = run(*DENSE)[1], run(*DENSE)[1]
    assert first == second and max(map(len, first.splitlines())) <= 80
    assert (
        "accumulated_grads.token_embedder.embedding" in first
        and "optimizer.mu.token_embedder.embedding" in first
        and "P(None, 'fsdp')" in first
    )
    assert "loss and payload are tunix_standin's" in " ".join(first.split())
    assert "the compiler's own figure, which counts vmem too" in " ".join(first.split())  # 0.435 of 0.277 GiB: update


def test_moe_with_forced_routing_for_v7x(run, monkeypatch):
    """[8 rows, 1024 tokens, 1 layer, 2 experts] of int16, 8 rows over 8 devices: 4 KiB each."""
    replay(monkeypatch, "moe_tpu7x")
    code, out, _ = run(
        "--trainer-argv",
        TRAINER + " --mesh_fsdp=8 --train_micro_batch_size=8",
        "--orch-argv",
        ORCH,
        "--slice",
        "tpu7x:2x2x1",
        "--kernels",
        "update,fwd_bwd",
        "--json",
    )
    doc = json.loads(out)
    assert code == 0 and doc["fits"] is None and doc["verdict"] == "not known"  # the third kernel was only lowered
    assert doc["resident"]["micro_batch_fields_bytes"]["routed_experts"] == 1024 * 2 * 2
    assert [k["status"] for k in doc["kernels"]] == ["compiled", "compiled", "lowered"]
    assert all("no top-k is left" in k["routing"] for k in doc["kernels"][1:])
    assert doc["devices_per_chip"] == 2


def test_an_out_of_memory_compile_says_what_and_how_much(run, monkeypatch):
    """16 rows per device x 32,640 completion tokens x 32,768 of vocabulary: 63.75 GiB in float32, half in bfloat16."""
    replay(monkeypatch, "oom_v5e")
    code, out, _ = run(*DENSE, "--kernels", "fwd_bwd", "--json")
    doc = json.loads(out)
    kernel = next(k for k in doc["kernels"] if k["name"] == "fwd_bwd")
    (short,) = kernel["shortages"]
    assert (code, doc["fits"], kernel["status"], short["space"], short["what"]) == (
        1,
        False,
        "out of memory",
        "HBM",
        "HLO temporaries",
    )
    assert short["needed_bytes"] > 90 * GIB and short["available_bytes"] == round(15.75 * GIB)
    assert doc["peak_kernel"] == "fwd_bwd" and doc["peak_bytes"] == short["needed_bytes"]
    logits = kernel["largest_buffers"][0]
    assert (logits["bytes"], logits["dims"]) == (16 * 32640 * 32768 * 4, [16, 32640, 32768])
    assert f"saves {62.75:.2f} GiB: --compute_logps_chunk_size=512" in logits["savings"]  # 63.75 x (1 - 512/32640)
    text = run(*DENSE, "--kernels", "fwd_bwd")[1]
    assert "verdict: does not fit: fwd_bwd runs out of HBM" in text and max(map(len, text.splitlines())) <= 80


def test_a_killed_kernel_leaves_the_others(run, monkeypatch, tmp_path):
    folder = tmp_path / "killed"
    folder.mkdir()
    for name in ("update", "fwd_bwd", "fwd_bwd_accum"):
        lines = (DATA / "dense_v5e" / f"{name}.events.jsonl").read_text().splitlines()
        (folder / f"{name}.events.jsonl").write_text("\n".join(lines[:-1] if name == "fwd_bwd" else lines) + "\n")
    replay(monkeypatch, str(folder))
    code, out, err = run(*DENSE, "--json")
    doc = json.loads(out)
    assert code == 2 and doc["fits"] is None and "SIGKILL" in err
    assert [k["status"] for k in doc["kernels"]] == ["compiled", "failed", "compiled"]


# --- real compiles --------------------------------------------------------------------------------------------

REAL_DENSE = (
    "--trainer-argv", "--trainer_backend=maxtext --maxtext_model_name=qwen3-0.6b --mesh_fsdp=4 --max_prompt_length=128 "
    "--max_response_length=384 --train_micro_batch_size=4 --maxtext_attention=flash --remat_policy=full --compute_logps_chunk_size=128",
    "--orch-argv", "--batch_size=4 --num_generations=4 --beta=0.04", "--slice", "tpuv5e:2x2",
    "--maxtext", "override_model_config=true", "--maxtext", "base_num_decoder_layers=2", "--maxtext", "base_emb_dim=256",
    "--maxtext", "base_mlp_dim=512", "--maxtext", "base_num_query_heads=4", "--maxtext", "base_num_kv_heads=2",
    "--maxtext", "vocab_size=2048",
)  # fmt: skip
MOE_KEYS = (
    "override_model_config=true base_emb_dim=1024 base_mlp_dim=128 base_moe_mlp_dim=128 base_num_query_heads=4 base_num_kv_heads=2 "
    "head_dim=128 gdn_num_key_heads=2 gdn_num_value_heads=4 gdn_key_head_dim=128 gdn_value_head_dim=128 gdn_chunk_size=64 vocab_size=512 "
    "num_experts=8 num_experts_per_tok=2 base_num_decoder_layers=1 inhomogeneous_layer_cycle_interval=1 use_mrope=false sparse_matmul=true "
    "megablox=true use_ring_of_experts=true use_ragged_sort=true ragged_buffer_factor=2.0 num_moe_token_chunks=1 use_custom_sort_vjp=false"
)
REAL_MOE = (
    "--trainer-argv", "--trainer_backend=maxtext --maxtext_model_name=qwen3.5-35b-a3b --mesh_fsdp=4 --mesh_expert=2 --max_prompt_length=128 "
    "--max_response_length=384 --max_seq_token_per_tpu=512 --train_micro_batch_size=8 --maxtext_attention=flash --compute_logps_chunk_size=128 "
    "--remat_policy=full --trainable_parameters_mask=^(?!.*routed_experts/gate/kernel).*",
    "--orch-argv", "--batch_size=4 --num_generations=4 --max_segments_per_packed_row=4 --no-use_rollout_logps --max_seq_token_per_tpu=512",
    "--slice", "tpu7x:2x2x1", *(word for key in MOE_KEYS.split() for word in ("--maxtext", key)),
)  # fmt: skip


@pytest.fixture
def compiler(run):
    """Skip where MaxText or libtpu is missing."""
    pytest.importorskip("maxtext", reason="MaxText is not installed")
    pytest.importorskip("libtpu", reason="libtpu is not installed")
    return run


@pytest.fixture(scope="module")
def dense_run(tmp_path_factory):
    """One run for v5e-4, from the command line; its third child is killed as soon as it compiles.

    Returns (exit code, document, stderr, the run's folder).
    """
    pytest.importorskip("maxtext", reason="MaxText is not installed")
    pytest.importorskip("libtpu", reason="libtpu is not installed")
    folder = tmp_path_factory.mktemp("dense")
    command = [sys.executable, str(ROOT / "aot_bench.py"), *REAL_DENSE, "--hlo-dir", "hlo", "--overlap", "--out", "doc"]
    said = []
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as tool:
        for line in tool.stderr:
            said.append(line)
            if line.strip().endswith("fwd_bwd_accum: compiling"):
                kill_child(tool.pid, "fwd_bwd_accum")
    return tool.returncode, json.loads((folder / "doc").read_text()), "".join(said), folder


def kill_child(parent: int, kernel: str) -> None:
    """Kill the process of a kernel as this machine's memory killer would."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            mine = f"\nPPid:\t{parent}\n" in pathlib.Path(f"/proc/{pid}/status").read_text()
            if mine and os.readlink(f"/proc/{pid}/cwd").endswith(f"/{kernel}"):
                os.kill(int(pid), 9)
        except OSError:
            continue


@pytest.mark.slow
def test_real_dense_model_for_v5e(dense_run):
    _, doc, err, folder = dense_run
    update, first, _ = doc["kernels"]
    assert [update["status"], first["status"]] == ["compiled", "compiled"]
    # The device pads the norms' scales, and with a model this small they count.
    assert update["alias_bytes"] == pytest.approx(doc["resident"]["train_state_bytes"], rel=0.03)
    assert first["logical_argument_bytes"] == pytest.approx(first["argument_bytes"], rel=0.05)
    files = sorted(path.name for path in (folder / "hlo").iterdir())
    assert files == [f"fwd_bwd.v5e-4.{doc['config_sha256']}.hlo.txt", f"update.v5e-4.{doc['config_sha256']}.hlo.txt"]
    assert "is_scheduled=true" in (folder / first["hlo_file"]).read_text()[:2000]
    assert doc["overlap"]["schema"].startswith("hlo-overlap/") and first["largest_buffers"]
    assert "fwd_bwd: compiling" in err and err.index("update: compiled") < err.index("fwd_bwd: compiled")


@pytest.mark.slow
def test_real_child_killed(dense_run):
    """The other kernels' answers are kept, and the exit status is 2: not known."""
    code, doc, err, _ = dense_run
    assert code == 2 and doc["fits"] is None, err
    assert "SIGKILL while compiling" in err
    assert [kernel["status"] for kernel in doc["kernels"]] == ["compiled", "compiled", "failed"]
    assert doc["kernels"][2]["hlo_file"] is None


@pytest.mark.slow
def test_real_moe_with_ring_of_experts_for_v7x(compiler, tmp_path):
    code, out, err = compiler(
        *REAL_MOE, "--kernels", "update,fwd_bwd", "--log-dir", "log", "--json",
        "--libtpu", "--xla_tpu_scoped_vmem_limit_kib=65472", "--libtpu", "--DANGEROUS_tpu_runtime_abi_verification_disabled=true",
    )  # fmt: skip
    doc = json.loads(out)
    assert code == 0, err
    assert [k["status"] for k in doc["kernels"]] == ["compiled", "compiled", "lowered"]
    assert "no top-k is left" in doc["kernels"][1]["routing"]
    assert doc["flags"] == {
        "compiler_options": {"xla_tpu_scoped_vmem_limit_kib": "65472"},
        "libtpu_init_args": ["--DANGEROUS_tpu_runtime_abi_verification_disabled=true"],
    }
    assert doc["kernels"][1]["peak_bytes"] < doc["capacity_bytes"] and (tmp_path / "log" / "update.stderr.log").exists()


@pytest.mark.slow
def test_real_shortage_of_memory(compiler):
    big = (
        "--trainer-arg", "max_response_length=32640", "--trainer-arg", "train_micro_batch_size=64",
        "--trainer-arg", "compute_logps_chunk_size=0", "--maxtext", "vocab_size=32768",
    )  # fmt: skip
    code, out, err = compiler(*REAL_DENSE, *big, "--kernels", "fwd_bwd", "--json")
    kernel = next(k for k in json.loads(out)["kernels"] if k["name"] == "fwd_bwd")
    assert code == 1 and kernel["status"] == "out of memory", err
    assert kernel["shortages"][0]["space"] == "HBM" and kernel["largest_buffers"][0]["dims"] == [16, 32640, 32768]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flag", "piece"),
    [("xla_tpu_no_such_flag=true", "xla_tpu_no_such_flag"), ("xla_tpu_scoped_vmem_limit_kib=abc", "'abc' is no value")],
)
def test_real_misspelt_flag(compiler, flag, piece):
    code, out, err = compiler(*REAL_DENSE, "--libtpu", flag)
    assert (code, out) == (2, "") and piece in err.splitlines()[-1]


@pytest.mark.slow
def test_the_published_128_chip_shape_is_lowered(compiler):
    """Qwen3.5-35B, 34.66 billion parameters, bfloat16 over 256 devices: 0.2522 GiB if every one were sharded whole."""
    example = str(ROOT / "examples" / "launch_dryrun.yaml")
    code, out, err = compiler(
        "--launch-render",
        example,
        "--trainer-arg",
        "maxtext_model_name=qwen3.5-35b-a3b",
        "--drop-unknown-maxtext-keys",
        "--lower-only",
        "--json",
    )
    doc = json.loads(out)
    assert code == 0, err
    assert doc["mesh"] == {"fsdp": 32, "context": 4, "expert": 2} and doc["devices"] == 256
    assert doc["batch"]["rows"] == 64 and doc["batch"]["row_width"] == 65536
    assert doc["resident"]["parameter_count"] == pytest.approx(34.66e9, rel=0.001)
    assert doc["resident"]["parameters_bytes"] / GIB == pytest.approx(34.66e9 * 2 / 256 / GIB, rel=0.02)
    # [64, 65536, 40 layers, 8 experts] of int16 over fsdp x expert x context
    assert doc["resident"]["micro_batch_fields_bytes"]["routed_experts"] == 64 * 65536 * 40 * 8 * 2 // 256


@pytest.fixture
def on_cpu(monkeypatch):
    """Return a function that builds aot_compile's program on the four virtual CPU devices."""
    pytest.importorskip("maxtext", reason="MaxText is not installed")
    import jax

    import aot_compile

    monkeypatch.setattr(aot_compile, "topology_devices", lambda topology: jax.devices()[:4])

    def build(trainer: str, keys: str):
        job = {
            "topology": "v5e-4",
            "trainer_argv": trainer.split(),
            "orch_argv": ORCH.split(),
            "env": {"MAXTEXT_EXTRA_FLAGS": keys},
            "drop_unknown": False,
            "routing_load": "uniform",
        }
        return aot_compile.build(job)

    return build


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of flax and MaxText
def test_the_workaround_changes_nothing_where_none_is_needed(on_cpu, monkeypatch):
    import contextlib

    import aot_compile

    keys = "override_model_config=true base_num_decoder_layers=2 base_emb_dim=64 base_mlp_dim=64 base_num_query_heads=4 base_num_kv_heads=2 head_dim=16 vocab_size=512"
    texts = []
    for needed in (True, False):
        if not needed:
            monkeypatch.setattr(aot_compile, "shapes_without_shardings", contextlib.nullcontext)
        built = on_cpu(TRAINER + " --maxtext_attention=dot_product", keys)
        lowered, _ = aot_compile.lower(built.engine, built.payload, aot_memory.KERNELS)
        assert set(lowered) == set(aot_memory.KERNELS)
        with built.engine._sharding_ctx():
            compiled = lowered["update"].compile().as_text()
        # Where in the Python source an operation comes from differs: the call went through another context manager.
        program = re.sub(r', metadata=\{[^}]*\}|^\d+ [{"].*\n', "", compiled, flags=re.MULTILINE)
        texts.append([*(lowered[name].as_text() for name in aot_memory.KERNELS), program])
    assert texts[0] == texts[1]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of flax and MaxText
def test_the_abstract_state_is_the_real_engines(on_cpu):
    """bfloat16 weights: the optimizer of shapes holds float32 masters and moments just as the driver's does."""
    import jax
    from flax import nnx
    from maxtext.common import train_state_nnx

    import bench_runtime

    keys = (
        MOE_KEYS.replace(
            "sparse_matmul=true megablox=true use_ring_of_experts=true use_ragged_sort=true ragged_buffer_factor=2.0",
            "sparse_matmul=false megablox=false",
        )
        .replace("1024", "64")
        .replace("=128", "=32")
    )
    built = on_cpu(
        "--trainer_backend=maxtext --maxtext_model_name=qwen3.5-35b-a3b --mesh_fsdp=2 --mesh_expert=2 --max_prompt_length=32 --max_response_length=32 --train_micro_batch_size=4 --maxtext_attention=dot_product",
        keys,
    )
    real = bench_runtime.make_engine(built.config, built.engine._mesh, 0)
    theirs = nnx.split(train_state_nnx.TrainStateNNX(real.model, real.optimizer))[1]
    ours = nnx.split(built.engine.state)[1]
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    dtypes = set()
    for (path, one), other in zip(jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(theirs), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype), path
        if one.ndim:
            assert one.sharding.is_equivalent_to(other.sharding, one.ndim), path
            dtypes.add((path[0].key, str(one.dtype)))
    assert (
        ("optimizer", "float32") in dtypes
        and ("model", "bfloat16") in dtypes
        and ("optimizer", "bfloat16") not in dtypes
    )
