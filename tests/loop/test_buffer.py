"""The sample buffer: complete groups only, never too stale, nothing dropped in silence."""

import asyncio
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.api import Prompt, Trajectory, Turn
from orchestrator.buffer import SampleBuffer, let_go
from orchestrator.policies.batching.staleness import StalenessBound, StartGate
from orchestrator.policies.batching.trajectory_filters import BatchBalance, FilterChain, QualityFilter

PROMPT = Prompt("key", "task", 0, "payload")


def trajectory(name: str, group: str, version: int = 0) -> Trajectory:
    turn = Turn((1,), (2, 3), (-0.1, -0.2), ((version, 2),))
    return Trajectory(name, group, "task", PROMPT, (turn,), 1.0, "v", 0, False)


class Owner:
    def __init__(self, evicted: list[tuple[str, str, str]] | None = None) -> None:
        self.evicted = [] if evicted is None else evicted
        self.surplus: list[str] = []
        self.gone: list[str] = []
        self.more = True

    def on_evict(self, trajectory: Trajectory, state: str, cause: str) -> None:
        self.evicted.append((trajectory.id, state, cause))

    def on_surplus(self, members: list[str]) -> None:
        self.surplus += members

    def on_group(self, group_id: str, outcome: str) -> None: ...

    def lost(self, trajectories: Sequence[Trajectory]) -> list[str]:
        return [trajectory.id for trajectory in trajectories if trajectory.id in self.gone]

    def may_have_more(self) -> bool:
        return self.more


class Recorder:
    def __init__(self, alpha: int, max_filtered: int = 0) -> None:
        self.evicted: list[tuple[str, str, str]] = []
        self.taken: list[str] = []
        self.groups: list[str] = []
        bound = StalenessBound(alpha)
        self.buffer = SampleBuffer(bound, max_filtered)
        self.buffer.owner = Owner(self.evicted)

    def take(self, group: list[Trajectory]) -> None:
        self.taken += [t.id for t in group]
        self.groups += {t.group_id: None for t in group}


def filled(recorder: Recorder, group: str, members: int, version: int = 0, rewards: tuple[float, ...] = ()) -> None:
    names = [f"{group}-{index}" for index in range(members)]
    recorder.buffer.open(group, PROMPT, names, refills=1)
    for index, name in enumerate(names):
        reward = rewards[index] if rewards else 1.0
        recorder.buffer.put(replace(trajectory(name, group, version), reward=reward))


def test_a_group_that_is_withdrawn_because_another_is_lost_is_not_lost_too() -> None:
    class Withdrawing(Owner):
        def on_group(self, group_id: str, outcome: str) -> None:
            if (group_id, outcome) == ("a", "group_too_small"):
                r.buffer.withdraw("b", "deferred", "next_epoch")

    r = Recorder(0)
    r.buffer.owner = Withdrawing(r.evicted)
    for group in ("a", "b"):
        filled(r, group, 2)
    r.buffer.set_version(1)
    assert sorted(r.evicted) == [
        *((f"a-{member}", "evicted_stale", "") for member in range(2)),
        *((f"b-{member}", "deferred", "next_epoch") for member in range(2)),
    ]


def test_get_batch_waits_for_complete_groups_and_takes_them_in_order() -> None:
    async def run() -> None:
        r = Recorder(1)
        r.buffer.open("a", PROMPT, ["a-0", "a-1"], refills=0)
        r.buffer.put(trajectory("a-0", "a"))
        batch = asyncio.ensure_future(r.buffer.get_batch(2, r.take))
        filled(r, "b", 2)
        await asyncio.sleep(0.01)
        assert not batch.done()
        assert (r.taken, r.groups) == (["b-0", "b-1"], ["b"])  # taken as soon as complete, and told as a group
        r.buffer.put(trajectory("a-1", "a"))
        assert [t.trajectory.id for t in await batch] == ["b-0", "b-1", "a-0", "a-1"]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("alpha", "version", "kept"), [(0, 0, True), (0, 1, False), (1, 1, True), (1, 2, False), (3, 3, True)]
)
def test_the_staleness_bound_is_exact(alpha: int, version: int, kept: bool) -> None:
    r = Recorder(alpha)
    filled(r, "a", 2, version=0)
    r.buffer.set_version(version)
    assert (r.buffer.ready_groups == 1) is kept
    assert r.evicted == ([] if kept else [("a-0", "evicted_stale", ""), ("a-1", "evicted_stale", "")])


