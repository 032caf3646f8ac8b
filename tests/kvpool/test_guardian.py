"""The serving side of a pool: budgets for real tenants in real processes, cuts, and the end of one that does not give back."""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from orchestrator.policies.serving.kv_sharing import SharingRules
from tests.support.waiting import wait_for
from vllm_rlplugin.kvpool.ledger.page_ledger import PagePool, PoolView, TenantView
from vllm_rlplugin.kvpool.ledger.tenant_words import RolloutWords
from vllm_rlplugin.kvpool.serving.guardian import Guardian

pytestmark = pytest.mark.slow

RULES = SharingRules(pages=100, headroom=0.2, watermark=0.25, deadline=2.0)


class Setup:
    """A pool of 100 pages with a serving tenant, its guardian, and a clock that only the test moves."""

    def __init__(self, path: Path) -> None:
        self.at = 0.0
        self.pool = PagePool.create(path, 100, page_bytes=4096)
        self.pool.join("serving", "serving")
        self.guardian = Guardian(self.pool, RULES, lambda: self.at)
        self.children: list[int] = []

    def tick(self, seconds: float = 1.0) -> None:
        self.at += seconds
        self.guardian.tick()

    def tenant(self, name: str) -> TenantView:
        found = self.pool.view().tenant(name)
        assert found is not None
        return found

    def rollout(self, name: str, play: Callable[[PagePool], None]) -> int:
        """A process that joins, and plays."""
        child = os.fork()
        if not child:
            try:
                pool = PagePool.open(self.pool.path)
                pool.join(name, "rollout")
                play(pool)
            finally:
                os._exit(1)
        self.children.append(child)
        wait_for(lambda: self.pool.view().tenant(name) is not None)
        return child


@pytest.fixture
def setup() -> Iterator[Setup]:
    path = Path(f"/dev/shm/rl-coserve-test-{os.getpid()}-{random.randrange(10**9)}")
    made = Setup(path)
    yield made
    for child in made.children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    path.unlink()


def greedy(pool: PagePool) -> None:
    """Takes all that it may have, and gives nothing back."""
    while True:
        pool.acquire(100, whole=False)
        time.sleep(0.002)


def polite(pool: PagePool) -> None:
    """Takes all that it may have, and gives back what it must."""
    held = np.empty(0, np.uint64)
    while True:
        mine = pool.view().tenants[-1]
        over = max(0, held.size - mine.budget)
        if over:
            pool.release(held[:over])
            held = held[over:]
        held = np.concatenate([held, pool.acquire(100, whole=False)])
        time.sleep(0.002)


def test_a_rollout_engine_that_joins_gets_what_serving_leaves_less_the_headroom(setup: Setup) -> None:
    assert setup.pool.acquire(30).size == 30
    setup.tick()
    setup.rollout("roll", greedy)
    assert setup.tenant("roll").budget == 0, "nothing before serving has looked"
    setup.tick()
    assert setup.tenant("roll").budget == 50
    wait_for(lambda: setup.tenant("roll").used == 50)


def test_a_burst_halves_the_budget_and_a_step_that_begins_gives_it_back(setup: Setup) -> None:
    setup.rollout("roll", polite)
    setup.tick()
    wait_for(lambda: setup.tenant("roll").used == 80)
    burst = setup.pool.acquire(10)
    setup.tick()
    assert setup.tenant("roll").budget == 40
    wait_for(lambda: setup.tenant("roll").used == 40)
    setup.tick()
    setup.pool.release(burst)
    for _ in range(20):
        setup.tick()
    assert setup.tenant("roll").budget == 40, "calm does not give it back"
    assert setup.guardian.cuts == 1
    assert setup.guardian.open_budget().pages == 70, "what serving had at its peak a moment ago stays free"
    assert setup.tenant("roll").budget == 70
    setup.tick(100.0)
    assert setup.guardian.open_budget().pages == 80, "a peak of long ago is forgotten"


def test_in_a_static_partition_each_keeps_its_part_whatever_serving_needs_until_it_ends(setup: Setup) -> None:
    setup.rollout("roll", polite)
    assert setup.guardian.partition(0.5) == 50
    setup.tick()
    wait_for(lambda: setup.tenant("roll").used == 50)
    burst = setup.pool.acquire(50)
    assert burst.size == 50, "no headroom is kept"
    for _ in range(20):
        setup.tick()
    assert (setup.tenant("roll").budget, setup.tenant("roll").used, setup.guardian.cuts) == (50, 50, 0)
    setup.pool.release(burst)
    assert setup.guardian.partition(0.0) == 100
    setup.tick(100.0)
    assert setup.guardian.open_budget().pages == 80, "the rules again"
    assert setup.pool.view().headroom == 20


def test_the_thread_leaves_looks_to_steps_and_looks_when_there_are_none(setup: Setup) -> None:
    looks: list[float] = []
    setup.guardian.tick_before_step(0)
    setup.guardian.watch(lambda: looks.append(setup.at))
    try:
        time.sleep(0.3)
        assert not looks, "by its clock there was a step just now"
        setup.at += 1.0
        wait_for(lambda: len(looks) > 2)
    finally:
        setup.guardian.stop()


