"""What a serving cluster's users see with nobody beside it, on the arrivals of a run that borrows: what is not rollouts' doing.

Guarantees: the same engines, the same requests at the same times, for so many seconds; no rollout engine, no draw.
"""

from __future__ import annotations

import asyncio
from typing import Any

from orchestrator.config import Config
from orchestrator.sim import hardware
from orchestrator.sim.coserving.serving_cluster import ServingCluster, tail_latency
from scripts.bench.virtual_run import run


def serving_alone(config: Config, seconds: float) -> dict[str, Any]:
    """``ttft_p99``, ``ttft_late`` (share beyond the SLO), ``tpot_p99``, ``tpot_late``, ``requests``. Raises ConfigError."""
    sim, settings = config.sim, config.sim.borrowed

    async def main() -> dict[str, Any]:
        engines = settings.serving or settings.workers
        tenant = hardware.model(sim.model).weight_bytes
        cluster = ServingCluster(settings, engines, hardware.device(sim.device), sim.tensor_parallel, tenant)
        cluster.start()
        await asyncio.sleep(seconds)
        cluster.close()
        found: dict[str, Any] = {"requests": cluster.requests}
        found["ttft_p99"], found["ttft_late"] = tail_latency(cluster.served.ttft, settings.ttft)
        found["tpot_p99"], found["tpot_late"] = tail_latency(cluster.served.tpot, settings.tpot)
        return found

    return run(main())
