"""A serving engine in virtual time that prefills and decodes on one device, prompts in chunks (ROSE 4.3, PD collocation).

Guarantees: a step has one token of each sequence that decodes and a chunk of the prompts that wait, in the order they came, as a
stock vLLM schedules; a prompt has its first token with the step of its last chunk. While no prompt waits, decoding is played from
one change of its batch to the next, as on a decoder. Rollouts get what the less of both slacks allows.

A request that arrives waits for the step under way, rollouts' and serving's. Not modelled: preemption for want of KV memory.
"""

from __future__ import annotations

import asyncio
from typing import Any

from orchestrator.policies.serving.admission import ServingState, arriving_slack, tpot_slack, ttft_slack
from orchestrator.sim.coserving.serving_engine import DONE, ServingEngine, UserRequest


class CollocatedEngine(ServingEngine):
    """``chunk``: tokens that a step computes at most, those that decode counted in. See the base class."""

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
        elapsed = asyncio.get_running_loop().time() - self._began
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
        self._arm_timer(asyncio.get_running_loop().time() + rolled + wait + own, self._mixed)
        self._grant(rolled / (rolled + wait + own))

    def _mixed(self) -> None:
        now, done = asyncio.get_running_loop().time(), self._mixing or []
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

    def answered(self, now: float) -> None:
        """Those that have all their tokens go."""
        for one in self._active:
            if one.left <= DONE:
                self.served.tpot.append((now - one.first) / (one.answer - 1))
        self._active = [one for one in self._active if one.left > DONE]

    def state(self) -> ServingState:
        """What it publishes: both slacks, of which the less counts."""
        now = asyncio.get_running_loop().time()
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
            arriving=arriving_slack(self._prompts, ahead + ready, self.slo, self.prefill_seconds),
            tick=self._tick,
            waiting=bool(queued),
        )
