"""P99 TTFT and TPOT of a serving engine with rollouts on its core, over serving alone; rollout tokens by admission (ROSE 6.2).

Two real vLLM engines of different models and KV layouts in one pool of host memory, on one processor core at one
priority: ``scripts.bench.probes.vllm.coserve_probe`` says how. Arrivals and lengths are an excerpt of Azure's code trace
(``azure_code.json`` has its source and licence), squeezed and shortened to what the core serves. The value is the worse
of the two ratios under dual admission; the detail has serving alone and each mode, with requests beyond 1.5 x the P99
of serving alone, and those late because of rollouts. Modes are the ladder of ROSE's table 2 and figure 9: static
partition of the KV memory, memory preemption, prefix cache, then admission by each SLO and by both. ``--quick``: one round of
serving alone, static partition, no admission and dual admission.

``python -m scripts.bench.micro.coserve_slo FILE`` prints the table of docs/coserving.md from a result.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from scripts.bench.probes.probe_run import run_probe
from scripts.bench.result import frame, now

NAME = "coserve-slo"
TRACE = Path(__file__).with_name("azure_code.json")
LADDER = {  # ROSE, table 2 and figure 9
    "static": "static partition of the KV memory, no admission",
    "preempt": "+ memory preemption",
    "none": "+ prefix cache",
    "ttft": "+ admission by TTFT only",
    "tpot": "+ admission by TPOT only",
    "dual": "+ dual admission",
}


def run(quick: bool, nonce: str) -> dict[str, Any]:
    """Measure. Raises RunError when the probe fails."""
    begun = now()
    source = json.loads(TRACE.read_text(encoding="utf-8"))
    how = (
        ["--seconds", "3", "--rounds", "1", "--modes", "static,none,dual"]
        if quick
        else ["--seconds", "6", "--rounds", "2"]
    )
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(source["rows"], file)
        file.flush()
        found = run_probe("coserve", ["--trace", file.name, *how])
    modes = found["modes"]
    for row in modes.values():
        for name in ("ttft", "tpot"):
            row[f"{name}_p99_over_alone"] = row[f"{name}_p99"] / modes["alone"][f"{name}_p99"]
    dual = modes["dual"]
    value = max(dual["ttft_p99_over_alone"], dual["tpot_p99_over_alone"])
    return frame(
        NAME,
        "real",
        value=value,
        unit="P99 with rollouts under dual admission, over serving alone (the worse of TTFT and TPOT)",
        reference="the SLO",
        reference_value=1.5,
        bar="<= 1.5, and rollouts make tokens",
        holds=value <= 1.5 and dual["rollout_tokens_per_s"] > 0,
        detail={
            **{key: item for key, item in found.items() if key != "pid"},
            "trace": {key: source[key] for key in ("source", "licence", "cite")},
        },
        quick=quick,
        nonce=nonce,
        begun=begun,
        pids=[int(found["pid"])],
    )


def table(found: dict[str, Any]) -> str:
    """Of a result, in Markdown: the modes that it has."""
    lines = ["| mode | P99 TTFT over alone | P99 TPOT over alone | late | rollout tokens/s, over the idle share |"]
    lines.append("| --- | --- | --- | --- | --- |")
    for mode, name in LADDER.items():
        if (row := found["detail"]["modes"].get(mode)) is not None:
            tails = f"{row['ttft_p99_over_alone']:.2f} | {row['tpot_p99_over_alone']:.2f}"
            share = "not known" if row["over_idle_share"] is None else f"{row['over_idle_share']:.2f}"
            late = f"{row['late']} of {row['requests']}"
            lines.append(f"| {name} | {tails} | {late} | {row['rollout_tokens_per_s']:,.0f}, {share} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
