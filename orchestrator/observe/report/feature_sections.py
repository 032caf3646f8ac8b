"""The parts of a run's page that only some runs have: environments or GPUs, how engines were cut, which were added and taken
away, pooled environments, rounds, borrowed servers. Each function computes what one section shows and fills its template; nothing
comes out where there is nothing of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from orchestrator.observe.report import charts
from orchestrator.observe.report.bottleneck_analysis import analyse_bottleneck
from orchestrator.observe.report.page_templates import NOTHING, fill
from orchestrator.observe.report.page_text import count, duration
from orchestrator.observe.report.plots import chart
from orchestrator.observe.report.run_log import RunLog
from orchestrator.observe.report.summary import borrowed_of, rounds_of, serving_of
from orchestrator.policies.parallelism.engine_profile import EngineLayout

_SCALINGS = 100  # rows of a table


def bottleneck(run: RunLog) -> Markup:
    """Whether environments or GPUs held the run up."""
    found = analyse_bottleneck(run)
    return NOTHING if found is None else fill("bottleneck.html", run=run, found=found)


def parallelism(run: RunLog) -> Markup:
    """Each step that changed the layout or the degrees, or on which the rule asked for that; of others the last one."""
    if not (run.degrees or run.plans):
        return NOTHING
    paid = {int(done["step"]): done for done in run.reshapes}
    common: dict[str, Any] = {
        "run": run,
        "changes": sum(not done["error"] for done in run.reshapes),
        "seconds": sum(float(done["seconds"]) for done in run.reshapes),
    }

    def told(plans: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [plan for plan in plans if plan["reason"] or int(plan["step"]) in paid] or plans[-1:]

    def stood(step: int) -> str:
        done = paid.get(step)
        return "" if done is None else done["error"] or duration(float(done["seconds"]))

    rows: list[tuple[str, ...]] = []
    if run.degrees:
        for item in told(run.degrees):
            step, gain = int(item["step"]), float(item["gain"])
            cut = " → ".join("+".join(map(str, item[name])) for name in ("degrees", "next"))
            why = item["reason"] or "nothing to do"
            rows.append((count(step + 1), cut, duration(gain) if gain > 0 else "", why, stood(step)))
        return fill("degrees.html", rows=rows, **common)
    experts = any(int(plan.get("ep", 1)) > 1 or plan.get("imbalance", 1.0) > 1.0 for plan in run.plans)
    for plan in told(run.plans):
        step = int(plan["step"])
        done = paid.get(step)
        cut, why = _layout(plan, experts), plan["reason"]
        if why or done is not None:
            cut += f" → {_layout(plan if done is None or done['error'] else done, experts)}"
        else:
            why = "nothing to do"
        seen = [count(int(plan["preemptions"])), *([f"{plan.get('imbalance', 1.0):.3g}"] if experts else [])]
        rows.append((count(step + 1), cut, *seen, why, stood(step)))
    return fill(
        "parallelism.html",
        rows=rows,
        experts=experts,
        preemptions=sum(int(plan["preemptions"]) for plan in run.plans),
        correction=float(run.plans[-1].get("correction", 1.0)),  # not in logs of before
        **common,
    )


def _layout(event: Mapping[str, Any], experts: bool) -> str:
    """Of a plan or a change; logs of before have no experts."""
    tp, ep = int(event["tp"]), int(event.get("ep", 1))
    return str(EngineLayout(tp, ep)) if experts else str(tp)


def scaling(run: RunLog) -> Markup:
    """The engines that came and left while the run went on, the newest ``_SCALINGS``."""
    if not run.scalings:
        return NOTHING
    rows = [
        (duration(item.t), item.worker, item.what, count(item.engines), count(item.requests), duration(item.seconds))
        for item in run.scalings[-_SCALINGS:]
    ]
    return fill("scaling.html", run=run, rows=rows)


def environments(run: RunLog) -> Markup:
    """How large the pool was, what was replaced and why, and who waited."""
    if not (run.pool or run.tools or run.rewards):
        return NOTHING
    replaced = waited = 0.0
    if run.pool and (episodes := run.pool[-1].episodes):
        last = run.pool[-1]
        broken = (number for cause, number in last.replaced.items() if cause not in ("idle", "age", "episodes"))
        replaced, waited = sum(broken) / episodes, last.wait_seconds / episodes
    reasons = sorted({item.waiting_for for item in run.pool if item.waiting_for})
    return fill("environments.html", run=run, reasons=reasons, replaced=replaced, waited=waited)


def rounds(run: RunLog) -> Markup:
    """How long rounds of each kind took, and what they put off and threw away."""
    if (found := rounds_of(run)) is None:
        return NOTHING
    trained = sum(step.tokens for step in run.steps)
    share = found["thrown_away"] / (trained + found["thrown_away"]) if trained else 0.0
    return fill("rounds.html", run=run, found=found, thrown_away=share)


def borrowed(run: RunLog) -> Markup:
    """Which servers the run had when and why, what they handed back, and how near their serving engines were to their SLOs, with
    what rollouts had to do with it."""
    taken, beside = borrowed_of(run), serving_of(run)
    if taken is None and beside is None:
        return NOTHING
    why: dict[str, Counter[str]] = {}
    for held in run.held():
        why.setdefault(held.server, Counter())[held.taken] += 1
    return fill(
        "borrowed.html",
        run=run,
        taken=taken,
        why_taken=why,
        beside=beside,
        servers=chart(lambda size: charts.servers(run, size)),
        slack=chart(
            lambda size: charts.slack(run, size), legend=[(words, colour, False) for _, colour, words in charts.SLACKS]
        ),
    )
