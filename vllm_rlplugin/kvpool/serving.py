"""What a serving engine tells rollout engines about time: its slack, and what became of its SLOs (ROSE 4.1, equations 1 and 2).

Guarantees: published when a request arrives, when a step begins and when it ends, while there is a rollout engine in the pool;
an idle engine says so. Nothing here waits for anybody. Arrival is when the front end took the request, so that time in queues in
front of the scheduler counts; the time of a token is when its step's output was there.

On a prefiller (KV producer) no decode is counted, on a decoder (KV consumer) no first token: the disaggregated case of the paper;
else both are, and the least slack holds (its colocated case).
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from orchestrator.policies.admission import PROMPTS, Mode, ServingState, Slo, arriving_slack, tpot_slack
from orchestrator.policies.costs import Costs
from vllm_rlplugin.kvpool.ledger import PagePool
from vllm_rlplugin.kvpool.words import Rolled, Served

_CROWD = 256  # requests without a token: more than these, and there is no slack to compute

Phase = str  # "both", "prefill", "decode"


@dataclass(slots=True)
class _Request:
    core: Any  # vLLM's own; its counters are live
    since: float  # when it arrived, or had its latest token
    rolled: float  # seconds that rollouts had run by then
    outputs: int = 0
    first: float = 0.0  # when it had its first token


@dataclass(frozen=True, slots=True)
class _Step:
    begun: float
    rolled: float
    tokens: int  # of prefill
    batch: int  # sequences that decode
    names: frozenset[str]


class ServingMeter:
    """Of the serving tenant of ``pool``. ``most``: tokens that one step computes; ``rollouts``: slots of the rollout tenants."""

    def __init__(
        self,
        pool: PagePool,
        costs: Costs,
        slo: Slo,
        mode: Mode,
        *,
        phase: Phase = "both",
        most: int = 2048,
        rollouts: Callable[[], tuple[int, ...]],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool, self._costs, self._slo, self._mode = pool, costs, slo, mode
        self._phase, self._most, self._rollouts, self._now = phase, most, rollouts, now
        self._requests: dict[str, _Request] = {}
        self._steps: deque[_Step] = deque()
        self._step_end = 0.0
        self._lock = threading.Lock()  # of what is published: the scheduler's thread, and the guardian's while idle
        self._tick = 0
        self._prompts: deque[int] = deque(maxlen=PROMPTS)
        self._seen: dict[int, float] = {}  # slot -> seconds that it had run
        self._rolled = 0.0
        self._counts = [0] * 6  # as in Served
        self.latest = Served(ServingState(0.0), mode)

    # -- from the scheduler ------------------------------------------------------------------------------------------

    def arrived(self, request: Any) -> None:
        """A request was added."""
        now = self._now()
        if request.request_id not in self._requests:
            self._prompts.append(request.num_tokens)
        with self._lock:
            self._requests[request.request_id] = _Request(request, _arrival(request, now), self._rolled_until(now))
        self._publish(now)

    def began(self, output: Any) -> None:
        """A step was scheduled."""
        now, tokens, batch = self._now(), 0, 0
        for name, count in output.num_scheduled_tokens.items():
            found = self._requests.get(name)
            if found is not None and found.outputs and count == 1:
                batch += 1
            else:
                tokens += count
        expected = self._costs.prefill(tokens) + self._costs.decode(batch) if tokens or batch else 0.0
        self._step_end = max(now, self._step_end if self._steps else now) + (expected if expected < math.inf else 0.0)
        self._steps.append(_Step(now, self._rolled_until(now), tokens, batch, frozenset(output.num_scheduled_tokens)))
        self._publish(now)

    def ended(self) -> None:
        """The output of the earliest step under way is there, and vLLM has taken it."""
        now = self._now()
        step, rolled = self._steps.popleft(), self._rolled_until(now)
        if step.tokens or step.batch:
            self._costs.saw(step.tokens, step.batch, now - step.begun, shared=rolled - step.rolled > 1e-4)
        for name in step.names:
            if (found := self._requests.get(name)) is not None:
                self._note(found, now, rolled)
        self._publish(now)

    def _note(self, found: _Request, now: float, rolled: float) -> None:
        new = found.core.num_output_tokens - found.outputs
        if new <= 0:
            return
        first = not found.outputs
        limit = self._slo.ttft if first else self._slo.tpot * new
        if not (first and self._phase == "decode") and not (not first and self._phase == "prefill"):
            at = 0 if first else 3
            over = now - found.since - limit
            self._counts[at] += 1 if first else new
            self._counts[at + 1] += over > 0
            self._counts[at + 2] += 0 < over <= rolled - found.rolled
        found.first = now if first else found.first
        found.since, found.rolled, found.outputs = now, rolled, found.core.num_output_tokens

    def tune(self, slo: Slo, mode: Mode) -> None:
        """Other SLOs, and which of them count, from now on; counts begin anew."""
        self._slo, self._mode, self._counts = slo, mode, [0] * 6
        self._publish(self._now())

    # -- from the guardian's thread ----------------------------------------------------------------------------------

    def idle(self) -> None:
        """Nothing may have happened for long: say that there is nothing to do, if so, as after requests that were aborted."""
        if not self._steps:
            self._publish(self._now(), only_idle=True)

    # -- what is published -------------------------------------------------------------------------------------------

    def _publish(self, now: float, only_idle: bool = False) -> None:
        with self._lock:
            gone = [name for name, found in self._requests.items() if found.core.is_finished()]
            for name in gone:
                del self._requests[name]
            sharers = len(self._rollouts())
            if not sharers or (only_idle and self._requests):
                return
            self._tick += 1
            self.latest = Served(self.state(now, sharers), self._mode, *self._counts)
            self._pool.publish(self.latest.pack())

    def state(self, now: float, sharers: int = 1) -> ServingState:
        """Slacks now. Those of unknown costs are minus infinity: nothing is lent of what is not known."""
        end = self._step_end if self._steps else 0.0
        running = max(0.0, end - now)
        flight = self._steps[-1].names if self._steps else frozenset[str]()
        ttft = tpot = math.inf
        ahead, queued, decoding = running, 0, 0
        waiting = 0
        for found in self._requests.values():
            if found.outputs:
                decoding += 1
                continue
            waiting += 1
            left = max(0, found.core.num_tokens - found.core.num_computed_tokens)
            queued += left
            ahead += self._costs.prefill(left)
            ttft = min(ttft, found.since + self._slo.ttft - now - ahead)
        if waiting > _CROWD:
            ttft = -math.inf
        step = self._costs.decode(decoding) + self._costs.prefill(min(queued, self._most))
        for under_way, ready in ((True, running), (False, running + step)):
            times = [
                (found.first, found.since, found.outputs - 1)
                for name, found in self._requests.items()
                if found.outputs and (name in flight) is under_way
            ]
            tpot = min(tpot, tpot_slack(times, now, self._slo, ready))
        arriving = arriving_slack(self._prompts, ahead, self._slo, self._costs.prefill)
        if self._phase == "decode":
            ttft = arriving = math.inf
            waiting = 0
        elif self._phase == "prefill":
            tpot = math.inf
        busy = bool(self._requests) or bool(self._steps)
        return ServingState(now, ttft, tpot, end, busy, arriving, self._tick, sharers, waiting > 0)

    def _rolled_until(self, now: float) -> float:
        """Seconds that rollout engines have run, all together, since they were first seen."""
        for slot in self._rollouts():
            found = Rolled.unpack(self._pool.read(slot))
            if found is not None:
                total = found.used_until(now)
                self._rolled += max(0.0, total - self._seen.get(slot, total))
                self._seen[slot] = total
        return self._rolled


def _arrival(request: Any, now: float) -> float:
    """On our clock. vLLM stamps with the wall clock, an engine worker with the monotonic one."""
    for clock in (time.time(), now):
        age = clock - request.arrival_time
        if -1.0 < age < 3600.0:
            return now - max(0.0, float(age))
    return now
