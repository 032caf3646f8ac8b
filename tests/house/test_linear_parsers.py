"""What a model, an agent, an environment, a judge or a user writes is read in time in proportion to its length, at worst."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import gc
import re
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.agents import openai_protocol
from orchestrator.agents.agent_program import AgentProgram, reward_of
from orchestrator.agents.agent_session import calls_in
from orchestrator.agents.openai_protocol import ApiError
from orchestrator.api import RetryableError, TrajectoryError, bearer, jsontext
from orchestrator.api.http import stats_from_json
from orchestrator.borrowing import http_worker
from orchestrator.environments import environment_wire, pod_watch
from orchestrator.manager_shards import shard_messages
from orchestrator.rewards import code_judge, function_client, llm_judge, process_pool, suite_judge
from orchestrator.rewards.function_client import FunctionFailed
from orchestrator.sandbox import SandboxLimits, SandboxOutcome, spawner, workspace
from orchestrator.tasks import chat_task
from orchestrator.tasks.calculator import answers
from orchestrator.tasks.coding import is_handed_in
from orchestrator.tasks.household import House
from orchestrator.tasks.repository import RepositoryGame
from orchestrator.tasks.sums import Sum
from orchestrator.tasks.vocabulary import CHARACTERS, printable

FLOOR = 0.004  # seconds of processor time below which nothing is told apart
TIMES = 8  # more at four times the length: twice what is linear
SIZE = 1 << 15  # characters

TEXTS: dict[str, Callable[[int], str]] = {
    "spaces": lambda n: " " * n,
    "a call that never ends": lambda n: "<tool_call>" + " " * n,
    "calls that never end": lambda n: "<tool_call>" * (n // 11),
    "empty calls": lambda n: "<tool_call></tool_call>" * (n // 23),
    "brackets": lambda n: "[" * n,
    "brackets in a call": lambda n: "<tool_call>" + "[" * n + "</tool_call>",
    "nested": lambda n: "[" * (n // 2) + "]" * (n // 2),
    "objects": lambda n: '{"a":' * (n // 6) + "1" + "}" * (n // 6),
    "digits": lambda n: "9" * n,
    "a fraction": lambda n: "0." + "0" * n + "1",
    "an exponent": lambda n: "1e" + "9" * n,
    "score and spaces": lambda n: "score" + " " * n,
    "lines of score": lambda n: "score\n" * (n // 6),
    "marks around score": lambda n: "*" * (n // 2) + "score: 7" + "*" * (n // 2) + "x",
    "line feeds": lambda n: "\n" * n,
    "escapes": lambda n: '"' + "\\u0041" * (n // 6) + '"',
    "quotes": lambda n: '"' * n,
    "backslashes": lambda n: "\\" * n,
    "numbers": lambda n: "[" + "1," * (n // 2) + "1]",
    "messages": lambda n: '{"messages":[' + "1," * (n // 2) + "1]}",
    "messages of nothing": lambda n: '{"messages":[' + "{}," * (n // 3) + "{}]}",
    "parts": lambda n: '{"messages":[{"role":"user","content":[' + "{}," * (n // 3) + "{}]}]}",
    "fields": lambda n: "{" + ",".join(f'"{number}":1' for number in range(n // 9)) + "}",
    "fields of a part": lambda n: (
        '{"messages":[{"role":"user","content":[{' + ",".join(f'"{number}":1' for number in range(n // 9)) + "}]}]}"
    ),
    "stops": lambda n: '{"messages":[{"role":"user","content":"x"}],"stop":[' + "1," * (n // 2) + "1]}",
    "arguments": lambda n: (
        '{"messages":[{"role":"assistant","tool_calls":[{"function":{"name":"x","arguments":"' + "[" * n + '"}}]}]}'
    ),
    "tools": lambda n: '{"messages":[{"role":"user","content":"x"}],"tools":[' + "1," * (n // 2) + "1]}",
    "a prompt of texts": lambda n: '{"prompt":[' + '"",' * (n // 3) + '""]}',
    "a prompt of numbers": lambda n: '{"prompt":[' + "1," * (n // 2) + "1]}",
    "a reply": lambda n: '{"id":1,"error":{"cause":"' + "a" * n + '","detail":"' + "b" * n + '"}}',
    "bearer": lambda n: "Bearer " + " " * n,
    "lines to edit": lambda n: "edit new.py 1 0" + "\n" * n,
    "words to find": lambda n: "find " + "a" * n,
    "lines to show": lambda n: "show toposort.py " + "9" * n,
    "pods": lambda n: '{"metadata":{},"items":[' + "{}," * (n // 3) + "{}]}",
    "tests that pass": lambda n: '{"word":"x","passed":[' + "1," * (n // 2) + '1],"failed":{}}',
}


def outcome(text: str) -> SandboxOutcome:
    return SandboxOutcome(0, "", text.encode(errors="replace"), b"", 0.0)


def verdict(text: str) -> Any:
    async def python(*_: object, **__: object) -> SandboxOutcome:
        return outcome(text)

    return asyncio.run(suite_judge.judge_suite(SimpleNamespace(python=python), {}, {}, (), "hidden/"))  # type: ignore[arg-type]


def pods(text: str) -> Any:
    async def read() -> bytes:
        return text.encode(errors="replace")

    async def listed(**_: object) -> Any:
        return SimpleNamespace(status=200, read=read, close=lambda: None)

    return asyncio.run(pod_watch.PodWatch(listed, lambda item: item, RuntimeError)._list())


def served(text: str) -> Any:
    found = http_worker._object(text.encode(errors="replace"))
    return http_worker._read(stats_from_json, found or {}, "/rl/stats")


def answer_by_patterns(text: str) -> Any:
    """Each takes Python's own matching time with the square of some text's length, the cube, or twice as long a character."""
    return [chat_task.last_match(each, text) for each in (r"\d+x", r"\s*\s*\s*x", "(9|99)+x", r"\[.*\]|\[", "(a*)*$")]


PROGRAM = AgentProgram(("x",), {}, (), SandboxLimits(), {})
REFUSALS = (ValueError, RetryableError, TrajectoryError, ApiError, FunctionFailed, process_pool.FunctionError)

# Whose text it is -> what reads it, in this process. (What others read has a limit of time there: tests/tasks/test_scoring.py.)
PARSERS: dict[str, Callable[[str], Any]] = {
    "model: calls of tools": lambda text: calls_in(text, "c"),
    "model: characters": lambda text: CHARACTERS.encode(printable(text)),
    "model: a sum": lambda text: asyncio.run(Sum("1+2", "?").act(text)),
    "model: a calculation": lambda text: answers("1+2", "=" + text),
    "model: an answer by a pattern": answer_by_patterns,
    "model: a program": is_handed_in,
    "model: a household": lambda text: House("kitchen//apple:kitchen/apple fridge").do(text),
    "model: a repository": lambda text: asyncio.run(RepositoryGame("toposort planted-1", None).act(text)),
    "agent: a chat": openai_protocol.chat_request,
    "agent: a prompt": openai_protocol.plain_request,
    "agent: its reward": lambda text: reward_of(PROGRAM, outcome(text)),
    "agent: its key": lambda text: bearer.matches(bearer.token_of(text), "0" * 64),
    "agent: its files": lambda text: workspace._collected(text.encode(errors="replace")),
    "environment: a reply": lambda text: environment_wire.reply_of(text.encode(errors="replace"), 1),
    "reward: an answer": lambda text: function_client._answer(False, text.encode(errors="replace")),
    "reward: a failure": lambda text: function_client._answer(True, text.encode(errors="replace")),
    "reward: judged code": lambda text: code_judge._answers(text.encode(errors="replace"), 3),
    "reward: a suite of tests": verdict,
    "server: an answer": served,
    "shard: what it tells": shard_messages.told,
    "cluster: pods": pods,
    "judge: a line": llm_judge._score_in,
    "judge: JSON": jsontext.parse_object,
    "spawner: an answer": lambda text: spawner.read_answer(text.encode(errors="replace")),
}


# Who makes something of text in the rooms that a trajectory passes through: which of PARSERS that is, or (why none has to be).
READERS = {
    "agents/agent_session.py": "model: calls of tools",
    "agents/chat_template.py": "(its own JSON, made of what the endpoint took)",
    "agents/openai_protocol.py": "agent: a chat",
    "borrowing/http_worker.py": "server: an answer",
    "borrowing/served_workers.py": "(a model's config.json, before a run)",
    "environments/environment_wire.py": "environment: a reply",
    "environments/pod_manifests.py": "(names of a run)",
    "environments/pod_watch.py": "cluster: pods",
    "environments/pods.py": "(the name of an image: one set of characters, at most 500)",
    "manager_shards/shard_messages.py": "shard: what it tells",
    "rewards/code_judge.py": "reward: judged code",
    "rewards/function_client.py": "reward: an answer",
    "rewards/function_process.py": "(a process of its own, with a time limit)",
    "rewards/function_service.py": "(the host of functions, a process of its own; at most 1 MiB)",
    "rewards/host_launch.py": "(the line with the port of a host that the run starts)",
    "rewards/llm_judge.py": "judge: a line",
    "rewards/process_pool.py": "(a line of at most so many bytes, by the same parser as reward: an answer)",
    "rewards/suite_judge.py": "reward: a suite of tests",
    "sandbox/run.py": "(what bubblewrap says of itself)",
    "sandbox/spawn.py": "(what the run asks its spawner for)",
    "sandbox/spawner.py": "spawner: an answer",
    "sandbox/workspace.py": "agent: its files",
    "tasks/data_files.py": "(files of the user's, before a run)",
    "tasks/dataset.py": "(prompts of its own)",
    "tasks/dataset_rewards.py": "(a process of its own, with a time limit)",
    "tasks/reasoning_gym.py": "(options of a config; answers are scored in a process of its own, with a time limit)",
    "tasks/repository.py": "model: a repository",
    "tasks/repository_bundles.py": "(files of the user's, before a run)",
    "tasks/sums.py": "model: a sum",
}
ROOMS = ("agents", "borrowing", "environments", "manager_shards", "rewards", "sandbox", "tasks")
READING = re.compile(
    r"(json|tomllib|csv)\.(loads?|reader)|(jsontext\.)?parse(_object)?|msgpack\.\w+|re\.\w+|ast\.literal_eval"
)


def test_who_reads_text_in_these_rooms_is_a_list() -> None:
    root = Path(__file__).parents[2] / "orchestrator"
    found = set()
    for file in (file for room in ROOMS for file in sorted((root / room).rglob("*.py"))):
        calls = (node for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(node, ast.Call))
        if any(READING.fullmatch(ast.unparse(call.func)) for call in calls):
            found.add(str(file.relative_to(root)))
    assert found == set(READERS)
    assert [name for name in READERS.values() if not name.startswith("(") and name not in PARSERS] == []


def seconds_of(parse: Callable[[str], Any], text: str) -> float:
    """Processor time, the least of three."""
    found = []
    for _ in range(3):
        begun = time.process_time()
        with contextlib.suppress(*REFUSALS):
            parse(text)
        found.append(time.process_time() - begun)
        if found[-1] < FLOOR:
            break
    return min(found)


@pytest.mark.parametrize("name", PARSERS)
def test_four_times_the_text_takes_at_most_eight_times_as_long(name: str) -> None:
    parse = PARSERS[name]
    gc.collect()
    slow = []
    for kind, made in TEXTS.items():
        longer = seconds_of(parse, made(4 * SIZE))
        if longer <= TIMES * FLOOR:
            continue
        shorter = seconds_of(parse, made(SIZE))
        if longer > TIMES * max(shorter, FLOOR):  # once more, both: something else may have had the processor's cache
            shorter, longer = max(shorter, seconds_of(parse, made(SIZE))), seconds_of(parse, made(4 * SIZE))
        if longer > TIMES * max(shorter, FLOOR):
            slow.append(f"{kind}: {shorter:.3f} s, at four times the length {longer:.3f} s")
    assert slow == []


def test_a_judges_line_is_found_as_people_write_it() -> None:
    read = llm_judge._score_in
    assert [read(text) for text in ("Score: 4", "**Score: 9**\n", "score = 10.", "Score: -3", "score7")] == [
        4,
        9,
        10,
        -3,
        7,
    ]
    assert read("Score: 2\nno:\n**Score: 9**\n\n") == 9
    assert read("# Score:\n7\n") == 7
    assert [read(text) for text in ("I would score 7 of 10", "score: high", "my score: 7", "Score: 7 of 10", "")] == [
        None
    ] * 5
    assert read("Score: 1000000000000") is None
    assert read("x" * 5000 + "\nScore: 3") == 3


def test_an_answer_is_the_last_match_as_python_finds_it() -> None:
    texts = ("it is 5, no -58.25.", "x", "", "b3 a[1] c7\nd0", "(1) (22)", "\2 9 \3", "total 7\nprice is", "9" * 300)
    for pattern in (
        r"-?\d+(?:\.\d+)?",
        "[a-d][0-7]",
        r"\(.*?\)",
        "price.is|total [0-9]",
        "(?i)A|B",
        "^it|x$",
        "a|x|(b)",
    ):
        for text in texts:
            found = [match.group() for match in re.finditer(pattern, text, re.DOTALL)]
            assert chat_task.last_match(pattern, text) == (["", *found])[-1], (pattern, text)
    assert chat_task.last_match(r"\d+", "1 " + "x" * chat_task._LOOKED_AT) == ""


def test_calls_are_found_as_before() -> None:
    text = 'first\n<tool_call>\n{"name": "a", "arguments": {"x": 1}}\n</tool_call><tool_call>{"name":"b"}</tool_call>'
    assert calls_in(text, "c") == ("first", [("c-0", "a", '{"x": 1}'), ("c-1", "b", "{}")])
    deep = "<tool_call>" + "[" * 5000 + "</tool_call>"
    for other in ('<tool_call>{"name": 1}</tool_call>', "<tool_call>x</tool_call>", "<tool_call>", deep):
        assert calls_in(other, "c") == (other, [])
