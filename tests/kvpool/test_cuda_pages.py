"""GPU memory in a KV pool: the driver's interface, its errors, and the process that keeps the memory.

The driver is a fake (tests/support/fake_cuda.c) where a test's name says so; the last tests need an NVIDIA GPU.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from orchestrator.api import ConfigError
from orchestrator.ops import nvidia_driver
from scripts.bench.micro import kv_remap
from scripts.bench.probes.probe_run import run_probe
from tests.support import fake_cuda
from vllm_rlplugin.kvpool.ledger.page_ledger import PAGE_BYTES, PagePool, PoolError
from vllm_rlplugin.kvpool.pages import cuda_driver, page_keeper
from vllm_rlplugin.kvpool.pages.cuda_driver import CudaDriver, DeviceFull, check_written, find_differences
from vllm_rlplugin.kvpool.pages.cuda_pages import CreatedPages, CudaRange, Supply
from vllm_rlplugin.kvpool.pages.dlpack import byte_tensor
from vllm_rlplugin.kvpool.pages.page_backends import CudaBackend, HostBackend
from vllm_rlplugin.kvpool.pages.page_keeper import KeeperGone, KeptPages

CSRC = Path(__file__).parents[2] / "csrc"
PAGE, PAGES = 4096, 12  # of a pool
DEVICE = PAGES + 2  # of the fake device: two engines have a page of their own each
pytestmark = pytest.mark.skipif(fake_cuda.COMPILER is None, reason="no C compiler here")


def places(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.uint64)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_cuda.library(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def path(library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Of a pool that is not there yet, beside a fake device."""
    found = Path(f"/dev/shm/rl-coserve-test-{os.getpid()}-{random.randrange(10**9)}")
    device = found.with_name(found.name + "-device")
    for key, value in fake_cuda.make_device(device, DEVICE, PAGE).items():
        monkeypatch.setenv(key, value)
    fake_cuda.reset(library)
    yield found
    fake_cuda.reset(library)
    for file in (found, device, page_keeper.socket_path(found), page_keeper.socket_path(found).with_suffix(".log")):
        file.unlink(missing_ok=True)


@pytest.fixture
def driver(path: Path, library: Path) -> CudaDriver:
    return CudaDriver(PAGE, library=str(library))


def kept_pool(path: Path, driver: CudaDriver, library: Path, pages: int = PAGES, linger: float = 10.0) -> PagePool:
    pool = PagePool.create(path, pages, page_bytes=PAGE, host=False, device=f"cuda {driver.uuid} kept")
    page_keeper.ensure_keeper(pool, driver, library=str(library), linger=linger)
    return pool


def created(path: Path, driver: CudaDriver, pages: int = 32) -> CudaRange:
    """Of a serving tenant; the pool has more pages than the device."""
    pool = PagePool.create(path, pages, page_bytes=PAGE, host=False, device=f"cuda {driver.uuid} created")
    pool.join("serve", "serving")
    return CudaRange(pool, pages, driver, CreatedPages(driver, pool.pages))


# -- the driver's interface --------------------------------------------------------------------------------------------


def test_the_native_library_compiles_without_a_warning_and_without_cuda(tmp_path: Path) -> None:
    arguments = ("-O2", "-D_GNU_SOURCE", "-fvisibility=hidden", "-pthread")
    made = fake_cuda.compile_c(tmp_path / "pages.so", *arguments, str(CSRC / "pages.c"), str(CSRC / "vmm.c"), "-ldl")
    needs = subprocess.run(["ldd", str(made)], capture_output=True, text=True, check=True).stdout
    assert "cuda" not in needs
    assert b"pthread_mutex_clocklock" not in made.read_bytes(), "of glibc 2.30; wheels are built for 2.28"


