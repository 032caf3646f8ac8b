"""The mapping of a checkpoint into a model is the whole truth, or there is none: loaders that do more are detected."""

from __future__ import annotations

import gc
import importlib.util
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from orchestrator.api import ConfigError  # noqa: E402
from vllm_rlplugin.engine_activation import PAST_RELOAD  # noqa: E402
from vllm_rlplugin.worker.inprocess_engine import prepare_process  # noqa: E402

Weights = Iterable[tuple[str, Any]]
Loader = Callable[[Any, Weights], Any]


@pytest.fixture(scope="module")
def mapping() -> Any:
    """The module; it imports vLLM, which wants its environment first."""
    prepare_process(1)
    from vllm_rlplugin.weights import checkpoint_mapping as mapping

    return mapping


class Model(torch.nn.Module):  # type: ignore[misc]
    """A fused matrix of two checkpoint tensors, a norm, and a padded table; ``loader`` fills it."""

    def __init__(self, loader: Loader) -> None:
        super().__init__()
        self.fused = torch.nn.Parameter(torch.zeros(6, 4), requires_grad=False)
        self.norm = torch.nn.Parameter(torch.zeros(4), requires_grad=False)
        self.table = torch.nn.Parameter(torch.zeros(8, 4), requires_grad=False)
        self.loader = loader

    def load_weights(self, weights: Weights) -> None:
        self.loader(self, weights)


SHAPES = {"a": (2, 4), "b": (8, 4), "norm": (4,), "table": (5, 4), "extra": (3,)}


def plain(model: Any, weights: Weights) -> None:
    """As vLLM's loaders do it: views and copies; rank 1 of 2 of ``b``; constant padding."""
    for name, tensor in weights:
        if name == "a":
            model.fused.data[:2].copy_(tensor)
        elif name == "b":
            model.fused.data.narrow(0, 2, 4).copy_(tensor.narrow(0, 4, 4))
        elif name == "norm":
            model.norm.data[:] = tensor
        elif name == "table":
            model.table[:5].data.copy_(tensor)
            model.table[5:].data.fill_(0)


def layout(mapping: Any) -> Any:
    return {name: mapping.TensorSpec(shape, torch.float32) for name, shape in SHAPES.items()}


def test_applying_a_mapping_is_what_the_loader_does(mapping: Any) -> None:
    model, twin = Model(plain), Model(plain)
    found = mapping.discover_mapping(model, layout(mapping))
    assert not any(parameter.any() for parameter in model.parameters())  # discovery wrote nothing
    draw = torch.Generator().manual_seed(1)
    tensors = {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}
    twin.load_weights(iter(tensors.items()))
    for item in found.slices:
        item.target.copy_(item.cut_from(tensors[item.tensor]))
    for left, right in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(left, right)
    assert [(item.tensor, item.offset, item.size, item.stride, item.parameter) for item in found.slices] == [
        ("a", 0, (2, 4), (4, 1), "fused"),
        ("b", 16, (4, 4), (4, 1), "fused"),
        ("norm", 0, (4,), (1,), "norm"),
        ("table", 0, (5, 4), (4, 1), "table"),
    ]
    assert [(item.parameter, item.value) for item in found.fills] == [("table", 0)]
    assert found.unused == ("extra",)
    assert found.elements == 24 + 4 + 32


def test_a_parameter_that_moved_or_changed_ends_the_mapping(mapping: Any) -> None:
    model = Model(plain)
    found = mapping.discover_mapping(model, layout(mapping))
    assert found.holds_for(model)
    model.norm.data = model.norm.data.clone()
    assert not found.holds_for(model)