def test_a_stale_arrival_is_evicted_at_once() -> None:
    r = Recorder(1)
    r.buffer.open("a", PROMPT, ["a-0", "a-1"], refills=0)
    r.buffer.set_version(2)
    assert r.buffer.put(trajectory("a-0", "a", version=0)) is True
    assert r.evicted == [("a-0", "evicted_stale", "")]


def test_a_group_that_loses_a_stale_member_keeps_its_place() -> None:
    async def run() -> None:
        r = Recorder(1)
        r.buffer.open("a", PROMPT, ["a-0", "a-1", "a-2"], refills=0)
        for name, version in (("a-0", 0), ("a-1", 1), ("a-2", 1)):
            r.buffer.put(trajectory(name, "a", version))
        filled(r, "b", 2, version=1)
        r.buffer.set_version(2)
        assert r.evicted == [("a-0", "evicted_stale", "")]
        await r.buffer.get_batch(2, r.take)
        assert r.groups == ["a", "b"]

    asyncio.run(run())


def test_a_lost_member_is_replaced_while_refills_last_then_the_group_shrinks_then_it_is_dropped() -> None:
    r = Recorder(1)
    started: list[str] = []

    def start(_: Prompt) -> str:
        started.append(f"new-{len(started)}")
        return started[-1]

    r.buffer.open("a", PROMPT, ["a-0", "a-1", "a-2"], refills=1)
    r.buffer.lose("a", "a-0", start)
    assert started == ["new-0"]
    r.buffer.lose("a", "new-0", start)
    assert started == ["new-0"]  # no refill left
    r.buffer.put(trajectory("a-1", "a"))
    r.buffer.put(trajectory("a-2", "a"))
    assert r.buffer.ready_groups == 1

    r.buffer.open("b", PROMPT, ["b-0", "b-1"], refills=0)
    r.buffer.put(trajectory("b-0", "b"))
    r.buffer.lose("b", "b-1", None)
    assert r.evicted == [("b-0", "filtered", "group_too_small")]


def test_a_cancelled_get_batch_keeps_what_it_took() -> None:
    async def run() -> None:
        r = Recorder(1)
        filled(r, "a", 2)
        batch = asyncio.ensure_future(r.buffer.get_batch(2, r.take))
        await asyncio.sleep(0.01)
        batch.cancel()
        filled(r, "b", 2)
        again = await r.buffer.get_batch(2, r.take)
        assert [t.trajectory.id for t in again] == ["a-0", "a-1", "b-0", "b-1"]
        assert r.taken == ["a-0", "a-1", "b-0", "b-1"]

    asyncio.run(run())


def test_a_group_of_equal_rewards_is_filtered_until_the_limit_of_the_batch_is_reached() -> None:
    async def run() -> None:
        r = Recorder(1, max_filtered=2)
        filled(r, "a", 2, rewards=(0.0, 1.0))
        filled(r, "b", 3, rewards=(0.0, 0.0, 0.0))
        filled(r, "c", 2, rewards=(1.0, 1.0))
        assert r.evicted == [(name, "filtered", "zero_variance") for name in ("b-0", "b-1", "b-2", "c-0", "c-1")]
        assert (r.buffer.filtered_groups, r.buffer.ready_groups, r.buffer.scored) == (2, 1, 2)
        filled(r, "d", 2, rewards=(1.0, 1.0))  # one too many: trained as it is
        batch = await r.buffer.get_batch(2, r.take)
        assert [t.trajectory.id for t in batch] == ["a-0", "a-1", "d-0", "d-1"]
        assert r.buffer.uniform_taken == 1
        r.buffer.hand_over()
        assert (r.buffer.filtered_groups, r.buffer.uniform_taken) == (0, 0)  # the next batch has its own
        filled(r, "e", 2, rewards=(0.5, 0.5))
        assert r.evicted[-1] == ("e-1", "filtered", "zero_variance")

    asyncio.run(run())


