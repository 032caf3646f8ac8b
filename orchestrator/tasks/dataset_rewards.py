"""The reward of a row of a data set: what the user's functions say of the text, weighted and summed.

Runs in the function host, which imports the user's module; a module that is not on the path fails before a run starts
(:func:`orchestrator.tasks.dataset.scorer`). This module imports nothing that would slow a cold start.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from typing import Any


def score_row(payload: Mapping[str, Any]) -> dict[str, Any]:
    """``payload``: ``prompt`` (the row, as the task writes it) and ``texts`` (what was said, one answer; None: not ended).
    Returns ``reward``, ``outcome`` and the value of each function under its name. An answer that was not ended is 0, and no
    function sees it. Raises ValueError for another payload, TypeError when a function gives no number."""
    texts = payload.get("texts")
    if not isinstance(texts, list) or len(texts) > 1:
        raise ValueError("texts must be a list of one answer")
    given = json.loads(payload["prompt"])
    row, answer = given["row"], given["row"][given["answer"]]
    if not texts or texts[0] is None:
        return {"reward": 0.0, "outcome": "not ended"}
    answer = answer if isinstance(answer, str) else json.dumps(answer)
    parts = {target: _value(target, texts[0], answer, dict(row)) for target in given["rewards"]}
    reward = sum(weight * parts[target] for target, weight in given["rewards"].items())
    return {**parts, "reward": reward, "outcome": "right" if reward > 0.5 else "wrong"}


def _value(target: str, said: str, answer: str, row: dict[str, Any]) -> float:
    module, _, name = target.partition(":")
    value = getattr(importlib.import_module(module), name)(said, answer, row)
    if not isinstance(value, int | float):
        raise TypeError(f"{target} gave {value!r:.80}: must be a number")
    return float(value)
