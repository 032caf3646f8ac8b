"""Prediction and placement in whole simulated runs: order, moves, fallbacks; nothing is lost whatever the predictor does."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest

from orchestrator.api import ConfigError, GenerationRequest, Prompt, RetryableError, Sampling, Trajectory, Turn
from orchestrator.config import Config, load_config
from orchestrator.config.prediction_keys import PredictionSection
from orchestrator.events import EventLog, MemorySink
from orchestrator.placement.length_tracker import SAME, LengthTracker, prioritize
from orchestrator.policies.prediction.length_features import TrajectoryProgress
from orchestrator.policies.prediction.length_predictor import LengthForecast, LengthOutcome
from orchestrator.proxy.gateway import LLMProxy
from orchestrator.proxy.kv_moves import KvMoves
from orchestrator.proxy.worker_state import Pending, WorkerState
from orchestrator.sim import simulated_forecasts
from orchestrator.sim.simulated_run import SimResult, simulate
from scripts.bench.virtual_run import run

SHORT = (
    "rollout.first_token_timeout=30",
    "rollout.prepare_timeout=30",
    "rollout.update_timeout=30",
    "rollout.restart_timeout=120",
)

PROMPT = Prompt("p", "game", 0, "")


def config(*overrides: str) -> Config:
    return load_config(
        None,
        [
            "run.steps=3",
            "rollout.workers=4",
            "rollout.groups_per_step=6",
            "rollout.group_size=4",
            "rollout.environments=48",
            "rollout.trajectory_timeout=100000",
            "rollout.environment_step_timeout=10000",
            "rollout.stall_timeout=10000",
            "rollout.engine.max_model_len=2048",
            "rollout.engine.max_num_seqs=8",
            "evaluation.prompts=2",
            "sim.costs=roofline",
            "sim.model=Qwen3-8B",
            "sim.grain=16",
            "sim.tasks.game.turns_min=2",
            "sim.tasks.game.turns_max=6",
            "sim.tasks.game.step_seconds=1.5",
            "sim.tasks.game.response_sigma=1.2",
            "sim.tasks.game.prompt_share=0.5",
            "rollout.prediction.enabled=true",
            *overrides,
        ],
    )


PLACED = ("rollout.placement.enabled=true", "rollout.placement.certainty=0.0", "rollout.placement.prefill_seconds=0")


def events_of(result: SimResult, *kinds: str) -> list[dict[str, Any]]:
    return [event for event in map(json.loads, result.events.splitlines()) if event["kind"] in kinds]


@pytest.mark.slow
@pytest.mark.parametrize(
    "predictor",
    ["progressive", "oracle", *(pytest.param(name, marks=pytest.mark.long) for name in ("prompt-only", "history"))],
)
def test_a_run_with_each_predictor_accounts_for_everything_and_repeats(predictor: str) -> None:
    given = config(f"rollout.prediction.predictor={predictor}", *PLACED, "rollout.kv_transfer.enabled=true")
    first = simulate(given)
    assert first.summary["reason"] == "completed"
    assert simulate(given).events == first.events


@pytest.mark.parametrize("order", ["longest-first", "shortest-first", "fcfs", "round-robin"])
def test_the_order_of_turns_is_a_value_of_the_config(order: str) -> None:
    assert simulate(config(f"rollout.prediction.order={order}")).summary["reason"] == "completed"


@pytest.mark.slow
def test_faults_of_every_part_lose_no_trajectory_while_kv_moves() -> None:
    limits = (
        "rollout.trajectory_timeout=300",
        "rollout.environment_step_timeout=30",
        "rollout.stall_timeout=30",
        *SHORT,
    )
    found = Counter[str]()
    for seed in range(2):
        faulty = ("sim.fault_rate=0.01", f"run.seed={seed}", "run.steps=2", "rollout.workers=3")
        found.update(simulate(config(*PLACED, *limits, *faulty, "rollout.kv_transfer.enabled=true")).injected)
    assert found.total() > 20


@pytest.mark.slow
def test_a_trajectory_that_is_placed_anew_brings_its_kv_along_in_the_gap_between_two_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the port that real workers have; without it the new worker computes the prefix again."""
    brought, bring = [], KvMoves.bring_prefix

    async def noted(self: KvMoves, trajectory: str, source: WorkerState, lane: WorkerState) -> bool:
        brought.append(await bring(self, trajectory, source, lane))
        return brought[-1]

    monkeypatch.setattr(KvMoves, "bring_prefix", noted)
    moved, computed = (
        simulate(config(*PLACED, "rollout.placement.prefill_seconds=0.01", f"rollout.kv_transfer.enabled={on}"))
        for on in ("true", "false")
    )
    moves = events_of(moved, "kv_moved")
    assert sum(brought) > len(moves) / 2, "most of them in gaps"
    assert moves
    assert not events_of(computed, "kv_moved")
    limits = (
        "rollout.trajectory_timeout=300",
        "rollout.environment_step_timeout=30",
        "rollout.stall_timeout=30",
        *SHORT,
    )
    faulty = (
        "sim.fault_rate=0.02",
        "run.seed=3",
        "run.steps=2",
        "rollout.workers=3",
        "rollout.kv_transfer.enabled=true",
    )
    assert simulate(config(*PLACED, *limits, *faulty)).injected


