"""What an agent said and heard, as token ids: a tree whose branches are the contexts that the policy was shown.

Pure. Guarantees (the prefix property): a request whose messages go on from an answer is shown the ids of that answer's
context, unchanged, and new ids behind them; whatever does not (history that was edited, other tools) begins a context of its
own, and that is recorded. Every generated token is in exactly one turn of :meth:`Conversation.turns`; where two requests go on
from the same answer, the second begins a context that repeats what they share, masked there. Memory grows with what is new in
each request: ids and messages of before are those of the answer that it goes on from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from orchestrator.agents.chat_template import ChatFormat, Message
from orchestrator.api import Completion, ContextStart, Turn


@dataclass(frozen=True, slots=True, eq=False)
class Opening:
    """Where an answer will stand: behind ``parent`` (None: in a new context), after ``observation``. ``shown``: the messages;
    for plain completions there are none."""

    parent: Answer | None
    observation: tuple[int, ...]
    shown: tuple[Message, ...] = ()
    tools: str = ""

    @property
    def size(self) -> int:
        """Tokens of the prompt."""
        return (self.parent.size if self.parent is not None else 0) + len(self.observation)

    def token_ids(self) -> tuple[int, ...]:
        """The prompt, put together."""
        return tuple(chain.from_iterable([*self.pieces()][::-1]))

    def pieces(self) -> Iterator[tuple[int, ...]]:
        """From its end to its beginning."""
        yield self.observation
        answer = self.parent
        while answer is not None:
            yield answer.completion.token_ids
            yield answer.opening.observation
            answer = answer.opening.parent


@dataclass(slots=True, eq=False)
class Answer:
    """A turn that was generated. ``said``: as the agent was given it, None for a plain completion; ``size``: tokens of prompt and
    answer; ``asked``, ``answered``: loop times; ``before``: (turns, tokens) of the newest context when it began."""

    opening: Opening
    completion: Completion
    said: Message | None
    text: str
    size: int
    asked: float
    answered: float
    before: tuple[int, int] = (0, 0)
    _whole: tuple[int, ...] | None = None

    def token_ids(self) -> tuple[int, ...]:
        """Prompt and answer, put together once: every branch that repeats them has the same."""
        if self._whole is None:
            self._whole = (*self.opening.token_ids(), *self.completion.token_ids)
        return self._whole

    def begins(self, token_ids: Sequence[int]) -> bool:
        """Whether these ids begin with its prompt and itself."""
        past = self.size
        for piece in (self.completion.token_ids, *self.opening.pieces()) if past <= len(token_ids) else ():
            if tuple(token_ids[past - len(piece) : past]) != piece:
                return False
            past -= len(piece)
        return past == 0


class Conversation:
    """Of one trajectory."""

    def __init__(self, chat: ChatFormat) -> None:
        self._chat = chat
        self.answers: list[Answer] = []  # in order of their coming

    def open_chat(self, messages: Sequence[Message], tools: str) -> Opening:
        """Where the answer to these messages stands. Raises TemplateRefused."""
        shown = tuple(messages)
        # The longest first. A list of its own: another thread may add one.
        for answer in sorted(self.answers, key=lambda answer: -len(answer.opening.shown)):
            before, said = answer.opening.shown, answer.said
            past = len(before) + 1
            if said is None or answer.opening.tools != tools or past >= len(shown) or shown[:past] != (*before, said):
                continue
            shown = (*before, said, *shown[past:])
            ids = self._chat.encode_continuation(before, shown[past:], tools, answer.completion.token_ids)
            if ids is not None:
                return Opening(answer, ids, shown, tools)
            break
        return Opening(None, self._chat.encode_conversation(shown, tools), shown, tools)

    def open_plain(self, prompt: str | Sequence[int]) -> Opening:
        """The same for a plain completion: text that goes on from a prompt and its answer, or ids that do."""
        best: Answer | None = None
        longest = 0
        for answer in self.answers:
            if answer.said is not None:
                continue
            past = len(answer.text) if isinstance(prompt, str) else answer.size
            begins = prompt.startswith(answer.text) if isinstance(prompt, str) else answer.begins(prompt)
            if begins and longest < past < len(prompt):
                best, longest = answer, past
        rest = prompt[longest:]
        return Opening(best, self._chat.encode_prompt(rest) if isinstance(rest, str) else tuple(rest))

    def add(
        self, opening: Opening, completion: Completion, said: Message | None, text: str, asked: float, answered: float
    ) -> Answer:
        """An answer was generated. ``text``: for a plain completion, its prompt and what it says. What it went on from was told,
        though it was withdrawn meanwhile."""
        for past in self._line(opening.parent) if opening.parent is not None else ():
            if past not in self.answers:
                self.answers.append(past)
        before = (0, 0)
        if opening.parent is None and self.answers:
            newest = self._line(self.answers[-1])
            before = (len(newest), self.answers[-1].size)
        size = opening.size + len(completion.token_ids)
        answer = Answer(opening, completion, said, text, size, asked, answered, before)
        self.answers.append(answer)
        return answer

    def withdraw(self, answers: Sequence[Answer]) -> None:
        """Nobody was told of them, and nothing was asked since: they are no part of the trajectory."""
        followed = [answer.opening.parent for answer in self.answers]
        self.answers = [answer for answer in self.answers if answer not in answers or answer in followed]

    def turns(self, reward: float = 0.0, done: bool = False) -> list[Turn]:
        """The turns, context after context; the context with the oldest weights is the first, whatever came back first.
        ``reward`` and ``done`` are of the last answer."""
        lines: list[list[Answer]] = []
        line_of: dict[int, list[Answer]] = {}
        for answer in self.answers:
            parent = answer.opening.parent
            line = line_of.get(id(parent)) if parent is not None else None
            if line is None or line[-1] is not parent:
                line = []
                lines.append(line)
            line.append(answer)
            line_of[id(answer)] = line
        ordered = sorted(lines, key=lambda line: _oldest(line[0]))  # stable: ties in order of their coming
        next_of = {id(answer.opening.parent): answer for answer in reversed(self.answers)}
        found = []
        for index, line in enumerate(ordered):
            for place, answer in enumerate(line):
                turn = _turn(answer, next_of.get(id(answer)), line[place - 1].size - 1 if place else 0)
                if place == 0 and (index > 0 or answer.opening.parent is not None):
                    turn = replace(turn, context=_start(answer, line_of))
                if answer is self.answers[-1]:
                    turn = replace(turn, reward=reward, done=done)
                found.append(turn)
        return found

    def _line(self, answer: Answer) -> list[Answer]:
        line = [answer]
        while line[-1].opening.parent is not None:
            line.append(line[-1].opening.parent)
        return line[::-1]


def _oldest(answer: Answer) -> int:
    versions = answer.completion.versions
    return versions[0][0] if versions else 0


def _turn(answer: Answer, following: Answer | None, known: int) -> Turn:
    """``environment_seconds``: that the agent took until it asked on. ``known``: tokens whose experts earlier turns say."""
    experts = answer.completion.experts
    worked = max(0.0, following.asked - answer.answered) if following is not None else 0.0
    return Turn(
        answer.opening.observation,
        answer.completion.token_ids,
        answer.completion.logprobs,
        answer.completion.versions,
        generate_seconds=round(answer.answered - answer.asked, 6),
        environment_seconds=round(worked, 6),
        experts=None if experts is None else experts.since(known),
    )


def _start(answer: Answer, line_of: dict[int, list[Answer]]) -> ContextStart:
    """``branched``: it repeats a context up to an answer that another one went on from. ``edited``: it repeats none."""
    parent = answer.opening.parent
    if parent is None:
        return ContextStart((), "edited", *answer.before)
    shared = line_of[id(parent)]
    left = shared[shared.index(parent) + 1 :]
    dropped = left[-1].size - parent.size if left else 0
    return ContextStart(parent.token_ids(), "branched", len(left), dropped)
