"""The relay that a config names, for ``rl-coserve doctor CONFIG``: can this machine use it.

Guarantees: what is written to the relay (1 KB, under a name that was never there) is removed again; nothing is started.
"""

from __future__ import annotations

import os
import uuid

from orchestrator.config import Config
from orchestrator.ops.check import Finding
from orchestrator.transfer import RelayEndpoint, RelayError, open_relay

_BYTES = 1024


def relay(config: Config) -> Finding:
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
        return Finding("ok", f"something listens at {settings.master}; clients here say they are at {own}")
    from orchestrator.runtime.mooncake_master import own_address
    from orchestrator.runtime.preflight import check_port

    check_port(config)
    return Finding("ok", f"a mooncake_master of the run's own can listen on {own_address(settings.host)}")


def _round_trip(url: str) -> Finding:
    opened = open_relay(RelayEndpoint(job="doctor", kind="fsspec", master=url))
    key, sent, received = f"rlc/doctor/{uuid.uuid4().hex}", os.urandom(_BYTES), bytearray(_BYTES)
    fix = "check the address, the credentials, and that all processes may write there"
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
