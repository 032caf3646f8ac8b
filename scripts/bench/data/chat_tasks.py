"""Three multi-turn tasks in plain English, for recording how long a pretrained chat model talks
(``scripts/bench/data/record_chat.py``).

Guarantees: deterministic in their arguments; what a model is shown is its own tokenizer's chat template, and what it said is
never tokenised again, so a trajectory's ids are those that the engine saw. ``Problems``: word problems of one to four
steps, checked by their last number; a wrong answer is asked for again, as tests are run again on a program (Heddle 4.1: a
trajectory ends in its first turn, or in its last). ``Chores``: the household of :mod:`orchestrator.tasks.household`, told in
sentences with the commands that are possible, the first of which that the reply names is carried out. ``Puzzles``: questions of
the library reasoning-gym with short answers, asked for again as those of ``Problems`` are.

A reply has a limit; how many reach it is the model's and the temperature's affair, and to be said of what was recorded.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from orchestrator.api import Observation, Prompt, StepResult
from orchestrator.tasks.household import PRESENT, ROOMS, THINGS, House
from orchestrator.tasks.reasoning_gym import ITEMS, item_of, question_of

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana")
_PLACES = {furniture: room for room, furniture in ROOMS.items()}
PUZZLES = ("calendar_arithmetic", "chain_sum", "gcd", "lcm", "leg_counting", "letter_counting", "spell_backward")
_GOODS = ("apples", "pencils", "stamps", "marbles", "cards", "eggs", "books", "shells")


class Chat(Protocol):
    """What is needed of a tokenizer, as ids of whole messages."""

    end_id: int

    def opening(self, text: str) -> tuple[int, ...]:
        """A first message of the user, up to where the assistant speaks."""

    def following(self, text: str, ended: bool) -> tuple[int, ...]:
        """A further message, behind what the assistant said; ``ended``: it ended its turn itself."""

    def text(self, token_ids: Sequence[int]) -> str:
        """What was said."""


class Story(Protocol):
    """An episode in sentences."""

    def start(self) -> str:
        """The first message."""

    def answer(self, said: str) -> tuple[str, bool]:
        """To a reply: the next message, and whether the episode is over, well."""


class HuggingFaceChat:
    """The chat template of a Hugging Face folder. Raises ValueError for one without a template in which a second message of
    the user only adds tokens to the first."""

    def __init__(self, folder: str) -> None:
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self.end_id = int(self._tokenizer.eos_token_id)
        user = {"role": "user", "content": "@1@"}
        self._first: str = self._tokenizer.apply_chat_template([user], tokenize=False, add_generation_prompt=True)
        talk = [user, {"role": "assistant", "content": "@2@"}, {"role": "user", "content": "@3@"}]
        more = self._tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
        end = self._tokenizer.convert_ids_to_tokens(self.end_id)
        if not more.startswith(self._first + "@2@" + end):
            raise ValueError(f"{folder}: its chat template does not begin a second turn with the first one")
        self._end, self._next = end, more[len(self._first) + len("@2@" + end) :]
        self.size = len(self._tokenizer)

    def opening(self, text: str) -> tuple[int, ...]:
        """See the protocol."""
        return self._ids(self._first.replace("@1@", text))

    def following(self, text: str, ended: bool) -> tuple[int, ...]:
        """See the protocol."""
        return self._ids(("" if ended else self._end) + self._next.replace("@3@", text))

    def text(self, token_ids: Sequence[int]) -> str:
        """See the protocol."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))


class ChatTask:
    """Base: implements :class:`orchestrator.api.Task`, whose held-out prompts are not used. A subclass draws payloads and plays
    them."""

    name = ""
    max_turns = 1
    max_response_tokens = 1
    max_message_tokens = 256
    pad_id = 0

    def __init__(self, chat: Chat, size: int) -> None:
        self.chat, self.end_id = chat, chat.end_id
        self.vocabulary: Sequence[str] = range(size)  # type: ignore[assignment]  # ids only: nobody reads its words
        self.max_context_tokens = self.max_turns * (self.max_response_tokens + self.max_message_tokens)

    def draw(self, chance: random.Random) -> str:
        """The payload of a start state."""
        raise NotImplementedError

    def play(self, payload: str) -> Story:
        """An episode of it."""
        raise NotImplementedError

    def prompts(self, split: str, seed: int) -> Iterator[Prompt]:
        """Endless, deterministic in both."""
        chance = random.Random(f"{self.name} {split} {seed}")
        while True:
            payload = self.draw(chance)
            yield Prompt(hashlib.sha256(payload.encode()).hexdigest()[:16], self.name, seed, payload)

    def environment(self) -> ChatEnvironment:
        """A fresh one."""
        return ChatEnvironment(self)


class ChatEnvironment:
    """One episode behind token ids; implements :class:`orchestrator.api.Environment`."""

    def __init__(self, task: ChatTask) -> None:
        self.version = f"{task.name} 1"
        self._task = task
        self._story: Story | None = None
        self._turns = 0

    async def reset(self, prompt: Prompt) -> Observation:
        """Start on the prompt's payload."""
        self._story, self._turns = self._task.play(prompt.payload), 0
        return Observation(self._task.chat.opening(self._story.start()))

    async def step(self, action_ids: tuple[int, ...]) -> StepResult:
        """One reply. Raises RuntimeError when no episode is running."""
        if self._story is None:
            raise RuntimeError("no episode is running: call reset first")
        self._turns += 1
        message, done = self._story.answer(self._task.chat.text(action_ids))
        truncated = not done and self._turns >= self._task.max_turns
        seen: tuple[int, ...] = ()
        if done or truncated:
            self._story = None
        else:
            seen = self._task.chat.following(message, action_ids[-1] == self._task.end_id)
        return StepResult(Observation(seen), float(done), done, truncated, False)

    async def close(self) -> None:
        """Idempotent."""
        self._story = None


