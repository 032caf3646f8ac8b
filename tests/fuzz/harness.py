"""What a harness is: a parser of bytes from outside, the property that it holds, what it is given, and its corpus.

Every harness holds one property more: a parser answers within ``SECONDS`` of processor time, plus time in proportion to what it
was given, and within ``MEMORY`` (:mod:`tests.fuzz.inputs`). A corpus is ``corpora/NAME.jsonl``, one input a line, with why it is
there; found inputs join it. Nothing here needs more than Hypothesis.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis import strategies as st

from tests.fuzz.inputs import in_time, size_of

Check = Callable[[Any], None]
Drawn = Iterator[tuple[st.SearchStrategy[Any], Check]]
CORPORA = Path(__file__).with_name("corpora")
ROOT = Path(__file__).parents[2]
ROUND = 200  # inputs of one seed
COLLECTED = 40  # inputs that a corpus is begun with, at most
LARGEST = 3000  # bytes of its line


@dataclass(frozen=True)
class Harness:
    """``reads``: the files with the parsers, ``refuses``: the error that each documents, ``property``: what holds, a sentence.
    ``build`` gives what to draw and what to check, with a folder of its own; what it opened is closed at the end."""

    name: str
    reads: tuple[str, ...]
    refuses: str
    property: str
    build: Callable[[Path], AbstractContextManager[tuple[st.SearchStrategy[Any], Check]]]

    @property
    def corpus(self) -> Path:
        return CORPORA / f"{self.name}.jsonl"


HARNESSES: dict[str, Harness] = {}


def harness(*reads: str, refuses: str) -> Callable[[Callable[[Path], Drawn]], Callable[[Path], Drawn]]:
    """Enters the function, by its name; its docstring is the property."""

    def enter(build: Callable[[Path], Drawn]) -> Callable[[Path], Drawn]:
        name = build.__name__.replace("_", "-")
        assert name not in HARNESSES, name
        said = " ".join((build.__doc__ or "").split())
        HARNESSES[name] = Harness(name, reads, refuses, said, contextmanager(build))
        return build

    return enter


def merged(parts: dict[str, tuple[st.SearchStrategy[Any], Check]]) -> tuple[st.SearchStrategy[Any], Check]:
    """Several parsers as one harness: each input says whose it is."""
    drawn = st.one_of(*(st.tuples(st.just(name), inputs) for name, (inputs, _) in parts.items()))
    return drawn, lambda value: parts[value[0]][1](value[1])


@dataclass(frozen=True)
class FuzzResult:
    """``finding``: the input that failed, written for a corpus, and ``error`` what it did; empty: none."""

    inputs: int
    seconds: float
    finding: str = ""
    error: str = ""


def fuzz(one: Harness, folder: Path, seconds: float, first_seed: int) -> FuzzResult:
    """Its corpus, then drawn inputs of new seeds until the time is over, or one fails."""
    tried, last, begun = 0, None, time.monotonic()

    def attempt(value: Any) -> None:
        nonlocal tried, last
        tried, last = tried + 1, value
        with in_time(size_of(value)):
            check(value)

    phases = [Phase.generate, Phase.shrink]
    options = settings(
        max_examples=ROUND,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=phases,
        report_multiple_bugs=False,
        verbosity=Verbosity.quiet,
    )
    try:
        # Thousands of files are written, none of which need outlive the machine.
        with mock.patch.object(os, "fsync"), one.build(folder) as (strategy, check):
            begun = time.monotonic()
            for _, value in read_lines(one.corpus):
                attempt(value)
            while time.monotonic() < begun + seconds:
                seed(first_seed)(options(given(strategy)(attempt)))()
                first_seed += 1
    except BaseException as error:  # whatever it is, it is the finding
        if isinstance(error, KeyboardInterrupt):
            raise
        text = "\n".join(line[:300] for line in "".join(traceback.format_exception(error)).splitlines()[-60:])
        return FuzzResult(tried, time.monotonic() - begun, write_line("found", last), text)
    return FuzzResult(tried, time.monotonic() - begun)


# -- corpora -------------------------------------------------------------------------------------------------------------


def read_lines(corpus: Path) -> list[tuple[str, Any]]:
    """(why it is there, the input) of each line."""
    if not corpus.is_file():
        return []
    lines = corpus.read_text(encoding="utf-8").splitlines()
    return [(json.loads(line)["why"], read_input(line)) for line in lines]


def read_input(line: str) -> Any:
    """The input of a line."""
    return _read(json.loads(line)["input"])


def write_line(why: str, value: Any) -> str:
    """One line of a corpus."""
    return json.dumps({"why": why, "input": _written(value)})


def collect(one: Harness, folder: Path, most: int, first_seed: int = 0) -> list[str]:
    """Lines of a corpus: of the inputs that are drawn, those that reach a line of the parsers that none before them did."""
    kept: list[str] = []

    def reached(value: Any, new: set[Place]) -> bool:
        line = write_line("drawn", value)
        if not new or len(line) > LARGEST or len(kept) == COLLECTED or line in kept:
            return False
        kept.append(line)
        return True

    follow(one, folder, most, first_seed, reached)
    return kept


def reach(one: Harness, folder: Path, inputs: int, first_seed: int) -> list[int]:
    """Of each line of the parsers that so many drawn inputs reach, which input was the first."""
    firsts: list[int] = []
    numbers = count(1)

    def reached(_: Any, new: set[Place]) -> bool:
        firsts.extend([next(numbers)] * len(new))  # one number an input, whatever is new
        return True

    follow(one, folder, inputs, first_seed, reached)
    return firsts


Place = tuple[str, int]  # a file and a line of it


def follow(
    one: Harness, folder: Path, inputs: int, first_seed: int, reached: Callable[[Any, set[Place]], bool]
) -> None:
    """Draw inputs; ``reached`` is told each, with the lines of the parsers that it reached and none before that counts, and says
    whether it counts."""
    files = {str(ROOT / file) for file in one.reads}
    seen, now = set[Place](), set[Place]()

    def local(frame: Any, event: str, _: object) -> Any:
        if event == "line":
            now.add((frame.f_code.co_filename, frame.f_lineno))
        return local

    def trace(frame: Any, *_: object) -> Any:
        return local if frame.f_code.co_filename in files else None

    def attempt(value: Any) -> None:
        now.clear()
        threading.settrace(trace)
        sys.settrace(trace)
        try:
            check(value)
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]
        if reached(value, now - seen):
            seen.update(now)

    options = settings(
        max_examples=inputs,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    with one.build(folder) as (strategy, check):
        seed(first_seed)(options(given(strategy)(attempt)))()


_RUN = re.compile(r"(.{1,8}?)\1{15,}", re.DOTALL)


def _written(value: Any) -> Any:
    """As JSON; what repeats is written once."""
    match value:
        case bytes():
            return {"bytes": _pieces(value.decode("latin-1"))}
        case str():
            pieces = _pieces(value)
            return {"text": pieces} if any(isinstance(piece, list) for piece in pieces) else value
        case tuple():
            return {"tuple": [_written(item) for item in value]}
        case list():
            return [_written(item) for item in value]
        case dict():
            return {"dict": [[_written(key), _written(item)] for key, item in value.items()]}
        case None | bool() | int() | float():
            return value
    raise TypeError(f"a corpus cannot hold {value!r:.80}")


def _read(found: Any) -> Any:
    if isinstance(found, list):
        return [_read(item) for item in found]
    if not isinstance(found, dict):
        return found
    ((kind, held),) = found.items()
    if kind in ("bytes", "text"):
        text = "".join(piece if isinstance(piece, str) else piece[0] * piece[1] for piece in held)
        return text.encode("latin-1") if kind == "bytes" else text
    if kind == "tuple":
        return tuple(_read(item) for item in held)
    return {_read(key): _read(item) for key, item in held}


def _pieces(text: str) -> list[Any]:
    found: list[Any] = []
    at = 0
    for run in _RUN.finditer(text):
        found += [text[at : run.start()]] if run.start() > at else []
        found.append([run[1], (run.end() - run.start()) // len(run[1])])
        at = run.end()
    return found + ([text[at:]] if at < len(text) else [])
