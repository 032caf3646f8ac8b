"""Prefill and decode on different simulated devices, by the production path: one turn of two parts, KV over the link, nothing
lost, and what is refused."""

from __future__ import annotations

import json

import pytest

from orchestrator.api import ConfigError
from orchestrator.config import Config, load_config
from orchestrator.sim.cost_model import KV_SECONDS
from orchestrator.sim.hardware import MODELS
from orchestrator.sim.paper_setups import load_scenario
from orchestrator.sim.simulated_cluster import engine_costs
from orchestrator.sim.simulated_run import SimResult, simulate
from orchestrator.sim.simulated_speech import SplitSpeech
from orchestrator.sim.simulated_worker import SimWorker
from scripts.bench.papers.run_figures import measure

SMALL = ["run.steps=2", "rollout.environments=32", "rollout.groups_per_step=4", "sim.trainer_gpus=8", "sim.grain=1"]
SMALL += ["rollout.engine.max_model_len=8192", "sim.tasks.swe-bench.response_max=400"]
SMALL += ["sim.tasks.swe-bench.turns_min=3", "sim.tasks.swe-bench.turns_max=5"]
ON = ["rollout.kv_transfer.enabled=true", "rollout.disaggregation.enabled=true"]
FLEET = ["rollout.workers=4", "sim.fleet={H800=2, H20=2}"]


def apart(*overrides: str, prefill: str = "H800", decode: str = "H20") -> Config:
    classes = [f"rollout.disaggregation.prefill={prefill}", f"rollout.disaggregation.decode={decode}"]
    return load_scenario("rollart-swe", [*SMALL, *FLEET, *ON, *classes, *overrides])


def moves(result: SimResult) -> list[dict[str, object]]:
    return [event for event in map(json.loads, result.events.splitlines()) if event["kind"] == "kv_moved"]


def test_a_run_of_two_classes_accounts_for_every_turn_and_each_turn_moves_what_is_new() -> None:
    result = simulate(apart())
    assert (result.ledger["trained"], result.ledger["in_flight"]) == (2 * 32, 0)
    assert simulate(apart()).events == result.events, "the same bytes again"
    found = moves(result)
    to_decode = [event for event in found if event["worker"] in ("sim-2", "sim-3")]
    assert len(to_decode) >= 2 * 32 * 3  # every turn's context
    assert len(found) > len(to_decode)  # and what was said in the turns before, back
    first = found[0]
    assert first["seconds"] == pytest.approx(engine_costs(apart(), "H20").kv_move(int(str(first["tokens"]))), rel=1e-3)


def test_a_slower_class_or_link_makes_steps_longer() -> None:
    fast, slow = (
        measure(apart(f"sim.fleet={{{name}=1, H200=3}}", prefill=name, decode="H200")).step_seconds
        for name in ("H800", "H20")
    )
    assert slow > 1.02 * fast
    assert measure(apart("sim.kv_gb_s=0.05")).step_seconds > 1.02 * measure(apart()).step_seconds


def test_kv_takes_the_time_of_its_bytes_over_the_given_link() -> None:
    bytes_of = MODELS["Qwen3-8B"].kv_bytes * 100
    seconds = engine_costs(apart("sim.kv_gb_s=25"), "H20").kv_move(100)
    assert seconds - KV_SECONDS == pytest.approx(bytes_of / (0.8 * 25e9))


@pytest.mark.parametrize("workload", ["plain", "tasks"])
def test_the_first_token_of_a_turn_does_not_depend_on_how_many_are_asked_for(workload: str) -> None:
    config = apart() if workload == "tasks" else load_config(None, ["sim.response_tokens_mean=3"])
    speech = SplitSpeech(config, None)
    firsts = 0
    for number in range(200):
        context, whole = (2, 5, 9), speech.response((2, 5, 9), f"t{number}", 0, 64)
        assert speech.response(context, f"t{number}", 0, 1) == whole[:1]
        firsts += len(whole) > 1
    assert firsts > 100


