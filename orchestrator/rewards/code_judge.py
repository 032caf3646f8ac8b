"""Judges model-written code: runs it on inputs in one sandbox, and has what it answered judged in another.

Guarantees (study notes, question 7: no tampering with the criterion):

* neither the expected answers nor the checker are in the sandbox in which the code runs: there is nothing to read, to
  change or to call; all that comes out of it is JSON, taken as data, so no object of the code's own making is ever compared;
* the checker runs in a sandbox of its own that the code has never been in, made from the task's files, and its verdict
  carries a word that only this call knows;
* :func:`judge_cases` runs every test case in a sandbox of its own, so that its time limit holds from outside and is measured
  there, whatever the code does; the first case that fails without an answer ends it, since the rest cannot make it correct;
* what the code does wrong (raises, exits, hangs, answers no JSON, reaches a limit) fails tests; what the machine does
  wrong (a sandbox that does not start) is a RetryableError, never a failed test.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from orchestrator.api import RetryableError, jsontext
from orchestrator.policies.episodes.adaptive_timeouts import CaseTime
from orchestrator.sandbox import Sandbox, SandboxLimits, SandboxOutcome

LIMITS = SandboxLimits(wall_seconds=8.0, cpu_seconds=2, memory_bytes=256 << 20, processes=8, scratch_bytes=8 << 20)

EQUAL = (
    "def check(arguments, expected, answer):\n    import json\n    return json.dumps(answer) == json.dumps(expected)\n"
)
"""The checker of most tests: the same JSON text, so 1, 1.0 and true differ."""

# Runs inside, beside the code: it is not trusted, and knows nothing but the inputs.
_RUNNER = """
import json, sys
cases = json.load(sys.stdin)
out = sys.stdout
sys.stdout = sys.stderr
names = {"__name__": "solution"}
exec(compile(open("solution.py").read(), "solution.py", "exec"), names)
answers = []
function = names[cases["entry"]]
for arguments in cases["inputs"]:
    try:
        answers.append({"answer": function(*arguments)})
    except Exception as error:
        answers.append({"error": type(error).__name__})
out.write(json.dumps(answers, allow_nan=False))
"""

_JUDGE = """
import json, sys
given = json.load(sys.stdin)
names = {}
exec(compile(open("checker.py").read(), "checker.py", "exec"), names)
passed = []
for arguments, expected, text in given["cases"]:
    try:
        answer = json.loads(text)
        passed.append("answer" in answer and names["check"](arguments, expected, answer["answer"]) is True)
    except Exception:
        passed.append(False)
