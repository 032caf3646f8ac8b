"""Expert parallelism simulated: what uneven routing costs, and a planner that leaves it and comes back (RollPacker 7)."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.api import ConfigError, ExpertWorker
from orchestrator.config import Config, load_config
from orchestrator.observe.report.report_page import write_report
from orchestrator.policies.parallelism.engine_profile import PHASES, EngineLayout, EngineProfile, ProfilePoint
from orchestrator.policies.parallelism.parallelism_planner import ParallelismPlanner, StepLoad
from orchestrator.profiler.profile_file import ProfileFile, ProfileKey, load_profile
from orchestrator.sim.cost_model import LINK_EFFICIENCY, REDUCE_SECONDS, RooflineCosts
from orchestrator.sim.fault_injector import FaultInjector, faulty_workers
from orchestrator.sim.hardware import DEVICES, MODELS
from orchestrator.sim.paper_setups import load_scenario
from orchestrator.sim.resizable_worker import ResizableSimWorker, roofline_profile
from orchestrator.sim.simulated_cluster import ExpertRouting, costs_at_imbalance, engine_costs
from orchestrator.sim.simulated_run import SimResult, simulate
from orchestrator.sim.simulated_worker import SimWeights, SimWorker
from scripts.bench.papers.expert_parallelism import fixed
from scripts.bench.virtual_run import run

MIXTURE, H800 = MODELS["Qwen3-30B-A3B"], DEVICES["H800"]
SHORT = ("run.steps=6", "sim.expert_imbalance={0 = 1.0, 2 = 4.0}")
BASE = ("sim.costs=roofline", "sim.model=Qwen3-30B-A3B", "sim.tensor_parallel=4", "rollout.weights=relay")


def engine(tp: int, ep: int, imbalance: float = 1.0, **more: Any) -> RooflineCosts:
    return RooflineCosts(H800, MIXTURE, tp, expert_parallel=ep, imbalance=imbalance, **more)


@pytest.mark.parametrize(("tp", "ep"), [(2, 2), (4, 2), (4, 4), (8, 8)])
def test_an_engine_with_whole_experts_is_slower_the_more_uneven_they_are_and_one_with_slices_is_not(
    tp: int, ep: int
) -> None:
    uneven = [engine(tp, ep, imbalance) for imbalance in (1.0, 1.2, 1.5, 1.9, float(ep))]
    for tokens in (1, 8, 64, 512):
        steps = [costs.decode(tokens)[0] for costs in uneven]
        assert all(one <= two for one, two in itertools.pairwise(steps))
        assert steps[0] < steps[-1]
    prefills = [costs.prefill(8192, 8192**2 / 2, 8) for costs in uneven]
    assert all(one < two for one, two in itertools.pairwise(prefills))
    assert engine(tp, ep, 100.0).decode(64) == engine(tp, ep, float(ep)).decode(64), (
        "no device has more than all tokens"
    )
    assert engine(tp, 1, 4.0).decode(64) == engine(tp, 1).decode(64)
    assert engine(tp, ep).kv_tokens == engine(tp, 1).kv_tokens


def test_the_fullest_devices_arithmetic_and_traffic_by_hand() -> None:
    """A long prefill, where arithmetic binds: all of it but attention's is 2 operations a parameter and token."""
    tokens, flops = 8192, H800.flops * 4
    experts = MIXTURE.active_parameters - MIXTURE.shared_parameters
    even, full, slices = (costs._linear(tokens) for costs in (engine(4, 4), engine(4, 4, 3.0), engine(4, 1)))
    assert even == pytest.approx(2 * MIXTURE.active_parameters * tokens / flops)
    assert even == slices
    assert full - even == pytest.approx(2 * 2 * experts * tokens / flops)
    way = tokens * MIXTURE.hidden * 2 * 3 / 4 / (H800.nvlink_gb_s * 1e9 * LINK_EFFICIENCY)  # of all tokens, once
    reduce = REDUCE_SECONDS + 2 * way
    assert engine(4, 1)._reduce(tokens) == pytest.approx(48 * 2 * reduce)
    for imbalance in (1.0, 3.0):
        comes = 1 - (1 - imbalance / 4) ** 8  # share of the tokens with one of its eight experts on the fullest device
        there_and_back = 2 * (REDUCE_SECONDS + comes * way)
        assert engine(4, 4, imbalance)._reduce(tokens) == pytest.approx(48 * (reduce + there_and_back))


