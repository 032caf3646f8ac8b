"""The round planner: what short and long rounds launch, keep and defer, and what a resume finds again."""

import asyncio
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.api import ConfigError, WorkerStats
from orchestrator.build import build_rounds, round_rules
from orchestrator.config import Config, load_config
from orchestrator.envs import Episode
from orchestrator.events import EventLog, MemorySink
from orchestrator.ledger import Ledger
from orchestrator.policies.batching.round_planner import LONG, SHORT, EtaSearch, RoundPlanner, RoundRules, speculated
from orchestrator.proxy.gateway import LLMProxy
from orchestrator.rollout import Rollout
from orchestrator.sim.twins import SimTask
from orchestrator.tail_batching import Rounds, TokenWaste, lane_of
from orchestrator.tasks.frozenlake import FrozenLakeTask
from scripts.bench.papers.tail_batching import fitted, prediction, simulated_epoch
from scripts.bench.papers.tail_batching_scenario import CALIBRATION, alike, lengths


def launch_all(planner: RoundPlanner) -> list[int]:
    numbers = []
    while planner.members_wanted():
        numbers.append(planner.launch_next())
    return numbers


def play(planner: RoundPlanner, slow: frozenset[int] = frozenset()) -> tuple[str, list[int], list[int]]:
    """A whole round without failures: prompts finish in order of number, ``slow`` ones last. Returns (kind, launched, kept)."""
    kind = planner.begin_round().kind
    numbers = launch_all(planner)
    order = sorted(numbers, key=lambda number: (number in slow, number))
    kept = order[: planner.rules.prompts]
    for number in kept:
        planner.mark_ready(number)
    planner.close_round()
    for number in planner.running:
        planner.defer(number)
    planner.end_round(1.0, kept)
    planner.handed_over(kept)
    return kind, numbers, kept


# -- the paper's rounds ------------------------------------------------------------------------------------------------


def test_a_short_round_launches_eta_times_and_a_long_one_exactly_what_was_deferred() -> None:
    """RollPacker 3: with P0 = 4 and eta = 1.25 each short round defers one prompt, and every fifth round is a long one."""
    planner = RoundPlanner(RoundRules(prompts=4, responses=8))
    slow = frozenset((2, 7, 12, 19))
    for _ in range(4):
        assert planner.begin_round().members == 10
        planner.end_round(0.0, ())
        kind, launched, _ = play(planner, slow)
        assert (kind, len(launched)) == (SHORT, 5)
    assert planner.queue_length() == 4
    now = planner.begin_round()
    assert (now.kind, now.target, now.members) == (LONG, 4, 8)
    assert launch_all(planner) == [2, 7, 12, 19]


def test_eta_is_of_prompts_and_of_responses_apart() -> None:
    planner = RoundPlanner(RoundRules(10, 10, eta_prompts=1.1, eta_responses=1.5))
    now = planner.begin_round()
    assert (now.target, now.members) == (11, 15)
    assert speculated(1.1, 10) == 11  # not 12, as 1.1 * 10 > 11 in binary
    assert speculated(1.25, 3) == 4


def test_with_eta_one_nothing_is_deferred_and_there_are_no_long_rounds() -> None:
    planner = RoundPlanner(RoundRules(3, 2, 1.0, 1.0))
    for index in range(4):
        assert play(planner) == (
            SHORT,
            [3 * index, 3 * index + 1, 3 * index + 2],
            [3 * index, 3 * index + 1, 3 * index + 2],
        )
    assert not planner.queue_length()


