"""Tokens/s of our worker (its scheduler, a priority for each request) over a plain stock engine's, 64 to 512 requests.

Two real engines in processes of their own, at once on one core, the same requests, 128 slots, log-probs on in both
(``overhead.paired`` says why this is the ratio of tokens/s). The stock engine is driven by the shortest possible loop around
``step``. Two processes of one kind differ by a percent or two, so several pairs are measured, and a size counts with the
median over its pairs' medians. The value is the worst size's.
The detail also holds what 1,000 ADDs during decode take from 128 running requests (bar: ``cost`` below 0.01).
"""

from __future__ import annotations

import os
import statistics
from typing import Any

from scripts.bench.micro.overhead_pairs import paired, pairs_against_stock, with_adds
from scripts.bench.result import frame, now

NAME = "active-overhead"
_BAR = 0.97
_SIZES = {64: 192, 128: 144, 256: 96, 512: 64}  # requests at once: tokens each, so that a round takes about two seconds


def run(quick: bool, nonce: str) -> dict[str, Any]:
    """Measure. Raises RunError when an engine does not start or its hooks are not as they must be."""
    begun = now()
    sizes, pairs, rounds = ({64: 32, 512: 32}, 1, 2) if quick else (_SIZES, 8, 4)
    rows: dict[int, list[dict[str, Any]]] = {size: [] for size in sizes}
    pids, adds = [os.getpid()], {}
    for pair, started, hooks in pairs_against_stock("worker", pairs):
        pids += [int(answer["pid"]) for answer in hooks.values()]
        for index, (size, tokens) in enumerate(sizes.items()):
            seed = (pair * len(sizes) + index) << 20
            rows[size].append(paired(started, "worker", "stock", size, tokens, rounds, seed))
        if pair == 0:
            adds = with_adds(started["worker"], 128, 64 if quick else 400, 1000, 2 if quick else 6, 1 << 30)
    medians = {str(size): statistics.median(row["ratio"] for row in found) for size, found in rows.items()}
    worst = min(medians.values())
    return frame(
        NAME,
        "real",
        value=worst,
        unit="tokens/s over stock vLLM's (both on one core at once), worst size, median over pairs of processes",
        reference="stock vLLM",
        reference_value=1.0,
        bar=f">= {_BAR}",
        holds=worst >= _BAR,
        detail={
            "ratio_by_size": medians,
            "pairs": {str(size): found for size, found in rows.items()},
            "adds_during_decode": adds,
            "hooks": hooks,
            "samples": pairs * rounds * len(sizes),
            "pids": pids,
        },
        quick=quick,
        nonce=nonce,
        begun=begun,
    )
