"""Whole runs over three hosts: two with trainer ranks and engines, one with orchestrator, environments and rewards. Weights and
gradients cross links of 1 Gbit/s; hosts die, and links are cut."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import real_runs
from tests.support.hosts import Hosts, end, why_not

pytest.importorskip("ray")
pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
    pytest.mark.timeout(900),
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
    "rollout.engine={}",  # in its place:
    "rollout.engines=[{hardware='H20', kv_cache_mb=64}, {hardware='H20', kv_cache_mb=32, max_num_seqs=16}]",
    "rollout.environments=8",
    "resources.pools={H800=2, H20=2}",
]


class RayHosts:
    """Ray over hosts. ``classes``: of every host but the first, which has no devices: class -> logical GPUs."""

    def __init__(self, hosts: Hosts, *classes: dict[str, int]) -> None:
        self.first, *self.others = hosts.all
        self._classes = classes
        self._common = ["--num-cpus=4", "--object-store-memory=100000000", "--disable-usage-stats"]
        head = ["--head", f"--port={PORT}", "--num-gpus=0", "--include-dashboard=false"]
        self.first.run([*RAY, "start", f"--node-ip-address={self.first.address}", *head, *self._common], timeout=90)
        for number in range(len(classes)):
            self.join(number)

    def join(self, number: int) -> None:
        """This one of the others becomes a node, for the first time or again."""
        host, classes = self.others[number], self._classes[number]
        devices = [f"--num-gpus={sum(classes.values())}", f"--resources={json.dumps(classes)}"]
        where = [f"--address={self.first.address}:{PORT}", f"--node-ip-address={host.address}"]
        host.run([*RAY, "start", *where, *devices, *self._common], timeout=90)

    def train(self, *arguments: str) -> subprocess.Popen[str]:
        """A run, begun on the first host."""
        command = [sys.executable, "-m", "orchestrator.cli", "train", *arguments]
        return self.first.start(command, {"NO_COLOR": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def config(self, folder: Path) -> list[str]:
        """What a run needs to know of these hosts."""
        at = self.first.address
        return [f"run.folder={folder}", f"ray.address={at}:{PORT}", f"relay.host={at}"]


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Ray's nodes and of the run."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(16))


def ended(process: subprocess.Popen[str], seconds: float) -> tuple[int, str]:
    """Its exit code and what it said."""
    try:
        said, _ = process.communicate(timeout=seconds)
    finally:
        end(process)
    return process.returncode, said


def wait_for_step(process: subprocess.Popen[str], folder: Path, step: int, seconds: float = 400) -> Path:
    """Until this one is trained: the run's folder."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        for run in folder.glob("*-001"):
            if any(event["stage"] == "train_step" and event["step"] >= step for event in real_runs.of(run, "stage")):
                return run
        time.sleep(0.5)
    raise AssertionError(ended(process, 5)[1][-3000:])


def closed(run: Path) -> dict[str, int]:
    """The ledger of the run, in which nothing is missing."""
    last = real_runs.of(run, "run_end")[-1]
    assert last["status"] == "completed"
    assert last["ledger"]["in_flight"] == 0
    counts: dict[str, int] = last["ledger"]
    return counts


@pytest.mark.long
def test_a_run_goes_over_three_hosts(tmp_path: Path) -> None:
    with Hosts(3) as hosts:
        nodes = RayHosts(hosts, {"H800": 1, "H20": 1}, {"H800": 1, "H20": 1})
        before = [host.received() for host in nodes.others]
        code, said = ended(nodes.train(*RUN, *nodes.config(tmp_path)), 360)
        received = [host.received() - start for host, start in zip(nodes.others, before, strict=True)]
    assert code == 0, said[-3000:]
    run = next(tmp_path.glob("*-001"))
    rows = real_runs.of(run, "places")[0]["processes"]
    places = {row["process"]: row["node"] for row in rows}
    addresses = {host.address for host in nodes.others}
    assert {places["trainer"], places["trainer-1"]} == {places["vllm-0"], places["vllm-1"]} == addresses
    seen = {event["worker"]: (event["node"], event["devices"]) for event in real_runs.of(run, "devices")}
    assert {name: node for name, (node, _) in seen.items()} == places
    assert len({(node, *devices) for node, devices in seen.values()}) == len(seen) == 4
    assert f"devices: {nodes.others[0].address}: " in said
    closed(run)
    blocks = {event["name"]: event["kv_capacity"] for event in real_runs.of(run, "worker")}
    assert blocks["vllm-0"] + 1 == 2 * (
        blocks["vllm-1"] + 1
    )  # by the options of its group; vLLM keeps a block for itself
    for name in places:  # what each printed, from its node
        assert f"-- {name}: process " in (run / "logs" / f"{name}.log").read_text(encoding="utf-8")
    assert 3 in {event["version"] for event in real_runs.of(run, "update")}
    weights = (run / "model-final" / "model.safetensors").stat().st_size
    assert min(received) > 3 * weights  # a version per step, and gradients


