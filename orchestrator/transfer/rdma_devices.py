"""What carries Mooncake's transfers: TCP, or RDMA by the devices that this machine has."""

from __future__ import annotations

from pathlib import Path

from orchestrator.api import ConfigError

PROTOCOLS = ("tcp", "rdma")
DEVICES = Path("/sys/class/infiniband")  # where the kernel lists RDMA devices


def check_device(protocol: str, device: str, field: str = "rollout.kv_transfer.", devices: Path = DEVICES) -> None:
    """Raises ConfigError for RDMA without such a device: Mooncake itself starts without one, and fails at the first transfer.
    ``field``: what stands before the names of the two."""
    if protocol not in PROTOCOLS:
        raise ConfigError(f"{field}protocol", protocol, f"must be {' or '.join(map(repr, PROTOCOLS))}")
    if protocol != "rdma":
        return
    found = sorted(path.name for path in devices.iterdir()) if devices.is_dir() else []
    if not found:
        fix = f"this machine has no RDMA device ({devices} lists none): use 'tcp'"
        raise ConfigError(f"{field}protocol", protocol, fix)
    unknown = [name for name in device.split(",") if name and name not in found]
    if unknown:
        raise ConfigError(f"{field}device", device, f"there is no {unknown[0]}; there are: {', '.join(found)}")
