"""Listing 1 of RollArt (section 5) as a program: three worker classes, two pools of GPUs, a serverless reward.

    python examples/listing1.py                      # a local Ray whose H800s and H20s are names; the reward is embedded
    RL_COSERVE_REWARD_TOKEN=... python examples/listing1.py https://FUNCTION-URL

The listing as it is printed, with what it leaves out (models, a reward function) as short as possible, and these typos
fixed: the second pool is an entry of a dictionary, ``generate`` uses its argument, ``List`` and ``ray`` are imported, and
the serverless address is a URL.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import ray

import orchestrator.cluster as rdist
from orchestrator.cluster import ActorGenCls, ActorTrainCls, RewardCls
from orchestrator.resources import ResourceManager as RM
from orchestrator.resources import cluster_resources
from orchestrator.rewards.host_launch import RewardHost


# 1. Single Controller Example
class MyActorTrain(ActorTrainCls):
    """Each worker has its share of the data; the call goes to all of them, and their gradients come back as one."""

    @rdist.register(mode="execute_all", aggregate="mean")
    def compute_gradients(self, input_tensor: list[float]) -> float:
        share = input_tensor[self.rank :: self.world_size]
        return sum(2 * value for value in share) / len(share)


# 2. Define actor_gen on heterogeneous GPUs
class Model:
    """Stands for an inference engine: it answers with the prompt backwards."""

    def process(self, input_ids: list[int]) -> list[int]:
        return input_ids[::-1]


class HeteroActorGen(ActorGenCls):
    """2.2 hardware affinity mapping"""

    def __init__(self) -> None:
        self.model = Model()

    @rdist.hw_mapping(hw_affinity={"FrozenLake": "H800", "default": "H20"})
    def generate(self, input_ids: list[int], tag_name: str = "default") -> tuple[list[int], str]:
        return self.model.process(input_ids), self.hardware


# 3. Define a serverless reward computation func
def reward_worker(url: str) -> type[RewardCls]:
    """The class, for the function at this URL."""

    class ServerlessRewardWorker(RewardCls):
        @rdist.register_serverless(attribute="reward_proxy", serverless_url=url)
        @rdist.register(mode="execute_one")
        def compute_rewards(self, traj: list[list[int]]) -> list[float]:
            prompts = [{"prompt": f"Evaluate the trajectory:{one}"} for one in traj]
            return [answer["reward"] for answer in ray.get([self.reward_proxy(prompt) for prompt in prompts])]

    return ServerlessRewardWorker


def even_length(event: dict[str, str]) -> dict[str, float]:
    """The embedded reward function: 1 for a text of even length."""
    return {"reward": float(len(event["prompt"]) % 2 == 0)}


def run(url: str) -> dict[str, object]:
    """The three clusters, and one call of each. Ray is up."""
    # 2.1 heterogeneous GPU allocation. Training has a pool of its own; rewards need a CPU only, the function does the work.
    gen_rm = RM({"H800": list(range(8)), "H20": list(range(8, 32))})
    with (
        rdist.ActorTrain(
            RM({"H800": 16}, name="train"), MyActorTrain, devices_per_worker=8, cpus_per_worker=0
        ) as train,
        rdist.ActorGen(gen_rm, HeteroActorGen, devices_per_worker=8, cpus_per_worker=0) as gen,
        rdist.Reward(RM({"CPU": 1}, name="reward"), reward_worker(url), hardware="CPU", cpus_per_worker=1) as reward,
    ):
        return {
            "gradient": train.compute_gradients([1.0, 2.0, 3.0, 4.0]),  # type: ignore[attr-defined]
            "frozenlake": gen.generate([1, 2, 3], tag_name="FrozenLake"),  # type: ignore[attr-defined]
            "maths": gen.generate([4, 5, 6], "maths"),  # type: ignore[attr-defined]
            "rewards": reward.compute_rewards([[1, 2], [3]]),  # type: ignore[attr-defined]
            "workers": [(worker.worker_id, worker.hardware, len(worker.devices)) for worker in gen.workers],
        }


async def main(url: str) -> None:
    """With an embedded function host where no URL is given."""
    host = None if url else RewardHost("listing1:even_length")
    if host is not None:
        os.environ["PYTHONPATH"] = os.pathsep.join(
            [str(Path(__file__).parent), *os.environ.get("PYTHONPATH", "").split(":")]
        )
        await host.start()
        url, os.environ["RL_COSERVE_REWARD_TOKEN"] = host.url, host.token
    try:
        # 8 + 24 GPUs for generation, 16 for training: custom resources of a Ray on this machine.
        gpus = cluster_resources({"H800": 24, "H20": 24})
        ray.init(
            num_cpus=2, resources=gpus, object_store_memory=100 << 20, include_dashboard=False, log_to_driver=False
        )
        for name, value in run(url).items():  # it blocks; nothing else runs in this loop
            print(f"{name}: {value}")
    finally:
        ray.shutdown()
        if host is not None:
            await host.stop()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else ""))
