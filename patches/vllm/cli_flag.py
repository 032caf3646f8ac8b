"""Adds ``--plugin rl-coserve`` and ``--rl-*`` to every vLLM command that takes engine arguments, and acts on them."""

from __future__ import annotations

import functools
import sys
from typing import Any

from orchestrator.hooks.patch_register import Patch
from orchestrator.hooks.tested_versions import VersionRange

_MARK = "_rl_coserve_flags"


def _apply() -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm_rlplugin.command_flags import add_flags, apply_flags

    stock_add = EngineArgs.add_cli_args
    stock_from = EngineArgs.__dict__["from_cli_args"].__func__

    @functools.wraps(stock_add)
    def add_cli_args(parser: Any) -> Any:
        return add_flags(stock_add(parser))

    @functools.wraps(stock_from)
    def from_cli_args(cls: Any, args: Any) -> Any:
        apply_flags(args)
        return stock_from(cls, args)

    setattr(add_cli_args, _MARK, True)
    EngineArgs.add_cli_args = staticmethod(add_cli_args)
    EngineArgs.from_cli_args = classmethod(from_cli_args)


def _is_live() -> bool:
    module = sys.modules.get("vllm.engine.arg_utils")
    return module is not None and hasattr(module.EngineArgs.add_cli_args, _MARK)


PATCH = Patch(
    name="cli_flag",
    target="vllm.engine.arg_utils:EngineArgs",
    reason="general plugins are loaded before the parser is built, but get no seam to add arguments; without the flags "
    "given, what the wrapped functions return is what stock returns",
    tested=VersionRange(">=0.32,<0.34"),
    upstream="none: vLLM has no hook by which a plugin adds command-line arguments",
    remove_when="vLLM lets a general plugin add arguments; the environment route (VLLM_PLUGINS) works without it",
    apply=_apply,
    is_live=_is_live,
)
