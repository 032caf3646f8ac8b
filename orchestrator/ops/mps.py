"""NVIDIA's Multi-Process Service on one host: started, shares set, watched, brought back (RollPacker 4.3).

MPS lets the processes of a judge and of a rollout engine compute on one GPU at the same time. It gives no error isolation: a
fault of one client ends the server for all of them.

Guarantees: one control daemon with folders of its own, not the system's; what it does not do, or not within ``timeout``, is a
RetryableError in its words; :meth:`MpsControl.check` says whether the daemon answers, and :meth:`MpsControl.revive` starts it
anew: clients of the server that is gone have failed then, and are restarted by their owners. ``stop`` is idempotent and ends
the server with the daemon.
"""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import dataclass
from pathlib import Path

from orchestrator.api import ConfigError, RetryableError

BINARY = "nvidia-cuda-mps-control"
TIMEOUT = 10.0  # seconds for one command


@dataclass(frozen=True, slots=True)
class MpsHealth:
    """``daemon``: it answers. ``servers``: process ids; none before the first client came. ``error``: why not, in words."""

    daemon: bool
    servers: tuple[int, ...] = ()
    error: str = ""


class MpsControl:
    """``folder``: for its pipes and logs; ``devices``: CUDA_VISIBLE_DEVICES of the daemon, "" for all. Raises ConfigError where
    the control program is not installed."""

    def __init__(
        self,
        folder: Path,
        devices: str = "",
        *,
        binary: str = BINARY,
        timeout: float = TIMEOUT,
        otherwise: str = "without it set reward.judge.streamed.mps to false",
    ) -> None:
        found = shutil.which(binary)
        if found is None:
            fix = f"is not on this host: it comes with NVIDIA's driver; {otherwise}"
            raise ConfigError("mps", binary, fix)
        self._binary = found
        self._timeout = timeout
        self._folder = folder
        self._devices = devices
        self.restarts = 0

    def environment(self, percentage: int | None = None) -> dict[str, str]:
        """What a client's process starts with. ``percentage`` of the GPU's threads at most (None: the daemon's default)."""
        given = {
            "CUDA_MPS_PIPE_DIRECTORY": str(self._folder / "pipes"),
            "CUDA_MPS_LOG_DIRECTORY": str(self._folder / "logs"),
        }
        if percentage is not None:
            given["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(_share(percentage))
        return given

    async def start(self) -> None:
        """Start the daemon, which puts itself into the background. Raises RetryableError."""
        for name in ("pipes", "logs"):
            folder = self._folder / name
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        await self._run("-d")
        if not (found := await self.check()).daemon:
            raise RetryableError(f"MPS did not start: {found.error}")

    async def set_share(self, percentage: int) -> None:
        """The default share of the GPU's threads of clients that start from now on."""
        await self.command(f"set_default_active_thread_percentage {_share(percentage)}")

    async def share(self) -> float:
        """That default, in per cent."""
        answer = await self.command("get_default_active_thread_percentage")
        try:
            return float(answer)
        except ValueError as error:
            raise RetryableError(f"MPS says {answer[:100]!r} when asked for its share") from error

    async def check(self) -> MpsHealth:
        """Whether it works. Raises nothing."""
        try:
            answer = await self.command("get_server_list")
        except RetryableError as error:
            return MpsHealth(False, error=str(error))
        return MpsHealth(True, tuple(int(word) for word in answer.split() if word.isdigit()))

    async def revive(self) -> bool:
        """Start it anew if it does not answer. Returns whether that was necessary. Raises RetryableError."""
        if (await self.check()).daemon:
            return False
        self.restarts += 1
        await self.start()
        return True

    async def stop(self) -> None:
        """End server and daemon."""
        if (await self.check()).daemon:
            await self.command("quit -t 5")

    async def command(self, text: str) -> str:
        """One command of the control program; its answer. Raises RetryableError."""
        return await self._run(words=text)

    async def _run(self, *arguments: str, words: str = "") -> str:
        environment = {"PATH": "/usr/bin:/bin", **self.environment()}
        if self._devices:
            environment["CUDA_VISIBLE_DEVICES"] = self._devices
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            self._binary, *arguments, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.STDOUT, env=environment
        )
        try:
            async with asyncio.timeout(self._timeout):
                answer, _ = await process.communicate(f"{words}\n".encode() if words else b"")
        except TimeoutError as error:
            process.kill()
            await process.wait()
            raise RetryableError(
                f"MPS does not answer {words or ' '.join(arguments)!r} within {self._timeout:g} s"
            ) from error
        said = answer.decode(errors="replace").strip()
        if process.returncode:
            raise RetryableError(f"MPS refuses {words or ' '.join(arguments)!r}: {said[:300] or process.returncode}")
        return said


def _share(percentage: int) -> int:
    if not 0 < percentage <= 100:
        raise ConfigError("mps percentage", percentage, "give a share from 1 to 100")
    return percentage
