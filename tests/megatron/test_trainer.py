"""The trainer behind the ``Trainer`` port, on real Megatron-Core with a tiny model."""

from __future__ import annotations

import asyncio
import json
import math
import random
import resource
import shutil
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from safetensors.torch import load_file  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from megatron_rlplugin import (  # noqa: E402
    model,
    parallel_layout,
    tiny_model,
)
from megatron_rlplugin.trainer import sharded_writer, trainer_checkpoint  # noqa: E402
from megatron_rlplugin.trainer.megatron_trainer import MegatronTrainer  # noqa: E402
from megatron_rlplugin.trainer.micro_batches import micro_batch  # noqa: E402
from megatron_rlplugin.trainer.replicas import MicroBatchShare  # noqa: E402
from megatron_rlplugin.weights import hf_bridge, hf_export  # noqa: E402
from orchestrator.api import (  # noqa: E402
    ConfigError,
    Prompt,
    RunError,
    TrainBatch,
    Trainer,
    TrainMetrics,
    TrainSample,
    Trajectory,
    Turn,
    merge_spans,
)
from orchestrator.shards.sample_references import SampleReference  # noqa: E402
from orchestrator.shards.shard_folder import ShardFolder  # noqa: E402
from orchestrator.train_samples import to_samples  # noqa: E402
from orchestrator.transfer import RelayEndpoint, Subscriber  # noqa: E402
from scripts.bench.probes.megatron.trainer_probe import state_digest  # noqa: E402
from tests.support.trainer_logits import plain_logits  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron")]
T = TypeVar("T")
VOCABULARY = 23
NAN = math.nan


@pytest.fixture(scope="module", autouse=True)
def process_groups() -> Iterator[None]:
    parallel_layout.initialize_parallel()
    yield
    parallel_layout.shutdown_parallel()


def make_folder(path: Path, **changes: Any) -> str:
    shape = {"hidden_size": 32, "intermediate_size": 48, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8}
    words = [f"w{index}" for index in range(VOCABULARY)]
    rest = {"vocabulary": words, "max_positions": 64, "dtype": "float32", "seed": 5}
    return tiny_model.create_qwen3(str(path), **{**shape, **rest, **changes})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_folder(tmp_path_factory.mktemp("model"))


def make_trainer(folder: str, total_steps: int = 10, **arguments: Any) -> MegatronTrainer:
    settings = {"learning_rate": 1e-2, **arguments.pop("settings", {})}
    return MegatronTrainer(model=folder, settings=settings, total_steps=total_steps, seed=3, **arguments)


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(coroutine)


def save(trainer: MegatronTrainer, folder: str) -> None:
    run(trainer.save(folder))
    run(trainer.saved())


def make_batch(step: int, groups: int = 4, members: int = 4) -> TrainBatch:
    """Random trajectories of several turns; rollout log-probs near uniform; versions mixed."""
    rng = random.Random(step)
    samples = []
    for index in range(groups * members):
        mask = [0, 0, 0]
        for _ in range(rng.randint(1, 4)):
            mask += [1] * rng.randint(1, 5) + [0] * rng.randint(0, 3)
        generated = sum(mask)
        old = rng.randint(0, generated)
        samples.append(
            TrainSample(
                trajectory_id=f"t{index}",
                group_id=f"g{index % groups}",
                token_ids=tuple(rng.randrange(VOCABULARY) for _ in mask),
                loss_mask=tuple(mask),
                logprobs=tuple(-3.1 + rng.gauss(0, 0.3) if own else 0.0 for own in mask),
                versions=tuple(span for span in ((step - 1, old), (step, generated - old)) if span[1]),
                reward=float(rng.random() < 0.5),
            )
        )
    return TrainBatch(step=step, version=step, samples=tuple(samples))


def change(batch: TrainBatch, index: int, **values: Any) -> TrainBatch:
    samples = list(batch.samples)
    samples[index] = replace(samples[index], **values)
    return replace(batch, samples=tuple(samples))


def without(batch: TrainBatch, *indices: int) -> TrainBatch:
    return replace(batch, samples=tuple(s for i, s in enumerate(batch.samples) if i not in indices))


def weights_of(trainer: MegatronTrainer) -> dict[str, Any]:
    return {name: value.clone() for name, value in hf_bridge.export_hf(trainer._learner.model)}


def gradients_of(trainer: MegatronTrainer) -> Any:
    return torch.cat([parameter.main_grad.flatten() for parameter in trainer._learner.model.parameters()]).clone()


