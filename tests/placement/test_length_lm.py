"""A small language model as the length predictor's encoder: a tiny real one learns what tokens mean for lengths, on a CPU."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_rlplugin.tiny_model import create_qwen3
from orchestrator.api import ConfigError
from orchestrator.config.prediction_keys import PredictionSection
from orchestrator.placement.forecast_setup import make_predictor
from orchestrator.placement.length_lm import FrozenModelEncoder, LanguageModelEncoder, TokenStates
from orchestrator.policies.prediction.length_features import DENSE, PROMPT_TOKENS, TAIL_TOKENS, TrajectoryProgress
from orchestrator.policies.prediction.length_predictor import LengthOutcome, ProgressivePredictor, is_usable

pytestmark = pytest.mark.engine  # torch and transformers


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return create_qwen3(
        str(tmp_path_factory.mktemp("lm")),
        hidden_size=32,
        intermediate_size=64,
        layers=2,
        heads=2,
        kv_heads=1,
        head_dim=16,
        vocabulary=[f"w{n}" for n in range(32)],
        max_positions=512,
        dtype="float32",
        seed=0,
    )


def row(number: int, marked: bool) -> TrajectoryProgress:
    """Its numbers say nothing: only whether token 7 or 8 is its last does."""
    tokens = (3, 4, 5, 7 if marked else 8)
    return TrajectoryProgress(f"t{number}", "made-up", f"p{number}", tokens, tokens, (4,), (), ())


def taught(folder: str, lessons: int) -> LanguageModelEncoder:
    encoder = LanguageModelEncoder(folder, seed=1, steps=2)
    for number in range(lessons):
        marked = number % 2 == 0
        target = np.array([[1.0 if marked else -1.0, 0.0]])
        encoder.learn([row(number, marked)], np.zeros((1, DENSE)), target, 1.0)
    return encoder


def test_it_learns_from_tokens_alone_and_its_layers_are_trained(folder: str) -> None:
    fresh, encoder = LanguageModelEncoder(folder, seed=1), taught(folder, 80)
    rows = [row(900, True), row(901, False)]
    assert np.allclose(fresh.predict(rows, np.zeros((2, DENSE)))[:, 0], 0.0)
    long, short = encoder.predict(rows, np.zeros((2, DENSE)))[:, 0]
    assert long > 0.5
    assert short < -0.5
    before, after = fresh.arrays(), encoder.arrays()
    layers = [name for name in before if name.startswith("weights layers.1.")]
    assert layers
    assert all(np.abs(np.subtract(before[name], after[name])).max() > 0 for name in layers if "proj" in name)


def test_saved_with_its_predictor_it_goes_on_as_it_was(folder: str) -> None:
    def make() -> ProgressivePredictor:
        return ProgressivePredictor(50.0, seed=2, encoder=LanguageModelEncoder(folder, seed=2))

    first = make()
    for number in range(90):
        first.learn(LengthOutcome((row(number, number % 2 == 0),), (200 if number % 2 == 0 else 20,), True))
    second = make()
    second.load(first.dump())
    for number in range(90, 96):
        assert first.forecast(row(number, True)) == second.forecast(row(number, True))
        for one in (first, second):
            one.learn(LengthOutcome((row(number, True),), (200,), True))
    assert first.forecast(row(97, True)).tokens > 2.0 * first.forecast(row(98, False)).tokens
    with pytest.raises(ValueError, match="of another kind: encoder"):
        ProgressivePredictor(50.0, seed=2).load(first.dump())


def test_a_model_that_is_left_as_it_is_teaches_a_regression_and_reads_nothing_twice(folder: str) -> None:
    states = TokenStates(folder, remembered=8)
    read: list[int] = []
    mean = states._mean
    states._mean = lambda ids: (read.append(len(ids)), mean(ids))[1]  # type: ignore[method-assign]
    encoder, numbers = FrozenModelEncoder(states), np.eye(1, DENSE)
    rows = [row(900, True), row(901, False)]
    assert np.allclose(encoder.predict(rows, np.repeat(numbers, 2, 0)), 0.0)
    for number in range(120):
        marked = number % 2 == 0
        encoder.learn([row(number, marked)], numbers, np.array([[1.0 if marked else -1.0, 0.0]]), 1.0)
    long, short = encoder.predict(rows, np.repeat(numbers, 2, 0))[:, 0]
    assert long > 0.5
    assert short < -0.5
    assert sum(read) == 2, "two prompts, however often they come"
    alone = states.of(rows[:1])
    assert np.allclose(
        alone, TokenStates(folder).of([*rows, replace(rows[0], tail_ids=(1, 2), said=(3,))])[:1], atol=1e-5
    )
    for number in range(9):
        states.of([replace(rows[0], prompt_ids=(number,))])
    assert len(states._states) == 8


def test_a_frozen_one_that_was_saved_goes_on_as_it_was(folder: str) -> None:
    states = TokenStates(folder)
    first, second = (ProgressivePredictor(50.0, seed=2, encoder=FrozenModelEncoder(states)) for _ in range(2))
    for number in range(90):
        first.learn(LengthOutcome((row(number, number % 2 == 0),), (200 if number % 2 == 0 else 20,), True))
    second.load(first.dump())
    for number in range(90, 120):
        assert first.forecast(row(number, True)) == second.forecast(row(number, True))
        for one in (first, second):
            one.learn(LengthOutcome((row(number, True),), (200,), True))
    assert first.forecast(row(197, True)).tokens > 2.0 * first.forecast(row(198, False)).tokens
    with pytest.raises(ValueError, match="of another kind: encoder"):
        ProgressivePredictor(50.0, seed=2, encoder=LanguageModelEncoder(folder, seed=2)).load(first.dump())


@pytest.mark.long
@pytest.mark.timeout(900)
def test_at_the_papers_size_both_encoders_read_and_learn(tmp_path: Path) -> None:
    """Qwen3-0.6B's sizes, made-up weights: how good it is they do not say; `-s` prints what it costs."""
    import torch
    from transformers import Qwen3Config, Qwen3Model

    config = Qwen3Config(
        vocab_size=151_936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = Qwen3Model(config).to(torch.bfloat16)
    assert 0.59e9 < sum(parameter.numel() for parameter in model.parameters()) < 0.61e9
    model.save_pretrained(tmp_path)
    del model
    tokens = tuple(range(100, 100 + PROMPT_TOKENS + TAIL_TOKENS))
    long = TrajectoryProgress("t", "made-up", "p", tokens[:PROMPT_TOKENS], tokens, (4,), (), ())
    rows, numbers = [row(number, number % 2 == 0) for number in range(8)], np.zeros((8, DENSE))
    targets = np.array([[1.0 if number % 2 == 0 else -1.0, 0.0] for number in range(8)])
    tuned, frozen = LanguageModelEncoder(str(tmp_path), seed=1), FrozenModelEncoder(TokenStates(str(tmp_path)))
    kinds: tuple[LanguageModelEncoder | FrozenModelEncoder, ...] = (tuned, frozen)
    for encoder in kinds:
        begun = time.process_time()
        assert np.isfinite(encoder.predict([long], numbers[:1])).all()
        read, begun = time.process_time() - begun, time.process_time()
        encoder.learn(rows, numbers, targets, 1.0)
        learned = time.process_time() - begun
        kept = sum(array.nbytes for array in encoder.arrays().values())
        print(f"{encoder.kind}: a boundary {read:.1f} s, a lesson of 8 {learned:.1f} s, {kept >> 20} MiB kept")
    assert tuned.steps == 1
    said = tuned.predict(rows[:2], numbers[:2])
    assert np.isfinite(said).all()
    assert np.abs(said).max() > 0.0
    again = LanguageModelEncoder(str(tmp_path), seed=1)
    again.restore(tuned.arrays())
    assert np.array_equal(again.predict(rows[:2], numbers[:2]), said)


def test_any_tokens_give_a_forecast(folder: str) -> None:
    predictor = ProgressivePredictor(50.0, seed=2, encoder=taught(folder, 10))
    for number in range(80):
        predictor.learn(LengthOutcome((row(number, True),), (9,), True))
    for tokens in ((), (2**40, 31, -5), (1,) * 256):
        asked = TrajectoryProgress("x", "made-up", "p", tokens, tokens[:96], (len(tokens),), (5,), ())
        assert is_usable(predictor.forecast(asked))


def test_a_config_names_it_and_a_wrong_one_is_refused(folder: str, tmp_path: Path) -> None:
    made = make_predictor(PredictionSection(enabled=True, encoder=folder), 50.0, 0)
    assert isinstance(made, ProgressivePredictor)
    assert '"language model qwen3' in made.dump().decode("latin-1")
    frozen = make_predictor(PredictionSection(enabled=True, encoder=folder, encoder_tuned=0), 50.0, 0)
    assert isinstance(frozen, ProgressivePredictor)
    assert '"frozen language model qwen3' in frozen.dump().decode("latin-1")
    for encoder, in_process, why in ((str(tmp_path), False, "not a Hugging Face folder"), (folder, True, "in_process")):
        with pytest.raises(ConfigError, match=why):
            make_predictor(PredictionSection(enabled=True, encoder=encoder, in_process=in_process), 50.0, 0)
