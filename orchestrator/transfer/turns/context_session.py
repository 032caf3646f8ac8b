"""The proxy's end of a context session with one worker: what it was sent, so that a turn brings only what is new in it.

Guarantees: when :meth:`ContextSession.add` returns, the worker has every request with exactly the context that was meant: it
has answered with that context's digest. A worker that lacks what a request builds on (evicted, started anew, another one behind
the same address) is sent the whole context in the same call; that is counted. What a call that failed has left there is not
relied on. The cost of a turn does not grow with its context, where that is a :class:`~orchestrator.api.TokenSequence` that goes
on from the last one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence

from orchestrator.api import GenerationRequest, RetryableError, TokenSequence
from orchestrator.api import http as wire
from orchestrator.transfer.turns.turn_messages import encode_turns

MESSAGE_TOKENS = 50_000  # new ones in a message, and
MESSAGE_TURNS = 128  # turns: its reader's loop, which serves others too, takes a few milliseconds for them
_BRANCHES = 8  # contexts of one trajectory: an agent's that asks side by side
_TRAJECTORIES = 1 << 16

Send = Callable[[bytes], Awaitable[Sequence[object]]]
_Turn = tuple[GenerationRequest, TokenSequence, TokenSequence | None]


class ContextSession:
    """``send``: carries a message to the worker's :class:`~orchestrator.transfer.turns.held_contexts.HeldContexts`, and returns
    what ``take`` answers there."""

    def __init__(self, name: str, send: Send) -> None:
        self._name = name
        self._send = send
        self._sent: OrderedDict[str, list[TokenSequence]] = OrderedDict()  # contexts that the worker has, by trajectory
        self._ended: list[str] = []  # which it may forget, not told yet
        self._resent = (0, 0)

    async def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Raises what ``send`` raises, RetryableError for an answer that cannot be, and ValueError for ids that are no int32."""
        if lost := await self._send_all(requests):
            contexts, tokens = self._resent
            self._resent = contexts + len(lost), tokens + sum(len(request.token_ids) for request in lost)
            if again := await self._send_all(lost, whole=True):
                raise RetryableError(f"{self._name}: lacks the context of {again[0].request_id}, which was sent whole")

    def forget(self, trajectory_id: str) -> None:
        """The trajectory has ended; the worker hears of it with the next turns."""
        if self._sent.pop(trajectory_id, None) is not None and len(self._ended) < wire.MAX_IDS:
            self._ended.append(trajectory_id)

    def clear(self) -> None:
        """The worker has nothing any more."""
        self._sent.clear()
        self._ended.clear()

    def take_resent(self) -> tuple[int, int]:
        """Contexts that it lacked, and their tokens, since this was last asked."""
        found, self._resent = self._resent, (0, 0)
        return found

    async def _send_all(self, requests: Sequence[GenerationRequest], *, whole: bool = False) -> list[GenerationRequest]:
        """Returns those whose context the worker lacks."""
        lost: list[GenerationRequest] = []
        turns: list[_Turn] = []
        room = MESSAGE_TOKENS
        for request in requests:
            context = TokenSequence.of(request.token_ids)
            base = None if whole else self._base(request.trajectory_id, context)
            size = len(context) - (0 if base is None else len(base))
            if turns and (size > room or len(turns) == MESSAGE_TURNS):
                lost += await self._send_some(turns)
                turns, room = [], MESSAGE_TOKENS
                base = None if whole else self._base(request.trajectory_id, context)
            turns.append((request, context, base))
            self._note(request.trajectory_id, context, base)
            room -= size
        return lost + await self._send_some(turns) if turns else lost

    async def _send_some(self, turns: Sequence[_Turn]) -> list[GenerationRequest]:
        ended, self._ended = self._ended, []
        known = False
        try:
            answer = await self._send(encode_turns(turns, ended))
            if len(answer) != len(turns):
                raise RetryableError(f"{self._name}: {len(turns)} turns were sent, {len(answer)} answered")
            known = True
        finally:
            if not known:
                for request, _, _ in turns:
                    self._sent.pop(request.trajectory_id, None)
        lost = []
        for (request, context, _), theirs in zip(turns, answer, strict=True):
            if theirs == context.digest.hex():
                continue
            self._sent.pop(request.trajectory_id, None)
            if theirs:
                self.clear()
                raise RetryableError(
                    f"{self._name}: claims a context for {request.request_id} that is not the one meant"
                )
            lost.append(request)
        return lost

    def _base(self, trajectory: str, context: TokenSequence) -> TokenSequence | None:
        """The longest beginning of it that the worker has."""
        found = [held for held in self._sent.get(trajectory, ()) if len(held) and context.begins_with(held)]
        return max(found, key=len, default=None)

    def _note(self, trajectory: str, context: TokenSequence, base: TokenSequence | None) -> None:
        """The worker has it once the message is answered, in the place of what it goes on from."""
        held = self._sent.setdefault(trajectory, [])
        held[:] = [other for other in held if other is not base and len(other)][1 - _BRANCHES :]
        held.append(context)
        self._sent.move_to_end(trajectory)
        if len(self._sent) > _TRAJECTORIES:
            self._sent.popitem(last=False)
