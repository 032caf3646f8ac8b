"""Worker classes to derive from, one a role (RollArt 5.1).

A worker is a plain class: its methods are the user's, ``rank``, ``world_size``, ``hardware`` and ``devices`` say where it
runs. Methods of one worker run one after the other, unless it says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class Identity:
    """Who and where a worker is."""

    worker_id: str
    rank: int
    world_size: int
    hardware: str
    devices: tuple[int, ...]


class Worker:
    """Base of all. Derive from one of the two roles; ``__init__`` takes nothing, and may read who the worker is."""

    role: ClassVar[str] = ""
    concurrency: ClassVar[int] = 1  # calls at a time; more: its methods are coroutines, of one event loop
    # calls at a time of methods that are declared as beside the others, in an event loop and thread of their own
    beside: ClassVar[int] = 0
    identity: Identity = Identity("", 0, 1, "", ())

    @property
    def rank(self) -> int:
        """Among the workers of its cluster, from 0."""
        return self.identity.rank

    @property
    def world_size(self) -> int:
        """Workers of its cluster."""
        return self.identity.world_size

    @property
    def hardware(self) -> str:
        """The class of its devices."""
        return self.identity.hardware

    @property
    def devices(self) -> tuple[int, ...]:
        """Their ids in the pool."""
        return self.identity.devices


class ActorTrainCls(Worker):
    """Training; on compute-optimised GPUs where nothing else is said."""

    role = "ActorTrain"


class ActorGenCls(Worker):
    """Generation; on bandwidth-optimised GPUs where nothing else is said."""

    role = "ActorGen"
