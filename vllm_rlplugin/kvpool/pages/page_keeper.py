"""The process that keeps the memory of a pool's pages on a GPU, and hands it to the engines as file descriptors.

``python -m vllm_rlplugin.kvpool.pages.page_keeper POOL``, started by the engine that makes the pool
(:func:`ensure_keeper`). It makes all pages before anybody joins, computes nothing and has no context on the device.
Guarantees:

* It belongs to no engine: whichever dies, the pages stay. One per pool and rank, by a lock on the pool's file that the
  kernel drops with it.
* Its socket is for the pool's owner: mode 0600, and each side asks the kernel who the other is before a descriptor goes
  over.
* It ends when nobody has lived in the pool for ``linger`` seconds, or when the pool is made anew or its file is
  removed, and the memory is free then.
* What it says after its start is in a file beside the socket (``.log``), which a clean end removes.
* If it dies, engines keep every page they ever had (a handle holds its memory), the serving engine all of them; what an
  engine never had it cannot get any more: "no page", and an engine that starts is told so.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import selectors
import socket
import struct
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from orchestrator.api import ConfigError, RunError
from vllm_rlplugin.kvpool.ledger import native_pages
from vllm_rlplugin.kvpool.ledger.page_ledger import PagePool, Pages, PoolError
from vllm_rlplugin.kvpool.pages.cuda_driver import LIBRARY, CudaDriver, DeviceFull, Handles

LINGER = 30.0  # seconds
BATCH = 64  # descriptors in a message; the kernel takes 253
_PATIENCE = 2.0  # seconds for one answer
_START = 60.0  # seconds: to make the pages of a large device
_POLL = 0.2  # seconds between two looks at the pool
_ASK = struct.Struct("<QI")  # epoch, pages that follow
_CREDENTIALS = struct.Struct("iII")  # process, user, group

MODULE = "vllm_rlplugin.kvpool.pages.page_keeper"


class KeeperGone(PoolError):
    """It does not answer, or keeps the pages of another pool."""


def socket_path(pool: Path, rank: int = 0) -> Path:
    """Of the keeper of this rank's pages, beside the pool's file."""
    return pool.with_name(f"{pool.name}{f'.{rank}' if rank else ''}.pages")


def _peer(found: socket.socket) -> int:
    """The user at the other end, by the kernel."""
    data = found.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(data)[1])


# -- the engine's side -------------------------------------------------------------------------------------------------


class KeptPages:
    """Handles of a pool's pages, imported when they are needed first (``cuda_pages.PageSource``)."""

    def __init__(self, pool: PagePool, driver: CudaDriver) -> None:
        self._pool, self._driver = pool, driver
        self._epoch = pool.view().epoch
        self._handles: Handles = np.zeros(pool.pages, np.uint64)
        self._socket: socket.socket | None = None

    @property
    def imported(self) -> int:
        """Pages whose memory this process could map without the keeper."""
        return int(np.count_nonzero(self._handles))

    def acquire_handles(self, pages: Pages) -> Handles:
        """See the protocol."""
        at = pages.astype(np.int64)
        missing = pages[self._handles[at] == 0]
        for begin in range(0, missing.size, BATCH):
            self._import(missing[begin : begin + BATCH])
        return self._handles[at]

    def release_handles(self, pages: Pages) -> None:
        """Nothing to do: the handles are used again."""

    def close(self) -> None:
        """See the protocol."""
        self._hang_up()
        self._driver.release_handles(self._handles[self._handles != 0])
        self._handles[:] = 0

    def _import(self, pages: Pages) -> None:
        descriptors = self._request_handles(pages)
        try:
            if len(descriptors) != pages.size:
                self._hang_up()
                why = "it ends, keeps the pages of another pool, or this process may not open that many files"
                raise KeeperGone(
                    f"the keeper of {self._pool.path} gave {len(descriptors)} of {pages.size} pages: {why}"
                )
            self._handles[pages.astype(np.int64)] = self._driver.import_handles(descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _request_handles(self, pages: Pages) -> list[int]:
        try:
            if self._socket is None:
                self._socket = _connect(socket_path(self._pool.path, self._pool.rank))
            self._socket.sendall(_ASK.pack(self._epoch, pages.size) + pages.astype("<u8").tobytes())
            _, descriptors, _, _ = socket.recv_fds(self._socket, 16, BATCH, socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            self._hang_up()
            why = f"{error}; its last words: {socket_path(self._pool.path, self._pool.rank).with_suffix('.log')}"
            text = (
                f"the keeper of {self._pool.path} does not answer ({why}); end the pool's engines, and start them again"
            )
            raise KeeperGone(text) from error
        return list(descriptors)

    def _hang_up(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _connect(path: Path) -> socket.socket:
    found = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        found.settimeout(_PATIENCE)
        found.connect(str(path))
        if _peer(found) != os.geteuid():
            raise PermissionError(f"{path} is answered by user {_peer(found)}")
    except OSError:
        found.close()
        raise
    return found


def is_keeper_alive(pool: PagePool) -> bool:
    """Whether a keeper of this pool lives."""
    return bool(native_pages.library().rlc_pool_kept(pool.handle))


def ensure_keeper(pool: PagePool, driver: CudaDriver, *, library: str = LIBRARY, linger: float = LINGER) -> None:
    """Start the pool's keeper if there is none; returns when it has the pages. Raises ConfigError: the device has no room for
    so many, or engines live on the pages of one that died; RunError: it did not start."""
    deadline = time.monotonic() + _START
    command = [sys.executable, "-m", MODULE, str(pool.path), "--rank", str(pool.rank)]
    command += ["--device", str(driver.ordinal), "--library", library]
    while True:
        if is_keeper_alive(pool):
            if _has(pool, driver):
                return
            if time.monotonic() > deadline:
                fix = f"end its process, which listens at {socket_path(pool.path, pool.rank)}"
                raise RunError(f"the keeper of {pool.path} does not answer, and does not end: {fix}")
            time.sleep(_POLL / 4)  # it starts just now, or is about to end with the pool that was here before
            continue
        pool.reap()
        if there := [tenant.name for tenant in pool.view().tenants]:  # theirs is the memory of the keeper that died
            fix = f"its keeper died, and a new one would have new pages: stop {', '.join(there)}, and start them again"
            raise ConfigError("kv_pool", str(pool.path), fix)
        child = subprocess.Popen(
            [*command, "--linger", str(linger)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        said = _first_words(child, pool)
        if "made" in said:
            mib = said["made"] * pool.page_bytes >> 20
            fix = f"{said['error']}; give at most {mib}"
            raise ConfigError("kv_pool_mib", pool.pages * pool.page_bytes >> 20, fix)
        if "error" not in said:
            return
        if not is_keeper_alive(pool):
            raise RunError(f"the keeper of {pool.path} did not start: {said['error']}")


def _first_words(child: subprocess.Popen[bytes], pool: PagePool) -> dict[str, Any]:
    """What it says when it is ready, or why it is not; it closes its output with that."""
    assert child.stdout is not None
    assert child.stderr is not None
    with child.stdout, child.stderr:
        ready = select.poll()  # select() takes no file above 1,023, and an engine may have opened more
        ready.register(child.stdout, select.POLLIN)
        if not ready.poll(1000 * _START):
            child.kill()
            child.wait()
            raise RunError(f"the keeper of {pool.path} did not start within {_START:g} s")
        line = child.stdout.readline()
        if line:
            return dict(json.loads(line))
        return {"error": child.stderr.read().decode(errors="replace")[-500:] or "it said nothing"}


def _has(pool: PagePool, driver: CudaDriver) -> bool:
    pages = KeptPages(pool, driver)
    try:
        pages.acquire_handles(np.zeros(1, np.uint64))
    except KeeperGone:
        return False
    finally:
        pages.close()
    return True


# -- its own side ------------------------------------------------------------------------------------------------------


class PageKeeper:
    """Of one pool, which it has locked. Raises RunError: another one does; DeviceFull."""

    def __init__(self, pool: PagePool, driver: CudaDriver) -> None:
        if native_pages.library().rlc_pool_keep(pool.handle):
            raise RunError(f"{pool.path} already has a keeper")
        self._pool, self._driver = pool, driver
        self._epoch = pool.view().epoch
        self._handles = driver.create_pages(pool.pages)
        path = socket_path(pool.path, pool.rank)
        path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        mask = os.umask(0o177)
        try:
            self._socket.bind(str(path))
        finally:
            os.umask(mask)
        self._socket.listen(native_pages.TENANTS)
        self._socket.setblocking(False)
        self._watch = selectors.DefaultSelector()
        self._watch.register(self._socket, selectors.EVENT_READ)

    def run(self, linger: float) -> None:
        """Until nobody needs it."""
        seen = time.monotonic()
        while time.monotonic() - seen < linger:
            for key, _ in self._watch.select(_POLL):
                found = key.fileobj
                assert isinstance(found, socket.socket)
                if found is self._socket:
                    self._accept_client()
                elif not self._answer_client(found):
                    self._watch.unregister(found)
                    found.close()
            try:
                self._pool.reap()
                view = self._pool.view()
            except PoolError:  # an engine is stopped inside the ledger: the serving engine's business
                continue
            if view.epoch != self._epoch or not self._pool.path.exists():
                return
            if view.tenants:
                seen = time.monotonic()

    def close(self) -> None:
        """The memory is free where no engine holds it."""
        self._watch.close()
        self._socket.close()
        if self._pool.view().epoch == self._epoch:
            socket_path(self._pool.path, self._pool.rank).unlink(missing_ok=True)
        self._driver.release_handles(self._handles)

    def _accept_client(self) -> None:
        try:
            found, _ = self._socket.accept()
        except OSError:  # it went away, or no file may be opened just now: it waits in the kernel's queue
            return
        if _peer(found) != os.geteuid():
            found.close()
            return
        found.setblocking(False)
        self._watch.register(found, selectors.EVENT_READ)

    def _answer_client(self, client: socket.socket) -> bool:
        """One request; False: this client is done with. Nobody is waited for."""
        descriptors: list[int] = []
        try:
            asked = client.recv(_ASK.size + 8 * BATCH)
            if len(asked) < _ASK.size or len(asked) % 8 != _ASK.size % 8:
                return False
            epoch, count = _ASK.unpack_from(asked)
            pages = np.frombuffer(asked, "<u8", offset=_ASK.size)
            right = epoch == self._epoch and 0 < count == pages.size and int(pages.max()) < self._handles.size
            if right:
                for page in pages:  # one by one: those before one that fails are closed, too
                    descriptors.append(self._driver.export_handle(int(self._handles[int(page)])))
            socket.send_fds(client, [b"pages" if right else b"other"], descriptors)
        except (OSError, PoolError):  # it went away, does not read, or the driver has no descriptor for it
            return False
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return right


def main() -> int:
    """Exit code 0: nobody needed it any more."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pool", type=Path)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--library", default=LIBRARY)
    parser.add_argument("--linger", type=float, default=LINGER)
    options = parser.parse_args()
    with closing(PagePool.open(options.pool, options.rank)) as pool:
        try:
            driver = CudaDriver(pool.page_bytes, ordinal=options.device, library=options.library)
            keeper = PageKeeper(pool, driver)
        except (ConfigError, RunError) as error:
            made = {"made": error.made} if isinstance(error, DeviceFull) else {}
            print(json.dumps({"error": str(error), **made}), flush=True)
            return 2
        print(json.dumps({"pages": pool.pages}), flush=True)
        log = _write_to(socket_path(pool.path, pool.rank).with_suffix(".log"))
        try:
            keeper.run(options.linger)
        finally:
            keeper.close()
            driver.close()
        log.unlink(missing_ok=True)
    return 0


def _write_to(log: Path) -> Path:
    """Let go of the starter's pipes: it waits for their end. What is said from here on is for whoever looks why we died."""
    log.unlink(missing_ok=True)  # what is not ours stays, and this process ends
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    os.close(file)
    return log


if __name__ == "__main__":
    sys.exit(main())
