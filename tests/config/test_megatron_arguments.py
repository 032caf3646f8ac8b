"""A Megatron argument list as the trainer's settings: keys of ours, options of Megatron's, one error for what has no place."""

from __future__ import annotations

import pytest

from orchestrator.api import ConfigError
from orchestrator.settings.megatron_arguments import read_arguments
from orchestrator.settings.trainer_settings import TrainerSection

LIST = """
    --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer
    --lr 1e-6 --min-lr 1e-7 --lr-decay-style cosine --weight-decay 0.1 --adam-beta2 0.98 --micro-batch-size 2
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --use-mcore-models
    --accumulate-allreduce-grads-in-fp32 --no-masked-softmax-fusion --num-layers 28 --swiglu --norm-epsilon=1e-6
"""


def test_an_argument_is_the_key_that_means_it_or_an_option_by_the_name_of_its_field() -> None:
    section = TrainerSection.from_dict({"arguments": LIST, "objective": "dapo"})
    assert (section.tensor_parallel, section.pipeline_parallel, section.distributed_optimizer) == (4, 2, True)
    assert (section.learning_rate, section.final_learning_rate, section.lr_decay) == (1e-6, 1e-7, "cosine")
    assert (section.weight_decay, section.adam_beta2, section.micro_batch_size) == (0.1, 0.98, 2)
    assert section.megatron_arguments == {
        "sequence_parallel": True,
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
        "grad_reduce_in_fp32": True,
        "masked_softmax_fusion": False,
        "num_layers": 28,
        "gated_linear_unit": True,
        "layernorm_epsilon": 1e-6,
    }
    again = TrainerSection.from_dict(section.model_dump(exclude_defaults=True))  # as it reaches the trainer's processes
    assert again == section
    assert TrainerSection.from_dict({}).megatron_arguments == {}


def test_a_rate_that_does_not_decay_has_no_end() -> None:
    section = TrainerSection.from_dict({"arguments": "--lr 1e-6 --min-lr 1e-7 --lr-decay-style constant"})
    assert (section.learning_rate, section.final_learning_rate, section.lr_decay) == (1e-6, None, "linear")


def test_values_are_numbers_switches_texts_and_lists() -> None:
    said = read_arguments(
        "--moe-aux-loss-coeff 0.1 1e-3 --attention-backend 'flash' --cp-comm-type a2a p2p --no-a --b true"
    )
    assert said == {
        "moe_aux_loss_coeff": [0.1, 1e-3],
        "attention_backend": "flash",
        "cp_comm_type": ["a2a", "p2p"],
        "a": False,
        "b": True,
    }


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"arguments": "--train-iters 100"}, r"^trainer.arguments = '--train-iters': is run.steps"),
        ({"arguments": "--vocab-size 5"}, r"^trainer.arguments = '--vocab-size': comes from the folder of model.path"),
        ({"arguments": "lr 1"}, r"^trainer.arguments = 'lr': must begin with an argument"),
        ({"arguments": "--lr '1"}, r"^trainer.arguments = .*is no list of arguments"),
        ({"arguments": "--num-layers 2 --num-layers 3"}, r"^trainer.arguments = '--num-layers': contradicts another"),
        (
            {"arguments": "--lr 1e-6", "learning_rate": 1e-5},
            r"^trainer.arguments = '--lr': is 1e-06, but trainer.learning_rate is 1e-05: leave one",
        ),
        ({"arguments": "--lr quick"}, r"^trainer.learning_rate = 'quick'"),
    ],
)
def test_what_has_no_place_or_contradicts_a_key_is_one_error(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainerSection.from_dict(settings)
