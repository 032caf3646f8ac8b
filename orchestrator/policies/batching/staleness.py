"""The staleness bound alpha (RollArt 6.2), per trajectory, and the gate on new starts that follows from it.

Guarantee: no trajectory is given to the trainer whose lag exceeds alpha. The *lag* is the trainer's version when ``get_batch``
takes the trajectory, minus the version of its first token. A batch is collected while the previous one is still training, so
the lag when it is trained can be one more; both are reported. ``alpha = 0`` is synchronous.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class StalenessBound:
    """``alpha`` counts weight versions. ``evicts`` False: staleness is only limited at the start, by the gate."""

    alpha: int
    evicts: bool = True

    def lag(self, trainer_version: int, first_version: int) -> int:
        """How many versions the trainer is ahead of the trajectory's first token."""
        return trainer_version - first_version

    def admissible(self, trainer_version: int, first_version: int) -> bool:
        """Whether a trajectory may still be used. Checked at every turn boundary, at eviction and in ``get_batch``."""
        return not self.evicts or self.lag(trainer_version, first_version) <= self.alpha


@dataclass(frozen=True, slots=True)
class StartGate:
    """How many trajectories may be in progress: no more than can still be trained on in time.

    A trajectory that starts now has the rollout's version, and must be trained on before the trainer is more than ``alpha``
    ahead of it. If training of the next batch is ``lead`` versions ahead already (a step in progress counts), there are
    ``alpha + 1 - lead`` batches left that it can join, so finished and unfinished trajectories together never exceed that many
    batches (and so never alpha + 1, the bound of RollArt 6.2). Running further ahead gains no throughput: it is possible only
    if the trainer is the bottleneck. ``redundancy`` adds slack, so that the last trajectories of a batch do not leave the
    engine idle; what is left over crosses the update and may still be used by the next step.
    """

    alpha: int
    batch: int  # trajectories a training step takes
    redundancy: float  # launched over needed (RollArt 6.3), >= 1
    environments: int  # trajectories in flight at most
    batches: int | None = None  # between start and training at most, whatever alpha allows
    limit: int | None = None  # of trajectories between start and training, whatever alpha allows (notes, 7)

    @property
    def capacity(self) -> int:
        """The largest number of trajectories that can wait in the buffer: alpha times the environments, plus what is started
        for one batch (RollArt 6.2 gives the order, O(alpha E))."""
        return self.alpha * self.environments + math.ceil(self.batch * self.redundancy)

    def most_under_way(self, lead: int) -> int:
        """The largest number of trajectories between start and training."""
        batches = self.alpha + 1 - lead
        if self.batches is not None:
            batches = min(batches, self.batches)
        bound = min(max(0, batches) * math.ceil(self.batch * self.redundancy), self.capacity)
        return bound if self.limit is None else min(bound, self.limit)

    def following(self, launched: float, groups: int, filtered: int) -> StartGate:
        """The gate for the batch after one of ``groups`` groups in which ``filtered`` more had to be replaced: it starts that
        many more at once; ``launched`` is the redundancy without filtering (ROSE 6, from DAPO). Filtered groups are never
        trained on, so as many batches stay in progress as before; ``environments`` and ``limit`` still apply."""
        return replace(self, redundancy=launched * (groups + filtered) / groups)

    def may_start(self, group_size: int, in_flight: int, waiting: int, lead: int) -> bool:
        """Whether a whole group may start, given trajectories in flight and those finished but not yet in training."""
        return in_flight + group_size <= self.environments and in_flight + waiting + group_size <= self.most_under_way(
            lead
        )

    def refusal_reason(self, group_size: int, in_flight: int, waiting: int, lead: int) -> str:
        """Why a group may not start, in words."""
        if in_flight + group_size > self.environments:
            return f"{in_flight} of {self.environments} environments busy"
        ahead = in_flight + waiting
        bound = self.most_under_way(lead)
        if bound == self.limit:
            return f"{ahead} trajectories ahead of the trainer, rollout.buffer_limit = {bound}"
        return f"{ahead} trajectories ahead of the trainer, {bound} can be trained within alpha = {self.alpha}"
