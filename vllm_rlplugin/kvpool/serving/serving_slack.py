"""What a serving engine tells rollout engines about time: its slack, and what became of its SLOs (ROSE 4.1, equations 1 and 2).

Guarantees: published when a request arrives, when a step begins and when it ends, while there is a rollout engine in the pool;
an idle engine says so. Nothing here waits for anybody. Arrival is when the front end took the request, so that time in queues in
front of the scheduler counts; the time of a token is when its step's output was there. A step costs what changes in it: requests
that go on decoding together are one group (but for those with drafts, each of which is looked at).

On a prefiller (KV producer) no decode is counted, on a decoder (KV consumer) no first token: the disaggregated case of the paper;
else both are, and the least slack holds (its colocated case).
"""

from __future__ import annotations

import heapq
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from orchestrator.policies.parallelism.engine_profile import StepCosts
from orchestrator.policies.serving.admission import (
    PROMPTS,
    Mode,
    ServingState,
    Slo,
    arriving_slack,
    arriving_tpot_slack,
    long_prompt,
)
from vllm_rlplugin.kvpool.ledger.page_ledger import PagePool
from vllm_rlplugin.kvpool.ledger.tenant_words import RolloutWords, ServingWords
from vllm_rlplugin.kvpool.serving.step_parts import StepParts

_CROWD = 256  # requests without a token: more than these, and there is no slack to compute
_FEW, _ARRIVALS = 16, 0.005  # of a burst beyond so many, arrivals are published so many seconds apart

Phase = str  # "both", "prefill", "decode"


@dataclass(slots=True)
class _Request:
    core: Any  # vLLM's own; its counters are live
    since: float  # when it arrived
    rolled: float  # seconds that rollouts had run by then
    group: _Group | None = None  # since it has a token
    base: float = 0.0  # of its group: when its mean pace says that its tokens so far were due, less the group's steps
    joined: int = 0  # tokens it had, less the group's steps

    def outputs(self) -> int:
        """Tokens that were counted."""
        return 0 if self.group is None else self.joined + self.group.steps


class _Group:
    """Requests that had their latest tokens in the same step, and go on together: what is known of one holds for all. They make
    one token per step."""

    def __init__(self, since: float, rolled: float) -> None:
        self.since, self.rolled, self.steps = since, rolled, 0  # steps: since it was made
        self.members: dict[str, _Request] = {}
        self._least: list[tuple[float, str]] = []  # a heap of bases; some are of requests that are gone

    def add(self, name: str, request: _Request, base: float, outputs: int) -> None:
        """``base``: when its mean pace says that its tokens so far were due, less ``steps`` SLOs."""
        request.group, request.base, request.joined = self, base, outputs - self.steps
        self.members[name] = request
        heapq.heappush(self._least, (base, name))
        if len(self._least) > 2 * len(self.members) + 64:
            self._least = [(found.base, name) for name, found in self.members.items()]
            heapq.heapify(self._least)

    def least_base(self) -> float:
        """Of its members."""
        while self._least:
            base, name = self._least[0]
            found = self.members.get(name)
            if found is not None and found.base == base:
                return base
            heapq.heappop(self._least)
        return math.inf


