"""Tools over the function host, real processes: a tool's own failure is an answer, one of the way to it masks the trajectory."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from orchestrator.api import ConfigError, Prompt, TrajectoryError
from orchestrator.config import load_config
from orchestrator.environments.subprocesses import SubprocessBackend
from orchestrator.environments.tool_functions import ToolAnswer, ToolClient, ToolSettings, ToolTally
from orchestrator.events import EventLog, MemorySink
from orchestrator.observe.report.feature_sections import environments
from orchestrator.observe.report.run_log import load_run
from orchestrator.rewards.host_launch import FunctionHost
from orchestrator.runtime import preflight
from orchestrator.runtime.function_hosts import start_tools
from orchestrator.runtime.process_keeper import Keeper

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TOOLS = '''
import asyncio, time
from orchestrator.api import Observation, StepResult

def add(event):
    return event["a"] + event["b"]

def slow(event):
    time.sleep(event["seconds"])
    return "done"

class Calculating:
    """An environment that calls a tool in its step."""
    version = "calculating 1"
    def use_tools(self, tools):
        self.tools = tools
    async def reset(self, prompt):
        return Observation((2,))
    async def step(self, action_ids):
        answer = await self.tools.call("add", {"a": action_ids[0], "b": action_ids[1]})
        return StepResult(Observation((answer.value,)), 0.0, False)
    async def close(self):
        pass
'''


def with_host(
    tmp_path: Path, scenario: Callable[[FunctionHost, ToolSettings], Awaitable[None]], **options: Any
) -> None:
    (tmp_path / "tools_under_test.py").write_text(TOOLS)
    functions = {name: f"tools_under_test:{name}" for name in ("add", "slow")}

    async def whole() -> None:
        host = FunctionHost(functions, **{"concurrency": 2, "timeout": 5.0, **options})
        await host.start()
        try:
            urls = {name: host.url_of(name) for name in functions}
            await scenario(host, ToolSettings(urls, host.token, retries=1))
        finally:
            await host.stop()

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")]))
        asyncio.run(asyncio.wait_for(whole(), 100))


def test_what_a_tool_does_is_an_answer_and_cold_starts_are_counted(tmp_path: Path) -> None:
    async def scenario(host: FunctionHost, settings: ToolSettings) -> None:
        tools = ToolClient(settings)
        assert await tools.call("add", {"a": 1, "b": 2}) == ToolAnswer(3)
        assert await tools.call("add", {"a": 3, "b": 4}) == ToolAnswer(7)
        assert "KeyError" in (await tools.call("add", {"a": 3})).error
        assert "no such tool: 'sub'; there are: add, slow" in (await tools.call("sub", {})).error
        counted = tools.stats()["add"]
        assert (counted["calls"], counted["failed"], counted["cold_starts"]) == (3, 1, 1)
        assert 0 < counted["cold_seconds"] <= counted["seconds"]
        await tools.close()

    with_host(tmp_path, scenario)


def test_a_tool_that_was_warmed_up_has_no_cold_start(tmp_path: Path) -> None:
    async def scenario(host: FunctionHost, settings: ToolSettings) -> None:
        tools = ToolClient(settings)
        assert await tools.prewarm(2) == ()
        while (await _stats(host, settings))["add"]["idle"] < 2:
            await asyncio.sleep(0.05)
        answers = await asyncio.gather(*(tools.call("add", {"a": n, "b": n}) for n in range(4)))
        assert [answer.value for answer in answers] == [0, 2, 4, 6]
        assert tools.stats()["add"]["cold_starts"] == 0
        await asyncio.sleep(1.0)  # longer than idle processes stay
        assert (await _stats(host, settings))["add"]["live"] == 2
        await tools.close()

    with_host(tmp_path, scenario, idle_seconds=0.3)


async def _stats(host: FunctionHost, settings: ToolSettings) -> dict[str, Any]:
    import aiohttp

    async with (
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {settings.token}"}) as http,
        http.get(host.base_url + "/stats") as answer,
    ):
        found: dict[str, Any] = json.loads(await answer.read())["functions"]
        return found


@pytest.mark.long
def test_a_burst_beyond_the_limit_is_refused_and_the_others_are_served(tmp_path: Path) -> None:
    async def scenario(host: FunctionHost, settings: ToolSettings) -> None:
        tools = ToolClient(ToolSettings(settings.urls, settings.token, concurrency=2, burst=3))
        calls = (tools.call("slow", {"seconds": 0.2}) for _ in range(8))
        ends = await asyncio.gather(*calls, return_exceptions=True)
        assert [end for end in ends if isinstance(end, ToolAnswer)] == [ToolAnswer("done")] * 5
        refused = [end for end in ends if isinstance(end, TrajectoryError)]
        assert [error.cause for error in refused] == ["tool_unavailable"] * 3
        assert tools.stats()["slow"]["refused_burst"] == 3
        await tools.close()

    with_host(tmp_path, scenario)


@pytest.mark.parametrize(
    ("url", "cause"),
    [("http://127.0.0.1:9/x", "tool_unavailable"), pytest.param("", "tool_refused", marks=pytest.mark.long)],
)
def test_a_tool_that_is_not_reached_masks_the_trajectory(tmp_path: Path, url: str, cause: str) -> None:
    async def scenario(host: FunctionHost, settings: ToolSettings) -> None:
        tools = ToolClient(ToolSettings({"add": url or settings.urls["add"]}, "a wrong token", retries=1))
        with pytest.raises(TrajectoryError) as caught:
            await tools.call("add", {"a": 1, "b": 1})
        assert caught.value.cause == cause
        assert await tools.prewarm(1) == ("add",)
        await tools.close()

    with_host(tmp_path, scenario)


def test_an_environment_in_another_process_calls_tools_and_they_are_counted(tmp_path: Path) -> None:
    async def scenario(host: FunctionHost, settings: ToolSettings) -> None:
        tally, own = ToolTally(settings.urls), ToolClient(settings)
        backend = SubprocessBackend("tools_under_test:Calculating", {}, tools=vars(settings), tally=tally)
        sessions = [await backend.start(name) for name in ("e1", "e2")]
        for session in sessions:
            await session.reset(Prompt("k", "t", 1, ""))
            assert (await session.step((20, 22))).observation.token_ids == (42,)
        await own.call("add", {"a": 1, "b": 2})
        await sessions[0].step((1, 2))
        counted = tally.stats(own.stats())
        assert list(counted) == ["add", "slow"]
        assert (counted["add"]["calls"], counted["add"]["failed"], counted["slow"]["calls"]) == (4, 0, 0)
        assert counted["add"]["cold_starts"] >= 1
        assert counted["add"]["seconds"] > own.stats()["add"]["seconds"]
        await host.stop()
        with pytest.raises(TrajectoryError, match="tool_unavailable"):
            await sessions[0].step((20, 22))
        assert tally.stats({})["add"]["failed"] == 1  # an answer that is a failure tells them too
        for session in sessions:
            await session.kill()
        await own.close()

    with_host(tmp_path, scenario)


def test_a_tool_of_the_run_that_runs_too_long_is_an_answer_and_is_called_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = f"""
import time
def hang(event):
    open({str(tmp_path / "calls")!r}, "a").write("x")
    time.sleep(60)
