"""Turns and completions as bytes: a msgpack header, then plain numbers.

Guarantees: a record that crosses comes back equal, log-probs to the last bit (of an error's text its beginning); a message of
another form is one error, found before anything of it is used, and costs no more than its own length: ValueError of
:func:`decode_completions`, CommandError ``invalid_request`` of :func:`decode_turns`, which names the field.

Both forms: four bytes with the header's length, the header, token ids as int32 one record after another, and of completions
their log-probs as float64, then their routed experts; all little-endian. Requests are rows of :class:`SentTurn`, completions
of :class:`Completion`.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import msgpack
import numpy as np

from orchestrator.api import (
    CommandError,
    Completion,
    CompletionTiming,
    GenerationRequest,
    RoutedExperts,
    Sampling,
    TokenSequence,
)
from orchestrator.api import http as wire
from orchestrator.api.errors import shown
from orchestrator.api.tokens import DIGEST_BYTES, TOKEN_BYTES

LOGPROB_BYTES = 8
_LENGTH = struct.Struct("<I")
_INT64 = 1 << 63
_ROW, _SAMPLING, _COMPLETION, _EXPERTS = 14, 5, 7, 5  # fields


@dataclass(frozen=True, slots=True)
class SentTurn:
    """A request as it travels: ``request.token_ids`` are only those after the first ``base`` tokens of its context, which have
    the digest ``base_digest`` (``base`` 0: it is whole); ``digest`` is that of all of it."""

    request: GenerationRequest
    base: int
    base_digest: bytes
    digest: bytes


@dataclass(frozen=True, slots=True)
class TurnMessage:
    """``ended``: trajectories whose contexts are of no use any more."""

    turns: tuple[SentTurn, ...]
    ended: tuple[str, ...] = ()


def encode_turns(
    turns: Sequence[tuple[GenerationRequest, TokenSequence, TokenSequence | None]], ended: Sequence[str] = ()
) -> bytes:
    """Of (request, its context, the beginning of it that the worker has) each."""
    rows, tokens = [], []
    for request, context, base in turns:
        have = 0 if base is None else len(base)
        sampling = request.sampling
        rows.append(
            (
                request.request_id,
                request.trajectory_id,
                request.turn,
                (
                    sampling.max_tokens,
                    sampling.temperature,
                    sampling.top_p,
                    sampling.stop_token_ids,
                    sampling.seed,
                ),
                request.task,
                request.priority,
                request.predicted_tokens,
                request.deadline,
                request.group_id,
                have,
                b"" if base is None else base.digest,
                len(context) - have,
                context.digest,
                request.experts_from,
            )
        )
        tokens.append(context.bytes_after(have))
    return _message({"turns": rows, "ended": ended}, tokens)


def decode_turns(data: bytes) -> TurnMessage:
    """The inverse. Raises CommandError ``invalid_request``."""
    try:
        header, place = _header(data, ("turns", "ended"))
        rows = _list(header["turns"], wire.MAX_REQUESTS, "turns")
        turns = []
        for number, row in enumerate(rows):
            count = _row(row, _ROW, "a turn")[11]
            end = place + TOKEN_BYTES * _whole(count, 0, wire.MAX_PROMPT_TOKENS, f"turns.{number}.count")
            if end > len(data):
                raise ValueError(f"turns.{number}: {count} tokens are named, fewer are there")
            try:
                turns.append(_turn(row, TokenSequence.from_bytes(data[place:end])))
            except ValueError as error:
                raise ValueError(f"turns.{number}.{error}") from None
            place = end
        if place != len(data):
            raise ValueError(f"{len(data) - place} bytes are behind the last turn")
        ended = tuple(_name(name, "ended") for name in _list(header["ended"], wire.MAX_IDS, "ended"))
    except ValueError as error:
        raise CommandError("invalid_request", f"turns: {error}") from error
    return TurnMessage(tuple(turns), ended)


def _turn(row: Sequence[Any], new: TokenSequence) -> SentTurn:
    (
        request_id,
        trajectory,
        turn,
        sampled,
        task,
        priority,
        predicted,
        deadline,
        group,
        base,
        before,
        count,
        after,
        routed,
    ) = row
    heat = _row(sampled, _SAMPLING, "sampling")
    whole = _whole(base, 0, wire.MAX_PROMPT_TOKENS - count, "base")
    if type(before) is not bytes or len(before) != (DIGEST_BYTES if whole else 0):
        raise ValueError("base_digest: is no digest of it")
    if type(after) is not bytes or len(after) != DIGEST_BYTES:
        raise ValueError("digest: is none")
    request = GenerationRequest(
        _name(request_id, "request_id"),
        _name(trajectory, "trajectory_id"),
        _whole(turn, 0, _INT64 - 1, "turn"),
        new,
        Sampling(
            _whole(heat[0], 1, wire.MAX_PROMPT_TOKENS, "sampling.max_tokens"),
            _number(heat[1], 0.0, 100.0, "sampling.temperature"),
            _number(heat[2], 5e-324, 1.0, "sampling.top_p"),
            tuple(
                _whole(token, 0, _INT64 - 1, "sampling.stop_token_ids")
                for token in _list(heat[3], wire.MAX_STOP_TOKENS, "sampling.stop_token_ids")
            ),
            None if heat[4] is None else _whole(heat[4], -_INT64, _INT64 - 1, "sampling.seed"),
        ),
        _text(task, "task"),
        _whole(priority, -_INT64, _INT64 - 1, "priority"),
        None if predicted is None else _whole(predicted, 0, _INT64 - 1, "predicted_tokens"),
        None if deadline is None else _number(deadline, -_LARGEST, _LARGEST, "deadline"),
        _text(group, "group_id"),
        _whole(routed, 0, wire.MAX_PROMPT_TOKENS, "experts_from"),
    )
    return SentTurn(request, whole, before, after)


def encode_completions(number: int, completions: Sequence[Completion]) -> bytes:
    """A batch of them, and its number."""
    rows, tokens, logprobs, experts = [], [], [], []
    for item in completions:
        timing, chosen = item.timing, item.experts
        rows.append(
            (
                item.request_id,
                len(item.token_ids),
                item.versions,
                item.finish_reason,
                (timing.queued, timing.running, timing.first_token, timing.per_token),
                item.error[: wire.MAX_ERROR_LENGTH],
                chosen and (chosen.first, chosen.layers, chosen.choices, chosen.width, len(chosen.data)),
            )
        )
        experts.append(chosen.data if chosen else b"")
        tokens.append(np.asarray(item.token_ids, "<i4").tobytes())
        logprobs.append(np.asarray(item.logprobs, "<f8").tobytes())
    return _message({"sequence": number, "completions": rows}, tokens, logprobs, experts)


def decode_completions(data: bytes, *, served: bool = False) -> tuple[int, list[Completion]]:
    """The inverse. Raises ValueError: also for numbers that are not finite, and for tokens, log-probs and versions that do not
    belong together. ``served``: it is a server's answer, which has so many tokens only where a single completion has them."""
    header, place = _header(data, ("sequence", "completions"))
    number = _whole(header["sequence"], 0, _INT64 - 1, "sequence")
    rows = _list(header["completions"], wire.MAX_COMPLETIONS, "completions")
    counts = [_whole(_row(row, _COMPLETION, "a completion")[1], 0, len(data), "count") for row in rows]
    total = sum(counts)
    if served and total > (wire.MAX_ANSWER_TOKENS if len(rows) > 1 else wire.MAX_PROMPT_TOKENS):
        raise ValueError(f"{total} tokens of {len(rows)} completions are in one answer")
    routed = place + total * (TOKEN_BYTES + LOGPROB_BYTES)
    chosen = [_experts(row[6], routed, len(data)) for row in rows]
    if len(data) != routed + sum(form[4] for form in chosen if form):
        raise ValueError(f"{len(data) - place} bytes are there, not those of {total} tokens and their experts")
    tokens: list[int] = np.frombuffer(data, "<i4", total, place).tolist()
    values = np.frombuffer(data, "<f8", total, place + TOKEN_BYTES * total)
    if not np.isfinite(values).all():
        raise ValueError("a log-prob is not finite")
    logprobs: list[float] = values.tolist()
    found, begin = [], 0
    for row, count, form in zip(rows, counts, chosen, strict=True):
        end, experts = begin + count, None
        if form:
            experts = RoutedExperts(*form[:4], data[routed : routed + form[4]])
            routed += form[4]
        found.append(_completion(row, tuple(tokens[begin:end]), tuple(logprobs[begin:end]), experts))
        begin = end
    return number, found


