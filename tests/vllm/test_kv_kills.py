"""Real engines killed (SIGKILL) while a prefix travels between them, the one that takes it and the one that gives it: over TCP
and over Mooncake (CPU, random Qwen3, fp32, greedy). Who is left goes on with the same bits, and gives and takes as before."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from orchestrator.api import Completion, KvMove, RetryableError
from orchestrator.transfer.proven_link import parse_place
from scripts.bench.probes.vllm.kv_engines import Child
from scripts.bench.probes.vllm.kv_probe import VOCABULARY, say, write_model

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(600)]
BLOCK = 32
LENGTH = 2048  # tokens of 4 KiB: more than the kernel takes in while nobody reads
LIMIT = 20.0  # seconds of a move
HELD = {"tcp": 1 << 20, "mooncake": 40}  # bytes that pass: a part of the blocks; not yet where they lie


class Valve:
    """A way to ``place`` that lets so many bytes of an answer through, and the rest when it is opened."""

    def __init__(self, place: str, most: int) -> None:
        self._place, self._left = parse_place(place), most
        self.reached, self.open = threading.Event(), threading.Event()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.place = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with self._listening.accept()[0] as client, socket.socket() as server:
                server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
                server.connect(self._place)
                threading.Thread(target=self._up, args=(client, server), daemon=True).start()
                try:
                    self._down(server, client)
                finally:
                    client.shutdown(socket.SHUT_RDWR)  # the other thread reads from it
        except OSError:
            return  # one of the two is gone, and both are closed

    def _down(self, server: socket.socket, client: socket.socket) -> None:
        while data := server.recv(min(65536, self._left) if not self.open.is_set() else 65536):
            client.sendall(data)
            self._left -= len(data)
            if self._left <= 0 and not self.open.is_set():
                self.reached.set()
                self.open.wait()

    def _up(self, client: socket.socket, server: socket.socket) -> None:
        try:
            while data := client.recv(65536):
                server.sendall(data)
            server.shutdown(socket.SHUT_RDWR)  # the one that asked is gone
        except OSError:
            return

    def close(self) -> None:
        self.open.set()
        self._listening.close()
        self._thread.join(10.0)


@contextmanager
def valve(place: str, most: int) -> Iterator[Valve]:
    found = Valve(place, most)
    try:
        yield found
    finally:
        found.close()


def prompt(seed: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(VOCABULARY) for _ in range(LENGTH))


def same(one: Completion, other: Completion) -> bool:
    return (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs)


async def in_mid_transfer(way: Valve, source: Child, move: asyncio.Task[object], carrier: str) -> None:
    """Some of the blocks have come (TCP), or are being read from a source that does not answer any more (Mooncake)."""
    assert await asyncio.to_thread(way.reached.wait, LIMIT)
    if carrier == "mooncake":  # it has lent its blocks, and the other side is told where now
        os.kill(source.pid, signal.SIGSTOP)
        way.open.set()
        await asyncio.sleep(1.0)
    assert not move.done()


@pytest.mark.parametrize("carrier", ["tcp", "mooncake"])
def test_who_is_left_after_a_kill_in_mid_transfer_goes_on_with_the_same_bits(tmp_path: Path, carrier: str) -> None:
    """Mooncake's memory holds one prefix at a time here, so a place that is not given back would be ``no_room``."""
    write_model(tmp_path / "model", LENGTH + 128)

    def engine(name: str) -> Child:
        return Child(
            name,
            model=str(tmp_path / "model"),
            max_model_len=LENGTH + 128,
            kv_cache_mb=48,
            plugin={"kv_transfer": True},
            kv={"token": "token of this test", "carrier": carrier, "room_mb": 24},
        )

    async def scenario() -> None:
        source, taker, left = engine("source"), engine("taker"), engine("left")
        try:
            await asyncio.gather(*(one.ready() for one in (source, taker, left)))
            place = await source.kv_place()
            contexts, stayed = [], []
            for number in range(2):
                first = await say(source, f"first {number}", prompt(number), 16)
                contexts.append((*prompt(number), *first.token_ids, 1, 2, 3))
                stayed.append(await say(source, f"stayed {number}", contexts[number], 24))

            # The one that takes it is killed.
            with valve(place, HELD[carrier]) as way:
                move = asyncio.create_task(taker.fetch_kv(KvMove("taken", contexts[0], way.place, LIMIT)))
                await in_mid_transfer(way, source, move, carrier)
                taker.kill()
                with pytest.raises(RetryableError):
                    await move
            os.kill(source.pid, signal.SIGCONT)
            assert same(await say(source, "on", contexts[0], 24), stayed[0])
            moved = await asyncio.wait_for(left.fetch_kv(KvMove("moved", contexts[0], place, LIMIT)), 2 * LIMIT)
            blocks = (len(contexts[0]) - 1) // BLOCK
            assert (moved.moved, moved.why, moved.carrier) == (blocks * BLOCK, "", carrier)
            assert same(await say(left, "after", contexts[0], 24), stayed[0])

            # The one that gives it is killed.
            counted = await left.computed()
            with valve(place, HELD[carrier]) as way:
                move = asyncio.create_task(left.fetch_kv(KvMove("lost", contexts[1], way.place, LIMIT)))
                await in_mid_transfer(way, source, move, carrier)
                source.kill()
                way.open.set()
                lost = await asyncio.wait_for(move, 2 * LIMIT)
            assert (lost.moved, lost.why.partition(":")[0]) in ((0, "unreachable"), (0, "timeout")), lost
            assert carrier == "mooncake" or "half-way" in lost.why
            anew = await say(left, "anew", contexts[1], 24)
            assert anew.token_ids == stayed[1].token_ids
            assert anew.logprobs == pytest.approx(stayed[1].logprobs, abs=1e-4)
            assert await left.computed() - counted == len(contexts[1]) + 23, "all of it is computed, and nothing else"
            assert same(await say(left, "still", contexts[0], 24), stayed[0]), "what came before is whole"
        finally:
            for one in (source, taker, left):
                await one.close()

    asyncio.run(scenario())
