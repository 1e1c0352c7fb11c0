"""Allow lists: expected differences, each with its reason, for diff_render.py and diff_config.py.

A file is a YAML list of entries:

    - path: trainer/spec/failurePolicy/maxRestarts   # a path as the reports print it; globs below
      from: 3                                        # optional: only this value on the left
      to: 0                                          # optional: only this value on the right
      kind: changed                                  # optional: only this kind of difference
      optional: true                                 # optional: may match nothing without being stale
      reason: a bench that fails should be seen, not restarted

In `path`, `from` and `to` a `*` stands for any text, also across the steps of a path, and a `?` for one
character; `**/` or `.../` in front of a path stands for any steps before it, or none. `from` and `to` written as
numbers, true or null match every spelling of it. The reason is required. An entry that matches no difference is
stale: the list no longer tells the truth, and the tools fail. Standard library and PyYAML.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from bench_common import BenchError, read_text, shown_name

MAX_ALLOW_BYTES = 2**20
ANY = object()
_FIELDS = ("path", "from", "to", "kind", "optional", "reason")


@dataclass(frozen=True)
class Allowance:
    """One expected difference. `left` and `right` are as YAML has them, ANY where any value will do."""

    path: str
    reason: str
    left: Any = ANY
    right: Any = ANY
    kind: str | None = None
    optional: bool = False
    where: str = ""  # file:line of the entry


@dataclass
class AllowList:
    """The entries of one file, and which of them have matched so far."""

    entries: list[Allowance] = field(default_factory=list)
    used: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._paths = [glob(entry.path) for entry in self.entries]

    def reason(self, path: str, kind: str, left: Any, right: Any) -> str | None:
        """Return the reason of the first entry that allows this difference, None where none does.

        Every matching entry counts as used, so that of two entries for one difference neither is stale.
        """
        found = None
        texts = [path.replace("~1", "/").replace("~0", "~"), path]
        for index, (entry, wanted) in enumerate(zip(self.entries, self._paths, strict=True)):
            if (
                (entry.kind in (None, kind))
                and any(wanted.fullmatch(text) for text in texts)
                and _matches(entry.left, left)
                and _matches(entry.right, right)
            ):
                self.used.add(index)
                found = found or entry.reason
        return found

    def stale(self) -> list[Allowance]:
        """Return the entries that matched nothing and are not optional."""
        return [e for i, e in enumerate(self.entries) if i not in self.used and not e.optional]


def _matches(wanted: Any, value: Any) -> bool:
    """Return whether a value is the one an entry names; texts are globs, numbers match in any spelling."""
    if wanted is ANY:
        return True
    text, literal = shown(value), shown(wanted)
    if wanted is None:
        return text in ("null", "None", "")
    if isinstance(wanted, bool):
        return text.lower() == literal
    if isinstance(wanted, int | float):
        return text == literal or _number(text) == float(wanted)
    return text == literal or (isinstance(wanted, str) and glob(wanted).fullmatch(text) is not None)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def glob(pattern: str) -> re.Pattern[str]:
    """Compile a glob: `*` is any text, `?` one character, a leading `**/` or `.../` any steps before, or none."""
    parts = re.split(r"(^(?:\*\*|\.\.\.)/|\*+|\?)", pattern)
    special = {"**/": "(?:.*/)?", ".../": "(?:.*/)?", "?": "."}
    pieces = (".*" if part.strip("*") == "" and part else special.get(part) or re.escape(part) for part in parts)
    return re.compile("".join(pieces), re.DOTALL)


def shown(value: Any) -> str:
    """Return a scalar as reports print it and as `from` and `to` are written: true, null, 3, text."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def load_allow_list(path: str | None, kinds: Iterable[str]) -> AllowList:
    """Read an allow list; None gives an empty one.

    Args:
      path: the file, `-` for stdin.
      kinds: of difference that the tool tells apart; an entry may name one of them.

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
            _entry(loader.construct_object(node, deep=True), kinds, f"{source}:{node.start_mark.line + 1}")
            for node in nodes
        ]
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{source}:{mark.line + 1}" if mark else source
        raise BenchError(f"not YAML: {getattr(error, 'problem', error)}", where=where, todo="correct it") from error
    if not isinstance(root, yaml.SequenceNode):
        raise BenchError("no list of allowances", where=source, todo="write entries `- path: ...` with a `reason:`")
    return AllowList(entries)


def _entry(data: Any, kinds: Iterable[str], where: str) -> Allowance:
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
    if data.get("kind") not in (None, *kinds):
        raise BenchError(f"no kind of difference: {data['kind']!r}", where=where, todo=f"use {', '.join(kinds)}")
    return Allowance(
        data["path"],
        " ".join(data["reason"].split()),
        data.get("from", ANY),
        data.get("to", ANY),
        data.get("kind"),
        data.get("optional", False),
        where,
    )
