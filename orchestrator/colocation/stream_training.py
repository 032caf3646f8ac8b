"""Rollout and training on the same devices, in a run: when half of them change hands within a step (RollPacker 4.4).

Between steps all devices are the workers'. Within a step, as responses finish, :class:`StreamTrigger` is asked; where it
frees half of the engines, their requests migrate (tokens kept, KV recomputed), the trainer takes their devices, and is fed
the groups that are complete, from the first one on. When the rollout has ended, the trainer takes all devices and makes the
step; then it leaves, and the workers come back with the new weights. :mod:`orchestrator.colocation.handover` keeps that order.

Own workers only: borrowed ones generate on, and load each version when the own ones take their devices back. Engines that are cut
anew between steps are those of the step under way.

Guarantees: at most one hand-over a step, and none after its rollout has ended; whatever a hand-over meets, the step is
trained, streamed or not; every attempt is one event ``stream_trigger`` with what it was decided by.

How long contexts are now is what each request was sent with, plus an even share of the KV that its engine holds beyond that.
Trajectories whose turn is with a tool have no request, and come back with all of their context: they count where their prefix
is.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from orchestrator.api import (
    ConfigError,
    ManagedWorker,
    Prompt,
    PublishResult,
    ReleasingWorker,
    ResidentTrainer,
    RetryableError,
    TrainBatch,
    Trainer,
    TrainMetrics,
    TrainSample,
    Trajectory,
)
from orchestrator.colocation.handover import Colocation, DeviceHolder
from orchestrator.config.rollout_keys import ColocationSection
from orchestrator.events import EventLog
from orchestrator.policies.batching.stream_trigger import KvLimit, LengthDistribution, StreamTrigger, Unit
from orchestrator.proxy.gateway import LLMProxy
from orchestrator.proxy.worker_state import Pending, WorkerState, device_count

HISTORY = 4096  # final lengths of the latest trajectories
_TRIES = 3  # for a step whose devices could not be handed over
_BYTES = {"float32": 4, "bfloat16": 2}


class BegunEpisode(Protocol):
    """What the projection asks of a trajectory that is being made."""

    id: str
    prompt: Prompt
    context_tokens: int | None


class LendingTrainer:
    """The trainer as the pipeline sees it: its calls take the devices that they need, and no others may."""

    def __init__(self, trainer: ResidentTrainer, colocation: Colocation) -> None:
        self._trainer = trainer
        self._colocation = colocation

    async def train_step(self, batch: TrainBatch) -> TrainMetrics:
        """On all devices, which stay the trainer's until the weights are given back."""
        for attempt in range(_TRIES):
            try:
                return await self._colocation.train(batch)
            except RetryableError:
                if attempt + 1 == _TRIES:
                    raise
                await asyncio.sleep(1.0)
        raise AssertionError("unreachable")

    async def feed(self, samples: Sequence[TrainSample], version: int) -> None:
        """On the devices that were freed; without them it is ignored, as the port allows."""
        await self._colocation.feed(samples, version)

    async def publish(self) -> PublishResult:
        """While the trainer has devices: after a step, and before the first rollout."""
        return await self._trainer.publish()

    async def save(self, folder: str) -> None:
        """Between steps too: then all devices change hands for it."""
        await self._with_devices(lambda: self._trainer.save(folder))

    async def saved(self) -> None:
        """On no device: what is written was copied."""
        await self._trainer.saved()

    async def load(self, folder: str) -> int:
        """See the protocol."""
        return await self._trainer.load(folder)

    async def call(self, method: str, *arguments: Any) -> Any:
        """A method of the real trainer beyond the port."""
        trainer: Any = self._trainer
        return await self._with_devices(lambda: trainer.call(method, *arguments))

    async def close(self) -> None:
        """See the protocol."""
        await self._trainer.close()

    async def _with_devices(self, call: Callable[[], Any]) -> Any:
        if self._colocation.holder is DeviceHolder.TRAINED:
            return await call()
        await self._colocation.take_all()
        try:
            return await call()
        finally:
            await self._colocation.give_back()


