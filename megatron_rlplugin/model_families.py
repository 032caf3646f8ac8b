"""The Hugging Face model families that the trainer computes: what of a ``config.json`` decides the arithmetic.

Guarantees: :func:`read_shape` either returns a shape that ``model.build_model`` computes exactly as transformers does, or
raises a ConfigError that names the key, and for an architecture that is not there the nearest one that is; no key that
changes the arithmetic is passed over in silence. No torch, no Megatron.

:data:`FAMILIES` is the table, one entry a family; the one for people is in ``docs/megatron.md``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.api import ConfigError
from orchestrator.api.jsontext import parse_object


@dataclass(frozen=True, slots=True)
class Family:
    """What the architecture itself says, whatever the config. A key's name stands where the config decides."""

    models: str  # the best-known ones, for people
    attention: str  # what is special in it, for people
    feed_forward: str = "SwiGLU"  # the same
    qkv_bias: bool | str = False
    qk_norm: bool | str = False
    mixture: bool = False
    shared_key: str = ""  # the key with the size of shared experts, or with how many of a routed one's size there are
    shared_gate: bool = False  # a sigmoid gate on the shared expert
    sigmoid_router: bool = False  # sigmoid scores and a bias that only the choice of experts sees, else softmax
    latent: bool = False  # multi-head latent attention
    partial_rotary: bool = False  # RoPE may turn a part of each head
    sinks: bool = False
    bias: bool = False  # on every linear layer, router and experts
    windows: str = ""  # "all": a window, if there is one, is every layer's; "layer_types": that key says whose
    activation: str = "silu"
    gemma: bool = False  # norms behind attention and feed forward, too; 1 + w in norms; embeddings times sqrt(hidden)
    head_dim_required: bool = False  # else hidden_size / num_attention_heads where the config has none
    kv_heads_required: bool = True  # else num_attention_heads where the config has none
    rope_theta: float = 1e6  # where the config has none
    rope_types: tuple[str, ...] = ("default",)


FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(
        models="Llama 2, 3, 3.1 to 3.3",
        attention="scaled RoPE (llama3, linear) also",
        kv_heads_required=False,
        rope_theta=1e4,
        rope_types=("default", "llama3", "linear"),
    ),
    "MistralForCausalLM": Family(
        models="Mistral 7B, Nemo, Small",
        attention="a window also",
        windows="all",
        rope_theta=1e4,
    ),
    "Qwen2ForCausalLM": Family(models="Qwen2, Qwen2.5", attention="bias on q, k, v", qkv_bias=True),
    "Qwen3ForCausalLM": Family(models="Qwen3", attention="norm of q and k", qk_norm=True, head_dim_required=True),
    "Qwen2MoeForCausalLM": Family(
        models="Qwen1.5-MoE, Qwen2-57B-A14B",
        attention="bias on q, k, v",
        feed_forward="experts, a gated shared expert; dense layers also",
        qkv_bias="qkv_bias",
        mixture=True,
        shared_key="shared_expert_intermediate_size",
        shared_gate=True,
    ),
    "Qwen3MoeForCausalLM": Family(
        models="Qwen3-30B-A3B, Qwen3-235B-A22B",
        attention="norm of q and k",
        feed_forward="experts; dense layers also",
        qk_norm=True,
        mixture=True,
    ),
    "DeepseekV3ForCausalLM": Family(
        models="DeepSeek-V3, -R1, Moonlight",
        attention="latent (MLA); yarn RoPE also",
        feed_forward="experts by sigmoid, a bias for the choice, groups, shared experts; dense first layers",
        mixture=True,
        shared_key="n_shared_experts",
        sigmoid_router=True,
        latent=True,
        rope_theta=1e4,
        rope_types=("default", "yarn"),
    ),
    "Glm4MoeForCausalLM": Family(
        models="GLM-4.5, GLM-4.5-Air, GLM-4.6",
        attention="RoPE on a part of each head; norm of q and k, bias on q, k, v also",
        feed_forward="as DeepSeek-V3",
        qkv_bias="attention_bias",
        qk_norm="use_qk_norm",
        mixture=True,
        shared_key="n_shared_experts",
        sigmoid_router=True,
        partial_rotary=True,
    ),
    "GptOssForCausalLM": Family(
        models="gpt-oss-20b, -120b in bfloat16",
        attention="sinks, windows in some layers, bias; yarn RoPE also",
        feed_forward="experts with bias, a clamped SwiGLU",
        bias=True,
        mixture=True,
        sinks=True,
        windows="layer_types",
        activation="quick_gelu",
        rope_theta=1.5e5,
        rope_types=("default", "yarn"),
    ),
    "Gemma3ForCausalLM": Family(
        models="Gemma 3 1B, text parts of the others",
        attention="norm of q and k, windows in some layers with a RoPE base of their own",
        feed_forward="GeGLU, norms behind it",
        qk_norm=True,
        windows="layer_types",
        activation="gelu_tanh",
        gemma=True,
        rope_types=("default", "linear"),
    ),
}
ARCHITECTURES = tuple(FAMILIES)
MOST_LAYERS = 10_000
_MOST = 1 << 40  # of any size that a config names


