"""How long a request took, from what vLLM's front end knows of it."""

from __future__ import annotations

from typing import Any

from orchestrator.api import CompletionTiming


def make_timing(added: float, fed: float, stats: Any, tokens: int, now: float) -> CompletionTiming:
    """Of a request that was ``added`` here, ``fed`` to vLLM, and ended ``now`` (seconds of the monotonic clock, which the engine
    core stamps with too) with so many tokens. With --disable-log-stats there are no stamps: then only the sum is right."""
    whole = max(0.0, now - added)
    if stats is None or not tokens or not stats.first_token_ts:
        queued = min(whole, fed - added)
        return CompletionTiming(queued, whole - queued)
    first = min(whole, max(0.0, stats.first_token_ts - added))
    queued = min(first, max(0.0, stats.scheduled_ts - added))
    between = (stats.last_token_ts - stats.first_token_ts) / (tokens - 1) if tokens > 1 else 0.0
    return CompletionTiming(queued, whole - queued, first, max(0.0, between))
