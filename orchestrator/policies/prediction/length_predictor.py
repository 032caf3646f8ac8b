"""How many tokens and turns a trajectory still has to come, after every turn (Heddle 4.1), and baselines for comparison.

Guarantees of a :class:`LengthPredictor`: a forecast is finite, not negative, and within its interval, whatever was learned; it
says where it comes from (``source``): the model, or what replaces it until it has learned enough (finished trajectories of the
task, of all tasks, the configured prior). The same trajectories in the same order and the same seed give the same forecasts.
Saved and loaded it continues as it was; what is saved is arrays and JSON, no code.

:class:`ProgressivePredictor` learns online: each finished trajectory is split into (what was known before a turn, what came
after), as in the paper, which fine-tunes a language model of 0.6B on them. Here several experts each predict what is left:
finished trajectories of the prompt (mean, median, total minus what was generated), a ridge regression on
:mod:`orchestrator.policies.prediction.length_features` of the current state and of the prompt alone, and an encoder of the
tokens (:mod:`orchestrator.policies.prediction.history_encoder`, or a fine-tuned language model).
:class:`~orchestrator.policies.prediction.online_estimators.ForecastStack` weights them by their errors, by turn and by how
much is known about the prompt: if a baseline is best, it is followed. The forecast is a mean, not a median, because loads add
up.

Trajectories that were cut off (aborted, evicted) are learned as "at least this much": leaving them out would teach that
nothing is long. Intervals are adaptive conformal ones, by the same classes
(:class:`~orchestrator.policies.prediction.online_estimators.ConformalIntervals`). A ``prompt_only`` predictor and
:class:`HistoryPredictor` are the baselines (Heddle 7.2).
"""

from __future__ import annotations

import io
import json
import math
import statistics
import struct
import zipfile
import zlib
from array import array as packed
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from orchestrator.policies.prediction.history_encoder import Encoder, HashedEncoder
from orchestrator.policies.prediction.length_features import (
    BENT,
    DENSE,
    HASHES,
    VERSION,
    HistoryFeatures,
    TrajectoryProgress,
    encode_features,
    make_bends,
)
from orchestrator.policies.prediction.online_estimators import (
    STACK_ARRAYS,
    Array,
    ConformalIntervals,
    ForecastStack,
    RidgeRegression,
)

EXPERTS = ("prompt", "median", "history", "prompt-only", "ridge", "encoder")

STAGES = 6  # turns 0, 1, 2, 3 to 5, 6 to 11, later: calibrated apart
_KNOWN = 3  # how much is known of the prompt: nothing, one or two trajectories, more; each with its own weights and intervals
_LEAST_ROWS = 64.0  # before the model speaks
_EAGER = 0.25  # share of new rows after which it is solved anew, while there are few
_STACK_MEMORY = 4_000.0  # rows: experts get better, the ridge and the encoder by what they learn
_ASKED = 1 << 18  # turn boundaries that are kept until their trajectory ends, 0.6 kB each, the oldest forgotten first
_ARRAYS = ("products", "targets", "weights", "errors", "counts")  # of the regression, that are kept
_LONGEST = math.log1p(1e8)
_FRESH = 512  # residuals of new prompts that are enough
_UNSURE = 3.0  # logarithm of the factor that stands for an infinite bound
_PROMPTS = 20_000  # that are remembered, the least recently finished forgotten first,
_RESPONSES = 1 << 22  # with so many turns in all: 8 B each in memory, some 6 in a saved file
_MEMBERS = 32  # trajectories of a prompt that are
_TURNS = 256  # beyond, one turn is like the other


@dataclass(frozen=True, slots=True)
class LengthForecast:
    """Remaining tokens (a mean) with an interval around them, and remaining turns."""

    tokens: float
    low: float
    high: float
    turns: float
    source: str  # "model", "prompt", "task", "all", "prior", "oracle"


@dataclass(frozen=True, slots=True)
class LengthOutcome:
    """A trajectory that ended. ``before``: what was known before each of its turns; ``said``: tokens of each response;
    ``complete``: it ended by itself (or at a limit of the task), and was not cut off."""

    before: tuple[TrajectoryProgress, ...]
    said: tuple[int, ...]
    complete: bool


class LengthPredictor(Protocol):
    """See the module."""

    def forecast(self, progress: TrajectoryProgress) -> LengthForecast: ...

    def learn(self, outcome: LengthOutcome) -> None: ...


