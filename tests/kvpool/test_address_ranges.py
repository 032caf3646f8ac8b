"""What every kind of memory behind a range guarantees: host memory, and GPU memory through a driver that is a fake.

The fake (tests/support/fake_cuda.c) maps real memory of this host between real processes; nothing here says what a GPU does.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.support import fake_cuda
from vllm_rlplugin.kvpool.ledger.page_ledger import PagePool, PoolError
from vllm_rlplugin.kvpool.pages import page_keeper
from vllm_rlplugin.kvpool.pages.address_ranges import PageRange
from vllm_rlplugin.kvpool.pages.cuda_driver import CudaDriver
from vllm_rlplugin.kvpool.pages.cuda_pages import CudaRange, Supply, open_page_source
from vllm_rlplugin.kvpool.pages.host_pages import HostRange

PAGE = 4096
KINDS = ("host", "kept_with_a_fake_driver", "created_with_a_fake_driver")
pytestmark = pytest.mark.skipif(fake_cuda.COMPILER is None, reason="no C compiler here")


def places(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.uint64)


@dataclass
class Place:
    """One pool of one kind of memory."""

    kind: str
    path: Path
    library: Path

    def pool(self, pages: int = 8) -> PagePool:
        """Made, with its keeper where there is one."""
        if self.kind == "host":
            return PagePool.create(self.path, pages, page_bytes=PAGE)
        driver = self.driver()
        device = f"cuda {driver.uuid} {self.supply}"
        pool = PagePool.create(self.path, pages, page_bytes=PAGE, host=False, device=device)
        if self.supply == "kept":
            page_keeper.ensure_keeper(pool, driver, library=str(self.library), linger=10.0)
        return pool

    @property
    def supply(self) -> Supply:
        return "kept" if self.kind.startswith("kept") else "created"

    def driver(self) -> CudaDriver:
        return CudaDriver(PAGE, library=str(self.library))

    def range(self, pool: PagePool, count: int, *, scrub: bool = False) -> PageRange:
        if self.kind == "host":
            return HostRange(pool, count, scrub=scrub)
        driver = self.driver()
        return CudaRange(pool, count, driver, open_page_source(pool, driver, self.supply), scrub=scrub)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_cuda.library(tmp_path_factory.mktemp("driver"))


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """A device of 16 pages, two more for the engines' own, and no pool yet."""
    name = f"/dev/shm/rl-coserve-test-{os.getpid()}-{random.randrange(10**9)}"
    device = Path(f"{name}-device")
    for key, value in fake_cuda.make_device(device, 18, PAGE).items():
        monkeypatch.setenv(key, value)
    fake_cuda.reset(library)
    yield Place(request.param, Path(name), library)
    fake_cuda.reset(library)
    socket = page_keeper.socket_path(Path(name))
    for path in (device, Path(name), socket, socket.with_suffix(".log")):
        path.unlink(missing_ok=True)


# -- the contract ------------------------------------------------------------------------------------------------------


def test_a_place_is_memory_while_it_has_a_page_and_keeps_its_address(place: Place) -> None:
    pool = place.pool()
    pool.join("serve", "serving")
    with place.range(pool, 6) as memory:
        address = memory.address
        assert memory.bytes == 6 * PAGE
        assert memory.map_places(places(1, 2, 5))
        for number in (1, 2, 5):
            ctypes.memset(address + number * PAGE, 40 + number, PAGE)
        assert [ctypes.string_at(address + number * PAGE, 1)[0] for number in (1, 2, 5)] == [41, 42, 45]
        pages = memory.pages_of(places(1, 2, 5))
        assert len(set(pages.tolist())) == 3
        assert memory.places_of(pages).tolist() == [1, 2, 5]
        memory.unmap_places(places(2))
        assert (memory.mapped, memory.address, pool.view().free) == (2, address, 6)
        assert memory.map_places(places(0, 2, 3))
        assert [ctypes.string_at(address + number * PAGE, 1)[0] for number in (1, 5)] == [41, 45]
    assert pool.view().free == 8
    pool.close()


