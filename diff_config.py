"""Compare the configurations that two MaxText runs logged: which keys differ, and which of them matter.

MaxText prints its whole resolved configuration, one `Config param KEY: VALUE` line per key (some 800
keys). A step time means little until two such lists are known to agree but for what was meant.

Input: A and B, each a MaxText log (any prefixes, several processes, several configurations), a bench
result JSON, or key=value text; `-` is stdin. One real line:
    I0317 09:59:16.236806 125344476638336 pyconfig.py:413] Config param remat_policy: custom
Values are compared by what they mean: 7 and 7.0, None and empty, RematLocation.DEVICE and device, lists
and tuples are one value in two spellings; 1 and True are not.

Output, in this order: changed keys (mesh, dtypes, remat, MoE, attention, batch and model first), only in
A, only in B, derived (sizes that follow from others), volatile (names and places of the run), spelling,
and the number of unchanged keys:
    mesh       ici_fsdp_parallelism          32 -> 64
Processes of one log that disagree are an error of their own. --asked holds a log against the render that
started it: options that were overridden, that MaxText does not know, or that were lost on the way.

Exit status: 0 no difference (or all allowed), 1 different, disagreeing, not as asked, or a stale
allowance, 2 could not do the job.

Examples:
    diff-config full_run.log bench.log
    kubectl logs job/bench-proc-0 | diff-config full_run.log - --format markdown
    diff-config bench.log --asked bench.yaml
"""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from allow_list import AllowList, load_allow_list
from bench_common import EXIT_DIFFERENT, EXIT_OK, BenchError, complain, dump_json, emit, mask, run_tool
from config_keys import DERIVED, GROUPS, NOT_VOLATILE, VOLATILE, any_glob, group_of, meaning, same_value
from config_log import NEVER_LOGGED, Block, ConfigLog, read_configs

TOOL = "diff_config"
SCHEMA = "diff-config/1"

# --- comparing -----------------------------------------------------------------------------------


@dataclass
class Comparison:
    """What differs between two configurations. Entries are ready for JSON; secrets are masked."""

    changed: list[dict[str, Any]] = field(default_factory=list)
    only_a: list[dict[str, Any]] = field(default_factory=list)
    only_b: list[dict[str, Any]] = field(default_factory=list)
    derived: list[dict[str, Any]] = field(default_factory=list)
    volatile: list[dict[str, Any]] = field(default_factory=list)
    spelling: list[dict[str, Any]] = field(default_factory=list)
    unchanged: int = 0
    disagreements: list[dict[str, Any]] = field(default_factory=list)
    asked: list[dict[str, Any]] = field(default_factory=list)


LISTS = ("changed", "only_a", "only_b", "derived", "volatile", "spelling", "disagreements", "asked")
STATUSES = ("unknown", "lost", "overridden")  # of what was asked for
COUNTING = ("changed", "only_a", "only_b", "derived", "disagreements", "asked")  # these make the answer "different"


@dataclass(frozen=True)
class Rules:
    """How keys are sorted into the lists, and which differences are allowed."""

    volatile: Callable[[str], bool]
    derived: Callable[[str], bool]
    group: Callable[[str], str]
    allowed: AllowList

    def allow(self, path: str, kind: str, left: Any, right: Any) -> str | None:
        """Return the reason for which a difference is allowed, None where it is not."""
        return self.allowed.reason(path, kind, left, right)


def make_rules(ignore: list[str], default_ignore: bool, allowed: AllowList) -> Rules:
    """Return the rules of a run: `ignore` are further volatile globs, `default_ignore` keeps VOLATILE."""
    kept, mine = any_glob(NOT_VOLATILE), any_glob(ignore)
    usual = any_glob(VOLATILE if default_ignore else ())
    return Rules(lambda key: mine(key) or (usual(key) and not kept(key)), any_glob(DERIVED), group_of(), allowed)


