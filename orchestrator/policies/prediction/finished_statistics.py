"""What finished trajectories say of one that goes on, without a model: means and medians of what they had left at its turn.

Guarantees: bounded (prompts and trajectories of each are forgotten, the oldest first); a function of what was added, in its
order; nothing is said of a prompt by the trajectories of another, except through the mean of the task.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from orchestrator.policies.prediction.length_features import HistoryFeatures, TrajectoryProgress

_PROMPTS = 20_000  # that are remembered, the least recently finished forgotten first
_MEMBERS = 32  # trajectories of a prompt that are
_TURNS = 256  # beyond, one turn is like the other


class FinishedStatistics:
    """What finished trajectories say without a model: by prompt, by task, over all."""

    def __init__(self, prior_tokens: float, prior_turns: float = 1.0) -> None:
        self.prior = (math.log1p(prior_tokens), math.log1p(prior_turns))
        self.prompts: dict[str, list[list[int]]] = {}  # task and prompt -> said, of each trajectory
        self.tasks: dict[str, list[list[float]]] = {}  # "" is all -> by turn: number, sum of logs of tokens, of turns

    def add_trajectory(self, task: str, prompt: str, said: Sequence[int], floor: Sequence[tuple[float, float]]) -> None:
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
        found = self._left(task, prompt, turn)
        return (sum(map(math.log1p, found)) / len(found), float(len(found))) if found else (0.0, 0.0)

    def median(self, task: str, prompt: str, turn: int) -> float | None:
        """The logarithm of remaining tokens of the middle one of them; one very long sibling does not move it."""
        found = sorted(self._left(task, prompt, turn))
        middle = len(found) // 2
        if not found:
            return None
        return (math.log1p(found[middle]) + math.log1p(found[-1 - middle])) / 2.0

    def _left(self, task: str, prompt: str, turn: int) -> list[int]:
        return [sum(said[turn:]) for said in self.prompts.get(f"{task}\n{prompt}", []) if len(said) > turn]

    def whole_length(self, task: str, prompt: str) -> tuple[float, float, str]:
        """Mean logarithm of all tokens of the prompt's trajectories, else of the task's; of turns of the task's."""
        tokens, turns, source = self.of_task(task, 0)
        mean, number = self.of_prompt(task, prompt, 0)
        return (mean, turns, "prompt") if number else (tokens, turns, source)

    def features_of(self, progress: TrajectoryProgress) -> HistoryFeatures:
        """For the vector of features: the prompt's mean is drawn to the task's while there are few."""
        task, turns, source = self.of_task(progress.task, progress.turns)
        mean, number = self.of_prompt(progress.task, progress.prompt, progress.turns)
        return HistoryFeatures(
            (mean * number + task) / (number + 1.0), task, number, turns, "prompt" if number else source
        )
