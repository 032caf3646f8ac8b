"""Arithmetic with a tool: work out an expression, with a Python interpreter in the sandbox at hand.

The prompt is an expression (``(47+8)*63-5``). A turn that begins with ``>`` is a program: it runs in the sandbox, and what it
prints comes back, or the value of its last line when that is an expression (``>(47+8)*63-5`` gives ``3460``). A turn that
begins with ``=`` is the answer, and the end. At most 4 turns. The reward looks at the answer alone; the tool is free.
"""

from __future__ import annotations

import ast
import operator
import random
from collections.abc import Callable

from orchestrator.sandbox import Sandbox, SandboxLimits
from orchestrator.tasks.text import Reply, TextTask
from orchestrator.tasks.vocabulary import CHARACTERS, printable

LIMITS = SandboxLimits(wall_seconds=5.0, cpu_seconds=2, memory_bytes=256 << 20, processes=8, scratch_bytes=8 << 20)
_OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}

# Runs a program as an interactive interpreter would: the value of a last expression is printed.
INTERPRETER = """
import ast, sys
tree, names = ast.parse(sys.stdin.read()), {"__name__": "__main__"}
last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
exec(compile(tree, "program", "exec"), names)
if last is not None:
    value = eval(compile(ast.Expression(last.value), "program", "eval"), names)
    if value is not None:
        print(value)
"""


class CalculatorTask(TextTask):
    """See the module. Raises ConfigError, when an environment is made, on a machine without a sandbox."""

    name = "calculator"
    reward = "orchestrator.tasks.text_rewards:calculator_answer"
    needs_sandbox = True
    words = CHARACTERS
    max_turns = 4
    max_response_tokens = 48
    max_prompt_tokens = 24
    max_reply_tokens = 32

    _sandbox: Sandbox | None = None

    def draw(self, chance: random.Random) -> str:
        """Four numbers of up to two digits, three operators, perhaps a pair of parentheses."""
        numbers = [str(chance.randint(2, 99)) for _ in range(4)]
        first, second, third = (chance.choice("+-*") for _ in range(3))
        a, b, c, d = numbers
        return chance.choice(
            [
                f"{a}{first}{b}{second}{c}{third}{d}",
                f"({a}{first}{b}){second}{c}{third}{d}",
                f"{a}{first}({b}{second}{c}){third}{d}",
            ]
        )

    def play(self, payload: str) -> Calculation:
        """One expression."""
        self._sandbox = self._sandbox or Sandbox(LIMITS)
        return Calculation(payload, self._sandbox)

    def expert(self, payload: str) -> list[tuple[str, str]]:
        """Asks the tool, then says what it said."""
        value = str(value_of(payload))
        return [(f"{payload}\n", f">{payload}"), (f"{value}\n", f"={value}")]

    def novice(self, answer: str, chance: random.Random) -> str:
        """A number."""
        return f"={chance.randint(0, 9999)}"


class Calculation:
    """One episode."""

    def __init__(self, expression: str, sandbox: Sandbox) -> None:
        self._expression, self._value = expression, value_of(expression)
        self._sandbox = sandbox

    def start(self) -> str:
        """The expression."""
        return f"{self._expression}\n"

    async def act(self, said: str | None) -> Reply:
        """A program or the answer. Raises RetryableError when the sandbox does not start."""
        if said is not None and is_answer(said):
            return Reply(reward=float(answers(self._expression, said)), done=True)
        if said is None or not said.startswith(">"):
            return Reply("?\n", invalid=True)
        return Reply(await run_program(self._sandbox, said[1:]))


async def run_program(sandbox: Sandbox, source: str) -> str:
    """What a program prints; the name of its error, or of the limit that it reached. Ends in a line feed."""
    outcome = await sandbox.python(INTERPRETER, stdin=source.encode())
    if outcome.limit:
        return f"{outcome.limit} limit\n"
    if not outcome.ok:
        lines = printable(outcome.stderr.decode(errors="replace")).strip().splitlines()
        return (lines[-1].partition(":")[0] if lines else f"exit {outcome.exit_code}") + "\n"
    return printable(outcome.stdout.decode(errors="replace")).rstrip("\n") + "\n"


def is_answer(said: str) -> bool:
    """Whether a turn is the answer, and so the end."""
    return said.startswith("=")


def answers(expression: str, said: str) -> bool:
    """Whether a turn is ``=`` and the value of the expression, in decimal."""
    return said == f"={value_of(expression)}"


def value_of(expression: str) -> int:
    """The value of an expression of whole numbers with + - * and parentheses. Raises ValueError for anything else."""
    try:
        return _value(ast.parse(expression, mode="eval").body)
    except (SyntaxError, RecursionError) as error:
        raise ValueError(f"not an expression: {expression!r}") from error


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int() as number):
            return number
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            return _OPERATIONS[type(op)](_value(left), _value(right))
    raise ValueError("not an expression of whole numbers with + - *")
