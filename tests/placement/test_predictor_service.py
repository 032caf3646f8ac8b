"""The predictor's process: it answers as the policy does; its death, silence or nonsense costs nothing but forecasts."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.api import ConfigError, GenerationRequest, Prompt, RetryableError, RunError, Sampling
from orchestrator.config.prediction_keys import PredictionSection
from orchestrator.events import EventLog, MemorySink
from orchestrator.placement.forecast_setup import make_predictor
from orchestrator.placement.length_tracker import LengthTracker
from orchestrator.placement.predictor_client import PredictorProcess
from orchestrator.placement.predictor_service import SAVE_EVERY, Service
from orchestrator.policies.prediction.length_features import TrajectoryProgress
from orchestrator.policies.prediction.length_predictor import HistoryPredictor, LengthOutcome, ProgressivePredictor

PROMPT = Prompt("p", "made-up", 0, "")
SETTINGS = PredictionSection(enabled=True, patience=20.0)


def outcome(number: int) -> LengthOutcome:
    said = (10 + number % 7, 20, 30 + 3 * (number % 5))
    before = tuple(
        TrajectoryProgress(f"t{number}", "made-up", "p", (1, 2), (3, number % 7), (2,), said[:turn], ())
        for turn in range(3)
    )
    return LengthOutcome(before, said, True)


async def until(what: str, true: Callable[[], object], limit: float = 60.0) -> None:
    async with asyncio.timeout(limit):
        while not true():
            await asyncio.sleep(0.05)


def test_the_process_learns_and_answers_as_the_policy_does_and_keeps_what_it_learned(tmp_path: Path) -> None:
    async def scenario() -> None:
        policy, state = ProgressivePredictor(50.0, coverage=0.8, seed=5), tmp_path / "predictor.npz"
        process = PredictorProcess(SETTINGS, 50.0, 5, state)
        await process.start()
        for number in range(60):
            policy.learn(outcome(number))
            process.learn(outcome(number))
        asked = [
            replace(one, trajectory="asked") for one in outcome(3).before
        ]  # t3 is learned as it was when it was asked for
        wanted = [policy.forecast(one) for one in asked]
        for _ in range(1000):  # what is to be learned goes after questions
            found = [await process.forecast(one) for one in asked]
            if found == wanted:
                break
            await asyncio.sleep(0.05)
        assert found == wanted
        await process.stop()
        assert process.pid is None
        again = PredictorProcess(SETTINGS, 50.0, 5, state)
        await again.start()
        assert [await again.forecast(one) for one in asked] == wanted
        await again.stop()
        await again.stop()

    asyncio.run(scenario())


def test_a_killed_predictor_is_said_once_turns_go_on_and_it_comes_back() -> None:
    async def scenario() -> None:
        process, sink = PredictorProcess(SETTINGS, 50.0, 5), MemorySink()
        await process.start()
        made = LengthTracker(SETTINGS, process, EventLog(sink, asyncio.get_running_loop().time), 50.0)
        first = process.pid
        assert first is not None
        os.kill(first, signal.SIGSTOP)  # a question is on its way when it dies
        for name in ("a", "b", "c"):
            made.begin(name, PROMPT)
            made.observed(name, PROMPT, (), (1, 2))
        await asyncio.sleep(0.1)
        os.kill(first, signal.SIGKILL)
        await until("said", lambda: sink.lines)
        request = GenerationRequest("a/0", "a", 0, (1, 2), Sampling(10), "made-up")
        assert (await made.rank(request)).predicted_tokens == 50
        await until("back", lambda: process.pid not in (None, first) and process._ready)
        made.turn_over("a", PROMPT, (), (1, 2), (5,) * 10)
        await until("answered", lambda: made.answered == 1)
        told = [json.loads(line) for line in sink.lines]
        assert [(event["kind"], event["what"]) for event in told] == [
            ("fault", "predictor"),
            ("recovered", "predictor"),
        ]
        assert "died" in told[0]["detail"]
        await made.close()
        await process.stop()

    asyncio.run(scenario())


@pytest.mark.long
def test_one_that_hangs_is_not_waited_for_and_one_that_may_not_restart_stays_away() -> None:
    async def scenario() -> None:
        settings = PredictionSection(enabled=True, patience=0.3, restarts=0)
        process, sink = PredictorProcess(settings, 50.0, 5), MemorySink()
        await process.start()
        made = LengthTracker(settings, process, EventLog(sink, asyncio.get_running_loop().time), 50.0)
        pid = process.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        made.begin("a", PROMPT)
        made.observed("a", PROMPT, (), (1, 2))
        await until("late", lambda: sink.lines)
        assert "no answer for 0.3 s" in sink.text()
        os.kill(pid, signal.SIGKILL)
        await until("dead", lambda: process.pid is None and not process._ready)
        with pytest.raises(RetryableError, match="not up"):
            await process.forecast(outcome(1).before[0])
        process.learn(outcome(1))  # is lost, and says nothing
        await made.close()
        await process.stop()

    asyncio.run(scenario())


@pytest.mark.long
def test_a_predictor_that_cannot_start_is_an_error_at_the_start(tmp_path: Path) -> None:
    async def scenario() -> None:
        settings = PredictionSection(enabled=True, start=str(tmp_path / "nothing.npz"))
        with pytest.raises(RunError, match="before it was ready"):
            await PredictorProcess(settings, 50.0, 5, log=tmp_path / "log").start()

    asyncio.run(scenario())


@pytest.mark.long
def test_a_damaged_file_of_what_was_learned_is_left_behind(tmp_path: Path) -> None:
    async def scenario() -> None:
        state = tmp_path / "predictor.npz"
        state.write_bytes(b"PK\x03\x04 not an archive")
        process = PredictorProcess(SETTINGS, 50.0, 5, state, tmp_path / "log")
        await process.start()
        assert (await process.forecast(outcome(1).before[0])).source == "prior"
        await process.stop()
        assert "begins anew" in (tmp_path / "log").read_text()
        ProgressivePredictor(50.0, seed=5).load(state.read_bytes())

    asyncio.run(scenario())


def test_what_was_learned_is_saved_now_and_then(tmp_path: Path) -> None:
    state = tmp_path / "predictor.npz"

    async def scenario() -> None:
        service = Service(ProgressivePredictor(50.0, seed=5), state)
        for number in range(SAVE_EVERY):
            assert not state.exists()
            one = outcome(number)
            before = [{name: getattr(row, name) for name in row.__slots__} for row in one.before]
            service.take(json.dumps({"learn": {"before": before, "said": one.said, "complete": True}}).encode())
            service.study()
        assert state.exists()

    asyncio.run(scenario())


def test_one_that_owes_answers_for_too_long_is_asked_no_more_until_it_has_given_them() -> None:
    """Else each question waits behind those that nobody waits for any more, and no answer ever comes in time."""

    async def scenario() -> None:
        process = PredictorProcess(PredictionSection(enabled=True, patience=0.3), 50.0, 5)
        await process.start()
        pid, asked = process.pid, outcome(1).before[0]
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(process.forecast(asked), 0.4)
            with pytest.raises(RetryableError, match="lags behind"):
                await asyncio.wait_for(process.forecast(asked), 0.4)
        finally:
            os.kill(pid, signal.SIGCONT)
        await until("answered", lambda: not process._owed)
        assert (await process.forecast(asked)).source == "prior"
        await process.stop()

    asyncio.run(scenario())


def test_lessons_that_a_slow_predictor_has_no_time_for_are_left_out_the_oldest_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lesson(number: int) -> bytes:
        one = outcome(number)
        before = [{name: getattr(row, name) for name in row.__slots__} for row in one.before]
        return json.dumps({"learn": {"before": before, "said": one.said, "complete": True}}).encode()

    async def scenario() -> None:
        monkeypatch.setattr("orchestrator.placement.predictor_service.LESSONS", 3 * len(lesson(10)))
        policy = ProgressivePredictor(50.0, seed=5)
        service = Service(policy, None)
        for number in range(10, 20):
            service.take(lesson(number))
        while service._lessons:
            service.study()
        assert service.left_out == 7
        assert [*policy.memory.prompts["made-up\np"][0]] == list(outcome(17).said)
        assert (service._waiting, service.left_out) == (0, 7)
        assert "4 trajectories are not learned from" in capsys.readouterr().err

    asyncio.run(scenario())


def test_a_history_is_kept_over_a_restart_and_begins_another_run(tmp_path: Path) -> None:
    state, one = tmp_path / "predictor.npz", outcome(3)

    def made(start: str) -> HistoryPredictor:
        settings = PredictionSection(enabled=True, predictor="history", start=start)
        found = make_predictor(settings, 50.0, 5)
        assert isinstance(found, HistoryPredictor)
        return found

    service = Service(made(""), state)
    for number in range(8):
        service.policy.learn(outcome(number))
    service.save()
    again = made(str(state))
    assert again.forecast(one.before[0]) == service.policy.forecast(one.before[0])
    assert again.forecast(one.before[0]).source == "prompt"
    state.write_bytes(ProgressivePredictor(50.0, seed=5).dump())
    with pytest.raises(ConfigError, match="of another kind"):
        made(str(state))
    state.write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="cannot be used"):
        made(str(state))
