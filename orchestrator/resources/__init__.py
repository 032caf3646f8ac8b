"""The resource plane (RollArt 4.1, 5.2): pools of hardware by class, who has what of them, and where that is in Ray.

from orchestrator.resources import ResourceManager
manager = ResourceManager({"H800": range(0, 8), "H20": range(8, 32)})
binding = manager.bind("actor-gen-0", "H20", devices=4)
"""

from orchestrator.resources.engine_seats import EngineSeat
from orchestrator.resources.placement_groups import Placement, cluster_resources, reserve
from orchestrator.resources.resource_manager import ROLE_CLASSES, ResourceManager

__all__ = ["ROLE_CLASSES", "EngineSeat", "Placement", "ResourceManager", "cluster_resources", "reserve"]
