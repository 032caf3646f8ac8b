"""Everything of rl-coserve that runs inside a vLLM process. Imports neither vLLM nor torch by itself.

Guarantees of the plugin that vLLM loads (entry point ``rl-coserve`` of ``vllm.general_plugins``):

* Idle, it changes nothing that an engine computes or is configured with: :func:`register` adds the command-line flags and
  one name to the registry of weight-transfer backends, which vLLM looks at only when a user selects that backend. No
  other patch is applied, no class replaced, no option changed.
* Asked for (``--plugin rl-coserve``, the environment, or :func:`activate` and
  :func:`vllm_rlplugin.options.engine_arguments` in a Python program), this process and those it starts are active.
* On a vLLM that was not tested it warns and stays inert; who asks for it then gets one line that names the tested range
  and exit code 2, or a ConfigError. Else :func:`register` raises nothing: vLLM would let that break every command.
"""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass
from typing import Any

from orchestrator.api import ConfigError
from orchestrator.hooks.tested_versions import VLLM, find_version
from vllm_rlplugin.engine_activation import activate, is_active, is_cpu_build, register_backend
from vllm_rlplugin.options import ACTIVE, BACKEND, PLUGIN

__all__ = [
    "ACTIVE",
    "BACKEND",
    "PLUGIN",
    "activate",
    "is_active",
    "is_cpu_build",
    "register",
    "register_backend",
    "status",
]

_FACTORY = "vllm.distributed.weight_transfer.factory"

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Process:
    """What happened in this process."""

    entry_point: bool = False  # register() was called, which only vLLM's plugin loader does
    inert: str = ""  # why the plugin stays inert


_process = _Process()


def register() -> None:
    """The entry point. Light, idempotent. On an untested vLLM: exit code 2 where the plugin was asked for, else inert."""
    _process.entry_point = True
    try:
        register_backend()
    except ConfigError as error:
        _stay_inert(error)
        return
    from vllm_rlplugin.patches.register import REGISTER

    REGISTER.apply("cli_flag")
    if is_active():
        activate()


def _stay_inert(error: ConfigError) -> None:
    from vllm_rlplugin.command_flags import exit_with_error, is_asked_before_parsing

    if is_asked_before_parsing(sys.argv, os.environ):
        exit_with_error("vllm", error)
    if not _process.inert:
        _logger.warning("rl-coserve stays inert: %s", error)
    _process.inert = str(error)


def status() -> dict[str, Any]:
    """Which hooks are live in this process, for `rl-coserve doctor`. Plain data, JSON-safe.

    Checks the hooks of those vLLM modules that this process has imported: they are the ones it uses.
    """
    from vllm_rlplugin.hookpoints import HOOKS, attribute_targets, check_loaded
    from vllm_rlplugin.patches.register import REGISTER

    found = find_version(VLLM)
    imported = _FACTORY in sys.modules
    checked, mismatches = check_loaded()
    registered = imported and BACKEND in sys.modules[_FACTORY].WeightTransferEngineFactory._registry
    return {
        "vllm": None if found is None else {"distribution": found[0], "version": found[1]},
        "tested": str(VLLM.tested),
        "inert": _process.inert,
        "active": is_active(),
        "entry_point": _process.entry_point,
        "backend_registered": registered,
        "patches": REGISTER.status(),
        "signatures_checked": checked > 0,
        "hooks_checked": checked,
        "hooks": len(HOOKS) + len(attribute_targets()),
        "signature_mismatches": list(mismatches),
    }
