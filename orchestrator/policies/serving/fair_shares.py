"""How many servers of one fleet each of several RL jobs has: shares by weight, of those who want any.

Guarantees:

* Servers are dealt one by one to the job that has fewest for its weight (the highest averages of d'Hondt), after everybody who
  wants one has one. Nobody gets more than it wants; what one does not want others have.
* A job that holds a server has it before one of equal right that does not: a deal that was carried out is dealt the same again,
  by whoever computes it, so no server goes back and forth.
* Jobs of one weight that want more differ by one server at most.

An engine has the weights of one job, so what is shared is servers, and never the turns of one. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

Job = TypeVar("Job", str, tuple[str, str])


@dataclass(frozen=True, slots=True)
class FleetTenant:
    """A job: how many servers it ``held`` when it was looked at, how many it ``wanted``, those included, and its ``weight``."""

    held: int
    wanted: int
    weight: float = 1.0

    def __post_init__(self) -> None:
        if self.held < 0 or self.wanted < 0 or not 0 < self.weight < math.inf:
            raise ValueError(f"{self}: counts from 0, a weight above 0")


def fair_shares(tenants: Mapping[Job, FleetTenant], servers: int) -> dict[Job, int]:
    """Servers of each job, of so many in all."""
    shares = dict.fromkeys(tenants, 0)

    def claim(job: Job) -> tuple[bool, float, bool, Job]:
        had, tenant = shares[job], tenants[job]
        return had > 0, (had + 1) / tenant.weight, tenant.held <= had, job

    for _ in range(servers):
        asking = [job for job, tenant in tenants.items() if shares[job] < tenant.wanted]
        if not asking:
            break
        shares[min(asking, key=claim)] += 1
    return shares
