"""Nim, one move: take stones from a heap so that the other player, who then plays perfectly, loses. A single-turn game.

Four heaps of 0 to 7 stones; whoever takes the last stone wins. The prompt shows the heaps (``a3 b5 c0 d6``), the answer is
what a heap is brought down to (``b1``). A move wins when the exclusive or of all heaps is then 0 (Bouton, 1901). Every start
state has a winning move; a random legal one wins in about one of nine.
"""

from __future__ import annotations

import functools
import operator
import random

from orchestrator.tasks import vocabulary
from orchestrator.tasks.text import Reply, TextTask

HEAPS, MOST = "abcd", 7


class NimTask(TextTask):
    """See the module."""

    name = "nim"
    reward = "orchestrator.tasks.text_rewards:nim_move"
    words = vocabulary.words(f"{heap}{stones}" for heap in HEAPS for stones in range(MOST + 1))
    max_turns = 1
    max_response_tokens = 2
    max_prompt_tokens = len(HEAPS)
    max_reply_tokens = 0

    def draw(self, chance: random.Random) -> str:
        """The heaps, ``3/5/0/6``, lost for nobody yet."""
        while True:
            heaps = [chance.randint(0, MOST) for _ in HEAPS]
            if functools.reduce(operator.xor, heaps):
                return "/".join(map(str, heaps))

    def play(self, payload: str) -> Nim:
        """One move on these heaps."""
        return Nim(payload)

    def expert(self, payload: str) -> list[tuple[str, str]]:
        """The first winning move."""
        game = Nim(payload)
        return [(game.start(), next(move for move in self.words.words if game.wins(move)))]

    def novice(self, answer: str, chance: random.Random) -> str:
        """Any heap, any number."""
        return f"{chance.choice(HEAPS)}{chance.randint(0, MOST)}"


class Nim:
    """One position. Raises ValueError when the payload is none."""

    def __init__(self, payload: str) -> None:
        self._heaps = [int(stones) for stones in payload.split("/")]
        if len(self._heaps) != len(HEAPS) or not all(0 <= stones <= MOST for stones in self._heaps):
            raise ValueError(f"not {len(HEAPS)} heaps of 0 to {MOST}: {payload!r}")

    def start(self) -> str:
        """All heaps."""
        return " ".join(f"{heap}{stones}" for heap, stones in zip(HEAPS, self._heaps, strict=True))

    def wins(self, move: str | None) -> bool:
        """Whether this is a legal move that leaves a lost position."""
        if move is None or len(move) != 2 or move[0] not in HEAPS:
            return False
        heap, left = HEAPS.index(move[0]), int(move[1])
        after = [*self._heaps[:heap], left, *self._heaps[heap + 1 :]]
        return left < self._heaps[heap] and not functools.reduce(operator.xor, after)

    async def act(self, said: str | None) -> Reply:
        """The only move."""
        return Reply(reward=1.0 if self.wins(said) else 0.0, done=True, invalid=said is None)
