"""Async scheduling in a pool: one or two batches in flight while pages, time on the device and weights change.

vLLM's own ``EngineCore.step_with_batch_queue``, its ``AsyncScheduler`` with our hooks, a real ledger and real mapped memory; the
model runner is a stand-in that computes one step late, as late as a GPU may: when its output is asked for. It writes a token's
KV into the pages, and samples what depends on all KV of the request, so that a page that went away too early shows. The last
test has vLLM's own runner and a real model, in a thread that lags behind (tests/support/late_executor.py).
"""

from __future__ import annotations

import ctypes
import itertools
import os
import queue
import random
import zlib
from collections import Counter, deque
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from orchestrator.policies.serving.admission import ServingState
from scripts.bench.probes.vllm.recompute_probe import write_tiny_qwen3
from tests.kvpool.test_pool_engine import PAGE_KIB, REQUESTS, Driven, engines, models, named, play  # noqa: F401
from tests.vllm.test_scheduler import Harness
from vllm_rlplugin.kvpool.engine import pool_engine as pools
from vllm_rlplugin.kvpool.engine.pool_engine import EnginePool, pool_path
from vllm_rlplugin.kvpool.ledger.page_ledger import PagePool
from vllm_rlplugin.kvpool.ledger.tenant_words import ControlWord, ServingWords
from vllm_rlplugin.kvpool.pages.host_pages import HostRange
from vllm_rlplugin.options import PluginOptions

BLOCK, BLOCKS, PAGES, PAGE = 16, 32, 9, 4096  # four blocks a page
BLOCK_BYTES = 1024
VOCABULARY = 500
NUMBERS = itertools.count()


def sampled(tokens: list[int]) -> int:
    """The token after these."""
    return zlib.crc32(b"".join(token.to_bytes(2, "little") for token in tokens)) % VOCABULARY


