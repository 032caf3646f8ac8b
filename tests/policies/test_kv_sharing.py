"""How much KV memory rollouts get beside serving: budgets, bursts, and an exhaustive check of the protocol with the ledger."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from functools import cache

import pytest
from hypothesis import given, strategies

from orchestrator.policies.serving.kv_sharing import KvBudget, KvSharing, SharingRules, displacement_order

RULES = SharingRules(pages=100, headroom=0.2, watermark=0.25, deadline=2.0)


def opened(peak: int = 30, rules: SharingRules = RULES) -> KvSharing:
    sharing = KvSharing(rules)
    sharing.begin_step(0.0, peak, 0)
    return sharing


def test_a_step_gives_what_serving_left_at_its_peak_less_the_headroom_and_no_more_than_is_lent() -> None:
    assert opened(30).budget == KvBudget(50, 1, "open")
    assert opened(90).budget.pages == 0
    assert opened(30, replace(RULES, lent=0.3)).budget.pages == 30
    assert KvSharing(RULES).budget == KvBudget(0, 0, "frozen"), "nothing before the scheduler says so"


def test_a_burst_halves_the_budget_once_and_it_stays_frozen_until_the_next_step() -> None:
    sharing = opened(30)
    assert sharing.observe(0.0, serving=35, rollout=50).state == "open", "a quarter of the headroom is not a burst yet"
    cut = sharing.observe(1.0, serving=36, rollout=50)
    assert cut == KvBudget(25, 2, "cut")
    assert sharing.observe(1.5, serving=60, rollout=40) == cut, "no second cut before the first is complied with"
    assert sharing.observe(2.0, serving=60, rollout=25) == KvBudget(25, 2, "frozen")
    for second in range(3, 60):
        assert sharing.observe(second, serving=0, rollout=0).pages == 25, "calm does not raise it"
    assert sharing.begin_step(60.0, 30, 20) == KvBudget(50, 3, "open")


def test_serving_that_goes_on_growing_cuts_again_down_to_nothing() -> None:
    sharing, budgets = opened(30), []
    for second in range(12):
        rollout = sharing.budget.pages
        budgets.append(sharing.observe(float(second), serving=100 - rollout, rollout=rollout).pages)
    assert [pages for index, pages in enumerate(budgets) if not index or pages != budgets[index - 1]] == [
        25,
        12,
        6,
        3,
        1,
        0,
    ]


def test_a_rollout_engine_that_does_not_comply_in_time_is_killed_and_serving_does_not_wait() -> None:
    sharing = opened(30)
    sharing.observe(10.0, serving=60, rollout=50)
    assert not sharing.observe(11.9, serving=60, rollout=50).kill
    assert sharing.observe(12.0, serving=60, rollout=26).kill
    assert sharing.record_kill() == KvBudget(0, 3, "frozen")
    assert sharing.begin_step(20.0, 30, 0).pages == 50


def test_a_cut_that_is_not_complied_with_outlives_the_beginning_of_a_step() -> None:
    sharing = opened(30)
    cut = sharing.observe(0.0, serving=60, rollout=50)
    assert sharing.begin_step(0.5, 0, 50) == cut
    sharing.observe(1.0, serving=60, rollout=20)
    assert sharing.begin_step(2.0, 30, 20).state == "open"


def test_a_step_that_gives_less_than_is_held_asks_for_it_back_like_a_burst() -> None:
    sharing = opened(30)
    assert sharing.begin_step(9.0, 60, 40) == KvBudget(20, 2, "cut")
    assert sharing.observe(11.0, serving=60, rollout=40).kill
    assert sharing.observe(11.5, serving=60, rollout=20).state == "frozen"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("pages", 0),
        ("headroom", 1.2),
        ("headroom", float("nan")),
        ("watermark", -0.1),
        ("lent", 2),
        ("cut", 1),
        ("deadline", 0),
    ],
)
def test_rules_that_make_no_sense_name_the_field_and_the_value(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field} = "):
        replace(RULES, **{field: value})


def test_whole_requests_go_from_the_lowest_priority_up_and_of_one_priority_the_largest_first() -> None:
    running = {"dear": (-9, 5), "cheap": (-1, 2), "cheaper and larger": (-1, 6), "of a user": (-99, 50)}
    assert displacement_order(running) == ["cheaper and larger", "cheap", "dear", "of a user"]
    assert displacement_order({}) == []


@given(
    strategies.lists(strategies.tuples(strategies.integers(0, 100), strategies.floats(0, 1)), max_size=60),
    strategies.integers(0, 100),
)
def test_replayed_loads_never_make_the_budget_oscillate_or_exceed_what_is_free(
    load: list[tuple[int, float]], peak: int
) -> None:
    """Any serving load, any pace at which the rollout engine complies: within a step the budget only falls."""
    sharing, now, rollout = opened(peak), 0.0, 0
    top = sharing.budget.pages
    assert top + RULES.headroom_pages + peak <= 100 or top == 0
    before = sharing.budget
    for serving, pace in load:
        now += pace
        rollout = min(rollout + 7, max(sharing.budget.pages, rollout - 5))
        budget = sharing.observe(now, serving, rollout)
        assert budget.pages <= before.pages
        assert budget.revision - before.revision == (budget.pages != before.pages)
        assert not budget.kill or rollout > budget.pages
        before = budget


# -- every state that ledger and policy can reach together ----------------------------------------------------------------


@dataclass(frozen=True)
class World:
    """Seven pages. ``wanted``: pages that the rollout engine would like; ``hung``: it does nothing any more; ``clock``: half
    seconds since a cut, at most the deadline and one."""

    serving: int
    rollout: int
    budget: KvBudget
    clock: int
    hung: bool
    told: int  # the revision that the rollout engine has seen


MODEL = SharingRules(pages=7, headroom=0.2, watermark=0.0, deadline=1.0)
_DEADLINE = 2  # of the clock


def policy_of(world: World) -> KvSharing:
    """The real object in this state; at time ``clock`` it is so long since the cut."""
    sharing = KvSharing(MODEL)
    sharing.budget = world.budget
    sharing._deadline = _DEADLINE
    return sharing


@cache
def successors(world: World) -> list[tuple[str, World]]:
    """What may happen next, one atomic thing at a time; the ledger's rules for acquire and release are those of pages.c."""
    free = MODEL.pages - world.serving - world.rollout
    found = []
    if free:
        found.append(("serving grows", replace(world, serving=world.serving + 1)))
    if world.serving:
        found.append(("serving shrinks", replace(world, serving=world.serving - 1)))
    if not world.hung:
        if world.rollout < world.budget.pages and free > MODEL.headroom_pages:
            found.append(("rollout grows", replace(world, rollout=world.rollout + 1)))
        if world.told < world.budget.revision:
            found.append(("rollout reads its budget", replace(world, told=world.budget.revision)))
        elif world.rollout > world.budget.pages:
            found.append(("rollout releases", replace(world, rollout=world.rollout - 1)))
        found.append(("rollout hangs", replace(world, hung=True)))
    if world.budget.state == "cut" and world.clock <= _DEADLINE:
        found.append(("time passes", replace(world, clock=world.clock + 1)))
    sharing = policy_of(world)
    seen = sharing.observe(float(world.clock), world.serving, world.rollout)
    if seen.kill:
        found.append(("guardian kills", replace(world, rollout=0, budget=sharing.record_kill(), clock=0, hung=False)))
    else:
        fresh = seen.revision != world.budget.revision
        found.append(("serving observes", replace(world, budget=seen, clock=0 if fresh else world.clock)))
    sharing = policy_of(world)
    if world.budget.state != "cut":
        found.append(
            (
                "a step begins",
                replace(
                    world,
                    budget=sharing.begin_step(float(world.clock) - _DEADLINE, world.serving, world.rollout),
                    clock=0,
                ),
            )
        )
    # Revisions only matter relative to what the rollout engine was told; without this the state space would be infinite.
    return [
        (name, replace(next_, budget=replace(next_.budget, revision=int(next_.told < next_.budget.revision)), told=0))
        for name, next_ in found
    ]


