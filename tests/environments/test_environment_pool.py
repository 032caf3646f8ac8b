"""EnvPool on virtual time: whatever sessions do, nobody gets a bad one, nothing is left, and what waits says for what."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from orchestrator.api import ConfigError, Observation, Prompt, RunError, StepResult, TrajectoryError
from orchestrator.environments import environment_pool as pool_module
from orchestrator.environments.environment_pool import EnvPool, PooledEnvironment, PoolSettings
from orchestrator.events import EventLog, MemorySink
from scripts.bench.virtual_run import run

PROMPT = Prompt("key", "toy", 3, "payload")
SEEDS = 50


class Session:
    """Knows whether it may be used."""

    version = "toy 1"

    def __init__(self, backend: Backend, name: str) -> None:
        self.backend, self.name = backend, name
        self.dead = self.sick = self.dirty = self.spoilt = False
        self.calls = 0

    async def reset(self, prompt: Prompt) -> Observation:
        assert not self.dead
        assert not self.dirty, f"{self.name} was not recycled"
        assert not self.spoilt, f"{self.name} was handed out again"
        self.dirty = True
        await self._work()
        return Observation((2,))

    async def step(self, action_ids: tuple[int, ...]) -> StepResult:
        assert self.dirty
        await self._work()
        return StepResult(Observation((3,)), 0.0, False)

    async def recycle(self) -> None:
        await self.backend.act("recycle", self)
        self.dirty = False

    async def ping(self) -> None:
        await self.backend.act("ping", self)

    async def kill(self) -> None:
        self.dead = True
        self.backend.killed.add(self.name)
        await self.backend.act("kill", self)

    async def _work(self) -> None:
        self.calls += 1
        assert self.calls == 1, f"{self.name} has two users"
        try:
            await self.backend.act("call", self)
        except BaseException:
            self.spoilt = True
            raise
        finally:
            self.calls -= 1


class Backend:
    """Sessions that do what ``plan(what, session)`` says: a number of seconds to take, or an error to raise."""

    name = "toy"

    def __init__(self, plan: Callable[[str, Session | None], float | BaseException] = lambda *_: 0.1) -> None:
        self.plan = plan
        self.made: list[Session] = []
        self.killed: set[str] = set()
        self.tries: list[float] = []
        self.most = 0

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def start(self, name: str) -> Session:
        self.tries.append(asyncio.get_running_loop().time())
        await self.act("start", None)
        self.made.append(Session(self, name))
        self.most = max(self.most, len(self.made) - len(self.killed))
        return self.made[-1]

    async def act(self, what: str, session: Session | None) -> None:
        planned = self.plan(what, session)
        if isinstance(planned, BaseException):
            raise planned
        await asyncio.sleep(planned)


class Setting:
    """A pool and what it said."""

    def __init__(self, backend: Backend, **settings: Any) -> None:
        self.backend = backend
        self.sink = MemorySink()
        events = EventLog(self.sink, asyncio.get_running_loop().time)
        self.pool = EnvPool(backend, PoolSettings(**{"size": 4, **settings}), events)
        self.told: list[str] = []

    async def __aenter__(self) -> Setting:
        try:
            await self.pool.open()
        except BaseException:
            await self.pool.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.pool.close()
        assert {session.name for session in self.backend.made} == self.backend.killed
        states = ("starting", "checking", "recycling", "ready", "busy", "ending")
        assert sum(self.pool.stats()[state] for state in states) == 0

    async def take(self) -> PooledEnvironment:
        return await self.pool.acquire(self.told.append)

    async def episode(self) -> None:
        environment = await self.take()
        await environment.reset(PROMPT)
        await environment.step((1,))
        await self.pool.release(environment, True)

    def faults(self) -> list[str]:
        return [event["cause"] for event in map(json.loads, self.sink.lines) if event["kind"] == "fault"]


def played(scenario: Callable[[], Awaitable[None]], **options: Any) -> None:
    run(scenario(), **options)  # type: ignore[arg-type]


# -- anything at any time ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(SEEDS))
def test_whatever_sessions_and_users_do_the_pool_keeps_its_promises(seed: int) -> None:
    rng = random.Random(seed)
    rate = rng.choice((0.0, 0.1, 0.3))

    def plan(what: str, session: Session | None) -> float | BaseException:
        if session is not None and session.sick and what == "ping":
            return RuntimeError("sick")
        if rng.random() >= rate:
            return rng.choice((0.0, rng.expovariate(2.0)))
        if session is not None and what == "call":
            session.sick = rng.random() < 0.3
        kinds: list[float | BaseException] = [1000.0, RuntimeError("x"), SystemExit(3), asyncio.CancelledError()]
        return rng.choice([*kinds, TimeoutError(), OSError("y"), rng.expovariate(0.2)])

    backend = Backend(plan)
    size = rng.randint(1, 6)

    async def user(setting: Setting) -> None:
        await asyncio.sleep(rng.expovariate(0.05))
        environment = await setting.take()
        assert len(backend.made) - len(backend.killed) <= size
        trusted = False
        try:
            async with asyncio.timeout(20):
                await environment.reset(PROMPT)
                for _ in range(rng.randint(0, 3)):
                    await environment.step((1,))
                trusted = rng.random() < 0.9
        except (RuntimeError, OSError, SystemExit, asyncio.CancelledError):
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
        finally:
            await setting.pool.release(environment, trusted)
        with pytest.raises(TrajectoryError, match="given back"):
            await environment.step((1,))

    async def scenario() -> None:
        settings = {
            "size": size,
            "warm": rng.randint(0, size),
            "start_tries": 1000,
            "backoff_limit": 5.0,
            "max_age": rng.choice((30.0, 1e9)),
            "max_episodes": rng.choice((0, 3)),
            "idle": rng.choice((10.0, 1e9)),
        }
        async with Setting(backend, **settings) as setting:
            users = [asyncio.create_task(user(setting)) for _ in range(40)]
            for task in users:
                if rng.random() < 0.2:
                    asyncio.get_running_loop().call_later(rng.expovariate(0.03), task.cancel)
            ends = await asyncio.gather(*users, return_exceptions=True)
            stats = setting.pool.stats()
            assert (stats["busy"], stats["waiting"]) == (0, 0)
        assert [end for end in ends if end is not None and not isinstance(end, asyncio.CancelledError)] == []
        assert backend.most <= size

    played(scenario, seed=seed, shuffle=True, max_seconds=1e6)


# -- one at a time -----------------------------------------------------------------------------------------------------


def test_sessions_are_started_ahead_and_used_again() -> None:
    async def scenario() -> None:
        backend = Backend()
        async with Setting(backend, warm=3) as setting:
            await asyncio.sleep(2)
            assert setting.pool.stats()["ready"] == 4  # the one of the opening, and three
            for _ in range(10):
                await setting.episode()
                await asyncio.sleep(0.5)
            assert len(backend.made) <= 4
            assert setting.pool.stats()["replaced"] == {}

    played(scenario)


def test_pauses_between_failing_starts_double_up_to_the_limit_and_the_wait_has_a_name() -> None:
    failures = 7

    async def scenario() -> None:
        def plan(what: str, session: Session | None) -> float | BaseException:
            return RuntimeError("no image") if what == "start" and len(backend.tries) <= failures else 0.0

        backend = Backend(plan)
        setting = Setting(backend, warm=0, backoff_first=1.0, backoff_limit=10.0, start_tries=100)
        opening = asyncio.create_task(setting.pool.open())
        await asyncio.sleep(0.1)
        waiting = asyncio.create_task(setting.take())
        await opening
        await setting.pool.release(await waiting, True)
        await setting.pool.close()
        pauses = [later - sooner for sooner, later in zip(backend.tries, backend.tries[1:], strict=False)]
        for pause, longest in zip(pauses, (1, 2, 4, 8, 10, 10, 10), strict=False):
            assert 0.5 * longest <= pause <= longest
        assert setting.told[0] == "an environment to start, which failed once"
        assert f"an environment to start, which failed {failures} times in a row" in setting.told
        assert setting.faults() == ["environment_start"] * failures
        assert any('"recovered"' in line for line in setting.sink.lines)

    played(scenario)


def test_when_none_can_be_started_all_who_wait_are_told_why() -> None:
    async def scenario() -> None:
        setting = Setting(Backend(lambda *_: RuntimeError("no such image")), start_tries=3)
        with pytest.raises(RunError, match=r"failed 3 times in a row: RuntimeError\('no such image'\)"):
            await setting.pool.open()
        with pytest.raises(RunError, match="no such image"):
            await setting.take()
        await setting.pool.close()

    played(scenario)


def test_while_one_is_alive_failing_starts_end_nothing() -> None:
    async def scenario() -> None:
        def plan(what: str, _: Session | None) -> float | BaseException:
            return RuntimeError("full") if what == "start" and len(backend.tries) > 1 else 0.0

        backend = Backend(plan)
        async with Setting(backend, start_tries=2, backoff_limit=2.0) as setting:
            users = [asyncio.create_task(setting.episode()) for _ in range(5)]
            await asyncio.sleep(60)
            await asyncio.gather(*users)
            assert len(backend.made) == 1

    played(scenario)


def test_what_no_retry_cures_ends_the_run_at_once() -> None:
    async def scenario() -> None:
        backend = Backend(lambda *_: ConfigError("environment.backend", "x", "fix it"))
        setting = Setting(backend)
        with pytest.raises(ConfigError, match="fix it"):
            await setting.pool.open()
        await setting.pool.close()
        assert len(backend.tries) == 1

    played(scenario)


@pytest.mark.parametrize("failure", [RuntimeError("gone"), 1000.0])
@pytest.mark.parametrize("what", ["ping", "recycle"])
def test_one_that_fails_its_check_or_its_renewal_is_replaced(what: str, failure: float | BaseException) -> None:
    async def scenario() -> None:
        def plan(asked: str, session: Session | None) -> float | BaseException:
            return failure if asked == what and session is backend.made[0] else 0.0

        backend = Backend(plan)
        async with Setting(backend, ping_timeout=3.0, recycle_timeout=3.0) as setting:
            await asyncio.sleep(10)
            await setting.episode()
            assert setting.pool.stats()["replaced"] == {what: 1}
            assert backend.made[0].dead
            assert setting.faults() == [f"environment_{what}"]

    played(scenario)


def test_those_that_nobody_uses_are_checked_and_the_old_and_the_idle_go() -> None:
    async def scenario() -> None:
        backend = Backend()
        async with Setting(backend, size=5, warm=2, ping_every=30.0, idle=100.0, max_age=1000.0) as setting:
            users = [await setting.take() for _ in range(5)]
            for user in users:
                await setting.pool.release(user, True)
            await asyncio.sleep(20)
            assert setting.pool.stats()["ready"] == 5
            backend.made[0].sick = True
            backend.plan = lambda what, session: (
                RuntimeError("sick") if session is not None and session.sick and what == "ping" else 0.0
            )
            await asyncio.sleep(60)
            assert setting.pool.stats()["replaced"] == {"ping": 1}
            await asyncio.sleep(100)
            assert setting.pool.stats()["ready"] == 2
            await asyncio.sleep(1000)
            assert setting.pool.stats()["replaced"] == {"age": 2, "idle": 2, "ping": 1}
            assert setting.pool.stats()["ready"] == 2

    played(scenario)


def test_one_that_misbehaved_is_killed_and_replaced() -> None:
    async def scenario() -> None:
        backend = Backend()
        async with Setting(backend, size=1) as setting:
            first = await setting.take()
            name = first.name
            await setting.pool.release(first, False)
            second = await setting.take()
            assert second.name != name
            assert name in backend.killed
            await setting.pool.release(second, True)
            assert setting.pool.stats()["replaced"] == {"misbehaved": 1}

    played(scenario)


def test_one_that_cannot_be_killed_is_abandoned_counted_and_holds_up_nobody() -> None:
    async def scenario() -> None:
        backend = Backend(lambda what, _: 1e5 if what == "kill" else 0.0)
        async with Setting(backend, size=1, kill_timeout=7.0) as setting:
            begun = asyncio.get_running_loop().time()
            await setting.pool.release(await setting.take(), False)
            await setting.pool.release(await setting.take(), True)
            assert asyncio.get_running_loop().time() - begun == pytest.approx(7.0)
            assert setting.pool.stats()["abandoned"] == 1
            assert setting.faults() == ["environment_close"]

    played(scenario)


def test_who_waits_is_served_in_order_and_knows_that_all_are_in_use() -> None:
    async def scenario() -> None:
        order: list[int] = []

        async def user(setting: Setting, number: int) -> None:
            environment = await setting.take()
            order.append(number)
            await asyncio.sleep(1)
            await setting.pool.release(environment, True)

        async with Setting(Backend(), size=2) as setting:
            await asyncio.gather(*(user(setting, number) for number in range(8)))
            assert order == list(range(8))
            assert "a free environment, all in use" in setting.told
            assert setting.pool.stats()["wait_seconds"] > 0

    played(scenario)


@pytest.mark.parametrize("ticks", range(6))
def test_a_user_that_is_cancelled_just_when_it_is_served_loses_no_session(ticks: int) -> None:
    async def scenario() -> None:
        async with Setting(Backend(lambda *_: 0.0), size=1) as setting:
            taken = await setting.take()
            waiting = asyncio.create_task(setting.take())
            await asyncio.sleep(1)
            await setting.pool.release(taken, True)
            for _ in range(ticks):  # until it is renewed, handed over, received
                await asyncio.sleep(0)
            waiting.cancel()
            (end,) = await asyncio.gather(waiting, return_exceptions=True)
            if isinstance(end, PooledEnvironment):
                await setting.pool.release(end, True)
            async with asyncio.timeout(100):
                await setting.pool.release(await setting.take(), True)

    played(scenario)


def test_an_error_of_the_pool_itself_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with Setting(Backend(), size=1) as setting:
            taken = await setting.take()
            monkeypatch.setattr(pool_module.EnvPool, "_record_replacement", lambda *_: 1 / 0)
            setting.backend.plan = lambda what, _: RuntimeError("x") if what == "recycle" else 0.0
            await setting.pool.release(taken, True)
            with pytest.raises(RunError, match="the environment pool failed in recycle"):
                await setting.take()

    played(scenario)
