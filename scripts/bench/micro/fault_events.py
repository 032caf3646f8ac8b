"""What is done to a run, by kind: kills, also during recovery, stops, a SIGTERM, full disks, jumps of the clock, lost servers.

Each does its harm and returns when that has ended: from then on it is measured how long the run takes to its next training step.
What it returns goes into the event's row.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from orchestrator.checkpoint import verify
from scripts.bench.micro import small_disk
from scripts.bench.micro.fault_run import FaultRun
from scripts.bench.micro.victims import MasterProcess, RedisProcess, alive

HOUR = 3600
PARTS = ("engine", "trainer", "relay master", "function host", "environment worker", "orchestrator")
_END_SECONDS = 300.0  # for a run to end that was told to
_PART_SECONDS = 90.0  # for a part to be there


class NotNow(Exception):
    """What was to be hit is not there, or the run completed meanwhile."""


@dataclass
class Servers:
    """What is not the run's own. ``clock``: the file that libfaketime reads."""

    redis: RedisProcess
    master: MasterProcess | None
    clock: Path
    hold: Path


Row = dict[str, Any]
Event = Callable[[FaultRun, Servers, random.Random], Row]


def _victim(run: FaultRun, part: str, rng: random.Random) -> int:
    pid = run.pid(part, rng.choice)
    if pid is None:
        raise NotNow(part)
    run.note_descendants()
    return pid


def _kill(run: FaultRun, part: str, rng: random.Random) -> int:
    pid = _victim(run, part, rng)
    os.kill(pid, signal.SIGKILL)
    if part == "orchestrator":
        run.wait_end(_END_SECONDS)
    return pid


def kill(part: str, run: FaultRun, _: Servers, rng: random.Random) -> Row:
    """With SIGKILL."""
    return {"pid": _kill(run, part, rng)}


def kill_metadata(run: FaultRun, servers: Servers, rng: random.Random) -> Row:
    """The metadata store, for some seconds."""
    away = rng.uniform(1.0, 6.0)
    servers.redis.kill()
    time.sleep(away)
    servers.redis.start()
    return {"away": round(away, 1)}


def fail_over(run: FaultRun, servers: Servers, rng: random.Random) -> Row:
    """A replica of the metadata store takes its address."""
    servers.redis.fail_over()
    return {"away": 0.0}


def kill_twice(part: str, run: FaultRun, _: Servers, rng: random.Random) -> Row:
    """The part, then the process that is started in its place, while it starts."""
    before = run.actors()
    first = _kill(run, part, rng)
    second = run.wait(lambda: run.actors() - before, _PART_SECONDS, f"no other {part}")
    time.sleep(rng.uniform(0.0, 1.5))
    _kill_now(second)
    return {"pid": first, "then": sorted(second)}


def kill_then_trainer(part: str, run: FaultRun, _: Servers, rng: random.Random) -> Row:
    """The part, then engines and trainer while the run begins anew."""
    before, lives = run.actors(), _lives(run)
    first = _kill(run, part, rng)
    run.wait(lambda: _lives(run) > lives, _END_SECONDS, "the run did not begin anew")
    second = run.wait(lambda: run.actors() - before, _PART_SECONDS, "no new actors")
    time.sleep(rng.uniform(0.0, 2.0))
    _kill_now(second)
    return {"pid": first, "then": sorted(second)}


def _beginnings(run: FaultRun) -> int:
    """Lives of the run, and those that its trainer begins within one."""
    revived = sum(1 for event in run.events() if event["kind"] == "fault" and event["what"] == "trainer")
    return _lives(run) + revived


def kill_then_orchestrator(part: str, run: FaultRun, _: Servers, rng: random.Random) -> Row:
    """The part, then the orchestrator while the run begins anew."""
    beginnings = _beginnings(run)
    first = _kill(run, part, rng)
    run.wait(lambda: _beginnings(run) > beginnings, _END_SECONDS, "the run did not begin anew")
    time.sleep(rng.uniform(0.0, 4.0))
    return {"pid": first, "then": [_kill_orchestrator(run)]}


