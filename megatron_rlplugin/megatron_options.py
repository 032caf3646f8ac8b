"""Megatron's own options: what ``[trainer.megatron]`` says, checked and sorted into Megatron-Core's config dataclasses.

Guarantees: any field of the installed version's ``TransformerConfig``, ``DistributedDataParallelConfig`` and
``OptimizerConfig`` is passed on as it stands, to each of the three that has it. What the version does not have is a
ConfigError with the nearest name; what the model's folder, a key of ours or this plugin decides is one that says which; a value
of another type than the field's is one that says the type. Nothing is dropped silently.

A dtype is written by its name in torch ("bfloat16"), a member of an enum by its name ("flash").
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import enum
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError

from orchestrator.api import ConfigError, RunError

TABLE = "trainer.megatron"

_FOLDER = "comes from config.json of model.path; leave it out"
_RATES = "is trainer.{}; set it there"
# What is decided elsewhere, and where.
OWNED = {
    **dict.fromkeys(
        (
            "num_layers",
            "hidden_size",
            "ffn_hidden_size",
            "num_attention_heads",
            "num_query_groups",
            "kv_channels",
            "normalization",
            "layernorm_epsilon",
            "qk_layernorm",
            "gated_linear_unit",
            "activation_func",
            "add_bias_linear",
            "add_qkv_bias",
            "num_moe_experts",
            "moe_router_topk",
            "moe_ffn_hidden_size",
            "moe_router_score_function",
            "moe_router_pre_softmax",
            "moe_layer_freq",
            "moe_shared_expert_intermediate_size",
            "moe_shared_expert_gate",
            "moe_router_enable_expert_bias",
            "moe_router_topk_scaling_factor",
            "moe_router_num_groups",
            "moe_router_group_topk",
            "multi_latent_attention",
            "softmax_scale",
            "softmax_type",
            "window_size",
            "window_attn_skip_freq",
            "layernorm_zero_centered_gamma",
            "activation_func_clamp_value",
            "glu_linear_offset",
            "rotary_interleaved",
        ),
        _FOLDER,
    ),
    "lr": _RATES.format("learning_rate"),
    "min_lr": _RATES.format("final_learning_rate"),
    "weight_decay": _RATES.format("weight_decay"),
    "adam_beta1": _RATES.format("adam_beta1"),
    "adam_beta2": _RATES.format("adam_beta2"),
    "clip_grad": _RATES.format("clip_grad"),
    "tensor_model_parallel_size": _RATES.format("tensor_parallel"),
    "pipeline_model_parallel_size": _RATES.format("pipeline_parallel"),
    "expert_model_parallel_size": _RATES.format("expert_parallel"),
    "use_distributed_optimizer": _RATES.format("distributed_optimizer"),
    **dict.fromkeys(("params_dtype", "pipeline_dtype", "bf16"), "follows model.dtype; set it there"),
    "fp16": "must be off: its loss scale may change during a step; use model.dtype = 'bfloat16'",
    **dict.fromkeys(
        ("hidden_dropout", "attention_dropout"),
        "must be 0: with dropout the trainer's policy is not the one that sampled",
    ),
    "calculate_per_token_loss": "must be true: losses are sums whose divisor arrives with the last micro-batch",
    "grad_reduce_in_fp32": "must be true: sums in bf16 depend on the order in which trajectories arrive",
    "average_in_collective": "must be off: replicas have uneven shares of a batch",
    "num_distributed_optimizer_instances": "must be 1: several would reduce a streamed step's gradients twice",
    "use_megatron_fsdp": "must be off: it reduces gradients in every backward pass, so no step can be streamed",
    "use_custom_fsdp": "must be off: it reduces gradients in every backward pass, so no step can be streamed",
    **dict.fromkeys(
        ("fp8_param", "fp8_param_gather", "fp4_param", "fp4_param_gather"),
        "must be unset: weights are filled in parts from model.path, and a part of a quantised one may be a copy; "
        "fp8 and fp4 compute with weights kept in model.dtype",
    ),
    "variable_seq_lengths": "follows the layout: micro-batches of a pipeline differ in length",
    "moe_token_dispatcher_type": "must be alltoall: micro-batches differ in length",
    "perform_initialization": "must be off: the weights come from model.path",
    "use_cpu_initialization": "must be on: the weights come from model.path",
    "context_parallel_size": _RATES.format("context_parallel"),
    "mtp_use_repeated_layer": "must be unset: each head has a layer of its own, as the folder has it",
    "mtp_detach_heads": "must be unset: what heads learn reaches the layers before them, as in pretraining",
    "mtp_hybrid_override_pattern": "must be unset: a head is a layer like the model's last one",
    "moe_enable_routing_replay": _RATES.format("routing_replay"),
    "transformer_impl": "is Transformer Engine where it is installed and there is CUDA: leave it out",
    "expert_tensor_parallel_size": "must be unset: an expert is split as other layers are, by trainer.tensor_parallel",
    **dict.fromkeys(
        ("hierarchical_context_parallel_sizes", "hybrid_context_parallel", "max_seqlen_per_dp_cp_rank"),
        "must be unset: ranks share rows by trainer.context_parallel alone",
    ),
    **dict.fromkeys(
        (
            "apply_residual_connection_post_layernorm",
            "attention_output_gate",
            "experimental_attention_variant",
            "heterogeneous_block_specs",
            "is_hybrid_model",
            "linear_attention_freq",
            "moe_apply_probs_on_input",
            "moe_expert_capacity_factor",
            "moe_expert_rank_capacity_factor",
            "moe_input_jitter_eps",
            "moe_latent_size",
            "moe_pad_expert_input_to_capacity",
            "moe_router_force_biased",
            "moe_router_force_load_balancing",
            "moe_router_topk_limited_devices",
            "moe_token_dropping",
            "mrope_section",
            "no_rope_freq",
            "qk_l2_norm",
            "test_mode",
            "use_mup",
        ),
        "must be unset: the trainer would compute another model than the one that sampled",
    ),
}
# By which pipeline stages may have different numbers of layers.
UNEVEN_STAGES = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout",
)
# What decides how ranks are grouped: known before a model is built.
_LAYOUT = ("sequence_parallel", "virtual_pipeline_model_parallel_size")


@dataclass(frozen=True, slots=True)
class MegatronOptions:
    """Keyword arguments for Megatron-Core's three dataclasses, and the ones that a :class:`ParallelLayout` holds."""

    transformer: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    sequence_parallel: bool | None = None  # None: as the model needs
    virtual_pipeline: int | None = None  # model chunks per pipeline stage
    agreed: dict[str, Any] = field(default_factory=dict)  # what an argument list says of what is decided elsewhere


