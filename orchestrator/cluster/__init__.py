"""Worker and Cluster: the programming interface of the data plane (RollArt 5, Listing 1).

import orchestrator.cluster as rdist
from orchestrator.cluster import ActorTrain, ActorTrainCls
from orchestrator.resources import ResourceManager

class MyActorTrain(ActorTrainCls):
    @rdist.register(mode="execute_all")
    def compute_gradients(self, batch): ...

with ActorTrain(ResourceManager({"H800": 8}), MyActorTrain) as cluster:
    results = cluster.compute_gradients(batch)      # one a worker, by rank
"""

from orchestrator.cluster.cluster import ActorGen, ActorTrain, Cluster
from orchestrator.cluster.cluster_calls import WorkerError
from orchestrator.cluster.decorators import register
from orchestrator.cluster.role_workers import ActorGenCls, ActorTrainCls, Worker

__all__ = [
    "ActorGen",
    "ActorGenCls",
    "ActorTrain",
    "ActorTrainCls",
    "Cluster",
    "Worker",
    "WorkerError",
    "register",
]
