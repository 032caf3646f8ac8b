"""Sessions in Kubernetes pods, through the official client (extra ``kubernetes``, imported on first use).

Guarantees: what an earlier life of this run left is removed before the first pod starts, and everything of the run after the
last; a pod that does not come up is deleted, with its reason in the error; pods end without the orchestrator too
(:mod:`orchestrator.environments.pod_manifests`). The image is that of the prompt's template, else the config's. Images come from
``registry_mirror`` first, and from their own registry when the mirror does not have them; with ``pre_pull`` all nodes pull the
config's image when the run starts. Pods that start are watched by one request for all of them; the API server is asked with
time limits, and not at all while an episode runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import random
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, TypeVar

from orchestrator.api import ConfigError, EnvironmentTemplate, RetryableError, TrajectoryError, bearer
from orchestrator.environments import pod_manifests
from orchestrator.environments.environment_session import ANY
from orchestrator.environments.environment_wire import MAX_LINE
from orchestrator.environments.pod_manifests import PodSettings
from orchestrator.environments.pod_watch import PodWatch
from orchestrator.environments.remote_session import RemoteSession
from orchestrator.environments.tool_functions import ToolTally

_logger = logging.getLogger("rl-coserve")
T = TypeVar("T")
API_LIMIT = 20.0  # seconds for one request
POLL = 0.5  # seconds between two looks at the nodes that pull
PRE_PULL_LIMIT = 900.0  # seconds; then the nodes that have not pulled it pull it when they need it
NO_IMAGE = ("ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull")
NEVER_STARTS = ("InvalidImageName", "CreateContainerConfigError", "CreateContainerError", "RunContainerError")
NO_SUCH_IMAGE = ("not found", "manifest unknown", "does not exist")  # in what the kubelet says of a pull
IMAGE = re.compile(r"[\w][\w.\-/:@]{0,499}", re.ASCII)
REMOVE_PAGE, REMOVE_TRIES = 500, 100  # pods that one request removes, and requests
TOKEN_SECONDS = 60.0  # between two looks at whether a new token is due
CONNECT_TRIES = 6
CONNECT_PAUSE = 0.1  # seconds; doubles with each try: 3 s in all
CONNECT_LIMIT = 5.0  # seconds for one try


@dataclass(eq=False)
class PodBackend:
    """Implements :class:`~orchestrator.environments.environment_session.EnvironmentBackend`. ``limits`` are those of the worker;
    ``context`` names one of the kubeconfig; ``longest``: bytes of an answer."""

    name = "kubernetes"

    target: str
    arguments: Mapping[str, Any]
    settings: PodSettings
    _: KW_ONLY
    limits: Mapping[str, Any]
    context: str = ""
    pre_pull: bool = False
    tools: Mapping[str, Any] | None = None
    tally: ToolTally | None = None
    longest: int = MAX_LINE

    def __post_init__(self) -> None:
        self._life = secrets.token_hex(2)  # pods of an earlier life may still be on their way out
        self._mirror = self.settings.registry_mirror
        self._api: Any = None
        self._pods: Any = None
        self._daemons: Any = None
        self._pulling: asyncio.Task[None] | None = None
        self._watch: PodWatch | None = None
        self._watching: asyncio.Task[None] | None = None
        self._freshening: asyncio.Task[None] | None = None

    async def open(self) -> None:
        aio = load_library()
        configuration, loader = await connect_cluster(aio, self.context)
        self._api = aio.client.ApiClient(configuration)
        self._pods, self._daemons = aio.client.CoreV1Api(self._api), aio.client.AppsV1Api(self._api)
        if loader is not None:  # a token that a cloud's program gives ends after minutes, and a run lasts for days
            refresh = aio.config.refresh_token(loader, configuration, interval=TOKEN_SECONDS)
            self._freshening = asyncio.create_task(refresh, name="token of the cluster")
        where = f"namespace {self.settings.namespace} at {configuration.host}"
        try:
            await self._remove_all()
            if self.pre_pull:
                await self._pull_everywhere(aio)
            await self._begin_watch(aio)
        except aio.client.ApiException as error:
            needed = "create, get, list, watch, delete and deletecollection of pods (and daemonsets)"
            fix = f"HTTP {error.status} {error.reason}: the account needs {needed}"
            raise ConfigError("environment.kubernetes", where, fix) from error
        except (OSError, TimeoutError) as error:
            raise ConfigError("environment.kubernetes", where, f"the API server does not answer: {error!r}") from error

    async def _pull_everywhere(self, aio: Any) -> None:
        manifest = pod_manifests.pre_pull_manifest(
            self.settings, pod_manifests.mirrored(self.settings.image, self._mirror)
        )
        body = aio.client.V1DaemonSet.from_dict(manifest)
        await self._ask(self._daemons.create_namespaced_daemon_set, self.settings.namespace, body)
        hold = self._hold_until_pulled(aio, manifest["metadata"]["name"])
        self._pulling = asyncio.create_task(hold, name="pull images")

    async def _begin_watch(self, aio: Any) -> None:
        selector = pod_manifests.label_selector(self.settings)
        listing = self._pods.list_namespaced_pod_without_preload_content
        ask = functools.partial(listing, self.settings.namespace, label_selector=selector)
        self._watch = PodWatch(ask, aio.client.V1Pod.from_dict, aio.client.ApiException)
        await self._watch.begin()
        self._watching = asyncio.create_task(self._watch.run(), name="watch pods")

    async def start(self, name: str, template: EnvironmentTemplate = ANY) -> RemoteSession:
        aio = load_library()
        settings, wanted = self.settings, template.image or self.settings.image
        if not IMAGE.fullmatch(wanted):
            raise TrajectoryError("environment_template", f"{wanted!r:.200} is not the name of an image")
        images = [wanted]
        if self._mirror:
            images.insert(0, pod_manifests.mirrored(wanted, self._mirror))
        assert self._watch is not None
        for number, image in enumerate(images):
            pod = pod_manifests.name_of(name, self._life, *(("r",) if number else ()))
            token = secrets.token_urlsafe(32)  # of this pod alone
            manifest = pod_manifests.pod_manifest(settings, pod, image, bearer.digest_of(token))
            body = aio.client.V1Pod.from_dict(manifest)
            self._watch.expect(pod)
            try:
                await self._ask(self._pods.create_namespaced_pod, settings.namespace, body)
                address = await self._ready(self._watch, pod)
                end = functools.partial(self._delete, pod)
                channel = TcpChannel(address, settings.port, token, end, pod, self.longest)
                session = RemoteSession(channel, pod, self.tally)
                await session.build_environment(self.target, self.arguments, self.limits, self.tools, template.setup)
                return session
            except _NoImage as error:
                await self._delete(pod)
                if number < len(images) - 1:
                    continue
                if template.image and any(word in str(error) for word in NO_SUCH_IMAGE):
                    raise TrajectoryError("environment_template", str(error)) from error
                raise
            except BaseException:
                await self._abandon(pod)
                raise
            finally:
                self._watch.forget(pod)
        raise AssertionError

    async def close(self) -> None:
        if self._api is None:
            return
        beside = [task for task in (self._pulling, self._watching, self._freshening) if task is not None]
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
        try:
            await self._remove_all()
        except (load_library().client.ApiException, OSError, TimeoutError) as error:  # must not hide what ended the run
            ends = f"they end by themselves, in {self.settings.lifetime} s at the latest"
            _logger.warning("pods of this run may be left, as the API server said %r; %s", error, ends)
        finally:
            api, self._api = self._api, None
            await api.close()

    # -- the API server ----------------------------------------------------------------------------------------------

    async def _ask(self, call: Callable[..., Awaitable[T]], *arguments: Any, **options: Any) -> T:
        return await call(*arguments, **options, _request_timeout=API_LIMIT)

    async def _ready(self, watch: PodWatch, pod: str) -> str:
        """Its address, when it listens. Raises what is wrong with it."""
        while True:
            try:
                found = watch.pod(pod)
            except LookupError as error:
                raise RetryableError(str(error)) from error
            status: Any = found.status if found is not None else None
            states = [item for item in (status.container_statuses or ()) if item is not None] if status else []
            waiting = next((item.state.waiting for item in states if item.state and item.state.waiting), None)
            if waiting is not None and waiting.reason in NO_IMAGE:
                raise _NoImage(f"pod {pod}: {waiting.reason}: {waiting.message}")
            if waiting is not None and waiting.reason in NEVER_STARTS:
                raise RetryableError(f"pod {pod}: {waiting.reason}: {waiting.message}")
            if status is not None and status.phase in ("Failed", "Succeeded"):
                raise RetryableError(f"pod {pod} has ended: {status.reason or status.phase} {status.message or ''}")
            if states and all(item.ready for item in states) and status.pod_ip:
                return str(status.pod_ip)
            try:
                await watch.change(pod)
            except asyncio.CancelledError as error:  # it took too long: say what it waits for
                raise asyncio.CancelledError(f"pod {pod}: {_held_up(status, waiting)}") from error

    async def _delete(self, pod: str) -> None:
        try:
            await self._ask(self._pods.delete_namespaced_pod, pod, self.settings.namespace, grace_period_seconds=0)
        except load_library().client.ApiException as error:
            if error.status != 404:
                raise

    async def _abandon(self, pod: str) -> None:
        """Delete what did not come up, though this task may have been cancelled; what cannot be deleted ends by itself."""
        task = asyncio.ensure_future(self._delete(pod))
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([task])
        task.exception()

    async def _remove_all(self) -> None:
        """Everything that carries our label; so many pods at a time that the server is done with them within a request's limit:
        it deletes one after the other."""
        namespace, label = self.settings.namespace, {"label_selector": pod_manifests.label_selector(self.settings)}
        if self.pre_pull:
            remove = self._daemons.delete_collection_namespaced_daemon_set
            await self._ask(remove, namespace, **label, grace_period_seconds=0)
        for _ in range(REMOVE_TRIES):  # else one that the cluster holds on to would be waited for without end
            remove = self._pods.delete_collection_namespaced_pod
            await self._ask(remove, namespace, **label, grace_period_seconds=0, limit=REMOVE_PAGE)
            if not (await self._ask(self._pods.list_namespaced_pod, namespace, **label, limit=1)).items:
                return

    async def _hold_until_pulled(self, aio: Any, name: str) -> None:
        """Until every node has the image, or the limit; then the pods that held it go."""
        namespace = self.settings.namespace
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PRE_PULL_LIMIT):
                while True:
                    with contextlib.suppress(aio.client.ApiException, OSError):  # the next look may work
                        found = await self._ask(self._daemons.read_namespaced_daemon_set, name, namespace)
                        wanted = found.status.desired_number_scheduled if found.status else 0
                        if wanted and found.status.number_ready >= wanted:
                            break
                    await asyncio.sleep(POLL)
        with contextlib.suppress(aio.client.ApiException, OSError):  # `close` removes it too
            await self._ask(self._daemons.delete_namespaced_daemon_set, name, namespace)


class TcpChannel:
    """The way to an environment in a pod: one lasting TCP connection, authenticated by a token of that pod alone. Implements
    :class:`~orchestrator.environments.remote_session.Channel`; ``end`` ends what runs at the other side.

    Guarantees (RollArt 8: persistent sessions and exponential back-off): a lost connection is made again, with growing
    pauses; the request under way is sent again under its number, and the environment carries it out once. Only when nobody
    listens for all tries is the environment given up. The connection is not encrypted: it belongs into the cluster's own
    network.
    """

    def __init__(
        self, host: str, port: int, token: str, end: Callable[[], Awaitable[None]], seed: object, longest: int
    ) -> None:
        self._host = host
        self._port = port
        self._token = token
        self._end = end
        self._longest = longest
        self._random = random.Random(f"{seed}/connect")
        self._connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def exchange(self, line: bytes) -> bytes:
        for _ in range(CONNECT_TRIES):
            try:
                if self._connection is None:
                    self._connection = await self._connect()
                reader, writer = self._connection
                writer.write(line)
                await writer.drain()
                answer = await reader.readline()
                if answer.endswith(b"\n"):
                    return answer
            except ConnectionError:
                pass  # as its end, without a word
            except ValueError as error:  # longer than the limit
                raise TrajectoryError("environment_output", f"an answer of more than {self._longest} B") from error
            self._disconnect()
        raise TrajectoryError("environment_died", f"{self._host}:{self._port} ends every connection")

    async def kill(self) -> None:
        self._disconnect()
        await self._end()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        pause = CONNECT_PAUSE
        for left in reversed(range(CONNECT_TRIES)):
            try:
                async with asyncio.timeout(CONNECT_LIMIT):
                    reader, writer = await asyncio.open_connection(self._host, self._port, limit=self._longest)
                    try:
                        writer.write(self._token.encode() + b"\n")
                        await writer.drain()
                        if await reader.readline() != b"{}\n":
                            raise ConnectionResetError("it refuses the token")
                    except BaseException:
                        writer.close()
                        raise
                return reader, writer
            except (OSError, TimeoutError) as error:
                if not left:
                    where = f"{self._host}:{self._port}"
                    raise TrajectoryError("environment_died", f"no connection to {where}: {error!r}") from error
            await asyncio.sleep(pause * self._random.uniform(0.5, 1.0))
            pause *= 2
        raise AssertionError

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection[1].close()


def _held_up(status: Any, waiting: Any) -> str:
    """Why a pod is not ready, in Kubernetes' words."""
    if waiting is not None:
        return f"{waiting.reason} {waiting.message or ''}".strip()
    conditions = (status.conditions or ()) if status is not None else ()
    reasons = [f"{item.reason}: {item.message}" for item in conditions if item.status == "False" and item.message]
    return "; ".join(reasons) or (status.phase if status is not None and status.phase else "no status yet")


