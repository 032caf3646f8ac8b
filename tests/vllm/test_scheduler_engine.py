"""Our scheduler in a real in-process vLLM engine (CPU, tiny random Qwen3): what it preempts is computed right again."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from orchestrator.api import ConfigError
from scripts.bench.probes.vllm.recompute_probe import VOCABULARY, write_tiny_qwen3
from vllm_rlplugin.options import KEY, SCHEDULER
from vllm_rlplugin.patches.register import REGISTER
from vllm_rlplugin.worker.inprocess_engine import prepare_process

pytestmark = pytest.mark.engine
BLOCK = 32
LENGTH = 160  # longest sequence


class Engine:
    """A stock LLMEngine with two slots, spoken to directly."""

    def __init__(self, model: Path, **arguments: Any) -> None:
        on_cpu = prepare_process(1)
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        defaults: dict[str, Any] = {
            "model": str(model),
            "skip_tokenizer_init": True,
            "generation_config": "vllm",
            "dtype": "float32",
            "seed": 0,
            "max_num_seqs": 2,
            "max_model_len": LENGTH,
            "block_size": BLOCK,
            "kv_cache_memory_bytes": 1 << 20,
            "enforce_eager": on_cpu,
            "enable_prefix_caching": True,
            "scheduling_policy": "priority",
            "scheduler_cls": SCHEDULER,
            "additional_config": {KEY: {}},
            "disable_log_stats": True,
        }
        config = EngineArgs(**(defaults | arguments)).create_engine_config()
        self.llm = LLMEngine.from_vllm_config(config, disable_log_stats=True)
        self.core = self.llm.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self._added = 0

    def add(self, name: str, priority: int, tokens: int, *, prompt: list[int] | None = None) -> None:
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        self._added += 1
        params = SamplingParams(
            max_tokens=tokens,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self.llm.add_request(
            name,
            tokens_input(prompt_of(name) if prompt is None else prompt),
            params,
            arrival_time=float(self._added),
            priority=priority,
            session_id=f"session {name}",
        )

    def steps(self, count: int) -> dict[str, list[int]]:
        done: dict[str, list[int]] = {}
        for _ in range(count):
            for output in self.llm.step():
                done[output.request_id] = list(output.outputs[0].token_ids)
        return done

    def finish(self) -> dict[str, list[int]]:
        done: dict[str, list[int]] = {}
        while self.scheduler.has_requests():
            done |= self.steps(1)
        assert self.rl("snapshot")["kv_used"] == 0
        return done

    def rl(self, command: str, **arguments: Any) -> Mapping[str, Any]:
        answer: Mapping[str, Any] = self.core.rl_coserve(command, arguments)
        return answer

    def running(self) -> set[str]:
        return {request.request_id.rsplit("-", 1)[0] for request in self.scheduler.running}

    def alone(self, *wanted: tuple[str, int]) -> dict[str, list[int]]:
        """What requests get when nobody is preempted and nothing is cached."""
        assert self.scheduler.reset_prefix_cache()
        for name, tokens in wanted:
            self.add(name, 0, tokens)
        return self.finish()


def prompt_of(name: str, length: int = 40) -> list[int]:
    rng = random.Random(name)
    return [rng.randrange(VOCABULARY) for _ in range(length)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_qwen3(folder, 1)
    return folder


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    engine = Engine(model)
    yield engine
    engine.core.shutdown()


def test_a_preempted_request_ends_with_the_tokens_of_an_unpreempted_run(engine: Engine) -> None:
    wanted = engine.alone(("a", 80), ("b", 80), ("urgent", 30))
    assert engine.scheduler.reset_prefix_cache()
    engine.add("a", 5, 80)
    engine.add("b", 7, 80)
    done = engine.steps(40)
    assert engine.running() == {"a", "b"}
    before = engine.rl("snapshot")
    engine.add("urgent", 1, 30)
    done |= engine.steps(1)
    assert engine.running() == {"a", "urgent"}, "in the next step"
    done |= engine.finish()
    after = engine.rl("snapshot")
    assert done == wanted
    assert after["outranked"] - before["outranked"] == 1
    assert after["prefix_hits"] - before["prefix_hits"] == (40 + 39) // BLOCK * BLOCK, (
        "the victim found its full blocks"
    )


def test_requests_that_are_reprioritised_all_the_time_end_with_the_right_tokens(engine: Engine) -> None:
    names = [f"r{index}" for index in range(8)]
    wanted = engine.alone(*((name, 60) for name in names))
    rng, done = random.Random(3), {}
    for name in names:
        engine.add(name, rng.randint(0, 9), 60)
    while engine.scheduler.has_requests():
        engine.rl("prioritize", priorities={f"session {rng.choice(names)}": rng.randint(0, 9)})
        done |= engine.steps(rng.randint(1, 5))
    assert done == wanted
    assert engine.rl("snapshot")["outranked"] > 10


@pytest.mark.parametrize("how", ["salt", "flush"])
def test_an_update_makes_in_flight_requests_recompute_and_new_ones_miss(
    engine: Engine, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.scheduler, "_rl_flush", how == "flush")
    wanted = engine.alone(("a", 80), ("b", 80), ("c", 10))
    prompt = prompt_of("old", 100)

    def hits() -> int:
        before = engine.rl("snapshot")["prefix_hits"]
        engine.add("probe", 0, 2, prompt=prompt)
        engine.finish()
        return int(engine.rl("snapshot")["prefix_hits"] - before)

    hits()
    assert hits() == 3 * BLOCK, "the control: without an update it is found"
    for name, tokens in (("a", 80), ("b", 80), ("c", 10)):
        engine.add(name, 0, tokens)
    done = engine.steps(30)
    engine.core.pause_scheduler("keep", clear_cache=False)
    before = engine.rl("snapshot")
    answer = engine.rl("advance_version", version=before["version"] + 1)
    assert (answer["how"], answer["preempted"]) == (how, 2)
    engine.core.resume_scheduler()
    done |= engine.steps(1)
    after = engine.rl("snapshot")
    assert after["prefix_hits"] == before["prefix_hits"]
    assert after["preemptions"] == before["preemptions"]
    assert engine.running() == {"a", "b"}
    assert done | engine.finish() == wanted, "the weights are the same, so the tokens must be"
    assert hits() == 0
    assert hits() == 3 * BLOCK


def test_the_front_end_reaches_the_scheduler_through_the_engine_core(engine: Engine) -> None:
    assert REGISTER.status()["engine_command"]
    with pytest.raises(ValueError, match="not a command"):
        engine.rl("nonsense")
    assert engine.rl("snapshot")["steps"] > 0


def test_another_scheduling_policy_is_refused_before_the_engine_starts(engine: Engine) -> None:
    from vllm_rlplugin.scheduler import create_scheduler

    config = engine.llm.vllm_config
    config.scheduler_config.policy = "fcfs"
    try:
        with pytest.raises(ConfigError, match="--scheduling-policy priority"):
            create_scheduler(vllm_config=config)
    finally:
        config.scheduler_config.policy = "priority"