"""
    (tmp_path / "hanging_tool.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")]))
    config = load_config(None, ['tools.functions={hang="hanging_tool:hang"}', "tools.timeout=1.0", "tools.warm=1"])

    class Task:
        tools: Any = None

        def use_tools(self, tools: ToolClient) -> None:
            self.tools = tools

    async def scenario() -> None:
        task: Any = Task()
        async with AsyncExitStack() as stack:
            keeper = Keeper(EventLog(MemorySink(), asyncio.get_running_loop().time))
            await start_tools(config, task, keeper, stack, tmp_path)
            assert "did not answer within 1 s" in (await task.tools.call("hang", {})).error

    asyncio.run(asyncio.wait_for(scenario(), 100))
    assert (tmp_path / "calls").read_text() == "x"


@pytest.mark.parametrize(
    "said",
    [
        "many",
        {"add": 3},
        {"add": {"calls": float("nan")}},
        {"add": {"calls": -1}},
        {"add": {"calls": "1"}},
        {"add": {"calls": 1}, "no such tool": {"calls": 1}},
    ],
)
def test_counters_of_a_process_that_says_anything_are_refused(said: object) -> None:
    tally = ToolTally(["add"])
    with pytest.raises(TrajectoryError) as refused:
        tally.of_process()(said)
    assert refused.value.cause == "environment_protocol"
    assert list(tally.stats({})) == ["add"]
    assert not any(tally.stats({})["add"].values())


def test_the_report_shows_what_tools_and_rewards_were_called_for(tmp_path: Path) -> None:
    counted = {"calls": 1234, "failed": 5, "retries": 6, "cold_starts": 7, "cold_seconds": 8.0, "seconds": 90.0}
    events = [
        {"kind": "run_start", "t": 0.0, "name": "r", "simulated": False, "mode": "async", "alpha": 1, "steps": 1},
        {"kind": "tools", "t": 1.0, "step": 0, "tools": {"hammer": {**counted, "refused_burst": 11}}},
        {"kind": "rewards", "t": 1.0, "step": 0, **counted, "calls": 4321},
    ]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    page = environments(load_run(tmp_path))
    assert "hammer" in page
    for number in ("1,234", "4,321", "11"):
        assert f">{number}<" in page, number


@pytest.mark.parametrize(
    ("override", "field"),
    [
        ('tools.functions={a="no.such.module:f"}', "tools.functions.a"),
        ('tools.functions={a="json:no_such_function"}', "tools.functions.a"),
        ('tools.functions={a="json:loads"}', "tools"),
    ],
)
def test_tools_that_cannot_be_are_found_before_anything_starts(override: str, field: str) -> None:
    config = load_config(None, [override])
    with pytest.raises(ConfigError) as caught:
        preflight.check(config, preflight.make_task(config))
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ('tools.functions={a="m:f"}', None),
        ('tools.functions={a="m"}', "tools.functions"),
        ('tools.functions={"a b"="m:f"}', "tools.functions"),
        ('tools={functions={a="m:f"}, urls={b="http://x"}}', "use either functions or urls"),
    ],
)
def test_tools_are_configured_by_name(override: str, message: str | None) -> None:
    if message is None:
        assert load_config(None, [override]).tools.any
    else:
        with pytest.raises(ConfigError, match=message):
            load_config(None, [override])
