"""Stand-ins for NCCL and for CUDA's streams, so that vLLM's own engines of its backend ``nccl`` run on a CPU.

What is real: vLLM's trainer-side and worker-side engines, its packing, its layerwise reload. What is not: the communicator, which
is sockets here (rank 0 connected with every other), and streams, of which there is one. As with NCCL a group waits for its
members for ever, in a broadcast too, and once it is aborted it brings nothing and says nothing.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

ID_BYTES = 128
_listening: dict[int, socket.socket] = {}  # of this process, by port


class SocketCommunicator:
    """In place of vLLM's ``PyNcclCommunicator``."""

    def __init__(self, unique_id: bytes, rank: int, size: int) -> None:
        port = int(unique_id.rstrip(b"\0"))
        self._aborted = threading.Event()
        self._sends = rank == 0
        if self._sends:
            accepted = [_listening[port].accept()[0] for _ in range(size - 1)]
            self._peers = sorted(accepted, key=lambda peer: peer.recv(1))
            for peer in self._peers:
                peer.sendall(b"!")
        else:
            self._peers = [socket.create_connection(("127.0.0.1", port))]
            self._peers[0].sendall(bytes([rank]))
            assert self._peers[0].recv(1) == b"!"

    def broadcast(self, tensor: Tensor, src: int, stream: Any = None) -> None:
        """Of contiguous bytes."""
        assert src == 0
        data = memoryview(tensor.view(-1).view(torch.uint8).numpy())
        try:
            if self._sends:
                if not all(peer.recv(1) for peer in self._peers):  # each says that it is there
                    raise ConnectionError
                for peer in self._peers:
                    peer.sendall(data)
                return
            [sender] = self._peers
            sender.sendall(b"!")
            got = 0
            while got < len(data):
                more = sender.recv_into(data[got:])
                if not more:
                    raise ConnectionError
                got += more
        except OSError:  # somebody has died, which NCCL does not see, or this was aborted
            self._aborted.wait()

    def destroy(self) -> None:
        """Abort. Again: nothing."""
        self._aborted.set()
        for peer in self._peers:
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)


class _Library:
    """In place of vLLM's ``NCCLLibrary``."""

    def ncclGetUniqueId(self) -> Any:
        server = socket.create_server(("127.0.0.1", 0))
        port = int(server.getsockname()[1])
        _listening[port] = server
        return SimpleNamespace(internal=str(port).encode().ljust(ID_BYTES, b"\0"))


def stand_in(set_attribute: Any = setattr) -> None:
    """Put them in place, with ``monkeypatch.setattr`` or for the whole process."""
    from vllm.distributed.device_communicators import pynccl_wrapper
    from vllm.distributed.weight_transfer import nccl_common, packed_tensor

    def nothing(*given: Any, **named: Any) -> None: ...

    def join(nccl_unique_id_bytes: bytes, rank: int, world_size: int, device: Any) -> SocketCommunicator:
        return SocketCommunicator(nccl_unique_id_bytes, rank, world_size)

    stream = SimpleNamespace(synchronize=nothing, wait_event=nothing)
    event = SimpleNamespace(record=nothing, wait=nothing, synchronize=nothing, query=lambda: True)
    set_attribute(nccl_common, "uid_init_process_group", join)
    set_attribute(pynccl_wrapper, "NCCLLibrary", _Library)
    set_attribute(packed_tensor, "_get_streams", lambda device, count: (stream,) * count)
    set_attribute(torch, "Event", lambda *given, **named: event)
    set_attribute(torch.Tensor, "record_stream", nothing)
    set_attribute(torch.accelerator, "current_stream", lambda: stream)
    set_attribute(torch.cuda, "device", contextlib.nullcontext)
    set_attribute(torch.cuda, "stream", contextlib.nullcontext)
    set_attribute(torch.cuda, "synchronize", nothing)
    set_attribute(torch.accelerator, "current_device_index", lambda: 0)
    set_attribute(torch.accelerator, "synchronize", nothing)
