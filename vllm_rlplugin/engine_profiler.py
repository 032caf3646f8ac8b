"""Measures a stock engine in this process: prefill and decode over batch and length, KV memory (RollPacker 4.1).

Guarantees: what is measured runs through the same :class:`~vllm_rlplugin.worker.inprocess_engine.InprocessEngine` as a rollout;
every prompt is new, so nothing comes from the prefix cache; a point during which the engine preempted, or whose
sequences do not fit at a time, is no point: the reason is returned instead. Figures are medians of several repeats.

The clock is that of the machine: this is a measurement. It runs in an actor that the orchestrator names by string.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from statistics import median
from typing import Any

from orchestrator.api import ConfigError, GenerationRequest, Sampling
from orchestrator.api.machine import processor_name
from orchestrator.hooks.tested_versions import VLLM, check_version
from vllm_rlplugin.engine_activation import is_cpu_build
from vllm_rlplugin.worker.inprocess_engine import EngineOptions, InprocessEngine

REPEATS = 3  # prefills a point
STEPS = 16  # decode steps a point, after SETTLING
SETTLING = 2
LONGEST_SECONDS = 4.0  # of one point (the paper's); at least one repeat, and one step, is made


def identity(threads: int) -> dict[str, str]:
    """``engine`` and ``device`` of a profile's key, as this process has them."""
    installed = check_version(VLLM)
    device = f"CPU {processor_name()} x {threads}"
    if not is_cpu_build(installed):
        import torch

        if torch.cuda.is_available():
            device = torch.cuda.get_device_name()
    return {"engine": f"vLLM {installed.version}", "device": device}


class MeasuredEngine(InprocessEngine):
    """An engine that tells what a measurement needs."""

    @property
    def count_without_token(self) -> bool:
        """Whether a request has no token yet."""
        return bool(self._silent)

    @property
    def vocabulary(self) -> int:
        """Token ids are below it."""
        return self._vocabulary

    def memory(self) -> dict[str, float]:
        """``kv_bytes_per_token``, ``kv_tokens`` and ``weight_bytes`` of
        :class:`orchestrator.policies.parallelism.engine_profile.EngineShape`."""
        groups = self._scheduler.kv_cache_config.kv_cache_groups
        each = sum(
            len(group.layer_names) * group.kv_cache_spec.page_size_bytes / group.kv_cache_spec.block_size
            for group in groups
        )
        weights = self._rpc("rl_weight_bytes")
        blocks = self.counts().kv_capacity
        return {
            "kv_bytes_per_token": each * len(weights),
            "kv_tokens": blocks * groups[0].kv_cache_spec.block_size,
            "weight_bytes": sum(weights),
        }


class EngineProfiler:
    """One engine, to be measured; one a process. Options as :class:`~vllm_rlplugin.worker.inprocess_engine.EngineOptions`."""

    def __init__(self, **options: Any) -> None:
        self._options = EngineOptions.from_dict(options)
        self._engine = MeasuredEngine(self._options, clock=time.perf_counter)
        self._memory = self._engine.memory()
        self._draw = random.Random(self._options.seed)
        self._count = 0
        self._prefill(1, 1)  # what an engine does at its first request only

    def shape(self) -> Mapping[str, Any]:
        """See :class:`orchestrator.policies.parallelism.engine_profile.EngineShape`."""
        return self._memory

    def measure(self, phase: str, batch: int, tokens: int) -> Mapping[str, Any]:
        """``seconds`` and ``spread``, or ``why`` there are none. ConfigError: no such phase."""
        if phase not in ("prefill", "decode"):
            raise ConfigError("phase", phase, "must be 'prefill' or 'decode'")
        extra = 1 if phase == "prefill" else SETTLING + STEPS
        if why := self._refusal(batch, tokens, extra):
            return {"why": why}
        before = self._engine.counts().preemptions
        found = self._prefill(batch, tokens) if phase == "prefill" else self._decode(batch, tokens)
        if self._engine.counts().preemptions != before:
            return {"why": "the engine preempted: the KV cache is too small for all at a time"}
        if not found:
            return {"why": "the first sequences ended before the last prompt was computed"}
        middle = median(found)
        return {"seconds": middle, "spread": round((max(found) - min(found)) / middle, 4)}

    def close(self) -> None:
        """Shut vLLM down."""
        self._engine.close()

    def _refusal(self, batch: int, tokens: int, extra: int) -> str:
        options, room = self._options, int(self._memory["kv_tokens"])
        if batch > options.max_num_seqs:
            return f"max_num_seqs is {options.max_num_seqs}"
        if tokens + extra > options.max_model_len:
            return f"max_model_len is {options.max_model_len}, but {tokens} + {extra} are needed"
        block = options.block_size
        needed = batch * -(-(tokens + extra) // block) * block
        return f"the KV cache holds {room} tokens, {needed} are needed" if needed > room else ""

    def _prefill(self, batch: int, tokens: int) -> list[float]:
        found: list[float] = []
        while len(found) < REPEATS and sum(found) < LONGEST_SECONDS:
            self._add(batch, tokens, 1)
            begun = time.perf_counter()
            while self._engine.has_work:
                self._engine.step(time.perf_counter())
            found.append(time.perf_counter() - begun)
        return found

    def _decode(self, batch: int, tokens: int) -> list[float]:
        names = self._add(batch, tokens, self._options.max_model_len - tokens)
        found: list[float] = []
        ended = False
        while self._engine.count_without_token and not ended:
            ended = bool(self._engine.step(time.perf_counter()))
        for _ in range(SETTLING):
            ended = ended or bool(self._engine.step(time.perf_counter()))
        while not ended and len(found) < STEPS and sum(found) < LONGEST_SECONDS:
            begun = time.perf_counter()
            ended = bool(self._engine.step(begun))
            if not ended:
                found.append(time.perf_counter() - begun)
        for name in names:
            self._engine.abort(name, time.perf_counter())
        return found

    def _add(self, batch: int, tokens: int, most: int) -> list[str]:
        names = []
        for _ in range(batch):
            name = f"point-{self._count}"
            self._count += 1
            prompt = tuple(self._draw.randrange(self._engine.vocabulary) for _ in range(tokens))
            request = GenerationRequest(name, name, 0, prompt, Sampling(most), "profile")
            refused = self._engine.add(request, float(self._count))
            if refused is not None:
                raise ValueError(f"vLLM refuses {tokens} + {most} tokens: {refused.error}")
            names.append(name)
        return names
