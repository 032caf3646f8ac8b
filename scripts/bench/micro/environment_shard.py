"""A shard process of ``environments``: the production's host, managers and messages around environments that only think.

    python -m scripts.bench.micro.environment_shard            started by :mod:`scripts.bench.micro.environments`

It tells with each sign of life how busy its loop was, and how much memory it has.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from orchestrator.build import build_manager
from orchestrator.config import parse_config
from orchestrator.runtime import garbage_collector
from orchestrator.runtime.shard_process import HostParts, Send, main, never_stale
from orchestrator.shards.shard_folder import TrajectoryWriter
from orchestrator.sim.twins import SimReward, SimTask
from scripts.bench.micro.busy_loop import BusySelector
from scripts.bench.micro.hold_watch import Beat
from scripts.bench.micro.memory_rise import resident_mib

_WARM_SECONDS = 20.0  # after its start, which is not counted


class BusyLoop(asyncio.SelectorEventLoop):
    """Made in the process that it is of: what it measures by is of one thread."""

    def __init__(self) -> None:
        self.busy = BusySelector()
        super().__init__(self.busy)

    def say(self, folder: Path, name: str) -> None:
        """When it is at work, in a file there; on its own thread."""
        self.busy.beat = Beat(folder, name)


@asynccontextmanager
async def thinking_parts(hello: Mapping[str, Any], send: Send) -> AsyncIterator[HostParts]:
    """Of a measurement."""
    config = parse_config(hello["config"])
    task = SimTask(config)
    writer = TrajectoryWriter([Path(folder) for folder in hello["folders"]], f"{hello['name']}-{hello['start']}")
    garbage_collector.calm()
    loop = asyncio.get_running_loop()
    assert isinstance(loop, BusyLoop)
    loop.say(Path(hello["beats"]), hello["name"])
    busy = loop.busy
    loop.call_later(hello.get("warm", _WARM_SECONDS), busy.begin)

    def counters() -> dict[str, Any]:
        processor = os.times()
        seconds = round(processor.user + processor.system, 3)
        return {"loop": {hello["name"]: busy.as_dict() | {"mib": resident_mib(), "processor_seconds": seconds}}}

    yield HostParts(
        lambda proxy: build_manager(config, task, proxy, never_stale),
        SimReward(config),
        writer.lay,
        config.rollout.trajectory_timeout,
        counters,
    )


if __name__ == "__main__":
    main(thinking_parts, BusyLoop)