def kill_while_resuming(run: FaultRun, _: Servers, rng: random.Random) -> Row:
    """The orchestrator, then again while it is resumed."""
    lives = _lives(run)
    first = _kill(run, "orchestrator", rng)
    run.resume()
    run.wait(lambda: _lives(run) > lives, _END_SECONDS, "the run was not resumed")
    time.sleep(rng.uniform(0.0, 5.0))
    return {"pid": first, "then": [_kill_orchestrator(run)]}


def _kill_orchestrator(run: FaultRun) -> int:
    assert run.process is not None
    pid = run.process.pid
    if not run.ended:
        run.note_descendants()
        os.kill(pid, signal.SIGKILL)
    run.wait_end(_END_SECONDS)
    return pid


def _kill_now(pids: set[int]) -> None:
    for pid in pids:
        if alive(pid):
            os.kill(pid, signal.SIGKILL)


def _lives(run: FaultRun) -> int:
    return sum(event["kind"] == "run_start" for event in run.events())


def stop(part: str, seconds: tuple[float, float], run: FaultRun, servers: Servers, rng: random.Random) -> Row:
    """SIGSTOP, and SIGCONT after so many seconds, if it is still there then."""
    pid = servers.redis.pid if part == "metadata store" else _victim(run, part, rng)
    away = rng.uniform(*seconds)
    os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(away)
    finally:
        there = alive(pid)
        if there:
            os.kill(pid, signal.SIGCONT)
    return {"pid": pid, "away": round(away, 1), "there_after": there}


def old_weights(run: FaultRun, _: Servers, rng: random.Random) -> Row:
    """An engine's process ends once later versions than its first are out; the next one has the first. It is right when nothing
    is said under a version that was not loaded, which the books and the twins see."""
    run.wait(lambda: _version(run) >= 2, run.setting.limit, "no version 2")
    before, version = len(run.events()), _version(run)
    begun, name = time.monotonic(), "vllm-0"
    pid = _kill(run, "engine", rng)

    def back() -> list[int]:
        return [
            event["version"] for event in run.events()[before:] if event["kind"] == "worker" and event["name"] == name
        ]

    known = run.wait(back, run.setting.limit, "the engine did not come back")
    return {"pid": pid, "version": version, "version_when_back": known[0], "begun": begun}


def _version(run: FaultRun) -> int:
    return max((event["version"] for event in run.events() if event["kind"] == "step"), default=-1)


def terminate_in_checkpoint(run: FaultRun, _: Servers, rng: random.Random) -> Row:
    """SIGTERM while a checkpoint is being written."""
    pid = _victim(run, "orchestrator", rng)
    folder = run.path / "checkpoints"

    def begun() -> list[str]:
        return [one.name for one in folder.glob(".partial-*")]

    name = run.wait(begun, run.setting.limit, "no checkpoint")[0]
    os.kill(pid, signal.SIGTERM)
    during = bool(begun())
    code = run.wait_end(_END_SECONDS)
    damaged = [one.name for one in folder.glob("step-*") if verify(one)]
    return {"pid": pid, "code": code, "checkpoint": name, "during": during, "damaged": damaged}


def fill_disk(writer: str, run: FaultRun, _: Servers, rng: random.Random) -> Row:
    """The run is stopped, resumed where this writer has almost no room, and has room again once it has ended."""
    if not (place := run.path / _PLACES[writer]).exists():
        raise NotNow(writer)
    pid = _victim(run, "orchestrator", rng)
    os.kill(pid, signal.SIGINT)
    run.wait_end(_END_SECONDS)
    known, room = len(run.events()), _room(writer, place, rng)
    if writer == "relay file":  # those of an ended life are garbage, which would make room
        shutil.rmtree(place)
        place.mkdir()
    scratch = run.folder / "small-disk"
    run.resume(partial(small_disk.on_small_disk, place, room, scratch))
    trained = run.step_after(known, 0.0) and (writer == "logs" or run.step_after(len(run.events()), 0.0))
    if not run.ended and writer == "logs":  # nobody needs those
        os.kill(run.pid("orchestrator") or 0, signal.SIGINT)
    code = run.wait_end(run.setting.limit + _END_SECONDS)
    if code == 0:
        raise NotNow("the run completed before the disk was full")
    said = run.last_words()
    return {"room": room, "trained_with_so_much": trained, "code": code, "said": said}


