"""A whole run with real engines whose processes are in pools and whose metadata is on a Redis server that dies meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.ledger import recount
from orchestrator.resources.resource_manager import decode_view
from orchestrator.transfer.redis_metadata import PASSWORD_FILE, RedisMetadata
from tests.support.real_runs import of

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(420)]
ROOT = Path(__file__).parents[2]
SECRET = "correct-horse-battery"
SMALL = ["rollout.groups_per_step=4", "rollout.environments=32", "trainer.micro_batch_size=8", "evaluation.prompts=40"]
SMALL += ["rollout.dynamic_sampling=false"]  # nothing is learned here: 24 groups a step would be replaced
SMALL += ["run.steps=8", "checkpoint.every=2", "evaluation.every=0", "warmup.steps=5", "run.name=t"]
PLACED = ["resources.pools={H800 = 1, H20 = 1}", "rollout.routing.affinity.default=H20", "rollout.routing.cap=16"]


def test_a_run_in_pools_survives_a_short_outage_of_its_redis_server(
    redis_servers: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = redis_servers(password=SECRET)
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    options = [
        f'run.folder="{tmp_path}"',
        f"relay.metadata_url={server.url}",
        f'relay.metadata_password_file="{secret}"',
    ]
    command = [sys.executable, "-m", "orchestrator.cli", "train", "examples/frozenlake.toml", *SMALL, *PLACED, *options]
    environment = {**os.environ, "NO_COLOR": "1"}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    run = tmp_path / "t-001"
    try:
        deadline = time.monotonic() + 240
        while len(of(run, "step")) < 2 and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        assert process.poll() is None, process.communicate()[0]
        monkeypatch.setenv(PASSWORD_FILE, str(secret))
        store = RedisMetadata(server.url)
        present = store.get("rlc/resources/default")
        store.close()
        assert present is not None
        held = {item.wish.worker.partition("/")[2]: item.hardware for item in decode_view(present[0]).bindings.values()}
        assert held == {"trainer": "H800", "vllm-0": "H20"}
        server.kill()
        time.sleep(1.5)
        server.start()
        output, _ = process.communicate(timeout=240)
        assert process.returncode == 0, output
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert len(of(run, "step")) == 8
    assert [(event["worker"].partition("/")[2], event["hardware"]) for event in of(run, "bound")] == [*held.items()]
    counted = recount((run / "ledger.jsonl").read_text().splitlines())
    assert counted["in_flight"] == 0
    assert counted["trained"] > 0
    store = RedisMetadata(server.url)
    left = store.get("rlc/resources/default")
    assert left is not None
    assert decode_view(left[0]).bindings == {}
    assert SECRET not in output
    for file in run.rglob("*"):
        assert not file.is_file() or SECRET.encode() not in file.read_bytes(), file
