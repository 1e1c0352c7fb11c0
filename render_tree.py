"""Launch and bench renders as trees whose every leaf has a name: what diff_render.py compares.

`document_tree` turns a Kubernetes object into nested maps: lists by their Kubernetes keys instead of
positions, container commands taken apart into wrapper, assignments, program and flags, flag strings
(MAXTEXT_EXTRA_FLAGS, LIBTPU_INIT_ARGS, XLA_FLAGS, proxy args) into single flags. A leaf's path reads

    spec/replicatedJobs/proc/template/.../containers/main/command/MAXTEXT_EXTRA_FLAGS/num_moe_token_chunks

`trainer_tree` is the view in which a launch's trainer and its bench have the same paths: the trainer argv
and the orchestrator argv of a bench stand in its TRAINER_ARGV and ORCH_ARGV. Nothing is lost but the order of
what has a key; where order has a meaning, the map says so. Standard library and PyYAML.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from bench_common import MASKED, BenchError, is_secret, mask
from launch_render import (
    DRIVER_FILE,
    HEREDOC_MARKER,
    RUNTIME_MODULE,
    Client,
    Document,
    Render,
    Word,
    client_containers,
    parse_client,
    script_role,
    shell_words,
)


@dataclass(frozen=True)
class Leaf:
    """A value at the end of a path."""

    value: Any  # a scalar, a list of scalars, or None for a flag without a value
    form: str = "yaml"  # yaml, set, text, source, secret, flag, number (a flag that is one), maxtext (a key), arg, xla
    superseded: bool = False  # a later flag or variable of the same name wins
    text: str | None = None  # of a source, whose value is its hash


@dataclass
class Map:
    """Named children. `order` says what their order means: "" nothing, "noise" nothing but shown, "real" something."""

    children: dict[str, Map | Leaf] = field(default_factory=dict)
    order: str = ""


Node = Map | Leaf


# --- paths ---------------------------------------------------------------------------------------


def path_text(steps: Iterable[str]) -> str:
    """Return a path as text: steps joined by `/`, a `/` or `~` inside a step as ~1 or ~0 (RFC 6901)."""
    return "/".join(step.replace("~", "~0").replace("/", "~1") for step in steps)


def path_steps(text: str) -> list[str]:
    """Return the steps of a path's text."""
    return [step.replace("~1", "/").replace("~0", "~") for step in text.split("/")]


def plain(node: Node, name: str = "", sources: bool = False) -> Any:
    """Return a node as JSON holds it, secrets masked by the names of their steps.

    Args:
      node: a map or a leaf.
      name: the last step of its path.
      sources: show embedded sources as text instead of their hash.
    """
    if isinstance(node, Map):
        return {step: plain(child, step, sources) for step, child in node.children.items()}
    if node.form == "source":
        return node.text if sources else node.value
    if node.form == "secret":
        return MASKED
    if isinstance(node.value, list):
        return [mask_text(item) if isinstance(item, str) else item for item in node.value]
    if isinstance(node.value, str):
        return mask(name.partition(" (overridden")[0], mask_text(node.value))
    return node.value


# What stands between a secret's name and its value: `NAME=`, `--name `, `"name": ` or `name: ` (also escaped),
# `"name", "value": ` of a Kubernetes env entry in JSON.
_NAMED = re.compile(
    r"(?<![\w.-])(?P<flag>--?)?(?P<name>[A-Za-z_][\w.-]*+)"
    r"(?:=|(?:\\*[\"'])?\s*:\s*|\\*[\"']\s*,\s*\\*[\"']value\\*[\"']\s*:\s*|(?P<blank>[ \t]+)(?!-))"
)
_SHELL_WORD = re.compile(r"(?:\"(?:[^\"\\]|\\.)*\"|'[^']*'|[^\s\"'])+", re.DOTALL)
_CREDENTIAL = re.compile(r"((?:[Aa]uthorization: *\w+|Bearer) +|://[^/\s:@\"']*:)[^\s\"'@]+")


def mask_text(text: str) -> str:
    """Return a script, or any text, with the values masked that secret variables, flags and fields have in it."""
    pieces, end = [], 0
    for match in _NAMED.finditer(text):
        is_value = match["flag"] or not match["blank"]  # a blank ends a name unless it is a flag's
        if match.start() < end or not is_value or not is_secret(match["name"]):
            continue
        value = _SHELL_WORD.match(text, match.end())
        if value:
            pieces += [text[end : match.end()], MASKED]
            end = value.end()
    return _CREDENTIAL.sub(rf"\1{MASKED}", "".join([*pieces, text[end:]]))


