"""A run as a trace: Chrome's JSON format, which Perfetto (ui.perfetto.dev), chrome://tracing and others open.

What is in it: the loop's stages; every trajectory with its turns, what was generated on which worker, and the calls into its
environment; scoring; weight updates; what the workers said of themselves; faults. Where ``turns.jsonl`` of the run has a turn,
its times are the measured ones; for others only durations are known, and they are laid end to end before the episode's end
(``measured: false`` in a slice's arguments).

Guarantees: slices of one track never overlap but by nesting; the same folder gives the same bytes; a trace that would be too
large has the newest trajectories, and says so.
"""

from __future__ import annotations

import gzip
import heapq
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from orchestrator.api import ConfigError
from orchestrator.events import read_events
from orchestrator.observe.turn_lines import parse_turn
from orchestrator.run_folder import TURNS_FILE

MOST = 20_000  # trajectories in a trace
_LOOP, _TRAJECTORIES, _ENVIRONMENTS, _REWARDS, _WORKERS = 1, 2, 3, 4, 10  # pids; workers from the last on
# stage -> track of the loop
_TRACKS = {
    "get_batch": "get_batch", "wait_train": "get_batch", "train_step": "trainer", "feed": "trainer", "warmup": "trainer",
    "wait_weights": "trainer", "wait_store": "trainer",
    "publish": "publish", "checkpoint": "checkpoint", "evaluate": "evaluate", "startup": "startup", "prepare": "weights",
    "suspend": "weights", "update": "weights", "resume": "weights",
}  # fmt: skip


@dataclass
class Written:
    """What a trace has in it. ``note``: what it has not."""

    events: int = 0
    trajectories: int = 0
    note: str = ""


@dataclass(frozen=True)
class _Slice:
    name: str
    start: float
    end: float
    arguments: Mapping[str, Any]
    inside: tuple[_Slice, ...] = ()


@dataclass
class _Trajectory:
    """With its turns: (worker, asked, answered, step began, step ended), and whether they were measured."""

    id: str
    task: str
    outcome: str
    step: int
    started: float
    finished: float
    scored: float
    turns: list[tuple[str, float, float, float, float]]
    measured: bool
    arguments: dict[str, Any] = field(default_factory=dict)


def write_trace(run: Path, out: Path, steps: str = "") -> Written:
    """Write the trace of a run folder. ``steps``: "FIRST-LAST" or one number, counted from 1; "": all. Raises ConfigError."""
    first, last = _steps(steps)
    found = Written()
    events = read_events(run / "events.jsonl") if (run / "events.jsonl").is_file() else []
    if not events:
        raise ConfigError("run", str(run), "has no events, so there is nothing to trace")
    begin, end = _window(events, first, last, steps)
    trajectories = _trajectories(run, begin, end, found)
    rows = itertools.chain(_of_events(events, begin, end), _of_trajectories(trajectories))
    try:
        with (
            gzip.open(out, "wt", encoding="utf-8") if out.suffix == ".gz" else out.open("w", encoding="utf-8") as stream
        ):
            found.events = _write(stream, rows)
    except OSError as error:
        raise ConfigError("--out", str(out), f"cannot be written ({error.strerror})") from error
    return found


def _write(stream: TextIO, rows: Iterable[dict[str, Any]]) -> int:
    stream.write('{"displayTimeUnit":"ms","traceEvents":[\n')
    count = 0
    for row in rows:
        stream.write((",\n" if count else "") + json.dumps(row, sort_keys=True, separators=(",", ":")))
        count += 1
    stream.write("\n]}\n")
    return count


def _steps(text: str) -> tuple[int, int]:
    low, dash, high = text.partition("-")
    try:
        found = (int(low), int(high if dash else low)) if text else (0, 1 << 60)
    except ValueError:
        found = (1, 0)
    if found[0] > found[1]:
        raise ConfigError("--steps", text, "write it as FIRST-LAST, 10-20 for example")
    return found


def _window(events: Sequence[Mapping[str, Any]], first: int, last: int, asked: str) -> tuple[float, float]:
    """From the end of the step before ``first`` to that of ``last``. Raises ConfigError for a step that did not begin."""
    ends = [(int(event["step"]) + 1, float(event["t"])) for event in events if event["kind"] == "step"]
    done = max((number for number, _ in ends), default=0)
    if first > done + 1:
        raise ConfigError("--steps", asked, f"no such step yet: {done} are done")
    begin = max((t for number, t in ends if number < first), default=0.0)
    chosen = [t for number, t in ends if first <= number <= last]
    return begin, (max(chosen, default=begin) if any(number > last for number, _ in ends) else float("inf"))


