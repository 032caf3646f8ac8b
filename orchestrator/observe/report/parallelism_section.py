"""The part of a run's page about how its engines were cut: what the parallelism planner, or the resource manager, saw, decided
and paid."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from orchestrator.observe.report.page_parts import section, table
from orchestrator.observe.report.page_text import count, duration, plural, tag
from orchestrator.observe.report.run_log import RunLog
from orchestrator.policies.parallelism.engine_profile import Layout


def parallelism(run: RunLog) -> str:
    """Each step that changed the layout, or on which the rule asked for that. "" where nobody cuts them."""
    if run.degrees:
        return _degrees(run)
    if not run.plans:
        return ""
    costs = {int(done["step"]): done for done in run.reshapes}
    made = [done for done in run.reshapes if not done["error"]]
    spent = sum(float(done["seconds"]) for done in run.reshapes)
    experts = any(int(plan.get("ep", 1)) > 1 or plan.get("imbalance", 1.0) > 1.0 for plan in run.plans)
    what = "tensor and expert parallelism" if experts else "tensor parallelism"
    lead = f"{tag('strong', plural(len(made), 'change'))} of {what}, which cost {tag('strong', duration(spent))} "
    lead += f"of generation; {count(sum(int(plan['preemptions']) for plan in run.plans))} preemptions in all."
    correction = float(run.plans[-1].get("correction", 1.0))  # not in logs of before
    if correction != 1.0:
        lead += f" Steps took {correction:.3g} times what the profile says: it was scaled, and is to be measured again."
    rows = []
    for plan in run.plans:
        step, done = int(plan["step"]), costs.get(int(plan["step"]))
        if plan["reason"] or done is not None:
            paid = "" if done is None else escape(done["error"]) or duration(float(done["seconds"]))
            after = plan if done is None or done["error"] else done
            cut = f"{_layout(plan, experts)} → {_layout(after, experts)}"
            rows.append([count(step + 1), cut, *_seen(plan, experts), escape(plan["reason"]), paid])
    last = run.plans[-1]
    rows = rows or [[count(int(last["step"]) + 1), _layout(last, experts), *_seen(last, experts), "nothing to do", ""]]
    seen = ("Preemptions", "Imbalance of experts") if experts else ("Preemptions",)
    head = ("After step", "Layout" if experts else "TP", *seen, "Why", "Stood still for")
    numbers = (0, 2, 3) if experts else (0, 2)
    title = "Tensor and expert parallelism" if experts else "Tensor parallelism"
    return section("parallelism", title, lead, table(head, rows, numbers, f"What the planner decided ({run.kind})"))


def _layout(event: Mapping[str, Any], experts: bool) -> str:
    """Of a plan or a change; logs of before have no experts."""
    tp, ep = int(event["tp"]), int(event.get("ep", 1))
    return str(Layout(tp, ep)) if experts else str(tp)


def _seen(plan: Mapping[str, Any], experts: bool) -> list[str]:
    found = [count(int(plan["preemptions"]))]
    return [*found, f"{plan.get('imbalance', 1.0):.3g}"] if experts else found


def _degrees(run: RunLog) -> str:
    """Each step on which other degrees were better, and the last one."""
    paid = {int(done["step"]): done for done in run.reshapes}
    made = [done for done in run.reshapes if not done["error"]]
    spent = sum(float(done["seconds"]) for done in run.reshapes)
    lead = f"{tag('strong', plural(len(made), 'change'))} of the engines' degrees, which cost {tag('strong', duration(spent))}"
    lead += " of generation in the engines that changed."
    told = [item for item in run.degrees if item["reason"] or int(item["step"]) in paid] or run.degrees[-1:]
    rows = []
    for item in told:
        done = paid.get(int(item["step"]))
        stood = "" if done is None else escape(done["error"]) or duration(float(done["seconds"]))
        cut = f"{_written(item['degrees'])} → {_written(item['next'])}"
        gain = duration(float(item["gain"])) if item["gain"] > 0 else ""
        rows.append([count(int(item["step"]) + 1), cut, gain, escape(item["reason"]) or "nothing to do", stood])
    head = ("After step", "Devices of the engines", "Gain a step", "Why", "Stood still for")
    body = table(head, rows, (0, 2), f"What the resource manager decided ({run.kind})")
    return section("parallelism", "Degrees of parallelism", lead, body)


def _written(degrees: list[int]) -> str:
    return "+".join(map(str, degrees))
