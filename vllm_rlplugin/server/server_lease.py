"""Which RL job a serving GPU is lent to: one at a time (ROSE 4.1), for as long as it says that it lives.

::

    free --(take)--> leased to a job until T --(the job renews: T moves on)--> ...
      ^                  |          |
      +----(given back)--+          +--- T passes: free; what the job left in the engine is ended (``LeaseKeeper``)

Guarantees:

* A GPU belongs to one job at most. It is one record for all engines of a KV pool, in a file beside the pool's (mode 0600),
  changed under a lock of the kernel, which falls with its process; a server without a pool has a record of its own, in memory.
* A second job is refused with the name of the first and the seconds that its lease has left, and so is a second process of the
  same name. The same job in a new life (a resume, which says so) takes its lease over, and shuts its former life out.
* Expiry is by the monotonic clock, which all processes of a machine share.
* A record of another user is an error, and so is one that cannot be read; what says that it holds for longer than any lease may
  does not hold (it is of a clock before the last start of the machine).
* Whatever became of a holder, an engine that it had stopped goes on: when its lease is over, and as soon as a weight update that
  was under way has ended. What it left there is ended before another job gets the server.
* The event loop of a server never waits for another process.
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
from typing import TYPE_CHECKING, Any, TypeVar

from orchestrator.api import CommandError, RetryableError
from orchestrator.api.http import MAX_LEASE_SECONDS
from orchestrator.api.jsontext import parse_object

if TYPE_CHECKING:
    from vllm_rlplugin.worker.served_worker import ServedWorker

LOCK_SECONDS = 1.0  # that a record may be locked by another process; it takes microseconds
WATCH_SECONDS = 0.5  # between two looks whether the lease has run out

_logger = logging.getLogger("vllm.rl_coserve")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """``job`` at ``place`` (its metadata store: jobs of two folders may have one name). ``key``: digest of what only this life
    of the job knows. ``until``: server -> when its hold ends, in seconds of the monotonic clock."""

    job: str
    place: str
    key: str
    until: dict[str, float] = field(default_factory=dict)

    def seconds_left(self, now: float) -> float:
        """Seconds that it has, 0: it is over."""
        return max(0.0, max(self.until.values(), default=0.0) - now)


class LeaseBook:
    """The record of one GPU. ``path``: shared by the servers of a pool; None: of this server alone. ``server``: who asks."""

    def __init__(self, server: str, path: Path | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._server, self._path, self._clock = server, path, clock
        self._own: LeaseRecord | None = None  # without a file

    @property
    def is_shared(self) -> bool:
        """Whether another process may have the record locked: :meth:`grant` and :meth:`end_lease` may then wait."""
        return self._path is not None

    def current_lease(self) -> LeaseRecord | None:
        """The lease that holds, None: nobody has one."""
        found = self._read()
        return found if found is not None and found.seconds_left(self._clock()) else None

    def grant(self, job: str, place: str, key: str, seconds: float, *, takeover: bool = False) -> LeaseRecord:
        """Take it, or renew it. ``takeover``: also from another life of the job. Raises CommandError ``leased``, RetryableError
        while the record is locked."""
        now, secret = self._clock(), _digest(key)
        with self._locked():
            found = self._read()
            if found is None or not found.seconds_left(now):
                found = LeaseRecord(job, place, secret)
            elif found.key != secret:
                same = (found.job, found.place) == (job, place)
                if not (same and takeover):
                    raise CommandError("leased", _taken(found, now) + (_NAMESAKE if same else ""))
                found = LeaseRecord(job, place, secret)  # a new life of it
            held = {server: until for server, until in found.until.items() if until > now}
            found = LeaseRecord(job, place, secret, {**held, self._server: now + seconds})
            self._write(found)
            return found

    def end_lease(self, key: str) -> bool:
        """This server is not used by the holder any more; whether it had it. Raises RetryableError while it is locked."""
        with self._locked():
            found = self._read()
            if found is None or found.key != _digest(key) or self._server not in found.until:
                return False
            rest = {server: until for server, until in found.until.items() if server != self._server}
            self._write(LeaseRecord(found.job, found.place, found.key, rest) if rest else None)
            return True

    def refusal(self, key: str) -> str:
        """Why who shows this key ("": none) may not use the engine; "": it may."""
        found = self.current_lease()
        return "" if found is None or (key and found.key == _digest(key)) else _taken(found, self._clock())

    # -- the record --------------------------------------------------------------------------------------------------

    def _read(self) -> LeaseRecord | None:
        if self._path is None:
            return self._own
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe of another user's holds up nobody
        try:
            with os.fdopen(os.open(self._path, flags), encoding="utf-8") as stream:
                self._own_file(stream.fileno())
                found = parse_object(stream.read())
            ends = {str(server): float(end) for server, end in found["until"].items()}
            latest = self._clock() + MAX_LEASE_SECONDS
            until = {server: end for server, end in ends.items() if end <= latest}
            return LeaseRecord(str(found["job"]), str(found["place"]), str(found["key"]), until)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise RetryableError(f"the lease {self._path.name} cannot be read ({error}): remove it") from error

    def _write(self, lease: LeaseRecord | None) -> None:
        if self._path is None:
            self._own = lease
        elif lease is None:
            self._path.unlink(missing_ok=True)
        else:  # renamed: a reader takes no lock
            fresh = self._path.with_name(f"{self._path.name}.{os.getpid()}")
            fresh.unlink(missing_ok=True)  # of a process that was killed just here
            handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                json.dump(asdict(lease), stream)
            fresh.replace(self._path)

    def _own_file(self, handle: int) -> None:
        """In a folder that all users may write into, what has our name may be another's."""
        assert self._path is not None
        if os.fstat(handle).st_uid != os.getuid():
            raise RetryableError(f"the lease {self._path.name} belongs to another user: remove it")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        if self._path is None:
            yield
            return
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            handle = os.open(self._path.with_name(f"{self._path.name}.lock"), flags, 0o600)
        except OSError as error:
            raise RetryableError(f"the lock of the lease {self._path.name} cannot be opened ({error})") from error
        try:
            self._own_file(handle)
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


