"""Rows that ranks share: log-probs, losses and gradients are those of one rank. Over gloo, with real ranks.

Attention is :class:`megatron_rlplugin.model_layers.LocalAttention`, which gathers keys and values: a stand-in for Transformer
Engine's, which needs a GPU and was not run. Everything around it is what runs there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from megatron_rlplugin import parallel_layout  # noqa: E402
from megatron_rlplugin.context_parallel import natural_order, zigzag_places  # noqa: E402
from megatron_rlplugin.megatron_options import sort_options  # noqa: E402
from megatron_rlplugin.objective.vocab_logprobs import logprobs_and_entropy  # noqa: E402
from megatron_rlplugin.trainer.learner import Learner, Rendezvous, check_trainer  # noqa: E402
from megatron_rlplugin.trainer.micro_batches import MicroBatchLimits, micro_batch, supervised_row  # noqa: E402
from megatron_rlplugin.weights.tensor_places import tensor_pieces  # noqa: E402
from orchestrator.api import ConfigError  # noqa: E402
from orchestrator.settings.trainer_settings import TrainerSection, TrainerSettings  # noqa: E402
from tests.support.family_models import VOCABULARY, write_family  # noqa: E402
from tests.support.forked_ranks import ForkedRank, wait_for_all  # noqa: E402

LENGTHS = (23, 17, 6, 30)
TOLERANCE = (
    1e-5  # of log-probs in nats, of gradients relative to the largest of a tensor; fp32. Measured: see the print
)


@given(size=st.integers(1, 5), pieces=st.integers(1, 4))
def test_ranks_have_every_token_once_and_as_much_to_look_at(size: int, pieces: int) -> None:
    length = 2 * size * pieces
    parts = [zigzag_places(length, rank, size) for rank in range(size)]
    assert sorted(torch.cat(parts).tolist()) == list(range(length))
    assert len({int(part.sum()) for part in parts}) == 1
    assert torch.equal(torch.cat(parts)[natural_order(length, size)], torch.arange(length))


def loss_of(learner: Learner) -> Any:
    """Of all tokens of a trajectory together, so that a part of them says something else; with an entropy bonus."""

    def total(output: Any, batch: Any) -> Any:
        tokens = batch.tokens
        logp_T, entropy_T = logprobs_and_entropy(
            output, tokens.targets_T, 0.9, entropy_gradient=True, group=learner.tensor_group
        )
        sums = logp_T.new_zeros(len(batch.counts)).index_add_(0, tokens.segments_T, logp_T * tokens.weights_T)
        return (0.1 * sums**2).sum() - 0.3 * (entropy_T * tokens.weights_T).sum(), logp_T.detach()

    return total


def measure(folder: str, sizes: dict[str, Any], pack: bool, ranks: Rendezvous | None = None) -> dict[str, Any]:
    """Log-probs of this replica's micro-batches, and the merged gradients of what this rank holds."""
    from megatron.core import parallel_state

    megatron = {"sequence_parallel": True} if sizes.get("tensor_parallel", 1) > 1 else {}
    learner = Learner(folder, TrainerSettings(**sizes), 4, "float32", ranks, options=sort_options(megatron))
    draw = torch.Generator().manual_seed(3)
    ids = [torch.randint(VOCABULARY, (length,), generator=draw).tolist() for length in LENGTHS]
    rows = [supervised_row(each, [0] * 3 + [1] * (len(each) - 3)) for each in ids]
    limits = MicroBatchLimits(2, pack_tokens=64 if pack else None, multiple=learner.layout.row_multiple)
    batches = [micro_batch(rows, members, limits, "token-mean") for members in ((0, 1), (2, 3))]
    replica, count = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    logp = learner.logprobs(batches, 0.9)
    learner.begin_step()
    learner.feed(batches[replica::count], loss_of(learner))
    denominator = learner.stream.merge_gradients()
    pieces = [
        (piece.name, piece.shape, piece.dim, piece.start, piece.stop, piece.cut_from(piece.parameter.main_grad))
        for piece in tensor_pieces(learner.chunks)
        if not piece.keeps_dtype
    ]
    return {"logp": logp, "denominator": denominator, "pieces": pieces}


