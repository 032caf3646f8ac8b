"""What a run asks of its trainer: under one time limit, and said while it runs."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from orchestrator.api import PartLost, RetryableError

Answer = TypeVar("Answer")


class TrainerCalls:
    """``limit``: seconds for a call (`run.trainer_timeout`). ``waiting_for``: what is asked for now, "" while nothing is."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self.waiting_for = ""

    async def limited(self, what: str, call: Coroutine[Any, Any, Answer]) -> Answer:
        """A call under the time limit. Raises PartLost when that is over, and what the call raises."""
        self.waiting_for = what
        try:
            async with asyncio.timeout(self._limit):
                return await call
        except TimeoutError as error:
            raise PartLost(
                f"the trainer failed in {what}: no answer for {self._limit:g} s (run.trainer_timeout)"
            ) from error
        finally:
            self.waiting_for = ""

    async def final(self, what: str, call: Coroutine[Any, Any, Answer]) -> Answer:
        """A call whose failure ends this life of the run: the trainer's state is in the last checkpoint. Raises PartLost."""
        try:
            return await self.limited(what, call)
        except RetryableError as error:
            raise PartLost(f"the trainer failed in {what}: {error}") from error
