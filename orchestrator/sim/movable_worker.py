"""Simulated workers whose requests may go on elsewhere with the tokens that they have.

Guarantee: such a request says there what it would have said where it began, and the audit hears of the whole turn, once.
"""

from __future__ import annotations

from collections.abc import Callable

from orchestrator.api import GenerationRequest, VersionSpans, merge_spans
from orchestrator.config import Config
from orchestrator.sim import engine_batch
from orchestrator.sim.cost_model import EngineCosts
from orchestrator.sim.recorded_traces import EpisodeTraces
from orchestrator.sim.simulated_relay import SimWeights
from orchestrator.sim.simulated_speech import Speech
from orchestrator.sim.simulated_worker import SimWorker

FIRST = "~p"  # how the id of a turn's first part ends, see orchestrator.proxy.prefill_decode
Spans = tuple[tuple[int, int], ...]
Said = Callable[[str, int, VersionSpans], None]


class TurnMoves:
    """What all workers of a life know of the turns that moved between them: where each began, and who has said what of it. A
    part that was lost on its way, and said again by another version, is there twice."""

    def __init__(self) -> None:
        self.opened: dict[str, int] = {}  # turn -> length of the context before the response
        self._parts: dict[str, dict[tuple[int, Spans], None]] = {}  # turn -> (tokens before it, versions) of each part

    def record_part(self, turn: str, before: int, versions: VersionSpans) -> None:
        """A part of a turn was said by a worker that does not go on with it."""
        self._parts.setdefault(turn, {})[before, versions] = None

    def histories(self, turn: str, tokens: int) -> list[Spans]:
        """Who may have said the first ``tokens`` of a turn: versions of parts that follow one another."""
        found: dict[int, dict[Spans, None]] = {0: {(): None}}
        for before, versions in sorted(self._parts.get(turn, {})):
            after = before + sum(count for _, count in versions)
            for history in found.get(before, {}):
                found.setdefault(after, {})[(*history, *versions)] = None
        return list(found.get(tokens, {}))


class MovableSimWorker(SimWorker):
    """A SimWorker; all of a life that requests move between have the same ``moves``."""

    def __init__(
        self,
        name: str,
        config: Config,
        weights: SimWeights,
        said: Said | None = None,
        traces: EpisodeTraces | None = None,
        hardware: str = "",
        speech: Speech | None = None,
        moves: TurnMoves | None = None,
        costs: EngineCosts | None = None,
    ) -> None:
        self._moves = moves or TurnMoves()
        super().__init__(name, config, weights, said, traces, hardware, speech, costs)

    def _says(self, request: GenerationRequest, limit: int) -> tuple[int, ...]:
        """What is left to say."""
        opened = self._moves.opened.setdefault(_turn(request), len(request.token_ids))
        said, context = len(request.token_ids) - opened, request.token_ids[:opened]
        most = min(limit + said, self._speech.most)
        return self._speech.response(context, request.trajectory_id, request.turn, most)[said:]

    def _tell(self, sequence: engine_batch.EngineSequence, versions: VersionSpans) -> None:
        """Of the whole turn."""
        for history in self._moves.histories(_turn(sequence.request), self._before(sequence.request)):
            super()._tell(sequence, merge_spans((*history, *versions)))

    def _finish(self, sequence: engine_batch.EngineSequence, reason: str, error: str = "") -> None:
        super()._finish(sequence, reason, error)
        request = sequence.request
        if sequence.made and (reason == "abort" or request.request_id.endswith(FIRST)):
            self._moves.record_part(_turn(request), self._before(request), self._finished[-1].versions)

    def _before(self, request: GenerationRequest) -> int:
        """Tokens of the turn that others have said."""
        return len(request.token_ids) - self._moves.opened[_turn(request)]


def _turn(request: GenerationRequest) -> str:
    """The id of the request that asked for the turn, whatever part of it this one is (:mod:`orchestrator.proxy.resume_turn`)."""
    return request.request_id.partition("~")[0]
