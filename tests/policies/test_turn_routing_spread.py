"""Turns spread over dedicated and borrowed workers by the share of their caps that is taken: caps hold, nothing starves, nothing
goes to a closed server, prefixes are kept while loads are even."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.api import ConfigError
from orchestrator.config import load_config
from orchestrator.config.rollout_keys import RoutingSection
from orchestrator.policies.routing.turn_routing import FULL, LEAST_LOADED, LEAST_UTILIZED, RULES, Seat, TurnRouter
from orchestrator.proxy import router_setup

SPREAD = "rollout.routing.spread=least-utilized"


def opened(seats: list[Seat], rule: str = RULES[0], **options: int) -> TurnRouter:
    router = TurnRouter(seats, rule, spread=LEAST_UTILIZED, **options)  # type: ignore[arg-type]
    for worker in range(len(seats)):
        router.open_worker(worker)
    return router


def place(router: TurnRouter, request: str, trajectory: str = "") -> int | None:
    router.queue_turn(request, trajectory or request, "t")
    granted = router.grant_turn()
    assert granted is None or granted[0] == request
    return None if granted is None else granted[1]


def test_turns_go_where_the_smallest_share_is_taken_whatever_the_class_and_the_first_among_equals() -> None:
    router = opened([Seat(cap=2, borrowed=True), Seat("H20", 4), Seat("H20", 1, borrowed=True)])
    assert [place(router, name) for name in "abcdefgh"] == [0, 1, 2, 1, 0, 1, 1, None]


def test_a_dedicated_worker_comes_first_among_equals_as_the_runs_own_are_the_first_seats() -> None:
    router = opened([Seat(cap=4), Seat(cap=4, borrowed=True)])
    assert [place(router, name) for name in "abcd"] == [0, 1, 0, 1]


def test_a_turn_leaves_its_prefix_when_another_worker_is_emptier_by_more_than_imbalance_requests() -> None:
    router = opened([Seat(cap=8), Seat(cap=4, borrowed=True)], imbalance=2)
    router.close_worker(1)  # it has no weights yet
    assert [place(router, f"{n}/0", f"{n}") for n in range(6)] == [0] * 6
    router.open_worker(1)
    went = []
    for n in range(6):
        router.end_turn(f"{n}/0")
        went.append(place(router, f"{n}/1", f"{n}"))
    assert went == [1, 0, 0, 0, 0, 0], (
        "5 there beside none; then 4 + 1 of 8 beside 1 of 4, which would be 2 of 8, and 2 more"
    )
    assert opened_stays(imbalance=8) == [0] * 6


def opened_stays(imbalance: int) -> list[int | None]:
    router = opened([Seat(cap=8), Seat(cap=4, borrowed=True)], imbalance=imbalance)
    router.close_worker(1)
    for n in range(6):
        place(router, f"{n}/0", f"{n}")
    router.open_worker(1)
    found = []
    for n in range(6):
        router.end_turn(f"{n}/0")
        found.append(place(router, f"{n}/1", f"{n}"))
    return found


def test_a_smaller_budget_of_a_borrowed_worker_sends_turns_elsewhere() -> None:
    router = opened([Seat(cap=8), Seat(cap=8, borrowed=True)])
    assert [place(router, name) for name in "abcd"] == [0, 1, 0, 1]
    router.set_cap(1, 2)
    assert [place(router, name) for name in "efgh"] == [0] * 4, "it is full, though it has less than the other"
    router.set_cap(1, 4)
    assert place(router, "i") == 1, "2 of 4 are less than 6 of 8"


@dataclass
class Model:
    """The rule in the plainest words, over everything that happened."""

    seats: list[Seat]
    open: list[bool]
    caps: list[int]
    placed: dict[str, int] = field(default_factory=dict)
    waiting: list[str] = field(default_factory=list)  # oldest first
    holder: dict[str, int] = field(default_factory=dict)

    def load(self, worker: int) -> int:
        return sum(at == worker for at in self.placed.values())

    def fits(self) -> list[int]:
        return [at for at in range(len(self.seats)) if self.open[at] and self.load(at) < self.caps[at]]

    def level(self, worker: int) -> int:
        return self.load(worker) * FULL // self.caps[worker]


@pytest.mark.parametrize("rule", [RULES[0], LEAST_LOADED])
@given(seed=st.integers(0, 2**32), steps=st.integers(20, 200))
@settings(max_examples=60)
def test_whatever_happens_caps_hold_nothing_is_sent_to_a_closed_server_and_prefixes_are_kept_while_even(
    rule: str, seed: int, steps: int
) -> None:
    draw = random.Random(seed)
    seats = [Seat(draw.choice("AB"), draw.randint(1, 9), draw.random() < 0.5) for _ in range(draw.randint(2, 7))]
    imbalance = draw.randint(0, 4)
    router = opened(seats, rule, imbalance=imbalance, patience=0)
    model = Model(seats, [True] * len(seats), [seat.cap for seat in seats])
    for number in range(steps):
        event, worker = draw.random(), draw.randrange(len(seats))
        if event < 0.5:
            name = f"{number}/t{draw.randrange(8)}"
            router.queue_turn(name, name.split("/")[1], "t")
            model.waiting.append(name)
        elif event < 0.72 and model.placed:
            name = draw.choice(list(model.placed))
            router.end_turn(name)
            del model.placed[name]
        elif event < 0.82:
            cap = draw.randint(1, 9)  # what its budget leaves room for now
            router.set_cap(worker, cap)
            model.caps[worker] = cap
        elif event < 0.9:
            router.close_worker(worker, cache_lost=True)
            model.open[worker] = False
            model.holder = {name: at for name, at in model.holder.items() if at != worker}
        else:
            router.open_worker(worker)
            model.open[worker] = True
        while (granted := router.grant_turn()) is not None:
            name, worker = granted
            fits = model.fits()
            assert worker in fits, "open, and below its cap of now"
            oldest = model.waiting[0]
            model.waiting.remove(name)
            held = model.holder.get(name.split("/")[1], -1)
            if name != oldest:
                assert rule == RULES[0]
                assert held == worker, "it overtakes for the sake of its prefix only"
            else:
                least = min(model.level(at) for at in fits)
                even = held in fits and model.load(held) <= least * model.caps[held] / FULL + imbalance
                if rule == RULES[0] and even:
                    assert worker == held
                else:
                    assert model.level(worker) == least
            model.placed[name] = worker
            model.holder[name.split("/")[1]] = worker
        assert not (model.waiting and model.fits()), "a slot stays empty"
        assert router.queued == len(model.waiting)
        assert [router._load[at] for at in range(len(seats))] == [model.load(at) for at in range(len(seats))]


@given(st.lists(st.tuples(st.integers(1, 40), st.booleans()), min_size=1, max_size=8), st.integers(0, 200))
@settings(max_examples=60)
def test_new_trajectories_fill_all_workers_evenly(kinds: list[tuple[int, bool]], turns: int) -> None:
    seats = [Seat(cap=cap, borrowed=borrowed) for cap, borrowed in kinds]
    router = opened(seats)
    for number in range(turns):
        place(router, f"{number}")
    loads = [router._load[worker] for worker in range(len(seats))]
    assert sum(loads) == min(turns, sum(seat.cap for seat in seats))
    for one, seat in zip(loads, seats, strict=True):
        for other, beside in zip(loads, seats, strict=True):
            assert other == beside.cap or (one - 1) / seat.cap <= other / beside.cap + 1 / FULL


def test_without_a_cap_there_is_no_share_of_it() -> None:
    with pytest.raises(ConfigError) as caught:
        TurnRouter([Seat(cap=1), Seat(borrowed=True)], spread=LEAST_UTILIZED)
    assert caught.value.field == "rollout.routing.served_cap"
    router = opened([Seat(cap=1)])
    with pytest.raises(ConfigError, match="cap"):
        router.add_worker(Seat())
    with pytest.raises(ConfigError, match="cap"):
        router.set_cap(0, 0)
    with pytest.raises(ConfigError, match="least-utilized"):
        TurnRouter([Seat(cap=1)], spread="even")


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        (("rollout.routing.served_cap=4",), "rollout.routing.cap"),
        (("rollout.routing.cap=4",), "rollout.routing.served_cap"),
        (
            ("rollout.routing.cap=4", "rollout.routing.served_cap=4", "rollout.routing.policy=round-robin"),
            "rollout.routing.policy",
        ),
        (("rollout.routing.cap=4", "rollout.routing.served_cap=4", "rollout.routing.skew=2"), "rollout.routing.skew"),
        (
            (
                *("rollout.routing.cap=4", "rollout.routing.served_cap=4", "rollout.prediction.enabled=true"),
                "rollout.placement.enabled=true",
            ),
            "rollout.placement.enabled",
        ),
    ],
)
def test_what_it_cannot_be_combined_with_is_one_clear_error(overrides: tuple[str, ...], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [SPREAD, *overrides])
    assert caught.value.field == field


def test_the_configs_word_reaches_the_router() -> None:
    for spread, expected in (("dedicated-first", [0, 0, 1]), ("least-utilized", [0, 1, 0])):
        router = router_setup.planned_router(
            RoutingSection(cap=2, served_cap=2, spread=spread),  # type: ignore[arg-type]
            ("vllm-0", "http://127.0.0.1:1"),
            ("", ""),
            (False, True),
        )
        for worker in range(2):
            router.open_worker(worker)
        assert [place(router, name) for name in "abc"] == expected
