"""What crosses the border of a Ray actor: answers as they are, errors by kind. Without Ray: the handle is a double."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import pytest

from orchestrator.api import COMMAND_STATUS, CommandError, ConfigError, ProcessDied, RetryableError, RolloutWorker
from orchestrator.config import parse_config
from orchestrator.runtime import engine_actors
from orchestrator.runtime.engine_actors import Actor, ActorHost, RayTrainer, RayWorker, meeting_point
from orchestrator.runtime.real_run import start_ray


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
    def __init__(self, host: ActorHost) -> None:
        self.call = Method(host.call)


def actor() -> tuple[Actor, Hosted]:
    host, hosted = ActorHost(), Hosted()
    host._object = hosted
    found = Actor("w", {})
    found._handle = Handle(host)
    return found, hosted


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
        asyncio.run(found.call("fail", raised))


@pytest.mark.parametrize("code", COMMAND_STATUS)
def test_a_refused_command_arrives_as_itself(code: str) -> None:
    found, _ = actor()
    with pytest.raises(CommandError) as refused:
        asyncio.run(found.call("fail", CommandError(code, "because")))
    assert (refused.value.code, refused.value.detail) == (code, "because")
    assert refused.value.status == COMMAND_STATUS[code]


def test_every_command_reaches_the_engine_with_its_arguments() -> None:
    worker = RayWorker("w", "module:Class", {}, {})
    assert isinstance(worker, RolloutWorker)
    worker._actor, hosted = actor()

    async def main() -> None:
        await worker.abort(["a"], trajectories=("t",), groups=["g"])
        await worker.prioritize({"t": 3})
        await worker.prepare(4)
        await worker.update(5)

        await worker.release("asleep")
        await worker.reclaim()

    asyncio.run(main())
    assert hosted.calls == [
        ("abort", (["a"],), {"trajectories": ["t"], "groups": ["g"]}),
        ("prioritize", ({"t": 3},), {}),
        ("prepare", (4,), {}),
        ("update", (5,), {}),
        ("release", ("asleep",), {}),
        ("reclaim", (), {}),
    ]


# -- several ranks of one trainer ------------------------------------------------------------------------------------


class Rank:
    """In place of an actor: answers each call with its number, fails or hangs as told."""

    def __init__(self, rank: int, fate: BaseException | str = "") -> None:
        self.name = f"trainer-{rank}"
        self.rank, self.fate = rank, fate
        self.asked: list[tuple[str, tuple[Any, ...]]] = []

    async def ask(self, what: str, *args: Any) -> Any:
        self.asked.append((what, args))
        if what == "function":
            return "tcp://here:1"
        if isinstance(self.fate, BaseException):
            raise self.fate
        if self.fate == "hang":
            await asyncio.Event().wait()
        return self.rank

    def kill(self) -> None:
        pass


def trainer(*fates: BaseException | str) -> tuple[RayTrainer, list[Rank]]:
    found, ranks = RayTrainer("module:Class", {}, len(fates)), [Rank(rank, fate) for rank, fate in enumerate(fates)]
    found._actors = ranks  # type: ignore[assignment]
    return found, ranks


def test_every_rank_gets_every_call_and_rank_0_answers() -> None:
    found, ranks = trainer("", "", "")
    asyncio.run(found.create({"model": "m"}))
    assert asyncio.run(found.call("status", 1)) == 0
    meeting = {"world_size": 3, "init_method": "tcp://here:1"}
    for rank in ranks:
        expected = ("create", ("module:Class", {"model": "m", "rank": rank.rank, **meeting}))
        assert rank.asked[-2:] == [expected, ("call", ("status", 1))]


def test_a_single_rank_is_not_told_about_ranks() -> None:
    found, (rank,) = trainer("")
    asyncio.run(found.create({"model": "m"}))
    assert rank.asked == [("create", ("module:Class", {"model": "m"}))]


@pytest.mark.parametrize(
    ("fates", "kind", "words"),
    [
        (["", ConfigError("model", "x", "give a path")], ConfigError, "give a path"),
        ([RetryableError("lost a peer"), ConfigError("model", "x", "fix")], ConfigError, "fix"),
        (
            [RetryableError("lost a peer"), ProcessDied("trainer-1 died")],
            RetryableError,
            "rank 1 of 2: trainer-1 died",
        ),
        (
            ["hang", ProcessDied("trainer-1 died")],
            RetryableError,
            "rank 1 of 2: trainer-1 died; waiting for it: rank 0",
        ),
        (["hang", RetryableError("boom")], RetryableError, "rank 1 of 2: boom; waiting for it: rank 0"),
        ([RetryableError("the relay is full"), ""], RetryableError, "rank 0 of 2: the relay is full"),
    ],
)
def test_a_rank_that_fails_is_named_and_nobody_waits_for_ever(
    fates: list[Any], kind: type[Exception], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_actors, "_FAIL_TOGETHER", 0.05)
    found, ranks = trainer(*fates)
    with pytest.raises(kind, match=words):
        asyncio.run(found.call("train_step"))
    for rank in ranks:
        rank.fate = ""
    if "hang" in fates or any(isinstance(fate, ProcessDied) for fate in fates):
        with pytest.raises(RetryableError, match="the trainer has lost a rank"):
            asyncio.run(found.call("train_step"))
        assert all(len(rank.asked) == 1 for rank in ranks)
    else:
        assert asyncio.run(found.call("publish")) == 0


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
