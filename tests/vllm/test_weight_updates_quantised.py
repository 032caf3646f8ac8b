"""Engines that quantise what they load (vLLM's online methods), updated with versions in full precision: the weights, scales,
tokens of a fresh engine of the new checkpoint, bit for bit. ``fp8_per_channel`` is what vLLM's CPU backend computes
without AMX: weights and activations in FP8, by torch."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

import vllm_rlplugin
from orchestrator.transfer import DeltaCodec, Publisher, RelayEndpoint
from orchestrator.transfer.job_head import FULL
from orchestrator.transfer.site_cache import SiteCache
from orchestrator.transfer.site_relay import TOKEN_FILE
from scripts.bench.probes.vllm.recompute_probe import measure, publish, write_tiny_qwen3
from tests.vllm.test_weight_updates_differences import shards, stepped
from tests.vllm.test_weight_updates_in_place import Server
from tests.vllm.test_weight_updates_layers import LAYERS, REFERENCE, Layers, mla_config, moe_config
from tests.vllm.test_weight_updates_parallel import run_child
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

    def __init__(self, folder: Path) -> None:
        self.weights = {seed: write_tiny_qwen3(folder / str(seed), seed) for seed in (1, 2)}
        self.relay = RelayEndpoint("quantised", "memory", f"quantised-{folder}", bucket_bytes=32 << 10)
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
    stored = [first[1][f"model.layers.0.mlp.down_proj.{name}"][0] for name in ("weight", "weight_scale")]
    assert stored == ["torch.float8_e4m3fn", "torch.float32"]
    report = server.update(made.publish(2))
    assert report["touched"]["how"] == "layer by layer"
    assert state(server) == expected
    assert first[0] != expected[0]
    server.update(made.publish(1))
    assert state(server) == first
    assert server.call(places) == where, "captured graphs read there"
    server.close()
    made.publisher.close()


class Dequantised:
    """A stand-in for vLLM's FP8 kernels of linear layers, which CPUs lack: the weights times their scales."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """As they are."""

    def apply_weights(self, layer: Any, x: Any, bias: Any = None) -> Any:
        if (scales := getattr(layer, "weight_scale_inv", None)) is not None:
            weight = times_scales(layer.weight, scales)
        else:
            weight = (layer.weight.float() * layer.weight_scale).t()
        return torch.nn.functional.linear(x, weight.to(x.dtype), bias)


