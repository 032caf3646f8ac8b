"""Which tenant owns which physical page of a device's KV pool.

Guarantees (``csrc/pages.c`` enforces them; tests/kvpool/test_page_ledger.py):

* A page has at most one owner, and is mapped by nobody else; ``used`` of a tenant is the number of pages it owns, whoever was
  killed when.
* A rollout tenant's acquire leaves the headroom free and stays inside its budget; budgets change by revisions that only grow.
* The pages of a tenant whose process is gone are free from the next :meth:`PagePool.reap` or :meth:`PagePool.join` on. A tenant
  lives as long as its process, a child that it forked without exec, or a page that is mapped. Where pages are memory of a device
  it lives until its process has closed all its files, the device's among them (seen from the same PID namespace).
* An engine of several ranks is one tenant: a page is one piece of memory of each rank's device, with one owner; it can be
  released when no rank has it mapped, and a tenant lives until its last rank is gone. One that lost a rank gets no more pages.
* A pool file left by a crash is taken over, or made anew where its shape differs; one that tenants live in is never changed;
  another user's file, or a file that is no pool, is refused.

* A process that is stopped or dies inside the ledger holds up no serving tenant: it is killed, and what it held is recounted. One
  that does not die of that (the kernel waits for its disk, its container is frozen) leaves everybody the pages that they have.

Pages and places are ``uint64`` arrays. Everything here takes microseconds and never waits for another tenant's engine.
"""

from __future__ import annotations

import ctypes
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from orchestrator.api import ConfigError, RunError
from vllm_rlplugin.kvpool.ledger import native_pages
from vllm_rlplugin.kvpool.ledger.tenant_processes import is_stopped, kill_tenant

Pages = npt.NDArray[np.uint64]
Role = Literal["serving", "rollout"]
ROLES: tuple[Role, ...] = ("serving", "rollout")
PAGE_BYTES = 2 << 20  # what CUDA maps at least
_Controls = ctypes.c_uint64 * native_pages.CONTROLS
_STATE_BYTES = 8 * native_pages.WORDS
_Words = ctypes.c_char * _STATE_BYTES  # kept: ctypes makes the type anew once it was collected
STUCK_SECONDS = 2.0  # after which a process that holds the lock, and is not stopped, counts as hung
AGAIN_SECONDS = 0.25  # after which a ledger that could not be had is tried again

_logger = logging.getLogger(__name__)


class PoolError(RunError):
    """The pool refused what no correct tenant asks for: pages that are not its own, or still mapped; or the tenant is gone."""


class TenantGone(PoolError):
    """It left, or was taken for dead: what was seen of it a moment ago holds no more."""


class LedgerStuck(PoolError):
    """Who holds the ledger does not move, and could not be ended: nothing changed, and it may be had later."""


@dataclass(frozen=True, slots=True)
class TenantView:
    """One tenant. ``used`` and ``budget`` in pages; ``generation``: of its slot, one more at each join. ``pid``: of who decides;
    ``pids``: of that and of every rank; ``broken``: a rank is gone, and others are not."""

    slot: int
    name: str
    role: Role
    pid: int
    used: int
    budget: int
    revision: int
    generation: int
    pids: tuple[int, ...]
    broken: bool = False


@dataclass(frozen=True, slots=True)
class PoolView:
    """A consistent snapshot. ``ranks``: of each engine; pages are counted once for all. ``deaths``: tenants whose pages were
    taken back; ``recoveries``: that died inside the ledger."""

    pages: int
    page_bytes: int
    free: int
    headroom: int
    epoch: int
    deaths: int
    recoveries: int
    tenants: tuple[TenantView, ...]
    ranks: int = 1

    def tenant(self, name: str) -> TenantView | None:
        """By name."""
        return next((tenant for tenant in self.tenants if tenant.name == name), None)

    @property
    def serving(self) -> TenantView | None:
        """The serving tenant, if there is one."""
        return next((tenant for tenant in self.tenants if tenant.role == "serving"), None)


