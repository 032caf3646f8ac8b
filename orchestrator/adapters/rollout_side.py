"""The rollout side without our training loop: a proxy and its workers, asked for turns and told of new weights.

Made for one process (a Ray actor, say) that many callers share; everything that goes in and out is plain data. Guarantees:
those of :class:`orchestrator.proxy.gateway.LLMProxy`: every turn ends in one answer or one error, a worker that dies or
hangs is brought back and its requests go on elsewhere; no request meets two weight versions unawares: each answer says
which version made which token. Weights come over the relay: whoever trains publishes them
(:class:`orchestrator.transfer.Publisher`), then calls :meth:`RolloutSide.move_to`.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, cast

from pydantic import Field, ValidationError

from orchestrator.api import Completion, ConfigError, GenerationRequest, ManagedWorker, RunError, Sampling
from orchestrator.borrowing import served_workers
from orchestrator.borrowing.http_worker import HttpWorker
from orchestrator.config import Config, parse_config
from orchestrator.events import EventLog, MemorySink
from orchestrator.proxy import router_setup
from orchestrator.proxy.gateway import LLMProxy
from orchestrator.proxy.kv_moves import kv_moves
from orchestrator.proxy.worker_state import WorkerLimits
from orchestrator.settings.section import Conflict, Section, config_error
from orchestrator.settings.user_functions import named_function
from orchestrator.transfer import RelayEndpoint

TASK = "adapter"
REMEMBERED = 1 << 16  # trajectories whose first version and place are known; nobody says when one ends
# Sampling parameters that are taken with values that change nothing.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "top_k": (-1, 0),
    "min_p": (0,),
    "n": (1,),
    "repetition_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "stop": ([], "", ()),
    "skip_special_tokens": (True, False),
    "spaces_between_special_tokens": (True, False),
}


class SideSettings(Section):
    """``rollout``: as the section of that name in a run's config; ``served`` names the workers. ``relay``: the fields of a
    RelayEndpoint. ``stop_token_ids`` end an answer. ``alpha``: versions that a trajectory may span; None: any. ``workers``:
    ``module:function`` that makes the workers instead, from the config and the endpoint."""

    relay: dict[str, Any]
    stop_token_ids: tuple[Annotated[int, Field(ge=0, strict=True)], ...] = ()
    rollout: dict[str, Any] = Field(default_factory=dict)
    alpha: Annotated[int, Field(ge=0, strict=True)] | None = None
    workers: str = ""

    def conflicts(self) -> Iterator[Conflict]:
        if not self.relay:
            yield "relay", None, "say where weights travel: job, kind, master and metadata"
        if not self.stop_token_ids:
            yield "stop_token_ids", self.stop_token_ids, "name the tokens that end an answer, as a list of ids"
        if not self.rollout.get("served") and not self.workers:
            fix = "name the servers: the URLs of running `vllm serve MODEL --plugin rl-coserve`"
            yield "rollout.served", None, fix

    def config(self) -> Config:
        """The rest of it is what a run has by default. Raises ConfigError."""
        return parse_config({"rollout": {**self.rollout, **({} if self.workers else {"workers": 0})}})


class RolloutSide:
    """Starts with its first call; :meth:`close` at the end. ``settings``: the fields of :class:`SideSettings`."""

    def __init__(self, settings: Mapping[str, Any], where: str = "rollout") -> None:
        try:
            self._settings = SideSettings.model_validate(settings)
        except ValidationError as error:
            raise config_error(error, SideSettings, (where,)) from None
        self._config = self._settings.config()
        self._endpoint = RelayEndpoint.from_dict(self._settings.relay)
        self._starting = asyncio.Lock()
        self._proxy: LLMProxy | None = None
        self._workers: list[ManagedWorker] = []
        self._failed: asyncio.Future[None] | None = None
        self._first: OrderedDict[str, int] = OrderedDict()  # trajectory -> version of its first token
        self._requests = 0

    async def generate(
        self, trajectory: str, prompt_ids: list[int], sampling: dict[str, Any], priority: int = 0
    ) -> dict[str, Any]:
        """One turn, by a worker that has the trajectory's prefix where there is one. Lower priorities go first. Answers with
        ``token_ids``, ``logprobs``, ``versions`` (spans), ``finish_reason`` and ``error``; "stale": it spans more than ``alpha``
        versions already, and nothing was generated. Raises ConfigError for sampling parameters that are not served, RunError
        when no worker is left."""
        proxy = await self._started()
        first = self._first.get(trajectory)
        if first is not None and self._settings.alpha is not None and proxy.version - first > self._settings.alpha:
            return {"token_ids": [], "logprobs": [], "versions": [], "finish_reason": "stale", "error": ""}
        self._requests += 1
        request = GenerationRequest(
            f"{trajectory}/{self._requests}",
            trajectory,
            self._requests,
            tuple(prompt_ids),
            sampling_of(sampling, self._settings.stop_token_ids),
            TASK,
            priority,
        )
        done = await self._unless_failed(proxy, request)
        self._remember(proxy, trajectory, done)
        return {
            "token_ids": list(done.token_ids),
            "logprobs": list(done.logprobs),
            "versions": [list(span) for span in done.versions],
            "finish_reason": done.finish_reason,
            "error": done.error,
        }

    async def move_to(self, version: int) -> int:
        """All workers go on with a version that was published. Requests in flight keep their tokens. Returns the version."""
        proxy = await self._started()
        if version != proxy.version:
            if proxy.version >= 0:
                await proxy.prepare(version)
            await proxy.suspend()
            await proxy.update(version)
            await proxy.resume()
        self._check()
        return proxy.version

    async def stats(self) -> dict[str, Any]:
        """What it does now."""
        proxy = await self._started()
        return {"version": proxy.version, "in_flight": proxy.in_flight, "tokens": proxy.tokens, "faults": proxy.faults}

    async def close(self) -> None:
        """Let the workers go: servers are left running without our requests. Idempotent."""
        proxy, self._proxy = self._proxy, None
        if proxy is not None:
            await proxy.close()
        for worker in self._workers:
            await worker.close()
        self._workers = []

    async def _started(self) -> LLMProxy:
        async with self._starting:
            if self._proxy is None:
                self._proxy = await self._start()
        self._check()
        return self._proxy

    async def _start(self) -> LLMProxy:
        settings, loop = self._config.rollout, asyncio.get_running_loop()
        if self._settings.workers:
            made = named_function("workers", self._settings.workers)(self._config, self._endpoint)
            self._workers = list(cast(list[ManagedWorker], made))
        else:
            servers: list[HttpWorker] = served_workers.workers(self._config, self._endpoint)
            await served_workers.start(servers)
            self._workers = list(servers)
        self._failed = loop.create_future()
        events = EventLog(MemorySink(), loop.time)
        routing = router_setup.with_caps(settings, settings.borrows)
        proxy = LLMProxy(
            self._workers,
            events,
            limits=WorkerLimits.of(settings),
            restarts=settings.worker_restarts,
            heartbeat=settings.heartbeat_seconds,
            misses=settings.heartbeat_misses,
            router=router_setup.router_of_workers(
                routing,
                self._workers,
                settings.disaggregation,
                caps=router_setup.engine_caps(settings, settings.borrows),
            ),
            kv=kv_moves(settings.kv_transfer, events),
            on_fatal=self._fail,
        )
        proxy.start()
        return proxy

    def _fail(self, error: RunError) -> None:
        if self._failed is not None and not self._failed.done():
            self._failed.set_exception(error)

    def _check(self) -> None:
        if self._failed is not None and self._failed.done():
            self._failed.result()

    async def _unless_failed(self, proxy: LLMProxy, request: GenerationRequest) -> Completion:
        assert self._failed is not None
        asked = asyncio.ensure_future(proxy.generate(request))
        try:
            ends: list[asyncio.Future[Any]] = [asked, self._failed]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            self._check()
            return asked.result()
        finally:
            asked.cancel()

    def _remember(self, proxy: LLMProxy, trajectory: str, done: Completion) -> None:
        if done.versions:
            self._first.setdefault(trajectory, done.versions[0][0])
            self._first.move_to_end(trajectory)
        while len(self._first) > REMEMBERED:
            proxy.forget(self._first.popitem(last=False)[0])


def sampling_of(given: Mapping[str, Any], stop_token_ids: tuple[int, ...]) -> Sampling:
    """vLLM's names of sampling parameters as ours. Raises ConfigError for one that would change what is sampled and is not
    served: it is never ignored."""
    rest = {name: value for name, value in given.items() if value is not None and name != "logprobs"}
    most = rest.pop("max_tokens", None) or rest.pop("max_new_tokens", None)
    rest.pop("max_new_tokens", None)
    if type(most) is not int or most < 1:
        raise ConfigError("sampling_params.max_tokens", most, "must be a number of tokens, 1 or more")
    heat, mass = float(rest.pop("temperature", 1.0)), float(rest.pop("top_p", 1.0))
    if not (math.isfinite(heat) and heat >= 0 and 0 < mass <= 1):
        raise ConfigError("sampling_params", dict(given), "temperature must be 0 or more, top_p above 0 and at most 1")
    stops = (*stop_token_ids, *rest.pop("stop_token_ids", ()))
    seed = rest.pop("seed", None)
    for name, value in rest.items():
        if name not in _NEUTRAL or value not in _NEUTRAL[name]:
            raise ConfigError(f"sampling_params.{name}", value, "is not served by the rollout side: leave it out")
    return Sampling(most, heat, mass, tuple(dict.fromkeys(stops)), seed)
