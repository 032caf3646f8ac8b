"""How long a group of trajectories takes on a worker, including KV and tool calls (Heddle 5.1, 5.2: the interference factor).

Heddle's F depends only on the size of the group. On real engines the lengths matter as much: contexts are read in every step,
and trajectories wait for each other when their KV does not fit. :class:`WorkerRates` describes a kind of worker, read from an
:class:`~orchestrator.policies.parallelism.engine_profile.EngineProfile` (in a run the file of ``rl-coserve profile``, in the
simulator its cost model). :class:`TrajectoryLoads` is a set of trajectories, and computes what any contiguous group of it
takes:

* Lengths are forecasts: a mean and a spread. Of many with equal forecasts some become long, on whatever worker they are: the
  longest of a group is the largest expected maximum over its first 1, 2, 4, ... members. Without this, short forecasts fill
  slow workers, and the tail waits there.
* The longest alone takes ``l`` steps. Contexts beyond the KV's room and sequences beyond the slots take more: at least ``sum
  of contexts over time / room`` and ``sum of tokens / slots`` steps. That is longest-first with preemption, work-conserving.
* Steps take the time of their mean batch, plus the reading of each context token, plus the prefill of each token that is new
  to the worker.
* While the longest waits for its tools, ``gap`` seconds in all, the others continue: they share fewer steps with it, so their
  work only counts where it delays the longest.

Guarantee: a group never takes less when a trajectory joins it, nor more when each of its trajectories has fewer tokens,
context and gaps. So :func:`place_loads` finds the best contiguous partition exactly if the order by tokens is also the order
by context, gaps and spread; otherwise its result is valid, but may not be optimal.

The paper's dynamic program tries every split point, O(n^2 m). :func:`search_makespan` asks instead: given a makespan, do the
trajectories fit? Greedy filling answers it, as a worker that takes more leaves the others fewer and shorter trajectories.
Between a makespan that fits and one that does not, only values at which the answer can change are tried, so it reaches the
exact optimum after about twenty questions; often after two, since with a long tail the longest trajectory alone is the
optimum. Aggregating short trajectories, which the paper needs for speed, would gain nothing here and is left out.
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
_LENGTHS = 64  # at which the chance is looked at that a group's longest is no longer
_NEVER = -700.0  # logarithm of a chance that counts for nothing
_KV_SHARE = 0.9  # of the room is in use when sequences come and go; the rest is what the next one does not fit into


@dataclass(frozen=True, eq=False)
class WorkerRates:
    """One kind of worker. ``steps``: seconds of a decode step of 1, 2, ... sequences without context, nondecreasing;
    extrapolated beyond the table from its last two values. ``context``: seconds per step and context token; ``prefill``:
    seconds per new token; ``room``: tokens whose KV it holds; ``slots``: sequences at a time. Raises ValueError."""

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
        """Seconds of a step with so many sequences, without their contexts; linear between whole numbers."""
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
    """Trajectories in placement order. Arrays of shape [n], longest first: ``tokens``: mean of what each will still generate;
    ``contexts``: its current context; ``new``: context tokens that no worker has computed yet; ``gaps``: seconds of its
    environment to come; ``spreads``: standard deviation of the logarithm of ``tokens``. ``grows``: context per generated
    token, at least 1; ``longest``: context length at which a trajectory ends. Raises ValueError for invalid numbers."""

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
        self._forecasts = middle, spreads, most
        self._chances: tuple[list[float], NDArray[np.float64]] | None = None
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
        """Expected tokens of the longest of ``count`` trajectories from ``start`` on."""
        found, size = 0.0, 1
        for lengths in self._longest:
            if size > count:
                break
            found = max(found, lengths[start + size - 1])
            size *= 2
        return found

    @property
    def unsure(self) -> bool:
        """Whether any forecast has a spread."""
        return len(self._longest) > 1

    def chances(self) -> tuple[list[float], NDArray[np.float64]]:
        """Lengths in tokens; and, of shape [n + 1, lengths], sums over the first 0, 1, ... trajectories of the logarithm of the
        chance to be no longer: of a group, the difference of two rows."""
        if self._chances is not None:
            return self._chances
        middle, spreads, most = self._forecasts
        off = np.maximum(spreads, 1e-9)
        low, high = max(1e-9, float(middle.min())), float(np.minimum(middle * np.exp(5 * off), most).max())
        lengths = np.geomspace(low, max(low, high), _LENGTHS)
        known, of = np.unique(
            np.stack((middle, off, most)), axis=1, return_inverse=True
        )  # members of a group are alike
        scores = (np.log(lengths) - np.log(np.maximum(known[0], 1e-9))[:, None]) / known[1][:, None]
        within = np.array([[_NORMAL.cdf(score) for score in row] for row in scores.tolist()])
        within[lengths >= known[2][:, None] * (1 - 1e-9)] = 1.0
        logs = np.log(np.maximum(within, math.exp(_NEVER)))[of.reshape(-1)]
        self._chances = lengths.tolist(), np.concatenate((np.zeros((1, _LENGTHS)), np.cumsum(logs, axis=0)))
        return self._chances

    def group_seconds(self, rates: WorkerRates, start: int, count: int, longest: float | None = None) -> float:
        """Seconds that ``count`` trajectories from ``start`` on take on such a worker. ``longest``: tokens of the longest, where
        that is known."""
        if count < 1:
            return 0.0
        end = start + count
        said, read = self._said[end] - self._said[start], self._read[end] - self._read[start]
        longest = self.longest(start, count) if longest is None else longest
        steps = max(longest, read / (_KV_SHARE * rates.room), said / rates.slots)
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
        """How many from ``start`` on end within ``limit``, how long they take, and how long one more would take. ``hint``: a
        likely number."""
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
    """:class:`TrajectoryLoads` of trajectories in any order, and their placement order: indices, longest first, ties in input
    order."""
    values = np.asarray(tokens, dtype=np.float64)
    if values.size and not (values.min() >= 0 and values.max() < math.inf):
        raise ValueError("tokens: finite numbers, 0 or more")
    order = np.argsort(-values, kind="stable")
    known, fresh, waits, off = (np.asarray(array, np.float64)[order] for array in (contexts, new, gaps, spreads))
    return TrajectoryLoads(values[order], known, fresh, waits, off, grows, longest), order


class TurnStatistics:
    """Mean properties of each task's turns so far, which token and turn forecasts do not include."""

    def __init__(self) -> None:
        self._turns: dict[str, list[float]] = {}  # task -> said, heard, gaps, their seconds, prompts, their tokens

    def record_turn(self, task: str, said: int, heard: int, first: bool) -> None:
        """A turn is over. ``heard``: new tokens before it; for the first turn, the prompt."""
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
        """Context tokens per generated token."""
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
    """The partition with the smallest makespan: where each worker's group starts, with one entry more than ``workers``, which
    are in the order in which they take the groups, fastest first. Raises ValueError without workers."""
    if not workers:
        raise ValueError("workers: at least one")
    if not loads.count:
        return [0] * (len(workers) + 1), 0.0
    first = max(loads.group_seconds(worker, 0, loads.count) for worker in workers)
    least = min(loads.group_seconds(worker, 0, 1) for worker in workers)
    found = search_makespan(lambda limit: _fill(loads, workers, limit), least, first, loads.count)
    assert found is not None  # each worker alone ends within ``first``
    return found