@pytest.mark.parametrize(("scrub", "stays"), [(False, True), (True, False)])
def test_what_the_other_tenant_wrote_is_gone_where_the_pool_scrubs(place: Place, scrub: bool, stays: bool) -> None:
    serving = place.pool(1)
    rollout = PagePool.open(place.path)
    serving.join("serve", "serving")
    rollout.join("roll", "rollout", budget=1)
    with place.range(serving, 3) as mine, place.range(rollout, 5, scrub=scrub) as theirs:
        assert mine.map_places(places(2))
        ctypes.memmove(mine.address + 2 * PAGE, b"kv!!", 4)
        assert not theirs.map_places(places(4)), "the only page is serving's"
        mine.unmap_places(places(2))
        assert theirs.map_places(places(4))
        assert (ctypes.string_at(theirs.address + 4 * PAGE, 4) == b"kv!!") == stays
    serving.close()
    rollout.close()


def test_what_no_correct_tenant_asks_for_is_refused_and_changes_nothing(place: Place) -> None:
    pool, other = place.pool(4), PagePool.open(place.path)
    pool.join("serve", "serving")
    other.join("roll", "rollout", budget=1)
    memory = place.range(pool, 4)
    assert other.acquire(1).size == 1
    assert memory.map_places(places(0, 1))
    with pytest.raises(PoolError, match="still mapped"):
        pool.release(memory.pages_of(places(0, 1)))
    for wrong, says in (([0], "has a page"), ([9], "below 4"), ([3, 3], "different")):
        with pytest.raises(ValueError, match=says):
            memory.map_places(places(*wrong))
    with pytest.raises(ValueError, match="without a page"):
        memory.unmap_places(places(2))
    assert not memory.map_places(places(2, 3)), "there is one page left"
    assert (pool.view().free, memory.mapped) == (1, 2)
    memory.close()
    memory.close()
    assert pool.view().free == 3
    pool.close()
    other.close()


_TENANT = """
import ctypes, os, sys
from pathlib import Path
import numpy as np
sys.path.insert(0, sys.argv[4])
from tests.kvpool.test_address_ranges import PAGE, Place
from vllm_rlplugin.kvpool.ledger.page_ledger import PagePool
place = Place(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
pool = PagePool.open(place.path)
pool.join("roll", "rollout", budget=8)
memory = place.range(pool, 8)
assert memory.map_places(np.arange(8, dtype=np.uint64))
ctypes.memset(memory.address, 7, 8 * PAGE)
print("in", flush=True)
sys.stdin.readline()
memory.unmap_places(np.array([3], np.uint64))
ctypes.memset(memory.address + 3 * PAGE, 1, 1)
"""


