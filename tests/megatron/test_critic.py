"""PPO's critic: a value head on the stock model in every layout, and its loss against formulas written apart from it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from megatron_rlplugin import (  # noqa: E402
    model,
    parallel_layout,
    tiny_model,
)
from megatron_rlplugin.objective.critic import ValueTokens, ValueTotals, install_value_head, value_loss  # noqa: E402
from megatron_rlplugin.weights import hf_bridge  # noqa: E402
from tests.support.forked_ranks import ForkedRank, wait_for_all  # noqa: E402

LENGTHS = (4, 1, 6)
T = sum(LENGTHS)
BATCH, WIDTH = 2, 8
SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 8,
    "vocabulary": [f"w{index}" for index in range(24)],
    "max_positions": 16,
    "dtype": "float32",
    "seed": 3,
}


# -- the loss ------------------------------------------------------------------------------------------------------------


def make_tokens(seed: int) -> tuple[np.ndarray, ValueTokens]:
    """Values on both sides of the clip, targets on both sides of the values."""
    rng = np.random.default_rng(seed)
    old, weights = rng.normal(size=T), np.repeat([1 / n for n in LENGTHS], LENGTHS)
    values, returns = old + rng.normal(scale=0.4, size=T), old + rng.normal(size=T)
    tensors = [torch.from_numpy(array) for array in (returns, old, weights)]
    return values, ValueTokens(*tensors, denominator=len(LENGTHS))


def reference(values: np.ndarray, tokens: ValueTokens, clip: float) -> float:
    total = 0.0
    for v, r, old, w in zip(
        values, tokens.returns_T.numpy(), tokens.old_T.numpy(), tokens.weights_T.numpy(), strict=True
    ):
        near = min(max(v, old - clip), old + clip)
        total += w * 0.5 * max((v - r) ** 2, (near - r) ** 2)
    return total


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_value_loss_and_its_gradient_are_those_of_the_formula(seed: int) -> None:
    values, tokens = make_tokens(seed)
    leaf = torch.from_numpy(values)[:, None].requires_grad_()
    loss, totals = value_loss(leaf, tokens, 0.2)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(reference(values, tokens, 0.2), rel=1e-12)
    assert totals.metrics()["value_loss"] == pytest.approx(float(loss.detach()) / len(LENGTHS))
    assert 0 < totals.metrics()["value_clip_fraction"] < 1
    for index in range(T):
        step = np.zeros(T)
        step[index] = 1e-6
        slope = (reference(values + step, tokens, 0.2) - reference(values - step, tokens, 0.2)) / 2e-6
        assert float(leaf.grad[index, 0]) == pytest.approx(slope, abs=1e-8)


def test_explained_variance_is_that_of_the_values_the_advantages_used() -> None:
    values, tokens = make_tokens(3)
    returns, old = tokens.returns_T.numpy(), tokens.old_T.numpy()
    metrics = value_loss(torch.from_numpy(values), tokens, 0.2)[1].metrics()
    assert metrics["explained_variance"] == pytest.approx(1 - np.var(returns - old) / np.var(returns))
    assert metrics["return_mean"] == pytest.approx(returns.mean())
    assert metrics["value_mean"] == pytest.approx(values.mean())
    same = ValueTokens(torch.full((T,), 0.1), tokens.old_T, tokens.weights_T, 1)
    assert "explained_variance" not in value_loss(torch.from_numpy(values), same, 0.2)[1].metrics()


def test_micro_batches_of_values_add_up_to_the_whole() -> None:
    values, tokens = make_tokens(4)
    whole_loss, whole = value_loss(torch.from_numpy(values), tokens, 0.2)
    added, total = ValueTotals(), 0.0
    for part in (slice(0, 4), slice(4, 4), slice(4, 5), slice(5, T)):
        piece = ValueTokens(
            tokens.returns_T[part], tokens.old_T[part], tokens.weights_T[part], int(part.stop > part.start)
        )
        loss, totals = value_loss(torch.from_numpy(values[part]), piece, 0.2)
        total += float(loss)
        added.add(totals)
    assert total == pytest.approx(float(whole_loss))
    assert added.metrics() == pytest.approx(whole.metrics())


def test_values_that_weigh_nothing_are_in_no_diagnostic() -> None:
    values, tokens = make_tokens(5)
    idle = ValueTokens(tokens.returns_T, tokens.old_T, torch.zeros(T), 0)
    loss, totals = value_loss(torch.from_numpy(values), idle, 0.2)
    assert (float(loss), totals) == (0.0, ValueTotals())


# -- the head ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def groups() -> Iterator[None]:
    parallel_layout.initialize_parallel()
    yield
    parallel_layout.shutdown_parallel()


def critic(folder: str) -> Any:
    (chunk,) = model.build_model(model.read_shape(folder), "float32")
    hf_bridge.load_hf([chunk], folder)
    install_value_head([chunk])
    return chunk.train()


@pytest.mark.engine
@pytest.mark.usefixtures("groups")
@pytest.mark.parametrize("tied", [False, True])
def test_a_value_comes_out_where_the_logits_came_out(tmp_path: Path, tied: bool) -> None:
    folder = tiny_model.create_qwen3(str(tmp_path / "model"), **SHAPE, tied=tied)
    chunk = critic(folder)
    core = model.unwrap(chunk)
    inputs = torch.randint(24, (BATCH, WIDTH), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(WIDTH).expand_as(inputs)
    hidden = []
    hook = core.decoder.register_forward_hook(lambda _module, _inputs, output: hidden.append(output.detach()))
    values = chunk(inputs, positions, model.causal_mask(WIDTH))
    assert values.shape == (BATCH, WIDTH, 1)
    assert values.abs().max() == 0  # the head starts at 0
    with torch.no_grad():
        core.output_layer.weight.copy_(torch.linspace(-1, 1, 32))
        core.output_layer.bias.fill_(0.5)
    values = chunk(inputs, positions, model.causal_mask(WIDTH))
    hook.remove()
    expected = (hidden[-1] @ core.output_layer.weight[0]).T + 0.5
    torch.testing.assert_close(values[..., 0], expected)
    values.square().sum().backward()
    assert all(parameter.grad is not None for parameter in core.decoder.parameters())
    assert not core.share_embeddings_and_output_weights
    assert "output_layer.weight" in dict(core.named_parameters())


RANK = """
import json, sys, torch
import torch.distributed as dist
from megatron_rlplugin import model
from megatron_rlplugin.weights import hf_bridge as bridge
from megatron_rlplugin import parallel_layout as parallel
from megatron_rlplugin.weights import tensor_places as places
from megatron_rlplugin.objective.critic import install_value_head
rank, world, folder, cases, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4]), sys.argv[5]
torch.set_num_threads(1)
BATCH, WIDTH = 2, 8


