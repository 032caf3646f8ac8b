"""Trajectories that take their turns in step: batch-level environment interaction (RollArt figure 5b), a baseline.

Guarantees: a phase begins when every member has arrived at one, never before; a member that leaves (ended, failed,
cancelled) is waited for no longer; whoever waits is not charged for it: its time limit stands still. It cannot hold for
ever what is in it: each member works under its own limits, and when none works any more the next phase opens.
"""

from __future__ import annotations

import asyncio

_LAST = "reward"  # this phase opens when nobody waits for another one


class Lockstep:
    """Members :meth:`enter`, then :meth:`arrive` before each phase, then :meth:`leave`. Others may arrive too: they pass."""

    def __init__(self) -> None:
        self._members: dict[str, None] = {}
        self._waiting: dict[str, tuple[str, asyncio.Future[None]]] = {}
        self._phase = ""  # that opened last

    def enter(self, name: str) -> None:
        """A member from now on: the others wait for it."""
        self._members[name] = None

    def leave(self, name: str) -> None:
        """Not any more. Idempotent."""
        self._members.pop(name, None)
        self._open()

    async def arrive(self, name: str, phase: str, limit: asyncio.Timeout | None = None) -> None:
        """Wait until ``phase`` opens. ``limit``, the member's own time limit, does not run meanwhile."""
        if name not in self._members:
            return
        loop = asyncio.get_running_loop()
        when = None if limit is None else limit.when()
        begun = loop.time()
        if limit is not None and when is not None:
            limit.reschedule(None)
        future: asyncio.Future[None] = loop.create_future()
        self._waiting[name] = (phase, future)
        self._open()
        try:
            await future
        finally:
            self._waiting.pop(name, None)
        if limit is not None and when is not None:
            limit.reschedule(when + loop.time() - begun)

    def _open(self) -> None:
        """Open the next phase when nobody works."""
        if not self._waiting or len(self._waiting) < len(self._members):
            return
        wanted = list(dict.fromkeys(phase for phase, _ in self._waiting.values()))
        turns = [phase for phase in wanted if phase != _LAST]
        others = [phase for phase in turns if phase != self._phase]
        self._phase = (others or turns or wanted)[0]
        for name, (phase, future) in list(self._waiting.items()):
            if phase == self._phase:
                del self._waiting[name]
                if not future.done():
                    future.set_result(None)
