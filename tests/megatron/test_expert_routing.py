"""Routing replay, and auxiliary losses of experts: each layer computes by what belongs to its tokens, on any layout."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from megatron_rlplugin import parallel_layout  # noqa: E402
from megatron_rlplugin.megatron_options import sort_options  # noqa: E402
from megatron_rlplugin.objective.vocab_logprobs import logprobs  # noqa: E402
from megatron_rlplugin.trainer.learner import Learner, Rendezvous, check_trainer  # noqa: E402
from megatron_rlplugin.trainer.megatron_trainer import MegatronTrainer  # noqa: E402
from megatron_rlplugin.trainer.micro_batches import MicroBatchLimits, micro_batch, supervised_row  # noqa: E402
from megatron_rlplugin.weights.tensor_places import tensor_pieces  # noqa: E402
from orchestrator.api import ConfigError, RunError, TrainBatch, TrainSample  # noqa: E402
from orchestrator.settings.trainer_settings import TrainerSection, TrainerSettings  # noqa: E402
from orchestrator.transfer.turns.routed_experts import UNKNOWN, pack_experts  # noqa: E402
from scripts.bench.probes.megatron.trainer_probe import make_batch  # noqa: E402
from tests.support.family_models import VOCABULARY, write_family  # noqa: E402
from tests.support.forked_ranks import ForkedRank, wait_for_all  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron")]
TOLERANCE = 1e-5  # of gradients, relative to the largest of a tensor; fp32
LENGTHS = (17, 17, 9, 9)  # no padding within a micro-batch of two: a z loss is then the same on any number of ranks
AUXILIARY = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.5, "moe_z_loss_coeff": 0.25}
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@pytest.fixture(autouse=True)
def process_groups() -> Iterator[None]:
    yield
    parallel_layout.shutdown_parallel()


@pytest.fixture(scope="module", params=["qwen3-moe", "deepseek-v3", "gpt-oss"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_family(tmp_path_factory.mktemp("models") / request.param, request.param))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_family(tmp_path_factory.mktemp("models") / "model", "qwen3-moe"))


def make_learner(folder: str, *, replay: bool = True, ranks: Rendezvous | None = None, **given: Any) -> Learner:
    options = sort_options(given.pop("megatron", {}))
    return Learner(folder, TrainerSettings(**given), 4, "float32", ranks, options=options, replay=replay)


def rows_of(lengths: Sequence[int]) -> list[Any]:
    draw = torch.Generator().manual_seed(3)
    ids = [torch.randint(VOCABULARY, (length,), generator=draw).tolist() for length in lengths]
    return [supervised_row(each, [0] * 3 + [1] * (len(each) - 3)) for each in ids]


def chosen(shape: Any, tokens: int, seed: int = 5) -> Any:
    """Random experts of a row, each token's different from each other, int16 ``[tokens, layers, choices]``."""
    draw = torch.Generator().manual_seed(seed)
    odds = torch.rand(tokens, shape.num_hidden_layers, shape.num_experts, generator=draw)
    return odds.topk(shape.num_experts_per_tok).indices.to(torch.int16).numpy()


def batches_of(learner: Learner, lengths: Sequence[int] = LENGTHS, mean: str = "sequence-mean", seed: int = 5) -> Any:
    """Two micro-batches of two rows, with random experts."""
    rows = [replace(row, experts=chosen(learner.shape, len(row), seed + k)) for k, row in enumerate(rows_of(lengths))]
    limits = MicroBatchLimits(2, multiple=learner.layout.row_multiple)
    return [micro_batch(rows, members, limits, mean) for members in ((0, 1), (2, 3))]


def loss_of(learner: Learner, factor: float = 1.0) -> Any:
    def total(output: Any, batch: Any) -> Any:
        logp_T = logprobs(output, batch.tokens.targets_T, group=learner.tensor_group)
        return -factor * (logp_T * batch.tokens.weights_T).sum(), logp_T.detach()

    return total


