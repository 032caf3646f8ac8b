"""The ledger: every trajectory that started is accounted for, always.

A trajectory lives through ``running`` (its environment and the policy talk), ``scoring``, ``buffered`` and ``taken`` (in
a batch), and ends in exactly one of ``trained``, ``evicted_stale``, ``aborted_redundant``, ``deferred``, ``filtered``,
``failed``. Every start, change and end is a line of the journal before anything acts on it. Invariant, checked at every
step's end: started = sum over the ends + in flight, where in flight is counted by its own counter and must equal the
number of open entries. Never is a number computed as the remainder of the others. What ended before the check before is
only counted: a run of weeks holds no more in memory, and is checked no slower, than one of an hour; the journal has all. So
does a resume, which reads it line by line and remembers what has not ended, or may be rolled back.

A resume goes back to a checkpoint: what was trained after it is journalled as ``rolled_back`` and either returns to the
buffer (the checkpoint holds it) or ends as ``failed: rolled_back``; what was in flight ends as ``failed: interrupted``. A power
cut may take or garble what came after the checkpoint (:func:`intact_lines`), never what the checkpoint claims.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from json.encoder import encode_basestring_ascii as _quote
from typing import Any

from orchestrator.api import RunError
from orchestrator.durable_files import describe_byte
from orchestrator.events import LineSink

LIVE_STATES = ("running", "scoring", "buffered", "taken")
_decode = json.JSONDecoder().raw_decode
_KINDS: dict[str, type[Any]] = {"group": str, "cause": str, "step": int, "prompt": int}  # of fields that may be there
END_STATES = ("trained", "evicted_stale", "aborted_redundant", "deferred", "filtered", "failed")
_STATES = frozenset((*LIVE_STATES, *END_STATES, "rolled_back"))

_ALLOWED = {
    "running": ("scoring", *END_STATES),
    "scoring": ("buffered", *END_STATES),
    "buffered": ("taken", *END_STATES),
    "taken": ("buffered", *END_STATES),
}
# In a journal also: what starts, what a resume takes back, and what it finds in the checkpoint's buffer once more.
_REPLAYED = {
    **_ALLOWED,
    "buffered": ("buffered", *_ALLOWED["buffered"]),
    "not started": ("running",),
    "trained": ("rolled_back",),
}


@dataclass(slots=True)
class Entry:
    """The present state of one trajectory."""

    group_id: str
    state: str
    cause: str = ""
    step: int = -1  # of training, when trained


CUT_SHORT = ("interrupted", "rolled_back")  # causes of those that ended with the process, or with its last steps


@dataclass
class Counts:
    """Totals of a ledger."""

    started: int = 0
    in_flight: int = 0
    rolled_back: int = 0
    ended: dict[str, int] = field(default_factory=lambda: dict.fromkeys(END_STATES, 0))
    failed_by_cause: dict[str, int] = field(default_factory=dict)
    ended_by_cause: dict[str, int] = field(default_factory=dict)  # other ends that have one: "filtered: truncated"

    def as_dict(self) -> dict[str, Any]:
        """The ledger as reports show it."""
        return {
            "started": self.started,
            **self.ended,
            "in_flight": self.in_flight,
            "rolled_back": self.rolled_back,
            "failed_by_cause": dict(sorted(self.failed_by_cause.items())),
            "ended_by_cause": dict(sorted(self.ended_by_cause.items())),
        }


class Ledger:
    """The journal's writer and the totals. ``now`` is the event log's time."""

    def __init__(self, sink: LineSink, now: Callable[[], float]) -> None:
        self._sink = sink
        self._now = now
        self._entries: dict[str, Entry] = {}
        self._ended: list[str] = []  # since the last check
        self._before: list[str] = []  # before it, since the one before
        self._forgotten = 0
        self.groups_started = 0  # of the journal that was restored: numbers go on after them
        self.groups_lost: tuple[int, ...] = ()  # the numbers of those of which a resume has nothing left
        self.rolled_back: Counter[int] = Counter()  # by the restore: trajectories by the step they were trained in
        self.trained_by_step: Counter[int] = Counter()  # of the journal that was restored
        self.counts = Counts()
        self.sequence = 0

    def start(self, trajectory_id: str, group_id: str, prompt: int = -1) -> None:
        """A trajectory begins. ``prompt``: its number in the training stream, where rounds count prompts; -1: nobody does."""
        if trajectory_id in self._entries:
            raise RunError(f"ledger: trajectory {trajectory_id} started twice")
        record: dict[str, Any] = {"id": trajectory_id, "group": group_id, "state": "running"}
        if prompt >= 0:
            record["prompt"] = prompt
        self._write(record)
        self._entries[trajectory_id] = Entry(group_id, "running")
        self.counts.started += 1
        self.counts.in_flight += 1

    def move(self, trajectory_id: str, state: str) -> None:
        """It changes to another live state."""
        entry = self._open(trajectory_id, state)
        if state not in LIVE_STATES:
            raise RunError(f"ledger: {state!r} is an end; use end()")
        self._write({"id": trajectory_id, "state": state})
        entry.state = state

    def end(self, trajectory_id: str, state: str, cause: str = "", step: int = -1) -> None:
        """It ends. ``cause`` is required for ``failed``."""
        entry = self._open(trajectory_id, state)
        if state not in END_STATES:
            raise RunError(f"ledger: {state!r} is not an end; known: {', '.join(END_STATES)}")
        if state == "failed" and not cause:
            raise RunError(f"ledger: trajectory {trajectory_id} failed without a cause")
        record: dict[str, Any] = {"id": trajectory_id, "state": state}
        if cause:
            record["cause"] = cause
        if step >= 0:
            record["step"] = step
        self._write(record)
        entry.state, entry.cause, entry.step = state, cause, step
        self._ended.append(trajectory_id)
        self._count_end(state, cause)

    def state(self, trajectory_id: str) -> str:
        """The present state, "" when unknown, or ended before the check before."""
        entry = self._entries.get(trajectory_id)
        return entry.state if entry else ""

    def check(self) -> None:
        """Raise RunError unless every trajectory is accounted for. Forgets what had ended at the check before."""
        counts = self.counts
        ends = sum(counts.ended.values())
        open_entries = sum(1 for entry in self._entries.values() if entry.state in LIVE_STATES)
        if (
            counts.started != ends + counts.in_flight
            or open_entries != counts.in_flight
            or counts.started != len(self._entries) + self._forgotten
        ):
            raise RunError(
                f"ledger does not close: started {counts.started}, ended {ends}, in flight {counts.in_flight}, "
                f"open entries {open_entries}, entries {len(self._entries) + self._forgotten}: {counts.as_dict()}"
            )
        for trajectory_id in self._before:
            del self._entries[trajectory_id]
        self._forgotten += len(self._before)
        self._before, self._ended = self._ended, []

    def restore(self, lines: Iterable[str], checkpoint_step: int, held: Collection[str]) -> list[str]:
        """Replay a journal after a crash, whose ``lines`` are read twice and not kept; ``held`` are the ids in the checkpoint's
        buffer, ``checkpoint_step`` the number of training steps it contains. Returns the ids that are back in the buffer. Raises
        RunError for a journal with lines that are missing, repeated, of another journal, or that say what cannot have happened;
        half a line, where a process was killed while it wrote, is none of these."""
        groups = _Groups()
        to_come = Counter(  # each that was trained and then rolled back, by an earlier resume
            record["id"]
            for line in lines
            if '"rolled_back"' in line and (record := _parse(line)) and record["state"] == "rolled_back"
        )
        for place, line in enumerate(lines, 1):
            record = _parse(line)
            if record is None:
                continue
            name = record["id"]
            known = name in self._entries
            self._replay(record, place)
            entry = self._entries[name]
            if not known:
                groups.start(entry.group_id)
            elif record["state"] == "rolled_back":
                to_come[name] -= 1
            elif entry.state in END_STATES and not to_come[name] and entry.step < checkpoint_step:  # it stays so
                groups.end(entry)
                del self._entries[name]
                self._forgotten += 1
        returned: list[str] = []
        for trajectory_id, entry in self._entries.items():
            if entry.state == "trained" and entry.step >= checkpoint_step:
                self.rolled_back[entry.step] += 1
                self._write({"id": trajectory_id, "state": "rolled_back", "step": entry.step})
                self._roll_back(entry)
            if entry.state not in LIVE_STATES:
                continue
            if trajectory_id in held:
                self._write({"id": trajectory_id, "state": "buffered"})
                entry.state = "buffered"
                returned.append(trajectory_id)
            else:
                self.end(trajectory_id, "failed", CUT_SHORT[entry.state == "taken"])
        for entry in self._entries.values():
            groups.end(entry)
        self.groups_started, self.groups_lost = groups.started, groups.lost()
        self._ended = [name for name, entry in self._entries.items() if entry.state not in LIVE_STATES]
        self.check()
        return returned

    def _open(self, trajectory_id: str, state: str) -> Entry:
        entry = self._entries.get(trajectory_id)
        if entry is None:
            raise RunError(f"ledger: trajectory {trajectory_id} was never started, cannot become {state!r}")
        if state not in _ALLOWED.get(entry.state, ()):
            raise RunError(f"ledger: trajectory {trajectory_id} is {entry.state!r}, cannot become {state!r}")
        return entry

    def _count_end(self, state: str, cause: str) -> None:
        self.counts.ended[state] += 1
        self.counts.in_flight -= 1
        if state == "failed":
            self.counts.failed_by_cause[cause] = self.counts.failed_by_cause.get(cause, 0) + 1
        elif cause:
            name = f"{state}: {cause}"
            self.counts.ended_by_cause[name] = self.counts.ended_by_cause.get(name, 0) + 1

    def _roll_back(self, entry: Entry) -> None:
        self.counts.ended["trained"] -= 1
        self.counts.in_flight += 1
        self.counts.rolled_back += 1
        self.trained_by_step[entry.step] -= 1
        entry.state, entry.step = "taken", -1

    def _replay(self, record: dict[str, Any], place: int) -> None:
        trajectory_id, state = record["id"], record["state"]
        if record["seq"] != self.sequence:
            fix = f"record {record['seq']} where {self.sequence} was expected: lines are missing, repeated or from another run"
            raise RunError(f"ledger: line {place} of the journal: {fix}")
        entry = self._entries.get(trajectory_id)
        before = "not started" if entry is None else entry.state
        possible = state in _REPLAYED.get(before, ())
        if not possible or (state == "failed" and not record.get("cause")) or (entry is None and "group" not in record):
            raise RunError(
                f"ledger: line {place} of the journal: {trajectory_id!r:.100} is {before}, cannot be {state}"
            )
        self.sequence += 1
        if entry is None:
            self._entries[trajectory_id] = Entry(record["group"], "running")
            self.counts.started += 1
            self.counts.in_flight += 1
            return
        if state == "rolled_back":
            self._roll_back(entry)
        elif state in LIVE_STATES:
            entry.state = state
        else:
            entry.state, entry.cause, entry.step = state, record.get("cause", ""), record.get("step", -1)
            self._count_end(state, entry.cause)
            if state == "trained":
                self.trained_by_step[entry.step] += 1

    def _write(self, record: dict[str, Any]) -> None:
        record["seq"] = self.sequence
        record["t"] = self._now()
        self.sequence += 1
        self._sink.write(_line(record) + "\n")


@dataclass(slots=True)
class _Group:
    """``left``: members that are trained, or can be."""

    group_id: str
    again: bool  # one of its number was lost
    open: int = 0
    left: int = 0
    cut: bool = False

    @property
    def lost(self) -> bool:
        return self.cut and self.left < 2


class _Groups:
    """The groups of a journal: how many there were (one that was lost is started again under its number), and which are lost:
    that the end of the process, or a rollback, took members from and left too few to train on. Remembers those with open
    members, and those that were lost once."""

    def __init__(self) -> None:
        self.started = 0
        self._newest: dict[int, _Group] = {}  # of each number

    def start(self, group_id: str) -> None:
        """One of its members starts."""
        number = _number_of(group_id)
        self.started = max(self.started, number + 1)
        group = self._newest.get(number)
        if group is None or group.group_id != group_id:
            group = self._newest[number] = _Group(group_id, again=group is not None)
        group.open += 1

    def end(self, member: Entry) -> None:
        """This is how one of its members stays."""
        number = _number_of(member.group_id)
        group = self._newest.get(number)
        if group is None or group.group_id != member.group_id:  # another one was started in its place
            return
        group.open -= 1
        group.left += member.state == "trained" or member.state in LIVE_STATES
        group.cut |= member.state == "failed" and member.cause in CUT_SHORT
        if not (group.open or group.lost or group.again):
            del self._newest[number]

    def lost(self) -> tuple[int, ...]:
        """The numbers of those that are."""
        return tuple(sorted(number for number, group in self._newest.items() if number >= 0 and group.lost))


def _number_of(group_id: str) -> int:
    """Of g0000012, or g0000012-1 of a later life: 12; -1: it has none."""
    digits = group_id[1:].partition("-")[0]
    return int(digits) if group_id[:1] == "g" and digits.isascii() and digits.isdecimal() else -1


def intact_lines(lines: Iterable[str], claimed: int) -> tuple[int, str]:
    """How many lines of a journal a resume keeps, and in words what is wrong with the rest ("": nothing). ``claimed``: records
    that the checkpoint was written after. Later ones may be torn or missing, as they need not have been synced when the power
    failed: it is cut where they begin to be. Raises RunError where one of those that are claimed is."""
    found, kept, problem = 0, 0, ""
    for place, line in enumerate(lines, 1):
        record = _parse(line) if line.isascii() or _is_text(line) else None
        if record is None:
            problem = problem or f"line {place} {_damage_of(line)}"
        elif record["seq"] > found:
            problem = f"line {place} is record {record['seq']} where {found} was to come"
            break
        else:  # one that is repeated is no power cut's: the replay refuses it
            found, kept, problem = found + 1, place, ""
    if found < claimed:
        why = problem or "it ends there"
        raise RunError(
            f"ledger: the journal holds {found} records, the checkpoint was written after {claimed}: {claimed - found} are "
            f"missing ({why}); put ledger.jsonl back as it was, or start a new run"
        )
    return kept, problem


def _is_text(line: str) -> bool:
    return not any("\udc80" <= character <= "\udcff" for character in line)


def _damage_of(line: str) -> str:
    for character in line:
        if "\udc80" <= character <= "\udcff":
            return f"holds a {describe_byte(ord(character) - 0xDC00)}"
    return "is no whole record" if line.strip() else "is empty"


def recount(lines: Iterable[str]) -> dict[str, Any]:
    """Count a journal anew, sharing no code with the writer's totals, a line at a time: only what has not ended is remembered,
    so one that ends twice counts as two. Raises RunError for a whole line that is no record."""
    unended: set[str] = set()
    started = rolled_back = 0
    ends: Counter[tuple[str, str]] = Counter()
    for line in lines:
        record = _parse(line)
        if record is None:
            continue
        name, state = record["id"], record["state"]
        if state == "rolled_back":  # trained, and again to be
            rolled_back += 1
            ends["trained", ""] -= 1
            unended.add(name)
            continue
        if name not in unended:
            started += 1
            unended.add(name)
        if state in END_STATES:
            unended.remove(name)
            ends[state, record.get("cause", "")] += 1
    totals: dict[str, Any] = {
        "started": started,
        **{end: sum(count for (state, _), count in ends.items() if state == end) for end in END_STATES},
        "in_flight": len(unended),
        "rolled_back": rolled_back,
    }
    causes = sorted((state, cause, count) for (state, cause), count in ends.items())
    totals["failed_by_cause"] = {cause: count for state, cause, count in causes if state == "failed"}
    totals["ended_by_cause"] = {
        f"{state}: {cause}": count for state, cause, count in causes if cause and state != "failed"
    }
    return totals


def _line(record: dict[str, Any]) -> str:
    """A flat record of strings and finite numbers as JSON with sorted keys and no blanks, in a third of ``json``'s time: it is
    written several times a trajectory."""
    pairs = [f'"{key}":{_quote(value) if type(value) is str else repr(value)}' for key, value in sorted(record.items())]
    return "{" + ",".join(pairs) + "}"


def _parse(line: str) -> dict[str, Any] | None:
    """One journal record, or None for a half-written line (the process was killed while it wrote). Raises RunError for a
    whole line that is no record of this form."""
    record: dict[str, Any]
    try:
        record, end = _decode(line)
    except (ValueError, RecursionError):
        return None
    if end < len(line) and not line[end:].isspace():
        return None
    try:
        sound = type(record["id"]) is str and type(record["seq"]) is int and record["state"] in _STATES
        for name, kind in _KINDS.items():
            sound = sound and type(record.get(name, kind())) is kind
        if sound:
            return dict(record)
    except (TypeError, KeyError, AttributeError):
        pass
    raise RunError(f"ledger: the journal has a line that is not a record: {line!r:.200}")
