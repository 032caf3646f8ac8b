"""The judge that a run starts: what is refused before anything starts, and MPS, which is there only where a GPU is (here a
stand-in for NVIDIA's program). The judge itself, in a whole run: tests/rewards/test_judge_real.py."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.api import ConfigError, RunError
from orchestrator.config import load_config
from orchestrator.events import EventLog, MemorySink
from orchestrator.ops.mps import BINARY, MpsControl
from orchestrator.rewards.host_launch import JudgeHost
from orchestrator.rewards.llm_judge import LLMJudge
from orchestrator.rewards.reward_client import RewardByTask
from orchestrator.runtime import function_hosts, judge_setup
from orchestrator.runtime.process_keeper import Keeper
from orchestrator.tasks import registry

OWN = ["reward.judge.path=model", "reward.judge.criterion=c"]
MIXED = ["task.name=mixture", "task.mixture.nim=1.0", "task.mixture.coding=1.0"]
BY_TASK = ["reward.judges.nim.path=model", "reward.judges.nim.criterion=c"]
PROGRAM = """#!{python}
import os, pathlib, sys
state = pathlib.Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"]) / "alive"
if sys.argv[1:] == ["-d"]:
    state.touch()
elif not state.exists():
    sys.exit("Cannot find MPS control daemon process")
elif sys.stdin.readline().split()[0] == "quit":
    state.unlink()
