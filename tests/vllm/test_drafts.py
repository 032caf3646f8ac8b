"""Rollouts with speculative decoding: drafts of what was said before, which have no weights.

On vLLM's CPU backend they are refused, as it loses the temperatures beside drafts (``check_drafts``). Here a stand-in does that
kernel's work; the rest is stock vLLM.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from orchestrator.api import Completion, GenerationRequest, Sampling
from orchestrator.transfer import Publisher, RelayEndpoint
from scripts.bench.probes.vllm.recompute_probe import collect, publish, write_tiny_qwen3
from vllm_rlplugin.worker import inprocess_engine
from vllm_rlplugin.worker.inprocess_worker import EngineWorker

pytestmark = pytest.mark.engine
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
TOKENS = 60


def test_with_drafts_tokens_versions_and_logprobs_are_those_of_the_model_across_an_update(tmp_path: Path) -> None:
    """In a process of its own: drafts load llvmlite, beside which vLLM's CPU build (0.32.0) starts no second engine."""
    child = multiprocessing.get_context("spawn").Process(target=compare, args=(tmp_path,))
    child.start()
    child.join(240)
    child.kill()
    child.join()
    assert child.exitcode == 0


def compare(tmp_path: Path) -> None:
    """Rollouts with drafts across an update, and what the models say of them. Raises AssertionError."""
    weights = {seed: write_tiny_qwen3(tmp_path / str(seed), seed) for seed in (1, 2)}
    relay = RelayEndpoint(job="drafts", kind="memory", master="drafts")
    publisher = Publisher(relay)
    publish(publisher, 1, weights[2])
    asked = [
        GenerationRequest(
            f"r{seed}", f"r{seed}", 0, (5, 9, 2, 7) * 6, Sampling(TOKENS, temperature=heat, seed=seed), "t"
        )
        for seed, heat in enumerate((0.0, 0.0, 0.4, 1.0, 1.0))
    ]

    async def scenario(**options: Any) -> tuple[dict[str, Completion], int]:
        worker = EngineWorker(
            model=str(tmp_path / "1"),
            max_num_seqs=8,
            max_model_len=128,
            kv_cache_mb=4,
            relay=relay.to_dict(),
            **options,
        )
        expand_as_documented()
        await worker.add(asked)
        while "r0" not in (active := worker._engine._active) or active["r0"].core.num_output_tokens < 20:
            await asyncio.sleep(0)
        await worker.suspend()
        await worker.update(1)
        await worker.resume()
        found = await collect(worker, len(asked))
        steps = (await worker.stats()).steps
        await worker.close()
        return found, steps

    vars(inprocess_engine)["check_drafts"] = lambda *_: None
    found, steps = asyncio.run(scenario(speculative_config=DRAFTS))
    assert steps < TOKENS, "no draft was accepted"
    for request in asked:
        check(found[request.request_id], request, tmp_path)
    publisher.close()


def expand_as_documented() -> None:
    """``expand_batch_to_tokens``: a value of each request, once for each of its tokens."""
    from vllm.v1.sample import rejection_sampler

    def expand(output: Any, values: Any, ends: Any, replaced: float, replacement: float) -> None:
        counts = ends.diff(prepend=ends.new_zeros(1))
        output.copy_(values.masked_fill(values == replaced, replacement).repeat_interleave(counts))

    vars(rejection_sampler)["_expand"] = expand


def check(done: Completion, request: GenerationRequest, folder: Path) -> None:
    """Each token was made by the weights that it names, with the log-prob that these say, and at temperature 0 is their best."""
    import torch
    from transformers import AutoModelForCausalLM

    assert [version for version, _ in done.versions] == [0, 1]
    heat = request.sampling.temperature
    begin, context = 0, len(request.token_ids)
    for (_, count), seed in zip(done.versions, (1, 2), strict=True):
        model = AutoModelForCausalLM.from_pretrained(folder / str(seed), dtype=torch.float32)
        end = begin + count
        ids = torch.tensor([request.token_ids + done.token_ids[:end]])
        with torch.no_grad():
            said = model(ids).logits[0, context + begin - 1 : -1] / (heat or 1.0)
        chosen = torch.tensor(done.token_ids[begin:end])
        logprobs = said.log_softmax(-1).gather(-1, chosen[:, None])[:, 0]
        assert done.logprobs[begin:end] == pytest.approx(logprobs.tolist(), abs=2e-4)
        assert heat or said.argmax(-1).tolist() == chosen.tolist()
        begin = end
    assert begin == TOKENS
