"""Compare two renders, launch or bench, and say what differs, down to single flags.

A bench number means something only when the bench is the same job as the full run, apart from what was
meant. A line diff of two renders shows one changed string of thousands of characters where five flags
changed; this tool matches documents, list items and flags by name, and shows the five.

Input: A and B, each the output of a launcher's dry run or of render-bench; log lines around the YAML are passed
over; `-` is stdin. By default the trainer of A is compared with the trainer of B, with the orchestrator's
argv beside it, so that a launch and its bench have the same paths; else all documents.

Output: differences by place, then what is allowed, then what has no effect (order of flags, flags that a
later one overrides, one number in two spellings). Boilerplate steps (spec, template, ...) are left out of
the text; JSON has whole paths. One real line:
    trainer > proc > main > command > MAXTEXT_EXTRA_FLAGS
      changed    num_moe_token_chunks  2 -> 4

Exit status: 0 the same (or all allowed, or without effect), 1 different or a stale allowance, 2 could
not do the job.

Examples:
    diff-render launch.yaml bench.yaml --allow examples/allow_bench.yaml
    DRY_RUN=true ./k8s_launcher.sh start | diff-render yesterday.yaml - --format markdown
    diff-render arm_a.yaml arm_b.yaml --select all --json | jq '.changes[].path'
"""

from __future__ import annotations

import argparse
import difflib
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from allow_list import AllowList, load_allow_list, shown
from bench_common import (
    EXIT_DIFFERENT,
    EXIT_OK,
    BenchError,
    complain,
    dump_json,
    emit,
    read_text,
    run_tool,
    shown_name,
)
from launch_render import MAX_RENDER_BYTES, Document, Render, read_render
from render_tree import (
    Leaf,
    Map,
    Node,
    document_tree,
    find_trainer,
    free_step,
    path_steps,
    path_text,
    plain,
    roles,
    trainer_tree,
)

TOOL = "diff_render"
SCHEMA = "diff-render/1"

# Why a difference has no effect.
ORDER, SUPERSEDED, NUMBER, TRUTH = "order", "superseded", "same number", "same truth value"


@dataclass(frozen=True)
class Change:
    """One difference. `a` and `b` are JSON-ready, secrets masked; `noise` says why it has no effect."""

    path: tuple[str, ...]
    kind: str  # added, removed, changed, reordered, renamed
    a: Any = None
    b: Any = None
    noise: str | None = None
    at: int | None = None  # in an ordered list: its place in the file that has it
    texts: tuple[str, str] | None = None  # of embedded sources, for --show-sources

    def as_json(self, allowed: str | None) -> dict[str, Any]:
        """Return the entry of the JSON report; `allowed` is the reason, None where there is none."""
        entry = {"path": path_text(self.path), "kind": self.kind, "a": self.a, "b": self.b, "allowed": allowed}
        entry["noise"] = self.noise
        return entry if self.at is None else entry | {"at": self.at}


# --- comparing -----------------------------------------------------------------------------------


def compare(a: Node, b: Node, path: tuple[str, ...] = (), sources: bool = False) -> Iterator[Change]:
    """Yield what differs between two trees, in the order of A, what only B has last."""
    name = path[-1] if path else ""
    if isinstance(a, Map) and isinstance(b, Map):
        yield from _compare_maps(a, b, path, sources)
    elif isinstance(a, Leaf) and isinstance(b, Leaf):
        if not _equal(a, b):
            noise = SUPERSEDED if a.superseded and b.superseded else _same_meaning(a, b)
            kind = "reordered" if noise == ORDER else "changed"
            texts = (a.text or "", b.text or "") if a.form == b.form == "source" else None
            yield Change(path, kind, plain(a, name, sources), plain(b, name, sources), noise, texts=texts)
    else:
        yield Change(path, "changed", plain(a, name, sources), plain(b, name, sources))


