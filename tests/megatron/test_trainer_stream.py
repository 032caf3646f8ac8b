"""Training on groups before their batch is complete: the same bits as without, or a counted restart."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from megatron_rlplugin import (  # noqa: E402
    model,
    parallel_layout,
)
from megatron_rlplugin.stream.gradient_stream import GradientStream  # noqa: E402
from megatron_rlplugin.trainer.megatron_trainer import MegatronTrainer  # noqa: E402
from orchestrator.api import ConfigError, RunError, TrainBatch, TrainSample  # noqa: E402
from scripts.bench.probes.megatron.trainer_probe import (  # noqa: E402
    chunked,
    comparable,
    make_batch,
    state_digest,
    tiny_folder,
    train,
    weights_digest,
)

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron")]
T = TypeVar("T")
ARRIVAL = {"micro_batch_order": "arrival", "micro_batch_size": 4}
STREAM = {"stream": True, "micro_batch_size": 4}


@pytest.fixture(scope="module", autouse=True)
def process_groups() -> Iterator[None]:
    parallel_layout.initialize_parallel()
    yield
    parallel_layout.shutdown_parallel()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_folder(tmp_path_factory.mktemp("model"))


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(coroutine)


def make_trainer(folder: str, dtype: str = "float32", **settings: Any) -> MegatronTrainer:
    settings = {"learning_rate": 1e-2, **settings}
    return MegatronTrainer(model=folder, settings=settings, total_steps=30, seed=3, dtype=dtype)


def state_of(trainer: MegatronTrainer) -> tuple[str, ...]:
    """Of weights and optimizer state, the critic's included."""
    critic = () if trainer._critic is None else (state_digest(trainer._critic),)
    return (state_digest(trainer._learner), *critic)


# -- equality --------------------------------------------------------------------------------------------------------

OBJECTIVES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "grpo-packed": {"pack_tokens": 40, "micro_batch_size": 9, "loss": "token-mean"},
    "grpo-kl-lag": {"kl_coefficient": 0.1, "max_token_lag": 0},
    "dapo": {"objective": "dapo", "entropy_coefficient": 0.01},
    "rloo": {"objective": "rloo"},
    "gspo": {"objective": "gspo"},
    "ppo": {"objective": "ppo", "normalize_advantage": False, "kl_coefficient": 0.05, "kl_estimator": "k2"},
    "ppo-kl-in-reward": {
        "objective": "ppo",
        "normalize_advantage": False,
        "kl_coefficient": 0.05,
        "kl_estimator": "k1",
        "kl_in_reward": True,
    },
}


def test_twenty_streamed_steps_end_with_the_bits_of_twenty_monolithic_ones(folder: str) -> None:
    """Every feeding: none, group by group, in uneven parts, all at once; gradients offloaded between or not."""
    feedings: list[list[int]] = [[], [1, 1, 1, 1, 1], [2, 1], [5], [1], [0, 3, 2]]
    plain = make_trainer(folder, **ARRIVAL)
    streamed = [make_trainer(folder, **STREAM, grad_offload=bool(index % 2)) for index in range(3)]
    for step in range(20):
        batch = make_batch(step)
        expected = train(plain, batch)
        assert expected.values["updates"] == 1
        for index, trainer in enumerate(streamed):
            feeding = feedings[(step + index) % len(feedings)]
            metrics = train(trainer, batch, feeding)
            assert comparable(metrics) == comparable(expected)
            assert metrics.values["stream_restarts"] == 0
            if sum(feeding) == 5:  # two groups of three make a micro-batch of no more than four: one is always open
                assert metrics.values["stream_fed"] == pytest.approx(12 / 15)
    assert len({state_of(trainer) for trainer in (plain, *streamed)}) == 1
    assert weights_digest(plain._learner) != weights_digest(make_trainer(folder)._learner)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_streaming_changes_no_bit_of_any_objective(folder: str, name: str) -> None:
    plain = make_trainer(folder, **{**ARRIVAL, **OBJECTIVES[name]})
    streamed = make_trainer(folder, **{**STREAM, **OBJECTIVES[name]})
    before = state_of(plain)
    for step in range(3):
        expected, metrics = train(plain, make_batch(step)), train(streamed, make_batch(step), [1, 2, 1])
        assert comparable(metrics) == comparable(expected)
        assert metrics.values["stream_fed"] > 0
    assert state_of(plain) == state_of(streamed) != before


def test_streaming_changes_no_bit_in_bf16_with_fp32_masters(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "model", dtype="bfloat16")
    plain = make_trainer(folder, "bfloat16", **ARRIVAL)
    streamed = make_trainer(folder, "bfloat16", **STREAM, grad_offload=True)
    for step in range(3):
        assert comparable(train(plain, make_batch(step))) == comparable(train(streamed, make_batch(step), [2, 2]))
    assert state_of(plain) == state_of(streamed)


