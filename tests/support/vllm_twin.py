"""An in-memory twin of vLLM's engine client, and the real control endpoints on it: no vLLM, no model, milliseconds.

For tests, and to try a client. ``TwinAsyncLLM`` is as much of vLLM's ``AsyncLLM``, scheduler and workers as the HTTP carrier
uses: every millisecond each of the best-ranked requests gets one token, labelled with the weight version. The tokens mean
nothing. ``TwinServer`` serves the real :mod:`vllm_rlplugin.server.control_endpoints` and
:class:`~vllm_rlplugin.worker.served_worker.ServedWorker` on it.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from http import HTTPStatus
from ipaddress import ip_network
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import uvicorn
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from orchestrator.api import Completion, GenerationRequest, Sampling
from orchestrator.api import http as wire
from orchestrator.borrowing.http_worker import HttpWorker
from vllm_rlplugin.server import bearer_auth, control_endpoints
from vllm_rlplugin.server.control_route import STATE, RouteContext
from vllm_rlplugin.server.engine_metrics import EngineMetrics
from vllm_rlplugin.sleep.activation import Activation
from vllm_rlplugin.worker.live_engine import LiveEngine
from vllm_rlplugin.worker.served_worker import EngineLimits, ServedWorker

TOKEN = "the-token-of-the-twin-0123456789"
LIMITS = EngineLimits(model_len=256, vocabulary=64, slots=8, lookahead=4)
ENDPOINT = {"job": "twin", "kind": "memory", "master": "twin-relay"}
STEP_SECONDS = 0.001
FACTS = {  # what a real server says of itself
    "protocol": wire.PROTOCOL,
    "world_size": 1,
    "logprobs_mode": "processed_logprobs",
    "routed_experts": False,
    "limits": {"max_model_len": LIMITS.model_len, "vocabulary": LIMITS.vocabulary},
    "shape": {"architectures": ["Qwen3ForCausalLM"], "vocab_size": LIMITS.vocabulary},
}


@dataclass(eq=False)
class TwinRequest:
    """One request inside the twin; the lower (priority, order) runs first."""

    name: str
    session: str
    priority: int
    order: int
    max_tokens: int
    queue: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)
    tokens: list[int] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    stats: Any = None


class TwinBusy(Exception):
    """As vLLM's ``QueueOverflowError``."""

    http_status = HTTPStatus.SERVICE_UNAVAILABLE


