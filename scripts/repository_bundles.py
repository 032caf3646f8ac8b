"""Makes the repositories of the task `repository` from source distributions, and finds their bugs.

    python -m scripts.repository_bundles FOLDER [--only NAME] [--write]   FOLDER: archives, as pip download leaves them
    python -m scripts.repository_bundles --play                          what three scripted agents make of each bug

An archive's SHA-256 must be the one below. Bugs are planted by changing one token of one line, or put back: a block of lines as
an earlier release had it, where that fails tests. Every test runs in the sandbox; what passes without a bug is what must pass.
Nothing is written without --write; then orchestrator/tasks/repositories/NAME.json.
"""

from __future__ import annotations

import argparse
import asyncio
import difflib
import io
import json
import random
import re
import sys
import tarfile
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.rewards.suite_judge import LIMITS, SuiteVerdict, judge_suite
from orchestrator.sandbox import Sandbox
from orchestrator.tasks.repository import RepositoryTask
from orchestrator.tasks.repository_bundles import BUNDLED, HIDDEN, bundled_names, digest_of, encoded, read_bundle
from scripts import repository_agents

MOST_PLANTED = 24  # of a repository
MOST_FAILING = 0.5  # share of the tests: a bug that fails more is no search
MOST_LINES, MOST_WIDE = 14, 1200  # of a historical block, and its characters
SWAPS = {
    "<": "<=",
    "<=": "<",
    ">": ">=",
    ">=": ">",
    "==": "!=",
    "!=": "==",
    "+": "-",
    "-": "+",
    "*": "+",
    "//": "*",
    "and": "or",
    "or": "and",
    "True": "False",
    "False": "True",
    "min": "max",
    "max": "min",
    "not": "",
    "is": "is not",
    "append": "extend",
    "break": "continue",
    "None": "0",
}


@dataclass(frozen=True)
class Source:
    """A release: its archive and digest; ``files`` and ``tests``: path in the archive -> path here; ``older``: archives of
    earlier releases (name, digest)."""

    name: str
    version: str
    license: str
    archive: str
    sha256: str
    files: Mapping[str, str]
    tests: Mapping[str, str]
    older: tuple[tuple[str, str], ...] = ()
    instead: tuple[
        tuple[str, str], ...
    ] = ()  # (line of a test, what stands there): imports that a folder of its own needs


def _same(*paths: str) -> dict[str, str]:
    return {path: path for path in paths}


_CACHES = (
    "__init__",
    "test_cache",
    "test_cached",
    "test_cachedmethod",
    "test_fifo",
    "test_func",
    "test_keys",
    "test_lfu",
)
_CACHES += ("test_lru", "test_mru", "test_rr", "test_tlru", "test_ttl")
SOURCES = (
    Source(
        "pytimeparse",
        "1.1.8",
        "MIT",
        "pytimeparse-1.1.8.tar.gz",
        "e86136477be924d7e670646a98561957e8ca7308d44841e21f5ddea757556a0a",
        _same("pytimeparse/__init__.py", "pytimeparse/timeparse.py", "LICENSE.rst"),
        {"pytimeparse/tests/testtimeparse.py": "test_timeparse.py"},
        (
            ("pytimeparse-1.1.5.tar.gz", "9addbd29ae638e610a78a3cb50371f2091938de89c1ab61fa9cde7556a18b207"),
            ("pytimeparse-1.1.6.tar.gz", "74c52ae0db8a1d9055b9159bf09023ad5fba828b87ec47c0a9aed8129159ab46"),
        ),
        (("from .. import timeparse", "from pytimeparse import timeparse"),),
    ),
    Source(
        "jsonpointer",
        "2.4",
        "BSD-3-Clause",
        "jsonpointer-2.4.tar.gz",
        "585cee82b70211fa9e6043b7bb89db6e1aa49524340dde8ad6b63206ea689d88",
        _same("jsonpointer.py", "LICENSE.txt"),
        {"tests.py": "test_jsonpointer.py"},
        (
            ("jsonpointer-2.0.tar.gz", "c192ba86648e05fdae4f08a17ec25180a9aef5008d973407b581798a83975362"),
            ("jsonpointer-2.3.tar.gz", "97cba51526c829282218feb99dab1b1e6bdf8efd1c43dc9d57be093c0d69c99a"),
        ),
    ),
    Source(
        "toposort",
        "1.10",
        "Apache-2.0",
        "toposort-1.10.tar.gz",
        "bfbb479c53d0a696ea7402601f4e693c97b0367837c8898bc6471adfca37a6bd",
        {"src/toposort.py": "toposort.py", "LICENSE.txt": "LICENSE.txt"},
        {"test/test_toposort.py": "test_toposort.py"},
        (
            ("toposort-1.5.tar.gz", "dba5ae845296e3bf37b042c640870ffebcdeb8cd4df45adaa01d8c5476c557dd"),
            ("toposort-1.7.tar.gz", "ddc2182c42912a440511bd7ff5d3e6a1cabc3accbc674a3258c8c41cbfbb2125"),
        ),
        (("unittest.main()", ""),),
    ),
    Source(
        "xmltodict",
        "0.13.0",
        "MIT",
        "xmltodict-0.13.0.tar.gz",
        "341595a488e3e01a85a9d8911d8912fd922ede5fecc4dce437eb4b6c8d037e56",
        _same("xmltodict.py", "LICENSE"),
        _same("tests/test_xmltodict.py", "tests/test_dicttoxml.py"),
        (("xmltodict-0.12.0.tar.gz", "50d8c638ed7ecb88d90561beedbf720c9b4e851a9fa6c47ebd64e99d166d8a21"),),
    ),
    Source(
        "cachetools",
        "5.3.3",
        "MIT",
        "cachetools-5.3.3.tar.gz",
        "ba29e2dfa0b8b556606f097407ed1aa62080ee108ab0dc5ec9d6a723a007d105",
        {f"src/cachetools/{name}.py": f"cachetools/{name}.py" for name in ("__init__", "func", "keys")}
        | {"LICENSE": "LICENSE"},
        {f"tests/{name}.py": f"tests/{name}.py" for name in _CACHES},
    ),
)


