"""A run's lease of a serving GPU (ROSE 4.1): taken before anything else is asked of its server, and renewed while the run lives.

Guarantees: a run that dies, or whose event loop stands still for longer than the lease, loses it, and the server ends what it
left there; renewal needs nothing but the loop, so a weight update or a long step costs no lease. A lease that another job has
got meanwhile is not asked for again from here: the server refuses the next command, and whoever sent that decides.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from orchestrator.api import CommandError, ConfigError, RetryableError
from orchestrator.api import http as wire

LEASE_SECONDS = 60.0
_RENEWALS = 3  # within the time of a lease
_ERRORS = (CommandError, ConfigError, RetryableError)

_logger = logging.getLogger(__name__)


class ServerLease:
    """Of one server, for ``job`` at ``place``. ``post``: sends a command to it."""

    def __init__(
        self, post: Callable[[str, dict[str, Any] | None], Awaitable[None]], job: str, place: str, seconds: float
    ) -> None:
        self._post = post
        self._body = {"job": job, "place": place, "seconds": seconds}
        self._every = seconds / _RENEWALS
        self._renewing: asyncio.Task[None] | None = None

    async def hold(self) -> None:
        """Take it, and renew it from now on. Idempotent. Raises CommandError ``leased``, ConfigError, RetryableError."""
        await self._post(wire.LEASE, self._body)
        if self._renewing is None or self._renewing.done():
            self._renewing = asyncio.create_task(self._renew(), name="lease")

    async def give_back(self) -> None:
        """The server is not used any more. A server that does not answer gets it back when it runs out."""
        held = self._renewing is not None
        self.stop()
        if held:
            try:
                await self._post(wire.GIVE_BACK, None)
            except _ERRORS as error:
                _logger.info("a lease was not given back, and runs out: %s", error)

    def stop(self) -> None:
        """Renew it no more."""
        if self._renewing is not None:
            self._renewing.cancel()
            self._renewing = None

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._every)
            try:
                await self._post(wire.LEASE, self._body)
            except CommandError as error:
                _logger.warning("the lease was lost: %s", error)
                return
            except (ConfigError, RetryableError) as error:  # it may be back before the lease runs out
                _logger.info("the lease was not renewed: %s", error)
