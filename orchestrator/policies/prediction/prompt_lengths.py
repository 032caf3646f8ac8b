"""Which prompts are expected to be long before they are played (our addition to RollPacker 3, which finds out by playing).

A **predictor** is any callable from a prompt to the tokens of its longest response, or None if it does not know.
:class:`LengthHistory` is one: it returns the prompt's length when it was last trained on, as epochs repeat prompts.
:class:`LongPrompts` decides which are long: the share of prompts that a short round would defer anyway.

Guarantees: nothing is long before ``LEAST`` predictions were seen, without a prediction, or if all predictions are alike;
memory is bounded by the window and by :data:`PROMPTS`. Pure.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from orchestrator.api import Prompt

WINDOW = 256  # newest predictions that a new one is compared with
LEAST = 8
PROMPTS = 250_000  # lengths that are kept, some 10 MB of a checkpoint; the prompts that were recorded last
_MEMORY = 0.5  # weight of the newest of several lengths of one prompt


# Tokens of the prompt's longest response, None: not known. It must be fast: it is asked in the event loop.
PromptLengthPredictor = Callable[[Prompt], float | None]


class LengthHistory:
    """A predictor: for each prompt, by key, the longest of the responses that it was trained with, recent ones weighted most."""

    def __init__(self) -> None:
        self._tokens: dict[str, float] = {}

    def __call__(self, prompt: Prompt, /) -> float | None:
        """See :data:`PromptLengthPredictor`."""
        return self._tokens.get(prompt.key)

    def record_length(self, prompt: Prompt, tokens: float) -> None:
        """It was trained on; its longest response had so many tokens."""
        known = self._tokens.pop(prompt.key, float(tokens))  # the newest is the last
        self._tokens[prompt.key] = (1 - _MEMORY) * known + _MEMORY * tokens
        if len(self._tokens) > PROMPTS:
            del self._tokens[next(iter(self._tokens))]

    def state(self) -> dict[str, float]:
        """For a checkpoint; JSON."""
        return dict(self._tokens)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state`."""
        self._tokens = {str(key): float(tokens) for key, tokens in [*state.items()][-PROMPTS:]}


class ForecastLengths(LengthHistory):
    """A predictor: for each prompt, the longest length that a run's own forecasts gave for its trajectories, including
    deferred or aborted ones, which :class:`LengthHistory` never sees. Older ones fade in the same way."""

    def record_length(self, prompt: Prompt, tokens: float) -> None:
        """One of its trajectories ended: its length, plus what was still expected if it was cut off."""
        super().record_length(prompt, tokens)
        self._tokens[prompt.key] = max(tokens, self._tokens[prompt.key])


class LongPrompts:
    """Asks ``predict`` and compares with its last :data:`WINDOW` predictions."""

    def __init__(self, predict: PromptLengthPredictor) -> None:
        self.predict = predict
        self._newest: deque[float] = deque()
        self._sorted: list[float] = []

    def is_long(self, prompt: Prompt, share: float) -> bool:
        """Whether it is expected to be longer than all but ``share`` of the prompts. Raises ValueError for an invalid
        prediction. Call once per prompt: the prediction is recorded."""
        tokens = self.predict(prompt)
        if tokens is None:
            return False
        if not (math.isfinite(tokens) and tokens >= 0):
            raise ValueError(f"{tokens!r} tokens are predicted for prompt {prompt.key}: a finite number, or None")
        long = False
        if len(self._sorted) >= LEAST and share > 0:
            place = min(len(self._sorted) - 1, max(0, math.ceil((1 - share) * len(self._sorted)) - 1))
            long = tokens > self._sorted[place]
        self._note(float(tokens))
        return long

    def _note(self, tokens: float) -> None:
        self._newest.append(tokens)
        insort(self._sorted, tokens)
        if len(self._newest) > WINDOW:
            del self._sorted[bisect_left(self._sorted, self._newest.popleft())]

    def state(self) -> list[float]:
        """For a checkpoint; JSON."""
        return list(self._newest)

    def restore(self, state: list[float]) -> None:
        """Continue from :meth:`state`."""
        self._newest, self._sorted = deque(), []
        for tokens in state:
            self._note(float(tokens))
