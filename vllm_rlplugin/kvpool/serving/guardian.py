"""The serving side of a pool: it decides what rollout engines may have, and takes it back (ROSE 4.1).

Guarantees: the decisions are those of :class:`orchestrator.policies.serving.kv_sharing.KvSharing`, over all rollout
engines together; each of them that is active gets an equal share. The serving engine never waits here: a tick reads the
ledger, and now and then writes a budget. A rollout engine that does not give back in time is killed, if its process can
be seen and holds this pool's file (a process number may mean another process in another namespace); else that is said
once, and its pages stay where they are. One of several ranks of which one died has BROKEN seconds to end. One that
says that it loads weights has LOADING seconds for that first: its thread cannot give anything back meanwhile.

Opened when a rollout engine joins, by :meth:`Guardian.open_budget`, and when a rollout engine says that an RL step
begins. What the serving team says about the most that is lent holds from the next look on, in both directions. Before
each step it is seen whether there is anything to decide (serving's pages beyond what it may use, a cut that is not complied
with, no page where one was wanted): then everything is looked at, else every CALM seconds, and so that an idle engine
reacts too by a thread (:meth:`Guardian.watch`) when there was no step for BUSY seconds. What a rollout engine cannot give
back while it lives (the pages of its null block) is on top of its budget. ``now``: seconds, monotonic.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from orchestrator.policies.serving.kv_sharing import KvBudget, KvSharing, SharingRules
from vllm_rlplugin.kvpool.ledger.page_ledger import LedgerStuck, PagePool, PoolError, PoolView, TenantGone, TenantView
from vllm_rlplugin.kvpool.ledger.tenant_processes import holds_file, kill_tenants
from vllm_rlplugin.kvpool.ledger.tenant_words import ControlWord, RolloutWords

_TICK = 0.02  # seconds between two looks
CALM = 0.25  # where a step finds nothing to decide
WATCH_SECONDS = 0.02  # between two looks of the thread
BUSY = 0.1  # seconds after a step in which the thread leaves looks to steps
BROKEN = 10.0  # seconds that a rollout engine that lost a rank has to end by itself
LOADING = 30.0  # seconds that a rollout engine may take to put weights into its model, before it is to give pages back

_logger = logging.getLogger(__name__)


class Guardian:
    """Of the serving tenant of ``pool``, which has joined. ``window``: seconds over which serving's peak counts."""

    def __init__(self, pool: PagePool, rules: SharingRules, now: Callable[[], float], window: float = 60.0) -> None:
        self._pool = pool
        self._now = now
        self._window = window
        self._own = rules
        self._sharing = KvSharing(rules)
        self._peaks: deque[tuple[float, int]] = deque()  # falling maxima of the window
        self._known: dict[tuple[int, int], int] = {}  # (slot, generation) -> pages it was told
        self._looked = self._stepped = float("-inf")
        self._most = math.inf  # pages of serving beyond which there is something to decide
        self._highest = 0  # most of its pages since the latest look
        self._short = False  # serving wanted pages that were not there
        self._blamed: set[tuple[int, int]] = set()
        self._broken: dict[tuple[int, int], float] = {}  # (slot, generation) -> since when a rank is missing
        self._flag, self._said = rules.lent, 0  # the share that is lent by flag; what people said last
        self._steps = pool.controls()[ControlWord.STEPS]
        self._said_by: dict[int, RolloutWords | None] = {}  # slot -> in this look
        self._lock = threading.Lock()
        self._over = threading.Event()
        self.rollouts: tuple[int, ...] = ()  # their slots, at the last look
        self.kills = self.cuts = 0
        pool.set_headroom(rules.headroom_pages)
        pool.control(ControlWord.FLAG, round(rules.lent * 1e6) + 1)

    @property
    def budget(self) -> KvBudget:
        """Of all rollout engines together."""
        return self._sharing.budget

    @property
    def rules(self) -> SharingRules:
        """Those that hold now: ``lent`` may have been changed."""
        return self._sharing.rules

    def open_budget(self) -> KvBudget:
        """An RL step begins: budgets anew, from serving's recent peak."""
        with self._lock:
            self._said_by.clear()
            return self._open_budget(self._pool.view(), self._now())

    def partition(self, share: float) -> int:
        """From now on rollouts have this share of the pool, whatever serving needs, and serving the rest, which the caller sees
        to; 0: by the rules again. Returns the pages that serving may have. For comparisons: nobody gives way to anybody."""
        with self._lock:
            rules = replace(self._own, headroom=0.0, lent=share) if share else self._own
            self._flag, self._said = rules.lent, 0
            self._sharing = KvSharing(rules)
            self._peaks.clear()  # what serving used by other rules
            self._pool.control(ControlWord.LENT, 0)
            self._pool.set_headroom(rules.headroom_pages)
            self._known.clear()
            return rules.pages - int(share * rules.pages)

    def tick(self) -> None:
        """Look, unless somebody did a moment ago. A look that another thread is at is not waited for."""
        now = self._now()
        if now - self._looked >= _TICK and self._lock.acquire(blocking=False):
            try:
                self._tick(now)
            finally:
                self._lock.release()

    def tick_before_step(self, used: int) -> None:
        """The same, where there may be something to decide; the thread leaves it to steps while there are any. ``used``: pages
        that serving has now."""
        self._stepped = now = self._now()
        if used > self._highest:
            self._highest = used
        urgent = self._short or used > self._most or (self.rollouts and self._sharing.budget.state == "cut")
        if urgent or now - self._looked >= CALM:
            with contextlib.suppress(LedgerStuck):  # users' requests have the pages that they have
                self.tick()

    def note_shortage(self) -> None:
        """Serving wanted pages that were not there: somebody who has some may be gone."""
        self._short = True

    def watch(self, also: Callable[[], None]) -> None:
        """Look, and do ``also``, in a thread of its own until :meth:`stop`: an idle engine has no steps."""

        def run() -> None:
            pause = WATCH_SECONDS
            while not self._over.wait(pause):
                busy = self._now() - self._stepped < BUSY
                pause = BUSY if busy else WATCH_SECONDS
                if busy:
                    continue
                try:
                    self.tick()
                    also()
                except PoolError as error:  # a process is stopped inside the ledger; the next look may find it gone
                    _logger.warning("the pool could not be looked at: %s", error)

        threading.Thread(target=run, name="kv pool guardian", daemon=True).start()

    def stop(self) -> None:
        """End the thread."""
        self._over.set()

    def _open_budget(self, view: PoolView, now: float) -> KvBudget:
        self._record_peak(view, now)
        budget = self._sharing.begin_step(now, self._peak() + self._minimum(view), self._used(view))
        self._set_budgets(view, budget)
        return budget

    def _tick(self, now: float) -> None:
        self._looked, self._short = now, False
        self._said_by.clear()
        self._pool.reap()  # also those that were killed a moment ago
        view = self._pool.view()
        active = self._active(view)
        self.rollouts = tuple(tenant.slot for tenant in active)
        self._end_broken(view, now)
        self._read_controls(view, now)
        if not self.rollouts:
            self._known.clear()
            self._most = math.inf
            return
        self._record_peak(view, now)
        if any((tenant.slot, tenant.generation) not in self._known for tenant in active):
            self._sharing.begin_step(now, self._peak() + self._minimum(view), self._used(view))
        before = self._sharing.budget
        budget = self._sharing.observe(now, _serving(view) + self._minimum(view), self._used(view))
        self.cuts += budget.pages < before.pages
        if budget.kill:
            budget = self._kill_overdrawn(view, budget)
            view = self._pool.view()
        self._set_budgets(view, budget)

    def _read_controls(self, view: PoolView, now: float) -> None:
        """What people and rollout engines have asked for."""
        controls = self._pool.controls()
        if controls[ControlWord.LENT] != self._said:
            self._said = controls[ControlWord.LENT]
            share = (self._said - 1) / 1e6 if self._said else self._flag
            self._record_peak(view, now)
            self._sharing.limit_share(now, min(1.0, share), self._used(view))
            self._open_budget(view, now)
        if controls[ControlWord.STEPS] != self._steps:
            self._steps = controls[ControlWord.STEPS]
            self._open_budget(view, now)
        self._pool.control(ControlWord.LOOKS, 1, add=True)

    def _record_peak(self, view: PoolView, now: float) -> None:
        used, self._highest = max(_serving(view), self._highest), 0
        while self._peaks and self._peaks[-1][1] <= used:
            self._peaks.pop()
        self._peaks.append((now, used))
        while self._peaks[0][0] < now - self._window:
            self._peaks.popleft()

    def _peak(self) -> int:
        return self._peaks[0][1] if self._peaks else 0

    def _set_budgets(self, view: PoolView, budget: KvBudget) -> None:
        tenants = self._active(view)
        share = budget.pages // len(tenants) if tenants else 0
        self._most = self._sharing.most - self._minimum(view)
        told: dict[tuple[int, int], int] = {}
        for tenant in tenants:
            key = (tenant.slot, tenant.generation)
            told[key] = pages = share + self._minimum_pages(tenant)
            if self._known.get(key) != pages:
                with contextlib.suppress(TenantGone):  # it left since it was looked at: the next look knows
                    self._pool.set_budget(tenant.slot, pages, tenant.revision + 1)
        self._known = told

    def _kill_overdrawn(self, view: PoolView, budget: KvBudget) -> KvBudget:
        """Kill those that hold more than their share."""
        tenants = self._active(view)
        share = budget.pages // max(1, len(tenants))
        gone = [
            tenant
            for tenant in tenants
            if tenant.used > share + self._minimum_pages(tenant)
            and not self._is_loading(tenant)
            and self._kill_tenant(tenant)
        ]
        if not gone:
            return budget
        self.kills += len(gone)
        return self._sharing.record_kill() if len(gone) == len(tenants) else budget

    def _end_broken(self, view: PoolView, now: float) -> None:
        """vLLM ends the ranks of an engine that lost one; where it hangs, they end here, as their pages are nobody's use."""
        broken = {(tenant.slot, tenant.generation): tenant for tenant in _rollouts(view) if tenant.broken}
        self._broken = {key: self._broken.get(key, now) for key in broken}
        for key, tenant in broken.items():
            if now - self._broken[key] >= BROKEN:
                self._kill_tenant(tenant, "lost a rank and did not end")

    def _kill_tenant(self, tenant: TenantView, why: str = "did not give back its pages in time") -> bool:
        key = (tenant.slot, tenant.generation)
        if killed := kill_tenants(tenant.pids, self._pool.path):
            _logger.warning("rollout engine %s %s: processes %s are killed", tenant.name, why, killed)
            return True
        if not holds_file(tenant.pid, self._pool.path) and key not in self._blamed:
            self._blamed.add(key)
            text = "rollout engine %s holds %d pages more than it may, and its process %d cannot be killed from here"
            _logger.error(text, tenant.name, tenant.used - tenant.budget, tenant.pid)
        return False

    def _words(self, tenant: TenantView) -> RolloutWords | None:
        """What it says, read once per look."""
        if tenant.slot not in self._said_by:
            self._said_by[tenant.slot] = RolloutWords.unpack(self._pool.read(tenant.slot))
        return self._said_by[tenant.slot]

    def _is_loading(self, tenant: TenantView) -> bool:
        said = self._words(tenant)
        return said is not None and said.loading and self._now() - said.begun < LOADING

    def _active(self, view: PoolView) -> list[TenantView]:
        """The rollout engines that share what is lent: one that was deactivated has nothing and gets nothing."""
        said = [(tenant, self._words(tenant)) for tenant in _rollouts(view)]
        return [tenant for tenant, found in said if tenant.used or found is None or not found.inactive]

    def _minimum_pages(self, tenant: TenantView) -> int:
        """Pages that it cannot give back, or needs to start."""
        found = self._words(tenant)
        return found.minimum if found is not None else 0

    def _minimum(self, view: PoolView) -> int:
        return sum(self._minimum_pages(tenant) for tenant in _rollouts(view))

    def _used(self, view: PoolView) -> int:
        return sum(max(0, tenant.used - self._minimum_pages(tenant)) for tenant in _rollouts(view))


def _rollouts(view: PoolView) -> list[TenantView]:
    return [tenant for tenant in view.tenants if tenant.role == "rollout"]


def _serving(view: PoolView) -> int:
    return view.serving.used if view.serving is not None else 0
