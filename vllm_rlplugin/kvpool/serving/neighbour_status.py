"""What a rollout engine can say of its device: what it may have of it, and how its serving neighbour is (ROSE 4.1).

Guarantees: a look at the pool, under a millisecond, that changes nothing; as the serving engine said last: one that hangs
says nothing new. Plain data with the fields of :class:`orchestrator.api.SharedDevice`: finite, or None.
"""

from __future__ import annotations

import math
from typing import Any

from vllm_rlplugin.kvpool.ledger.page_ledger import PagePool
from vllm_rlplugin.kvpool.ledger.tenant_words import ServingWords

_COUNTS = ("firsts", "late_first", "blamed_first", "nexts", "late_next", "blamed_next")


def device_status(pool: PagePool, slot: int) -> dict[str, Any] | None:
    """Of the rollout tenant in ``slot``; None: it is none any more."""
    view = pool.view()
    mine = next((tenant for tenant in view.tenants if tenant.slot == slot), None)
    if mine is None:
        return None
    found: dict[str, Any] = {"pages": mine.used, "budget": mine.budget, "page_bytes": view.page_bytes}
    found |= {"serving_pages": view.serving.used if view.serving is not None else 0, "pool_pages": pool.pages}
    said = ServingWords.unpack(pool.read(view.serving.slot)) if view.serving is not None else None
    if said is None:
        return found
    state = said.state
    slacks = {"ttft_slack": state.ttft_slack, "tpot_slack": state.tpot_slack, "arriving": state.arriving}
    found |= {name: value if math.isfinite(value) else None for name, value in slacks.items()}
    return found | {name: getattr(said, name) for name in _COUNTS}
