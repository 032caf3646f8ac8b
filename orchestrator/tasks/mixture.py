"""Several tasks in one run: a vocabulary that all share, prompts drawn by share, each episode played by its own task.

    [task]
    name = "mixture"
    [task.mixture]
    nim = 2.0 # two prompts of nim for one of coding
    coding = 1.0

A class of the user's is a part, too: ``"shop:ShopTask" = 1.0``; its name among the parts is the class's own ``name``. With
``task.chat.tokenizer`` all parts speak a pretrained model's tokens, each behind a template of its own
(:class:`~orchestrator.tasks.chat_task.ChatTask`).

Guarantees: ``Prompt.task`` is the part's name, which routing, filters, context rules and the store go by; what a part sees and
says are its own token ids, as if it were alone (a word is one id of the mixture; what the policy says in a word that the part
has not is padding, and so malformed); limits of turns and tokens are the part's; the share of each part in the prompts is that
of the config, the sequence follows from the seed. Rewards are computed by the part's own function, from its own ids.
"""

from __future__ import annotations

import functools
import importlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from orchestrator.api import (
    ConfigError,
    Environment,
    EnvironmentTemplate,
    Observation,
    Prompt,
    StepResult,
    Task,
    TimeoutMeaning,
    stop_ids_of,
)

_UNUSED = "<unused"  # how vocabularies name ids that fill them up
_MULTIPLE = 32  # sizes of vocabularies divide evenly over tensor-parallel ranks


@dataclass(frozen=True, slots=True)
class MixturePart:
    """The limits of one task, in the ids of the mixture; implements ``TaskLimits``."""

    name: str
    vocabulary: Sequence[str]
    max_turns: int
    max_response_tokens: int
    max_context_tokens: int
    on_timeout: TimeoutMeaning = "failed"


class MixtureWords:
    """The ids of a part in those of the mixture, and back."""

    def __init__(self, task: Task, ids: Mapping[str, int]) -> None:
        self.out = [ids.get(word, ids["<pad>"]) for word in task.vocabulary]
        self.out[task.pad_id], self.out[task.end_id] = ids["<pad>"], ids["<end>"]
        self._in = {shared: own for own, shared in reversed(list(enumerate(self.out)))}
        self._in[ids["<pad>"]], self._in[ids["<end>"]] = task.pad_id, task.end_id
        self._pad = task.pad_id

    def to_mixture(self, own: Sequence[int]) -> tuple[int, ...]:
        """What a part says. Raises IndexError for what is outside its vocabulary."""
        return tuple(self.out[token] if token >= 0 else self.out[len(self.out)] for token in own)

    def to_part(self, shared: Sequence[int]) -> tuple[int, ...]:
        """What a part is told."""
        return tuple(self._in.get(token, self._pad) for token in shared)


class SharedWords:
    """Of parts that all speak the same tokens; in place of :class:`MixtureWords`."""

    def to_mixture(self, own: Sequence[int]) -> tuple[int, ...]:
        """What a part says, as it is."""
        return tuple(own)

    def to_part(self, shared: Sequence[int]) -> tuple[int, ...]:
        """What a part is told, as it is."""
        return tuple(shared)


