"""Whole runs whose only rollout worker is a real ``vllm serve`` that somebody else started: two runs, one after the other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.events import read_events
from orchestrator.tasks.frozenlake import VOCABULARY

pytestmark = [pytest.mark.engine, pytest.mark.timeout(420)]

ROOT = Path(__file__).parents[2]
TOKEN = "the-token-of-the-served-run-0123456789"
STEPS = 2
SMALL = [
    f"run.steps={STEPS}",
    "rollout.workers=0",
    "rollout.groups_per_step=2",
    "rollout.environments=16",
    "rollout.dynamic_sampling=false",  # nothing is learned here: 24 groups a step would be replaced
    "trainer.micro_batch_size=8",
    "checkpoint.every=8",
    "evaluation.prompts=8",
    "evaluation.every=0",
    "warmup.steps=0",
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, vllm_serve: Any) -> Iterator[Any]:
    from megatron_rlplugin.tiny_model import create_qwen3

    folder = tmp_path_factory.mktemp("server")
    create_qwen3(
        str(folder / "model"), hidden_size=64, intermediate_size=128, layers=2, heads=4, kv_heads=2, head_dim=32,
        vocabulary=VOCABULARY, max_positions=64, dtype="float32", seed=5,
    )  # fmt: skip
    options = ("--max-model-len", "64", "--max-num-seqs", "16", "--served-model-name", "tiny")
    with vllm_serve(folder, folder / "model", TOKEN, *options) as running:
        yield running


def trained(server: Any, folder: Path, name: str, *overrides: str) -> Path:
    """The folder of a run that has completed."""
    model = server.token_file.parent / "model"
    place = [f'run.folder="{folder}"', f"run.name={name}", f'model.path="{model}"']
    place += [f'rollout.served=["{server.url}"]', f'rollout.served_token_file="{server.token_file}"']
    command = [sys.executable, "-m", "orchestrator.cli", "train", "examples/frozenlake.toml", *SMALL, *place]
    environment = {name: value for name, value in os.environ.items() if name != "RL_COSERVE_TOKEN"}
    done = subprocess.run(
        [*command, *overrides], cwd=ROOT, env={**environment, "NO_COLOR": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr + server.log.read_text()[-4000:]
    return folder / f"{name}-001"


def asked(server: Any, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(server.url + path, data, headers), timeout=60) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


@pytest.mark.long
def test_two_runs_train_one_after_the_other_on_a_served_worker_and_leave_it_to_its_users(
    server: Any, tmp_path: Path
) -> None:
    """The log-prob gap says that the server had the weights that were trained, in the second run too."""
    for number, name in enumerate(("first", "second")):
        run = trained(server, tmp_path, name, f"run.seed={number}")
        events = read_events(run / "events.jsonl")
        steps = [event for event in events if event["kind"] == "step"]
        assert [step["version"] for step in steps] == list(range(1, STEPS + 1))
        assert all(step["metrics"]["logprob_gap_mean"] < 1e-3 for step in steps)
        assert {event["version"] for event in events if event["kind"] == "update"} == set(range(STEPS + 1))
        assert {event["name"] for event in events if event["kind"] == "worker"} == {server.url}
        assert not [event for event in events if event["kind"] in ("fault", "alarm")]
        assert TOKEN not in "".join(file.read_text() for file in (run / "events.jsonl", run / "config.json"))
        status = asked(server, "/rl/status")
        assert (status["history"]["job"], status["weight_version"]) == (f"{name}-001", STEPS)
        assert (status["unfinished"], status["suspended"]) == (0, False)
        answer = asked(server, "/v1/completions", {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 3})
        assert answer["usage"]["completion_tokens"] == 3
    assert server.process.poll() is None


@pytest.mark.long
def test_turns_go_to_own_and_served_workers_by_the_share_of_their_caps_that_is_taken(
    server: Any, tmp_path: Path
) -> None:
    spread = ["rollout.workers=1", "rollout.routing.spread=least-utilized"]
    caps = ["rollout.routing.cap=16", "rollout.routing.served_cap=16"]
    run = trained(server, tmp_path, "spread", *spread, *caps)
    rows = [json.loads(line) for line in (run / "turns.jsonl").read_text().splitlines()]
    turns = Counter(row[2] for row in rows)
    assert set(turns) == {server.url, "vllm-0"}
    assert min(turns.values()) > 0.2 * sum(turns.values()), turns
    assert not [event for event in read_events(run / "events.jsonl") if event["kind"] == "fault"]
