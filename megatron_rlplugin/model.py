"""A stock Megatron-Core ``GPTModel`` of the shape of a Hugging Face folder, cut to this rank's part of a layout.

Guarantees: the model's arithmetic is that of the folder's config (``families`` says which), without dropout and without
auxiliary losses; a layout that cannot express it is refused with a ConfigError that names the field. The weights are
uninitialised until ``bridge.load_hf`` filled them.

Layers are Transformer Engine's where it is installed and there is CUDA, else Megatron's own ("local") ones; what stock
Megatron-Core lacks is in ``model_layers``. Transformer Engine's layers need a GPU; they were not run.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

import torch

from megatron_rlplugin.megatron_options import UNEVEN_STAGES, make_config
from megatron_rlplugin.model_families import ModelShape, read_config, read_shape
from megatron_rlplugin.parallel_layout import ParallelLayout, device
from orchestrator.api import ConfigError

__all__ = ["DTYPES", "ModelShape", "build_model", "causal_mask", "read_config", "read_shape", "unwrap"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def transformer_config(
    shape: ModelShape, dtype: torch.dtype, layout: ParallelLayout, options: Mapping[str, Any] | None = None
) -> Any:
    """Megatron's config of this shape. Losses are sums: the divisor arrives with the finalizer (per-token loss).

    ``options``: fields of ``TransformerConfig`` that a user set (:mod:`megatron_rlplugin.megatron_options`).
    """
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    for name in ("moe_router_bias_update_rate", "moe_aux_loss_coeff", "moe_z_loss_coeff"):
        if (rate := (options or {}).get(name)) and layout.sequence and layout.pipeline > 1:
            fix = "must be unset with sequence and pipeline parallelism: Megatron-Core would count padding there"
            raise ConfigError(f"trainer.megatron.{name}", rate, fix)
    mixture = _mixture(shape) if shape.num_experts else {}
    if layout.virtual is not None:  # without overlap the interleaved schedule needs another order of sends
        mixture |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    ours: dict[str, Any] = dict(
        num_layers=shape.num_hidden_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.intermediate_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_key_value_heads,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=shape.rms_norm_eps,
        qk_layernorm=shape.qk_norm or shape.latent is not None,
        gated_linear_unit=True,
        activation_func=_ACTIVATIONS[shape.family.activation],
        add_bias_linear=shape.family.bias,
        add_qkv_bias=shape.qkv_bias,
        softmax_scale=shape.softmax_scale,
        softmax_type="learnable" if shape.family.sinks else "vanilla",
        layernorm_zero_centered_gamma=shape.family.gemma,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual,
        expert_model_parallel_size=layout.expert,
        context_parallel_size=layout.context,
        sequence_parallel=layout.sequence,
        pipeline_dtype=dtype,
        # Micro-batches of a pipeline may differ in length; that needs the all-to-all dispatcher, in a dense model too.
        variable_seq_lengths=layout.pipeline > 1,
        moe_token_dispatcher_type="alltoall",
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
        apply_rope_fusion=uses_transformer_engine()
        and not shape.latent,  # packed rows: the unfused one reads lengths back in every layer
        **{_graph_field(): []},  # the default is a spelling that Megatron warns about
        **mixture,
    )
    if shape.window is not None:
        ours["window_size"] = (shape.window - 1, 0)  # tokens before and behind the one that looks
        ours["window_attn_skip_freq"] = [
            int(layer in shape.windowed_layers) for layer in range(shape.num_hidden_layers)
        ]
    if shape.swiglu_limit is not None:
        ours |= {"activation_func_clamp_value": shape.swiglu_limit, "glu_linear_offset": 1.0}
    if shape.latent:
        config = make_config(MLATransformerConfig, ours | _latent(shape), options or {})
    else:
        config = make_config(TransformerConfig, ours, options or {})
    if shape.rope.type == "yarn" and not shape.latent:  # GPTModel and its attention look for these, which are no fields
        for name, value in _yarn(shape).items():
            setattr(config, f"yarn_{name}", value)
    config.window_rotary_base = shape.window_rope_theta  # no field either: WindowRopeAttention's
    return config


def _tanh_gelu(value: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(value, approximate="tanh")


def _quick_gelu(value: torch.Tensor) -> torch.Tensor:
    return value * torch.sigmoid(1.702 * value)


_ACTIVATIONS = {"silu": torch.nn.functional.silu, "gelu_tanh": _tanh_gelu, "quick_gelu": _quick_gelu}


def _mixture(shape: ModelShape) -> dict[str, Any]:
    found: dict[str, Any] = {
        "num_moe_experts": shape.num_experts,
        "moe_layer_freq": [int(layer not in shape.dense_layers) for layer in range(shape.num_hidden_layers)],
        "moe_router_topk": shape.num_experts_per_tok,
        "moe_ffn_hidden_size": shape.moe_intermediate_size,
        "moe_router_score_function": "softmax",
        # Softmax over the chosen logits is softmax over all, scaled to a sum of one.
        "moe_router_pre_softmax": not shape.norm_topk_prob,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": uses_transformer_engine() and not shape.family.bias,
        "moe_shared_expert_intermediate_size": shape.shared_size or None,
        "moe_shared_expert_gate": shape.family.shared_gate,
    }
    if shape.family.sigmoid_router:
        found |= {
            "moe_router_score_function": "sigmoid",
            "moe_router_pre_softmax": False,
            "moe_router_enable_expert_bias": True,
            "moe_router_bias_update_rate": 0.0,  # the folder's bias, unless the user wants it to follow the load
            "moe_router_topk_scaling_factor": shape.routed_scaling_factor,
            "moe_router_dtype": "fp32",
        }
        if shape.groups_per_tok < shape.expert_groups:
            found |= {"moe_router_num_groups": shape.expert_groups, "moe_router_group_topk": shape.groups_per_tok}
    return found


def _latent(shape: ModelShape) -> dict[str, Any]:
    assert shape.latent is not None
    if shape.latent.q_lora_rank is None and importlib.util.find_spec("megatron.core.transformer.mla_qk_norm_config"):
        fix = "must be set: this Megatron-Core normalises uncompressed queries; 0.16.1 does not"
        raise ConfigError("model.q_lora_rank", None, fix)
    found: dict[str, Any] = {
        "q_lora_rank": shape.latent.q_lora_rank,
        "kv_lora_rank": shape.latent.kv_lora_rank,
        "qk_head_dim": shape.latent.qk_nope_head_dim,
        "qk_pos_emb_head_dim": shape.latent.qk_rope_head_dim,
        "v_head_dim": shape.latent.v_head_dim,
        "rotary_base": shape.rope.theta,
        "rope_type": "rope",
        "rotary_scaling_factor": 1.0,
    }
    if shape.rope.type == "yarn":
        found |= {"rope_type": "yarn"} | _yarn(shape)
        del found["correction_range_round_to_int"]
    return found


def _yarn(shape: ModelShape) -> dict[str, Any]:
    rope = shape.rope
    return {
        "rotary_scaling_factor": rope.factor,
        "original_max_position_embeddings": int(rope.original_max_position_embeddings),
        "beta_fast": rope.beta_fast,
        "beta_slow": rope.beta_slow,
        # Without them transformers scales by 0.1 log(factor) + 1: that is one and none.
        "mscale": rope.mscale or 1.0,
        "mscale_all_dim": rope.mscale_all_dim or 0.0,
        "correction_range_round_to_int": rope.truncate,
    }


def _graph_field() -> str:
    """0.16.1 calls it cuda_graph_scope, 0.19.2 cuda_graph_modules."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    fields = TransformerConfig.__dataclass_fields__
    return "cuda_graph_modules" if "cuda_graph_modules" in fields else "cuda_graph_scope"


