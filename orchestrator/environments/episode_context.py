"""The context of one long episode: what the policy is shown, turn after turn, and what was left out of it.

Guarantees: :attr:`EpisodeContext.tokens` is what the next request holds, and nothing else ever is; a turn costs what is new in
it; a context that begins anew is recorded in the turn that begins it (``Turn.context``: its first tokens, why, how much was left
out), so that ``Trajectory.contexts`` gives back exactly what the policy saw; each of them is a training sample of its own
(:func:`orchestrator.train_samples.to_samples`). With strategy ``keep`` a trajectory has one context, its token ids from beginning
to end.

An engine that has no room for a context (out of memory, or longer than its model) is asked once more with a shorter one;
then the trajectory ends as ``failed: context_too_long`` or ``failed: engine_out_of_memory``: masked, counted, never a reward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

from orchestrator.api import ConfigError, ContextStart, TaskLimits, TokenSequence
from orchestrator.config.rollout_keys import ContextSection
from orchestrator.policies.episodes.context_rule import ContextRules
from orchestrator.settings.user_functions import named_function

Summarise = Callable[[Sequence[int]], Sequence[int]]
Setup = tuple[ContextRules, tuple[int, ...], Summarise | None]
"""Of a task: its rules, the question for a summary, the function that writes it instead of the policy."""
_TOO_LONG = ("model length", "max_model_len", "context length", "prompt is too long", "longer than the maximum")
_NO_MEMORY = ("out of memory", "kv cache is full", "cuda oom")


@dataclass(slots=True)
class EpisodeContext:
    """``head``: the first observation. ``pieces``: the turns shown after it (observation and action of each)."""

    rules: ContextRules
    tokens: TokenSequence = field(default_factory=TokenSequence)
    begins: ContextStart | None = None  # for the next turn's record
    routed: int = 0  # of its tokens, for how many the experts are known that computed them
    _head: tuple[int, ...] = ()
    _summary: tuple[int, ...] = ()
    _pieces: list[tuple[int, ...]] = field(default_factory=list)
    _observation: tuple[int, ...] = ()
    _unseen: TokenSequence = field(default_factory=TokenSequence)  # the tokens before it

    def must_begin_anew(self, observation: Sequence[int]) -> bool:
        """Whether the context has no room for another turn with this observation."""
        return bool(self._pieces) and self.rules.must_begin_anew(len(self.tokens), len(observation))

    def begin_anew(
        self, reason: str, observation: Sequence[int], summary: Sequence[int] = (), *, shorter: bool = False
    ) -> None:
        """Leave the oldest turns out. ``summary`` stands for them, and for what the last one stood for. ``shorter``: fit
        into half of the budget (the engine had no room for what was shown)."""
        lengths = [len(piece) for piece in self._pieces]
        budget = len(self.tokens) // 2 if shorter else None
        keep = self.rules.kept(len(self._head), lengths, len(observation), budget)
        left = len(self._pieces) - keep
        dropped = sum(lengths[:left]) + len(self._summary)
        self._pieces = self._pieces[left:]
        self._summary = tuple(summary)
        self.tokens = TokenSequence(
            (*self._head, *self._summary, *(token for piece in self._pieces for token in piece))
        )
        if self.begins is not None:  # it had just begun anew, and was still too long
            left, dropped = left + self.begins.dropped_turns, dropped + self.begins.dropped_tokens
        self.begins = ContextStart(tuple(self.tokens), reason, left, dropped)
        self.routed = 0

    def least(self, observation: Sequence[int]) -> int:
        """The shortest context there can be with this observation, without a summary."""
        return len(self._head) + len(observation)

    def observe(self, observation: Sequence[int]) -> None:
        """The environment has spoken: it goes behind the context."""
        self._observation, self._unseen = tuple(observation), self.tokens
        self.tokens += self._observation

    def withdraw(self) -> tuple[int, ...]:
        """Take the last observation back; returns it."""
        if self._observation:
            self.tokens = self._unseen
        taken, self._observation = self._observation, ()
        return taken

    def summarised(self, summary: Sequence[int]) -> ContextStart | None:
        """As :meth:`acted`, for the policy's summary: it is the last turn of this context and no turn of the next one."""
        self.tokens += summary
        self._observation = ()
        begins, self.begins = self.begins, None
        return begins

    def acted(self, action: Sequence[int]) -> ContextStart | None:
        """The policy has spoken: the turn is whole. Returns what its record says of the context's beginning."""
        self.tokens += action
        if not self._head:
            self._head = self._observation
            self._pieces.append(tuple(action))
        else:
            self._pieces.append((*self._observation, *action))
        self._observation = ()
        begins, self.begins = self.begins, None
        return begins


def setup_of(settings: ContextSection, task: TaskLimits) -> Setup:
    """What the config says of a task. Raises ConfigError where it does not fit the task, or the function is not there."""
    rules = settings.of(task.name)
    where = "context" if task.name not in settings.tasks else f"context.tasks.{task.name}"
    budget = rules.tokens or task.max_context_tokens
    if budget > task.max_context_tokens:
        fix = f"is more than task {task.name} has room for: at most {task.max_context_tokens}"
        raise ConfigError(f"{where}.tokens", budget, fix)
    size = len(task.vocabulary)
    if wrong := [token for token in rules.ask if not 0 <= token < size]:
        raise ConfigError(f"{where}.ask", wrong[0], f"must be token ids of task {task.name}, in [0, {size})")
    if rules.strategy != "summarise":
        return ContextRules(rules.strategy, budget, task.max_response_tokens, rules.recent_turns), (), None
    summary = rules.summary_tokens or task.max_response_tokens
    asking = len(rules.ask) if rules.summary == "model" else 0
    policy = ContextRules("summarise", budget, task.max_response_tokens, rules.recent_turns, summary, asking)
    if policy.reserve + policy.room >= budget:
        fix = f"leaves no room beside {policy.reserve} tokens for a summary and {policy.room} for a response"
        raise ConfigError(f"{where}.tokens", budget, fix)
    return (
        policy,
        rules.ask,
        None if rules.summary == "model" else cast(Summarise, named_function(f"{where}.summary", rules.summary)),
    )


def no_room(error: str) -> str:
    """The cause when an engine's error says that it had no room for the request; else empty."""
    text = error.lower()
    if any(words in text for words in _NO_MEMORY):
        return "engine_out_of_memory"
    return "context_too_long" if any(words in text for words in _TOO_LONG) else ""
