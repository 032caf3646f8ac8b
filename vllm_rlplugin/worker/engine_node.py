"""The ranks of an engine on a node that is not its first: they do what the first one's process tells them.

Guarantee: they end with this process, and :meth:`EngineNode.ended` returns when one of them does.
"""

from __future__ import annotations

import asyncio
from typing import Any

from vllm_rlplugin.worker.inprocess_engine import EngineOptions, engine_config


class EngineNode:
    """Making one blocks until the ranks of all nodes have met and loaded the model. The keywords are those of
    :class:`~vllm_rlplugin.worker.inprocess_worker.EngineWorker`. Raises ConfigError for wrong options."""

    def __init__(self, *, name: str = "worker-0", kv: None = None, **options: Any) -> None:
        config, _ = engine_config(EngineOptions.from_dict(options))
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor

        self.name = name
        self._executor = MultiprocExecutor(config, monitor_workers=False)  # as `vllm serve --headless` does

    async def ended(self) -> None:
        """When a rank here has."""
        await asyncio.to_thread(self._executor.start_worker_monitor, inline=True)
