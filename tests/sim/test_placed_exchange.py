"""Trajectories that are placed on servers which come and go: whole runs in virtual time with faults at every port, lives that are
killed and resumed, and a market in which anything may happen at any look. The real pipeline, proxy, exchange and placement."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from orchestrator.api import BorrowedWorker, RetryableError
from orchestrator.borrowing.server_exchange import Claim, Offer
from orchestrator.components import Components
from orchestrator.config import Config, parse_config, to_json
from orchestrator.placement.placer import TrajectoryPlacer
from orchestrator.proxy.gateway import LLMProxy
from orchestrator.sim import simulated_run as sim
from orchestrator.sim.simulated_forecasts import equip
from scripts.bench.micro.ledger_faults import config_of

MANY = range(200)


class Server:
    """A borrowed worker around one of the simulator's, its faults included: without a device it is a server that is away."""

    url = "simulated"

    def __init__(self, inner: Any, engine: Any) -> None:
        self.name, self._inner, self._engine = inner.name, inner, engine
        self.there = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def restart(self) -> None:
        if not self.there:
            raise RetryableError(f"{self.name} has no device")
        await self._inner.restart()

    def end(self) -> None:
        """It is given back, or its device was taken from it."""
        self.there = False
        self._engine.die()


class Chance:
    """A market in which anything may happen at any look."""

    job = "run"
    first: Sequence[Offer] = ()

    def __init__(self, servers: Sequence[Server], rng: random.Random) -> None:
        self._servers = {server.name: server for server in servers}
        self._rng = rng
        self._others = random.Random("others")

    async def list_offers(self) -> Sequence[Offer]:
        if self._rng.random() < 0.2:
            await asyncio.sleep(self._rng.expovariate(1.0))
        named = [name for name in self._servers if self._rng.random() > 0.05]
        return [self._one(name) for name in named]

    def _one(self, name: str) -> Offer:
        chance = self._rng.random()
        if chance < 0.1:
            if self._servers[name].there and self._rng.random() < 0.3:
                self._servers[name].end()
            return Offer(name, "no answer")
        if chance < 0.2:
            return Offer(name, taken="another", holder=("another", ""))
        waits = (Claim(("third", ""), self._others.randint(1, 3), self._others.choice((0.5, 1.0, 4.0))),)
        claims = waits if self._others.random() < 0.1 else ()
        return Offer(name, share=self._rng.random(), lends=chance < 0.8, claims=claims)

    async def claim(self, offers: Sequence[Offer], wanted: int, seconds: float) -> None:
        assert wanted > 0
        assert seconds > 0

    def worker(self, url: str) -> BorrowedWorker:
        self._servers[url].there = self._rng.random() < 0.9
        return self._servers[url]

    def note_taken(self, worker: BorrowedWorker) -> None:
        """Nothing to say."""

    async def leave(self, worker: BorrowedWorker) -> None:
        await asyncio.sleep(self._rng.expovariate(2.0))
        self._servers[worker.name].end()


@dataclass
class Found:
    """Of several runs."""

    wrong: list[str] = field(default_factory=list)
    unaccounted: int = 0
    counts: Counter[str] = field(default_factory=Counter)


def placed(seed: int) -> tuple[Config, int]:
    """The small run that a seed stands for, with placement and servers that change; and how many workers are its own."""
    rng = random.Random(f"placed {seed}")
    data: dict[str, Any] = json.loads(to_json(config_of(seed)))
    rollout, own = data["rollout"], rng.choice((0, 1, 2))
    for section in ("planner", "disaggregation", "colocation"):
        rollout.pop(section)
    rollout["workers"] = own + rng.choice((1, 2, 3))
    rollout["weights"], rollout["shards"] = "relay", 1
    rollout["routing"] = {**rollout["routing"], "hardware": {}, "affinity": {}}
    rollout["routing"] |= rng.choice(({}, {"hardware": {"sim-0": "H800"}, "affinity": {"default": "H800"}}))
    rollout["prediction"]["enabled"] = True
    rollout["placement"] = {"enabled": True, "migrate": rng.random() < 0.8, "renew_seconds": rng.choice((0.0, 1.0))}
    rollout["borrowed"] = {
        "file": "none",
        "every": rng.choice((0.5, 3.0)),
        "window": 10.0,
        "crowded": 0.7,
        "patience": 4.0,
        "rest": 2.0,
        "idle": rng.choice((0.0, 5.0)),
    }
    rollout["environments"] = max(rollout["environments"], 8)
    data["sim"]["kv_tokens"] = rng.choice((None, 320, 1000))
    return parse_config(data), own


def play(seed: int, found: Found, monkeypatch: pytest.MonkeyPatch) -> sim.SimResult:
    config, own = placed(seed)
    lives, put, init = [0], TrajectoryPlacer._put, LLMProxy.__init__
    proxies: dict[int, LLMProxy] = {}

    def with_market(parts: Components, config: Config, workers: Any) -> None:
        equip(parts, config, workers)
        inside = list(zip(parts.workers, workers, strict=True))
        servers = [Server(worker, engine) for worker, engine in inside[own:]]
        parts.workers = [*parts.workers[:own], *servers]
        parts.market = Chance(servers, random.Random(f"{seed}/{lives[0]}"))
        lives[0] += 1

    def known(proxy: LLMProxy, *arguments: Any, **keywords: Any) -> None:
        init(proxy, *arguments, **keywords)
        proxies[id(proxy.router)] = proxy

    def watched(placing: TrajectoryPlacer, trajectory: str, one: Any, worker: int) -> None:
        found.counts["placed"] += 1
        if worker >= 0 and not (lane := proxies[id(placing.router)].states[worker]).usable:
            found.wrong.append(f"seed {seed}: {trajectory} goes to {lane.worker.name}, which has left")
        found.counts["moved"] += one.context > 0
        put(placing, trajectory, one, worker)

    with monkeypatch.context() as patch:
        patch.setattr(sim, "equip", with_market)
        patch.setattr(LLMProxy, "__init__", known)
        patch.setattr(TrajectoryPlacer, "_put", watched)
        result = sim.simulate(config, strict=False)
    found.unaccounted += result.unaccounted
    found.wrong += [f"seed {seed}: {line}" for line in result.violations]
    for line in result.events.splitlines():
        found.counts[json.loads(line)["kind"]] += 1
    return result


@pytest.mark.slow
@pytest.mark.parametrize(
    "part", [pytest.param(range(12), id="a few"), pytest.param(MANY, id="many", marks=pytest.mark.long)]
)
def test_every_trajectory_is_accounted_for_and_none_goes_to_a_server_that_has_left(
    part: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Found()
    for seed in part:
        play(seed, found, monkeypatch)
    assert (found.unaccounted, found.wrong) == (0, [])
    for kind in ("borrowed", "returned", "injected"):
        assert found.counts[kind] >= 3 * len(part), found.counts
    assert found.counts["moved"] >= 5 * len(part), found.counts


def test_the_same_seed_is_the_same_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert play(3, Found(), monkeypatch).events == play(3, Found(), monkeypatch).events
