"""Traces of others: public formats, what is made where they say nothing, and what cannot be played."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.api import ConfigError
from orchestrator.cli import main
from orchestrator.config import load_config
from orchestrator.sim.coserving.serving_cluster import read_trace
from orchestrator.sim.simulated_run import simulate
from orchestrator.sim.trace_files import OBSERVATION, PROMPT, DrawnTimes, read_arrivals, read_lengths, read_tools
from orchestrator.sim.twins import SimTask

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,4808,10
2023-11-16 18:15:50.9951690,3180,8
2023-11-16 18:17:00.0000000,110,27
"""
MOONCAKE = [
    {"timestamp": 0, "input_length": 6755, "output_length": 500, "hash_ids": [0, 1, 2]},
    {"timestamp": 3000, "input_length": 7322, "output_length": 490, "hash_ids": [0, 3]},
]
TURNS = """trajectory,group,task,prompt_tokens,response_tokens,seconds,reward
a,p,maths,100,20,1.5,1
b,p,maths,100,30,0.5,0
a,p,maths,130,5,2.5,1
c,q,code,50,7,0,0.25
"""
TIMES = DrawnTimes(seed=3, mean=2.0, sigma=0.5)


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


def lines(rows: list[dict[str, object]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_public_traces_are_read_as_they_are(tmp_path: Path) -> None:
    azure = read_arrivals(write(tmp_path, "azure.csv.gz", AZURE))
    assert [row[1:] for row in azure] == [(4808, 10), (3180, 8), (110, 27)]
    assert [row[0] for row in azure] == pytest.approx([0.0, 4.314579, 73.31941], abs=1e-5)
    mooncake = read_trace(str(write(tmp_path, "mooncake.jsonl", lines(MOONCAKE))))
    assert list(mooncake) == [(0.0, 6755, 500), (3.0, 7322, 490)]
    lengths = read_lengths(tmp_path / "mooncake.jsonl", 10, 2, TIMES)
    assert [(turn.observation, turn.response) for one in lengths.episodes for turn in one.turns] == [
        (6755, 500),
        (7322, 490),
    ]


def test_turns_groups_tasks_times_and_rewards_are_those_of_the_file(tmp_path: Path) -> None:
    import pyarrow.csv as csv
    import pyarrow.parquet as parquet

    file = write(tmp_path, "turns.csv", TURNS)
    traces = read_lengths(file, 100, 8, TIMES)
    first = traces.episodes[0]
    assert [(turn.observation, turn.response, turn.environment_seconds) for turn in first.turns] == [
        (100, 20, 1.5),
        (10, 5, 2.5),
    ]
    assert [episode.reward for episode in traces.episodes] == [1.0, 0.0, 0.25]
    assert (traces.groups, traces.tasks) == (((0, 1), (2,)), ("maths", "code"))
    parquet.write_table(csv.read_csv(file), tmp_path / "turns.parquet")
    assert read_lengths(tmp_path / "turns.parquet", 100, 8, TIMES) == traces
    assert len(read_lengths(file, 2, 8, TIMES).episodes[0].turns) == 1


def test_what_a_trace_lacks_is_made_by_rule(tmp_path: Path) -> None:
    file = write(
        tmp_path, "l.csv", "prompt_tokens,response_tokens\n" + "".join(f"{p},9\n" for p in (90, 10, 80, 20, 30))
    )
    traces = read_lengths(file, 100, 2, TIMES)
    assert traces.groups == ((0,), (1, 3), (2, 4)), "neighbours in order of their prompts"
    seconds = [one.turns[0].environment_seconds for one in traces.episodes]
    assert seconds == [one.turns[0].environment_seconds for one in read_lengths(file, 100, 2, TIMES).episodes]
    assert len(set(seconds)) == 5
    bare = read_lengths(write(tmp_path, "bare.csv", "session_id,output_tokens\na,5\na,6\n"), 100, 2, TIMES)
    assert [turn.observation for turn in bare.episodes[0].turns] == [PROMPT, OBSERVATION]
    tools = read_tools(write(tmp_path, "tools.jsonl", lines([{"seconds": 7, "task": "code"}, {"seconds": 1.5}])))
    drawn = read_lengths(write(tmp_path, "turns.csv", TURNS), 100, 2, DrawnTimes(1, 2.0, 0.5, tools))
    assert drawn.episodes[2].turns[0].environment_seconds == 7.0, "of its task"
    assert {turn.environment_seconds for one in drawn.episodes[:2] for turn in one.turns} <= {1.5, 7.0}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "Empty CSV file"),
        ("prompt_tokens,response_tokens\n", "has no rows"),
        ("prompt_tokens,words\n3,4\n", "no column for response_tokens .*its columns: prompt_tokens, words"),
        ("prompt_tokens,response_tokens\n3,4\n3,nan\n", r"row 2, column 'response_tokens' = None.*whole number from 1"),
        ("prompt_tokens,response_tokens\n3,4\n3,\n", "row 2, column 'response_tokens' = None"),
        ("prompt_tokens,response_tokens\n-3,4\n", "row 1, column 'prompt_tokens' = -3.0"),
        ("prompt_tokens,response_tokens\n3,4.5\n", "must be a whole number"),
        ("prompt_tokens,response_tokens\n3,1e99\n", "must be a whole number from 1 to 16777216"),
        ("prompt_tokens,response_tokens\n3,many\n", "cannot be read.*many"),
        ("prompt_tokens,response_tokens,seconds\n3,4,-1\n", "column 'seconds' = -1.0.*must be a number from 0"),
        ("trajectory,prompt_tokens,response_tokens\na,30,4\na,9,4\n", "must be above 34.*sort its rows by turn"),
        ("prompt_tokens,response_tokens\n3,4\n3\n", "cannot be read"),
        ("response_tokens,x,response_tokens,y\n3,4,5,6\n", "has 2 columns 'response_tokens'"),
        ("trajectory,response_tokens\na,4\n,9\n", "row 2, column 'trajectory' = ''.*is missing"),
        ("group,response_tokens\n,4\n", "row 1, column 'group' = ''.*is missing"),
        ("trajectory,group,response_tokens\na,g,4\na,h,9\n", "row 2, column 'group' = 'h'.*is 'g' in an earlier row"),
        ("trajectory,task,response_tokens\na,g,4\na,h,9\n", "row 2, column 'task' = 'h'.*is 'g' in an earlier row"),
    ],
)
def test_a_row_that_cannot_be_played_is_named(text: str, said: str, tmp_path: Path) -> None:
    file = write(tmp_path, "l.csv", text)
    with pytest.raises(ConfigError, match=rf"(?s)sim\.trace.*l\.csv.*{said}"):
        read_lengths(file, 100, 2, TIMES)