def test_numbers_and_structures_are_those_of_nvidias_own_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuda-bindings is made from NVIDIA's headers; what stands in csrc/vmm.c was written by hand."""
    theirs: Any = pytest.importorskip("cuda.bindings.driver")
    assert find_differences(theirs) == []
    other = SimpleNamespace(**vars(theirs))
    other.CUmemAccess_flags = SimpleNamespace(
        CU_MEM_ACCESS_FLAGS_PROT_READWRITE=theirs.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READ
    )
    monkeypatch.setattr(cuda_driver.importlib, "import_module", lambda name: other)
    check_written.cache_clear()
    with pytest.raises(ConfigError, match=r"PROT_READ is 1, here 3; CUmemAccessDesc lies in memory otherwise"):
        CudaDriver(PAGE, library="libcuda-not-here.so")
    monkeypatch.undo()
    assert check_written()


def test_without_a_driver_there_is_one_error_that_names_what_is_missing() -> None:
    with pytest.raises(ConfigError, match=r"CUDA: no driver.*libcuda-not-here\.so.*install NVIDIA's driver") as caught:
        CudaDriver(PAGE, library="libcuda-not-here.so")
    assert caught.value.field == "kv_pool"


def test_a_driver_without_a_function_that_is_needed_is_named_with_the_function(tmp_path: Path) -> None:
    source = tmp_path / "old.c"
    source.write_text("int cuInit(unsigned flags) { return (int)flags; }\n")
    old = fake_cuda.compile_c(tmp_path / "libold.so", str(source))
    with pytest.raises(ConfigError, match=r"libold\.so has no cuGetErrorName"):
        CudaDriver(PAGE, library=str(old))


def test_a_device_that_cannot_do_it_is_one_error_with_a_fake_driver(
    path: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="there is no device 3, the driver sees 1"):
        CudaDriver(PAGE, ordinal=3, library=str(library))
    with pytest.raises(ConfigError, match=f"pages of 2048 bytes: a fake device maps multiples of {PAGE}") as caught:
        CudaDriver(2048, library=str(library))
    assert caught.value.field == "kv_pool_page_kib"
    for number, name in ((102, "virtual memory management"), (103, "file descriptors")):
        monkeypatch.setenv("FAKE_CUDA_LACKS", str(number))
        with pytest.raises(ConfigError, match=f"a fake device has no .*{name}"):
            CudaDriver(PAGE, library=str(library))
    fake_cuda.reset(library)
    monkeypatch.delenv("FAKE_CUDA_DEVICE")
    with pytest.raises(ConfigError, match=r"CUDA: no device.*CUDA_ERROR_NO_DEVICE \(100\)"):
        CudaDriver(PAGE, library=str(library))


def test_a_run_of_places_is_one_call_for_access_and_one_to_unmap_with_a_fake_driver(
    path: Path, driver: CudaDriver, library: Path
) -> None:
    with created(path, driver) as memory:
        names = ("cuMemMap", "cuMemSetAccess", "cuMemUnmap")
        for change in (memory.map_places, memory.unmap_places):
            before = [fake_cuda.calls(library, name) for name in names]
            change(places(0, 1, 2, 3, 7, 8, 20))
            assert [fake_cuda.calls(library, name) - was for name, was in zip(names, before, strict=True)] == [7, 3, 3]


def test_places_without_a_page_have_one_page_of_this_process_behind_them_with_a_fake_driver(
    path: Path, driver: CudaDriver, library: Path
) -> None:
    """A kernel that follows an old row of a block table neither ends the process nor reaches a page of anybody."""
    with created(path, driver) as memory:
        assert ctypes.string_at(memory.address, 32 * PAGE) == bytes(32 * PAGE)
        assert memory.map_places(places(3))
        ctypes.memset(memory.address + 3 * PAGE, 7, PAGE)
        ctypes.memset(memory.address + 9 * PAGE, 1, 8)
        assert ctypes.string_at(memory.address + 20 * PAGE, 8) == bytes([1]) * 8, "all of them are the same one"
        assert ctypes.string_at(memory.address + 3 * PAGE, PAGE) == bytes([7]) * PAGE
        memory.unmap_places(places(3))
        assert ctypes.string_at(memory.address + 3 * PAGE, 8) == bytes([1]) * 8
        assert fake_cuda.left(library) == (1, 32)
    assert fake_cuda.left(library) == (0, 0)


