"""Seconds in sandboxes that score code, fixed timeout over adaptive timeout, on answers of which one in eight never ends.

The way of a run: the coding task's reward function in the embedded host, over HTTP, in bubblewrap, 16 answers to each of 4
problems in two rounds, in an order that follows from the seed. One answer in eight of each round does not end (most wait, some
compute), one is wrong, the rest are right; for every other problem right answers take 0.3 s a test case. Both sides judge each
test case in a sandbox of its own and stop at the first that fails; the fixed side has RollPacker's 30 s a test case, the adaptive
one its formula (4.3). Quick: 4 s instead of 30, 0.5 instead of 2, 2 problems. ``wrongly_cut``: right answers without reward.

Times are summed over the answers, as if one processor scored them: what a step waits for depends on how many do.
"""

from __future__ import annotations

import asyncio
import os
import random
import zlib
from dataclasses import asdict
from typing import Any

from orchestrator.api import Prompt, Trajectory, Turn
from orchestrator.policies.episodes.adaptive_timeouts import AdaptiveTimeouts
from orchestrator.rewards.host_launch import RewardHost
from orchestrator.rewards.reward_client import HttpReward
from orchestrator.tasks import coding_problems
from orchestrator.tasks.coding import CodingTask
from orchestrator.tasks.vocabulary import CHARACTERS
from scripts.bench.result import frame, now

NAME = "reward-timeout"
_ANSWERS, _ROUNDS = 8, 2  # of a problem in a round
_BAR = 2.0
_PAPER = 1.6  # RollPacker figure 14c: rollout and reward together
_WAITS = "import time\ndef f(x):\n while 1:\n  time.sleep(1)"
_COMPUTES = "def f(x):\n while 1:\n  pass"
_WRONG = "def f(x):\n return None"
_SLOW = "import time\n{solution}\ng=f\ndef f(x):\n time.sleep(0.3)\n return g(x)"


class Fixed(AdaptiveTimeouts):
    """The same, but that nothing is learned."""

    def limits(self, prompt: str) -> list[float]:
        """Every test case has ``most``."""
        return []


def run(quick: bool, nonce: str) -> dict[str, Any]:
    """Measure."""
    begun = now()
    seed, problems = zlib.crc32(nonce.encode()), 2 if quick else 4
    limits = (1.5, 0.5, 4.0) if quick else (1.5, 2.0, 30.0)
    rows = {
        name: asyncio.run(_scored(kind(*limits), problems, seed))
        for name, kind in (("fixed", Fixed), ("adaptive", AdaptiveTimeouts))
    }
    value = round(rows["fixed"]["seconds"] / rows["adaptive"]["seconds"], 3)
    wrongly_cut = rows["adaptive"]["right_without_reward"] + rows["fixed"]["right_without_reward"]
    return frame(
        NAME,
        "real",
        value=value,
        unit="sandbox seconds with the fixed timeout over those with the adaptive one",
        reference="speed-up of rollout and reward together (RollPacker, figure 14c, paper)",
        reference_value=_PAPER,
        bar=f">= {_BAR:g}, and no right answer cut off",
        holds=value >= _BAR and wrongly_cut == 0,
        detail={
            "factor": limits[0],
            "least": limits[1],
            "most": limits[2],
            "problems": problems,
            "answers": problems * _ANSWERS * _ROUNDS,
            "wrongly_cut": wrongly_cut,
            **rows,
            "load_average": os.getloadavg()[0],
        },
        quick=quick,
        nonce=nonce,
        begun=begun,
    )


async def _scored(timeouts: AdaptiveTimeouts, problems: int, seed: int) -> dict[str, Any]:
    """All answers, round after round."""
    chance, whole = random.Random(seed), 300.0
    names = list(dict.fromkeys(coding_problems.draw(chance) for _ in range(50 * problems)))[:problems]
    host = RewardHost(str(CodingTask.reward), concurrency=8, timeout=whole + 30.0, idle_seconds=60.0)
    await host.start()
    reward = HttpReward(host.url, token=host.token, timeouts=timeouts, whole=whole, timeout=whole + 60.0, concurrency=8)
    by_round, right_without_reward = [], 0
    try:
        for _ in range(_ROUNDS):
            before = timeouts.counts.seconds
            answers = [(place, *answer) for place, name in enumerate(names) for answer in _answers(place, name, chance)]
            chance.shuffle(answers)
            rewards = await asyncio.gather(
                *(reward.score(_trajectory(names[place], said)) for place, said, _ in answers)
            )
            right_without_reward += sum(
                is_right and not got for (_, _, is_right), got in zip(answers, rewards, strict=True)
            )
            by_round.append(round(timeouts.counts.seconds - before, 2))
    finally:
        await reward.close()
        await host.stop()
    counted = {name: round(value, 2) for name, value in asdict(timeouts.counts).items()}
    return {**counted, "seconds_by_round": by_round, "right_without_reward": right_without_reward}


def _answers(place: int, name: str, chance: random.Random) -> list[tuple[str, bool]]:
    """What a group says to one problem, and whether it is right."""
    solution = coding_problems.problem(name).solution
    right = _SLOW.format(solution=solution) if place % 2 else solution
    endless = _COMPUTES if chance.random() < 0.25 else _WAITS
    return [(endless, False), (_WRONG, False), *[(right, True)] * (_ANSWERS - 2)]


def _trajectory(name: str, said: str) -> Trajectory:
    action = CHARACTERS.turn(said)
    turn = Turn((2,), action, (0.0,) * len(action), ((0, len(action)),))
    prompt = Prompt(name, CodingTask.name, 0, name)
    return Trajectory("t", "g", CodingTask.name, prompt, (turn,), None, "1", 0, False)
