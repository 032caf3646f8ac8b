"""Prefill and decode on different simulated devices: what is computed where, what crosses the link, and what is refused."""

import pytest

from orchestrator.api import ConfigError
from orchestrator.config import Config
from orchestrator.sim.disaggregated import CLUSTER_LINK_GB_S, PrefillPool
from orchestrator.sim.hardware import MODELS
from orchestrator.sim.run import simulate
from orchestrator.sim.setups import measure, scenario

SMALL = ["run.steps=2", "rollout.environments=32", "rollout.groups_per_step=4", "sim.trainer_gpus=8"]
SMALL += ["sim.tasks.swe-bench.turns_min=4", "sim.tasks.swe-bench.turns_max=6"]


def apart(*overrides: str) -> Config:
    given = ["rollout.workers=2", "sim.fleet={H20=2}", "sim.prefill={H800=2}"]
    return scenario("rollart-swe", [*SMALL, *given, *overrides])


def test_a_trajectorys_later_prompts_cost_only_what_is_new_in_them_and_wait_for_the_engine_that_holds_it() -> None:
    pool = PrefillPool(apart())
    first = pool.prefill("a", 500, 0.0)
    assert pool.prefill("b", 500, 0.0) == pytest.approx(first), "on the other engine"
    busy = pool.busy_seconds
    again = pool.prefill("a", 520, first)
    assert 0 < pool.busy_seconds - busy < 0.5 * first
    assert pool.prefill("a", 560, first) > again, "behind what its engine has to do"


def test_a_history_that_is_written_anew_is_prefilled_anew() -> None:
    pool = PrefillPool(apart("sim.tasks.swe-bench.reuse=0"))
    first = pool.prefill("a", 500, 0.0, "swe-bench")
    assert pool.prefill("a", 500, first, "swe-bench") == pytest.approx(2 * first)


def test_a_transfer_takes_the_kv_of_its_tokens_over_the_link() -> None:
    config = apart()
    bytes_of = MODELS["Qwen3-8B"].kv_bytes * config.sim.grain * 100
    assert PrefillPool(config).transfer(100) == pytest.approx(bytes_of / (0.8e9 * CLUSTER_LINK_GB_S))
    assert PrefillPool(config).transfer(0) == 0.0


def test_a_run_with_prefill_elsewhere_accounts_for_everything_and_a_slower_prefill_shows() -> None:
    result = simulate(apart())
    assert result.ledger["trained"] == 2 * 32
    assert result.ledger["in_flight"] == 0
    assert simulate(apart()).events == result.events, "the same bytes again"
    fast, slow = (measure(apart(f"sim.prefill={{{name}=1}}")).step_seconds for name in ("H800", "H20"))
    assert slow > fast


@pytest.mark.parametrize("override", ["sim.costs=linear", "rollout.planner.enabled=true"])
def test_what_cannot_be_played_apart_is_refused(override: str) -> None:
    with pytest.raises(ConfigError, match=r"sim\.prefill"):
        simulate(apart(override))
