"""Whatever comes in a body, an answer or a line of another process: the same result, or the one documented error."""

from __future__ import annotations

import asyncio
import ipaddress
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
from hypothesis import strategies as st

from orchestrator.api import (
    CommandError,
    Completion,
    CompletionTiming,
    ConfigError,
    GenerationRequest,
    Observation,
    Prompt,
    RetryableError,
    SampleFacts,
    Sampling,
    StepResult,
    TokenSequence,
    TrajectoryError,
    UpdateResult,
    bearer,
    urls,
)
from orchestrator.api import http as api_http
from orchestrator.borrowing.http_worker import HttpWorker, _object, _place, _read
from orchestrator.borrowing.server_exchange import offer_of
from orchestrator.environments import environment_wire
from orchestrator.environments.pod_watch import PodWatch
from orchestrator.manager_shards import shard_messages
from orchestrator.rewards import code_judge, function_client, function_service, llm_judge, process_pool, suite_judge
from orchestrator.rewards.function_client import FunctionFailed
from orchestrator.sandbox import SandboxOutcome, spawner, workspace
from orchestrator.shards.shard_folder import LaidTrajectory
from orchestrator.shards.trajectory_shard import ShardContext
from orchestrator.transfer.turns import decode_completions, decode_turns, encode_completions, encode_turns
from tests.fuzz import inputs, weights
from tests.fuzz.harness import Check, Drawn, harness, merged
from vllm_rlplugin.server import request_bodies

_WORD = "the word of this call"


def check_types(value: Any, of: str) -> None:
    """Fields of a record hold what their annotations say: nothing later meets a text where a number belongs."""
    kinds = {"int": int, "float": (int, float), "str": str, "bool": bool}
    for name, field in value.__dataclass_fields__.items():
        if (wanted := kinds.get(str(field.type))) is not None:
            held = getattr(value, name)
            assert isinstance(held, wanted), f"{of}.{name} is {held!r:.80}"  # type: ignore[arg-type]
            assert field.type == "bool" or not isinstance(held, bool), f"{of}.{name} is {held!r}"
            assert held == held, f"{of}.{name} is not a number"


# -- what a vllm serve is sent ---------------------------------------------------------------------------------------------

REQUEST = GenerationRequest("r-1", "t-1", 0, (1, 2, 3), Sampling(8, 1.0, 0.9, (2,), 7), "nim", -3, 40, 1.5, "g-1")
BODIES: dict[str, tuple[type[request_bodies.Body], Any]] = {
    "add": (request_bodies.AddBody, {"requests": [asdict(REQUEST)], "partial": True}),
    "abort": (request_bodies.AbortBody, {"request_ids": ["a"], "trajectories": ["b"], "groups": ["c"], "all": False}),
    "prioritize": (request_bodies.PrioritizeBody, {"priorities": {"t-1": 4}}),
    "version": (request_bodies.VersionBody, {"version": 4}),
    "kv-fetch": (
        request_bodies.KvFetchBody,
        {"trajectory_id": "t", "token_ids": [1], "source": "host:1", "limit": 2.0},
    ),
    "abort-requests": (request_bodies.AbortRequestsBody, {"request_ids": ["a"]}),
    "init": (request_bodies.InitBody, {"init_info": {"endpoint": {"job": "x"}}}),
    "update-weights": (request_bodies.UpdateWeightsBody, {"update_info": {"version": 3}}),
    "finish": (request_bodies.FinishBody, {"weight_version": "3"}),
}


@harness(
    "vllm_rlplugin/server/request_bodies.py",
    "vllm_rlplugin/server/control_route.py",
    "orchestrator/api/http.py",
    refuses="status 400",
)
def control_endpoint(folder: Path) -> Drawn:
    """A control endpoint answers every body with 200 or 400; what passes is a record that goes back to the same body."""
    yield merged({name: _control_endpoint(name) for name in BODIES})


