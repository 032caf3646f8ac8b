"""JSON from a file or another process, with one kind of error whatever is in it."""

from __future__ import annotations

import json
from typing import Any


def parse(text: str | bytes, *, finite: bool = False) -> Any:
    """The value. Raises ValueError, and nothing else: also for text that is nested beyond the stack, has a number of
    thousands of digits or is no UTF-8. ``finite``: NaN and infinities, which are no JSON, are refused too."""
    try:
        return json.loads(text, parse_constant=_refuse) if finite else json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def parse_object(text: str | bytes, *, finite: bool = False) -> dict[str, Any]:
    """The same of a JSON object; anything else is a ValueError too."""
    value = parse(text, finite=finite)
    if not isinstance(value, dict):
        raise ValueError(f"no JSON object but {type(value).__name__}")
    return value


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is not JSON")
