"""How serving was on the devices that a run shares with it, as events: what the live page shows, kept.

Guarantees: one event ``serving`` a worker and window; windows are of at least ``EVERY`` seconds and of a 200th of the run's age,
so that a run of a day writes some thousand a worker. Nothing but the worker's name tells one from another. Its fields:

* ``worker``; ``until`` (seconds of the run) its last sample, ``seconds`` of the window, ``samples`` in it;
* ``serving``: share of the pool's pages that serving held, the mean, and ``serving_most``; ``pages``: the most that the worker
  held, ``budget``: the least that it might (both in pages; null shares: a server that does not say);
* ``ttft_slack``, ``tpot_slack``, ``arriving``: the least of the window, in seconds, as in :class:`orchestrator.api.SharedDevice`;
  null: there was none;
* ``tokens``: that serving made in the window; ``late`` of these, and ``blamed`` of the late ones on rollouts. A serving engine
  that was started anew counts from 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from orchestrator.api import SharedDevice
from orchestrator.events import EventLog

EVERY = 10.0  # seconds, at least
PARTS = 200  # of the run's age, one window at least
_SLACKS = ("ttft_slack", "tpot_slack", "arriving")


@dataclass(slots=True)
class _Window:
    begun: float
    before: SharedDevice  # the answer that it counts from
    until: float  # when the latest answer came
    rows: list[SharedDevice] = field(default_factory=list)


class Neighbours:
    """Of one run, which writes into ``events``."""

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self._open: dict[str, _Window] = {}

    def saw(self, worker: str, shared: SharedDevice | None) -> None:
        """What a worker answered. None: it has its device to itself, or is in no pool any more."""
        now = self._events.time()
        window = self._open.get(worker)
        if window is not None and (shared is None or now - window.until > EVERY):  # it was given back meanwhile
            self._close(worker)
            window = None
        if shared is None:
            return
        if window is None:
            window = self._open[worker] = _Window(now, shared, now)
        window.rows.append(shared)
        window.until = now
        if now - window.begun >= max(EVERY, now / PARTS):
            self._close(worker)
            self._open[worker] = _Window(now, shared, now)

    def end(self) -> None:
        """The run ends: write what is left."""
        for worker in list(self._open):
            self._close(worker)

    def _close(self, worker: str) -> None:
        window = self._open.pop(worker)
        if not (rows := window.rows):
            return
        counts = {name: _since(window.before, rows[-1], name) for name in _COUNTED}
        shares = [row.serving_pages / row.pool_pages for row in rows if row.pool_pages]
        least = {name: [value for row in rows if (value := getattr(row, name)) is not None] for name in _SLACKS}
        self._events.emit(
            "serving",
            worker=worker,
            until=round(window.until, 3),
            seconds=round(window.until - window.begun, 3),
            samples=len(rows),
            serving=round(sum(shares) / len(shares), 6) if shares else None,
            serving_most=round(max(shares), 6) if shares else None,
            pages=max(row.pages for row in rows),
            budget=min(row.budget for row in rows),
            **{name: round(min(values), 6) if values else None for name, values in least.items()},
            **counts,
        )


_COUNTED = {
    "tokens": ("firsts", "nexts"),
    "late": ("late_first", "late_next"),
    "blamed": ("blamed_first", "blamed_next"),
}


def _since(before: SharedDevice, last: SharedDevice, name: str) -> int:
    then, now = (sum(getattr(row, part) for part in _COUNTED[name]) for row in (before, last))
    anew = last.firsts + last.nexts < before.firsts + before.nexts
    return int(now if anew else now - then)