def sort_options(given: Mapping[str, Any], arguments: Mapping[str, Any] | None = None) -> MegatronOptions:
    """``given`` by dataclass, with what an argument list says (``trainer.arguments``): there also of what the folder or this
    plugin decides, as long as it says what is so. Raises ConfigError that names the field, the value and the fix."""
    agreed = {key: value for key, value in (arguments or {}).items() if key in OWNED}
    more = {key: value for key, value in (arguments or {}).items() if key not in OWNED}
    for key in more.keys() & given.keys():
        if more[key] != given[key]:
            fix = f"trainer.arguments sets it to {more[key]!r}: leave one of the two out"
            raise ConfigError(f"{TABLE}.{key}", given[key], fix)
    given = {**more, **given}
    if not given and not agreed:
        return MegatronOptions()
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    classes = {"transformer": TransformerConfig, "ddp": DistributedDataParallelConfig, "optimizer": OptimizerConfig}
    known = {name: {item.name: item for item in dataclasses.fields(cls)} for name, cls in classes.items()}
    sorted_: dict[str, dict[str, Any]] = {name: {} for name in classes}
    layout: dict[str, Any] = {}
    names = {each for fields in known.values() for each in fields}
    for key in agreed.keys() - names:
        raise ConfigError(f"trainer.arguments: {key}", agreed[key], _unknown(key, names))
    for key, value in given.items():
        name = f"trainer.arguments: {key}" if key in more else f"{TABLE}.{key}"
        if key in OWNED:
            raise ConfigError(name, value, OWNED[key])
        owners = [owner for owner, fields in known.items() if key in fields]
        if not owners:
            raise ConfigError(name, value, _unknown(key, names))
        if callable(getattr(classes[owners[0]], key, None)) or "Callable" in str(known[owners[0]][key].type):
            raise ConfigError(name, value, "is a function, which a config file cannot hold; leave it out")
        checked = _checked(name, value, known[owners[0]][key].type)
        if key in _LAYOUT:
            layout[key] = checked
            continue
        for owner in owners:
            sorted_[owner][key] = checked
    return MegatronOptions(
        **sorted_,
        sequence_parallel=layout.get("sequence_parallel"),
        virtual_pipeline=layout.get("virtual_pipeline_model_parallel_size"),
        agreed=agreed,
    )