def test_a_few_tokens_wake_more_experts_of_the_fullest_device_and_many_wake_all_anyway() -> None:
    def slower(tokens: int) -> float:
        return engine(4, 4, 4.0)._linear(tokens) / engine(4, 4)._linear(tokens)

    assert slower(4) > 2.0
    assert slower(100) == pytest.approx(1.0, abs=0.01)


def test_slices_narrower_than_a_kernels_tile_are_filled_up_and_whole_experts_are_not() -> None:
    for tp, filled in ((1, 1.0), (2, 1.0), (4, 256 / 192), (8, 128 / 96)):
        plain, tiles = engine(tp, 1), engine(tp, 1, expert_tile=128)
        shared = 2 * MIXTURE.shared_parameters / (H800.bandwidth * tp)
        assert tiles._linear(64) - shared == pytest.approx(filled * (plain._linear(64) - shared))
        assert engine(tp, tp, expert_tile=128)._linear(64) == plain._linear(64)


@pytest.mark.parametrize(("ep", "why"), [(3, "must divide the 4 devices"), (4, "has 0 experts")])
def test_an_engine_that_cannot_be_cut_so_is_refused(ep: int, why: str) -> None:
    with pytest.raises(ConfigError, match=rf"sim\.expert_parallel = {ep}: .*{why}"):
        RooflineCosts(H800, MODELS["Qwen3-8B"], 4, expert_parallel=ep)


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["sim.expert_imbalance=0.9"], r"sim\.expert_imbalance\.0 = 0\.9: .*at least 1"),
        (["sim.expert_imbalance=nan"], r"sim\.expert_imbalance\.0 = nan"),
        (["sim.expert_imbalance=even"], r"sim\.expert_imbalance = 'even'.*table"),
        (["sim.expert_imbalance={-1 = 2.0}"], r"sim\.expert_imbalance\.-1"),
        (["sim.expert_imbalance={first = 2.0}"], r"sim\.expert_imbalance\.first"),
        (["sim.expert_unevenness=2"], r"sim\.expert_unevenness"),
        (["rollout.planner.expert=true"], r"rollout\.planner\.expert "),
        (["rollout.planner.experts=true"], r"rollout\.planner\.experts = True: .*rollout\.planner\.enabled to true"),
        (["sim.expert_parallel=0"], r"sim\.expert_parallel = 0"),
        (["sim.expert_tile=-1"], r"sim\.expert_tile = -1"),
    ],
)
def test_settings_of_experts_that_make_no_sense_are_refused_when_they_are_read(overrides: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        load_config(None, overrides)


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (("sim.costs=linear", "sim.expert_imbalance=2"), r"sim\.expert_imbalance.*linear cost model has no experts"),
        (("sim.model=Qwen3-8B", "sim.expert_parallel=4"), r"expert_parallel = 4: Qwen3-8B has no .*Qwen3-30B-A3B"),
        (("sim.model=Qwen3-8B", "sim.expert_tile=128"), r"sim\.expert_tile = 128: Qwen3-8B has no experts"),
        (
            ("sim.model=Qwen3-8B", "rollout.planner.enabled=true", "rollout.planner.experts=true"),
            r"rollout\.planner\.experts = True: Qwen3-8B has no experts",
        ),
        (("rollout.workers=1", "sim.expert_imbalance=5"), r"sim\.expert_imbalance = 5\.0: the fullest of 4 devices"),
        (("sim.expert_parallel=3",), r"sim\.expert_parallel = 3: must divide the 4 devices"),
        (
            ("rollout.workers=2", "sim.degrees=[4, 4]", "sim.expert_parallel=4"),
            r"expert_parallel = 4: sim\.degrees sets",
        ),
        (("rollout.planner.enabled=true", "sim.expert_parallel=4"), r"sim\.expert_parallel = 4: rollout\.planner sets"),
        (
            ("rollout.planner.enabled=true", "rollout.planner.experts=true"),
            r"sim\.tensor_parallel = 4: with rollout\.planner\.experts a worker is one device",
        ),
    ],
)
def test_what_cannot_be_simulated_of_experts_is_refused_before_anything_starts(
    overrides: tuple[str, ...], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        simulate(load_config(None, [*BASE, *overrides]))


def test_workers_say_how_uneven_their_weights_route_and_cost_what_that_makes_them() -> None:
    config = load_config(None, [*BASE, "sim.expert_parallel=4", "sim.expert_imbalance={2 = 3.0, 4 = 1.5}"])
    routing = ExpertRouting(config)
    assert [routing.imbalance_at(version) for version in range(6)] == [1.0, 1.0, 3.0, 3.0, 1.5, 1.5]
    constant = ExpertRouting(load_config(None, [*BASE, "sim.expert_imbalance=2.5"]))
    assert (constant.imbalance, constant.imbalance_at(7)) == (2.5, 2.5)

    async def seen() -> list[tuple[float, float]]:
        weights, found = SimWeights(), []
        worker = SimWorker("sim-0", config, weights)
        for version in (0, 2, 3, 4):
            weights.put(version)
            await worker.suspend()
            await worker.update(version)
            await worker.resume()
            found.append(((await worker.stats()).expert_imbalance, worker._costs.decode(8)[0]))
        await worker.close()
        return found

    even = engine_costs(config)
    assert run(seen()) == [(skew, costs_at_imbalance(even, skew).decode(8)[0]) for skew in (1.0, 3.0, 3.0, 1.5)]


def test_simulated_workers_may_have_whole_experts_behind_their_faults_too() -> None:
    config = load_config(None, [*BASE, "sim.tensor_parallel=1"])
    worker = ResizableSimWorker("sim-0", config, SimWeights())
    (faulty,) = faulty_workers([worker], FaultInjector(config, None, 0, {}))  # type: ignore[arg-type]
    assert isinstance(worker, ExpertWorker)
    assert isinstance(faulty, ExpertWorker)
    assert not isinstance(SimWorker("sim-0", config, SimWeights()), ExpertWorker)

    async def cut() -> None:
        await faulty.resize(4, 4)
        await worker.restart()
        await worker.close()

    run(cut())
    assert (faulty.ranks, faulty.expert_ranks) == (4, 4)
    assert worker._costs.decode(8) == engine_costs(config, "", 4, expert_ranks=4).decode(8)


# -- profile and rule


def table(*layouts: EngineLayout) -> EngineProfile:
    """A decode step takes 1 s at any size, at imbalance 3 of whole experts 2 s; a prefill half of that."""
    points = [
        ProfilePoint(phase, layout, batch, tokens, seconds * (1.0 if phase == "decode" else 0.5), imbalance=uneven)
        for phase in PHASES
        for layout in layouts
        for batch in (1, 8)
        for tokens in (16, 64)
        for uneven, seconds in ((1.0, 1.0), (3.0, 2.0))
        if uneven == 1.0 or layout.ep > 1
    ]
    return EngineProfile(points)


def test_a_profile_reads_routing_patterns_between_those_it_was_measured_at_and_beyond() -> None:
    slices, whole = EngineLayout(4), EngineLayout(4, 4)
    profile = table(slices, whole)
    assert [profile.decode_seconds(4, 32, whole, skew) for skew in (1.0, 2.0, 3.0, 4.0)] == [1.0, 1.5, 2.0, 2.5]
    assert profile.prefill_seconds(32, 4, whole, 2.0) == 0.75
    assert profile.decode_seconds(4, 32, slices, 3.0) == 1.0, "measured once: that counts for all"
    assert (profile.knows_routing(whole), profile.knows_routing(slices)) == (True, False)
    assert profile.rollout_seconds([10], 16, whole, 1, 3.0) == 2 * profile.rollout_seconds([10], 16, whole)
    assert profile.scaled(3.0).decode_seconds(4, 32, whole, 2.0) == 4.5
    outside = profile.extended(16, 128, whole, 6.0, 3.0)  # three times what was read of it
    assert [outside.decode_seconds(16, 128, whole, skew) for skew in (1.0, 3.0)] == [3.0, 6.0]
    assert outside.decode_seconds(8, 64, whole, 3.0) == 2.0
    with pytest.raises(ValueError, match="at least 1"):
        ProfilePoint("decode", whole, 1, 1, 1.0, imbalance=0.5)


def test_the_file_of_a_profile_keeps_the_routing_patterns(tmp_path: Path) -> None:
    profile, file = table(EngineLayout(2, 2)), ProfileFile(tmp_path / "p.json", ProfileKey("m", "e", "d"))
    for point in profile._points():
        file.add(point)
    file.save()
    again = load_profile(file.path).profile
    assert list(again._points()) == list(profile._points())


def test_the_rule_goes_by_what_the_profile_knows_of_uneven_routing_not_by_a_guess() -> None:
    """At an imbalance of 3 a guess of a half of each step would double it, as measured here; of 1 % nearly nothing."""
    slices, whole = EngineLayout(4), EngineLayout(4, 4)
    even = EngineProfile([replace(point, seconds=point.seconds * 1.2) for point in table(slices)._points()])
    profile = EngineProfile([*even._points(), *table(whole)._points()])
    for share in (0.01, 0.9):
        planner = ParallelismPlanner(4, [slices, whole], profile, expert_share=share)
        planner.confirm_change(whole, 1.0)
        took = profile.rollout_seconds([50] * 8, 16, whole, 1, 3.0)
        plan = planner.plan_next_step(StepLoad(1, took, [50] * 8, 16, imbalance=3.0))
        assert (plan.changes, plan.layout) == (True, slices)
        gained = took - profile.rollout_seconds([50] * 8, 16, slices)
        assert plan.gain == pytest.approx(gained)
        planner.confirm_change(slices, 1.0)
        back = planner.plan_next_step(StepLoad(1, took - gained, [50] * 8, 16, imbalance=1.2))
        assert back.layout == whole, "a little unevenness costs less than slices do"


def test_experts_are_looked_at_where_what_the_preemptions_ask_for_does_not_pay() -> None:
    slices, whole = EngineLayout(2), EngineLayout(2, 2)
    profile = EngineProfile([*table(slices, whole)._points(), *table(EngineLayout(4), EngineLayout(4, 4))._points()])
    planner = ParallelismPlanner(4, [slices, whole, EngineLayout(4), EngineLayout(4, 4)], profile)
    planner.confirm_change(whole, 0.0)
    took = profile.rollout_seconds([50] * 8, 16, whole, 2, 2.0)
    planner.plan_next_step(StepLoad(1, took, [50] * 8, 16, imbalance=1.0))
    planner.confirm_change(whole, 20.0)
    plan = planner.plan_next_step(
        StepLoad(9, took, [50] * 8, 16, imbalance=2.0)
    )  # twice as many devices: half as many engines
    assert plan.layout == slices
    assert plan.reason.startswith("preemptions rose from 1 to 9; but TP 4, EP 4 would gain")
    assert "experts: TP 2 is expected to be faster at an imbalance of 2" in plan.reason


def test_the_simulated_profile_knows_layouts_of_experts_at_several_imbalances() -> None:
    config = load_scenario("experts")
    profile = roofline_profile(config)
    assert EngineLayout(1) in profile.layouts
    assert {layout for layout in profile.layouts if layout.ep > 1} == {
        EngineLayout(2, 2),
        EngineLayout(4, 4),
        EngineLayout(8, 8),
    }
    costs = costs_at_imbalance(engine_costs(config, "", 4, expert_ranks=4), 2.0)
    fixed_seconds, growing = costs.decode(16)
    tokens = config.rollout.engine.max_model_len
    assert profile.decode_seconds(16, tokens, EngineLayout(4, 4), 2.0) == pytest.approx(
        fixed_seconds + growing * 16 * tokens
    )


# -- whole runs


def events_of(result: SimResult) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.events.splitlines()]