class PagePool:
    """A pool, opened or made; a tenant of it after :meth:`join`. Join, leave, publish and close are of one thread; the rest may
    be called from any."""

    def __init__(self, path: Path, handle: int, made: bool, rank: int) -> None:
        self.path = path
        self.made = made
        self.rank = rank
        self.handle = handle
        self._library = native_pages.library()
        self._quick = native_pages.quick_library()
        self._role: Role | None = None
        self._share = (ctypes.c_uint64 * 2)()
        self._slot = -1
        self._stuck = self._again = 0.0  # since when the ledger cannot be had, and until when it is not tried
        self._owed = np.empty(0, np.uint64)  # pages to be released, when it can be had
        view = self.view()
        self.pages, self.page_bytes, self.ranks = view.pages, view.page_bytes, view.ranks

    @property
    def device(self) -> str:
        """What this rank's pages are, as who had them first said; empty: nobody has."""
        device = ctypes.create_string_buffer(native_pages.NAME)
        self._library.rlc_pool_device(self.handle, device)
        return device.value.decode(errors="replace")

    @classmethod
    def create(
        cls,
        path: Path,
        pages: int,
        *,
        page_bytes: int = PAGE_BYTES,
        host: bool = True,
        device: str = "cpu",
        ranks: int = 1,
    ) -> PagePool:
        """Open, or make if nobody lives in it, for engines of so many ranks; as the first rank. ``host``: the pages' memory is in
        the file too.

        Raises ConfigError for a shape that no pool has, or a file that is not ours to use.
        """
        if pages < 1:
            raise ConfigError("kv_pool.pages", pages, "must be at least 1")
        return cls._open(path, pages, page_bytes, host, device, ranks, 0)

    @classmethod
    def open(cls, path: Path, rank: int = 0) -> PagePool:
        """One that is there, to map pages of this rank. Raises ConfigError."""
        return cls._open(path, 0, 0, False, "", 0, rank)

    @classmethod
    def _open(cls, path: Path, pages: int, page_bytes: int, host: bool, device: str, ranks: int, rank: int) -> PagePool:
        made, handle = ctypes.c_int(), ctypes.c_void_p()
        epoch = time.time_ns()
        code = native_pages.library().rlc_pool_open(
            *(os.fsencode(path), pages, page_bytes, host, device.encode(), epoch, ranks, rank),
            *(ctypes.addressof(made), ctypes.addressof(handle)),
        )
        if code:
            raise ConfigError("kv_pool.path", str(path), _reason(code, pages, page_bytes, ranks))
        assert handle.value is not None
        return cls(path, handle.value, bool(made.value), rank)

    def close(self) -> None:
        """Let go. A tenant's pages are free from the next look on; where they are memory of a device and were not dropped, when
        the process is gone. Idempotent."""
        if self.handle:
            if self._role is not None and self.ranks == 1 and self.device != "cpu" and not self._owns():
                self.leave()
            self._library.rlc_pool_close(self.handle)
            self.handle = 0

    # -- a tenant ----------------------------------------------------------------------------------------------------

    def join(self, name: str, role: Role, budget: int = 0) -> int:
        """Become a tenant; returns the slot. Raises ConfigError: a second serving engine, a name that is taken, no slot, and
        where pages are memory of a device another PID namespace than the maker's."""
        if not 0 < len(name.encode()) < native_pages.NAME:
            raise ConfigError("kv_pool.name", name, f"must have 1 to {native_pages.NAME - 1} bytes")
        if self._role is not None:
            raise PoolError(f"{self.path}: this process is a tenant already")
        slot = self._try_native("rlc_pool_join", name.encode(), ROLES.index(role) + 1, os.getpid(), budget)
        if slot == native_pages.BUSY:
            there = ", ".join(f"{tenant.name} ({tenant.role}, process {tenant.pid})" for tenant in self.view().tenants)
            fix = f"a pool has one serving engine, and each name only once; there are: {there}"
            raise ConfigError("kv_pool.name", name, fix)
        if slot == native_pages.NAMESPACE:
            fix = (
                "was made in another PID namespace: engines of one GPU must see each other's processes (pods: hostPID)"
            )
            raise ConfigError("kv_pool.path", str(self.path), fix)
        if slot == native_pages.FULL:
            raise ConfigError("kv_pool.name", name, f"the pool already has {native_pages.TENANTS} engines")
        self._role, self._slot = role, self._check_code(slot)
        return self._slot

    def attach(self, slot: int, generation: int, device: str) -> None:
        """Be another rank of the tenant that joined as ``slot``, with pages on ``device``. Raises ConfigError: this rank's pages
        are on another one; PoolError: the tenant has that rank; TenantGone."""
        code = self._try_native("rlc_pool_attach", slot, generation, os.getpid(), device.encode(), False)
        if code == native_pages.SHAPE:
            fix = f"rank {self.rank} has its pages on {self.device!r} there, here on {device!r}: give another pool name"
            raise ConfigError("kv_pool", str(self.path), fix)
        self._check_code(code)
        self._slot = slot

    def decide(self, slot: int, generation: int, role: Role) -> None:
        """Act for that tenant from this process, which maps nothing. Raises TenantGone."""
        self._call_native("rlc_pool_attach", slot, generation, os.getpid(), b"", True)
        self._role, self._slot = role, slot

    def leave(self) -> None:
        """No tenant any more. Raises PoolError while it owns pages."""
        self._call_native("rlc_pool_leave")
        self._role = None

    def _owns(self) -> int:
        return next((tenant.used for tenant in self.view().tenants if tenant.slot == self._slot), 0)

    def acquire(self, count: int, *, whole: bool = True, lease: float | None = None) -> Pages:
        """``count`` free pages, or none at all; ``whole=False``: as many as there may be. Leased until ``lease`` (seconds of
        the monotonic clock), None: for good. What may not be had is not an error: the result is empty, or short."""
        out = np.empty(count, np.uint64)
        try:
            if self._owed.size:
                self.release(self._owed[:0])
            found = self._call_native("rlc_pool_acquire", count, whole, _time(lease), out.ctypes.data)
        except LedgerStuck:
            found = 0
        return out[:found]

    def release(self, pages: Pages) -> None:
        """Give back, or later where the ledger is stuck. Raises PoolError, and keeps all of them, where one is not ours or is
        mapped."""
        pages, owed = np.concatenate([self._owed, _contiguous(pages)]), self._owed[:0]
        try:
            self._call_native("rlc_pool_release", pages.ctypes.data, pages.size)
        except LedgerStuck:
            owed = pages
        self._owed = owed

    def renew(self, pages: Pages, lease: float | None) -> None:
        """A new lease; None: for good."""
        pages = _contiguous(pages)
        self._call_native("rlc_pool_renew", pages.ctypes.data, pages.size, _time(lease))

    def expired(self, now: float) -> Pages:
        """Our pages whose lease has ended."""
        out = np.empty(self.pages, np.uint64)
        found = self._call_native("rlc_pool_expired", _time(now), out.ctypes.data, out.size)
        return out[:found].copy()

    def publish(self, words: bytes) -> None:
        """Our state, for :meth:`read` of others: ``native.WORDS`` words of 8 bytes. Never waits."""
        if len(words) != _STATE_BYTES:
            raise ValueError(f"{native_pages.WORDS} words of 8 bytes are published, not {len(words)} bytes")
        self._check_code(self._quick.rlc_pool_publish(self.handle, words))

    def own_share(self) -> tuple[int, int]:
        """Pages that this tenant owns, and its budget. Never waits."""
        self._check_code(self._quick.rlc_pool_share(self.handle, self._share))
        used, budget = self._share
        return used, budget

    # -- anybody -----------------------------------------------------------------------------------------------------

    def read(self, slot: int) -> bytes | None:
        """What that tenant published last; None: nothing, or nobody is there. Never waits."""
        words = _Words()
        return words.raw if self._check_code(self._quick.rlc_pool_read(self.handle, slot, words)) else None

    def set_budget(self, slot: int, pages: int, revision: int) -> bool:
        """Pages that a tenant may own from now on; False: a newer revision is there already. Raises TenantGone: nobody is."""
        code = self._try_native("rlc_pool_budget", slot, pages, revision)
        return code != native_pages.OLD and self._check_code(code) == 0

    def set_headroom(self, pages: int) -> None:
        """Pages that stay free for serving whenever a rollout tenant acquires."""
        self._call_native("rlc_pool_headroom", pages)

    def controls(self) -> tuple[int, ...]:
        """What people and other processes ask for: :class:`vllm_rlplugin.kvpool.ledger.tenant_words.ControlWord`. Never waits."""
        found = _Controls()
        self._check_code(self._quick.rlc_pool_controls(self.handle, found))
        return tuple(found)

    def control(self, index: int, value: int, *, add: bool = False) -> None:
        """Ask for it. ``add``: so much more than now. Never waits."""
        self._check_code(self._quick.rlc_pool_control(self.handle, index, value, add))

    def reap(self) -> int:
        """Take back what dead tenants owned; returns how many those were."""
        return int(self._call_native("rlc_pool_reap"))

    def trim(self, pages: int) -> int:
        """Return the memory of up to so many free pages to the system (host memory only); returns how many."""
        return int(self._call_native("rlc_pool_trim", pages))

    def view(self) -> PoolView:
        """A snapshot."""
        return self._snapshot(None)

    def owners(self) -> npt.NDArray[np.int16]:
        """Of each page: the slot that owns it, -1: free."""
        found = np.empty(self.pages, np.uint8)
        self._snapshot(found)
        return found.astype(np.int16) - 1

    def _snapshot(self, owners: npt.NDArray[np.uint8] | None) -> PoolView:
        numbers, rows = (ctypes.c_uint64 * 9)(), (native_pages.TenantRow * native_pages.TENANTS)()
        at = None if owners is None else owners.ctypes.data
        self._call_native("rlc_pool_snapshot", numbers, rows, at, None)
        tenants = tuple(
            TenantView(
                *(slot, row.name.decode(errors="replace"), ROLES[row.role - 1], row.pid, row.used, row.budget),
                *(row.revision, row.generation, _pids(row), bool(row.broken)),
            )
            for slot, row in enumerate(rows)
            if row.role
        )
        pages, page_bytes, free, headroom, epoch, deaths, recoveries, _, ranks = numbers
        return PoolView(pages, page_bytes, free, headroom, epoch, deaths, recoveries, tenants, ranks)

    def _call_native(self, name: str, *arguments: Any) -> int:
        return self._check_code(self._try_native(name, *arguments))

    def _try_native(self, name: str, *arguments: Any) -> int:
        """Under the ledger's lock. Who holds it for long was stopped or hangs in there: a serving tenant ends it, as its pages
        are needed; others wait for the serving tenant to do so. Raises LedgerStuck when nothing helps, and then at once."""
        if time.monotonic() < self._again:
            raise LedgerStuck(self._stuck_text())
        function, since, asked = getattr(self._library, name), self._stuck, 0.0
        while (code := int(function(self.handle, *arguments))) == native_pages.STUCK:
            now, holder = time.monotonic(), int(self._library.rlc_pool_holder(self.handle))
            since = since or now
            if (
                self._role == "serving"
                and holder
                and (is_stopped(holder) or now - since > STUCK_SECONDS)
                and now > asked
            ):
                asked = now + 0.05
                if kill_tenant(holder, self.path):
                    _logger.warning("process %d held the pool's ledger without moving, and was killed", holder)
            if now - since > 2 * STUCK_SECONDS:
                if not self._stuck:
                    _logger.error("%s", self._stuck_text())
                self._stuck, self._again = since, now + AGAIN_SECONDS
                raise LedgerStuck(self._stuck_text())
        self._stuck = 0.0
        return code

    def _stuck_text(self) -> str:
        holder = int(self._library.rlc_pool_holder(self.handle))
        return f"{self.path}: process {holder} holds the ledger and does not move; end it"

    def _check_code(self, code: int) -> int:
        if code >= 0:
            return code
        if code == native_pages.SYSTEM:
            raise native_pages.system_error()
        kind = TenantGone if code == native_pages.GONE else PoolError
        raise kind(f"{self.path}: {_TENANT.get(code, f'refused ({code})')}")


