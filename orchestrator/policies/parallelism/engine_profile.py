"""What an engine's steps cost: a table of measured points with interpolation (RollPacker 4.1).

An :class:`EngineProfile` is what ``rl-coserve profile`` measured: seconds of a prefill and of a decode step over layout, batch
and length, and per layout the KV memory, weights and start-up of the engine. Planner, simulator and admission read it.

Guarantees:

* A measured point returns what was measured; between points it is linear in the tokens, then in the batch.
* Below the smallest measured size the smallest is used (an engine step has fixed costs); above the largest, the line through
  the last two points is continued, never downwards. With a single measured size, that one is used everywhere.
* What was never measured (a layout, a phase) is a KeyError that names what is there; nothing is guessed across layouts.
* Expert-parallel layouts may be measured at several imbalances of the experts' load (RollPacker 7: the cost of routing
  patterns): linear in between, the last line continued above. A single measured imbalance is used for all.

Pure: reading and writing files is in :mod:`orchestrator.profiler.profile_file`.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, TypeVar

Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, ...] = ("prefill", "decode")
_Size = TypeVar("_Size", int, float)
_Rows = dict[int, dict[int, float]]  # batch -> tokens -> seconds


KEPT = 16  # steps of a size that are remembered
_SHORTEST, _LONGEST = 1e-12, 1e9  # seconds of a measurement


@dataclass(frozen=True, slots=True, order=True)
class EngineLayout:
    """How one engine is divided: ``tp`` devices share every layer; in a mixture of experts, ``ep`` of them hold whole experts
    instead of slices of each (1: slices). ``ep`` divides ``tp``."""

    tp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        if self.tp < 1 or self.ep < 1 or self.tp % self.ep:
            raise ValueError(f"{self}: sizes are at least 1, and ep divides tp")

    def __str__(self) -> str:
        return f"TP {self.tp}" if self.ep == 1 else f"TP {self.tp}, EP {self.ep}"


@dataclass(frozen=True, slots=True)
class ProfilePoint:
    """One measurement. Prefill: ``seconds`` until all of ``batch`` prompts of ``tokens`` each are computed. Decode:
    ``seconds`` of one step of ``batch`` sequences with contexts of ``tokens``. Medians; ``spread``: (longest - shortest) /
    median. ``imbalance``: tokens of the fullest device's experts over the mean (:class:`orchestrator.api.WorkerStats`), 1:
    even."""

    phase: Phase
    layout: EngineLayout
    batch: int
    tokens: int
    seconds: float
    spread: float = 0.0
    imbalance: float = 1.0

    def __post_init__(self) -> None:
        measured = _SHORTEST <= self.seconds <= _LONGEST and 0 <= self.spread < float("inf")
        if self.phase not in PHASES or self.batch < 1 or self.tokens < 1 or not measured:
            raise ValueError(f"{self}: no such measurement")
        if not 1.0 <= self.imbalance < float("inf"):
            raise ValueError(f"{self}: an imbalance is at least 1")


@dataclass(frozen=True, slots=True)
class EngineShape:
    """One engine in one layout. Bytes are for the whole engine, all devices together.

    ``kv_bytes_per_token`` counts KV heads that several devices replicate once per copy; ``kv_tokens``: total tokens of KV that
    fit; ``start_seconds``: until it was ready, with weights loaded.
    """

    layout: EngineLayout
    kv_bytes_per_token: float
    kv_tokens: int
    weight_bytes: int
    start_seconds: float


class EngineProfile:
    """Read-only. ``shapes`` and ``points`` in any order; if two points coincide, the later one counts."""

    def __init__(self, points: Iterable[ProfilePoint], shapes: Iterable[EngineShape] = ()) -> None:
        self.shapes = {shape.layout: shape for shape in shapes}
        self._curves: dict[tuple[Phase, EngineLayout], _Rows] = {}
        self._uneven: dict[tuple[Phase, EngineLayout], dict[float, _Rows]] = {}  # at imbalances above 1
        for point in points:
            at = point.phase, point.layout
            if point.imbalance == 1.0:
                rows = self._curves.setdefault(at, {})
            else:
                rows = self._uneven.setdefault(at, {}).setdefault(point.imbalance, {})
            rows.setdefault(point.batch, {})[point.tokens] = point.seconds

    def _points(self) -> Iterator[ProfilePoint]:
        """All that it is made of."""
        every = [(at, 1.0, rows) for at, rows in self._curves.items()]
        every += [(at, uneven, rows) for at, known in self._uneven.items() for uneven, rows in known.items()]
        for (phase, layout), imbalance, rows in every:
            for batch, row in rows.items():
                for tokens, seconds in row.items():
                    yield ProfilePoint(phase, layout, batch, tokens, seconds, imbalance=imbalance)

    def scaled(self, decode: float) -> EngineProfile:
        """A copy whose decode steps take ``decode`` times as long, in every layout: measurements of one layout during a run
        tell the machine's speed. Raises ValueError for an invalid factor."""
        if not 0 < decode < float("inf"):
            raise ValueError(f"{decode}: a factor is positive and finite")
        points = [
            replace(point, seconds=point.seconds * (decode if point.phase == "decode" else 1.0))
            for point in self._points()
        ]
        return EngineProfile(points, self.shapes.values())

    def extended(
        self, batch: float, context: float, layout: EngineLayout, seconds: float, imbalance: float = 1.0
    ) -> EngineProfile:
        """A copy with a decode step of this size, outside what was measured of ``layout``, taking ``seconds`` at an
        ``imbalance``. Other sizes out there, and other imbalances, are scaled by the same factor; measured points and other
        layouts stay. Raises KeyError for a layout without measurements, ValueError for invalid seconds."""
        size, tokens = max(1, round(batch)), max(1, round(context))
        factor = seconds / self.decode_seconds(size, tokens, layout, imbalance)
        contexts = {tokens, *(other for row in self._curves["decode", layout].values() for other in row)}
        points = list(self._points())
        for uneven in (1.0, *self._uneven.get(("decode", layout), {})):
            for count in sorted(contexts):
                before = self.decode_seconds(size, count, layout, uneven)
                found = before if self.covers(size, count, layout) else factor * before
                points.append(ProfilePoint("decode", layout, size, count, found, imbalance=uneven))
        return EngineProfile(points, self.shapes.values())

    def knows_routing(self, layout: EngineLayout) -> bool:
        """Whether this layout was measured at more than one imbalance."""
        return ("decode", layout) in self._uneven

    @property
    def layouts(self) -> tuple[EngineLayout, ...]:
        """Those measured in both phases, in order."""
        return tuple(
            sorted(
                layout for phase, layout in self._curves if phase == "decode" and ("prefill", layout) in self._curves
            )
        )

    def prefill_seconds(
        self, tokens: float, batch: float = 1, layout: EngineLayout = EngineLayout(), imbalance: float = 1.0
    ) -> float:
        """Until ``batch`` prompts of ``tokens`` each are computed, with nothing cached."""
        return self._read("prefill", layout, batch, tokens, imbalance)

    def decode_seconds(
        self, batch: float, context: float, layout: EngineLayout = EngineLayout(), imbalance: float = 1.0
    ) -> float:
        """One step of ``batch`` sequences, each with a context of ``context`` tokens."""
        return self._read("decode", layout, batch, context, imbalance)

    def sizes(self, phase: Phase, layout: EngineLayout) -> tuple[list[int], list[int]]:
        """Measured batches and lengths, ascending. KeyError: none."""
        rows = self._curves[phase, layout]
        return sorted(rows), sorted({tokens for row in rows.values() for tokens in row})

    def covers(self, batch: float, context: float, layout: EngineLayout = EngineLayout()) -> bool:
        """Whether decode steps of this size are within the measured ones."""
        rows = self._curves.get(("decode", layout), {})
        sizes = [tokens for row in rows.values() for tokens in row]
        return bool(sizes) and batch <= max(rows) and context <= max(sizes)

    def shape(self, layout: EngineLayout) -> EngineShape:
        """Memory and start-up of the engine in this layout. KeyError: not measured."""
        if layout not in self.shapes:
            raise KeyError(f"{layout} was not profiled; there are: {', '.join(map(str, sorted(self.shapes)))}")
        return self.shapes[layout]

    def rollout_seconds(
        self, lengths: Sequence[int], prompt: int, layout: EngineLayout, engines: int = 1, imbalance: float = 1.0
    ) -> float:
        """Seconds to generate responses of ``lengths`` tokens to prompts of ``prompt`` tokens on ``engines`` of this layout:
        dealt round robin and started in this order, as many at a time as the KV cache holds at their mean final length, each
        step as long as its batch makes it. Preemption is not included; it is what exceeds this."""
        if not lengths:
            return 0.0
        return max(self._one_engine(lengths[index::engines], prompt, layout, imbalance) for index in range(engines))

    def _one_engine(self, lengths: Sequence[int], prompt: int, layout: EngineLayout, imbalance: float) -> float:
        if not lengths:
            return 0.0
        mean = sum(lengths) / len(lengths)
        room = self.shapes[layout].kv_tokens if layout in self.shapes else None
        slots = len(lengths) if room is None else max(1, int(room // (prompt + mean)))
        waiting = list(reversed(lengths))  # the first one last, where it is taken from
        ends: list[int] = []  # step at which each running one ends
        seconds, step, started = 0.0, 0, 0.0  # started: the sum of the steps at which the running ones began
        begun: dict[int, list[int]] = {}
        while waiting or ends:
            joined = min(slots - len(ends), len(waiting))
            if joined:
                seconds += self.prefill_seconds(prompt, joined, layout, imbalance)
            for _ in range(joined):
                end = step + max(1, waiting.pop())
                heapq.heappush(ends, end)
                begun.setdefault(end, []).append(step)
                started += step
            until = ends[0]
            context = prompt + (step + until) / 2 - started / len(ends)
            seconds += (until - step) * self.decode_seconds(len(ends), context, layout, imbalance)
            step = until
            while ends and ends[0] == step:
                heapq.heappop(ends)
                started -= begun[step].pop()
        return seconds

    def _read(self, phase: Phase, layout: EngineLayout, batch: float, tokens: float, imbalance: float) -> float:
        rows = self._curves.get((phase, layout))
        if rows is None:
            raise KeyError(f"{phase} of {layout} was not profiled; there are: {', '.join(map(str, self.layouts))}")
        even = _at(rows, batch, tokens)
        if imbalance <= 1.0 or (phase, layout) not in self._uneven:
            return even
        known = self._uneven[phase, layout].items()
        return _along({1.0: even, **{uneven: _at(others, batch, tokens) for uneven, others in known}}, imbalance)


def _at(rows: _Rows, batch: float, tokens: float) -> float:
    """Of one phase in one layout, at one imbalance."""
    return _along({size: _along(row, tokens) for size, row in _near(rows, batch)}, batch)


def _near(rows: _Rows, batch: float) -> list[tuple[int, dict[int, float]]]:
    """The rows that a value at ``batch`` depends on: one or two."""
    sizes = sorted(rows)
    high = min(max(1, bisect_left(sizes, batch)), len(sizes) - 1)
    return [(size, rows[size]) for size in sizes[max(0, high - 1) : high + 1]]


def _along(curve: Mapping[_Size, float], at: float) -> float:
    """The piecewise linear curve through these points."""
    places = sorted(curve)
    if at <= places[0] or len(places) == 1:
        return curve[places[0]]
    high = min(bisect_left(places, at), len(places) - 1)
    left, right = places[high - 1], places[high]
    slope = (curve[right] - curve[left]) / (right - left)
    if at > right:
        return curve[right] + max(0.0, slope) * (at - right)
    return curve[left] + slope * (at - left)


def point_to_dict(point: ProfilePoint) -> dict[str, Any]:
    """Plain data, for a file."""
    names: dict[str, Any] = {"phase": point.phase, "tp": point.layout.tp, "ep": point.layout.ep, "batch": point.batch}
    if point.imbalance != 1.0:
        names["imbalance"] = point.imbalance
    return {**names, "tokens": point.tokens, "seconds": point.seconds, "spread": point.spread}


def point_from_dict(data: Mapping[str, Any]) -> ProfilePoint:
    """Raises KeyError, TypeError, ValueError or OverflowError for what is none."""
    layout = EngineLayout(int(data["tp"]), int(data["ep"]))
    numbers = (int(data["batch"]), int(data["tokens"]), float(data["seconds"]), float(data["spread"]))
    return ProfilePoint(data["phase"], layout, *numbers, imbalance=float(data.get("imbalance", 1.0)))


def shape_to_dict(shape: EngineShape) -> dict[str, Any]:
    """Plain data, for a file."""
    names = ("kv_bytes_per_token", "kv_tokens", "weight_bytes", "start_seconds")
    return {"tp": shape.layout.tp, "ep": shape.layout.ep, **{name: getattr(shape, name) for name in names}}


def shape_from_dict(data: Mapping[str, Any]) -> EngineShape:
    """Raises KeyError, TypeError, ValueError or OverflowError for what is none."""
    shape = EngineShape(
        EngineLayout(int(data["tp"]), int(data["ep"])),
        float(data["kv_bytes_per_token"]),
        int(data["kv_tokens"]),
        int(data["weight_bytes"]),
        float(data["start_seconds"]),
    )
    if not all(0 <= number < 1 << 60 for number in (*asdict(shape).values(),)[1:]):
        raise ValueError(f"{shape}: no such engine")
    return shape


@dataclass(slots=True)
class _SizeSeconds:
    alone: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    shared: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    cost: float | None = None  # of these; it is read more often than there are others

    def add(self, seconds: float, shared: bool) -> None:
        (self.shared if shared else self.alone).append(seconds)
        self.cost = None

    def seconds(self) -> float:
        if self.cost is None:
            found = sorted(self.alone or self.shared)
            self.cost = found[min(len(found) - 1, 4 * len(found) // 5)]
        return self.cost


class LearnedCosts:
    """What an engine's steps cost, learned at run time if there is no offline profile (ROSE 4.1 profiles beforehand).

    Guarantees: sizes are kept in powers of two, each with the upper quintile of its last ``KEPT`` steps; an unseen size is
    extrapolated in proportion from the next smaller one, else it costs what the next larger one does; with nothing seen at all
    it costs ``unknown`` seconds. No size costs more than a larger one that was seen: otherwise one slow step of a size, which
    then nobody may run again, would set its cost forever. Steps during which the device was shared count only until others
    were seen.
    """

    def __init__(self, unknown: float) -> None:
        self._unknown = unknown
        self._prefill: dict[int, _SizeSeconds] = {}
        self._decode: dict[int, _SizeSeconds] = {}

    def prefill(self, tokens: int) -> float:
        """Seconds of a chunk of so many tokens."""
        return self._read(self._prefill, tokens)

    def decode(self, batch: int) -> float:
        """Seconds of a step with one token for each of so many sequences."""
        return self._read(self._decode, batch)

    def observe_step(self, tokens: int, batch: int, seconds: float, shared: bool) -> None:
        """A step with so much work took so long; ``shared``: something else ran on the device meanwhile. If a step has both
        parts, the prefill is what exceeds the decoding."""
        if tokens:
            if batch and self._decode:
                seconds = max(seconds - self.decode(batch), seconds / 4)
            size = self._prefill.setdefault(_rank(tokens), _SizeSeconds())
        elif batch:
            size = self._decode.setdefault(_rank(batch), _SizeSeconds())
        else:
            return
        size.add(seconds, shared)

    def forget(self, decoding: bool) -> None:
        """Forget decoding, or else prefills: the next step is then all that is known."""
        (self._decode if decoding else self._prefill).clear()

    def _read(self, sizes: dict[int, _SizeSeconds], count: int) -> float:
        if count <= 0:
            return 0.0
        if not sizes:
            return self._unknown
        rank = _rank(count)
        least = min((size.seconds() for known, size in sizes.items() if known >= rank), default=math.inf)
        below = max((known for known in sizes if known <= rank), default=None)
        return least if below is None else min(least, sizes[below].seconds() * 2.0 ** (rank - below))


class ProfiledCosts:
    """Costs from a file of ``rl-coserve profile``; ``context``: tokens of a typical decoding sequence."""

    def __init__(self, profile: EngineProfile, context: int) -> None:
        self._profile, self._context = profile, context

    def prefill(self, tokens: int) -> float:
        """See :class:`LearnedCosts`."""
        return self._profile.prefill_seconds(tokens) if tokens else 0.0

    def decode(self, batch: int) -> float:
        """See :class:`LearnedCosts`."""
        return self._profile.decode_seconds(batch, self._context) if batch else 0.0

    def observe_step(self, tokens: int, batch: int, seconds: float, shared: bool) -> None:
        """Does nothing: the profile stands, and admission's guard covers its errors."""


StepCosts = LearnedCosts | ProfiledCosts


def _rank(count: int) -> int:
    return (count - 1).bit_length()
