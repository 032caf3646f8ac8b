"""A turn that one worker began and another goes on with: its tokens are kept, its KV is recomputed (RollPacker 4.4).

Pure functions. Guarantees: what the parts say together is one completion of the original request, whose tokens, log-probs
and version spans have one length; with greedy sampling it is what one worker would have said (in the same arithmetic).
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace

from orchestrator.api import Completion, CompletionTiming, GenerationRequest, TokenSequence, merge_spans
from orchestrator.transfer.turns.routed_experts import joined_experts


def remaining_request(request: GenerationRequest, parts: Sequence[Completion], moves: int) -> GenerationRequest | None:
    """The request that goes on where ``parts`` ended; None: they are all of it. ``moves`` makes its id a new one: a worker
    ignores an id that it has seen. A seed is replaced by one of its own, else the same draws would be made again."""
    if not moves:
        return request
    tokens = tuple(token for part in parts for token in part.token_ids)
    sampling = request.sampling
    if len(tokens) >= sampling.max_tokens or (tokens and tokens[-1] in sampling.stop_token_ids):
        return None
    seed = sampling.seed
    if seed is not None and tokens:
        seed = zlib.crc32(f"{seed}/{len(tokens)}".encode())
    known = joined_experts([part.experts for part in parts if part.token_ids])
    return replace(
        request,
        request_id=f"{request.request_id}~{moves}",
        experts_from=request.experts_from if known is None else known.end,
        token_ids=TokenSequence.of(request.token_ids) + tokens,
        sampling=replace(sampling, max_tokens=sampling.max_tokens - len(tokens), seed=seed),
    )


def joined_completion(request: GenerationRequest, parts: Sequence[Completion], last: Completion | None) -> Completion:
    """One completion of ``request``. ``last`` None: the parts are all of it."""
    every = [*parts, *([last] if last is not None else [])]
    tokens = tuple(token for part in every for token in part.token_ids)
    if last is not None:
        reason = last.finish_reason
    else:
        reason = "stop" if tokens and tokens[-1] in request.sampling.stop_token_ids else "length"
    return Completion(
        request.request_id,
        tokens,
        tuple(value for part in every for value in part.logprobs),
        merge_spans(span for part in every for span in part.versions),
        reason,
        _timing(every, len(tokens)),
        last.error if last is not None else "",
        joined_experts([part.experts for part in every if part.token_ids]),
    )


def _timing(parts: Sequence[Completion], tokens: int) -> CompletionTiming:
    """Waiting for the second worker counts as running: the turn had begun."""
    first, others = parts[0].timing, [part.timing for part in parts[1:]]
    running = first.running + sum(timing.queued + timing.running for timing in others)
    before, first_token = 0.0, 0.0
    for part in parts:
        if part.token_ids:
            first_token = before + part.timing.first_token
            break
        before += part.timing.queued + part.timing.running
    per_token = (first.queued + running - first_token) / (tokens - 1) if tokens > 1 else 0.0
    return CompletionTiming(first.queued, running, first_token, max(0.0, per_token))