@cache
def reachable() -> dict[World, list[tuple[str, World]]]:
    start = World(0, 0, KvBudget(0, 0, "frozen"), 0, False, 0)
    graph: dict[World, list[tuple[str, World]]] = {}
    queue = deque([start])
    while queue:
        world = queue.popleft()
        if world not in graph:
            graph[world] = successors(world)
            queue.extend(next_ for _, next_ in graph[world])
    return graph


def test_every_reachable_state_keeps_the_invariants_and_none_is_a_dead_end() -> None:
    graph = reachable()
    assert len(graph) > 1000
    for world, moves in graph.items():
        assert world.serving + world.rollout <= MODEL.pages
        over = world.rollout - world.budget.pages
        assert over <= 0 or world.budget.state == "cut", f"more than its budget, and nothing is under way: {world}"
        if world.budget.state == "cut" and over > 0:
            names = {name for name, _ in moves}
            assert names & {"time passes", "guardian kills", "rollout releases"}, f"nobody moves: {world}"
        for name, after in moves:
            if name == "rollout grows":
                assert MODEL.pages - after.serving - after.rollout >= MODEL.headroom_pages
            if name not in ("a step begins",):
                assert after.budget.pages <= world.budget.pages, f"{name} raised the budget: {world}"


def test_from_every_reachable_state_serving_gets_all_its_pages_back_without_the_rollout_engine_s_help() -> None:
    """No deadlock between a grant and a reclaim: the rollout engine hangs, serving needs everything, and gets it."""
    for world in reachable():
        now = replace(world, hung=True)
        for _ in range(400):
            moves = dict(successors(now))
            wish = "guardian kills" if "guardian kills" in moves else "serving grows"
            if wish not in moves:
                if now.serving == MODEL.pages:
                    break
                observed = moves.get("serving observes", now)
                wish = "serving observes" if observed != now else "time passes"
            assert wish in moves, f"serving waits for ever: {now}"
            now = moves[wish]
        assert now.serving == MODEL.pages, now
