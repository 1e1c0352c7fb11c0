"""Allow lists: expected differences, each with its reason, for diff_render.py and diff_config.py.

A file is a YAML list of entries:

    - path: trainer/spec/failurePolicy/maxRestarts   # a path as the reports print it; globs below
      from: 3                                        # optional: only this value on the left
      to: 0                                          # optional: only this value on the right
      kind: changed                                  # optional: only this kind of difference
      optional: true                                 # optional: may match nothing without being stale
      reason: a bench that fails should be seen, not restarted

In `path`, `from` and `to` a `*` stands for any text within one step of a path, `**` for any text at all.
The reason is required. An entry that matches no difference is stale: the list no longer tells the truth,
and the tools fail. Standard library and PyYAML.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from bench_common import BenchError, read_text, shown_name

MAX_ALLOW_BYTES = 2**20
_FIELDS = ("path", "from", "to", "kind", "optional", "reason")


@dataclass(frozen=True)
class Allowance:
    """One expected difference. `left` and `right` are None where any value will do."""

    path: str
    reason: str
    left: str | None = None
    right: str | None = None
    kind: str | None = None
    optional: bool = False
    where: str = ""  # file:line of the entry


@dataclass
class AllowList:
    """The entries of one file, and which of them have matched so far."""

    entries: list[Allowance] = field(default_factory=list)
    used: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._globs = [(glob(e.path), e.left and glob(e.left), e.right and glob(e.right)) for e in self.entries]

    def reason(self, path: str, kind: str, left: Any, right: Any) -> str | None:
        """Return the reason of the first entry that allows this difference, None where none does.

        Every matching entry counts as used, so that of two entries for one difference neither is stale.
        """
        found = None
        texts = [path.replace("~1", "/").replace("~0", "~"), path]
        for index, entry in enumerate(self.entries):
            wanted_path, wanted_left, wanted_right = self._globs[index]
            if (
                (entry.kind in (None, kind))
                and any(wanted_path.fullmatch(text) for text in texts)
                and (entry.left is None or _matches(wanted_left, entry.left, left))
                and (entry.right is None or _matches(wanted_right, entry.right, right))
            ):
                self.used.add(index)
                found = found or entry.reason
        return found

    def stale(self) -> list[Allowance]:
        """Return the entries that matched nothing and are not optional."""
        return [e for i, e in enumerate(self.entries) if i not in self.used and not e.optional]


def _matches(pattern: Any, literal: str, value: Any) -> bool:
    text = shown(value)
    return text == literal or bool(pattern and pattern.fullmatch(text))


def glob(pattern: str) -> re.Pattern[str]:
    """Compile a glob: `*` is any text without `/`, `**` any text, a leading `**/` also nothing at all."""
    parts = re.split(r"(^\*\*/|\*\*|\*)", pattern)
    special = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*"}
    return re.compile("".join(special.get(part) or re.escape(part) for part in parts), re.DOTALL)


def shown(value: Any) -> str:
    """Return a scalar as reports print it and as `from` and `to` are written: true, null, 3, text."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def load_allow_list(path: str | None) -> AllowList:
    """Read an allow list; None gives an empty one.

    Raises:
      BenchError: not readable, not YAML, or an entry without path or reason, with file and line.
    """
    if path is None:
        return AllowList()
    import yaml

    source, text = shown_name(path), read_text(path, MAX_ALLOW_BYTES)
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        nodes: Iterable[Any] = root.value if isinstance(root, yaml.SequenceNode) else ()
        entries = [
            _entry(loader.construct_object(node, deep=True), f"{source}:{node.start_mark.line + 1}") for node in nodes
        ]
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{source}:{mark.line + 1}" if mark else source
        raise BenchError(f"not YAML: {getattr(error, 'problem', error)}", where=where, todo="correct it") from error
    if not entries:
        raise BenchError("no list of allowances", where=source, todo="write entries `- path: ...` with a `reason:`")
    return AllowList(entries)


def _entry(data: Any, where: str) -> Allowance:
    if not isinstance(data, dict):
        raise BenchError("an allowance is a mapping with path and reason", where=where, todo="write `- path: ...`")
    for name in data:
        if name not in _FIELDS:
            raise BenchError(f"unknown field {name!r} in an allowance", where=where, todo=f"use {', '.join(_FIELDS)}")
    for name in ("path", "reason"):
        if not isinstance(data.get(name), str) or not data[name].strip():
            raise BenchError(f"an allowance without a {name}", where=where, todo=f"write `{name}:` and a text")
    if not isinstance(data.get("optional", False), bool):
        raise BenchError("`optional` is not true or false", where=where, todo="write optional: true")
    return Allowance(
        data["path"],
        " ".join(data["reason"].split()),
        shown(data["from"]) if "from" in data else None,
        shown(data["to"]) if "to" in data else None,
        shown(data["kind"]) if "kind" in data else None,
        data.get("optional", False),
        where,
    )
