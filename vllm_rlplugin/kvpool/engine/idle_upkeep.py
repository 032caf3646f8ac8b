"""Has an engine of a pool look at its pages while it has nothing to do, or is paused: a served engine sleeps until asked.

Guarantees: while the engine answers, what nobody used for ``--rl-kv-pool-keep`` seconds goes back to the pool, and a smaller
budget is complied with, ``LOOK_SECONDS`` later at the latest: an engine without requests is not taken for one that hangs, and
killed.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from vllm_rlplugin.worker.live_engine import LiveEngine

LOOK_SECONDS = 0.25  # as often as an engine with requests looks by itself; a cut has a deadline of seconds

_TOLD = ("process", "patches", "pages", "budget", "free", "displaced", "reason", "async_scheduling")

_logger = logging.getLogger("vllm.rl_coserve")


class PoolUpkeep:
    """Of the engine behind one front end, in its event loop. ``latest``: what the scheduler said last (``page_pool``)."""

    def __init__(self, engine: LiveEngine, every: float = LOOK_SECONDS) -> None:
        self._engine = engine
        self._every = every
        self.latest: dict[str, Any] = {}

    def public_status(self) -> dict[str, Any]:
        """What of it is for everybody: JSON."""
        return {name: self.latest[name] for name in _TOLD if name in self.latest}

    async def run(self) -> None:
        """For ever, whatever one look raises; ends when the engine has died."""
        said = ""
        while True:
            try:
                await self.check_pages()
                said = ""
            except Exception as error:  # noqa: BLE001  whatever the ledger raised in the engine's process comes as a bare Exception
                if self._engine.dead:
                    _logger.info("the engine's pages are no longer looked after: %s", error)
                    return
                if repr(error) != said:  # else four times a second
                    _logger.warning("the engine's pages could not be looked after, tried again: %r", error)
                said = repr(error)
            await asyncio.sleep(self._every)

    async def check_pages(self) -> None:
        """Once, between two steps. Raises RetryableError when the engine is dead, else what the engine raised."""
        self.latest = await self._engine.command("page_pool", {})
