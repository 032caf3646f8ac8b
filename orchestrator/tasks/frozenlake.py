"""FrozenLake as text, played over many turns: random solvable 4x4 maps, not slippery, 12 turns at most.

The prompt is the map, one word a cell (``a1S b1. c1H ...``: column letter, row digit, content), then the environment
says where the agent is (``@a1``), and the policy answers a move and the end of its turn (``down <end>``). So a turn is
one observation token and two policy tokens, and a whole episode is at most 53 tokens.

Guarantees: everything is deterministic in its arguments; a map belongs to the training or to the held-out split by its
SHA-256 alone, so the two are disjoint whatever the seeds; every map can be solved in 6 of the 12 turns (in so small a
map there is always a way that only goes right and down); an answer that is not exactly one move and ``<end>`` wastes its
turn. The moves themselves are gymnasium's ``FrozenLake-v1``. Gymnasium is imported on first use, not with this module.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from orchestrator.api import Observation, Prompt, StepResult
from orchestrator.tasks import splits, vocabulary
from orchestrator.tasks.vocabulary import Vocabulary

TASK = "frozenlake"
SIZE = 4
MAX_TURNS = 12
MOVES = ("left", "down", "right", "up")  # in gymnasium's order of actions
LAKE = "<lake>"

_DELTAS = ((0, -1), (1, 0), (0, 1), (-1, 0))  # (row, column) of each move
_GOAL = SIZE * SIZE - 1
_CELLS = tuple(f"{'abcd'[state % SIZE]}{state // SIZE + 1}" for state in range(SIZE * SIZE))
_NOT_LEFT = 0xEEEE  # bit masks of a 4x4 map, bit = row * 4 + column: all cells but those of the left column
_NOT_RIGHT = 0x7777


def _cell_word(state: int, content: str) -> str:
    return _CELLS[state] + ("." if content == "F" else content)


def _words() -> Vocabulary:
    contents = ["S"] + ["FH"] * (_GOAL - 1) + ["G"]
    cells = [_cell_word(state, content) for state, letters in enumerate(contents) for content in letters]
    return vocabulary.words([*MOVES, LAKE, *cells, *(f"@{cell}" for cell in _CELLS)])


WORDS = _words()
VOCABULARY: tuple[str, ...] = WORDS.words
"""Token id -> word; 64 words, the last of them unused."""

encode, decode = WORDS.encode, WORDS.decode
PAD_ID, END_ID = WORDS.pad_id, WORDS.end_id
_AT = tuple(encode(f"@{cell}")[0] for cell in _CELLS)
_FIRST_MOVE = encode(MOVES[0])[0]


def parse_map(payload: str) -> tuple[str, ...]:
    """The four rows of a map written ``SFFF/FHFH/FFFH/HFFG`` (a prompt's payload). Raises ValueError if it is no map."""
    rows = tuple(payload.split("/"))
    cells = "".join(rows)
    if (
        [len(row) for row in rows] != [SIZE] * SIZE
        or cells[0] != "S"
        or cells[-1] != "G"
        or not set(cells[1:-1]) <= set("FH")
    ):
        raise ValueError(f"not a {SIZE}x{SIZE} map: {payload!r}")
    return rows


def is_heldout(payload: str) -> bool:
    """Whether a map belongs to the held-out split; otherwise it belongs to training."""
    return splits.is_heldout(splits.key_of(payload))


def move_of(action_ids: Sequence[int]) -> int | None:
    """The move (0 to 3, gymnasium's order) that a turn's tokens make; None unless they are just a move and ``<end>``."""
    if len(action_ids) != 2 or action_ids[1] != END_ID:
        return None
    move = action_ids[0] - _FIRST_MOVE
    return move if 0 <= move < len(MOVES) else None


def next_state(state: int, move: int) -> int:
    """The cell (row * 4 + column) that a move leads to; at the edge, the same cell."""
    row, column = divmod(state, SIZE)
    row = min(max(row + _DELTAS[move][0], 0), SIZE - 1)
    column = min(max(column + _DELTAS[move][1], 0), SIZE - 1)
    return row * SIZE + column


def distances(payload: str) -> tuple[int | None, ...]:
    """Moves from each of the 16 cells to the goal around the holes; None where there is no way (and for holes)."""
    cells = "".join(parse_map(payload))
    found: list[int | None] = [None] * len(cells)
    found[_GOAL] = 0
    queue = deque([_GOAL])
    while queue:
        state = queue.popleft()
        for move in range(len(MOVES)):
            neighbour = next_state(state, move)
            if found[neighbour] is None and cells[neighbour] != "H":
                found[neighbour] = (found[state] or 0) + 1
                queue.append(neighbour)
    return tuple(found)


def map_tokens(payload: str) -> tuple[int, ...]:
    """The 17 tokens that show a map: ``<lake>`` and one word a cell, row by row."""
    cells = "".join(parse_map(payload))
    return encode(" ".join([LAKE, *itertools.starmap(_cell_word, enumerate(cells))]))


class FrozenLakeEnv:
    """One gymnasium ``FrozenLake-v1`` (not slippery) behind token ids; implements ``Environment``.

    The episode ends at the goal, in a hole (``done``) or after 12 turns (``truncated``). A step's ``reward`` is
    gymnasium's own: 1.0 on the move that reaches the goal. Using it out of order raises RuntimeError.
    """

    def __init__(self) -> None:
        import gymnasium

        self._gymnasium = gymnasium
        self.version: str = f"gymnasium {gymnasium.__version__}"
        self._env: Any = None
        self._state = 0
        self._turns = 0
        self._playing = False

    async def reset(self, prompt: Prompt) -> Observation:
        """Start on the prompt's map: its 17 tokens and the agent's place. Raises ValueError if the payload is no map."""
        rows = parse_map(prompt.payload)
        await self.close()
        self._env = self._gymnasium.make("FrozenLake-v1", desc=list(rows), is_slippery=False)
        state, _ = self._env.reset(seed=prompt.seed)
        self._state, self._turns, self._playing = int(state), 0, True
        return Observation((*map_tokens(prompt.payload), _AT[self._state]))

    async def step(self, action_ids: tuple[int, ...]) -> StepResult:
        """Play one turn; the observation is one token, the agent's place, and is empty when the episode has ended."""
        if not self._playing:
            raise RuntimeError("no episode is running: call reset first")
        self._turns += 1
        move = move_of(action_ids)
        reward, done = 0.0, False
        if move is not None:
            state, gained, done, _, _ = self._env.step(move)
            self._state, reward, done = int(state), float(gained), bool(done)
        truncated = not done and self._turns >= MAX_TURNS
        self._playing = not (done or truncated)
        return StepResult(
            observation=Observation((_AT[self._state],) if self._playing else ()),
            reward=reward,
            done=done,
            truncated=truncated,
            invalid_action=move is None,
        )

    async def close(self) -> None:
        """Free the gymnasium environment. Idempotent."""
        self._playing = False
        if self._env is not None:
            self._env.close()
            self._env = None


@functools.cache
def solvable_maps() -> tuple[str, ...]:
    """All solvable maps in a fixed order: 3,828 of the 2^14 ways to place holes between start and goal."""
    found = []
    for bits in range(1 << (_GOAL - 1)):
        frozen = (~bits & ((1 << (_GOAL - 1)) - 1)) << 1 | 1 | 1 << _GOAL  # start and goal are always frozen
        reached, before = 1, 0
        while reached != before:  # flood from the start, all cells at once
            before = reached
            spread = reached << SIZE | reached >> SIZE | (reached & _NOT_RIGHT) << 1 | (reached & _NOT_LEFT) >> 1
            reached |= spread & frozen
        if reached >> _GOAL & 1:
            holes = "".join("H" if bits >> cell & 1 else "F" for cell in range(_GOAL - 1))
            cells = f"S{holes}G"
            found.append("/".join(cells[row * SIZE : (row + 1) * SIZE] for row in range(SIZE)))
    return tuple(found)


class FrozenLakeTask:
    """FrozenLake maps, environments and vocabulary; implements ``Task``.

    Every solvable map is equally likely, so training and held-out maps are equally hard. ``heldout_maps`` is how many of
    the held-out maps (about 760) are evaluated on. Raises ValueError when there are not that many.
    """

    name: str = TASK
    reward: str = "orchestrator.tasks.rewards:frozenlake_moves"
    vocabulary: Sequence[str] = VOCABULARY
    pad_id: int = PAD_ID
    end_id: int = END_ID
    max_turns: int = MAX_TURNS
    max_response_tokens: int = 2
    max_context_tokens: int = 1 + SIZE * SIZE + MAX_TURNS * 3

    def __init__(self, heldout_maps: int = 300) -> None:
        heldout = [payload for payload in solvable_maps() if is_heldout(payload)]
        if not 1 <= heldout_maps <= len(heldout):
            raise ValueError(f"heldout_maps = {heldout_maps}: must be 1 to {len(heldout)}, as many as are held out")
        random.Random("frozenlake heldout").shuffle(heldout)
        self._heldout = tuple(_prompt(payload) for payload in heldout[:heldout_maps])
        self._training = tuple(payload for payload in solvable_maps() if not is_heldout(payload))
        self.epoch_prompts = len(self._training)  # of ``prompts``; rollout.rounds asks for it

    def prompts(self, split: str, seed: int) -> Iterator[Prompt]:
        """Start states. ``"train"``: endless, epoch after epoch, each training map once an epoch in an order drawn from
        ``seed``. ``"heldout"``: ``heldout_maps`` distinct maps, always the same ones in the same order.

        Raises ValueError for another split.
        """
        if split == "train":
            return self._epochs(f"train/{seed}")
        if split == "heldout":
            return iter(self._heldout)
        raise ValueError(f"split = {split!r}: must be 'train' or 'heldout'")

    def environment(self) -> FrozenLakeEnv:
        """A fresh environment instance."""
        return FrozenLakeEnv()

    def demonstrations(self, n: int, seed: int, skill: float) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """``n`` episodes for a supervised warm-up, as (token ids, loss mask) of equal length (17 + 3 tokens a turn).

        Each move is a shortest-path move with chance ``skill`` (0 to 1), else uniformly random: with ``skill = 0`` they
        teach the form of an answer and nothing about the lake. Training maps only, drawn apart from ``prompts``.
        Deterministic in (seed, skill). Raises ValueError for a skill out of range.
        """
        if not 0 <= skill <= 1:
            raise ValueError(f"skill = {skill}: must lie between 0 and 1")
        chance = random.Random(f"frozenlake demonstrations {seed}")
        maps = self._epochs(f"demonstrations/{seed}")
        return (_demonstration(next(maps).payload, skill, chance) for _ in range(n))

    def _epochs(self, stream: str) -> Iterator[Prompt]:
        """Each training map once an epoch; ``stream`` names the sequence."""
        for epoch in itertools.count():
            order = list(self._training)
            random.Random(f"frozenlake/{stream}/{epoch}").shuffle(order)
            for payload in order:
                yield _prompt(payload)


def _prompt(payload: str) -> Prompt:
    return splits.prompt_of(TASK, splits.key_of(payload), payload)


def _demonstration(payload: str, skill: float, chance: random.Random) -> tuple[tuple[int, ...], tuple[int, ...]]:
    cells = "".join(parse_map(payload))
    away = distances(payload)
    tokens = list(map_tokens(payload))
    mask = [0] * len(tokens)
    state = 0
    for _ in range(MAX_TURNS):
        move = chance.randrange(len(MOVES))
        if chance.random() < skill:
            closer = [m for m in range(len(MOVES)) if away[next_state(state, m)] == (away[state] or 0) - 1]
            move = chance.choice(closer)
        tokens += [_AT[state], _FIRST_MOVE + move, END_ID]
        mask += [0, 1, 1]
        state = next_state(state, move)
        if cells[state] in "GH":
            break
    return tuple(tokens), tuple(mask)
