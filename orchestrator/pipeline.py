"""The loop: six steps of RollArt 6.2, trajectories flowing beside them.

Each iteration: (1) ``get_batch`` collects complete groups while the previous batch still trains; then, once that is
trained and published, and the rollout workers have fetched it while they generate, (2) suspend, (3) update, (4) resume
them; they (5) recompute the KV of what is in flight and go on, while (6) ``train_step`` runs on the batch. ``sync`` mode
trains before it resumes and starts nothing meanwhile: the same code with alpha = 0. With ``trainer.stream`` the groups of
(1) also go to the trainer as they are taken, whenever it is not training: :mod:`orchestrator.feeding`.

Guarantees: every trajectory that starts is in the ledger and ends there; the ledger is checked at every step's end; a
checkpoint holds everything a resume needs; what waits, waits with a named reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from orchestrator.api import (
    ManagedWorker,
    RetryableError,
    RewardFunction,
    RunError,
    Task,
    TrainBatch,
    Trainer,
    TrainMetrics,
    TrainSample,
    Trajectory,
)
from orchestrator.buffer import Taken
from orchestrator.checkpoint import Checkpoints, RunState
from orchestrator.config import Config
from orchestrator.evaluation import evaluate
from orchestrator.events import EventLog
from orchestrator.feeding import Feeder
from orchestrator.ledger import Ledger
from orchestrator.policies.weighting import LagWeight, effective_share
from orchestrator.rollout import Rollout
from orchestrator.samples import histogram, to_sample

Answer = TypeVar("Answer")
_ALARMS = {"logprob_gap": "log-prob gap between rollout and trainer", "ess": "effective sample size"}
_PUBLISH_PAUSES = (1.0, 2.0, 4.0)  # seconds between tries; leases of Mooncake end after 5


class Store(Protocol):
    """Where trajectories are kept (:mod:`orchestrator.store`)."""

    def append(
        self, trajectory: Trajectory, step: int, outcome: str, *, position: int | None = None, weight: float = 1.0
    ) -> None: ...

    def flush(self) -> None: ...


class Display(Protocol):
    """Who watches (:mod:`orchestrator.progress`)."""

    def stage(self, name: str, detail: str = "") -> None: ...

    def waiting(self, reason: str) -> None: ...

    def update(self, **numbers: Any) -> None: ...

    def message(self, text: str) -> None: ...


@dataclass
class Parts:
    """Everything the pipeline talks to. Real or simulated, it cannot tell."""

    task: Task
    workers: list[ManagedWorker]
    trainer: Trainer
    reward: RewardFunction
    events: EventLog
    ledger: Ledger
    store: Store
    display: Display
    checkpoints: Checkpoints | None = None


@dataclass
class Position:
    """Where a run stands; what a resume starts from."""

    step: int = 0  # training steps done
    version: int = 0
    groups: int = 0  # ever started
    trajectories: int = 0
    buffered: tuple[Trajectory, ...] = ()
    success_history: list[tuple[int, float]] = field(default_factory=list)


class Pipeline:
    """One run. :meth:`run` returns the reason why it ended; :meth:`stop` asks it to end now."""

    def __init__(self, config: Config, parts: Parts, position: Position | None = None) -> None:
        self.config = config
        self.parts = parts
        self.position = position or Position()
        self.rollout = Rollout(
            config,
            parts.task,
            parts.workers,
            parts.reward,
            parts.events,
            parts.ledger,
            keep=self._keep,
            fail=self.fail,
            groups=self.position.groups,
            trajectories=self.position.trajectories,
        )
        self.feeder = Feeder(self._feed, parts.events, config.trainer.stream)
        self.lag_weight = LagWeight(config.rollout.staleness_decay)
        self._training: asyncio.Task[None] | None = None
        self._failure: asyncio.Future[None] | None = None
        self._stop = ""
        self._trainer_call = ""  # what the trainer is asked for now

    # -- the six steps -----------------------------------------------------------------------------------------------

    async def run(self) -> str:
        """Run to the last step, the time limit or :meth:`stop`. Returns "completed" or the reason for stopping early."""
        self._failure = asyncio.get_running_loop().create_future()
        self.rollout.proxy.start()
        helpers = [
            asyncio.create_task(self.rollout.start_groups(), name="start groups"),
            asyncio.create_task(self.feeder.run(), name="feed"),
            asyncio.create_task(self._report_waiting(), name="report waiting"),
        ]
        for helper in helpers:
            helper.add_done_callback(self._helper_done)
        try:
            await self._unless_failed(self._prepare())
            while not self._stop and self.position.step + self._steps_training() < self.config.run.steps:
                if self._time_is_up():
                    break
                await self._unless_failed(self._iteration(self.position.step + self._steps_training()))
            await self._unless_failed(self._conclude())
            return self._stop or "completed"
        finally:
            await self._shut_down(helpers)

    async def _iteration(self, step: int) -> None:
        sync = self.config.run.mode == "sync"
        self.rollout.open_starts()
        self.parts.display.stage("get_batch", f"step {step}")
        with self.parts.events.stage("get_batch", step) as note:  # (1)
            taken = await self._get_batch()
            note.waiting_for = "rollout" if self._training is None else "rollout and training"
        await self._finish_training()
        if sync:
            self.rollout.close_starts()
            await self.rollout.end_members("aborted_redundant", "")
        batch = TrainBatch(
            step, self.position.version, tuple(to_sample(item.trajectory, self._weight(item)) for item in taken)
        )
        self._note_uniform(step)
        self.rollout.buffer.hand_over()
        self.rollout.next_version = self.position.version + 1
        self.rollout.poke()
        if sync:
            self.feeder.close()
            await self._train(step, taken, batch)
            await self._sync_weights(step)
            await self._evaluate_if_due(step + 1)
        else:
            await self._sync_weights(step)  # (2) (3) (4), and (5) in the engines
            self.feeder.close()  # before anything of the next batch is taken
            self._training = asyncio.create_task(self._train(step, taken, batch), name=f"train step {step}")  # (6)
            await self._evaluate_if_due(step)

    async def _get_batch(self) -> list[Taken]:
        """Step 1, interrupted when the training step that runs beside it fails."""
        wanted = self.config.rollout.groups_per_step
        batch = asyncio.ensure_future(self.rollout.buffer.get_batch(wanted, self._on_take))
        try:
            while not batch.done():
                training = self._training
                if training is not None and training.done():
                    training.result()  # raises what ended it
                    training = None
                watched: list[asyncio.Future[Any]] = [batch] if training is None else [batch, training]
                await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            return batch.result()
        finally:
            batch.cancel()

    def _on_take(self, group: list[Trajectory]) -> None:
        self.rollout.on_take(group)
        if self.config.trainer.stream:
            self.feeder.take([to_sample(item.trajectory, self._weight(item)) for item in self.rollout.buffer.newest()])

    def _weight(self, item: Taken) -> float:
        return self.lag_weight.of(item.lag)

    async def _feed(self, samples: Sequence[TrainSample], version: int) -> None:
        await self._ask("feed", self.parts.trainer.feed(samples, version))

    async def _sync_weights(self, step: int) -> None:
        """Steps 2 to 4: bring the rollout workers to the trainer's version. They stand still only while they load it."""
        version, proxy, events = self.position.version, self.rollout.proxy, self.parts.events
        if proxy.version == version:
            return
        with events.stage("prepare", step) as note:
            note.waiting_for = f"weights of version {version} from the relay"
            await proxy.prepare(version)
        with events.stage("suspend", step) as note:
            note.waiting_for = "the engine step in progress"
            await proxy.suspend()
        with events.stage("update", step) as note:
            note.waiting_for = f"weights of version {version} to be loaded"
            results = await proxy.update(version)
        with events.stage("resume", step):
            await proxy.resume()
        for result in results:
            events.emit(
                "update", version=version, bytes=result.bytes, seconds=result.seconds, preempted=result.preempted
            )
        for name, stats in await proxy.stats():
            events.emit(
                "worker",
                name=name,
                running=stats.running,
                waiting=stats.waiting,
                kv_used=stats.kv_used,
                kv_capacity=stats.kv_capacity,
                preemptions=stats.preemptions,
                outranked=stats.outranked,
                prefix_queries=stats.prefix_queries,
                prefix_hits=stats.prefix_hits,
                oldest_wait=round(stats.oldest_wait, 3),
                tokens_per_s=round(stats.tokens_per_s, 3),
                version=stats.version,
            )

    async def _train(self, step: int, taken: list[Taken], batch: TrainBatch) -> None:
        """Step 6: train, publish, account, checkpoint. Afterwards the trainer may be fed the next batch."""
        events, parts, position = self.parts.events, self.parts, self.position
        await self.feeder.idle()
        begun = events.time()
        with events.stage("train_step", step):
            metrics = await self._ask("train_step", parts.trainer.train_step(batch))
        for place, item in enumerate(taken):
            parts.ledger.end(item.trajectory.id, "trained", step=step)
            parts.store.append(item.trajectory, step, "trained", position=place, weight=self._weight(item))
        await self._publish(step)
        position.step, position.version = step + 1, metrics.version
        self.rollout.buffer.set_version(metrics.version)
        self.rollout.poke()
        self._report_step(step, taken, batch, metrics, begun)
        parts.ledger.check()
        if (step + 1) % self.config.checkpoint.every == 0 or step + 1 == self.config.run.steps:
            await self._checkpoint()
        self.feeder.open(position.step, position.version)

    async def _call(self, what: str, call: Coroutine[Any, Any, Answer]) -> Answer:
        """A call of the trainer, under its time limit; while it runs, it is what the run waits for."""
        limit = self.config.run.trainer_timeout
        self._trainer_call = what
        try:
            async with asyncio.timeout(limit):
                return await call
        except TimeoutError as error:
            raise RunError(f"the trainer failed in {what}: no answer for {limit:g} s (run.trainer_timeout)") from error
        finally:
            self._trainer_call = ""

    async def _ask(self, what: str, call: Coroutine[Any, Any, Answer]) -> Answer:
        """A call whose failure ends the run: the trainer's state is in the last checkpoint."""
        try:
            return await self._call(what, call)
        except RetryableError as error:
            raise RunError(f"the trainer failed in {what}: {error}") from error

    async def _publish(self, step: int) -> None:
        """Publish what was trained. A failed publication left nothing behind, so it may be tried again: a full relay frees
        itself when leases end (back-pressure)."""
        with self.parts.events.stage("publish", step) as note:
            for pause in (*_PUBLISH_PAUSES, None):
                try:
                    await self._call("publish", self.parts.trainer.publish())
                    return
                except RetryableError as error:
                    if pause is None:
                        raise RunError(f"the trainer failed in publish: {error}") from error
                    note.waiting_for = f"room on the relay: {str(error).splitlines()[0]}"
                    self.rollout.proxy.note_fault("publish", str(error))
                    await asyncio.sleep(pause)

    async def _finish_training(self) -> None:
        """Wait for the training step in progress; its failure is the run's."""
        if self._training is not None:
            with self.parts.events.stage("wait_train", self.position.step) as note:
                note.waiting_for = "the training step in progress"
                await asyncio.shield(self._training)
            self._training = None

    def _steps_training(self) -> int:
        """1 while a step is in training and not yet counted in the position."""
        return 1 if self._training is not None and self._training_step >= self.position.step else 0

    @property
    def _training_step(self) -> int:
        return int(self._training.get_name().rsplit(" ", 1)[1]) if self._training is not None else -1

    # -- before and after --------------------------------------------------------------------------------------------

    async def _prepare(self) -> None:
        """Publish the first weights, bring the workers to them, evaluate once; put a checkpoint's buffer back."""
        await self._publish(self.position.step)
        await self._sync_weights(self.position.step)
        self.rollout.buffer.restore(list(self.position.buffered), self.position.version)
        self.rollout.next_version = self.position.version
        if self.position.step == 0:
            await self._evaluate("start")
            await self._checkpoint()
        self.feeder.open(self.position.step, self.position.version)

    async def _conclude(self) -> None:
        """The last step is trained; what is still under way is not needed any more."""
        self.rollout.close_starts()
        await self._finish_training()
        self.feeder.close()
        await self.feeder.idle()
        await self.rollout.end_members("aborted_redundant", "")
        self.rollout.buffer.drain("aborted_redundant", "")
        await self._sync_weights(self.position.step)
        await self._evaluate("end")

    async def _shut_down(self, helpers: list[asyncio.Task[None]]) -> None:
        self.rollout.close_starts()
        for helper in helpers:
            helper.cancel()
        await asyncio.gather(*helpers, return_exceptions=True)
        await self.rollout.end_members("failed", "interrupted")
        if self._training is not None:
            self._training.cancel()
            await asyncio.gather(self._training, return_exceptions=True)
        await self.rollout.proxy.close()
        self.parts.store.flush()
        self.parts.ledger.check()

    async def _evaluate_if_due(self, step: int) -> None:
        every = self.config.evaluation.every
        if every and step and step % every == 0 and step < self.config.run.steps:
            await self._evaluate("mid")

    async def _evaluate(self, phase: str) -> None:
        """Greedy play on held-out prompts with the weights that the workers hold."""
        version, count = self.rollout.proxy.version, self.config.evaluation.prompts
        label = f"eval-{version}-{phase}"
        with self.parts.events.stage("evaluate", version):
            self.parts.display.stage("evaluate", f"{count} held-out prompts")
            result = await evaluate(self.rollout.environments, self.parts.task, self.parts.reward, self.config, label)
        self.position.success_history.append((version, result.success))
        self.parts.events.emit("evaluation", step=version, version=version, phase=phase, **result.as_dict())
        self.parts.display.update(success=result.success, low=result.low, high=result.high, phase=phase)

    async def _checkpoint(self) -> None:
        checkpoints, position = self.parts.checkpoints, self.position
        if checkpoints is None:
            return
        with self.parts.events.stage("checkpoint", position.step):
            partial = checkpoints.begin(position.step)
            await self._ask("save", self.parts.trainer.save(str(partial / "trainer")))
            self.parts.store.flush()
            state = RunState(
                position.step,
                position.version,
                self.parts.ledger.sequence,
                self.parts.events.time(),
                tuple(self.rollout.buffer.stored()),
                tuple(position.success_history),
            )
            checkpoints.commit(partial, state)

    # -- control -----------------------------------------------------------------------------------------------------

    def stop(self, reason: str) -> None:
        """Ask the run to end: what is in flight is accounted for, a resume goes on from the last checkpoint."""
        self._stop = reason
        if self._failure is not None and not self._failure.done():
            self._failure.set_result(None)

    def fail(self, error: BaseException) -> None:
        """End the run with this error."""
        if self._failure is not None and not self._failure.done():
            self._failure.set_exception(error)

    def _helper_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    async def _unless_failed(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work``, but end it early when the run failed or was asked to stop."""
        assert self._failure is not None
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait([task, self._failure], return_when=asyncio.FIRST_COMPLETED)
            if self._failure.done():
                self._failure.result()
            else:
                await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _time_is_up(self) -> bool:
        minutes = self.config.run.minutes
        return minutes is not None and self.parts.events.time() >= minutes * 60

    def _keep(self, trajectory: Trajectory, state: str, cause: str) -> None:
        self.parts.store.append(trajectory, self.position.step, f"{state}: {cause}" if cause else state)

    # -- what it says ------------------------------------------------------------------------------------------------

    @property
    def waiting_for(self) -> str:
        """What the next batch waits for, in words."""
        wanted, have = self.config.rollout.groups_per_step, self.rollout.buffer.ready_groups
        if self.rollout.proxy.waiting_for:
            return self.rollout.proxy.waiting_for
        if self._trainer_call and (have >= wanted or not self.rollout.open):
            return f"the trainer: {self._trainer_call}"
        batch = self.rollout.buffer.waiting_for or f"{have} of {wanted} groups complete"
        return f"{batch}; {self.rollout.waits()}"

    async def _report_waiting(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            self.parts.display.waiting(self.waiting_for)
            self.parts.display.update(
                in_flight=self.rollout.in_flight,
                buffered=self.rollout.buffer.scored,
                tokens=self.rollout.proxy.tokens,
                training=self._training is not None and not self._training.done(),
                ledger=self.parts.ledger.counts.as_dict(),
            )

    def _note_uniform(self, step: int) -> None:
        """What dynamic sampling did for this batch, and an alarm when its limit let groups of equal rewards through."""
        settings, events = self.config.rollout, self.parts.events
        if not settings.dynamic_sampling:
            return
        buffer, groups = self.rollout.buffer, settings.groups_per_step
        events.emit("dynamic_sampling", step=step, filtered=buffer.filtered_groups, kept=buffer.uniform_taken)
        if buffer.uniform_taken:
            limit = f"rollout.max_filtered_groups = {settings.max_filtered_groups} was reached"
            detail = f"{buffer.uniform_taken} of {groups} groups of step {step + 1} have equal rewards: {limit}"
            events.emit("alarm", what="dynamic_sampling", detail=detail)

    def _report_step(
        self, step: int, taken: list[Taken], batch: TrainBatch, metrics: TrainMetrics, begun: float
    ) -> None:
        rewards = [float(item.trajectory.reward or 0.0) for item in taken]
        reward = round(sum(rewards) / len(rewards), 6)
        success = round(sum(value > 0.5 for value in rewards) / len(rewards), 6)
        ledger, values = self.parts.ledger.counts.as_dict(), dict(metrics.values)
        self.parts.events.emit(
            "step",
            step=step,
            version=metrics.version,
            trained=len(taken),
            tokens=sum(item.trajectory.generated_tokens for item in taken),
            turns=sum(len(item.trajectory.turns) for item in taken),
            reward_mean=reward,
            success=success,
            lag=histogram([item.lag for item in taken]),
            lag_trained=histogram([batch.version - item.trajectory.first_version for item in taken]),
            weight_ess=round(effective_share([self._weight(item) for item in taken]), 6),
            versions_mixed=sum(len(item.trajectory.versions) > 1 for item in taken),
            seconds=round(self.parts.events.time() - begun, 6),
            fed=self.feeder.fed.samples,
            fed_seconds=self.feeder.fed.seconds,
            metrics=values,
            ledger=ledger,
        )
        gap, limit = values.get("logprob_gap_mean", 0.0), self.config.trainer.logprob_gap_alarm
        if gap > limit:
            self._alarm("logprob_gap", f"mean {gap:.4g} over {limit:.4g} after step {step + 1}")
        ess, floor = values.get("ess", 1.0), self.config.rollout.ess_alarm
        if ess < floor:
            self._alarm("ess", f"{ess:.4g} under rollout.ess_alarm = {floor:.4g} after step {step + 1}")
        self.parts.display.update(
            step=step + 1,
            version=metrics.version,
            reward=reward,
            train_success=success,
            lag=histogram([item.lag for item in taken]),
            ledger=ledger,
            metrics=values,
        )

    def _alarm(self, what: str, detail: str) -> None:
        self.parts.events.emit("alarm", what=what, detail=detail)
        self.parts.display.message(f"ALARM: {_ALARMS[what]}: {detail}")
