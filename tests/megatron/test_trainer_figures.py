"""What the trainer says of a step is what its batch and its weights say, with the settings that hold a policy back."""

from __future__ import annotations

import math
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
)
from orchestrator.api import TrainBatch  # noqa: E402
from tests.megatron.test_trainer import make_batch, make_folder, make_trainer, run, same, weights_of  # noqa: E402
from tests.support.trainer_logits import plain_logits  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron")]


@pytest.fixture(scope="module", autouse=True)
def process_groups() -> Iterator[None]:
    parallel_layout.initialize_parallel()
    yield
    parallel_layout.shutdown_parallel()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_folder(tmp_path_factory.mktemp("model"))


def logprobs(trainer: Any, batch: TrainBatch) -> list[Any]:
    """Of each sample's own tokens, by a plain forward pass and torch's log_softmax."""
    found = []
    for sample in batch.samples:
        ids = torch.tensor([sample.token_ids])
        length = ids.shape[1]
        with torch.no_grad():
            logits = plain_logits(trainer, ids, torch.arange(length)[None], model.causal_mask(length))
        logp = logits[0].float().log_softmax(-1)
        found.append(torch.stack([logp[i - 1, ids[0, i]] for i, own in enumerate(sample.loss_mask) if own]))
    return found


def test_the_spread_of_advantages_and_the_silent_groups_are_those_of_the_rewards(folder: str) -> None:
    batch = make_batch(0)
    values = run(make_trainer(folder, settings={"loss": "token-mean"}).train_step(batch)).values
    groups: dict[str, list[float]] = {}
    for sample in batch.samples:
        groups.setdefault(sample.group_id, []).append(sample.reward)
    silent = sum(len(set(rewards)) == 1 for rewards in groups.values())
    advantages: list[float] = []
    for sample in batch.samples:
        rewards = groups[sample.group_id]
        deviation = np.std(rewards, ddof=1)
        advantage = (sample.reward - np.mean(rewards)) / deviation if deviation else 0.0
        advantages += [float(advantage)] * sum(sample.loss_mask)
    assert values["advantage_std"] == pytest.approx(np.std(advantages), rel=1e-4)
    assert values["groups_silent_share"] == silent / len(groups)


def test_the_percentiles_are_those_of_trainer_over_rollout(folder: str) -> None:
    trainer, batch = make_trainer(folder), make_batch(0)
    drift = torch.cat(logprobs(trainer, batch)).numpy() - np.concatenate(
        [[p for p, own in zip(s.logprobs, s.loss_mask, strict=True) if own] for s in batch.samples]
    )
    values = run(trainer.train_step(batch)).values
    for name, share in (("tis_p01", 1), ("tis_p50", 50), ("tis_p99", 99)):
        exact = np.percentile(drift, share, method="inverted_cdf")
        assert math.log(values[name]) == pytest.approx(exact, rel=0.06, abs=1e-3)
    assert values["tis_p01"] < values["tis_p50"] < values["tis_p99"]


def test_the_kl_to_the_reference_is_measured_without_touching_the_training(folder: str) -> None:
    plain, measured = make_trainer(folder), make_trainer(folder, settings={"reference_samples": 1000})
    start = make_trainer(folder)
    for step in range(2):
        batch = make_batch(step)
        now, then = torch.cat(logprobs(measured, batch)), torch.cat(logprobs(start, batch))
        expected = float((torch.exp(then - now) - 1 - (then - now)).mean())
        values = run(measured.train_step(batch)).values
        assert values["reference_kl"] == pytest.approx(expected, rel=1e-3, abs=1e-9)
        assert "reference_kl" not in run(plain.train_step(batch)).values
        assert (expected > 0) == (step > 0)
    assert same(weights_of(plain), weights_of(measured))


def test_the_reference_is_the_same_after_a_resume(folder: str, tmp_path: Path) -> None:
    settings = {"reference_samples": 4}
    first = make_trainer(folder, settings=settings)
    for step in range(2):
        run(first.train_step(make_batch(step)))
    run(first.save(str(tmp_path)))
    run(first.saved())
    second = make_trainer(folder, settings=settings)
    run(second.load(str(tmp_path)))
    batch = make_batch(2)
    found = [run(trainer.train_step(batch)).values["reference_kl"] for trainer in (first, second)]
    assert found[0] == found[1] > 0


def test_the_learning_rate_falls_as_a_cosine(folder: str) -> None:
    settings = {"learning_rate": 1e-2, "final_learning_rate": 1e-3, "lr_decay": "cosine", "lr_warmup_steps": 2}
    trainer = make_trainer(folder, total_steps=6, settings=settings)
    rates = [run(trainer.train_step(make_batch(step))).values["learning_rate"] for step in range(6)]
    shape = [0.5 * (1 + math.cos(math.pi * (step - 2) / 4)) for step in range(3, 7)]
    assert rates == pytest.approx([5e-3, 1e-2, *(1e-3 + 9e-3 * share for share in shape)])


@pytest.mark.parametrize("stream", [False, True])
def test_a_clip_to_the_rollout_acts_with_one_mini_batch(folder: str, stream: bool) -> None:
    common = {"learning_rate": 1e-3, "loss": "token-mean", "stream": stream}
    free, held = (
        make_trainer(folder, settings={**common, **more})
        for more in ({}, {"ratio_to": "rollout", "clip_high": 0.05, "clip_low": 0.05, "dual_clip": 1.1})
    )
    batch = make_batch(0)
    one, other = run(free.train_step(batch)).values, run(held.train_step(batch)).values
    assert one["clip_fraction"] == 0.0 < 0.2 < other["clip_fraction"]
    assert other["grad_norm"] < one["grad_norm"]
    assert other["tis_p99"] == one["tis_p99"], "how far they are apart is the same"
