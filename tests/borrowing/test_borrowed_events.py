"""What a run's views say of servers that it borrowed: report, summary, live page, metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from orchestrator.api import SharedDevice
from orchestrator.events import EventLog, MemorySink
from orchestrator.observe.report.feature_sections import borrowed
from orchestrator.observe.report.page_text import duration
from orchestrator.observe.report.run_log import RunLog
from orchestrator.observe.report.summary import borrowed_of, serving_of
from orchestrator.observe.view.run_metrics import exposition
from orchestrator.observe.view.run_state import RunState
from orchestrator.observe.view.serving_neighbours import Neighbours

ONE, TWO = "http://gpu0:8000", "http://gpu1:8000"
EVENTS: list[dict[str, Any]] = [
    {"kind": "borrowed", "t": 1.0, "worker": ONE, "reason": "the run starts", "use": 0.1},
    {"kind": "handed_back", "t": 3.0, "worker": ONE, "requests": 4, "tokens": 70},
    {"kind": "handed_back", "t": 4.0, "worker": ONE, "requests": 1, "tokens": 0},
    {"kind": "contexts_resent", "t": 4.5, "worker": ONE, "requests": 2, "tokens": 900},
    {"kind": "contexts_resent", "t": 4.6, "worker": "w-1", "requests": 1, "tokens": 30},
    {"kind": "returned", "t": 5.0, "worker": ONE, "reason": "reclaimed", "use": 0.1, "requests": 2, "seconds": 4.0},
    {"kind": "borrowed", "t": 6.0, "worker": TWO, "reason": "used least", "use": 0.0},
    {"kind": "borrowed", "t": 9.0, "worker": ONE, "reason": "used least", "use": 0.0},
]


def the_log() -> RunLog:
    run = RunLog(Path("run"))
    for event in EVENTS:
        run.take(event)
    run.figures.seconds = 10.0
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
    assert borrowed(RunLog(Path("run"))) == ""


def test_the_live_page_and_the_metrics_count_them_by_server_and_reason() -> None:
    state = RunState(Path("run"))
    state.figures.take_live({"t": 9.0, "workers": [{"name": ONE, "state": "up", "version": 1, "requests": 0}]})
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
        f'rl_coserve:run_contexts_resent_total{{worker="{ONE}"}} 2.0',
        'rl_coserve:run_contexts_resent_tokens_total{worker="w-1"} 30.0',
    ):
        assert line in lines
    state.take({"kind": "returned", "t": 11.0})
    assert state.unreadable == 1, "an event without its server"


# -- how serving was beside it ------------------------------------------------------------------------------------------


def test_how_serving_was_is_an_event_a_window_and_the_log_of_a_long_run_stays_small() -> None:
    clock, sink = [0.0], MemorySink()
    notes = Neighbours(EventLog(sink, lambda: clock[0]))

    def see(**said: Any) -> None:
        notes.saw(ONE, SharedDevice(4, 8, 4096, serving_pages=6, pool_pages=24, **said))

    see(firsts=100, nexts=900, late_first=5, late_next=5, blamed_next=2)
    clock[0] = 5.0
    see(ttft_slack=-0.02, tpot_slack=0.03, firsts=104, nexts=936, late_first=6, late_next=7, blamed_next=3)
    clock[0] = 10.0
    see(ttft_slack=0.4, firsts=110, nexts=990, late_first=6, late_next=8, blamed_next=3)
    (event,) = map(json.loads, sink.lines)
    assert event == {
        "kind": "serving", "t": 10.0, "worker": ONE, "until": 10.0, "seconds": 10.0, "samples": 3,
        "serving": 0.25, "serving_most": 0.25, "pages": 4, "budget": 8,
        "ttft_slack": -0.02, "tpot_slack": 0.03, "arriving": None, "tokens": 100, "late": 4, "blamed": 1,
    }  # fmt: skip
    clock[0] = 12.0
    see(firsts=1, nexts=3)
    notes.end()
    assert [json.loads(line)["tokens"] for line in sink.lines] == [100, 4], "serving was started anew, and the run ends"
    for _ in range(43_200):  # a day of answers every two seconds
        clock[0] += 2.0
        see()
    assert 900 < len(sink.lines) < 1500
    assert max(map(len, sink.lines)) < 400


def test_what_a_server_gave_while_it_was_away_is_nobodys_window() -> None:
    clock, sink = [0.0], MemorySink()
    notes = Neighbours(EventLog(sink, lambda: clock[0]))
    notes.saw(ONE, SharedDevice(4, 8, 4096, nexts=10))
    clock[0] = 2.0
    notes.saw(ONE, SharedDevice(4, 8, 4096, nexts=20))
    clock[0] = 500.0  # it was given back, and is taken again
    notes.saw(ONE, SharedDevice(4, 8, 4096, nexts=9000))
    clock[0] = 504.0
    notes.saw(ONE, SharedDevice(4, 8, 4096, nexts=9005))
    notes.saw(ONE, None)
    notes.saw(TWO, None)
    found = [(event["until"], event["tokens"]) for event in map(json.loads, sink.lines)]
    assert found == [(2.0, 10), (504.0, 5)]


BESIDE: list[dict[str, Any]] = [
    {
        "kind": "serving", "t": at, "worker": name, "until": at, "seconds": 2.0, "samples": 4, "serving": share,
        "serving_most": share + 0.1, "pages": 4, "budget": 8, "ttft_slack": ttft, "tpot_slack": 0.03, "arriving": None,
        "tokens": 1000, "late": late, "blamed": 1,
    }
    for at, name, share, ttft, late in ((3.0, ONE, 0.2, 0.1, 3), (5.0, ONE, 0.4, -0.05, 1))
]  # fmt: skip


def test_the_report_shows_slack_and_what_of_servings_late_tokens_rollouts_have_to_do_with() -> None:
    run = the_log()
    for event in BESIDE:
        run.take(event)
    found = serving_of(run)
    assert found is not None
    row = found[ONE]
    assert (row["tokens"], row["late"], row["blamed"], row["late_without"]) == (2000, 4, 2, 2)
    assert (row["serving"], row["serving_most"], row["ttft_slack"], row["arriving"]) == (0.3, 0.5, -0.05, None)
    page = borrowed(run)
    for words in (
        "4 late",
        "2 of these without rollouts too",
        "2 because of them",
        "the run starts (1), used least (1)",
    ):
        assert words in page.replace("<strong>", "").replace("</strong>", "")
    assert f"taken at {duration(1.0)} (the run starts), given back after {duration(4.0)} (reclaimed)" in page
    assert "late below this line" in page
    alone = RunLog(Path("run"))
    alone.take(BESIDE[0])
    assert "Serving beside the run (real)" in borrowed(alone), "a run that always has the same servers"
    assert serving_of(RunLog(Path("run"))) is None