class TwinAsyncLLM:
    """As much of vLLM's ``AsyncLLM``, its scheduler and its workers as the carrier uses: every millisecond each of the
    best ``slots`` requests gets one token, whose label is the weight version."""

    def __init__(self) -> None:
        self.requests: dict[str, TwinRequest] = {}
        self.paused = False
        self.capacity = 100  # blocks; a request takes one
        self.label = "default"
        self.relay: dict[int, str] = {}  # version -> "" or why it cannot be fetched
        self.fetched: dict[str, int | None] = {"prepared": None, "received": None}
        self.loaded, self.damaged, self.fail_finish, self.fetching = -1, False, "", 0
        self.may: list[dict[str, Any]] = []  # what was asked for before weights are written
        self.session = False  # vLLM's, of an update that was started and not finished
        self.hold = asyncio.Event()  # finish_weight_update waits for it
        self.hold.set()
        self.pausing = asyncio.Event()  # a pause ends with it
        self.pausing.set()
        self.fail_pause = self.holders = ""  # why a pause fails; who holds KV while it waits
        self.most = 1 << 30  # requests that its owner allows
        self.generated = self.orders = self.steps = 0
        self.calls: list[str] = []
        self.prompt: Any = None  # of the last request
        self.asleep = False  # deactivated
        self.pages, self.back = True, ""  # whether there are any for it; what is wrong with weights that come back
        self.room = True  # on the device, for its weights
        self.dead = False
        self.engine_core = self
        self.output_processor = SimpleNamespace(request_states=self.requests, parent_requests={})
        self.output_handler: asyncio.Task[None] | None = asyncio.create_task(self._run())

    @property
    def errored(self) -> bool:
        return self.dead or self.output_handler is None or self.output_handler.done()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(STEP_SECONDS)
            if not self.paused:
                self._step()

    def _step(self) -> None:
        ranked = sorted(self.requests.values(), key=lambda request: (request.priority, request.order))
        now = time.monotonic()
        self.steps += bool(ranked)
        for request in ranked[: LIMITS.slots]:
            request.stats.scheduled_ts = request.stats.scheduled_ts or now
            request.stats.first_token_ts = request.stats.first_token_ts or now
            request.stats.last_token_ts = now
            request.tokens.append(len(request.tokens) % 64)
            request.versions.append(self.label)
            self.generated += 1
            if len(request.tokens) >= request.max_tokens:
                self._end(request, "length")

    def _end(self, request: TwinRequest, reason: str) -> None:
        del self.requests[request.name]
        spans: list[Any] = []
        for index, version in enumerate(request.versions):
            if not spans or spans[-1].version != version:
                spans.append(SimpleNamespace(version=version, start=index, end=index))
            spans[-1].end = index + 1
        result = SimpleNamespace(
            token_ids=request.tokens,
            logprobs=SimpleNamespace(logprobs=[-0.5] * len(request.tokens)),
            weight_versions=spans,
            finish_reason=reason,
        )
        request.queue.put_nowait(SimpleNamespace(outputs=[result], metrics=request.stats))

    def stop(self) -> None:
        """No further steps."""
        if self.output_handler is not None:
            self.output_handler.cancel()

    def die(self) -> None:
        """As when the engine's process is killed."""
        self.dead = True
        self.stop()
        for request in list(self.requests.values()):
            request.queue.put_nowait(RuntimeError("EngineDeadError"))

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, *, priority: int, session_id: str
    ) -> AsyncGenerator[Any, None]:
        self.prompt = prompt["tokens"]
        if prompt["tokens"][0] == 63:
            raise ValueError("the twin does not like token 63")
        if len(self.requests) >= self.most:
            raise TwinBusy("the twin has as many as it may")
        request = TwinRequest(request_id, session_id, priority, self.orders, sampling_params.max_tokens)
        request.stats = SimpleNamespace(scheduled_ts=0.0, first_token_ts=0.0, last_token_ts=0.0)
        self.orders += 1
        self.requests[request_id] = request
        output = await request.queue.get()
        if isinstance(output, Exception):
            raise output
        yield output

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        for name in [request_id] if isinstance(request_id, str) else list(request_id):
            if name in self.requests:
                self._end(self.requests[name], "abort")

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self.calls.append(f"pause {mode} {clear_cache}")
        self.paused = True
        if mode == "abort":
            await self.abort(list(self.requests))
        await self.pausing.wait()
        if self.fail_pause:
            raise Exception(f"Call to pause_scheduler method failed: {self.fail_pause}")

    async def resume_generation(self) -> None:
        self.paused = False

    async def is_paused(self) -> bool:
        await asyncio.sleep(0)
        return self.paused

    async def reset_prefix_cache(self, reset_running_requests: bool, reset_connector: bool) -> bool:
        return not self.requests or reset_running_requests

    async def update_weight_version(self, new_version: str) -> None:
        self.label = new_version

    async def get_weight_version(self) -> str:
        return self.label

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def get_num_unfinished_requests(self) -> int:
        return len(self.requests)

    async def call_utility_async(self, method: str, command: str, arguments: dict[str, Any]) -> dict[str, Any]:
        assert method == "rl_coserve"
        self.calls.append(command)
        await asyncio.sleep(0)
        if command == "prioritize":
            for request in self.requests.values():
                request.priority = arguments["priorities"].get(request.session, request.priority)
            return {"changed": 0}
        if command == "advance_version":
            assert self.paused
            if self.holders:
                raise Exception(f"Call to rl_coserve method failed: {self.holders}")
            return {"preempted": len(self.requests), "how": "salt", "seconds": 0.0}
        if command == "may_update":
            self.may.append(arguments)
            return {"refused": self.holders}
        if command == "deactivate":
            assert self.paused
            if self.requests and arguments.get("stepped", True):
                return {"refused": f"it has {len(self.requests)} requests"}
            self.asleep = True
        if command == "activate" and not self.pages:
            return {"refused": "no pages"}
        if command in ("deactivate", "activate", "weights_held"):
            return {"pages": 0}
        running = 0 if self.paused else min(len(self.requests), LIMITS.slots)
        return {
            "running": running,
            "waiting": len(self.requests) - running,
            "kv_used": len(self.requests),
            "kv_capacity": self.capacity,
            "preemptions": 3,
            "outranked": 2,
            "prefix_queries": self.orders,
            "prefix_hits": 0,
            "generated": self.generated,
            "oldest_wait": 0.0,
            "version": max(0, self.loaded),
            "steps": self.steps,
            "step_requests": self.steps,
            "step_kv": self.steps,
            "shared": None,
        }

    async def collective_rpc(self, method: str, *arguments: Any) -> list[Any]:
        _, args, kwargs = arguments
        self.calls.append(method)
        return [await getattr(self, f"_{method}")(*args, **kwargs)]

    async def _rl_ready(self) -> dict[str, Any]:
        return {"rank": 0, "cured": []}

    async def _init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        if init_info["endpoint"]["master"] == "gone":
            raise Exception("Call to collective_rpc method failed: the master does not answer")

    async def _shutdown_weight_transfer_engine(self) -> None: ...

    async def _compute_weight_checksums(self) -> dict[str, str]:
        return {"rank0.norm": "same", "rank0.embed": f"of {self.loaded}"}

    async def _rl_prepare(self, version: int) -> None:
        self.fetched["prepared"], self.fetching = version, 2

    async def _rl_weights_away(self, kept: bool) -> dict[str, Any]:
        assert self.asleep
        return {
            "bytes": 1000,
            "left": 100,
            "freed": 1800,
            "seconds": 0.0,
            "how": "kept" if kept else "dropped",
            "memory": {"process_bytes": 2000},
        }

    async def _rl_weights_back(self) -> dict[str, Any]:
        assert self.asleep
        self.asleep = not self.room
        return {"seconds": 0.0, "error": self.back, "no_room": "" if self.room else "no room", "damage": ""}

    async def _rl_prepared(self, version: int) -> dict[str, Any]:
        self.fetching -= 1
        if self.fetched["prepared"] != version:
            return {"state": "none", "error": ""}
        if self.fetching >= 0:
            return {"state": "fetching", "error": ""}
        error = self.relay.get(version, f"version {version} is not on the relay")
        return {"state": "failed" if error else "ready", "error": error}

    async def _rl_drop_session(self) -> None:
        self.session = False

    async def _start_weight_update(self) -> None:
        assert self.paused
        if self.session:
            raise Exception(
                "Call to collective_rpc method failed: start_weight_update called while one is already active"
            )
        self.session = True

    async def _update_weights(self, update_info: dict[str, int]) -> None:
        version = update_info["version"]
        if error := self.relay.get(version, f"version {version} is not on the relay"):
            self.session = False
            raise Exception(f"Call to collective_rpc method failed: {error}")
        self.fetched["received"] = version

    async def _finish_weight_update(self) -> None:
        assert self.paused
        await self.hold.wait()
        self.session = False
        if self.fail_finish:
            self.damaged = self.fail_finish != "refused"
            raise Exception(f"Call to collective_rpc method failed: {self.fail_finish}")
        self.loaded, self.damaged = self.fetched["received"] or 0, False

    async def _rl_report(self) -> dict[str, Any]:
        return {
            "rank": 0,
            "world_size": 1,
            "version": self.loaded,
            "checksum": "",
            "bytes": 1000,
            "state": "unusable" if self.damaged else "intact",
            "damaged": self.damaged,
            "error": "",
            "verified": {"slices": 0},
            "shapes": {},
            "slices": {},
        }


