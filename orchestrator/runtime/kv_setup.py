"""What the run's own workers are told about KV that moves (``rollout.kv_transfer``). The token is made anew for each start of a
run, and is in no file: it travels with the arguments of the actors, as Ray authenticates them."""

from __future__ import annotations

import os
import secrets
from dataclasses import asdict
from typing import Any

from orchestrator.api import bearer
from orchestrator.api.urls import is_loopback
from orchestrator.borrowing import served_workers
from orchestrator.config import Config
from orchestrator.transfer.rdma_devices import check_device


def kv_arguments(config: Config) -> dict[str, Any]:
    """Keywords of every own worker; none when it is off. With served workers all have the servers' token. Raises ConfigError."""
    settings = config.rollout.kv_transfer
    if not settings.enabled:
        return {}
    token = served_workers.read_token(config, os.environ) if config.rollout.served else secrets.token_hex(32)
    if config.ray.address:  # its machines may not have the file
        token = bearer.Token(token).current()
    return {
        "plugin": {"kv_transfer": True, "kv_staging_mb": settings.staging_mb},
        "kv": {
            "token": token,
            "host": settings.host,
            "carrier": settings.carrier,
            "protocol": settings.protocol,
            "device": settings.device,
            "room_mb": settings.staging_mb,
            "tls": asdict(config.tls.files()) if config.tls.certificate or config.tls.authority else {},
            "allow_plain": settings.allow_plain,
        },
    }


def check(config: Config) -> None:
    """Whether the carrier can work, and the files of TLS be used, as far as this machine says. Raises ConfigError."""
    settings = config.rollout.kv_transfer
    if settings.enabled and not config.ray.address:
        check_device(settings.protocol, settings.device)
        if not is_loopback(settings.host):
            config.tls.files().server()
            config.tls.files().client()
