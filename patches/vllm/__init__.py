"""Runtime patches of stock vLLM, one module each. There are none: full weight updates, suspend and resume are stock.

A patch that becomes necessary is a module here with a :class:`orchestrator.hooks.Patch`, listed in ``REGISTER``.
"""

from orchestrator.hooks import VLLM, PatchRegister

REGISTER = PatchRegister(VLLM)

__all__ = ["REGISTER"]
