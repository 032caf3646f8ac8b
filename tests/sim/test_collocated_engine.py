"""A serving engine that prefills and decodes on one device, in virtual time: chunks, tokens between them, what rollouts get."""

from __future__ import annotations

import asyncio
import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from orchestrator.api import ConfigError
from orchestrator.policies.serving.admission import Admission, Slo
from orchestrator.policies.serving.kv_sharing import SharingRules
from orchestrator.sim import hardware
from orchestrator.sim.coserving.borrowed_fleet import borrowed_of
from orchestrator.sim.coserving.serving_engine import CollocatedEngine, RolloutDemand, ServedLatencies, UserRequest
from orchestrator.sim.cost_model import RooflineCosts
from orchestrator.sim.paper_setups import load_scenario
from orchestrator.sim.simulated_run import simulate
from scripts.bench.virtual_run import run

COSTS = RooflineCosts(hardware.device("H800"), hardware.model("Qwen2.5-7B"))
SLO = Slo(0.5, 0.15)
STEP = 0.02  # of rollouts
REST = STEP / 2  # of the step under way when a prompt comes
Load = list[tuple[float, int, int]]


class Rollouts:
    """A tenant that always has a step of ``STEP`` seconds to compute; under way whenever it may."""

    pages = 0

    def __init__(self) -> None:
        self.granted, self.at = 0.0, 0.0
        self.computed = 0.0

    def demand(self) -> RolloutDemand:
        return RolloutDemand(0, 4, STEP)

    def set_share(self, share: float) -> None:
        now = asyncio.get_running_loop().time()
        self.computed += self.granted * (now - self.at)
        self.granted, self.at = share, now

    def residual_seconds(self) -> float:
        return REST if self.granted > 0.01 else 0.0

    def set_room(self, pages: int) -> None:
        del pages


def play(
    load: Load, mode: str = "", chunk: int = 2048, seconds: float = 60.0
) -> tuple[ServedLatencies, float, CollocatedEngine]:
    """``mode``: of admission, "": nobody beside it. What users saw, and device seconds of rollouts."""

    async def main() -> tuple[ServedLatencies, float, CollocatedEngine]:
        served = ServedLatencies()
        rules = SharingRules(10_000, headroom=0.2)
        engine = CollocatedEngine("s", "both", COSTS, SLO, rules, served, lambda _: None, chunk=chunk)
        tenant = Rollouts()
        if mode:
            engine.tenant = tenant
            engine.admission = Admission(lambda tokens: STEP, lambda batch: STEP, mode=mode)  # type: ignore[arg-type]
            engine.refresh()
        loop = asyncio.get_running_loop()
        for at, prompt, answer in load:
            await asyncio.sleep(max(0.0, at - loop.time()))
            engine.add(UserRequest(loop.time(), prompt, answer))
        await asyncio.sleep(seconds)
        tenant.set_share(0.0)
        engine.close()
        return served, tenant.computed, engine

    return run(main())


def first_tokens(load: Load, served: ServedLatencies) -> list[float]:
    """When each prompt has its own; ``load``: by time of arrival."""
    return [at + ttft for (at, _, _), ttft in zip(load, served.ttft, strict=True)]


def step(batch: int, context: float) -> float:
    fixed, growing = COSTS.decode(batch)
    return fixed + growing * context * batch


def test_a_prompt_is_computed_in_chunks_and_a_sequence_that_decodes_has_a_token_with_each() -> None:
    served, _, engine = play([(0.0, 100, 400), (1.0, 5000, 1)], chunk=1001)
    assert len(served.ttft) == 2
    assert len(served.tpot) == 1
    pairs = [((part + 1000) ** 2 - part**2) / 2 for part in range(0, 5000, 1000)]
    chunks = sum(COSTS.prefill(1000, each, 1) for each in pairs)
    assert chunks + 5 * step(1, 200) < served.ttft[1] < chunks + 6 * step(1, 300), "five steps, and a part of one"
    apart, _, _ = play([(0.0, 100, 400)])
    assert served.tpot[0] == pytest.approx(apart.tpot[0] + chunks / 399, rel=0.01)
    assert engine.pages == 0


def test_smaller_chunks_cost_the_prompt_more_steps_and_never_its_tokens() -> None:
    ttft = [play([(0.0, 8000, 1)], chunk=chunk)[0].ttft[0] for chunk in (8192, 4096, 1024, 512)]
    assert ttft == sorted(ttft)
    assert ttft[0] == pytest.approx(COSTS.decode(0)[0] + COSTS.prefill(8000, 8000**2 / 2, 0))


LOADS = st.lists(st.tuples(st.floats(0.0, 0.3), st.integers(10, 9000), st.integers(1, 60)), min_size=1, max_size=40)