@pytest.mark.parametrize("seed", range(40))
def test_each_prompt_is_kept_once_an_epoch_whatever_is_slow_fails_or_is_resumed(seed: int) -> None:
    """Random rounds with failures, discards, put-backs and resumes from checkpoints taken before them."""
    chance = random.Random(seed)
    prompts, epoch = chance.randint(1, 5), chance.choice((0, 5, 7, 12))
    rules = RoundRules(prompts, 2, chance.choice((1.0, 1.25, 2.0)), 1.25, epoch, isolate=chance.random() < 0.5)
    planner, done, gone = RoundPlanner(rules), list[int](), list[int]()
    saved = (json.dumps(planner.state()), list(done), list(gone))
    for _ in range(60):
        planner.begin_round()
        kept: list[int] = []
        while len(kept) < prompts:
            launch_all(planner)
            number = chance.choice(planner.running)
            fate = chance.random()
            if fate < 0.15:
                planner.mark_lost(number)
            elif fate < 0.25:
                planner.discard(number)
                gone.append(number)
            else:
                planner.mark_ready(number)
                kept.append(number)
        planner.close_round()
        assert not planner.members_wanted()
        for number in planner.running:
            planner.defer(number, chance.choice(("tokens", "environment")))
        planner.end_round(1.0, kept)
        if chance.random() < 0.1:  # killed before the step was trained
            planner = RoundPlanner(rules)
            planner.restore(json.loads(saved[0]))
            planner.settle()
            done, gone = list(saved[1]), list(saved[2])
            continue
        planner.handed_over(kept)
        done += kept
        if epoch:
            first = max(kept) // epoch * epoch
            assert not [number for number in range(first) if number not in done and number not in gone]
        saved = (json.dumps(planner.state()), list(done), list(gone))
    assert len(set(done)) == len(done)
    assert sorted([*done, *gone, *planner.outstanding]) == list(range(planner.drawn))


# -- what the paper leaves open ----------------------------------------------------------------------------------------


def test_the_rest_of_an_epoch_is_played_without_speculation_and_its_last_round_is_filled_up_from_the_next() -> None:
    planner = RoundPlanner(RoundRules(4, 2, epoch=10))
    assert play(planner, frozenset((1,)))[:2] == (SHORT, [0, 1, 2, 3, 4])
    assert play(planner, frozenset((6,)))[:2] == (SHORT, [5, 6, 7, 8, 9])
    kind, launched, _ = play(planner)
    assert (kind, launched) == (LONG, [1, 6, 10, 11])
    assert play(planner)[:2] == (SHORT, [12, 13, 14, 15, 16])


def test_a_prompt_whose_group_failed_is_launched_again_in_the_same_round_until_it_is_given_up() -> None:
    planner = RoundPlanner(RoundRules(2, 2, 1.0, 1.0, tries=3))
    planner.begin_round()
    assert launch_all(planner) == [0, 1]
    for _ in range(2):
        planner.mark_lost(0)
        assert launch_all(planner) == [0]
    planner.mark_lost(0)
    assert planner.given_up == [0]
    assert launch_all(planner) == [2]


def test_after_a_resume_nothing_of_a_later_epoch_is_trained_before_what_has_to_be_launched_again() -> None:
    rules = RoundRules(1, 2, 1.0, 1.0, epoch=1)
    planner = RoundPlanner(rules)
    for number in range(2):  # one is in the batch that waits for the trainer, the next one is ready
        planner.begin_round()
        assert planner.launch_next() == number
        planner.mark_ready(number)
        if not number:
            planner.end_round(1.0, [number])
    after = RoundPlanner(rules)
    after.restore(planner.state())
    after.mark_ready(1)
    after.mark_lost(0)  # too stale by now
    after.settle()
    assert after.overtaking() == [1]
    after.put_back(1)
    after.begin_round()
    assert after.launch_next() == 0


def test_a_discarded_prompt_is_never_queued_and_is_replaced_within_the_round() -> None:
    """DAPO, RollPacker 7."""
    planner = RoundPlanner(RoundRules(4, 2))
    planner.begin_round()
    assert len(launch_all(planner)) == 5
    planner.discard(3)
    assert launch_all(planner) == [5]
    assert 3 not in planner.outstanding
    assert planner.discarded == 1


def test_a_finished_prompt_that_no_batch_took_is_played_again_but_not_as_a_long_one() -> None:
    planner = RoundPlanner(RoundRules(1, 2, 2.0))
    planner.begin_round()
    assert launch_all(planner) == [0, 1]
    planner.mark_ready(0)
    planner.mark_ready(1)
    planner.close_round()
    planner.put_back(1)
    planner.end_round(1.0, [0])
    assert not planner.queue_length()
    assert planner.begin_round().kind == SHORT
    assert launch_all(planner) == [1, 2]


