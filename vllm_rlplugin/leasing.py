"""Which RL job a serving GPU is lent to: one at a time (ROSE 4.1), for as long as it says that it lives.

::

    free --(take)--> leased to a job until T --(the job renews: T moves on)--> ...
      ^                  |          |
      +----(given back)--+          +--- T passes: free; what the job left in the engine is ended (``LeaseKeeper``)

Guarantees:

* A GPU belongs to one job at most. It is one record for all engines of a KV pool, in a file beside the pool's (mode 0600),
  changed under a lock of the kernel, which falls with its process; a server without a pool has a record of its own, in memory.
* A second job is refused with the name of the first and the seconds that its lease has left. The same job in a new life (a
  resume) takes its lease over, and shuts its former life out.
* Expiry is by the monotonic clock, which all processes of a machine share.
* While somebody has the lease, commands that use the engine are refused to everybody else. While nobody has, they are not: a
  client of vLLM's own verbs needs no lease.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.api import CommandError, RetryableError

if TYPE_CHECKING:
    from vllm_rlplugin.served import ServedWorker

LOCK_SECONDS = 1.0  # that a record may be locked by another process; it takes microseconds
WATCH_SECONDS = 0.5  # between two looks whether the lease has run out

_logger = logging.getLogger("vllm.rl_coserve")


@dataclass(frozen=True, slots=True)
class Lease:
    """``job`` at ``place`` (its metadata store: jobs of two folders may have one name). ``key``: digest of what only this life
    of the job knows. ``until``: server -> when its hold ends, in seconds of the monotonic clock."""

    job: str
    place: str
    key: str
    until: dict[str, float] = field(default_factory=dict)

    def left(self, now: float) -> float:
        """Seconds that it has, 0: it is over."""
        return max(0.0, max(self.until.values(), default=0.0) - now)


class LeaseBook:
    """The record of one GPU. ``path``: shared by the servers of a pool; None: of this server alone. ``server``: who asks."""

    def __init__(self, server: str, path: Path | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._server, self._path, self._clock = server, path, clock
        self._own: Lease | None = None  # without a file

    def present(self) -> Lease | None:
        """The lease that holds, None: nobody has one."""
        found = self._read()
        return found if found is not None and found.left(self._clock()) else None

    def take(self, job: str, place: str, key: str, seconds: float) -> Lease:
        """Take it, or renew it. Raises CommandError ``leased``, RetryableError while the record is locked."""
        now, secret = self._clock(), _digest(key)
        with self._locked():
            found = self._read()
            if found is None or not found.left(now):
                found = Lease(job, place, secret)
            elif found.key != secret:
                if (found.job, found.place) != (job, place):
                    raise CommandError("leased", _taken(found, now))
                found = Lease(job, place, secret)  # a new life of it
            held = {server: until for server, until in found.until.items() if until > now}
            found = Lease(job, place, secret, {**held, self._server: now + seconds})
            self._write(found)
            return found

    def give_back(self, key: str) -> bool:
        """This server is not used by the holder any more; whether it had it. Raises RetryableError while it is locked."""
        with self._locked():
            found = self._read()
            if found is None or found.key != _digest(key) or self._server not in found.until:
                return False
            rest = {server: until for server, until in found.until.items() if server != self._server}
            self._write(Lease(found.job, found.place, found.key, rest) if rest else None)
            return True

    def refusal(self, key: str) -> str:
        """Why who shows this key ("": none) may not use the engine; "": it may."""
        found = self.present()
        return "" if found is None or (key and found.key == _digest(key)) else _taken(found, self._clock())

    # -- the record --------------------------------------------------------------------------------------------------

    def _read(self) -> Lease | None:
        if self._path is None:
            return self._own
        try:
            with os.fdopen(os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), encoding="utf-8") as stream:
                if os.fstat(stream.fileno()).st_uid != os.getuid():
                    raise RetryableError(f"the lease {self._path.name} belongs to another user: remove it")
                found = json.load(stream)
            until = {str(server): float(end) for server, end in found["until"].items()}
            return Lease(str(found["job"]), str(found["place"]), str(found["key"]), until)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise RetryableError(f"the lease {self._path.name} cannot be read ({error}): remove it") from error

    def _write(self, lease: Lease | None) -> None:
        if self._path is None:
            self._own = lease
        elif lease is None:
            self._path.unlink(missing_ok=True)
        else:  # renamed: a reader takes no lock
            fresh = self._path.with_name(f"{self._path.name}.{os.getpid()}")
            handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                json.dump(asdict(lease), stream)
            fresh.replace(self._path)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        if self._path is None:
            yield
            return
        handle = os.open(self._path.with_name(f"{self._path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            deadline = time.monotonic() + LOCK_SECONDS
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError as error:
                    if time.monotonic() > deadline:
                        raise RetryableError(f"the lease {self._path.name} is locked by another process") from error
                    time.sleep(0.001)
            yield
        finally:
            os.close(handle)  # and the lock with it


def lease_path(pool: Path) -> Path:
    """Of a pool's lease: beside its file."""
    return pool.with_name(f"{pool.name}.lease")


def _taken(lease: Lease, now: float) -> str:
    return f"job {lease.job} has this GPU, for {lease.left(now):.0f} s more at least: one RL job a serving GPU"


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


class LeaseKeeper:
    """The lease in front of one engine: ends what a job left whose lease ran out, and lets an engine go on that it had stopped.
    ``book`` is asked by the routes."""

    def __init__(self, book: LeaseBook, worker: ServedWorker) -> None:
        self.book, self._worker = book, worker
        self._granted: tuple[str, str] | None = None  # (job, place) that this server was last granted to
        self.stopped = False  # a holder suspended the engine, and did not resume it yet
        self.expired = 0  # leases that ran out here

    def take(self, job: str, place: str, key: str, seconds: float) -> float:
        """See :meth:`LeaseBook.take`; returns the seconds that are left."""
        lease = self.book.take(job, place, key, seconds)
        self._granted = (job, place)
        return lease.left(time.monotonic())

    def give_back(self, key: str) -> bool:
        """See :meth:`LeaseBook.give_back`."""
        had = self.book.give_back(key)
        if had:
            self._granted = None
        return had

    def told(self) -> dict[str, Any] | None:
        """For the status: who has it, None: nobody."""
        lease = self.book.present()
        return (
            None
            if lease is None
            else {"job": lease.job, "place": lease.place, "seconds": round(lease.left(time.monotonic()), 3)}
        )

    async def watch(self) -> None:
        """For ever; ends when the engine has died."""
        while not self._worker.broken:
            await asyncio.sleep(WATCH_SECONDS)
            try:
                await self._look()
            except (RetryableError, CommandError) as error:
                _logger.warning("what a job left could not be ended: %s", error)

    async def _look(self) -> None:
        if self._granted is None:
            return
        lease = self.book.present()
        if lease is None or (lease.job, lease.place) != self._granted:
            job, self._granted = self._granted[0], None
            self.expired += 1
            await self._clear(job)

    async def _clear(self, job: str) -> None:
        left = await self._worker.abort_all() if self._worker.unfinished_ids else 0
        _logger.warning("the lease of job %s ran out: %d of its requests were ended", job, left)
        if self.stopped and self._worker.cycle.suspended and not self._worker.cycle.changing:
            await self._worker.resume()
        self.stopped = False