def answer(prompt: list[int], count: int) -> list[int]:
    """What any engine must say."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(sampled(tokens))
    return tokens[len(prompt) :]


class LateRunner:
    """Stands in for executor, worker and model: a batch is computed when its output is asked for, after those before it."""

    def __init__(self, pool: EnginePool) -> None:
        self.pool = pool
        self.queue: deque[tuple[Any, Future[Any]]] = deque()  # launched, not computed
        self._known: dict[str, tuple[list[int], list[int]]] = {}  # name -> tokens, blocks, as a worker has them

    def execute_model(self, output: Any, non_block: bool) -> Future[Any]:
        assert non_block
        late = _Late(self)
        self.queue.append((output, late))
        return late

    def sample_tokens(self, grammar: Any, non_block: bool) -> Future[Any]:
        assert grammar is None
        return self.queue[-1][1]

    def compute(self) -> None:
        """The earliest batch."""
        from vllm.v1.outputs import ModelRunnerOutput

        output, future = self.queue.popleft()
        for new in output.scheduled_new_reqs:
            self._known[new.req_id] = (list(new.prefill_token_ids or new.prompt_token_ids), list(new.block_ids[0]))
        cached = output.scheduled_cached_reqs
        for at, name in enumerate(cached.req_ids):
            tokens, blocks = self._known[name]
            fresh = cached.new_block_ids[at]
            if name in cached.resumed_req_ids:
                blocks.clear()
                tokens[:] = cached.all_token_ids[name]
            blocks.extend(fresh[0] if fresh else [])
        start = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        start |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        names, made = list(output.num_scheduled_tokens), []
        for name in names:
            tokens, blocks = self._known[name]
            end = start[name] + output.num_scheduled_tokens[name]
            for position in range(start[name], end):
                ctypes.memmove(self._place(blocks, position), tokens[position].to_bytes(2, "little"), 2)
            seen = [int.from_bytes(ctypes.string_at(self._place(blocks, at), 2), "little") for at in range(end)]
            made.append([sampled(seen)] if end >= len(tokens) else [])
            tokens += made[-1]
        future.set_result(ModelRunnerOutput(names, {name: index for index, name in enumerate(names)}, made))

    def blocks_in_flight(self) -> set[int]:
        """That batches which are not computed yet may read or write."""
        found = {name: set(blocks) for name, (_, blocks) in self._known.items()}
        used: set[int] = set()
        for output, _ in self.queue:
            for new in output.scheduled_new_reqs:
                found[new.req_id] = set(new.block_ids[0])
            cached = output.scheduled_cached_reqs
            for name, fresh in zip(cached.req_ids, cached.new_block_ids, strict=True):
                old = set() if name in cached.resumed_req_ids else found[name]
                found[name] = old | set(fresh[0] if fresh else [])
            for name in output.num_scheduled_tokens:
                used |= found[name]
        return used

    def _place(self, blocks: list[int], position: int) -> int:
        at = blocks[position // BLOCK] * BLOCK_BYTES + position % BLOCK * 2
        assert self.pool.memory._pages[at // PAGE] >= 0, "a page that a batch in flight uses was given away"
        return self.pool.memory.address + at


class _Late(Future[Any]):
    def __init__(self, runner: LateRunner) -> None:
        super().__init__()
        self._runner = runner

    def result(self, timeout: float | None = None) -> Any:
        while not self.done():
            self._runner.compute()
        return super().result(timeout)


class Rig:
    """A rollout engine without a model in a pool with a serving tenant, which is the test. Time is ``now``."""

    def __init__(self, model: Path, *, run_ahead: bool = True, mode: str = "none", window: int = 0) -> None:
        from vllm.v1.engine.core import EngineCore

        self.name = f"test-async-{os.getpid()}-{next(NUMBERS)}"
        self.now = 1000.0
        self.serving = PagePool.create(pool_path(self.name), PAGES, page_bytes=PAGE)
        self.serving.join("serving", "serving")
        self.theirs = HostRange(self.serving, PAGES)
        self.taken = 0
        plugin = {"kv_pool": self.name, "kv_pool_page_kib": PAGE >> 10, "kv_pool_keep": 5.0, "kv_pool_budget_mib": 1}
        self.pool = EnginePool(PluginOptions.from_dict(plugin), BLOCKS, [(0, BLOCK_BYTES)], BLOCKS * BLOCK_BYTES)
        pools._here[os.getpid()] = self.pool
        try:
            self.harness = Harness(
                model, run_ahead=run_ahead, seqs=4, blocks=BLOCKS, budget=48, plugin=plugin, window=window
            )
        finally:
            del pools._here[os.getpid()]
        self.scheduler = self.harness.scheduler
        self.pages = self.scheduler._rl_pages
        self.pages._parked._now = lambda: self.now
        self.pages._admission._now = lambda: self.now
        self.pages._admission._sleep = lambda seconds: None
        self.runner = LateRunner(self.pool)
        core: Any = EngineCore.__new__(EngineCore)
        core.scheduler, core.model_executor = self.scheduler, self.runner
        core.batch_queue_size = 2
        core.batch_queue = deque(maxlen=2)
        core.aborts_queue = queue.Queue()
        core.is_mm_encoder_only = core.is_pooling_model = core.check_for_draft_tokens = core.log_stats = False
        core._weight_version = 0
        core.log_error_detail = lambda output: nullcontext()
        core.capture_iteration_details = lambda output: nullcontext()
        core.vllm_config = self.scheduler.vllm_config
        self.core = core
        self._step = core.step_with_batch_queue if run_ahead else core.step
        self.asked: dict[str, tuple[list[int], int]] = {}
        self.got: dict[str, list[int]] = {}
        self.ended: dict[str, str] = {}
        self.tick = 0
        self.say(mode=mode)

    def say(self, slack: float = 1.0, busy: bool = True, mode: str = "none", waiting: bool = False) -> None:
        """What the serving engine publishes."""
        self.tick += 1
        state = ServingState(
            self.now, slack, slack, busy=busy, arriving=slack, tick=self.tick, sharers=1, waiting=waiting
        )
        self.serving.publish(ServingWords(state, mode).pack())  # type: ignore[arg-type]

    def add(self, name: str, prompt: list[int], tokens: int) -> None:
        self.harness.add(name, prompt=prompt, tokens=tokens)
        self.asked[name], self.got[name] = (prompt, tokens), []

    def step(self) -> None:
        """One turn of vLLM's engine loop, with what it says to the clients."""
        if not (self.scheduler.has_requests() or self.core.batch_queue):
            return
        outputs, _ = self._step()
        for found in (outputs or {}).values():
            for output in found.outputs:
                assert output.request_id not in self.ended, "a request ends once"
                self.got[output.request_id] += output.new_token_ids
                if output.finish_reason is not None:
                    self.ended[output.request_id] = str(output.finish_reason)

    def budget(self, pages: int) -> None:
        mine = next(tenant for tenant in self.serving.view().tenants if tenant.role == "rollout")
        self.serving.set_budget(mine.slot, pages, mine.revision + 1)

    def take(self, count: int) -> None:
        """Serving maps free pages, and writes into them."""
        import numpy as np

        count = min(count, self.serving.view().free)
        places = np.arange(self.taken, self.taken + count, dtype=np.uint64)
        if count and self.theirs.map_places(places):
            ctypes.memset(self.theirs.address + self.taken * PAGE, 0xEE, count * PAGE)
            self.taken += count

    def give(self) -> None:
        import numpy as np

        self.theirs.unmap_places(np.arange(self.taken, dtype=np.uint64))
        self.taken = 0

    def check(self) -> None:
        """Nobody has what is not his."""
        for block in self.runner.blocks_in_flight():
            assert self.pool.memory._pages[block * BLOCK_BYTES // PAGE] >= 0, "a batch in flight lost a page"
        written = ctypes.string_at(self.theirs.address, self.taken * PAGE) if self.taken else b""
        assert written == b"\xee" * len(written), "a batch in flight wrote into a page of serving's"
        view = self.serving.view()
        assert view.free + self.taken + self.pool.memory.mapped == PAGES
        assert sum(tenant.used for tenant in view.tenants) == PAGES - view.free
        for name, tokens in self.got.items():
            assert tokens == answer(*self.asked[name])[: len(tokens)], name

    def finish(self) -> None:
        """Serving leaves; what was handed back goes on with its tokens, until all has been said."""
        self.give()
        self.budget(PAGES)
        self.say(mode="none")
        for number in range(3000):
            self.now += 0.01
            for name, why in list(self.ended.items()):
                prompt, tokens = self.asked[name]
                if why == "abort" and len(self.got[name]) < tokens and name + "+" not in self.asked:
                    self.add(name + "+", prompt + self.got[name], tokens - len(self.got[name]))
            if not (self.scheduler.has_requests() or self.core.batch_queue):
                break
            self.step()
            if number % 50 == 0:
                self.check()
        assert self.ended.keys() == self.asked.keys(), "no request is lost"
        for name, (prompt, tokens) in self.asked.items():
            if self.ended[name] != "abort":
                assert self.got[name] == answer(prompt, tokens)
        self.check()
        assert self.pages._parked.steps_in_flight == 0
        self.now += 6.0
        said = self.scheduler.rl_command("page_pool", {})
        assert said["pages"] == self.pool.geometry.pages_a_group, "what nobody uses went back"

    def close(self) -> None:
        self.pool.memory.close()
        self.theirs.close()
        self.pool.pool.close()
        self.serving.close()
        pool_path(self.name).unlink(missing_ok=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_qwen3(folder, 1)
    return folder


def prompt(seed: int, length: int) -> list[int]:
    """Of one seed each is the beginning of the longer ones: prefixes are found again."""
    rng = random.Random(seed)
    return [rng.randrange(VOCABULARY) for _ in range(length)]


seen: Counter[str] = Counter()


class AsyncMachine(RuleBasedStateMachine):
    """Arrivals, cuts, freezes, admissions, updates and aborts in any order, between turns of the loop."""

    model: Path
    run_ahead = True
    renews = False  # whether serving says before each turn that it has slack
    rig: Rig | None = None

    @initialize()
    def begin(self) -> None:
        self.rig = Rig(type(self).model, run_ahead=type(self).run_ahead)
        self.rig.budget(PAGES)
        self.count = self.version = 0
        self.arrive([(0, 60, 30), (1, 70, 40), (2, 40, 40)])

    @property
    def here(self) -> Rig:
        assert self.rig is not None
        return self.rig

    @rule(
        requests=strategies.lists(
            strategies.tuples(strategies.integers(0, 2), strategies.integers(1, 90), strategies.integers(1, 40)),
            min_size=1,
            max_size=4,
        )
    )
    def arrive(self, requests: list[tuple[int, int, int]]) -> None:
        for seed, length, tokens in requests:
            self.count += 1
            self.here.add(f"r{self.count}", prompt(seed, length), tokens)

    @rule(turns=strategies.integers(1, 12))
    def step(self, turns: int) -> None:
        for _ in range(turns):
            self.here.now += 0.005
            if self.renews:
                self.here.say(1.0, True, "dual")
            self.here.step()
            self.here.check()

    @rule(turns=strategies.integers(4, 8))
    def step_more(self, turns: int) -> None:
        self.step(turns)

    @rule(pages=strategies.integers(1, PAGES), take=strategies.integers(0, PAGES))
    def cut(self, pages: int, take: int) -> None:
        self.here.budget(pages)
        self.here.take(take)

    @rule()
    def leave(self) -> None:
        self.here.give()

    @rule(
        slack=strategies.sampled_from((1.0, 0.03, 1.0, -1.0)),
        busy=strategies.booleans(),
        mode=strategies.sampled_from(("none", "dual", "ttft", "tpot")),
        waiting=strategies.booleans(),
    )
    def say(self, slack: float, busy: bool, mode: str, waiting: bool) -> None:
        self.renews = mode == "dual" and slack == 1.0
        self.here.say(slack, busy, mode, waiting and busy)

    @rule(dry=strategies.sampled_from((False, False, False, True)))
    def dry(self, dry: bool) -> None:
        self.here.serving.control(ControlWord.DRY, int(dry))

    @rule()
    def look(self) -> None:
        self.here.scheduler.rl_command("page_pool", {})

    @rule(seconds=strategies.sampled_from((0.3, 2.1, 6.0)))
    def wait(self, seconds: float) -> None:
        self.here.now += seconds

    @rule()
    def update(self) -> None:
        self.version += 1
        self.here.scheduler.rl_command("advance_version", {"version": self.version})

    @precondition(lambda self: self.count)
    @rule(data=strategies.data())
    def abort(self, data: strategies.DataObject) -> None:
        rig = self.here
        left = sorted(rig.asked.keys() - rig.ended.keys())
        if left:
            from vllm.v1.request import RequestStatus

            name = data.draw(strategies.sampled_from(left))
            rig.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)
            rig.ended[name] = "gone"
            prompt, _ = rig.asked[name]
            rig.asked[name] = (prompt, len(rig.got[name]))

    @invariant()
    def count_flights(self) -> None:
        if self.rig is not None:
            seen[f"flights {len(self.rig.runner.queue)}"] += 1

    @invariant()
    def holds(self) -> None:
        if self.rig is not None:
            self.rig.check()

    def teardown(self) -> None:
        if self.rig is None:
            return
        try:
            seen["displaced"] += self.rig.pages.displaced
            seen["updates"] += self.version
            self.rig.serving.control(ControlWord.DRY, 0)
            self.rig.finish()
        finally:
            self.rig.close()
            self.rig = None


@pytest.mark.parametrize("run_ahead", [pytest.param(True, marks=pytest.mark.slow), False], ids=["async", "sync"])
def test_whatever_happens_no_page_of_a_batch_in_flight_is_given_away_with_a_runner_that_is_a_step_late(
    model: Path, run_ahead: bool
) -> None:
    class Machine(AsyncMachine):
        pass

    Machine.model, Machine.run_ahead = model, run_ahead
    many = 25 if run_ahead else 8
    Machine.TestCase.settings = settings(max_examples=many, stateful_step_count=25, derandomize=True, database=None)
    seen.clear()
    Machine.TestCase("runTest").runTest()
    if run_ahead:
        assert seen["displaced"] > 0, "else it would say nothing of cuts"
        assert seen["flights 1"] > 100, "else it would say nothing of batches in flight"


@pytest.fixture
def rig(model: Path) -> Any:
    made = Rig(model)
    made.budget(PAGES)
    yield made
    made.close()


def test_pages_of_a_request_that_a_cut_displaced_stay_until_its_batch_is_over_with_a_runner_that_is_a_step_late(
    rig: Rig,
) -> None:
    rig.add("a", prompt(0, 40), 40)
    rig.add("b", prompt(1, 40), 40)
    for _ in range(6):
        rig.step()
    held = rig.pool.memory.mapped
    assert held == 3, "what they use, and the blocks that they begin next"
    assert len(rig.runner.queue) == 1, "a batch is in flight"
    rig.budget(1)
    rig.scheduler.rl_command("page_pool", {})
    assert rig.pages.displaced > 0
    assert rig.pool.memory.mapped == held, "the batch in flight still reads and writes them"
    rig.scheduler.rl_command("page_pool", {})
    assert rig.pool.memory.mapped == held, "a look is no step"
    rig.check()
    rig.step()
    assert rig.pool.memory.mapped == 1, "as soon as its output is there, whatever waits for pages"
    rig.finish()


def test_pages_for_the_next_steps_are_mapped_while_a_batch_computes_and_not_before_it(rig: Rig) -> None:
    scheduling, mapped = [False], {True: 0, False: 0}
    schedule, map_groups = rig.pages.schedule, rig.pool.map_groups

    def scheduled(*args: Any) -> Any:
        scheduling[0] = True
        try:
            return schedule(*args)
        finally:
            scheduling[0] = False

    def counted(groups: list[int]) -> bool:
        mapped[scheduling[0]] += len(groups)
        return map_groups(groups)

    rig.pages.schedule, rig.pool.map_groups = scheduled, counted  # type: ignore[method-assign]
    rig.add("long", [1, 2, 3], 200)
    while not rig.got["long"]:
        rig.step()
    mapped.update({True: 0, False: 0})
    while len(rig.got["long"]) < 190:
        rig.step()
    assert mapped[False] > 2
    assert mapped[True] == 0
    rig.finish()


def test_a_page_that_serving_wrote_into_is_zeros_when_a_rollout_engine_gets_it(rig: Rig) -> None:
    rig.take(PAGES)
    rig.give()
    rig.budget(PAGES)
    assert rig.pool.map_groups([1, 2, 3])
    found = ctypes.string_at(rig.pool.memory.address + PAGE, 3 * PAGE)
    rig.pool.unmap_groups([1, 2, 3])
    assert found == bytes(3 * PAGE), "stock's cache begins with zeros: other bytes may read as NaN"


def test_a_request_gets_pages_for_its_blocks_in_every_kv_group(model: Path) -> None:
    rig = Rig(model, window=500)
    try:
        rig.budget(PAGES)
        rig.add("long", prompt(0, 200), 4)  # 13 blocks in each of two groups, of one pool of blocks
        for _ in range(20):
            rig.step()
        assert rig.ended == {"long": "length"}, "it never starts with the pages for one group"
        rig.finish()
    finally:
        rig.close()


def test_a_cut_takes_no_more_requests_than_it_needs_where_stock_frees_blocks_a_step_later(rig: Rig) -> None:
    rig.scheduler.defer_block_free = True  # as with a connector of role kv_both and async scheduling
    for seed in range(4):
        rig.add(str(seed), prompt(seed, 50), 40)  # four blocks each, one after the other, in five groups of pages
    while len(rig.scheduler.running) < 4:
        rig.step()
    rig.budget(3)
    for _ in range(8):
        rig.step()
    assert rig.pool.memory.mapped <= 3
    assert 0 < rig.pages.displaced < 4, "the pages of the first ones are on their way"
    rig.finish()


@pytest.mark.long
@pytest.mark.engine
def test_a_real_engine_with_a_batch_in_flight_gives_pages_back_and_makes_the_tokens_of_synchronous_scheduling(
    models: tuple[Path, Path],  # noqa: F811
    engines: list[Driven],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM's CPU engine with async scheduling, which its platform has no use for, and each batch computed some milliseconds after
    it was launched: a page that went too early would be a segmentation fault, one that was written too late a wrong token."""
    monkeypatch.setenv("RL_TEST_LAG", "0.004")
    name = f"test-late-{os.getpid()}"
    serving = PagePool.create(pool_path(name), 128, page_bytes=PAGE_KIB << 10)
    try:
        serving.join("serving", "serving")
        serving.publish(ServingWords(ServingState(0.0), "none").pack())
        plain = Driven(models[1], 64)
        late = Driven(
            models[1], 64, given={"run_ahead": True}, kv_pool=name, kv_pool_page_kib=PAGE_KIB, kv_pool_budget_mib=1
        )
        engines += [plain, late]
        for engine in engines:
            engine.answer()
        play(plain, REQUESTS, "x")
        expected = named(plain.do(drain=True), "x")
        mine = next(tenant for tenant in serving.view().tenants if tenant.role == "rollout")
        rng, revision, dropped = random.Random(3), mine.revision, 0

        def budget(pages: int) -> None:
            nonlocal revision
            revision += 1
            serving.set_budget(mine.slot, pages, revision)

        for turn in ("a", "b", "c"):
            budget(128)
            play(late, REQUESTS, turn)
            while True:
                said = late.do(steps=rng.randrange(1, 7))
                assert said["flights"] <= 1, "between two turns of the loop"
                dropped += said["flights"] and said["pool"]["displaced"]
                if not said["unfinished"]:
                    break
                budget(rng.choice((128, 128, mine.used, 40, 20)))
            assert named(late.do(drain=True), turn) == expected
        assert said["pool"]["async_scheduling"] is True
        assert said["pool"]["displaced"] > 0, "some were cut while they ran"
        assert dropped > 0, "and a batch was in flight then"
    finally:
        serving.close()
        pool_path(name).unlink(missing_ok=True)
