"""The places of engines that are cut anew between steps: their devices are reserved once, for as long as the run, and each engine
takes so many of them as it has then.

Guarantees: nobody else gets a device of theirs, not while they are all ended either; two engines never have the same one; the
devices of an engine are in one node, where the engines stand one after the other as
:func:`orchestrator.proxy.resize.engine_seats` seats them and none has more than a node.
"""

from __future__ import annotations

from dataclasses import replace

from orchestrator.api import RetryableError
from orchestrator.policies.placement.device_allocation import DeviceBinding
from orchestrator.resources.placement_groups import Placement


class EngineSeat(Placement):
    """The place of an engine whose devices begin with the one numbered ``first`` of ``block``: so many as :meth:`resize` said
    last, one at first. Ray says which ones, when its process starts."""

    def __init__(self, block: Placement, worker: str, first: int) -> None:
        super().__init__(None, worker, "")
        self._block, self._first = block, first

    @property
    def whole(self) -> Placement:
        """See :class:`Placement`."""
        return self._block

    def resize(self, devices: int) -> None:
        """What starts here next has so many."""
        self._wish = replace(self._wish, devices=devices)

    def bind(self) -> DeviceBinding:
        """See :class:`Placement`."""
        block = self._block.bind()
        self._wish = replace(self._wish, hardware=block.wish.hardware)
        devices = block.devices[self._first : self._first + self._wish.devices]
        return DeviceBinding(self._wish, block.hardware, devices, block.fallback)

    def bundle(self) -> dict[str, float]:
        """See :class:`Placement`. As large a part of what the block has of a node as its devices are of them."""
        share = self._wish.devices / self._block.devices_per_node
        return {name: count * share for name, count in self._block.bundle().items()}

    def place(self, part: int = 0) -> dict[str, object]:
        """See :class:`Placement`."""
        return self._block.place(self._part) | self._options(self.bundle())

    def nodes(self) -> list[str]:
        """See :class:`Placement`."""
        return [self._block.nodes()[self._part]]

    def move(self) -> DeviceBinding:
        """See :class:`Placement`. There is no other place: it is tried again here."""
        if self.machine_gone():
            raise RetryableError(f"{self.worker}: its devices are reserved on a node that is away")
        return self.bind()

    def release(self) -> None:
        """See :class:`Placement`. With those of all other engines of the block."""
        self._block.release()

    @property
    def _part(self) -> int:
        return self._first // self._block.devices_per_node