"""


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["reward.judge.path=model"], "criterion = .*: a judge needs one"),
        ([*OWN, "reward.judge.url='http://x/v1'", "reward.judge.model=m"], "is for a judge that the run starts"),
        ([*OWN, "reward.judge.structured=true"], "the run's own judge enforces no form"),
        ([*OWN, "reward.timeout=adaptive"], "a judge has no test cases.*reward.judges"),
        ([*OWN, *BY_TASK], "score some of the tasks, and reward.judge scores all of them"),
        ([*MIXED, "reward.judges.nim.criterion=c"], "reward.judges.nim.*a judge needs a url or a path"),
        (
            [*MIXED, *BY_TASK, "reward.judges.chess.path=m", "reward.judges.chess.criterion=c"],
            "chess.*is not a task of the mixture",
        ),
        (BY_TASK, "is not a task of the mixture; there are: none"),
        ([*OWN, "reward.judge.streamed.device=gpu"], "reward.judge.streamed.device"),
        ([*OWN, "reward.judge.streamed.mps_share=0"], "reward.judge.streamed.mps_share"),
        ([*OWN, "reward.judge.streamed.memory_gb=4"], "memory_gb"),
    ],
)
def test_a_judge_of_the_run_that_is_half_configured_is_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(None, overrides)


def folder(path: Path) -> Path:
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "tokenizer_config.json").write_text("{}")
    return path


def check(model: Path, *overrides: str) -> None:
    judge_setup.check(load_config(None, [f'reward.judge.path="{model}"', "reward.judge.criterion=c", *overrides]))


def test_a_folder_that_is_no_model_and_a_gpu_that_is_not_there_are_named_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judge_setup, "_DRIVER", tmp_path / "driver")
    model = folder(tmp_path / "model")
    check(model)
    check(model, "reward.judge.streamed.layers_file=/dev/shm/layers")
    with pytest.raises(ConfigError, match=r"reward.judge.streamed.device.*no GPU"):
        check(model, "reward.judge.streamed.device=cuda")
    with pytest.raises(ConfigError, match=r"reward.judge.path.*cannot be read"):
        check(tmp_path)
    (model / "tokenizer_config.json").unlink()
    with pytest.raises(ConfigError, match="no tokenizer_config"):
        check(model)


def test_on_a_gpu_without_the_mps_program_the_way_on_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "driver").touch()
    monkeypatch.setattr(judge_setup, "_DRIVER", tmp_path / "driver")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    model = folder(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"reward.judge.streamed.mps to false"):
        check(model)
    check(model, "reward.judge.streamed.mps=false")
    check(model, "reward.judge.streamed.device=cpu")
    with pytest.raises(ConfigError, match="pinned memory"):
        check(model, "reward.judge.streamed.mps=false", "reward.judge.streamed.layers_file=x")


@pytest.mark.parametrize(
    ("gpu", "visible", "overrides", "words"),
    [
        (False, None, [], "no GPU here"),
        (True, "", [], "no GPU here"),
        (True, None, ["reward.judge.streamed.device=cpu"], "runs on the CPU"),
        (True, None, ["reward.judge.streamed.mps=false"], "mps is false"),
        (True, None, ["ray.address='h:1'"], "not this run's processes"),
        (True, "0", [], ""),
    ],
)
def test_mps_is_started_only_where_judge_and_engines_share_a_gpu_and_the_reason_is_said(
    gpu: bool,
    visible: str | None,
    overrides: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(judge_setup, "_DRIVER", tmp_path if gpu else tmp_path / "none")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    said = judge_setup.why_no_mps(load_config(None, [*OWN, *overrides]))
    assert words in said
    assert bool(said) == bool(words)


def test_a_stand_in_for_mps_is_watched_revived_found_again_and_stopped_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / BINARY
    program.write_text(PROGRAM.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(judge_setup.MpsChild.__init__, "__defaults__", (0.01,))
    place, sink = tmp_path / "mps", MemorySink()
    alive = place / "pipes" / "alive"

    async def main() -> None:
        keeper = Keeper(EventLog(sink, asyncio.get_running_loop().time))
        failed: list[BaseException] = []
        async with AsyncExitStack() as stack:
            await judge_setup.start_mps(place, keeper, stack, 1)
            again = MpsControl(place)
            assert await again.revive() is False, "a run that is resumed finds it"
            keeper.start(failed.append)
            stack.push_async_callback(keeper.close)
            alive.unlink()
            async with asyncio.timeout(60):
                while not alive.exists():
                    await asyncio.sleep(0.02)
        assert not failed
        assert not alive.exists(), "it outlived the run"

    asyncio.run(main())
    events = [json.loads(line) for line in sink.lines]
    assert [(event["kind"], event["what"]) for event in events][:1] == [("fault", "MPS")]


def test_a_folder_for_mps_that_is_somebody_elses_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_setup.tempfile, "gettempdir", lambda: str(tmp_path))
    found = judge_setup.folder_of("run-001-abcd")
    assert found == judge_setup.folder_of("run-001-abcd")
    assert found != judge_setup.folder_of("run-002-abcd")
    found.chmod(0o777)
    with pytest.raises(RunError, match="open to others"):
        judge_setup.folder_of("run-001-abcd")


def test_the_runs_own_judge_is_asked_together_at_its_address_with_its_token() -> None:
    config = load_config(None, ["task.name=nim", *OWN, "reward.concurrency=32"])
    host = JudgeHost("model", memory_mb=7, log=None)
    host._port = 4711
    found = function_hosts.judge_of(config, registry.make("nim", 10), config.reward.judge, host)
    assert isinstance(found, LLMJudge)
    client: Any = found._endpoint
    assert client._url == "http://127.0.0.1:4711/v1/chat/completions"
    assert client._token.header() == {"Authorization": f"Bearer {host.token}"}
    assert client._slots._value == 32, "it computes them as a batch"
    assert client._patience > config.reward.judge.streamed.start_seconds
    assert not found._structured
    assert host.token not in " ".join(host.command()), "arguments are seen by all users of the machine"
    assert host.command()[host.command().index("--memory-mb") :][:2] == ["--memory-mb", "7"]


def test_judges_of_tasks_a_function_and_adaptive_timeouts_score_one_mixture() -> None:
    class Judge:
        def __init__(self) -> None:
            self.closed = False

        async def score(self, trajectory: Any) -> float:
            return 0.25

        def stats(self) -> dict[str, Any]:
            return {"calls": 2, "unreadable": 1}

        async def close(self) -> None:
            self.closed = True

    class Function(Judge):
        resize = staticmethod(lambda size: None)

        async def score(self, trajectory: Any) -> float:
            return 1.0

        def stats(self) -> dict[str, Any]:
            return {"calls": 3}

    config = load_config(None, [*MIXED, *BY_TASK, "reward.timeout=adaptive", "reward.judges.nim.timeout=7.5"])
    assert function_hosts.adaptive_timeouts(config) is not None, "the coding part has test cases"
    assert config.reward.judge_seconds(config.reward.judges["nim"]) == 7.5
    assert config.reward.judge_seconds(config.reward.judge) == config.reward.adaptive.whole
    assert list(config.reward.own_judges) == ["nim"]

    async def scenario() -> None:
        judge, function = Judge(), Function()
        reward = RewardByTask({"nim": judge}, function)  # type: ignore[arg-type]
        assert [await reward.score(SimpleNamespace(task=task)) for task in ("nim", "coding")] == [0.25, 1.0]  # type: ignore[arg-type]
        assert reward.stats() == {"calls": 5, "unreadable": 1}
        await reward.close()
        assert judge.closed
        assert function.closed

    asyncio.run(scenario())
