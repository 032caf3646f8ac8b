"""What vLLM does on a GPU before there is a scheduler, when an engine in a pool has pages for few of its blocks."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch

from vllm_rlplugin.kvpool.engine import pool_engine
from vllm_rlplugin.options import KEY


@pytest.mark.engine
def test_the_small_cache_that_graphs_are_measured_with_is_vllms_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its few blocks end the start ("one group of pages"), and the real one is a second engine of the pool."""
    import vllm.config

    cache = SimpleNamespace(num_gpu_blocks=None)
    found = SimpleNamespace(additional_config={KEY: {"kv_pool": "measured"}}, cache_config=cache)
    monkeypatch.setattr(vllm.config, "get_current_vllm_config", lambda: found)
    asked: list[Any] = []
    answer = pool_engine.allocate_kv_cache(
        lambda *given: asked.append(given) or "stock", "config", torch.device("cuda", 0), "layout", [16]
    )
    assert (answer, asked) == ("stock", [("config", torch.device("cuda", 0), "layout", [16])])
    assert pool_engine.current_pool() is None


@pytest.mark.engine
def test_vllm_notes_the_number_of_blocks_before_the_real_cache_and_not_before_the_small_one() -> None:
    """What the test above relies on, in the sources of the installed version."""
    import inspect

    from vllm.v1.worker.gpu import cudagraph_utils
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.gpu_worker import Worker

    noted, made = "cache_config.num_gpu_blocks = ", ".initialize_kv_cache("
    real = inspect.getsource(Worker.initialize_from_config)
    assert 0 < real.index(noted) < real.index(made)
    for small in (
        inspect.getsource(cudagraph_utils._init_minimal_kv_cache_for_profiling),
        inspect.getsource(GPUModelRunner._init_minimal_kv_cache_for_profiling),
    ):
        assert 0 < small.index(made) < small.index(noted)


@pytest.mark.engine
def test_blocks_of_a_warm_up_are_the_null_block_until_there_is_a_scheduler() -> None:
    """On vLLM's own block tables; its warm-up numbers its blocks from 1 on, whatever has pages."""
    from vllm.v1.worker.gpu import warmup
    from vllm.v1.worker.gpu.block_table import BlockTables

    assert "next_block_id = 1" in sys.modules[warmup.__name__].__loader__.get_source(warmup.__name__)  # type: ignore[union-attr]
    rows: list[tuple[int, int, list[int]]] = []
    tables = object.__new__(BlockTables)  # its constructor wants a device
    tables.num_kv_cache_groups = 1
    tables.num_blocks = SimpleNamespace(np=torch.zeros((1, 4), dtype=torch.int32).numpy())
    tables.block_tables = [SimpleNamespace(gpu=torch.zeros((4, 8)), stage_write=lambda *row: rows.append(row))]
    try:
        pool_engine.write_to_null_block(True)
        tables.append_block_ids(0, ([7, 8],), overwrite=True)
        pool_engine.write_to_null_block(False)
        tables.append_block_ids(0, ([7, 8],), overwrite=True)
    finally:
        pool_engine.write_to_null_block(False)
    assert rows == [(0, 0, [0, 0]), (0, 0, [7, 8])]


@pytest.mark.engine
def test_a_connector_that_registers_the_memory_of_a_pool_is_refused_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its places come and go, and what was a page of this engine's may be another's."""
    import vllm.config
    from vllm.config import KVTransferConfig, ParallelConfig

    from orchestrator.api import ConfigError
    from vllm_rlplugin.kvpool.engine.pool_processes import check_connector
    from vllm_rlplugin.options import PluginOptions, kv_transfer_config

    other = KVTransferConfig(kv_connector="MultiConnector", kv_role="kv_both")
    found = SimpleNamespace(
        additional_config={KEY: {"kv_pool": "connected"}},
        cache_config=SimpleNamespace(num_gpu_blocks=64),
        parallel_config=ParallelConfig(),
        kv_transfer_config=other,
    )
    monkeypatch.setattr(vllm.config, "get_current_vllm_config", lambda: found)
    with pytest.raises(ConfigError, match="KV memory, which comes and goes") as caught:
        pool_engine.allocate_kv_cache(
            lambda *given: pytest.fail("it was made"), "config", torch.device("cpu"), "layout"
        )
    assert caught.value.field == "--kv-transfer-config"
    for fine in (
        None,
        kv_transfer_config(PluginOptions()),
        KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both"),
    ):
        check_connector(fine)
