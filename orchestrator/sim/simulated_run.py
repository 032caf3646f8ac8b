"""A whole run in virtual time: the same Pipeline object, simulated parts, and a check of everything afterwards.

``simulate`` guarantees: same config, same bytes of events, in any process of the same Python build; a run that cannot
account for a trajectory, deadlocks, stands still, leaks a task or an environment, or breaks the staleness bound raises
:class:`SimulationFailed` with all that was found (or returns it, when asked to).

With ``sim.fault_rate`` above 0 the ready callbacks run in a seeded random order, ports fail
(:mod:`orchestrator.sim.fault_injector`), and the orchestrator itself is killed or interrupted now and then (fault
``crash``): a run is then a chain of *lives*, each of which resumes from the checkpoint, the journal and the store that
the one before it left. Later lives have fewer faults and the last has none, so that every run comes to its end.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.api import (
    ConfigError,
    ManagedWorker,
    Meeting,
    PublishResult,
    ResidentTrainer,
    RewardFunction,
    RunError,
    Task,
    TrainBatch,
    Trainer,
    TrainMetrics,
    TrainSample,
)
from orchestrator.build import build_environment_pool, build_pipeline
from orchestrator.components import Components, InMemory, Position, Shards
from orchestrator.config import Config, to_json
from orchestrator.environments.environment_pool import EnvPool
from orchestrator.events import EventLog
from orchestrator.ledger import Ledger, recount
from orchestrator.parallelism.planner_setup import check_placement_profile
from orchestrator.pipeline import Pipeline
from orchestrator.runtime.resume import rewind
from orchestrator.sim.coserving.borrowed_fleet import BorrowedFleet, borrowed_of, bounded
from orchestrator.sim.crash_remains import CrashRemains, EventSink, SimCheckpoints, SimStore
from orchestrator.sim.device_sharing import LendingResizableSimWorker, LendingSimWorker, ResidentSimTrainer
from orchestrator.sim.fault_injector import (
    FaultInjector,
    FaultyReward,
    FaultyShards,
    FaultyTask,
    FaultyTools,
    FaultyTrainer,
    faulty_workers,
)
from orchestrator.sim.recorded_traces import EpisodeTraces, load_traces
from orchestrator.sim.resizable_worker import check_planner, cutter_of, hand_over, resizable, seat_workers
from orchestrator.sim.run_audit import RunAudit, TrainerCallAudit
from orchestrator.sim.seeded_draws import random_stream
from orchestrator.sim.simulated_cluster import check_cluster, check_disaggregation, fleet
from orchestrator.sim.simulated_forecasts import equip
from orchestrator.sim.simulated_shards import SimShards
from orchestrator.sim.simulated_speech import speech_of
from orchestrator.sim.simulated_worker import SimWeights, SimWorker, TurnMoves, Watch
from orchestrator.sim.trace_files import DrawnTimes, read_lengths, read_tools
from orchestrator.sim.twins import SimDisplay, SimReward, SimTask, SimTrainer
from orchestrator.sim.virtual_loop import SimulationError, VirtualTimeLoop, rare_collections
from orchestrator.tail_batching import Rounds

FAULTY_LIVES = 4  # after so many lives the orchestrator and the trainer fail no more, after twice as many nothing does
KILL_CHANCE = 0.5  # that such a life is ended from outside: by kill -9 or by a polite stop
DAMAGE_CHANCE = 0.15  # that a resume finds its newest checkpoint damaged
STANDSTILL = 3600.0  # virtual seconds without event, journal line or generated token that count as standing still
MAX_CALLBACKS = 20_000_000  # of one faulty life
_MEMORY_DISK = Path("/dev/shm")  # checkpoints are synced to disk, which in a simulation costs time and proves nothing
EXPECTED_ERRORS = (  # of faults
    "the trainer failed in",
    "no rollout worker left",
    "no rollout shard left",
    "no environment can be started",
)


class SimulationFailed(SimulationError, RunError):
    """The run under test did something wrong (for a command line: exit code 1). ``result`` has all of it."""

    def __init__(self, result: SimResult) -> None:
        super().__init__("\n".join((f"{len(result.violations)} violation(s):", *result.violations)))
        self.result = result


class StandstillError(SimulationError):
    """Timers still fire, but nothing happens any more."""


@dataclass
class SimResult:
    """What a simulated run leaves. ``events`` and ``journal`` are the JSONL logs."""

    summary: dict[str, Any]
    events: bytes
    journal: bytes
    ledger: dict[str, Any]
    violations: list[str] = field(default_factory=list)
    unaccounted: int = 0  # trajectories of which nobody can say what became of them
    deadlocks: int = 0  # deadlocks, runaways and standstills
    lives: int = 1
    injected: dict[str, int] = field(default_factory=dict)  # "kind where" -> how often


class _AuditedTrainer:
    """The outermost layer around the trainer: the audit sees what the pipeline asks for, and learns of a new version when
    the pipeline does."""

    def __init__(self, inner: Trainer, audit: RunAudit) -> None:
        self._audit = audit
        self._inner = inner
        self._asks = TrainerCallAudit(audit)
        self._version = -1  # of the last step, -1: none yet
        if isinstance(inner, ResidentTrainer):
            self.residency = inner.residency
        self.save, self.saved = inner.save, inner.saved
        self.load = inner.load
        self.close = inner.close

    async def feed(self, samples: Sequence[TrainSample], version: int) -> None:
        with self._asks.feeding(samples, version):
            await self._inner.feed(samples, version)

    async def train_step(self, batch: TrainBatch) -> TrainMetrics:
        with self._asks.training(batch):
            metrics = await self._inner.train_step(batch)
        self._version = metrics.version
        return metrics

    async def publish(self) -> PublishResult:
        result = await self._inner.publish()
        self._audit.record_version(result.version)
        return result

    async def hold(self) -> None:
        """See :class:`orchestrator.api.HoldingTrainer`: the pipeline goes on with the version while it is published."""
        inner: Any = self._inner
        await inner.hold()
        if self._version >= 0:
            self._audit.record_version(self._version)

    async def publish_held(self) -> PublishResult:
        """See :class:`orchestrator.api.HoldingTrainer`."""
        inner: Any = self._inner
        result: PublishResult = await inner.publish_held()
        return result

    async def send(self, receivers: int, limit: float, anew: bool) -> tuple[Meeting, ...]:
        """See :class:`orchestrator.api.CollectiveTrainer`: the pipeline goes on with the version while it is published."""
        inner: Any = self._inner
        meetings: tuple[Meeting, ...] = await inner.send(receivers, limit, anew)
        if self._version >= 0:
            self._audit.record_version(self._version)
        return meetings


class _Simulation:
    """One run, over all its lives."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        sink: Callable[[str], object] | None,
        traces: EpisodeTraces | None,
        watch: Watch | None,
    ) -> None:
        self._watch_requests = watch
        self.config = config
        self.folder = folder
        self.traces = _recorded(config) if config.sim.trace else traces
        self._speech = speech_of(config, self.traces)
        self.audit = RunAudit(config, self._speech)
        self.remains = CrashRemains(self.audit)
        self.injected: dict[str, int] = {}
        self.deadlocks = 0
        self.life = 0
        self.callbacks = 0
        self.reason = ""
        self._sink = sink
        self._faulty = config.sim.fault_rate > 0
        self._ledger: Ledger | None = None
        self._rounds: Rounds | None = None  # of the last life
        self._task = SimTask(config, self.traces)
        self._pool: EnvPool | None = None
        self._shards: SimShards | None = None
        self._workers: list[SimWorker] = []
        self._borrowed: BorrowedFleet | None = None

    def run(self) -> SimResult:
        """All lives, then the last checks."""
        while True:
            again = self._live()
            self.life += 1
            if not again:
                break
        assert self._ledger is not None
        lines = self.remains.lines()
        ledger = self._ledger.counts.as_dict()
        self.audit.check_end(
            ledger,
            recount(lines),
            ((name, outcome) for name, _, outcome in self.remains.rows),
            completed=self.reason == "completed",
            resumed=self.life > 1,
        )
        if self._rounds is not None:
            self.audit.check_epochs(lines, self._rounds.planner)
        violations = list(self.audit.violations)
        if self.audit.count > len(violations):
            violations.append(f"... and {self.audit.count - len(violations)} more")
        return SimResult(
            self._summary(ledger),
            "".join(self.remains.events).encode(),
            "".join(self.remains.journal).encode(),
            ledger,
            violations,
            len(self.audit.unaccounted),
            self.deadlocks,
            self.life,
            dict(sorted(self.injected.items())),
        )

    def _live(self) -> bool:
        """One life of the orchestrator's process. Returns whether another one follows."""
        seed = f"{self.config.run.seed}/{self.life}"
        loop = VirtualTimeLoop(
            seed=seed, shuffle=self._faulty, max_callbacks=MAX_CALLBACKS if self._faulty else 1 << 40
        )
        again = False
        try:
            main = loop.create_task(self._main(loop), name="main")
            loop.run_until_complete(asyncio.wait([main]))
            again = self._conclude(main)
        except SimulationError as error:
            self._fatal(error)
        finally:
            try:
                report = loop.finish()
            except SimulationError as error:
                self._fatal(error)
            else:
                self.callbacks += report.callbacks
                if not self.remains.dead:
                    for what in (*report.leaked, *report.unhandled):
                        self.audit.add_violation(f"life {self.life} left behind: {what}")
                    if self._task.open_environments:
                        self.audit.add_violation(
                            f"life {self.life} left {self._task.open_environments} environments open"
                        )
        return again

    def _conclude(self, main: asyncio.Task[str]) -> bool:
        if self.remains.dead:
            if not main.cancelled():
                main.exception()  # whatever a dead process raised, nobody saw it
            return True
        if main.cancelled():
            self.audit.add_violation(f"life {self.life} was cancelled by nobody")
            return False
        error = main.exception()
        if error is None:
            self.reason = main.result()
            return self.reason != "completed"
        if isinstance(error, SimulationError):
            self._fatal(error)
            return False
        expected = isinstance(error, RunError) and str(error).startswith(EXPECTED_ERRORS)
        if self._faulty and expected and self.life < 2 * FAULTY_LIVES:
            return True
        self.audit.add_violation(f"life {self.life} ended with {type(error).__name__}: {error}")
        self.reason = str(error)
        return False

    def _fatal(self, error: SimulationError) -> None:
        self.deadlocks += 1
        self.audit.add_violation(f"life {self.life}: {type(error).__name__}: {error}")
        self.reason = type(error).__name__

    async def _main(self, loop: VirtualTimeLoop) -> str:
        """A life: put the parts together as :mod:`orchestrator.runtime.real_run` does, and run the pipeline."""
        config = self.config
        task = asyncio.current_task()
        assert task is not None
        rng = random_stream(config.run.seed, "kill", self.life)
        style = self._draw_end(rng)
        after = rng.randrange(1, 12 * config.batch_trajectories) if style == "kill" else -1
        self.audit.begin_life()
        self.remains.begin_life(after, rng, task.cancel)
        last = max((json.loads(line)["t"] for line in self.remains.events[-20:] if line.strip()), default=0.0)
        events = EventLog(EventSink(self.remains, self._sink), loop.time, last)
        ledger = self._ledger = Ledger(self.remains, events.time)
        try:
            parts, position = await self._start(events, ledger)
        except BaseException:
            if self._pool is not None:
                await self._pool.close()
            raise
        self.audit.end_replay()
        pipeline = build_pipeline(config, parts, position)
        self._rounds = pipeline.rollout.rounds
        if style == "stop":
            loop.call_later(rng.expovariate(1.0 / 30.0), pipeline.stop, "interrupted")
        watch = loop.create_task(self._watch(task, pipeline), name="standstill watch")
        status, reason = "failed", ""
        try:
            reason = await pipeline.run()
            status = "completed" if reason == "completed" else "interrupted"
        except asyncio.CancelledError:
            if watch.done() and not watch.cancelled():
                watch.result()  # it was the watch that cancelled us: say why
            raise
        except RunError as error:
            reason = str(error)
            raise
        finally:
            watch.cancel()
            events.emit("run_end", status=status, reason=reason, ledger=ledger.counts.as_dict())
            if self._shards is not None:
                await self._shards.close()
            if self._pool is not None:
                await self._pool.close()
            if self._borrowed is not None:
                self._borrowed.close()
            for worker in self._workers:
                await worker.close()
            await parts.trainer.close()
        return reason

    def _draw_end(self, rng: Any) -> str:
        """How this life ends from outside: "kill", "stop", or "" for not at all."""
        if not self._faulty or "crash" not in self.config.sim.faults or self.life >= FAULTY_LIVES:
            return ""
        if rng.random() >= KILL_CHANCE:
            return ""
        return str(rng.choice(("kill", "kill", "stop")))

    async def _start(self, events: EventLog, ledger: Ledger) -> tuple[Components, Position]:
        config, weights = self.config, SimWeights()
        store = SimStore(self.remains)
        checkpoints = SimCheckpoints(self.folder / "checkpoints", config.checkpoint.keep, self.remains)
        lends = config.rollout.colocation.enabled
        trainer = (ResidentSimTrainer if lends else SimTrainer)(config, weights, self.audit)
        position, resumed_from = Position(), None
        if self.life == 0:
            checkpoints.drop_after(-1)  # of another run in this folder
        else:
            self._damage(checkpoints, events)
            resumed = rewind(checkpoints, ledger, self.remains, store, self.life)
            position, resumed_from = resumed.position, resumed.step
            if resumed.checkpoint is not None:
                await trainer.load(str(resumed.checkpoint / "trainer"))
            else:
                self.audit.roll_back({})
        events.emit(
            "run_start",
            mode=config.run.mode,
            alpha=config.rollout.alpha,
            steps=config.run.steps,
            name=config.run.name,
            simulated=True,
            resumed_from=resumed_from,
        )
        self._task = SimTask(config, self.traces)
        cutter = cutter_of(config, self._task, position.degrees)
        make: Callable[..., SimWorker] = LendingSimWorker if lends else SimWorker
        if cutter is not None:
            make = resizable(config, cutter, LendingResizableSimWorker if lends else None)
        rest, moves = (self.audit.record_response, self.traces), TurnMoves()
        self._workers = [
            make(f"sim-{index}", config, weights, *rest, name, self._speech, moves)
            for index, name in enumerate(fleet(config))
        ]
        if (borrowed := borrowed_of(config)) is not None:
            self._workers += borrowed.workers(len(self._workers), weights, *rest, self._speech, moves)
            borrowed.start()
        self._borrowed = borrowed
        seat_workers(self._workers, cutter, self._watch_requests)
        task: Task = self._task
        reward: RewardFunction = SimReward(config, self.traces)
        workers: list[ManagedWorker] = list(self._workers)
        audited: Trainer = trainer
        shards: Shards = InMemory()
        faults: FaultInjector | None = None
        if self._faulty and self.life < 2 * FAULTY_LIVES:
            faults = FaultInjector(config, events, self.life, self.injected)
            self._task.tools = FaultyTools(self._task.tools, faults)
            task, reward, workers = (
                FaultyTask(task, faults),
                FaultyReward(reward, faults),
                faulty_workers(self._workers, faults),
            )
            if self.life < FAULTY_LIVES:
                audited = FaultyTrainer(trainer, faults)
            if "lose" in config.sim.faults:
                shards = FaultyShards(config, faults, self.life)
        self._pool = pool = build_environment_pool(config, task, f"sim-{self.life}", events)
        if pool is not None:
            await pool.open()
        audited = _AuditedTrainer(audited, self.audit)
        market = borrowed.market if borrowed is not None else None
        workers = workers if market is None else market.open(workers)
        keeps = checkpoints if self._faulty else None
        parts = Components(task, workers, audited, reward, events, ledger, store, SimDisplay(False), keeps, pool)
        parts.market, parts.shards = market, shards
        self._shards = None
        if config.rollout.shards > 1:
            faults = faults if self.life < FAULTY_LIVES else None
            self._shards = SimShards(config, task, reward, pool, faults, self.life)
            parts.managers = self._shards.parts
        equip(parts, config, self._workers)
        hand_over(parts, cutter)
        return parts, position

    def _damage(self, checkpoints: SimCheckpoints, events: EventLog) -> None:
        """Now and then the newest checkpoint is found damaged, and the one before it has to do."""
        folders = checkpoints.all()
        rng = random_stream(self.config.run.seed, "damage", self.life)
        if len(folders) < 2 or "crash" not in self.config.sim.faults or rng.random() >= DAMAGE_CHANCE:
            return
        file = folders[-1] / rng.choice(("state.json", "files.json", "trainer/trainer.json"))
        content = file.read_bytes()
        file.write_bytes(content[: rng.randrange(len(content))])
        self.injected["crash checkpoint"] = self.injected.get("crash checkpoint", 0) + 1
        events.emit("injected", what="crash", where="checkpoint")

    async def _watch(self, main: asyncio.Task[Any], pipeline: Pipeline) -> None:
        """Cancel the run when nothing happens any more though timers still fire."""
        rollout = self.config.rollout
        patience = STANDSTILL + 10 * max(rollout.trajectory_timeout, rollout.stall_timeout, rollout.restart_timeout)
        before = -1
        while True:
            await asyncio.sleep(patience)
            now = len(self.remains.events) + len(self.remains.journal) + sum(w.generated for w in self._workers)
            if now == before:
                loop = asyncio.get_running_loop()
                assert isinstance(loop, VirtualTimeLoop)
                main.cancel()
                raise StandstillError(
                    f"nothing has happened for {patience:.0f} virtual seconds; the pipeline waits for "
                    f"{pipeline.waiting_for!r}; {loop.describe_tasks()}"
                )
            before = now

    def _summary(self, ledger: dict[str, Any]) -> dict[str, Any]:
        events = [json.loads(line) for line in self.remains.events if line.strip()]
        steps = {event["step"]: event for event in events if event["kind"] == "step"}  # the last life's, by step
        scores = [event for event in events if event["kind"] == "evaluation"]
        tokens = sum(event["tokens"] for event in steps.values())
        elapsed = max((float(event["t"]) for event in events), default=0.0)
        staleness: dict[str, int] = {}
        for event in steps.values():
            for lag, count in event["lag"].items():
                staleness[lag] = staleness.get(lag, 0) + count
        kept = self.traces is not None and self.config.context.strategy == "keep"  # else contexts start over
        cut = self.traces.longer_than(self.config.rollout.engine.max_model_len) if self.traces and kept else 0
        more = {"borrowed": self._borrowed and self._borrowed.report(elapsed), "episodes_beyond_context": cut}
        return {
            "simulated": True,
            "name": self.config.run.name,
            "mode": self.config.run.mode,
            "seed": self.config.run.seed,
            "steps": len(steps),
            "reason": self.reason,
            "seconds": round(elapsed, 6),
            "seconds_per_step": round(elapsed / len(steps), 6) if steps else None,
            "success_start": _score(scores, "start"),
            "success_end": _score(scores, "end"),
            "tokens": tokens,
            "tokens_per_s": round(tokens / elapsed, 3) if elapsed else 0.0,
            "staleness": dict(sorted(staleness.items())),
            "ledger": ledger,
            "lives": self.life,
            "injected": sum(self.injected.values()),
            "callbacks": self.callbacks,
        } | {name: value for name, value in more.items() if value}