class StreamTraining:
    """One run's. ``under_way``: the episodes that are begun; ``training``: devices of each data-parallel replica of the
    trainer; ``limit``: of KV in an engine; ``longest``: tokens of a context; ``timeout``: seconds for a call of the trainer.
    :meth:`begin_rollout` and :meth:`settle` enclose a rollout."""

    def __init__(
        self,
        settings: ColocationSection,
        trainer: Trainer,
        proxy: LLMProxy,
        events: EventLog,
        *,
        under_way: Callable[[], Iterable[BegunEpisode]],
        training: Sequence[Unit],
        limit: KvLimit,
        block_size: int,
        longest: int,
        timeout: float,
    ) -> None:
        own = [state for state in proxy.states if not state.borrowed]
        require_colocatable(trainer, [state.worker for state in own])
        assert isinstance(trainer, ResidentTrainer)
        self._settings, self._under_way = settings, under_way
        self._proxy = proxy
        self._events = events
        self._longest = longest
        self._history: deque[int] = deque(maxlen=HISTORY)
        self._limit, self._block_size = limit, block_size
        self._own = own  # the i-th has the i-th device, and those after it where it runs over several
        self._engines: list[WorkerState] = []  # of them those that have devices in the step under way
        self._training = list(training)
        engines = [state.index for state in own]
        self.colocation = Colocation(proxy, trainer, events, engines=engines, timeout=timeout, level=settings.level)
        self.trainer = LendingTrainer(trainer, self.colocation)
        self._trigger: StreamTrigger | None = None
        self._finished = 0
        self._news = asyncio.Event()
        self._busy = asyncio.Lock()

    def begin_rollout(self, requests: int) -> None:
        """A step's rollout begins, of so many trajectories, redundant ones included: nothing of it is finished."""
        settings = self._settings
        lengths = LengthDistribution(tuple(self._history), self._longest)
        marks = {"low": settings.low, "high": settings.high, "every": settings.every}
        devices = {state.index: (place, device_count(state)) for place, state in enumerate(self._own)}
        self._engines = [state for state in self._own if devices[state.index][1]]
        rollout = [tuple(range(first, first + count)) for first, count in devices.values() if count]
        self._trigger = StreamTrigger(requests, rollout, self._training, self._limit, lengths, **marks)
        self._finished = 0

    def finished(self, trajectory: Trajectory) -> None:
        """A response, an episode, has come to its end."""
        self._finished += 1
        self._history.append(len(trajectory.token_ids))
        self._news.set()

    async def settle(self) -> None:
        """The rollout has ended: wait for a hand-over in progress; none begins any more."""
        async with self._busy:
            self._trigger = None

    async def break_off(self) -> None:
        """The rollout ends before its batch is there. The trainer has all devices or none, and can be saved."""
        await self.settle()
        if self.colocation.holder not in (DeviceHolder.ROLLOUT, DeviceHolder.TRAINED):
            await self.colocation.give_back()

    async def run(self, streaming: Callable[[], None]) -> None:
        """Attempt at each milestone, until cancelled; ``streaming`` is told when the trainer may be fed."""
        while True:
            await self._news.wait()
            self._news.clear()
            async with self._busy:
                trigger = self._trigger  # all engines are asked at a milestone only, not whenever a response ends
                if trigger is not None and trigger.due(self._finished) and await self._attempt(trigger):
                    streaming()

    async def give_back(self, version: int) -> None:
        """The step is made and published: the workers take their devices and this version."""
        await self.colocation.give_back(version)

    async def _attempt(self, trigger: StreamTrigger) -> bool:
        held = await self._held()
        attempt = trigger.observe(self._finished, held)
        if attempt is None:
            return False
        self._events.emit(
            "stream_trigger",
            fraction=round(attempt.fraction, 6),
            peak=round(attempt.peak, 6),
            freed=list(attempt.freed),
            reason=attempt.reason,
        )
        engines = [self._engines[place].index for place in attempt.engines]
        return bool(attempt.freed) and await self.colocation.shrink(engines, attempt.replicas)

    async def _held(self) -> list[list[int]]:
        """Context lengths of the unfinished trajectories by engine; those that no engine has anything of are dealt out. What
        borrowed workers have stays there."""
        stats = dict(await self._proxy.stats())
        block, held = self._block_size, list[list[int]]()
        for state in self._engines:
            known = [_context(pending) for pending in state.sent.values()]
            kv = stats[state.worker.name].kv_used * block if state.worker.name in stats else 0
            more = max(0, kv - sum(known)) // len(known) if known else 0
            held.append([length + more for length in known])
        places = {state.index: place for place, state in enumerate(self._engines)}
        homeless = [_context(pending) for pending in self._proxy.waiting]
        generating = self._proxy.generating
        for episode in self._under_way():
            if episode.context_tokens is None or episode.id in generating:
                continue
            holder = self._proxy.router.prefix_holder(episode.id, episode.prompt.task)
            (held[places[holder]] if holder in places else homeless).append(episode.context_tokens)
        for number, length in enumerate(homeless):
            held[number % len(held)].append(length)
        return held


def _context(pending: Pending) -> int:
    return len(pending.request.token_ids) + sum(len(part.token_ids) for part in pending.parts)


def kv_bytes_per_token(shape: Mapping[str, Any], dtype: str) -> float:
    """Of a model by its config.json, or by the section ``model``: key and value of every layer, or what they are made of
    (multi-head latent attention)."""
    layers = int(shape.get("num_hidden_layers") or shape["layers"])
    if latent := shape.get("kv_lora_rank"):
        return float(layers * (int(latent) + int(shape["qk_rope_head_dim"])) * _BYTES[dtype])
    heads = int(shape.get("num_key_value_heads") or shape["kv_heads"])
    size = int(shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"])
    return 2.0 * layers * heads * size * _BYTES[dtype]


def require_colocatable(trainer: Trainer, workers: Sequence[ManagedWorker]) -> None:
    """Raises ConfigError where somebody cannot lend, or leave, a device."""
    if not isinstance(trainer, ResidentTrainer) or not all(isinstance(worker, ReleasingWorker) for worker in workers):
        fix = "needs a trainer that can leave its devices and workers that can release theirs; set it to false"
        raise ConfigError("rollout.colocation.enabled", True, fix)
