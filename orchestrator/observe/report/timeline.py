"""Who did what when, and who waited for whom: the log's stages as three lanes of pieces. Pure; times in seconds.

* Lane ``trainer``: trains, publishes, checkpoints; computes gradients of groups that it was fed before their batch was
  complete; otherwise it waits, and the piece says for what.
* Lane ``rollout``: may generate; or stands still, and the piece says for what. In async mode it generates from the first
  ``get_batch`` to the last, but for the weight updates; in modes that carry nothing over an update (``sync``, ``sync_plus``,
  ``one_off``) only while a batch is collected.
* Lane ``weights``: publications and updates.

Guarantee: the pieces of a lane never overlap, so shares of time add up.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from orchestrator.observe.event_records import Stage, Step
from orchestrator.policies.batching.coordination_modes import MODES

LANES = ("rollout", "trainer", "weights")
_WORK = ("get_batch", "feed", "train_step", "publish", "checkpoint")
_STANDSTILL = ("suspend", "update", "resume")  # no token is generated
_WEIGHT_STAGES = ("prepare", *_STANDSTILL)  # while ``prepare`` fetches, in async mode the workers generate

# state -> (what it says, colour class, whether it is waiting). Waiting is drawn in the colour of what is waited for.
STATES: dict[str, tuple[str, str, bool]] = {
    "generate": ("generating", "c1", False),
    "train": ("training", "c2", False),
    "stream": ("training on the coming batch", "c6", False),
    "publish": ("publishing weights", "c7", False),
    "update": ("loading weights", "c3", False),
    "checkpoint": ("checkpoint", "c4", False),
    "evaluate": ("evaluation", "c5", False),
    "wait_rollout": ("waiting for trajectories", "c1", True),
    "wait_training": ("waiting for the trainer", "c2", True),
    "wait_weights": ("waiting for the weight update", "c3", True),
    "wait_evaluation": ("waiting for the evaluation", "c5", True),
    "wait_store": ("waiting for the trajectory store", "c4", True),
    "other": ("other", "c0", True),
}


@dataclass(frozen=True)
class Piece:
    """A stretch of one lane in one state."""

    state: str
    start: float
    end: float
    note: str = ""  # the stage's own word for what it waited for

    @property
    def seconds(self) -> float:
        """How long."""
        return self.end - self.start


@dataclass(frozen=True)
class Window:
    """A stretch of the run to look at: ``first`` to ``last`` are step numbers."""

    start: float
    end: float
    first: int
    last: int


def lanes_of(stages: Sequence[Stage], mode: str, starts: Sequence[float]) -> dict[str, list[Piece]]:
    """The three lanes, from the first batch on. ``starts``: when the run was started, and resumed."""
    spans = _spans(stages, starts)
    return {
        "rollout": _sweep(_rollout(stages, mode, spans), spans),
        "trainer": _sweep(_in(_TRAINER, stages), spans),
        "weights": _sweep(_in(_WEIGHTS, stages), []),
    }


def shares(pieces: Iterable[Piece]) -> dict[str, float]:
    """Seconds by state, largest first within work and within waiting, work first."""
    totals: dict[str, float] = {}
    for piece in pieces:
        totals[piece.state] = totals.get(piece.state, 0.0) + piece.seconds
    return dict(sorted(totals.items(), key=lambda item: (STATES[item[0]][2], -item[1])))


def clip(pieces: Iterable[Piece], start: float, end: float) -> list[Piece]:
    """What of the pieces lies within a window."""
    return [
        Piece(piece.state, max(piece.start, start), min(piece.end, end), piece.note)
        for piece in pieces
        if piece.end > start and piece.start < end
    ]


def typical_window(steps: Sequence[Step], count: int = 4) -> Window | None:
    """``count`` consecutive steps whose durations are closest to the median; None before the first step."""
    if not steps:
        return None
    count = min(count, len(steps))
    middle = median(step.period for step in steps)

    def oddness(first: int) -> float:
        return sum(abs(step.period - middle) for step in steps[first : first + count])

    first = min(range(len(steps) - count + 1), key=lambda index: (oddness(index), -index))
    chosen = steps[first : first + count]
    return Window(chosen[0].t - chosen[0].period, chosen[-1].t, chosen[0].number, chosen[-1].number)


def per_step(steps: list[Step], pieces: list[Piece]) -> list[tuple[Step, dict[str, float]]]:
    """For each step, the seconds by state of one lane between the step before it and itself."""
    starts, ends = [piece.start for piece in pieces], [piece.end for piece in pieces]
    result = []
    for step in steps:
        begin = step.t - step.period
        near = pieces[bisect_right(ends, begin) : bisect_left(starts, step.t)]
        result.append((step, shares(clip(near, begin, step.t))))
    return result


def _spans(stages: Sequence[Stage], starts: Sequence[float]) -> list[tuple[float, float]]:
    """For each start of the run: from its first ``get_batch`` to its last stage but the final evaluation."""
    bounds = [*starts[1:], float("inf")]
    spans = []
    begin = float("-inf")
    for bound in bounds:
        inside = [stage for stage in stages if begin <= stage.start < bound]
        first = min((stage.start for stage in inside if stage.name == "get_batch"), default=None)
        last = max((stage.end for stage in inside if stage.name in _WORK), default=0.0)
        if first is not None:
            spans.append((first, max(first, last)))
        begin = bound
    return spans


# What a lane does during a stage.
_WAIT_TRAINING = dict.fromkeys(("train_step", "publish", "checkpoint"), "wait_training")
_TRAINER = {
    "train_step": "train", "feed": "stream", "publish": "publish", "checkpoint": "checkpoint", "get_batch": "wait_rollout",
    "wait_store": "wait_store",
    "evaluate": "wait_evaluation", **dict.fromkeys((*_WEIGHT_STAGES, "wait_weights"), "wait_weights"),
}  # fmt: skip
_WEIGHTS = {"publish": "publish", **dict.fromkeys(_WEIGHT_STAGES, "update")}
_BATCHWISE = {
    **dict.fromkeys(_WEIGHT_STAGES, "wait_weights"), "get_batch": "generate", "evaluate": "evaluate", "wait_store": "wait_store",
    **_WAIT_TRAINING,
}  # fmt: skip
_CARRYING = {**dict.fromkeys(_STANDSTILL, "wait_weights"), "evaluate": "evaluate", **_WAIT_TRAINING}


def _in(states: Mapping[str, str], stages: Sequence[Stage]) -> list[tuple[str, Stage]]:
    return [(states[stage.name], stage) for stage in stages if stage.name in states]


def _rollout(stages: Sequence[Stage], mode: str, spans: Sequence[tuple[float, float]]) -> list[tuple[str, Stage]]:
    if mode in MODES and not MODES[mode].carries_over:
        return _in(_BATCHWISE, stages)
    found = _in(_CARRYING, stages)
    collecting = [stage for stage in stages if stage.name == "get_batch"]
    for start, end in spans:
        inside = [stage for stage in collecting if start <= stage.start <= end]
        found.append(("generate", Stage("generate", inside[0].step, start, inside[-1].end)))
    return found


# When several stages cover the same moment, the first of these that does says what the lane is doing: what stops a lane
# goes before what it could do, its own work before waiting, and the wait for the more specific thing before the other.
_ORDER = (
    "train", "stream", "publish", "update", "checkpoint", "wait_weights", "generate", "evaluate", "wait_evaluation",
    "wait_store", "wait_rollout", "wait_training", "other",
)  # fmt: skip


def _sweep(found: list[tuple[str, Stage]], spans: list[tuple[float, float]]) -> list[Piece]:
    """Flatten overlapping stages into a lane. With ``spans``, gaps within them are ``other`` and the rest is cut off."""
    intervals = [(stage.start, stage.end, state, stage.waiting_for) for state, stage in found]
    intervals += [(start, end, "other", "") for start, end in spans]
    edges: list[tuple[float, int, int]] = []
    for number, (start, end, _, _) in enumerate(intervals):
        if end > start:
            edges += [(start, 1, number), (end, 0, number)]
    edges.sort()
    active: dict[str, dict[int, None]] = {state: {} for state in _ORDER}
    pieces: list[Piece] = []
    previous = 0.0
    for time, opens, number in edges:
        if time > previous and (not spans or active["other"]):
            state = next((name for name in _ORDER if active[name]), None)
            if state is not None:
                note = intervals[next(iter(active[state]))][3]
                last = pieces[-1] if pieces else None
                if last is not None and last.state == state and last.note == note and last.end == previous:
                    pieces[-1] = Piece(state, last.start, time, note)
                else:
                    pieces.append(Piece(state, previous, time, note))
        previous = time
        if opens:
            active[intervals[number][2]][number] = None
        else:
            active[intervals[number][2]].pop(number, None)
    return pieces