_TENANT = {
    native_pages.NOT_OWNER: "a page that this tenant does not own",
    native_pages.MAPPED: "a page that is still mapped, or still owned",
    native_pages.GONE: "no such tenant (it left, or was taken for dead)",
}


def _pids(row: native_pages.TenantRow) -> tuple[int, ...]:
    if row.attached == 1 and row.members[0] == row.pid:
        return (row.pid,)
    ranks = (pid for rank, pid in enumerate(row.members) if row.attached >> rank & 1)
    return tuple(dict.fromkeys((row.pid, *ranks)))


def _reason(code: int, pages: int, page_bytes: int, ranks: int) -> str:
    if code == native_pages.SYSTEM:
        return str(native_pages.system_error())
    return {
        native_pages.FOREIGN: "belongs to another user, can be opened by others, or is not a KV pool: choose another pool name",
        native_pages.VERSION: "was made by another version of rl-coserve: end the engines that use it first",
        native_pages.SHAPE: f"{pages} pages of {page_bytes} bytes for engines of {ranks} ranks do not fit: running engines have "
        "a pool of another shape there, or the page size is not a power of two of at least 4096, or there are more than "
        f"{native_pages.RANKS} ranks",
    }[code]


def _time(seconds: float | None) -> int:
    return 0 if seconds is None else max(1, round(seconds * 1e9))


def _contiguous(pages: Pages) -> Pages:
    return np.ascontiguousarray(pages, np.uint64)
