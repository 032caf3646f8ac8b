"""``Outbox``: completions that survive a lost answer. At least once on the wire, exactly once for a client that counts.

Every batch has a number, and is kept until a call acknowledges that number. A client that lost an answer asks again, with
the number that it had last, and gets the same batch. Only the latest call is answered; an earlier one that still waits
(its client went away) gets nothing, under the number of the batch that was acknowledged last.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from orchestrator.api import Completion, RolloutWorker
from orchestrator.api.http import MAX_ANSWER_TOKENS, MAX_COMPLETIONS, completion_to_json
from orchestrator.api.jsontext import pieces

PIECE_BYTES = 1 << 16  # of JSON that are written in a turn of the event loop: some 3 ms


class Outbox:
    """In front of one worker, of which it is the only reader."""

    def __init__(self, worker: RolloutWorker) -> None:
        self._worker = worker
        self._ready: deque[Completion] = deque()
        self._batch: list[Completion] = []
        self._number = 0  # of the batch that was made last

    async def next_batch(self, acknowledged: int | None, timeout: float) -> tuple[int, list[Completion]]:  # noqa: ASYNC109
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


async def encode_batch(number: int, batch: Sequence[Completion]) -> bytes:
    """The answer as JSON. In pieces, between which the event loop does what else there is: one of a million numbers would
    keep users of the server waiting for a second."""
    text = bytearray()
    due = PIECE_BYTES
    answer = {"sequence": number, "completions": [completion_to_json(completion) for completion in batch]}
    for piece in pieces(answer, (",", ":")):
        text += piece.encode()
        if len(text) >= due:
            due = len(text) + PIECE_BYTES
            await asyncio.sleep(0)
    return bytes(text)