def compare(a: dict[str, str], b: dict[str, str], rules: Rules, into: Comparison, block: int | None = None) -> None:
    """Compare two configurations key by key and add what differs to `into`."""
    for key in sorted(a.keys() | b.keys()):
        left, right = a.get(key), b.get(key)
        if left == right:
            into.unchanged += 1
            continue
        entry: dict[str, Any] = {"key": key, "group": rules.group(key)}
        if left is not None:
            entry["a"] = shown_value(key, left)
        if right is not None:
            entry["b"] = shown_value(key, right)
        if block is not None:
            entry["block"] = block
        kind = _kind(key, left, right, rules)
        entry["allowed"] = rules.allow(key, kind, left, right)
        getattr(into, kind).append(entry)
    order = {name: index for index, (name, _) in enumerate(GROUPS)}
    for items in (into.changed, into.only_a, into.only_b):
        items.sort(key=lambda item: (item.get("block", 0), order[item["group"]], item["key"]))


def _kind(key: str, left: str | None, right: str | None, rules: Rules) -> str:
    """Return the list in which a key belongs whose texts differ; None stands for a key that is not there."""
    if rules.volatile(key):
        return "volatile"
    if left is None or right is None:
        return "only_b" if left is None else "only_a"
    if same_value(left, right):
        return "spelling"
    return "derived" if rules.derived(key) else "changed"


_NESTED_SECRET = re.compile(r"(['\"])([\w-]+)\1: (['\"])(.*?)(?<!\\)\3")


def shown_value(key: str, value: str) -> str:
    """Return a value as a report may show it: secrets masked, also inside dictionaries and lists of them."""
    if "{" in value:
        value = _NESTED_SECRET.sub(lambda m: f"{m[1]}{m[2]}{m[1]}: {m[3]}{mask(m[2], m[4])}{m[3]}", value)
    return mask(key, value)


def disagreements(log: ConfigLog, name: str, chosen: list[int], rules: Rules, into: Comparison) -> None:
    """Add the keys on which the processes of one log disagree within one configuration."""
    for index in chosen:
        blocks = log.rounds[index]
        for key in sorted(set().union(*(block.values for block in blocks)) if len(blocks) > 1 else ()):
            if rules.volatile(key):
                continue
            by_value: dict[str | None, list[str]] = {}
            for number, block in enumerate(blocks, start=1):
                text = block.values.get(key)
                known = next((v for v in by_value if v is not None and text is not None and same_value(v, text)), text)
                by_value.setdefault(known, []).append(_process_name(block, number))
            if len(by_value) > 1:
                values = [
                    {"value": None if value is None else shown_value(key, value), "processes": names}
                    for value, names in by_value.items()
                ]
                allowed = rules.allow(key, "disagreements", None, None)
                entry = {"key": key, "file": name, "block": index + 1, "values": values, "allowed": allowed}
                into.disagreements.append(entry)


def _process_name(block: Block, number: int) -> str:
    return block.process or f"process {number} (line {block.first_line})"


# --- asked against effective -----------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """One option of a render: a MaxText key, the value asked for, and where it was asked."""

    key: str
    value: str
    source: str


def asked_options(path: str) -> tuple[list[Asked], list[str]]:
    """Return what a render asks MaxText for, in the order in which the last one wins, and notes.

    The translation from argv to keys is the driver's own (bench_config.maxtext_settings); keys that it
    sets unasked, or defaults of flags that the render does not carry, are left out.

    Raises:
      BenchError: no trainer in the render, or a trainer that is not MaxText's.
    """
    from bench_common import read_text, shown_name
    from launch_render import MAX_RENDER_BYTES, read_render

    render = read_render(read_text(path, MAX_RENDER_BYTES), shown_name(path))
    trainer_argv, orch_argv, env = _render_argv(render, shown_name(path))
    try:
        return _asked(trainer_argv, orch_argv, env, shown_name(path))
    except BenchError as error:  # the driver names its own variable, not the file
        raise BenchError(error.what, where=f"{shown_name(path)}: {error.where}", todo=error.todo) from error


