"""Of resets of environments in containers, with failures at the pull of the image, the start and the reset: how many give a
working environment, and how long an episode waits for it, beside the same without failures.

RollArt 8: in 7 of 60 iterations of 128 trajectories initialisation failed for long, before images were cached in tiers; after,
99.99 % of resets succeeded. So the chance that a reset meets a failure is 1 - (53/60)^(1/128), 0.097 %: here each of the three
places fails at that rate, and, in a second row that the bar does not count, at ten times it.

The pool and the managers are the run's own, on virtual time; containers are simulated. Times are lognormal: a pull of 20 s where
a node has not the image (a node keeps those it has pulled), a start of 3 s, a reset of 1.5 s, each with a tail (RollArt 5a: up to
hundreds of seconds). A failed pull says so after 30 s. A start, or a reset, that fails does so at once, or hangs until its
limit, one as likely as the other; the limits are apart, and that of a step is a third. The wait is from when an episode wants an
environment until it sees its first observation.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

from orchestrator.api import (
    Completion,
    EnvironmentTemplate,
    GenerationRequest,
    Observation,
    Prompt,
    RetryableError,
    Sampling,
    StepResult,
    TrajectoryError,
)
from orchestrator.environments.environment_pool import EnvPool, PoolSettings
from orchestrator.envs import EnvManager, Episode
from orchestrator.events import EventLog, MemorySink
from scripts.bench.result import frame, now
from scripts.bench.virtual_run import run as run_virtually

NAME = "resets"
PAPER_RATE = 1.0 - (53 / 60) ** (1 / 128)
RESETS, USERS, IMAGES, NODES = 40_000, 256, 64, 32
START_LIMIT, RESET_LIMIT, STEP_LIMIT = 120.0, 60.0, 30.0
SUCCESS, SLOWER = 0.9999, 3.0
EPISODE_SECONDS = 45.0


class Containers:
    """A cluster's answer to who asks for sessions. Implements EnvironmentBackend."""

    name = "simulated-containers"

    def __init__(self, seed: int, rate: float) -> None:
        self.chance = random.Random(f"resets/{seed}")
        self.rate = rate
        self.injected: Counter[str] = Counter()
        self._pulled: dict[tuple[int, str], None] = {}

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    def fails(self, where: str) -> bool:
        """Whether this time is one of the failures."""
        failed = self.chance.random() < self.rate
        self.injected[where] += failed
        return failed

    async def take(self, mean: float, sigma: float) -> None:
        """A lognormal time."""
        await asyncio.sleep(self.chance.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma))

    async def start(self, name: str, template: EnvironmentTemplate) -> Container:
        node = self.chance.randrange(NODES)
        if (node, template.image) not in self._pulled:
            if self.fails("pull"):
                await asyncio.sleep(30.0)
                raise RetryableError("ErrImagePull: i/o timeout")
            await self.take(20.0, 0.8)
            self._pulled[node, template.image] = None
        if self.fails("start"):
            await self.break_down()
        await self.take(3.0, 0.6)
        return Container(self, template)

    async def break_down(self) -> None:
        """At once, or never within the limit."""
        if self.chance.random() < 0.5:
            await asyncio.sleep(10 * START_LIMIT)
        raise RetryableError("RunContainerError: injected")


class Container:
    """One environment. Implements EnvironmentSession."""

    version = "container 1"

    def __init__(self, backend: Containers, template: EnvironmentTemplate) -> None:
        self._backend, self._template = backend, template

    async def reset(self, prompt: Prompt) -> Observation:
        if self._template != template_of(prompt):
            raise AssertionError("an environment of another image")
        if self._backend.fails("reset"):
            await self._backend.break_down()
        await self._backend.take(1.5, 0.7)
        return Observation((2,))

    async def step(self, action_ids: tuple[int, ...]) -> StepResult:
        await asyncio.sleep(self._backend.chance.uniform(0.5, 1.5) * EPISODE_SECONDS / 3)
        return StepResult(Observation((3,)), 0.0, self._backend.chance.random() < 1 / 3)

    async def recycle(self) -> None:
        await self._backend.take(0.5, 0.5)

    async def ping(self) -> None:
        await asyncio.sleep(0.01)

    async def kill(self) -> None:
        await asyncio.sleep(0.2)


class Policy:
    """Answers at once; what a manager asks of a proxy."""

    async def generate(self, request: GenerationRequest) -> Completion:
        return Completion(request.request_id, (4, 1), (-0.1, -0.1), ((0, 2),), "stop")

    def note_fault(self, what: str, detail: str) -> None: ...


class Anything:
    """What a manager asks of a task."""

    name, vocabulary = "anything", tuple("abcdefgh")
    pad_id, end_id, max_turns, max_response_tokens, max_context_tokens = 0, 1, 64, 2, 1000


