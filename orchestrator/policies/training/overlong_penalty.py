"""A reward that falls softly before the length limit, so that a long answer is not as bad as a wrong one, and not free either.

Guarantees: pure; 0 up to ``limit - buffer`` generated tokens, from there linearly down to ``-penalty`` at ``limit`` and beyond.
Source: DAPO (2025), 3.4, eq. 13, there with a penalty of 1. It is for the trainer alone: what is reported as reward, compared by
filters and dynamic sampling, and stored is what the reward function said.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OverlongPenalty:
    """``limit`` and ``buffer`` in generated tokens of a whole episode; ``limit`` 0: there is no such reward."""

    limit: int = 0
    buffer: int = 0
    penalty: float = 1.0

    def penalty_for(self, tokens: int) -> float:
        """What is added to the reward of an answer of so many tokens: 0 or less."""
        over = tokens - (self.limit - self.buffer)
        if not self.limit or over <= 0:
            return 0.0
        return -self.penalty * min(1.0, over / self.buffer) if self.buffer else -self.penalty
