"""Declarations of worker classes. Without Ray."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import orchestrator.cluster as rdist
from orchestrator.api import ConfigError
from orchestrator.cluster.actor import WorkerHost
from orchestrator.cluster.decorators import Declaration, declaration
from orchestrator.cluster.role_workers import Identity


def test_a_declaration_leaves_the_method_as_it_is() -> None:
    @rdist.register(mode="execute_all", aggregate="concat")
    def method(self: object) -> int:
        return 3

    assert method(None) == 3
    assert declaration(method) == Declaration("execute_all", "concat")
    assert declaration(test_a_declaration_leaves_the_method_as_it_is) == Declaration("execute_all", "list")


@pytest.mark.parametrize(
    ("declare", "words"),
    [
        (lambda: rdist.register(mode="execute_some"), "must be one of execute_all"),
        (lambda: rdist.register(aggregate="median"), "must be one of list"),
        (lambda: rdist.register(mode="execute_one", aggregate="concat"), "has one result"),
    ],
)
def test_a_declaration_that_makes_no_sense_is_refused_where_it_is_written(declare: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        declare()


class Taken(rdist.ActorGenCls):
    def launch(self) -> None: ...


class Beside(rdist.ActorTrainCls):
    @rdist.register(beside=True)
    async def send(self) -> None: ...


class Fine(rdist.ActorGenCls):
    def generate(self, ids: list[int]) -> None: ...


@pytest.mark.parametrize(
    ("kind", "worker", "words"),
    [
        (rdist.ActorTrain, Fine, "derive it from ActorTrainCls"),
        (rdist.Cluster, rdist.Worker, "derive it from ActorTrainCls or ActorGenCls"),
        (rdist.ActorGen, Taken, "clusters have a member of this name"),
        (rdist.ActorTrain, Beside, "runs beside the other methods: set how many"),
    ],
)
def test_a_class_that_no_cluster_can_be_of_is_refused(kind: Any, worker: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        kind(worker, {"one": None})


def test_a_worker_knows_who_it_is_before_its_init_and_its_errors_are_words() -> None:
    class Mine(rdist.ActorTrainCls):
        def __init__(self) -> None:
            if not self.rank:
                raise ValueError("no weights")
            self.made = (self.rank, self.world_size, self.hardware, self.devices)

        def look(self) -> Any:
            return self.made

        async def wait(self) -> int:
            return 7

        def fail(self) -> None:
            raise KeyError("nothing there")

    async def asked(host: WorkerHost, method: str) -> Any:
        return await host.call(method, (), {})

    host = WorkerHost(Mine, Identity("mine-1", 1, 2, "H800", (4, 5)))
    assert asyncio.run(asked(host, "look")) == ("ok", (1, 2, "H800", (4, 5)))
    assert asyncio.run(asked(host, "wait")) == ("ok", 7)
    status, (kind, detail, trace, _) = asyncio.run(asked(host, "fail"))
    assert (status, kind, detail) == ("error", "KeyError", "'nothing there'")
    assert "raise KeyError" in trace
    broken = WorkerHost(Mine, Identity("mine-0", 0, 2, "H800", (4,)))
    assert asyncio.run(asked(broken, "look"))[1][:2] == ("ValueError", "no weights")