def test_prompts_that_their_environment_made_late_get_long_rounds_of_their_own() -> None:
    """The agentic variant, RollPacker 7."""
    planner = RoundPlanner(RoundRules(2, 2, 3.0, isolate=True))
    planner.begin_round()
    launch_all(planner)
    planner.defer(0, "tokens")
    for number in (1, 2):
        planner.defer(number, "environment")
    planner.end_round(1.0, ())
    now = planner.begin_round()
    assert (now.kind, now.lane) == (LONG, "environment")
    for number in planner.running:
        planner.discard(number)
    assert launch_all(planner) == [1, 2]


def test_what_made_a_group_late_is_what_its_members_spent_their_time_on() -> None:
    task = SimTask(load_config(None))
    prompt = next(task.prompts("train", 0))
    waiting, talking = Episode("a", "g", prompt, 0.0), Episode("b", "g", prompt, 0.0)
    waiting.waiting_for, talking.waiting_for = "environment step", "generation"
    assert lane_of([waiting], 5.0) == "environment"
    assert lane_of([talking], 5.0) == "tokens"
    talking.started_at = 3.0
    assert lane_of([waiting, talking], 5.0) == "environment"


def test_the_search_tries_each_eta_for_a_period_and_keeps_the_best() -> None:
    search = EtaSearch((1.1, 1.25, 1.4))
    for eta, seconds in ((1.1, 9.0), (1.25, 5.0), (1.4, 7.0)):
        assert search.eta == eta
        search.round_ended(seconds, 4, long=False, deferred=2)
        assert search.eta == eta
        search.round_ended(10.0, 4, long=True)
    assert search.done
    assert search.eta == 1.25
    search.round_ended(100.0, 4, long=False, deferred=2)
    assert search.costs == {eta: pytest.approx((seconds + 5.0) / 6) for eta, seconds in ((1.1, 9), (1.25, 5), (1.4, 7))}
    planner = RoundPlanner(RoundRules(8, 8, search=(1.1, 1.4)))
    assert planner.begin_round().target == 9
    assert planner.search is not None
    planner.search.round_ended(1.0, 8, long=False, deferred=1)
    planner.search.round_ended(1.0, 8, long=True)
    assert planner.begin_round().target == 12


def test_a_long_round_is_charged_to_an_eta_in_the_share_that_it_deferred() -> None:
    """Three short rounds that defer half a batch each fill the queue for one and a half long rounds, not for one."""
    search = EtaSearch((1.5, 1.25))
    for _ in range(3):
        search.round_ended(4.0, 8, long=False, deferred=4)
    search.round_ended(20.0, 8, long=True)
    assert search.costs == {1.5: (3 * 4.0 + 1.5 * 20.0) / 36}
    search.round_ended(20.0, 8, long=True)  # what is left of the first value's queue
    assert search.eta == 1.25
    assert len(search.costs) == 1


def test_an_eta_that_defers_nothing_does_not_keep_the_others_from_being_tried() -> None:
    planner = RoundPlanner(RoundRules(4, 2, search=(1.0, 1.5)))
    for _ in range(4):
        assert planner.search is not None
        assert planner.search.eta == 1.0
        play(planner)
    assert planner.begin_round().eta_prompts == 1.5


def test_the_rest_of_an_epoch_counts_as_a_long_round_and_a_short_one_that_fills_up_for_no_eta() -> None:
    planner = RoundPlanner(RoundRules(4, 2, epoch=12, search=(1.25, 1.5)))
    assert planner.search is not None
    assert [play(planner)[0] for _ in range(2)] == [SHORT, SHORT]
    assert planner.begin_round().closing, "two prompts of the epoch are left, and two are deferred"
    for number in launch_all(planner):
        planner.mark_ready(number)
    planner.end_round(3.0, list(planner._ready))
    assert planner.search.costs == {1.25: (2 * 1.0 + 3.0 * 2 / 4) / 10}
    tight = RoundPlanner(RoundRules(4, 2, epoch=5, search=(1.25, 1.5)))
    assert tight.begin_round().kind == SHORT
    launch_all(tight)
    tight.discard(0)  # the epoch has no other prompt to put in its place
    assert not tight.members_wanted()
    tight.discard(1)
    assert tight.launch_next() == 5
    assert tight.round is not None
    assert tight.round.closing
    tight.end_round(9.0, ())
    assert tight.search is not None
    assert tight.search.state()["rounds"] == 0


