"""The live display: always a named reason, few lines without a terminal, no thread, and a run that outlives its stream."""

from __future__ import annotations

import io
import re
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from orchestrator.observe.progress import Progress

LEDGER = {"started": 100, "trained": 60, "evicted_stale": 4, "failed": 1, "in_flight": 35, "rolled_back": 0}


class Clock:
    def __init__(self) -> None:
        self.time = 1000.0

    def __call__(self) -> float:
        return self.time


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "110")


def plain(clock: Clock, **options: Any) -> tuple[Progress, io.StringIO]:
    stream = io.StringIO()
    settings = {"steps": 20, "minutes": None, "name": "run-001", "now": clock, "stream": stream} | options
    return Progress(**settings), stream


@pytest.fixture
def panel(clock: Clock) -> Iterator[tuple[Progress, Terminal]]:
    stream = Terminal()
    display = Progress(steps=20, minutes=10.0, name="run-001", now=clock, stream=stream)
    yield display, stream
    display.close()


def last_picture(stream: io.StringIO) -> str:
    """What the terminal shows after the last drawing."""
    bare = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue()).replace("\r", "")
    return bare[bare.rindex("╭") :]


def full_step(display: Progress, step: int, t: float = 0.0, **fields: Any) -> None:
    """``step`` steps are done at ``t`` seconds of the run."""
    event = {
        "kind": "step", "t": t, "step": step - 1, "version": step, "reward_mean": 0.25 * step, "success": 0.5,
        "trained": 4, "tokens": 3000, "metrics": {"loss": 0.1}, "ledger": LEDGER, **fields,
    }  # fmt: skip
    display.take(event)


def evaluated(display: Progress, success: float, low: float, high: float, **more: Any) -> None:
    event = {"kind": "evaluation", "t": 0.0, "step": 0, "phase": "start", "success": success, "low": low, "high": high}
    display.take(event | more)


# -- without a terminal ------------------------------------------------------------------------------------------------


def test_one_line_a_step(clock: Clock) -> None:
    display, stream = plain(clock)
    for step in (1, 2):
        clock.time += 61
        display.stage("get_batch", f"step {step}")
        display.update(in_flight=35, buffered=12, training=True, ledger=LEDGER)
        full_step(display, step, 61.0 * step, tokens=976)
    display.close()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("step 1/20  reward 0.250  16 tokens/s  35 in flight  12 buffered  ledger closes  1:01")
    assert "16 tokens/s" in lines[1]


def test_a_reason_is_told_once_and_only_when_it_lasts(clock: Clock) -> None:
    display, stream = plain(clock)
    for tick in range(60):  # 30 s of changing counts
        display.waiting(f"{tick} of 32 groups complete; {64 - tick} in generation")
        clock.time += 0.5
    for _ in range(8):  # 4 s
        display.waiting("worker vllm-0 to come back")
        clock.time += 0.5
    for _ in range(20):
        display.waiting("the training step in progress")
        clock.time += 0.5
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[0] == "waiting for: 10 of 32 groups complete; 54 in generation (for 5 s)"
    assert lines[1].startswith("waiting for: the training step in progress")


def test_a_run_that_hangs_says_each_minute_for_what(clock: Clock) -> None:
    display, stream = plain(clock)
    for _ in range(2 * 60 * 5):
        display.waiting("1 of 32 groups complete; 1 in reward")
        clock.time += 0.5
    lines = stream.getvalue().splitlines()
    assert len(lines) == 5
    assert all("1 in reward" in line for line in lines)


def test_evaluations_stages_and_messages_have_their_lines(clock: Clock) -> None:
    display, stream = plain(clock)
    display.stage("startup", "vLLM and Megatron-Core")
    evaluated(display, 0.125, 0.1, 0.15)
    display.message("ALARM: [red]not markup[/red]")
    assert stream.getvalue().splitlines() == [
        "startup: vLLM and Megatron-Core",
        "evaluation (start): success 0.125 [0.100, 0.150]",
        "ALARM: [red]not markup[/red]",
    ]


def test_an_evaluation_says_its_mean_reward_and_how_many_prompts_were_solved_at_all_where_that_is_another_number(
    clock: Clock,
) -> None:
    display, stream = plain(clock)
    evaluated(display, 0.5, 0.4, 0.6, samples=1, solved=0.5, reward=0.5)
    evaluated(display, 0.5, 0.4, 0.6, samples=8, solved=0.75, reward=-0.25)
    evaluated(display, 0.0, 0.0, 0.6, samples=2, prompts=3, solved=0.0, failed=6)
    assert stream.getvalue().splitlines() == [
        "evaluation (start): success 0.500 [0.400, 0.600]",
        "evaluation (start): success 0.500 [0.400, 0.600], any of 8: 0.750, reward -0.250",
        "evaluation (start): success 0.000 [0.000, 0.600], any of 2: 0.000, 6 of 6 episodes failed",
    ]


def test_a_ledger_that_does_not_close_is_in_the_line(clock: Clock) -> None:
    display, stream = plain(clock)
    full_step(display, 1, ledger={**LEDGER, "trained": 59})
    assert "LEDGER: 100 started = 59 trained + 4 too stale + 1 failed + 35 in flight, off by 1" in stream.getvalue()


