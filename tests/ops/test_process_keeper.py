"""Children of a run: who comes back at its old address, what ends the run, and what a run does when a part of it is lost."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.api import ConfigError, PartLost, RetryableError, RunError, Trajectory, Turn
from orchestrator.config import load_config
from orchestrator.events import EventLog, MemorySink
from orchestrator.rewards.host_launch import PATIENCE, RewardHost
from orchestrator.rewards.reward_client import HttpReward
from orchestrator.run_folder import RunFolder
from orchestrator.runtime import process_keeper as keeping
from orchestrator.runtime import real_run as training
from orchestrator.runtime.process_keeper import Keeper
from orchestrator.tasks.frozenlake import FrozenLakeTask
from scripts.bench.virtual_run import run


def trajectory() -> Trajectory:
    prompt = next(FrozenLakeTask().prompts("train", 0))
    turns = (Turn((1,), (3,), (-0.1,), ((0, 1),)),)
    return Trajectory("t", "g", "frozenlake", prompt, turns, None, "1", 0, truncated=False)


class Host:
    """A child that dies when told; the first restarts fail, so many as ``failing``."""

    def __init__(self, failing: int = 0) -> None:
        self.pid: int | None = 1
        self.failing = failing
        self.restarted: list[float] = []
        self.gone = asyncio.Event()

    async def ended(self) -> None:
        await self.gone.wait()

    async def restart(self) -> None:
        self.restarted.append(asyncio.get_running_loop().time())
        if self.failing:
            self.failing -= 1
            raise RunError("the port is taken")
        self.gone.clear()


def kept(limit: int, scenario: Callable[[Host, Keeper, list[BaseException]], Any], failing: int = 0) -> MemorySink:
    sink = MemorySink()

    async def main() -> None:
        host, ends = Host(failing), list[BaseException]()
        keeper = Keeper(EventLog(sink, asyncio.get_running_loop().time))
        keeper.keep("reward host", host, limit)
        keeper.start(ends.append)
        await scenario(host, keeper, ends)
        await keeper.close()

    run(main())
    return sink


def test_a_dead_host_is_restarted_at_once_and_then_after_growing_pauses() -> None:
    async def scenario(host: Host, keeper: Keeper, ends: list[BaseException]) -> None:
        host.gone.set()
        await asyncio.sleep(0.5)
        assert keeper.waiting_for == "the reward host to come back"
        await asyncio.sleep(60)
        assert host.restarted == [0.0, 1.0, 3.0, 7.0]
        assert (ends, keeper.waiting_for) == ([], "")

    sink = kept(5, scenario, failing=3)
    kinds = [json.loads(line)["kind"] for line in sink.lines]
    assert kinds == ["fault"] * 4 + ["recovered"]


def test_a_host_that_dies_again_and_again_ends_the_run_with_its_name() -> None:
    async def scenario(host: Host, keeper: Keeper, ends: list[BaseException]) -> None:
        for _ in range(3):
            host.gone.set()
            await asyncio.sleep(10)
        assert len(host.restarted) == 2
        [error] = ends
        assert "the reward host died" in str(error)
        assert not isinstance(error, PartLost)

    kept(2, scenario)


def test_a_host_that_lived_for_long_has_all_its_restarts_again() -> None:
    async def scenario(host: Host, keeper: Keeper, ends: list[BaseException]) -> None:
        for _ in range(6):
            await asyncio.sleep(keeping.STEADY_SECONDS + 1)
            host.gone.set()
        await asyncio.sleep(1)
        assert (len(host.restarted), ends) == (6, [])

    kept(1, scenario)


def test_a_watcher_that_is_itself_broken_ends_the_run_instead_of_watching_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A restart may raise what nobody foresaw; a run whose hosts nobody watches would wait for ever."""

    async def scenario(host: Host, keeper: Keeper, ends: list[BaseException]) -> None:
        async def broken() -> None:
            raise ValueError("nobody foresaw this")

        monkeypatch.setattr(host, "restart", broken)
        host.gone.set()
        await asyncio.sleep(1)
        assert [str(error) for error in ends] == ["nobody foresaw this"]

    kept(5, scenario)


def test_the_death_of_a_child_that_holds_state_is_a_lost_part() -> None:
    class Master:
        pid = 1

        async def ended(self) -> None:
            await asyncio.sleep(5)

    async def main() -> None:
        ends: list[BaseException] = []
        keeper = Keeper(EventLog(MemorySink(), asyncio.get_running_loop().time))
        keeper.keep("mooncake_master", Master())
        keeper.start(ends.append)
        await asyncio.sleep(6)
        await keeper.close()
        assert [type(error) for error in ends] == [PartLost]
        assert "the mooncake_master died" in str(ends[0])

    run(main())


def test_a_real_host_killed_with_a_call_in_flight_answers_it_from_its_next_life(tmp_path: Path) -> None:
    async def main() -> None:
        host = RewardHost("orchestrator.tasks.rewards:frozenlake_success", log=tmp_path / "log", timeout=30.0)
        await host.start()
        ends: list[BaseException] = []
        keeper = Keeper(EventLog(MemorySink(), asyncio.get_running_loop().time))
        keeper.keep("reward host", host, 3)
        keeper.record(tmp_path / "processes", dict)
        keeper.start(ends.append)
        reward = HttpReward(host.url, token=host.token, retries=0, timeout=30.0, patience=PATIENCE)
        try:
            url, first = host.url, host.pid
            assert first is not None
            os.kill(first, signal.SIGSTOP)  # the call is on its way, and stays so
            call = asyncio.create_task(reward.score(trajectory()))
            await asyncio.sleep(0.1)
            assert not call.done()
            os.kill(first, signal.SIGKILL)
            assert isinstance(await call, float)
            assert (host.url, ends) == (url, [])
            assert host.pid != first
            deadline = time.monotonic() + 30
            while f"reward-host {host.pid}\n" not in (tmp_path / "processes").read_text():
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)
        finally:
            await keeper.close()
            await reward.close()
            await host.stop()

    asyncio.run(main())


