"""The process that writes store and checkpoints: the same files, nothing lost when it dies, nothing written for the dead."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator import store as store_module
from orchestrator.api import Prompt, RunError, Trajectory, Turn
from orchestrator.checkpoint import Checkpoints, CheckpointState, verify, write_checkpoint
from orchestrator.runtime import record_writer
from orchestrator.runtime.record_writer import RecordWriter
from orchestrator.runtime.run_records import BesideTheLoop
from orchestrator.shards.shard_folder import ShardFolder, shard_of
from orchestrator.store import TrajectoryStore, read_trajectories, to_trajectory
from scripts.bench.micro.stalls import StallWatch


def a_trajectory(name: str, tokens: int = 8) -> Trajectory:
    said = tuple(index * 7919 % 150_000 for index in range(tokens))
    turn = Turn((1, 2), said, tuple(-1 / (n + 3) for n in said), ((3, tokens),), 0.5)
    return Trajectory(name, "g", "task", Prompt("p", "task", 1, "é"), (turn,), 1.0, "1", 7, False, ("once",))


def a_state(*buffer: Trajectory) -> CheckpointState:
    return CheckpointState(3, 2, 900, 12.5, buffer, ((0, 0.25),), {"queue": [1, {"deep": []}]}, {"p": [0.5]}, None)


@pytest.fixture
def shards(tmp_path: Path) -> Iterator[ShardFolder]:
    (tmp_path / "memory").mkdir()
    folder = ShardFolder(tmp_path / "shards", tmp_path / "memory")
    yield folder
    folder.close()


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[RecordWriter]:
    made = RecordWriter(tmp_path / "record-writer.log")
    yield made
    made.close()
    assert made.pid is None


def stored(folder: Path) -> list[Trajectory]:
    rows = sorted(read_trajectories(folder).to_pylist(), key=lambda row: row["trajectory_id"])
    return [to_trajectory(row) for row in rows]


def test_what_the_process_wrote_is_what_this_one_would_have_written(
    tmp_path: Path, shards: ShardFolder, writer: RecordWriter
) -> None:
    originals = [a_trajectory(f"t{index}", 5 * index + 1) for index in range(5)]
    store = TrajectoryStore(tmp_path / "store", finish=shards.finish, writer=writer)
    plain = TrajectoryStore(tmp_path / "plain")
    for index, trajectory in enumerate(originals):
        for one in (store, plain):
            one.append(trajectory, index % 2, "trained", position=index, weight=0.5)
    asyncio.run(store.flushed())
    plain.flush()
    assert stored(tmp_path / "store") == stored(tmp_path / "plain") == originals
    assert read_trajectories(tmp_path / "store").equals(read_trajectories(tmp_path / "plain"))
    assert shards.bytes == 0  # what is on disk is not held any more
    state = a_state(*map(shards.finish, originals))
    checkpoints = BesideTheLoop(tmp_path / "checkpoints", 1, writer=writer)
    partial = checkpoints.begin(3)
    (partial / "trainer" / "weights.bin").write_bytes(bytes(1000))
    final = asyncio.run(checkpoints.committed(partial, state))
    assert sorted(file.name for file in final.iterdir()) == ["buffer.shards", "files.json", "state.json", "trainer"]
    expected = replace(state, buffer=tuple(originals))
    assert checkpoints.newest() == (final, expected, [])
    assert len({writer.pid, os.getpid(), None}) == 3
    listed = json.loads((final / "files.json").read_text())["files"]
    here = Checkpoints(tmp_path / "here", 1)
    partial = here.begin(3)
    (partial / "trainer" / "weights.bin").write_bytes(bytes(1000))
    assert json.loads((here.commit(partial, state) / "files.json").read_text())["files"] == listed
    again = tuple(map(shards.finish, checkpoints.newest()[1].buffer))  # type: ignore[index]
    checkpoints.commit(checkpoints.begin(3), replace(state, buffer=again))  # from shards that were a checkpoint's
    assert checkpoints.newest() == (final, expected, [])


def test_a_writer_that_starts_after_an_upgrade_writes_nothing_and_says_so(
    tmp_path: Path, shards: ShardFolder, writer: RecordWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a job's places mean is each version's own: a newer one would put one column's values into another."""
    monkeypatch.setattr(record_writer, "__version__", "0.0.9")
    store = TrajectoryStore(tmp_path / "store", finish=shards.finish, writer=writer)
    store.append(a_trajectory("t0"), 1, "trained", position=0, weight=0.5)
    with pytest.raises(RunError, match=r"it is rl-coserve .*, the run 0\.0\.9: end the run and resume it"):
        store.flush()
    assert not list((tmp_path / "store").rglob("part-*"))


