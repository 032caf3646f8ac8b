"""Trajectories that a committed checkpoint saw and that nobody accounts for after the power failed (must be 0).

Simulated power, real files: small runs of the production loop, journal, log, store and checkpoints, with simulated
engines, in virtual time; killed, resumed, and recorded at Python's layer of files (:mod:`scripts.bench.micro.file_trace`). At
an operation of the trace the power fails: what was not synced is lost, torn or reordered
(:mod:`scripts.bench.micro.crash_states`), and the run is resumed from that and played to its end. Then each trajectory that
the newest committed checkpoint saw is in the journal, ended once, and in the store as often as it was trained; what the
checkpoint's buffer held was not played again; no id stands for two. A run that refuses to resume accounts for none.

States are dealt over the kinds of file and operation, at least 20 each. The controls drop one sync, of the ledger for
example, and must lose some. ``python -m scripts.bench.micro.power_cuts FOLDER --seconds N`` takes as many states as fit, keeps
them in FOLDER, and goes on there the next time; ``--quick``: 40 states and the control.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

from orchestrator.api import ConfigError, ManagedWorker, RunError, TrainBatch
from orchestrator.build import build_pipeline
from orchestrator.checkpoint import Checkpoints, CheckpointState, write_checkpoint
from orchestrator.components import Components, Position
from orchestrator.config import Config, parse_config
from orchestrator.ledger import END_STATES, recount
from orchestrator.run_folder import RunFolder
from orchestrator.runtime import run_records
from orchestrator.runtime.run_records import RunRecords
from orchestrator.sim.run_audit import RunAudit
from orchestrator.sim.seeded_draws import random_stream
from orchestrator.sim.simulated_worker import SimWeights, SimWorker
from orchestrator.sim.twins import SimDisplay, SimReward, SimTask, SimTrainer
from orchestrator.sim.virtual_loop import VirtualTimeLoop
from orchestrator.store import TrajectoryStore, read_trajectories, write_part
from scripts.bench.micro.crash_states import Disk, Dropped
from scripts.bench.micro.file_trace import Operation, Trace, recorded
from scripts.bench.result import frame, now

NAME = "power-cuts"
_STATES, _QUICK_STATES = 2000, 40
_EACH = 20  # states of each kind of file and operation, at least
_TRACES, _QUICK_TRACES = 10, 2
_CONTROL_STATES, _QUICK_CONTROL_STATES = 100, 12
_CHUNK = 50  # states that are kept together
_STARTED = datetime(2026, 1, 1, tzinfo=UTC)
_MEMORY_DISK = "/dev/shm"
_Kind = tuple[str, str]  # of file, of operation

CONTROLS = {
    "the ledger's": lambda one: one.path.endswith("ledger.jsonl"),
    "the checkpoint files'": lambda one: "/.partial-" in one.path and not one.path.endswith((".partial", "trainer")),
    "the folder of checkpoints'": lambda one: one.path.endswith("checkpoints"),
    "the store files'": lambda one: one.path.endswith(".parquet.partial"),
}


@dataclass(frozen=True)
class Committed:
    """A checkpoint that the run was told is on disk."""

    step: int
    sequence: int
    buffered: tuple[str, ...]


@dataclass(frozen=True)
class Life:
    """One that came to its end, and where it had begun: ``step`` done, so many ``trajectories`` in the journal."""

    records: RunRecords
    step: int
    trajectories: int
    buffered: frozenset[str]


@dataclass
class Tally:
    """What some states added up to. ``lost``: trajectories; ``wrong``: in words, the first few."""

    states: int = 0
    resumed: int = 0  # the others had no checkpoint yet, or were refused
    refused: int = 0  # though a checkpoint was committed
    early: int = 0  # refused before one was
    seen: int = 0  # trajectories, by committed checkpoints
    lost: int = 0
    wrong: list[str] = field(default_factory=list)
    kinds: dict[str, int] = field(default_factory=dict)
    repairs: dict[str, int] = field(default_factory=dict)

    def add(self, other: Tally) -> None:
        """Sum up."""
        for name in ("states", "resumed", "refused", "early", "seen", "lost"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.wrong = (self.wrong + other.wrong)[:20]
        self.kinds = dict(Counter(self.kinds) + Counter(other.kinds))
        self.repairs = dict(Counter(self.repairs) + Counter(other.repairs))


class _NoAudit:
    """For the trainer's twin."""

    trained_ids: tuple[str, ...] = ()

    def check_batch(self, batch: TrainBatch, version: int) -> None:
        """Nothing."""

    def record_training(self, batch: TrainBatch) -> None:
        """Nothing."""

    def roll_back(self, trained: dict[str, int]) -> None:
        """Nothing."""


