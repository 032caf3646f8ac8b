"""A data set of the user's, one question and one answer at a time, in a model's own tokens.

    [task]
    name = "dataset"
    [task.data]
    file = "rows.jsonl"
    prompt = "question"
    answer = "answer"
    reward = "grader:right" # def right(said, answer, row): ... -> float
    tokenizer = "/models/Qwen3-0.6B"

Guarantees: all rows are read and checked before anything starts; the first that are wrong are named with file and line, and
none is cut or left out without a word. What is wrong with tokenizer, reward functions and files is said in one error. Training
goes through all of its rows in an order that the seed decides, and only then through all of them again. The SHA-256 of
the prompt decides whether a row is trained on or held out, so that the same question is never both; with ``heldout``, that file
is held out, and its questions are not trained on where they stand in the other, too.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from orchestrator.agents.chat_template import ChatFormat, Message, ModelChat, TemplateRefused, VocabularyChat
from orchestrator.api import ConfigError, Environment, Observation, Prompt, StepResult
from orchestrator.config.data_keys import DataSection
from orchestrator.settings.user_functions import load_named
from orchestrator.tasks import splits
from orchestrator.tasks.data_files import BadRow, DataRow, read_rows

MOST_ROWS = 1_000_000
MOST_BYTES = 1 << 30  # of all rows, which stay in memory
_TOLD = 5  # of rows that are wrong
REWARD = "orchestrator.tasks.dataset_rewards:score_row"


class DatasetTask:
    """Implements ``Task``. Raises ConfigError."""

    name = "dataset"
    version = "dataset 1"
    max_turns = 1

    def __init__(self, heldout: int = 300, settings: DataSection | None = None) -> None:
        settings = settings or DataSection()
        self._settings = settings
        wrong: list[ConfigError] = []
        self.chat: ChatFormat = VocabularyChat()
        with _gathered(wrong):
            if settings.tokenizer:
                self.chat = ModelChat(settings.tokenizer, "task.data.tokenizer")
        self._measured = not wrong  # without its tokenizer nobody knows how long a prompt is
        self.vocabulary: Sequence[str] = self.chat.vocabulary
        self.pad_id, self.end_id, self.stop_ids = self.chat.pad_id, self.chat.end_id, self.chat.stop_ids
        self.words = SimpleNamespace(decode=self.chat.text)  # what transcripts are written with
        self.max_response_tokens = settings.response_tokens
        self.max_context_tokens = settings.prompt_tokens + settings.response_tokens
        self.reward = REWARD if settings.rewards else ""
        for target in settings.rewards:
            with _gathered(wrong):
                scorer(target)
        self._left_out, rows, apart = 0, list[Prompt](), list[Prompt]()
        with _gathered(wrong):
            rows = self._read("task.data.file", settings.file)
        with _gathered(wrong):
            apart = self._read("task.data.heldout", settings.heldout) if settings.heldout else []
        if wrong:
            raise ConfigError.of_all(wrong)
        if settings.heldout:
            known = {prompt.key: prompt for prompt in reversed(apart)}
            training = [prompt for prompt in rows if prompt.key not in known]
        else:
            known = {prompt.key: prompt for prompt in reversed(rows) if splits.is_heldout(prompt.key)}
            training = [prompt for prompt in rows if not splits.is_heldout(prompt.key)]
        self._training, self._heldout = training, tuple(known[key] for key in sorted(known))[:heldout]
        if not training:
            raise ConfigError("task.data.file", settings.file, "has no rows to train on: all are held out, or too long")
        self.epoch_prompts = len(training)  # of ``prompts``; rollout.rounds asks for it
        if len(self._heldout) < heldout:
            fix = f"there are {len(self._heldout)} different held-out prompts in {settings.heldout or settings.file}"
            raise ConfigError("task.heldout_maps", heldout, f"{fix}: hold out no more than that, or give more rows")

    def about(self) -> str:
        """How many rows there are, in words."""
        long = f", {self._left_out:,} left out as too long" if self._left_out else ""
        return f"task.data: {len(self._training):,} rows to train on, {len(self._heldout):,} held out{long}"

    def prompts(self, split: str, seed: int) -> Iterator[Prompt]:
        """See the protocol. Raises ValueError for another split than ``"train"`` and ``"heldout"``."""
        if split == "train":
            return splits.in_turn(self.name, self._training, seed)
        if split == "heldout":
            return iter(self._heldout)
        raise ValueError(f"split = {split!r}: must be 'train' or 'heldout'")

    def environment(self) -> Environment:
        """A fresh environment instance."""
        return DatasetEnvironment(self)

    def said(self, action: Sequence[int]) -> str | None:
        """The text of an answer, as its reward functions read it; None: it was not ended in the tokens that it had."""
        return self.chat.text(action) if action and action[-1] in self.chat.stop_ids else None

    def encode(self, payload: str) -> tuple[int, ...]:
        """The ids of a prompt, up to the opening of the answer. Raises ValueError when the payload is none of this task, and
        TemplateRefused."""
        try:
            given = json.loads(payload)
            shown = _messages(given["row"][given["prompt"]])
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a row: {payload!r:.200}") from error
        system = self._settings.system
        if system and shown[0].role != "system":
            shown = [Message("system", system), *shown]
        return self.chat.encode_conversation(shown, "")

    def _read(self, field: str, name: str) -> list[Prompt]:
        settings, rows, bad, size = self._settings, list[Prompt](), list[str](), 0
        columns = tuple(dict.fromkeys((settings.prompt, settings.answer, *settings.columns)))
        for row in read_rows(field, name, columns):
            found = row if isinstance(row, BadRow) else self._prompt(row)
            if isinstance(found, BadRow):
                bad.append(f"{found.place}: {found.why}")
                if len(bad) == _TOLD:
                    break
            elif found is not None:
                rows.append(found)
                size += len(found.payload)
                if len(rows) > MOST_ROWS or size > MOST_BYTES:
                    fix = (
                        f"is over {MOST_ROWS:,} rows or {MOST_BYTES >> 30} GiB, and is kept in memory: use a part of it"
                    )
                    raise ConfigError(field, name, fix)
        if bad:
            raise ConfigError(field, name, "\n  ".join(["has rows that cannot be used; the first:", *bad]))
        return rows

    def _prompt(self, row: DataRow) -> Prompt | BadRow | None:
        """None: it is too long, and such rows are left out."""
        settings, values = self._settings, row.values
        answer = values[settings.answer]
        if not isinstance(answer, str | int | float):
            return BadRow(row.place, f"{settings.answer} is {_kind(answer)}: must be text or a number")
        try:
            _messages(values[settings.prompt])
        except ValueError as error:
            return BadRow(row.place, f"{settings.prompt} {error}")
        given = {"row": values, "prompt": settings.prompt, "answer": settings.answer, "rewards": settings.rewards}
        payload = json.dumps(given, ensure_ascii=False, sort_keys=True)
        try:
            tokens = len(self.encode(payload)) if self._measured else 0
        except TemplateRefused as error:
            return BadRow(row.place, str(error))
        if tokens <= settings.prompt_tokens:
            asked = values[settings.prompt]
            identity = asked if isinstance(asked, str) else json.dumps(asked, ensure_ascii=False, sort_keys=True)
            return splits.prompt_of(self.name, splits.key_of(identity), payload)
        if settings.skip_long:
            self._left_out += 1
            return None
        fix = f"its prompt has {tokens} tokens: raise task.data.prompt_tokens, or set task.data.skip_long = true"
        return BadRow(row.place, fix)


class DatasetEnvironment:
    """One question; implements ``Environment``. The reward comes from the functions that the config names."""

    version = DatasetTask.version

    def __init__(self, task: DatasetTask) -> None:
        self._task, self._asked = task, False

    async def reset(self, prompt: Prompt) -> Observation:
        """The question in the model's template. Raises ValueError for a prompt that is none of this task."""
        seen = Observation(self._task.encode(prompt.payload))
        self._asked = True
        return seen

    async def step(self, action_ids: tuple[int, ...]) -> StepResult:
        """The answer, and the end; truncated where the answer did not come to its own."""
        if not self._asked:
            raise RuntimeError("no episode is running: call reset first")
        self._asked = False
        cut = self._task.said(action_ids) is None
        return StepResult(Observation(()), 0.0, True, cut, cut)

    async def close(self) -> None:
        """Idempotent."""
        self._asked = False


