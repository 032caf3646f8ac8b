"""Whole runs over hosts, one with orchestrator, environments and rewards, the others with two trainer ranks and two engines of
TP 2, each on a host that the other of its kind is not on. Weights and gradients cross links of 1 Gbit/s; hosts die, and links are
cut."""

from __future__ import annotations

import json
import re
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
    pytest.mark.timeout(1800),
]
RAY = [sys.executable, "-m", "ray.scripts.scripts"]
PORT = 6379
LIMIT = 800  # seconds of a run; on two cores that nothing else uses one takes some 100, on busy ones it starts in 400
RUN = [
    str(real_runs.ROOT / "examples" / "frozenlake.toml"),
    "run.steps=3",
    "warmup.steps=0",
    "evaluation.prompts=4",
    "checkpoint.every=1",
    "trainer.data_parallel=2",
    "trainer.entropy_coefficient=0.01",  # without a warm-up no reward moves the weights
    "rollout.engine={}",  # in its place:
    "rollout.engines=[{hardware='H20', tensor_parallel_size=2, kv_cache_mb=64},"
    "{hardware='H20', tensor_parallel_size=2, kv_cache_mb=32, max_num_seqs=16}]",
    "rollout.environments=8",
    "rollout.dynamic_sampling=false",  # nothing is learned here: 24 groups a step would be replaced
    "rollout.groups_per_step=2",  # ranks of engines spin, here on a few processors
    "trainer.micro_batch_size=8",
    "resources.pools={H800=2, H20=4}",
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


def ended(process: subprocess.Popen[str], seconds: float = LIMIT) -> tuple[int, str]:
    """Its exit code and what it said."""
    try:
        said, _ = process.communicate(timeout=seconds)
    finally:
        end(process)
    return process.returncode, said


def wait_for_step(process: subprocess.Popen[str], folder: Path, step: int, seconds: float = LIMIT) -> Path:
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


def changed_versions(run: Path) -> set[int]:
    """Those that engines loaded, and of which there was something to load."""
    return {event["version"] for event in real_runs.of(run, "update") if event["bytes"]}


@pytest.mark.long
def test_a_run_goes_over_three_hosts(tmp_path: Path) -> None:
    with Hosts(3) as hosts:
        nodes = RayHosts(hosts, {"H800": 1, "H20": 2}, {"H800": 1, "H20": 2})
        before = [host.received() for host in nodes.others]
        code, said = ended(nodes.train(*RUN, *nodes.config(tmp_path)))
        received = [host.received() - start for host, start in zip(nodes.others, before, strict=True)]
    assert code == 0, said[-3000:]
    run = next(tmp_path.glob("*-001"))
    rows = real_runs.of(run, "places")[0]["processes"]
    places = {row["process"]: row["node"] for row in rows}
    addresses = {host.address for host in nodes.others}
    assert {places["trainer"], places["trainer-1"]} == {places["vllm-0"], places["vllm-1"]} == addresses
    seen = {event["worker"]: (event["node"], event["devices"]) for event in real_runs.of(run, "devices")}
    assert {name: node for name, (node, _) in seen.items()} == places
    owners = [(node, device) for node, devices in seen.values() for device in devices]
    assert len(set(owners)) == len(owners) == 6
    assert {name: len(devices) for name, (_, devices) in seen.items()} == dict(zip(places, (1, 1, 2, 2), strict=True))
    assert f"devices: {nodes.others[0].address}: " in said
    closed(run)
    blocks = {event["name"]: event["kv_capacity"] for event in real_runs.of(run, "worker")}
    assert blocks["vllm-0"] + 1 == 2 * (
        blocks["vllm-1"] + 1
    )  # by the options of its group; vLLM keeps a block for itself
    for name in places:  # what each printed, from its node
        assert f"-- {name}: process " in (run / "logs" / f"{name}.log").read_text(encoding="utf-8")
    assert 3 in changed_versions(run)
    weights = (run / "model-final" / "model.safetensors").stat().st_size
    assert min(received) > 3 * weights  # a version per step, and gradients


@pytest.mark.long
def test_the_shards_of_a_run_are_on_all_three_hosts_and_train_it(tmp_path: Path) -> None:
    with Hosts(3) as hosts:
        nodes = RayHosts(hosts, {"H800": 1, "H20": 2}, {"H800": 1, "H20": 2})
        shards = ["rollout.shards=3", "rollout.shards_on=nodes"]
        code, said = ended(nodes.train(*RUN, *shards, *nodes.config(tmp_path)))
    assert code == 0, said[-3000:]
    run = next(tmp_path.glob("*-001"))
    for host in hosts.all:
        assert any(f"shard-{number} is on {host.address}" in said for number in range(3)), said[-3000:]
    counts = closed(run)
    assert counts["trained"] > 0
    assert [event["what"] for event in real_runs.of(run, "fault")] == []


# What dies has a host to itself: there are a rank and an engine on another.
RANK, ENGINE, BOTH = {"H800": 1}, {"H20": 2}, {"H800": 1, "H20": 2}
LONGER = [*RUN, "run.steps=6", "rollout.worker_restarts=1", "rollout.heartbeat_seconds=2"]


@pytest.mark.long
def test_a_run_goes_on_without_an_engine_whose_host_died(tmp_path: Path) -> None:
    with Hosts(4) as hosts:
        nodes = RayHosts(hosts, BOTH, RANK, ENGINE)
        process = nodes.train(*LONGER, *nodes.config(tmp_path))
        run = wait_for_step(process, tmp_path, 2)
        nodes.others[2].kill()
        code, said = ended(process)
    assert code == 0, said[-3000:]
    assert closed(run)["trained"] > 0
    assert any("vllm-" in event["what"] for event in real_runs.of(run, "fault"))
    assert max(changed_versions(run)) > 3  # the other engine went on with new weights


@pytest.mark.long
def test_an_engine_comes_back_with_its_host(tmp_path: Path) -> None:
    with Hosts(4) as hosts:
        nodes = RayHosts(hosts, BOTH, RANK, ENGINE)
        process = nodes.train(*LONGER, "run.steps=5000", *nodes.config(tmp_path))
        run = wait_for_step(process, tmp_path, 2)
        rows = real_runs.of(run, "places")[0]["processes"]
        [name] = [row["process"] for row in rows if row["node"] == nodes.others[2].address]
        nodes.others[2].kill()
        time.sleep(60)  # Ray has noticed, and all restarts that the run allows would have failed
        nodes.join(2)

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
    with Hosts(4) as hosts:
        nodes = RayHosts(hosts, BOTH, RANK, ENGINE)
        process = nodes.train(*LONGER, *nodes.config(tmp_path))
        run = wait_for_step(process, tmp_path, 2)
        nodes.others[2].set_link(up=False)
        time.sleep(20)
        nodes.others[2].set_link(up=True)
        code, said = ended(process)
    assert code == 0, said[-3000:]
    assert closed(run)["trained"] > 0
    assert max(changed_versions(run)) > 3


@pytest.mark.long
def test_a_run_whose_trainers_host_died_is_resumed_when_it_is_back(tmp_path: Path) -> None:
    with Hosts(4) as hosts:
        nodes = RayHosts(hosts, BOTH, RANK, ENGINE)
        process = nodes.train(*LONGER, "run.restarts=0", *nodes.config(tmp_path))
        run = wait_for_step(process, tmp_path, 2)
        nodes.others[1].kill()
        code, said = ended(process)
        assert code == 1
        assert f"resume with: rl-coserve train --resume {run}" in said
        nodes.join(1)
        code, said = ended(nodes.train("--resume", str(run)))
    assert code == 0, said[-3000:]
    assert closed(run)["trained"] > 0


@pytest.mark.long
def test_an_engine_has_a_rank_on_each_of_two_hosts(tmp_path: Path) -> None:
    wide = ["resources.pools={H800=1, H20=2}", "trainer.data_parallel=1"]
    wide.append("rollout.engines=[{hardware='H20', tensor_parallel_size=2, nodes=2, kv_cache_mb=64}]")
    with Hosts(3) as hosts:
        nodes = RayHosts(hosts, {"H800": 1, "H20": 1}, {"H20": 1})
        code, said = ended(nodes.train(*RUN, *wide, *nodes.config(tmp_path)))
    assert code == 0, said[-3000:]
    run = next(tmp_path.glob("*-001"))
    seen = {event["worker"]: event["node"] for event in real_runs.of(run, "devices")}
    assert {seen["vllm-0"], seen["vllm-0-node-1"]} == {host.address for host in nodes.others}
    assert {row["process"]: row["node"] for row in real_runs.of(run, "places")[0]["processes"]} == seen
    assert closed(run)["trained"] > 0
    assert 3 in changed_versions(run)


@pytest.mark.long
def test_what_cannot_be_is_one_error_and_leaves_the_hosts_as_they_were(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(secrets.token_hex(16))
    token.chmod(0o600)
    cases = {
        "no node alone has the 4 H20, 4 GPU": ["rollout.engines=[{hardware='H20', tensor_parallel_size=4}]"],
        "no node of this Ray carries it": [
            "relay.sites={far={label='rack=9'}}",
            f"relay.site_token_file={token}",
            "relay.site_allow_plain=true",
        ],
        "has no such interface; it has: ": ["trainer.interface=nic9"],
    }
    with Hosts(3) as hosts:
        nodes = RayHosts(hosts, BOTH, BOTH)
        for number, (words, more) in enumerate(cases.items()):
            code, said = ended(nodes.train(*RUN, *more, f"run.name=t{number}", *nodes.config(tmp_path)), 240)
            assert (code, words in said) == (2, True), said[-3000:]
        deadline = time.monotonic() + 60
        lines = "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"
        while "WorkerHost" in (left := hosts.command("sh", "-c", lines)) and time.monotonic() < deadline:
            time.sleep(1)
        assert "WorkerHost" not in left
        assert "orchestrator.cli" not in left
        plan = [sys.executable, "-m", "orchestrator.cli", "plan", *RUN, *nodes.config(tmp_path)]  # wants every device
        said = nodes.first.run(plan, {"NO_COLOR": "1"}, timeout=180)
    assert len(re.findall(r"^10\.77\.0\.\d: vllm-\d: 2 H20$", said, re.MULTILINE)) == 2, said
