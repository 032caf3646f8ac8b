"""Which trajectories meet in a micro-batch or in a row, that they do not see each other there, and what is counted."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from megatron_rlplugin import (  # noqa: E402
    model,
    parallel_layout,
)
from megatron_rlplugin.model import read_shape  # noqa: E402
from megatron_rlplugin.objective.policy_loss import token_weights  # noqa: E402
from megatron_rlplugin.trainer import row_packing  # noqa: E402
from megatron_rlplugin.trainer.megatron_trainer import MegatronTrainer  # noqa: E402
from megatron_rlplugin.trainer.micro_batches import (  # noqa: E402
    ArrivalPacker,
    LengthPool,
    MicroBatchLimits,
    TrainRow,
    micro_batch,
    plan_micro_batches,
    row_of,
    usable_samples,
)
from megatron_rlplugin.trainer.replicas import Dealer  # noqa: E402
from megatron_rlplugin.trainer.training_work import TrainingWork  # noqa: E402
from orchestrator.api import RunError, TrainBatch  # noqa: E402
from scripts.bench.probes.megatron.trainer_probe import VOCABULARY, make_batch, tiny_folder  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron")]


@pytest.fixture(scope="module", autouse=True)
def process_groups() -> Iterator[None]:
    parallel_layout.initialize_parallel()
    yield
    parallel_layout.shutdown_parallel()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_folder(tmp_path_factory.mktemp("model"))


def make_trainer(folder: str, **settings: Any) -> MegatronTrainer:
    return MegatronTrainer(model=folder, settings={"learning_rate": 1e-2, **settings}, total_steps=10, seed=3)


def rows_of(batch: TrainBatch, max_token_lag: int | None = None) -> list[TrainRow]:
    return [row_of(sample, batch.version, max_token_lag) for sample in batch.samples]


def gradients_of(trainer: MegatronTrainer) -> Any:
    return torch.cat([parameter.main_grad.flatten() for parameter in trainer._learner.parameters()]).clone()


# -- which meet ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("pack", "tokens"), [(None, None), (40, None), (None, 50)])
@pytest.mark.parametrize("size", [1, 3, 4, 7, 64])
def test_micro_batches_by_arrival_do_not_depend_on_how_the_groups_were_added(
    size: int, pack: int | None, tokens: int | None
) -> None:
    limits = MicroBatchLimits(size, "arrival", pack, tokens=tokens)
    for seed in range(20):
        rng = random.Random(seed)
        batch = make_batch(seed, groups=rng.randint(1, 8), members=rng.randint(1, 5))
        rows = rows_of(batch)
        members = [(index, row.group, len(row)) for index, row in enumerate(rows)]
        groups = [[m for m in members if m[1] == name] for name in dict.fromkeys(row.group for row in rows)]
        arrival, found = ArrivalPacker(limits), []
        while groups:
            count = rng.randint(1, len(groups))
            found += arrival.add([m for group in groups[:count] for m in group])
            groups = groups[count:]
        found += arrival.rest()
        assert found == plan_micro_batches(rows, range(len(rows)), limits)
        assert [index for part in found for index in part] == list(range(len(rows)))
        for part in found:
            assert len(part) <= size
            assert pack is None or sum(len(rows[index]) for index in part) <= pack
            assert tokens is None or len(part) == 1 or padded([len(rows[index]) for index in part]) <= tokens


def padded(lengths: list[int]) -> int:
    """Tokens of these rows side by side."""
    return len(lengths) * max(lengths)


@pytest.mark.parametrize("order", ["length", "arrival"])
def test_a_budget_of_tokens_bounds_every_micro_batch_of_rows_of_any_length(order: str) -> None:
    """64 rows of 8,192 tokens would be one micro-batch by their number alone."""
    random_ = random.Random(1)
    lengths = [random_.choice([60, 300, 2_000, 8_192, 40_000]) for _ in range(200)]
    rows = [
        TrainRow(f"t{k}", f"g{k // 4}", np.zeros(n, np.int64), *[np.zeros(1, np.int64)] * 5)  # type: ignore[arg-type]
        for k, n in enumerate(lengths)
    ]
    plans = plan_micro_batches(rows, range(200), MicroBatchLimits(64, order, tokens=32_768))
    assert sorted(index for part in plans for index in part) == list(range(200))
    for part in plans:
        assert len(part) <= 64
        assert len(part) == 1 or padded([lengths[index] for index in part]) <= 32_768
    assert max(map(len, plans)) > 4  # short ones still share
    without = plan_micro_batches(rows, range(200), MicroBatchLimits(64, order))
    assert max(padded([lengths[index] for index in part]) for part in without) > 20 * 32_768


def arriving(rows: list[TrainRow]) -> list[list[tuple[int, str, int]]]:
    """The groups of these rows, as they are added."""
    members = [(index, row.group, len(row)) for index, row in enumerate(rows)]
    return [[m for m in members if m[1] == name] for name in dict.fromkeys(row.group for row in rows)]


def rows_of_lengths(lengths: list[int]) -> list[TrainRow]:
    """In groups of eight."""
    return [
        TrainRow(f"t{k}", f"g{k // 8}", np.zeros(n, np.int64), *[np.zeros(1, np.int64)] * 5)  # type: ignore[arg-type]
        for k, n in enumerate(lengths)
    ]


@given(st.lists(st.integers(2, 400), min_size=1, max_size=96), st.integers(1, 20), st.integers(1, 20), st.data())
def test_a_pool_of_lengths_pads_little_begins_in_time_and_does_not_depend_on_how_groups_were_added(
    lengths: list[int], size: int, held: int, data: st.DataObject
) -> None:
    rows, limits = rows_of_lengths(lengths), MicroBatchLimits(size, "arrival", tokens=800, held=held)
    pool, found, added = LengthPool(limits), [], 0
    groups = arriving(rows)
    first = ArrivalPacker(limits).add([member for group in groups for member in group])
    needed = len(first[0]) if first else len(rows)  # trajectories that fill a micro-batch in the order of arrival
    while groups:
        count = data.draw(st.integers(1, len(groups)))
        added += sum(map(len, groups[:count]))
        found += pool.add([member for group in groups[:count] for member in group])
        groups = groups[count:]
        assert (
            found or added <= needed + max(held, 8) + 8
        )  # the order of arrival begins a group later than ``needed``, too
    found += pool.rest()
    assert found == plan_micro_batches(rows, range(len(rows)), limits)
    assert sorted(index for part in found for index in part) == list(range(len(rows)))
    for part in found:
        own = [lengths[index] for index in part]
        assert len(part) <= size
        assert len(part) == 1 or padded(own) <= min(800, 1.1 * sum(own))


def test_replicas_get_equal_work_whatever_the_lengths(folder: str) -> None:
    shape = read_shape(folder)
    flops, limits = TrainingWork.of_model(shape), MicroBatchLimits(64, "arrival", tokens=4_096)
    rng = random.Random(2)
    rows = rows_of_lengths([rng.choice([60, 300, 1_000, 4_000]) for _ in range(120)])
    plans = plan_micro_batches(rows, range(120), limits)
    work = [flops.of_plan(rows, members, limits) for members in plans]
    for in_step in (False, True):
        dealt = [Dealer(index, 4, in_step=in_step).deal_micro_batches(plans, work, last=True)[1] for index in range(4)]
        shares = [[share.members for share in own if not share.idle] for own in dealt]
        assert sorted(map(sorted, (m for own in shares for m in own))) == sorted(map(sorted, plans))
        loads = [sum(flops.of_plan(rows, members, limits) for members in own) for own in shares]
        assert max(loads) < 1.1 * sum(work) / 4
        assert len({len(own) for own in dealt}) == 1 or not in_step
    turns = [sum(work[place] for place in range(k, len(work), 4)) for k in range(4)]
    assert max(turns) > 1.15 * sum(work) / 4, "dealt in turn they would be as even, and this test shows nothing"


def test_micro_batches_are_dealt_alike_whether_they_come_one_by_one_or_all_at_once() -> None:
    rng = random.Random(5)
    plans, work = [[k] for k in range(23)], [rng.random() for _ in range(23)]
    for in_step in (False, True):
        for index in range(3):
            whole = Dealer(index, 3, in_step=in_step).deal_micro_batches(plans, work, last=True)[1]
            dealer, parts = Dealer(index, 3, in_step=in_step), []
            for k in range(23):
                parts += dealer.deal_micro_batches(plans[k : k + 1], work[k : k + 1], last=k == 22)[1]
            assert parts == whole


def test_attention_counts_with_the_square_of_a_row_and_experts_as_they_are_chosen(folder: str) -> None:
    """By hand: two layers, hidden 8, 4 heads of 2 with 2 for keys and values, feed forward 16, vocabulary 10."""
    shape = replace(
        read_shape(folder), num_hidden_layers=2, hidden_size=8, num_attention_heads=4, head_dim=2,
        num_key_value_heads=2, intermediate_size=16, vocab_size=10,
    )  # fmt: skip
    rows, limits = rows_of_lengths([5, 3]), MicroBatchLimits(8)
    layer = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16
    one = 5 * 2 * 2 * layer + 2 * 2 * 8 * 5 * 5  # half of 2 x 2 x 5 x 5 x 8 for each layer
    assert TrainingWork.of_model(shape).of_plan(rows, [0, 1], limits) == 2 * one + 2 * 2 * 8 * 10
    mixture = replace(shape, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=6)
    each = TrainingWork.of_model(mixture).token / 2 / 2
    assert each == 8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 6 * 2 + 8 * 4


def test_a_group_is_split_only_when_it_does_not_fit_whole() -> None:
    def members(*sizes: int) -> list[tuple[int, str, int]]:
        names = [f"g{group}" for group, size in enumerate(sizes) for _ in range(size)]
        return [(index, name, 10) for index, name in enumerate(names)]

    def sizes(limits: MicroBatchLimits, *groups: int) -> list[int]:
        arrival = ArrivalPacker(limits)
        return [len(part) for part in arrival.add(members(*groups)) + arrival.rest()]

    assert sizes(MicroBatchLimits(4, "arrival"), 2, 2, 3, 1) == [4, 4]
    assert sizes(MicroBatchLimits(4, "arrival"), 3, 2, 2) == [3, 4]
    assert sizes(MicroBatchLimits(4, "arrival"), 1, 6, 2) == [1, 4, 4]
    assert sizes(MicroBatchLimits(64, "arrival", 30), 2, 2, 3) == [2, 2, 3]
    assert sizes(MicroBatchLimits(64, "arrival", 30), 4, 1) == [3, 2]


def test_first_fit_decreasing_fills_bins_within_its_bounds() -> None:
    for seed in range(30):
        rng = random.Random(seed)
        lengths = [rng.randint(1, 50) for _ in range(rng.randint(1, 60))]
        capacity, most = rng.randint(50, 120), rng.randint(1, 8)
        bins = row_packing.first_fit_decreasing(range(len(lengths)), lengths, capacity, most)
        assert sorted(index for part in bins for index in part) == list(range(len(lengths)))
        assert all(sum(lengths[i] for i in part) <= capacity and len(part) <= most for part in bins)
        enough = max(-(-sum(lengths) // capacity), -(-len(lengths) // most))
        assert enough <= len(bins) <= 1 + 11 / 9 * enough + len(lengths) / most
    assert row_packing.first_fit_decreasing(range(5), [5, 4, 3, 2, 1], 6, 9) == [[0, 4], [1, 3], [2]]
    assert row_packing.first_fit_decreasing(range(5), [5, 4, 3, 2, 1], 99, 2) == [[0, 1], [2, 3], [4]]


# -- none sees another -----------------------------------------------------------------------------------------------


def test_the_mask_lets_a_token_see_its_own_trajectory_up_to_itself() -> None:
    lengths, total = [3, 1, 4], 10
    owner = [0, 0, 0, 1, 2, 2, 2, 2, 3, 3]
    mask = row_packing.block_causal_mask(lengths, total)
    assert mask.shape == (1, 1, total, total)
    for row in range(total):
        for column in range(total):
            assert bool(mask[0, 0, row, column]) is not (column <= row and owner[row] == owner[column])


def test_boundaries_are_those_of_the_trajectories_with_padding_last() -> None:
    params = row_packing.packed_seq_params([3, 1, 4], 10)
    assert params.qkv_format == "thd"
    assert params.cu_seqlens_q.tolist() == params.cu_seqlens_kv.tolist() == [0, 3, 4, 8, 10]
    assert params.cu_seqlens_q.dtype == torch.int32
    assert (params.max_seqlen_q, params.max_seqlen_kv) == (4, 4)
    assert row_packing.row_boundaries([3, 1, 4], 8) == [0, 3, 4, 8]
    with pytest.raises(ValueError, match="in a row of 7"):
        row_packing.row_boundaries([3, 1, 4], 7)


def test_packed_logits_are_those_of_rows_of_their_own(folder: str) -> None:
    trainer = make_trainer(folder)
    assert not row_packing.takes_boundaries(trainer._learner.model)
    rows = rows_of(make_batch(3, groups=4, members=3))
    indices = [5, 0, 7, 2, 11]
    packed = micro_batch(rows, indices, MicroBatchLimits(9, "arrival", 999, multiple=8), "token-mean")
    alone = [micro_batch(rows, [index], MicroBatchLimits(1), "token-mean") for index in indices]
    assert packed.inputs_BS.shape[0] == 1
    assert packed.inputs_BS.shape[1] % 8 == 0
    assert sum(packed.packed) == sum(len(rows[index]) - 1 for index in indices)
    mask = row_packing.block_causal_mask(packed.packed, packed.inputs_BS.shape[1])
    with torch.no_grad():
        together = packed.select(trainer._learner.model(packed.inputs_BS, packed.positions_BS, mask))
        apart = [
            b.select(trainer._learner.model(b.inputs_BS, b.positions_BS, model.causal_mask(b.inputs_BS.shape[1])))
            for b in alone
        ]
        seen = packed.select(
            trainer._learner.model(packed.inputs_BS, packed.positions_BS, model.causal_mask(packed.inputs_BS.shape[1]))
        )
    assert (together - torch.cat(apart)).abs().max() < 1e-5
    assert (seen - torch.cat(apart)).abs().max() > 1e-2  # without the blocks they would see each other
    assert torch.equal(packed.tokens.targets_T, torch.cat([b.tokens.targets_T for b in alone]))
    assert torch.equal(packed.tokens.weights_T, torch.cat([b.tokens.weights_T for b in alone]))
    assert packed.tokens.denominator == sum(b.tokens.denominator for b in alone)


@pytest.mark.parametrize("order", ["length", "arrival"])
@pytest.mark.parametrize("loss", ["token-mean", "sequence-mean"])
def test_packing_changes_neither_gradient_nor_metrics(folder: str, order: str, loss: str) -> None:
    results = []
    for pack in (None, 30, 64, 500):
        settings = {"micro_batch_order": order, "loss": loss, "pack_tokens": pack, "clip_grad": 0.0}
        trainer = make_trainer(folder, **settings)
        metrics = asyncio.run(trainer.train_step(make_batch(0)))
        results.append((gradients_of(trainer), metrics.values))
    expected, values = results[0]
    for gradient, found in results[1:]:
        assert (gradient - expected).norm() <= 2e-6 * expected.norm()
        for name in ("loss", "tokens", "trajectories", "entropy", "logprob_gap_mean", "logprob_gap_max"):
            assert found[name] == pytest.approx(values[name], rel=1e-4, abs=1e-6), name


def test_a_trajectory_longer_than_a_row_is_refused_by_name(folder: str) -> None:
    trainer = make_trainer(folder, pack_tokens=20)
    batch = make_batch(0)
    longest = max(batch.samples, key=lambda sample: len(sample.token_ids))
    assert len(longest.token_ids) > 20
    first = next(sample for sample in batch.samples if len(sample.token_ids) > 20)
    with pytest.raises(
        RunError, match=rf"trajectory {first.trajectory_id}: {len(first.token_ids)} tokens.*pack_tokens"
    ):
        asyncio.run(trainer.train_step(batch))
    kept, _ = usable_samples(batch.samples, VOCABULARY, 64, len(longest.token_ids))
    assert len(kept) == len(batch.samples)


# -- what is counted -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pack", [None, 200])
@pytest.mark.parametrize("loss", ["token-mean", "sequence-mean", "sequence-sum"])
def test_masked_tokens_are_neither_trained_nor_counted(loss: str, pack: int | None) -> None:
    batch = make_batch(4)
    rows = [replace(row, advantages=row.advantages + 1) for row in rows_of(batch, max_token_lag=0)]
    indices = [index for index, row in enumerate(rows) if row.kept.any()]
    assert any(not rows[index].kept.all() for index in indices)
    found = micro_batch(rows, indices, MicroBatchLimits(64, "arrival", pack), loss)
    counts = [int(rows[index].kept.sum()) for index in indices]
    assert found.counts == tuple(counts)
    assert found.tokens.targets_T.numel() == sum(counts)
    assert bool(found.tokens.fresh_T.all())
    assert found.tokens.masked == sum(int((~rows[index].kept).sum()) for index in indices)
    assert found.tokens.denominator == (sum(counts) if loss == "token-mean" else len(counts))
    expected = np.concatenate([token_weights(count, loss)[0] for count in counts])
    assert found.tokens.weights_T.tolist() == expected.tolist()
    assert found.tokens.segments_T.tolist() == np.repeat(np.arange(len(counts)), counts).tolist()
    whole = micro_batch(rows, indices, MicroBatchLimits(64, "arrival", pack), loss, whole=True)
    assert whole.counts == tuple(len(rows[index].positions) for index in indices)
    idle = micro_batch(rows, indices, MicroBatchLimits(64, "arrival", pack), loss, idle=True)
    assert (idle.tokens.denominator, float(idle.tokens.weights_T.sum())) == (0, 0.0)


def test_tokens_too_old_leave_no_trace_in_the_gradient(folder: str) -> None:
    """The same trajectories, once with old tokens masked and once with them declared the environment's."""
    batch = make_batch(2)
    some = tuple(sample for sample in batch.samples if any(version == 2 for version, _ in sample.versions))
    assert 10 < len(some) < len(batch.samples)
    samples = []
    for sample in some:
        old = sum(count for version, count in sample.versions if version < 2)
        own = iter([False] * old + [True] * (sum(sample.loss_mask) - old))
        mask = tuple(int(bool(flag) and next(own)) for flag in sample.loss_mask)
        logprobs = tuple(p if flag else 0.0 for p, flag in zip(sample.logprobs, mask, strict=True))
        versions = tuple(span for span in sample.versions if span[0] == 2)
        samples.append(replace(sample, loss_mask=mask, logprobs=logprobs, versions=versions))
    results = []
    for lag, chosen in ((0, some), (None, tuple(samples))):
        trainer = make_trainer(folder, max_token_lag=lag)
        trainer._version = 2
        metrics = asyncio.run(trainer.train_step(replace(batch, samples=chosen))).values
        results.append((gradients_of(trainer), metrics))
    (one, masked), (other, environments) = results
    assert torch.equal(one, other)
    assert one.norm() > 0
    assert masked["tokens"] == environments["tokens"]
    assert masked["masked_tokens"] > 0


def test_a_trajectory_with_only_old_tokens_is_left_out_and_counted_but_stays_in_its_group(folder: str) -> None:
    batch = make_batch(2)
    old = [s for s in batch.samples if not any(version == 2 for version, _ in s.versions)]
    assert old
    trainer = make_trainer(folder, max_token_lag=0)
    trainer._version = 2
    values = asyncio.run(trainer.train_step(batch)).values
    assert values["skipped_tokens_too_old"] == values["skipped"] == len(old)
    assert values["trajectories"] == len(batch.samples) - len(old)
    assert values["trained_reward_mean"] == pytest.approx(np.mean([sample.reward for sample in batch.samples]))


def test_groups_that_an_engine_in_this_process_took_along_are_made_anew(folder: str) -> None:
    torch.distributed.destroy_process_group()  # as vLLM does when an engine in the same process ends
    parallel_layout.initialize_parallel()
    assert make_trainer(folder) is not None
