"""Judges a repository by its hidden tests: the tests run in a sandbox of their own, beside the files that an agent left.

Guarantees: the tests are in no sandbox in which the agent works; what it leaves under their names does not reach them; the
verdict carries a word that only this call knows. Unlike :mod:`orchestrator.rewards.code_judge`, code and tests share a process,
as a unit test must: code that is written to deceive its own tests can. What the code does wrong (raises, exits, hangs, reaches
a limit) fails tests; what the machine does wrong is a RetryableError, never a failed test.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orchestrator.api import jsontext
from orchestrator.sandbox import Sandbox, SandboxLimits

LIMITS = SandboxLimits(wall_seconds=20.0, cpu_seconds=10, memory_bytes=512 << 20, processes=32, scratch_bytes=16 << 20)

_RUNNER = """
import json, linecache, sys, traceback, unittest
given = json.load(sys.stdin)
word, out = given.pop("word"), sys.stdout
sys.stdout = sys.stderr
sys.path.insert(0, ".")
passed, failed = [], {}

def last_lines(error):
    kind, value, trace = error
    frames = [frame for frame in traceback.extract_tb(trace) if given["folder"] in frame.filename]
    said = traceback.format_exception_only(kind, value)
    return [statement(frames[-1]) if frames else "", *"".join(said).strip().splitlines()[:4]]

def statement(frame):
    last = getattr(frame, "end_lineno", None) or frame.lineno
    return " ".join(linecache.getline(frame.filename, line).strip() for line in range(frame.lineno, last + 1)).strip()

class Result(unittest.TestResult):
    def addSuccess(self, test):
        passed.append(test.id())
    def addFailure(self, test, error):
        failed.setdefault(test.id(), last_lines(error))
    addError = addFailure
    def addSubTest(self, test, part, error):
        if error is not None:
            failed.setdefault(test.id(), last_lines(error))

suite = unittest.defaultTestLoader.loadTestsFromNames(given["modules"])
suite.run(Result())
passed = [name for name in passed if name not in failed]
out.write("\\n" + json.dumps({"word": word, "passed": passed, "failed": failed}))
"""


@dataclass(frozen=True, slots=True)
class SuiteVerdict:
    """``failed``: test -> the line of it that failed, and what was said; ``detail``: why there is no verdict, for people."""

    passed: tuple[str, ...]
    failed: Mapping[str, tuple[str, ...]]
    detail: str = ""


async def judge_suite(
    sandbox: Sandbox,
    files: Mapping[str, bytes],
    tests: Mapping[str, bytes],
    modules: Sequence[str],
    folder: str,
    limits: SandboxLimits = LIMITS,
) -> SuiteVerdict:
    """Run ``modules`` of ``tests``, which lie in ``folder``, on ``files``. Raises RetryableError."""
    word = secrets.token_hex(16)
    given = json.dumps({"word": word, "modules": list(modules), "folder": folder})
    own = {path: data for path, data in files.items() if not path.startswith(folder)}
    ran = await sandbox.python(_RUNNER, read_only={**own, **tests}, stdin=given.encode(), limits=limits)
    if ran.limit:
        return SuiteVerdict((), {}, f"{ran.limit} limit")
    try:
        said = jsontext.parse_object(ran.stdout.rpartition(b"\n")[2])
        if said["word"] != word:
            raise ValueError
        passed = tuple(str(name) for name in said["passed"])
        failed = {str(name): tuple(map(str, lines)) for name, lines in said["failed"].items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        last = ran.stderr.decode(errors="replace").strip().splitlines()[-1:]
        return SuiteVerdict((), {}, last[0] if last else f"exit code {ran.exit_code}")
    return SuiteVerdict(passed, failed)
