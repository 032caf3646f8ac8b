"""Whole runs in virtual time whose borrowed servers come, go, crowd and are reclaimed at random: the real pipeline, proxy and
exchange, with simulated workers."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from orchestrator.api import BorrowedWorker
from orchestrator.borrowing.server_exchange import Claim, Offer
from orchestrator.components import Components
from orchestrator.sim import simulated_run as sim
from orchestrator.sim.coserving.shared_worker import BorrowedSimWorker
from orchestrator.sim.paper_setups import load_scenario

SMALL = (
    "run.steps=4",
    "rollout.environments=48",
    "rollout.groups_per_step=3",
    "sim.tasks.frozenlake.response_tokens=300",
    "sim.borrowed.workers=3",
    "sim.borrowed.how=serverless",
    "sim.borrowed.function_seconds=1000000",
    "sim.borrowed.start_seconds=2",
    "rollout.borrowed.file=none",
    "rollout.borrowed.every=2",
    "rollout.borrowed.window=10",
    "rollout.borrowed.crowded=0.7",
    "rollout.borrowed.patience=4",
    "rollout.borrowed.rest=4",
    "rollout.borrowed.idle=0",
)


class Chance:
    """A market in which anything may happen at any look. A server that is given back has no device until it is taken."""

    job = "run"
    first: Sequence[Offer] = ()

    def __init__(self, workers: Sequence[Any], seed: int) -> None:
        self._workers = {worker.name: worker for worker in workers if isinstance(worker, BorrowedSimWorker)}
        self._rng = random.Random(seed)
        self._others = random.Random(f"others/{seed}")

    async def list_offers(self) -> Sequence[Offer]:
        return [self._one(name) for name in self._workers]

    def _one(self, name: str) -> Offer:
        chance = self._rng.random()
        if chance < 0.1:
            return Offer(name, "no answer")
        if chance < 0.2:
            return Offer(name, taken="another", holder=("another", ""))
        waits = (Claim(("third", ""), self._others.randint(1, 3), self._others.choice((0.5, 1.0, 4.0))),)
        claims = waits if self._others.random() < 0.1 else ()
        return Offer(name, share=self._rng.random(), lends=chance < 0.8, claims=claims)

    async def claim(self, offers: Sequence[Offer], wanted: int, seconds: float) -> None:
        assert wanted > 0
        assert seconds > 0

    def worker(self, url: str) -> BorrowedWorker:
        self._workers[url].gain_device()
        return self._workers[url]

    def note_taken(self, worker: BorrowedWorker) -> None:
        """Nothing to say."""

    async def leave(self, worker: BorrowedWorker) -> None:
        found = self._workers[worker.name]
        if found.present:
            found.lose_device()


@pytest.fixture
def exchanging(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], Any]:
    """A run of so many workers of its own, with this seed of its market."""

    def play(own: int, seed: int) -> Any:
        equip = sim.equip

        def with_market(parts: Components, *arguments: Any) -> None:
            equip(parts, *arguments)
            parts.market = Chance(parts.workers, seed)

        with monkeypatch.context() as patch:
            patch.setattr(sim, "equip", with_market)
            return sim.simulate(load_scenario("rose", [*SMALL, f"rollout.workers={own}"]))

    return play


@pytest.mark.parametrize("own", [1, 2])
@pytest.mark.parametrize("seed", range(2))
def test_whatever_becomes_of_the_servers_every_trajectory_is_accounted_for_and_a_server_is_had_once_at_a_time(
    exchanging: Callable[[int, int], Any], own: int, seed: int
) -> None:
    found = exchanging(own, seed)
    assert found.ledger["trained"] == 4 * 48
    events = [json.loads(line) for line in found.events.splitlines()]
    had: set[str] = set()
    changes = 0
    for event in events:
        if event["kind"] == "borrowed":
            assert event["worker"] not in had
            had.add(event["worker"])
        elif event["kind"] == "returned":
            assert event["worker"] in had
            had.remove(event["worker"])
            changes += 1
    assert changes >= 3
    assert {event["reason"] for event in events if event["kind"] == "returned"} <= {
        *("crowded", "reclaimed", "gone", "another is used less", "another job has it", "another job's share"),
    }
    if seed == 0:
        assert exchanging(own, seed).events == found.events, "the same seed, the same run"