def _control_endpoint(name: str) -> tuple[st.SearchStrategy[Any], Check]:
    """Through the routes' own class: token, limits, parsing, shape."""
    from fastapi import APIRouter, FastAPI
    from starlette.testclient import TestClient

    from vllm_rlplugin.server.bearer_auth import BearerGuard
    from vllm_rlplugin.server.control_route import STATE, ControlRoute, RouteContext

    model, valid = BODIES[name]
    router, seen = APIRouter(route_class=ControlRoute), []

    async def take(body: Any) -> dict[str, int]:
        seen.append(body)
        return {}

    take.__annotations__["body"] = model
    router.post("/rl/it")(take)
    app = FastAPI()
    app.include_router(router)
    token = "t" * 32
    setattr(
        app.state,
        STATE,
        RouteContext(BearerGuard(token, (ipaddress.ip_network("127.0.0.1/32"),)), 1 << 20, "server", lambda: 0),
    )
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    client = TestClient(app, client=("127.0.0.1", 5))
    answered = client.post("/rl/it", content=json.dumps(valid), headers=headers)
    assert answered.status_code == 200, answered.text

    def check(data: bytes) -> None:
        seen.clear()
        with inputs.bounded():
            answer = client.post("/rl/it", content=data, headers=headers)
        assert answer.status_code in (200, 400), answer.text
        if answer.status_code == 400:
            assert "error" in answer.json(), answer.text
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        for body in seen:
            if isinstance(body, request_bodies.AddBody):
                for item in body.requests:
                    record = item.to_request()
                    check_types(record, "request")
                    check_types(record.sampling, "sampling")
                    assert all(type(token) is int and token >= 0 for token in record.token_ids)
            assert model.model_validate(body.model_dump()) == body

    return inputs.texts(valid), check


# -- what a vllm serve answers ---------------------------------------------------------------------------------------------

COMPLETION = Completion("r-1", (5, 6), (-0.5, -1.25), ((3, 2),), "stop", CompletionTiming(0.1, 0.2, 0.1, 0.05))
STATS = {
    "running": 1,
    "waiting": 0,
    "kv_used": 3,
    "kv_capacity": 9,
    "preemptions": 0,
    "tokens_per_s": 4.5,
    "version": 2,
    "shared": {"pages": 3, "budget": 8, "page_bytes": 4096, "ttft_slack": -0.5, "tpot_slack": None, "late_first": 2},
}
ANSWERS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "stats": (STATS, api_http.stats_from_json),
    "update": (asdict(UpdateResult(3, 100, 0.5, 2)), api_http.update_result_from_json),
    "kv": (
        {"tokens": 5, "moved": 4, "bytes": 90, "seconds": 0.5, "why": "", "carrier": "tcp"},
        api_http.kv_moved_from_json,
    ),
    "status": ({"instance": "a.1", "history": {"job": "x", "metadata": "y"}}, _place),
    "offer": (
        {
            "lease": {"job": "x", "place": "y"},
            "device": {"serving_use": 0.25, "serving_now": 0.5, "seconds": 9.0, "lends": True},
            "claims": [{"job": "z", "place": "y", "wanted": 2, "weight": 1.5}],
        },
        lambda status: offer_of("http://a", status, ("a", "b")),
    ),
}


@harness(
    "orchestrator/api/http.py",
    "orchestrator/borrowing/http_worker.py",
    "orchestrator/borrowing/server_exchange.py",
    refuses="RetryableError",
)
def server_answer(folder: Path) -> Drawn:
    """An answer of a served worker is a record whose fields have their types, its counts agreeing, or refused."""
    yield merged({name: _server_answer(name) for name in ANSWERS})


def _server_answer(name: str) -> tuple[st.SearchStrategy[Any], Check]:
    valid, parse = ANSWERS[name]
    assert _read(parse, json.loads(json.dumps(valid)), name) is not None

    def check(data: bytes) -> None:
        def read() -> Any:
            answer = _object(data)
            return None if answer is None else _read(parse, answer, name)

        found = inputs.survives(read, RetryableError)
        if name == "offer" and found is not None:
            assert all(0 <= one < float("inf") for one in (found.share, *found.before))
            assert all(0 < claim.weight < float("inf") for claim in found.claims)
        elif found is not None and name != "status":
            check_types(found, name)

    return inputs.texts(valid), check


