"""Models whose loader does more than copies of views, updated layer by layer from the relay: a tiny MoE, and one with MLA."""

from __future__ import annotations

import ctypes
import gc
import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

import vllm_rlplugin
from orchestrator.api import ConfigError
from orchestrator.transfer import MemoryRelay, Publisher, RelayEndpoint
from scripts.bench.probes.vllm.recompute_probe import VOCABULARY, publish
from tests.vllm.test_weight_updates_in_place import Server
from vllm_rlplugin.worker.inprocess_engine import EngineOptions, engine_config, prepare_process

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

RELOAD = "layerwise reload, tensors verified before loading"
COMMON = {"vocab_size": VOCABULARY, "max_position_embeddings": 256, "tie_word_embeddings": False}
LAYERS = 8
SLACK = 2 << 20  # buckets of the relay


def moe_config(hidden: int, experts: int) -> Any:
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        moe_intermediate_size=hidden,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_experts=experts,
        num_experts_per_tok=2,
        **COMMON,
    )


def mla_config(hidden: int = 64, layers: int = 3) -> Any:
    from transformers import DeepseekV2Config

    return DeepseekV2Config(
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        moe_intermediate_size=hidden // 2,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        head_dim=64,
        topk_method="group_limited_greedy",
        n_group=1,
        topk_group=1,
        **COMMON,
    )


def fused_config() -> Any:
    """Experts of a layer are one tensor of the checkpoint, or two."""
    from transformers import GraniteMoeConfig

    return GraniteMoeConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
        num_experts_per_tok=2,
        **COMMON,
    )


