"""Twins of a device, a rollout worker that lends it and a trainer that borrows it, with faults at every call.

A device knows who holds its memory and fails the test when two do. What a worker says is a function of the context alone,
so a turn that was interrupted, moved and resumed anywhere must say what an undisturbed one says.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from orchestrator.api import (
    CommandError,
    Completion,
    CompletionTiming,
    ConfigError,
    GenerationRequest,
    PublishResult,
    ReleaseResult,
    ResidencyResult,
    RetryableError,
    TrainBatch,
    TrainMetrics,
    TrainSample,
    UpdateResult,
    WorkerStats,
    merge_spans,
)

END = 1
STEP_SECONDS = 0.05
FOREVER = 2e4  # seconds; longer than any time limit


def next_token(context: Sequence[int]) -> int:
    value = zlib.crc32(repr(tuple(context)).encode())
    return END if value % 23 == 0 else 2 + value % 61


def whole_response(request: GenerationRequest) -> tuple[int, ...]:
    context = list(request.token_ids)
    while len(context) - len(request.token_ids) < request.sampling.max_tokens:
        context.append(next_token(context))
        if context[-1] == END:
            break
    return tuple(context[len(request.token_ids) :])


class Faults:
    """What goes wrong: the ``nth`` call (from 0) of ``who.what`` does ``kind``: "raise", "die", "hang", or "refuse"."""

    def __init__(self, wanted: Mapping[tuple[str, str, int], str]) -> None:
        self._wanted = dict(wanted)
        self._calls: dict[tuple[str, str], int] = {}
        self.hit: list[tuple[str, str, int, str]] = []

    def next(self, who: str, what: str) -> str:
        number = self._calls.get((who, what), 0)
        self._calls[who, what] = number + 1
        kind = self._wanted.get((who, what, number), "")
        if kind:
            self.hit.append((who, what, number, kind))
        return kind


@dataclass
class Device:
    """Memory that has one owner at a time."""

    name: str
    owners: list[str] = field(default_factory=list)

    def take(self, owner: str) -> None:
        if owner not in self.owners:
            self.owners.append(owner)
        assert len(self.owners) == 1, f"{self.name} is held by {self.owners}"

    def leave(self, owner: str) -> None:
        self.owners = [other for other in self.owners if other != owner]


class TwinWorker:
    """A ReleasingWorker. Everything but time and memory is as the port says."""

    def __init__(self, name: str, device: Device, faults: Faults) -> None:
        self.name = name
        self.device = device
        self._faults = faults
        self._closed = False
        self._task: asyncio.Task[None] | None = None
        self.releases: list[int] = []  # requests inside at each release
        self._boot()

    def _boot(self) -> None:
        self.device.take(self.name)
        self.dead = self.suspended = False
        self.released = ""
        self.unusable = False
        self.version = -1
        self._known: set[str] = set()
        self._running: dict[str, tuple[GenerationRequest, list[int], list[tuple[int, int]]]] = {}
        self._done: list[Completion] = []
        self._news = asyncio.Event()
        self._work = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name=f"{self.name} twin")

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(STEP_SECONDS)
            while self.suspended or not self._running:
                self._work.clear()
                await self._work.wait()
            assert not self.released
            for name, (request, said, spans) in list(self._running.items()):
                said.append(next_token((*request.token_ids, *said)))
                spans.append((self.version, 1))
                if said[-1] == END:
                    self._finish(name, "stop")
                elif len(said) >= request.sampling.max_tokens:
                    self._finish(name, "length")

    def _finish(self, name: str, reason: str) -> None:
        _, said, spans = self._running.pop(name)
        logprobs = tuple(-0.5 for _ in said)
        self._done.append(Completion(name, tuple(said), logprobs, merge_spans(spans), reason, CompletionTiming()))
        self._news.set()

    def die(self) -> None:
        self.dead = True
        self.device.leave(self.name)
        if self._task is not None:
            self._task.cancel()
        self._news.set()

    async def _command(self, what: str) -> None:
        self._check()
        kind = self._faults.next(self.name, what)
        if kind == "refuse":
            code = "released" if what == "add" else "invalid_request"  # the worker's state, not a request that is wrong
            raise CommandError(code, f"{self.name} refuses {what}")
        if kind == "hang":
            await asyncio.sleep(FOREVER)
        if kind in ("raise", "die"):
            self.die()
        await asyncio.sleep(0.001)
        self._check()

    def _check(self) -> None:
        if self.dead:
            raise RetryableError(f"{self.name} is dead")

    async def add(self, requests: Sequence[GenerationRequest]) -> None:
        await self._command("add")
        for request in requests:
            if request.request_id not in self._known:
                self._known.add(request.request_id)
                self._running[request.request_id] = (request, [], [])
        self._work.set()

    async def abort(
        self, request_ids: Sequence[str] = (), *, trajectories: Sequence[str] = (), groups: Sequence[str] = ()
    ) -> None:
        await self._command("abort")
        for name in request_ids:
            if name in self._running:
                self._finish(name, "abort")

    async def prioritize(self, priorities: Mapping[str, int]) -> None:
        await self._command("prioritize")

    async def completions(self) -> list[Completion]:
        self._check()
        while not self._done:
            self._news.clear()
            await self._news.wait()
            self._check()
        done, self._done = self._done, []
        return done

    async def suspend(self) -> None:
        await self._command("suspend")
        self.suspended = True

    async def prepare(self, version: int) -> None:
        await self._command("prepare")

    async def update(self, version: int) -> UpdateResult:
        await self._command("update")
        if self.released:
            raise CommandError("released", "update")
        assert self.suspended
        assert version >= self.version
        self.version, self.unusable = version, False
        return UpdateResult(version, 0, 0.0)

    async def resume(self) -> None:
        await self._command("resume")
        if self.released:
            raise CommandError("released", "resume")
        if self.unusable:
            raise CommandError("weights_unusable", "resume")
        assert self.version >= 0
        self.suspended = False
        self._work.set()

    async def release(self, level: str) -> ReleaseResult:
        await self._command("release")
        assert self.suspended
        self.releases.append(len(self._running))
        self.released, self.unusable = level, level == "dropped"
        self.device.leave(self.name)
        return ReleaseResult(level, 1000, len(self._running), 0.001, "twin")

    async def reclaim(self) -> None:
        await self._command("reclaim")
        self.released = ""
        self.device.take(self.name)

    async def stats(self) -> WorkerStats:
        self._check()
        return WorkerStats(len(self._running), 0, 0, 1, 0, 0.0, self.version)

    async def restart(self) -> None:
        self.die()
        kind = self._faults.next(self.name, "restart")
        await asyncio.sleep(1.0)
        if kind:
            raise RetryableError(f"{self.name} does not come up")
        self._boot()

    async def close(self) -> None:
        self.die()
        await asyncio.sleep(0)


class TwinTrainer:
    """A ResidentTrainer; replica ``i`` is on device ``i``."""

    def __init__(self, devices: Sequence[Device], faults: Faults) -> None:
        self._devices = devices
        self._faults = faults
        self.dead = False
        self.level = "away"
        self.version = 0
        self.fed: list[str] = []
        self.trained: list[tuple[str, ...]] = []

    async def _command(self, what: str) -> None:
        self._check()
        kind = self._faults.next("trainer", what)
        if kind == "hang":
            await asyncio.sleep(FOREVER)
        if kind == "die":
            self.die()
        await asyncio.sleep(0.01)
        self._check()
        if kind == "config":
            raise ConfigError("trainer", what, "is wrong")
        if kind:
            raise RetryableError(f"the trainer fails in {what}")

    def _check(self) -> None:
        if self.dead:
            raise RetryableError("the trainer is dead")

    def die(self) -> None:
        self.dead = True
        for device in self._devices:
            device.leave("trainer")

    async def residency(self, level: str, replicas: Sequence[int] | None = None) -> ResidencyResult:
        devices = [self._devices[index] for index in replicas or range(len(self._devices))]
        if level != "away" and not self.dead:
            devices[0].take("trainer")  # a part of it is there when it fails
        await self._command(f"residency {level}")
        for device in devices:
            if level == "away":
                device.leave("trainer")
            else:
                device.take("trainer")
        self.level = level
        return ResidencyResult(level, 0, 10, 10, 10, 0.01, "twin")

    async def feed(self, samples: Sequence[TrainSample], version: int) -> None:
        await self._command("feed")
        assert self.level in ("stream", "step")
        self.fed += [sample.trajectory_id for sample in samples]

    async def train_step(self, batch: TrainBatch) -> TrainMetrics:
        await self._command("train_step")
        assert self.level == "step"
        assert all(device.owners == ["trainer"] for device in self._devices)
        assert batch.version == self.version
        self.version += 1
        self.trained.append(tuple(sample.trajectory_id for sample in batch.samples))
        return TrainMetrics(batch.step, self.version, {})

    async def publish(self) -> PublishResult:
        await self._command("publish")
        return PublishResult(self.version, 0, 0, 0.0)

    async def save(self, folder: str) -> None:
        raise NotImplementedError

    async def saved(self) -> None:
        raise NotImplementedError

    async def load(self, folder: str) -> int:
        raise NotImplementedError

    async def close(self) -> None:
        self.die()
        await asyncio.sleep(0)
