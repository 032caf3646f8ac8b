"""The plugin's options: what ``--rl-*`` flags set, and the engine arguments that activate the plugin.

:class:`PluginOptions` reach every vLLM process in ``--additional-config``; :class:`FrontendOptions` stay in the process
that serves HTTP. Both are closed: an unknown key is an error that names it. Flags, help texts and documentation are made
from their fields, so they cannot drift apart. Secrets are not options: vLLM logs and hashes its configuration.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.api import ConfigError
from orchestrator.api.jsontext import parse_object
from orchestrator.api.urls import is_loopback

if TYPE_CHECKING:
    from orchestrator.transfer import RelayEndpoint

PLUGIN = "rl-coserve"  # the name of every entry point, as in VLLM_PLUGINS
BACKEND = "rl_coserve"  # the weight-transfer backend's name, as in --weight-transfer-config
KEY = "rl_coserve"  # in --additional-config
ACTIVE = "RL_COSERVE_ACTIVE"  # environment variable, "1" in every process of an engine that asked for the plugin
POOLED = "RL_COSERVE_KV_POOL"  # the same, of an engine whose KV cache is in a device's pool
ROLLOUT_ID = "rl-"  # how vLLM's names of requests begin that came over the control endpoints; users' do not
SCHEDULER = "vllm_rlplugin.scheduler.create_scheduler"  # for --scheduler-cls
WORKER_EXTENSION = "vllm_rlplugin.extension.WorkerExtension"  # for --worker-extension-cls
KV_CONNECTOR = "PrefixConnector"  # for --kv-transfer-config, with
KV_CONNECTOR_MODULE = "vllm_rlplugin.kv.connector"
KV_ON_UPDATE = ("salt", "flush")
KV_ROLES = ("serving", "rollout")
KV_SUPPLIES = ("kept", "created")
ADMISSION = ("dual", "ttft", "tpot", "none")
LOOPBACK = "127.0.0.0/8,::1/128"


def _option(default: Any, unit: str, text: str, choices: tuple[str, ...] = ()) -> Any:
    """A field with what its flag says: ``unit`` is empty for what has none, ``choices`` for what is free."""
    return field(default=default, metadata={"unit": unit, "help": text, "choices": choices})


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginOptions:
    """What runs inside the engine process, and its defaults."""

    preemption: bool = _option(
        True, "", "a waiting request takes the slot of a running one that it outranks (its prefix stays cached)"
    )
    max_wait: float = _option(
        300.0, "seconds", "a request that waited longer goes before those that overtook it, so that none starves"
    )
    quantum: int = _option(
        64, "tokens", "tokens that a request which waited too long may generate before it can be preempted"
    )
    kv_on_update: str = _option(
        "salt",
        "",
        "how reuse of old weights' KV is prevented: by the version in the cache salt, or by a flush",
        KV_ON_UPDATE,
    )
    lookahead: int = _option(
        16, "requests", "how many requests may wait inside the engine; the others are held in front of it"
    )
    kv_transfer: bool = _option(
        False, "", "let prefix KV be copied from and to this engine (a KV connector; docs/kv_transfer.md)"
    )
    kv_staging_mb: int = _option(256, "MiB", "host memory for fetched KV that is not loaded yet")

    kv_pool: str = _option("", "name", "put the KV cache in this pool, which engines on one device share")
    kv_pool_role: str = _option(
        "rollout", "", "serving has priority, one engine per pool; rollout gets what is lent", KV_ROLES
    )
    kv_pool_mib: int = _option(
        0, "MiB", "create the pool, of this size on each device, if no engine is in it; 0: the pool must exist"
    )
    kv_pool_page_kib: int = _option(2048, "KiB", "size of a page, the same for all engines of a pool")
    kv_pool_supply: str = _option(
        "kept",
        "",
        "when a GPU pool is created: one process keeps its memory, or each engine allocates pages as it gets them",
        KV_SUPPLIES,
    )
    kv_pool_budget_mib: int = _option(0, "MiB", "what a rollout engine may use until a serving engine decides")
    kv_pool_headroom: float = _option(
        0.2, "share", "share of the pool kept free for serving (set on the serving engine)"
    )
    kv_pool_watermark: float = _option(
        0.25, "share", "share of the headroom that serving may use before rollouts are cut"
    )
    kv_pool_lent: float = _option(
        0.0,
        "share",
        "largest share of the pool for rollouts until `rl-coserve lend` changes it (set on the serving engine)",
    )
    kv_pool_window: float = _option(
        60.0, "seconds", "window of serving's own peak usage, from which the rollouts' budget is set"
    )
    kv_pool_keep: float = _option(10.0, "seconds", "pages idle for this long go back to the pool")
    kv_pool_scrub: bool = _option(
        True,
        "",
        "zero pages from another engine before use: their bytes may be NaN, which attention masks do not stop",
    )
    kv_pool_admission: str = _option(
        "dual",
        "",
        "which SLOs a rollout step must not endanger (set on the serving engine); none: no admission control",
        ADMISSION,
    )
    kv_pool_ttft: float = _option(0.1, "seconds", "the serving engine's SLO from arrival to the first token")
    kv_pool_tpot: float = _option(0.05, "seconds", "the serving engine's SLO between two tokens")
    kv_pool_mps: int = _option(0, "per cent", "share of the GPU's threads under MPS (`rl-coserve mps`); 0: no MPS")
    kv_pool_profile: str = _option(
        "", "path", "costs of this engine's steps, from `rl-coserve profile`; without it they are learned at run time"
    )

    def __post_init__(self) -> None:
        self._check_pool()
        if not self.max_wait > 0:
            raise ConfigError("max_wait", self.max_wait, "give a time over 0 seconds")
        if self.quantum < 1:
            raise ConfigError("quantum", self.quantum, "give at least 1 token")
        if self.kv_on_update not in KV_ON_UPDATE:
            raise ConfigError("kv_on_update", self.kv_on_update, f"must be {' or '.join(map(repr, KV_ON_UPDATE))}")
        if self.lookahead < 1:
            raise ConfigError("lookahead", self.lookahead, "give at least 1 request")
        if self.kv_staging_mb < 1:
            raise ConfigError("kv_staging_mb", self.kv_staging_mb, "give at least 1 MiB")

    def _check_pool(self) -> None:
        if self.kv_pool and not (self.kv_pool.replace("-", "").replace("_", "").isalnum() and len(self.kv_pool) < 64):
            raise ConfigError("kv_pool", self.kv_pool, "give a name of letters, digits, - and _")
        if self.kv_pool_role not in KV_ROLES:
            raise ConfigError("kv_pool_role", self.kv_pool_role, f"must be {' or '.join(map(repr, KV_ROLES))}")
        if self.kv_pool_supply not in KV_SUPPLIES:
            raise ConfigError("kv_pool_supply", self.kv_pool_supply, f"must be {' or '.join(map(repr, KV_SUPPLIES))}")
        for name in ("kv_pool_mib", "kv_pool_budget_mib"):
            if getattr(self, name) < 0:
                raise ConfigError(name, getattr(self, name), "give 0 or more MiB")
        if self.kv_pool_page_kib < 4 or self.kv_pool_page_kib & (self.kv_pool_page_kib - 1):
            raise ConfigError("kv_pool_page_kib", self.kv_pool_page_kib, "give a power of two of at least 4 KiB")
        for name in ("kv_pool_headroom", "kv_pool_watermark", "kv_pool_lent"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(name, getattr(self, name), "give a share from 0 to 1")
        if self.kv_pool_admission not in ADMISSION:
            raise ConfigError("kv_pool_admission", self.kv_pool_admission, f"must be one of {', '.join(ADMISSION)}")
        for name in ("kv_pool_ttft", "kv_pool_tpot"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(name, getattr(self, name), "give a time over 0 seconds")
        if not 0 <= self.kv_pool_mps <= 100:
            raise ConfigError("kv_pool_mps", self.kv_pool_mps, "give a share from 1 to 100 per cent, or 0 for none")
        for name in ("kv_pool_window", "kv_pool_keep"):
            if not getattr(self, name) >= 0:
                raise ConfigError(name, getattr(self, name), "give 0 or more seconds")
        if not self.kv_pool:
            stray = [item.name for item in fields(self) if item.name.startswith("kv_pool_")]
            for name in stray:
                if getattr(self, name) != type(self).__dataclass_fields__[name].default:
                    raise ConfigError(name, getattr(self, name), "has an effect only with kv_pool")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PluginOptions:
        """Read ``additional_config["rl_coserve"]``. Raises ConfigError for an unknown key or a wrong type."""
        known = {item.name: item for item in fields(cls)}
        for name, value in values.items():
            if name not in known:
                raise ConfigError(f"{KEY}.{name}", value, f"unknown; the options are {', '.join(known)}")
            default = known[name].default
            wanted = (int, float) if isinstance(default, float) else (type(default),)
            if not isinstance(value, wanted) or (isinstance(value, bool) and not isinstance(default, bool)):
                raise ConfigError(f"{KEY}.{name}", value, f"give a {type(default).__name__}")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """For ``additional_config``."""
        return asdict(self)

    @classmethod
    def from_config(cls, vllm_config: Any) -> PluginOptions:
        """Those of a running vLLM; the defaults where none were given."""
        additional = vllm_config.additional_config
        return cls.from_dict(additional.get(KEY, {}) if isinstance(additional, Mapping) else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendOptions:
    """What the HTTP front end needs; nothing of it reaches the engine's configuration.

    The bearer token itself is no option: it is in the file ``token_file``, else in the environment variable
    RL_COSERVE_TOKEN, else generated by the front end.
    """

    token_file: str = _option(
        "", "path", "file with the control endpoints' bearer token; else RL_COSERVE_TOKEN, else one is generated"
    )
    max_body_mb: int = _option(64, "MiB", "largest body that a control endpoint accepts")
    allow_clients: str = _option(
        LOOPBACK, "CIDR[,CIDR]", "networks from which the control endpoints may be called; others get status 403"
    )
    relay: str = _option(
        "", "JSON|path", "the weight relay: a RelayEndpoint as JSON, or a file with it; without it, no weight updates"
    )
    deactivate_after: float = _option(
        0.0, "seconds", "deactivate a pool's rollout engine after this long without work; 0: never"
    )

    kv_host: str = _option(
        "127.0.0.1", "address", "address that serves KV with --rl-kv-transfer; 'node': this machine's own"
    )
    kv_allow_plain: bool = _option(
        False, "", "allow --rl-kv-host off loopback without --ssl-certfile: KV travels unencrypted"
    )
    kv_carrier: str = _option("tcp", "", "transport for KV blocks: our own TCP, or Mooncake", ("tcp", "mooncake"))
    kv_protocol: str = _option(
        "tcp", "", "protocol of Mooncake's transfer engine, with --rl-kv-carrier mooncake", ("tcp", "rdma")
    )
    kv_device: str = _option("", "name[,name]", "RDMA devices, as in /sys/class/infiniband; empty: Mooncake chooses")

    def __post_init__(self) -> None:
        if self.token_file and not Path(self.token_file).is_file():
            raise ConfigError("--rl-token-file", self.token_file, "no such file")
        if not 0 <= self.deactivate_after < float("inf"):
            raise ConfigError("--rl-deactivate-after", self.deactivate_after, "give 0 or more seconds")
        if self.max_body_mb < 1:
            raise ConfigError("--rl-max-body-mb", self.max_body_mb, "give at least 1 MiB")
        if self.kv_carrier == "tcp" and (self.kv_protocol, self.kv_device) != ("tcp", ""):
            raise ConfigError("--rl-kv-protocol", self.kv_protocol, "needs --rl-kv-carrier mooncake")
        if self.kv_protocol != "tcp":
            from orchestrator.transfer.rdma_devices import check_device  # numpy; as below

            check_device(self.kv_protocol, self.kv_device, "--rl-kv-")
        self.networks()
        self.relay_endpoint()

    @classmethod
    def from_args(cls, args: Any) -> FrontendOptions:
        """Those of a parsed command line (an argparse Namespace); defaults where a flag was not given.

        Raises ConfigError for a value that is out of range or a file that is not there.
        """
        names = [item.name for item in fields(cls)]
        return cls(**{name: getattr(args, f"rl_{name}") for name in names if hasattr(args, f"rl_{name}")})

    def check_kv(self, args: Any) -> None:
        """Whether KV may be handed out at ``kv_host`` with vLLM's own TLS flags. Raises ConfigError."""
        if not (self.kv_allow_plain or is_loopback(self.kv_host) or getattr(args, "ssl_certfile", None)):
            fix = "others reach it, and KV would travel unencrypted: give --ssl-certfile, or --rl-kv-allow-plain"
            raise ConfigError("--rl-kv-host", self.kv_host, fix)

    def networks(self) -> tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]:
        """``allow_clients``, read."""
        try:
            return tuple(ipaddress.ip_network(text.strip()) for text in self.allow_clients.split(","))
        except ValueError as error:
            raise ConfigError("--rl-allow-clients", self.allow_clients, f"{error}; write 10.0.0.0/8,::1/128") from error

    def relay_endpoint(self) -> RelayEndpoint | None:
        """``relay``, read (from its file, when it is a path). None: not given."""
        if not self.relay:
            return None
        from orchestrator.transfer import RelayEndpoint  # numpy; this module is loaded by every vLLM process

        text = self.relay
        try:
            if not text.lstrip().startswith("{"):
                text = Path(text).read_text(encoding="utf-8")
            values = parse_object(text)
        except (OSError, ValueError) as error:
            raise ConfigError(
                "--rl-relay", self.relay, f"is neither a JSON object nor a file with one: {error}"
            ) from error
        return RelayEndpoint.from_dict(values)


