"""JSON from a file or another process, with one kind of error whatever is in it; and long JSON written in pieces."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

DEPTH = 64  # levels of nesting that parsed text may have; nobody here writes ten
PIECE = 4096  # numbers in a piece: some 3 ms, in which nobody else has the interpreter's lock


def parse(text: str | bytes, *, finite: bool = False) -> Any:
    """The value. Raises ValueError, and nothing else: also for text that is nested over :data:`DEPTH` levels, has a number of
    thousands of digits or half of a surrogate pair, which nothing could write down, or is no UTF-8. ``finite``: NaN and
    infinities, which are no JSON, are refused too."""
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
        raise ValueError(f"no JSON object but {type(value).__name__}")
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
    """The text that ``json.dumps(value, separators=separators)`` is in the end, piece by piece; records are the objects of their
    fields, an iterator is a list that is made as it is written, some items at a time. Python's
    encoder writes a value whole before it lets another thread go on, a million numbers for a second.
    Raises TypeError for what JSON has not."""
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
