"""What an engine in a pool cannot have beside it. Its worker runs in the process of its scheduler, as blocks and pages change
between two steps.

vLLM's default is that process on GPUs, and another one on CPU, where it binds OpenMP threads to cores for it; ``uni`` by name is
turned into that as well. Imports neither vLLM nor torch.
"""

from __future__ import annotations

from typing import Any

from orchestrator.api import ConfigError
from vllm_rlplugin.options import KV_CONNECTOR_MODULE

UNIPROC = "vllm.v1.executor.uniproc_executor.UniProcExecutor"  # named in full, vLLM's CPU platform leaves it alone
_FLAG = "--distributed-executor-backend"


def single_process_executor(given: Any, *, on_cpu: bool) -> Any:
    """What ``--distributed-executor-backend`` is to be, where ``given`` was. Raises ConfigError for one with other processes.

    An executor of the user's own is believed: an engine whose KV cache is not in the pool ends its start in any case.
    """
    if given in ("mp", "ray", "external_launcher"):
        fix = "an engine in a pool (--rl-kv-pool) has its worker in the scheduler's process: leave this out"
        raise ConfigError(_FLAG, given, fix)
    return UNIPROC if on_cpu and given in (None, "uni") else given


def check_connector(config: Any) -> None:
    """``config``: vLLM's ``KVTransferConfig``, or None. Raises ConfigError for a connector, other than ours, that registers the
    KV cache's memory: a NIC or another process would reach places without a page, or pages that are another engine's by then."""
    if config is None or config.kv_connector_module_path == KV_CONNECTOR_MODULE:
        return
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    connector = KVConnectorFactory.get_connector_class(config)
    if connector.register_kv_caches is not KVConnectorBase_V1.register_kv_caches:
        fix = "registers memory that comes and goes in a pool (--rl-kv-pool): use --rl-kv-transfer, or drop one of the two"
        raise ConfigError("--kv-transfer-config", config.kv_connector, fix)


def check_workers(sizes: dict[str, Any]) -> None:
    """``sizes``: flag -> number. Raises ConfigError for the first that asks for several workers."""
    for flag, size in sizes.items():
        if (size or 1) > 1:
            raise ConfigError(flag, size, "an engine in a pool (--rl-kv-pool) has one worker so far: leave this out")
