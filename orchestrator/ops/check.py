"""What a check of ``rl-coserve doctor`` is, and what it finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail", "skip"]

LIGHT_LIMIT = 10.0  # seconds for a check that only reads


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found."""

    status: Status
    detail: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """One question. ``isolated`` ones run in a process of their own."""

    name: str
    run: Callable[[], Finding]
    limit: float = LIGHT_LIMIT  # seconds
    isolated: bool = False
