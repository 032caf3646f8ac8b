"""Which scored trajectories may be trained on, and which groups form a batch (notes on agentic-RL infrastructure, 6).

Guarantees: a filter is a function of the trajectories that it has seen, in order: no clock, randomness or I/O. It never
changes a trajectory, and every rejection has a reason, which the ledger counts (``filtered: reason``). A filter without a
limit rejects nothing. What filters have seen is not part of a checkpoint: a resume tells them again what was kept
(:meth:`FilterChain.recall`), which the trajectory store knows.

All of them change what is learned: leaving out members shifts the mean of their GRPO group. So all except completeness are off
by default, and completeness keeps trajectories that merely hit their turn or context limit.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, repeat

import numpy as np
import numpy.typing as npt

from orchestrator.api import Trajectory

Numbers = npt.NDArray[np.uint64]
_ODD = 0x9E3779B97F4A7C15
_ALL = 2**64 - 1
MOST_NGRAMS = 1 << 18  # of a task, that are remembered: some 20 MB


class TrajectoryFilter:
    """One or several reasons to leave out a scored trajectory."""

    def judge(self, trajectory: Trajectory) -> str:
        """Why it is left out, in one word for the ledger; "" when this filter lets it pass."""
        raise NotImplementedError

    def keep(self, trajectory: Trajectory) -> None:
        """It passed all filters: remember what is needed to judge later ones."""


@dataclass(frozen=True, slots=True)
class CompletenessFilter(TrajectoryFilter):
    """Leaves out trajectories that an error cut short, that hold no token of the policy, and, if asked, truncated ones.

    In most tasks a truncated episode is a failure of the agent (it was too slow) and carries signal.
    """

    drop_truncated: bool = False

    def judge(self, trajectory: Trajectory) -> str:
        """ "errors", "empty", "truncated" or ""."""
        if trajectory.errors:
            return "errors"
        if not trajectory.generated_tokens:
            return "empty"
        return "truncated" if self.drop_truncated and trajectory.truncated else ""


@dataclass(frozen=True, slots=True)
class QualityFilter(TrajectoryFilter):
    """Leaves out rewards outside ``[low, high]``, which the task's author considers anomalous. None: no limit."""

    low: float | None = None
    high: float | None = None

    def judge(self, trajectory: Trajectory) -> str:
        """ "reward_low", "reward_high" or ""."""
        reward = trajectory.reward
        if reward is None:
            return "unscored"
        if self.low is not None and reward < self.low:
            return "reward_low"
        return "reward_high" if self.high is not None and reward > self.high else ""


@dataclass(frozen=True, slots=True)
class RepetitionFilter(TrajectoryFilter):
    """Leaves out a trajectory that repeats itself: more than ``limit`` of its action n-grams occurred in it before. With fewer
    than ``n`` action tokens it passes."""

    n: int
    limit: float

    def judge(self, trajectory: Trajectory) -> str:
        """ "repetition" or ""."""
        grams = action_ngrams(trajectory, self.n)
        return "repetition" if grams.size and 1.0 - np.unique(grams).size / grams.size > self.limit else ""


