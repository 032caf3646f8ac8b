"""Declarations of worker classes, and what happens to arguments and results. Without Ray."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import orchestrator.cluster as rdist
from orchestrator.api import ConfigError
from orchestrator.cluster.actor import WorkerHost
from orchestrator.cluster.decorators import Declaration, declaration
from orchestrator.cluster.dispatch import aggregate, scatter
from orchestrator.cluster.role_workers import Identity
from orchestrator.resources import ResourceManager


def test_a_declaration_leaves_the_method_as_it_is() -> None:
    @rdist.register(mode="execute_all", aggregate="sum")
    def method(self: object) -> int:
        return 3

    assert method(None) == 3
    assert declaration(method) == Declaration("execute_all", "sum")
    assert declaration(test_a_declaration_leaves_the_method_as_it_is) == Declaration("execute_all", "list")


@pytest.mark.parametrize(
    ("declare", "words"),
    [
        (lambda: rdist.register(mode="execute_some"), "must be one of execute_all"),
        (lambda: rdist.register(aggregate="median"), "must be one of list"),
        (lambda: rdist.register(mode="execute_one", aggregate="sum"), "has one result"),
    ],
)
def test_a_declaration_that_makes_no_sense_is_refused_where_it_is_written(declare: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        declare()


class Taken(rdist.ActorGenCls):
    def shutdown(self) -> None: ...


class Fine(rdist.ActorGenCls):
    def generate(self, ids: list[int]) -> None: ...


@pytest.mark.parametrize(
    ("kind", "worker", "pools", "options", "words"),
    [
        (rdist.ActorTrain, Fine, {"H20": 1}, {}, "derive it from ActorTrainCls"),
        (rdist.Cluster, rdist.Worker, {"H20": 1}, {}, "derive it from ActorTrainCls or ActorGenCls"),
        (rdist.ActorGen, Taken, {"H20": 1}, {}, "clusters have a member of this name"),
        (rdist.ActorGen, Fine, {"CPU": 1}, {}, "no pool serves this class"),
        (rdist.ActorGen, Fine, {"H20": 1}, {"workers": 0}, "at least one worker"),
        (rdist.ActorGen, Fine, {"H20": 1}, {"workers": 1, "devices_per_worker": 2}, "at most 1"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused_before_anything_starts(
    kind: Any, worker: Any, pools: dict[str, int], options: dict[str, Any], words: str
) -> None:
    manager = ResourceManager(pools)
    with pytest.raises(ConfigError, match=words):
        kind(manager, worker, **options)
    assert manager.view().bindings == {}


def test_parts_are_contiguous_and_none_is_empty() -> None:
    assert scatter("m", [1, 2, 3, 4, 5], 2) == [[1, 2], [3, 4, 5]]
    assert scatter("m", (1, 2), 5) == [(1,), (2,)]
    assert scatter("m", [], 3) == [[]]
    assert [part.tolist() for part in scatter("m", np.arange(4), 2)] == [[0, 1], [2, 3]]
    with pytest.raises(ConfigError, match="scatter cuts"):
        scatter("m", "text", 2)


def test_results_are_put_together_as_declared_or_refused() -> None:
    assert aggregate("m", "list", (1, "a")) == [1, "a"]
    assert aggregate("m", "first", (1, 2)) == 1
    assert aggregate("m", "concat", ([1], (2, 3))) == [1, 2, 3]
    assert aggregate("m", "concat", (np.ones(1), np.zeros(1))).tolist() == [1, 0]
    assert aggregate("m", "sum", (1, 2.5)) == 3.5
    assert aggregate("m", "mean", ({"loss": 1.0, "g": np.ones(2)}, {"loss": 3.0, "g": np.zeros(2)}))["loss"] == 2.0
    for how, values in (("sum", ("a", "b")), ("concat", (1, 2)), ("mean", ({"a": 1}, {"b": 1})), ("sum", (None, 1))):
        with pytest.raises(ConfigError, match="use aggregate='list'"):
            aggregate("m", how, values)


def test_a_worker_knows_who_it_is_before_its_init_and_its_errors_are_words() -> None:
    class Mine(rdist.ActorTrainCls):
        def __init__(self, factor: int) -> None:
            self.made = (self.rank, self.world_size, self.hardware, self.devices, factor)

        def look(self) -> Any:
            return self.made

        async def wait(self) -> int:
            return 7

        def fail(self) -> None:
            raise KeyError("nothing there")

    host = WorkerHost(Mine, Identity("mine-1", 1, 2, "H800", (4, 5)), {"factor": 3})
    assert host.call("look", (), {}) == ("ok", (1, 2, "H800", (4, 5), 3))
    assert host.call("wait", (), {}) == ("ok", 7)
    status, (kind, detail, trace, _) = host.call("fail", (), {})
    assert (status, kind, detail) == ("error", "KeyError", "'nothing there'")
    assert "raise KeyError" in trace
    broken = WorkerHost(Mine, Identity("mine-0", 0, 2, "H800", (4,)), {})
    assert broken.ready()[0] == broken.call("look", (), {})[0] == "error"
