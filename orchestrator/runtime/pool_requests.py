"""The devices of a run's processes: what each asks for of the pools of ``[resources]``, whether that can be, its place in Ray.

Guarantees: a config whose processes do not fit into its pools, or whose routing names a class that no worker is in, is one
ConfigError before anything starts. Worker ids carry the job's name, so that jobs which share pools do not meet.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial

from orchestrator.api import ConfigError, MetadataStore, RetryableError
from orchestrator.config import Config
from orchestrator.policies.placement.device_allocation import DeviceBinding
from orchestrator.policies.placement.owner_heartbeats import OwnerHeartbeats
from orchestrator.proxy import router_setup
from orchestrator.resources import ROLE_CLASSES, EngineSeat, Placement, ResourceManager, reserve
from orchestrator.resources.placement_groups import RESERVE_SECONDS
from orchestrator.runtime.engine_actors import trainer_names

_BEATS = 6  # heartbeats within the time after which a job counts as dead

_logger = logging.getLogger(__name__)


def trainer_ranks(config: Config) -> int:
    """Processes of the trainer."""
    return config.trainer.ranks


def wishes(config: Config) -> list[tuple[str, str, int]]:
    """(process, class, devices) of all, trainer ranks first."""
    settings = config.resources
    ranks = [(name, settings.trainer, settings.devices_per_rank) for name in trainer_names(trainer_ranks(config))]
    return ranks + [engine_wish(config, number) for number in range(config.rollout.workers)]


def engine_wish(config: Config, number: int) -> tuple[str, str, int]:
    """The same of the engine ``vllm-number``."""
    settings, rollout, name = config.resources, config.rollout, f"vllm-{number}"
    classes = [hardware for hardware, count in settings.rollout.items() for _ in range(count)]
    if rollout.engines:
        classes = [rollout.engines[rollout.group_of(number)].hardware]
    hardware = classes[number % len(classes)] if classes else ""
    most = max(
        settings.devices_per_worker, rollout.engine_of(number).ranks, rollout.disaggregation.degrees.get(name, 1)
    )
    return name, hardware or ROLE_CLASSES["ActorGen"], most


def nodes_of(config: Config, process: str) -> int:
    """On how many nodes its devices are."""
    number = process.removeprefix("vllm-")
    return 1 if number == process else config.rollout.engine_of(int(number)).nodes


def place(
    config: Config, metadata: MetadataStore | None, job: str, note: Callable[[DeviceBinding], None] | None = None
) -> tuple[ResourceManager, dict[str, Placement]]:
    """Bind all processes of a job. Raises ConfigError, and RetryableError when other jobs have what is needed."""
    manager, places = _manager(config, metadata, job), dict[str, Placement]()
    apart = trainer_ranks(config) if config.rollout.reshapes else None
    try:
        for name, hardware, devices in wishes(config)[:apart]:
            nodes = nodes_of(config, name)
            places[name] = Placement(manager, _worker_id(job, name), hardware, devices, nodes=nodes, note=note)
            places[name].bind()
        if apart is not None:
            places |= _seats(config, manager, job, note)
    except RetryableError:
        manager.close()  # others may fit in
        raise
    return manager, places


def _seats(
    config: Config,
    manager: ResourceManager | None = None,
    job: str = "",
    note: Callable[[DeviceBinding], None] | None = None,
) -> dict[str, EngineSeat]:
    """Of engines that are cut anew, whose devices are reserved together: some of one node, or all of several
    (:func:`orchestrator.runtime.engine_cuts.check`)."""
    count, hardware = config.rollout.workers, engine_wish(config, 0)[1] if manager else ""
    many = bool(manager or config.ray.address)
    nodes = max(1, count // config.resources.devices_per_server) if many else 1
    name = _worker_id(job, "engines")
    block = Placement(manager, name, hardware, count, nodes=nodes, cpus=count / nodes, note=note)
    block.bind()
    return {f"vllm-{number}": EngineSeat(block, f"vllm-{number}", number) for number in range(count)}


async def place_beside_others(
    config: Config, metadata: MetadataStore, job: str, note: Callable[[DeviceBinding], None], say: Callable[[str], None]
) -> tuple[ResourceManager, dict[str, Placement]]:
    """:func:`place`, in pools that jobs share: it waits for what others have, long enough to find out who is dead, and has that
    then. Raises as :func:`place`."""
    loop, silent = asyncio.get_running_loop(), config.resources.silent
    beats, deadline = OwnerHeartbeats(silent), loop.time() + 1.5 * silent
    while True:
        try:
            return await asyncio.to_thread(place, config, metadata, job, note)
        except RetryableError:
            if loop.time() >= deadline:
                raise
        manager = await asyncio.to_thread(_manager, config, metadata, job)
        if freed := await asyncio.to_thread(manager.free_silent, beats, loop.time()):
            say(f"no sign of life from {', '.join(freed)} for {silent:g} s: its devices are free")
        else:
            await asyncio.sleep(silent / _BEATS)


async def keep_beating(manager: ResourceManager, silent: float) -> None:
    """Until cancelled. Raises RunError when the job has lost what it had; outages of the store are sat out."""
    while True:
        try:
            await asyncio.to_thread(manager.beat)
        except RetryableError as error:
            _logger.warning("no heartbeat: %s", error)
        await asyncio.sleep(silent / _BEATS)


def _manager(config: Config, metadata: MetadataStore | None, job: str) -> ResourceManager:
    settings = config.resources
    return ResourceManager(
        settings.pools,
        metadata=metadata,
        name=settings.name,
        owner=job,
        compatible=settings.compatible,
        per_server=settings.devices_per_server,
    )


def place_of_engine(
    config: Config,
    manager: ResourceManager | None,
    job: str,
    number: int,
    shared: bool,
    note: Callable[[DeviceBinding], None] | None = None,
) -> Placement:
    """The place of one engine more, not bound. ``manager`` None: no pools; ``shared``: it has no devices of its own."""
    name, hardware, devices = engine_wish(config, number)
    nodes = nodes_of(config, name)
    if manager is None:
        return Placement(None, name, "", 0 if shared else devices, nodes=nodes)
    return Placement(manager, _worker_id(job, name), hardware, devices, nodes=nodes, note=note)


def _worker_id(job: str, name: str) -> str:
    return f"{job}/{name}" if job else name


def without_pools(config: Config, say: Callable[[str], None]) -> dict[str, Placement]:
    """Devices of its own for every process of a run that names no pools, where Ray has GPUs for all. None where this machine has
    too few, which is said, or where the trainer shares them. ConfigError: a cluster has too few."""
    import ray

    wanted = [(name, devices) for name, _, devices in wishes(config)]
    there, needed = ray.cluster_resources().get("GPU", 0), sum(devices for _, devices in wanted)
    if config.rollout.colocation.enabled:
        return {}
    if (wide := max(group.nodes for group in config.rollout.engine_groups)) > 1 and needed > there:
        fix = f"the run needs {needed} GPUs and Ray has {there:g}: a multi-node engine needs a Ray that counts devices"
        raise ConfigError("rollout.engine.nodes", wide, fix)
    if not there:
        return {}
    if needed > there and config.ray.address:
        fix = (
            f"the run needs {needed} GPUs and this cluster has {there:g}: start fewer or smaller engines, or add nodes"
        )
        raise ConfigError("ray.address", config.ray.address, fix)
    if needed > there:
        say(f"the run needs {needed} GPUs and Ray has {there:g}: its processes share the devices that they see")
        return {}
    places = {name: Placement(None, name, "", devices, nodes=nodes_of(config, name)) for name, devices in wanted}
    return places | _seats(config) if config.rollout.reshapes else places


def reserve_all(config: Config, places: Mapping[str, Placement]) -> None:
    """Trainer ranks beside each other, engines over the nodes. Raises ConfigError and RetryableError; blocks."""
    ranks, seconds = trainer_ranks(config), RESERVE_SECONDS if config.ray.address else 1.0  # nodes may be on their way
    reserve(list(places.values())[:ranks], "PACK", seconds)
    so_far = f"the trainer's {ranks} ranks had their places, the engines had none"
    try:
        engines = dict.fromkeys(place.whole for place in list(places.values())[ranks:])
        reserve(list(engines), "SPREAD", seconds)
    except ConfigError as error:
        raise ConfigError(error.field, error.value, f"{error.fix}; {so_far}") from error
    except RetryableError as error:
        raise RetryableError(f"{error}; {so_far}") from error


def check(config: Config) -> None:
    """Whether it fits into empty pools, and the routing into what comes of it. Raises ConfigError; starts nothing."""
    names = [f"vllm-{index}" for index in range(config.rollout.workers)]
    placed = [""] * len(names)
    if config.resources.pools:
        try:
            _, places = place(config, None, "")
        except RetryableError as error:
            raise ConfigError(
                "resources.pools", config.resources.pools, f"this run does not fit into them: {error}"
            ) from error
        placed = [places[name].bind().hardware for name in names]
    served = [url.rstrip("/") for url in config.rollout.served]
    borrowed = [False] * len(names) + [True] * len(served)
    hardware = [*placed, *([""] * len(served))]
    later = partial(router_setup.may_come, config.rollout)
    router_setup.planned_router(
        config.rollout.routing, [*names, *served], hardware, borrowed, config.rollout.disaggregation, later
    )
