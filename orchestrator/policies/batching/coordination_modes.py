"""How rollout and training are coordinated: one table of modes, which the pipeline asks. Pure; the numbers are weight versions.

The modes are RollArt's baselines (7.1) and RollArt itself (6.2), run by the same code, so that a comparison compares the
coordination and nothing else. Each answers four questions: when may a trajectory start (:meth:`Mode.start_gate`), when is it too
stale (:meth:`Mode.staleness_bound`), what becomes of the rollout when its weights change (``overlaps``,
``carries_over``), and whether environments and rewards are waited for batch by batch (``batch_environments``,
``batch_rewards``).

A mode's promise about staleness, with *lag* as in :mod:`orchestrator.policies.batching.staleness`:

* ``sync``, ``sync_plus``: lag 0, trained at lag 0, one version a trajectory;
* ``one_off``: lag at most 1, trained at lag 1 at most, one version a trajectory;
* ``areal``: nothing about the lag when taken; only as many start as can be trained within ``alpha``;
* ``async``: lag at most ``alpha``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from orchestrator.policies.batching.staleness import StalenessBound, StartGate


@dataclass(frozen=True, slots=True)
class CoordinationMode:
    """One way to coordinate. ``alpha`` is the run's own, put in by :func:`coordination_mode`."""

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
        """Which trajectories may still be trained."""
        return StalenessBound(self.alpha, evicts=self.evicts)

    def start_gate(self, batch: int, redundancy: float, environments: int, limit: int | None = None) -> StartGate:
        """How many may start; arguments as in :class:`StartGate`. Without carrying over, a rollout is of one batch only:
        what it leaves when its batch is complete is ended as redundant, so that starting more would be waste."""
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
    """The mode of a run. ``KeyError``: no such mode; what fits together :func:`alpha_conflict` says."""
    return replace(MODES[name], alpha=alpha)


def alpha_conflict(name: str, alpha: int) -> str:
    """Why ``alpha`` cannot be this mode's, with the fix; empty: it can."""
    kind = MODES[name]
    least, most = kind.least_alpha, kind.most_alpha
    if alpha >= least and (most is None or alpha <= most):
        return ""
    if alpha == 0:
        return f"alpha = 0 is synchronous, but run.mode = {name!r} is not: set run.mode='sync' or 'sync_plus', or alpha >= 1"
    return f"must be {most} when run.mode is {name!r} (set rollout.alpha={most}, or run.mode='async')"
