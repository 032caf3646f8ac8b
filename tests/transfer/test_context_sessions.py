"""Turns that bring only what is new: whatever happens on the way, a request has exactly the context that was meant."""

from __future__ import annotations

import asyncio
import math
import pickle
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.api import (
    CommandError,
    Completion,
    CompletionTiming,
    GenerationRequest,
    RetryableError,
    Sampling,
    TokenSequence,
)
from orchestrator.transfer.turns import (
    ContextSession,
    HeldContexts,
    decode_completions,
    decode_turns,
    encode_completions,
    encode_turns,
)

SAMPLING = Sampling(8, 0.7, 0.9, (2, 5), -(2**63))
TOKENS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=6)


def a_request(name: str, context: Sequence[int], trajectory: str = "t") -> GenerationRequest:
    return GenerationRequest(name, trajectory, 3, context, SAMPLING, "task", -7, 40, 1.5, "g")


class Wire:
    """A worker's memory behind a wire that counts, and loses, repeats and damages what it is told to."""

    def __init__(self, limit: int = 1 << 20) -> None:
        self.held = HeldContexts(limit)
        self.given: dict[str, Sequence[int]] = {}
        self.bytes: list[int] = []
        self.lose = self.damage = self.twice = self.lie = False
        self.session = ContextSession("w", self.send)

    async def send(self, message: bytes) -> list[str]:
        self.bytes.append(len(message))
        sent = decode_turns(message)
        if self.damage:
            self.damage = False
            first = sent.turns[0]
            worse = TokenSequence(token ^ 1 for token in first.request.token_ids)
            sent = replace(
                sent, turns=(replace(first, request=replace(first.request, token_ids=worse)), *sent.turns[1:])
            )
        requests, digests = self.held.take(sent)
        if self.twice:
            again, digests = self.held.take(sent)
            requests += again
        for request in requests:
            assert self.given.setdefault(request.request_id, request.token_ids) == request.token_ids
        if self.lose:
            self.lose = False
            raise RetryableError("the answer was lost")
        return ["00" * 16] * len(digests) if self.lie else digests


# -- token sequences -----------------------------------------------------------------------------------------------------