def _edited(valid: bytes) -> st.SearchStrategy[bytes]:
    """Anything, ``valid`` cut or with other bytes in it, and other headers before its numbers."""
    places = st.lists(st.tuples(st.integers(0, len(valid) - 1), st.integers(0, 255)), max_size=4)

    def put(edits: list[tuple[int, int]]) -> bytes:
        found = bytearray(valid)
        for place, value in edits:
            found[place] = value
        return bytes(found)

    end = 4 + int.from_bytes(valid[:4], "little")
    numbers = st.one_of(st.integers(-(2**63), 2**64 - 1), st.floats(), st.booleans(), st.none())
    leaves = st.one_of(numbers, st.text(max_size=4), st.binary(max_size=17))
    rows = st.recursive(leaves, lambda inner: st.lists(inner, max_size=13), max_leaves=30)

    def led(fields: tuple[Any, Any]) -> bytes:
        names = list(msgpack.unpackb(valid[4:end]))
        packed = msgpack.packb(dict(zip(names, fields, strict=True)))
        return len(packed).to_bytes(4, "little") + packed + valid[end:]

    headers = st.tuples(rows, st.one_of(rows, st.lists(rows, max_size=3))).map(led)
    return st.one_of(
        st.binary(max_size=64), places.map(put), st.integers(0, len(valid)).map(lambda cut: valid[:cut]), headers
    )


@harness("orchestrator/transfer/turns/turn_messages.py", refuses="CommandError or ValueError")
def turn_message(folder: Path) -> Drawn:
    """Turns in binary are requests, and completions are completions, whose fields have their types and whose counts agree."""
    context = TokenSequence(REQUEST.token_ids)
    turns = encode_turns([(REQUEST, context + range(4, 5), context), (REQUEST, context, None)], ["t-0"])
    completions = encode_completions(3, [COMPLETION, COMPLETION])

    def check_turns(data: bytes) -> None:
        found = inputs.survives(lambda: decode_turns(data), CommandError)
        for turn in () if found is None else found.turns:
            check_types(turn.request, "request")
            check_types(turn.request.sampling, "sampling")
            assert turn.base >= 0

    def check_completions(data: bytes) -> None:
        found = inputs.survives(lambda: decode_completions(data), ValueError)
        for item in () if found is None else found[1]:
            check_types(item, "completion")
            check_types(item.timing, "timing")
            assert len(item.token_ids) == len(item.logprobs) == sum(count for _, count in item.versions)

    yield merged({"turns": (_edited(turns), check_turns), "completions": (_edited(completions), check_completions)})


@harness("orchestrator/borrowing/http_worker.py", refuses="one of our errors")
def server_refusal(folder: Path) -> Drawn:
    """Whatever a server says when it refuses, it is one of our five errors."""
    worker = HttpWorker("http://127.0.0.1:1", "t" * 16)
    valid = {"error": {"message": "no", "type": "invalid_request", "param": None, "code": 400}}
    statuses = st.sampled_from((301, 400, 401, 403, 404, 409, 413, 422, 429, 500, 503))

    def check(drawn: tuple[int, bytes]) -> None:
        status, data = drawn
        with inputs.bounded():
            error = worker._refusal("/rl/add", status, _object(data))
        assert type(error).__module__ == "orchestrator.api.errors"

    yield st.tuples(statuses, inputs.texts(valid)), check


@harness("orchestrator/api/urls.py", "orchestrator/rewards/function_client.py", refuses="ConfigError")
def address(folder: Path) -> Drawn:
    """An address is taken, or what is wrong with it is said."""
    pieces = st.sampled_from(
        (
            "http",
            "https",
            "redis",
            "rediss",
            "://",
            "/",
            ":",
            "@",
            "[",
            "]",
            "::1",
            "127.0.0.1",
            "user",
            "pw",
            "99999",
            "?",
            "#",
            " ",
        )
    )
    drawn = st.one_of(st.lists(st.one_of(pieces, st.text(max_size=3)), max_size=9).map("".join), st.text(max_size=20))

    def check(url: str) -> None:
        with inputs.bounded():
            for allowed in (False, True):
                assert isinstance(urls.mistake(url, allowed), str)
                assert isinstance(urls.redis_mistake(url, allowed), str)
            try:
                function_client.FunctionClient(url)
                HttpWorker(url, "t" * 16)
            except ConfigError:
                return

    yield drawn, check


# -- environments, tools, rewards, judges ----------------------------------------------------------------------------------