RANK = """
import json, sys, torch
from megatron_rlplugin.trainer.learner import Rendezvous
from tests.megatron.test_context_parallel import measure
rank, world = int(sys.argv[1]), int(sys.argv[2])
folder, sizes, pack, out = sys.argv[3], json.loads(sys.argv[4]), sys.argv[5], sys.argv[6]
torch.set_num_threads(1)
torch.save(measure(folder, sizes, pack == "packed", Rendezvous(rank, world, f"file://{out}/meet")), f"{out}/{rank}.pt")
"""
CASES = {
    "gemma3": ("gemma3", {}, False),
    "packed-window": ("mistral-window", {}, True),
    "deepseek": ("deepseek-v3", {}, False),
    "gpt-oss": ("gpt-oss", {}, False),
    "tensor": ("qwen3", {"tensor_parallel": 2}, False),
    "pipeline": ("qwen3", {"pipeline_parallel": 2}, False),
    "data": ("qwen2-moe", {"data_parallel": 2}, False),
    "experts": ("qwen3-moe", {"expert_parallel": 2}, False),
    "experts of two replicas": ("qwen2-moe", {"data_parallel": 2, "expert_parallel": 4}, False),
}


@pytest.fixture
def groups() -> Iterator[None]:
    yield
    parallel_layout.shutdown_parallel()


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron")
@pytest.mark.parametrize(
    "case", [*list(CASES)[:2], *(pytest.param(name, marks=pytest.mark.long) for name in list(CASES)[2:])]
)
def test_ranks_that_share_rows_have_the_gradients_of_one_rank(case: str, tmp_path: Path, groups: None) -> None:
    family, sizes, pack = CASES[case]
    folder = str(write_family(tmp_path / "model", family))
    expected = measure(folder, {}, pack)
    whole: dict[str, Any] = {}
    for name, shape, dim, start, stop, gradient in expected["pieces"]:
        place = whole.setdefault(name, torch.zeros(shape))
        (place if dim < 0 else place.narrow(dim, start, stop - start)).copy_(gradient)
    sizes = {**sizes, "context_parallel": 2}
    world = TrainerSettings(**sizes).ranks
    words = (folder, json.dumps(sizes), "packed" if pack else "padded", str(tmp_path))
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = wait_for_all(
        [ForkedRank("-c", RANK, str(rank), str(world), *words, env=environment) for rank in range(world)], 200
    )
    assert [rank.code for rank in ended] == [0] * world, ended
    found = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(world)]
    spoke = [one["logp"] for one in found if one["logp"]]
    assert spoke
    worst = {"logp": 0.0, "gradient": 0.0}
    for logp in spoke:  # on every rank of the context
        for part, wanted in zip(logp, expected["logp"], strict=True):
            worst["logp"] = max(worst["logp"], float((part - wanted).abs().max()))
    seen = set()
    for one in found:
        assert one["denominator"] == expected["denominator"]
        for name, _, dim, start, stop, gradient in one["pieces"]:
            wanted = whole[name] if dim < 0 else whole[name].narrow(dim, start, stop - start)
            gap = float((gradient - wanted).abs().max() / whole[name].abs().max())
            worst["gradient"] = max(worst["gradient"], gap)
            seen.add(name)
    print(case, {name: f"{gap:.1e}" for name, gap in worst.items()})
    assert seen == whole.keys()
    assert max(worst.values()) <= TOLERANCE, worst


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"pack_tokens": 64},
            r"^trainer.pack_tokens = 64: must be unset with trainer.context_parallel: Transformer Engine",
        ),
        (
            {"megatron": {"context_parallel_size": 2}},
            r"^trainer.megatron.context_parallel_size = 2: is trainer.context",
        ),
    ],
)
@pytest.mark.engine
def test_what_does_not_go_with_shared_rows_is_refused(
    tmp_path: Path, settings: dict[str, Any], message: str, groups: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_rlplugin.trainer.learner.uses_transformer_engine", lambda: "pack_tokens" in settings)
    folder = str(write_family(tmp_path / "model", "qwen3-moe"))
    section = TrainerSection.from_dict({"context_parallel": 2, **settings})
    with pytest.raises(ConfigError, match=message):
        check_trainer(folder, section, "float32")
