"""The task `repository`: an oracle solves every bug, an agent that does nothing solves none, a scripted one some; the tests stay
out of sight; what cannot be built is refused with its reason."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from orchestrator.api import ConfigError, EnvironmentTemplate, Prompt, TrajectoryError
from orchestrator.config import load_config
from orchestrator.environments.environment_pool import EnvPool, PoolSettings
from orchestrator.environments.inprocess import InProcessBackend
from orchestrator.events import EventLog, MemorySink
from orchestrator.runtime import preflight
from orchestrator.tasks.repository import RepositoryGame, RepositoryTask, left_by
from orchestrator.tasks.repository_bundles import BUNDLED, HIDDEN, bundled_names, read_bundle
from orchestrator.tasks.splits import is_heldout, key_of
from scripts.repository_agents import reward_of, turns_of

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")
EVERY = [f"{name} {bug}" for name in bundled_names() for bug in read_bundle(name).bugs]
FEW = [f"{name} {next(iter(read_bundle(name).bugs))}" for name in bundled_names()]


@pytest.fixture(scope="module")
def task() -> RepositoryTask:
    return RepositoryTask(heldout=5)


def reward(task: RepositoryTask, agent: str, payload: str) -> float:
    return reward_of(payload, asyncio.run(turns_of(agent, payload, task)))


def test_the_bugs_are_many_planted_and_historical_and_all_licences_are_there() -> None:
    assert len(EVERY) >= 100
    assert len(bundled_names()) >= 5
    assert sum("planted" not in payload for payload in EVERY) >= 5
    split = [is_heldout(key_of(payload)) for payload in EVERY]
    assert 0.1 < sum(split) / len(split) < 0.35
    for name in bundled_names():
        bundle = read_bundle(name)
        assert bundle.license in ("MIT", "BSD-3-Clause", "Apache-2.0")
        assert any(path.startswith("LICENSE") for path in bundle.files)
        assert not any("test" in path for path in bundle.files)


@pytest.mark.parametrize("payload", FEW)
def test_the_oracle_solves_and_doing_nothing_does_not(task: RepositoryTask, payload: str) -> None:
    assert reward(task, "oracle", payload) == 1.0
    assert reward(task, "null", payload) == 0.0


def test_a_scripted_agent_solves_some(task: RepositoryTask) -> None:
    assert reward(task, "baseline", "pytimeparse planted-12") == 1.0
    assert reward(task, "baseline", "toposort planted-1") == 0.0


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_oracle_solves_all_the_null_agent_none_and_the_baseline_some(task: RepositoryTask) -> None:
    scores = {agent: [reward(task, agent, payload) for payload in EVERY] for agent in ("oracle", "null", "baseline")}
    assert set(scores["oracle"]) == {1.0}
    assert set(scores["null"]) == {0.0}
    assert 0.02 < sum(scores["baseline"]) / len(EVERY) < 0.95


def said(*turns: str, payload: str = "") -> list[str]:
    async def play() -> list[str]:
        game = RepositoryGame(payload or FEW[-1], RepositoryTask(heldout=1).sandbox())
        return [(await game.act(turn)).text for turn in turns]

    return asyncio.run(play())


def test_an_agent_edits_over_turns_and_runs_what_it_wrote() -> None:
    payload = "pytimeparse " + next(iter(read_bundle("pytimeparse").bugs))
    write = "edit mine.py 1 0\nimport pytimeparse\nprint(pytimeparse.parse('1:24'), 6*7)"
    listed, wrote, ran, shown, found, gone, again = said(
        "ls",
        write,
        "run\nimport mine\nopen('left.txt', 'w').write('x')",
        "show mine.py 2 2",
        "find import pytimeparse",
        "edit mine.py 2 2",
        "run\nimport os; print(sorted(os.listdir('.')))",
        payload=payload,
    )
    assert "pytimeparse/timeparse.py 181\n" in listed
    assert wrote == "mine.py has 2 lines\n"
    assert ran.endswith("42\n")
    assert shown == "2 print(pytimeparse.parse('1:24'), 6*7)\n"
    assert found == "mine.py 1 import pytimeparse\n"
    assert gone == "mine.py has 1 lines\n"
    assert "left.txt" not in again, "what a run changes is gone with it"
    assert "mine.py" in again


def test_the_tests_are_nowhere_an_agent_can_look() -> None:
    look = """run
