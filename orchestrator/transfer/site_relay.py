"""The relay as an engine sees it that shares a slow link with others: its objects come from the cache of its site.

Guarantees: an object is the cache's or the relay's own, and nobody can tell which but by :attr:`SiteRelay.past_cache`: readers
verify both alike. A cache that is gone, hangs or had an object wrong is left alone for ``RETRY_SECONDS``, in which everything
comes from the relay itself; that is logged when it begins, and counted. A cache that refuses the token when the relay is opened
is a ConfigError: who has another token would pull all versions over the slow link for ever.

The token is in a file that :data:`TOKEN_FILE` names, on every machine; it does not travel
(:mod:`orchestrator.transfer.proven_link`).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orchestrator.transfer.proven_link as proven_link
from orchestrator.api import ConfigError, Relay, bearer
from orchestrator.api.tls import Tls
from orchestrator.transfer.proven_link import FramedStream, LinkRefused
from orchestrator.transfer.registered_buffers import RangeRelay, RegisteringRelay
from orchestrator.transfer.transfer_errors import RelayError

TOKEN_FILE = "RL_COSERVE_SITE_TOKEN_FILE"
PROTOCOL = 1
ANSWER_SECONDS = 30.0  # for one answer with its bytes; a cache that has to wait for the slow link says so before
RETRY_SECONDS = 30.0  # in which a cache that failed is not asked again
COMING = "coming"  # the cache is fetching it: ask again
MISSING = "missing"  # the relay has no such object

_logger = logging.getLogger(__name__)
_Ranges = Sequence[tuple[int, int, int]]  # offset in the object, length, offset in the buffer


class SiteRelay:
    """Implements :class:`orchestrator.api.Relay` for readers. ``relay``: the one itself; ``place``: of the cache; ``told``: the
    endpoint by which the cache finds the relay. Closes ``relay``. Raises ConfigError."""

    def __init__(
        self,
        relay: Relay,
        place: str,
        told: Mapping[str, Any],
        authority: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._relay, self._place, self._told, self._clock = relay, place, dict(told), clock
        file = os.environ.get(TOKEN_FILE, "")
        fix = "name a file with the site cache's token, on this machine"
        if not file:
            raise ConfigError(TOKEN_FILE, "", fix)
        self._token = bearer.Token(f"{bearer.FILE}{file}", TOKEN_FILE, fix)
        self._context = Tls(authority=authority).client() if place.startswith(proven_link.TLS) else None
        self._until = 0.0  # when the cache is asked again
        self.past_cache = 0  # objects that came from the relay itself
        self.why = ""  # the last cause
        self._greet()

    def put(self, key: str, data: memoryview) -> None:
        self._relay.put(key, data)

    def remove(self, key: str) -> bool:
        return self._relay.remove(key)

    def size(self, key: str) -> int:
        """Waits until the cache has the object."""
        found = self._from_cache({"what": "size", "key": key}, None)
        return self._relay.size(key) if found is None else found

    def get_into(self, key: str, buffer: memoryview) -> int:
        found = self._from_cache({"what": "read", "key": key}, buffer.cast("B"))
        if found is not None:
            return found
        self.past_cache += 1
        return self._relay.get_into(key, buffer)

    def get_ranges(self, key: str, ranges: _Ranges, buffer: memoryview) -> int:
        """See :class:`orchestrator.transfer.registered_buffers.RangeRelay`."""
        header = {"what": "read", "key": key, "ranges": [(offset, length) for offset, length, _ in ranges]}
        found = self._from_cache(header, buffer.cast("B"), [(place, length) for _, length, place in ranges])
        if found is not None:
            return found
        self.past_cache += 1
        assert isinstance(self._relay, RangeRelay)  # all kinds are
        return self._relay.get_ranges(key, ranges, buffer)

    def register(self, buffer: memoryview) -> None:
        """For reads from the relay itself."""
        if isinstance(self._relay, RegisteringRelay):
            self._relay.register(buffer)

    def unregister(self, buffer: memoryview) -> None:
        """Undo ``register``."""
        if isinstance(self._relay, RegisteringRelay):
            self._relay.unregister(buffer)

    def close(self) -> None:
        self._relay.close()

    def distrust(self, why: str) -> bool:
        """What came was wrong. False: it was from the relay itself, already."""
        if self._clock() < self._until:
            return False
        self._leave_alone(f"what it had was wrong: {why}")
        return True

    def _greet(self) -> None:
        """The cache follows the job from its first word on."""
        for last in (False, True):
            try:
                self._ask({"what": "look"}, None, ())
                return
            except LinkRefused as error:
                if error.reason == "unauthorized" and last:
                    fix = f"the site cache at {self._place} has another token: give both sides the same"
                    raise ConfigError(TOKEN_FILE, os.environ.get(TOKEN_FILE, ""), fix) from error
                if error.reason != "unauthorized":
                    self._leave_alone(str(error))
                    return
            time.sleep(0.2)  # one that is just ending hangs up in the same way

    def _from_cache(
        self, header: Mapping[str, Any], buffer: memoryview | None, places: Sequence[tuple[int, int]] = ()
    ) -> int | None:
        """Bytes of the object, or that were read; None: ask the relay itself."""
        if self._clock() < self._until:
            return None
        while True:
            try:
                return self._ask(header, buffer, places)
            except LinkRefused as error:
                if error.reason == MISSING:
                    if buffer is None:
                        return -1
                    raise RelayError("missing", f"no object {header['key']}") from error
                if error.reason != COMING:
                    self._leave_alone(str(error))
                    return None

    def _ask(self, header: Mapping[str, Any], buffer: memoryview | None, places: Sequence[tuple[int, int]]) -> int:
        token = self._token.current()

        def talk(stream: FramedStream) -> int:
            found = stream.ask(token, {"protocol": PROTOCOL, "endpoint": self._told, **header})
            size = found.get("size")
            if type(size) is not int or size < 0:
                raise LinkRefused("malformed", f"a size of {size!r:.40}")
            if buffer is None:
                return size
            into = [buffer[place : place + length] for place, length in places] if places else [buffer[:size]]
            if size != sum(part.nbytes for part in into):
                raise LinkRefused("malformed", f"{size} B, {sum(part.nbytes for part in into)} are expected")
            for part in into:
                stream.read_into(part)
            return size

        return proven_link.connect(self._place, ANSWER_SECONDS, talk, self._context, allow_plain=True)

    def _leave_alone(self, why: str) -> None:
        self._until, self.why = self._clock() + RETRY_SECONDS, f"{self._place}: {why}"
        _logger.warning("the cache of this site is passed by for %g s, at %s", RETRY_SECONDS, self.why)
