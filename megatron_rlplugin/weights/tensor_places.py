"""Where each Hugging Face tensor lives in the Megatron model chunks of this rank, in Hugging Face coordinates.

Guarantees: :func:`tensor_pieces` yields every parameter of the chunks exactly once (those of heads that predict several tokens
where it is asked for them), cut into the Hugging Face tensors that it is made of; reading and writing move bits and cast only
when the dtypes differ; a parameter without a place is a ConfigError that names it; rows that pad a vocabulary
(:data:`UNPADDED`) are in no tensor. Nothing is gathered: a rank speaks of what it holds. :func:`tensor_shapes` lists the whole
model, so the pieces of the ranks of one replica cover each tensor of it exactly once per holder.

Tensor parallelism cuts rows (dim 0) or, behind a reduction, columns (dim 1); pipeline stages hold layers; expert
parallelism holds whole experts. Megatron keeps q, k and v of one query group side by side,
``[group][q.. k v][head_dim]``, and gate above up.

Names of Megatron's own layers and of Transformer Engine's (norms fused into the linear behind them, experts as
``weight0, weight1, ...``) are known; the latter could not be run without a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron_rlplugin.model import unwrap
from orchestrator.api import ConfigError

# An attribute of a GPTModel whose vocabulary is padded: the rows that the Hugging Face tensors have.
UNPADDED = "unpadded_vocab_size"
Window = Callable[
    [Tensor], Tensor
]  # a tensor shaped as the parameter -> the view of it that is one Hugging Face tensor


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """What this rank holds of one Hugging Face tensor.

    ``replicated`` names the groups over which other ranks hold the very same piece: "tp" (tensor), "pp" (an embedding tied
    over pipeline stages), "dp" (the ranks over which the gradient of this weight is reduced: data and context parallel
    ones; of an expert's weight the expert-data-parallel ones). A group of one rank is not named. ``holder`` numbers this
    rank among all that hold it, (index, count): exporting a piece only where ``index == 0``, or spreading pieces over
    indices, makes the exports of all ranks mutually exclusive.
    """

    name: str
    shape: tuple[int, ...]  # of the whole Hugging Face tensor
    dim: int  # along which ``start:stop`` is held; -1: all of it (then 0 and shape[0])
    start: int
    stop: int
    replicated: tuple[str, ...]
    holder: tuple[int, int]
    expert: bool  # a weight of one expert
    parameter: Tensor  # or a router's bias, which is a buffer
    window: Window
    keeps_dtype: bool = False  # whatever the dtype of what is exported

    def cut_from(self, like: Tensor) -> Tensor:
        """This piece of any tensor shaped as ``parameter`` (its gradient, its fp32 master), contiguous."""
        return self.window(like).reshape(self.held).contiguous()

    @property
    def held(self) -> tuple[int, ...]:
        """The shape of what this rank holds."""
        if self.dim < 0:
            return self.shape
        return (*self.shape[: self.dim], self.stop - self.start, *self.shape[self.dim + 1 :])

    def check(self) -> None:
        """Whether the parameter can be cut so: nothing is read. Raises ConfigError."""
        try:
            size = self.window(self.parameter.detach()).numel()
        except RuntimeError:  # torch's, of a view that there is not
            size = -1
        if size != math.prod(self.held):
            found = f"of which this rank has {list(self.held)}, cannot be cut out of a parameter {list(self.parameter.shape)}"
            fix = f"{found}: heads for keys and values must be a multiple of tensor parallelism, layers what their config says"
            raise ConfigError("model", self.name, fix)

    def read(self) -> Tensor:
        """A contiguous tensor of shape ``held``; it may share the parameter's memory."""
        return self.cut_from(self.parameter.detach())

    def write(self, value: Tensor) -> None:
        """Fill the piece from a tensor of shape ``held``; casts to the parameter's dtype."""
        if tuple(value.shape) != self.held:
            raise ValueError(f"{self.name}: a tensor {tuple(value.shape)} does not fit the piece {self.held}")
        window = self.window(self.parameter.detach())
        window.copy_(value.reshape(window.shape))


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """One Megatron parameter: the Hugging Face tensors that it is made of, and how."""

    sources: tuple[str, ...]  # templates: {i} is the layer, {e} the expert
    dim: int = -1  # that tensor parallelism splits; -1: replicated
    windows: Callable[[Any], tuple[Window, ...]] = lambda config: (lambda value: value,)
    stacked: bool = False  # one tensor has this weight of every expert of a layer, along dim 0
    keeps_dtype: bool = False


def _qkv(config: Any) -> tuple[Window, ...]:
    per_group = config.num_attention_heads // config.num_query_groups

    def window(first: int, last: int) -> Window:
        def view(value: Tensor) -> Tensor:
            return value.view(-1, per_group + 2, config.kv_channels, *value.shape[1:])[:, first:last]

        return view

    return window(0, per_group), window(per_group, per_group + 1), window(per_group + 1, per_group + 2)


def _gate_up(config: Any) -> tuple[Window, ...]:
    return (lambda value: value.chunk(2)[0]), (lambda value: value.chunk(2)[1])


def _transposed(config: Any) -> tuple[Window, ...]:
    return (lambda value: value.t(),)


def _interleaved(config: Any) -> tuple[Window, ...]:
    """Gate above up, ``[2 x size, ...]``, where the tensor has ``[..., size x (gate, up)]``."""
    return (lambda value: value.view(2, -1, *value.shape[1:]).movedim((0, 1), (-1, -2)),)


_LAYER = "model.layers.{i}."
_QKV = tuple(f"{_LAYER}self_attn.{c}_proj." for c in "qkv")
_EXPERT = _LAYER + "mlp.experts.{e}."
_BEFORE_ATTENTION = TensorPlace((_LAYER + "input_layernorm.weight",))
_BEFORE_MLP = TensorPlace((_LAYER + "post_attention_layernorm.weight",))
PLACES = {
    "embedding.word_embeddings.weight": TensorPlace(("model.embed_tokens.weight",), 0),
    "decoder.final_layernorm.weight": TensorPlace(("model.norm.weight",)),
    "output_layer.weight": TensorPlace(("lm_head.weight",), 0),
}
TIED_OUTPUT = PLACES["embedding.word_embeddings.weight"]  # of output_layer.weight, where it is a copy of the embedding


def _swiglu_places(at: str, module: str) -> dict[str, TensorPlace]:
    return {
        f"{at}linear_fc1.weight": TensorPlace(tuple(f"{module}{c}_proj.weight" for c in ("gate", "up")), 0, _gate_up),
        f"{at}linear_fc2.weight": TensorPlace((f"{module}down_proj.weight",), 1),
    }


LAYER_PLACES = {
    "input_layernorm.weight": _BEFORE_ATTENTION,
    "self_attention.linear_qkv.layer_norm_weight": _BEFORE_ATTENTION,
    "self_attention.linear_qkv.weight": TensorPlace(tuple(name + "weight" for name in _QKV), 0, _qkv),
    "self_attention.linear_qkv.bias": TensorPlace(tuple(name + "bias" for name in _QKV), 0, _qkv),
    "self_attention.q_layernorm.weight": TensorPlace((_LAYER + "self_attn.q_norm.weight",)),
    "self_attention.k_layernorm.weight": TensorPlace((_LAYER + "self_attn.k_norm.weight",)),
    "self_attention.core_attention.softmax_offset": TensorPlace((_LAYER + "self_attn.sinks",), 0),
    "self_attention.linear_proj.weight": TensorPlace((_LAYER + "self_attn.o_proj.weight",), 1),
    "self_attention.linear_proj.bias": TensorPlace((_LAYER + "self_attn.o_proj.bias",)),
    "pre_mlp_layernorm.weight": _BEFORE_MLP,
    "mlp.linear_fc1.layer_norm_weight": _BEFORE_MLP,
    **_swiglu_places("mlp.", _LAYER + "mlp."),
    "mlp.router.weight": TensorPlace((_LAYER + "mlp.gate.weight",)),
    "mlp.router.expert_bias": TensorPlace((_LAYER + "mlp.gate.e_score_correction_bias",), keeps_dtype=True),
    **_swiglu_places("mlp.shared_experts.", _LAYER + "mlp.shared_experts."),
}
EXPERT_PLACES = _swiglu_places("", _EXPERT)
# Multi-head latent attention (DeepSeek). Transformer Engine fuses the norms into what is behind them.
_LATENT_NORMS = {name: TensorPlace((f"{_LAYER}self_attn.{name}_a_layernorm.weight",)) for name in ("q", "kv")}
LATENT_PLACES = {
    "self_attention.linear_q_proj.weight": TensorPlace((_LAYER + "self_attn.q_proj.weight",), 0),
    "self_attention.linear_q_down_proj.weight": TensorPlace((_LAYER + "self_attn.q_a_proj.weight",), 0),
    "self_attention.linear_q_up_proj.weight": TensorPlace((_LAYER + "self_attn.q_b_proj.weight",), 0),
    "self_attention.linear_kv_down_proj.weight": TensorPlace((_LAYER + "self_attn.kv_a_proj_with_mqa.weight",), 0),
    "self_attention.linear_kv_up_proj.weight": TensorPlace((_LAYER + "self_attn.kv_b_proj.weight",), 0),
    "self_attention.q_layernorm.weight": _LATENT_NORMS["q"],
    "self_attention.kv_layernorm.weight": _LATENT_NORMS["kv"],
    "self_attention.linear_q_up_proj.layer_norm_weight": _LATENT_NORMS["q"],
    "self_attention.linear_kv_up_proj.layer_norm_weight": _LATENT_NORMS["kv"],
}
# A shared expert with a gate (Qwen2-MoE).
GATED_PLACES = {
    **_swiglu_places("mlp.shared_experts.", _LAYER + "mlp.shared_expert."),
    "mlp.shared_experts.gate_weight": TensorPlace((_LAYER + "mlp.shared_expert_gate.weight",)),
}
# Experts with a bias, all of a layer in one tensor of transposed matrices (GPT-OSS).
STACKED_PLACES = {
    "mlp.router.weight": TensorPlace((_LAYER + "mlp.router.weight",)),
    "mlp.router.bias": TensorPlace((_LAYER + "mlp.router.bias",)),
}
_STACK = _LAYER + "mlp.experts."
STACKED_EXPERT_PLACES = {
    "linear_fc1.weight": TensorPlace((_STACK + "gate_up_proj",), windows=_interleaved, stacked=True),
    "linear_fc1.bias": TensorPlace((_STACK + "gate_up_proj_bias",), windows=_interleaved, stacked=True),
    "linear_fc2.weight": TensorPlace((_STACK + "down_proj",), windows=_transposed, stacked=True),
    "linear_fc2.bias": TensorPlace((_STACK + "down_proj_bias",), stacked=True),
}
# Heads that predict several tokens (MTP) are layers behind the model's, as DeepSeek-V3's folders have them.
HEADS = "mtp.layers."
HEAD_PLACES = {
    "enorm.weight": TensorPlace((_LAYER + "enorm.weight",)),
    "hnorm.weight": TensorPlace((_LAYER + "hnorm.weight",)),
    "eh_proj.weight": TensorPlace((_LAYER + "eh_proj.weight",), 0),
    "final_layernorm.weight": TensorPlace((_LAYER + "shared_head.norm.weight",)),
}
# Norms behind attention and feed forward, too (Gemma 3).
POST_NORM_PLACES = {
    "self_attention.linear_proj.post_layernorm.weight": _BEFORE_MLP,  # that name is meant as it says there
    **dict.fromkeys(
        ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
        TensorPlace((_LAYER + "pre_feedforward_layernorm.weight",)),
    ),
    "mlp.linear_fc2.post_layernorm.weight": TensorPlace((_LAYER + "post_feedforward_layernorm.weight",)),
}


def _stacks_experts(config: Any) -> bool:
    return bool(config.num_moe_experts and config.add_bias_linear)


def _has_post_norms(core: Any) -> bool:
    return any(name.endswith("linear_proj.post_layernorm.weight") for name, _ in core.named_parameters())


def _places(core: Any) -> tuple[dict[str, TensorPlace], dict[str, TensorPlace]]:
    """(of a layer, of an expert), as this model's config calls for."""
    layer, expert = dict(LAYER_PLACES), EXPERT_PLACES
    if core.config.multi_latent_attention:
        layer |= LATENT_PLACES
    if getattr(core.config, "moe_shared_expert_gate", False):
        layer |= GATED_PLACES
    if _stacks_experts(core.config):
        layer, expert = layer | STACKED_PLACES, STACKED_EXPERT_PLACES
    if _has_post_norms(core):
        layer |= POST_NORM_PLACES
    return layer, expert


def chunks_of(model: Any) -> list[Any]:
    """The ``GPTModel`` of each chunk; ``model`` is a chunk or a sequence of them, in wrappers or not."""
    return [unwrap(chunk) for chunk in (model if isinstance(model, Sequence) else [model])]


def tensor_pieces(model: Any, *, heads: bool = False) -> Iterator[TensorPiece]:
    """Every piece that this rank holds, in the order of its parameters. ``model``: as for :func:`chunks_of`. ``heads``: also
    those of heads that predict several tokens, which no engine is sent."""
    for core in chunks_of(model):
        whole, places = tensor_shapes(core, heads=heads), _places(core)
        biases = [(name, value) for name, value in core.named_buffers() if name.endswith(".router.expert_bias")]
        for name, parameter in [*core.named_parameters(), *biases]:
            if name.startswith(HEADS) and not heads:
                continue
            place, layer, expert = _find(core, name, places)
            windows = place.windows(core.config)
            for source, window in zip(place.sources, windows, strict=True):
                piece = _piece(core, place, source.format(i=layer, e=expert), whole, parameter, window, expert)
                if piece.start < piece.stop:  # else all of it is padding of the vocabulary
                    yield piece


def _piece(
    core: Any,
    place: TensorPlace,
    name: str,
    whole: dict[str, tuple[int, ...]],
    parameter: Tensor,
    window: Window,
    expert: int,
) -> TensorPiece:
    groups = core.pg_collection
    is_expert = expert >= 0
    tensor = groups.expt_tp if is_expert else groups.tp
    data = groups.expt_dp if is_expert else groups.dp_cp
    if name not in whole:
        raise ConfigError("model", name, "is a parameter that the model's config does not include")
    shape, dim, size = whole[name], place.dim, tensor.size()
    start, stop = 0, shape[0]
    if size == 1:
        dim = -1
    elif dim >= 0:
        start, stop = (shape[dim] * part // size for part in (tensor.rank(), tensor.rank() + 1))
    if place in (PLACES["embedding.word_embeddings.weight"], PLACES["output_layer.weight"]):
        rows = parameter.shape[0]  # of this rank, padding at the vocabulary's end included
        start, stop = (min(rows * part, shape[0]) for part in (tensor.rank(), tensor.rank() + 1))
        window = _first_rows(stop - start)
    others = {"dp": data} if dim >= 0 or size == 1 else {"dp": data, "tp": tensor}
    if (
        place is TIED_OUTPUT
        and core.config.pipeline_model_parallel_size > 1
        and (core.share_embeddings_and_output_weights or multi_token_heads(core.config))
    ):
        others["pp"] = groups.embd  # the first and the last stage
    if place.stacked:
        dim, start, stop = 0, expert, expert + 1
    index, count = 0, 1
    for group in others.values():
        index, count = index * group.size() + group.rank(), count * group.size()
    replicated = tuple(key for key, group in others.items() if group.size() > 1)
    holder = index, count
    return TensorPiece(
        name, shape, dim, start, stop, replicated, holder, is_expert, parameter, window, place.keeps_dtype
    )


def _first_rows(count: int) -> Window:
    return lambda value: value[:count]


def _find(
    core: Any, name: str, places: tuple[dict[str, TensorPlace], dict[str, TensorPlace]]
) -> tuple[TensorPlace, int, int]:
    """Place, number of the layer in the whole model (-1: none), number of the expert in it (-1: none)."""
    if name == "output_layer.weight" and core.share_embeddings_and_output_weights:
        return TIED_OUTPUT, -1, -1
    if name in PLACES:
        return PLACES[name], -1, -1
    if name.startswith(("decoder.layers.", HEADS)):
        at, _, rest = name.removeprefix("decoder.layers.").removeprefix(HEADS).partition(".")
        if name.startswith(HEADS):
            layer = core.config.num_layers + int(at)
            if rest in HEAD_PLACES:
                return HEAD_PLACES[rest], layer, -1
            rest = rest.partition(".")[2]  # of its layer: transformer_layer in 0.16.1, mtp_model_layer in 0.19.2
        else:
            layer = core.decoder.layers[int(at)].layer_number - 1
        if rest in places[0]:
            return places[0][rest], layer, -1
        found = _find_expert(rest.removeprefix("mlp.experts."), places[1])
        if rest.startswith("mlp.experts.") and found is not None:
            place, local = found
            each = core.config.num_moe_experts // core.pg_collection.ep.size()
            return place, layer, core.pg_collection.ep.rank() * each + local
    raise ConfigError("model", name, "the bridge knows no Hugging Face place for this Megatron parameter")


def _find_expert(rest: str, places: dict[str, TensorPlace]) -> tuple[TensorPlace, int] | None:
    """``local_experts.3.linear_fc1.weight``, or Transformer Engine's ``linear_fc1.weight3``."""
    parts = rest.split(".", 2)
    if len(parts) == 3 and parts[0] == "local_experts" and parts[2] in places:
        return places[parts[2]], int(parts[1])
    name = rest.rstrip("0123456789")
    if name != rest and name in places:
        return places[name], int(rest.removeprefix(name))
    return None


def multi_token_heads(config: Any) -> int:
    """How many heads predict further ahead than the next token."""
    return getattr(config, "mtp_num_layers", None) or 0


def tensor_shapes(model: Any, *, heads: bool = False) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape of all tensors of the whole model, wherever they are held, in the model's order. ``heads``: as
    for :func:`tensor_pieces`."""
    core = chunks_of(model)[0]
    config, hidden = core.config, core.config.hidden_size
    post_norms = _has_post_norms(core)
    vocabulary = getattr(core, UNPADDED, core.vocab_size)
    table: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    ahead = multi_token_heads(config) if heads else 0
    for index in range(config.num_layers + ahead):
        at = f"model.layers.{index}."
        if index >= config.num_layers:
            table |= {f"{at}{name}.weight": (hidden,) for name in ("enorm", "hnorm", "shared_head.norm")}
            table[f"{at}eh_proj.weight"] = (hidden, 2 * hidden)
        table[f"{at}input_layernorm.weight"] = (hidden,)
        table |= (
            _latent_shapes(config, f"{at}self_attn.") if config.multi_latent_attention else _attention_shapes(core, at)
        )
        table[f"{at}post_attention_layernorm.weight"] = (hidden,)
        if post_norms:
            table |= {f"{at}{place}_feedforward_layernorm.weight": (hidden,) for place in ("pre", "post")}
        if config.num_moe_experts and _has_experts(config, min(index, config.num_layers - 1)):
            table |= _mixture_shapes(config, f"{at}mlp.")
        else:
            table |= _swiglu(f"{at}mlp.", hidden, config.ffn_hidden_size)
    table["model.norm.weight"] = (hidden,)
    if not core.share_embeddings_and_output_weights:
        table["lm_head.weight"] = (vocabulary, hidden)
    return table


def _has_experts(config: Any, layer: int) -> bool:
    every = config.moe_layer_freq
    return bool(every[layer]) if isinstance(every, list) else layer % every == 0


def _attention_shapes(core: Any, at: str) -> dict[str, tuple[int, ...]]:
    config, hidden, head = core.config, core.config.hidden_size, core.config.kv_channels
    table: dict[str, tuple[int, ...]] = {}
    counts = (config.num_attention_heads, config.num_query_groups, config.num_query_groups)
    for c, count in zip("qkv", counts, strict=True):
        table[f"{at}self_attn.{c}_proj.weight"] = (count * head, hidden)
        if config.add_qkv_bias or config.add_bias_linear:
            table[f"{at}self_attn.{c}_proj.bias"] = (count * head,)
    if config.qk_layernorm:
        table |= {f"{at}self_attn.{c}_norm.weight": (head,) for c in "qk"}
    if getattr(config, "softmax_type", "vanilla") == "learnable":
        table[f"{at}self_attn.sinks"] = (config.num_attention_heads,)
    table[f"{at}self_attn.o_proj.weight"] = (hidden, config.num_attention_heads * head)
    if config.add_bias_linear:
        table[f"{at}self_attn.o_proj.bias"] = (hidden,)
    return table


def _latent_shapes(config: Any, at: str) -> dict[str, tuple[int, ...]]:
    hidden, heads, rank = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    queries = heads * (config.qk_head_dim + config.qk_pos_emb_head_dim)
    table: dict[str, tuple[int, ...]] = {f"{at}q_proj.weight": (queries, hidden)}
    if config.q_lora_rank is not None:
        table = {
            f"{at}q_a_proj.weight": (config.q_lora_rank, hidden),
            f"{at}q_a_layernorm.weight": (config.q_lora_rank,),
            f"{at}q_b_proj.weight": (queries, config.q_lora_rank),
        }
    return table | {
        f"{at}kv_a_proj_with_mqa.weight": (rank + config.qk_pos_emb_head_dim, hidden),
        f"{at}kv_a_layernorm.weight": (rank,),
        f"{at}kv_b_proj.weight": (heads * (config.qk_head_dim + config.v_head_dim), rank),
        f"{at}o_proj.weight": (hidden, heads * config.v_head_dim),
    }


def _mixture_shapes(config: Any, at: str) -> dict[str, tuple[int, ...]]:
    hidden, experts, size = config.hidden_size, config.num_moe_experts, config.moe_ffn_hidden_size
    if _stacks_experts(config):
        return {
            f"{at}router.weight": (experts, hidden),
            f"{at}router.bias": (experts,),
            f"{at}experts.gate_up_proj": (experts, hidden, 2 * size),
            f"{at}experts.gate_up_proj_bias": (experts, 2 * size),
            f"{at}experts.down_proj": (experts, size, hidden),
            f"{at}experts.down_proj_bias": (experts, hidden),
        }
    table: dict[str, tuple[int, ...]] = {f"{at}gate.weight": (experts, hidden)}
    if config.moe_router_enable_expert_bias:
        table[f"{at}gate.e_score_correction_bias"] = (experts,)
    for expert in range(experts):
        table |= _swiglu(f"{at}experts.{expert}.", hidden, size)
    if shared := config.moe_shared_expert_intermediate_size:
        gated = getattr(config, "moe_shared_expert_gate", False)
        table |= _swiglu(f"{at}shared_expert{'' if gated else 's'}.", hidden, shared)
        if gated:
            table[f"{at}shared_expert_gate.weight"] = (1, hidden)
    return table


def _swiglu(at: str, hidden: int, wide: int) -> dict[str, tuple[int, ...]]:
    shapes = {"gate": (wide, hidden), "up": (wide, hidden), "down": (hidden, wide)}
    return {f"{at}{name}_proj.weight": shape for name, shape in shapes.items()}


def model_group(model: Any) -> dist.ProcessGroup:
    """The ranks that together hold one whole model: tensor, pipeline and expert parallel ones of one replica."""
    return chunks_of(model)[0].pg_collection.tp_ep_pp