def test_tied_weights_are_counted_once_and_may_be_transposed_targets(mapping: Any) -> None:
    def tied(model: Any, weights: Weights) -> None:
        plain(model, weights)

    model = Model(tied)
    model.head = torch.nn.Module()
    model.head.weight = model.table
    assert mapping.discover_mapping(model, layout(mapping)).elements == 24 + 4 + 32

    def transposed(model: Any, weights: Weights) -> None:
        for name, tensor in weights:
            if name == "b":
                model.fused.data.t()[:, :3].copy_(tensor[:4, :3])
                model.fused.data.t()[:, 3:].copy_(tensor[4:, :3])
            elif name in ("norm", "table"):
                plain(model, [(name, tensor)])

    model = Model(transposed)
    found = mapping.discover_mapping(model, layout(mapping))
    source = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    for item in found.slices:
        if item.tensor == "b":
            item.target.copy_(item.cut_from(source))
    assert torch.equal(model.fused.t(), torch.cat([source[:4, :3], source[4:, :3]], dim=1))


def except_for(name: str, load: Callable[[Any, Any], Any]) -> Loader:
    def loader(model: Any, weights: Weights) -> None:
        for other, tensor in weights:
            if other == name:
                load(model, tensor)
            else:
                plain(model, [(other, tensor)])

    return loader


LOADERS: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "computes": ("norm", lambda model, tensor: model.norm.data.copy_(tensor + 1)),
    "casts first": ("norm", lambda model, tensor: model.norm.data.copy_(tensor.to(torch.bfloat16))),
    "reinterprets": ("norm", lambda model, tensor: model.norm.data.copy_(tensor.view(torch.int32))),
    "stacks": ("norm", lambda model, tensor: model.norm.data.copy_(torch.cat([tensor[:2], tensor[2:]]))),
    "adds in place": ("norm", lambda model, tensor: model.norm.data.add_(tensor)),
    "reads values": ("norm", lambda model, tensor: model.norm.data.fill_(tensor.max().item())),
    "goes through other memory": ("norm", lambda model, tensor: model.norm.data.copy_(torch.zeros(4).copy_(tensor))),
    "replaces memory": ("norm", lambda model, tensor: setattr(model.norm, "data", tensor)),
    "leaves a gap": ("norm", lambda model, tensor: model.norm.data[:3].copy_(tensor[:3])),
    "leaves all out": ("norm", lambda model, tensor: None),
    "writes twice": ("a", lambda model, tensor: model.fused.data[:3].copy_(tensor[0].expand(3, 4))),
    "raises": ("norm", lambda model, tensor: tensor.undefined),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_a_loader_that_does_more_than_copy_views_is_refused(mapping: Any, kind: str) -> None:
    name, load = LOADERS[kind]
    model = Model(except_for(name, load))
    model.fused.data.fill_(7.0)
    model.norm.data.fill_(7.0)
    with pytest.raises(mapping.NoMappingError):
        mapping.discover_mapping(model, layout(mapping))
    assert bool((model.fused == 7.0).all())
    assert bool((model.norm == 7.0).all())


def test_layers_that_change_their_weights_after_loading_are_refused(mapping: Any) -> None:
    class Quantised:
        pass

    model = Model(plain)
    model.quant_method = Quantised()
    with pytest.raises(mapping.NoMappingError, match="Quantised changes after loading"):
        mapping.discover_mapping(model, layout(mapping))
    model = Model(plain)
    model.process_weights_after_loading = lambda: None
    with pytest.raises(mapping.NoMappingError, match="changes its weights"):
        mapping.discover_mapping(model, layout(mapping))
    model = Model(plain)
    model.dropped = torch.nn.Parameter(torch.empty(0), requires_grad=False)
    with pytest.raises(mapping.NoMappingError, match="empty"):
        mapping.discover_mapping(model, layout(mapping))