class InlineWriter:
    """What the writer's process does, in this one, whose operations are recorded."""

    write_part = staticmethod(write_part)
    write_checkpoint = staticmethod(write_checkpoint)

    def __init__(self, log: Path) -> None:
        """Nothing is printed."""

    def close(self) -> None:
        """Nothing to end."""


class _InlineStore(TrajectoryStore):
    """Without a thread, which has no virtual time."""

    async def flushed(self) -> None:
        """See TrajectoryStore."""
        self.flush()


class _Marking(Checkpoints):
    """Without a thread; says in the trace what was committed."""

    trace: Trace | None = None

    def commit(self, partial: Path, state: CheckpointState) -> Path:
        """See Checkpoints."""
        final = super().commit(partial, state)
        if self.trace is not None:
            held = tuple(one.id for one in state.buffer)
            self.trace.mark(Committed(state.step, state.journal_sequence, held))
        return final


def config_of(seed: int, folder: str) -> Config:
    """A small run, whose groups outlive checkpoints."""
    rng = random_stream(seed, "power cuts")
    return parse_config(
        {
            "run": {"name": "cut", "folder": folder, "seed": seed, "steps": 4, "sync_seconds": 3600.0},
            "rollout": {
                "workers": 1,
                "environments": rng.choice((4, 6, 8)),
                "alpha": rng.choice((1, 2)),
                "group_size": 2,
                "groups_per_step": rng.choice((1, 2)),
                "dynamic_sampling": rng.random() < 0.5,
                "max_filtered_groups": 2,
            },
            "evaluation": {"prompts": 1},
            "checkpoint": {"every": rng.choice((1, 1, 2)), "keep": rng.choice((1, 2))},
            "sim": {"turns_max": 2, "response_tokens_mean": 5.0, "response_tokens_max": 16},
        }
    )


async def _play(folder: RunFolder, config: Config, resume: bool, trace: Trace | None, rng: random.Random) -> Life:
    """One life, to its end; the logs are synced now and then, as the thread of a real run does."""
    loop = asyncio.get_running_loop()
    with patch.object(run_records, "RecordWriter", InlineWriter):
        records = RunRecords.open(
            folder, config, loop.time, _STARTED, resume=resume, make_checkpoints=_Marking, make_store=_InlineStore
        )
    with records:
        cast(_Marking, records.checkpoints).trace = trace
        weights = SimWeights()
        trainer = SimTrainer(config, weights, cast(RunAudit, _NoAudit()))
        position = Position()
        if records.resumed is not None:
            position = records.resumed.position
            if records.resumed.checkpoint is not None:
                await trainer.load(str(records.resumed.checkpoint / "trainer"))
        begun = (position.step, position.trajectories, frozenset(one.id for one in position.buffered))
        workers: list[ManagedWorker] = [
            SimWorker(f"sim-{index}", config, weights) for index in range(config.rollout.workers)
        ]
        parts = Components(
            SimTask(config), workers, trainer, SimReward(config), records.events, records.ledger, records.store,
            SimDisplay(False), records.checkpoints,
        )  # fmt: skip
        parts.shards = records.shards
        pipeline = build_pipeline(config, parts, position)
        commits = loop.create_task(_group_commits(records, rng), name="group commits")
        try:
            await pipeline.run()
        finally:
            commits.cancel()
            for worker in workers:
                await worker.close()
            await trainer.close()
    return Life(records, *begun)


async def _group_commits(records: RunRecords, rng: random.Random) -> None:
    while True:
        await asyncio.sleep(rng.expovariate(0.5))
        for file in records.journals:
            file.sync()


