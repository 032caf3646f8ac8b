"""How many tokens and turns a trajectory still has before it, after every turn (Heddle 4.1), and the baselines of that.

Guarantees of a :class:`LengthPredictor`: a forecast is finite, not negative, and lies in its interval, whatever was learned; it
says where it is from (``source``): the model, or what stands in for it until it has learned enough (finished trajectories of
the task, of all tasks, the configured prior). The same trajectories in the same order and the same seed give the same forecasts.
Saved and loaded it goes on as it was; what is saved is arrays and JSON, no code.

:class:`Progressive` learns online: each finished trajectory is decomposed into (what was known before a turn, what came after),
as in the paper; the paper fine-tunes a language model of 0.6B on them, this is a ridge regression on
:mod:`orchestrator.policies.features` of what the logarithm differs by from the history's. Trajectories that were cut off
(aborted, evicted) are learned as "at least so much": left out, they would teach that nothing is long. Intervals are
conformal, by turn. :func:`prompt_only` and :class:`History` are what it is compared with (Heddle 7.2), :class:`Oracle` knows.
"""

from __future__ import annotations

import io
import json
import math
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from orchestrator.policies.features import (
    BENT,
    DENSE,
    HASHES,
    VERSION,
    Past,
    Progress,
    Vector,
    encode,
    make_bends,
)
from orchestrator.policies.regression import Array, Conformal, Ridge

STAGES = 6  # turns 0, 1, 2, 3 to 5, 6 to 11, later: calibrated apart
_LEAST_ROWS = 64.0  # before the model speaks
_PROMPTS = 20_000  # that are remembered, the least recently finished forgotten first
_MEMBERS = 32  # trajectories of a prompt that are
_TURNS = 256  # beyond, one turn is like the other
_ARRAYS = ("products", "targets", "weights", "errors", "counts")  # of the regression, that are kept
_LONGEST = math.log1p(1e8)


@dataclass(frozen=True, slots=True)
class Forecast:
    """Remaining tokens (the median, so to say) with an interval around them, and remaining turns."""

    tokens: float
    low: float
    high: float
    turns: float
    source: str  # "model", "prompt", "task", "all", "prior", "oracle"


@dataclass(frozen=True, slots=True)
class Outcome:
    """A trajectory that ended. ``before``: what was known before each of its turns; ``said``: tokens of each response;
    ``complete``: it came to its own end (or to a limit of the task), nobody cut it off."""

    before: tuple[Progress, ...]
    said: tuple[int, ...]
    complete: bool


class LengthPredictor(Protocol):
    """See the module."""

    def forecast(self, progress: Progress) -> Forecast: ...

    def learn(self, outcome: Outcome) -> None: ...


class Memory:
    """What finished trajectories say without a model: by prompt, by task, over all."""

    def __init__(self, prior_tokens: float, prior_turns: float = 1.0) -> None:
        self.prior = (math.log1p(prior_tokens), math.log1p(prior_turns))
        self.prompts: dict[str, list[list[int]]] = {}  # task and prompt -> said, of each trajectory
        self.tasks: dict[str, list[list[float]]] = {}  # "" is all -> by turn: number, sum of logs of tokens, of turns

    def add(self, task: str, prompt: str, said: Sequence[int], floor: Sequence[tuple[float, float]]) -> None:
        """``floor``: logarithms of remaining tokens and turns before each turn, as they are learned."""
        key = f"{task}\n{prompt}"
        members = self.prompts.pop(key, [])
        self.prompts[key] = [*members, list(said)][-_MEMBERS:]
        if len(self.prompts) > _PROMPTS:
            del self.prompts[next(iter(self.prompts))]
        for name in (task, ""):
            rows = self.tasks.setdefault(name, [])
            for turn, (tokens, turns) in enumerate(floor[:_TURNS]):
                if turn == len(rows):
                    rows.append([0.0, 0.0, 0.0])
                rows[turn][0] += 1.0
                rows[turn][1] += tokens
                rows[turn][2] += turns

    def of_task(self, task: str, turn: int) -> tuple[float, float, str]:
        """Mean logarithms of remaining tokens and turns of those that came so far, and whose they are."""
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
        """Mean logarithm of remaining tokens of the prompt's trajectories that came so far, and their number."""
        found = [sum(said[turn:]) for said in self.prompts.get(f"{task}\n{prompt}", []) if len(said) > turn]
        return (sum(map(math.log1p, found)) / len(found), float(len(found))) if found else (0.0, 0.0)

    def past(self, progress: Progress) -> Past:
        """For the vector of features: the prompt's mean is drawn to the task's while there are few."""
        task, turns, source = self.of_task(progress.task, progress.turns)
        mean, number = self.of_prompt(progress.task, progress.prompt, progress.turns)
        return Past((mean * number + task) / (number + 1.0), task, number, turns, "prompt" if number else source)