def routers(learner: Learner) -> list[Any]:
    return [module for chunk in learner.chunks for module in chunk.modules() if hasattr(module, "router_replay")]


def watch(learner: Learner) -> list[list[Any]]:
    """By router, which experts each of its calls came to: bool ``[tokens, experts]``."""
    seen: list[list[Any]] = []
    for router in routers(learner):
        seen.append(calls := [])
        router.register_forward_hook(lambda module, inputs, output, calls=calls: calls.append(output[1].clone()))
    return seen


def gradients(learner: Learner, batches: Sequence[Any], factor: float = 1.0) -> dict[str, Any]:
    learner.begin_step()
    learner.feed(batches, loss_of(learner, factor))
    learner.stream.merge_gradients()
    chunk = learner.chunks[0]
    return {name: parameter.main_grad.clone() for name, parameter in chunk.named_parameters()}


def test_the_experts_that_were_said_are_used_and_no_others(folder: str) -> None:
    learner = make_learner(folder)
    seen, (batch, _) = watch(learner), batches_of(learner)
    hidden = batch.experts_BSLK.clone()
    hidden[0, 5:9] = UNKNOWN
    learner.logprobs([replace(batch, experts_BSLK=None)], 1.0)
    learner.logprobs([replace(batch, experts_BSLK=hidden)], 1.0)
    for router, (own, replayed) in zip(routers(learner), seen, strict=True):
        told = batch.experts_BSLK[:, :, router.layer_number - 1].transpose(0, 1).flatten(0, 1).long()
        wanted = torch.zeros_like(own).scatter(1, told, True)
        silent = torch.zeros(16, 2, dtype=torch.bool)
        silent[5:9, 0] = True
        known = ~silent.flatten()
        assert torch.equal(replayed[known], wanted[known])
        assert not torch.equal(own[known], wanted[known])
        if router is routers(learner)[0]:  # what comes into the others differs
            assert torch.equal(replayed[~known], own[~known])


def test_its_own_experts_replayed_change_nothing(folder: str) -> None:
    learner = make_learner(folder)
    seen, batches = watch(learner), batches_of(learner)
    plain = [replace(batch, experts_BSLK=None) for batch in batches]
    before = learner.logprobs(plain, 1.0)
    for place, batch in enumerate(batches):
        for router, calls in zip(routers(learner), seen, strict=True):
            own = calls[place].long().topk(learner.shape.num_experts_per_tok).indices
            shape = batch.experts_BSLK.shape
            batch.experts_BSLK[:, :, router.layer_number - 1] = own.view(shape[1], shape[0], -1).transpose(0, 1)
    # Not the same bits: where the scores of a token's experts are added up, it is in another order.
    for found, wanted in zip(learner.logprobs(batches, 1.0), before, strict=True):
        assert torch.allclose(found, wanted, atol=1e-5)
    wanted = gradients(learner, plain)
    for name, found in gradients(learner, batches).items():
        assert float((found - wanted[name]).abs().max()) <= TOLERANCE * float(wanted[name].abs().max()), name


def test_the_router_learns_from_the_experts_that_were_said(mixture: str) -> None:
    learner = make_learner(mixture)
    batches = batches_of(learner)
    found = gradients(learner, batches)
    other = gradients(learner, [replace(batch, experts_BSLK=None) for batch in batches])
    moved = [name for name in found if name.endswith("router.weight") and not torch.equal(found[name], other[name])]
    assert len(moved) == 4


def test_a_layer_that_is_computed_again_goes_by_its_own_micro_batch(mixture: str) -> None:
    plain = make_learner(mixture, megatron=AUXILIARY)
    wanted = gradients(plain, batches_of(plain))
    parallel_layout.shutdown_parallel()
    learner = make_learner(mixture, megatron=AUXILIARY | RECOMPUTE)
    learner.logprobs(batches_of(learner, seed=50), 1.0)  # leaves nothing behind
    for name, found in gradients(learner, batches_of(learner)).items():
        assert torch.equal(found, wanted[name]), name


