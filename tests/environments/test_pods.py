"""Environments in pods, against a local API server that records what it is asked and answers as Kubernetes' API says.

There is no cluster here: :class:`RecordedCluster` is a twin, and every test that talks to it says so in its name. The client
is the official one, the manifests are ours, and the command of a pod really runs, as a process on a loopback address of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import signal
import socket
import sys
import urllib.parse
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from orchestrator.api import ConfigError, EnvironmentTemplate, Prompt, RunError, TrajectoryError
from orchestrator.build import build_environment_pool
from orchestrator.config import load_config
from orchestrator.environments import pod_manifests, pod_watch, pods
from orchestrator.environments.environment_pool import EnvPool, PoolSettings
from orchestrator.environments.pod_manifests import PodSettings, mirrored, name_of
from orchestrator.environments.pods import PodBackend
from orchestrator.events import EventLog, MemorySink
from orchestrator.run_folder import environment_owner
from orchestrator.runtime.preflight import make_task

HERE = Path(__file__).parents[1] / "support"
PROMPT = Prompt("k", "misbehaving", 1, "be good")
needs_client = pytest.mark.skipif(
    importlib.util.find_spec("kubernetes") is None, reason="the extra 'kubernetes' is not installed"
)


class RecordedCluster:
    """The API server's part that is asked for, and one node. ``trouble[image]``: why a container of it does not start."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, Any]] = []
        self.pods: dict[str, dict[str, Any]] = {}
        self.daemons: dict[str, dict[str, Any]] = {}
        self.processes: dict[str, asyncio.subprocess.Process] = {}
        self.trouble: dict[str, str] = {}
        self.said: dict[str, str] = {}  # image -> what the kubelet says of that
        self.status = 0  # answer everything with this
        self.removal = 0.0  # seconds that it takes to remove one of many
        self.tokens: dict[str, None] = {}  # that were shown
        self.watches: list[asyncio.Task[Any]] = []
        self.address = 1

    async def __aenter__(self) -> RecordedCluster:
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self.handle)
        self._runner = web.AppRunner(application, shutdown_timeout=0.05)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        for name in list(self.pods):
            await self.end(name)
        await self._runner.cleanup()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        parts = request.path.strip("/").split("/")
        body = await request.json() if request.can_read_body else None
        self.asked.append((request.method, request.path, body))
        self.tokens[request.headers.get("Authorization", "")] = None
        if self.status:
            return self.answer({"kind": "Status", "message": "refused"}, self.status)
        kind, name = (parts[-1], "") if parts[-1] in ("pods", "daemonsets") else (parts[-2], parts[-1])
        kept = {"pods": self.pods, "daemonsets": self.daemons}[kind]
        if request.method == "GET" and not name:
            return await self.watched(request) if "watch" in request.query else self.answer(self.listed(request), 200)
        match request.method, bool(name):
            case "POST", False:
                name = body["metadata"]["name"]
                if name in kept:
                    return self.answer({"kind": "Status", "reason": "AlreadyExists"}, 409)
                kept[name] = body
                if kind == "pods":
                    await self.start(body)
                if kind == "daemonsets":
                    body["status"] = {"currentNumberScheduled": 1, "desiredNumberScheduled": 1, "numberMisscheduled": 0}
                    body["status"]["numberReady"] = 1
                return self.answer(body, 201)
            case "GET", True if name in kept:
                return self.answer(self.seen(kept[name]), 200)
            case "DELETE", True if name in kept:
                await self.end(name)
                return self.answer(kept.pop(name), 200)
            case "DELETE", False:
                label, _, value = urllib.parse.unquote(request.query["labelSelector"]).partition("=")
                chosen = [key for key, item in kept.items() if item["metadata"]["labels"].get(label) == value]
                for found in chosen[: int(request.query.get("limit", len(chosen)))]:
                    await asyncio.sleep(self.removal)  # one after the other, as the API server does
                    await self.end(found)
                    del kept[found]
                return self.answer({"kind": "Status", "status": "Success"}, 200)
        return self.answer({"kind": "Status", "reason": "NotFound"}, 404)

    def chosen(self, request: web.Request) -> dict[str, dict[str, Any]]:
        label, _, value = urllib.parse.unquote(request.query["labelSelector"]).partition("=")
        return {
            name: self.seen(pod)
            for name, pod in self.pods.items()
            if pod["metadata"]["labels"].get(label) == value
            and (name in self.processes or pod["spec"]["containers"][0]["image"] in self.trouble)
        }

    def listed(self, request: web.Request) -> dict[str, Any]:
        items = list(self.chosen(request).values())
        return {"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": items}

    async def watched(self, request: web.Request) -> web.StreamResponse:
        """What changes, an event a line, until somebody ends it."""
        answer = web.StreamResponse()
        await answer.prepare(request)
        self.watches.append(asyncio.current_task())  # type: ignore[arg-type]
        told: dict[str, dict[str, Any]] = {}
        while True:
            here = self.chosen(request)
            events = [("DELETED", told.pop(name)) for name in list(told) if name not in here]
            for name, pod in here.items():
                if told.get(name) != pod:
                    events.append(("MODIFIED" if name in told else "ADDED", pod))
                    told[name] = pod
            for kind, pod in events:
                with contextlib.suppress(ConnectionError):  # it was closed
                    await answer.write(json.dumps({"type": kind, "object": pod}).encode() + b"\n")
            await asyncio.sleep(0.02)

    def answer(self, body: Any, status: int) -> web.Response:
        return web.json_response(body, status=status)

    async def start(self, pod: dict[str, Any]) -> None:
        """What a kubelet does with the one container."""
        container = pod["spec"]["containers"][0]
        if container["image"] in self.trouble:
            return
        self.address += 1
        pod["status"] = {"podIP": f"127.0.0.{self.address}"}
        command = [sys.executable if part == "python" else part for part in container["command"]]
        command = [part.replace("0.0.0.0", pod["status"]["podIP"]) for part in command]
        paths = os.pathsep.join([str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
        variables = {"PATH": os.environ["PATH"], "PYTHONPATH": paths}
        self.processes[pod["metadata"]["name"]] = await asyncio.create_subprocess_exec(
            *command, env=variables, stdin=asyncio.subprocess.PIPE, start_new_session=True
        )

    def seen(self, pod: dict[str, Any]) -> dict[str, Any]:
        """With the status it has now."""
        if pod["kind"] != "Pod":
            return pod
        image = pod["spec"]["containers"][0]["image"]
        common = {"name": "environment", "image": image, "imageID": "", "restartCount": 0}
        if self.trouble.get(image) == "":
            full = {"reason": "Unschedulable", "message": "0/1 nodes are available: insufficient cpu."}
            return {
                **pod,
                "status": {"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "False", **full}]},
            }
        if image in self.trouble:
            message = self.said.get(image, f"about {image}")
            waiting = {"waiting": {"reason": self.trouble[image], "message": message}}
            return {
                **pod,
                "status": {"phase": "Pending", "containerStatuses": [{**common, "ready": False, "state": waiting}]},
            }
        ended = self.processes[pod["metadata"]["name"]].returncode is not None
        probe = pod["spec"]["containers"][0]["readinessProbe"]["tcpSocket"]
        ready = not ended and _listens(pod["status"]["podIP"], probe["port"])
        status = {"phase": "Failed" if ended else "Running", "podIP": pod["status"]["podIP"]}
        return {
            **pod,
            "status": {**status, "containerStatuses": [{**common, "ready": ready, "state": {"running": {}}}]},
        }

    async def end(self, name: str) -> None:
        process = self.processes.get(name)
        if process is not None and process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()

    def settings(self, **options: Any) -> PodSettings:
        return PodSettings("run-1", "registry.local/team/tasks:1", **{"port": 8011, "orphan_seconds": 60.0, **options})

    def backend(self, target: str = "misbehaving:MisbehavingTask", **options: Any) -> PodBackend:
        settings = self.settings(**options.pop("settings", {}))
        return PodBackend(target, {}, settings, **{"limits": {"call_seconds": 5.0}, **options})


def _listens(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), 1.0):
        return True
    return False


Scenario = Callable[[RecordedCluster], Awaitable[None]]


@pytest.fixture
def with_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Scenario], None]:
    monkeypatch.setattr(pods, "POLL", 0.05)
    monkeypatch.setattr(pods, "CONNECT_PAUSE", 0.01)
    for variable in ("KUBERNETES_SERVICE_HOST", "HTTP_PROXY", "http_proxy"):
        monkeypatch.delenv(variable, raising=False)

    def run(scenario: Scenario) -> None:
        async def whole() -> None:
            async with RecordedCluster() as cluster:
                access = {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [{"name": "local", "cluster": {"server": cluster.url}}],
                    "users": [{"name": "me", "user": {"token": "mine"}}],
                    "contexts": [{"name": "here", "context": {"cluster": "local", "user": "me"}}],
                    "current-context": "here",
                }
                (tmp_path / "kubeconfig").write_text(json.dumps(access))
                monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
                import kubernetes.aio.config.kube_config as kube_config

                monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "kubeconfig"))
                await scenario(cluster)

        asyncio.run(asyncio.wait_for(whole(), 100))

    return run


