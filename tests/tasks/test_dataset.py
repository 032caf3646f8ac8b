"""A data set of the user's: rows are read whole or named, the split holds, and its rewards read text."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from orchestrator.api import ConfigError, Prompt, Trajectory, Turn
from orchestrator.build import round_rules
from orchestrator.config import load_config
from orchestrator.rewards.reward_client import HttpReward
from orchestrator.runtime import preflight
from orchestrator.runtime.reward_trial import try_reward
from orchestrator.tasks import dataset as dataset_module
from orchestrator.tasks import splits
from orchestrator.tasks.data_files import MOST_LINE, DataRow, read_rows
from orchestrator.tasks.dataset import REWARD, DatasetTask
from orchestrator.tasks.dataset_rewards import score_row
from tests.support.tiny_tokenizer import write_tokenizer

GRADER = """
def right(said, answer, row):
    return float(said.strip() == answer)

def short(said, answer, row):
    return -len(said) / 10 if row["level"] else 0

def wrong_shape(said):
    return 0.0

async def later(said, answer, row):
    return 0.0

def words(said, answer, row):
    return "good"
"""


@pytest.fixture(autouse=True)
def grader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "grader_of_rows.py").write_text(GRADER)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    sys.modules.pop("grader_of_rows", None)


def rows(count: int = 40, **more: Any) -> list[dict[str, Any]]:
    return [{"question": f"What is {n} + 1? ¿Qué?", "answer": n + 1, "level": n % 2, **more} for n in range(count)]


def write(name: str, found: list[Any]) -> None:
    Path(name).write_text("".join(f"{one if isinstance(one, str) else json.dumps(one)}\n" for one in found))


def make(*overrides: str, heldout: int = 3) -> DatasetTask:
    given = ["task.name=dataset", "task.data.file=rows.jsonl", "task.data.prompt=question"]
    given += ["task.data.reward=grader_of_rows:right", f"task.heldout_maps={heldout}", *overrides]
    task = preflight.make_task(load_config(None, given))
    assert isinstance(task, DatasetTask)
    return task


def refused(*overrides: str, heldout: int = 3) -> str:
    with pytest.raises(ConfigError) as error:
        make(*overrides, heldout=heldout)
    return str(error.value)


def trained(task: DatasetTask, count: int, seed: int = 0) -> list[Prompt]:
    return list(itertools.islice(task.prompts("train", seed), count))


def test_what_is_wrong_with_tokenizer_rewards_and_files_is_said_at_once() -> None:
    write("rows.jsonl", [*rows(), "{"])
    given = ["task.name=dataset", "task.data.file=rows.jsonl", "task.data.prompt=question", "task.heldout_maps=3"]
    given += ["task.data.heldout=none.jsonl", "task.data.tokenizer=none", "evaluation.prompts=4"]
    given += ['task.data.reward={"grader_of_rows:none" = 1.0, "grader_of_rows:later" = 1.0}']
    with pytest.raises(ConfigError) as error:
        preflight.prepare(load_config(None, given))
    said = str(error.value)
    assert [line.partition(" = ")[0].strip() for line in said.splitlines() if " = " in line] == [
        *("task.data.tokenizer", "task.data.reward", "task.data.reward", "task.data.file", "task.data.heldout"),
        "evaluation.prompts",
    ]
    assert "rows.jsonl:41: is not a JSON object" in said
    assert "tokens" not in said  # a prompt that no tokenizer has read is not called too long


def test_a_reward_of_rows_that_gives_no_number_is_known_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    write("rows.jsonl", rows())
    for reward, says in (("right", ""), ("words", "gave 'good': must be a number")):
        given = ["task.name=dataset", "task.data.file=rows.jsonl", "task.data.prompt=question", "task.heldout_maps=3"]
        config = load_config(None, [*given, f"task.data.reward=grader_of_rows:{reward}"])
        if not says:
            assert try_reward(config, preflight.make_task(config), REWARD) == []
        else:
            with pytest.raises(ConfigError, match=says):
                try_reward(config, preflight.make_task(config), REWARD)


def test_every_row_is_trained_on_once_before_any_is_twice_and_none_that_is_held_out() -> None:
    write("rows.jsonl", rows())
    task = make()
    held = list(task.prompts("heldout", 0))
    assert len(held) == 3
    assert all(splits.is_heldout(prompt.key) for prompt in held)
    size = sum(not splits.is_heldout(splits.key_of(row["question"])) for row in rows())
    first, second = trained(task, 2 * size)[:size], trained(task, 2 * size)[size:]
    assert len({prompt.key for prompt in first}) == size
    assert {prompt.key for prompt in second} == {prompt.key for prompt in first}
    assert [prompt.key for prompt in first] != [prompt.key for prompt in second]
    assert not {prompt.key for prompt in first} & {prompt.key for prompt in held}
    assert trained(task, 5) == trained(make(), 5) != trained(task, 5, seed=1)
    assert f"{size} rows to train on, 3 held out" in task.about()
    assert round_rules(load_config(None, ["rollout.rounds.enabled=true"]), task).epoch == size


def test_a_file_of_held_out_rows_is_held_out_also_where_the_other_has_them_too() -> None:
    write("rows.jsonl", rows(20))
    write("test.jsonl", rows(5))
    task = make("task.data.heldout=test.jsonl", heldout=5)
    held = {prompt.key for prompt in task.prompts("heldout", 0)}
    assert held == {splits.key_of(row["question"]) for row in rows(5)}
    assert len({prompt.key for prompt in trained(task, 15)}) == 15
    assert not {prompt.key for prompt in trained(task, 30)} & held


def test_bad_rows_are_named_with_file_and_line_and_none_is_left_out() -> None:
    bad = [
        '{"question": "a"',
        '["a"]',
        {"question": "a"},
        {"question": "", "answer": 1},
        {"question": 3, "answer": 1},
        "{{",
    ]
    write("rows.jsonl", [*rows(10), *bad])
    said = refused()
    assert [f"rows.jsonl:{line}: " in said for line in range(10, 17)] == [False, *[True] * 5, False]
    assert "rows.jsonl:13: has no answer; it has: question" in said
    assert "rows.jsonl:14: question is empty" in said
    assert "rows.jsonl:15: question is a int: must be text, or a list of messages" in said
    write("rows.jsonl", [*rows(10), {"question": "a", "answer": None}])
    assert "rows.jsonl:11: answer is null: must be text or a number" in refused()


def test_a_row_without_an_end_is_bounded() -> None:
    Path("rows.jsonl").write_text("x" * (3 * MOST_LINE) + "\n" + json.dumps(rows(1)[0]))
    bad, good = read_rows("f", "rows.jsonl", ["question"])
    assert (bad.place, "over 1024 KiB" in bad.why) == ("rows.jsonl:1", True)  # type: ignore[union-attr]
    assert good == DataRow("rows.jsonl:2", {"question": rows(1)[0]["question"]})


def test_what_does_not_fit_into_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    write("rows.jsonl", rows())
    monkeypatch.setattr(dataset_module, "MOST_ROWS", 39)
    assert "39 rows" in refused()
    monkeypatch.setattr(dataset_module, "MOST_ROWS", 40)
    make()


def test_parquet_and_folders_of_hugging_face_give_the_same_rows() -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import ipc, parquet

    table = pyarrow.Table.from_pylist(rows())
    write("rows.jsonl", rows())
    parquet.write_table(table, "rows.parquet")
    Path("saved/train").mkdir(parents=True)
    Path("saved/test").mkdir()
    Path("repository/data").mkdir(parents=True)
    Path("flat").mkdir()
    for file in ("saved/train/data-00000-of-00001.arrow", "flat/data-00000-of-00001.arrow"):
        with ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table, 7)
    with ipc.new_stream("saved/test/data-00000-of-00001.arrow", table.schema) as stream:
        stream.write_table(table.slice(0, 5))
    parquet.write_table(table.slice(0, 25), "repository/data/train-00000-of-00002.parquet")
    parquet.write_table(table.slice(25), "repository/data/train-00001-of-00002.parquet")
    expected = trained(make("task.data.columns=['level']"), 20)
    for name in ("rows.parquet", "hf:saved", "hf:flat", "hf:repository", "hf:saved:train"):
        assert trained(make(f'task.data.file="{name}"', "task.data.columns=['level']"), 20) == expected, name
    held = make('task.data.file="hf:saved"', 'task.data.heldout="hf:saved:test"', heldout=5)
    assert {prompt.key for prompt in held.prompts("heldout", 0)} == {splits.key_of(row["question"]) for row in rows(5)}
    assert "no split 'valid'" in refused('task.data.file="hf:saved:valid"')
    assert "has no column no; it has: question, answer, level" in refused(
        'task.data.file="rows.parquet"', "task.data.answer=no"
    )
    Path("broken.parquet").write_bytes(b"PAR1 not at all PAR1")
    assert "cannot be read" in refused('task.data.file="broken.parquet"')


def test_a_repository_of_several_data_sets_is_not_read_as_one() -> None:
    """As openai/gsm8k is downloaded: the same questions twice, with answers of two kinds."""
    for kind in ("main", "socratic"):
        Path(f"gsm8k/{kind}").mkdir(parents=True)
        write(f"gsm8k/{kind}/train-00000-of-00001.jsonl", rows())
        write(f"gsm8k/{kind}/test-00000-of-00001.jsonl", rows(5))
    assert "holds 2 data sets, whose rows are not mixed: name one, of hf:gsm8k/main, hf:gsm8k/socratic" in refused(
        'task.data.file="hf:gsm8k"'
    )
    assert "of hf:gsm8k/main:test, hf:gsm8k/socratic:test" in refused('task.data.file="hf:gsm8k:test"')
    write("rows.jsonl", rows())
    assert trained(make('task.data.file="hf:gsm8k/main"'), 20) == trained(make(), 20)


def test_a_file_that_is_not_there_or_of_another_kind_is_one_error() -> None:
    assert "no such file; paths are relative" in refused()
    assert "task.data.file" in refused('task.data.file=""')
    Path("rows.csv").write_text("a,b\n")
    assert "write it as JSONL" in refused("task.data.file=rows.csv")
    Path("folder").mkdir()
    assert "write hf:folder" in refused("task.data.file=folder")
    assert "nothing is downloaded" in refused('task.data.file="hf:openai/gsm8k"')


def test_too_few_held_out_rows_are_said_with_their_number() -> None:
    write("rows.jsonl", rows(5))
    assert "different held-out prompts in rows.jsonl" in refused(heldout=30)
    assert "different held-out prompts in rows.jsonl" in refused(heldout=1319), "as many as the file has, no fewer"


def test_prompts_are_in_the_models_own_template_and_long_ones_are_named_or_counted() -> None:
    pytest.importorskip("transformers")
    folder = write_tokenizer(Path("model"))
    write("rows.jsonl", [*rows(40), {"question": "the cat " * 200, "answer": "x"}])
    tokens = [f'task.data.tokenizer="{folder}"', "task.data.prompt_tokens=100", 'task.data.system="Be brief."']
    assert "rows.jsonl:41: its prompt has" in refused(*tokens)
    task = make(*tokens, "task.data.skip_long=true")
    assert "1 left out as too long" in task.about()
    prompt = trained(task, 1)[0]
    question = json.loads(prompt.payload)["row"]["question"]
    seen = asyncio.run(task.environment().reset(prompt)).token_ids
    shown = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n" + question
    assert seen == task.chat.encode(shown + "<|im_end|>\n<|im_start|>assistant\n")
    assert "¿Qué?" in question


def test_a_prompt_may_be_messages_with_a_system_of_its_own() -> None:
    pytest.importorskip("transformers")
    folder = write_tokenizer(Path("model"))
    talk = [{"role": "system", "content": "Count."}, {"role": "user", "content": "one"}]
    write("rows.jsonl", [{"question": [*talk, {"role": "user", "content": str(n)}], "answer": "1"} for n in range(40)])
    task = make(f'task.data.tokenizer="{folder}"', 'task.data.system="Be brief."')
    seen = asyncio.run(task.environment().reset(trained(task, 1)[0])).token_ids
    start = task.chat.encode("<|im_start|>system\nCount.<|im_end|>\n")
    assert seen[: len(start)] == start


def test_the_functions_are_weighted_and_read_what_was_said_to_its_end() -> None:
    write("rows.jsonl", rows())
    both = 'task.data.reward={"grader_of_rows:right" = 2, "grader_of_rows:short" = 0.5}'
    task = make(both, 'task.data.columns=["level"]')
    prompt = next(one for one in task.prompts("train", 0) if json.loads(one.payload)["row"]["level"] == 1)
    answer = str(json.loads(prompt.payload)["row"]["answer"])
    sent: list[dict[str, Any]] = []

    async def scored(action: tuple[int, ...]) -> dict[str, Any]:
        reward = HttpReward("http://127.0.0.1:1/f", said=task.said)

        async def call(event: Any) -> Any:
            sent.append(json.loads(json.dumps(event)))
            return score_row(sent[-1])

        reward.call = call  # type: ignore[method-assign]
        environment = task.environment()
        seen = await environment.reset(prompt)
        result = await environment.step(action)
        assert result.done
        turn = Turn(seen.token_ids, action, (0.0,) * len(action), ((0, len(action)),))
        trajectory = Trajectory("t", "g", task.name, prompt, (turn,), None, environment.version, 0, False)
        return {"reward": await reward.score(trajectory), "cut": result.truncated and result.invalid_action}

    said = task.chat.encode(answer)
    expected = 2.0 - 0.5 * len(answer) / 10
    assert asyncio.run(scored((*said, task.end_id))) == {"reward": pytest.approx(expected), "cut": False}
    assert asyncio.run(scored(said)) == {"reward": 0.0, "cut": True}
    assert [event["texts"] for event in sent] == [[answer], [None]]


def test_a_function_that_gives_no_number_is_an_error_not_a_zero() -> None:
    row = json.dumps({"row": {"a": "b"}, "prompt": "a", "answer": "a", "rewards": {"grader_of_rows:words": 1.0}})
    with pytest.raises(TypeError, match="must be a number"):
        score_row({"prompt": row, "texts": ["a"]})


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("grader_of_rows:nothing", "has no function 'nothing'"),
        ("no_such_module:right", "PYTHONPATH=."),
        ("grader_of_rows:wrong_shape", "def wrong_shape(said, answer, row)"),
        ("grader_of_rows:later", "is a coroutine"),
    ],
)
def test_a_reward_that_cannot_score_is_refused_before_anything_starts(target: str, says: str) -> None:
    write("rows.jsonl", rows())
    assert says in refused(f"task.data.reward={target}")


def test_the_page_works_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    page = (Path(__file__).parents[2] / "docs/recipes/data_set.md").read_text(encoding="utf-8")
    blocks = {kind: re.search(rf"```{kind}\n(.*?)```", page, re.DOTALL) for kind in ("text", "python", "toml")}
    text = {kind: found[1] for kind, found in blocks.items() if found}
    write("rows.jsonl", [*text["text"].splitlines(), *rows(600)])
    Path("grader.py").write_text(text["python"])
    Path("rows.toml").write_text(text["toml"])
    write_tokenizer(Path("models/smollm2"))
    task = preflight.make_task(load_config("rows.toml", []))
    assert isinstance(task, DatasetTask)
    prompt = next(one for one in task.prompts("train", 0) if "2 + 3" in one.payload)
    assert score_row({"prompt": prompt.payload, "texts": ["It is 5"]})["reward"] == pytest.approx(
        1 + 0.1 * (1 - 7 / 200)
    )
    assert len(list(task.prompts("heldout", 0))) == 100
    sys.modules.pop("grader")
