"""Prometheus metrics of the KV pool that an engine is in, beside those of :mod:`vllm_rlplugin.server.engine_metrics`.

Read from the pool's shared memory, without a call into any engine. Guarantees: counters never fall, also when an engine of the
pool is replaced by another.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge

from orchestrator.policies.serving.server_borrowing import RecentUse
from vllm_rlplugin.kvpool.ledger.page_ledger import PagePool, PoolError
from vllm_rlplugin.kvpool.serving.pool_lending import lending_status

PREFIX = "rl_coserve:kv_pool_"
WINDOW = 3600.0  # seconds of use by which runs choose what they borrow (ROSE 4)
_logger = logging.getLogger("vllm.rl_coserve")
_GAUGES = {
    "pages": "Pages of the device's KV pool.",
    "pages_free": "Pages that nobody has.",
    "pages_lent": "Pages that rollout engines may have, what they cannot give back included.",
    "pages_rollout": "Pages that rollout engines have.",
    "pages_serving": "Pages that the serving engine has.",
    "ttft_slack_seconds": "The least TTFT slack of requests that wait; +Inf: none does.",
    "tpot_slack_seconds": "The least TPOT slack of requests that decode; +Inf: none does.",
    "rollouts_active": "Rollout engines in the pool that are active.",
    "rollouts_inactive": "Rollout engines in the pool that are deactivated.",
    "rollout_weights_bytes": "Weights of rollout engines in memory, as far as they were deactivated or activated once.",
    "dry_run": "1 while rollout engines only say what they would have run, else 0.",
}
_COUNTERS = {
    "admitted_tokens": "Tokens that rollout engines computed in admitted steps.",
    "dry_run_tokens": "Tokens that rollout engines would have computed.",
    "refused_steps": "Rollout steps that were not admitted.",
    "handed_back_requests": "Rollout requests that were handed back: stalled, or their pages taken.",
    "first_tokens": "First tokens of serving requests.",
    "late_first_tokens": "Of these, beyond the TTFT SLO.",
    "late_first_tokens_by_rollouts": "Of these, in time without the time that rollouts ran.",
    "later_tokens": "Tokens of serving requests after the first.",
    "late_later_tokens": "Times that these were beyond the TPOT SLO.",
    "late_later_tokens_by_rollouts": "Of these, in time without the time that rollouts ran.",
}
_ROLLED = {
    "admitted_tokens": "tokens",
    "dry_run_tokens": "would",
    "refused_steps": "refused",
    "handed_back_requests": "returned",
}
_SERVED = {
    "first_tokens": "firsts",
    "late_first_tokens": "late_first",
    "late_first_tokens_by_rollouts": "blamed_first",
    "later_tokens": "nexts",
    "late_later_tokens": "late_next",
    "late_later_tokens_by_rollouts": "blamed_next",
}


class PoolMetrics:
    """Of one pool; :meth:`refresh` now and then."""

    def __init__(self, pool: PagePool, registry: CollectorRegistry = REGISTRY) -> None:
        self._pool = pool
        self._gauges = {
            name: Gauge(PREFIX + name, text, registry=registry, multiprocess_mode="mostrecent")
            for name, text in _GAUGES.items()
        }
        self._counters = {name: Counter(PREFIX + name, text, registry=registry) for name, text in _COUNTERS.items()}
        self._use, self._since = RecentUse(WINDOW), time.monotonic()
        self._now, self._lends = 0.0, True
        self._known: dict[tuple[str, str], int] = {}  # (counter, engine) -> what it had said

    @property
    def recent_use(self) -> dict[str, float | bool]:
        """For a run that looks for a device to borrow: the share of the pool that serving used in the mean of at most the last
        hour, for how many seconds it was watched, the share now, and whether anything may be lent at all."""
        now = time.monotonic()
        watched = min(WINDOW, now - self._since)
        return {
            "serving_use": self._use.mean(now),
            "seconds": watched,
            "serving_now": self._now,
            "lends": self._lends,
        }

    async def refresh_in_thread(self) -> None:
        """As :meth:`refresh`, for an event loop: a process that was stopped with the ledger's lock costs a thread's time."""
        if (found := await asyncio.to_thread(self._read)) is not None:
            self._show(found)

    def refresh(self) -> None:
        """Read the pool. One whose ledger is stuck is looked at the next time."""
        if (found := self._read()) is not None:
            self._show(found)

    def _read(self) -> dict[str, Any] | None:
        try:
            return lending_status(self._pool)
        except PoolError as error:
            _logger.warning("the KV pool's metrics are not refreshed: %s", error)
            return None

    def _show(self, found: dict[str, Any]) -> None:
        rollouts, serving, slo = found["rollouts"], found["serving"], found["slo"]
        pages = serving["pages"] if serving is not None else 0
        self._now, self._lends = min(1.0, pages / found["pages"]), found["most"] != 0
        self._use.add_sample(time.monotonic(), self._now)
        state: Mapping[str, Any] = slo["state"] if slo is not None else {}
        for name, value in {
            "pages": found["pages"],
            "pages_free": found["free"],
            "pages_lent": sum(row["budget"] for row in rollouts if not row["inactive"]),
            "rollouts_active": sum(not row["inactive"] for row in rollouts),
            "rollouts_inactive": sum(row["inactive"] for row in rollouts),
            "rollout_weights_bytes": sum(row["weights"] for row in rollouts),
            "pages_rollout": sum(row["pages"] for row in rollouts),
            "pages_serving": pages,
            "ttft_slack_seconds": _slack(state.get("ttft_slack")),
            "tpot_slack_seconds": _slack(state.get("tpot_slack")),
            "dry_run": int(found["dry_run"]),
        }.items():
            self._gauges[name].set(value)
        for row in rollouts:
            for name, field in _ROLLED.items():
                self._count(name, row["name"], row[field])
        if serving is not None and slo is not None:
            for name, field in _SERVED.items():
                self._count(name, serving["name"], slo[field])

    def _count(self, name: str, engine: str, total: int) -> None:
        known = self._known.get((name, engine), 0)
        self._counters[name].inc(max(0, total - known))
        self._known[name, engine] = total


def _slack(seconds: float | None) -> float:
    return float("inf") if seconds is None else seconds
