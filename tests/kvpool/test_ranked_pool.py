"""A pool under engines of several ranks: one page is a piece of memory of each rank, with one owner; real processes."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.api import ConfigError
from tests.kvpool.test_pool_engine import PAGE_KIB, REQUESTS, Driven, engines, models, named, play  # noqa: F401
from tests.support.waiting import wait_for
from vllm_rlplugin.kvpool.engine.pool_engine import pool_path
from vllm_rlplugin.kvpool.engine.pool_processes import check_workers
from vllm_rlplugin.kvpool.ledger.page_ledger import PagePool, PoolError, TenantGone
from vllm_rlplugin.kvpool.pages.host_pages import HostRange
from vllm_rlplugin.kvpool.pages.page_backends import HostBackend

PAGE = 4096
PAGES = 8


@pytest.fixture
def path() -> Iterator[Path]:
    found = Path(f"/dev/shm/rl-coserve-ranks-{os.getpid()}-{random.randrange(10**9)}")
    yield found
    found.unlink(missing_ok=True)


def two_ranks(path: Path, name: str = "roll") -> tuple[PagePool, PagePool, PagePool]:
    """Of one engine: the first rank's pool, which joined, the second's, and its scheduler's."""
    first = PagePool.create(path, PAGES, page_bytes=PAGE, ranks=2)
    slot = first.join(name, "rollout", budget=PAGES)
    generation = first.view().tenants[0].generation
    second, scheduler = PagePool.open(path, 1), PagePool.open(path)
    second.attach(slot, generation, "cpu")
    scheduler.decide(slot, generation, "rollout")
    return first, second, scheduler


def at(*places: int) -> np.ndarray:
    return np.array(places, np.uint64)


# -- the ledger --------------------------------------------------------------------------------------------------------


def test_a_page_is_memory_of_each_rank_and_is_released_only_when_every_rank_has_unmapped_it(path: Path) -> None:
    first, second, scheduler = two_ranks(path)
    with HostRange(first, 4) as one, HostRange(second, 4) as two:
        pages = scheduler.acquire(3)
        assert [view.used for view in scheduler.view().tenants] == [3], "one entry for both"
        for memory, value in ((one, 5), (two, 9)):
            assert memory.map_pages(at(0, 2, 3), pages)
            ctypes.memset(memory.address + 2 * PAGE, value, PAGE)
        assert [ctypes.string_at(memory.address + 2 * PAGE, 2) for memory in (one, two)] == [b"\5\5", b"\t\t"]
        one.unmap_pages(at(0, 2, 3))
        with pytest.raises(PoolError, match="still mapped"):
            scheduler.release(pages)
        two.unmap_pages(at(0, 2, 3))
        scheduler.release(pages)
        assert scheduler.view().free == PAGES


def test_a_page_of_another_engine_is_zeroed_on_every_rank(path: Path) -> None:
    first, second, scheduler = two_ranks(path)
    other = PagePool.open(path)
    slot = other.join("serve", "serving")
    another = PagePool.open(path, 1)
    another.attach(slot, other.view().tenants[-1].generation, "cpu")
    with HostRange(first, 1) as one, HostRange(second, 1) as two:
        pages = scheduler.acquire(PAGES)[:1]
        for memory in (one, two):
            memory.map_pages(at(0), pages)
            ctypes.memset(memory.address, 7, PAGE)
            memory.unmap_pages(at(0))
        scheduler.release(pages)
    for pool in (other, another):
        with HostRange(pool, 1, scrub=True) as memory:
            found = pages if pool is another else other.acquire(1)
            assert list(found) == list(pages)
            memory.map_pages(at(0), found)
            assert ctypes.string_at(memory.address, 4) == bytes(4)
            memory.unmap_pages(at(0))