def test_an_engine_that_has_no_room_for_its_own_page_is_refused_with_a_fake_driver(
    path: Path, driver: CudaDriver, library: Path
) -> None:
    everything = driver.create_pages(DEVICE)
    with pytest.raises(ConfigError, match="one page beside those of the pool is needed") as caught:
        created(path, driver)
    assert (caught.value.field, fake_cuda.left(library)) == ("kv_pool", (DEVICE, 0))
    driver.release_handles(everything)


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemMap", "cuMemSetAccess"])
@pytest.mark.parametrize(("code", "full"), [(2, True), (999, False)])
def test_what_the_driver_refuses_in_the_middle_is_undone_with_a_fake_driver(
    path: Path, driver: CudaDriver, library: Path, call: str, code: int, full: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Out of memory is "no page", said once; anything else is an error with the driver's words."""
    with created(path, driver) as memory:
        assert memory.map_places(places(9))
        for _ in range(2):
            fake_cuda.fail(library, call, 2 if call != "cuMemSetAccess" else 1, code)
            if full:
                assert not memory.map_places(places(1, 2, 3, 5))
            else:
                with pytest.raises(PoolError, match=rf"{call}: an error without a name \(999\)"):
                    memory.map_places(places(1, 2, 3, 5))
            assert (memory.mapped, fake_cuda.left(library)) == (1, (2, 32))
        assert sum("no memory for pages" in text for text in caplog.messages) == full
        assert memory.map_places(places(1, 2, 3, 5)), "and it goes on"
        assert not memory.map_places(np.arange(10, 20, dtype=np.uint64)), "the device is smaller than the pool"
    assert fake_cuda.left(library) == (0, 0)


@pytest.mark.parametrize("wants", [False, True])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_pages_come_and_go_without_a_context_and_with_one_where_the_driver_asks_for_it_with_a_fake_driver(
    path: Path, library: Path, monkeypatch: pytest.MonkeyPatch, wants: bool, elsewhere: bool
) -> None:
    """A keeper has none: it would cost memory of the device. A thread keeps the one it has, of another device too."""
    if wants:
        monkeypatch.setenv("FAKE_CUDA_WANTS_CONTEXT", "1")
    driver = CudaDriver(PAGE, library=str(library))
    before = fake_cuda.elsewhere(library) if elsewhere else 0
    handles, base = driver.create_pages(2), driver.reserve(4 * PAGE)
    descriptor = driver.export_handle(int(handles[0]))
    (again,) = driver.import_handles([descriptor])
    os.close(descriptor)
    driver.map(base, places(0, 2), np.array([again, handles[1]], np.uint64))
    ctypes.memset(base + 2 * PAGE, 7, PAGE)
    driver.zero(base, places(2))
    assert ctypes.string_at(base + 2 * PAGE, 4) == bytes(4)
    driver.synchronize()
    driver.unmap(base, places(0, 2))
    driver.release_handles(np.array([again, *handles], np.uint64))
    driver.free(base, 4 * PAGE)
    assert (fake_cuda.left(library), fake_cuda.depth(library)) == ((0, 0), before)
    driver.close()
    assert fake_cuda.depth(library) == before


def test_what_can_be_released_is_even_if_the_driver_refuses_one_with_a_fake_driver(
    driver: CudaDriver, library: Path
) -> None:
    handles = driver.create_pages(3)
    fake_cuda.fail(library, "cuMemRelease", 0, 999)
    with pytest.raises(PoolError, match=r"cuMemRelease: an error without a name \(999\)"):
        driver.release_handles(handles)
    assert fake_cuda.left(library) == (1, 0)


def test_pages_go_only_when_the_device_has_done_what_it_was_told_to_do_with_a_fake_driver(
    path: Path, driver: CudaDriver, library: Path
) -> None:
    """A drafter's kernels still run when the output of its step is here: an idle or deactivated engine waits for them."""
    from tests.kvpool.test_pool_engine import parking_of

    driver.synchronize()
    assert fake_cuda.settled(library) == 0, "nothing was computed yet, and no context is made for that"
    with created(path, driver) as memory:

        class Groups:
            def map_groups(self, groups: list[int]) -> bool:
                return memory.map_places(places(*groups))

            def unmap_groups(self, groups: list[int]) -> None:
                memory.unmap_places(places(*groups))

            def synchronize(self) -> None:
                memory.synchronize()

        assert memory.map_places(places(0))
        _, parking = parking_of(Groups(), after=1)
        parking.ensure_free(6)
        fake_cuda.work(library)
        with pytest.raises(PoolError, match="cuMemUnmap"):
            memory.unmap_places(places(1))
        parking.note_scheduled()
        parking.shrink(1)
        parking.note_scheduled()
        parking.note_ended()
        assert (fake_cuda.settled(library), memory.mapped) == (0, 2), "the next step is in flight, and has not ended"
        parking.note_ended()
        assert (fake_cuda.settled(library), memory.mapped) == (1, 1)
        fake_cuda.work(library)
        parking.sleep()
        assert (fake_cuda.settled(library), memory.mapped) == (2, 0)


def test_the_fake_driver_refuses_what_the_real_one_refuses(path: Path, driver: CudaDriver) -> None:
    """Else the tests above would say nothing."""
    base, (one, two) = driver.reserve(4 * PAGE), driver.create_pages(2)
    first = np.array([one], np.uint64)
    driver.map(base, places(0), first)
    for wrong in (
        lambda: driver.map(base, places(0), first),
        lambda: driver.map(base, places(4), first),
        lambda: driver.map(base, places(1), places(77)),
        lambda: driver.unmap(base, places(1)),
        lambda: driver.free(base, 4 * PAGE),
        lambda: driver.free(base, PAGE),
        lambda: driver.release_handles(places(77)),
        lambda: driver.import_handles([0]),
    ):
        with pytest.raises(PoolError, match="CUDA_ERROR_INVALID_VALUE"):
            wrong()
    with pytest.raises(DeviceFull, match=rf"room for {DEVICE - 2} of {DEVICE} pages"):
        driver.create_pages(DEVICE)
    driver.release_handles(np.array([one, two], np.uint64))
    with pytest.raises(DeviceFull, match=f"room for {DEVICE - 1} of"):
        driver.create_pages(DEVICE)  # what is mapped is held, handle or not
    driver.unmap(base, places(0))
    driver.release_handles(driver.create_pages(DEVICE))
    driver.free(base, 4 * PAGE)


DOCTOR = """
import os, sys
from pathlib import Path
from orchestrator.ops.nvidia_driver import check_driver
from tests.support import fake_cuda

found = [check_driver()] if not Path("/dev/nvidiactl").exists() else []
folder = Path(sys.argv[1])
fake_cuda.load_by_name(folder)
found.append(check_driver())
os.environ.update(fake_cuda.make_device(folder / "device", 4, 4096))
found.append(check_driver())
os.environ["FAKE_CUDA_LACKS"] = "103"
found.append(check_driver())
print("\\n".join(f"{one.status} {one.detail}" for one in found))
"""


def test_the_doctor_names_the_driver_and_what_it_cannot_do_with_a_fake_driver(tmp_path: Path) -> None:
    """Asked by cuda-bindings, which know one driver per process."""
    pytest.importorskip("cuda.bindings.driver")
    command = [sys.executable, "-c", DOCTOR, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert said[-3].startswith("skip CUDA: no device: cuInit ends with CUDA_ERROR_NO_DEVICE;")
    assert said[-2] == "ok CUDA 12.8: a fake device; KV pages can be mapped"
    assert said[-1] == "warn CUDA 12.8: a fake device, without page mapping"
    assert [line.startswith("skip CUDA: no driver (") for line in said[:-3]] == [True] * len(said[:-3])


def test_without_cuda_bindings_the_devices_are_not_known_and_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    assert nvidia_driver.find_gpus().missing == "cuda-bindings are not installed (pip install 'rl-coserve[cuda]')"


@pytest.mark.parametrize("kind", ["kept", "created"])
def test_pages_go_from_process_to_process_by_the_probe_with_a_fake_driver(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    for key, value in fake_cuda.make_device(tmp_path / "device", 10, PAGE_BYTES).items():
        monkeypatch.setenv(key, value)
    found = run_probe("remap", ["--mib", "16", "--rounds", "2", "--kind", kind, "--library", str(library)])
    assert (found["kind"], found["rounds"]) == (kind, 2)
    assert 0 < found["release"] < found["seconds"]


def test_the_benchmark_moves_a_gpus_memory_where_there_is_one_with_stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"seconds": 0.004, "release": 0.002, "map": 0.002, "worst": 0.006, "rounds": 3, "pid": 1}
    asked = []

    def probe(name: str, arguments: list[str]) -> dict[str, Any]:
        asked.append(arguments[-1])
        return {**row, "kind": arguments[-1], "seconds": 0.004 if arguments[-1] == "kept" else 0.009}

    monkeypatch.setattr(kv_remap, "run_probe", probe)
    monkeypatch.setattr(
        kv_remap, "find_gpus", lambda: nvidia_driver.Gpus("", "12.8", (nvidia_driver.Gpu("a device", True),))
    )
    monkeypatch.setattr(kv_remap.importlib.util, "find_spec", lambda name: name)
    found = kv_remap.run(quick=True, nonce="n")
    assert asked == ["kept", "created", "kvcached"]
    assert (found["value"], found["bar"], found["holds"], found["detail"]["device"]) == (
        0.004,
        "<= 0.005",
        None,
        "a device",
    )
    assert found["detail"]["others"]["kvcached"]["seconds"] == 0.009
    monkeypatch.setattr(kv_remap, "find_gpus", lambda: nvidia_driver.Gpus("no driver"))
    found = kv_remap.run(quick=True, nonce="n")
    assert (asked[3:], found["bar"], found["detail"]["device"]) == (["host"], "<= 0.05", "host memory")


# -- the keeper --------------------------------------------------------------------------------------------------------


def test_pages_outlive_the_engine_that_made_the_pool_with_a_fake_driver(
    path: Path, driver: CudaDriver, library: Path
) -> None:
    code = "import sys, os, signal; from pathlib import Path; from tests.kvpool.test_cuda_pages import *\n"
    code += "driver = CudaDriver(PAGE, library=sys.argv[2]); pool = kept_pool(Path(sys.argv[1]), driver, sys.argv[2])\n"
    code += "pool.join('serve', 'serving'); memory = CudaRange(pool, PAGES, driver, KeptPages(pool, driver))\n"
    code += "assert memory.map_places(places(3)); ctypes.memmove(memory.address + 3 * PAGE, b'kv!!', 4)\n"
    code += "os.kill(os.getpid(), signal.SIGKILL)"
    command = [sys.executable, "-c", code, str(path), str(library)]
    assert subprocess.run(command, cwd=CSRC.parent, check=False).returncode == -signal.SIGKILL
    pool = PagePool.open(path)
    pool.reap()
    assert (pool.view().free, pool.view().tenants) == (PAGES, ())
    pool.join("again", "serving")
    with CudaRange(pool, PAGES, driver, KeptPages(pool, driver)) as memory:
        assert memory.map_places(np.arange(PAGES, dtype=np.uint64))
        found = [ctypes.string_at(memory.address + at * PAGE, 4) for at in range(PAGES)]
        assert found.count(b"kv!!") == 1, "it is the same memory"
    pool.close()


@pytest.mark.parametrize("supply", ["kept", "created"])
def test_each_rank_of_an_engine_has_memory_of_its_own_and_a_keeper_of_its_own_with_a_fake_driver(
    path: Path, driver: CudaDriver, library: Path, supply: Supply
) -> None:
    backends = [CudaBackend(PAGE, 0, supply, str(library)) for _ in range(2)]
    first = backends[0].pool(path, 4, 2)
    second = backends[1].pool(path, 4, 2, 1)
    try:
        assert [page_keeper.is_keeper_alive(pool) for pool in (first, second)] == [supply == "kept"] * 2
        slot = first.join("serve", "serving")
        second.attach(slot, first.view().tenants[0].generation, backends[1].device(second))
        assert second.device == f"cuda {driver.uuid} {supply}"
        memories = [
            backend.range(pool, 4, "serving", scrub=False)
            for backend, pool in zip(backends, (first, second), strict=True)
        ]
        pages = first.acquire(2)
        for value, memory in enumerate(memories):
            assert memory.map_pages(places(1, 3), pages)
            ctypes.memset(memory.address + 3 * PAGE, 5 + value, PAGE)
        assert [ctypes.string_at(memory.address + 3 * PAGE, 1) for memory in memories] == [b"\5", b"\6"]
        memories[0].unmap_pages(places(1, 3))
        with pytest.raises(PoolError, match="still mapped"):
            first.release(pages)
        memories[1].unmap_pages(places(1, 3))
        first.release(pages)
        with pytest.raises(ConfigError, match="rank 1 has its pages on"):
            PagePool.open(path, 1).attach(slot, first.view().tenants[0].generation, "cuda another kept")
    finally:
        path.unlink()  # its keepers end
        page_keeper.socket_path(path, 1).unlink(missing_ok=True)


def keeper_of(path: Path) -> int:
    """Its process, by the kernel."""
    found = page_keeper._connect(page_keeper.socket_path(path))
    with found:
        return int(page_keeper._CREDENTIALS.unpack(found.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])


def test_without_its_keeper_an_engine_keeps_what_it_had_and_no_other_gets_any_with_a_fake_driver(
    path: Path, driver: CudaDriver, library: Path
) -> None:
    pool, other = kept_pool(path, driver, library), PagePool.open(path)
    backend = CudaBackend(PAGE, 0, "kept", str(library))
    pool.join("serve", "serving")
    other.join("roll", "rollout", budget=PAGES)
    mine = backend.range(pool, PAGES, "serving", scrub=False)
    theirs = backend.range(other, PAGES, "rollout", scrub=False)
    assert theirs.map_places(places(0, 1))
    os.kill(keeper_of(path), signal.SIGKILL)
    while page_keeper.is_keeper_alive(pool):
        time.sleep(0.01)
    assert page_keeper.socket_path(path).with_suffix(".log").exists()
    assert not theirs.map_places(places(5)), "a page that it never had"
    theirs.unmap_places(places(0, 1))
    assert mine.map_places(np.arange(PAGES, dtype=np.uint64)), "serving needs nobody"
    with pytest.raises(ConfigError, match=r"does not answer.*start them again"):
        backend.range(other, PAGES, "rollout", scrub=False)
    with pytest.raises(ConfigError, match=r"its keeper died.*stop serve, roll, and start them again"):
        page_keeper.ensure_keeper(pool, driver, library=str(library))
    assert not page_keeper.is_keeper_alive(pool), "there are no second pages"
    mine.close()
    theirs.close()
    pool.close()
    other.close()


def test_a_pipe_in_the_place_of_a_keepers_log_holds_up_nobody(tmp_path: Path) -> None:
    log = tmp_path / "keeper.log"
    os.mkfifo(log)
    code = "import sys, pathlib; from vllm_rlplugin.kvpool.pages import page_keeper as k; k._write_to(pathlib.Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", f"{code}; print('said')", str(log)], check=True, timeout=60)
    assert log.read_text() == "said\n"


