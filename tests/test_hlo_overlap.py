"""hlo_overlap: every construct of HLO text it must read, every class it gives, and what it prints.

Expected values are worked out by hand in the comments, or for the real modules by
examples/hlo/second_route.py, which uses XLA's own parser. Run: pytest tests/test_hlo_overlap.py
"""

# ruff: noqa: E501 - an HLO instruction is a long line
from __future__ import annotations

import gzip
import io
import json
import os
import pathlib
import random
import re
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hlo_overlap
import hlo_shapes
import hlo_text
from hlo_report import show_bytes
from hlo_schedule import wire_bytes

ROOT = pathlib.Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples" / "hlo"
DATA = ROOT / "tests" / "data" / "hlo"
MODULES = [EXAMPLES / "dense_fsdp_v5e.txt", EXAMPLES / "moe_ring_tpu7x.txt", DATA / "maxtext_moe_fwd_bwd.txt.gz"]

HEADER = "HloModule m, is_scheduled=true, num_partitions=8\n\n"
ADD = "add {\n  a = f32[] parameter(0)\n  b = f32[] parameter(1)\n  ROOT r = f32[] add(a, b)\n}\n\n"
ALL8 = "channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, use_global_device_ids=true"
MATMUL = "  m = f32[32,32]{1,0} dot(w, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n"


def text_of(path: pathlib.Path) -> str:
    return gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()


def module(*lines: str, before: str = "", header: str = HEADER) -> str:
    """A module whose entry holds these lines, between parameters p, w and a root that uses p."""
    head = "  p = f32[64]{0} parameter(0)\n  w = f32[32,32]{1,0} parameter(1)\n"
    body = "".join(line if line.endswith("\n") else f"  {line}\n" for line in lines)
    tail = "" if any("ROOT" in line for line in lines) else "  ROOT out = f32[64]{0} negate(p)\n"
    return f"{header}{before}ENTRY main {{\n{head}{body}{tail}}}\n"


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    """Run the tool on a text, given as a file named module.txt in the current directory; return (code, out, err)."""
    monkeypatch.chdir(tmp_path)

    def call(text: str | None, *options: str) -> tuple[int, str, str]:
        if text is not None:
            (tmp_path / "module.txt").write_text(text)
        files = [] if text is None else ["module.txt"]
        code = hlo_overlap.main([*files, *options])
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture
def ask(run):
    """Return the one module of the tool's JSON about a text; the tool must succeed."""

    def call(text: str, *options: str) -> dict:
        code, out, err = run(text, "--json", *options)
        assert (code, err) == (0, ""), err
        document = json.loads(out)
        assert document["schema"] == "hlo-overlap/1"
        assert len(document["modules"]) == 1
        return document["modules"][0]

    return call


def only(answer: dict) -> dict:
    assert len(answer["collectives"]) == 1, answer["collectives"]
    return answer["collectives"][0]


# --- the grammar, construct by construct --------------------------------------------------------------------------

AG_PAIR = [
    f"s = (f32[64]{{0}}, f32[512]{{0}}) all-gather-start(p), {ALL8}, dimensions={{0}}",
    "d = f32[512]{0} all-gather-done(s)",
]
AG = {"kind": "all-gather", "group_size": 8, "output_bytes": 2048, "wire_bytes": 1792}  # 7/8 of 512 floats
SPARSE = """%called (param: f32[64]) -> f32[512] {
  %param = f32[64]{0} parameter(0)
  ROOT %all-gather.9 = f32[512]{0} all-gather(%param), channel_id=1, replica_groups=mesh['x'=8] {'x'}, dimensions={0}, use_global_device_ids=true
}, execution_thread="sparsecore"

"""  # noqa: E501
GRAMMAR = {
    "header with every key": (
        module(
            *AG_PAIR,
            header="HloModule jit_step, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias) }, buffer_donor={ "
            "(1, {}) }, entry_computation_layout={(f32[64]{0})->f32[64]{0}}, allow_spmd_sharding_propagation_to_output={true},"
            ' replica_count=1, num_partitions=8, frontend_attributes={fingerprint_before_lhs="b305"}\n\n',
        ),
        AG | {"class": "async_empty"},
    ),
    "header over two lines": (
        module(
            *AG_PAIR, header="HloModule Late, is_scheduled=true,\n  entry_computation_layout={(f32[64])->f32[64]}\n\n"
        ),
        AG,
    ),
    "log lines before, comments, tables": (
        "I0101 dumping module\n"
        + module(
            "// a comment of hand-written text",
            "s = (f32[64]{0}, /*index=1*/f32[512]{0}) all-gather-start(/*index=0*/p), " + ALL8,
            "d = f32[512]{0} all-gather-done(s)",
            header=HEADER + 'FileNames\n1 "step.py"\n\nFunctionNames\n1 "step"\n\nFileLocations\n'
            "1 {file_name_id=1 function_name_id=1 line=3 end_line=3 column=1 end_column=9}\n\nStackFrames\n"
            "1 {file_location_id=1 parent_frame_id=1}\n\n",
        ),
        AG,
    ),
    "signature, percent signs, ROOT before the end": (
        HEADER + "ENTRY %main.1 (p: f32[64], /*index=1*/q: (s32[], f32[4])) -> (f32[512], s32[]) {\n"
        "  %p = f32[64]{0} parameter(0)\n  ROOT %all-gather.3 = f32[512]{0} all-gather(%p), "
        + ALL8
        + ", dimensions={0}\n"
        "  %late = s32[] constant(7)\n}\n",
        AG | {"class": "sync", "line": 5, "name": "all-gather.3", "computation": "main.1"},
    ),
    "signature over two lines": (
        HEADER + "%helper (a: f32[64],\n  b: f32[64]) -> f32[64] {\n  %a = f32[64]{0} parameter(0)\n"
        "  ROOT %n = f32[64]{0} negate(%a)\n}\n\nENTRY %e (p: f32[64]) -> f32[512] {\n  %p = f32[64]{0} parameter(0)\n"
        f"  ROOT %g = f32[512]{{0}} all-gather(%p), {ALL8}, dimensions={{0}}\n}}\n",
        AG | {"line": 11},
    ),
    "operands with shapes, tuple of inputs, complex numbers": (
        # 64 complex128 = 1024 B; groups of 2: half of it crosses
        module(
            "s = ((c128[64]{0}), c128[64]{0}) all-to-all-start(c128[64]{0} %p), replica_groups={{0,1},{2,3},{4,5},{6,7}}, dimensions={0}",
            "d = c128[64]{0} all-to-all-done(((c128[64]{0}), c128[64]{0}) %s)",
        ),
        {"kind": "all-to-all", "group_size": 2, "output_bytes": 1024, "wire_bytes": 512, "class": "async_empty"},
    ),
    "folded tuple element as operand": (
        module(
            "t = (f32[64]{0}, f32[32,32]{1,0}) tuple(p, w)",
            f"g = f32[512]{{0}} all-gather(%t#0), {ALL8}, dimensions={{0}}",
        ),
        AG | {"class": "sync"},
    ),
    "tiles, memory spaces, dynamic sizes": (
        # 16*128 bf16 = 4096 B; reduce-scatter over 8 moves 7 times its output
        module(
            f"r = bf16[<=16,128]{{1,0:T(8,128)(2,1)S(1)}} reduce-scatter(p), {ALL8}, dimensions={{0}}, to_apply=add",
            before=ADD,
        ),
        {"kind": "reduce-scatter", "output_bytes": 4096, "wire_bytes": 28672, "class": "sync"},
    ),
    "elements of four bits": (
        module(f"g = s4[512]{{0:T(512)(8,1)E(4)}} all-gather(p), {ALL8}, dimensions={{0}}"),
        {"output_bytes": 256, "wire_bytes": 224},
    ),
    "combined all-gather": (
        # outputs 512 + 1024 floats = 6144 B, 7/8 of it
        module(
            f"s = ((f32[64]{{0}}, f32[128]{{0}}), (f32[512]{{0}}, f32[1024]{{0}})) all-gather-start(p, p), {ALL8}, dimensions={{0}}",
            "d = (f32[512]{0}, f32[1024]{0}) all-gather-done(s)",
        ),
        {"output_bytes": 6144, "wire_bytes": 5376},
    ),
    "all-reduce-start gives its output alone": (
        # two arrays of 64 floats = 512 B, 2*7/8 of it
        module(
            f"s = (f32[64]{{0}}, f32[64]{{0}}) all-reduce-start(p, p), {ALL8}, to_apply=add",
            "d = (f32[64]{0}, f32[64]{0}) all-reduce-done(s)",
            before=ADD,
        ),
        {"kind": "all-reduce", "output_bytes": 512, "wire_bytes": 896},
    ),
    "is_sync is not asynchronous": (
        module(
            f"s = f32[64]{{0}} all-reduce-start(p), {ALL8}, to_apply=add, "
            'backend_config={"operation_queue_id":"0","collective_backend_config":{"is_sync":true}}',
            MATMUL,
            "d = f32[64]{0} all-reduce-done(s)",
            before=ADD,
        ),
        {"kind": "all-reduce", "class": "sync", "wire_bytes": 448},
    ),
    "is_sync in a quoted configuration": (
        module(
            f"s = f32[64]{{0}} all-reduce-start(p), {ALL8}, to_apply=add, "
            r'backend_config="{\"is_sync\":true,\"no_parallel_custom_call\":false}"',
            MATMUL,
            "d = f32[64]{0} all-reduce-done(s)",
            before=ADD,
        ),
        {"kind": "all-reduce", "class": "sync", "wire_bytes": 448},
    ),
    "custom calls of a user": (
        # the groups are in nobody's attribute; the result is the done's: 512 floats
        module(
            'g = (f32[64]{0}, f32[512]{0}) custom-call(p), custom_call_target="all-gather-start", '
            'frontend_attributes={async_collective_config="{}"}',
            MATMUL,
            'h = f32[512]{0} custom-call(g), custom_call_target="all-gather-done"',
        ),
        {"kind": "all-gather", "class": "async_compute", "group_size": None, "output_bytes": 2048, "wire_bytes": None},
    ),
    "collective-permute of four elements": (
        module(
            "s = (f32[64]{0}, f32[64]{0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(p), channel_id=18, "
            "source_target_pairs={{0,1},{1,2},{2,3},{3,0}}",
            "d = f32[64]{0} collective-permute-done(s)",
        ),
        {"kind": "collective-permute", "group_size": 4, "output_bytes": 256, "wire_bytes": 256},
    ),
    "reduce-scatter-start with an inline reducer": (
        # output 16 floats = 64 B, groups of 4: 3 times the output
        module(
            "s = ((f32[64]{0}), f32[16]{0}) reduce-scatter-start(p), dimensions={0}, replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply={",
            "    a = f32[] parameter(0)",
            "    b = f32[] parameter(1)",
            "    ROOT add = f32[] add(a, b)",
            "  }, channel_id=4",
            "d = f32[16]{0} reduce-scatter-done(s)",
        ),
        {"kind": "reduce-scatter", "group_size": 4, "output_bytes": 64, "wire_bytes": 192, "class": "async_empty"},
    ),
    "ragged-all-to-all": (
        module(
            "s = ((f32[64]{0}, f32[128]{0}), f32[128]{0}) ragged-all-to-all-start(p, w, p, p, p, p), replica_groups={{0,1,2,3}}",
            "d = f32[128]{0} ragged-all-to-all-done(s)",
        ),
        {"kind": "ragged-all-to-all", "output_bytes": 512, "wire_bytes": 384},
    ),
    "collective-reduce": (
        module(f"b = f32[64]{{0}} collective-reduce(p), {ALL8}, to_apply=add", before=ADD),
        {"kind": "collective-reduce", "wire_bytes": 256, "class": "sync"},
    ),
    "collective-broadcast": (
        module("b = f32[64]{0} collective-broadcast(p), replica_groups={{0,1}}"),
        {"kind": "collective-broadcast", "wire_bytes": 256, "class": "sync"},
    ),
    "three steps, bound late, through a custom call": (
        # the window begins at the update: the dot before it is no cover
        module(
            '%g.call-start = ((), (), (s32[8192]{0})) async-start(), async_execution_thread="sparsecore", calls=%async_comp',
            MATMUL,
            "%g.call-update = ((f32[64]{0}), f32[512]{0}, (s32[8192]{0})) async-update(%g.call-start, %p)",
            "%g.call-done = f32[512]{0} async-done(%g.call-update)",
            before=SPARSE
            + "%async_comp (a: f32[64]) -> f32[512] {\n  %a = f32[64]{0} parameter(0)\n  ROOT %c = f32[512]{0} custom-call(%a), "
            'custom_call_target="TODO(b/522284627)", called_computations={%called}\n}, execution_thread="sparsecore"\n\n',
        ),
        AG | {"class": "async_empty", "thread": "sparsecore", "axes": ["x"], "name": "g.call-start"},
    ),
    "custom-call-start, -update, -done": (
        module(
            "%g.call-start = ((), (), (s32[8192]{0:T(1024)}, s32[128]{0:T(1)L(128)S(4)})) custom-call-start(), "
            'async_execution_thread="sparsecore", custom_call_target="TODO(b/522284627)", called_computations={%called}, '
            'frontend_attributes={is_spmd_generated="true"}',
            "%g.call-update = ((f32[64]{0}), f32[512]{0}, (s32[8192]{0:T(1024)})) custom-call-update(%g.call-start, %p), "
            "output_to_operand_aliasing={{2,0}: (0, {2,0})}",
            MATMUL,
            "%g.call-done = f32[512]{0} custom-call-done(%g.call-update)",
            before=SPARSE,
        ),
        AG | {"class": "async_compute", "line": 11},
    ),
    "async-start around the collective, all three naming it": (
        module(
            "s = ((f32[64]{0}), f32[512]{0}, u32[]) async-start(p), calls=called",
            "u = ((f32[64]{0}), f32[512]{0}, u32[]) async-update(s), calls=called",
            "d = f32[512]{0} async-done(u), calls=called",
            before=SPARSE,
        ),
        AG | {"class": "async_empty"},
    ),
    "windows of names only: no name is a collective": (
        module(
            "exchange.7 = (f32[64]{0}, f32[512]{0}) all-gather-start(p), " + ALL8,
            "wait.7 = f32[512]{0} all-gather-done(exchange.7)",
        ),
        AG | {"name": "exchange.7"},
    ),
    "iota groups": (
        module(
            "g = f32[256]{0} all-gather(p), channel_id=1, replica_groups=[2,4]<=[8], dimensions={0}, use_global_device_ids=true"
        ),
        {"group_size": 4, "output_bytes": 1024, "wire_bytes": 768},
    ),
    "iota groups, transposed": (
        module(
            "g = f32[256]{0} all-gather(p), channel_id=1, replica_groups=[2,4]<=[4,2]T(1,0), use_global_device_ids=true"
        ),
        {"group_size": 4, "wire_bytes": 768},
    ),
    "mesh axes": (
        module(
            "g = f32[512]{0} all-gather(p), channel_id=1, replica_groups=mesh['data'=1,'fsdp'=4,'expert'=2] {'fsdp','expert'}"
        ),
        {"group_size": 8, "axes": ["fsdp", "expert"], "wire_bytes": 1792},
    ),
    "mesh axes with a sub-axis": (
        module(
            "g = f32[64]{0} all-gather(p), channel_id=1, replica_groups=mesh['fsdp'=32,'expert'=2] {'fsdp':(16)2,'expert'}"
        ),
        {"group_size": 4, "axes": ["fsdp:(16)2", "expert"], "wire_bytes": 192},
    ),
    "mesh of reordered devices": (
        module(
            "g = f32[64]{0} all-gather(p), channel_id=1, replica_groups=mesh['x'=2,'y'=2], device_ids=([2,2]<=[4]T(0)) {'y'}"
        ),
        {"group_size": 2, "axes": ["y"], "wire_bytes": 128},
    ),
    "empty groups are everybody": (
        module("g = f32[512]{0} all-gather(p), channel_id=1, replica_groups={}, dimensions={0}"),
        {"group_size": 8, "wire_bytes": 1792},
    ),
    "empty groups without channel are all replicas": (
        module(
            "g = f32[512]{0} all-gather(p), replica_groups={}",
            header="HloModule m, is_scheduled=true, replica_count=4\n\n",
        ),
        {"group_size": 4, "wire_bytes": 1536},
    ),
    "replica groups across partitions": (
        # ids are replicas, all 4 partitions take part: 2 x 4 devices
        module(
            "g = f32[512]{0} all-gather(p), channel_id=3, replica_groups={{0,1}}",
            header="HloModule m, is_scheduled=true, replica_count=2, num_partitions=4\n\n",
        ),
        {"group_size": 8, "wire_bytes": 1792},
    ),
    "no groups are everybody": (
        module("g = f32[512]{0} all-gather(p), dimensions={0}"),
        {"group_size": 8, "wire_bytes": 1792},
    ),
    "empty groups of replicas and partitions": (
        # with a channel, a reduction takes in all 2 replicas of all 4 partitions: 7/8 of 2048 B
        module(
            "g = f32[512]{0} all-gather(p), channel_id=3, replica_groups={}",
            header="HloModule m, is_scheduled=true, replica_count=2, num_partitions=4\n\n",
        ),
        {"group_size": 8, "wire_bytes": 1792},
    ),
    "empty groups of an all-to-all across partitions": (
        # with a channel, every replica exchanges among its 4 partitions: 3/4 of 2048 B
        module(
            "g = f32[512]{0} all-to-all(p), channel_id=3, replica_groups={}",
            header="HloModule m, is_scheduled=true, replica_count=2, num_partitions=4\n\n",
        ),
        {"group_size": 4, "wire_bytes": 1536},
    ),
    "groups of unknown size stay unknown": (
        module("g = f32[512]{0} all-gather(p), replica_groups={}", header="HloModule m, is_scheduled=true\n\n"),
        {"group_size": None, "output_bytes": 2048, "wire_bytes": None},
    ),
    "element type of unknown size": (
        module(f"g = q9[512]{{0}} all-gather(p), {ALL8}"),
        {"output_bytes": None, "wire_bytes": None},
    ),
    "attribute over several lines, with brackets in quotes": (
        module(
            'k = f32[64]{0} custom-call(p), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={\n'
            '"xprof_metadata":"{\\"block_q\\": 128, \\"text\\": \\"}\\"}"\n}\n}, '
            'backend_config={"custom_call_config":{"body":"TUzv"}}\n',
            f"g = f32[512]{{0}} all-gather(p), {ALL8}, dimensions={{0}}",
        ),
        AG | {"line": 10},
    ),
    "nested unquoted JSON, control predecessors, escaped quotes": (
        module(
            f"g = f32[512]{{0}} all-gather(p), {ALL8}, dimensions={{0}}, control-predecessors={{w}}, "
            "sharding={devices=[4,2,1]<=[8]}, "
            'frontend_attributes={backend_config={"sparse_core_config": {"core_ids": [0]}}}, '
            'metadata={op_name="jit(f)/axis_name=(\\\'y\\\',), calls=add, to_apply=x" source_file="a b.py" source_line=37}'
        ),
        AG | {"op_name": "jit(f)/axis_name=(\\'y\\',), calls=add, to_apply=x"},
    ),
    "attributes wrapped over lines": (
        module(
            "s = (f32[64]{0},\n       f32[512]{0}) all-gather-start(p),\n    replica_groups={{0,1,2,3,4,5,6,7}},\n    dimensions={0}\n",
            "d = f32[512]{0}\n    all-gather-done(s)\n",
        ),
        AG | {"class": "async_empty", "line": 6},
    ),
    "windows line ends": (module(*AG_PAIR).replace("\n", "\r\n"), AG | {"class": "async_empty"}),
}


