"""Output tokens/s of vLLM with the plugin loaded but idle, over stock vLLM's; outputs must be bit-identical.

Two real engines in processes of their own, both at once on one core (``overhead.paired`` says why), by several pairs of
processes (two processes of one kind already differ by a percent or two, as their memory lies elsewhere). The stock one runs
with ``VLLM_PLUGINS`` empty; in the other the plugin's entry point and flag are asserted live, and the scheduler stock. Both
compute the same requests, and a digest over every token and log-prob must agree. The value is the median of the pairs' medians.
"""

from __future__ import annotations

import os
import statistics
from typing import Any

from scripts.bench.micro.overhead_pairs import paired, pairs_against_stock
from scripts.bench.result import frame, now

NAME = "idle-overhead"
_BAR = 0.99


def run(quick: bool, nonce: str) -> dict[str, Any]:
    """Measure. Raises RunError when an engine does not start or its hooks are not as they must be."""
    begun = now()
    pairs, rounds, tokens = (1, 6, 64) if quick else (8, 8, 128)
    rows, pids = [], [os.getpid()]
    for pair, started, hooks in pairs_against_stock("idle", pairs):
        rows.append(paired(started, "idle", "stock", 64, tokens, rounds, pair << 16, seeded=True))
        pids += [int(answer["pid"]) for answer in hooks.values()]
    ratio = statistics.median(row["ratio"] for row in rows)
    identical = all(row["identical"] for row in rows)
    return frame(
        NAME,
        "real",
        value=ratio,
        unit="tokens/s over stock vLLM's (both on one core at once), median over pairs of processes",
        reference="stock vLLM",
        reference_value=1.0,
        bar=f">= {_BAR}, outputs bit-identical",
        holds=ratio >= _BAR and identical,
        detail={
            "identical": identical,
            "pairs": rows,
            "hooks": hooks,
            "samples": pairs * rounds,
            "pids": pids,
        },
        quick=quick,
        nonce=nonce,
        begun=begun,
    )