def pool_of(backend: PodBackend, **settings: Any) -> EnvPool:
    chosen = PoolSettings(**{"size": 2, "owner": "run-1", "start_tries": 2, "backoff_first": 0.1, **settings})
    return EnvPool(backend, chosen, EventLog(MemorySink(), asyncio.get_running_loop().time))


@needs_client
def test_pods_are_played_replaced_and_removed_on_a_recorded_local_api_server(
    with_cluster: Callable[[Scenario], None],
) -> None:
    async def scenario(cluster: RecordedCluster) -> None:
        stale = pod_manifests.pod_manifest(cluster.settings(), "left-over", "x", "0" * 64)
        other = pod_manifests.pod_manifest(PodSettings("other-run", "x"), "of-somebody-else", "x", "0" * 64)
        cluster.trouble["x"] = "ContainerCreating"
        cluster.pods = {"left-over": stale, "of-somebody-else": other}
        pool = pool_of(cluster.backend())
        await pool.open()
        assert "left-over" not in cluster.pods
        first = await pool.acquire(PROMPT, lambda _: None)
        await first.reset(Prompt("k", "misbehaving", 1, "be good"))
        assert (await first.step((1,))).done
        await pool.release(first, True)
        bad = await pool.acquire(PROMPT, lambda _: None)
        await bad.reset(Prompt("k", "misbehaving", 1, "end the process"))
        with pytest.raises(TrajectoryError, match="environment_died"):
            await bad.step((1,))
        await pool.release(bad, False)
        again = await pool.acquire(PROMPT, lambda _: None)
        assert again.name != bad.name
        await again.reset(Prompt("k", "misbehaving", 1, "be good"))
        await pool.close()
        assert list(cluster.pods) == ["of-somebody-else"]
        assert cluster.daemons == {}
        assert all(process.returncode is not None for process in cluster.processes.values())
        reads = [path for method, path, _ in cluster.asked if method == "GET" and "/pods" in path]
        assert len(reads) == 4, "a list and a watch, and a look after each removal, however many pods started"

    with_cluster(scenario)


