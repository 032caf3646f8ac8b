"""Trajectories per second and engine with four engines, over those with one: what the loop in front of them costs as they grow.

The loop is real: environment managers, ``LLMProxy``, ledger with its journal on disk, ``HttpWorker``, and every engine is on a
host of its own, a network namespace behind a link of 1 Gbit/s that the kernel limits (tbf). An engine is a process that speaks
the real messages and remembers contexts; its generation takes **simulated** time: a token 0.8 ms and 10 us for each request
beside it, a new token of the context 20 us, at most 64 requests at once, the others wait. Each engine has 48 trajectories under
way; one that ends is followed by the next. Each begins with 7,000 tokens and has 8 turns of 300 new ones; an environment's step
takes a drawn time of 0.2 s in the mean.

Counted are the trajectories that end within a window, after the first ones of staggered lengths. 1, 2 and 4 engines take turns.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any

from orchestrator.api import ConfigError, Environment, GenerationRequest, Observation, Prompt, RunError, StepResult
from orchestrator.borrowing.http_worker import HttpWorker
from scripts.bench.micro.turn_loop import NEW, TOKEN, VOCABULARY, TurnWorker, serve, turn_loop
from scripts.bench.probes.probe_run import CHECKOUT
from scripts.bench.result import frame, now
from tests.support.hosts import Host, Hosts, end, why_not

NAME = "scale-out"
ENGINES = (1, 2, 4)
CONTEXT, TURNS = 7_000, 8
_BAR, _LEAST = 0.95, 100.0  # the ratio; turns per second of one engine
_TOKEN_SECONDS, _BESIDE_SECONDS, _PREFILL_SECONDS, _SEATS = 0.8e-3, 10e-6, 20e-6, 64
_STEP_SECONDS = 0.2
_ROUNDS = 3
_WHOLE = {"trajectories": 48, "warm_up": 6.0, "window": 15.0}
_QUICK = {"trajectories": 6, "warm_up": 1.0, "window": 2.0}
_MODULE = "scripts.bench.micro.scale_out"


def run(quick: bool, nonce: str) -> dict[str, Any]:
    """Measure. Raises ConfigError where there can be no hosts, RunError when a process ends or a turn fails."""
    if why := why_not():
        raise ConfigError("bench", NAME, f"needs network namespaces with links of a limited rate: {why}")
    begun, load = now(), os.getloadavg()
    how = _QUICK if quick else _WHOLE
    rows: list[dict[str, Any]] = []
    with Hosts(1 + max(ENGINES)) as hosts, ExitStack() as stack:
        loop, *others = hosts.all
        urls = [stack.enter_context(_engine(host)) for host in others]
        for number in range(1 if quick else _ROUNDS):
            turn = number % len(ENGINES)
            for engines in (*ENGINES[turn:], *ENGINES[:turn]):
                told = json.dumps({"urls": urls[:engines], "seed": f"{nonce}/{number}/{engines}", **how})
                said = loop.run([sys.executable, "-m", _MODULE, told], {"PYTHONPATH": str(CHECKOUT)}, timeout=180)
                rows.append({"round": number, "engines": engines, **json.loads(said.splitlines()[-1])})
                print(NAME, json.dumps(rows[-1]), file=sys.stderr)
    ratios = {engines: list(_against_one(rows, engines)) for engines in ENGINES[1:]}
    value, most = median(ratios[max(ENGINES)]), max(ENGINES)
    rate = median(row["turns_per_second"] for row in rows if row["engines"] == 1)
    closes = all(row["closes"] for row in rows)
    return frame(
        NAME,
        "real loop and messages over network namespaces; generation times simulated",
        value=round(value, 4),
        unit=f"trajectories per second and engine with {most} engines over those with one, median of the rounds",
        reference="turns per second of one engine",
        reference_value=round(rate, 1),
        bar=f">= {_BAR:g}, with at least {_LEAST:g} turns/s at one engine; ledger closed",
        holds=None if quick else value >= _BAR and rate >= _LEAST and closes,
        detail={
            "context_tokens": [CONTEXT, CONTEXT + 2 * NEW * TURNS],
            "ratios": {str(engines): found for engines, found in ratios.items()},
            "rows": rows,
            "samples": len(rows),
            "shrunk": f"{how['trajectories']} trajectories per engine, {how['window']:g} s, once" if quick else "",
            "load_average": {"start": load, "end": os.getloadavg()},
        },
        quick=quick,
        nonce=nonce,
        begun=begun,
    )


def _against_one(rows: Sequence[dict[str, Any]], engines: int) -> Iterator[float]:
    """Per round, the rate of an engine among so many over that of the one alone."""
    rates = {(row["round"], row["engines"]): row["trajectories_per_second"] / row["engines"] for row in rows}
    for (number, count), rate in sorted(rates.items()):
        if count == engines:
            yield rate / rates[number, 1]


@contextmanager
def _engine(host: Host) -> Iterator[str]:
    """Where it listens."""
    command = [sys.executable, "-m", _MODULE, "engine", host.address]
    process = host.start(command, {"PYTHONPATH": str(CHECKOUT)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        if not (url := process.stdout.readline().strip()):
            raise RunError("an engine's process did not come up")
        yield url
    finally:
        end(process)


# -- an engine's process -----------------------------------------------------------------------------------------------


class Engine(TurnWorker):
    """Time passes for what its batch holds."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: deque[GenerationRequest] = deque()
        self._running = 0
        self._known: dict[str, int] = {}  # tokens whose KV it would have, by trajectory

    def begin(self, requests: Sequence[GenerationRequest]) -> None:
        """They wait for seats."""
        self._waiting += requests
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._running < _SEATS:
            request = self._waiting.popleft()
            self._running += 1
            length = len(request.token_ids)
            new = length - self._known.get(request.trajectory_id, 0)
            self._known[request.trajectory_id] = length + NEW
            seconds = NEW * (_TOKEN_SECONDS + _BESIDE_SECONDS * self._running) + _PREFILL_SECONDS * new
            asyncio.get_running_loop().call_later(seconds, self._leave, request)

    def _leave(self, request: GenerationRequest) -> None:
        self._running -= 1
        self.finish([request])
        self._admit()


