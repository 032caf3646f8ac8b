"""Bytes of the tensors that are alive, by what they are for.

Guarantees: every storage that an operation makes is counted once, however many tensors view it, from its making to the end
of its last view; bytes are those of the storages, as they were when they were made. On fake tensors nothing is computed, and no
memory is taken.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only


class StorageLedger(TorchDispatchMode):  # type: ignore[misc]  # torch is not type-checked here
    """Counts while it is entered. ``tag`` says what the storages that are made meanwhile are for; ``host`` is no device."""

    HOST = "host"

    def __init__(self, tag: str) -> None:
        super().__init__()
        self._tag = tag
        self._live: dict[int, tuple[str, int]] = {}
        self.now: Counter[str] = Counter()  # bytes alive, by tag
        self.restart_peak()

    def restart_peak(self) -> None:
        """The peak begins anew, with what is alive."""
        self._total = sum(size for tag, size in self.now.items() if tag != self.HOST)
        self.peak, self.at_peak = self._total, Counter(self.now)

    @contextlib.contextmanager
    def tag(self, name: str) -> Iterator[None]:
        """What is made meanwhile is for this."""
        before, self._tag = self._tag, name
        try:
            yield
        finally:
            self._tag = before

    def move_to_tag(self, tensors: Iterable[Tensor], name: str) -> None:
        """What these tensors view is for ``name`` from here on."""
        for tensor in tensors:
            key = tensor.untyped_storage()._cdata
            if key in self._live:
                before, size = self._live[key]
                self._live[key] = name, size
                self.now[before] -= size
                self.now[name] += size

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        tree_map_only(Tensor, self._note, result)
        return result

    def _note(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._live:
            size = storage.nbytes()
            self._live[key] = self._tag, size
            self.now[self._tag] += size
            if self._tag != self.HOST:
                self._total += size
                if self._total > self.peak:
                    self.peak, self.at_peak = self._total, Counter(self.now)
            weakref.finalize(storage, self._forget, key)
        return tensor

    def _forget(self, key: int) -> None:
        tag, size = self._live.pop(key, (self._tag, 0))
        self.now[tag] -= size
        if tag != self.HOST:
            self._total -= size
