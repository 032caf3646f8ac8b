"""Serving engines in virtual time, whose slack and memory rollouts of another model use (ROSE 4.1).

What rollouts may have of a device is decided by the policies of a real one:
:mod:`orchestrator.policies.serving.admission` (equations 1 and 2) before their steps,
:mod:`orchestrator.policies.serving.kv_sharing` for their pages. Prefill and decode are apart, each on devices of its
own (ROSE 6); both in one engine: :class:`CollocatedEngine`. Prompts are played one by one;
decoding is played from one change of its batch to the next, at the pace that the batch has meanwhile.

One of both computes at a time (ROSE 4.1, temporal sharing). An admitted rollout step runs before each step of serving, never two;
prompts that wait admit none. A device that is nobody's but serving's is a stock one.

Not modelled: chunks of serving's prefill, prefixes that requests share, the transfer of KV from prefill to decode.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from orchestrator.policies.serving.admission import (
    PROMPTS,
    Admission,
    ServingState,
    Slo,
    arriving_slack,
    long_prompt,
    tpot_slack,
    ttft_slack,
)
from orchestrator.policies.serving.kv_sharing import KvSharing, SharingRules
from orchestrator.sim.cost_model import RooflineCosts

Role = Literal["prefill", "decode", "both"]  # both: :class:`CollocatedEngine`
PAGE = 2 << 20  # bytes (ROSE 4.1)
PEAK_SECONDS = 60.0  # over which serving's peak counts: the default of --rl-kv-pool-window
NEVER = 1e-9  # share of a device that is as good as none
DONE = 1e-6  # of a token


@dataclass(slots=True, eq=False)
class UserRequest:
    """Of a user. Sizes in tokens, times in seconds of the loop."""

    arrived: float
    prompt: int
    answer: int
    first: float = -1.0  # when its first token was there
    left: float = 0.0  # tokens that it still waits for


@dataclass(frozen=True, slots=True)
class RolloutDemand:
    """What a rollout engine would compute next: ``prefill``: tokens that wait to be prefilled; ``decoding``: sequences;
    ``step``: seconds of its steps in the mean, as they come."""

    prefill: int
    decoding: int
    step: float


class RolloutTenant(Protocol):
    """The rollout engine on a device, as the device sees it."""

    def demand(self) -> RolloutDemand | None:
        """None: it has nothing to do."""

    def set_share(self, share: float) -> None:
        """Its part of the device from now on."""

    def residual_seconds(self) -> float:
        """Seconds until the step in progress ends, 0 when there is none."""

    def set_room(self, pages: int) -> None:
        """It may hold so many pages from now on; what it holds beyond goes at once."""

    @property
    def pages(self) -> int:
        """That it holds."""


@dataclass(slots=True)
class ServedLatencies:
    """What users saw: seconds to the first token, and of each further one in the mean, a value a request."""

    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)


@dataclass(slots=True)
class ServingEngine:
    """One instance. ``costs``: of its model; ``rules``: of its KV pool; ``on_prefilled``: where a request goes then. ``up``: it
    serves; while it does not, its requests wait in it."""

    name: str
    role: Role
    costs: RooflineCosts
    slo: Slo
    rules: SharingRules
    served: ServedLatencies
    on_prefilled: Callable[[UserRequest], None]
    up: bool = True
    tenant: RolloutTenant | None = None
    admission: Admission | None = None
    busy_seconds: float = 0.0  # in which it computed
    _queue: deque[UserRequest] = field(default_factory=deque)
    _active: list[UserRequest] = field(default_factory=list)
    _sharing: KvSharing = field(init=False)
    _peaks: deque[tuple[float, int]] = field(default_factory=deque)
    _timer: asyncio.TimerHandle | None = None
    _running: UserRequest | None = None  # the prompt that is prefilled
    _began: float = 0.0  # of the present pace
    _cycle: float = 0.0  # seconds of a decode step, with what is computed between two
    _own: float = 0.0  # of them serving's
    _tick: int = 0
    _given: int = -1  # pages the tenant was told
    _prompts: deque[int] = field(default_factory=lambda: deque(maxlen=PROMPTS))

    def __post_init__(self) -> None:
        self._sharing = KvSharing(self.rules)

    # -- serving -----------------------------------------------------------------------------------------------------

    @property
    def load(self) -> float:
        """What waits: tokens to prefill, or sequences."""
        running = self._running.prompt if self._running else 0
        return float(len(self._active)) if self.role == "decode" else running + sum(one.prompt for one in self._queue)

    @property
    def pages(self) -> int:
        """Of KV that its requests hold."""
        tokens = sum(one.prompt + one.answer - one.left for one in self._active)
        return self.pages_of(tokens + (self._running.prompt if self._running else 0))

    def pages_of(self, tokens: float) -> int:
        """Of the KV of so many tokens, of those that there are."""
        return min(self.rules.pages, math.ceil(tokens * self.costs.model.kv_bytes / PAGE))

    def prefill_seconds(self, tokens: int) -> float:
        """Of a prompt by itself."""
        return self.costs.decode(0)[0] + self.costs.prefill(tokens, tokens * tokens / 2, 0)

    def prompt_seconds(self) -> float:
        """Of a long one of the latest prompts; infinite: there was none."""
        tokens = long_prompt(self._prompts)
        return self.prefill_seconds(tokens) if tokens else math.inf

    def decode_seconds(self, batch: int) -> float:
        """Of a step over so many sequences, with the contexts that it has."""
        fixed, growing = self.costs.decode(batch)
        contexts = sum(one.prompt + one.answer - one.left for one in self._active)
        return fixed + growing * contexts * batch / max(1, len(self._active))

    def add(self, request: UserRequest) -> None:
        """A request arrives, to be prefilled or to be decoded."""
        if self.role == "decode":
            self._advance_decoding()
            self._active.append(request)
            self.refresh()
            return
        self._queue.append(request)
        self._prompts.append(request.prompt)
        if self._running is None and self.up:
            self._prefill(self.tenant.residual_seconds() if self.tenant is not None else 0.0)
        else:
            self.refresh()

    def start(self) -> None:
        """It serves from now on."""
        self._advance_decoding()
        self.up = True
        if self.role == "prefill" and self._running is None and self._queue:
            self._prefill(0.0)
        self.refresh()

    def stop(self) -> list[UserRequest]:
        """It serves no more; what it has not begun is for others."""
        self._advance_decoding()
        self.up = False
        left = [*self._queue, *self._active]
        self._queue.clear()
        self._active.clear()
        self.refresh()
        return left

    def close(self) -> None:
        """The simulation ends."""
        if self._timer is not None:
            self._timer.cancel()

    def _prefill(self, wait: float) -> None:
        """Begin with the next prompt, after the tenant's step."""
        request = self._running = self._queue.popleft()
        own = self.prefill_seconds(request.prompt)
        self.busy_seconds += own
        self._arm_timer(_now() + wait + own, self._prefilled)
        self._grant(wait / (wait + own))

    def _prefilled(self) -> None:
        request, self._running = self._running, None
        assert request is not None
        now = _now()
        request.first, request.left = now, float(request.answer - 1)
        self.served.ttft.append(now - request.arrived)
        if self._queue and self.up:
            self._prefill(self._admitted()[1])
        else:
            self._timer = None
            self.refresh()
        if request.left:
            self.on_prefilled(request)

    def _decoded(self) -> None:
        self._timer = None
        self._advance_decoding()
        self.answered(_now())
        self.refresh()

    def answered(self, now: float) -> None:
        """Those that have all their tokens go."""
        for one in self._active:
            if one.left <= DONE:
                self.served.tpot.append((now - one.first) / (one.answer - 1))
        self._active = [one for one in self._active if one.left > DONE]

    def _advance_decoding(self) -> None:
        """Bring the decoding up to date."""
        now = _now()
        seconds, self._began = now - self._began, now
        if self._active and self._cycle and seconds > 0:
            steps = seconds / self._cycle
            for one in self._active:
                one.left = max(0.0, one.left - steps)
            self.busy_seconds += steps * self._own

    # -- what the tenant gets ----------------------------------------------------------------------------------------

    def begin_rl_step(self) -> None:
        """An RL step begins: budgets anew."""
        if self.tenant is not None:
            self._record_peak()
            peak = self._peaks[0][1] if self._peaks else 0
            self._sharing.begin_step(_now(), peak, self.tenant.pages)
            self._announce_budget()

    def refresh(self) -> None:
        """Something changed, here or in the tenant: pages and time anew."""
        self.refresh_pages()
        if self.role == "decode":
            self._pace()
        elif self._running is None:
            self._grant(1.0 if self._admitted()[0] else 0.0)

    def refresh_pages(self) -> None:
        """The tenant's budget anew."""
        self._record_peak()
        if self.tenant is not None:
            self._sharing.observe(_now(), self.pages, self.tenant.pages)
            self._announce_budget()

    def _record_peak(self) -> None:
        now, used = _now(), self.pages
        while self._peaks and self._peaks[-1][1] <= used:
            self._peaks.pop()
        self._peaks.append((now, used))
        while self._peaks[0][0] < now - PEAK_SECONDS:
            self._peaks.popleft()

    def _announce_budget(self) -> None:
        """The budget, where it changed."""
        assert self.tenant is not None
        pages = self._sharing.budget.pages
        if pages != self._given:
            self._given = pages
            self.tenant.set_room(pages)

    def _pace(self) -> None:
        """How fast tokens come from now on, and what is left for the tenant between them."""
        self._advance_decoding()
        batch = len(self._active) if self.up else 0
        part, step = self._admitted()
        if not batch:
            self._cycle = 0.0
            self._arm_timer(None, self._decoded)
            self._grant(part)
            return
        self._own = self.decode_seconds(batch)
        self._cycle = self._own + step
        self._arm_timer(_now() + min(one.left for one in self._active) * self._cycle, self._decoded)
        self._grant(part * step / self._cycle)

    def _admitted(self) -> tuple[float, float]:
        """What part of the tenant's sequences may take a step before serving's next one, and the seconds of that step."""
        demand = self.tenant.demand() if self.tenant is not None and self.admission is not None else None
        if demand is None:
            return 1.0, 0.0  # it may begin as soon as it has something
        assert self.admission is not None
        now, state = _now(), self.state()
        if state.busy:
            self.admission.record_step(self.admission.considered_slack(state), overran=False)  # costs are exact
        found = self.admission.admit(state, now, demand.prefill, demand.decoding)
        if not found.seconds:
            return 0.0, 0.0
        part = found.decode / demand.decoding if demand.decoding else 1.0
        return part, min(demand.step, found.seconds) if self.admission.mode != "none" else demand.step

    def state(self) -> ServingState:
        """What it publishes."""
        now = _now()
        self._tick += 1
        if self.role == "prefill":
            queued = [(one.arrived, one.prompt) for one in self._queue]
            least = ttft_slack(queued, now, self.slo, self.prefill_seconds)
            ahead = sum(self.prefill_seconds(tokens) for _, tokens in queued)
            arriving = arriving_slack(ahead, self.slo, self.prompt_seconds())
            waiting = bool(queued)
            return ServingState(now, least, busy=waiting, arriving=arriving, tick=self._tick, waiting=waiting)
        batch = len(self._active)
        times = [(one.first, now, one.answer - 1 - one.left) for one in self._active]
        least = tpot_slack(times, now, self.slo, self.decode_seconds(batch) if batch else 0.0)
        return ServingState(now, tpot_slack=least, busy=bool(batch), tick=self._tick)

    def _grant(self, share: float) -> None:
        if self.tenant is not None:
            self.tenant.set_share(max(NEVER, share))

    def _arm_timer(self, when: float | None, call: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if when is None else asyncio.get_running_loop().call_at(when, call)


class CollocatedEngine(ServingEngine):
    """One that prefills and decodes on one device, prompts in chunks (ROSE 4.3, PD collocation).

    Guarantees: a step has one token of each sequence that decodes and a chunk of the prompts that wait, in the order they came,
    as a stock vLLM schedules; a prompt has its first token with the step of its last chunk. While no prompt waits, decoding is
    played from one change of its batch to the next, as on a decoder. Rollouts get what the less of both slacks allows.

    A request that arrives waits for the step under way, rollouts' and serving's. Not modelled: preemption for want of KV memory.
    ``chunk``: tokens that a step computes at most, those that decode counted in."""

    def __init__(self, *arguments: Any, chunk: int, **more: Any) -> None:
        ServingEngine.__init__(self, *arguments, **more)
        self._chunk = chunk
        self._filled = 0  # tokens of the first prompt that are computed
        self._mixing: list[UserRequest] | None = None  # whose prompts the step under way completes; None: it has none
        self._takes = 0  # tokens of the first prompt after them

    @property
    def load(self) -> float:
        """Tokens of what waits, and of the next step."""
        return float(sum(one.prompt for one in self._queue) - self._filled + len(self._active))

    @property
    def pages(self) -> int:
        """See the base class."""
        return self.pages_of(sum(one.prompt + one.answer - one.left for one in self._active) + self._filled)

    def add(self, request: UserRequest) -> None:
        """A request arrives."""
        self._queue.append(request)
        self._prompts.append(request.prompt)
        if self._mixing is None and self.up:
            self._interrupt()
        else:
            self.refresh()

    def refresh(self) -> None:
        """Something changed; a step with prompts in it stays as it is."""
        self.refresh_pages()
        if self._mixing is None:
            self._pace()

    def _interrupt(self) -> None:
        """The first prompt after none: it waits for the step under way."""
        elapsed = _now() - self._began
        self._advance_decoding()
        if not self._active or not self._cycle:
            self._mix(self.tenant.residual_seconds() if self.tenant is not None else 0.0, 0.0)
            return
        wait = self._cycle - elapsed % self._cycle
        for one in self._active:
            one.left = max(0.0, one.left - wait / self._cycle)
        self.busy_seconds += wait * self._own / self._cycle
        self._mix(0.0, wait)

    def _mix(self, rolled: float, wait: float) -> None:
        """Begin a step with a chunk of the prompts, after ``rolled`` seconds of the tenant's and ``wait`` of both."""
        room, pairs, tokens = max(1, self._chunk - len(self._active)), 0.0, 0
        self._mixing, self._takes, filled = [], 0, self._filled
        for one in self._queue:
            part = min(room - tokens, one.prompt - filled)
            pairs += ((filled + part) ** 2 - filled**2) / 2
            tokens += part
            if filled + part < one.prompt:
                self._takes = filled + part
                break
            self._mixing.append(one)
            filled = 0
            if tokens >= room:
                break
        batch = len(self._active)
        own = self.costs.prefill(tokens, pairs, batch) + (self.decode_seconds(batch) or self.costs.decode(0)[0])
        self.busy_seconds += own
        self._cycle = 0.0
        self._arm_timer(_now() + rolled + wait + own, self._mixed)
        self._grant(rolled / (rolled + wait + own))

    def _mixed(self) -> None:
        now, done = _now(), self._mixing or []
        for one in self._active:
            one.left -= 1.0
        self.answered(now)
        for one in done:
            self._queue.popleft()
            one.first, one.left = now, float(one.answer - 1)
            self.served.ttft.append(now - one.arrived)
            if one.left:
                self._active.append(one)
        self._filled, self._mixing, self._began = self._takes, None, now
        if self._queue and self.up:
            self._mix(self._admitted()[1], 0.0)
        else:
            self._timer = None
            self.refresh()

    def state(self) -> ServingState:
        """What it publishes: both slacks, of which the less counts."""
        now = _now()
        self._tick += 1
        queued = [(one.arrived, one.prompt) for one in self._queue]
        if queued:
            queued[0] = (queued[0][0], max(1, queued[0][1] - self._filled))
        ahead = sum(self.prefill_seconds(tokens) for _, tokens in queued)
        ready = self.decode_seconds(len(self._active)) if self._active else 0.0
        times = [(one.first, now, one.answer - 1 - one.left) for one in self._active]
        return ServingState(
            now,
            ttft_slack(queued, now, self.slo, self.prefill_seconds),
            tpot_slack(times, now, self.slo, ready),
            busy=bool(queued or times),
            arriving=arriving_slack(ahead + ready, self.slo, self.prompt_seconds()),
            tick=self._tick,
            waiting=bool(queued),
        )


def _now() -> float:
    return asyncio.get_running_loop().time()
