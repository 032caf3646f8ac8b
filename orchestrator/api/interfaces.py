"""Network interfaces of this machine, by the IPv4 addresses that they have."""

from __future__ import annotations

import fcntl
import socket
import struct

_SIOCGIFADDR = 0x8915  # <linux/sockios.h>: the address of an interface


def interface_towards(host: str) -> str:
    """The one that this machine speaks to ``host`` from; "" where it cannot be told. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError:
            return ""
        return interface_of(probe.getsockname()[0])


def interface_of(address: str) -> str:
    """The one that has it; "" for none."""
    own = socket.inet_aton(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                if fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))[20:24] == own:
                    return name
            except OSError:  # one without an address
                continue
    return ""
