"""What a run's views say of servers that it borrowed: report, summary, live page, metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from orchestrator.report.borrowed import borrowed
from orchestrator.report.runlog import RunLog, take_event
from orchestrator.report.summary import borrowed_of
from orchestrator.view.metrics import exposition
from orchestrator.view.state import RunState

ONE, TWO = "http://gpu0:8000", "http://gpu1:8000"
EVENTS: list[dict[str, Any]] = [
    {"kind": "borrowed", "t": 1.0, "worker": ONE, "reason": "the run starts", "use": 0.1},
    {"kind": "handed_back", "t": 3.0, "worker": ONE, "requests": 4, "tokens": 70},
    {"kind": "handed_back", "t": 4.0, "worker": ONE, "requests": 1, "tokens": 0},
    {"kind": "returned", "t": 5.0, "worker": ONE, "reason": "reclaimed", "use": 0.1, "requests": 2, "seconds": 4.0},
    {"kind": "borrowed", "t": 6.0, "worker": TWO, "reason": "used least", "use": 0.0},
    {"kind": "borrowed", "t": 9.0, "worker": ONE, "reason": "used least", "use": 0.0},
]


def the_log() -> RunLog:
    run = RunLog(folder=Path("run"), config={}, machine={}, versions={})
    for event in EVENTS:
        take_event(run, dict(event))
    run.seconds = 10.0
    return run


def test_the_report_says_how_long_each_server_was_the_runs_why_it_went_back_and_what_it_handed_back() -> None:
    found = borrowed_of(the_log())
    assert found == {
        ONE: {"borrowed": 2, "seconds": 5.0, "handed_back": 5, "tokens_kept": 70, "reasons": {"reclaimed": 1}},
        TWO: {"borrowed": 1, "seconds": 4.0, "handed_back": 0, "tokens_kept": 0, "reasons": {}},
    }
    page = borrowed(the_log())
    for words in (ONE, TWO, "reclaimed (1)", "5 requests", "Borrowed servers (real)"):
        assert words in page
    assert borrowed(RunLog(folder=Path("run"), config={}, machine={}, versions={})) == ""


def test_the_live_page_and_the_metrics_count_them_by_server_and_reason() -> None:
    state = RunState(Path("run"))
    state.take_live({"t": 9.0, "workers": [{"name": ONE, "state": "up", "version": 1, "requests": 0}]})
    for event in EVENTS:
        state.take(event)
    assert [row["handed_back"] for row in state.rows()] == [5]
    told = [(row["kind"], row["what"], row["detail"]) for row in state.shown()["incidents"]]
    assert told[-2:] == [("returned", ONE, "reclaimed"), ("borrowed", ONE, "the run starts")]
    lines = exposition(state).decode().splitlines()
    for line in (
        'rl_coserve:run_exchanges_total{kind="borrowed",reason="used least"} 2.0',
        'rl_coserve:run_exchanges_total{kind="returned",reason="reclaimed"} 1.0',
        f'rl_coserve:run_handed_back_requests_total{{worker="{ONE}"}} 5.0',
        f'rl_coserve:run_handed_back_tokens_total{{worker="{ONE}"}} 70.0',
    ):
        assert line in lines
    state.take({"kind": "returned", "t": 11.0})
    assert state.unreadable == 1, "an event without its server"
