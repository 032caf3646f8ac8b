"""Runtime patches of stock Megatron-Core, installed as ``megatron_rlplugin.patches``. Inert unless a flag asks for one.

``stream_training`` is for scripts that call ``megatron.training.pretrain()``, which only newer wheels have; a training
loop of one's own needs none. What a machine without CUDA needs is no patch of an engine's behaviour: see
``megatron_rlplugin.cpu``.
"""

from megatron_rlplugin.patches import stream_training
from orchestrator.hooks.patch_register import PatchRegister
from orchestrator.hooks.tested_versions import MEGATRON_CORE

REGISTER = PatchRegister(MEGATRON_CORE, (stream_training.PATCH,))

__all__ = ["REGISTER"]
