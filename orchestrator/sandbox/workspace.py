"""A folder that an agent works in over several turns, each of which runs in a fresh sandbox.

Guarantees: what the agent wrote in one turn is there in the next, within limits; files that are *protected* (tests,
examples, tools) are placed anew from the task's own copies in every turn, read-only, and what a turn leaves under their
names is not kept; nothing outside of the folder survives a turn; a fresh episode begins with
exactly what the task put there, and :meth:`Workspace.check_fresh` compares.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Mapping, Sequence

from orchestrator.api import RunError, jsontext
from orchestrator.sandbox.limits import SandboxLimits, SandboxOutcome
from orchestrator.sandbox.run import CPU_EXIT_CODE, Sandbox, check_name

MAX_FILES = 64
MAX_NAME = 500  # characters of a path
MAX_BYTES = 1 << 18  # of all kept files together

# Runs the program, then prints the folder on a line of its own behind what the program printed. The program can print such
# a line too: then it lies about its own files, which are its own to choose.
_COLLECT = """
import base64, json, os, subprocess, sys
word, files, total = sys.argv[1], {}, 0
code = subprocess.run(sys.argv[4:]).returncode
for folder, below, names in os.walk("."):
    below[:] = [name for name in below if not os.path.islink(os.path.join(folder, name))]
    for name in names:
        path = os.path.relpath(os.path.join(folder, name), ".")
        if os.path.islink(path) or not os.path.isfile(path) or path == ".collect.py":
            continue
        total += os.path.getsize(path)
        if len(files) >= int(sys.argv[2]) or total > int(sys.argv[3]):
            files = None
            break
        with open(path, "rb") as file:
            files[path] = base64.b64encode(file.read()).decode()
    if files is None:
        break
print("\\n" + word + json.dumps({"code": code if code >= 0 else 128 - code, "files": files}))
"""


class Workspace:
    """``files`` may be changed by the agent, ``protected`` may not. Raises ValueError for names that lead out."""

    def __init__(self, sandbox: Sandbox, files: Mapping[str, bytes], *, protected: Mapping[str, bytes]) -> None:
        for name in (*files, *protected):
            check_name(name)
        self._sandbox = sandbox
        self._given = dict(files)
        self._protected = dict(protected)
        self._digest = _digest({**self._given, **self._protected})
        self._files = dict(files)
        self._turns = 0

    def write(self, name: str, data: bytes) -> None:
        """Put a file of the agent's there. Raises ValueError for a protected name, or one that leads out."""
        check_name(name)
        if name in self._protected:
            raise ValueError(f"{name!r} is protected")
        self._files[name] = data

    def tree(self) -> dict[str, bytes]:
        """The folder as it is now."""
        return {**self._files, **self._protected}

    def check_fresh(self) -> None:
        """Raises RunError when the folder is not exactly what the task put there."""
        if _digest(self.tree()) != self._digest:
            changed = sorted(set(self._files.items()) ^ set(self._given.items()))
            names = sorted({name for name, _ in changed}) or sorted(self._protected)
            raise RunError(f"a fresh episode does not begin with the task's files: {', '.join(names)}")

    async def run(
        self, program: Sequence[str], *, stdin: bytes = b"", limits: SandboxLimits | None = None
    ) -> SandboxOutcome:
        """Run a program in the folder and keep what it changed there. A turn that reaches a limit, or leaves more than may be
        kept, changes nothing. Raises RetryableError when the sandbox does not start."""
        word = f"files-{self._digest[:16]}-{self._turns}:"
        self._turns += 1
        collect = [self._sandbox.interpreter, "-I", "-S", "-B", ".collect.py", word, str(MAX_FILES), str(MAX_BYTES)]
        outcome = await self._sandbox.run(
            [*collect, *program],
            files=self._files,
            read_only={**self._protected, ".collect.py": _COLLECT.encode()},
            stdin=stdin,
            limits=limits,
        )
        output, _, text = outcome.stdout.rpartition(f"\n{word}".encode())
        if not outcome.ok or not text:
            return outcome
        code, files = _collected(text)
        if files is not None:
            self._files = {name: data for name, data in files.items() if not self._in_the_way(name)}
        limit = "cpu" if code == CPU_EXIT_CODE else ""
        return SandboxOutcome(code, limit, output, outcome.stderr, outcome.seconds)

    def _in_the_way(self, name: str) -> bool:
        """Whether a file of this name would keep the protected ones from being placed, or cannot be placed itself."""
        return len(name) > MAX_NAME or any(path == name or path.startswith(f"{name}/") for path in self._protected)


def _collected(text: bytes) -> tuple[int, dict[str, bytes] | None]:
    """Exit code and files; None for files that are not of the form."""
    try:
        found = jsontext.parse(text)
        code = int(found["code"])
        files = {str(name): base64.b64decode(data, validate=True) for name, data in found["files"].items()}
        for name in files:
            check_name(name)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, binascii.Error):
        return 1, None
    if len(files) > MAX_FILES or sum(map(len, files.values())) > MAX_BYTES:
        return code, None
    return code, files


def _digest(files: Mapping[str, bytes]) -> str:
    """SHA-256 over names and contents."""
    total = hashlib.sha256()
    for name in sorted(files):
        for part in (name.encode(), files[name]):
            total.update(len(part).to_bytes(8, "little") + part)
    return total.hexdigest()