@needs_client
def test_each_prompt_s_image_runs_and_one_that_is_not_there_is_refused_on_a_recorded_local_api_server(
    with_cluster: Callable[[Scenario], None],
) -> None:
    def template_of(prompt: Prompt) -> EnvironmentTemplate:
        return EnvironmentTemplate(image=prompt.key)

    async def scenario(cluster: RecordedCluster) -> None:
        cluster.trouble["registry.local/none:1"] = "ErrImagePull"
        cluster.said["registry.local/none:1"] = "failed to resolve reference: registry.local/none:1: not found"
        events = EventLog(MemorySink(), asyncio.get_running_loop().time)
        pool = EnvPool(cluster.backend(), PoolSettings(size=2, owner="run-1", backoff_first=0.1), events, template_of)
        await pool.open()
        assert not cluster.pods, "nobody has asked yet"
        for image in ("registry.local/one:1", "registry.local/two:1"):
            found = await pool.acquire(Prompt(image, "misbehaving", 1, "be good"), lambda _: None)
            running = [pod["spec"]["containers"][0]["image"] for pod in cluster.pods.values()]
            assert running[-1] == image
            await pool.release(found, True)
        with pytest.raises(TrajectoryError, match=r"environment_template.*none:1: not found"):
            await pool.acquire(Prompt("registry.local/none:1", "misbehaving", 1, "x"), lambda _: None)
        with pytest.raises(TrajectoryError, match=r"environment_template.*not the name of an image"):
            await pool.acquire(Prompt("no such; name", "misbehaving", 1, "x"), lambda _: None)
        await pool.close()
        assert not cluster.pods
        made = [
            body["spec"]["containers"][0]["command"]
            for method, path, body in cluster.asked
            if method == "POST" and path.endswith("/pods")
        ]
        digests = [command[command.index("--token-digest") + 1] for command in made]
        assert len(set(digests)) == len(digests) >= 3, "each pod has a token of its own"

    with_cluster(scenario)


