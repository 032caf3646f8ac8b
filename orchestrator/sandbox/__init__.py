"""Where model-written code runs: bubblewrap, no network, a read-only root, limits on everything. See ``run.py``.

A machine without bubblewrap gets one clear error; there is no way to run outside.
"""

from orchestrator.sandbox.limits import SandboxLimits, SandboxOutcome
from orchestrator.sandbox.run import Sandbox

Limits, Outcome = SandboxLimits, SandboxOutcome  # the names that tasks of users may import

__all__ = ["Limits", "Outcome", "Sandbox", "SandboxLimits", "SandboxOutcome"]
