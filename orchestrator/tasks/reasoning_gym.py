"""The tasks of the library `reasoning-gym` (about 90 of its data sets), each under ``task.dataset``: question in, answer out.

    [task]
    name = "reasoning_gym"
    dataset = "chain_sum"
    dataset_options = { max_terms = 3, max_digits = 2 } # the data set's own; empty: the library's defaults

Guarantees: an item follows from the data set's name, its options and its index; questions decide the split, so that no
question of the held-out ones is ever trained on, even where the library draws it twice; items that do not fit
``prompt_tokens``, or are not printable ASCII, are never drawn. The reward is the library's own score, 0 to 1.

Some of the library's scorers evaluate the answer as Python. Model-written code runs in the sandbox only, so these data sets
are refused; and while any answer is scored, an audit hook ends every attempt to compile text in this process. An answer is
scored in another process, with a limit of time (:mod:`orchestrator.tasks.scoring`).
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import random
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

from orchestrator.api import ConfigError
from orchestrator.tasks.scoring import in_own_process, make_ready, score_apart
from orchestrator.tasks.text import Reply, TextTask
from orchestrator.tasks.vocabulary import CHARACTERS, printable

_HUGE = re.compile(r"[\d.][eE][+-]?[\d_]{4}")  # a number that takes seconds and gigabytes to write out
SCORER = "orchestrator.tasks.reasoning_gym_scorer:scored"
ITEMS = 1 << 30  # of a data set: each is the first of one with this seed, as some prepare all theirs when they begin
_PATIENCE = 200  # items in a row that do not fit
_EVALUATES = re.compile(r"\b(eval|exec|parse_expr|sympify)\(")


class ReasoningGymTask(TextTask):
    """One data set. Raises ConfigError when the library or the data set is not there, or its scorer runs answers as code."""

    name = "reasoning_gym"
    reward = "orchestrator.tasks.text_rewards:reasoning_gym_score"
    words = CHARACTERS
    max_turns = 1
    max_reply_tokens = 0

    def __init__(
        self,
        heldout: int = 300,
        dataset: str = "chain_sum",
        prompt_tokens: int = 256,
        response_tokens: int = 32,
        dataset_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.dataset = dataset
        options = json.dumps(dict(dataset_options), sort_keys=True) if dataset_options else ""
        self._behind = f"/{options}" if options else ""
        self.max_prompt_tokens = prompt_tokens
        self.max_response_tokens = response_tokens
        load(dataset, options)
        self.version = f"{version('reasoning-gym')} {dataset}{options}"
        super().__init__(heldout)

    def draw(self, chance: random.Random) -> str:
        """``DATASET/INDEX`` of an item that fits, and ``/OPTIONS`` as JSON where there are some. Raises ValueError when there
        seems to be none."""
        for _ in range(_PATIENCE):
            payload = f"{self.dataset}/{chance.randrange(ITEMS)}{self._behind}"
            question, answer = question_of(payload), str(item_of(payload)["answer"])
            fits = len(question) <= self.max_prompt_tokens and len(answer) < self.max_response_tokens
            if fits and printable(question + answer) == question + answer:
                return payload
        raise ValueError(
            f"{self.dataset}: none of {_PATIENCE} items fits {self.max_prompt_tokens} and {self.max_response_tokens} "
            "characters (task.prompt_tokens, task.response_tokens)"
        )

    def identity(self, payload: str) -> str:
        """The question: the library draws some twice."""
        return question_of(payload)

    def play(self, payload: str) -> Question:
        """One item."""
        return Question(payload)

    def expert(self, payload: str) -> list[tuple[str, str]]:
        """The library's own answer."""
        return [(question_of(payload), str(item_of(payload)["answer"]))]

    def novice(self, answer: str, chance: random.Random) -> str:
        """The answer's characters in any order."""
        return "".join(chance.sample(answer, len(answer)))


class Question:
    """One item. Raises ValueError when the payload is none."""

    def __init__(self, payload: str) -> None:
        self._payload = payload
        item_of(payload)

    def start(self) -> str:
        """The question."""
        if not in_own_process():
            make_ready(SCORER)
        return question_of(self._payload)

    async def act(self, said: str | None) -> Reply:
        """The answer, and the end."""
        if said is None:
            return Reply(done=True, invalid=True)
        if in_own_process():
            return Reply(reward=score(self._payload, said), done=True)
        return Reply(reward=await score_apart(SCORER, {"payload": self._payload, "answer": said}), done=True)


