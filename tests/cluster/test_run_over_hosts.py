"""A whole run over three hosts: two with a trainer rank and an engine each, one with orchestrator, environments and rewards.
Weights and gradients cross links of 1 Gbit/s."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import real_runs
from tests.support.hosts import Host, Hosts, end, why_not

pytest.importorskip("ray")
pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
    pytest.mark.timeout(420),
]
RAY = [sys.executable, "-m", "ray.scripts.scripts"]
PORT = 6379
RUN = [
    str(real_runs.ROOT / "examples" / "frozenlake.toml"),
    "run.steps=3",
    "warmup.steps=2",
    "evaluation.prompts=4",
    "checkpoint.every=2",
    "trainer.data_parallel=2",
    "rollout.workers=2",
    "rollout.environments=8",
    "resources.pools={H800=2, H20=2}",
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Host]]:
    """Ray over three hosts, each with two logical GPUs but the first, which has none."""
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16), "RAY_USAGE_STATS_ENABLED": "0"}
    os.environ.update(token)  # of what a test starts, too
    try:
        with Hosts(3) as made:
            first, *others = made.all
            common = ["--num-cpus=3", "--object-store-memory=100000000", "--disable-usage-stats"]
            head = ["--head", f"--port={PORT}", "--num-gpus=0", "--include-dashboard=false"]
            first.run([*RAY, "start", f"--node-ip-address={first.address}", *head, *common], timeout=90)
            for host in others:
                classes = json.dumps({"H800": 1, "H20": 1})
                joins = [f"--address={first.address}:{PORT}", "--num-gpus=2", f"--resources={classes}"]
                host.run([*RAY, "start", f"--node-ip-address={host.address}", *joins, *common], timeout=90)
            yield made.all
    finally:
        for name in token:
            os.environ.pop(name, None)


def train(host: Host, folder: Path, *more: str) -> tuple[Path, str]:
    """The run's folder and what it said."""
    where = [f"run.folder={folder}", f"ray.address={host.address}:{PORT}", f"relay.host={host.address}", *more]
    process = host.start(
        [sys.executable, "-m", "orchestrator.cli", "train", *RUN, *where],
        {"NO_COLOR": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        said, _ = process.communicate(timeout=360)
    finally:
        end(process)
    assert process.returncode == 0, said[-3000:]
    return next(folder.glob("*-001")), said


def test_a_run_goes_over_three_hosts(cluster: list[Host], tmp_path: Path) -> None:
    first, *others = cluster
    before = [host.received() for host in others]
    run, said = train(first, tmp_path)
    plan = real_runs.of(run, "places")[0]["processes"]
    nodes = {row["process"]: row["node"] for row in plan}
    assert {nodes["trainer"], nodes["trainer-1"]} == {host.address for host in others}
    assert {nodes["vllm-0"], nodes["vllm-1"]} == {host.address for host in others}
    seen = {event["worker"]: (event["node"], event["devices"]) for event in real_runs.of(run, "devices")}
    assert {name: node for name, (node, _) in seen.items()} == nodes
    assert len({(node, *devices) for node, devices in seen.values()}) == len(seen) == 4
    assert f"devices: {others[0].address}: " in said
    ended = real_runs.of(run, "run_end")[0]
    assert ended["status"] == "completed"
    assert ended["ledger"]["in_flight"] == 0
    for name in nodes:  # what each printed, from its node
        assert f"-- {name}: process " in (run / "logs" / f"{name}.log").read_text(encoding="utf-8")
    versions = {event["version"] for event in real_runs.of(run, "update")}
    assert 3 in versions
    weights = (run / "model-final" / "model.safetensors").stat().st_size
    for host, bytes_before in zip(others, before, strict=True):
        assert host.received() - bytes_before > 3 * weights  # a version per step, and gradients