def test_a_group_that_becomes_uniform_when_members_turn_stale_is_filtered_too() -> None:
    r = Recorder(1, max_filtered=5)
    r.buffer.open("a", PROMPT, ["a-0", "a-1", "a-2"], refills=0)
    for name, version, reward in (("a-0", 0, 1.0), ("a-1", 1, 0.0), ("a-2", 1, 0.0)):
        r.buffer.put(replace(trajectory(name, "a", version), reward=reward))
    assert r.buffer.ready_groups == 1
    r.buffer.set_version(2)
    assert [(name, state) for name, state, _ in r.evicted] == [
        ("a-0", "evicted_stale"),
        ("a-1", "filtered"),
        ("a-2", "filtered"),
    ]


def test_without_dynamic_sampling_equal_rewards_are_no_reason_to_leave() -> None:
    r = Recorder(1)
    filled(r, "a", 2, rewards=(0.0, 0.0))
    assert (r.evicted, r.buffer.ready_groups, r.buffer.filtered_groups) == ([], 1, 0)


def test_a_restored_buffer_serves_what_it_held() -> None:
    async def run() -> None:
        r = Recorder(1)
        filled(r, "a", 2, version=3)
        stored = r.buffer.stored()
        s = Recorder(1)
        s.buffer.restore([*stored, replace(stored[0], id="x", group_id="alone")], version=4)
        assert s.evicted == [("x", "filtered", "group_too_small")]
        assert [t.lag for t in await s.buffer.get_batch(1, s.take)] == [1, 1]

    asyncio.run(run())


@settings(max_examples=60)
@given(
    st.integers(0, 3), st.integers(0, 2), st.lists(st.tuples(st.sampled_from("pvt"), st.integers(0, 9)), max_size=80)
)
def test_no_schedule_hands_out_a_stale_trajectory_or_loses_one(
    alpha: int, max_filtered: int, steps: list[tuple[str, int]]
) -> None:
    async def run() -> None:
        r = Recorder(alpha, max_filtered)
        put, version, trained = 0, 0, 0
        for kind, number in steps:
            if kind == "p":
                rewards = (0.0, float(number % 2))
                filled(r, f"g{put}", 2, version=max(0, version - number % (alpha + 1)), rewards=rewards)
                put += 1
            elif kind == "v":
                version += 1
                r.buffer.set_version(version)
            elif r.buffer.ready_groups:
                batch = await r.buffer.get_batch(1, r.take)
                assert all(0 <= t.lag <= alpha for t in batch)
                trained += len(r.buffer.hand_over())
            assert r.buffer.filtered_groups <= max_filtered
        assert trained + len(r.evicted) + r.buffer.scored == 2 * put

    asyncio.run(run())


@settings(max_examples=200)
@given(st.integers(0, 4), st.integers(1, 64), st.integers(2, 16), st.integers(1, 200), st.integers(0, 6))
def test_the_gate_bounds_what_is_ahead_of_the_trainer(alpha: int, groups: int, size: int, envs: int, lead: int) -> None:
    gate = StartGate(alpha, groups * size, 1.0, envs)
    in_flight = waiting = 0
    for _ in range(500):
        if gate.may_start(size, in_flight, waiting, lead):
            in_flight += size
        elif in_flight:
            in_flight, waiting = in_flight - 1, waiting + 1
        assert in_flight <= envs
        assert in_flight + waiting <= max(0, alpha + 1 - lead) * groups * size