def test_a_step_looks_at_everything_only_where_there_is_something_to_decide(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[float] = []
    view = setup.pool.view
    monkeypatch.setattr(setup.pool, "view", lambda: (looks.append(setup.at), view())[1])

    def steps(count: int, seconds: float = 0.021) -> int:
        """How many of so many steps looked."""
        looks.clear()
        for _ in range(count):
            setup.at += seconds
            setup.guardian.tick_before_step(int((setup.pool.owners() == 0).sum()))
        return len(set(looks))

    child = setup.rollout("roll", greedy)
    setup.tick()
    wait_for(lambda: setup.tenant("roll").used == 80)
    assert steps(20) == 1, "every quarter of a second"
    assert setup.pool.acquire(5).size == 5
    assert steps(3) == 0, "as many as it may use"
    assert setup.pool.acquire(1).size == 1
    assert steps(1) == 1
    assert (setup.tenant("roll").budget, setup.guardian.cuts) == (40, 1), "a burst is seen by the next step"
    assert steps(5) == 5, "a cut that is not complied with is looked at in every one"
    os.kill(child, signal.SIGKILL)
    os.waitpid(setup.children.pop(), 0)
    assert steps(1) == 1
    assert steps(3) == 0
    setup.guardian.note_shortage()
    assert steps(3) == 1, "no page was there: who has them may be gone"
    setup.tick()
    setup.guardian.note_shortage()
    assert steps(20, 0.0) == 0, "never twice in 20 ms"


def test_a_peak_between_two_looks_counts(setup: Setup) -> None:
    setup.tick()
    held = setup.pool.acquire(60)
    setup.at += 0.01
    setup.guardian.tick_before_step(60)
    setup.pool.release(held)
    setup.tick()
    assert setup.guardian.open_budget().pages == 20


def test_one_that_does_not_give_back_in_time_is_killed_and_its_pages_are_there(setup: Setup) -> None:
    child = setup.rollout("roll", greedy)
    setup.tick()
    wait_for(lambda: setup.tenant("roll").used == 80)
    assert setup.pool.acquire(10).size == 10
    setup.tick()
    os.kill(child, signal.SIGSTOP)
    setup.tick(1.9)
    assert setup.guardian.kills == 0
    setup.tick(0.2)
    assert setup.guardian.kills == 1
    setup.children.remove(child)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    setup.tick()
    assert setup.pool.acquire(90).size == 90
    setup.pool.release(np.flatnonzero(setup.pool.owners() == 0)[:90].astype(np.uint64))
    setup.rollout("another", greedy)
    setup.tick()
    assert setup.tenant("another").budget > 0


def test_one_that_loads_weights_has_the_time_for_that_and_no_longer(setup: Setup) -> None:
    def loads(pool: PagePool) -> None:
        pool.publish(RolloutWords(begun=setup.at, loading=True).pack())
        greedy(pool)

    child = setup.rollout("roll", loads)
    setup.tick()
    wait_for(lambda: setup.tenant("roll").used == 80)
    assert setup.pool.acquire(10).size == 10
    setup.tick()
    for _ in range(13):  # until 28 seconds after it began
        setup.tick(2.0)
        assert setup.guardian.kills == 0
    setup.tick(2.0)
    assert setup.guardian.kills == 1
    setup.children.remove(child)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL


def test_a_process_that_does_not_hold_the_pool_is_never_killed(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The number in the ledger may be one of another namespace, and mean somebody else here."""
    bystander = subprocess.Popen(["/bin/sleep", "60"]).pid
    setup.children.append(bystander)
    monkeypatch.setattr(os, "getpid", lambda: bystander)
    roll = PagePool.open(setup.pool.path)
    roll.join("roll", "rollout")
    monkeypatch.undo()
    setup.tick()
    assert roll.acquire(80).size == 80
    setup.pool.acquire(10)
    with caplog.at_level(logging.ERROR):
        for _ in range(5):
            setup.tick()
    assert os.waitpid(bystander, os.WNOHANG) == (0, 0)
    assert setup.guardian.kills == 0
    assert len([record for record in caplog.records if "cannot be killed from here" in record.getMessage()]) == 1


def test_several_rollout_engines_share_what_there_is(setup: Setup) -> None:
    for name in ("one", "two"):
        setup.rollout(name, polite if name == "two" else greedy)
        setup.tick()
    setup.guardian.open_budget()
    assert setup.tenant("one").budget == setup.tenant("two").budget == 40


def test_a_rollout_engine_that_leaves_while_it_is_looked_at_ends_no_serving_engine(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        setup.rollout(name, polite)
    look = setup.pool.view

    def looked() -> PoolView:
        """The first one is gone, and was taken back by another process, before its budget is written."""
        seen = look()
        if seen.tenant("one") is not None:
            os.kill(setup.children[0], signal.SIGKILL)
            wait_for(lambda: setup.pool.reap() + (look().tenant("one") is None) > 0)
        return seen

    monkeypatch.setattr(setup.pool, "view", looked)
    setup.tick()
    setup.tick()
    assert setup.tenant("two").budget == 80