def scorer(target: str) -> Callable[[str, str, dict[str, Any]], float]:
    """The function of the user's. Raises ConfigError when it cannot be imported, or takes something else."""
    name, field = target.partition(":")[2], "task.data.reward"
    found: Callable[[str, str, dict[str, Any]], float] = load_named(field, target, "function")
    try:
        inspect.signature(found).bind("said", "answer", {})
    except (TypeError, ValueError) as error:
        raise ConfigError(field, target, f"write it as def {name}(said, answer, row) -> float: {error}") from error
    if inspect.iscoroutinefunction(found):
        raise ConfigError(field, target, "is a coroutine: write a plain function, which runs in its own process")
    return found


@contextmanager
def _gathered(wrong: list[ConfigError]) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        wrong.append(error)


def _messages(prompt: Any) -> list[Message]:
    """Raises ValueError."""
    if isinstance(prompt, str):
        if not prompt.strip():
            raise ValueError("is empty")
        return [Message("user", prompt)]
    if not isinstance(prompt, list) or not prompt:
        raise ValueError(f"is {_kind(prompt)}: must be text, or a list of messages")
    shown = []
    for message in prompt:
        role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        if not isinstance(role, str) or not isinstance(content, str):
            raise ValueError('holds a message that is not {"role": text, "content": text}')
        shown.append(Message(role, content))
    return shown


def _kind(value: object) -> str:
    return "null" if value is None else f"a {type(value).__name__}"