def masters(trainer: MegatronTrainer) -> list[Any]:
    """The fp32 weights that Adam steps on."""
    (inner,) = trainer._learner.optimizer.chained_optimizers
    return [value.data for value in inner.get_parameters()]


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def comparable(metrics: TrainMetrics) -> dict[str, float]:
    """All but what depends on the clock, or on the weights before the last ones (a checkpoint holds only the last)."""
    gap = ("logprob_gap_mean", "logprob_gap_max", "logprob_gap_tokens")
    return {name: value for name, value in metrics.values.items() if name not in ("seconds", "stream_seconds", *gap)}


# -- the step --------------------------------------------------------------------------------------------------------


def test_a_step_changes_the_weights_and_makes_the_next_version(folder: str) -> None:
    trainer = make_trainer(folder)
    assert isinstance(trainer, Trainer)
    before = weights_of(trainer)
    batch = make_batch(0)
    metrics = run(trainer.train_step(batch))
    assert (metrics.step, metrics.version) == (0, 1)
    assert not same(before, weights_of(trainer))
    values = metrics.values
    assert all(math.isfinite(value) for value in values.values())
    assert values["tokens"] == sum(sum(sample.loss_mask) for sample in batch.samples)
    assert values["trajectories"] == len(batch.samples)
    assert values["trained_reward_mean"] == pytest.approx(sum(s.reward for s in batch.samples) / len(batch.samples))
    assert values["learning_rate"] == pytest.approx(1e-2)
    assert values["skipped"] == values["skipped_updates"] == values["approx_kl"] == values["clip_fraction"] == 0
    assert 0 < values["ess"] <= 1
    assert 0 < values["tis_mean"] <= values["tis_max"] <= 2.0
    fresh = sum(count for sample in batch.samples for version, count in sample.versions if version == 0)
    assert values["logprob_gap_tokens"] == fresh < values["tokens"]
    assert 0 < values["logprob_gap_mean"] < values["logprob_gap_max"]
    needed = {"loss", "grad_norm", "entropy", "logprob_gap_all", "seconds"}
    assert needed <= values.keys()


@pytest.mark.parametrize("loss", ["token-mean", "sequence-mean"])
def test_the_micro_batch_size_does_not_change_the_gradient(folder: str, loss: str) -> None:
    gradients = []
    for size in (1, 3, 7, 64):
        settings = {"micro_batch_size": size, "loss": loss, "clip_grad": 0.0, "entropy_coefficient": 0.01}
        trainer = make_trainer(folder, settings=settings)
        run(trainer.train_step(make_batch(0)))
        gradients.append(gradients_of(trainer))
    norm = gradients[-1].norm()
    assert norm > 0.01
    for gradient in gradients[:-1]:
        assert (gradient - gradients[-1]).norm() <= 1e-6 * norm


@pytest.mark.parametrize("loss", ["token-mean", "sequence-mean"])
def test_the_gradient_is_that_of_transformers_and_a_loop_over_trajectories(folder: str, loss: str) -> None:
    """An objective written down again, on another implementation of the model, through the whole trainer."""
    transformers = pytest.importorskip("transformers")
    batch = make_batch(0)
    settings = {"loss": loss, "clip_grad": 0.0, "tis_cap": 1.1, "normalize_advantage": True}
    trainer = make_trainer(folder, settings=settings)
    metrics = run(trainer.train_step(batch))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    groups: dict[str, list[float]] = {}
    for sample in batch.samples:
        groups.setdefault(sample.group_id, []).append(sample.reward)
    total = torch.zeros((), dtype=torch.float64)
    tokens = 0
    for sample in batch.samples:
        rewards = groups[sample.group_id]
        spread = np.std(rewards, ddof=1)
        advantage = (sample.reward - np.mean(rewards)) / (spread + 1e-6) if spread else 0.0
        logp = theirs(torch.tensor([sample.token_ids])).logits[0].log_softmax(-1)
        terms = []
        for place, own in enumerate(sample.loss_mask):
            if own:
                now = logp[place - 1, sample.token_ids[place]]
                weight = min(math.exp(float(now.detach()) - sample.logprobs[place]), 1.1)
                terms.append(-weight * advantage * now)  # at ratio 1 the surrogate's gradient is that of A log pi
        tokens += len(terms)
        total = total + (sum(terms) if loss == "token-mean" else sum(terms) / len(terms))
    divisor = tokens if loss == "token-mean" else len(batch.samples)
    (total / divisor).backward()
    norm = math.sqrt(sum(float(parameter.grad.square().sum()) for parameter in theirs.parameters()))
    assert metrics.values["grad_norm"] == pytest.approx(norm, rel=1e-4)
    expected = theirs.get_output_embeddings().weight.grad
    found = dict(trainer._learner.model.named_parameters())["module.output_layer.weight"].main_grad
    assert (found.double() - expected).norm() <= 1e-5 * expected.norm()


