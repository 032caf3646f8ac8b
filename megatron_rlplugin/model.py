"""A stock Megatron-Core ``GPTModel`` of the shape of a Hugging Face Qwen3 (dense) folder, and the process groups it needs.

Guarantees: the model's arithmetic is that of the folder's config (local layer spec, q/k RMSNorm, SwiGLU, grouped queries,
RoPE), without dropout and without fused kernels; a config that this cannot express is refused with a ConfigError that
names the key. The weights are uninitialised until ``bridge.load_hf`` filled them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_rlplugin.parallel import Layout, device
from orchestrator.api import ConfigError

ARCHITECTURE = "Qwen3ForCausalLM"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Qwen3Shape:
    """What of a Qwen3 ``config.json`` decides the arithmetic; the names are the file's keys."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool


def read_config(folder: str | Path) -> dict[str, Any]:
    """The parsed ``config.json`` of a model folder."""
    file = Path(folder) / "config.json"
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError("model.path", str(folder), "is not a model folder: it has no config.json") from None
    except (OSError, ValueError) as error:
        raise ConfigError("model.path", str(folder), f"its config.json cannot be read ({error})") from error
    if not isinstance(data, dict):
        raise ConfigError("model.path", str(folder), "its config.json is not an object")
    return data


def read_shape(folder: str | Path) -> Qwen3Shape:
    """The shape of a Qwen3 dense folder. Raises ConfigError for another architecture or an option we do not compute."""
    data = read_config(folder)
    found = data.get("architectures") or ["none"]
    if found[0] != ARCHITECTURE:
        fix = f"is the architecture of {folder}, which the trainer cannot build; give a folder of a {ARCHITECTURE}"
        raise ConfigError("model.architectures", found[0], fix)
    # transformers 5 writes rope_parameters; before, rope_theta and rope_scaling were keys of their own.
    rope = data.get("rope_parameters") or data.get("rope_scaling") or {}
    refused = {
        "rope_type": rope.get("rope_type", rope.get("type", "default")) != "default",
        "attention_bias": bool(data.get("attention_bias", False)),
        "hidden_act": data.get("hidden_act", "silu") != "silu",
        "use_sliding_window": bool(data.get("use_sliding_window", False)),
        "quantization_config": data.get("quantization_config") is not None,
    }
    for name, wrong in refused.items():
        if wrong:
            raise ConfigError(f"model.{name}", rope if name == "rope_type" else data[name], "is not supported")
    values: dict[str, Any] = {
        "rope_theta": rope.get("rope_theta", data.get("rope_theta", 1e6)),
        "rms_norm_eps": data.get("rms_norm_eps", 1e-6),
        "tie_word_embeddings": data.get("tie_word_embeddings", False),
    }
    for name in Qwen3Shape.__slots__:
        if name not in values:
            if not isinstance(data.get(name), int):
                raise ConfigError(f"model.{name}", data.get(name), f"must be an integer in config.json of {folder}")
            values[name] = data[name]
    return Qwen3Shape(**values)


def transformer_config(shape: Qwen3Shape, dtype: torch.dtype, layout: Layout) -> Any:
    """Megatron's config of this shape. Losses are sums: the divisor arrives with the finalizer (per-token loss)."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=shape.num_hidden_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.intermediate_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_key_value_heads,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=shape.rms_norm_eps,
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        tensor_model_parallel_size=layout.tensor,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        calculate_per_token_loss=True,
        # The weights come from a file; the rest avoids kernels that exist only with Apex or Transformer Engine.
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        cuda_graph_scope=[],  # the default is a spelling that Megatron warns about
    )


def build_model(shape: Qwen3Shape, dtype: str, layout: Layout | None = None) -> list[Any]:
    """This rank's model chunks (one, or ``layout.virtual``): the stock ``GPTModel``, or (bfloat16) it in Megatron's
    ``Float16Module``. Needs :func:`initialize_parallel` with the same layout."""
    layout = layout or Layout()
    if dtype not in DTYPES:
        raise ConfigError("model.dtype", dtype, f"must be one of {', '.join(DTYPES)}")
    for name in ("vocab_size", "num_key_value_heads", "num_attention_heads", "intermediate_size"):
        if getattr(shape, name) % layout.tensor:
            raise ConfigError(f"model.{name}", getattr(shape, name), f"must be a multiple of TP = {layout.tensor}")
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.module import Float16Module

    config = transformer_config(shape, DTYPES[dtype], layout)
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm"),
        vocab_size=shape.vocab_size,
        max_sequence_length=shape.max_position_embeddings,
        parallel_output=False,  # every tensor-parallel rank sees all logits: the objective is the same on each
        share_embeddings_and_output_weights=shape.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_base=shape.rope_theta,
    )
    model.to(device())
    return [Float16Module(config, model) if config.bf16 else model]


def unwrap(model: Any) -> Any:
    """The ``GPTModel`` inside Megatron's wrappers."""
    while hasattr(model, "module"):
        model = model.module
    return model


_masks: dict[int, torch.Tensor] = {}


def causal_mask(length: int) -> torch.Tensor:
    """``[1, 1, length, length]``, True where attention is forbidden. Kept: a run sees few lengths."""
    if length not in _masks:
        ones = torch.ones(1, 1, length, length, dtype=torch.bool, device=device())
        _masks[length] = torch.triu(ones, diagonal=1)
    return _masks[length]