def write_model(folder: Path, config: Any, seed: int) -> dict[str, Any]:
    """A random fp32 model as a Hugging Face folder; returns its tensors."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    return {name: part for file in folder.glob("*.safetensors") for name, part in load_file(str(file)).items()}


class Layers:
    """An engine of random model 1, and a relay; model N has the weights of seed N. ``options``: of the engine."""

    def __init__(
        self, folder: Path, config: Any, options: Mapping[str, Any] = MappingProxyType({}), **endpoint: Any
    ) -> None:
        self.folder = folder
        self.seeds = {seed: write_model(folder / str(seed), config, seed) for seed in (1, 2)}
        given = {"kind": "memory", "master": f"layers-{folder}", "bucket_bytes": 32 << 10} | endpoint
        self.relay = RelayEndpoint(job="layers", **given)
        self.publisher = Publisher(self.relay)
        self.version = 0
        self.server = Server(folder / "1", self.relay, **options)

    def publish(self, seed: int) -> int:
        self.version += 1
        publish(self.publisher, self.version, self.seeds[seed])
        return self.version

    def close(self) -> None:
        self.server.close()
        self.publisher.close()


@pytest.fixture(scope="module")
def started() -> None:
    prepare_process(1)
    vllm_rlplugin.activate()
    vllm_rlplugin.register_backend()


@pytest.fixture(scope="module")
def moe(started: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Layers]:
    made = Layers(tmp_path_factory.mktemp("moe"), moe_config(64, 4))
    yield made
    made.close()


@pytest.fixture
def damaged(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """ "after": so many more objects are read whole; what comes then has a flipped bit, once for each of "times"."""
    plan = {"after": 1 << 30, "times": 0}
    stock = MemoryRelay.get_into

    def get_into(relay: MemoryRelay, key: str, buffer: memoryview) -> int:
        read = stock(relay, key, buffer)
        if len(buffer) > 20_000:  # a bucket
            plan["after"] -= 1
            if plan["after"] < 0 < plan["times"]:
                plan["times"] -= 1
                buffer[read // 2] ^= 1
        return read

    monkeypatch.setattr(MemoryRelay, "get_into", get_into)
    return plan


def test_a_moe_model_is_updated_layer_by_layer_and_answers_as_a_fresh_one(moe: Layers) -> None:
    server = moe.server
    first = server.answers()
    report = server.update(moe.publish(2))
    assert report["verified"]["how"] == RELOAD
    assert (report["touched"]["how"], report["touched"]["tensors"]) == ("layer by layer", len(moe.seeds[2]))
    assert report["touched"]["staged_bytes"] == 0
    second = server.answers()
    assert second != first
    server.update(moe.publish(1))
    assert server.answers() == first


def test_a_layer_that_does_not_come_whole_is_not_written_and_the_version_of_before_comes_back_from_the_relay(
    moe: Layers, damaged: dict[str, int]
) -> None:
    server = moe.server
    server.update(moe.publish(1))
    before, sums = server.answers(), server.call("compute_weight_checksums")
    damaged |= {"after": 12, "times": 1}  # some layers are written by then
    version = moe.publish(2)
    server.start(version)
    with pytest.raises(Exception, match="the previous weights are restored"):
        server.call("finish_weight_update")
    assert damaged["times"] == 0
    report = server.call("rl_report")
    assert (report["state"], report["kind"], report["version"]) == ("intact", "retryable", version - 1)
    assert server.call("compute_weight_checksums") == sums
    assert server.answers() == before
    assert server.update(version)["state"] == "intact"
    assert server.answers() != before


def test_without_a_way_back_the_engine_says_that_it_is_not_ready_until_an_update_succeeds(
    moe: Layers, damaged: dict[str, int]
) -> None:
    server = moe.server
    server.update(moe.publish(1))
    before = server.answers()
    damaged |= {"after": 12, "times": 1 << 20}  # of this version, and of the one before it
    server.start(moe.publish(2))
    with pytest.raises(Exception, match="could not be taken back"):
        server.call("finish_weight_update")
    damaged["times"] = 0
    assert server.call("rl_report")["state"] == "unusable"
    assert server.update(moe.publish(1))["state"] == "intact"
    assert server.answers() == before


def test_what_a_loader_writes_past_the_reload_is_found_and_the_engine_says_that_it_is_not_ready(
    moe: Layers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM's GptOssForCausalLM writes its experts: to tensors without memory, without an error."""
    from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM

    server = moe.server
    server.update(moe.publish(1))
    before, stock = server.answers(), Qwen3MoeForCausalLM.load_weights

    def load_weights(self: Any, weights: Any) -> set[str]:
        gates = {name: value for name, value in self.named_parameters() if name.endswith("mlp.gate.weight")}
        others = []
        for name, tensor in weights:
            if name in gates:
                gates[name].data.copy_(tensor)
            else:
                others.append((name, tensor))
        return {*stock(self, others), *gates}

    with monkeypatch.context() as patch:
        patch.setattr(Qwen3MoeForCausalLM, "load_weights", load_weights)
        server.start(moe.publish(2))
        with pytest.raises(Exception, match=r"Qwen3MoeForCausalLM writes past vLLM's reload: .*\.0\.mlp\.gate\.weight"):
            server.call("finish_weight_update")
        assert server.call("rl_report")["state"] == "unusable"
    assert server.update(moe.publish(1))["state"] == "intact"
    assert server.answers() == before


def test_experts_that_come_as_one_tensor_are_updated_as_a_fresh_engine_has_them(started: None, tmp_path: Path) -> None:
    made = Layers(tmp_path, fused_config())
    try:
        whole = [tensor for name, tensor in made.seeds[2].items() if ".layers.0." in name and tensor.dim() == 3]
        assert len(whole) == 2
        report = made.server.update(made.publish(2))
        assert report["touched"]["how"] == "layer by layer"
        second = made.server.answers()
        made.server.update(made.publish(1))
        assert made.server.answers() != second
    finally:
        made.close()
    fresh = Server(tmp_path / "2", None)
    assert fresh.answers() == second
    fresh.close()


REFERENCE = {"attention_config": {"backend": "CPU_MLA"}}  # AMX's takes bfloat16 alone


