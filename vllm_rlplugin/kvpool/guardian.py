"""The serving side of a pool: it decides what rollout engines may have, and takes it back (ROSE 4.1).

Guarantees: the decisions are those of :class:`orchestrator.policies.kv_sharing.KvSharing`, over all rollout engines together;
each of them gets an equal share. The serving engine never waits here: a tick reads the ledger, and now and then writes a budget.
A rollout engine that does not give back in time is killed, if its process can be seen and holds this pool's file (a process
number may mean another process in another namespace); else that is said once, and its pages stay where they are.

Opened when a rollout engine joins, and by :meth:`Guardian.open` at the beginning of each RL step. ``now``: seconds, monotonic.
"""

from __future__ import annotations

import logging
import os
import signal
from collections import deque
from collections.abc import Callable
from pathlib import Path

from orchestrator.policies.kv_sharing import Budget, KvSharing, SharingRules
from vllm_rlplugin.kvpool.ledger import PagePool, PoolView, TenantView

_TICK = 0.005  # seconds between two looks

_logger = logging.getLogger(__name__)


class Guardian:
    """Of the serving tenant of ``pool``, which has joined. ``window``: seconds over which serving's peak counts."""

    def __init__(self, pool: PagePool, rules: SharingRules, now: Callable[[], float], window: float = 60.0) -> None:
        self._pool = pool
        self._now = now
        self._window = window
        self._sharing = KvSharing(rules)
        self._peaks: deque[tuple[float, int]] = deque()  # falling maxima of the window
        self._known: dict[tuple[int, int], int] = {}  # (slot, generation) -> pages it was told
        self._looked = float("-inf")
        self._blamed: set[tuple[int, int]] = set()
        self.kills = self.cuts = 0
        pool.set_headroom(rules.headroom_pages)

    @property
    def budget(self) -> Budget:
        """Of all rollout engines together."""
        return self._sharing.budget

    def open(self) -> Budget:
        """An RL step begins: budgets anew, from serving's recent peak."""
        view, now = self._pool.view(), self._now()
        self._note(view, now)
        budget = self._sharing.open(now, self._peak(), _used(view))
        self._tell(view, budget)
        return budget

    def tick(self) -> None:
        """Before a step, and when there is nothing to do."""
        now = self._now()
        if now - self._looked < _TICK:
            return
        self._looked = now
        self._pool.reap()  # also those that were killed a moment ago
        view = self._pool.view()
        if not _rollouts(view):
            self._known.clear()
            return
        self._note(view, now)
        if any((tenant.slot, tenant.generation) not in self._known for tenant in _rollouts(view)):
            self._sharing.open(now, self._peak(), _used(view))
        before = self._sharing.budget
        budget = self._sharing.observe(now, _serving(view), _used(view))
        self.cuts += budget.pages < before.pages
        if budget.kill:
            budget = self._end(view, budget)
            view = self._pool.view()
        self._tell(view, budget)

    def _note(self, view: PoolView, now: float) -> None:
        used = _serving(view)
        while self._peaks and self._peaks[-1][1] <= used:
            self._peaks.pop()
        self._peaks.append((now, used))
        while self._peaks[0][0] < now - self._window:
            self._peaks.popleft()

    def _peak(self) -> int:
        return self._peaks[0][1] if self._peaks else 0

    def _tell(self, view: PoolView, budget: Budget) -> None:
        tenants = _rollouts(view)
        share = budget.pages // len(tenants) if tenants else 0
        told: dict[tuple[int, int], int] = {}
        for tenant in tenants:
            key = (tenant.slot, tenant.generation)
            told[key] = share
            if self._known.get(key) != share:
                self._pool.set_budget(tenant.slot, share, tenant.revision + 1)
        self._known = told

    def _end(self, view: PoolView, budget: Budget) -> Budget:
        """Kill those that hold more than their share."""
        tenants = _rollouts(view)
        share = budget.pages // max(1, len(tenants))
        gone = [tenant for tenant in tenants if tenant.used > share and self._kill(tenant)]
        if not gone:
            return budget
        self.kills += len(gone)
        return self._sharing.killed() if len(gone) == len(tenants) else budget

    def _kill(self, tenant: TenantView) -> bool:
        key = (tenant.slot, tenant.generation)
        if not _holds(tenant.pid, self._pool.path):
            if key not in self._blamed:
                self._blamed.add(key)
                text = (
                    "rollout engine %s holds %d pages more than it may, and its process %d cannot be killed from here"
                )
                _logger.error(text, tenant.name, tenant.used - tenant.budget, tenant.pid)
            return False
        _logger.warning(
            "rollout engine %s did not give back its pages in time: process %d is killed", tenant.name, tenant.pid
        )
        os.kill(tenant.pid, signal.SIGKILL)
        return True


def _rollouts(view: PoolView) -> list[TenantView]:
    return [tenant for tenant in view.tenants if tenant.role == "rollout"]


def _used(view: PoolView) -> int:
    return sum(tenant.used for tenant in _rollouts(view))


def _serving(view: PoolView) -> int:
    return view.serving.used if view.serving is not None else 0


def _holds(pid: int, path: Path) -> bool:
    """Whether this process has the file open."""
    try:
        wanted = path.stat()
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            try:
                found = entry.stat()
            except FileNotFoundError:
                continue
            if (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino):
                return True
    except (FileNotFoundError, PermissionError, ProcessLookupError):
        return False
    return False
