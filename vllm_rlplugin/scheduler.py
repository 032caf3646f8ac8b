"""The scheduler of an rl-coserve engine: stock vLLM's, with preemption by priority, weight versions and counters.

:func:`create_scheduler` is what ``--scheduler-cls`` names (vLLM's own hook); it makes a stock ``Scheduler`` or, with async
scheduling, an ``AsyncScheduler``, each with hooks before and after its methods and no copy of any. Guarantees:

* Order and preemption: see :mod:`vllm_rlplugin.preemption`. With equal priorities each step is exactly stock's.
* After ``advance_version`` no KV of older weights is ever used again, by whatever route a request comes in.
* Statistics cost a step a few additions, and the counters count also when vLLM's own statistics are off.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from orchestrator.api import ConfigError
from orchestrator.hooks.tested_versions import VLLM, check_version
from orchestrator.policies.routing.priority import ProgressivePriority
from vllm_rlplugin.kvpool.engine.pool_scheduling import POOL_COMMANDS, PoolScheduler
from vllm_rlplugin.options import PluginOptions
from vllm_rlplugin.patches.register import REGISTER
from vllm_rlplugin.preemption import PriorityPreemption
from vllm_rlplugin.worker.cache_salt import make_salt, user_salt_of

REHASH_TOKENS = 1 << 15  # of all requests in flight; hashing so many takes some 10 ms (docs/vllm.md)


class CoserveScheduler(PriorityPreemption):
    """Mixed in before a stock scheduler."""

    _rl_queue_policies: tuple[str, ...] = ("priority",)
    kv_cache_manager: Any
    connector: Any

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        check_version(VLLM)  # ConfigError on a version that was not tested
        policy = vllm_config.scheduler_config.policy
        if policy not in self._rl_queue_policies:
            raise ConfigError(
                "scheduling_policy", policy, "rl-coserve orders by priority: --scheduling-policy priority"
            )
        if vllm_config.parallel_config.enable_eplb:
            fix = "it moves experts between ranks, and weights are updated and verified where they were loaded: leave it out"
            raise ConfigError("--enable-eplb", True, fix)
        options = PluginOptions.from_config(vllm_config)
        REGISTER.apply("engine_command")
        self._rl_start_preempting(ProgressivePriority(options.max_wait, options.quantum), options.preemption)
        self._rl_flush = options.kv_on_update == "flush"
        self._rl_version = 0  # 0 until the first advance_version
        self._rl_history = 0  # in each of which versions count anew
        self._rl_salted = False  # whether requests carry the version in their salt
        self._rl_steps = self._rl_step_requests = self._rl_step_kv = 0
        self._rl_queries = self._rl_hits = self._rl_generated = 0
        stock: Any = super()
        stock.__init__(vllm_config, *args, **kwargs)
        self._rl_pages = PoolScheduler.for_scheduler(self, options)  # None: the KV cache is vLLM's own

    def rl_command(self, command: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """What the front end asks of the scheduler, between two steps. Plain data in and out. Raises ValueError for an
        unknown command or wrong arguments (nothing changed then), RuntimeError where stock refuses to drop its KV.

        * ``prioritize`` {"priorities": {trajectory id: priority}}: of all their unfinished requests -> {"changed"}
        * ``advance_version`` {"version", "history" (default: the present one)}: the weights are now of this version; it
          never decreases within a history, and histories never return -> {"preempted", "how", "seconds"}
        * ``may_update`` {"version", "history"} (or {}: not known yet): asked before weights are written -> {"refused": why
          ``advance_version`` would fail now; "": nothing}
        * ``page_pool`` {"opened" (default: no)}: comply with the budget, give back what is idle; opened: an RL step begins, of a
          serving engine (a rollout engine says so itself, with ``advance_version``) -> pages, budget, what is lent, admitted and
          late ({} without a pool)
        * ``deactivate``, ``activate``, ``weights_held``, ``loading``: see :mod:`vllm_rlplugin.kvpool.engine.pool_scheduling`
        * ``snapshot`` {}: the counters of :class:`orchestrator.api.WorkerStats`, and ``steps`` that computed something
        """
        if command == "prioritize":
            return self._rl_prioritize(**arguments)
        if command == "advance_version":
            return self._rl_advance_version(**arguments)
        if command == "may_update":
            return {"refused": self._rl_holders(self._rl_flush if not arguments else self._rl_flushes(**arguments))}
        if command == "snapshot":
            return self._rl_snapshot()
        if command in POOL_COMMANDS:
            return self._rl_pages.command(command, arguments) if self._rl_pages is not None else {}
        known = ("prioritize", "advance_version", "may_update", "snapshot", *POOL_COMMANDS)
        raise ValueError(f"{command!r} is not a command of the scheduler: {', '.join(known)}")

    # ---- hooks into stock methods ----

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        if self._rl_pages is None:
            output = super().schedule(*args, **kwargs)
        else:
            output = self._rl_pages.schedule(super().schedule, *args, **kwargs)
        if output.total_num_scheduled_tokens:
            self._rl_steps += 1
            self._rl_step_requests += len(output.num_scheduled_tokens)
            self._rl_step_kv += self._rl_kv_used
        return output

    def get_grammar_bitmask(self, *args: Any, **kwargs: Any) -> Any:
        if self._rl_pages is not None:  # vLLM calls it when a batch was given to the device, before it waits for one
            self._rl_pages.map_ahead()
        stock: Any = super()
        return stock.get_grammar_bitmask(*args, **kwargs)

    def add_request(self, request: Any) -> None:
        if self._rl_salted:  # whatever version its front end knew, it must carry the present one
            self._rl_salt(request)
        super().add_request(request)
        if self._rl_pages is not None:
            self._rl_pages.request_added(request)

    def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        stock: Any = super()
        answers = stock.update_from_output(scheduler_output, *args, **kwargs)
        if self._rl_pages is not None:
            self._rl_pages.step_ended(scheduler_output, answers)
        return answers

    def shutdown(self) -> None:
        if self._rl_pages is not None:
            self._rl_pages.stop()
        stock: Any = super()
        stock.shutdown()

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self._rl_generated += request.num_output_tokens
        if self._rl_pages is not None:
            self._rl_pages.request_gone(request)
        return super()._free_request(request, *args, **kwargs)

    def _rl_started(self, request_id: str, cached: int) -> None:
        super()._rl_started(request_id, cached)
        request = self.requests[request_id]
        if self.kv_cache_manager.prefix_cache_lookup_enabled(request):
            self._rl_queries += request.num_tokens
            self._rl_hits += cached

    # ---- commands ----

    def _rl_prioritize(self, priorities: Mapping[str, int]) -> dict[str, Any]:
        for trajectory, priority in priorities.items():
            if not isinstance(priority, int) or isinstance(priority, bool) or not -(2**63) <= priority < 2**63:
                raise ValueError(f"priority of {trajectory!r}: {priority!r} is not a 64-bit integer")
        wanted = {
            request: priorities[request.session_id]
            for request in self.requests.values()
            if request.session_id in priorities and not request.is_finished()
        }
        return {"changed": self._rl_set_priorities(wanted) if wanted else 0}

    def _rl_advance_version(self, version: int, history: int | None = None) -> dict[str, Any]:
        history = self._rl_history if history is None else history
        if any(type(number) is not int or number < 0 for number in (version, history)):
            raise ValueError(f"version {version!r} of history {history!r}: give integers of 0 or more")
        present, wanted = (self._rl_history, self._rl_version), (history, version)
        if wanted < present:
            raise ValueError(
                f"version {version} of history {history}: version {self._rl_version} of history {self._rl_history} is "
                "loaded, which never decreases"
            )
        flush = self._rl_flushes(version, history)
        if held := self._rl_holders(flush):  # stock's reset refuses too, after having preempted everything
            raise RuntimeError(held)
        started, running = time.monotonic(), len(self.running)
        if flush:
            if not self.reset_prefix_cache(reset_running_requests=True, reset_connector=True):
                raise RuntimeError("the KV connector did not reset its cache")
        else:
            self._rl_salt_all(version, history)
        stock: Any = self
        stock.reset_encoder_cache()  # encoder outputs are kept by their input alone, which no salt covers
        self._rl_version, self._rl_history = version, history
        if self._rl_pages is not None:
            self._rl_pages.begin_rl_step()
        return {"preempted": running, "how": "flush" if flush else "salt", "seconds": time.monotonic() - started}

    def _rl_holders(self, flush: bool) -> str:
        """Who keeps KV of the present weights, which stock cannot take away; "": nobody. A ``flush`` needs every block back; with
        a new salt what a connector still sends of requests that have ended does no harm."""
        held = [request.request_id for request in self.kv_holding_waiting]
        what = "waiting requests hold KV blocks (KV transfers or streaming input in progress), first"
        if not held and flush:
            held = [request.request_id for request in self.requests.values() if request.is_finished()]
            what = "requests that ended hold KV blocks (a connector sends them), first"
        return f"{len(held)} {what} {held[0]}" if held else ""

    def _rl_flushes(self, version: int, history: int) -> bool:
        """Whether the cache is emptied for it. No salt of its own: the very first version, and one that was loaded again (its
        number may stand for other weights)."""
        wanted, present = (history, version), (self._rl_history, self._rl_version)
        return self._rl_flush or wanted in ((0, 0), present) or self._rl_flush_is_cheaper()

    def _rl_flush_is_cheaper(self) -> bool:
        """A new salt hashes every token of every request anew, inside the pause; a flush hashes none, shuts out the same KV, and
        leaves requests the salt that they have, which no later request gets. Not with a connector: its blocks go by the salt."""
        if self.connector is not None:
            return False
        return bool(sum(request.num_tokens for request in self.requests.values()) > REHASH_TOKENS)

    def _rl_salt_all(self, version: int, history: int) -> None:
        """Old blocks stay cached under their old hashes, which nobody can ask for any more, until they are reused."""
        stock: Any = self
        if not stock.reset_connector_cache():  # a connector need not know of salts
            raise RuntimeError("the KV connector did not reset its cache")
        now = time.monotonic()
        self._rl_updating = True
        try:
            while self.running:  # in reverse, so that stock's queue has them in order again
                # Output in flight is of the old weights: dropped and sampled anew, as in stock's reset_prefix_cache.
                stock._preempt_request(self.running.pop(), now, drop_stale_output=True)
        finally:
            self._rl_updating = False
        self.prev_step_scheduled_req_ids.clear()  # they may resume in the next step (see reset_prefix_cache)
        self._rl_version, self._rl_history, self._rl_salted = version, history, True
        for request in self.requests.values():
            self._rl_salt(request)
        if stock.aux_output_connector is not None:
            stock.aux_output_connector.reset()

    def _rl_salt(self, request: Any) -> None:
        salt = make_salt(user_salt_of(request.cache_salt), self._rl_version, self._rl_history)
        if salt != request.cache_salt:
            request.cache_salt = salt
            request.block_hashes.clear()
            request.update_block_hashes()

    @property
    def _rl_kv_used(self) -> int:
        """Blocks, without vLLM's null block."""
        pool = self.kv_cache_manager.block_pool
        return int(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())

    def _rl_snapshot(self) -> dict[str, Any]:
        stock: Any = self
        running, waiting = stock.get_request_counts()
        pool = self.kv_cache_manager.block_pool
        capacity = pool.num_gpu_blocks - 1  # without vLLM's null block
        return {
            "running": running,
            "waiting": waiting,
            "kv_used": self._rl_kv_used,
            "kv_capacity": capacity if self._rl_pages is None else self._rl_pages.usable_blocks,
            "preemptions": self._rl_preemptions,
            "outranked": self._rl_outranked,
            "prefix_queries": self._rl_queries,
            "prefix_hits": self._rl_hits,
            "generated": self._rl_generated
            + sum(request.num_output_tokens for request in self.requests.values() if not request.is_finished()),
            "oldest_wait": self._rl_oldest_wait(),
            "version": self._rl_version,
            "steps": self._rl_steps,
            "step_requests": self._rl_step_requests,
            "step_kv": self._rl_step_kv,
            "shared": self._rl_pages.device_status() if self._rl_pages is not None else None,
        }


class RLScheduler(CoserveScheduler, Scheduler):  # type: ignore[misc]  # vLLM is untyped here
    """For synchronous scheduling."""


class RLAsyncScheduler(CoserveScheduler, AsyncScheduler):  # type: ignore[misc]
    """For async scheduling."""


def create_scheduler(*, vllm_config: Any, **kwargs: Any) -> Any:
    """vLLM's scheduler hook: called with the keywords of ``Scheduler``. Raises ConfigError for a version that was not
    tested and for another scheduling policy than ``priority``."""
    wanted = RLAsyncScheduler if vllm_config.scheduler_config.async_scheduling else RLScheduler
    return wanted(vllm_config=vllm_config, **kwargs)