def _compare_maps(a: Map, b: Map, path: tuple[str, ...], sources: bool) -> Iterator[Change]:
    ours, theirs = a.children, b.children
    renamed = _renamed_items(a, b)
    if renamed:  # one name for both: OLD|NEW, sorted, so that diff(b, a) has the same paths
        joined = {name: "|".join(sorted(pair)) for pair in renamed for name in pair}
        olds, news = {old for old, _ in renamed}, {new for _, new in renamed}
        ours = {joined[step] if step in olds else step: node for step, node in ours.items()}
        theirs = {joined[step] if step in news else step: node for step, node in theirs.items()}
    ordered = a.order or b.order
    for place, (step, left) in enumerate(ours.items()):
        if step in theirs:
            for change in compare(left, theirs[step], (*path, step), sources):
                is_name = step not in a.children and change.path == (*path, step, "name")
                yield replace(change, kind="renamed") if is_name else change
        else:
            at = place if ordered else None
            yield Change((*path, step), "removed", a=plain(left, step, sources), noise=_superseded(left), at=at)
    for place, (step, right) in enumerate(theirs.items()):
        if step not in ours:
            at = place if ordered else None
            yield Change((*path, step), "added", b=plain(right, step, sources), noise=_superseded(right), at=at)
    if ordered and [s for s in ours if s in theirs] != [s for s in theirs if s in ours]:
        noise = None if "real" in (a.order, b.order) else ORDER
        yield Change(path, "reordered", list(ours), list(theirs), noise)


LEAST_LEAVES = 6  # smaller items (a volume, an env entry) are not recognised under another name
LEAST_ALIKE = 0.5  # share of equal leaves


def _renamed_items(a: Map, b: Map) -> list[tuple[str, str]]:
    """Return (old, new) of the named items (containers, replicated jobs) that only changed their name, best first."""
    gone = {step: _flat(node) for step, node in a.children.items() if step not in b.children and _is_named(node)}
    new = {step: _flat(node) for step, node in b.children.items() if step not in a.children and _is_named(node)}
    scores = sorted(
        (-2 * len(left & right) / (len(left) + len(right)), min(x, y), max(x, y), x, y)
        for x, left in gone.items()
        for y, right in new.items()
        if min(len(left), len(right)) >= LEAST_LEAVES
    )
    pairs: list[tuple[str, str]] = []
    for score, _, _, x, y in scores:
        if -score >= LEAST_ALIKE and x not in {p[0] for p in pairs} and y not in {p[1] for p in pairs}:
            pairs.append((x, y))
    return pairs


def _is_named(node: Node) -> bool:
    return isinstance(node, Map) and isinstance(node.children.get("name"), Leaf)


def _flat(node: Node, path: tuple[str, ...] = ()) -> set[tuple[tuple[str, ...], str]]:
    if isinstance(node, Leaf):
        return {(path, repr(node.value))}
    return {leaf for step, child in node.children.items() for leaf in _flat(child, (*path, step))}


def _equal(a: Leaf, b: Leaf) -> bool:
    """Return whether two leaves hold the same value of the same type (1 is neither True nor "1" nor 1.0)."""
    return type(a.value) is type(b.value) and a.value == b.value and repr(a.value) == repr(b.value)


def _superseded(node: Node) -> str | None:
    if isinstance(node, Map):
        return SUPERSEDED if node.children and all(map(_superseded, node.children.values())) else None
    return SUPERSEDED if node.superseded else None


def _same_meaning(a: Leaf, b: Leaf) -> str | None:
    """Return why two different leaves mean the same, None where they do not.

    Numbers are compared as numbers only where the field is one: a YAML number, a flag that its program
    parses as a number, a MaxText key (its values are YAML). `1.10` and `1.1` are two image tags.
    """
    if a.form == b.form == "set" and sorted(map(repr, a.value)) == sorted(map(repr, b.value)):
        return ORDER
    if a.form != b.form:
        return None
    if a.form == "yaml":
        both = [v for v in (a.value, b.value) if isinstance(v, int | float) and not isinstance(v, bool)]
        return NUMBER if len(both) == 2 and a.value == b.value else None
    if a.form in ("number", "maxtext") and isinstance(a.value, str) and isinstance(b.value, str):
        if _number(a.value) is not None and _number(a.value) == _number(b.value):
            return NUMBER
        if a.form == "maxtext" and a.value.lower() == b.value.lower() and a.value.lower() in ("true", "false"):
            return TRUTH
    return None


_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


def _number(text: str) -> float | None:
    return float(text) if _NUMBER.fullmatch(text) else None


def mark_renames(changes: list[Change], names: list[tuple[str, str]]) -> list[Change]:
    """Return the changes with those that only carry a document's new name marked as renamed."""
    return [replace(c, kind="renamed") if c.kind == "changed" and _follows(c, names) else c for c in changes]