def _recorded(config: Config) -> EpisodeTraces:
    """What ``sim.trace`` names: a run, or a file of lengths."""
    sim = config.sim
    if not Path(sim.trace).is_file():
        if sim.tool_trace:
            fix = "is for a file of lengths: a run is replayed with its own times"
            raise ConfigError("sim.tool_trace", sim.tool_trace, fix)
        if not Path(sim.trace).exists():
            raise ConfigError("sim.trace", sim.trace, "does not exist: name a file of lengths, or the folder of a run")
        found = load_traces(sim.trace, sim.trace_rows)
        return _fitting(config, found.spread() if sim.trace_spread else found)
    tools = read_tools(sim.tool_trace) if sim.tool_trace else None
    times = DrawnTimes(config.run.seed, sim.environment_seconds_mean, sim.environment_seconds_sigma, tools)
    return _fitting(config, read_lengths(sim.trace, sim.trace_rows, config.rollout.group_size, times))


def _fitting(config: Config, traces: EpisodeTraces) -> EpisodeTraces:
    """These, in simulated tokens. Raises ConfigError where an engine has no room for one's first observation: all that were left
    would be shorter."""
    traces = traces.in_grains(config.sim.grain)
    room, first = config.rollout.engine.max_model_len, [one.turns[0].observation for one in traces.episodes]
    if beyond := sum(length >= room for length in first):
        fix = (
            f"{beyond} of the {len(first)} episodes of {config.sim.trace} begin with as many tokens or more; the longest "
            f"beginning has {max(first)}: set it above that, and let the answer find room too"
        )
        raise ConfigError("rollout.engine.max_model_len", room, fix)
    return traces


