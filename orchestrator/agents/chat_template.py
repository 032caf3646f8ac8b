"""From messages to token ids, and back: the chat template of a model, or of a closed vocabulary.

Guarantees: what the policy said is never tokenized again. :meth:`Chat.encode_continuation` gives only the ids that
stand behind an answer: what closes it, the new messages, and the opening of the next answer; the answer's own ids stay
as they were generated, also where a template would show them otherwise (reasoning of earlier turns that it drops stays
in the context).
"""

from __future__ import annotations

import asyncio
import copy
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from orchestrator.api import ConfigError
from orchestrator.tasks.vocabulary import Vocabulary, printable

_ANSWER = "rl-coserve:5e0c7c1d:answer"  # stands for an answer while a template is rendered around it


@dataclass(frozen=True, slots=True)
class Message:
    """One message in one form, so that equal ones compare equal. ``extra``: its other fields, as canonical JSON."""

    role: str
    content: str
    extra: str = ""

    def shown(self) -> dict[str, Any]:
        """As chat templates take it: arguments of tool calls as objects; "developer", which many leave out without a word, as
        "system", its older name."""
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": self.content}
        if self.extra:
            message.update(json.loads(self.extra))
        return message


class TemplateRefused(Exception):
    """The chat template does not take these messages; the text says why."""