@dataclass(frozen=True, slots=True)
class Rope:
    """How positions turn a head, as transformers' ``modeling_rope_utils`` computes it."""

    theta: float
    type: str = "default"
    factor: float = 1.0  # of linear, llama3, yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192  # llama3, yarn
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, 2.1); the names are the config's keys."""

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None  # None: queries are not compressed


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What of a ``config.json`` decides the arithmetic; the names are the file's keys where it has one."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of a dense feed forward
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int  # with latent attention that of a value
    max_position_embeddings: int
    rms_norm_eps: float
    rope: Rope
    tie_word_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    num_experts: int = 0  # 0: dense
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0  # of one expert
    norm_topk_prob: bool = False  # the chosen experts' probabilities are scaled to a sum of one
    dense_layers: tuple[int, ...] = ()  # of a mixture, the layers without experts, from 0
    shared_size: int = 0  # of all shared experts of a layer together
    expert_groups: int = 1  # experts are chosen from the best ``groups_per_tok`` of so many groups
    groups_per_tok: int = 1
    routed_scaling_factor: float = 1.0
    latent: LatentAttention | None = None
    rotary_part: float = 1.0  # of a head that RoPE turns
    window: int | None = None  # tokens that a windowed layer sees, itself among them
    windowed_layers: tuple[int, ...] = ()
    window_rope_theta: float | None = None  # None: as in the other layers
    softmax_scale: float | None = None  # None: head_dim ** -0.5
    swiglu_limit: float | None = None
    extra_layers: int = (
        0  # in the folder behind the model's: heads that predict several tokens; left out unless trained
    )

    @property
    def family(self) -> Family:
        """What the architecture says."""
        return FAMILIES[self.architecture]

    @property
    def expert_layers(self) -> int:
        """How many layers have experts."""
        return self.num_hidden_layers - len(self.dense_layers) if self.num_experts else 0

    @property
    def embedding_parameters(self) -> int:
        """Of the embedding, and of the output layer where it is another one."""
        return self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)

    @property
    def parameters(self) -> int:
        """Of the whole model."""
        bias, hidden = int(self.family.bias), self.hidden_size
        norms = hidden * (4 if self.family.gemma else 2)
        feed_forward = hidden * 3 * self.intermediate_size
        experts = self.num_experts * (
            (hidden + bias) * (1 + 3 * self.moe_intermediate_size) - bias * (self.moe_intermediate_size - hidden)
        )
        experts += 3 * hidden * self.shared_size + self.family.shared_gate * hidden
        experts += self.family.sigmoid_router * self.num_experts
        dense = self.num_hidden_layers - self.expert_layers
        layers = self.num_hidden_layers * (self._attention_parameters + norms)
        layers += dense * feed_forward + self.expert_layers * experts
        return layers + hidden + self.embedding_parameters

    @property
    def _attention_parameters(self) -> int:
        hidden, heads = self.hidden_size, self.num_attention_heads
        if latent := self.latent:
            rank, head = latent.kv_lora_rank, latent.qk_nope_head_dim + latent.qk_rope_head_dim
            queries = hidden * heads * head
            if latent.q_lora_rank is not None:
                queries = latent.q_lora_rank * (hidden + 1 + heads * head)
            keys = hidden * (rank + latent.qk_rope_head_dim) + rank
            values = rank * heads * (latent.qk_nope_head_dim + latent.v_head_dim)
            return queries + keys + values + heads * latent.v_head_dim * hidden
        queries, keys = heads * self.head_dim, 2 * self.num_key_value_heads * self.head_dim
        attention = hidden * (2 * queries + keys) + self.qkv_bias * (queries + keys)
        return attention + self.qk_norm * 2 * self.head_dim + self.family.bias * hidden + self.family.sinks * heads


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
    given = read_config(folder)
    data = {name: value for name, value in given.items() if value is not None}
    _check_types(data, _TYPES, folder)
    architecture = str((data.get("architectures") or ["none"])[0])
    family = FAMILIES.get(architecture)
    if family is None:
        near = difflib.get_close_matches(architecture, FAMILIES, n=1, cutoff=0.0)[0]
        fix = f"is the architecture of {folder}, which the trainer cannot build; the nearest that it builds is {near}, all "
        fix += f"are {', '.join(FAMILIES)}; docs/megatron.md says what else there is to do"
        raise ConfigError("model.architectures", architecture, fix)
    if family.windows and "sliding_window" not in given:
        raise ConfigError("model.sliding_window", None, f"must be in config.json of {folder}; null: no window")
    return _Reader(folder, data, architecture, family).shape()