def rollouts(result: SimResult) -> list[float]:
    took = {one["step"]: one["end"] - one["start"] for one in events_of(result) if one.get("stage") == "get_batch"}
    return [took[step] for step in sorted(took)]


@pytest.fixture(scope="module")
def planned() -> tuple[Config, SimResult]:
    config = load_scenario("experts", SHORT)
    return config, simulate(config)


@pytest.mark.slow
def test_a_run_whose_experts_get_uneven_leaves_expert_parallelism_pays_for_it_and_is_faster(
    planned: tuple[Config, SimResult],
) -> None:
    config, result = planned
    events = events_of(result)
    plans = [one for one in events if one["kind"] == "plan"]
    changes = [one for one in events if one["kind"] == "reshape"]
    assert [(one["tp"], one["ep"], one["imbalance"]) for one in plans] == [
        *[(4, 4, 1.0)] * 2,
        (4, 4, 4.0),
        *[(4, 1, 4.0)] * 3,
    ], "only the experts change"
    assert [(one["step"], one["tp"], one["ep"], one["error"]) for one in changes] == [(2, 4, 1, "")]
    assert (plans[2]["next_tp"], plans[2]["next_ep"]) == (4, 1)
    assert "at an imbalance of 4" in plans[2]["reason"]
    stood = [one for one in events if one.get("stage") == "reshape"]
    assert stood[0]["end"] - stood[0]["start"] == pytest.approx(changes[0]["seconds"], abs=1e-5)
    assert changes[0]["seconds"] >= config.sim.start_seconds, "the change is charged, on the clock of the run"
    without = simulate(fixed(EngineLayout(4, 4), *SHORT))
    mine, theirs = rollouts(result), rollouts(without)
    assert mine[:3] == pytest.approx(theirs[:3]), "the same run until then"
    assert all(one < 0.95 * other for one, other in zip(mine[3:], theirs[3:], strict=True))
    assert sum(mine[3:]) + changes[0]["seconds"] < sum(theirs[3:]), "and what it cost is earned back"
    for one in (result, without):
        assert one.ledger["in_flight"] == 0
        assert one.violations == []
        assert one.unaccounted == 0