@harness(
    "orchestrator/environments/environment_wire.py",
    "orchestrator/environments/tool_functions.py",
    refuses="TrajectoryError",
)
def environment_reply(folder: Path) -> Drawn:
    """A reply of an environment is a step with a finite reward and integer tokens, and a version, or ends its trajectory."""
    step = {**environment_wire.step_fields(StepResult(Observation((3, 4)), 0.5, done=True)), "version": "nim 1"}
    valid = {"id": 4, "result": step, "tools": {"calculator": {"calls": 3, "failed": 0}}}

    def check(data: bytes) -> None:
        from orchestrator.environments.tool_functions import ToolTally

        note = ToolTally(["calculator"]).of_process()
        found = inputs.survives(
            lambda: environment_wire.read_step(environment_wire.reply_of(data, 4, note)), TrajectoryError
        )
        if found is not None:
            assert type(found.reward) is float
            assert abs(found.reward) < float("inf")
            assert all(type(token) is int for token in found.observation.token_ids)
        inputs.survives(
            lambda: environment_wire.read_observation(environment_wire.reply_of(data, 4), "reset"), TrajectoryError
        )
        said = inputs.survives(
            lambda: environment_wire.version_of(environment_wire.reply_of(data, 4).get("version")), TrajectoryError
        )
        assert said is None or len(said.encode()) <= 4 * environment_wire.MAX_VERSION

    yield inputs.texts(valid), check


@harness("orchestrator/environments/pod_watch.py", refuses="ValueError, after which all is asked for again")
def pod_list(folder: Path) -> Drawn:
    """What an API server says of pods is what is known of them, by name; or all are asked for again."""

    class Refused(Exception):
        pass

    class Said:
        status = 200

        def __init__(self, text: bytes) -> None:
            self._lines, self.content = [text], self

        async def read(self) -> bytes:
            return self._lines[0]

        async def readline(self) -> bytes:
            return self._lines.pop() if self._lines else b""

        def close(self) -> None:
            pass

    async def hear(answers: list[bytes]) -> PodWatch:
        async def list_pods(**_: object) -> Said:
            if not answers:
                raise Refused
            return Said(answers.pop(0))

        watch = PodWatch(list_pods, lambda item: item, Refused)
        watch.expect("p1")
        await watch.begin()
        await watch._follow(watch._open)
        return watch

    loop = asyncio.new_event_loop()
    pod = {"metadata": {"name": "p1", "resourceVersion": "7"}, "status": {"phase": "Running"}}
    listed = {"kind": "PodList", "metadata": {"resourceVersion": "5", "continue": ""}, "items": [pod, pod]}

    def check(drawn: tuple[bytes, bytes]) -> None:
        found = inputs.survives(lambda: loop.run_until_complete(hear(list(drawn))), ValueError, Refused)
        if found is not None and "p1" not in found._gone:
            pod = found.pod("p1")
            assert pod is None or pod["metadata"]["name"] == "p1"

    try:
        yield st.tuples(inputs.texts(listed), inputs.texts({"type": "MODIFIED", "object": pod})), check
    finally:
        loop.close()


@harness("orchestrator/manager_shards/shard_messages.py", "orchestrator/shards/shard_folder.py", refuses="ValueError")
def shard_message(folder: Path) -> Drawn:
    """A message between a run and a shard of its managers is of a kind, with fields of its types; or refused."""
    facts = SampleFacts(5, 2, 1, 9, finite=True, prompted=True)
    laid = LaidTrajectory(None, "/dev/shm/x", 100, "ab" * 8, (ShardContext(0, 1, ((3, 2),), facts),))
    prompt, sampling = Prompt("k", "nim", 1, "1 2"), Sampling(8, 1.0, 0.9, (2,), 7)
    row = (shard_messages.prompt_row(prompt), shard_messages.sampling_row(sampling))
    valid = [
        shard_messages.EpisodeEnd(
            "t-1", "scored", "", "", "nim 1", False, 0.5, 2.0, (("format", 1.0),), laid
        ).message(),
        shard_messages.pack(shard_messages.BEGIN, "t-1", "g-1", *row, 1.5, False),
        shard_messages.pack(shard_messages.TAKEN, 3, ["a", "b"]),
        shard_messages.pack(shard_messages.RESIZE, "rewards", 4),
        shard_messages.tell(shard_messages.TOLD, {"kind": "fault", "what": "x", "t": 1.0}),
    ]

    def check(data: bytes) -> None:
        found = inputs.survives(lambda: shard_messages.unpack(data), ValueError)
        if found is None:
            return
        kind, fields = found
        if kind == shard_messages.DONE:
            end = shard_messages.EpisodeEnd.of(fields)
            check_types(end, "end")
            assert shard_messages.unpack(end.message())[0] == kind
        elif kind == shard_messages.BEGIN:
            check_types(Prompt(*fields[2]), "prompt")
            check_types(shard_messages.sampling_of(fields[3]), "sampling")
        elif kind in (shard_messages.TOLD, shard_messages.ALIVE):
            told = inputs.survives(lambda: shard_messages.told(fields[0]), ValueError)
            assert told is None or isinstance(told, dict)

    def of_kind(one: bytes) -> st.SearchStrategy[bytes]:
        return weights.messages(one[1:]).map(lambda fields: one[:1] + fields)

    yield st.one_of(*map(of_kind, valid), *map(inputs.damaged, valid), st.binary(max_size=40)), check


