"""Which points a profile has: the corners first, so that one that is interrupted can be read over the whole range."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from orchestrator.policies.parallelism.engine_profile import PHASES, EngineLayout, Phase


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


def powers(low: int, high: int, factor: int = 2) -> tuple[int, ...]:
    """low, low x factor, ... and ``high`` itself."""
    found = []
    while low < high:
        found.append(low)
        low *= factor
    return (*found, high)


def grid(layouts: Sequence[EngineLayout], batches: Sequence[int], lengths: Sequence[int]) -> list[GridPlace]:
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
