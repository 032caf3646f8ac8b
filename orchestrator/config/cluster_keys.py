"""Sections of a config: weights between processes, hardware, Ray, TLS."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from orchestrator.api import urls
from orchestrator.api.tls import Tls
from orchestrator.settings.section import Conflict, Positive, PositiveSeconds, Section


class SiteSection(Section):
    """Engines behind one slow link (a rack, a cluster), and the cache beside them, which brings a version over that link once:
    docs/weights.md."""

    workers: tuple[str, ...] = ()  # vllm-0, or the URL of a served one
    # key=value of Ray's nodes there (`ray start --labels`): own engines on these, those that are added later too; what
    # `workers` of a site names is at that one
    label: Annotated[str, Field(pattern=r"^([A-Za-z0-9][\w./-]*=[\w.-]+)?$")] = ""
    # host:port (tls://host:port) of `rl-coserve site-cache` there; empty: the run starts one on the node of the first of its
    # own workers, or on one with the label
    cache: Annotated[str, Field(pattern=r"^((tls://)?[^\s/]+:\d{1,5})?$")] = ""

    def conflicts(self) -> Iterator[Conflict]:
        if not (self.workers or self.label):
            yield "workers", [], "nothing would be at this site: name its workers, or the label of its nodes"
        elif not (self.cache or self.label or any(worker.startswith("vllm-") for worker in self.workers)):
            fix = (
                "start `rl-coserve site-cache` there and give its host:port: a run starts one only for its own workers"
            )
            yield "cache", "", fix


class RelaySection(Section):
    """The weight relay. ``kind`` "mooncake": ``master`` is host:port; empty: a `mooncake_master` child process is started.
    "fsspec": ``master`` is the URL of a folder or prefix that all processes reach; empty: a folder of the run.
    ``host``: the address of this machine that the child process listens on; every client then announces its own address
    towards it. Mooncake has no authentication: leave it at loopback unless workers on other machines must reach it."""

    kind: Literal["mooncake", "fsspec"] = "mooncake"
    master: str = ""
    host: Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?$")] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 0  # of the embedded master; 0: a free one
    protocol: Literal["tcp", "rdma"] = "tcp"  # by which Mooncake carries weights
    device: str = ""  # comma-separated RDMA devices, as in /sys/class/infiniband; empty: Mooncake chooses
    # memory of a trainer rank that holds versions for the workers; 0: as keep_versions + 1 of them need, at least 256
    segment_mb: Annotated[int, Field(ge=0)] = 0
    bucket_mb: Positive = 64
    keep_versions: Annotated[int, Field(ge=2)] = 2
    # redis://[user@]host[:port][/database] or rediss://; empty: a SQLite file in the run's folder
    metadata_url: str = ""
    metadata_password_file: str = (
        ""  # its password, a file on every machine; empty: RL_COSERVE_REDIS_PASSWORD_FILE, or none
    )
    # Ed25519 private key, a PEM file on the trainer's machine: versions are signed; empty: they are not
    signing_key: str = ""
    metadata_allow_plain: bool = False  # let redis:// leave this machine: what is sent travels unencrypted
    snapshot_every: Annotated[int, Field(ge=0)] = 0  # differences, and a full snapshot after this many; 0: always whole
    # with snapshot_every: a version may still travel whole, where that takes less time, or it never does
    encoding: Literal["auto", "difference"] = "difference"
    codec_threads: Positive = 1  # of each rank that encodes or applies differences
    sites: dict[str, SiteSection] = {}  # by any name; workers without a site read the relay itself
    site_token_file: str = ""  # of the caches, a file on every machine; empty: RL_COSERVE_SITE_TOKEN_FILE, or a new one
    site_allow_plain: bool = False  # caches that the run starts in a Ray cluster may do without tls.certificate
    # a version that cannot be published is tried again for this long; generation continues
    patience: PositiveSeconds = 300.0

    def conflicts(self) -> Iterator[Conflict]:
        if self.device and self.protocol != "rdma":
            yield "device", self.device, "is for RDMA: set protocol to 'rdma', or leave it out"
        if self.protocol == "rdma" and self.kind != "mooncake":
            yield "protocol", self.protocol, "is of Mooncake's transfers: set kind to 'mooncake', or leave it out"
        if self.protocol == "rdma" and self.sites:
            yield "protocol", self.protocol, "reaches no cache behind a slow link (sites): leave one of the two out"
        url = self.metadata_url
        if url and (fix := urls.redis_mistake(url, self.metadata_allow_plain)):
            yield "metadata_url", urls.without_password(url), fix
        seen: dict[str, str] = {}
        for name, site in self.sites.items():
            for worker in site.workers:
                if (other := seen.setdefault(worker.rstrip("/"), name)) != name:
                    yield f"sites.{name}.workers", worker, f"is in sites.{other} too: an engine is at one site"
            if site.label and (other := seen.setdefault(site.label, name)) != name:
                yield f"sites.{name}.label", site.label, f"is also sites.{other}'s: a node is at one site"


class ResourcesSection(Section):
    """Pools of hardware by class (RollArt 5.2). Where Ray has GPUs every process reserves its own, with or without pools: an
    engine as many as its parallel sizes need, in one node; engines are spread over nodes, trainer ranks beside each other.
    Without pools and GPUs nothing is bound, and Ray places processes by CPUs."""

    # class -> devices; in a Ray cluster, custom resources of its nodes, beside its GPUs
    pools: dict[str, Positive] = {}
    # of the pools, where jobs share a metadata store
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")] = "default"
    silent: PositiveSeconds = 60.0  # without a heartbeat from another job, before its devices are free
    trainer: str = "H800"  # class that trainer ranks ask for
    devices_per_rank: Positive = 1
    # class -> rollout workers that ask for it, rollout.workers in all; empty: all H20
    rollout: dict[str, Positive] = {}
    devices_per_worker: Positive = 1  # at least: of a rollout worker, where its parallel sizes need fewer
    devices_per_server: Positive = 8
    # class -> 10^9 bytes of a device, where `rl-coserve plan` does not know it; "GPU": where there are no pools
    memory_gb: dict[str, Annotated[float, Field(gt=0)]] = {}
    # class -> stand-ins while it has none free; if not given: all of its kind
    compatible: dict[str, tuple[str, ...]] = {}


class RaySection(Section):
    """The local Ray, or the address of a cluster."""

    address: str = ""
    cpus: Positive = 4
    object_store_mb: Annotated[int, Field(ge=80)] = 128


class TlsSection(Section):
    """One certificate, key and authority, PEM files, for every listener and client of the run that leaves this machine."""

    certificate: str = ""  # with its chain; empty: listeners speak plain HTTP, on loopback only
    key: str = ""  # of the certificate; a file that only you can read
    authority: str = ""  # authority that clients trust; empty: the system's
    verify_clients: bool = False  # listeners take only clients with a certificate of the authority
    allow_plain_http: bool = False  # rewards, judges and tools elsewhere may be called unencrypted

    def conflicts(self) -> Iterator[Conflict]:
        if bool(self.certificate) != bool(self.key):
            lacking = "key" if self.certificate else "certificate"
            yield lacking, "", "certificate and key belong together: give both, or neither"
        elif self.verify_clients and not (self.certificate and self.authority):
            yield "verify_clients", True, "needs tls.certificate, tls.key and tls.authority"

    def files(self) -> Tls:
        """For listeners and clients."""
        return Tls(self.certificate, self.key, self.authority, self.verify_clients)
