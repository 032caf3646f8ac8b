"""The relay that a config names, for ``rl-coserve doctor CONFIG``: can this machine use it.

Guarantees: what is written to the relay (1 KB, under a name that was never there) is removed again; nothing is started.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from functools import partial

from orchestrator.config import Config
from orchestrator.finding import Check, Finding
from orchestrator.transfer import RelayEndpoint, RelayError, open_relay

_MOONCAKE = ("mooncake", "mooncake store")  # checks of what a relay on a file system does not need
_LIMIT = 30.0  # seconds: an object store may be far away
_BYTES = 1024


def for_config(checks: Sequence[Check], config: Config) -> list[Check]:
    """The checks that matter to this config, and one of its relay."""
    kept = [check for check in checks if config.relay.kind == "mooncake" or check.name not in _MOONCAKE]
    return [*kept, Check("relay", partial(_relay, config), limit=_LIMIT)]


def _relay(config: Config) -> Finding:
    settings = config.relay
    if settings.kind == "fsspec":
        return _round_trip(settings.master) if settings.master else Finding("ok", "fsspec: a folder of the run")
    if settings.master:
        from orchestrator.transfer.mooncake import seen_from

        try:
            own = seen_from(settings.master)
        except RelayError as error:
            return Finding("fail", str(error), "start mooncake_master there, or leave relay.master empty")
        return Finding("ok", f"something listens at {settings.master}; clients here say they are at {own}")
    from orchestrator.runtime.mooncake import own_address
    from orchestrator.runtime.preflight import check_port

    check_port(config)
    return Finding("ok", f"a mooncake_master of the run's own can listen on {own_address(settings.host)}")


def _round_trip(url: str) -> Finding:
    relay = open_relay(RelayEndpoint(job="doctor", kind="fsspec", master=url))
    key, sent, received = f"rlc/doctor/{uuid.uuid4().hex}", os.urandom(_BYTES), bytearray(_BYTES)
    fix = "check the address, the credentials, and that all processes may write there"
    try:
        relay.put(key, memoryview(sent))
        try:
            relay.get_into(key, memoryview(received))
        finally:
            relay.remove(key)
    except RelayError as error:
        return Finding("fail", str(error), fix)
    finally:
        relay.close()
    if bytes(received) != sent:
        return Finding("fail", f"{url}: 1 KB came back changed", fix)
    return Finding("ok", f"1 KB put to {url}, read back and removed")
