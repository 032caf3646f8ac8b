"""A stock ``LLMEngine`` in this process, spoken to in our contracts' terms. Synchronous; knows no event loop.

Guarantees:

* Every accepted request is answered by exactly one ``Completion``, from :meth:`InprocessEngine.step` or
  :meth:`InprocessEngine.abort`.
* Tokens, log-probs and version spans of a completion have equal length; the stop token is among them. Log-probs are those
  of the distribution that was sampled (vLLM's ``processed_logprobs``: after temperature and top-p; greedy requests: the
  log-softmax at temperature 1).
* :meth:`InprocessEngine.update` either loads the version and shuts out all KV of older weights, or raises RetryableError with the
  old version untouched, or raises CommandError ``weights_unusable``: then :attr:`InprocessEngine.unusable` says why, and nothing
  may be generated until another update succeeds.

It reads no clock but the one that its caller gives it.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from orchestrator.api import (
    CommandError,
    Completion,
    CompletionTiming,
    ConfigError,
    GenerationRequest,
    Meeting,
    ReleaseResult,
    RetryableError,
    Sampling,
    TokenSequence,
    UpdateResult,
    VersionSpans,
    WorkerStats,
    merge_spans,
)
from orchestrator.hooks.tested_versions import VLLM, check_version
from orchestrator.settings.engine_settings import EngineSettings
from orchestrator.transfer.turns.routed_experts import pack_experts
from vllm_rlplugin import status as plugin_status
from vllm_rlplugin.engine_activation import activate, check_drafts, check_experts, is_cpu_build, register_backend
from vllm_rlplugin.hookpoints import require_loaded
from vllm_rlplugin.kvpool.engine.pool_processes import RANKED, check_workers
from vllm_rlplugin.options import BACKEND, PLUGIN, PluginOptions, engine_arguments, is_priority
from vllm_rlplugin.sleep.memory_release import MemoryRelease
from vllm_rlplugin.weights.version_agreement import find_disagreement
from vllm_rlplugin.worker.stats_window import stats_of

CACHED_SAMPLINGS = 1024  # making vLLM's SamplingParams costs about 20 us; runs use few different ones


class EngineOptions(EngineSettings):
    """What to serve, and how. ``relay``: a RelayEndpoint as a dictionary; None: no weight updates. ``plugin``:
    :class:`~vllm_rlplugin.options.PluginOptions` as a dictionary; what is missing has its default. ``sleep_mode``: its
    memory can be released, to train on the same device. ``node_rank``: of its ``nodes``, which meet at ``master``, host:port."""

    model: str
    dtype: str = "float32"
    seed: int = 0
    relay: dict[str, Any] | None = None
    weight_version: Annotated[int, Field(ge=0)] = 0
    plugin: dict[str, Any] = Field(default_factory=dict)
    sleep_mode: bool = False
    node_rank: Annotated[int, Field(ge=0)] = 0
    master: str = ""

    @model_validator(mode="after")
    def _usable(self) -> EngineOptions:
        if not (Path(self.model) / "config.json").is_file():
            raise ConfigError("model", self.model, "no config.json there; give the path of a Hugging Face model folder")
        if PluginOptions.from_dict(self.plugin).kv_pool:
            check_workers(self.tensor_parallel_size, self.pipeline_parallel_size)
        return self

    @property
    def executor(self) -> str | None:
        """vLLM's ``distributed_executor_backend``. In a Ray placement group vLLM would ask Ray for more; the devices are this
        process's already."""
        if self.ranks == 1:
            return None
        return RANKED if self.plugin.get("kv_pool") else "mp"

    def vllm_arguments(self) -> dict[str, Any]:
        """See :class:`EngineSettings`."""
        given = super().vllm_arguments()
        if self.nodes == 1:
            return given
        host, _, port = self.master.rpartition(":")
        return given | {
            "nnodes": self.nodes,
            "node_rank": self.node_rank,
            "master_addr": host,
            "master_port": int(port),
        }


@dataclass(slots=True)
class _Active:
    """One request inside the engine. ``core`` is vLLM's own ``Request``: its counters are live."""

    internal_id: str
    core: Any
    added_at: float
    experts_from: int = 0  # the first token whose routed experts are returned
    started_at: float | None = None  # when its first engine step began
    first_at: float | None = None  # when its first token was there