@settings(max_examples=50)
@given(LOADS, st.sampled_from(("", "dual", "ttft", "tpot", "none")))
def test_every_request_is_answered_once_whatever_arrives(load: Load, mode: str) -> None:
    arrivals, at = [], 0.0
    for gap, prompt, answer in load:
        at += gap if gap > 0.1 else 0.0
        arrivals.append((at, prompt, answer))
    served, _, engine = play(arrivals, mode)
    assert len(served.ttft) == len(load)
    assert len(served.tpot) == sum(answer > 1 for _, _, answer in load)
    assert engine.load == 0
    assert min(served.ttft) > 0


@settings(max_examples=50)
@given(LOADS, st.sampled_from(("dual", "ttft")))
@example([(0.0, 6145, 1), (0.15625, 685, 1)], "dual")  # its first prompt waits for 0.0200039 s more than undisturbed
@example([(0.0, 7138, 1), (0.16108, 454, 1)], "ttft")
@example([(0.0, 4173, 1), (0.103, 5767, 1)], "dual")
@example([(0.0, 8194, 1), (0.2121, 8129, 1)], "ttft")  # 0.051 s
@example([(0.0, 6316, 1), (0.15378, 676, 1), (0.0, 164, 1)], "dual")
def test_a_burst_of_prompts_waits_for_one_rollout_step_at_most(load: Load, mode: str) -> None:
    """First tokens come exactly when a device of serving's own would make them that is held once a burst, for the rest of
    the rollout step under way. Against a device that nobody holds there is no such bound for each prompt: the last chunk of
    one that is held shares its step with prompts that came meanwhile, as a stock engine fills its steps, and their tokens
    take time, too."""
    arrivals, at = [], 0.0
    for gap, prompt, _ in load:
        at += gap if gap > 0.1 else 0.0
        arrivals.append((at, prompt, 1))
    beside, computed, _ = play(arrivals, mode)
    held, until, idle = [], 0.0, -1.0
    for (at, prompt, _), ttft in zip(arrivals, beside.ttft, strict=True):
        if at > idle:  # a burst begins
            until = at + REST
        held.append((max(at, until), prompt, 1))
        idle = at + ttft
    apart, _, _ = play(held)
    assert first_tokens(arrivals, beside) == pytest.approx(first_tokens(held, apart), rel=0.0, abs=1e-6)
    assert computed > 50.0


@pytest.mark.parametrize("mode", ["dual", "ttft", "tpot", "none"])
def test_with_slack_one_rollout_step_stands_between_two_tokens(mode: str) -> None:
    load: Load = [(0.0, 100, 1000)]
    served, computed, _ = play(load, mode)
    apart, _, _ = play(load)
    assert served.tpot[0] == pytest.approx(apart.tpot[0] + STEP, rel=0.02)
    assert computed == pytest.approx(60.0 - 1000 * apart.tpot[0], rel=0.05), "what serving leaves"


def test_a_request_without_slack_between_its_tokens_keeps_rollouts_out_unless_only_prompts_count() -> None:
    async def main(mode: str) -> float:
        slo = Slo(0.5, 0.01)  # less than two of its steps
        engine = CollocatedEngine(
            "s", "both", COSTS, slo, SharingRules(9000), ServedLatencies(), lambda _: None, chunk=2048
        )
        tenant = Rollouts()
        engine.tenant, engine.admission = tenant, Admission(lambda tokens: STEP, lambda batch: STEP, mode=mode)  # type: ignore[arg-type]
        engine.add(UserRequest(0.0, 100, 100_000))
        await asyncio.sleep(20.0)
        state = engine.state()
        assert state.busy
        assert not state.waiting
        assert math.isinf(state.ttft_slack)
        assert state.tpot_slack < 0.01
        tenant.set_share(0.0)
        engine.close()
        return tenant.computed

    assert run(main("dual")) < 0.001
    assert run(main("ttft")) > 5.0


def test_a_run_borrows_engines_that_do_both_and_autoscaling_of_them_is_refused() -> None:
    given = ["run.steps=2", "rollout.environments=48", "rollout.groups_per_step=3", "rollout.workers=1"]
    given += ["sim.tasks.frozenlake.response_tokens=300", "sim.borrowed.serving=3", "sim.borrowed.workers=3"]
    given.append("sim.borrowed.phases=collocated")
    found = simulate(load_scenario("rose", given)).summary["borrowed"]
    assert found["generated"] > 0
    assert found["both_busy"] > 0
    assert found["ttft_late"] < 0.01
    with pytest.raises(ConfigError) as caught:
        borrowed_of(load_scenario("rose", [*given, "sim.borrowed.how=autoscale"]))
    assert caught.value.field == "sim.borrowed.phases"
