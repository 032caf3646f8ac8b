"""A trainer that dies comes back with the weights that it had; the run around it sees no other version and no other batch."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.api import CheckpointLost, ProcessDied, PublishResult, TrainBatch, TrainMetrics
from orchestrator.checkpoint import CheckpointState
from orchestrator.events import EventLog
from orchestrator.runtime import revived_trainer
from orchestrator.runtime.revived_trainer import RevivedTrainer
from orchestrator.weight_sync import MortalTrainer


@dataclass
class Machine:
    """What outlives a process. ``deaths``: at which calls one dies; ``forgetful``: what it trains anew is another thing."""

    deaths: set[int] = field(default_factory=set)
    forgetful: bool = False
    calls: int = 0
    made: int = 0
    relay: list[tuple[int, str]] = field(default_factory=list)
    states: dict[str, tuple[int, str]] = field(default_factory=dict)  # by folder


class Trained:
    """Its weights are the digest of all that was trained, in order."""

    def __init__(self, machine: Machine) -> None:
        self._machine, self._dead = machine, False
        machine.made += 1
        self._salt = str(machine.made) if machine.forgetful else ""
        self.version, self.weights = 0, ""
        self.held: tuple[int, str] | None = None

    def _live(self) -> None:
        self._machine.calls += 1
        self._dead = self._dead or self._machine.calls in self._machine.deaths
        if self._dead:
            raise ProcessDied("trainer died: killed")

    async def train_step(self, batch: TrainBatch) -> TrainMetrics:
        self._live()
        assert batch.version == self.version == batch.step
        self.version += 1
        self.weights = hashlib.sha256(f"{self.weights} {batch.step}{self._salt}".encode()).hexdigest()
        return TrainMetrics(batch.step, self.version)

    async def feed(self, samples: Any, version: int) -> None:
        self._live()

    async def publish(self) -> PublishResult:
        self._live()
        self._machine.relay.append((self.version, self.weights))
        return PublishResult(self.version, 1, 1, 0.0, self.weights)

    async def hold(self) -> None:
        self._live()
        self.held = self.version, self.weights

    async def publish_held(self) -> PublishResult:
        self._live()
        assert self.held is not None
        held = self.held
        await asyncio.sleep(0)  # beside a step
        self._live()
        self._machine.relay.append(held)
        return PublishResult(held[0], 1, 1, 0.0, held[1])

    async def save(self, folder: str) -> None:
        self._live()
        self._machine.states[folder] = self.version, self.weights

    async def saved(self) -> None:
        self._live()

    async def load(self, folder: str) -> int:
        self._live()
        self.version, self.weights = self._machine.states[folder]
        return self.version

    async def send(self, receivers: int, limit: float, anew: bool) -> Any:
        self._live()
        return anew

    async def call(self, method: str, *args: Any) -> Any:
        self._live()
        return self.weights

    async def pids(self) -> dict[str, int]:
        self._live()
        return {}

    async def close(self) -> None:
        self._dead = True


class Saved:
    """The checkpoints of a run, by step."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def last_step(self) -> int:
        return max(self.steps, default=0)

    def newest(self) -> Any:
        if not self.steps:
            return None
        step = self.last_step()
        return Path(f"step-{step}"), CheckpointState(step, step, 0, 0.0, ()), []


class Run:
    """The calls of a loop, in its order."""

    def __init__(self, machine: Machine, restarts: int = 3) -> None:
        self.machine, self.saved, self.log = machine, Saved(), io.StringIO()

        async def restore(trainer: Any, folder: str) -> int:
            return int(await trainer.load(folder))

        make = lambda: Trained(machine)  # noqa: E731
        events = EventLog(self.log, lambda: 0.0)
        self.trainer = RevivedTrainer(make(), make, restore, self.saved, events, restarts)  # type: ignore[arg-type]

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for line in self.log.getvalue().splitlines() if (event := json.loads(line))["kind"] == kind]

    async def save(self, step: int) -> None:
        await self.trainer.save(f"step-{step}/trainer")
        try:
            await self.trainer.saved()
        except CheckpointLost:
            return
        self.saved.steps.append(step)

    async def play(self, steps: int, every: int) -> str:
        await self.trainer.publish()
        await self.save(0)
        for step in range(steps):
            metrics = await self.trainer.train_step(TrainBatch(step, step, ()))
            assert metrics.version == step + 1
            await self.trainer.publish()
            if (step + 1) % every == 0:
                await self.save(step + 1)
        return str(await self.trainer.call("export"))

    async def play_overlapping(self, steps: int, every: int) -> str:
        """Each version is published beside the next step, one at a time."""
        await self.trainer.publish()
        await self.save(0)
        publishing = None
        for step in range(steps):
            assert (await self.trainer.train_step(TrainBatch(step, step, ()))).version == step + 1
            if publishing is not None:
                assert (await publishing).version == step
            await self.trainer.hold()
            publishing = asyncio.ensure_future(self.trainer.publish_held())
            if (step + 1) % every == 0:
                await self.save(step + 1)
        assert publishing is not None
        await publishing
        return str(await self.trainer.call("export"))


