"""Makes a tiny Qwen2.5, Qwen3, Qwen3-MoE or Llama: a Hugging Face folder (config, weights, word-level tokenizer) that
transformers, vLLM and the trainer all load.

Guarantees: the same arguments give the same bytes of weights and tokenizer; nothing is downloaded; token id ``i`` is the
word ``vocabulary[i]``. Without weights no torch is imported.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.api import ConfigError

if TYPE_CHECKING:
    import torch

ROPE_THETA = 10_000.0  # the usual base for short contexts; Qwen3's own 1e6 is for 32 k tokens
_DTYPES = ("float32", "bfloat16")


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
    weights: bool = True,
) -> str:
    """Write the folder (made if needed) and return its path. ``weights`` false: ``config.json`` only, for a plan."""
    config = _config(
        "Qwen3ForCausalLM", "qwen3", hidden_size, intermediate_size, layers, heads, kv_heads, head_dim, len(vocabulary),
        max_positions, dtype, tied,
    )  # fmt: skip
    return _create(folder, vocabulary, seed, config, weights)


def create_qwen2(
    folder: str,
    *,
    hidden_size: int,
    intermediate_size: int,
    layers: int,
    heads: int,
    kv_heads: int,
    vocabulary: Sequence[str],
    max_positions: int,
    dtype: str,
    seed: int,
    tied: bool = False,
) -> str:
    """The same with the layers of Qwen2 and Qwen2.5: biases on q, k and v, no norms of q and k."""
    if hidden_size % heads:
        raise ConfigError("model.heads", heads, f"must divide hidden_size ({hidden_size})")
    config = _config(
        "Qwen2ForCausalLM", "qwen2", hidden_size, intermediate_size, layers, heads, kv_heads, hidden_size // heads,
        len(vocabulary), max_positions, dtype, tied,
    )  # fmt: skip
    for name in ("attention_bias", "head_dim"):  # keys that Qwen2 does not have
        del config[name]
    return _create(folder, vocabulary, seed, config)


def create_llama(
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
    """The same with the layers of Llama: no biases, no norms of q and k."""
    if hidden_size % heads:
        raise ConfigError(
            "model.heads", heads, f"must divide hidden_size ({hidden_size}): transformers wants it of a Llama"
        )
    config = _config(
        "LlamaForCausalLM", "llama", hidden_size, intermediate_size, layers, heads, kv_heads, head_dim, len(vocabulary),
        max_positions, dtype, tied,
    )  # fmt: skip
    del config["use_sliding_window"]  # a key that Llama does not have
    return _create(folder, vocabulary, seed, config | {"mlp_bias": False})


def create_qwen3_moe(
    folder: str,
    *,
    hidden_size: int,
    expert_intermediate_size: int,
    experts: int,
    experts_per_token: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    vocabulary: Sequence[str],
    max_positions: int,
    dtype: str,
    seed: int,
    tied: bool = False,
    normalize: bool = True,
) -> str:
    """The same with a mixture of experts in every layer. ``normalize``: the chosen experts' weights sum to one."""
    if not 1 <= experts_per_token <= experts:
        raise ConfigError("model.experts_per_token", experts_per_token, f"must be from 1 to experts ({experts})")
    config = _config(
        "Qwen3MoeForCausalLM", "qwen3_moe", hidden_size, expert_intermediate_size, layers, heads, kv_heads, head_dim,
        len(vocabulary), max_positions, dtype, tied,
    )  # fmt: skip
    config |= {
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": expert_intermediate_size,
        "norm_topk_prob": normalize,
        "num_experts": experts,
        "num_experts_per_tok": experts_per_token,
        "output_router_logits": False,
    }
    return _create(folder, vocabulary, seed, config)


def _config(
    architecture: str,
    model_type: str,
    hidden_size: int,
    intermediate_size: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    vocabulary: int,
    max_positions: int,
    dtype: str,
    tied: bool,
) -> dict[str, Any]:
    if heads % kv_heads:
        raise ConfigError("model.heads", heads, f"must be a multiple of kv_heads ({kv_heads})")
    if head_dim % 2:
        raise ConfigError("model.head_dim", head_dim, "must be even: RoPE rotates pairs")
    return {
        "architectures": [architecture],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": dtype,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": intermediate_size,
        "max_position_embeddings": max_positions,
        "model_type": model_type,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-6,
        # Both spellings: transformers 5 reads the first, transformers 4 the second.
        "rope_parameters": {"rope_theta": ROPE_THETA, "rope_type": "default"},
        "rope_theta": ROPE_THETA,
        "tie_word_embeddings": tied,
        "use_sliding_window": False,
        "vocab_size": vocabulary,
    }


def _create(folder: str, vocabulary: Sequence[str], seed: int, config: dict[str, Any], weights: bool = True) -> str:
    dtype = config["dtype"]
    if dtype not in _DTYPES:
        raise ConfigError("model.dtype", dtype, f"must be one of {', '.join(_DTYPES)}")
    if len(set(vocabulary)) != len(vocabulary) or not vocabulary:
        raise ConfigError("vocabulary", len(vocabulary), "must be distinct words, at least one")
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if weights:
        _write_tokenizer(path, vocabulary, config["max_position_embeddings"])
        _write_weights(path, config, seed)
    return str(path)


def _write_weights(path: Path, config: dict[str, Any], seed: int) -> None:
    """Normal draws of variance 1 / inputs (0.02 would leave a model this narrow almost silent); norms are ones."""
    import torch
    from safetensors.torch import save_file

    dtype = getattr(torch, config["dtype"])
    generator = torch.Generator().manual_seed(seed)
    hidden, wide, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim", hidden // heads)
    depth = 2 * config["num_hidden_layers"]  # layers that write into the residual stream

    def draw(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator).mul_(gain / math.sqrt(columns)).to(dtype)

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size, dtype=dtype)

    def swiglu(at: str) -> dict[str, torch.Tensor]:
        return {
            f"{at}gate_proj.weight": draw(wide, hidden),
            f"{at}up_proj.weight": draw(wide, hidden),
            f"{at}down_proj.weight": draw(hidden, wide, 1 / math.sqrt(depth)),
        }

    tensors = {"model.embed_tokens.weight": draw(vocabulary, hidden)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        tensors[f"{at}input_layernorm.weight"] = ones(hidden)
        for name, size in (("q", heads * head_dim), ("k", kv_heads * head_dim), ("v", kv_heads * head_dim)):
            tensors[f"{at}self_attn.{name}_proj.weight"] = draw(size, hidden)
            if config["model_type"] == "qwen2":
                tensors[f"{at}self_attn.{name}_proj.bias"] = draw(1, size)[0]
            elif name != "v" and config["model_type"] != "llama":
                tensors[f"{at}self_attn.{name}_norm.weight"] = ones(head_dim)
        tensors[f"{at}self_attn.o_proj.weight"] = draw(hidden, heads * head_dim, 1 / math.sqrt(depth))
        tensors[f"{at}post_attention_layernorm.weight"] = ones(hidden)
        if "num_experts" in config:
            tensors[f"{at}mlp.gate.weight"] = draw(config["num_experts"], hidden)
            for expert in range(config["num_experts"]):
                tensors |= swiglu(f"{at}mlp.experts.{expert}.")
        else:
            tensors |= swiglu(f"{at}mlp.")
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