_NAMESAKE = "; it is another process of this name: choose another run.name, or resume that run when it has ended"


def _taken(lease: LeaseRecord, now: float) -> str:
    return f"job {lease.job} has this GPU for at least {lease.seconds_left(now):.0f} s more: only one RL job per serving GPU"


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


class LeaseKeeper:
    """The lease in front of one engine: ends what a job left whose lease ran out, and lets an engine go on that it had stopped.
    ``book`` is asked by the routes."""

    def __init__(self, book: LeaseBook, worker: ServedWorker) -> None:
        self.book, self._worker = book, worker
        self._granted: tuple[str, str] | None = None  # (job, place) that this server was last granted to
        self._left = ""  # the job whose requests are to be ended
        self._stopped = False  # a holder suspended the engine, and did not resume it yet
        self._changing = asyncio.Lock()  # who has it: nobody is granted it while what another one left is being ended
        self.expired = 0  # leases that ran out here

    async def grant(self, job: str, place: str, key: str, seconds: float, *, takeover: bool = False) -> float:
        """See :meth:`LeaseBook.grant`; returns the seconds that are left. What a job left whose lease ran out is ended."""
        async with self._changing:
            lease = await self._call_book(lambda: self.book.grant(job, place, key, seconds, takeover=takeover))
            if self._granted not in (None, (job, place)):
                self._expire()
            self._granted = (job, place)
            if self._left:
                await self._abort_requests()
            return lease.seconds_left(time.monotonic())

    async def end_lease(self, key: str) -> bool:
        """See :meth:`LeaseBook.end_lease`. An engine that the holder had stopped goes on."""
        async with self._changing:
            had = await self._call_book(lambda: self.book.end_lease(key))
            if had:
                self._granted = None
                await self._resume_engine()
            return had

    def note_suspend(self, holds: bool) -> None:
        """The engine is about to be suspended, by a client that shows a lease's key (``holds``) or by another one. Raises
        RetryableError where the key is of no lease: nobody would let the engine go on when that client dies."""
        if holds and self._granted is None:
            raise RetryableError("the lease of this server has run out: take it again")
        self._stopped = self._stopped or holds

    def note_resume(self) -> None:
        """It was let go on."""
        self._stopped = False

    def status(self) -> dict[str, Any] | None:
        """For the status: who has it, None: nobody. A record that cannot be read is told as one of nobody known."""
        try:
            lease = self.book.current_lease()
        except RetryableError as error:
            return {"job": "?", "place": "", "seconds": 0.0, "error": str(error)}
        return (
            None
            if lease is None
            else {"job": lease.job, "place": lease.place, "seconds": round(lease.seconds_left(time.monotonic()), 3)}
        )

    async def watch(self) -> None:
        """For ever, whatever one look raises; ends when the engine has died."""
        said = ""
        while not self._worker.broken:
            await asyncio.sleep(WATCH_SECONDS)
            try:
                await self._check_lease()
                said = ""
            except Exception as error:  # noqa: BLE001  whatever was raised in the engine's process comes as a bare Exception
                if repr(error) != said:  # else twice a second, for as long as it lasts
                    _logger.warning("what a job left could not be ended, tried again: %r", error)
                said = repr(error)

    async def _check_lease(self) -> None:
        async with self._changing:
            if self._granted is not None:
                lease = self.book.current_lease()
                if lease is None or (lease.job, lease.place) != self._granted:
                    self._expire()
            if self._granted is None and (self._left or self._stopped):
                await self._abort_requests()

    async def _call_book(self, call: Callable[[], _T]) -> _T:
        """In a thread, where another process may have the record locked."""
        return await asyncio.to_thread(call) if self.book.is_shared else call()

    def _expire(self) -> None:
        assert self._granted is not None
        self._left, self._granted = self._granted[0], None
        self.expired += 1

    async def _abort_requests(self) -> None:
        if self._left:
            left = await self._worker.abort_all() if self._worker.unfinished_ids else 0
            _logger.warning("the lease of job %s ran out: %d of its requests were ended", self._left, left)
            self._left = ""
        await self._resume_engine()

    async def _resume_engine(self) -> None:
        cycle = self._worker.cycle
        if self._stopped and cycle.changing:
            return  # looked at again
        if self._stopped and cycle.unusable:
            _logger.warning("the engine stays paused until an update succeeds: %s", cycle.unusable)
        elif self._stopped:  # also where the pause has not ended yet
            await self._worker.resume()
        self._stopped = False