def test_samples_that_are_left_out_are_left_out_of_the_stream(folder: str) -> None:
    batch = make_batch(0)
    samples = list(batch.samples)
    samples[1] = replace(samples[1], reward=math.nan)
    samples[3] = replace(samples[3], logprobs=tuple(math.inf if own else 0.0 for own in samples[3].loss_mask))
    batch = replace(batch, samples=tuple(samples))
    plain, streamed = make_trainer(folder, **ARRIVAL), make_trainer(folder, **STREAM)
    expected, metrics = train(plain, batch), train(streamed, batch, [1, 1, 3])
    assert comparable(metrics) == comparable(expected)
    assert (metrics.values["skipped_reward_not_finite"], metrics.values["skipped_logprob_not_finite"]) == (1, 1)
    assert metrics.values["stream_restarts"] == 0
    assert state_of(plain) == state_of(streamed)


# -- what is fed counts only if the batch keeps to it ----------------------------------------------------------------


def swapped(batch: TrainBatch) -> TrainBatch:
    """The second group before the first."""
    return replace(batch, samples=(*batch.samples[3:6], *batch.samples[:3], *batch.samples[6:]))


def changed(batch: TrainBatch) -> TrainBatch:
    first = replace(batch.samples[0], reward=batch.samples[0].reward + 1)
    return replace(batch, samples=(first, *batch.samples[1:]))


def torn(batch: TrainBatch) -> TrainBatch:
    """A member of the first group stands at the end."""
    return replace(batch, samples=(*batch.samples[:2], *batch.samples[3:], batch.samples[2]))


@pytest.mark.parametrize(
    "become",
    [
        pytest.param(lambda batch: replace(batch, samples=batch.samples[3:]), id="evicted"),
        pytest.param(lambda batch: replace(batch, samples=batch.samples[:3]), id="shorter"),
        pytest.param(swapped, id="another order"),
        pytest.param(changed, id="changed"),
        pytest.param(torn, id="a group goes on"),
    ],
)
def test_a_batch_that_does_not_keep_to_what_was_fed_is_trained_from_the_start(folder: str, become: Any) -> None:
    fed = make_batch(0)
    batch = become(fed)
    plain, streamed = make_trainer(folder, **ARRIVAL), make_trainer(folder, **STREAM, grad_offload=True)
    expected = train(plain, batch)
    for part in chunked(fed.samples, [1, 2]):
        run(streamed.feed(part, 0))
    assert run(streamed.status())["fed"] > 0
    metrics = run(streamed.train_step(batch))
    assert (metrics.values["stream_restarts"], metrics.values["stream_fed"]) == (1, 0)
    assert comparable(metrics) == comparable(expected)
    assert state_of(plain) == state_of(streamed)
    assert train(streamed, make_batch(1), [2]).values["stream_restarts"] == 0


def test_part_of_a_group_that_was_fed_alone_does_not_count(folder: str) -> None:
    """Its advantages were taken without the rest of the group."""
    batch = make_batch(0)
    plain, streamed = make_trainer(folder, **ARRIVAL), make_trainer(folder, **STREAM)
    run(streamed.feed(batch.samples[:2], 0))
    metrics = run(streamed.train_step(batch))
    assert metrics.values["stream_restarts"] == 1
    assert comparable(metrics) == comparable(train(plain, batch))
    assert state_of(plain) == state_of(streamed)


@pytest.mark.parametrize("version", [-1, 1])
def test_what_is_fed_for_another_version_is_ignored(folder: str, version: int) -> None:
    plain, streamed = make_trainer(folder, **ARRIVAL), make_trainer(folder, **STREAM)
    run(streamed.feed(make_batch(1).samples[:6], version))
    metrics = run(streamed.train_step(make_batch(0)))
    assert (metrics.values["stream_restarts"], metrics.values["stream_fed"]) == (0, 0)
    train(plain, make_batch(0))
    assert state_of(plain) == state_of(streamed)


def test_feeding_a_trainer_that_does_not_stream_changes_nothing(folder: str) -> None:
    plain, other = make_trainer(folder), make_trainer(folder)
    assert comparable(train(other, make_batch(0), [2, 1])) == comparable(train(plain, make_batch(0)))
    assert state_of(plain) == state_of(other)