def expected_makespan(loads: TrajectoryLoads, starts: Sequence[int], workers: Sequence[WorkerRates]) -> float:
    """Mean seconds until the last of these groups ends, its trajectories' lengths being drawn independently. A group's own time,
    which :func:`place_loads` makes as even as it can, is a mean: of several groups one is unlucky, of many very much so."""
    groups = [
        (worker, start, end - start)
        for worker, start, end in zip(workers, starts, starts[1:], strict=False)
        if end > start
    ]
    if not loads.unsure:
        return max((loads.group_seconds(*group) for group in groups), default=0.0)
    lengths, sums = loads.chances()
    times = [np.array([loads.group_seconds(*group, length) for length in lengths]) for group in groups]
    ends = np.unique(np.concatenate(times))
    chance = np.zeros(len(ends))  # its logarithm: that all have ended by then
    for (_, start, count), taken in zip(groups, times, strict=True):
        chance += np.interp(ends, taken, sums[start + count] - sums[start], left=_NEVER)
    later = 1.0 - np.exp(chance)
    return float(ends[0] + ((later[1:] + later[:-1]) / 2 * np.diff(ends)).sum())


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
    """The result with the smallest makespan that ``ask`` can find for ``count`` trajectories, and that makespan. ``least``: no
    makespan is below it; ``first``: the first limit that is tried; None: nothing fits.

    Exact if a larger limit never finds less: the next limit is one at which an answer can change.
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
    """The most KV that concurrent trajectories will hold, by their forecasts, in tokens: how many may start without thrashing.
    An engine whose KV is full drops the prefix of every trajectory that waits for its environment, and recomputes it a turn
    later: with a whole batch started at once that was a quarter of a simulated worker's time (beyond Heddle, which has no
    admission; RollPacker 4.4 projects a peak to decide how many GPUs may move to training).

    All advance at one pace, a token at a time. After ``t`` more tokens those still running hold ``context + grows x t`` each;
    how many they are is a sum of probabilities: remaining tokens are log-normal around the forecast, which is their mean. The
    normal distribution is approximated by the logistic one (largest error 0.01); for a few certain forecasts the sum is some
    ten percent low. Takes some ten microseconds plus 0.3 per trajectory.

    ``contexts``: the current context of each; ``tokens``: mean of what each will still generate; ``spreads``: standard
    deviation of its logarithm; ``grows``: context per generated token; ``longest``: context length at which a trajectory ends.
    All arrays have the same length; 0 if they are empty.
    """
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
