"""No secret stands in a file of a run, in what it prints, in a page, in the arguments of a process; no token in an environment.

Every secret that a run can be given is marked; those that a run makes for itself are known where it is started here. Then every
file, every line that was printed, and every process's arguments and environment are searched.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from orchestrator.api import bearer
from orchestrator.config import Config, load_config, to_json
from orchestrator.observe.run_view import ViewProcess
from orchestrator.placement.predictor_client import PredictorProcess
from orchestrator.rewards.host_launch import FunctionHost, JudgeHost, RewardHost, ServingChild
from orchestrator.run_folder import RunFolder
from orchestrator.sandbox.run import Sandbox
from tests.support import view_runs
from tests.support.waiting import wait_for

ROOT = Path(__file__).parents[2]
MARK = "MARKED-SECRET-"
# Of others, who read them from the environment themselves.
OTHERS = ("WANDB_API_KEY", "OTEL_EXPORTER_OTLP_HEADERS", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN")
ENVIRONMENT = (*bearer.VARIABLES, *OTHERS)
HEX = 8  # of a found secret that a failure shows


def marked() -> dict[str, str]:
    return {name: f"{MARK}{name.lower()}" for name in ENVIRONMENT}


def secret_files(folder: Path) -> dict[str, str]:
    """Overrides that name files with secrets."""
    folder.mkdir()
    (folder / "view-token").write_text(f"{MARK}view-token-of-the-user\n")
    (folder / "view-token").chmod(0o600)
    return {"view.token_file": str(folder / "view-token")}


def descendants(root: int) -> list[int]:
    """Of a process, itself included."""
    parents: dict[int, int] = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found = [root]
    for process in found:
        found += [child for child, parent in parents.items() if parent == process]
    return found


class Watch:
    """Looks at all processes below one, while the body of :meth:`watching` runs: at their arguments and environments."""

    def __init__(self, root: int) -> None:
        self.root = root
        self.arguments: set[bytes] = set()
        self.environments: set[bytes] = set()  # of those that it started, without what is meant for others

    def look(self) -> None:
        for process in descendants(self.root):
            try:
                self.arguments.add(Path(f"/proc/{process}/cmdline").read_bytes())
                variables = Path(f"/proc/{process}/environ").read_bytes().split(b"\0") if process != self.root else []
            except OSError:
                continue
            ours = [each for each in variables if each.partition(b"=")[0].decode() not in OTHERS]
            self.environments.add(b"\0".join(ours))

    def texts(self) -> list[tuple[str, bytes]]:
        shown = [("arguments", text) for text in self.arguments]
        return shown + [("environment", text) for text in self.environments]

    @contextmanager
    def watching(self) -> Iterator[None]:
        done = threading.Event()

        def run() -> None:
            while not done.wait(0.1):
                self.look()

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


def leaks(texts: Iterable[tuple[str, bytes]], secrets: Iterable[bytes]) -> list[str]:
    wanted = [MARK.encode(), MARK.lower().encode(), *secrets]
    return [f"{name}: {secret[:HEX]!r}..." for name, text in texts for secret in wanted if secret in text]


def files_below(*folders: Path) -> Iterator[tuple[str, bytes]]:
    for folder in folders:
        for path in folder.rglob("*"):
            if path.is_file() and not path.is_symlink():
                yield str(path), path.read_bytes()


def test_the_search_finds_what_it_looks_for(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(f"token={MARK}x")
    assert len(leaks(files_below(tmp_path), [])) == 1
    environment = {**os.environ, "X": f"{MARK}environment"}
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)", MARK], env=environment)
    try:
        watch, deadline = Watch(os.getpid()), time.monotonic() + 10
        while len(found := leaks(watch.texts(), [])) < 2 and time.monotonic() < deadline:
            watch.look()
        assert {line.partition(":")[0] for line in found} == {"arguments", "environment"}
    finally:
        child.kill()
        child.wait()


@pytest.mark.slow
def test_the_reward_host_and_the_view_of_a_run_keep_their_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The real children of a run, started as a run starts them, and calls through them; no engine."""
    from orchestrator.rewards.function_client import FunctionClient

    for name, value in marked().items():
        monkeypatch.setenv(name, value)
    files = secret_files(tmp_path / "secrets")
    overrides = [f'run.folder="{tmp_path}/runs"', "run.name=t", "view.enabled=true"]
    config: Config = load_config(None, [*overrides, *(f'{name}="{path}"' for name, path in files.items())])
    folder = RunFolder.create(config)
    view_runs.write_unfinished(folder.path, steps=3)
    folder.config_file.write_text(to_json(config))
    said: list[str] = []
    generated: list[bytes] = []
    watch = Watch(os.getpid())

    async def run() -> list[tuple[str, bytes]]:
        pages: list[tuple[str, bytes]] = []
        async with AsyncExitStack() as stack:
            host = RewardHost(
                "json:dumps", concurrency=1, timeout=5.0, idle_seconds=5.0, log=folder.logs / "reward-host.log"
            )
            await host.start()
            stack.push_async_callback(host.stop)
            client = FunctionClient(host.url, token=host.token)
            stack.push_async_callback(client.close)
            assert await client.call({"a": 1}) == '{"a": 1}'
            stranger = FunctionClient(host.url, token=f"{MARK}wrong", retries=0)
            stack.push_async_callback(stranger.close)
            with pytest.raises(Exception, match="check its URL and token") as refused:
                await stranger.call({})
            pages.append(("error", str(refused.value).encode()))
            view = ViewProcess(config, folder, said.append)
            await view.open()
            stack.push_async_callback(view.stop)
            for path in ("", "state.json", "metrics"):
                request = urllib.request.Request(f"{view.base_url}/{path}", headers=bearer.Token(view.token).header())
                pages.append(
                    (path, await asyncio.to_thread(lambda asked=request: urllib.request.urlopen(asked).read()))
                )
            with pytest.raises(urllib.error.HTTPError) as error:
                await asyncio.to_thread(urllib.request.urlopen, f"{view.base_url}/?token={MARK}wrong")
            pages.append(("refusal", error.value.read()))
            generated.append(host.token.encode())
            await asyncio.to_thread(watch.look)
        return pages

    with watch.watching():
        pages = asyncio.run(run())
    printed = capfd.readouterr()
    texts = [
        *watch.texts(),
        ("stdout", printed.out.encode()),
        ("stderr", printed.err.encode()),
        ("said", "\n".join(said).encode()),
        *pages,
    ]
    assert said, "the view says where it is"
    assert generated
    assert leaks([*texts, *files_below(folder.path)], generated) == []


