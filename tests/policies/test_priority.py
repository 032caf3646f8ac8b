"""Progressive priority: who is preempted for whom, and that nothing starves, in simulated time."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.policies.routing.priority import (
    ProgressivePriority,
    QueueWait,
    RunningRequest,
    Takeover,
    WaitingRequest,
)
from vllm_rlplugin.options import PluginOptions

POLICY = ProgressivePriority(max_wait=30.0)
POLICY_OF_ENGINES = PluginOptions().max_wait


def waiting(priority: int, arrival: float = 0.0, **kwargs: int) -> WaitingRequest:
    return WaitingRequest(priority, (arrival, f"w{arrival}"), **kwargs)


def running(priority: int, arrival: float = 0.0, **kwargs: int) -> RunningRequest:
    return RunningRequest(priority, (arrival, f"r{arrival}"), **kwargs)


def take(*args: object, slots: int = 0, tokens: int = 1000, **kwargs: object) -> list[Takeover]:
    return POLICY.takeovers(*args, slots=slots, tokens=tokens, **kwargs)  # type: ignore[arg-type]


def test_the_lowest_ranked_running_one_loses_its_slot_the_latest_among_equals() -> None:
    active = [running(5, 0), running(9, 1), running(9, 2), running(7, 3)]
    assert take([waiting(8, 9)], active) == [Takeover(0, (2,))]
    assert take([waiting(1, 9), waiting(6, 9), waiting(8, 9)], active) == [Takeover(0, (2,)), Takeover(1, (1,))]


def test_nobody_is_preempted_while_a_slot_is_free_or_for_an_equal() -> None:
    assert take([waiting(1)], [running(9)], slots=1) == []
    assert take([waiting(9, 0)], [running(9, 5)]) == []
    assert not POLICY.may_decide(9, [9, 8])
    assert POLICY.may_decide(8, [9, 8])
    assert not POLICY.may_decide(8, [])


def test_those_behind_one_that_cannot_start_wait_for_it() -> None:
    assert take([waiting(9), waiting(1)], [running(5)]) == []


def test_for_lack_of_blocks_only_if_that_frees_enough_and_no_more_than_needed() -> None:
    active = [running(2, 0), running(8, 1), running(9, 2)]
    sizes = [50, 3, 4]

    def decide(need: int) -> list[Takeover]:
        return take([waiting(5)], active, slots=9, blocks=2, need=lambda w: need, gain=lambda w, r: sizes[r])

    assert decide(2) == []
    assert decide(6) == [Takeover(0, (2,))]
    assert decide(9) == [Takeover(0, (2, 1))]
    assert decide(10) == [], "the one that outranks it keeps its 50 blocks, so nobody is preempted in vain"


def test_a_request_that_could_not_compute_in_this_step_preempts_nobody() -> None:
    assert take([waiting(1)], [running(9)], tokens=0) == [Takeover(0, (0,))], "the victim's token is free then"
    assert take([waiting(1)], [running(9)], tokens=-1) == []
    assert take([waiting(1, tokens=999), waiting(2), waiting(3)], [running(9)] * 3, tokens=900) == [Takeover(0, (0,))]


def test_an_overdue_one_takes_the_slot_of_who_overtook_it_but_not_of_who_came_before_it() -> None:
    late = waiting(5, 10, overdue=True)
    assert take([late], [running(1, 11)]) == [Takeover(0, (0,))]
    assert take([late], [running(1, 9)]) == []
    assert take([late], [running(5, 11)]) == []
    assert take([late], [running(9, 9)]) == [Takeover(0, (0,))], "its own rank counts too"
    assert take([waiting(1, 99)], [running(9, 0, protected=True)]) == [], "not before its quantum"


def test_overdue_needs_both_the_wait_and_to_be_overtaken_and_goes_by_arrival() -> None:
    def of(*entries: tuple[float, int, float], active: tuple[tuple[int, float], ...] = ()) -> list[int]:
        records = [QueueWait(seconds, priority, (arrival, str(arrival))) for seconds, priority, arrival in entries]
        return POLICY.overdue(records, [(priority, (arrival, "r")) for priority, arrival in active])

    assert of((30.0, 5, 1.0), (0.0, 4, 2.0)) == [0]
    assert of((29.9, 5, 1.0), (0.0, 4, 2.0)) == []
    assert of((30.0, 5, 1.0), (0.0, 5, 2.0)) == [], "equals came later: not overtaken"
    assert of((30.0, 5, 2.0), (0.0, 4, 1.0)) == [], "the better one came before"
    assert of((30.0, 5, 1.0), active=((4, 2.0),)) == [0]
    assert of((40.0, 5, 3.0), (50.0, 7, 1.0), (0.0, 1, 9.0)) == [1, 0]


@given(st.data())
def test_equal_priorities_never_decide_anything(data: st.DataObject) -> None:
    number = st.integers(0, 30)
    active = [running(3, data.draw(number)) for _ in range(data.draw(number))]
    queue = [waiting(3, data.draw(number)) for _ in range(data.draw(number))]
    needs = [data.draw(number) for _ in queue]
    slots, blocks = data.draw(number), data.draw(number)
    assert not POLICY.may_decide(3, [entry.priority for entry in active])
    assert take(queue, active, slots=slots, blocks=blocks, need=needs.__getitem__, gain=lambda w, r: 5) == []
    waits = [QueueWait(1e9, entry.priority, entry.arrival) for entry in queue]
    assert POLICY.overdue(waits, [(entry.priority, entry.arrival) for entry in active]) == []


@given(st.data())
def test_a_takeover_is_never_of_a_better_one_never_in_vain_and_never_of_more_than_needed(data: st.DataObject) -> None:
    number = st.integers(0, 9)
    active = [running(data.draw(number), index) for index in range(data.draw(number))]
    queue = sorted(waiting(data.draw(number), 10 + index) for index in range(data.draw(number)))
    sizes = [data.draw(number) for _ in active]
    needs = [data.draw(number) for _ in queue]
    slots, blocks = data.draw(st.integers(0, 3)), data.draw(number)
    found = take(queue, active, slots=slots, blocks=blocks, need=needs.__getitem__, gain=lambda w, r: sizes[r])
    victims = [victim for entry in found for victim in entry.victims]
    assert len(victims) == len(set(victims))
    by_waiting = {entry.waiting: entry.victims for entry in found}
    for index in range(max(by_waiting, default=-1) + 1):
        lost = by_waiting.get(index, ())
        for victim in lost:
            assert queue[index].priority < active[victim].priority
            better_left = [i for i in range(len(active)) if i not in victims and active[i][:2] > active[victim][:2]]
            assert not better_left, "the lowest-ranked go first"
        slots, blocks = slots + len(lost) - 1, blocks + sum(sizes[victim] for victim in lost) - needs[index]
        assert slots >= 0
        assert blocks >= 0, "whoever somebody was preempted for can start"


# ---- nothing starves: a toy engine under an adversary ----


@dataclass(eq=False)
class Job:
    priority: int
    arrival: tuple[float, str]
    left: int  # tokens
    since: float = 0.0
    before: float = 0.0
    generated: int = 0  # since it was started
    overdue: bool = False

    def rank(self) -> tuple[bool, int, tuple[float, str]]:
        return (not self.overdue, 0 if self.overdue else self.priority, self.arrival)


@dataclass
class Toy:
    """One token a running job and step, one second a step; what is preempted loses nothing."""

    policy: ProgressivePriority
    slots: int
    now: float = 0.0
    queue: list[Job] = field(default_factory=list)
    active: list[Job] = field(default_factory=list)
    done: list[Job] = field(default_factory=list)

    def add(self, priority: int, tokens: int) -> Job:
        job = Job(priority, (self.now, f"{len(self.done) + len(self.queue) + len(self.active):09d}"), tokens, self.now)
        self.queue.append(job)
        return job

    def step(self) -> None:
        for job in self.active:
            if self.policy.quantum_is_over(job.generated):
                job.overdue, job.before = False, 0.0
        fresh = [job for job in self.queue if not job.overdue]
        waits = [QueueWait(job.before + self.now - job.since, job.priority, job.arrival) for job in fresh]
        others = [
            (job.priority, job.arrival) for job in (*self.active, *self.queue) if job in self.active or job.overdue
        ]
        for index in self.policy.overdue(waits, others):
            fresh[index].overdue = True
        self.queue.sort(key=Job.rank)
        taken = self.policy.takeovers(
            [WaitingRequest(job.priority, job.arrival, 1, job.overdue) for job in self.queue],
            [RunningRequest(job.priority, job.arrival, 1, job.overdue) for job in self.active],
            slots=self.slots - len(self.active),
            tokens=10**9,
        )
        for victim in [self.active[index] for entry in taken for index in entry.victims]:
            self.active.remove(victim)
            victim.since = self.now
            self.queue.append(victim)
        self.queue.sort(key=Job.rank)
        while len(self.active) < self.slots and self.queue:
            job = self.queue.pop(0)
            job.before, job.generated = job.before + self.now - job.since, 0
            self.active.append(job)
        for job in self.active:
            job.left -= 1
            job.generated += 1
        self.done += [job for job in self.active if job.left == 0]
        self.active = [job for job in self.active if job.left]
        self.now += 1.0


def finishes(policy: ProgressivePriority, slots: int, victims: list[tuple[int, int]], seed: int) -> bool:
    """Whether all of ``victims`` (priority, tokens) finish while better ones arrive faster than the engine can serve."""
    rng, toy = random.Random(seed), Toy(policy, slots)
    wanted = [toy.add(*victim) for victim in victims]
    best = min(priority for priority, _ in victims)
    # Each quantum of a victim costs at most max_wait of waiting, the quanta of all victims and the work before it.
    quanta = sum(-(-tokens // policy.quantum) for _, tokens in victims)
    for _ in range(int((quanta + 1) * (policy.max_wait + (len(victims) + 1) * policy.quantum + 50) + 100)):
        for _ in range(rng.choice((0, 1, slots, 2 * slots))):
            toy.add(best - rng.randint(1, 5), rng.randint(1, 20))
        toy.queue = [job for job in toy.queue if job in wanted] + [job for job in toy.queue if job not in wanted][-100:]
        toy.step()  # the adversary's oldest may go: only the victims' fate counts
        if all(job.left == 0 for job in wanted):
            return True
    return False


@settings(max_examples=40)
@given(
    slots=st.integers(1, 4),
    victims=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 60)), min_size=1, max_size=4),
    max_wait=st.floats(1.0, 30.0),
    quantum=st.integers(1, 16),
    seed=st.integers(0, 2**32),
)
def test_whatever_better_ones_keep_arriving_each_request_finishes(
    slots: int, victims: list[tuple[int, int]], max_wait: float, quantum: int, seed: int
) -> None:
    assert finishes(ProgressivePriority(max_wait, quantum), slots, victims, seed)


@pytest.mark.parametrize("seed", range(3))
def test_the_same_stream_starves_them_without_the_rule(seed: int) -> None:
    class Unfair(ProgressivePriority):
        __slots__ = ()

        def overdue(self, *args: object) -> list[int]:
            return []

    assert not finishes(Unfair(10.0, 8), 2, [(5, 30)], seed)


@dataclass(eq=False)
class Turn:
    """A turn of a large model in an engine that lacks KV."""

    prompt: int
    length: int
    priority: int
    arrival: tuple[float, str]
    since: float  # it waits
    before: float = 0.0  # seconds that it waited before
    base: int = 0  # tokens at its latest start
    made: int = 0
    overdue: bool = False

    @property
    def context(self) -> int:
        return self.prompt + self.made


def tokens_made(policy: ProgressivePriority, seconds: float, turns: int, room: int) -> int:
    """Of ``turns`` at a time, whose answers have 6,000 tokens in the mean and 32,000 at most, longest first, with KV for ``room``
    tokens: 30 ms a step, 12,000 tokens of prefill a second, and what lost its KV is prefilled again."""
    rng, numbers = random.Random(0), itertools.count()

    def another(now: float) -> Turn:
        length = min(32_000, max(50, int(rng.lognormvariate(math.log(6000) - 0.5, 1.0))))
        told = -round(2 * math.log2(1 + length * math.exp(rng.gauss(0, 0.4))))
        return Turn(int(rng.uniform(500, 8000)), length, told, (now, f"{next(numbers):06d}"), now)

    now, scan, made, active = 0.0, 0.0, 0, list[Turn]()
    queue = [another(now) for _ in range(turns)]

    def stop(turn: Turn) -> None:
        active.remove(turn)
        if policy.quantum_is_over(turn.made - turn.base):
            turn.before, turn.overdue = 0.0, False
        turn.since = now
        queue.append(turn)

    while now < seconds:
        for turn in active:
            if turn.overdue and policy.quantum_is_over(turn.made - turn.base):
                turn.before, turn.overdue = 0.0, False
        if now >= scan:
            scan, late = now + policy.max_wait / 32, [turn for turn in queue if not turn.overdue]
            waits = [QueueWait(turn.before + now - turn.since, turn.priority, turn.arrival) for turn in late]
            others = [(turn.priority, turn.arrival) for turn in [*active, *queue] if turn not in late]
            for index in policy.overdue(waits, others):
                late[index].overdue = True
        queue.sort(key=lambda turn: (not turn.overdue, 0 if turn.overdue else turn.priority, turn.arrival))
        while sum(turn.context + 1 for turn in active) > room:
            stop(max(active, key=lambda turn: (not turn.overdue, turn.priority, turn.arrival)))
        heads, rows = queue[:8], list(active)
        for takeover in policy.takeovers(
            [WaitingRequest(turn.priority, turn.arrival, 1, turn.overdue) for turn in heads],
            [RunningRequest(turn.priority, turn.arrival, 1, turn.overdue) for turn in rows],
            slots=256 - len(rows),
            tokens=1 << 30,
            blocks=room - sum(turn.context + 1 for turn in rows),
            need=lambda index, heads=heads, rows=rows: heads[index].context + len(rows),  # type: ignore[misc]
            gain=lambda _, position, rows=rows: rows[position].context,  # type: ignore[misc]
        ):
            for position in takeover.victims:
                stop(rows[position])
        prefilled = 0
        for turn in heads:
            if sum(other.context + 1 for other in active) + turn.context + 1 <= room:
                queue.remove(turn)
                active.append(turn)
                prefilled += turn.context
                turn.before, turn.base = turn.before + now - turn.since, turn.made
        now += 0.03 + prefilled / 12_000
        for turn in list(active):
            turn.made, made = turn.made + 1, made + 1
            if turn.made == turn.length:
                active.remove(turn)
                queue.append(another(now))
    return made


def test_that_nothing_starves_costs_a_large_model_little_of_its_throughput() -> None:
    """With 30 seconds it costs more than half: for 64 tokens of a short turn the KV of a long one is computed again."""
    unbounded, bounded, eager = (
        tokens_made(ProgressivePriority(max_wait=wait), 500.0, 80, 400_000) for wait in (1e9, POLICY_OF_ENGINES, 30.0)
    )
    assert bounded > 0.9 * unbounded
    assert eager < 0.5 * unbounded
