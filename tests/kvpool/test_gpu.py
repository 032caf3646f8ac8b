"""A KV pool on an NVIDIA GPU: what only the real driver can say. None of it has run yet (docs/coserving.md)."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.ops.mps import BINARY
from orchestrator.ops.nvidia_driver import find_gpus
from scripts.bench.probes.probe_run import run_probe
from tests.kvpool.test_pool_engine import REQUESTS, Driven, named, play, prompt
from vllm_rlplugin.kvpool.engine.pool_engine import pool_path
from vllm_rlplugin.kvpool.ledger.page_ledger import PAGE_BYTES
from vllm_rlplugin.kvpool.pages import page_keeper
from vllm_rlplugin.kvpool.pages.cuda_pages import SUPPLIES, Supply
from vllm_rlplugin.kvpool.pages.page_backends import CudaBackend

THERE = find_gpus()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(THERE.missing), reason=f"needs an NVIDIA GPU: {THERE.missing}"),
]
GIB = 1 << 30


@pytest.fixture
def path() -> Iterator[Path]:
    found = Path(f"/dev/shm/rl-coserve-test-{os.getpid()}-{random.randrange(10**9)}")
    yield found
    for file in (found, page_keeper.socket_path(found)):
        file.unlink(missing_ok=True)


def pages(count: int, first: int = 0) -> np.ndarray:
    return np.arange(first, first + count, dtype=np.uint64)


@pytest.mark.parametrize("supply", SUPPLIES)
def test_a_gib_goes_from_one_process_to_another_in_milliseconds_on_a_gpu(supply: Supply) -> None:
    """The bar is for pages that are kept: the probe checks that kernels of both processes saw the same memory."""
    found = run_probe("remap", ["--mib", "1024", "--rounds", "20", "--kind", supply])
    print(json.dumps(found))
    assert supply != "kept" or found["seconds"] <= 0.005


@pytest.mark.parametrize("supply", SUPPLIES)
def test_a_tensor_keeps_its_address_while_its_pages_come_and_go_on_a_gpu(path: Path, supply: Supply) -> None:
    import torch

    backend = CudaBackend(PAGE_BYTES, 0, supply)
    pool = backend.pool(path, 64)
    pool.join("serve", "serving")
    with backend.range(pool, 64, "serving", scrub=True) as memory:
        assert memory.map_places(pages(8))
        tensor = backend.tensor(memory.address, memory.bytes).view(64, PAGE_BYTES)
        assert (tensor.data_ptr(), tensor.device.type) == (memory.address, "cuda")
        for number in range(8):
            tensor[number].fill_(number)
        torch.cuda.synchronize()
        memory.unmap_places(pages(4))
        assert memory.map_places(pages(8, 20))
        assert int(tensor[20:28].abs().max()) == 0, "scrubbed"
        assert [int(tensor[number].max()) for number in range(4, 8)] == [4, 5, 6, 7]
        tensor[20:28].fill_(9)
        assert int(tensor[20:28].min()) == 9
        torch.cuda.synchronize()
        del tensor
    pool.close()


_TENANT = """
import sys
from pathlib import Path
import numpy as np
import torch
from vllm_rlplugin.kvpool.pages.page_backends import CudaBackend
from vllm_rlplugin.kvpool.ledger.page_ledger import PAGE_BYTES
backend = CudaBackend(PAGE_BYTES, 0, sys.argv[2])
pool = backend.pool(Path(sys.argv[1]), 0)
pool.join("roll", "rollout", budget=256)
memory = backend.range(pool, 256, "rollout", scrub=False)
assert memory.map_places(np.arange(256, dtype=np.uint64))
tensor = backend.tensor(memory.address, memory.bytes)
print("in", flush=True)
while True:  # its kernels run when it is killed
    tensor.fill_(7)
