"""Which serving GPUs a job runs rollouts on, and how many turns one of them may have (ROSE 4, 4.3).

::

    serving GPUs come and go ----> free ----(least KV use over the window)----> borrowed, by one job
                                    ^  |                                          |      |
                                    |  +--- silent or gone: forgotten             |      +-- silent or gone: the job loses it
                                    +------ an RL step begins, and another is clearly less used; or the job ends

Guarantees:

* A GPU belongs to at most one job, a job has at most as many as it asked for, and never one that is gone or was silent for
  ``silent`` seconds.
* Of those that are free a job gets the ones whose KV memory serving used least over the last ``window`` seconds, weighed by time.
* A job keeps what it has: one is exchanged only between RL steps, and only for one that is used less by ``margin`` of its memory
  or more; so use that fluctuates moves nobody. Asking twice at one moment changes nothing the second time.
* Ties go to the GPU that joined first, so that runs repeat.

A GPU here is what one serving instance computes on, whatever number of devices that is. Pure: seconds of one monotonic clock.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

TURNS = 16  # of a rollout GPU at a time (ROSE, appendix A)


@dataclass(frozen=True, slots=True)
class BorrowRules:
    """``window``: seconds of use that count (ROSE 4: 1 h); ``margin``: share of the KV memory by which another GPU must be used
    less before it replaces one; ``silent``: seconds without a sign of life after which a GPU counts as gone."""

    window: float = 3600.0
    margin: float = 0.1
    silent: float = 30.0

    def __post_init__(self) -> None:
        for name, least in (("window", 0.0), ("margin", 0.0), ("silent", 0.0)):
            value = getattr(self, name)
            if not least <= value < math.inf or (name != "margin" and value == least):
                raise ValueError(f"{name} = {value}: must be a finite number above {least:g}")
        if self.margin > 1:
            raise ValueError(f"margin = {self.margin}: is a share of the memory, at most 1")


class RecentUse:
    """The mean of a share over the last ``window`` seconds; a value holds until the next one. Older ones are forgotten."""

    def __init__(self, window: float) -> None:
        self._window = window
        self._values: deque[tuple[float, float]] = deque()  # since when, share

    def saw(self, now: float, share: float) -> None:
        """It is ``share`` from now on. Times may not fall; of two values of one moment the later counts."""
        if self._values and self._values[-1][0] >= now:
            now = self._values.pop()[0]
        if not self._values or self._values[-1][1] != share:
            self._values.append((now, share))
        self._trim(now)

    def mean(self, now: float) -> float:
        """0 before anything was seen: nothing is known against it."""
        if not self._values:
            return 0.0
        self._trim(now)
        begun = max(self._values[0][0], now - self._window)
        if now <= begun:
            return self._values[-1][1]
        area, until = 0.0, now
        for since, share in reversed(self._values):
            area += (until - max(since, begun)) * share
            until = max(since, begun)
        return area / (now - begun)

    def _trim(self, now: float) -> None:
        while len(self._values) > 1 and self._values[1][0] <= now - self._window:
            self._values.popleft()


@dataclass(slots=True)
class _Gpu:
    number: int  # of joining
    use: RecentUse
    heard: float
    job: str = ""


@dataclass(frozen=True, slots=True)
class Change:
    """What a job has to do: run on ``taken``, and no more on ``given_back``."""

    taken: tuple[str, ...] = ()
    given_back: tuple[str, ...] = ()


@dataclass(slots=True)
class Borrowing:
    """The serving GPUs of one cluster, and who borrowed which."""

    rules: BorrowRules = field(default_factory=BorrowRules)
    _gpus: dict[str, _Gpu] = field(default_factory=dict)
    _joined: int = 0

    def saw(self, gpu: str, now: float, share: float) -> None:
        """A sign of life of a serving GPU, known or new: the share of its KV memory that serving uses."""
        if not 0 <= share <= 1:
            raise ValueError(f"{gpu} uses {share} of its memory: must be a share from 0 to 1")
        found = self._gpus.get(gpu)
        if found is None:
            found = self._gpus[gpu] = _Gpu(self._joined, RecentUse(self.rules.window), now)
            self._joined += 1
        found.heard = max(found.heard, now)
        found.use.saw(now, share)

    def left(self, gpu: str) -> str:
        """It is no serving GPU any more, or does not answer: the job that had it, "" for none. Unknown ones are ignored."""
        found = self._gpus.pop(gpu, None)
        return "" if found is None else found.job

    def silent(self, now: float) -> tuple[str, ...]:
        """Those that have been silent too long; they are for :meth:`left`, in order of joining."""
        return tuple(name for name, gpu in self._gpus.items() if now - gpu.heard > self.rules.silent)

    def ask(self, job: str, most: int, now: float, *, exchange: bool = True) -> Change:
        """A job wants up to ``most`` GPUs. ``exchange``: an RL step begins, so it may be given others than it has."""
        if not job or most < 0:
            raise ValueError(f"job {job!r} asks for {most} GPUs: needs a name, and not fewer than 0")
        mean = {name: gpu.use.mean(now) for name, gpu in self._gpus.items()}

        def by_use(names: list[str]) -> list[str]:
            return sorted(names, key=lambda name: (mean[name], self._gpus[name].number))

        quiet = set(self.silent(now))
        had = [name for name, gpu in self._gpus.items() if gpu.job == job]
        kept = by_use([name for name in had if name not in quiet])[:most]
        free = by_use([name for name, gpu in self._gpus.items() if not gpu.job and name not in quiet])
        while free and len(kept) < most:
            kept.append(free.pop(0))
        kept = by_use(kept)
        while exchange and free and kept and mean[free[0]] < mean[kept[-1]] - self.rules.margin:
            kept[-1] = free.pop(0)
            kept = by_use(kept)
        taken = tuple(name for name in kept if name not in had)
        back = tuple(name for name in had if name not in kept)
        for name in back:
            self._gpus[name].job = ""
        for name in taken:
            self._gpus[name].job = job
        return Change(taken, back)

    def end(self, job: str) -> tuple[str, ...]:
        """The job is over: what it had is free."""
        had = self.of(job)
        for name in had:
            self._gpus[name].job = ""
        return had

    def of(self, job: str) -> tuple[str, ...]:
        """What a job has, in order of joining."""
        return tuple(name for name, gpu in self._gpus.items() if gpu.job == job)

    def use(self, gpu: str, now: float) -> float:
        """Its use over the window, 0 where it is not known."""
        found = self._gpus.get(gpu)
        return 0.0 if found is None else found.use.mean(now)


def turns_within(budget: int, context: float, most: int = TURNS) -> int:
    """How many turns a borrowed GPU may have, so that no cut of its budget is to be expected: as many contexts of ``context``
    tokens as fit into a budget of so many tokens, and ``most`` at most (0: no other limit than the budget). None where the
    serving side lends no memory, else at least one: a longer context than the budget waits in the engine, and is handed back
    when it stalls."""
    if budget <= 0:
        return 0
    fits = max(1, int(budget / max(1.0, context)))
    return min(most, fits) if most else fits