class _NoImage(RetryableError):
    """The image cannot be pulled from there."""


async def connect_cluster(aio: Any, context: str) -> tuple[Any, Any]:
    """Where the cluster is, and who we are; and the loader, which knows how to get a new token; None: the client does so itself.
    ``context``: of the kubeconfig; empty: the pod's own account, or the current one."""
    configuration = aio.client.Configuration()
    try:
        if not context:
            with contextlib.suppress(aio.config.ConfigException):
                aio.config.load_incluster_config(client_configuration=configuration)
                return configuration, None
        loader = await aio.config.load_kube_config(context=context or None, client_configuration=configuration)
    except (aio.config.ConfigException, OSError) as error:
        fix = f"neither inside a cluster nor a usable kubeconfig (KUBECONFIG): {error}"
        raise ConfigError("environment.kubernetes.context", context or "(current)", fix) from error
    return configuration, loader


def load_library() -> Any:
    """The client's asyncio part. Raises ConfigError when it is not installed."""
    try:
        from kubernetes import aio
    except ImportError as error:
        fix = "the Kubernetes client is not installed: pip install 'rl-coserve[kubernetes]'"
        raise ConfigError("environment.backend", "kubernetes", fix) from error
    from kubernetes.aio import client, config  # noqa: F401  modules of `aio`, loaded

    return aio