class ChatFormat(Protocol):
    """``stop_ids``: any of them ends an answer. ``thread``: who has it leaves what opens an answer to a thread, as that may take
    long; None: it does not. ``longest``: characters of a token at most."""

    thread: asyncio.Lock | None
    longest: int
    vocabulary: Sequence[str]
    pad_id: int
    end_id: int
    stop_ids: tuple[int, ...]

    def encode_conversation(self, messages: Sequence[Message], tools: str) -> tuple[int, ...]:
        """Ids of a conversation up to the opening of the next answer. ``tools``: JSON, or empty. Raises TemplateRefused."""

    def encode_continuation(
        self, before: Sequence[Message], new: Sequence[Message], tools: str, answer: Sequence[int]
    ) -> tuple[int, ...] | None:
        """Ids that follow the ids of ``answer``, which answered ``before``. None: the template cannot say."""

    def encode_prompt(self, text: str) -> tuple[int, ...]:
        """Ids of plain text that an answer follows. Raises TemplateRefused."""

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of a short text, at once. Raises TemplateRefused for text outside of the vocabulary."""

    def text(self, token_ids: Sequence[int]) -> str:
        """What an agent reads: without the tokens that mark roles and ends."""


class VocabularyChat:
    """Printable characters and five marks: for models without a tokenizer. ``<user>hello<end><assistant>``."""

    roles = ("system", "user", "assistant", "tool")
    thread: asyncio.Lock | None = None
    longest = 1

    def __init__(self) -> None:
        self._words = Vocabulary([*(f"<{role}>" for role in self.roles), "\n", *map(chr, range(32, 127))], "")
        self.vocabulary: Sequence[str] = self._words.words
        self.pad_id, self.end_id = self._words.pad_id, self._words.end_id
        self.stop_ids: tuple[int, ...] = (self.end_id,)
        self._ids = {word: token for token, word in enumerate(self.vocabulary)}

    def encode_conversation(self, messages: Sequence[Message], tools: str) -> tuple[int, ...]:
        head = [Message("system", tools)] if tools else []
        said = [token for message in (*head, *messages) for token in self._message(message)]
        return (*said, self._ids["<assistant>"])

    def encode_continuation(
        self, before: Sequence[Message], new: Sequence[Message], tools: str, answer: Sequence[int]
    ) -> tuple[int, ...] | None:
        closing = () if answer and answer[-1] == self.end_id else (self.end_id,)
        return (*closing, *self.encode_conversation(new, ""))

    def encode_prompt(self, text: str) -> tuple[int, ...]:
        return self.encode(text)

    def encode(self, text: str) -> tuple[int, ...]:
        """See the protocol; a character that is not there becomes ``?``."""
        return self._words.encode(printable(text))

    def text(self, token_ids: Sequence[int]) -> str:
        words = (self.vocabulary[token] for token in token_ids)
        return "".join(word for word in words if len(word) == 1)

    def _message(self, message: Message) -> tuple[int, ...]:
        role = "system" if message.role == "developer" else message.role
        if role not in self.roles:
            raise TemplateRefused(f"no such role: {message.role!r}; there are: {', '.join(self.roles)}")
        return (self._ids[f"<{role}>"], *self.encode(message.content), self.end_id)


class ModelChat:
    """The tokenizer and the chat template of a Hugging Face folder. Nothing of the folder is run, nothing is downloaded. What
    opens an answer has a tokenizer of its own, which threads use one after the other: short texts wait for no long one."""

    def __init__(self, folder: str, field: str = "task.agent.tokenizer") -> None:
        """Raises ConfigError."""
        if not Path(folder).is_dir():
            raise ConfigError(field, folder, "is not a folder: give the model's, with its tokenizer")
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise ConfigError(field, folder, f"needs transformers, which comes with vLLM: {error}") from error
        try:
            found = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(field, folder, f"its tokenizer cannot be loaded: {error}") from error
        if not found.chat_template:
            raise ConfigError(field, folder, "its tokenizer has no chat template: take an instruction-tuned model")
        if found.eos_token_id is None:
            raise ConfigError(field, folder, "its tokenizer has no end-of-turn token (eos_token)")
        self.thread: asyncio.Lock | None = asyncio.Lock()
        self._tokenizer: Any = found
        self._long: Any = copy.deepcopy(found)
        self._one, self._one_long = threading.Lock(), threading.Lock()  # tokenizers refuse two borrowers
        self.vocabulary: Sequence[str] = tuple(found.convert_ids_to_tokens(range(len(found))))
        self.longest = max(map(len, filter(None, self.vocabulary)))
        self.end_id = int(found.eos_token_id)
        self.pad_id = int(found.pad_token_id if found.pad_token_id is not None else found.eos_token_id)
        self.stop_ids: tuple[int, ...] = (self.end_id, *(one for one in _ends(Path(folder)) if one != self.end_id))

    def encode_conversation(self, messages: Sequence[Message], tools: str) -> tuple[int, ...]:
        return self.encode_prompt(self._render(messages, tools))

    def encode_continuation(
        self, before: Sequence[Message], new: Sequence[Message], tools: str, answer: Sequence[int]
    ) -> tuple[int, ...] | None:
        """See the protocol. The template shows the whole conversation, so that it knows what it needs to of what came before;
        only what it puts behind the answer is used."""
        try:
            shown = self._render([*before, Message("assistant", _ANSWER), *new], tools)
        except TemplateRefused:
            return None
        _, *after = shown.split(_ANSWER)
        if len(after) != 1:
            return None
        ids = self.encode_prompt(after[0])
        ended = bool(answer) and bool(ids) and answer[-1] in self.stop_ids and answer[-1] == ids[0]
        return ids[1:] if ended else ids

    def encode_prompt(self, text: str) -> tuple[int, ...]:
        with self._one_long:
            return _encoded(self._long, text)

    def encode(self, text: str) -> tuple[int, ...]:
        with self._one:
            return _encoded(self._tokenizer, text)

    def text(self, token_ids: Sequence[int]) -> str:
        with self._one:
            return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def _render(self, messages: Sequence[Message], tools: str) -> str:
        from jinja2 import TemplateError

        given: Mapping[str, Any] = {"tools": json.loads(tools)} if tools else {}
        try:
            return str(
                self._long.apply_chat_template(
                    [message.shown() for message in messages], add_generation_prompt=True, tokenize=False, **given
                )
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise TemplateRefused(f"the chat template refuses these messages: {error}") from error


def _ends(folder: Path) -> list[int]:
    """The tokens that end what this folder's model says, beside its tokenizer's: Gemma 3 ends a turn, and GLM-4.5 begins the next
    speaker's, by others than eos_token. Nothing where the folder does not say."""
    for name in ("generation_config.json", "config.json"):
        try:
            found = json.loads((folder / name).read_text(encoding="utf-8")).get("eos_token_id")
        except (OSError, ValueError, AttributeError):
            continue
        if found is not None:
            return [one for one in (found if isinstance(found, list) else [found]) if type(one) is int]
    return []


def _encoded(tokenizer: Any, text: str) -> tuple[int, ...]:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TemplateRefused("holds half of a surrogate pair, which is no text") from error
    return tuple(tokenizer.encode(text, add_special_tokens=False))
