"""The scheduler without an engine: vLLM's class with our hooks, driven by hand, synchronously or with async's run-ahead.

The "model" of these tests samples a token that depends only on the request and the position, so what a request must
end with is known: a token lost, doubled or out of order by a preemption shows.
"""

from __future__ import annotations

import os
import random
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.api import ConfigError
from orchestrator.policies.routing.priority import ProgressivePriority
from scripts.bench.probes.vllm.recompute_probe import write_tiny_qwen3
from vllm_rlplugin.worker.cache_salt import make_salt, user_salt_of

BLOCK = 16
VOCABULARY = 1000


def token(name: str, position: int) -> int:
    return random.Random(f"{name}/{position}").randrange(VOCABULARY)


class Harness:
    """``stock``: vLLM's own class instead of ours. ``plugin``: options of the plugin. ``window``: of a second KV group."""

    def __init__(
        self,
        model: Path,
        *,
        stock: bool = False,
        run_ahead: bool = False,
        seqs: int = 2,
        blocks: int = 1000,
        budget: int = 256,
        v2: bool = False,
        policy: str = "priority",
        plugin: dict[str, Any] | None = None,
        window: int = 0,
        parallel: dict[str, Any] | None = None,
    ) -> None:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        import torch
        from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
        from vllm.v1.structured_output import StructuredOutputManager

        from vllm_rlplugin.scheduler import create_scheduler

        config = VllmConfig(
            model_config=ModelConfig(model=str(model), dtype="float32", skip_tokenizer_init=True, max_model_len=512),
            scheduler_config=SchedulerConfig(
                max_num_seqs=seqs,
                max_num_batched_tokens=budget,
                max_model_len=512,
                enable_chunked_prefill=True,
                async_scheduling=run_ahead,
                is_encoder_decoder=False,
                policy=policy,  # type: ignore[arg-type]
            ),
            cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
            additional_config={"rl_coserve": plugin or {}},
        )
        config.scheduler_config.async_scheduling = run_ahead  # vLLM turns it off on CPU
        for name, value in (parallel or {}).items():
            setattr(config.parallel_config, name, value)
        shape: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
        groups = [KVCacheGroupSpec(["layer"], FullAttentionSpec(**shape))]
        if window:
            groups.append(KVCacheGroupSpec(["windowed"], SlidingWindowSpec(**shape, sliding_window=window)))
        kv = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)
        config.cache_config.num_gpu_blocks = blocks
        register_all_kvcache_specs(config)
        init_none_hash(sha256)
        make: Any = create_scheduler
        if stock:
            make = AsyncScheduler if run_ahead else Scheduler
        self.scheduler: Any = make(
            vllm_config=config,
            kv_cache_config=kv,
            block_size=BLOCK,
            hash_block_size=BLOCK,
            log_stats=False,
            structured_output_manager=StructuredOutputManager(config),
        )
        self.scheduler.use_v2_model_runner = v2
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self._depth = 2 if run_ahead else 1
        self._flight: deque[tuple[Any, Any]] = deque()
        self._arrivals = 0
        self.requests: dict[str, Any] = {}
        self.got: dict[str, list[int]] = {}
        self.ended: dict[str, str] = {}
        self.trace: list[dict[str, int]] = []

    def add(
        self,
        name: str,
        priority: int = 0,
        *,
        prompt: list[int] | int = 20,
        tokens: int = 8,
        salt: str | None = None,
        session: str | None = None,
    ) -> Any:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        self._arrivals += 1
        request = Request(
            request_id=name,
            prompt_token_ids=prompt if isinstance(prompt, list) else [token("prompt" + name, i) for i in range(prompt)],
            sampling_params=SamplingParams(max_tokens=tokens, ignore_eos=True),
            pooling_params=None,
            arrival_time=float(self._arrivals),
            priority=priority,
            cache_salt=salt,
            session_id=session or name,
            block_hasher=self._hasher,
        )
        self.requests[name], self.got[name] = request, []
        self.scheduler.add_request(request)
        return request

    def abort(self, name: str) -> None:
        from vllm.v1.request import RequestStatus

        if self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED):
            self.ended[name] = "abort"

    def step(self) -> dict[str, int]:
        """One turn of the engine loop: schedule, and take the oldest output when as many are in flight as may be."""
        output = self.scheduler.schedule()
        self.trace.append(dict(output.num_scheduled_tokens))
        if output.total_num_scheduled_tokens:
            self._flight.append((output, self._run(output)))
        if self._flight and (len(self._flight) >= self._depth or not output.total_num_scheduled_tokens):
            self.drain(1)
        return self.trace[-1]

    def drain(self, count: int | None = None) -> None:
        """Take outputs in flight (all of them)."""
        for _ in range(len(self._flight) if count is None else count):
            for outputs in self.scheduler.update_from_output(*self._flight.popleft()).values():
                for output in outputs.outputs:
                    self.got[output.request_id] += output.new_token_ids
                    if output.finish_reason is not None:
                        assert output.request_id not in self.ended, "a request ends once"
                        self.ended[output.request_id] = str(output.finish_reason)

    def finish(self, limit: int = 5000) -> None:
        """Step until nothing is left; everything must have its tokens and every block must be free again."""
        for _ in range(limit):
            if not self.scheduler.has_requests() and not self._flight:
                break
            self.step()
        self.check_outputs()
        assert self.free() == self.scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1

    def check_outputs(self) -> None:
        assert self.ended.keys() == self.requests.keys()
        for name, request in self.requests.items():
            wanted = [token(name, request.num_prompt_tokens + index) for index in range(request.max_tokens)]
            got = self.got[name]
            assert got == wanted[: len(got)] if self.ended[name] == "abort" else got == wanted

    def running(self) -> list[str]:
        return sorted(request.request_id for request in self.scheduler.running)

    def free(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def rl(self, command: str, **arguments: Any) -> dict[str, Any]:
        return dict(self.scheduler.rl_command(command, arguments))

    def _run(self, output: Any) -> Any:
        from vllm.v1.outputs import ModelRunnerOutput

        start = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        start |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        outputs = dict(zip(cached.req_ids, cached.num_output_tokens, strict=True))
        if not self.scheduler.use_v2_model_runner:
            # The V1 runner dropped a preempted request from its batch and needs all its tokens again.
            assert cached.resumed_req_ids <= cached.all_token_ids.keys()
        names = list(output.num_scheduled_tokens)
        sampled = []
        for name in names:
            request = self.requests[name]
            known = request.num_prompt_tokens + outputs.get(name, 0)
            if name not in outputs:
                known = request.num_tokens  # started anew (with the V2 runner also when it resumes)
            end = start[name] + output.num_scheduled_tokens[name]
            sampled.append([token(name, known)] if end >= known else [])
        return ModelRunnerOutput(names, {name: index for index, name in enumerate(names)}, sampled)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_qwen3(folder, 1)
    return folder


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The time that the scheduler sees; advance ``clock.now``."""
    fake = SimpleNamespace(now=1000.0)
    fake.monotonic = lambda: fake.now
    import vllm_rlplugin.preemption

    monkeypatch.setattr(vllm_rlplugin.preemption, "time", fake)
    return fake


MODES = pytest.mark.parametrize(
    ("run_ahead", "v2"), [(False, False), (True, False), (True, True)], ids=["sync", "async", "async-v2"]
)


@MODES
def test_one_that_outranks_takes_the_slot_at_once_and_the_victim_finds_its_prefix(
    model: Path, run_ahead: bool, v2: bool
) -> None:
    engine = Harness(model, run_ahead=run_ahead, v2=v2)
    engine.add("good", 5, tokens=60)
    engine.add("bad", 9, prompt=40, tokens=60)
    for _ in range(12):
        engine.step()
    engine.add("best", 1, tokens=10)
    before = engine.rl("snapshot")
    assert engine.step().keys() == {"good", "best"}, "in the very next step"
    computed = engine.requests["bad"].num_tokens
    while "bad" not in engine.running():
        engine.step()
    after = engine.rl("snapshot")
    assert after["prefix_hits"] - before["prefix_hits"] >= computed // BLOCK * BLOCK - BLOCK, "all but the last blocks"
    assert after["outranked"] == after["preemptions"] == 1
    engine.finish()
    done = engine.rl("snapshot")
    assert done["generated"] == 60 + 60 + 10
    assert (done["running"], done["waiting"], done["kv_used"], done["kv_capacity"]) == (0, 0, 0, 999)


@MODES
@pytest.mark.parametrize("blocks", [1000, 14], ids=["slots", "blocks"])
def test_with_equal_priorities_every_step_is_stocks(model: Path, run_ahead: bool, v2: bool, blocks: int) -> None:
    def trace(stock: bool) -> list[dict[str, int]]:
        engine = Harness(
            model, stock=stock, run_ahead=run_ahead, v2=v2, seqs=4, blocks=blocks, budget=48, plugin={"max_wait": 1e-9}
        )
        rng = random.Random(blocks)
        for index in range(60):
            for _ in range(rng.choice((0, 0, 1, 3))):
                engine.add(f"{index}-{rng.random()}", 3, prompt=rng.randint(1, 60), tokens=rng.randint(1, 40))
            engine.step()
        engine.finish()
        return engine.trace

    ours = trace(stock=False)
    assert ours == trace(stock=True)
    assert len(ours) > 100


@MODES
def test_a_priority_counts_at_once_when_it_is_changed_waiting_or_running(
    model: Path, run_ahead: bool, v2: bool
) -> None:
    engine = Harness(model, run_ahead=run_ahead, v2=v2)
    for name, priority in (("a", 1), ("b", 2), ("c", 3), ("d", 4)):
        engine.add(name, priority, tokens=60, session=f"session {name}")
    engine.step()
    assert engine.running() == ["a", "b"]
    assert engine.rl("prioritize", priorities={"session d": 0, "nobody": 9}) == {"changed": 1}
    engine.step()
    assert engine.running() == ["a", "d"], "raised while it waits"
    assert engine.rl("prioritize", priorities={"session a": 9, "session d": 0}) == {"changed": 1}
    engine.step()
    assert engine.running() == ["b", "d"], "lowered while it runs"
    engine.rl("prioritize", priorities={"session c": 8, "session b": 8})
    engine.step()
    assert engine.running() == ["b", "d"], "an equal takes no slot"
    engine.rl("prioritize", priorities={"session a": 7})
    for _ in range(2):
        engine.step()
    assert engine.running() == ["a", "d"], "a preempted one, raised"
    for wrong in ("1", 1.0, True, 2**63):
        with pytest.raises(ValueError, match="64-bit integer"):
            engine.rl("prioritize", priorities={"session a": wrong})
    engine.finish()


@MODES
def test_for_lack_of_blocks_it_preempts_those_it_outranks_only_if_that_is_enough(
    model: Path, run_ahead: bool, v2: bool
) -> None:
    engine = Harness(model, run_ahead=run_ahead, v2=v2, seqs=4, blocks=21)  # 20 without the null block
    engine.add("better", 1, prompt=8 * BLOCK - 20, tokens=10)
    engine.add("worse", 9, prompt=10 * BLOCK - 20, tokens=10)
    engine.step()
    engine.add("too long", 5, prompt=15 * BLOCK, tokens=2)
    engine.step()
    assert engine.running() == ["better", "worse"], "what it outranks would not free enough"
    engine.abort("too long")
    engine.add("fits", 5, prompt=9 * BLOCK, tokens=2)
    engine.step()
    assert engine.running() == ["better", "fits"]
    engine.finish()


def test_blocks_shared_with_who_stays_are_not_counted_as_freed(model: Path) -> None:
    engine = Harness(model, seqs=4, blocks=14)
    shared = [token("shared", index) for index in range(8 * BLOCK)]
    engine.add("stays", 1, prompt=[*shared, 1], tokens=10)
    engine.step()
    engine.add("goes", 9, prompt=[*shared, 2], tokens=10)
    engine.step()
    assert engine.running() == ["goes", "stays"]
    assert engine.free() == 3
    engine.add("new", 5, prompt=5 * BLOCK, tokens=4)
    engine.step()
    assert engine.running() == ["goes", "stays"], "preempting it would free one block of nine"
    engine.add("sharing", 4, prompt=[*shared, *range(2 * BLOCK)], tokens=4)
    engine.step()
    assert engine.running() == ["goes", "sharing", "stays"], "its hits in use need no free block"
    engine.finish()


def test_what_runs_keeps_the_blocks_it_grows_into(model: Path) -> None:
    """Otherwise somebody is preempted in vain: stock serves the running ones first."""
    engine = Harness(model, seqs=4, blocks=8)
    engine.add("grows", 1, prompt=2 * BLOCK, tokens=4)
    engine.add("goes", 9, prompt=2 * BLOCK + 2, tokens=4)
    engine.step()
    assert engine.free() == 2
    engine.add("new", 5, prompt=5 * BLOCK, tokens=2)  # 2 free and 3 of the victim, but one is needed to grow
    assert engine.step().keys() == {"grows", "goes"}
    assert engine.rl("snapshot")["outranked"] == 0
    engine.finish()


def test_one_that_stock_then_does_not_start_costs_a_running_one_its_place_once(model: Path) -> None:
    """A limit that the policy does not know: LoRA adapters, a connector. The victim resumes in the same step."""
    engine = Harness(model)
    engine.add("a", 8, tokens=60)
    engine.add("b", 9, tokens=60)
    engine.step()
    stocks = engine.scheduler._handle_blocked_waiting_request
    engine.scheduler._handle_blocked_waiting_request = lambda request: request.request_id != "c" and stocks(request)
    engine.add("c", 1)
    for _ in range(30):
        assert engine.step().keys() == {"a", "b"}
    assert engine.rl("snapshot")["outranked"] == 1
    engine.scheduler._handle_blocked_waiting_request = stocks
    engine.finish()


@MODES
def test_an_overtaken_request_is_served_after_max_wait_for_a_quantum_each_time(
    model: Path, clock: SimpleNamespace, run_ahead: bool, v2: bool
) -> None:
    engine = Harness(model, run_ahead=run_ahead, v2=v2, seqs=2, plugin={"max_wait": 30.0, "quantum": 8})
    engine.add("poor", 9, tokens=20)
    waits, served, rng = 0, 0, random.Random(1)
    for _ in range(400):
        while len(engine.scheduler.waiting) < 5:
            engine.add(f"rich{len(engine.requests)}", rng.randint(1, 4), tokens=12)
        ran = "poor" in engine.running()
        engine.step()
        clock.now += 1.0
        if ran and "poor" not in engine.running() and "poor" not in engine.ended:
            waits += 1
            assert len(engine.got["poor"]) - served in (8, 9, 10), (
                "preempted after its quantum (one step may be in flight)"
            )
            assert engine.requests["poor"].priority == 9
            served = len(engine.got["poor"])
        if "poor" in engine.ended:
            break
    assert "poor" in engine.ended
    assert waits >= 2
    assert 30 < len(engine.trace) < 200
    for name in list(engine.requests):
        engine.abort(name)
    engine.finish()


@MODES
def test_users_of_a_lent_server_go_before_rollouts_however_long_these_wait(
    model: Path, clock: SimpleNamespace, run_ahead: bool, v2: bool
) -> None:
    """As many users as there is room for, for ten times ``max_wait``: no rollout gets a slot, nor a place before a user. Among
    themselves rollouts starve as little as ever."""
    engine = Harness(model, run_ahead=run_ahead, v2=v2, seqs=2, plugin={"max_wait": 30.0, "quantum": 8})
    engine.add("rl-lent", 1_000_000, tokens=20)
    engine.add("rl-worse", 1_000_001, tokens=20)
    for _ in range(300):
        while len([name for name in engine.requests if name not in engine.ended]) < 6:
            engine.add(f"user{len(engine.requests)}", 0, tokens=12)
        engine.step()
        clock.now += 1.0
    assert engine.got["rl-lent"] == engine.got["rl-worse"] == []
    for name in list(engine.requests):
        if name.startswith("user"):
            engine.abort(name)
    for index in range(400):
        while len([name for name in engine.requests if name not in engine.ended]) < 6:
            engine.add(f"rl-good{len(engine.requests)}", 999_000, tokens=12)
        if index == 350:
            engine.add("late-user", 0, tokens=4)
        engine.step()
        clock.now += 1.0
        if index == 353:
            assert engine.got["late-user"], "who is overdue makes room at once, within its quantum too"
    assert {"rl-lent", "rl-worse"} <= engine.ended.keys()
    for name in list(engine.requests):
        engine.abort(name)
    engine.finish()


def test_an_overdue_request_is_the_next_to_start_also_without_preemption(model: Path, clock: SimpleNamespace) -> None:
    engine = Harness(model, seqs=1, plugin={"max_wait": 30.0, "preemption": False})
    for name, priority in (("runs", 0), ("good", 1), ("better", 2), ("worst", 9), ("later", 3), ("last", 3)):
        engine.add(name, priority, tokens=40)
    engine.step()
    clock.now += 31.0
    engine.step()
    assert engine.scheduler.waiting.peek_request().request_id == "worst"
    assert engine.running() == ["runs"]
    engine.finish()


def test_without_the_rule_the_same_request_starves(model: Path, clock: SimpleNamespace) -> None:
    engine = Harness(model, seqs=1, plugin={"max_wait": 1e9})
    engine.add("poor", 9, tokens=20)
    for index in range(400):
        if len(engine.scheduler.waiting) < 3:
            engine.add(f"rich{index}", 1, tokens=12)
        engine.step()
        clock.now += 1.0
    assert engine.got["poor"] == []


def test_a_pause_is_not_a_wait(model: Path, clock: SimpleNamespace) -> None:
    from vllm.v1.core.sched.interface import PauseState

    engine = Harness(model, seqs=1, plugin={"max_wait": 30.0})
    engine.add("poor", 9, tokens=4)
    engine.add("rich", 1, tokens=4)
    engine.step()
    clock.now += 2.0
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    clock.now += 100.0
    assert engine.rl("snapshot")["oldest_wait"] == pytest.approx(2.0)
    engine.add("later", 1, tokens=4)
    clock.now += 100.0
    assert not engine.step()
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    clock.now += 1.0
    assert engine.rl("snapshot")["oldest_wait"] == pytest.approx(3.0)
    engine.step()
    assert engine.running() == ["rich"]
    engine.finish()


@MODES
def test_preemption_can_be_switched_off(model: Path, run_ahead: bool, v2: bool) -> None:
    engine = Harness(model, run_ahead=run_ahead, v2=v2, plugin={"preemption": False})
    for name, priority in (("a", 8), ("b", 9), ("c", 1)):
        engine.add(name, priority)
        engine.step()
    assert engine.running() == ["a", "b"]
    engine.finish()
    assert engine.rl("snapshot")["preemptions"] == 0


@MODES
@pytest.mark.parametrize("how", ["salt", "flush"])
def test_no_kv_of_older_weights_is_ever_hit_again(model: Path, how: str, run_ahead: bool, v2: bool) -> None:
    engine = Harness(model, run_ahead=run_ahead, v2=v2, plugin={"kv_on_update": how})
    prompt = [token("old", index) for index in range(6 * BLOCK)]
    engine.add("first", prompt=prompt)
    engine.finish()

    def hits(name: str, salt: str | None = None) -> int:
        before = engine.rl("snapshot")["prefix_hits"]
        engine.add(name, prompt=prompt, salt=salt)
        engine.finish()
        return int(engine.rl("snapshot")["prefix_hits"] - before)

    assert hits("control") == 5 * BLOCK
    for name in ("runs", "runs too", "waits"):
        engine.add(name, prompt=prompt, tokens=60, salt="user's" if name == "waits" else None)
    for _ in range(30):
        engine.step()
    before = engine.rl("snapshot")
    engine.drain()
    answer = engine.rl("advance_version", version=1)
    assert (answer["preempted"], answer["how"]) == (2, how)
    engine.step()
    after = engine.rl("snapshot")
    assert after["prefix_hits"] - before["prefix_hits"] <= 6 * BLOCK, "the second may hit what the first computes anew"
    assert after["preemptions"] == before["preemptions"] == 0, "those of an update are not counted"
    assert after["version"] == 1
    engine.finish()
    engine.rl("advance_version", version=2)
    assert hits("after") == 0
    assert hits("after again") == 5 * BLOCK
    assert hits("user's own salt", salt="user's") == 0, "still apart from others"
    assert hits("the front end's salt of an older version", salt=make_salt("user's", 1)) == (
        5 * BLOCK if how == "salt" else 0
    )
    assert engine.requests["waits"].cache_salt == (make_salt("user's", 1) if how == "salt" else "user's")
    assert engine.rl("advance_version", version=2)["how"] == "flush", "the number again may be other weights"
    assert hits("after the same version") == 0
    with pytest.raises(ValueError, match="never decreases"):
        engine.rl("advance_version", version=1)
    assert engine.rl("advance_version", version=1, history=1)["how"] == how
    assert hits("version 1 of another history") == 0


@MODES
def test_with_long_requests_in_flight_an_update_hashes_nothing_anew_and_no_old_kv_is_hit(
    model: Path, monkeypatch: pytest.MonkeyPatch, run_ahead: bool, v2: bool
) -> None:
    monkeypatch.setattr("vllm_rlplugin.scheduler.REHASH_TOKENS", 250)
    engine = Harness(model, run_ahead=run_ahead, v2=v2)
    prompt = [token("long", index) for index in range(6 * BLOCK)]

    def update(version: int, count: int) -> str:
        """With so many requests in flight; how KV was shut out."""
        for index in range(count):
            engine.add(f"{version} {index}", prompt=prompt, tokens=40)
        for _ in range(10):
            engine.step()
        engine.drain()
        hashes = [list(request.block_hashes) for request in engine.scheduler.requests.values()]
        how = str(engine.rl("advance_version", version=version)["how"])
        after = [list(request.block_hashes) for request in engine.scheduler.requests.values()]
        assert (hashes == after) == (how == "flush"), "hashed anew under a salt only"
        before = engine.rl("snapshot")["prefix_hits"]
        engine.step()
        hits = engine.rl("snapshot")["prefix_hits"] - before
        assert hits <= (count - 1) * 6 * BLOCK, "others may hit what the first computes anew"
        engine.finish()
        return how

    assert [update(1, 1), update(2, 4), update(3, 1), update(4, 4)] == ["salt", "flush", "salt", "flush"]


def test_in_flight_requests_recompute_everything_after_an_update(model: Path) -> None:
    for how in ("salt", "flush"):
        engine = Harness(model, plugin={"kv_on_update": how})
        engine.add("a", prompt=50, tokens=60)
        for _ in range(20):
            engine.step()
        engine.rl("advance_version", version=3)
        tokens = engine.requests["a"].num_tokens
        assert engine.step() == {"a": tokens}, "prompt and output, from the first token on"
        engine.finish()


def test_until_the_first_update_blocks_are_hashed_as_stock_does(model: Path) -> None:
    ours, stock = Harness(model), Harness(model, stock=True)
    for engine in (ours, stock):
        engine.add("a", prompt=64)
        engine.add("b", prompt=64, salt="mine")
    for name in ("a", "b"):
        assert ours.requests[name].block_hashes == stock.requests[name].block_hashes
        assert ours.requests[name].cache_salt == stock.requests[name].cache_salt


def test_an_update_is_refused_while_waiting_requests_hold_kv_and_changes_nothing(model: Path) -> None:
    from vllm.v1.request import RequestStatus

    engine = Harness(model, seqs=1)
    engine.add("a", tokens=30)
    loading = engine.add("b")
    engine.step()
    assert engine.rl("may_update") == {"refused": ""}
    engine.scheduler.waiting.remove_request(loading)
    loading.status = RequestStatus.WAITING_FOR_REMOTE_KVS
    engine.scheduler._enqueue_waiting_request(loading)
    assert "hold KV blocks" in engine.rl("may_update")["refused"]  # asked before weights are written
    with pytest.raises(RuntimeError, match="hold KV blocks"):
        engine.rl("advance_version", version=1)
    assert engine.running() == ["a"]
    assert loading.cache_salt is None
    assert engine.rl("snapshot")["version"] == 0


@pytest.mark.parametrize("kv_on_update", ["salt", "flush"])
def test_a_flush_is_refused_while_a_connector_sends_blocks_and_a_new_salt_is_not(
    model: Path, monkeypatch: pytest.MonkeyPatch, kv_on_update: str
) -> None:
    engine = Harness(model, plugin={"kv_on_update": kv_on_update})
    engine.rl("advance_version", version=1)
    monkeypatch.setattr(engine.scheduler, "_connector_finished", lambda request: (True, None))
    sent = engine.add("a", tokens=30)
    engine.add("b", tokens=30)
    engine.step()
    engine.abort("a")
    loaded = {"version": 1, "history": 0}  # again: always a flush
    later = {"version": 2, "history": 0}
    assert "hold KV blocks" in engine.rl("may_update", **loaded)["refused"]
    assert bool(engine.rl("may_update", **later)["refused"]) == (kv_on_update == "flush")
    assert bool(engine.rl("may_update")["refused"]) == (kv_on_update == "flush")
    with pytest.raises(RuntimeError, match=r"ended hold KV blocks .*first a"):
        engine.rl("advance_version", **loaded)
    assert engine.running() == ["b"], "nobody was preempted for nothing"
    if kv_on_update == "salt":
        assert engine.rl("advance_version", **later)["how"] == "salt"
    engine.scheduler._free_blocks(sent)
    assert engine.rl("may_update", **loaded) == {"refused": ""}
    assert engine.rl("advance_version", version=2)["preempted"] >= 0


@MODES
@pytest.mark.parametrize("seed", range(4))
def test_under_any_interleaving_each_request_gets_its_tokens_and_all_blocks_come_back(
    model: Path, clock: SimpleNamespace, run_ahead: bool, v2: bool, seed: int
) -> None:
    rng = random.Random(seed)
    plugin = {"max_wait": 20.0, "quantum": 4, "kv_on_update": rng.choice(("salt", "flush"))}
    engine = Harness(
        model,
        run_ahead=run_ahead,
        v2=v2,
        seqs=rng.choice((1, 3, 6)),
        blocks=40,
        budget=rng.choice((32, 128)),
        plugin=plugin,
    )
    version, shared = 0, [token("shared", index) for index in range(100)]
    for index in range(500):
        clock.now += rng.choice((0.0, 0.1, 2.0))
        live = [name for name in engine.requests if name not in engine.ended]
        action = rng.random()
        if action < 0.25 and len(live) < 30:
            prompt = shared[: rng.randint(1, 100)] + [rng.randrange(VOCABULARY) for _ in range(rng.randint(0, 60))]
            engine.add(f"r{index}", rng.randint(-3, 3), prompt=prompt, tokens=rng.randint(1, 60))
        elif action < 0.4 and live:
            engine.rl("prioritize", priorities={rng.choice(live): rng.randint(-5, 5) for _ in range(3)})
        elif action < 0.45 and live:
            engine.abort(rng.choice(live))
        elif action < 0.47:
            if rng.random() < 0.7:
                engine.drain()  # as the engine does before an update; without it output in flight is dropped
            version += 1
            engine.rl("advance_version", version=version)
        engine.step()
        assert len(engine.scheduler.running) <= engine.scheduler.max_num_active_reqs
    engine.finish()
    assert engine.rl("snapshot")["outranked"] > 0
    assert not engine.scheduler._rl_clocks
    assert not engine.scheduler._rl_overdue


@MODES
@pytest.mark.parametrize("seed", range(3))
def test_steps_that_look_only_after_a_change_decide_as_those_that_always_look(
    model: Path, clock: SimpleNamespace, run_ahead: bool, v2: bool, seed: int
) -> None:
    def decided(always: bool) -> list[dict[str, int]]:
        rng, clock.now = random.Random(seed), 1000.0
        plugin = {"max_wait": 20.0, "quantum": 4}
        engine = Harness(model, run_ahead=run_ahead, v2=v2, seqs=3, blocks=40, budget=64, plugin=plugin)
        for index in range(300):
            clock.now += rng.choice((0.0, 0.1, 2.0))
            live = [name for name in engine.requests if name not in engine.ended]
            action = rng.random()
            if action < 0.15 and len(live) < 12:
                engine.add(f"r{index}", rng.randint(-3, 3), prompt=rng.randint(1, 60), tokens=rng.randint(1, 60))
            elif action < 0.25 and live:
                engine.rl("prioritize", priorities={rng.choice(live): rng.randint(-5, 5)})
            elif action < 0.28 and live:
                engine.abort(rng.choice(live))
            if always:
                engine.scheduler._rl_settled = -1
            engine.step()
        assert engine.rl("snapshot")["outranked"] > 10
        return engine.trace

    assert decided(False) == decided(True)


def test_a_step_in_which_nobody_comes_or_goes_compares_nobody(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.request import Request

    engine = Harness(model, seqs=4)
    for number in range(16):
        engine.add(f"r{number}", number, tokens=60)
    for _ in range(4):
        engine.step()
    asked: list[str] = []
    monkeypatch.setattr(Request, "__lt__", lambda *_: asked.append("order"))
    monkeypatch.setattr(ProgressivePriority, "may_decide", lambda *_: asked.append("rank"))
    for _ in range(20):
        engine.step()
    assert engine.scheduler._rl_waiting_ahead(9) == 6
    assert asked == []


def test_wrong_use_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--scheduling-policy priority"):
        Harness(model, policy="fcfs")
    with pytest.raises(ConfigError, match="moves experts between ranks"):
        Harness(model, parallel={"enable_eplb": True})
    engine = Harness(model)
    with pytest.raises(ValueError, match="not a command"):
        engine.rl("drop_everything")
    monkeypatch.setattr("orchestrator.hooks.tested_versions.installed_version", lambda names: ("vllm", "0.99.0"))
    with pytest.raises(ConfigError, match="not tested"):
        Harness(model)


def test_async_scheduling_is_kept(model: Path) -> None:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    assert isinstance(Harness(model, run_ahead=True).scheduler, AsyncScheduler)
    assert not isinstance(Harness(model).scheduler, AsyncScheduler)


@pytest.mark.parametrize("user", [None, "", "mine", "with|bar", "new\nline"])
def test_a_salt_holds_the_users_own_and_only_one_version(user: str | None) -> None:
    assert make_salt(user, 0) == user
    for version in (1, 12):
        assert user_salt_of(make_salt(user, version)) == (user or None)
        assert user_salt_of(make_salt(user, version, 3)) == (user or None)
    assert len({make_salt(user, version, history) for version in range(20) for history in range(3)}) == 60
    assert len({make_salt(salt, 3) for salt in (None, "a", "b", "v3")}) == 4
