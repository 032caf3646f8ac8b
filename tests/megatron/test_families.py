"""Every family of the table: Megatron computes what transformers computes, forward and backward, and its weights come back.

fp32, tiny random models; one rank. vLLM's side is in ``test_vllm_logits.py``, more ranks in ``test_parallel_model.py``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")
transformers = pytest.importorskip("transformers")

from safetensors.torch import save_file  # noqa: E402

from megatron_rlplugin import model, parallel_layout  # noqa: E402
from megatron_rlplugin.model_families import FAMILIES  # noqa: E402
from megatron_rlplugin.weights import hf_bridge, tensor_places  # noqa: E402
from orchestrator.api import ConfigError  # noqa: E402
from tests.support.family_models import (  # noqa: E402
    FAMILY_MODELS,
    LENGTH,
    VOCABULARY,
    file_tensors,
    gradients_of,
    write_family,
)

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron")]
TOLERANCE = 1e-4  # nats; and of a gradient, relative to the largest element of its tensor. Measured: 1e-6 to 1e-5


@pytest.fixture(scope="module", autouse=True)
def process_groups() -> Iterator[None]:
    parallel_layout.initialize_parallel()
    yield
    parallel_layout.shutdown_parallel()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    path = tmp_path_factory.mktemp("families")
    return {name: write_family(path / name, name) for name in FAMILY_MODELS}


def test_every_family_of_the_table_has_a_model_here(folders: dict[str, Path]) -> None:
    assert {model.read_shape(folder).architecture for folder in folders.values()} == set(FAMILIES)


@pytest.mark.parametrize("name", FAMILY_MODELS)
def test_log_probs_and_gradients_are_those_of_transformers(folders: dict[str, Path], name: str) -> None:
    folder = folders[name]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    (ours,) = model.build_model(model.read_shape(folder), "float32")
    hf_bridge.load_hf(ours, folder)
    tokens = torch.randint(VOCABULARY, (3, LENGTH + 1), generator=torch.Generator().manual_seed(5))
    positions = torch.arange(LENGTH).expand(3, LENGTH)

    def loss(logits: Any) -> Any:
        logp = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
        (-logp.mean()).backward()
        return logp.detach()

    expected = loss(theirs(tokens[:, :-1]).logits)
    got = loss(ours(tokens[:, :-1], positions, model.causal_mask(LENGTH)))
    assert expected.std() > 0.3, "a model that says nothing"
    assert (got - expected).abs().max() <= TOLERANCE
    gradients = gradients_of(theirs)
    seen = set()
    for piece in tensor_places.tensor_pieces(ours):
        if piece.keeps_dtype:
            continue
        whole = gradients[piece.name]
        part = whole[piece.start : piece.stop] if piece.dim == 0 else whole
        assert piece.parameter.grad is not None, piece.name
        assert (piece.cut_from(piece.parameter.grad) - part).abs().max() <= TOLERANCE * whole.abs().max(), piece.name
        seen.add(piece.name)
    assert seen == gradients.keys()


def test_heads_that_predict_several_tokens_are_left_out_and_nothing_else(tmp_path: Path) -> None:
    folder = write_family(tmp_path / "model", "glm")
    config, files = json.loads((folder / "config.json").read_text()), file_tensors(folder)
    save_file(files | {"model.layers.4.eh_proj.weight": torch.ones(3)}, folder / "model.safetensors")
    (ours,) = model.build_model(model.read_shape(folder), "float32")
    with pytest.raises(ConfigError, match=r"^model.layers.4.eh_proj.weight = .*is not a tensor of this model"):
        hf_bridge.load_hf(ours, folder)
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    (ours,) = model.build_model(model.read_shape(folder), "float32")
    hf_bridge.load_hf(ours, folder)
    assert dict(hf_bridge.export_hf(ours)).keys() == files.keys()


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "llama",
            {"architectures": ["Qwen3NextForCausalLM"]},
            r"model.architectures = .*nearest that it builds is Qwen3",
        ),
        ("mistral", {"sliding_window": "absent"}, r"model.sliding_window = None: must be in config.json"),
        ("deepseek-v3", {"topk_group": 1}, r"model.topk_group = 1: must be half"),
        ("deepseek-v3", {"scoring_func": "softmax"}, r"model.scoring_func = 'softmax': is not supported"),
        ("deepseek-v3", {"rope_interleave": False}, r"model.rope_interleave = False: is not supported"),
        ("glm", {"norm_topk_prob": False}, r"model.norm_topk_prob = False: is not supported"),
        ("gpt-oss", {"attention_bias": False}, r"model.attention_bias = False: is not supported"),
        ("gpt-oss", {"quantization_config": {"quant_method": "mxfp4"}}, r"model.quantization_config = .*converted"),
        ("gemma3", {"layer_types": ["chunked_attention"] * 4}, r"model.layer_types = .*must be 'full_attention' or"),
        ("gemma3", {"final_logit_softcapping": 30.0}, r"model.final_logit_softcapping = 30.0: is not supported"),
        ("qwen3", {"num_hidden_layers": 10**9}, r"model.num_hidden_layers = 1000000000: must be at most"),
    ],
)
def test_what_a_family_cannot_be_is_refused_by_name(
    folders: dict[str, Path], tmp_path: Path, name: str, changes: dict[str, Any], message: str
) -> None:
    config = json.loads((folders[name] / "config.json").read_text()) | changes
    kept = {key: value for key, value in config.items() if value != "absent"}
    (tmp_path / "config.json").write_text(json.dumps(kept))
    with pytest.raises(ConfigError, match=f"^{message}"):
        model.read_shape(tmp_path)


@pytest.mark.parametrize("name", FAMILY_MODELS)
def test_the_weights_of_a_family_come_back_bit_for_bit(folders: dict[str, Path], name: str) -> None:
    shape, files = model.read_shape(folders[name]), file_tensors(folders[name])
    files.pop("lm_head.weight") if shape.tie_word_embeddings and "lm_head.weight" in files else None
    assert sum(value.numel() for value in files.values()) == shape.parameters
    for dtype in ("float32", "bfloat16"):
        (ours,) = model.build_model(shape, dtype)
        hf_bridge.load_hf(ours, folders[name])
        exported = dict(hf_bridge.export_hf(ours))
        assert exported.keys() == files.keys()
        for key, value in files.items():
            wanted = torch.float32 if key.endswith("e_score_correction_bias") else getattr(torch, dtype)
            assert exported[key].is_contiguous()
            assert exported[key].dtype == wanted
            assert torch.equal(exported[key], value.to(wanted)), key
