"""The hand-over between a real vLLM engine and a real Megatron trainer, each in a process of its own, on CPU.

Devices are only pretended to be shared: CPU processes have their own memory. What is real: the commands, the order, the
requests that wait inside, the weights that come back, and what happens when either process fails or dies.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from orchestrator.api import (
    Completion,
    GenerationRequest,
    ReleaseResult,
    ResidencyResult,
    RetryableError,
    RunError,
    Sampling,
    TrainBatch,
    TrainSample,
)
from orchestrator.colocation.handover import Colocation, DeviceHolder
from orchestrator.events import EventLog, MemorySink
from orchestrator.proxy.gateway import LLMProxy
from orchestrator.proxy.worker_state import WorkerLimits
from orchestrator.runtime.engine_actors import RayTrainer, RayWorker
from orchestrator.runtime.mooncake_master import MooncakeMaster
from orchestrator.transfer import RelayEndpoint
from tests.support.engines import rollout_worker

pytestmark = pytest.mark.engine
VOCABULARY = 64
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
PROMPTS = ((5, 9, 17, 3), (40, 2, 33, 21, 8))


class Worker(RayWorker):
    """``fail`` names the next command that does not come through: its process is killed instead."""

    fail = ""

    async def _ask(self, method: str, *args: Any) -> Any:
        if self.fail == method:
            self.fail = ""
            self._actor.kill()
        return await self._call(method, *args)

    async def release(self, level: str) -> ReleaseResult:
        result: ReleaseResult = await self._ask("release", level)
        return result

    async def reclaim(self) -> None:
        await self._ask("reclaim")


class Trainer(RayTrainer):
    """``fail`` names the next level whose answer is lost, after the trainer has moved; with "!" its process dies, too."""

    fail = ""

    async def residency(self, level: str, replicas: Sequence[int] | None = None) -> ResidencyResult:
        result: ResidencyResult = await self.call("residency", level, replicas)
        if self.fail.removesuffix("!") == level:
            if self.fail.endswith("!"):
                await self.close()
            self.fail = ""
            raise RetryableError("the device has no room")
        return result


class Rig:
    """One worker, one trainer, and the proxy and coordinator between them."""

    def __init__(self, runner: asyncio.Runner, worker: Worker, trainer: Trainer) -> None:
        self.runner, self.worker, self.trainer = runner, worker, trainer
        self.sink = MemorySink()
        self.fatal: list[RunError] = []
        self.number = 0

    def run(self, main: Any) -> Any:
        return self.runner.run(asyncio.wait_for(main, 240))

    async def start(self) -> None:
        events = EventLog(self.sink, asyncio.get_running_loop().time)
        self.proxy = LLMProxy([self.worker], events, limits=WorkerLimits(60.0), restarts=2, on_fatal=self.fatal.append)
        self.colocation = Colocation(self.proxy, self.trainer, events, engines=[0], timeout=60.0)
        self.proxy.start()
        await self.trainer.publish()
        await self.trainer.residency("away")
        await self.proxy.suspend()
        await self.proxy.update(0)
        await self.proxy.resume()

    async def say(
        self, tokens: Sequence[int], count: int, temperature: float = 0.0, seed: int | None = None
    ) -> Completion:
        self.number += 1
        name = f"turn-{self.number}"
        sampling = Sampling(count, temperature, seed=seed)
        return await self.proxy.generate(GenerationRequest(name, name, 0, tuple(tokens), sampling, "test"))

    async def samples(self) -> list[TrainSample]:
        """Two groups of two, of what the engine says now."""
        found = []
        for group, prompt in enumerate(PROMPTS):
            for member in range(2):
                said = await self.say(prompt, 12, 1.0, seed=10 * group + member)
                length, total = len(prompt), len(prompt) + len(said.token_ids)
                found.append(
                    TrainSample(
                        f"sample-{self.number}",
                        f"group-{group}",
                        (*prompt, *said.token_ids),
                        tuple(int(index >= length) for index in range(total)),
                        (*(0.0,) * length, *said.logprobs),
                        said.versions,
                        float(member),
                    )
                )
        return found

    def handovers(self) -> list[tuple[str, str]]:
        events = [json.loads(line) for line in self.sink.lines]
        return [(event["what"], event["error"]) for event in events if event["kind"] == "handover"]

    async def check_engine_holds_the_trainers_weights(self) -> None:
        """Greedy tokens of the engine have the log-probs that the trainer finds for them."""
        version = self.proxy.version
        said = await self.say(PROMPTS[0], 20)
        assert said.versions == ((version, 20),)
        length = len(PROMPTS[0])
        sample = TrainSample(
            "probe",
            "probe",
            (*PROMPTS[0], *said.token_ids),
            (0,) * length + (1,) * 20,
            (*(0.0,) * length, *said.logprobs),
            said.versions,
            0.0,
        )
        gap = await self.trainer.call("logprob_gap", [sample])
        assert gap["tokens"] == 20
        assert gap["max"] < 1e-4, "the engine computes with other weights than the trainer"


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    import ray

    from megatron_rlplugin.tiny_model import create_qwen3

    folder: Path = tmp_path_factory.mktemp("colocated")
    model = create_qwen3(
        str(folder / "model"),
        hidden_size=32,
        intermediate_size=64,
        layers=2,
        heads=2,
        kv_heads=1,
        head_dim=32,
        vocabulary=[f"w{index}" for index in range(VOCABULARY)],
        max_positions=256,
        dtype="float32",
        seed=3,
    )
    with ExitStack() as stack:
        runner = stack.enter_context(asyncio.Runner())
        master = MooncakeMaster(log=folder / "mooncake-master.log")
        runner.run(master.start())
        stack.callback(lambda: runner.run(master.stop()))
        relay = RelayEndpoint(
            job="colocation-tests",
            master=master.address,
            metadata=str(folder / "metadata.db"),
            segment_bytes=64 << 20,
            bucket_bytes=4 << 20,
        ).to_dict()
        ray.init(
            address="local",
            num_cpus=4,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=100 << 20,
            runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join((str(Path(__file__).parents[2]),))}},
        )
        stack.callback(ray.shutdown)
        engine = {"model": model, "max_num_seqs": 8, "max_model_len": 256, "kv_cache_mb": 2, "relay": relay}
        worker = rollout_worker(
            "vllm-0",
            "vllm_rlplugin.worker.inprocess_worker:EngineWorker",
            {**engine, "sleep_mode": True},
            ENVIRONMENT,
            kind=Worker,
        )
        assert isinstance(worker, Worker)
        trainer = Trainer("megatron_rlplugin.trainer.colocated_trainer:ColocatedTrainer", ENVIRONMENT)
        stack.callback(lambda: runner.run(worker.close()))
        stack.callback(lambda: runner.run(trainer.close()))
        settings = {"stream": True, "learning_rate": 1e-2, "micro_batch_size": 1}

        async def start() -> None:
            await trainer.start()
            await asyncio.gather(
                worker.start(), trainer.create({"model": model, "settings": settings, "total_steps": 9, "relay": relay})
            )

        runner.run(start())
        rig = Rig(runner, worker, trainer)
        rig.run(rig.start())
        yield rig
        runner.run(rig.proxy.close())


def test_a_streamed_step_hands_over_and_back_while_a_turn_waits_inside(rig: Rig) -> None:
    async def main() -> None:
        samples = await rig.samples()
        waiting = asyncio.create_task(rig.say(PROMPTS[1], 200))
        while (await rig.worker.stats()).running == 0:
            await asyncio.sleep(0.01)
        assert await rig.colocation.shrink([0])
        assert rig.colocation.holder is DeviceHolder.STREAMING
        assert (await rig.worker.stats()).kv_capacity == 0
        assert await rig.colocation.feed(samples[:2], 0)
        metrics = await rig.colocation.train(TrainBatch(0, 0, tuple(samples)))
        assert metrics.values["stream_fed"] == 0.5
        assert metrics.values["updates"] == 1
        await rig.trainer.publish()
        assert not waiting.done()
        await rig.colocation.give_back(metrics.version)
        whole = await waiting
        assert len(whole.token_ids) == 200
        assert [version for version, _ in whole.versions] == [0, 1]

    rig.run(main())
    assert [what for what, _ in rig.handovers()] == [
        "release",
        "residency stream",
        "residency step",
        "train_step",
        "residency away",
        "reclaim",
    ]
    assert {error for _, error in rig.handovers()} == {""}


async def away_and_back(rig: Rig) -> None:
    """The engine is checked against the trainer's weights with the trainer on its device, which only a CPU allows."""
    await rig.trainer.residency("stream")
    await rig.check_engine_holds_the_trainers_weights()
    await rig.trainer.residency("away")


