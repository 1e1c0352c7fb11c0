"""bench_common: errors in one line, streams, whole files, JSON, masked secrets."""

from __future__ import annotations

import io
import json
import os
import stat

import pytest

import bench_common as common
from bench_common import BenchError


def test_error_is_one_line_with_place_and_remedy(capsys):
    def body():
        raise BenchError("what\nis wrong", where="file.yaml:7", todo="do this")

    assert common.run_tool("tool", body) == common.EXIT_CANNOT
    assert capsys.readouterr().err == "tool: file.yaml:7: what is wrong; do this\n"


def test_a_long_message_keeps_its_ends(capsys):
    assert common.run_tool("tool", lambda: (_ for _ in ()).throw(BenchError("begin" + "x" * 9999 + "end"))) == 2
    line = capsys.readouterr().err
    assert line.startswith("tool: beginx") and line.endswith("xend\n") and 1000 < len(line) < 2000


def test_other_exceptions_are_our_defects():
    with pytest.raises(ZeroDivisionError):
        common.run_tool("tool", lambda: 1 // 0)


@pytest.mark.parametrize(("make", "piece"), [("missing", "No such file"), ("folder", "Is a directory")])
def test_unreadable_input(tmp_path, make, piece):
    path = tmp_path / "input"
    if make == "folder":
        path.mkdir()
    with pytest.raises(BenchError, match=piece):
        common.read_text(str(path))


def test_wrong_encoding_names_the_line(tmp_path):
    path = tmp_path / "input"
    path.write_bytes(b"one\ntwo\n\xff\xfe\n")
    with pytest.raises(BenchError, match=r"input:3: not UTF-8 text \(byte 0xff\)"):
        common.read_text(str(path))


def test_limit(tmp_path):
    path = tmp_path / "input"
    path.write_bytes(b"x" * 11)
    assert common.read_bytes(str(path), 11) == b"x" * 11
    with pytest.raises(BenchError, match="larger than"):
        common.read_bytes(str(path), 10)


def test_stdin_and_line_ends(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xef\xbb\xbfa\r\nb\r\n")))
    assert common.read_text("-") == "a\nb\n"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_what_stdout_cannot_encode_is_escaped(monkeypatch, encoding):
    """A locale that is not UTF-8, or half of a surrogate pair out of somebody's JSON."""
    kept = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(kept, encoding=encoding))
    document = {"a": "\u2026 \u00e9 \ud800"}
    common.emit(common.dump_json(document))
    assert json.loads(kept.getvalue().decode()) == document


def test_a_file_takes_any_text(tmp_path):
    common.write_whole(str(tmp_path / "out"), common.dump_json(["\ud800"]))
    assert json.loads((tmp_path / "out").read_text()) == ["\ud800"]


def test_files_are_whole_or_untouched(tmp_path):
    path = tmp_path / "out.json"
    common.write_whole(str(path), "first")
    common.write_whole(str(path), b"second")
    assert path.read_text() == "second"
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~_umask()
    assert os.listdir(tmp_path) == ["out.json"]
    with pytest.raises(BenchError, match="cannot write"):
        common.write_whole(str(tmp_path / "no" / "out.json"), "x")


def test_a_full_device_is_an_error():
    with pytest.raises(BenchError, match="cannot write: No space left"):
        common.write_whole("/dev/full", "x" * 10_000)


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_json_keeps_order_and_knows_no_nan():
    text = common.dump_json({"b": float("nan"), "a": [float("inf"), 1.5, (2, "µ")]}, indent=None)
    assert text == '{"b": null, "a": [null, 1.5, [2, "µ"]]}\n'
    assert json.loads(text)["a"] == [None, 1.5, [2, "µ"]]


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "WANDB_API_KEY", "hf_access_token", "apiKey", "AWS_SECRET_ACCESS_KEY", "--hf_token", "DB_PASSWORD"],
)
def test_secrets_are_masked(name):
    assert common.mask(name, "abc") == "***"
    assert common.mask(name, "") == ""  # an empty secret is worth knowing


@pytest.mark.parametrize(
    "name",
    ["num_moe_token_chunks", "max_seq_token_per_tpu", "tokenizer_path", "exact_token_continuity", "key", "monkey"],
)
def test_numbers_and_names_are_not(name):
    assert common.mask(name, "4") == "4"
