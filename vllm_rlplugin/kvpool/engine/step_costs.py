"""What the steps of the engine in this process cost: by a profile, or learned.

Guarantees: a profile of another model shape, engine or device is one ConfigError, as is a file that is none, before the engine
serves; an SLO that serving alone cannot keep by its profile is told at start, as ConfigError too (nothing could ever be lent).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from orchestrator.api import ConfigError
from orchestrator.api.jsontext import parse_object
from orchestrator.policies.parallelism.engine_profile import (
    EngineProfile,
    LearnedCosts,
    ProfiledCosts,
    StepCosts,
    point_from_dict,
)
from orchestrator.policies.serving.admission import Slo, slo_floor
from vllm_rlplugin.options import PluginOptions

_FORMAT = 1  # of orchestrator.profiler.profile_file
_HOW = "make one with `rl-coserve profile` for this engine"


def load_costs(config: Any, options: PluginOptions, *, unknown: float, slo: Slo | None = None) -> StepCosts:
    """``config``: vLLM's; ``unknown``: seconds of what was never measured; ``slo``: of a serving engine. Raises ConfigError."""
    if not options.kv_pool_profile:
        return LearnedCosts(unknown)
    path = Path(options.kv_pool_profile)
    key, profile = _read(path)
    found = _here(config)
    differ = [
        f"its {what} is {key.get(what)!r}, here it is {value!r}"
        for what, value in found.items()
        if not _fits(key.get(what), value)
    ]
    if differ:
        raise ConfigError("kv_pool_profile", str(path), f"is a profile of something else: {'; '.join(differ)}; {_HOW}")
    costs = ProfiledCosts(profile, config.model_config.max_model_len // 2)
    try:
        why = "" if slo is None else slo_floor(slo, 1, 1, costs.prefill, costs.decode)
    except KeyError as error:
        raise ConfigError("kv_pool_profile", str(path), f"{error.args[0]}; {_HOW}") from error
    if why:
        assert slo is not None
        raise ConfigError(
            "kv_pool_ttft, kv_pool_tpot", f"{slo.ttft:g}, {slo.tpot:g}", f"cannot be met even without rollouts: {why}"
        )
    return costs


def _read(path: Path) -> tuple[dict[str, str], EngineProfile]:
    try:
        data = parse_object(path.read_bytes(), finite=True)
        if data["format"] != _FORMAT:
            raise ValueError(f"format {data['format']}")
        return dict(data["key"]), EngineProfile(point_from_dict(item) for item in data["points"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ConfigError("kv_pool_profile", str(path), f"is not a readable profile ({error!r}); {_HOW}") from error


def _here(config: Any) -> dict[str, str]:
    """As in a profile's key; of the model what precedes the digest of its shape."""
    import torch

    from vllm_rlplugin.engine_profiler import identity

    model = config.model_config
    shape = model.hf_text_config
    kind = f"{model.architectures[0]} {shape.num_hidden_layers}x{shape.hidden_size}"
    dtype = str(model.dtype).removeprefix("torch.")
    return {"model": f"{kind} {dtype} ", **identity(torch.get_num_threads())}


def _fits(said: str | None, here: str) -> bool:
    return said is not None and (said == here or (here.endswith(" ") and said.startswith(here)))
