"""The part of a run's page about short and long rounds (tail batching)."""

from __future__ import annotations

from orchestrator.observe.report.page_parts import section, table
from orchestrator.observe.report.page_text import count, duration, percent, plural, tag
from orchestrator.observe.report.run_log import RunLog
from orchestrator.observe.report.summary import rounds_of


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
