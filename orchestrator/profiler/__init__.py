"""The offline profiler: which points to measure, measuring them, and the file that keeps them (RollPacker 4.1).

What the file says is read through :class:`orchestrator.policies.parallelism.engine_profile.EngineProfile`; the engine is
measured in the plugin, in a process that :mod:`orchestrator.ops.profile_command` starts.
"""

from orchestrator.profiler.measure_grid import GridPlace, grid, powers
from orchestrator.profiler.measurement import Prober, ProfileProgress, measure
from orchestrator.profiler.profile_file import ProfileFile, ProfileKey, load, model_name

__all__ = [
    "GridPlace",
    "Prober",
    "ProfileFile",
    "ProfileKey",
    "ProfileProgress",
    "grid",
    "load",
    "measure",
    "model_name",
    "powers",
]
