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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.policies.parallelism.engine_profile import StepCosts
from orchestrator.policies.serving.admission import PROMPTS, Mode, ServingState, Slo, arriving_slack, tpot_slack
from vllm_rlplugin.kvpool.ledger.page_ledger import PagePool
from vllm_rlplugin.kvpool.ledger.tenant_words import RolloutWords, ServingWords

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
    expected: float  # seconds, alone


class ServingMeter:
    """Of the serving tenant of ``pool``. ``most``: tokens that one step computes; ``rollouts``: slots of the rollout tenants."""

    def __init__(
        self,
        pool: PagePool,
        costs: StepCosts,
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
        self._over, self._over_rolled = 0.0, 0.0  # when the latest output was there, and what rollouts had run by then
        self._lock = threading.Lock()  # of what is published: the scheduler's thread, and the guardian's while idle
        self._tick = 0
        self._prompts: deque[int] = deque(maxlen=PROMPTS)
        self._seen: dict[int, float] = {}  # slot -> seconds that it had run
        self._rolled = 0.0
        self._counts = [0] * 6  # as in ServingWords
        self.latest = ServingWords(ServingState(0.0), mode)

    # -- from the scheduler ------------------------------------------------------------------------------------------

    def request_added(self, request: Any) -> None:
        """A request was added."""
        now = self._now()
        if request.request_id not in self._requests:
            self._prompts.append(request.num_tokens)
        with self._lock:
            self._requests[request.request_id] = _Request(request, _arrival(request, now), self._rolled_until(now))
        self._publish(now)

    def step_scheduled(self, output: Any) -> None:
        """A step was scheduled. With async scheduling the one before it may still be under way."""
        now = self._now()
        tokens, batch = count_parts(output, {name: found.core for name, found in self._requests.items()})
        expected = self._costs.prefill(tokens) + self._costs.decode(batch) if tokens or batch else 0.0
        names = frozenset(output.num_scheduled_tokens)
        self._steps.append(
            _Step(now, self._rolled_until(now), tokens, batch, names, expected if expected < math.inf else 0.0)
        )
        self._publish(now)

    def step_ended(self) -> None:
        """The output of the earliest step under way is there, and vLLM has taken it."""
        now = self._now()
        step, rolled = self._steps.popleft(), self._rolled_until(now)
        if step.tokens or step.batch:  # it ran from the end of the one before on, whenever it was scheduled
            since, before = (step.begun, step.rolled) if step.begun >= self._over else (self._over, self._over_rolled)
            self._costs.observe_step(step.tokens, step.batch, now - since, shared=rolled - before > 1e-4)
        self._over, self._over_rolled = now, rolled
        for name in step.names:
            if (found := self._requests.get(name)) is not None:
                self._count_token(found, now, rolled)
        self._publish(now)

    def _count_token(self, found: _Request, now: float, rolled: float) -> None:
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

    def publish_idle(self) -> None:
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
            self.latest = ServingWords(self.serving_state(now, sharers), self._mode, *self._counts)
            self._pool.publish(self.latest.pack())

    def serving_state(self, now: float, sharers: int = 1) -> ServingState:
        """Slacks now. Those of unknown costs are minus infinity: nothing is lent of what is not known."""
        steps = tuple(self._steps)
        ends = self._ends(steps, now)
        end = ends[-1] if ends else 0.0
        running = max(0.0, end - now)
        ttft = math.inf
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
        tpot = self._tpot(now, list(zip(steps, ends, strict=True)), running + step)
        arriving = arriving_slack(self._prompts, ahead, self._slo, self._costs.prefill)
        if self._phase == "decode":
            ttft = arriving = math.inf
            waiting = 0
        elif self._phase == "prefill":
            tpot = math.inf
        busy = bool(self._requests) or bool(self._steps)
        return ServingState(now, ttft, tpot, end, busy, arriving, self._tick, sharers, waiting > 0)

    def _ends(self, steps: tuple[_Step, ...], now: float) -> list[float]:
        """When the steps under way will be over, by their costs; one that takes longer than expected: now."""
        found: list[float] = []
        at = self._over
        for step in steps:
            at = max(now, max(at, step.begun) + step.expected)
            found.append(at)
        return found

    def _tpot(self, now: float, flights: list[tuple[_Step, float]], otherwise: float) -> float:
        """Equation 2. Each step under way makes one more token of a request in it: the n-th is due n SLOs later than the next.
        ``otherwise``: seconds until those have a token that are in none."""
        groups: dict[float, list[tuple[float, float, float]]] = {}
        for name, found in self._requests.items():
            if found.outputs:
                mine = [end for step, end in flights if name in step.names]
                ready = max((end - now - at * self._slo.tpot for at, end in enumerate(mine)), default=otherwise)
                groups.setdefault(ready, []).append((found.first, found.since, found.outputs - 1))
        return min((tpot_slack(times, now, self._slo, ready) for ready, times in groups.items()), default=math.inf)

    def _rolled_until(self, now: float) -> float:
        """Seconds that rollout engines have run, all together, since they were first seen."""
        for slot in self._rollouts():
            found = RolloutWords.unpack(self._pool.read(slot))
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


def count_parts(output: Any, requests: Mapping[str, Any]) -> tuple[int, int]:
    """Tokens of prefill, and sequences that decode, of a step that was scheduled just now. ``requests``: vLLM's own, by name.

    With async scheduling a request may decode while its first token is still in flight: vLLM then counts placeholders. With
    speculative decoding a sequence that decodes has its drafted tokens in the step as well."""
    tokens, batch, drafted = 0, 0, output.scheduled_spec_decode_tokens
    for name, count in output.num_scheduled_tokens.items():
        found = requests.get(name)
        begun = found is not None and (found.num_output_tokens or found.num_output_placeholders > 1)
        if begun and count <= 1 + len(drafted.get(name, ())):
            batch += 1
        else:
            tokens += count
    return tokens, batch
