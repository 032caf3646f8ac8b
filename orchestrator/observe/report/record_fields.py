"""Fields of a run's files, read one by one: each is what it should be, or an error says so."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from orchestrator.api import ConfigError
from orchestrator.api.jsontext import parse_object


def seconds(value: Any) -> float:
    """Finite, or a ValueError."""
    seconds = float(value)
    if not math.isfinite(seconds):
        raise ValueError(f"{seconds} seconds")
    return seconds


def json_object(file: Path) -> dict[str, Any]:
    """A JSON object from a file, {} when there is no such file."""
    if not file.is_file():
        return {}
    try:
        return parse_object(file.read_bytes())
    except ValueError as error:
        raise ConfigError("run", str(file), f"is damaged: {error}") from error


def texts(data: Any) -> dict[str, str]:
    if isinstance(data, dict):
        return {str(key): str(value) for key, value in data.items()}
    return {"": str(data)} if data else {}


def counts(data: Any) -> dict[int, int]:
    return {int(lag): int(count) for lag, count in sorted((data or {}).items(), key=lambda item: int(item[0]))}