def test_a_rank_that_does_not_belong_there_is_refused(path: Path) -> None:
    first, _, scheduler = two_ranks(path)
    tenant = first.view().tenants[0]
    with pytest.raises(PoolError):
        PagePool.open(path, 1).attach(tenant.slot, tenant.generation, "cpu")  # it has that rank
    with pytest.raises(PoolError):
        PagePool.open(path, 1).attach(tenant.slot, tenant.generation + 1, "cpu")
    with pytest.raises(ConfigError):
        PagePool.open(path, 2).attach(tenant.slot, tenant.generation, "cpu")  # engines there have two
    with pytest.raises(ConfigError, match="engines of 4 ranks"):
        PagePool.create(path, PAGES, page_bytes=PAGE, ranks=4)
    assert scheduler.view().ranks == 2


RANK = """
import sys, time
from pathlib import Path
import numpy as np
from vllm_rlplugin.kvpool.ledger.page_ledger import PagePool
from vllm_rlplugin.kvpool.pages.host_pages import HostRange
from vllm_rlplugin.kvpool.pages.page_backends import HostBackend
path, rank = Path(sys.argv[1]), int(sys.argv[2])
pool = PagePool.open(path, rank)
if rank:
    (tenant,) = pool.view().tenants
    pool.attach(tenant.slot, tenant.generation, "cpu")
else:
    pool.join("roll", "rollout", 8)
memory = HostRange(pool, 4)
pages = pool.acquire(4) if not rank else np.flatnonzero(pool.owners() >= 0).astype(np.uint64)
assert memory.map_pages(np.arange(4, dtype=np.uint64), pages)
print("mapped", flush=True)
time.sleep(600)
"""


def start_rank(path: Path, rank: int) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", RANK, str(path), str(rank)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"mapped\n"
    return process


@pytest.mark.parametrize("killed", [0, 1])
def test_pages_of_an_engine_that_lost_a_rank_come_back_when_its_last_rank_is_gone(path: Path, killed: int) -> None:
    watcher = PagePool.create(path, PAGES, page_bytes=PAGE, ranks=2)
    ranks = [start_rank(path, 0), start_rank(path, 1)]
    scheduler = PagePool.open(path)
    try:
        (tenant,) = watcher.view().tenants
        assert set(tenant.pids) == {rank.pid for rank in ranks}
        scheduler.decide(tenant.slot, tenant.generation, "rollout")
        ranks[killed].kill()
        ranks[killed].wait()
        assert watcher.reap() == 0
        (tenant,) = watcher.view().tenants
        assert (tenant.broken, tenant.used) == (True, 4), "the other one still has them mapped"
        assert scheduler.acquire(1).size == 0
        ranks[1 - killed].kill()
        ranks[1 - killed].wait()
        assert watcher.reap() == 1
        assert watcher.view().free == PAGES
        with pytest.raises(TenantGone):
            scheduler.acquire(1)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


