"""The page ledger of a device: one owner a page, whoever is killed when; real processes, real shared memory."""

from __future__ import annotations

import ctypes
import fcntl
import os
import random
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings, strategies
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from orchestrator.api import ConfigError
from orchestrator.policies.serving.kv_sharing import SharingRules
from vllm_rlplugin.kvpool.ledger import native_pages, page_ledger
from vllm_rlplugin.kvpool.ledger.page_ledger import LedgerStuck, PagePool, PoolError
from vllm_rlplugin.kvpool.pages.host_pages import HostRange
from vllm_rlplugin.kvpool.serving.guardian import Guardian

PAGE = 4096


@pytest.fixture
def path() -> Iterator[Path]:
    """In shared memory, where pools are."""
    found = Path(f"/dev/shm/rl-coserve-test-{os.getpid()}-{random.randrange(10**9)}")
    yield found
    found.unlink(missing_ok=True)


def pool_of(path: Path, pages: int = 8, *, host: bool = True) -> PagePool:
    return PagePool.create(path, pages, page_bytes=PAGE, host=host, device="cpu" if host else "a device")


def ints(array: np.ndarray) -> list[int]:
    return [int(value) for value in array]


# -- one tenant and another --------------------------------------------------------------------------------------------


def test_a_page_has_one_owner_and_comes_back_when_it_is_released(path: Path) -> None:
    serving, rollout = pool_of(path), PagePool.open(path)
    assert (serving.made, rollout.made) == (True, False)
    serving.join("serve", "serving")
    rollout.join("roll", "rollout", budget=8)
    first, second = serving.acquire(3), rollout.acquire(4)
    assert not set(ints(first)) & set(ints(second))
    view = rollout.view()
    assert [(tenant.name, tenant.used) for tenant in view.tenants] == [("serve", 3), ("roll", 4)]
    assert view.free == 1
    assert serving.acquire(2).size == 0, "all or none"
    assert serving.acquire(2, whole=False).size == 1
    rollout.release(second)
    assert serving.acquire(4).size == 4


def test_a_rollout_stays_inside_its_budget_and_leaves_the_headroom_and_serving_does_not_care(path: Path) -> None:
    serving, rollout = pool_of(path), PagePool.open(path)
    serving.join("serve", "serving")
    slot = rollout.join("roll", "rollout", budget=2)
    assert rollout.acquire(9, whole=False).size == 2
    assert serving.set_budget(slot, 8, revision=1)
    serving.set_headroom(3)
    assert rollout.acquire(9, whole=False).size == 3
    assert serving.acquire(3).size == 3
    assert not serving.set_budget(slot, 1, revision=1), "an old revision changes nothing"
    assert serving.set_budget(slot, 1, revision=2)
    assert rollout.acquire(1).size == 0, "it owns more than its budget"


def test_what_no_correct_tenant_asks_for_is_refused_and_changes_nothing(path: Path) -> None:
    serving, rollout = pool_of(path), PagePool.open(path)
    with pytest.raises(PoolError, match="no such tenant"):
        serving.release(np.array([0], np.uint64))
    serving.join("serve", "serving")
    rollout.join("roll", "rollout", budget=8)
    mine = serving.acquire(2)
    for wrong in (mine, np.array([7], np.uint64), np.array([99], np.uint64)):
        with pytest.raises(PoolError, match="does not own"):
            rollout.release(wrong)
    with pytest.raises(PoolError, match="does not own"):
        serving.release(np.concatenate([mine, np.array([99], np.uint64)]))
    assert [tenant.used for tenant in serving.view().tenants] == [2, 0]
    with pytest.raises(PoolError, match="still owned"):
        serving.leave()
    serving.release(mine)
    serving.leave()
    assert serving.view().serving is None
    with pytest.raises(PoolError, match="tenant already"):
        rollout.join("again", "rollout")


