"""A household: find a thing and put it where it belongs. A text game of many turns, after ALFWorld's pick-and-place.

Four rooms, each with one piece of furniture, half of which are closed; three things lie in them. The prompt names the goal
(``put key in fridge``) and where the agent is; then each turn is one command: ``go ROOM``, ``open``, ``take THING``, ``put``
(what is held, into the furniture of this room), and the observation is the room, whether its furniture is closed, what lies
in it, and what is held (``@kitchen fridge closed holding key``). What is in closed furniture is not seen until it is opened.
At most 10 turns; the best way takes 3 to 7 of them when the agent knew where the thing is, so it has to search.
"""

from __future__ import annotations

import random

from orchestrator.tasks import vocabulary
from orchestrator.tasks.text import Reply, TextTask

ROOMS = {"kitchen": "fridge", "bedroom": "drawer", "bathroom": "cabinet", "hall": "shelf"}
THINGS = ("key", "cup", "book", "soap", "apple", "lamp")
PRESENT = 3  # things in a house
_FURNITURE = {furniture: room for room, furniture in ROOMS.items()}


class HouseholdTask(TextTask):
    """See the module."""

    name = "household"
    reward = "orchestrator.tasks.text_rewards:household_goal"
    words = vocabulary.words(
        [
            *("put", "in", "go", "open", "take", "closed", "holding", "no"),
            *(f"@{room}" for room in ROOMS),
            *ROOMS,
            *_FURNITURE,
            *THINGS,
        ]
    )
    max_turns = 10
    max_response_tokens = 3
    max_prompt_tokens = 12
    max_reply_tokens = 8

    def draw(self, chance: random.Random) -> str:
        """``ROOM / FURNITURE.. that is closed / THING:ROOM .. / THING FURNITURE``: start, closed, where things are, goal."""
        closed = [furniture for furniture in _FURNITURE if chance.random() < 0.5]
        things = chance.sample(THINGS, PRESENT)
        places = {thing: chance.choice(list(ROOMS)) for thing in things}
        goal = chance.choice([furniture for furniture in _FURNITURE if _FURNITURE[furniture] != places[things[0]]])
        where = " ".join(f"{thing}:{room}" for thing, room in sorted(places.items()))
        return f"{chance.choice(list(ROOMS))}/{' '.join(closed)}/{where}/{things[0]} {goal}"

    def play(self, payload: str) -> House:
        """An episode in this house."""
        return House(payload)

    def expert(self, payload: str) -> list[tuple[str, str]]:
        """Straight to the thing, which it cannot know: the form of good play, and what to do once the thing is seen."""
        house = House(payload)
        room, target = house.places[house.thing], _FURNITURE[house.goal]
        plan = [] if house.room == room else [f"go {room}"]
        plan += ["open"] if ROOMS[room] in house.closed else []
        plan += [f"take {house.thing}", f"go {target}"]
        plan += ["open"] if house.goal in house.closed else []
        plan.append("put")
        turns, seen = [], house.start()
        for command in plan:
            turns.append((seen, command))
            seen = house.do(command).text
        return turns

    def novice(self, answer: str, chance: random.Random) -> str:
        """Any command."""
        commands = [f"go {chance.choice(list(ROOMS))}", "open", f"take {chance.choice(THINGS)}", "put"]
        return chance.choice(commands)


class House:
    """One episode. Raises ValueError when the payload is none of a house."""

    def __init__(self, payload: str) -> None:
        try:
            self.room, closed, where, goal = payload.split("/")
            self.closed = set(closed.split())
            self.places: dict[str, str] = dict(item.split(":") for item in where.split())
            self.thing, self.goal = goal.split()
        except ValueError:
            raise ValueError(f"not a house: {payload!r}") from None
        known = self.room in ROOMS and self.goal in _FURNITURE and self.closed <= set(_FURNITURE)
        if not known or self.thing not in self.places or not set(self.places.values()) <= set(ROOMS):
            raise ValueError(f"not a house: {payload!r}")
        self._held = ""

    def start(self) -> str:
        """The goal, then what is seen."""
        return f"put {self.thing} in {self.goal} {self._seen()}"

    async def act(self, said: str | None) -> Reply:
        """One command."""
        return self.do(said)

    def do(self, said: str | None) -> Reply:
        """One command. What cannot be done is answered ``no`` and changes nothing."""
        match (said or "").split():
            case ["go", room] if room in ROOMS and room != self.room:
                self.room = room
            case ["open"] if ROOMS[self.room] in self.closed:
                self.closed.discard(ROOMS[self.room])
            case ["take", thing] if not self._held and self._visible(thing):
                self._held = thing
                del self.places[thing]
            case ["put"] if self._held and ROOMS[self.room] not in self.closed:
                self.places[self._held], self._held = self.room, ""
                if self.places.get(self.thing) == _FURNITURE[self.goal]:
                    return Reply(reward=1.0, done=True)
            case _:
                return Reply(f"no {self._seen()}", invalid=True)
        return Reply(self._seen())

    def _visible(self, thing: str) -> bool:
        return ROOMS[self.room] not in self.closed and self.places.get(thing) == self.room

    def _seen(self) -> str:
        furniture = ROOMS[self.room]
        inside = ["closed"] if furniture in self.closed else [thing for thing in self.places if self._visible(thing)]
        held = ["holding", self._held] if self._held else []
        return " ".join([f"@{self.room}", furniture, *inside, *held])
