"""Which worker rolls out which trajectories, so that the slowest worker is done as early as possible (Heddle 5.2, 6.1).

A worker that holds ``k`` trajectories, the longest of ``L`` tokens, needs ``L x T x F(k)`` seconds: ``T`` is its time per
token alone, ``F`` the interference of ``k`` that run together. Guarantees of :func:`place_groups`:

* The trajectories, in descending order of their predicted lengths, are cut into contiguous groups, one a worker, in the
  workers' order. For workers that are alike no partition at all is faster (Heddle, lemma 5.1); workers that differ are
  ordered fastest first, the mapping of Heddle 6.2.
* Of all such cuts it is one with the smallest makespan: the optimum of the paper's dynamic program, to the last bit.
* ``F`` may be any nondecreasing table, one that was simulated with queueing included.

The paper's dynamic program asks for every split point, O(n^2 m). This asks another question: given a makespan, do the
trajectories fit? Greedy filling answers it in O(m log n), as a worker that takes more leaves the others a shorter rest of
shorter trajectories. Between a makespan that fits and one that does not, the search jumps only to makespans at which the
greedy answer can change, so it ends at the exact optimum after some twenty questions; often after two, as the longest
trajectory alone is the optimum of a long tail. Aggregating short trajectories, which
the paper needs for speed, would save nothing here and is left out.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Found = TypeVar("Found")
# What was found within a limit (nothing: false), its makespan, the next limit to ask for, how many trajectories fit.
Fill = tuple[Found, float, float, int]


@dataclass(frozen=True)
class WorkerSpeed:
    """What one kind of worker does with a number of trajectories at once.

    ``token_seconds``: per token with one trajectory. ``interference``: entry ``k - 1`` is F(k), dimensionless, nondecreasing,
    at least one entry; what is beyond the table does not fit on the worker.
    """

    token_seconds: float
    interference: tuple[float, ...]
    costs: list[float] = field(init=False, repr=False, compare=False)  # T x F(k), seconds per token of the longest

    def __post_init__(self) -> None:
        if not (math.isfinite(self.token_seconds) and self.token_seconds > 0):
            raise ValueError(f"token_seconds = {self.token_seconds}: a positive number of seconds")
        table = self.interference
        if not table or not all(math.isfinite(value) and value > 0 for value in table):
            raise ValueError("interference: at least one entry, all of them positive and finite")
        if any(later < earlier for earlier, later in itertools.pairwise(table)):
            raise ValueError("interference: must not fall as the group grows")
        object.__setattr__(self, "costs", [self.token_seconds * value for value in table])

    @property
    def capacity(self) -> int:
        """The most trajectories at once."""
        return len(self.interference)


@dataclass(frozen=True, eq=False)
class GroupPlacement:
    """``order``: indices of the trajectories, longest first, equals in their own order; shape [n], int64. Worker ``i`` holds
    ``order[starts[i]:starts[i + 1]]``. ``makespan`` in seconds."""

    order: NDArray[np.int64]
    starts: tuple[int, ...]
    makespan: float

    def groups(self) -> list[tuple[int, ...]]:
        """The trajectories of each worker, in the workers' order."""
        order = self.order.tolist()
        return [tuple(order[start:end]) for start, end in itertools.pairwise(self.starts)]

    def sizes(self) -> list[int]:
        """How many each worker holds."""
        return [end - start for start, end in itertools.pairwise(self.starts)]


def place_groups(lengths: Sequence[float] | NDArray[np.float64], workers: Sequence[WorkerSpeed]) -> GroupPlacement:
    """The cut with the smallest makespan.

    ``lengths``: predicted tokens, one entry a trajectory, in any order. ``workers``: in the order in which they take the
    groups, fastest first. Raises ValueError for a length that is negative or no number, without workers, or when they are
    too small for all trajectories.
    """
    values = np.asarray(lengths, dtype=np.float64)
    if values.size and not (values.min() >= 0 and values.max() < math.inf):  # false for NaN too
        raise ValueError("lengths: finite numbers of tokens, 0 or more")
    if not workers:
        raise ValueError("workers: at least one")
    order = descending(values)
    ordered: Any = values[order]
    starts, makespan = cut_groups(memoryview(ordered), workers)  # few of them are looked at: no list of all
    return GroupPlacement(order, tuple(starts), makespan)


def descending(values: NDArray[np.float64]) -> NDArray[np.int64]:
    """The stable order of finite values of 0 or more, longest first. Sorting the bits of the numbers, whose last ones make room
    for the index, is quicker than sorting indices; values that differ in those bits only are sorted again."""
    shift = max(1, (len(values) - 1).bit_length())
    keys: NDArray[np.int64] = ~(values + 0.0).view(np.int64) & -(1 << shift) | np.arange(len(values))
    keys.sort()
    order = keys & ((1 << shift) - 1)
    ordered = values[order]
    return np.argsort(-values, kind="stable") if (ordered[1:] > ordered[:-1]).any() else order