_PLACES = {
    "ledger": "ledger.jsonl",
    "events": "events.jsonl",
    "store": "trajectories",
    "checkpoint": "checkpoints",
    "logs": "logs",
    "relay file": "relay",
}


def _room(writer: str, place: Path, rng: random.Random) -> int:
    if writer == "logs":
        return 0
    if writer == "checkpoint":
        one = small_disk.used(max(place.glob("step-*")))
        return int(one * rng.uniform(0.1, 0.9))
    if writer == "relay file":
        return small_disk.used(place) // 2  # of the versions that are kept
    return rng.randrange(4096, 16384)


def jump_clock(seconds: int, run: FaultRun, servers: Servers, rng: random.Random) -> Row:
    """The wall clock of all processes of the run; who measures durations has another one."""
    off = int(servers.clock.read_text(encoding="utf-8")) + seconds
    servers.clock.write_text(f"{off:+d}", encoding="utf-8")
    time.sleep(2.0)  # it is read once a second
    return {"off_by": off}


def between_put_and_commit(part: str, run: FaultRun, servers: Servers, rng: random.Random) -> Row:
    """The part is killed when a version is on the relay and nobody has been told; a master that is not the run's own is there
    again at once."""
    with _held(run, servers.hold):
        if servers.master is not None:
            servers.master.kill()
            servers.master.start()
            return {}
        return {"pid": _kill(run, part, rng)}


@contextmanager
def _held(run: FaultRun, folder: Path) -> Iterator[None]:
    hold, held = folder / "hold", folder / "held"
    held.unlink(missing_ok=True)
    hold.touch()
    try:
        run.wait(held.exists, run.setting.limit, "nothing was published")
        yield
    finally:
        hold.unlink(missing_ok=True)


def restart_master(run: FaultRun, servers: Servers, rng: random.Random) -> Row:
    """One that is not the run's own, for some seconds."""
    assert servers.master is not None
    away = rng.uniform(0.0, 4.0)
    servers.master.kill()
    time.sleep(away)
    servers.master.start()
    return {"away": round(away, 1)}


SHORT, LONG = (2.0, 5.0), (12.0, 15.0)
EVENTS: dict[str, Event] = {
    **{f"{part} killed": partial(kill, part) for part in PARTS},
    "metadata store killed": kill_metadata,
    "metadata store fails over": fail_over,
    "engine killed, and again while it starts": partial(kill_twice, "engine"),
    "trainer killed, then the orchestrator while the run begins anew": partial(kill_then_orchestrator, "trainer"),
    "relay master killed, then engines and trainer while the run begins anew": partial(
        kill_then_trainer, "relay master"
    ),
    "orchestrator killed, and again while it is resumed": kill_while_resuming,
    **{f"{part} stopped": partial(stop, part, SHORT) for part in (*PARTS, "metadata store")},
    "a shard of managers dies": partial(kill, "shard-1"),
    "a shard of managers stands still": partial(stop, "shard-1", SHORT),
    "engine stopped for longer than its heartbeat": partial(stop, "engine", LONG),
    "orchestrator stopped for longer than a heartbeat": partial(stop, "orchestrator", LONG),
    "SIGTERM in a checkpoint": terminate_in_checkpoint,
    **{f"full disk: {writer}": partial(fill_disk, writer) for writer in _PLACES},
    "engine comes back with old weights": old_weights,
    "clock jumps an hour ahead": partial(jump_clock, HOUR),
    "clock jumps an hour back": partial(jump_clock, -HOUR),
    "relay master killed between put and commit": partial(between_put_and_commit, "relay master"),
    "trainer killed between put and commit": partial(between_put_and_commit, "trainer"),
    "another's relay master restarted between put and commit": partial(between_put_and_commit, "another's"),
    "another's relay master restarted": restart_master,
}
