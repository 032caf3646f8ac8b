"""Cost of a scheduler's step with 1,024 requests in a KV pool, over stock vLLM's step, in turn; the worst of three engines.

vLLM's own schedulers with a real ledger and real mapped host memory, without a model:
``scripts.bench.probes.vllm.pool_step_probe`` says what a step is. The engines are a serving one that publishes its
slack, a rollout one that nobody limits, and one beside serving that admits half of its requests per step, each
against a stock scheduler with the same requests. The value is processor time of the thread, summed over 600 steps of
each; the detail has wall time and medians too.
"""

from __future__ import annotations

from typing import Any

from scripts.bench.probes.probe_run import run_probe
from scripts.bench.result import frame, now

NAME = "pool-step"
_BAR = 1.05


def run(quick: bool, nonce: str) -> dict[str, Any]:
    """Measure. Raises RunError when the probe fails. ``quick`` claims nothing: 30 steps are too few."""
    begun = now()
    probe = run_probe("pool_step", ["--requests", "128", "--steps", "30"] if quick else [])
    roles = probe["roles"]
    worst = max(roles, key=lambda role: roles[role]["ratio"])
    return frame(
        NAME,
        "real",
        value=roles[worst]["ratio"],
        unit=f"processor time of a scheduler's step in a pool over stock's, {probe['requests']:,} requests, worst of 3",
        reference="milliseconds of stock's step, median",
        reference_value=roles[worst]["stock_ms"],
        bar=f"<= {_BAR}",
        holds=None if quick else roles[worst]["ratio"] <= _BAR,
        detail={"worst": worst, "roles": roles, "requests": probe["requests"], "samples": roles[worst]["steps"]},
        quick=quick,
        nonce=nonce,
        begun=begun,
        pids=[int(probe["pid"])],
    )