def uses_transformer_engine() -> bool:
    """Whether layers are made of Transformer Engine's modules: it is installed, and there is CUDA."""
    if not torch.cuda.is_available():
        return False
    from megatron.core.extensions.transformer_engine import HAVE_TE

    return bool(HAVE_TE)


def build_model(
    shape: ModelShape,
    dtype: str,
    layout: ParallelLayout | None = None,
    *,
    parallel_output: bool = True,
    options: Mapping[str, Any] | None = None,
) -> list[Any]:
    """This rank's model chunks (one, or ``layout.virtual``): the stock ``GPTModel``, or (bfloat16) it in Megatron's
    ``Float16Module``. Needs :func:`initialize_parallel` with the same layout.

    The last stage's logits are ``[batch, length, vocabulary / TP]``, this rank's part, for the vocabulary-parallel
    objective; without ``parallel_output`` every tensor-parallel rank gives all of them. (``unwrap(chunk).parallel_output``
    says which.) With sequence parallelism ``length`` must be a multiple of TP. ``options``: fields of
    ``TransformerConfig`` that a user set.
    """
    layout = layout or ParallelLayout()
    if dtype not in DTYPES:
        raise ConfigError("model.dtype", dtype, f"must be one of {', '.join(DTYPES)}")
    check_layout(shape, layout, options)
    for name in ("fp8", "fp4"):  # Megatron-Core itself passes them over in silence
        if (options or {}).get(name) and not uses_transformer_engine():
            fix = "needs CUDA and Transformer Engine, which this process does not have; leave it out here"
            raise ConfigError(f"trainer.megatron.{name}", (options or {})[name], fix)
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.moe.router import TopKRouter

    from megatron_rlplugin.model_layers import count_load, scale_embeddings, scale_rope

    config = transformer_config(shape, DTYPES[dtype], layout, options)
    chunks = []
    for stage in range(layout.virtual) if layout.virtual else [None]:
        layers = _layers(shape, config, stage)
        where = {"ignore_virtual": False, "vp_stage": stage}
        model = GPTModel(
            config=config,
            transformer_layer_spec=layers,
            vocab_size=shape.vocab_size,
            max_sequence_length=shape.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(**where),
            post_process=parallel_state.is_pipeline_last_stage(**where),
            parallel_output=parallel_output,
            share_embeddings_and_output_weights=shape.tie_word_embeddings,
            position_embedding_type="yarn" if shape.rope.type == "yarn" and not shape.latent else "rope",
            rotary_percent=shape.rotary_part,
            rotary_base=shape.rope.theta,
            vp_stage=stage,
            mtp_block_spec=_heads(layers, config, stage),
        )
        if not shape.latent and shape.rope.type != "yarn":
            model.rotary_pos_emb.inv_freq = scale_rope(model.rotary_pos_emb.inv_freq, shape.rope)
        if shape.family.gemma:
            scale_embeddings(model, shape.hidden_size**0.5)
        model.extra_layers = shape.extra_layers
        _mark_shards(model)
        model.to(device())
        chunks.append(Float16Module(config, model) if config.bf16 else model)
        for module in model.modules():
            if isinstance(module, TopKRouter) and module.expert_bias is not None:
                count_load(module)
    return chunks