def test_mini_batches_take_one_optimizer_step_each_and_clip(folder: str) -> None:
    settings = {"minibatches": 3, "learning_rate": 0.05, "clip_low": 0.01, "clip_high": 0.01}
    metrics = run(make_trainer(folder, settings=settings).train_step(make_batch(0)))
    assert metrics.values["updates"] == 3
    assert metrics.values["clip_fraction"] > 0
    assert metrics.values["approx_kl"] > 0
    assert metrics.version == 1
    # The gap is measured with the weights that the step began with, whatever the mini-batches did to them.
    once = run(make_trainer(folder, settings={"learning_rate": 0.05}).train_step(make_batch(0)))
    for name in ("logprob_gap_mean", "logprob_gap_max", "logprob_gap_all", "tis_mean", "ess"):
        assert metrics.values[name] == pytest.approx(once.values[name], rel=1e-4), name


def test_the_same_seed_gives_the_same_bits(folder: str) -> None:
    results = []
    for _ in range(2):
        trainer = make_trainer(folder, settings={"minibatches": 2, "micro_batch_size": 3})
        metrics = [comparable(run(trainer.train_step(make_batch(step)))) for step in range(3)]
        results.append((metrics, weights_of(trainer)))
    assert results[0][0] == results[1][0]
    assert same(results[0][1], results[1][1])