def is_priority(value: object) -> bool:
    """Whether vLLM can carry it: an integer of 64 bits."""
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def engine_arguments(options: PluginOptions) -> dict[str, Any]:
    """The keywords of vLLM's ``EngineArgs`` (and of ``LLM``, ``AsyncEngineArgs``) that activate the plugin.

    A Python program needs no command-line flag: ``LLM(model, **engine_arguments(PluginOptions()))``, with
    ``vllm_rlplugin.activate()`` called before. ``--plugin rl-coserve`` sets the same keywords.
    """
    return {
        "scheduler_cls": SCHEDULER,
        "scheduling_policy": "priority",
        "worker_extension_cls": WORKER_EXTENSION,
        "weight_transfer_config": {"backend": BACKEND},
        "additional_config": {KEY: options.to_dict()},
        **({"kv_transfer_config": kv_transfer_config(options)} if options.kv_transfer else {}),
    }


def kv_transfer_config(options: PluginOptions) -> Any:
    """vLLM's own configuration of our KV connector. Imports vLLM."""
    from vllm.config import KVTransferConfig

    return KVTransferConfig(
        kv_connector=KV_CONNECTOR,
        kv_connector_module_path=KV_CONNECTOR_MODULE,
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"staging_mb": options.kv_staging_mb},
    )
