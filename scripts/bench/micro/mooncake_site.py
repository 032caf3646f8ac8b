"""A real Mooncake Store for a benchmark: a master and a process that lends memory, on loopback; both end with the block.

``python -m scripts.bench.micro.mooncake_site MASTER BYTES`` is the lender: it joins, says ``ready``, and stays until its input
ends.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from orchestrator.api import RunError
from orchestrator.runtime.mooncake_master import MooncakeMaster
from orchestrator.transfer import MooncakeRelay

_READY = "ready"
_STOP_SECONDS = 10.0


@contextmanager
def mooncake_site(segment_bytes: int) -> Iterator[str]:
    """The master's address. Memory is the lender's, so that every transfer is one over TCP between two processes."""
    with asyncio.Runner() as runner:
        master = MooncakeMaster()
        runner.run(master.start())
        try:
            with _lender(master.address, segment_bytes):
                yield master.address
        finally:
            runner.run(master.stop())


@contextmanager
def _lender(master: str, segment_bytes: int) -> Iterator[None]:
    command = [sys.executable, "-m", "scripts.bench.micro.mooncake_site", master, str(segment_bytes)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        words = iter(process.stdout)
        if not any(line.strip() == _READY for line in words):
            raise RunError(f"the process that lends memory ended with code {process.wait()}")
        yield
    finally:
        if process.stdin is not None:
            process.stdin.close()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def main() -> None:
    """Lend, until the input ends."""
    relay = MooncakeRelay(sys.argv[1], segment_bytes=int(sys.argv[2]))
    print(_READY, flush=True)
    sys.stdin.read()
    relay.close()


if __name__ == "__main__":
    main()
