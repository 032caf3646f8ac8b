"""How long a test case may run before it is stopped (RollPacker 4.3, adaptive timeout).

    limit = min(max(least, factor x anchor), most)

The anchor of a test case is its longest run time among correct answers so far, those that passed every case; wrong answers
never change it. Guarantees: a function of the recorded times, in any order; no clock, no randomness. ``least`` and ``factor``
leave room for a busy machine. A case that no answer has solved yet has no anchor and gets ``most``, the fixed limit that the
paper compares with.

At most ``cases`` anchors are kept; the oldest go first, and their cases get ``most`` again.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

FACTOR, LEAST, MOST = 1.5, 2.0, 30.0  # lambda, seconds, seconds: RollPacker 4.3
RULE_LIMIT = 2.0  # seconds for a rule without code, such as comparing an answer in mathematics (RollPacker 5)
CASES = 1_000_000  # anchors: about 100 B each


@dataclass(frozen=True, slots=True)
class CaseTime:
    """How one test case of one answer went. ``limit``: seconds allowed; ``cut``: it reached the limit."""

    seconds: float
    limit: float
    cut: bool = False


@dataclass(slots=True)
class TimeoutCounts:
    """Test cases since the start. ``cut_early``: stopped at a limit below ``most``; ``saved``: seconds until ``most`` that
    these did not run (an upper bound, as an answer might have ended by itself)."""

    cases: int = 0
    adaptive: int = 0  # ran under a limit below ``most``
    cut_early: int = 0
    cut_at_most: int = 0
    seconds: float = 0.0
    saved: float = 0.0


class AdaptiveTimeouts:
    """One object per run. Test cases are identified by their prompt and their index. Raises ValueError for contradictory
    limits."""

    def __init__(self, factor: float = FACTOR, least: float = LEAST, most: float = MOST, *, cases: int = CASES) -> None:
        if not factor >= 1.0:
            raise ValueError(
                f"factor = {factor}: must be 1 or more, or a right answer as slow as the slowest is cut off"
            )
        if not 0.0 < least <= most < math.inf:
            raise ValueError(f"least = {least}, most = {most}: must be above 0, finite, and in this order")
        self.factor, self.least, self.most = factor, least, most
        self.counts = TimeoutCounts()
        self._cases = cases
        self._anchors: OrderedDict[str, list[float]] = OrderedDict()  # prompt -> seconds by case; 0.0: none yet
        self._kept = 0

    def limits(self, prompt: str) -> list[float]:
        """Seconds for each test case of a prompt whose number of cases is known; all others get ``most``."""
        return [self._limit(anchor) for anchor in self._anchors.get(prompt, ())]

    def record_times(self, prompt: str, times: Sequence[CaseTime], *, correct: bool) -> None:
        """One answer was judged: the times of its test cases, in order, as far as they ran. ``correct``: it passed all."""
        counts = self.counts
        for time in times:
            counts.cases += 1
            counts.seconds += time.seconds
            counts.adaptive += time.limit < self.most
            if time.cut and time.limit < self.most:
                counts.cut_early += 1
                counts.saved += self.most - time.limit
            elif time.cut:
                counts.cut_at_most += 1
        if correct and times:
            self._raise(prompt, [time.seconds for time in times])

    def state(self) -> dict[str, list[float]]:
        """For a checkpoint: JSON."""
        return {prompt: list(anchors) for prompt, anchors in self._anchors.items()}

    def restore(self, state: Mapping[str, Sequence[float]]) -> None:
        """Back to a state; counts continue. Raises ValueError for an invalid one."""
        self._anchors.clear()
        self._kept = 0
        for prompt, anchors in state.items():
            if not all(math.isfinite(seconds) and seconds >= 0.0 for seconds in anchors):
                raise ValueError(f"not run times: {list(anchors)!r:.100}")
            self._raise(prompt, anchors)

    def _raise(self, prompt: str, seconds: Sequence[float]) -> None:
        anchors = self._anchors.setdefault(prompt, [])
        grown = len(seconds) - len(anchors)
        if grown > 0:
            anchors += [0.0] * grown
            self._kept += grown
        for place, value in enumerate(seconds):
            anchors[place] = max(anchors[place], value)
        self._anchors.move_to_end(prompt)
        while self._kept > self._cases and len(self._anchors) > 1:
            self._kept -= len(self._anchors.popitem(last=False)[1])

    def _limit(self, anchor: float) -> float:
        if anchor <= 0.0:
            return self.most
        return min(max(self.least, self.factor * anchor), self.most)