def test_no_color_means_plain_lines_on_a_terminal_too(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    display = Progress(steps=20, minutes=None, name="run-001", now=clock, stream=stream)
    full_step(display, 1)
    display.close()
    assert "\x1b" not in stream.getvalue()
    assert stream.getvalue().count("\n") == 1


# -- on a terminal -----------------------------------------------------------------------------------------------------


def test_the_panel_shows_where_the_run_stands(panel: tuple[Progress, Terminal], clock: Clock) -> None:
    display, stream = panel
    evaluated(display, 0.2, 0.15, 0.25)
    for step in range(1, 5):
        clock.time += 30
        display.update(in_flight=35, buffered=12, training=True)
        full_step(display, step, 30.0 * step, lag={"0": 3, "1": 1})
    display.waiting("12 of 32 groups complete; 35 in generation")
    clock.time += 1
    display.waiting("13 of 32 groups complete; 34 in generation")
    shown = last_picture(stream)
    for words in (
        "rl-coserve · run-001",
        "step 4/20",
        "2:01 of 10:00, about",
        "0.200 [0.150, 0.250]",
        "100 tokens/s",
        "35 in flight, 12 buffered",
        "training, version 4, staleness 0: 75 %, 1: 25 %",
        "100 started = 60 trained + 4 too stale + 1 failed + 35 in flight ✓",
        "waiting for  13 of 32 groups complete; 34 in generation",
    ):
        assert words in shown, words


def test_the_time_left_is_never_beyond_the_limit(panel: tuple[Progress, Terminal], clock: Clock) -> None:
    display, stream = panel
    for step in (1, 2, 3):
        clock.time += 100  # 17 steps would take 1700 s more; the limit leaves 300 s
        full_step(display, step, 100.0 * step)
    assert "5:00 of 10:00, about 5:00 left" in last_picture(stream)


def test_without_a_wait_the_stage_is_named(panel: tuple[Progress, Terminal]) -> None:
    display, stream = panel
    display.stage("evaluate", "300 held-out prompts")
    assert "evaluate: 300 held-out prompts" in last_picture(stream)


def test_a_message_stays_above_the_panel(panel: tuple[Progress, Terminal]) -> None:
    display, stream = panel
    display.message("skipped a [bold]damaged[/bold] checkpoint")
    full_step(display, 1)
    assert "skipped a [bold]damaged[/bold] checkpoint" in stream.getvalue()


def test_calls_at_any_rate_draw_a_few_times_a_second(panel: tuple[Progress, Terminal], clock: Clock) -> None:
    display, stream = panel
    before = stream.getvalue().count("╭")
    for tick in range(1000):  # one second
        display.waiting(f"{tick} of 1000")
        display.update(in_flight=tick)
        clock.time += 0.001
    assert stream.getvalue().count("╭") - before <= 6


def test_no_thread_is_started(panel: tuple[Progress, Terminal]) -> None:
    before = threading.active_count()
    display, _ = panel
    full_step(display, 1)
    assert threading.active_count() == before == threading.active_count()
    assert not [thread for thread in threading.enumerate() if "rich" in type(thread).__module__]


def test_close_gives_the_standard_streams_back(clock: Clock) -> None:
    before = (sys.stdout, sys.stderr)
    display = Progress(steps=20, minutes=None, name="run-001", now=clock, stream=Terminal())
    full_step(display, 1)
    display.close()
    display.close()
    assert (sys.stdout, sys.stderr) == before


# -- a stream that goes away -------------------------------------------------------------------------------------------


class Broken(Terminal):
    broken = False

    def write(self, text: str, /) -> int:
        if self.broken:
            raise BrokenPipeError(32, "Broken pipe")
        return super().write(text)


@pytest.mark.parametrize("terminal", [True, False])
def test_a_run_outlives_the_stream_that_it_is_shown_on(clock: Clock, terminal: bool) -> None:
    before = (sys.stdout, sys.stderr)
    stream = Broken()
    stream.isatty = lambda: terminal  # type: ignore[method-assign]
    display = Progress(steps=20, minutes=None, name="run-001", now=clock, stream=stream)
    full_step(display, 1)
    stream.broken = True
    for step in (2, 3):
        clock.time += 10
        full_step(display, step)
        display.message("hello")
    display.close()
    assert (sys.stdout, sys.stderr) == before


def test_a_closed_stream_is_no_error_either(clock: Clock) -> None:
    display, stream = plain(clock)
    stream.close()
    full_step(display, 1)
    display.close()


@pytest.mark.parametrize("terminal", [True, False])
def test_what_a_run_waits_for_steers_no_terminal(clock: Clock, terminal: bool) -> None:
    stream: io.StringIO = Terminal() if terminal else io.StringIO()
    display = Progress(steps=20, minutes=None, name="run-001", now=clock, stream=stream)
    steers = "\x1b]0;owned\x07\x9b31m"
    display.stage("startup", steers)
    for _ in range(60):
        display.waiting(f"an environment: {steers}")
        clock.time += 0.5
    display.message(steers)
    display.close()
    assert "]0;owned" in stream.getvalue()
    assert not any(sign in stream.getvalue() for sign in ("\x1b]", "\x07", "\x9b"))