@pytest.mark.parametrize(
    ("make", "field", "says"),
    [
        (lambda path: PagePool.create(path, 0), "kv_pool.pages", "at least 1"),
        (lambda path: PagePool.create(path, 4, page_bytes=5000), "kv_pool.path", "power of two"),
        (PagePool.open, "kv_pool.path", "No such file"),
        (lambda path: pool_of(path).join("", "serving"), "kv_pool.name", "1 to 63 bytes"),
    ],
)
def test_bad_input_is_one_clear_error(path: Path, make: object, field: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        make(path)  # type: ignore[operator]
    assert caught.value.field == field


def test_a_second_serving_engine_and_a_taken_name_are_refused_with_who_is_there(path: Path) -> None:
    serving, other = pool_of(path), PagePool.open(path)
    serving.join("serve", "serving")
    with pytest.raises(ConfigError, match=rf"one serving engine.*serve \(serving, process {os.getpid()}\)"):
        other.join("second", "serving")
    with pytest.raises(ConfigError, match="each name only once"):
        other.join("serve", "rollout")
    others = [PagePool.open(path) for _ in range(native_pages.TENANTS - 1)]
    for index, pool in enumerate(others):
        pool.join(f"roll-{index}", "rollout")
    with pytest.raises(ConfigError, match="already has 16 engines"):
        other.join("one too many", "rollout")


def test_a_pool_of_another_shape_is_kept_while_somebody_lives_in_it_and_made_anew_after(path: Path) -> None:
    first = pool_of(path, 8)
    first.join("serve", "serving")
    with pytest.raises(ConfigError, match="of another shape"):
        pool_of(path, 16)
    assert first.view().pages == 8
    first.close()
    again = pool_of(path, 16)
    assert again.made
    assert again.view().pages == 16
    assert not again.view().tenants


def test_what_is_not_our_pool_is_neither_used_nor_overwritten(path: Path) -> None:
    path.write_bytes(b"somebody's notes, which are longer than a magic number")
    path.chmod(0o600)
    kept = path.read_bytes()
    for make in (pool_of, PagePool.open):
        with pytest.raises(ConfigError, match="is not a KV pool"):
            make(path)
    assert path.read_bytes() == kept
    path.unlink()
    pool_of(path).close()
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="can be opened by others"):
        PagePool.open(path)
    path.unlink()
    path.symlink_to("/dev/null")
    with pytest.raises(ConfigError, match="belongs to another user"):
        pool_of(path)


def test_a_pool_of_another_version_is_refused(path: Path) -> None:
    pool_of(path).close()
    with path.open("r+b") as file:
        file.seek(8)
        file.write((99).to_bytes(4, "little"))
    with pytest.raises(ConfigError, match="another version"):
        PagePool.open(path)


def test_a_pool_of_another_version_is_named_and_kept_while_anybody_lives_in_it(path: Path) -> None:
    """Serving and training are upgraded at other times. Another version's tenants may hold other bytes than ours."""
    first = pool_of(path)
    first.join("serve", "serving")
    with path.open("r+b") as file:
        file.seek(8)
        file.write((99).to_bytes(4, "little"))
    kept = path.read_bytes()
    with pytest.raises(ConfigError, match="was made by another version of rl-coserve"):
        pool_of(path)
    first.close()
    with path.open("r+b") as theirs:
        lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, (1 << 61) + 500, 1, 0)
        fcntl.fcntl(theirs, fcntl.F_OFD_SETLK, lock)
        with pytest.raises(ConfigError, match="was made by another version of rl-coserve"):
            pool_of(path)
        assert path.read_bytes()[:12] == kept[:12]
    assert pool_of(path).made


def test_an_engine_in_another_pid_namespace_cannot_join_a_pool_of_device_memory(path: Path) -> None:
    """It could not tell when the kernels of a killed process have stopped, and would get its pages before."""
    there = {"pages": 4, "page_bytes": 4096, "host": False, "device": "cuda somewhere kept"}
    pool = PagePool.create(path, **there)  # type: ignore[arg-type]
    pool.join("here", "serving")
    pool.close()
    own = os.stat("/proc/self/ns/pid").st_ino.to_bytes(8, "little")
    with path.open("r+b") as file:
        file.seek(file.read(1024).index(own))
        file.write((1).to_bytes(8, "little"))
    other = PagePool.open(path)
    with pytest.raises(ConfigError, match="another PID namespace"):
        other.join("there", "rollout")
    other.close()


