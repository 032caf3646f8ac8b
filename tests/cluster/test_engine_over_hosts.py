"""An engine whose ranks are on two hosts: stock vLLM's own nodes with the plugin on both, a server of a run on a third."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support import real_runs
from tests.support.hosts import Host, Hosts, end, why_not

pytestmark = [
    pytest.mark.engine,
    pytest.mark.long,
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
    pytest.mark.timeout(600),
]
TOKEN = "the-token-of-the-engine-over-hosts-0123456789"
CONFIG = str(real_runs.ROOT / "examples" / "frozenlake.toml")
SMALL = [
    "run.steps=2",
    "rollout.workers=0",
    "rollout.groups_per_step=1",
    "rollout.environments=8",
    "rollout.dynamic_sampling=false",  # nothing is learned here: 24 groups a step would be replaced
    "rollout.served_allow_plain_http=true",
    "trainer.micro_batch_size=8",
    "trainer.entropy_coefficient=0.01",  # without a warm-up no reward moves the weights
    "warmup.steps=0",
    "evaluation.prompts=4",
    "evaluation.every=0",
    "run.name=t",
]
OPTIONS = ["--plugin=rl-coserve", "--dtype=float32", "--enforce-eager", "--skip-tokenizer-init", "--max-model-len=64"]
OPTIONS += ["--block-size=32", "--kv-cache-memory-bytes=33554432", "--logprobs-mode=processed_logprobs"]
OPTIONS += ["--generation-config=vllm", "--distributed-executor-backend=mp"]


def command(model: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), *OPTIONS, *options]


@contextmanager
def engine(hosts: list[Host], model: Path, folder: Path) -> Iterator[str]:
    """Of a rank a host: where it listens."""
    first = hosts[0]
    token = folder / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    nodes = [f"--tensor-parallel-size={len(hosts)}", f"--nnodes={len(hosts)}", f"--master-addr={first.address}"]
    nodes.append("--master-port=29555")
    front = [f"--host={first.address}", "--port=8000", f"--rl-token-file={token}", "--rl-allow-clients=10.77.0.0/24"]
    logs = [folder / f"{host.name}.log" for host in hosts]
    started: list[subprocess.Popen[str]] = []
    try:
        for rank, (host, log) in enumerate(zip(hosts, logs, strict=True)):
            own = [*nodes, f"--node-rank={rank}", *(["--headless"] if rank else front)]
            environment = {"VLLM_HOST_IP": host.address, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
            environment |= {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
            with log.open("wb") as output:
                started.append(host.start(command(model, *own), environment, stdout=output, stderr=output))
        deadline = time.monotonic() + 240
        url = f"http://{first.address}:8000"
        ask = f"import urllib.request; urllib.request.urlopen('{url}/health', timeout=5)"
        while time.monotonic() < deadline and all(process.poll() is None for process in started):
            try:
                first.run([sys.executable, "-S", "-c", ask])
                break
            except subprocess.CalledProcessError:
                time.sleep(1)
        else:
            raise AssertionError("\n".join(log.read_text()[-3000:] for log in logs))
        yield url
    finally:
        for process in started:
            end(process)


def test_a_run_trains_with_an_engine_whose_two_ranks_are_on_two_hosts(tmp_path: Path) -> None:
    model = tmp_path / "model"
    made = [sys.executable, "-m", "orchestrator.cli", "model", str(model), CONFIG]
    subprocess.run(made, check=True, cwd=real_runs.ROOT, capture_output=True, timeout=120)
    with Hosts(3) as hosts:
        first, *others = hosts.all
        with engine(others, model, tmp_path) as url:
            before = [host.received() for host in others]
            where = [f"run.folder={tmp_path}", f"model.path={model}", f'rollout.served=["{url}"]']
            where += [f"rollout.served_token_file={tmp_path / 'token'}", f"relay.host={first.address}"]
            run = first.start(
                [sys.executable, "-m", "orchestrator.cli", "train", CONFIG, *SMALL, *where],
                {"NO_COLOR": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            try:
                said, _ = run.communicate(timeout=300)
            finally:
                end(run)
            received = [host.received() - start for host, start in zip(others, before, strict=True)]
    logs = "\n".join((tmp_path / f"{host.name}.log").read_text()[-3000:] for host in others)
    assert run.returncode == 0, said[-3000:] + logs
    last = real_runs.of(tmp_path / "t-001", "run_end")[-1]
    assert (last["status"], last["ledger"]["in_flight"]) == ("completed", 0)
    assert last["ledger"]["trained"] > 0
    assert 2 in {event["version"] for event in real_runs.of(tmp_path / "t-001", "update") if event["bytes"]}
    weights = (tmp_path / "t-001" / "model-final" / "model.safetensors").stat().st_size
    assert min(received) > weights  # every rank fetched its share of two versions, and activations
