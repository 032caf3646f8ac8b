"""What short and long rounds know of the lengths of prompts beforehand: `rollout.rounds.predict`.

Guarantees: off (the default) nothing is asked, kept or written; each prompt is asked for once; a predictor of the user that
raises or says no number ends the run with its name, as silence would look like prompts that are all short.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from orchestrator.api import Prompt, RunError
from orchestrator.config.user_functions import named_function
from orchestrator.policies.prediction.prompt_lengths import ForecastLengths, LengthHistory, LongPrompts, Predictor

HISTORY = "history"
PROGRESSIVE = "progressive"  # the run's own forecasts: `rollout.prediction`
FIELD = "rollout.rounds.predict"


class Lengths:
    """``setting``: "" for nothing, "history" for the prompts' own lengths in earlier epochs,
    "progressive" for the run's own forecasts (``given``), or ``module:function`` of a
    predictor; ``given`` instead of it. False as a condition where nothing is predicted. Raises ConfigError."""

    def __init__(self, setting: str, given: Predictor | None = None) -> None:
        self._name = setting or "predictor"
        self._history = LengthHistory() if setting == HISTORY and given is None else None
        self._kept = given if isinstance(given, ForecastLengths) else self._history  # what a checkpoint has of it
        predict = given or self._history or (_predictor(setting) if setting else None)
        self._long = None if predict is None else LongPrompts(predict)
        self._asked = -1  # the last number that was asked for, and what was said
        self._answer = False

    def __bool__(self) -> bool:
        return self._long is not None

    def is_long(self, number: int, prompt: Prompt, share: float) -> bool:
        """Whether prompt ``number`` is among the longest ``share``. Raises RunError for a predictor that fails."""
        if self._long is None:
            return False
        if number != self._asked:
            try:
                self._answer = self._long.is_long(prompt, share)
            except Exception as error:  # whatever a function of others raises
                raise RunError(f"{FIELD} = {self._name!r} failed for prompt {prompt.key}: {error!r}") from error
            self._asked = number
        return self._answer

    def seen(self, prompt: Prompt, tokens: int) -> None:
        """It was trained; its longest response had so many tokens."""
        if self._history is not None:
            self._history.seen(prompt, tokens)

    def state(self) -> dict[str, Any]:
        """For a checkpoint; JSON. With lengths of its own (history, forecasts) it grows with the data set, a number a prompt."""
        history = {} if self._kept is None else self._kept.state()
        return {"history": history, "window": [] if self._long is None else self._long.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state`."""
        if self._kept is not None:
            self._kept.restore(state["history"])
        if self._long is not None:
            self._long.restore(state["window"])
        self._asked = -1


def _predictor(setting: str) -> Predictor:
    return cast(Predictor, named_function(FIELD, setting, ", or history"))
