"""The stream to the trainer: groups of the coming batch, as soon as they are taken (RollPacker 4.4).

Guarantees:

* What is fed is a prefix of the batch that will be trained, in its order, each group whole and once; fed at the version at
  which that batch will be trained, and only while no step is being trained (its weights would change).
* One call at a time. After :meth:`GroupFeeder.close` none begins; :meth:`GroupFeeder.idle` waits for the one in
  progress. Rollout, weight updates and the taking of groups never wait for the feeder.
* A failing feed fails the run as a failing training step does: :meth:`GroupFeeder.run` raises, and
  :meth:`GroupFeeder.idle`, whose caller is about to train, does not return.

FedSamples is not trained: ledger, staleness and checkpoints know nothing of it, so a resume feeds or trains it again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from orchestrator.api import TrainSample
from orchestrator.events import EventLog


@dataclass
class FedSamples:
    """What was fed of one batch, and for how long. Whether the trainer used it, its own metrics say."""

    groups: int = 0
    samples: int = 0
    seconds: float = 0.0


class GroupFeeder:
    """``feed(samples, version)`` is the trainer's port, its failures made fatal. Not ``enabled``: it never opens."""

    def __init__(
        self, feed: Callable[[Sequence[TrainSample], int], Awaitable[None]], events: EventLog, enabled: bool
    ) -> None:
        self._feed = feed
        self._events = events
        self._enabled = enabled
        self._waiting: list[tuple[TrainSample, ...]] = []  # groups of the batch that is collected, in its order
        self._target: tuple[int, int] | None = None  # (step, version) that is fed; None: closed
        self._work = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self.fed = FedSamples()

    def open(self, step: int, version: int) -> None:
        """The trainer holds the version at which ``step`` will be trained: what waits may be fed, and what is taken."""
        if self._enabled:
            self.fed = FedSamples()
            self._target = (step, version)
            self._work.set()

    def add_group(self, group: Sequence[TrainSample]) -> None:
        """The batch has got another group."""
        self._waiting.append(tuple(group))
        self._work.set()

    def close(self) -> None:
        """The batch goes into training as a whole: no further feed of it begins, and what is taken from now on belongs to
        the next one."""
        self._target = None
        self._waiting.clear()

    async def idle(self) -> None:
        """Wait for the feed in progress."""
        await self._idle.wait()

    async def run(self) -> None:
        """Feed until cancelled, everything that waits in one call: the trainer forms its micro-batches itself."""
        while True:
            await self._work.wait()
            self._work.clear()
            while self._target is not None and self._waiting:
                step, version = self._target
                groups, self._waiting = self._waiting, []
                self._idle.clear()
                await self._feed_groups(groups, step, version)
                self._idle.set()

    async def _feed_groups(self, groups: list[tuple[TrainSample, ...]], step: int, version: int) -> None:
        samples = [sample for group in groups for sample in group]
        with self._events.stage("feed", step) as note:
            note.counts = {
                "groups": len(groups),
                "samples": len(samples),
                "tokens": sum(len(sample.token_ids) for sample in samples),
            }
            begun = self._events.time()
            await self._feed(samples, version)
            self.fed.groups += len(groups)
            self.fed.samples += len(samples)
            self.fed.seconds = round(self.fed.seconds + self._events.time() - begun, 6)