"""


@pytest.mark.parametrize("supply", SUPPLIES)
def test_a_tenant_that_is_killed_gives_its_pages_and_their_memory_back_on_a_gpu(path: Path, supply: Supply) -> None:
    """And none of its kernels writes into them afterwards."""
    import torch

    backend = CudaBackend(PAGE_BYTES, 0, supply)
    pool = backend.pool(path, 256)
    pool.join("serve", "serving")
    with backend.range(pool, 256, "serving", scrub=False) as memory:
        for _ in range(5):
            child = subprocess.Popen([sys.executable, "-c", _TENANT, str(path), supply], stdout=subprocess.PIPE)
            assert child.stdout is not None
            assert child.stdout.readline() == b"in\n"
            assert not memory.map_places(pages(1))
            time.sleep(0.2)
            child.send_signal(signal.SIGKILL)
            deadline = time.monotonic() + 10
            while not memory.map_places(pages(256)):
                pool.reap()
                assert time.monotonic() < deadline
            child.communicate()
            tensor = backend.tensor(memory.address, memory.bytes)
            tensor.fill_(1)
            for _ in range(20):
                assert int(tensor.max()) == 1, "somebody else's kernel wrote here"
            torch.cuda.synchronize()
            memory.unmap_places(pages(256))
    pool.close()


def test_a_pool_that_the_device_has_no_room_for_is_refused_and_leaves_nothing_on_a_gpu(path: Path) -> None:
    import torch

    from orchestrator.api import ConfigError

    free, total = torch.cuda.mem_get_info()
    with pytest.raises(ConfigError, match="room for"):
        CudaBackend(PAGE_BYTES, 0, "kept").pool(path, 2 * total // PAGE_BYTES)
    time.sleep(1)
    assert torch.cuda.mem_get_info()[0] >= free - GIB


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from megatron_rlplugin.tiny_model import create_qwen3

    shape: dict[str, Any] = {"intermediate_size": 512, "head_dim": 64, "hidden_size": 256, "layers": 2, "heads": 4}
    shape |= {"kv_heads": 2, "seed": 1, "max_positions": 512, "dtype": "bfloat16"}
    folder = tmp_path_factory.mktemp("model") / "m"
    return Path(create_qwen3(str(folder), vocabulary=[chr(33 + at) for at in range(93)], **shape))


@pytest.fixture
def engines() -> Iterator[list[Driven]]:
    started: list[Driven] = []
    yield started
    for engine in started:
        engine.process.kill()
        engine.process.wait()
        engine.errors.close()


@pytest.fixture
def name() -> Iterator[str]:
    """Of a pool."""
    found = f"test-gpu-{os.getpid()}"
    yield found
    for file in (pool_path(found), page_keeper.socket_path(pool_path(found))):
        file.unlink(missing_ok=True)


def started(engines: list[Driven], model: Path, **plugin: Any) -> Driven:
    given = {"dtype": "bfloat16", "gpu_memory_utilization": 0.3, "kv_cache_memory_bytes": 512 << 20}
    engine = Driven(model, 4096, given=given, **plugin)
    engines.append(engine)
    engine.answer()
    return engine


@pytest.mark.engine
@pytest.mark.parametrize("supply", SUPPLIES)
def test_an_engine_in_a_pool_makes_the_tokens_of_a_stock_one_on_a_gpu(
    supply: Supply, model: Path, engines: list[Driven], name: str
) -> None:
    found = []
    pooled = {
        "kv_pool": name,
        "kv_pool_mib": 512,
        "kv_pool_role": "serving",
        "kv_pool_lent": 1.0,
        "kv_pool_keep": 0.0,
        "kv_pool_supply": supply,
    }
    for plugin in ({}, pooled):
        engine = started(engines, model, **plugin)
        play(engine, REQUESTS, "r")
        found.append(engine.do(drain=True)["outputs"])
        engine.process.kill()
        engine.process.wait()
    assert found[0] == found[1]


@pytest.mark.engine
def test_rollouts_under_mps_are_measured_against_rollouts_in_the_time_that_is_left_on_a_gpu(
    model: Path, engines: list[Driven], name: str
) -> None:
    """Seconds of serving's steps alone, and beside rollouts: as they come, in time left (dual), under MPS with 30 %."""
    if shutil.which(BINARY) is None:
        pytest.skip("no MPS control program on this host")
    figures: dict[str, dict[str, float]] = {}
    tokens = []
    for mode in ("alone", "none", "dual", "mps"):
        watcher = None
        if mode == "mps":
            command = [sys.executable, "-m", "orchestrator.cli", "mps", "--pool", name]
            watcher = subprocess.Popen(command, stdout=subprocess.PIPE)
            assert watcher.stdout is not None
            assert watcher.stdout.readline() == b"MPS is up\n"
        try:
            shared: dict[str, Any] = {"kv_pool": name}
            admission = {"kv_pool_admission": "dual" if mode == "dual" else "none"}
            share = {"kv_pool_mps": 100} if mode == "mps" else {}
            lending = {"kv_pool_role": "serving", "kv_pool_mib": 512, "kv_pool_lent": 1.0}
            serving = started(engines, model, **shared, **admission, **share, **lending)
            play(serving, REQUESTS, "warm")
            serving.do(drain=True)
            rolled, worker = {"seconds": 0.0}, None
            if mode != "alone":
                share = {"kv_pool_mps": 30} if mode == "mps" else {}
                rollout = started(engines, model, **shared, **share, kv_pool_budget_mib=64)
                serving.do(opened=True)
                worker = threading.Thread(target=_roll, args=(rollout, rolled))
                worker.start()
            play(serving, REQUESTS, "r")
            steps = []
            while True:
                begun = time.monotonic()
                said = serving.do(steps=1)
                steps.append(time.monotonic() - begun)
                if not said["unfinished"]:
                    break
            tokens.append(named(said, "r"))
            if worker is not None:
                worker.join(timeout=120)
                assert not worker.is_alive()
            p50, p99 = np.quantile(steps, [0.5, 0.99])
            figures[mode] = {"step_p50": float(p50), "step_p99": float(p99), "rollout_seconds": rolled["seconds"]}
        finally:
            for engine in engines:
                engine.process.kill()
                engine.process.wait()
            if watcher is not None:
                watcher.terminate()
                watcher.wait(timeout=30)
    print(json.dumps({"device": THERE.devices[0].name, **figures}))
    assert tokens[1:] == tokens[:1] * 3, "what runs beside it changes no token"


def _roll(engine: Driven, into: dict[str, float]) -> None:
    begun = time.monotonic()
    play(engine, [(f"long{index}", prompt(index, 100), 300) for index in range(8)], "roll")
    engine.do(drain=True)
    into["seconds"] = time.monotonic() - begun