# -- every kind of process of ours ---------------------------------------------------------------------------------------


def started(*command: str, **variables: str) -> subprocess.Popen[bytes]:
    """As by hand, from a shell whose environment has a token."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.Popen([sys.executable, *command], env=environment, stdout=subprocess.PIPE)


def shown_by(processes: Iterable[int]) -> list[tuple[str, bytes]]:
    return [(f"{process}/{name}", Path(f"/proc/{process}/{name}").read_bytes())
            for process in processes for name in ("cmdline", "environ")]  # fmt: skip


def test_no_process_that_is_started_by_hand_shows_its_token(tmp_path: Path) -> None:
    """Neither in its arguments nor in its environment, wherever it was given; and what it starts inherits none."""
    token, file = f"{MARK}by-hand", tmp_path / "token"
    file.write_text(f"{MARK}in-a-file")
    folder = view_runs.write_unfinished(tmp_path / "run", steps=3)
    host = ("-m", "orchestrator.rewards.host", "--function", "f=json:dumps", "--token-env", "HOST_TOKEN")
    worker = ("-m", "orchestrator.environments.environment_process", "--listen", "127.0.0.1:0", "--token-digest")
    view = ("-m", "orchestrator.cli", "view", str(folder))
    children = [
        started(*host, HOST_TOKEN=token),
        started(*host, HOST_TOKEN=f"file:{file}"),
        started(*view, "--token-file", str(file), RL_COSERVE_TOKEN=token, RL_COSERVE_REWARD_TOKEN=token),
        started(*worker, bearer.digest_of(token)),
    ]
    try:
        for child in children[:3]:
            assert child.stdout is not None
            assert child.stdout.readline(), "it is up"
        wait_for(lambda: len(descendants(children[3].pid)) > 1)  # a watcher and its worker
        every = [process for child in children for process in descendants(child.pid)]
        assert len(every) >= 5
        assert leaks(shown_by(every), []) == []
    finally:
        for child in children:
            child.kill()
            child.communicate()


def test_no_process_that_a_run_starts_is_told_its_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hosts of rewards, tools and a judge, the page, the predictor: what they are started with."""
    told: list[tuple[str, bytes]] = []
    monkeypatch.setenv("RL_COSERVE_TOKEN", f"{MARK}given")
    monkeypatch.setattr(bearer, "_taken", {})
    bearer.take_variables()  # as `rl-coserve` does first of all

    async def start(self: object, command: Iterable[str], environment: dict[str, str], *_: object) -> None:
        told.append((type(self).__name__, "\0".join([*command, *environment.values()]).encode()))

    monkeypatch.setattr("orchestrator.child_process.ChildProcess._start_process", start)
    config = load_config(None, [f'run.folder="{tmp_path}"', "run.name=t", "rollout.prediction.enabled=true"])
    folder = RunFolder.create(config)
    hosts: list[ServingChild] = [
        RewardHost("json:dumps"), FunctionHost({"f": "json:dumps"}), JudgeHost("model"), ViewProcess(config, folder, print),
    ]  # fmt: skip
    assert {type(host) for host in hosts} == {
        FunctionHost,
        *ServingChild.__subclasses__(),
        *FunctionHost.__subclasses__(),
    }
    for host in hosts:
        asyncio.run(host._launch(0))
        assert bearer.sealed(host.token).encode() in told[-1][1]
    predictor = PredictorProcess(config.rollout.prediction, 10.0, 0, folder.path / "predictor.npz", None)
    asyncio.run(predictor.start())
    assert len(told) == 5
    assert leaks(told, [host.token.encode() for host in hosts]) == []


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")
def test_an_agents_key_is_on_no_command_line() -> None:
    """Which every user of the machine can read. The agent itself has it in its environment, inside of its sandbox."""
    key, seen = f"{MARK}key-of-an-agent", set[bytes]()
    program = ["/bin/sh", "-c", 'test -n "$OPENAI_API_KEY" && sleep 0.5']

    async def run() -> int | None:
        running = asyncio.ensure_future(Sandbox(slots=1).run(program, environment={"OPENAI_API_KEY": key}))
        while not running.done():
            await asyncio.sleep(0.05)
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                with contextlib.suppress(OSError):
                    seen.add(path.read_bytes())
        return (await running).exit_code

    assert asyncio.run(run()) == 0, "it has its key"
    assert any(b"bwrap" in line for line in seen)
    assert leaks((("arguments", line) for line in seen), []) == []


