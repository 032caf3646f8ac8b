"""The trajectory store: equal after a round trip, complete or absent, never rewritten, in step with the ledger."""

from __future__ import annotations

import asyncio
import gc
import math
import re
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator import store as store_module
from orchestrator.api import Prompt, RoutedExperts, RunError, Trajectory, Turn
from orchestrator.shards.shard_folder import ShardFolder
from orchestrator.store import (
    StoredRow,
    TrajectoryStore,
    count_by_outcome,
    read_trajectories,
    to_trajectory,
    write_part,
)


def make_trajectory(number: int, version: int = 0, turns: int = 2, reward: float | None = 1.0) -> Trajectory:
    prompt = Prompt(key=f"map{number % 3}", task="frozenlake", seed=number, payload="SFFF/FHFH")
    made = tuple(
        Turn(
            observation_ids=(1, 2, 3 + index),
            action_ids=(4, 5),
            logprobs=(-0.1 * (number + 1), -1 / 3),
            versions=((version, 1), (version + 1, 1)) if index == turns - 1 else ((version, 2),),
            reward=0.0,
            done=index == turns - 1,
            generate_seconds=0.25,
            environment_seconds=0.001,
        )
        for index in range(turns)
    )
    return Trajectory(
        id=f"t{number:08d}",
        group_id=f"g{number // 4:07d}",
        task="frozenlake",
        prompt=prompt,
        turns=made,
        reward=reward,
        env_version="1.0",
        env_seed=number,
        truncated=False,
        errors=("env_timeout: map 3",) if number % 5 == 4 else (),
        started_at=float(number),
        finished_at=number + 1.5,
        scored_at=number + 1.625,
        metrics=(("format", 1.0), ("length", 0.5)) if number % 2 else (),
    )


def stored(folder: Path) -> list[Trajectory]:
    rows = sorted(read_trajectories(folder).to_pylist(), key=lambda row: row["trajectory_id"])
    return [to_trajectory(row) for row in rows]


def test_stored_and_read_back_a_trajectory_is_equal(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path)
    originals = [make_trajectory(number, version=number % 2) for number in range(12)]
    for trajectory in originals:
        store.append(trajectory, step=0, outcome="trained")
    store.close()
    assert stored(tmp_path) == originals


ids = st.lists(st.integers(0, 2**31 - 1), max_size=5).map(tuple)


any_experts = st.builds(
    RoutedExperts,
    st.integers(0, 99),
    st.just(2),
    st.just(3),
    st.just(2),
    st.binary(max_size=4).map(lambda one: one * 12),
)


@st.composite
def any_turn(draw: st.DrawFn) -> Turn:
    actions = draw(ids)
    return Turn(
        observation_ids=draw(ids),
        action_ids=actions,
        logprobs=tuple(draw(st.floats(max_value=0.0, allow_nan=False)) for _ in actions),
        versions=((draw(st.integers(0, 9)), len(actions)),) if actions else (),
        reward=draw(st.floats(-1, 1)),
        done=draw(st.booleans()),
        generate_seconds=draw(st.floats(0, 100)),
        environment_seconds=draw(st.floats(0, 100)),
        experts=draw(st.none() | any_experts),
    )


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(
    turns=st.lists(any_turn(), max_size=4).map(tuple),
    reward=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    task=st.sampled_from(["frozenlake", "a b/c=d", "märz", "%41"]),
    payload=st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    errors=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=9), max_size=2).map(tuple),
)
def test_any_trajectory_survives_the_round_trip(
    tmp_path_factory: pytest.TempPathFactory,
    turns: tuple[Turn, ...],
    reward: float | None,
    task: str,
    payload: str,
    errors: tuple[str, ...],
) -> None:
    folder = tmp_path_factory.mktemp("store")
    original = Trajectory(
        id="t0",
        group_id="g0",
        task=task,
        prompt=Prompt("key", task, 7, payload),
        turns=turns,
        reward=reward,
        env_version="1",
        env_seed=7,
        truncated=True,
        errors=errors,
    )
    store = TrajectoryStore(folder)
    store.append(original, 3, "failed: env_timeout")
    store.close()
    assert stored(folder) == [original]


def test_the_place_in_the_batch_is_kept(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path)
    store.append(make_trajectory(0), 0, "trained")
    store.append(make_trajectory(1), 1, "trained", position=1)
    store.append(make_trajectory(2), 1, "trained", position=0)
    store.append(make_trajectory(3), 1, "filtered: zero_variance")
    store.close()
    table = read_trajectories(tmp_path, columns=["trajectory_id", "position"])
    assert table.schema.field("position").type == pa.int32()
    places = {row["trajectory_id"]: row["position"] for row in table.to_pylist()}
    assert places == {"t00000000": None, "t00000001": 1, "t00000002": 0, "t00000003": None}
    assert stored(tmp_path) == [make_trajectory(number) for number in range(4)]


