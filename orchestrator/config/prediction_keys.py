"""Sections of a config: length prediction, and what is decided by it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from orchestrator.settings.section import Conflict, Fraction, Positive, PositiveSeconds, Section


class PredictionSection(Section):
    """How long trajectories will be, and in which order their turns run (Heddle 4): docs/prediction.md."""

    enabled: bool = False
    predictor: Literal["progressive", "prompt-only", "history", "oracle"] = "progressive"  # oracle: simulated runs only
    # of the progressive one's tokens; or the Hugging Face folder of a small model
    encoder: str = "hashed"
    # last layers of that model that are fine-tuned online; 0: none, a ridge regression reads its states as they are
    encoder_tuned: Annotated[int, Field(ge=0)] = 2
    order: Literal["longest-first", "shortest-first", "fcfs", "round-robin"] = "longest-first"  # of turns in an engine
    prior_tokens: Annotated[float, Field(ge=0)] = 0.0  # of a trajectory, until some have ended; 0: one longest response
    # priorities a doubling: turns within one do not preempt each other
    levels: Annotated[float, Field(gt=0, le=16)] = 2.0
    coverage: Annotated[float, Field(gt=0, lt=1)] = 0.8  # of the intervals
    patience: PositiveSeconds = 2.0  # a forecast that takes longer is not waited for, and said to be late
    in_process: bool = False  # no process of its own: its work then delays the event loop
    restarts: Annotated[int, Field(ge=0)] = (
        3  # of that process, in a row; then the run continues with what stands in for it
    )
    start: str = ""  # file of a predictor that another run saved (its predictor.npz)

    def conflicts(self) -> Iterator[Conflict]:
        if self.encoder != "hashed" and self.predictor != "progressive":
            fix = f"is of predictor = 'progressive', not {self.predictor!r}: leave it at 'hashed', or take that one"
            yield "encoder", self.encoder, fix
        if self.encoder == "hashed" and self.encoder_tuned != 2:
            yield (
                "encoder_tuned",
                self.encoder_tuned,
                "is of a language model: name its folder in encoder, or leave this out",
            )


class DegreesSection(Section):
    """Devices of each of the run's own engines, unequal ones in one run, chosen between steps (Heddle 6): docs/prediction.md.
    ``rollout.workers`` are then the devices of this machine. Needs the placement; not beside ``rollout.planner``."""

    enabled: bool = False
    speeds: dict[Annotated[int, Field(gt=0)], Annotated[float, Field(gt=0)]] = {}  # degree -> tokens per second alone,
    # relative to the others, where rollout.placement.profile names no profile; degrees that are not there are not used
    # degrees that the run begins with; empty: the best of what is expected, else 1 each
    start: tuple[Positive, ...] = ()
    expected_tokens: Annotated[float, Field(ge=0)] = 0.0  # of a trajectory, said by the policy; 0: nothing is expected
    expected_sigma: Annotated[float, Field(ge=0, le=4)] = 1.0  # of their logarithm, expected before the first step
    horizon: Positive = 4  # steps that a gain is counted over, against the seconds of one change
    # of a change, before one was measured; None: the profile's
    start_seconds: Annotated[float, Field(ge=0)] | None = None


class PlacementSection(Section):
    """Which worker a trajectory runs on, by its predicted length (Heddle 5): docs/prediction.md. Needs the prediction."""

    enabled: bool = False
    migrate: bool = True  # trajectories whose forecast changed go to another worker, between two turns
    profile: str = ""  # file of `rl-coserve profile`: what steps take, and how much KV fits; empty: the figures below
    # what a token takes longer for each further trajectory beside it
    interference: Annotated[float, Field(ge=0)] = 0.01
    speeds: dict[
        str, Annotated[float, Field(gt=0)]
    ] = {}  # worker -> tokens per second alone, relative to the others: 1
    certainty: Fraction = 0.5  # share of a forecast's interval within which its worker is as good as another
    prefill_seconds: Annotated[float, Field(ge=0)] = 1e-4  # of a token, what a move costs; and
    token_seconds: Annotated[float, Field(gt=0)] = 0.02  # of a generated one alone, at speed 1: what it gains
    renew_share: Annotated[float, Field(gt=0, le=1)] = 0.1  # of active trajectories that changed: placed again
    renew_seconds: Annotated[float, Field(ge=0)] = 1.0  # but not more often than this
    degrees: DegreesSection = DegreesSection()
