"""The sample buffer: groups of scored trajectories between rollout and training.

Guarantees: ``get_batch`` hands out complete GRPO groups only, in order of completion (:class:`BatchBalance` may prefer another
order), each trajectory within the staleness bound at the moment it is taken; stale ones are evicted eagerly when the
trainer's version moves; a group that lost members is trained smaller (two at least) or dropped, never silently;
``get_batch`` can always say what it waits for (:attr:`SampleBuffer.waiting_for`). It decides nothing about starting
trajectories: its owner does, told by its return values. So its size is bounded by the start gate: alpha times
the environments, plus what is launched for a batch (:meth:`orchestrator.policies.batching.staleness.StartGate.most_under_way`).

A group with redundant members is complete when enough of them are scored; the others are surplus, and ended. What filters
reject (:mod:`orchestrator.policies.batching.trajectory_filters`) ends as filtered, and is a lost member of its group.

Dynamic sampling (DAPO, section 3.2): a complete group whose rewards are all equal has no advantage to learn from. With
``max_filtered`` it ends as filtered, up to so many groups a batch; those beyond are trained as they are and counted, so
that a task on which the policy always fails, or never does, cannot hold a batch up for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from orchestrator.api import Prompt, Trajectory
from orchestrator.policies.batching.staleness import StalenessBound
from orchestrator.policies.batching.trajectory_filters import BatchBalance, FilterChain

_FREED = 64  # trajectories in a turn of the loop: two milliseconds
REFERENCE_LOST = "reference_lost"  # the cause where the shard of a trajectory is gone


@dataclass(slots=True)
class SampleGroup:
    """One prompt's trajectories. ``live``: members still running or being scored, in order of starting. ``wanted``: how many
    scored ones make it complete though others are under way; 0: all of them."""

    id: str
    prompt: Prompt
    refills_left: int
    wanted: int = 0
    live: dict[str, None] = field(default_factory=dict)
    scored: list[Trajectory] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """No member is still under way, or none of those is needed."""
        return not self.live or 0 < self.wanted <= len(self.scored)


@dataclass(frozen=True, slots=True)
class Taken:
    """A trajectory in a batch, with the lag at which ``get_batch`` took it."""

    trajectory: Trajectory
    lag: int


def let_go(held: list[Taken] | list[Trajectory]) -> None:
    """Empty a list whose trajectories nobody else may hold any more, a few in each turn of the loop: each has hundreds of objects
    and a shard to unmap, and a thousand at once are 40 ms."""
    del held[-_FREED:]
    if held:
        asyncio.get_running_loop().call_soon(let_go, held)


class BufferOwner(Protocol):
    """Who starts and ends the trajectories that a buffer holds: it is told, and asked."""

    def on_evict(self, trajectory: Trajectory, state: str, cause: str) -> None:
        """A scored trajectory leaves without being trained."""

    def on_surplus(self, members: list[str]) -> None:
        """These members are not needed any more."""

    def on_group(self, group_id: str, outcome: str) -> None:
        """A group is "complete", or is none any more, for this reason."""

    def may_have_more(self) -> bool:
        """Whether another group is under way or may start."""

    def lost(self, trajectories: Sequence[Trajectory]) -> Sequence[str]:
        """Those whose tokens nobody can read any more, by id."""


class SampleBuffer:
    """``owner`` is there before the first group is opened. ``max_filtered``: complete groups that are filtered for what they are
    (equal rewards, out of balance), a batch; 0: none."""

    owner: BufferOwner

    def __init__(
        self,
        bound: StalenessBound,
        max_filtered: int = 0,
        *,
        dynamic: bool = True,
        filters: FilterChain | None = None,
        balance: BatchBalance | None = None,
    ) -> None:
        self._bound = bound
        self._max_filtered = max_filtered
        self._dynamic = dynamic
        self._filters = filters or FilterChain()
        self._balance = balance
        self.filtered_groups = 0  # groups, for the batch that is being collected
        self._wanted = 0  # groups that a waiting get_batch wants
        self._groups: dict[str, SampleGroup] = {}
        self._ready: dict[str, SampleGroup] = {}  # complete groups in order of completion
        self._taken: dict[str, list[Taken]] = {}  # groups in a batch that is not trained yet
        self._scored: int | None = 0  # what ``scored`` says; None: to be counted anew
        self._changed = asyncio.Event()
        self.version = 0  # the trainer's

    # -- what the pipeline reports -----------------------------------------------------------------------------------

    def open(self, group_id: str, prompt: Prompt, members: list[str], refills: int, wanted: int = 0) -> None:
        """A group starts; ``wanted`` of its members are enough (0: all)."""
        self._groups[group_id] = SampleGroup(group_id, prompt, refills, wanted, dict.fromkeys(members))

    def put(self, trajectory: Trajectory) -> bool:
        """A member is scored. Returns whether it left at once, too stale or filtered: then the member is lost."""
        group = self._groups[trajectory.group_id]
        if not self._bound.admissible(self.version, trajectory.first_version):
            self.owner.on_evict(trajectory, "evicted_stale", "")
            return True
        if reason := self._filters.screen(trajectory):
            self.owner.on_evict(trajectory, "filtered", reason)
            return True
        del group.live[trajectory.id]
        group.scored.append(trajectory)
        if self._scored is not None:
            self._scored += 1
        self._settle(group)
        return False

    def lose(self, group_id: str, trajectory_id: str, replacement: Callable[[Prompt], str] | None) -> None:
        """A member ended without a score. ``replacement`` starts another one for the same prompt and returns its id; it
        is called only while the group's refills last. A member that its group does not wait for (surplus) is no loss."""
        group = self._groups.get(group_id)
        if group is None or trajectory_id not in group.live:
            return
        del group.live[trajectory_id]
        if replacement is not None and group.refills_left > 0:
            group.refills_left -= 1
            group.live[replacement(group.prompt)] = None
        self._settle(group)

    def set_version(self, version: int) -> None:
        """The trainer's version moved: evict what is too stale now."""
        self.version = version
        self._evict_stale(list(self._groups.values()))
        self._changed.set()

    def too_stale(self, first_version: int) -> bool:
        """Whether a trajectory that began with this version may not be taken any more."""
        return not self._bound.admissible(self.version, first_version)

    def _evict_stale(self, groups: Sequence[SampleGroup]) -> None:
        version = self.version
        for group in groups:
            if group.id not in self._groups:  # withdrawn, since another one was lost
                continue
            fresh = [t for t in group.scored if self._bound.admissible(version, t.first_version)]
            stale = [t for t in group.scored if not self._bound.admissible(version, t.first_version)]
            if stale:
                group.scored, self._scored = fresh, None
                for trajectory in stale:
                    self.owner.on_evict(trajectory, "evicted_stale", "")
                self._settle(group)  # what is left of a complete group keeps its place: an older one is not overtaken

    def excuse(self, group_id: str, members: Sequence[str]) -> None:
        """The group does not wait for these any more."""
        group = self._groups[group_id]
        for member in members:
            group.live.pop(member, None)

    def withdraw(self, group_id: str, state: str, cause: str) -> None:
        """A group that no batch has taken is not wanted any more: its scored members end so, and it waits for no other."""
        group = self._groups.pop(group_id)
        self._ready.pop(group_id, None)
        self._scored = None
        for trajectory in group.scored:
            self.owner.on_evict(trajectory, state, cause)

    @property
    def taken(self) -> list[str]:
        """The groups of the batch that is being collected, or waits for the trainer."""
        return list(self._taken)

    @property
    def untaken(self) -> list[str]:
        """Complete groups that no batch has taken."""
        return list(self._ready)

    def late(self, group_id: str) -> tuple[list[str], bool]:
        """(the members that a group still waits for, whether it could be trained without them)."""
        group = self._groups.get(group_id)
        return (list(group.live), len(group.scored) >= 2) if group is not None else ([], True)

    def reconsider(self) -> None:
        """What ``more`` says has changed."""
        self._changed.set()

    # -- get_batch ---------------------------------------------------------------------------------------------------

    async def get_batch(
        self, groups: int, on_take: Callable[[list[Trajectory]], None], *, streamed: bool = False
    ) -> list[Taken]:
        """Wait for ``groups`` complete groups (RollArt 6.2, step 1), taking each as soon as it is complete: ``on_take`` is
        told of each group then, in the order of the batch. Cancelled, it keeps what it took: the next call goes on. What lost
        its tokens meanwhile ends, unless what is taken is ``streamed``: then the trainer has it."""
        self._wanted = groups
        try:
            while True:
                self._fill(groups, on_take)
                if len(self._taken) >= groups:
                    if not streamed and self._drop_lost():
                        continue
                    return [taken for members in self._taken.values() for taken in members]
                self._changed.clear()
                await self._changed.wait()
        finally:
            self._wanted = 0

    def _fill(self, groups: int, on_take: Callable[[list[Trajectory]], None]) -> None:
        """Take what is ready and may be taken."""
        self._evict_stale(list(self._ready.values()))  # nothing can be: this is the bound's last guard
        while self._ready and len(self._taken) < groups:
            group = self._next(groups)
            if group is None:
                return
            group.scored = self._without_lost(group.scored)
            if len(group.scored) < 2:
                self._filter(group, "group_too_small")
                continue
            del self._ready[group.id]
            del self._groups[group.id]
            self._taken[group.id] = [Taken(t, self._bound.lag(self.version, t.first_version)) for t in group.scored]
            on_take(group.scored)

    def _without_lost(self, trajectories: list[Trajectory]) -> list[Trajectory]:
        """Those whose tokens are there; the others end."""
        lost = self.owner.lost(trajectories)
        if not lost:
            return trajectories
        self._scored = None
        for trajectory in trajectories:
            if trajectory.id in lost:
                self.owner.on_evict(trajectory, "failed", REFERENCE_LOST)
        return [trajectory for trajectory in trajectories if trajectory.id not in lost]

    def _drop_lost(self) -> bool:
        """End what of the batch was lost since it was taken, and groups of which one member is left; whether there was any."""
        whole = True
        for group_id, members in list(self._taken.items()):
            left = dict.fromkeys(item.id for item in self._without_lost([item.trajectory for item in members]))
            if len(left) == len(members):
                continue
            whole = False
            self._taken[group_id] = [item for item in members if item.trajectory.id in left]
            if len(left) < 2:
                for item in self._taken.pop(group_id):
                    self.owner.on_evict(item.trajectory, "filtered", "group_too_small")
                self.owner.on_group(group_id, "group_too_small")
        return not whole

    def _next(self, wanted: int) -> SampleGroup | None:
        """The complete group that the batch gets next; None: better wait for others."""
        if self._balance is None:
            return next(iter(self._ready.values()))
        while self._ready:
            ready = list(self._ready.values())
            taken = [[item.trajectory for item in members] for members in self._taken.values()]
            kinds = [self._balance.kind_of(group.scored) for group in ready]
            index = self._balance.pick_group(kinds, [self._balance.kind_of(group) for group in taken], wanted)
            if index is not None:
                return ready[index]
            if self.owner.may_have_more():
                return None
            if (
                self.filtered_groups >= self._max_filtered
            ):  # nothing else is coming and nothing more may go: take it as it is
                return ready[0]
            self.filtered_groups += 1
            del self._ready[ready[0].id]
            self._filter(ready[0], "balance")
        return None

    def newest(self) -> list[Taken]:
        """The group that was taken last."""
        return list(self._taken.values())[-1]

    def hand_over(self) -> list[Taken]:
        """The batch goes into training; ``get_batch`` may collect the next one. The caller keeps it until trained."""
        batch = [taken for members in self._taken.values() for taken in members]
        self._taken.clear()
        self.filtered_groups, self._scored = 0, None
        return batch

    def drop_untaken(self, state: str, cause: str) -> None:
        """End every scored trajectory that ``get_batch`` has not taken. Nothing may be in flight."""
        for group in list(self._groups.values()):
            scored, group.scored = group.scored, []
            for trajectory in scored:
                self.owner.on_evict(trajectory, state, cause)
        self._groups.clear()
        self._ready.clear()
        self._scored = None

    def drain(self, state: str, cause: str) -> None:
        """End every scored trajectory, taken ones too (the run ends)."""
        self.drop_untaken(state, cause)
        for members in list(self._taken.values()):
            for taken in members:
                self.owner.on_evict(taken.trajectory, state, cause)
        self._taken.clear()
        self._scored = None

    # -- what others ask ---------------------------------------------------------------------------------------------

    @property
    def scored(self) -> int:
        """Trajectories scored and not yet handed to training. Asked at every end of a trajectory: counted once, then kept."""
        if self._scored is None:
            waiting = sum(len(group.scored) for group in self._groups.values())
            self._scored = waiting + sum(len(members) for members in self._taken.values())
        return self._scored

    @property
    def waiting_for(self) -> str:
        """What a waiting ``get_batch`` lacks, in words; "" when none waits."""
        lacking = self._wanted - len(self._taken)
        if lacking <= 0:
            return ""
        text = f"{len(self._taken)} of {self._wanted} groups taken"
        if self._ready and self._balance is not None:
            kinds = sorted(dict.fromkeys(self._balance.kind_of(group.scored) for group in self._ready.values()))
            text += f", {len(self._ready)} held back: {' and '.join(kinds)} have their share of the batch"
        nearest = min(
            (group for group in self._groups.values() if group.live), key=lambda group: len(group.live), default=None
        )
        if nearest is None:
            return f"{text}, no group is under way"
        members = len(nearest.live) + len(nearest.scored)
        return f"{text}, group {nearest.id} has {len(nearest.scored)} of {members} members scored"

    @property
    def ready_groups(self) -> int:
        """Complete groups, taken ones included."""
        return len(self._ready) + len(self._taken)

    @property
    def uniform_taken(self) -> int:
        """Groups of equal rewards among those taken."""
        return sum(_uniform([taken.trajectory for taken in members]) for members in self._taken.values())

    def stored(self) -> list[Trajectory]:
        """Everything scored, for a checkpoint."""
        held = [taken.trajectory for members in self._taken.values() for taken in members]
        return held + [trajectory for group in self._groups.values() for trajectory in group.scored]

    def restore(self, trajectories: list[Trajectory], version: int) -> None:
        """Put a checkpoint's trajectories back: their groups count as complete as they are."""
        self.version = version
        for trajectory in trajectories:
            group = self._groups.setdefault(trajectory.group_id, SampleGroup(trajectory.group_id, trajectory.prompt, 0))
            group.scored.append(trajectory)
        self._scored = None
        for group in list(self._groups.values()):
            self._settle(group)
        self.set_version(version)

    def _settle(self, group: SampleGroup) -> None:
        if not group.complete or group.id not in self._groups:
            return
        if group.live:
            surplus = list(group.live)
            group.live.clear()
            self.owner.on_surplus(surplus)
        if len(group.scored) < 2:  # alone, it has nothing to be compared with
            self._filter(group, "group_too_small")
        elif self._dynamic and self.filtered_groups < self._max_filtered and _uniform(group.scored):
            self.filtered_groups += 1
            self._filter(group, "zero_variance")
        else:
            self._ready[group.id] = group
            self.owner.on_group(group.id, "complete")
        self._changed.set()

    def _filter(self, group: SampleGroup, cause: str) -> None:
        del self._groups[group.id]
        self._scored = None
        self._ready.pop(group.id, None)
        for trajectory in group.scored:
            self.owner.on_evict(trajectory, "filtered", cause)
        self.owner.on_group(group.id, cause)


def _uniform(group: Sequence[Trajectory]) -> bool:
    """Whether all members have the same reward: then every advantage of the group is zero."""
    return len({trajectory.reward for trajectory in group}) == 1
