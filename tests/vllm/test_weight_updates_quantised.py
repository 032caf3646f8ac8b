"""Engines that quantise what they load (vLLM's online methods), updated with versions in full precision: the weights, scales,
tokens and log-probs of a fresh engine of the new checkpoint, bit for bit. ``fp8_per_channel`` is what vLLM's CPU backend computes
without AMX: weights and activations in FP8, by torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

import vllm_rlplugin
from orchestrator.api import ConfigError
from orchestrator.transfer import Publisher, RelayEndpoint
from scripts.bench.probes.vllm.recompute_probe import publish, write_tiny_qwen3
from tests.vllm.test_weight_updates_in_place import Server
from vllm_rlplugin.worker.inprocess_engine import prepare_process

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

FP8: Mapping[str, Any] = MappingProxyType({"quantization": "fp8_per_channel", "dtype": "bfloat16"})
Digests = dict[str, tuple[str, int]]


@pytest.fixture(scope="module", autouse=True)
def started() -> None:
    prepare_process(1)
    vllm_rlplugin.activate()
    vllm_rlplugin.register_backend()


def live(worker: Any) -> Digests:
    """Dtype and digest of each parameter and buffer."""
    from vllm_rlplugin.weights.digests import xxh3

    model = worker.model_runner.get_model()
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: (str(tensor.dtype), xxh3(tensor)) for name, tensor in named}


def places(worker: Any) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in worker.model_runner.get_model().named_parameters()}


def state(server: Server) -> tuple[Any, Digests]:
    return server.answers(), server.call(live)


class Quantised:
    """An engine of random model 1, and a relay; model N has the weights of seed N."""

    def __init__(self, folder: Path, **endpoint: Any) -> None:
        self.folder = folder
        self.weights = {seed: write_tiny_qwen3(folder / str(seed), seed) for seed in (1, 2)}
        given = {"kind": "memory", "master": f"quantised-{folder}", "bucket_bytes": 32 << 10} | endpoint
        self.relay = RelayEndpoint(job="quantised", **given)
        self.publisher = Publisher(self.relay)
        self.version = 0

    def publish(self, seed: int) -> int:
        self.version += 1
        publish(self.publisher, self.version, self.weights[seed])
        return self.version


@pytest.mark.parametrize("more", [{}, {"kv_cache_dtype": "fp8"}], ids=["weights", "kv-too"])
def test_a_quantised_engine_is_updated_as_a_fresh_one_quantises_the_new_checkpoint(
    tmp_path: Path, more: dict[str, Any]
) -> None:
    made = Quantised(tmp_path)
    fresh = Server(tmp_path / "2", None, **FP8, **more)
    expected = state(fresh)
    fresh.close()
    server = Server(tmp_path / "1", made.relay, **FP8, **more)
    first, where = state(server), server.call(places)
    assert ("torch.float8_e4m3fn", "torch.float32") == tuple(
        first[1][f"model.layers.0.mlp.down_proj.{name}"][0] for name in ("weight", "weight_scale")
    )
    report = server.update(made.publish(2))
    assert report["touched"]["how"] == "layer by layer"
    assert state(server) == expected
    assert first[0] != expected[0]
    server.update(made.publish(1))
    assert state(server) == first
    assert server.call(places) == where, "captured graphs read there"
    server.close()
    made.publisher.close()
