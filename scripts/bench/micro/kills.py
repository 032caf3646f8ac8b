"""Trajectories unaccounted for, and processes left over, after kills, stops, full disks and jumps of the clock (must be 0).

``kill -9`` of every kind of process, also while a run recovers from another; SIGSTOP and SIGCONT; SIGTERM in a checkpoint; a full
disk at each writer; a wall clock that jumps an hour (libfaketime; never the system's); engines that come back with old weights;
the relay's master gone between put and commit; a metadata store that fails over (:mod:`scripts.bench.micro.fault_events`).

Runs of ``rl-coserve train``, small: real ones (stock vLLM, stock Megatron-Core), and more with twins of these two in their
processes (:mod:`scripts.bench.micro.engine_twins`); Ray, Mooncake, Redis, function host, environments, journals and signals are
real in both. After each event it is waited for a training step that began after it; a run that has ended is resumed by
``train --resume``. When a run has completed, its journal is recounted, replayed and compared with the store, and nothing that
carries the mark of one of its lives may live.

Interrupted, it continues: ``python -m scripts.bench.micro.kills FOLDER --minutes M`` keeps all in FOLDER.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import random
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.api import RunError
from orchestrator.events import read_events
from scripts.bench.micro import small_disk
from scripts.bench.micro.engine_twins import HOLD
from scripts.bench.micro.fault_events import EVENTS, NotNow, Servers
from scripts.bench.micro.fault_run import FaultRun, Setting
from scripts.bench.micro.victims import MasterProcess, RedisProcess
from scripts.bench.result import frame, now

NAME = "kills"
LEAST, LEAST_REAL = 100, 25  # events
_TRIES = 5  # to hit what is not there, or to resume what ends at once
_CONFIG = Path("examples/frozenlake.toml")
_COMMON = (
    "run.minutes=600",
    "rollout.worker_restarts=1000",
    "reward.host_restarts=1000",
    "checkpoint.every=1",
    "evaluation.every=0",
    "environment.backend=subprocess",
    "environment.size=2",
    "environment.warm=1",
)
_REAL = (
    *_COMMON,
    "rollout.groups_per_step=4",
    "rollout.dynamic_sampling=false",
    "rollout.environments=32",
    "trainer.micro_batch_size=8",
    "evaluation.prompts=8",
    "warmup.steps=5",
    "rollout.heartbeat_seconds=2.5",
)
_TWINS = (
    *_COMMON,
    "rollout.workers=2",
    "rollout.group_size=4",
    "rollout.groups_per_step=2",
    "rollout.dynamic_sampling=false",
    "rollout.environments=12",
    "rollout.heartbeat_seconds=2.0",
    "evaluation.prompts=4",
    "warmup.steps=0",
    "relay.segment_mb=16",
    "relay.bucket_mb=1",
    "relay.patience=30",
    "sim.decode_seconds_per_step=0.01",
)
_FILES = ("relay.kind=fsspec", "relay.patience=10")
_REDIS = "relay.metadata_url={redis}"
_MASTER = "relay.master={master}"

SETTINGS = (
    Setting(
        "twins",
        False,
        (*_TWINS, _REDIS),
        steps=150,
        limit=240.0,
        events={
            **dict.fromkeys((name for name in EVENTS if name.endswith((" killed", " stopped"))), 2),
            "metadata store fails over": 3,
            "engine killed, and again while it starts": 2,
            "trainer killed, then the orchestrator while the run begins anew": 2,
            "relay master killed, then engines and trainer while the run begins anew": 2,
            "orchestrator killed, and again while it is resumed": 2,
            "engine stopped for longer than its heartbeat": 2,
            "orchestrator stopped for longer than a heartbeat": 2,
            "SIGTERM in a checkpoint": 4,
            "full disk: ledger": 2,
            "full disk: events": 2,
            "full disk: store": 2,
            "full disk: checkpoint": 2,
            "full disk: logs": 2,
            "engine comes back with old weights": 3,
            "relay master killed between put and commit": 3,
        },
    ),
    Setting(
        "twins-files",
        False,
        (*_TWINS, *_FILES),
        steps=40,
        limit=240.0,
        events={"full disk: relay file": 3, "trainer killed between put and commit": 2},
    ),
    Setting(
        "twins-master",
        False,
        (*_TWINS, _MASTER),
        steps=40,
        limit=240.0,
        events={
            "another's relay master restarted between put and commit": 3,
            "another's relay master restarted": 2,
        },
    ),
    Setting(
        "twins-shards",
        False,
        (*_TWINS, _REDIS, "rollout.shards=2"),
        steps=40,
        limit=240.0,
        events={"a shard of managers dies": 3, "a shard of managers stands still": 2},
    ),
    Setting(
        "twins-clock",
        False,
        (*_TWINS, _REDIS),
        steps=40,
        limit=240.0,
        events={"clock jumps an hour ahead": 3, "clock jumps an hour back": 3},
        clock=True,
    ),
    Setting(
        "real",
        True,
        (*_REAL, _REDIS),
        steps=40,
        limit=420.0,
        events={
            **dict.fromkeys((name for name in EVENTS if name.endswith(" killed")), 2),
            "engine killed, and again while it starts": 1,
            "trainer killed, then the orchestrator while the run begins anew": 1,
            "orchestrator killed, and again while it is resumed": 1,
            "engine stopped": 1,
            "trainer stopped": 1,
            "environment worker stopped": 1,
            "function host stopped": 1,
            "orchestrator stopped": 1,
            "engine stopped for longer than its heartbeat": 1,
            "SIGTERM in a checkpoint": 2,
            "full disk: ledger": 1,
            "full disk: checkpoint": 1,
            "engine comes back with old weights": 2,
            "metadata store fails over": 1,
        },
    ),
    Setting(
        "real-clock",
        True,
        (*_REAL, _REDIS),
        steps=12,
        limit=420.0,
        events={"clock jumps an hour ahead": 1, "clock jumps an hour back": 1},
        clock=True,
    ),
)
QUICK = (Setting("twins", False, (*_TWINS, _REDIS), 12, 120.0, {"trainer killed": 1, "environment worker stopped": 1}),)


def run(quick: bool, nonce: str) -> dict[str, Any]:
    """Measure. Needs the repository's ``examples`` folder and redis-server. Raises RunError when a run cannot continue."""
    begun = now()
    folder = Path("runs") / f"kills-{begun.replace(':', '')[:17]}"
    bench = Kills(folder, QUICK if quick else SETTINGS, seed=0)
    while not bench.measure(3600.0):
        pass
    return bench.result(quick, nonce, begun)