def test_a_keeper_ends_with_its_pool_and_the_memory_is_free_with_a_fake_driver(
    path: Path, driver: CudaDriver, library: Path
) -> None:
    pool = kept_pool(path, driver, library, linger=0.1)
    with pytest.raises(DeviceFull):
        driver.create_pages(DEVICE - PAGES + 1)
    deadline = time.monotonic() + 10
    while page_keeper.is_keeper_alive(pool):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert not page_keeper.socket_path(path).exists()
    while page_keeper.socket_path(path).with_suffix(".log").exists():  # a clean end leaves nothing
        assert time.monotonic() < deadline
        time.sleep(0.02)
    driver.release_handles(driver.create_pages(DEVICE))
    pool.close()
    again = kept_pool(path, driver, library, pages=8)
    made_anew = kept_pool(path, driver, library, pages=4)
    assert (made_anew.made, page_keeper.is_keeper_alive(again)) == (True, True)
    driver.release_handles(driver.create_pages(DEVICE - 4))
    again.close()
    made_anew.close()


def test_a_pool_that_the_device_has_no_room_for_says_how_much_there_is_with_a_fake_driver(
    path: Path, driver: CudaDriver, library: Path
) -> None:
    with pytest.raises(ConfigError, match=rf"room for {DEVICE} of {DEVICE + 1} pages") as caught:
        kept_pool(path, driver, library, pages=DEVICE + 1)
    assert caught.value.field == "kv_pool_mib"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
