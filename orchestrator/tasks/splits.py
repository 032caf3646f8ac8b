"""Prompts of tasks that draw their start states: endless training, fixed held-out, never the same in both.

Guarantee: the SHA-256 of a start state alone decides its split, so the two are disjoint whatever the seeds.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator

from orchestrator.api import Prompt

HELDOUT_SHARE = 5  # one hash in this many is held out
_PATIENCE = 200  # draws in a row without anything new, and there is nothing new

Draw = Callable[[random.Random], str]
"""Draws one start state, written as a payload."""


def key_of(payload: str) -> str:
    """SHA-256 (hex): identity of a start state."""
    return hashlib.sha256(payload.encode()).hexdigest()


def is_heldout(payload: str) -> bool:
    """Whether it belongs to the held-out split; otherwise to training."""
    return int(key_of(payload)[:8], 16) % HELDOUT_SHARE == 0


def prompt_of(task: str, payload: str) -> Prompt:
    """The prompt of a start state; its seed follows from it."""
    key = key_of(payload)
    return Prompt(key=key, task=task, seed=int(key[:8], 16), payload=payload)


def training(task: str, draw: Draw, stream: str) -> Iterator[Prompt]:
    """Endless; ``stream`` names the sequence. Raises ValueError when the task has no start state for training."""
    chance, misses = random.Random(f"{task}/{stream}"), 0
    while misses < _PATIENCE:
        payload = draw(chance)
        misses = misses + 1 if is_heldout(payload) else 0
        if not misses:
            yield prompt_of(task, payload)
    raise ValueError(f"task {task}: no start state for training in {_PATIENCE} draws")


def heldout(task: str, draw: Draw, n: int) -> tuple[Prompt, ...]:
    """``n`` distinct ones, always the same. Raises ValueError when there are not so many."""
    chance, found, misses = random.Random(f"{task}/heldout"), dict[str, None](), 0
    while len(found) < n:
        payload = draw(chance)
        if is_heldout(payload) and payload not in found:
            found[payload], misses = None, 0
        elif (misses := misses + 1) > _PATIENCE * HELDOUT_SHARE:
            raise ValueError(f"{n} held-out prompts: there are only about {len(found)}")
    return tuple(prompt_of(task, payload) for payload in found)
