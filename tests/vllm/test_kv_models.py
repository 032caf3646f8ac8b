"""Which models' KV can move, by vLLM's own descriptions of their caches; with engines: tests/vllm/test_kv_windows.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)

try:
    from vllm.v1.core.kv_cache_utils import unify_hybrid_kv_cache_specs
except ImportError:  # from 0.33 on
    from vllm.v1.core.kv_cache_planning import unify_hybrid_kv_cache_specs

from orchestrator.api import ConfigError
from vllm_rlplugin.kv.connector import _require_plain

SHAPE: dict[str, Any] = {"block_size": 32, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
FULL = FullAttentionSpec(**SHAPE)
WINDOW = SlidingWindowSpec(**SHAPE, sliding_window=64)
MAMBA = MambaSpec(block_size=32, shapes=((4, 4),), dtypes=(torch.float32,))


def required(*groups: Any, prefix_caching: bool = True) -> None:
    config = SimpleNamespace(cache_config=SimpleNamespace(enable_prefix_caching=prefix_caching))
    found = [KVCacheGroupSpec([f"layer.{index}"], spec) for index, spec in enumerate(groups)]
    _require_plain(config, SimpleNamespace(kv_cache_groups=found))


def test_windows_are_refused_also_where_vllm_describes_them_as_full_attention() -> None:
    required(FULL)
    layers = {"layer.0": FULL, "layer.1": WINDOW}
    unify_hybrid_kv_cache_specs(layers)  # what vLLM does where a KV connector takes one group only
    assert {type(spec) for spec in layers.values()} == {FullAttentionSpec}
    with pytest.raises(ConfigError, match="layers with a sliding window"):
        required(FullAttentionSpec.merge(list(layers.values())))


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ((WINDOW,), "layers with a sliding window"),
        ((MAMBA,), "MambaSpec"),
        ((FULL, MAMBA), "FullAttentionSpec, MambaSpec"),
        ((FULL, WINDOW), "layers with a sliding window"),
        ((), "no KV cache"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_models_are_one_error_that_names_what_they_have(groups: tuple[Any, ...], said: str) -> None:
    with pytest.raises(ConfigError, match="disable kv_transfer for this model") as refused:
        required(*groups)
    assert refused.value.field == "kv_transfer"
    assert refused.value.value == said
    with pytest.raises(ConfigError, match="moved prefixes are kept in the prefix cache"):
        required(FULL, prefix_caching=False)
