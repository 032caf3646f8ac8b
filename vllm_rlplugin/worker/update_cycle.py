"""``UpdateCycle``: pause, prepare, update and resume of a served engine, as a state machine in front of vLLM's functions.

Two ways lead through it: ours (``suspend``, ``prepare``, ``update``, ``resume``) and the verbs of vLLM's own clients (pause,
start, update_weights, finish, resume); both see one state. Guarantees:

* Weights change only while the whole engine is paused, requests of serving users included.
* A refused call (CommandError) changed nothing. An update that failed before it touched the model (RetryableError) left
  the old weights, and RESUME goes on with them. One that failed later leaves the engine paused and ``weights_unusable``
  until another update succeeds.
* KV of older weights is never used again: the scheduler's ``advance_version`` comes before RESUME is possible.
* A caller that goes away does not stop an update half-way.
* Versions never decrease within a *history*, which is one epoch of one job on one relay. Connecting another one begins the
  next history, in which they count anew; it is refused while rollout requests are unfinished, so that no request sees two.
  Until its first update the version is -1: the weights are those of before.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from orchestrator.api import CommandError, ConfigError, RetryableError, UpdateResult
from orchestrator.transfer import RelayEndpoint
from vllm_rlplugin.weights.version_agreement import find_disagreement
from vllm_rlplugin.worker.live_engine import LiveEngine
from vllm_rlplugin.worker.version_history import NOTHING_LOADED, VersionHistory

POLL_SECONDS = 0.05  # between the first two looks at a version that is being fetched
POLL_GROWTH = 1.0625  # then ever longer, by a sixteenth: with several ranks each look waits for the steps in flight
PAUSE_MODES = ("abort", "wait", "keep")

_logger = logging.getLogger("vllm.rl_coserve")
Observe = Callable[[str, float], None]  # phase ("prepare", "fetch", "load", "kv"), seconds


class UpdateCycle:
    """See the module. ``relay``: whether the engine was told where the weight relay is."""

    def __init__(self, engine: LiveEngine, observe: Observe | None = None) -> None:
        self.version = 0
        self.label = ""  # vLLM's name of the version
        self.suspended = False
        self.unusable = ""  # why the weights cannot be used; empty: they can
        self.relay = False
        self.updates = 0  # that succeeded
        self.failures = 0
        self._engine = engine
        self._observe = observe or (lambda phase, seconds: None)
        self._changing: asyncio.Task[Any] | None = None  # the update that is under way
        self._wanted = -1  # the version of that update
        self._received: int | None = None  # by update_weights, not yet finished
        self._resumes = 0  # a pause that was overtaken by one does not hold
        self._labels: dict[str, int] = {}
        self.history = VersionHistory()
        self.loaded = (0, 0)  # history and version of the weights in the model, which are in the salts

    async def open(self, relay: Mapping[str, Any] | None) -> None:
        """Learn the engine's version, and connect it to the relay. Raises RetryableError when that fails."""
        self.label = await self._engine.guard_call(self._engine.client.get_weight_version())
        self.version = self.version_of_label(self.label)
        self._labels[self.label] = self.version
        self.loaded = (0, self.version)
        self.suspended = await self._engine.guard_call(self._engine.client.is_paused())
        if relay is not None:
            await self.connect({"endpoint": dict(relay)})

    def version_of_label(self, label: str) -> int:
        """The weight version that a label of vLLM stands for; a start label such as ``default`` is version 0."""
        return int(label) if label.isdecimal() else self._labels.get(label, 0)

    @property
    def changing(self) -> bool:
        """Whether an update, or another relay, is under way."""
        return self._changing is not None

    # Pause and resume.

    async def suspend(self) -> None:
        """Pause between two steps; in-flight requests keep tokens and KV. Idempotent."""
        if not self.suspended:
            await self.pause("keep", clear_cache=False)

    async def pause(self, mode: str, *, clear_cache: bool) -> None:
        """vLLM's own pause, in any of its modes."""
        if mode not in PAUSE_MODES:
            raise CommandError("invalid_request", f"mode {mode!r} is not one of {', '.join(PAUSE_MODES)}")
        resumes = self._resumes
        await self._engine.guard_call(self._engine.client.pause_generation(mode=mode, clear_cache=clear_cache))
        if resumes == self._resumes:
            self.suspended = True

    async def resume(self) -> None:
        """Go on, also after a pause that has not ended, or that failed: the engine stands still all the same. Idempotent. Raises
        CommandError while an update is under way or the weights cannot be used."""
        if self._changing is not None:
            raise CommandError("update_in_progress", "a weight update is under way; resume when it has ended")
        if self.unusable:
            raise CommandError("weights_unusable", f"{self.unusable}; update again, or restart the server")
        self._received = None
        self._resumes += 1
        await self._engine.guard_call(self._engine.client.resume_generation())
        self.suspended = False

    # Our update.

    async def connect(self, init_info: Mapping[str, Any], in_flight: Callable[[], int] = lambda: 0) -> None:
        """vLLM's ``init_weight_transfer_engine``. ``in_flight``: how many rollout requests are unfinished; none may be
        added until this returns. Raises RetryableError; refused (CommandError), the connection of before stays."""
        try:
            endpoint = RelayEndpoint.from_dict(init_info["endpoint"])
        except (ConfigError, KeyError, AttributeError, TypeError) as error:
            raise CommandError("invalid_request", f"init_info is {{'endpoint': a RelayEndpoint}}: {error}") from error
        next_history = await self.history.next_history(endpoint)
        if self._changing is not None:
            raise CommandError("update_in_progress", "a weight update is under way; connect when it has ended")
        if next_history.number != self.history.number and (unfinished := in_flight()):
            of = f"job {self.history.job}, epoch {self.history.epoch}" if self.history.job else "no relay"
            raise CommandError(
                "requests_in_flight",
                f"{unfinished} rollout requests are unfinished ({of}): wait for them or abort them, then connect",
            )
        told = {"endpoint": endpoint.to_dict()}
        self._wanted = -1
        await self._change(self._connect(told, next_history), self._ended)

    async def _connect(self, told: dict[str, Any], history: VersionHistory) -> None:
        await self._rpc_before_load("connecting to the weight relay", "init_weight_transfer_engine", init_info=told)
        self.relay = True
        if history.number != self.history.number and self.version != NOTHING_LOADED:
            label = f"{self.history.job or 'before'}:{self.label}"  # else "3" would be this history's version 3, too
            await self._engine.guard_call(self._engine.client.update_weight_version(label))
            self.version, self.label, self._labels = NOTHING_LOADED, label, {label: NOTHING_LOADED}
        self._received = None
        self.history = history

    async def disconnect(self) -> None:
        """vLLM's ``shutdown_weight_transfer_engine``: let go of the relay; weights, versions and history stay. Raises
        RetryableError inside a weight update that was started and not finished."""
        if self._changing is not None:
            raise CommandError("update_in_progress", "a weight update is under way; disconnect when it has ended")
        await self._change(self._disconnect(), self._ended)

    async def _disconnect(self) -> None:
        await self._rpc_before_load("leaving the weight relay", "shutdown_weight_transfer_engine")
        self.relay, self._received = False, None

    async def prepare(self, version: int) -> None:
        """Fetch and verify while requests go on. Raises RetryableError when the relay does not deliver it whole."""
        if self._changing is not None and version != self._wanted:
            raise CommandError("update_in_progress", f"prepare {version}: {self._wanted} is being loaded")
        self._check_version(version)
        began = asyncio.get_running_loop().time()
        await self._prepare(version)
        self._observe("prepare", asyncio.get_running_loop().time() - began)

    async def _prepare(self, version: int) -> None:
        what = f"preparing version {version}"
        await self._rpc_before_load(what, "rl_prepare", version)
        pause = POLL_SECONDS
        while True:
            answers = await self._rpc_before_load(what, "rl_prepared", version)
            states = [answer["state"] for answer in answers]
            if errors := [answer.get("error", "") for answer in answers if answer["state"] == "failed"]:
                raise RetryableError(f"{what}: {errors[0]}")
            if "none" in states:
                raise RetryableError(f"{what}: another version was asked for meanwhile")
            if states.count("ready") == len(states):
                return
            await asyncio.sleep(pause)
            pause *= POLL_GROWTH

    async def update(self, version: int) -> UpdateResult:
        """Load ``version``. See :class:`orchestrator.api.RolloutWorker` for what is raised."""
        self._check_paused("update")
        self._check_version(version)
        self._wanted = version
        result: UpdateResult = await self._change(self._update(version))
        return result

    async def _update(self, version: int) -> UpdateResult:
        began = asyncio.get_running_loop().time()
        await self._prepare(version)  # the engine goes on answering while it is fetched
        await self._open_session(f"update to version {version}", version)
        await self._receive(version)
        self._observe("fetch", asyncio.get_running_loop().time() - began)
        self._received = None
        reports, outcome = await self._apply(version, str(version))
        seconds = asyncio.get_running_loop().time() - began
        received = sum(int(report.get("bytes", 0)) for report in reports)
        past_cache = next((said for report in reports if (said := str(report.get("past_cache", "")))), "")
        return UpdateResult(version, received, seconds, int(outcome.get("preempted", 0)), past_cache)

    # The verbs of vLLM's own clients: the same steps, one call each.

    async def start_session(self) -> None:
        """``/start_weight_update``. An earlier session that was not finished is dropped."""
        self._check_paused("start a weight update")
        self._check_relay()
        self._received = None
        await self._change(self._open_session("starting a weight update"))

    async def receive_weights(self, update_info: Mapping[str, Any]) -> None:
        """``/update_weights`` with ``{"version": N}``: fetch, verify, stage."""
        self._check_paused("update weights")
        version = update_info.get("version")
        if not isinstance(version, int) or isinstance(version, bool) or update_info.keys() != {"version"}:
            raise CommandError("invalid_request", 'update_info is {"version": N} here, N an integer')
        self._check_version(version)
        self._wanted = version
        await self._change(self._receive(version))

    async def _receive(self, version: int) -> None:
        await self._rpc_before_load(f"update to version {version}", "update_weights", update_info={"version": version})
        self._received = version

    async def finish_session(self, label: str | None) -> None:
        """``/finish_weight_update``: load what was received, under vLLM's label for it (default: the number)."""
        self._check_paused("finish a weight update")
        version = self._received
        if version is None:
            raise CommandError("invalid_request", "no weights were received: call /update_weights before")
        if label is not None and label.isdecimal() and int(label) != version:
            raise CommandError("invalid_request", f"weight_version {label} is not {version}, which was received")
        self._received = None
        await self._change(self._apply(version, str(version) if label is None else label))

    async def set_label(self, label: str) -> None:
        """``/update_weight_version``: another label for the weights that are loaded. Tokens go by labels, so that one which
        stands for another version is refused, as is another version's number."""
        if self._changing is not None:
            raise CommandError("update_in_progress", "a weight update is under way; name the weights when it has ended")
        meant = int(label) if label.isdecimal() else self._labels.get(label, self.version)
        if meant != self.version:
            what = f"new_version {label!r} is version {meant}, and version {self.version} is loaded"
            raise CommandError("invalid_request", f"{what}: give its number, or a label that was not used before")
        await self._engine.guard_call(self._engine.client.update_weight_version(label))
        self.label, self._labels[label] = label, self.version

    async def weight_checksums(self) -> dict[str, str]:
        """``/weight_checker``: vLLM's own checksums of the tensors in the model, of all ranks. The engine computes no step
        meanwhile."""
        if self._changing is not None:
            raise CommandError("update_in_progress", "a weight update is under way; look when it has ended")
        ranks: list[dict[str, str]] = await self._engine.rpc("compute_weight_checksums")
        return {name: found for rank in ranks for name, found in rank.items()}

    # The steps.

    async def _rpc_before_load(self, what: str, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """A call that does not touch the model: whatever it raises, the old weights are intact."""
        try:
            return await self._engine.rpc(method, *args, **kwargs)
        except RetryableError:
            raise
        except Exception as error:  # vLLM passes on the text of any exception as a bare Exception
            raise RetryableError(f"{what}: {_text(error)}") from error

    async def _open_session(self, what: str, version: int | None = None) -> None:
        """vLLM's ``start_weight_update``. Raises RetryableError."""
        await self._check_kv(what, version)
        await self._rpc_before_load(what, "rl_drop_session")  # of a client that died, or that resumed instead
        await self._rpc_before_load(what, "start_weight_update")

    async def _check_kv(self, what: str, version: int | None) -> None:
        """Raises RetryableError where old KV could not be shut out after an update (None: to a version that is not known yet):
        found then, the engine would have to stand still, and what it waits for with it."""
        wanted = {} if version is None else {"version": version, "history": self.history.number}
        if why := (await self._engine.command("may_update", wanted)).get("refused"):
            raise RetryableError(f"{what}: {why}: resume, and try again")

    async def _apply(self, version: int, label: str) -> tuple[list[Any], dict[str, Any]]:
        """Load what was received; then shut out old KV, and tell vLLM the version."""
        await self._check_kv(
            f"update to version {version}", version
        )  # a request may have ended since the session was opened
        clock = asyncio.get_running_loop().time
        began, before = clock(), self.unusable
        self.unusable = f"the update to version {version} has not ended well"
        try:
            await self._engine.command("loading", {})
            refusal, reports = await self._load(version)
            if refusal is not None:
                self.unusable = before
                raise RetryableError(f"update to version {version}: {refusal}")
            loaded = clock()
            present = {"version": version, "history": self.history.number}
            outcome = await self._engine.command("advance_version", present)
            await self._engine.guard_call(self._engine.client.update_weight_version(label))
        except RetryableError:
            raise  # refused before the model was touched, or the engine died
        except Exception as error:
            self.unusable = f"the update to version {version} failed while it was applied: {_text(error)}"
            _logger.exception("%s", self.unusable)
            raise CommandError("weights_unusable", self.unusable) from error
        self._observe("load", loaded - began)
        self._observe("kv", clock() - loaded)
        if not label.isdecimal():
            self._labels[label] = version
        self.unusable, self.version, self.label = "", version, label
        self.loaded = (self.history.number, version)
        self.updates += 1
        return reports, outcome

    async def _load(self, version: int) -> tuple[str | None, list[Any]]:
        """Write what was received into the model. (Why it was refused with nothing touched, or None; the ranks' reports.)

        Raises when the weights are in no defined state, or are not those of ``version`` on every rank.
        """
        try:
            await self._engine.rpc("finish_weight_update")
        except RetryableError:
            raise
        except Exception as error:
            reports = await self._engine.rpc("rl_report")
            if any(report["damaged"] for report in reports):
                raise
            return _text(error), reports
        reports = await self._engine.rpc("rl_report")
        if wrong := [report for report in reports if report["version"] != version]:
            raise RuntimeError(f"rank {wrong[0]['rank']} has version {wrong[0]['version']}: {wrong[0]['error']}")
        if disagreement := find_disagreement(reports):
            raise RuntimeError(disagreement)
        return None, reports

    async def _change(
        self, steps: Coroutine[Any, Any, Any], ended: Callable[[asyncio.Task[Any]], object] | None = None
    ) -> Any:
        """Run steps of an update, one caller at a time, to their end even if the caller is cancelled."""
        task = self._changing = asyncio.ensure_future(steps)
        task.add_done_callback(ended or self._changed)
        return await asyncio.shield(task)

    def _changed(self, task: asyncio.Task[Any]) -> None:
        self.failures += not self._ended(task)

    def _ended(self, task: asyncio.Task[Any]) -> bool:
        """Whether it succeeded."""
        self._changing = None
        return not task.cancelled() and task.exception() is None  # looked at: the caller may have gone

    def _check_paused(self, what: str) -> None:
        if not self.suspended:
            raise CommandError("not_suspended", f"{what}: suspend (or pause) first")
        if self._changing is not None:
            raise CommandError("update_in_progress", f"{what}: a weight update is under way")

    def _check_relay(self) -> None:
        if not self.relay:
            raise CommandError("no_relay", "this server was not told where the weight relay is (--rl-relay)")

    def _check_version(self, version: int) -> None:
        self._check_relay()
        # The same version may be loaded again: after a rollback of the run its number may stand for other weights.
        if version < self.version:
            raise CommandError(
                "version_decreases", f"weight versions never decrease: {version} asked for, {self.version} is loaded"
            )


def _text(error: BaseException) -> str:
    """What an exception says; vLLM puts "Call to <method> method failed: " in front, which names only our own call."""
    text = str(error)
    head, mark, rest = text.partition(" method failed: ")
    return rest if mark and head.startswith("Call to ") and rest else text or type(error).__name__
