"""P99 TTFT and TPOT of a serving engine with rollouts on its core, over serving alone, and its late requests (ROSE 6.2).

Two real vLLM engines of different models and KV layouts in one pool of host memory, on one processor core at one
priority: ``scripts.bench.probes.vllm.coserve_probe`` says how. Five runs on each of two public traces,
``mooncake_conversation`` and the bursty ``azure_code``: some minutes of it, squeezed to what the core serves, prompts
divided by 8 and at most 640 tokens, answers at most 24. In each run serving alone and serving beside rollouts under
dual admission are played in turn, at least 300 requests of each. The value is the worse of the two ratios in the worst
run of both traces; late requests of a run with rollouts are no more than in the worst run of serving alone. The detail
has medians and worst, one run of the ladder of ROSE's table 2 and figure 9, and a curve: dual admission by how much of
its time serving is busy. ``--quick``: one short run of one trace, nothing claimed.

A pool holds at least twice what serving alone has in use at its peak (``TRACES``): else rollouts have no page.

It needs a quiet machine with two cores. ``python -m scripts.bench.micro.coserve_slo FILE`` prints the tables of
docs/coserving.md from a result.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from orchestrator.sim.coserving.serving_cluster import read_trace
from scripts.bench.probes.probe_run import run_probe
from scripts.bench.result import frame, now

NAME = "coserve-slo"
RUNS, LEAST = 5, 300  # requests of a mode, in each run
LOADS = (0.15, 0.3, 0.45, 0.6)  # shares of its time for which serving is busy
_BAR = 1.5


class Excerpt(NamedTuple):
    """``begins``: seconds of the trace that are left out; ``pool_mib``: memory for its requests and for rollouts."""

    begins: float
    pool_mib: int


TRACES = {"mooncake_conversation": Excerpt(0.0, 96), "azure_code": Excerpt(540.0, 24)}  # by their public names
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
    pids: list[int] = []

    def probe(trace: str, *how: str) -> dict[str, Any]:
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(excerpt(trace), file)
            file.flush()
            pool = ["--pool-mib", str(TRACES[trace].pool_mib)]
            found = run_probe("coserve", ["--trace", file.name, *pool, *how], limit=1800)
        pids.append(int(found.pop("pid")))
        return found

    if quick:
        short = ["--seconds", "3", "--rounds", "1", "--modes", "static,none,dual"]
        traces = {"azure_code": [probe("azure_code", *short)]}
        ladder = {trace: runs[0] for trace, runs in traces.items()}
        curve = {}
    else:
        judged = ("--seconds", "24", "--requests", str(LEAST), "--modes", "dual")
        traces = {trace: [probe(trace, *judged) for _ in range(RUNS)] for trace in TRACES}
        ladder = {trace: probe(trace, "--seconds", "12") for trace in TRACES}
        loads = ("--seconds", "12", "--rounds", "1", "--modes", "dual", "--busy")
        curve = {trace: {load: probe(trace, *loads, str(load)) for load in LOADS} for trace in TRACES}
    return result(traces, ladder, curve, quick=quick, nonce=nonce, begun=begun, pids=pids)


def excerpt(trace: str) -> list[list[float]]:
    """Rows of [milliseconds, prompt tokens, answer tokens] of one of ``TRACES``."""
    return [[1000 * at, *tokens] for at, *tokens in read_trace(trace) if at >= TRACES[trace].begins][:2000]


def result(
    traces: dict[str, list[dict[str, Any]]],
    ladder: dict[str, dict[str, Any]],
    curve: dict[str, dict[float, dict[str, Any]]],
    *,
    quick: bool,
    nonce: str,
    begun: str = "",
    pids: Sequence[int] = (),
) -> dict[str, Any]:
    """Of the probe's answers, by trace: five runs, and one of all modes; ``curve``: by trace and load."""
    judged = {trace: _judge(runs) for trace, runs in traces.items()}
    duals = [found["dual"] for found in judged.values()]
    value = max(max(dual["ttft_p99_over_alone"]["worst"], dual["tpot_p99_over_alone"]["worst"]) for dual in duals)
    kept = all(
        found["dual"]["late"]["worst"] <= found["alone"]["late"]["worst"] and found["dual"]["fewest"] >= LEAST
        for found in judged.values()
    )
    made = all(dual["rollout_tokens_per_s"]["worst"] > 0 for dual in duals)
    loads = {
        trace: {
            str(load): _over_alone(found["modes"])["dual"] | {"slo": found["slo"]} for load, found in by_load.items()
        }
        for trace, by_load in curve.items()
    }
    return frame(
        NAME,
        "real",
        value=value,
        unit="P99 with rollouts under dual admission, over serving alone (the worse of TTFT and TPOT, the worst run)",
        reference="the SLO",
        reference_value=_BAR,
        bar=f"<= {_BAR} in the worst run; late requests no more than in the worst run of serving alone; rollouts make tokens",
        holds=None if quick else value <= _BAR and kept and made,
        detail={
            "ladder": {trace: _over_alone(found["modes"]) for trace, found in ladder.items()},
            "traces": judged,
            "runs": {trace: [_over_alone(found["modes"]) for found in runs] for trace, runs in traces.items()},
            "by_load": loads,
            "samples": sum(found["dual"]["requests"] for found in judged.values()),
        },
        quick=quick,
        nonce=nonce,
        begun=begun,
        pids=pids,
    )