@pytest.mark.parametrize("stream", [False, True])
def test_references_are_trained_on_as_the_samples_themselves_and_read_for_their_micro_batches_alone(
    folder: str, tmp_path: Path, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, groups that are fed before the batch included, and with the passes that other objectives need."""
    shards, read = ShardFolder(tmp_path / "disk", tmp_path), list[str]()
    settings = {"stream": stream, "kl_coefficient": 0.1, "max_token_lag": 3}
    one, other = (make_trainer(folder, settings=settings) for _ in range(2))
    look = SampleReference.read
    monkeypatch.setattr(SampleReference, "read", lambda self: (read.append(self.shard.path), look(self))[1])
    for step in range(3):
        batch = by_group(change(make_batch(step), 5, reward=NAN))
        referred = replace(batch, samples=tuple(sample for one in batch.samples for sample in reference(one, shards)))
        if stream:
            run(one.feed(batch.samples[:8], step))
            run(other.feed(referred.samples[:8], step))
        read.clear()
        assert comparable(run(one.train_step(batch))) == comparable(run(other.train_step(referred)))
        lost = next(index for index, sample in enumerate(batch.samples) if sample.reward != sample.reward)
        source = referred.samples[lost].source
        assert isinstance(source, SampleReference)
        assert source.shard.path not in read, "nobody reads what nobody computes"
        assert read
    assert same(weights_of(one), weights_of(other))
    shards.close()


def by_group(batch: TrainBatch) -> TrainBatch:
    return replace(batch, samples=tuple(sorted(batch.samples, key=lambda sample: sample.group_id)))


def reference(sample: TrainSample, shards: ShardFolder) -> list[TrainSample]:
    """The same in a shard: a turn for each run of tokens of the environment and of the policy."""
    turns, at, spans = list[Turn](), 0, [version for version, count in sample.versions for _ in range(count)]
    while at < len(sample.token_ids):
        begin = at
        while at < len(sample.token_ids) and not sample.loss_mask[at]:
            at += 1
        end = at
        while end < len(sample.token_ids) and sample.loss_mask[end]:
            end += 1
        versions = merge_spans((version, 1) for version in spans[: end - at])
        del spans[: end - at]
        turns.append(Turn(sample.token_ids[begin:at], sample.token_ids[at:end], sample.logprobs[at:end], versions))
        at = end
    prompt = Prompt("key", "task", 0, "")
    trajectory = Trajectory(
        sample.trajectory_id, sample.group_id, "task", prompt, tuple(turns), sample.reward, "1", 0, False
    )
    return to_samples(shards.finish(trajectory), sample.weight)


def test_a_rewarded_token_becomes_more_probable(folder: str) -> None:
    """A bandit: one prompt token, one action, reward for action 4. Sampled from the trainer's own policy."""
    trainer = make_trainer(folder, total_steps=12, settings={"learning_rate": 5e-3})
    generator = torch.Generator().manual_seed(0)

    def policy() -> Any:
        tokens = torch.tensor([[1]])
        with torch.no_grad():
            logits = plain_logits(trainer, tokens, torch.zeros_like(tokens), model.causal_mask(1))
        return logits[0, 0].log_softmax(-1)

    before = float(policy()[4].exp())
    for step in range(12):
        logp = policy()
        actions = torch.multinomial(logp.exp(), 64, replacement=True, generator=generator).tolist()
        samples = tuple(
            TrainSample(
                f"{step}-{i}", f"g{i // 16}", (1, a), (0, 1), (0.0, float(logp[a])), ((step, 1),), float(a == 4)
            )
            for i, a in enumerate(actions)
        )
        metrics = run(trainer.train_step(TrainBatch(step, step, samples)))
        assert metrics.values["logprob_gap_max"] < 1e-5
        assert metrics.values["ess"] == pytest.approx(1, abs=1e-5)
    assert float(policy()[4].exp()) > 3 * before


def test_the_learning_rate_follows_warm_up_and_decay(folder: str) -> None:
    settings = {"learning_rate": 1e-2, "final_learning_rate": 2e-3, "lr_warmup_steps": 2}
    trainer = make_trainer(folder, total_steps=6, settings=settings)
    rates = [run(trainer.train_step(make_batch(step))).values["learning_rate"] for step in range(6)]
    assert rates == pytest.approx([5e-3, 1e-2, 8e-3, 6e-3, 4e-3, 2e-3])


def test_log_probs_are_those_of_the_sampling_temperature(folder: str) -> None:
    sample = make_batch(0).samples[0]
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logp = (theirs(torch.tensor([sample.token_ids])).logits[0] / 0.6).log_softmax(-1)
    own = tuple(
        float(logp[place - 1, token]) if mask else 0.0
        for place, (token, mask) in enumerate(zip(sample.token_ids, sample.loss_mask, strict=True))
    )
    sample = replace(sample, logprobs=own, versions=((0, sum(sample.loss_mask)),))
    batch = TrainBatch(0, 0, (sample, replace(sample, trajectory_id="other", reward=1 - sample.reward)))
    for temperature, fits in ((0.6, True), (1.0, False)):
        trainer = make_trainer(folder, temperature=temperature)
        gap = run(trainer.logprob_gap(batch.samples))
        assert gap["tokens"] == 2 * sum(sample.loss_mask)
        assert (gap["max"] < 1e-5) == fits
        assert (run(trainer.train_step(batch)).values["logprob_gap_max"] < 1e-5) == fits


def own_logprobs(trainer: MegatronTrainer, sample: TrainSample) -> tuple[float, ...]:
    """What a perfect rollout with the trainer's present weights would report."""
    tokens = torch.tensor([sample.token_ids])
    positions = torch.arange(tokens.shape[1])[None]
    with torch.no_grad():
        logp = plain_logits(trainer, tokens, positions, model.causal_mask(tokens.shape[1]))[0].log_softmax(-1)
    pairs = enumerate(zip(sample.token_ids, sample.loss_mask, strict=True))
    return tuple(float(logp[place - 1, token]) if own else 0.0 for place, (token, own) in pairs)


def test_the_gap_is_measured_with_the_weights_that_made_the_tokens(folder: str) -> None:
    """An asynchronous run: every batch was made by the version before the one it trains."""
    for samples, measured in ((32, True), (3, True), (0, False)):
        trainer = make_trainer(folder, settings={"logprob_gap_samples": samples, "learning_rate": 0.02})
        made: list[TrainBatch] = []
        for step in range(3):
            batch = make_batch(step + 1)
            exact = [
                replace(s, logprobs=own_logprobs(trainer, s), versions=((step, sum(s.loss_mask)),))
                for s in batch.samples
            ]
            made.append(replace(batch, samples=tuple(exact)))
            if step == 0:
                run(trainer.train_step(make_batch(0)))
                continue
            before = weights_of(trainer)
            trainer._previous_gap(made[step - 1].samples)
            assert same(before, weights_of(trainer))
            values = run(trainer.train_step(replace(made[step - 1], step=step, version=step))).values
            assert values["logprob_gap_all"] > 1e-2  # against the weights that are trained
            assert (values["logprob_gap_tokens"] > 0) == measured
            tokens = [sum(sample.loss_mask) for sample in made[step - 1].samples]
            assert values["logprob_gap_tokens"] == sum(tokens[:samples])
            assert values["logprob_gap_max"] < 1e-5


# -- what is left out ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cause", "values"),
    [
        ("reward_not_finite", {"reward": NAN}),
        ("reward_not_finite", {"reward": math.inf}),
        ("logprob_not_finite", "logprob"),
        ("no_policy_token", {"loss_mask": (0, 0), "token_ids": (1, 2), "logprobs": (0.0, 0.0), "versions": ()}),
    ],
)
def test_a_sample_that_cannot_be_trained_on_is_left_out_and_counted(folder: str, cause: str, values: Any) -> None:
    batch = make_batch(0)
    if values == "logprob":
        sample = batch.samples[2]
        values = {"logprobs": tuple(NAN if own else 0.0 for own in sample.loss_mask)}
    trainer, other = make_trainer(folder), make_trainer(folder)
    metrics = run(trainer.train_step(change(batch, 2, **values)))
    assert metrics.values["skipped"] == metrics.values[f"skipped_{cause}"] == 1
    assert metrics.values["trajectories"] == len(batch.samples) - 1
    expected = run(other.train_step(without(batch, 2)))
    assert comparable(expected) == comparable(metrics) | {"skipped": 0.0, f"skipped_{cause}": 0.0}
    assert same(weights_of(trainer), weights_of(other))


