"""The contract of the RolloutWorker port, the one that the simulated worker keeps, on the worker around a real engine.

Also with two tensor-parallel and two pipeline-parallel ranks (the latter with batches in flight between steps); these have
processes of their own, so the weights reach them through Mooncake.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from orchestrator.runtime.mooncake_master import MooncakeMaster
from orchestrator.transfer import Publisher, RelayEndpoint
from scripts.bench.probes.vllm.recompute_probe import publish, write_tiny_qwen3
from tests.support.worker_contract import CHECKS, Rig
from vllm_rlplugin.worker.inprocess_engine import prepare_process
from vllm_rlplugin.worker.inprocess_worker import EngineWorker

pytestmark = pytest.mark.engine
SEQUENCES = 8  # fewer than a quarter of what some checks add at once
MODEL_LENGTH = 128
RANKS = (  # tensor parallel, pipeline parallel
    pytest.param((1, 1), id="one rank"),
    pytest.param((2, 1), id="TP 2", marks=pytest.mark.long),
    pytest.param((1, 2), id="PP 2", marks=pytest.mark.long),
)


class Setup(NamedTuple):
    """One engine for all checks; the last one closes it."""

    runner: asyncio.Runner
    rig: Rig


@pytest.fixture(scope="module", params=RANKS)
def setup(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    tensor_parallel, pipeline_parallel = request.param
    prepare_process(threads=1)
    folder = tmp_path_factory.mktemp("model")
    weights = write_tiny_qwen3(folder, 1)
    published = 0

    async def publish_next() -> int:
        nonlocal published
        published += 1
        publish(publisher, published, weights)
        return published

    with ExitStack() as stack:
        runner = stack.enter_context(asyncio.Runner())
        if tensor_parallel * pipeline_parallel == 1:
            endpoint = RelayEndpoint(job="contract-tests", kind="memory", master="contract-tests")
        else:
            endpoint = mooncake(stack, runner, folder)
        publisher = Publisher(endpoint)
        stack.callback(publisher.close)
        publisher.reset()
        worker = EngineWorker(
            model=str(folder),
            max_num_seqs=SEQUENCES,
            max_model_len=MODEL_LENGTH,
            kv_cache_mb=2,
            relay=endpoint.to_dict(),
            tensor_parallel_size=tensor_parallel,
            pipeline_parallel_size=pipeline_parallel,
        )
        stack.callback(lambda: runner.run(worker.close()))
        yield Setup(runner, Rig(worker, publish_next, too_long=MODEL_LENGTH + 1, quiet=0.2))


def mooncake(stack: ExitStack, runner: asyncio.Runner, folder: Path) -> RelayEndpoint:
    master = MooncakeMaster(log=folder / "mooncake-master.log")
    runner.run(master.start())
    stack.callback(lambda: runner.run(master.stop()))
    return RelayEndpoint(
        job="contract-tests",
        master=master.address,
        metadata=str(folder / "metadata.db"),
        segment_bytes=64 << 20,
        bucket_bytes=4 << 20,
    )


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_worker_contract(setup: Setup, check: Callable[[Rig], Awaitable[None]]) -> None:
    async def main() -> None:
        await check(setup.rig)

    setup.runner.run(main())