@pytest.mark.parametrize("writes", [False, True], ids=["turns in memory", "in a shard"])
def test_the_experts_that_engines_chose_are_kept_and_others_have_none(tmp_path: Path, writes: bool) -> None:
    first, last = make_trajectory(1).turns
    known = replace(
        make_trajectory(1), turns=(first, replace(last, experts=RoutedExperts(2, 3, 2, 1, bytes(range(24)))))
    )
    shards = ShardFolder(tmp_path / "shards", tmp_path)
    store = TrajectoryStore(tmp_path / "store", finish=shards.finish if writes else lambda one: one)
    store.append(make_trajectory(0), 0, "trained")
    store.append(known, 1, "trained")
    store.close()
    assert stored(tmp_path / "store") == [make_trajectory(0), known]


def test_log_probs_keep_their_last_bit(tmp_path: Path) -> None:
    value = -math.pi * 1e-17
    turn = Turn((1,), (2, 3), (value, -0.0), ((0, 2),))
    original = Trajectory("t", "g", "x", Prompt("k", "x", 0, ""), (turn,), 0.0, "1", 0, False)
    store = TrajectoryStore(tmp_path)
    store.append(original, 0, "trained")
    store.flush()
    read = stored(tmp_path)[0].turns[0].logprobs
    assert [number.hex() for number in read] == [value.hex(), (-0.0).hex()]


def test_one_that_generated_nothing_is_kept_too(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path)
    store.append(make_trajectory(0, turns=0, reward=None), 0, "aborted_redundant")
    store.flush()
    row = read_trajectories(tmp_path).to_pylist()[0]
    assert (row["first_version"], row["version"], row["total_reward"], row["total_tokens"]) == (-1, -1, None, 0)


def test_files_lie_by_task_date_and_version_and_hold_one_step(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path)
    for step in (0, 1):
        for version in (0, 1):
            store.append(make_trajectory(10 * step + version, version), step, "trained")
    store.append(make_trajectory(99, 1), 1, "evicted_stale")
    store.flush()
    files = sorted(file.relative_to(tmp_path).as_posix() for file in tmp_path.rglob("*.parquet"))
    assert files == [
        "task=frozenlake/date=1970-01-01/version=0/part-000001.parquet",
        "task=frozenlake/date=1970-01-01/version=0/part-000002.parquet",
        "task=frozenlake/date=1970-01-01/version=1/part-000003.parquet",
        "task=frozenlake/date=1970-01-01/version=1/part-000004.parquet",
        "task=frozenlake/date=1970-01-01/version=1/part-000005.parquet",
    ]
    for file in tmp_path.rglob("*.parquet"):
        table = pq.ParquetFile(file).read(columns=["step", "outcome"])
        assert len(set(table["step"].to_pylist())) == 1
        assert len({outcome == "trained" for outcome in table["outcome"].to_pylist()}) == 1


def test_only_the_asked_columns_and_rows_are_read(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path)
    for number in range(6):
        store.append(make_trajectory(number, version=number % 3, reward=float(number % 2)), number % 3, "trained")
    store.flush()
    table = read_trajectories(tmp_path, columns=["trajectory_id", "version"], filter=pc.field("version") == 1)
    assert table.column_names == ["trajectory_id", "version"]
    assert sorted(table["trajectory_id"].to_pylist()) == ["t00000001", "t00000004"]
    reward = read_trajectories(tmp_path, columns=["total_reward"], filter=pc.field("step") >= 2)
    assert sorted(reward["total_reward"].to_pylist()) == [0.0, 1.0]


def test_numbers_go_on_after_a_resume_and_nothing_is_rewritten(tmp_path: Path) -> None:
    first = TrajectoryStore(tmp_path)
    first.append(make_trajectory(0), 0, "trained")
    first.close()
    before = {file: file.read_bytes() for file in tmp_path.rglob("*.parquet")}
    second = TrajectoryStore(tmp_path)
    second.append(make_trajectory(1), 1, "trained")
    second.close()
    names = sorted(file.name for file in tmp_path.rglob("*.parquet"))
    assert names == ["part-000001.parquet", "part-000002.parquet"]
    assert all(file.read_bytes() == content for file, content in before.items())


