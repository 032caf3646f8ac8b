"""What crosses the border of a Ray actor: answers as they are, errors by kind. Without Ray: the handle is a double."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import pytest

from orchestrator.api import COMMAND_STATUS, CommandError, ConfigError, RetryableError, RolloutWorker
from orchestrator.runtime.actors import Actor, ActorHost, RayWorker


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

    asyncio.run(main())
    assert hosted.calls == [
        ("abort", (["a"],), {"trajectories": ["t"], "groups": ["g"]}),
        ("prioritize", ({"t": 3},), {}),
        ("prepare", (4,), {}),
        ("update", (5,), {}),
    ]
