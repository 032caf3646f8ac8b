"""The scripts of deploy/slurm under a real Slurm: submitted unchanged, run to the end with a tiny model. Two hosts that are
network namespaces; processors, memory and GPUs are what ``slurm.conf`` says of them."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.support import real_runs
from tests.support.hosts import Host, Hosts, why_not

_MISSING = [name for name in ("munged", "slurmctld", "slurmd", "sbatch") if shutil.which(name) is None]
_WHY_NOT = f"{', '.join(_MISSING)} not installed (Debian: slurm-wlm, munge)" if _MISSING else why_not()
_WHY_NOT = _WHY_NOT or ("slurmd and munged want root" if os.getuid() else "")
pytestmark = [
    pytest.mark.engine,
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(_WHY_NOT), reason=_WHY_NOT),
]
SMALL = ["run.steps=2", "warmup.steps=2", "evaluation.prompts=4", "rollout.environments=8", "run.name=t"]
SMALL += ["rollout.dynamic_sampling=false"]  # nothing is learned here: 24 groups a step would be replaced
SMALL += ["rollout.groups_per_step=1", "trainer.micro_batch_size=8"]
CONF = """
ClusterName=t
SlurmctldHost=h1(10.77.0.1)
AuthType=auth/munge
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/ctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
ReturnToService=2
MpiDefault=none
SwitchType=switch/none
GresTypes=gpu
NodeName=h[1-2] NodeAddr=10.77.0.[1-2] CPUs=16 RealMemory=131072 Gres=gpu:2 State=UNKNOWN
PartitionName=p Nodes=h[1-2] Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """Of two hosts."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.hosts, self.folder = hosts, folder
        self.variables = {"SLURM_CONF": str(folder / "slurm.conf"), "NO_COLOR": "1"}
        for name in ("state", "spool-h1", "spool-h2", "munge"):
            (folder / name).mkdir()
        (folder / "slurm.conf").write_text(CONF.format(folder=folder), encoding="ascii")
        (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-1]\n", encoding="ascii")
        for number in range(2):  # devices that nobody opens
            os.mknod(folder / f"gpu{number}", 0o600 | stat.S_IFCHR, os.makedev(1, 3))
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=yes\n", encoding="ascii")
        names = "".join(f"{host.address} {host.name}\n" for host in hosts.all)
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}", encoding="ascii")
        groups = "/sys/fs/cgroup"  # slurmd wants a freezer
        self._shell(f"mount --bind {folder}/hosts /etc/hosts && mount -t tmpfs none {groups}")
        self._shell(f"mkdir {groups}/freezer && mount -t cgroup -o freezer freezer {groups}/freezer")
        user = pwd.getpwnam("munge")
        key = folder / "munge" / "key"
        key.write_bytes(os.urandom(128))
        for path, mode in ((folder / "munge", 0o700), (key, 0o400)):
            path.chmod(mode)
            os.chown(path, user.pw_uid, user.pw_gid)
        own = " ".join(f"--{name}={folder}/munge/{name}" for name in ("pid-file", "log-file", "seed-file"))
        self._shell("mkdir -p /run/munge && chown munge: /run/munge")
        self._shell(f"su -s /bin/sh munge -c '{shutil.which('munged')} --force --key-file={key} {own}'")
        for host in hosts.all:
            daemons = [f"slurmctld -f {folder}/slurm.conf"] if host is hosts.all[0] else []
            for daemon in (*daemons, f"slurmd -N {host.name} -f {folder}/slurm.conf"):
                host.run(["unshare", "-u", "sh", "-c", f"hostname {host.name} && {daemon}"])
        self.until("idle idle", 60)

    @property
    def first(self) -> Host:
        return self.hosts.all[0]

    def _shell(self, command: str) -> None:
        self.hosts.command("sh", "-c", command)

    def said(self, *command: str) -> str:
        return self.first.run(list(command), self.variables)

    def until(self, states: str, seconds: float) -> None:
        """All nodes are in these states."""
        deadline = time.monotonic() + seconds
        while (found := " ".join(self.said("sinfo", "-hN", "-o", "%t").split())) != states:
            assert time.monotonic() < deadline, found + (self.folder / "ctld.log").read_text()[-2000:]
            time.sleep(0.5)

    def submit(self, script: str, *arguments: str, options: Sequence[str] = ()) -> tuple[str, str]:
        """Runs a job to its end: its state and what it said. ``options``: of sbatch."""
        path = real_runs.ROOT / "deploy" / "slurm" / script
        environment = self.variables | {"RL_COSERVE_VENV": os.environ.get("VIRTUAL_ENV", str(Path(sys.prefix)))}
        output = self.folder / f"{script}.out"
        where = [f"--chdir={self.folder}", f"--output={output}", *options]  # its servers' logs lie where the job runs
        said = self.first.run(["sbatch", "--parsable", *where, str(path), *arguments], environment)
        job = said.strip()
        deadline = time.monotonic() + 420
        while (state := self._state(job)) in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING"):
            assert time.monotonic() < deadline, output.read_text(encoding="utf-8")[-3000:]
            time.sleep(1)
        return state, output.read_text(encoding="utf-8")

    def _state(self, job: str) -> str:
        found = self.said("scontrol", "show", "job", job)
        return next(word.removeprefix("JobState=") for word in found.split() if word.startswith("JobState="))


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    folder = tmp_path_factory.mktemp("slurm")
    for above in (folder, *folder.parents[:2]):
        above.chmod(0o755)  # munged is another user
    with Hosts(2) as hosts:
        yield Slurm(hosts, folder)


def closed(folder: Path) -> None:
    """The run completed, and its ledger closes."""
    last = real_runs.of(folder / "t-001", "run_end")[-1]
    assert (last["status"], last["ledger"]["in_flight"]) == ("completed", 0)
    assert last["ledger"]["trained"] > 0


def test_the_job_of_one_node_runs_to_its_end(slurm: Slurm, tmp_path: Path) -> None:
    config = str(real_runs.ROOT / "examples" / "frozenlake.toml")
    state, said = slurm.submit("one_node.sbatch", config, *SMALL, f"run.folder={tmp_path}")
    assert state == "COMPLETED", said[-3000:]
    closed(tmp_path)


def test_the_job_of_two_nodes_serves_on_one_and_trains_on_the_other(slurm: Slurm, tmp_path: Path) -> None:
    config = str(real_runs.ROOT / "examples" / "frozenlake.toml")
    made = [sys.executable, "-m", "orchestrator.cli", "model", str(tmp_path / "model"), config]
    subprocess.run(made, check=True, cwd=real_runs.ROOT, capture_output=True, timeout=120)
    options = (
        "--dtype float32 --max-model-len 64 --block-size 32 --kv-cache-memory-bytes 33554432 --skip-tokenizer-init"
    )
    slurm.variables |= {"RL_COSERVE_VLLM_OPTIONS": options}
    state, said = slurm.submit("served.sbatch", str(tmp_path / "model"), config, *SMALL, f"run.folder={tmp_path}")
    assert state == "COMPLETED", said[-3000:]
    closed(tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "t-001" / "turns.jsonl").read_text().splitlines()]
    assert {row[2] for row in rows} == {"http://h2:8000"}
    slurm.until("idle idle", 60)


def test_the_job_of_several_nodes_has_its_processes_where_the_plan_says(slurm: Slurm, tmp_path: Path) -> None:
    config = str(real_runs.ROOT / "examples" / "frozenlake.toml")
    few = ["--gres=gpu:2", "--cpus-per-task=4", "--mem=16G"]
    wide = "rollout.engine.tensor_parallel_size=2"  # the two GPUs of a node, of which the trainer's rank has one on another
    state, said = slurm.submit("nodes.sbatch", config, *SMALL, wide, f"run.folder={tmp_path}", options=few)
    assert state == "COMPLETED", said[-3000:]
    closed(tmp_path)
    addresses = {host.address for host in slurm.hosts.all}
    rows = real_runs.of(tmp_path / "t-001", "places")[0]["processes"]
    assert {row["node"] for row in rows} == addresses
    seen = {event["worker"]: event["devices"] for event in real_runs.of(tmp_path / "t-001", "devices")}
    assert {name: len(devices) for name, devices in seen.items()} == {"trainer": 1, "vllm-0": 2}
    assert not list(slurm.folder.glob(".rl-coserve-*")), "the token outlives the job"
    slurm.until("idle idle", 60)
