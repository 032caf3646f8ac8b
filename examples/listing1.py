"""Listing 1 of RollArt (section 5) as a program: worker classes by role, and two pools of GPUs.

    python examples/listing1.py                      # a local Ray whose H800s and H20s are names

The listing as it is printed, with what it leaves out (models) as short as possible, and these typos fixed: the second pool
is an entry of a dictionary, ``generate`` uses its argument, ``List`` and ``ray`` are imported. A cluster is given a place for
every worker, and its calls are awaited: as the trainer and the engines of a training run
(``orchestrator/runtime/engine_actors.py``), which are clusters of this kind. Which class of hardware a
task's turns go to, and the serverless reward, are keys of a config here: ``rollout.routing.affinity`` and ``reward.url``.
"""

from __future__ import annotations

import asyncio

import ray

import orchestrator.cluster as rdist
from orchestrator.cluster import ActorGenCls, ActorTrainCls
from orchestrator.resources import Placement, cluster_resources
from orchestrator.resources import ResourceManager as RM


# 1. Single Controller Example
class MyActorTrain(ActorTrainCls):
    """Each worker has its share of the data; the call goes to all of them, and their gradients come back by rank."""

    @rdist.register(mode="execute_all")
    def compute_gradients(self, input_tensor: list[float]) -> float:
        share = input_tensor[self.rank :: self.world_size]
        return sum(2 * value for value in share) / len(share)


# 2. Define actor_gen on heterogeneous GPUs
class Model:
    """Stands for an inference engine: it answers with the prompt backwards."""

    def process(self, input_ids: list[int]) -> list[int]:
        return input_ids[::-1]


class HeteroActorGen(ActorGenCls):
    """The least busy one generates."""

    def __init__(self) -> None:
        self.model = Model()

    @rdist.register(mode="execute_one")
    def generate(self, input_ids: list[int]) -> list[int]:
        return self.model.process(input_ids)


def places(manager: RM, role: str, classes: list[str]) -> dict[str, Placement]:
    """Eight GPUs of its class for each worker."""
    names = [(f"{role}-{rank}", hardware) for rank, hardware in enumerate(classes)]
    return {name: Placement(manager, name, hardware, devices=8, cpus=0) for name, hardware in names}


async def run() -> dict[str, object]:
    """The two clusters, and one call of each. Ray is up."""
    # 2.1 heterogeneous GPU allocation. Training has a pool of its own.
    gen_rm = RM({"H800": list(range(8)), "H20": list(range(8, 32))})
    train_rm = RM({"H800": 16}, name="train")
    gen_places = places(gen_rm, "gen", ["H800", "H20", "H20", "H20"])
    train_places = places(train_rm, "train", ["H800", "H800"])
    train = rdist.ActorTrain(MyActorTrain, train_places)
    gen = rdist.ActorGen(HeteroActorGen, gen_places)
    try:
        await asyncio.gather(train.launch(), gen.launch())
        return {
            "gradients": await train.compute_gradients([1.0, 2.0, 3.0, 4.0]),  # type: ignore[attr-defined]
            "answer": await gen.generate([1, 2, 3]),  # type: ignore[attr-defined]
            "workers": [(actor.name, actor.identity.hardware, len(actor.identity.devices)) for actor in gen.actors],
        }
    finally:
        for cluster in (train, gen):
            cluster.close()
        for place in (*train_places.values(), *gen_places.values()):
            place.release()


if __name__ == "__main__":
    # 8 + 24 GPUs for generation, 16 for training: custom resources of a Ray on this machine.
    gpus = cluster_resources({"H800": 24, "H20": 24})
    ray.init(num_cpus=2, resources=gpus, object_store_memory=100 << 20, include_dashboard=False, log_to_driver=False)
    try:
        for name, value in asyncio.run(run()).items():
            print(f"{name}: {value}")
    finally:
        ray.shutdown()