def test_a_writer_that_is_killed_in_a_job_or_between_two_is_started_again_and_nothing_is_lost(
    tmp_path: Path, shards: ShardFolder, writer: RecordWriter
) -> None:
    originals = [a_trajectory(f"t{index}") for index in range(4)]
    store = TrajectoryStore(tmp_path / "store", finish=shards.finish, writer=writer)
    store.append(originals[0], 0, "trained")
    store.flush()
    assert writer.pid is not None
    os.kill(writer.pid, signal.SIGKILL)  # between two
    store.append(originals[1], 1, "trained")
    store.flush()
    assert writer.deaths == 1
    os.kill(writer.pid, signal.SIGSTOP)
    checkpoints, killed = Checkpoints(tmp_path / "checkpoints", 1, writer=writer), writer.pid
    job = threading.Thread(target=checkpoints.commit, args=(checkpoints.begin(3), a_state(shards.finish(originals[2]))))
    job.start()
    time.sleep(0.05)
    os.kill(killed, signal.SIGKILL)  # in one
    job.join(30)
    assert writer.deaths == 2
    found = checkpoints.newest()
    assert found is not None
    assert found[1:] == (a_state(originals[2]), [])
    store.append(originals[3], 1, "trained")
    store.close()
    assert stored(tmp_path / "store") == [originals[0], originals[1], originals[3]]


def test_what_a_writer_that_gets_no_processor_leaves_undone_waits_and_is_done_when_it_gets_one(
    tmp_path: Path, shards: ShardFolder, writer: RecordWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "BACKLOG", 1 << 18)
    originals = [a_trajectory(f"t{index:03d}") for index in range(64)]
    store = TrajectoryStore(tmp_path / "store", 4, finish=shards.finish, writer=writer)

    async def scenario() -> None:
        store.append(originals[0], 0, "evicted_stale")
        await store.flushed()
        assert writer.pid is not None
        os.kill(writer.pid, signal.SIGSTOP)
        begun = time.monotonic()
        for trajectory in originals[1:]:
            store.append(trajectory, 0, "evicted_stale")
        assert time.monotonic() - begun < 5, "the loop did not wait for it"
        assert store.behind().startswith("the trajectory store: ")
        os.kill(writer.pid, signal.SIGCONT)
        while store.behind():
            await asyncio.sleep(0.01)
        await store.flushed()

    asyncio.run(scenario())
    assert stored(tmp_path / "store") == originals
    assert (writer.deaths, shards.bytes) == (0, 0)
    store.close()


def test_a_job_that_kills_each_writer_is_one_error(
    tmp_path: Path, shards: ShardFolder, writer: RecordWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_writer.sys, "executable", "/bin/false")
    store = TrajectoryStore(tmp_path / "store", finish=shards.finish, writer=writer)
    store.append(a_trajectory("t"), 0, "trained")
    with pytest.raises(RunError, match=r"the record writer died 3 times in the job part .*see .*record-writer\.log"):
        store.flush()
    monkeypatch.undo()
    store.flush()  # what it could not write is pending
    assert stored(tmp_path / "store") == [a_trajectory("t")]


def test_what_the_disk_or_a_lost_shard_refuses_is_said_as_if_this_process_wrote(
    tmp_path: Path, shards: ShardFolder, writer: RecordWriter
) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", 1, writer=writer)
    partial, finished = checkpoints.begin(3), shards.finish(a_trajectory("t"))
    os.rename(partial, partial.with_name("elsewhere"))
    with pytest.raises(RunError, match=r"partial-000003 cannot be written: No such file or directory"):
        checkpoints.commit(partial, a_state(finished))
    shard = shard_of(finished)
    assert shard is not None
    os.unlink(shard.path)
    with pytest.raises(RunError, match=f"the record writer: shard {shard.path} is lost"):
        checkpoints.commit(checkpoints.begin(3), a_state(finished))
    assert checkpoints.all() == []