class Progressive:
    """The predictor. ``prior_tokens``: of a whole trajectory, until there is something to learn from; ``coverage`` of the
    intervals; ``memory`` in rows (turns) after which one counts a third; solved anew every ``every`` rows."""

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
    ) -> None:
        self._bends = make_bends(seed)
        self._coverage, self._every, self._seed = coverage, every, seed
        self._prompt_only = prompt_only
        penalties = np.concatenate([np.full(DENSE, 1.0), np.full(2 * HASHES, 10.0), np.full(BENT, 5.0)])
        self._ridge = Ridge(penalties, 2, STAGES, memory)
        self._conformal = Conformal(STAGES, window)
        self.memory = Memory(prior_tokens)
        self._new = 0
        self._most = 0.0  # the largest logarithm of remaining tokens that ever was
        self.version = 0  # how often it was solved

    @property
    def ready(self) -> bool:
        """Whether the model speaks."""
        return self.version > 0

    def forecast(self, progress: Progress) -> Forecast:
        """Never fails. Costs some tens of microseconds."""
        shown = _start_of(progress) if self._prompt_only else progress
        past = self.memory.past(shown)
        tokens, turns, source = past.prompt, past.turns, past.source
        if self.ready:
            learned = self._ridge.predict(encode(shown, past, self._bends)[None, :], (_stage(shown.turns),))[0]
            tokens, turns, source = tokens + float(learned[0]), turns + float(learned[1]), "model"
            tokens = min(tokens, self._most)  # a line goes on where nobody has been
        low, high = self._conformal.bounds(_stage(shown.turns), self._coverage) if self.ready else (-3.0, 3.0)
        least = tokens + (low if math.isfinite(low) else -3.0)
        most = tokens + (high if math.isfinite(high) else 3.0)
        made = _unlog(tokens), _unlog(min(least, tokens)), _unlog(max(most, tokens))
        if self._prompt_only:  # it is asked for the whole: what was said is no longer to come
            made = (
                max(1.0, made[0] - progress.generated),
                max(0.0, made[1] - progress.generated),
                max(1.0, made[2] - progress.generated),
            )
            turns = math.log1p(max(0.0, _unlog(turns) - progress.turns))
        return Forecast(*made, _unlog(turns), source)

    def learn(self, outcome: Outcome) -> None:
        """A trajectory that ended. Costs a few hundred microseconds, and some milliseconds every ``every`` rows."""
        if not outcome.said:
            return
        before = outcome.before[:1] if self._prompt_only else outcome.before
        pasts = [self.memory.past(one) for one in before]
        vectors: Array = np.stack([encode(one, past, self._bends) for one, past in zip(before, pasts, strict=True)])
        values, weight = np.array(_logs(outcome.said)), len(before) ** -0.5  # the rows of one trajectory are much alike
        base = np.array([(past.prompt, past.turns) for past in pasts])
        stages = [_stage(turn) for turn in range(len(before))]
        predicted = base + self._ridge.predict(vectors, stages)
        if not outcome.complete:  # at least so much: what is expected of it, where that is more
            expected = predicted if self.ready else values
            values[: len(before)] = np.maximum(values[: len(before)], np.minimum(expected, _LONGEST))
        elif self.ready:
            self._ridge.judge(vectors, values[: len(before)] - base, stages, weight)
            for turn, row in enumerate(predicted):
                self._conformal.add(_stage(turn), float(values[turn, 0] - row[0]))
        self._ridge.add(vectors, values[: len(before)] - base, stages, weight)
        first = outcome.before[0]
        if outcome.complete:
            self.memory.add(first.task, first.prompt, outcome.said, [(row[0], row[1]) for row in values.tolist()])
        self._most = max(self._most, float(values[0, 0]))
        self._new += len(before)
        if self._ridge.counts[0] >= _LEAST_ROWS and (self._new >= self._every or not self.ready):
            self._solve()

    def _solve(self) -> None:
        self._ridge.solve()
        self._conformal.refresh()
        self._new = 0
        self.version += 1

    def finish(self) -> None:
        """Solve with all that was learned."""
        if self._ridge.counts[0] > 0:
            self._solve()

    # -- kept --------------------------------------------------------------------------------------------------------

    def dump(self) -> bytes:
        """All of it, as a NumPy archive of arrays."""
        meta = {
            "format": self.format,
            "features": VERSION,
            "version": self.version,
            "new": self._new,
            "most": self._most,
            "seed": self._seed,
            "prompt_only": self._prompt_only,
            "prompts": self.memory.prompts,
            "tasks": self.memory.tasks,
            "residuals": [list(values) for values in self._conformal.residuals],
            "sorted": [values.tolist() for values in self._conformal.sorted],
        }
        text = np.frombuffer(json.dumps(meta).encode(), dtype=np.uint8)
        file = io.BytesIO()
        arrays = {name: getattr(self._ridge, name) for name in _ARRAYS}
        np.savez(file, meta=text, **arrays)
        return file.getvalue()

    def load(self, data: bytes) -> None:
        """Go on as what :meth:`dump` returned. Raises ValueError for anything else; then nothing changed."""
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as found:
                meta = json.loads(found["meta"].tobytes())
                arrays = [np.array(found[name], dtype=np.float64) for name in _ARRAYS]
            wanted = {"format": self.format, "features": VERSION, "seed": self._seed, "prompt_only": self._prompt_only}
            wrong = [name for name, value in wanted.items() if meta.get(name) != value]
            shapes = [array.shape for array in arrays] != [getattr(self._ridge, name).shape for name in _ARRAYS]
            if wrong or shapes or not all(np.isfinite(array).all() for array in arrays):
                raise ValueError(f"of another kind: {', '.join(wrong) or 'shapes or values of its arrays'}")
            version, new, most = int(meta["version"]), int(meta["new"]), float(meta["most"])
            prompts, tasks = dict(meta["prompts"]), dict(meta["tasks"])
            residuals = [[float(value) for value in values] for values in meta["residuals"]]
            ordered = [np.sort(np.array(values, dtype=np.float64)) for values in meta["sorted"]]
            if not len(residuals) == len(ordered) == STAGES:
                raise ValueError(f"{len(residuals)} stages instead of {STAGES}")
        except (
            OSError,
            KeyError,
            TypeError,
            AttributeError,
            EOFError,
            zipfile.BadZipFile,
            json.JSONDecodeError,
        ) as error:
            raise ValueError(f"is no saved length predictor: {error!r}") from error
        for name, array in zip(_ARRAYS, arrays, strict=True):
            setattr(self._ridge, name, array)
        self.version, self._new, self._most = version, new, most
        self.memory.prompts, self.memory.tasks = prompts, tasks
        for kind, values in enumerate(residuals):
            self._conformal.residuals[kind].clear()
            self._conformal.residuals[kind].extend(values)
        self._conformal.refresh()
        self._conformal.sorted = ordered


