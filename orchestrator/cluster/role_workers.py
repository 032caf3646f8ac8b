"""Worker classes to derive from, one a role, and serverless calls from them (RollArt 5.1).

A worker is a plain class: its methods are the user's, ``rank``, ``world_size``, ``hardware`` and ``devices`` say where it
runs. Methods of one worker run one after the other; serverless calls of it run beside them.
"""

from __future__ import annotations

import json
import os
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
    concurrency: ClassVar[int] = 1  # calls at a time; more: its methods are coroutines, of one event loop
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