def test_the_engine_answers_with_the_new_weights_afterwards(rig: Rig) -> None:
    rig.run(away_and_back(rig))


@pytest.mark.parametrize("level", ["stream", "step"])
def test_a_trainer_that_cannot_take_the_device_leaves_the_engine_as_it_was(rig: Rig, level: str) -> None:
    async def main() -> None:
        before = await rig.say(PROMPTS[0], 30)
        samples = await rig.samples()
        waiting = asyncio.create_task(rig.say(PROMPTS[0], 150))
        rig.trainer.fail = level
        if level == "stream":
            assert not await rig.colocation.shrink([0])
        else:
            with pytest.raises(RetryableError, match="no room"):
                await rig.colocation.train(TrainBatch(1, rig.proxy.version, tuple(samples)))
        assert rig.colocation.holder is DeviceHolder.ROLLOUT
        after = await rig.say(PROMPTS[0], 30)
        assert after.token_ids == before.token_ids
        assert (await waiting).token_ids[:30] == before.token_ids
        # It is trained later.
        version = rig.proxy.version
        metrics = await rig.colocation.train(TrainBatch(1, version, tuple(samples)))
        await rig.trainer.publish()
        await rig.colocation.give_back(metrics.version)
        assert rig.proxy.version == version + 1
        await away_and_back(rig)

    rig.run(main())


