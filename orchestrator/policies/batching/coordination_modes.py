"""How rollout and training are coordinated: one table of modes, which the pipeline asks. Pure; the numbers are weight
versions.

The modes are RollArt's baselines (7.1) and RollArt itself (6.2), run by the same code, so that a comparison compares only the
coordination. Each answers four questions: when may a trajectory start (:meth:`CoordinationMode.start_gate`), when is it too
stale (:meth:`CoordinationMode.staleness_bound`), what happens to the rollout when its weights change (``overlaps``,
``carries_over``), and whether environments and rewards are synchronised batch by batch (``batch_environments``,
``batch_rewards``).

What a mode guarantees about staleness, with *lag* as in :mod:`orchestrator.policies.batching.staleness`:

* ``sync``, ``sync_plus``: lag 0, also when trained; one version per trajectory;
* ``one_off``: lag at most 1, also when trained; one version per trajectory;
* ``areal``: no bound on lag; only as many start as can be trained within ``alpha``;
* ``async``: lag at most ``alpha``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from orchestrator.policies.batching.staleness import StalenessBound, StartGate


@dataclass(frozen=True, slots=True)
class CoordinationMode:
    """One way to coordinate. ``alpha``: the run's own, set by :func:`coordination_mode`."""

    name: str
    overlaps: bool  # a training step runs beside the rollout of a later batch
    carries_over: bool  # what is in flight when the weights change goes on under the new ones, KV recomputed
    evicts: bool = True  # the bound is checked after the start too: at turn boundaries, updates and get_batch
    batch_environments: bool = False  # all trajectories take their turns in step (RollArt figure 5b)
    batch_rewards: bool = False  # rewards are asked for when all trajectories in flight have ended, not one by one
    least_alpha: int = 0  # of ``rollout.alpha``
    most_alpha: int | None = 0  # None: any
    alpha: int = 0

    def staleness_bound(self) -> StalenessBound:
        """Which trajectories may still be trained on."""
        return StalenessBound(self.alpha, evicts=self.evicts)

    def start_gate(self, batch: int, redundancy: float, environments: int, limit: int | None = None) -> StartGate:
        """How many may start; arguments as in :class:`StartGate`. Without ``carries_over`` a rollout collects a single batch:
        what is left when the batch is complete is aborted as redundant, so starting more would be wasteful."""
        return StartGate(self.alpha, batch, redundancy, environments, None if self.carries_over else 1, limit)


_SYNC = CoordinationMode("sync_plus", overlaps=False, carries_over=False)
_ASYNC = CoordinationMode("async", overlaps=True, carries_over=True, least_alpha=1, most_alpha=None)
MODES: dict[str, CoordinationMode] = {
    "sync": replace(_SYNC, name="sync", batch_environments=True, batch_rewards=True),
    "sync_plus": _SYNC,
    "one_off": CoordinationMode("one_off", overlaps=True, carries_over=False, least_alpha=1, most_alpha=1),
    "areal": replace(_ASYNC, name="areal", evicts=False),
    "async": _ASYNC,
}


def coordination_mode(name: str, alpha: int) -> CoordinationMode:
    """The mode of a run. Raises KeyError for an unknown mode; :func:`alpha_conflict` checks ``alpha``."""
    return replace(MODES[name], alpha=alpha)


def alpha_conflict(name: str, alpha: int) -> str:
    """Why this mode cannot have ``alpha``, with the fix; empty if it can."""
    kind = MODES[name]
    least, most = kind.least_alpha, kind.most_alpha
    if alpha >= least and (most is None or alpha <= most):
        return ""
    if alpha == 0:
        return f"alpha = 0 is synchronous, but run.mode = {name!r} is not: set run.mode='sync' or 'sync_plus', or alpha >= 1"
    return f"must be {most} when run.mode is {name!r} (set rollout.alpha={most}, or run.mode='async')"
