"""What a run's degrees begin with: those for the lengths that it expects, and after a resume those that it had."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest

from orchestrator.api import ConfigError
from orchestrator.config import Config, load_config
from orchestrator.parallelism.planner_setup import make_reallocation, rates_of_degree, rates_of_workers
from orchestrator.policies.parallelism.degree_reallocation import DegreeReallocator, prior_loads
from orchestrator.policies.parallelism.engine_profile import EngineLayout, ProfilePoint
from orchestrator.policies.placement.worker_load import WorkerRates
from orchestrator.profiler.profile_file import ProfileFile, ProfileKey, model_name
from orchestrator.proxy.worker_state import WorkerState
from orchestrator.runtime import engine_cuts
from orchestrator.sim.simulated_run import simulate
from scripts.bench.micro.ledger_faults import config_of

DEGREES = "rollout.placement.degrees"


def config(*overrides: str) -> Config:
    base = ["rollout.workers=4", "rollout.prediction.enabled=true", "rollout.placement.enabled=true"]
    base += [f"{DEGREES}.enabled=true", f"{DEGREES}.speeds={{1=1.0, 2=1.9, 4=3.7}}", "rollout.groups_per_step=1"]
    return load_config(None, [*base, "rollout.group_size=4", "rollout.environments=4", *overrides])


def rates(degree: int) -> WorkerRates:
    alone = 1.0 / 1.5 ** (degree.bit_length() - 1)
    return WorkerRates((alone, 1.3 * alone))


def test_what_is_expected_has_the_mean_and_the_spread_that_were_named() -> None:
    loads = prior_loads(200.0, 1.0, 4096, 100_000.0)
    lengths = [loads.longest(place, 1) for place in range(loads.count)]
    assert sum(lengths) / len(lengths) == pytest.approx(200.0, rel=0.03)
    assert lengths[0] > 20 * lengths[2048]
    assert {loads.longest(place, 1) for place in range(4) for loads in (prior_loads(50.0, 0.0, 4),)} == {50.0}
    assert max(prior_loads(200.0, 1.0, 4096, 1000.0).longest(0, 1) for _ in range(1)) <= 1000.0


def test_a_run_begins_with_the_degrees_for_what_it_expects() -> None:
    assert make_reallocation(config().rollout).degrees == (1, 1, 1, 1)
    assert make_reallocation(config(f"{DEGREES}.start=[2, 2]").rollout).degrees == (2, 2)
    few = make_reallocation(config(f"{DEGREES}.expected_tokens=500", f"{DEGREES}.expected_sigma=2").rollout)
    assert few.degrees[0] == 4, "four of very different lengths: the longest is what counts"
    many = make_reallocation(
        config(f"{DEGREES}.expected_tokens=500", f"{DEGREES}.speeds={{1=1.0, 2=1.0, 4=1.0}}").rollout
    )
    assert many.degrees == (1, 1, 1, 1), "wider engines are no faster"
    with pytest.raises(ConfigError, match=r"expected_tokens.*leave one of them out"):
        config(f"{DEGREES}.start=[2, 2]", f"{DEGREES}.expected_tokens=500")


def test_degrees_that_differ_need_not_divide_the_devices() -> None:
    named = make_reallocation(config("rollout.workers=3", f"{DEGREES}.start=[2, 1]").rollout)
    assert (named.options, named.degrees) == ((2, 1), (2, 1))
    few = config("rollout.workers=3", f"{DEGREES}.expected_tokens=500", f"{DEGREES}.expected_sigma=2")
    assert make_reallocation(few.rollout).degrees == (2, 1)
    assert make_reallocation(few.rollout, heads=3).degrees == (1, 1, 1), "vLLM cuts whole heads"


def test_the_state_of_the_resource_manager_survives_json_and_is_refused_where_it_does_not_fit() -> None:
    policy = DegreeReallocator(4, (1, 2, 4), rates)
    policy.confirm_change((2, 1, 1), 7.0)
    state = json.loads(json.dumps(policy.state()))
    again = DegreeReallocator(4, (1, 2, 4), rates)
    assert again.restore(state)
    assert (again.degrees, again.cost) == ((2, 1, 1), 7.0)
    again.confirm_change((2, 2), 1.0)
    assert again.cost == 4.0, "it was measured before"
    for other in (DegreeReallocator(8, (1, 2, 4), rates), DegreeReallocator(4, (1, 4), rates)):
        before = other.degrees
        assert not other.restore(state)
        assert other.degrees == before


def test_engines_of_a_resumed_run_start_with_the_degrees_that_it_had() -> None:
    kept = {"degrees": [2, 1, 1], "cost": 3.0, "measured": True}

    async def ranks(found: dict[str, Any] | None) -> tuple[int, ...]:
        async def nobody(name: str, arguments: dict[str, Any]) -> Any:
            raise AssertionError(name)

        cut = await engine_cuts.engine_cuts(config(), None, "", {"num_attention_heads": 8}, nobody, found)  # type: ignore[arg-type]
        return cut.ranks

    assert asyncio.run(ranks(kept)) == (2, 0, 1, 1)
    assert asyncio.run(ranks(None)) == (1, 1, 1, 1)
    assert asyncio.run(ranks({**kept, "degrees": [8]})) == (1, 1, 1, 1), "of other devices"


@pytest.mark.slow
def test_killed_runs_go_on_with_the_degrees_of_their_checkpoint_and_lose_nothing() -> None:
    resumed = other = 0
    for seed in range(200):
        given = config_of(seed)
        if not given.rollout.placement.degrees.enabled or (resumed >= 6 and other):
            continue
        result = simulate(given)
        assert not result.unaccounted
        events = [json.loads(line) for line in result.events.splitlines()]
        lives = [number for number, event in enumerate(events) if event["kind"] == "run_start"]
        start = make_reallocation(given.rollout).degrees
        for begun, after in pairwise([*lives, len(events)]):
            step, life = events[begun]["resumed_from"], events[begun:after]
            first = next((event["degrees"] for event in life if event["kind"] == "degrees"), None)
            if step is None or first is None:
                continue
            before = [
                event for event in events[:begun] if event["kind"] == "degrees" and event["step"] in (step - 1, step)
            ]
            had = {tuple(one) for event in before for one in (event["degrees"], event["next"])} or {start}
            assert tuple(first) in had
            resumed += 1
            other += start not in had
    assert resumed
    assert other, "some had other degrees than those that a run begins with"


@pytest.mark.parametrize(
    ("has", "lacks", "overrides"),
    [
        pytest.param(2, 1, (), id="engines that stay as they are"),
        pytest.param(1, 2, ("rollout.planner.enabled=true", "rollout.weights=relay"), id="engines of the planner"),
    ],
)
def test_a_placement_profile_that_lacks_a_tp_of_the_engines_is_refused_before_anything_starts(
    tmp_path: Path, has: int, lacks: int, overrides: tuple[str, ...]
) -> None:
    file = ProfileFile(tmp_path / "p.json", ProfileKey("model", "engine", "device"))
    for phase in ("prefill", "decode"):
        point = ProfilePoint(phase, EngineLayout(has), 1, 16, 0.01)
        file.points[phase, point.layout, 1, 16] = point
    file.save()
    given = config(f"{DEGREES}.enabled=false", f'rollout.placement.profile="{file.path}"', *overrides)
    refusal = (
        rf"rollout\.placement\.profile.*TP {lacks}.*the profile has only TP {has}: measure it with `rl-coserve profile`"
    )
    with pytest.raises(ConfigError, match=refusal):
        simulate(given)
    if not given.rollout.reshapes:
        with pytest.raises(ConfigError, match=refusal):
            engine_cuts.check(given)


def test_a_placement_profile_is_asked_for_the_degree_that_fixed_engines_have(tmp_path: Path) -> None:
    """A model that needs four devices was never profiled on one."""
    file = ProfileFile(tmp_path / "p.json", ProfileKey("model", "engine", "device"))
    for phase in ("prefill", "decode"):
        file.add(ProfilePoint(phase, EngineLayout(4), 1, 16, 0.01))
    file.save()
    fixed = (f"{DEGREES}.enabled=false", "rollout.engine.tensor_parallel_size=4", "rollout.engine.max_num_seqs=8")
    given = config(*fixed, f'rollout.placement.profile="{file.path}"', 'rollout.served=["http://127.0.0.1:1"]')
    engine_cuts.check(given)
    rates = rates_of_workers([WorkerState(cast(Any, object()), 0)], rates_of_degree(given.rollout), 4)
    assert rates(0).slots == 8, "a server, of which nobody says how many devices it has"
    one = ProfileFile(tmp_path / "one.json", file.key)
    for phase in ("prefill", "decode"):
        one.add(ProfilePoint(phase, EngineLayout(1), 1, 16, 0.01))
    one.save()
    with pytest.raises(ConfigError, match=r"TP 4.*the profile has only TP 1"):
        engine_cuts.check(config(*fixed, f'rollout.placement.profile="{tmp_path / "one.json"}"'))


def test_a_profile_with_engines_wider_than_a_node_is_refused_over_nodes(tmp_path: Path) -> None:
    file = ProfileFile(tmp_path / "p.json", ProfileKey("model", "engine", "device"))
    for tp in (1, 4):
        for phase in ("prefill", "decode"):
            file.add(ProfilePoint(phase, EngineLayout(tp), 1, 16, 0.01 / tp))
    file.save()
    nodes = ["ray.address=auto", "resources.devices_per_server=2", f'rollout.placement.profile="{file.path}"']
    with pytest.raises(ConfigError, match="= 2: leave out larger ones") as refused:
        engine_cuts.check(config(*nodes, f"{DEGREES}.speeds={{}}"))
    assert (refused.value.field, refused.value.value) == ("rollout.placement.profile", 4)


def test_a_profile_for_caps_that_is_not_there_or_lacks_the_runs_engines_is_refused_before_anything_starts(
    tmp_path: Path,
) -> None:
    given = config(f"{DEGREES}.enabled=false", f'rollout.routing.profile="{tmp_path / "p.json"}"')
    with pytest.raises(ConfigError, match=r"rollout\.routing\.profile.*cannot be read"):
        engine_cuts.check(given)
    ProfileFile(tmp_path / "p.json", ProfileKey("model", "engine", "device")).save()
    with pytest.raises(ConfigError, match=r"rollout\.routing\.profile.*lacks the run's engines with 1 devices"):
        engine_cuts.check(given)


def test_profiles_that_nobody_reads_are_not_asked_for(tmp_path: Path) -> None:
    off = ["rollout.placement.enabled=false", f"{DEGREES}.enabled=false"]
    given = config(*off, 'rollout.placement.profile="none.json"', 'rollout.planner.profile="none.json"')

    async def nobody(name: str, arguments: dict[str, Any]) -> Any:
        raise AssertionError(name)

    cut = asyncio.run(engine_cuts.engine_cuts(given, None, "", {"num_attention_heads": 8}, nobody))  # type: ignore[arg-type]
    assert cut.ranks == ()


@pytest.mark.parametrize(
    ("key", "more"),
    [
        ("rollout.placement.profile", ()),
        ("rollout.routing.profile", ()),
        ("rollout.planner.profile", ("rollout.planner.enabled=true", "rollout.placement.enabled=false")),
    ],
)
def test_a_profile_of_another_device_is_refused_before_an_engine_starts(
    key: str, more: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["A"], "num_hidden_layers": 1, "hidden_size": 8}')
    here = {"engine": "vLLM 0.32.0", "device": "CPU X x 1"}
    file = ProfileFile(tmp_path / "p.json", ProfileKey(model_name(tmp_path, "float32"), "vLLM 0.32.0", "H100 x 1"))
    for phase in ("prefill", "decode"):
        file.points[phase, EngineLayout(1), 1, 16] = ProfilePoint(phase, EngineLayout(1), 1, 16, 0.01)
    file.save()
    given = config(f"{DEGREES}.enabled=false", "model.dtype=float32", f'{key}="{file.path}"', *more)

    async def function(name: str, arguments: dict[str, Any]) -> Any:
        return here

    def cut() -> engine_cuts.EngineCuts:
        return asyncio.run(engine_cuts.engine_cuts(given, None, str(tmp_path), {"num_attention_heads": 8}, function))  # type: ignore[arg-type]

    with pytest.raises(ConfigError, match="its device is 'H100 x 1', here it is 'CPU X x 1'") as refused:
        cut()
    assert refused.value.field == key
    here["device"] = "H100 x 1"
    if not more:
        cut()
