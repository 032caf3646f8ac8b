"""Tiny random models of every family that the trainer computes, written by transformers: what a user would download, small.

Every tensor is random, norms, biases and sinks too, so that nothing hides behind a zero or a one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

VOCABULARY = 60
LENGTH = 24  # longer than a window and than what yarn scales from
_ROPE = {"rope_type": "default", "rope_theta": 5000.0}
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # the least that vLLM computes on a CPU
    "max_position_embeddings": 256,  # what the engine tests ask vLLM for
    "rope_parameters": _ROPE,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
_SIGMOID = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "num_mtp_layers": 0,
}
_DEEPSEEK = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}  # keys of the published folders, which vLLM reads
_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}

# name -> (transformers' config class, what differs from _COMMON)
FAMILY_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama3-rope": (
        "LlamaConfig",
        {
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 2.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "linear-rope": ("LlamaConfig", {"rope_parameters": _ROPE | {"rope_type": "linear", "factor": 2.0}}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "mistral-window": ("MistralConfig", {"sliding_window": 7}),
    "qwen2": ("Qwen2Config", {"head_dim": None}),
    "qwen3": ("Qwen3Config", {}),
    "qwen2-moe": (
        "Qwen2MoeConfig",
        _EXPERTS | {"head_dim": None, "shared_expert_intermediate_size": 40, "norm_topk_prob": False},
    ),
    "qwen3-moe": ("Qwen3MoeConfig", _EXPERTS),
    "qwen3-moe-dense": ("Qwen3MoeConfig", _EXPERTS | {"decoder_sparse_step": 2, "mlp_only_layers": [3]}),
    "deepseek-v3": (
        "DeepseekV3Config",
        _SIGMOID
        | _LATENT
        | _DEEPSEEK
        | {"head_dim": None, "rope_parameters": _ROPE | _YARN | {"mscale": 0.9, "mscale_all_dim": 0.8}},
    ),
    "moonlight": (  # one of DeepSeek-V3's architecture
        "DeepseekV3Config",
        _SIGMOID | _LATENT | _DEEPSEEK | {"head_dim": None, "q_lora_rank": None, "n_group": 1, "topk_group": 1},
    ),
    "glm": (
        "Glm4MoeConfig",
        _SIGMOID
        | {
            "n_group": 1,
            "topk_group": 1,
            "attention_bias": True,
            "use_qk_norm": True,
            "rope_parameters": _ROPE | {"partial_rotary_factor": 0.5},
        },
    ),
    "gpt-oss": (
        "GptOssConfig",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "swiglu_limit": 1.5,
            "rope_parameters": _ROPE | _YARN | {"truncate": False},
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 20,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0},
            },
        },
    ),
}


def write_family(folder: Path, name: str, *, dtype: Any = torch.float32, **changes: Any) -> Path:
    """Write the folder; the same arguments give the same weights."""
    import transformers

    config_name, differs = FAMILY_MODELS[name]
    settings = {
        key: value
        for key, value in {**_COMMON, **differs, **changes}.items()
        if value is not None or key not in _COMMON or key.endswith("token_id")
    }
    torch.manual_seed(7)
    config = getattr(transformers, config_name)(**settings)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        tensors = [*model.named_parameters(), *((n, b) for n, b in model.named_buffers() if "correction_bias" in n)]
        for key, value in tensors:
            noise = torch.randn(value.shape, generator=generator)
            if "norm" in key and not key.endswith("bias"):
                value.copy_((0.0 if name == "gemma3" else 1.0) + 0.3 * noise)
            elif value.dim() == 1 or key.endswith("_bias"):
                value.copy_(0.3 * noise)
            else:
                fan_in = value.shape[-2] if name == "gpt-oss" and "experts" in key else value.shape[-1]
                value.copy_(noise * (1.0 if "embed" in key or "lm_head" in key else 1.5) * fan_in**-0.5)
    model.to(dtype)
    model.save_pretrained(folder)
    return folder


def file_tensors(folder: Path) -> dict[str, Any]:
    """By name, of all files."""
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def gradients_of(theirs: Any) -> dict[str, Any]:
    """By the names of the files: transformers holds the experts of a layer in one tensor."""
    found = {}
    for name, parameter in theirs.named_parameters():
        at = name.removesuffix("gate_up_proj").removesuffix("down_proj")
        if at == name or not at.endswith("experts.") or "bias" in name or theirs.config.model_type == "gpt_oss":
            found[name] = parameter.grad
        elif name.endswith("gate_up_proj"):
            for expert, both in enumerate(parameter.grad):
                for part, value in zip(("gate", "up"), both.chunk(2), strict=True):
                    found[f"{at}{expert}.{part}_proj.weight"] = value
        else:
            found |= {f"{at}{expert}.down_proj.weight": value for expert, value in enumerate(parameter.grad)}
    return found


def write_heads(folder: Path, name: str, heads: int, layers: int = 2, **changes: Any) -> tuple[Path, Path]:
    """(a model of ``layers`` layers with so many heads that predict several tokens, as DeepSeek's folders have them; one without
    heads, whose last layers are those of the heads)."""
    deep = write_family(folder / "deep", name, num_hidden_layers=layers + heads, **changes)
    tensors, draw = file_tensors(deep), torch.Generator().manual_seed(13)
    hidden = _COMMON["hidden_size"]
    for at in (f"model.layers.{layers + head}." for head in range(heads)):
        for norm in ("enorm", "hnorm", "shared_head.norm"):
            tensors[f"{at}{norm}.weight"] = 1.0 + 0.3 * torch.randn(hidden, generator=draw)
        tensors[f"{at}eh_proj.weight"] = torch.randn(hidden, 2 * hidden, generator=draw) * hidden**-0.5
        tensors[f"{at}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{at}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    config = json.loads((deep / "config.json").read_text())
    config |= {"num_hidden_layers": layers, "num_nextn_predict_layers": heads}
    path = folder / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    return path, deep
