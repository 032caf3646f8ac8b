"""A finished trajectory is its shard: equal in every bit, read by reference, freed when nothing refers to it, lost out loud."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.api import ContextStart, Prompt, RunError, TrainSample, Trajectory, Turn
from orchestrator.shards.sample_references import PART, pack, unpack
from orchestrator.shards.shard_folder import ShardFolder, TrajectoryWriter, shard_of
from orchestrator.shards.trajectory_shard import SLICE, Column, OpenShard, encode
from orchestrator.train_samples import to_samples

PROMPT = Prompt("key", "task", 7, 'quote " é')
ids = st.lists(st.integers(0, 2**31 - 1), max_size=6).map(tuple)
logprob = st.one_of(st.floats(max_value=0.0, width=32), st.floats(max_value=0.0), st.just(float("nan")))


@st.composite
def any_turn(draw: st.DrawFn, first: bool = False) -> Turn:
    actions = draw(ids)
    start = (
        ContextStart(draw(ids), "restart", draw(st.integers(0, 5)), 3) if not first and draw(st.booleans()) else None
    )
    cut = draw(st.integers(0, len(actions)))
    return Turn(
        observation_ids=draw(ids),
        action_ids=actions,
        logprobs=tuple(draw(logprob) for _ in actions),
        versions=tuple((version, count) for version, count in ((1, cut), (2, len(actions) - cut)) if count),
        reward=draw(st.floats(-1, 1)),
        done=draw(st.booleans()),
        generate_seconds=0.25,
        context=start,
    )


@st.composite
def any_trajectory(draw: st.DrawFn) -> Trajectory:
    turns = [draw(any_turn(True)), *draw(st.lists(any_turn(), max_size=4))] if draw(st.booleans()) else []
    reward = draw(st.none() | st.floats(allow_nan=False))
    metrics = (("format", 1.0), ("length", 0.5))
    return Trajectory(
        "t1", "g1", "task", PROMPT, tuple(turns), reward, "1", 7, False, ("once",), 1.0, 2.0, 3.0, metrics
    )


def a_trajectory(name: str = "t1", tokens: int = 8, reward: float | None = 1.0) -> Trajectory:
    said = tuple(range(tokens))
    turn = Turn(said, said, tuple(-1 / (n + 3) for n in said), ((3, tokens),))
    return Trajectory(name, "g1", "task", PROMPT, (turn, turn), reward, "1", 7, False)


@given(original=any_trajectory())
def test_what_is_read_from_a_shard_is_what_was_encoded(original: Trajectory) -> None:
    data, _ = encode(original)
    assert repr(OpenShard(data).trajectory()) == repr(original)  # NaN equals itself here
    nan = any(value != value for turn in original.turns for value in turn.logprobs)
    assert nan or OpenShard(data).trajectory() == original


@given(original=any_trajectory().filter(lambda one: one.turns != ()))
def test_a_reference_says_and_reads_what_the_sample_in_memory_holds(
    original: Trajectory, tmp_path_factory: pytest.TempPathFactory
) -> None:
    given = replace(original, reward=0.5)
    folder = ShardFolder(tmp_path_factory.mktemp("shards"))
    plain, finished = to_samples(given, 0.25), folder.finish(given)
    referenced = to_samples(finished, 0.25)
    assert repr(finished) == repr(given)
    crossed = unpack(pack(referenced) or [])
    assert [one.source for one in crossed] == [one.source for one in referenced]
    for one, other in zip(plain, crossed, strict=True):
        assert repr(tuple(other.logprobs)) == repr(one.logprobs)
        assert replace(other, logprobs=()) == replace(one, logprobs=())
        assert other.source is not None
        facts = other.source.facts
        token_ids, positions, logprobs = other.source.read()
        assert tuple(token_ids) == one.token_ids
        assert np.flatnonzero(one.loss_mask).tolist() == positions.tolist()
        assert repr(logprobs.tolist()) == repr([p for p, own in zip(one.logprobs, one.loss_mask, strict=True) if own])
        assert (facts.tokens, facts.generated) == (len(one.token_ids), sum(one.loss_mask))
        if one.token_ids:
            assert (facts.least, facts.most) == (min(one.token_ids), max(one.token_ids))
            assert facts.prompted != bool(one.loss_mask[0])
    folder.close()


def test_log_probs_that_are_float32_lie_as_such_and_others_are_not_rounded() -> None:
    def width(*logprobs: float) -> int:
        turn = Turn((1,), (2,) * len(logprobs), logprobs, ((0, len(logprobs)),))
        found = OpenShard(encode(replace(a_trajectory(), turns=(turn,)))[0])
        assert found.trajectory().turns[0].logprobs == logprobs
        return int(found.logprobs.dtype.itemsize)

    assert (width(-0.5, -0.25), width(-0.5, -0.1)) == (4, 8)


def test_what_an_earlier_version_does_not_know_is_written_only_where_there_is_some() -> None:
    assert b'"metrics"' not in bytes(encode(a_trajectory())[0])
    assert b'"metrics"' in bytes(encode(replace(a_trajectory(), metrics=(("format", 1.0),)))[0])


def test_a_turn_whose_log_probs_are_too_few_is_refused() -> None:
    turn = replace(a_trajectory().turns[0], logprobs=(-1.0,))
    with pytest.raises(RunError, match=r"trajectory t1: a turn's tokens, log-probs and versions differ in number"):
        encode(replace(a_trajectory(), turns=(turn,)))


def test_a_column_is_the_tuple_of_its_numbers() -> None:
    column = Column(np.arange(5, dtype=np.int32))
    assert column == (0, 1, 2, 3, 4)
    assert [column] == [(0, 1, 2, 3, 4)]
    assert (column[1], column[1:3], list(column), len(column), hash(column)) == (
        1,
        (1, 2),
        [0, 1, 2, 3, 4],
        5,
        hash((0, 1, 2, 3, 4)),
    )
    assert type(column[1]) is int
    assert np.shares_memory(np.asarray(column), np.asarray(column))
    assert column != (0, 1)


def test_a_shard_is_freed_when_nothing_refers_to_it(tmp_path: Path) -> None:
    folder = ShardFolder(tmp_path / "disk", tmp_path)
    finished = folder.finish(a_trajectory())
    assert folder.finish(finished) is finished
    shard = shard_of(finished)
    assert shard is not None
    path, samples = shard.path, to_samples(finished)
    del finished, shard
    gc.collect()
    assert os.path.exists(path)  # the samples refer to it
    assert folder.bytes == os.stat(path).st_size
    del samples
    gc.collect()
    assert not os.path.exists(path)
    assert folder.bytes == 0
    folder.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("tokens", "turns", "times"),
    [(8, 4, range(1)), (8, 400, range(8, 40)), (SLICE, 16, range(32, 40))],
    ids=["short", "many turns", "long turns"],
)
def test_others_have_a_turn_of_the_loop_after_each_slice_of_a_trajectory_and_a_short_one_is_finished_at_once(
    tmp_path: Path, tokens: int, turns: int, times: range
) -> None:
    one, ticks = a_trajectory(), 0
    turn = Turn((1,) * tokens, (2,) * tokens, (-0.5,) * tokens, ((0, tokens),))
    original = replace(one, turns=(turn,) * turns)

    async def count() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0)
            ticks += 1

    async def main() -> Trajectory:
        counting = asyncio.create_task(count())
        await asyncio.sleep(0)
        finished = await folder.finish_in_slices(original)
        counting.cancel()
        return finished

    folder = ShardFolder(tmp_path / "shards", tmp_path)
    finished = asyncio.run(main())
    assert ticks in times
    assert finished == original == folder.finish(original)
    assert asyncio.run(folder.finish_in_slices(finished)) is finished
    with pytest.raises(RunError, match="differ in number"):
        asyncio.run(folder.finish_in_slices(replace(one, turns=(replace(one.turns[0], logprobs=(-1.0,)),))))
    folder.close()


def test_full_shared_memory_goes_on_on_the_disk_and_a_full_disk_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "memory").mkdir()
    folder, full, write = ShardFolder(tmp_path / "disk", tmp_path / "memory"), [tmp_path / "memory"], os.write

    def limited(file: int, data: bytes) -> int:
        where = Path(os.readlink(f"/proc/self/fd/{file}"))
        if any(where.is_relative_to(one) for one in full):
            raise OSError(28, "No space left on device")
        return write(file, data)

    monkeypatch.setattr(os, "write", limited)
    held = folder.finish(a_trajectory())
    shard = shard_of(held)
    assert shard is not None
    assert Path(shard.path).parent == tmp_path / "disk"
    assert shard.open().trajectory() == a_trajectory()
    full.append(tmp_path / "disk")
    with pytest.raises(RunError, match=r"a trajectory's shard cannot be written: No space left on device"):
        folder.finish(a_trajectory("t2"))
    left = list(tmp_path.rglob("*.arrow"))
    assert left == [Path(shard.path)]
    folder.close()


@pytest.mark.parametrize(("free", "where"), [(0.12, "disk"), (0.2, "memory")])
def test_shared_memory_is_never_filled_to_the_last_page_which_others_would_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: float, where: str
) -> None:
    """Whoever maps a page that is not there is killed by the kernel: Ray's object store, a collective's buffers."""
    (tmp_path / "memory").mkdir()
    folder = ShardFolder(tmp_path / "disk", tmp_path / "memory")
    facts = SimpleNamespace(f_blocks=1 << 20, f_frsize=4096, f_bavail=int(free * (1 << 20)))
    monkeypatch.setattr(os, "statvfs", lambda path: facts)
    laid = TrajectoryWriter(folder.folders, "s0").lay(a_trajectory("t2"))
    shard = shard_of(folder.finish(a_trajectory()))
    assert shard is not None
    for path in (laid.path, shard.path):
        assert Path(path).relative_to(tmp_path).parts[0] == where
    folder.close()


@pytest.mark.parametrize("harm", ["removed", "cut", "flipped"])
def test_a_lost_or_damaged_shard_is_named(tmp_path: Path, harm: str) -> None:
    folder = ShardFolder(tmp_path / "disk", tmp_path)
    finished = folder.finish(a_trajectory())
    [sample] = to_samples(finished)
    assert folder.lost([finished, a_trajectory()]) == []
    shard = shard_of(finished)
    assert shard is not None
    data = Path(shard.path).read_bytes()
    os.unlink(shard.path)
    if harm != "removed":
        Path(shard.path).write_bytes(data[:-1] if harm == "cut" else bytes([data[0] ^ 1]) + data[1:])
    assert folder.lost([finished, a_trajectory()]) == ([] if harm == "flipped" else ["t1"])
    assert sample.source is not None
    with pytest.raises(RunError, match=f"shard {shard.path} is (lost|damaged)"):
        sample.source.read()
    folder.close()


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_holds_is_not(tmp_path: Path) -> None:
    program = f"""
