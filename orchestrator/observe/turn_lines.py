"""A line of a run's ``turns.jsonl`` (:mod:`orchestrator.observe.view.turn_spans` writes it), for whoever reads that file.

Guarantee: what comes of a line has the types and finite times that its form promises, or is one ValueError.
"""

from __future__ import annotations

from typing import Any

from orchestrator.api.jsontext import parse


def parse_turn(line: str) -> tuple[str, int, str, float, float, float, float]:
    """Trajectory, turn, worker, then seconds: asked, answered, step began, step ended. Raises ValueError, as a kill may have
    cut it."""
    found = parse(line)
    if not isinstance(found, list) or [type(value) for value in found[:3]] != [str, int, str] or len(found) != 7:
        raise ValueError(f"no turn: {line:.100}")
    name, turn, worker, *times = found
    asked, answered, begun, ended = map(_second, times)
    return name, turn, worker, asked, answered, begun, ended


def _second(value: Any) -> float:
    if type(value) not in (int, float) or not abs(value) < 1e12:
        raise ValueError(f"no time: {value!r:.40}")
    return float(value)
