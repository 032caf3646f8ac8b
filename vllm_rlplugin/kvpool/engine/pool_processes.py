"""Which processes an engine in a pool has, and what it cannot have beside it.

One worker runs in the process of its scheduler, as blocks and pages change between two steps. vLLM's default is that process on
GPUs, and another one on CPU, where it binds OpenMP threads to cores for it; ``uni`` by name is turned into that as well. Several
ranks have a process each, on one machine, and the executor of :mod:`vllm_rlplugin.kvpool.engine.ranked_pool`. Imports neither
vLLM nor torch.
"""

from __future__ import annotations

from typing import Any

from orchestrator.api import ConfigError
from vllm_rlplugin.kvpool.ledger.native_pages import RANKS
from vllm_rlplugin.options import KV_CONNECTOR_MODULE

RANKED = "vllm_rlplugin.kvpool.engine.ranked_pool.RankExecutor"
UNIPROC = "vllm.v1.executor.uniproc_executor.UniProcExecutor"  # named in full, vLLM's CPU platform leaves it alone
_FLAG = "--distributed-executor-backend"


def pool_executor(given: Any, *, ranks: int, on_cpu: bool) -> Any:
    """What ``--distributed-executor-backend`` is to be, where ``given`` was. Raises ConfigError for one with other processes.

    An executor of the user's own is believed: an engine whose KV cache is not in the pool ends its start in any case.
    """
    if given in ("ray", "external_launcher") or (given == "mp" and ranks == 1):
        fix = "an engine in a pool (--rl-kv-pool) uses its own executor, on one machine: leave this out"
        raise ConfigError(_FLAG, given, fix)
    if ranks > 1:
        return RANKED if given in (None, "mp") else given
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
        fix = "registers KV memory, which comes and goes in a pool (--rl-kv-pool): use --rl-kv-transfer, or drop one of the two"
        raise ConfigError("--kv-transfer-config", config.kv_connector, fix)


def check_workers(tensor: int | None, pipeline: int | None) -> int:
    """How many ranks that are. Raises ConfigError where a pool cannot have them."""
    if (pipeline or 1) > 1:
        fix = "the stages of an engine in a pool (--rl-kv-pool) would have blocks of different sizes: use tensor parallelism"
        raise ConfigError("--pipeline-parallel-size", pipeline, fix)
    if (tensor or 1) > RANKS:
        raise ConfigError(
            "--tensor-parallel-size", tensor, f"an engine in a pool (--rl-kv-pool) has at most {RANKS} ranks"
        )
    return tensor or 1
