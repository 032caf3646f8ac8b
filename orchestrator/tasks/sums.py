"""Sums and differences of two numbers, thousands of questions, none asked twice before all were: a single-turn game in text.

    [task]
    name = "sums"
    dataset_options = { largest = 99 } # both numbers are 0 to this: 20,000 questions

The prompt is ``34 + 58 =``, or what ``question`` of the options makes of ``{}``; the answer is ``92``. Who learns by heart
learns a table as large as the data set and finds no held-out question in it.

Guarantees: training goes through all of its questions in an order that the seed decides, and only then through all of them
again, in another; a question and its twin (58 + 34) are one question to the split, so neither is held out while the other is
trained on.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from typing import Any

from orchestrator.api import ConfigError, Prompt
from orchestrator.tasks import splits
from orchestrator.tasks.text import Reply, TextTask
from orchestrator.tasks.vocabulary import CHARACTERS, printable

LARGEST, MOST = 99, 499  # the default, and what may be asked for: an order of all questions is kept in memory
QUESTION = "{} ="
_SIGNS = "+-"
_PAYLOAD = re.compile(r"(\d{1,3})([+-])(\d{1,3})", re.ASCII)


class SumsTask(TextTask):
    """See the module. Raises ConfigError for an option that it has not."""

    name = "sums"
    reward = "orchestrator.tasks.text_rewards:sums_answer"
    words = CHARACTERS
    max_turns = 1
    max_response_tokens = 5  # a sign, three digits, <end>
    max_reply_tokens = 0

    def __init__(self, heldout: int = 300, dataset_options: Mapping[str, Any] | None = None) -> None:
        given = dict(dataset_options or {})
        largest, question = given.pop("largest", LARGEST), given.pop("question", QUESTION)
        if given:
            fix = "no such option; sums has: largest, question"
            raise ConfigError(f"task.dataset_options.{min(given)}", given[min(given)], fix)
        if not isinstance(question, str) or question.count("{}") != 1 or printable(question) != question:
            raise ConfigError("task.dataset_options.question", question, "must be ASCII text with {} once, for the sum")
        if type(largest) is not int or not 1 <= largest <= MOST:
            raise ConfigError("task.dataset_options.largest", largest, f"must be a whole number from 1 to {MOST}")
        self.largest, self.question = largest, question
        self.max_prompt_tokens = len(self._asked(f"{largest}+{largest}"))
        self.version = f"1 largest={largest}"
        super().__init__(heldout)

    def draw(self, chance: random.Random) -> str:
        """``34+58``."""
        return self._question(chance.randrange(self.questions))

    @property
    def questions(self) -> int:
        """How many there are, held-out ones included."""
        return len(_SIGNS) * (self.largest + 1) ** 2

    def identity(self, payload: str) -> str:
        """Of a sum and its twin the same."""
        first, sign, second = _parts(payload)
        return f"{min(first, second)}+{max(first, second)}" if sign == "+" else payload

    def prompts(self, split: str, seed: int) -> Iterator[Prompt]:
        """See the base class; of ``"train"`` all, then all again."""
        return self._in_turn(seed) if split == "train" else super().prompts(split, seed)

    def play(self, payload: str) -> Sum:
        """One question."""
        return Sum(payload, self._asked(payload))

    def expert(self, payload: str) -> list[tuple[str, str]]:
        """The answer."""
        return [(self._asked(payload), str(value_of(payload)))]

    def novice(self, answer: str, chance: random.Random) -> str:
        """Any number of the same sign and as many digits."""
        digits = answer.removeprefix("-")
        drawn = "".join(chance.choice("123456789" if place == 0 else "0123456789") for place in range(len(digits)))
        return f"-{drawn}" if answer.startswith("-") else drawn

    def _asked(self, payload: str) -> str:
        first, sign, second = _parts(payload)
        return self.question.replace("{}", f"{first} {sign} {second}") + "\n"

    def _question(self, place: int) -> str:
        rest, sign = divmod(place, len(_SIGNS))
        first, second = divmod(rest, self.largest + 1)
        return f"{first}{_SIGNS[sign]}{second}"

    def _in_turn(self, seed: int) -> Iterator[Prompt]:
        epoch = 0
        while True:
            order = list(range(self.questions))
            random.Random(f"{self.name}/train/{seed}/{epoch}").shuffle(order)
            asked = 0
            for place in order:
                payload = self._question(place)
                key = splits.key_of(self.identity(payload))
                if not splits.is_heldout(key):
                    asked += 1
                    yield splits.prompt_of(self.name, key, payload)
            if not asked:
                raise ValueError(f"task {self.name}: no start state for training among {self.questions}")
            epoch += 1


class Sum:
    """One question. Raises ValueError when the payload is none."""

    def __init__(self, payload: str, asked: str) -> None:
        self._value, self._asked = value_of(payload), asked

    def start(self) -> str:
        """The question."""
        return self._asked

    async def act(self, said: str | None) -> Reply:
        """The answer, and the end."""
        if said is None:
            return Reply(done=True, invalid=True)
        return Reply(reward=float(said.strip() == str(self._value)), done=True)


def value_of(payload: str) -> int:
    """The right answer. Raises ValueError when the payload is no question."""
    first, sign, second = _parts(payload)
    return first + second if sign == "+" else first - second


def _parts(payload: str) -> tuple[int, str, int]:
    found = _PAYLOAD.fullmatch(payload)
    if found is None:
        raise ValueError(f"no sum or difference of two numbers: {payload!r}")
    return int(found[1]), found[2], int(found[3])
