"""Environment managers in shards: nothing that a shard has is lost with it, and what it says is taken for nothing but that."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import pickle
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator import rollout
from orchestrator.api import (
    Completion,
    ConfigError,
    GenerationRequest,
    Prompt,
    RunError,
    Sampling,
    TokenSequence,
    TrajectoryError,
)
from orchestrator.components import InMemory, ManagerParts, ShardLink
from orchestrator.config import Config, load_config, parse_config
from orchestrator.envs import SHARD_LOST, Episode, StaleTrajectory
from orchestrator.events import EventLog, MemorySink
from orchestrator.manager_shards import shard_managers, shard_messages
from orchestrator.manager_shards.shard_host import ShardHost
from orchestrator.manager_shards.shard_managers import ShardManagers
from orchestrator.manager_shards.shard_messages import EpisodeEnd
from orchestrator.shards.shard_folder import ShardFolder, TrajectoryWriter, lay_by_value, shard_of, turns_by_value
from orchestrator.sim.simulated_run import simulate
from orchestrator.train_samples import to_samples
from orchestrator.transfer.turns import HeldContexts, decode_completions, encode_turns
from scripts.bench.virtual_run import run
from tests.loop.test_shards import a_trajectory

PROMPT, SAMPLING = Prompt("k", "sim", 7, "p"), Sampling(8, stop_token_ids=(1,))


def config_of(seed: int, shards: int = 3, **sim: Any) -> Config:
    return parse_config(
        {
            "run": {"steps": 3, "seed": seed},
            "rollout": {
                "shards": shards,
                "environments": 24,
                "group_size": 4,
                "groups_per_step": 3,
                "workers": 2,
                "worker_restarts": 100,
            },
            "evaluation": {"prompts": 3},
            "sim": sim,
        }
    )


def test_a_run_in_shards_trains_what_a_run_in_one_process_trains() -> None:
    found = {shards: simulate(config_of(1, shards)) for shards in (1, 3)}
    for result in found.values():
        assert (result.summary["reason"], result.ledger["trained"], result.ledger["failed"]) == ("completed", 36, 0)
    assert found[1].summary["success_start"] == found[3].summary["success_start"]
    steps = [[json.loads(line) for line in result.events.splitlines()] for result in found.values()]
    tokens = [[event["tokens"] for event in events if event["kind"] == "step"] for events in steps]
    assert all(tokens[0])
    assert all(tokens[1])


@pytest.mark.parametrize("seed", range(3))
def test_shards_die_and_every_trajectory_is_accounted_for(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout, "FAILED_IN_ROW", 2)  # that so many fail at once is not their fault
    monkeypatch.setattr(rollout, "FAILED_BATCHES", 0)
    result = simulate(config_of(seed, fault_rate=0.05, faults=["kill"]))
    assert (result.unaccounted, result.deadlocks, result.summary["reason"]) == (0, 0, "completed")
    assert result.injected["kill shard"] >= 2
    assert result.ledger["failed_by_cause"] == {SHARD_LOST: result.ledger["failed"]} != {SHARD_LOST: 0}
    told = [json.loads(line) for line in result.events.splitlines()]
    assert any(event["kind"] == "recovered" and event["what"].startswith("shard ") for event in told)


def test_a_run_ends_when_no_shard_is_left() -> None:
    config = config_of(0, fault_rate=0.9, faults=["kill"])
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"worker_restarts": 0})})
    result = simulate(config, strict=False)
    assert (result.unaccounted, result.deadlocks) == (0, 0)
    assert b"no rollout shard left: shard " in result.events


# -- the head, and a shard that says what it likes -------------------------------------------------------------------


class Shard:
    """One that a test speaks for."""

    def __init__(self) -> None:
        self.heard: Callable[[bytes], None] = lambda message: None
        self.lost: Callable[[str], None] = lambda why: None
        self.said: list[tuple[int, list[Any]]] = []
        self.starts = 0
        self.refusals: list[Exception] = []  # of the starts to come
        self.killed: list[None] = []

    async def start(self, heard: Callable[[bytes], None], lost: Callable[[str], None]) -> ShardLink:
        self.heard, self.lost, self.starts = heard, lost, self.starts + 1
        if self.refusals:
            raise self.refusals.pop()
        return copy(self)  # the lists are the same, the link is another one

    def send(self, message: bytes) -> None:
        self.said.append(shard_messages.unpack(message))

    def kill(self) -> None:
        self.killed.append(None)

    @property
    def kills(self) -> int:
        return len(self.killed)

    def ask(self, number: int, *tokens: int, known: int = 0) -> None:
        """``known``: of the tokens, that the head has."""
        request = GenerationRequest(f"t1/{number}", "t1", number, tokens, SAMPLING, "sim", group_id="g")
        turns = encode_turns([(request, TokenSequence(tokens), TokenSequence(tokens[:known]) if known else None)])
        self.heard(shard_messages.pack(shard_messages.TURNS, number, turns))

    def kinds(self) -> str:
        return bytes(kind for kind, _ in self.said).decode()


class Proxy:
    """Says 5, 1 at version 3."""

    def __init__(self) -> None:
        self.asked: list[GenerationRequest] = []
        self.cancelled = 0
        self.hangs, self.reason = False, "stop"

    async def generate(self, request: GenerationRequest) -> Completion:
        self.asked.append(request)
        try:
            await asyncio.sleep(1e6 if self.hangs else 0)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return Completion(request.request_id, (5, 1), (-0.5, -0.25), ((3, 2),), self.reason)

    def note_fault(self, what: str, detail: str) -> None:
        raise AssertionError


class Head:
    """The head with one such shard."""

    def __init__(self, stale: bool = False, restarts: int = 2, others: Sequence[Shard] = ()) -> None:
        self.shard, self.proxy, self.sink = Shard(), Proxy(), MemorySink()
        self.failed: list[BaseException] = []
        self.stale = stale
        self.managers = ShardManagers(
            ManagerParts([self.shard, *others], turns_by_value, {"environments": 9, "rewards": 4}),
            self.proxy,
            EventLog(self.sink, asyncio.get_running_loop().time),
            InMemory(),
            is_stale=lambda first: self.stale and first == 3,
            fail=self.failed.append,
            restarts=restarts,
            window=3600.0,
            silence=60.0,
            patience=20.0,
        )
        self.episode = Episode("t1", "g", PROMPT, 0.0)
        self.running = asyncio.create_task(self.managers.run())

    async def play(self) -> asyncio.Task[None]:
        played = asyncio.create_task(self.managers.play(self.episode, SAMPLING))
        await asyncio.sleep(0.01)
        return played

    async def close(self) -> None:
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)


def test_an_episode_is_played_and_scored_in_a_shard() -> None:
    async def main() -> None:
        head = Head()
        played = await head.play()
        assert head.shard.said == [
            (shard_messages.BEGIN, ["t1", "g", ["k", "sim", 7, "p"], [8, 1.0, 1.0, [1], None], 0.0, False])
        ]
        head.shard.ask(0, 2, 3)
        await asyncio.sleep(0.01)
        head.shard.ask(1, 2, 3, 5, 1, 9)
        await asyncio.sleep(0.01)
        assert head.shard.kinds() == "BACAC"
        answers = [decode_completions(fields[0])[1][0] for kind, fields in head.shard.said if kind == ord("C")]
        assert [completion.token_ids for completion in answers] == [(5, 1), (5, 1)]
        seen = [(turn.observation_ids, turn.action_ids) for turn in head.episode.turns]
        assert seen == [((2, 3), (5, 1)), ((9,), (5, 1))]
        head.shard.heard(shard_messages.pack(shard_messages.PLAYED, "t1", "env 2", True))
        await played
        assert (head.episode.env_version, head.episode.truncated) == ("env 2", True)
        scored = asyncio.create_task(head.managers.score(head.episode.trajectory(4.0)))
        await asyncio.sleep(0.01)
        assert head.shard.said[-1] == (shard_messages.SCORE, ["t1", 4.0])
        original = a_trajectory()
        end = EpisodeEnd("t1", "scored", env_version="env 2", reward=0.5, scored_at=5.0, laid=lay_by_value(original))
        head.shard.heard(replace(end, metrics=(("format", 1.0),)).message())
        reward = await scored
        assert reward == 0.5
        kept = head.managers.finish(head.episode.trajectory(4.0, reward=reward, scored_at=9.0))
        assert (kept.turns, kept.reward, kept.scored_at) == (original.turns, 0.5, 5.0)
        assert kept.metrics == (("format", 1.0),)
        assert not head.shard.kills
        await head.close()

    run(main())


def test_the_head_has_the_contexts_of_what_is_under_way_however_many_and_of_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a shard of thousands of long episodes would send each context whole, turn by turn."""
    monkeypatch.setattr(HeldContexts.__init__, "__defaults__", (8,))

    async def main() -> None:
        head = Head()
        played = await head.play()
        first = tuple(range(2, 9))
        head.shard.ask(0, *first)
        await asyncio.sleep(0.01)
        head.shard.ask(1, *first, 5, 1, 9, known=7)
        await asyncio.sleep(0.01)
        head.shard.ask(2, *first, 5, 1, 9, 5, 1, 9, known=10)
        await asyncio.sleep(0.01)
        assert [len(request.token_ids) for request in head.proxy.asked] == [7, 10, 13]
        head.shard.heard(EpisodeEnd("t1", "stale").message())
        with pytest.raises(StaleTrajectory):
            await played
        head.shard.ask(3, *first)  # it was on its way
        assert (len(head.proxy.asked), len(head.managers._shards[0].held)) == (3, 0)
        await head.close()

    run(main())


