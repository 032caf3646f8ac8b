"""What a length predictor sees of a trajectory: numbers from its past, and a small encoding of its tokens (Heddle 4.1).

Guarantees: a feature vector depends only on what is known at a turn boundary, on the history before it and on ``VERSION``; it
is finite for any input. Tokens enter as hashed one- and two-token pieces of the prompt and of the end of the context, which
needs no vocabulary and takes some ten microseconds: few signed bins for a linear model, more for one that learns a projection
(:mod:`orchestrator.policies.prediction.history_encoder`). Fixed random ReLUs of the numbers make a linear model nonlinear.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from orchestrator.api import Prompt, Trajectory, Turn

VERSION = 2  # of the vector: a model of another one is not loaded
PROMPT_TOKENS, TAIL_TOKENS = 256, 96  # that are looked at: of the first observation's end, of the context's end
PIECES = 256  # bins of the pieces of either, for a network that learns what they mean
HASHES = 32  # bins of the prompt's pieces, and as many of the tail's
DENSE = 18  # numbers, the first of them 1
BENT = 32  # rectifiers
SIZE = DENSE + 2 * HASHES + BENT
_MOST = 1e9  # numbers beyond say no more

Vector = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TrajectoryProgress:
    """A trajectory at a turn boundary. ``prompt_ids``: its first observation, ``tail_ids``: the end of its context (only as
    much of either as is used); ``heard`` and ``said``: tokens of the observations and of the responses so far;
    ``tool_seconds``: environment time after each response."""

    trajectory: str
    task: str
    prompt: str
    prompt_ids: tuple[int, ...]
    tail_ids: tuple[int, ...]
    heard: tuple[int, ...]
    said: tuple[int, ...]
    tool_seconds: tuple[float, ...]

    @property
    def turns(self) -> int:
        """Finished turns."""
        return len(self.said)

    @property
    def generated(self) -> int:
        """Tokens that the policy has written."""
        return sum(self.said)


@dataclass(frozen=True, slots=True)
class HistoryFeatures:
    """What finished trajectories say about one at this turn: mean log(1 + remaining tokens) of those that came this far, for
    the same prompt (shrunk towards the task's while there are few) and for the same task, and the prompt's count; mean log(1 +
    remaining turns), and where it is from. A model learns how a trajectory differs from this."""

    prompt: float
    task: float
    number: float
    turns: float = 0.0
    source: str = "prior"


def turn_boundaries(trajectory: Trajectory) -> list[TrajectoryProgress]:
    """What was known about a finished trajectory before its first turn and after each but the last, while the environment
    worked: when its forecasts were made."""
    turns = trajectory.turns
    return [progress_of(trajectory.id, trajectory.prompt, turns[: after + 1], after) for after in range(len(turns))]


def progress_of(trajectory: str, prompt: Prompt, turns: Sequence[Turn], over: int) -> TrajectoryProgress:
    """After ``over`` of these turns. The first observation is known then, even before its turn is over."""
    done = turns[:over]
    context: list[int] = []
    for turn in reversed(done):
        context[:0] = [*turn.observation_ids, *turn.action_ids]
        if turn.context is not None:
            context[:0] = turn.context.token_ids
        if turn.context is not None or len(context) >= TAIL_TOKENS:
            break
    first = turns[0].observation_ids
    return TrajectoryProgress(
        trajectory,
        prompt.task,
        prompt.key,
        tuple(first[-PROMPT_TOKENS:]),
        tuple(context[-TAIL_TOKENS:] if done else first[-TAIL_TOKENS:]),
        tuple(len(turn.observation_ids) for turn in done) or (len(first),),
        tuple(len(turn.action_ids) for turn in done),
        tuple(turn.environment_seconds for turn in done[:-1]),
    )


def encode_features(progress: TrajectoryProgress, past: HistoryFeatures, bends: Vector) -> Vector:
    """The vector, shape [SIZE]. ``bends``: see :func:`make_bends`."""
    said, heard, turns = progress.said, progress.heard, progress.turns
    last, before = (said[-1] if turns else 0), (said[-2] if turns > 1 else 0)
    dense = np.array(
        [
            1.0,
            1.0 if turns == 0 else 0.0,
            1.0 if turns == 1 else 0.0,
            turns / 8.0,
            _log(turns),
            _log(sum(said)),
            _log(sum(said) / turns) if turns else 0.0,
            _log(last),
            _log(before),
            _log(last) - _log(sum(said) / turns) if turns else 0.0,
            _log(heard[0]) if heard else 0.0,
            _log(sum(heard)),
            _log(heard[-1]) if len(heard) > 1 else 0.0,
            _log(sum(progress.tool_seconds)),
            _log(progress.tool_seconds[-1]) if progress.tool_seconds else 0.0,
            past.prompt,
            past.task,
            past.number / (past.number + 2.0),
        ],
        dtype=np.float64,
    )
    bent = np.maximum(0.0, bends @ dense)
    prompt, tail = (
        pieces(ids, salt, HASHES, signed=True) for salt, ids in enumerate((progress.prompt_ids, progress.tail_ids), 1)
    )
    return np.concatenate([dense, prompt, tail, bent])


def make_bends(seed: int) -> Vector:
    """The directions of the ReLUs, shape [BENT, DENSE]: entries scaled to what they are multiplied with."""
    draw = np.random.default_rng(seed)
    scale = np.array([1, 1, 1, 1, 1, 0.3, 0.3, 0.3, 0.3, 1, 0.2, 0.2, 0.2, 1, 1, 0.3, 0.3, 1], dtype=np.float64)
    bends: Vector = draw.standard_normal((BENT, DENSE)) * scale / math.sqrt(DENSE)
    bends[:, 0] = draw.uniform(-2.0, 1.0, BENT)
    return bends


def _log(value: float) -> float:
    return math.log1p(min(max(value, 0.0), _MOST)) if value == value else 0.0  # NaN is 0


def pieces(tokens: Sequence[int], salt: int, bins: int = PIECES, *, signed: bool = False) -> Vector:
    """Counts of hashed pieces, ``signed`` or not, divided by the square root of their number, shape [bins]."""
    mixed = _mixed(tokens, salt)
    if not mixed.size:
        return np.zeros(bins)
    places = (mixed >> np.uint64(40)) % np.uint64(bins)
    signs = np.where(mixed >> np.uint64(63), 1.0, -1.0) if signed else None
    return np.bincount(places.astype(np.int64), signs, bins) / math.sqrt(mixed.size)


def _mixed(tokens: Sequence[int], salt: int) -> NDArray[np.uint64]:
    """A well-mixed number for each token and each pair of neighbours. Negative ids, which no engine has, count as large ones."""
    ids = np.array(tokens, dtype=np.int64).astype(np.uint64)
    if not ids.size:
        return ids
    pairs = ids[:-1] * np.uint64(0x9E3779B97F4A7C15) + ids[1:]
    mixed: NDArray[np.uint64] = (np.concatenate([ids, pairs]) + np.uint64(salt)) * np.uint64(0xD6E8FEB86659FD93)
    mixed ^= mixed >> np.uint64(32)
    mixed *= np.uint64(0xD6E8FEB86659FD93)
    return mixed