def read_archive(path: Path, sha256: str) -> dict[str, str]:
    """Its text files by path, without the folder that all are in."""
    data = path.read_bytes()
    if digest_of(data) != sha256:
        raise SystemExit(f"{path.name} has SHA-256 {digest_of(data)}, not {sha256 or 'one that is pinned here'}")
    found = {}
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for member in archive.getmembers():
            if member.isfile() and member.name.endswith((".py", ".txt", ".rst", "LICENSE")):
                file = archive.extractfile(member)
                assert file is not None
                found[member.name.partition("/")[2]] = file.read().decode()
    return found


def planted(lines: Sequence[str]) -> Iterator[tuple[int, str]]:
    """(line from 0, what it becomes) for each token that has another in its place."""
    text = "".join(f"{line}\n" for line in lines)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NUMBER and re.fullmatch(r"\d+", token.string):
            other = str(int(token.string) + 1)
        elif token.type in (tokenize.OP, tokenize.NAME) and token.string in SWAPS:
            other = SWAPS[token.string]
        else:
            continue
        row, (start, end) = token.start[0] - 1, (token.start[1], token.end[1])
        line = lines[row]
        if line.lstrip().startswith(("import ", "from ", "def ", "class ", "@", "__")):
            continue
        yield row, line[:start] + other + line[end:].removeprefix("" if other else " ")


def put_back(old: Sequence[str], new: Sequence[str]) -> Iterator[tuple[int, list[str], list[str]]]:
    """(line from 0, lines of ``new``, lines of ``old``) for each block in which they differ."""
    for kind, begin, end, first, last in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        right, broken = list(new[first:last]), list(old[begin:end])
        wide = sum(map(len, right)) + sum(map(len, broken))
        if kind != "equal" and max(len(right), len(broken)) <= MOST_LINES and wide <= MOST_WIDE:
            yield first, right, broken


def _compiles(lines: Sequence[str], path: str) -> bool:
    try:
        compile("\n".join(lines), path, "exec")
    except (SyntaxError, ValueError):
        return False
    return True


def telling_first(fails: Sequence[str], verdict: SuiteVerdict) -> list[str]:
    """The same tests, in front the one that says most in its one statement: the shortest assertion that failed."""

    def wordy(name: str) -> tuple[bool, int]:
        statement = verdict.failed.get(name, ("",))[0]
        return not statement.startswith("self.assert") or "doctest" in statement, len(statement)

    first = min((name for name in fails if name in verdict.failed), key=wordy)
    return [first, *(name for name in fails if name != first)]