def test_a_model_with_mla_is_updated_layer_by_layer_and_answers_as_a_fresh_one(started: None, tmp_path: Path) -> None:
    made = Layers(tmp_path, mla_config(), REFERENCE)
    try:
        report = made.server.update(made.publish(2))
        assert report["touched"]["how"] == "layer by layer"
        second = made.server.answers()
    finally:
        made.close()
    fresh = Server(tmp_path / "2", None, **REFERENCE)
    assert fresh.answers() == second
    fresh.close()


@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="this processor has no AMX")
def test_weights_that_vllm_has_let_go_of_are_refused_before_any_update(started: None, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"attention_config\.backend = 'AMX_MLA'.*CPU_MLA"):
        Layers(tmp_path, mla_config(), {"dtype": "bfloat16"})


def test_with_experts_the_host_has_the_room_of_two_layers_at_most(started: None, tmp_path: Path) -> None:
    assert layers_held(tmp_path, moe_config(384, 8), {}) <= 2


def test_with_mla_the_host_has_the_room_of_two_layers_at_most(started: None, tmp_path: Path) -> None:
    assert layers_held(tmp_path, mla_config(768, LAYERS), REFERENCE) <= 2


def layers_held(folder: Path, config: Any, options: Mapping[str, Any]) -> float:
    """The most memory of a second update beside the live weights, less ``SLACK``, over the largest layer's."""
    made = Layers(
        folder,
        config,
        options,
        kind="fsspec",
        master=f"file://{folder / 'relay'}",
        metadata=str(folder / "metadata.sqlite"),
        bucket_bytes=1 << 20,
    )
    sizes: dict[str, int] = {}
    for name, tensor in made.seeds[2].items():
        layer = ".".join(name.split(".")[:3]) if ".layers." in name else name
        sizes[layer] = sizes.get(layer, 0) + tensor.nbytes
    largest, whole = max(sizes.values()), sum(sizes.values())
    assert whole > 7 * largest > 7 * SLACK
    made.server.update(made.publish(1))  # what an engine does once
    version = made.publish(2)
    made.seeds.clear()
    with Peak() as peak:
        report = made.server.update(version)
    made.close()
    assert report["touched"]["how"] == "layer by layer"
    return (peak.bytes - SLACK) / largest


class Peak:
    """The most memory of this process beyond what it had, as the kernel counts it."""

    def __enter__(self) -> Peak:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # else what an earlier update held is here still, and hides as much
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again
        self._begun = memory("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        self.bytes = memory("VmHWM") - self._begun


def memory(what: str) -> int:
    """Bytes of this process."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{what}:")]
    return int(line.split()[1]) << 10


def test_an_engine_of_a_run_takes_the_kernels_of_mla_that_keep_weights(started: None, tmp_path: Path) -> None:
    write_model(tmp_path / "1", mla_config(), 1)
    write_model(tmp_path / "2", moe_config(64, 4), 1)
    chosen = [
        engine_config(EngineOptions(model=str(tmp_path / name), max_model_len=256, kv_cache_mb=2))[
            0
        ].attention_config.backend
        for name in ("1", "2")
    ]
    assert [one and one.name for one in chosen] == ["CPU_MLA", None]


def test_whole_experts_are_refused_where_vllms_backend_computes_them_wrongly(started: None, tmp_path: Path) -> None:
    write_model(tmp_path, moe_config(64, 4), 1)
    options = {"model": str(tmp_path), "max_model_len": 256, "tensor_parallel_size": 2, "enable_expert_parallel": True}
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    with pytest.raises(ConfigError, match="--enable-expert-parallel = True: vLLM's CPU backend confuses global"):
        engine_config(EngineOptions.from_dict(options))
    kept = inspect.getsource(CPUUnquantizedExperts.apply).partition("-> None:")[2]
    assert "expert_map" not in kept, "vLLM passes the map on now: check_experts has no reason left"
