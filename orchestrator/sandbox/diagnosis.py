"""Whether this machine can run model-written code, said in one line; for ``rl-coserve doctor``."""

from __future__ import annotations

import asyncio
from typing import Literal

from orchestrator.api import ConfigError
from orchestrator.sandbox.run import Sandbox
from orchestrator.sandbox.seccomp import program


def diagnose_sandbox() -> tuple[Literal["ok", "warn"], str, str]:
    """(status, what was found, what to do). A machine without a sandbox is a warning: most tasks do without."""
    try:
        sandbox = Sandbox(slots=1)
        asyncio.run(sandbox.check())
    except ConfigError as error:
        return "warn", f"none: tasks with model-written code cannot run ({error.value})", error.fix
    groups = ", ".join(sandbox.uses_cgroups) or "none (memory is watched, processes are counted by user)"
    calls = "system calls filtered" if program() is not None else "system calls not filtered on this processor"
    return "ok", f"bubblewrap works; {calls}; cgroups: {groups}; inside: {sandbox.interpreter}", ""