def test_a_batch_without_usable_samples_changes_no_weight(folder: str) -> None:
    batch = make_batch(0, groups=1, members=2)
    trainer = make_trainer(folder)
    before = weights_of(trainer)
    metrics = run(trainer.train_step(change(change(batch, 0, reward=NAN), 1, reward=NAN)))
    assert metrics.version == 1
    assert metrics.values["skipped"] == 2
    assert metrics.values["updates"] == 0
    assert same(before, weights_of(trainer))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_update_whose_gradient_is_not_finite_is_not_taken(folder: str, dtype: str, tmp_path: Path) -> None:
    trainer = make_trainer(make_folder(tmp_path / "model", dtype=dtype), dtype=dtype)
    run(trainer.train_step(make_batch(0)))
    before = weights_of(trainer)
    first = str(trainer._learner.optimizer.state_dict())
    output = model.unwrap(trainer._learner.model).output_layer.weight
    hook = output.register_hook(lambda gradient: gradient * NAN)
    metrics = run(trainer.train_step(make_batch(1)))
    hook.remove()
    assert metrics.version == 2
    assert (metrics.values["updates"], metrics.values["skipped_updates"]) == (0, 1)
    assert "grad_norm" not in metrics.values
    assert same(before, weights_of(trainer))
    assert first == str(trainer._learner.optimizer.state_dict())
    assert run(trainer.train_step(make_batch(2))).values["updates"] == 1


@pytest.mark.parametrize(
    ("change_to", "message"),
    [
        (
            {"token_ids": (1, VOCABULARY), "loss_mask": (0, 1), "logprobs": (0.0, -1.0), "versions": ((0, 1),)},
            "vocabulary",
        ),
        ({"token_ids": (1,) * 65, "loss_mask": (0,) * 65, "logprobs": (0.0,) * 65, "versions": ()}, "64 positions"),
        (
            {"token_ids": (1, 2), "loss_mask": (1, 1), "logprobs": (-1.0, -1.0), "versions": ((0, 2),)},
            "nothing predicts",
        ),
        ({"token_ids": (1, 2), "loss_mask": (0, 1), "logprobs": (-1.0,), "versions": ((0, 1),)}, "differ in length"),
        (
            {"token_ids": (1, 2), "loss_mask": (0, 1), "logprobs": (0.0, -1.0), "versions": ((0, 2),)},
            "differ in length",
        ),
        ({"token_ids": (1, 2), "loss_mask": (0,), "logprobs": (0.0, -1.0), "versions": ()}, "mask entries"),
    ],
)
def test_a_malformed_sample_stops_the_run(folder: str, change_to: dict[str, Any], message: str) -> None:
    trainer = make_trainer(folder)
    with pytest.raises(RunError, match=f"trajectory t1: .*{message}"):
        run(trainer.train_step(change(make_batch(0), 1, **change_to)))
    assert run(trainer.status())["version"] == 0


