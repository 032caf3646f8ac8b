"""Output tokens/s of vLLM with the plugin loaded but idle, over stock vLLM's; outputs must be bit-identical.

Two real engines in processes of their own, measured in turn. The stock one runs with ``VLLM_PLUGINS`` empty; in the
other the plugin's entry point and flag are asserted live, and the scheduler stock. Both compute the same requests, and a
digest over every token and log-prob must agree. The value is the median ratio over the rounds.
"""

from __future__ import annotations

import datetime
import os
from typing import Any

from orchestrator.bench.overhead import paired, probes
from orchestrator.runfolder import describe_machine

NAME = "idle-overhead"
_BAR = 0.99


def run(quick: bool, nonce: str) -> dict[str, Any]:
    """Measure. Raises RunError when an engine does not start or its hooks are not as they must be."""
    begun = datetime.datetime.now(datetime.UTC).isoformat()
    rounds, tokens = (5, 64) if quick else (41, 256)
    with probes(("idle", "stock")) as (started, hooks):
        row = paired(started, "idle", "stock", 64, tokens, rounds, 0)
    return {
        "name": NAME,
        "kind": "real",
        "value": row["ratio"],
        "unit": "tokens/s over stock vLLM's, median of interleaved rounds",
        "reference": "stock vLLM",
        "reference_value": 1.0,
        "bar": f">= {_BAR}, outputs bit-identical",
        "holds": row["ratio"] >= _BAR and row["identical"],
        **describe_machine(),
        "detail": {
            "quick": quick,
            **row,
            "hooks": hooks,
            "samples": rounds,
            "started": begun,
            "ended": datetime.datetime.now(datetime.UTC).isoformat(),
            "pids": [os.getpid(), *(int(answer["pid"]) for answer in hooks.values())],
            "nonce": nonce,
        },
    }
