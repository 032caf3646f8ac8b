"""How large the pools of a run are: engines, environments (trajectories in flight) and calls that score.

A config says what a run begins with; ``scale.json`` in its folder, where there is one, what it is to have from then on, after a
resume too. Who may write into the folder may write the file: ``rl-coserve scale``, or a policy of one's own. Guarantees: it is
replaced as a whole; a file that says what cannot be changes nothing, and is told once.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.api import ConfigError
from orchestrator.api.jsontext import parse_object
from orchestrator.config import Config
from orchestrator.durable_files import write_durably
from orchestrator.events import EventLog

FILE = "scale.json"
_EVERY = 1.0  # seconds between two looks


@dataclass(frozen=True, slots=True)
class PoolSize:
    """What a run begins with, the least that it can do with, and the most that it may have; None: what there is room for."""

    begins: int
    least: int
    most: int | None = None


def pools_of(config: Config) -> dict[str, PoolSize]:
    """The pools of a run that may change: ``rollout``, or ``rollout.0`` and so on for its groups of engines; ``environments``; of
    a reward function on the embedded host ``rewards``, its calls at a time, each with a process."""
    rollout = config.rollout
    pools: dict[str, PoolSize] = {}
    fixed = rollout.reshapes or rollout.colocation.enabled or rollout.disaggregation.degrees or not rollout.workers
    counts = [group.count for group in rollout.engines] or [rollout.workers]
    if not fixed:
        names = [f"rollout.{index}" for index in range(len(counts))] if len(counts) > 1 else ["rollout"]
        pools |= {name: PoolSize(count, 1) for name, count in zip(names, counts, strict=True)}
    pools["environments"] = PoolSize(rollout.environments, config.group_members)
    reward, outcome = config.reward, config.task.name == "agent" and not config.reward.function
    if reward.host == "embedded" and not (reward.url or reward.judge.any or outcome):
        begins = min(reward.concurrency, 2 * (os.cpu_count() or 1))
        pools["rewards"] = PoolSize(begins, 1, reward.concurrency)
    return pools


def read_sizes(folder: Path, config: Config) -> dict[str, int]:
    """By pool, as the file says and else the config. Raises ConfigError."""
    pools = pools_of(config)
    try:
        said = parse_object((folder / FILE).read_bytes())
    except FileNotFoundError:
        said = {}
    except (OSError, ValueError) as error:
        raise ConfigError(
            FILE, str(folder / FILE), f"cannot be read ({error}); write an object of whole numbers"
        ) from error
    for name, size in said.items():
        _check(pools, name, size)
    return {name: said.get(name, pool.begins) for name, pool in pools.items()}


def change_sizes(folder: Path, config: Config, changes: Sequence[str]) -> None:
    """Each of them is ``POOL=N``, ``POOL=+N`` or ``POOL=-N``. Raises ConfigError, and then nothing was changed."""
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two changes at once are two changes
        sizes, pools = read_sizes(folder, config), pools_of(config)
        for change in changes:
            found = re.fullmatch(r"([\w.]+)=([+-]?)(\d{1,9})", change)
            if found is None:
                raise ConfigError("scale", change, "write it as POOL=+2, POOL=-1 or POOL=4")
            name, sign, number = found[1], found[2], int(found[3])
            present = sizes.get(name, 0)
            sizes[name] = {"": number, "+": present + number, "-": present - number}[sign]
            _check(pools, name, sizes[name])
        write_durably(folder / FILE, json.dumps(sizes, indent=2, sort_keys=True) + "\n")
    except OSError as error:
        raise ConfigError("run", str(folder), f"cannot be written ({error.strerror})") from error
    finally:
        os.close(lock)


def _check(pools: Mapping[str, PoolSize], name: str, size: object) -> None:
    """Raises ConfigError."""
    if name not in pools:
        raise ConfigError(
            "scale", name, f"this run has no such pool, or it cannot change; there are: {', '.join(pools)}"
        )
    least, most = pools[name].least, pools[name].most
    if type(size) is not int or size < least or (most is not None and size > most):
        end = "" if most is None else f" and at most {most} (reward.concurrency)"
        raise ConfigError(f"scale.{name}", size, f"give a whole number of at least {least}{end}")


class PoolWatch:
    """Tells the pools of a run their sizes whenever they change. ``begins``: what they have; ``read``: what all are to have, as
    :func:`read_sizes`; ``tell``: by pool."""

    def __init__(
        self,
        begins: Mapping[str, int],
        read: Callable[[], Awaitable[Mapping[str, int]]],
        tell: Mapping[str, Callable[[int], None]],
        events: EventLog,
    ) -> None:
        self._begins, self._read, self._tell, self._events = begins, read, tell, events

    async def run(self) -> None:
        """Until cancelled."""
        known = dict(self._begins)
        complaint = ""
        while True:
            try:
                sizes, why = await self._read(), ""
            except ConfigError as error:
                sizes, why = {}, str(error)
            if why and why != complaint:
                self._events.emit("fault", what="scale", cause="scale", detail=why[:300])
            complaint = why
            for name, size in sizes.items():
                if known.get(name) != size:
                    known[name] = size
                    if name in self._tell:
                        self._tell[name](size)
                    else:
                        self._events.emit("fault", what="scale", cause="scale", detail=f"{name} cannot be changed here")
            await asyncio.sleep(_EVERY)
