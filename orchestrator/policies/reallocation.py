"""How many devices each rollout engine has in the next step: the resource manager between steps (Heddle 6.2).

What :func:`orchestrator.policies.degrees.allocate` finds for the lengths that are expected is compared with the degrees that the
engines have. Guarantees:

* A change is charged: it is made only where the seconds a step that it is expected to gain, over ``horizon`` steps or those that
  are left, exceed what changes have cost: measured; before the first one ``start_seconds``.
* A gain is what the model says of the step's share, times the seconds that the step took: the model need not know the machine's
  own speed, only how the degrees compare.
* Degrees in which the engines did not come up are not asked for again. The degrees always use all devices, in descending order.

Pure: seconds come in as numbers, random numbers from the given source. The same object serves a run and the simulator.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from orchestrator.policies.degrees import allocate
from orchestrator.policies.placement import Speed, cut

SpeedOfDegree = Callable[
    [int, int, float], Speed
]  # (devices, most at once, mean tokens of each) -> what an engine does
_MEMORY = 0.5  # weight of the newest of several measurements of a change


@dataclass(frozen=True, slots=True)
class Reallocated:
    """For the next step. ``gain``: seconds a step expected of ``degrees`` over the present ones; ``cost``: seconds charged.
    ``makespan``, ``present``: of the model, best and now. ``reason``: why it changes, or why not although others are better."""

    degrees: tuple[int, ...]
    changes: bool = False
    reason: str = ""
    gain: float = 0.0
    cost: float = 0.0
    makespan: float = 0.0
    present: float = 0.0


class Reallocation:
    """One run's. ``options``: degrees on offer; ``degrees``: those that it begins with, of all ``devices``. Raises ValueError."""

    def __init__(
        self,
        devices: int,
        options: Sequence[int],
        speed_of: SpeedOfDegree,
        rng: random.Random,
        *,
        degrees: Sequence[int] = (),
        horizon: int = 4,
        start_seconds: float = 0.0,
        per_server: int = 8,
    ) -> None:
        self.devices, self.options = devices, tuple(sorted(set(options), reverse=True))
        self.degrees = tuple(sorted(degrees, reverse=True)) or (1,) * devices
        if sum(self.degrees) != devices or not set(self.degrees) <= set(self.options):
            raise ValueError(f"{self.degrees}: of the degrees {self.options}, {devices} devices in all")
        if horizon < 1 or start_seconds < 0:
            raise ValueError("horizon >= 1, start_seconds >= 0")
        self._speed_of, self._rng = speed_of, rng
        self._horizon, self._per_server = horizon, per_server
        self._cost = start_seconds
        self._measured = False
        self._failed: dict[tuple[int, ...], str] = {}

    def after(self, lengths: Sequence[float], seconds: float, steps_left: int) -> Reallocated:
        """A step has ended. ``lengths``: tokens of each trajectory expected in the next one; ``seconds``: that this one's rollout
        took. Whoever carries it out says :meth:`changed` or :meth:`failed`."""
        if not lengths or not all(math.isfinite(length) and length >= 0 for length in lengths):
            return Reallocated(self.degrees, reason="nothing is known of the next step's lengths")
        mean = sum(lengths) / len(lengths)
        speeds = {degree: self._speed_of(degree, len(lengths), mean) for degree in self.options}
        try:
            found = allocate(lengths, self.devices, speeds, self._rng, per_server=self._per_server)
        except ValueError as error:
            return Reallocated(self.degrees, reason=str(error))
        present = self._makespan(lengths, speeds)
        share = 1.0 - found.makespan / present if 0 < present < math.inf else 1.0 if present else 0.0
        gain, horizon = share * max(0.0, seconds), min(self._horizon, steps_left)
        answer = Reallocated(self.degrees, False, "", gain, self._cost, found.makespan, present)
        if found.degrees == self.degrees or share <= 0:
            return answer
        named = written(found.degrees)
        if why := self._failed.get(found.degrees):
            return _because(answer, f"{named} did not come up: {why}")
        if gain * horizon <= self._cost:
            text = f"{named} would gain {gain:.3g} s a step over {horizon} steps, and costs {self._cost:.3g} s"
            return _because(answer, text)
        text = f"{named} gains {share:.0%} of a step"
        return Reallocated(found.degrees, True, text, gain, self._cost, found.makespan, present)

    def changed(self, degrees: Sequence[int], seconds: float) -> None:
        """The change was made; ``seconds``: engines stood still for so long."""
        self.degrees = tuple(sorted(degrees, reverse=True))
        self._charge(seconds)

    def failed(self, degrees: Sequence[int], seconds: float, why: str) -> None:
        """The engines did not come up so, and have the old degrees again."""
        self._failed[tuple(sorted(degrees, reverse=True))] = why
        self._charge(seconds)

    @property
    def cost(self) -> float:
        """Seconds that a change is charged with."""
        return self._cost

    def _charge(self, seconds: float) -> None:
        self._cost = (1 - _MEMORY) * self._cost + _MEMORY * seconds if self._measured else seconds
        self._measured = True

    def _makespan(self, lengths: Sequence[float], speeds: dict[int, Speed]) -> float:
        """Of the present degrees; infinite where they do not hold all."""
        workers = [speeds[degree] for degree in self.degrees]
        if sum(worker.capacity for worker in workers) < len(lengths):
            return math.inf
        return cut(sorted(lengths, reverse=True), workers)[1]


def expected_lengths(ended: Sequence[float], in_flight: Sequence[float], count: int) -> list[float]:
    """Of the ``count`` trajectories of the next step: those in flight by their forecasts, the others as those that ended, evenly
    over their distribution."""
    known, spread = [*in_flight][:count], sorted(ended)
    fresh = count - len(known) if spread else 0
    return [*known, *(spread[(2 * number + 1) * len(spread) // (2 * fresh)] for number in range(fresh))]


def written(degrees: Sequence[int]) -> str:
    """For people: 4+2+1+1."""
    return "+".join(map(str, degrees))


def _because(answer: Reallocated, reason: str) -> Reallocated:
    return Reallocated(
        answer.degrees, False, reason, answer.gain, answer.cost, makespan=answer.makespan, present=answer.present
    )
