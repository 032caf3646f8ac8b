"""The config's words about routing reach the router, wrong ones are one clear error, and whole runs keep to them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from orchestrator.api import ConfigError, GenerationRequest
from orchestrator.config import load_config
from orchestrator.config.rollout_keys import RoutingSection
from orchestrator.policies.parallelism.engine_profile import EngineLayout, EngineProfile, EngineShape, ProfilePoint
from orchestrator.proxy import router_setup
from orchestrator.sim.simulated_run import simulate
from orchestrator.sim.simulated_worker import SimWorker

NAMES = ("vllm-0", "vllm-1", "http://127.0.0.1:1")


def resolved(
    *overrides: str, borrows: bool = True, profile: EngineProfile | None = None
) -> tuple[int | None, int | None]:
    settings = load_config(None, ["rollout.workers=2", "rollout.engine.max_num_seqs=64", *overrides]).rollout
    routing = router_setup.with_caps(settings, borrows, profile)
    return routing.cap, routing.served_cap


def test_dedicated_engines_are_filled_first_wherever_others_are_borrowed() -> None:
    assert resolved() == (16, 16), "ROSE, appendix A"
    assert resolved("rollout.engine.tensor_parallel_size=2") == (32, 16), "a device"
    assert resolved("rollout.engine.max_num_seqs=8") == (8, 16), (
        "what an engine does not compute at once waits for nothing there"
    )
    assert resolved(borrows=False) == resolved('rollout.routing.policy="round-robin"', borrows=False) == (0, 0)
    assert resolved("rollout.routing.cap=0", "rollout.routing.served_cap=4") == (0, 4), "what the config says counts"
    placed = ("rollout.prediction.enabled=true", "rollout.placement.enabled=true")
    assert resolved(*placed) == (0, 0), "placement says where a trajectory goes"

    routing = router_setup.with_caps(load_config(None, ["rollout.workers=2"]).rollout, True)
    router = router_setup.planned_router(routing, NAMES, ("", "", ""), (False, False, True))
    for worker in range(3):
        router.open_worker(worker)
    for number in range(33):
        router.queue_turn(f"{number}", f"{number}", "maths")
    granted = [router.grant_turn() for _ in range(33)]
    assert [one and one[1] for one in granted].count(2) == 1
    assert granted[-1] == ("32", 2), "the first turn that dedicated ones have no room for"


def test_a_wide_engine_may_have_more_turns_than_a_narrow_one_beside_it() -> None:
    groups = "rollout.engines=[{count=2, max_num_seqs=64}, {count=1, tensor_parallel_size=4, max_num_seqs=48}]"
    settings = load_config(None, ["rollout.workers=3", groups]).rollout
    caps = router_setup.engine_caps(settings, True)
    assert [caps(f"vllm-{number}") for number in range(5)] == [16, 16, 48, 16, 48], (
        "16 a device, what it computes at most"
    )
    names = ("vllm-0", "vllm-1", "vllm-2", "http://127.0.0.1:1")
    routing = router_setup.with_caps(settings, True)
    router = router_setup.planned_router(routing, names, ("",) * 4, (False, False, False, True), caps=caps)
    assert [router.cap_of(worker) for worker in range(4)] == [16, 16, 48, 16]
    assert router_setup.engine_caps(settings, False)("vllm-2") == 0
    one, four = EngineLayout(), EngineLayout(4)
    points = [
        ProfilePoint("decode", layout, batch, 64, 1.0 + batch / (1 if layout == one else 1000))
        for layout in (one, four)
        for batch in (1, 2, 4, 8, 16, 32)
    ]
    profile = EngineProfile(points, [EngineShape(layout, 1.0, 1 << 20, 1, 1.0) for layout in (one, four)])
    caps = router_setup.engine_caps(settings, True, profile)
    assert caps("vllm-0") < caps("vllm-2") == 32
    lacking = EngineProfile([point for point in points if point.layout == one], profile.shapes.values())
    with pytest.raises(ConfigError, match="lacks the run's engines with 4 devices"):
        router_setup.engine_caps(settings, True, lacking)


def profile_of(step: float, a_sequence: float, kv_tokens: int = 1 << 20) -> EngineProfile:
    points = [
        ProfilePoint("decode", EngineLayout(), batch, tokens, step + a_sequence * batch)
        for batch in (1, 2, 4, 8, 16, 32, 64)
        for tokens in (64, 1024)
    ]
    return EngineProfile(points, [EngineShape(EngineLayout(), 1.0, kv_tokens, 1, 1.0)])


def test_the_cap_is_where_throughput_stops_growing() -> None:
    assert resolved(profile=profile_of(1.0, 0.0)) == (64, 16), "a free batch: all that was measured"
    assert resolved(profile=profile_of(0.0, 1.0)) == (1, 16), "one by one"
    assert resolved(profile=profile_of(1.0, 0.5)) == (16, 16), "16 make 1.78 tokens a second, 64 make 1.94"
    longest = load_config(None, []).rollout.longest_context
    assert resolved(profile=profile_of(1.0, 0.0, kv_tokens=3 * longest)) == (3, 16), "room for three whole contexts"
    assert resolved(profile=profile_of(1.0, 0.5), borrows=False) == (16, 0)
    with pytest.raises(ConfigError, match="lacks the run's engines with 2 devices"):
        resolved("rollout.engine.tensor_parallel_size=2", profile=profile_of(1.0, 0.5))
    with pytest.raises(ConfigError, match="leave one of the two out"):
        resolved("rollout.routing.cap=3", 'rollout.routing.profile="p.json"')
    with pytest.raises(ConfigError, match="must be at least 0"):
        resolved("rollout.routing.cap=-1")


def test_class_cap_and_tier_of_each_worker() -> None:
    settings = RoutingSection(
        cap=1, served_cap=2, hardware={NAMES[2]: "H20"}, affinity={"FrozenLake": "H800", "default": "H20"}
    )
    router = router_setup.planned_router(settings, NAMES, ("H800", "H20", ""), (False, False, True))
    for worker in range(3):
        router.open_worker(worker)
    for number, task in enumerate(["FrozenLake", "FrozenLake", "maths", "maths", "maths"]):
        router.queue_turn(f"{number}", f"{number}", task)
    assert [router.grant_turn() for _ in range(5)] == [("0", 0), ("1", 1), ("2", 2), ("3", 2), None]


@pytest.mark.parametrize(
    ("settings", "names", "field", "words"),
    [
        (
            {"affinity": {"maths": "H800"}},
            NAMES,
            "rollout.routing.affinity.maths",
            "no rollout worker is of that class",
        ),
        ({"hardware": {"vllm-7": "H20"}}, NAMES, "rollout.routing.hardware", "there are: vllm-0, vllm-1"),
        ({}, ("a", "a", "b"), "rollout.workers", "two workers have this name"),
    ],
)
def test_what_names_nothing_is_refused(
    settings: dict[str, object], names: tuple[str, ...], field: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        router_setup.planned_router(RoutingSection(**settings), names, ("",) * 3, (False,) * 3)  # type: ignore[arg-type]
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("policy", "faults"), [("cache-affine", 0.0), ("cache-affine", 0.02), ("least-loaded", 0.0), ("round-robin", 0.02)]
)
def test_a_run_with_caps_and_classes_keeps_to_them_accounts_for_everything_and_repeats(
    policy: str, faults: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = {"sim-0": 0, "sim-1": 0, "sim-2": 0}
    honest = SimWorker.add

    async def looked(worker: SimWorker, requests: Sequence[GenerationRequest]) -> None:
        await honest(worker, requests)
        stats = await worker.stats()
        most[worker.name] = max(most[worker.name], stats.running + stats.waiting)

    monkeypatch.setattr(SimWorker, "add", looked)
    small = ["run.steps=3", "rollout.workers=3", "rollout.groups_per_step=4", "rollout.group_size=4"]
    small += ["rollout.environments=32", "evaluation.prompts=4", "run.seed=3", f"sim.fault_rate={faults}"]
    routing = [f"rollout.routing.policy={policy}", "rollout.routing.cap=2", "rollout.routing.affinity.default=H800"]
    routing += ['rollout.routing.hardware={"sim-1" = "H800"}']
    first, again = (simulate(load_config(None, [*small, *routing])) for _ in range(2))
    assert first.events == again.events
    assert first.unaccounted == 0
    assert first.ledger["trained"] > 30
    assert most == {"sim-0": 2, "sim-1": 2, "sim-2": 2}
