"""What a group of trajectories takes on a worker, KV and tool calls included (Heddle 5.1, 5.2: the interference factor).

Heddle's F depends on the size of the group alone. On real engines how long the trajectories are matters as much: their contexts
are read in every step, and when their KV does not fit they wait for each other. :class:`WorkerRates` is what a kind of
worker does, read from a :class:`~orchestrator.policies.parallelism.engine_profile.EngineProfile` (a run's: the file of
``rl-coserve profile``; the simulator's: its cost model, through the same class). :class:`TrajectoryLoads` is a set of
trajectories, and what any contiguous group of it takes:

* Lengths are forecasts: a mean and the spread of what it may be. Of many that are forecast to be alike some become long, on
  whatever worker they are: the longest of a group is the largest over its first 1, 2, 4, ... members of the length that the
  longest of so many may be expected to have. Without it short forecasts fill slow workers, and the tail waits there.
* The longest alone makes ``l`` steps. Contexts beyond the KV's room, and sequences beyond the slots, make more: at least
  ``sum of contexts over time / room``, ``sum of tokens / slots`` steps. That is longest-first with preemption, work-conserving.
* Steps are as long as their mean batch makes them, each token of context adds its reading, each token that is new to the worker
  its prefill.
* While the longest waits for its tools, ``gap`` seconds in all, the others go on: it shares fewer steps with them, so that the
  work of the others counts where it stands in the longest's way only.

Guarantee: a group never takes less when a trajectory joins it, nor more when each of its trajectories is shorter in tokens,
context and gaps. So :func:`place_loads` finds the best contiguous cut exactly, where the order by tokens is also one by
context, gaps and spread; else what it returns is what it says, and may not be the best.

The paper's dynamic program asks for every split point, O(n^2 m). :func:`search_makespan` asks another question: given a
makespan, do the trajectories fit? Greedy filling answers it, as a worker that takes more leaves the others a shorter rest of
shorter trajectories. Between a makespan that fits and one that does not it jumps only to those at which the answer can change,
so it ends at the exact optimum after some twenty questions; often after two, as the longest trajectory alone is the optimum
of a long tail. Aggregating short trajectories, which the paper needs for speed, would save nothing here and is left out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from orchestrator.policies.parallelism.engine_profile import EngineLayout, EngineProfile

Found = TypeVar("Found")
# What was found within a limit (nothing: false), its makespan, the next limit to ask for, how many trajectories fit.
Fill = tuple[Found, float, float, int]
_NORMAL = NormalDist()
SCORE = _NORMAL.inv_cdf(0.9)  # the upper end of an interval of 80 %, in standard deviations
_TIMES = 16  # at which KV is looked at, of each of two kinds: evenly in the logarithm, and before forecasts end
_SHORT_OF = 0.9  # of its length: there a trajectory is still there, if its forecast is sure
_LOGISTIC = 1.702  # what makes the logistic function the normal one's likeness
_LEAST_SPREAD = 0.05  # a forecast that is sure has steps, which would fall between two times
_KV_SHARE = 0.9  # of the room is in use when sequences come and go; the rest is what the next one does not fit into


@dataclass(frozen=True, eq=False)
class WorkerRates:
    """What one kind of worker does. ``steps``: seconds of a decode step of 1, 2, ... sequences without context, nondecreasing;
    beyond the table it goes on as its last two. ``context``: seconds a step for each token in their contexts; ``prefill``: of a
    token that is new; ``room``: tokens whose KV it holds; ``slots``: sequences at a time. Raises ValueError."""

    steps: tuple[float, ...]
    context: float = 0.0
    prefill: float = 0.0
    room: float = math.inf
    slots: int = 1 << 30
    last: float = field(init=False)  # growth beyond the table
    key: tuple[object, ...] = field(init=False, repr=False)  # of kinds that are alike it is the same

    def __post_init__(self) -> None:
        steps = self.steps
        if not steps or not all(0 < step < math.inf for step in steps):
            raise ValueError("steps: at least one, all of them positive and finite")
        if any(later < earlier for earlier, later in itertools.pairwise(steps)):
            raise ValueError("steps: must not fall as the batch grows")
        if not (0 <= self.context < math.inf and 0 <= self.prefill < math.inf and self.room >= 1 and self.slots >= 1):
            raise ValueError(
                f"{self.context}, {self.prefill}, {self.room}, {self.slots}: rates 0 or more, room for one"
            )
        object.__setattr__(self, "key", (steps, self.context, self.prefill, self.room, self.slots))
        object.__setattr__(self, "last", steps[-1] - steps[-2] if len(steps) > 1 else 0.0)

    def step_seconds(self, running: float) -> float:
        """Seconds of a step of so many sequences, without their contexts; linear between whole numbers."""
        place = running - 1.0
        if place <= 0:
            return self.steps[0]
        below = int(place)
        if below + 1 >= len(self.steps):
            return self.steps[-1] + self.last * (place - len(self.steps) + 1)
        return self.steps[below] + (place - below) * (self.steps[below + 1] - self.steps[below])


def rates_of(profile: EngineProfile, layout: EngineLayout, slots: int) -> WorkerRates:
    """Of an engine with this layout. Raises KeyError for one that was not profiled."""
    batches, contexts = profile.sizes("decode", layout)
    small, large = contexts[0], contexts[-1]
    slope = 0.0
    if large > small:
        rises = [profile.decode_seconds(n, large, layout) - profile.decode_seconds(n, small, layout) for n in batches]
        slope = max(
            0.0, float(np.median([rise / (n * (large - small)) for n, rise in zip(batches, rises, strict=True)]))
        )
    most = min(slots, max(2, 2 * batches[-1]))
    table = [profile.decode_seconds(n, small, layout) - slope * n * small for n in range(1, most + 1)]
    floor = 0.1 * profile.decode_seconds(1, small, layout)  # noise of the slope does not make steps free
    steps = np.maximum.accumulate(np.maximum(table, floor)).tolist()
    _, prompts = profile.sizes("prefill", layout)
    length = prompts[len(prompts) // 2]
    room = float(profile.shape(layout).kv_tokens) if layout in profile.shapes else math.inf
    return WorkerRates(tuple(steps), slope, profile.prefill_seconds(length, 1, layout) / length, room, slots)


class TrajectoryLoads:
    """Trajectories in the order of the placement. Arrays of shape [n], longest first: mean of the ``tokens`` that each will still
    say; ``contexts``: that it has; ``new``: of these, that no worker has computed yet; ``gaps``: seconds of its environment
    still to come; ``spreads``: standard deviation of the logarithm of what ``tokens`` may be. ``grows``: context for a token
    said, at least 1; ``longest``: context at which a trajectory ends. Raises ValueError for what is no number."""

    def __init__(
        self,
        tokens: NDArray[np.float64],
        contexts: NDArray[np.float64],
        new: NDArray[np.float64],
        gaps: NDArray[np.float64],
        spreads: NDArray[np.float64],
        grows: float = 1.0,
        longest: float = math.inf,
    ) -> None:
        for name, values in (
            ("tokens", tokens),
            ("contexts", contexts),
            ("new", new),
            ("gaps", gaps),
            ("spreads", spreads),
        ):
            if values.size and not (values.min() >= 0 and values.max() < math.inf):
                raise ValueError(f"{name}: finite numbers, 0 or more")
        if (tokens[1:] > tokens[:-1]).any():
            raise ValueError("tokens: longest first")
        self.count = len(tokens)
        self.gaps: list[float] = gaps.tolist()
        most = np.maximum(0.0, (longest - contexts) / grows)
        mean = np.minimum(tokens, most)
        square = tokens**2 * np.exp(spreads**2)
        if math.isfinite(longest):
            square = np.minimum(square, most * mean)
        middle = tokens * np.exp(-(spreads**2) / 2)
        self._longest: list[list[float]] = []  # of 1, 2, 4, ... like each one
        size, spread = 1, bool(spreads.any())
        while size <= max(1, self.count) and (spread or size == 1):
            score = _NORMAL.inv_cdf(size / (size + 1))
            self._longest.append(np.minimum(middle * np.exp(spreads * score), most).tolist())
            size *= 2
        self._said = _sums(mean)
        self._read = _sums(contexts * mean + grows * square / 2)  # token-steps of context
        self._new = _sums((grows - 1.0) * mean + new)

    def longest(self, start: int, count: int) -> float:
        """Tokens of the longest of ``count`` trajectories from ``start`` on, as may be expected."""
        found, size = 0.0, 1
        for lengths in self._longest:
            if size > count:
                break
            found = max(found, lengths[start + size - 1])
            size *= 2
        return found

    def group_seconds(self, rates: WorkerRates, start: int, count: int) -> float:
        """What ``count`` trajectories from ``start`` on take on such a worker."""
        if count < 1:
            return 0.0
        end = start + count
        said, read = self._said[end] - self._said[start], self._read[end] - self._read[start]
        steps = max(self.longest(start, count), read / (_KV_SHARE * rates.room), said / rates.slots)
        new = rates.prefill * (self._new[end] - self._new[start])
        if steps <= 0:
            return self.gaps[start] + new
        alone = rates.steps[0]
        beside = steps * (rates.step_seconds(said / steps) - alone) + rates.context * read + new
        total, gap = alone * steps + beside, self.gaps[start]
        if not gap:
            return total
        whole = total + gap  # of t (t - gap) = alone x steps x t + beside (t - gap): the others go on in the gaps
        return (whole + math.sqrt(max(0.0, whole * whole - 4 * beside * gap))) / 2

    def most_within(self, rates: WorkerRates, start: int, limit: float, hint: int = 0) -> tuple[int, float, float]:
        """How many from ``start`` on end within ``limit``, what they take, and what one more takes. ``hint``: a likely number."""
        left = self.count - start
        low, high = 0, left + 1  # low fit, high do not
        taken, beyond = 0.0, math.inf
        at = min(max(1, hint), left)
        width = 1
        while high - low > 1:
            seconds = self.group_seconds(rates, start, at)
            if seconds <= limit:
                low, taken = at, seconds
            else:
                high, beyond = at, seconds
            if high <= left and low:
                at = (low + high) // 2
            else:
                at = min(low + width, left) if high > left else max(high - width, low + 1)
                width *= 4
        return low, taken, beyond


def _sums(values: NDArray[np.float64]) -> list[float]:
    found: list[float] = np.concatenate(([0.0], np.cumsum(values))).tolist()
    return found


def sorted_loads(
    tokens: Sequence[float],
    contexts: Sequence[float],
    new: Sequence[float],
    gaps: Sequence[float],
    spreads: Sequence[float],
    grows: float = 1.0,
    longest: float = math.inf,
) -> tuple[TrajectoryLoads, NDArray[np.int64]]:
    """:class:`TrajectoryLoads` of trajectories in any order, and that order: indices, longest first, equals in their
    own order.
    """
    values = np.asarray(tokens, dtype=np.float64)
    if values.size and not (values.min() >= 0 and values.max() < math.inf):
        raise ValueError("tokens: finite numbers, 0 or more")
    order = np.argsort(-values, kind="stable")
    known, fresh, waits, off = (np.asarray(array, np.float64)[order] for array in (contexts, new, gaps, spreads))
    return TrajectoryLoads(values[order], known, fresh, waits, off, grows, longest), order


class TurnStatistics:
    """What the turns of each task were like so far, in the mean: what forecasts of tokens and turns do not say."""

    def __init__(self) -> None:
        self._turns: dict[str, list[float]] = {}  # task -> said, heard, gaps, their seconds, prompts, their tokens

    def record_turn(self, task: str, said: int, heard: int, first: bool) -> None:
        """A turn is over. ``heard``: tokens before it that were new; of the first turn, the prompt."""
        known = self._turns.setdefault(task, [0.0] * 6)
        known[0] += said
        if first:
            known[4] += 1
            known[5] += heard
        else:
            known[1] += heard

    def record_gap(self, task: str, seconds: float) -> None:
        """An environment took so long for a turn."""
        known = self._turns.setdefault(task, [0.0] * 6)
        known[2] += 1
        known[3] += seconds

    def context_growth(self, tasks: Iterable[str]) -> float:
        """Tokens of context for one that is said."""
        known = [self._turns[task] for task in tasks if task in self._turns]
        said = sum(one[0] for one in known)
        return 1.0 + sum(one[1] for one in known) / said if said else 1.0

    def gap_seconds(self, task: str) -> float:
        """Between two turns; 0 while unknown."""
        known = self._turns.get(task)
        return known[3] / known[2] if known and known[2] else 0.0

    def prompt_tokens(self, task: str) -> float:
        """Tokens of a prompt; 0 while unknown."""
        known = self._turns.get(task)
        return known[5] / known[4] if known and known[4] else 0.0


def place_loads(loads: TrajectoryLoads, workers: Sequence[WorkerRates]) -> tuple[list[int], float]:
    """The cut with the smallest makespan: where each worker's group starts, one more entry than ``workers``, which are in the
    order in which they take the groups, fastest first. Raises ValueError without workers."""
    if not workers:
        raise ValueError("workers: at least one")
    if not loads.count:
        return [0] * (len(workers) + 1), 0.0
    first = max(loads.group_seconds(worker, 0, loads.count) for worker in workers)
    least = min(loads.group_seconds(worker, 0, 1) for worker in workers)
    found = search_makespan(lambda limit: _fill(loads, workers, limit), least, first, loads.count)
    assert found is not None  # each worker alone ends within ``first``
    return found


def _fill(loads: TrajectoryLoads, workers: Sequence[WorkerRates], limit: float) -> Fill[list[int]]:
    """Each worker takes as many as it can within ``limit`` seconds: where the groups start. No starts: not all fit."""
    starts, position, makespan, following, taken = [0], 0, 0.0, math.inf, 0
    for worker in workers:
        if position < loads.count:
            taken, seconds, beyond = loads.most_within(worker, position, limit, taken)
            makespan, following = max(makespan, seconds), min(following, beyond)
            position += taken
        starts.append(position)
    return (starts if position >= loads.count else []), makespan, following, position


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


def projected_peak(
    contexts: Sequence[float],
    tokens: Sequence[float],
    spreads: Sequence[float],
    grows: float = 1.0,
    longest: float = math.inf,
) -> float:
    """The most KV that trajectories which run beside each other will hold, by their forecasts, in tokens: who may begin without
    a thrash. An engine whose KV is full drops the prefix of every trajectory that waits for its environment, and computes it
    anew a turn later: with all of a batch begun at once that was a quarter of a simulated worker's time (beyond Heddle, which
    has no admission; RollPacker 4.4 projects a peak to know how many GPUs may go over to training).

    All go on at one pace, a token at a time. After ``t`` more tokens those that are still there hold ``context + grows x t``
    each; how many they are is a sum of probabilities: what a trajectory still says is log-normal around its forecast, which
    is its mean. The normal distribution is approximated by the logistic one (largest error 0.01); for a few sure forecasts the
    sum is some ten percent low. Costs some ten microseconds and 0.3 for each trajectory.

    ``contexts``: that each has; ``tokens``: mean of what each will still say;
    ``spreads``: standard deviation of its logarithm; ``grows``: context for a token said; ``longest``: context at which a
    trajectory ends. All of one length; 0 without any."""
    if not len(contexts):
        return 0.0
    held = np.asarray(contexts, dtype=np.float64)
    means = np.maximum(np.asarray(tokens, dtype=np.float64), 1.0)
    off = np.maximum(np.asarray(spreads, dtype=np.float64), _LEAST_SPREAD)
    middle = np.log(means) - off * off / 2.0
    last = float(np.exp(np.max(middle + 2.0 * off)))
    ends = np.exp(middle)
    if math.isfinite(longest):
        most = np.maximum(longest - held, 0.0) / grows
        last, ends = min(last, max(1.0, float(np.max(most)))), np.maximum(np.minimum(ends, most), 1.0)
    ends = np.quantile(ends, np.linspace(0.0, 1.0, _TIMES))
    times = np.concatenate((np.geomspace(1.0, max(last, 2.0), _TIMES), _SHORT_OF * ends))
    # of shape [times, trajectories]; beyond +-30 a probability is 0 or 1 anyway
    scores = np.clip(_LOGISTIC * (np.log(times)[:, None] - middle) / off, -30.0, 30.0)
    there = 1.0 / (1.0 + np.exp(scores))
    grown = held + grows * times[:, None]
    if math.isfinite(longest):
        there = np.where(grown <= longest, there, 0.0)
    return float(max(held.sum(), (there * grown).sum(axis=1).max()))