def test_an_episode_that_is_called_off_returns_what_there_is_when_the_shard_has_ended_it() -> None:
    async def main() -> None:
        head = Head()
        played = await head.play()
        head.proxy.hangs = True
        head.shard.ask(0, 2, 3)
        await asyncio.sleep(0.01)
        played.cancel()
        await asyncio.sleep(5.0)
        assert not played.done(), "the environment is not given back yet"
        assert head.shard.said[-1] == (shard_messages.END, ["t1"])
        head.shard.heard(shard_messages.pack(shard_messages.PLAYED, "t1", "", False))  # it was on its way
        played.cancel()
        await asyncio.sleep(0.01)
        assert not played.done()
        head.shard.heard(EpisodeEnd("t1", "cancelled", laid=lay_by_value(a_trajectory())).message())
        with pytest.raises(asyncio.CancelledError):
            await played
        assert tuple(head.episode.turns) == a_trajectory().turns
        assert head.proxy.cancelled == 1
        await head.close()

    run(main())


@pytest.mark.parametrize(
    "way", ["dies", "says nothing", "says no message", "ends what it never had", "does not end it"]
)
def test_what_a_shard_had_ends_with_a_cause_when_it_is_gone(way: str) -> None:
    async def main() -> None:
        head = Head()
        played = await head.play()
        head.shard.ask(0, 2, 3)
        await asyncio.sleep(0.01)
        head.proxy.hangs, said_by_it = True, head.shard.heard
        head.shard.ask(1, 2, 3, 5, 1, 9)
        await asyncio.sleep(0.01)
        match way:
            case "dies":
                head.shard.lost("its process ended")
            case "says nothing":
                await asyncio.sleep(61.0)
            case "says no message":
                head.shard.heard(b"D\x93\x01")
            case "ends what it never had":
                head.shard.heard(EpisodeEnd("t2", "stale").message())
            case _:
                played.cancel()
                await asyncio.sleep(21.0)
        with pytest.raises(asyncio.CancelledError if "not end" in way else TrajectoryError) as raised:
            await played
        assert "not end" in way or raised.value.cause == SHARD_LOST  # type: ignore[attr-defined]
        assert [turn.action_ids for turn in head.episode.turns] == [(5, 1)], "the head has seen it"
        await asyncio.sleep(0.1)
        assert (head.shard.kills, head.shard.starts, head.proxy.cancelled) == (1, 2, 1)
        assert '"what":"shard 0"' in head.sink.text()
        assert "1 trajectories end with it" in head.sink.text()
        said_by_it(EpisodeEnd("t1", "stale").message())  # it was on its way
        assert head.shard.kills == 1
        await head.close()

    run(main())


