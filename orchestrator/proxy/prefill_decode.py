"""Prefill and decode of a turn on workers of two classes (RollArt 6.3): xPyD, with the KV copied in between.

A turn of a task that is served so is two requests: its context and one token on a worker of the prefill class, then the rest on
one of the decode class, which gets the KV of the context first (:mod:`orchestrator.proxy.kv_moves`). A trajectory stays with its
worker in each class while that lives, so of the next turn only what is new travels: the last turn's tokens to the prefill
worker, the observation back.

Guarantees: a turn ends in exactly one completion, as with any proxy; under greedy sampling it is the one that a single worker
would have given (in the same arithmetic). KV that does not come is computed where it is needed. When no worker of a class is
there, turns are served whole by the others, and none is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from orchestrator.api import Completion, GenerationRequest
from orchestrator.config.rollout_keys import DisaggregationSection
from orchestrator.policies.routing.turn_routing import DECODE, PREFILL
from orchestrator.proxy.gateway import LLMProxy
from orchestrator.proxy.resume_turn import joined_completion, remaining_request

_CUT = ("abort", "error")  # finish reasons after which nothing goes on


class PrefillDecode:
    """A :class:`~orchestrator.proxy.gateway.TurnSplit`: the turns of some tasks in two parts, as the section of the config says.
    ``served`` and ``whole`` count the turns."""

    def __init__(self, proxy: LLMProxy, settings: DisaggregationSection) -> None:
        self._proxy = proxy
        self._settings = settings
        self._tasks: dict[str, str] = {}  # a part's request -> its task
        self.served = self.whole = 0

    async def generate(self, request: GenerationRequest) -> Completion:
        """See the protocol."""
        self.served += 1
        sampling = replace(request.sampling, max_tokens=1)
        before = replace(request, request_id=f"{request.request_id}~p", sampling=sampling)
        first = await self._part(before, PREFILL, DECODE)
        following = None if first.finish_reason in _CUT else remaining_request(request, [first], 1)
        if following is None:
            whole = joined_completion(request, [first], None)
            cut = first.finish_reason in _CUT
            return replace(whole, finish_reason=first.finish_reason, error=first.error) if cut else whole
        return joined_completion(request, [first], await self._part(following, DECODE, PREFILL))

    async def _part(self, request: GenerationRequest, phase: str, other: str) -> Completion:
        """One of the two, with the KV that the worker of the other phase has."""
        self._tasks[request.request_id] = request.task
        proxy = self._proxy
        proxy.kv.sources[request.request_id] = proxy.router.prefix_holder(request.trajectory_id, other)
        try:
            # its class is gone for good
            part = replace(request, task=phase) if proxy.router.can_serve(phase) else request
            return await proxy.serve(part)
        finally:
            del self._tasks[request.request_id]
            proxy.kv.sources.pop(request.request_id, None)

    def applies(self, request: GenerationRequest) -> bool:
        """See the protocol."""
        settings, router = self._settings, self._proxy.router
        applies = (
            (not settings.tasks or request.task in settings.tasks)
            and len(request.token_ids) >= settings.min_tokens
            and request.sampling.max_tokens > 1
            and router.has_phase(PREFILL)
            and router.has_phase(DECODE)
        )
        self.whole += not applies
        return applies

    def take_stranded(self, requests: Sequence[str]) -> Sequence[str]:
        """No worker of a class is left: these turns go on anywhere."""
        left = []
        for name in requests:
            pending, task = self._proxy.pending[name], self._tasks.get(name)
            if task is None:
                left.append(name)
                continue
            pending.request = replace(pending.request, task=task)
            self._proxy.router.queue_turn(name, pending.request.trajectory_id, task)
        return left