def test_the_oracle_knows_what_will_be_said(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong, right = Counter[int](), Counter[int]()
    learn = simulated_forecasts.SimOracle.learn

    def check(self: simulated_forecasts.SimOracle, outcome: LengthOutcome) -> None:
        if outcome.complete:
            told = self.forecast(outcome.before[0]).tokens
            (right if told == sum(outcome.said) else wrong)[len(outcome.said)] += 1
        learn(self, outcome)

    monkeypatch.setattr(simulated_forecasts.SimOracle, "learn", check)
    simulate(config("rollout.prediction.predictor=oracle"))
    assert not wrong
    assert len(right) >= 4  # lengths in turns


class Scripted:
    """A predictor that answers what it is told to, or fails so."""

    def __init__(self, *answers: float | Exception | str) -> None:
        self.answers = list(answers)
        self.learned: list[LengthOutcome] = []

    async def forecast(self, progress: TrajectoryProgress) -> LengthForecast:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, str):
            await asyncio.sleep(1000.0)
            return LengthForecast(1.0, 1.0, 1.0, 1.0, "model")
        return LengthForecast(answer, 0.0, max(answer, 0.0) * 2, 1.0, "model")

    def learn(self, outcome: LengthOutcome) -> None:
        self.learned.append(outcome)


def forecasts(predictor: Scripted, **settings: Any) -> tuple[LengthTracker, MemorySink]:
    sink = MemorySink()
    events = EventLog(sink, asyncio.get_running_loop().time)
    return LengthTracker(PredictionSection(enabled=True, **settings), predictor, events, 100.0), sink


def request(name: str, turn: int = 0) -> GenerationRequest:
    return GenerationRequest(f"{name}/{turn}", name, turn, (1, 2), Sampling(10), "game")


def kinds(sink: MemorySink) -> list[str]:
    return [f"{json.loads(line)['kind']} {json.loads(line)['what']}" for line in sink.lines]


@pytest.mark.parametrize("bad", [math.nan, -5.0, math.inf, RetryableError("it died"), "late"])
def test_what_stands_in_for_a_bad_forecast_is_used_and_said_once(bad: float | Exception | str) -> None:
    async def scenario() -> None:
        made, sink = forecasts(Scripted(bad, bad, bad, 640.0))
        for name in ("a", "b"):
            made.begin(name, PROMPT)
            made.observed(name, PROMPT, (), (1, 2))
        await asyncio.sleep(10.0)
        ranked = await made.rank(request("a"))
        assert ranked.predicted_tokens == 100  # the prior
        made.turn_over("a", PROMPT, (), (1, 2), (5,) * 40)
        await asyncio.sleep(10.0)
        assert (await made.rank(request("a", 1))).predicted_tokens == 100
        assert kinds(sink) == ["fault predictor"]
        made.turn_over("b", PROMPT, (), (1, 2), (5,) * 40)
        await asyncio.sleep(10.0)
        assert (await made.rank(request("b", 1))).predicted_tokens == 640
        assert kinds(sink) == ["fault predictor", "recovered predictor"]
        await made.close()

    run(scenario())