class Lives:
    """Stands for the lives of a run, each of which ends as told: (steps trained, error), or (steps, "")."""

    def __init__(self, *ends: tuple[int, Exception | str]) -> None:
        self.ends = list(ends)
        self.resumed: list[bool] = []
        self.started: list[str] = []

    def __call__(
        self, config: object, folder: object, task: object, resume: bool, started: str, lost: object, end: object
    ) -> Any:
        self.resumed.append(resume)
        self.started.append(started)
        steps, end = self.ends.pop(0)

        class Life:
            trained, up, opened = steps, steps >= 0, steps >= -1

            async def run(self) -> str:
                await asyncio.sleep(100)
                if isinstance(end, Exception):
                    raise end
                return end

        return Life()


def lived(monkeypatch: pytest.MonkeyPatch, limit: int, *ends: tuple[int, Exception | str]) -> tuple[str, Lives]:
    lives = Lives(*ends)
    monkeypatch.setattr(training, "_Life", lives)
    config = load_config(None, [f"run.restarts={limit}"])

    class Folder:
        path = Path("runs/t-001")
        logs = path / "logs"

    main = training._live(config, Folder(), None, False, "2026-01-01T00:00:00+00:00", str)  # type: ignore[arg-type]
    return run(main), lives


def test_a_run_that_lost_its_trainer_goes_on_from_its_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = PartLost("the trainer failed in train_step: trainer died")
    reason, lives = lived(monkeypatch, 1, (3, lost), (4, lost), (9, lost), (10, "completed"))
    assert reason == "completed"
    assert lives.resumed == [False, True, True, True]
    assert lives.started[1] == "2026-01-01T00:01:40+00:00", "a life begins when it begins"


def test_lives_that_train_nothing_new_are_counted_and_then_the_run_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = PartLost("the trainer failed in train_step: out of memory")
    with pytest.raises(RunError, match=r"out of memory\n  resume with: .*--resume runs/t-001"):
        lived(monkeypatch, 2, (3, lost), (3, lost), (3, lost), (9, "completed"))
    reason, _ = lived(monkeypatch, 2, (3, lost), (3, lost), (9, "completed"))
    assert reason == "completed"


@pytest.mark.parametrize("error", [RunError("no rollout worker left"), RetryableError("Megatron-Core did not start")])
def test_what_a_new_life_would_not_cure_ends_the_run(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    with pytest.raises(RunError, match="resume with"):
        lived(monkeypatch, 2, (3, error), (9, "completed"))


def test_after_a_refused_resume_nobody_is_told_to_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its records could not be read: another try would be refused too."""
    with pytest.raises(RunError, match=r"^ledger: the journal has a line that is not a record$"):
        lived(monkeypatch, 2, (-2, RunError("ledger: the journal has a line that is not a record")))


def test_a_wrong_config_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError):
        lived(monkeypatch, 2, (-1, ConfigError("a.b", 1, "no")), (9, "completed"))


def test_a_life_that_does_not_come_up_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    lost, away = PartLost("the mooncake_master died"), RetryableError("Redis is away")
    reason, _ = lived(monkeypatch, 2, (3, lost), (-1, away), (9, "completed"))
    assert reason == "completed"


def test_what_does_not_come_up_in_its_time_ends_the_run_with_the_key_that_says_how_long() -> None:
    async def main() -> None:
        assert await training.within(1800.0, asyncio.sleep(1799.0, "up"), "vLLM", "rollout.start_timeout") == "up"
        with pytest.raises(RunError, match=r"vLLM did not come up within 1800 s: raise rollout\.start_timeout"):
            await training.within(1800.0, asyncio.sleep(1801.0), "vLLM", "rollout.start_timeout")

    run(main())


def test_a_list_of_processes_that_cannot_be_written_ends_no_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Only people read it."""

    async def scenario(host: Host, keeper: Keeper, ends: list[BaseException]) -> None:
        keeper.record(tmp_path / "gone" / "processes", dict)
        await asyncio.sleep(2)
        host.pid = 4711
        await asyncio.sleep(2)
        assert ends == []
        (tmp_path / "gone").mkdir()
        host.pid = 4712
        await asyncio.sleep(2)

    kept(1, scenario)
    assert "processes is not as it should be: [Errno 2]" in caplog.text
    assert "reward-host 4712" in (tmp_path / "gone" / "processes").read_text()


def test_a_sigterm_while_parts_start_ends_the_run_in_order_also_where_it_is_ignored_by_default(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As by the kernel for the first process of a container, which has not said what it does."""
    closed: list[bool] = []

    async def start(life: Any) -> str:
        asyncio.get_running_loop().call_later(0.05, os.kill, os.getpid(), signal.SIGTERM)
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0)
            closed.append(True)
        return "completed"

    monkeypatch.setattr(training._Life, "run", start)
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        folder = RunFolder.create(load_config(None, [f"run.folder={tmp_path}"]))
        ending = training.train(folder.config(), folder, FrozenLakeTask(), False, "2026-01-01T00:00:00+00:00")
        assert asyncio.run(asyncio.wait_for(ending, 5)) == "interrupted"
    finally:
        signal.signal(signal.SIGTERM, before)
    assert closed