def test_a_reload_of_a_model_with_lora_adapters_knows_the_names_of_the_layers_inside(
    mapping: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM wraps a layer as ``base_layer``; the checkpoint, and so the loader, does not say that."""
    from vllm_rlplugin.weights import live_weights

    class Adapted(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.proj = torch.nn.Module()
            self.proj.base_layer = torch.nn.Linear(2, 2, bias=False)

        def load_weights(self, weights: Weights) -> set[str]:
            return {name for name, _ in weights}

    monkeypatch.setattr(live_weights, "initialize_layerwise_reload", lambda model: None)
    monkeypatch.setattr(live_weights, "finalize_layerwise_reload", lambda model, config: None)
    loaded = live_weights.ReloadedWeights(Adapted(), None, torch.device("cpu"))
    loaded.load(SimpleNamespace(layers=None, tensors={"proj.weight": torch.zeros(2, 2)}))  # type: ignore[arg-type]
    with pytest.raises(live_weights.WeightMismatch, match=r"lacks weights that the model has: proj\.weight"):
        loaded.load(SimpleNamespace(layers=None, tensors={}))  # type: ignore[arg-type]


def connect(
    quantization: str | None = None,
    drafts: str = "",
    acceptance: str = "standard",
    family: str = "llama",
    inner: Any = None,
) -> None:
    """A backend without an engine, to a relay."""
    from vllm_rlplugin.weights.rank_votes import RankVotes
    from vllm_rlplugin.weights.stock_receiver import StockReceiver
    from vllm_rlplugin.weights.transfer_engine import RelayInitInfo, RelayWeightTransferEngine

    engine: Any = RelayWeightTransferEngine.__new__(RelayWeightTransferEngine)
    engine._staged = engine._fetcher = engine._worker = None
    engine.ranks = RankVotes(SimpleNamespace(rank=0, world_size=1))
    engine.model_config = SimpleNamespace(quantization=quantization)
    layer = type("Layer", (torch.nn.Module,), {"__module__": f"vllm.model_executor.models.{family}"})
    engine.model = torch.nn.Sequential(layer() if inner is None else inner)
    asked = SimpleNamespace(method=drafts, rejection_sample_method=acceptance) if drafts else None
    engine.vllm_config = SimpleNamespace(speculative_config=asked, quant_config=quantization)
    engine._stock = StockReceiver(engine.vllm_config, torch.device("cpu"), engine.model)
    engine.make_plan = lambda: None
    engine.init_transfer_engine(RelayInitInfo({"job": "j", "kind": "memory", "master": "refusals"}))
    engine.shutdown()


def quantised(name: str, **attributes: Any) -> Any:
    """A layer with a method of vLLM's, which was not asked anything: "module:class"."""
    module, _, kind = name.partition(":")
    method = getattr(importlib.import_module(f"vllm.model_executor.layers.{module}"), kind)
    layer = torch.nn.Module()
    made = method.__new__(method)
    if isinstance(made, torch.nn.Module):
        torch.nn.Module.__init__(made)
    vars(made).update(attributes)
    layer.quant_method = made
    return layer


@pytest.mark.parametrize(
    ("method", "attributes"),
    [
        ("quantization.fp8:Fp8LinearMethod", {}),
        ("quantization.kv_cache:BaseKVCacheMethod", {}),  # scales that were measured with the weights of the checkpoint
        ("quantization.online.fp8:Fp8PerBlockOnlineLinearMethod", {"uses_meta_device": False}),  # from quantised ones
    ],
)
def test_weights_that_come_quantised_are_refused_with_the_relay(
    mapping: Any, method: str, attributes: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=r"quantization = 'fp8': .*serve an unquantised checkpoint.*fp8_per_block"):
        connect(quantization="fp8", inner=quantised(method, **attributes))


@pytest.mark.parametrize(
    "method",
    [
        "linear:UnquantizedLinearMethod",
        "fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod",
        "quantization.online.fp8:Fp8PerBlockOnlineLinearMethod",
        "quantization.online.int8:Int8OnlineMoEMethod",
        "quantization.online.mxfp4:Mxfp4OnlineMoEMethod",
        "quantization.online.nvfp4:Nvfp4OnlineMoEMethod",
    ],
)
def test_weights_that_vllm_quantises_as_it_loads_them_are_not_refused(mapping: Any, method: str) -> None:
    connect(quantization="online", inner=quantised(method))


def test_a_kernel_that_was_made_with_other_tensors_is_refused_and_the_old_one_is_back(mapping: Any) -> None:
    from vllm_rlplugin.weights.quantised_layers import KernelMoved, keep_kernel

    layer: Any = torch.nn.Module()
    layer.workspace = held = torch.zeros(4)
    old = SimpleNamespace(scales=[torch.ones(2)], lazy=torch.ones(3))
    layer.quant_method = SimpleNamespace(moe_kernel=old, moe_quant_config=None)
    with keep_kernel(layer):
        layer.quant_method.moe_kernel = SimpleNamespace(scales=[torch.full((2,), 5.0)])
        layer.workspace = torch.full((4,), 7.0)
    assert (layer.quant_method.moe_kernel, layer.workspace) == (old, held)
    assert (old.scales[0].tolist(), held.tolist()) == ([5.0] * 2, [7.0] * 4)
    for made in (SimpleNamespace(scales=[torch.ones(3)]), SimpleNamespace(scales=[], other=torch.ones(2))):
        with pytest.raises(KernelMoved, match="made with other tensors"), keep_kernel(layer):
            layer.quant_method.moe_kernel = made
        assert layer.quant_method.moe_kernel is old
        assert old.scales[0].tolist() == [5.0] * 2


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp", "draft_model", "medusa"])
def test_a_drafter_whose_weights_would_stay_is_refused_with_the_relay(mapping: Any, method: str) -> None:
    connect(drafts="ngram")
    with pytest.raises(ConfigError, match=f"speculative_config.method = '{method}': .* take 'ngram'"):
        connect(drafts=method)


def test_drafts_that_are_accepted_too_often_are_refused_with_the_relay(mapping: Any) -> None:
    with pytest.raises(ConfigError, match=r"rejection_sample_method = 'synthetic': .* take 'standard'"):
        connect(drafts="ngram", acceptance="synthetic")


@pytest.mark.parametrize("family", PAST_RELOAD)
def test_a_model_whose_loader_writes_past_vllms_reload_is_refused_with_the_relay(mapping: Any, family: str) -> None:
    connect()
    with pytest.raises(ConfigError, match="model = 'Sequential': vLLM's loader of it writes past"):
        connect(family=family)
    vllm = importlib.util.find_spec("vllm")
    assert vllm is not None
    assert vllm.origin is not None
    source = (Path(vllm.origin).parent / "model_executor" / "models" / f"{family}.py").read_text(encoding="utf-8")
    assert re.search(r"param(_slice)?\.copy_\(|\.weight\.data\[", source), "its loader does not: drop it from the list"


def test_one_stream_serves_the_uploads_of_all_versions(mapping: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that torch has cached for a stream is of use to no other."""
    from contextlib import nullcontext

    from vllm_rlplugin.weights import version_staging

    used: list[object] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: object())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: used.append(stream) or nullcontext())
    for _ in range(3):
        with version_staging._own_stream(torch.device("cuda", 7)):
            pass
    assert len(used) == 3
    assert len(set(used)) == 1


def test_pinned_memory_is_as_large_as_asked_for_and_goes_with_its_last_view_with_a_fake_runtime(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch's own is rounded up to a power of two, and kept: GPU hosts lost up to twice the weights."""
    from vllm_rlplugin.weights.rank_slices import pinned_memory

    calls: list[tuple[str, int, int]] = []

    class Runtime:
        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
            calls.append(("register", address, size))
            return 0

        def cudaHostUnregister(self, address: int) -> int:
            calls.append(("unregister", address, 0))
            return 0

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
    memory = pinned_memory(1000)
    view = memory[8:24].view(torch.float32)
    assert calls == [("register", memory.data_ptr(), 1000)]
    del memory
    gc.collect()
    assert len(calls) == 1
    del view
    gc.collect()
    assert [name for name, *_ in calls] == ["register", "unregister"]
    assert calls[0][1] == calls[1][1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_pinned_memory_is_pinned_on_a_gpu() -> None:
    from vllm_rlplugin.weights.rank_slices import pinned_memory

    memory = pinned_memory(1000)
    assert memory.is_pinned()
    memory.fill_(3)
    assert int(memory.to("cuda", non_blocking=True).sum()) == 3000
