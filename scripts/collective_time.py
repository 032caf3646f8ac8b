"""How long a version takes from the trainer's memory to the workers', by the collective (gloo) and by the relay (a folder).

``python scripts/collective_time.py --mib 256 --workers 2`` sends random bf16 shards of 8 MiB from this process to processes of
their own, verified as in a run; no engine, no Megatron. For the relay: publish, then every worker fetches and verifies.
Prints one JSON object. On one machine everything shares its cores and its memory: it shows what the ways cost, not networks.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from megatron_rlplugin.weights.collective_sender import CollectiveSender
from orchestrator.api import ShardKey
from orchestrator.transfer import Publisher, RelayEndpoint

RECEIVE = """
import json, sys, time, torch
from orchestrator.api import Meeting
from vllm_rlplugin.weights.collective_receiver import CollectiveReceiver
receiver = CollectiveReceiver(torch.device("cpu"), 0)
print("up", flush=True)
for line in sys.stdin:
    version, meeting, place = json.loads(line)
    coming = receiver.join_version(version, [Meeting(*meeting)], place, 120.0)
    print(f"{coming.receive_shards(lambda number, data: None):016x}", flush=True)
"""

FETCH = """
import json, sys
from orchestrator.transfer import RelayEndpoint, Subscriber
subscriber = Subscriber(RelayEndpoint.from_dict(json.loads(sys.argv[1])))
print("up", flush=True)
for line in sys.stdin:
    manifest = subscriber.manifest(json.loads(line)[0])
    for _ in subscriber.fetch(manifest):
        pass
    print(f"{manifest.content():016x}", flush=True)
"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--versions", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    shards = _shards(options.mib)
    found: dict[str, Any] = {"mib": options.mib, "workers": options.workers, "versions": options.versions}
    with tempfile.TemporaryDirectory() as folder:
        endpoint = RelayEndpoint("t", "fsspec", f"file://{folder}/relay", f"{folder}/metadata.sqlite")
        found["collective_seconds"], contents = _collective(shards, options.workers, options.versions)
        found["relay_publish_seconds"], found["relay_fetch_seconds"], relayed = _relay(
            shards, options.workers, options.versions, endpoint
        )
    found["same_content"] = contents == relayed
    found["machine"] = f"{platform.machine()}, torch {torch.__version__}"
    print(json.dumps(found))


def _shards(mib: int) -> list[tuple[ShardKey, torch.Tensor]]:
    draw = torch.Generator().manual_seed(0)
    rows, parts = 1024, mib // 8
    shape = (rows * parts, 4096)
    return [
        (
            ShardKey("w", 0, part * rows, (part + 1) * rows, shape, "bfloat16", "raw", 0),
            torch.randint(-(1 << 15), 1 << 15, (rows, 4096), generator=draw, dtype=torch.int16).view(torch.bfloat16),
        )
        for part in range(parts)
    ]


def _started(code: str, workers: int, *arguments: str) -> list[subprocess.Popen[str]]:
    command = [sys.executable, "-c", code, *arguments]
    pipe = subprocess.PIPE
    root = Path(__file__).parents[1]
    made = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1, cwd=root) for _ in range(workers)]
    for process in made:
        assert process.stdout is not None
        process.stdout.readline()
    return made


def _ask(process: subprocess.Popen[str], order: list[Any]) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(order) + "\n")


def _answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def _collective(
    shards: list[tuple[ShardKey, torch.Tensor]], workers: int, versions: int
) -> tuple[list[float], set[str]]:
    sender = CollectiveSender(lambda: [key for key, _ in shards], lambda: iter(shards), torch.device("cpu"))
    processes, seconds, contents = _started(RECEIVE, workers), [], set[str]()
    for version in range(versions):
        started = time.perf_counter()
        meeting = sender.begin_send(version, workers, 120.0, False)
        for place, process in enumerate(processes, 1):
            _ask(process, [version, [meeting.name, meeting.backend, meeting.where, meeting.receivers], place])
        contents |= {_answer(process) for process in processes}
        seconds.append(round(time.perf_counter() - started, 3))
    sender.close()
    _end(processes)
    return seconds, contents


def _relay(
    shards: list[tuple[ShardKey, torch.Tensor]], workers: int, versions: int, endpoint: RelayEndpoint
) -> tuple[list[float], list[float], set[str]]:
    publisher = Publisher(endpoint)
    processes = _started(FETCH, workers, json.dumps(endpoint.to_dict()))
    published, fetched, contents = [], [], set[str]()
    for version in range(versions):
        started = time.perf_counter()
        publisher.publish_shards(version, ((key, _raw(tensor), None) for key, tensor in shards))
        done = time.perf_counter()
        for process in processes:
            _ask(process, [version])
        contents |= {_answer(process) for process in processes}
        published.append(round(done - started, 3))
        fetched.append(round(time.perf_counter() - done, 3))
    publisher.close()
    _end(processes)
    return published, fetched, contents


def _raw(tensor: torch.Tensor) -> Any:
    return tensor.reshape(-1).view(torch.uint8).numpy()


def _end(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()


if __name__ == "__main__":
    main()