# -- what was, from the log ----------------------------------------------------------------------------------------------


def _of_events(events: Sequence[Mapping[str, Any]], begin: float, end: float) -> Iterator[dict[str, Any]]:
    yield _named(_LOOP, "the loop", 0)
    tracks: dict[str, list[_Slice]] = {}
    for event in events:
        t = float(event.get("t", 0.0))
        if not begin <= t <= end:
            continue
        match event["kind"]:
            case "stage":
                arguments = {"step": event["step"]}
                arguments |= {"waiting_for": event["waiting_for"]} if event.get("waiting_for") else {}
                piece = _Slice(str(event["stage"]), float(event["start"]), float(event["end"]), arguments)
                tracks.setdefault(_TRACKS.get(piece.name, "other"), []).append(piece)
            case "worker":
                values = {"running": event["running"], "waiting": event["waiting"], "KV blocks used": event["kv_used"]}
                yield _counter(f"worker {event['name']}", t, values)
            case "step":
                yield _counter("reward", t, {"mean": event["reward_mean"]})
                yield _counter("version", t, {"version": event["version"]})
            case "borrowed" | "returned":
                reason = {"reason": str(event.get("reason", ""))}
                yield _instant(f"{event['kind']}: {event['worker']}", t, "borrowing", reason)
            case "scaled":
                yield _instant(f"{event['what']}: {event['worker']}", t, "scaling", {"engines": event["engines"]})
            case "alarm" | "fault" | "recovered":
                detail = {"detail": str(event.get("detail", ""))}
                yield _instant(f"{event['kind']}: {event.get('what', '')}", t, "incident", detail)
    order = dict.fromkeys(("startup", *_TRACKS.values(), "other"))
    number = 1
    for name in order:
        packed = _packed(tracks.get(name, []))
        for place, lane in enumerate(packed):
            yield _thread(_LOOP, number, name if len(packed) == 1 else f"{name} {place + 1}")
            for piece in lane:
                yield from _drawn(piece, _LOOP, number, "stage")
            number += 1


def _of_trajectories(found: Sequence[_Trajectory]) -> Iterator[dict[str, Any]]:
    whole, calls, scores = [], [], []
    workers: dict[str, list[_Slice]] = {}
    for item in found:
        inside = []
        for number, (worker, asked, answered, begun, ended) in enumerate(item.turns):
            arguments = {"trajectory": item.id, "turn": number, "measured": item.measured}
            generation = _Slice("generation", asked, answered, arguments | {"worker": worker or "not recorded"})
            call = _Slice("environment step", begun, ended, arguments)
            inside += [generation, call]
            calls.append(call)
            workers.setdefault(worker, []).append(_Slice(f"{item.id}/{number}", asked, answered, arguments))
        arguments = {"outcome": item.outcome, "task": item.task, "step": item.step, **item.arguments}
        whole.append(_Slice(item.id, item.started, item.finished, arguments, tuple(inside)))
        if item.scored > item.finished:
            scores.append(_Slice(item.id, item.finished, item.scored, {"trajectory": item.id}))
    yield from _process(_TRAJECTORIES, "trajectories", whole, "trajectory")
    yield from _process(_ENVIRONMENTS, "environment calls", calls, "environment")
    yield from _process(_REWARDS, "rewards", scores, "reward")
    for place, name in enumerate(sorted(workers)):
        known = f"worker {name}" if name else "workers (which one was not recorded)"
        yield from _process(_WORKERS + place, known, workers[name], "generation")


def _process(pid: int, name: str, found: Sequence[_Slice], kind: str) -> Iterator[dict[str, Any]]:
    """A process whose tracks are as many as slices overlap at once."""
    if not found:
        return
    yield _named(pid, name, pid)
    for number, lane in enumerate(_packed(found), start=1):
        yield _thread(pid, number, f"{name} {number}")
        for piece in lane:
            yield from _drawn(piece, pid, number, kind)


def _packed(found: Iterable[_Slice]) -> list[list[_Slice]]:
    """Tracks on which nothing overlaps: each slice goes to the lowest that is free."""
    lanes: list[list[_Slice]] = []
    free: list[int] = []
    busy: list[tuple[int, int]] = []  # (end, lane)
    for piece in sorted(found, key=lambda piece: (piece.start, piece.name)):
        while busy and busy[0][0] <= _us(piece.start):
            heapq.heappush(free, heapq.heappop(busy)[1])
        if not free:
            lanes.append([])
            free.append(len(lanes) - 1)
        lane = heapq.heappop(free)
        lanes[lane].append(piece)
        heapq.heappush(busy, (max(_us(piece.end), _us(piece.start) + 1), lane))
    return lanes


