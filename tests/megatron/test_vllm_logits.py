"""One policy in three programs: transformers, Megatron-Core (the trainer) and vLLM (the rollout) agree in fp32.

This is the gap that truncated importance sampling has to bridge when nothing else differs. Measured on CPU, fp32, a tiny
Qwen3 and Llama: about 3e-6 between any two of them, in prefill and in decode. The tolerance is 2e-5; the run's alarm is at 2e-2.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")
transformers = pytest.importorskip("transformers")

from megatron_rlplugin import (  # noqa: E402
    model,
    parallel_layout,
    tiny_model,
)
from megatron_rlplugin.objective.vocab_logprobs import logprobs_and_entropy  # noqa: E402
from megatron_rlplugin.weights import hf_bridge  # noqa: E402
from orchestrator.hooks.tested_versions import VLLM, find_version  # noqa: E402

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(find_version(VLLM) is None, reason="vLLM is not installed"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron"),
]
TOLERANCE = 2e-5  # nats
VOCABULARY = 101
TEMPERATURE = 0.8

ENGINE = """
import gc, json, sys
from vllm import LLM, SamplingParams
folders, prompts, temperature = json.loads(sys.argv[1])
sampling = SamplingParams(
    max_tokens=24, temperature=temperature, logprobs=0, prompt_logprobs=0, ignore_eos=True, detokenize=False, seed=1
)
answers = {}
for folder in folders:
    gc.freeze()  # what was imported is no garbage
    llm = LLM(
        model=folder, dtype="float32", skip_tokenizer_init=True, enforce_eager=True, max_model_len=128, max_num_seqs=8,
        block_size=32, kv_cache_memory_bytes=16 << 20, seed=0, logprobs_mode="processed_logprobs",
        generation_config="vllm", enable_prefix_caching=True,
    )
    answers[folder] = []
    for output in llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False):
        ids = list(output.outputs[0].token_ids)
        made = [step[token].logprob for token, step in zip(ids, output.outputs[0].logprobs, strict=True)]
        given = [step[token].logprob for token, step in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:])]
        answers[folder].append({"token_ids": ids, "logprobs": made, "prompt_logprobs": given})
    llm.llm_engine.engine_core.shutdown()
print("ANSWER " + json.dumps(answers))
"""


@pytest.fixture(scope="module", autouse=True)
def process_groups() -> Iterator[None]:
    parallel_layout.initialize_parallel()
    yield
    parallel_layout.shutdown_parallel()


FAMILIES = ("qwen3", "llama")
Answers = list[dict[str, Any]]


def ask_vllm(folders: list[str], prompts: list[list[int]]) -> dict[str, Answers]:
    """Log-probs by stock vLLM engines, one after the other in a process of their own."""
    settings = {
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    command = [sys.executable, "-W", "ignore", "-c", ENGINE, json.dumps([folders, prompts, TEMPERATURE])]
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    answers: dict[str, Answers] = json.loads(line.removeprefix("ANSWER "))
    return answers


def model_of(folder: Path, family: str) -> str:
    made: str = getattr(tiny_model, f"create_{family}")(
        str(folder / family),
        hidden_size=128,
        intermediate_size=256,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=32,
        vocabulary=[f"w{index}" for index in range(VOCABULARY)],
        max_positions=128,
        dtype="float32",
        seed=11,
        tied=family == "llama",
    )
    return made


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[list[int]], dict[str, tuple[str, Answers]]]:
    """Prompts, and by family the model's folder and what vLLM answers."""
    folder = tmp_path_factory.mktemp("models")
    models = {family: model_of(folder, family) for family in FAMILIES}
    generator = torch.Generator().manual_seed(3)
    shared = torch.randint(VOCABULARY, (40,), generator=generator).tolist()  # longer than a block: the cache is used
    prompts = [shared[:n] + torch.randint(VOCABULARY, (9,), generator=generator).tolist() for n in (40, 40, 3, 21, 0)]
    answers = ask_vllm([*models.values()], prompts)
    return prompts, {family: (model, answers[model]) for family, model in models.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_megatron_and_vllm_give_the_same_log_probs(
    family: str, asked: tuple[list[list[int]], dict[str, tuple[str, Answers]]]
) -> None:
    prompts, by_family = asked
    folder, answers = by_family[family]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ours = model.build_model(model.read_shape(folder), "float32")[0].eval()
    hf_bridge.load_hf(ours, folder)
    worst: dict[str, float] = {}
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = torch.tensor([[*prompt, *answer["token_ids"]]])
        length = tokens.shape[1]
        with torch.no_grad():
            logits = {
                "transformers": theirs(tokens).logits[0],
                "megatron": ours(tokens, torch.arange(length)[None], model.causal_mask(length))[0],
            }
        from_vllm = {
            "prefill": (slice(0, len(prompt) - 1), answer["prompt_logprobs"], 1.0),
            "decode": (slice(len(prompt) - 1, length - 1), answer["logprobs"], TEMPERATURE),
        }
        gaps = {"megatron - transformers, logits": (logits["megatron"] - logits["transformers"]).abs().max()}
        for phase, (part, reported, temperature) in from_vllm.items():
            for name, value in logits.items():
                logp, _ = logprobs_and_entropy(value[part], tokens[0, 1:][part], temperature, entropy_gradient=False)
                gaps[f"{name} - vllm, {phase}"] = (logp - torch.tensor(reported)).abs().max()
        for name, gap in gaps.items():
            worst[name] = max(worst.get(name, 0.0), float(gap))
    print({name: f"{gap:.1e}" for name, gap in worst.items()})
    assert len(worst) == 5
    assert max(worst.values()) <= TOLERANCE, worst
