"""Turn routing: which worker generates the next turn of a trajectory, and which turns wait (ROSE 4.3, RollArt 5.2).

A turn goes, in this order: to the worker of the trajectory's previous turn, which holds its prefix (unless that is
``imbalance`` requests busier than the least busy one of its pool); to the least busy dedicated worker of the hardware class
that its task asks for, then of the other classes (if it asks for none: of all at once); to the least busy borrowed one, in the
same order of classes; into the queue. The baselines only differ in the choice within a pool, and ignore prefixes.

That is ROSE's spread, "dedicated-first". With "least-utilized", dedicated and borrowed workers are one pool, and "least busy"
is the worker with the smallest used share of its cap (ties: the first, and a run's own workers come first): a cap says what a
worker can take, for a borrowed one its current budget.

A free slot goes to the oldest waiting turn whose prefix that worker holds, else to the oldest that may use it: first come,
first served alone would scatter the turns of a full fleet over all workers and recompute nearly every prefix. A turn that was
overtaken twice as often as there were turns before it is served next, regardless of prefixes.

Guarantees: no worker gets more than its cap, or anything while it is closed; nothing starves while slots become free; a turn
taken back from a worker keeps its place; ties are broken by worker position, so that runs are reproducible. A decision costs
the same with ten trajectories in flight and with ten thousand: the free workers of a pool are one bit mask per load level, and
only the oldest waiting turns are examined.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

from orchestrator.api.errors import ConfigError, RunError

ANY = "any"  # the class of a worker of which nothing was said
DEDICATED_FIRST, LEAST_UTILIZED = "dedicated-first", "least-utilized"
SPREADS = (DEDICATED_FIRST, LEAST_UTILIZED)
FULL = 1024  # level of a worker that has as many requests as its cap, where load is relative
CACHE_AFFINE, LEAST_LOADED, ROUND_ROBIN = "cache-affine", "least-loaded", "round-robin"
RULES = (CACHE_AFFINE, LEAST_LOADED, ROUND_ROBIN)
PREFILL, DECODE = "pd:prefill", "pd:decode"  # as tasks: the two parts of a turn (orchestrator.proxy.prefill_decode)
DEFAULT_TASK = "default"  # names the class for tasks without one of their own (RollArt, Listing 1)


@dataclass(frozen=True, slots=True)
class Seat:
    """A worker as the router sees it. ``cap``: requests that it may have at a time, 0: no limit. ``borrowed``: with spread
    "dedicated-first" it is used only when no dedicated worker has room, if these have caps; with the other spread it is like
    any worker."""

    hardware: str = ANY
    cap: int = 0
    borrowed: bool = False


def lowest_bit(mask: int) -> int:
    """The lowest set bit of a nonzero mask."""
    return (mask & -mask).bit_length() - 1


@dataclass(slots=True)
class SeatPool:
    """The open workers with room of one class and tier, by *level*, a small integer: the number of requests of a worker, or,
    if load is relative to capacity, how many of ``FULL`` parts of its cap are used, rounded down. Two bit masks find the least
    loaded worker, whatever the number of workers."""

    levels: list[int] = field(default_factory=lambda: [0])  # level -> workers, as a bit mask
    loads: int = 0  # the levels that some worker has, as a bit mask
    free: int = 0  # all workers in it, as a bit mask
    last: int = -1  # whose turn it was (round robin)

    def add(self, worker: int, level: int) -> None:
        """It is open and has room, at this level."""
        while len(self.levels) <= level:
            self.levels.append(0)
        self.levels[level] |= 1 << worker
        self.loads |= 1 << level
        self.free |= 1 << worker

    def drop(self, worker: int, level: int) -> None:
        """Remove a worker that was added at this level."""
        self.levels[level] &= ~(1 << worker)
        if not self.levels[level]:
            self.loads &= ~(1 << level)
        self.free &= ~(1 << worker)

    def least_loaded(self) -> int:
        """The least loaded worker. The pool must not be empty."""
        return lowest_bit(self.levels[lowest_bit(self.loads)])

    def next_in_turn(self) -> int:
        """The next worker, round robin. The pool must not be empty."""
        after = self.free >> (self.last + 1) << (self.last + 1)
        self.last = lowest_bit(after or self.free)
        return self.last


@dataclass(slots=True)
class _Line:
    """The turns that may use the same pools, in order of preference; oldest first."""

    pools: tuple[SeatPool, ...]
    classes: frozenset[str]
    anywhere: int = 0  # its task asks for no class: so many pools of a tier are one, the least busy worker gets it
    waiting: list[tuple[int, str]] = field(default_factory=list)  # a heap of (number, request)

    def room(self) -> bool:
        return any(pool.free for pool in self.pools)


@dataclass(slots=True)
class _Turn:
    number: int  # order of asking
    trajectory: str
    task: str
    line: _Line
    due: int  # from this many grants on it is overtaken no more
    worker: int = -1  # -1: it waits
    prefix: int = -1  # the other worker that holds its prefix, when it was granted one


class TurnRouter:
    """One object per fleet: :meth:`queue_turn` for each turn, then :meth:`grant_turn` until it returns None, :meth:`end_turn`
    when it is done.

    ``affinity``: task -> hardware class, with "default" for the others. ``fallback``: whether a turn may go to another class
    while its own has no room. ``skew``: replaces ``imbalance``: above this ratio of the most to the least loaded worker of a
    pool, turns go to the least busy one (SGLang's router, in Heddle 7). A class that no seat has is a ConfigError.
    ``patience``: how many grants to others a waiting turn may see, beyond twice the number of turns that waited when it was
    queued, before its age outweighs prefixes. ``phases``: classes for the parts of a turn (PREFILL, DECODE), which a part
    never leaves; a trajectory has a worker in each. ``spread``: LEAST_UTILIZED needs a cap for every seat.
    """

    def __init__(
        self,
        seats: Sequence[Seat],
        rule: str = CACHE_AFFINE,
        *,
        imbalance: int = 16,
        skew: float = 0.0,
        affinity: Mapping[str, str] | None = None,
        fallback: bool = True,
        patience: int = 64,
        phases: Mapping[str, str] | None = None,
        spread: str = DEDICATED_FIRST,
    ) -> None:
        for key, value, known in (("policy", rule, RULES), ("spread", spread, SPREADS)):
            if value not in known:
                raise ConfigError(f"rollout.routing.{key}", value, f"must be one of {', '.join(known)}")
        self._relative = spread == LEAST_UTILIZED
        for seat in seats:
            self._can_take(seat)
        self._seats = list(seats)
        self._rule = rule
        self._imbalance = imbalance
        self._skew = skew
        self._affinity = dict(affinity or {})
        self._phases = dict(phases or {})
        self._affinity |= self._phases
        self._fallback = fallback
        self._patience = patience
        self._load = [0] * len(seats)
        self._open = [False] * len(seats)
        self._keeps = [False] * len(seats)  # closed, but for the trajectories whose prefix it holds
        self._retired = [False] * len(seats)
        self._lives = [0] * len(seats)  # counts the losses of what a worker has cached
        self._holder: dict[str, tuple[int, int]] = {}  # trajectory -> (worker, its life)
        self._placed: dict[str, int] = {}  # trajectory -> worker that it was placed on
        self._turns: dict[str, _Turn] = {}
        self._heirs: list[list[tuple[int, str]]] = [[] for _ in seats]  # worker -> heap of turns whose prefix it holds
        self._numbers = 0
        self._grants = 0
        self.queued = 0  # turns that wait
        self._classes = list(dict.fromkeys(seat.hardware for seat in seats))
        self._left = frozenset(self._classes)  # those with a worker that may still come back
        self._tiered = not self._relative and any(seat.cap and not seat.borrowed for seat in seats)
        self._tiers = [self._tiered and seat.borrowed for seat in seats]
        self._pools = {(hardware, tier): SeatPool() for hardware in self._classes for tier in (False, True)}
        self._pool_of = [self._pools[seat.hardware, tier] for seat, tier in zip(seats, self._tiers, strict=True)]
        self.fleet = 0  # counts the workers that were retired, regained, joined or are of another class
        self._lines: dict[tuple[str, ...], _Line] = {}
        self._line_of: dict[str, _Line] = {}
        for task in self._affinity:
            self._line(task)

    # -- workers -----------------------------------------------------------------------------------------------------

    def open_worker(self, worker: int) -> None:
        """It may be given turns. Idempotent."""
        self._keeps[worker] = False
        if not self._open[worker]:
            self._open[worker] = True
            self._list(worker)

    def close_worker(self, worker: int, *, cache_lost: bool = False) -> None:
        """It gets no turns until it is opened again; those it has stay. ``cache_lost``: it no longer holds any prefix."""
        self._keeps[worker] = False
        if cache_lost:
            self._lives[worker] += 1
        if self._open[worker]:
            self._unlist(worker)
            self._open[worker] = False

    def keep_worker(self, worker: int) -> None:
        """It gets only turns of trajectories that it served last, and these (regardless of ``imbalance``) first. For a worker
        with older weights than others: no trajectory goes back to them. Under a baseline it gets nothing."""
        self.close_worker(worker)
        self._keeps[worker] = True

    def retire_worker(self, worker: int) -> list[str]:
        """It never comes back. Returns the waiting turns that no worker is left for; they have left the queue."""
        self.close_worker(worker, cache_lost=True)
        self._retired[worker] = True
        self.fleet += 1
        return self._strand()

    def readmit_worker(self, worker: int) -> None:
        """It was retired, but is started after all, as its devices are re-divided."""
        self._retired[worker] = False
        self.fleet += 1
        self._left |= {self._seats[worker].hardware}

    def reseat_worker(self, worker: int, hardware: str) -> list[str]:
        """It was closed, and comes back in this class. Returns the same as :meth:`retire_worker`, for the class that it left."""
        if hardware == self._seats[worker].hardware:
            return []
        self.close_worker(worker, cache_lost=True)
        self.fleet += 1
        self._seats[worker] = replace(self._seats[worker], hardware=hardware)
        self._know_class(hardware)
        self._pool_of[worker] = self._pools[hardware, self._tiers[worker]]
        return self._strand()

    def add_worker(self, seat: Seat) -> int:
        """One more worker; returns its position. It is closed until it is opened."""
        self._can_take(seat)
        worker = len(self._seats)
        self.fleet += 1
        self._seats.append(seat)
        for marks in (self._open, self._keeps, self._retired):
            marks.append(False)
        self._load.append(0)
        self._lives.append(0)
        self._heirs.append([])
        self._tiers.append(self._tiered and seat.borrowed)
        self._know_class(seat.hardware)
        self._left |= {seat.hardware}
        self._pool_of.append(self._pools[seat.hardware, self._tiers[worker]])
        return worker

    def _know_class(self, hardware: str) -> None:
        """There is a worker of this class, perhaps the first one."""
        if hardware in self._classes:
            return
        self._classes.append(hardware)
        self._pools.update({(hardware, tier): SeatPool() for tier in (False, True)})
        known, self._lines, self._line_of = list(self._line_of), {}, {}
        for task in known:
            self._line(task)
        for request, turn in self._turns.items():
            turn.line = self._line(turn.task)
            if turn.worker < 0:
                heappush(turn.line.waiting, (turn.number, request))

    def cap_of(self, worker: int) -> int:
        """Turns that it may have at a time, 0: no limit."""
        return self._seats[worker].cap

    def set_cap(self, worker: int, cap: int) -> None:
        """From now on it may have ``cap`` turns at a time (0: no limit); those it has stay."""
        if cap == self._seats[worker].cap:
            return
        seat = replace(self._seats[worker], cap=cap)
        self._can_take(seat)
        self._unlist(worker)
        self._seats[worker] = seat
        self._list(worker)

    def _can_take(self, seat: Seat) -> None:
        """Load relative to nothing is no load. Raises ConfigError."""
        if self._relative and not seat.cap:
            key = "served_cap" if seat.borrowed else "cap"
            fix = "spread = 'least-utilized' compares how much of each cap is used: set it to at least 1"
            raise ConfigError(f"rollout.routing.{key}", seat.cap, fix)

    def _strand(self) -> list[str]:
        """The waiting turns that no worker is left for leave the queue."""
        pairs = zip(self._seats, self._retired, strict=True)
        self._left = frozenset(seat.hardware for seat, gone in pairs if not gone)
        waiting = [(name, turn.line) for name, turn in self._turns.items() if turn.worker < 0]
        stranded = [name for name, line in waiting if line.classes.isdisjoint(self._left)]
        for name in stranded:
            self.end_turn(name)
        return stranded

    # -- turns -------------------------------------------------------------------------------------------------------

    def queue_turn(self, request: str, trajectory: str, task: str) -> None:
        """A turn needs a worker. Raises RunError if no worker will ever serve its task."""
        line = self._line(task)
        if line.classes.isdisjoint(self._left):
            raise self.no_worker_error(task)
        if request in self._turns:
            raise ValueError(f"request {request} was asked for twice")
        due = self._grants + 2 * self.queued + self._patience
        turn = self._turns[request] = _Turn(self._numbers, self._key(trajectory, task), task, line, due)
        self._numbers += 1
        self._enqueue_turn(request, turn)

    def grant_turn(self) -> tuple[str, int] | None:
        """Give a waiting turn its worker: (request, worker); None: no turn can go."""
        if not self.queued:
            return None
        chosen: _Line | None = None
        for line in self._lines.values():
            heap = line.waiting
            while heap and not self._waits(heap[0]):  # it left meanwhile
                heappop(heap)
            if heap and (chosen is None or heap[0] < chosen.waiting[0]) and line.room():
                chosen = line
        if chosen is None:
            return None
        request = chosen.waiting[0][1]
        worker = self._choose(self._turns[request])
        if (heir := self._heir(worker, self._turns[request])) is not None:
            request = heir
        turn = self._turns[request]
        turn.worker = worker  # its entries in the heaps are dropped when they come to the top
        self._grants += 1
        self.queued -= 1
        self._change_load(worker, 1)
        holder, life = self._holder.get(turn.trajectory, (-1, 0))
        turn.prefix = holder if holder not in (-1, worker) and life == self._lives[holder] else -1
        self._holder[turn.trajectory] = (worker, self._lives[worker])
        return request, worker

    def prefix_of(self, request: str) -> int:
        """The worker that had the prefix of this granted turn, if it is not the turn's own; -1: none."""
        turn = self._turns.get(request)
        return -1 if turn is None else turn.prefix

    def requeue_turn(self, request: str) -> None:
        """Its worker gave it up: it waits again, in its old place."""
        turn = self._turns[request]
        if turn.worker >= 0:
            self._change_load(turn.worker, -1)
            turn.worker = -1
            self._enqueue_turn(request, turn)

    def end_turn(self, request: str) -> None:
        """It ended, or is no longer wanted. Unknown ones are ignored."""
        turn = self._turns.pop(request, None)
        if turn is None:
            return
        if turn.worker >= 0:
            self._change_load(turn.worker, -1)
        else:
            self.queued -= 1

    def forget_trajectory(self, trajectory: str) -> None:
        """The trajectory ended: forget who holds its prefix."""
        self._placed.pop(trajectory, None)
        for task in ("", *self._phases):
            self._holder.pop(self._key(trajectory, task), None)

    def pin_trajectory(self, trajectory: str, worker: int) -> None:
        """From now on its turns go to this worker, overriding the rule, while it may serve them; -1: by the rule."""
        self._placed[trajectory] = worker

    def record_prefix_copy(self, trajectory: str, worker: int) -> None:
        """Between two turns its prefix was copied to this worker."""
        self._holder[trajectory] = (worker, self._lives[worker])

    def eligible_workers(self, task: str) -> list[int]:
        """The open workers over which trajectories of the task can be placed: of the class it asks for, or all; borrowed ones
        only if there are no others."""
        return self._meant(task, [worker for worker in range(len(self._seats)) if self._open[worker]])

    def worker_classes(self, task: str) -> frozenset[str]:
        """The classes of the workers that :meth:`eligible_workers` would return if all that may come back were open. Changes
        only with ``fleet``."""
        left = [worker for worker, gone in enumerate(self._retired) if not gone]
        return frozenset(self._seats[worker].hardware for worker in self._meant(task, left))

    def _meant(self, task: str, usable: list[int]) -> list[int]:
        first = self._affinity.get(task, self._affinity.get(DEFAULT_TASK, ""))
        meant = [worker for worker in usable if first in ("", self._seats[worker].hardware)]
        meant = meant or (usable if self._fallback else [])
        return [worker for worker in meant if not self._tiers[worker]] or meant

    def prefix_holder(self, trajectory: str, task: str) -> int:
        """The worker of the trajectory's last turn, in this phase if there are phases, if it still holds the prefix; -1: none."""
        worker, life = self._holder.get(self._key(trajectory, task), (-1, 0))
        return worker if worker >= 0 and life == self._lives[worker] else -1

    def has_phase(self, phase: str) -> bool:
        """Whether there is a worker of this phase's class."""
        wanted = self._phases.get(phase)
        return any(is_open and seat.hardware == wanted for seat, is_open in zip(self._seats, self._open, strict=True))

    def can_serve(self, task: str) -> bool:
        """Whether a worker for a task or phase is left, or may come back."""
        return not self._line(task).classes.isdisjoint(self._left)

    def _key(self, trajectory: str, task: str) -> str:
        """In each phase a trajectory has a worker of its own."""
        return f"{trajectory}\0{task}" if task in self._phases else trajectory

    # -- the choice --------------------------------------------------------------------------------------------------

    def _choose(self, turn: _Turn) -> int:
        placed = self._placed.get(turn.trajectory, -1)
        if (
            placed >= 0
            and self._pool_of[placed].free >> placed & 1
            and self._seats[placed].hardware in turn.line.classes
        ):
            return placed
        if self._rule == CACHE_AFFINE:
            worker, life = self._holder.get(turn.trajectory, (-1, 0))
            if worker >= 0 and life == self._lives[worker]:
                if self._keeps[worker] and not 0 < self._seats[worker].cap <= self._load[worker]:
                    return worker
                pool = self._pool_of[worker]
                allowed = pool.free >> worker & 1 and self._seats[worker].hardware in turn.line.classes
                if allowed and self._balanced(turn.line, pool, worker):
                    return worker
        pools = turn.line.pools
        pool = next(pool for pool in pools if pool.free)
        if turn.line.anywhere:
            ends = turn.line.anywhere
            tier = pools[:ends] if any(one.free for one in pools[:ends]) else pools[ends:]
            pool = min((one for one in tier if one.free), key=lambda one: one.loads & -one.loads)
        return pool.next_in_turn() if self._rule == ROUND_ROBIN else pool.least_loaded()

    def _balanced(self, line: _Line, pool: SeatPool, worker: int) -> bool:
        if self._relative:  # busier than it would be if it were as full as the emptiest that the turn may have
            others = line.pools[: line.anywhere] or (pool,)
            least = min(lowest_bit(one.loads) for one in others if one.free)
            return self._load[worker] <= least * self._seats[worker].cap / FULL + self._imbalance
        if self._skew:
            return pool.loads.bit_length() - 1 <= self._skew * max(1, lowest_bit(pool.loads))
        return self._load[worker] <= lowest_bit(pool.loads) + self._imbalance

    def _heir(self, worker: int, oldest: _Turn) -> str | None:
        """The oldest waiting turn whose prefix this worker holds, if it may go before the oldest of all."""
        scarce = self._seats[worker].cap and self.queued > 1 and self._grants < oldest.due
        if self._rule != CACHE_AFFINE or not scarce or self._holds(worker, oldest):
            return None
        return self._first_heir(worker)

    def _first_heir(self, worker: int) -> str | None:
        heap = self._heirs[worker]
        while heap:
            turn = self._turns.get(heap[0][1])
            if turn is not None and self._waits(heap[0]) and self._holds(worker, turn):
                return heap[0][1] if self._seats[worker].hardware in turn.line.classes else None
            heappop(heap)
        return None

    def _holds(self, worker: int, turn: _Turn) -> bool:
        return self._holder.get(turn.trajectory) == (worker, self._lives[worker])

    def _line(self, task: str) -> _Line:
        """The queue of a task. Raises ConfigError for a class that was asked for and that nobody has."""
        line = self._line_of.get(task)
        if line is not None:
            return line
        first = self._affinity.get(task, self._affinity.get(DEFAULT_TASK, ""))
        if first and first not in self._classes:
            have = ", ".join(self._classes) or "none"
            fix = f"no rollout worker is of that class (there are: {have}); name one of these, or add such a worker"
            raise ConfigError(f"rollout.routing.affinity.{task}", first, fix)
        usual = self._affinity.get(DEFAULT_TASK, "")
        free = not first or (self._fallback and task not in self._phases)
        others = [usual, *self._classes] if free else []
        order = tuple(dict.fromkeys(name for name in (first, *others) if name))
        key = order if first else ("", *order)
        line = self._lines.get(key)
        if line is None:
            pools = tuple(self._pools[name, tier] for tier in (False, True) for name in order)
            line = self._lines[key] = _Line(pools, frozenset(order), 0 if first else len(order))
        self._line_of[task] = line
        return line

    def no_worker_error(self, task: str) -> RunError:
        """The error if no worker is left that may serve a task."""
        wanted = self._affinity.get(task, self._affinity.get(DEFAULT_TASK, ANY))
        why = f"no rollout worker is left for task {task}, which needs class {wanted}"
        return RunError(why if self._fallback else f"{why} only (rollout.routing.fallback = false)")

    # -- accounts ----------------------------------------------------------------------------------------------------

    def _enqueue_turn(self, request: str, turn: _Turn) -> None:
        self.queued += 1
        heappush(turn.line.waiting, (turn.number, request))
        if self._rule == CACHE_AFFINE and (holder := self._holder.get(turn.trajectory)) is not None:
            self._first_heir(holder[0])  # keeps the heap as short as the queue
            heappush(self._heirs[holder[0]], (turn.number, request))

    def _waits(self, entry: tuple[int, str]) -> bool:
        turn = self._turns.get(entry[1])
        return turn is not None and turn.worker < 0 and turn.number == entry[0]

    def _change_load(self, worker: int, change: int) -> None:
        self._unlist(worker)
        self._load[worker] += change
        self._list(worker)

    def _level(self, worker: int) -> int:
        load = self._load[worker]
        return load * FULL // self._seats[worker].cap if self._relative else load

    def _list(self, worker: int) -> None:
        cap = self._seats[worker].cap
        if self._open[worker] and (not cap or self._load[worker] < cap):
            self._pool_of[worker].add(worker, self._level(worker))

    def _unlist(self, worker: int) -> None:
        pool = self._pool_of[worker]
        if pool.free >> worker & 1:
            pool.drop(worker, self._level(worker))
