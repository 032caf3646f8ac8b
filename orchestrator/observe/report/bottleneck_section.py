"""The section of the report that says whether environments or GPUs are the bottleneck; figures by :mod:`.analysis`."""

from __future__ import annotations

from orchestrator.observe.report.bottleneck_analysis import analyse
from orchestrator.observe.report.page_parts import card, section
from orchestrator.observe.report.page_text import plural, significant, tag
from orchestrator.observe.report.run_log import RunLog


def bottleneck(run: RunLog) -> str:
    """The section of the report."""
    found = analyse(run)
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