def cut_groups(
    longest_first: Sequence[float], workers: Sequence[WorkerSpeed], below: float = math.inf
) -> tuple[list[int], float]:
    """As :func:`place_groups`, of lengths in descending order: where each group starts (one more entry than workers), makespan.

    Nothing below ``below`` exists: ``([], inf)``, after one question. Searches over many sets of workers pass their best.
    """
    count = len(longest_first)
    if not count:
        return [0] * (len(workers) + 1), 0.0
    costs = [worker.costs for worker in workers]
    if below < math.inf:
        first = math.nextafter(below, 0)
    elif sum(worker.capacity for worker in workers) < count:
        raise ValueError(f"{count} trajectories do not fit on {len(workers)} workers")
    else:
        first = _enough(longest_first, workers)
    least = longest_first[0] * min(table[0] for table in costs)
    return search_makespan(lambda limit: _fill(longest_first, costs, limit), least, first, count) or ([], math.inf)


def search_makespan(
    ask: Callable[[float], Fill[Found]], least: float, first: float, count: int
) -> tuple[Found, float] | None:
    """What has the smallest makespan of all that ``ask`` can find for ``count`` trajectories, and that makespan. ``least``: no
    makespan is below it; ``first``: the first limit that is asked for; None: nothing is within it.

    Exact where a larger limit never finds less: the next limit is one at which an answer can change.
    """
    found, high, _, _ = ask(first)
    if not found:
        return None
    low = middle = least  # the second question: does the longest alone decide, as it does in a long tail?
    short: list[tuple[float, int]] = []  # limits that were too small, and how many fitted
    while low < high:
        within, makespan, following, fitted = ask(middle)
        if within:
            found, high = within, makespan
        else:
            low = following
            short.append((middle, fitted))
        middle = min(max(_guess(low, high, short, count, ahead=not within), low), math.nextafter(high, 0))
    return found, high


def _guess(low: float, high: float, short: Sequence[tuple[float, int]], count: int, ahead: bool) -> float:
    """A limit to ask for: a little above (``ahead``) or below the one at which all would fit if those that were too small are on
    a power law. Where they say nothing, as makespans are products, the geometric mean: it halves their range."""
    if len(short) > 1 and low > 0:
        (before, fewer), (last, fitted) = short[-2:]
        if 0 < fewer < fitted and 0 < before < last:
            power: float = math.log(last / before) / math.log(fitted / fewer)
            margin = (high / low) ** (0.05 if ahead else -0.05)
            guess: float = last * (count / fitted) ** power * margin
            if low < guess < high:
                return guess
    return math.sqrt(low) * math.sqrt(high)


def _enough(lengths: Sequence[float], workers: Sequence[WorkerSpeed]) -> float:
    """A makespan that surely fits: that of shares alike, or of full workers where shares alike are too many for one."""
    share = -(-len(lengths) // len(workers))
    if share <= min(worker.capacity for worker in workers):
        busy = range(-(-len(lengths) // share))
        return max(lengths[number * share] * workers[number].costs[share - 1] for number in busy)
    return max(lengths[0] * worker.costs[-1] for worker in workers)


def _fill(lengths: Sequence[float], costs: Sequence[list[float]], limit: float) -> Fill[list[int]]:
    """Each worker takes as many as it can within ``limit`` seconds: where the groups start, their makespan, the next limit at
    which one of them could take more, and how many have a place. No starts: not all fit."""
    starts, position, count = [0], 0, len(lengths)
    makespan, following = 0.0, math.inf
    for table in costs:
        length, taken = lengths[position], len(table)
        if table[-1] * length > limit:
            # The quotient finds the number, the product decides: quotients are rounded.
            taken = min(bisect_right(table, limit / length), taken - 1)
            while (beyond := table[taken] * length) <= limit:
                taken += 1
            while taken and table[taken - 1] * length > limit:
                taken -= 1
                beyond = table[taken] * length
            if beyond < following:
                following = beyond
        last = position
        position += taken
        if position >= count:
            seconds = table[count - last - 1] * length
            starts.extend([count] * (len(costs) + 1 - len(starts)))
            return starts, max(makespan, seconds), following, count
        if taken and (seconds := table[taken - 1] * length) > makespan:
            makespan = seconds
        starts.append(position)
    return [], makespan, following, position


def most_within(table: list[float], length: float, limit: float) -> tuple[int, float]:
    """How many trajectories, the longest of ``length``, a worker of these costs ends within ``limit``, and what one more takes.
    The same as in the loop above, which is its inlined form for speed."""
    if table[-1] * length <= limit:
        return len(table), math.inf
    taken = min(bisect_right(table, limit / length), len(table) - 1)
    while table[taken] * length <= limit:
        taken += 1
    while taken and table[taken - 1] * length > limit:
        taken -= 1
    return taken, table[taken] * length