import os
for place in ('/box', '/tmp', '/usr/lib/python3', '/home', '/root', '/opt'):
    for folder, _, names in os.walk(place):
        for name in names:
            if 'timeparse' in name or 'hidden' in folder: print(folder, name)"""
    payload = "pytimeparse " + next(iter(read_bundle("pytimeparse").bugs))
    (seen,) = said(look, payload=payload)
    assert seen == "/box/pytimeparse timeparse.py\n"
    for turn in (
        f"show {HIDDEN}test_timeparse.py",
        "find assertEqual",
        f"edit {HIDDEN}x.py 1 0\nx",
        "edit main.py 1 0\nx",
    ):
        assert "assert" not in said(turn, payload=payload)[0]


def test_what_an_agent_leaves_in_place_of_the_tests_does_not_reach_them() -> None:
    payload = FEW[0]
    cheat = ["edit hidden 1 0\nx", "edit main.py/x 1 0\nx", "edit sitecustomize.py 1 0\nprint('OK')", "done"]
    assert reward_of(payload, cheat) == 0.0


@pytest.mark.parametrize(
    "turn",
    [
        *(
            "",
            "sing",
            "show",
            "show nowhere.py",
            "show pytimeparse/timeparse.py x",
            "show pytimeparse/timeparse.py 9999",
        ),
        *(
            "edit hidden/x.py 1 0\nx",
            "edit hidden 1 0\nx",
            "edit pytimeparse 1 0\nx",
            "edit pytimeparse/timeparse.py/x 1 0\nx",
        ),
        *("edit ../x 1 0\nx", "edit /etc/x 1 0\nx", "edit pytimeparse/timeparse.py 9 2\nx", "edit x.py 2 1\nx"),
    ],
)
def test_a_turn_that_is_no_command_changes_nothing(turn: str) -> None:
    async def play() -> tuple[bool, bool]:
        game = RepositoryGame("pytimeparse " + next(iter(read_bundle("pytimeparse").bugs)), None)
        before = game.files
        reply = await game.act(turn)
        return reply.invalid, game.files == before

    assert asyncio.run(play()) == (True, True)


def test_turns_after_the_end_are_refused() -> None:
    with pytest.raises(ValueError, match="ended at turn 1"):
        asyncio.run(left_by(FEW[0], ["done", "ls"]))
    with pytest.raises(ValueError, match="no bug"):
        RepositoryGame("pytimeparse planted-9999", None)


def test_environments_are_kept_by_repository_and_each_episode_begins_at_its_own_checkout(task: RepositoryTask) -> None:
    async def play() -> None:
        loop = asyncio.get_running_loop()
        sink = MemorySink()
        settings = PoolSettings(size=4, warm=0)
        pool = EnvPool(InProcessBackend(task), settings, EventLog(sink, loop.time), task.environment_template)
        await pool.open()
        prompts = [Prompt(payload, task.name, 1, payload) for payload in EVERY[:3] + FEW[-1:]]
        assert {task.environment_template(prompt) for prompt in prompts[:3]} == {
            EnvironmentTemplate(setup=bundled_names()[0])
        }
        for prompt in (*prompts, *prompts):
            environment = await pool.acquire(prompt, lambda _: None)
            shown = task.words.decode((await environment.reset(prompt)).token_ids)
            assert shown.startswith(prompt.payload.partition(" ")[0])
            await environment.step(task.words.turn("edit new.py 1 0\nx"))
            found = await environment.step(task.words.turn("ls"))
            assert task.words.decode(found.observation.token_ids).count("new.py") == 1
            await pool.release(environment, True)
        assert pool.stats()["started"] == 2, "one a repository"
        await pool.close()

    asyncio.run(play())


def bundle_file(folder: Path, **changes: Any) -> str:
    found = json.loads((BUNDLED / "pytimeparse.json").read_text())
    (folder / "mine.json").write_text(json.dumps({**found, **changes}))
    return str(folder / "mine.json")


def test_a_repository_that_does_not_build_says_so_and_ends_only_its_episodes(
    tmp_path: Path, task: RepositoryTask
) -> None:
    files = json.loads((BUNDLED / "pytimeparse.json").read_text())["files"]
    mine = bundle_file(tmp_path, files={**files, "pytimeparse/broken.py": ["import a_module_that_is_not_there"]})
    own = RepositoryTask(1, [mine, "toposort"])

    async def play() -> None:
        events = EventLog(MemorySink(), asyncio.get_running_loop().time)
        pool = EnvPool(InProcessBackend(own), PoolSettings(size=2), events, own.environment_template)
        await pool.open()
        with pytest.raises(TrajectoryError, match=r"environment_template.*does not build.*a_module_that_is_not_there"):
            await pool.acquire(Prompt("k", "repository", 1, f"{mine} planted-1"), lambda _: None)
        other = next(payload for payload in EVERY if payload.startswith("toposort"))
        await pool.release(await pool.acquire(Prompt("k", "repository", 1, other), lambda _: None), True)
        await pool.close()

    asyncio.run(play())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bugs": []}, "no bug"),
        ({"files": {"../x": ["y"]}}, "working folder"),
        ({"files": "x"}, "is not a repository bundle"),
        ({"tests": {"a.py": "text"}}, "a list of texts"),
        ({"passing": []}, "fails no test"),
    ],
)
def test_a_file_that_is_no_bundle_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    read_bundle.cache_clear()
    with pytest.raises(ConfigError, match=words):
        RepositoryTask(1, [bundle_file(tmp_path, **changes)])


def test_the_config_names_repositories() -> None:
    config = load_config(None, ["task.name=repository", "task.heldout_maps=1", "task.repositories=['pytimeparse']"])
    prompt = next(preflight.make_task(config).prompts("train", 0))
    assert prompt.payload.startswith("pytimeparse ")
    with pytest.raises(ConfigError, match="repositories"):
        load_config(None, ["task.repositories=['toposort']"])
    with pytest.raises(ConfigError, match="cannot be read"):
        preflight.make_task(load_config(None, ["task.name=repository", "task.repositories=['nowhere.json']"]))
