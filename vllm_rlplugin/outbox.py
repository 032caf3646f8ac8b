"""``Outbox``: completions that survive a lost answer. At least once on the wire, exactly once for a client that counts.

Every batch has a number, and is kept until a call acknowledges that number. A client that lost an answer asks again, with
the number that it had last, and gets the same batch. Only the latest call is answered; an earlier one that still waits
(its client went away) gets nothing, under the number of the batch that was acknowledged last.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Sequence
from typing import Any

from orchestrator.api import Completion, RolloutWorker
from orchestrator.api.http import MAX_ANSWER_TOKENS, MAX_COMPLETIONS, completion_to_json

PIECE = 4096  # numbers that are written at a time: some 3 ms
_NUMBERS = 20  # that a completion without tokens counts as


class Outbox:
    """In front of one worker, of which it is the only reader."""

    def __init__(self, worker: RolloutWorker) -> None:
        self._worker = worker
        self._ready: deque[Completion] = deque()
        self._batch: list[Completion] = []
        self._number = 0  # of the batch that was made last

    async def take(self, acknowledged: int | None, timeout: float) -> tuple[int, list[Completion]]:  # noqa: ASYNC109
        """The batch after ``acknowledged`` (None: of nothing), and its number; empty after ``timeout`` seconds."""
        if acknowledged == self._number:
            self._batch = []
        if not self._batch:
            if not self._ready:
                await self._wait(timeout)
            if self._batch:  # another call made one meanwhile
                return self._number, self._batch
            room = MAX_ANSWER_TOKENS
            while self._ready and len(self._batch) < MAX_COMPLETIONS:
                room -= len(self._ready[0].token_ids)
                if room < 0 and self._batch:
                    break
                self._batch.append(self._ready.popleft())
            if not self._batch:
                return self._number, []
            self._number += 1
        return self._number, self._batch

    async def _wait(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                self._ready.extend(await self._worker.completions())
        except TimeoutError:
            pass


async def written(number: int, batch: Sequence[Completion]) -> bytes:
    """The answer as JSON. In pieces, between which the event loop does what else there is: one of a million numbers would
    keep users of the server waiting for a second."""
    rows, since = [], 0
    for completion in batch:
        rows.append(
            await _long(completion) if len(completion.token_ids) > PIECE else _json(completion_to_json(completion))
        )
        since += _NUMBERS + 2 * len(completion.token_ids)
        if since > PIECE:
            since = 0
            await asyncio.sleep(0)
    return b'{"sequence":%d,"completions":[%b]}' % (number, b",".join(rows))


async def _long(completion: Completion) -> bytes:
    fields = []
    for name, value in completion_to_json(completion).items():
        text = _json(value) if not isinstance(value, tuple) else b"[%b]" % b",".join(await _pieces(value))
        fields.append(b"%b:%b" % (_json(name), text))
    return b"{%b}" % b",".join(fields)


async def _pieces(values: tuple[Any, ...]) -> list[bytes]:
    pieces = []
    for start in range(0, len(values), PIECE):
        await asyncio.sleep(0)
        pieces.append(_json(values[start : start + PIECE])[1:-1])
    return pieces


def _json(value: Any) -> bytes:
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
