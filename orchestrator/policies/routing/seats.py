"""The workers as the router sees them, and the pools in which it looks for the least loaded one.

A pool keeps its workers by *level*, a small whole number. Level is the number of requests that a worker has; where load is
relative to capacity, how many of ``FULL`` parts of its cap are taken, rounded down. The least loaded worker is found by two bit
masks, whatever the number of workers. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field

ANY = "any"  # the class of a worker of which nothing was said
DEDICATED_FIRST, LEAST_UTILIZED = "dedicated-first", "least-utilized"
SPREADS = (DEDICATED_FIRST, LEAST_UTILIZED)
FULL = 1024  # level of a worker that has as many requests as its cap, where load is relative


@dataclass(frozen=True, slots=True)
class Seat:
    """A worker, as the router sees it. ``cap``: requests that it may have at a time, 0: any number. ``borrowed``: with the spread
    "dedicated-first" it is used when no dedicated worker has room, if these have caps; else it is one like the others."""

    hardware: str = ANY
    cap: int = 0
    borrowed: bool = False


def lowest_bit(mask: int) -> int:
    """The lowest bit that is set, of a mask that is not 0."""
    return (mask & -mask).bit_length() - 1


@dataclass(slots=True)
class SeatPool:
    """The open workers with room of one class and tier, by level."""

    levels: list[int] = field(default_factory=lambda: [0])  # level -> workers, as a bit mask
    loads: int = 0  # the levels that some worker has, as a bit mask
    free: int = 0  # all workers in it, as a bit mask
    last: int = -1  # whose turn it was (round robin)

    def add(self, worker: int, level: int) -> None:
        """It is open and has room, at this level."""
        while len(self.levels) <= level:
            self.levels.append(0)
        self.levels[level] |= 1 << worker
        self.loads |= 1 << level
        self.free |= 1 << worker

    def drop(self, worker: int, level: int) -> None:
        """It was added at this level, and is in it no more."""
        self.levels[level] &= ~(1 << worker)
        if not self.levels[level]:
            self.loads &= ~(1 << level)
        self.free &= ~(1 << worker)

    def least_loaded(self) -> int:
        """The least loaded worker. Only when there is one."""
        return lowest_bit(self.levels[lowest_bit(self.loads)])

    def next_in_turn(self) -> int:
        """The next one in turn. Only when there is one."""
        after = self.free >> (self.last + 1) << (self.last + 1)
        self.last = lowest_bit(after or self.free)
        return self.last
