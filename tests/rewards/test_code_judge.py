"""Model-written code is judged by tests that it can neither read, nor change, nor forge."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import time
from pathlib import Path

import pytest

from orchestrator.api import Prompt, RetryableError, RunError, Trajectory, Turn
from orchestrator.rewards.code_judge import HiddenTests, JudgedCase, Verdict, judge_solution
from orchestrator.rewards.host_launch import RewardHost
from orchestrator.rewards.reward_client import HttpReward
from orchestrator.sandbox import Sandbox, SandboxLimits, SandboxOutcome
from orchestrator.sandbox.workspace import MAX_BYTES, Workspace
from orchestrator.tasks import coding_problems
from orchestrator.tasks.coding import CodingTask, shown
from orchestrator.tasks.text_rewards import coding_tests
from orchestrator.tasks.vocabulary import CHARACTERS

pytestmark = pytest.mark.slow

needs_sandbox = pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")
SQUARES = HiddenTests("f", [JudgedCase([n], n * n) for n in range(5)])

# Judges as is often done: code, tests and answers in one process, the exit code is the verdict.
NAIVE = """
import json, sys
names = {}
exec(open("solution.py").read(), names)
cases = json.load(open("tests.json"))
def check():
    for argument, expected in cases:
        if not names["f"](argument) == expected:
            return False
    return True
