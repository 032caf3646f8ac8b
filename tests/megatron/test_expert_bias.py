"""The bias by which a router chooses experts follows their load: of what is no padding, of all replicas, of steps that count."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from megatron_rlplugin import model, parallel_layout  # noqa: E402
from megatron_rlplugin.megatron_options import sort_options  # noqa: E402
from megatron_rlplugin.objective.vocab_logprobs import logprobs  # noqa: E402
from megatron_rlplugin.trainer.learner import Learner, Rendezvous  # noqa: E402
from megatron_rlplugin.trainer.micro_batches import MicroBatchLimits, micro_batch, supervised_row  # noqa: E402
from orchestrator.api import ConfigError  # noqa: E402
from orchestrator.settings.trainer_settings import TrainerSettings  # noqa: E402
from tests.support.family_models import VOCABULARY, write_family  # noqa: E402
from tests.support.forked_ranks import ForkedRank, wait_for_all  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron")]
RATE = 0.01
LENGTHS = (9, 15)


def make_learner(folder: str, ranks: Rendezvous | None = None, replicas: int = 1) -> Learner:
    options = sort_options({"moe_router_bias_update_rate": RATE})
    settings = TrainerSettings(data_parallel=replicas, micro_batch_size=2)
    return Learner(folder, settings, 4, "float32", ranks, options=options)


def batch_of(members: tuple[int, ...]) -> Any:
    draw = torch.Generator().manual_seed(3)
    tokens = [torch.randint(VOCABULARY, (length,), generator=draw).tolist() for length in LENGTHS]
    rows = [supervised_row(ids, [0] + [1] * (len(ids) - 1)) for ids in tokens]
    return micro_batch(rows, members, MicroBatchLimits(2), "token-mean")


def loss(factor: float = 1.0) -> Any:
    def total(output: Any, batch: Any) -> Any:
        return -factor * (logprobs(output, batch.tokens.targets_T) * batch.tokens.weights_T).sum(), None

    return total


def routers(learner: Learner) -> list[Any]:
    return [module for chunk in learner.chunks for module in chunk.modules() if hasattr(module, "expert_bias")]


def biases(learner: Learner) -> Any:
    return torch.stack([router.expert_bias.clone() for router in routers(learner)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_family(tmp_path_factory.mktemp("models") / "model", "deepseek-v3"))


@pytest.fixture
def learner(folder: str) -> Iterator[Learner]:
    yield make_learner(folder)
    parallel_layout.shutdown_parallel()


def test_the_bias_follows_the_load_of_what_is_no_padding(learner: Learner) -> None:
    before = biases(learner)
    learner.advance_schedule()
    learner.begin_step()
    learner.feed([batch_of((0, 1)), batch_of((0, 1)).idle_copy()], loss())
    counts = torch.stack([router.local_tokens_per_expert.clone() for router in routers(learner)])
    real = sum(LENGTHS) - len(LENGTHS)  # the last token of a row predicts nothing, so it is no input
    assert counts.sum(1).tolist() == [4.0 * real] * 3  # experts per token, in each of the layers that have experts
    assert learner.finish_step().taken
    expected = before + RATE * (counts.mean(1, keepdim=True) - counts).sign()
    assert torch.equal(biases(learner), expected)
    assert not torch.equal(expected, before)


def test_a_step_that_does_not_count_leaves_the_bias_as_it_was(learner: Learner) -> None:
    before = biases(learner)
    learner.advance_schedule()
    update = learner.update_weights([batch_of((0, 1))], loss(1e30))  # finite gradients, an infinite norm
    assert not update.taken
    assert "norm" in update.reason
    assert torch.equal(biases(learner), before)


def test_other_weights_for_a_while_have_their_own_bias(learner: Learner) -> None:
    kept, before = learner.snapshot(), biases(learner)
    learner.advance_schedule()
    assert learner.update_weights([batch_of((0, 1))], loss()).taken
    after = biases(learner)
    with learner.swapped_weights(kept):
        assert torch.equal(biases(learner), before)
    assert torch.equal(biases(learner), after)


def test_padding_that_cannot_be_told_is_refused(folder: str) -> None:
    layout = parallel_layout.ParallelLayout(tensor=2, pipeline=2, sequence=True)
    shape = model.read_shape(folder)
    with pytest.raises(ConfigError, match=r"^trainer.megatron.moe_router_bias_update_rate = 0.01: "):
        model.transformer_config(shape, torch.float32, layout, {"moe_router_bias_update_rate": RATE})


RANK = """
import json, sys
from megatron_rlplugin.trainer.learner import Rendezvous
from tests.megatron.test_expert_bias import batch_of, biases, loss, make_learner
rank, folder, out = int(sys.argv[1]), sys.argv[2], sys.argv[3]
learner = make_learner(folder, Rendezvous(rank, 2, f"file://{out}/meet"), 2)
learner.advance_schedule()
assert learner.update_weights([batch_of((rank,))], loss()).taken
open(f"{out}/{rank}.json", "w").write(json.dumps(biases(learner).tolist()))
"""


def test_two_replicas_have_the_bias_of_one_with_both_parts(learner: Learner, folder: str, tmp_path: Path) -> None:
    learner.advance_schedule()
    assert learner.update_weights([batch_of((0, 1))], loss()).taken
    ended = wait_for_all([ForkedRank("-c", RANK, str(rank), folder, str(tmp_path)) for rank in range(2)], 120)
    assert [rank.code for rank in ended] == [0, 0], ended
    for rank in range(2):
        assert torch.equal(torch.tensor(json.loads((tmp_path / f"{rank}.json").read_text())), biases(learner))