def _experts(form: Any, place: int, size: int) -> tuple[int, int, int, int, int] | None:
    """(first token, layers, choices, bytes of a number, bytes), which fit a message of ``size`` bytes from ``place`` on."""
    if form is None:
        return None
    first, layers, choices, width, length = (
        _whole(value, 0, _INT64 - 1, "experts") for value in _row(form, _EXPERTS, "experts")
    )
    stride = layers * choices * width
    if width not in (1, 2) or not stride or not 0 < length <= size - place or length % stride:
        raise ValueError(f"experts: {length} bytes of {layers} layers, {choices} choices of {width} bytes")
    if first > wire.MAX_PROMPT_TOKENS:
        raise ValueError(f"experts: of token {first} on")
    return first, layers, choices, width, length


def _completion(
    row: Sequence[Any], tokens: tuple[int, ...], logprobs: tuple[float, ...], experts: RoutedExperts | None
) -> Completion:
    name, count, versions, reason, timing, error, _ = row
    spans = []
    for span in _list(versions, max(1, count), "versions"):
        version, made = _row(span, 2, "a version's span")
        spans.append((_whole(version, -_INT64, _INT64 - 1, "version"), _whole(made, 0, count, "a version's tokens")))
    if sum(made for _, made in spans) != count:
        raise ValueError(f"completion {shown(name, 100)}: tokens and versions differ in number")
    times = [_number(value, -_LARGEST, _LARGEST, "timing") for value in _row(timing, 4, "timing")]
    return Completion(
        _name(name, "request_id"),
        tokens,
        logprobs,
        tuple(spans),
        _text(reason, "finish_reason"),
        CompletionTiming(*times),
        _text(error, "error", wire.MAX_ERROR_LENGTH),
        experts,
    )