@needs_client
def test_a_watch_that_breaks_is_made_again_on_a_recorded_local_api_server(
    with_cluster: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pod_watch, "PAUSE", 0.05)

    async def scenario(cluster: RecordedCluster) -> None:
        backend = cluster.backend()
        await backend.open()
        for watch in cluster.watches:
            watch.cancel()
        await (await backend.start("run-1-e1")).kill()
        reads = [path for method, path, _ in cluster.asked if method == "GET" and path.endswith("/pods")]
        assert len(reads) >= 4
        await backend.close()

    with_cluster(scenario)


@needs_client
def test_a_lost_connection_is_made_again_and_nothing_is_done_twice_on_a_recorded_local_api_server(
    with_cluster: Callable[[Scenario], None],
) -> None:
    async def scenario(cluster: RecordedCluster) -> None:
        backend = cluster.backend()
        await backend.open()
        session = await backend.start("run-1-e1")
        channel: Any = session._channel
        await session.reset(Prompt("k", "misbehaving", 1, "count slowly"))
        made = [channel._connection]
        for number in (1, 2, 3):
            step = asyncio.create_task(session.step((1,)))
            await asyncio.sleep(0.1)
            channel._connection[1].transport.abort()  # while the environment works
            assert (await step).reward == float(number)
            made.append(channel._connection)
        assert len({id(connection) for connection in made}) == 4
        await session.kill()
        await backend.close()

    with_cluster(scenario)


@needs_client
@pytest.mark.long
def test_who_has_no_token_gets_nothing_on_a_recorded_local_api_server(with_cluster: Callable[[Scenario], None]) -> None:
    async def scenario(cluster: RecordedCluster) -> None:
        backend = cluster.backend()
        await backend.open()
        session = await backend.start("run-1-e1")
        host = next(iter(cluster.pods.values()))["status"]["podIP"]
        reader, writer = await asyncio.open_connection(host, 8011)
        writer.write(b"guess\n")
        assert await asyncio.wait_for(reader.read(), 30) == b""
        writer.close()
        await session.ping()
        token = session._channel._token  # type: ignore[attr-defined]
        assert not any(token in json.dumps(body) for _, _, body in cluster.asked)
        await backend.close()

    with_cluster(scenario)


@needs_client
def test_a_pod_ends_when_nobody_is_connected_on_a_recorded_local_api_server(
    with_cluster: Callable[[Scenario], None],
) -> None:
    async def scenario(cluster: RecordedCluster) -> None:
        backend = cluster.backend(settings={"orphan_seconds": 1.0})
        await backend.open()
        session = await backend.start("run-1-e1")
        channel: Any = session._channel
        channel._disconnect()  # as the kernel does for a killed orchestrator
        process = next(iter(cluster.processes.values()))
        assert await asyncio.wait_for(process.wait(), 60) == 0
        await backend.close()

    with_cluster(scenario)


