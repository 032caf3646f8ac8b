"""Simulated workers of turns that are served in two parts (RollArt 6.3): :mod:`orchestrator.disaggregation` on virtual time.

The proxy is the production one: it sends a turn's context and one token to a worker of the prefill class, has the KV copied to
one of the decode class (:meth:`SimWorker.fetch_kv`, at the link's rate), and the rest of the turn there. What is here is that
the two say together what one would have said.

Guarantees: the first token of a turn does not depend on how many were asked for; the part that goes on says what follows it;
the audit hears of a turn once it is whole, with the versions of both parts. A turn whose class is gone and that one worker
serves whole is like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from orchestrator.api import ConfigError, GenerationRequest, VersionSpans, merge_spans
from orchestrator.config import Config
from orchestrator.fleet import plan
from orchestrator.sim import batch
from orchestrator.sim.cluster import fleet
from orchestrator.sim.costs import EngineCosts
from orchestrator.sim.relay import SimWeights
from orchestrator.sim.speech import Speech
from orchestrator.sim.traces import Traces
from orchestrator.sim.worker import SimWorker

_FIRST, _FOLLOWING = "~p", "~1"  # how the ids of the two parts end, see orchestrator.disaggregation
Spans = tuple[tuple[int, int], ...]


class PartedSpeech(Speech):
    """What a policy says whose first token another engine draws."""

    def response(self, context: Sequence[int], trajectory_id: str, turn: int, limit: int) -> tuple[int, ...]:
        """See :class:`Speech`. However short ``limit`` is, the first token is that of the longest response."""
        whole = super().response(context, trajectory_id, turn, limit)
        first = super().response(context, trajectory_id, turn, self.most)[0]
        return (first, *whole[1:])


def speech_of(config: Config, traces: Traces | None) -> Speech:
    """What the policy of a run says."""
    return (PartedSpeech if config.rollout.disaggregation.enabled else Speech)(config, traces)


def check_disaggregation(config: Config) -> None:
    """Raises ConfigError where the two parts of a turn cannot be played."""
    if not config.rollout.disaggregation.enabled:
        return
    if config.sim.grain > 1:
        fix = (
            "a turn's first token is made apart, and would stand for several: set it to 1, or leave out disaggregation"
        )
        raise ConfigError("sim.grain", config.sim.grain, fix)
    classes = fleet(config)
    names, borrowed = [f"sim-{index}" for index in range(len(classes))], [False] * len(classes)
    plan(config.rollout.routing, names, classes, borrowed, config.rollout.disaggregation)


class PartsWorker(SimWorker):
    """A SimWorker of either class. All of a life have the same ``firsts``: what first parts were said by, turn by turn; one that
    was made again, as its worker died or its answer was lost, is there more than once."""

    def __init__(
        self,
        name: str,
        config: Config,
        weights: SimWeights,
        said: Callable[[str, int, VersionSpans], None] | None = None,
        traces: Traces | None = None,
        hardware: str = "",
        speech: Speech | None = None,
        costs: EngineCosts | None = None,
        *,
        firsts: dict[tuple[str, int], dict[Spans, None]],
    ) -> None:
        self._firsts = firsts
        speech = speech or PartedSpeech(config, traces)
        super().__init__(name, config, weights, said, traces, hardware, speech, costs)

    def _says(self, request: GenerationRequest, limit: int) -> tuple[int, ...]:
        if not request.request_id.endswith(_FOLLOWING):
            return super()._says(request, limit)
        context, most = request.token_ids[:-1], min(limit + 1, self._speech.most)
        return self._speech.response(context, request.trajectory_id, request.turn, most)[1:]

    def _tell(self, sequence: batch.Sequence, versions: VersionSpans) -> None:
        request = sequence.request
        turn = request.trajectory_id, request.turn
        if request.request_id.endswith(_FIRST):
            self._firsts.setdefault(turn, {})[versions] = None
        if not request.request_id.endswith(_FOLLOWING):
            super()._tell(sequence, versions)  # of a first part: it is all of the turn when it ends it
            return
        for first in self._firsts.get(turn, {}):
            super()._tell(sequence, merge_spans((*first, *versions)))


def disaggregated(config: Config) -> Callable[..., SimWorker] | None:
    """Makes the workers of a life whose turns are served in two parts; None: they are not."""
    return partial(PartsWorker, firsts={}) if config.rollout.disaggregation.enabled else None
