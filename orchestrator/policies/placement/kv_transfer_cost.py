"""Whether to copy a prefix's KV to the worker that a turn goes to, or to recompute it (Heddle 5.3).

Both ways are measured as they happen, from the decision to the turn's first token, and each is modelled as a line in the
context length: ``fixed + tokens x each`` (least squares with decaying weights). The smaller expectation decides. A way that
was used fewer than ``tries`` times is tried, and every ``explore``-th time the way that looks worse is used, so that neither
estimate gets stale.

Guarantees: below ``min_tokens`` nothing is moved; no clock, no randomness; the same observations lead to the same decisions. A
failed move counts its own time plus the time of recomputing, so a way that does not work is abandoned by itself.
"""

from __future__ import annotations

import math

from orchestrator.api.errors import ConfigError


class _Line:
    """Seconds over tokens: running sums, of which older ones weigh less."""

    def __init__(self) -> None:
        self.count = 0
        self._sums: tuple[float, ...] = (
            0.0,
        ) * 5  # of the weights, tokens, seconds, squares of tokens, tokens times seconds

    def add_point(self, tokens: int, seconds: float, keep: float) -> None:
        self.count += 1
        new = (1.0, float(tokens), seconds, float(tokens) * tokens, tokens * seconds)
        self._sums = tuple(keep * old + value for old, value in zip(self._sums, new, strict=True))

    def fit(self) -> tuple[float, float]:
        """(fixed seconds, seconds a token), neither below 0. Of one length only: all of it is a token's."""
        weight, tokens, seconds, squares, products = self._sums
        if not weight:
            return 0.0, 0.0
        mean, average = tokens / weight, seconds / weight
        spread = squares / weight - mean * mean
        if spread <= 1e-9 * (mean * mean + 1.0):
            return 0.0, average / mean if mean else 0.0
        each = (products / weight - mean * average) / spread
        if each < 0:
            return average, 0.0
        fixed = average - each * mean
        return (fixed, each) if fixed >= 0 else (0.0, products / squares)


class BreakEven:
    """One object per fleet. Call :meth:`move_pays` before, and :meth:`record_turn` after, each turn whose prefix was
    elsewhere."""

    def __init__(self, *, min_tokens: int = 0, tries: int = 3, explore: int = 64, memory: float = 200.0) -> None:
        if min_tokens < 0 or tries < 1 or explore < 2 or not memory > 1:
            raise ConfigError(
                "kv_transfer", (min_tokens, tries, explore, memory), "min_tokens >= 0, tries >= 1, explore >= 2"
            )
        self.least = max(1, min_tokens)  # tokens of a context that is ever moved
        self._tries, self._explore = tries, explore
        self._keep = 1.0 - 1.0 / memory  # an observation counts as much as the last ``memory`` together
        self._move, self._compute = _Line(), _Line()
        self._asked = 0

    def move_pays(self, tokens: int) -> bool:
        """Whether to move the KV of a context of so many tokens."""
        if tokens < self.least:
            return False
        self._asked += 1
        if min(self._move.count, self._compute.count) < self._tries:
            return self._move.count <= self._compute.count
        expected = self.expected(tokens)
        better = expected[0] < expected[1]
        return not better if self._asked % self._explore == 0 else better

    def record_turn(self, moved: bool, tokens: int, seconds: float) -> None:
        """A turn took ``seconds`` to its first token, with its prefix moved or recomputed. Values that are not finite numbers
        are ignored."""
        if tokens > 0 and math.isfinite(seconds) and seconds >= 0:
            (self._move if moved else self._compute).add_point(tokens, seconds, self._keep)

    def expected(self, tokens: int) -> tuple[float, float]:
        """Seconds to the first token (moved, recomputed)."""
        (move_fixed, move_each), (fixed, each) = self._move.fit(), self._compute.fit()
        return move_fixed + move_each * tokens, fixed + each * tokens
