"""The config's words about routing reach the router, wrong ones are one clear error, and whole runs keep to them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from orchestrator.api import ConfigError, GenerationRequest
from orchestrator.config import load_config
from orchestrator.config.rollout_keys import RoutingSection
from orchestrator.proxy import router_setup
from orchestrator.sim.simulated_run import simulate
from orchestrator.sim.simulated_worker import SimWorker

NAMES = ("vllm-0", "vllm-1", "http://127.0.0.1:1")


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
