"""All patches of vLLM, in the order in which they are applied."""

from orchestrator.hooks.patch_register import PatchRegister
from orchestrator.hooks.tested_versions import VLLM
from vllm_rlplugin.patches import cli_flag, cpu_keep_weights, engine_command, kv_range

REGISTER = PatchRegister(VLLM, (cli_flag.PATCH, engine_command.PATCH, cpu_keep_weights.PATCH, kv_range.PATCH))

__all__ = ["REGISTER"]
