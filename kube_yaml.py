"""Write a Kubernetes object as YAML that Go's parser reads exactly as Python's does.

PyYAML's own dumper leaves strings such as `1e-6`, `0o17` or `y` unquoted (numbers and booleans to the
API server), folds long lines, and gives up on literal blocks for a blank at a line's end. Here a string
is written plain only if no YAML 1.1 or 1.2 parser can take it for anything else, text of several lines
is a literal block, nothing is folded and the order of keys is kept. Same object, same bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

# A letter, slash or `--flag` first; then nothing that ends or re-types a plain scalar in either YAML version.
_PLAIN = re.compile(
    r"(?:--(?=[A-Za-z])|-(?=[A-Za-z]{2}))?[A-Za-z/][A-Za-z0-9_./+=@%,()$^~;-]*(?::[A-Za-z0-9_./+=@%,()$^~;-]+)*"
)
# Booleans and nulls of YAML 1.1 (Kubernetes' Go parser) and 1.2, in any case; the rest is caution.
_RESERVED = frozenset("y n yes no on off true false null nan inf infinity".split())
# What a literal block cannot hold: controls, and everything that some YAML version takes for a line break.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ufeff\ud800-\udfff\ufffe\uffff]")


def dump(document: dict[str, Any]) -> str:
    """Return a mapping of str, int, float, bool, None, lists and mappings as a block-style YAML document.

    Raises:
      TypeError: a value of another type, which no Kubernetes object holds.
    """
    return "".join(_mapping(document, ""))


def _mapping(mapping: dict[Any, Any], indent: str, first: str | None = None) -> Iterator[str]:
    for number, (key, value) in enumerate(mapping.items()):
        yield first if first is not None and number == 0 else indent
        yield (_scalar(key, indent) if not isinstance(key, str) else key if _is_plain(key) else _quoted(key)) + ":"
        yield from _value(value, indent)


def _value(value: Any, indent: str) -> Iterator[str]:
    """Yield what follows a `key:`, line break included. Lists stand at the indent of their key."""
    if isinstance(value, dict) and value:
        yield "\n"
        yield from _mapping(value, indent + "  ")
    elif isinstance(value, list) and value:
        yield "\n"
        yield from _sequence(value, indent)
    else:
        yield f" {_scalar(value, indent)}\n"


def _sequence(items: list[Any], indent: str, first: str | None = None) -> Iterator[str]:
    for number, item in enumerate(items):
        dash = (first if first is not None and number == 0 else indent) + "- "
        if isinstance(item, dict) and item:
            yield from _mapping(item, indent + "  ", first=dash)
        elif isinstance(item, list) and item:
            yield from _sequence(item, indent + "  ", first=dash)
        else:
            yield f"{dash}{_scalar(item, indent)}\n"


def _scalar(value: Any, indent: str) -> str:
    if isinstance(value, str):
        if value.strip("\n") and "\n" in value and not _UNPRINTABLE.search(value):
            return _literal(value, indent + "  ")
        return value if _is_plain(value) else _quoted(value)
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        text = repr(value)  # YAML 1.1 wants a point in the mantissa: 1e-06 would be a string
        return text if "." in text else text.replace("e", ".0e")
    if isinstance(value, dict | list) and not value:
        return "{}" if isinstance(value, dict) else "[]"
    raise TypeError(f"{type(value).__name__} has no place in a Kubernetes object")


def _is_plain(text: str) -> bool:
    return bool(_PLAIN.fullmatch(text)) and text.lower() not in _RESERVED


def _quoted(text: str) -> str:
    # A JSON string is a YAML double-quoted scalar, save for what JSON may leave unescaped and YAML may not.
    quoted = json.dumps(text, ensure_ascii=False)
    return _UNPRINTABLE.sub(lambda m: f"\\u{ord(m[0]):04x}", quoted)


def _literal(text: str, indent: str) -> str:
    body = text.rstrip("\n")
    chomp = {0: "-", 1: ""}.get(len(text) - len(body), "+")
    # Without the indicator a parser would take the indent of the first line for that of the block.
    hint = "2" if body[0] in " \t\n" else ""
    lines = [indent + line if line else "" for line in (text[:-1] if chomp != "-" else text).split("\n")]
    return f"|{hint}{chomp}\n" + "\n".join(lines)
