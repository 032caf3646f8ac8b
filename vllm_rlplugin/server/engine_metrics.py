"""Prometheus metrics of the rollout side, at vLLM's own ``/metrics`` under the prefix ``rl_coserve:``.

Names carry base units (seconds, tokens, blocks). Histograms are of requests that came over the control endpoints; gauges
and counters are the scheduler's, so they include the requests of serving users. They are refreshed once a second, by one
call between two engine steps.

With PROMETHEUS_MULTIPROC_DIR set the gauges are those of the process that wrote last: there is one, because the control
endpoints need a single API server process.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from orchestrator.api import Completion, WorkerStats

if TYPE_CHECKING:
    from vllm_rlplugin.server.pool_metrics import PoolMetrics
    from vllm_rlplugin.worker.served_worker import ServedWorker

PREFIX = "rl_coserve:"
REFRESH_SECONDS = 1.0

_TTFT = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.08,
    0.16,
    0.32,
    0.64,
    1.28,
    2.56,
    5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)  # seconds
_TPOT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 10)  # seconds
_UPDATE = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)  # seconds
_logger = logging.getLogger("vllm.rl_coserve")

# WorkerStats field -> name and help. Gauges, then counters (the scheduler's totals since the start).
_GAUGES = {
    "running": ("requests_running", "Requests that the engine computes, those of serving users included."),
    "waiting": ("requests_waiting", "Requests that wait, in the engine or in front of it."),
    "kv_used": ("kv_blocks_used", "KV-cache blocks in use."),
    "oldest_wait": ("oldest_wait_seconds", "How long the longest-waiting request has waited."),
    "version": ("weight_version", "The weight version that is loaded."),
}
_COUNTERS = {
    "preemptions": ("preemptions", "Preemptions, those for weight updates excepted."),
    "outranked": ("outranked", "Preemptions in favour of a waiting request of better priority."),
    "prefix_queries": ("prefix_query_tokens", "Tokens looked up in the prefix cache."),
    "prefix_hits": ("prefix_hit_tokens", "Tokens found in the prefix cache."),
    "generated": ("generated_tokens", "Tokens generated."),
}


class EngineMetrics:
    """All of them, in one registry."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        def gauge(name: str, text: str) -> Gauge:
            return Gauge(PREFIX + name, text, registry=registry, multiprocess_mode="mostrecent")

        self._gauges = {field: gauge(*naming) for field, naming in _GAUGES.items()}
        self._counters = {
            field: Counter(PREFIX + name, text, registry=registry) for field, (name, text) in _COUNTERS.items()
        }
        self._totals = dict.fromkeys(_COUNTERS, 0)
        self._held = gauge("requests_held", "Of those that wait, those held in front of the engine.")
        self._free = gauge("kv_blocks_free", "KV-cache blocks that are free or hold only cached prefixes.")
        self._suspended = gauge("suspended", "1 while the engine is paused, else 0.")
        self._finished = Counter(
            PREFIX + "requests_finished", "Requests that ended, by reason.", ["reason"], registry=registry
        )
        self._first = Histogram(
            PREFIX + "time_to_first_token_seconds", "From ADD to the first token.", buckets=_TTFT, registry=registry
        )
        self._per = Histogram(
            PREFIX + "time_per_output_token_seconds",
            "Between two tokens, the mean of a request.",
            buckets=_TPOT,
            registry=registry,
        )
        self._updates = Counter(PREFIX + "weight_updates", "Weight updates, by result.", ["result"], registry=registry)
        self._known_updates = {"ok": 0, "failed": 0}
        for result in self._known_updates:
            self._updates.labels(result)
        self._update_seconds = Histogram(
            PREFIX + "weight_update_seconds",
            "Phases of a weight update: prepare (fetched while requests continued), fetch (while paused), load (into the "
            "model, verified), kv (KV of older weights shut out).",
            ["phase"],
            buckets=_UPDATE,
            registry=registry,
        )

    def observe_completion(self, completion: Completion) -> None:
        """One request has ended."""
        self._finished.labels(completion.finish_reason).inc()
        timing = completion.timing
        if timing.first_token > 0:
            self._first.observe(timing.first_token)
        if timing.per_token > 0:
            self._per.observe(timing.per_token)

    def observe_phase(self, phase: str, seconds: float) -> None:
        """One phase of a weight update has ended."""
        self._update_seconds.labels(phase).observe(seconds)

    def refresh(self, stats: WorkerStats, held: int, updates: int, failures: int) -> None:
        """Set the gauges, and raise the counters to the totals of a snapshot."""
        for field, gauge in self._gauges.items():
            gauge.set(getattr(stats, field))
        for field, counter in self._counters.items():
            total = int(getattr(stats, field))
            counter.inc(max(0, total - self._totals[field]))
            self._totals[field] = total
        for result, total in (("ok", updates), ("failed", failures)):
            self._updates.labels(result).inc(max(0, total - self._known_updates[result]))
            self._known_updates[result] = total
        self._held.set(held)
        self._free.set(stats.kv_capacity - stats.kv_used)
        self._suspended.set(stats.suspended)


async def refresh_metrics(metrics: EngineMetrics, worker: ServedWorker, pool: PoolMetrics | None = None) -> None:
    """Refresh for ever, those of the engine's KV pool too, whatever one look raises; ends when the engine has died."""
    said = ""
    while True:
        try:
            cycle = worker.cycle
            metrics.refresh(await worker.stats(), worker.held, cycle.updates, cycle.failures)
            if pool is not None:
                await pool.refresh_in_thread()
            said = ""
        except Exception as error:  # noqa: BLE001  whatever was raised in the engine's process comes as a bare Exception
            if worker.broken:
                _logger.info("metrics are no longer refreshed: %s", error)
                return
            if repr(error) != said:  # else with each look
                _logger.warning("metrics could not be refreshed, tried again: %r", error)
            said = repr(error)
        await asyncio.sleep(REFRESH_SECONDS)
