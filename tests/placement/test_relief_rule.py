"""Relief of a busy worker by one that is done sooner: moves count from the moment they are decided."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.config.prediction_keys import PlacementSection
from orchestrator.events import EventLog, MemorySink
from orchestrator.placement.placer import RELIEF, Relief, TrajectoryPlacer
from orchestrator.policies.placement.worker_load import WorkerRates
from orchestrator.policies.prediction.length_predictor import LengthForecast
from orchestrator.policies.routing.turn_routing import Seat, TurnRouter
from scripts.bench.virtual_run import run

There = dict[int, dict[str, float]]


def summed(worker: int, items: Sequence[float]) -> float:
    """A worker takes a second for each second of work."""
    return sum(items)


class SlowLink:
    """Sends KV, and takes a minute for it: whatever is decided in the first second is still under way."""

    def __init__(self) -> None:
        self.sent: list[str] = []

    def seconds(self, source: int, target: int, tokens: int) -> float | None:
        return 0.001

    async def send(self, trajectory: str, source: int, target: int, tokens: int) -> bool:
        self.sent.append(trajectory)
        await asyncio.sleep(60.0)
        return True


@settings(max_examples=100)
@given(st.lists(st.integers(1, 50).map(float), min_size=1, max_size=30), st.booleans())
def test_gaps_of_one_second_never_make_the_busy_worker_the_idle_one(work: list[float], arrives: bool) -> None:
    async def main() -> None:
        there: There = {0: {f"t{number}": seconds for number, seconds in enumerate(work)}, 1: {}}
        relief = Relief(there, summed)
        for name, seconds in list(there[0].items()):
            before = relief.done_in(0), relief.done_in(1)
            found = relief.find(name, seconds, 0, (0, 1))
            if found is None:
                assert before[1] + seconds > RELIEF * before[0] or before[1] > RELIEF * before[0]
                continue
            target, gain = found
            assert target == 1
            assert gain == before[0] - before[1] - seconds
            assert before[1] + seconds <= RELIEF * before[0], "it ends sooner there, with all that is on its way"
            relief.goes(name, seconds, 0, 1)
            if arrives:
                there[1][name] = there[0].pop(name)
                relief.settled(name)
            assert relief.done_in(0) + relief.done_in(1) <= sum(work) * (1 + 1e-9)
        assert relief.done_in(1) <= sum(work) * RELIEF

    run(main())


def test_a_move_that_is_given_up_counts_where_it_was_again() -> None:
    async def main() -> None:
        there: There = {0: {"a": 5.0, "b": 5.0, "c": 5.0}, 1: {}}
        relief = Relief(there, summed)
        assert relief.done_in(0) == 15.0
        relief.goes("a", 5.0, 0, 1)
        assert (relief.done_in(0), relief.done_in(1)) == (10.0, 5.0)
        relief.goes("a", 5.0, 0, 2)  # elsewhere after all
        assert (relief.done_in(0), relief.done_in(1), relief.done_in(2)) == (10.0, 0.0, 5.0)
        relief.settled("a")
        relief.settled("nobody")
        assert (relief.done_in(0), relief.done_in(1), relief.done_in(2)) == (15.0, 0.0, 0.0)
        there[0].pop("b")
        assert relief.done_in(0) == 15.0, "looked at once a second"
        await asyncio.sleep(1.0)
        assert relief.done_in(0) == 10.0

    run(main())


def test_many_gaps_in_one_second_do_not_all_go_to_the_idle_worker_while_kv_is_on_its_way() -> None:
    async def main() -> None:
        router = TurnRouter([Seat(), Seat()])
        router.open_worker(0)
        chosen = PlacementSection.model_validate({"enabled": True, "certainty": 0.0})
        rates, link = WorkerRates(tuple(1.0 + 0.5 * number for number in range(64))), SlowLink()
        events = EventLog(MemorySink(), asyncio.get_running_loop().time)
        found = TrajectoryPlacer(chosen, router, events, lambda worker: rates, link, 100_000.0)
        names = [f"t{number}" for number in range(12)]
        for name in names:
            found.begin(name, "game", 100.0)
            found.update(name, LengthForecast(100.0, 10.0, 400.0, 2.0, "model"))
        for name in names:
            await found.before(name)
        router.open_worker(1)  # an engine that was started meanwhile
        for name in names:
            found.turn_over(name, 10, 10)
            found.update(name, LengthForecast(90.0, 9.0, 360.0, 1.0, "model"))
        await asyncio.sleep(0.5)
        decided = len(found._relief._ways)
        assert len(link.sent) == 1, "one endpoint at a time"
        assert 3 <= decided <= 6, f"{decided} of 12: at most until both take as long"
        await found.close()

    run(main())
