"""EnvPool on virtual time: whatever sessions do, nobody gets a bad one, nothing is left, and what waits says for what."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from orchestrator.api import (
    ConfigError,
    EnvironmentTemplate,
    Observation,
    Prompt,
    RunError,
    StepResult,
    TrajectoryError,
)
from orchestrator.environments import environment_pool as pool_module
from orchestrator.environments.environment_pool import EnvPool, PooledEnvironment, PoolSettings
from orchestrator.events import EventLog, MemorySink
from scripts.bench.virtual_run import run

PROMPT = Prompt("key", "toy", 3, "payload")
SEEDS = 50


def of(name: str) -> Prompt:
    """A prompt whose environment begins from this setup; "payload": from none."""
    return Prompt(name, "toy", 3, name)


def template_of(prompt: Prompt) -> EnvironmentTemplate:
    return EnvironmentTemplate(setup="" if prompt.payload == "payload" else prompt.payload)


class Session:
    """Knows whether it may be used."""

    version = "toy 1"

    def __init__(self, backend: Backend, name: str, template: EnvironmentTemplate) -> None:
        self.backend, self.name, self.template = backend, name, template
        self.dead = self.sick = self.dirty = self.spoilt = False
        self.calls = 0

    async def reset(self, prompt: Prompt) -> Observation:
        assert not self.dead
        assert not self.dirty, f"{self.name} was not recycled"
        assert not self.spoilt, f"{self.name} was handed out again"
        assert self.template == template_of(prompt), f"{self.name} begins from another template"
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

    async def start(self, name: str, template: EnvironmentTemplate) -> Session:
        self.tries.append(asyncio.get_running_loop().time())
        self.starting = template
        await self.act("start", None)
        self.made.append(Session(self, name, template))
        self.most = max(self.most, len(self.made) - len(self.killed))
        return self.made[-1]

    async def act(self, what: str, session: Session | None) -> None:
        planned = self.plan(what, session)
        if isinstance(planned, BaseException):
            raise planned
        await asyncio.sleep(planned)


class Setting:
    """A pool and what it said."""

    def __init__(self, backend: Backend, templates: bool = False, **settings: Any) -> None:
        self.backend = backend
        self.sink = MemorySink()
        events = EventLog(self.sink, asyncio.get_running_loop().time)
        self.pool = EnvPool(
            backend, PoolSettings(**{"size": 4, **settings}), events, template_of if templates else None
        )
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

    async def take(self, prompt: Prompt = PROMPT) -> PooledEnvironment:
        return await self.pool.acquire(prompt, self.told.append)

    async def episode(self, prompt: Prompt = PROMPT, steps: int = 1) -> None:
        environment = await self.take(prompt)
        await environment.reset(prompt)
        for _ in range(steps):
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


@pytest.mark.parametrize("failure", [RuntimeError("full"), ConfigError("environment", "e2", "use the same there")])
def test_while_one_is_alive_failing_starts_end_nothing(failure: Exception) -> None:
    async def scenario() -> None:
        def plan(what: str, _: Session | None) -> float | BaseException:
            return failure if what == "start" and len(backend.tries) > 1 else float(what == "call")

        backend = Backend(plan)
        async with Setting(backend, start_tries=2, backoff_limit=2.0) as setting:
            await asyncio.gather(*(setting.episode() for _ in range(30)))
            assert len(backend.made) == 1
            assert len(backend.tries) > 9

    played(scenario)


def test_a_config_with_which_none_can_start_ends_the_run_when_two_in_a_row_say_so() -> None:
    async def scenario(said: Sequence[Exception], tried: int, **settings: Any) -> None:
        backend = Backend(lambda *_: said[min(len(backend.tries), len(said)) - 1])
        setting = Setting(backend, **settings)
        with pytest.raises(ConfigError, match="fix it"):
            await setting.pool.open()
        await setting.pool.close()
        assert len(backend.tries) == tried

    wrong = ConfigError("environment.backend", "x", "fix it")
    played(lambda: scenario([wrong], 2))
    played(lambda: scenario([wrong], 1, start_tries=1))
    played(lambda: scenario([wrong, OSError("busy"), wrong], 4))


@pytest.mark.parametrize("failure", [ConfigError("environment", "e1", "use the same there"), SystemExit(3), OSError()])
def test_the_first_start_of_all_ends_no_run_alone(failure: BaseException) -> None:
    async def scenario() -> None:
        backend = Backend(lambda what, _: failure if what == "start" and len(backend.tries) == 1 else 0.0)
        async with Setting(backend) as setting:
            await setting.take()
            assert setting.faults() == ["environment_start"]

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


def test_a_wrong_answer_of_the_one_that_comes_after_the_last_is_a_failed_start_like_another() -> None:
    async def scenario() -> None:
        def plan(what: str, _: Session | None) -> float | BaseException:
            if what == "call":
                return TrajectoryError("environment_died", "it crashed")
            lies = what == "start" and len(backend.tries) == 2
            return ConfigError("environment", "e2", "it has protocol 7, use the same there") if lies else 0.0

        backend = Backend(plan)
        async with Setting(backend, size=1) as setting:
            environment = await setting.take()
            with pytest.raises(TrajectoryError, match="it crashed"):
                await environment.reset(PROMPT)
            await setting.pool.release(environment, False)
            await setting.take()
            assert setting.faults()[-1] == "environment_start"
            assert len(backend.made) == 2

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


# -- templates ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_every_prompt_gets_an_environment_of_its_own_template_and_none_is_starved(seed: int) -> None:
    rng = random.Random(f"templates/{seed}")
    rate = rng.choice((0.0, 0.1))

    def plan(what: str, session: Session | None) -> float | BaseException:
        return RuntimeError("x") if what != "kill" and rng.random() < rate else rng.expovariate(2.0)

    backend, size = Backend(plan), rng.randint(1, 5)

    async def user(setting: Setting) -> None:
        await asyncio.sleep(rng.expovariate(0.05))
        prompt = of(f"repository-{rng.randint(0, 8)}")
        environment = await setting.take(prompt)
        assert len(backend.made) - len(backend.killed) <= size
        trusted = False
        try:
            await environment.reset(prompt)
            await environment.step((1,))
            trusted = True
        except RuntimeError:
            pass
        finally:
            await setting.pool.release(environment, trusted)

    async def scenario() -> None:
        settings = {"size": size, "warm": rng.randint(0, size), "start_tries": 1000, "backoff_limit": 5.0}
        async with Setting(backend, templates=True, **settings) as setting:
            async with asyncio.timeout(3000), asyncio.TaskGroup() as group:
                for _ in range(60):
                    group.create_task(user(setting))
            assert (setting.pool.stats()["busy"], setting.pool.stats()["waiting"]) == (0, 0)

    played(scenario)


def test_a_template_that_does_not_start_holds_up_no_other_and_ends_no_run() -> None:
    def plan(what: str, session: Session | None) -> float | BaseException:
        return RuntimeError("no such disk") if what == "start" and backend.starting.setup == "bad" else 0.1

    backend = Backend(plan)

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        async with Setting(backend, templates=True, start_tries=3, backoff_first=8.0) as setting:
            refused = asyncio.create_task(setting.take(of("bad")))
            await asyncio.sleep(0.5)
            begun = loop.time()
            await asyncio.gather(*(setting.episode(of("good")) for _ in range(3)))
            assert loop.time() - begun < 1.0
            with pytest.raises(
                TrajectoryError, match=r"environment_start: none can be started from bad, failed 3 times .*disk"
            ):
                await refused
            assert setting.faults() == ["environment_start"] * 3
            assert any("which failed 2 times in a row" in told for told in setting.told)
            begun = loop.time()
            with pytest.raises(TrajectoryError, match="failed 4 times in a row"):  # one try, when its pause is over
                await setting.take(of("bad"))
            assert loop.time() - begun < 60.0
            await setting.episode(of("good"))

    played(scenario)


@pytest.mark.parametrize(
    "missing",
    [
        TrajectoryError("environment_template", "repository x does not build"),
        ConfigError("environment", "e1", "it has rl-coserve 0.0.1 and does not build"),  # an image with another one
    ],
)
def test_what_no_try_cures_is_refused_at_once(missing: Exception) -> None:
    def plan(what: str, session: Session | None) -> float | BaseException:
        return missing if what == "start" and backend.starting.setup == "x" else 0.1

    backend = Backend(plan)

    async def scenario() -> None:
        async with Setting(backend, templates=True) as setting:
            takes = await asyncio.gather(*(setting.take(of("x")) for _ in range(3)), return_exceptions=True)
            assert [getattr(error, "cause", error) for error in takes] == ["environment_template"] * 3
            assert len(backend.tries) <= 3
            assert "does not build" in str(takes[0])
            await setting.episode(of("good"))

        async with Setting(Backend(), templates=True) as setting:
            setting.pool._template_of = lambda prompt: EnvironmentTemplate(setup={}[prompt.key])  # type: ignore[index]
            with pytest.raises(TrajectoryError, match="environment_template: the task does not say it: KeyError"):
                await setting.take(of("x"))
            for said in (None, "image", {}, EnvironmentTemplate(image=3)):  # type: ignore[arg-type]
                setting.pool._template_of = lambda prompt, said=said: said  # type: ignore[misc,assignment,return-value]
                with pytest.raises(TrajectoryError, match="environment_template: no EnvironmentTemplate of texts"):
                    await setting.take(of("x"))
            setting.pool._template_of = template_of
            await setting.episode(of("good"))

    played(scenario)


def test_a_full_pool_makes_room_for_whoever_waits_longest() -> None:
    backend = Backend()

    async def scenario() -> None:
        async with Setting(backend, templates=True, size=2, idle=1e9) as setting:
            await asyncio.gather(setting.episode(of("a")), setting.episode(of("b")))
            await setting.episode(of("c"))  # the session that was idle longest has gone
            assert setting.pool.stats()["replaced"] == {"template": 1}
            # All places are used, and a's users would never leave a session idle.
            ends: list[str] = []

            async def user(name: str) -> None:
                await setting.episode(of(name), steps=3)
                ends.append(name)

            many = [asyncio.create_task(user("a")) for _ in range(4)]
            await asyncio.sleep(0.01)
            late = asyncio.create_task(user("d"))
            await asyncio.sleep(0.01)
            later = [asyncio.create_task(user("a")) for _ in range(6)]
            await asyncio.gather(*many, late, *later)
            assert ends.index("d") <= 5, ends

    played(scenario)


def test_those_that_are_kept_ready_are_shared_out_as_they_were_asked_for() -> None:
    async def scenario() -> None:
        async with Setting(Backend(), templates=True, size=12, warm=4, idle=5.0, ping_every=2.0) as setting:
            for _ in range(12):
                for name in ("a", "a", "a", "b"):
                    await setting.episode(of(name))
            await asyncio.sleep(60.0)
            ready = [session.template.setup for session in setting.backend.made if not session.dead]
            assert sorted(ready) == ["a", "a", "a", "b"]

    played(scenario)


@pytest.mark.parametrize("waiting", [100, 3000])
def test_a_change_costs_the_same_however_many_templates_wait(waiting: int, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Counter[str]()

    def counted(name: str) -> None:
        method = getattr(pool_module._Shelf, name)

        def look(self: Any, *given: Any) -> Any:
            looks[name] += 1
            return method(self, *given)

        monkeypatch.setattr(pool_module._Shelf, name, look)

    for name in ("missing", "room", "reason", "rank"):
        counted(name)

    async def scenario() -> None:
        async with Setting(Backend(), templates=True, size=4) as setting:
            first = [await setting.take(of(f"first-{number}")) for number in range(4)]
            asking = [asyncio.create_task(setting.take(of(f"image-{number}"))) for number in range(waiting)]
            await asyncio.sleep(1)
            looks.clear()
            served = 0
            for environment in first:
                await setting.pool.release(environment, True)
                await asyncio.sleep(1)
            for task in asking[:100]:
                environment = await task
                served += 1
                await setting.pool.release(environment, True)
            assert served == 100
            assert sum(looks.values()) < 80 * served, f"{looks} for {served} episodes"
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    played(scenario)


def test_a_pool_that_can_never_be_full_says_so_once() -> None:
    """The default number of starts at a time is for a few dozen."""
    for parallel, told in ((4, 1), (64, 0)):
        sink = MemorySink()

        async def main(settings: PoolSettings, sink: MemorySink = sink) -> int:
            pool = EnvPool(Backend(lambda *_: 30.0), settings, EventLog(sink, asyncio.get_running_loop().time))
            await pool.open()
            taken = [asyncio.create_task(pool.acquire(PROMPT, lambda _: None)) for _ in range(settings.size)]
            await asyncio.sleep(1800)
            had = sum(task.done() for task in taken)
            for task in taken:
                task.cancel()
            await asyncio.gather(*taken, return_exceptions=True)
            await pool.close()
            return had

        had = run(main(PoolSettings(1000, parallel_starts=parallel, kill_timeout=60.0)), max_callbacks=10_000_000)
        alarms = [json.loads(line)["detail"] for line in sink.lines if '"alarm"' in line]
        assert len(alarms) == told
        assert (had == 1000) == (not told)
        if told:
            assert "4 start at a time, in 30.0 s" in alarms[0]
            assert "no more than 480 of 1000 will ever be there; raise environment.parallel_starts" in alarms[0]
