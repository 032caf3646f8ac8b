"""What a run needs of memory, device by device and host by host, before any of it starts.

Guarantees: the trainer's part is its own step, run on fake tensors (:mod:`megatron_rlplugin.memory.trainer_plan`); the engines'
is what vLLM takes of a device by its own options; the relay's is what its ranks lend to it. What is said to be over names the key
that cures it. A device whose size nobody said (``resources.memory_gb``, or a class of :data:`DEVICE_GB`) is never over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.api import ConfigError, RunError
from orchestrator.config import Config
from orchestrator.resources import quantised_rollouts
from orchestrator.runtime.pool_requests import engine_wish, trainer_ranks
from orchestrator.settings.engine_settings import EngineSettings
from orchestrator.settings.user_functions import named_function

GB = 1_000_000_000
# What a device of a class has, in 10^9 bytes, as it is sold; resources.memory_gb says others.
DEVICE_GB: Mapping[str, int] = {
    "A100": 80,
    "H100": 80,
    "H800": 80,
    "H20": 96,
    "H200": 141,
    "B200": 180,
    "L40S": 48,
    "L20": 48,
    "A10": 24,
}
CONTEXT = 600_000_000  # bytes that an engine or a trainer keeps on a device that another one has; stated, not measured
UTILIZATION = 0.9  # vLLM's own default of gpu_memory_utilization
SEGMENT = 256 << 20  # the least that a rank lends to the relay by itself
LARGE = 1_000_000_000  # parameters; preflight plans no model that is smaller
_MARGIN = 1.1  # of what versions take in the store over their tensors
_PLAN = "megatron_rlplugin.memory.trainer_plan:plan_trainer"
SHAPE = "megatron_rlplugin.model_families:read_shape"
_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """What one owner needs of one device, or of its host (``hardware`` "host"), in bytes. ``capacity``: None: not known.
    ``cure``: what to set where it does not fit. ``processes``: of the run that need so much, a mean where stages differ;
    ``together``: of them on one host, where a node is full of them."""

    owner: str
    hardware: str
    parts: dict[str, int]
    capacity: int | None = None
    cure: str = ""
    processes: float = 1
    together: int = 1

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def over(self) -> int:
        """Bytes that are lacking; 0: it fits, or nobody knows."""
        return 0 if self.capacity is None else max(0, self.total - self.capacity)


def device_bytes(config: Config, hardware: str) -> int | None:
    """What a device of this class has; None where nobody said. ``hardware``: "GPU" where the run names no pools."""
    named = hardware if config.resources.pools else "GPU"
    size = config.resources.memory_gb.get(named, DEVICE_GB.get(named))
    return None if size is None else round(size * GB)


def memory_rows(config: Config, path: str) -> list[MemoryRow]:
    """The trainer's ranks, the trainer's host, an engine of each class, and the caches of sites. ``path``: the model's folder, of
    which only the config is read. Raises ConfigError and RunError; takes minutes for a large model."""
    return [*_trainer(config, path), *_engines(config, path), *_caches(config, path)]


def about(config: Config, rows: Sequence[MemoryRow]) -> str:
    """What starts, in a line: ``2 engines, 1 trainer, about 3.1 GB``, host memory included. ``rows``: as :func:`memory_rows`
    has them; none where nothing can be planned, and the line is without its bytes."""
    ranks, engines = trainer_ranks(config), config.rollout.workers
    counted = [(engines, "engine"), (len(config.rollout.served), "served engine"), (ranks, "trainer")]
    parts = [f"{number} {what}{'s' if number > 1 else ''}" for number, what in counted if number]
    if not rows:
        return ", ".join(parts)
    return f"{', '.join(parts)}, about {sum(row.total * row.processes for row in rows) / GB:.1f} GB"


def describe(rows: Sequence[MemoryRow]) -> list[str]:
    """A table: a line a row, with what is over and what cures it."""
    lines = []
    for row in rows:
        parts = ", ".join(f"{name} {_gb(size)}" for name, size in row.parts.items() if size)
        limit = f" of {_gb(row.capacity)}" if row.capacity is not None else ""
        device = "" if row.capacity is None else " on its device"  # of a run without pools: a CPU has none
        where = " in host memory" if row.hardware == "host" else f" on {row.hardware}" if row.hardware else device
        over = f"; over by {_gb(row.over)}: {row.cure}" if row.over else ""
        node = f"; {row.together} on a node: {_gb(row.together * row.total)} GB" if row.together > 1 else ""
        lines.append(f"{row.owner}: {_gb(row.total)} GB{limit}{where} ({parts}){node}{over}")
    return lines


def check(config: Config) -> list[str]:
    """Refuse what is known not to fit, where the model is large and the device known; what was not planned, in words: a step of
    a mixture of experts takes minutes, so that of one only what is there between steps is; and a node without Megatron-Core can
    plan nothing. Raises ConfigError."""
    if not config.model.path:
        return []
    shape = named_function("model.path", SHAPE)(config.model.path)
    needed, relay = relay_segment(config, shape), config.relay
    whole = relay.kind == "mooncake" and not relay.snapshot_every  # differences are smaller by what nobody knows yet
    if whole and 0 < relay.segment_mb << 20 < needed / _MARGIN:
        fix = f"is too small for {relay.keep_versions + 1} versions of this model: set 0, or at least {needed >> 20}"
        raise ConfigError("relay.segment_mb", relay.segment_mb, fix)
    for group in config.rollout.engine_groups if config.rollout.workers else ():
        _check_kv(group, shape, config.model.dtype, group.kv_cache_mb << 20)
    if shape.parameters < LARGE or device_bytes(config, config.resources.trainer) is None:
        return []
    command = "`rl-coserve plan CONFIG --memory` plans it"
    path, experts = config.model.path, bool(shape.num_experts)
    try:
        rows = [*_trainer(config, path, resting=experts), *_engines(config, path)]
    except RunError as error:
        return [f"the memory of this model was not planned ({error}): {command} where Megatron-Core is installed"]
    for row in rows:
        if row.over:
            raise ConfigError("model.path", path, f"does not fit: {describe([row])[0]}")
    if experts:
        return [
            f"a step of this mixture of experts was not planned, which takes minutes; what is there between fits: {command}"
        ]
    return []


def relay_segment(config: Config, shape: Any) -> int:
    """Bytes that each trainer rank must lend to the relay: its share of ``keep_versions + 1`` versions. Where a pipeline has
    stages, that of the fullest one, which has an embedding beside its layers."""
    trainer = config.trainer
    stage = (shape.parameters - shape.embedding_parameters) / trainer.pipeline_parallel + shape.embedding_parameters
    share: float = stage / (trainer.tensor_parallel * trainer.context_parallel * trainer.data_parallel)
    return round(share * _BYTES[config.model.dtype] * (config.relay.keep_versions + 1) * _MARGIN)


def planned_trainer(config: Config, path: str, *, resting: bool = False) -> Any:
    """The :class:`megatron_rlplugin.memory.trainer_plan.TrainerPlan` of a run; ``resting``: of what is there between two steps.
    Raises ConfigError and RunError."""
    capacity = device_bytes(config, config.resources.trainer)
    room = None if capacity is None else capacity - sum(_asleep(config).values())
    settings = config.trainer.model_dump(exclude_defaults=True)
    return named_function("trainer.megatron", _PLAN)(
        path,
        settings,
        config.model.dtype,
        config.rollout.widest_context,
        room,
        differences=bool(config.relay.snapshot_every),
        overlap=config.rollout.weights_overlap,
        resting=resting,
    )


def _asleep(config: Config) -> dict[str, int]:
    """Bytes of who shares a trainer's device."""
    return {"an engine asleep": CONTEXT} if config.rollout.colocation.enabled else {}