def test_a_batch_for_another_version_is_refused(folder: str) -> None:
    with pytest.raises(RunError, match="a batch for version 1, but the trainer is at version 0"):
        run(make_trainer(folder).train_step(make_batch(1)))


# -- warm-up ---------------------------------------------------------------------------------------------------------


def test_a_warm_up_learns_and_leaves_no_trace_in_the_optimizer(folder: str, tmp_path: Path) -> None:
    trainer = make_trainer(folder, total_steps=5, settings={"micro_batch_size": 5, "lr_warmup_steps": 2})
    samples = [((1, 2, 3, 4, index % 5 + 5), (0, 1, 1, 1, 0)) for index in range(16)]
    losses = [run(trainer.supervised_step(samples, 1e-2))["loss"] for _ in range(15)]
    assert losses[-1] < 0.2 * losses[0]
    with pytest.raises(RunError, match="finish_warmup"):
        run(trainer.train_step(make_batch(0)))
    run(trainer.finish_warmup())
    run(trainer.export(str(tmp_path / "warm")))
    fresh = make_trainer(str(tmp_path / "warm"), total_steps=5, settings={"micro_batch_size": 5, "lr_warmup_steps": 2})
    for step in range(2):
        one, other = run(trainer.train_step(make_batch(step))), run(fresh.train_step(make_batch(step)))
        assert comparable(one) == comparable(other)
    assert same(weights_of(trainer), weights_of(fresh))
    with pytest.raises(RunError, match="RL has begun"):
        run(trainer.supervised_step(samples, 1e-2))


# -- checkpoints and weights -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_restored_trainer_continues_bit_for_bit(tmp_path: Path, dtype: str) -> None:
    folder = make_folder(tmp_path / "model", dtype=dtype)
    settings = {"minibatches": 2, "micro_batch_size": 3, "final_learning_rate": 1e-4, "lr_warmup_steps": 1}
    whole = make_trainer(folder, settings=settings, dtype=dtype)
    for step in range(3):
        run(whole.train_step(make_batch(step)))
    save(whole, str(tmp_path / "checkpoint"))
    expected = [comparable(run(whole.train_step(make_batch(step)))) for step in range(3, 6)]

    torch.manual_seed(999)  # the state of this process must not matter
    restored = make_trainer(folder, settings=settings, dtype=dtype)
    run(restored.train_step(make_batch(0)))  # nor what the trainer did before
    assert run(restored.load(str(tmp_path / "checkpoint"))) == 3
    assert [comparable(run(restored.train_step(make_batch(step)))) for step in range(3, 6)] == expected
    assert same(weights_of(whole), weights_of(restored))
    assert state_digest(whole._learner) == state_digest(restored._learner)
    for one, other in zip(masters(whole), masters(restored), strict=True):
        assert one.dtype == torch.float32
        assert torch.equal(one, other)


@pytest.mark.parametrize("change", [{"layers": 3}, {"hidden_size": 40}, {"vocabulary": ["a", "b"]}, {"tied": True}])
def test_a_checkpoint_of_another_architecture_is_refused(folder: str, tmp_path: Path, change: dict[str, Any]) -> None:
    other = make_trainer(make_folder(tmp_path / "other", **change))
    save(other, str(tmp_path / "checkpoint"))
    trainer = make_trainer(folder)
    before = weights_of(trainer)
    with pytest.raises(ConfigError, match=r"^model\.\w+ = .*is from another model"):
        run(trainer.load(str(tmp_path / "checkpoint")))
    assert same(before, weights_of(trainer))


