"""A task in text for a pretrained model: its tokenizer and its chat template around any ``TextTask``.

    [task]
    name = "reasoning_gym"
    dataset = "chain_sum"
    [task.chat]
    tokenizer = "/models/SmolLM2-135M-Instruct"
    answer = "-?\\d+" # of what it says, the last match is its answer

Guarantees: the policy sees and says ids of its own vocabulary, and what it said is never tokenized again. The task inside
sees the same text in its own closed vocabulary, so its environments, rewards and held-out prompts are what they are without
a tokenizer: a turn that the policy did not end, or one with a word that the task does not know, says nothing there. White
space around a turn does not count; with ``answer`` nothing but its last match does. A message that is longer than the task
and the template allow is an error, never cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from types import SimpleNamespace
from typing import Any

from orchestrator.agents.chat_template import ChatFormat, Message, TemplateRefused
from orchestrator.api import ConfigError, Environment, Observation, Prompt, StepResult, Task
from orchestrator.tasks import splits
from orchestrator.tasks.text import TextTask
from orchestrator.tasks.vocabulary import CHARACTERS, printable

_FIELD = "task.chat.tokenizer"
_OF_THE_TASK = (
    "reward",
    "reward_seconds",
    "reward_by_case",
    "needs_sandbox",
    "use_tools",
    "on_timeout",
    "environment_template",
)

_LOOKED_AT = 1 << 13  # characters at the end of a turn: a search for all matches may take time with their square


class ChatTask:
    """``task`` in the words of ``chat``. ``system``: instructions that every episode begins with, empty for none;
    ``response_tokens``: of a turn, None for as many as the task has ids for (of characters: always enough, and slow);
    ``examples``: episodes of the task's own expert that stand before each prompt, drawn from the training split; ``answer``: a
    regular expression (RE2's) whose last match in a turn is all that the task hears of it, empty for the whole turn.
    Raises ConfigError for a task that is not in text, and for a template that does not take its messages."""

    def __init__(
        self,
        task: Task,
        chat: ChatFormat,
        system: str = "",
        response_tokens: int | None = None,
        examples: int = 0,
        answer: str = "",
    ) -> None:
        if not isinstance(task, TextTask):
            fix = f"is for text tasks; {task.name} has no text for a tokenizer: leave task.chat out"
            raise ConfigError(_FIELD, "", fix)
        try:
            if answer:
                last_match(answer, "")
        except ImportError as error:
            raise ConfigError("task.chat.answer", answer, "needs pyarrow, for its RE2: install it") from error
        except ValueError as error:
            fix = f"is not a regular expression that RE2 accepts (no look-around, no back-references): {error}"
            raise ConfigError("task.chat.answer", answer, fix) from error
        self._task, self.chat, self._answer = task, chat, answer
        self.name = task.name
        self.vocabulary: Sequence[str] = chat.vocabulary
        self.pad_id, self.end_id, self.stop_ids = chat.pad_id, chat.end_id, chat.stop_ids
        self.words = SimpleNamespace(decode=chat.text)  # what transcripts are written with
        try:
            self.first = ((Message("system", system),) if system else ()) + _shown(task, examples)
        except Exception as error:  # a class of the user's may raise anything
            why = f"an example cannot be made: {type(error).__name__}: {error}"
            raise ConfigError(
                "task.chat.examples", examples, f"{why}; mend the task's expert, or set this to 0"
            ) from error
        words = [word for word in task.vocabulary[2:] if not word.startswith("<unused")]
        widest = max(len(chat.encode(f"{task.words.joiner}{word}")) for word in words)
        empty = Message("user", "")
        try:
            opening = len(chat.encode_conversation((*self.first, empty), ""))
        except TemplateRefused as error:
            raise ConfigError(_FIELD, "", str(error)) from error
        between = chat.encode_continuation((*self.first, empty), [empty], "", ())
        if between is None and task.max_turns > 1:
            fix = (
                f"its chat template allows no message after an answer, but task {task.name} has {task.max_turns} turns"
            )
            raise ConfigError(_FIELD, "", fix)
        self.max_turns = task.max_turns
        self.max_response_tokens = response_tokens or task.max_response_tokens * widest
        self.max_prompt_tokens = opening + task.max_prompt_tokens * widest
        self.max_reply_tokens = len(between or ()) + task.max_reply_tokens * widest
        later = (task.max_turns - 1) * (self.max_reply_tokens + self.max_response_tokens)
        self.max_context_tokens = self.max_prompt_tokens + self.max_response_tokens + later

    def __getattr__(self, name: str) -> Any:
        """What a task may have beside the port is the inner one's, but for what speaks in ids."""
        if name in _OF_THE_TASK:
            return getattr(self._task, name)
        raise AttributeError(f"{type(self).__name__} has no {name}")

    def prompts(self, split: str, seed: int) -> Iterator[Prompt]:
        return self._task.prompts(split, seed)

    def environment(self) -> Environment:
        return ChatEnvironment(self, self._task)

    def played(self, task: str, actions: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """An episode's actions in the ids of the task: what its reward function is sent."""
        return [self.inner_action(action) for action in actions]

    def inner_action(self, action: Sequence[int]) -> tuple[int, ...]:
        """One action in the ids of the task, ended where the policy ended it."""
        words = self._task.words
        text = self.chat.text(action).strip()
        try:
            if self._answer:
                text = last_match(self._answer, text)
            said = words.encode(printable(text) if words is CHARACTERS else text)
        except ValueError:  # a word that the task does not know
            said = (words.pad_id,)
        return (*said, words.end_id) if action and action[-1] in self.chat.stop_ids else (*said, words.pad_id)

    def demonstrations(self, n: int, seed: int, skill: float) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Those of the task, in the template."""
        return (self._retold(tokens, mask) for tokens, mask in self._task.demonstrations(n, seed, skill))

    def _retold(self, tokens: Sequence[int], mask: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        told: list[int] = []
        acted: list[int] = []
        messages = list(self.first)
        answer: tuple[int, ...] = ()
        at = 0
        while at < len(tokens):
            turn = mask.index(1, at)
            end = mask.index(0, turn) if 0 in mask[turn:] else len(mask)
            new = Message("user", self._task.words.decode(tokens[at:turn]).strip())
            shown = (
                self.follow(messages, new, answer) if answer else self.chat.encode_conversation((*messages, new), "")
            )
            said = self._task.words.decode(tokens[turn : end - 1])
            answer = (*self.chat.encode(said), self.end_id)
            messages += [new, Message("assistant", said)]
            told += [*shown, *answer]
            acted += [0] * len(shown) + [1] * len(answer)
            at = end
        return tuple(told), tuple(acted)

    def follow(self, messages: Sequence[Message], new: Message, answer: Sequence[int]) -> tuple[int, ...]:
        """The ids behind an answer: what closes it, and the next message. ``messages``: up to and with that answer. Raises
        ValueError for a template that cannot say."""
        ids = self.chat.encode_continuation(messages[:-1], [new], "", answer)
        if ids is None:
            raise ValueError("the chat template does not allow a message after an answer")
        return ids


def last_match(pattern: str, text: str) -> str:
    """What the last match of ``pattern`` (RE2's syntax; a dot is any character) in the text is, "" for none; of a long text its
    end is searched. By RE2, whose time grows with the text whatever the pattern, where Python's may double with each character.
    Raises ValueError for another syntax."""
    import pyarrow
    from pyarrow import compute

    end = text[-_LOOKED_AT:].translate({2: None, 3: None})
    marked = compute.replace_substring_regex(pyarrow.scalar(end), pattern=f"(?s){pattern}", replacement="\2\\0\3")
    _, mark, found = str(marked.as_py()).rpartition("\2")
    return found.partition("\3")[0] if mark else ""


class ChatEnvironment:
    """One episode behind the template; implements ``Environment``."""

    def __init__(self, task: ChatTask, inner: TextTask) -> None:
        self._task, self._words = task, inner.words
        self._inner = inner.environment()
        self._messages: list[Message] = []
        self.version = f"{self._inner.version}+chat"

    async def prepare(self, setup: str) -> None:
        """As the inner environment's."""
        await self._inner.prepare(setup)

    async def reset(self, prompt: Prompt) -> Observation:
        """See the protocol. Raises ValueError for a prompt that is longer than the task's limits allow."""
        seen = (await self._inner.reset(prompt)).token_ids
        self._messages = [*self._task.first, Message("user", self._words.decode(seen).strip())]
        ids = self._task.chat.encode_conversation(self._messages, "")
        return Observation(_within(ids, self._task.max_prompt_tokens))

    async def step(self, action_ids: tuple[int, ...]) -> StepResult:
        task = self._task
        result = await self._inner.step(task.inner_action(action_ids))
        if result.done or result.truncated:
            return result
        reply = Message("user", self._words.decode(result.observation.token_ids).strip())
        self._messages.append(Message("assistant", task.chat.text(action_ids)))
        ids = task.follow(self._messages, reply, action_ids)
        self._messages.append(reply)
        seen = Observation(_within(ids, task.max_reply_tokens))
        return StepResult(seen, result.reward, result.done, result.truncated, result.invalid_action)

    async def close(self) -> None:
        """Idempotent."""
        await self._inner.close()


def _shown(task: TextTask, episodes: int) -> tuple[Message, ...]:
    prompts = splits.training(task.name, task.draw, task.identity, "examples")
    turns = [turn for prompt in islice(prompts, episodes) for turn in task.expert(prompt.payload)]
    return tuple(
        message for seen, answer in turns for message in (Message("user", seen.strip()), Message("assistant", answer))
    )


def _within(ids: tuple[int, ...], most: int) -> tuple[int, ...]:
    if len(ids) > most:
        raise ValueError(f"a message of {len(ids)} tokens is over the {most} that the task and the template allow")
    return ids