def _score(scores: list[dict[str, Any]], phase: str) -> float | None:
    """As reports show it: the newest evaluation of a phase."""
    found = [event for event in scores if event["phase"] == phase]
    return float(found[-1]["success"]) if found else None


def simulate(
    config: Config,
    folder: str | Path | None = None,
    events_sink: Callable[[str], object] | None = None,
    *,
    strict: bool = True,
    traces: EpisodeTraces | None = None,
    watch: Watch | None = None,
) -> SimResult:
    """Run ``config`` in virtual time. ``folder``: where config, logs and summary are kept, and the checkpoints of a run
    with faults (one without needs none); ``events_sink`` sees each line of the event log; ``strict``: raise SimulationFailed
    when anything is wrong; ``traces``: episodes to play where ``sim.trace`` names none; ``watch`` is shown each request that
    ended in a worker. Raises ConfigError for what needs servers or processes."""
    check_cluster(config)
    check_planner(config)
    check_disaggregation(config)
    check_placement_profile(config.rollout)
    cutter_of(config, SimTask(config))
    borrowed_of(config)
    if folder is not None:
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        with rare_collections():
            result = _Simulation(bounded(config), path, events_sink, traces, watch).run()
        (path / "config.json").write_text(to_json(config) + "\n", encoding="utf-8")
        (path / "events.jsonl").write_bytes(result.events)
        (path / "ledger.jsonl").write_bytes(result.journal)
        (path / "summary.json").write_text(
            json.dumps(result.summary, indent=2, sort_keys=True) + "\n", encoding="utf-8"
        )
    else:
        memory = str(_MEMORY_DISK) if os.access(_MEMORY_DISK, os.W_OK) else None
        with tempfile.TemporaryDirectory(prefix="rl-coserve-sim-", dir=memory) as temporary, rare_collections():
            result = _Simulation(bounded(config), Path(temporary), events_sink, traces, watch).run()
    if strict and result.violations:
        raise SimulationFailed(result)
    return result
