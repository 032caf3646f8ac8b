"""No secret stands in a file of a run, in what it prints, in a page, or in the arguments of a process.

Every secret that a run can be given is marked; those that a run makes for itself are read from its children's environments, the
only place where they may be. Then every file, every line that was printed and every process's arguments are searched.
"""

from __future__ import annotations

import asyncio
import os
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

from orchestrator.config import Config, load_config, to_json
from orchestrator.run_folder import RunFolder
from tests.support import view_runs

ROOT = Path(__file__).parents[2]
MARK = "MARKED-SECRET-"
ENVIRONMENT = (
    "RL_COSERVE_TOKEN", "RL_COSERVE_REWARD_TOKEN", "RL_COSERVE_TOOLS_TOKEN", "RL_COSERVE_JUDGE_TOKEN",
    "RL_COSERVE_REDIS_PASSWORD", "WANDB_API_KEY", "OTEL_EXPORTER_OTLP_HEADERS", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN",
)  # fmt: skip
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
    """Looks at all processes below one, while the body of :meth:`watching` runs: their arguments, and generated secrets."""

    def __init__(self, root: int) -> None:
        self.root = root
        self.arguments: set[bytes] = set()
        self.generated: set[bytes] = set()

    def look(self) -> None:
        for process in descendants(self.root):
            try:
                self.arguments.add(Path(f"/proc/{process}/cmdline").read_bytes())
                variables = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            for variable in variables:
                name, _, value = variable.partition(b"=")
                if name.startswith(b"RL_COSERVE_") and name.endswith(b"_TOKEN") and len(value) >= 16:
                    self.generated.add(value)

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
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)", MARK])
    try:
        watch, deadline = Watch(os.getpid()), time.monotonic() + 10
        while not leaks((("arguments", text) for text in watch.arguments), []) and time.monotonic() < deadline:
            watch.look()
        assert leaks((("arguments", text) for text in watch.arguments), [])
    finally:
        child.kill()
        child.wait()


def test_the_reward_host_and_the_view_of_a_run_keep_their_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The real children of a run, started as a run starts them, and calls through them; no engine."""
    from orchestrator.observe.run_view import ViewProcess
    from orchestrator.rewards.function_client import FunctionClient
    from orchestrator.rewards.host_launch import RewardHost

    for name, value in marked().items():
        monkeypatch.setenv(name, value)
    files = secret_files(tmp_path / "secrets")
    overrides = [f'run.folder="{tmp_path}/runs"', "run.name=t", "view.enabled=true"]
    config: Config = load_config(None, [*overrides, *(f'{name}="{path}"' for name, path in files.items())])
    folder = RunFolder.create(config)
    view_runs.write_unfinished(folder.path, steps=3)
    folder.config_file.write_text(to_json(config))
    said: list[str] = []
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
                request = urllib.request.Request(
                    f"{view.base_url}/{path}", headers={"Authorization": f"Bearer {view.token}"}
                )
                pages.append(
                    (path, await asyncio.to_thread(lambda asked=request: urllib.request.urlopen(asked).read()))
                )
            with pytest.raises(urllib.error.HTTPError) as error:
                await asyncio.to_thread(urllib.request.urlopen, f"{view.base_url}/?token={MARK}wrong")
            pages.append(("refusal", error.value.read()))
            await asyncio.to_thread(watch.look)
        return pages

    with watch.watching():
        pages = asyncio.run(run())
    printed = capfd.readouterr()
    assert len(watch.generated) >= 2, "the hosts have tokens of their own"
    texts = [
        ("stdout", printed.out.encode()),
        ("stderr", printed.err.encode()),
        ("said", "\n".join(said).encode()),
        *pages,
    ]
    texts += [("arguments", arguments) for arguments in watch.arguments]
    assert said, "the view says where it is"
    assert leaks([*texts, *files_below(folder.path)], watch.generated) == []


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
        texts: list[tuple[str, Any]] = [("output", output)]
        texts += [("arguments", line) for line in watch.arguments]
        generated = {value for value in watch.generated if not value.startswith(MARK.encode())}
        assert generated
        found = leaks([*texts, *files_below(tmp_path / "runs"), *files_below(Path(ray))], [*generated, body])
    assert found == []