def prepare_process(threads: int, kv_pool: bool = False) -> bool:
    """Set the environment an in-process engine needs, before vLLM is imported. True when vLLM is its CPU build."""
    installed = check_version(VLLM)
    on_cpu = is_cpu_build(installed)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN not in allowed.split(","):  # unset means: all
        os.environ["VLLM_PLUGINS"] = ",".join(name for name in (*allowed.split(","), PLUGIN) if name)
    if on_cpu:
        os.environ["OMP_NUM_THREADS"] = str(threads)
        # A first request with log-probs would otherwise compile C++ for 10 s; pinning would fight with other workers.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        if "torch" in sys.modules:  # the variables were read already
            sys.modules["torch"].set_num_threads(threads)
        if "torch._dynamo.config" in sys.modules:
            dynamo: Any = sys.modules["torch._dynamo.config"]
            dynamo.disable = os.environ["TORCHDYNAMO_DISABLE"] == "1"
    activate(kv_pool)
    return on_cpu


def engine_config(options: EngineOptions) -> tuple[Any, bool]:
    """vLLM's own config of such an engine, in a process that is prepared for it; whether vLLM is its CPU build. Raises
    ConfigError."""
    on_cpu = prepare_process(options.threads, bool(options.plugin.get("kv_pool")))
    check_drafts(options.passed_on.get("speculative_config"), on_cpu)
    check_experts(bool(options.passed_on.get("enable_expert_parallel")), on_cpu)
    from vllm.engine.arg_utils import EngineArgs
    from vllm.exceptions import VLLMValidationError

    require_loaded()
    register_backend()  # where VLLM_PLUGINS or a source checkout kept the entry point from being loaded
    ours: dict[str, Any] = {"enforce_eager": on_cpu, "enable_prefix_caching": True}
    try:
        if on_cpu and "attention_backend" not in options.passed_on and _has_mla(options.model):
            ours["attention_config"] = {"backend": "CPU_MLA"}  # AMX's takes bfloat16 alone, and lets go of weights
        config = EngineArgs(
            **{**ours, **options.vllm_arguments()},
            model=options.model,
            skip_tokenizer_init=True,
            generation_config="vllm",
            dtype=options.dtype,
            seed=options.seed,
            logprobs_mode="processed_logprobs",
            disable_log_stats=True,
            distributed_executor_backend=options.executor,
            enable_sleep_mode=options.sleep_mode and not on_cpu,  # the CPU build has none
            **engine_arguments(PluginOptions.from_dict(options.plugin)),
        ).create_engine_config()
    except (VLLMValidationError, ValueError, TypeError, NotImplementedError) as error:
        given = options.passed_on or options.model
        raise ConfigError("rollout.engine", given, f"vLLM refuses these options: {error}") from error
    return config, on_cpu


def _has_mla(model: str) -> bool:
    """Whether a folder of a model says so."""
    file = Path(model) / "config.json"
    return file.exists() and bool(json.loads(file.read_text(encoding="utf-8")).get("kv_lora_rank"))


