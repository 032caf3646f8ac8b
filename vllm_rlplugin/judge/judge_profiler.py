"""Measures a judge with streamed layers in this process: seconds of a prefill and of a decode pass over batch and length, and the
memory that a token takes at the peak (RollPacker 4.1). Reads what was measured, for the server.

Guarantees: a pass is arranged, padded and computed as :mod:`vllm_rlplugin.judge.judge_server` does, in the memory that the judge
is given; sizes that do not fit are no points: the reason is returned instead. Figures are medians. On a CPU memory is what
PyTorch's allocator handed out, on a GPU what its caching one says. A profile of another engine or device is one ConfigError.

The clock is that of the machine: this is a measurement. It runs in an actor that the orchestrator names by string.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from orchestrator.api import ConfigError, jsontext
from orchestrator.api.machine import processor_name
from orchestrator.policies.parallelism.engine_profile import EngineProfile, point_from_dict, shape_from_dict
from orchestrator.policies.serving.judge_residency import BATCH
from vllm_rlplugin.judge.streamed_model import device_of, load_model, memory_left

FIELD = "reward.judge.streamed.profile"
REPEATS = 3  # prefills of a point
STEPS = 8  # decode passes of a point
LONGEST_SECONDS = 4.0  # of one point (the paper's); at least one repeat is made
_SHORTEST = 16  # tokens that memory is measured at first; then four times as many, and so on
_ROWS = 2  # of that: rows are padded, and have a mask


def identity(device: str, threads: int, memory_mb: int) -> dict[str, str]:
    """``engine`` and ``device`` of a profile's key, as this process has them."""
    import transformers

    place = device_of(device)
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    name = f"CPU {processor_name()} x {threads}" if place == "cpu" else torch.cuda.get_device_name(place)
    return {"engine": f"judge, {f'{memory_mb} MB' if memory_mb else 'all memory'}; {versions}", "device": name}


def read_profile(path: Path, here: Mapping[str, str]) -> EngineProfile:
    """The profile of a file that ``rl-coserve profile --judge`` made; ``here``: see :func:`identity`. Raises ConfigError."""
    try:
        data = jsontext.parse_object(path.read_bytes())
        points = [point_from_dict(item) for item in data["points"]]
        profile = EngineProfile(points, [shape_from_dict(item) for item in data["shapes"]])
        differ = [name for name, value in here.items() if data["key"][name] != value]
        pairs = "; ".join(f"its {name} is {data['key'][name]!r}, here it is {here[name]!r}" for name in differ)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise ConfigError(
            FIELD, str(path), f"cannot be read ({error!r:.200}): make one with profile --judge"
        ) from error
    if differ or not profile.layouts or not profile.shapes:
        why = f"is a profile of another {' and '.join(differ)}: {pairs}" if differ else "has no points of both phases"
        raise ConfigError(FIELD, str(path), f"{why}; make one with `rl-coserve profile --judge`")
    return profile


class JudgeProfiler:
    """One judge, to be measured; one a process. ``longest``: tokens of the longest prompt that memory is measured at."""

    def __init__(self, *, model: str, longest: int, threads: int, memory_mb: int, file: str, **place: str) -> None:
        torch.set_num_threads(threads)
        given = memory_mb << 20
        self._model = load_model(model, memory=given, file=Path(file) if file else None, **place)
        self._memory = memory_left(self._model, given)
        self._room = int(self._model.model.config.max_position_embeddings)
        self._draw = torch.Generator().manual_seed(0)
        self._longest = min(longest, self._room)

    def shape(self) -> Mapping[str, Any]:
        """See :class:`orchestrator.policies.parallelism.engine_profile.EngineShape`: ``kv_bytes_per_token`` with activations, the
        most over the lengths that were tried."""
        model, tokens, most = self._model, min(_SHORTEST, self._longest), 0.0
        while True:
            model.fit(_ROWS * tokens, self._memory())
            self._prefill(_ROWS, tokens)  # what a first pass of a size leaves behind is no token's
            most = max(most, self._peak(partial(self._prefill, _ROWS, tokens)) / (_ROWS * tokens))
            if tokens >= self._longest:
                break
            tokens = min(4 * tokens, self._longest)
        memory = model.memory
        least = memory.fixed + memory.reserve + min(2, memory.layers) * memory.layer
        fits = int((self._memory() - least) / most)
        return {
            "kv_bytes_per_token": most,
            "kv_tokens": max(0, min(fits, BATCH * self._room)),
            "weight_bytes": memory.fixed + memory.layers * memory.layer,
        }

    def measure(self, phase: str, batch: int, tokens: int) -> Mapping[str, Any]:
        """``seconds`` and ``spread``, or ``why`` there are none. ConfigError: no such phase."""
        if phase not in ("prefill", "decode"):
            raise ConfigError("phase", phase, "must be 'prefill' or 'decode'")
        if tokens + STEPS > self._room:
            return {"why": f"the model has {self._room} positions, {tokens} + {STEPS} are needed"}
        try:
            self._model.fit(batch * (tokens + STEPS), self._memory())
        except ValueError as error:
            return {"why": str(error)}
        found = self._prefills(batch, tokens) if phase == "prefill" else self._decodes(batch, tokens)
        middle = median(found)
        return {"seconds": middle, "spread": round((max(found) - min(found)) / middle, 4)}

    def close(self) -> None:
        """Free its buffers."""
        self._model.close()

    def _prefills(self, batch: int, tokens: int) -> list[float]:
        found: list[float] = []
        while len(found) < REPEATS and sum(found) < LONGEST_SECONDS:
            begun = time.perf_counter()
            self._prefill(batch, tokens)
            found.append(time.perf_counter() - begun)
        return found

    def _decodes(self, batch: int, tokens: int) -> list[float]:
        cache = self._prefill(batch, tokens)
        found: list[float] = []
        while len(found) < STEPS and sum(found) < LONGEST_SECONDS:
            begun = time.perf_counter()
            cache = self._pass(batch, 1, tokens + len(found) + 1, cache)
            found.append(time.perf_counter() - begun)
        return found

    def _prefill(self, batch: int, tokens: int) -> Any:
        return self._pass(batch, tokens, tokens, None)

    def _pass(self, batch: int, new: int, tokens: int, cache: Any) -> Any:
        """One forward pass of ``new`` ids a row, contexts of ``tokens`` with them. Returns the cache."""
        ids = torch.randint(0, int(self._model.model.config.vocab_size), (batch, new), generator=self._draw)
        places: dict[str, Any] = {}
        if batch > 1:  # as questions of several lengths
            mask = torch.ones(batch, tokens, dtype=torch.long, device=self._model.device)
            places = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1)[:, -new:]}
        answer = self._model.forward(ids, past_key_values=cache, use_cache=True, logits_to_keep=1, **places)
        answer.logits[:, -1].float().cpu()
        return answer.past_key_values

    def _peak(self, work: Callable[[], object]) -> int:
        """Bytes that it allocates at a time, at most."""
        device = self._model.device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            work()
            return int(torch.cuda.max_memory_allocated(device) - before)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
            work()
        recorded: Any = seen.profiler
        events = [event for event in recorded.kineto_results.events() if event.name() == "[memory]"]
        held = most = 0
        for event in sorted(events, key=lambda event: event.start_ns()):
            held += event.nbytes()
            most = max(most, held)
        return most