def _asked(
    trainer_argv: list[str], orch_argv: list[str], env: dict[str, str], source: str
) -> tuple[list[Asked], list[str]]:
    """Return the options of a render and notes, see `asked_options`."""
    import bench_config

    names = (*bench_config.TRAINER_FLAGS, *bench_config.TRAINER_BOOLS, *bench_config.TRAINER_INERT)
    names = (*names, *bench_config.RUNTIME_FLAGS, "learning_rate", "weight_decay")
    flags = [(word, word.partition("=")[0].removeprefix("--")) for word in trainer_argv]
    notes = [f"{source}: --{name} is not a trainer flag known here; passed over" for _, name in flags
             if name not in names]  # fmt: skip
    trainer = bench_config.parse_trainer_argv([word for word, name in flags if name in names])
    tensor = trainer.rollout_mesh_tp
    # The padded MoE width depends on a file of MaxText, which need not be installed here: not asked for.
    trainer.rollout_mesh_tp = 0
    if trainer.base_num_kv_heads:
        trainer.base_num_kv_heads = max(tensor, trainer.base_num_kv_heads)
    devices = trainer.mesh_fsdp * trainer.mesh_tp * trainer.mesh_expert * trainer.mesh_context
    plan = bench_config.batch_plan(trainer, bench_config.parse_orch_argv(orch_argv))
    settings = bench_config.maxtext_settings(trainer, plan, env, devices)
    if tensor:
        settings.insert(0, bench_config.Setting("rollout_tensor_parallelism", str(tensor), "--rollout_mesh_tp"))
    given = {"--" + name for _, name in flags} | {"env " + name for name in env} | {"MAXTEXT_EXTRA_FLAGS"}
    aliases = {"row width": "--max_response_length"}
    asked = [
        Asked(s.key, "" if s.value == "''" else s.value, s.source)
        for s in settings
        if aliases.get(s.source, s.source).split(" / ")[0] in given
    ]
    return asked, notes


def _render_argv(render: Any, source: str) -> tuple[list[str], list[str], dict[str, str]]:
    """Return the trainer's argv, the orchestrator's argv and the trainer's environment of a render."""
    from launch_render import client_containers, parse_client, script_role

    trainers, orchestrators = [], []
    for document in render.documents:
        for path, container, script in client_containers(document):
            role = script_role(script)
            if role in ("trainer", "bench", "orchestrator"):
                client = parse_client(container, path, script, document.where)
                (orchestrators if role == "orchestrator" else trainers).append(client)
    if len(trainers) != 1:
        raise BenchError(
            f"{len(trainers)} trainers in this render", where=source, todo="give a launch or a bench render with one"
        )
    client = trainers[0]
    if client.is_bench:
        return client.carried_argv("TRAINER_ARGV"), client.carried_argv("ORCH_ARGV"), client.env
    argv = next(([word.value for word in c.argv] for c in orchestrators), [])
    return [word.value for word in client.argv], argv, client.env


def _took_effect(asked: str, found: str) -> bool:
    """Return whether a value asked for is the one logged; MaxText makes a list of some single values."""
    value = meaning(found)
    alone = isinstance(value, list | tuple) and len(value) == 1
    return same_value(asked, found) or (alone and same_value(asked, str(value[0])))


def check_asked(asked: list[Asked], values: dict[str, str], name: str, rules: Rules, into: Comparison) -> None:
    """Add the options that did not take effect: overridden, unknown to MaxText, or lost."""
    by_key: dict[str, list[Asked]] = {}
    for option in asked:
        by_key.setdefault(option.key, []).append(option)
    for key, options in sorted(by_key.items()):
        winner, found = options[-1], values.get(key)
        if found is None:
            problems = [(winner, "unknown", "")]
        elif not _took_effect(winner.value, found):
            problems = [(winner, "lost", "")]
        else:
            problems = [(o, "overridden", winner.source) for o in options[:-1] if not same_value(o.value, winner.value)]
        for option, status, by in problems if key not in NEVER_LOGGED else ():
            entry: dict[str, Any] = {
                "key": key, "file": name, "status": status, "asked": shown_value(key, option.value),
                "source": option.source, "effective": None if found is None else shown_value(key, found),
            }  # fmt: skip
            if by:
                entry["by"] = by
            entry["allowed"] = rules.allow(f"asked/{key}", status, option.value, found)
            into.asked.append(entry)


