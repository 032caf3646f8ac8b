"""Repository: find and mend a bug in a real package, over several turns, with its own tests out of sight.

The prompt names a test that fails, its line that failed, and what was said. A turn is one command, its first line:

    ls                        names and lengths of the files
    show FILE [FIRST [LAST]]  lines of a file, numbered
    find TEXT                 lines that hold it
    edit FILE FIRST LAST      the lines after this one take the place of FIRST to LAST; LAST = FIRST - 1 inserts
    run                       the lines after this one are run by Python beside the files, in a sandbox
    done                      it is mended: the end

At most 8 turns. The reward function edits anew as the turns say, and runs all hidden tests
(``orchestrator/rewards/suite_judge.py``).

Guarantees: what ``run`` changes is gone with it, so that the files follow from the edits alone; the tests are in no sandbox
that the agent uses, and no command reads them; each episode begins at the same checkout. Environments are kept by repository
(:meth:`RepositoryTask.environment_template`): one is prepared once by importing all modules of the repository, and one that
cannot be is ``environment_template``, with the reason.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence

from orchestrator.api import ConfigError, EnvironmentTemplate, Prompt, TrajectoryError
from orchestrator.sandbox import Sandbox, SandboxLimits
from orchestrator.tasks.repository_bundles import HIDDEN, RepositoryBundle, bundled_names, encoded, read_bundle
from orchestrator.tasks.text import Reply, TextTask
from orchestrator.tasks.vocabulary import CHARACTERS, printable

LIMITS = SandboxLimits(wall_seconds=15.0, cpu_seconds=10, memory_bytes=512 << 20, processes=16, scratch_bytes=16 << 20)
MOST_LINES = 5000  # of a file that was edited
NAME = re.compile(r"(\w[\w.-]{0,63}/){0,4}\w[\w.-]{0,63}", re.ASCII)  # of a file that an agent makes
COMMANDS = (
    "ls | show FILE [FIRST [LAST]] | find TEXT | edit FILE FIRST LAST, new lines below | run, Python below | done"
)
_BEGIN = "import sys; sys.path.insert(0, '.')\n"
_BUILD = """
import importlib, json, sys
for name in json.load(sys.stdin):
    importlib.import_module(name)