def _trainer(config: Config, path: str, *, resting: bool = False) -> list[MemoryRow]:
    hardware = config.resources.trainer
    capacity = device_bytes(config, hardware)
    plan, beside = planned_trainer(config, path, resting=resting), _asleep(config)
    cure = f"{plan.cure}; then {_gb(plan.cured)} GB" if plan.cured else plan.cure
    if resting:
        cure = "before any step; `rl-coserve plan CONFIG --memory` tries what cures it"
    lent = {"relay": segment_bytes(config)} if config.relay.kind == "mooncake" else {}
    rows, ranks = [], trainer_ranks(config)
    for rank in plan.ranks:
        stage = "" if rank.stage == "all" else f", {rank.stage}"
        owner = f"trainer ({_ranks(ranks)}{stage})"
        if rank.imbalance:
            owner += f", experts' tokens x {rank.imbalance:g}"
        parts = {**rank.memory.device, "reserve": rank.reserve, **beside}
        named = hardware if config.resources.pools else ""
        rows.append(MemoryRow(owner, named, parts, capacity, cure, ranks / len(plan.ranks)))
    memory = plan.fullest.memory
    host = {**memory.host, **_writing(config, memory), **lent}
    together = min(ranks, config.resources.devices_per_server // config.resources.devices_per_rank)
    return [*rows, MemoryRow("trainer, each rank", "host", host, processes=ranks, together=together)]


def _writing(config: Config, memory: Any) -> dict[str, int]:
    """The copy of weights, masters, moments and reference of which a checkpoint is written."""
    device, host = memory.device, memory.host
    models = device["weights"] * (2 if config.trainer.keeps_reference else 1)
    # What the host has of an optimizer are gradients too, which are not written: a quarter.
    return {"checkpoint": models + device["optimizer"] + host.get("optimizer", 0) * 3 // 4}


def segment_bytes(config: Config) -> int:
    """What each trainer rank lends to the relay: as set, else as the model needs."""
    if config.relay.segment_mb or not config.model.path:
        return config.relay.segment_mb << 20 or SEGMENT
    return max(SEGMENT, relay_segment(config, named_function("model.path", SHAPE)(config.model.path)))


def _engines(config: Config, path: str) -> list[MemoryRow]:
    rollout, shape = config.rollout, named_function("model.path", SHAPE)(path)
    beside = {"a trainer away": CONTEXT} if config.rollout.colocation.enabled else {}
    rows = []
    kinds = Counter((rollout.group_of(number), engine_wish(config, number)[1]) for number in range(rollout.workers))
    for (group, hardware), count in kinds.items():
        engine = rollout.engine_groups[group]
        table, weights = ".".join(engine.table), _weights(engine, shape, config.model.dtype)
        capacity = device_bytes(config, hardware)
        share = engine.passed_on.get("gpu_memory_utilization", UTILIZATION)
        if engine.kv_cache_mb:
            parts = {"weights": weights, "KV": engine.kv_cache_mb << 20, "context": CONTEXT}
            cure = f"lower {table}.kv_cache_mb, or raise {table}.tensor_parallel_size"
        elif capacity is not None:
            left = max(0, round(capacity * share) - weights)
            parts = {"weights": weights, "KV, activations, graphs": left}
            _check_kv(engine, shape, config.model.dtype, left)
            cure = f"raise {table}.tensor_parallel_size, or lower {table}.gpu_memory_utilization"
        else:
            parts, cure = {"weights": weights}, ""
        named = hardware if config.resources.pools else ""
        owner, ranks = f"engine ({_ranks(engine.ranks)})", count * engine.ranks
        rows.append(MemoryRow(owner, named, {**parts, **beside}, capacity, cure, ranks))
        if capacity is not None:  # a device, whose engine has a host beside it
            arriving, together = _arriving(config, engine, shape), min(ranks, config.resources.devices_per_server)
            rows.append(MemoryRow(f"{owner}, each rank", "host", arriving, processes=ranks, together=together))
    return rows


def _caches(config: Config, path: str) -> list[MemoryRow]:
    """A site's cache has in memory what the relay has: the versions that are kept, and the one that is being written; where these
    are differences, a snapshot, and beside it what nobody knows yet."""
    relay = config.relay
    if not relay.sites:
        return []
    whole = named_function("model.path", SHAPE)(path).parameters * _BYTES[config.model.dtype]
    parts = {"a snapshot": whole} if relay.snapshot_every else {"versions": (relay.keep_versions + 1) * whole}
    return [MemoryRow(f"cache of site {name}", "host", parts) for name in relay.sites]


def _weights(engine: EngineSettings, shape: Any, dtype: str) -> int:
    """Bytes of a rank's weights on its device."""
    width = float(_BYTES[dtype])
    inner = width if (bits := quantised_rollouts.weight_bits(engine)) is None else min(width, bits / 8)
    kept: int = shape.embedding_parameters
    return round((kept * width + int(shape.parameters - kept) * inner) / engine.ranks)


def _arriving(config: Config, engine: EngineSettings, shape: Any) -> dict[str, int]:
    """What a rank of an engine has of the next version on its host, before it is loaded: its part of all of it (of differences
    less, but as much at the first), or two layers of a model that vLLM's loader does more to than copy. In full precision."""
    width = _BYTES[config.model.dtype]
    if not (shape.num_experts or shape.latent or {"quantization", "quantization_config"} & engine.passed_on.keys()):
        return {"next version": round(shape.parameters * width / engine.ranks)}
    layer = (shape.parameters - shape.embedding_parameters) / shape.num_hidden_layers
    return {"two layers of the next version": round(2 * layer * width)}


def _check_kv(engine: EngineSettings, shape: Any, dtype: str, room: int) -> None:
    """An engine whose KV cache cannot hold one sequence of its longest context does not start: vLLM says so after minutes.
    ``room``: bytes for it on each device; 0: not known. Raises ConfigError."""
    needed = longest_kv(engine, shape, dtype)
    if not 0 < room < needed:
        return
    table, sized = ".".join(engine.table), f"at least {-(-needed >> 20)}"
    fix = f"one sequence of {table}.max_model_len = {engine.max_model_len} takes {_gb(needed)} GB of KV on each device"
    if engine.kv_cache_mb:
        raise ConfigError(
            f"{table}.kv_cache_mb", engine.kv_cache_mb, f"{fix}: set 0 (what vLLM finds free), or {sized}"
        )
    fix += f", and beside the weights {_gb(room)} GB are left: raise {table}.tensor_parallel_size"
    raise ConfigError(f"{table}.max_model_len", engine.max_model_len, fix)


def longest_kv(engine: EngineSettings, shape: Any, dtype: str) -> int:
    """Bytes of KV on each device of one sequence of the longest context, at the least: layers with a window are left out."""
    layers = (shape.num_hidden_layers - len(shape.windowed_layers)) // engine.pipeline_parallel_size
    each = 2 * max(1, shape.num_key_value_heads // engine.tensor_parallel_size) * shape.head_dim
    if shape.latent is not None:  # every rank has the latents whole
        each = shape.latent.kv_lora_rank + shape.latent.qk_rope_head_dim
    width = 1 if str(engine.passed_on.get("kv_cache_dtype", "")).startswith("fp8") else _BYTES[dtype]
    tokens = -(-engine.max_model_len // engine.block_size) * engine.block_size
    return int(layers * each * width * tokens)


def _ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number} ranks"


def _gb(size: int) -> str:
    return f"{size / GB:.1f}" if size >= GB / 10 else f"{size / GB:.3f}"
