"""What a scheduler does about its engine's pages: before a step it has those that the step may need, and it gives back.

Guarantees: a rollout engine that owns more than its budget gives back at once what nobody references, then preempts requests,
the lowest priority and the latest first, until it complies (they keep their tokens, and wait for pages or are taken
elsewhere); a serving engine never preempts for others. No acquire waits for anybody.
"""

from __future__ import annotations

import time
from typing import Any

from orchestrator.policies.kv_sharing import SharingRules
from vllm_rlplugin.kvpool.engine import EnginePool, current
from vllm_rlplugin.kvpool.guardian import Guardian
from vllm_rlplugin.kvpool.parking import Parking
from vllm_rlplugin.options import PluginOptions

_LOOK_SECONDS = 0.25  # between two looks at all blocks


class PagedScheduling:
    """Of one stock scheduler, in its thread."""

    def __init__(self, scheduler: Any, pool: EnginePool, keep: float, guardian: Guardian | None = None) -> None:
        self._scheduler = scheduler
        self._pool = pool
        in_flight = 2 if scheduler.scheduler_config.async_scheduling else 0
        manager = scheduler.kv_cache_manager
        self._parking = Parking(
            manager.block_pool,
            pool.geometry,
            pool,
            backed=[0],
            in_flight=in_flight,
            now=time.monotonic,
            keep=keep,
        )
        self._block_tokens = scheduler.block_size
        self._looked = 0.0
        self._guardian = guardian
        self.displaced = 0  # requests that were preempted for the budget's sake

    @classmethod
    def of(cls, scheduler: Any, options: PluginOptions) -> PagedScheduling | None:
        """None where the KV cache is vLLM's own."""
        if not options.kv_pool:
            return None
        pool = current()
        if pool is None:
            raise RuntimeError(
                "kv_pool is set, but the KV cache is not in the pool: scheduler and worker are in two processes"
            )
        guardian = None
        if pool.role == "serving":
            shares = options.kv_pool_headroom, options.kv_pool_watermark, options.kv_pool_lent
            rules = SharingRules(pool.pool.pages, *shares)
            guardian = Guardian(pool.pool, rules, time.monotonic, options.kv_pool_window)
        return cls(scheduler, pool, options.kv_pool_keep, guardian)

    def before_step(self) -> None:
        """Comply, then have what the next step may allocate."""
        self._parking.stepped()
        self._comply()
        if self._guardian is not None:
            self._guardian.tick()
        self._parking.want(self._wanted())
        now = time.monotonic()
        if now - self._looked >= _LOOK_SECONDS:
            self._looked = now
            self._parking.look()

    def look(self, opened: bool = False) -> dict[str, Any]:
        """The same without a step, for an engine that has nothing to do. ``opened``: an RL step begins, rollout engines get their
        budgets anew (of a serving engine only)."""
        if self._guardian is not None:
            if opened:
                self._guardian.open()
            self._guardian.tick()
        if not self._scheduler.running:
            self._parking.stepped()
        self._comply()
        self._parking.look()
        view = self._pool.pool.view()
        mine = next(tenant for tenant in view.tenants if tenant.slot == self._pool.slot)
        return {
            "pages": mine.used,
            "budget": mine.budget,
            "revision": mine.revision,
            "free": view.free,
            "page_bytes": view.page_bytes,
            "groups": self._parking.backed,
            "displaced": self.displaced,
            **self._lent(),
        }

    def _lent(self) -> dict[str, Any]:
        if self._guardian is None:
            return {}
        budget = self._guardian.budget
        return {"lent": budget.pages, "state": budget.state, "cuts": self._guardian.cuts, "kills": self._guardian.kills}

    def _wanted(self) -> int:
        """Blocks that running and waiting requests may ask for in the next step: an upper bound, so that stock finds them."""
        scheduler, most = self._scheduler, 0
        tokens = scheduler.max_num_scheduled_tokens
        for request in scheduler.running:
            ahead = min(tokens, max(1, request.num_tokens_with_spec - request.num_computed_tokens))
            most += -(-ahead // self._block_tokens) + 1
        room = scheduler.max_num_running_reqs - len(scheduler.running)
        for _, request in zip(range(max(0, room)), scheduler.waiting, strict=False):
            most += -(-request.num_tokens // self._block_tokens) + 1
        return most

    def _comply(self) -> None:
        if self._pool.role == "serving":
            return
        mine = next(tenant for tenant in self._pool.pool.view().tenants if tenant.slot == self._pool.slot)
        each = self._pool.geometry.pages_a_group
        excess = -(-(mine.used - mine.budget) // each)
        if excess <= 0:
            return
        excess -= self._parking.held - self._parking.backed  # those that are on their way
        excess -= self._parking.shrink(excess)
        while excess > 0 and self._scheduler.running:
            self._displace()
            excess -= self._parking.shrink(excess)

    def _displace(self) -> None:
        """Stock's own preemption, of the request that ranks last."""
        scheduler = self._scheduler
        request = max(scheduler.running, key=lambda request: (request.priority, request.arrival_time))
        scheduler.running.remove(request)
        scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
        self.displaced += 1