@pytest.mark.parametrize("name", GRAMMAR)
def test_grammar(ask, name):
    text, expected = GRAMMAR[name]
    found = only(ask(text))
    assert {key: found[key] for key in expected} == expected
    assert found["executions_per_step"] == 1


# --- what is no collective ----------------------------------------------------------------------------------------

NOT_COLLECTIVES = {
    "a slice behind a generic async-start": (
        "%slice-start.24 = ((s8[1024]{0}), s8[128]{0:S(1)}, s32[]{:S(2)}) async-start(%p), calls=%async_slice\n"
        "  %slice-done.24 = s8[128]{0:S(1)} async-done(%slice-start.24)",
        [{"operation": "async", "from": "HBM", "to": "VMEM", "per_step": 1, "bytes_per_step": 128}],
    ),
    "a copy to the host": (
        "copy-start.1 = (f32[64]{0:S(5)}, f32[64]{0}, u32[]) copy-start(p)\n  copy-done.1 = f32[64]{0:S(5)} copy-done(copy-start.1)",
        [{"operation": "copy", "from": "HBM", "to": "host", "per_step": 1, "bytes_per_step": 256}],
    ),
    "a slice by its own opcode": (
        "s = ((f32[64]{0:S(1)}), f32[16]{0}, s32[]{:S(2)}) slice-start(p), slice={[0:16]}\n  d = f32[16]{0} slice-done(s)",
        [{"operation": "slice", "from": "VMEM", "to": "HBM", "per_step": 1, "bytes_per_step": 64}],
    ),
    "a call on another thread": (
        '%k-start = ((f32[64]{0}), f32[64]{0}, u32[]) call-start(%p), async_execution_thread="sparsecore", to_apply=%kernel\n'
        "  %k-done = f32[64]{0} call-done(%k-start)",
        [],
    ),
    "names that look like collectives": (
        "all-gather.1 = f32[64]{0} negate(p)\n  all-reduce-start.3 = f32[64]{0} copy(all-gather.1)\n"
        "  all-gather_fusion = f32[64]{0} fusion(p), kind=kLoop, calls=kernel",
        [],
    ),
}


@pytest.mark.parametrize("name", NOT_COLLECTIVES)
def test_not_a_collective(ask, name):
    lines, copies = NOT_COLLECTIVES[name]
    before = (
        "%async_slice (a: s8[1024]) -> s8[128] {\n  %a = s8[1024]{0} parameter(0)\n"
        "  ROOT %slice.1 = s8[128]{0:S(1)} slice(%a), slice={[0:128]}\n}\n\n"
        "%kernel (b: f32[64]) -> f32[64] {\n  %b = f32[64]{0} parameter(0)\n  ROOT %e = f32[64]{0} exponential(%b)\n}\n\n"
    )
    answer = ask(module(lines, before=before))
    assert answer["collectives"] == []
    assert answer["copies"] == copies
    assert answer["totals"] == []


# --- classes ------------------------------------------------------------------------------------------------------

