"""The judge that a run starts itself (`reward.judge.path`), and NVIDIA's MPS for it and the engines (RollPacker 4.3).

Guarantees: the judge is a child in the run's keeper, restarted at its old address with its old token; MPS is started only where
the judge may come to a GPU that engines of this machine use, and why it is not is said in the event ``judge``; where it is, it
is watched and revived: its clients, which die with it, are restarted by their own owners. Everything is stopped with the run's
exit stack. Nothing here was tried on a GPU.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import aiohttp

from orchestrator.api import ConfigError, RetryableError, RunError
from orchestrator.api.jsontext import parse_object
from orchestrator.config import Config
from orchestrator.config.reward_keys import JudgeSection
from orchestrator.events import EventLog
from orchestrator.ops.mps import MpsControl
from orchestrator.profiler.profile_file import check_profile, load_profile, model_name
from orchestrator.rewards.host_launch import JudgeHost
from orchestrator.run_folder import RunFolder, environment_owner
from orchestrator.runtime.process_keeper import Keeper

_DRIVER = Path("/dev/nvidiactl")  # there where a process may use NVIDIA's GPUs
_WATCH_SECONDS = 5.0
_MISSES = 3  # looks in a row without an answer: MPS is gone
_HEALTH_SECONDS = 10.0


def check(config: Config) -> None:
    """What can be known before anything starts of the judges that the run starts. Raises ConfigError."""
    for name, judge in config.reward.own_judges.items():
        _check(judge, f"reward.judges.{name}" if name else "reward.judge")
    if config.reward.own_judges and not why_no_mps(config):
        MpsControl(Path())  # says how to go on where it is not installed


def _check(judge: JudgeSection, field: str) -> None:
    folder = Path(judge.path)
    fix = "give a Hugging Face folder with weights, a tokenizer and a chat template"
    try:
        parse_object((folder / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{field}.path", judge.path, f"its config.json cannot be read ({error}); {fix}") from error
    if not (folder / "tokenizer_config.json").is_file():
        raise ConfigError(f"{field}.path", judge.path, f"has no tokenizer_config.json; {fix}")
    device = judge.streamed.device
    if device.startswith("cuda") and not gpu_here():
        raise ConfigError(f"{field}.streamed.device", device, "this host has no GPU: auto, or cpu")
    if judge.streamed.layers_file and (device.startswith("cuda") or (device == "auto" and gpu_here())):
        fix = 'for a GPU, layers are kept in pinned memory: leave it out, or set device = "cpu"'
        raise ConfigError(f"{field}.streamed.layers_file", judge.streamed.layers_file, fix)
    if judge.streamed.profile:
        name = f"{field}.streamed.profile"
        file = load_profile(Path(judge.streamed.profile), name)
        key = replace(file.key, model=model_name(folder, judge.streamed.dtype))
        check_profile(file, key, name)  # engine and device: by the judge, when it starts


def gpu_here() -> bool:
    """Whether this process may use an NVIDIA GPU of this host."""
    return _DRIVER.exists() and os.environ.get("CUDA_VISIBLE_DEVICES", "0") not in ("", "-1")


def why_no_mps(config: Config) -> str:
    """In words; "": it is to be started."""
    streamed = [judge.streamed for judge in config.reward.own_judges.values()]
    if all(one.device == "cpu" for one in streamed):
        return "the judge runs on the CPU"
    if not gpu_here():
        return "there is no GPU here: the judge runs on the CPU"
    if not all(one.mps for one in streamed):
        return "reward.judge.streamed.mps is false"
    if config.ray.address or not config.rollout.workers:
        return "the engines are not this run's processes on this host"
    return ""


async def start(
    config: Config, keeper: Keeper, stack: AsyncExitStack, folder: RunFolder, events: EventLog
) -> tuple[dict[str, JudgeHost], Mapping[str, str]]:
    """The judges that the run starts, up, by task; and what the environment of engines beside them needs. Raises ConfigError and
    RunError."""
    own = config.reward.own_judges
    without, mps = why_no_mps(config), None
    if own and not without:
        restarts = max(judge.streamed.restarts for judge in own.values())
        mps = await start_mps(folder_of(environment_owner(folder.path)), keeper, stack, restarts)
    hosts = {name: await _start(judge, name, mps, keeper, stack, folder) for name, judge in own.items()}
    for name, host in hosts.items():
        events.emit(
            "judge", mps=mps is not None, why=without, **({"task": name} if name else {}), **await _health(host)
        )
    return hosts, mps.environment() if mps is not None else {}


async def _start(
    judge: JudgeSection, task: str, mps: MpsControl | None, keeper: Keeper, stack: AsyncExitStack, folder: RunFolder
) -> JudgeHost:
    streamed, name = judge.streamed, f"judge {task}".strip()
    host = JudgeHost(
        judge.path,
        device=streamed.device,
        dtype=streamed.dtype,
        memory_mb=streamed.memory_mb,
        layers_file=streamed.layers_file,
        profile=streamed.profile,
        threads=streamed.threads,
        start_seconds=streamed.start_seconds,
        beside=mps.environment(streamed.mps_share) if mps is not None else None,
        log=folder.logs / f"{name.replace(' ', '-')}.log",
    )
    await host.start()
    stack.push_async_callback(host.stop)
    keeper.keep(name, host, streamed.restarts)
    return host


async def _health(host: JudgeHost) -> dict[str, object]:
    """What it says of itself."""
    try:
        timeout = aiohttp.ClientTimeout(total=_HEALTH_SECONDS)
        headers = {"Authorization": f"Bearer {host.token}"}
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
            session.get(f"{host.base_url}/health") as answer,
        ):
            found = await answer.json()
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise RunError(f"the judge started and does not answer: {error!r}") from error
    return {name: found[name] for name in ("device", "layers", "resident")}


# -- MPS ---------------------------------------------------------------------------------------------------------------


class MpsChild:
    """The MPS daemon, for a keeper. It puts itself into the background, so that it is asked whether it is there."""

    def __init__(self, mps: MpsControl, watch_seconds: float = _WATCH_SECONDS) -> None:
        self._mps = mps
        self._watch_seconds = watch_seconds

    @property
    def pid(self) -> int | None:
        """It tells nobody."""
        return None

    async def ended(self) -> None:
        """Wait until it does not answer."""
        misses = 0
        while misses < _MISSES:
            await asyncio.sleep(self._watch_seconds)
            misses = 0 if (await self._mps.check()).daemon else misses + 1

    async def restart(self) -> None:
        """Raises RunError."""
        try:
            await self._mps.revive()
        except RetryableError as error:
            raise RunError(str(error)) from error


async def start_mps(place: Path, keeper: Keeper, stack: AsyncExitStack, restarts: int) -> MpsControl:
    """One daemon, found again if the run was killed and is resumed. Raises ConfigError and RunError."""
    mps = MpsControl(place)
    child = MpsChild(mps)
    await child.restart()
    stack.push_async_callback(_stop, mps)
    keeper.keep("MPS", child, restarts)
    return mps


async def _stop(mps: MpsControl) -> None:
    """One that does not go holds nothing of the run, and must not hide what ended it."""
    try:
        await mps.stop()
    except RetryableError as error:
        print(f"MPS did not stop: {error}", flush=True)


def folder_of(owner: str) -> Path:
    """Where the daemon of a run has its socket: short, as paths of sockets are limited to 108 bytes, and nobody else's. Raises
    RunError."""
    found = Path(tempfile.gettempdir()) / f"rl-coserve-mps-{os.getuid()}-{owner[-40:]}"
    found.mkdir(mode=0o700, exist_ok=True)
    state = found.lstat()
    if found.is_symlink() or state.st_uid != os.getuid() or state.st_mode & 0o077:
        raise RunError(f"{found} belongs to someone else or is open to others: MPS is not started there")
    return found