class Problems(ChatTask):
    """Word problems; one draw in four is of each number of steps."""

    name = "problems"
    max_turns = 5
    max_response_tokens = 96

    def draw(self, chance: random.Random) -> str:
        """``QUESTION|ANSWER``."""
        who, what = chance.choice(_NAMES), chance.choice(_GOODS)
        value = chance.randint(2, 12)
        told = [f"{who} has {value} {what}."]
        for _ in range(chance.randint(1, 4)):
            kind, number = chance.choice(("more", "less", "times")), chance.randint(2, 9)
            if kind == "times" and value < 60:
                value *= number
                told.append(f"Then {who} gets {number} times as many as that.")
            elif kind == "less" and value > number:
                value -= number
                told.append(f"{who} gives {number} {what} away.")
            else:
                value += number
                told.append(f"{who} finds {number} more {what}.")
        return f"{' '.join(told)} How many {what} does {who} have now?|{value}"

    def play(self, payload: str) -> Story:
        """See the base."""
        return Problem(payload)


class Problem:
    """One of them."""

    def __init__(self, payload: str) -> None:
        self._question, _, self._answer = payload.rpartition("|")

    def start(self) -> str:
        """The question."""
        return f"{self._question} Reply with the number."

    def answer(self, said: str) -> tuple[str, bool]:
        """Right when the last number that was said is."""
        numbers = _NUMBER.findall(said)
        if not numbers:
            return "I see no number. Try again.", False
        last = numbers[-1].replace(",", "")
        if last in (self._answer, f"{self._answer}.0"):
            return "", True
        return f"{last} is wrong. Try again.", False


class Puzzles(ChatTask):
    """Questions of reasoning-gym; each kind is drawn as often. Raises ConfigError where the library is not there."""

    name = "puzzles"
    max_turns = 6
    max_response_tokens = 96

    def draw(self, chance: random.Random) -> str:
        """``KIND/INDEX``."""
        return f"{chance.choice(PUZZLES)}/{chance.randrange(ITEMS)}"

    def play(self, payload: str) -> Story:
        """See the base."""
        return Puzzle(payload)


class Puzzle:
    """One of them."""

    def __init__(self, payload: str) -> None:
        self._question, self._answer = question_of(payload), str(item_of(payload)["answer"])

    def start(self) -> str:
        """The question."""
        return self._question.strip()

    def answer(self, said: str) -> tuple[str, bool]:
        """Right when the last number that was said is, or the reply has the word."""
        if not _NUMBER.fullmatch(self._answer):
            right = self._answer.lower() in re.findall(r"\w+", said.lower())
            return ("", True) if right else ("That is wrong. Try again.", False)
        return Problem(f"|{self._answer}").answer(said)


class Chores(ChatTask):
    """The household in sentences."""

    name = "chores"
    max_turns = 8
    max_response_tokens = 48

    def draw(self, chance: random.Random) -> str:
        """As :meth:`orchestrator.tasks.household.HouseholdTask.draw`, with fewer things closed."""
        closed = [furniture for furniture in ROOMS.values() if chance.random() < 0.3]
        things = chance.sample(THINGS, PRESENT)
        places = {thing: chance.choice(list(ROOMS)) for thing in things}
        goal = chance.choice([furniture for room, furniture in ROOMS.items() if room != places[things[0]]])
        where = " ".join(f"{thing}:{room}" for thing, room in sorted(places.items()))
        return f"{chance.choice(list(ROOMS))}/{' '.join(closed)}/{where}/{things[0]} {goal}"

    def play(self, payload: str) -> Story:
        """See the base."""
        return Chore(payload)


class Chore:
    """One of them."""

    def __init__(self, payload: str) -> None:
        self._house = House(payload)
        self._seen = self._house.start().partition("@")[2]

    def start(self) -> str:
        """The goal, and what is seen."""
        house = self._house
        goal = f"You are in a house. Fetch the {house.thing}: it is in the {house.places[house.thing]}."
        goal = f"{goal} Then go to the {_PLACES[house.goal]}, and put it into the {house.goal}."
        return f"{goal} Reply with one command, and why in one short sentence. {self._told()}"

    def answer(self, said: str) -> tuple[str, bool]:
        """The first possible command in it is carried out."""
        lowered = said.lower()
        found = [(lowered.find(command), command) for command in self._possible() if command in lowered]
        if not found:
            return f"That is none of the commands. {self._told()}", False
        reply = self._house.do(min(found)[1])
        if reply.done:
            return "", True
        self._seen = reply.text.partition("@")[2]
        return self._told(), False

    def _told(self) -> str:
        room, furniture, *inside = self._seen.split()
        held = inside.index("holding") if "holding" in inside else len(inside)
        things = ", ".join(inside[:held]) or "nothing"
        holding = f" You hold the {inside[held + 1]}." if held < len(inside) else ""
        return f"You are in the {room}. In the {furniture}: {things}.{holding} Commands: {', '.join(self._possible())}."

    def _possible(self) -> list[str]:
        room, _, *inside = self._seen.split()
        found = [f"go {other}" for other in ROOMS if other != room]
        if "closed" in inside:
            return [*found, "open"]
        if "holding" in inside:
            return [*found, "put"]
        return [*found, *(f"take {thing}" for thing in inside)]


TASKS: dict[str, type[ChatTask]] = {task.name: task for task in (Problems, Chores, Puzzles)}