async def bundle_of(source: Source, folder: Path, sandbox: Sandbox) -> dict[str, Any]:
    """The bundle, as it is written."""
    archive = read_archive(folder / source.archive, source.sha256)
    files = {here: archive[path].splitlines() for path, here in source.files.items()}
    changed = dict(source.instead)
    tests = {
        here: [changed.get(line, line) for line in archive[path].splitlines()] for path, here in source.tests.items()
    }
    modules = [(HIDDEN + path)[:-3].replace("/", ".") for path in tests if not path.endswith("__init__.py")]
    found: dict[str, Any] = {
        "name": source.name,
        "version": source.version,
        "license": source.license,
        "archive": source.archive,
        "sha256": source.sha256,
        "older": [list(each) for each in source.older],
        "files": files,
        "tests": tests,
        "modules": modules,
    }
    placed = {HIDDEN + path: encoded(lines) for path, lines in tests.items()}
    folders = {f"{parent}/__init__.py" for path in placed for parent in Path(path).parents if str(parent) != "."}
    placed = {**dict.fromkeys(folders, b""), **placed}

    async def judged(tree: Mapping[str, Sequence[str]]) -> SuiteVerdict:
        return await judge_suite(
            sandbox, {path: encoded(lines) for path, lines in tree.items()}, placed, modules, HIDDEN, LIMITS
        )

    whole = await judged(files)
    again = await judged(files)
    passing = sorted(set(whole.passed) & set(again.passed))
    if not passing:
        raise SystemExit(f"{source.name}: no test passes: {whole.detail} {dict(whole.failed)}")
    print(f"{source.name}: {len(passing)} tests pass, {len(whole.failed)} fail", flush=True)
    found["passing"] = passing
    found["bugs"] = []

    async def tried(name: str, path: str, at: int, right: list[str], broken: list[str]) -> bool:
        lines = [*files[path][:at], *broken, *files[path][at + len(right) :]]
        text = "".join([*right, *broken])
        if right == broken or not text.isascii() or "\t" in text or not _compiles(lines, path):
            return False
        verdict = await judged({**files, path: lines})
        fails = sorted(set(passing) - set(verdict.passed))
        if verdict.detail or not 0 < len(fails) <= MOST_FAILING * len(passing) or not set(fails) & set(verdict.failed):
            return False
        fails = telling_first(fails, verdict)
        shown = [line for line in verdict.failed[fails[0]] if line][:4]
        bug = {
            "name": name,
            "path": path,
            "at": at + 1,
            "right": right,
            "broken": broken,
            "fails": fails,
            "shown": shown,
        }
        found["bugs"].append(bug)
        print(f"  {name} {path}:{at + 1} fails {len(fails)}", flush=True)
        return True

    for archive_name, sha256 in source.older:
        older = read_archive(folder / archive_name, sha256)
        release = archive_name.removesuffix(".tar.gz").rpartition("-")[2]
        for path, here in source.files.items():
            for old in (older.get(path), older.get(path.removeprefix("src/"))):
                blocks = put_back(old.splitlines(), files[here]) if old and here.endswith(".py") else ()
                for number, (at, right, broken) in enumerate(blocks, start=1):
                    await tried(f"{release}-{number}", here, at, right, broken)
                if old:
                    break
    choices = [(path, *change) for path in files if path.endswith(".py") for change in planted(files[path])]
    random.Random(source.name).shuffle(choices)
    count, used = 0, dict[tuple[str, int], None]()
    for path, row, line in choices:
        if count < MOST_PLANTED and (path, row) not in used:
            count += await tried(f"planted-{count + 1}", path, row, [files[path][row]], [line])
            used[path, row] = None
    return found


def play_all(only: str) -> int:
    """Every bug of every bundle by scripted agents; prints what each has solved."""
    task = RepositoryTask(heldout=1)
    for source in bundled_names():
        for agent in repository_agents.AGENTS if only in ("", source) else ():
            payloads = [f"{source} {bug}" for bug in read_bundle(source).bugs]
            turns = [asyncio.run(repository_agents.turns_of(agent, payload, task)) for payload in payloads]
            scores = [repository_agents.reward_of(*each) for each in zip(payloads, turns, strict=True)]
            named = [payload.partition(" ")[2] for payload, score in zip(payloads, scores, strict=True) if score == 1.0]
            told = "" if len(named) in (0, len(scores)) else f": {', '.join(named)}"
            print(f"{source}: {agent} solves {len(named)} of {len(scores)}{told}", flush=True)
    return 0


async def _main(arguments: argparse.Namespace) -> int:
    sandbox = Sandbox(LIMITS, slots=1)
    for source in SOURCES:
        if arguments.only in ("", source.name):
            found = await bundle_of(source, arguments.folder, sandbox)
            if arguments.write:
                text = json.dumps(found, indent=0, ensure_ascii=True)
                (BUNDLED / f"{source.name}.json").write_text(text + "\n", encoding="utf-8")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path())
    parser.add_argument("--only", default="")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--play", action="store_true")
    given = parser.parse_args()
    return play_all(given.only) if given.play else asyncio.run(_main(given))


if __name__ == "__main__":
    sys.exit(main())