def check_layout(shape: ModelShape, layout: ParallelLayout, options: Mapping[str, Any] | None = None) -> None:
    """Raises ConfigError when this model cannot be cut so. ``options``: as for :func:`build_model`; where they say how many
    layers a stage has, Megatron-Core checks it."""
    sizes = ["vocab_size", "num_key_value_heads", "num_attention_heads"]
    sizes += ["moe_intermediate_size", "shared_size"] if shape.num_experts else []
    sizes += ["intermediate_size"] if shape.expert_layers < shape.num_hidden_layers else []
    for name in sizes:  # fewer key-value heads than TP ranks: Megatron would cut inside a head
        if getattr(shape, name) % layout.tensor:
            raise ConfigError(f"model.{name}", getattr(shape, name), f"must be a multiple of TP = {layout.tensor}")
    for refused, why in {
        "latent attention": shape.latent is not None and not uses_transformer_engine(),
        "experts with a bias": shape.num_experts > 0 and shape.family.bias,
    }.items():
        if why and layout.tensor > 1:
            fix = f"must be 1: {refused} ({shape.architecture}) is not split by tensor parallelism here; use expert or "
            raise ConfigError("layout.tensor", layout.tensor, fix + "pipeline parallelism")
    stages = layout.pipeline * (layout.virtual or 1)
    if shape.num_hidden_layers % stages and not any((options or {}).get(name) for name in UNEVEN_STAGES):
        fix = f"must be a multiple of the {stages} pipeline stages (pipeline * virtual)"
        first = range(shape.num_hidden_layers // stages, 0, -1)
        even = [number for number in first if not (shape.num_hidden_layers - number) % (stages - 1)]
        if even and layout.virtual is None:
            fix += f", or give the first one another number of layers: trainer.megatron.{UNEVEN_STAGES[0]} = {even[0]}"
        raise ConfigError("model.num_hidden_layers", shape.num_hidden_layers, fix)
    if layout.expert > 1 and not shape.num_experts:
        raise ConfigError("layout.expert", layout.expert, f"{shape.architecture} has no experts to split; must be 1")
    if shape.num_experts % layout.expert:
        raise ConfigError("model.num_experts", shape.num_experts, f"must be a multiple of EP = {layout.expert}")
    if shape.num_experts and layout.tensor > 1 and not layout.sequence:
        fix = "a mixture of experts with tensor parallelism trains only with sequence parallelism; set it"
        raise ConfigError("layout.sequence", layout.sequence, fix)


def _layers(shape: ModelShape, config: Any, stage: int | None) -> Any:
    """Megatron's specification of this chunk's layers."""
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    from megatron_rlplugin.model_layers import RMSNorm

    first = get_transformer_layer_offset(config, stage)
    layers = range(first, first + get_num_layers_to_build(config, vp_stage=stage))
    experts = shape.num_experts or None
    kinds = {
        mixture: _layer(shape, experts if mixture else None, config.context_parallel_size)
        for mixture in {experts is not None, False}
    }
    norm: Any = RMSNorm
    if uses_transformer_engine():
        norm = importlib.import_module("megatron.core.extensions.transformer_engine").TENorm
    mixed = [experts is not None and layer not in shape.dense_layers for layer in layers]
    return TransformerBlockSubmodules([kinds[mixture] for mixture in mixed], norm)


def _heads(layers: Any, config: Any, stage: int | None) -> Any:
    """Megatron's specification of this chunk's heads that predict several tokens, each with a layer like the last; None: none."""
    if not config.mtp_num_layers:
        return None
    from megatron.core.models.gpt import gpt_layer_specs

    from megatron_rlplugin.model_layers import RMSNorm

    fused = uses_transformer_engine()
    heads = gpt_layer_specs.get_gpt_mtp_block_spec(config, layers, use_transformer_engine=fused, vp_stage=stage)
    if heads is not None and not fused:
        for head in heads.layer_specs:
            head.submodules.enorm = head.submodules.hnorm = head.submodules.layer_norm = RMSNorm
    return heads


def _layer(shape: ModelShape, experts: int | None, context: int) -> Any:
    """One layer, with experts or dense."""
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer.identity_op import IdentityOp

    from megatron_rlplugin.model_layers import (
        BiasedExpertLinear,
        LocalAttention,
        NormedRowParallelLinear,
        RMSNorm,
        WindowRopeAttention,
    )

    norms, latent = shape.qk_norm or shape.latent is not None, shape.latent is not None
    if uses_transformer_engine():
        grouped = experts is not None and not shape.family.bias
        layer = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(
            num_experts=experts, moe_grouped_gemm=grouped, qk_layernorm=norms, multi_latent_attention=latent
        )
        attention = layer.submodules.self_attention
    else:
        layer = gpt_layer_specs.get_gpt_layer_local_spec(
            num_experts=experts,
            moe_grouped_gemm=False,
            qk_layernorm=norms,
            multi_latent_attention=latent,
            normalization="RMSNorm",
        )
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
        attention = layer.submodules.self_attention
        if norms:
            for name in ("q_layernorm", "kv_layernorm" if latent else "k_layernorm"):
                setattr(attention.submodules, name, RMSNorm)
        if shape.latent and shape.latent.q_lora_rank is None:
            attention.submodules.q_layernorm = IdentityOp  # queries that are not compressed have none
        if shape.windowed_layers or latent or context > 1:
            attention.submodules.core_attention = LocalAttention
    if shape.family.bias and experts:
        _submodules(_submodules(layer.submodules.mlp).experts).linear_fc2 = BiasedExpertLinear
    if shape.family.gemma:
        attention.module = WindowRopeAttention
        attention.submodules.linear_proj = _submodules(layer.submodules.mlp).linear_fc2 = NormedRowParallelLinear
    return layer


def _submodules(spec: Any) -> Any:
    """Of a feed forward: a specification in 0.16.1, a ``functools.partial`` in 0.19.2."""
    return spec.submodules if hasattr(spec, "submodules") else spec.keywords["submodules"]


def _mark_shards(model: Any) -> None:
    """Tell Megatron which weights tensor parallelism cuts; 0.16.1 does so only where it initialises them.

    A weight without the mark counts as a copy: the gradient norm, and so clipping, would see rank 0's part only.
    """
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
    from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes

    for module in model.modules():
        if not isinstance(module, ColumnParallelLinear | RowParallelLinear | VocabParallelEmbedding):
            continue
        weight = module.weight  # None: an output layer that uses the embedding's
        if weight is not None and not hasattr(weight, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(weight, True, int(isinstance(module, RowParallelLinear)), 1)
    for name, parameter in model.named_parameters():
        if name.endswith("core_attention.softmax_offset") and not hasattr(parameter, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(parameter, True, 0, 1)


def unwrap(model: Any) -> Any:
    """The ``GPTModel`` inside Megatron's wrappers."""
    while hasattr(model, "module"):
        model = model.module
    return model


_mask: list[torch.Tensor] = []  # the widest so far; narrower ones are its corner


def causal_mask(length: int) -> torch.Tensor | None:
    """``[1, 1, length, length]``, True where attention is forbidden; None where Transformer Engine's kernels mask by
    themselves. One mask is kept, of the widest row seen: ``length`` squared bytes."""
    if uses_transformer_engine():
        return None
    if not _mask or _mask[0].shape[-1] < length:
        ones = torch.ones(1, 1, length, length, dtype=torch.bool, device=device())
        _mask[:] = [torch.triu(ones, diagonal=1)]
    return _mask[0][:, :, :length, :length]
