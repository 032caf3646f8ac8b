"""Makes a tiny Qwen3: a Hugging Face folder (config, weights, word-level tokenizer) that transformers, vLLM and the
trainer all load.

Guarantees: the same arguments give the same bytes of weights and tokenizer; nothing is downloaded; token id ``i`` is the
word ``vocabulary[i]``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from orchestrator.api import ConfigError

ROPE_THETA = 10_000.0  # the usual base for short contexts; Qwen3's own 1e6 is for 32 k tokens
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def create_qwen3(
    folder: str,
    *,
    hidden_size: int,
    intermediate_size: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    vocabulary: Sequence[str],
    max_positions: int,
    dtype: str,
    seed: int,
    tied: bool = False,
) -> str:
    """Write the folder (made if needed) and return its path."""
    if dtype not in _DTYPES:
        raise ConfigError("model.dtype", dtype, f"must be one of {', '.join(_DTYPES)}")
    if heads % kv_heads:
        raise ConfigError("model.heads", heads, f"must be a multiple of kv_heads ({kv_heads})")
    if head_dim % 2:
        raise ConfigError("model.head_dim", head_dim, "must be even: RoPE rotates pairs")
    if len(set(vocabulary)) != len(vocabulary) or not vocabulary:
        raise ConfigError("vocabulary", len(vocabulary), "must be distinct words, at least one")
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": dtype,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": intermediate_size,
        "max_position_embeddings": max_positions,
        "model_type": "qwen3",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-6,
        # Both spellings: transformers 5 reads the first, transformers 4 the second.
        "rope_parameters": {"rope_theta": ROPE_THETA, "rope_type": "default"},
        "rope_theta": ROPE_THETA,
        "tie_word_embeddings": tied,
        "use_sliding_window": False,
        "vocab_size": len(vocabulary),
    }
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    _write_tokenizer(path, vocabulary, max_positions)
    _write_weights(path, config, _DTYPES[dtype], seed)
    return str(path)


def _write_weights(path: Path, config: dict[str, Any], dtype: torch.dtype, seed: int) -> None:
    """Normal draws of variance 1 / inputs (0.02 would leave a model this narrow almost silent); norms are ones."""
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    hidden, wide, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, kv_heads, head_dim = (config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    depth = 2 * config["num_hidden_layers"]  # layers that write into the residual stream

    def draw(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator).mul_(gain / math.sqrt(columns)).to(dtype)

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size, dtype=dtype)

    tensors = {"model.embed_tokens.weight": draw(vocabulary, hidden)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        tensors |= {
            f"{at}input_layernorm.weight": ones(hidden),
            f"{at}self_attn.q_proj.weight": draw(heads * head_dim, hidden),
            f"{at}self_attn.k_proj.weight": draw(kv_heads * head_dim, hidden),
            f"{at}self_attn.v_proj.weight": draw(kv_heads * head_dim, hidden),
            f"{at}self_attn.q_norm.weight": ones(head_dim),
            f"{at}self_attn.k_norm.weight": ones(head_dim),
            f"{at}self_attn.o_proj.weight": draw(hidden, heads * head_dim, 1 / math.sqrt(depth)),
            f"{at}post_attention_layernorm.weight": ones(hidden),
            f"{at}mlp.gate_proj.weight": draw(wide, hidden),
            f"{at}mlp.up_proj.weight": draw(wide, hidden),
            f"{at}mlp.down_proj.weight": draw(hidden, wide, 1 / math.sqrt(depth)),
        }
    tensors["model.norm.weight"] = ones(hidden)
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = draw(vocabulary, hidden)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def _write_tokenizer(path: Path, vocabulary: Sequence[str], max_positions: int) -> None:
    """Words between spaces; an unknown word becomes token 0 (the system itself passes token ids, never text)."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    ids = {word: index for index, word in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=vocabulary[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_positions,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": vocabulary[0],
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