@dataclass(frozen=True)
class Due:
    """An event of the schedule."""

    setting: Setting
    kind: str
    moment: float  # seconds after a training step


class Kills:
    """One measurement in a folder, begun or continued. ``seed`` decides the order of events and their moments."""

    def __init__(self, folder: Path, settings: Sequence[Setting], seed: int) -> None:
        if shutil.which("redis-server") is None:
            raise RunError("redis-server is not installed (Debian: apt-get install redis-server)")
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder.resolve()
        self._rows_file = self._folder / "events.jsonl"
        self._surprises_file = self._folder / "surprises.jsonl"
        self.skipped: dict[str, str] = {}
        self._random = random.Random(f"{seed}")
        self.schedule: list[Due] = []
        for setting in settings:
            kinds = [kind for kind, count in setting.events.items() for _ in range(count) if self._possible(kind)]
            self._random.shuffle(kinds)
            latest = 3.0 if setting.real else 1.0
            self.schedule += [Due(setting, kind, self._random.uniform(0.0, latest)) for kind in kinds]

    def _possible(self, kind: str) -> bool:
        why = ""
        if kind.startswith("clock") and not faketime():
            why = "libfaketime is not installed (pip install libfaketime)"
        elif kind.startswith("full disk") and not small_disk.available():
            why = "this user may not mount"
        if why:
            self.skipped[kind] = why
        return not why

    # -- a measurement -----------------------------------------------------------------------------------------------

    def measure(self, seconds: float) -> bool:
        """Continue for about so long; whether it is done."""
        deadline = time.monotonic() + seconds
        while len(done := self.rows()) < len(self.schedule):
            setting = self.schedule[len(done)].setting
            if not self._measure(setting, deadline):
                return False
        return True

    def _measure(self, setting: Setting, deadline: float) -> bool:
        """The rest of a setting's events, and the run to its end."""
        servers = Servers(RedisProcess(self._folder), None, self._folder / "clock", self._folder)
        if _MASTER in setting.overrides:
            servers.master = MasterProcess(self._folder)
        overrides = (_REDIS, _MASTER)
        given = [one for one in setting.overrides if one not in overrides]
        if _REDIS in setting.overrides:
            given.append(f"relay.metadata_url={servers.redis.url}")
        if servers.master is not None:
            given.append(f"relay.master={servers.master.address}")
        environment = {HOLD: str(self._folder)}
        if setting.clock:
            servers.clock.write_text("+0", encoding="utf-8")
            environment |= clock_variables(servers.clock)
        one = FaultRun(self._folder, setting, _CONFIG, given, environment)
        rng = random.Random(f"{setting.name}/{len(self.rows())}")
        try:
            while (number := len(self.rows())) < len(self.schedule) and self.schedule[number].setting is setting:
                if time.monotonic() > deadline:
                    return False
                self._event(number, one, servers, rng)
                one.leftovers()
            self._complete(one)
            one.leftovers(wait=True)
            return True
        finally:
            one.end()
            servers.redis.kill()
            if servers.master is not None:
                servers.master.kill()

    def _event(self, number: int, one: FaultRun, servers: Servers, rng: random.Random) -> None:
        """Wait for a step, then for a moment, do it, and see what happens."""
        due = self.schedule[number]
        row: dict[str, Any] = {}
        for _ in range(_TRIES):
            self._trains(one)
            time.sleep(due.moment)
            before = one.events()
            try:
                row = EVENTS[due.kind](one, servers, rng)
                break
            except (NotNow, ProcessLookupError, FileNotFoundError):  # it went by itself a moment before
                time.sleep(1.0)
            except RunError as error:
                self._surprise(one, due.kind, error)
        else:
            row = {"missed": True}
        begun, moment, known = row.pop("begun", time.monotonic()), one.now(), len(one.events())
        row |= {"kind": due.kind, "setting": due.setting.name, "real": due.setting.real, "run": one.path.name}
        row["outcome"] = "continued"
        try:
            if not one.step_after(known, moment):
                if one.completed:
                    return  # it completed before this could be seen: again, with another run
                row |= {"outcome": "resumed", "error": self._ended(one)}
                one.up()
                if not one.step_after(known, moment):
                    raise RunError(f"the resumed run ended: {one.last_words()}")
            elif sum(event["kind"] == "run_start" for event in one.events()[len(before) :]):
                row["outcome"] = "continued from its checkpoint"
        except RunError as error:
            self._surprise(one, due.kind, error)
            self._trains(one)
            row["outcome"] = "resumed, after it stood still or ended once more"
        row["seconds"] = round(time.monotonic() - begun, 2)
        new = one.events()[len(before) :]
        row["recovered"] = sorted({str(event.get("what")) for event in new if event["kind"] == "recovered"})
        if row["outcome"] == "continued" and "trainer" in row["recovered"]:
            row["outcome"] = "continued, its trainer came back"
        self._note(self._rows_file, row)
        print(f"{number + 1}/{len(self.schedule)} {row}", file=sys.stderr, flush=True)

    def _ended(self, one: FaultRun) -> str:
        """Its last words, if it had a say."""
        code = one.process.poll() if one.process is not None else None
        one.note_death()
        return "" if code == -9 or code is None else f"{code}: {one.last_words()}"

    def _trains(self, one: FaultRun) -> None:
        """A run that has just trained a step. Raises RunError when it does not get there."""
        for _ in range(_TRIES):
            try:
                one.up()
                known = len(one.events())
                if one.step_after(known, 0.0) or one.completed:
                    if not one.ended:
                        return
                    continue  # it completed: another one is started
                raise RunError(f"it ended: {self._ended(one)}")
            except RunError as error:
                self._surprise(one, "", error)
        raise RunError(f"{one.path} does not get to its next step: {one.last_words()}")

    def _complete(self, one: FaultRun) -> None:
        """To its end."""
        for _ in range(_TRIES):
            if one.path.name in {end["run"] for end in one.ends()}:
                return
            if one.ended:
                one.up()
            try:
                if one.wait_end(one.setting.limit + 10.0 * one.setting.steps) == 0:
                    one.note_end()
                    return
                raise RunError(one.last_words())
            except RunError as error:
                self._surprise(one, "", error)
        raise RunError(f"{one.path} did not complete: {one.last_words()}")

    def _surprise(self, one: FaultRun, kind: str, error: RunError) -> None:
        """What should not be: the run is ended, so that it can be resumed."""
        surprise = {"setting": one.setting.name, "run": one.path.name, "kind": kind, "what": str(error)[:500]}
        self._note(self._surprises_file, surprise)
        print(f"surprise: {surprise}", file=sys.stderr, flush=True)
        if not one.completed:
            one.end()

    @staticmethod
    def _note(file: Path, row: Mapping[str, Any]) -> None:
        with file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(row, sort_keys=True) + "\n")

    # -- the figure --------------------------------------------------------------------------------------------------

    def rows(self) -> list[dict[str, Any]]:
        """One an event so far."""
        return list(read_events(self._rows_file)) if self._rows_file.exists() else []

    def result(self, quick: bool, nonce: str, begun: str = "") -> dict[str, Any]:
        """The figure, of a measurement that is done, or as far as it is."""
        rows = [row for row in self.rows() if not row.get("missed")]
        ends = [end | {"setting": at.parent.name} for at in self._files("ends.jsonl") for end in read_events(at)]
        lives = [life for at in self._files("lives.jsonl") for life in read_events(at) if "left" in life]
        left = [name for life in lives for name in life["left"]]
        surprises = list(read_events(self._surprises_file)) if self._surprises_file.exists() else []
        broken = [text for end in ends for text in end["wrong"]]
        broken += [f"{row['kind']}: damaged {row['damaged']}" for row in rows if row.get("damaged")]
        wrong = len(left) + sum(end["unaccounted"] for end in ends)
        runs = {(row["setting"], row["run"]) for row in rows}
        whole = runs <= {(end["setting"], end["run"]) for end in ends}
        real = sum(row["real"] for row in rows)
        enough = whole and len(rows) >= LEAST and real >= LEAST_REAL
        return frame(
            NAME,
            "real",
            value=wrong,
            unit="trajectories unaccounted for, and processes left over",
            reference="events",
            reference_value=len(rows),
            bar=f"0 after >= {LEAST} events, >= {LEAST_REAL} of them with real engines; every run completes, its books are right",
            holds=None if quick and not wrong and not broken else not wrong and not broken and enough,
            detail={
                **({"shrunk": f"{len(rows)} events, with twins of the engines"} if quick else {}),
                "events": len(rows),
                "events_with_real_engines": real,
                "table": table_of(rows),
                "lines": lines_of(table_of(rows)),
                "skipped": self.skipped,
                "surprises": surprises,
                "wrong": broken,
                "left": left,
                "last_process_gone_after_seconds": max((life["gone_after"] for life in lives), default=0.0),
                "lives": len(lives),
                "ends": ends,
                "rows": rows,
            },
            quick=quick,
            nonce=nonce,
            begun=begun,
        )

    def _files(self, name: str) -> list[Path]:
        return sorted(self._folder.glob(f"*/{name}"))


