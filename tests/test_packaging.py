"""What is installed is what is here: modules, console scripts, pinned versions, import arrows."""

from __future__ import annotations

import ast
import functools
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MODULES = sorted(path.stem for path in ROOT.glob("*.py"))
LIGHT = ("render_bench", "diff_render", "diff_config", "hlo_overlap")  # run anywhere, start at once
HEAVY = {"jax", "maxtext", "tunix", "numpy", "flax", "optax", "tunix_standin", "bench_payload", "bench_runtime"}


@functools.lru_cache
def imports(module: str, everywhere: bool = True) -> set[str]:
    """Return the top names a module imports; only those at its top level unless `everywhere`."""
    tree = ast.parse((ROOT / f"{module}.py").read_text())
    for_types = {id(inner) for node in tree.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
                 for inner in ast.walk(node)}  # fmt: skip
    found = set()
    for node in ast.walk(tree) if everywhere else tree.body:
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    return found


@functools.lru_cache
def reached(module: str) -> set[str]:
    """Return every module of ours that importing `module` brings in."""
    todo, seen = [module], set()
    while todo:
        name = todo.pop()
        if name in MODULES and name not in seen:
            seen.add(name)
            todo += imports(name)
    return seen


def test_every_module_is_packaged():
    assert PROJECT["tool"]["setuptools"]["py-modules"] == MODULES


@pytest.mark.parametrize("script", sorted(PROJECT["project"]["scripts"]))
def test_console_scripts_have_a_main_here(script):
    module, function = PROJECT["project"]["scripts"][script].split(":")
    assert module == script.replace("-", "_") and module in MODULES
    tree = ast.parse((ROOT / f"{module}.py").read_text())
    assert function in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]


def test_the_light_tools_depend_on_pyyaml_alone():
    assert [re.split("[<>=]", name)[0] for name in PROJECT["project"]["dependencies"]] == ["pyyaml"]
    for tool in LIGHT:
        for module in reached(tool):
            foreign = imports(module) - set(MODULES) - set(sys.stdlib_module_names)
            assert foreign <= {"yaml"}, (tool, module, foreign)


def test_arrows_point_down():
    """No circles among the modules (design: who may import whom)."""
    for module in MODULES:
        for other in imports(module) & set(MODULES):
            assert other == module or module not in reached(other), f"{module} and {other} import each other"


@pytest.mark.parametrize("module", MODULES)
def test_nothing_at_import_but_definitions(module):
    allowed = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Assign,
               ast.AnnAssign, ast.If, ast.Expr, ast.AugAssign)  # fmt: skip
    for node in ast.parse((ROOT / f"{module}.py").read_text()).body:
        assert isinstance(node, allowed), f"{module}:{node.lineno}"
        if isinstance(node, ast.Expr):
            assert isinstance(node.value, ast.Constant), f"{module}:{node.lineno}: a call at import"


def test_constraints_pin_every_package_and_name_no_registry():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line]
    assert all(re.fullmatch(r"[a-z0-9._-]+==[0-9][\w.]*", line) for line in lines)
    pinned = {line.partition("==")[0] for line in lines}
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = {re.split(r"[\s<>=;\[]", name)[0] for group in extras.values() for name in group}
    assert wanted - pinned == {"rl-trainer-bench"}