@dataclass(frozen=True)
class Waits:
    """Of one row: seconds of each reset that gave an environment, and why the others did not."""

    seconds: list[float]
    failed: dict[str, int]
    injected: dict[str, int]
    pool: dict[str, Any]

    @property
    def resets(self) -> int:
        return len(self.seconds) + sum(self.failed.values())

    def told(self) -> dict[str, Any]:
        return {
            "resets": self.resets,
            "working": len(self.seconds),
            "share": round(len(self.seconds) / self.resets, 6),
            "mean_s": round(sum(self.seconds) / len(self.seconds), 3),
            "p50_s": round(quantile(self.seconds, 0.50), 3),
            "p99_s": round(quantile(self.seconds, 0.99), 3),
            "longest_s": round(max(self.seconds), 3),
            "failed": self.failed,
            "injected": self.injected,
            "pool": {name: self.pool[name] for name in ("started", "start_failures", "replaced", "episodes")},
        }


def quantile(values: list[float], share: float) -> float:
    """The smallest value that this share of them does not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def template_of(prompt: Prompt) -> EnvironmentTemplate:
    return EnvironmentTemplate(image=prompt.payload)


async def play(resets: int, rate: float, seed: int) -> Waits:
    """So many episodes by USERS at once; images are asked for unevenly, a group of eight at a time."""
    loop = asyncio.get_running_loop()
    backend = Containers(seed, rate)
    settings = PoolSettings(
        USERS + 32,
        warm=32,
        parallel_starts=64,
        start_timeout=START_LIMIT,
        recycle_timeout=RESET_LIMIT,
        max_age=1e9,
        seed=seed,
    )
    pool = EnvPool(backend, settings, EventLog(MemorySink(), loop.time), template_of)
    manager = EnvManager(
        Anything(),  # type: ignore[arg-type]  # it has no prompts
        Policy(),
        step_timeout=STEP_LIMIT,
        reset_timeout=RESET_LIMIT,
        reset_tries=3,
        trajectory_timeout=3600.0,
        is_stale=lambda _: False,
        source=pool,
    )
    seconds, failed = [], Counter[str]()
    begun: dict[str, float] = {}

    def turned(episode: Episode, asked: float, *_: float) -> None:
        if begun.get(episode.id, -1.0) >= 0.0:
            seconds.append(asked - begun[episode.id])
            begun[episode.id] = -1.0

    manager.on_turn = turned
    chance = random.Random(f"images/{seed}")
    weights = [1.0 / (place + 4) for place in range(IMAGES)]
    groups = [chance.choices(range(IMAGES), weights)[0] for _ in range(-(-resets // 8))]
    wanted = iter([f"registry.local/image-{groups[number // 8]}" for number in range(resets)])

    async def user(name: int) -> None:
        for number, image in enumerate(wanted):
            episode = Episode(f"{name}/{number}", "g", Prompt(image, "anything", number, image), loop.time())
            begun[episode.id] = loop.time()
            try:
                await manager.play(episode, Sampling(2, stop_token_ids=(1,)))
            except TrajectoryError as error:
                if not episode.begun:
                    failed[error.cause] += 1
            del begun[episode.id]

    await pool.open()
    try:
        await asyncio.gather(*(user(name) for name in range(USERS)))
        stats = pool.stats()
    finally:
        await pool.close()
    return Waits(seconds, dict(sorted(failed.items())), dict(sorted(backend.injected.items())), stats)


def run(quick: bool, nonce: str = "") -> dict[str, Any]:
    """The figure: the share of resets that gave a working environment."""
    begun, resets = now(), 2_000 if quick else RESETS
    rows = {
        name: run_virtually(play(resets, rate, 1), max_seconds=1e9, max_callbacks=10**9)
        for name, rate in (("fault_free", 0.0), ("paper", PAPER_RATE), ("ten_times", 10 * PAPER_RATE))
    }
    told = {name: row.told() for name, row in rows.items()}
    share, slower = told["paper"]["share"], told["paper"]["p99_s"] / told["fault_free"]["p99_s"]
    holds = share >= SUCCESS and slower <= SLOWER and rows["paper"].resets >= 30_000
    return frame(
        NAME,
        "simulated",
        value=share,
        unit="of resets gave a working environment",
        reference="RollArt 8: after its caches",
        reference_value=SUCCESS,
        bar=f">= {SUCCESS} of at least 30,000 resets, p99 of the wait <= {SLOWER} x the fault-free one",
        holds=None if quick else holds,
        detail={
            **({"shrunk": f"{resets} resets in place of {RESETS}"} if quick else {}),
            "rate_of_each_place": round(PAPER_RATE, 6),
            "p99_over_fault_free": round(slower, 3),
            "limits_s": {"start": START_LIMIT, "reset": RESET_LIMIT, "step": STEP_LIMIT},
            "time": "simulated, by the event loop's own clock; the pool and the managers are real",
            "users": USERS,
            "images": IMAGES,
            "nodes": NODES,
            "seed": 1,
            "rows": told,
        },
        quick=quick,
        nonce=nonce,
        begun=begun,
    )