def _message(header: Mapping[str, Any], *parts: Sequence[bytes]) -> bytes:
    packed: bytes = msgpack.packb(header)
    return b"".join((_LENGTH.pack(len(packed)), packed, *chain(*parts)))


def _header(data: bytes, fields: Sequence[str]) -> tuple[dict[str, Any], int]:
    """(the header, where the numbers begin)."""
    if len(data) < _LENGTH.size:
        raise ValueError("it is empty")
    end = _LENGTH.size + _LENGTH.unpack_from(data)[0]
    if end > len(data):
        raise ValueError(f"a header of {end - _LENGTH.size} bytes is named, fewer are there")
    try:
        found = msgpack.unpackb(data[_LENGTH.size : end])
    except Exception as error:  # whatever it raises for bytes that are no msgpack, it says of these bytes
        raise ValueError(f"the header is no msgpack: {error!s:.100}") from error
    if not isinstance(found, dict) or sorted(map(str, found)) != sorted(fields):
        raise ValueError(f"the header needs the fields {' and '.join(fields)}, and no others")
    return found, end


def _list(value: Any, most: int, field: str) -> list[Any]:
    if not isinstance(value, list) or len(value) > most:
        raise ValueError(f"{field}: must be a list of at most {most}")
    return value


def _row(value: Any, length: int, field: str) -> list[Any]:
    if not isinstance(value, list) or len(value) != length:
        raise ValueError(f"{field} has {length} fields")
    return value


def _whole(value: Any, least: int, most: int, field: str) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{field}: must be a whole number in [{least}, {most}], is {shown(value, 40)}")
    return value


def _number(value: Any, least: float, most: float, field: str) -> float:
    if type(value) not in (int, float) or not least <= value <= most:
        raise ValueError(f"{field}: must be a number in [{least:g}, {most:g}], is {shown(value, 40)}")
    return float(value)


def _text(value: Any, field: str, most: int = wire.MAX_ID_LENGTH) -> str:
    if not isinstance(value, str) or len(value) > most:
        raise ValueError(f"{field}: must be text of at most {most} characters")
    return value


def _name(value: Any, field: str) -> str:
    if not value:
        raise ValueError(f"{field}: is empty")
    return _text(value, field)


_LARGEST = 1e300  # far beyond what anybody measures
