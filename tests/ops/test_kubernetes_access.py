"""The doctor asks a cluster what this account may do there, against a local twin of the API server's review."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from orchestrator.api import ConfigError
from orchestrator.config import Config, parse_config
from orchestrator.ops.doctor import run_checks
from orchestrator.ops.doctor_config import checks_for_config

pytest.importorskip("kubernetes", reason="the extra 'kubernetes' is not installed")
from orchestrator.ops.kubernetes_access import VERBS, check_cluster_access

REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"


class TwinServer(ThreadingHTTPServer):
    """Answers reviews as the API does, and nothing else."""

    def __init__(self) -> None:
        self.forbidden: set[tuple[str, str]] = set()  # (verb, resource)
        self.asked: list[dict[str, Any]] = []
        self.paths: set[str] = set()
        self.status = 201
        super().__init__(("127.0.0.1", 0), _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: TwinServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.paths.add(self.path)
        wanted = body["spec"]["resourceAttributes"]
        self.server.asked.append(wanted)
        body["status"] = {"allowed": (wanted["verb"], wanted["resource"]) not in self.server.forbidden}
        data = json.dumps(body).encode()
        self.send_response(self.server.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def twin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TwinServer]:
    server = TwinServer()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    access = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_address[1]}"}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    (tmp_path / "kubeconfig").write_text(json.dumps(access))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    import kubernetes.aio.config.kube_config as kube_config

    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "kubeconfig"))
    yield server
    server.shutdown()
    server.server_close()


def config(**settings: object) -> Config:
    pods = {"image": "i", "namespace": "rl", **settings}
    return parse_config({"environment": {"backend": "kubernetes", "kubernetes": pods}})


def test_an_account_that_may_everything_passes_a_twin_and_nothing_is_made(twin: TwinServer) -> None:
    found = check_cluster_access(config().environment.kubernetes)
    assert (found.status, found.fix) == ("ok", "")
    assert "namespace rl at http://127.0.0.1" in found.detail
    assert twin.paths == {REVIEWS}
    asked = {(item["verb"], item["resource"], item["namespace"]) for item in twin.asked}
    assert asked == {(verb, resource, "rl") for verb in VERBS for resource in ("pods",)}


def test_what_a_twin_refuses_is_named(twin: TwinServer) -> None:
    twin.forbidden = {("create", "pods"), ("deletecollection", "pods"), ("create", "daemonsets")}
    found = check_cluster_access(config().environment.kubernetes)
    assert found.status == "fail"
    assert found.detail.endswith("this account may not: create pods, deletecollection pods")
    assert "Role" in found.fix
    assert "create daemonsets" in check_cluster_access(config(pre_pull=True).environment.kubernetes).detail


def test_a_server_that_is_away_fails_and_one_that_refuses_is_an_error(twin: TwinServer) -> None:
    twin.status = 401
    with pytest.raises(ConfigError, match="HTTP 401"):
        check_cluster_access(config().environment.kubernetes)
    twin.shutdown()
    twin.server_close()
    found = check_cluster_access(config().environment.kubernetes)
    assert (found.status, "does not answer" in found.detail, bool(found.fix)) == ("fail", True, True)


def test_the_doctor_asks_where_the_config_has_pods_and_nowhere_else(twin: TwinServer) -> None:
    twin.forbidden = {("create", "pods")}
    wanted = [check for check in checks_for_config([], config()) if check.name == "kubernetes"]
    (result,) = run_checks(wanted)
    assert (result.status, "create pods" in result.detail) == ("fail", True)
    assert "kubernetes" not in [check.name for check in checks_for_config([], parse_config({}))]


def test_a_kubeconfig_that_is_not_there_is_one_error(tmp_path: Path, twin: TwinServer) -> None:
    with pytest.raises(ConfigError) as caught:
        check_cluster_access(config(context="no-such").environment.kubernetes)
    assert caught.value.field == "environment.kubernetes.context"
