"""Seconds in which 1 GiB of KV pages of 2 MiB goes from a rollout process to a serving process (ROSE 4.1).

Two real processes and one pool: ``scripts.bench.probes.vllm.remap_probe``. From the word to give it back to the last
page mapped on the other side; the memory is checked to be the same. On a host with an NVIDIA GPU its memory is moved:
pages that a keeper holds (the value), pages that each process makes, and the same through kvcached where that is
installed; the bar is then 5 ms. Without one it is host memory, and the bar one tick of serving: its default TPOT SLO.
``--quick``: three rounds.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from orchestrator.ops.nvidia_driver import find_gpus
from orchestrator.policies.serving.admission import Slo
from scripts.bench.probes.probe_run import run_probe
from scripts.bench.result import frame, now

NAME = "kv-remap"
MIB = 1024
GPU_BAR = 0.005  # seconds


def run(quick: bool, nonce: str) -> dict[str, Any]:
    """Measure. Raises RunError when the probe fails."""
    begun = now()
    there = find_gpus()
    device = "host memory" if there.missing else there.devices[0].name
    kinds = ["host"] if there.missing else ["kept", "created"]
    if not there.missing and importlib.util.find_spec("kvcached") is not None:
        kinds.append("kvcached")
    rounds = "3" if quick else "20"
    rows = {kind: run_probe("remap", ["--mib", str(MIB), "--rounds", rounds, "--kind", kind]) for kind in kinds}
    found = rows[kinds[0]]
    bar, reference = (Slo().tpot, "one tick: the default TPOT SLO") if there.missing else (GPU_BAR, "what was aimed at")
    return frame(
        NAME,
        "real",
        value=found["seconds"],
        unit="seconds for 1 GiB of pages, median",
        reference=reference,
        reference_value=bar,
        bar=f"<= {bar:g}",
        holds=found["seconds"] <= bar,
        detail={
            "device": device,
            **{name: found[name] for name in ("release", "map", "worst", "rounds")},
            "others": {kind: rows[kind] for kind in kinds[1:]},
        },
        quick=quick,
        nonce=nonce,
        begun=begun,
        pids=[*(int(row["pid"]) for row in rows.values())],
    )
