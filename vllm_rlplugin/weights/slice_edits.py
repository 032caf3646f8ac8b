"""What a version changes of one live slice: places, old values, new values. As large as the change.

Guarantees: nothing is written but by :meth:`SliceEdits.write_new` and :meth:`SliceEdits.restore_old`, and those write the
places that changed and no others; after ``restore`` each of them has the bits that it had when it was read. Values are
compared and kept as bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vllm_rlplugin.weights.checkpoint_mapping import Slice
from vllm_rlplugin.weights.element_places import Index, locate_inside, merge_dims, sort_nested

Words = npt.NDArray[Any]  # unsigned integers as wide as an element
_TORCH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SMALL = 1 << 31


class ScratchMemory:
    """Memory for one copy at a time, as large as the largest was: fresh pages cost more than the copy itself."""

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)

    def copy_view(self, view: torch.Tensor) -> torch.Tensor:
        """A contiguous copy; the one before is gone."""
        if self._memory.numel() < view.numel() * view.element_size():
            self._memory = torch.empty(view.numel() * view.element_size(), dtype=torch.uint8, device=view.device)
        made = self._memory[: view.numel() * view.element_size()].view(view.dtype).view(view.size())
        return made.copy_(view.detach())


class SliceEdits:
    """Of one slice. Differences are added in their order, each ended by :meth:`end_difference`; later ones see what
    earlier ones did."""

    def __init__(self, item: Slice) -> None:
        target = item.target.detach()
        span = 1 + sum((count - 1) * stride for count, stride in zip(target.size(), target.stride(), strict=True))
        self.slice = item
        self._memory = target.as_strided((span,), (1,), target.storage_offset()).view(_TORCH[target.element_size()])
        self._words = np.dtype(f"u{target.element_size()}")
        self._width = np.dtype(np.int32) if span < _SMALL else np.dtype(np.int64)
        self.index: Index = np.empty(0, self._width)  # ascending, from the target's first element
        self.old: Words = np.empty(0, self._words)
        self.new: Words = np.empty(0, self._words)
        self._added: list[tuple[Index, Words, Words]] = []

    @property
    def bytes(self) -> int:
        """Memory held."""
        return self.index.nbytes + self.old.nbytes + self.new.nbytes

    def add_change(self, index: Index, change: Callable[[Words], Words]) -> None:
        """New values for places that this difference has not touched yet, from those before it."""
        before = self._live(index)
        if self.index.size:
            at = np.minimum(np.searchsorted(self.index, index), self.index.size - 1)
            known = self.index[at] == index
            before[known] = self.new[at[known]]
        after = change(before)
        moved = after != before
        if moved.any():
            self._added.append((index[moved].astype(self._width), before[moved], after[moved]))

    def replace_values(self, values: torch.Tensor) -> None:
        """The values of all of the slice, of its shape, on the host; what it had so far is forgotten."""
        target = self.slice.target.detach()
        new, old = self._bits(values), self._bits(target.cpu())
        where = np.flatnonzero(new != old)
        if target.is_contiguous():
            index = where
        else:
            index = (
                torch.arange(self._memory.numel()).as_strided(target.size(), target.stride()).reshape(-1).numpy()[where]
            )
        self._added = [(index.astype(self._width), old[where], new[where])]
        self.index, self.old, self.new = self.index[:0], self.old[:0], self.new[:0]
        self.end_difference()

    def end_difference(self) -> None:
        """The end of one difference. What came back to its first value is forgotten."""
        if not self._added:
            return
        parts, self._added = self._added, []
        index, old, new = (np.concatenate([part[number] for part in parts]) for number in range(3))
        order = np.argsort(index, kind="stable")
        index, old, new = index[order], old[order], new[order]
        if self.index.size:
            # Known places first: of two equal ones the first has the value that is live, the last the newest.
            both, first = np.unique(np.concatenate([self.index, index]), return_index=True)
            last = np.minimum(np.searchsorted(index, both), index.size - 1)
            fresh = index[last] == both
            newest = np.concatenate([self.new, new])[first]
            newest[fresh] = new[last[fresh]]
            index, old, new = both, np.concatenate([self.old, old])[first], newest
            left = old != new
            index, old, new = index[left], old[left], new[left]
        self.index, self.old, self.new = index, old, new

    def predict_view(self, view: torch.Tensor, scratch: ScratchMemory) -> torch.Tensor:
        """A contiguous copy of a part of the slice's target, as it will be; in memory that the next one may take."""
        made = scratch.copy_view(view)
        ordered = sort_nested(merge_dims(view.size(), view.stride(), made.stride()), 1)
        if ordered is None:
            raise ValueError(f"a view with strides {view.stride()} has an element twice")
        chosen, at = locate_inside(self.index, view.storage_offset() - self.slice.target.storage_offset(), ordered)
        self._write_values(made.reshape(-1).view(self._memory.dtype), at, self.new[chosen])
        return made

    def write_new(self) -> None:
        """Put the new values into the model."""
        self._write_values(self._memory, self.index, self.new)

    def restore_old(self) -> None:
        """Put the old ones back."""
        self._write_values(self._memory, self.index, self.old)

    def _write_values(self, memory: torch.Tensor, index: Index, values: Words) -> None:
        if on_host(memory):
            memory.numpy().view(self._words)[index] = values  # several times as fast as torch's
        else:
            memory[self._tensor(index, np.int64)] = self._tensor(values)

    def _bits(self, tensor: torch.Tensor) -> Words:
        found: Words = tensor.contiguous().reshape(-1).view(self._memory.dtype).numpy().view(self._words)
        return found

    def _live(self, index: Index) -> Words:
        if on_host(self._memory):
            memory: Words = self._memory.numpy().view(self._words)
            return memory[index]
        found: Words = self._memory[self._tensor(index, np.int64)].cpu().numpy().view(self._words)
        return found

    def _tensor(self, values: Index | Words, dtype: Any = None) -> torch.Tensor:
        """On the model's device: signed integers of the same bits, or as ``dtype``."""
        plain = values.view(f"i{values.dtype.itemsize}") if values.dtype.itemsize > 1 else values
        return torch.from_numpy(np.ascontiguousarray(plain)).to(
            self._memory.device, torch.int64 if dtype is np.int64 else None
        )


def on_host(memory: torch.Tensor) -> bool:
    """Whether NumPy reaches it."""
    return bool(memory.device.type == "cpu")
