"""Streamed gradients are those of one batch; a step is taken whole or not at all. One rank here, several below."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from megatron_rlplugin import parallel_layout  # noqa: E402
from megatron_rlplugin.parallel_layout import ParallelLayout  # noqa: E402
from megatron_rlplugin.stream.gradient_stream import GradientStream, stream_units  # noqa: E402
from megatron_rlplugin.stream.stream_conditions import check_streamable  # noqa: E402
from orchestrator.api import ConfigError, RunError  # noqa: E402
from scripts.bench.probes.megatron.equality import measure, optimizer_tensors, own_gradients, same, weights_of  # noqa: E402
from scripts.bench.probes.megatron.equality_data import (  # noqa: E402
    LENGTH,
    LOSSES,
    Case,
    Sample,
    batch_of,
    build,
    denominator_of,
    forward_step,
)
from scripts.bench.probes.megatron.equality_probe import QUICK, chosen, spawn  # noqa: E402
from tests.support.forked_ranks import first_of_ranks  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron")]
OTHER_MEGATRON = Path(sys.prefix) / "alternates" / "megatron-core-0.19.2"
CASE = Case("one rank", 1)
PATCHED = ("finalize_model_grads_func", "no_sync_func", "grad_sync_func", "param_sync_func", "calculate_per_token_loss")


@pytest.fixture(scope="module", autouse=True)
def process_groups() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the model is tiny: more threads only wait for each other
    parallel_layout.initialize_parallel()
    yield
    parallel_layout.shutdown_parallel()
    torch.set_num_threads(threads)


class Training:
    """A model with its stream, and the trajectories of step 0."""

    def __init__(self, case: Case = CASE) -> None:
        self.case = case
        self.chunks, self.optimizer = build(case)
        self.stream = GradientStream(self.chunks, self.optimizer)
        self.samples = batch_of(case, 0)
        self.total = math.fsum(denominator_of(case, sample) for sample in self.samples)
        self.config = self.chunks[0].config

    def feed(self, samples: list[Sample], step: Any = None, /, **changes: Any) -> list[Any]:
        given = {"num_microbatches": len(samples), "seq_length": LENGTH, "micro_batch_size": 1} | changes
        return self.stream.feed(step or forward_step(self.case), iter(samples), **given)

    def everything(self) -> list[Any]:
        return [*weights_of(self.chunks), *optimizer_tensors(self.optimizer)]

    def step(self) -> Any:
        self.stream.begin_step()
        self.feed(self.samples)
        return self.stream.finish_step(self.total)


def raising_at(case: Case, number: int) -> Any:
    """A forward-step function that dies in this micro-batch, after the ones before it left their gradients."""
    inner, seen = forward_step(case), []

    def step(samples: Iterator[Sample], model: Any) -> Any:
        seen.append(1)
        if len(seen) > number:
            raise OSError("the worker died")
        return inner(samples, model)

    return step


# --- equality


@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_streamed_steps_are_those_of_one_batch(loss: str) -> None:
    check(measure(Case(loss, 1, ParallelLayout(distributed_optimizer=loss == "dapo"), loss=loss), 3))


def check(figures: dict[str, Any]) -> None:
    """The bars of stream-equality; with several replicas a plain mean of their means must be wrong."""
    assert figures["bit_equal"], figures
    assert figures["weights"] == 0.0
    assert figures["uneven"] <= 1e-6, figures
    assert figures["moved"] > 1e-4, "weights that do not move are equal without proof"
    assert figures["control"] is None or figures["control"] > 1e-2, figures
    assert not figures["nan_taken"]
    assert not figures["nan_changed"]


@pytest.mark.parametrize(
    ("world", "names"),
    [
        pytest.param(2, [case.name for case in chosen(quick=True) if case.world == 2], id="2 ranks"),
        pytest.param(
            4,
            ["TP2 x DP2, dist-opt, token-mean", "PP2 x DP2, dapo", "MoE EP2 x EDP2, token-mean"],
            id="4 ranks",
            marks=pytest.mark.long,
        ),
    ],
)
def test_every_layout_streams_as_it_trains_a_batch(world: int, names: list[str]) -> None:
    words = ["--steps", "3", *(word for name in names for word in ("--case", name))]
    figures = first_of_ranks(world, ["-m", "scripts.bench.probes.megatron.equality_probe"], words)
    assert [case["case"] for case in figures] == names
    for case in figures:
        check(case)
    assert any(case["control"] is not None for case in figures)


@pytest.mark.long  # a minute; tests/megatron/test_versions.py has all versions
@pytest.mark.skipif(not OTHER_MEGATRON.is_dir(), reason="the other Megatron-Core is not in alternates/")
def test_the_other_megatron_core_streams_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(OTHER_MEGATRON))
    names = ["DP2, dist-opt, overlapped reduce and gather", "PP2, sequence-mean", "MoE EP2, token-mean"]
    for case in spawn(2, ["--steps", "3", *(word for name in names for word in ("--case", name))]):
        check(case)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_one_gpu_streams_as_it_trains_a_batch() -> None:
    for case in spawn(1, ["--steps", "3", "--case", QUICK[0]]):
        check(case)


# --- a step is whole, or it is not


def test_an_interrupted_stream_cannot_be_finished_and_restarts_without_a_trace() -> None:
    clean, broken = Training(), Training()
    before = broken.everything()
    broken.stream.begin_step()
    broken.feed(broken.samples[:2])
    with pytest.raises(OSError, match="worker died"):
        broken.feed(broken.samples[2:], raising_at(CASE, 3))
    assert any(bool(gradient.any()) for gradient in own_gradients(broken.chunks))
    with pytest.raises(RunError, match="worker died"):
        broken.feed(broken.samples[:1])
    with pytest.raises(RunError, match="interrupted"):
        broken.stream.finish_step()
    assert same(before, broken.everything())
    broken.stream.abandon_step()
    assert broken.step() == clean.step()
    assert same(clean.everything(), broken.everything())


def test_a_total_other_than_expected_is_refused_and_the_step_stays_open() -> None:
    training = Training()
    before = training.everything()
    training.stream.begin_step()
    training.feed(training.samples)
    gradients = own_gradients(training.chunks)
    with pytest.raises(ConfigError, match="denominator"):
        training.stream.finish_step(training.total + 1)
    assert same(before, training.everything())
    assert same(gradients, own_gradients(training.chunks))
    assert training.stream.finish_step(training.total).taken


@pytest.mark.parametrize("advantage", [math.nan, math.inf, 1e30], ids=["NaN", "Inf", "norm overflows"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_with_gradients_that_are_not_finite_is_not_taken(advantage: float, dtype: str) -> None:
    clean, training = (Training(dataclasses.replace(CASE, dtype=dtype)) for _ in range(2))
    clean.step()
    training.step()
    before = training.everything()
    training.stream.begin_step()
    training.feed([dataclasses.replace(training.samples[0], advantage=advantage), *training.samples[1:]])
    result = training.stream.finish_step()
    assert not result.taken
    assert "finite" in result.reason
    assert not math.isfinite(result.grad_norm)
    assert same(before, training.everything())
    assert training.step().grad_norm == clean.step().grad_norm
    assert same(clean.everything(), training.everything())


def test_a_step_without_anything_fed_is_not_taken() -> None:
    training = Training()
    before = training.everything()
    training.stream.begin_step()
    result = training.stream.finish_step()
    assert (result.taken, result.denominator) == (False, 0.0)
    assert same(before, training.everything())


def test_optimizer_state_is_not_needed_before_the_step() -> None:
    training = Training()
    training.step()
    torch_optimizer = training.optimizer.chained_optimizers[0].optimizer
    state = torch_optimizer.state
    before = training.everything()

    class Away:
        def __getitem__(self, key: object) -> object:
            raise AssertionError("optimizer state was touched")

        __setitem__ = __delitem__ = __iter__ = __len__ = __contains__ = __getattr__ = __getitem__

    torch_optimizer.state = Away()
    training.stream.begin_step()
    training.feed(training.samples[:3])
    training.stream.offload()
    training.stream.reload()
    training.feed(training.samples[3:])
    with pytest.raises(AssertionError, match="was touched"):
        training.stream.finish_step()
    training.stream.abandon_step()
    torch_optimizer.state = state
    assert same(before[len(weights_of(training.chunks)) :], optimizer_tensors(training.optimizer))


def test_merge_leaves_the_step_to_the_caller() -> None:
    clean, merged = Training(), Training()
    norm = clean.step().grad_norm
    stream = GradientStream(merged.chunks, None)
    stream.begin_step()
    merged.stream = stream
    merged.feed(merged.samples)
    before = weights_of(merged.chunks)
    assert stream.merge_gradients(merged.total) == merged.total
    assert same(before, weights_of(merged.chunks))
    assert merged.optimizer.step()[:2] == (True, norm)
    assert same(clean.everything(), merged.everything())
    stream.begin_step()
    merged.feed(merged.samples)
    with pytest.raises(ConfigError, match="optimizer"):
        stream.finish_step()
    merged.feed([dataclasses.replace(merged.samples[0], advantage=math.nan)])
    with pytest.raises(RunError, match="finite"):
        stream.merge_gradients()


# --- the state machine, and what a call leaves behind


def test_calls_out_of_order_are_refused() -> None:
    training = Training()
    stream = training.stream
    stream.abandon_step()
    for early in (
        stream.finish_step,
        stream.merge_gradients,
        stream.offload,
        stream.reload,
        lambda: training.feed(training.samples),
    ):
        with pytest.raises(RunError, match="idle"):
            early()
    stream.begin_step()
    with pytest.raises(RunError, match="open"):
        stream.begin_step()
    with pytest.raises(RunError, match="open"):
        stream.reload()
    stream.offload()
    for early in (stream.begin_step, stream.finish_step, stream.offload, lambda: training.feed(training.samples)):
        with pytest.raises(RunError, match="offloaded"):
            early()
    stream.abandon_step()
    assert training.step().taken
    with pytest.raises(RunError, match="idle"):
        stream.finish_step()


def test_offloaded_gradients_free_their_memory_and_come_back_bit_for_bit() -> None:
    training = Training()
    training.stream.begin_step()
    training.feed(training.samples)
    gradients, size = own_gradients(training.chunks), training.stream.gradients.nbytes
    assert size > 0
    training.stream.offload()
    assert sum(tensor.untyped_storage().nbytes() for tensor in training.stream.gradients.tensors) == 0
    training.stream.reload()
    assert same(gradients, own_gradients(training.chunks))
    parameter = next(training.chunks[0].parameters())
    assert parameter.main_grad.data_ptr() >= training.stream.gradients.tensors[0].data_ptr()
    assert training.stream.finish_step(training.total).taken


def test_the_config_is_as_before_after_every_call() -> None:
    training = Training()
    marks = {"finalize_model_grads_func": None, "no_sync_func": training.chunks[0].no_sync, "grad_sync_func": print}
    for name, value in marks.items():
        setattr(training.config, name, value)
    before = {name: getattr(training.config, name) for name in PATCHED}
    training.stream.begin_step()
    training.feed(training.samples[:1])
    assert {name: getattr(training.config, name) for name in PATCHED} == before
    with pytest.raises(OSError, match="worker died"):
        training.feed(training.samples, raising_at(CASE, 1))
    assert {name: getattr(training.config, name) for name in PATCHED} == before
    assert all(group.is_last_microbatch for group in training.chunks[0].bucket_groups)


# --- input


def test_a_mean_is_weighted_by_its_samples_and_refused_without() -> None:
    clean, legacy = Training(), Training()
    norm = clean.step().grad_norm
    inner = forward_step(CASE)

    def means(samples: Iterator[Sample], model: Any) -> Any:
        output, loss = inner(samples, model)

        def mean(logits: Any) -> Any:
            total, count, report = loss(logits)
            return total / count, report

        return output, mean

    weights = [denominator_of(CASE, sample) for sample in legacy.samples]
    legacy.stream.begin_step()
    legacy.feed(legacy.samples, means, samples=weights)
    result = legacy.stream.finish_step(legacy.total)
    assert result.grad_norm == pytest.approx(norm, rel=1e-5)
    legacy.stream.begin_step()
    with pytest.raises(ConfigError, match="samples"):
        legacy.feed(legacy.samples, means)


@pytest.mark.parametrize("denominator", [-1, math.nan, math.inf])
def test_a_denominator_that_no_mean_can_have_is_refused(denominator: float) -> None:
    training = Training()
    inner = forward_step(CASE)

    def step(samples: Iterator[Sample], model: Any) -> Any:
        output, loss = inner(samples, model)
        return output, lambda logits: (loss(logits)[0], denominator, None)

    training.stream.begin_step()
    with pytest.raises(ConfigError, match="denominator"):
        training.feed(training.samples, step)
    with pytest.raises(RunError, match="interrupted"):
        training.stream.finish_step()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_microbatches": 0}, "num_microbatches"),
        ({"forward_only": True}, "forward_only"),
        ({"collect_non_loss_data": True}, "collect_non_loss_data"),
        ({"model": []}, "model"),
        ({"samples": [1.0]}, "samples"),
    ],
)
def test_a_feed_that_cannot_be_is_refused_and_interrupts_nothing(changes: dict[str, Any], field: str) -> None:
    training = Training()
    training.stream.begin_step()
    with pytest.raises(ConfigError, match=field):
        training.feed(training.samples, **changes)
    training.feed(training.samples)
    assert training.stream.finish_step(training.total).taken


MOE_AUXILIARY = {
    "num_moe_experts": 4,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.01,
    "calculate_per_token_loss": False,
}


@pytest.mark.parametrize(
    ("where", "changes", "field"),
    [
        ("ddp", {"average_in_collective": True}, "average_in_collective"),
        ("ddp", {"use_megatron_fsdp": True}, "use_megatron_fsdp"),
        ("ddp", {"reuse_grad_buf_for_mxfp8_param_ag": True}, "reuse_grad_buf_for_mxfp8_param_ag"),
        (
            "ddp",
            {"num_distributed_optimizer_instances": 2, "overlap_grad_reduce": True},
            "num_distributed_optimizer_instances",
        ),
        ("config", {"fp8": "hybrid", "fp8_recipe": "delayed"}, "fp8_recipe"),
        ("config", {"defer_embedding_wgrad_compute": True}, "defer_embedding_wgrad_compute"),
        ("config", {"hybrid_context_parallel": True}, "hybrid_context_parallel"),
        ("config", {"cuda_graph_scope": [SimpleNamespace(name="full_iteration")]}, "cuda_graph_scope"),
        ("config", {"cuda_graph_impl": "full_iteration"}, "cuda_graph_scope"),
        ("config", {"fp16": True}, "fp16"),
        ("config", MOE_AUXILIARY, "calculate_per_token_loss"),
        ("config", {"num_moe_experts": 4, "moe_router_load_balancing_type": "global_aux_loss"}, "load_balancing_type"),
        ("config", {"mtp_num_layers": 1, "calculate_per_token_loss": False}, "calculate_per_token_loss"),
        ("optimizer", {"overlap_param_gather_with_optimizer_step": True}, "overlap_param_gather_with_optimizer_step"),
        ("optimizer", {"fp16": True}, "fp16"),
    ],
)
def test_a_configuration_in_which_streaming_would_be_wrong_is_refused(
    where: str, changes: dict[str, Any], field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training()
    chunk = training.chunks[0]
    target = {"ddp": chunk.ddp_config, "config": chunk.config, "optimizer": training.optimizer.config}[where]
    for name, value in changes.items():
        monkeypatch.setattr(target, name, value, raising=False)
    with pytest.raises(ConfigError, match=field):
        check_streamable(training.chunks, training.optimizer, elastic=True)


def test_gradients_summed_in_bf16_and_models_without_ddp_are_refused() -> None:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    from megatron_rlplugin.model import build_model
    from scripts.bench.probes.megatron.equality_data import shape_of

    case = dataclasses.replace(CASE, dtype="bfloat16")
    (module,) = build_model(shape_of(case), case.dtype)
    _, optimizer = build(case)
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=False)
    with pytest.raises(ConfigError, match="grad_reduce_in_fp32"):
        GradientStream([DistributedDataParallel(module.config, ddp, module)], optimizer)
    with pytest.raises(ConfigError, match="DistributedDataParallel"):
        GradientStream([module], optimizer)
    with pytest.raises(ConfigError, match="model"):
        GradientStream([], optimizer)


# --- which ranks stream together


@pytest.mark.parametrize(
    ("layout", "world"),
    [
        (ParallelLayout(), 4),
        (ParallelLayout(tensor=2), 8),
        (ParallelLayout(pipeline=2), 8),
        (ParallelLayout(tensor=2, pipeline=2), 16),
        (ParallelLayout(context=2, tensor=2), 8),
        (ParallelLayout(expert=2), 8),
        (ParallelLayout(expert=4, pipeline=2), 16),
        (ParallelLayout(expert=2, tensor=2, sequence=True, pipeline=2), 16),
    ],
)
def test_no_group_of_a_replica_is_split_over_units(layout: ParallelLayout, world: int) -> None:
    from megatron.core.parallel_state import RankGenerator

    units = stream_units(layout, world)
    assert sorted(rank for unit in units for rank in unit) == list(range(world))
    data = layout.data_parallel_size(world)
    order = "tp-cp-ep-dp-pp"
    dense = RankGenerator(tp=layout.tensor, ep=1, dp=data, pp=layout.pipeline, cp=layout.context, order=order)
    expert_data = world // (layout.tensor * layout.expert * layout.pipeline)
    sizes = {"tp": layout.tensor, "ep": layout.expert, "dp": expert_data, "pp": layout.pipeline, "cp": 1}
    experts = RankGenerator(**sizes, order=order)
    together = [*dense.get_ranks("tp"), *dense.get_ranks("pp"), *dense.get_ranks("cp")]
    together += [*experts.get_ranks("ep"), *experts.get_ranks("tp")]
    for group in together:
        assert sum(bool(set(group) & set(unit)) for unit in units) == 1, (group, units)
    # and no unit is larger than it must be
    least = math.lcm(layout.tensor * layout.context, layout.tensor * layout.expert) * layout.pipeline
    assert {len(unit) for unit in units} == {least}


def test_unknown_cases_of_the_probe_are_refused() -> None:
    with pytest.raises(ConfigError, match="no such case"):
        chosen(quick=False, names=["DP3"])