@pytest.mark.parametrize("ending", ["csv", "jsonl"])
def test_what_a_column_holds_is_not_judged_by_its_first_block(
    ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file was refused whose first eight megabytes had whole numbers only, or another column that changed."""
    monkeypatch.setattr("orchestrator.sim.trace_files._BLOCK", 4096)
    rows = [{"task": "1", "seconds": "2", "who": "3"}] * 1000 + [{"task": "a", "seconds": "2.5", "who": "b"}]
    if ending == "csv":
        text = "task,seconds,who\n" + "".join(",".join(row.values()) + "\n" for row in rows)
    else:
        text = "".join('{{"task": "{task}", "seconds": {seconds}, "who": 3}}\n'.format(**row) for row in rows)
        text = text.replace('"seconds": 2.5, "who": 3', '"seconds": 2.5, "who": "b", "more": 1')
    times = read_tools(write(tmp_path, f"t.{ending}", text)).by_task
    assert {task: (len(of), of[-1]) for task, of in times.items()} == {"": (1001, 2.5), "1": (1000, 2.0), "a": (1, 2.5)}


def test_arrivals_out_of_order_and_other_endings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"row 2, column 'timestamp'.*sort the file by time"):
        read_arrivals(write(tmp_path, "m.jsonl", lines(MOONCAKE[::-1])))
    with pytest.raises(ConfigError, match=r"must end in \.csv, \.jsonl or \.parquet"):
        read_arrivals(write(tmp_path, "m.txt", AZURE))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_arrivals(write(tmp_path, "m.parquet", AZURE))


def test_the_command_plays_a_trace_in_any_mode(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths, tools = write(tmp_path, "turns.csv", TURNS), write(tmp_path, "tools.csv", "seconds\n0.5\n")
    small = [
        "run.steps=2",
        "rollout.groups_per_step=2",
        "rollout.group_size=2",
        "evaluation.prompts=2",
        "warmup.steps=0",
    ]
    words = [
        "sim",
        "--lengths",
        str(lengths),
        "--tools",
        str(tools),
        "--json",
        "run.mode=one_off",
        "rollout.alpha=1",
        *small,
    ]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["ledger"]["trained"] > 0
    assert main(["sim", "--serving", str(tools), *small]) == 2
    assert "set sim.borrowed.workers" in capsys.readouterr().err
    assert main(["sim", "--tools", str(tools), *small]) == 2
    assert "set sim.trace" in capsys.readouterr().err
    assert main(["sim", "--lengths", str(tmp_path), "--tools", str(tools), *small]) == 2
    assert "sim.tool_trace" in capsys.readouterr().err


def test_a_trace_that_begins_beyond_the_engines_context_is_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such episodes failed one by one, and what was played were the short ones."""
    lengths = write(tmp_path, "a.csv", AZURE)
    assert main(["sim", "--lengths", str(lengths), "run.steps=1", "rollout.engine.max_model_len=64"]) == 2
    said = capsys.readouterr().err
    assert "rollout.engine.max_model_len = 64: " in said
    assert "set it above that" in said


def test_episodes_that_the_engines_context_cuts_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "prompt_tokens,response_tokens\n" + "100,400\n" * 3 + "100,20\n" * 13
    lengths = write(tmp_path, "l.csv", text)
    words = [
        "sim",
        "--lengths",
        str(lengths),
        "run.steps=1",
        "rollout.groups_per_step=2",
        "rollout.group_size=2",
        "--json",
    ]
    for room, beyond in ((499, 3), (500, None)):
        assert main([*words, f"rollout.engine.max_model_len={room}"]) == 0
        said = capsys.readouterr()
        assert json.loads(said.out).get("episodes_beyond_context") == beyond
        assert ("3 episodes of sim.trace are longer" in said.err) == bool(beyond)


def test_a_trace_takes_as_long_in_grains_and_its_tasks_have_their_own_times_of_scoring(tmp_path: Path) -> None:
    text = "trajectory,group,task,prompt_tokens,response_tokens,seconds\n"
    for number in range(64):
        text += "".join(f"{number},{number // 4},maths,{200 + 300 * turn},{120 + number},1.0\n" for turn in range(2))
    trace = f"sim.trace={str(write(tmp_path, 'l.csv', text))!r}"
    few = ["run.steps=3", "rollout.groups_per_step=4", "rollout.group_size=4", "evaluation.prompts=2"]

    def seconds(*more: str) -> float:
        return float(simulate(load_config(None, [trace, *few, *more])).summary["seconds"])

    whole = seconds("rollout.engine.max_model_len=4096")
    assert seconds("rollout.engine.max_model_len=1024", "sim.grain=4") == pytest.approx(whole, rel=0.05)
    slow = seconds("rollout.engine.max_model_len=4096", "sim.tasks.maths.reward_seconds=100")
    assert slow > whole + 100


def test_a_file_that_does_not_exist_is_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.csv.*does not exist"):
        simulate(load_config(None, [f"sim.trace={str(tmp_path / 'none.csv')!r}"]))


def test_each_group_is_of_its_task(tmp_path: Path) -> None:
    traces = read_lengths(write(tmp_path, "turns.csv", TURNS), 100, 2, TIMES)
    prompts = SimTask(load_config(None, []), traces).prompts("train", 0)
    assert [next(prompts).task for _ in range(4)] == ["maths", "code", "maths", "code"]


@pytest.mark.long
def test_ten_million_rows_take_a_blocks_memory(tmp_path: Path) -> None:
    file = tmp_path / "many.csv"
    with file.open("w") as out:
        out.write("arrival_seconds,prompt_tokens,response_tokens\n")
        for start in range(0, 10_000_000, 1000):
            out.write("".join(f"{start + row},100,10\n" for row in range(1000)))
    code = (
        "import sys, resource; from orchestrator.sim.trace_files import read_arrivals, read_lengths, DrawnTimes;"
        f"read_lengths({str(file)!r}, 1000, 8, DrawnTimes(0, 1.0, 0.1));"
        f"import pyarrow.csv; before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; rows = read_arrivals({str(file)!r});"
        "print(len(rows), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    count, grown = map(int, done.stdout.split())
    assert count == 10_000_000
    assert grown * 1024 < 16 * 10_000_000 + (300 << 20)
