"""What a turn costs the proxy's loop and the wire by the length of its context: bytes per turn at 32k tokens over those at 1k,
and turns per second of processor time of one loop at 32k.

The loop is real: environment managers, ``LLMProxy``, ledger with its journal on disk, ``HttpWorker`` over loopback HTTP. The
worker is a process of its own that speaks the real messages and remembers contexts; its tokens are made up and take 20 ms, an
environment's step a drawn time of the same mean, so that turns come one by one. Every turn brings 300 new tokens: 150 that were
generated before it and 150 of the environment. The first turn of each trajectory, which brings its whole context, is not counted.
Repetitions of all contexts are interleaved.

The rate is per second of processor time of the loop's process, as others run on this machine; by the wall clock it stands beside
it. It is compared with writing the same requests as JSON with their whole contexts, as was done before, which alone takes longer.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from orchestrator.api import Environment, Observation, Prompt, RunError, StepResult
from orchestrator.borrowing.http_worker import HttpWorker
from scripts.bench.micro.turn_loop import NEW, TOKEN, VOCABULARY, TurnWorker, serve, turn_loop
from scripts.bench.result import frame, now

NAME = "turn-cost"
CONTEXTS = (1_000, 8_000, 32_000)  # tokens when the counted turns begin
_BYTES_BAR, _RATE_BAR = 1.1, 3_000.0
_STEP_SECONDS = 0.02  # in the mean, as long as the worker takes for an answer
_TRAJECTORIES, _TURNS, _REPEATED = 256, 20, 3
_QUICK = (16, 5, 1)


def run(quick: bool, nonce: str) -> dict[str, Any]:
    """Measure. Raises RunError when the worker does not come up or a turn fails."""
    begun = now()
    trajectories, turns, repeated = _QUICK if quick else (_TRAJECTORIES, _TURNS, _REPEATED)
    found: dict[int, list[Played]] = {context: [] for context in CONTEXTS}
    command = [sys.executable, "-m", "scripts.bench.micro.turn_cost"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().strip()
            if not url:
                raise RunError("the worker's process did not come up")
            for number in range(repeated):
                for context, kept in found.items():
                    kept.append(asyncio.run(play(url, context, trajectories, turns, f"{nonce}/{number}/{context}")))
        finally:
            server.kill()
    return result(found, {"started": begun, "pids": [server.pid], "nonce": nonce}, quick)


@dataclass(frozen=True, slots=True)
class Played:
    """One repetition: what the counted ``turns`` took. ``processor``, ``wall``: seconds; ``sent``, ``received``: bytes of HTTP
    bodies; ``closes``: whether the ledger did."""

    turns: int
    processor: float
    wall: float
    sent: int
    received: int
    messages: int
    closes: bool

    @property
    def bytes(self) -> float:
        """Of a turn."""
        return (self.sent + self.received) / self.turns


def result(found: dict[int, list[Played]], detail: dict[str, Any], quick: bool) -> dict[str, Any]:
    """The figure of what was played, by context."""
    rates = {context: median(one.turns / one.processor for one in played) for context, played in found.items()}
    sizes = {context: median(one.bytes for one in played) for context, played in found.items()}
    ratio, rate = sizes[CONTEXTS[-1]] / sizes[CONTEXTS[0]], rates[CONTEXTS[-1]]
    closes = all(one.closes for played in found.values() for one in played)
    return frame(
        NAME,
        "real",
        value=round(ratio, 4),
        unit=f"bytes per turn at {CONTEXTS[-1]} tokens of context over those at {CONTEXTS[0]}",
        reference=f"turns per second of processor time of one proxy loop at {CONTEXTS[-1]} tokens",
        reference_value=round(rate, 1),
        bar=f"<= {_BYTES_BAR:g}, and >= {_RATE_BAR:g} turns/s; ledger closed",
        holds=None if quick else ratio <= _BYTES_BAR and rate >= _RATE_BAR and closes,
        detail={
            "what": "managers, proxy, ledger, HTTP client and messages real; worker in another process, its generation made up",
            "new_tokens_per_turn": 2 * NEW,
            "turns_per_processor_second": {str(context): round(value, 1) for context, value in rates.items()},
            "turns_per_second_by_the_wall_clock": {
                str(context): round(median(one.turns / one.wall for one in played), 1)
                for context, played in found.items()
            },
            "bytes_per_turn": {str(context): round(value, 1) for context, value in sizes.items()},
            "seconds_of_json_per_turn": {str(context): round(json_seconds(context), 6) for context in CONTEXTS},
            "repetitions": {str(context): [asdict(one) for one in played] for context, played in found.items()},
            "ledger_closes": closes,
            "load_average": os.getloadavg(),
            "shrunk": f"{_QUICK[0]} trajectories of {_QUICK[1]} turns, once" if quick else "",
            **detail,
        },
        quick=quick,
    )


def json_seconds(context: int) -> float:
    """Processor time of writing one request with its whole context as JSON, as before there were sessions."""
    tokens = [token % VOCABULARY for token in range(context)]
    body = {"request_id": "r", "trajectory_id": "t", "token_ids": tokens, "sampling": {"max_tokens": NEW}}
    taken = []
    for _ in range(5):
        begun = time.process_time()
        json.dumps({"requests": [body], "partial": True}).encode()
        taken.append(time.process_time() - begun)
    return median(taken)


# -- the proxy's side ------------------------------------------------------------------------------------------------------


class _Counted(HttpWorker):
    """Counts bytes of bodies."""

    sent = received = messages = 0

    async def _exchange(self, method: str, path: str, *, data: bytes | None = None, **how: Any) -> bytes:
        payload = await super()._exchange(method, path, data=data, **how)
        self.sent += len(data or b"")
        self.received += len(payload)
        self.messages += 1
        return payload


class _Start:
    """Where all trajectories wait for each other before the counted turns."""

    def __init__(self, number: int) -> None:
        self._waiting, self._all = number, asyncio.Event()
        self.here = asyncio.Event()

    async def arrive(self) -> None:
        self._waiting -= 1
        if not self._waiting:
            self.here.set()
        await self._all.wait()

    def go(self) -> None:
        self._all.set()


class _Task:
    """Answers each action with as many tokens, after a first observation that fills the context."""

    name = "turn-cost"
    vocabulary: Sequence[str] = ("",) * VOCABULARY
    pad_id, end_id = 0, 1
    max_response_tokens = NEW

    def __init__(self, context: int, turns: int, start: _Start, draw: random.Random) -> None:
        self.max_turns = turns + 1
        self.max_context_tokens = context + 4 * NEW * (turns + 2)
        self.context, self.start, self.draw = context, start, draw

    def prompts(self, split: str, seed: int) -> Any:
        """Not asked."""
        raise NotImplementedError

    def environment(self) -> Environment:
        return _Environment(self)


class _Environment:
    version = "1"

    def __init__(self, task: _Task) -> None:
        self._task, self._steps = task, 0

    async def reset(self, prompt: Prompt) -> Observation:
        return Observation(tuple((prompt.seed + place) % VOCABULARY for place in range(self._task.context)))

    async def step(self, action_ids: tuple[int, ...]) -> StepResult:
        self._steps += 1
        if self._steps == 1:
            await self._task.start.arrive()
        else:
            await asyncio.sleep(self._task.draw.expovariate(1 / _STEP_SECONDS))
        done = self._steps == self._task.max_turns
        return StepResult(Observation(() if done else action_ids[::-1]), 0.0, done)

    async def close(self) -> None:
        """Nothing to free."""


async def play(url: str, context: int, trajectories: int, turns: int, seed: str) -> Played:
    """One repetition. Raises RunError for a turn that fails."""
    worker, start = _Counted(url, TOKEN, "worker"), _Start(trajectories)
    async with turn_loop([worker], _Task(context, turns, start, random.Random(seed)), 600.0) as loop:
        loop.start([loop.episode(f"t{number}", f"g{number // 8}", number) for number in range(trajectories)])
        await loop.wait(start.here.wait())
        begun, before = (time.process_time(), time.perf_counter()), (worker.sent, worker.received, worker.messages)
        start.go()
        await loop.wait()
        processor, wall = time.process_time() - begun[0], time.perf_counter() - begun[1]
        after = worker.sent, worker.received, worker.messages
    sent, received, messages = (now - then for now, then in zip(after, before, strict=True))
    return Played(trajectories * turns, processor, wall, sent, received, messages, loop.closes(trajectories))


if __name__ == "__main__":
    asyncio.run(serve(TurnWorker()))