"""


class RepositoryTask(TextTask):
    """See the module. ``repositories``: names of :func:`bundled_names` and paths of bundles; empty: all that come with the
    package. Raises ConfigError, also when an environment is made on a machine without a sandbox."""

    name = "repository"
    reward = "orchestrator.tasks.text_rewards:repository_tests"
    reward_seconds = 30.0
    needs_sandbox = True
    words = CHARACTERS
    max_turns = 8
    max_response_tokens = 1600
    max_prompt_tokens = 1200
    max_reply_tokens = 1600

    def __init__(self, heldout: int = 20, repositories: Sequence[str] = ()) -> None:
        self._sources = tuple(repositories) or bundled_names()
        for source in self._sources:
            if " " in source:
                raise ConfigError("task.repositories", source, "holds a space: give the file another name")
        self._bugs = [f"{source} {bug}" for source in self._sources for bug in read_bundle(source).bugs]
        self._sandbox: Sandbox | None = None
        self._prepared: dict[str, None] = {}
        super().__init__(heldout)

    def draw(self, chance: random.Random) -> str:
        """A repository and a bug of it, by name."""
        return chance.choice(self._bugs)

    def identity(self, payload: str) -> str:
        """The repository's own name and the bug's, wherever the bundle lies."""
        bundle, bug = opened(payload)
        return f"{bundle.name} {bug}"

    def environment_template(self, prompt: Prompt) -> EnvironmentTemplate:
        """Environments are kept by repository: its bugs are checkouts of it."""
        return EnvironmentTemplate(setup=prompt.payload.partition(" ")[0])

    async def prepare(self, setup: str) -> None:
        """Import all modules of a repository, once. Raises TrajectoryError where that fails, RetryableError where the sandbox
        does."""
        if setup in self._prepared:
            return
        try:
            bundle = read_bundle(setup)
        except ConfigError as error:
            raise TrajectoryError("environment_template", str(error)) from error
        modules = [
            path[:-3].replace("/", ".").removesuffix(".__init__") for path in bundle.files if path.endswith(".py")
        ]
        files = {path: encoded(lines) for path, lines in bundle.checkout().items()}
        built = await self.sandbox().python(_BEGIN + _BUILD, read_only=files, stdin=json.dumps(modules).encode())
        if not built.ok:
            last = built.stderr.decode(errors="replace").strip().splitlines()[-1:]
            why = f"{built.limit} limit" if built.limit else "".join(last) or f"exit code {built.exit_code}"
            raise TrajectoryError("environment_template", f"repository {bundle.name} does not build: {why:.300}")
        self._prepared[setup] = None

    def play(self, payload: str) -> RepositoryGame:
        """One bug. Raises ValueError for none that is known."""
        return RepositoryGame(payload, self.sandbox())

    def sandbox(self) -> Sandbox:
        """Where programs run. Raises ConfigError on a machine without one."""
        self._sandbox = self._sandbox or Sandbox(LIMITS)
        return self._sandbox

    def expert(self, payload: str) -> list[tuple[str, str]]:
        """Puts the right lines where the bug is, at once: it knows them."""
        bundle, bug = opened(payload)
        known = bundle.bugs[bug]
        edit = "\n".join([f"edit {known.path} {known.at} {known.at - 1 + len(known.broken)}", *known.right])
        return [(shown(payload), edit), (_edited(known.path, len(bundle.files[known.path])), "done")]

    def novice(self, answer: str, chance: random.Random) -> str:
        """Looks at the files, and does nothing."""
        return chance.choice(("ls", "done"))


class RepositoryGame:
    """One episode. ``sandbox`` None: nothing is run, as where turns are played again for their edits alone."""

    def __init__(self, payload: str, sandbox: Sandbox | None) -> None:
        bundle, bug = opened(payload)
        self._payload, self._sandbox = payload, sandbox
        self._lines = bundle.checkout(bug)
        self.over = False

    @property
    def files(self) -> dict[str, bytes]:
        """As they are now."""
        return {path: encoded(lines) for path, lines in self._lines.items()}

    def start(self) -> str:
        """What is known of the bug."""
        return shown(self._payload)

    async def act(self, said: str | None) -> Reply:
        """One command. Raises RetryableError when the sandbox does not start."""
        head, separator, body = (said or "").partition("\n")
        words = head.split()
        try:
            match words:
                case ["ls"]:
                    return Reply("".join(f"{path} {len(lines)}\n" for path, lines in sorted(self._lines.items())))
                case ["show", path, *place] if len(place) <= 2:
                    return Reply(self._show(path, *map(int, place)))
                case ["find", _, *_]:
                    return Reply(self._find(head.split(None, 1)[1]))
                case ["edit", path, first, last]:
                    return Reply(self._edit(path, int(first), int(last), body.split("\n") if separator else []))
                case ["run"]:
                    return Reply(await self._run(body))
                case ["done"]:
                    self.over = True
                    return Reply(done=True)
        except ValueError as error:
            return Reply(f"{printable(str(error))}\n", invalid=True)
        return Reply(f"? {COMMANDS}\n", invalid=True)

    def _of(self, path: str) -> list[str]:
        if path not in self._lines:
            raise ValueError(f"there is no file {path}")
        return self._lines[path]

    def _show(self, path: str, first: int = 1, last: int | None = None) -> str:
        lines = self._of(path)
        if not 1 <= first <= len(lines):
            raise ValueError(f"{path} has lines 1 to {len(lines)}")
        chosen = lines[first - 1 : last]
        return "".join(f"{number} {printable(line)}\n" for number, line in enumerate(chosen, start=first))

    def _find(self, text: str) -> str:
        found = [
            f"{path} {number} {printable(line).strip()}\n"
            for path, lines in sorted(self._lines.items())
            for number, line in enumerate(lines, start=1)
            if text in line
        ]
        return "".join(found) or "nowhere\n"

    def _edit(self, path: str, first: int, last: int, body: Sequence[str]) -> str:
        if path not in self._lines and not self._may_be_made(path):
            raise ValueError(f"{path} is no name for a file here")
        lines = self._lines.get(path, [])
        if not 1 <= first <= len(lines) + 1 or not first - 1 <= last <= len(lines):
            raise ValueError(f"{path} has lines 1 to {len(lines)}")
        new = [*lines[: first - 1], *body, *lines[last:]]
        if len(new) > MOST_LINES or len(self._lines) >= 100:
            raise ValueError("that is too much")
        self._lines[path] = new
        return _edited(path, len(new))

    def _may_be_made(self, path: str) -> bool:
        """Whether a file of this name can lie beside the others, what runs them, and the tests."""
        taken = [*self._lines, HIDDEN.rstrip("/"), "main.py"]
        within = any(path == one or path.startswith(f"{one}/") or one.startswith(f"{path}/") for one in taken)
        return NAME.fullmatch(path) is not None and not within

    async def _run(self, program: str) -> str:
        if self._sandbox is None:
            return ""
        source = _BEGIN + program
        outcome = await self._sandbox.python(source, files=self.files)
        if outcome.limit:
            return f"{outcome.limit} limit\n"
        out, errors = (text.decode(errors="replace") for text in (outcome.stdout, outcome.stderr))
        told = printable(out + "".join(f"{line}\n" for line in errors.strip().splitlines()[-6:]))
        return (
            told
            if len(told) <= RepositoryTask.max_reply_tokens
            else "..." + told[3 - RepositoryTask.max_reply_tokens :]
        )


def opened(payload: str) -> tuple[RepositoryBundle, str]:
    """The repository and the bug of a prompt. Raises ValueError for none that is known."""
    source, _, bug = payload.partition(" ")
    try:
        bundle = read_bundle(source)
    except ConfigError as error:
        raise ValueError(str(error)) from error
    if bug not in bundle.bugs:
        raise ValueError(f"repository {bundle.name} has no bug {bug!r:.100}")
    return bundle, bug


def shown(payload: str) -> str:
    """The prompt of a bug."""
    bundle, bug = opened(payload)
    known = bundle.bugs[bug]
    test = known.fails[0].removeprefix(HIDDEN.replace("/", "."))
    told = printable("\n".join(known.shown))[:500]
    return f"{bundle.name} {bundle.version}: a test fails.\n{test}\n{told}\n{COMMANDS}\n"


async def left_by(payload: str, turns: Sequence[str | None]) -> tuple[Mapping[str, bytes], bool]:
    """The files after these turns, and whether the last one said that it is done. Raises ValueError for turns after the end."""
    game = RepositoryGame(payload, None)
    for number, said in enumerate(turns):
        if game.over:
            raise ValueError(f"the episode ended at turn {number}, but {len(turns)} turns were given")
        await game.act(said)
    return game.files, game.over


def _edited(path: str, lines: int) -> str:
    return f"{path} has {lines} lines\n"
