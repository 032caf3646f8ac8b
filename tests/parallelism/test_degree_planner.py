"""The resource manager: a change of degrees is charged with what it costs, engines that stay go on, and runs lose nothing."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from orchestrator.api import ConfigError
from orchestrator.config import Config, load_config
from orchestrator.observe.report.report_page import write_report
from orchestrator.parallelism.planner_setup import make_reallocation
from orchestrator.policies.parallelism.degree_reallocation import (
    DegreeReallocator,
    EndedTrajectory,
    expected_loads,
    format_degrees,
)
from orchestrator.policies.placement.worker_load import TrajectoryLoads, WorkerRates
from orchestrator.proxy.resize import Reshaped, engine_seats
from orchestrator.runtime import engine_cuts
from orchestrator.sim.simulated_run import simulate
from scripts.bench.virtual_run import run


def told(*said: int) -> TrajectoryLoads:
    """Trajectories that will be as long as these."""
    ended = [EndedTrajectory(length) for length in said]
    return expected_loads(ended, [], len(ended))


TAIL = told(400, *[20] * 12)  # one long trajectory
SHORT = told(*[20] * 40)


def rates(degree: int) -> WorkerRates:
    """Twice the devices make a token 1.5 times as fast, and every further sequence beside it three tenths of that slower."""
    alone = 1.0 / 1.5 ** (degree.bit_length() - 1)
    return WorkerRates((alone, 1.3 * alone))


def manager(start_seconds: float = 0.0, **keywords: Any) -> DegreeReallocator:
    return DegreeReallocator(4, (1, 2, 4), rates, start_seconds=start_seconds, **keywords)


def test_the_long_trajectory_gets_a_large_engine_and_the_short_ones_small_ones() -> None:
    found = manager().plan_next_step(TAIL, 100.0, 10)
    assert found.changes
    assert sum(found.degrees) == 4
    assert found.degrees[0] > 1
    assert found.gain == pytest.approx(100.0 * (1 - found.makespan / found.present))


@pytest.mark.parametrize(
    ("cost", "left", "changes"),
    [(0.0, 10, True), (90.0, 10, True), (500.0, 10, False), (90.0, 1, False), (0.0, 0, False)],
)
def test_a_change_is_made_only_where_it_gains_more_than_it_costs_in_the_steps_that_are_left(
    cost: float, left: int, changes: bool
) -> None:
    found = manager(cost).plan_next_step(TAIL, 100.0, left)
    assert 30.0 < found.gain < 80.0
    assert found.changes is changes
    assert found.cost == cost
    assert (found.degrees == (1, 1, 1, 1)) is not changes
    assert changes or "would gain" in found.reason


def test_what_changes_took_is_what_the_next_one_is_charged_with() -> None:
    policy = manager()
    first = policy.plan_next_step(TAIL, 100.0, 10)
    policy.confirm_change(first.degrees, 1000.0)
    assert policy.degrees == first.degrees
    assert not policy.plan_next_step(SHORT, 100.0, 10).changes
    policy.reject_change((1, 1, 1, 1), 2.0, "no memory")
    assert policy.cost == 501.0
    for _ in range(20):
        policy.confirm_change(policy.degrees, 0.001)
    again = policy.plan_next_step(SHORT, 100.0, 10)
    assert not again.changes
    assert again.reason == "1+1+1+1 did not come up: no memory"


def test_of_nothing_nothing_follows() -> None:
    found = manager().plan_next_step(told(), 100.0, 10)
    assert not found.changes
    assert found.degrees == (1, 1, 1, 1)


def test_the_next_step_is_expected_to_be_what_is_in_flight_and_more_of_what_has_ended() -> None:
    assert expected_loads([], [], 4).count == 0
    ended = [EndedTrajectory(said) for said in (9, 1, 5, 3)]

    def lengths(loads: TrajectoryLoads) -> list[float]:
        return [loads.longest(place, 1) for place in range(loads.count)]

    assert lengths(expected_loads(ended, [], 4)) == [9.0, 5.0, 3.0, 1.0]
    assert lengths(expected_loads(ended, [70.0, 80.0], 4)) == [80.0, 70.0, 9.0, 3.0]
    assert lengths(expected_loads(ended[:1], [70.0] * 9, 4)) == [70.0] * 4
    assert expected_loads(ended, [], 64).count == 64


def test_degrees_that_are_not_the_devices_are_refused() -> None:
    assert engine_seats((2, 1, 1), 4) == [2, 0, 1, 1]
    assert engine_seats(2, 4) == [2, 0, 2, 0]
    for wrong in ((2, 1), (3, 2), (4, 0), ()):
        with pytest.raises(ValueError, match="cannot be cut"):
            engine_seats(wrong, 4)
    with pytest.raises(ValueError, match="4 devices in all"):
        manager(degrees=(2, 1))


def _twins() -> Any:
    name = "planning_tests"
    found = importlib.util.spec_from_file_location(name, Path(__file__).with_name("test_step_planner.py"))
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    found.loader.exec_module(module)
    return module


def test_engines_whose_devices_stay_go_on_while_others_are_cut_anew() -> None:
    rig_of = _twins().Rig

    async def main() -> list[Reshaped]:
        rig = rig_of()
        await rig.start()
        rig.ask(12)
        await asyncio.sleep(0.33)
        done = [await rig.resizing.reshape((2, 1, 1))]
        assert [worker.ranks for worker in rig.workers] == [2, 0, 1, 1]
        assert rig.resizing.degrees == (2, 1, 1)
        assert [worker.starts for worker in rig.workers] == [1, 0, 0, 0]
        rig.ask(5, "u")
        await asyncio.sleep(0.2)
        done.append(await rig.resizing.reshape((2, 2)))
        assert [worker.starts for worker in rig.workers] == [1, 0, 1, 0]
        rig.workers[0].refuses = 1
        done.append(await rig.resizing.reshape((1, 1, 2)))
        assert [worker.ranks for worker in rig.workers] == [1, 1, 2, 0]
        rig.ask(6, "v")
        await rig.check()
        return done

    done = run(main())
    assert [item.error for item in done] == ["", "", ""]
    assert [item.tp for item in done] == [2, 2, 2]


def test_an_unequal_cut_that_does_not_come_up_is_taken_back_and_the_others_never_stopped() -> None:
    rig_of = _twins().Rig

    async def main() -> None:
        rig = rig_of()
        await rig.start()
        rig.workers[0].refuses = 1
        rig.ask(8)
        await asyncio.sleep(0.3)
        done = await rig.resizing.reshape((2, 1, 1))
        assert "worker-0 has no memory for TP 2" in done.error
        assert [worker.ranks for worker in rig.workers] == [1, 1, 1, 1]
        assert [worker.starts for worker in rig.workers] == [2, 1, 0, 0]
        await rig.check()

    run(main())


def tailed(*overrides: str) -> Config:
    """A workload with a long tail on four devices."""
    base = ["sim.costs=roofline", "sim.model=Qwen2.5-7B", "rollout.workers=4", "sim.grain=16", "run.steps=6"]
    base += ["rollout.engine.max_model_len=2048", "run.mode=sync_plus", "rollout.alpha=0", "sim.start_seconds=3.0"]
    base += ["rollout.groups_per_step=4", "rollout.group_size=8", "rollout.environments=32", "rollout.weights=relay"]
    base += [
        "rollout.trajectory_timeout=100000.0",
        "rollout.stall_timeout=9999.0",
        "evaluation.every=0",
        "evaluation.prompts=4",
    ]
    base += ["sim.tasks={t={response_tokens=2000.0, response_sigma=1.3, response_max=24000, turns_max=2, turns_min=1}}"]
    base += ["rollout.prediction.enabled=true", "rollout.placement.enabled=true"]
    return load_config(None, [*base, "rollout.placement.degrees.enabled=true", *overrides])


def events_of(result: Any, kind: str) -> list[dict[str, Any]]:
    return [event for event in map(json.loads, result.events.splitlines()) if event["kind"] == kind]


@pytest.mark.slow
def test_a_simulated_run_follows_the_resource_manager_pays_for_it_and_accounts_for_every_trajectory(
    tmp_path: Path,
) -> None:
    few = "rollout.placement.degrees.start=[2, 1, 1]"  # unequal degrees side by side
    result = simulate(tailed(few))
    decided, changes = events_of(result, "degrees"), events_of(result, "reshape")
    assert len(decided) == 6
    assert changes
    assert decided[0]["degrees"] == [2, 1, 1]
    assert all(not change["error"] and change["seconds"] >= 3.0 for change in changes)
    for before, after in itertools.pairwise(decided):
        assert after["degrees"] == before["next"]
        assert before["next"] == before["degrees"] or before["gain"] * 4 > before["cost"]
    assert decided[changes[0]["step"] + 1]["cost"] == changes[0]["seconds"]
    assert simulate(tailed(few)).events == result.events
    dear = simulate(tailed(few, "rollout.placement.degrees.start_seconds=1e6"))
    assert not events_of(dear, "reshape")
    assert all("costs 1e+06 s" in event["reason"] for event in events_of(dear, "degrees") if event["gain"] > 0)
    (tmp_path / "events.jsonl").write_bytes(result.events)
    (tmp_path / "ledger.jsonl").write_bytes(result.journal)
    (tmp_path / "config.json").write_text(tailed(few).model_dump_json())
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert "Degrees of parallelism" in page
    assert f"2+1+1 → {format_degrees(changes[0]['degrees'])}" in page
    assert result.summary["seconds"] < 0.95 * dear.summary["seconds"], "it is worth what it costs"


def test_who_else_cuts_or_lends_the_engines_is_one_clear_error() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.placement\.degrees\.enabled.*so does rollout\.planner"):
        tailed("rollout.planner.enabled=true")
    with pytest.raises(ConfigError, match=r"set rollout\.placement\.enabled to true too"):
        tailed("rollout.placement.enabled=false")
    with pytest.raises(ConfigError, match=r"degrees\.start.*must add up to rollout\.workers = 4"):
        tailed("rollout.placement.degrees.start=[2, 1]")
    with pytest.raises(ConfigError, match=r"sim\.degrees.*rollout\.placement\.degrees chooses them"):
        simulate(tailed("sim.degrees=[1, 1, 1, 1]"))
    config = tailed()
    with pytest.raises(
        ConfigError, match=r"resources\.devices_per_worker.*rollout\.placement\.degrees sets how many devices"
    ):
        engine_cuts.check(tailed("resources.pools={H800=8}", "resources.devices_per_worker=2"))
    with pytest.raises(ConfigError, match=r"placement\.profile.*cannot be read"):
        engine_cuts.check(tailed('rollout.placement.profile="none.json"'))
    with pytest.raises(ConfigError, match=r"rollout\.placement\.degrees\.speeds"):
        engine_cuts.check(config)
    given = tailed("rollout.placement.degrees.speeds={1=1.0, 2=1.7}")
    assert make_reallocation(given.rollout).options == (2, 1)
    assert make_reallocation(given.rollout, heads=3).options == (1,)