def table_of(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row a kind: how often, what happened, seconds to the next training step."""
    table = []
    for real, kind in dict.fromkeys((row["real"], row["kind"]) for row in sorted(rows, key=_place)):
        found = [row for row in rows if (row["real"], row["kind"]) == (real, kind)]
        seconds = [row["seconds"] for row in found]
        outcomes = [row["outcome"] for row in found]
        table.append(
            {
                "kind": kind,
                "engines": "real" if real else "twins",
                "count": len(found),
                "outcomes": {one: outcomes.count(one) for one in sorted(set(outcomes))},
                "median_seconds": round(statistics.median(seconds), 1),
                "worst_seconds": round(max(seconds), 1),
                "errors": sorted({row["error"] for row in found if row.get("error")}),
            }
        )
    return table


def lines_of(table: Sequence[Mapping[str, Any]]) -> list[str]:
    """The table, as docs/recovery.md has it."""
    lines = [
        "| what was done | engines | times | median s | worst s | what the run did |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in table:
        outcomes = ", ".join(
            one if row["count"] == count else f"{one} {count}x" for one, count in row["outcomes"].items()
        )
        numbers = f"{row['count']} | {row['median_seconds']:.0f} | {row['worst_seconds']:.0f}"
        lines.append(f"| {row['kind']} | {row['engines']} | {numbers} | {outcomes} |")
    return lines


def _place(row: Mapping[str, Any]) -> tuple[int, bool]:
    return list(EVENTS).index(row["kind"]), not row["real"]


def faketime() -> str:
    """The library that shifts the clock of a process, of PyPI's libfaketime (Debian 12's breaks the sleep of Python 3.11); "":
    it is not installed."""
    found = importlib.util.find_spec("libfaketime")
    library = Path(found.origin or "").parent / "vendor/libfaketime/src/libfaketime.so.1" if found else Path("none")
    return str(library) if library.is_file() else ""


def clock_variables(file: Path) -> dict[str, str]:
    """The environment in which the wall clock is as far off as ``file`` says, looked at once a second."""
    return {
        "LD_PRELOAD": " ".join(one for one in (faketime(), os.environ.get("LD_PRELOAD", "")) if one),
        "FAKETIME_TIMESTAMP_FILE": str(file),
        "FAKETIME_CACHE_DURATION": "1",
        "DONT_FAKE_MONOTONIC": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }


def main() -> int:
    """Continue a measurement. Returns the exit code: 3 while there are events left."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=600.0, help="no event is begun after so many")
    parser.add_argument("--settings", default="", help="only these: " + ", ".join(one.name for one in SETTINGS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--result", action="store_true", help="only print what there is so far")
    options = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):  # also under nohup: nothing is left behind
        signal.signal(number, lambda *_: sys.exit(130))
    wanted = options.settings.split(",") if options.settings else [one.name for one in SETTINGS]
    bench = Kills(options.folder, [one for one in SETTINGS if one.name in wanted], options.seed)
    stamp = options.folder / "begun"
    with contextlib.suppress(FileExistsError), stamp.open("x", encoding="utf-8") as file:
        file.write(now())
    done = options.result or bench.measure(60.0 * options.minutes)
    if not done:
        print("not done yet: call it again", file=sys.stderr)
        return 3
    print(json.dumps(bench.result(False, "", stamp.read_text(encoding="utf-8")), indent=1, sort_keys=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
