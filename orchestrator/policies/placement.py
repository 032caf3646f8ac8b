"""Which worker rolls out which trajectories, so that the slowest worker is done as early as possible (Heddle 5.2, 6.1).

A worker that holds ``k`` trajectories, the longest of ``L`` tokens, needs ``L x T x F(k)`` seconds: ``T`` is its time per
token alone, ``F`` the interference of ``k`` that run together. Guarantees of :func:`place`:

* The trajectories, in descending order of their predicted lengths, are cut into contiguous groups, one a worker, in the
  workers' order. For workers that are alike no partition at all is faster (Heddle, lemma 5.1); workers that differ are
  ordered fastest first, the mapping of Heddle 6.2.
* Of all such cuts it is one with the smallest makespan: the optimum of the paper's dynamic program, to the last bit.
* ``F`` may be any nondecreasing table, one that was simulated with queueing included.

The paper's dynamic program asks for every split point, O(n^2 m). This asks another question: given a makespan, do the
trajectories fit? Greedy filling answers it in O(m log n), as a worker that takes more leaves the others a shorter rest of
shorter trajectories. Between a makespan that fits and one that does not, the search jumps only to makespans at which the
greedy answer can change, so it ends at the exact optimum after some twenty questions. Aggregating short trajectories, which
the paper needs for speed, would save nothing here and is left out.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Speed:
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
class Placement:
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


def place(lengths: Sequence[float] | NDArray[np.float64], workers: Sequence[Speed]) -> Placement:
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
    starts, makespan = cut(values[order].tolist(), workers)
    return Placement(order, tuple(starts), makespan)


def descending(values: NDArray[np.float64]) -> NDArray[np.int64]:
    """The stable order of finite values of 0 or more, longest first. Sorting the bits of the numbers, whose last ones make room
    for the index, is quicker than sorting indices; values that differ in those bits only are sorted again."""
    shift = max(1, (len(values) - 1).bit_length())
    keys: NDArray[np.int64] = ~(values + 0.0).view(np.int64) & -(1 << shift) | np.arange(len(values))
    keys.sort()
    order = keys & ((1 << shift) - 1)
    ordered = values[order]
    return np.argsort(-values, kind="stable") if (ordered[1:] > ordered[:-1]).any() else order


def cut(longest_first: Sequence[float], workers: Sequence[Speed], below: float = math.inf) -> tuple[list[int], float]:
    """As :func:`place`, of lengths in descending order: where each group starts (one more entry than workers), makespan.

    Nothing below ``below`` exists: ``([], inf)``, after one question. Searches over many sets of workers pass their best.
    """
    count = len(longest_first)
    if not count:
        return [0] * (len(workers) + 1), 0.0
    costs = [worker.costs for worker in workers]
    if below < math.inf:
        best, high, _ = _fill(longest_first, costs, math.nextafter(below, 0))
        if not best:
            return [], math.inf
    else:
        if sum(worker.capacity for worker in workers) < count:
            raise ValueError(f"{count} trajectories do not fit on {len(workers)} workers")
        best, high, _ = _fill(longest_first, costs, _enough(longest_first, workers))
    low = longest_first[0] * min(table[0] for table in costs)
    while low < high:
        # Makespans are products: the geometric mean halves their range.
        middle = min(max(math.sqrt(low) * math.sqrt(high), low), math.nextafter(high, 0))
        starts, makespan, next_makespan = _fill(longest_first, costs, middle)
        if starts:
            best, high = starts, makespan
        else:
            low = next_makespan
    return best, high


def _enough(lengths: Sequence[float], workers: Sequence[Speed]) -> float:
    """A makespan that surely fits: that of shares alike, or of full workers where shares alike are too many for one."""
    share = -(-len(lengths) // len(workers))
    if share <= min(worker.capacity for worker in workers):
        busy = range(-(-len(lengths) // share))
        return max(lengths[number * share] * workers[number].costs[share - 1] for number in busy)
    return max(lengths[0] * worker.costs[-1] for worker in workers)


def _fill(lengths: Sequence[float], costs: Sequence[list[float]], limit: float) -> tuple[list[int], float, float]:
    """Each worker takes as many as it can within ``limit`` seconds: where the groups start, their makespan, and the next
    limit at which one of them could take more. No starts: not all fit."""
    starts, position, count = [0], 0, len(lengths)
    makespan, following = 0.0, math.inf
    for table in costs:
        length, taken = lengths[position], len(table)
        # The quotient finds the number, the product decides: quotients are rounded.
        if table[-1] * length > limit:
            taken = min(bisect_right(table, limit / length), len(table) - 1)
            while table[taken] * length <= limit:
                taken += 1
            while taken and table[taken - 1] * length > limit:
                taken -= 1
            following = min(following, table[taken] * length)
        if position + taken >= count:
            makespan = max(makespan, table[count - position - 1] * length)
            starts.extend([count] * (len(costs) + 1 - len(starts)))
            return starts, makespan, following
        if taken:
            makespan = max(makespan, table[taken - 1] * length)
        position += taken
        starts.append(position)
    return [], makespan, following
