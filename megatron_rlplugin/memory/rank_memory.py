"""What one planned step of the trainer is asked, and what it answers: records of the program that runs it and of who starts it.

Guarantees: no torch, no Megatron, unless a config has an argument list of Megatron-LM's to be read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestrator.api import ConfigError
from orchestrator.settings.trainer_settings import TrainerSection

WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS, COPIES = "weights", "gradients", "optimizer", "activations", "copies"
LOGITS = "logits"
PUBLISHED = "published weights"  # on the host: what a difference is taken from, or travels beside the next step
# Bytes of what masters and moments may be; Megatron-Core takes no other.
_WIDTHS: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}


@dataclass(frozen=True, slots=True)
class StepRequest:
    """``tokens``: of a row; ``rows``: of a micro-batch. ``imbalance``: see :mod:`megatron_rlplugin.memory.fake_device`."""

    folder: str
    settings: dict[str, Any]
    dtype: str
    rank: int
    world: int
    tokens: int
    rows: int = 1
    imbalance: float = 1.0
    as_run: bool = False
    differences: bool = False  # weights are published as what the steps change
    overlap: bool = False  # a version travels beside the next step
    resting: bool = False  # no step is run: what is there between two


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of one rank, its critic's too where it has one. ``device``: by part, at the peak of a step; ``phase``: when that
    is. ``host``: by part."""

    rank: int
    parameters: int
    device: dict[str, int]
    host: dict[str, int]
    phase: str
    sharded: int  # parameters whose masters and moments this rank keeps
    phases: dict[str, int] = field(default_factory=dict)  # the peak of each
    seconds: float = 0.0

    @property
    def total(self) -> int:
        """Of the device."""
        return sum(self.device.values())


def optimizer_bytes(options: Mapping[str, Any], sharded: int, dtype: str) -> tuple[int, int]:
    """(on the device, on the host) of masters and moments of ``sharded`` parameters, Adam's.

    fp32 masters beside bf16 weights and two fp32 moments, 12 bytes a parameter; precision-aware: each in its dtype, a master
    as the 16 bits that bf16 lacks (``store_param_remainders``); on the host also the gradients, in fp32. Raises ConfigError.
    """

    def width(name: str) -> int:
        given = str(options.get(name, "float32"))
        if given not in _WIDTHS:
            raise ConfigError(f"trainer.megatron.{name}", given, f"must be one of {', '.join(_WIDTHS)}")
        return _WIDTHS[given]

    half = dtype == "bfloat16"
    master, moments = 4 if half else 0, 8
    if options.get("use_precision_aware_optimizer"):
        master = width("main_params_dtype") if half else 0
        if half and master == 4 and options.get("store_param_remainders", True):
            master = 2
        moments = width("exp_avg_dtype") + width("exp_avg_sq_dtype")
    away = float(options.get("optimizer_offload_fraction", 0.0)) if options.get("optimizer_cpu_offload") else 0.0
    on_host = round(sharded * away)
    return (sharded - on_host) * (master + moments), on_host * (4 + 4 + 8)


def flat_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The same without an argument list: what it says is in the keys and among Megatron's options. Raises ConfigError."""
    section = TrainerSection.from_dict(dict(settings))
    given = section.model_dump(exclude_defaults=True, exclude={"arguments"})
    if not section.arguments:
        return given
    from megatron_rlplugin.megatron_options import OWNED  # which imports torch

    said = {key: value for key, value in section.megatron_arguments.items() if key not in OWNED}
    return {**given, "megatron": {**said, **section.megatron}} if said else given
