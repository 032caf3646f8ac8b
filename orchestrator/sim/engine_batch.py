"""What a simulated engine has in its batch, what waits, and whose KV it holds: continuous batching without a clock.

Guarantees: no more sequences run than there are slots, and no more KV is held than there is room for; a sequence that is
preempted keeps its tokens, loses its place, and prefills again what was overwritten meanwhile (recomputation); the lowest
rank (priority, then arrival) goes first when KV runs out, and strictly outranked ones go when a better one waits
(:class:`~orchestrator.policies.routing.priority.ProgressivePriority`, the engines' own policy); KV that nobody uses
stays as prefix cache until somebody needs the room, the longest unused first. ``horizon`` steps can be taken at once:
nothing that is decided here could change before, so one leap of n steps ends in the state of n single ones.

KV is counted in tokens: half-empty blocks are not modelled, nor that members of a group share their prompt's.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from orchestrator.api import GenerationRequest
from orchestrator.policies.routing.priority import ProgressivePriority, RunningRequest, WaitingRequest


@dataclass(slots=True, eq=False)
class EngineSequence:
    """A request in the engine. ``tokens``: all that it will say; ``made``: how many of them are booked to a version, the
    last ones at engine step ``booked``; ``ends``: the step after which it is complete, -1 while it does not run."""

    request: GenerationRequest
    tokens: tuple[int, ...]
    arrived: float
    number: int  # of arrival
    before: int = 0  # tokens of the turn that others have said
    made: int = 0
    booked: int = 0
    ends: int = -1
    spans: list[tuple[int, int]] = field(default_factory=list)
    started: float = -1.0
    first: float = -1.0  # when its first token was there
    done: bool = False

    @property
    def context(self) -> int:
        """Tokens of prompt and response, as far as they are booked."""
        return len(self.request.token_ids) + self.made

    @property
    def rank(self) -> tuple[int, int]:
        """The lower one goes first."""
        return self.request.priority, self.number


class EngineBatch:
    """``slots``: sequences that run at most; ``room``: tokens of KV, None: any number; ``reuse``: of a task, what share of its
    context a trajectory's next turn begins with (1 where it is not named). :meth:`fill`, then at most :meth:`horizon` steps by
    :meth:`advance`, then :meth:`complete`, and again."""

    def __init__(self, slots: int, room: int | None, reuse: Mapping[str, float] | None = None) -> None:
        self.running: dict[str, EngineSequence] = {}
        self.steps = 0  # taken so far
        self.context = 0  # tokens in the contexts of those that run
        self.preemptions = 0  # all
        self.outranked = 0  # those of them for one that outranks
        self.generated = 0
        self.prompt_tokens = 0  # of those that started
        self.prompt_tokens_cached = 0
        self.version = -1  # that makes the tokens
        self._slots = slots
        self._room = room
        self._reuse = reuse or {}
        self._waiting: list[tuple[int, int, EngineSequence]] = []
        self._ends: list[tuple[int, int, EngineSequence]] = []
        # trajectory -> tokens whose KV is held and in no sequence's use; oldest first
        self._prefix: dict[str, int] = {}
        self._idle = 0  # their sum
        self._owed = 0  # tokens to prefill before the next step
        self._pairs = 0.0  # of query and key, in that
        self._priority = ProgressivePriority()
        self._mixed = False  # whether priorities differ among those that came

    # -- what comes and goes -----------------------------------------------------------------------------------------

    def add(self, sequence: EngineSequence) -> None:
        """It waits."""
        self._mixed = self._mixed or sequence.request.priority != 0
        heapq.heappush(self._waiting, (*sequence.rank, sequence))

    def reorder(self) -> None:
        """Priorities changed."""
        waiting = self.waiting()
        self._mixed = True
        self._waiting = [(*sequence.rank, sequence) for sequence in waiting]
        heapq.heapify(self._waiting)

    def waiting(self) -> list[EngineSequence]:
        """Those that wait, in no order."""
        return [entry[2] for entry in self._waiting if not entry[2].done]

    def remove(self, sequence: EngineSequence) -> None:
        """It ends, wherever it is; its KV stays as a prefix, as far as the next turn can use it."""
        sequence.done = True
        if self.running.pop(sequence.request.request_id, None) is not None:
            self._stop(sequence, self._reuse.get(sequence.request.task, 1.0))

    def book_tokens(self, sequences: Iterable[EngineSequence] | None = None) -> None:
        """Count the tokens that running sequences (None: all) have made since they were last looked at."""
        for sequence in self.running.values() if sequences is None else sequences:
            tokens = self.steps - sequence.booked
            sequence.booked = self.steps
            if tokens:
                sequence.made += tokens
                sequence.spans.append((self.version, tokens))
                self.generated += tokens

    def change_weights(self, version: int) -> None:
        """New weights: all KV is of old ones, and is computed anew before the next step."""
        self.book_tokens()
        self.version = version
        self._prefix.clear()
        self._idle = 0
        self._owed = self.context
        self._pairs = sum(sequence.context * sequence.context / 2 for sequence in self.running.values())

    def clear(self) -> None:
        """The process is gone."""
        self.running.clear()
        self._waiting.clear()
        self._ends.clear()

    def prefix_tokens(self, trajectory: str) -> int:
        """Tokens of its context whose KV is held here, in nobody's use."""
        return self._prefix.get(trajectory, 0)

    def adopt(self, trajectory: str, tokens: int) -> None:
        """KV of so many of its tokens came from elsewhere."""
        held = self._prefix.pop(trajectory, 0)
        self._prefix[trajectory] = max(held, tokens)
        self._idle += self._prefix[trajectory] - held
        self._trim()

    @property
    def held(self) -> int:
        """Tokens whose KV is held, in use or not."""
        return self.context + self._idle

    def drop(self, trajectory: str) -> None:
        """KV of its tokens that nobody uses is gone."""
        self._idle -= self._prefix.pop(trajectory, 0)

    def resize(self, room: int) -> None:
        """There is room for so many tokens from now on. Unused prefixes give way at once; sequences that have no room any more
        are preempted before the next step."""
        self._room = room
        self._trim()

    # -- steps -------------------------------------------------------------------------------------------------------

    def fill(self, now: float) -> tuple[int, float]:
        """Preempt who has no room for the next step, then start who has. Returns tokens to prefill, and pairs of query and key
        in them."""
        if self._room is not None:
            while self._room - self.context < len(self.running):
                self._preempt(max(self.running.values(), key=lambda sequence: sequence.rank))
        while (head := self._head()) is not None and (self._fits(head) or self._outranks(head)):
            heapq.heappop(self._waiting)
            self._start(head, now)
        owed, pairs, self._owed, self._pairs = self._owed, self._pairs, 0, 0.0
        return owed, pairs

    def horizon(self) -> int:
        """Steps until a sequence is complete or KV runs out; at least 1. Only while something runs."""
        while not self._is_current(self._ends[0]):
            heapq.heappop(self._ends)
        steps = self._ends[0][0] - self.steps
        if self._room is not None:
            steps = min(steps, (self._room - self.context) // len(self.running))
        return steps

    def advance(self, steps: int) -> None:
        """Take them."""
        self.steps += steps
        self.context += steps * len(self.running)
        self._trim()

    def complete(self) -> Iterator[EngineSequence]:
        """Those that have said all; each still runs, and is to be removed."""
        while self._ends and self._ends[0][0] <= self.steps:
            entry = heapq.heappop(self._ends)
            if self._is_current(entry):
                yield entry[2]

    # -- room --------------------------------------------------------------------------------------------------------

    def _is_current(self, entry: tuple[int, int, EngineSequence]) -> bool:
        return not entry[2].done and entry[2].ends == entry[0]

    def _head(self) -> EngineSequence | None:
        while self._waiting and self._waiting[0][2].done:
            heapq.heappop(self._waiting)
        return self._waiting[0][2] if self._waiting else None

    def _need(self, sequence: EngineSequence) -> int:
        """Tokens of room that it must find: its context, and a further token of each that runs then."""
        return sequence.context + len(self.running) + 1

    def _fits(self, sequence: EngineSequence) -> bool:
        if len(self.running) >= self._slots:
            return False
        return self._room is None or self._need(sequence) <= self._room - self.context

    def _outranks(self, head: EngineSequence) -> bool:
        """Whether room was made for one that outranks."""
        if not self._mixed or not self.running:
            return False
        priorities = (sequence.request.priority for sequence in self.running.values())
        if not self._priority.may_decide(head.request.priority, priorities):
            return False
        self.book_tokens()
        rows = list(self.running.values())
        found = self._priority.takeovers(
            [WaitingRequest(head.request.priority, (head.number, ""))],
            [RunningRequest(row.request.priority, (row.number, "")) for row in rows],
            slots=self._slots - len(rows),
            tokens=self._slots,
            blocks=0 if self._room is None else self._room - self.context,
            need=lambda _: 0 if self._room is None else self._need(head),
            gain=lambda _, victim: rows[victim].context + 1,
        )
        if not found:
            return False
        for victim in found[0].victims:
            self._preempt(rows[victim])
        self.outranked += len(found[0].victims)
        return True

    def _preempt(self, sequence: EngineSequence) -> None:
        del self.running[sequence.request.request_id]
        self._stop(sequence)
        self.preemptions += 1
        heapq.heappush(self._waiting, (*sequence.rank, sequence))

    def _stop(self, sequence: EngineSequence, share: float = 1.0) -> None:
        self.book_tokens((sequence,))
        sequence.ends = -1
        self.context -= sequence.context
        trajectory, kept = sequence.request.trajectory_id, int(sequence.context * share)
        self._idle += kept - self._prefix.pop(trajectory, 0)
        self._prefix[trajectory] = kept
        self._trim()

    def _start(self, sequence: EngineSequence, now: float) -> None:
        context, prompt = sequence.context, len(sequence.request.token_ids)
        cached = self._prefix.pop(sequence.request.trajectory_id, 0)
        self._idle -= cached
        if sequence.started < 0:
            sequence.started = now
            self.prompt_tokens += prompt
            self.prompt_tokens_cached += min(cached, prompt)
        prefill = max(1, context - cached)
        self._owed += prefill
        self._pairs += prefill * (context - prefill / 2)
        sequence.booked = self.steps
        sequence.ends = self.steps + len(sequence.tokens) - sequence.made
        self.running[sequence.request.request_id] = sequence
        heapq.heappush(self._ends, (sequence.ends, sequence.number, sequence))
        self.context += context
        self._trim()

    def _trim(self) -> None:
        """Unused prefixes give way, the oldest first, from their ends."""
        if self._room is None:
            return
        excess = self._idle + self.context - self._room
        while excess > 0 and self._prefix:
            trajectory, tokens = next(iter(self._prefix.items()))
            gone = min(excess, tokens)
            if gone == tokens:
                del self._prefix[trajectory]
            else:
                self._prefix[trajectory] = tokens - gone
            self._idle -= gone
            excess -= gone