@pytest.fixture(autouse=True)
def no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(revived_trainer, "_empty", lambda folder: None)


@given(deaths=st.sets(st.integers(4, 60), max_size=3), every=st.integers(1, 5))
def test_wherever_it_dies_its_weights_and_versions_are_those_of_one_that_lived(deaths: set[int], every: int) -> None:
    expected, run = Machine(), Run(Machine(deaths), restarts=4)
    whole = asyncio.run(Run(expected).play(8, every))
    assert asyncio.run(run.play(8, every)) == whole
    published = dict(expected.relay)
    assert dict(run.machine.relay) == published
    assert all(published[version] == weights for version, weights in run.machine.relay)
    versions = [version for version, _ in run.machine.relay]
    assert versions == sorted(versions), "no version that is older than what the engines have"
    assert run.machine.made >= 1 + len(run.events("recovered"))


@given(deaths=st.sets(st.integers(4, 90), max_size=3), every=st.integers(1, 5))
def test_one_that_dies_while_a_version_is_published_beside_its_step_publishes_that_version(
    deaths: set[int], every: int
) -> None:
    expected, run = Machine(), Run(Machine(deaths), restarts=4)
    whole = asyncio.run(Run(expected).play_overlapping(8, every))
    assert asyncio.run(run.play_overlapping(8, every)) == whole
    published = dict(expected.relay)
    assert dict(run.machine.relay) == published
    assert all(published[version] == weights for version, weights in run.machine.relay)
    versions = [version for version, _ in run.machine.relay]
    assert versions == sorted(versions), "no version that is older than what the engines have"
    assert not [event for event in run.events("recovered") if "bit for bit" in event["detail"]]


def test_one_that_dies_in_a_step_trains_again_what_was_trained_since_the_checkpoint() -> None:
    run = Run(Machine({2 + 2 + 2 * 5 + 1}), restarts=1)  # publish, save, saved, ...; in the sixth step
    asyncio.run(run.play(6, 4))
    (event,) = run.events("recovered")
    assert event["what"] == "trainer"
    assert event["detail"].startswith("from step 4, ")
    assert "bit for bit" not in event["detail"]
    assert [event["what"] for event in run.events("fault")] == ["trainer"]


def test_weights_that_are_not_the_same_again_are_said() -> None:
    run = Run(Machine({2 + 2 + 2 * 3}, forgetful=True))
    asyncio.run(run.play(6, 4))
    assert "bit for bit" in run.events("recovered")[0]["detail"]


@pytest.mark.parametrize(("deaths", "restarts"), [({2}, 3), ({6, 7, 8, 9, 10}, 2)])
def test_it_does_not_come_back_without_a_checkpoint_nor_for_ever(deaths: set[int], restarts: int) -> None:
    run = Run(Machine(deaths), restarts)
    with pytest.raises(ProcessDied, match="trainer died"):
        asyncio.run(run.play(6, 4))


@pytest.mark.parametrize(("name", "most"), [("MOST", 3), ("MOST_TOKENS", -1)])
def test_with_more_batches_than_are_kept_it_does_not_come_back(
    name: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(revived_trainer, name, most)
    run = Run(Machine({3 + 2 * 5 + 1}))
    with pytest.raises(ProcessDied):
        asyncio.run(run.play(8, 100))


def test_who_waits_for_weights_learns_that_they_were_published_again() -> None:
    async def play() -> None:
        run = Run(Machine({4}))
        await run.trainer.publish()
        await run.save(0)
        assert isinstance(run.trainer, MortalTrainer)
        assert await run.trainer.stand_up()
        assert not await run.trainer.stand_up()
        assert await run.trainer.life() == 1
        assert [version for version, _ in run.machine.relay] == [0, 0]

    asyncio.run(play())


def test_what_was_fed_and_groups_that_were_formed_are_not_relied_on() -> None:
    async def play() -> None:
        run = Run(Machine({6}))
        await run.trainer.publish()
        await run.save(0)
        assert await run.trainer.send(1, 1.0, False) is False  # 4
        await run.trainer.train_step(TrainBatch(0, 0, ()))  # 5
        await run.trainer.feed((), 1)  # dies; load, train
        assert await run.trainer.send(1, 1.0, False) is True, "the new processes have no groups"
        assert run.machine.made > 1

    asyncio.run(play())