@needs_client
@pytest.mark.long
def test_a_busy_pod_ends_too_when_nobody_is_connected_on_a_recorded_local_api_server(
    with_cluster: Callable[[Scenario], None],
) -> None:
    async def scenario(cluster: RecordedCluster) -> None:
        backend = cluster.backend(settings={"orphan_seconds": 1.0}, limits={"call_seconds": 1.0})
        await backend.open()
        session = await backend.start("run-1-e1")
        await session.reset(Prompt("k", "misbehaving", 1, "busy loop"))
        step = asyncio.create_task(session.step((1,)))
        await asyncio.sleep(0.2)
        step.cancel()
        channel: Any = session._channel
        channel._disconnect()
        process = next(iter(cluster.processes.values()))
        assert await asyncio.wait_for(process.wait(), 60) == 128 + signal.SIGALRM
        await backend.close()

    with_cluster(scenario)


@needs_client
def test_images_come_from_the_mirror_first_and_are_pulled_ahead_on_a_recorded_local_api_server(
    with_cluster: Callable[[Scenario], None],
) -> None:
    async def scenario(cluster: RecordedCluster) -> None:
        cluster.trouble["mirror:5000/team/tasks:1"] = "ImagePullBackOff"
        backend = cluster.backend(settings={"registry_mirror": "mirror:5000"}, pre_pull=True)
        await backend.open()
        session = await backend.start("run-1-e1")
        created = [body for method, path, body in cluster.asked if method == "POST"]
        images = [body["spec"]["containers"][0]["image"] for body in created if body["kind"] == "Pod"]
        assert images == ["mirror:5000/team/tasks:1", "registry.local/team/tasks:1"]
        daemon = next(body for body in created if body["kind"] == "DaemonSet")
        assert daemon["spec"]["template"]["spec"]["containers"][0]["image"] == "mirror:5000/team/tasks:1"
        while cluster.daemons:
            await asyncio.sleep(0.02)  # it goes when all nodes have the image
        await session.kill()
        assert not cluster.pods
        await backend.close()

    with_cluster(scenario)


@needs_client
@pytest.mark.parametrize("reason", ["ErrImagePull", "CreateContainerConfigError"])
def test_a_pod_that_does_not_start_is_deleted_and_says_why_on_a_recorded_local_api_server(
    with_cluster: Callable[[Scenario], None], reason: str
) -> None:
    async def scenario(cluster: RecordedCluster) -> None:
        cluster.trouble["registry.local/team/tasks:1"] = reason
        pool = pool_of(cluster.backend())
        with pytest.raises(RunError, match=f"failed 2 times in a row: .*{reason}: about registry.local"):
            await pool.open()
        assert not cluster.pods
        await pool.close()

    with_cluster(scenario)


@needs_client
def test_a_pod_that_finds_no_node_says_so_when_its_time_is_over_on_a_recorded_local_api_server(
    with_cluster: Callable[[Scenario], None],
) -> None:
    async def scenario(cluster: RecordedCluster) -> None:
        cluster.trouble["registry.local/team/tasks:1"] = ""
        pool = pool_of(cluster.backend(), start_timeout=1.5, start_tries=1)  # the pod is there long before
        with pytest.raises(RunError, match=r"took over 1.5 s; pod .*: Unschedulable: 0/1 nodes are available"):
            await pool.open()
        assert not cluster.pods
        await pool.close()

    with_cluster(scenario)


@needs_client
@pytest.mark.parametrize("status", [401, 403])
def test_a_refusal_names_what_the_account_needs_on_a_recorded_local_api_server(
    with_cluster: Callable[[Scenario], None], status: int
) -> None:
    async def scenario(cluster: RecordedCluster) -> None:
        cluster.status = status
        pool = pool_of(cluster.backend())
        with pytest.raises(ConfigError, match=f"HTTP {status}.*deletecollection"):
            await pool.open()
        cluster.status = 0
        await pool.close()
        pool = pool_of(cluster.backend(context="elsewhere"))
        with pytest.raises(ConfigError, match="elsewhere"):
            await pool.open()
        await pool.close()

    with_cluster(scenario)


@needs_client
def test_a_killed_run_s_many_pods_are_removed_a_page_at_a_time_on_a_recorded_local_api_server(
    with_cluster: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pods, "API_LIMIT", 1.0)
    monkeypatch.setattr(pods, "REMOVE_PAGE", 20)

    async def scenario(cluster: RecordedCluster) -> None:
        cluster.trouble["left"] = "ErrImagePull"
        for number in range(100):  # which takes 2 s: more than a request may
            name = f"left-{number}"
            cluster.pods[name] = pod_manifests.pod_manifest(cluster.settings(), name, "left", "0" * 64)
        cluster.removal = 0.02
        backend = cluster.backend()
        await backend.open()
        assert not cluster.pods
        await backend.close()

    with_cluster(scenario)


