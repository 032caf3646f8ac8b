"""What a long episode shows the policy next: everything, a summary, or a restart with the last turns (study notes 5.2). Pure.

Guarantee: whatever the strategy, the first observation (the task) and the latest one stay, and a new context leaves room for a
whole response within its budget, if any choice of turns can. Lengths are tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ContextRules:
    """``budget``: a context with its response never chooses to exceed it; ``room``: tokens kept free for a response.

    ``recent_turns``: how many of the last turns stay in a new context; fewer if they do not fit. ``summary``: tokens for a
    summary, 0 for ``restart``; ``asking``: tokens of the request for it.
    """

    strategy: str
    budget: int
    room: int
    recent_turns: int
    summary: int = 0
    asking: int = 0

    def must_begin_anew(self, context: int, observation: int) -> bool:
        """Whether a turn with this observation no longer fits behind the present context. The reserve for a summary is
        kept too: it is made in the old context, before that is left."""
        if self.strategy == "keep":
            return False
        return context + observation + self.room > self.budget - self.reserve

    @property
    def reserve(self) -> int:
        """What a summary takes at the end of the context that it ends."""
        return self.asking + self.summary if self.strategy == "summarise" else 0

    def kept(self, head: int, turns: Sequence[int], observation: int, budget: int | None = None) -> int:
        """How many of the last ``turns`` (lengths, in order) stay beside the head (first observation, summary) and the new
        observation. A turn that would fit alone is not taken when one after it does not: what stays is contiguous.
        ``budget``: another one than the rules', of which any number of turns may make use."""
        recent = len(turns) if budget is not None else self.recent_turns
        left = (
            (self.budget if budget is None else budget) - self.reserve - self.room - head - self.summary - observation
        )
        count = 0
        for length in reversed(turns[len(turns) - min(recent, len(turns)) :]):
            if length > left:
                break
            left -= length
            count += 1
        return count