@pytest.mark.long
@pytest.mark.parametrize("command", ["release", "reclaim"])
def test_a_worker_that_dies_in_a_hand_over_is_restarted_with_the_right_weights(rig: Rig, command: str) -> None:
    async def main() -> None:
        samples = await rig.samples()
        version = rig.proxy.version
        waiting = asyncio.create_task(rig.say(PROMPTS[1], 40))
        rig.worker.fail = command
        if command == "release":
            with pytest.raises(RetryableError, match="did not release"):
                await rig.colocation.train(TrainBatch(2, version, tuple(samples)))
            assert rig.colocation.holder is DeviceHolder.ROLLOUT
        metrics = await rig.colocation.train(TrainBatch(2, version, tuple(samples)))  # waits for the restart
        await rig.trainer.publish()
        await rig.colocation.give_back(metrics.version)
        assert len((await waiting).token_ids) == 40, "its request was not lost"
        await away_and_back(rig)
        assert (await rig.worker.stats()).version == version + 1

    rig.run(main())
    assert rig.fatal == []


def test_a_trainer_that_dies_on_the_device_leaves_a_working_engine(rig: Rig) -> None:
    async def main() -> None:
        before = await rig.say(PROMPTS[0], 30)
        samples = await rig.samples()
        rig.trainer.fail = "step!"
        with pytest.raises(RunError, match="closed"):
            await rig.colocation.train(TrainBatch(9, rig.proxy.version, tuple(samples)))
        assert rig.colocation.holder is DeviceHolder.ROLLOUT
        assert (await rig.say(PROMPTS[0], 30)).token_ids == before.token_ids

    rig.run(main())