@dataclass(slots=True)
class _Step:
    begun: float
    rolled: float
    tokens: int  # of prefill
    batch: int  # sequences that decode
    names: Mapping[str, int]
    expected: float  # seconds, alone
    singles: dict[str, None]  # those that are looked at one by one: without a token so far, that prefill, with drafts
    groups: list[_Group]  # of the others


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
        self._waiting: dict[str, _Request] = {}  # without a token, in the order in which they came
        self._groups: list[_Group] = []
        self._alike: tuple[list[str], list[_Group]] | None = (
            None  # names and groups of the latest step, until one changes
        )
        self._gone: list[str] = []  # finished; a step may still count their last tokens
        self._steps: deque[_Step] = deque()
        self.parts = StepParts(self._find)
        self._over, self._over_rolled = 0.0, 0.0  # when the latest output was there, and what rollouts had run by then
        self._lock = threading.Lock()  # of what is published: the scheduler's thread, and the guardian's while idle
        self._tick = 0
        self._prompts: deque[int] = deque(maxlen=PROMPTS)
        self._prompt = self._chunk = math.inf  # seconds of a long one of them, and of what of it is in one step
        self._decode = (-1, 0.0)  # a batch that decodes, and its seconds; until a step was observed
        self._seen: dict[int, float] = {}  # slot -> seconds that it had run
        self._rolled = 0.0
        self._counts = [0] * 6  # as in ServingWords
        self._state = ServingState(0.0)  # published last

    # -- from the scheduler ------------------------------------------------------------------------------------------

    def request_added(self, request: Any) -> None:
        """A request was added."""
        now = self._now()
        name = request.request_id
        if name not in self._requests:
            self._prompts.append(request.num_tokens)
            self._price_prompt()
        with self._lock:
            self._forget(name)
            self._gone = [gone for gone in self._gone if gone != name]
            self._requests[name] = self._waiting[name] = _Request(
                request, _arrival(request, now), self._rolled_until(now)
            )
        if len(self._waiting) <= _FEW or now - self._state.at > _ARRIVALS:
            self._publish(now)

    def request_gone(self, name: str) -> None:
        """It has finished, or was aborted."""
        self._gone.append(name)
        if not self._steps:
            self._forget_gone()

    def step_scheduled(self, output: Any) -> None:
        """A step was scheduled. With async scheduling the one before it may still be under way."""
        now = self._now()
        if self._gone:
            self._forget_gone()
        names = output.num_scheduled_tokens
        groups, plain = self._whole_groups(names)
        if self.parts.prefilling or output.total_num_scheduled_tokens != len(names):
            plain = False
        tokens, batch, others = (0, len(names), set[str]()) if plain else self.parts.note(output)
        expected = (self._costs.prefill(tokens) if tokens else 0.0) + self._decode_seconds(batch)
        singles = {name: None for name in self._waiting if name in names} | dict.fromkeys(others)
        known = expected if expected < math.inf else 0.0
        step = _Step(now, self._rolled_until(now), tokens, batch, names, known, singles, [])
        self._steps.append(step)
        if plain:
            step.groups = groups
        else:
            for group in list(self._groups):
                self._cover(group, step)
        self._publish(now)

    def step_ended(self) -> None:
        """The output of the earliest step under way is there, and vLLM has taken it."""
        now = self._now()
        step, rolled = self._steps.popleft(), self._rolled_until(now)
        if step.tokens or step.batch:  # it ran from the end of the one before on, whenever it was scheduled
            since, before = (step.begun, step.rolled) if step.begun >= self._over else (self._over, self._over_rolled)
            self._costs.observe_step(step.tokens, step.batch, now - since, shared=rolled - before > 1e-4)
            self._decode = (-1, 0.0)
            if step.tokens:
                self._price_prompt()
        self._over, self._over_rolled = now, rolled
        gone = {name for name in self._gone if (found := self._requests.get(name)) and not _new_tokens(found)}
        for group in step.groups:
            idle = sum(name in group.members for name in gone)
            self._count_tokens(len(group.members) - idle, group.since, group.rolled, now, rolled)
            group.since, group.rolled = now, rolled
            group.steps += 1
        if step.singles:
            fresh = _Group(now, rolled)
            for name in step.singles:
                if (found := self._requests.get(name)) is not None:
                    self._count_single(name, found, fresh, now, rolled)
            if fresh.members:
                self._groups.append(fresh)
                for flight in self._steps:
                    self._cover(fresh, flight)
        if len(self._groups) > 1:
            self._merge(now)
        if self._gone:
            self._forget_gone()
        self._publish(now)

    def _count_single(self, name: str, found: _Request, fresh: _Group, now: float, rolled: float) -> None:
        """It joins ``fresh`` if it has new tokens."""
        new = _new_tokens(found)
        if new <= 0:
            return
        self._alike = None
        group, outputs = found.group, found.core.num_output_tokens
        if group is None:
            self._count_tokens(1, found.since, found.rolled, now, rolled, first=True)
            del self._waiting[name]
            due = now + (outputs - 1) * self._slo.tpot
        else:
            self._count_tokens(new, group.since, group.rolled, now, rolled, limit=self._slo.tpot * new)
            del group.members[name]
            due = found.base + (group.steps + new) * self._slo.tpot
        fresh.add(name, found, due, outputs)

    def _count_tokens(
        self,
        count: int,
        since: float,
        since_rolled: float,
        now: float,
        rolled: float,
        *,
        limit: float = 0.0,
        first: bool = False,
    ) -> None:
        """Tokens that are there now, whose requests had their latest ones, or arrived, at ``since``."""
        if not count or (first and self._phase == "decode") or (not first and self._phase == "prefill"):
            return
        over = now - since - (self._slo.ttft if first else limit or self._slo.tpot)
        late = 1 if limit or first else count
        at = 0 if first else 3
        self._counts[at] += count
        self._counts[at + 1] += late * (over > 0)
        self._counts[at + 2] += late * (0 < over <= rolled - since_rolled)

    # -- groups --------------------------------------------------------------------------------------------------------

    def _whole_groups(self, names: Mapping[str, int]) -> tuple[list[_Group], bool]:
        """Those all of whose members are among these names, and whether there are no others among them."""
        order = list(names)
        if self._alike is not None and self._alike[0] == order:  # the same objects, which is quickly seen
            return list(self._alike[1]), True
        groups = [group for group in self._groups if group.members.keys() <= names.keys()]
        whole = sum(len(group.members) for group in groups) == len(order)
        self._alike = (order, list(groups)) if whole else None
        return groups, whole

    def _cover(self, group: _Group, step: _Step) -> None:
        """Note that a step brings a token to each of this group. Those that it does not have, or that are looked at one by one in
        it, are in groups of their own then."""
        members = group.members.keys()
        if members.isdisjoint(step.names):
            return
        if members <= step.names.keys() and members.isdisjoint(step.singles):
            step.groups.append(group)
            return
        single = [name for name in members if name in step.singles]
        absent = [name for name in members if name not in step.names]
        inside = len(members) - len(single) - len(absent)
        parts = [(len(single), single), (len(absent), absent)]
        if inside:
            parts.append((inside, [name for name in members if name in step.names and name not in step.singles]))
        covered = group if inside else None
        for count, names in sorted(parts, key=lambda part: part[0])[:-1]:  # the largest part stays
            if count:
                apart = self._split(group, names)
                if len(parts) == 3 and names is parts[2][1]:
                    covered = apart
        if covered is not None:
            step.groups.append(covered)

    def _split(self, group: _Group, names: list[str]) -> _Group:
        """These of its members, in a group of their own, which is in the same steps."""
        self._alike = None
        apart = _Group(group.since, group.rolled)
        apart.steps = group.steps
        for name in names:
            found = group.members.pop(name)
            apart.add(name, found, found.base, found.joined + group.steps)
        self._groups.append(apart)
        for flight in self._steps:
            if group in flight.groups:
                flight.groups.append(apart)
        return apart

    def _merge(self, now: float) -> None:
        """Those that had tokens just now, and are in the same steps, are one."""
        kept: dict[tuple[tuple[bool, bool], ...], _Group] = {}
        left: list[_Group] = []
        for group in sorted(self._groups, key=lambda group: -len(group.members)):
            if not group.members:
                continue
            one = next(iter(group.members))
            key = tuple((group in flight.groups, one in flight.singles) for flight in self._steps)
            if group.since != now or (into := kept.setdefault(key, group)) is group:
                left.append(group)
                continue
            self._alike = None
            for name, found in group.members.items():
                base = found.base + (group.steps - into.steps) * self._slo.tpot
                into.add(name, found, base, found.joined + group.steps)
            group.members = {}
        self._groups = left
        for flight in self._steps:
            flight.groups = [group for group in flight.groups if group.members]

    def _find(self, name: str) -> Any:
        found = self._requests.get(name)
        return None if found is None else found.core

    def _forget_gone(self) -> None:
        for name in self._gone:
            self._forget(name)
        self._gone.clear()

    def _forget(self, name: str) -> None:
        found = self._requests.pop(name, None)
        if found is not None and found.group is not None:
            found.group.members.pop(name, None)
            self._alike = None
        self._waiting.pop(name, None)

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
            sharers = len(self._rollouts())
            if not sharers or (only_idle and self._requests):
                return
            self._tick += 1
            self._state = self.serving_state(now, sharers)
            self._pool.publish(ServingWords.pack_parts(self._state, self._mode, self._counts))

    @property
    def latest(self) -> ServingWords:
        """What was published last, with the counts of now."""
        return ServingWords(self._state, self._mode, *self._counts)

    def serving_state(self, now: float, sharers: int = 1) -> ServingState:
        """Slacks now. Those of unknown costs are minus infinity: nothing is lent of what is not known."""
        slo, costs, steps = self._slo, self._costs, tuple(self._steps)
        ends = self._ends(steps, now)
        end = ends[-1] if ends else 0.0
        running = max(0.0, end - now)
        ttft = tpot = arriving = beside = math.inf
        ahead, queued, waiting = running, 0, len(self._waiting)
        decoding = len(self._requests) - waiting
        for found in islice(self._waiting.values(), _CROWD):
            left = max(0, found.core.num_tokens - found.core.num_computed_tokens)
            queued += left
            ahead += costs.prefill(left)
            ttft = min(ttft, found.since + slo.ttft - now - ahead)
        if waiting > _CROWD:
            ttft = -math.inf
        if self._phase != "prefill":
            decode = self._decode_seconds(decoding or 1)
            step = (decode if decoding else 0.0) + (costs.prefill(min(queued, self._most)) if queued else 0.0)
            tpot, mean = self._tpot(now, list(zip(steps, ends, strict=True)), running + step)
            beside = arriving_tpot_slack(mean, slo, decode, self._chunk if self._phase == "both" else 0.0)
        if self._phase == "decode":
            ttft, waiting = math.inf, 0
        else:
            arriving = arriving_slack(ahead, slo, self._prompt)
        busy = bool(self._requests) or bool(steps)
        return ServingState(now, ttft, tpot, end, busy, arriving, self._tick, sharers, waiting > 0, beside)

    def _decode_seconds(self, batch: int) -> float:
        if self._decode[0] != batch:
            self._decode = (batch, self._costs.decode(batch))
        return self._decode[1]

    def _price_prompt(self) -> None:
        tokens = long_prompt(self._prompts)
        self._prompt = self._costs.prefill(tokens) if tokens else math.inf
        self._chunk = self._prompt if tokens <= self._most else self._costs.prefill(self._most)

    def _ends(self, steps: tuple[_Step, ...], now: float) -> list[float]:
        """When the steps under way will be over, by their costs; one that takes longer than expected: now."""
        found: list[float] = []
        at = self._over
        for step in steps:
            at = max(now, max(at, step.begun) + step.expected)
            found.append(at)
        return found

    def _tpot(self, now: float, flights: list[tuple[_Step, float]], otherwise: float) -> tuple[float, float]:
        """Equation 2, and by the mean pace alone. Each step under way makes one more token of a request in it: the n-th is due n
        SLOs later than the next. ``otherwise``: seconds until those have a token that are in none."""
        slo, least, mean = self._slo.tpot, math.inf, math.inf
        for group in self._groups:
            if not group.members:
                continue
            mine = [
                end
                for step, end in flights
                if group in step.groups or any(name in group.members for name in step.singles)
            ]
            ready = max((end - now - at * slo for at, end in enumerate(mine)), default=otherwise)
            due = group.least_base() + group.steps * slo
            mean = min(mean, due + slo - now - ready)
            least = min(least, min(group.since, due) + slo - now - ready)
        return least, mean

    def _rolled_until(self, now: float) -> float:
        """Seconds that rollout engines have run, all together, since they were first seen."""
        for slot in self._rollouts():
            total = RolloutWords.read_used(self._pool.read(slot), now)
            if total is not None:
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


def _new_tokens(found: _Request) -> int:
    return int(found.core.num_output_tokens) - found.outputs()