@settings(max_examples=200)
@given(st.integers(0, 4), st.integers(1, 64), st.integers(1, 400), st.floats(1, 3), st.integers(0, 6))
def test_the_gate_never_allows_more_than_the_buffer_may_hold(
    alpha: int, batch: int, envs: int, redundancy: float, lead: int
) -> None:
    gate = StartGate(alpha, batch, redundancy, envs)
    assert gate.most_under_way(lead) <= gate.capacity == alpha * envs + math.ceil(batch * redundancy)
    assert replace(gate, limit=batch).most_under_way(lead) <= batch
    assert gate.most_under_way(0) >= min(batch, gate.capacity)  # a batch can always come together


def test_a_tighter_limit_is_named_when_it_is_what_holds_starts_back() -> None:
    gate = StartGate(3, 8, 1.0, 100, limit=8)
    assert not gate.may_start(4, 0, 8, 0)
    assert gate.refusal_reason(4, 0, 8, 0) == "8 trajectories ahead of the trainer, rollout.buffer_limit = 8"


def test_get_batch_says_what_it_waits_for() -> None:
    async def run() -> None:
        r = Recorder(1)
        assert r.buffer.waiting_for == ""
        batch = asyncio.ensure_future(r.buffer.get_batch(2, r.take))
        await asyncio.sleep(0)
        assert r.buffer.waiting_for == "0 of 2 groups taken, no group is under way"
        filled(r, "a", 2)
        r.buffer.open("b", PROMPT, ["b-0", "b-1", "b-2"], refills=0)
        r.buffer.put(trajectory("b-0", "b"))
        await asyncio.sleep(0.01)
        assert r.buffer.waiting_for == "1 of 2 groups taken, group b has 1 of 3 members scored"
        r.buffer.put(trajectory("b-1", "b"))
        r.buffer.put(trajectory("b-2", "b"))
        await batch
        assert r.buffer.waiting_for == ""

    asyncio.run(run())


def test_what_turned_stale_unseen_is_evicted_before_a_batch_is_formed() -> None:
    async def run() -> None:
        r = Recorder(1)
        filled(r, "a", 2, version=0)
        filled(r, "b", 2, version=2)
        r.buffer.version = 2  # nobody called set_version: the guard of get_batch itself
        assert [item.trajectory.id for item in await r.buffer.get_batch(1, r.take)] == ["b-0", "b-1"]
        assert r.evicted == [("a-0", "evicted_stale", ""), ("a-1", "evicted_stale", "")]

    asyncio.run(run())


@pytest.mark.parametrize(("gone", "left"), [(["b-0"], ["a-0", "a-1", "b-1", "b-2"]), (["a-1"], ["b-0", "b-1", "b-2"])])
def test_what_lost_its_tokens_ends_with_the_cause_and_a_batch_of_it_is_filled_up(
    gone: list[str], left: list[str]
) -> None:
    """Before it is taken, or while the batch is collected: a group goes on without the member, or goes when one is left."""

    async def run(early: bool) -> None:
        r = Recorder(1)
        owner = r.buffer.owner
        assert isinstance(owner, Owner)
        owner.gone = gone if early else []
        filled(r, "a", 2)
        batch = asyncio.ensure_future(r.buffer.get_batch(2, r.take))
        await asyncio.sleep(0)
        owner.gone = gone
        filled(r, "b", 3)
        await asyncio.sleep(0.01)
        expected = [(gone[0], "failed", "reference_lost")]
        if gone == ["a-1"]:
            assert not batch.done()
            filled(r, "c", 2)
            left_now, expected = [*left, "c-0", "c-1"], [*expected, ("a-0", "filtered", "group_too_small")]
        else:
            left_now = left
        async with asyncio.timeout(1.0):
            assert [taken.trajectory.id for taken in await batch] == left_now
        assert r.evicted == expected
        assert r.buffer.scored == len(left_now)
        assert (gone[0] in r.taken) == (gone == ["a-1"] and not early), "what is lost before is not taken at all"

    asyncio.run(run(True))
    asyncio.run(run(False))