def run(name, layout):
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    chunks = model.build_model(model.read_shape(folder), "float32", layout)
    bridge.load_hf(chunks, folder)
    install_value_head(chunks)
    for chunk in chunks:
        core = model.unwrap(chunk)
        if core.post_process:
            with torch.no_grad():
                core.output_layer.weight.copy_(torch.linspace(-1, 1, 32))
    config = model.unwrap(chunks[0]).config
    wrapped = [DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), c) for c in chunks]
    config.finalize_model_grads_func = finalize_model_grads
    inputs = torch.randint(24, (BATCH, WIDTH), generator=torch.Generator().manual_seed(0))
    values = []

    def forward_step(iterator, chunk):
        part = next(iterator)
        output = chunk(part, torch.arange(WIDTH).expand_as(part), model.causal_mask(WIDTH))

        def loss(output):
            values.append(output.detach().clone())
            return output.square().sum(), torch.tensor(1, dtype=torch.int), {}

        return output, loss

    for chunk in wrapped:
        chunk.zero_grad_buffer()
    parts = inputs.split(1)
    get_forward_backward_func()(
        forward_step_func=forward_step, data_iterator=iter(parts), model=wrapped, num_microbatches=len(parts),
        seq_length=WIDTH, micro_batch_size=1, forward_only=False,
    )
    kept = {}
    for chunk in chunks:
        for key, parameter in model.unwrap(chunk).named_parameters():
            if "output_layer" in key or "norm" in key or "word_embeddings" in key:
                kept[key] = parameter.main_grad.clone()
    torch.save({"values": torch.cat(values) if values else None, "gradients": kept}, f"{out}/{name}.{rank}.pt")


for name, options in cases:
    layout = parallel.ParallelLayout(**options)
    parallel.initialize_parallel(layout, rank, world, f"file://{out}/meet{world}")
    run(name, layout)
    dist.barrier()
    parallel.leave_parallel()
"""
LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor": 2},
    "sequence": {"tensor": 2, "sequence": True},
    "pipeline": {"pipeline": 2},
}


def start(world: int, folder: str, cases: list[tuple[str, dict[str, Any]]], out: Path) -> None:
    """Run the cases on ``world`` ranks; each leaves a file a case."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    words = (str(world), folder, json.dumps(cases), str(out))
    ended = wait_for_all([ForkedRank("-c", RANK, str(rank), *words, env=environment) for rank in range(world)], 250)
    assert all(rank.code == 0 for rank in ended), ended


@pytest.mark.engine
def test_the_critic_is_the_same_in_every_layout(tmp_path: Path) -> None:
    """Tied embeddings: under pipeline parallelism the last stage must not add the head's gradient to the embedding's."""
    folder = tiny_model.create_qwen3(str(tmp_path / "model"), **SHAPE, tied=True)
    start(1, folder, [("whole", {})], tmp_path)
    start(2, folder, list(LAYOUTS.items()), tmp_path)
    whole = torch.load(tmp_path / "whole.0.pt", weights_only=True)
    assert whole["values"].abs().max() > 0.1
    for name in LAYOUTS:
        results = [torch.load(tmp_path / f"{name}.{rank}.pt", weights_only=True) for rank in range(2)]
        found = [result["values"] for result in results if result["values"] is not None]
        assert len(found) == (1 if name == "pipeline" else 2)
        for values in found:
            torch.testing.assert_close(values, whole["values"], rtol=1e-4, atol=1e-4)
        seen = set()
        for result in results:
            for key, gradient in result["gradients"].items():
                if name == "pipeline":  # a stage counts its layers from 0
                    if key.startswith("decoder.layers"):
                        continue
                elif "word_embeddings" in key:
                    continue  # split over the ranks
                torch.testing.assert_close(gradient, whole["gradients"][key], rtol=1e-4, atol=1e-4)
                seen.add(key)
        assert {"output_layer.weight", "output_layer.bias", "decoder.final_layernorm.weight"} <= seen
        assert name != "pipeline" or any("word_embeddings" in key for key in seen)
