"""Time to first token of a request that outranks all running ones, over waiting for a slot as stock vLLM does.

Real engine, 32 slots full of long requests, ``scripts.bench.probes.vllm.preemption_probe`` in a process of its own. The
detail holds what it costs: tokens/s over all with preemption over without, and how much of the preempted ones' prefix
was still cached. The tokens of those that were preempted must not change (greedy, fp32).
"""

from __future__ import annotations

from typing import Any

from scripts.bench.probes.probe_run import run_probe
from scripts.bench.result import frame, now

NAME = "preemption"
_BAR = 0.5


def run(quick: bool, nonce: str) -> dict[str, Any]:
    """Measure. Raises RunError when the probe fails."""
    begun = now()
    probe = run_probe("preemption", ["--rounds", "1" if quick else "12"])
    preempting, waiting = probe["ways"]["preempting"], probe["ways"]["waiting"]
    ratio = preempting["urgent_ttft_ms"] / waiting["urgent_ttft_ms"]
    return frame(
        NAME,
        "real",
        value=ratio,
        unit="time to first token over that without preemption",
        reference="tokens/s over all, with preemption over without",
        reference_value=preempting["tokens_per_s"] / waiting["tokens_per_s"],
        bar=f"<= {_BAR}, tokens of the preempted unchanged",
        holds=ratio <= _BAR and probe["differing_tokens"] == 0 and preempting["outranked"] > 0,
        detail={
            **probe,
            "samples": probe["rounds"],
        },
        quick=quick,
        nonce=nonce,
        begun=begun,
        pids=[int(probe["pid"])],
    )
