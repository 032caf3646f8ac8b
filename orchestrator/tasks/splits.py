"""Prompts of tasks that draw their start states: endless training, fixed held-out, never the same in both.

Guarantee: the SHA-256 of a start state alone decides its split, so the two are disjoint whatever the seeds.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import TypeVar

from orchestrator.api import Prompt

HELDOUT_SHARE = 5  # one hash in this many is held out
_PATIENCE = 200  # draws in a row without anything new, and there is nothing new

T = TypeVar("T")
Draw = Callable[[random.Random], str]
"""Draws one start state, written as a payload."""
Identity = Callable[[str], str]
"""What of a payload says whether two start states are the same."""


def key_of(identity: str) -> str:
    """SHA-256 (hex) of a start state's identity."""
    return hashlib.sha256(identity.encode()).hexdigest()


def is_heldout(key: str) -> bool:
    """Whether it belongs to the held-out split; otherwise to training."""
    return int(key[:8], 16) % HELDOUT_SHARE == 0


def training(task: str, draw: Draw, identity: Identity, stream: str) -> Iterator[Prompt]:
    """Endless; ``stream`` names the sequence. Raises ValueError when the task has no start state for training."""
    chance, misses = random.Random(f"{task}/{stream}"), 0
    while misses < _PATIENCE:
        payload = draw(chance)
        key = key_of(identity(payload))
        misses = misses + 1 if is_heldout(key) else 0
        if not misses:
            yield prompt_of(task, key, payload)
    raise ValueError(f"task {task}: no start state for training in {_PATIENCE} draws")


def in_turn(task: str, items: Sequence[T], seed: int) -> Iterator[T]:
    """Endless: all of them in an order that the seed decides, and only then all of them again."""
    for epoch in count():
        order = list(range(len(items)))
        random.Random(f"{task}/train/{seed}/{epoch}").shuffle(order)
        yield from (items[place] for place in order)


def heldout(task: str, draw: Draw, identity: Identity, n: int) -> tuple[Prompt, ...]:
    """``n`` distinct ones, always the same. Raises ValueError when there are not so many."""
    chance, found, misses = random.Random(f"{task}/heldout"), dict[str, Prompt](), 0
    while len(found) < n:
        payload = draw(chance)
        key = key_of(identity(payload))
        if is_heldout(key) and key not in found:
            found[key], misses = prompt_of(task, key, payload), 0
        elif (misses := misses + 1) > _PATIENCE * HELDOUT_SHARE:
            raise ValueError(f"{n} held-out prompts (task.heldout_maps): there are only about {len(found)}")
    return tuple(found.values())


def prompt_of(task: str, key: str, payload: str) -> Prompt:
    """A start state as a prompt; its seed follows from what it is."""
    return Prompt(key=key, task=task, seed=int(key[:8], 16), payload=payload)
