"""External memory as a tool (study notes 5.2): a task whose policy can note tokens and look them up later.

Around any task. Three words are added to its vocabulary: an action that begins with ``<note>`` keeps the tokens after it, one
that begins with ``<recall>`` is answered with the notes that share most tokens with its own, or are nearest to it by an embedding
(:mod:`orchestrator.tasks.note_ranks`); neither reaches the environment.
``task.memory.turns`` in the config puts it around the task of a run. What a reward function is sent are the actions that
reached the environment (:meth:`MemoryTask.played`), so those that replay them need not know of it.

Guarantees: notes outlive the context (they are what a policy needs when its context begins anew) and end with the episode;
an answer is never longer than ``longest`` tokens, and the same actions get the same answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from orchestrator.api import Environment, Observation, Prompt, StepResult, Task, TrajectoryError, parts_of
from orchestrator.tasks.mixture import MixturePart
from orchestrator.tasks.note_ranks import Embed, NearestVectors, NoteRank, by_shared_words

WORDS = ("<note>", "<recall>", "<memory>")
_MULTIPLE = 32  # sizes of vocabularies divide evenly over tensor-parallel ranks
_OF_THE_TASK = (
    "reward",
    "reward_seconds",
    "reward_by_case",
    "needs_sandbox",
    "demonstrations",
    "use_tools",
    "on_timeout",
    "environment_template",
)


class MemoryTask:
    """``task`` with a memory. ``turns``: how many more turns an episode has for it; ``longest``: of an answer, tokens; ``embed``:
    of notes, None: they are found by shared words."""

    def __init__(
        self, task: Task, *, turns: int = 8, longest: int = 64, notes: int = 64, embed: Embed | None = None
    ) -> None:
        self._task = task
        self._embed = embed
        self.name = task.name
        spare = -(len(task.vocabulary) + len(WORDS)) % _MULTIPLE
        self.vocabulary: Sequence[str] = (*task.vocabulary, *WORDS, *(f"<spare{n}>" for n in range(spare)))
        self.pad_id, self.end_id = task.pad_id, task.end_id
        self.max_turns = task.max_turns + turns
        self.max_response_tokens = task.max_response_tokens
        self.max_context_tokens = task.max_context_tokens
        self.note_id, self.recall_id, self.memory_id = (len(task.vocabulary) + n for n in range(len(WORDS)))
        self.turns, self.longest, self.notes = turns, longest, notes
        self.parts = {
            name: MixturePart(
                name,
                self.vocabulary,
                part.max_turns + turns,
                part.max_response_tokens,
                part.max_context_tokens,
                getattr(part, "on_timeout", "failed"),
            )
            for name, part in parts_of(task).items()
        }

    def __getattr__(self, name: str) -> Any:
        """What a task may have beside the port is the inner one's, but for what makes environments in other processes."""
        if name in _OF_THE_TASK:
            return getattr(self._task, name)
        raise AttributeError(f"{type(self).__name__} has no {name}")

    def played(self, task: str, actions: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Those of an episode's actions that reached the inner environment, as it saw them."""
        reached = [self.inner_action(action) for action in actions if not self.is_memory(action)]
        inner = getattr(self._task, "played", None)
        return reached if inner is None else list(inner(task, reached))

    def is_memory(self, action: Sequence[int]) -> bool:
        """Whether an action is for the memory."""
        return bool(action) and action[0] in (self.note_id, self.recall_id)

    def inner_action(self, action: tuple[int, ...]) -> tuple[int, ...]:
        """An action without the words that the inner task has not; never empty."""
        return tuple(token for token in action if token < self.note_id) or (self.end_id,)

    def prompts(self, split: str, seed: int) -> Iterator[Prompt]:
        return self._task.prompts(split, seed)

    def environment(self) -> MemoryEnvironment:
        rank = by_shared_words if self._embed is None else NearestVectors(self._embed)
        return MemoryEnvironment(self, self._task.environment(), rank)


class MemoryEnvironment:
    """One episode: memory actions are answered here, all others by ``inner``."""

    def __init__(self, task: MemoryTask, inner: Environment, rank: NoteRank = by_shared_words) -> None:
        self._task = task
        self._rank = rank
        self._inner = inner
        self._notes: list[tuple[int, ...]] = []
        self._used = 0
        self.version = f"{inner.version}+memory"

    async def prepare(self, setup: str) -> None:
        """As the inner environment's."""
        await self._inner.prepare(setup)  # type: ignore[attr-defined]  # its template asked for it

    async def reset(self, prompt: Prompt) -> Observation:
        self._notes, self._used = [], 0
        return await self._inner.reset(prompt)

    async def step(self, action_ids: tuple[int, ...]) -> StepResult:
        task = self._task
        if not task.is_memory(action_ids):
            return await self._inner.step(task.inner_action(action_ids))
        self._used += 1
        if self._used > task.turns:
            raise TrajectoryError("memory_turns", f"more than {task.turns} memory actions in an episode")
        words = tuple(token for token in action_ids[1:] if token != task.end_id and token < task.note_id)
        answer: tuple[int, ...] = ()
        if action_ids[0] == task.note_id:
            self._notes = [*self._notes, words][-task.notes :]
        else:
            answer = self._recall(words)
        return StepResult(Observation((task.memory_id, *answer)), 0.0, False)

    def _recall(self, words: Sequence[int]) -> tuple[int, ...]:
        """The notes that answer best, newest first among equals; all of them, for no words."""
        found = [self._notes[place] for place in self._rank(self._notes, words)]
        return tuple(token for note in found for token in note)[: self._task.longest - 1]

    async def close(self) -> None:
        await self._inner.close()