@pytest.mark.parametrize(("mode", "expected"), [(0o600, "refused"), (0o666, "[]")])
def test_another_user_gets_no_page_whatever_the_sockets_mode_with_a_fake_driver(
    path: Path, driver: CudaDriver, library: Path, mode: int, expected: str
) -> None:
    pool = kept_pool(path, driver, library)
    where = page_keeper.socket_path(path)
    assert where.stat().st_mode & 0o777 == 0o600
    where.chmod(mode)
    code = "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
    code += "try: s.connect(sys.argv[1])\nexcept PermissionError: print('refused'); sys.exit()\n"
    code += "try: s.send(bytes.fromhex(sys.argv[2])); print(socket.recv_fds(s, 16, 64)[1])\nexcept OSError: print([])"
    asked = page_keeper._ASK.pack(pool.view().epoch, 1) + bytes(8)
    command = [sys.executable, "-S", "-c", code, str(where), asked.hex()]
    assert subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() == expected
    with page_keeper._connect(where) as ours:
        ours.send(asked)
        _, found, _, _ = socket.recv_fds(ours, 16, 64)
        assert len(found) == 1
        os.close(found[0])
    pool.close()


def test_what_is_no_request_ends_the_connection_and_nothing_else_with_a_fake_driver(
    path: Path, driver: CudaDriver, library: Path
) -> None:
    pool = kept_pool(path, driver, library)
    epoch = pool.view().epoch
    for wrong in (
        b"x",
        page_keeper._ASK.pack(epoch + 1, 1) + bytes(8),
        page_keeper._ASK.pack(epoch, 2) + bytes(8),
        page_keeper._ASK.pack(epoch, 1) + (99).to_bytes(8, "little"),
        page_keeper._ASK.pack(epoch, 0),
        page_keeper._ASK.pack(epoch, 1) + b"no page",
    ):
        with page_keeper._connect(page_keeper.socket_path(path)) as client:
            client.send(wrong)
            assert socket.recv_fds(client, 16, 64)[1] == []
            assert client.recv(16) == b""
    pages = KeptPages(pool, driver)
    assert np.count_nonzero(pages.acquire_handles(np.arange(PAGES, dtype=np.uint64))) == pages.imported == PAGES
    pages.close()
    path.unlink()
    while page_keeper.is_keeper_alive(pool):  # its pool was removed: it ends
        time.sleep(0.02)
    with pytest.raises(KeeperGone):
        pages.acquire_handles(places(0))