@pytest.mark.long
def test_the_shards_of_a_run_are_on_all_three_hosts_and_train_it(tmp_path: Path) -> None:
    with Hosts(3) as hosts:
        nodes = RayHosts(hosts, {"H800": 1, "H20": 1}, {"H800": 1, "H20": 1})
        shards = ["rollout.shards=3", "rollout.shards_on=nodes"]
        code, said = ended(nodes.train(*RUN, *shards, *nodes.config(tmp_path)), 360)
    assert code == 0, said[-3000:]
    run = next(tmp_path.glob("*-001"))
    for host in hosts.all:
        assert any(f"shard-{number} is on {host.address}" in said for number in range(3)), said[-3000:]
    counts = closed(run)
    assert counts["trained"] > 0
    assert [event["what"] for event in real_runs.of(run, "fault")] == []


TRAINER, ENGINES = {"H800": 2, "H20": 1}, {"H20": 1}
LONGER = [*RUN, "run.steps=12", "rollout.worker_restarts=1", "rollout.heartbeat_seconds=2"]


@pytest.mark.long
def test_a_run_goes_on_without_an_engine_whose_host_died(tmp_path: Path) -> None:
    with Hosts(3) as hosts:
        nodes = RayHosts(hosts, TRAINER, ENGINES)
        process = nodes.train(*LONGER, *nodes.config(tmp_path))
        run = wait_for_step(process, tmp_path, 2)
        nodes.others[1].kill()
        code, said = ended(process, 400)
    assert code == 0, said[-3000:]
    assert closed(run)["trained"] > 0
    assert any("vllm-" in event["what"] for event in real_runs.of(run, "fault"))


@pytest.mark.long
def test_an_engine_comes_back_with_its_host(tmp_path: Path) -> None:
    with Hosts(3) as hosts:
        nodes = RayHosts(hosts, TRAINER, ENGINES)
        process = nodes.train(*LONGER, "run.steps=5000", *nodes.config(tmp_path))
        run = wait_for_step(process, tmp_path, 2)
        rows = real_runs.of(run, "places")[0]["processes"]
        [name] = [row["process"] for row in rows if row["node"] == nodes.others[1].address]
        nodes.others[1].kill()
        time.sleep(60)  # Ray has noticed, and all restarts that the run allows would have failed
        nodes.join(1)

        def served() -> bool:
            """It is back, and has had a weight update since."""
            back = [event["t"] for event in real_runs.of(run, "recovered") if event["what"] == f"worker {name}"]
            mine = [event["t"] for event in real_runs.of(run, "worker") if event["name"] == name]
            return bool(back) and max(mine) > back[0]

        deadline = time.monotonic() + 240
        while not served() and time.monotonic() < deadline and process.poll() is None:
            time.sleep(1)
        told = [event for kind in ("fault", "recovered") for event in real_runs.of(run, kind)]
        [pid] = [line.split()[1] for line in (run / "processes").read_text().splitlines() if line.startswith("orch")]
        hosts.command("kill", "-TERM", pid)
        code, said = ended(process, 200)
    assert f"worker {name}" in {event["what"] for event in told if event["kind"] == "recovered"}, told
    assert code == 130, said[-3000:]


@pytest.mark.long
def test_a_run_goes_on_when_a_link_was_cut_for_twenty_seconds(tmp_path: Path) -> None:
    with Hosts(3) as hosts:
        nodes = RayHosts(hosts, TRAINER, ENGINES)
        process = nodes.train(*LONGER, *nodes.config(tmp_path))
        run = wait_for_step(process, tmp_path, 2)
        nodes.others[1].set_link(up=False)
        time.sleep(20)
        nodes.others[1].set_link(up=True)
        code, said = ended(process, 400)
    assert code == 0, said[-3000:]
    assert closed(run)["trained"] > 0


@pytest.mark.long
def test_a_run_whose_trainers_host_died_is_resumed_when_it_is_back(tmp_path: Path) -> None:
    with Hosts(3) as hosts:
        nodes = RayHosts(hosts, TRAINER, ENGINES)
        process = nodes.train(*LONGER, "run.restarts=0", *nodes.config(tmp_path))
        run = wait_for_step(process, tmp_path, 4)
        nodes.others[0].kill()
        code, said = ended(process, 400)
        assert code == 1
        assert f"resume with: rl-coserve train --resume {run}" in said
        nodes.join(0)
        code, said = ended(nodes.train("--resume", str(run)), 400)
    assert code == 0, said[-3000:]
    assert closed(run)["trained"] > 0