import os, sys, time
from pathlib import Path
from orchestrator.shards.shard_folder import ShardFolder
folder = ShardFolder(Path({str(tmp_path / "disk")!r}), Path({str(tmp_path)!r}))
print("ready", flush=True)
sys.stdin.read()
os._exit(9)
"""
    child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdin is not None
    assert child.stdout.readline() == b"ready\n"
    ShardFolder(tmp_path / "mine", tmp_path).close()
    assert len(list(tmp_path.glob("rl-coserve-shards-*"))) == 1
    child.stdin.close()
    assert child.wait(20) == 9
    ShardFolder(tmp_path / "mine", tmp_path).close()
    assert list(tmp_path.glob("rl-coserve-shards-*")) == []


def test_references_are_small_whatever_they_refer_to_and_go_in_small_parts(tmp_path: Path) -> None:
    folder = ShardFolder(tmp_path / "disk", tmp_path)
    long = to_samples(folder.finish(a_trajectory(tokens=20_000)))
    short = to_samples(folder.finish(a_trajectory(tokens=20)))
    one, other = pack(long), pack(short)
    assert one is not None
    assert other is not None
    assert len(one[0]) < len(other[0]) + 40 < 400
    many = pack(long * 1000)
    assert many is not None
    assert max(map(len, many)) <= PART
    assert len(unpack(many)) == 1000
    assert len(pickle.dumps(shard_of(folder.finish(a_trajectory())))) < 300  # without its contexts
    assert pack([*long, TrainSample("t", "g", (1,), (0,), (0.0,), (), 0.0)]) is None
    assert isinstance(msgpack.unpackb(other[0]), list)
    folder.close()
