"""The book of requests that both carriers of the rollout worker keep (in-process and HTTP).

Guarantees: an id that was added once is never added again; a request is found by id, trajectory or group until it is
finished; at most ``lookahead`` requests wait inside the engine, the best-ranked ones, so that a thousand ADDs cost the
running requests nothing: the others are *held* here, in the engine's own order (priority, then arrival), and cost a few
microseconds each. A held request that outranks what waits in the engine is fed at once, and one that was held for too long
is fed whatever its rank, so that better ones that keep coming cannot starve it.

Pure bookkeeping: no engine, no clock, no I/O.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from orchestrator.api import GenerationRequest

REMEMBERED_IDS = 1 << 16  # how many past request ids a repeated ADD is recognised by
_OUTDATED_ROWS = 64  # how many the heap may hold before they are cleared out


@dataclass(slots=True)
class UnfinishedRequest:
    """An unfinished request. ``fed``: the engine has it, else it is held here."""

    request: GenerationRequest
    added_at: float  # of the worker's clock; no two alike, in order of arrival
    order: int  # of arrival
    fed: bool = False
    overdue: bool = False  # it was fed because it had been held for so long


class RequestBook:
    """See the module. ``lookahead``: how many requests may wait inside the engine (beyond those that run)."""

    def __init__(self, lookahead: int) -> None:
        self._lookahead = lookahead
        self._entries: dict[str, UnfinishedRequest] = {}
        # Insertion-ordered sets. Not plain dicts: to find the first key of one whose first ones were deleted takes as long as
        # there were such since it grew last.
        self._seen: OrderedDict[str, None] = OrderedDict()  # request ids
        self._trajectories: dict[str, dict[str, None]] = {}
        self._groups: dict[str, dict[str, None]] = {}
        self._held: list[tuple[int, int, str]] = []  # heap of (priority, order, id); outdated rows are skipped
        self._unfed: OrderedDict[str, None] = OrderedDict()  # those that are held
        self._overdue = 0  # unfinished requests that were fed for their age
        self._inside: dict[int, int] = {}  # priority -> unfinished requests of it that were fed
        self._arrivals = 0
        self.moves = 0  # grows whenever a request comes, or changes its rank
        self._last_added = -math.inf

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def held_count(self) -> int:
        """Requests that the engine does not have yet."""
        return len(self._unfed)

    def fed_ahead(self, priority: int) -> int:
        """How many of those that the engine has rank at least as one of this priority; asked whenever a request ends."""
        return sum(count for other, count in self._inside.items() if other <= priority)

    def add(self, requests: Sequence[GenerationRequest], now: float) -> int:
        """Take those that were never seen; returns how many."""
        fresh = 0
        for request in requests:
            if request.request_id in self._seen:
                continue
            fresh += 1
            self._seen[request.request_id] = None
            self._last_added = max(now, math.nextafter(self._last_added, math.inf))
            entry = UnfinishedRequest(request, self._last_added, self._arrivals)
            self._arrivals += 1
            self._entries[request.request_id] = entry
            self._index(self._trajectories, request.trajectory_id, request.request_id)
            if request.group_id:
                self._index(self._groups, request.group_id, request.request_id)
            heapq.heappush(self._held, (request.priority, entry.order, request.request_id))
            self._unfed[request.request_id] = None
        self.moves += fresh
        while len(self._seen) > max(REMEMBERED_IDS, 2 * len(self._entries)):
            oldest = next(iter(self._seen))
            if oldest in self._entries:
                break  # an unfinished one is never forgotten
            del self._seen[oldest]
        return fresh

    @property
    def best_held(self) -> int | None:
        """The priority number of the best-ranked request that is held; None: nothing is."""
        head = self._head()
        return None if head is None else head.request.priority

    def next_to_feed(
        self, engine_waiting: int, free_slots: int, worst_waiting: int | None, overdue: float | None = None
    ) -> list[UnfinishedRequest]:
        """Take out, best first, what the engine should get now; at most ``lookahead + free_slots`` a call.

        ``engine_waiting``: how many wait inside it, ``free_slots``: how many more could run, ``worst_waiting``: the
        priority number of the worst-ranked one that waits inside (None: nobody waits). Who can see into the engine's
        queue counts in ``engine_waiting`` only those that rank at least as :attr:`best_held` does, and gives None for the
        worst: then no more of those that outrank it are fed than can run soon.

        ``overdue``: requests that were added before this time go first and by age, whatever their rank, but no more than
        ``lookahead`` of them are inside at once (and these come on top). Give it, or worse ones can starve.
        """
        most = self._lookahead + free_slots
        room = most - engine_waiting
        fed: list[UnfinishedRequest] = []
        aged: list[UnfinishedRequest] = []
        if overdue is not None:
            for request_id in itertools.islice(self._unfed, max(0, self._lookahead - self._overdue)):
                if self._entries[request_id].added_at >= overdue:
                    break
                aged.append(self._entries[request_id])
            for late in aged:
                late.overdue = True
                self._overdue += 1
                self._mark_fed(late)
        while (entry := self._head()) is not None:
            outranks = worst_waiting is not None and entry.request.priority < worst_waiting
            if len(fed) >= (most if outranks else room):
                break
            heapq.heappop(self._held)
            self._mark_fed(entry)
            fed.append(entry)
        return aged + fed

    def prioritize(self, priorities: Mapping[str, int]) -> dict[str, int]:
        """New priorities by trajectory id; returns those of the requests that the engine has, by request id."""
        fed: dict[str, int] = {}
        self.moves += 1
        for trajectory_id, priority in priorities.items():
            for request_id in self._trajectories.get(trajectory_id, ()):
                entry = self._entries[request_id]
                changed = entry.request.priority != priority
                if entry.fed:
                    self._count(entry, -1)
                entry.request = replace(entry.request, priority=priority)
                if entry.fed:
                    self._count(entry, 1)
                    fed[request_id] = priority
                elif changed:
                    heapq.heappush(self._held, (priority, entry.order, request_id))
        if len(self._held) > 2 * len(self._unfed) + _OUTDATED_ROWS:
            entries = [self._entries[request_id] for request_id in self._unfed]
            self._held = [(entry.request.priority, entry.order, entry.request.request_id) for entry in entries]
            heapq.heapify(self._held)
        return fed

    def select(
        self, request_ids: Iterable[str] = (), trajectories: Iterable[str] = (), groups: Iterable[str] = ()
    ) -> list[str]:
        """The unfinished requests that are meant, once each, in order of naming."""
        found: dict[str, None] = {name: None for name in request_ids if name in self._entries}
        for trajectory_id in trajectories:
            found.update(self._trajectories.get(trajectory_id, {}))
        for group_id in groups:
            found.update(self._groups.get(group_id, {}))
        return list(found)

    def was_added(self, request_id: str) -> bool:
        """Whether it was ever added (as far as remembered)."""
        return request_id in self._seen

    def get(self, request_id: str) -> UnfinishedRequest | None:
        """An unfinished request."""
        return self._entries.get(request_id)

    def finish(self, request_id: str) -> UnfinishedRequest | None:
        """Strike it out; None when it is not unfinished."""
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return None
        self._unfed.pop(request_id, None)
        if entry.fed:
            self._count(entry, -1)
        self._overdue -= entry.overdue
        self._drop(self._trajectories, entry.request.trajectory_id, request_id)
        if entry.request.group_id:
            self._drop(self._groups, entry.request.group_id, request_id)
        return entry

    def oldest(self) -> float | None:
        """When the first of the held requests was added; None: nothing is held."""
        first = next(iter(self._unfed), None)
        return None if first is None else self._entries[first].added_at

    def _mark_fed(self, entry: UnfinishedRequest) -> None:
        entry.fed = True
        self._count(entry, 1)
        del self._unfed[entry.request.request_id]

    def _count(self, entry: UnfinishedRequest, change: int) -> None:
        priority = entry.request.priority
        if left := self._inside.get(priority, 0) + change:
            self._inside[priority] = left
        else:
            del self._inside[priority]

    def _head(self) -> UnfinishedRequest | None:
        """The best of those held. Rows of requests that were finished, fed or ranked anew meanwhile are dropped."""
        while self._held:
            priority, order, request_id = self._held[0]
            entry = self._entries.get(request_id)
            if entry is not None and not entry.fed and (entry.order, entry.request.priority) == (order, priority):
                return entry
            heapq.heappop(self._held)
        return None

    @staticmethod
    def _index(index: dict[str, dict[str, None]], key: str, request_id: str) -> None:
        index.setdefault(key, {})[request_id] = None

    @staticmethod
    def _drop(index: dict[str, dict[str, None]], key: str, request_id: str) -> None:
        members = index[key]
        del members[request_id]
        if not members:
            del index[key]