@needs_client
def test_an_api_server_that_is_gone_at_the_end_hides_nothing_on_a_recorded_local_api_server(
    with_cluster: Callable[[Scenario], None], caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(cluster: RecordedCluster) -> None:
        backend = cluster.backend()
        await backend.open()
        cluster.status = 503
        await backend.close()
        await backend.close()

    with_cluster(scenario)
    assert "pods of this run may be left" in caplog.text


@needs_client
def test_a_token_that_a_program_gives_is_renewed_on_a_recorded_local_api_server(
    with_cluster: Callable[[Scenario], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pods, "TOKEN_SECONDS", 0.1)

    async def scenario(cluster: RecordedCluster) -> None:
        program = tmp_path / "login"
        said = '{"kind": "ExecCredential", "apiVersion": "client.authentication.k8s.io/v1", "status": {"token": "%s"}}'
        program.write_text(f"#!/bin/sh\necho x >>{tmp_path}/asked\nprintf '{said}' $(wc -l <{tmp_path}/asked)\n")
        program.chmod(0o700)
        access = json.loads((tmp_path / "kubeconfig").read_text())
        how = {"apiVersion": "client.authentication.k8s.io/v1", "command": str(program), "interactiveMode": "Never"}
        access["users"] = [{"name": "me", "user": {"exec": how}}]
        (tmp_path / "kubeconfig").write_text(json.dumps(access))
        backend = cluster.backend()
        await backend.open()
        assert cluster.tokens == {"Bearer 1": None}
        async with asyncio.timeout(20):
            while len(cluster.tokens) < 2:
                await asyncio.sleep(0.2)
                await backend._remove_all()
        await backend.close()

    with_cluster(scenario)


# -- manifests: no server ----------------------------------------------------------------------------------------------


def test_every_pod_is_labelled_limited_and_ends_by_itself() -> None:
    settings = PodSettings("Run_1", "image", lifetime=77, owner_pod=("me", "uid"), node_selector={"pool": "cpu"})
    pod = pod_manifests.pod_manifest(settings, "e1", "image", "0" * 64)
    spec, container = pod["spec"], pod["spec"]["containers"][0]
    assert pod["metadata"]["labels"]["rl-coserve/owner"] == "run-1"
    assert pod_manifests.label_selector(settings) == "rl-coserve/owner=run-1"
    assert pod["metadata"]["ownerReferences"][0]["uid"] == "uid"
    assert (spec["restartPolicy"], spec["activeDeadlineSeconds"]) == ("Never", 77)
    assert spec["automountServiceAccountToken"] is False
    assert spec["nodeSelector"] == {"pool": "cpu"}
    assert container["resources"]["limits"] == container["resources"]["requests"] == {"cpu": "500m", "memory": "512Mi"}
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    daemon = pod_manifests.pre_pull_manifest(settings, "image")
    assert daemon["metadata"]["labels"]["rl-coserve/owner"] == "run-1"
    assert "ownerReferences" in daemon["metadata"]


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        ("ghcr.io/team/tasks:1", "mirror/team/tasks:1"),
        ("localhost/tasks", "mirror/tasks"),
        ("host:5000/tasks", "mirror/tasks"),
        ("team/tasks", "mirror/team/tasks"),
        ("tasks", "mirror/tasks"),
    ],
)
def test_a_mirror_replaces_the_registry(image: str, expected: str) -> None:
    assert mirrored(image, "mirror/") == expected
    assert mirrored(image, "") == image


def test_names_are_what_kubernetes_accepts() -> None:
    assert name_of("My_Run.001", "e00001") == "my-run-001-e00001"
    assert len(name_of("x" * 200, "e00001")) == 63
    assert name_of("---") == "run"