def test_leases_end_at_their_time_and_are_renewed(path: Path) -> None:
    pool = pool_of(path)
    pool.join("roll", "rollout", budget=8)
    short, long, forever = pool.acquire(1, lease=1.0), pool.acquire(1, lease=5.0), pool.acquire(1)
    assert ints(pool.expired(0.5)) == []
    assert ints(pool.expired(2.0)) == ints(short)
    pool.renew(short, 9.0)
    assert ints(pool.expired(6.0)) == ints(long)
    pool.renew(long, None)
    assert ints(pool.expired(100.0)) == ints(short)
    pool.release(short)
    assert ints(pool.expired(100.0)) == []
    assert forever.size == 1


def test_what_a_tenant_publishes_is_read_whole_and_nobody_waits_for_it(path: Path) -> None:
    pool, other = pool_of(path), PagePool.open(path)
    slot = pool.join("serve", "serving")
    assert other.read(slot) is None
    child = subprocess.Popen(
        [sys.executable, "-c", _READER, str(path), str(slot)], stdout=subprocess.PIPE, env={**os.environ}
    )
    words = np.zeros(native_pages.WORDS, np.uint64)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        deadline = time.monotonic() + 60
        while child.poll() is None:
            assert time.monotonic() < deadline
            for _ in range(1000):
                words += np.uint64(1)
                pool.publish(words.tobytes())
        assert child.returncode == 0, "it read words of two different states"
    finally:
        child.kill()
    with pytest.raises(ValueError, match="14 words"):
        pool.publish(words[:3].tobytes())


_READER = """
import sys
from pathlib import Path
from vllm_rlplugin.kvpool.ledger.page_ledger import PagePool
pool, slot, seen = PagePool.open(Path(sys.argv[1])), int(sys.argv[2]), set()
print("ready", flush=True)
while len(seen) < 300:
    words = pool.read(slot)
    if words is not None:
        if len({words[at : at + 8] for at in range(0, len(words), 8)}) != 1:
            sys.exit(1)
        seen.add(words[:8])
"""


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("scrub", "expected"), [(False, b"kv!!"), (True, b"\0\0\0\0")])
def test_a_page_moves_to_another_range_with_its_content_unless_it_is_scrubbed(
    path: Path, scrub: bool, expected: bytes
) -> None:
    serving, rollout = pool_of(path, 1), PagePool.open(path)
    serving.join("serve", "serving")
    rollout.join("roll", "rollout", budget=1)
    with HostRange(serving, 3) as mine, HostRange(rollout, 5, scrub=scrub) as theirs:
        assert mine.map_places(np.array([2], np.uint64))
        ctypes.memmove(mine.address + 2 * PAGE, b"kv!!", 4)
        assert not theirs.map_places(np.array([4], np.uint64)), "the only page is serving's"
        mine.unmap_places(np.array([2], np.uint64))
        assert theirs.map_places(np.array([4], np.uint64))
        assert ctypes.string_at(theirs.address + 4 * PAGE, 4) == expected


def test_what_a_dead_tenant_left_is_scrubbed_too_whoever_gets_its_slot(path: Path) -> None:
    second = pool_of(path, 1)
    child = os.fork()
    if not child:
        first = PagePool.open(path)
        memory = HostRange(first, 1)
        if first.join("first", "rollout", budget=1) == 0 and memory.map_places(np.array([0], np.uint64)):
            ctypes.memmove(memory.address, b"kv!!", 4)
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert second.join("second", "rollout", budget=1) == 0
    with HostRange(second, 1, scrub=True) as again:
        assert again.map_places(np.array([0], np.uint64))
        assert ctypes.string_at(again.address, 4) == b"\0\0\0\0"


def test_a_tenant_that_closed_its_pool_lives_until_its_last_page_is_unmapped(path: Path) -> None:
    """Else somebody else would get a page that is still mapped."""
    first, second = pool_of(path, 1), PagePool.open(path)
    first.join("first", "rollout", budget=1)
    memory = HostRange(first, 1)
    memory.map_places(np.array([0], np.uint64))
    first.close()
    assert second.reap() == 0
    native_pages.library().rlc_range_free(memory.address, memory.bytes)
    assert second.reap() == 1