@harness(
    "orchestrator/environments/environment_process.py",
    "orchestrator/environments/environment_wire.py",
    refuses="an answer with an error",
)
def environment_request(folder: Path) -> Drawn:
    """Every line that an environment's process is sent has one answer."""
    from orchestrator.environments.environment_process import EnvironmentService

    loop = asyncio.new_event_loop()
    valid = {"id": 1, "call": "reset", "prompt": asdict(Prompt("k", "nim", 1, ""))}

    def check(data: bytes) -> None:
        with inputs.bounded():
            answer = loop.run_until_complete(EnvironmentService().answer_line(data))
        assert set(json.loads(answer)) <= {"id", "error", "result", "tools"}

    try:
        yield inputs.texts(valid), check
    finally:
        loop.close()


@harness(
    "orchestrator/rewards/function_client.py",
    "orchestrator/rewards/reward_client.py",
    "orchestrator/rewards/llm_judge.py",
    refuses="FunctionFailed, TrajectoryError",
)
def function_answer(folder: Path) -> Drawn:
    """An answer of a reward function is a finite reward, or a failure with its kind."""
    from orchestrator.rewards import reward_client as rewards_client

    def check(drawn: tuple[bool, bytes]) -> None:
        found = inputs.survives(lambda: function_client._answer(*drawn), FunctionFailed)
        if found is not None:
            reward = inputs.survives(lambda: rewards_client.reward_in(found), TrajectoryError)
            assert reward is None or abs(reward) < float("inf")
            if isinstance(found, dict) and "cases" in found:
                inputs.survives(lambda: rewards_client._times(found["cases"]), TrajectoryError)
            inputs.survives(lambda: llm_judge._content(found), TrajectoryError)
            llm_judge._residency(found)

    valid = {"reward": 0.5, "cases": [{"seconds": 0.1, "limit": 1.0, "cut": False}], "correct": True,
             "errorType": "x", "errorMessage": "y", "choices": [{"message": {"content": "7"}}]}  # fmt: skip
    yield st.tuples(st.booleans(), inputs.texts(valid)), check


@harness("orchestrator/rewards/llm_judge.py", refuses="no score")
def judge_words(folder: Path) -> Drawn:
    """What a judge writes is an integer in its range, or no score."""

    class Asked(llm_judge.LLMJudge):
        def __init__(self, structured: bool) -> None:
            self._structured, self._low, self._high = structured, 0, 10

    texts = st.one_of(
        inputs.texts({"score": 7}), st.text(max_size=40).map(lambda text: text.encode("utf-8", "surrogatepass"))
    )

    def check(drawn: tuple[bool, bytes]) -> None:
        structured, data = drawn
        with inputs.bounded():
            found = Asked(structured)._read(data.decode("utf-8", "replace"))
        assert found is None or (type(found) is int and 0 <= found <= 10)

    yield st.tuples(st.booleans(), texts), check


