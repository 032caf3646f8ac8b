"""What an engine's steps cost, learned while it runs: where there is no offline profile (ROSE 4.1 profiles beforehand).

Guarantees: sizes are kept in powers of two, each with the upper quintile of its last ``KEPT`` steps; a size that was never seen
costs as much more than the next smaller one as it is larger, else what the next larger one costs; nothing seen at all costs
``unknown``. Steps during which the device was shared count only until others were seen. Pure.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from orchestrator.policies.parallelism.engine_profile import EngineLayout, EngineProfile

KEPT = 16


@dataclass(slots=True)
class _Size:
    alone: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    shared: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))

    def seconds(self) -> float:
        found = sorted(self.alone or self.shared)
        return found[min(len(found) - 1, 4 * len(found) // 5)]


class LearnedCosts:
    """``unknown``: seconds of what nothing is known about."""

    def __init__(self, unknown: float) -> None:
        self._unknown = unknown
        self._prefill: dict[int, _Size] = {}
        self._decode: dict[int, _Size] = {}

    def prefill(self, tokens: int) -> float:
        """Seconds of a chunk of so many tokens."""
        return self._read(self._prefill, tokens)

    def decode(self, batch: int) -> float:
        """Of one token for each of so many sequences."""
        return self._read(self._decode, batch)

    def observe_step(self, tokens: int, batch: int, seconds: float, shared: bool) -> None:
        """A step with so much in it took so long; ``shared``: something else ran on the device meanwhile. Of a step with both
        parts, the prefill is what exceeds the decoding."""
        if tokens:
            if batch and self._decode:
                seconds = max(seconds - self.decode(batch), seconds / 4)
            size = self._prefill.setdefault(_rank(tokens), _Size())
        elif batch:
            size = self._decode.setdefault(_rank(batch), _Size())
        else:
            return
        (size.shared if shared else size.alone).append(seconds)

    def _read(self, sizes: dict[int, _Size], count: int) -> float:
        if count <= 0:
            return 0.0
        rank = _rank(count)
        below = max((known for known in sizes if known <= rank), default=None)
        if below is not None:
            return sizes[below].seconds() * 2.0 ** (rank - below)
        return sizes[min(sizes)].seconds() if sizes else self._unknown


class ProfiledCosts:
    """Of a file that ``rl-coserve profile`` made; ``context``: tokens of a typical sequence that decodes."""

    def __init__(self, profile: EngineProfile, context: int, layout: EngineLayout | None = None) -> None:
        self._profile, self._context, self._layout = profile, context, layout or EngineLayout()

    def prefill(self, tokens: int) -> float:
        """As :class:`LearnedCosts`."""
        return self._profile.prefill_seconds(tokens, 1, self._layout) if tokens else 0.0

    def decode(self, batch: int) -> float:
        """As :class:`LearnedCosts`."""
        return self._profile.decode_seconds(batch, self._context, self._layout) if batch else 0.0

    def observe_step(self, tokens: int, batch: int, seconds: float, shared: bool) -> None:
        """Nothing: the profile stands, and the guard of admission covers what it has wrong."""


StepCosts = LearnedCosts | ProfiledCosts


def _rank(count: int) -> int:
    return (count - 1).bit_length()
