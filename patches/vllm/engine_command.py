"""Adds the method ``EngineCore.rl_coserve(command, arguments)``: how the front end reaches our scheduler."""

from __future__ import annotations

from typing import Any

from orchestrator.hooks.patch_register import Patch
from orchestrator.hooks.tested_versions import VersionRange

_METHOD = "rl_coserve"


def _rl_coserve(self: Any, command: str, arguments: dict[str, Any]) -> Any:
    """One command to the scheduler, between two engine steps (vLLM's UTILITY call takes methods of EngineCore only)."""
    if command.startswith("kv_"):
        from vllm_rlplugin.kv import commands

        return commands.run_command(self, command, arguments)
    answer = self.scheduler.rl_command(command, arguments)
    if command == "advance_version" and self.vllm_config.model_config.is_multimodal_model:
        self.reset_encoder_cache()  # the workers' half of it: embeddings that old weights made
    return answer


def _apply() -> None:
    from vllm.v1.engine.core import EngineCore

    setattr(EngineCore, _METHOD, _rl_coserve)


def _is_live() -> bool:
    import sys

    module = sys.modules.get("vllm.v1.engine.core")
    return module is not None and getattr(module.EngineCore, _METHOD, None) is _rl_coserve


PATCH = Patch(
    name="engine_command",
    target="vllm.v1.engine.core:EngineCore",
    reason="call_utility_async reaches methods of EngineCore by name, and none of the stock ones passes a call on to the "
    "scheduler; this adds a method and overrides nothing",
    tested=VersionRange(">=0.32,<0.34"),
    upstream="none: vLLM has plugin seams for workers (worker_extension_cls) and schedulers, not for EngineCore",
    remove_when="vLLM lets a scheduler class register utility methods",
    apply=_apply,
    is_live=_is_live,
)
