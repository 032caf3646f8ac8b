"""KV of models with sliding windows between real engines (CPU, random Qwen3, fp32, greedy): where full attention is among the
layers vLLM keeps every block, and it moves; windows alone are refused at the start."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.api import KvMove
from vllm_rlplugin.kv_engines import Child
from vllm_rlplugin.kv_probe import VOCABULARY, say

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(600)]
BLOCK = 32
WINDOW = 64  # tokens: less than any context here


def write_windowed(folder: Path, *kinds: str) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(8)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=len(kinds),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        use_sliding_window=True,
        sliding_window=WINDOW,
        layer_types=[f"{kind}_attention" for kind in kinds],
    )
    Qwen3ForCausalLM(config).float().save_pretrained(folder)


def test_a_prefix_of_a_model_with_full_and_sliding_window_layers_goes_on_bit_for_bit(tmp_path: Path) -> None:
    write_windowed(tmp_path / "model", "sliding", "full", "sliding", "full")

    async def scenario() -> None:
        source, target = (
            Child(
                name,
                model=str(tmp_path / "model"),
                max_model_len=512,
                kv_cache_mb=8,
                plugin={"kv_transfer": True},
                kv={"token": "token of this test"},
            )
            for name in ("source", "target")
        )
        try:
            await asyncio.gather(source.ready(), target.ready())
            place = await source.kv_place()
            for length in (100, 300):
                rng = random.Random(length)
                asked = tuple(rng.randrange(VOCABULARY) for _ in range(length))
                first = await say(source, f"first {length}", asked, 30)
                context = (*asked, *first.token_ids, 1, 2, 3)
                stayed = await say(source, f"stayed {length}", context, 40)
                counted, blocks = await target.computed(), (len(context) - 1) // BLOCK
                moved = await target.fetch_kv(KvMove(f"{length}", context, place, 60.0))
                assert (moved.moved, moved.why) == (blocks * BLOCK, "")
                after = await say(target, f"after {length}", context, 40)
                assert (after.token_ids, after.logprobs) == (stayed.token_ids, stayed.logprobs)
                assert await target.computed() - counted == len(context) - blocks * BLOCK + 39
        finally:
            await source.close()
            await target.close()

    asyncio.run(scenario())


def test_a_model_of_sliding_windows_alone_is_one_clear_error_at_the_start(tmp_path: Path) -> None:
    write_windowed(tmp_path / "model", "sliding", "sliding")
    code = (
        "import sys\nfrom orchestrator.api import ConfigError\nfrom vllm_rlplugin.worker import EngineWorker\n"
        "try:\n    EngineWorker(model=sys.argv[1], kv_cache_mb=8, plugin={'kv_transfer': True}, kv={'token': 'secret'})\n"
        "except ConfigError as error:\n    print('refused:', error, flush=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "model")], capture_output=True, text=True, timeout=300, check=False
    )
    assert "refused: kv_transfer = 'SlidingWindowSpec'" in done.stdout, done.stderr[-2000:]
    assert "switch kv_transfer off for this model" in done.stdout