def _over_alone(modes: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """With the ratios of each mode's P99 to serving alone's."""
    return {
        mode: {
            **row,
            **{
                f"{name}_p99_over_alone": row[f"{name}_p99"] / modes["alone"][f"{name}_p99"]
                for name in ("ttft", "tpot")
            },
        }
        for mode, row in modes.items()
    }


def _judge(runs: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Of one trace, by mode: requests of all runs, median and worst of each figure."""
    rows = [_over_alone(found["modes"]) for found in runs]
    judged: dict[str, dict[str, Any]] = {}
    for mode in rows[0]:
        counts = [row[mode]["requests"] for row in rows]
        found: dict[str, Any] = {"requests": sum(counts), "fewest": min(counts)}
        for name in (
            "ttft_p99_over_alone",
            "tpot_p99_over_alone",
            "late",
            "ttft_p99",
            "tpot_p99",
            "rollout_tokens_per_s",
        ):
            if name in rows[0][mode]:
                values = [row[mode][name] for row in rows]
                worst = min(values) if name == "rollout_tokens_per_s" else max(values)
                found[name] = {"median": statistics.median(values), "worst": worst}
        judged[mode] = found
    return judged


def table(found: dict[str, Any]) -> str:
    """The ladder of a result, in Markdown: the modes that it has."""
    lines = ["| trace | mode | P99 TTFT over alone | P99 TPOT over alone | late | rollout tokens/s |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    for trace, modes in found["detail"]["ladder"].items():
        for mode, name in LADDER.items():
            if (row := modes.get(mode)) is not None:
                tails = f"{row['ttft_p99_over_alone']:.2f} | {row['tpot_p99_over_alone']:.2f}"
                late = f"{row['late']} of {row['requests']}"
                lines.append(f"| `{trace}` | {name} | {tails} | {late} | {row['rollout_tokens_per_s']:,.0f} |")
    return "\n".join(lines)


def slack_left(row: dict[str, Any], name: str) -> float:
    """Of the SLO of "ttft" or "tpot", at P99; below 0: not kept. Serving alone has a third, by how the SLO is set."""
    return 1.0 - float(row[f"{name}_p99"]) / float(row["slo"][name])


def load_table(found: dict[str, Any]) -> str:
    """What dual admission leaves serving, by how busy that is alone, in Markdown."""
    lines = ["| trace | serving busy, alone | slack left at P99: TTFT | TPOT | late | rollout tokens/s |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    for trace, by_load in found["detail"]["by_load"].items():
        for load, row in by_load.items():
            left = " | ".join(f"{100 * slack_left(row, name):.0f} %" for name in ("ttft", "tpot"))
            late = f"{row['late']} of {row['requests']}"
            lines.append(
                f"| `{trace}` | {100 * float(load):.0f} % | {left} | {late} | {row['rollout_tokens_per_s']:,.0f} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    read = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    print(f"{table(read)}\n\n{load_table(read)}")
