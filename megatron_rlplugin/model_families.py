"""The Hugging Face model families that the trainer computes: what of a ``config.json`` decides the arithmetic.

Guarantees: :func:`read_shape` either returns a shape that ``model.build_model`` computes exactly as transformers does, or
raises a ConfigError that names the key; no key that changes the arithmetic is passed over in silence. No torch, no
Megatron.

| architecture         | attention                      | feed forward                                                  |
| -------------------- | ------------------------------ | ------------------------------------------------------------- |
| LlamaForCausalLM     | plain; "llama3" RoPE also      | SwiGLU                                                        |
| Qwen2ForCausalLM     | bias on q, k, v (Qwen2.5 also) | SwiGLU                                                        |
| Qwen3ForCausalLM     | RMSNorm of q and k             | SwiGLU                                                        |
| Qwen3MoeForCausalLM  | RMSNorm of q and k             | top-k of softmax over experts, each a SwiGLU, in every layer  |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.api import ConfigError
from orchestrator.api.jsontext import parse_object


@dataclass(frozen=True, slots=True)
class Family:
    """What the architecture itself says, whatever the config."""

    qkv_bias: bool
    qk_norm: bool
    mixture: bool = False
    head_dim_required: bool = False  # else hidden_size / num_attention_heads where the config has none
    kv_heads_required: bool = True  # else num_attention_heads where the config has none
    rope_theta: float = 1e6  # where the config has none
    rope_types: tuple[str, ...] = ("default",)


FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(
        qkv_bias=False, qk_norm=False, kv_heads_required=False, rope_theta=1e4, rope_types=("default", "llama3")
    ),
    "Qwen2ForCausalLM": Family(qkv_bias=True, qk_norm=False),
    "Qwen3ForCausalLM": Family(qkv_bias=False, qk_norm=True, head_dim_required=True),
    "Qwen3MoeForCausalLM": Family(qkv_bias=False, qk_norm=True, mixture=True),
}
ARCHITECTURES = tuple(FAMILIES)
# What Megatron-Core's own "llama3" scaling of RoPE computes with; only the factor is an argument of it.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What of a ``config.json`` decides the arithmetic; the names are the file's keys where it has one."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of a dense feed forward; not used by a mixture
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    num_experts: int = 0  # 0: dense
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0  # of one expert
    norm_topk_prob: bool = False  # the chosen experts' probabilities are scaled to a sum of one
    rope_factor: float | None = None  # of "llama3" scaling; None: RoPE is not scaled

    @property
    def embedding_parameters(self) -> int:
        """Of the embedding, and of the output layer where it is another one."""
        return self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)

    @property
    def parameters(self) -> int:
        """Of the whole model."""
        queries, keys = self.num_attention_heads * self.head_dim, 2 * self.num_key_value_heads * self.head_dim
        attention = self.hidden_size * (2 * queries + keys) + self.qkv_bias * (queries + keys)
        norms = 2 * self.hidden_size + self.qk_norm * 2 * self.head_dim
        feed_forward = 3 * self.hidden_size * self.intermediate_size
        if self.num_experts:
            feed_forward = self.hidden_size * self.num_experts * (1 + 3 * self.moe_intermediate_size)
        layers = self.num_hidden_layers * (attention + norms + feed_forward)
        return layers + self.hidden_size + self.embedding_parameters


def read_config(folder: str | Path) -> dict[str, Any]:
    """The parsed ``config.json`` of a model folder."""
    file = Path(folder) / "config.json"
    try:
        return parse_object(file.read_bytes(), finite=True)
    except FileNotFoundError:
        fix = "`hf download NAME --local-dir FOLDER` fetches one, `rl-coserve model FOLDER` writes a tiny one"
        raise ConfigError("model.path", str(folder), f"is not a model folder: it has no config.json; {fix}") from None
    except (OSError, ValueError) as error:
        raise ConfigError("model.path", str(folder), f"its config.json cannot be read ({error})") from error


def read_shape(folder: str | Path) -> ModelShape:
    """The shape of a model folder. Raises ConfigError for another architecture or an option we do not compute."""
    data = {name: value for name, value in read_config(folder).items() if value is not None}
    _check_types(data, _TYPES, folder)
    architecture = str((data.get("architectures") or ["none"])[0])
    family = FAMILIES.get(architecture)
    if family is None:
        known = ", ".join(FAMILIES)
        fix = f"is the architecture of {folder}, which the trainer cannot build; it builds {known}"
        raise ConfigError("model.architectures", architecture, fix)
    # transformers 5 writes rope_parameters; before, rope_theta and rope_scaling were keys of their own.
    rope = data.get("rope_parameters") or data.get("rope_scaling") or {}
    rope = {name: value for name, value in rope.items() if value is not None}
    _check_types(rope, _ROPE_TYPES, folder)
    _refuse(data, rope, family)

    def integer(*names: str, default: int | None = None) -> int:
        for name in names:
            if data.get(name) is not None:
                if type(data[name]) is not int or data[name] < 1:
                    raise ConfigError(
                        f"model.{name}", data[name], f"must be a positive integer in {folder}/config.json"
                    )
                return int(data[name])
        if default is None:
            raise ConfigError(f"model.{names[0]}", None, f"must be an integer in config.json of {folder}")
        return default

    hidden, heads = integer("hidden_size"), integer("num_attention_heads")
    shape = ModelShape(
        architecture=architecture,
        vocab_size=integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=integer("intermediate_size"),
        num_hidden_layers=integer("num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=integer("num_key_value_heads", default=None if family.kv_heads_required else heads),
        head_dim=integer("head_dim", default=None if family.head_dim_required else hidden // heads),
        max_position_embeddings=integer("max_position_embeddings"),
        rms_norm_eps=data.get("rms_norm_eps", 1e-6),
        rope_theta=rope.get("rope_theta", data.get("rope_theta", family.rope_theta)),
        tie_word_embeddings=data.get("tie_word_embeddings", False),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        # transformers 5 writes num_local_experts, before it was num_experts.
        num_experts=integer("num_experts", "num_local_experts") if family.mixture else 0,
        num_experts_per_tok=integer("num_experts_per_tok") if family.mixture else 0,
        moe_intermediate_size=integer("moe_intermediate_size") if family.mixture else 0,
        norm_topk_prob=bool(data.get("norm_topk_prob", False)) if family.mixture else False,
        rope_factor=float(rope["factor"]) if _rope_type(rope) == "llama3" else None,
    )
    if heads % shape.num_key_value_heads:
        fix = f"must divide num_attention_heads ({heads})"
        raise ConfigError("model.num_key_value_heads", shape.num_key_value_heads, fix)
    if shape.num_experts_per_tok > shape.num_experts:
        fix = f"must be at most num_experts ({shape.num_experts})"
        raise ConfigError("model.num_experts_per_tok", shape.num_experts_per_tok, fix)
    return shape


_NUMBER = (int, float)
_TYPES: Mapping[str, tuple[type, ...]] = {
    "architectures": (list,),
    "layer_types": (list,),
    "rope_parameters": (dict,),
    "rope_scaling": (dict,),
    "rms_norm_eps": _NUMBER,
    "rope_theta": _NUMBER,
    "tie_word_embeddings": (bool,),
}
_ROPE_TYPES: Mapping[str, tuple[type, ...]] = {
    "rope_theta": _NUMBER,
    "factor": _NUMBER,
    **dict.fromkeys(LLAMA3, _NUMBER),
}


def _check_types(data: Mapping[str, Any], types: Mapping[str, tuple[type, ...]], folder: str | Path) -> None:
    """Numbers are of at least 0 too. Raises ConfigError."""
    for name, kinds in types.items():
        value = data.get(name)
        if value is not None and (type(value) not in kinds or (kinds is _NUMBER and not 0 <= value <= 1e30)):
            wanted = "a number of at least 0" if kinds is _NUMBER else kinds[0].__name__
            raise ConfigError(f"model.{name}", value, f"must be {wanted} in {folder}/config.json")


def _rope_type(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type", rope.get("type", "default")))


def _refuse(data: Mapping[str, Any], rope: Mapping[str, Any], family: Family) -> None:
    """Options that change the arithmetic and are not computed. Raises ConfigError."""
    kind = _rope_type(rope)
    refused = {
        "rope_type": kind not in family.rope_types,
        "attention_bias": bool(data.get("attention_bias", False)),
        "mlp_bias": bool(data.get("mlp_bias", False)),
        "hidden_act": data.get("hidden_act", "silu") != "silu",
        "use_sliding_window": bool(data.get("use_sliding_window", False)),
        "layer_types": any(kind != "full_attention" for kind in data.get("layer_types") or ()),
        "quantization_config": data.get("quantization_config") is not None,
        # Mixtures in which some layers are dense.
        "decoder_sparse_step": data.get("decoder_sparse_step", 1) != 1,
        "mlp_only_layers": bool(data.get("mlp_only_layers")),
    }
    for name, wrong in refused.items():
        if wrong:
            raise ConfigError(f"model.{name}", rope if name == "rope_type" else data[name], "is not supported")
    if (part := rope.get("partial_rotary_factor", data.get("partial_rotary_factor", 1.0))) not in (1.0, None):
        raise ConfigError("model.partial_rotary_factor", part, "is not supported: RoPE turns all of a head")
    if kind == "llama3":
        if not isinstance(rope.get("factor"), int | float) or rope["factor"] < 1:
            raise ConfigError("model.rope_parameters.factor", rope.get("factor"), "must be a number from 1 on")
        for name, computed in LLAMA3.items():
            if rope.get(name) != computed:
                fix = f"is not supported: Megatron-Core computes llama3 scaling with {computed:g} only"
                raise ConfigError(f"model.rope_parameters.{name}", rope.get(name), fix)
