"""Seconds in which 1 GiB of KV pages of 2 MiB goes from a rollout process to a serving process, on host memory (ROSE 4.1).

Two real processes and one pool: ``vllm_rlplugin.remap_probe``. From the word to give it back to the last page mapped on the other
side; the memory is checked to be the same. The bar is one tick of serving: its default TPOT SLO. ``--quick``: three rounds.
"""

from __future__ import annotations

import datetime
import os
from typing import Any

from orchestrator.bench.probe import run_probe
from orchestrator.policies.admission import Slo
from orchestrator.runfolder import describe_machine

NAME = "kv-remap"
MIB = 1024


def run(quick: bool, nonce: str) -> dict[str, Any]:
    """Measure. Raises RunError when the probe fails."""
    begun = datetime.datetime.now(datetime.UTC).isoformat()
    found = run_probe("remap", ["--mib", str(MIB), "--rounds", "3" if quick else "20"])
    tick = Slo().tpot
    return {
        "name": NAME,
        "kind": "real",
        "value": found["seconds"],
        "unit": "seconds for 1 GiB of pages, median",
        "reference": "one tick: the default TPOT SLO",
        "reference_value": tick,
        "bar": f"<= {tick:g}",
        "holds": found["seconds"] <= tick,
        **describe_machine(),
        "detail": {
            "quick": quick,
            **{name: found[name] for name in ("release", "map", "worst", "rounds")},
            "started": begun,
            "ended": datetime.datetime.now(datetime.UTC).isoformat(),
            "pids": [os.getpid(), int(found["pid"])],
            "nonce": nonce,
        },
    }
