"""The report: one self-contained HTML file for a run, or for the comparison of several.

Guarantees: the file needs nothing else (no script, no font, no request); it is replaced as a whole or not at all; the same
folder gives the same bytes; every figure says whether it is real or simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from orchestrator.durable_files import replace_text
from orchestrator.observe.report import feature_sections, run_sections, trajectory_section
from orchestrator.observe.report.compare import comparison
from orchestrator.observe.report.page_templates import fill
from orchestrator.observe.report.run_log import RunLog, load_run


def write_report(run: str | Path | RunLog | Sequence[str | Path]) -> Path:
    """Write ``report.html`` into the folder of a run, which may have been read already; for several runs ``compare-A-B.html``
    beside the first one's. Returns the file. Raises ConfigError for a folder that is no run."""
    if isinstance(run, RunLog):
        logs = [run]
    else:
        logs = [load_run(folder) for folder in ([run] if isinstance(run, str | Path) else run)]
    if len(logs) == 1:
        page, text = logs[0].folder / "report.html", render_report(logs[0])
    else:
        names = [log.folder.name for log in logs]
        label = "-".join(names) if len(names) <= 3 else f"{names[0]}-and-{len(names) - 1}-others"
        page, text = logs[0].folder.parent / f"compare-{label}.html", str(comparison(logs))
    replace_text(page, text)
    return page


def render_report(run: RunLog) -> str:
    """The report of one run as HTML."""
    sections = (
        ("learning", "Learning", run_sections.learning(run)),
        ("waiting", "Waiting", run_sections.waiting(run)),
        ("bottleneck", "Bottleneck", feature_sections.bottleneck(run)),
        ("staleness", "Staleness", run_sections.staleness(run)),
        ("speed", "Speed", run_sections.speed(run)),
        ("health", "Trainer", run_sections.trainer_health(run)),
        ("parallelism", "Parallelism", feature_sections.parallelism(run)),
        ("scaling", "Scaling", feature_sections.scaling(run)),
        ("environments", "Environments", feature_sections.environments(run)),
        ("rounds", "Rounds", feature_sections.rounds(run)),
        ("borrowed", "Borrowed", feature_sections.borrowed(run)),
        ("trajectories", "Trajectories", trajectory_section.trajectories(run)),
        ("ledger", "Ledger", run_sections.ledger(run, _stored(run))),
        ("incidents", "Incidents", run_sections.incidents(run)),
        ("environment", "Machine", run_sections.environment(run)),
    )
    shown = [section for section in sections if section[2]]
    units = (("cpu", ""), ("cores", " cores"), ("memory_gib", " GiB"))
    machine = [f"{run.machine[name]}{unit}" for name, unit in units if run.machine.get(name)]
    return fill("report.html", run=run, machine=machine, sections=shown, overview=run_sections.overview(run))


def _stored(run: RunLog) -> dict[str, int] | None:
    folder = run.folder / "trajectories"
    if not folder.is_dir():
        return None
    from orchestrator.store import count_by_outcome  # pyarrow: not needed for a run without a store

    return count_by_outcome(folder)
