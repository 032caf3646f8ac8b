"""What the agent said, in the report: a few trajectories of the end of the run, decoded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from markupsafe import Markup

from orchestrator.observe.report.page_templates import NOTHING, fill
from orchestrator.observe.report.run_log import RunLog

_TURNS = 12  # of one; `rl-coserve show` has all
_CHARACTERS = 2_000  # of a text


def trajectories(run: RunLog) -> Markup:
    """The best and the worst of the last step that was trained, the longest, and the last that failed."""
    if not (run.folder / "trajectories").is_dir():
        return NOTHING
    from orchestrator.observe.trajectory_reader import TrajectoryChoice, TrajectoryReader  # pyarrow

    reader = TrajectoryReader(run.folder)
    trained = TrajectoryChoice(step=run.steps[-1].number if run.steps else None, cause="trained")
    picked: dict[str, dict[str, Any]] = {}
    for words, chosen, order in (
        ("The best of the last step", trained, "best"),
        ("The worst of the last step", trained, "worst"),
        ("The longest of the last step", trained, "longest"),
        ("The last that failed", TrajectoryChoice(cause="failed"), "newest"),
    ):
        found, _ = reader.lines(chosen, order, 0, 1)
        if found and all(found[0]["trajectory_id"] != line["trajectory_id"] for line in picked.values()):
            picked[words] = found[0]
    if not picked:
        return NOTHING
    shown = {words: reader.read(line) for words, line in picked.items()}
    cut = {words: replace(one, turns=one.turns[:_TURNS]) for words, one in shown.items()}
    return fill("trajectories.html", run=run, shown=cut, most=_CHARACTERS, missing=reader.tokens.missing)
