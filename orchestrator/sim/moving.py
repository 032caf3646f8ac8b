"""Simulated workers whose requests may go on elsewhere with the tokens that they have.

Guarantee: such a request says there what it would have said where it began, and the audit hears of the whole turn, once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from orchestrator.api import VersionSpans, merge_spans
from orchestrator.config import Config
from orchestrator.sim import batch
from orchestrator.sim.costs import EngineCosts
from orchestrator.sim.relay import SimWeights
from orchestrator.sim.speech import Speech
from orchestrator.sim.traces import Traces
from orchestrator.sim.worker import SimWorker

Said = Callable[[str, int, VersionSpans], None]


class Moves:
    """What all workers of a life know of the turns that moved between them: where each began, and who has said what of it."""

    def __init__(self) -> None:
        self.opened: dict[tuple[str, int], int] = {}  # (trajectory, turn) -> length of the context before the response
        self.parts: dict[tuple[str, int], list[tuple[int, int]]] = {}  # version spans of what was said elsewhere


class Continuing(Speech):
    """What the policy says in a turn, also where another worker has said a part of it."""

    def __init__(self, whole: Speech, moves: Moves) -> None:
        self._whole = whole
        self._moves = moves
        self.most = whole.most

    def response(self, context: Sequence[int], trajectory_id: str, turn: int, limit: int) -> tuple[int, ...]:
        """What is left to say after ``context``."""
        said = len(context) - self._moves.opened.setdefault((trajectory_id, turn), len(context))
        return self._whole.response(context, trajectory_id, turn, limit + said)[said:]


class MovingWorker(SimWorker):
    """A SimWorker; all of a life that requests move between have the same ``moves``."""

    def __init__(
        self,
        name: str,
        config: Config,
        weights: SimWeights,
        said: Said | None = None,
        traces: Traces | None = None,
        hardware: str = "",
        speech: Speech | None = None,
        moves: Moves | None = None,
        costs: EngineCosts | None = None,
    ) -> None:
        self._moves = moves or Moves()
        tell = said

        def whole(trajectory_id: str, turn: int, versions: VersionSpans) -> None:
            if tell is not None:
                before = self._moves.parts.pop((trajectory_id, turn), [])
                tell(trajectory_id, turn, merge_spans([*before, *versions]))

        speech = Continuing(speech or Speech(config, traces), self._moves)
        super().__init__(name, config, weights, whole, traces, hardware, speech, costs)

    def _finish(self, sequence: batch.Sequence, reason: str, error: str = "") -> None:
        super()._finish(sequence, reason, error)
        if reason == "abort":
            request = sequence.request
            parts = self._moves.parts.setdefault((request.trajectory_id, request.turn), [])
            parts.extend(self._finished[-1].versions)
