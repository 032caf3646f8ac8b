"""What a worker remembers of the contexts that it was sent: the other end of a context session.

Guarantees: a request is given exactly the context that was meant, or none: what is named by length and digest is verified
over the tokens that are here; no more than ``limit`` tokens are kept, those that were not used for longest go first. Weights
do not matter to it, nor do clients: what was sent under the name of one trajectory is found under that name alone.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

from orchestrator.api import CommandError, GenerationRequest, TokenSequence
from orchestrator.transfer.turns.turn_messages import SentTurn, TurnMessage

HELD_TOKENS = 1 << 25  # 128 MiB; a thousand contexts of 32k tokens


class HeldContexts:
    """Of one worker. ``limit``: tokens."""

    def __init__(self, limit: int = HELD_TOKENS) -> None:
        self._limit = limit
        self._held: OrderedDict[tuple[str, bytes], TokenSequence] = OrderedDict()  # by trajectory and digest
        self._digests: dict[str, dict[bytes, None]] = {}  # of a trajectory
        self.tokens = 0
        self.missed = 0  # requests whose context was not here
        self.evicted = 0  # contexts

    def __len__(self) -> int:
        return len(self._held)

    def take(self, message: TurnMessage) -> tuple[list[GenerationRequest], list[str]]:
        """(the requests whose contexts are whole now; for each that was sent the digest of what is here of it, in hexadecimal,
        or "": it is to be sent whole). Raises CommandError ``invalid_request`` for a whole context with another digest."""
        for trajectory in message.ended:
            self.forget(trajectory)
        ready, digests = [], []
        for turn in message.turns:
            context = self._context(turn)
            if context is None:
                self.missed += 1
                digests.append("")
            else:
                ready.append(replace(turn.request, token_ids=context))
                digests.append(context.digest.hex())
        return ready, digests

    def _context(self, turn: SentTurn) -> TokenSequence | None:
        trajectory, new = turn.request.trajectory_id, TokenSequence.of(turn.request.token_ids)
        length = turn.base + len(new)
        context = self._held.get((trajectory, turn.digest))  # a message that comes twice finds its own
        if context is None:
            base = self._held.get((trajectory, turn.base_digest)) if turn.base else TokenSequence()
            if base is None or len(base) != turn.base:
                return None
            context = base + new if turn.base else new
            if context.digest != turn.digest:
                if turn.base:
                    return None
                name, fix = turn.request.request_id, "was damaged on its way, or is of another protocol"
                raise CommandError("invalid_request", f"{name}: its context has another digest than named: it {fix}")
            self._drop(trajectory, turn.base_digest)
        elif len(context) != length:
            return None
        self._keep(trajectory, context)
        return context

    def _keep(self, trajectory: str, context: TokenSequence) -> None:
        key = (trajectory, context.digest)
        if key not in self._held:
            self._held[key] = context
            self._digests.setdefault(trajectory, {})[context.digest] = None
            self.tokens += len(context)
        self._held.move_to_end(key)
        while self.tokens > self._limit:
            self._drop(*next(iter(self._held)))
            self.evicted += 1

    def _drop(self, trajectory: str, digest: bytes) -> None:
        context = self._held.pop((trajectory, digest), None)
        if context is None:
            return
        self.tokens -= len(context)
        digests = self._digests[trajectory]
        del digests[digest]
        if not digests:
            del self._digests[trajectory]

    def forget(self, trajectory: str) -> None:
        """It has ended."""
        for digest in tuple(self._digests.get(trajectory, ())):
            self._drop(trajectory, digest)

    def trajectories(self) -> list[str]:
        """Of which something is here."""
        return list(self._digests)

    def clear(self) -> None:
        """Nothing is here any more."""
        self._held.clear()
        self._digests.clear()
        self.tokens = 0

    def status(self) -> dict[str, int]:
        """For who looks at the worker."""
        return {"contexts": len(self), "tokens": self.tokens, "missed": self.missed, "evicted": self.evicted}
