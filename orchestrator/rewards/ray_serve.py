"""The elastic function host: the embedded host's protocol on Ray Serve, whose replicas come and go with the calls.

Guarantees: those of :mod:`orchestrator.rewards.function_service`, by the same code: each replica runs the function in worker
processes of its own, so a busy loop, an exit or a crash costs its caller an error and no replica. A replica that dies is
replaced by Serve; calls that it held are answered with a status of 5xx, which the client tries again. Serve's proxy listens on
loopback of the node it is on. Ray never holds the bearer token, only its SHA-256 digest. ``stop`` is idempotent, and removes
the application and, on a Ray of this run, Serve.

What Serve answers by itself, without a token: ``/-/healthz`` and ``/-/routes``, the name of the application.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from dataclasses import dataclass
from typing import Any

from orchestrator.api import ConfigError, RunError, bearer
from orchestrator.child_process import free_port
from orchestrator.rewards.function_protocol import INVOKE_PATH, MAX_BODY_BYTES
from orchestrator.rewards.function_service import FunctionService
from orchestrator.rewards.process_pool import FunctionPool

START_LIMIT = 120.0  # seconds for Serve and its first replicas; it takes 10 on an idle machine
_STOP_LIMIT = 30.0  # seconds


@dataclass(frozen=True)
class Elasticity:
    """How many replicas there are. ``per_replica``: calls that one works on at once, a process each, and the load per replica
    that Serve aims at. ``cpus``: what Ray counts a replica as. ``idle_seconds``: less load for so long ends replicas."""

    min_replicas: int = 1
    max_replicas: int = 4
    per_replica: int = 1
    cpus: float = 1.0
    idle_seconds: float = 30.0


class Replica:
    """What Ray Serve runs: one function behind HTTP. Not for use without Serve."""

    def __init__(self, name: str, target: str, sealed: str, prefix: str, options: dict[str, Any]) -> None:
        self._prefix = prefix
        self._service = FunctionService({name: FunctionPool(target, **options)}, sealed)

    async def __call__(self, request: Any) -> Any:
        """``request`` is Starlette's, and so is what is returned."""
        from starlette.responses import JSONResponse

        reply = self._service.refuse_caller(request.headers.get("Authorization", ""))
        if reply is None:
            path, body = request.scope["path"].removeprefix(self._prefix), b""
            async for chunk in request.stream():
                if len(body := body + chunk) > MAX_BODY_BYTES:
                    break  # which is refused
            reply = await self._service.answer(request.method, path, body)
        return JSONResponse(reply.value, status_code=reply.status, headers=dict(reply.headers))


class RayServeHost:
    """One reward function on Ray Serve. Ray must be connected. ``application`` names it in a Ray that others use too: the
    same for every life of a run, so that a resume takes the place of what a killed run left there. ``port``: 0: a free one;
    where Serve runs already, the one that it listens on. ``shared``: others use this Serve too."""

    def __init__(
        self,
        function: str,
        *,
        application: str,
        elasticity: Elasticity,
        timeout: float = 10.0,
        port: int = 0,
        shared: bool = False,
    ) -> None:
        self.token = secrets.token_urlsafe(32)
        self._function = function
        self._name = function.partition(":")[2]
        self._application = application
        self._elasticity = elasticity
        self._timeout = timeout
        self._port = port
        self._shared = shared
        self._started = False

    @property
    def url(self) -> str:
        """What the function is invoked at."""
        if not self._started:
            raise RunError("the function host was not started")
        return f"http://127.0.0.1:{self._port}/{self._application}" + INVOKE_PATH.format(name=self._name)

    async def start(self) -> None:
        """Until the first replicas are ready. Raises ConfigError without Ray Serve, RunError when they do not come up."""
        try:
            import ray.serve  # noqa: F401
        except ImportError as error:
            fix = f"Ray Serve is not installed ({error}): pip install 'rl-coserve[ray-serve]'"
            raise ConfigError("reward.host", "ray_serve", fix) from error
        self._port = self._port or free_port("127.0.0.1")
        self._started = True  # whatever becomes of it, there is something to remove
        try:
            async with asyncio.timeout(START_LIMIT):
                await asyncio.to_thread(self._deploy)
        except TimeoutError:
            await self.stop()
            fix = f"is there room for {self._elasticity.min_replicas} x {self._elasticity.cpus:g} CPUs (ray.cpus)?"
            raise RunError(f"Ray Serve had no replica ready within {START_LIMIT:g} s; {fix}") from None
        except (RuntimeError, ValueError, OSError) as error:  # Serve's own exceptions are RuntimeErrors, Ray's too
            await self.stop()
            raise RunError(f"Ray Serve did not start {self._function}: {error}") from error
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Remove the application. Idempotent."""
        if not self._started:
            return
        self._started = False
        try:
            async with asyncio.timeout(_STOP_LIMIT):
                await asyncio.to_thread(self._remove)
        except TimeoutError:
            raise RunError(f"Ray Serve did not remove {self._application} within {_STOP_LIMIT:g} s") from None

    def _deploy(self) -> None:
        from ray import serve

        logging.getLogger("ray.serve").setLevel(logging.WARNING)  # else it tells the terminal of each step
        wanted, quiet = self._elasticity, {"enable_access_log": False, "log_level": "WARNING"}
        http = {"host": "127.0.0.1", "port": self._port}
        serve.start(proxy_location="HeadOnly", http_options=http, logging_config=quiet)
        prefix = f"/{self._application}"
        options = {
            "concurrency": wanted.per_replica,
            "timeout": self._timeout,
            "idle_seconds": max(60.0, wanted.idle_seconds),  # replicas come and go, their processes stay
        }
        deployment = serve.deployment(
            Replica,
            name=self._name,
            max_ongoing_requests=wanted.per_replica,  # the rest waits where Serve sees it, and adds replicas
            ray_actor_options={"num_cpus": wanted.cpus},
            graceful_shutdown_timeout_s=2.0,
            autoscaling_config={
                "min_replicas": wanted.min_replicas,
                "max_replicas": wanted.max_replicas,
                "target_ongoing_requests": wanted.per_replica,
                "metrics_interval_s": 0.5,
                "look_back_period_s": 2.0,
                "upscale_delay_s": 1.0,
                "downscale_delay_s": wanted.idle_seconds,
            },
            logging_config=quiet,
        )
        bound = deployment.bind(self._name, self._function, bearer.sealed(self.token), prefix, options)
        serve.run(bound, name=self._application, route_prefix=prefix)

    def _remove(self) -> None:
        from ray import serve

        if self._shared:
            serve.delete(self._application)
        else:
            serve.shutdown()