# -- for an engine -----------------------------------------------------------------------------------------------------


def test_an_engine_on_another_kind_of_memory_is_refused_with_both_sides_named_with_a_fake_driver(
    path: Path, library: Path
) -> None:
    cuda, host = CudaBackend(PAGE, 0, "created", str(library)), HostBackend(PAGE)
    made = cuda.pool(path, 4)
    assert CudaBackend(PAGE, 0, "kept", str(library)).pool(path, 0).device == made.device, "the pool says how"
    with pytest.raises(ConfigError, match=r"its pages are on 'cuda .* created', this engine computes on 'cpu'"):
        host.pool(path, 0)
    made.join("serve", "serving")
    with pytest.raises(ConfigError, match="of another shape"):
        host.pool(path, 4)
    made.close()
    assert host.pool(path, 4).made
    with pytest.raises(ConfigError, match=r"its pages are on 'cpu', this engine computes on 'cuda"):
        cuda.pool(path, 0)


def test_a_tensor_over_the_range_shares_its_memory() -> None:
    """By DLPack, as on a GPU, of this host's memory."""
    memory = (ctypes.c_int8 * 8)(*range(8))
    tensor = byte_tensor(ctypes.addressof(memory), 8, cuda=None)
    assert tensor.tolist() == list(range(8))
    tensor[3] = 77
    assert memory[3] == 77
    assert (str(tensor.dtype), str(tensor.device), tensor.shape) == ("torch.int8", "cpu", (8,))


