"""Sizes of pools that change: what the file and the command may say, and what the run is told."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from orchestrator.api import ConfigError
from orchestrator.cli import main
from orchestrator.config import Config, parse_config
from orchestrator.events import EventLog, MemorySink
from orchestrator.resources import pool_sizes
from orchestrator.resources.pool_sizes import FILE, PoolWatch, change_sizes, pools_of, read_sizes
from orchestrator.run_folder import RunFolder

CONFIG = parse_config({"rollout": {"workers": 2, "environments": 16}, "reward": {"concurrency": 3}})

JUDGE = {"url": "http://127.0.0.1:1", "model": "m", "criterion": "c"}
REWARDS = min(3, 2 * (os.cpu_count() or 1))


def test_a_run_begins_as_its_config_says_and_changes_add_up(tmp_path: Path) -> None:
    assert read_sizes(tmp_path, CONFIG) == {"rollout": 2, "environments": 16, "rewards": REWARDS}
    change_sizes(tmp_path, CONFIG, ["rollout=+2", "environments=24"])
    change_sizes(tmp_path, CONFIG, ["rollout=-1"])
    assert read_sizes(tmp_path, CONFIG) == {"rollout": 3, "environments": 24, "rewards": REWARDS}


def test_groups_of_engines_are_pools_of_their_own() -> None:
    groups = parse_config({"rollout": {"engines": [{"count": 2}, {"max_num_seqs": 8}]}})
    assert [(name, size.begins) for name, size in pools_of(groups).items()] == [
        ("rollout.0", 2),
        ("rollout.1", 1),
        ("environments", 64),
        ("rewards", min(32, 2 * (os.cpu_count() or 1))),
    ]


def test_what_scores_elsewhere_is_no_pool_of_the_run() -> None:
    for more in ({"url": "http://127.0.0.1:1/f"}, {"host": "ray_serve"}, {"judge": JUDGE}):
        assert "rewards" not in pools_of(parse_config({"reward": more}))
    assert "rewards" not in pools_of(parse_config({"task": {"name": "agent"}}))


def test_engines_that_are_cut_or_lent_keep_their_number() -> None:
    planned = parse_config({"rollout": {"workers": 2, "planner": {"enabled": True}}})
    assert [*pools_of(planned)] == ["environments", "rewards"]


@pytest.mark.parametrize(
    ("change", "field", "words"),
    [
        ("rollout=-2", "scale.rollout", "at least 1"),
        ("rollout=0", "scale.rollout", "at least 1"),
        ("environments=7", "scale.environments", "at least 8"),
        ("rewards=4", "scale.rewards", "at most 3 (reward.concurrency)"),
        ("rolout=+1", "scale", "there are: rollout, environments, rewards"),
        ("rollout", "scale", "write it as POOL=+2"),
        ("rollout=many", "scale", "write it as POOL=+2"),
    ],
)
def test_a_change_that_cannot_be_changes_nothing(change: str, field: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        change_sizes(tmp_path, CONFIG, ["environments=+8", change])
    assert caught.value.field == field
    assert not (tmp_path / FILE).exists()


@pytest.mark.parametrize("text", ["", "[]", '{"rollout": true}', '{"rollout": 1.5}', '{"rollout": "3"}', '{"x": 1}'])
def test_a_file_that_says_what_cannot_be_is_one_error(text: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(ConfigError):
        read_sizes(tmp_path, CONFIG)


def _grow(folder: Path) -> None:
    for _ in range(10):
        change_sizes(folder, CONFIG, ["rollout=+1"])


def test_changes_at_the_same_time_are_all_made(tmp_path: Path) -> None:
    processes = [multiprocessing.get_context("fork").Process(target=_grow, args=(tmp_path,)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert read_sizes(tmp_path, CONFIG)["rollout"] == 2 + 30


def test_pools_are_told_once_and_a_bad_file_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_sizes, "_EVERY", 0.01)
    told: list[tuple[str, int]] = []
    sink = MemorySink()

    async def read() -> Mapping[str, int]:
        return read_sizes(tmp_path, CONFIG)

    async def main() -> None:
        begins = read_sizes(tmp_path, CONFIG)
        tell = {name: lambda size, name=name: told.append((name, size)) for name in pools_of(CONFIG)}
        watch = asyncio.create_task(
            PoolWatch(begins, read, tell, EventLog(sink, asyncio.get_running_loop().time)).run()
        )
        await asyncio.sleep(0.1)
        (tmp_path / FILE).write_text('{"rollout": 0}')
        await asyncio.sleep(0.1)
        change_sizes_anew(tmp_path, CONFIG)
        await asyncio.sleep(0.1)
        watch.cancel()

    asyncio.run(main())
    assert told == [("rollout", 5)]
    faults = [json.loads(line) for line in sink.lines]
    assert [(event["kind"], event["what"]) for event in faults] == [("fault", "scale")]


def change_sizes_anew(folder: Path, config: Config) -> None:
    (folder / FILE).unlink()
    change_sizes(folder, config, ["rollout=5"])


def test_the_command_changes_a_run_that_lives_and_what_a_resume_of_another_will_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = RunFolder.create(
        parse_config({"rollout": {"workers": 2, "environments": 16}, "reward": {"concurrency": 3}})
    )
    assert main(["scale", "rollout=+1"]) == 0
    assert capsys.readouterr().out == f"rollout: 3\nenvironments: 16\nrewards: {REWARDS}\n"
    folder.unlock()
    assert main(["scale", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"rollout": 3, "environments": 16, "rewards": REWARDS}
    assert main(["scale", "environments=12", "--run", str(folder.path)]) == 0
    assert capsys.readouterr().err == "run-001 is not running: a resume will have these sizes\n"
    assert read_sizes(folder.path, folder.config())["environments"] == 12
