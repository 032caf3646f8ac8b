"""Which serving GPUs a job runs rollouts on, and how many turns one of them may have (ROSE 4, 4.3).

::

    serving GPUs come and go ----> free ----(least KV use over the window)----> borrowed, by one job
                                    ^  |                                          |      |
                                    |  +--- silent or gone: forgotten             |      +-- silent or gone: the job loses it
                                    +------ an RL step begins, and another is clearly less used; it is crowded; its pages were
                                            reclaimed; the job needs fewer; or the job ends

Guarantees:

* A GPU belongs to at most one job, a job has at most as many as it asked for, and never one that is gone or was silent for
  ``silent`` seconds.
* Of those that are free a job gets the ones whose KV memory serving used least over the last ``window`` seconds, weighed by time.
* A job keeps what it has: one is exchanged only between RL steps, and only for one that is used less by ``margin`` of its memory
  or more; so use that fluctuates moves nobody. Asking twice at one moment changes nothing the second time.
* One is given back when serving used more than ``crowded`` of it over the window, or lent nothing for ``patience`` seconds, and
  is taken again ``rest`` seconds later at the earliest, when it lends, and is used ``margin`` less than ``crowded``. Without a
  replacement a job keeps the ``least`` that it asked to keep: what lends nothing now may lend again.
* Fewer are wanted only when ``idle`` seconds would have been done with fewer; more, at once (:class:`BorrowDemand`).
* Ties go to the GPU that joined first, so that runs repeat.

A GPU here is what one serving instance computes on, whatever number of devices that is. Pure: seconds of one monotonic clock.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from orchestrator.policies.parallelism.engine_profile import EngineLayout, EngineProfile

TURNS = 16  # of a rollout GPU at a time (ROSE, appendix A)
SATURATED = 0.1  # what more turns may still add to the throughput, as a share, where it is said to grow no more


@dataclass(frozen=True, slots=True)
class BorrowRules:
    """``window``: seconds of use that count (ROSE 4: 1 h); ``margin``: share of the KV memory by which another GPU must be used
    less before it replaces one; ``silent``: seconds without a sign of life after which a GPU counts as gone. ``crowded``: share
    above which serving needs its GPU for itself, 1: never; ``patience``: seconds that one which lends nothing is kept; ``rest``:
    seconds that one which was given back as crowded, reclaimed or gone, or was refused, is left alone."""

    window: float = 3600.0
    margin: float = 0.1
    silent: float = 30.0
    crowded: float = 1.0
    patience: float = 30.0
    rest: float = 0.0

    def __post_init__(self) -> None:
        for name in ("window", "margin", "silent", "crowded", "patience", "rest"):
            value, zero = getattr(self, name), name in ("margin", "patience", "rest")
            if not 0.0 <= value < math.inf or (value == 0.0 and not zero):
                raise ValueError(f"{name} = {value}: must be a finite number above 0")
        if self.margin > 1 or self.crowded > 1:
            name = "margin" if self.margin > 1 else "crowded"
            raise ValueError(f"{name} = {getattr(self, name)}: is a share of the memory, at most 1")


class RecentUse:
    """The mean of a share over the last ``window`` seconds; a value holds until the next one. Older ones are forgotten."""

    def __init__(self, window: float) -> None:
        self._window = window
        self._values: deque[tuple[float, float]] = deque()  # since when, share

    def add_sample(self, now: float, share: float) -> None:
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
    dry: float = math.inf  # since when it lends nothing; inf: it lends
    barred: float = -math.inf  # until when it is given to nobody
    unwanted: str = ""  # why it is to be given back, whatever it is like


GONE, RECLAIMED, CROWDED = "gone", "reclaimed", "crowded"
BETTER, UNNEEDED, SHARED = "another is used less", "not needed", "another job's share"


@dataclass(frozen=True, slots=True)
class BorrowChange:
    """What a job has to do: run on ``taken``, and no more on ``given_back``; ``reasons``: of each that is given back."""

    taken: tuple[str, ...] = ()
    given_back: tuple[str, ...] = ()
    reasons: tuple[str, ...] = field(default=(), compare=False)


@dataclass(slots=True)
class ServerBroker:
    """The serving GPUs of one cluster, and who borrowed which."""

    rules: BorrowRules = field(default_factory=BorrowRules)
    _gpus: dict[str, _Gpu] = field(default_factory=dict)
    _joined: int = 0

    def observe_gpu(
        self, gpu: str, now: float, share: float, *, lends: bool = True, before: tuple[float, float] = (0, 0)
    ) -> None:
        """A sign of life of a serving GPU, known or new: the share of its KV memory that serving uses. ``lends``: rollouts get
        any of it now. ``before``: of one that is new, the mean share and for how many seconds it was so, where that is known."""
        if not 0 <= share <= 1:
            raise ValueError(f"{gpu} uses {share} of its memory: must be a share from 0 to 1")
        found = self._gpus.get(gpu)
        if found is None:
            found = self._gpus[gpu] = _Gpu(self._joined, RecentUse(self.rules.window), now)
            self._joined += 1
            if before[1] > 0:
                found.use.add_sample(now - before[1], before[0])
        found.heard, found.unwanted = max(found.heard, now), ""
        found.dry = math.inf if lends else min(found.dry, now)
        found.use.add_sample(now, share)

    def bar_gpu(self, gpu: str, why: str) -> None:
        """It is not to be used any more, for this reason, until there is a sign of life of it again. Unknown ones are ignored."""
        if (found := self._gpus.get(gpu)) is not None:
            found.unwanted = why

    def remove_gpu(self, gpu: str) -> str:
        """It is no serving GPU any more, or does not answer: the job that had it, "" for none. Unknown ones are ignored."""
        found = self._gpus.pop(gpu, None)
        return "" if found is None else found.job

    def silent_gpus(self, now: float) -> tuple[str, ...]:
        """Those that have been silent too long; they are for :meth:`remove_gpu`, in order of joining."""
        return tuple(name for name, gpu in self._gpus.items() if now - gpu.heard > self.rules.silent)

    def record_owner(self, gpu: str, job: str, now: float) -> None:
        """A job began with it, whoever chose it. One that was not seen yet is seen now, with nothing known against it."""
        if gpu not in self._gpus:
            self.observe_gpu(gpu, now, 0.0)
        self._gpus[gpu].job = job

    @property
    def known(self) -> tuple[str, ...]:
        """All, in order of joining."""
        return tuple(self._gpus)

    def record_refusal(self, gpu: str, now: float, *, rest: bool = True) -> None:
        """It could not be taken: nobody's here, and left alone for ``rest`` seconds, unless another job was only faster. Unknown
        ones are ignored."""
        if (found := self._gpus.get(gpu)) is not None:
            found.job, found.barred = "", now + (self.rules.rest if rest else 0.0)

    def choose_gpus(
        self, job: str, most: int, now: float, *, exchange: bool = True, least: int = 0, share: int | None = None
    ) -> BorrowChange:
        """A job wants up to ``most`` GPUs. ``exchange``: an RL step begins, so it may be given others than it has. ``least``:
        of those that it has it keeps so many, whatever is wrong with them, unless others take their place. ``share``: what it
        may have beside other jobs, None: all."""
        if not job or most < 0:
            raise ValueError(f"job {job!r} asks for {most} GPUs: needs a name, and not fewer than 0")
        mean = {name: gpu.use.mean(now) for name, gpu in self._gpus.items()}
        crowded = self.rules.crowded

        def by_use(names: list[str]) -> list[str]:
            return sorted(names, key=lambda name: (mean[name], self._gpus[name].number))

        def wrong(name: str) -> str:
            gpu = self._gpus[name]
            if gpu.unwanted or name in quiet:
                return gpu.unwanted or GONE
            if now - gpu.dry > self.rules.patience:
                return RECLAIMED
            return CROWDED if crowded < 1 and mean[name] > crowded else ""

        def may_be_had(name: str) -> bool:
            gpu = self._gpus[name]
            calm = crowded == 1 or mean[name] <= crowded - self.rules.margin
            return (
                not (gpu.job or gpu.unwanted)
                and name not in quiet
                and gpu.dry == math.inf
                and now >= gpu.barred
                and calm
            )

        quiet = set(self.silent_gpus(now))
        had = [name for name, gpu in self._gpus.items() if gpu.job == job]
        why = {name: reason for name in had if (reason := wrong(name))}
        sound = by_use([name for name in had if name not in why])
        why |= dict.fromkeys(sound[share:most] if share is not None else (), SHARED)
        why |= dict.fromkeys(sound[most:], UNNEEDED)
        most = most if share is None else min(most, share)
        kept = sound[:most]
        free = by_use([name for name in self._gpus if may_be_had(name)])
        while free and len(kept) < most:
            kept.append(free.pop(0))
        kept = by_use(kept)
        while exchange and free and kept and mean[free[0]] < mean[kept[-1]] - self.rules.margin:
            why[kept[-1]] = BETTER
            kept[-1] = free.pop(0)
            kept = by_use(kept)
        if (short := min(least, most) - len(kept)) > 0:
            kept += by_use([name for name in had if name not in kept])[:short]
        taken = tuple(name for name in kept if name not in had)
        back = tuple(name for name in had if name not in kept)
        for name in back:
            self._gpus[name].job = ""
            if why[name] not in (BETTER, UNNEEDED, SHARED):
                self._gpus[name].barred = now + self.rules.rest
        for name in taken:
            self._gpus[name].job = job
        return BorrowChange(taken, back, tuple(why[name] for name in back))

    def gpus_of(self, job: str) -> tuple[str, ...]:
        """What a job has, in order of joining."""
        return tuple(name for name, gpu in self._gpus.items() if gpu.job == job)

    def recent_use(self, gpu: str, now: float) -> float:
        """Its use over the window, 0 where it is not known."""
        found = self._gpus.get(gpu)
        return 0.0 if found is None else found.use.mean(now)


class BorrowDemand:
    """How many borrowed GPUs a job needs: as many as the most turns that it had at once in the last ``idle`` seconds need beside
    the dedicated ones, up to their caps. Pure: times of one clock, which may not fall."""

    def __init__(self, idle: float) -> None:
        self._idle = idle  # 0: all that may be had are always needed
        self._since: float | None = None
        self._peaks: deque[tuple[float, int]] = deque()  # when, turns; falling, the largest first

    def observe_turns(self, now: float, turns: int) -> None:
        """So many turns were under way or waited, at most, since the last time."""
        self._since = now if self._since is None else self._since
        while self._peaks and self._peaks[-1][1] <= turns:
            self._peaks.pop()
        self._peaks.append((now, turns))
        while self._peaks[0][0] < now - self._idle:
            self._peaks.popleft()

    def gpus_wanted(self, now: float, dedicated: int | None, cap: int, most: int) -> int:
        """Of ``most`` at most. ``dedicated``: turns that dedicated GPUs may have at once, None: any number; ``cap``: turns of a
        borrowed one, 0: any number. Where there is no limit nothing is known against a borrowed one: all. So until it has been
        watched for ``idle`` seconds."""
        watched = self._since is not None and now - self._since >= self._idle
        if not watched or not self._idle or dedicated is None or not cap:
            return most
        return min(most, max(0, math.ceil((self._peaks[0][1] - dedicated) / cap)))


def saturating_turns(profile: EngineProfile, layout: EngineLayout, context: float) -> int:
    """The concurrency cap of a dedicated engine (ROSE, appendix A): the least batch that was measured from which on no larger one
    makes :data:`SATURATED` more tokens a second, with ``context`` tokens each; no more than its KV memory has room for, and at
    least 1. KeyError: this layout was not profiled."""
    batches, _ = profile.sizes("decode", layout)
    rate = {batch: batch / profile.decode_seconds(batch, context, layout) for batch in batches}
    most = max(rate.values())
    enough = next(batch for batch in batches if most <= (1 + SATURATED) * rate[batch])
    return max(1, min(enough, int(profile.shape(layout).kv_tokens / max(1.0, context))))


def turns_within(budget: int, context: float, most: int = TURNS) -> int:
    """How many turns a borrowed GPU may have, so that no cut of its budget is to be expected: as many contexts of ``context``
    tokens as fit into a budget of so many tokens, and ``most`` at most (0: no other limit than the budget). None where the
    serving side lends no memory, else at least one: a longer context than the budget waits in the engine, and is handed back
    when it stalls."""
    if budget <= 0:
        return 0
    fits = max(1, int(budget / max(1.0, context)))
    return min(most, fits) if most else fits