# -- the loop's process --------------------------------------------------------------------------------------------------


class _Task:
    """Each trajectory answers as often as its prompt's seed says."""

    name = NAME
    vocabulary: Sequence[str] = ("",) * VOCABULARY
    pad_id, end_id = 0, 1
    max_response_tokens = NEW
    max_turns = TURNS
    max_context_tokens = CONTEXT + 4 * NEW * (TURNS + 1)

    def __init__(self, draw: random.Random) -> None:
        self.draw, self.turns = draw, 0

    def prompts(self, split: str, seed: int) -> Any:
        """Not asked."""
        raise NotImplementedError

    def environment(self) -> Environment:
        return _Environment(self)


class _Environment:
    version = "1"

    def __init__(self, task: _Task) -> None:
        self._task, self._left = task, 0

    async def reset(self, prompt: Prompt) -> Observation:
        self._left = prompt.seed % TURNS + 1
        return Observation(tuple((prompt.seed + place) % VOCABULARY for place in range(CONTEXT)))

    async def step(self, action_ids: tuple[int, ...]) -> StepResult:
        self._task.turns += 1
        self._left -= 1
        await asyncio.sleep(self._task.draw.expovariate(1 / _STEP_SECONDS))
        return StepResult(Observation(action_ids[::-1] if self._left else ()), 0.0, not self._left)

    async def close(self) -> None:
        """Nothing to free."""


async def drive(urls: Sequence[str], seed: str, trajectories: int, warm_up: float, window: float) -> dict[str, Any]:
    """One measurement with these engines. Raises RunError for a turn that fails."""
    clock = asyncio.get_running_loop()
    workers = [HttpWorker(url, TOKEN, f"engine-{at}", allow_plain_http=True) for at, url in enumerate(urls)]
    task = _Task(random.Random(seed))
    ended, going = 0, True
    async with turn_loop(workers, task, 60.0) as loop:

        async def slot(number: int) -> None:
            """One trajectory after the other; the first has fewer turns, so that not all begin together."""
            nonlocal ended
            played = 0
            while going:
                turns = number % TURNS if not played else TURNS - 1
                name = f"{seed}/{number}/{played}"
                await loop.episode(name, name, TURNS * (number + played * 1009) + turns)
                ended += 1
                played += 1

        loop.start([slot(number) for number in range(trajectories * len(urls))])
        await loop.wait(seconds=warm_up)
        before, begun, processor = (ended, task.turns), clock.time(), time.process_time()
        await loop.wait(seconds=window)
        seconds, processor = clock.time() - begun, time.process_time() - processor
        counts = ended - before[0], task.turns - before[1]
        going = False
        await loop.wait()
    return {
        "trajectories": counts[0],
        "trajectories_per_second": counts[0] / seconds,
        "turns_per_second": counts[1] / seconds,
        "processor_share": processor / seconds,
        "seconds": seconds,
        "closes": loop.closes(ended),
    }


if __name__ == "__main__":
    if sys.argv[1] == "engine":
        asyncio.run(serve(Engine(), sys.argv[2]))
    else:
        print(json.dumps(asyncio.run(drive(**json.loads(sys.argv[1])))), flush=True)
