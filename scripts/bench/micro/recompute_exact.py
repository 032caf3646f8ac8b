"""Tokens that an updated in-flight request writes differently from a fresh engine with the new weights (must be 0).

Real engine, greedy, fp32: ``scripts.bench.probes.vllm.recompute_probe`` in a process of its own, with both ways of
shutting out old KV (cache salt, flush). Counted are requests that the update met in flight, and prompts that were sent
before it and are sent again after it (these must hit no KV of the old weights). The detail holds the controls that show
that the comparison can fail: how many tokens the update changed, and how many differ when old KV is kept.
``--quick`` compares at least 1,000 tokens, the full run at least 10,000 over three seeds.
"""

from __future__ import annotations

from typing import Any

from scripts.bench.probes.probe_run import run_probe
from scripts.bench.result import frame, now

NAME = "recompute-exact"
_QUICK_TOKENS = 1_000
_FULL_TOKENS = 10_000
_FULL_SEEDS = (0, 1, 2)
_SUMS = (
    "tokens",
    "differing",
    "requests",
    "updates",
    "preempted",
    "kept_tokens",
    "changed_by_update",
    "changed_by_update_of",
    "differing_without_reset",
    "differing_without_reset_of",
    "repeated_tokens",
    "repeated_differing",
    "repeated_hits",
    "repeated_again_hits",
    "repeated_differing_without_reset",
    "repeated_hits_without_reset",
)


def run(quick: bool, nonce: str) -> dict[str, Any]:
    """Measure. Raises RunError when a probe fails."""
    begun = now()
    tokens, seeds = (_QUICK_TOKENS, (0,)) if quick else (_FULL_TOKENS // len(_FULL_SEEDS) + 1, _FULL_SEEDS)
    probes = [run_probe("recompute", ["--tokens", str(tokens), "--seed", str(seed)]) for seed in seeds]
    sums = {name: sum(int(probe[name]) for probe in probes) for name in _SUMS}
    enough = sums["tokens"] >= (_QUICK_TOKENS if quick else _FULL_TOKENS)
    wrong = sums["differing"] + sums["repeated_differing"]
    controls = (
        "changed_by_update",
        "differing_without_reset",
        "repeated_again_hits",
        "repeated_differing_without_reset",
        "repeated_hits_without_reset",
    )
    can_fail = all(sums[name] > 0 for name in controls)
    return frame(
        NAME,
        "real",
        value=wrong,
        unit="tokens that differ",
        reference="a fresh engine with the new weights",
        reference_value=0,
        bar=f"0 of >= {_FULL_TOKENS:,} tokens, no prefix hit on old KV; all controls > 0",
        holds=wrong == 0 and sums["repeated_hits"] == 0 and enough and can_fail,
        detail={
            **sums,
            "samples": sums["requests"],
            "ways": [probe["ways"] for probe in probes],
            "seeds": list(seeds),
        },
        quick=quick,
        nonce=nonce,
        begun=begun,
        pids=[*(int(probe["pid"]) for probe in probes)],
    )