@pytest.mark.parametrize("seed", range(4))
def test_with_faults_every_turn_of_two_parts_is_one_that_the_policy_said(seed: int) -> None:
    """The audit compares tokens and versions of all that is trained."""
    given = [f"run.seed={seed}", "run.steps=3", "rollout.workers=3", "sim.fault_rate=0.03", "rollout.stall_timeout=30"]
    given += [
        "rollout.first_token_timeout=30",
        "rollout.prepare_timeout=30",
        "rollout.update_timeout=30",
        "rollout.restart_timeout=120",
    ]
    given += [
        "rollout.environments=12",
        "rollout.groups_per_step=2",
        "rollout.group_size=3",
        "rollout.worker_restarts=1",
    ]
    given += [
        *ON,
        "rollout.disaggregation.prefill=H800",
        "rollout.disaggregation.decode=H20",
        "sim.fleet={H800=1, H20=2}",
    ]
    given += ["rollout.kv_transfer.min_tokens=0", "rollout.disaggregation.min_tokens=4", "evaluation.prompts=2"]
    result = simulate(load_config(None, given))
    assert result.ledger["trained"] >= 3 * 4
    assert not result.violations
    assert moves(result)


UNEQUAL = "rollout.disaggregation.degrees={vllm-0=4, vllm-2=2}"  # of 2P2D: a wide and a narrow engine in each pool


def test_engines_of_each_pool_have_the_devices_that_a_real_run_would_give_them(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: dict[str, float] = {}
    begin = SimWorker._begin_leap

    def seen(worker: SimWorker) -> None:
        steps[worker.name] = worker._costs.decode(1)[0]
        begin(worker)

    monkeypatch.setattr(SimWorker, "_begin_leap", seen)
    result = simulate(apart(UNEQUAL))
    assert (result.ledger["trained"], result.ledger["in_flight"]) == (2 * 32, 0)
    devices = {"sim-0": ("H800", 4), "sim-1": ("H800", 1), "sim-2": ("H20", 2), "sim-3": ("H20", 1)}
    assert steps == {
        name: engine_costs(apart(), kind, degree=degree).decode(1)[0] for name, (kind, degree) in devices.items()
    }
    assert result.events == simulate(apart("sim.degrees=[4, 1, 2, 1]")).events, "the simulator's own key says the same"


def test_the_longest_go_to_the_wide_engine_of_the_decode_pool() -> None:
    heddle = [
        "rollout.prediction.enabled=true",
        "rollout.prediction.predictor=oracle",
        "rollout.placement.enabled=true",
    ]
    heddle += ['rollout.routing.affinity={default="H20"}', UNEQUAL]  # placement is over the pool that decodes
    given = apart(*heddle)
    said: dict[str, list[int]] = {}
    result = simulate(
        given, watch=lambda request, done: said.setdefault(request.trajectory_id, []).append(len(done.token_ids))
    )
    assert (result.ledger["trained"], result.ledger["in_flight"]) == (2 * 32, 0)
    where: dict[str, set[str]] = {}
    for event in moves(result):
        where.setdefault(str(event["trajectory"]), set()).add(str(event["worker"]))
    wide = [sum(said[name]) for name, workers in where.items() if "sim-2" in workers and name in said]
    narrow = [
        sum(said[name]) for name, workers in where.items() if workers <= {"sim-3", "sim-0", "sim-1"} and name in said
    ]
    assert narrow
    assert sum(wide) / len(wide) > sum(narrow) / len(narrow)


def test_degrees_that_are_named_twice_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"disaggregation\.degrees.*leave one of the two out"):
        simulate(apart(UNEQUAL, "sim.degrees=[4, 1, 2, 1]"))
    with pytest.raises(ConfigError, match=r"name degrees in rollout\.disaggregation\.degrees"):
        apart(
            "rollout.prediction.enabled=true",
            "rollout.placement.enabled=true",
            "rollout.placement.degrees.enabled=true",
        )


def test_tokens_that_stand_for_several_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"sim\.grain"):
        simulate(apart("sim.grain=16"))


def test_a_class_that_the_fleet_lacks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"H200"):
        simulate(apart(decode="H200"))