# --- reports -------------------------------------------------------------------------------------

TITLES = {
    "changed": "changed", "only_a": "only in A", "only_b": "only in B", "derived": "derived: they follow from others",
    "volatile": "volatile: names and places of the run, not counted", "spelling": "same value, spelled differently",
    "disagreements": "processes of one log that disagree", "asked": "asked for, but not in effect",
}  # fmt: skip


def report(result: Comparison, sizes: dict[str, Any], rules: Rules, summary: bool) -> dict[str, Any]:
    """Return the report as a JSON-ready dict, the one source of every format."""
    stale = [{"path": entry.path, "reason": entry.reason, "where": entry.where} for entry in rules.allowed.stale()]
    counts = {name: len(getattr(result, name)) for name in LISTS}
    open_items = sum(not item["allowed"] for name in COUNTING for item in getattr(result, name))
    allowed = sum(bool(item["allowed"]) for name in COUNTING for item in getattr(result, name))
    head: dict[str, Any] = {"schema": SCHEMA, "same": not open_items and not stale, "files": sizes}
    head["counts"] = counts | {"allowed": allowed, "stale": len(stale), "unchanged": result.unchanged}
    if not summary:
        head |= {name: getattr(result, name) for name in LISTS}
    return head | {"unchanged": result.unchanged, "stale_allowances": stale}


def text_report(document: dict[str, Any]) -> str:
    """Return the report as text of at most 80 columns where keys and values allow."""
    lines = [_size_line(name, size) for name, size in document["files"].items()]
    for name in LISTS:
        items = document.get(name, ())
        if items:
            keys = ", ".join(item["key"] for item in items)
            names_only = textwrap.wrap(keys, 78, initial_indent="  ", subsequent_indent="  ")
            body = names_only if name == "volatile" else [line for item in items for line in _item_lines(item)]
            lines += ["", f"{TITLES[name]} ({len(items)})", *body]
    if document["stale_allowances"]:
        lines += ["", f"stale allowances ({len(document['stale_allowances'])}): they match nothing"]
        lines += [f"  {entry['where']}: {entry['path']}" for entry in document["stale_allowances"]]
    return "\n".join([*lines, "", _verdict(document)]) + "\n"


def _size_line(name: str, size: dict[str, Any]) -> str:
    more = f", {size['processes']} processes" if size["processes"] > 1 else ""
    block = f"configuration {size['block']} of {size['blocks']}" if size["blocks"] > 1 else "one configuration"
    return f"{name.upper()}: {size['keys']} keys, {block}{more}"


def _item_lines(item: dict[str, Any]) -> list[str]:
    number = f" [configuration {item['block']}]" if "block" in item else ""
    if "values" in item:
        head = f"  {item['key']}, in {item['file'].upper()}{number}"
        body = [f"    {_quoted(v['value'])}  {_names(v['processes'])}" for v in item["values"]]
    elif "status" in item:
        head = f"  {item['key']}, in {item['file'].upper()}: {item['status']}" + (
            f" by {item['by']}" if "by" in item else ""
        )
        body = [f"    asked {_quoted(item['asked'])} ({item['source']}), log says {_quoted(item['effective'])}"]
    else:
        left, right = (_quoted(item[side]) if side in item else "" for side in "ab")
        change = " -> ".join(text for text in (left, right) if text)
        head, body = f"  {item['group']:<9}  {item['key']}{number}", [f"             {change}"]
        if len(head) + len(change) <= 76:
            head, body = f"{head}  {change}", []
        elif len(change) > 67:
            body = _two_lines(left, right)
    indent, allowed = " " * 13, item.get("allowed")
    reason = textwrap.wrap(f"allowed: {allowed}", 80, initial_indent=indent, subsequent_indent=indent)
    return [head, *body, *(reason if allowed else [])]


def _two_lines(left: str, right: str) -> list[str]:
    """Show long values around the first place where they differ."""
    start = next((i for i, (x, y) in enumerate(zip(left, right, strict=False)) if x != y), 0) if left and right else 0
    begin = max(0, start - 16)
    return [f"             {side}: {_window(text, begin)}" for side, text in (("A", left), ("B", right)) if text]


