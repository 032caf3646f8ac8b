"""How much of a rollout may run on a serving engine's device without hurting its SLOs (ROSE 4.1, equations 1 and 2).

Guarantees:

* No rollout step is admitted whose profiled cost exceeds the least slack of serving, less the guard. So a serving request is
  delayed by one admitted step at most.
* What serving published is believed for ``stale_seconds`` only: older, and there is no slack where it had requests.
* The guard grows with every near miss and decays slowly: a profile that is wrong costs rollout speed, never an SLO twice.

Deviation from equation 1, on the safe side: a queued prefill also waits for those before it in the queue.

Pure: seconds of one monotonic clock in, decisions out. Costs come from a profile (:mod:`orchestrator.policies.profile`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Mode = Literal["dual", "ttft", "tpot", "none"]
MODES: tuple[Mode, ...] = ("dual", "ttft", "tpot", "none")
CHUNK = 512  # tokens of a rollout's prefill at a time (ROSE 4.1)
STALL_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Slo:
    """Seconds. ``ttft``: from arrival to the first token; ``tpot``: between two tokens."""

    ttft: float = 0.1
    tpot: float = 0.05

    def __post_init__(self) -> None:
        if not (0 < self.ttft < math.inf and 0 < self.tpot < math.inf):
            raise ValueError(f"{self}: must be positive seconds")


@dataclass(frozen=True, slots=True)
class ServingState:
    """What a serving engine publishes every tick. ``at``: when; slacks: seconds, infinite where no request is concerned;
    ``step_end``: when the step that runs is expected to end; ``busy``: it has requests."""

    at: float
    ttft_slack: float = math.inf
    tpot_slack: float = math.inf
    step_end: float = 0.0
    busy: bool = False


@dataclass(frozen=True, slots=True)
class Admitted:
    """What may run now: ``tokens`` of prefill, or (``decode``) one step of that many sequences; ``seconds``: its cost."""

    tokens: int = 0
    decode: int = 0
    seconds: float = 0.0
    reason: str = ""  # why nothing may


def ttft_slack(
    queued: Iterable[tuple[float, int]], now: float, slo: Slo, prefill: Callable[[int], float], running: float = 0.0
) -> float:
    """Equation 1, the least of all: ``queued``: (arrival, tokens left to prefill), in the order they will run; ``prefill``:
    seconds for so many tokens; ``running``: seconds that the step in flight still takes."""
    least, ahead = math.inf, running
    for arrival, tokens in queued:
        ahead += prefill(tokens)
        least = min(least, arrival + slo.ttft - now - ahead)
    return least


def tpot_slack(last: Sequence[float], now: float, slo: Slo, decode: Callable[[int], float]) -> float:
    """Equation 2, the least of all: ``last``: when each active decode had its newest token; ``decode``: seconds of a step."""
    return min(last) + slo.tpot - now - decode(len(last)) if last else math.inf


def floor(slo: Slo, prompt: int, batch: int, prefill: Callable[[int], float], decode: Callable[[int], float]) -> str:
    """Why serving alone cannot keep its SLO with such prompts and batches; "" when it can."""
    if prefill(prompt) >= slo.ttft:
        return f"a prompt of {prompt} tokens alone takes {prefill(prompt):.3f} s, the TTFT SLO is {slo.ttft:g} s"
    if decode(batch) >= slo.tpot:
        return f"a decode step of {batch} sequences alone takes {decode(batch):.3f} s, the TPOT SLO is {slo.tpot:g} s"
    return ""


class Admission:
    """Of one rollout engine. ``prefill`` and ``decode``: its own profiled seconds, on this device."""

    def __init__(
        self,
        prefill: Callable[[int], float],
        decode: Callable[[int], float],
        *,
        mode: Mode = "dual",
        guard: float = 0.002,
        guard_most: float = 0.05,
        stale_seconds: float = 0.1,
        chunk: int = CHUNK,
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"mode = {mode!r}: one of {', '.join(MODES)}")
        if not 0 <= guard <= guard_most or chunk < 1 or stale_seconds <= 0:
            raise ValueError(
                f"guard {guard} to {guard_most}, chunk {chunk}, stale after {stale_seconds} s: no such admission"
            )
        self.mode, self.chunk = mode, chunk
        self.guard = guard
        self._least, self._most = guard, guard_most
        self._stale = stale_seconds
        self._prefill, self._decode = prefill, decode

    def slack(self, state: ServingState, now: float) -> float:
        """Seconds that serving can spare from now on, guard included; infinite when it is idle."""
        if self.mode == "none" or not state.busy:  # idle holds until serving says otherwise, however old
            return math.inf
        if now - state.at > self._stale:
            return -math.inf
        considered = {
            "dual": (state.ttft_slack, state.tpot_slack),
            "ttft": (state.ttft_slack,),
            "tpot": (state.tpot_slack,),
        }[self.mode]
        return min(considered) - (now - state.at) - self.guard

    def admit(self, state: ServingState, now: float, prefill_left: int, decoding: int) -> Admitted:
        """What may run next of ``prefill_left`` tokens to prefill and ``decoding`` sequences; decoding goes first, as it holds
        KV memory. One kind a step."""
        slack = self.slack(state, now)
        if slack == -math.inf:
            return Admitted(reason="serving has not said anything for too long")
        if self.mode != "none" and state.busy and state.step_end > now:
            return Admitted(reason="a serving step runs")
        if decoding:
            for batch in _halves(decoding):
                if (seconds := self._decode(batch)) <= slack:
                    return Admitted(0, batch, seconds)
        elif prefill_left:
            for tokens in _halves(min(prefill_left, self.chunk)):
                if (seconds := self._prefill(tokens)) <= slack:
                    return Admitted(tokens, 0, seconds)
        else:
            return Admitted(reason="nothing to do")
        return Admitted(reason="serving has no slack")

    def ran(self, slack_left: float) -> None:
        """A rollout step is over; ``slack_left``: what serving then published. Below zero is a near miss."""
        if slack_left < 0:
            self.guard = min(self._most, max(2 * self.guard, 0.001))
        else:
            self.guard = max(self._least, 0.99 * self.guard)


class StallWatch:
    """Whether a rollout on this device makes no progress any more and is to be dropped here (ROSE 4.1: 2 s)."""

    def __init__(self, seconds: float = STALL_SECONDS) -> None:
        if seconds <= 0:
            raise ValueError(f"stall after {seconds} s: must be positive")
        self._seconds = seconds
        self._since: float | None = None

    def progressed(self, now: float) -> None:
        """A token was made, or there is nothing to do."""
        self._since = now

    def stalled(self, now: float) -> bool:
        """Whether nothing has moved for too long, since the first time it was asked."""
        if self._since is None:
            self._since = now
        return now - self._since >= self._seconds


def _halves(most: int) -> Iterable[int]:
    while most:
        yield most
        most //= 2