def test_a_search_goes_on_in_the_middle_of_a_period() -> None:
    rules = RoundRules(4, 2, search=(1.25, 1.5))
    planner, again = RoundPlanner(rules), RoundPlanner(rules)
    play(planner)
    again.restore(json.loads(json.dumps(planner.state())))
    assert planner.search is not None
    assert again.search is not None
    for search in (planner.search, again.search):
        search.round_ended(3.0, 4, long=True)
    assert again.search.costs == planner.search.costs == {1.25: (1.0 + 3.0 / 4) / 5}


def test_tokens_thrown_away_are_those_made_and_not_delivered_and_those_of_trajectories_that_ended_untrained() -> None:
    def stats(generated: int) -> list[tuple[str, WorkerStats]]:
        return [("w", WorkerStats(0, 0, 0, 0, 0, 0.0, 0, generated=generated))]

    waste = TokenWaste()
    waste.ended += 7
    assert waste.tokens_since_last(stats(100), delivered=80) == 20 + 7
    assert waste.tokens_since_last(stats(150), delivered=130) == 0
    assert waste.tokens_since_last(stats(40), delivered=160) == 10  # the engine began anew


def test_what_a_borrowed_server_made_for_its_users_or_before_is_no_token_thrown_away() -> None:
    ended: list[tuple[Any, ...]] = []
    rounds = SimpleNamespace(
        planner=SimpleNamespace(close_round=lambda: None), losers=list, end_round=lambda *given: ended.append(given),
        begin_round=lambda: None,
    )  # fmt: skip
    own, lent = (WorkerStats(0, 0, 0, 0, 0, 0.0, 0, generated=number) for number in (100, 10**9))

    async def stats() -> list[tuple[str, WorkerStats]]:
        return [("served-0", lent), ("vllm-0", own)]

    def state(name: str, borrowed: bool) -> Any:
        pending = SimpleNamespace(answer=SimpleNamespace(done=lambda: False))
        return SimpleNamespace(
            worker=SimpleNamespace(name=name), borrowed=borrowed, sent={"r": pending}, emptied=asyncio.Event()
        )

    proxy = SimpleNamespace(
        states=[state("vllm-0", False), state("served-0", True)], stats=stats, tokens=0, borrowed_tokens=0,
        _move=lambda *_: None,
    )  # fmt: skip
    for worker, tokens in zip(proxy.states, (80, 500), strict=True):
        said = SimpleNamespace(request_id="r", token_ids=range(tokens), finish_reason="abort")
        LLMProxy._deliver(proxy, worker, said)  # type: ignore[arg-type]
    rollout = SimpleNamespace(
        proxy=proxy, buffer=SimpleNamespace(taken=["g"]), mode=SimpleNamespace(carries_over=True), _room=asyncio.Event()
    )
    asyncio.run(Rollout._end_round(rollout, rounds, 3))  # type: ignore[arg-type]
    assert ended == [(3, ["g"], [("vllm-0", own)], 80)]
    assert TokenWaste().tokens_since_last(*ended[0][2:]) == 20


# -- bad input ---------------------------------------------------------------------------------------------------------


ON = "rollout.rounds.enabled=true"


