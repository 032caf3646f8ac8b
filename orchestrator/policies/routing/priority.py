"""Progressive priority with preemption, without starvation (Heddle 4.2, Algorithm 1).

The lower priority number goes first, ties by arrival, as in vLLM. Guarantees:

* A waiting request that strictly outranks the lowest-ranked running one takes its slot. It also preempts for KV blocks, but
  only if preempting lower-ranked requests frees enough: nothing is preempted in vain.
* With equal priorities (and nothing overdue) it never decides anything: the engine's own order stands.
* Nothing starves, but behind a ``floor`` (below). A request that waited ``max_wait`` seconds and was overtaken (a later arrival,
  waiting or running, has a strictly better priority) is *overdue*: it goes before all that are not overdue, overdue ones by
  arrival; it can also take the place of a running one that overtook it; and it is not preempted before it has generated
  ``quantum`` tokens. Then its own priority counts again, and its wait starts at zero. So each ``max_wait`` of waiting buys
  ``quantum`` tokens, whatever keeps arriving, and every request of finite length finishes.
* A request with a ``floor`` is overdue only among those of that number or a worse one: however long it waited, it neither goes
  before a better one nor takes its place, and a better one takes its place within its quantum too. So rollouts do not hold up
  users of a server that is lent.

Beyond Heddle: the paper ignores KV blocks and does not bound the wait. One object serves the engine and the simulator: inputs
are plain records, times are arguments, nothing is kept between calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

NO_FLOOR = -(2**63)  # the best number of all
Arrival = tuple[float, str]  # time of arrival in any unit, and the request id, which breaks ties


class WaitingRequest(NamedTuple):
    """A request that could start now. ``priority``: its own, even if it is overdue; ``tokens``: what it has to compute."""

    priority: int
    arrival: Arrival
    tokens: int = 1
    overdue: bool = False
    floor: int = NO_FLOOR


class RunningRequest(NamedTuple):
    """A running request. ``tokens``: how many it computes in this step; ``protected``: overdue and within its quantum."""

    priority: int
    arrival: Arrival
    tokens: int = 1
    protected: bool = False
    floor: int = NO_FLOOR


class QueueWait(NamedTuple):
    """Seconds since a waiting request last got a quantum, and its own priority."""

    seconds: float
    priority: int
    arrival: Arrival
    floor: int = NO_FLOOR


class Takeover(NamedTuple):
    """``victims`` (positions in the running sequence) are preempted so that ``waiting`` (also a position) can start."""

    waiting: int
    victims: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ProgressivePriority:
    """See the module. ``max_wait`` in seconds; ``quantum`` in generated tokens.

    Each time that one goes first another loses its place, and where KV is what engines lack, the KV of its whole context. So
    ``max_wait`` is of the order of a turn of a large model: with 30 s an engine with twice the requests that it has KV for spent
    most of its time on computing contexts anew (``tests/policies/test_priority.py``)."""

    max_wait: float = 300.0
    quantum: int = 64

    def may_decide(self, best_waiting: int, running: Iterable[int]) -> bool:
        """Quick check from priorities alone: False if no waiting request outranks a running one.

        ``best_waiting``: the best priority among waiting requests (overdue ones rank above any).
        """
        return best_waiting < max(running, default=best_waiting)

    def takeovers(
        self,
        waiting: Iterable[WaitingRequest],
        running: Sequence[RunningRequest],
        *,
        slots: int,
        tokens: int,
        blocks: int = 0,
        need: Callable[[int], int] = lambda waiting: 0,
        gain: Callable[[int, int], int] = lambda waiting, victim: 0,
    ) -> list[Takeover]:
        """Which requests are preempted for which in this step.

        ``waiting``: in the order in which the engine starts them, read only as far as needed; ``slots`` and ``blocks``: free
        ones; ``tokens``: how many the engine can still compute in this step, since a request that could not start preempts
        nothing. ``need(w)``: KV blocks that a waiting request needs free. ``gain(w, r)``: blocks that become free for ``w``
        when ``r`` is preempted after those asked about before (blocks may be shared); called only when blocks are short.
        """
        order: list[int] | None = None  # of the running ones, lowest rank first
        gone: set[int] = set()
        found: list[Takeover] = []
        for index, candidate in enumerate(waiting):
            wanted = need(index)
            victims: list[int] = []
            if slots < 1 or blocks < wanted:
                if order is None:
                    order = sorted(range(len(running)), key=lambda i: running[i][:2], reverse=True)
                for position in order:
                    if slots >= 1 and blocks >= wanted:
                        break
                    if position not in gone and _may_preempt(candidate, running[position]):
                        victims.append(position)
                        slots += 1
                        blocks += gain(index, position) if wanted else 0
                        tokens += running[position].tokens
            if slots < 1 or blocks < wanted or tokens < 1:
                break  # it cannot start in this step whoever goes, and those behind it start after it
            if victims:
                gone.update(victims)
                found.append(Takeover(index, tuple(victims)))
            slots, blocks, tokens = slots - 1, blocks - wanted, tokens - candidate.tokens
        return found

    def overdue(self, waiting: Sequence[QueueWait], running: Iterable[tuple[int, Arrival]]) -> list[int]:
        """Positions of overdue requests, in order of arrival. ``running``: (own priority, arrival) of each."""
        late = [index for index, request in enumerate(waiting) if request.seconds >= self.max_wait]
        if not late:
            return []
        everybody = [(request.arrival, request.priority) for request in waiting]
        everybody += [(arrival, priority) for priority, arrival in running]
        if len({priority for _, priority in everybody}) == 1:
            return []  # nobody can have overtaken anybody
        everybody.sort(reverse=True)
        overtaken: list[int] = []
        for floor in sorted({waiting[index].floor for index in late}):
            best_later: dict[Arrival, int] = {}  # arrival -> best priority of it and those that arrived after it
            best: int | None = None
            for arrival, priority in everybody:
                if priority >= floor:
                    best_later[arrival] = best = priority if best is None else min(best, priority)
            those = [waiting[index] for index in late if waiting[index].floor == floor]
            found = {wait.arrival for wait in those if best_later.get(wait.arrival, wait.priority) < wait.priority}
            overtaken += [index for index in late if waiting[index].floor == floor and waiting[index].arrival in found]
        return sorted(overtaken, key=lambda index: waiting[index].arrival)

    def quantum_is_over(self, generated: int) -> bool:
        """Whether so many tokens since its start are a quantum: from then on its own rank and a new wait count."""
        return generated >= self.quantum


def _may_preempt(waiting: WaitingRequest, running: RunningRequest) -> bool:
    if running.protected and waiting.priority >= running.floor:
        return False
    if waiting.priority < running.priority:
        return True
    overtook = waiting.floor <= running.priority < waiting.priority and running.arrival > waiting.arrival
    return waiting.overdue and overtook
