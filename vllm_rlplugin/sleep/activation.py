"""Whether a rollout engine of a pool is active (ROSE 4.1: several rollout models are there, one runs), and how it changes.

Deactivated, it has no page of the pool and no weights in memory (:mod:`vllm_rlplugin.sleep.host_offload`); its server
goes on answering.

Guarantees:

* Only an idle engine is deactivated: no request of anybody, not paused, no update under way. Serving engines never are.
* Every use activates it: a command of a run that needs the engine, before it is carried out; a request of a user, a moment later,
  which waits meanwhile. Looking at it (status, metrics, completions) is no use.
* It computes with the weights of before, compared by digest; else with none: not kept, or not what they were, they are
  ``weights_unusable`` until an update succeeds.
* Activation that fails for lack of pages, or of room for the weights on a device, leaves it as it was (RetryableError).

One instance a front end, in its event loop. Times are of that loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Literal

from orchestrator.api import CommandError, RetryableError
from vllm_rlplugin.worker.live_engine import LiveEngine
from vllm_rlplugin.worker.served_worker import ServedWorker

State = Literal["active", "deactivating", "inactive", "activating"]
WATCH_SECONDS = 0.1  # between two looks for users' requests, and at the time without any use

_logger = logging.getLogger("vllm.rl_coserve")


class Activation:
    """See the module. ``rollout``: it is a rollout engine of a pool. ``after``: seconds without any use after which it
    deactivates itself; 0: never."""

    def __init__(self, worker: ServedWorker, engine: LiveEngine, *, rollout: bool, after: float) -> None:
        self.state: State = "active"
        self.last: dict[str, Any] = {}  # what the last change was like: bytes, seconds
        self._worker, self._engine = worker, engine
        self._rollout, self._after = rollout, after
        self._kept = True
        self._lock = asyncio.Lock()
        self._uses = 0  # under way
        self._used = time.monotonic()

    @asynccontextmanager
    async def use_worker(self) -> AsyncIterator[ServedWorker]:
        """The worker, active, and not deactivated meanwhile. Raises RetryableError, CommandError."""
        self._uses += 1
        try:
            if self.state != "active":
                await self.activate()
            yield self._worker
        finally:
            self._uses -= 1
            self._used = time.monotonic()

    async def deactivate(self, kept: bool = True) -> dict[str, Any]:
        """``kept``: with the weights somewhere, else an update must follow. Idempotent. Raises CommandError where it may not."""
        return await _run_to_end(self._deactivate(kept))

    async def activate(self) -> dict[str, Any]:
        """Idempotent. See the module for what is raised."""
        return await _run_to_end(self._activate())

    async def watch(self) -> None:
        """For ever: users' requests, and time without use; ends when the engine has died."""
        while not self._engine.dead:
            await asyncio.sleep(WATCH_SECONDS)
            now = time.monotonic()
            if self._worker.busy:
                self._used = now
            try:
                if self.state == "inactive" and self._worker.busy:
                    await self.activate()
                elif (
                    self.state == "active" and self._after and now - self._used >= self._after and not self._obstacle()
                ):
                    await self.deactivate()
            except Exception as error:  # noqa: BLE001  whatever was raised in the engine's process comes as a bare Exception
                _logger.warning("the engine could not change between active and inactive: %r", error)
                await asyncio.sleep(1.0)

    def status(self) -> dict[str, Any]:
        """For the status: JSON."""
        return {"state": self.state, **self.last}

    # -- how ---------------------------------------------------------------------------------------------------------

    def _obstacle(self) -> str:
        """Why it may not be deactivated now."""
        if not self._rollout:
            return "only a pool's rollout engine can be (--rl-kv-pool, --rl-kv-pool-role rollout)"
        if self._worker.busy:
            return "it has unfinished requests: wait for them, or abort them"
        busy = self._worker.cycle.suspended or self._worker.cycle.changing
        if self._uses:
            return "a command is under way"
        return "it is suspended, or an update is under way: resume first" if busy else ""

    async def _deactivate(self, kept: bool) -> dict[str, Any]:
        async with self._lock:
            if self.state == "inactive":
                return self.status()
            if mistake := self._obstacle():
                raise CommandError(
                    "requests_in_flight" if self._rollout else "invalid_request", f"deactivate: {mistake}"
                )
            began, cycle = time.monotonic(), self._worker.cycle
            self.state = "deactivating"
            try:
                await cycle.suspend()
                found = await self._engine.command("deactivate", {})
                if why := found.get("refused"):  # a user's request came in between
                    raise CommandError("requests_in_flight", f"deactivate: {why}")
                self._kept = kept
                reports = await self._engine.rpc("rl_weights_away", kept)
            except Exception as error:
                await self._stay_active()
                if isinstance(error, CommandError | RetryableError):
                    raise
                raise RetryableError(f"the engine could not be deactivated: {error}") from error
            size, left, freed = (sum(int(report[name]) for report in reports) for name in ("bytes", "left", "freed"))
            await self._engine.command("weights_held", {"weights": left})
            self.state = "inactive"
            self.last = {"weights_bytes": size, "held_bytes": left, "freed_bytes": freed, "how": str(reports[0]["how"])}
            self.last |= dict(reports[0]["memory"])
            self.last["deactivation_seconds"] = time.monotonic() - began
            _logger.info("deactivated in %.3f s: %s", self.last["deactivation_seconds"], self.last["how"])
            return self.status()

    async def _stay_active(self) -> None:
        """After a deactivation that failed, wherever it did."""
        self.state = "active"
        if not self._engine.dead:
            back = await self._restore_weights()
            if back["no_room"]:  # others took it at once: it is as inactive as if it had not failed
                self.state = "inactive"
                return
            await self._engine.command("activate", {})
            if why := back["error"] or back["damage"]:
                self._worker.cycle.unusable = why
            else:
                await self._worker.cycle.resume()

    async def _restore_weights(self) -> dict[str, str]:
        """What is wrong with them: see :func:`vllm_rlplugin.sleep.host_offload.restore_weights`."""
        reports = await self._engine.rpc("rl_weights_back")
        names = ("error", "no_room", "damage")
        return {name: next((str(report[name]) for report in reports if report[name]), "") for name in names}

    async def _activate(self) -> dict[str, Any]:
        async with self._lock:
            if self.state == "active":
                return self.status()
            began, cycle = time.monotonic(), self._worker.cycle
            self.state = "activating"
            try:
                found = await self._engine.command("activate", {})
                if why := found.get("refused"):
                    raise RetryableError(f"the engine cannot be activated now: {why}")
                back = await self._restore_weights()
                if why := back["no_room"]:
                    await self._engine.command("deactivate", {"stepped": False})
                    raise RetryableError(f"the engine cannot be activated now: {why}")
            except BaseException:
                self.state = "inactive"
                raise
            self.state = "active"
            self._used = time.monotonic()
            seconds = self._used - began
            size = self.last.get("weights_bytes", 0)
            self.last = {"weights_bytes": size, "held_bytes": size, "activation_seconds": seconds}
            noted = {"weights": size, "activation": seconds}
            await self._engine.command("weights_held", noted)
            if error := back["error"]:
                cycle.unusable = error
                raise CommandError("weights_unusable", error)
            if self._kept:
                await cycle.resume()
            else:
                cycle.unusable = "the weights were not kept when the engine was deactivated"
            _logger.info("activated in %.3f s", seconds)
            return self.status()


async def _run_to_end(steps: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
    """To the end, whatever becomes of the caller."""
    return await asyncio.shield(asyncio.ensure_future(steps))