def check_agreed(agreed: Mapping[str, Any], *configs: Any) -> None:
    """What an argument list said of what is decided elsewhere must be so in the configs. Raises ConfigError."""
    for name, value in agreed.items():
        so = [getattr(config, name) for config in configs if hasattr(config, name)]
        if any(one != value for one in so):
            raise ConfigError(f"trainer.arguments: {name}", value, f"is {so[0]!r} here; it {OWNED[name]}")


def make_config(constructor: Callable[..., Any], ours: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """One of the dataclasses, from what we set and, over it, what the user set. What Megatron refuses is a ConfigError."""
    with refusals(options):
        return constructor(**{**ours, **options})


@contextlib.contextmanager
def refusals(options: Mapping[str, Any]) -> Iterator[None]:
    """What Megatron-Core raises in here, of whatever type, because of what the user set, is a ConfigError: of the option that it
    names, else of all of them. Lost ranks and lack of memory are no refusals."""
    try:
        yield
    except (ConfigError, RunError, torch.OutOfMemoryError, torch.distributed.DistError):
        raise
    except Exception as error:
        if not options:
            raise
        named = sorted(key for key in options if key in str(error)) or (sorted(options) if len(options) == 1 else [])
        field, value = (f"{TABLE}.{named[0]}", options[named[0]]) if named else (TABLE, dict(options))
        fix = f"Megatron-Core refuses it: {str(error) or type(error).__name__}"
        raise ConfigError(field, value, fix) from error


def check_optimizer(options: MegatronOptions, *, distributed: bool) -> None:
    """Refuse what Megatron-Core's optimizer would, or would pass over, before there is a device. Raises ConfigError."""
    given = {**options.ddp, **options.optimizer}
    for name in ("use_precision_aware_optimizer", "overlap_param_gather"):
        if given.get(name) and not distributed:
            raise ConfigError(f"{TABLE}.{name}", given[name], "needs trainer.distributed_optimizer = true")
    for name in ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
        if given.get(name, torch.float32) != torch.float32 and not given.get("use_precision_aware_optimizer"):
            fix = f"needs {TABLE}.use_precision_aware_optimizer = true"
            raise ConfigError(f"{TABLE}.{name}", str(given[name]).removeprefix("torch."), fix)


def check_scaling(options: MegatronOptions, replicas: int) -> None:
    """Refuse FP8 whose scales are reduced over replicas in each forward pass: these have different numbers of micro-batches, and
    would wait for each other for ever. Raises ConfigError."""
    given = options.transformer
    delayed = given.get("fp8") and given.get("fp8_recipe", "delayed") == "delayed"
    if delayed and replicas > 1 and not given.get("tp_only_amax_red"):
        fix = "must be another one, such as tensorwise, or tp_only_amax_red true: its scales are reduced over all replicas in "
        fix += "every forward pass, and these have different numbers of micro-batches"
        raise ConfigError(f"{TABLE}.fp8_recipe", "delayed", fix)


def _unknown(key: str, known: set[str]) -> str:
    from megatron.core import __version__

    near = difflib.get_close_matches(key, sorted(known - OWNED.keys()), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"Megatron-Core {__version__} has no such option in TransformerConfig, its DDP's or its optimizer's config{hint}"


def _checked(name: str, value: Any, kind: Any) -> Any:
    """``value`` as the dataclass wants it. Raises ConfigError."""
    choices = [kind, *typing.get_args(kind)]
    if isinstance(value, str):
        if torch.dtype in choices:
            found = getattr(torch, value, None)
            if not isinstance(found, torch.dtype):
                raise ConfigError(name, value, "must be the name of a torch dtype, such as 'bfloat16'")
            return found
        for choice in choices:
            if isinstance(choice, type) and issubclass(choice, enum.Enum):
                if value not in choice.__members__:
                    raise ConfigError(name, value, f"must be one of {', '.join(choice.__members__)}")
                return choice[value]
    try:
        adapter = TypeAdapter(kind, config=ConfigDict(arbitrary_types_allowed=True))
    except (PydanticSchemaGenerationError, PydanticUserError, NameError):
        return value  # a type that cannot be checked here: Megatron-Core does
    try:
        return adapter.validate_python(value, strict=False if isinstance(value, int | float) else None)
    except ValidationError as error:
        message = str(error.errors()[0]["msg"]).removeprefix("Input should be ").removeprefix("a valid ")
        raise ConfigError(name, value, f"must be {message.split(', unable')[0]}") from None