@pytest.mark.slow
def test_when_routing_is_even_again_it_comes_back() -> None:
    given = ["run.steps=5", "sim.expert_imbalance={0 = 4.0, 2 = 1.0}", "rollout.planner.calm_steps=3"]
    plans = [one for one in events_of(simulate(load_scenario("experts", given))) if one["kind"] == "plan"]
    assert [one["ep"] for one in plans] == [4, 1, 1, 4, 4]


@pytest.mark.usefixtures("undrawn")
def test_the_report_shows_changes_of_experts(planned: tuple[Config, SimResult], tmp_path: Path) -> None:
    config, result = planned
    (tmp_path / "events.jsonl").write_bytes(result.events)
    (tmp_path / "ledger.jsonl").write_bytes(result.journal)
    (tmp_path / "config.json").write_text(config.model_dump_json())
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert "TP 4, EP 4 → TP 4" in page
    assert "Imbalance" in page


@pytest.mark.parametrize("seed", [1, 3])
def test_with_faults_engines_with_experts_are_cut_anew_and_nothing_is_lost(seed: int) -> None:
    given = [f"run.seed={seed}", "run.steps=4", "sim.fault_rate=0.02", "rollout.worker_restarts=4"]
    given += ["rollout.environments=32", "rollout.groups_per_step=4", "sim.expert_imbalance={0 = 1.0, 1 = 4.0}"]
    given += ["rollout.stall_timeout=600", "rollout.trajectory_timeout=3600", "rollout.collective_timeout=20"]
    result = simulate(load_scenario("experts", given))
    assert result.ledger["in_flight"] == 0
    assert result.injected
    assert any(one["kind"] == "plan" and one["ep"] > 1 for one in events_of(result))


def test_settings_by_version_survive_the_way_through_a_runs_folder() -> None:
    config = load_scenario("experts")
    again = Config.model_validate(json.loads(config.model_dump_json()))
    assert again.sim.expert_imbalance == {0: 1.0, 6: 4.0, 14: 1.0}
    assert again == config