def _follows(change: Change, names: list[tuple[str, str]]) -> bool:
    """Return whether a value changed only in a document's name (also in a list of such values)."""
    sides = [value if isinstance(value, list) else [value] for value in (change.a, change.b)]
    if len(sides[0]) != len(sides[1]) or not all(isinstance(text, str) for side in sides for text in side):
        return False
    return any(
        all(x == y or _renamed(x, old, new) == y or _renamed(y, new, old) == x for x, y in zip(*sides, strict=True))
        for old, new in names
        if old != new
    )


def _renamed(text: str, old: str, new: str) -> str:
    """Return the text with a name replaced where it stands alone or starts a longer one (`NAME-proc-0`)."""
    return re.sub(rf"(?<![A-Za-z0-9-]){re.escape(old)}(?![A-Za-z0-9])", lambda _: new, text)


# --- documents -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """A document of A and its partner in B; None where it has none."""

    a: Document | None
    b: Document | None

    @property
    def step(self) -> str:
        """The first step of the document's paths: `JobSet:NAME`, or `JobSet:NAME|NAME` after a rename."""
        names = sorted({d.name for d in (self.a, self.b) if d})
        kinds = sorted({d.kind for d in (self.a, self.b) if d})
        return f"{'|'.join(kinds)}:{'|'.join(names)}"


def pair_documents(a: Render, b: Render) -> list[Pair]:
    """Match documents by kind and name, then by what they run, then the only one left of a kind on each side."""
    left, right = (sorted(r.documents, key=lambda d: (d.kind, d.name)) for r in (a, b))
    pairs = _matched(left, right, lambda d: (d.kind, d.name))
    pairs += _matched(left, right, lambda d: (d.kind, *_jobs(d)) if roles(d) else None)
    pairs += _matched(left, right, lambda d: d.kind, only=True)
    pairs += [Pair(document, None) for document in left] + [Pair(None, document) for document in right]
    return sorted(pairs, key=lambda pair: pair.step)


def _jobs(document: Document) -> list[str]:
    """Return what a document runs; a bench does the trainer's work."""
    return ["trainer" if role == "bench" else role for role in roles(document)]


def _matched(
    left: list[Document], right: list[Document], key: Callable[[Document], Any], only: bool = False
) -> list[Pair]:
    """Take the documents with equal keys out of both lists, in pairs; `only` where no other has the key."""
    by_key: dict[Any, list[list[Document]]] = {}
    for side, documents in enumerate((left, right)):
        for document in documents:
            by_key.setdefault(key(document), [[], []])[side].append(document)
    pairs = []
    for found, (ours, theirs) in by_key.items():
        if found is not None and (not only or len(ours) == len(theirs) == 1):
            pairs += [Pair(x, y) for x, y in zip(ours, theirs, strict=False)]
    for pair in pairs:
        left[:] = [document for document in left if document is not pair.a]
        right[:] = [document for document in right if document is not pair.b]
    return pairs


@dataclass(frozen=True)
class Selection:
    """What is compared: its name, two trees, the (old, new) names of documents, and what the headline says."""

    what: str
    left: Map
    right: Map
    names: list[tuple[str, str]]
    documents: tuple[list[str], list[str]]


def select(a: Render, b: Render, what: str | None, notes: list[str]) -> Selection:
    """Return what is compared.

    Raises:
      BenchError: a trainer is asked for and missing (or there are several), or no document has the name.
    """
    if what in (None, "trainer"):
        trainers = find_trainer(a), find_trainer(b)
        if all(trainers):
            titles = tuple([_title(trainer)] for trainer in trainers)
            trees = trainer_tree(a, notes), trainer_tree(b, notes)
            return Selection("trainer", *trees, [(trainers[0].name, trainers[1].name)], titles)
        if what:
            lacking = a if trainers[0] is None else b
            raise BenchError(
                "not exactly one trainer here", where=lacking.documents[0].source, todo="use --select all or a name"
            )
    pairs = pair_documents(a, b)
    if what not in (None, "all"):
        pairs = [pair for pair in pairs if what in {d.name for d in (pair.a, pair.b) if d}]
        if not pairs:
            raise BenchError(f"no document named {what}", where=a.documents[0].source, todo="use --select all")
    left, right = _trees(pairs, notes)
    names = [(pair.a.name, pair.b.name) for pair in pairs if pair.a and pair.b]
    titles = tuple(sorted(_title(d) for d in side if d) for side in ((p.a for p in pairs), (p.b for p in pairs)))
    return Selection(what or "all", left, right, names, titles)