def _window(text: str, begin: int, width: int = 62) -> str:
    begin = 0 if len(text) <= width else min(begin, max(0, len(text) - width))
    piece = text[begin : begin + width]
    return ("..." if begin else "") + piece + ("..." if begin + width < len(text) else "")


def _names(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _quoted(value: str | None) -> str:
    if value is None:
        return "(not logged)"
    return value.replace("\n", "\\n") if value.strip() else "(empty)"


def _verdict(document: dict[str, Any]) -> str:
    counts = document["counts"]
    words = {"changed": "changed", "only_a": "only in A", "only_b": "only in B", "derived": "derived",
             "disagreements": "disagreeing", "asked": "not as asked", "allowed": "of them allowed",
             "stale": "stale allowances"}  # fmt: skip
    found = ", ".join(f"{counts[name]} {word}" for name, word in words.items() if counts[name])
    files = document["files"]
    tail = f"{counts['unchanged']} keys unchanged" if "b" in files else f"{files['a']['keys']} keys logged"
    for name, word in (("spelling", "spelled differently"), ("volatile", "volatile")):
        tail += f", {counts[name]} {word}" if counts[name] else ""
    verdict = "same" if document["same"] else "different"
    return f"{verdict}: {found}; {tail}" if found else f"{verdict}: {tail}"


def markdown_report(document: dict[str, Any]) -> str:
    """Return the report as GitHub markdown, one table per list."""
    lines = [f"**{_verdict(document)}**", ""]
    lines += [f"- {_size_line(name, size)}" for name, size in document["files"].items()]
    for name in LISTS:
        items = document.get(name, ())
        if items:
            lines += ["", f"### {TITLES[name]} ({len(items)})", "", *_table(items)]
    if document["stale_allowances"]:
        lines += ["", "### stale allowances", ""]
        lines += [f"- `{entry['where']}`: `{entry['path']}`" for entry in document["stale_allowances"]]
    return "\n".join(lines) + "\n"


def _table(items: list[dict[str, Any]]) -> list[str]:
    if "values" in items[0]:
        rows = [(i["key"], i["file"].upper(), _quoted(v["value"]), _names(v["processes"])) for i in items
                for v in i["values"]]  # fmt: skip
        return _rows(("key", "file", "value", "processes"), rows)
    if "status" in items[0]:
        rows = [(i["key"], i["status"], _quoted(i["asked"]), i["source"], _quoted(i["effective"]), i["allowed"] or "")
                for i in items]  # fmt: skip
        return _rows(("key", "status", "asked", "by", "log says", "allowed"), rows)
    rows = [(i["group"], i["key"], _quoted(i["a"]) if "a" in i else "", _quoted(i["b"]) if "b" in i else "",
             i.get("allowed") or "") for i in items]  # fmt: skip
    return _rows(("group", "key", "A", "B", "allowed"), rows)


def _rows(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *cells)]


# --- the command ---------------------------------------------------------------------------------


def choose(log: ConfigLog, block: str, most: int) -> list[int]:
    """Return the indexes of the configurations that --block names.

    Args:
      log: one that holds a single configuration offers no choice: it is the one compared.
      block: `last`, `all` or a number from 1.
      most: configurations in the log that has most of them; no number beyond it is right.

    Raises:
      BenchError: the log has fewer.
    """
    if block == "all":
        return list(range(len(log.rounds)))
    if block == "last" or (len(log.rounds) == 1 and int(block) <= most):
        return [len(log.rounds) - 1]
    number = int(block)
    if number > len(log.rounds):
        raise BenchError(
            f"--block {number}, but only {len(log.rounds)} configuration(s) here", where=log.source, todo="name another"
        )
    return [number - 1]


def _block(text: str) -> str:
    if text not in ("last", "all") and not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"a number from 1, `last` or `all` expected, got {text!r}")
    return text