# --- Kubernetes objects --------------------------------------------------------------------------

# Merge keys of the Kubernetes API (patchMergeKey) and, for atomic lists, the field that tells items apart.
_LIST_KEYS: dict[str, tuple[str, ...]] = {
    "volumeMounts": ("mountPath",), "volumeDevices": ("devicePath",), "ports": ("containerPort", "port", "name"),
    "tolerations": ("key", "effect"), "conditions": ("type",), "onPodConditions": ("type",), "hostAliases": ("ip",),
    "topologySpreadConstraints": ("topologyKey",), "matchExpressions": ("key", "operator"),
    "matchFields": ("key", "operator"),
}  # fmt: skip
_ANY_KEYS = (
    "name",
    "key",
    "topologyKey",
    "type",
    "action",
    "ip",
)  # of other lists: the first that all items have
_FIRST_MATCH_WINS = ("rules",)  # failurePolicy and podFailurePolicy
_SETS = ("values", "accessModes", "targetReplicatedJobs", "onJobFailureReasons", "finalizers", "add", "drop")
_CONTAINER_LISTS = ("containers", "initContainers")
_FLAG_VARIABLES = re.compile(r"(LIBTPU_INIT_ARGS|\w*XLA_FLAGS|\w*_EXTRA_ARGS)$")
_MAXTEXT_VARIABLES = ("MAXTEXT_EXTRA_FLAGS",)


@dataclass(frozen=True)
class _Context:
    """What the walk over one document needs to know."""

    where: str  # how messages name the document
    notes: list[str]
    as_trainer: bool  # a bench's TRAINER_ARGV and ORCH_ARGV stand where a launch has them


def document_tree(document: Document, notes: list[str], as_trainer: bool = False) -> Map:
    """Return a Kubernetes object as a tree. Commands that cannot be taken apart stay text, with a note."""
    tree = _mapping(document.data, _Context(document.where, notes, as_trainer))
    for name in ("data", "stringData") if document.kind == "Secret" else ():
        values = tree.children.get(name)
        for step, child in values.children.items() if isinstance(values, Map) else ():
            values.children[step] = replace(child, form="secret") if isinstance(child, Leaf) else child
    return tree


def _tree(value: Any, context: _Context, name: str = "") -> Node:
    if isinstance(value, dict):
        return _mapping(value, context)
    if isinstance(value, list):
        return _list(value, context, name)
    return Leaf(value)


def _mapping(value: dict[Any, Any], context: _Context) -> Map:
    children: dict[str, Node] = {}
    value = _with_whole_command(value)
    for key, item in value.items():
        if key in _CONTAINER_LISTS and isinstance(item, list):
            continue
        if key == "command" and isinstance(item, list):
            children["command"] = _command(item, value, context)
        elif key == "args" and isinstance(item, list) and all(isinstance(arg, str) for arg in item):
            children["args"] = flag_map(item, "arg")
        else:
            children[str(key)] = _tree(item, context, str(key))
    containers: dict[str, Node] = {}
    for key in _CONTAINER_LISTS:  # one map, so that a container that moves between the lists is one change
        for step, item in _keyed(value[key], ("name",)) if isinstance(value.get(key), list) else ():
            node = _tree(item, context)
            if isinstance(node, Map):
                node.children["(list)"] = Leaf(key)
            containers[free_step(step, containers)] = node
    if containers or any(value.get(key) == [] for key in _CONTAINER_LISTS):
        children["containers"] = Map(containers)
    return Map(children)


def _with_whole_command(value: dict[Any, Any]) -> dict[Any, Any]:
    """Return a container whose `args` are the script of its `command: [bash, -c]` with the script in the command."""
    command, args = value.get("command"), value.get("args")
    if not (isinstance(command, list) and command and re.fullmatch(r"-\w*c", str(command[-1]))):
        return value
    if not (isinstance(args, list) and len(args) == 1 and isinstance(args[0], str)):
        return value
    return {key: command + args if key == "command" else item for key, item in value.items() if key != "args"}