class FinishedStatistics:
    """What finished trajectories say about a running one, without a model: means and medians of what they had left at its
    turn, by prompt, by task, over all. Guarantees: bounded memory (the oldest prompts and trajectories are forgotten); a
    function of what was added, in order; nothing about a prompt comes from the trajectories of another, except through the
    task's mean."""

    def __init__(self, prior_tokens: float, prior_turns: float = 1.0) -> None:
        self.prior = (math.log1p(prior_tokens), math.log1p(prior_turns))
        self.prompts: dict[str, list[packed[int]]] = {}  # task and prompt -> said, of each trajectory
        self.responses = 0  # in all of these
        self.tasks: dict[str, list[list[float]]] = {}  # "" is all -> by turn: number, sum of logs of tokens, of turns

    def add_trajectory(self, task: str, prompt: str, said: Sequence[int], floor: Sequence[tuple[float, float]]) -> None:
        """``floor``: logarithms of remaining tokens and turns before each turn, as they are learned."""
        key = f"{task}\n{prompt}"
        members = [*self.prompts.pop(key, []), packed("q", said)]
        self.prompts[key] = members[-_MEMBERS:]
        self.responses += len(said) - sum(map(len, members[:-_MEMBERS]))
        while len(self.prompts) > 1 and (len(self.prompts) > _PROMPTS or self.responses > _RESPONSES):
            self.responses -= sum(map(len, self.prompts.pop(next(iter(self.prompts)))))
        for name in (task, ""):
            rows = self.tasks.setdefault(name, [])
            for turn, (tokens, turns) in enumerate(floor[:_TURNS]):
                if turn == len(rows):
                    rows.append([0.0, 0.0, 0.0])
                rows[turn][0] += 1.0
                rows[turn][1] += tokens
                rows[turn][2] += turns

    def of_task(self, task: str, turn: int) -> tuple[float, float, str]:
        """Mean logarithms of remaining tokens and turns of those that came this far, and where they are from."""
        turn = min(turn, _TURNS - 1)
        for name in (task, ""):
            rows = self.tasks.get(name, [])
            if turn < len(rows) and rows[turn][0] >= 4:
                number, tokens, turns = rows[turn]
                return tokens / number, turns / number, "task" if name else "all"
            if rows and turn >= len(rows):  # nobody came so far: as much as was left at the end of the longest
                number, tokens, turns = rows[-1]
                return tokens / number, turns / number, "task" if name else "all"
        return (*self.prior, "prior")

    def of_prompt(self, task: str, prompt: str, turn: int) -> tuple[float, float]:
        """Mean logarithm of remaining tokens of the prompt's trajectories that came this far, and their number."""
        found = self._left(task, prompt, turn)
        return (sum(map(math.log1p, found)) / len(found), float(len(found))) if found else (0.0, 0.0)

    def median(self, task: str, prompt: str, turn: int) -> float | None:
        """The logarithm of their median remaining tokens; one very long sibling does not change it."""
        found = self._left(task, prompt, turn)
        return statistics.median(map(math.log1p, found)) if found else None

    def _left(self, task: str, prompt: str, turn: int) -> list[int]:
        return [sum(said[turn:]) for said in self.prompts.get(f"{task}\n{prompt}", []) if len(said) > turn]

    def whole_length(self, task: str, prompt: str) -> tuple[float, float, str]:
        """Mean logarithm of all tokens of the prompt's trajectories, else of the task's; of turns of the task's."""
        tokens, turns, source = self.of_task(task, 0)
        mean, number = self.of_prompt(task, prompt, 0)
        return (mean, turns, "prompt") if number else (tokens, turns, source)

    def state(self) -> dict[str, Any]:
        """For a file; JSON."""
        return {"prompts": {key: [*map(list, members)] for key, members in self.prompts.items()}, "tasks": self.tasks}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state`. Raises what another object's does, with nothing changed."""
        prompts = {str(key): [packed("q", said) for said in members] for key, members in state["prompts"].items()}
        tasks = {
            str(task): [[float(number), float(tokens), float(turns)] for number, tokens, turns in rows]
            for task, rows in state["tasks"].items()
        }
        self.prompts, self.tasks = prompts, tasks
        self.responses = sum(len(said) for members in prompts.values() for said in members)

    def features_of(self, progress: TrajectoryProgress) -> HistoryFeatures:
        """For the feature vector: the prompt's mean is shrunk towards the task's while there are few."""
        task, turns, source = self.of_task(progress.task, progress.turns)
        mean, number = self.of_prompt(progress.task, progress.prompt, progress.turns)
        return HistoryFeatures(
            (mean * number + task) / (number + 1.0), task, number, turns, "prompt" if number else source
        )


@dataclass(frozen=True, slots=True)
class _Row:
    """What the model knew of a turn boundary when it was asked, beside what the trajectory itself says. ``past``: by the history;
    ``experts`` in tokens; ``combined``, ``turns``, ``bounds``: logarithms."""

    past: HistoryFeatures
    experts: Array
    combined: float
    turns: float
    bounds: tuple[float, float]


class ProgressivePredictor:
    """The predictor. ``prior_tokens``: total tokens of a trajectory, until there is something to learn from; ``coverage`` of
    the intervals; ``memory``: rows (turns) after which one counts a third; solved again every ``every`` rows; ``encoder``
    None: the hashed one. ``prompt_only``: the ridge regression alone, which sees only the prompt (Zhong et al., in Heddle
    7.2): one guess for the whole trajectory."""

    format = "rl-coserve length predictor"

    def __init__(
        self,
        prior_tokens: float,
        *,
        coverage: float = 0.8,
        memory: float = 50_000.0,
        every: int = 256,
        window: int = 1024,
        seed: int = 0,
        prompt_only: bool = False,
        encoder: Encoder | None = None,
    ) -> None:
        self._bends = make_bends(seed)
        self._every, self._seed = every, seed
        self._prompt_only = prompt_only
        penalties = np.concatenate([np.full(DENSE, 1.0), np.full(2 * HASHES, 10.0), np.full(BENT, 5.0)])
        self._ridge = RidgeRegression(penalties, 2, STAGES, memory)
        self._conformal = ConformalIntervals(STAGES * _KNOWN, window, coverage)
        self._encoder = encoder or HashedEncoder(seed=seed)
        self.stack = ForecastStack(
            len(EXPERTS), [stage for _ in range(_KNOWN) for stage in range(STAGES)], _STACK_MEMORY
        )
        self.memory = FinishedStatistics(prior_tokens)
        self._asked: dict[tuple[str, int], _Row] = {}  # of trajectories that go on, by turn
        self._new = 0
        self._most = 0.0  # the largest logarithm of remaining tokens that ever was
        self.version = 0  # how often it was solved

    @property
    def ready(self) -> bool:
        """Whether the model is used."""
        return self.version > 0

    def forecast(self, progress: TrajectoryProgress) -> LengthForecast:
        """Never fails. Takes some hundred microseconds."""
        shown = _start_of(progress) if self._prompt_only else progress
        past = self.memory.features_of(shown)
        tokens, turns, source = past.prompt, past.turns, past.source
        seen = self._rows_of((shown,))[0]
        if not self._prompt_only or not progress.turns:
            self._asked[progress.trajectory, progress.turns] = seen
            if len(self._asked) > _ASKED:
                del self._asked[next(iter(self._asked))]
        if self.ready:
            tokens, turns, source = seen.combined, seen.turns, "model"
        low, high = seen.bounds if self.ready else (-math.inf, math.inf)
        least = tokens + (low if math.isfinite(low) else -_UNSURE)
        most = tokens + (high if math.isfinite(high) else _UNSURE)
        made = _unlog(tokens), _unlog(least), _unlog(most)
        if self._prompt_only:  # it is asked for the whole: what was said is no longer to come
            made = (
                max(1.0, made[0] - progress.generated),
                max(0.0, made[1] - progress.generated),
                max(1.0, made[2] - progress.generated),
            )
            turns = math.log1p(max(0.0, _unlog(turns) - progress.turns))
        return LengthForecast(*made, _unlog(turns), source)

    def _rows_of(self, rows: Sequence[TrajectoryProgress]) -> list[_Row]:
        """What the experts say of turn boundaries now, and what is made of it."""
        pasts = [self.memory.features_of(one) for one in rows]
        vectors: Array = np.stack(
            [encode_features(one, past, self._bends) for one, past in zip(rows, pasts, strict=True)]
        )
        stages = [_stage(one.turns) for one in rows]
        base = np.array([(past.prompt, past.turns) for past in pasts])
        ridge = base + self._ridge.predict(vectors, stages)
        encoded = ridge if self._prompt_only else base + self._encoder.predict(rows, vectors[:, :DENSE])
        turns = ((ridge[:, 1] + encoded[:, 1]) / 2.0).tolist()
        found = []
        for index, (one, past) in enumerate(zip(rows, pasts, strict=True)):
            kind, experts = _kind(one.turns, past.number), np.zeros(0)
            combined = min(max(float(ridge[index, 0]), 0.0), self._most)  # a line goes on where nobody has been
            if not self._prompt_only:
                said = self._experts(one, past, float(ridge[index, 0]), float(encoded[index, 0]))
                experts = np.expm1(np.clip(said, 0.0, self._most))
                combined = min(math.log1p(max(self.stack.combine(experts, kind), 0.0)), self._most)
            found.append(_Row(past, experts, combined, turns[index], self._conformal.bounds(kind)))
        return found

    def _experts(self, one: TrajectoryProgress, past: HistoryFeatures, ridge: float, encoded: float) -> list[float]:
        """Logarithms of remaining tokens, in the order of ``EXPERTS``."""
        median = self.memory.median(one.task, one.prompt, one.turns)
        history = self.memory.whole_length(one.task, one.prompt)[0]
        start = _start_of(one)
        first = self.memory.features_of(start)
        learned = self._ridge.predict(encode_features(start, first, self._bends)[None, :], (0,))[0, 0]
        whole = min(first.prompt + float(learned), self._most)
        return [
            past.prompt,
            past.prompt if median is None else median,
            math.log1p(max(1.0, _unlog(history) - one.generated)),
            math.log1p(max(1.0, _unlog(whole) - one.generated)),
            ridge,
            encoded,
        ]

    def learn(self, outcome: LengthOutcome) -> None:
        """A trajectory that ended: each of its turns as it was seen when it was asked about, since what has ended meanwhile
        (short siblings before long ones) reveals how long it was. Takes some milliseconds, and some tens of them every
        ``every`` rows."""
        if not outcome.said:
            return
        before = tuple(map(_start_of, outcome.before[:1])) if self._prompt_only else outcome.before
        seen = [self._asked.pop((one.trajectory, one.turns), None) for one in before]
        now = iter(
            self._rows_of([one for one, row in zip(before, seen, strict=True) if row is None]) if None in seen else ()
        )
        rows = [next(now) if row is None else row for row in seen]
        vectors = np.stack([encode_features(one, row.past, self._bends) for one, row in zip(before, rows, strict=True)])
        base = np.array([(row.past.prompt, row.past.turns) for row in rows])
        stages = [_stage(one.turns) for one in before]
        kinds = [_kind(one.turns, row.past.number) for one, row in zip(before, rows, strict=True)]
        values, weight = np.array(_logs(outcome.said)), len(rows) ** -0.5  # the rows of one trajectory are much alike
        if not outcome.complete:  # at least so much: what is expected of it, where that is more
            expected = np.array([(row.combined, row.turns) for row in rows]) if self.ready else values[: len(rows)]
            values[: len(rows)] = np.maximum(values[: len(rows)], np.minimum(expected, _LONGEST))
        targets = values[: len(rows)] - base
        if self.ready and outcome.complete:
            self._ridge.judge(vectors, targets, stages, weight)
            for row, kind, value in zip(rows, kinds, values[: len(rows), 0].tolist(), strict=True):
                self._conformal.add(kind, value - row.combined, row.bounds)
            self._as_unknown([one for one, kind in zip(before, kinds, strict=True) if kind >= STAGES], outcome.said)
        self._ridge.add(vectors, targets, stages, weight)
        if not self._prompt_only:
            experts = np.stack([row.experts for row in rows])
            self.stack.add(experts, np.expm1(values[: len(rows), 0]).tolist(), kinds, weight)
            self._encoder.learn(before, vectors[:, :DENSE], targets, weight)
        first = outcome.before[0]
        if outcome.complete:
            self.memory.add_trajectory(
                first.task, first.prompt, outcome.said, [(row[0], row[1]) for row in values.tolist()]
            )
        self._most = max(self._most, float(values[0, 0]))
        self._new += len(rows)
        rows_so_far = self._ridge.counts[0]
        due = self._new >= min(self._every, max(16.0, _EAGER * rows_so_far)) or not self.ready
        if rows_so_far >= _LEAST_ROWS and due:
            self._solve()

    def _as_unknown(self, before: Sequence[TrajectoryProgress], said: Sequence[int]) -> None:
        """Calibrates the intervals of prompts of which nothing is known on one that is known, as if it were not: where prompts
        come again all those that were new came early, when the model said something else."""
        strangers = [
            replace(one, prompt="\0nobody's")
            for one in before
            if len(self._conformal.residuals[_stage(one.turns)]) < _FRESH
        ]
        for one, row in zip(strangers, self._rows_of(strangers) if strangers else (), strict=True):
            value = math.log1p(sum(said[one.turns :]))
            self._conformal.add(_kind(one.turns, row.past.number), value - row.combined, row.bounds)

    def _solve(self) -> None:
        self._ridge.solve()
        self.stack.solve()
        self._conformal.refresh()
        self._new = 0
        self.version += 1

    def finish(self) -> None:
        """Solve with everything learned."""
        if self._ridge.counts[0] > 0:
            self._solve()

    # -- kept --------------------------------------------------------------------------------------------------------

    def dump(self) -> bytes:
        """The whole state, as a NumPy archive of arrays."""
        meta = {
            "format": self.format,
            "features": VERSION,
            "version": self.version,
            "new": self._new,
            "most": self._most,
            "seed": self._seed,
            "prompt_only": self._prompt_only,
            "encoder": self._encoder.kind,
            **self.memory.state(),
            "residuals": [list(values) for values in self._conformal.residuals],
            "sorted": [values.tolist() for values in self._conformal.sorted],
            "tails": self._conformal.tails.tolist(),
        }
        arrays: dict[str, NDArray[np.generic]] = {name: getattr(self._ridge, name) for name in _ARRAYS}
        arrays |= {f"stack_{name}": getattr(self.stack, name) for name in STACK_ARRAYS}
        arrays |= {f"encoder_{name}": array for name, array in self._encoder.arrays().items()}
        arrays["meta"] = np.frombuffer(json.dumps(meta).encode(), dtype=np.uint8)
        file = io.BytesIO()
        np.savez(file, **arrays)  # type: ignore[arg-type]  # NumPy's own hint takes them for its options
        return file.getvalue()

    def load(self, data: bytes) -> None:
        """Continue from the result of :meth:`dump`. Raises ValueError for anything else, with nothing changed."""
        owners: dict[str, tuple[object, str]] = {name: (self._ridge, name) for name in _ARRAYS}
        owners |= {f"stack_{name}": (self.stack, name) for name in STACK_ARRAYS}
        try:
            found = read_arrays(data)
            meta = json.loads(found["meta"].tobytes())
            arrays = {name: np.array(found[name], dtype=np.float64) for name in owners}
            cut = len("encoder_")
            encoder = {name[cut:]: array for name, array in found.items() if name.startswith("encoder_")}
            wanted = {"format": self.format, "features": VERSION, "seed": self._seed, "prompt_only": self._prompt_only}
            wanted["encoder"] = self._encoder.kind
            wrong = [name for name, value in wanted.items() if meta.get(name) != value]
            shapes = any(array.shape != getattr(*owners[name]).shape for name, array in arrays.items())
            if wrong or shapes or not all(np.isfinite(array).all() for array in arrays.values()):
                raise ValueError(f"of another kind: {', '.join(wrong) or 'shapes or values of its arrays'}")
            version, new, most = int(meta["version"]), int(meta["new"]), float(meta["most"])
            memory = FinishedStatistics(0.0)
            memory.restore(meta)
            residuals = [[float(value) for value in values] for values in meta["residuals"]]
            ordered = [np.sort(np.array(values, dtype=np.float64)) for values in meta["sorted"]]
            tails = np.array(meta.get("tails", self._conformal.tails), dtype=np.float64)  # files of before have none
            if not len(residuals) == len(ordered) == STAGES * _KNOWN or tails.shape != self._conformal.tails.shape:
                raise ValueError(f"{len(residuals)} stages instead of {STAGES * _KNOWN}")
            if not ((tails >= 0.0) & (tails <= 1.0)).all():
                raise ValueError("of another kind: levels of its intervals")
            self._encoder.restore(encoder)
        except (
            OSError,
            KeyError,
            TypeError,
            AttributeError,
            EOFError,
            OverflowError,
            RecursionError,
        ) as error:
            raise ValueError(f"is no saved length predictor: {error!r}") from error
        for name, array in arrays.items():
            setattr(*owners[name], array)
        self.version, self._new, self._most = version, new, most
        self.memory.prompts, self.memory.tasks, self.memory.responses = memory.prompts, memory.tasks, memory.responses
        for kind, values in enumerate(residuals):
            self._conformal.residuals[kind].clear()
            self._conformal.residuals[kind].extend(values)
        self._conformal.refresh()
        self._conformal.sorted, self._conformal.tails = ordered, tails


class HistoryPredictor:
    """The mean of the prompt's finished trajectories, else the task's (He et al., Qin et al., in Heddle 7.2), minus what was
    already generated."""

    format = "rl-coserve length history"

    def __init__(self, prior_tokens: float) -> None:
        self.memory = FinishedStatistics(prior_tokens)

    def forecast(self, progress: TrajectoryProgress) -> LengthForecast:
        tokens, turns, source = self.memory.whole_length(progress.task, progress.prompt)
        left = max(1.0, _unlog(tokens) - progress.generated)
        return LengthForecast(left, 0.0, 20.0 * left, max(0.0, _unlog(turns) - progress.turns), source)

    def learn(self, outcome: LengthOutcome) -> None:
        if outcome.said and outcome.complete:
            first = outcome.before[0]
            self.memory.add_trajectory(first.task, first.prompt, outcome.said, _logs(outcome.said))

    def dump(self) -> bytes:
        """The whole state, as a NumPy archive."""
        meta = np.frombuffer(json.dumps({"format": self.format, **self.memory.state()}).encode(), dtype=np.uint8)
        file = io.BytesIO()
        np.savez(file, meta=meta)
        return file.getvalue()

    def load(self, data: bytes) -> None:
        """Continue from the result of :meth:`dump`. Raises ValueError for anything else, with nothing changed."""
        try:
            meta = json.loads(read_arrays(data)["meta"].tobytes())
            if meta["format"] != self.format:
                raise ValueError(f"of another kind: {meta['format']!r:.60}")
            self.memory.restore(meta)
        except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(f"is no saved length predictor: {error!r}") from error


def is_usable(forecast: LengthForecast) -> bool:
    """Whether it can be used: numbers, none of them negative. What comes from another process is looked at first."""
    values = (forecast.tokens, forecast.low, forecast.high, forecast.turns)
    return all(isinstance(value, float | int) and 0 <= value < math.inf for value in values)


def _start_of(progress: TrajectoryProgress) -> TrajectoryProgress:
    """The same trajectory before its first turn."""
    return replace(progress, tail_ids=(), heard=progress.heard[:1], said=(), tool_seconds=())


def _stage(turn: int) -> int:
    return turn if turn < 3 else 3 if turn < 6 else 4 if turn < 12 else 5


def _kind(turn: int, number: float) -> int:
    """Stages of those of whose prompt nothing is known, then of those of whose prompt one or two trajectories are, then more."""
    return _stage(turn) + STAGES * (0 if number < 1 else 1 if number < 3 else 2)


def _unlog(value: float) -> float:
    return math.expm1(min(max(value, 0.0), _LONGEST)) if value == value else 0.0


def _logs(said: Sequence[int]) -> list[tuple[float, float]]:
    """log(1 + remaining tokens) and log(1 + remaining turns) before each turn."""
    left, found = sum(said), []
    for turn, tokens in enumerate(said):
        found.append((math.log1p(left), math.log1p(len(said) - turn)))
        left -= tokens
    return found


def read_arrays(data: bytes) -> dict[str, NDArray[Any]]:
    """The arrays of an .npz file in the format of ``numpy.savez``, even if damaged or hostile. Raises ValueError for anything
    else.

    ``numpy.load`` allocates what a header announces before it has read the data or its checksum. Here a member is read first,
    stored uncompressed and with its CRC checked, and must have exactly the bytes of its array.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as file:
            members = file.infolist()
            if any(item.compress_type != zipfile.ZIP_STORED or item.file_size > len(data) for item in members):
                raise ValueError("a member is not stored as it is")
            texts = {item.filename.removesuffix(".npy"): file.read(item) for item in members}
        return {name: _array(text) for name, text in texts.items()}
    except (
        zipfile.BadZipFile,
        zlib.error,
        struct.error,
        NotImplementedError,
        EOFError,
        OSError,
        RuntimeError,
    ) as error:
        raise ValueError(f"is no file of arrays: {error!r}") from error


def _array(data: bytes) -> NDArray[Any]:
    stream = io.BytesIO(data)
    if np.lib.format.read_magic(stream) != (1, 0):  # type: ignore[no-untyped-call]
        raise ValueError("an array of another format")
    shape, fortran, dtype = np.lib.format.read_array_header_1_0(stream)  # type: ignore[no-untyped-call]
    body = data[stream.tell() :]
    if fortran or dtype.hasobject or len(body) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"an array of {shape} {dtype} in {len(body)} B")
    return np.frombuffer(body, dtype).reshape(shape)