def build_parser() -> argparse.ArgumentParser:
    """Return the argument parser."""
    parser = argparse.ArgumentParser(
        prog=TOOL, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("a", metavar="A", help="log, bench result JSON or key=value file; - is stdin")
    parser.add_argument("b", metavar="B", nargs="?", help="the same; may be left out with --asked")
    parser.add_argument("--block", type=_block, default="last", metavar="N|last|all",
                        help="which configuration of a log that holds several (default: last)")  # fmt: skip
    parser.add_argument("--ignore", action="append", default=[], metavar="GLOB",
                        help="treat these keys as volatile too; may be given again")  # fmt: skip
    parser.add_argument("--no-default-ignore", action="store_true", help="count run names and directories as well")
    parser.add_argument("--allow", metavar="FILE",
                        help="YAML list of expected differences, each with a reason; paths are keys (of what --asked "
                        "finds: asked/KEY)")  # fmt: skip
    parser.add_argument("--asked", metavar="RENDER",
                        help="a launch or bench render: check that what it asks for took effect")  # fmt: skip
    parser.add_argument("--summary", action="store_true", help="only the counts")
    parser.add_argument("--format", choices=("text", "json", "markdown"), default="text", help="default: text")
    parser.add_argument("--json", action="store_const", const="json", dest="format", help="same as --format json")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the tool; return its exit status."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.b is None and args.asked is None:
        parser.error("B is missing: give two logs, or one log and --asked RENDER")
    if [args.a, args.b, args.asked, args.allow].count("-") > 1:
        parser.error("only one input can be stdin (-)")
    return run_tool(TOOL, lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    rules = make_rules(args.ignore, not args.no_default_ignore, load_allow_list(args.allow, (*LISTS, *STATUSES)))
    asked, notes = asked_options(args.asked) if args.asked else ([], [])
    logs = {name: read_configs(path) for name, path in (("a", args.a), ("b", args.b)) if path is not None}
    for note in [*notes, *(note for log in logs.values() for note in log.notes)]:
        complain(TOOL, note)
    most = max(len(log.rounds) for log in logs.values())
    chosen = {name: choose(log, args.block, most) for name, log in logs.items()}
    for name, log in logs.items():
        for note in _fragments(log, chosen[name]):
            complain(TOOL, note)
    result = Comparison()
    for name, log in logs.items():
        disagreements(log, name, chosen[name], rules, result)
    if "b" in logs:
        _compare_blocks(logs, chosen, args.block == "all", rules, result)
    for name, log in logs.items() if asked else ():
        for index in chosen[name]:
            check_asked(asked, log.rounds[index][0].values, name, rules, result)
    sizes = {name: _size(log, chosen[name]) for name, log in logs.items()}
    document = report(result, sizes, rules, args.summary)
    emit({"text": text_report, "json": dump_json, "markdown": markdown_report}[args.format](document))
    return EXIT_OK if document["same"] else EXIT_DIFFERENT


def _fragments(log: ConfigLog, chosen: list[int]) -> list[str]:
    """Return a note for each chosen configuration far smaller than another one of its log."""
    most = max(len(block.values) for blocks in log.rounds for block in blocks)
    sizes = ((index + 1, len(log.rounds[index][0].values)) for index in chosen)
    return [
        f"{log.source}: configuration {number} has {size} keys, another has {most}; --block chooses"
        for number, size in sizes
        if 2 * size < most
    ]


def _compare_blocks(
    logs: dict[str, ConfigLog], chosen: dict[str, list[int]], every: bool, rules: Rules, result: Comparison
) -> None:
    """Compare the chosen configurations pairwise; one without a partner is compared with nothing."""
    for position in range(max(len(indexes) for indexes in chosen.values())):
        left, right = (
            logs[name].rounds[chosen[name][position]][0].values if position < len(chosen[name]) else {} for name in "ab"
        )
        compare(left, right, rules, result, position + 1 if every else None)


def _size(log: ConfigLog, chosen: list[int]) -> dict[str, Any]:
    blocks = log.rounds[chosen[-1]]
    number: int | str = chosen[0] + 1 if len(chosen) == 1 else "all"
    return {"keys": len(blocks[0].values), "blocks": len(log.rounds), "block": number, "processes": len(blocks)}


if __name__ == "__main__":
    raise SystemExit(main())
