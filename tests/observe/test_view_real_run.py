"""A real run with its live page: the page shows it while it goes on, and no secret of the run is in anything that it shows."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(420)]

ROOT = Path(__file__).parents[2]
OPTIONS = [
    "model.hidden_size=64", "model.intermediate_size=128", "rollout.groups_per_step=4", "rollout.dynamic_sampling=false",
    "rollout.environments=32",
    "rollout.workers=2", "trainer.micro_batch_size=8", "evaluation.prompts=20", "warmup.steps=5", "run.steps=12", "run.name=t",
]  # fmt: skip
_SECRET = re.compile(rb"^(RAY_AUTH_TOKEN|[A-Z_]*TOKEN)=(.{16,})$")


def secrets_of(pid: int) -> Iterator[str]:
    """Tokens in the environment of a process and of all that descend from it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry.name))
    waiting = [pid]
    while waiting:
        one = waiting.pop()
        waiting += children.get(one, [])
        try:
            variables = (Path("/proc") / str(one) / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        for variable in variables:
            if (found := _SECRET.match(variable)) is not None:
                yield found[2].decode()


def test_a_real_run_is_shown_while_it_goes_on_and_no_secret_of_it_is_shown(tmp_path: Path) -> None:
    token = "a-token-that-this-test-made"
    (tmp_path / "token").write_text(token)
    command = [sys.executable, "-m", "orchestrator.cli", "train", "--view", "examples/frozenlake.toml", *OPTIONS]
    command += [f'run.folder="{tmp_path}/runs"', f'view.token_file="{tmp_path}/token"']
    process = subprocess.Popen(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**os.environ, "NO_COLOR": "1"}, start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        url = next(line.split()[1] for line in process.stdout if line.startswith("view: "))
        address = url.split("?")[0]

        def ask(path: str) -> str:
            request = urllib.request.Request(address + path, headers={"Authorization": f"Bearer {token}"})
            with urllib.request.urlopen(request, timeout=30) as answer:
                return str(answer.read().decode())

        shown: dict[str, str] = {}
        busy: dict[str, object] = {}
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline and process.poll() is None:
            now = json.loads(ask("state.json"))
            if now["step"] >= 3 and now["trajectories"] and any("kv_capacity" in row for row in now["workers"]):
                busy = now
                shown = {path: ask(path) for path in ("", "state.json", "metrics", "view.js")}
                break
            time.sleep(0.2)
        assert busy, process.poll()
        assert sum(busy["reasons"].values()) == busy["in_flight"]  # type: ignore[attr-defined]
        assert {row["name"] for row in busy["workers"]} == {"vllm-0", "vllm-1"}  # type: ignore[attr-defined]
        found = set(secrets_of(process.pid)) | {token}
        assert len(found) >= 2  # the reward host's at least
        process.communicate(timeout=120)
        assert process.returncode == 0
        run = tmp_path / "runs" / "t-001"
        for path, text in shown.items():
            assert not [secret for secret in found if secret in text], path
        files = [
            file
            for file in run.rglob("*")
            if file.is_file() and file.suffix in (".json", ".jsonl", ".html", ".log", "")
        ]
        for file in files:
            data = file.read_bytes()
            assert not [secret for secret in found if secret.encode() in data], file
        last = json.loads((run / "live.json").read_text())
        assert last["in_flight"] == 0
        turns = [json.loads(line) for line in (run / "turns.jsonl").read_text().splitlines()]
        assert {worker for _, _, worker, *_ in turns} == {"vllm-0", "vllm-1"}
        assert list((run / "tensorboard").iterdir())
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
