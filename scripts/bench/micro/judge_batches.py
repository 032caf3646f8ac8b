"""A judge whose layers are streamed, asked in batches: decode tokens/s over one question at a time with all layers resident.

A random Qwen3 of 8 layers of 12.6 MB (float32) on the CPU, one thread to compute and one that copies. 64 questions of about 48
tokens with answers of 32, and 32 of about 1,000 with answers of 4, are answered by one batch with no layer resident.
The same questions one at a time are the reference for bytes and answers (streamed too), and with all layers resident for speed;
pairs take turns. Time is that of decoding: the time of answers of one token is taken off. The value is the worst pair of the
short ones. Besides, the bytes of layers that are read for a question must be at most 1/32 of those of one at a time, and every
answer the same to the last token. ``--quick``: two layers, 8 and 4 questions.
"""

from __future__ import annotations

import os
import random
import time
from dataclasses import replace
from typing import Any

import torch

from orchestrator.policies.serving.judge_residency import spread_layers
from scripts.bench.result import frame, now
from vllm_rlplugin.judge.streamed_model import JudgeQuestion, StreamedModel

NAME = "judge-batches"
_LEAST, _BYTES, PAIRS = 8.0, 1 / 32, 3
_VOCABULARY = 512


def run(quick: bool, nonce: str) -> dict[str, Any]:
    """Measure."""
    begun, threads = now(), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        judge = StreamedModel(_model(2 if quick else 8))
        found = {
            "short": _compared(judge, _questions(8 if quick else 64, 48, 32), 1 if quick else PAIRS),
            "1k": _compared(judge, _questions(4 if quick else 32, 1000, 4), 0),
        }
        judge.close()
    finally:
        torch.set_num_threads(threads)
    value = min(found["short"]["decode_tokens_per_s_over_one_at_a_time"])
    same = all(row["answers_that_differ"] == 0 for row in found.values())
    share = max(row["bytes_share"] for row in found.values())
    return frame(
        NAME,
        "real",
        value=value,
        unit="decode tokens/s of a batch with streamed layers, over one question at a time with resident ones (the worst pair)",
        reference="the bar",
        reference_value=_LEAST,
        bar=f">= {_LEAST:g}; bytes of layers per question <= 1/32 of one at a time; answers the same",
        holds=None if quick else value >= _LEAST and share <= _BYTES and same,
        detail={**found, "threads": 1, "load_average": os.getloadavg()[0], "samples": 96},
        quick=quick,
        nonce=nonce,
        begun=begun,
    )


def _model(layers: int) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(1)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=_VOCABULARY,
            hidden_size=512,
            intermediate_size=1536,
            num_hidden_layers=layers,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=64,
            max_position_embeddings=2048,
            initializer_range=0.08,
        )
    ).float()


def _questions(count: int, tokens: int, most: int) -> list[JudgeQuestion]:
    """Prompts of 90 to 110 per cent of so many tokens."""
    chance = random.Random(tokens)
    lengths = [chance.randint(9 * tokens // 10, 11 * tokens // 10) for _ in range(count)]
    return [JudgeQuestion([chance.randrange(_VOCABULARY) for _ in range(length)], most) for length in lengths]


def _compared(judge: StreamedModel, questions: list[JudgeQuestion], pairs: int) -> dict[str, Any]:
    """A batch with streamed layers beside one at a time: streamed, for answers and bytes, and, in pairs, resident for time."""

    def timed(resident: int, batch: int, asked: list[JudgeQuestion] = questions) -> tuple[list[list[int]], float, int]:
        judge.arrange(spread_layers(judge.memory, 0, resident))
        before, begun, said = judge.counts.bytes, time.perf_counter(), list[list[int]]()
        for at in range(0, len(asked), batch):
            said += judge.generate_batch(asked[at : at + batch])
        return said, time.perf_counter() - begun, judge.counts.bytes - before

    alone, alone_seconds, bytes_alone = timed(0, 1)
    batch, batch_seconds, bytes_batch = timed(0, len(questions))
    differ, rates, ratios = [one != two for one, two in zip(alone, batch, strict=True)], [batch_seconds], list[float]()
    first = [replace(one, max_tokens=1) for one in questions]  # prefill, and the token that comes of it
    for _ in range(pairs):
        prefill = timed(judge.memory.layers, 1, first)[1], timed(0, len(questions), first)[1]
        resident, resident_seconds, _ = timed(judge.memory.layers, 1)
        batch, batch_seconds, _ = timed(0, len(questions))
        differ += [one != two for said in (resident, batch) for one, two in zip(alone, said, strict=True)]
        ratios.append((resident_seconds - prefill[0]) / (batch_seconds - prefill[1]))
        rates.append(batch_seconds)
    return {
        "questions": len(questions),
        "prompt_tokens_mean": sum(len(one.prompt) for one in questions) / len(questions),
        "answer_tokens": sum(map(len, alone)),
        "answers_compared": len(differ),
        "answers_that_differ": sum(differ),
        "layer_bytes_per_question": bytes_batch / len(questions),
        "layer_bytes_per_question_one_at_a_time": bytes_alone / len(questions),
        "bytes_share": bytes_batch / bytes_alone,
        "decode_tokens_per_s_over_one_at_a_time": ratios,
        "questions_per_s": [len(questions) / seconds for seconds in rates],
        "questions_per_s_one_at_a_time_streamed": len(questions) / alone_seconds,
    }