def test_a_mapped_page_cannot_be_released_and_a_place_without_one_faults(path: Path) -> None:
    pool = pool_of(path, 4)
    pool.join("serve", "serving")
    memory = HostRange(pool, 4)
    other = PagePool.open(path)
    other.join("roll", "rollout", budget=1)
    assert other.acquire(1).size == 1
    assert memory.map_places(np.array([0, 1], np.uint64))
    pages = memory.pages_of(np.array([0, 1], np.uint64))
    assert sorted(ints(memory.places_of(pages))) == [0, 1]
    with pytest.raises(PoolError, match="still mapped"):
        pool.release(pages)
    for wrong, says in (([0], "has a page"), ([9], "below 4"), ([3, 3], "different")):
        with pytest.raises(ValueError, match=says):
            memory.map_places(np.array(wrong, np.uint64))
    with pytest.raises(ValueError, match="without a page"):
        memory.unmap_places(np.array([2], np.uint64))
    assert not memory.map_places(np.array([2, 3], np.uint64)), "there is one page left"
    assert pool.view().free == 1, "and it is still there"
    memory.close()
    other.close()
    assert pool.reap() == 1
    assert pool.view().free == 4
    code = "import ctypes, sys; from pathlib import Path; import numpy as np\n"
    code += "from vllm_rlplugin.kvpool.ledger.page_ledger import PagePool\n"
    code += "from vllm_rlplugin.kvpool.pages.host_pages import HostRange\n"
    code += "p = PagePool.open(Path(sys.argv[1])); p.join('x', 'rollout', budget=4); m = HostRange(p, 2)\n"
    code += (
        "m.map_places(np.array([1], np.uint64)); ctypes.memset(m.address + 4096, 1, 4096); print('in', flush=True)\n"
    )
    code += "m.unmap_places(np.array([1], np.uint64)); ctypes.memset(m.address + 4096, 1, 1)"
    child = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, check=False)
    assert child.stdout == b"in\n"
    assert child.returncode == -signal.SIGSEGV


def test_free_memory_goes_back_to_the_system_and_reads_as_zeros(path: Path) -> None:
    pool = pool_of(path, 4)
    pool.join("serve", "serving")
    place = np.array([0], np.uint64)
    with HostRange(pool, 1) as memory:
        memory.map_places(place)
        ctypes.memset(memory.address, 7, PAGE)
        held = path.stat().st_blocks
        memory.unmap_places(place)
        assert pool.trim(10) == 1
        assert path.stat().st_blocks < held
        assert pool.trim(10) == 0


# -- death -------------------------------------------------------------------------------------------------------------


def churn(path: Path, name: str) -> None:
    """Acquire, map, unmap and release, again and again."""
    pool = PagePool.open(path)
    pool.join(name, "rollout", budget=64)
    memory, rng, held = HostRange(pool, 64), random.Random(name), list[int]()
    while True:
        if rng.random() < 0.6:
            places = [place for place in range(64) if place not in held][: rng.randrange(1, 9)]
            if memory.map_places(np.array(places, np.uint64)):
                held += places
        else:
            memory.unmap_places(np.array(held[:4], np.uint64))
            held = held[4:]


@pytest.mark.slow
def test_tenants_that_are_killed_at_any_moment_leave_a_ledger_that_adds_up(path: Path) -> None:
    """kill -9 of processes that do nothing but acquire, map, unmap and release."""
    kills = 100
    pool = pool_of(path, 64)
    pool.join("serve", "serving")
    rng, most = random.Random(5), 0
    for number in range(0, kills, 2):
        children = []
        for name in (f"t{number}", f"t{number + 1}"):
            child = os.fork()
            if not child:
                try:
                    churn(path, name)
                finally:
                    os._exit(1)
            children.append(child)
        while len(pool.view().tenants) < 3:
            time.sleep(0.001)
        time.sleep(rng.uniform(0.0, 0.02))
        most = max(most, 64 - pool.view().free)
        for child in children:
            os.kill(child, signal.SIGKILL)
        for child in children:
            assert os.waitpid(child, 0)[1] == signal.SIGKILL, "it ended by itself"
        assert pool.reap() == 2
        view = pool.view()
        assert [tenant.name for tenant in view.tenants] == ["serve"]
        assert set(ints(pool.owners())) == {-1}
        assert view.free == 64
    assert most > 32
    assert pool.view().deaths == kills
    assert pool.acquire(64).size == 64


