"""A simulated rollout worker on a device that somebody else has as well, or that comes and goes (ROSE 4).

Guarantees: its steps take device time only, which is a share of the loop's time while a serving engine computes on the device
too; a leap over many steps is stretched when that share changes, and ends where it would have ended step by step. What it holds
beyond its budget it gives up at once, unused prefixes first, then whole requests, which go on elsewhere with their tokens. What
makes no progress goes on elsewhere, too; both by the policies of the engines. A prefix that nobody uses goes when its lease
is over. Away, it is a server that does not answer. It takes weights from the relay, as a served worker does, never by the
collective.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from orchestrator.api import RetryableError, UpdateResult, WorkerStats
from orchestrator.policies.serving.admission import CHUNK
from orchestrator.policies.serving.kv_sharing import displacement_order
from orchestrator.policies.serving.progress_watch import ProgressWatch
from orchestrator.sim.coserving.serving_engine import NEVER, PAGE, RolloutDemand, ServingEngine
from orchestrator.sim.cost_model import CHUNK_TOKENS, seconds_of, steps_in
from orchestrator.sim.simulated_worker import SimWorker

_LITTLE = 1e-9  # seconds


class BorrowedSimWorker(SimWorker):
    """A :class:`~orchestrator.api.BorrowedWorker`. ``engine``: whose device it is on, None: it has one for itself.
    ``kv_bytes``: of a simulated token; ``lease``: seconds, 0: it has no prefix cache. ``moved``: asked with each
    version for the engine to be on."""

    receive = None  # type: ignore[assignment]
    url = "simulated"

    def __init__(
        self, *arguments: Any, lease: float, activation: float, start: float, kv_bytes: float, grain: int, **more: Any
    ) -> None:
        self._share, self._wall, self._spent = 1.0, 0.0, 0.0
        self._watch = ProgressWatch()
        self._look: asyncio.TimerHandle | None = None  # at those that may have stalled
        self._lease, self._activation = lease, activation
        self._kv_bytes, self._grain = kv_bytes, grain
        self._since: dict[str, int] = {}  # trajectory -> which of all prefixes its own is
        self._marks = 0
        self._room: int | None = None
        self.engine: ServingEngine | None = None
        self.moved: Callable[[int], ServingEngine | None] = lambda version: self.engine
        self.present = True
        self.lasts = False  # its process runs on while nobody borrows it
        self._left = False  # it was left, and has not died since
        self.handed_back = 0
        self.recovering_seconds = 0.0  # that its device could not compute for it, because it was started
        super().__init__(*arguments, **more)
        self._start_seconds = start
        self._activated = False

    # -- time on the device ------------------------------------------------------------------------------------------

    def _clock(self) -> float:
        return self._spent + (asyncio.get_running_loop().time() - self._wall) * self._share

    def _at(self, seconds: float) -> float:
        return self._wall + (seconds - self._spent) / self._share

    def set_share(self, share: float) -> None:
        """See :class:`~orchestrator.sim.coserving.serving_engine.RolloutTenant`."""
        if share == self._share:
            return
        self._spent, self._wall = self._clock(), asyncio.get_running_loop().time()
        self._share = share
        if self._leap is not None:
            self._leap.cancel()
            self._arm()
        self._watch_progress()

    def _watch_progress(self) -> None:
        """Note who stands from now on; look again when the first of them may have stalled."""
        loop = asyncio.get_running_loop()
        self._watch.note(loop.time(), self._standing())
        if self._look is None and (due := self._watch.due) < math.inf:
            self._look = loop.call_at(due, self._looked)

    def _looked(self) -> None:
        """What stood for too long goes on elsewhere."""
        self._look = None
        if self._dead:
            return
        names = self._watch.stalled(asyncio.get_running_loop().time(), self._standing())
        self._hand_back(names)
        if names and self._leap is None and not self._suspended:
            self._begin_leap()  # what came meanwhile
        self._watch_progress()

    def _standing(self) -> dict[str, float]:
        """Requests of which nothing is computed, with their tokens: all where serving has the device, else those that wait."""
        if self._suspended:
            return {}
        stands = self._share <= NEVER and self._leap is not None
        found = self._unfinished() if stands else self._batch.waiting()
        return {one.request.request_id: one.made for one in found if not one.done}

    def demand(self) -> RolloutDemand | None:
        """See :class:`~orchestrator.sim.coserving.serving_engine.RolloutTenant`."""
        if self._leap is None:
            return None
        prefill = max(0.0, self._leap_start - self._clock())
        chunk = self._chunk_seconds(CHUNK_TOKENS if self.engine is not None and self._greedy else CHUNK)
        chunks = math.ceil(prefill / chunk - _LITTLE) if prefill > _LITTLE else 0
        decode = seconds_of(self._leap_steps, self._leap_first, self._leap_growth)
        step = (prefill + decode) / (chunks + self._leap_steps * self._grain)
        return RolloutDemand(chunks * CHUNK, len(self._batch.running), step)

    @property
    def _greedy(self) -> bool:
        """Whether nobody cuts its prefills into chunks."""
        return self.engine is not None and self.engine.admission is not None and self.engine.admission.mode == "none"

    def _chunk_seconds(self, tokens: int) -> float:
        return max(_LITTLE, self._costs.prefill(max(1, tokens // self._grain), 0.0, 1))

    def residual_seconds(self) -> float:
        """See :class:`~orchestrator.sim.coserving.serving_engine.RolloutTenant`."""
        if self._leap is None:
            return 0.0
        now = self._clock()
        if now < self._leap_start:
            chunk = self._chunk_seconds(CHUNK_TOKENS if self._greedy else CHUNK)
            return (self._leap_start - now) % chunk
        step = self._leap_first / self._grain
        return step - (now - self._leap_start) % step

    # -- memory ------------------------------------------------------------------------------------------------------

    @property
    def pages(self) -> int:
        """See :class:`~orchestrator.sim.coserving.serving_engine.RolloutTenant`."""
        return math.ceil(self._batch.held * self._kv_bytes / PAGE)

    def set_room(self, pages: int) -> None:
        """See :class:`~orchestrator.sim.coserving.serving_engine.RolloutTenant`."""
        self._room = int(pages * PAGE / self._kv_bytes)
        self._batch.resize(self._room)
        if (excess := self._batch.context - self._room) > 0:
            self._batch.book_tokens()
            running = {name: (one.request.priority, one.context) for name, one in self._batch.running.items()}
            for name in displacement_order(running):
                if excess <= 0:
                    break
                excess -= running[name][1]
                self.handed_back += 1
                self._give_up(name)

    def _give_up(self, request_id: str) -> None:
        sequence = self._known.get(request_id)
        if sequence is None or sequence.done or sequence in self._aborting:
            return
        if self._leap is not None:
            self._aborting.append(sequence)
            self._shorten()
        else:
            self._finish(sequence, "abort")

    def _reset(self) -> None:
        super()._reset()
        self._since.clear()
        if self._room is not None:
            self._batch.resize(self._room)

    def _finish(self, sequence: Any, reason: str, error: str = "") -> None:
        super()._finish(sequence, reason, error)
        trajectory = sequence.request.trajectory_id
        if not self._lease:
            self._batch.drop(trajectory)
        if not 0 < self._lease < math.inf:
            return
        self._marks += 1
        mark = self._since[trajectory] = self._marks
        asyncio.get_running_loop().call_later(self._lease, self._expire, trajectory, mark)

    def _expire(self, trajectory: str, mark: int) -> None:
        if self._since.get(trajectory) == mark:
            del self._since[trajectory]
            self._batch.drop(trajectory)

    # -- progress ----------------------------------------------------------------------------------------------------

    def _begin_leap(self) -> None:
        super()._begin_leap()
        self._watch_progress()
        if self.engine is not None:
            self.engine.refresh()

    def _end_leap(self) -> None:
        super()._end_leap()
        if self._leap is None and self.engine is not None and not self._dead:
            self.engine.refresh()
        self._watch_progress()

    def hand_back(self) -> None:
        """Everything goes on elsewhere, with the tokens that are made."""
        self._hand_back([one.request.request_id for one in self._unfinished()])

    def _hand_back(self, names: Sequence[str]) -> None:
        """These do; who runs stands together, so that none that runs is left."""
        running = not self._batch.running.keys().isdisjoint(names)
        if running:
            self._break_leap()
        gone = dict.fromkeys([*names, *(one.request.request_id for one in self._aborting if running)])
        for sequence in [one for one in self._unfinished() if one.request.request_id in gone]:
            if not sequence.done:
                self.handed_back += 1
                self._finish(sequence, "abort")
        if running:
            self._aborting.clear()
            self._end_step()

    def _break_leap(self) -> None:
        """It ends here, with the steps that are over."""
        if self._leap is None:
            return
        self._leap.cancel()
        self._leap = None
        elapsed = self._clock() - self._leap_start
        done = steps_in(elapsed, self._leap_first, self._leap_growth) - 1 if elapsed > 0 else 0
        done = min(done, self._leap_steps - 1)
        if done > 0:
            self._batch.advance(done)
            self.busy_seconds += seconds_of(done, self._leap_first, self._leap_growth)

    # -- commands ----------------------------------------------------------------------------------------------------

    async def update(self, version: int) -> UpdateResult:
        """See the protocol. An RL step begins: the device may be another one, and budgets are anew."""
        engine = self.moved(version)
        if engine is not self.engine or not self._activated:
            self.move_to_engine(engine)
            self._activated = True
            self.recovering_seconds += self._activation
            await asyncio.sleep(self._activation)
        result = await super().update(version)
        if self.engine is not None:
            self.engine.begin_rl_step()
        return result

    def move_to_engine(self, engine: ServingEngine | None) -> None:
        """It is on the device of this serving engine from now on."""
        if self.engine is not None:
            self.engine.tenant = None
        self.engine = engine
        if engine is not None:
            engine.tenant = self
        else:
            self.set_share(1.0)

    async def stats(self) -> WorkerStats:
        """See the protocol. Its capacity is its budget."""
        found = await super().stats()
        if self._room is None:
            return found
        return replace(found, kv_capacity=self._room // self._engine.block_size)

    def lose_device(self) -> None:
        """Its device is taken from it; it was told just in time to hand back what it had."""
        self.present = False
        if not self._dead:
            self.hand_back()
            self._news.set()
            asyncio.get_running_loop().call_soon(self._gone)

    def _gone(self) -> None:
        if not self.present:
            self.die()
            self._left = self.lasts

    def release(self) -> None:
        """The run gives it back: deactivated, it waits on its device for whoever borrows it next."""
        if self.present:
            self.lose_device()
        self.move_to_engine(None)
        self._activated = False

    def gain_device(self) -> None:
        """There is a device for it."""
        self.present = True

    async def restart(self) -> None:
        """See the protocol: nobody is there while it has no device."""
        if not self.present:
            await asyncio.sleep(0)
            raise RetryableError(f"{self.name}: it has no device")
        usual = self._start_seconds
        self._start_seconds = 0.0 if self._left else usual
        self.recovering_seconds += self._start_seconds
        try:
            await super().restart()
        finally:
            self._start_seconds = usual

    def die(self) -> None:
        """See there."""
        if self._look is not None:
            self._look.cancel()
        self._look = None
        self._watch.clear()
        self._left = False
        super().die()
