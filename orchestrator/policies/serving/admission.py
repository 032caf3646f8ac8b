"""How much rollout work may run on a serving engine's device without violating its SLOs (ROSE 4.1, equations 1 and 2).

Guarantees:

* No rollout step is admitted while a serving prompt waits for its first token. It would delay every prompt that arrives until
  the queue is empty, one step each, and in a burst these are many. No device time is lost, as serving computes meanwhile. So a
  prompt waits for at most one admitted step, the one that was running when the first of its burst came.
* No rollout step is admitted that costs more than the least slack of serving, minus the guard (except trials, below); and all
  steps admitted on one published slack together take no more than it. So serving is delayed by no more than it can spare.
* What serving published is trusted until ``STALE_SECONDS`` after its running step should have ended; after that, there is no
  slack if serving had requests.
* The guard grows with every near miss of a step that took longer than admitted, and decays slowly, even while it keeps steps
  out: a wrong profile costs rollout speed, but never violates an SLO twice. A burst that leaves no slack says nothing about
  the profile.
* With ``trials``, for learned costs: a cost that kept every step out for ``TRIAL_SECONDS`` is not trusted forever, as what
  never runs is never measured again. While serving has no requests and some slack, the smallest step runs once. Each failed
  trial doubles the time until the next, up to ``TRIAL_MOST``.

Deviations from the paper, on the safe side: equation 1 admits a step beside prompts that can spare it, which the first
guarantee forbids; a queued prefill also waits for those before it in the queue; a request whose tokens were slower than its
SLO on average has no slack (equation 2 only considers its latest token); and if serving publishes the slack of a request that
would arrive now (``arriving``, ``arriving_tpot``), a step takes no more than that, even beside an idle engine. So a request
must have earned, by tokens faster than the SLO, what the next prompt will cost it before rollouts may cost it anything. A
running decode step is no reason to wait: what is published then is how much later it may end.

Pure: seconds of one monotonic clock in, decisions out. Costs: :mod:`orchestrator.policies.parallelism.engine_profile`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

Mode = Literal["dual", "ttft", "tpot", "none"]
MODES: tuple[Mode, ...] = ("dual", "ttft", "tpot", "none")
CHUNK = 512  # tokens of a rollout's prefill at a time (ROSE 4.1)
GUARD_MOST = 0.05  # seconds
STALE_SECONDS = 0.1
TRIAL_SECONDS, TRIAL_MOST = 1.0, 64.0  # half of the time after which what makes no progress is handed back
PROMPTS = 64  # of the latest ones, by which one that arrives is judged


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
    """What a serving engine publishes every tick. ``at``: when; slacks: seconds, infinite without such requests; ``step_end``:
    when the running step is expected to end; ``busy``: it has requests; ``arriving``: the TTFT slack of a request that arrives
    now; ``tick``: counts publications; ``sharers``: rollout engines that share the slack; ``waiting``: a prompt waits for its
    first token, or is being prefilled; ``arriving_tpot``: the TPOT slack of a request that arrives now, and of those that
    decode beside it."""

    at: float
    ttft_slack: float = math.inf
    tpot_slack: float = math.inf
    step_end: float = 0.0
    busy: bool = False
    arriving: float = math.inf
    tick: int = 0
    sharers: int = 1
    waiting: bool = False
    arriving_tpot: float = math.inf


@dataclass(frozen=True, slots=True)
class AdmittedWork:
    """What may run now, as one step: ``tokens`` of prefill beside one token for each of ``decode`` sequences; ``seconds``: its
    cost; ``trial``: it runs whatever it costs, to measure it."""

    tokens: int = 0
    decode: int = 0
    seconds: float = 0.0
    reason: str = ""  # why nothing may
    trial: bool = False


def ttft_slack(
    queued: Iterable[tuple[float, int]], now: float, slo: Slo, prefill: Callable[[int], float], running: float = 0.0
) -> float:
    """Equation 1, the minimum over requests: ``queued``: (arrival, tokens left to prefill), in the order in which they will
    run; ``prefill``: seconds for so many tokens; ``running``: remaining seconds of the step in flight."""
    least, ahead = math.inf, running
    for arrival, tokens in queued:
        ahead += prefill(tokens)
        least = min(least, arrival + slo.ttft - now - ahead)
    return least


def tpot_slack(decoding: Iterable[tuple[float, float, float]], now: float, slo: Slo, ready: float) -> float:
    """Equation 2, the minimum over requests, of the latest token and of the mean. ``decoding``: for each active decode, when
    it got its first and newest tokens, and how many after the first; ``ready``: seconds until their next tokens."""
    due = min((min(last, first + made * slo.tpot) for first, last, made in decoding), default=math.inf)
    return due + slo.tpot - now - ready


def long_prompt(prompts: Iterable[int]) -> int:
    """The length in tokens that nine of ten of these prompts do not exceed; 0: there are none."""
    lengths = sorted(prompts)
    return lengths[9 * len(lengths) // 10] if lengths else 0


def arriving_slack(ahead: float, slo: Slo, cost: float) -> float:
    """Equation 1 for a request that arrives now, whose prompt takes ``cost`` seconds (infinite: unknown, then half of the
    SLO); ``ahead``: seconds of what is before it."""
    return slo.ttft - (ahead + cost if cost < math.inf else slo.ttft / 2)


def arriving_tpot_slack(mean: float, slo: Slo, decode: float, prefill: float) -> float:
    """Equation 2 if a request arrives now. It may begin to decode, in steps of ``decode`` seconds (infinite: none ever did),
    while the rollout step admitted now still runs. And those already decoding also wait for its prompt, ``prefill`` seconds in
    one of their steps; ``mean``: their least slack by mean pace, which is what they have earned so far; infinite: there are
    none."""
    own = slo.tpot - decode if decode < math.inf else math.inf
    return min(own, mean - prefill) if mean < math.inf else own


def slo_floor(
    slo: Slo, prompt: int, batch: int, prefill: Callable[[int], float], decode: Callable[[int], float]
) -> str:
    """Why serving on its own cannot meet its SLO with such prompts and batches; "" if it can."""
    if prefill(prompt) >= slo.ttft:
        return f"a prompt of {prompt} tokens alone takes {prefill(prompt):.3f} s, the TTFT SLO is {slo.ttft:g} s"
    if decode(batch) >= slo.tpot:
        return f"a decode step of {batch} sequences alone takes {decode(batch):.3f} s, the TPOT SLO is {slo.tpot:g} s"
    return ""


class Admission:
    """For one rollout engine. ``prefill`` and ``decode``: its own profiled seconds, on this device."""

    def __init__(
        self,
        prefill: Callable[[int], float],
        decode: Callable[[int], float],
        *,
        mode: Mode = "dual",
        guard: float = 0.002,
        trials: bool = False,
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"mode = {mode!r}: one of {', '.join(MODES)}")
        if not 0 <= guard <= GUARD_MOST:
            raise ValueError(f"guard {guard}: 0 to {GUARD_MOST} s")
        self.mode = mode
        self.guard = self._least = guard
        self._prefill, self._decode = prefill, decode
        self._spent = (-1, 0.0)  # of which tick, how many seconds
        self._trials = trials
        self._shut, self._patience = math.inf, TRIAL_SECONDS  # since when nothing was short enough; until it is tried

    def slack(self, state: ServingState, now: float) -> float:
        """Seconds that serving can spare from now on, minus the guard; infinite if nothing limits it."""
        if self.mode == "none":
            return math.inf
        if self.yields_to_prefill(state):
            return -math.inf
        least = state.arriving if self.mode in ("dual", "ttft") else math.inf
        if self.mode in ("dual", "tpot"):
            least = min(least, state.arriving_tpot)
        if not state.busy:  # holds until serving says otherwise, however old
            return least / state.sharers - self.guard
        late = now - max(state.at, state.step_end)
        if late > STALE_SECONDS:
            return -math.inf
        least = min(least, self.considered_slack(state))
        spent = self._spent[1] if self._spent[0] == state.tick else 0.0
        return (least - max(0.0, late)) / state.sharers - spent - self.guard

    def yields_to_prefill(self, state: ServingState) -> bool:
        """Whether the device is reserved for serving until its waiting prompts have their first tokens."""
        return state.waiting and self.mode in ("dual", "ttft")

    def considered_slack(self, state: ServingState) -> float:
        """The least slack of current requests, for the SLOs that this mode considers."""
        ttft = state.ttft_slack if self.mode in ("dual", "ttft") else math.inf
        tpot = state.tpot_slack if self.mode in ("dual", "tpot") else math.inf
        return min(ttft, tpot)

    def admit(self, state: ServingState, now: float, prefill_left: int, decoding: int) -> AdmittedWork:
        """What may run next of ``prefill_left`` tokens to prefill and ``decoding`` sequences. Decoding goes first, as it holds
        KV memory; a chunk of prefill joins it if all of it fits."""
        if not decoding and not prefill_left:
            return AdmittedWork(reason="nothing to do")
        if self.yields_to_prefill(state):
            return AdmittedWork(reason="a prompt of serving waits")
        slack = self.slack(state, now)
        if slack == -math.inf:
            return AdmittedWork(reason="serving has not said anything for too long")
        batch, tokens, seconds = 0, 0, 0.0
        for count in _halves(min(decoding, CHUNK)):
            if (cost := self._decode(count)) <= slack:
                batch, seconds = count, cost
                break
        if batch == decoding:
            for count in _halves(min(prefill_left, CHUNK - batch)):
                if seconds + (cost := self._prefill(count)) <= slack:
                    tokens, seconds = count, seconds + cost
                    break
        if not batch and not tokens:
            self._decay()
            self._shut = min(self._shut, now)
            if self._trials and not state.busy and slack > 0 and now - self._shut >= self._patience:
                self._shut, self._patience = math.inf, min(TRIAL_MOST, 2 * self._patience)
                return AdmittedWork(int(not decoding), int(decoding > 0), slack, trial=True)
            return AdmittedWork(reason="serving has no slack")
        self._shut, self._patience = math.inf, TRIAL_SECONDS
        if state.busy:
            self._spent = (state.tick, seconds + (self._spent[1] if self._spent[0] == state.tick else 0.0))
        return AdmittedWork(tokens, batch, seconds)

    def record_step(self, slack_left: float, overran: bool) -> None:
        """A rollout step is over. ``slack_left``: what serving published then, below zero is a near miss; ``overran``: it took
        longer than admitted."""
        if slack_left >= 0:
            self._decay()
        elif overran:
            self.guard = min(GUARD_MOST, max(2 * self.guard, 0.001))

    def _decay(self) -> None:
        self.guard = max(self._least, 0.99 * self.guard)


def _halves(most: int) -> Iterable[int]:
    while most:
        yield most
        most //= 2