@pytest.mark.long
@pytest.mark.engine
def test_an_engine_in_such_a_pool_makes_the_tokens_of_a_stock_one_with_a_fake_driver(
    path: Path, library: Path, tmp_path: Path
) -> None:
    """The real vLLM, whose KV cache is mapped and unmapped by a fake driver while it runs."""
    from megatron_rlplugin.tiny_model import create_qwen3
    from tests.kvpool.test_pool_engine import PAGE_KIB, REQUESTS, Driven, play
    from vllm_rlplugin.kvpool.engine.pool_engine import pool_path

    os.environ |= fake_cuda.make_device(Path(os.environ["FAKE_CUDA_DEVICE"]), 66, PAGE_KIB << 10)
    shape: dict[str, Any] = {"intermediate_size": 128, "head_dim": 32, "hidden_size": 64, "layers": 2, "heads": 2}
    shape |= {"kv_heads": 1, "seed": 1, "max_positions": 512, "dtype": "float32"}
    model = Path(create_qwen3(str(tmp_path / "m"), vocabulary=[chr(33 + at) for at in range(93)], **shape))
    name, found = f"test-cuda-{os.getpid()}", []
    pooled = {
        "kv_pool": name,
        "kv_pool_page_kib": PAGE_KIB,
        "kv_pool_mib": 2,
        "kv_pool_role": "serving",
        "kv_pool_lent": 1.0,
        "kv_pool_keep": 0.0,
    }
    try:
        for plugin in ({}, pooled):
            engine = Driven(model, 64, **plugin, **({"fake_driver": str(library)} if plugin else {}))
            try:
                engine.answer()
                play(engine, REQUESTS, "r")
                during = engine.do(steps=12)["pool"]
                found.append(engine.do(drain=True)["outputs"])
            finally:
                engine.process.kill()
                engine.process.wait()
                engine.errors.close()
        assert during["pages"] > 4
        assert found[0] == found[1]
    finally:
        pool_path(name).unlink(missing_ok=True)
        page_keeper.socket_path(pool_path(name)).unlink(missing_ok=True)