FUSIONS = """fused_matmul {
  x = f32[32,32]{1,0} parameter(0)
  c = f32[32,32]{1,0} convolution(x, x), dim_labels=bf_io->bf
  ROOT y = f32[32,32]{1,0} negate(c)
}

fused_light {
  x = f32[64]{0} parameter(0)
  ROOT y = f32[64]{0} exponential(x)
}

fused_names {
  x = f32[64]{0} parameter(0)
  ROOT y = f32[64]{0} bitcast(x)
}

outer {
  x = f32[32,32]{1,0} parameter(0)
  ROOT y = f32[32,32]{1,0} fusion(x), kind=kOutput, calls=fused_matmul
}

body {
  t = (s32[], f32[32,32]{1,0}) parameter(0)
  i = s32[] get-tuple-element(t), index=0
  one = s32[] constant(1)
  n = s32[] add(i, one)
  x = f32[32,32]{1,0} get-tuple-element(t), index=1
  y = f32[32,32]{1,0} dot(x, x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT r = (s32[], f32[32,32]{1,0}) tuple(n, y)
}

cond {
  t = (s32[], f32[32,32]{1,0}) parameter(0)
  i = s32[] get-tuple-element(t), index=0
  five = s32[] constant(5)
  ROOT less = pred[] compare(i, five), direction=LT
}

yes {
  x = f32[32,32]{1,0} parameter(0)
  ROOT y = f32[32,32]{1,0} dot(x, x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

no {
  x = f32[32,32]{1,0} parameter(0)
  ROOT y = f32[32,32]{1,0} negate(x)
}

factor {
  x = f32[32,32]{1,0} parameter(0)
  z = f32[32,32]{1,0} add(x, x)
  ROOT y = f32[32,32]{1,0} cholesky(z), lower=true
}

"""
LOOP = [
    "zero = s32[] constant(0)",
    "init = (s32[], f32[32,32]{1,0}) tuple(zero, w)",
]
KERNEL = 'k = f32[64]{0} custom-call(p), custom_call_target="tpu_custom_call", backend_config={"custom_call_config":{"body":""}}'
BETWEEN = {
    # name: (lines between, class, matmuls, unknown kernels, instructions)
    "nothing": ([], "async_empty", 0, 0, 0),
    "plumbing": (
        ["c = f32[] constant(1)", "b = f32[64]{0} bitcast(p)", "t = (f32[64]{0}) tuple(b)", "g = f32[64]{0} get-tuple-element(t), index=0",
         'a = f32[8]{0} custom-call(), custom_call_target="AllocateBuffer"', "o = f32[64]{0} opt-barrier(p)"],
        "async_empty", 0, 0, 1,
    ),
    "another collective": ([f"o = f32[512]{{0}} all-gather(p), {ALL8}"], "async_empty", 0, 0, 1),
    "another pair": (
        [f"s2 = (f32[64]{{0}}, f32[512]{{0}}) all-gather-start(p), {ALL8}", "d2 = f32[512]{0} all-gather-done(s2)"],
        "async_empty", 0, 0, 2,
    ),
    "elementwise": (["n = f32[64]{0} negate(p)", "e = f32[64]{0} exponential(n)"], "async_light", 0, 0, 2),
    "a copy": (["n = f32[64]{0} copy(p)"], "async_light", 0, 0, 1),
    "a light fusion": (["f = f32[64]{0} fusion(p), kind=kLoop, calls=fused_light"], "async_light", 0, 0, 1),
    "a fusion of names": (["f = f32[64]{0} fusion(p), kind=kLoop, calls=fused_names"], "async_empty", 0, 0, 1),
    "a dot": ([MATMUL], "async_compute", 1, 0, 1),
    "a matmul in a fusion": (["f = f32[32,32]{1,0} fusion(w), kind=kOutput, calls=fused_matmul"], "async_compute", 1, 0, 1),
    "a matmul in a fusion in a call": (["f = f32[32,32]{1,0} call(w), to_apply=outer"], "async_compute", 1, 0, 1),
    "a kernel": ([KERNEL], "async_compute", 0, 1, 1),
    "a library matmul": (
        ['k = (f32[32,32]{1,0}, s8[4]{0}) custom-call(w, w), custom_call_target="__cublas$lt$matmul"'], "async_compute", 1, 0, 1
    ),
    "an unknown custom call": (['k = f32[64]{0} custom-call(p), custom_call_target="mine"'], "async_compute", 0, 1, 1),
    "an fft": (["k = c64[64]{0} fft(p), fft_type=FFT, fft_length={64}"], "async_compute", 0, 1, 1),
    "a loop of matmuls": ([*LOOP, "l = (s32[], f32[32,32]{1,0}) while(init), condition=cond, body=body"], "async_compute", 5, 0, 1),
    "a branch that may be light": (
        ["q = pred[] constant(true)", "b = f32[32,32]{1,0} conditional(q, w, w), true_computation=yes, false_computation=no"],
        "async_light", 0, 0, 1,
    ),
    "branches that compute in different ways": (
        ["q = pred[] constant(true)", "b = f32[32,32]{1,0} conditional(q, w, w), true_computation=yes, false_computation=factor"],
        "async_compute", 1, 0, 1,
    ),
    "a ragged product": (
        ["r = f32[32,32]{1,0} ragged-dot(w, w, p), lhs_contracting_dims={1}, rhs_contracting_dims={1}, lhs_ragged_dims={0}"],
        "async_compute", 1, 0, 1,
    ),
    "a scaled product": (
        ["r = f32[32,32]{1,0} scaled-dot(w, w, p, p), lhs_contracting_dims={1}, rhs_contracting_dims={0}"],
        "async_compute", 1, 0, 1,
    ),
    "an opcode of tomorrow": (["r = f32[32,32]{1,0} tomorrows-op(w)"], "async_compute", 0, 1, 1),
    "asynchronous compute on another stream": (
        ["k = ((f32[32,32]{1,0}), f32[32,32]{1,0}, u32[]) fusion-start(w), calls=fused_matmul",
         "kd = f32[32,32]{1,0} fusion-done(k)"],
        "async_compute", 1, 0, 2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BETWEEN)
def test_class_by_what_lies_between(ask, name):
    lines, category, matmuls, kernels, instructions = BETWEEN[name]
    answer = ask(module(AG_PAIR[0], *lines, AG_PAIR[1], before=FUSIONS))
    found = next(one for one in answer["collectives"] if one["name"] == "s")
    assert found["class"] == category
    between = found["between"]
    assert (between["matmuls"], between["unknown_kernels"], between["instructions"]) == (matmuls, kernels, instructions)
    assert sum(between["opcodes"].values()) == instructions


def test_flops_between_are_counted_or_unknown(ask):
    # dot of 32x32 by 32x32: 2*32*32*32 = 65536; convolution bf_io->bf of the same size: the same
    lines = [MATMUL, "f = f32[32,32]{1,0} fusion(w), kind=kOutput, calls=fused_matmul"]
    between = only(ask(module(AG_PAIR[0], *lines, AG_PAIR[1], before=FUSIONS)))["between"]
    assert (between["matmul_flops"], between["flops_unknown"]) == (2 * 65536, 0)
    between = only(ask(module(AG_PAIR[0], MATMUL, KERNEL, AG_PAIR[1])))["between"]
    assert (between["matmul_flops"], between["flops_unknown"]) == (None, 1)


def test_flops_of_a_tuple_element_use_that_element(ask):
    # lhs is element 1, f32[4,8], contracted over 8: 2 * (4*16 outputs) * 8 = 1024
    lines = [
        't = (f32[999]{0}, f32[4,8]{1,0}) custom-call(), custom_call_target="AllocateBuffer"',
        'y = f32[8,16]{1,0} custom-call(), custom_call_target="AllocateBuffer"',
        "m = f32[4,16]{1,0} dot(%t#1, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
    ]
    assert only(ask(module(AG_PAIR[0], *lines, AG_PAIR[1])))["between"]["matmul_flops"] == 1024


def test_async_compute_that_is_still_running_covers(ask):
    lines = [
        "k = ((f32[32,32]{1,0}), f32[32,32]{1,0}, u32[]) fusion-start(w), calls=fused_matmul",
        *AG_PAIR,
        "kd = f32[32,32]{1,0} fusion-done(k)",
    ]
    assert only(ask(module(*lines, before=FUSIONS)))["class"] == "async_compute"
    # finished before: no cover
    assert only(ask(module(lines[0], lines[3], *AG_PAIR, before=FUSIONS)))["class"] == "async_empty"


@pytest.mark.parametrize("work, elsewhere", [("yes", "async_compute"), ("no", "async_light")])
def test_work_on_the_collectives_own_thread_is_no_cover(ask, work, elsewhere):
    def text(thread):
        return module(
            '%g-start = ((f32[64]{0}), f32[512]{0}, u32[]) async-start(%p), async_execution_thread="sparsecore", calls=%called',
            f'%k-start = ((f32[32,32]{{1,0}}), f32[32,32]{{1,0}}, u32[]) call-start(%w), async_execution_thread="{thread}", to_apply=%{work}',
            "%g-done = f32[512]{0} async-done(%g-start)",
            "%k-done = f32[32,32]{1,0} call-done(%k-start)",
            before=SPARSE + FUSIONS.replace("\n}\n\nno", '\n}, execution_thread="other"\n\nno'),
        )

    assert only(ask(text("sparsecore")))["class"] == "async_empty"
    assert only(ask(text("other")))["class"] == elsewhere


def test_nothing_lies_between_a_synchronous_collective(ask):
    found = only(ask(module(f"g = f32[512]{{0}} all-gather(p), {ALL8}", MATMUL)))
    between = found["between"]
    assert [between[key] for key in ("instructions", "matmuls", "unknown_kernels", "opcodes")] == [0, 0, 0, {}]


def test_a_start_without_done_is_unmatched(ask):
    answer = ask(module(AG_PAIR[0]))
    assert only(answer)["class"] == "unmatched" and only(answer)["between"] is None
    assert answer["exposed_bytes_per_step"] == 1792  # nothing shows that it is hidden
    answer = ask(module("d = f32[512]{0} all-gather-done(gone)"))
    assert answer["collectives"] == [] and answer["dones_without_start"] == 1


def test_group_of_one_device_moves_nothing(ask, run):
    text = module("g = f32[64]{0} all-gather(p), channel_id=1, replica_groups={{0},{1}}", "c = f32[64]{0} collective-permute(p), "
                  "channel_id=2, source_target_pairs={{0,0},{1,1}}")  # fmt: skip
    answer = ask(text)
    assert [one["wire_bytes"] for one in answer["collectives"]] == [0, 0]
    assert answer["totals"] == [] and answer["exposed_bytes_per_step"] == 0
    assert "2 collectives of one device left out" in run(text)[1]


def test_a_group_of_collectives_shares_its_window(ask):
    ring = (
        "ring {\n  a = f32[64]{0} parameter(0)\n"
        "  c1 = (f32[64]{0}, f32[64]{0}) collective-permute-start(a), channel_id=1, source_target_pairs={{0,1},{1,0}}\n"
        "  c2 = (f32[64]{0}, f32[64]{0}) collective-permute-start(a), channel_id=2, source_target_pairs={{1,0},{0,1}}\n"
        "  e1 = f32[64]{0} collective-permute-done(c1)\n  e2 = f32[64]{0} collective-permute-done(c2)\n"
        "  ROOT t = (f32[64]{0}, f32[64]{0}) tuple(e1, e2)\n}\n\n"
    )
    lines = [
        "comm-start = ((f32[64]{0}), (f32[64]{0}, f32[64]{0}), u32[]) async-start(p), calls=ring, "
        'frontend_attributes={_collectives_group=""}',
        MATMUL,
        "comm-done = (f32[64]{0}, f32[64]{0}) async-done(comm-start)",
    ]
    answer = ask(module(*lines, before=ring))
    assert [one["class"] for one in answer["collectives"]] == ["async_compute"] * 2
    assert answer["totals"] == [
        {"kind": "collective-permute", "class": "async_compute", "static": 2, "per_step": 2, "per_step_min": 2,
         "wire_bytes_per_step": 512, "wire_bytes_per_step_min": 512, "exposed": False}
    ]  # fmt: skip


# --- the forms of TPU ---------------------------------------------------------------------------------------------

SCATTER = """all-reduce-scatter.5 {
  input.5 = bf16[512,32]{1,0} parameter(0)
  all-reduce.9 = bf16[512,32]{1,0} all-reduce(input.5), channel_id=12, replica_groups={{0,1,2,3}}, use_global_device_ids=true, to_apply=add
  id = u32[] partition-id()
  zero = u32[] constant(0)
  ROOT slice.3 = bf16[128,32]{1,0} dynamic-slice(all-reduce.9, id, zero), dynamic_slice_sizes={128,32}
}

"""  # noqa: E501


def test_all_reduce_scatter_fusion_is_a_reduce_scatter(ask):
    """Documented mistake (a): the inner all-reduce read at its full shape, twice the bytes that move."""
    text = module("f = bf16[128,32]{1,0} fusion(p), kind=kCustom, calls=all-reduce-scatter.5", before=ADD + SCATTER)
    found = only(ask(text))
    # 128*32 bf16 = 8192 B out, 3 times that on the wire; an all-reduce of 32768 B would be 49152
    assert (found["kind"], found["class"], found["output_bytes"], found["wire_bytes"]) == (
        "reduce-scatter",
        "sync",
        8192,
        24576,
    )
    assert found["name"] == "f"


def test_an_all_reduce_in_the_schedule_stays_one(ask):
    lines = [f"r = f32[64]{{0}} all-reduce(p), {ALL8}, to_apply=add", "z = u32[] constant(0)",
             "s = f32[8]{0} dynamic-slice(r, z), dynamic_slice_sizes={8}"]  # fmt: skip
    assert only(ask(module(*lines, before=ADD)))["kind"] == "all-reduce"


FUSED_ASYNC = """start_comp {
  a = bf16[64]{0} parameter(0)
  g = bf16[512]{0} all-gather(a), channel_id=15, replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}, use_global_device_ids=true
  ROOT c = (bf16[64]{0}, bf16[512]{0}, u32[]{:S(2)}) custom-call(g), custom_call_target="AsyncCollectiveStart"
}

carry_comp {
  a = bf16[64]{0} parameter(0)
  b = bf16[512]{0} parameter(1)
  u = u32[]{:S(2)} parameter(2)
  x = bf16[32,32]{1,0} parameter(3)
  m = bf16[32,32]{1,0} convolution(x, x), dim_labels=bf_io->bf
  g = bf16[512]{0} all-gather(a), channel_id=15, replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}, use_global_device_ids=true
  ROOT t = (bf16[32,32]{1,0}, bf16[64]{0}, bf16[512]{0}, bf16[512]{0}, u32[]{:S(2)}) tuple(m, a, b, g, u)
}

done_comp {
  a = bf16[64]{0} parameter(0)
  b = bf16[512]{0} parameter(1)
  u = u32[]{:S(2)} parameter(2)
  g = bf16[512]{0} all-gather(a), channel_id=15, replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}, use_global_device_ids=true
  ROOT c = bf16[512]{0} custom-call(a, b, g, u), custom_call_target="AsyncCollectiveDone"
}

"""
FUSED_LINES = [
    "q = bf16[32,32]{1,0} parameter(2)",
    "q0 = bf16[64]{0} parameter(3)",
    "start = (bf16[64]{0}, bf16[512]{0}, u32[]{:S(2)}) fusion(q0), kind=kCustom, calls=start_comp",
    "s0 = bf16[64]{0} get-tuple-element(start), index=0",
    "s1 = bf16[512]{0} get-tuple-element(start), index=1",
    "s2 = u32[]{:S(2)} get-tuple-element(start), index=2",
    "carry = (bf16[32,32]{1,0}, bf16[64]{0}, bf16[512]{0}, bf16[512]{0}, u32[]{:S(2)}) fusion(s0, s1, s2, q), kind=kOutput, calls=carry_comp",
    "m0 = bf16[32,32]{1,0} get-tuple-element(carry), index=0",
    "c1 = bf16[64]{0} get-tuple-element(carry), index=1",
    "c2 = bf16[512]{0} get-tuple-element(carry), index=2",
    "c4 = u32[]{:S(2)} get-tuple-element(carry), index=4",
    "done = bf16[512]{0} fusion(c1, c2, c4), kind=kCustom, calls=done_comp",
]


def test_async_collective_fusion_is_one_collective(ask):
    """A fusion that starts, one that carries on beside a matmul, one that ends: one all-gather, hidden."""
    found = only(ask(module(*FUSED_LINES, before=FUSED_ASYNC)))
    assert (found["name"], found["class"], found["output_bytes"], found["wire_bytes"]) == (
        "start",
        "async_compute",
        1024,
        896,
    )
    assert found["between"]["matmuls"] == 1 and found["between"]["opcodes"] == {"fusion": 1}


def test_async_collective_fusion_without_carrier_is_exposed(ask):
    lines = [line for line in FUSED_LINES if not re.match(r"(carry|m0|c\d) =", line)]
    lines[-1] = "done = bf16[512]{0} fusion(s0, s1, s2), kind=kCustom, calls=done_comp"
    found = only(ask(module(*lines, before=FUSED_ASYNC)))
    assert found["class"] == "async_empty"


def test_async_collective_fusion_that_names_its_collective_once(ask):
    """Only the fusion that starts holds the all-gather; the others hand its state on, one of them as a nested tuple."""
    state = "(bf16[64]{0}, bf16[512]{0}, u32[]{:S(2)})"
    before = FUSED_ASYNC[: FUSED_ASYNC.index("carry_comp")] + (
        f"carry_comp {{\n  s = {state} parameter(0)\n  x = bf16[32,32]{{1,0}} parameter(1)\n"
        "  m = bf16[32,32]{1,0} convolution(x, x), dim_labels=bf_io->bf\n"
        f"  ROOT t = (bf16[32,32]{{1,0}}, {state}) tuple(m, s)\n}}\n\n"
        f"done_comp {{\n  s = {state} parameter(0)\n"
        '  ROOT c = bf16[512]{0} custom-call(s), custom_call_target="AsyncCollectiveDone"\n}\n\n'
    )
    lines = [
        *FUSED_LINES[:3],
        f"carry = (bf16[32,32]{{1,0}}, {state}) fusion(start, q), kind=kOutput, calls=carry_comp",
        f"c = {state} get-tuple-element(carry), index=1",
        "done = bf16[512]{0} fusion(c), kind=kCustom, calls=done_comp",
    ]
    found = only(ask(module(*lines, before=before)))
    assert (found["name"], found["class"], found["wire_bytes"]) == ("start", "async_compute", 896)
    assert found["between"]["matmuls"] == 1


def test_windowed_einsum_loop(ask):
    """Two permutes per trip beside convolution fusions, unrolled by two: 8 shards in 4 trips of step 2."""
    body = """wide.windowed_body {
  t = (s32[], bf16[32,32]{1,0}, bf16[32,32]{1,0}) parameter(0)
  i = s32[] get-tuple-element(t), index=0
  x = bf16[32,32]{1,0} get-tuple-element(t), index=1
  two = s32[] constant(2)
  n = s32[] add(i, two)
  s1 = (bf16[32,32]{1,0}, bf16[32,32]{1,0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(x), channel_id=1, source_target_pairs={{0,1},{1,0}}
  f1 = bf16[32,32]{1,0} fusion(x), kind=kOutput, calls=fused_matmul
  d1 = bf16[32,32]{1,0} collective-permute-done(s1)
  s2 = (bf16[32,32]{1,0}, bf16[32,32]{1,0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(d1), channel_id=2, source_target_pairs={{0,1},{1,0}}
  f2 = bf16[32,32]{1,0} fusion(d1), kind=kOutput, calls=fused_matmul
  d2 = bf16[32,32]{1,0} collective-permute-done(s2)
  ROOT r = (s32[], bf16[32,32]{1,0}, bf16[32,32]{1,0}) tuple(n, d2, f2)
}

wide.windowed_cond {
  t = (s32[], bf16[32,32]{1,0}, bf16[32,32]{1,0}) parameter(0)
  eight = s32[] constant(8)
  ROOT less = pred[] compare(%t#0, eight), direction=LT
}

"""  # noqa: E501
    lines = ["z = s32[] constant(0)", "zc = s32[] copy(z)", "x = bf16[32,32]{1,0} parameter(2)",
             "init = (s32[], bf16[32,32]{1,0}, bf16[32,32]{1,0}) tuple(zc, x, x)",
             "l = (s32[], bf16[32,32]{1,0}, bf16[32,32]{1,0}) while(init), condition=wide.windowed_cond, body=wide.windowed_body"]  # fmt: skip
    answer = ask(module(*lines, before=FUSIONS.replace("f32", "bf16") + body))
    assert [(loop["computation"], loop["trip_count"]) for loop in answer["loops"]] == [("wide.windowed_body", 4)]
    assert [one["class"] for one in answer["collectives"]] == ["async_compute"] * 2
    assert [one["executions_per_step"] for one in answer["collectives"]] == [4, 4]
    assert answer["wire_bytes_per_step"] == 2 * 4 * 2048  # 32*32 bf16 per permute


# --- loops, calls, branches ---------------------------------------------------------------------------------------


def loop_text(condition: str, step: str, init: str, attributes: str = "", extra: str = "") -> str:
    """A loop around one all-gather; element 0 is the counter, element 1 the payload, element 2 a bound."""
    body = f"""body {{
  t = (s32[], f32[64]{{0}}, s32[]) parameter(0)
  i = s32[] get-tuple-element(t), index=0
  x = f32[64]{{0}} get-tuple-element(t), index=1
  b = s32[] get-tuple-element(t), index=2
  g = f32[512]{{0}} all-gather(x), {ALL8}
{step}
  ROOT r = (s32[], f32[64]{{0}}, s32[]) tuple(n, x, b)
}}

cond {{
  t = (s32[], f32[64]{{0}}, s32[]) parameter(0)
  i = s32[] get-tuple-element(t), index=0
{condition}
}}

"""
    lines = [init, "nine = s32[] constant(9)", "t0 = (s32[], f32[64]{0}, s32[]) tuple(i0, p, nine)",
             f"l = (s32[], f32[64]{{0}}, s32[]) while(t0), condition=cond, body=body{attributes}"]  # fmt: skip
    return module(*lines, before=extra + body)


STEP_ONE = "  one = s32[] constant(1)\n  n = s32[] add(i, one)"
FROM_ZERO = "i0 = s32[] constant(0)"
UP_TO_7 = "  c = s32[] constant(7)\n  ROOT q = pred[] compare(i, c), direction=LT"
WRAPPED = "step_comp {\n  a = s32[] parameter(0)\n  k = s32[] constant(3)\n  ROOT s = s32[] add(k, a)\n}\n\n"
COMPARED = "cmp_comp {\n  a = s32[] parameter(0)\n  b = s32[] parameter(1)\n  ROOT s = pred[] compare(a, b), direction=GT\n}\n\n"
TRIPS = {
    # name: (condition, step, init, attributes, computations before, trips)
    "known_trip_count": (UP_TO_7, "  n = s32[] negate(i)", FROM_ZERO, ', backend_config={"known_trip_count":{"n":"12"}}', "", 12),
    "known_trip_count in a quoted configuration": (
        UP_TO_7, "  n = s32[] negate(i)", FROM_ZERO, r', backend_config="{\"known_trip_count\":{\"n\":\"12\"}}"', "", 12
    ),
    "compare, step, init": (UP_TO_7, STEP_ONE, FROM_ZERO, "", "", 7),
    "init is not zero": (UP_TO_7, STEP_ONE, "i0 = s32[] constant(2)", "", "", 5),
    "step does not divide": (UP_TO_7, "  k = s32[] constant(3)\n  n = s32[] add(k, i)", FROM_ZERO, "", "", 3),
    "less or equal": (UP_TO_7.replace("LT", "LE"), STEP_ONE, FROM_ZERO, "", "", 8),
    "counting down": (
        "  c = s32[] constant(0)\n  ROOT q = pred[] compare(i, c), direction=GT",
        "  k = s32[] constant(2)\n  n = s32[] subtract(i, k)", "i0 = s32[] constant(9)", "", "", 5,
    ),
    "bound on the left": ("  c = s32[] constant(7)\n  ROOT q = pred[] compare(c, i), direction=GT", STEP_ONE, FROM_ZERO, "", "", 7),
    "not equal": (UP_TO_7.replace("LT", "NE"), STEP_ONE, FROM_ZERO, "", "", 7),
    "bound carried round": ("  b = s32[] get-tuple-element(t), index=2\n  ROOT q = pred[] compare(i, b), direction=LT", STEP_ONE, FROM_ZERO, "", "", 9),
    "step in a fusion": (UP_TO_7, "  n = s32[] fusion(i), kind=kLoop, calls=step_comp", FROM_ZERO, "", WRAPPED, 3),
    "comparison in a fusion": (
        "  c = s32[] constant(7)\n  ROOT q = pred[] fusion(c, i), kind=kLoop, calls=cmp_comp", STEP_ONE, FROM_ZERO, "", COMPARED, 7
    ),
    "through copies": (
        "  ic = s32[] copy(i)\n" + UP_TO_7.replace("(i,", "(ic,"), "  ic = s32[] copy(i)\n" + STEP_ONE.replace("(i,", "(ic,"),
        "z = s32[] constant(0)\n  i0 = s32[] copy(z)", "", "", 7,
    ),
    "never runs": (UP_TO_7, STEP_ONE, "i0 = s32[] constant(7)", "", "", 0),
    "until something happens": ("  ROOT q = pred[] custom-call(i), custom_call_target=\"mine\"", STEP_ONE, FROM_ZERO, "", "", None),
    "the step is data": (UP_TO_7, "  n = s32[] add(i, b)", FROM_ZERO, "", "", None),
    "the init is data": (UP_TO_7, STEP_ONE, "i0 = s32[] parameter(2)", "", "", None),
    "it never ends": (UP_TO_7, "  k = s32[] constant(0)\n  n = s32[] add(i, k)", FROM_ZERO, "", "", None),
}  # fmt: skip


@pytest.mark.parametrize("name", TRIPS)
def test_trip_counts(ask, name):
    *parts, trips = TRIPS[name]
    answer = ask(loop_text(*parts))
    assert [(loop["computation"], loop["trip_count"]) for loop in answer["loops"]] == [("body", trips)]
    found = only(answer)
    assert found["executions_per_step"] == trips
    assert answer["totals"][0]["static"] == 1
    assert answer["wire_bytes_per_step"] == (None if trips is None else 1792 * trips)


def test_unknown_trips_are_unknown_not_zero(ask, run):
    text = loop_text(*TRIPS["the init is data"][:-1])
    code, out, _ = run(text)
    assert code == 0 and " ? " in out and "--assume-trips" in out
    assert only(ask(text, "--assume-trips", "6"))["executions_per_step"] == 6


def test_trip_counts_multiply_documented_mistake_b(ask):
    """Documented mistake (b): two models that differ only in depth gave the same bytes."""
    sizes = []
    for depth in (16, 61):
        condition = UP_TO_7.replace("constant(7)", f"constant({depth})")
        sizes.append(ask(loop_text(condition, STEP_ONE, FROM_ZERO))["wire_bytes_per_step"])
    assert sizes == [16 * 1792, 61 * 1792]


def test_nested_loops_and_calls(ask):
    inner = loop_text(UP_TO_7, STEP_ONE, FROM_ZERO)
    inner = (
        inner.removeprefix(HEADER)
        .replace("ENTRY main {", "mid {")
        .replace("ROOT out = f32[64]{0} negate(p)", "ROOT out = f32[64]{0} copy(p)")
    )
    lines = ["c1 = f32[64]{0} call(p, w), to_apply=mid", "c2 = f32[64]{0} call(c1, w), to_apply=mid"]
    answer = ask(module(*lines, before=inner + "\n"))
    assert only(answer)["executions_per_step"] == 14  # twice called, seven trips each
    assert answer["wire_bytes_per_step"] == 14 * 1792


CONDITIONAL = (
    "left {{\n  a = f32[64]{{0}} parameter(0)\n  g = f32[512]{{0}} all-gather(a), {0}\n  ROOT r = f32[64]{{0}} negate(a)\n}}\n\n"
    "right {{\n  a = f32[64]{{0}} parameter(0)\n{1}  ROOT r = f32[64]{{0}} negate(a)\n}}\n\n"
)


def test_conditionals_are_a_range(ask, run):
    """Branch 1 gathers once, branch 2 twice or never: 1-2 times, or 0-1."""
    twice = "".join(f"  g{n} = f32[512]{{0}} all-gather(a), {ALL8}\n" for n in (1, 2))
    lines = ["q = s32[] constant(0)", "b = f32[64]{0} conditional(q, p, p), branch_computations={%left, %right}"]
    for other, low, high in ((twice, 1, 2), ("", 0, 1)):
        text = module(*lines, before=CONDITIONAL.format(ALL8, other))
        answer = ask(text)
        row = answer["totals"][0]
        assert (row["per_step_min"], row["per_step"]) == (low, high)
        assert (answer["wire_bytes_per_step_min"], answer["wire_bytes_per_step"]) == (low * 1792, high * 1792)
        assert {one["executions_per_step_min"] for one in answer["collectives"]} == {0}
        assert f"{low}-{high}" in run(text)[1]


def test_async_computations_are_not_counted_twice(ask):
    lines = [
        '%g.call-start = ((f32[64]{0}), f32[512]{0}, u32[]) async-start(%p), async_execution_thread="sparsecore", calls=%called',
        "%g.call-update = ((f32[64]{0}), f32[512]{0}, u32[]) async-update(%g.call-start), calls=%called",
        "%g.call-done = f32[512]{0} async-done(%g.call-update), calls=%called",
    ]
    answer = ask(module(*lines, before=SPARSE))
    assert answer["totals"][0]["static"] == 1 and answer["wire_bytes_per_step"] == 1792


# --- send and recv, also round a loop -----------------------------------------------------------------------------


def test_send_and_recv(ask):
    lines = [
        "a = token[] after-all()",
        "recv = (f32[64]{0}, u32[], token[]) recv(a), channel_id=2, frontend_attributes={_xla_send_recv_source_target_pairs={{0,1}}}",
        "send = (f32[64]{0}, u32[], token[]) send(p, a), channel_id=2",
        MATMUL,
        "recv-done = (f32[64]{0}, token[]) recv-done(recv), channel_id=2",
        "send-done = token[] send-done(send), channel_id=2",
    ]
    answer = ask(module(*lines))
    rows = {one["kind"]: one for one in answer["collectives"]}
    assert rows["recv"]["wire_bytes"] == 256 and rows["send"]["wire_bytes"] == 0  # counted once, at the recv
    assert rows["recv"]["class"] == rows["send"]["class"] == "async_compute"
    host = ask(module("a = token[] after-all()", "s = (f32[64]{0}, u32[], token[]) send(p, a), channel_id=2, is_host_transfer=true",
                      "d = token[] send-done(s), channel_id=2, is_host_transfer=true"))  # fmt: skip
    assert host["collectives"] == []


def carried_loop(work: str) -> str:
    """A loop whose trip waits for the recv of the trip before: done first, start last, `work` in front of the done."""
    body = f"""body {{
  t = (s32[], (f32[64]{{0}}, u32[], token[])) parameter(0)
  i = s32[] get-tuple-element(t), index=0
  old = (f32[64]{{0}}, u32[], token[]) get-tuple-element(t), index=1
  y = f32[32,32]{{1,0}} custom-call(), custom_call_target="AllocateBuffer"
{work}
  done = (f32[64]{{0}}, token[]) recv-done(old), channel_id=2
  one = s32[] constant(1)
  n = s32[] add(i, one)
  a = token[] after-all()
  new = (f32[64]{{0}}, u32[], token[]) recv(a), channel_id=2
  ROOT r = (s32[], (f32[64]{{0}}, u32[], token[])) tuple(n, new)
}}

cond {{
  t = (s32[], (f32[64]{{0}}, u32[], token[])) parameter(0)
  i = s32[] get-tuple-element(t), index=0
  c = s32[] constant(7)
  ROOT q = pred[] compare(i, c), direction=LT
}}

"""
    lines = ["z = s32[] constant(0)", "a0 = token[] after-all()", "first = (f32[64]{0}, u32[], token[]) recv(a0), channel_id=2",
             "t0 = (s32[], (f32[64]{0}, u32[], token[])) tuple(z, first)",
             "l = (s32[], (f32[64]{0}, u32[], token[])) while(t0), condition=cond, body=body",
             "last = (f32[64]{0}, u32[], token[]) get-tuple-element(l), index=1",
             "end = (f32[64]{0}, token[]) recv-done(last), channel_id=2"]  # fmt: skip
    return module(*lines, before=body)


def test_a_start_carried_round_the_loop(ask):
    work = MATMUL.replace("w", "y")
    rows = {one["name"]: one for one in ask(carried_loop(work))["collectives"]}
    assert rows["new"]["class"] == "async_compute"  # its window wraps: end of one trip, begin of the next
    assert rows["new"]["between"]["opcodes"] == {"custom-call": 1, "dot": 1}
    assert rows["first"]["class"] == "async_compute"  # from before the loop into its first trip
    assert (rows["new"]["executions_per_step"], rows["first"]["executions_per_step"]) == (7, 1)
    rows = {one["name"]: one for one in ask(carried_loop(""))["collectives"]}
    assert rows["new"]["class"] == "async_empty" and rows["first"]["class"] == "async_empty"


# --- calls that may communicate -----------------------------------------------------------------------------------

TALKING = {
    "a kernel with communication": ('custom_call_target="tpu_custom_call", backend_config={"custom_call_config":{"body":"", "has_communication": true}}', True),
    "a kernel without": ('custom_call_target="tpu_custom_call", backend_config={"custom_call_config":{"body":""}}', False),
    "a kernel whose configuration was cut": ('custom_call_target="tpu_custom_call"', True),
    "an unknown target": ('custom_call_target="my_ring_allreduce"', True),
    "a target named like a collective": ('custom_call_target="all-reduce"', True),
    "cublas": ('custom_call_target="__cublas$gemm"', False),
    "nothing at run time": ('custom_call_target="AllocateBuffer"', False),
}  # fmt: skip


@pytest.mark.parametrize("name", TALKING)
def test_custom_calls_that_may_communicate(ask, run, name):
    attributes, talks = TALKING[name]
    text = module(f"k = f32[64]{{0}} custom-call(p), {attributes}")
    hidden = ask(text)["hidden"]
    assert len(hidden) == talks
    _, out, _ = run(text)
    assert ("no collective in this module" in out) != talks  # then nobody says none
    if talks:
        assert hidden[0]["line"] == 6 and "1 custom calls may communicate" in out
        code, _, err = run(text, "--gate", "sync=0")
        assert code == 0 and "may communicate" in err


# --- mesh axes ----------------------------------------------------------------------------------------------------


def test_groups_without_names_take_them_from_the_mesh(ask):
    mesh = "mesh['data'=1,'fsdp'=4,'expert'=2]"
    groups = {
        "a": f"{mesh} {{'expert'}}",
        "b": "{{0,2,4,6},{1,3,5,7}}",  # over fsdp: stride 2
        "c": "[2,4]<=[4,2]T(1,0)",  # the same
        "d": "mesh['axis_0'=8] {'axis_0'}",  # everybody
        "e": "[4,2]<=[8]",  # neighbours: expert
        "f": "{{0,3},{1,2},{4,7},{5,6}}",  # no axis
    }
    lines = [
        f"{name} = f32[64]{{0}} all-gather(p), channel_id=1, replica_groups={value}" for name, value in groups.items()
    ]
    axes = {one["name"]: one["axes"] for one in ask(module(*lines))["collectives"]}
    assert axes == {"a": ["expert"], "b": ["fsdp"], "c": ["fsdp"], "d": ["fsdp", "expert"], "e": ["expert"], "f": []}


# --- refusals -----------------------------------------------------------------------------------------------------

GOOD = module(*AG_PAIR)
BAD = {
    "not scheduled": (GOOD.replace(", is_scheduled=true", ""), [], "module m is not scheduled"),
    "no header": (GOOD.removeprefix(HEADER), [], "no HloModule line says is_scheduled=true"),
    "not HLO": ("hello\nworld = 3\n", [], "holds no HLO computation"),
    "empty": ("", [], "holds no HLO computation"),
    "a header alone": (HEADER, [], "holds no HLO computation"),
    "a circle": (
        module("c = f32[64]{0} call(p), to_apply=again", before="again {\n  a = f32[64]{0} parameter(0)\n  ROOT c = f32[64]{0} call(a), to_apply=again\n}\n\n"),
        [],
        "calls itself",
    ),
    "an instruction nobody can read": (GOOD.replace("all-gather-start(p)", "all-gather-start p"), [], "cannot read this instruction"),
    "a gate on what is unknown": (
        loop_text(*TRIPS["the init is data"][:-1]), ["--gate", "exposed-bytes=1GB"], "cannot decide exposed-bytes=1GB"
    ),
    "a share of what is unknown": (loop_text(*TRIPS["the init is data"][:-1]), ["--gate", "share=0.5"], "cannot decide share=0.5"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_refused_in_one_line(run, name):
    text, options, message = BAD[name]
    code, out, err = run(text, *options)
    assert code == 2 and message in err and err.count("\n") == 1 and err.startswith("hlo_overlap: ")
    assert out == "" or options  # a gate is judged behind the report


@pytest.mark.parametrize(
    "argv, message",
    [
        (["missing.txt"], "missing.txt: cannot read"),
        (["."], "cannot read"),
        (["module.txt", "--trace", "no/where/out.json"], "cannot write"),
        (["module.txt", "--diff", "missing.txt"], "missing.txt: cannot read"),
        (["module.txt", "--diff", "two.txt"], "two.txt: holds 2 modules"),
        (["module.txt", "--diff", "cut.txt"], "cut.txt: is truncated"),
        (["bytes.txt"], "bytes.txt:1: not UTF-8"),
        (["cut.gz"], "cut.gz: cannot decompress"),
        (["bad.gz"], "bad.gz: cannot decompress"),
    ],
)
def test_bad_files(run, tmp_path, argv, message):
    (tmp_path / "module.txt").write_text(GOOD)
    (tmp_path / "two.txt").write_text(GOOD + "\n" + GOOD)
    (tmp_path / "cut.txt").write_text(GOOD.replace("ENTRY ", ""))
    (tmp_path / "bytes.txt").write_bytes(b"HloModule \xff\n")
    (tmp_path / "cut.gz").write_bytes(gzip.compress(GOOD.encode())[:-9])
    (tmp_path / "bad.gz").write_bytes(b"\x1f\x8b" + b"HloModule" * 9)
    code, _, err = run(None, *argv)
    assert code == 2 and message in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "argv",
    [
        ["--no-such-option", "x"],
        [],
        ["x", "--gate", "exposed=3"],
        ["x", "--gate", "share=150%"],
        ["x", "--gate", "sync=2MB"],
        ["x", "--gate", "share=5GB"],
        ["x", "--top", "-1"],
        ["x", "--trace", "-"],
        ["x", "y", "--diff", "z"],
        ["x", "--diff", "y", "--trace", "t"],
        ["x", "--diff", "y", "--gate", "sync=1"],
        ["x", "--unscheduled", "--gate", "sync=1"],
        ["-", "--diff", "-"],
        ["x", "--format", "yaml"],
    ],
)
def test_bad_options(capsys, argv):
    with pytest.raises(SystemExit) as caught:
        hlo_overlap.main(argv)
    out, err = capsys.readouterr()
    assert caught.value.code == 2 and out == "" and "hlo_overlap: error:" in err


def test_unscheduled_gives_counts_without_overlap(run, ask):
    lines = [
        f"g = f32[512]{{0}} all-gather(p), {ALL8}, dimensions={{0}}",
        'u = f32[512]{0} custom-call(p), custom_call_target="all-gather-start", frontend_attributes={async_collective_config="{}"}',
        'v = f32[512]{0} custom-call(u), custom_call_target="all-gather-done"',
    ]
    text = module(*lines).replace(", is_scheduled=true", "")
    answer = ask(text, "--unscheduled")
    assert [(one["kind"], one["class"]) for one in answer["collectives"]] == [("all-gather", None)] * 2
    assert answer["scheduled"] is False and answer["hidden"] == []
    assert answer["totals"][0]["static"] == 2
    assert "NOT SCHEDULED" in run(text, "--unscheduled")[1]


TRUNCATED = {
    "the entry is gone": (GOOD.replace("ENTRY main", "main"), 1),
    "cut in the middle": (GOOD[: GOOD.index("  ROOT")], 1),
    "cut inside a line": (GOOD[: GOOD.index("all-gather-done") + 5], 1),
    "cut inside a signature behind the entry": (GOOD + "\n%add (a: f32[], b: f3", 1),
    "cut inside a signature of two lines": (GOOD + "\n%add (a: f32[],\n  b: f32[],", 1),
    "the body of a loop is gone": (
        module(*AG_PAIR, *LOOP, "l = (s32[], f32[32,32]{1,0}) while(init), condition=cond, body=lost", before=FUSIONS),
        1,
    ),
    "a branch is gone": (
        module(
            *AG_PAIR,
            "q = s32[] constant(0)",
            "b = f32[32,32]{1,0} conditional(q, w, w), branch_computations={yes, lost}",
            before=FUSIONS,
        ),
        1,
    ),
}


@pytest.mark.parametrize("name", TRUNCATED)
def test_truncated_is_said_and_refused_unless_partial(run, name):
    text, count = TRUNCATED[name]
    code, out, err = run(text)
    assert code == 2 and "truncated" in out and "truncated" in err and err.count("\n") == 1
    code, out, err = run(text, "--partial", "--json")
    assert code == 0 and err == ""
    answer = json.loads(out)["modules"][0]
    assert answer["truncated"] is True and len(answer["collectives"]) == count


def test_truncated_reduce_scatter_fusion_is_still_one(run):
    """The caller of the fusion is cut off; its computation ends in the dynamic-slice of an all-reduce."""
    code, out, _ = run(HEADER + ADD + SCATTER, "--partial", "--json")
    assert code == 0
    found = json.loads(out)["modules"][0]["collectives"][0]
    assert (found["kind"], found["wire_bytes"]) == ("reduce-scatter", 24576)
    assert found["executions_per_step"] is None


# --- printing -----------------------------------------------------------------------------------------------------


def test_golden_report(run):
    text = module(
        AG_PAIR[0],
        MATMUL,
        AG_PAIR[1],
        f'r = f32[1000000]{{0}} all-reduce(p), {ALL8}, to_apply=add, metadata={{op_name="jit(step)/loss/psum"}}',
        before=ADD,
    )
    code, out, err = run(text)
    assert (code, err) == (0, "")
    assert (
        out
        == """\
module.txt: m
scheduled; 2 computations, 10 instructions

kind        class           static  per step  wire/step    share  exposed
all-gather  async: compute       1         1    1.79 kB    0.0 %      0 %
all-reduce  sync                 1         1       7 MB  100.0 %  100.0 %
total                            2         2       7 MB    100 %  100.0 %

computation  windows  instructions inside  matmuls inside
main               1               1 of 5          1 of 1

worst exposed, 1 of 1:
  7 MB  all-reduce  sync  1 x 7 MB
    line 15 of main: r
    jit(step)/loss/psum
"""
    )


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_text_keeps_to_80_columns_and_agrees_with_json(run, path):
    text = text_of(path)
    _, shown, _ = run(text, "--top", "100")
    assert max(map(len, shown.splitlines())) <= 80
    _, out, _ = run(text, "--json")
    answer = json.loads(out)["modules"][0]
    table = shown.split("\n\n")[1].splitlines()[1:]
    assert len(table) == len(answer["totals"]) + 1
    for line, row in zip(table, answer["totals"], strict=False):
        assert line.startswith(row["kind"])
        assert str(row["static"]) in line.split() and show_bytes(row["wire_bytes_per_step"]) in line
    assert sum(row["wire_bytes_per_step"] for row in answer["totals"]) == answer["wire_bytes_per_step"]
    assert sum(row["static"] for row in answer["totals"]) == len(answer["collectives"])
    assert sum(axes["wire_bytes_per_step"] for axes in answer["axes"]) == answer["wire_bytes_per_step"]
    exposed = sum(row["wire_bytes_per_step"] for row in answer["totals"] if row["exposed"])
    assert exposed == answer["exposed_bytes_per_step"]
    _, wide, _ = run(text, "--wide", "--top", "100")
    cut, whole = shown.splitlines(), wide.splitlines()
    assert len(cut) == len(whole)
    assert all(a == b or len(b) > 80 or ".." in a or "  " in a for a, b in zip(cut, whole, strict=True))


def test_markdown(run):
    code, out, _ = run(GOOD, "--format", "markdown")
    assert code == 0
    assert out.startswith("### module.txt: m\n")
    assert "| kind | class | static | per step | wire/step | share | exposed |\n| --- | --- | ---: |" in out
    assert "| all-gather | async: nothing | 1 | 1 | 1.79 kB | 100 % | 100 % |" in out


def test_top_limits_the_list(run):
    text = module(*(f"g{n} = f32[512]{{0}} all-gather(p), {ALL8}" for n in range(7)))
    assert "worst exposed, 5 of 7" in run(text)[1]
    assert "worst exposed, 2 of 7" in run(text, "--top", "2")[1]
    assert "worst exposed" not in run(text, "--top", "0")[1]


def test_the_line_of_a_window(run):
    fusion = "f{} = f32[32,32]{{1,0}} fusion(w), kind=kOutput, calls=fused_matmul"
    lines = [AG_PAIR[0], f"s2 = (f32[64]{{0}}, f32[512]{{0}}) all-gather-start(p), {ALL8}", *(fusion.format(f".{n}") for n in range(3)),
             "n = f32[64]{0} negate(p)", "d2 = f32[512]{0} all-gather-done(s2)", AG_PAIR[1]]  # fmt: skip
    _, out, _ = run(module(*lines, before=FUSIONS), "--json")
    found = {one["name"]: one["between"]["line"] for one in json.loads(out)["modules"][0]["collectives"]}
    assert found == {"s": "S:ag S:ag mm:f x3 negate D:ag D:ag", "s2": "S:ag mm:f x3 negate D:ag"}


def test_union_of_windows_counts_once(ask):
    """Two windows over the same dot, one of them longer: the union holds it once."""
    lines = [AG_PAIR[0], f"s2 = (f32[64]{{0}}, f32[512]{{0}}) all-gather-start(p), {ALL8}", MATMUL, "d2 = f32[512]{0} all-gather-done(s2)",
             MATMUL.replace("m =", "m2 ="), AG_PAIR[1], MATMUL.replace("m =", "m3 =")]  # fmt: skip
    (union,) = ask(module(*lines))["windows"]
    assert (union["windows"], union["matmuls_inside"], union["matmuls"]) == (2, 2, 3)
    assert union["instructions_inside"] == 4  # s2, dot, d2, dot


def test_same_input_same_bytes_and_stdin(run, monkeypatch, capsys):
    text = text_of(MODULES[0])
    first = run(text, "--json")[1]
    assert run(text, "--json")[1] == first
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert hlo_overlap.main(["-", "--json"]) == 0
    assert capsys.readouterr().out.replace("<stdin>", "module.txt") == first


def test_gzipped_text_is_the_same_text(run, tmp_path):
    (tmp_path / "module.txt.gz").write_bytes(gzip.compress(GOOD.encode()))
    code, out, err = run(None, "module.txt.gz", "--json")
    assert (code, err) == (0, "")
    assert out.replace("module.txt.gz", "module.txt") == run(GOOD, "--json")[1]


def test_wide_does_not_cut(run):
    name = "jit(step)/" + "/".join(f"layer_{n}" for n in range(20))
    text = module(f'g = f32[512]{{0}} all-gather(p), {ALL8}, metadata={{op_name="{name}"}}')
    assert name not in run(text)[1] and ".." in run(text)[1]
    assert name in run(text, "--wide")[1]


def test_several_files_and_modules(run, tmp_path):
    (tmp_path / "two.txt").write_text(GOOD + "\n" + GOOD.replace("HloModule m", "HloModule second"))
    code, out, _ = run(GOOD, "two.txt", "--json")
    assert code == 0
    assert [(one["file"], one["name"]) for one in json.loads(out)["modules"]] == [
        ("module.txt", "m"), ("two.txt", "m"), ("two.txt", "second")
    ]  # fmt: skip


def test_trace(run, tmp_path):
    code, _, _ = run(module(AG_PAIR[0], MATMUL, AG_PAIR[1]), "--trace", "out.json")
    assert code == 0
    trace = json.loads((tmp_path / "out.json").read_text())
    assert "position in the printed schedule" in trace["otherData"]["unit"]
    events = trace["traceEvents"]
    names = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names == {"main (1 per step)", "compute", "async"}
    slices = [(event["tid"], event["name"], event["ts"], event["dur"]) for event in events if event["ph"] == "X"]
    # positions: p 0, w 1, s 2, m 3, d 4, out 5
    assert slices == [
        (0, "s", 2, 1),
        (0, "m", 3, 1),
        (0, "d", 4, 1),
        (0, "out", 5, 1),
        (1, "all-gather async: compute", 2, 2),
    ]
    assert [(event["ph"], event["ts"]) for event in events if event["ph"] in "sf"] == [("s", 2), ("f", 4)]


def test_trace_of_a_real_module(run, tmp_path):
    code, _, _ = run(text_of(MODULES[1]), "--trace", "out.json")
    assert code == 0
    events = json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    tracks = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"compute", "sparsecore", "sparsecore (2)"} <= tracks
    assert sum(event["ph"] == "s" for event in events) == sum(event["ph"] == "f" for event in events) == 10
    busy = {}  # no two windows of a track overlap
    for event in sorted((e for e in events if e["ph"] == "X" and e["tid"]), key=lambda e: e["ts"]):
        key = (event["pid"], event["tid"])
        assert busy.get(key, 0) <= event["ts"]
        busy[key] = event["ts"] + event["dur"]


GATES = [
    # the module exposes 1792 B of 3584 B (one pair hidden behind a dot), one collective is sync
    ("exposed-bytes=1792", 0), ("exposed-bytes=1791", 1), ("exposed-bytes=1.79kB", 1), ("exposed-bytes=2KiB", 0),
    ("share=50%", 0), ("share=0.49", 1), ("share=50", 0), ("share=49", 1), ("share=1", 0), ("share=49.9%", 1), ("sync=1", 0), ("sync=0", 1), ("exposed-bytes=1e9", 0),
]  # fmt: skip


@pytest.mark.parametrize("limit, expected", GATES)
def test_gates(run, limit, expected):
    text = module(AG_PAIR[0], MATMUL, AG_PAIR[1], f"g = f32[512]{{0}} all-gather(p), {ALL8}")
    code, out, err = run(text, "--gate", limit)
    assert code == expected and out.startswith("module.txt: m")
    assert (limit in err) == bool(expected)
    assert run(text, "--gate", limit, "--gate", "sync=99")[0] == expected


def test_a_gate_over_what_is_known_needs_no_more(run):
    text = loop_text(*TRIPS["the init is data"][:-1])
    text = text.replace("  ROOT out", f"  g = f32[512]{{0}} all-gather(p), {ALL8}\n  ROOT out")
    assert run(text, "--gate", "exposed-bytes=1000")[0] == 1
    assert run(text, "--gate", "exposed-bytes=2000", "--assume-trips", "3")[0] == 1
    assert run(text, "--gate", "exposed-bytes=9000", "--assume-trips", "3")[0] == 0


# --- comparing ----------------------------------------------------------------------------------------------------


def renamed(text: str) -> str:
    """The same program under other names, ids, channels and source lines."""
    names = {name: f"n{place}.{place * 7}" for place, name in enumerate(sorted(set(re.findall(r"%([\w.\-]+)", text))))}
    text = re.sub(r"%([\w.\-]+)", lambda match: "%" + names[match[1]], text)
    text = re.sub(r"channel_id=(\d+)", lambda match: f"channel_id={int(match[1]) + 100}", text)
    text = re.sub(r", metadata=\{op_name=\"[^\"]*\"", ', metadata={op_name="elsewhere"', text)
    text = text.replace("\n", ', frontend_attributes={fingerprint_before_lhs="b305"}\n', 1)  # the last of the header
    return text.replace("HloModule jit_step", "HloModule jit_other")


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_diff_says_same_program(run, tmp_path, path):
    text = text_of(path)
    (tmp_path / "other.txt").write_text(renamed(text))
    code, out, err = run(text, "--diff", "other.txt")
    assert (code, err) == (0, "") and "same program" in out and "the same loops" in out


CHANGES = {
    "another shape": ("f32[512]{0}", "f32[520]{0}"),
    "another group": ("{{0,1,2,3,4,5,6,7}}", "{{0,1,2,3},{4,5,6,7}}"),
    "another order": ("  m = f32[32,32]{1,0} dot(w, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n  d = f32[512]{0} all-gather-done(s)",
                      "  d = f32[512]{0} all-gather-done(s)\n  m = f32[32,32]{1,0} dot(w, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}"),
    "another operand": ("negate(p)", "negate(d)"),
    "another opcode": ("negate(p)", "cosine(p)"),
    "another layout": ("m = f32[32,32]{1,0}", "m = f32[32,32]{0,1}"),
    "another constant": ("constant(5)", "constant(6)"),
    "another partition count": ("num_partitions=8", "num_partitions=16"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_diff_says_different(run, tmp_path, name):
    text = module(AG_PAIR[0], MATMUL, AG_PAIR[1], "k = s32[] constant(5)")
    before, after = CHANGES[name]
    assert before in text
    (tmp_path / "other.txt").write_text(text.replace(before, after))
    code, out, _ = run(text, "--diff", "other.txt")
    assert code == 1 and "different programs" in out


def test_diff_side_by_side(run, tmp_path):
    left = loop_text(UP_TO_7, STEP_ONE, FROM_ZERO)
    (tmp_path / "other.txt").write_text(loop_text(UP_TO_7.replace("7", "9"), STEP_ONE, FROM_ZERO))
    code, out, _ = run(left, "--diff", "other.txt", "--json")
    found = json.loads(out)
    assert code == 1 and found["schema"] == "hlo-overlap-diff/1" and found["same_program"] is False
    assert (
        found["same_whiles"] is False and found["left"]["trip_counts"] == [7] and found["right"]["trip_counts"] == [9]
    )
    (row,) = found["rows"]
    assert (row["left"]["wire_bytes_per_step"], row["right"]["wire_bytes_per_step"]) == (7 * 1792, 9 * 1792)
    _, out, _ = run(left, "--diff", "other.txt")
    assert "different loops" in out and "1/7" in out and "1/9" in out
    assert "| all-gather | sync | 1/7 | 1/9 |" in run(left, "--diff", "other.txt", "--format", "markdown")[1]


# --- real modules -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_real_module_agrees_with_the_second_route(ask, path):
    expected = json.loads(
        (path.parent / path.name.replace(".txt.gz", ".txt").replace(".txt", ".expected.json")).read_text()
    )
    answer = ask(text_of(path))
    for key in ("computations", "instructions"):
        assert answer[key] == expected[key]
    assert sorted((loop["computation"], loop["trip_count"]) for loop in answer["loops"]) == sorted(
        (loop["computation"], loop["trip_count"]) for loop in expected["loops"]
    )
    found = {one["line"]: one for one in answer["collectives"]}
    assert sorted(found) == [one["line"] for one in expected["collectives"]]
    for one in expected["collectives"]:
        mine = found[one["line"]]
        for key in (
            "computation",
            "name",
            "kind",
            "class",
            "group_size",
            "output_bytes",
            "wire_bytes",
            "executions_per_step",
        ):
            assert mine[key] == one[key], (one["name"], key)
        if one["between"]:
            assert {key: mine["between"][key] for key in one["between"]} == one["between"], one["name"]
        else:
            assert one["class"] == "sync" and mine["between"]["instructions"] == 0 and mine["between"]["opcodes"] == {}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_every_line_number(path):
    lines = text_of(path).split("\n")
    (read,) = hlo_text.read_modules("\n".join(lines), "x")
    count = 0
    for computation in read.computations:
        for at, name in enumerate(computation.names):
            line = lines[computation.line_of(at) - 1].lstrip()
            assert line.removeprefix("ROOT ").startswith(f"%{name} = ")
            count += 1
    assert count > 400


def test_dense_example_by_hand(ask):
    """4 layers, 2048 x 4096 in bf16 over 8 devices: a gathered matrix is 16,777,216 B, 7/8 of it crosses."""
    answer = ask(text_of(MODULES[0]))
    matrix = 2048 * 4096 * 2
    per_kind = {}
    for one in answer["collectives"]:
        per_kind.setdefault(one["kind"], []).append((one["wire_bytes"], one["executions_per_step"]))
    # forward gathers 2 matrices per layer, backward gathers both again and scatters 2 gradients; 1 loss
    assert per_kind["all-gather"] == [(matrix * 7 // 8, 4)] * 4
    assert per_kind["reduce-scatter"] == [(matrix // 8 * 7, 4)] * 2
    assert per_kind["all-reduce"] == [(4 * 2 * 7 // 8, 1)]
    assert answer["wire_bytes_per_step"] == 6 * 4 * matrix * 7 // 8 + 7


CPU_PROGRAM = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("fsdp", "tp"))
def layer(x, w):
    return jnp.tanh(x @ w), None
def nested(x, w):
    y, _ = jax.lax.scan(layer, x, w)
    return y, None
def loss(w, x):
    y, _ = jax.lax.scan(nested, x, w)
    return jnp.sum(y)
put = lambda *axes: NamedSharding(mesh, P(*axes))
w = jax.ShapeDtypeStruct((3, 5, 64, 64), jnp.float32, sharding=put(None, None, "fsdp", "tp"))
x = jax.ShapeDtypeStruct((16, 64), jnp.float32, sharding=put("fsdp", None))
compiled = jax.jit(jax.grad(loss), out_shardings=put(None, None, "fsdp", "tp")).lower(w, x).compile()
(module,) = compiled.runtime_executable().hlo_modules()
listed = {c.name: [[i.name, i.opcode.name[1:].lower()] for i in c.instructions()] for c in module.computations()}
schedule = module.schedule()
order = {c.name: [i.name for i in schedule.sequence(c)] for c in module.make_nonfusion_computations()}
json.dump({"text": compiled.as_text(), "listed": listed, "order": order}, sys.stdout)
"""


@pytest.fixture(scope="module")
def cpu_program():
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    pytest.importorskip("jax")
    done = subprocess.run(
        [sys.executable, "-c", CPU_PROGRAM], env=environment, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def test_cpu_module_lists_what_jaxlib_lists(cpu_program):
    """Names, opcodes and order of every computation equal those of jaxlib's own objects."""
    (read,) = hlo_text.read_modules(cpu_program["text"], "cpu")
    assert read.scheduled and not read.truncated
    mine = {
        computation.name: [
            [name, opcode.replace("-", "")] for name, opcode in zip(computation.names, computation.opcodes, strict=True)
        ]
        for computation in read.computations
    }
    assert len(mine) > 10
    assert {name: sorted(listed) for name, listed in mine.items()} == {
        name: sorted(listed) for name, listed in cpu_program["listed"].items()
    }
    assert len(cpu_program["order"]) >= 9  # entry, bodies and conditions of four loops
    for name, names in cpu_program["order"].items():
        assert [own for own, _ in mine[name]] == names


def test_cpu_module_with_nested_scans(ask, cpu_program):
    answer = ask(cpu_program["text"])
    # scans of 3 around 5, forward and backward
    assert sorted(loop["trip_count"] for loop in answer["loops"]) == [3, 3, 5, 5]
    assert answer["collectives"] and {one["class"] for one in answer["collectives"]} == {"sync"}
    assert {one["executions_per_step"] for one in answer["collectives"]} <= {1, 3, 5, 15}
    assert any(one["executions_per_step"] == 15 for one in answer["collectives"])
    assert {one["group_size"] for one in answer["collectives"] if one["kind"] != "collective-permute"} <= {2, 4, 8}


# --- properties ---------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    kind=st.sampled_from(["all-gather", "all-reduce", "reduce-scatter", "all-to-all"]),
    shards=st.integers(1, 64),
    group=st.integers(1, 512),
)
def test_ring_formulas(kind, shards, group):
    """By simulation of the ring: n-1 steps of one shard each; an all-reduce is a reduce-scatter and an all-gather."""
    shard = shards * 4
    whole = shard * group
    moved = sum(shard for _ in range(group - 1))
    output = {"all-gather": whole, "all-reduce": whole, "reduce-scatter": shard, "all-to-all": whole}[kind]
    assert wire_bytes(kind, output, group) == (2 * moved if kind == "all-reduce" else moved)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4), data=st.data())
def test_three_spellings_of_the_same_groups(sizes, data):
    """A mesh axis, the iota over it, and the list: the same members."""
    names = [f"ax{place}" for place in range(len(sizes))]
    chosen = data.draw(st.lists(st.sampled_from(range(len(sizes))), min_size=1, unique=True).map(sorted))
    mesh = "mesh[" + ",".join(f"'{name}'={size}" for name, size in zip(names, sizes, strict=True)) + "] {"
    mesh += ",".join(f"'{names[place]}'" for place in chosen) + "}"
    order = [place for place in range(len(sizes)) if place not in chosen] + chosen
    size = 1
    for place in chosen:
        size *= sizes[place]
    total = 1
    for one in sizes:
        total *= one
    iota = f"[{total // size},{size}]<=[{','.join(map(str, sizes))}]T({','.join(map(str, order))})"
    first, second = hlo_shapes.read_groups(mesh), hlo_shapes.read_groups(iota)
    assert first.members == second.members and first.size == second.size == size
    listed = "{" + ",".join("{" + ",".join(map(str, group)) + "}" for group in first.members) + "}"
    assert hlo_shapes.read_groups(listed).members == first.members


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(count=st.integers(0, 12), trips=st.integers(1, 9))
def test_bytes_add_up_over_the_loop(ask, count, trips):
    """Outside once, inside `trips` times: the sum does not depend on the order of the lines."""
    text = loop_text(UP_TO_7.replace("7", str(trips)), STEP_ONE, FROM_ZERO)
    extra = "".join(f"  x{n} = f32[512]{{0}} all-gather(p), {ALL8}\n" for n in range(count))
    assert ask(text.replace("  ROOT out", extra + "  ROOT out"))["wire_bytes_per_step"] == (trips + count) * 1792


# --- broken text --------------------------------------------------------------------------------------------------


def mutate(text: str, rng: random.Random) -> str:
    """Cut, shuffle or corrupt a module."""
    lines = text.split("\n")
    choice = rng.randrange(8)
    if choice == 0:
        return text[: rng.randrange(len(text))]
    if choice == 1:
        return text[rng.randrange(len(text)) :]
    if choice == 2:
        begin = rng.randrange(len(lines))
        part = lines[begin : begin + rng.randrange(2, 60)]
        rng.shuffle(part)
        return "\n".join(lines[:begin] + part + lines[begin + len(part) :])
    if choice == 3:
        return "\n".join(line for line in lines if rng.random() > 0.05)
    if choice == 4:
        for _ in range(rng.randrange(1, 40)):
            at = rng.randrange(len(lines))
            lines[at] = lines[at][: rng.randrange(len(lines[at]) + 1)]
        return "\n".join(lines)
    if choice == 5:
        for _ in range(rng.randrange(1, 60)):
            at = rng.randrange(len(text))
            text = text[:at] + rng.choice('(){}[]",=%#\\\n /*-019ax') + text[at + rng.randrange(3) :]
        return text
    if choice == 6:  # another instruction's name in some places: wrong operands, circles
        names = re.findall(r"%([\w.\-]+)", text) or ["x"]
        victim, other = rng.choice(names), rng.choice(names)
        return re.sub(rf"%{re.escape(victim)}\b", "%" + other, text)
    numbers = rng.choice(["0", "-1", "9" * 30, "9" * 5000, "²", ""])
    return re.sub(r"\d+", lambda match: numbers if rng.random() < 0.02 else match[0], text)


def check_broken(run, text: str) -> None:
    """An answer, or one line and exit 2; never a traceback (any other exception fails the test)."""
    for options in (["--partial", "--json"], ["--partial"]):
        code, out, err = run(text, *options)
        assert code in (0, 2)
        if code == 2:
            assert out == "" and err.count("\n") == 1, err
        elif "--json" in options:
            json.loads(out)


def fuzz(run, seeds: range) -> None:
    sources = [
        text_of(MODULES[0]),
        "".join(text for text, _ in GRAMMAR.values() if "\r" not in text),
        carried_loop(MATMUL),
    ]
    sources.append(module(*FUSED_LINES, before=FUSED_ASYNC + FUSIONS + ADD + SCATTER))
    sources.append(text_of(MODULES[1]))
    for seed in seeds:
        rng = random.Random(seed)
        text = sources[seed % len(sources)]
        for _ in range(rng.choice([1, 1, 2])):
            text = mutate(text, rng) or " "
        check_broken(run, text)


def test_fuzz(run):
    fuzz(run, range(100))


@pytest.mark.slow
def test_fuzz_long(run):
    fuzz(run, range(100, 6000))


@pytest.mark.parametrize(
    "part", ['"', "(", "{", "/*", '"\\"', "x = (f32[2],", "comp {", "a (b: (", "%a -> {", " = ", "}", "\\"]
)
def test_broken_lines_do_not_blow_up(run, part):
    """Thousands of one broken piece, on one line and on many."""
    for text in (part * 3000, (part + "\n") * 3000):
        check_broken(run, HEADER + "ENTRY e {\n  p = f32[2] parameter(0)\n" + text + "\n}\n")


def calls_made(text: str) -> int:
    """Python calls, also of built-in functions, while the tool answers: work that does not depend on the machine."""
    count = 0

    def tick(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    args = hlo_overlap.build_parser().parse_args(["x", "--partial", "--json"])
    sys.setprofile(tick)
    try:
        for found in hlo_text.read_modules(text, "x"):
            answer = hlo_overlap.answer("x", hlo_overlap.hlo_schedule.analyse(found, args.assume_trips))
            hlo_overlap.module_json(answer)
    finally:
        sys.setprofile(None)
    return count


def overlapping(size: int) -> str:
    starts = [f"s{n} = (f32[64]{{0}}, f32[512]{{0}}) all-gather-start(p), {ALL8}" for n in range(size)]
    dones = [f"d{n} = f32[512]{{0}} all-gather-done(s{n})" for n in range(size)]
    work = [f"n{n} = f32[64]{{0}} negate(p)" for n in range(size)]
    return module(*starts, *work, *dones)


def fusions(size: int) -> str:
    return module(*(f"f{n} = bf16[128,32]{{1,0}} fusion(p), kind=kCustom, calls=all-reduce-scatter.5" for n in range(size)),
                  before=ADD + SCATTER)  # fmt: skip


def chain(size: int) -> str:
    links = [f"u{n + 1} = ((f32[64]{{0}}), f32[512]{{0}}, u32[]) async-update(u{n})" for n in range(size)]
    return module("u0 = ((f32[64]{0}), f32[512]{0}, u32[]) async-start(p), calls=called", *links,
                  *(f"d{n} = f32[512]{{0}} async-done(u{n})" for n in range(size)), before=SPARSE)  # fmt: skip


def open_brackets(size: int) -> str:
    return module(
        *(f'c{n} = f32[64]{{0}} custom-call(p), custom_call_target="x", backend_config={{' for n in range(size))
    )


def continuations(size: int) -> str:
    return module("k = f32[64]{0} negate(p)", *("still the same line" for _ in range(size)))


@pytest.mark.parametrize(
    "make", [overlapping, fusions, chain, open_brackets, continuations], ids=lambda make: make.__name__
)
def test_time_is_linear(make):
    small, large = calls_made(make(160)), calls_made(make(640))
    assert large < 4 * small * 1.5  # quadratic would be 16


# --- the command --------------------------------------------------------------------------------------------------


def test_help_from_a_clean_process():
    done = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); import hlo_overlap; hlo_overlap.main(['--help'])"],
        capture_output=True, text=True, env={"PATH": os.environ["PATH"]}, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and done.stderr == ""
    for word in (
        "Exit status: 0",
        "Examples:",
        "--gate",
        "--unscheduled",
        "--partial",
        "--trace",
        "--diff",
        "--wide",
        "--top",
    ):
        assert word in done.stdout