class SimilarityFilter(TrajectoryFilter):
    """Leaves out a trajectory that repeats others (the echo trap): more than ``limit`` of its distinct action n-grams occur in
    the last ``window`` kept trajectories of the same task. Its own group does not count: its members answer the same prompt,
    and are compared on purpose. Where those have more than ``MOST_NGRAMS``, the share is that of a sample: of the lowest
    numbers, in every trajectory alike."""

    def __init__(self, n: int, limit: float, window: int) -> None:
        self._n = n
        self._limit = limit
        self._window = window
        self._seen: dict[str, deque[tuple[str, Numbers]]] = {}  # task -> (group, n-grams) of those kept
        self._counts: dict[str, Counter[int]] = {}  # task -> in how many of them an n-gram occurs
        self._highest: dict[str, int] = {}  # task -> of the sample, where it is one

    def judge(self, trajectory: Trajectory) -> str:
        """ "similarity" or ""."""
        grams = self._distinct(trajectory)
        if not grams.size:
            return ""
        counts = self._counts.get(trajectory.task, Counter())
        known = np.fromiter(map(counts.get, grams.tolist(), repeat(0)), np.int64, grams.size)
        for group, held in self._seen.get(trajectory.task, ()):
            if group == trajectory.group_id:
                known -= np.isin(grams, held, assume_unique=True)
        return "similarity" if np.count_nonzero(known) / grams.size > self._limit else ""

    def keep(self, trajectory: Trajectory) -> None:
        seen = self._seen.setdefault(trajectory.task, deque())
        counts = self._counts.setdefault(trajectory.task, Counter())
        grams = self._distinct(trajectory)
        seen.append((trajectory.group_id, grams))
        counts.update(grams.tolist())
        if len(seen) > self._window:
            for gram in seen.popleft()[1].tolist():
                counts[gram] -= 1
                if not counts[gram]:
                    del counts[gram]
        if len(counts) > MOST_NGRAMS:
            self._highest[trajectory.task] = highest = self._highest.get(trajectory.task, _ALL) // 2
            self._seen[trajectory.task] = deque((group, held[held <= np.uint64(highest)]) for group, held in seen)
            self._counts[trajectory.task] = Counter({gram: count for gram, count in counts.items() if gram <= highest})

    def _distinct(self, trajectory: Trajectory) -> Numbers:
        grams = action_ngrams(trajectory, self._n)
        highest = self._highest.get(trajectory.task, _ALL)
        return np.unique(grams if highest == _ALL else grams[grams <= np.uint64(highest)])


class FilterChain:
    """Several filters in order; the first that rejects a trajectory gives the reason."""

    def __init__(self, filters: Iterable[TrajectoryFilter] = ()) -> None:
        self._filters = tuple(filters)

    def screen(self, trajectory: Trajectory) -> str:
        """Why it is left out, or "" if it is kept (then all filters have seen it). Call once per trajectory."""
        for one in self._filters:
            if reason := one.judge(trajectory):
                return reason
        for one in self._filters:
            one.keep(trajectory)
        return ""

    def recall(self, trajectories: Iterable[Trajectory]) -> None:
        """These were kept before, in this order: remember them."""
        for trajectory in trajectories:
            for one in self._filters:
                one.keep(trajectory)


# -- which groups a batch is made of ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BatchBalance:
    """No kind of group gets more than ``share`` of a batch's groups while another kind is available.

    ``by``: "task", or "difficulty": hard (less than a third of the members have a reward above 0), easy (more than two
    thirds), medium; this balances positive and negative examples too.
    """

    by: str
    share: float

    def kind_of(self, group: Sequence[Trajectory]) -> str:
        """The kind of a complete group."""
        if self.by == "task":
            return group[0].task
        positive = sum((trajectory.reward or 0.0) > 0.0 for trajectory in group)
        if 3 * positive < len(group):
            return "hard"
        return "easy" if 3 * positive > 2 * len(group) else "medium"

    def most_of_kind(self, wanted: int) -> int:
        """Groups of one kind that a batch of ``wanted`` groups may hold."""
        return max(1, math.ceil(self.share * wanted))

    def pick_group(self, ready: Sequence[str], taken: Sequence[str], wanted: int) -> int | None:
        """Which of the ready groups comes next, given their kinds in order of completion and the kinds already in the batch:
        the earliest of the kind that is rarest in it. None: every ready kind has its share already."""
        have = Counter(taken)
        below = [index for index, kind in enumerate(ready) if have[kind] < self.most_of_kind(wanted)]
        return min(below, key=lambda index: (have[ready[index]], index), default=None)


def action_ngrams(trajectory: Trajectory, n: int) -> Numbers:
    """The n-grams of the policy's tokens, turns joined: a loop of short actions only shows across turns. Each is a number of 64
    bits, which no two share but by chance."""
    said = np.fromiter(chain.from_iterable(turn.action_ids for turn in trajectory.turns), np.uint64)
    said = (said + np.uint64(_ODD)) * np.uint64(0xBF58476D1CE4E5B9)  # so that sums of neighbours are no others'
    said = (said ^ (said >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    said ^= said >> np.uint64(31)
    count = max(0, said.size - n + 1)
    found = np.zeros(count, np.uint64)
    for place in range(n):
        found = found * np.uint64(_ODD) + said[place : place + count]
    return found