def tenant(place: Place) -> subprocess.Popen[bytes]:
    """Another process, which has eight pages, and when told drops one and touches it."""
    arguments = [place.kind, str(place.path), str(place.library), str(Path(__file__).parents[2])]
    child = subprocess.Popen(
        [sys.executable, "-c", _TENANT, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert child.stdout is not None
    assert child.stderr is not None
    assert child.stdout.readline() == b"in\n", child.stderr.read().decode()
    return child


def test_a_tenant_that_is_killed_gives_its_pages_and_their_memory_back(place: Place) -> None:
    pool = place.pool(16 if place.kind != "host" else 8)  # all of the device
    pool.join("serve", "serving")
    with place.range(pool, 16) as memory:
        kept = pool.pages - 8
        assert memory.map_places(np.arange(kept, dtype=np.uint64))
        child = tenant(place)
        assert not memory.map_places(places(15))
        child.kill()
        os.waitid(
            os.P_PID, child.pid, os.WEXITED | os.WNOWAIT
        )  # its parent has not asked for it yet: nothing of it runs
        pool.reap()  # its keeper may have done it
        assert [tenant.name for tenant in pool.view().tenants] == ["serve"]
        child.communicate()
        assert memory.map_places(np.arange(kept, kept + 8, dtype=np.uint64)), "pages, and memory for them"
        ctypes.memset(memory.address + kept * PAGE, 5, 8 * PAGE)
    pool.close()


def test_touching_a_place_without_a_page_ends_the_process_on_host_memory_and_reaches_no_page_of_a_pool(
    place: Place,
) -> None:
    """Here a wrong number is found at once; on a device what follows an old row of a block table has a page of its own."""
    pool = place.pool()
    child = tenant(place)
    assert child.communicate(b"go\n", timeout=30)[0] == b""
    assert child.returncode == (-signal.SIGSEGV if place.kind == "host" else 0)
    pool.reap()
    assert not pool.view().tenants
    pool.close()


# -- against a model ---------------------------------------------------------------------------------------------------


class RangeMachine(RuleBasedStateMachine):
    """Any order of calls by two tenants of one pool, against a dictionary of what is where; memory is written and read."""

    kind = "host"
    place: Place
    pools: tuple[PagePool, ...]

    @initialize()
    def begin(self) -> None:
        self.ranges = [type(self).place.range(pool, 10) for pool in type(self).pools]
        self.model: list[dict[int, int]] = [{}, {}]
        self.mark = 0

    @rule(who=strategies.integers(0, 1), wanted=strategies.sets(strategies.integers(0, 9), min_size=1, max_size=5))
    def back(self, who: int, wanted: set[int]) -> None:
        memory, model, fresh = self.ranges[who], self.model[who], sorted(wanted - set(self.model[who]))
        if wanted & set(model):
            with pytest.raises(ValueError, match="has a page"):
                memory.map_places(places(*wanted))
        room = 12 - sum(map(len, self.model))
        if not fresh:
            return
        assert memory.map_places(places(*fresh)) == (len(fresh) <= room)
        if len(fresh) <= room:
            for number in fresh:
                self.mark = self.mark % 250 + 1
                ctypes.memset(memory.address + number * PAGE, self.mark, PAGE)
                model[number] = self.mark

    @rule(who=strategies.integers(0, 1), wanted=strategies.sets(strategies.integers(0, 9), min_size=1, max_size=5))
    def drop(self, who: int, wanted: set[int]) -> None:
        memory, model = self.ranges[who], self.model[who]
        if wanted - set(model):
            with pytest.raises(ValueError, match="without a page"):
                memory.unmap_places(places(*wanted))
        if known := wanted & set(model):
            memory.unmap_places(places(*known))
            for number in known:
                del model[number]

    @invariant()
    def holds(self) -> None:
        for memory, model in zip(self.ranges, self.model, strict=True):
            assert memory.mapped == len(model)
            for number, mark in model.items():
                first, last = memory.address + number * PAGE, memory.address + (number + 1) * PAGE - 1
                assert (ctypes.string_at(first, 1)[0], ctypes.string_at(last, 1)[0]) == (mark, mark)
        every = [page for memory in self.ranges for page in memory.pages_of(places(*self.numbers(memory))).tolist()]
        assert len(set(every)) == len(every) == 12 - type(self).pools[0].view().free

    def numbers(self, memory: PageRange) -> list[int]:
        return sorted(self.model[self.ranges.index(memory)])

    def teardown(self) -> None:
        for memory in self.ranges:
            memory.close()
        assert type(self).pools[0].view().free == 12


def test_any_order_of_calls_keeps_what_was_written_where_it_was_written(place: Place) -> None:
    made = place.pool(12)
    other = PagePool.open(place.path)
    made.join("serve", "serving")
    other.join("roll", "rollout", budget=12)

    class Machine(RangeMachine):
        pass

    Machine.place, Machine.pools = place, (made, other)
    Machine.TestCase.settings = settings(max_examples=25, stateful_step_count=30)
    Machine.TestCase("runTest").runTest()
    if place.kind != "host":
        assert fake_cuda.left(place.library) == (0, 0), "every handle was released, every mapping taken away"
    for pool in (made, other):
        pool.close()


# -- the two kinds have one interface ----------------------------------------------------------------------------------


def test_a_range_of_gpu_memory_offers_what_one_of_host_memory_does() -> None:
    def offered(kind: type) -> set[str]:
        return {name for name in dir(kind) if not name.startswith("_")}

    assert offered(CudaRange) == offered(HostRange) == offered(PageRange)


def test_a_pool_on_a_device_waits_for_the_end_of_a_process_and_not_only_for_its_lock(place: Place) -> None:
    """A file that is closed is all of a tenant on host memory; on a device its kernels may still run."""
    pool = place.pool()
    gone = PagePool.open(place.path)
    gone.join("roll", "rollout", budget=8)
    gone.acquire(2)
    gone.close()
    assert pool.reap() == (1 if place.kind == "host" else 0)
    assert pool.view().free == (8 if place.kind == "host" else 6)
    pool.close()
