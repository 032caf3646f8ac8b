"""Turn routing: caps hold, nothing starves, prefixes and hardware classes are kept when that is possible."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.api import ConfigError, RunError
from orchestrator.policies.routing.turn_routing import LEAST_LOADED, ROUND_ROBIN, RULES, SPREADS, Seat, TurnRouter


def opened(seats: Sequence[Seat], rule: str = RULES[0], **options: object) -> TurnRouter:
    router = TurnRouter(seats, rule, **options)  # type: ignore[arg-type]
    for worker in range(len(seats)):
        router.open_worker(worker)
    return router


def place(router: TurnRouter, request: str, trajectory: str = "", task: str = "t") -> int | None:
    """Ask, and take what is granted to this request; None: it waits."""
    router.queue_turn(request, trajectory or request, task)
    granted = router.grant_turn()
    assert granted is None or granted[0] == request
    return None if granted is None else granted[1]


def test_a_later_turn_goes_to_who_holds_its_prefix_until_that_is_too_busy() -> None:
    router = opened([Seat(), Seat()], imbalance=2)
    assert [place(router, name, name) for name in "ab"] == [0, 1]
    router.end_turn("a")
    router.end_turn("b")
    assert place(router, "b1", "b") == 1, "though worker 0 comes first among equals"
    assert place(router, "b2", "b") == 1
    assert place(router, "b3", "b") == 1
    assert place(router, "b4", "b") == 0, "three more than the other: load decides"


def test_a_worker_with_older_weights_goes_on_with_its_own_trajectories_and_gets_no_others() -> None:
    router = opened([Seat(), Seat(cap=2)], imbalance=0)
    assert [place(router, name, name) for name in "ab"] == [0, 1]
    router.end_turn("b")
    router.keep_worker(1)
    assert place(router, "c", "c") == 0, "a new one, though worker 0 has more"
    assert place(router, "b1", "b") == 1
    assert place(router, "a1", "a") == 0
    router.end_turn("a1")
    assert place(router, "b2", "b") == 1
    assert place(router, "b3", "b") == 0, "no more than its cap: then with the others, and never back"
    router.end_turn("b2")
    assert place(router, "b4", "b") == 0
    router.open_worker(1)
    assert place(router, "d", "d") == 1


def test_a_prefix_is_forgotten_with_the_worker_that_held_it_and_with_the_trajectory() -> None:
    for forget in (
        lambda r: (r.close_worker(1, cache_lost=True), r.open_worker(1)),
        lambda r: r.forget_trajectory("b"),
    ):
        router = opened([Seat(), Seat()])
        assert [place(router, name, name) for name in "ab"] == [0, 1]
        router.end_turn("a")
        router.end_turn("b")
        forget(router)
        assert place(router, "b1", "b") == 0


def test_least_loaded_and_round_robin_ignore_the_prefix() -> None:
    least = opened([Seat(), Seat()], LEAST_LOADED)
    assert [place(least, f"{n}", "same") for n in range(4)] == [0, 1, 0, 1]
    turns = opened([Seat(), Seat(), Seat()], ROUND_ROBIN)
    assert [place(turns, f"{n}", "same") for n in range(4)] == [0, 1, 2, 0]
    turns.close_worker(1)
    assert [place(turns, f"x{n}", "same") for n in range(2)] == [2, 0]


def test_dedicated_workers_come_first_then_borrowed_ones_then_the_queue_in_order() -> None:
    router = opened([Seat(cap=1, borrowed=True), Seat(cap=2), Seat(cap=1, borrowed=True)])
    assert [place(router, name) for name in "abcde"] == [1, 1, 0, 2, None]
    router.queue_turn("f", "f", "t")
    assert router.queued == 2
    router.end_turn("a")
    assert router.grant_turn() == ("e", 1), "the oldest, and a dedicated worker again"
    router.end_turn("d")
    assert router.grant_turn() == ("f", 2)
    assert router.grant_turn() is None


def test_a_turn_stays_with_a_borrowed_worker_that_has_its_prefix_while_that_has_room() -> None:
    router = opened([Seat(cap=1), Seat(cap=1, borrowed=True)])
    assert [place(router, "a"), place(router, "b", "t")] == [0, 1]
    router.end_turn("a")
    router.end_turn("b")
    assert place(router, "b1", "t") == 1
    router.end_turn("b1")
    router.close_worker(1)  # it stalls, or serves others
    assert place(router, "b2", "t") == 0


def test_without_caps_borrowed_workers_are_like_the_others() -> None:
    router = opened([Seat(), Seat(borrowed=True)])
    assert [place(router, name) for name in "abcd"] == [0, 1, 0, 1]


MIXED = [Seat("H20", 2), Seat("H800", 2), Seat("H20", 2)]
AFFINITY = {"FrozenLake": "H800", "default": "H20"}


def test_a_task_runs_on_its_class_and_falls_back_while_that_has_no_room() -> None:
    router = opened(MIXED, affinity=AFFINITY)
    assert [place(router, name, name, "FrozenLake") for name in "abc"] == [1, 1, 0]
    assert [place(router, name, name, "maths") for name in "de"] == [2, 0]
    router.end_turn("a")
    assert place(router, "c1", "c", "FrozenLake") == 1, "its holder is full: home again"


def test_a_task_that_asks_for_no_class_goes_to_the_least_busy_worker_of_all() -> None:
    router = opened([Seat("H800"), Seat("H20"), Seat("H20")], affinity={"game": "H20"})
    assert [place(router, name, name, "maths") for name in "abcd"] == [0, 1, 2, 0]
    assert place(router, "e", "e", "game") == 1, "its class first, though all of that are as busy"
    assert [place(router, name, name, "maths") for name in "fg"] == [2, 0]


def test_without_fallback_it_waits_and_holds_up_nobody_of_another_class() -> None:
    router = opened(MIXED, affinity=AFFINITY, fallback=False)
    assert [place(router, name, name, "FrozenLake") for name in "abc"] == [1, 1, None]
    assert place(router, "d", "d", "maths") == 0
    router.end_turn("b")
    assert router.grant_turn() == ("c", 1)


def test_a_class_that_nobody_has_is_one_clear_error() -> None:
    with pytest.raises(ConfigError) as caught:
        TurnRouter(MIXED, affinity={"FrozenLake": "B200"})
    assert caught.value.field == "rollout.routing.affinity.FrozenLake"
    assert "H20, H800" in caught.value.fix
    with pytest.raises(ConfigError, match="must be one of"):
        TurnRouter(MIXED, "clever")


def test_when_the_last_worker_of_a_class_is_gone_its_turns_are_told_and_no_more_are_taken() -> None:
    router = opened(MIXED, affinity=AFFINITY, fallback=False)
    assert [place(router, name, name, "FrozenLake") for name in "abc"] == [1, 1, None]
    assert router.retire_worker(0) == []
    assert router.retire_worker(1) == ["c"]
    router.requeue_turn("a")
    assert router.grant_turn() is None
    with pytest.raises(RunError, match=r"task FrozenLake.*class H800"):
        router.queue_turn("d", "d", "FrozenLake")
    assert place(router, "e", "e", "maths") == 2


def test_a_worker_that_is_started_after_it_was_given_up_is_waited_for() -> None:
    router = TurnRouter([Seat(), Seat()])
    for worker in range(2):
        router.retire_worker(worker)
    with pytest.raises(RunError, match="no rollout worker is left"):
        router.queue_turn("a", "t", "sim")
    router.readmit_worker(1)
    router.queue_turn("a", "t", "sim")
    assert router.grant_turn() is None  # it is not open yet
    router.open_worker(1)
    assert router.grant_turn() == ("a", 1)


def test_a_slot_that_many_wait_for_goes_to_a_turn_whose_prefix_is_there() -> None:
    router = opened([Seat(cap=1), Seat(cap=1)])
    assert [place(router, name) for name in ("a", "b")] == [0, 1]
    router.queue_turn("new", "new", "t")
    router.queue_turn("b1", "b", "t")
    router.end_turn("b")
    assert router.grant_turn() == ("b1", 1)
    router.end_turn("b1")
    assert router.grant_turn() == ("new", 1), "nobody's prefix is there any more"


@pytest.mark.parametrize("patience", [0, 5])
def test_a_turn_is_overtaken_only_so_often(patience: int) -> None:
    router = opened([Seat(cap=1)], patience=patience)
    assert place(router, "a0", "a") == 0
    router.queue_turn("new", "new", "t")
    for turn in range(1, 100):
        router.queue_turn(f"a{turn}", "a", "t")
        router.end_turn(f"a{turn - 1}")
        granted = router.grant_turn()
        assert granted is not None
        if granted[0] == "new":
            break
    assert turn - 1 == patience


@pytest.mark.parametrize("spread", SPREADS)
@given(seed=st.integers(0, 2**32))
@settings(max_examples=20)
def test_nothing_starves_while_slots_are_freed(spread: str, seed: int) -> None:
    """After it is due, and so are those before it, only those go first."""
    draw = random.Random(seed)
    seats = [Seat("A", draw.randint(1, 3), draw.random() < 0.3) for _ in range(draw.randint(1, 5))]
    patience = draw.choice((0, 8))
    router = opened(seats, patience=patience, spread=spread)
    running: list[str] = []
    waiting: dict[str, tuple[int, int]] = {}  # request -> when it is due, and when it has gone at last, in grants
    grants = overtaken = 0
    for number in range(900):
        if number < 600:
            trajectory = f"t{draw.randrange(40)}"
            due = grants + 2 * len(waiting) + patience
            last = max([due, *(other for other, _ in waiting.values())]) + len(waiting)
            waiting[f"{trajectory}/{number}"] = due, last
            router.queue_turn(f"{trajectory}/{number}", trajectory, "t")
        if running and draw.random() < 0.9:
            router.end_turn(running.pop(draw.randrange(len(running))))
        while (granted := router.grant_turn()) is not None:
            overtaken += granted[0] != next(iter(waiting))
            _, last = waiting.pop(granted[0])
            assert grants <= last
            grants += 1
            running.append(granted[0])
    assert overtaken > 0 or len(seats) == 1
    assert router.queued == len(waiting)


# -- any sequence of events --------------------------------------------------------------------------------------------


@dataclass
class Model:
    """What the router must not know better: recomputed from the events, in the plainest way."""

    seats: list[Seat]
    open: list[bool]
    fallback: bool
    placed: dict[str, int] = field(default_factory=dict)
    waiting: dict[str, str] = field(default_factory=dict)  # request -> task, oldest first
    order: dict[str, int] = field(default_factory=dict)
    trajectory: dict[str, str] = field(default_factory=dict)
    holder: dict[str, int] = field(default_factory=dict)
    due: dict[str, int] = field(default_factory=dict)
    grants: int = 0

    def load(self, worker: int) -> int:
        return sum(place == worker for place in self.placed.values())

    def room(self, worker: int) -> bool:
        cap = self.seats[worker].cap
        return self.open[worker] and (not cap or self.load(worker) < cap)

    def may_use(self, task: str, worker: int) -> bool:
        return self.fallback or self.seats[worker].hardware == CLASS_OF[task]

    def fits(self, task: str) -> list[int]:
        return [worker for worker in range(len(self.seats)) if self.room(worker) and self.may_use(task, worker)]


CLASS_OF = {"x": "A", "y": "B"}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("fallback", [False, True])
@given(seed=st.integers(0, 2**32), steps=st.integers(20, 160))
@settings(max_examples=25)
def test_whatever_happens_caps_hold_slots_go_to_the_oldest_and_affinity_is_kept(
    rule: str, fallback: bool, seed: int, steps: int
) -> None:
    draw = random.Random(seed)
    seats = [Seat(draw.choice("AB"), draw.choice((0, 1, 2, 3)), draw.random() < 0.4) for _ in range(draw.randint(2, 7))]
    seats += [Seat("A", 2), Seat("B", 2)]
    capped = any(seat.cap and not seat.borrowed for seat in seats)
    patience = draw.choice((0, 2, 64))
    router = opened(seats, rule, affinity=CLASS_OF, fallback=fallback, imbalance=3, patience=patience)
    model = Model(seats, [True] * len(seats), fallback)
    for number in range(steps):
        event = draw.random()
        worker = draw.randrange(len(seats))
        if event < 0.5:
            name, task = f"r{number}", draw.choice("xy")
            model.trajectory[name] = f"t{draw.randrange(6)}{task}"
            router.queue_turn(name, model.trajectory[name], task)
            model.due[name] = model.grants + 2 * len(model.waiting) + patience
            model.waiting[name] = task
            model.order[name] = number
        elif event < 0.75 and (known := [*model.placed, *model.waiting]):
            name = draw.choice(known)
            router.end_turn(name)
            model.placed.pop(name, None)
            model.waiting.pop(name, None)
        elif event < 0.85 and model.placed:
            name = draw.choice(list(model.placed))
            router.requeue_turn(name)
            del model.placed[name]
            model.waiting[name] = model.trajectory[name][-1]
        elif event < 0.93:
            lost = draw.random() < 0.5
            router.close_worker(worker, cache_lost=lost)
            model.open[worker] = False
            if lost:
                model.holder = {name: place for name, place in model.holder.items() if place != worker}
        else:
            router.open_worker(worker)
            model.open[worker] = True
        while (granted := router.grant_turn()) is not None:
            name, worker = granted
            task, trajectory = model.waiting.pop(name), model.trajectory[name]
            fits = model.fits(task)
            assert worker in fits
            older = [other for other in model.waiting if model.order[other] < model.order[name]]
            older = [other for other in older if model.fits(model.waiting[other])]
            held = model.holder.get(trajectory, -1)
            if older:
                oldest = min(older, key=lambda other: model.order[other])
                assert rule == RULES[0]
                assert held == worker, "it overtakes for the sake of its prefix only"
                assert model.grants < model.due[oldest], "and not when the other has waited for too long"
                assert seats[worker].cap
            model.grants += 1

            # In order of preference.
            pools = {at: (capped and seats[at].borrowed, seats[at].hardware != CLASS_OF[task]) for at in fits}
            alike = [at for at in fits if pools[at] == min(pools.values())]
            near = [at for at in fits if pools[at] == pools.get(held)]
            if older:
                pass
            elif rule == RULES[0] and near and model.load(held) <= min(model.load(at) for at in near) + 3:
                assert worker == held, "the prefix is kept when it can be"
            else:
                assert worker in alike, "the best pool that has room"
                if rule != ROUND_ROBIN:
                    assert worker == min(alike, key=lambda at: (model.load(at), at))
            model.placed[name] = worker
            model.holder[trajectory] = worker
        for at, seat in enumerate(seats):
            assert router._load[at] == model.load(at)
            assert not seat.cap or router._load[at] <= seat.cap
        assert router.queued == len(model.waiting)
        assert not [name for name, task in model.waiting.items() if model.fits(task)], "a slot stays empty"


def test_a_worker_that_moves_to_a_new_class_serves_what_waits_for_any() -> None:
    router = opened([Seat("H800", cap=1), Seat("H20", cap=1)], affinity={"maths": "H20", "default": "H800"})
    assert [place(router, name) for name in "ab"] == [0, 1]
    router.queue_turn("c", "c", "t")
    router.queue_turn("d", "d", "maths")
    router.close_worker(0, cache_lost=True)
    router.requeue_turn("a")
    assert router.reseat_worker(0, "L20") == []
    assert router.grant_turn() is None, "it is still closed"
    router.open_worker(0)
    assert [router.grant_turn(), router.grant_turn()] == [("a", 0), None]
    router.end_turn("b")
    assert router.grant_turn() == ("c", 1)
    router.end_turn("a")
    assert router.grant_turn() == ("d", 0)
    assert (router._load[0], router._load[1], router.queued) == (1, 1, 0)


def test_a_class_that_its_last_worker_left_is_named() -> None:
    router = opened([Seat("H800"), Seat("H20")], affinity={"maths": "H800", "default": "H20"}, fallback=False)
    router.close_worker(0, cache_lost=True)
    router.queue_turn("a", "a", "maths")
    router.queue_turn("b", "b", "t")
    assert router.reseat_worker(0, "H20") == ["a"]
    with pytest.raises(RunError, match="class H800 only"):
        router.queue_turn("c", "c", "maths")
    router.open_worker(0)
    assert router.grant_turn() == ("b", 0)


def test_a_prefix_that_was_brought_to_another_worker_is_known_to_lie_there() -> None:
    router = TurnRouter([Seat(), Seat()])
    for worker in (0, 1):
        router.open_worker(worker)
    router.queue_turn("r0", "t", "")
    first = router.grant_turn()
    assert first is not None
    router.end_turn("r0")
    other = 1 - first[1]
    router.pin_trajectory("t", other)
    router.record_prefix_copy("t", other)
    router.queue_turn("r1", "t", "")
    assert router.grant_turn() == ("r1", other)
    assert router.prefix_of("r1") == -1, "nothing is left to be fetched"
