"""The parts of a run's page that only some runs have: environments or GPUs, how engines were cut, pooled environments, rounds,
borrowed servers. Each function takes the run and gives one section's markup, "" where there is nothing of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from orchestrator.observe.event_records import PoolSnapshot
from orchestrator.observe.report import charts
from orchestrator.observe.report.bottleneck_analysis import analyse_bottleneck
from orchestrator.observe.report.page_parts import card, figure, section, table
from orchestrator.observe.report.page_text import count, duration, percent, plural, significant, tag
from orchestrator.observe.report.run_log import RunLog
from orchestrator.observe.report.summary import borrowed_of, rounds_of, serving_of
from orchestrator.policies.parallelism.engine_profile import EngineLayout


def bottleneck(run: RunLog) -> str:
    """The section of the report."""
    found = analyse_bottleneck(run)
    if found is None:
        return ""
    busy = found.engine_busy if found.gpu_busy is None else found.gpu_busy
    cards = [
        card("Busy GPUs", run.kind, f"{100 * busy:.0f} %", f"{found.verdict}; {found.measured_by}"),
        card(
            "A turn", run.kind, f"{significant(found.generate_seconds)} s",
            f"of generation, then {significant(found.environment_seconds)} s of environment (means of "
            f"{plural(found.turns, 'turn')})",
        ),
        card(
            "Environments to try", run.kind, str(found.environments_suggested),
            f"{found.environments} now, {significant(found.in_flight)} in flight on average; {found.environments_busy} keep "
            f"each engine busy, {found.environments_full} fill it",
        ),
    ]  # fmt: skip
    if found.generation_to_training is not None:
        cards.append(
            card(
                "Training to generation", run.kind, f"1 : {significant(found.generation_to_training)}",
                f"busy seconds of the trainer and of the rollout engines; the trainer is busy {100 * found.trainer_busy:.0f} % "
                "of the time",
            )
        )  # fmt: skip
    lead = (
        "Below 50 % the environments are the bottleneck, and faster GPUs buy nothing; above 80 % the GPUs are. Of the time "
        "with trajectories in flight."
    )
    return section("bottleneck", "Environments or GPUs?", lead, tag("div", "".join(cards), class_="cards"))


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
    return str(EngineLayout(tp, ep)) if experts else str(tp)


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


_CAUSES = {
    "misbehaved": "misbehaved, hung or was cut off",
    "ping": "failed a health check",
    "recycle": "could not be renewed",
    "age": "too old",
    "episodes": "played its last episode",
    "idle": "not needed",
}


def environments(run: RunLog) -> str:
    """How large the pool was, what was replaced and why, and who waited. "" where none of it was recorded."""
    parts = [_pool(run), _tools(run), _rewards(run)]
    if not any(parts):
        return ""
    return section("environments", "Did the environments hold?", _lead(run.pool[-1]) if run.pool else "", *parts)


def _lead(last: PoolSnapshot) -> str:
    waited = duration(last.wait_seconds / last.episodes) if last.episodes else "0 s"
    replaced = sum(number for cause, number in last.replaced.items() if cause not in ("idle", "age", "episodes"))
    share = percent(replaced / last.episodes if last.episodes else 0.0)
    lead = f"{tag('strong', count(last.episodes))} episodes on {plural(last.started, 'environment')} ({escape(last.backend)}); "
    lead += f"{tag('strong', share)} ended with one that had to be replaced; "
    return lead + f"an episode waited {tag('strong', waited)} for its environment on average."


def _pool(run: RunLog) -> str:
    if not run.pool:
        return ""
    last = run.pool[-1]
    busiest, most = max(item.busy for item in run.pool), max(item.waiting for item in run.pool)
    rows = [
        ["Pool size", count(last.size)],
        ["In use at the end of a step, at most", count(busiest)],
        ["Waited for one at the end of a step, at most", count(most)],
        ["Starts that failed", count(last.start_failures)],
        ["Could not be ended, abandoned", count(last.abandoned)],
        *([f"Replaced: {escape(_CAUSES.get(cause, cause))}", count(number)] for cause, number in last.replaced.items()),
        ["Versions", escape(", ".join(last.versions))],
    ]
    reasons = sorted({item.waiting_for for item in run.pool if item.waiting_for})
    if reasons:
        rows.append(["Waited for", escape("; ".join(reasons))])
    return table(("Environments", ""), rows, (1,), f"The pool of environments ({run.kind})")


def _tools(run: RunLog) -> str:
    if not run.tools:
        return ""
    rows = [[escape(name), *_calls(calls)] for name, calls in run.tools.items()]
    return table(
        ("Tool", *_CALLS), rows, tuple(range(1, len(_CALLS) + 1)), f"Tools, as called from all processes ({run.kind})"
    )


def _rewards(run: RunLog) -> str:
    if not run.rewards:
        return ""
    rows = [["Rewards", *_calls(run.rewards)]]
    calls = table(("Scoring", *_CALLS), rows, tuple(range(1, len(_CALLS) + 1)), f"Calls that score ({run.kind})")
    return calls + _timeouts(run, run.rewards.get("timeouts") or {})


def _timeouts(run: RunLog, counted: dict[str, Any]) -> str:
    if not counted:
        return ""
    rows = [
        ["Ran", count(int(counted.get("cases", 0)))],
        ["Under a limit of their own, below the fixed one", count(int(counted.get("adaptive", 0)))],
        ["Cut off at it", count(int(counted.get("cut_early", 0)))],
        ["Cut off at the fixed limit", count(int(counted.get("cut_at_most", 0)))],
        ["All took", duration(float(counted.get("seconds", 0.0)))],
        ["Saved, at most", duration(float(counted.get("saved", 0.0)))],
    ]
    return table(("Test cases under adaptive timeouts", ""), rows, (1,), f"RollPacker 4.3 ({run.kind})")


_CALLS = ("Calls", "Failed", "Retries", "Refused: burst", "Cold starts", "Waited for them", "All calls took")


def _calls(counted: dict[str, Any]) -> list[str]:
    numbers = [
        count(int(counted.get(name, 0))) for name in ("calls", "failed", "retries", "refused_burst", "cold_starts")
    ]
    return [*numbers, *(duration(float(counted.get(name, 0.0))) for name in ("cold_seconds", "seconds"))]


def rounds(run: RunLog) -> str:
    """How long rounds of each kind took, and what they put off and threw away. "" without rounds."""
    found = rounds_of(run)
    if found is None:
        return ""
    trained = sum(step.tokens for step in run.steps)
    share = percent(found["thrown_away"] / (trained + found["thrown_away"]) if trained else 0.0)
    lead = f"{tag('strong', plural(found['deferred'], 'prompt'))} put off to long rounds, {count(found['queue'])} of them still "
    lead += f"in the queue; {tag('strong', share)} of the tokens were thrown away."
    kinds = [
        [
            kind.capitalize(),
            count(part["rounds"]),
            duration(part["seconds"] / part["rounds"]),
            count(part["launched"]),
            count(part["deferred"]),
            count(part["thrown_away"]),
        ]
        for kind, part in found["kinds"].items()
    ]
    head = ("Rounds", "How many", "Seconds each", "Prompts launched", "Put off", "Tokens thrown away")
    rows = [
        ["Discarded by dynamic sampling (equal rewards)", count(found["discarded"])],
        ["Finished, but not among the first: played again", count(found["put_back"])],
        *([["Predicted to be long: queued unplayed", count(found["diverted"])]] if found["diverted"] else []),
        ["Launched again because their group failed", count(found["lost"])],
        ["Given up (rollout.rounds.tries)", count(found["given_up"])],
        *([f"Seconds a prompt with eta {eta}", f"{cost:.3f}"] for eta, cost in found["search"].items()),
    ]
    return section(
        "rounds",
        "What did the long tail cost?",
        lead,
        table(head, kinds, (1, 2, 3, 4, 5), f"Short and long rounds ({run.kind})"),
        table(("Prompts", ""), rows, (1,), f"What else became of prompts ({run.kind})"),
    )


def borrowed(run: RunLog) -> str:
    """Which servers the run had when and why, what they handed back, and how near their serving engines were to their SLOs, with
    what rollouts had to do with it. "" without any."""
    found, beside = borrowed_of(run), serving_of(run)
    if found is None and beside is None:
        return ""
    lead = ""
    if found is not None:
        requests = sum(row["handed_back"] for row in found.values())
        kept = sum(row["tokens_kept"] for row in found.values())
        lead = f"{tag('strong', plural(len(found), 'server'))} of serving GPUs; "
        lead += f"{tag('strong', plural(requests, 'request'))} handed back by them, {count(kept)} tokens kept. "
    if beside is not None:
        tokens, late, blamed = (sum(row[name] for row in beside.values()) for name in ("tokens", "late", "blamed"))
        lead += f"Serving made {plural(tokens, 'token')} meanwhile: {tag('strong', f'{count(late)} late')}, "
        lead += f"{count(late - blamed)} of these without rollouts too, {count(blamed)} because of them."
    return section(
        "borrowed",
        "What was borrowed?",
        lead,
        figure("Servers over time", run.kind, lambda size: charts.servers(run, size)),
        figure(
            "How near serving was to its SLOs",
            run.kind,
            lambda size: charts.slack(run, size),
            legend=[(words, colour, False) for _, colour, words in charts.SLACKS],
            note="The least of all servers, of each part of the run; below 0 serving was late, with rollouts or without.",
        ),
        _taken(found or {}, run),
        _beside(beside or {}, run),
    )


def _taken(found: dict[str, Any], run: RunLog) -> str:
    taken: dict[str, dict[str, int]] = {}
    for name, _, _, why, _ in charts.held(run):
        taken.setdefault(name, {})[why] = taken.get(name, {}).get(why, 0) + 1
    rows = [
        [
            escape(name),
            count(row["borrowed"]),
            duration(row["seconds"]),
            _reasons(taken.get(name, {})),
            _reasons(row["reasons"]),
            count(row["handed_back"]),
            count(row["tokens_kept"]),
        ]
        for name, row in found.items()
    ]
    head = ("Server", "Borrowed", "For", "Taken because", "Given back because", "Requests handed back", "Tokens kept")
    return table(head, rows, (1, 2, 5, 6), f"Borrowed servers ({run.kind})")


def _beside(found: dict[str, Any], run: RunLog) -> str:
    rows = [
        [
            escape(name),
            duration(row["seconds"]),
            *(("-", "-") if row["serving_most"] is None else (percent(row["serving"]), percent(row["serving_most"]))),
            *("-" if row[slack] is None else f"{significant(row[slack])} s" for slack, _, _ in charts.SLACKS),
            count(row["tokens"]),
            count(row["late_without"]),
            count(row["blamed"]),
        ]
        for name, row in found.items()
    ]
    head = (
        "Server",
        "Seen for",
        "Memory",
        "most",
        "Slack: TTFT",
        "TPOT",
        "arriving",
        "Tokens",
        "Late anyway",
        "by rollouts",
    )
    return table(head, rows, (1, 2, 3, 4, 5, 6, 7, 8, 9), f"Serving beside the run ({run.kind})")


def _reasons(found: dict[str, int]) -> str:
    return escape(", ".join(f"{why} ({times})" for why, times in sorted(found.items())) or "-")