def _title(document: Document) -> str:
    return f"{document.kind} {document.name}"


def _trees(pairs: list[Pair], notes: list[str]) -> tuple[Map, Map]:
    """Return the documents of each side as one tree; pairs that are equal to the letter are left out."""
    left, right = Map(), Map()
    for pair in pairs:
        if pair.a and pair.b and repr(pair.a.data) == repr(pair.b.data):
            continue
        step = free_step(pair.step, left.children.keys() | right.children.keys())
        mixed = bool(pair.a and pair.b) and roles(pair.a) != roles(pair.b)  # a launch's trainer and a bench
        for document, root in ((pair.a, left), (pair.b, right)):
            if document is not None:
                root.children[step] = document_tree(document, notes, as_trainer=mixed)
    return left, right


# --- reports -------------------------------------------------------------------------------------


def report(
    changes: list[Change], allowed: AllowList, about: dict[str, Any], strict: bool, summary: bool
) -> dict[str, Any]:
    """Return the report as a JSON-ready dict, the one source of every format."""
    entries = []
    for change in changes:
        entries.append(change.as_json(allowed.reason(path_text(change.path), change.kind, change.a, change.b)))
    stale = [{"path": entry.path, "reason": entry.reason, "where": entry.where} for entry in allowed.stale()]
    counts = {
        "different": sum(not e["allowed"] and (strict or not e["noise"]) for e in entries),
        "allowed": sum(bool(e["allowed"]) for e in entries),
        "no_effect": sum(not e["allowed"] and bool(e["noise"]) for e in entries),
        "stale": len(stale),
    }
    kinds = {kind: sum(e["kind"] == kind for e in entries) for kind in KINDS}
    head = {"schema": SCHEMA, "same": not counts["different"] and not stale, **about, "counts": counts | kinds}
    return head | ({} if summary else {"changes": entries}) | {"stale_allowances": stale}


KINDS = ("changed", "added", "removed", "renamed", "reordered")
ALLOWED = "allowed"
SECTIONS = (
    ("differences", lambda e: not e["allowed"] and not e["noise"]),
    ("without effect", lambda e: not e["allowed"] and e["noise"]),
    (ALLOWED, lambda e: bool(e["allowed"])),
)
_BOILERPLATE = ("spec", "template", "replicatedJobs", "containers")


def text_report(document: dict[str, Any], diffs: dict[str, str]) -> str:
    """Return the report as text; lines stay within 80 columns where names allow."""
    lines = [_headline(document)]
    for title, belongs in SECTIONS:
        entries = [e for e in document.get("changes", ()) if belongs(e)]
        if entries:
            lines += ["", f"{title} ({len(entries)})"]
            lines += _by_reason(entries) if title == ALLOWED else _by_place(entries, diffs)
    if document["stale_allowances"]:
        lines += ["", f"stale allowances ({len(document['stale_allowances'])}): they match nothing"]
        lines += [f"  {entry['where']}: {entry['path']}" for entry in document["stale_allowances"]]
    return "\n".join([*lines, "", _verdict(document)]) + "\n"


def _shown_steps(entry: dict[str, Any]) -> list[str]:
    return [s for s in path_steps(entry["path"]) if s not in _BOILERPLATE] or ["(all)"]


def _by_place(entries: list[dict[str, Any]], diffs: dict[str, str]) -> list[str]:
    lines: list[str] = []
    place = None
    for entry in entries:
        *parents, step = _shown_steps(entry)
        if parents != place:
            place = parents
            lines += _place_lines(place)
        lines += _entry_lines(entry, step, diffs)
    return lines


def _by_reason(entries: list[dict[str, Any]]) -> list[str]:
    """Return what is allowed, under each reason one line per difference."""
    lines: list[str] = []
    for reason in dict.fromkeys(entry["allowed"] for entry in entries):
        lines += textwrap.wrap(reason, 78, initial_indent="  ", subsequent_indent="  ")
        for entry in (entry for entry in entries if entry["allowed"] == reason):
            text = " > ".join(_shown_steps(entry))
            text = text if len(text) <= 65 else "..." + text[-62:]
            change = _change(entry)
            fits = entry["kind"] != "reordered" and len(text) + len(change) <= 63
            lines.append(f"    {entry['kind']:<9}  {text}  {change if fits else ''}".rstrip())
    return lines