@pytest.mark.parametrize("mean", ["token-mean", "sequence-mean", "length-normalized"])
def test_auxiliary_losses_count_as_their_micro_batch_does(mixture: str, mean: str) -> None:
    """Of the last layer's router, against the formulas (Switch Transformer, section 2.2; ST-MoE, equation 5)."""
    learner = make_learner(mixture, megatron=AUXILIARY, replay=False)
    last = routers(learner)[-1]
    inputs: list[Any] = []
    last.register_forward_pre_hook(lambda module, given: inputs.append(given[0].detach().clone()))
    batches = batches_of(learner, (17, 12, 9, 6), mean)  # with padding, which counts nowhere
    found = gradients(learner, batches, 0.0)
    expected, total = torch.zeros_like(last.weight), 0.0
    for batch, given in zip(batches, inputs, strict=True):
        weight = last.weight.detach().clone().requires_grad_()
        real = ~batch.padding_BS().transpose(0, 1).flatten()
        logits = (given.flatten(0, 1) @ weight.T)[real]
        odds = logits.softmax(-1)
        share = torch.zeros_like(odds).scatter(1, odds.topk(2).indices, 1.0).mean(0) / 2
        balance = 0.5 * 4 * (share * odds.mean(0)).sum()
        z = 0.25 * (logits.logsumexp(-1) ** 2).mean()
        (gradient,) = torch.autograd.grad(balance + z, weight)
        expected += batch.tokens.denominator * gradient
        total += batch.tokens.denominator
    (name,) = [name for name, value in learner.chunks[0].named_parameters() if value is last.weight]
    assert torch.allclose(found[name], expected / total, rtol=1e-4, atol=1e-7)
    assert float(expected.abs().max()) > 0


RANK = """
import json, sys, torch
from megatron_rlplugin.trainer.learner import Rendezvous
from tests.megatron.test_expert_routing import measure
rank, world, folder, given, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4]), sys.argv[5]
torch.set_num_threads(1)
torch.save(measure(folder, given, Rendezvous(rank, world, f"file://{out}/meet")), f"{out}/{rank}.pt")
"""


def measure(folder: str, given: dict[str, Any], ranks: Rendezvous | None = None) -> list[Any]:
    """The merged gradients of what this rank holds, with replayed experts and auxiliary losses."""
    from megatron.core import parallel_state

    learner = make_learner(folder, ranks=ranks, **given)
    replica, count = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    learner.begin_step()
    learner.feed(batches_of(learner)[replica::count], loss_of(learner))
    learner.stream.merge_gradients()
    return [
        (piece.name, piece.shape, piece.dim, piece.start, piece.stop, piece.cut_from(piece.parameter.main_grad))
        for piece in tensor_pieces(learner.chunks)
        if not piece.keeps_dtype
    ]


LAYOUTS = {
    "pipeline, recomputed": {"pipeline_parallel": 2, "megatron": AUXILIARY | RECOMPUTE},
    "tensor": {"tensor_parallel": 2, "megatron": AUXILIARY},
    "expert": {"expert_parallel": 2, "data_parallel": 2, "megatron": AUXILIARY},
    "context": {"context_parallel": 2, "megatron": AUXILIARY},
}


@pytest.mark.long
@pytest.mark.parametrize("case", LAYOUTS)
def test_two_ranks_have_the_gradients_of_one(mixture: str, case: str, tmp_path: Path) -> None:
    given = LAYOUTS[case]
    alone: dict[str, Any] = {}
    for name, shape, dim, start, stop, gradient in measure(mixture, {"megatron": given["megatron"]}):
        place = alone.setdefault(name, torch.zeros(shape))
        (place if dim < 0 else place.narrow(dim, start, stop - start)).copy_(gradient)
    words = (mixture, json.dumps(given), str(tmp_path))
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = wait_for_all([ForkedRank("-c", RANK, str(rank), "2", *words, env=environment) for rank in range(2)], 200)
    assert [rank.code for rank in ended] == [0, 0], ended
    seen = set()
    for rank in range(2):
        for name, _, dim, start, stop, gradient in torch.load(tmp_path / f"{rank}.pt", weights_only=True):
            wanted = alone[name] if dim < 0 else alone[name].narrow(dim, start, stop - start)
            assert float((gradient - wanted).abs().max() / alone[name].abs().max()) <= TOLERANCE, name
            seen.add(name)
    assert seen == alone.keys()


