"""Time on a shared device: what a serving engine says of its slack, and what a rollout engine's scheduler makes of it."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from orchestrator.api import ConfigError, SharedDevice, WorkerStats
from orchestrator.api.http import stats_from_json
from orchestrator.policies.parallelism.engine_profile import (
    PHASES,
    EngineLayout,
    EngineProfile,
    LearnedCosts,
    ProfiledCosts,
    ProfilePoint,
    StepCosts,
)
from orchestrator.policies.serving.admission import Admission, ServingState, Slo
from vllm_rlplugin.kvpool.engine.step_costs import load_costs
from vllm_rlplugin.kvpool.ledger.page_ledger import PagePool
from vllm_rlplugin.kvpool.ledger.tenant_words import ControlWord, RolloutWords, ServingWords
from vllm_rlplugin.kvpool.serving.rollout_admission import RolloutAdmission, device_status
from vllm_rlplugin.kvpool.serving.serving_slack import ServingMeter
from vllm_rlplugin.kvpool.serving.step_parts import QueueHead, count_parts
from vllm_rlplugin.options import PluginOptions


class Known:
    """10 ms and 0.1 ms a token to prefill; 5 ms and 1 ms a sequence to decode."""

    def prefill(self, tokens: int) -> float:
        return 0.01 + tokens * 0.0001 if tokens else 0.0

    def decode(self, batch: int) -> float:
        return 0.005 + batch * 0.001 if batch else 0.0

    def observe_step(self, tokens: int, batch: int, seconds: float, shared: bool) -> None:
        pass


class Setup:
    """A pool with a serving and a rollout tenant, and one clock that the test moves."""

    def __init__(self, path: Path) -> None:
        self.at = 100.0
        self.pool = PagePool.create(path, 16, page_bytes=4096)
        self.pool.join("serving", "serving")
        self.other = PagePool.open(path)
        self.slot = self.other.join("rollout", "rollout")
        self.meter = ServingMeter(
            self.pool, Known(), Slo(0.2, 0.05), "dual", rollouts=lambda: (self.slot,), now=lambda: self.at
        )
        self.stock = Stock()
        self.slept = 0.0
        self.turns = RolloutAdmission(self.stock, self.other, Known(), 1, now=lambda: self.at, sleep=self.sleep)

    def sleep(self, seconds: float) -> None:
        self.slept += seconds

    def said(self) -> ServingState:
        found = ServingWords.unpack(self.pool.read(0))
        assert found is not None
        return found.state

    def step(self) -> Any:
        return self.turns.schedule(self.stock.schedule, False)


class Queue(list[Any]):
    def peek_request(self) -> Any:
        return self[0]


class Stock:
    """As much of a stock scheduler as :class:`RolloutAdmission` reads: it computes whatever it may."""

    def __init__(self) -> None:
        self.running: list[Any] = []
        self.waiting = Queue()
        self.requests: dict[str, Any] = {}
        self.max_num_scheduled_tokens, self.max_num_running_reqs = 2048, 8
        self.prefill_capacity_bound = False
        self.num_spec_tokens = 0

    def add(self, name: str, prompt: int, outputs: int = 0) -> Any:
        made = request(name, prompt, outputs, computed=prompt + outputs - 1 if outputs else 0)
        made.spec_token_ids = [7] * self.num_spec_tokens if outputs else []
        made.num_tokens_with_spec += len(made.spec_token_ids)
        (self.running if outputs else self.waiting).append(made)
        self.requests[name] = made
        return made

    def schedule(self, throttle: bool) -> Any:
        left, counts, drafted = self.max_num_scheduled_tokens, {}, {}
        if left and not throttle:
            self.running = [*self.waiting, *self.running]
            self.waiting.clear()
        for item in self.running:
            need = item.num_tokens_with_spec - item.num_computed_tokens
            if throttle and not item.num_output_tokens:
                continue
            if count := min(left, need):
                counts[item.request_id] = count
                left -= count
                if item.num_output_tokens and count > 1:
                    drafted[item.request_id] = item.spec_token_ids[: count - 1]
        return step_of(counts, drafted)


def step_of(counts: dict[str, int], drafted: dict[str, list[int]] | None = None) -> Any:
    return SimpleNamespace(
        num_scheduled_tokens=counts,
        total_num_scheduled_tokens=sum(counts.values()),
        scheduled_spec_decode_tokens=drafted or {},
    )


def request(name: str, prompt: int, outputs: int = 0, computed: int = 0, arrival: float = 0.0) -> Any:
    return SimpleNamespace(
        request_id=name,
        num_tokens=prompt + outputs,
        num_tokens_with_spec=prompt + outputs,
        num_output_placeholders=0,
        num_computed_tokens=computed,
        num_output_tokens=outputs,
        spec_token_ids=[],
        arrival_time=arrival,
        is_finished=lambda: False,
        status=SimpleNamespace(name="RUNNING"),
    )


@pytest.fixture
def setup() -> Iterator[Setup]:
    path = Path(f"/dev/shm/rl-coserve-test-{os.getpid()}-{random.randrange(10**9)}")
    yield Setup(path)
    path.unlink()


@pytest.mark.parametrize(
    ("role", "phase"), [("kv_producer", "prefill"), ("kv_consumer", "decode"), ("kv_both", "both"), (None, "both")]
)
def test_what_a_disaggregated_engine_serves_follows_from_its_role(role: str | None, phase: str) -> None:
    from vllm_rlplugin.kvpool.engine.pool_scheduling import phase_of

    transfer = None if role is None else SimpleNamespace(kv_role=role)
    assert phase_of(SimpleNamespace(kv_transfer_config=transfer)) == phase


def test_what_is_said_comes_out_as_it_went_in_and_is_not_taken_for_something_else() -> None:
    state = ServingState(123.456789, -0.25, math.inf, 5.5, True, -math.inf, 99, 3, True, 0.125)
    said = ServingWords(state, "tpot", 1, 2, 3, 4, 5, 6)
    assert ServingWords.unpack(said.pack()) == said
    rolled = RolloutWords(True, False, 1.5, 2.25, 0.003, 9, 1, 2, 3, 4, 5, 6, 7)
    assert RolloutWords.unpack(rolled.pack()) == rolled
    assert ServingWords.unpack(rolled.pack()) is None
    assert RolloutWords.unpack(said.pack()) is None
    assert ServingWords.unpack(None) is None


# -- serving -----------------------------------------------------------------------------------------------------------


def test_an_arrival_is_published_at_once_with_the_slack_of_equation_1(setup: Setup) -> None:
    setup.at = 100.02
    setup.meter.request_added(request("a", 400, arrival=100.0))
    found = setup.said()
    assert found.busy
    assert found.ttft_slack == pytest.approx(0.2 - 0.02 - 0.05)
    assert found.tpot_slack == math.inf
    assert found.arriving == pytest.approx(0.2 - 0.05 - 0.05), "one that comes now waits for this one"
    setup.meter.request_added(request("b", 400, arrival=100.02))
    assert setup.said().ttft_slack == pytest.approx(min(0.13, 0.2 - 0.1))


def test_a_step_is_published_with_its_end_and_a_token_with_the_slack_of_equation_2(setup: Setup) -> None:
    first = request("a", 400, arrival=100.0)
    setup.meter.request_added(first)
    setup.meter.step_scheduled(step_of({"a": 400}))
    first.num_computed_tokens = 400
    assert setup.said().step_end == pytest.approx(100.05)
    setup.at = 100.06
    first.num_output_tokens, first.num_tokens = 1, 401
    setup.meter.step_ended()
    found = setup.said()
    assert found.step_end == 0.0
    assert found.ttft_slack == math.inf
    assert found.tpot_slack == pytest.approx(0.05 - 0.006)
    setup.meter.step_scheduled(step_of({"a": 1}))
    assert setup.said().tpot_slack == pytest.approx(0.05 - 0.006), "it stands while the step runs"
    assert (setup.meter.latest.firsts, setup.meter.latest.late_first) == (1, 0)


def test_a_request_that_decodes_spares_nothing_before_it_has_earned_what_the_next_prompt_will_cost_it(
    setup: Setup,
) -> None:
    first = request("a", 800, arrival=setup.at)
    setup.meter.request_added(first)
    setup.meter.step_scheduled(step_of({"a": 800}))
    setup.stock.add("r", 100, outputs=5)
    admitted = []
    for made in range(1, 5):
        first.num_computed_tokens, first.num_output_tokens = 799 + made, made
        setup.at += 0.01
        setup.meter.step_ended()
        said = setup.said()
        assert said.tpot_slack == pytest.approx(0.05 - 0.006), "equation 2 looks at its latest token"
        assert said.arriving_tpot == pytest.approx(min(0.044, 0.044 + (made - 1) * 0.04 - 0.09)), (
            "40 ms with each token"
        )
        output = setup.step()
        admitted.append(output.total_num_scheduled_tokens)
        setup.turns.step_ended(output)
        setup.meter.step_scheduled(step_of({"a": 1}))
    assert admitted == [0, 0, 1, 1]


def test_of_two_steps_under_way_each_token_has_the_slack_of_the_step_that_makes_it(setup: Setup) -> None:
    """Async scheduling: the second step is scheduled before the first is over."""
    first = request("a", 400, arrival=100.0)
    setup.meter.request_added(first)
    setup.meter.step_scheduled(step_of({"a": 400}))
    setup.at = 100.06
    first.num_output_tokens, first.num_tokens, first.num_computed_tokens = 1, 401, 400
    setup.meter.step_ended()
    first.num_output_placeholders = 1
    setup.meter.step_scheduled(step_of({"a": 1}))
    alone = setup.said().tpot_slack
    assert alone == pytest.approx(0.05 - 0.006)
    first.num_output_placeholders = 2
    setup.meter.step_scheduled(step_of({"a": 1}))
    assert setup.said().step_end == pytest.approx(100.072), "one after the other"
    assert setup.said().tpot_slack == pytest.approx(alone), "the next token does not wait for the second step"
    late = request("b", 1000, arrival=100.06)
    setup.meter.request_added(late)
    setup.meter._steps.pop()
    setup.meter.step_scheduled(step_of({"a": 1, "b": 1000}))
    assert setup.said().tpot_slack == pytest.approx(0.1 - 0.006 - 0.116), "the second takes longer than the SLO"


def test_a_step_costs_what_it_ran_and_not_what_it_waited_for_the_one_before(setup: Setup) -> None:
    seen: list[tuple[int, int, float, bool]] = []
    costs = Known()
    costs.observe_step = lambda *what, shared: seen.append((*what, shared))  # type: ignore[method-assign,assignment]
    meter = ServingMeter(
        setup.pool, costs, Slo(0.2, 0.05), "dual", rollouts=lambda: (setup.slot,), now=lambda: setup.at
    )
    first = request("a", 400, arrival=100.0)
    meter.request_added(first)
    setup.other.publish(RolloutWords(busy=0.0).pack())
    meter.step_scheduled(step_of({"a": 400}))
    first.num_output_placeholders = 2  # as vLLM counts when the next step is scheduled before the first token is there
    setup.at = 100.01
    meter.step_scheduled(step_of({"a": 1}))
    setup.other.publish(RolloutWords(busy=0.02).pack())
    setup.at = 100.05
    first.num_output_tokens = 1
    meter.step_ended()
    setup.at = 100.056
    meter.step_ended()
    assert [(tokens, batch, shared) for tokens, batch, _, shared in seen] == [(400, 0, True), (0, 1, False)]
    assert [seconds for _, _, seconds, _ in seen] == pytest.approx([0.05, 0.006])


def test_a_late_token_is_blamed_on_rollouts_only_if_it_would_have_been_in_time_without(setup: Setup) -> None:
    first = request("a", 400, outputs=0, arrival=100.0)
    setup.meter.request_added(first)
    setup.meter.step_scheduled(step_of({"a": 400}))
    setup.other.publish(RolloutWords(running=True, begun=100.0).pack())
    setup.at = 100.25
    setup.other.publish(RolloutWords(busy=0.08).pack())
    first.num_output_tokens = 1
    setup.meter.step_ended()
    latest = setup.meter.latest
    assert (latest.firsts, latest.late_first, latest.blamed_first) == (1, 1, 1)
    setup.meter.step_scheduled(step_of({"a": 1}))
    setup.at = 100.40
    setup.other.publish(RolloutWords(busy=0.10).pack())
    first.num_output_tokens = 2
    setup.meter.step_ended()
    latest = setup.meter.latest
    assert (latest.nexts, latest.late_next, latest.blamed_next) == (1, 1, 0), "100 ms late, rollouts ran 20 ms of it"


def test_a_run_is_told_what_its_worker_has_of_the_device_and_what_serving_can_spare(setup: Setup) -> None:
    lent = {"pages": 0, "budget": 8, "page_bytes": 4096, "serving_pages": 0, "pool_pages": 16}
    setup.pool.set_budget(setup.slot, 8, 1)
    assert device_status(setup.other, setup.slot) == lent, "serving has not said anything yet"
    assert setup.other.acquire(3).size == 3
    setup.meter.request_added(request("a", 400, arrival=100.0))
    busy = device_status(setup.other, setup.slot)
    assert busy is not None
    assert (busy["pages"], busy["tpot_slack"]) == (3, None)
    assert busy["ttft_slack"] == pytest.approx(0.2 - 0.05)
    setup.meter.step_scheduled(step_of({"a": 400}))
    setup.at = 100.25
    setup.meter.step_ended()
    late = device_status(setup.other, setup.slot)
    assert late is not None
    assert late["ttft_slack"] < 0
    read = stats_from_json(
        json.loads(json.dumps(asdict(WorkerStats(0, 0, 0, 1, 0, 0.0, 0, shared=SharedDevice(**late)))))
    )
    assert read.shared == SharedDevice(**late)
    setup.other.release(np.flatnonzero(setup.other.owners() == setup.slot).astype(np.uint64))
    setup.other.leave()
    assert device_status(setup.pool, setup.slot) is None


def test_a_prefiller_counts_no_decodes_and_a_decoder_no_first_tokens(setup: Setup) -> None:
    for phase, ttft, tpot in (("prefill", True, False), ("decode", False, True)):
        meter = ServingMeter(
            setup.pool, Known(), Slo(0.2, 0.05), "dual", phase=phase, rollouts=lambda: (1,), now=lambda: setup.at
        )
        meter.request_added(request("a", 100, arrival=setup.at))
        decoding = request("b", 100, arrival=setup.at)
        meter.request_added(decoding)
        meter.step_scheduled(step_of({"b": 100}))
        decoding.num_output_tokens = 1
        meter.step_ended()
        state = meter.serving_state(setup.at)
        assert (state.ttft_slack < math.inf, state.tpot_slack < math.inf) == (ttft, tpot)
        assert state.waiting == ttft, "a decoder's prompts have their first tokens from elsewhere"


def test_nothing_is_lent_of_what_was_never_measured(setup: Setup) -> None:
    meter = ServingMeter(setup.pool, LearnedCosts(math.inf), Slo(), "dual", rollouts=lambda: (1,), now=lambda: setup.at)
    meter.request_added(request("a", 100, arrival=setup.at))
    assert meter.serving_state(setup.at).ttft_slack == -math.inf


def test_an_idle_engine_says_so_by_itself(setup: Setup) -> None:
    setup.meter.publish_idle()
    assert not setup.said().busy
    assert setup.said().arriving == pytest.approx(0.1), "half of the SLO while no prompt was ever seen"


def test_a_prompt_that_is_aborted_before_its_first_token_is_not_waited_for(setup: Setup) -> None:
    prompt = request("a", 400, arrival=setup.at)
    setup.meter.request_added(prompt)
    setup.meter.publish_idle()
    assert setup.said().waiting, "it is still there"
    setup.meter.request_gone("a")
    setup.meter.publish_idle()
    assert (setup.said().busy, setup.said().waiting) == (False, False)


class Every:
    """The slack of equation 2 and the counts, by a look at every request in every step."""

    def __init__(self, slo: Slo) -> None:
        self.slo, self.counts = slo, [0] * 6
        self.known: dict[str, list[float]] = {}  # name -> since, first, tokens
        self.steps: list[tuple[set[str], float]] = []

    def ended(self, now: float, requests: dict[str, Any]) -> None:
        names, _ = self.steps.pop(0)
        for name in sorted(names & requests.keys()):
            since, first, tokens = self.known[name]
            new = requests[name].num_output_tokens - tokens
            if new > 0:
                at, limit = (3, self.slo.tpot * new) if tokens else (0, self.slo.ttft)
                self.counts[at] += new if tokens else 1
                self.counts[at + 1] += now - since > limit
                self.known[name] = [now, first if tokens else now, requests[name].num_output_tokens]

    def tpot(self, now: float, requests: dict[str, Any], ends: list[float], otherwise: float) -> tuple[float, float]:
        least = mean = math.inf
        for name in requests:
            since, first, tokens = self.known[name]
            if tokens:
                mine = [end for (names, _), end in zip(self.steps, ends, strict=True) if name in names]
                ready = max((end - now - at * self.slo.tpot for at, end in enumerate(mine)), default=otherwise)
                due = first + (tokens - 1) * self.slo.tpot
                mean = min(mean, due + self.slo.tpot - now - ready)
                least = min(least, min(since, due) + self.slo.tpot - now - ready)
        return least, mean


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("seed", range(12))
def test_slack_and_counts_are_those_of_a_look_at_every_request(setup: Setup, seed: int, drafts: int) -> None:
    """Arrivals, chunked prompts, steps for some of those that decode, preemptions, ends, aborts; one or two steps in flight."""
    rng, slo = random.Random(seed), Slo(0.2, 0.05)
    meter = ServingMeter(setup.pool, Known(), slo, "dual", rollouts=lambda: (setup.slot,), now=lambda: setup.at)
    every, requests, flights, made = Every(slo), dict[str, Any](), list[Any](), 0
    for _ in range(150):
        setup.at += rng.choice((0.001, 0.02, 0.08))
        while rng.random() < 0.3:
            made += 1
            name = f"r{made}"
            requests[name] = request(name, rng.randrange(1, 300), arrival=setup.at)
            meter.request_added(requests[name])
            every.known[name] = [setup.at, 0.0, 0]
        if len(flights) < rng.choice((1, 2)):
            counts: dict[str, int] = {}
            drafted: dict[str, list[int]] = {}
            for name, found in requests.items():
                left = found.num_tokens + found.num_output_placeholders - found.num_computed_tokens
                if (
                    rng.random() < 0.05
                    and found.num_output_tokens
                    and not any(name in names for names, _ in every.steps)
                ):
                    found.num_computed_tokens, left = 0, found.num_tokens  # preempted: it computes again what it had
                if left <= 0 or rng.random() < 0.1:
                    continue
                counts[name] = min(left, 100)
                if left == 1 and found.num_output_tokens and drafts and rng.random() < 0.7:
                    drafted[name] = [7] * rng.randrange(1, drafts + 1)
                    counts[name] += len(drafted[name])
            making = set[str]()
            for name, count in counts.items():
                found = requests[name]
                found.num_computed_tokens += count - len(drafted.get(name, ()))
                whole = found.num_computed_tokens >= found.num_tokens + found.num_output_placeholders
                found.num_output_placeholders += whole
                making |= {name} if whole else set()
            output = step_of(counts, drafted)
            flights.append((output, making))
            every.steps.append((set(counts), 0.0))
            meter.step_scheduled(output)
            assert (meter._steps[-1].tokens, meter._steps[-1].batch) == count_parts(output, requests)
        elif flights:
            output, making = flights.pop(0)
            gone = []
            for name in sorted(making):
                if (found := requests.get(name)) is not None:
                    found.num_output_placeholders -= 1
                    new = 1 + rng.randrange(len(output.scheduled_spec_decode_tokens.get(name, ())) + 1)
                    found.num_output_tokens += new
                    for what in ("num_tokens", "num_tokens_with_spec"):
                        setattr(found, what, getattr(found, what) + new)
                    found.num_computed_tokens += new - 1
                    if rng.random() < 0.1:
                        gone.append(name)
            for name in gone:
                meter.request_gone(name)
            every.ended(setup.at, requests)
            meter.step_ended()
            for name in gone:
                del requests[name]
        if requests and rng.random() < 0.05:
            name = rng.choice(sorted(requests))
            del requests[name]
            meter.request_gone(name)
        if not any(name in meter._gone for name in meter._requests):
            steps = tuple(meter._steps)
            ends = meter._ends(steps, setup.at)
            flown = list(zip(steps, ends, strict=True))
            least, mean = every.tpot(setup.at, requests, ends, 0.01)
            assert meter._tpot(setup.at, flown, 0.01) == (pytest.approx(least), pytest.approx(mean))
        assert meter._counts[:2] + meter._counts[3:5] == every.counts[:2] + every.counts[3:5]
    assert every.counts[3] > 50


# -- rollouts ----------------------------------------------------------------------------------------------------------


def test_no_step_runs_before_serving_has_said_anything_and_each_is_cut_to_what_is_admitted(setup: Setup) -> None:
    setup.stock.add("r", 10_000)
    assert setup.step().total_num_scheduled_tokens == 0
    assert setup.slept > 0
    setup.meter.publish_idle()
    output = setup.step()
    assert output.total_num_scheduled_tokens == 256, "of 512, as who begins to decode meanwhile waits for 44 ms at most"
    assert setup.step().total_num_scheduled_tokens == 0, "one at a time"
    setup.at += 0.07
    setup.turns.step_ended(output)
    prompt = request("a", 200, arrival=setup.at)
    setup.meter.request_added(prompt)
    assert setup.step().total_num_scheduled_tokens == 0
    assert setup.turns.reason == "a prompt of serving waits"
    setup.meter.step_scheduled(step_of({"a": 200}))
    assert setup.step().total_num_scheduled_tokens == 0, "it is prefilled, and has no token yet"
    prompt.num_computed_tokens, prompt.num_output_tokens = 200, 1
    setup.meter.step_ended()
    output = setup.step()
    assert output.total_num_scheduled_tokens == 16, (
        "for 12 ms: another such prompt would take the rest of what it can spare"
    )
    said = RolloutWords.unpack(setup.pool.read(setup.slot))
    assert said is not None
    assert said.running
    assert said.steps == 1
    assert setup.stock.max_num_scheduled_tokens == 2048


def test_decoding_goes_first_and_prefill_waits_where_both_do_not_fit(setup: Setup) -> None:
    setup.stock.add("long", 10_000)
    for name in "abcd":
        setup.stock.add(name, 100, outputs=5)
    setup.pool.publish(ServingWords(ServingState(setup.at, 0.012, busy=True, tick=1)).pack())
    assert setup.step().num_scheduled_tokens == {"a": 1, "b": 1, "c": 1, "d": 1}


def test_where_not_all_may_decode_they_take_turns(setup: Setup) -> None:
    for name in "abcd":
        setup.stock.add(name, 100, outputs=5)
    decoded = []
    for tick in range(1, 4):
        setup.pool.publish(ServingWords(ServingState(setup.at, 0.0095, busy=True, tick=tick)).pack())
        output = setup.step()
        decoded.append("".join(output.num_scheduled_tokens))
        setup.turns.step_ended(output)
    assert decoded == ["ab", "cd", "ab"], "else the last ones are handed back as stalled"


def test_drafted_tokens_are_part_of_a_decode_and_no_prefill(setup: Setup) -> None:
    setup.stock.num_spec_tokens = 3
    for name in "ab":
        setup.stock.add(name, 100, outputs=5)
    setup.pool.publish(ServingWords(ServingState(setup.at, 0.012, busy=True, tick=1)).pack())
    output = setup.step()
    assert output.num_scheduled_tokens == {"a": 4, "b": 4}, "room for two decodes, none for a prefill"
    assert count_parts(output, setup.stock.requests) == (0, 2)
    resumed = step_of({"a": 4})
    assert count_parts(resumed, setup.stock.requests) == (4, 0), "tokens that are computed again were not drafted"


def test_the_head_of_a_queue_is_read_anew_only_when_the_queue_has_changed() -> None:
    read: list[str] = []

    class Sorting(Queue):
        def __iter__(self) -> Iterator[Any]:
            for item in list.__iter__(self):
                read.append(item.request_id)
                yield item

    waiting = Sorting(request(name, 100) for name in "abcd")
    head = QueueHead(SimpleNamespace(waiting=waiting), lambda item: int(item.num_tokens))
    for _ in range(3):
        assert head.read(150, 8) == [100, 100]
    assert read == ["a", "b"]
    waiting.pop(0)
    assert head.read(150, 1) == [100]
    assert head.read(150, 0) == []
    assert read == ["a", "b", "b"]


def test_a_serving_engine_that_comes_while_a_batch_is_in_flight_waits_for_that_one_only(setup: Setup) -> None:
    """Async scheduling: where there is nobody to consider two steps are under way, else one."""
    setup.stock.add("r", 10_000)
    setup.pool.publish(ServingWords(ServingState(setup.at), "none").pack())
    first, second = setup.step(), setup.step()
    assert (first.total_num_scheduled_tokens, second.total_num_scheduled_tokens) == (2048, 2048)
    setup.turns.step_ended(first)
    setup.meter.publish_idle()
    assert setup.step().total_num_scheduled_tokens == 0, "one is in flight still"
    setup.turns.step_ended(second)
    assert setup.step().total_num_scheduled_tokens == 256


def test_a_rollout_engine_says_that_it_loads_weights_until_it_says_anything_else(setup: Setup) -> None:
    def said() -> tuple[bool, float]:
        found = RolloutWords.unpack(setup.pool.read(setup.slot))
        assert found is not None
        return found.loading, found.begun

    setup.turns.note_loading()
    assert said() == (True, setup.at)
    setup.turns.note_loaded()
    assert not said()[0]


def test_where_no_serving_engine_is_everything_runs(setup: Setup) -> None:
    setup.pool.leave()
    setup.stock.add("r", 10_000)
    assert setup.step().total_num_scheduled_tokens == 2048


def test_mode_none_is_stock(setup: Setup) -> None:
    setup.pool.publish(ServingWords(ServingState(setup.at, -1.0, busy=True, tick=1), "none").pack())
    setup.stock.add("r", 10_000)
    assert setup.step().total_num_scheduled_tokens == 2048


def test_a_dry_run_computes_nothing_and_counts_what_it_would_have(setup: Setup) -> None:
    setup.meter.publish_idle()
    setup.pool.control(ControlWord.DRY, 1)
    setup.stock.add("r", 10_000)
    for _ in range(100):
        setup.at += 0.001
        assert setup.step().total_num_scheduled_tokens == 0
    told = setup.turns.words()
    assert told.dry
    assert told.tokens == 0
    assert told.would == 3 * 256, "a chunk takes 36 ms"
    setup.pool.control(ControlWord.DRY, 0)
    assert setup.step().total_num_scheduled_tokens == 256


def refused_but(setup: Setup, costs: StepCosts, takes: Callable[[int], float], seconds: float) -> list[float]:
    """Of a rollout engine with a sequence that decodes: when its steps began. ``takes``: seconds of its n-th step."""
    turns, begun = RolloutAdmission(setup.stock, setup.other, costs, 1, now=lambda: setup.at), list[float]()
    turns._sleep = lambda pause: None
    setup.stock.add("r", 100, outputs=5)
    start = setup.at
    while setup.at < start + seconds:
        output = turns.schedule(setup.stock.schedule, False)
        if output.total_num_scheduled_tokens:
            begun.append(setup.at - start)
            setup.at += takes(len(begun))
            turns.step_ended(output)
        else:
            setup.at += 0.01
    return begun


def test_one_unlucky_step_keeps_a_rollout_engine_out_for_a_second_and_not_for_ever(setup: Setup) -> None:
    setup.meter.publish_idle()
    begun = refused_but(setup, LearnedCosts(0.02), lambda step: 0.3 if step == 1 else 0.002, 3.0)
    assert begun[1] - begun[0] == pytest.approx(1.3, abs=0.02)
    assert len(begun) > 500


def test_steps_that_never_fit_are_tried_ever_less_often(setup: Setup) -> None:
    setup.meter.publish_idle()
    begun = refused_but(setup, LearnedCosts(0.02), lambda step: 0.06, 300.0)
    waits = [after - before - 0.06 for before, after in itertools.pairwise(begun)]
    assert waits == pytest.approx([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 64.0, 64.0], abs=0.02)


def test_what_nobody_measured_is_tried_though_it_is_reckoned_too_long(setup: Setup) -> None:
    setup.meter.publish_idle()
    assert len(refused_but(setup, LearnedCosts(1.0), lambda step: 0.002, 2.0)) > 400


@pytest.mark.parametrize("why", ["serving is busy", "it was profiled", "serving spares nothing"])
def test_nothing_is_tried_where_it_could_make_a_token_late_or_teach_nothing(setup: Setup, why: str) -> None:
    busy, left = why == "serving is busy", -1.0 if why == "serving spares nothing" else 0.03
    setup.at = 0.0
    state = ServingState(0.0, step_end=60.0, busy=busy, tpot_slack=left, arriving=left, tick=1)
    setup.pool.publish(ServingWords(state).pack())
    costs: StepCosts = LearnedCosts(1.0)
    if why == "it was profiled":
        layout = EngineLayout()
        points = [ProfilePoint(phase, layout, 1, 64, 1.0) for phase in PHASES]
        costs = ProfiledCosts(EngineProfile(points), 64)
    assert refused_but(setup, costs, lambda step: 0.002, 50.0) == []


def test_what_makes_no_progress_for_two_seconds_is_handed_back_once(setup: Setup) -> None:
    setup.stock.add("slow", 100, outputs=5)
    moving = setup.stock.add("moving", 100, outputs=5)
    setup.step()
    handed: list[str] = []
    for _ in range(30):
        setup.at += 0.1
        moving.num_computed_tokens += 1
        handed += setup.turns.requests_to_hand_back(set())
        for name in handed:
            setup.stock.requests.pop(name, None)
    assert handed == ["slow"]
    assert setup.turns.words().stalls == 1
    assert setup.turns.requests_to_hand_back({"moving"}) == ["moving"], "its pages were taken: at once"


def test_what_waits_for_room_for_two_seconds_is_handed_back_while_others_run(setup: Setup) -> None:
    moving = setup.stock.add("moving", 100, outputs=5)
    setup.step()
    setup.stock.add("waits", 100)
    handed: list[str] = []
    for _ in range(30):
        setup.at += 0.1
        moving.num_computed_tokens += 1
        handed += setup.turns.requests_to_hand_back(set())
    assert handed == ["waits"]


def test_after_a_pause_nothing_counts_as_stalled(setup: Setup) -> None:
    setup.stock.add("r", 100, outputs=5)
    setup.step()
    assert setup.turns.requests_to_hand_back(set()) == []
    setup.at += 10.0
    assert setup.turns.requests_to_hand_back(set()) == []


# -- both, on one device that they share evenly --------------------------------------------------------------------------


class Shared:
    """A serving engine that plays arrivals [(seconds, prompt, answer)], and a rollout engine of eight sequences that decode:
    while steps of both run, each has half of the device. ``reserve``: whether what the next prompt costs is reckoned with; None:
    no rollouts. A step takes up to a third longer than its cost."""

    def __init__(self, setup: Setup, arrivals: list[tuple[float, int, int]], slo: Slo, reserve: bool | None) -> None:
        self.rng, self.slo, self.tokens, self.tpot = random.Random(7), slo, 0, list[float]()
        self.setup, self.todo, setup.at = setup, list(arrivals), 0.0
        self.meter = ServingMeter(setup.pool, Known(), slo, "dual", rollouts=lambda: (1,), now=lambda: setup.at)
        self.reserve, self.admission = reserve, Admission(Known().prefill, lambda batch: 0.004 + batch * 0.0003)
        self.waiting, self.running, self.firsts = list[Any](), list[Any](), dict[str, float]()

    def lasts(self, cost: float) -> float:
        return cost * (1 + self.rng.random() / 3)

    def play(self) -> list[float]:
        """Seconds between tokens, of each request in the mean."""
        served = rolled = math.inf  # seconds left of the steps that run
        while self.todo or self.waiting or self.running or served < math.inf:
            if served == math.inf and (self.waiting or self.running):
                counts = {one.request_id: 1 for one in self.running} | {
                    one.request_id: one.num_tokens for one in self.waiting
                }
                prompts = sum(one.num_tokens for one in self.waiting)
                served = self.lasts(Known().prefill(prompts) + Known().decode(len(self.running)))
                self.running, self.waiting = self.running + self.waiting, []
                for one in self.running:
                    one.num_computed_tokens = one.num_tokens
                self.meter.step_scheduled(step_of(counts))
            if rolled == math.inf and self.reserve is not None and (seconds := self.admitted()):
                rolled, self.tokens = self.lasts(seconds), self.tokens + 8
            part = 0.5 if served < math.inf and rolled < math.inf else 1.0
            arrival = self.todo[0][0] - self.setup.at if self.todo else math.inf
            passed = max(0.0, min(arrival, served / part, rolled / part, 0.001))
            self.setup.at, served, rolled = self.setup.at + passed, served - part * passed, rolled - part * passed
            while self.todo and self.todo[0][0] <= self.setup.at + 1e-9:
                at, prompt, answer = self.todo.pop(0)
                one = request(f"q{len(self.todo)}", prompt, arrival=at)
                one.answer = answer
                self.waiting.append(one)
                self.meter.request_added(one)
            if served < 1e-9:
                served = math.inf
                self.end_step()
            if rolled < 1e-9:
                rolled = math.inf
        return sorted(self.tpot)

    def admitted(self) -> float:
        state = replace(self.meter.serving_state(self.setup.at), tick=self.meter._tick)
        if not self.reserve:
            state = replace(state, arriving_tpot=math.inf)
        found = self.admission.admit(state, self.setup.at, 0, 8)
        return found.seconds if found.decode == 8 else 0.0

    def end_step(self) -> None:
        for one in self.running:
            one.num_output_tokens, one.num_tokens = one.num_output_tokens + 1, one.num_tokens + 1
            first = self.firsts.setdefault(one.request_id, self.setup.at)
            if one.num_output_tokens == one.answer:
                self.tpot.append((self.setup.at - first) / (one.answer - 1))
                self.meter.request_gone(one.request_id)
        self.running = [one for one in self.running if one.num_output_tokens < one.answer]
        self.meter.step_ended()


def test_who_decodes_beside_rollouts_is_late_no_more_often_than_alone_where_the_next_prompt_is_reckoned_with(
    setup: Setup,
) -> None:
    """Equation 2 alone spends what a request can spare on rollouts, and the prompt that comes then delays it too. SLO: 1.5 x
    P90 of serving alone, so that some are late without rollouts, which lose next to nothing: a few tokens earn it."""
    late, tokens = dict[bool | None, int](), dict[bool | None, int]()
    for seed in range(4):
        rng, arrivals, at = random.Random(seed), list[tuple[float, int, int]](), 0.0
        for _ in range(100):
            at += rng.expovariate(3.0)
            arrivals.append((at, rng.randrange(20, 400), rng.randrange(2, 24)))
        alone = Shared(setup, arrivals, Slo(60.0, 60.0), None).play()
        slo = Slo(10.0, 1.5 * alone[9 * len(alone) // 10])
        for reserve in (None, False, True):
            played = Shared(setup, arrivals, slo, reserve)
            late[reserve] = late.get(reserve, 0) + sum(seconds > slo.tpot for seconds in played.play())
            tokens[reserve] = tokens.get(reserve, 0) + played.tokens
    assert late[True] <= late[None] + 1
    assert late[False] > 1.5 * late[None]
    assert tokens[True] > 0.98 * tokens[False]


# -- costs -------------------------------------------------------------------------------------------------------------


def test_learned_costs_are_those_of_steps_alone_and_grow_with_sizes_never_seen() -> None:
    costs = LearnedCosts(0.5)
    assert costs.prefill(64) == 0.5
    for _ in range(5):
        costs.observe_step(64, 0, 0.04, shared=True)
    assert costs.prefill(64) == pytest.approx(0.04)
    for seconds in (0.01, 0.02, 0.02, 0.02, 0.03):
        costs.observe_step(64, 0, seconds, shared=False)
    assert costs.prefill(64) == pytest.approx(0.03), "the upper end, of steps alone"
    assert costs.prefill(256) == pytest.approx(0.12)
    assert costs.prefill(10) == pytest.approx(0.03)
    costs.observe_step(0, 4, 0.01, shared=False)
    costs.observe_step(128, 4, 0.05, shared=False)
    assert costs.prefill(128) == pytest.approx(0.04)


def test_an_unlucky_step_of_a_size_is_not_its_cost_where_larger_ones_cost_less() -> None:
    costs = LearnedCosts(0.5)
    costs.observe_step(0, 1, 0.013, shared=True)
    assert costs.decode(1) == pytest.approx(0.013), "all that is known"
    for _ in range(5):
        costs.observe_step(0, 4, 0.002, shared=False)
    assert [costs.decode(batch) for batch in (1, 2, 3, 4, 8)] == pytest.approx([0.002, 0.002, 0.002, 0.002, 0.004])


def config_of(architecture: str = "Qwen3ForCausalLM") -> Any:
    shape = SimpleNamespace(num_hidden_layers=2, hidden_size=64)
    model = SimpleNamespace(
        architectures=[architecture], hf_text_config=shape, dtype="torch.float32", max_model_len=512
    )
    return SimpleNamespace(model_config=model)


def write_profile(path: Path, **key: str) -> str:
    import torch

    from vllm_rlplugin.engine_profiler import identity

    here = {"model": "Qwen3ForCausalLM 2x64 float32 0123abcd", **identity(torch.get_num_threads())}
    points = [
        {"phase": phase, "tp": 1, "ep": 1, "batch": 1, "tokens": tokens, "seconds": 0.03, "spread": 0.0}
        for phase in ("prefill", "decode")
        for tokens in (64, 128)
    ]
    path.write_text(json.dumps({"format": 1, "key": {**here, **key}, "points": points}))
    return str(path)


def test_a_profile_of_this_engine_is_used_and_one_of_another_device_is_one_error(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    options = PluginOptions(kv_pool="a", kv_pool_profile=write_profile(path))
    costs = load_costs(config_of(), options, unknown=1.0, slo=Slo(0.1, 0.05))
    assert costs.prefill(100) == pytest.approx(0.03)
    with pytest.raises(ConfigError, match="cannot be met even without rollouts: a prompt of 1 tokens"):
        load_costs(config_of(), options, unknown=1.0, slo=Slo(0.02, 0.05))
    with pytest.raises(ConfigError, match=r"its model is .*, here it is 'Other"):
        load_costs(config_of("Other"), options, unknown=1.0)
    write_profile(path, device="H100")
    with pytest.raises(ConfigError, match="its device is 'H100', here it is"):
        load_costs(config_of(), options, unknown=1.0)
    path.write_text("{}")
    with pytest.raises(ConfigError, match="is not a readable profile"):
        load_costs(config_of(), options, unknown=1.0)