def test_an_interrupted_feed_is_dropped_and_the_batch_trained_from_the_start(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, streamed = make_trainer(folder, **ARRIVAL), make_trainer(folder, **STREAM)
    batch = make_batch(0)
    run(streamed.feed(batch.samples[:6], 0))
    real = GradientStream.feed

    def breaks(self: GradientStream, *args: Any, **kwargs: Any) -> Any:
        real(self, *args, **kwargs)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(GradientStream, "feed", breaks)
    with pytest.raises(RuntimeError, match="out of memory"):
        run(streamed.feed(batch.samples[6:12], 0))
    monkeypatch.undo()
    metrics = run(streamed.train_step(batch))
    assert (metrics.values["stream_restarts"], metrics.values["stream_fed"]) == (1, 0)
    assert comparable(metrics) == comparable(train(plain, batch))
    assert state_of(plain) == state_of(streamed)


def test_a_restored_trainer_has_forgotten_what_it_was_fed(folder: str, tmp_path: Path) -> None:
    plain, streamed = make_trainer(folder, **ARRIVAL), make_trainer(folder, **STREAM)
    run(streamed.feed(make_batch(0, seed=1).samples[:6], 0))
    run(streamed.save(str(tmp_path / "checkpoint")))  # in the middle of a stream
    run(streamed.load(str(tmp_path / "checkpoint")))
    assert run(streamed.status())["fed"] == 0
    metrics = train(streamed, make_batch(0), [2])
    assert metrics.values["stream_restarts"] == 0
    train(plain, make_batch(0))
    assert state_of(plain) == state_of(streamed)


# -- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [ARRIVAL, STREAM])
def test_denominators_that_do_not_add_up_stop_the_step(
    folder: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(folder, **settings)
    train(trainer, make_batch(0), [2])
    before = state_of(trainer)
    monkeypatch.setattr(GradientStream, "denominator", property(lambda self: self._denominator))
    real = GradientStream.finish_step

    def short(self: GradientStream, expected: float | None = None) -> Any:
        self._denominator -= 1  # a trajectory was lost between the count and the merge
        return real(self, expected)

    monkeypatch.setattr(GradientStream, "finish_step", short)
    with pytest.raises(ConfigError, match=r"^denominator = "):
        train(trainer, make_batch(1), [2])
    monkeypatch.undo()
    assert state_of(trainer) == before
    assert train(trainer, make_batch(1), [2]).values["updates"] == 1


@pytest.mark.parametrize("settings", [{**STREAM, "pack_tokens": 60}, {"micro_batch_size": 4}])
def test_the_trajectory_whose_gradient_is_not_finite_is_named(
    folder: str, settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Token 23 stands in one trajectory only, and its embedding's gradient is made infinite."""
    trainer = make_trainer(folder, **settings)
    train(trainer, make_batch(0), [2])
    samples = [without_token_23(sample) for sample in make_batch(1).samples]
    samples[7] = replace(samples[7], token_ids=(23, *samples[7].token_ids[1:]))
    samples[6:9] = [replace(sample, reward=reward) for sample, reward in zip(samples[6:9], (0, 1, 0), strict=True)]
    batch = replace(make_batch(1), samples=tuple(samples))
    before = weights_digest(trainer._learner)
    embedding = model.unwrap(trainer._learner.model).embedding.word_embeddings.weight

    def spoil(gradient: Any) -> Any:
        rows = torch.zeros_like(gradient)
        rows[23] = torch.where(gradient[23] != 0, math.inf, 0.0)
        return gradient + rows

    hook = embedding.register_hook(spoil)
    metrics = train(trainer, batch, [2])
    hook.remove()
    assert (metrics.values["updates"], metrics.values["skipped_updates"]) == (0, 1)
    assert metrics.values["gradient_not_finite"] == 1
    assert run(trainer.status())["faulty"] == ["s1-7"]
    assert "s1-7" in caplog.text
    assert weights_digest(trainer._learner) == before
    assert train(trainer, make_batch(2), [2]).values["updates"] == 1


def without_token_23(sample: TrainSample) -> TrainSample:
    return replace(sample, token_ids=tuple(min(token, 22) for token in sample.token_ids))


def test_a_group_of_one_is_counted_and_teaches_nothing(folder: str) -> None:
    trainer = make_trainer(folder, **STREAM, weight_decay=0.0)
    before = weights_digest(trainer._learner)
    batch = make_batch(0, groups=4, members=1)
    metrics = train(trainer, batch, [1, 1])
    assert (metrics.values["groups"], metrics.values["groups_of_one"]) == (4, 4)
    assert metrics.values["advantage_nonzero"] == 0
    assert weights_digest(trainer._learner) == before


def test_a_malformed_sample_is_refused_when_it_is_fed(folder: str) -> None:
    trainer = make_trainer(folder, **STREAM)
    before = state_of(trainer)
    sample = replace(make_batch(0).samples[0], loss_mask=(1,))
    with pytest.raises(RunError, match=r"trajectory s0-0: .*mask entries"):
        run(trainer.feed([sample], 0))
    assert state_of(trainer) == before
    assert train(trainer, make_batch(0), [1]).values["updates"] == 1


@pytest.mark.parametrize("settings", [{"minibatches": 2}, {"objective": "reinforce++"}])
def test_what_needs_the_whole_batch_cannot_be_streamed(folder: str, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="stream"):
        make_trainer(folder, stream=True, **settings)
