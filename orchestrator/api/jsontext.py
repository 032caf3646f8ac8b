"""Reads JSON from a file or another process with a single kind of error, and writes long JSON in pieces."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

DEPTH = 64  # levels of nesting that parsed text may have; nobody here writes ten
PIECE = 4096  # numbers in a piece: some 3 ms, in which nobody else has the interpreter's lock


def parse(text: str | bytes, *, finite: bool = False) -> Any:
    """The value. Raises only ValueError: also for text nested over :data:`DEPTH` levels, with a number of thousands of digits or
    half of a surrogate pair, or that is not UTF-8. ``finite``: NaN and infinities, which JSON does not have, are refused too."""
    if isinstance(text, bytes):
        text = text.removeprefix(codecs.BOM_UTF8).decode()
    elif not text.isascii():
        text.encode()
    try:
        value = json.loads(text, parse_constant=_refuse) if finite else json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if text.count("[") + text.count("{") > DEPTH and _is_deep(value):
        raise ValueError(f"nested over {DEPTH} levels")
    if "\\ud" in text or "\\uD" in text:
        json.dumps(value, ensure_ascii=False).encode()
    return value


def parse_object(text: str | bytes, *, finite: bool = False) -> dict[str, Any]:
    """The same of a JSON object; anything else is a ValueError too."""
    value = parse(text, finite=finite)
    if not isinstance(value, dict):
        raise ValueError(f"not a JSON object but {type(value).__name__}")
    return value


def _is_deep(value: Any) -> bool:
    """Level by level: what walks the value later may recurse."""
    level: list[Any] = [value]
    for _ in range(DEPTH):
        inside = [item.values() if type(item) is dict else item for item in level if type(item) in (dict, list)]
        if not inside:
            return False
        level = [item for items in inside for item in items if type(item) in (dict, list)]
    return bool(level)


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def pieces(value: Any, separators: tuple[str, str] = (", ", ": ")) -> Iterator[str]:
    """The text of ``json.dumps(value, separators=separators)``, piece by piece: Python's encoder holds the GIL until a value is
    complete, a second for a million numbers. A dataclass is written as an object of its fields, an iterator of lists as one
    list, without holding all of it. Raises TypeError for what JSON cannot represent."""
    comma, colon = separators
    if isinstance(value, Mapping):
        yield from _joined("{}", comma, ((_text(key) + colon, item) for key, item in value.items()), separators)
    elif is_dataclass(value) and not isinstance(value, type):
        named = ((_text(item.name) + colon, getattr(value, item.name)) for item in fields(value))
        yield from _joined("{}", comma, named, separators)
    elif isinstance(value, Iterator):
        before = "["
        for items in value:
            yield before + json.dumps(items, separators=separators)[1:-1]
            before = comma
        yield "[]" if before == "[" else "]"
    elif not _is_list(value) or not value or isinstance(value[0], int | float | str):
        yield from _flat(value, separators)
    else:
        yield from _joined("[]", comma, (("", item) for item in value), separators)


def _joined(brackets: str, comma: str, items: Iterator[tuple[str, Any]], separators: tuple[str, str]) -> Iterator[str]:
    before = brackets[0]
    for name, item in items:
        yield before + name
        yield from pieces(item, separators)
        before = comma
    yield brackets if before == brackets[0] else brackets[1]


def _flat(value: Any, separators: tuple[str, str]) -> Iterator[str]:
    if not _is_list(value) or len(value) <= PIECE:
        yield json.dumps(value[:] if _is_list(value) else value, separators=separators)
        return
    before = "["
    for start in range(0, len(value), PIECE):
        yield before + json.dumps(value[start : start + PIECE], separators=separators)[1:-1]
        before = separators[0]
    yield "]"


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _text(key: Any) -> str:
    text = json.dumps(key)
    return text if isinstance(key, str) else f'"{text}"'
