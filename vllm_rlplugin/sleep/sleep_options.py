"""vLLM's sleep mode for the rollout engines of a pool on CUDA: how they are started, so that their weights can leave the device.

Guarantees: an engine whose weights could not come and go is refused when it starts, by one ConfigError that names what to change.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from orchestrator.api import ConfigError
from vllm_rlplugin.options import PluginOptions


def sleep_mode_arguments(
    options: PluginOptions, environment: MutableMapping[str, str], *, on_cpu: bool
) -> dict[str, Any]:
    """What more of ``EngineArgs`` such an engine has; {} for others, and on CPU, where vLLM has no sleep mode and none is needed.
    Raises ConfigError."""
    if on_cpu or not options.kv_pool or options.kv_pool_role != "rollout":
        return {}
    _refuse_expandable_segments(environment)
    return {"enable_sleep_mode": True}


def check_sleep_mode(options: PluginOptions, vllm_config: Any, environment: MutableMapping[str, str]) -> None:
    """The same in the engine's process, for one that was not started by ``vllm serve``. Raises ConfigError."""
    if options.kv_pool_role == "rollout" and vllm_config.model_config.enable_sleep_mode:
        _refuse_expandable_segments(environment)


def _refuse_expandable_segments(environment: MutableMapping[str, str]) -> None:
    """vLLM turns them off around each memory pool of sleep mode, by writing PyTorch's whole configuration anew, and on again
    behind it, where graphs are captured: too much to rely on without having seen it."""
    from vllm.device_allocator.alloc_conf import ALLOC_CONF_ENV_VARS, expandable_segments_enabled_from_env

    if expandable_segments_enabled_from_env(environment):
        name = next(name for name in ALLOC_CONF_ENV_VARS if environment.get(name))
        fix = "the weights of a rollout engine in a pool are in vLLM's sleep mode, which PyTorch's expandable segments do not "
        raise ConfigError(name, environment[name], f"{fix}go with: take expandable_segments out of it")