def test_what_is_no_checkpoint_is_refused(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(folder)
    with pytest.raises(ConfigError, match="is not a model folder"):
        run(trainer.load(str(tmp_path)))
    with pytest.raises(ConfigError, match="is not a checkpoint of this trainer"):
        run(trainer.load(folder))
    save(trainer, str(tmp_path / "checkpoint"))
    with pytest.raises(ConfigError, match="is not an empty folder"):
        save(trainer, str(tmp_path / "checkpoint"))
    with monkeypatch.context() as patched:
        patched.setattr(trainer_checkpoint, "FORMAT", 2)
        with pytest.raises(ConfigError, match="it is of format 3, this version reads 2"):
            run(trainer.load(str(tmp_path / "checkpoint")))
    for name in (".metadata", "__0_0.distcp"):
        shutil.copytree(tmp_path / "checkpoint", tmp_path / f"without {name}")
        state = tmp_path / f"without {name}" / name
        state.write_bytes(state.read_bytes()[:100])
        with pytest.raises(ConfigError, match="is not a checkpoint of this trainer"):
            run(trainer.load(str(state.parent)))
    bf16 = make_trainer(make_folder(tmp_path / "bf16", dtype="bfloat16"), dtype="bfloat16")
    save(bf16, str(tmp_path / "half"))
    with pytest.raises(ConfigError, match=r"^model.dtype = 'bfloat16'"):
        run(trainer.load(str(tmp_path / "half")))


def test_what_cannot_be_written_is_named_with_the_room_there_is(folder: str, tmp_path: Path) -> None:
    trainer = make_trainer(folder)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))  # as a disk that is full
    try:
        with pytest.raises(RunError, match=r"weights/model.safetensors cannot be written \(\d+ MB free there\): "):
            run(trainer.export(str(tmp_path / "weights")))
        with pytest.raises(RunError, match=r"state cannot be written \(\d+ MB free there\): "):
            save(trainer, str(tmp_path / "state"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_model_of_another_architecture_is_refused(folder: str, tmp_path: Path) -> None:
    other = Path(make_folder(tmp_path / "other"))
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"architectures": ["GPTNeoXForCausalLM"]}))
    with pytest.raises(ConfigError, match=r"^model.architectures = 'GPTNeoXForCausalLM'"):
        make_trainer(str(other))


@pytest.mark.parametrize("name", ["fp8", "fp4"])
def test_a_precision_that_would_be_passed_over_in_silence_is_refused(folder: str, name: str) -> None:
    value = {"fp8": "hybrid", "fp4": "e2m1"}[name]
    with pytest.raises(ConfigError, match=rf"^trainer.megatron.{name} = '{value}': needs CUDA and Transformer Engine"):
        make_trainer(folder, settings={"megatron": {name: value}})


