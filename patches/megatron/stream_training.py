"""With ``--rl-stream-training``: each training step of a stock ``pretrain()`` is fed to a gradient stream and merged once."""

from __future__ import annotations

import functools
import sys
from typing import Any

from orchestrator.hooks.patch_register import Patch
from orchestrator.hooks.tested_versions import VersionRange

_MODULE = "megatron.training.training"
_MARK = "_rl_coserve_streams"


def _apply() -> None:
    import megatron.training.training as training
    from megatron_rlplugin.stream.stock_schedule import streamed_schedule

    stock = training.get_forward_backward_func

    @functools.wraps(stock)
    def get_forward_backward_func(*args: Any, **kwargs: Any) -> Any:
        return streamed_schedule(stock(*args, **kwargs))

    setattr(get_forward_backward_func, _MARK, True)
    training.get_forward_backward_func = get_forward_backward_func


def _is_live() -> bool:
    module = sys.modules.get(_MODULE)
    return module is not None and hasattr(module.get_forward_backward_func, _MARK)


PATCH = Patch(
    name="stream_training",
    target=f"{_MODULE}:get_forward_backward_func",
    reason="Megatron's schedules synchronise gradients at the end of the call that makes them, and stock train() takes "
    "no forward-backward function of the caller's; a script with a loop of its own needs no patch. Applied by "
    "megatron_rlplugin.install only where --rl-stream-training is given",
    tested=VersionRange(">=0.19.2,<0.19.3"),
    upstream="none: there is no request for a pluggable forward-backward function in Megatron-LM that we know of",
    remove_when="megatron.training.pretrain() takes the forward-backward function as an argument",
    apply=_apply,
    is_live=_is_live,
)