@given(pieces=st.lists(TOKENS, max_size=5), other=TOKENS, cut=st.integers(0, 40))
def test_a_sequence_is_the_tuple_of_its_pieces_whoever_goes_on_from_it(
    pieces: list[list[int]], other: list[int], cut: int
) -> None:
    whole, tuples, every = TokenSequence(), [()], [TokenSequence()]
    for piece in pieces:
        whole += piece
        tuples.append((*tuples[-1], *piece))
        every.append(whole)
        whole.digest  # noqa: B018  hashed as far as it goes
    branch = every[len(every) // 2] + other
    assert branch == (*tuples[len(every) // 2], *other)
    for sequence, meant in zip(every, tuples, strict=True):
        assert sequence == meant
        assert hash(sequence) == hash(meant)
        assert (list(sequence), sequence.to_list(), len(sequence)) == (list(meant), list(meant), len(meant))
        assert sequence[:cut] == meant[:cut]
        assert sequence[::-1] == meant[::-1]
        assert sequence[cut - 20 : -1] == meant[cut - 20 : -1]
        assert sequence.digest == TokenSequence(meant).digest
        assert sequence.bounds == ((min(meant), max(meant)) if meant else (0, -1))
        assert pickle.loads(pickle.dumps(sequence)) == meant
        assert whole.begins_with(sequence)
        assert TokenSequence(tuples[-1]).begins_with(sequence)
    assert branch.digest == TokenSequence(tuple(branch)).digest
    assert whole.begins_with(branch) is (tuples[-1][: len(branch)] == tuple(branch))


def test_a_sequence_refuses_what_is_no_token_and_is_as_it_was() -> None:
    held = TokenSequence((1, 2))
    for wrong in ([3, 1 << 31], [3, "x"], [2.5], [None]):
        with pytest.raises(ValueError, match="32 bits"):
            held + wrong  # type: ignore[operator]
    assert held == (1, 2)
    assert held + range(3, 4) == (1, 2, 3)
    with pytest.raises(IndexError):
        held[2]


# -- messages ------------------------------------------------------------------------------------------------------------


def test_turns_and_completions_cross_unchanged() -> None:
    base = TokenSequence(range(100))
    longer = base + range(7, 9)
    request = a_request("r", longer)
    message = decode_turns(encode_turns([(request, longer, base), (request, longer, None)], ["gone"]))
    assert message.ended == ("gone",)
    part, whole = message.turns
    assert (part.base, part.base_digest, part.digest) == (100, base.digest, longer.digest)
    assert part.request == replace(request, token_ids=(7, 8))
    assert whole.request == request
    done = [
        Completion(
            "a", (1, 2**31 - 1), (-0.1, -1e-300), ((0, 1), (7, 1)), "stop", CompletionTiming(0.1, 1 / 3, 0.2, 1e-9)
        ),
        Completion("b", (), (), (), "error", error="it did not fit"),
    ]
    assert decode_completions(encode_completions(5, done)) == (5, done)


def header_of(data: bytes) -> tuple[dict[str, Any], bytes]:
    end = 4 + int.from_bytes(data[:4], "little")
    return msgpack.unpackb(data[4:end]), data[end:]


def with_header(header: Any, rest: bytes) -> bytes:
    packed = msgpack.packb(header)
    return len(packed).to_bytes(4, "little") + packed + rest


def changed(place: int, value: Any) -> bytes:
    header, rest = header_of(encode_turns([(a_request("r", (1, 2)), TokenSequence((1, 2)), None)]))
    header["turns"][0][place] = value
    return with_header(header, rest)


@pytest.mark.parametrize(
    ("data", "field"),
    [
        (b"", "empty"),
        (b"\xff\xff\xff\xff", "fewer are there"),
        (b"\x01\x00\x00\x00\xc1", "no msgpack"),
        (with_header([], b""), "the fields"),
        (with_header({"turns": []}, b""), "the fields"),
        (with_header({"turns": [[]], "ended": []}, b""), "14 fields"),
        (with_header({"turns": [None] * 1025, "ended": []}, b""), "at most 1024"),
        (with_header({"turns": [], "ended": [""]}, b""), "ended: is empty"),
        (with_header({"turns": [], "ended": []}, b"more"), "behind the last turn"),
        (changed(0, "x" * 257), "turns.0.request_id"),
        (changed(1, 5), "turns.0.trajectory_id"),
        (changed(2, True), "turns.0.turn"),
        (changed(3, [8, math.nan, 1.0, [], None]), "turns.0.sampling.temperature"),
        (changed(3, [0, 1.0, 1.0, [], None]), "turns.0.sampling.max_tokens"),
        (changed(3, [1, 1.0, 0.0, [], None]), "turns.0.sampling.top_p"),
        (changed(5, 1 << 63), "turns.0.priority"),
        (changed(7, math.inf), "turns.0.deadline"),
        (changed(9, -1), "turns.0.base"),
        (changed(9, 5), "turns.0.base_digest"),
        (changed(9, 1 << 20), "turns.0.base"),
        (changed(11, 1 << 40), "turns.0.count"),
        (changed(11, 3), "fewer are there"),
        (changed(11, 1), "behind the last turn"),
        (changed(12, b"short"), "turns.0.digest"),
        (changed(13, -1), "turns.0.experts_from"),
    ],
)
def test_a_malformed_message_is_one_error_that_names_the_field(data: bytes, field: str) -> None:
    with pytest.raises(CommandError, match=field) as refused:
        decode_turns(data)
    assert refused.value.code == "invalid_request"


@given(st.binary(max_size=300), st.integers(0, 10_000), st.integers(0, 255))
def test_whatever_comes_is_read_or_refused(data: bytes, place: int, value: int) -> None:
    context = TokenSequence((1, 2, 3))
    done = Completion("r", (1, 2), (-0.5, -0.25), ((1, 2),), "stop")
    for valid, read, error in (
        (encode_turns([(a_request("r", context), context, None)], ["x"]), decode_turns, CommandError),
        (encode_completions(3, [done]), decode_completions, ValueError),
    ):
        damaged = bytearray(valid)
        damaged[place % len(damaged)] = value
        for tried in (data, bytes(damaged), valid[: place % len(valid)]):
            try:
                read(tried)
            except error:
                continue


# -- sessions ------------------------------------------------------------------------------------------------------------


def test_a_turn_brings_what_is_new_however_long_its_context_is() -> None:
    wire = Wire()

    async def main() -> list[int]:
        context, sizes = TokenSequence(), []
        for turn, size in enumerate((1_000, 300, 30_000, 300)):
            context += range(size)
            await wire.session.add([a_request(f"r{turn}", context)])
            assert wire.given[f"r{turn}"] == context
            sizes.append(wire.bytes[-1])
        return sizes

    sizes = asyncio.run(main())
    assert abs(sizes[3] - sizes[1]) <= 8
    assert sizes[1] < 300 * 4 + 200
    assert wire.session.take_resent() == (0, 0)


@pytest.mark.parametrize("how", ["evicted", "started anew", "damaged", "too small"])
def test_a_worker_that_lacks_a_context_is_sent_it_whole_and_that_is_counted(how: str) -> None:
    wire = Wire(50 if how == "too small" else 1 << 20)

    async def main() -> None:
        first, more = TokenSequence(range(100)), (5,)
        await wire.session.add([a_request("a", first)])
        if how == "evicted":
            wire.held.forget("t")
        elif how == "started anew":
            wire.held = HeldContexts()
        wire.damage = how == "damaged"
        await wire.session.add([a_request("b", first + more), a_request("c", first + more)])
        assert wire.given["b"] == wire.given["c"] == first + more

    asyncio.run(main())
    contexts, tokens = wire.session.take_resent()
    assert contexts in (1, 2)
    assert tokens == 101 * contexts
    assert wire.held.tokens <= 201


def test_a_worker_that_claims_another_context_is_not_believed() -> None:
    wire = Wire()
    wire.lie = True
    with pytest.raises(RetryableError, match="claims a context for r that is not the one meant"):
        asyncio.run(wire.session.add([a_request("r", (1, 2))]))


def test_a_worker_that_never_has_it_and_one_that_miscounts_are_errors() -> None:
    async def nothing(message: bytes) -> list[str]:
        return [""] * len(decode_turns(message).turns)

    async def none(message: bytes) -> list[str]:
        return []

    with pytest.raises(RetryableError, match="which was sent whole"):
        asyncio.run(ContextSession("w", nothing).add([a_request("r", (1,))]))
    with pytest.raises(RetryableError, match="1 turns were sent, 0 answered"):
        asyncio.run(ContextSession("w", none).add([a_request("r", (1,))]))


def test_a_whole_context_with_another_digest_is_refused() -> None:
    context = TokenSequence((1, 2))
    data = encode_turns([(a_request("r", context), context, None)])
    held = HeldContexts()
    with pytest.raises(CommandError, match="another digest than named"):
        held.take(decode_turns(data[:-1] + b"\x01"))
    assert (len(held), held.tokens) == (0, 0)


def test_what_is_held_is_bounded_and_goes_with_its_trajectory() -> None:
    wire = Wire(1_000)

    async def main() -> None:
        for number in range(50):
            await wire.session.add([a_request(f"r{number}", range(number, number + 90), f"t{number}")])
            assert wire.held.tokens <= 1_000
        assert wire.held.trajectories() == [f"t{number}" for number in range(39, 50)]
        wire.session.forget("t49")
        wire.session.forget("t48")
        wire.session.forget("unknown")
        await wire.session.add([a_request("last", (1,), "t40")])
        assert not {"t48", "t49"} & set(wire.held.trajectories())

    asyncio.run(main())


def test_members_of_a_group_that_begin_alike_go_on_apart() -> None:
    wire = Wire()

    async def main() -> None:
        contexts = [TokenSequence(range(500)) for _ in range(8)]
        for turn in range(3):
            await wire.session.add(
                [a_request(f"{turn}/{member}", context, f"t{member}") for member, context in enumerate(contexts)]
            )
            contexts = [context + [turn] * (member + 1) for member, context in enumerate(contexts)]

    asyncio.run(main())
    assert wire.session.take_resent() == (0, 0)
    assert wire.bytes[1] < 8 * 200


@settings(max_examples=150)
@given(seed=st.integers(0, 2**32))
def test_whatever_happens_a_worker_has_exactly_the_context_that_the_proxy_meant(seed: int) -> None:
    """Turns, branches and contexts that begin anew, at several workers; evictions, restarts that nobody is told of, lost
    answers, messages that come twice or damaged."""
    rng = random.Random(seed)
    workers = [Wire(rng.choice((60, 200, 1 << 20))) for _ in range(3)]
    contexts: dict[str, list[TokenSequence]] = {f"t{number}": [TokenSequence()] for number in range(4)}

    async def main() -> None:
        for step in range(40):
            worker = rng.choice(workers)
            match rng.randrange(12):
                case 0:
                    worker.held.clear()
                case 1:
                    worker.held.forget(rng.choice(list(contexts)))
                case 2:
                    worker.session.clear()
                case 3:
                    worker.lose = True
                case 4:
                    worker.damage = True
                case 5:
                    worker.twice = not worker.twice
                case 6:
                    ended = rng.choice(list(contexts))
                    contexts[ended] = [TokenSequence()]
                    for other in workers:
                        other.session.forget(ended)
            batch = []
            for number in range(rng.choice((1, 1, 3))):
                trajectory = rng.choice(list(contexts))
                context = rng.choice(contexts[trajectory][-3:])
                if rng.random() < 0.1:
                    context = TokenSequence(context[: rng.randrange(len(context) + 1)])
                context += [rng.randrange(9) for _ in range(rng.randrange(12))]
                contexts[trajectory].append(context)
                meant = context if rng.random() < 0.7 else tuple(context)
                batch.append(a_request(f"{step}/{number}", meant, trajectory))
            try:
                await worker.session.add(batch)
            except (RetryableError, CommandError):
                pass  # the proxy takes the worker's requests back
            else:
                assert all(request.request_id in worker.given for request in batch)
            for request in batch:
                assert worker.given.get(request.request_id, request.token_ids) == tuple(request.token_ids)
            assert worker.held.tokens == sum(len(context) for context in worker.held._held.values())

    asyncio.run(main())
