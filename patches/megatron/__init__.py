"""Runtime patches of stock Megatron-Core, installed as ``megatron_rlplugin.patches``. None is needed on 0.16.1.

What a machine without CUDA needs is no patch of an engine's behaviour: see ``megatron_rlplugin.cpu``.
"""

from orchestrator.hooks import MEGATRON_CORE, PatchRegister

REGISTER = PatchRegister(MEGATRON_CORE)
