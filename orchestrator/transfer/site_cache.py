"""The cache of a site: what engines behind one slow link fetch from the relay comes over that link once.

One process per site (a rack, a cluster), which any run may use that has its token: who asks says which relay is meant, and from
then on the cache follows that job's head record. It fetches the buckets of a version as the publisher's ranks store them, long
before the version exists, and the engines read them here bucket by bucket, while the next ones are on their way.

Guarantees: an object is fetched once, however many ask, and handed on only whole, a bucket with the right checksum (readers
verify all else, as ever); what the relay collects, or an epoch that ends, is dropped here at the next look, so that it holds at
most what the relay has; no more than ``JOBS`` jobs, each while somebody asks for it at least once an hour. Who has no token
learns nothing (:mod:`orchestrator.transfer.proven_link`).

What is fetched ahead of any question is the newest version: as a difference, where it comes as one, else whole. All else (a
snapshot for an engine that comes late, a chain) when it is asked for.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

import orchestrator.transfer.proven_link as proven_link
from orchestrator.api import ConfigError, MetadataStore, Relay
from orchestrator.api.tls import SYSTEM, Tls
from orchestrator.transfer.bucket import Bytes, is_whole
from orchestrator.transfer.job_head import FULL, RESERVE_BUCKETS, JobHead, PublishAttempt, decode_head, head_key
from orchestrator.transfer.proven_link import LinkRefused, LinkServer, ProvenAsk
from orchestrator.transfer.registered_buffers import BufferPool
from orchestrator.transfer.relay_endpoint import RelayEndpoint, open_metadata, open_relay
from orchestrator.transfer.site_relay import COMING, MISSING, PROTOCOL
from orchestrator.transfer.transfer_errors import RelayError

CLIENTS = 128  # at a time: the ranks of a site's engines, each with one question
JOBS = 4
IDLE_SECONDS = 3600.0  # without a question, then a job is forgotten
LOOK_SECONDS = 0.05  # between two looks at a job's head, while nothing comes
WAIT_SECONDS = 5.0  # that a question waits here; then its asker is told that the object is coming
PULLS = 2  # objects on their way at once: while one is verified and the next is asked for, the link carries another
AWAY_SECONDS = 2.0  # before a relay or metadata store that failed is asked again
ANSWER_SECONDS = 600.0  # of one answer: its bytes to a slow reader
MANIFEST = "manifest"  # how the last part of its key begins
_KEY = r"rlc/{job}/\d+/\d+/(full|delta-\d+)/(\d+|manifest)(\.\d+)?"

_logger = logging.getLogger(__name__)


class SiteCache(LinkServer):
    """Answers on ``host``:``port`` (0: a free one) who has ``token``, see :class:`orchestrator.transfer.proven_link.LinkServer`.
    Raises ConfigError."""

    def __init__(
        self, token: str, host: str = "127.0.0.1", port: int = 0, tls: Tls = SYSTEM, allow_plain: bool = False
    ) -> None:
        self._jobs: dict[RelayEndpoint, CachedJob] = {}  # the one that was asked for last comes last
        self._lock = threading.Lock()
        super().__init__(
            self._tell_object,
            token,
            host,
            port,
            field="site_cache",
            clients=CLIENTS,
            limit=ANSWER_SECONDS,
            tls=tls,
            allow_plain=allow_plain,
        )

    def close(self) -> None:
        super().close()
        with self._lock:
            jobs, self._jobs = list(self._jobs.values()), {}
        for job in jobs:
            job.close()

    def _tell_object(self, ask: ProvenAsk) -> None:
        part: list[memoryview] = []
        try:
            asked = proven_link.unpack_map(ask.header)
            answer = self._answer_to(asked, part)
        except LinkRefused as refusal:
            answer = {"refused": refusal.reason, "detail": refusal.detail[:500]}
        ask.reply(answer)
        for data in part:
            ask.stream.send(data)

    def _answer_to(self, asked: Mapping[str, Any], part: list[memoryview]) -> dict[str, Any]:
        if asked.get("protocol") != PROTOCOL:
            raise LinkRefused("protocol", f"{asked.get('protocol')!r:.40} asked for, {PROTOCOL} is spoken here")
        what, key, ranges = asked.get("what"), asked.get("key"), asked.get("ranges")
        job = self._job_of(asked.get("endpoint"))
        if what == "look":
            return {"size": job.held_bytes, "pulled": job.pulled_bytes}
        if what not in ("size", "read") or not isinstance(key, str) or not job.keys.fullmatch(key):
            raise LinkRefused("malformed", f"{what!r:.40} of {key!r:.200}")
        data = job.wait_for(key, WAIT_SECONDS)
        if what == "size":
            return {"size": data.nbytes}
        part += _cut(data.data, ranges)
        return {"size": sum(item.nbytes for item in part)}

    def _job_of(self, told: Any) -> CachedJob:
        """The one that is asked for; those that nobody asks for any more are forgotten."""
        try:
            endpoint = RelayEndpoint.from_dict(told)
        except (ConfigError, TypeError, AttributeError) as error:
            raise LinkRefused("malformed", f"no relay endpoint: {error}") from error
        now, ended = time.monotonic(), list[CachedJob]()
        with self._lock:
            job = self._jobs.pop(endpoint, None)
            if job is None or not job.ask():
                job = CachedJob(endpoint)
            for other in list(self._jobs):
                if len(self._jobs) >= JOBS or now - self._jobs[other].asked > IDLE_SECONDS:
                    ended.append(self._jobs.pop(other))
            self._jobs[endpoint] = job
        for other_job in ended:
            other_job.close()
        return job


def _cut(data: memoryview, ranges: Any) -> list[memoryview]:
    if ranges is None:
        return [data]
    if not isinstance(ranges, list):
        raise LinkRefused("malformed", "ranges")
    found = []
    for item in ranges:
        if not (isinstance(item, list) and [type(number) for number in item] == [int, int]):
            raise LinkRefused("malformed", f"a range {item!r:.40}")
        start, length = item
        if start < 0 or length < 0 or start + length > data.nbytes:
            raise LinkRefused("malformed", f"{start} + {length} of {data.nbytes} B")
        found.append(data[start : start + length])
    return found


@dataclass(slots=True)
class _Followed:
    """An attempt whose buckets are fetched as they come. ``done``: those that are here, or were never written."""

    attempt: PublishAttempt
    published: bool
    done: set[int]

    def candidates(self) -> Iterator[int]:
        """Buckets that may be there, in order. Of an attempt under way each rank writes its own one after the other: as many as
        there are ranks may come next."""
        left = (number for number in range(self.attempt.buckets) if number not in self.done)
        window = self.attempt.buckets if self.published else max(1, self.attempt.buckets // RESERVE_BUCKETS)
        yield from (number for _, number in zip(range(window), left, strict=False))


class CachedJob:
    """What a site has of one job. One thread asks relay and metadata store, others transfer; any may call the methods."""

    def __init__(self, endpoint: RelayEndpoint) -> None:
        self.asked = time.monotonic()
        self.held_bytes = 0
        self.pulled_bytes = 0  # over the slow link, since the start
        self.keys = re.compile(_KEY.format(job=re.escape(endpoint.job)))  # of its objects, and of nothing else
        self._endpoint = endpoint
        self._objects: dict[str, Bytes] = {}
        self._wanted: dict[str, Future[Bytes | None]] = {}  # keys that somebody waits for, in order
        self._coming: set[str] = set()  # keys that are on their way
        self._failure: Exception | None = None  # of one that nobody waited for
        self._followed: list[_Followed] = []
        self._news = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="site cache", daemon=True)
        self._thread.start()

    def ask(self) -> bool:
        """Somebody does. False: it has ended."""
        with self._news:
            self.asked = time.monotonic()
            return not self._closed

    def wait_for(self, key: str, limit: float) -> Bytes:
        """The object. Raises LinkRefused: it is coming, is missing, or the relay failed."""
        with self._news:
            if (data := self._objects.get(key)) is not None:
                return data
            if self._closed:
                raise LinkRefused("closed", "this cache ends")
            coming = self._wanted.setdefault(key, Future())
            self._news.notify_all()
        try:
            found = coming.result(limit)
        except TimeoutError as error:
            raise LinkRefused(COMING) from error
        except Exception as error:
            raise LinkRefused("relay", str(error) or type(error).__name__) from error
        if found is None:
            raise LinkRefused(MISSING, key)
        return found

    def close(self) -> None:
        """Idempotent. A transfer in flight ends first."""
        with self._news:
            self._closed = True
            self._news.notify_all()

    def _run(self) -> None:
        with ExitStack() as opened:
            store: tuple[MetadataStore, _Pull] | None = None
            look = 0.0
            while not self._closed:
                try:
                    if store is None:
                        store = self._open(opened)
                    failure, self._failure = self._failure, None
                    if failure is not None:
                        raise failure
                    busy = len(self._coming) >= PULLS
                    if not busy and self._pull_wanted(store[1]):
                        continue
                    if time.monotonic() >= look:
                        self._follow(store[0])
                        look = time.monotonic() + LOOK_SECONDS
                    if not busy and self._pull_followed(store[1]):
                        continue
                except Exception as error:  # noqa: BLE001  whatever a store raises: without this thread all would wait for ever
                    self._refuse_wanted(error)
                    _logger.warning("job %s: %s", self._endpoint.job, error)
                    look = time.monotonic() + AWAY_SECONDS
                with self._news:
                    self._closed = self._closed or time.monotonic() - self.asked > IDLE_SECONDS
                    if not self._closed and (len(self._coming) >= PULLS or not self._wanted.keys() - self._coming):
                        self._news.wait(max(look - time.monotonic(), 1e-3))
            self._objects.clear()
            self.held_bytes = 0
            self._refuse_wanted(RelayError("closed", "this cache ends"))

    def _open(self, opened: ExitStack) -> tuple[MetadataStore, _Pull]:
        """All of it, or nothing stays open: it may be tried for days."""
        with ExitStack() as partly:
            metadata = partly.enter_context(closing(open_metadata(self._endpoint)))
            relay = partly.enter_context(closing(open_relay(self._endpoint)))
            pool = partly.enter_context(closing(BufferPool(relay)))
            pull = partly.enter_context(closing(_Pull(relay, pool)))
            opened.enter_context(partly.pop_all())
            return metadata, pull

    def _pull_wanted(self, pull: _Pull) -> bool:
        """Begin with an object that somebody waits for. False: all are on their way."""
        with self._news:
            key = next((key for key in self._wanted if key not in self._coming), "")
        if not key:
            return False
        try:
            if not self._begin(pull, key):
                self._keep(key, None)
        except Exception as error:  # noqa: BLE001  who waits is told
            self._refuse(key, error)
        return True

    def _pull_followed(self, pull: _Pull) -> bool:
        """Begin with a bucket that nobody has asked for yet. False: there is none."""
        for followed in self._followed:
            for number in followed.candidates():
                key = followed.attempt.key(self._endpoint.job, number)
                with self._news:
                    known = key in self._objects or key in self._coming
                if not known:
                    try:
                        begun = self._begin(pull, key)
                    except RelayError:
                        followed.done.add(number)  # who needs it asks
                        raise
                    if not begun and not followed.published:
                        continue
                followed.done.add(number)
                return True
        return False

    def _begin(self, pull: _Pull, key: str) -> bool:
        """Let it come. False: there is no such object."""
        with self._news:
            self._coming.add(key)

        def arrived(coming: Future[Bytes]) -> None:
            if (error := coming.exception()) is None:
                self._keep(key, coming.result())
            elif not self._refuse(key, error):
                self._failure = error if isinstance(error, Exception) else RelayError("transfer", repr(error))

        try:
            coming = pull.begin(key)
        except Exception:
            with self._news:
                self._coming.discard(key)
            raise
        if coming is None:
            with self._news:
                self._coming.discard(key)
            return False
        coming.add_done_callback(arrived)
        return True

    def _keep(self, key: str, data: Bytes | None) -> None:
        """What came; None: there is no such object."""
        with self._news:
            if data is not None:
                self._objects[key] = data
                self.held_bytes += data.nbytes
                self.pulled_bytes += data.nbytes
            self._coming.discard(key)
            if (waiting := self._wanted.pop(key, None)) is not None:
                waiting.set_result(data)
            self._news.notify_all()

    def _refuse(self, key: str, error: BaseException) -> bool:
        """It does not come. False: nobody waited for it."""
        with self._news:
            self._coming.discard(key)
            waiting = self._wanted.pop(key, None)
            if waiting is not None:
                waiting.set_exception(error)
            self._news.notify_all()
        return waiting is not None

    def _refuse_wanted(self, error: Exception) -> None:
        with self._news:
            for waiting in self._wanted.values():
                waiting.set_exception(error)
            self._wanted.clear()

    def _follow(self, metadata: MetadataStore) -> None:
        """Look at the head: what there is to fetch, and what is not there any more."""
        present = metadata.get(head_key(self._endpoint.job))
        head = JobHead() if present is None else decode_head(present[0])
        alive = {_folder(item, self._endpoint.job) for item in _attempts(head)}
        with self._news:
            for key in [key for key in self._objects if key.rpartition("/")[0] not in alive]:
                self.held_bytes -= self._objects.pop(key).nbytes
        before = {(item.attempt.version, item.attempt.number, item.attempt.base): item for item in self._followed}
        self._followed = []
        for attempt, published in _ahead(head):
            known = before.get((attempt.version, attempt.number, attempt.base))
            done = known.done if known is not None and known.attempt.epoch == attempt.epoch else set()
            self._followed.append(_Followed(attempt, published, done))


class _Pull:
    """Fetches from the relay, into memory of its pool, ``PULLS`` objects at a time."""

    def __init__(self, relay: Relay, pool: BufferPool) -> None:
        self._relay, self._pool = relay, pool
        self._threads = ThreadPoolExecutor(PULLS, "site cache pull")

    def begin(self, key: str) -> Future[Bytes] | None:
        """The object, which comes; None when there is none. Raises RelayError, and the future does: for a bucket that does not
        arrive whole, too."""
        size = self._relay.size(key)
        if size < 0:
            return None
        return self._threads.submit(self._transfer, key, self._pool.acquire(size)[:size])

    def close(self) -> None:
        """What is on its way arrives first."""
        self._threads.shutdown()

    def _transfer(self, key: str, buffer: Bytes) -> Bytes:
        read = self._relay.get_into(key, buffer.data)
        if read != buffer.size or not (key.rpartition("/")[2].startswith(MANIFEST) or is_whole(buffer)):
            raise RelayError("transfer", f"{key} did not arrive whole")
        return buffer


def _attempts(head: JobHead) -> list[PublishAttempt]:
    """Whose objects the relay has."""
    return [*(item.attempt for item in head.published), *head.pending]


def _folder(attempt: PublishAttempt, job: str) -> str:
    return attempt.manifest_key(job).rpartition("/")[0]


def _ahead(head: JobHead) -> list[tuple[PublishAttempt, bool]]:
    """What to fetch before anybody asks, with whether it is published: the newest version, and the one that is being written. A
    snapshot beside a difference is for those who come late."""
    published = [(item.attempt, True) for item in head.published if item.attempt.version == head.version]
    found = published + [(item, False) for item in head.pending if item.version >= head.version]
    differences = {attempt.version for attempt, _ in found if attempt.base != FULL}
    return [(item, done) for item, done in found if item.base != FULL or item.version not in differences]