class InprocessEngine:
    """See the module. One at a time in a process: close one before the next is made. ``clock``: seconds, monotonic."""

    def __init__(self, options: EngineOptions, clock: Callable[[], float]) -> None:
        config, on_cpu = engine_config(options)
        from vllm.exceptions import VLLMValidationError
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind, SamplingParams
        from vllm.v1.engine import FinishReason
        from vllm.v1.engine.llm_engine import LLMEngine

        gc.freeze()  # vLLM collects five times while it starts, and would look at all that was imported: 1.5 s
        self._llm = LLMEngine.from_vllm_config(config, disable_log_stats=True)
        if not hasattr(self._llm.engine_core, "engine_core"):
            raise ConfigError(
                "VLLM_ENABLE_V1_MULTIPROCESSING", "1", "was read before; start the worker in a fresh process"
            )
        self._core = self._llm.engine_core.engine_core
        self._scheduler = self._core.scheduler
        self._clock = clock
        self._vocabulary = int(self._llm.model_config.get_vocab_size())
        self._tokens_input = tokens_input
        self._refusals = (VLLMValidationError, ValueError, TypeError, OverflowError)  # of a request, by vLLM
        self._abort_reason = FinishReason.ABORT
        self._sampling_params = functools.partial(
            SamplingParams,
            ignore_eos=True,
            logprobs=0,  # of the sampled token only
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,  # nothing below the first level is ever changed
        )
        self._params: dict[Sampling, Any] = {}
        self._routed = bool(options.passed_on.get("enable_return_routed_experts"))
        self._active: dict[str, _Active] = {}
        self._silent: dict[str, _Active] = {}  # those without a token
        self._stamped = -1  # moves of the scheduler when none of them had started
        self._stepped_at = 0.0  # when the latest engine step ended
        self.unusable = ""  # why the weights cannot be used; empty: they can
        self.advanced: dict[str, Any] = {}  # how the scheduler shut out old KV in the latest update
        self._relay = options.relay is not None
        self._releaser = MemoryRelease(self._core, self._rpc, on_cpu=on_cpu, sleep_mode=options.sleep_mode)
        self.version = options.weight_version
        self._llm.set_weight_version(str(self.version))
        try:
            require_loaded()  # the scheduler's and the worker's modules too
            self._rpc("rl_ready")
            if options.relay is not None:
                self._rpc("init_weight_transfer_engine", kwargs={"init_info": {"endpoint": dict(options.relay)}})
        except BaseException:
            self.close()
            raise

    def add(self, request: GenerationRequest, added_at: float) -> Completion | None:
        """Hand a request to vLLM. None: accepted. A completion: refused, with the reason in ``error``.

        ``added_at`` orders requests of one priority, so no two may be alike.
        """
        try:
            if not is_priority(request.priority):
                raise ValueError(f"priority {request.priority!r} is not a 64-bit integer")
            internal_id = self._llm.add_request(
                request.request_id,
                self._tokens_input(self._check_tokens(request.token_ids)),
                self._make_params(request.sampling, request.experts_from if self._routed else 0),
                arrival_time=added_at,
                priority=request.priority,
                session_id=request.trajectory_id,
            )
        except self._refusals as error:
            return Completion(request.request_id, (), (), (), "error", error=str(error) or type(error).__name__)
        active = _Active(internal_id, self._scheduler.requests[internal_id], added_at, request.experts_from)
        self._active[request.request_id] = self._silent[request.request_id] = active
        return None

    def abort(self, request_id: str, now: float) -> Completion | None:
        """Cancel; the completion holds what was generated. None: not in the engine."""
        active = self._active.get(request_id)
        if active is None:
            return None
        # vLLM emits nothing for an aborted request in-process; its own state makes the last output.
        state = self._llm.output_processor.request_states[active.internal_id]
        output = state.make_request_output([], None, self._abort_reason, None)
        self._llm.abort_request([active.internal_id], internal=True)
        return self._finish(request_id, output, now)

    def prioritize(self, priorities: Mapping[str, int]) -> None:
        """New priority numbers by trajectory id."""
        self._scheduler.rl_command("prioritize", {"priorities": dict(priorities)})

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._active)

    @property
    def moves(self) -> int:
        """Grows whenever a request comes into the engine, starts, is preempted, ends or changes its rank."""
        return int(self._scheduler._rl_moves)

    def queue_room(self, best_held: int) -> tuple[int, int]:
        """(how many requests wait inside and rank at least as one of priority ``best_held``, how many more could run)."""
        scheduler = self._scheduler
        return scheduler._rl_waiting_ahead(best_held), max(0, scheduler.max_num_active_reqs - len(scheduler.running))

    def step(self, now: float) -> list[Completion]:
        """One engine step; the requests that it finished, in order. ``now`` is when the step starts."""
        outputs = self._llm.step()
        self._stepped_at = self._clock()
        if self._silent and self._stamped != self._scheduler._rl_moves:
            self._stamp_starts(now)
        return [self._finish(output.request_id, output, self._stepped_at) for output in outputs] if outputs else []

    def pause(self, now: float) -> list[Completion]:
        """Stop scheduling; in-flight requests keep tokens and KV. Returns what the batches in flight finished."""
        self._core.pause_scheduler("keep", clear_cache=False)
        completions = []
        while self._core.batch_queue:  # pipeline parallelism or async scheduling: batches that were already sent
            completions.extend(self.step(now))
        return completions

    def check_update(self, version: int) -> None:
        """Raise CommandError when ``version`` cannot be loaded, whatever the relay has.

        The same version may be loaded again: after a rollback of the run its number may stand for other weights.
        """
        if not self._relay:
            raise CommandError("no_relay", "this worker has no relay to update from; construct it with one")
        if version < self.version:
            raise CommandError(
                "version_decreases", f"weight versions never decrease: {version} asked for, {self.version} is loaded"
            )

    def prepare(self, version: int) -> None:
        """Begin to fetch and verify ``version`` in the vLLM workers, unless it is at hand; returns at once."""
        found = self._before_loading(version, "rl_prepared", args=(version,))
        if all(answer["state"] == "ready" for answer in found):
            return  # if it was published anew meanwhile, ``update`` finds that, and fetches it
        self._before_loading(version, "rl_prepare", args=(version,))

    def receive(self, version: int, meetings: Sequence[Meeting], place: int, limit: float) -> None:
        """Begin to receive and verify ``version`` from the trainer in the vLLM workers; returns at once."""
        told = [asdict(meeting) for meeting in meetings]
        self._before_loading(version, "rl_receive", args=(version, told, place, limit))

    def prepared_checksum(self, version: int) -> str:
        """Of the ``version`` that is prepared: a checksum in hexadecimal; "" where vLLM's own engine receives it while it is
        loaded. Raises RetryableError where ranks differ."""
        found = sorted(
            {str(answer["checksum"]) for answer in self._before_loading(version, "rl_prepared", args=(version,))}
        )
        if len(found) != 1:
            raise RetryableError(f"weights of version {version}: the ranks of the engine have {found}")
        return found[0]

    def is_prepared(self, version: int) -> bool:
        """Whether every vLLM worker has ``version`` at hand. Raises RetryableError when it will not come by itself."""
        found = self._before_loading(version, "rl_prepared", args=(version,))
        for answer in found:
            if answer["state"] not in ("fetching", "ready"):
                why = answer["error"] or "another version was asked for meanwhile"
                raise RetryableError(f"weights of version {version}: {why}")
        return all(answer["state"] == "ready" for answer in found)

    def update(self, version: int) -> UpdateResult:
        """Load ``version``, then shut out all KV of older weights. See the module for what is raised. While paused only.

        ``seconds`` is 0 here: the caller knows when it began.
        """
        self.check_update(version)
        self._before_loading(version, "start_weight_update")
        self._before_loading(version, "update_weights", kwargs={"update_info": {"version": version}})
        before, self.unusable = self.unusable, f"the update to version {version} has not ended"
        try:
            self._core.rl_coserve("loading", {})
            error = self._finish_loading()
            reports = self.report()
            if error is None:
                if reports[0]["version"] != version or (why := find_disagreement(reports)) is not None:
                    raise RuntimeError(why or f"version {reports[0]['version']} is loaded instead")
                self.advanced = self._core.rl_coserve("advance_version", {"version": version})
                self._llm.set_weight_version(str(version))
        except Exception as failure:
            self.unusable = f"the update to version {version} failed half-way: {failure or type(failure).__name__}"
            raise CommandError("weights_unusable", self.unusable) from failure
        self.unusable = "" if error is None else before
        if error is not None:
            raise RetryableError(f"update to version {version}: {error}") from error
        self.version = version
        received = sum(int(report["bytes"]) for report in reports)
        past_cache = next((said for report in reports if (said := str(report.get("past_cache", "")))), "")
        return UpdateResult(version, received, 0.0, int(self.advanced["preempted"]), past_cache)

    @property
    def released(self) -> str:
        """Which memory is released now (a level of RELEASE_LEVELS); "" for none."""
        return self._releaser.level

    def release(self, level: str) -> ReleaseResult:
        """Give memory back; see :class:`~vllm_rlplugin.sleep.memory_release.MemoryRelease`. While paused only; nothing may
        then be asked that needs the weights or the KV, until :meth:`reclaim`."""
        return self._releaser.release(level)

    def reclaim(self) -> None:
        """Take the memory again; still paused. After ``dropped`` the weights are unusable until an update succeeds."""
        if self._releaser.reclaim() == "dropped":
            self.unusable = "the weights count as dropped by RELEASE"

    def kv_command(self, command: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """See :mod:`vllm_rlplugin.kv.commands`."""
        why = {"refused": "released", "detail": self.released}
        return why if self.released else dict(self._core.rl_coserve(command, arguments))

    def resume(self) -> None:
        """Go on scheduling."""
        self._core.resume_scheduler()

    def counts(self) -> WorkerStats:
        """A snapshot of what the engine itself knows; costs microseconds per request in the engine."""
        found = stats_of(self._scheduler.rl_command("snapshot", {}))
        return replace(found, kv_used=0, kv_capacity=0) if self.released else found

    @property
    def computed(self) -> int:
        """Grows whenever anything was computed for the requests that are here."""
        return sum(active.core.num_computed_tokens for active in self._active.values())

    def checksums(self) -> dict[str, str]:
        """vLLM's own digests of the weights as loaded, by rank and parameter."""
        merged: dict[str, str] = {}
        for part in self._rpc("compute_weight_checksums"):
            merged.update(part)
        return merged

    def report(self) -> list[dict[str, Any]]:
        """What each vLLM worker says about its weights: version, bytes, what was verified, seconds."""
        return self._rpc("rl_report")

    def status(self) -> dict[str, Any]:
        """The hooks that are live here; plain data."""
        backend = BACKEND if self._relay else None
        return {**plugin_status(), "backend": backend, "weight_version": self.version, "released": self.released}

    def close(self) -> None:
        """Shut vLLM down and free its memory. In-flight requests are dropped."""
        self._active.clear()
        self._silent.clear()
        self._llm.engine_core.shutdown()

    def _rpc(self, method: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> list[Any]:
        """Call a method of every vLLM worker."""
        results: list[Any] = self._llm.collective_rpc(method, args=tuple(args), kwargs=dict(kwargs or {}))
        return results

    def _finish_loading(self) -> Exception | None:
        """Write and verify what was received. An error that is returned came before the model was touched; one that is
        raised leaves the weights in no defined state."""
        try:
            self._rpc("finish_weight_update")
        except Exception as error:
            if any(report["damaged"] for report in self.report()):
                raise
            return error
        return None

    def _before_loading(
        self, version: int, method: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """A call that does not touch the model. Whatever it raises becomes a RetryableError in plain text: some of these
        do not survive pickling on their way out of an actor."""
        try:
            return self._rpc(method, args, kwargs)
        except Exception as error:
            raise RetryableError(f"update to version {version}: {error}") from error

    def _check_tokens(self, token_ids: Sequence[int]) -> list[int]:
        # vLLM checks ids against the tokenizer's vocabulary, and there is none here.
        tokens = TokenSequence.of(token_ids)
        low, high = tokens.bounds
        if tokens and not 0 <= low <= high < self._vocabulary:
            raise ValueError(f"token ids must lie in [0, {self._vocabulary})")
        return tokens.to_list()

    def _make_params(self, sampling: Sampling, experts_from: int) -> Any:
        params = self._params.get(sampling) if not experts_from else None
        if params is None:
            params = self._sampling_params(
                max_tokens=sampling.max_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                stop_token_ids=list(sampling.stop_token_ids),
                seed=sampling.seed,
                **({"routed_experts_prompt_start": experts_from} if experts_from else {}),
            )
            if sampling.seed is None and not experts_from:  # others are as many as requests
                if len(self._params) >= CACHED_SAMPLINGS:
                    self._params.clear()
                self._params[sampling] = params
        return params

    def _stamp_starts(self, started: float) -> None:
        """Note which requests had their first engine step and their first token in the step that has just ended."""
        spoke, computing = [], False
        for name, active in self._silent.items():
            if active.started_at is None and active.core.num_computed_tokens > 0:
                active.started_at = started
            computing |= active.started_at is not None
            if active.core.num_output_tokens > 0:
                active.first_at = self._stepped_at
                spoke.append(name)
        for name in spoke:
            del self._silent[name]
        # What a connector loads is there before the request starts.
        self._stamped = -1 if computing or self._scheduler.connector is not None else self._scheduler._rl_moves

    def _finish(self, request_id: str, output: Any, now: float) -> Completion:
        active = self._active.pop(request_id)
        self._silent.pop(request_id, None)
        result = output.outputs[0]
        return Completion(
            request_id,
            tuple(result.token_ids),
            tuple(result.logprobs.logprobs),
            self._spans(result),
            result.finish_reason,
            self._timing(active, len(result.token_ids), now),
            error="" if result.finish_reason != "error" else "vLLM ended the request with an error",
            experts=pack_experts(result.routed_experts, active.experts_from),
        )

    def _timing(self, active: _Active, tokens: int, now: float) -> CompletionTiming:
        started_at = now if active.started_at is None else active.started_at
        queued = max(0.0, started_at - active.added_at)
        if active.first_at is None or not tokens:
            return CompletionTiming(queued, now - started_at)
        per_token = (self._stepped_at - active.first_at) / (tokens - 1) if tokens > 1 else 0.0
        return CompletionTiming(queued, now - started_at, max(0.0, active.first_at - active.added_at), per_token)

    def _spans(self, result: Any) -> VersionSpans:
        spans = result.weight_versions or ()
        return merge_spans((int(span.version), span.end - span.start) for span in spans)
