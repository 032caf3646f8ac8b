"""One recorded run, every view of it: a figure that several show has one value in all of them."""

from __future__ import annotations

import asyncio
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from orchestrator.observe.progress import Progress
from orchestrator.observe.report.report_page import write_report
from orchestrator.observe.report.run_log import load_run
from orchestrator.observe.report.summary import summarize
from orchestrator.observe.run_figures import RATE_STEPS
from orchestrator.observe.view.run_metrics import PREFIX, exposition
from orchestrator.observe.view.runs_page import run_row
from orchestrator.observe.view.top import screen
from orchestrator.observe.view.view_server import Hub
from tests.support import report_runs as runs


@pytest.fixture(scope="module", params=["straight", "resumed"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that ended; or one that went back to a checkpoint and evaluated beyond it before."""
    run = runs.SyntheticRun(tmp_path_factory.mktemp("runs") / "frozenlake-001", steps=30)
    run.start()
    run.loop(0, 20)
    run.emit("fault", what="worker vllm-0", cause="worker_lost", detail="it is gone")
    run.emit("scaled", worker="vllm-1", what="added", engines=2, requests=0, seconds=31.25)
    run.emit("scaled", worker="vllm-2", what="added", engines=3, requests=0, seconds=30.0)
    run.emit("scaled", worker="vllm-2", what="removed", engines=2, requests=5, seconds=1.5)
    if request.param == "resumed":
        run.evaluate(20, "mid", 0.9)
        run.counts["trained"] -= 2 * run.batch
        run.counts["started"] -= 2 * run.batch
        run.start(resumed_from=18)
    run.loop(18 if request.param == "resumed" else 20, 30)
    run.finish()
    run.journal.clear()
    made: Path = run.write()
    (made / "ledger.jsonl").unlink()
    return made


def events_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def hub_of(folder: Path) -> Hub:
    hub = Hub(folder)
    asyncio.run(hub.look())
    return hub


def last_step_line(folder: Path) -> str:
    stream = io.StringIO()
    display = Progress(steps=30, minutes=None, name=folder.name, now=lambda: 0.0, stream=stream)
    for event in events_of(folder):
        display.take(event)
    return [line for line in stream.getvalue().splitlines() if line.startswith("step ")][-1]


def plain(markup: str) -> str:
    return " ".join(re.sub(r"<[^>]*>", " ", markup).replace("\u202f", " ").split())


def test_every_view_has_the_same_figures(folder: Path) -> None:
    run, hub = load_run(folder), hub_of(folder)
    page, row, summary = json.loads(hub.picture), run_row(folder.name, hub), summarize(folder)
    scraped: dict[str, float] = {}
    for family in text_string_to_metric_families(exposition(hub.state).decode()):
        scraped |= {sample.name.removeprefix(PREFIX): sample.value for sample in family.samples if not sample.labels}
    curves = {curve["name"]: curve["points"] for curve in page["curves"]}
    last, evaluation = run.steps[-1], run.evaluations[-1]
    lag_of_last = sum(lag * count for lag, count in last.lag.items()) / sum(last.lag.values())
    shown: dict[str, list[Any]] = {
        "name": [run.name, page["run"]["name"], summary["name"]],
        "mode": [run.mode, page["run"]["mode"], row["mode"], summary["mode"]],
        "alpha": [run.alpha, page["run"]["alpha"], summary["alpha"]],
        "kind": [run.kind, page["run"]["kind"], row["kind"], summary["kind"]],
        "status": [run.status, page["run"]["status"], row["state"], summary["status"]],
        "step": [last.number, run.done_steps, page["step"], row["step"], summary["steps"], scraped["step"]],
        "planned": [run.planned_steps, page["run"]["steps"], row["steps"], scraped["steps_planned"]],
        "version": [last.version, page["version"], scraped["version"]],
        "reward": [last.reward_mean, curves["reward"][-1][1], row["reward"], scraped["reward"]],
        "success": [
            evaluation.value,
            curves["success"][-1][1],
            row["success"],
            summary["success_end"],
            scraped["success"],
        ],
        "seconds": [run.seconds, page["t"], summary["seconds"], scraped["seconds"]],
        "tokens_per_s": [run.figures.tokens_per_s, page["tokens_per_s"], scraped["tokens_per_second"]],
        "lag": [lag_of_last, row["lag"]],
        "faults": [len([item for item in run.incidents if item.kind != "recovered"]), row["faults"]],
        "started": [run.ledger.started, page["ledger"]["started"], scraped["trajectories_started"]],
    }
    for name, values in shown.items():
        assert all(value == pytest.approx(values[0], abs=1e-3) for value in values), (name, values)
    ends = {end: number for end, number in page["ledger"].items() if end != "started"}
    assert ends == run.ledger.parts == {end: summary["ledger"][end] for end in ends}
    assert {int(lag): count for lag, count in page["lag"].items()} == dict(last.lag)


@pytest.mark.usefixtures("undrawn")
def test_the_lines_and_the_pages_say_these_figures(folder: Path) -> None:
    run, hub = load_run(folder), hub_of(folder)
    figures, last, evaluation = run.figures, run.steps[-1], run.evaluations[-1]
    console = Console(file=io.StringIO(), width=200)
    console.print(screen(json.loads(hub.picture)))
    top, line = console.file.getvalue(), last_step_line(folder)  # type: ignore[attr-defined]
    assert figures.tokens_per_s is not None
    rate = f"{figures.tokens_per_s:,.0f} tokens/s"
    assert rate in line
    assert rate in top
    lags = ", ".join(f"{lag}: {100 * n / sum(last.lag.values()):.0f} %" for lag, n in last.lag.items())
    assert f"lag {lags}" in line
    assert lags in top
    assert f"step {last.number}/30  reward {last.reward_mean:.3f}" in line
    assert f"{last.reward_mean:.3f}" in top
    assert f"{evaluation.value:.3f}" in top
    assert "ledger closes" in line
    report = plain(write_report(folder).read_text(encoding="utf-8"))
    assert f"{last.number} of 30" in report
    assert run.tokens_per_s_mean == summarize(folder)["tokens_per_s"]
    assert f"{run.tokens_per_s_mean:,.0f} tokens/s" in report
    assert "the sum closes" in report


@pytest.mark.usefixtures("undrawn")
def test_every_view_says_which_engines_came_and_left(folder: Path) -> None:
    run, hub = load_run(folder), hub_of(folder)
    page = json.loads(hub.picture)
    words = [item.words for item in reversed(run.scalings)]
    assert words[0] == "removed in 1.5 s, 5 requests moved; its group has 2"
    assert [row["detail"] for row in page["incidents"] if row["kind"] == "scaled"] == words
    console = Console(file=io.StringIO(), width=200)
    console.print(screen(page))
    assert all(said in console.file.getvalue() for said in words)  # type: ignore[attr-defined]
    families = {family.name: family for family in text_string_to_metric_families(exposition(hub.state).decode())}
    counted = {sample.labels["what"]: sample.value for sample in families[f"{PREFIX}scaled"].samples}
    assert counted == dict(run.figures.scaled_total) == {"added": 2, "removed": 1}
    report = plain(write_report(folder).read_text(encoding="utf-8"))
    assert "2 engines added and 1 taken away" in report
    assert "vllm-2 removed 2 5 1.50 s" in report


def test_the_rate_of_now_is_that_of_the_last_steps_and_no_startup_is_in_it(folder: Path) -> None:
    steps = load_run(folder).steps
    newest = steps[-RATE_STEPS:]
    found = load_run(folder).figures.tokens_per_s
    assert found == pytest.approx(sum(step.tokens for step in newest) / (newest[-1].t - steps[-RATE_STEPS - 1].t))
    hub = Hub(folder)
    for event in events_of(folder):
        hub.state.take(event)
        if (rate := hub.state.figures.tokens_per_s) is not None:
            tokens = [step.tokens / step.period for step in hub.state.figures.steps]
            assert min(tokens) <= rate <= max(tokens)
            assert max(step.period for step in hub.state.figures.steps) < 30  # a startup takes 41 s