sys.exit(0 if all([check()]) else 1)
"""

TAMPERING = {
    "leave with success": "import os; os._exit(0)",
    "leave with success in the call": "import sys\ndef f(x): sys.exit(0)",
    "print a verdict and leave": "import os; print('[{\"answer\": 0}]', flush=True); os._exit(0)",
    "equal to everything": "class All(int):\n    def __eq__(self, other): return True\ndef f(x): return All(7)",
    "read the answers from the caller": (
        "import sys\ndef f(x):\n    frame = sys._getframe(1)\n    while frame:\n"
        "        for found in (*frame.f_locals.values(), *frame.f_globals.values()):\n"
        "            if isinstance(found, list) and found and isinstance(found[0], list) and len(found[0]) == 2:\n"
        "                return dict(map(tuple, found))[x]\n        frame = frame.f_back"
    ),
    "read the test file": "import json\ndef f(x): return dict(map(tuple, json.load(open('tests.json'))))[x]",
    "replace the test file": "open('tests.json', 'w').write('[]')\ndef f(x): return 0",
    "replace the loader of the tests": "import json; json.load = lambda file: []\ndef f(x): return 0",
    "replace a builtin": "import builtins; builtins.all = lambda values: True\ndef f(x): return 0",
    "end as a success whatever happens": "import atexit, os; atexit.register(os._exit, 0)\ndef f(x): return 0",
}


def in_sandbox(solution: str, tests: HiddenTests = SQUARES) -> Verdict:
    return asyncio.run(judge_solution(Sandbox(), solution, tests))


@needs_sandbox
@pytest.mark.parametrize("name", TAMPERING)
def test_no_tampering_passes(name: str) -> None:
    assert not in_sandbox(TAMPERING[name]).all_passed


@needs_sandbox
@pytest.mark.parametrize("name", TAMPERING)
def test_the_same_tampering_passes_where_code_and_tests_share_a_process(name: str) -> None:
    files = {
        "solution.py": TAMPERING[name].encode(),
        "tests.json": json.dumps([[case.arguments[0], case.expected] for case in SQUARES.cases]).encode(),
    }
    assert asyncio.run(Sandbox().python(NAIVE, files=files)).exit_code == 0


@needs_sandbox
def test_right_code_passes_and_wrong_code_fails_where_it_is_wrong() -> None:
    assert in_sandbox("def f(x): return x * x").all_passed
    assert in_sandbox("def f(x): return x * 2").passed == (True, False, True, False, False)
    assert in_sandbox("def f(x):\n    if x == 1: raise ValueError\n    return x * x").passed == (
        True,
        False,
        True,
        True,
        True,
    )
    assert in_sandbox("print('noise')\ndef f(x):\n    print(x)\n    return x * x").all_passed


@needs_sandbox
@pytest.mark.parametrize(
    ("solution", "detail"),
    [
        ("def f(x): return float('nan')", "ValueError"),
        ("def f(x): return object()", "TypeError"),
        ("def f(x): return float(x * x)", ""),
        ("def f(x): return x * x == 1 or x * x", ""),
        ("def g(x): return x * x", "KeyError"),
        ("def f(x) return", "SyntaxError"),
        ("def f(x): return 'x' * 10**7", "output limit"),
        ("import os\nos.kill(os.getppid(), 9)\nos.kill(os.getpid(), 9)", "137"),
        (
            "import sys\nsys.stdout.write('[]'); sys.stdout.flush()\nimport os; os.write(1, b'[]'); os._exit(0)",
            "no answers",
        ),
        ("import os; os.write(1, b'[' + b','.join([b'{\"answer\": NaN}'] * 5) + b']'); os._exit(0)", "no answers"),
        ("def f(x):\n    a = []\n    for _ in range(900): a = [a]\n    return a", ""),
    ],
)
def test_whatever_code_answers_is_a_failed_test_at_worst(solution: str, detail: str) -> None:
    verdict = in_sandbox(solution)
    assert not verdict.all_passed
    assert len(verdict.passed) == 5
    assert detail in verdict.detail


@pytest.mark.long
@needs_sandbox
def test_code_that_never_ends_fails_with_the_limit_named() -> None:
    tests = HiddenTests("f", SQUARES.cases, limits=SandboxLimits(wall_seconds=30, cpu_seconds=1))
    assert in_sandbox("def f(x):\n    while True: pass", tests).detail == "cpu limit"


@needs_sandbox
def test_a_checker_of_the_task_decides_and_is_never_beside_the_code() -> None:
    checker = "secret = 4\ndef check(given, _, answer): return sorted(answer) == sorted(given[0]) and secret == 4\n"
    tests = HiddenTests("f", [JudgedCase([[3, 1, 2]])], checker)
    assert in_sandbox("def f(x): return x[::-1]", tests).all_passed
    spy = "import os\ndef f(x): return sorted(os.listdir('.'))"
    assert in_sandbox(spy, HiddenTests("f", [JudgedCase([0], ["main.py", "solution.py"])])).all_passed


@needs_sandbox
def test_a_broken_checker_is_the_machines_fault_and_no_verdict() -> None:
    with pytest.raises(RetryableError, match="no verdict"):
        in_sandbox("def f(x): return x * x", HiddenTests("f", SQUARES.cases, "def check("))


def test_a_verdict_that_does_not_know_the_word_is_refused() -> None:
    class Forged:
        interpreter = "python3"
        calls = 0

        async def python(self, *_: object, **__: object) -> SandboxOutcome:
            self.calls += 1
            answers = (
                json.dumps([{"answer": 0}] * 5)
                if self.calls == 1
                else '{"word": "x", "passed": [true,true,true,true,true]}'
            )
            return SandboxOutcome(0, "", answers.encode(), b"", 0.1)

    with pytest.raises(RetryableError, match="no verdict"):
        asyncio.run(judge_solution(Forged(), "", SQUARES))  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------ the folder


async def _ran(folder: Workspace, source: str) -> SandboxOutcome:
    folder.write("main.py", source.encode())
    return await folder.run([folder._sandbox.interpreter, "main.py"])


@needs_sandbox
def test_a_folder_keeps_what_a_turn_wrote_and_gives_its_output_and_exit_code() -> None:
    async def turns() -> None:
        folder = Workspace(Sandbox(), {"a": b"1"}, protected={"t/test.py": b"assert True"})
        first = await _ran(
            folder, "import os; os.mkdir('d'); open('d/b', 'w').write('2'); os.remove('a'); print('hi'); exit(3)"
        )
        assert (first.stdout, first.exit_code) == (b"hi\n", 3)
        assert folder.tree() == {"d/b": b"2", "t/test.py": b"assert True", "main.py": folder.tree()["main.py"]}
        assert (await _ran(folder, "print(open('d/b').read(), open('t/test.py').read())")).stdout == b"2 assert True\n"
        with pytest.raises(RunError, match=r"does not begin with the task's files: a, d/b, main\.py"):
            folder.check_fresh()

    asyncio.run(turns())


@needs_sandbox
@pytest.mark.parametrize(
    "attack",
    [
        "open('t/test.py', 'w').write('pass')",
        "import os; os.remove('t/test.py')",
        "import os; os.rename('t', 'u'); os.mkdir('t'); open('t/test.py', 'w').write('pass')",
        "import os; os.rename('t', 'u'); open('t', 'w').write('in the way')",
        "import os; os.rename('t', 'u'); os.symlink('/tmp', 't')",
    ],
)
def test_protected_files_are_as_they_were_in_the_next_turn(attack: str) -> None:
    async def turns() -> tuple[Workspace, SandboxOutcome]:
        folder = Workspace(Sandbox(), {}, protected={"t/test.py": b"assert True"})
        await _ran(folder, attack)
        return folder, await _ran(folder, "print(open('t/test.py').read())")

    folder, second = asyncio.run(turns())
    assert second.stdout == b"assert True\n"
    assert folder.tree()["t/test.py"] == b"assert True"


@needs_sandbox
def test_a_turn_that_leaves_too_much_changes_nothing() -> None:
    async def turns() -> None:
        folder = Workspace(Sandbox(), {"a": b"1"}, protected={})
        for source in (
            f"open('big', 'w').write('x' * {MAX_BYTES + 1})",
            "for n in range(100): open(str(n), 'w')",
            "open('a', 'w').write('2'); import os; os.kill(os.getppid(), 9)",
        ):
            await _ran(folder, source)
            assert folder.tree() == {"a": b"1", "main.py": source.encode()}

    asyncio.run(turns())


@needs_sandbox
def test_a_forged_list_of_files_only_chooses_the_agents_own() -> None:
    forged = json.dumps({"code": 0, "files": {"../../etc/x": "", "a": "eA=="}})
    source = f"import sys\nprint('\\n' + sys.argv[0] + 'files-' + {forged!r})"

    async def turns() -> Workspace:
        folder = Workspace(Sandbox(), {}, protected={"p": b"1"})
        word = f"files-{folder._digest[:16]}-0:"
        await _ran(folder, source.replace("files-", word).replace("sys.argv[0] + ", ""))
        return folder

    folder = asyncio.run(turns())
    assert set(folder.tree()) == {"p", "main.py"}


# -------------------------------------------------------------------------------------------------------- the task


def every_problem() -> list[str]:
    return [
        f"{k} {a} {b}" for k in coding_problems.KINDS for a in coding_problems.RANGE_A for b in coding_problems.RANGE_B
    ]


def test_every_problem_is_the_same_each_time_fits_and_hides_its_tests() -> None:
    for name in every_problem():
        problem = coding_problems.problem(name)
        coding_problems.problem.cache_clear()
        assert coding_problems.problem(name) == problem
        assert len(shown(name)) <= CodingTask.max_prompt_tokens
        assert len(problem.solution) < CodingTask.max_response_tokens
        CHARACTERS.encode(shown(name) + problem.solution)
        assert not {str(x) for x, _ in problem.examples} & {str(x) for x, _ in problem.tests}
        assert not any(f"f({x!r})" in shown(name) for x, _ in problem.tests)


def test_the_given_solution_of_every_problem_is_right() -> None:
    for name in every_problem():
        problem = coding_problems.problem(name)
        names: dict[str, object] = {}
        exec(problem.solution, names)
        for argument, answer in (*problem.examples, *problem.tests):
            assert names["f"](argument) == answer  # type: ignore[operator]


@pytest.mark.parametrize(
    "name", ["", "line", "line 1 1", "line 2 0", "line a b", "nothing 2 2", "line 2 2 2", "line  2 2"]
)
def test_a_name_of_no_problem_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="not the name of a problem"):
        coding_problems.problem(name)


@needs_sandbox
def test_the_reward_is_for_what_was_handed_in_and_for_nothing_else() -> None:
    turn = lambda text: list(CHARACTERS.turn(text))  # noqa: E731
    right, wrong = coding_problems.problem("line 3 4").solution, "def f(x):\n return x"

    def reward(*turns: list[int]) -> float:
        return float(coding_tests({"task": "coding", "prompt": "line 3 4", "actions": list(turns)})["reward"])

    assert reward(turn(f"#{wrong}"), turn(right)) == 1.0
    assert reward(turn(wrong)) == 0.0
    assert reward(turn(f"#{right}")) == 0.0  # tried, never handed in
    assert reward(turn(right)[:-1]) == 0.0  # not ended
    assert reward() == 0.0
    with pytest.raises(ValueError, match="ended at turn 1"):
        reward(turn(right), turn(right))
    with pytest.raises(ValueError, match="at most 3"):
        reward(*[turn(f"#{right}")] * 4)


@needs_sandbox
def test_a_trial_says_what_the_examples_gave() -> None:
    async def episode() -> list[str]:
        task = CodingTask(heldout=5)
        environment = task.environment()
        prompt = next(prompt for prompt in task.prompts("train", 0) if prompt.payload.startswith("line"))
        await environment.reset(prompt)
        answers = []
        for said in (f"#{coding_problems.problem(prompt.payload).solution}", "#def f(x):\n return 'no'"):
            result = await environment.step(CHARACTERS.turn(said))
            assert not result.done
            answers.append(CHARACTERS.decode(result.observation.token_ids))
        return answers

    assert asyncio.run(episode()) == ["ok\nok\nok\n", "'no'\n'no'\n'no'\n"]


@needs_sandbox
def test_the_function_host_scores_code_and_a_call_that_is_killed_takes_its_sandbox_along() -> None:
    mark = f"{os.getpid()}{time.time_ns()}"

    def episode(source: str) -> Trajectory:
        action = CHARACTERS.turn(source)
        turn = Turn((2,), action, (0.0,) * len(action), ((0, len(action)),))
        return Trajectory("t", "g", "coding", Prompt("k", "coding", 1, "line 3 4"), (turn,), None, "1", 1, False)

    def sandboxed() -> list[str]:
        """Command lines of sandboxes that hold the mark's processes."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and mark in (entry / "cmdline").read_text(errors="replace"):
                    found.append(entry.name)
        return found

    async def run() -> None:
        host = RewardHost("orchestrator.tasks.text_rewards:coding_tests", timeout=20.0)
        await host.start()
        reward = HttpReward(host.url, token=host.token, timeout=60.0)
        assert await reward.score(episode(coding_problems.problem("line 3 4").solution)) == 1.0
        assert await reward.score(episode("def f(x):\n return 0")) == 0.0
        sleeper = f"import os\nos.execv('/usr/bin/sleep', ['{mark}', '7'])"
        scoring = asyncio.ensure_future(reward.score(episode(sleeper)))
        while not sandboxed():
            assert not scoring.done()
            await asyncio.sleep(0.02)
        await host.stop()  # kills the worker in the midst of the call
        async with asyncio.timeout(6):
            while sandboxed():
                await asyncio.sleep(0.02)
        with pytest.raises(RetryableError):
            await scoring
        await reward.close()

    asyncio.run(run())
