"""The benchmark of the building runs on a tiny shape; its times are printed, never asserted."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from benchmarks import payload_build

TINY = ["--rows", "4", "--tokens", "512", "--layers", "2", "--naive-tokens", "20"]


def test_the_table_has_every_way_and_fits_80_columns():
    numbers = {"rows": 4, "tokens_per_row": 512, "layers": 2, "array_bytes": 2e9, "resident_over_array": 1.25}
    times = {
        "build_s": 6.0,
        "copy_fresh_s": 2.0,
        "copy_touched_s": 0.5,
        "naive_extrapolated_s": 50,
        "measure_load_s": 9,
    }
    assert payload_build.lines(numbers | times) == [
        "4 x 512 tokens, 2 layers, top 10 of 512: 2.00 GB",
        "                                     seconds    x copy",
        "numpy.copyto, array in memory          0.500       1.0",
        "numpy.copyto, fresh array              2.000       4.0",
        "build, calibrated                      6.000      12.0",
        "measure the load                       9.000      18.0",
        "naive argpartition, extrapolated      50.000     100.0",
        "resident 1.25 x the array (limit 1.5)",
    ]


def test_json_has_units_and_the_verdict_is_the_exit_code(capsys):
    code = payload_build.main([*TINY, "--json"])
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "payload_build/1" and document["array_bytes"] == 4 * 512 * 2 * 10 * 2
    assert document["layers_out_of_tolerance"] == 0
    # An array of 80 kB is less than the interpreter itself: beyond the limit of resident memory.
    assert document["resident_over_array"] > payload_build.RESIDENT_LIMIT and code == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--rows", "1"], "must be at least 1"),
        (["--tokens", "100"], "rows of 100 tokens cannot be split into 8 token chunks"),
        (["--naive-tokens", "0"], "--naive-tokens is 0"),
        (["--layers", "0"], "0 layers"),
    ],
)
def test_a_bad_shape_is_one_line(capsys, change, message):
    assert payload_build.main([*TINY, *change]) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.count("\n") == 1 and err.startswith("payload_build: ")


def test_help_in_a_clean_environment():
    command = [sys.executable, payload_build.__file__, "--help"]
    ran = subprocess.run(command, capture_output=True, text=True, env={"PATH": os.defpath}, check=False)
    assert ran.returncode == 0 and "Exit codes:" in ran.stdout and ran.stderr == ""
