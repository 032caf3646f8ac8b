"""When to stop rollout on half of the GPUs and train there (RollPacker 4.4, Algorithm 1).

Guarantees of one step's :class:`StreamTrigger`:

* It frees GPUs at most once, and only while 20 to 50 % of the requests are finished (line 14), retrying only after another 5 %
  (lines 6, 9, 14, 15). A failed attempt changes nothing and is forgotten until then.
* It frees exactly half of the rollout GPUs ("attempts to repurpose half"; line 16), in whole communication groups: neither a
  rollout engine's nor a training replica's group is ever split, and each freed GPU belongs to a replica that is entirely free.
  Among the possible halves it takes the one with the fewest tokens to recompute elsewhere (line 20); ties by the order of
  engines.
* It frees nothing unless the projected peak of KV cache fits on the remaining GPUs (line 17): every unfinished request at its
  expected final length, all at the same time. The sum of E[L | L > c] is at least the expected demand at any later moment,
  since (c + s) P(L > c + s | L > c) <= E[L | L > c]; so the projection errs on the safe side. Migrated requests are placed
  longest first on the emptiest unit, and the fullest unit decides: a sum over GPUs would hide one that overflows.
* With more memory per GPU it never decides later.

Like the paper, it ignores the cost of recomputing. Inputs are plain numbers; the same object serves a colocated run and the
simulator.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

Unit = tuple[int, ...]  # ids of the GPUs of one communication group: they roll out, or train, together


@dataclass(frozen=True)
class LengthDistribution:
    """Final context lengths (tokens) of past trajectories; ``longest``: the largest possible one."""

    history: Sequence[int]
    longest: int
    _sorted: tuple[int, ...] = field(init=False, repr=False)
    _above: tuple[int, ...] = field(init=False, repr=False)  # sum of the lengths from each position on

    def __post_init__(self) -> None:
        if self.longest < 1:
            raise ValueError(f"longest = {self.longest}: at least one token")
        ordered = tuple(sorted(min(length, self.longest) for length in self.history))
        above = [0]
        for length in reversed(ordered):
            above.append(above[-1] + length)
        object.__setattr__(self, "_sorted", ordered)
        object.__setattr__(self, "_above", tuple(reversed(above)))

    def expected(self, now: int) -> float:
        """E[L | L > now] in tokens; ``longest`` if nothing is known or ``now`` is longer than anything before."""
        position = bisect_right(self._sorted, now)
        count = len(self._sorted) - position
        return self._above[position] / count if count else float(max(now, self.longest))


@dataclass(frozen=True, slots=True)
class KvLimit:
    """The KV memory of a rollout GPU. ``bytes_per_token``: of one token in the whole model, spread over the GPUs of its unit;
    ``block_tokens``: contexts are rounded up to blocks of so many tokens."""

    bytes_per_token: float
    bytes_per_gpu: float
    block_tokens: int = 1

    def __post_init__(self) -> None:
        if self.bytes_per_token <= 0 or self.bytes_per_gpu < 0 or self.block_tokens < 1:
            raise ValueError(f"{self}: sizes must be positive")

    def bytes_of(self, tokens: float) -> float:
        """KV bytes of one context."""
        return math.ceil(tokens / self.block_tokens) * self.block_tokens * self.bytes_per_token


@dataclass(frozen=True, slots=True)
class TriggerDecision:
    """The decision at one milestone. ``freed`` empty: none, for ``reason``.

    ``engines`` and ``replicas`` are indices of the rollout units that give up their GPUs and of the training units that may
    begin; ``fraction`` of the requests was finished; ``peak`` is the projected KV of the fullest unit that would stay,
    relative to its capacity (0 if no half was found).
    """

    freed: tuple[int, ...]
    engines: tuple[int, ...] = ()
    replicas: tuple[int, ...] = ()
    fraction: float = 0.0
    peak: float = 0.0
    reason: str = ""


class StreamTrigger:
    """One step's decision. ``rollout``: one unit per engine; ``training``: one unit per data-parallel replica (all ranks that
    share its tensor, pipeline, context and expert parallelism). ``low``, ``high`` and ``every`` are fractions of ``requests``.
    Raises ValueError for units of one kind that overlap or are empty."""

    def __init__(
        self,
        requests: int,
        rollout: Sequence[Unit],
        training: Sequence[Unit],
        limit: KvLimit,
        lengths: LengthDistribution,
        *,
        low: float = 0.2,
        high: float = 0.5,
        every: float = 0.05,
    ) -> None:
        if requests < 1:
            raise ValueError(f"requests = {requests}: a step has at least one")
        if not 0 <= low <= high <= 1 or every <= 0:
            raise ValueError(f"0 <= low <= high <= 1 and every > 0, not {low}, {high}, {every}")
        for kind, units in (("rollout", rollout), ("training", training)):
            _check_disjoint(kind, units)
        self.requests = requests
        self.decided = False
        self._rollout = [tuple(unit) for unit in rollout]
        self._training = [tuple(unit) for unit in training]
        self._limit = limit
        self._lengths = lengths
        self._low, self._high, self._every = (_exact(value) for value in (low, high, every))
        self._tried = 0  # finished at the last attempt
        self._blocks = _inseparable(self._rollout, self._training)

    def due(self, finished: int) -> bool:
        """Whether so many finished requests are a milestone: only then anybody needs to know what engines hold."""
        fraction, since = Fraction(finished, self.requests), Fraction(finished - self._tried, self.requests)
        return not self.decided and self._low <= fraction <= self._high and since >= self._every

    def observe(self, finished: int, held: Sequence[Sequence[int]]) -> TriggerDecision | None:
        """Call after every finished request. ``held[i]``: current context lengths (tokens) of the unfinished requests of
        ``rollout[i]``, including waiting ones. None if this is no milestone, or if GPUs were freed before."""
        if len(held) != len(self._rollout):
            raise ValueError(f"lengths of {len(held)} engines, there are {len(self._rollout)}")
        if not self.due(finished):
            return None
        fraction, self._tried = Fraction(finished, self.requests), finished
        engines = self._half([sum(lengths) for lengths in held])
        if engines is None:
            reason = "half of the GPUs cannot be freed without splitting a communication group"
            return TriggerDecision((), fraction=float(fraction), reason=reason)
        peak = self._peak(engines, held)
        if peak > 1.0:
            reason = f"projected KV is {peak:.2f} of what a unit that stays can hold"
            return TriggerDecision((), fraction=float(fraction), peak=peak, reason=reason)
        self.decided = True
        freed = sorted(gpu for engine in engines for gpu in self._rollout[engine])
        replicas = tuple(index for index, unit in enumerate(self._training) if set(unit) & set(freed))
        return TriggerDecision(tuple(freed), tuple(engines), replicas, float(fraction), peak)

    def _half(self, cost: Sequence[int]) -> list[int] | None:
        """Engines with exactly half of the rollout GPUs, in whole inseparable blocks; None when there are none."""
        total = sum(len(unit) for unit in self._rollout)
        if total % 2 or not total:
            return None
        best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}  # GPUs -> (tokens to recompute, engines)
        for engines in self._blocks:
            size = sum(len(self._rollout[engine]) for engine in engines)
            price = sum(cost[engine] for engine in engines)
            for have, (paid, chosen) in list(best.items()):
                candidate = (paid + price, chosen + engines)
                if have + size <= total // 2 and candidate < best.get(have + size, (candidate[0] + 1, ())):
                    best[have + size] = candidate
        found = best.get(total // 2)
        return sorted(found[1]) if found is not None else None

    def _peak(self, gone: Sequence[int], held: Sequence[Sequence[int]]) -> float:
        """Projected KV of the fullest staying engine over its capacity, after migration."""
        bytes_of, expected = self._limit.bytes_of, self._lengths.expected
        final = [sorted((bytes_of(expected(length)) for length in lengths), reverse=True) for lengths in held]
        stays = [engine for engine in range(len(held)) if engine not in gone]
        room = {engine: len(self._rollout[engine]) * self._limit.bytes_per_gpu for engine in stays}
        load = {engine: sum(final[engine]) for engine in stays}
        for size in sorted((size for engine in gone for size in final[engine]), reverse=True):
            emptiest = min(stays, key=lambda engine: ((load[engine] + size) / len(self._rollout[engine]), engine))
            load[emptiest] += size
        return max(_share(load[engine], room[engine]) for engine in stays)


def _share(load: float, room: float) -> float:
    return load / room if room else (math.inf if load else 0.0)


def _exact(value: float) -> Fraction:
    """0.05 as one twentieth: 3 of 60 requests are 5 %, whatever binary fractions say."""
    return Fraction(value).limit_denominator(1_000_000)


def _check_disjoint(kind: str, units: Sequence[Unit]) -> None:
    owner: dict[int, Unit] = {}
    for unit in units:
        if not unit:
            raise ValueError(f"a {kind} unit is empty")
        for gpu in unit:
            if gpu in owner:
                raise ValueError(f"GPU {gpu} is in the {kind} units {owner[gpu]} and {tuple(unit)}")
            owner[gpu] = tuple(unit)


def _inseparable(rollout: Sequence[Unit], training: Sequence[Unit]) -> list[tuple[int, ...]]:
    """Sets of engines that can only be freed together, in order of their first GPU. An engine with a GPU that no training
    replica uses, or tied to one, is in none: its GPUs would idle."""
    parent: dict[int, int] = {}

    def root(gpu: int) -> int:
        while parent.setdefault(gpu, gpu) != gpu:
            gpu = parent[gpu]
        return gpu

    for unit in (*rollout, *training):
        for gpu in unit[1:]:
            parent[root(gpu)] = root(unit[0])
    trains = {gpu for unit in training for gpu in unit}
    blocks: dict[int, list[int]] = {}
    useless: dict[int, None] = {}
    for engine, unit in enumerate(rollout):
        blocks.setdefault(root(unit[0]), []).append(engine)
        if any(gpu not in trains for gpu in unit):
            useless[root(unit[0])] = None
    found = [tuple(engines) for top, engines in blocks.items() if top not in useless]
    return sorted(found, key=lambda engines: min(rollout[engine][0] for engine in engines))
