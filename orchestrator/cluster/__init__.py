"""Worker and Cluster: the programming interface of the data plane (RollArt 5, Listing 1).

import orchestrator.cluster as rdist
from orchestrator.cluster import ActorTrain, ActorTrainCls
from orchestrator.resources import Placement, ResourceManager

class MyActorTrain(ActorTrainCls):
    @rdist.register(mode="execute_all")
    def compute_gradients(self, batch): ...

manager = ResourceManager({"H800": 8})
cluster = ActorTrain(MyActorTrain, {name: Placement(manager, name, "H800", 4) for name in ("rank-0", "rank-1")})
await cluster.launch()
results = await cluster.compute_gradients(batch)      # one of each worker, by rank
"""

from orchestrator.cluster.cluster import ActorGen, ActorTrain, Cluster
from orchestrator.cluster.decorators import register
from orchestrator.cluster.role_workers import ActorGenCls, ActorTrainCls, Worker

__all__ = [
    "ActorGen",
    "ActorGenCls",
    "ActorTrain",
    "ActorTrainCls",
    "Cluster",
    "Worker",
    "register",
]
