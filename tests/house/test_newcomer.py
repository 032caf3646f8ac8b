"""What a newcomer does first, with real engines: the task of the pages is written down, trained, extended and looked at; a data
set is brought. What a config needs before it starts is in tests/config/test_config.py, the install in test_wheel.py here."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
SHORT = ["run.steps=2", "warmup.steps=4", "evaluation.prompts=5"]


def type_in(folder: Path, *words: str) -> str:
    """A command as the recipe has it: ``PYTHONPATH=. rl-coserve ...`` where the task's file lies."""
    environment = {**os.environ, "PYTHONPATH": f".{os.pathsep}{ROOT}"}
    with (folder / "said").open("wb") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "orchestrator.cli", *words],
            cwd=folder,
            env=environment,
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=400)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    text = (folder / "said").read_text()
    assert code == 0, text
    return text


def test_the_task_of_the_pages_is_trained_by_the_recipes_config_as_it_stands(tmp_path: Path) -> None:
    for page, language, name in (("tasks.md", "python", "guess.py"), ("recipes/write_a_task.md", "toml", "guess.toml")):
        blocks = re.findall(rf"```{language}\n(.*?)```", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.DOTALL)
        (tmp_path / name).write_text(blocks[0])
    said = type_in(tmp_path, "train", "guess.toml", *SHORT)
    assert "success on held-out prompts:" in said
    summary = json.loads(type_in(tmp_path, "report", "latest", "--json"))
    assert summary["steps"] == 2
    assert summary["ledger"]["failed_by_cause"] == {}
    assert summary["ledger"]["trained"] == 2 * 64
    assert "completed" in type_in(tmp_path, "top", "latest", "--once")
    extended = type_in(tmp_path, "train", "--resume", "latest", "run.steps=3")
    assert "continuing from its checkpoint after step 2, of 3 steps" in extended
    assert json.loads(type_in(tmp_path, "report", "latest", "--json"))["steps"] == 3
    listed = json.loads(type_in(tmp_path, "show", "latest", "--json", "--most", "1000"))
    lowest = min(line["total_reward"] for line in listed["trajectories"] if line["total_reward"] is not None)
    worst = json.loads(type_in(tmp_path, "show", "latest", "--worst", "--json"))
    assert worst["line"]["total_reward"] == lowest
    assert worst["turns"][0]["observation"] == "guess"
    assert "turn 1" in type_in(tmp_path, "show", "latest", "--worst")
    assert re.search(r"^reward [01]", type_in(tmp_path, "play"), re.M)
    assert "trace.json" in type_in(tmp_path, "trace", "latest", "--out", "trace.json")
    assert (tmp_path / "runs" / "latest" / "model-final" / "config.json").is_file()


def test_a_data_set_and_a_reward_function_of_ones_own_are_trained_on(tmp_path: Path) -> None:
    page = (ROOT / "docs/recipes/data_set.md").read_text(encoding="utf-8")
    for language, name in (("python", "grader.py"), ("toml", "rows.toml")):
        (tmp_path / name).write_text(re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)[0])
    rows = ({"question": f"What is {n} + 1?", "answer": n + 1} for n in range(60))
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    tiny = ["model.path=", "task.data.tokenizer=", "task.heldout_maps=5", "rollout.environments=64"]
    said = type_in(tmp_path, "train", "rows.toml", *tiny, "run.steps=2", "evaluation.prompts=5")
    assert "task.data: " in said
    summary = json.loads(type_in(tmp_path, "report", "latest", "--json"))
    assert summary["ledger"]["failed_by_cause"] == {}
    assert summary["ledger"]["trained"] == 2 * 64
    assert "What is" in type_in(tmp_path, "show", "latest", "--best")
