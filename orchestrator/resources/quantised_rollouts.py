"""Engines of a run that round, weights that vLLM quantises as it loads them, or KV: what is refused, and what is said.

Guarantees: which methods vLLM can load a version in full precision with is read from the installed vLLM's source, not listed
here; the engine looks at its own layers all the same (:mod:`vllm_rlplugin.weights.quantised_layers`).
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from pathlib import Path

from orchestrator.api import ConfigError
from orchestrator.config import Config
from orchestrator.settings.engine_settings import EngineSettings

_ONLINE = "_ONLINE_SHORTHANDS"  # of vLLM's config/quantization.py: name -> what it quantises to
_FULL = ("auto", "bfloat16", "float16", "float32")  # dtypes of KV
_BITS = {"fp8": 8, "mxfp8": 8.25, "mxfp4": 4.25}  # of a weight, its scales with blocks of 32 included


def rounding(engine: EngineSettings) -> dict[str, object]:
    """The options by which an engine computes with fewer bits than the trainer."""
    given = engine.passed_on
    found = {name: given[name] for name in ("quantization", "quantization_config") if given.get(name)}
    if (dtype := given.get("kv_cache_dtype", "auto")) not in _FULL:
        found["kv_cache_dtype"] = dtype
    return found


def check(config: Config) -> list[str]:
    """What a run with such engines should know. Raises ConfigError for those that no version can be loaded into."""
    online, said = online_methods(), []
    for engine in config.rollout.engine_groups if config.rollout.workers else ():
        table, found = ".".join(engine.table), rounding(engine)
        method = found.get("quantization")
        if method is not None and online and method not in online:
            fix = f"versions are in full precision: take one that vLLM quantises with as it loads: {', '.join(online)}"
            raise ConfigError(f"{table}.quantization", method, fix)
        if config.rollout.weights == "nccl" and {"quantization", "quantization_config"} & found.keys():
            fix = "vLLM's own transfer leaves captured graphs with old scales of quantised experts: take 'relay' or 'collective'"
            raise ConfigError("rollout.weights", "nccl", fix)
        if found:
            options = ", ".join(f"{name} = {value!r}" for name, value in found.items())
            said.append(f"{table}: {options}: tokens are sampled by a rounded policy; {_corrected(config)}")
    return list(dict.fromkeys(said))


def _corrected(config: Config) -> str:
    trainer = config.trainer
    if trainer.ratio_to == "rollout" and trainer.tis_mode != "mask":
        how = "the clipped ratio is to it, with the log-probs that it sampled with"
    else:
        how = f"importance weights against it are on, trainer.tis_cap = {trainer.tis_cap:g}"
    alarm = f"trainer.logprob_gap_alarm = {trainer.logprob_gap_alarm:g} is for unrounded ones: set it above the first steps' gap"
    return f"{how}; {alarm}"


def weight_bits(engine: EngineSettings) -> float | None:
    """Of a weight in a linear layer as an engine holds it, where the name of the method says so; None: as the trainer has it, or
    nobody knows, and methods for experts alone. Embeddings stay as they are."""
    name = str(engine.passed_on.get("quantization") or "")
    return _BITS.get(name.partition("_")[0]) if "quantization_config" not in engine.passed_on else None


@functools.cache
def online_methods() -> tuple[str, ...]:
    """Values of ``quantization`` that the installed vLLM applies to weights in full precision; (): not known."""
    package = importlib.util.find_spec("vllm")
    if package is None or not package.submodule_search_locations:
        return ()
    source = Path(package.submodule_search_locations[0]) / "config" / "quantization.py"
    if not source.exists():
        return ()
    for made in ast.parse(source.read_text(encoding="utf-8")).body:
        match made:
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.Dict(keys=keys)) if name == _ONLINE:
                return (*(str(key.value) for key in keys if isinstance(key, ast.Constant)), "online")
    return ()