def test_a_process_that_dies_inside_the_ledger_does_not_stop_the_others(path: Path) -> None:
    """The lock's holder is killed while it holds the lock, which the others then take over, and count again."""
    pool = pool_of(path)
    slot = pool.join("serve", "serving")
    pool.acquire(3)
    child = os.fork()
    if not child:
        other = PagePool.open(path)
        header = ctypes.cast(other.handle, ctypes.POINTER(_Handle)).contents.header
        lock = header + _LOCK
        ctypes.CDLL(None).pthread_mutex_lock(ctypes.c_void_p(lock))
        ctypes.c_uint64.from_address(header + _FREE).value = 999  # in the middle of a change
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert pool.acquire(2).size == 2
    view = pool.view()
    assert (view.recoveries, view.tenants[0].used, view.free, view.tenants[0].slot) == (1, 5, 3, slot)


def test_a_process_that_is_stopped_inside_the_ledger_costs_serving_milliseconds_and_its_life(path: Path) -> None:
    """A serving tenant ends it at once; whoever is not serving only waits."""
    pool = pool_of(path)
    pool.join("serve", "serving")
    child = os.fork()
    if not child:
        other = PagePool.open(path)
        header = ctypes.cast(other.handle, ctypes.POINTER(_Handle)).contents.header
        ctypes.CDLL(None).pthread_mutex_lock(ctypes.c_void_p(header + _LOCK))
        ctypes.c_int32.from_address(header + _HOLDER).value = os.getpid()
        while True:
            os.kill(os.getpid(), signal.SIGSTOP)
    os.waitpid(child, os.WUNTRACED)
    begun = time.monotonic()
    assert pool.acquire(2).size == 2
    assert time.monotonic() - begun < 1.0, "it did not wait until the process counts as hung"
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert pool.view().recoveries == 1


