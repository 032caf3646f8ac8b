"""Coding: write a function, try it on examples in the sandbox, hand it in to be judged by hidden tests.

The prompt says what ``f(x)`` is to return and shows examples. A turn that begins with ``#`` is tried: the folder of the
episode holds it as ``solution.py`` beside ``examples.json`` (read-only), and what each example gave comes back. Any other
turn is handed in, and the end. At most 3 turns. The reward function judges what was handed in.

No tampering with the criterion: the hidden tests and their answers are in no sandbox in which the model's code runs
(``orchestrator/rewards/code_judge.py``); what is tried and what is judged share no process, no file and no sandbox; the folder is
compared with what the task put there whenever an episode begins (``orchestrator/sandbox/workspace.py``).
"""

from __future__ import annotations

import json
import random

from orchestrator.rewards.code_judge import HiddenTests, JudgedCase
from orchestrator.sandbox import Sandbox, SandboxLimits
from orchestrator.sandbox.workspace import Workspace
from orchestrator.tasks import coding_problems
from orchestrator.tasks.text import Reply, TextTask
from orchestrator.tasks.vocabulary import CHARACTERS, printable

LIMITS = SandboxLimits(wall_seconds=5.0, cpu_seconds=2, memory_bytes=256 << 20, processes=8, scratch_bytes=8 << 20)

# Runs beside the model's code, and only says what the model could find out by itself.
TRIAL = """
import json
examples = json.load(open("examples.json"))
names = {"__name__": "solution"}
exec(compile(open("solution.py").read(), "solution.py", "exec"), names)
for argument, expected in examples:
    try:
        answer = names["f"](argument)
        print("ok" if answer == expected else repr(answer))
    except Exception as error:
        print(type(error).__name__)
"""


class CodingTask(TextTask):
    """See the module. Raises ConfigError, when an environment is made, on a machine without a sandbox."""

    name = "coding"
    reward = "orchestrator.tasks.text_rewards:coding_tests"
    reward_seconds = 20.0
    reward_by_case = True
    needs_sandbox = True
    words = CHARACTERS
    max_turns = 3
    max_response_tokens = 64
    max_prompt_tokens = 256
    max_reply_tokens = 48

    def __init__(self, heldout: int = 50) -> None:
        super().__init__(heldout)
        self._sandbox: Sandbox | None = None

    def draw(self, chance: random.Random) -> str:
        """The name of a problem."""
        return coding_problems.draw(chance)

    def play(self, payload: str) -> Coding:
        """One problem."""
        self._sandbox = self._sandbox or Sandbox(LIMITS)
        return Coding(payload, self._sandbox)

    def expert(self, payload: str) -> list[tuple[str, str]]:
        """Hands in the right function at once."""
        return [(shown(payload), coding_problems.problem(payload).solution)]

    def novice(self, answer: str, chance: random.Random) -> str:
        """A function that adds some number."""
        return f"def f(x):\n return x+{chance.randint(0, 9)}"


class Coding:
    """One episode."""

    def __init__(self, name: str, sandbox: Sandbox) -> None:
        self._name = name
        problem = coding_problems.problem(name)
        files = {"examples.json": json.dumps(problem.examples).encode()}
        self._folder = Workspace(sandbox, {}, protected={**files, "try.py": TRIAL.encode()})
        self._python = sandbox.interpreter

    def start(self) -> str:
        """What to write, and examples. Raises RunError when something of an earlier episode is in the folder."""
        self._folder.check_fresh()
        return shown(self._name)

    async def act(self, said: str | None) -> Reply:
        """A trial or what is handed in. Raises RetryableError when the sandbox does not start."""
        if said is None:
            return Reply("?\n", invalid=True)
        if is_handed_in(said):
            return Reply(done=True)
        self._folder.write("solution.py", said[1:].encode())
        outcome = await self._folder.run([self._python, "-I", "-S", "-B", "try.py"])
        if outcome.limit:
            return Reply(f"{outcome.limit} limit\n")
        lines = printable(outcome.stdout.decode(errors="replace")).splitlines()
        lines += printable(outcome.stderr.decode(errors="replace")).strip().splitlines()[-1:]
        return Reply("\n".join(lines) + "\n")


def is_handed_in(said: str) -> bool:
    """Whether a turn is handed in, and so the end; else it is tried."""
    return not said.startswith("#")


def shown(name: str) -> str:
    """The prompt of a problem."""
    problem = coding_problems.problem(name)
    examples = "".join(f"f({argument!r})={answer!r}\n" for argument, answer in problem.examples)
    return f"{problem.text}\n{examples}"


def hidden_tests(name: str) -> HiddenTests:
    """What the reward function judges by."""
    problem = coding_problems.problem(name)
    return HiddenTests(coding_problems.ENTRY, [JudgedCase([argument], answer) for argument, answer in problem.tests])
