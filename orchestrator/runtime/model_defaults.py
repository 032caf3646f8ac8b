"""Defaults that follow the model's size and the trainer's device, chosen here and nowhere else: for a plan, a dry run and a run.

Guarantees: what a config, an override or an argument list says is kept; a model below :data:`LARGE` parameters, the demo's among
them, has the defaults that the keys have; every choice is said in words. The resolved config that a run keeps has the values, so
that a run that continues chooses nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from orchestrator.api import ConfigError, RunError
from orchestrator.config import Config, parse_config
from orchestrator.runtime import memory_plan
from orchestrator.runtime.memory_plan import LARGE, SHAPE
from orchestrator.settings.user_functions import named_function

LEARNING_RATE = 1e-6  # of a model that can do something already, under Adam
LEAST_TOKENS = 8192  # of a micro-batch
_RECOMPUTE = "recompute_"  # what Megatron-Core's options of it begin with


def choose(config: Config) -> tuple[Config, list[str]]:
    """The config with what nobody set chosen by model and device, and what was chosen, a line each. Takes as long as the memory
    plan where the device is known. What is wrong with model or layout is left to the checks."""
    if not config.model.path:
        return config, []
    try:
        shape = named_function("model.path", SHAPE)(config.model.path)
    except (ConfigError, RunError):
        return config, []
    if shape.parameters < LARGE:
        return config, []
    chosen = list(_by_size(config, f"a model of {shape.parameters / 1e9:.1f} billion parameters"))
    config = _with(config, {key: value for key, value, _ in chosen})
    by_memory = list(_by_memory(config, shape.num_experts))
    config = _with(config, {key: value for key, value, _ in by_memory})
    said = [
        f"{key} = {_written(value)}: {why} (chosen, as it was not set)" for key, value, why in [*chosen, *by_memory]
    ]
    return config, said


def _by_size(config: Config, model: str) -> Iterator[tuple[str, Any, str]]:
    """(key, value, why) of what the number of parameters decides."""
    trainer = config.trainer
    given = trainer.model_fields_set
    if "dtype" not in config.model.model_fields_set:
        yield "model.dtype", "bfloat16", model
    if not given & {"learning_rate", "final_learning_rate"}:
        yield "trainer.learning_rate", LEARNING_RATE, model
    if not given & {"micro_batch_tokens", "pack_tokens"}:
        tokens = max(LEAST_TOKENS, config.rollout.widest_context)
        yield "trainer.micro_batch_tokens", tokens, f"{model}, whose longest row needs as much anyway"
    if "distributed_optimizer" not in given and trainer.data_parallel > 1:
        yield "trainer.distributed_optimizer", True, f"{model} on {trainer.data_parallel} replicas"
    devices = config.resources.pools or config.ray.address or Path("/dev/nvidiactl").exists()
    if devices and not config.rollout.colocation.enabled:
        for place, group in enumerate(config.rollout.engine_groups):
            key = f"rollout.engines.{place}" if config.rollout.engines else "rollout.engine"
            if "kv_cache_mb" not in group.model_fields_set:
                yield f"{key}.kv_cache_mb", 0, f"{model}, whose engines have what vLLM finds free"


def _by_memory(config: Config, experts: int) -> Iterator[tuple[str, Any, str]]:
    """Recomputation, where it makes a step fit that else would not. A mixture of experts, whose plan takes minutes, is left."""
    trainer = config.trainer
    size = memory_plan.device_bytes(config, config.resources.trainer)
    options = {**trainer.megatron_arguments, **trainer.megatron}
    if experts or size is None or any(name.startswith(_RECOMPUTE) for name in options):
        return
    try:
        plan = memory_plan.planned_trainer(config, config.model.path)
    except (ConfigError, RunError):  # a wrong layout, or no Megatron-Core here
        return
    more = {key: value for key, value in plan.changes.get("megatron", {}).items() if key not in options}
    if plan.cured and set(plan.changes) == {"megatron"} and all(name.startswith(_RECOMPUTE) for name in more):
        need, have = (f"{size / memory_plan.GB:.1f} GB" for size in (plan.fullest.total, size))
        for name, value in more.items():
            yield f"trainer.megatron.{name}", value, f"a step would take {need} of {have} without"


def _with(config: Config, values: dict[str, Any]) -> Config:
    if not values:
        return config
    data = config.model_dump(mode="json", exclude_unset=True)
    for name, value in values.items():
        *sections, key = name.split(".")
        table: Any = data
        for section in sections:
            table = table[int(section)] if isinstance(table, list) else table.setdefault(section, {})
        table[key] = value
    return parse_config(data)


def _written(value: Any) -> str:
    """As a config file has it."""
    return str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else str(value)