def test_what_a_streamed_trainer_was_given_stays_though_its_shard_is_lost() -> None:
    async def run() -> None:
        r = Recorder(1)
        owner = r.buffer.owner
        assert isinstance(owner, Owner)
        filled(r, "a", 2)
        batch = asyncio.ensure_future(r.buffer.get_batch(2, r.take, streamed=True))
        await asyncio.sleep(0)
        owner.gone = ["a-0", "b-0"]
        filled(r, "b", 3)
        async with asyncio.timeout(1.0):
            assert [taken.trajectory.id for taken in await batch] == ["a-0", "a-1", "b-1", "b-2"]
        assert r.evicted == [("b-0", "failed", "reference_lost")]

    asyncio.run(run())


def test_a_group_with_redundant_members_is_complete_when_enough_are_scored_and_the_others_are_surplus() -> None:
    buffer, owner = SampleBuffer(StalenessBound(1)), Owner()
    buffer.owner, surplus = owner, owner.surplus
    buffer.open("a", PROMPT, ["a-0", "a-1", "a-2", "a-3"], refills=2, wanted=2)
    buffer.put(trajectory("a-2", "a"))
    assert (buffer.ready_groups, surplus) == (0, [])
    buffer.put(trajectory("a-0", "a"))
    assert (buffer.ready_groups, surplus) == (1, ["a-1", "a-3"])
    buffer.lose("a", "a-1", lambda _: pytest.fail("a surplus member is not replaced"))
    assert (buffer.ready_groups, buffer.scored) == (1, 2)
    buffer.lose("gone", "x", None)


def test_a_filtered_member_ends_with_its_reason_and_is_a_lost_one() -> None:
    evicted: list[tuple[str, str, str]] = []
    buffer = SampleBuffer(StalenessBound(1), filters=FilterChain([QualityFilter(low=0.5)]))
    buffer.owner = Owner(evicted)
    buffer.open("a", PROMPT, ["a-0", "a-1", "a-2"], refills=1)
    assert buffer.put(replace(trajectory("a-0", "a"), reward=0.0)) is True
    assert evicted == [("a-0", "filtered", "reward_low")]
    buffer.lose("a", "a-0", lambda _: "a-3")
    for name in ("a-1", "a-2", "a-3"):
        assert buffer.put(trajectory(name, "a")) is False
    assert buffer.ready_groups == 1


def of_task(name: str, group: str, task: str) -> Trajectory:
    return replace(trajectory(name, group), task=task)


def test_a_batch_waits_for_another_kind_while_one_may_come_and_then_filters_a_bounded_number() -> None:
    async def run() -> None:
        buffer, owner = SampleBuffer(StalenessBound(1), 1, dynamic=False, balance=BatchBalance("task", 0.5)), Owner()
        buffer.owner = owner

        def fill(group: str, task: str) -> None:
            buffer.open(group, PROMPT, [f"{group}-0", f"{group}-1"], refills=0)
            for index in range(2):
                buffer.put(of_task(f"{group}-{index}", group, task))

        batch = asyncio.ensure_future(buffer.get_batch(4, lambda group: None))
        for group in "abc":
            fill(group, "maths")
        fill("d", "code")
        await asyncio.sleep(0.01)
        assert not batch.done()
        assert "1 held back: maths have their share" in buffer.waiting_for
        owner.more = False  # nothing else comes: c is filtered, then what comes is taken as it is
        fill("e", "maths")
        taken = await batch
        assert list(dict.fromkeys(item.trajectory.group_id for item in taken)) == ["a", "d", "b", "e"]
        assert [(name, cause) for name, _, cause in owner.evicted] == [("c-0", "balance"), ("c-1", "balance")]

    asyncio.run(run())


def test_what_nobody_needs_any_more_is_freed_a_few_trajectories_in_a_turn_of_the_loop() -> None:
    async def scenario() -> list[int]:
        held, left = [trajectory(f"t{number}", "g") for number in range(512)], []
        let_go(held)
        while held:
            left.append(len(held))
            await asyncio.sleep(0)
        return [before - after for before, after in itertools.pairwise([512, *left, 0])]

    freed = asyncio.run(scenario())
    assert sum(freed) == 512
    assert max(freed) <= 64
