"""Tail batching (RollPacker 3): which prompts a rollout round starts, keeps and defers. Pure: numbers in, numbers out.

A prompt is its *number* in the task's training stream. A **short round** starts ceil(eta_p P0) prompts with ceil(eta_r R0)
members each and keeps the first P0 prompts that have R0 responses; every other prompt that it started and that is unfinished
goes to the long-prompt queue. When P0 prompts are queued, a **long round** starts exactly these, with R0 members each, without
speculation.

Guarantee: a number is in one place at a time (not drawn, to be started again, queued, running, ready) and leaves in one way:
given to training, discarded (equal rewards: dynamic sampling, never queued), or given up after ``tries`` of its groups failed.
So each prompt is trained on exactly once per epoch, even across kills and resumes, as :meth:`RoundPlanner.state` is part of
the checkpoint.

What the paper leaves open, decided here:

* The end of an epoch. If fewer prompts are left to draw than a short round keeps, the rest of the epoch is played without
  speculation, the queue first; its last round is filled up with the first prompts of the next epoch. No prompt of an epoch is
  trained on after a batch without prompts of that epoch.
* A group that cannot be trained on (its members failed) is not long: its prompt is started again, in the same round.
* A prompt that is finished but not among the first P0, if nothing outlives a batch, was not long: it is started again in a
  later short round. If trajectories may cross an update, it counts for the next round.
* Agentic tasks (section 7): with ``isolate``, prompts that were late because of their environment have their own queue, so
  that a long round waits for environments or for tokens, not for both.
* A prompt that is predicted to be long (:mod:`orchestrator.policies.prediction.prompt_lengths`) is not started only to be
  deferred: :meth:`RoundPlanner.divert` queues it at once, in place of one of those that the round would start beyond P0.
* DAPO (section 7): a discarded prompt is replaced by another one, within the same target.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

LANES = ("tokens", "environment")  # why a prompt was late: queues of the agentic variant
SHORT, LONG = "short", "long"
UNDEFERRED = 4  # short rounds that end the period of a value with which nothing is deferred


@dataclass(frozen=True, slots=True)
class RoundRules:
    """``epoch``: prompts in the data set, 0: the stream never repeats. ``search``: values of eta to try first."""

    prompts: int  # P0
    responses: int  # R0
    eta_prompts: float = 1.25
    eta_responses: float = 1.25
    epoch: int = 0
    tries: int = 16  # groups of one prompt that may fail
    isolate: bool = False
    search: tuple[float, ...] = ()


@dataclass(slots=True)
class Round:
    """One round. ``target``: how many prompts are running or ready at a time; ``members``: per group."""

    index: int
    kind: str
    lane: str
    target: int
    members: int
    eta_prompts: float = 1.0
    eta_responses: float = 1.0
    closing: bool = False  # the rest of an epoch: without speculation
    over: bool = False
    launched: int = 0
    diverted: int = 0
    deferred: int = 0
    put_back: int = 0
    lost: int = 0
    discarded: int = 0


class EtaSearch:
    """Which eta a run uses for speculation (RollPacker 6.3): a small grid search in its first rounds; off unless a grid is
    given.

    The measure is the paper's (figure 12): rollout seconds per trained prompt over a *period*, the rounds up to and including
    the next long one. Each value of the grid gets one period, in turn; the one with the fewest seconds per prompt stays.

    A long round plays P0 deferred prompts, whichever value deferred them, so a value is charged the share that it deferred:
    over a period ``(short + long x deferred / P0) / (short prompts + deferred)``, which is the value's cost however many
    rounds it took to fill the queue. Guarantees: a round without speculation at the end of an epoch counts as a long one, and
    a short one that had to fill up without speculation counts for no value; a value that defers nothing (an eta of 1) has no
    long round, and its period ends after :data:`UNDEFERRED` short ones.

    ``grid``: the values in the order in which they are tried, for prompts and responses alike.
    """

    def __init__(self, grid: Sequence[float]) -> None:
        self._grid = tuple(grid)
        self._costs: list[float] = []  # seconds a prompt, of the values that had their period
        self._begin_period()

    def _begin_period(self) -> None:
        self._seconds = 0.0  # of its short rounds
        self._rounds = 0
        self._prompts = 0
        self._deferred = 0

    @property
    def eta(self) -> float:
        """For the next round."""
        tried = len(self._costs)
        return self._grid[tried] if tried < len(self._grid) else self._grid[self._costs.index(min(self._costs))]

    @property
    def done(self) -> bool:
        """Whether each value had its period."""
        return len(self._costs) == len(self._grid)

    @property
    def costs(self) -> dict[float, float]:
        """Seconds per trained prompt, by eta."""
        return dict(zip(self._grid, self._costs, strict=False))

    def round_ended(self, seconds: float, prompts: int, *, long: bool, deferred: int = 0) -> None:
        """A round took ``seconds`` and yielded ``prompts`` to train on; ``deferred`` others go to long rounds."""
        if self.done or (long and not self._rounds):
            return  # a second long round on end is of the value before
        if long:
            self._end_period(self._seconds + seconds * self._deferred / max(1, prompts))
            return
        self._seconds += seconds
        self._rounds += 1
        self._prompts += prompts
        self._deferred += deferred
        if self._rounds >= UNDEFERRED and not self._deferred:
            self._end_period(self._seconds)

    def _end_period(self, seconds: float) -> None:
        self._costs.append(seconds / max(1, self._prompts + self._deferred))
        self._begin_period()

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        period = {"seconds": self._seconds, "rounds": self._rounds, "prompts": self._prompts}
        return {"costs": list(self._costs), **period, "deferred": self._deferred}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        self._costs = [float(cost) for cost in state["costs"]][: len(self._grid)]
        self._seconds, self._rounds = float(state["seconds"]), int(state["rounds"])
        self._prompts, self._deferred = int(state["prompts"]), int(state["deferred"])


class RoundPlanner:
    """Call :meth:`begin_round`; :meth:`launch_next` while it returns something; report what becomes of groups; when P0 prompts
    are ready, :meth:`close_round`, :meth:`defer` the late ones and :meth:`end_round`."""

    def __init__(self, rules: RoundRules) -> None:
        self.rules = rules
        self.search = EtaSearch(rules.search) if rules.search else None
        self.round: Round | None = None
        self.discarded = 0
        self.given_up: list[int] = []
        self._index = 0
        self.drawn = 0  # the first number that was never drawn
        self._end = rules.epoch or None  # of the epoch that is drawn from; None: there is none
        self._again: dict[int, None] = {}
        self._queue: dict[int, str] = {}  # number -> lane, the oldest first
        self._running: dict[int, str] = {}  # number -> lane that it came from, "" for none
        self._ready: dict[int, None] = {}
        self._taken: dict[int, None] = {}  # the batch that waits for the trainer
        self._losses: dict[int, int] = {}

    # -- a round -----------------------------------------------------------------------------------------------------

    def begin_round(self) -> Round:
        """The next round, given what is queued and what is left of the epoch."""
        rules, held = self.rules, len(self._ready)
        lane = next((lane for lane in LANES if self.queue_length(lane) >= rules.prompts), "")
        left = math.inf if self._end is None else held + len(self._again) + self._end - self.drawn
        closing = left < rules.prompts or self._behind()
        if lane or closing:
            self.round = Round(self._index, LONG, lane, rules.prompts, rules.responses, closing=closing)
        else:
            eta_prompts = self.search.eta if self.search else rules.eta_prompts
            eta_responses = self.search.eta if self.search else rules.eta_responses
            target = speculated(eta_prompts, rules.prompts)
            members = speculated(eta_responses, rules.responses)
            self.round = Round(self._index, SHORT, "", target, members, eta_prompts, eta_responses)
        self._index += 1
        return self.round

    def members_wanted(self) -> int:
        """Members of the group that should start now; 0: none should."""
        found = self._source()
        if not found or self.round is None:
            return 0
        return self.round.members if found in ("again", "fresh") else self.rules.responses

    def launch_next(self) -> int:
        """Take the number for the group of :meth:`members_wanted`. Raises ValueError if there is none."""
        now, found = self.round, self._source()
        if now is None or not found:
            raise ValueError("nothing is to be launched")
        lane = ""
        if found == "again":
            number = min(self._again, key=self._epoch)
            del self._again[number]
        elif found == "queue":
            of_lane = [n for n, its in self._queue.items() if its == now.lane]
            number = min(of_lane or self._queue, key=self._epoch)
            lane = self._queue.pop(number)
        else:
            if found == "epoch":
                assert self._end is not None
                self._end += self.rules.epoch
            number = self.drawn
            self.drawn += 1
        if found in ("queue", "epoch") and now.kind == SHORT:  # the epoch has nothing else left
            now.closing, now.target, now.members = True, self.rules.prompts, self.rules.responses
        self._running[number] = lane
        now.launched += 1
        return number

    def divertible(self) -> int | None:
        """The number that a short round would start next, if it may be queued instead: never played before, and beyond what
        the round needs. None: there is none."""
        now = self.round
        if now is None or now.kind != SHORT or now.closing or now.target <= self.rules.prompts:
            return None
        return self.drawn if self._source() == "fresh" else None

    def divert(self) -> None:
        """The number of :meth:`divertible` is predicted to be long: queue it. Raises ValueError."""
        number, now = self.divertible(), self.round
        if number is None or now is None:
            raise ValueError("nothing is to be diverted")
        self.drawn += 1
        self._queue[number] = LANES[0]
        now.diverted += 1
        now.target -= 1

    def _behind(self) -> bool:
        """Whether a prompt of an epoch before the present one is still to be trained (after a resume)."""
        begin = 0 if self._end is None else self._end - self.rules.epoch
        return any(number < begin for places in (self._again, self._queue) for number in places)

    def _source(self) -> str:
        """Where the next number comes from; "" when the round needs none."""
        now = self.round
        if now is None or now.over:
            return ""
        alive, least = len(self._running) + len(self._ready), min(now.target, self.rules.prompts)
        if alive >= now.target:
            return ""
        fresh = "again" if self._again else "fresh" if self._end is None or self.drawn < self._end else ""
        if now.kind == SHORT and not now.closing:
            return fresh or ("" if alive >= least else "queue" if self._queue else "epoch")
        if not self._queue:
            return fresh or "epoch"
        # Whatever was lost comes after what was deferred, unless it is of an earlier epoch (after a resume).
        first = min(map(self._epoch, self._queue))
        return "again" if min(map(self._epoch, self._again), default=first) < first else "queue"

    def _epoch(self, number: int) -> int:
        return number // self.rules.epoch if self.rules.epoch else 0

    def narrow(self) -> None:
        """Enough prompts will be ready: from now on only failed ones are replaced."""
        if self.round is not None:
            self.round.target = min(self.round.target, self.rules.prompts)

    def close_round(self) -> None:
        """P0 prompts are ready: nothing starts until the next round begins."""
        if self.round is not None:
            self.round.over = True

    def end_round(self, seconds: float, taken: Iterable[int]) -> None:
        """The round took ``seconds``, and ``taken`` are the batch: they count for no later round."""
        now = self.round
        for number in taken:
            del self._ready[number]
            self._taken[number] = None
        if now is not None and self.search is not None and not (now.kind == SHORT and now.closing):
            deferred = now.deferred + now.diverted
            self.search.round_ended(seconds, self.rules.prompts, long=now.kind == LONG, deferred=deferred)
        self.round = None

    # -- what becomes of a prompt ------------------------------------------------------------------------------------

    def mark_ready(self, number: int) -> None:
        """It has its responses. Idempotent."""
        if self._running.pop(number, None) is not None:
            self._ready[number] = None

    def mark_lost(self, number: int) -> None:
        """Its group cannot be trained on: it is started again, at most ``tries`` times."""
        if not self._remove_number(number):
            return
        self._losses[number] = self._losses.get(number, 0) + 1
        if self.round is not None:
            self.round.lost += 1
        if self._losses[number] >= self.rules.tries:
            del self._losses[number]
            self.given_up.append(number)
        else:
            self._again[number] = None

    def discard(self, number: int) -> None:
        """Dynamic sampling drops it (equal rewards): it is finished, by design."""
        if self._remove_number(number):
            self._losses.pop(number, None)
            self.discarded += 1
            if self.round is not None:
                self.round.discarded += 1

    def defer(self, number: int, lane: str = LANES[0]) -> None:
        """It was too late for this round: to the long-prompt queue. ``lane``: what made it late."""
        del self._running[number]
        self._queue[number] = lane if self.rules.isolate else LANES[0]
        if self.round is not None:
            self.round.deferred += 1

    def put_back(self, number: int) -> None:
        """It is finished but no longer needed: it is played again, and not as a long one."""
        del self._ready[number]
        self._again[number] = None
        if self.round is not None:
            self.round.put_back += 1

    def handed_over(self, numbers: Iterable[int]) -> None:
        """They are being trained on."""
        for number in numbers:
            del self._taken[number]
            self._losses.pop(number, None)

    def _remove_number(self, number: int) -> bool:
        """Out of the round; whether it was in it."""
        return self._running.pop(number, None) is not None or self._ready.pop(number, 0) is None

    def overtaking(self) -> list[int]:
        """What is ready, and of a later epoch than something that is to be launched again."""
        if self._end is None:
            return []
        earliest = min(map(self._epoch, (*self._again, *self._queue)), default=math.inf)
        return [number for number in self._ready if self._epoch(number) > earliest]

    # -- what others ask ---------------------------------------------------------------------------------------------

    @property
    def running(self) -> list[int]:
        """Started and not ready, in order of starting."""
        return list(self._running)

    @property
    def ready(self) -> list[int]:
        """Those that have their responses, and no batch was made of yet."""
        return list(self._ready)

    def queue_length(self, lane: str = "") -> int:
        """Length of the long-prompt queue, or of one lane of it."""
        return sum(not lane or other == lane for other in self._queue.values())

    @property
    def outstanding(self) -> list[int]:
        """Numbers that were drawn and are not yet handed over, discarded or given up."""
        return sorted([*self._again, *self._queue, *self._running, *self._ready, *self._taken])

    # -- durable -----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """For a checkpoint; JSON."""
        return {
            "index": self._index,
            "next": self.drawn,
            "end": self._end,
            "again": list(self._again),
            "queue": [list(item) for item in self._queue.items()],
            "running": [list(item) for item in self._running.items()],
            "ready": [*self._taken, *self._ready],
            "losses": [list(item) for item in self._losses.items()],
            "given_up": list(self.given_up),
            "discarded": self.discarded,
            "search": self.search.state() if self.search else None,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state`. What was running or ready counts as running until :meth:`mark_ready`, :meth:`mark_lost`
        or :meth:`discard` reports what the checkpoint's buffer has of it; then call :meth:`settle`. Raises ValueError for an
        invalid state, after which this planner is unusable."""
        try:
            self._restore(state)
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ValueError(f"no queue of rounds: {error!r:.200}") from error

    def _restore(self, state: dict[str, Any]) -> None:
        self._index, self.drawn = int(state["index"]), int(state["next"])
        self._end = None if state["end"] is None else int(state["end"])
        self._again = dict.fromkeys(map(int, state["again"]))
        self._queue = {int(number): str(lane) for number, lane in state["queue"]}
        self._running = {int(number): "" for number in state["ready"]}
        self._running |= {int(number): str(lane) for number, lane in state["running"]}
        self._ready, self._taken = {}, {}
        self._losses = {int(number): int(count) for number, count in state["losses"]}
        self.given_up = [int(number) for number in state["given_up"]]
        self.discarded = int(state["discarded"])
        if self.search is not None and state["search"] is not None:
            self.search.restore(state["search"])

    def settle(self) -> None:
        """After :meth:`restore`: numbers that are in no buffer are started again, or put at the front of the queue if they
        came from there."""
        front = {number: lane for number, lane in self._running.items() if lane}
        self._again |= {number: None for number, lane in self._running.items() if not lane}
        self._again = dict.fromkeys(sorted(self._again))  # an older epoch's first
        self._queue = front | self._queue
        self._running = {}


def speculated(eta: float, needed: int) -> int:
    """ceil(eta x needed), safe against binary fractions (1.1 x 10 is 11)."""
    return math.ceil(round(eta * needed, 9))


def epoch_mistake(rules: RoundRules) -> str:
    """Why no run could draw its prompts from such a data set, and what to do; empty if it could."""
    if not 0 < rules.epoch < rules.prompts:
        return ""
    return (
        f"a batch of {rules.prompts} prompts (rollout.groups_per_step) would hold one of them twice: the data set needs "
        "as many prompts as a batch, or 0 where the task's stream never repeats"
    )


def same_run(mine: dict[str, Any], theirs: dict[str, Any]) -> Sequence[str]:
    """How the run that wrote a queue differs from this one, in words."""
    return [f"{name} {theirs.get(name)!r} instead of {mine[name]!r}" for name in mine if theirs.get(name) != mine[name]]
