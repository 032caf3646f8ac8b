"""The caches of a run's sites: started where the config names none, and which engine reads at which.

Guarantees: a cache that the run starts is a process of Ray on the node of its site's first engine, listens on loopback, or in
a Ray cluster on its node's address, and ends with the run; one that dies comes back at the same port, empty. The token is in a
file, never in what Ray keeps.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from orchestrator.api import ConfigError, RunError, bearer
from orchestrator.api.tls import Tls
from orchestrator.child_process import free_port
from orchestrator.config import Config
from orchestrator.resources import Placement
from orchestrator.runtime.engine_actors import address
from orchestrator.transfer import RelayEndpoint
from orchestrator.transfer.site_cache import SiteCache
from orchestrator.transfer.site_relay import TOKEN_FILE

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class SiteCaches:
    """``places``: of a worker's cache, by the worker. ``labels``: of a cache, by the label of the nodes that it is for.
    ``variables``: that engines start with."""

    places: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    authority: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)

    def endpoint_of(
        self, worker: str, endpoint: RelayEndpoint, labels: Mapping[str, str] | None = None
    ) -> RelayEndpoint:
        """The relay as this worker is told of it. ``labels``: of its node."""
        carried = (f"{key}={value}" for key, value in (labels or {}).items())
        place = self.places.get(worker) or next(filter(None, map(self.labels.get, carried)), "")
        return replace(endpoint, cache=place, cache_authority=self.authority) if place else endpoint


def check(config: Config) -> None:
    """Whether there is a token where the run cannot make one. Raises ConfigError."""
    if file := _token_file(config):
        fix = "give a readable file with the token that the caches were started with (--token-file)"
        bearer.read_file(file, "relay.site_token_file", fix)
    elif config.relay.sites and (config.ray.address or any(site.cache for site in config.relay.sites.values())):
        fix = f"name a file with the token of the sites' caches, on every machine, or set {TOKEN_FILE} to one"
        raise ConfigError("relay.site_token_file", "", fix)


async def start_site_caches(config: Config, places: Mapping[str, Placement], stack: AsyncExitStack) -> SiteCaches:
    """``places``: of the run's own engines, reserved. Raises RunError when a cache does not come up, ConfigError for a
    label that no node carries."""
    sites = config.relay.sites
    if not sites:
        return SiteCaches()
    variables = {TOKEN_FILE: _token_file(config) or _new_token(stack)}
    found: dict[str, str] = {}
    labels: dict[str, str] = {}
    for name, site in sites.items():
        first = next((worker for worker in site.workers if worker in places), "")
        carrying = _node_with(name, site.label) if site.label else ""
        node = places[first].node() if first else carrying
        place = site.cache or await _start(config, name, node, variables, stack)
        found |= dict.fromkeys((worker.rstrip("/") for worker in site.workers), place)
        labels |= {site.label: place} if site.label else {}
    return SiteCaches(found, labels, config.tls.authority, variables)


def _node_with(name: str, label: str) -> str:
    """Ray's id of the first that carries it. Raises ConfigError."""
    import ray

    nodes = {
        str(node["NodeID"]): {f"{key}={value}" for key, value in node["Labels"].items()}
        for node in ray.nodes()
        if node["Alive"]
    }
    if carrying := sorted(node for node, labels in nodes.items() if label in labels):
        return carrying[0]
    others = sorted({one for labels in nodes.values() for one in labels if not one.startswith("ray.io/")})
    fix = f"no node of this Ray carries it, but {', '.join(others) or 'none has a label'}: ray start --labels {label}"
    raise ConfigError(f"relay.sites.{name}.label", label, fix)


async def _start(config: Config, name: str, node: str, variables: Mapping[str, str], stack: AsyncExitStack) -> str:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    options: dict[str, Any] = {"num_cpus": 0, "runtime_env": {"env_vars": dict(variables)}}
    if node:
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node, soft=False)
    spread = bool(config.ray.address)
    tls = asdict(config.tls.files()) if spread and config.tls.certificate else {}
    try:
        port = await ray.remote(_free_port).options(**options).remote(spread)
        actor = ray.remote(_CacheProcess).options(max_restarts=-1, **options)
        handle = actor.remote(port, spread, tls, config.relay.site_allow_plain)
        stack.callback(ray.kill, handle)
        place: str = await handle.place.remote()
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None) or error
        raise RunError(f"relay.sites.{name}: its cache did not start: {str(cause)[:500]}") from error
    return place


class _CacheProcess:
    """Runs in an actor of Ray on the site's node."""

    def __init__(self, port: int, spread: bool, tls: Mapping[str, Any], allow_plain: bool) -> None:
        token = f"{bearer.FILE}{os.environ[TOKEN_FILE]}"
        self._cache = SiteCache(token, _own_address(spread), port, Tls(**tls), allow_plain)

    def place(self) -> str:
        """host:port, with ``tls://`` before it where TLS is spoken."""
        return self._cache.place


def _free_port(spread: bool) -> int:
    """On this node: where a cache that comes back is found again."""
    return free_port(_own_address(spread))


def _own_address(spread: bool) -> str:
    return address() if spread else _LOOPBACK


def _token_file(config: Config) -> str:
    """The one that is given; empty: none is."""
    file = config.relay.site_token_file or os.environ.get(TOKEN_FILE, "")
    return os.path.abspath(file) if file else ""


def _new_token(stack: AsyncExitStack) -> str:
    """A file with a token of this run alone; it goes with the run."""
    folder = tempfile.mkdtemp(prefix="rl-coserve-")  # mode 0700
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    file = Path(folder) / "site-token"
    file.touch(0o600)
    file.write_text(secrets.token_hex(32), encoding="ascii")
    return str(file)
