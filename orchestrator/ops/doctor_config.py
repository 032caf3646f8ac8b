"""What a config adds to ``rl-coserve doctor``: its packages, ports, disks and limits; and what it cannot do without fails.

Guarantees: a part that the run would be refused for is a failure here, not a warning
(:mod:`orchestrator.ops.requirements` is the list of both). What is written to the relay (1 KB, under a name that was never
there) is removed again; nothing is started.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from orchestrator.config import Config
from orchestrator.hooks.tested_versions import MOONCAKE, VLLM
from orchestrator.ops import doctor_machine as machine
from orchestrator.ops import requirements
from orchestrator.ops.check import Check, Finding
from orchestrator.tasks import registry
from orchestrator.transfer import RelayEndpoint, RelayError, open_relay

_ONLY = {  # checks that are of no use without the component
    MOONCAKE: ("mooncake", "mooncake store", "system libraries"),
    VLLM: ("vllm", "vllm plugin"),
}
_RELAY_BYTES = 1024
_RELAY_LIMIT = 30.0  # seconds: an object store may be far away
# Of the orchestrator's process: a connection to an engine or its server, a reward call, two pipes of an environment process.
_FILES_AN_ENVIRONMENT = 4
_LOOPBACK = "127.0.0.1"


def checks_for_config(checks: Sequence[Check], config: Config) -> list[Check]:
    """The checks that matter to this config, and those of its own."""
    wanted = requirements.required_components(config)
    names = {component.name.lower() for component in wanted}
    useless = {name for component, of_it in _ONLY.items() if component not in wanted for name in of_it}
    kept = [check for check in checks if check.name not in useless]
    made: dict[str, Callable[[], Finding]] = {
        "disk": partial(machine.check_disk, Path(config.run.folder)),
        "open files": partial(
            machine.check_open_files, machine.OPEN_FILES + _FILES_AN_ENVIRONMENT * config.rollout.environments
        ),
        "shared memory": partial(machine.check_shared_memory, shared_memory_wanted(config)),
    }
    found = []
    for check in kept:
        if check.name in made:
            check = replace(check, run=made[check.name])
        elif check.name in names or (check.name == "sandbox" and _needs_sandbox(config)):
            check = replace(check, run=partial(_needed, check.run))
        found.append(check)
    own = [Check("extras", partial(check_extras, config)), Check("processors", partial(_processors, config))]
    own.append(Check("relay", partial(check_relay, config), limit=_RELAY_LIMIT))
    own.append(Check("rounded rollouts", partial(_rounded, config)))
    if (folder := relay_folder(config)) is not None:
        own.append(Check("relay disk", partial(machine.check_disk, folder, "relay.master")))
    if config.environment.backend == "kubernetes":
        own.append(Check("kubernetes", partial(_cluster, config), limit=_RELAY_LIMIT))
    for field, number, address in listened_ports(config):
        own.append(Check(f"port {field}", partial(machine.check_free_port, number, address, field)))
    return [*found, *own]


def check_extras(config: Config) -> Finding:
    """Packages that this config asks for beyond the extra ``orchestrator``."""
    wanted = requirements.required_packages(config)
    if gone := requirements.missing_packages(config):
        detail = "; ".join(f"{item.field} = {item.value!r} needs {item.module}" for item in gone)
        return Finding(
            "fail", f"not installed: {detail}", f"pip install 'rl-coserve[{','.join(i.extra for i in gone)}]'"
        )
    return Finding("ok", ", ".join(item.extra for item in wanted) or "none needed")


def listened_ports(config: Config) -> list[tuple[str, int, str]]:
    """(field, port, address) of what the run itself is told to listen on, here. Ports 0 are chosen then, and need no look.

    The embedded master's is looked at with the relay.
    """
    serve, view = config.reward.serve, config.view
    asked = (
        ("view.port", view.port, _LOOPBACK, view.enabled),
        ("reward.serve.port", serve.port, _LOOPBACK, config.reward.host == "ray_serve" and not config.ray.address),
    )
    return [(field, number, address) for field, number, address, listens in asked if listens and number]


def relay_folder(config: Config) -> Path | None:
    """Where a relay on a file system of this machine keeps its versions; None: elsewhere, or in the run's folder."""
    scheme, _, path = config.relay.master.rpartition("://")
    return Path(path) if config.relay.kind == "fsspec" and path and scheme in ("", "file", "local") else None


def _cluster(config: Config) -> Finding:
    from orchestrator.ops.kubernetes_access import check_cluster_access

    return check_cluster_access(config.environment.kubernetes)


def shared_memory_wanted(config: Config) -> int:
    """MB in /dev/shm: the object store of a Ray that is started here, and a margin."""
    margin = machine.SHARED_MEMORY_MB - 128  # of the default object store
    return margin + (0 if config.ray.address else config.ray.object_store_mb)


def _processors(config: Config) -> Finding:
    from orchestrator.runtime.pool_requests import trainer_ranks
    from orchestrator.runtime.preflight import check_processors

    check_processors(config)
    return Finding("ok", f"engines: {config.rollout.workers}, trainer ranks: {trainer_ranks(config)}")


def _rounded(config: Config) -> Finding:
    from orchestrator.resources import quantised_rollouts

    return Finding("ok", "; ".join(quantised_rollouts.check(config)) or "none: engines compute with the trainer's bits")


def _needed(run: Callable[[], Finding]) -> Finding:
    finding = run()
    return replace(finding, status="fail") if finding.status == "warn" else finding


def _needs_sandbox(config: Config) -> bool:
    names = [config.task.name, *config.task.mixture]
    classes: list[Any] = [registry.find(name) for name in names]
    return any(getattr(found, "needs_sandbox", False) for found in classes)


def check_relay(config: Config) -> Finding:
    """Raises ConfigError for an address that is none of this machine, or a port that is taken."""
    settings = config.relay
    if settings.kind == "fsspec":
        return _round_trip(settings.master) if settings.master else Finding("ok", "fsspec: a folder of the run")
    if settings.master:
        from orchestrator.transfer.mooncake_relay import seen_from

        try:
            own = seen_from(settings.master)
        except RelayError as error:
            return Finding("fail", str(error), "start mooncake_master there, or leave relay.master empty")
        return Finding("ok", f"something listens at {settings.master}; clients here announce {own}")
    from orchestrator.runtime.mooncake_master import own_address
    from orchestrator.runtime.preflight import check_port

    check_port(config)
    return Finding("ok", f"the run's own mooncake_master can listen on {own_address(settings.host)}")


def _round_trip(url: str) -> Finding:
    opened = open_relay(RelayEndpoint(job="doctor", kind="fsspec", master=url))
    key, sent, received = f"rlc/doctor/{uuid.uuid4().hex}", os.urandom(_RELAY_BYTES), bytearray(_RELAY_BYTES)
    fix = "check the address, the credentials, and write access for all processes"
    try:
        opened.put(key, memoryview(sent))
        try:
            opened.get_into(key, memoryview(received))
        finally:
            opened.remove(key)
    except RelayError as error:
        return Finding("fail", str(error), fix)
    finally:
        opened.close()
    if bytes(received) != sent:
        return Finding("fail", f"{url}: 1 KB came back changed", fix)
    return Finding("ok", f"1 KB put to {url}, read back and removed")
