"""The experts that a real vLLM chose, used in training: how far engine and trainer are apart with and without.

vLLM 0.32.0 returns routed experts from its second model runner, which needs Triton, so not on a CPU. What stands in for that
runner here is small: vLLM's own capturer, bound to its own routers, read after each step. All else is the product's path: the
worker's completions, the wire, samples, the trainer.
"""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")
pytest.importorskip("transformers")

from megatron_rlplugin import parallel_layout  # noqa: E402
from megatron_rlplugin.trainer.megatron_trainer import MegatronTrainer  # noqa: E402
from orchestrator.api import TrainSample  # noqa: E402
from orchestrator.hooks.tested_versions import VLLM, find_version  # noqa: E402
from orchestrator.transfer.turns import decode_completions  # noqa: E402
from tests.megatron.test_families_engine import run  # noqa: E402
from tests.support.family_models import VOCABULARY, write_family  # noqa: E402

pytestmark = [
    pytest.mark.engine,
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_version(VLLM) is None, reason="vLLM is not installed"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron"),
]

ENGINE = """
import base64, json, sys, time
import numpy as np
from orchestrator.api import GenerationRequest, Sampling
from orchestrator.transfer.turns import encode_completions
from vllm_rlplugin.worker.inprocess_engine import EngineOptions, InprocessEngine

folder, dtype, prompts, prompt_start = json.loads(sys.argv[1])
options = {"max_model_len": 256, "max_num_seqs": 8, "kv_cache_mb": 32, "enable_prefix_caching": False}
engine = InprocessEngine(EngineOptions.from_dict({"model": folder, "dtype": dtype, **options}), time.monotonic)
engine._routed = True

from vllm.model_executor.layers.fused_moe.routed_experts_capturer import RoutedExpertsCapturer, bind_routed_experts_capturer

config = engine._llm.vllm_config
runner = engine._core.model_executor.driver_worker.worker.model_runner
capturer = RoutedExpertsCapturer(config.scheduler_config.max_num_batched_tokens, config)
bind_routed_experts_capturer(runner.model, capturer)
rows = {}
execute, step = runner.execute_model, engine._llm.step

def executing(scheduled, *args, **kwargs):
    answer = execute(scheduled, *args, **kwargs)
    chosen, begin = capturer.snapshot_routing_data(scheduled.total_num_scheduled_tokens).numpy(), 0
    for place, name in enumerate(runner.input_batch.req_ids):
        count = scheduled.num_scheduled_tokens[name]
        at = int(runner.input_batch.num_computed_tokens_cpu[place])
        for number in range(count):
            rows.setdefault(name, {})[at + number] = chosen[begin + number].copy()
        begin += count
    return answer

def stepping():
    outputs = step()
    for output in outputs:
        active = engine._active[output.request_id]
        known = rows[active.internal_id]
        output.outputs[0].routed_experts = np.stack([known[at] for at in range(active.experts_from, max(known) + 1)])
    return outputs

runner.execute_model, engine._llm.step = executing, stepping
for number, prompt in enumerate(prompts):
    sampling = Sampling(40, seed=number)
    request = GenerationRequest(f"r{number}", f"t{number}", 0, tuple(prompt), sampling, "task", experts_from=prompt_start)
    assert engine.add(request, float(number)) is None
done = []
while engine.has_work:
    done += engine.step(time.monotonic())
engine.close()
print("ANSWER " + json.dumps(base64.b64encode(encode_completions(0, done)).decode()))
"""


def generated(folder: Path, dtype: str, prompt_start: int = 0) -> list[TrainSample]:
    draw = torch.Generator().manual_seed(9)
    prompts = [torch.randint(VOCABULARY, (n,), generator=draw).tolist() for n in (21, 33, 5, 48, 17, 9, 40, 26)]
    answer = run(ENGINE, [str(folder), dtype, prompts, prompt_start], "ANSWER ")
    found = []
    for done in decode_completions(base64.b64decode(answer))[1]:
        prompt = prompts[int(done.request_id[1:])]
        assert done.experts is not None
        assert (done.experts.first, done.experts.end) == (prompt_start, len(prompt) + len(done.token_ids) - 1)
        found.append(
            TrainSample(
                done.request_id,
                "g",
                (*prompt, *done.token_ids),
                (0,) * len(prompt) + (1,) * len(done.token_ids),
                (0.0,) * len(prompt) + done.logprobs,
                ((0, len(done.token_ids)),),
                1.0,
                experts=(done.experts,),
            )
        )
    return found


def gap(folder: Path, dtype: str, samples: list[TrainSample]) -> dict[str, float]:
    """By the experts that the rollout chose ("mean"), and by the trainer's own."""
    trainer = MegatronTrainer(model=str(folder), settings={"routing_replay": True}, dtype=dtype, total_steps=4)
    try:
        return asyncio.run(trainer.logprob_gap(samples))
    finally:
        parallel_layout.shutdown_parallel()


WIDE: dict[str, Any] = {
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 6,
}


def test_in_bfloat16_replay_brings_engine_and_trainer_together(tmp_path: Path) -> None:
    folder = write_family(tmp_path / "model", "qwen3-moe", dtype=torch.bfloat16, **WIDE)
    found = gap(folder, "bfloat16", generated(folder, "bfloat16"))
    print({name: f"{value:.2e}" for name, value in found.items()})
    assert found["tokens"] == 320
    assert found["mean"] < 0.8 * found["own_experts"]


@pytest.mark.parametrize("family", ["qwen3-moe", "qwen2-moe", "glm"])
def test_in_float32_the_experts_are_the_same_and_so_is_what_is_said(family: str, tmp_path: Path) -> None:
    folder = write_family(tmp_path / "model", family)
    found = gap(folder, "float32", generated(folder, "float32", prompt_start=2))
    print(family, {name: f"{value:.2e}" for name, value in found.items()})
    assert found["max"] <= 1e-4
    assert found["own_experts"] <= 1e-4