def test_an_owner_is_the_same_for_every_life_of_a_run_and_no_other(tmp_path: Path) -> None:
    first, second = tmp_path / "a" / "run-001", tmp_path / "b" / "run-001"
    for folder in (first, second):
        folder.mkdir(parents=True)
    assert environment_owner(first) == environment_owner(first)
    assert environment_owner(first) != environment_owner(second)


def test_a_pod_lives_through_its_start_and_its_last_episode() -> None:
    seconds = ["environment.start_timeout=3600", "environment.max_age_seconds=1000", "rollout.trajectory_timeout=100"]
    config = load_config(None, ['environment={backend="kubernetes", kubernetes={image="i"}}', *seconds])
    pool = build_environment_pool(config, make_task(config), "run-1", EventLog(MemorySink(), lambda: 0.0))
    assert pool is not None
    backend = pool._backend
    assert isinstance(backend, PodBackend)
    assert backend.settings.lifetime >= 3600 + 1000 + 100


def test_pods_cannot_use_tools_on_loopback() -> None:
    config = load_config(
        None,
        ["environment.backend=kubernetes", 'environment.kubernetes.image="i"', 'tools.functions={a="m:f"}'],
    )
    events = EventLog(MemorySink(), lambda: 0.0)
    with pytest.raises(ConfigError, match=r"give tools\.urls"):
        build_environment_pool(config, None, "run-1", events)  # type: ignore[arg-type]


def test_without_the_client_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "kubernetes"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    backend = PodBackend("m:f", {}, PodSettings("run-1", "image"), limits={})
    with pytest.raises(ConfigError, match=r"rl-coserve\[kubernetes\]"):
        asyncio.run(backend.open())


class Answer:
    """What an API server says: lines."""

    status, reason = 200, ""

    def __init__(self, *said: Any) -> None:
        self._lines = [json.dumps(one).encode() + b"\n" for one in said]
        self.content = self

    async def read(self) -> bytes:
        return self._lines[0]

    async def readline(self) -> bytes:
        return self._lines.pop(0) if self._lines else b""

    def close(self) -> None:
        pass


def a_pod(name: str, version: str = "") -> dict[str, Any]:
    return {"metadata": {"name": name, "resourceVersion": version}}


def test_a_list_comes_in_pages_and_a_watch_that_ran_its_time_goes_on_without_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pod_watch, "PAUSE", 0.0)
    pages = [
        Answer({"metadata": {"continue": "next"}, "items": [a_pod("one")]}),
        Answer({"metadata": {"resourceVersion": "5"}, "items": [a_pod("two")]}),
    ]
    answers = [
        *pages,
        Answer({"type": "ADDED", "object": a_pod("three", "8")}, {"type": "BOOKMARK", "object": a_pod("", "9")}),
        Answer({"type": "ERROR", "object": {"code": 410}}),  # after which everything is listed anew
        Answer({"metadata": {"resourceVersion": "20"}, "items": []}),
    ]
    asked: list[dict[str, Any]] = []

    async def list_pods(**options: Any) -> Answer:
        asked.append(options)
        if not answers:
            await asyncio.sleep(100)
        return answers.pop(0)

    async def play() -> None:
        watch = pod_watch.PodWatch(list_pods, lambda item: item, RuntimeError)
        for name in ("one", "two", "three"):
            watch.expect(name)
        await watch.begin()
        assert watch.pod("one")
        assert watch.pod("two")
        running = asyncio.create_task(watch.run())
        await asyncio.wait_for(watch.change("three"), 5)
        async with asyncio.timeout(5):
            while len(asked) < 6:
                await asyncio.sleep(0.001)
        running.cancel()
        for name in ("one", "two", "three"):
            with pytest.raises(LookupError, match="deleted"):
                watch.pod(name)
        watch.expect("four")
        watch._take("four", a_pod("four"))
        watch.forget("four")
        assert not watch._pods  # of ten thousand that run each would be kept

    asyncio.run(play())
    assert [options.get("resource_version") for options in asked] == [None, None, "5", "9", None, "20"]
    assert [options.get("_continue") for options in asked[:2]] == [None, "next"]
    assert all(options["limit"] == pod_watch.PAGE for options in asked if "watch" not in options)
