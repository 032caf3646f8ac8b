"""How a model is laid out over the ranks of a Megatron process group, and joining that group.

Guarantees: a layout that does not fit its world size is refused with a ConfigError that names the field; joining is done
once a process, the same layout again changes nothing.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from megatron_rlplugin import cpu
from orchestrator.api import ConfigError
from orchestrator.api.interfaces import interface_towards


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """Sizes of the parallel groups. Data parallelism is what is left of the world: world / (tensor * pipeline * context).

    ``expert`` splits the experts of a mixture over data-parallel ranks (its ranks train in lock-step). ``virtual``: model
    chunks a pipeline stage (interleaved schedule), None: one, not interleaved.
    """

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    context: int = 1
    virtual: int | None = None
    sequence: bool = False  # sequence parallelism: activations of norms are split over the tensor-parallel ranks
    distributed_optimizer: bool = False

    def __post_init__(self) -> None:
        for field in ("tensor", "pipeline", "expert", "context"):
            if getattr(self, field) < 1:
                raise ConfigError(f"layout.{field}", getattr(self, field), "must be at least 1")
        if self.virtual is not None and self.pipeline < 2:
            raise ConfigError("layout.virtual", self.virtual, "needs pipeline parallelism (layout.pipeline >= 2)")
        if self.virtual is not None and self.virtual < 2:
            raise ConfigError("layout.virtual", self.virtual, "must be at least 2 chunks a stage; leave it out for one")
        if self.sequence and self.tensor < 2:
            raise ConfigError("layout.sequence", self.sequence, "needs tensor parallelism (layout.tensor >= 2)")

    @property
    def row_multiple(self) -> int:
        """Rows must have a multiple of so many tokens, which ranks divide evenly."""
        return (self.tensor if self.sequence else 1) * (2 * self.context if self.context > 1 else 1)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ParallelLayout:
        """Strict: an unknown key is a ConfigError."""
        known = [field.name for field in fields(cls)]
        for key in data:
            if key not in known:
                raise ConfigError(f"layout.{key}", data[key], f"no such key; known keys: {', '.join(known)}")
        return cls(**data)

    def data_parallel_size(self, world_size: int) -> int:
        """Data-parallel replicas in a world of this size. Raises ConfigError when it does not divide."""
        model = self.tensor * self.pipeline * self.context
        if world_size % model:
            raise ConfigError("world_size", world_size, f"must be a multiple of tensor * pipeline * context = {model}")
        replicas = world_size // model
        if replicas * self.context % self.expert:
            raise ConfigError("layout.expert", self.expert, f"must divide the {replicas} data-parallel replicas")
        return replicas


def device() -> torch.device:
    """Where the model lives in this process."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def order_kernels(tensor: int, context: int) -> None:
    """Unless the user's environment says otherwise, kernels start in the order of their calls where tensor or context parallelism
    counts on it: before Blackwell Megatron overlaps communication with computation only so. Has to be called before this process
    first uses CUDA, which reads it once."""
    if tensor > 1 or context > 1:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


_joined: list[tuple[ParallelLayout, int]] = []  # the layout and world size of this process, once joined


def initialize_parallel(
    layout: ParallelLayout | None = None,
    rank: int = 0,
    world_size: int = 1,
    init_method: str = "",
    timeout: float | None = None,
    interface: str = "",
) -> None:
    """Join torch.distributed and make Megatron's groups. Once a process; the same layout again changes nothing.
    ``timeout``: seconds that a rank waits for another in one collective; None: torch's default (NCCL: 10 minutes).
    ``interface``: the network interface of the collectives; "": gloo takes the one that reaches the meeting point (by itself it
    would take what the host's name stands for, which may be loopback), NCCL chooses. Raises ConfigError.

    A single rank rendezvouses with itself in memory, so it needs no port. More need ``init_method`` (``tcp://``).
    """
    layout = layout or ParallelLayout()
    layout.data_parallel_size(world_size)
    cpu.activate()
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized() and not dist.is_initialized():
        # Who shared this process (an engine) has taken torch.distributed along when it ended: the groups are gone.
        parallel_state.destroy_model_parallel()
    if parallel_state.model_parallel_is_initialized():
        if _joined != [(layout, world_size)]:
            fix = f"this process has {_joined[0] if _joined else 'groups of another program'} already; start another process"
            raise ConfigError("layout", (layout, world_size), fix)
        return
    if not dist.is_initialized():
        _check_interface(interface)
        backend = "gloo"
        if torch.cuda.is_available():
            torch.cuda.set_device(rank % torch.cuda.device_count())
            backend = "nccl"
        if world_size == 1:
            # gloo binds an interface even to talk to itself: not one that a container may lack, or others can reach.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        else:
            _choose_interface(init_method, interface)
            limit = None if timeout is None else timedelta(seconds=timeout)
            dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=world_size, timeout=limit)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual,
        expert_model_parallel_size=layout.expert,
        context_parallel_size=layout.context,
        create_gloo_process_groups=False,
        distributed_timeout_minutes=30 if timeout is None else max(1, math.ceil(timeout / 60)),
    )
    _joined[:] = [(layout, world_size)]
    if torch.cuda.is_available():
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

        model_parallel_cuda_manual_seed(0)  # names the generators; without dropout nothing is drawn from them


def _check_interface(interface: str) -> None:
    there = [name for _, name in socket.if_nameindex()]
    if interface and interface not in there:
        fix = f"{socket.gethostname()} has no such interface; it has: {', '.join(there)}"
        raise ConfigError("trainer.interface", interface, fix)


def _choose_interface(init_method: str, interface: str) -> None:
    if interface:
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = interface
        return
    host = urlsplit(init_method).hostname
    if host and "GLOO_SOCKET_IFNAME" not in os.environ and (found := interface_towards(host)):
        os.environ["GLOO_SOCKET_IFNAME"] = found


def leave_parallel() -> None:
    """Destroy Megatron's groups but stay in torch.distributed, so that another layout of the same world can be joined."""
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()


_joined.clear()


def shutdown_parallel() -> None:
    """Leave the groups and put back what the CPU shims replaced. Models made before are not usable afterwards."""
    leave_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
    cpu.deactivate()
