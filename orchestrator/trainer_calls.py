"""What a run asks of its trainer: under one time limit, and said while it runs."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from orchestrator.api import PartLost, RetryableError

Answer = TypeVar("Answer")


class TrainerCalls:
    """``limit``: seconds for a call (`run.trainer_timeout`)."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._asked: list[str] = []

    @property
    def waiting_for(self) -> str:
        """What was asked for last and is not answered, "" while nothing is."""
        return self._asked[-1] if self._asked else ""

    async def limited(self, what: str, call: Coroutine[Any, Any, Answer], *, beside: bool = False) -> Answer:
        """A call under the time limit, or twice that ``beside`` another one, which may keep the answer back. Raises PartLost
        when that is over, and what the call raises."""
        limit = 2 * self._limit if beside else self._limit
        self._asked.append(what)
        try:
            async with asyncio.timeout(limit):
                return await call
        except TimeoutError as error:
            raise PartLost(f"the trainer failed in {what}: no answer for {limit:g} s (run.trainer_timeout)") from error
        finally:
            self._asked.remove(what)

    async def final(self, what: str, call: Coroutine[Any, Any, Answer], *, beside: bool = False) -> Answer:
        """A call whose failure ends this life of the run: the trainer's state is in the last checkpoint. Raises PartLost."""
        try:
            return await self.limited(what, call, beside=beside)
        except RetryableError as error:
            raise PartLost(f"the trainer failed in {what}: {error}") from error
