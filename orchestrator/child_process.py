"""A child process of the orchestrator: who it is, whether it lives, and how it is stopped.

Guarantees: ``stop`` is idempotent, asks first, kills after a limit, and always reaps.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

HIDDEN = "RL_COSERVE_"  # environment variables that begin so are the orchestrator's
STOP_LIMIT = 5.0  # seconds to stop by itself before it is killed


def public_environment() -> dict[str, str]:
    """Our environment variables without those that hold secrets of the run."""
    return {name: value for name, value in os.environ.items() if not name.startswith(HIDDEN)}


class ChildProcess:
    """Base of the children that the orchestrator starts; a subclass sets ``_process`` when it starts one."""

    def __init__(self, log: Path | None) -> None:
        self._log = log
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self._process.pid if self._process is not None and self.alive() else None

    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.returncode is None

    async def ended(self) -> None:
        """Wait until the process is gone; at once when there is none."""
        if self._process is not None:
            await self._process.wait()

    async def stop(self) -> None:
        """Stop, kill if need be, reap. Idempotent."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            async with asyncio.timeout(STOP_LIMIT):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
