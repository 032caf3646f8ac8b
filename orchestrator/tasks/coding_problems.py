"""Small programming problems, drawn from a seed: what to write, the arguments it is called with, and the right answers.

Guarantees: everything follows from a problem's name (``KIND A B``) alone; examples (shown) and tests (hidden) are drawn
apart and never the same; the tests tell its function from that of every other problem of its kind, so a near miss does not
pass.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

EXAMPLES, TESTS = 3, 12
RANGE_A, RANGE_B = range(2, 6), range(1, 10)
ENTRY = "f"

Answer = Callable[[Any, int, int], Any]


@dataclass(frozen=True, slots=True)
class Kind:
    """A family of problems: ``text`` has the places A and B; ``answer(x, a, b)`` is right; ``draw`` makes an argument."""

    text: str
    answer: Answer
    draw: Callable[[random.Random], Any]
    solution: str  # in Python


def _number(chance: random.Random) -> int:
    return chance.randint(-99, 99)


def _numbers(chance: random.Random) -> list[int]:
    return [chance.randint(-20, 20) for _ in range(chance.randint(0, 8))]


def _letters(chance: random.Random) -> str:
    return "".join(chance.choice("abcdefgh") for _ in range(chance.randint(0, 9)))


KINDS: dict[str, Kind] = {
    "line": Kind("A*x+B", lambda x, a, b: a * x + b, _number, "A*x+B"),
    "rest": Kind("x mod A, plus B", lambda x, a, b: x % a + b, _number, "x%A+B"),
    "far": Kind(
        "distance of x and A, at most B*9", lambda x, a, b: min(abs(x - a), b * 9), _number, "min(abs(x-A),B*9)"
    ),
    "sum": Kind("sum of list x, times A, plus B", lambda x, a, b: sum(x) * a + b, _numbers, "sum(x)*A+B"),
    "above": Kind(
        "how many of list x are above A, plus B",
        lambda x, a, b: sum(each > a for each in x) + b,
        _numbers,
        "sum(i>A for i in x)+B",
    ),
    "every": Kind(
        "every A-th of list x, each plus B", lambda x, a, b: [i + b for i in x[::a]], _numbers, "[i+B for i in x[::A]]"
    ),
    "turn": Kind(
        "text x reversed, A times, less its first B", lambda x, a, b: (x[::-1] * a)[b:], _letters, "(x[::-1]*A)[B:]"
    ),
    "count": Kind("length of text x, times A, plus B", lambda x, a, b: len(x) * a + b, _letters, "len(x)*A+B"),
}


def draw(chance: random.Random) -> str:
    """The name of a problem."""
    return f"{chance.choice(list(KINDS))} {chance.choice(RANGE_A)} {chance.choice(RANGE_B)}"


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem: ``examples`` are shown, ``tests`` are not; pairs of argument and right answer."""

    text: str
    solution: str
    examples: tuple[tuple[Any, Any], ...]
    tests: tuple[tuple[Any, Any], ...]


@functools.lru_cache(maxsize=512)
def problem(name: str) -> Problem:
    """The problem of that name. Raises ValueError when there is none."""
    kind, a, b = _parsed(name)
    chance = random.Random(f"coding {name}")
    arguments: list[Any] = []
    while not _tell_apart(kind, a, b, arguments[EXAMPLES:]):
        arguments = []
        while len(arguments) < EXAMPLES + TESTS:
            drawn = KINDS[kind].draw(chance)
            if drawn not in arguments:
                arguments.append(drawn)
    pairs = tuple((x, KINDS[kind].answer(x, a, b)) for x in arguments)
    return Problem(
        _filled(KINDS[kind].text, a, b),
        f"def {ENTRY}(x):\n return {_filled(KINDS[kind].solution, a, b)}",
        pairs[:EXAMPLES],
        pairs[EXAMPLES:],
    )


def _tell_apart(kind: str, a: int, b: int, arguments: list[Any]) -> bool:
    """Whether no other problem of the kind has the same answers."""
    answer = KINDS[kind].answer
    right = [answer(x, a, b) for x in arguments]
    others = [(i, j) for i in RANGE_A for j in RANGE_B if (i, j) != (a, b)]
    return bool(arguments) and all([answer(x, i, j) for x in arguments] != right for i, j in others)


def _parsed(name: str) -> tuple[str, int, int]:
    parts = name.split(" ")
    if len(parts) != 3 or parts[0] not in KINDS or not (parts[1].isdigit() and parts[2].isdigit()):
        raise ValueError(f"not the name of a problem: {name!r}")
    a, b = int(parts[1]), int(parts[2])
    if a not in RANGE_A or b not in RANGE_B:
        raise ValueError(f"not the name of a problem: {name!r}")
    return parts[0], a, b


def _filled(text: str, a: int, b: int) -> str:
    return "".join({"A": str(a), "B": str(b)}.get(character, character) for character in text)