def test_going_back_drops_what_was_trained_after_the_checkpoint_and_only_that(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path)
    for step in range(4):
        store.append(make_trajectory(step, version=step), step, "trained")
        store.append(make_trajectory(10 + step, version=step), step, "evicted_stale")
    store.close()
    resumed = TrajectoryStore(tmp_path)
    assert resumed.discard_after(2) == 2  # the checkpoint holds steps 0 and 1
    kept = read_trajectories(tmp_path, columns=["trajectory_id", "outcome"]).to_pylist()
    assert sorted(row["trajectory_id"] for row in kept if row["outcome"] == "trained") == ["t00000000", "t00000001"]
    assert count_by_outcome(tmp_path) == {"evicted_stale": 4, "trained": 2}
    resumed.append(make_trajectory(2, version=2), 2, "trained")  # the step is trained again
    resumed.close()
    assert count_by_outcome(tmp_path) == {"evicted_stale": 4, "trained": 3}
    assert TrajectoryStore(tmp_path).discard_after(2) == 1  # and again, without a clash of names
    assert len(list((tmp_path / "_rolled_back").rglob("*.parquet"))) == 3


def test_a_crash_while_writing_leaves_no_visible_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = TrajectoryStore(tmp_path)
    store.append(make_trajectory(0, version=0), 0, "trained")
    store.append(make_trajectory(1, version=1), 0, "trained")
    real = store_module.os.replace
    calls: list[str] = []

    def fail_second(source: Path, target: Path) -> None:
        calls.append(str(target))
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        real(source, target)

    monkeypatch.setattr(store_module.os, "replace", fail_second)
    with pytest.raises(RunError, match=r"cannot be written.*No space left"):
        store.flush()
    assert count_by_outcome(tmp_path) == {"trained": 1}
    store.flush()  # space was made: the rest follows, nothing twice
    assert stored(tmp_path) == [make_trajectory(0, version=0), make_trajectory(1, version=1)]


def test_leftovers_of_a_killed_writer_are_cleared_and_never_read(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path)
    store.append(make_trajectory(0), 0, "trained")
    store.flush()
    leftover = tmp_path / "task=frozenlake" / "date=1970-01-01" / "version=0" / ".part-000002.parquet.partial"
    leftover.write_bytes(b"PAR1 cut")
    assert count_by_outcome(tmp_path) == {"trained": 1}
    TrajectoryStore(tmp_path)
    assert not leftover.exists()


def test_memory_is_bounded_by_the_rows_of_a_file(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path, rows_per_file=5)
    for number in range(12):
        store.append(make_trajectory(number), 0, "trained")
    while sum(count_by_outcome(tmp_path).values()) < 5:  # a thread writes
        time.sleep(0.01)
    store.close()
    assert count_by_outcome(tmp_path) == {"trained": 12}
    assert max(pq.ParquetFile(file).metadata.num_rows for file in tmp_path.rglob("*.parquet")) == 5


def test_a_run_without_trajectories_reads_as_empty(tmp_path: Path) -> None:
    assert count_by_outcome(tmp_path / "trajectories") == {}
    assert read_trajectories(tmp_path, columns=["step"]).num_rows == 0


def test_what_a_thread_could_not_write_is_pending_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = TrajectoryStore(tmp_path, rows_per_file=4)
    real = store_module.os.replace

    def full(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store_module.os, "replace", full)
    for number in range(4):
        store.append(make_trajectory(number), 0, "trained")
    with pytest.raises(RunError, match=r"cannot be written.*No space left"):
        asyncio.run(store.flushed())
    monkeypatch.setattr(store_module.os, "replace", real)
    asyncio.run(store.flushed())
    assert stored(tmp_path) == [make_trajectory(number) for number in range(4)]


def test_the_event_loop_goes_on_while_a_thread_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, ticks, at_work = TrajectoryStore(tmp_path), [0], threading.Event()
    real = store_module.pq.write_table

    def slow(*arguments: object, **options: object) -> None:
        assert at_work.wait(30)
        real(*arguments, **options)

    monkeypatch.setattr(store_module.pq, "write_table", slow)

    async def scenario() -> None:
        store.append(make_trajectory(0), 0, "trained")
        writing = asyncio.ensure_future(store.flushed())
        for _ in range(10):
            await asyncio.sleep(0.001)
            ticks[0] += 1
        assert not writing.done()
        at_work.set()
        await writing

    asyncio.run(scenario())
    assert ticks == [10]
    assert stored(tmp_path) == [make_trajectory(0)]


def test_what_is_known_of_folders_does_not_grow_with_the_versions_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_FOLDERS", 3)
    store = TrajectoryStore(tmp_path / "trajectories")
    for version in range(10):
        store.append(make_trajectory(version, version), version, "trained")
        store.flush()
    assert len(store._known) <= 3
    assert len(stored(tmp_path / "trajectories")) == 10
    store.close()


def test_the_journals_are_synced_before_a_file_is_written(tmp_path: Path) -> None:
    seen: list[int] = []

    class Journal:
        def sync(self) -> None:
            seen.append(len(list(tmp_path.rglob("*.parquet"))))

    store = TrajectoryStore(tmp_path, journals=[Journal()])
    store.flush()
    assert seen == []  # nothing to write
    store.append(make_trajectory(0), 0, "trained")
    store.flush()
    assert seen == [0]


