"""Prediction and placement of a run, put together from its config."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from orchestrator.api import ConfigError, Task
from orchestrator.config import Config
from orchestrator.config.sections import PredictionSection
from orchestrator.events import EventLog
from orchestrator.parallelism.degree_planner import rates_of_degree, rates_of_lanes, read_profile
from orchestrator.placement.length_tracker import Forecasts, Predictor, prioritize
from orchestrator.placement.placer import Placing
from orchestrator.placement.worker_rates import RatesOf, line_rates, profile_rates, rates_alone
from orchestrator.policies.prediction.history_encoder import Encoder
from orchestrator.policies.prediction.length_features import Progress
from orchestrator.policies.prediction.length_predictor import (
    Forecast,
    History,
    LengthPredictor,
    Outcome,
    Progressive,
    prompt_only,
)
from orchestrator.proxy.gap_moves import GapMover
from orchestrator.proxy.gateway import LLMProxy
from orchestrator.proxy.membership import ElasticProxy
from orchestrator.proxy.router_setup import may_come


def make_predictor(settings: PredictionSection, prior: float, seed: int) -> LengthPredictor:
    """The policy that ``rollout.prediction`` names. Raises ConfigError for the oracle, and for a file that cannot be used."""
    prior = settings.prior_tokens or prior
    if settings.predictor == "oracle":
        fix = "nobody knows the lengths of trajectories that are yet to be made: it is for simulated runs"
        raise ConfigError("rollout.prediction.predictor", "oracle", fix)
    if settings.predictor == "history":
        return History(prior)
    if settings.predictor == "prompt-only":
        made = prompt_only(prior, coverage=settings.coverage, seed=seed)
    else:
        made = Progressive(prior, coverage=settings.coverage, seed=seed, encoder=_encoder_of(settings, seed))
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
    from orchestrator.placement.length_lm import LanguageModelEncoder  # brings torch along

    return LanguageModelEncoder(settings.encoder, seed=seed)


class InProcess:
    """A predictor without a process of its own."""

    def __init__(self, policy: LengthPredictor) -> None:
        self._policy = policy

    async def forecast(self, progress: Progress) -> Forecast:
        """See the protocol."""
        return self._policy.forecast(progress)

    def learn(self, outcome: Outcome) -> None:
        """See the protocol."""
        self._policy.learn(outcome)


@dataclass
class Foresight:
    """``predictor`` None: one in this process. ``rates``: see
    :class:`orchestrator.placement.placer.Placing`, None: as the config says."""

    predictor: Predictor | None = None
    rates: RatesOf | None = None


def forecasts_of(
    config: Config, task: Task, proxy: LLMProxy, events: EventLog, given: Foresight | None
) -> Forecasts | None:
    """None: lengths are not predicted. Raises ConfigError."""
    rollout, given = config.rollout, given or Foresight()
    if not rollout.prediction.enabled:
        return None
    prior, predictor = float(task.max_response_tokens), given.predictor
    if predictor is None:
        predictor = InProcess(make_predictor(rollout.prediction, prior, config.run.seed))
    placer = None
    if rollout.placement.enabled:
        names = [lane.worker.name for lane in proxy.lanes]
        for name in rollout.placement.speeds:
            if name not in names and not may_come(rollout, name):
                fix = f"there is no rollout worker of this name; there are: {', '.join(names)}"
                raise ConfigError("rollout.placement.speeds", name, fix)
        rates, slots = given.rates, rollout.engine.max_num_seqs
        if rates is None and (profile := read_profile(config)) is not None:
            rates = profile_rates(profile, proxy.lanes, slots)
            if rollout.borrowed.exchanged:  # before one of them comes
                rates_alone(profile, "a borrowed server", slots)
        elif rates is None and rollout.placement.degrees.enabled:
            rates = rates_of_lanes(proxy.lanes, rates_of_degree(config))
        mover = GapMover(proxy.kv, proxy.lanes, proxy.router) if rollout.kv_transfer.enabled else None
        rates = rates or line_rates(rollout.placement, proxy.lanes, slots)
        placer = Placing(rollout.placement, proxy.router, events, rates, mover, rollout.engine.max_model_len)
        if isinstance(proxy, ElasticProxy):
            proxy.fleet = placer
    return Forecasts(
        rollout.prediction, predictor, events, prior, partial(prioritize, proxy, limit=rollout.stall_timeout), placer
    )