def question_of(payload: str) -> str:
    """What is asked, ending in a line feed."""
    return str(item_of(payload)["question"]).rstrip() + "\n"


def score(payload: str, answer: str) -> float:
    """The library's score of an answer, 0 to 1; 0 for one that its scorer cannot read, or that has a number beyond all
    that it asks for (:data:`_HUGE`). Nothing of the answer is run: raises ValueError when the scorer wanted to."""
    name, _, options = _parts(payload)
    item = item_of(payload)
    if _HUGE.search(answer) and answer.strip() != str(item["answer"]).strip():
        return 0.0
    return _score(load(name, options), item, answer)


# RuntimeError: the hook below stopped it, which is told; RecursionError is one.
_UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, SyntaxError, RuntimeError)


def _score(dataset: Any, item: Any, answer: str) -> float:
    with _nothing_compiled() as tried:
        try:
            value = float(dataset.score_answer(answer, item))
        except _UNREADABLE:  # to a scorer of the library, which did not think of such an answer
            value = 0.0
    if tried:
        raise ValueError(f"the scorer wanted to run code: {tried[0]:.80}")
    return min(max(value, 0.0), 1.0)


@functools.lru_cache(maxsize=1024)
def item_of(payload: str) -> Any:
    """The item. Raises ValueError when the payload is not ``DATASET/INDEX``, or that and ``/OPTIONS``."""
    name, index, options = _parts(payload)
    load(name, options)
    more = json.loads(options) if options else {}
    return importlib.import_module("reasoning_gym").create_dataset(name, seed=index, size=1, **more)[0]


def _parts(payload: str) -> tuple[str, int, str]:
    name, _, rest = payload.partition("/")
    index, _, options = rest.partition("/")
    if not index.isdigit() or int(index) >= ITEMS:
        raise ValueError(f"not an item: {payload!r}")
    return name, int(index), options


@functools.cache
def load(name: str, options: str = "") -> Any:
    """A data set of the library; ``options``: its own, as JSON. Raises ConfigError when it is not there, or not one to be
    scored in this process, or has no such options."""
    try:
        library = importlib.import_module("reasoning_gym")
        known = importlib.import_module("reasoning_gym.factory").DATASETS
    except ImportError as error:
        fix = f"the library cannot be imported ({error}): pip install rl-coserve[reasoning-gym]"
        raise ConfigError("task.name", "reasoning_gym", fix) from error
    if name not in known or name == "composite":
        raise ConfigError(
            "task.dataset", name, f"no such data set of reasoning-gym; there are: {', '.join(sorted(known))}"
        )
    more = json.loads(options) if options else {}
    if own := {"seed", "size"} & more.keys():
        raise ConfigError("task.dataset_options", sorted(own)[0], "is set by the run: leave it out")
    try:
        dataset = library.create_dataset(name, seed=0, size=1, **more)
    except (
        TypeError,
        AssertionError,
        ValueError,
    ) as error:  # how the library says that an option is none of its own, or bad
        raise ConfigError("task.dataset_options", more, f"{name} does not take them: {error}") from error
    fix = "its scorer runs answers as code, which is only allowed in a sandbox"
    if _EVALUATES.search(inspect.getsource(type(dataset).score_answer)):
        raise ConfigError("task.dataset", name, fix)
    item = dataset[0]
    try:
        _score(dataset, item, str(item["answer"]))
    except ValueError as error:
        raise ConfigError("task.dataset", name, fix) from error
    return dataset


class _Guard:
    """The audit hook is for ever; it acts while there is a list to write to."""

    installed = False
    tried: list[str] | None = None


@contextmanager
def _nothing_compiled() -> Iterator[list[str]]:
    """Within, turning text into code fails, in this process; the list says what was tried."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "compile" and _Guard.tried is not None and arguments[0] is not None:
            _Guard.tried.append(str(arguments[0]))
            raise RuntimeError("an answer was about to be compiled")

    if not _Guard.installed:
        sys.addaudithook(hook)
        _Guard.installed = True
    tried: list[str] = []
    _Guard.tried = tried
    try:
        yield tried
    finally:
        _Guard.tried = None
