"""Which eta a run speculates with (RollPacker 6.3): a light grid search in its first rounds. Pure; off unless a grid is given.

The measure is the paper's (figure 12): seconds of rollout for each trained prompt, over a *period*, the rounds up to and with
the next long one. Each value of the grid gets one period; the best one stays. Whoever has no long round (nothing is deferred)
never ends a period, and keeps the first value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class EtaSearch:
    """``grid``: the values in the order in which they are tried, for prompts and responses alike."""

    def __init__(self, grid: Sequence[float]) -> None:
        self._grid = tuple(grid)
        self._costs: list[float] = []  # seconds a prompt, of the values that had their period
        self._seconds = 0.0
        self._prompts = 0

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

    def ended(self, seconds: float, prompts: int, *, long: bool) -> None:
        """A round took ``seconds`` and gave ``prompts`` to train on."""
        if self.done:
            return
        self._seconds += seconds
        self._prompts += prompts
        if long:
            self._costs.append(self._seconds / max(1, self._prompts))
            self._seconds, self._prompts = 0.0, 0

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"costs": list(self._costs), "seconds": self._seconds, "prompts": self._prompts}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self._costs = [float(cost) for cost in state["costs"]][: len(self._grid)]
        self._seconds, self._prompts = float(state["seconds"]), int(state["prompts"])
