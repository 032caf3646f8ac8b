"""The loop: six steps of RollArt 6.2, trajectories flowing beside them.

Each iteration: (1) ``get_batch`` collects complete groups while the previous batch still trains; then, once that is
trained and published, and the rollout workers have fetched it while they generate, (2) suspend, (3) update, (4) resume
them; they (5) recompute the KV of what is in flight and go on, while (6) ``train_step`` runs on the batch. Other modes end
what is in flight at (2), or train before they resume: the same code, asking
:mod:`orchestrator.policies.batching.coordination_modes`. With ``trainer.stream`` the groups of (1) also go to the
trainer as they are taken, while it is idle: :mod:`orchestrator.colocation.group_feeder`. With ``rollout.weights_overlap`` (6)
does not wait for (2) to (5): these bring the workers to the version before, beside it; (6) ends when they have it.

Guarantees: every trajectory that starts is in the ledger and ends there; the ledger is checked at every step's end; a
checkpoint holds everything a resume needs; what waits, waits with a named reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from orchestrator.api import (
    CheckpointLost,
    RetryableError,
    RunError,
    TrainBatch,
    TrainMetrics,
    TrainSample,
    Trajectory,
)
from orchestrator.buffer import Taken, let_go
from orchestrator.checkpoint import Checkpoints, CheckpointState
from orchestrator.colocation.group_feeder import FedSamples, GroupFeeder
from orchestrator.colocation.stream_training import StreamTraining
from orchestrator.components import Components, Position
from orchestrator.evaluation import SOLVED, Evaluator
from orchestrator.observe.occupancy import SAMPLE_SECONDS, Occupancy
from orchestrator.parallelism.replanner import Replanner
from orchestrator.policies.training.learning_alarms import WORDS, Alarm, LearningWatch, answer_figures, metric_means
from orchestrator.policies.training.sample_weights import LagWeight, OverlongPenalty, effective_share
from orchestrator.rollout import Rollout
from orchestrator.train_samples import histogram, to_samples
from orchestrator.trainer_calls import TrainerCalls
from orchestrator.weight_sync import WeightSync

T = TypeVar("T")
Helper = Callable[[], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """What the loop itself goes by. ``minutes`` None: no limit; ``evaluate_every`` 0: only before and after."""

    steps: int
    minutes: float | None
    groups_per_step: int
    checkpoint_every: int  # steps; 0: by time only
    checkpoint_seconds: float  # 0: by steps only
    evaluate_every: int
    evaluation_prompts: int
    stream: bool  # groups go to the trainer as they are taken
    weights_overlap: bool  # a version travels beside the next training step
    overlong: OverlongPenalty
    signal_share: float  # of the groups, that a run goes on for past its half; 0: any


class RunControl:
    """How a run ends before its last step: asked to, or failed. One for all of its parts."""

    def __init__(self) -> None:
        self.stopped = ""  # why, as who asked says
        self.grace = 0.0  # seconds that who asked first leaves it
        self._ended: asyncio.Future[None] | None = None
        self._hurried: asyncio.Future[None] | None = None  # done: it was asked again

    def open(self) -> None:
        """The run begins."""
        self._ended = asyncio.get_running_loop().create_future()
        self._hurried = asyncio.get_running_loop().create_future()

    def stop(self, reason: str, grace: float = 0.0) -> None:
        """Ask the run to end: what is in flight is accounted for, a resume goes on from the last checkpoint. ``grace``: seconds
        for the step in progress and a checkpoint of it; asked again, the run ends at once."""
        if not self.stopped:
            self.grace = grace
        elif self._hurried is not None and not self._hurried.done():
            self._hurried.set_result(None)
        self.stopped = reason
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    def fail(self, error: BaseException) -> None:
        """End the run with this error."""
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(error)

    async def run_unless_ended(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work``, but end it early when the run failed or was asked to stop."""
        assert self._ended is not None
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait([task, self._ended], return_when=asyncio.FIRST_COMPLETED)
            if self._ended.done():
                self._ended.result()
            else:
                await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def run_in_grace(self, work: Coroutine[Any, Any, None]) -> str:
        """Run ``work`` while who asked the run to end leaves time for it. Returns why it was not done, "" if it was."""
        assert self._hurried is not None
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait([task, self._hurried], timeout=self.grace, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                return "it was asked to end at once" if self._hurried.done() else f"it took more than {self.grace:g} s"
            task.result()
        except (RunError, RetryableError) as error:
            return str(error)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        return ""


class Pipeline:
    """One run, of what :func:`orchestrator.build.build_pipeline` puts together. :meth:`run` returns the reason why it ended;
    :meth:`stop` asks it to end now."""

    def __init__(
        self,
        settings: LoopSettings,
        parts: Components,
        position: Position,
        control: RunControl,
        calls: TrainerCalls,
        rollout: Rollout,
        weights: WeightSync,
        feeder: GroupFeeder,
        evaluator: Evaluator,
        watch: LearningWatch,
        lag_weight: LagWeight,
        *,
        helpers: Mapping[str, Helper] | None = None,
        turns: StreamTraining | None = None,
        replanner: Replanner | None = None,
    ) -> None:
        """``helpers``: what runs beside the loop; ``turns``: training on the workers' devices; ``replanner``: cuts engines anew
        between steps. None: not in this run."""
        self.settings = settings
        self.parts = parts
        self.position = position
        self.rollout = rollout
        self.turns = turns
        self.feeder = feeder
        self.weights = weights
        self.replanner = replanner
        self.lag_weight = lag_weight
        self._control = control
        self._calls = calls
        self._evaluator = evaluator
        self._helpers = dict(helpers or {})
        self._training: asyncio.Task[None] | None = None
        self._training_step = -1  # the step of that task
        self._trained: asyncio.Future[None] | None = None  # done: that step is made, and its weights are on their way
        self._settling: asyncio.Task[None] | None = None
        self._evaluating = asyncio.Lock()  # the workers keep their weights
        self._saving: asyncio.Task[None] | None = None  # of the last checkpoint
        self._saved = parts.events.time()  # when the last checkpoint was begun
        self._saved_step = position.step  # the steps in it
        self._handed_over: Sequence[Taken] = ()  # to the trainer, whose step has not begun
        self._occupancy = Occupancy()
        self._watch = watch
        self._exhausted = False  # too few groups teach anything: the run ends

    # -- the six steps -----------------------------------------------------------------------------------------------

    async def run(self) -> str:
        """Run to the last step, the time limit or :meth:`stop`. Returns "completed" or the reason for stopping early."""
        self._control.open()
        self.rollout.proxy.start()
        helpers = [
            asyncio.create_task(self.rollout.start_groups(), name="start groups"),
            asyncio.create_task(self.feeder.run(), name="feed"),
            asyncio.create_task(self._report_waiting(), name="report waiting"),
        ]
        helpers += [asyncio.create_task(helper(), name=name) for name, helper in self._helpers.items()]
        if self.turns is not None:
            helpers.append(asyncio.create_task(self.turns.run(self._open_feeder), name="stream trigger"))
        for helper in helpers:
            helper.add_done_callback(self._helper_done)
        try:
            await self._control.run_unless_ended(self._prepare())
            while not self._control.stopped and self.position.step + self._steps_training() < self.settings.steps:
                if self._time_is_up():
                    done, all_ = self.position.step + self._steps_training(), self.settings.steps
                    self.parts.display.message(
                        f"run.minutes = {self.settings.minutes:g} are over after step {done}/{all_}"
                    )
                    break
                if self._exhausted:
                    break
                await self._control.run_unless_ended(self._iteration(self.position.step + self._steps_training()))
            if not (self._control.stopped and self._control.grace):
                await self._control.run_unless_ended(self._conclude())
            if self._control.stopped and self._control.grace:
                await self._save_in_grace()
            return self._control.stopped or "completed"
        finally:
            await self._shut_down(helpers)

    async def _iteration(self, step: int) -> None:
        mode = self.rollout.mode
        self.rollout.open_starts()
        if self.replanner is not None:
            self.replanner.begin_rollout()
        if self.turns is not None:
            self.turns.begin_rollout(self.rollout.launches)
        self.parts.display.stage("get_batch", f"step {step}")
        with self.parts.events.stage("get_batch", step) as note:  # (1)
            taken = await self._get_batch()
            note.waiting_for = "rollout" if self._training is None else "rollout and training"
        if self.turns is not None:
            await self.turns.settle()
        if self.replanner is not None:
            await self.replanner.end_rollout(step, [item.trajectory for item in taken])
        await self.rollout.end_batch(step)
        await (self._finish_training(early=True) if mode.overlaps else self._settled())
        batch = TrainBatch(step, self.position.version, self._samples(taken))
        self.rollout.note_uniform(step)
        self.rollout.hand_over()
        self._handed_over = taken
        self.rollout.next_version = self.position.version + 1
        self.rollout.poke()
        if not mode.overlaps:
            self.feeder.close()
            self._start_training(step, taken, batch)
            await self._until_trained()
            await self._sync_weights(step, leave=True)
            await self._watched(self._evaluate_if_due(step + 1))
        else:
            if not self.settings.weights_overlap:
                await self._sync_weights(step)  # (2) (3) (4), and (5) in the engines
            self.rollout.open_starts()
            await self._finish_training()  # its checkpoint
            self.feeder.close()  # before anything of the next batch is taken
            self._start_training(step, taken, batch)  # (6)
            await self._watched(self._evaluate_if_due(step))
        if self.replanner is not None:
            await self._watched(self.replanner.apply_change(step))

    async def _get_batch(self) -> list[Taken]:
        """Step 1."""
        wanted = self.settings.groups_per_step
        return await self._watched(self.rollout.buffer.get_batch(wanted, self._on_take, streamed=self.settings.stream))

    async def _watched(self, work: Coroutine[Any, Any, T]) -> T:
        """Do this, interrupted when the training step, the publication or the checkpoint that runs beside it fails: engines that
        start, and the requests of one that died, would wait for its weights for ever."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                watched: list[asyncio.Future[Any]] = [task]
                for beside in (self._training, self._settling, self._saving):
                    if beside is not None and beside.done():
                        beside.result()  # raises what ended it
                    elif beside is not None:
                        watched.append(beside)
                await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    def _on_take(self, group: list[Trajectory]) -> None:
        self.rollout.on_take(group)
        if self.settings.stream:
            self.feeder.add_group(self._samples(self.rollout.buffer.newest()))

    def _samples(self, taken: Sequence[Taken]) -> tuple[TrainSample, ...]:
        rule = self.settings.overlong
        return tuple(sample for item in taken for sample in to_samples(item.trajectory, self._weight(item), rule))

    def _weight(self, item: Taken) -> float:
        return self.lag_weight.weight_for(item.lag)

    async def _sync_weights(self, step: int, *, leave: bool = False) -> None:
        """Steps 2 to 4: bring the workers to the trainer's version, beside its checkpoint. They stand still only while they load
        it; those that got it from the trainer itself do not wait until it is on the relay. ``leave``: nor does the caller, if
        there are any, nor for the checkpoint; then :meth:`_settled` waits for the rest."""
        version = self.position.version
        if self.rollout.proxy.version == version:
            return
        if self.turns is not None:
            await self._finish_training()
            await self.turns.give_back(version)
            return
        await self.weights.lead(step, version)
        later = leave and self.rollout.proxy.version == version
        if not later:
            await self.weights.follow(step, version)
        if later or (leave and self._training is not None):
            self._settling = asyncio.create_task(self._settle(step, version, later), name=f"settle {version}")

    async def _settle(self, step: int, version: int, follow: bool) -> None:
        if follow:
            await self.weights.follow(step, version)
        if self._training is not None:
            await asyncio.shield(self._training)
            self._training = None

    async def _deliver(self, step: int, version: int) -> None:
        """Steps 2 to 4 with what the trainer holds, beside its next step."""
        await self.weights.publish_held(step)
        async with self._evaluating:
            await self.weights.follow(step + 1, version)
        self.rollout.poke()  # what starts now is one version younger

    async def _settled(self) -> None:
        """Until the version is on the relay, and with all workers."""
        if self._settling is not None:
            with self.parts.events.stage("wait_train", self.position.step) as note:
                note.waiting_for = "the weights to be on the relay and with all workers, and the checkpoint"
                await self._end_settling()

    async def _end_settling(self) -> None:
        settling = self._settling
        if settling is not None:
            await asyncio.shield(settling)
            if self._settling is settling:
                self._settling = None

    async def _train(self, step: int, taken: list[Taken], batch: TrainBatch) -> None:
        """Step 6: train, publish, account, checkpoint; some of it beside the workers' update. Afterwards the trainer may be
        fed the next batch."""
        events, parts, position = self.parts.events, self.parts, self.position
        await self.feeder.idle()
        await self._room_in_store(step)
        begun = events.time()
        with events.stage("train_step", step):
            metrics = await self._calls.final("train_step", parts.trainer.train_step(batch))
        for place, item in enumerate(taken):
            parts.ledger.end(item.trajectory.id, "trained", step=step)
            parts.store.append(item.trajectory, step, "trained", position=place, weight=self._weight(item))
        if self.settings.weights_overlap:
            await self._hold(step, metrics.version)
        else:
            await self.weights.begin_publishing(step, metrics.version)
        position.step, position.version = step + 1, metrics.version
        self.rollout.set_version(metrics.version)
        self._report_step(step, taken, batch, metrics, begun)
        parts.ledger.check()
        state = self._run_state() if self._checkpoint_due(step + 1) else None
        if self.settings.weights_overlap:
            self._settling = asyncio.create_task(
                self._deliver(step, metrics.version), name=f"deliver {metrics.version}"
            )
        if self._trained is not None and self.turns is None:
            self._trained.set_result(None)
        await self.weights.finish_publishing()
        if state is not None:
            await self._checkpoint(state)
        if self.turns is None:
            self._open_feeder()
        else:
            self.feeder.fed = FedSamples()  # it opens when devices are freed, or not at all
        let_go(taken)

    async def _room_in_store(self, step: int) -> None:
        """Until there is room for a batch more."""
        if self._note_store():
            with self.parts.events.stage("wait_store", step) as note:
                while behind := self._note_store():
                    note.waiting_for = behind
                    await asyncio.sleep(SAMPLE_SECONDS)

    def _note_store(self) -> str:
        """What groups wait for before they start and batches before they train, "" if nothing; its begin is an alarm. Raises
        RunError where the store cannot be written."""
        before, behind = self.rollout.behind, self.parts.store.behind()
        self.rollout.behind = behind
        if behind and not before:
            self.parts.events.emit("alarm", what="store", detail=f"starts and training wait for {behind}")
        elif before and not behind:
            self.parts.events.emit("recovered", what="store", detail="there is room again")
            self.rollout.poke()
        return behind

    async def _hold(self, step: int, version: int) -> None:
        """The trainer holds its version, when the one before it is with the workers: one is under way at a time."""
        if self._settling is not None:
            with self.parts.events.stage("wait_weights", step) as note:
                note.waiting_for = f"weights of version {version - 1} to be with all workers"
                await self._end_settling()
        await self.weights.hold(version)

    def _open_feeder(self) -> None:
        """The trainer may be fed the batch that is being collected."""
        self.feeder.open(self.position.step, self.position.version)

    def _start_training(self, step: int, taken: list[Taken], batch: TrainBatch) -> None:
        self._trained = asyncio.get_running_loop().create_future()
        self._training_step, self._handed_over = step, ()
        self.rollout.begin_training([item.trajectory for item in taken])
        self._training = asyncio.create_task(self._train(step, taken, batch), name=f"train step {step}")

    async def _until_trained(self) -> None:
        """Until the step in progress is made and its version is published or on its way; its failure is the run's."""
        if self._training is not None and self._trained is not None:
            await asyncio.wait([self._training, self._trained], return_when=asyncio.FIRST_COMPLETED)
            if self._training.done():
                self._training.result()
                self._training = None

    async def _finish_training(self, *, early: bool = False) -> None:
        """Wait for all that the training step in progress does, or as :meth:`_until_trained`."""
        if self._training is not None:
            with self.parts.events.stage("wait_train", self.position.step) as note:
                note.waiting_for = "the training step in progress"
                await (self._until_trained() if early else asyncio.shield(self._training))
            if not early:
                self._training = None

    def _steps_training(self) -> int:
        """1 while a step is in training and not yet counted in the position."""
        return 1 if self._training is not None and self._training_step >= self.position.step else 0

    # -- before and after --------------------------------------------------------------------------------------------

    async def _prepare(self) -> None:
        """Publish the first weights, bring the workers to them, evaluate once; put a checkpoint's buffer back."""
        await self.weights.begin_publishing(self.position.step, self.position.version)
        await self._sync_weights(self.position.step)
        self.rollout.filters.recall(self.position.kept)
        if self.parts.timeouts is not None:
            self.parts.timeouts.restore(self.position.run_times)
        self.rollout.restore(list(self.position.buffered), self.position.version, self.position.environments)
        self.position.buffered = self.position.kept = ()  # they map files of a checkpoint that will be removed
        if self.position.step == 0:
            await self._evaluate("start")
            await self._checkpoint(self._run_state())
        if self.turns is None:
            self._open_feeder()

    async def _conclude(self) -> None:
        """The last step is trained; what is still under way is not needed any more."""
        self.rollout.close_starts()
        await self._settled()
        await self._finish_training()
        await self._settled()  # what the last step began
        await self._save_last()
        self.feeder.close()
        await self.feeder.idle()
        await self.rollout.end_members("aborted_redundant", "")
        self.rollout.buffer.drain("aborted_redundant", "")
        await self._sync_weights(self.position.step)
        await self._evaluate("end")

    async def _save_last(self) -> None:
        """The steps that were done are in a checkpoint, also where the run ends before the last that it was to do."""
        if self.position.step > self._saved_step:
            await self._checkpoint(self._run_state())
        await self._finish_saving()

    async def _save_in_grace(self) -> None:
        """Who asked the run to end loses no step. One that cannot be saved is a fault: a resume trains it again."""
        self.rollout.close_starts()
        if self._steps_training() or self.position.step > self._saved_step:
            limit = f"in {self._control.grace:g} s at most, or at once if asked again"
            self.parts.display.message(f"ends after the training step in progress and its checkpoint, {limit}")
        if why := await self._control.run_in_grace(self._end_between_steps()):
            detail = f"the steps since the last one are not saved: {why}"
            self.parts.events.emit("fault", what="checkpoint", cause="not saved", detail=detail[:300])
            self.parts.display.message(detail)

    async def _end_between_steps(self) -> None:
        await self._finish_training()
        self.feeder.close()
        await self.feeder.idle()
        if self.turns is not None:
            await self.turns.break_off()
        await self._save_last()

    async def _shut_down(self, helpers: list[asyncio.Task[None]]) -> None:
        self.rollout.close_starts()
        for helper in helpers:
            helper.cancel()
        await asyncio.gather(*helpers, return_exceptions=True)
        await self.rollout.end_members("failed", "interrupted")
        under_way = [task for task in (self._settling, self._training, self._saving) if task is not None]
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
        await self.weights.close()
        if self.rollout.forecasts is not None:
            await self.rollout.forecasts.close()
        await self.rollout.proxy.close()
        self.parts.store.flush()
        self.parts.ledger.check()

    async def _evaluate_if_due(self, step: int) -> None:
        every = self.settings.evaluate_every
        if every and step and step % every == 0 and step < self.settings.steps:
            await self._settled()
            await self._evaluate("mid")

    async def _evaluate(self, phase: str) -> None:
        """Play held-out prompts with the weights that the workers hold."""
        async with self._evaluating:
            await self._play_heldout(phase)

    async def _play_heldout(self, phase: str) -> None:
        version, count = self.rollout.proxy.version, self.settings.evaluation_prompts
        label = f"eval-{version}-{phase}"
        with self.parts.events.stage("evaluate", version):
            self.parts.display.stage("evaluate", f"{count} held-out prompts")
            result = await self._evaluator.evaluate(label)
        self.position.success_history.append((version, result.success))
        self.parts.events.emit("evaluation", step=version, version=version, phase=phase, **result.as_dict())

    def _run_state(self) -> CheckpointState:
        """What a resume from now on needs, but for the trainer's own state."""
        position = self.position
        return CheckpointState(
            position.step,
            position.version,
            self.parts.ledger.sequence,
            self.parts.events.time(),
            (*(taken.trajectory for taken in self._handed_over), *self.rollout.buffer.stored()),
            tuple(position.success_history),
            None if self.rollout.rounds is None else self.rollout.rounds.state(),
            self.parts.timeouts.state() if self.parts.timeouts is not None else {},
            None if self.replanner is None else self.replanner.state(),
            entropies=self._watch.entropies,
            redundancy=self.rollout.gate.redundancy if self.rollout.settings.dynamic_concurrency else None,
        )

    def _checkpoint_due(self, done: int) -> bool:
        """Whether one is to be written when so many steps are done."""
        every, seconds = self.settings.checkpoint_every, self.settings.checkpoint_seconds
        late = seconds > 0 and self.parts.events.time() - self._saved >= seconds
        return done == self.settings.steps or (every > 0 and done % every == 0) or late

    async def _checkpoint(self, state: CheckpointState) -> None:
        checkpoints = self.parts.checkpoints
        self._saved, self._saved_step = self.parts.events.time(), state.step
        if checkpoints is None:
            return
        with self.parts.events.stage("checkpoint", state.step):
            await self._finish_saving()
            partial = checkpoints.begin(state.step)
            await self._calls.final("save", self.parts.trainer.save(str(partial / "trainer")))
        self._saving = asyncio.create_task(self._commit(checkpoints, partial, state), name=f"save {state.step}")

    async def _commit(self, checkpoints: Checkpoints, partial: Path, state: CheckpointState) -> None:
        """Beside the steps that follow."""
        try:
            await self._calls.final("save", self.parts.trainer.saved(), beside=True)
        except CheckpointLost as error:
            detail = str(error)[:300]
            self.parts.events.emit("fault", what="checkpoint", cause="checkpoint lost", detail=detail)
            return
        await self.parts.store.flushed()
        await checkpoints.committed(partial, state)
        buffer = list(state.buffer)
        del state
        let_go(buffer)  # what has been trained since

    async def _finish_saving(self) -> None:
        """Until no checkpoint is being written; its failure is the run's."""
        if self._saving is not None:
            await asyncio.shield(self._saving)
            self._saving = None

    # -- control -----------------------------------------------------------------------------------------------------

    def stop(self, reason: str, grace: float = 0.0) -> None:
        """See :class:`RunControl`."""
        self._control.stop(reason, grace)

    def fail(self, error: BaseException) -> None:
        """See :class:`RunControl`."""
        self._control.fail(error)

    def _helper_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    def _time_is_up(self) -> bool:
        minutes = self.settings.minutes
        return minutes is not None and self.parts.events.time() >= minutes * 60

    def _done(self, step: int) -> float:
        """How much of the run is over, by its steps or by its time, whichever ends it first."""
        minutes = self.settings.minutes
        spent = 0.0 if minutes is None else self.parts.events.time() / (60 * minutes)
        return max(step / self.settings.steps, spent)

    # -- what it says ------------------------------------------------------------------------------------------------

    @property
    def waiting_for(self) -> str:
        """What the next batch waits for, in words."""
        wanted, have = self.settings.groups_per_step, self.rollout.buffer.ready_groups
        if self.parts.away is not None and (away := self.parts.away()):
            return away
        if self.rollout.behind:
            return self.rollout.behind
        if self.turns is not None and self.turns.colocation.waiting_for:
            return self.turns.colocation.waiting_for
        if self.rollout.proxy.waiting_for or self.weights.waiting_for:
            return self.rollout.proxy.waiting_for or self.weights.waiting_for
        if self._evaluator.waiting_for:
            return self._evaluator.waiting_for
        if self._calls.waiting_for and (have >= wanted or not self.rollout.open):
            return f"the trainer: {self._calls.waiting_for}"
        batch = self.rollout.buffer.waiting_for or f"{have} of {wanted} groups complete"
        return f"{batch}; {self.rollout.waits()}"

    async def _report_waiting(self) -> None:
        while True:
            await asyncio.sleep(SAMPLE_SECONDS)
            self._note_store()
            gpus = self.parts.gpus
            used = await gpus() if gpus is not None and self.rollout.in_flight else ()
            self._occupancy.sample(self.rollout.in_flight, self.rollout.proxy.loads(), used)
            if not self.parts.display.watched:
                continue
            self.parts.display.waiting(self.waiting_for)
            self.parts.display.update(
                in_flight=self.rollout.in_flight,
                buffered=self.rollout.buffer.scored,
                training=self._training is not None and not self._training.done(),
                ledger=self.parts.ledger.counts.as_dict(),
            )

    def _report_step(
        self, step: int, taken: list[Taken], batch: TrainBatch, metrics: TrainMetrics, begun: float
    ) -> None:
        rewards = [float(item.trajectory.reward or 0.0) for item in taken]
        reward = round(sum(rewards) / len(rewards), 6)
        success = round(sum(value > SOLVED for value in rewards) / len(rewards), 6)
        ledger, trajectories = self.parts.ledger.counts.as_dict(), [item.trajectory for item in taken]
        said = answer_figures(trajectories) | metric_means(trajectories)
        values = {**metrics.values, **said, **self.rollout.prompts.repeated_share()}
        lags = [batch.version - item.trajectory.first_version for item in taken]
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
            lag_trained=histogram(lags),
            weight_ess=round(effective_share([self._weight(item) for item in taken]), 6),
            versions_mixed=sum(len(item.trajectory.versions) > 1 for item in taken),
            seconds=round(self.parts.events.time() - begun, 6),
            fed=self.feeder.fed.samples,
            fed_seconds=self.feeder.fed.seconds,
            metrics=values,
            ledger=ledger,
        )
        if pool := self.rollout.environments.source.stats():
            self.parts.events.emit("environments", step=step, **pool)
        if self.parts.tools is not None:
            self.parts.events.emit("tools", step=step, tools=self.parts.tools())
        if self.parts.rewards is not None:
            self.parts.events.emit("rewards", step=step, **self.parts.rewards())
        self.parts.events.emit("occupancy", step=step, **self._occupancy.take(trajectories))
        for alarm in self._watch.check_step(step, values, success, sum(lags) / len(lags)):
            self._alarm(alarm)
        if not self._exhausted and (reason := self._watch.exhausted(self._done(step + 1), self.settings.signal_share)):
            self._exhausted = True
            self._alarm(reason)

    def _alarm(self, alarm: Alarm) -> None:
        self.parts.events.emit("alarm", what=alarm.what, detail=alarm.detail)
        self.parts.display.message(f"ALARM: {WORDS[alarm.what]}: {alarm.detail}")
