"""``[trainer.megatron]``: Megatron-Core's own options, passed on by name or refused by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from megatron_rlplugin import parallel_layout  # noqa: E402
from megatron_rlplugin.megatron_options import OWNED, sort_options  # noqa: E402
from megatron_rlplugin.trainer.learner import Learner, check_trainer  # noqa: E402
from orchestrator.api import ConfigError  # noqa: E402
from orchestrator.settings.trainer_settings import TrainerSection  # noqa: E402
from scripts.bench.probes.megatron.trainer_probe import tiny_folder  # noqa: E402
from tests.support.megatron_training import NEWEST  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron")


def test_options_reach_every_config_that_has_them() -> None:
    found = sort_options(
        {
            "recompute_granularity": "selective",
            "recompute_modules": ["core_attn"],
            "attention_backend": "fused",
            "overlap_grad_reduce": True,
            "optimizer_cpu_offload": True,
            "optimizer_offload_fraction": 1,  # an integer where Megatron says float
            "exp_avg_dtype": "bfloat16",
            "overlap_param_gather": True,
            "sequence_parallel": True,
        }
    )
    assert found.transformer["recompute_modules"] == ["core_attn"]
    assert found.transformer["attention_backend"].name == "fused"
    assert found.ddp == {"overlap_grad_reduce": True, "overlap_param_gather": True}
    assert found.optimizer == {
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": 1.0,
        "exp_avg_dtype": torch.bfloat16,
        "overlap_param_gather": True,
    }
    assert (found.sequence_parallel, found.virtual_pipeline) == (True, None)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("recompute_granularty", "full", "did you mean 'recompute_granularity'"),
        ("num_layers", 4, "config.json of model.path"),
        ("lr", 1e-4, "trainer.learning_rate"),
        ("tensor_model_parallel_size", 2, "trainer.tensor_parallel"),
        ("fp16", True, "model.dtype = 'bfloat16'"),
        ("grad_reduce_in_fp32", False, "must be true"),
        ("context_parallel_size", 2, "is trainer.context_parallel"),
        ("moe_enable_routing_replay", True, "is trainer.routing_replay"),
        ("moe_expert_capacity_factor", 1.0, "another model than the one that sampled"),
        ("moe_router_force_load_balancing", True, "another model than the one that sampled"),
        ("expert_tensor_parallel_size", 1, "by trainer.tensor_parallel"),
        ("hybrid_context_parallel", True, "by trainer.context_parallel alone"),
        ("transformer_impl", "local", "leave it out"),
        ("fp8_param", True, "may be a copy"),
        ("fp8_param_gather", True, "may be a copy"),
        ("fp4_param", True, "may be a copy"),
        ("fp4_param_gather", True, "may be a copy"),
        ("timers", "x", "a function"),
        ("overlap_grad_reduce", "maybe", "must be boolean"),
        ("recompute_granularity", "half", "must be 'full' or 'selective'"),
        ("recompute_num_layers", "two", "must be"),
        ("exp_avg_dtype", "bf17", "torch dtype"),
        ("attention_backend", "quick", "must be one of"),
    ],
)
def test_what_cannot_be_set_is_refused_by_name(key: str, value: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=rf"^trainer\.megatron\.{key} = ") as error:
        sort_options({key: value})
    assert says in str(error.value)


def test_what_is_decided_elsewhere_exists_in_some_version() -> None:
    """A name that no version had would be refused as ours where it should be refused as unknown."""
    import dataclasses

    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    classes = (TransformerConfig, DistributedDataParallelConfig, OptimizerConfig)
    names = {field.name for cls in classes for field in dataclasses.fields(cls)}
    core = NEWEST / "megatron" / "core"
    newest = core / "transformer/transformer_config.py", core / "distributed/distributed_data_parallel_config.py"
    if core.exists():
        for file in newest:
            names |= set(re.findall(r"^    (\w+): ", file.read_text(encoding="utf-8"), re.MULTILINE))
    else:
        newer = ("mtp_", "use_mup", "moe_router_force_biased", "moe_expert_rank", "fp4_param_gather")
        names |= {name for name in OWNED if name.startswith(newer)}
    assert names >= OWNED.keys()


@pytest.mark.parametrize(
    ("settings", "field", "says"),
    [
        (
            {"megatron": {"recompute_granularity": "full"}},
            "trainer.megatron.recompute_granularity",
            "Megatron-Core refuses",
        ),
        ({"megatron": {"sequence_parallel": True}}, "layout.sequence", "tensor parallelism"),
        ({"megatron": {"virtual_pipeline_model_parallel_size": 2}}, "layout.virtual", "pipeline parallelism"),
        ({"tensor_parallel": 3}, "model.num_key_value_heads", "TP = 3"),
        ({"pipeline_parallel": 4}, "model.num_hidden_layers", "4 pipeline stages"),
        (
            {"megatron": {"use_precision_aware_optimizer": True}},
            "trainer.megatron.use_precision_aware_optimizer",
            "needs trainer.distributed_optimizer = true",
        ),
        (
            {"megatron": {"exp_avg_dtype": "bfloat16"}},
            "trainer.megatron.exp_avg_dtype",
            "'bfloat16': needs trainer.megatron.use_precision_aware_optimizer = true",
        ),
        (
            {"megatron": {"overlap_param_gather": True}},
            "trainer.megatron.overlap_param_gather",
            "distributed_optimizer",
        ),
        (
            {"megatron": {"fp8": "hybrid"}, "data_parallel": 2},
            "trainer.megatron.fp8_recipe",
            "'delayed': must be another one",
        ),
        ({"loss": "math:sqrt"}, "trainer.loss", "tried with 5 tokens"),
        ({"expert_parallel": 2, "data_parallel": 2}, "layout.expert", "no experts"),
    ],
)
def test_what_does_not_fit_the_model_is_refused_before_a_rank_starts(
    settings: dict[str, Any], field: str, says: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as error:
        check_trainer(tiny_folder(tmp_path), TrainerSection.from_dict(settings), "float32")
    assert error.value.field == field
    assert says in str(error.value)


@pytest.mark.engine
@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"gradient_accumulation_fusion": True}, "trainer.megatron.gradient_accumulation_fusion"),
        ({"optimizer": "muon"}, "trainer.megatron.optimizer"),
        ({"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}, "trainer.megatron"),  # there is no CUDA
    ],
)
def test_what_megatron_core_raises_when_it_builds_is_an_error_of_the_option(
    options: dict[str, Any], field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    def no_cuda() -> None:
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(torch.cuda, "current_stream", no_cuda)  # vLLM on a CPU, in this process, gives one
    section = TrainerSection.from_dict({"megatron": options})
    try:
        with pytest.raises(ConfigError, match="Megatron-Core refuses it") as error:
            Learner(tiny_folder(tmp_path), section, 4, "float32", options=sort_options(section.megatron))
    finally:
        parallel_layout.shutdown_parallel()
    assert error.value.field == field


def test_stages_have_numbers_of_layers_that_were_given(tmp_path: Path) -> None:
    folder, piped = tiny_folder(tmp_path, layers=14), {"pipeline_parallel": 4}
    with pytest.raises(ConfigError, match=r"first one another number.*num_layers_in_first_pipeline_stage = 2$"):
        check_trainer(folder, TrainerSection.from_dict(piped), "float32")
    for first, fits in ((2, True), (3, False)):
        section = TrainerSection.from_dict({**piped, "megatron": {"num_layers_in_first_pipeline_stage": first}})
        if fits:
            check_trainer(folder, section, "float32")
        else:
            with pytest.raises(ConfigError, match=r"first_pipeline_stage = 3: Megatron-Core refuses it"):
                check_trainer(folder, section, "float32")


def test_an_argument_list_may_say_what_is_so_and_nothing_else_of_it(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path)
    said = "--num-layers 2 --no-gradient-accumulation-fusion --disable-bias-linear --swiglu --recompute-activations"
    section = TrainerSection.from_dict({"arguments": said})
    options = sort_options(section.megatron, section.megatron_arguments)
    assert options.transformer == {"recompute_granularity": "selective", "gradient_accumulation_fusion": False}
    assert options.agreed == {"num_layers": 2, "add_bias_linear": False, "gated_linear_unit": True}
    check_trainer(folder, section, "float32")
    for wrong, message in (
        (
            "--num-layers 3",
            r"^trainer\.arguments: num_layers = 3: is 2 here; it comes from config\.json of model\.path",
        ),
        ("--use-mup", r"^trainer\.arguments: use_mup = True: Megatron-Core \S+ has no such option"),
        ("--fp16", r"^trainer\.arguments: fp16 = True: is False here; it must be off"),
        (
            "--recompute-granularty full",
            r"^trainer\.arguments: recompute_granularty = 'full': .*did you mean 'recompute_gran",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            check_trainer(folder, TrainerSection.from_dict({"arguments": wrong}), "float32")
    both = {"arguments": "--overlap-grad-reduce", "megatron": {"overlap_grad_reduce": False}}
    with pytest.raises(
        ConfigError, match=r"^trainer\.megatron\.overlap_grad_reduce = False: trainer\.arguments sets it to True"
    ):
        check_trainer(folder, TrainerSection.from_dict(both), "float32")