def translate(request: GenerationRequest, salt: str | None, arrival: float) -> tuple[Any, Any]:
    return {"tokens": request.token_ids, "salt": salt, "arrival": arrival}, request.sampling


class TwinServer:
    """The control endpoints on a free port of loopback, in this event loop."""

    def __init__(self, port: int = 0) -> None:
        self.port = port
        self.registry: CollectorRegistry
        self.client: TwinAsyncLLM
        self.worker: ServedWorker
        self.control: control_endpoints.ControlContext

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(
        self,
        *,
        relay: bool = True,
        networks: str = "127.0.0.0/8",
        max_body: int = 1 << 20,
        deactivate_after: float = 0.0,
        pool: Path | None = None,
    ) -> TwinServer:
        self.client = TwinAsyncLLM()
        self.registry = CollectorRegistry()
        metrics = EngineMetrics(self.registry)
        self.worker = ServedWorker(
            self.client,
            LIMITS,
            translate=translate,
            observe_completion=metrics.observe_completion,
            observe_update=metrics.observe_phase,
        )
        self.metrics = metrics
        await self.worker.open(ENDPOINT if relay else None)
        app = FastAPI()
        control_endpoints.add_routes(app)
        server, worker = f"instance-{time.monotonic_ns()}", self.worker
        guard = bearer_auth.BearerGuard(TOKEN, (ip_network(networks),))
        activation = Activation(worker, LiveEngine(self.client), rollout=True, after=deactivate_after)
        self.control = control_endpoints.ControlContext(worker, {**FACTS, "instance": server}, activation, pool)
        self.control.tasks.append(asyncio.create_task(activation.watch()))
        self.control.tasks.append(asyncio.create_task(self.control.lease.watch()))
        book = self.control.lease.book
        setattr(
            app.state, STATE, RouteContext(guard, max_body, server, lambda: worker.cycle.history.number, book.refusal)
        )
        setattr(app.state, control_endpoints.CONTROL, self.control)
        listening = socket.create_server(("127.0.0.1", self.port), reuse_port=False)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # as uvloop does: else 40 ms an answer
        self.port = listening.getsockname()[1]
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
        self._serving = asyncio.create_task(self._server.serve([listening]))
        while not self._server.started:
            await asyncio.sleep(0.005)
        return self

    async def stop(self) -> None:
        self._serving.cancel()  # it would look in a tenth of a second whether it shall end, and wait for another one
        for listening in self._server.servers:
            listening.close()
        for connection in list(self._server.server_state.connections):
            connection.shutdown()
        await asyncio.sleep(0)
        for task in self.control.tasks:
            task.cancel()
        self.client.stop()

    def publish(self) -> int:
        version = self.worker.cycle.version + 1
        self.client.relay[version] = ""
        return version


def run(scenario: Callable[[TwinServer, HttpWorker], Awaitable[None]], **options: Any) -> None:
    """One scenario with a server and a client of its own."""

    async def main() -> None:
        server = await TwinServer().start(**options)
        worker = HttpWorker(server.url, TOKEN, "http")
        try:
            async with asyncio.timeout(60):
                await scenario(server, worker)
        finally:
            await worker.close()
            await server.stop()

    asyncio.run(main())


def a_request(
    name: str, tokens: int = 5, *, trajectory: str = "", group: str = "", priority: int = 0
) -> GenerationRequest:
    sampling = Sampling(tokens)
    return GenerationRequest(
        name, trajectory or name, 0, (1, 2, 3), sampling, "test", group_id=group, priority=priority
    )


async def collected(worker: HttpWorker, number: int) -> dict[str, Completion]:
    found: dict[str, Completion] = {}
    while len(found) < number:
        for completion in await worker.completions():
            assert completion.request_id not in found
            found[completion.request_id] = completion
    return found
