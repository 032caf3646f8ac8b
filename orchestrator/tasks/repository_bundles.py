"""Repositories that the task ``repository`` is played on, each in one JSON file: sources, hidden tests, and known bugs.

    {"name": "pytimeparse", "version": "1.1.8", "license": "MIT", "archive": "...", "sha256": "...",
     "files": {"pytimeparse/timeparse.py": ["line", ...]}, "tests": {"tests/x.py": [...]}, "modules": ["hidden.tests.x"],
     "passing": ["hidden.tests.x.Case.test_a", ...],
     "bugs": [{"name": "planted-1", "path": "...", "at": 35, "right": [...], "broken": [...], "fails": [...], "shown": [...]}]}

A *bug* is a block of lines, at a line counted from 1, that is ``broken`` in place of ``right``: planted (one token changed), or
historical (what an earlier release had there). Files are made by ``scripts/repository_bundles.py`` from source distributions,
whose name and digest they hold; the licence is among the files.

Guarantees: a bundle is checked when it is read, and what is wrong with it is one ConfigError; a checkout costs a copy of a list.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.api import ConfigError, jsontext
from orchestrator.sandbox.run import check_name

HIDDEN = "hidden/"  # the folder that tests are put into where they are run
BUNDLED = Path(__file__).parent / "repositories"
MOST_BYTES = 4 << 20
_FIELD = "task.repositories"


@dataclass(frozen=True, slots=True)
class KnownBug:
    """``fails``: the hidden tests that fail with it; ``shown``: what the agent is told of the first of them, in lines."""

    name: str
    path: str
    at: int
    right: tuple[str, ...]
    broken: tuple[str, ...]
    fails: tuple[str, ...]
    shown: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RepositoryBundle:
    """One repository. ``files`` and ``tests`` by path, in lines; ``passing``: the tests that pass where there is no bug."""

    name: str
    version: str
    license: str
    files: Mapping[str, tuple[str, ...]]
    tests: Mapping[str, tuple[str, ...]]
    modules: tuple[str, ...]
    passing: tuple[str, ...]
    bugs: Mapping[str, KnownBug]

    def checkout(self, bug: str = "") -> dict[str, list[str]]:
        """The files with this bug; without one, as they should be. Raises ValueError for one that is not known."""
        tree = {path: list(lines) for path, lines in self.files.items()}
        if bug:
            if bug not in self.bugs:
                raise ValueError(f"repository {self.name} has no bug {bug!r:.100}")
            known = self.bugs[bug]
            tree[known.path][known.at - 1 : known.at - 1 + len(known.right)] = known.broken
        return tree

    def hidden_files(self) -> dict[str, bytes]:
        """The tests, where they are run."""
        placed = {HIDDEN + path: encoded(lines) for path, lines in self.tests.items()}
        folders = {f"{parent}/__init__.py" for path in placed for parent in Path(path).parents if str(parent) != "."}
        return {**dict.fromkeys(sorted(folders), b""), **placed}


def encoded(lines: Sequence[str]) -> bytes:
    """A file's bytes."""
    return "".join(f"{line}\n" for line in lines).encode()


def bundled_names() -> tuple[str, ...]:
    """Of those that come with this package."""
    return tuple(sorted(path.stem for path in BUNDLED.glob("*.json")))


@functools.lru_cache(maxsize=64)
def read_bundle(source: str) -> RepositoryBundle:
    """``source``: one of :func:`bundled_names`, or the path of a file. Raises ConfigError."""
    path = BUNDLED / f"{source}.json" if source in bundled_names() else Path(source)
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ConfigError(_FIELD, source, f"is over {MOST_BYTES >> 20} MiB: leave out files that no test needs")
        found = jsontext.parse_object(path.read_bytes())
        return _checked(found)
    except OSError as error:
        names = ", ".join(bundled_names())
        raise ConfigError(
            _FIELD, source, f"cannot be read ({error}); there are {names}, or give a file's path"
        ) from error
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise ConfigError(_FIELD, source, f"is not a repository bundle: {error!r:.200}; create it again") from error


def digest_of(data: bytes) -> str:
    """SHA-256 (hex), as package indexes give it."""
    return hashlib.sha256(data).hexdigest()


def _checked(found: Mapping[str, Any]) -> RepositoryBundle:
    files, tests = _files(found["files"]), _files(found["tests"])
    bugs = {bug.name: bug for bug in (_bug(each) for each in found["bugs"])}
    bundle = RepositoryBundle(
        str(found["name"]),
        str(found["version"]),
        str(found["license"]),
        files,
        tests,
        _texts(found["modules"]),
        _texts(found["passing"]),
        bugs,
    )
    for bug in bugs.values():
        place = slice(bug.at - 1, bug.at - 1 + len(bug.right))
        if bug.at < 1 or files[bug.path][place] != bug.right or bug.right == bug.broken:
            raise ValueError(f"bug {bug.name} does not fit {bug.path}")
        if not bug.fails or not set(bug.fails) <= set(bundle.passing):
            raise ValueError(f"bug {bug.name} fails no test that passes without it")
    if not bugs or not bundle.modules:
        raise ValueError("it has no bug, or no tests")
    return bundle


def _bug(found: Mapping[str, Any]) -> KnownBug:
    texts = (_texts(found[name]) for name in ("right", "broken", "fails", "shown"))
    return KnownBug(str(found["name"]), str(found["path"]), int(found["at"]), *texts)


def _files(found: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    for path in found:
        check_name(path)
    return {path: _texts(lines) for path, lines in found.items()}


def _texts(found: Any) -> tuple[str, ...]:
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise TypeError(f"a list of texts is {found!r:.40}")
    encoded(found)  # half a character of UTF-16 is no text, and its error is ours to say
    return tuple(found)