def _drawn(piece: _Slice, pid: int, tid: int, kind: str) -> Iterator[dict[str, Any]]:
    begin, end = _us(piece.start), max(_us(piece.end), _us(piece.start) + 1)
    common = {"ph": "X", "pid": pid, "tid": tid, "cat": kind}
    yield common | {"name": piece.name, "ts": begin, "dur": end - begin, "args": dict(piece.arguments)}
    at = begin
    for inner in piece.inside:  # in order, and within it, whatever rounding does
        start = min(max(_us(inner.start), at), end)
        at = min(max(_us(inner.end), start), end)
        yield common | {"name": inner.name, "ts": start, "dur": at - start, "args": dict(inner.arguments)}


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


def _named(pid: int, name: str, order: int) -> dict[str, Any]:
    return _thread(pid, 0, name) | {"name": "process_name", "args": {"name": name, "sort_index": order}}


def _thread(pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "ts": 0, "args": {"name": name}}


def _instant(name: str, t: float, kind: str, arguments: dict[str, str]) -> dict[str, Any]:
    return {"name": name, "ph": "i", "s": "g", "ts": _us(t), "pid": _LOOP, "tid": 0, "cat": kind, "args": arguments}


def _counter(name: str, t: float, values: Mapping[str, Any]) -> dict[str, Any]:
    known = {key: value for key, value in values.items() if value == value}  # JSON has no NaN
    return {"name": name, "ph": "C", "pid": _LOOP, "tid": 0, "ts": _us(t), "args": known}


# -- trajectories, from the store and the turns' file --------------------------------------------------------------------


def _trajectories(run: Path, begin: float, end: float, found: Written) -> list[_Trajectory]:
    folder = run / "trajectories"
    if not folder.is_dir():
        found.note = "there are no stored trajectories: the trace has the stages only"
        return []
    import pyarrow.compute as pc  # not needed for a run without a store

    from orchestrator.store import read_trajectories

    near = (pc.field("finished_at") >= begin) & (pc.field("started_at") <= end)
    heads = read_trajectories(folder, ["trajectory_id", "finished_at"], near)
    times = sorted(heads.column("finished_at").to_pylist())
    if len(times) > MOST:
        near = near & (pc.field("finished_at") > times[-MOST - 1])
        found.note = f"of {len(times):,} trajectories the newest {MOST:,} are in it; --steps chooses others"
    names = ["trajectory_id", "task", "outcome", "step", "started_at", "finished_at", "scored_at", "turns"]
    names += ["first_version", "generated_tokens", "total_reward"]
    measured = _measured(run / TURNS_FILE, begin)
    result = []
    for batch in read_trajectories(folder, names, near).to_batches(max_chunksize=512):
        result += [_of_row(row, measured.get) for row in batch.to_pylist()]
    result.sort(key=lambda item: (item.started, item.id))
    found.trajectories = len(result)
    return result


def _measured(file: Path, begin: float) -> dict[tuple[str, int], tuple[str, float, float, float, float]]:
    found = {}
    if file.is_file():
        with file.open(encoding="utf-8", errors="replace") as stream:
            for line in stream:
                try:
                    name, turn, worker, asked, answered, begun, ended = parse_turn(line)
                except ValueError:  # cut by a kill
                    continue
                if ended >= begin:
                    found[name, turn] = (worker, asked, answered, begun, ended)
    return found


_Known = Callable[[tuple[str, int]], tuple[str, float, float, float, float] | None]


def _of_row(row: Mapping[str, Any], measured: _Known) -> _Trajectory:
    name, started, finished = str(row["trajectory_id"]), float(row["started_at"]), float(row["finished_at"])
    turns = row["turns"] or []
    known = [measured((name, place)) for place in range(len(turns))]
    exact = [turn for turn in known if turn is not None]
    if len(exact) != len(turns):
        at, exact = finished, []
        for turn in reversed(turns):
            step, generation = float(turn["environment_seconds"]), float(turn["generate_seconds"])
            begun = max(started, at - step)
            asked = max(started, begun - generation)
            exact.insert(0, ("", asked, begun, begun, at))
            at = asked
    return _Trajectory(
        id=name,
        task=str(row["task"]),
        outcome=str(row["outcome"]),
        step=int(row["step"]) + 1,
        started=started,
        finished=max(started, finished),
        scored=float(row["scored_at"] or 0.0),
        turns=exact,
        measured=all(turn is not None for turn in known),
        arguments={
            "version": row["first_version"],
            "generated_tokens": row["generated_tokens"],
            "reward": row["total_reward"] if row["total_reward"] == row["total_reward"] else None,
        },
    )