@pytest.mark.parametrize(
    ("overrides", "field", "says"),
    [
        (["rollout.rounds.eta_prompts=0.9"], "rollout.rounds.eta_prompts", "at least 1"),
        (["rollout.rounds.eta_responses=0.5"], "rollout.rounds.eta_responses", "at least 1"),
        (["rollout.rounds.search=[0.9, 1.2]"], "rollout.rounds.search", "at least 1"),
        ([ON, "rollout.rounds.epoch_prompts=8"], "rollout.rounds.epoch_prompts", "larger data set"),
        ([ON, "rollout.redundant_groups=1.5"], "rollout.redundant_groups", "eta_prompts"),
        ([ON, "rollout.redundant_members=1.5"], "rollout.redundant_members", "eta_responses"),
        ([ON, "rollout.rounds.max_active=9"], "rollout.rounds.max_active", "10 over all workers"),
        ([ON, "filters.balance=task"], "filters.balance", "takes the first ones"),
        ([ON, "rollout.environments=8"], "rollout.environments", "rollout.rounds.eta_responses"),
    ],
)
def test_what_no_round_could_do_is_one_clear_error(overrides: list[str], field: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    assert field in (caught.value.field, f"rollout.{caught.value.field}")
    assert says in str(caught.value)


def small(*overrides: str) -> Config:
    shape = ["rollout.groups_per_step=3", "rollout.group_size=2", ON]
    return load_config(None, [*shape, *overrides])


def rounds_of(config: Config, state: dict[str, object] | None = None, task: object = None) -> Rounds:
    return build_rounds(config, task or SimTask(config), EventLog(MemorySink(), lambda: 0.0), state)  # type: ignore[arg-type]


def test_a_task_says_how_large_its_data_set_is_and_a_batch_beyond_it_is_refused() -> None:
    task = FrozenLakeTask()
    assert round_rules(small(), task).epoch == task.epoch_prompts > 100
    assert round_rules(small("rollout.rounds.epoch_prompts=0"), task).epoch == 0
    task.epoch_prompts = 2
    with pytest.raises(ConfigError, match="would hold one of them twice"):
        rounds_of(small(), task=task)


def test_the_queue_survives_a_checkpoint_and_that_of_another_run_is_refused() -> None:
    rounds = rounds_of(small())
    rounds.begin_round()
    keys = [rounds.start_group(f"g{index}")[0].key for index in range(4)]
    for index in range(3):
        rounds.settled(f"g{index}", "complete")
    rounds.defer("g3", [])
    state = json.loads(json.dumps(rounds.state()))
    again = rounds_of(small(), state)
    assert again.planner.queue_length() == 1
    for index in range(3):
        again.settled(f"g{index}", "complete")  # the checkpoint's buffer has them
    again.resumed()
    assert again.state() == {**state, "planner": again.planner.state()}
    assert again.planner.outstanding == [0, 1, 2, 3]
    assert again.planner.state()["queue"] == [[3, "tokens"]]
    assert rounds.state()["keys"][3] == [3, keys[3]]
    for wrong, says in (("run.seed=1", "seed 0 instead of 1"), ("rollout.groups_per_step=2", "prompts 3 instead of 2")):
        with pytest.raises(ConfigError, match=f"long-prompt queue.*{says}"):
            rounds_of(small(wrong), state)
    state["keys"][3][1] = "of another data set"
    with pytest.raises(ConfigError, match="from another data set"):
        rounds_of(small(), state)


def test_after_a_resume_a_prompt_of_the_next_epoch_waits_for_what_is_left_of_this_one() -> None:
    """Four prompts an epoch: the round that ends it plays prompt 3, which was deferred, and fills up with 4 and 5."""
    config = small("rollout.rounds.epoch_prompts=4")
    rounds = rounds_of(config)
    rounds.begin_round()
    for index in range(4):
        rounds.start_group(f"g{index}")
    for index in range(3):
        rounds.settled(f"g{index}", "complete")
    rounds.defer("g3", [])
    rounds.end_round(1, ["g0", "g1", "g2"], [], 0)
    rounds.trained({"g0": 5, "g1": 5, "g2": 5}, 1.0)
    rounds.begin_round()
    for group in ("late", "early-4", "early-5"):
        rounds.start_group(group)
    for group in ("early-4", "early-5"):
        rounds.settled(group, "complete")
    assert [rounds.number(group) for group in ("late", "early-4", "early-5")] == [3, 4, 5]
    again = rounds_of(config, json.loads(json.dumps(rounds.state())))
    for group in ("early-4", "early-5"):
        again.settled(
            group, "complete"
        )  # the checkpoint's buffer has them; the late one's members died with the process
    assert again.resumed() == ["early-4", "early-5"]
    assert [again.number(group) for group in ("late", "early-4", "early-5")] == [-1, -1, -1]
    again.begin_round()
    started = []
    while again.wanted(0):
        started.append(again.start_group(f"new-{len(started)}")[0].key)
    keys = dict(rounds.state()["keys"])
    assert started == [keys[number] for number in (3, 4, 5)]


def test_a_complete_group_of_the_next_epoch_is_put_back_when_one_of_this_is_lost_unless_the_batch_has_it() -> None:
    """Four prompts an epoch; all of prompts 0 to 5 are complete when 1 is lost, and then 2."""
    rounds = rounds_of(small("rollout.rounds.epoch_prompts=4"))
    state = rounds.state()
    state["planner"] |= {"next": 6, "end": 8, "ready": [0, 1, 2, 3, 4, 5]}
    state["groups"] = [[f"g{number}", number] for number in range(6)]
    rounds = rounds_of(small("rollout.rounds.epoch_prompts=4"), state)
    for number in range(6):
        rounds.settled(f"g{number}", "complete")
    assert rounds.resumed() == []
    rounds.begin_round()
    assert rounds.settled("g1", "group_too_small", ["g4"]) == ["g5"]
    assert rounds.settled("g2", "group_too_small", []) == ["g4"]
    assert rounds.planner.ready == [0, 3]


def test_a_batch_is_of_the_run_until_it_begins_to_be_trained() -> None:
    rounds = rounds_of(small())
    rounds.begin_round()
    for index in range(3):
        rounds.start_group(f"g{index}")
        rounds.settled(f"g{index}", "complete")
    rounds.end_round(0, ["g0", "g1", "g2"], [], 0)
    again = rounds_of(small(), json.loads(json.dumps(rounds.state())))
    for group in ("g0", "g1"):  # the third is in no checkpoint
        again.settled(group, "complete")
    again.resumed()
    again.settled("g1", "group_too_small")  # its file is gone
    again.begin_round()
    started = []
    while again.wanted(0):
        started.append(again.start_group(f"new-{len(started)}")[0].key)
    keys = dict(rounds.state()["keys"])
    assert started[:2] == [keys[2], keys[1]]
    rounds.trained({"g0": 5, "g1": 5, "g2": 5}, 1.0)
    assert not {0, 1, 2} & {number for number, _ in rounds.state()["keys"]}


def test_a_prompt_of_an_earlier_epoch_that_fails_again_and_again_is_not_overtaken_by_a_later_one() -> None:
    """One prompt an epoch; a resume finds two of them untrained, and the first one's group fails."""
    before = RoundPlanner(RoundRules(1, 2, epoch=1))
    state = {**before.state(), "next": 2, "end": 2, "again": [0, 1]}
    planner = RoundPlanner(RoundRules(1, 2, epoch=1))
    planner.restore(state)
    planner.settle()
    planner.begin_round()
    for _ in range(3):
        assert planner.launch_next() == 0
        planner.mark_lost(0)
    planner._queue = {1: "tokens"}
    planner._again = {0: None}
    assert planner.launch_next() == 0, "not even by one that was deferred"


def test_without_rounds_no_line_of_the_journal_changes() -> None:
    sink = MemorySink()
    ledger = Ledger(sink, lambda: 0.0)
    ledger.start("t0", "g0")
    ledger.start("t1", "g1", 5)
    assert [json.loads(line).get("prompt") for line in sink.lines] == [None, 5]
    assert "prompt" not in json.loads(sink.lines[0])


# -- the benchmark -----------------------------------------------------------------------------------------------------


def test_the_workload_of_the_benchmark_is_long_tailed_and_an_epoch_of_it_is_faster_with_rounds() -> None:
    """The simulated part of tail-batching; the real one needs an engine."""
    every = sorted(length for members in lengths()["prompts"] for length in members)
    assert every[-1] > 25 * every[len(every) // 2], "RollPacker 1: the longest is 25 to 32 times the median"
    costs = {"step": 0.00405, "sequence": 0.00005, "token": 0.0}
    plain, tail = simulated_epoch(costs, False), simulated_epoch(costs, True)
    assert (plain["thrown_away"], plain["tokens_thrown_away"]) == ([0] * 10, 11)  # the evaluation's
    assert tail["tokens_thrown_away"] > 0
    assert tail["seconds"] < 0.8 * plain["seconds"]


def test_the_simulated_epoch_aborts_and_defers_what_the_real_one_did() -> None:
    """Counts of tokens and prompts that nothing was fitted to, against those of the recorded run with vLLM."""
    detail = json.loads(Path("docs/results/tail-batching.json").read_text(encoding="utf-8"))["detail"]
    real = next(epoch for epoch in detail["epochs"] if epoch["tail"])
    tail = simulated_epoch(detail["costs"], True)
    assert tail["deferred"] == [one["deferred"] for one in real["rounds"]]
    assert tail["tokens_trained"] == real["tokens_trained"]
    assert tail["tokens_thrown_away"] == pytest.approx(real["tokens_made"] - real["tokens_trained"], rel=0.02)


def test_what_rounds_of_a_simulated_engine_cost_is_found_again() -> None:
    """What the benchmark fits to the real engine's plain rounds, and from which it predicts tail batching."""
    given = {"step": 0.004, "sequence": 8e-5, "token": 5e-4}
    rows = []
    for prompts, members in CALIBRATION:
        wanted = f"rollout.groups_per_step={prompts}", "run.steps=1"
        seconds = simulated_epoch(given, False, *wanted, trace=alike(members))["seconds"]
        rows.append({"prompts": prompts, "members": members, "seconds": seconds})
    found = fitted(rows)
    assert {name: found[name] / given[name] for name in given} == pytest.approx(dict.fromkeys(given, 1.0), rel=0.05)


def test_a_prediction_is_as_far_off_as_in_the_worst_pair() -> None:
    found = prediction(0.6, [0.75, 0.625], quick=False)
    assert (found["predicted_off"], found["predicted_off_most"]) == ([-0.2, -0.04], 0.2)
    assert found["prediction_holds"] is False
    assert prediction(0.6, [0.625], quick=False)["prediction_holds"] is True


def played(config: Config, rewards: dict[str, float], rounds_wanted: int) -> list[str]:
    """What is said in so many rounds whose batches earn these means, by kind."""
    sink = MemorySink()
    rounds = build_rounds(config, SimTask(config), EventLog(sink, lambda: 0.0), None)
    assert rounds is not None
    for step in range(rounds_wanted):
        rounds.begin_round()
        kind = rounds.kind
        groups: list[str] = []
        while rounds.wanted(0):
            groups.append(f"{step}-{len(groups)}")
            rounds.start_group(groups[-1])
        kept, late = groups[:3], groups[3:]
        for group in kept:
            rounds.settled(group, "complete")
        for group in late:
            rounds.defer(group, [])
        rounds.end_round(step, kept, [], 0)
        rounds.trained(dict.fromkeys(kept, 5), rewards[kind])
    return [event["detail"] for event in map(json.loads, sink.lines) if event["kind"] == "alarm"]


def test_a_run_in_which_those_that_finish_first_earn_less_says_so_once() -> None:
    """RollPacker, section 3, on a task whose failures end early: what a short round keeps are the failures."""
    (said,) = played(small(), {SHORT: 0.06, LONG: 0.23}, 80)
    assert said.startswith(
        "responses that finish first earn less: 0.06 in short rounds, 0.23 in long ones, for 16 long"
    )
    assert "rollout.rounds.eta_responses = 1" in said
    assert played(small(), {SHORT: 0.06, LONG: 0.23}, 20) == []  # too few to tell
    assert played(small(), {SHORT: 0.5, LONG: 0.4}, 80) == []  # as in mathematics: the long ones are the hard ones
    assert played(small("rollout.rounds.eta_responses=1"), {SHORT: 0.06, LONG: 0.23}, 80) == []  # nothing is chosen