print(json.dumps({"word": given["word"], "passed": passed}))
"""


@dataclass(frozen=True, slots=True)
class JudgedCase:
    """One test: the arguments of the call, and what the checker is told to expect. JSON values."""

    arguments: Sequence[Any]
    expected: Any = None


@dataclass(frozen=True, slots=True)
class HiddenTests:
    """What a solution is judged by. ``checker`` defines ``check(arguments, expected, answer) -> bool``."""

    entry: str  # the function that is called
    cases: Sequence[JudgedCase]
    checker: str = EQUAL
    limits: SandboxLimits = field(default=LIMITS)


@dataclass(frozen=True, slots=True)
class CaseLimits:
    """Wall-clock seconds: of the first cases, of every other one, and of all cases together. Raises ValueError."""

    cases: Sequence[float]
    other: float
    whole: float

    def __post_init__(self) -> None:
        for seconds in (*self.cases, self.other, self.whole):
            if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
                raise ValueError(f"a limit must be seconds above 0, is {seconds!r:.40}")

    def limit_of(self, case: int) -> float:
        """That of one case."""
        return self.cases[case] if case < len(self.cases) else self.other


@dataclass(frozen=True, slots=True)
class Verdict:
    """``passed[i]``: whether case i passed. ``detail``: for people; the error, or the limit that was reached."""

    passed: tuple[bool, ...]
    detail: str = ""

    @property
    def all_passed(self) -> bool:
        """Every case, and there is one."""
        return bool(self.passed) and all(self.passed)


async def judge_solution(sandbox: Sandbox, solution: str, tests: HiddenTests) -> Verdict:
    """Run ``solution`` (Python source) on the cases and have its answers checked. Raises RetryableError."""
    ran = await _ran(sandbox, solution, tests.entry, tests.cases, tests.limits)
    failed = tuple(False for _ in tests.cases)
    if not ran.ok:
        last = ran.stderr.decode(errors="replace").strip().splitlines()[-1:]
        return Verdict(
            failed, f"{ran.limit} limit" if ran.limit else (last[0] if last else f"exit code {ran.exit_code}")
        )
    answers = _answers(ran.stdout, len(tests.cases))
    if answers is None:
        return Verdict(failed, "no answers")
    return await _checked(sandbox, tests, answers)


async def judge_cases(
    sandbox: Sandbox, solution: str, tests: HiddenTests, limits: CaseLimits
) -> tuple[Verdict, list[CaseTime]]:
    """As :func:`judge_solution`, but under the wall-clock limit of each case. Also says how the cases went that ran, in
    their order; run times hold the start of an interpreter. Raises RetryableError."""
    answers: list[str] = []
    times: list[CaseTime] = []
    left = limits.whole
    for number, case in enumerate(tests.cases):
        limit = limits.limit_of(number)
        allowed = replace(tests.limits, wall_seconds=min(limit, left), cpu_seconds=math.ceil(limit) + 1)
        ran = await _ran(sandbox, solution, tests.entry, [case], allowed)
        times.append(CaseTime(ran.seconds, limit, ran.limit in ("wall", "cpu")))
        found = _answers(ran.stdout, 1) if ran.ok else None
        if found is None or "error" in json.loads(found[0]):
            why = f"{ran.limit} limit" if ran.limit else "no answer"
            return Verdict(tuple(False for _ in tests.cases), f"in case {number + 1}: {why}"), times
        answers += found
        left -= ran.seconds
        if left <= 0:
            return Verdict(tuple(False for _ in tests.cases), f"limit of {limits.whole:g} s for all cases"), times
    return await _checked(sandbox, tests, answers), times


async def _ran(
    sandbox: Sandbox, solution: str, entry: str, cases: Sequence[JudgedCase], limits: SandboxLimits
) -> SandboxOutcome:
    given = json.dumps({"entry": entry, "inputs": [list(case.arguments) for case in cases]})
    code = {"solution.py": solution.encode("utf-8", "replace")}
    return await sandbox.python(_RUNNER, read_only=code, stdin=given.encode(), limits=limits)


async def _checked(sandbox: Sandbox, tests: HiddenTests, answers: list[str]) -> Verdict:
    word = secrets.token_hex(16)
    cases = [[list(case.arguments), case.expected, answer] for case, answer in zip(tests.cases, answers, strict=True)]
    judged = await sandbox.python(
        _JUDGE,
        read_only={"checker.py": tests.checker.encode()},
        stdin=json.dumps({"word": word, "cases": cases}).encode(),
        limits=tests.limits,
    )
    if judged.limit:  # by what it was given to check
        return Verdict(tuple(False for _ in cases), f"{judged.limit} limit of the checker")
    try:
        verdict = json.loads(judged.stdout)
        passed = tuple(verdict["passed"])
        sound = verdict["word"] == word and len(passed) == len(cases) and all(type(each) is bool for each in passed)
    except (ValueError, KeyError, TypeError, RecursionError):
        sound = False
    if not judged.ok or not sound:
        raise RetryableError(f"the checker gave no verdict: {judged.stderr[-300:]!r}")
    return Verdict(passed)


def _answers(output: bytes, count: int) -> list[str] | None:
    """What the code answered, as one JSON text a case, or None when it is not of the form."""
    try:
        answers = jsontext.parse(output, finite=True)
        if (
            not isinstance(answers, list)
            or len(answers) != count
            or not all(isinstance(each, dict) for each in answers)
        ):
            return None
        return [json.dumps(each) for each in answers]
    except ValueError:
        return None