class MixtureTask:
    """``shares``: name of a task, or ``module:Class``, -> how many of its prompts, in proportion; ``heldout`` prompts are spread
    evenly. ``speak``: puts a part into words that all share (None: the words of all of them are listed). ``options`` are those of
    single tasks, by name. ``scorers``: the reward functions of the user's parts, by the part's name. Raises ConfigError and
    ValueError as the tasks do."""

    name = "mixture"
    reward = "orchestrator.tasks.mixture:score"
    version = "1"

    def __init__(
        self,
        heldout: int = 300,
        shares: Mapping[str, float] | None = None,
        speak: Callable[[Task], Task] | None = None,
        **options: Mapping[str, Any],
    ) -> None:
        from orchestrator.tasks import registry  # it knows this task too

        if not shares:
            raise ValueError("mixture: names no tasks")
        each = -(-heldout // len(shares))
        self._heldout = heldout
        self._shares: dict[str, float] = {}
        self.tasks: dict[str, Task] = {}
        self.scorers: dict[str, str] = {}
        for target, share in sorted(shares.items()):
            task = registry.make(target, each, **options.get(target, {}))
            if task.name in self.tasks or (target != task.name and task.name in registry.BUILT_IN):
                raise ConfigError(
                    f"task.mixture.{target}", share, f"another part has the same name, {task.name!r}: give it another"
                )
            if ":" in target:
                self.scorers[task.name] = registry.reward_of(task)
            self._shares[task.name] = share
            self.tasks[task.name] = task if speak is None else speak(task)
        self.words_of: Mapping[str, MixtureWords | SharedWords]
        if speak is None:
            self._list_words()
        else:
            any_part = next(iter(self.tasks.values()))
            self.vocabulary: Sequence[str] = any_part.vocabulary
            self.pad_id, self.end_id = any_part.pad_id, any_part.end_id
            self.stop_ids = stop_ids_of(any_part)
            self.words_of = dict.fromkeys(self.tasks, SharedWords())
            self.words = getattr(any_part, "words", None)  # what transcripts are written with
        limits = ("max_turns", "max_response_tokens", "max_context_tokens")
        self.parts = {
            name: MixturePart(
                name,
                self.vocabulary,
                task.max_turns,
                task.max_response_tokens,
                task.max_context_tokens,
                getattr(task, "on_timeout", "failed"),
            )
            for name, task in self.tasks.items()
        }
        self.max_turns, self.max_response_tokens, self.max_context_tokens = (
            max(getattr(part, limit) for part in self.parts.values()) for limit in limits
        )
        self.needs_sandbox = any(getattr(task, "needs_sandbox", False) for task in self.tasks.values())
        self.reward_by_case = any(getattr(task, "reward_by_case", False) for task in self.tasks.values())
        self.reward_seconds = max(getattr(task, "reward_seconds", 0.0) for task in self.tasks.values())
        if any(hasattr(task, "environment_template") for task in self.tasks.values()):
            self.environment_template = self._template_of
        versions = (f"{name} {getattr(task, 'version', '1')}" for name, task in self.tasks.items())
        self.environment_version = f"mixture {self.version}: {', '.join(versions)}"

    def _list_words(self) -> None:
        """A vocabulary of the words of all parts."""
        listed = ["<pad>", "<end>"]
        known = {
            word
            for task in self.tasks.values()
            for word in (task.vocabulary[task.pad_id], task.vocabulary[task.end_id])
        }
        for task in self.tasks.values():
            fresh = [word for word in task.vocabulary if word not in known and not word.startswith(_UNUSED)]
            listed += fresh
            known.update(fresh)
        ids = {word: token for token, word in enumerate(listed)}
        self.vocabulary = (*listed, *(f"{_UNUSED}{n}>" for n in range(-len(listed) % _MULTIPLE)))
        self.pad_id, self.end_id = 0, 1
        self.words_of = {name: MixtureWords(task, ids) for name, task in self.tasks.items()}

    def prompts(self, split: str, seed: int) -> Iterator[Prompt]:
        """See the protocol. Held-out ones take turns."""
        streams = {name: task.prompts(split, seed) for name, task in self.tasks.items()}
        if split == "train":
            return self._drawn(streams, f"mixture/{seed}")
        return islice((prompt for row in zip(*streams.values(), strict=False) for prompt in row), self._heldout)

    def _template_of(self, prompt: Prompt) -> EnvironmentTemplate:
        """What the part says; where it says nothing, it is the same as for all of these."""
        said = getattr(self.tasks[prompt.task], "environment_template", None)
        if said is None:
            return EnvironmentTemplate()
        template: EnvironmentTemplate = said(prompt)
        return replace(template, setup=f"{prompt.task} {template.setup}") if template.setup else template

    def environment(self) -> MixtureEnvironment:
        """A fresh environment; which task it plays follows from the prompt."""
        return MixtureEnvironment(self)

    def demonstrations(self, n: int, seed: int, skill: float) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Of the tasks that have some, by share."""
        streams: dict[str, Iterator[Any]] = {
            name: task.demonstrations(n, seed, skill)
            for name, task in self.tasks.items()
            if hasattr(task, "demonstrations")
        }
        chance = random.Random(f"mixture demonstrations {seed}")
        names, weights = list(streams), [self._shares[name] for name in streams]
        for name in chance.choices(names, weights, k=n):
            tokens, mask = next(streams[name])
            yield self.words_of[name].to_mixture(tokens), mask

    def played(self, task: str, actions: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """An episode's actions as its task saw them."""
        own = [self.words_of[task].to_part(action) for action in actions]
        heard = getattr(self.tasks[task], "played", None)
        return own if heard is None else list(heard(task, own))

    def _drawn(self, streams: Mapping[str, Iterator[Prompt]], stream: str) -> Iterator[Prompt]:
        chance, left = random.Random(stream), dict(self._shares)
        while left:
            [name] = chance.choices(list(left), list(left.values()))
            prompt = next(streams[name], None)
            if prompt is None:
                del left[name]
            else:
                yield prompt


class MixtureEnvironment:
    """One environment of the part that the last prompt was of."""

    def __init__(self, task: MixtureTask) -> None:
        self._task = task
        self._inner: Environment | None = None
        self._words: MixtureWords | SharedWords | None = None
        self._setup = ""  # what it was prepared with: the part, a space, and what is the part's own
        self.version = task.environment_version

    async def prepare(self, setup: str) -> None:
        """What the part's own environment is told, see :meth:`MixtureTask.environment_template`."""
        self._setup = setup

    async def reset(self, prompt: Prompt) -> Observation:
        await self.close()
        self._words = self._task.words_of[prompt.task]
        self._inner = self._task.tasks[prompt.task].environment()
        part, _, setup = self._setup.partition(" ")
        if part == prompt.task:
            await self._inner.prepare(setup)  # type: ignore[attr-defined]  # a part that asked for it
        return Observation(self._words.to_mixture((await self._inner.reset(prompt)).token_ids))

    async def step(self, action_ids: tuple[int, ...]) -> StepResult:
        if self._inner is None or self._words is None:
            raise RuntimeError("no episode is running: call reset first")
        result = await self._inner.step(self._words.to_part(action_ids))
        seen = Observation(self._words.to_mixture(result.observation.token_ids))
        return StepResult(seen, result.reward, result.done, result.truncated, result.invalid_action)

    async def close(self) -> None:
        inner, self._inner = self._inner, None
        if inner is not None:
            await inner.close()


def score(payload: Mapping[str, Any]) -> Any:
    """The reward function of the payload's task: of a built-in one by its name, of the user's by ``scorer``, as the run's own
    orchestrator says it. Raises ConfigError (no such task), and what that function raises."""
    if scorer := payload.get("scorer"):
        from orchestrator.settings.user_functions import named_function

        return named_function("reward.function", str(scorer))(payload)
    return _function_of(str(payload.get("task")))(payload)


@functools.lru_cache(maxsize=64)
def _function_of(name: str) -> Any:
    from orchestrator.tasks import registry

    if name not in registry.BUILT_IN or name == MixtureTask.name:
        raise ConfigError("task", name, f"must be one of {', '.join(registry.BUILT_IN)}")
    module, _, function = str(registry.find(name).reward).partition(":")
    return getattr(importlib.import_module(module), function)
