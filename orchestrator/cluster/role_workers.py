"""Worker classes to derive from, one a role, and what runs a worker inside its process (RollArt 5.1).

A worker is a plain class: its methods are the user's, ``rank``, ``world_size``, ``hardware`` and ``devices`` say where it
runs. Methods of one worker run one after the other; serverless calls of it run beside them. What a method raises crosses
the process border as words.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import traceback
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any, ClassVar
from urllib.parse import urlsplit

from orchestrator.api import urls
from orchestrator.rewards.function_protocol import ERROR_HEADER, MAX_BODY_BYTES

SERVERLESS_GROUP, SERVERLESS_CALLS = "serverless", 8  # calls of one worker at a time
SERVERLESS_SECONDS = 30.0  # for one answer, a cold start included
TOKEN = "RL_COSERVE_REWARD_TOKEN"
OK, ERROR = "ok", "error"


@dataclass(frozen=True, slots=True)
class Identity:
    """Who and where a worker is."""

    worker_id: str
    rank: int
    world_size: int
    hardware: str
    devices: tuple[int, ...]


class Worker:
    """Base of all. Derive from one of the four roles; ``__init__`` may take arguments, which the cluster passes on."""

    role: ClassVar[str] = ""
    identity: Identity = Identity("", 0, 1, "", ())

    @property
    def rank(self) -> int:
        """Among the workers of its cluster, from 0."""
        return self.identity.rank

    @property
    def world_size(self) -> int:
        """Workers of its cluster."""
        return self.identity.world_size

    @property
    def hardware(self) -> str:
        """The class of its devices."""
        return self.identity.hardware

    @property
    def devices(self) -> tuple[int, ...]:
        """Their ids in the pool."""
        return self.identity.devices


class ActorTrainCls(Worker):
    """Training; on compute-optimised GPUs where nothing else is said."""

    role = "ActorTrain"


class ActorGenCls(Worker):
    """Generation; on bandwidth-optimised GPUs where nothing else is said."""

    role = "ActorGen"


class RewardCls(Worker):
    """Scoring, stateless; on local GPUs, or serverless."""

    role = "Reward"


class EnvironmentCls(Worker):
    """Environments; on CPU servers."""

    role = "Environment"


class WorkerHost:
    """Runs inside the process: holds one worker. The class itself comes from the driver, by Ray's own serialisation."""

    def __init__(
        self, worker_class: type[Worker], identity: Identity, proxies: dict[str, str], arguments: dict[str, Any]
    ) -> None:
        self._failure: tuple[str, Any] | None = None
        try:
            self._worker = worker_class.__new__(worker_class)
            self._worker.identity = identity
            for attribute, url in proxies.items():
                setattr(self._worker, attribute, ServerlessProxy(url))
            self._worker.__init__(**arguments)  # type: ignore[misc]  # it may read its identity
        except Exception as error:  # noqa: BLE001  user code: reported by the first call
            self._failure = _words(error)

    def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, Any]:
        """Run a method. Never raises what the method does."""
        if self._failure is not None:
            return self._failure
        try:
            value = getattr(self._worker, method)(*args, **kwargs)
            return OK, asyncio.run(_awaited(value)) if inspect.isawaitable(value) else value
        except Exception as error:  # noqa: BLE001  user code: reported by the first call
            return _words(error)

    def ready(self) -> tuple[str, Any]:
        """Whether the worker was made."""
        return self._failure or (OK, os.getpid())

    def invoke(self, url: str, payload: Any) -> Any:
        """One serverless call. Raises RuntimeError with the reason, in whoever waits for it."""
        return invoke(url, payload)


class ServerlessProxy:
    """``self.reward_proxy`` of a worker: a call returns Ray's reference to the answer of the function at ``url``."""

    def __init__(self, url: str) -> None:
        self._url = url

    def __call__(self, payload: Any) -> Any:
        import ray

        me = ray.get_runtime_context().current_actor
        return me.invoke.options(concurrency_group=SERVERLESS_GROUP).remote(self._url, payload)


def invoke(url: str, payload: Any) -> Any:
    """POST JSON, get JSON. RuntimeError: the function failed, or it cannot be reached."""
    headers = {"Content-Type": "application/json"}
    if token := os.environ.get(TOKEN, ""):
        parts = urlsplit(url)
        if parts.scheme != "https" and not urls.is_loopback(parts.hostname or ""):
            raise RuntimeError(f"the token of {TOKEN} is not sent to {url} unencrypted: use https")
        headers["Authorization"] = f"Bearer {token}"
    body = json.dumps(payload, allow_nan=False).encode()
    request = urllib.request.Request(url, body, headers, method="POST")
    try:
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=SERVERLESS_SECONDS) as response:
            answer = response.read(MAX_BODY_BYTES + 1)
            failed = response.headers.get(ERROR_HEADER)
    except (urllib.error.URLError, OSError) as error:
        raise RuntimeError(f"the serverless function at {url} did not answer: {error}") from error
    if len(answer) > MAX_BODY_BYTES:
        raise RuntimeError(f"the serverless function at {url} answered more than {MAX_BODY_BYTES} B")
    try:
        value = json.loads(answer)
    except ValueError as error:
        raise RuntimeError(f"the serverless function at {url} did not answer JSON: {error}") from error
    if failed:
        kind, message = (value.get(key, "") if isinstance(value, dict) else "" for key in ("errorType", "errorMessage"))
        raise RuntimeError(f"the serverless function at {url} failed: {kind}: {message}"[:1000])
    return value


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """The token is for this address only."""

    def redirect_request(self, *args: Any) -> None:
        return None


async def _awaited(value: Any) -> Any:
    return await value


def _words(error: Exception) -> tuple[str, Any]:
    return ERROR, (type(error).__name__, str(error), "".join(traceback.format_exception(error)[-3:]))