def test_a_job_that_was_done_before_its_writer_could_say_so_is_done(tmp_path: Path, shards: ShardFolder) -> None:
    checkpoints = Checkpoints(tmp_path, 1)
    partial, state, finished = checkpoints.begin(3), a_state(), [shards.finish(a_trajectory("t"))]
    shard = shard_of(finished[0])
    assert shard is not None
    final = write_checkpoint(partial, state, [shard])
    assert write_checkpoint(partial, state, [shard]) == final
    assert verify(final) == ""
    again = checkpoints.begin(3)
    (again / "files.json").write_text("{}")  # of one that died before the name
    assert verify(write_checkpoint(again, state, [shard])) == ""


def test_a_writer_whose_orchestrator_is_gone_gives_no_file_its_name(tmp_path: Path, shards: ShardFolder) -> None:
    """An orchestrator dies while its writer, which is held up, has a checkpoint to commit."""
    finished = shards.finish(a_trajectory("t"))
    shard = shard_of(finished)
    assert shard is not None
    checkpoints = Checkpoints(tmp_path / "checkpoints", 1)
    partial = checkpoints.begin(3)
    held_up = tmp_path / "held-up"
    held_up.write_text(f'#!/bin/sh\nkill -STOP $$\nexec {sys.executable} "$@"\n')
    held_up.chmod(0o755)
    program = f"""
import fcntl, struct, sys, termios, threading, time
from pathlib import Path
from orchestrator.checkpoint import CheckpointState
from orchestrator.runtime import record_writer
from orchestrator.shards.shard_folder import Shard
record_writer.sys.executable = {str(held_up)!r}
writer = record_writer.RecordWriter(Path({str(tmp_path / "log")!r}))
shard = Shard({shard.path!r}, {shard.size}, {shard.digest!r})
job = Path({str(partial)!r}), CheckpointState(3, 2, 900, 12.5, ()), [shard]
threading.Thread(target=writer.write_checkpoint, args=job, daemon=True).start()
while writer.pid is None:
    time.sleep(0.001)
while not struct.unpack("i", fcntl.ioctl(writer._process.stdin, termios.FIONREAD, b"    "))[0]:
    time.sleep(0.001)  # until its job is in the pipe
while Path(f"/proc/{{writer.pid}}/stat").read_text().rpartition(")")[2].split()[0] != "T":
    time.sleep(0.001)
print(writer.pid, flush=True)
time.sleep(60)
"""
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    owner.kill()
    owner.wait()
    os.kill(pid, signal.SIGCONT)
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not Path(f"/proc/{pid}").exists()
    assert checkpoints.all() == []
    assert (partial / "state.json").exists()


def test_a_checkpoint_of_shards_lets_the_loop_go_on(tmp_path: Path, shards: ShardFolder, writer: RecordWriter) -> None:
    one = a_trajectory("a", 16_384)
    state = a_state(*(shards.finish(replace(one, id=f"t{index}")) for index in range(64)))
    checkpoints = BesideTheLoop(tmp_path / "checkpoints", 1, writer=writer)

    async def scenario() -> float:
        await checkpoints.committed(checkpoints.begin(2), replace(state, step=2))  # the process starts
        watch = StallWatch(0.01).start()
        await asyncio.sleep(0.05)
        await checkpoints.committed(checkpoints.begin(3), state)
        await asyncio.sleep(0.05)
        return max((stall.own for stall in watch.stop()), default=0.0)

    assert asyncio.run(scenario()) < 0.1  # a million tokens held it up for 0.3 s and more in pieces


def test_what_is_put_back_from_a_checkpoint_maps_no_file_of_it(tmp_path: Path, shards: ShardFolder) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", 1)
    checkpoints.commit(checkpoints.begin(3), a_state(shards.finish(a_trajectory("t"))))
    found = checkpoints.newest()
    assert found is not None
    assert "buffer.shards" in Path("/proc/self/maps").read_text()
    (back,) = map(shards.finish, found[1].buffer)
    del found
    assert "buffer.shards" not in Path("/proc/self/maps").read_text()
    assert back == a_trajectory("t")
