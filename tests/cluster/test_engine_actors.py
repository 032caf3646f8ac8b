"""What crosses the border of a Ray actor: answers as they are, errors by kind. Without Ray: the handle is a double."""

from __future__ import annotations

import asyncio
import os
import pickle
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import orchestrator.cluster as rdist
from orchestrator.api import (
    COMMAND_STATUS,
    CommandError,
    Completion,
    ConfigError,
    GenerationRequest,
    ProcessDied,
    Prompt,
    RetryableError,
    RolloutWorker,
    RunError,
    Sampling,
    SessionWorker,
    TokenSequence,
    TrainBatch,
    Trainer,
    TrainSample,
    Trajectory,
    Turn,
)
from orchestrator.cluster.actor import WorkerHost
from orchestrator.config import parse_config
from orchestrator.runtime import engine_actors
from orchestrator.runtime.engine_actors import (
    MegatronRank,
    RayTrainer,
    RayWorker,
    TrainerRanks,
    VllmEngine,
    meeting_point,
)
from orchestrator.runtime.real_run import start_ray
from orchestrator.runtime.shard_objects import IN_CALL, BatchReferences, NodeObjects, NodeShard
from orchestrator.shards.shard_folder import ShardFolder
from orchestrator.train_samples import to_samples
from tests.support.engines import rollout_worker