def prompt_only(prior_tokens: float, *, coverage: float = 0.8, seed: int = 0) -> Progressive:
    """The same regression, shown nothing but the prompt (Zhong et al., in Heddle 7.2): one guess for the whole trajectory."""
    return Progressive(prior_tokens, coverage=coverage, seed=seed, prompt_only=True)


class History:
    """What the prompt's finished trajectories had in the mean, else the task's (He et al., Qin et al., in Heddle 7.2); what was
    said already is taken off."""

    def __init__(self, prior_tokens: float) -> None:
        self.memory = Memory(prior_tokens)

    def forecast(self, progress: Progress) -> Forecast:
        """See the protocol."""
        tokens, turns, source = self.memory.of_task(progress.task, 0)
        mean, number = self.memory.of_prompt(progress.task, progress.prompt, 0)
        if number:
            tokens, source = mean, "prompt"
        left = max(1.0, _unlog(tokens) - progress.generated)
        return Forecast(left, 0.0, 20.0 * left, max(0.0, _unlog(turns) - progress.turns), source)

    def learn(self, outcome: Outcome) -> None:
        """See the protocol."""
        if outcome.said and outcome.complete:
            first = outcome.before[0]
            self.memory.add(first.task, first.prompt, outcome.said, _logs(outcome.said))


class Oracle:
    """Knows. ``said``: by trajectory, tokens of each of its responses. For simulations and recorded trajectories."""

    def __init__(self, said: Mapping[str, Sequence[int]]) -> None:
        self._said = said

    def forecast(self, progress: Progress) -> Forecast:
        """See the protocol."""
        left = self._said[progress.trajectory][progress.turns :]
        tokens = float(sum(left))
        return Forecast(tokens, tokens, tokens, float(len(left)), "oracle")

    def learn(self, outcome: Outcome) -> None:
        """There is nothing that it could learn."""


def sound(forecast: Forecast) -> bool:
    """Whether it can be used: numbers, none of them negative. What comes from another process is looked at first."""
    values = (forecast.tokens, forecast.low, forecast.high, forecast.turns)
    return all(isinstance(value, float | int) and 0 <= value < math.inf for value in values)


def _start_of(progress: Progress) -> Progress:
    """The same trajectory before its first turn."""
    return replace(progress, tail_ids=(), heard=progress.heard[:1], said=(), tool_seconds=())


def _stage(turn: int) -> int:
    return turn if turn < 3 else 3 if turn < 6 else 4 if turn < 12 else 5


def _unlog(value: float) -> float:
    return math.expm1(min(max(value, 0.0), _LONGEST)) if value == value else 0.0


def _logs(said: Sequence[int]) -> list[tuple[float, float]]:
    """log(1 + remaining tokens) and log(1 + remaining turns) before each turn."""
    left, found = sum(said), []
    for turn, tokens in enumerate(said):
        found.append((math.log1p(left), math.log1p(len(said) - turn)))
        left -= tokens
    return found


__all__ = [
    "Forecast",
    "History",
    "LengthPredictor",
    "Memory",
    "Oracle",
    "Outcome",
    "Progress",
    "Progressive",
    "Vector",
    "prompt_only",
    "sound",
]
