"""Measures the places of a grid, one engine start a layout, and keeps every point at once; the corners first, so that a profile
that is interrupted can be read over the whole range.

Guarantees: what the file has is not measured again; a place that does not fit into the engine is noted with its reason and
the others go on; when the engine dies, or somebody interrupts, every point so far is in the file, and the same call goes on
from there. Time is the event loop's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

from orchestrator.api import RetryableError, RunError
from orchestrator.policies.parallelism.engine_profile import (
    PHASES,
    EngineLayout,
    EngineShape,
    Phase,
    ProfilePoint,
    shape_from_dict,
)
from orchestrator.profiler.profile_file import ProfileFile


@dataclass(frozen=True, slots=True)
class GridPlace:
    """Where one point is to be measured; see :class:`orchestrator.policies.parallelism.engine_profile.ProfilePoint`."""

    phase: Phase
    layout: EngineLayout
    batch: int
    tokens: int

    @property
    def key(self) -> tuple[Phase, EngineLayout, int, int]:
        """As a file has it."""
        return self.phase, self.layout, self.batch, self.tokens


def powers_between(low: int, high: int, factor: int = 2) -> tuple[int, ...]:
    """low, low x factor, ... and ``high`` itself."""
    found = []
    while low < high:
        found.append(low)
        low *= factor
    return (*found, high)


def profile_grid(layouts: Sequence[EngineLayout], batches: Sequence[int], lengths: Sequence[int]) -> list[GridPlace]:
    """All places, layout by layout (an engine start each), within one in the order of :func:`_coarse_first`."""
    found = []
    for layout in layouts:
        pairs = [
            (left + right, batch, tokens)
            for left, batch in _coarse_first(sorted(batches))
            for right, tokens in _coarse_first(sorted(lengths))
        ]
        found += [GridPlace(phase, layout, batch, tokens) for _, batch, tokens in sorted(pairs) for phase in PHASES]
    return found


def _coarse_first(values: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(level, value): level 0 are both ends, then the middle of each gap, level by level."""
    if not values:
        return
    ends = dict.fromkeys((0, len(values) - 1))
    yield from ((0, values[index]) for index in ends)
    gaps, level = [(0, len(values) - 1)], 1
    while gaps:
        halves = []
        for low, high in gaps:
            if high - low > 1:
                middle = (low + high) // 2
                yield level, values[middle]
                halves += [(low, middle), (middle, high)]
        gaps, level = halves, level + 1


class Prober(Protocol):
    """One running engine."""

    async def shape(self) -> Mapping[str, Any]:
        """``kv_bytes_per_token``, ``kv_tokens``, ``weight_bytes`` of :class:`EngineShape`."""

    async def measure(self, phase: str, batch: int, tokens: int) -> Mapping[str, Any]:
        """``seconds`` and ``spread`` of :class:`ProfilePoint`; or ``why``: that it cannot be, in words."""


@dataclass(frozen=True, slots=True)
class ProfileProgress:
    """After each place. ``done`` and ``total`` count places, those of earlier calls included; ``left``: seconds,
    estimated, starts of engines not counted."""

    done: int
    total: int
    left: float
    text: str


async def measure_places(
    file: ProfileFile,
    places: Sequence[GridPlace],
    start: Callable[[EngineLayout], AbstractAsyncContextManager[Prober]],
    note: Callable[[ProfileProgress], object],
) -> None:
    """Bring the file to all of ``places``. ``start`` starts an engine in a layout. Raises RunError when one dies."""
    clock = asyncio.get_running_loop().time
    begun, before, measured, busy = clock(), file.seconds, 0, 0.0
    missing = [place for place in places if place.key not in file.points and place.key not in file.skipped]
    for layout, group in groupby(missing, key=lambda place: place.layout):
        started = clock()
        try:
            async with start(layout) as prober:
                shape = dict(await prober.shape()) | {"tp": layout.tp, "ep": layout.ep}
                file.shapes[layout] = _shape(shape, clock() - started)
                for place in group:
                    asked = clock()
                    text = await _one(file, place, prober)
                    measured += 1
                    file.seconds = before + clock() - begun
                    file.save()
                    busy += clock() - asked
                    left = busy / measured * (len(missing) - measured)
                    note(ProfileProgress(len(places) - len(missing) + measured, len(places), left, text))
        except RetryableError as error:
            raise RunError(
                f"the engine with {layout} failed: {error}\n  {len(file.points)} points are kept in {file.path}; "
                "the same command continues from there"
            ) from error


def _shape(found: Mapping[str, Any], seconds: float) -> EngineShape:
    return shape_from_dict({**found, "start_seconds": round(seconds, 3)})


async def _one(file: ProfileFile, place: GridPlace, prober: Prober) -> str:
    label = f"{place.layout} {place.phase} {place.batch} x {place.tokens}"
    found = await prober.measure(place.phase, place.batch, place.tokens)
    if why := found.get("why"):
        file.skipped[place.key] = str(why)
        return f"{label}: left out, {why}"
    seconds, spread = float(found["seconds"]), float(found["spread"])
    file.add(ProfilePoint(place.phase, place.layout, place.batch, place.tokens, seconds, spread))
    return f"{label}: {1e3 * seconds:.3g} ms"