@harness("orchestrator/rewards/function_service.py", "orchestrator/api/bearer.py", refuses="status 400, 401, 404, 413")
def function_host(folder: Path) -> Drawn:
    """Every method, path, header and body has an answer; only the token opens."""

    class Echo(process_pool.FunctionPool):
        async def invoke(self, event: Any, note: Any = None) -> Any:
            return event

        def provision(self, count: int) -> int:
            return min(count, 1)

    echo = Echo("x:y", concurrency=1, timeout=1.0, idle_seconds=1.0)
    served = function_service.FunctionService({"f": echo}, bearer.sealed("t"))
    loop = asyncio.new_event_loop()
    paths = st.one_of(
        st.sampled_from(
            (
                *("/2015-03-31/functions/f/invocations", "/2015-03-31/functions//invocations", "/stats", "/"),
                "/2019-09-30/functions/f/provisioned-concurrency",
            )
        ),
        st.text(max_size=30).map(lambda text: f"/2015-03-31/functions/{text}/invocations"),
    )

    def check(drawn: tuple[str, str, bytes, str]) -> None:
        method, path, body, header = drawn
        with inputs.bounded():
            assert (served.refuse_caller(header) is None) == (bearer.token_of(header) == "t")
            reply = loop.run_until_complete(served.answer(method, path, body))
        assert reply.status in ((200, 202, 400, 404, 413) if method == "PUT" else (200, 400, 404, 413))
        json.dumps(reply.value)

    methods = st.sampled_from(("POST", "GET", "DELETE", "PUT"))
    headers = st.one_of(
        st.just("Bearer t"), st.text(max_size=12).map(lambda text: f"Bearer {text}"), st.text(max_size=12)
    )
    drawn = st.tuples(methods, paths, inputs.texts({"ProvisionedConcurrentExecutions": 2, "answer": [1]}), headers)
    try:
        yield drawn, check
    finally:
        loop.close()


@harness(
    "orchestrator/sandbox/workspace.py",
    "orchestrator/sandbox/spawner.py",
    "orchestrator/rewards/code_judge.py",
    "orchestrator/rewards/suite_judge.py",
    refuses="no files, no answers; RetryableError",
)
def sandbox_output(folder: Path) -> Drawn:
    """What comes out of a sandbox is files within limits and as many answers as were asked, or nothing."""
    valid = {"code": 0, "files": {"a.py": "cHJpbnQoMSk="}}
    listed = [{"answer": 1}, {"error": "x"}]
    tested = {"word": _WORD, "passed": ["hidden.a"], "failed": {"hidden.b": ["assert x", "AssertionError"]}}
    loop = asyncio.new_event_loop()

    def check_tests(data: bytes) -> None:
        async def python(*_: object, stdin: bytes, **__: object) -> SandboxOutcome:
            said = data.replace(_WORD.encode(), json.loads(stdin)["word"].encode())
            return SandboxOutcome(0, "", said, b"", 0.0)

        sandbox: Any = SimpleNamespace(python=python)
        with inputs.bounded():
            found = loop.run_until_complete(suite_judge.judge_suite(sandbox, {}, {}, (), "hidden/"))
        assert all(isinstance(name, str) for name in (*found.passed, *found.failed))

    def check(drawn: tuple[bytes, bytes]) -> None:
        with inputs.bounded():
            exit_code, files = workspace._collected(drawn[0])
            assert type(exit_code) is int
            assert files is None or all(isinstance(data, bytes) for data in files.values())
            found = code_judge._answers(drawn[1], 2)
            assert found is None or len(found) == 2
            answer = inputs.survives(lambda: spawner.read_answer(drawn[0]), RetryableError)
            assert answer is None or type(answer) is int

    try:
        drawn = st.tuples(inputs.texts(valid), inputs.texts(listed))
        yield merged({"files": (drawn, check), "tests": (inputs.texts(tested), check_tests)})
    finally:
        loop.close()


@harness("orchestrator/rewards/process_pool.py", refuses="FunctionError")
def function_process(folder: Path) -> Drawn:
    """A line of a function's process is an object, or the end of that process."""

    class Process:
        def __init__(self, line: bytes) -> None:
            self.stdout = asyncio.StreamReader(limit=1 << 20)
            self.stdout.feed_data(line)
            self.stdout.feed_eof()

    loop = asyncio.new_event_loop()

    async def receive(line: bytes) -> Any:
        return await process_pool._Worker(Process(line)).receive()  # type: ignore[arg-type]

    def check(data: bytes) -> None:
        found = inputs.survives(lambda: loop.run_until_complete(receive(data)), process_pool.FunctionError)
        assert found is None or isinstance(found, dict)

    try:
        yield inputs.texts({"id": 1, "result": {"reward": 0.5}}), check
    finally:
        loop.close()
