"""How much KV memory a rollout engine may use beside a serving engine (ROSE 4.1, preemptive memory sharing).

::

    open --(serving eats into its headroom)--> cut --(rollout holds no more than the halved budget)--> frozen
      ^                                         |  \\--(it does not within the deadline)--> kill it       |
      +------------------ the scheduler begins an RL step, with fresh statistics -------------------------+

Guarantees:

* A budget and the headroom together never exceed what serving's recent peak usage leaves, nor the share that is lent.
* A cut halves the budget at once, and there is no second one before the first is complied with: one burst, one cut, unless
  serving keeps growing. Only :meth:`KvSharing.begin_step` raises a budget, so bursts cannot make it oscillate.
* A rollout engine that still holds more than its budget after the deadline is killed; serving never waits for it.
* Every change of the budget has its own revision, one more than the last.

Pure: pages in, decisions out; ``now`` in seconds of any monotonic clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

State = Literal["open", "cut", "frozen"]


@dataclass(frozen=True, slots=True)
class SharingRules:
    """``pages``: of the pool; ``headroom``: share of the pool kept free for serving (H); ``watermark``: the share of the
    headroom that serving may use before it counts as a burst; ``lent``: the largest share of the pool that rollouts may ever
    have; ``cut``: what a burst divides the budget by; ``deadline``: seconds to comply; ``lease``: seconds that an unused
    prefix page is kept."""

    pages: int
    headroom: float = 0.2
    watermark: float = 0.25
    lent: float = 1.0
    cut: int = 2
    deadline: float = 2.0
    lease: float = 10.0

    def __post_init__(self) -> None:
        if wrong := mistake(self):
            raise ValueError(f"{wrong[0]} = {wrong[1]}: {wrong[2]}")

    @property
    def headroom_pages(self) -> int:
        """H, rounded up."""
        return -int(-self.headroom * self.pages // 1)


@dataclass(frozen=True, slots=True)
class KvBudget:
    """What the rollout engine may own from now on. ``kill``: it did not comply; its pages come back when it dies."""

    pages: int
    revision: int
    state: State
    kill: bool = False


def mistake(rules: SharingRules) -> tuple[str, float, str] | None:
    """Field, value and fix of a contradiction, or None."""
    if rules.pages < 1:
        return "pages", rules.pages, "a pool has at least one page"
    for field in ("headroom", "watermark", "lent"):
        value = getattr(rules, field)
        if not 0 <= value <= 1:
            return field, value, "must be a share from 0 to 1"
    if rules.cut < 2:
        return "cut", rules.cut, "must be at least 2: a burst takes pages back at once"
    for field in ("deadline", "lease"):
        value = getattr(rules, field)
        if not 0 < value < float("inf"):
            return field, value, "must be a positive number of seconds"
    return None


class KvSharing:
    """For one rollout engine on one device. Begins with a budget of 0, frozen: the scheduler opens it."""

    def __init__(self, rules: SharingRules) -> None:
        self.rules = rules
        self.budget = KvBudget(0, 0, "frozen")
        self._deadline = 0.0

    def begin_step(self, now: float, serving_peak: int, rollout: int) -> KvBudget:
        """An RL step begins; ``serving_peak``: most pages that serving used in the recent window; ``rollout``: pages owned
        now. A cut that is not complied with yet stays until the following step; a budget below what is owned is a cut too."""
        if self.budget.state == "cut":
            return self.budget
        rules = self.rules
        free = rules.pages - rules.headroom_pages - min(max(0, serving_peak), rules.pages)
        pages = max(0, min(free, int(rules.lent * rules.pages)))
        state: State = "open" if rollout <= pages else "cut"
        if (pages, state) != (self.budget.pages, self.budget.state):
            self._deadline = now + rules.deadline
            self.budget = KvBudget(pages, self.budget.revision + 1, state)
        return self.budget

    def observe(self, now: float, serving: int, rollout: int) -> KvBudget:
        """Pages that both own now. Returns the budget from now on."""
        budget = self.budget
        if budget.state == "cut":
            if rollout <= budget.pages:
                self.budget = budget = KvBudget(budget.pages, budget.revision, "frozen")
            elif now >= self._deadline:
                return KvBudget(budget.pages, budget.revision, "cut", kill=True)
            else:
                return budget
        if serving > self.most:
            self._cut(now, budget.pages // self.rules.cut, rollout)
        return self.budget

    @property
    def most(self) -> float:
        """Pages that serving may use; more is a burst, as it exceeds the watermark in the headroom."""
        if not self.budget.pages:
            return math.inf
        headroom = self.rules.headroom_pages
        return self.rules.pages - self.budget.pages - headroom + int(self.rules.watermark * headroom)

    def record_kill(self) -> KvBudget:
        """The rollout engine is gone, and its pages are back: its successor gets nothing before the next step."""
        self.budget = KvBudget(0, self.budget.revision + 1, "frozen")
        return self.budget

    def limit_share(self, now: float, share: float, rollout: int) -> KvBudget:
        """The serving team sets the largest share of the pool that may be lent: a smaller one applies at once, as a cut; a
        larger one gives nothing before the next step begins."""
        self.rules = replace(self.rules, lent=share)
        most = int(share * self.rules.pages)
        if most < self.budget.pages:
            self._cut(now, most, rollout)
        return self.budget

    def _cut(self, now: float, pages: int, rollout: int) -> None:
        """To so many pages."""
        self._deadline = now + self.rules.deadline
        self.budget = KvBudget(pages, self.budget.revision + 1, "frozen" if rollout <= pages else "cut")


def displacement_order(running: Mapping[str, tuple[int, int]]) -> list[str]:
    """In which order a rollout engine gives up whole requests (ROSE 4.1) when unused prefixes are not enough: the lowest
    priority first, among these the one with the most pages, so that as few as needed go. ``running``: request -> (vLLM's
    priority, where the lower number goes first; pages)."""
    return sorted(running, key=lambda name: (-running[name][0], -running[name][1], name))
