"""Which of three numbers is the largest? A task for a pretrained model: what ``examples/smollm2.toml`` trains on.

The prompt is ``What is the largest number? 34, 58, 12``, the answer ``58``. Numbers have two digits. There are 117,480 questions,
and the same three numbers in another order are one question to the split, so neither is held out while the other is trained on.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from orchestrator.tasks.rewards import checked
from orchestrator.tasks.text import Reply, TextTask, replay_now
from orchestrator.tasks.vocabulary import CHARACTERS

NUMBERS, FROM, TO = 3, 10, 99


class LargestTask(TextTask):
    """See the module."""

    name = "largest"
    reward = "examples.largest:score"
    words = CHARACTERS  # printable ASCII: what a tokenizer's text is to the task
    max_turns = 1
    max_response_tokens = 3  # two digits, <end>
    max_prompt_tokens = 40
    max_reply_tokens = 0

    def draw(self, chance: random.Random) -> str:
        """``34, 58, 12``."""
        return ", ".join(map(str, chance.sample(range(FROM, TO + 1), NUMBERS)))

    def identity(self, payload: str) -> str:
        """In any order the same."""
        return str(sorted(_numbers(payload)))

    def play(self, payload: str) -> Largest:
        """One question."""
        return Largest(payload)

    def expert(self, payload: str) -> list[tuple[str, str]]:
        """The answer."""
        return [(Largest(payload).start(), str(max(_numbers(payload))))]

    def novice(self, answer: str, chance: random.Random) -> str:
        """Any number of two digits."""
        return str(chance.randint(FROM, TO))


class Largest:
    """One question. Raises ValueError when the payload is none."""

    def __init__(self, payload: str) -> None:
        self._payload, self._right = payload, str(max(_numbers(payload)))

    def start(self) -> str:
        """The question."""
        return f"What is the largest number? {self._payload}\n"

    async def act(self, said: str | None) -> Reply:
        """The answer, and the end."""
        if said is None:
            return Reply(done=True, invalid=True)
        return Reply(reward=float(said.strip() == self._right), done=True)


def score(payload: Mapping[str, Any]) -> dict[str, float]:
    """The reward: 1.0 for the largest number, else 0.0."""
    prompt, actions = checked(payload, LargestTask.name)
    return {"reward": replay_now(_SCORED, prompt, actions)}


def _numbers(payload: str) -> list[int]:
    return [int(number) for number in payload.split(", ")]


_SCORED = LargestTask(heldout=1)
