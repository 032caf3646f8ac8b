"""Declarations of worker classes, and what happens to arguments and results. Without Ray."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import numpy as np
import pytest

import orchestrator.cluster as rdist
from orchestrator.api import ConfigError
from orchestrator.cluster.actor import WorkerHost
from orchestrator.cluster.decorators import Declaration, declaration
from orchestrator.cluster.dispatch import aggregate, scatter
from orchestrator.cluster.role_workers import TOKEN, Identity, invoke
from orchestrator.resources import ResourceManager


def test_declarations_add_up_and_leave_the_method_as_it_is() -> None:
    @rdist.register(mode="execute_all", aggregate="sum")
    @rdist.hw_mapping(hw_affinity={"FrozenLake": "H800", "default": "H20"})
    def method(self: object, tag_name: str = "default") -> int:
        return 3

    assert method(None) == 3
    assert declaration(method) == Declaration("execute_all", "sum", {"FrozenLake": "H800", "default": "H20"})
    assert declaration(test_declarations_add_up_and_leave_the_method_as_it_is) == Declaration()


@pytest.mark.parametrize(
    ("declare", "words"),
    [
        (lambda: rdist.register(mode="execute_some"), "must be one of execute_all"),
        (lambda: rdist.register(aggregate="median"), "must be one of list"),
        (lambda: rdist.register(mode="execute_one", aggregate="sum"), "has one result"),
        (lambda: rdist.hw_mapping({}), "write it as"),
        (lambda: rdist.hw_mapping({"FrozenLake": 800}), "write it as"),  # type: ignore[dict-item]
        (lambda: rdist.register_serverless("reward_proxy", "fc://xxx.xxx"), "write it as https"),
        (lambda: rdist.register_serverless("reward_proxy", "https://me:secret@host/f"), "the token goes into"),
        (lambda: rdist.register_serverless("reward-proxy", "https://host/f"), "must be a name"),
    ],
)
def test_a_declaration_that_makes_no_sense_is_refused_where_it_is_written(declare: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        declare()


class Taken(rdist.ActorGenCls):
    def shutdown(self) -> None: ...


class NoTag(rdist.ActorGenCls):
    @rdist.hw_mapping({"default": "H20"})
    def generate(self, ids: list[int]) -> None: ...


class Fine(rdist.ActorGenCls):
    def generate(self, ids: list[int]) -> None: ...


@pytest.mark.parametrize(
    ("kind", "worker", "pools", "options", "words"),
    [
        (rdist.ActorTrain, Fine, {"H20": 1}, {}, "derive it from ActorTrainCls"),
        (rdist.Cluster, rdist.Worker, {"H20": 1}, {}, "derive it from ActorTrainCls, ActorGenCls"),
        (rdist.ActorGen, Taken, {"H20": 1}, {}, "clusters have a member of this name"),
        (rdist.ActorGen, NoTag, {"H20": 1}, {}, "add tag_name"),
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

    host = WorkerHost(Mine, Identity("mine-1", 1, 2, "H800", (4, 5)), {}, {"factor": 3})
    assert host.call("look", (), {}) == ("ok", (1, 2, "H800", (4, 5), 3))
    assert host.call("wait", (), {}) == ("ok", 7)
    status, (kind, detail, trace, _) = host.call("fail", (), {})
    assert (status, kind, detail) == ("error", "KeyError", "'nothing there'")
    assert "raise KeyError" in trace
    broken = WorkerHost(Mine, Identity("mine-0", 0, 2, "H800", (4,)), {}, {})
    assert broken.ready()[0] == broken.call("look", (), {})[0] == "error"


@pytest.fixture
def function() -> Iterator[tuple[str, dict[str, Any]]]:
    """A function URL, and what it answers and was asked."""
    state: dict[str, Any] = {"status": 200, "body": b'{"reward": 1}', "headers": {}, "asked": []}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            state["asked"].append((json.loads(body), self.headers.get("Authorization")))
            self.send_response(state["status"])
            for name, value in {"Content-Length": str(len(state["body"])), **state["headers"]}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(state["body"])

        def log_message(self, *args: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/f", state
    server.shutdown()
    server.server_close()


def test_a_serverless_call_is_json_in_json_out_with_the_token(
    function: tuple[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, state = function
    monkeypatch.setenv(TOKEN, "sesame")
    assert invoke(url, {"prompt": "p"}) == {"reward": 1}
    assert state["asked"] == [({"prompt": "p"}, "Bearer sesame")]
    with pytest.raises(RuntimeError, match="unencrypted"):
        invoke("http://10.0.0.9/f", {})


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"status": 500}, "did not answer"),
        ({"status": 302, "headers": {"Location": "http://127.0.0.1:9/"}}, "did not answer"),
        ({"body": b"hello"}, "not answer JSON"),
        (
            {
                "body": b'{"errorType": "ValueError", "errorMessage": "bad"}',
                "headers": {"X-Amz-Function-Error": "Unhandled"},
            },
            "failed: ValueError: bad",
        ),
        ({"body": b"1" * (1 << 20) + b"1"}, "more than"),
    ],
)
def test_what_a_serverless_function_does_wrong_is_named(
    function: tuple[str, dict[str, Any]], answer: dict[str, Any], words: str
) -> None:
    url, state = function
    state.update(answer)
    with pytest.raises(RuntimeError, match=words):
        invoke(url, {})
