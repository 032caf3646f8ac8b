"""What tasks in text have in common: a ``TextTask`` says how to draw a start state and what an episode is.

Guarantees: deterministic in its arguments; the observation of a turn is never longer than ``max_reply_tokens`` (it is cut,
so that no tool floods the context); an environment used out of order raises RuntimeError; a game sees text, never ids.
See ``docs/tasks.md``.
"""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from orchestrator.api import Observation, Prompt, StepResult, TrajectoryError
from orchestrator.tasks import splits
from orchestrator.tasks.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class Reply:
    """What a game answers to a turn. ``invalid``: the turn was not understood, and wasted."""

    text: str = ""
    reward: float = 0.0
    done: bool = False
    invalid: bool = False


class Game(Protocol):
    """One episode in text."""

    def start(self) -> str:
        """What the policy sees first."""

    async def act(self, said: str | None) -> Reply:
        """One turn; None: it was not well-formed."""


class TextTask(ABC):
    """Base of tasks in text; implements ``Task``. A subclass sets the attributes and defines ``draw`` and ``play``.

    ``heldout`` is how many held-out prompts there are. Raises ValueError when the task has not so many.
    """

    name: ClassVar[str]
    version: str = "1"
    reward: ClassVar[str]  # module:function that scores a trajectory
    reward_seconds: ClassVar[float] = 1.0  # that scoring may take on a busy machine: reward.timeout must allow it
    reward_by_case: ClassVar[bool] = False  # its function takes a limit for each test case, and says what they took
    needs_sandbox: ClassVar[bool] = False  # checked before a run starts
    words: ClassVar[Vocabulary]
    max_turns: int
    max_response_tokens: int
    max_prompt_tokens: int
    max_reply_tokens: int

    def __init__(self, heldout: int = 300) -> None:
        if heldout < 1:
            raise ValueError(f"{heldout} held-out prompts: at least 1")
        self._heldout = splits.heldout(self.name, self.draw, self.identity, heldout)
        self.vocabulary: Sequence[str] = self.words.words
        self.pad_id, self.end_id = self.words.pad_id, self.words.end_id
        self.max_context_tokens = self.max_prompt_tokens + self.max_turns * (
            self.max_response_tokens + self.max_reply_tokens
        )

    @abstractmethod
    def draw(self, chance: random.Random) -> str:
        """The payload of a start state."""

    def identity(self, payload: str) -> str:
        """What of a payload says whether two start states are the same; it decides the split."""
        return payload

    @abstractmethod
    def play(self, payload: str) -> Game:
        """An episode of it."""

    def expert(self, payload: str) -> list[tuple[str, str]]:
        """An episode that succeeds, as (what is seen, what is answered); for the supervised warm-up and for examples in a prompt.
        Optional."""
        raise NotImplementedError(f"task {self.name} has no expert")

    def novice(self, answer: str, chance: random.Random) -> str:
        """An answer of the same form that knows nothing; for the supervised warm-up, where ``skill`` is below 1. Optional."""
        raise NotImplementedError(f"task {self.name} has no novice")

    def prompts(self, split: str, seed: int) -> Iterator[Prompt]:
        """See the protocol. Raises ValueError for another split than ``"train"`` and ``"heldout"``."""
        if split == "train":
            return splits.training(self.name, self.draw, self.identity, f"train/{seed}")
        if split == "heldout":
            return iter(self._heldout)
        raise ValueError(f"split = {split!r}: must be 'train' or 'heldout'")

    async def prepare(self, setup: str) -> None:
        """Before the first episode of an environment whose template says so. Raises TrajectoryError ``environment_template``."""
        raise TrajectoryError("environment_template", f"task {self.name} has nothing to prepare {setup!r:.100} from")

    def environment(self) -> TextEnvironment:
        """A fresh environment instance."""
        return TextEnvironment(self)

    def demonstrations(self, n: int, seed: int, skill: float) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """``n`` episodes as (token ids, loss mask). Each answer is the expert's with chance ``skill``, else a novice's, after
        which the episode ends: what would be seen next is not known. Training prompts only, drawn apart from ``prompts``."""
        if not 0 <= skill <= 1:
            raise ValueError(f"skill = {skill}: must lie between 0 and 1")
        chance = random.Random(f"{self.name} demonstrations {seed}")
        prompts = splits.training(self.name, self.draw, self.identity, f"demonstrations/{seed}")
        return (self._demonstration(next(prompts).payload, skill, chance) for _ in range(n))

    def _demonstration(
        self, payload: str, skill: float, chance: random.Random
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        tokens: list[int] = []
        mask: list[int] = []
        for seen, answer in self.expert(payload):
            knows = chance.random() < skill
            shown = self.words.encode(seen)
            acted = self.words.turn(answer if knows else self.novice(answer, chance))
            tokens += [*shown, *acted]
            mask += [0] * len(shown) + [1] * len(acted)
            if not knows:
                break
        return tuple(tokens), tuple(mask)


class TextEnvironment:
    """One game behind token ids; implements ``Environment``."""

    def __init__(self, task: TextTask) -> None:
        self.version: str = f"{task.name} {task.version}"
        self._task = task
        self._game: Game | None = None
        self._turns = 0

    async def prepare(self, setup: str) -> None:
        """As the task's."""
        await self._task.prepare(setup)

    async def reset(self, prompt: Prompt) -> Observation:
        """Start on the prompt's payload. Raises ValueError if it is not one of this task."""
        self._game, self._turns = self._task.play(prompt.payload), 0
        return Observation(self._task.words.encode(self._game.start())[: self._task.max_prompt_tokens])

    async def step(self, action_ids: tuple[int, ...]) -> StepResult:
        """Play one turn; the observation is empty when the episode has ended. One whose last turn was cut off is truncated."""
        if self._game is None:
            raise RuntimeError("no episode is running: call reset first")
        self._turns += 1
        reply = _reply_of(await self._game.act(self._task.words.said(action_ids)))
        cut = not action_ids or action_ids[-1] != self._task.words.end_id
        truncated = cut if reply.done else self._turns >= self._task.max_turns
        seen = self._task.words.encode(reply.text)[: self._task.max_reply_tokens]
        if reply.done or truncated:
            self._game, seen = None, ()
        return StepResult(Observation(seen), reply.reward, reply.done, truncated, reply.invalid)

    async def close(self) -> None:
        """Idempotent."""
        self._game = None


def _reply_of(answer: object) -> Reply:
    if not isinstance(answer, Reply):
        raise TypeError(f"act returned {type(answer).__name__}, not a Reply")
    return answer


async def replay(task: TextTask, payload: str, actions: Sequence[Sequence[int]]) -> float:
    """The sum of the rewards when these turns are played from this start state. Raises ValueError for turns that go on
    after the end, or that are more than there may be."""
    if len(actions) > task.max_turns:
        raise ValueError(f"{len(actions)} turns: an episode of {task.name} has at most {task.max_turns}")
    game, total, done = task.play(payload), 0.0, False
    game.start()
    for count, turn in enumerate(actions, start=1):
        if done:
            raise ValueError(f"the episode ended at turn {count - 1}, but {len(actions)} turns were given")
        reply = _reply_of(await game.act(task.words.said(turn)))
        total, done = total + reply.reward, reply.done
    return total


def replay_now(task: TextTask, payload: str, actions: Sequence[Sequence[int]]) -> float:
    """:func:`replay` for reward functions, which are no coroutines."""
    return asyncio.run(replay(task, payload, actions))