class Unpicklable(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("this exception does not cross processes")


class Hosted:
    """Records calls; ``method`` raises what it is given."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        async def record(*args: Any, **kwargs: Any) -> None:
            self.calls.append((name, args, kwargs))

        return record

    async def fail(self, error: BaseException) -> None:
        raise error


class Method:
    """As Ray's: ``remote`` returns something to await; everything that crosses is pickled."""

    def __init__(self, function: Any) -> None:
        self._function = function

    async def remote(self, *args: Any, **kwargs: Any) -> Any:
        return pickle.loads(pickle.dumps(await self._function(*args, **kwargs)))


class Handle:
    def __init__(self, host: WorkerHost) -> None:
        self.call, self.seen = Method(host.call), Method(host.seen)


def actor() -> tuple[RayWorker, Hosted]:
    """A worker whose engine is the double; the host, the handle, the declarations and the cluster are real."""
    worker, hosted = rollout_worker("w"), Hosted()
    host = WorkerHost(VllmEngine, worker._actor.identity)
    host._worker.engine = hosted  # type: ignore[attr-defined]
    worker._actor._handle = Handle(host)
    return worker, hosted


@pytest.mark.parametrize(
    ("raised", "expected", "words"),
    [
        (ConfigError("model", "x", "give a path"), ConfigError, "give a path"),
        (RetryableError("the relay is full"), RetryableError, "the relay is full"),
        (ValueError("no such thing"), RetryableError, "ValueError: no such thing"),
        (Unpicklable("lost"), RetryableError, "Unpicklable: lost"),
    ],
)
def test_errors_arrive_as_their_kind_with_the_cause_in_words(
    raised: Exception, expected: type[Exception], words: str
) -> None:
    found, _ = actor()
    with pytest.raises(expected, match=words):
        asyncio.run(found._call("beyond", "fail", raised))


@pytest.mark.parametrize("code", COMMAND_STATUS)
def test_a_refused_command_arrives_as_itself(code: str) -> None:
    found, _ = actor()
    with pytest.raises(CommandError) as refused:
        asyncio.run(found._call("beyond", "fail", CommandError(code, "because")))
    assert (refused.value.code, refused.value.detail) == (code, "because")
    assert refused.value.status == COMMAND_STATUS[code]


def test_every_command_reaches_the_engine_with_its_arguments() -> None:
    worker, hosted = actor()
    assert isinstance(worker, RolloutWorker)

    async def main() -> None:
        await worker.abort(["a"], trajectories=("t",), groups=["g"])
        await worker.prioritize({"t": 3})
        await worker.prepare(4)
        await worker.update(5)

        await worker.release("asleep")
        await worker.reclaim()

    asyncio.run(main())
    assert hosted.calls == [
        ("abort", (["a"],), {"trajectories": ("t",), "groups": ["g"]}),
        ("prioritize", ({"t": 3},), {}),
        ("prepare", (4,), {}),
        ("update", (5,), {}),
        ("release", ("asleep",), {}),
        ("reclaim", (), {}),
    ]


def test_turns_and_completions_cross_as_bytes_and_an_engine_that_lost_contexts_is_sent_them_whole() -> None:
    worker, hosted = actor()
    assert isinstance(worker, SessionWorker)
    context, given = TokenSequence(range(1000)), []
    done = Completion("r0", (5, 6), (-0.5, -1 / 3), ((3, 2),), "stop")

    async def add(requests: Any) -> None:
        given.extend(requests)

    async def completions() -> list[Completion]:
        return [done]

    hosted.add, hosted.completions = add, completions

    async def main() -> list[int]:
        nonlocal context
        sizes = []
        for turn in range(3):
            if turn == 2:
                worker._actor._handle.call._function.__self__._worker._contexts.clear()
            request = GenerationRequest(f"r{turn}", "t", turn, context, Sampling(4), "task")
            carried = worker._contexts._send

            async def send(message: bytes, carried: Any = carried) -> Any:
                sizes.append(len(message))
                return await carried(message)

            worker._contexts._send = send
            await worker.add([request])
            worker._contexts._send = carried
            assert given[-1] == request
            context += (7,)
        assert await worker.completions() == [done]
        return sizes

    first, second, third, fourth = asyncio.run(main())
    assert second == third < 200 < 4000 < first < fourth  # the third was in vain
    assert worker.take_resent() == (1, 1002)


# -- several ranks of one trainer ------------------------------------------------------------------------------------


class Engine:
    """In place of Megatron in one rank: answers each call with its rank, fails or hangs as told."""

    def __init__(self, fate: BaseException | str = "") -> None:
        self.fate, self.kwargs = fate, {}
        self.asked: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        async def answer(*args: Any) -> Any:
            self.asked.append((name, args))
            if isinstance(self.fate, BaseException):
                raise self.fate
            if self.fate == "hang":
                await asyncio.Event().wait()
            return self.kwargs.get("rank", 0)

        return answer


ENGINES: list[Engine] = []
SAMPLE = TrainSample("t", "g", (1, 2), (0, 1), (0.0, -1.0), ((0, 1),), 1.0)


def engine(**kwargs: Any) -> Engine:
    """The plugin's class, by name."""
    found = ENGINES[kwargs.get("rank", 0)]
    found.kwargs = kwargs
    return found


class Mortal(Method):
    """A rank whose fate is ProcessDied dies as Ray says it."""

    def __init__(self, host: WorkerHost, found: Engine) -> None:
        super().__init__(host.call)
        self._engine = found

    async def remote(self, *args: Any, **kwargs: Any) -> Any:
        ray = pytest.importorskip("ray")
        if isinstance(self._engine.fate, ProcessDied):
            self._engine.asked.append(("died", ()))
            raise ray.exceptions.RayError(str(self._engine.fate))
        return await super().remote(*args, **kwargs)


def trainer(*fates: BaseException | str) -> tuple[RayTrainer, list[Engine]]:
    """Its cluster and declared workers are real; processes and Megatron are not."""
    found = RayTrainer("tests.cluster.test_engine_actors:engine", {}, len(fates))
    ENGINES[:] = [Engine() for _ in fates]
    for actor, made in zip(found.ranks.actors, ENGINES, strict=True):
        host = WorkerHost(MegatronRank, actor.identity)
        actor._handle = type("Handle", (), {"call": Mortal(host, made), "seen": Method(host.seen)})
    asyncio.run(found.create({"model": "m"}))
    for made, fate in zip(ENGINES, fates, strict=True):
        made.fate = fate
    return found, [*ENGINES]


def test_every_rank_gets_every_call_and_rank_0_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_actors, "meeting_point", lambda: "tcp://here:1")
    found, ranks = trainer("", "", "")
    assert asyncio.run(found.call("status", 1)) == 0
    meeting = {"world_size": 3, "init_method": "tcp://here:1"}
    for number, rank in enumerate(ranks):
        assert rank.kwargs == {"model": "m", "rank": number, **meeting}
        assert rank.asked == [("status", (1,))]


def test_a_single_rank_is_not_told_about_ranks() -> None:
    _, (rank,) = trainer("")
    assert rank.kwargs == {"model": "m"}


