"""Tokens/s of our worker (its scheduler, a priority for each request) over a plain stock engine's, 64 to 512 requests.

Two real engines in processes of their own, measured in turn with the same requests, 128 slots, log-probs on in both. The
stock engine is driven by the shortest possible loop around ``step``. The value is the worst of the sizes' medians.
The detail also holds what 1,000 ADDs during decode take from 128 running requests (bar: at least 0.99 of their tokens/s).
"""

from __future__ import annotations

import datetime
import os
from typing import Any

from orchestrator.bench.overhead import paired, probes, with_adds
from orchestrator.runfolder import describe_machine

NAME = "active-overhead"
_BAR = 0.97
_SIZES = (64, 128, 256, 512)  # requests at once


def run(quick: bool, nonce: str) -> dict[str, Any]:
    """Measure. Raises RunError when an engine does not start or its hooks are not as they must be."""
    begun = datetime.datetime.now(datetime.UTC).isoformat()
    sizes, rounds, tokens = ((64, 512), 2, 32) if quick else (_SIZES, 15, 128)
    with probes(("worker", "stock")) as (started, hooks):
        rows = [
            paired(started, "worker", "stock", size, tokens, rounds, index << 20) for index, size in enumerate(sizes)
        ]
        adds = with_adds(started["worker"], 128, 64 if quick else 400, 1000, 2 if quick else 12, 1 << 30)
    worst = min(row["ratio"] for row in rows)
    return {
        "name": NAME,
        "kind": "real",
        "value": worst,
        "unit": "tokens/s over stock vLLM's, worst size, median of interleaved rounds",
        "reference": "stock vLLM",
        "reference_value": 1.0,
        "bar": f">= {_BAR}",
        "holds": worst >= _BAR,
        **describe_machine(),
        "detail": {
            "quick": quick,
            "sizes": rows,
            "adds_during_decode": adds,
            "hooks": hooks,
            "samples": rounds * len(sizes),
            "started": begun,
            "ended": datetime.datetime.now(datetime.UTC).isoformat(),
            "pids": [os.getpid(), *(int(answer["pid"]) for answer in hooks.values())],
            "nonce": nonce,
        },
    }
