"""The offline profiler: which points to measure, measuring them, and the file that keeps them (RollPacker 4.1).

What the file says is read through :class:`orchestrator.policies.profile.Profile`; the engine is measured in the plugin, in
a process that :mod:`orchestrator.runtime.profile` starts.
"""

from orchestrator.profile.file import ProfileFile, ProfileKey, load, model_name
from orchestrator.profile.grid import Place, grid, powers
from orchestrator.profile.measure import Prober, Progress, measure

__all__ = [
    "Place",
    "Prober",
    "ProfileFile",
    "ProfileKey",
    "Progress",
    "grid",
    "load",
    "measure",
    "model_name",
    "powers",
]