def test_one_that_holds_the_ledger_and_cannot_be_killed_leaves_everybody_the_pages_that_they_have(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one in a frozen container, or for which the kernel waits for a disk: the signal is taken when that is over."""
    monkeypatch.setattr(page_ledger, "STUCK_SECONDS", 0.1)
    monkeypatch.setattr(page_ledger, "kill_tenant", lambda pid, path: False)
    pool = pool_of(path)
    pool.join("serve", "serving")
    guardian = Guardian(pool, SharingRules(pages=8, headroom=0.2, watermark=0.25, deadline=2.0), time.monotonic)
    held = pool.acquire(3)
    child = os.fork()
    if not child:
        other = PagePool.open(path)
        header = ctypes.cast(other.handle, ctypes.POINTER(_Handle)).contents.header
        ctypes.CDLL(None).pthread_mutex_lock(ctypes.c_void_p(header + _LOCK))
        ctypes.c_int32.from_address(header + _HOLDER).value = os.getpid()
        while True:
            os.kill(os.getpid(), signal.SIGSTOP)
    try:
        os.waitpid(child, os.WUNTRACED)
        guardian.tick_before_step(3)
        begun = time.monotonic()
        assert pool.acquire(2).size == 0
        pool.release(held[:2])
        guardian.note_shortage()
        guardian.tick_before_step(3)
        assert time.monotonic() - begun < 0.1, "nobody waits for it a second time"
        with pytest.raises(LedgerStuck, match=f"process {child} holds the ledger"):
            pool.view()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    time.sleep(page_ledger.AGAIN_SECONDS)
    assert pool.acquire(7).size == 7, "what was given back meanwhile is there"
    assert pool.view().tenants[0].used == 8


class _Handle(ctypes.Structure):
    """``rlc_pool``, as far as the header."""

    _fields_ = (("fd", ctypes.c_int), ("slot", ctypes.c_int), ("rank", ctypes.c_int), ("gen", ctypes.c_uint64))
    _fields_ += (("bytes", ctypes.c_uint64), ("header", ctypes.c_void_p))


_FREE = 8 + 4 + 4 + 8 * 8  # of the count of free pages in ``rlc_header``
_HOLDER = _FREE + 8 + 8 * 8  # of who holds the lock
_LOCK = _HOLDER + 4 + 64 * native_pages.RANKS + 4 + 8 + 8  # and of the mutex


# -- against a model ---------------------------------------------------------------------------------------------------


class LedgerMachine(RuleBasedStateMachine):
    """Any order of calls by up to three tenants, against owners kept in a dictionary."""

    tenants = Bundle("tenants")
    host = True

    @initialize()
    def begin(self) -> None:
        self.path = Path(f"/dev/shm/rl-coserve-model-{os.getpid()}-{random.randrange(10**9)}")
        self.pool = pool_of(self.path, 12, host=self.host)
        self.model: dict[int, str] = {}
        self.open: dict[str, PagePool] = {}
        self.budgets: dict[str, int] = {}
        self.headroom = 0
        self.revision = 0

    @rule(target=tenants, name=strategies.sampled_from(["a", "b", "c"]), budget=strategies.integers(0, 12))
    def join(self, name: str, budget: int) -> str:
        if name not in self.open:
            self.open[name] = PagePool.open(self.path)
            self.open[name].join(name, "serving" if name == "a" else "rollout", budget)
            self.budgets[name] = budget
        return name

    @rule(name=tenants, count=strategies.integers(1, 6), whole=strategies.booleans())
    def acquire(self, name: str, count: int, whole: bool) -> None:
        if name in self.open:
            room = 12 - len(self.model)
            if name != "a":
                used = sum(owner == name for owner in self.model.values())
                room = max(0, min(room - self.headroom, self.budgets[name] - used))
            found = ints(self.open[name].acquire(count, whole=whole))
            assert len(found) == (count if count <= room else 0 if whole else room)
            assert not set(found) & set(self.model)
            self.model |= dict.fromkeys(found, name)

    @rule(name=tenants, data=strategies.data())
    def release(self, name: str, data: strategies.DataObject) -> None:
        if name in self.open:
            pages = data.draw(strategies.lists(strategies.integers(0, 13), max_size=4, unique=True))
            array = np.array(pages, np.uint64)
            if all(self.model.get(page) == name for page in pages):
                self.open[name].release(array)
                for page in pages:
                    del self.model[page]
            else:
                with pytest.raises(PoolError):
                    self.open[name].release(array)

    @rule(name=tenants, budget=strategies.integers(0, 12), newer=strategies.booleans())
    def budget(self, name: str, budget: int, newer: bool) -> None:
        view = self.pool.view().tenant(name)
        if view is not None:
            revision = view.revision + newer
            assert self.pool.set_budget(view.slot, budget, revision) == newer
            if newer:
                self.budgets[name] = budget

    @rule(pages=strategies.integers(0, 6))
    def reserve(self, pages: int) -> None:
        self.headroom = pages
        self.pool.set_headroom(pages)

    @rule(name=tenants)
    def die(self, name: str) -> None:
        """Its file is closed, as the kernel does when a process ends."""
        if name in self.open:
            if not self.host:  # nothing of it may be in use: else it counts until its process is gone
                self.open[name].release(
                    np.array([page for page, owner in self.model.items() if owner == name], np.uint64)
                )
            self.open.pop(name).close()
            self.model = {page: owner for page, owner in self.model.items() if owner != name}
            assert self.pool.reap() == self.host

    @invariant()
    def adds_up(self) -> None:
        view = self.pool.view()
        slots = {tenant.slot: tenant.name for tenant in view.tenants}
        owners = {page: slots[owner] for page, owner in enumerate(ints(self.pool.owners())) if owner >= 0}
        assert owners == self.model
        assert view.free == 12 - len(owners)
        for tenant in view.tenants:
            assert tenant.used == sum(owner == tenant.name for owner in owners.values())

    def teardown(self) -> None:
        for pool in (*self.open.values(), self.pool):
            pool.close()
        self.path.unlink()


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=40, stateful_step_count=60)


class DeviceLedgerMachine(LedgerMachine):
    """The same where pages are memory of a device, which is not in the file."""

    host = False


TestDeviceLedger = DeviceLedgerMachine.TestCase
TestDeviceLedger.settings = settings(max_examples=15, stateful_step_count=60)
