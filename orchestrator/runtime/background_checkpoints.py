"""Checkpoints that do not stop the event loop: digests and syncs of gigabytes are a thread's."""

from __future__ import annotations

import asyncio
from pathlib import Path

from orchestrator.checkpoint import Checkpoints, CheckpointState


class BesideTheLoop(Checkpoints):
    """The same, committed in a thread. The pipeline takes one checkpoint at a time."""

    async def committed(self, partial: Path, state: CheckpointState) -> Path:
        """See Checkpoints. Who is cancelled meanwhile, at a SIGTERM for example, waits for its end: nobody goes back to an
        earlier checkpoint while this one gets its name."""
        commit = asyncio.ensure_future(asyncio.to_thread(self.commit, partial, state))
        try:
            return await asyncio.shield(commit)
        finally:
            await asyncio.wait([commit])