def of_version(samples: Sequence[TrainSample], version: int) -> tuple[TrainSample, ...]:
    return tuple(replace(one, versions=((version, sum(count for _, count in one.versions)),)) for one in samples)


def test_a_trainer_says_what_it_replayed_and_what_the_gap_is_without(mixture: str) -> None:
    settings = {"routing_replay": True, "learning_rate": 1e-3, "micro_batch_size": 4}
    trainer = MegatronTrainer(model=mixture, settings=settings, total_steps=4)
    shape, samples = trainer._learner.shape, []
    for place, sample in enumerate(make_batch(0).samples):
        tokens = len(sample.token_ids) - 1 - place % 2  # of every other one the last input is not known
        said = pack_experts(chosen(shape, tokens, place).astype("uint8"), 0)
        samples.append(replace(sample, experts=() if said is None else (said,)))
    metrics = asyncio.run(trainer.train_step(TrainBatch(0, 0, of_version(samples, 0))))
    inputs = sum(len(sample.token_ids) - 1 for sample in samples)
    assert metrics.values["routing_replayed"] == pytest.approx(1 - len(samples) // 2 / inputs)
    gap = asyncio.run(trainer.logprob_gap(of_version(samples, 1)))
    assert gap["own_experts"] != gap["mean"]
    after = asyncio.run(trainer.train_step(TrainBatch(1, 1, of_version(samples, 0))))
    assert after.values["logprob_gap_own_experts"] != after.values["logprob_gap_mean"]
    other = pack_experts(chosen(shape, 3).astype("uint8")[:, :2], 0)
    assert other is not None
    wrong = replace(of_version(samples, 2)[0], experts=(other,))
    with pytest.raises(RunError, match="cover 2 layers with 2 experts per token, the model has 4 layers"):
        asyncio.run(trainer.train_step(TrainBatch(2, 2, (wrong,))))


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("qwen3", {"routing_replay": True}, r"^trainer.routing_replay = True: the model has no experts"),
        (
            "qwen3",
            {"megatron": {"moe_z_loss_coeff": 0.1}},
            r"^trainer.megatron.moe_z_loss_coeff = 0.1: the model has no",
        ),
        (
            "qwen3-moe",
            {"megatron": {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.1}},
            r"^trainer.megatron.moe_router_load_balancing_type = 'global_aux_loss': must be one of aux_loss",
        ),
        (
            "qwen3-moe",
            {"megatron": {"moe_aux_loss_coeff": 0.1}},
            r"^trainer.megatron.moe_router_load_balancing_type = 'none': goes with moe_aux_loss_coeff",
        ),
        (
            "qwen3-moe",
            {"megatron": {"moe_router_load_balancing_type": "aux_loss"}},
            r"^trainer.megatron.moe_router_load_balancing_type = 'aux_loss': goes with moe_aux_loss_coeff",
        ),
        (
            "qwen3-moe",
            {"routing_replay": True, "megatron": {"moe_router_fusion": True}},
            r"^trainer.megatron.moe_router_fusion = True: must be off with trainer.routing_replay",
        ),
        (
            "qwen3-moe",
            {"megatron": {"moe_enable_routing_replay": True}},
            r"^trainer.megatron.moe_enable_routing_replay = True: is trainer.routing_replay",
        ),
    ],
)
def test_what_would_do_nothing_or_something_else_is_refused(
    tmp_path: Path, family: str, settings: dict[str, Any], message: str
) -> None:
    folder = str(write_family(tmp_path / "model", family))
    with pytest.raises(ConfigError, match=message):
        check_trainer(folder, TrainerSection.from_dict(settings), "float32")
