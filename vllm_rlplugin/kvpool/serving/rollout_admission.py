"""The rollout side of time: no step without an admission that names its size (ROSE 4.1, dual-SLO admission).

Guarantees: beside a serving engine a step computes at most what
:class:`orchestrator.policies.serving.admission.Admission` admits from what that engine published last, one step at a
time; what is not admitted is an empty step to stock. A serving engine that is there and has said nothing admits
nothing; where there is none, everything runs. In a dry run nothing is computed, only counted.

Requests that make no progress here (:class:`orchestrator.policies.serving.progress_watch.ProgressWatch`), running or waiting, and
those whose pages were taken, are handed back: they end as aborted, with the tokens that they have, so that their owner goes on
with them elsewhere.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from orchestrator.policies.parallelism.engine_profile import LearnedCosts, StepCosts
from orchestrator.policies.serving.admission import CHUNK, Admission, AdmittedWork
from orchestrator.policies.serving.progress_watch import ProgressWatch
from vllm_rlplugin.kvpool.ledger.page_ledger import LedgerStuck, PagePool
from vllm_rlplugin.kvpool.ledger.tenant_words import ControlWord, RolloutWords, ServingWords
from vllm_rlplugin.kvpool.serving.step_parts import QueueHead, StepParts, left_of

_COUNTS = ("firsts", "late_first", "blamed_first", "nexts", "late_next", "blamed_next")
_FIND_SECONDS = 0.25  # between two looks for the serving tenant
_STALL_LOOK = 0.5  # and at who made progress
_LEAST_PAUSE, _LONGEST_PAUSE = 0.001, 0.01  # seconds that a refused step waits
_ASLEEP = 1.0  # seconds without a look: the engine was idle or paused, and nothing was stalled


class RolloutAdmission:
    """Of one rollout engine's stock scheduler, in its thread. ``minimum``: pages that it never gives back."""

    def __init__(
        self,
        scheduler: Any,
        pool: PagePool,
        costs: StepCosts,
        minimum: int,
        *,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._scheduler, self._pool, self._costs = scheduler, pool, costs
        self._minimum, self._now, self._sleep = minimum, now, sleep
        self._learned = costs if isinstance(costs, LearnedCosts) else None
        self._admission = Admission(costs.prefill, costs.decode, trials=self._learned is not None)
        self._serving = -1  # its slot
        self._read: bytes | None = None  # what was read there last
        self._said: ServingWords | None = None  # and what it means
        self._found = -math.inf  # when it was looked for
        self.parts = StepParts(scheduler.requests.get)
        self._head = QueueHead(scheduler, lambda request: max(1, request.num_tokens - request.num_computed_tokens))
        self._flights: list[tuple[int, int]] = []  # (tokens of prefill, sequences) of the steps under way
        self._begun = 0.0
        self._granted = math.inf  # seconds that the latest step was admitted for
        self._pretends = 0.0  # until when a step of a dry run counts as running
        self._before: ServingWords | None = None  # what serving said when the step began
        self._busy = 0.0
        self._counts = dict.fromkeys(("steps", "tokens", "would", "refused", "stalls", "returned", "misses"), 0)
        self._watch = ProgressWatch()
        self._looked = -math.inf
        self._inactive, self._weights, self._activation = False, 0, 0.0
        self._dry = self._is_dry_run()  # at the latest step
        self.reason = ""  # why the last step was refused; "" if it was not
        self._publish()

    # -- before a step -----------------------------------------------------------------------------------------------

    def schedule(self, stock: Callable[..., Any], throttle: bool) -> Any:
        """Stock's step, cut to what is admitted."""
        now = self._now()
        self._dry = self._is_dry_run()
        serving = self._serving_words(now)
        free = self._is_unlimited(serving)
        if self._flights and not free:
            return self._schedule_limited(stock, 0, throttle)  # async scheduling: one step at a time
        self._before = serving
        if free:
            output = stock(throttle)
        else:
            admitted = self._admit(serving, now)
            size = admitted.tokens + admitted.decode * (1 + self._scheduler.num_spec_tokens)
            output = self._schedule_limited(stock, size, throttle or not admitted.tokens)
            if not size:
                self._refuse_step(serving, now)
            elif not admitted.tokens:
                self._let_others_decode_first(output.num_scheduled_tokens)
        if output.total_num_scheduled_tokens:
            self._note_scheduled(output)
        return output

    def _is_unlimited(self, serving: ServingWords | None) -> bool:
        """Whether there is nobody to consider."""
        return self._serving < 0 or (serving is not None and serving.mode == "none")

    def _admit(self, serving: ServingWords | None, now: float) -> AdmittedWork:
        dry = self._dry
        if serving is None:
            found = AdmittedWork(reason="serving has not said anything yet")
        elif dry and now < self._pretends:
            found = AdmittedWork(reason="a step of the dry run")
        else:
            self._admission.mode = serving.mode
            found = self._admission.admit(serving.state, now, *self._pending_work())
            self._granted = found.seconds or self._granted
        self.reason = found.reason
        if dry and (size := found.tokens + found.decode):
            self._counts["would"] += size
            self._pretends = now + found.seconds
            self.reason = "a dry run"
            return AdmittedWork(reason=self.reason)
        if found.trial and self._learned is not None:
            self._learned.forget(found.decode > 0)
        return found

    def _is_dry_run(self) -> bool:
        return bool(self._pool.controls()[ControlWord.DRY])

    def _pending_work(self) -> tuple[int, int]:
        """Tokens to prefill, at least a chunk of them if there are so many, and sequences that decode."""
        scheduler = self._scheduler
        prefilling = self.parts.running()
        tokens, decoding = sum(map(left_of, prefilling)), len(scheduler.running) - len(prefilling)
        if tokens < CHUNK:
            tokens += sum(self._head.read(CHUNK, scheduler.max_num_running_reqs - len(scheduler.running)))
        return tokens, decoding

    def _schedule_limited(self, stock: Callable[..., Any], tokens: int, throttle: bool) -> Any:
        """``throttle``: stock defers prefills, as it does to balance data-parallel engines."""
        scheduler = self._scheduler
        most, bound = scheduler.max_num_scheduled_tokens, scheduler.prefill_capacity_bound
        scheduler.max_num_scheduled_tokens = min(most, tokens)
        scheduler.prefill_capacity_bound = False
        try:
            return stock(throttle)
        finally:
            scheduler.max_num_scheduled_tokens = most
            scheduler.prefill_capacity_bound = bound

    def _let_others_decode_first(self, decoded: Mapping[str, int]) -> None:
        """Stock begins at the head of ``running``: where not all may decode it would be the same ones each time."""
        prefilling, running = self.parts.prefilling, self._scheduler.running
        if len(decoded) < len(running):
            running.sort(key=lambda request: request.request_id in decoded or request.request_id in prefilling)

    def _refuse_step(self, serving: ServingWords | None, now: float) -> None:
        self._counts["refused"] += 1
        if self._counts["refused"] % 64 == 1:
            self._publish()
        pause = _LEAST_PAUSE if serving is None else serving.state.step_end - now
        self._sleep(min(_LONGEST_PAUSE, max(_LEAST_PAUSE, pause)))

    def _note_scheduled(self, output: Any) -> None:
        tokens, batch, _ = self.parts.note(output)
        if not self._flights:
            self._begun = self._now()
        self._flights.append((tokens, batch))
        self._publish()

    # -- after a step ------------------------------------------------------------------------------------------------

    def step_ended(self, output: Any) -> None:
        """The output of a step is there."""
        if not output.total_num_scheduled_tokens or not self._flights:
            return
        now, (tokens, batch) = self._now(), self._flights.pop(0)
        seconds, self._begun = now - self._begun, now
        self._busy += seconds
        self._counts["steps"] += 1
        self._counts["tokens"] += tokens + batch
        after, before = self._serving_words(now), self._before
        shared = any(found is not None and found.state.busy for found in (before, after))
        self._costs.observe_step(tokens, batch, seconds, shared)
        if after is not None and before is not None and after.state.tick > before.state.tick and after.state.busy:
            least = self._admission.considered_slack(after.state)
            if least > -math.inf:
                self._counts["misses"] += least < 0
                self._admission.record_step(least, seconds > self._granted)
        self._publish()

    def requests_to_hand_back(self, displaced: set[str]) -> list[str]:
        """Names of the requests that go on elsewhere: ``displaced``, and those that stalled."""
        now = self._now()
        if now - self._looked < _STALL_LOOK and not displaced:
            return []
        if now - self._looked > _ASLEEP:
            self._watch.clear()
        self._looked = now
        requests = self._scheduler.requests
        names = [name for name in displaced if name in requests]
        if not self._alone():
            computed = {name: request.num_computed_tokens for name, request in requests.items()}
            stalled = [name for name in self._watch.stalled(now, computed) if name not in displaced]
            stalled = [name for name in stalled if not requests[name].is_finished()]
            names += stalled
            self._counts["stalls"] += len(stalled)
        self._counts["returned"] += len(names)
        if names:
            self._publish()
        return names

    def _alone(self) -> bool:
        return self._serving < 0

    # -- the other side ----------------------------------------------------------------------------------------------

    def _serving_words(self, now: float) -> ServingWords | None:
        """What the serving tenant published last; None: nothing, or there is none."""
        if now - self._found >= _FIND_SECONDS:
            self._found = now
            with contextlib.suppress(LedgerStuck):  # then it is looked for again later
                self._pool.reap()  # it may have died
                serving = self._pool.view().serving
                self._serving = -1 if serving is None else serving.slot
        if self._serving < 0:
            return None
        words = self._pool.read(self._serving)
        if words != self._read:
            self._read, self._said = words, ServingWords.unpack(words)
        return self._said

    def set_active(self, active: bool) -> None:
        """Whether it is; the serving engine reckons with one that is, and with what it needs at least."""
        self._inactive = not active
        self._publish()

    def note_weights(self, weights: int, activation: float | None) -> None:
        """Bytes of the weights that are in memory; what the last activation took, None: as before."""
        self._weights = weights
        self._activation = self._activation if activation is None else activation
        self._publish()

    def note_loading(self) -> None:
        """Weights are put into the model from now on, until anything else is said of this engine."""
        self._pool.publish(replace(self._words(), loading=True, running=False, begun=self._now()).pack())

    def note_loaded(self) -> None:
        """It gives pages back again."""
        self._publish()

    def _publish(self) -> None:
        self._pool.publish(self._words().pack())

    def words(self) -> RolloutWords:
        """What is published, with what people ask for now."""
        self._dry = self._is_dry_run()
        return self._words()

    def _words(self) -> RolloutWords:
        return RolloutWords(
            bool(self._flights),
            self._dry,
            self._begun,
            self._busy,
            self._admission.guard,
            0 if self._inactive else self._minimum,
            *self._counts.values(),  # in their order
            inactive=self._inactive,
            weights=self._weights,
            activation=self._activation,
        )


def device_status(pool: PagePool, slot: int) -> dict[str, Any] | None:
    """What the rollout tenant in ``slot`` may have of its device, and how its serving neighbour is; None: it has gone.

    A look at the pool, under a millisecond, that changes nothing; as the serving engine said last: one that hangs says nothing
    new. Plain data with the fields of :class:`orchestrator.api.SharedDevice`: finite, or None."""
    view = pool.view()
    mine = next((tenant for tenant in view.tenants if tenant.slot == slot), None)
    if mine is None:
        return None
    found: dict[str, Any] = {"pages": mine.used, "budget": mine.budget, "page_bytes": view.page_bytes}
    found |= {"serving_pages": view.serving.used if view.serving is not None else 0, "pool_pages": pool.pages}
    said = ServingWords.unpack(pool.read(view.serving.slot)) if view.serving is not None else None
    if said is None:
        return found
    state = said.state
    slacks = {"ttft_slack": state.ttft_slack, "tpot_slack": state.tpot_slack, "arriving": state.arriving}
    found |= {name: value if math.isfinite(value) else None for name, value in slacks.items()}
    return found | {name: getattr(said, name) for name in _COUNTS}
