"""How wrong the plain mean of the replicas' means is where the weighted merge is right: the control of stream-equality.

Real Megatron-Core: the same training as ``stream-equality``, in the layouts with several replicas that are fed different
amounts. The merged gradients are compared with those of the same steps when each replica's mean counts the same. The
value is the least over cases, steps and versions of the difference, relative to the largest gradient. A comparison that
called this one equal would show nothing.
"""

from __future__ import annotations

from typing import Any

from orchestrator.api import RunError
from scripts.bench.micro.stream_equality import measure, named
from scripts.bench.result import frame, now

NAME = "merge-control"
QUICK = ("DP2, token-mean", "DP2, dist-opt, sequence-mean")
FULL = (
    *(f"{layout}, {loss}" for layout in ("DP2", "DP4") for loss in ("token-mean", "sequence-mean", "dapo")),
    "DP2, dist-opt, token-mean",
    "DP2, float weights",
    "MoE DP2",
    "TP2 x DP2, token-mean",
    "PP2 x DP2, sequence-mean",
    "MoE EP2 x EDP2, token-mean",
)
_BAR = 1e-2


def run(quick: bool, nonce: str) -> dict[str, Any]:
    """Measure. Raises RunError when a probe fails."""
    begun = now()
    steps, names = ("3", QUICK) if quick else ("20", FULL)
    arguments = ["--steps", steps, *named(names)]
    probes, missing = measure(arguments, other=None if quick else arguments)
    cases = [case for probe in probes for case in probe["cases"]]
    if not cases:
        raise RunError("no layout could be measured: " + "; ".join(probes[0]["skipped"]))
    least = min(case["control"] for case in cases)
    return frame(
        NAME,
        "real",
        value=least,
        unit="difference of the plain mean's gradient over the largest gradient, least of all steps",
        reference="the weighted merge of the same steps, worst of all",
        reference_value=max(case["uneven"] for case in cases),
        bar=f"> {_BAR:g}",
        holds=least > _BAR and not (missing and not quick),
        detail={
            "cases": [
                {"megatron": probe["megatron"], **{key: case[key] for key in ("case", "steps", "control", "uneven")}}
                for probe in probes
                for case in probe["cases"]
            ],
            "missing": missing,
            "samples": sum(case["steps"] for case in cases),
        },
        quick=quick,
        nonce=nonce,
        begun=begun,
        pids=[*(int(probe["pid"]) for probe in probes)],
    )
