"""A Megatron argument list (``trainer.arguments``), for people who have one: read as Megatron-LM spells it, without Megatron.

Guarantees: an argument becomes the key of ours that means it, or an option of Megatron-Core's own under the name of its field;
where a run has another place for it, it is a ConfigError that names the place. Nothing is passed over but what a run does anyway.
Whether the installed Megatron-Core has an option is checked where the trainer is (``megatron_rlplugin.megatron_options``).
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

FIELD = "trainer.arguments"

# Arguments whose field has another name: (field, value of the switch; None: the argument's own value).
_FIELDS: Mapping[str, tuple[str, Any]] = {
    "accumulate_allreduce_grads_in_fp32": ("grad_reduce_in_fp32", True),
    "apply_layernorm_1p": ("layernorm_zero_centered_gamma", True),
    "ddp_average_in_collective": ("average_in_collective", True),
    "ddp_bucket_size": ("bucket_size", None),
    "disable_bias_linear": ("add_bias_linear", False),
    "no_bias_gelu_fusion": ("bias_activation_fusion", False),
    "no_bias_swiglu_fusion": ("bias_activation_fusion", False),
    "no_check_for_nan_in_loss_and_grad": ("check_for_nan_in_grad", False),
    "no_overlap_p2p_communication": ("overlap_p2p_comm", False),
    "no_rope_fusion": ("apply_rope_fusion", False),
    "norm_epsilon": ("layernorm_epsilon", None),
    "num_experts": ("num_moe_experts", None),
    "num_virtual_stages_per_pipeline_rank": ("virtual_pipeline_model_parallel_size", None),
    "optimizer_cpu_offload": ("optimizer_cpu_offload", True),
    "recompute_activations": ("recompute_granularity", "selective"),
    "swiglu": ("gated_linear_unit", True),
}
# What a run does anyway.
_IMPLIED = ("group_query_attention", "use_mcore_models", "no_load_optim", "no_load_rng", "use_dist_ckpt")
_FOLDER = "comes from the folder of model.path: leave it out"
_ELSEWHERE: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "make_vocab_size_divisible_by",
            "max_position_embeddings",
            "position_embedding_type",
            "rotary_base",
            "rotary_percent",
            "tokenizer_model",
            "tokenizer_type",
            "untie_embeddings_and_output_weights",
            "use_rope_scaling",
            "use_rotary_position_embeddings",
            "vocab_size",
        ),
        _FOLDER,
    ),
    **dict.fromkeys(("train_iters", "train_samples", "exit_interval"), "is run.steps"),
    **dict.fromkeys(
        ("global_batch_size", "rampup_batch_size"), "is rollout.groups_per_step times rollout.group_size trajectories"
    ),
    **dict.fromkeys(
        ("seq_length", "encoder_seq_length"),
        "is rollout.engine.max_model_len; trainer.micro_batch_tokens bounds a micro-batch",
    ),
    **dict.fromkeys(
        ("save", "load", "save_interval", "ckpt_format", "async_save"), "is the run folder's: see [checkpoint]"
    ),
    **dict.fromkeys(("data_path", "split", "mock_data", "dataloader_type", "num_workers"), "is the task's: see [task]"),
    **dict.fromkeys(("eval_iters", "eval_interval"), "is the run's: see [evaluation]"),
    **dict.fromkeys(("log_interval", "tensorboard_dir", "wandb_project"), "is the run's: see [view] and [logging]"),
    "seed": "is run.seed",
    "distributed_timeout_minutes": "is trainer.collective_timeout, in seconds",
    "distributed_backend": "is gloo on a CPU and nccl on a GPU: leave it out",
    "num_layers_per_virtual_pipeline_stage": "give --num-virtual-stages-per-pipeline-rank instead",
    "transformer_impl": "is Transformer Engine where it is installed and there is CUDA: leave it out",
}


class ArgumentMistake(ValueError):
    """``word``: the argument; the message says what to do."""

    def __init__(self, word: str, fix: str) -> None:
        super().__init__(fix)
        self.word = word


def read_arguments(text: str) -> dict[str, Any]:
    """Field or argument name -> value: a switch is true or false, else a whole number, a number, a text, or a list of them.
    Raises ArgumentMistake."""
    found: dict[str, Any] = {}
    for word, given in _arguments(text):
        name = word.removeprefix("--").replace("-", "_")
        if name in _ELSEWHERE:
            raise ArgumentMistake(word, _ELSEWHERE[name])
        if name in _IMPLIED:
            continue
        field, switched = _FIELDS.get(name, (name, None))
        values = [_value(one) for one in given]
        if switched is not None and not values:
            value: Any = switched
        elif not values:
            field, value = (name.removeprefix("no_"), False) if name.startswith("no_") else (field, True)
        else:
            value = values[0] if len(values) == 1 else values
        if found.setdefault(field, value) != value:
            raise ArgumentMistake(word, f"contradicts another argument, which says {field} = {found[field]!r}")
    return found


def _arguments(text: str) -> Iterator[tuple[str, list[str]]]:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ArgumentMistake(text, f"is no list of arguments: {error}") from error
    name, given = "", list[str]()
    for word in words:
        if word.startswith("--"):
            if name:
                yield name, given
            name, _, value = word.partition("=")
            given = [value] if value else []
        elif not name:
            raise ArgumentMistake(word, "must begin with an argument, --name")
        else:
            given.append(word)
    if name:
        yield name, given


def _value(word: str) -> Any:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(word.lower(), word)