@pytest.mark.parametrize(
    ("method", "args"),
    [
        ("train_step", (TrainBatch(1, 2, (SAMPLE,)),)),
        ("feed", ((SAMPLE,), 2)),
        ("publish", ()),
        ("save", ("folder",)),
        ("load", ("folder",)),
    ],
)
def test_the_run_calls_its_trainer_as_the_worker_class_declares_it(
    method: str, args: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, ranks = trainer("", "")
    assert isinstance(found.ranks, rdist.ActorTrain)
    assert isinstance(found, Trainer)
    assert asyncio.run(getattr(found, method)(*args)) == (None if method == "feed" else 0), "rank 0 answers"
    assert [rank.asked for rank in ranks] == [[(method, args)]] * 2, "all ranks are called"

    # Declared otherwise, it is called otherwise; not declared, it cannot be called.
    declared = getattr(MegatronRank, method)

    @rdist.register(mode="execute_rank_zero")
    async def otherwise(self: MegatronRank, *given: Any) -> Any:
        return await declared(self, *given)

    monkeypatch.setattr(MegatronRank, method, otherwise)
    found, ranks = trainer("", "")
    asyncio.run(getattr(found, method)(*args))
    assert [len(rank.asked) for rank in ranks] == [1, 0]
    monkeypatch.setattr(MegatronRank, method, None)
    found, _ = trainer("", "")
    with pytest.raises(ConfigError, match="MegatronRank has:"):
        asyncio.run(getattr(found, method)(*args))


def in_store(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, bool]]:
    """In place of Ray's object store: what was put, and whether the thread of the event loop did it. A reference is a number."""
    ray = pytest.importorskip("ray")
    stored: list[tuple[Any, bool]] = []

    def put(what: Any) -> int:
        stored.append((what, threading.current_thread() is threading.main_thread()))
        return len(stored) - 1

    monkeypatch.setattr(ray, "put", put)
    monkeypatch.setattr(ray, "get", lambda reference: stored[reference][0])
    return stored


def test_samples_in_shards_cross_as_references_and_every_rank_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, shards = 50_000, ShardFolder(tmp_path / "disk", tmp_path)
    turn = Turn((1, 2), (3,) * tokens, (-0.5,) * tokens, ((4, tokens),))
    finished = shards.finish(Trajectory("t", "g", "task", Prompt("k", "task", 0, ""), (turn,), 1.0, "v", 0, False))
    samples, sizes = tuple(to_samples(finished)), list[int]()
    dumps = pickle.dumps
    monkeypatch.setattr(pickle, "dumps", lambda what: (data := dumps(what), sizes.append(len(data)))[0])
    stored = in_store(monkeypatch)
    found, ranks = trainer("", "")
    asyncio.run(found.train_step(TrainBatch(3, 4, samples)))
    asyncio.run(found.feed(samples, 4))
    assert not stored, "short ones go in the call"
    assert max(sizes) < 1000
    for rank in ranks:
        (_, (batch,)), (_, (fed, version)) = rank.asked
        assert (batch, fed, version) == (TrainBatch(3, 4, samples), samples, 4)
        token_ids, positions, logprobs = batch.samples[0].source.read()
        assert (len(token_ids), len(positions), set(logprobs.tolist())) == (tokens + 2, tokens, {-0.5})
    shards.close()


def test_a_call_of_a_rank_is_as_small_however_large_the_batch_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = ShardFolder(tmp_path / "disk", tmp_path)
    turn = Turn((1, 2), (3,), (-0.5,), ((4, 1),))
    finished = shards.finish(Trajectory("t", "g", "task", Prompt("k", "task", 0, ""), (turn,), 1.0, "v", 0, False))
    stored, sizes, dumps = in_store(monkeypatch), list[int](), pickle.dumps
    monkeypatch.setattr(pickle, "dumps", lambda what: (data := dumps(what), sizes.append(len(data)))[0])
    found, ranks = trainer("", "")
    for number, most, put in ((50, IN_CALL + 1000, 0), (1000, 1000, 1)):
        sizes.clear()
        batch = TrainBatch(3, 4, tuple(to_samples(finished)) * number)
        asyncio.run(found.train_step(batch))
        assert max(sizes) < most
        assert len(stored) == put, "once for both ranks, where it is long"
        for rank in ranks:
            assert rank.asked[-1] == ("train_step", (batch,))
    assert sum(map(len, stored[0][0][0])) > 100_000
    assert not any(on_loop for _, on_loop in stored), "beside the loop"
    shards.close()


@pytest.mark.parametrize("kind", ["ObjectStoreFullError", "OutOfDiskError"])  # it spills to the disk first
def test_what_rays_object_store_lost_or_has_no_room_for_is_an_error_that_names_the_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    ray = pytest.importorskip("ray")
    full = getattr(ray.exceptions, kind)

    def lose(_: Any) -> Any:
        raise ray.exceptions.RayError("gone or full")

    def refuse(_: Any) -> Any:
        raise full("gone or full")

    monkeypatch.setattr(ray, "get", lose)
    monkeypatch.setattr(ray, "put", refuse)
    with pytest.raises(RunError, match="shard /a is lost: Ray cannot fetch it: gone or full"):
        NodeShard("/a", 8, "0", "object").open()
    with pytest.raises(RunError, match="references of a batch are lost: gone or full"):
        BatchReferences(object()).samples()
    with pytest.raises(RunError, match="Ray's object store has no room for the references of a batch: gone or full"):
        NodeObjects(spread=True).refer([])
    shards = ShardFolder(tmp_path / "disk", tmp_path)
    turn = Turn((1,), (2,), (-0.5,), ((4, 1),))
    finished = shards.finish(Trajectory("t", "g", "task", Prompt("k", "task", 0, ""), (turn,), 1.0, "v", 0, False))
    with pytest.raises(RunError, match=r"Ray's object store has no room for shard .*: gone or full"):
        NodeObjects(spread=True).refer(to_samples(finished))
    shards.close()
    with pytest.raises(RunError, match="is lost: "):
        NodeObjects(spread=True).refer(to_samples(finished))


