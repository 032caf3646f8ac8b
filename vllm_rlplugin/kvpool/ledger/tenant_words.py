"""What engines of a pool tell each other every tick, as the words of their tenant's published state, and what people ask of them.

Guarantees: packing and unpacking are inverse; words of another kind or another version read as None. Times are seconds of the
machine's monotonic clock, which all processes share; infinite and unknown times survive.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from struct import Struct

from orchestrator.policies.serving.admission import MODES, Mode, ServingState

_SERVING, _ROLLOUT = 0x5302, 0x5202  # kind and version
_SERVING_WORDS, _ROLLOUT_WORDS = Struct("=Q6d7Q"), Struct("=Q3d9Qd")
_ROLLOUT_USE = Struct("=Q2d")  # how the words of a rollout engine begin


class ControlWord(IntEnum):
    """Places of the pool's control words."""

    LENT = 0  # the most that is lent, in millionths of the pool, plus 1; 0: what the serving engine's flag says
    DRY = 1  # 1: rollout engines say what they would have run, and run nothing
    STEPS = 2  # counts the RL steps that began
    LOOKS = 3  # counts the serving side's looks at this page: people see that it is heard
    FLAG = 4  # what the serving engine's flag lends, in the form of LENT; 0: there was no serving engine yet


@dataclass(frozen=True, slots=True)
class ServingWords:
    """Of a serving engine. Counts since its start: ``firsts``, ``nexts``: first tokens and tokens after them; ``late_*``: of
    these beyond their SLO; ``blamed_*``: of the late ones, those that would have been in time without the time rollouts ran."""

    state: ServingState
    mode: Mode = "dual"
    firsts: int = 0
    late_first: int = 0
    blamed_first: int = 0
    nexts: int = 0
    late_next: int = 0
    blamed_next: int = 0

    def pack(self) -> bytes:
        """For :meth:`vllm_rlplugin.kvpool.ledger.page_ledger.PagePool.publish`."""
        counts = (self.firsts, self.late_first, self.blamed_first, self.nexts, self.late_next, self.blamed_next)
        return self.pack_parts(self.state, self.mode, counts)

    @staticmethod
    def pack_parts(state: ServingState, mode: Mode, counts: Iterable[int]) -> bytes:
        """The same, of its parts: twice in every step."""
        head = _SERVING | MODES.index(mode) << 16 | state.busy << 24 | state.waiting << 25
        head |= min(state.sharers, 255) << 32
        times = (state.at, state.ttft_slack, state.tpot_slack, state.arriving, state.step_end, state.arriving_tpot)
        return _SERVING_WORDS.pack(head, *times, state.tick, *counts)

    @classmethod
    def unpack(cls, words: bytes | None) -> ServingWords | None:
        """None: nothing of a serving engine."""
        if words is None:
            return None
        head, at, ttft, tpot, arriving, end, beside, tick, *counts = _SERVING_WORDS.unpack(words)
        if head & 0xFFFF != _SERVING:
            return None
        busy, waiting, sharers = bool(head >> 24 & 1), bool(head >> 25 & 1), max(1, head >> 32 & 255)
        state = ServingState(at, ttft, tpot, end, busy, arriving, tick, sharers, waiting, beside)
        return cls(state, MODES[(head >> 16 & 255) % len(MODES)], *counts)


@dataclass(frozen=True, slots=True)
class RolloutWords:
    """Of a rollout engine. ``running``: a step of it runs since ``begun``; ``busy``: seconds of all steps before; ``minimum``:
    pages that it cannot give back while it lives. Counts since its start; ``would``: tokens admitted in a dry run, never
    computed; ``refused``: steps; ``stalls``, ``returned``: requests; ``misses``: steps after which serving had no slack left.
    ``inactive``: it was deactivated, and runs nothing; ``weights``: bytes of its weights that are in memory, 0: not said;
    ``activation``: seconds that the latest one took. ``loading``: since ``begun`` its thread puts weights into the model, and
    gives nothing back meanwhile."""

    running: bool = False
    dry: bool = False
    begun: float = 0.0
    busy: float = 0.0
    guard: float = 0.0
    minimum: int = 0
    steps: int = 0
    tokens: int = 0
    would: int = 0
    refused: int = 0
    stalls: int = 0
    returned: int = 0
    misses: int = 0
    inactive: bool = field(default=False, kw_only=True)
    weights: int = field(default=0, kw_only=True)
    activation: float = field(default=0.0, kw_only=True)
    loading: bool = field(default=False, kw_only=True)

    def pack(self) -> bytes:
        """For :meth:`vllm_rlplugin.kvpool.ledger.page_ledger.PagePool.publish`."""
        head = _ROLLOUT | self.running << 16 | self.dry << 17 | self.inactive << 18 | self.loading << 19
        counts = (self.steps, self.tokens, self.would, self.refused, self.stalls, self.returned, self.misses)
        times = (self.begun, self.busy, self.guard)
        return _ROLLOUT_WORDS.pack(head, *times, self.minimum, *counts, self.weights, self.activation)

    @classmethod
    def unpack(cls, words: bytes | None) -> RolloutWords | None:
        """None: nothing of a rollout engine."""
        if words is None:
            return None
        head, begun, busy, guard, minimum, *counts, weights, took = _ROLLOUT_WORDS.unpack(words)
        if head & 0xFFFF != _ROLLOUT:
            return None
        bits = {"inactive": bool(head >> 18 & 1), "loading": bool(head >> 19 & 1)}
        running, dry = bool(head >> 16 & 1), bool(head >> 17 & 1)
        return cls(running, dry, begun, busy, guard, minimum, *counts, **bits, weights=weights, activation=took)

    @staticmethod
    def read_used(words: bytes | None, now: float) -> float | None:
        """:meth:`used_until` of these words, which are read before and after every step of a serving engine."""
        if words is None:
            return None
        head, begun, busy = _ROLLOUT_USE.unpack_from(words)
        if head & 0xFFFF != _ROLLOUT:
            return None
        return float(busy) + (max(0.0, now - begun) if head >> 16 & 1 else 0.0)

    def used_until(self, now: float) -> float:
        """Seconds that its steps have taken so far."""
        return self.busy + (max(0.0, now - self.begun) if self.running else 0.0)