def play(folder: RunFolder, config: Config, resume: bool, trace: Trace | None, seed: str) -> Life:
    """One life, in virtual time. Raises what ends a run."""
    loop = VirtualTimeLoop(seed=seed)
    try:
        return loop.run_until_complete(_play(folder, config, resume, trace, random.Random(seed)))
    finally:
        loop.finish()


def record(seed: int) -> list[Operation]:
    """Two lives of a run: the first is killed at some operation of its second half, the second comes to its end. Paths begin
    with the name of the run folder."""
    with _scratch() as scratch:
        root = Path(scratch) / "runs"
        root.mkdir()
        config = config_of(seed, str(root))
        with recorded(root) as trace:
            folder = RunFolder.create(config)
            play(folder, config, False, trace, f"{seed}/0")
            folder.unlock()
        first = trace.operations
        first = first[: random_stream(seed, "killed").randrange(len(first) // 2, len(first))]
    with _scratch() as scratch:
        root = Path(scratch) / "runs"
        root.mkdir()
        Disk(first).whole(root)
        with recorded(root) as trace:
            folder = RunFolder.open(root / f"{config.run.name}-001")
            folder.lock()
            play(folder, config, True, trace, f"{seed}/1")
            folder.unlock()
    return first + trace.operations


def _scratch() -> tempfile.TemporaryDirectory[str]:
    memory = _MEMORY_DISK if os.access(_MEMORY_DISK, os.W_OK) else None
    return tempfile.TemporaryDirectory(prefix="rl-coserve-power-", dir=memory)


def kind_of(operation: Operation) -> _Kind:
    """What file, what operation."""
    path = operation.to or operation.path
    name = path.rpartition("/")[2]
    if operation.kind in ("mkdir", "rmdir") or (operation.kind == "sync" and _is_folder(name)):
        return "folder", operation.kind
    if path.endswith((".parquet", ".parquet.partial")):
        return "store", operation.kind
    if operation.kind == "rename" and name.startswith("step-"):
        return "checkpoint", "rename"
    if "/checkpoints/" in path:
        return f"checkpoint's {name}", operation.kind
    return name.removeprefix(".").removesuffix(".partial"), operation.kind


def _is_folder(name: str) -> bool:
    return name in (".", "checkpoints", "trainer", "trajectories", "cut-001") or name.startswith(
        (".partial-", "step-", "task=", "date=", "version=", "_rolled_back")
    )


@dataclass
class Cut:
    """The power fails at operation ``at`` of trace ``seed``."""

    seed: int
    at: int
    kind: _Kind


def deal(traces: dict[int, list[Operation]], states: int, rng: random.Random, each: int = _EACH) -> list[Cut]:
    """So many moments: ``each`` of each kind of file and operation, as far as there is room, the rest anywhere."""
    by_kind: dict[_Kind, list[Cut]] = {}
    for seed, operations in traces.items():
        for at, operation in enumerate(operations):
            if operation.kind != "mark":
                kind = kind_of(operation)
                by_kind.setdefault(kind, []).append(Cut(seed, at, kind))
    every = [cut for cuts in by_kind.values() for cut in cuts]
    each = max(1, min(each, states // len(by_kind)))
    dealt = [rng.choice(by_kind[kind]) for kind in sorted(by_kind) for _ in range(each)][:states]
    dealt += [rng.choice(every) for _ in range(states - len(dealt))]
    rng.shuffle(dealt)
    return dealt


def try_cut(cut: Cut, operations: Sequence[Operation], rng: random.Random, dropped: Dropped | None = None) -> Tally:
    """One state: build it, resume, play on, look at what there is."""
    tally = Tally(states=1, kinds={" ".join(cut.kind): 1})
    end = cut.at + rng.randrange(2)  # before it, or after
    before = [one for one in operations[:end] if one.kind != "mark"]
    marks = [one.mark for one in operations[:end] if one.kind == "mark"]
    committed: Committed | None = marks[-1] if marks else None
    disk = Disk(before, dropped or (lambda _: False))
    journal = disk.content("cut-001/ledger.jsonl").decode().splitlines()
    started = {json.loads(line)["id"] for line in journal if line.endswith("}")}
    seen = [json.loads(line) for line in journal[: committed.sequence if committed else 0]]
    ids = list(dict.fromkeys(line["id"] for line in seen))
    tally.seen = len(ids)
    with _scratch() as scratch:
        root = Path(scratch) / "runs"
        root.mkdir()
        disk.cut(rng, root)
        try:
            folder = RunFolder.open(root / "cut-001")
            folder.lock()
            try:
                life = play(folder, folder.config(), True, None, f"{cut.seed}/{cut.at}")
            finally:
                folder.unlock()
        except (ConfigError, RunError) as error:
            if committed is None:
                tally.early = 1
            else:
                tally.refused, tally.lost = 1, len(ids)
                tally.wrong.append(f"{_words(cut)}: refused: {error}"[:400])
            return tally
        except Exception as error:  # noqa: BLE001 -- whatever it is, it is a finding
            tally.lost = len(ids)
            tally.wrong.append(f"{_words(cut)}: {type(error).__name__}: {error}"[:400])
            return tally
        tally.resumed = 1
        tally.repairs = dict(
            Counter(" ".join(word for word in text.split() if word.isalpha())[:60] for text in life.records.repairs)
        )
        lost, wrong = find_faults(folder, life, committed, ids, started)
    tally.lost += len(lost)
    tally.wrong += [f"{_words(cut)}: {text}"[:400] for text in wrong]
    return tally


def _words(cut: Cut) -> str:
    return f"trace {cut.seed}, operation {cut.at} ({' '.join(cut.kind)})"


def find_faults(
    folder: RunFolder, life: Life, committed: Committed | None, ids: list[str], started: set[str]
) -> tuple[set[str], list[str]]:
    """Those lost of the ``ids`` that the checkpoint saw, and all that is wrong, in words. ``started``: all ids before."""
    lines = folder.lines(folder.ledger_file)
    history: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        one = json.loads(line)
        history.setdefault(one["id"], []).append(one)
    lost, wrong = {name for name in ids if name not in history}, []
    if recount(lines) != life.records.ledger.counts.as_dict():
        wrong.append("the journal, recounted, does not agree with the ledger")
    if committed is not None and life.step < committed.step:
        wrong.append(f"resumed at step {life.step}, {committed.step} was committed")
        lost.update(ids)
    lost |= {name for name in ids if name in history and history[name][-1]["state"] not in END_STATES}
    if committed is not None and life.step == committed.step:
        for name in committed.buffered:
            last = history.get(name, [{}])[-1]
            if name not in life.buffered and last.get("cause") in ("interrupted", "rolled_back"):
                lost.add(name)
    rows = read_trajectories(folder.trajectories, columns=["trajectory_id", "outcome", "step"]).to_pylist()
    stored = Counter((row["trajectory_id"], row["outcome"] == "trained") for row in rows)
    trained = {name for name, told in history.items() if told[-1]["state"] == "trained"}
    lost |= {name for name in ids if name in trained and stored[name, True] != 1}
    twice = [name for (name, _), count in stored.items() if count > 1]
    unknown = [row["trajectory_id"] for row in rows if row["trajectory_id"] not in history]
    untrained = [
        row["trajectory_id"] for row in rows if row["outcome"] == "trained" and row["trajectory_id"] not in trained
    ]
    untold = [name for name in trained if stored[name, True] != 1]
    new = list(history)[life.trajectories :]
    again = [name for name in new if name in started]
    for what, names in (
        ("stored twice", twice),
        ("stored, and not in the journal", unknown),
        ("stored as trained, and not trained", untrained),
        ("trained, and not stored once", untold),
        ("an id that was given before", again),
        ("lost", sorted(lost)),
    ):
        if names:
            wrong.append(f"{what}: {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}")
    return lost, wrong


def run(quick: bool, nonce: str) -> dict[str, Any]:
    """Measure. A full run is best taken in parts: see the module."""
    with tempfile.TemporaryDirectory(prefix="rl-coserve-power-") as folder:
        found = measure(Path(folder), quick, nonce, float("inf"))
    assert found is not None
    return found


def measure(folder: Path, quick: bool, nonce: str, seconds: float) -> dict[str, Any] | None:
    """Go on with what is in ``folder``; None: ``seconds`` were not enough."""
    begun, clock = now(), time.monotonic()
    states, count, tried = (
        (_QUICK_STATES, _QUICK_TRACES, _QUICK_CONTROL_STATES) if quick else (_STATES, _TRACES, _CONTROL_STATES)
    )
    rng = random.Random(f"power cuts {nonce}")
    traces = {seed: record(seed) for seed in range(count)}
    cuts = deal(traces, states, rng)
    parts: list[tuple[str, list[Cut], Dropped | None]] = [
        (f"states-{at:05d}", cuts[at : at + _CHUNK], None) for at in range(0, states, _CHUNK)
    ]
    for name, dropped in list(CONTROLS.items())[: 1 if quick else None]:
        late = [cut for cut in deal(traces, 4 * tried, rng) if _commits_before(traces[cut.seed], cut.at)]
        parts.append((f"control {name}", late[:tried], dropped))
    for name, chosen, lost_sync in parts:
        file = folder / f"{name.replace(' ', '-')}.json"
        if file.exists():
            continue
        if time.monotonic() - clock > seconds:
            return None
        total = Tally()
        for index, cut in enumerate(chosen):
            total.add(try_cut(cut, traces[cut.seed], random.Random(f"{nonce}/{name}/{index}"), lost_sync))
        file.write_text(json.dumps(asdict(total)), encoding="utf-8")
        print(
            f"{name}: {total.lost} of {total.seen} lost, {time.monotonic() - clock:.0f} s", file=sys.stderr, flush=True
        )
    tallies = {
        name: Tally(**json.loads((folder / f"{name.replace(' ', '-')}.json").read_text())) for name, _, _ in parts
    }
    return _result(tallies, traces, quick, nonce, begun)


def _commits_before(operations: Sequence[Operation], at: int) -> bool:
    return any(one.kind == "mark" for one in operations[:at])


def _result(
    tallies: dict[str, Tally], traces: dict[int, list[Operation]], quick: bool, nonce: str, begun: str
) -> dict[str, Any]:
    total, controls = Tally(), {}
    for name, tally in tallies.items():
        if name.startswith("control"):
            controls[name.removeprefix("control ")] = tally
        else:
            total.add(tally)
    enough = quick or (total.states >= _STATES and min(total.kinds.values()) >= _EACH)
    caught = all(tally.lost for tally in controls.values())
    return frame(
        NAME,
        "simulated",
        value=total.lost,
        unit="trajectories lost",
        reference="with one sync removed, the least of the controls",
        reference_value=min(tally.lost for tally in controls.values()),
        bar=f"0 in >= {_STATES:,} states, >= {_EACH} of each kind; nothing else wrong; each control above 0",
        holds=not total.lost and not total.wrong and caught and enough,
        detail={
            "states": total.states,
            "samples": total.states,
            "resumed": total.resumed,
            "refused": total.refused,
            "refused_before_the_first_checkpoint": total.early,
            "trajectories_seen_by_checkpoints": total.seen,
            "wrong": total.wrong,
            "states_by_kind": dict(sorted(total.kinds.items())),
            "repairs": dict(sorted(total.repairs.items())),
            "operations": sum(len(operations) for operations in traces.values()),
            "recorded": "os and open of Python; what Arrow writes, at its sync",
            "controls": {
                name: {"states": one.states, "seen": one.seen, "lost": one.lost, "refused": one.refused}
                for name, one in controls.items()
            },
        },
        quick=quick,
        nonce=nonce,
        begun=begun,
    )


def main() -> int:
    """Returns the exit code: 3 while there are states left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--commit", default="", help="what is measured; it stands in the result")
    parser.add_argument("--seconds", type=float, default=500.0, help="no part is begun after so many")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    found = measure(options.folder, False, "", options.seconds)
    if found is None:
        return 3
    found["detail"]["commit"] = options.commit
    print(json.dumps(found, indent=2))
    return 0 if found["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
