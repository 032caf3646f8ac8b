"""Pause of in-flight requests in a weight update over a 1 Gbit/s link, over the same with the transfer not overlapped.

Real engine, a model of about 64 MB, ``scripts.bench.probes.vllm.update_probe`` in a process of its own. The pause is
the time from SUSPEND until RESUME took effect; the longest gap between two tokens of a request, which holds the
recomputation of its KV too, stands in the detail. The reference is abort, update, resubmit: what it loses in tokens.
The link is an in-memory relay whose reader sleeps as long as the bytes would take.

``long_contexts`` in the detail: 256 requests of 32,768 tokens in flight, of simulated lengths, in vLLM's scheduler
without a model: the hashes of blocks inside the pause, at most one per request, and its seconds
(``scripts.bench.probes.vllm.long_pause_probe``).
"""

from __future__ import annotations

from typing import Any

from scripts.bench.probes.probe_run import run_probe
from scripts.bench.result import frame, now

NAME = "update-pause"
_BAR = 0.1


def run(quick: bool, nonce: str) -> dict[str, Any]:
    """Measure. Raises RunError when the probe fails."""
    begun = now()
    probe = run_probe("update", ["--rounds", "1" if quick else "15"])
    contexts = run_probe("long_pause", ["--requests", "8", "--tokens", "8192"] if quick else [])
    ways = probe["ways"]
    ratio = ways["overlapped"]["pause_ms"] / ways["blocking"]["pause_ms"]
    lost = ways["overlapped"]["tokens_lost"] + ways["blocking"]["tokens_lost"]
    return frame(
        NAME,
        "real",
        value=ratio,
        unit="pause over the pause with the transfer not overlapped",
        reference="tokens lost by abort and resubmit, for each update",
        reference_value=ways["resubmit"]["tokens_lost"],
        bar=f"<= {_BAR}, 0 tokens lost; long contexts: at most one hash per request inside the pause",
        holds=ratio <= _BAR
        and lost == 0
        and ways["overlapped"]["spanning"] > 0
        and contexts["ways"]["chosen"]["hashes_per_request"] <= 1,
        detail={
            **probe,
            "long_contexts": {key: value for key, value in contexts.items() if key != "pid"},
            "samples": probe["rounds"],
        },
        quick=quick,
        nonce=nonce,
        begun=begun,
        pids=[int(probe["pid"]), int(contexts["pid"])],
    )
