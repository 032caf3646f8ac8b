"""The offline profiler: which points to measure, measuring them, and the file that keeps them (RollPacker 4.1).

What the file says is read through :class:`orchestrator.policies.parallelism.engine_profile.EngineProfile`; the engine is
measured in the plugin, in a process that :mod:`orchestrator.ops.profile_command` starts.
"""