def _list(items: list[Any], context: _Context, name: str) -> Node:
    if not all(isinstance(item, dict) for item in items) or not items:
        if all(not isinstance(item, dict | list) for item in items):
            return Leaf(list(items), "set" if name in _SETS else "yaml")
        return Map({f"[{i}]": _tree(item, context) for i, item in enumerate(items)}, "real")
    if name == "env":
        return _env(items, context)
    keys = _LIST_KEYS.get(name) or next(((key,) for key in _ANY_KEYS if all(key in item for item in items)), ())
    children = {step: _tree(item, context) for step, item in _keyed(items, keys)}
    return Map(children, "real" if name in _FIRST_MATCH_WINS else "")


def _keyed(items: list[Any], keys: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Yield (step, item) in order; items with one key are told apart by #2, #3, items without any by position.

    Which of several is #2 follows from what they hold, so that their order in the file is nothing.
    """
    steps = [_step(item, keys) or f"[{index}]" for index, item in enumerate(items)]
    shared = {step for step, count in Counter(steps).items() if count > 1}
    ranks: dict[int, int] = {}
    for step in sorted(shared):
        alike = sorted((i for i, s in enumerate(steps) if s == step), key=lambda i: repr(_sorted_items(items[i])))
        ranks.update((index, rank) for rank, index in enumerate(alike))
    for index, item in enumerate(items):
        rank = ranks.get(index, 0)
        yield (f"{steps[index]}#{rank + 1}" if rank else steps[index]), item


def _step(item: Any, keys: tuple[str, ...]) -> str:
    parts = [str(item[key]) for key in keys if isinstance(item, dict) and key in item]
    if keys == _LIST_KEYS["ports"]:
        parts = parts[:1]
    if keys == ("action",):  # a podFailurePolicy rule: FailJob onExitCodes
        parts += sorted(key for key in item if key.startswith("on"))
    return " ".join(parts)


def _sorted_items(value: Any) -> Any:
    """Return a parsed value in one order of its keys, whatever their order was."""
    if isinstance(value, dict):
        return sorted((str(key), _sorted_items(item)) for key, item in value.items())
    return [_sorted_items(item) for item in value] if isinstance(value, list) else (type(value).__name__, str(value))


def free_step(step: str, taken: Collection[str]) -> str:
    """Return a step that is not taken yet: itself, or `STEP#2`, `STEP#3`, ..."""
    return next(s for s in (step, *(f"{step}#{n}" for n in range(2, len(taken) + 3))) if s not in taken)


def _env(items: list[dict[str, Any]], context: _Context) -> Map:
    """Return a container's env by name; of a name given twice the last one wins."""
    pairs = []
    texts = [(str(item.get("name")), str(item.get("value", ""))) for item in items]
    for index, item in enumerate(items):
        name = str(item.get("name", f"[{index}]"))
        if set(item) <= {"name", "value"}:
            value = item.get("value", "")
            pairs.append((name, _variable(name, value) if isinstance(value, str) else Leaf(value)))
        else:
            pairs.append((name, _mapping({k: v for k, v in item.items() if k != "name"}, context)))
    return _last_wins(pairs + _set_too_early(texts, _KUBE_REFERENCE), "")


_KUBE_REFERENCE = re.compile(r"(?<!\$)\$\(([A-Za-z_][\w.-]*)\)")
_SHELL_REFERENCE = re.compile(r"\$\{?([A-Za-z_]\w*)")


def _set_too_early(texts: list[tuple[str, str]], reference: re.Pattern[str]) -> list[tuple[str, Node]]:
    """Return a node `NAME (set before)` for each variable that refers to one that is set only after it.

    Neither Kubernetes nor a shell looks ahead: such a reference gets no value, or an older one. So the one order
    of variables that has a meaning is not lost.
    """
    first: dict[str, int] = {}
    for place, (name, _) in enumerate(texts):
        first.setdefault(name, place)
    found: list[tuple[str, Node]] = []
    for place, (name, text) in enumerate(texts):
        later = sorted({other for other in reference.findall(text) if first.get(other, place) > place})
        found += [(f"{name} (set before)", Leaf(later))] if later else []
    return found


def _last_wins(pairs: list[tuple[str, Node]], order: str) -> Map:
    """Return a map in which the last of a name has it, the others a step of their own."""
    total, seen = Counter(name for name, _ in pairs), Counter()
    children: dict[str, Node] = {}
    for name, node in pairs:
        seen[name] += 1
        if seen[name] < total[name]:
            children[f"{name} (overridden {total[name] - seen[name]})"] = _supersede(node)
        else:
            children[name] = node
    return Map(children, order)


def _supersede(node: Node) -> Node:
    if isinstance(node, Leaf):
        return replace(node, superseded=True)
    return Map({step: _supersede(child) for step, child in node.children.items()}, node.order)


# --- flags ---------------------------------------------------------------------------------------

# Flags of the trainer, the orchestrator and the bench driver that hold numbers (facts: argv tables of the launcher).
_NUMBER_FLAG = re.compile(
    r"--(mesh_\w+|\w*(_size|_length|_steps|_rate|_value|_fraction|_rank|_alpha|_eps|_decay|_interval|_interval_steps|_factor"
    r"|_dim|_heads|_tp|_fsdp|_expert|_dp|_replicas|_ratio|_ratio_min|_threshold|_s|_secs|_accuracy|_norm|_tpu|_row"
    r"|_concurrency|_staleness|_to_keep|_port|_turns|_period|_b1|_b2|_budget|_seconds)|num_\w+|max_\w+|port|temperature"
    r"|top_[pk]|beta|epsilon\w*|seed|learning_rate|weight_decay|b1|b2|steps|skew|repeats)$"
)


# MaxText keys whose values are names, not numbers, whatever they look like (configs/types.py).
_TEXT_KEY = re.compile(
    r"(\w*_)?(name|path|dir|subdir|directory|prompt|template|split|policy|topology|strategy|project|region|rule|tag)$"
)


def flag_map(words: Iterable[str], form: str, live: Callable[[str], bool] = lambda word: False) -> Map:
    """Return words as flags by name, in their order, the last of a name winning.

    `--name=value`, `--name value` and `key=value` are named by their name, a `--name` before another flag has
    no value, any other word is named by its place among its like, `(1)`, and makes the order count.

    Args:
      words: as the program gets them.
      form: xla (never `--name value`), arg, flag, or maxtext (key=value words too).
      live: whether the shell still changes a word.
    """
    pairs: list[tuple[str, Node]] = []
    loose = 0
    waiting = list(words)[::-1]
    while waiting:
        word = waiting.pop()
        name, equals, value = word.partition("=")
        if not name.startswith("-") and not (equals and form == "maxtext"):
            loose += 1
            pairs.append((f"({loose})", Leaf(word, "flag")))
            continue
        if waiting and not equals and _is_value(waiting[-1], form):
            equals, value = " ", waiting.pop()
            word = value
        shown = f"{value} [expanded when it runs]" if live(word) else value
        pairs.append((name, Leaf(shown if equals else None, _flag_form(name, form))))
    return _last_wins(pairs, "real" if loose else "noise")


def _is_value(word: str, form: str) -> bool:
    """Return whether the word after a `--name` is its value."""
    if form == "xla" or (form == "maxtext" and "=" in word):
        return False
    return not word.startswith("-") or bool(re.fullmatch(r"-[\d.]+(e-?\d+)?", word))


def _flag_form(name: str, form: str) -> str:
    """Return how the value of a flag is compared: numbers as numbers only where the field is one."""
    if form == "maxtext" and not name.startswith("-"):
        return "flag" if _TEXT_KEY.fullmatch(name) else "maxtext"
    if form in ("flag", "maxtext"):
        return "number" if _NUMBER_FLAG.match(name) else "flag"
    return form


def _variable(name: str, value: str, live: bool = False) -> Node:
    """Return the value of a variable: a map of flags where it is a list of flags, else a leaf."""

    def is_live(word: str) -> bool:
        return live and ("$" in word or "`" in word)

    words = value.split()
    if name in _MAXTEXT_VARIABLES:
        return flag_map(words, "maxtext", is_live)
    if _FLAG_VARIABLES.match(name) or (len(words) > 1 and all(word.startswith("--") for word in words)):
        return flag_map(words, "xla", is_live)
    return Leaf(f"{value} [expanded when it runs]" if live else value, "flag")


# --- commands ------------------------------------------------------------------------------------

_HEREDOC_BODY = re.compile(rf"(<<'({HEREDOC_MARKER}\w*)'[^\n]*)\n.*?^\2$", re.MULTILINE | re.DOTALL)


def _command(words: list[Any], container: dict[str, Any], context: _Context) -> Node:
    script = words[-1] if words and isinstance(words[-1], str) else ""
    if RUNTIME_MODULE in script or DRIVER_FILE in script:
        try:
            client = parse_client(container, (), script, context.where)
            return _client(client, words, context.as_trainer)
        except BenchError as error:
            context.notes.append(f"{_masked_message(error, script)}; compared as text")
    if len(words) >= 2 and re.fullmatch(r"-\w*c", str(words[-2])):
        return Map({"shell": Leaf([str(word) for word in words[:-1]]), **script_parts(script)})
    if not words or not all(isinstance(word, str) for word in words):
        return Leaf(list(words)) if all(not isinstance(word, dict | list) for word in words) else Leaf(str(words))
    split = next((i for i, word in enumerate(words) if "=" in word or word.startswith("-")), len(words))
    if words[1:2] == ["-m"]:  # python -m module
        split = next((i for i, word in enumerate(words[2:], 2) if "=" in word or word.startswith("-")), len(words))
    return Map({"program": Leaf(" ".join(words[:split]), "flag"), "argv": flag_map(words[split:], "maxtext")})


def _masked_message(error: BenchError, script: str) -> str:
    """Return a message about a script without the words that are masked in the script's text."""
    masked = mask_text(script)
    return re.sub(r"'([^']*)'", lambda m: m[0] if m[1] in masked else f"'{MASKED}'", str(error))


def _client(client: Client, words: list[Any], as_trainer: bool) -> Map:
    before = _HEREDOC_BODY.sub(r"\1 (source)", client.before)
    children: dict[str, Node] = {
        "shell": Leaf([str(word) for word in words[:-1]]),
        "wrapper": Map({"before": Leaf(before, "text"), "after": Leaf(client.after, "text")}),
        "program": Leaf(" ".join(_word(word) for word in client.program), "flag"),
    }
    if client.sources:
        children["sources"] = Map({name: _source(text) for name, text in client.sources.items()})
    carried = {"TRAINER_ARGV": "argv", "ORCH_ARGV": "(orchestrator)"} if client.is_bench and as_trainer else {}
    pairs = [(name, _assigned(client, name, word)) for name, word in client.assignments if name not in carried]
    pairs += _set_too_early([(n, word.value if word.live else "") for n, word in client.assignments], _SHELL_REFERENCE)
    assignments = _last_wins(pairs, "noise")
    if client.is_bench and as_trainer:
        for name, step in carried.items():
            if name in client.env:
                children[step] = flag_map(client.carried_argv(name), "flag")
        children["driver"] = _argv(client.argv)
    else:
        children["argv"] = _argv(client.argv)
    return Map(children | {f"{n}": node for n, node in assignments.children.items()}, "noise")


def _assigned(client: Client, name: str, word: Word) -> Node:
    if client.is_bench and name in ("TRAINER_ARGV", "ORCH_ARGV"):
        return flag_map(client.carried_argv(name), "flag")
    return _variable(name, word.value, word.live)


def _argv(words: list[Word]) -> Map:
    live = {word.value for word in words if word.live}
    return flag_map([word.value for word in words], "flag", live.__contains__)


def _word(word: Word) -> str:
    return word.raw if word.live else word.value


def _source(text: str) -> Leaf:
    digest = hashlib.sha256(text.encode()).hexdigest()
    return Leaf(f"sha256:{digest} ({text.count(chr(10))} lines)", "source", text=text)


_TELLING = re.compile(r"\bexport[ \t]+\w+=|^[ \t]*[A-Za-z_]\w*=|(^|[\s/(;&|])python[0-9.]*[ \t]")
_ASSIGNED = re.compile(r"[A-Za-z_]\w*=")
_PYTHON = re.compile(r"(\S*/)?python[0-9.]*")
LONGEST_STATEMENT_LINES = 400


def script_parts(script: str) -> dict[str, Node]:
    """Return a shell script that is no client of ours in parts: text, variables and Python commands.

    Commands that only assign (`export LIBTPU_INIT_ARGS='...'`) give variables, those that run Python or have
    variables of their own give these, their program and arguments; in the text a placeholder keeps their
    places. The rest stays text.
    """
    text: list[str] = []
    variables: list[tuple[str, Node]] = []
    runs: dict[str, Node] = {}
    lines = script.split("\n")
    index = 0
    while index < len(lines):
        count, words = _statement(lines, index) if _TELLING.search(lines[index]) else (1, None)
        pieces = [_part(segment, variables, runs) for segment in _segments(words or [])]
        text.append(" ".join(pieces) if words else lines[index])
        index += count
    return {"script": Leaf("\n".join(text), "text"), **_last_wins(variables, "").children, **runs}


def _statement(lines: list[str], start: int) -> tuple[int, list[Word] | None]:
    """Return how many lines the commands that begin on a line take, and their words; None where they are no words."""
    for count in range(1, min(LONGEST_STATEMENT_LINES, len(lines) - start) + 1):
        text = "\n".join(lines[start : start + count])
        if text.endswith("\\"):
            continue
        try:
            return count, shell_words(text)
        except BenchError:
            continue  # a quote goes on in the next line
    return 1, None


def _segments(words: list[Word]) -> Iterator[list[Word]]:
    """Yield the simple commands of a line, and the operators between them, each as a list of words."""
    segment: list[Word] = []
    for word in words:
        if word.operator:
            if segment:
                yield segment
            yield [word]
            segment = []
        else:
            segment.append(word)
    if segment:
        yield segment


def _part(words: list[Word], variables: list[tuple[str, Node]], runs: dict[str, Node]) -> str:
    """Take one simple command apart into `variables` or `runs`; return what the text has in its place."""
    exported = words[0].value == "export" and len(words) > 1
    leading = itertools.takewhile(lambda word: _ASSIGNED.match(word.raw), words[exported:])
    names = [word.text.partition("=")[0] for word in leading]
    if len(names) == len(words) - exported:
        variables += [_assignment(word) for word in words[exported:]]
        return f"{'export ' if exported else ''}({' '.join(names)})"
    if not exported and (names or _PYTHON.fullmatch(words[0].value)):
        step = f"run {len(runs) + 1}"
        runs[step] = _run(words[: len(names)], words[len(names) :])
        return f"({step})"
    return " ".join(_word(word) for word in words)


def _assignment(word: Word) -> tuple[str, Node]:
    name = word.text.partition("=")[0]
    return name, _variable(name, word.value.partition("=")[2], word.live)


def _run(assignments: list[Word], words: list[Word]) -> Map:
    """Return a command: its own variables, its program, and key=value and --flag arguments."""
    split = next((i for i, word in enumerate(words) if "=" in word.text or word.text.startswith("--")), len(words))
    children = _last_wins([_assignment(word) for word in assignments], "").children
    children["program"] = Leaf(" ".join(_word(word) for word in words[:split]), "flag")
    live = {word.value for word in words if word.live}
    children["argv"] = flag_map([word.value for word in words[split:]], "maxtext", live.__contains__)
    return Map(children)


# --- the trainer's view --------------------------------------------------------------------------


def roles(document: Document) -> list[str]:
    """Return what the clients of a document run: trainer, bench, orchestrator, ..."""
    return sorted(role for _, _, script in client_containers(document) if (role := script_role(script)))


def find_trainer(render: Render) -> Document | None:
    """Return the one document that runs the trainer or its bench; None where there is none or more than one."""
    found = (document for document in render.documents if {"trainer", "bench"} & set(roles(document)))
    first, second = next(found, None), next(found, None)
    return first if second is None else None


def trainer_tree(render: Render, notes: list[str]) -> Map:
    """Return the trainer of a render and the argv of its orchestrator, a launch's and a bench's alike."""
    document = find_trainer(render)
    assert document is not None  # the caller has asked
    tree = document_tree(document, notes, as_trainer=True)
    root = Map({"trainer": tree})
    carried = _take(tree, "(orchestrator)")
    if carried is not None:
        root.children["orchestrator"] = Map({"argv": carried})
        return root
    for other in (document for document in render.documents if "orchestrator" in roles(document)):
        try:
            for path, container, script in client_containers(other):
                client = parse_client(container, path, script, other.where)
                root.children["orchestrator"] = Map({"argv": _argv(client.argv)})
        except BenchError as error:
            notes.append(f"{error}; the orchestrator's argv is not compared")
    return root


def _take(node: Node, step: str) -> Node | None:
    """Remove the first child of this name from a tree and return it."""
    if isinstance(node, Leaf):
        return None
    if step in node.children:
        return node.children.pop(step)
    return next((found for child in node.children.values() if (found := _take(child, step)) is not None), None)