@pytest.mark.parametrize(("sizes", "field"), [((9, 1), "--tensor-parallel-size"), ((2, 2), "--pipeline-parallel-size")])
def test_ranks_that_a_pool_cannot_have_are_one_error(sizes: tuple[int, int], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_workers(*sizes)
    assert caught.value.field == field


# -- ranks that start --------------------------------------------------------------------------------------------------


AGREE = """
import json, sys, types
import torch
group = types.SimpleNamespace()
state = types.SimpleNamespace(get_tp_group=lambda: group)
sys.modules["vllm"] = sys.modules["vllm.distributed"] = types.SimpleNamespace(parallel_state=state)
from orchestrator.api import ConfigError
from vllm_rlplugin.kvpool.engine.pool_agreement import PoolAgreement
rank = int(sys.argv[1])
torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
group.cpu_group = torch.distributed.group.WORLD
agreement = PoolAgreement(rank, 2)
def cannot():
    if rank:
        raise OSError("no room here")
for blocks, work in ((64, lambda: rank), (64 >> rank, lambda: rank), (64, cannot)):
    try:
        agreement.require_same({"pool": "a", "blocks": blocks})
        print(agreement.each_does(work), flush=True)
    except ConfigError as error:
        print(error, flush=True)
"""


@pytest.mark.slow
def test_ranks_that_disagree_or_cannot_are_the_same_error_on_each(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", AGREE, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=60)[0].splitlines() for rank in ranks]
    assert said[0] == said[1]
    assert said[0] == [
        "[0, 1]",
        "kv_pool = 'blocks': rank 1 has blocks 32, rank 0 64: start all ranks with the same options and model",
        "kv_pool = 'rank 1': no room here",
    ]


def test_an_engine_with_other_ranks_than_the_pools_is_refused(path: Path) -> None:
    first, _, _ = two_ranks(path)
    with pytest.raises(ConfigError, match="for engines of 2 ranks, this one has 1"):
        HostBackend(PAGE).pool(path, 0)
    assert first.ranks == 2


# -- real engines ------------------------------------------------------------------------------------------------------

TWO = {"tensor_parallel_size": 2}


def without_ranks(pool: PagePool, pids: tuple[int, ...]) -> Callable[[], bool]:
    def gone() -> bool:
        pool.reap()
        return not any(set(tenant.pids) & set(pids) for tenant in pool.view().tenants)

    return gone


@pytest.mark.engine
@pytest.mark.long
@pytest.mark.timeout(400)
def test_two_engines_of_two_ranks_share_a_pool_and_a_rank_that_is_killed_gives_back_the_pages_of_all(
    models: tuple[Path, Path],  # noqa: F811
    engines: list[Driven],  # noqa: F811
) -> None:
    """Tokens are those of the same engine undisturbed; pages go from one engine to the other on both ranks at once."""
    name = f"test-tp-{os.getpid()}"
    path = pool_path(name)
    try:
        shared: dict[str, Any] = {"kv_pool": name, "kv_pool_page_kib": PAGE_KIB, "kv_pool_keep": 0.0, "given": TWO}
        lending = {"kv_pool_lent": 1.0, "kv_pool_window": 0.0, "kv_pool_admission": "none"}
        serving = Driven(models[1], 64, **shared, **lending, kv_pool_role="serving", kv_pool_mib=1)
        engines.append(serving)
        serving.answer()
        rollout = Driven(models[1], 64, **shared, kv_pool_budget_mib=1)
        engines.append(rollout)
        rollout.answer()
        serving.do()
        pool = PagePool.open(path)
        assert pool.ranks == 2
        small = {tenant.role: tenant.used for tenant in pool.view().tenants}
        expected = []
        for engine, role in ((rollout, "rollout"), (serving, "serving")):
            play(engine, REQUESTS, "alone")
            assert engine.do(steps=12)["pool"]["pages"] > 2 * small[role]
            expected.append(named(engine.do(drain=True), "alone"))
            assert engine.do()["pool"]["pages"] == small[role], "what nobody uses went back"
        assert expected[0] == expected[1]
        serving.do(opened=True)

        play(rollout, REQUESTS, "shared")
        many = rollout.do(steps=12)["pool"]["pages"]
        play(serving, REQUESTS, "shared")
        assert serving.do(steps=12)["pool"]["lent"] < many
        given = rollout.do(steps=1)["pool"]
        assert given["pages"] <= given["budget"] < many
        second = named(serving.do(drain=True), "shared")
        serving.do(opened=True)
        assert [named(rollout.do(drain=True), "shared"), second] == expected

        play(rollout, REQUESTS, "killed")
        rollout.do(steps=12)
        view = pool.view()
        lost = next(tenant for tenant in view.tenants if tenant.role == "rollout")
        assert len(lost.pids) == 3, "its scheduler and two ranks"
        os.kill(lost.pids[-1], signal.SIGKILL)
        wait_for(without_ranks(pool, lost.pids), 30)
        assert pool.view().free == pool.pages - serving.do()["pool"]["pages"]
        play(serving, REQUESTS, "after")
        assert named(serving.do(drain=True), "after") == second
    finally:
        path.unlink(missing_ok=True)
