"""What an agent said and heard, as token ids: a tree whose branches are the contexts that the policy was shown.

Pure. Guarantees (the prefix property): a request whose messages go on from an answer is shown the ids of that answer's
context, unchanged, and new ids behind them; whatever does not (history that was edited, other tools) begins a context of its
own, and that is recorded. Every generated token is in exactly one turn of :meth:`Conversation.turns`; where two requests go on
from the same answer, the second begins a context that repeats what they share, masked there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

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
    def token_ids(self) -> tuple[int, ...]:
        """The prompt."""
        return (*(self.parent.token_ids if self.parent is not None else ()), *self.observation)


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """A turn that was generated. ``said``: as the agent was given it, None for a plain completion; ``token_ids``: prompt and
    answer; ``asked``, ``answered``: loop times; ``before``: (turns, tokens) of the newest context when it began."""

    opening: Opening
    completion: Completion
    said: Message | None
    text: str
    token_ids: tuple[int, ...]
    asked: float
    answered: float
    before: tuple[int, int] = (0, 0)


class Conversation:
    """Of one trajectory."""

    def __init__(self, chat: ChatFormat) -> None:
        self._chat = chat
        self.answers: list[Answer] = []  # in order of their coming

    def open_chat(self, messages: Sequence[Message], tools: str) -> Opening:
        """Where the answer to these messages stands. Raises TemplateRefused."""
        shown = tuple(messages)
        best: Answer | None = None
        for answer in tuple(self.answers):  # another thread may add one
            if answer.said is None or answer.opening.tools != tools:
                continue
            past = len(answer.opening.shown) + 1
            known = past < len(shown) and shown[:past] == (*answer.opening.shown, answer.said)
            if known and (best is None or past > len(best.opening.shown)):
                best = answer
        if best is not None:
            before, new = best.opening.shown, shown[len(best.opening.shown) + 1 :]
            ids = self._chat.encode_continuation(before, new, tools, best.completion.token_ids)
            if ids is not None:
                return Opening(best, ids, shown, tools)
        return Opening(None, self._chat.encode_conversation(shown, tools), shown, tools)

    def open_plain(self, prompt: str | Sequence[int]) -> Opening:
        """The same for a plain completion: text that goes on from a prompt and its answer, or ids that do."""
        best: Answer | None = None
        longest = 0
        for answer in self.answers:
            if answer.said is not None:
                continue
            past = len(answer.text) if isinstance(prompt, str) else len(answer.token_ids)
            begins = (
                prompt.startswith(answer.text) if isinstance(prompt, str) else tuple(prompt[:past]) == answer.token_ids
            )
            if begins and longest < past < len(prompt):
                best, longest = answer, past
        rest = prompt[longest:]
        return Opening(best, self._chat.encode_prompt(rest) if isinstance(rest, str) else tuple(rest))

    def add(
        self, opening: Opening, completion: Completion, said: Message | None, text: str, asked: float, answered: float
    ) -> Answer:
        """An answer was generated. ``text``: for a plain completion, its prompt and what it says. What it went on from was told,
        though it was withdrawn meanwhile."""
        for past in self._chain(opening.parent) if opening.parent is not None else ():
            if past not in self.answers:
                self.answers.append(past)
        before = (0, 0)
        if opening.parent is None and self.answers:
            newest = self._chain(self.answers[-1])
            before = (len(newest), len(self.answers[-1].token_ids))
        answer = Answer(
            opening, completion, said, text, (*opening.token_ids, *completion.token_ids), asked, answered, before
        )
        self.answers.append(answer)
        return answer

    def withdraw(self, answers: Sequence[Answer]) -> None:
        """Nobody was told of them, and nothing was asked since: they are no part of the trajectory."""
        followed = [answer.opening.parent for answer in self.answers]
        self.answers = [answer for answer in self.answers if answer not in answers or answer in followed]

    def turns(self, reward: float = 0.0, done: bool = False) -> list[Turn]:
        """The turns, context after context; the context with the oldest weights is the first, whatever came back first.
        ``reward`` and ``done`` are of the last answer."""
        chains: list[list[Answer]] = []
        chain_of: dict[int, list[Answer]] = {}
        for answer in self.answers:
            parent = answer.opening.parent
            chain = chain_of.get(id(parent)) if parent is not None else None
            if chain is None or chain[-1] is not parent:
                chain = []
                chains.append(chain)
            chain.append(answer)
            chain_of[id(answer)] = chain
        ordered = sorted(chains, key=lambda chain: _oldest(chain[0]))  # stable: ties in order of their coming
        next_of = {id(answer.opening.parent): answer for answer in reversed(self.answers)}
        found = []
        for index, chain in enumerate(ordered):
            for place, answer in enumerate(chain):
                turn = _turn(answer, next_of.get(id(answer)), len(chain[place - 1].token_ids) - 1 if place else 0)
                if place == 0 and (index > 0 or answer.opening.parent is not None):
                    turn = replace(turn, context=_start(answer, chain_of))
                if answer is self.answers[-1]:
                    turn = replace(turn, reward=reward, done=done)
                found.append(turn)
        return found

    def _chain(self, answer: Answer) -> list[Answer]:
        chain = [answer]
        while chain[-1].opening.parent is not None:
            chain.append(chain[-1].opening.parent)
        return chain[::-1]


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


def _start(answer: Answer, chain_of: dict[int, list[Answer]]) -> ContextStart:
    """``branched``: it repeats a context up to an answer that another one went on from. ``edited``: it repeats none."""
    parent = answer.opening.parent
    if parent is None:
        return ContextStart((), "edited", *answer.before)
    shared = chain_of[id(parent)]
    left = shared[shared.index(parent) + 1 :]
    dropped = len(left[-1].token_ids) - len(parent.token_ids) if left else 0
    return ContextStart(parent.token_ids, "branched", len(left), dropped)
