"""What may hold an event loop up does not: the probe finds who does, and long answers are written piece by piece."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fastapi")
from fastapi.responses import JSONResponse

from orchestrator.api import Completion, CompletionTiming, GenerationRequest, KvMove, KvMoved, Sampling
from orchestrator.api import http as wire
from orchestrator.api.jsontext import PIECE
from orchestrator.borrowing.http_worker import HttpWorker, _Asked
from orchestrator.transfer.turns import decode_turns
from scripts.bench.micro.stalls import StallWatch
from tests.support.vllm_twin import TOKEN, TwinAsyncLLM, TwinServer, translate
from vllm_rlplugin.kv.mover import KvMover, KvOptions
from vllm_rlplugin.server.outbox import PIECE_BYTES, encode_batch
from vllm_rlplugin.worker.served_worker import AT_ONCE, EngineLimits, ServedWorker


def a_completion(name: str, tokens: int) -> Completion:
    timing = CompletionTiming(0.25, 1.5, 0.3, 0.01)
    logprobs = tuple(-1.0 / (index + 3) for index in range(tokens))
    return Completion(name, tuple(range(tokens)), logprobs, ((3, tokens),), "length", timing)


def who_blocks() -> None:
    time.sleep(0.15)


def test_the_probe_says_who_held_the_loop_up_and_for_how_long() -> None:
    async def scenario() -> StallWatch:
        watch = StallWatch(0.05).start()
        await asyncio.sleep(0.1)
        who_blocks()
        await asyncio.sleep(0.1)
        watch.stop()
        return watch

    watch = asyncio.run(scenario())
    stall = max(watch.stalls, key=lambda stall: stall.seconds)
    assert 0.1 < stall.own <= stall.seconds
    assert stall.processor < stall.own, "it slept"
    assert any("who_blocks" in stack for stack in stall.stacks)
    assert "who_blocks" in str(stall)


def test_a_loop_that_only_waits_has_no_stall() -> None:
    async def scenario() -> StallWatch:
        watch = StallWatch(0.2).start()
        await asyncio.sleep(0.5)
        watch.stop()
        return watch

    assert asyncio.run(scenario()).stalls == []


@pytest.mark.parametrize("sizes", [(), (0,), (3, 0, 7), (PIECE, PIECE + 1), (10 * PIECE,), (50,) * 300], ids=str)
def test_an_answer_is_the_json_of_before_and_others_have_their_turn_while_it_is_written(sizes: tuple[int, ...]) -> None:
    batch = [a_completion(f"r{index}", size) for index, size in enumerate(sizes)]
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def scenario() -> bytes:
        beside = asyncio.create_task(others())
        text = await encode_batch(7, batch)
        beside.cancel()
        return text

    text = asyncio.run(scenario())
    whole = {"sequence": 7, "completions": [wire.completion_to_json(item) for item in batch]}
    assert text == JSONResponse(whole).body
    assert turns >= len(text) // (2 * PIECE_BYTES)


def test_a_server_hands_out_so_much_at_a_time_as_both_loops_bear_and_all_of_it() -> None:
    sizes = (5000, 5000, 5000, 40_000, 1, 1, 1)

    async def scenario() -> tuple[list[list[str]], int]:
        server = await TwinServer().start()
        worker = HttpWorker(server.url, TOKEN, "http")
        try:
            batch = [a_completion(f"r{index}", size) for index, size in enumerate(sizes)]
            server.control.outbox._ready.extend(batch)
            worker._unfinished.update({item.request_id: _Asked(50_000) for item in batch})
            found: list[list[str]] = []
            while sum(map(len, found)) < len(batch):
                answer = await worker.completions()
                assert all(item in batch for item in answer)
                found.append([item.request_id for item in answer])
            return found, len(server.control.outbox._ready)
        finally:
            await worker.close()
            await server.stop()

    found, left = asyncio.run(scenario())
    assert (found, left) == ([["r0", "r1", "r2"], ["r3"], ["r4", "r5", "r6"]], 0)


def test_a_client_sends_no_more_prompt_tokens_in_a_call_than_the_servers_loop_bears(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[int] = []

    async def scenario() -> None:
        worker = HttpWorker("http://127.0.0.1:9", TOKEN, "http")

        async def send(message: bytes) -> list[str]:
            turns = decode_turns(message).turns
            sent.append(sum(len(turn.request.token_ids) for turn in turns))
            return [turn.digest.hex() for turn in turns]

        monkeypatch.setattr(worker._contexts, "_send", send)
        await worker.add([GenerationRequest(f"r{i}", f"t{i}", 0, (1,) * 2000, Sampling(1), "t") for i in range(100)])

    asyncio.run(scenario())
    assert sent == [50_000] * 4


def test_a_burst_of_requests_is_given_to_vllm_in_turns_of_the_loop_and_in_order() -> None:
    """Each costs its input processor 0.1 ms, and 256 at once kept users of a real server waiting for 30 ms."""
    given: list[list[str]] = [[]]

    class Client(TwinAsyncLLM):
        async def generate(self, prompt: object, params: object, request_id: str, **more: object):  # type: ignore[no-untyped-def]
            given[-1].append(request_id)
            async for output in super().generate(prompt, params, request_id, **more):  # type: ignore[arg-type]
                yield output

    async def turns() -> None:
        while True:
            await asyncio.sleep(0)
            given.append([])

    async def scenario() -> None:
        limits = EngineLimits(model_len=256, vocabulary=64, slots=250, lookahead=6)
        worker = ServedWorker(Client(), limits, translate=translate)
        await worker.open()
        beside = asyncio.create_task(turns())
        await worker.add([GenerationRequest(f"r{i}", f"t{i}", 0, (1,), Sampling(3), "t") for i in range(256)])
        done = 0
        while done < 256:
            done += len(await worker.completions())
        beside.cancel()
        await worker.close()

    asyncio.run(scenario())
    assert [name for turn in given for name in turn] == [f"rl-r{i}" for i in range(256)]
    assert max(map(len, given)) == AT_ONCE


class Blocks:
    """An engine's half of moves, in the commands' terms: blocks of 1 MiB, all cached."""

    width, count = 1 << 20, 11

    def __init__(self, gone_after: int = 99, room: int = 256) -> None:
        self.rows = np.arange(self.count, dtype=np.uint8).repeat(self.width).reshape(self.count, self.width)
        self.gone_after = gone_after  # pieces that can be read
        self.room = room  # blocks that it stages
        self.told = 0  # blocks that were read
        self.staged: list[tuple[int, int, bytes]] = []
        self.asked: list[int] = []

    async def command(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        if name == "kv_ask":
            return {
                "first": 1,
                "blocks": self.count,
                "room": self.room,
                "block_size": 32,
                "block_bytes": self.width,
                "facts": {"of": "all"},
            }
        if name == "kv_stage":
            self.staged.append((arguments["first"], arguments["total"], arguments["payload"]))
            return {"blocks": len(arguments["payload"]) // self.width}
        self.asked.append(arguments["first"])
        if len(self.asked) > self.gone_after:
            return {"refused": "gone", "detail": "evicted"}
        rest = self.rows[arguments["first"] : (len(arguments["tokens"]) // 4 - 1) // 32]
        found = rest[: arguments["most"] // self.width]
        self.told += len(found)
        return {"blocks": len(found), "payload": found.tobytes(), "more": len(found) < len(rest)}


@pytest.mark.parametrize(("gone_after", "moved"), [(99, 10), (2, 8)])
def test_kv_goes_through_a_front_end_in_pieces(gone_after: int, moved: int) -> None:
    """Of 256 MiB at once it copied and encoded for more than a second, in which no user of the server got a token."""
    source, target = Blocks(gone_after), Blocks()

    async def scenario() -> KvMoved:
        options = KvOptions(token=TOKEN)
        giver, taker = KvMover(options, source.command), KvMover(options, target.command)
        try:
            return await taker.fetch(KvMove("t", (5,) * (32 * Blocks.count + 1), giver.start_listener(), 30.0))
        finally:
            giver.close()

    found = asyncio.run(scenario())
    assert (found.moved, found.why) == (32 * moved, "")
    assert source.asked == [1, 5, 9][: min(gone_after + 1, 3)]
    assert [(first, total) for first, total, _ in target.staged] == [(at, moved) for at in range(1, moved + 1, 4)]
    payload = b"".join(payload for _, _, payload in target.staged)
    assert payload == source.rows[1 : 1 + moved].tobytes()


def test_no_more_kv_is_held_in_memory_than_there_is_room_for() -> None:
    """Of a long context it was gigabytes on either side, and then all of them were refused."""
    source, target, full = Blocks(), Blocks(room=3), Blocks(room=0)

    async def scenario() -> tuple[KvMoved, KvMoved]:
        options = KvOptions(token=TOKEN)
        giver = KvMover(options, source.command)
        move = KvMove("t", (5,) * (32 * Blocks.count + 1), giver.start_listener(), 30.0)
        try:
            return await KvMover(options, full.command).fetch(move), await KvMover(options, target.command).fetch(move)
        finally:
            giver.close()

    none, found = asyncio.run(scenario())
    assert (none.moved, none.why.partition(":")[0], full.staged) == (0, "no_room", [])
    assert (found.moved, found.tokens, found.why, source.told) == (32 * 3, 32 * 4, "", 3)
    assert [(first, total) for first, total, _ in target.staged] == [(1, 3)]
    assert target.staged[0][2] == source.rows[1:4].tobytes()
