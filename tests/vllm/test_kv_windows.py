"""KV of a model with sliding windows does not move: a real engine (CPU, random Qwen3) says so at its start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.bench.probes.vllm.kv_probe import VOCABULARY

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(600)]
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


def test_a_model_of_sliding_windows_alone_is_one_clear_error_at_the_start(tmp_path: Path) -> None:
    write_windowed(tmp_path / "model", "sliding", "sliding")
    code = (
        "import sys\nfrom orchestrator.api import ConfigError\nfrom vllm_rlplugin.worker.inprocess_worker import EngineWorker\n"
        "try:\n    EngineWorker(model=sys.argv[1], kv_cache_mb=8, plugin={'kv_transfer': True}, kv={'token': 'secret'})\n"
        "except ConfigError as error:\n    print('refused:', error, flush=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "model")], capture_output=True, text=True, timeout=300, check=False
    )
    assert "refused: kv_transfer = 'layers with a sliding window'" in done.stdout, done.stderr[-2000:]
    assert "disable kv_transfer for this model" in done.stdout