class HeldWriter:
    """Writes a part when it may."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.may, self.asked, self.seconds = threading.Event(), threading.Event(), seconds

    def write_part(self, final: Path, step: int, trained: bool, rows: Sequence[StoredRow]) -> None:
        self.asked.set()
        assert self.may.wait(30)
        time.sleep(self.seconds)
        write_part(final, step, trained, rows)


def turns_held() -> int:
    gc.collect()
    return sum(isinstance(one, Turn) for one in gc.get_objects())


@pytest.fixture
def shards(tmp_path: Path) -> Iterator[ShardFolder]:
    (tmp_path / "memory").mkdir()
    folder = ShardFolder(tmp_path / "shards", tmp_path / "memory")
    yield folder
    folder.close()


def test_what_waits_for_a_slow_writer_is_held_by_reference_and_says_when_it_is_too_much(
    tmp_path: Path, shards: ShardFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns are gone while their numbers wait in shards; nothing waits for the writer but who asks whether there is room."""
    monkeypatch.setattr(store_module, "BACKLOG", 40 * store_module._ROW_BYTES)
    writer = HeldWriter()
    store = TrajectoryStore(tmp_path / "store", 8, finish=shards.finish, writer=writer)
    before, said = turns_held(), []
    for number in range(60):
        trajectory = make_trajectory(number)
        said.append(bool(store.behind()))
        store.append(shards.finish(trajectory) if number % 2 else trajectory, 0, "evicted_stale")
    del trajectory
    assert writer.asked.wait(30)
    assert 20 < said.index(True) < 40  # their numbers count, too
    assert all(said[said.index(True) :])
    assert turns_held() == before
    assert re.fullmatch(r"the trajectory store: 0 MiB of 60 trajectories are not on disk yet", store.behind())
    writer.may.set()
    while store.behind():
        time.sleep(0.01)
    store.close()
    assert stored(tmp_path / "store") == [make_trajectory(number) for number in range(60)]
    assert shards.bytes == 0


def test_a_batch_that_is_larger_than_what_may_wait_is_waited_for_by_the_one_after_the_next(
    tmp_path: Path, shards: ShardFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With routed experts a batch has gigabytes: a writer that has it on disk within a step holds nothing up."""
    monkeypatch.setattr(store_module, "BACKLOG", 8 * store_module._ROW_BYTES)
    writer = HeldWriter()
    store = TrajectoryStore(tmp_path / "store", finish=shards.finish, writer=writer)
    said = []
    for step in range(3):
        for number in range(20):
            store.append(make_trajectory(20 * step + number), step, "trained")
        said.append(bool(store.behind()))
    assert said == [False, True, True]
    writer.may.set()
    while store.behind():
        time.sleep(0.01)
    store.close()
    assert len(stored(tmp_path / "store")) == 60


def test_a_file_is_bounded_by_its_bytes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_FILE_BYTES", 3 * store_module._ROW_BYTES)
    store = TrajectoryStore(tmp_path)
    for number in range(7):
        store.append(make_trajectory(number), 0, "trained")
    store.close()
    assert stored(tmp_path) == [make_trajectory(number) for number in range(7)]
    assert max(pq.ParquetFile(file).metadata.num_rows for file in tmp_path.rglob("*.parquet")) == 2


def test_a_flush_ends_though_more_is_appended_all_the_while(tmp_path: Path, shards: ShardFolder) -> None:
    """A checkpoint waits for what was appended before it, not for all that a run ever makes."""
    writer = HeldWriter(0.02)
    writer.may.set()
    store = TrajectoryStore(tmp_path / "store", finish=shards.finish, writer=writer)

    async def scenario() -> None:
        store.append(make_trajectory(0, version=9), 0, "trained")
        flush, number = asyncio.ensure_future(store.flushed()), 0
        while not flush.done():
            assert number < 300
            number += 1
            store.append(make_trajectory(number), 0, "trained")
            await asyncio.sleep(0.005)
        assert "t00000000" in [one.id for one in stored(tmp_path / "store")]

    asyncio.run(scenario())
    store.close()


def test_what_the_writer_met_is_told_to_who_asks_for_room_and_to_no_callback_that_appends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = TrajectoryStore(tmp_path, rows_per_file=1)
    real = store_module.os.replace

    def full(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store_module.os, "replace", full)
    store.append(make_trajectory(0), 0, "trained")
    assert store._writing is not None
    assert store._writing.exception(30) is not None
    store.append(make_trajectory(1), 0, "trained")
    with pytest.raises(RunError, match=r"cannot be written.*No space left"):
        store.behind()
    monkeypatch.setattr(store_module.os, "replace", real)
    store.close()
    assert stored(tmp_path) == [make_trajectory(0), make_trajectory(1)]