def test_an_exported_folder_is_a_model_with_the_present_weights(folder: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    trainer = make_trainer(folder)
    run(trainer.train_step(make_batch(0)))
    run(trainer.export(str(tmp_path / "out")))
    assert same(load_file(tmp_path / "out" / "model.safetensors"), weights_of(trainer))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert torch.equal(theirs.lm_head.weight, weights_of(trainer)["lm_head.weight"])
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").encode("w5") == [5]


def test_a_large_export_is_several_files_of_which_one_is_held_at_a_time(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    trainer, limit = make_trainer(folder), 12_000
    monkeypatch.setattr(hf_export, "FILE_BYTES", limit)
    held: list[int] = []
    write = hf_export._write_tensors

    def counting(file: Path, tensors: dict[str, Any]) -> None:
        held.append(sum(tensor.nbytes for tensor in tensors.values()))
        write(file, tensors)

    monkeypatch.setattr(hf_export, "_write_tensors", counting)
    run(trainer.export(str(tmp_path / "out")))
    names = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(names) == len(held) > 2
    assert names[0] == f"model-00001-of-{len(names):05d}.safetensors"
    assert max(held) <= limit
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert torch.equal(theirs.lm_head.weight, weights_of(trainer)["lm_head.weight"])
    assert same(weights_of(make_trainer(str(tmp_path / "out"))), weights_of(trainer))


def test_what_is_saved_is_copied_to_the_host_and_not_on_the_device() -> None:
    def copied(tensor: Any) -> Any:
        (_, found), *_ = sharded_writer._on_host(("file", "key", ([], [("item", tensor)])))[2][1]
        return found

    with FakeTensorMode():
        on_device = torch.empty(3, device="cuda")
        kept = copied(on_device)
    assert (on_device.device.type, kept.device.type) == ("cuda", "cpu")
    here = torch.ones(3)
    assert copied(here).data_ptr() != here.data_ptr()


def test_the_reference_takes_the_models_place_only_where_something_is_computed(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(folder, settings={"kl_coefficient": 0.1})
    rows, _, _ = trainer._experience.rows(make_batch(0).samples, 0)
    moved: list[int] = []
    exchange = trainer._learner._exchange_weights
    monkeypatch.setattr(trainer._learner, "_exchange_weights", lambda weights: (moved.append(1), exchange(weights)))
    trainer._experience.complete_rows(rows, [], [])
    assert not moved
    trainer._experience.complete_rows(rows, [[0, 1]], [MicroBatchShare([0, 1])])
    assert len(moved) == 2
    assert rows[0].reference is not None


def test_rows_have_as_many_tokens_as_kernels_of_fp8_take(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(folder)
    built = trainer._learner
    assert trainer._limits.multiple == built.row_multiple == 1
    monkeypatch.setattr(built.config, "fp8", "hybrid")
    for recipe, multiple in (("tensorwise", 16), ("mxfp8", 32)):
        monkeypatch.setattr(built.config, "fp8_recipe", recipe)
        assert built.row_multiple == multiple


def test_stages_tell_each_other_shapes_only_where_they_differ(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(folder)
    rows, _, _ = trainer._experience.rows(make_batch(0).samples, 0)
    batches = [micro_batch(rows, [index], trainer._limits, "token-mean") for index in range(8)]
    widths = [batch.inputs_BS.shape[1] for batch in batches]
    alike = [batch for batch, width in zip(batches, widths, strict=True) if width == widths[0]]
    assert len(alike) < len(batches)
    built = trainer._learner
    monkeypatch.setattr(built, "layout", replace(built.layout, pipeline=2))
    told = []
    for some in (batches, alike, batches):
        built._schedule(some)
        told.append(built.config.variable_seq_lengths)
    assert told == [True, False, True]


def test_replicas_share_the_search_for_a_gradient_that_is_not_finite(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(folder)
    stepper, replicas = trainer._stepper, trainer._replicas
    rows, _, _ = trainer._experience.rows(make_batch(0).samples, 0)
    looked: list[int] = []

    def is_finite(batch: Any, loss: Any, *, together: bool) -> bool:
        looked.append(batch.indices[0])
        return batch.indices[0] != 4

    monkeypatch.setattr(trainer._learner, "gradient_is_finite", is_finite)
    monkeypatch.setattr(replicas, "count", 4)
    plans = [[index] for index in range(8)]
    assert stepper._not_finite(rows, plans, trainer._learner, stepper._policy_loss) == [4]
    assert looked == [0, 4]  # every fourth
    monkeypatch.setattr(replicas, "in_step", True)  # they share experts: all compute all
    looked.clear()
    assert stepper._not_finite(rows, plans, trainer._learner, stepper._policy_loss) == [4]
    assert looked == list(range(8))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_published_is_what_is_trained_bit_for_bit(tmp_path: Path, dtype: str) -> None:
    endpoint = RelayEndpoint(job=f"trainer-{dtype}", kind="memory", master=f"trainer-{dtype}", bucket_bytes=8192)
    trainer = make_trainer(make_folder(tmp_path / "model", dtype=dtype), dtype=dtype, relay=endpoint.to_dict())
    subscriber = Subscriber(endpoint)
    for step in range(2):
        result = run(trainer.publish())
        assert result.version == subscriber.latest_version() == step
        manifest = subscriber.manifest(step)
        received = {shard.tensor: (shard, np.array(data)) for shard, data in subscriber.fetch(manifest)}
        expected = weights_of(trainer)
        assert received.keys() == expected.keys()
        for name, value in expected.items():
            shard, data = received[name]
            assert (shard.global_shape, shard.dtype) == (tuple(value.shape), dtype)
            raw = torch.from_numpy(data).view(getattr(torch, dtype)).reshape(value.shape)
            assert torch.equal(raw, value)
        assert result.bytes == sum(value.nbytes for value in expected.values())
        run(trainer.train_step(make_batch(step)))
    subscriber.close()
    run(trainer.close())
    run(trainer.close())


def test_after_a_rollback_the_restored_version_can_be_published_again(folder: str, tmp_path: Path) -> None:
    endpoint = RelayEndpoint(job="rollback", kind="memory", master="rollback")
    trainer = make_trainer(folder, relay=endpoint.to_dict())
    subscriber = Subscriber(endpoint)
    run(trainer.publish())
    save(trainer, str(tmp_path / "checkpoint"))
    run(trainer.train_step(make_batch(0)))
    run(trainer.publish())
    assert subscriber.latest_version() == 1
    run(trainer.load(str(tmp_path / "checkpoint")))
    run(trainer.publish())
    assert subscriber.latest_version() == 0
    subscriber.close()
    run(trainer.close())


def test_publishing_without_a_relay_is_refused(folder: str) -> None:
    with pytest.raises(ConfigError, match=r"^relay = None"):
        run(make_trainer(folder).publish())


def test_the_status_says_what_is_live(folder: str) -> None:
    status = run(make_trainer(folder, weight_version=4).status())
    assert status["cpu_shims_active"] is not torch.cuda.is_available()
    assert status["hook_mismatches"] == []
    assert status["version"] == 4
    assert status["megatron_core"]
