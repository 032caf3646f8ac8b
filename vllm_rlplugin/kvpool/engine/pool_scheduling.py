"""What a scheduler does about its engine's pages and time on the device, around each step.

Guarantees: a rollout engine that owns more than its budget gives back at once what nobody references, then takes the pages of
requests, in the order of :func:`~orchestrator.policies.serving.kv_sharing.displacement_order`, until it complies; these, and
those that stalled, end as aborted with the tokens they have, so that their owner goes on elsewhere (reported once each). A
serving engine never preempts for others. No acquire waits for anybody. Pages are dropped only when no step is under way that
may use them, counted by outputs.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any, cast

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.request import RequestStatus

from orchestrator.api import ConfigError
from orchestrator.policies.serving.admission import Mode, Slo
from orchestrator.policies.serving.kv_sharing import SharingRules, displacement_order
from vllm_rlplugin.kvpool.engine.parked_blocks import ParkedBlocks
from vllm_rlplugin.kvpool.engine.pool_engine import PATIENCE, SchedulerPool, current_pool
from vllm_rlplugin.kvpool.engine.step_costs import load_costs
from vllm_rlplugin.kvpool.ledger.tenant_words import ControlWord
from vllm_rlplugin.kvpool.serving.guardian import Guardian
from vllm_rlplugin.kvpool.serving.rollout_admission import RolloutAdmission, device_status
from vllm_rlplugin.kvpool.serving.serving_slack import Phase, ServingMeter
from vllm_rlplugin.kvpool.serving.step_parts import QueueHead, left_of
from vllm_rlplugin.options import PluginOptions
from vllm_rlplugin.patches.register import REGISTER

POOL_COMMANDS = ("page_pool", "deactivate", "activate", "weights_held", "loading")
_AHEAD = 8  # steps
_PHASES: dict[str, Phase] = {"kv_producer": "prefill", "kv_consumer": "decode"}  # vLLM's disaggregated roles


def phase_of(config: Any) -> Phase:
    """What an engine serves, of its ``VllmConfig``: a KV producer's prompts, a consumer's later tokens, else both (ROSE 6)."""
    return _PHASES.get(str(getattr(config.kv_transfer_config, "kv_role", "")), "both")


class PoolScheduler:
    """Of one stock scheduler, in its thread. A serving engine has ``guardian`` and ``meter``, a rollout engine ``admission``."""

    def __init__(
        self,
        scheduler: Any,
        pool: SchedulerPool,
        keep: float,
        guardian: Guardian | None = None,
        meter: ServingMeter | None = None,
        admission: RolloutAdmission | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._pool = pool
        self._pages_a_group = pool.geometry.pages_a_group
        manager = scheduler.kv_cache_manager
        self._parked = ParkedBlocks(
            manager.block_pool,
            pool.geometry,
            pool,
            backed=[0],
            now=time.monotonic,
            keep=keep,
            after=int(scheduler.num_lookahead_tokens > 0),  # what a drafter writes comes after its step's output
        )
        self._block_tokens = [group.block_size for group in manager.coordinator.single_type_managers]
        growth = 1 + 2 * int(scheduler.num_lookahead_tokens)  # tokens of a step, and drafts that it wrote before
        self._decode_blocks = sum(-(-growth // size) + 1 for size in self._block_tokens)  # one pool for all KV groups
        self._partition = 0.0
        self._allowed: int | None = None  # groups, in the latest step
        self._guardian, self._meter, self._admission = guardian, meter, admission
        self._parts = meter.parts if meter is not None else admission.parts if admission is not None else None
        self._head = QueueHead(scheduler, lambda request: int(request.num_tokens))
        self._head_blocks: tuple[list[int], int] = ([], 0)  # what was read of the queue, and blocks for it
        self._displaced: set[str] = set()  # to be handed back
        self.displaced = 0  # requests whose pages were taken for the budget's sake
        if guardian is not None and meter is not None:
            guardian.watch(meter.publish_idle)

    @classmethod
    def for_scheduler(cls, scheduler: Any, options: PluginOptions) -> PoolScheduler | None:
        """None where the KV cache is vLLM's own."""
        if not options.kv_pool:
            return None
        pool = current_pool()
        if pool is None:
            raise RuntimeError(
                "kv_pool is set, but the KV cache is not in the pool: scheduler and worker are in two processes"
            )
        pool.begin_allocating()
        config = scheduler.vllm_config
        if pool.role != "serving":
            if not config.scheduler_config.enable_chunked_prefill:
                fix = "a rollout engine in a pool computes prompts in chunks: drop --no-enable-chunked-prefill"
                raise ConfigError("--enable-chunked-prefill", False, fix)
            minimum = pool.geometry.pages_a_group
            admission = RolloutAdmission(scheduler, pool.pool, load_costs(config, options, unknown=0.02), minimum)
            return cls(scheduler, pool, options.kv_pool_keep, admission=admission)
        shares = options.kv_pool_headroom, options.kv_pool_watermark, options.kv_pool_lent
        guardian = Guardian(pool.pool, SharingRules(pool.pool.pages, *shares), time.monotonic, options.kv_pool_window)
        slo = Slo(options.kv_pool_ttft, options.kv_pool_tpot)
        meter = ServingMeter(
            pool.pool,
            load_costs(config, options, unknown=math.inf, slo=slo),
            slo,
            cast(Mode, options.kv_pool_admission),
            phase=phase_of(config),
            most=scheduler.max_num_scheduled_tokens,
            rollouts=lambda: guardian.rollouts,
        )
        return cls(scheduler, pool, options.kv_pool_keep, guardian, meter)

    def request_added(self, request: Any) -> None:
        """A request was added."""
        if self._meter is not None:
            self._meter.request_added(request)

    def request_gone(self, request: Any) -> None:
        """It has finished, or was aborted."""
        if self._meter is not None:
            self._meter.request_gone(request.request_id)

    def schedule(self, stock: Callable[..., Any], throttle: bool = False) -> Any:
        """One step of stock's scheduler, with its pages and its time."""
        self.before_step()
        output = stock(throttle) if self._admission is None else self._admission.schedule(stock, throttle)
        self._parked.note_scheduled()
        if self._meter is not None:
            self._meter.step_scheduled(output)
        return output

    def step_ended(self, output: Any, answers: dict[int, Any]) -> None:
        """Stock has taken a step's output; ``answers``: what it tells the clients, by their index."""
        self._parked.note_ended()
        if self._meter is not None:
            self._meter.step_ended()
        if self._admission is not None:
            self._admission.step_ended(output)
            names = self._admission.requests_to_hand_back(self._displaced)
            self._displaced.clear()
            if names:
                self._hand_back(names, answers)

    def begin_rl_step(self) -> None:
        """An RL step begins: of a rollout engine, which got the weights of it. The serving engine opens the budgets anew."""
        if self._admission is not None:
            self._admission.note_loaded()
            self._pool.pool.control(ControlWord.STEPS, 1, add=True)

    def command(self, command: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """One of POOL_COMMANDS: see the methods."""
        does: tuple[Callable[..., dict[str, Any]], ...] = (
            self.check_pages,
            self.deactivate,
            self.activate,
            self.note_weights,
            self.note_loading,
        )
        return dict(zip(POOL_COMMANDS, does, strict=True))[command](**arguments)

    def deactivate(self, stepped: bool = True) -> dict[str, Any]:
        """Of a rollout engine that is paused: every page goes back, no KV is kept. {"pages"}, or {"refused": why}. Not
        ``stepped``: since it was activated, so that requests which wait have nothing yet, and stay."""
        if self._admission is None:
            return {"refused": "a serving engine is not deactivated"}
        if stepped and self._scheduler.requests:
            return {"refused": f"it has {len(self._scheduler.requests)} requests"}
        if self._parked.steps_in_flight:  # with async scheduling the last request ends before the last batch
            return {"refused": "its last batch is in flight"}
        if not self._parked.asleep:
            if not self._scheduler.reset_prefix_cache():
                return {"refused": "its prefix cache is in use"}
            self._parked.sleep()
        self._admission.set_active(False)
        return {"pages": 0}

    def activate(self) -> dict[str, Any]:
        """The other way: the pages that it needs at least. {"pages"}, or {"refused": why} and it is as before. Waits a moment:
        the serving engine may have to see that this one is to be reckoned with again."""
        if self._admission is None:
            return {"refused": "a serving engine is always active"}
        self._admission.set_active(True)
        deadline = time.monotonic() + PATIENCE
        while not self._parked.wake():
            if time.monotonic() >= deadline:
                self._admission.set_active(False)
                view = self._pool.pool.view()
                return {"refused": f"no pages for its first blocks ({view.free} free, {view.headroom} for serving)"}
            time.sleep(0.005)
        return {"pages": self._pool.geometry.pages_a_group}

    def note_weights(self, weights: int, activation: float | None = None) -> dict[str, Any]:
        """Said of this engine in the pool: bytes of its weights in memory, seconds that its activation took."""
        if self._admission is not None:
            self._admission.note_weights(weights, activation)
        return {}

    def note_loading(self) -> dict[str, Any]:
        """A weight update begins: this thread gives nothing back until it has ended, and is not to be killed for that."""
        if self._admission is not None:
            self._admission.note_loading()
        return {}

    def device_status(self) -> dict[str, Any] | None:
        """What a rollout engine has of its device, and how serving is beside it; None: of a serving engine."""
        return None if self._admission is None else device_status(self._pool.pool, self._pool.slot)

    def tune(self, slo: Slo, mode: Mode, partition: float = 0.0) -> None:
        """Other SLOs, and which of them count, from now on; of a serving engine without requests. ``partition``: the share of the
        pool that is rollouts', and the rest serving's, without exchange; 0: as the flags say."""
        if self._meter is None or self._guardian is None:
            return
        self._meter.tune(slo, mode)
        if partition == self._partition:
            return
        self._partition = partition
        pages = self._guardian.partition(partition)
        self._parked.most = min(self._pool.geometry.groups, pages // self._pool.geometry.pages_a_group)
        self._parked.shrink(self._parked.backed_groups - self._parked.most)

    @property
    def held_pages(self) -> int:
        """That this engine holds."""
        return self._parked.held_groups * self._pages_a_group

    def set_keep_seconds(self, seconds: float) -> None:
        """Pages that nobody used for so long go back, from now on."""
        self._parked.keep = seconds

    def stop(self) -> None:
        """The engine ends."""
        if self._guardian is not None:
            self._guardian.stop()

    def before_step(self) -> None:
        """Comply, then have what the next step may allocate."""
        self._allowed = self._comply_with_budget()
        if self._guardian is not None:
            self._guardian.tick_before_step(self.held_pages)
        if not self._parked.ensure_free(self._blocks_wanted(), self._allowed) and self._guardian is not None:
            self._guardian.note_shortage()
        self._parked.park_idle_part()

    def map_ahead(self) -> None:
        """While a batch computes: pages for what the next step may allocate, and for as many blocks as requests begin in
        ``_AHEAD`` steps in the mean, so that a step finds its pages there. What there is not is not waited for."""
        running = len(self._scheduler.running)
        soon = sum(-(-running * min(_AHEAD, size) // size) for size in self._block_tokens)
        self._parked.ensure_free(self._blocks_wanted() + soon, self._allowed)

    def check_pages(self, opened: bool = False) -> dict[str, Any]:
        """The same without a step, for an engine that has nothing to do. ``opened``: an RL step begins, rollout engines get their
        budgets anew (of a serving engine only)."""
        if self._guardian is not None:
            if opened:
                self._guardian.open_budget()
            self._guardian.tick()
        self._comply_with_budget()
        self._parked.park_idle(running=bool(self._scheduler.running))
        view = self._pool.pool.view()
        mine = next(tenant for tenant in view.tenants if tenant.slot == self._pool.slot)
        return {
            "process": os.getpid(),
            "patches": REGISTER.status(),
            "async_scheduling": bool(self._scheduler.scheduler_config.async_scheduling),
            "pages": mine.used,
            "budget": mine.budget,
            "revision": mine.revision,
            "free": view.free,
            "page_bytes": view.page_bytes,
            "groups": self._parked.backed_groups,
            "blocks": self.usable_blocks,
            "displaced": self.displaced,
            **self._budget_status(),
            **self._admission_status(),
        }

    @property
    def usable_blocks(self) -> int:
        """That the engine could use, its null block not counted: of a rollout engine all that its budget allows, also those that
        have no pages yet; of a serving engine those that have."""
        geometry = self._pool.geometry
        groups = self._parked.backed_groups
        if self._pool.role != "serving":
            mine = next(tenant for tenant in self._pool.pool.view().tenants if tenant.slot == self._pool.slot)
            groups = max(groups, min(geometry.groups, mine.budget // geometry.pages_a_group))
        return groups * geometry.group_blocks - 1

    def _admission_status(self) -> dict[str, Any]:
        if self._admission is not None:
            return {**asdict(self._admission.words()), "reason": self._admission.reason}
        return asdict(self._meter.latest) if self._meter is not None else {}

    def _budget_status(self) -> dict[str, Any]:
        if self._guardian is None:
            return {}
        budget = self._guardian.budget
        return {"lent": budget.pages, "state": budget.state, "cuts": self._guardian.cuts, "kills": self._guardian.kills}

    def _blocks_wanted(self) -> int:
        """Blocks that running and waiting requests may ask for in the next step: an upper bound, so that stock finds them."""
        scheduler = self._scheduler
        tokens, drafted = scheduler.max_num_scheduled_tokens, scheduler.num_lookahead_tokens
        prefilling = [] if self._parts is None else self._parts.running()
        room = scheduler.max_num_running_reqs - len(scheduler.running)
        # No step computes more of those that wait; stock starts one only where all of it fits.
        waiting = self._head.read(tokens, room)
        if waiting is not self._head_blocks[0]:
            self._head_blocks = waiting, self._blocks_for(size + drafted for size in waiting)
        decoding = len(scheduler.running) - len(prefilling)
        if not decoding and not prefilling and not waiting:
            return 0
        each = self._blocks_for(min(tokens, max(1, left_of(request))) + drafted for request in prefilling)
        each += self._head_blocks[1] + decoding * self._decode_blocks
        return int(each + scheduler.kv_cache_manager.watermark_blocks)

    def _blocks_for(self, counts: Iterable[int]) -> int:
        """That so many tokens of a request each may begin."""
        return sum([-(-count // size) + 1 for count in counts for size in self._block_tokens])

    def _comply_with_budget(self) -> int | None:
        """Give back what is beyond the budget. Returns the groups that may be used; None: there is no budget."""
        if self._pool.role == "serving" or self._parked.asleep:
            return None
        used, budget = self._pool.pool.own_share()
        each = self._pages_a_group
        excess = -(-(used - budget) // each)
        excess -= self._parked.held_groups - self._parked.backed_groups  # those that are on their way
        if excess > 0:
            excess -= self._parked.shrink(excess)
        for request in self._displaceable() if excess > 0 else ():
            if excess <= max(0, self._groups_coming()):
                break
            self._displace(request)
            excess -= self._parked.shrink(excess)
        return budget // each

    def _groups_coming(self) -> int:
        """Groups that come free by themselves: with a KV connector and async scheduling stock frees after a step in flight."""
        deferred = self._scheduler.deferred_frees
        return self._parked.groups_left(Counter(block.block_id for _, blocks in deferred for block in blocks))

    def _displaceable(self) -> list[Any]:
        """Those that run, in the order in which their pages are taken."""
        running = {request.request_id: request for request in self._scheduler.running}
        blocks = self._scheduler.kv_cache_manager.get_blocks
        sizes = {name: (request.priority, sum(map(len, blocks(name).blocks))) for name, request in running.items()}
        return [running[name] for name in displacement_order(sizes)]

    def _displace(self, request: Any) -> None:
        """Stock's own preemption."""
        scheduler = self._scheduler
        scheduler.running.remove(request)
        scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
        self.displaced += 1
        self._displaced.add(request.request_id)

    def _hand_back(self, names: list[str], answers: dict[int, Any]) -> None:
        """End them as aborted, and tell who asked for them; the tokens they have are with the front end already."""
        for request in self._scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED):
            outputs = answers.setdefault(request.client_index, EngineCoreOutputs())
            outputs.outputs.append(EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.ABORT))
