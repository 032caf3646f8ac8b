"""What the simulated benchmarks share: one row a printed figure, the simulator's own error beside it, the result's frame.

A row says where the printed number is from. ``explained`` is why ours differs, where it does by more than the simulator's
error; rows that do not fit are shown like the others.
"""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from scripts.bench.result import frame

_RESULTS = Path(str(files("orchestrator"))).parent / "docs" / "results"


def own_error() -> dict[str, Any]:
    """Of the simulator: from the committed result of ``sim-error``, where there is one."""
    file = _RESULTS / "sim-error.json"
    if not file.is_file():
        return {"step_time": None, "papers_median": None, "source": "no committed result of bench sim-error here"}
    found = json.loads(file.read_text(encoding="utf-8"))
    return {
        "step_time": found["value"],
        "papers_median": found["detail"]["papers"]["median_error"],
        "source": "docs/results/sim-error.json",
    }


def row(
    what: str, printed: str, low: float, high: float, ours: float, source: str, explained: str = ""
) -> dict[str, Any]:
    """A figure: the printed range, and ours. ``off``: how far ours is outside of it, relative to its nearer end."""
    off = 0.0 if low <= ours <= high else (ours / high - 1.0 if ours > high else ours / low - 1.0)
    return {
        "what": what,
        "printed": printed,
        "simulated": round(ours, 4),
        "off": round(off, 4),
        "source": source,
        "explained": explained,
    }


def exactly(what: str, printed: float, ours: float, source: str, explained: str = "") -> dict[str, Any]:
    """A row whose printed figure is one number."""
    return row(what, f"{printed}", printed, printed, ours, source, explained)


def within(what: str, low: float, high: float, ours: float, source: str, explained: str = "") -> dict[str, Any]:
    """A row whose printed figures span a range."""
    return row(what, f"{low} to {high}", low, high, ours, source, explained)


def simulated_frame(name: str, *, detail: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The result of a simulated benchmark, with the simulator's own error: :func:`scripts.bench.result.frame`."""
    return frame(name, "simulated", detail={**detail, "simulator_error": own_error()}, **more)
