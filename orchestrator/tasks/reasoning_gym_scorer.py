"""What the processes that score answers to reasoning-gym run (:mod:`orchestrator.tasks.scoring`): the library is loaded before
the first answer comes, so that it does not count as its time."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from orchestrator.tasks import reasoning_gym

importlib.import_module("reasoning_gym")


def scored(event: Mapping[str, str]) -> float:
    """:func:`orchestrator.tasks.reasoning_gym.score` of ``payload`` and ``answer``."""
    return reasoning_gym.score(event["payload"], event["answer"])