@pytest.mark.engine
@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_whole_run_leaks_no_secret(tmp_path: Path) -> None:
    """Real engines, Ray's own logs included: files, output, arguments, and the page while it runs."""
    files = secret_files(tmp_path / "secrets")
    key = tmp_path / "secrets" / "signing.pem"
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", str(key)], check=True, capture_output=True)
    key.chmod(0o600)
    body = key.read_text().splitlines()[1].encode()
    small = [
        "model.hidden_size=64",
        "model.intermediate_size=128",
        "rollout.groups_per_step=2",
        "rollout.dynamic_sampling=false",
        "rollout.environments=16",
    ]
    small += ["evaluation.prompts=8", "evaluation.every=0", "warmup.steps=2", "run.steps=2", "rollout.workers=1"]
    place = [f'run.folder="{tmp_path}/runs"', "run.name=t", "view.enabled=true", f'relay.signing_key="{key}"']
    named = [f'{name}="{path}"' for name, path in files.items()]
    with tempfile.TemporaryDirectory(prefix="rs") as ray:  # short: Ray's sockets lie in it
        environment = {**os.environ, **marked(), "NO_COLOR": "1", "RAY_TMPDIR": ray, "PYTHONPATH": str(ROOT)}
        environment.pop("OTEL_EXPORTER_OTLP_HEADERS")
        arguments = [
            sys.executable,
            "-m",
            "orchestrator.cli",
            "train",
            "examples/frozenlake.toml",
            *small,
            *place,
            *named,
        ]
        run: subprocess.Popen[bytes] = subprocess.Popen(
            arguments, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        watch = Watch(run.pid)
        try:
            with watch.watching():
                output, _ = run.communicate(timeout=420)
        finally:
            run.kill()
        assert run.returncode == 0, output.decode()[-2000:]
        texts: list[tuple[str, Any]] = [("output", output), *watch.texts()]
        assert len(watch.environments) > 5
        found = leaks([*texts, *files_below(tmp_path / "runs"), *files_below(Path(ray))], [body])
    assert found == []
