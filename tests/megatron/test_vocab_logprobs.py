"""Log-probs and entropy, alone and split over two tensor-parallel ranks, against torch's own log_softmax in float64."""

from __future__ import annotations

import os
import sys
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from megatron_rlplugin.objective import vocab_logprobs  # noqa: E402
from megatron_rlplugin.objective.policy_loss import Coefficients, Tokens, policy_loss  # noqa: E402
from megatron_rlplugin.objective.vocab_logprobs import OutputRows, logprobs, logprobs_and_entropy  # noqa: E402
from tests.support.forked_ranks import ForkedRank, wait_for_all  # noqa: E402

T, V, RANKS = 11, 10, 2
SCENARIOS = [(temperature, entropy) for temperature in (1.0, 0.6) for entropy in (False, True)]
PRECISION = {torch.float32: 2e-6, torch.bfloat16: 1e-2}  # of the gradient, which has the dtype of the logits


def case(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits (large ones too: exp overflows without the maximum), targets on both ranks, two gradients."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(T, V, generator=generator) * 3
    logits[0] += 200.0
    logits[1, 7] += 90.0
    targets = torch.randint(0, V, (T,), generator=generator)
    targets[:4] = torch.tensor([0, 4, 5, 9])  # the borders of the parts
    return logits.to(dtype), targets, *(torch.randn(2, T, generator=generator))


def plain(dtype: torch.dtype, temperature: float, entropy_gradient: bool) -> tuple[torch.Tensor, ...]:
    """(log-prob, entropy, gradient of the logits) in float64."""
    logits, targets, by_logp, by_entropy = case(dtype)
    leaf = logits.double().requires_grad_()
    logp = torch.log_softmax(leaf / temperature, -1)
    chosen, entropy = logp.gather(-1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)
    total = (chosen * by_logp).sum() + ((entropy * by_entropy).sum() if entropy_gradient else 0)
    (gradient,) = torch.autograd.grad(total, leaf)
    return chosen.detach(), entropy.detach(), gradient


def ours(
    dtype: torch.dtype, temperature: float, entropy_gradient: bool, rank: int = 0, ranks: int = 1, group: object = None
) -> tuple[torch.Tensor, ...]:
    logits, targets, by_logp, by_entropy = case(dtype)
    leaf = logits.chunk(ranks, -1)[rank].contiguous().requires_grad_()
    chosen, entropy = logprobs_and_entropy(leaf, targets, temperature, entropy_gradient=entropy_gradient, group=group)
    assert chosen.dtype == entropy.dtype == torch.float32
    assert entropy.requires_grad == entropy_gradient
    total = (chosen * by_logp).sum() + ((entropy * by_entropy).sum() if entropy_gradient else 0)
    (gradient,) = torch.autograd.grad(total, leaf)
    torch.testing.assert_close(logprobs(leaf, targets, temperature, group=group), chosen)
    return chosen.detach(), entropy.detach(), gradient


def objective(rank: int = 0, ranks: int = 1, group: object = None) -> tuple[torch.Tensor, ...]:
    """(the loss, its totals, the warm-up's loss, gradient of the logits)."""
    logits, targets, advantages, shift = case(torch.float32)
    logits[:2] = 0.0  # no overflowing importance ratio here
    leaf = logits.chunk(ranks, -1)[rank].contiguous().requires_grad_()
    old = torch.log_softmax(logits, -1).gather(-1, targets[:, None])[:, 0] + 0.1 * shift
    tokens = Tokens(
        targets, old, advantages, torch.ones(T), torch.ones(T, dtype=torch.bool), old, T, reference_T=old - 0.1
    )
    loss, totals = policy_loss(leaf, tokens, Coefficients(0.2, 0.2, 2.0, 0.01, 0.1), 0.8, group)
    warm_up = -logprobs(leaf, targets, group=group).sum()
    (gradient,) = torch.autograd.grad(loss + warm_up, leaf)
    return loss.detach(), torch.tensor(list(totals.metrics().values())), warm_up.detach(), gradient


def check(found: tuple[torch.Tensor, ...], dtype: torch.dtype, temperature: float, entropy_gradient: bool) -> None:
    for index, expected in enumerate(plain(dtype, temperature, entropy_gradient)):
        precision = PRECISION[dtype] if index == 2 else 2e-6
        torch.testing.assert_close(
            found[index].double(), expected, rtol=precision, atol=precision * max(1.0, float(expected.abs().max()))
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("temperature", "entropy_gradient"), SCENARIOS)
def test_one_rank_gives_the_plain_result(temperature: float, entropy_gradient: bool, dtype: torch.dtype) -> None:
    check(ours(dtype, temperature, entropy_gradient), dtype, temperature, entropy_gradient)


def test_nothing_of_the_size_of_the_vocabulary_is_kept_but_the_logits() -> None:
    logits, targets, *_ = case(torch.bfloat16)
    leaf, kept = logits.requires_grad_(), []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logprobs_and_entropy(leaf, targets, 0.7, entropy_gradient=True)
    large = [tensor for tensor in kept if tensor.numel() >= T * V]
    assert [tensor.data_ptr() for tensor in large] == [leaf.data_ptr()]


def rows_case(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Hidden states and output weight whose product has logits of size 3, targets, two gradients."""
    generator = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(T, 6, generator=generator), torch.randn(V, 6, generator=generator)
    return hidden.to(dtype), weight.to(dtype), *case(dtype)[1:]


@pytest.mark.parametrize("chunk_rows", [1, 4, T])
@pytest.mark.parametrize(("temperature", "entropy_gradient"), SCENARIOS)
def test_logits_that_exist_a_chunk_at_a_time_give_the_gradients_of_the_whole(
    temperature: float, entropy_gradient: bool, chunk_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vocab_logprobs, "CHUNK_BYTES", chunk_rows * V * 4)
    hidden, weight, targets, by_logp, by_entropy = rows_case(torch.float32)
    leaves = [tensor.double().requires_grad_() for tensor in (hidden, weight)]
    logp = torch.log_softmax(leaves[0] @ leaves[1].T / temperature, -1)
    entropy = -(logp.exp() * logp).sum(-1)
    total = (logp.gather(-1, targets[:, None])[:, 0] * by_logp).sum()
    expected = torch.autograd.grad(total + ((entropy * by_entropy).sum() if entropy_gradient else 0), leaves)
    ours_ = [tensor.requires_grad_() for tensor in (hidden, weight)]
    found, found_entropy = logprobs_and_entropy(
        OutputRows(*ours_), targets, temperature, entropy_gradient=entropy_gradient
    )
    total = (found * by_logp).sum() + ((found_entropy * by_entropy).sum() if entropy_gradient else 0)
    for ours_grad, theirs in zip(torch.autograd.grad(total, ours_), expected, strict=True):
        assert (ours_grad - theirs).norm() <= 1e-6 * theirs.norm()
    torch.testing.assert_close(found.double(), logp.gather(-1, targets[:, None])[:, 0], rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(found_entropy.double(), entropy, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("chunk_rows", [1, 4, T])
def test_in_bfloat16_the_weights_gradient_is_rounded_once(chunk_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocab_logprobs, "CHUNK_BYTES", chunk_rows * V * 4)
    hidden, weight, targets, by_logp, _ = rows_case(torch.bfloat16)
    wide = [tensor.float().requires_grad_() for tensor in (hidden, weight)]
    expected = torch.autograd.grad((logprobs(OutputRows(*wide), targets) * by_logp).sum(), wide)[1]
    (found,) = torch.autograd.grad(
        (logprobs(OutputRows(hidden, weight.requires_grad_()), targets) * by_logp).sum(), weight
    )
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, rtol=1e-2, atol=1e-2 * float(expected.abs().max()))
    large = torch.randn(9, 7)
    assert torch.equal(vocab_logprobs._narrowed(large.clone(), torch.bfloat16), large.to(torch.bfloat16))


def test_no_rows_give_a_gradient_of_zeros() -> None:
    hidden, weight = torch.zeros(0, 6, requires_grad=True), torch.ones(V, 6, requires_grad=True)
    logprobs(OutputRows(hidden, weight), torch.zeros(0, dtype=torch.long)).sum().backward()
    assert torch.equal(weight.grad, torch.zeros(V, 6))


class LiveBytes(TorchDispatchMode):  # type: ignore[misc]
    """Bytes of the tensors that are alive, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._live: dict[int, int] = {}

    def _free(self, key: int) -> None:
        self.now -= self._live.pop(key, 0)

    def _note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._live:
            self._live[storage._cdata] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._free, storage._cdata)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        torch.utils._pytree.tree_map_only(torch.Tensor, self._note, result)
        return result


@pytest.mark.parametrize("length", [8192, pytest.param(32768, marks=pytest.mark.slow)])
def test_memory_of_a_long_row_is_that_of_a_chunk(length: int) -> None:
    """Shapes and bytes of Qwen2.5-7B's output layer on one device, by fake tensors: nothing is computed."""
    width, vocabulary = 3584, 152064
    with FakeTensorMode(), LiveBytes() as live:
        hidden = torch.empty(length, width, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(vocabulary, width, dtype=torch.bfloat16, requires_grad=True)
        targets = torch.zeros(length, dtype=torch.long)
        before = live.now
        logp, _ = logprobs_and_entropy(OutputRows(hidden, weight), targets)
        logp.sum().backward()
    gradients = hidden.nbytes + weight.numel() * 4  # the weight's is summed in fp32
    assert live.peak - before - gradients < 1e9
    assert live.peak - before > weight.nbytes + hidden.nbytes  # the count counts


@pytest.mark.slow
def test_two_ranks_with_half_the_vocabulary_each_give_the_plain_result(tmp_path: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [ForkedRank(__file__, str(rank), str(tmp_path), env=environment) for rank in range(RANKS)]
    ended = wait_for_all(ranks, 200)
    assert all(rank.code == 0 for rank in ended), ended
    results = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(RANKS)]
    for name, parts in ((name, [result[name] for result in results]) for name in results[0]):
        *same, gradients = zip(*parts, strict=True)
        for values in same:
            assert torch.equal(values[0], values[1]), name  # every rank sees the same loss
        joined = (*(values[0] for values in same), torch.cat(gradients, -1))
        if name == "objective":
            for found, expected in zip(joined, objective(), strict=True):
                torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        else:
            dtype, temperature, entropy_gradient = name.split()
            kind = getattr(torch, dtype)
            assert gradients[0].dtype == kind
            check(joined, kind, float(temperature), entropy_gradient == "True")


def rank_main(rank: int, folder: Path) -> None:
    """One of the two ranks; its results go to a file."""
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS, timeout=timedelta(seconds=120)
    )
    group = dist.group.WORLD
    results = {
        f"{str(dtype).removeprefix('torch.')} {temperature} {entropy}": ours(
            dtype, temperature, entropy, rank, RANKS, group
        )
        for dtype in PRECISION
        for temperature, entropy in SCENARIOS
    }
    results["objective"] = objective(rank, RANKS, group)
    torch.save(results, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    rank_main(int(sys.argv[1]), Path(sys.argv[2]))