def test_what_the_head_has_seen_takes_the_bytes_of_its_numbers_and_is_kept_when_the_shard_is_gone(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        head, folder, tokens = Head(), ShardFolder(tmp_path / "disk", tmp_path), 100_000
        played = await head.play()
        tracemalloc.start()
        head.shard.ask(0, *range(1000, 1000 + tokens))
        await asyncio.sleep(0.01)
        head.proxy.asked.clear()
        gc.collect()
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert held < 12 * tokens, "the context and the turn, 4 bytes per token each"
        head.shard.lost("its process ended")
        with pytest.raises(TrajectoryError):
            await played
        [turn] = folder.finish(head.episode.trajectory(4.0)).turns
        assert turn.observation_ids == tuple(range(1000, 1000 + tokens))
        assert (turn.action_ids, turn.logprobs, turn.versions) == ((5, 1), (-0.5, -0.25), ((3, 2),))
        folder.close()
        await head.close()

    run(main())


def test_a_score_that_comes_as_its_trajectory_is_ended_is_kept_by_nobody(tmp_path: Path) -> None:
    async def main() -> None:
        head, folder = Head(), ShardFolder(tmp_path / "disk", tmp_path)
        head.managers._adopt = folder.adopt
        await head.play()
        head.shard.heard(shard_messages.pack(shard_messages.PLAYED, "t1", "", False))
        await asyncio.sleep(0.01)
        scored = asyncio.create_task(head.managers.score(head.episode.trajectory(4.0)))
        await asyncio.sleep(0.01)
        laid = TrajectoryWriter(folder.folders, "s0-1").lay(a_trajectory())
        head.shard.heard(EpisodeEnd("t1", "scored", reward=0.5, laid=laid).message())
        scored.cancel()
        with pytest.raises(asyncio.CancelledError):
            await scored
        assert (head.shard.kinds(), len(head.episode.turns), folder.bytes) == ("BS", 2, 0)
        folder.close()
        await head.close()

    run(main())


def test_a_turn_of_a_trajectory_that_is_too_old_is_not_served() -> None:
    async def main() -> None:
        head = Head(stale=True)
        played = await head.play()
        head.shard.ask(0, 2, 3)
        await asyncio.sleep(0.01)
        head.shard.ask(1, 2, 3, 5, 1, 9)
        await asyncio.sleep(0.01)
        assert head.shard.said[-1] == (shard_messages.STALE, ["t1/1"])
        assert len(head.proxy.asked) == 1
        head.shard.heard(EpisodeEnd("t1", "stale").message())
        with pytest.raises(StaleTrajectory):
            await played
        await head.close()

    run(main())


def test_an_answer_that_was_called_back_as_too_old_ends_the_trajectory_in_its_shard() -> None:
    async def main() -> None:
        head = Head(stale=True)
        head.proxy.reason = "abort"
        played = await head.play()
        head.shard.ask(0, 2, 3)
        await asyncio.sleep(0.01)
        assert head.shard.said[-1] == (shard_messages.STALE, ["t1/0"])
        assert head.episode.turns == []
        played.cancel()
        head.shard.heard(EpisodeEnd("t1", "stale").message())
        with pytest.raises(asyncio.CancelledError):
            await played
        await head.close()

    run(main())


def test_a_shard_that_dies_too_often_is_not_started_again_and_the_run_ends() -> None:
    async def main() -> None:
        head = Head(restarts=1)
        for _ in range(2):
            await asyncio.sleep(0.01)
            head.shard.lost("its process ended")
        await asyncio.sleep(0.01)
        assert [str(error) for error in head.failed] == [
            "no rollout shard left: shard 0 died 2 times: its process ended"
        ]
        assert head.shard.starts == 2
        await head.close()

    run(main())


def test_a_shard_that_is_gone_is_an_alarm_by_name_and_the_others_get_its_share() -> None:
    async def main() -> None:
        others = [Shard(), Shard()]
        head = Head(restarts=0, others=others)
        await asyncio.sleep(0.01)
        head.shard.lost("its process ended")
        await asyncio.sleep(0.01)
        assert not head.failed
        (alarm,) = [event for event in map(json.loads, head.sink.lines) if event["kind"] == "alarm"]
        assert alarm["what"] == "shard"
        assert alarm["detail"].startswith("shard 0 is gone for the rest of the run; 2 left, which get its environments")
        for other in others:
            assert other.said == [(shard_messages.RESIZE, ["environments", 5]), (shard_messages.RESIZE, ["rewards", 2])]
        await head.close()

    run(main())


def test_a_config_that_is_wrong_where_a_shard_comes_back_is_a_failed_start_and_at_the_beginning_the_runs_end() -> None:
    async def main() -> None:
        head, wrong = Head(), ConfigError("environment", "e1", "use the same there")
        await asyncio.sleep(0.01)
        head.shard.refusals = [wrong]
        head.shard.lost("its process ended")
        await asyncio.sleep(0.01)
        assert head.shard.starts == 3
        assert not head.running.done()
        assert [json.loads(line).get("detail") for line in head.sink.lines].count(str(wrong)) == 1
        await head.close()

        head = Head()
        head.shard.refusals = [wrong]
        with pytest.raises(ConfigError, match="use the same there"):
            await head.running

    run(main())


def test_counters_of_shards_are_added_up() -> None:
    one = {"size": 2, "replaced": {"a": 1}, "versions": ["1"], "waiting_for": "", "backend": "pool"}
    other = {"size": 3, "replaced": {"b": 2}, "versions": ["1", "2"], "waiting_for": "x", "backend": "pool"}
    assert shard_managers._added(one, other) == {
        "size": 5, "replaced": {"a": 1, "b": 2}, "versions": ["1", "2"], "waiting_for": "x", "backend": "pool"
    }  # fmt: skip


# -- a shard, and a head that a test speaks for ----------------------------------------------------------------------


class Manager:
    """Plays until it is cancelled, and ends as if it had come to its end then."""

    class source:
        @staticmethod
        def resize(size: int) -> None:
            raise AssertionError

    def __init__(self) -> None:
        self.playing = 0

    async def play(self, episode: Episode, sampling: Sampling) -> None:
        self.playing += 1
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(1e6)


@pytest.mark.parametrize("begun", [False, True])
def test_an_episode_that_is_called_off_ends_once_whether_it_had_begun_or_comes_to_its_end_just_then(
    begun: bool,
) -> None:
    async def main() -> None:
        said, manager = list[bytes](), Manager()
        host = ShardHost(lambda proxy: manager, InMemory(), lay_by_value, said.append, 1.0)  # type: ignore[arg-type, return-value]
        prompt, sampling = shard_messages.prompt_row(PROMPT), shard_messages.sampling_row(SAMPLING)
        host.hear(shard_messages.pack(shard_messages.BEGIN, "t1", "g", prompt, sampling, 0.0, False))
        if begun:
            await asyncio.sleep(0.01)
        assert manager.playing == begun
        host.hear(shard_messages.pack(shard_messages.END, "t1"))
        await asyncio.sleep(0.01)
        ends = [
            EpisodeEnd.of(fields) for kind, fields in map(shard_messages.unpack, said) if kind != shard_messages.ALIVE
        ]
        assert [(end.id, end.outcome) for end in ends] == [("t1", "cancelled")]
        host.hear(shard_messages.pack(shard_messages.END, "t1"))  # nobody knows it any more
        await host.close()

    run(main())


# -- messages and files ----------------------------------------------------------------------------------------------


@given(kind=st.sampled_from("BSEACRZTXPDVQ"), rest=st.binary(max_size=60))
def test_bytes_that_are_no_message_are_one_value_error(kind: str, rest: bytes) -> None:
    try:
        found, fields = shard_messages.unpack(kind.encode() + rest)
    except ValueError:
        return
    assert shard_messages.unpack(shard_messages.pack(found, *fields)) == (found, fields)


@pytest.mark.parametrize(
    "fields", [(), ("t1", "", True, 0), ("t1", ""), ("t1", "", 1), ("", "", True), ("t" * 257, "", True)]
)
def test_a_message_with_other_fields_is_refused(fields: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match="a P message with other fields"):
        shard_messages.unpack(shard_messages.pack(shard_messages.PLAYED, *fields))


@given(place=st.integers(0, 400), bit=st.integers(0, 7))
def test_a_damaged_end_is_an_end_or_one_value_error(place: int, bit: int) -> None:
    laid = lay_by_value(a_trajectory())
    data = bytearray(EpisodeEnd("t1", "scored", reward=1.0, laid=replace(laid, data=None, path="/x")).message())
    data[place % len(data)] ^= 1 << bit
    try:
        kind, fields = shard_messages.unpack(bytes(data))
    except ValueError:
        return
    if kind == shard_messages.DONE:
        assert EpisodeEnd.of(fields).outcome in shard_messages.OUTCOMES


def test_what_is_laid_is_adopted_in_place_and_freed_with_the_trajectory(tmp_path: Path) -> None:
    folder, original = ShardFolder(tmp_path / "disk", tmp_path), a_trajectory()
    laid = TrajectoryWriter(folder.folders, "s0-1").lay(original)
    assert Path(laid.path).name == "s0-1-00000000.arrow"
    turns = folder.adopt(laid)
    finished = replace(original, turns=turns)
    shard = shard_of(finished)
    assert shard is not None
    assert (tuple(turns), shard.path, folder.bytes) == (original.turns, laid.path, laid.size)
    assert folder.finish(finished) is finished
    assert shard.contexts == laid.contexts
    del turns, finished, shard
    assert (folder.bytes, Path(laid.path).exists()) == (0, False)
    folder.close()


def test_a_batch_reads_what_a_process_laid_that_was_killed_since_also_when_another_run_cleans_up(
    tmp_path: Path,
) -> None:
    program = """
import pickle, sys
from pathlib import Path
from orchestrator.shards.shard_folder import TrajectoryWriter
folders, trajectory = pickle.load(sys.stdin.buffer)
writer = TrajectoryWriter(folders, "s0-1")
sys.stdout.buffer.write(pickle.dumps((writer.lay(trajectory), writer.lay(trajectory).path)))
sys.stdout.buffer.flush()
sys.stdin.read()
"""
    folder, original = ShardFolder(tmp_path / "disk", tmp_path), a_trajectory()
    child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        child.stdin.write(pickle.dumps((folder.folders, original)))
        child.stdin.flush()
        laid, unsaid = pickle.load(child.stdout)
    finally:
        child.kill()
        child.wait(20)
    finished = replace(original, turns=folder.adopt(laid))
    other = ShardFolder(tmp_path / "other", tmp_path)
    assert folder.lost([finished]) == []
    for sample, expected in zip(to_samples(finished), to_samples(original), strict=True):
        assert sample.source is not None
        assert sample.source.read()[0].tolist() == list(expected.token_ids)
    os.unlink(laid.path)  # one that is gone all the same is told by its trajectory's name, for the ledger
    assert folder.lost([finished]) == [original.id]
    folder.close()
    other.close()
    assert not Path(unsaid).exists()


def test_what_comes_by_value_is_a_file_of_the_run_and_refused_where_it_is_damaged(tmp_path: Path) -> None:
    folder, original = ShardFolder(tmp_path / "disk", tmp_path), a_trajectory()
    laid = lay_by_value(original)
    turns = folder.adopt(laid)
    shard = shard_of(replace(original, turns=turns))
    assert shard is not None
    assert (tuple(turns), Path(shard.path).parent, shard.contexts) == (original.turns, folder.folders[0], laid.contexts)
    for data in (b"", b"x" * laid.size):
        with pytest.raises(RunError, match="is damaged"):
            folder.adopt(replace(laid, data=data))
    del turns, shard
    assert (folder.bytes, [*folder.folders[0].iterdir()]) == (0, [])
    folder.close()


def test_a_file_elsewhere_or_another_than_was_laid_is_refused(tmp_path: Path) -> None:
    folder = ShardFolder(tmp_path / "disk", tmp_path)
    writer = TrajectoryWriter(folder.folders, "s0-1")
    laid = writer.lay(a_trajectory())
    strange = tmp_path / "strange.arrow"
    strange.write_bytes(Path(laid.path).read_bytes())
    with pytest.raises(RunError, match=r"strange.arrow lies in none of"):
        folder.adopt(replace(laid, path=str(strange)))
    Path(laid.path).write_bytes(b"x" * laid.size)
    with pytest.raises(RunError, match="is damaged"):
        folder.adopt(laid)
    folder.close()


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (("run.mode=sync", "rollout.alpha=0"), "take their turns in step"),
        (("rollout.prediction.enabled=true",), "rollout.prediction reads every turn"),
        (("reward.timeout=adaptive",), "learns from every call"),
        (
            ("reward.judge.url=http://127.0.0.1:1", "reward.judge.model=m", "reward.judge.criterion=c"),
            "calls of a judge",
        ),
        (('tools.urls={search = "http://127.0.0.1:1"}',), "calls of tools"),
        (("rollout.environments=8",), "leaves shards without an environment"),
    ],
)
def test_what_shards_would_not_share_is_refused(overrides: tuple[str, ...], why: str) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        load_config(None, ["rollout.shards=9", *overrides])
    assert "rollout.shards = 9" in str(refused.value)


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        ((), "rollout.shards_on = 'nodes': there is one node"),
        (("ray.address=auto", "rollout.shards=1"), "there are no other shards"),
        (("ray.address=auto", "reward.url=http://127.0.0.1:80/f"), "reward.url = .* is this machine's own"),
        (
            ("ray.address=auto", "reward.host=ray_serve"),
            "reward.host = 'ray_serve': answers only on the node of its proxy",
        ),
    ],
)
def test_what_shards_on_other_nodes_would_not_reach_is_refused(overrides: tuple[str, ...], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        load_config(None, ["rollout.shards=2", "rollout.shards_on=nodes", *overrides])


# -- processes -------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_shard_processes_play_a_real_task_and_one_is_killed(tmp_path: Path) -> None:
    from tests.support.sharded_run import ShardedRun

    async def main() -> None:
        async with ShardedRun(tmp_path) as sharded:
            played = [asyncio.create_task(sharded.episode(f"t{number}")) for number in range(12)]
            await asyncio.sleep(1.0)
            os.kill(next(iter(sharded.shards.pids().values())), signal.SIGKILL)
            ends = await asyncio.gather(*played)
            assert {"scored", SHARD_LOST} == set(ends)
            assert await sharded.episode("after") == "scored"
        assert sharded.left_behind() == []

    asyncio.run(main())


@pytest.mark.engine
@pytest.mark.long
@pytest.mark.timeout(300)
def test_shards_over_two_nodes_play_a_real_task_and_the_actor_of_one_is_killed(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    from tests.support.ray_nodes import nodes
    from tests.support.sharded_run import ShardedRun

    async def main() -> None:
        async with ShardedRun(tmp_path, over_nodes=True) as sharded:
            actors = sharded.actors()
            assert len(set(actors.values())) == 2, "a node each"
            played = [asyncio.create_task(sharded.episode(f"t{number}")) for number in range(12)]
            await asyncio.sleep(1.0)
            os.kill(next(iter(actors)), signal.SIGKILL)
            ends = await asyncio.gather(*played)
            assert {"scored", SHARD_LOST} == set(ends)
            assert await sharded.episode("after") == "scored"
            assert await sharded.episode("after this") == "scored"
        assert len(sharded.pids) >= 6, "each shard and each reward host, under a watcher"
        for _ in range(50):
            if not sharded.left_behind():
                break
            await asyncio.sleep(0.1)
        assert sharded.left_behind() == []

    with nodes(2):
        asyncio.run(main())


@pytest.mark.engine
@pytest.mark.long
@pytest.mark.timeout(300)
def test_agent_programs_are_played_on_two_nodes(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    from tests.support.ray_nodes import nodes
    from tests.support.sharded_run import ShardedRun

    async def main() -> None:
        async with ShardedRun(tmp_path, agents=True, over_nodes=True) as sharded:
            assert len(set(sharded.actors().values())) == 2
            assert await asyncio.gather(*(sharded.episode(f"t{number}") for number in range(4))) == ["scored"] * 4

    with nodes(2):
        asyncio.run(main())


@pytest.mark.long
def test_agent_programs_are_played_in_shards(tmp_path: Path) -> None:
    from tests.support.sharded_run import ShardedRun

    async def main() -> None:
        async with ShardedRun(tmp_path, agents=True) as sharded:
            ends = await asyncio.gather(*(sharded.episode(f"t{number}") for number in range(4)))
        assert ends == ["scored"] * 4
        assert sharded.left_behind() == []

    asyncio.run(main())