def _place_lines(place: list[str]) -> list[str]:
    text = " > ".join(place) or "(top)"
    return textwrap.wrap(
        text, 78, initial_indent="  ", subsequent_indent="      ", break_long_words=False, break_on_hyphens=False
    )


def _headline(document: dict[str, Any]) -> str:
    what = {"trainer": "the trainer", "all": "all documents"}.get(document["select"], document["select"])
    names = {side: ", ".join(document[side]["documents"]) for side in "ab"}
    return f"{what}: A {names['a'] or '(none)'}; B {names['b'] or '(none)'}"


def _entry_lines(entry: dict[str, Any], step: str, diffs: dict[str, str]) -> list[str]:
    head = f"    {entry['kind']:<9}  {step}"
    change = _change(entry)
    if entry["path"] in diffs:
        body = [piece for line in _few_lines(diffs[entry["path"]]) for piece in _diff_line(line)]
    elif entry["kind"] == "reordered":
        body = [f"               {_moved(entry['a'], entry['b'])}"]
    elif len(head) + len(change) <= 76:
        head, body = f"{head}  {change}", []
    else:
        body = _two_lines(_value(entry, "a"), _value(entry, "b"))
    why = entry["noise"] or ""
    body += [f"               {why}: no effect"] if why else []
    return [head.rstrip(), *body]


def _change(entry: dict[str, Any]) -> str:
    return " -> ".join(text for text in (_value(entry, "a"), _value(entry, "b")) if text is not None)


def _value(entry: dict[str, Any], side: str) -> str | None:
    value = entry[side]
    if (side == "a" and entry["kind"] == "added") or (side == "b" and entry["kind"] == "removed"):
        return None
    if isinstance(value, dict):
        return f"({len(value)} items)" if len(value) > 4 else "{" + ", ".join(value) + "}"
    if value is None:
        return "(bare)" if path_steps(entry["path"])[-1].startswith("-") else "null"
    if isinstance(value, str) and "\n" in value:
        return f"({value.count(chr(10)) + 1} lines)"
    return shown(value) if value != "" else "(empty)"


def _moved(a: list[str], b: list[str]) -> str:
    """Say which of the common names moved, as few as explain the new order."""
    common = [s for s in a if s in b], [s for s in b if s in a]
    kept: set[str] = set()
    for block in difflib.SequenceMatcher(None, *common, autojunk=False).get_matching_blocks():
        kept.update(common[0][block.a : block.a + block.size])
    moved = [s for s in common[1] if s not in kept]
    return f"moved: {', '.join(moved[:3])}" + (f" and {len(moved) - 3} more" if len(moved) > 3 else "")


def _two_lines(left: str | None, right: str | None) -> list[str]:
    """Show long values around the first place where they differ."""
    x, y = left or "", right or ""
    start = next((i for i, (p, q) in enumerate(zip(x, y, strict=False)) if p != q), 0)
    begin = max(0, start - 16)
    pairs = (("A", left), ("B", right))
    return [f"               {side}: {_window(text, begin)}" for side, text in pairs if text is not None]


def _window(text: str, begin: int, width: int = 56) -> str:
    begin = 0 if len(text) <= width else min(begin, max(0, len(text) - width))
    piece = text[begin : begin + width]
    return ("..." if begin else "") + piece + ("..." if begin + width < len(text) else "")


def _few_lines(text: str, most: int = 40) -> list[str]:
    lines = [line.rstrip() for line in text.splitlines()]
    return lines if len(lines) <= most else [*lines[:most], f"... {len(lines) - most} more lines"]


def _diff_line(line: str) -> list[str]:
    """Return a line of a unified diff in pieces of at most 80 columns."""
    sign, rest = line[:1], line[1:]
    pieces = textwrap.wrap(rest, 70, drop_whitespace=False, break_on_hyphens=False, replace_whitespace=False) or [""]
    return [f"      | {sign if index == 0 else '  '}{piece}".rstrip() for index, piece in enumerate(pieces)]