FILLED = """
import sys
from pathlib import Path

from orchestrator.api import Prompt, RunError, Trajectory, Turn
from orchestrator.runtime.real_run import _start_local_ray
from orchestrator.runtime.shard_objects import NodeObjects
from orchestrator.shards.shard_folder import ShardFolder
from orchestrator.train_samples import to_samples

_start_local_ray(num_cpus=1, object_store_memory=80 << 20, include_dashboard=False, log_to_driver=False)
folder, tokens = Path(sys.argv[1]), 2_000_000  # 16 MB a shard
shards, objects, held = ShardFolder(folder / "disk", folder), NodeObjects(spread=True), []
for number in range(8):
    turn = Turn((1,), (2,) * tokens, (-0.5,) * tokens, ((4, tokens),))
    one = Trajectory(f"t{number}", "g", "task", Prompt("k", "task", 0, ""), (turn,), 1.0, "v", 0, False)
    samples = to_samples(shards.finish(one))
    try:
        held.append((samples, objects.refer(samples)))
    except RunError as error:
        print(len(held), error)
        break
shards.close()
"""


def test_a_store_of_ray_that_is_full_on_a_disk_that_is_full_is_an_error_that_names_the_shard(tmp_path: Path) -> None:
    """Ray's own store of 80 MiB; it takes any disk for full here."""
    pytest.importorskip("ray")
    command, full = [sys.executable, "-c", FILLED, str(tmp_path)], {"RAY_local_fs_capacity_threshold": "0.0001"}
    done = subprocess.run(command, env=os.environ | full, capture_output=True, text=True, timeout=120, check=True)
    said = next(line for line in done.stdout.splitlines() if "no room" in line)
    assert int(said.split(" ")[0]) >= 3, "what there is room for is taken"
    assert re.search(r"Ray's object store has no room for shard \S+\.arrow: Local disk is full", said)


@pytest.mark.parametrize(
    ("fates", "kind", "words"),
    [
        (["", ConfigError("model", "x", "give a path")], ConfigError, "give a path"),
        ([RetryableError("lost a peer"), ConfigError("model", "x", "fix")], ConfigError, "fix"),
        (
            [RetryableError("lost a peer"), ProcessDied("killed")],
            RetryableError,
            "rank 1 of 2: trainer-1 died: killed",
        ),
        (
            ["hang", ProcessDied("killed")],
            RetryableError,
            "rank 1 of 2: trainer-1 died: killed; waiting for it: rank 0",
        ),
        (
            ["hang", RetryableError("boom")],
            RetryableError,
            r"(?s)rank 1 of 2: trainer-1: RetryableError: boom.*; waiting for it: rank 0",
        ),
        (
            [RetryableError("the relay is full"), ""],
            RetryableError,
            "rank 0 of 2: trainer: RetryableError: the relay is full",
        ),
    ],
)
def test_a_rank_that_fails_is_named_and_nobody_waits_for_ever(
    fates: list[Any], kind: type[Exception], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrainerRanks, "_patience", 0.05)
    found, ranks = trainer(*fates)
    with pytest.raises(kind, match=words):
        asyncio.run(found.train_step(TrainBatch(1, 2, (SAMPLE,))))
    for rank in ranks:
        rank.fate = ""
    if "hang" in fates or any(isinstance(fate, ProcessDied) for fate in fates):
        with pytest.raises(RetryableError, match="the trainer has lost a rank"):
            asyncio.run(found.train_step(TrainBatch(1, 2, (SAMPLE,))))
        assert all(len(rank.asked) == 1 for rank in ranks)
    else:
        assert asyncio.run(found.publish()) == 0


def test_ranks_meet_at_a_free_port_of_this_node() -> None:
    pytest.importorskip("ray")
    host, port = meeting_point().removeprefix("tcp://").rsplit(":", 1)
    assert host
    assert 0 < int(port) < 65536


@pytest.mark.parametrize(("failures", "starts"), [(2, True), (3, False)])
def test_a_local_ray_that_is_slow_to_start_gets_three_tries(
    failures: int, starts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    tries: list[int] = []

    def init(**_: Any) -> None:
        tries.append(1)
        if len(tries) <= failures:
            raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", init)
    config = parse_config({})
    if starts:
        start_ray(config)
    else:
        with pytest.raises(ConfigError, match="timed out during startup"):
            start_ray(config)
    assert len(tries) == 3
