"""The length predictor that a run asks for: its policy, in this process."""

from __future__ import annotations

import asyncio
from pathlib import Path

from orchestrator.api import ConfigError
from orchestrator.config.prediction_keys import PredictionSection
from orchestrator.policies.prediction.history_encoder import Encoder
from orchestrator.policies.prediction.length_features import TrajectoryProgress
from orchestrator.policies.prediction.length_predictor import (
    HistoryPredictor,
    LengthForecast,
    LengthOutcome,
    LengthPredictor,
    ProgressivePredictor,
)


def make_predictor(settings: PredictionSection, prior: float, seed: int) -> LengthPredictor:
    """The policy that ``rollout.prediction`` names. Raises ConfigError for the oracle, and for a file that cannot be used."""
    prior = settings.prior_tokens or prior
    if settings.predictor == "oracle":
        fix = "lengths of future trajectories are unknown in a real run: use it in the simulator only"
        raise ConfigError("rollout.prediction.predictor", "oracle", fix)
    made: HistoryPredictor | ProgressivePredictor
    if settings.predictor == "history":
        made = HistoryPredictor(prior)
    elif settings.predictor == "prompt-only":
        made = ProgressivePredictor(prior, coverage=settings.coverage, seed=seed, prompt_only=True)
    else:
        made = ProgressivePredictor(prior, coverage=settings.coverage, seed=seed, encoder=_encoder_of(settings, seed))
    if settings.start:
        try:
            made.load(Path(settings.start).read_bytes())
        except (OSError, ValueError) as error:
            raise ConfigError("rollout.prediction.start", settings.start, f"cannot be used: {error}") from error
    return made


def _encoder_of(settings: PredictionSection, seed: int) -> Encoder | None:
    """None: the policy's own."""
    if settings.encoder == "hashed":
        return None
    if settings.in_process:
        fix = "a language model would delay the event loop: set rollout.prediction.in_process = false"
        raise ConfigError("rollout.prediction.encoder", settings.encoder, fix)
    from orchestrator.placement.length_lm import FrozenModelEncoder, LanguageModelEncoder, TokenStates  # bring torch

    if settings.encoder_tuned:
        return LanguageModelEncoder(settings.encoder, seed=seed, tuned=settings.encoder_tuned)
    return FrozenModelEncoder(TokenStates(settings.encoder))


class InProcessPredictor:
    """A predictor without a process of its own. ``seconds``: after which it answers, None: at once."""

    def __init__(self, policy: LengthPredictor, seconds: float | None = None) -> None:
        self._policy = policy
        self._seconds = seconds

    async def forecast(self, progress: TrajectoryProgress) -> LengthForecast:
        if self._seconds is not None:
            await asyncio.sleep(self._seconds)
        return self._policy.forecast(progress)

    def learn(self, outcome: LengthOutcome) -> None:
        self._policy.learn(outcome)