def line_diffs(changes: list[Change], sources: bool) -> dict[str, str]:
    """Return unified diffs of changed texts (scripts, and embedded sources where asked for) by path."""
    found = {}
    for change in changes:
        left, right = change.texts if change.texts and sources else (change.a, change.b)
        if isinstance(left, str) and isinstance(right, str) and "\n" in left + right:
            lines = difflib.unified_diff(left.splitlines(), right.splitlines(), "A", "B", lineterm="", n=1)
            found[path_text(change.path)] = "\n".join(lines)
    return found


def _verdict(document: dict[str, Any]) -> str:
    counts = document["counts"]
    words = {"different": "different", "allowed": "allowed", "no_effect": "without effect", "stale": "stale allowances"}
    found = ", ".join(f"{counts[name]} {word}" for name, word in words.items() if counts[name])
    return f"{'same' if document['same'] else 'different'}: {found or 'no difference'}"


def markdown_report(document: dict[str, Any], diffs: dict[str, str]) -> str:
    """Return the report as GitHub markdown, a table per section."""
    lines = [f"**{_verdict(document)}**", "", f"- {_headline(document)}"]
    for title, belongs in SECTIONS:
        entries = [e for e in document.get("changes", ()) if belongs(e)]
        if not entries:
            continue
        lines += [
            "",
            f"### {title} ({len(entries)})",
            "",
            "| path | kind | A | B | why |",
            "| --- | --- | --- | --- | --- |",
        ]
        for entry in entries:
            steps = [s for s in path_steps(entry["path"]) if s not in _BOILERPLATE]
            cells = ["/".join(steps), entry["kind"], _value(entry, "a") or "", _value(entry, "b") or ""]
            cells.append(entry["allowed"] or (f"{entry['noise']}: no effect" if entry["noise"] else ""))
            lines.append(f"| {' | '.join(c.replace('|', chr(92) + '|').replace(chr(10), ' ') for c in cells)} |")
        for entry in entries:
            if entry["path"] in diffs:
                lines += ["", f"`{entry['path']}`", "", "```diff", *_few_lines(diffs[entry["path"]], 400), "```"]
    if document["stale_allowances"]:
        lines += ["", "### stale allowances", ""]
        lines += [f"- `{entry['where']}`: `{entry['path']}`" for entry in document["stale_allowances"]]
    return "\n".join(lines) + "\n"


# --- the command ---------------------------------------------------------------------------------


def build_parser() -> argparse.ArgumentParser:
    """Return the argument parser."""
    parser = argparse.ArgumentParser(
        prog=TOOL, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("a", metavar="A", help="launch or bench render; - is stdin")
    parser.add_argument("b", metavar="B", help="the same")
    parser.add_argument("--select", metavar="trainer|NAME|all",
                        help="what to compare (default: the trainers where both have one, else all)")  # fmt: skip
    parser.add_argument("--allow", metavar="FILE", help="YAML list of expected differences, each with a reason")
    parser.add_argument("--strict", action="store_true", help="count what has no effect as different too")
    parser.add_argument("--show-sources", action="store_true", help="show how embedded driver sources differ")
    parser.add_argument("--summary", action="store_true", help="only the counts")
    parser.add_argument("--format", choices=("text", "json", "markdown"), default="text", help="default: text")
    parser.add_argument("--json", action="store_const", const="json", dest="format", help="same as --format json")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the tool; return its exit status."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if [args.a, args.b, args.allow].count("-") > 1:
        parser.error("only one input can be stdin (-)")
    return run_tool(TOOL, lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    allowed = load_allow_list(args.allow, KINDS)
    renders = [read_render(read_text(path, MAX_RENDER_BYTES), shown_name(path)) for path in (args.a, args.b)]
    notes = [note for render in renders for note in render.notes]
    chosen = select(*renders, args.select, notes)
    sources = args.show_sources and args.format == "json"
    changes = mark_renames(list(compare(chosen.left, chosen.right, sources=sources)), chosen.names)
    for note in notes:
        complain(TOOL, note)
    about = {"select": chosen.what, "a": {"documents": chosen.documents[0]}, "b": {"documents": chosen.documents[1]}}
    document = report(changes, allowed, about, args.strict, args.summary)
    diffs = line_diffs(changes, args.show_sources)
    if args.format == "json":
        emit(dump_json(document))
    else:
        emit((markdown_report if args.format == "markdown" else text_report)(document, diffs))
    return EXIT_OK if document["same"] else EXIT_DIFFERENT


if __name__ == "__main__":
    raise SystemExit(main())
