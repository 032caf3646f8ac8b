"""Two real vLLM engines become one with two ranks, with requests in flight (RollPacker 4.2)."""

from __future__ import annotations

import asyncio
import os
import random
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from orchestrator.api import Completion, GenerationRequest, RunError, Sampling
from orchestrator.events import EventLog, MemorySink
from orchestrator.proxy.gateway import LLMProxy
from orchestrator.proxy.resize import EngineResizing, Reshaped
from orchestrator.proxy.worker_state import WorkerLimits
from orchestrator.runtime.engine_actors import RayWorker
from orchestrator.transfer import Publisher, RelayEndpoint
from scripts.bench.probes.vllm.recompute_probe import VOCABULARY, publish, write_tiny_qwen3
from tests.support.engines import rollout_worker

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(600)]  # four starts of an engine: 95 s measured
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
TOKENS = 200


def test_engines_are_cut_anew_under_load_and_every_request_says_what_it_would_have_said(tmp_path: Path) -> None:
    import ray

    weights = write_tiny_qwen3(tmp_path / "model", 1)
    relay = RelayEndpoint(
        job="planning-tests",
        kind="fsspec",
        master=f"file://{tmp_path / 'relay'}",
        metadata=str(tmp_path / "metadata.db"),
    )
    publisher = Publisher(relay)
    publisher.reset()
    publish(publisher, 1, weights)
    engine = {"model": str(tmp_path / "model"), "max_num_seqs": 8, "max_model_len": 256, "kv_cache_mb": 2}
    draw = random.Random(5)
    prompts = [tuple(draw.randrange(VOCABULARY) for _ in range(20)) for _ in range(4)]
    fatal: list[RunError] = []

    async def main(workers: list[RayWorker]) -> list[list[Completion]]:
        events = EventLog(MemorySink(), asyncio.get_running_loop().time)
        proxy = LLMProxy(workers, events, limits=WorkerLimits(120.0), restarts=1, on_fatal=fatal.append)
        resizing = EngineResizing(proxy)
        await asyncio.gather(*(worker.start() for worker in workers))
        proxy.start()
        await proxy.suspend()
        await proxy.update(1)
        await proxy.resume()

        async def say(prefix: str, change: int) -> tuple[list[Completion], Reshaped | None]:
            asked = [
                asyncio.create_task(
                    proxy.generate(
                        GenerationRequest(f"{prefix}{i}", f"{prefix}{i}", 0, prompt, Sampling(TOKENS, 0.0), "test")
                    )
                )
                for i, prompt in enumerate(prompts)
            ]
            done = None
            if change:
                while sum([row.generated for _, row in await proxy.stats()]) < 40:
                    await asyncio.sleep(0.02)
                done = await resizing.reshape(change)
            return list(await asyncio.gather(*asked)), done

        found: list[list[Completion]] = []
        ranks: list[Any] = []
        for prefix, change in (("changed", 2), ("plain", 0)):
            said, done = await say(prefix, change)
            assert done is None or done.error == ""
            assert done is None or done.moved > 0
            found.append(said)
            ranks.append([worker.ranks for worker in workers])
        assert ranks == [[2, 0], [2, 0]]
        await proxy.close()
        return found

    with ExitStack() as stack:
        root = str(Path(__file__).parents[2])
        ray.init(
            address="local",
            num_cpus=4,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=100 << 20,
            runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join((root,))}},
        )
        stack.callback(ray.shutdown)
        runner = stack.enter_context(asyncio.Runner())
        workers = [
            rollout_worker(
                f"vllm-{index}",
                "vllm_rlplugin.worker.inprocess_worker:EngineWorker",
                {**engine, "relay": relay.to_dict()},
                ENVIRONMENT,
                ranks=1,
            )
            for index in range(2)
        ]
        for worker in workers:
            stack.callback(lambda worker=worker: runner.run(worker.close()))
        changed, plain = runner.run(asyncio.wait_for(main(workers), 280))
    publisher.close()
    assert not fatal
    for index in range(len(prompts)):
        assert len(plain[index].token_ids) == TOKENS
        assert changed[index].token_ids == plain[index].token_ids
        assert changed[index].versions == ((1, TOKENS),)
        assert changed[index].logprobs == pytest.approx(plain[index].logprobs, abs=1e-4)
