"""Prefill and decode on workers of two classes: each turn is one completion, KV goes along, and nothing is lost when a class is.

Simulated engines on virtual time; real ones are in ``tests/vllm/test_kv_two.py``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

from orchestrator.api import Completion, ConfigError, GenerationRequest, RunError, Sampling
from orchestrator.config import Config, load_config, parse_config
from orchestrator.config.rollout_keys import DisaggregationSection
from orchestrator.events import EventLog, MemorySink
from orchestrator.policies.routing.turn_routing import DECODE, PREFILL, Seat, TurnRouter
from orchestrator.proxy import router_setup
from orchestrator.proxy.gateway import LLMProxy
from orchestrator.proxy.kv_moves import kv_moves
from orchestrator.proxy.prefill_decode import PrefillDecode
from orchestrator.proxy.worker_state import WorkerLimits
from orchestrator.runtime import engine_cuts, pool_requests
from orchestrator.sim.simulated_worker import SimWeights, SimWorker
from scripts.bench import virtual_run as virtual

T = TypeVar("T")
PD = ("rollout.disaggregation.prefill=P", "rollout.disaggregation.decode=D", "rollout.workers=3")
ON = ("rollout.kv_transfer.enabled=true", "rollout.disaggregation.enabled=true")


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    return virtual.run(coroutine)


def settings(*overrides: str) -> Config:
    return load_config(None, list(overrides))


class Classes:
    """xPyD simulated workers under one proxy."""

    def __init__(self, prefill: int, decode: int, tasks: tuple[str, ...] = (), restarts: int = 0) -> None:
        self.weights = SimWeights()
        self.weights.put(0)
        config = parse_config({"sim": {"prefill_seconds_per_token": 0.01, "response_tokens_mean": 40.0}})
        names = [f"p{index}" for index in range(prefill)] + [f"d{index}" for index in range(decode)]
        self.workers = {name: SimWorker(name, config, self.weights) for name in names}
        events = EventLog(MemorySink(), asyncio.get_running_loop().time)
        section = DisaggregationSection(enabled=True, prefill="P", decode="D", tasks=tasks, min_tokens=8)
        seats = [Seat(name[0].upper()) for name in names]
        self.failed: list[RunError] = []
        self.proxy = LLMProxy(
            list(self.workers.values()),
            events,
            limits=WorkerLimits(1000.0, 1000.0, 1000.0, 1000.0, 4 * 1000.0),
            restarts=restarts,
            router=TurnRouter(seats, phases=router_setup.phase_classes(section, [seat.hardware for seat in seats])),
            kv=kv_moves(parse_config({"rollout": {"kv_transfer": {"enabled": True}}}).rollout.kv_transfer, events),
            on_fatal=self.failed.append,
        )
        self.split = self.proxy.split = PrefillDecode(self.proxy, section)

    async def start(self) -> None:
        for worker in self.workers.values():
            await worker.suspend()
            await worker.update(0)
            await worker.resume()
        for lane in self.proxy.states:
            lane.version = 0
        self.proxy.version = 0
        self.proxy.start()

    async def turn(self, name: str, number: int, context: tuple[int, ...], most: int = 64) -> Completion:
        request = GenerationRequest(f"{name}/{number}", name, number, context, Sampling(most), "sim")
        return await self.proxy.generate(request)

    async def generated(self, kind: str) -> int:
        return sum([(await worker.stats()).generated for name, worker in self.workers.items() if name[0] == kind])


def test_a_turn_is_one_completion_of_two_workers_and_only_the_new_tokens_travel() -> None:
    async def scenario() -> None:
        fleet_of = Classes(2, 2)
        await fleet_of.start()
        context: tuple[int, ...] = tuple(range(100))
        for number in range(3):
            said = await fleet_of.turn("t", number, context)
            assert len(said.token_ids) == len(said.logprobs) == sum(count for _, count in said.versions)
            assert said.request_id == f"t/{number}"
            assert said.finish_reason in ("stop", "length")
            context = (*context, *said.token_ids, 1, 2, 3)
        assert fleet_of.split.served == 3
        assert await fleet_of.generated("p") == 3  # one token a turn
        used = [name for name, worker in fleet_of.workers.items() if (await worker.stats()).generated]
        assert len(used) == 2  # the trajectory stayed with its worker of either class
        moves = fleet_of.proxy.kv
        assert moves.moves == 5
        assert moves.tokens < len(context)  # each token travels once a direction at most
        await fleet_of.proxy.close()

    run(scenario())


def test_many_turns_at_once_each_end_once() -> None:
    async def scenario() -> None:
        fleet_of = Classes(1, 3)
        await fleet_of.start()
        said = await asyncio.gather(*(fleet_of.turn(f"t{n}", 0, tuple(range(20 + n))) for n in range(40)))
        assert len({item.request_id for item in said}) == 40
        assert fleet_of.proxy.in_flight == 0
        assert await fleet_of.generated("p") == 40
        await fleet_of.proxy.close()

    run(scenario())


def test_a_short_turn_another_task_and_one_token_are_served_whole() -> None:
    async def scenario() -> None:
        fleet_of = Classes(1, 1, tasks=("another",))
        await fleet_of.start()
        await fleet_of.turn("t", 0, tuple(range(100)))
        assert (fleet_of.split.served, fleet_of.split.whole) == (0, 1)
        await fleet_of.proxy.close()
        fleet_of = Classes(1, 1)
        await fleet_of.start()
        await fleet_of.turn("t", 0, (1, 2, 3))
        await fleet_of.turn("u", 0, tuple(range(100)), most=1)
        assert (fleet_of.split.served, fleet_of.split.whole) == (0, 2)
        await fleet_of.proxy.close()

    run(scenario())


@pytest.mark.parametrize(("gone", "when"), [("p", 0.3), ("d", 5.0), ("d", 0.3)])
def test_when_a_class_is_gone_for_good_its_turns_are_served_by_the_other(gone: str, when: float) -> None:
    async def scenario() -> None:
        fleet_of = Classes(1, 1)
        await fleet_of.start()
        turns = [asyncio.create_task(fleet_of.turn(f"t{n}", 0, tuple(range(60)))) for n in range(6)]
        await asyncio.sleep(when)  # the decode worker: while it decodes, or before any of them has come so far
        fleet_of.workers[f"{gone}0"].die()
        said = await asyncio.gather(*turns, fleet_of.turn("later", 0, tuple(range(60))))
        assert all(item.finish_reason in ("stop", "length") for item in said)
        assert fleet_of.split.whole >= 1
        assert not fleet_of.failed
        await fleet_of.proxy.close()

    run(scenario())


def test_a_part_never_leaves_its_class_and_a_trajectory_has_a_worker_in_each() -> None:
    router = TurnRouter([Seat("P"), Seat("D"), Seat("D")], phases={PREFILL: "P", DECODE: "D"})
    for worker in range(3):
        router.open_worker(worker)
    router.queue_turn("1", "t", PREFILL)
    assert router.grant_turn() == ("1", 0)
    router.end_turn("1")
    router.queue_turn("2", "t", DECODE)
    assert router.grant_turn() == ("2", 1)
    router.end_turn("2")
    assert (router.prefix_holder("t", PREFILL), router.prefix_holder("t", DECODE)) == (0, 1)
    router.close_worker(0)
    assert not router.has_phase(PREFILL)
    router.queue_turn("3", "t", PREFILL)
    assert router.grant_turn() is None  # the others are of another class
    router.forget_trajectory("t")
    assert router.prefix_holder("t", DECODE) == -1


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        (["rollout.disaggregation.enabled=true"], "disaggregation"),
        ([*ON, "rollout.disaggregation.prefill=P"], "disaggregation"),
        ([*ON, "rollout.disaggregation.prefill=P", "rollout.disaggregation.decode=P"], "disaggregation"),
        (["rollout.disaggregation.degrees={vllm-0=2}"], "disaggregation.degrees"),
        ([*ON, *PD, "rollout.disaggregation.degrees={vllm-3=2}"], "there is no worker vllm-3: rollout.workers is 3"),
        ([*ON, *PD, "rollout.disaggregation.degrees={sim-0=2}"], "disaggregation.degrees"),
    ],
)
def test_a_section_that_could_not_work_is_refused(overrides: list[str], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        settings(*overrides)


def test_a_class_that_no_worker_is_of_is_named() -> None:
    section = DisaggregationSection(enabled=True, prefill="H800", decode="H20")
    with pytest.raises(ConfigError, match="H800") as refused:
        router_setup.planned_router(settings().rollout.routing, ["vllm-0"], [""], [False], section)
    assert refused.value.field == "rollout.disaggregation.prefill"


def test_each_engine_of_a_class_has_the_devices_that_the_config_gives_it() -> None:
    config = settings(*ON, *PD, "rollout.disaggregation.degrees={vllm-0=2, vllm-2=4}")
    cut = engine_cuts._fixed(config, heads=4)
    assert [cut.keywords_of(index) for index in range(3)] == [
        {"first_device": 0, "ranks": 2},
        {"first_device": 2, "ranks": 1},
        {"first_device": 3, "ranks": 4},
    ]
    with pytest.raises(ConfigError, match="vllm-2 cannot have 4 devices: the model has 6 attention heads"):
        engine_cuts._fixed(config, heads=6)
    assert engine_cuts._fixed(settings(*ON, *PD), heads=6).keywords_of(1) == {}
    elsewhere = settings(*ON, *PD, "rollout.disaggregation.degrees={vllm-0=2}", "ray.address=auto")
    with pytest.raises(ConfigError, match=r"ray\.address.*counts this machine's devices"):
        engine_cuts.check(elsewhere)
    pooled = "resources.pools={P=8, D=8, H800=8}", "resources.rollout={P=1, D=2}"
    config = settings(*ON, *PD, *pooled, "rollout.disaggregation.degrees={vllm-0=2, vllm-2=4}")
    assert engine_cuts._fixed(config, heads=4).keywords_of(2)["ranks"] == 4
    engine_cuts.check(config.model_copy(update={"ray": config.ray.model_copy(update={"address": "auto"})}))
    assert [(name, devices) for name, _, devices in pool_requests.wishes(config)][-3:] == [
        ("vllm-0", 2),
        ("vllm-1", 1),
        ("vllm-2", 4),
    ]
