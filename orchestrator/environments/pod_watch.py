"""What a Kubernetes cluster says of a run's pods, from one request that stays open.

Guarantees: the API server is asked once for all pods, however many start; whoever waits for a pod hears of each change; a request
that has run its time is made again from where it stood, one that breaks, or says what it should not, from a list, ``PAGE`` pods
at a time: no change is missed for longer than that takes, and no list of ten thousand pods is read in one go.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp

from orchestrator.api.jsontext import parse_object

OPEN_SECONDS = 300  # that one request stays open
MARGIN = 20.0  # seconds; one that is silent beyond that is given up
PAUSE = 1.0  # seconds before a broken one is made again
PAGE = 200  # pods of a list that are asked for at a time
LOST = (aiohttp.ClientError, OSError, TimeoutError, ValueError)


class PodWatch:
    """``list_pods(**options)``: the API's list of the run's pods, its answer unread; ``read_pod``: makes a pod of its JSON;
    ``refused``: what the client raises for an answer that is none. :meth:`run` in a task; ``close`` by cancelling that."""

    def __init__(
        self,
        list_pods: Callable[..., Awaitable[Any]],
        read_pod: Callable[[Any], Any],
        refused: Any,
    ) -> None:
        self._list_pods, self._read_pod, self._refused = list_pods, read_pod, refused
        self._pods: dict[str, Any] = {}
        self._changed: dict[str, asyncio.Event] = {}
        self._gone: dict[str, None] = {}  # of those that somebody waits for
        self._open: Any = None  # a request that was made and is not followed yet
        self._version = ""  # how far what is known goes; "": a list is needed

    async def begin(self) -> None:
        """Make the first requests, so that a refusal is known at once. Raises what the client raises."""
        self._open = await self._watch()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                answer, self._open = self._open, None
                await self._follow(answer or await self._watch())
            except (self._refused, *LOST):  # the next one may work
                self._version = ""
                await asyncio.sleep(PAUSE)

    def expect(self, name: str) -> None:
        """A pod is about to be made."""
        self._changed[name] = asyncio.Event()

    def forget(self, name: str) -> None:
        """Nobody waits for it any more. Idempotent."""
        self._changed.pop(name, None)
        self._gone.pop(name, None)
        self._pods.pop(name, None)

    def pod(self, name: str) -> Any:
        """What was said of it last; None: nothing yet. Raises LookupError when it was there and is not any more."""
        if name in self._gone:
            raise LookupError(f"pod {name} was deleted")
        return self._pods.get(name)

    async def change(self, name: str) -> None:
        """Until something more is said of a pod that is expected."""
        await self._changed[name].wait()
        self._changed[name].clear()

    async def _watch(self) -> Any:
        self._version = self._version or await self._list()
        return await self._request(watch=True, resource_version=self._version, allow_watch_bookmarks=True)

    async def _list(self) -> str:
        """Take every pod as it is; returns the version to go on from."""
        here: set[str] = set()
        page: dict[str, Any] = {"limit": PAGE}
        while True:
            answer = await self._request(**page)
            try:
                text = await answer.read()
            finally:
                answer.close()
            with _of_their_form():
                found = parse_object(text)
                for item in found["items"]:
                    here.add(item["metadata"]["name"])
                    self._take(item["metadata"]["name"], item)
                version, rest = found["metadata"].get("resourceVersion", ""), found["metadata"].get("continue")
            if not rest:
                break
            page = {"limit": PAGE, "_continue": rest}
        for name in [name for name in self._pods if name not in here]:
            self._take(name, None)
        return str(version)

    async def _request(self, *, watch: bool = False, **options: Any) -> Any:
        if watch:
            options |= {"watch": True, "timeout_seconds": OPEN_SECONDS}
        answer = await self._list_pods(**options, _request_timeout=OPEN_SECONDS + MARGIN if watch else MARGIN)
        if answer.status != 200:
            answer.close()
            raise self._refused(status=answer.status, reason=answer.reason)
        return answer

    async def _follow(self, answer: Any) -> None:
        """Take what changes, until the server ends the request."""
        try:
            while line := await answer.content.readline():
                with _of_their_form():
                    self._hear(parse_object(line))
        finally:
            answer.close()

    def _hear(self, event: dict[str, Any]) -> None:
        if event.get("type") == "ERROR":  # the version is too old, say
            raise ValueError(f"a watch that failed: {event.get('object')!r:.200}")
        self._version = event["object"]["metadata"].get("resourceVersion", "")
        if event.get("type") in ("ADDED", "MODIFIED", "DELETED"):
            item = event["object"]
            self._take(item["metadata"]["name"], None if event["type"] == "DELETED" else item)

    def _take(self, name: str, item: Any) -> None:
        waited = self._changed.get(name)
        if item is None:
            self._pods.pop(name, None)
            if waited is not None:
                self._gone[name] = None
        elif waited is not None:  # of those that run nobody asks
            self._pods[name] = self._read_pod(item)
        if waited is not None:
            waited.set()


@contextmanager
def _of_their_form() -> Iterator[None]:
    """What is said in another form than the API's is a ValueError."""
    try:
        yield
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"an answer of another form: {error!r:.200}") from error
