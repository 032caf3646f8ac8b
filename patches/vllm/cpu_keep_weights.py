"""On CPU only: keep a linear layer's plain weight beside the packed copy that it computes with."""

from __future__ import annotations

import functools
import sys
from typing import Any

from orchestrator.hooks.patch_register import Patch
from orchestrator.hooks.tested_versions import VersionRange

_MODULE = "vllm.model_executor.layers.utils"
_MARK = "_rl_coserve_keeps_weights"


def _apply() -> None:
    import vllm.model_executor.layers.utils as layers

    stock = layers.dispatch_cpu_unquantized_gemm

    @functools.wraps(stock)
    def dispatch_cpu_unquantized_gemm(layer: Any, remove_weight: bool) -> None:
        stock(layer, remove_weight=False)

    setattr(dispatch_cpu_unquantized_gemm, _MARK, True)
    layers.dispatch_cpu_unquantized_gemm = dispatch_cpu_unquantized_gemm


def _is_live() -> bool:
    module = sys.modules.get(_MODULE)
    return module is not None and hasattr(module.dispatch_cpu_unquantized_gemm, _MARK)


PATCH = Patch(
    name="cpu_keep_weights",
    target=f"{_MODULE}:dispatch_cpu_unquantized_gemm",
    reason="vLLM's CPU backend replaces a linear layer's weight by an empty tensor after packing it, so weights can "
    "neither be updated in place nor read back and verified; the kernels and their outputs stay the stock ones",
    tested=VersionRange(">=0.32,<0.34"),
    upstream="none: GPU backends keep the weights, and the CPU backend is for tests here",
    remove_when="vLLM's CPU backend keeps weights where a weight_transfer_config is given",
    apply=_apply,
    is_live=_is_live,
)