@dataclass(slots=True)
class _Reader:
    """The keys of one ``config.json``, of which every one that is read is checked."""

    folder: str | Path
    data: dict[str, Any]
    architecture: str
    family: Family
    ropes: dict[str, dict[str, Any]] = field(init=False)  # by kind of layer; "": of all

    def __post_init__(self) -> None:
        # transformers 5 writes rope_parameters; before, rope_theta and rope_scaling were keys of their own.
        rope = self.data.get("rope_parameters") or self.data.get("rope_scaling") or {}
        kinds = {name: value for name, value in rope.items() if name.endswith("_attention") and type(value) is dict}
        self.ropes = {
            kind: {name: value for name, value in each.items() if value is not None}
            for kind, each in (kinds or {"": rope}).items()
        }
        for each in self.ropes.values():
            _check_types(each, _ROPE_TYPES, self.folder)

    @property
    def rope(self) -> dict[str, Any]:
        return self.ropes.get("") or self.ropes.get("full_attention") or {}

    def integer(self, *names: str, default: int | None = None, least: int = 1) -> int:
        for name in names:
            if (value := self.data.get(name)) is not None:
                if type(value) is not int or value < least:
                    kind = "a positive integer" if least else "an integer of at least 0"
                    raise ConfigError(f"model.{name}", value, f"must be {kind} in {self.folder}/config.json")
                if value > _MOST:
                    raise ConfigError(
                        f"model.{name}", f"2**{value.bit_length() - 1} and more", f"must be at most {_MOST}"
                    )
                return value
        if default is None:
            raise ConfigError(f"model.{names[0]}", None, f"must be an integer in config.json of {self.folder}")
        return default

    def flag(self, wanted: bool | str, *, default: bool = False) -> bool:
        """``wanted``, or the value of the key that it names."""
        return bool(self.data.get(wanted, default)) if isinstance(wanted, str) else wanted

    def shape(self) -> ModelShape:
        data, family = self.data, self.family
        self._refuse()
        hidden, heads, layers = (
            self.integer(name) for name in ("hidden_size", "num_attention_heads", "num_hidden_layers")
        )
        if layers > MOST_LAYERS:
            raise ConfigError("model.num_hidden_layers", layers, f"must be at most {MOST_LAYERS}")
        latent = self._latent() if family.latent else None
        head_dim = self.integer("head_dim", default=None if family.head_dim_required else max(hidden // heads, 1))
        groups = self.integer("num_key_value_heads", default=None if family.kv_heads_required else heads)
        if heads % groups:
            raise ConfigError("model.num_key_value_heads", groups, f"must divide num_attention_heads ({heads})")
        scale = None
        if family.gemma:
            scale = float(self.integer("query_pre_attn_scalar", default=256)) ** -0.5
        windows = self._windows(layers)
        return ModelShape(
            architecture=self.architecture,
            vocab_size=self.integer("vocab_size"),
            hidden_size=hidden,
            intermediate_size=self.integer("intermediate_size"),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads if latent else groups,
            head_dim=latent.v_head_dim if latent else head_dim,
            max_position_embeddings=self.integer("max_position_embeddings"),
            rms_norm_eps=data.get("rms_norm_eps", 1e-6),
            rope=self._rope(),
            tie_word_embeddings=data.get("tie_word_embeddings", family.gemma),
            qkv_bias=family.bias or self.flag(family.qkv_bias, default=self.architecture == "Qwen2MoeForCausalLM"),
            qk_norm=self.flag(family.qk_norm),
            latent=latent,
            rotary_part=self._rotary_part(head_dim),
            softmax_scale=scale,
            swiglu_limit=float(data.get("swiglu_limit", 7.0)) if family.activation == "quick_gelu" else None,
            extra_layers=max(
                self.integer(n, default=0, least=0) for n in ("num_nextn_predict_layers", "num_mtp_layers")
            )
            if family.sigmoid_router
            else 0,
            **windows,
            **(self._mixture(layers) if family.mixture else {}),
        )

    def _mixture(self, layers: int) -> dict[str, Any]:
        data, family = self.data, self.family
        # transformers 5 writes num_local_experts, before it was num_experts or (DeepSeek) n_routed_experts.
        names = (
            ("n_routed_experts", "num_local_experts") if family.sigmoid_router else ("num_experts", "num_local_experts")
        )
        experts, chosen = self.integer(*names), self.integer("num_experts_per_tok")
        if chosen > experts:
            raise ConfigError("model.num_experts_per_tok", chosen, f"must be at most num_experts ({experts})")
        expert = "intermediate_size" if family.bias else "moe_intermediate_size"  # GPT-OSS has one size only
        size = self.integer(expert)
        found: dict[str, Any] = {
            "num_experts": experts,
            "num_experts_per_tok": chosen,
            "moe_intermediate_size": size,
            "norm_topk_prob": family.bias or bool(data.get("norm_topk_prob", family.sigmoid_router)),
            "dense_layers": self._dense_layers(layers),
        }
        if len(found["dense_layers"]) == layers:
            raise ConfigError("model.num_hidden_layers", layers, "has no layer with experts: that is a dense model")
        if family.shared_key:
            found["shared_size"] = self.integer(family.shared_key)
            if family.shared_key == "n_shared_experts":
                found["shared_size"] *= size
        if not family.sigmoid_router:
            return found
        if not found["norm_topk_prob"]:
            raise ConfigError("model.norm_topk_prob", False, "is not supported with sigmoid scores: must be true")
        found |= {
            "expert_groups": self.integer("n_group", default=1),
            "groups_per_tok": self.integer("topk_group", default=1),
            "routed_scaling_factor": float(data.get("routed_scaling_factor", 1.0)),
        }
        groups, per_token = found["expert_groups"], found["groups_per_tok"]
        if experts % groups or per_token > groups:
            raise ConfigError("model.n_group", groups, f"must divide the {experts} experts and be at least topk_group")
        if per_token < groups and chosen != 2 * per_token:
            # Megatron ranks groups by the sum of their best topk / topk_group experts, the model by that of their best two.
            raise ConfigError("model.topk_group", per_token, f"must be half of num_experts_per_tok ({chosen})")
        return found

    def _dense_layers(self, layers: int) -> tuple[int, ...]:
        if self.family.sigmoid_router:
            return tuple(range(min(self.integer("first_k_dense_replace", default=0, least=0), layers)))
        step, named = self.integer("decoder_sparse_step", default=1), self.data.get("mlp_only_layers") or []
        if any(type(layer) is not int or not 0 <= layer < layers for layer in named):
            raise ConfigError("model.mlp_only_layers", named, f"must be numbers of layers, from 0 to {layers - 1}")
        return tuple(layer for layer in range(layers) if layer in named or (layer + 1) % step)

    def _latent(self) -> LatentAttention:
        if not self.data.get("rope_interleave", True):
            raise ConfigError(
                "model.rope_interleave", False, "is not supported: Megatron-Core turns neighbouring pairs"
            )
        rank_kv, nope, turned, value = (
            self.integer(name) for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        )
        rank = self.integer("q_lora_rank") if self.data.get("q_lora_rank") is not None else None
        return LatentAttention(rank_kv, nope, turned, value, rank)

    def _windows(self, layers: int) -> dict[str, Any]:
        data, family = self.data, self.family
        if not family.windows or data.get("sliding_window") is None:
            return {}
        window = self.integer("sliding_window")
        windowed = list(range(layers))
        if family.windows == "layer_types":
            every = self.integer("sliding_window_pattern", "_sliding_window_pattern", default=6 if family.gemma else 2)
            kinds = data.get("layer_types") or [
                "sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(layers)
            ]
            if len(kinds) != layers or any(kind not in ("full_attention", "sliding_attention") for kind in kinds):
                fix = f"must be 'full_attention' or 'sliding_attention' for each of the {layers} layers"
                raise ConfigError("model.layer_types", kinds, fix)
            windowed = [layer for layer, kind in enumerate(kinds) if kind == "sliding_attention"]
        found: dict[str, Any] = {"window": window, "windowed_layers": tuple(windowed)} if windowed else {}
        if found and family.gemma:
            local = self.ropes.get("sliding_attention", {})
            if _rope_type(local) != "default":
                raise ConfigError("model.rope_type", local, "is not supported in the layers with a window")
            theta = local.get("rope_theta", data.get("rope_local_base_freq", 1e4))
            found["window_rope_theta"] = float(theta)
        return found

    def _rope(self) -> Rope:
        rope, kind = self.rope, _rope_type(self.rope)
        theta = rope.get("rope_theta", self.data.get("rope_theta", self.family.rope_theta))
        if kind == "default":
            return Rope(theta)
        names = {
            "linear": ("factor",),
            "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
            "yarn": ("factor", "original_max_position_embeddings"),
        }[kind]
        for name in names:
            from_one = name in ("factor", "original_max_position_embeddings")
            if rope.get(name) is None or (from_one and rope[name] < 1):
                fix = "must be a number of at least 1" if from_one else f"must be a number: {kind} needs it"
                raise ConfigError(f"model.rope_parameters.{name}", rope.get(name), fix)
        if kind == "llama3" and rope["high_freq_factor"] <= rope["low_freq_factor"]:
            fix = "must be more than low_freq_factor"
            raise ConfigError("model.rope_parameters.high_freq_factor", rope["high_freq_factor"], fix)
        if bool(rope.get("mscale")) != bool(rope.get("mscale_all_dim")):
            fix = "is not supported without mscale, nor mscale without it: transformers and Megatron-Core differ there"
            raise ConfigError("model.rope_parameters.mscale_all_dim", rope.get("mscale_all_dim"), fix)
        if rope.get("attention_factor") is not None:
            fix = "is not supported: Megatron-Core computes it from mscale and mscale_all_dim"
            raise ConfigError("model.rope_parameters.attention_factor", rope["attention_factor"], fix)
        for name in ("beta_fast", "beta_slow"):
            if not rope.get(name, 1):
                raise ConfigError(f"model.rope_parameters.{name}", rope[name], "must be more than 0")
        more = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate") if kind == "yarn" else ()
        return Rope(theta, kind, **{name: rope[name] for name in (*names, *more) if name in rope})

    def _rotary_part(self, head_dim: int) -> float:
        part = self.rope.get("partial_rotary_factor", self.data.get("partial_rotary_factor"))
        if part is None:
            part = 0.5 if self.family.partial_rotary else 1.0
        if part != 1.0 and not self.family.partial_rotary:
            raise ConfigError("model.partial_rotary_factor", part, "is not supported: RoPE turns all of a head")
        if not 0 < part <= 1 or int(head_dim * part) % 2 or not int(head_dim * part):
            raise ConfigError("model.partial_rotary_factor", part, f"must leave an even part of head_dim ({head_dim})")
        return float(part)

    def _refuse(self) -> None:
        """Options that change the arithmetic and are not computed. Raises ConfigError."""
        data, family = self.data, self.family
        kind = _rope_type(self.rope)
        wanted = "gelu_pytorch_tanh" if family.gemma else "silu"
        act = "hidden_activation" if family.gemma else "hidden_act"
        biased = family.bias or family.qkv_bias == "attention_bias"
        refused = {
            "rope_type": kind not in family.rope_types,
            "attention_bias": bool(data.get("attention_bias", family.bias)) != family.bias and not biased,
            "mlp_bias": bool(data.get("mlp_bias", False)),
            act: data.get(act, wanted) != wanted,
            "use_sliding_window": bool(data.get("use_sliding_window", False)),
            "layer_types": not family.windows
            and any(kind != "full_attention" for kind in data.get("layer_types") or ()),
            "final_logit_softcapping": data.get("final_logit_softcapping") is not None,
            "attn_logit_softcapping": data.get("attn_logit_softcapping") is not None,
            "use_bidirectional_attention": bool(data.get("use_bidirectional_attention", False)),
            "topk_method": family.sigmoid_router and data.get("topk_method", "noaux_tc") != "noaux_tc",
            "scoring_func": family.sigmoid_router and data.get("scoring_func", "sigmoid") != "sigmoid",
            "moe_layer_freq": data.get("moe_layer_freq", 1) != 1,
            "swiglu_alpha": data.get("swiglu_alpha", 1.702) != 1.702,
        }
        for name, wrong in refused.items():
            if wrong:
                raise ConfigError(f"model.{name}", self.rope if name == "rope_type" else data[name], "is not supported")
        if family.bias and not data.get("attention_bias", True):
            raise ConfigError("model.attention_bias", False, "is not supported: must be true here")
        if (quantized := data.get("quantization_config")) is not None:
            fix = "is not supported: weights are trained in bfloat16 or float32; give a folder converted to one of them"
            raise ConfigError("model.quantization_config", quantized, fix)


_NUMBER = (int, float)
_TYPES: Mapping[str, tuple[type, ...]] = {
    "architectures": (list,),
    "layer_types": (list,),
    "mlp_only_layers": (list,),
    "rope_parameters": (dict,),
    "rope_scaling": (dict,),
    "rms_norm_eps": _NUMBER,
    "rope_theta": _NUMBER,
    "rope_local_base_freq": _NUMBER,
    "routed_scaling_factor": _NUMBER,
    "partial_rotary_factor": _NUMBER,
    "swiglu_limit": _NUMBER,
    "swiglu_alpha": _NUMBER,
    "tie_word_embeddings": (bool,),
}
_ROPE_TYPES: Mapping[str, tuple[type, ...]] = {
    "truncate": (bool,),
    **dict.fromkeys(
        (
            "rope_theta",
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "original_max_position_embeddings",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "partial_rotary_factor",
        ),
        _NUMBER,
    ),
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


def table_rows() -> Iterator[str]:
    """The table of families for people, as lines of Markdown."""
    yield "| architecture | models | attention | feed forward |"
    yield "| --- | --- | --- | --- |"
    for name, family in FAMILIES.items():
        yield f"| `{name}` | {family.models} | {family.attention} | {family.feed_forward} |"
