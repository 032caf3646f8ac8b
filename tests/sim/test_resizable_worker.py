"""Simulated engines cut anew between steps: same answers, charged time, KV of the new size, and the planner in whole runs."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from orchestrator.api import ConfigError, GenerationRequest, PublishResult, ResizableWorker, RetryableError, Sampling
from orchestrator.config import Config, load_config
from orchestrator.events import EventLog, MemorySink
from orchestrator.policies.parallelism.engine_profile import EngineLayout
from orchestrator.proxy.gateway import LLMProxy
from orchestrator.proxy.resize import EngineResizing
from orchestrator.proxy.worker_state import WorkerLimits
from orchestrator.sim.paper_setups import rollpacker
from orchestrator.sim.resizable_worker import ResizableSimWorker, planner_of, roofline_profile
from orchestrator.sim.simulated_cluster import engine_costs
from orchestrator.sim.simulated_run import simulate
from orchestrator.sim.simulated_worker import SimWeights, SimWorker, TurnMoves
from orchestrator.sim.twins import SimTask, SimTrainer
from scripts.bench.virtual_run import run

PLANNED = ("rollout.weights=relay", "rollout.planner.enabled=true", "rollout.planner.max_tp=8")


def roofline(overrides: tuple[str, ...] = (), workers: int = 4) -> Config:
    base = ["sim.costs=roofline", "sim.model=Qwen2.5-7B", f"rollout.workers={workers}", "sim.grain=16"]
    base += ["rollout.engine.max_model_len=1024", "rollout.planner.enabled=true", *overrides]
    return load_config(None, base)


def test_a_simulated_worker_is_resizable_only_where_the_planner_is_on() -> None:
    config = roofline()
    assert isinstance(ResizableSimWorker("sim-0", config, SimWeights()), ResizableWorker)
    assert not isinstance(SimWorker("sim-0", config, SimWeights()), ResizableWorker)


@pytest.mark.parametrize("after", [0.0, 0.4, 3.0])
def test_requests_say_in_new_engines_what_they_would_have_said_in_the_old_ones(after: float) -> None:
    config = roofline(("sim.costs=linear", "sim.response_tokens_mean=60"))

    async def answers(tp: int) -> list[Any]:
        weights, moves, said = SimWeights(), TurnMoves(), []
        weights.put(3)
        workers = [
            ResizableSimWorker(f"sim-{i}", config, weights, lambda *turn: said.append(turn), moves=moves)
            for i in range(4)
        ]
        events = EventLog(MemorySink(), asyncio.get_running_loop().time)
        proxy = LLMProxy(workers, events, limits=WorkerLimits(60.0), restarts=0, on_fatal=print)
        resizing = EngineResizing(proxy)
        proxy.start()
        await proxy.suspend()
        await proxy.update(3)
        await proxy.resume()
        requests = [
            GenerationRequest(f"r{n}", f"t{n}", 0, (2,) * (9 + n), Sampling(200, 1.0), "sim") for n in range(12)
        ]
        asked = [asyncio.create_task(proxy.generate(request)) for request in requests]
        await asyncio.sleep(after)
        if tp > 1:
            done = await resizing.reshape(tp)
            assert (done.error, done.seconds >= config.sim.start_seconds) == ("", True), "the start is charged"
            assert [worker.ranks for worker in workers] == [tp if i % tp == 0 else 0 for i in range(4)]
        found = [(await task).token_ids for task in asked]
        assert sorted(name for name, _, _ in said) == sorted(f"t{n}" for n in range(12)), "each turn is told once"
        assert all(sum(count for _, count in spans) == len(found[int(name[1:])]) for name, _, spans in said)
        await proxy.close()
        for worker in workers:
            await worker.close()
        return found

    assert run(answers(1)) == run(answers(2)) == run(answers(4))


def test_a_wider_engine_holds_more_than_its_share_of_kv_and_one_that_does_not_fit_does_not_come_up() -> None:
    one, two = (engine_costs(roofline(), "", tp).kv_tokens or 0 for tp in (1, 2))
    assert two > 2 * one, "weights are held once, not twice"

    async def start(model: str, ranks: int) -> int:
        worker = ResizableSimWorker("sim-0", roofline((f"sim.model={model}",)), SimWeights())
        await worker.resize(ranks)
        await worker.restart()
        kv = (await worker.stats()).kv_capacity
        await worker.close()
        return kv

    assert run(start("Qwen2.5-7B", 2)) > 2 * run(start("Qwen2.5-7B", 1))
    with pytest.raises(RetryableError, match="KV heads"):
        run(start("Qwen2.5-14B", 3))


def test_the_profile_is_the_cost_models_own_and_has_no_layout_that_does_not_fit() -> None:
    config = roofline()
    profile, costs = roofline_profile(config), engine_costs(config, "", 2)
    fixed, growing = costs.decode(8)
    tokens = config.rollout.engine.max_model_len // 2
    assert profile.decode_seconds(8, tokens, EngineLayout(2)) == pytest.approx(fixed + growing * 8 * tokens)
    assert profile.shape(EngineLayout(2)).kv_tokens == costs.kv_tokens
    assert profile.layouts == (EngineLayout(1), EngineLayout(2), EngineLayout(4))
    wide = roofline(("rollout.engine.max_model_len=2080", "sim.model=Qwen2.5-32B"), 8)
    assert roofline_profile(wide).layouts == (EngineLayout(2), EngineLayout(4), EngineLayout(8)), (
        "65 of 80 GB are weights at TP 1"
    )
    planner = planner_of(wide, SimTask(wide))
    assert planner is not None
    assert planner.layout.tp >= 2


def pressed(*overrides: str) -> Config:
    """Two engines with KV for four contexts each; over both devices twice that."""
    base = ["run.mode=sync_plus", "rollout.alpha=0", "run.steps=5", "rollout.workers=2", "rollout.environments=32"]
    base += ["rollout.group_size=4", "rollout.groups_per_step=8", "rollout.planner.enabled=true", "evaluation.every=0"]
    base += ["evaluation.prompts=1", "rollout.engine.max_model_len=256", "sim.kv_tokens=1024"]
    return load_config(None, [*base, "sim.response_tokens_mean=80", "sim.start_seconds=0.5", *overrides])


def test_the_planner_runs_in_a_whole_simulated_run_and_pays_for_its_changes() -> None:
    config = pressed()
    result = simulate(config)
    events = [json.loads(line) for line in result.events.splitlines()]
    plans = [event for event in events if event["kind"] == "plan"]
    changes = [event for event in events if event["kind"] == "reshape"]
    assert [plan["step"] for plan in plans] == list(range(5))
    assert changes
    assert (plans[0]["tp"], changes[0]["tp"]) == (1, 2)
    assert all(change["error"] == "" and change["seconds"] >= config.sim.start_seconds for change in changes)
    assert plans[changes[0]["step"]]["preemptions"] > 0
    assert simulate(config).events == result.events, "the same bytes again"


def test_a_version_that_cannot_be_published_ends_the_run_while_engines_that_need_it_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = pressed("rollout.weights=collective")
    events = [json.loads(line) for line in simulate(config).events.splitlines()]
    changed = next(event["step"] for event in events if event["kind"] == "reshape")
    publish = SimTrainer.publish

    async def lost(trainer: SimTrainer) -> PublishResult:
        if trainer.version > changed:
            raise RetryableError("the trainer is dead")
        return await publish(trainer)

    monkeypatch.setattr(SimTrainer, "publish", lost)
    found = simulate(config, strict=False)
    assert found.deadlocks == 0
    assert found.summary["steps"] == changed + 1
    last = json.loads(found.events.splitlines()[-1])
    assert last["reason"] == "the trainer failed in publish: the trainer is dead"


def test_an_unpressed_run_with_a_profile_stays_in_the_layout_that_the_profile_begins_with() -> None:
    config = rollpacker(
        "7B/8k", "+ reward scheduler", 4, steps=2, extra=[*PLANNED, "rollout.planner.expected_tokens=40"]
    )
    events = [json.loads(line) for line in simulate(config).events.splitlines()]
    profile = roofline_profile(config)
    load = [40] * config.rollout.environments
    best = min(profile.layouts[:3], key=lambda at: profile.rollout_seconds(load, 272, at, 4 // at.tp))
    assert {plan["tp"] for plan in events if plan["kind"] == "plan"} == {best.tp}
    assert not [event for event in events if event["kind"] == "reshape"]


@pytest.mark.parametrize("seed", [0, 2, 5])  # in 2 every worker was given up before engines were cut anew
def test_with_faults_engines_are_cut_anew_and_nothing_is_lost(seed: int) -> None:
    given = [f"run.seed={seed}", f"sim.fault_rate={(0.01, 0.03, 0.08)[seed % 3]}", "rollout.stall_timeout=30"]
    given += [
        "rollout.first_token_timeout=30",
        "rollout.prepare_timeout=30",
        "rollout.update_timeout=30",
        "rollout.restart_timeout=120",
    ]
    given += ["rollout.workers=4", "rollout.environments=24", "rollout.groups_per_step=4", "rollout.worker_restarts=4"]
    given += ["rollout.planner.calm_steps=1", "sim.kv_tokens=300", "sim.start_seconds=3", "sim.response_tokens_mean=30"]
    given += ["evaluation.prompts=2", "run.mode=async", "rollout.alpha=1"]
    given += [f"rollout.weights={('relay', 'collective')[seed % 2]}", "rollout.collective_timeout=20"]
    result = simulate(pressed(*given))
    assert result.ledger["in_flight"] == 0
    assert result.injected
    assert b'"kind":"reshape"' in result.events or seed % 3 == 2  # so many faults leave no two rounds to compare


@pytest.mark.parametrize(("override", "field"), [("sim.fleet={H800=2, H20=2}", r"sim\.fleet")])
def test_what_cannot_be_cut_is_refused_with_the_planner(override: str, field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        simulate(roofline((override,)))