def test_a_turn_does_not_wait_for_a_forecast_and_counts_down_the_last_one() -> None:
    async def scenario() -> None:
        made, _ = forecasts(Scripted(500.0, "late"))
        made.begin("a", PROMPT)
        made.observed("a", PROMPT, (), (1, 2))
        await asyncio.sleep(0.1)
        began = asyncio.get_running_loop().time()
        assert (await made.rank(request("a"))).predicted_tokens == 500
        made.turn_over("a", PROMPT, (), (1, 2), (5,) * 120)
        assert (await made.rank(request("a", 1))).predicted_tokens == 380
        assert asyncio.get_running_loop().time() == began
        await made.close()

    run(scenario())


def test_longer_goes_first_and_about_as_long_is_equal() -> None:
    async def scenario() -> None:
        made, _ = forecasts(Scripted(1000.0, 1010.0, 90.0))
        found = []
        for name in ("a", "b", "c"):
            made.begin(name, PROMPT)
            made.observed(name, PROMPT, (), (1, 2))
            await asyncio.sleep(0.1)
            found.append((await made.rank(request(name))).priority)
        assert found[0] == found[1] < found[2]
        await made.close()

    run(scenario())


def test_equal_forecasts_are_said_once() -> None:
    async def scenario() -> None:
        made, sink = forecasts(Scripted(77.0))
        for number in range(2 * SAME):
            made.begin(f"t{number}", PROMPT)
            made.observed(f"t{number}", PROMPT, (), (1, 2))
            await asyncio.sleep(0.1)
        assert kinds(sink) == ["alarm prediction"]
        await made.close()

    run(scenario())


def test_what_ends_is_learned_from_and_stands_in_for_the_next() -> None:
    async def scenario() -> None:
        predictor = Scripted(RetryableError("away"))
        made, _ = forecasts(predictor)
        turns = tuple(Turn((1, 2), (5,) * 30, (), ()) for _ in range(4))
        for number in range(8):
            made.begin(f"t{number}", PROMPT)
            made.ended(Trajectory(f"t{number}", "g", "game", PROMPT, turns, 0.0, "1", 0, False), number != 3)
        assert [outcome.complete for outcome in predictor.learned].count(False) == 1
        made.begin("new", PROMPT)
        assert made.of("new").tokens == pytest.approx(120.0, rel=0.01)
        await made.close()

    run(scenario())


def test_placement_without_prediction_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rollout.prediction.enabled"):
        config("rollout.prediction.enabled=false", "rollout.placement.enabled=true")


def test_an_oracle_is_refused_where_nobody_could_know() -> None:
    given = ["rollout.prediction.enabled=true", "rollout.prediction.predictor=oracle"]
    with pytest.raises(ConfigError, match="oracle"):
        load_config(None, given)


def test_an_engine_that_is_silent_keeps_no_other_from_its_priorities() -> None:
    """One after the other, 64 engines would hear of them a step of each later; with one that hangs, a minute later."""
    told: list[tuple[str, float]] = []

    def engine(name: str, seconds: float) -> WorkerState:
        async def hear(priorities: dict[str, int]) -> None:
            await asyncio.sleep(seconds)
            told.append((name, asyncio.get_running_loop().time()))

        state = WorkerState(cast(Any, SimpleNamespace(name=name, prioritize=hear)), 0, alive=True)
        state.sent["t/0"] = Pending(request("t"), asyncio.get_running_loop().create_future())
        return state

    async def scenario() -> list[str]:
        faults: list[str] = []
        states = [engine("silent", 1000.0), engine("b", 0.05), engine("c", 0.05)]
        proxy = SimpleNamespace(states=states, note_fault=lambda what, why: faults.append(f"{what}: {why}"))
        await prioritize(cast(LLMProxy, proxy), {"t": -3, "elsewhere": 0}, limit=60.0)
        return faults

    assert run(scenario()) == ["prioritize silent: no answer for 60.0 s"]
    assert told == [("b", 0.05), ("c", 0.05)]
