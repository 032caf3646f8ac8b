"""What a run writes to disk does not hold its event loop up: long values are written in pieces, and are what they were."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.api import ContextStart, Prompt, Trajectory, Turn
from orchestrator.api.jsontext import PIECE, pieces
from orchestrator.checkpoint import CheckpointState
from orchestrator.runtime.run_records import BesideTheLoop
from orchestrator.store import TrajectoryStore, read_trajectories, to_trajectory
from scripts.bench.micro.stalls import StallWatch

LONG = 3 * PIECE + 5


def a_turn(tokens: int, context: bool = False) -> Turn:
    ids = tuple(index * 7919 % 150_000 for index in range(tokens))
    logprobs = tuple(-1.0 / (index + 3) for index in range(tokens))
    start = ContextStart(ids[:9], "summary", 2, 30) if context else None
    return Turn(ids[: tokens // 4], ids, logprobs, ((3, tokens),) if tokens else (), 0.5, context=start)


def a_trajectory(name: str, *tokens: int) -> Trajectory:
    turns = tuple(a_turn(number, context=index > 0) for index, number in enumerate(tokens))
    prompt = Prompt("p", "task", 1, 'quote " and \u00e9')
    return Trajectory(name, "g", "task", prompt, turns, 1.0, "1", 7, False, ("once",))


def a_state(*buffer: Trajectory) -> CheckpointState:
    return CheckpointState(3, 2, 900, 12.5, buffer, ((0, 0.25),), {"queue": [1, {"deep": []}]}, {"p": [0.5]}, None)


@pytest.mark.parametrize("separators", [(", ", ": "), (",", ":")], ids=str)
@pytest.mark.parametrize(
    "value",
    [
        *(None, 1.5, "x", [], {}, (), {"a": {}, "b": [{}], 3: None}, [[1], [2, [3]]], list(range(LONG))),
        *(["\u00e9"] * LONG, [None, 1], {"deep": {"er": [0.1] * PIECE}}),
    ],
    ids=lambda value: str(value)[:20],
)
def test_pieces_make_the_text_that_json_makes(value: Any, separators: tuple[str, str]) -> None:
    assert "".join(pieces(value, separators)) == json.dumps(value, separators=separators)


def test_a_checkpoint_is_the_json_of_before_and_no_piece_of_it_is_long(tmp_path: Path) -> None:
    state = a_state(a_trajectory("a", LONG, 0, 5), a_trajectory("b"))
    whole = json.dumps({"format": 1, **asdict(state)})
    parts = list(pieces({"format": 1, **vars(state)}))
    assert "".join(parts) == whole
    assert max(map(len, parts)) < 25 * PIECE
    checkpoints = BesideTheLoop(tmp_path, 1)
    folder = asyncio.run(checkpoints.committed(checkpoints.begin(3), state))
    assert (folder / "state.json").read_text() == whole
    found = checkpoints.newest()
    assert found is not None
    assert found[1:] == (state, [])


def test_a_checkpoint_of_a_million_tokens_lets_the_loop_go_on(tmp_path: Path) -> None:
    """It held the loop up for most of the time that it took: one call of Python's encoder, which gives the lock to nobody."""
    one = a_trajectory("a", *[2048] * 8)
    state = a_state(*(replace(one, id=f"t{index}") for index in range(64)))

    async def scenario() -> tuple[float, float]:
        watch = StallWatch(0.03).start()
        await asyncio.sleep(0.05)
        checkpoints, started = BesideTheLoop(tmp_path, 1), time.perf_counter()
        await checkpoints.committed(checkpoints.begin(3), state)
        took = time.perf_counter() - started
        await asyncio.sleep(0.05)
        return took, max((stall.own for stall in watch.stop()), default=0.0)

    took, longest = asyncio.run(scenario())
    assert longest < max(0.05, took / 10), f"{longest:.3f} s of {took:.3f} s"


def test_what_the_store_is_given_comes_back_equal_whatever_its_length(tmp_path: Path) -> None:
    given = [a_trajectory(f"t{index}", *sizes) for index, sizes in enumerate([(), (0,), (5, 1), (LONG, 0, 3)])]
    store = TrajectoryStore(tmp_path)
    for trajectory in given:
        store.append(trajectory, 1, "trained")
    asyncio.run(store.flushed())
    store.close()
    found = {row["trajectory_id"]: to_trajectory(row) for row in read_trajectories(tmp_path).to_pylist()}
    assert found == {trajectory.id: trajectory for trajectory in given}