def times_scales(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """``scales``: one, or one for each 128 x 128."""
    if scales.dim() == 2:
        scales = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: weight.shape[0], : weight.shape[1]]
    return weight.float() * scales


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> type:
    """vLLM's own quantisation, to FP8 as on GPUs, and kernels in torch's arithmetic; the class of the experts'."""
    from vllm import _custom_ops
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUExpertsFp8
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
    from vllm.model_executor.layers.quantization.online import fp8

    class Experts(CPUExpertsFp8):  # type: ignore[misc]
        """Has tensors of its own, as those of CUTLASS and FlashInfer: made of scales, and scratch once it computed."""

        def __init__(self, moe_config: Any, quant_config: Any) -> None:
            super().__init__(moe_config, quant_config)
            self.alphas = {"w1": quant_config.w1_scale * 1.0}

        def apply(self, output: Any, hidden_states: Any, w1: Any, w2: Any, topk_weights: Any, topk_ids: Any, *_: Any, **__: Any) -> None:  # fmt: skip  # noqa: E501
            self.scratch = torch.zeros_like(output)
            for row, (weights, chosen) in enumerate(zip(topk_weights, topk_ids, strict=True)):
                for share, expert in zip(weights, chosen.tolist(), strict=True):
                    gate, up = (times_scales(w1[expert], self.alphas["w1"][expert]) @ hidden_states[row].float()).chunk(
                        2
                    )
                    made = times_scales(w2[expert], self.w2_scale[expert]) @ (torch.nn.functional.silu(gate) * up)
                    self.scratch[row] += (share * made).to(output.dtype)
            output.copy_(self.scratch)

    def scaled_fp8_quant(weight: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (weight.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale

    monkeypatch.setattr(_custom_ops, "scaled_fp8_quant", scaled_fp8_quant)
    monkeypatch.setattr(fp8, "init_fp8_linear_kernel", lambda **_: Dequantised())
    monkeypatch.setattr(fp8, "select_fp8_moe_backend", lambda **_: (Fp8MoeBackend.TRITON, Experts))
    return Experts


def kernels(worker: Any) -> list[tuple[int, int, bool, bool]]:
    """Of each layer of experts: the kernel, its own tensor, whether that is of the scales that are live, and whether it reads
    the live scales themselves."""
    found = []
    for layer in worker.model_runner.get_model().modules():
        if (kernel := getattr(getattr(layer, "quant_method", None), "moe_kernel", None)) is not None:
            experts = kernel.fused_experts
            live = getattr(layer, f"w13_{layer.quant_method.weight_scale_name}")
            own = experts.alphas["w1"]
            reads = experts.quant_config.w1_scale.data_ptr() == live.data_ptr()
            found.append((id(kernel), own.data_ptr(), bool(torch.equal(own, live)), reads))
    return found


@pytest.mark.parametrize("method", ["fp8_per_tensor", "fp8_per_block"])
def test_quantised_experts_keep_their_kernel_with_the_scales_of_the_new_version_on_stand_ins_of_gpu_kernels(
    tmp_path: Path, stand_ins: type, method: str
) -> None:
    """vLLM 0.32 makes another kernel with every reload, whose tensors are not where captured graphs read."""
    options = {"quantization": method, "dtype": "bfloat16"}
    made = Layers(tmp_path, moe_config(128, 4), options)
    try:
        server = made.server
        first, before = state(server), server.call(kernels)
        assert len(before) == LAYERS
        assert {row[2:] for row in before} == {(True, True)}
        assert server.update(made.publish(2))["touched"]["how"] == "layer by layer"
        second = state(server)
        assert second[0] != first[0]
        assert server.call(kernels) == before
        server.update(made.publish(1))
        assert state(server) == first
        assert server.call(kernels) == before
    finally:
        made.close()
    fresh = Server(tmp_path / "2", None, **options)
    assert state(fresh) == second
    fresh.close()


def test_tokens_after_an_update_are_those_of_a_fresh_quantised_engine_whatever_was_in_flight(tmp_path: Path) -> None:
    result = asyncio.run(measure(1000, 7, tmp_path, **FP8))
    assert result["tokens"] >= 1000
    assert result["preempted"] > 0
    assert (result["differing"], result["repeated_differing"], result["repeated_hits"]) == (0, 0, 0)
    assert result["changed_by_update"] > result["changed_by_update_of"] / 2
    assert result["differing_without_reset"] > result["differing_without_reset_of"] / 2


def test_differences_from_the_cache_of_a_site_are_put_together_in_full_precision_and_quantised_as_from_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import save_file

    (tmp_path / "token").write_text("of-the-site-0123456789")
    monkeypatch.setenv(TOKEN_FILE, str(tmp_path / "token"))
    write_tiny_qwen3(tmp_path / "1", 1)
    versions = [{name: part.to(torch.bfloat16) for name, part in write_tiny_qwen3(tmp_path / "2", 2).items()}]
    versions += [stepped(versions[0], 1)]
    versions += [stepped(versions[1], 2)]
    save_file(versions[2], str(tmp_path / "2" / "model.safetensors"), metadata={"format": "pt"})
    relay = RelayEndpoint(
        "site",
        "fsspec",
        f"file://{tmp_path}/relay",
        f"{tmp_path}/metadata.sqlite",
        bucket_bytes=1 << 16,
        snapshot_every=9,
    )
    cache, publisher = SiteCache(f"file:{tmp_path / 'token'}"), Publisher(relay, codec=DeltaCodec())
    publisher.rollback(0)
    publisher.publish_shards(0, shards(versions[0], None), FULL)
    server = Server(tmp_path / "1", replace(relay, cache=cache.place), **FP8)
    try:
        server.update(0)
        for version in (1, 2):
            size = publisher.publish_shards(
                version, shards(versions[version], versions[version - 1]), version - 1
            ).bytes
            assert size < sum(part.nbytes for part in versions[0].values()) / 10
        report = server.update(2)  # two differences at once
        assert (report["touched"]["how"], report["past_cache"]) == ("layer by layer", "")
        found = state(server)
    finally:
        server.close()
        cache.close()
        publisher.close()
    fresh = Server(tmp_path / "2", None, **FP8)
    assert state(fresh) == found
    fresh.close()


def test_with_mla_what_is_made_of_quantised_projections_is_made_again(tmp_path: Path) -> None:
    options = {
        **REFERENCE,
        "dtype": "bfloat16",
        "quantization": "online",
        "quantization_config": {"linear": "fp8_per_channel"},
    }
    made = Layers(tmp_path, mla_config(), options)
    try:
        first = state(made.server)
        assert any("float8" in dtype for dtype, _ in first[1].values())
        made.server.update(made.publish(2))
        second = state(made.server)
        assert second[0] != first[0]
    finally:
        made.close()
    fresh = Server(tmp_path / "2", None, **options)
    assert state(fresh) == second
    fresh.close()


def test_a_layer_that_cannot_be_quantised_leaves_the_version_of_before_from_the_relay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.layers.quantization.online import fp8

    made = Quantised(tmp_path)
    server = Server(tmp_path / "1", made.relay, **FP8)
    server.update(made.publish(1))
    before, stock, calls = state(server), fp8._fp8_quant_per_channel, [0]

    def quantise(weight: Any, scale: Any) -> Any:
        calls[0] += 1
        if calls[0] == 6:
            raise RuntimeError("out of memory")
        return stock(weight, scale)

    monkeypatch.setattr(fp8, "_fp8_quant_per_channel", quantise)
    version = made.publish(2)
    server.start(version)
    with pytest.raises(Exception, match="the previous weights are restored"):
        server.call("finish_weight_update")
    assert state(server) == before
    assert server.update(version)["state"] == "intact"
    assert state(server)[0] != before[0]
    server.close()
    made.publisher.close()


def test_on_a_cpu_a_quantised_engine_that_is_deactivated_keeps_its_weights_and_says_so(tmp_path: Path) -> None:
    made = Quantised(tmp_path)
    server = Server(tmp_path / "1", made.relay, **FP8)
    first = state(server)
    away = server.call("rl_weights_away", True)
    assert 0 < away["left"] == away["bytes"]
    assert "the weights stay in memory" in away["how"]
    assert "Fp8PtpcOnlineLinearMethod changes after loading" in away["how"]
    back = server.call("rl_weights_back")
    assert (back["error"], back["damage"]) == ("", "")
    assert state(server) == first
    assert server.update(made.publish(2))["state"] == "intact"
    server.close()
    made.publisher.close()


RANKS = """
import gc, json, os, sys
from pathlib import Path

def fail_at(worker, rank, layer):
    \"\"\"On one rank the relay is out of reach once, for so many-th layer that is read; 0: never.\"\"\"
    from orchestrator.api import RetryableError
    from vllm_rlplugin.weights.layer_stream import LayerStream
    if worker.rank == rank:
        LayerStream.stock = getattr(LayerStream, "stock", LayerStream.__init__)
        count = [0]
        def __init__(self, layers, read):
            def reached(regions):
                count[0] += 1
                if count[0] == layer:
                    raise RetryableError("out of reach")
                return read(regions)
            LayerStream.stock(self, layers, reached)
        LayerStream.__init__ = __init__ if layer else LayerStream.stock

def main(settings):
    from vllm_rlplugin.worker.inprocess_engine import prepare_process
    prepare_process(1)
    import vllm_rlplugin
    vllm_rlplugin.activate()
    from orchestrator.transfer import Publisher, RelayEndpoint
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine
    from scripts.bench.probes.vllm.recompute_probe import publish, write_tiny_qwen3

    folder = Path(settings["folder"])
    weights = {seed: write_tiny_qwen3(folder / str(seed), seed) for seed in (1, 2)}
    relay, found = RelayEndpoint.from_dict(settings["relay"]), {}
    vllm_rlplugin.register_backend()

    def engine(seed):
        config = EngineArgs(
            model=str(folder / str(seed)), skip_tokenizer_init=True, generation_config="vllm", dtype="bfloat16",
            quantization="fp8_per_channel", max_model_len=256, block_size=32, kv_cache_memory_bytes=16 << 20,
            enforce_eager=True, weight_transfer_config={"backend": "rl_coserve"}, disable_log_stats=True, max_num_seqs=8,
            worker_extension_cls="vllm_rlplugin.extension.WorkerExtension", distributed_executor_backend="mp",
            tensor_parallel_size=2).create_engine_config()
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        gc.freeze()
        made = LLMEngine.from_vllm_config(config, disable_log_stats=True)
        made.collective_rpc("rl_ready")
        return made

    def update(made, version):
        try:
            made.collective_rpc("start_weight_update")
            made.collective_rpc("update_weights", kwargs={"update_info": {"version": version}})
            made.collective_rpc("finish_weight_update")
        except Exception as error:
            found["raised"] = str(error)
        return [[report["version"], report["state"], report["error"]] for report in made.collective_rpc("rl_report")]

    fresh = engine(2)
    found["fresh"] = fresh.collective_rpc("compute_weight_checksums")
    fresh.engine_core.shutdown()
    made, publisher = engine(1), Publisher(relay)
    made.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": {"endpoint": relay.to_dict()}})
    publish(publisher, 1, weights[1])
    found["first"] = update(made, 1)
    found["before"] = made.collective_rpc("compute_weight_checksums")
    publish(publisher, 2, weights[2])
    for rank in (0, 1):
        made.collective_rpc(fail_at, args=(rank, 3))
        found[f"failed{rank}"] = update(made, 2)
        found[f"restored{rank}"] = made.collective_rpc("compute_weight_checksums")
        made.collective_rpc(fail_at, args=(rank, 0))
    found["second"] = update(made, 2)
    found["after"] = made.collective_rpc("compute_weight_checksums")
    made.engine_core.shutdown()
    publisher.close()
    print("FOUND" + json.dumps(found), flush=True)

if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
"""


def test_ranks_that_quantise_slices_by_scales_of_the_whole_get_the_same_or_all_keep_the_old(tmp_path: Path) -> None:
    """They meet in a collective at each layer whose scale is of more than a slice: nobody waits there for one that failed."""
    found = asyncio.run(asyncio.wait_for(run_child(tmp_path, tp=2, pp=1, tied=False, program=RANKS), 240))
    assert found["first"] == [[1, "intact", ""]] * 2
    for rank in (0, 1):
        assert [row[:2] for row in found[f"failed{rank}"]] == [[1, "intact"]] * 2
        assert "out of reach" in found[f"failed{rank}"][rank][2]
        assert found[f"restored{rank}"] == found["before"]
    assert "the previous weights are restored" in found["raised"]
    assert found["second"] == [[2, "intact", ""]] * 2
    assert found["after"] == found["fresh"] != found["before"]
    assert found["after"][0] != found["after"][1]
