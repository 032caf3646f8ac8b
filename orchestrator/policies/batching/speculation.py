"""Which eta a run speculates with (RollPacker 6.3): a light grid search in its first rounds. Pure; off unless a grid is given.

The measure is the paper's (figure 12): seconds of rollout for each trained prompt over a *period*, the rounds up to and with
the next long one. Each value of the grid gets one period, in turn; the one with the fewest seconds a prompt stays.

A long round plays P0 deferred prompts, whichever value deferred them, so it is charged to a value in the share that this value
deferred: over a period ``(short + long x deferred / P0) / (short prompts + deferred)``, which is what the value costs however
many rounds its queue took to fill. Guarantees: a round without speculation at an epoch's end is as good as a long one, and a
short one that had to fill up without counts for no value; a value that defers nothing (an eta of 1) has no long round, and its
period ends after :data:`UNDEFERRED` short ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

UNDEFERRED = 4  # short rounds that end the period of a value with which nothing is deferred


class EtaSearch:
    """``grid``: the values in the order in which they are tried, for prompts and responses alike."""

    def __init__(self, grid: Sequence[float]) -> None:
        self._grid = tuple(grid)
        self._costs: list[float] = []  # seconds a prompt, of the values that had their period
        self._begin_period()

    def _begin_period(self) -> None:
        """A period begins."""
        self._seconds = 0.0  # of its short rounds
        self._rounds = 0
        self._prompts = 0
        self._deferred = 0

    @property
    def eta(self) -> float:
        """To launch the next round with."""
        tried = len(self._costs)
        return self._grid[tried] if tried < len(self._grid) else self._grid[self._costs.index(min(self._costs))]

    @property
    def done(self) -> bool:
        """Whether each value had its period."""
        return len(self._costs) == len(self._grid)

    @property
    def costs(self) -> dict[float, float]:
        """Seconds a trained prompt, by eta."""
        return dict(zip(self._grid, self._costs, strict=False))

    def round_ended(self, seconds: float, prompts: int, *, long: bool, deferred: int = 0) -> None:
        """A round took ``seconds`` and gave ``prompts`` to train on; ``deferred`` others go to long rounds."""
        if self.done or (long and not self._rounds):
            return  # a second long round on end is of the value before
        if long:
            self._end_period(self._seconds + seconds * self._deferred / max(1, prompts))
            return
        self._seconds += seconds
        self._rounds += 1
        self._prompts += prompts
        self._deferred += deferred
        if self._rounds >= UNDEFERRED and not self._deferred:
            self._end_period(self._seconds)

    def _end_period(self, seconds: float) -> None:
        """A period took so many seconds."""
        self._costs.append(seconds / max(1, self._prompts + self._deferred))
        self._begin_period()

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        period = {"seconds": self._seconds, "rounds": self._rounds, "prompts": self._prompts}
        return {"costs": list(self._costs), **period, "deferred": self._deferred}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self._costs = [float(cost) for cost in state["costs"]][: len(self._grid)]
        self._begin_period()
        if "deferred" in state:  # else of an older version, whose period begins anew
            self._seconds, self._rounds = float(state["seconds"]), int(state["rounds"])
            self._prompts, self._deferred = int(state["prompts"]), int(state["deferred"])
