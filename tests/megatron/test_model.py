"""The Megatron model computes what transformers computes, and weights cross the bridge bit for bit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from safetensors.torch import load_file, save_file  # noqa: E402

from megatron_rlplugin import (  # noqa: E402
    model,
    parallel_layout,
    tiny_model,
)
from megatron_rlplugin.weights import (  # noqa: E402
    hf_bridge,
    tensor_places,
    weight_export,
)
from orchestrator.api import ConfigError  # noqa: E402
from tests.support.forked_ranks import ForkedRank, wait_for_all  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron")]
WORDS = [f"w{index}" for index in range(61)]
SHAPE: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "layers": 3,
    "heads": 6,
    "kv_heads": 2,
    "head_dim": 16,
    "vocabulary": WORDS,
    "max_positions": 96,
    "dtype": "float32",
    "seed": 7,
}
# fp32, logits of size 4: both sides sum in fp32 but in another order. Measured 1e-6 to 3e-6.
LOGITS_TOLERANCE = 2e-5


@pytest.fixture(scope="module", autouse=True)
def process_groups() -> Iterator[None]:
    parallel_layout.initialize_parallel()
    yield
    parallel_layout.shutdown_parallel()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(tiny_model.create_qwen3(str(tmp_path / "model"), **SHAPE))


def make_family(path: Path, family: str, **changes: Any) -> Path:
    shape = SHAPE | changes
    if family == "qwen2":
        del shape["head_dim"]
        return Path(tiny_model.create_qwen2(str(path), **shape))
    if family in ("qwen3", "llama"):
        return Path(getattr(tiny_model, f"create_{family}")(str(path), **shape))
    del shape["intermediate_size"]
    experts = {"expert_intermediate_size": 24, "experts": 5, "experts_per_token": 2}
    return Path(tiny_model.create_qwen3_moe(str(path), **shape, **experts, normalize=family == "moe"))


FAMILIES = ("qwen2", "qwen3", "llama", "moe", "moe-unscaled")


def make(folder: Path, dtype: str = "float32") -> Any:
    (built,) = model.build_model(model.read_shape(folder), dtype)
    hf_bridge.load_hf(built, folder)
    return built.eval()


def edit_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def logits_of(built: Any, tokens_BS: Any) -> Any:
    positions = torch.arange(tokens_BS.shape[1]).expand_as(tokens_BS)
    with torch.no_grad():
        return built(tokens_BS, positions, model.causal_mask(tokens_BS.shape[1]))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_logits_agree_with_transformers_in_fp32(tmp_path: Path, tied: bool, family: str) -> None:
    transformers = pytest.importorskip("transformers")
    folder = make_family(tmp_path / "model", family, tied=tied)
    # Values a fresh model does not have: norms other than one, a base other than the usual.
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for name, value in weights.items():
        if "norm" in name:
            value.mul_(1 + 0.3 * torch.randn(value.shape, generator=generator))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    edit_config(folder, rope_parameters={"rope_theta": 5000.0, "rope_type": "default"}, rope_theta=5000.0)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens_BS = torch.randint(len(WORDS), (5, 40), generator=generator)
    with torch.no_grad():
        expected = theirs(tokens_BS).logits
    got = logits_of(make(folder), tokens_BS)
    assert expected.abs().max() > 1
    assert (got - expected).abs().max() <= LOGITS_TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_that_transformers_wrote_is_the_same_model(tmp_path: Path, family: str) -> None:
    transformers = pytest.importorskip("transformers")
    folder = make_family(tmp_path / "model", family)
    transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).save_pretrained(tmp_path / "saved")
    assert model.read_shape(tmp_path / "saved") == model.read_shape(folder)
    expected = dict(hf_bridge.export_hf(make(folder)))
    assert all(torch.equal(value, expected[name]) for name, value in hf_bridge.export_hf(make(tmp_path / "saved")))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES[:4])
def test_weights_come_back_bit_for_bit(tmp_path: Path, dtype: str, tied: bool, family: str) -> None:
    folder = make_family(tmp_path / "model", family, dtype=dtype, tied=tied)
    before = load_file(folder / "model.safetensors")
    exported = list(hf_bridge.export_hf(make(folder, dtype)))
    after = dict(exported)
    assert len(exported) == len(after) == len(before)
    for name, value in before.items():
        assert after[name].dtype == value.dtype
        assert after[name].is_contiguous()
        assert torch.equal(after[name], value), name


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_the_shards_that_engines_are_sent_are_the_files_tensors(tmp_path: Path, family: str) -> None:
    folder = make_family(tmp_path / "model", family, dtype="bfloat16", tied=True)
    files = load_file(folder / "model.safetensors")
    built = {name: torch.full_like(value, torch.nan) for name, value in files.items()}
    for key, value in weight_export.serving_shards([make(folder, "bfloat16")], bucket_bytes=2048):
        part = built[key.tensor]
        window = part if key.dim < 0 else part.narrow(key.dim, key.start, key.stop - key.start)
        assert torch.isnan(window).all(), "sent twice"
        window.copy_(value)
    assert all(torch.equal(built[name], value) for name, value in files.items())


def test_a_folder_in_several_files_loads_the_same(folder: Path) -> None:
    expected = dict(hf_bridge.export_hf(make(folder)))
    weights = load_file(folder / "model.safetensors")
    names = sorted(weights)
    for index, part in enumerate((names[:9], names[9:])):
        save_file({name: weights[name] for name in part}, folder / f"part-{index}.safetensors")
    where = {name: f"part-{int(name not in names[:9])}.safetensors" for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    (folder / "model.safetensors").unlink()
    again = dict(hf_bridge.export_hf(make(folder)))
    assert all(torch.equal(again[name], value) for name, value in expected.items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("missing", r"^model.layers.1.self_attn.k_proj.weight = .*is missing"),
        ("extra", r"^model.layers.9.extra.weight = .*is not a tensor of this model"),
        ("shape", r"^model.norm.weight = \(47,\): the model's shape is \(48,\)"),
    ],
)
def test_files_that_do_not_fit_are_refused_before_a_weight_changes(folder: Path, change: str, message: str) -> None:
    built = make(folder)
    before = dict(hf_bridge.export_hf(built))
    weights = {name: value + 1 for name, value in load_file(folder / "model.safetensors").items()}
    if change == "missing":
        del weights["model.layers.1.self_attn.k_proj.weight"]
    elif change == "extra":
        weights["model.layers.9.extra.weight"] = torch.zeros(1)
    else:
        weights["model.norm.weight"] = torch.zeros(47)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        hf_bridge.load_hf(built, folder)
    assert all(torch.equal(value, before[name]) for name, value in hf_bridge.export_hf(built))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "model.architectures"),
        ({"architectures": []}, "model.architectures"),
        ({"attention_bias": True}, "model.attention_bias"),
        ({"hidden_act": "gelu"}, "model.hidden_act"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "model.rope_type"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 4.0}}, "model.rope_type"),  # a Qwen3 has none
        ({"mlp_bias": True}, "model.mlp_bias"),
        ({"partial_rotary_factor": 0.5}, "model.partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "fp8"}}, "model.quantization_config"),
        ({"head_dim": None}, "model.head_dim"),
        ({"vocab_size": 0}, "model.vocab_size"),
        ({"num_key_value_heads": 4}, "model.num_key_value_heads"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "model.layer_types"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(folder: Path, changes: dict[str, Any], field: str) -> None:
    edit_config(folder, **changes)
    with pytest.raises(ConfigError, match=f"^{field} = "):
        model.read_shape(folder)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"mlp_only_layers": [3]}, "model.mlp_only_layers"),
        ({"mlp_only_layers": [0, 1, 2]}, "model.num_hidden_layers"),
        ({"num_experts": None}, "model.num_experts"),
        ({"num_experts_per_tok": 6}, "model.num_experts_per_tok"),
    ],
)
def test_a_mixture_that_cannot_be_computed_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], field: str
) -> None:
    folder = make_family(tmp_path / "model", "moe")
    edit_config(folder, **changes)
    with pytest.raises(ConfigError, match=f"^{field} = "):
        model.read_shape(folder)


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def test_the_scaled_rope_of_llama_3_agrees_with_transformers_in_fp32(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = make_family(tmp_path / "model", "llama", head_dim=64, max_positions=16384)
    tokens_BS = torch.randint(len(WORDS), (1, 700), generator=torch.Generator().manual_seed(1))
    unscaled = logits_of(make(folder), tokens_BS)
    edit_config(folder, rope_parameters=LLAMA3, rope_theta=500000.0)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = theirs(tokens_BS).logits
    got = logits_of(make(folder), tokens_BS)
    assert (got - expected).abs().max() <= LOGITS_TOLERANCE
    assert (got - unscaled).abs().max() > 100 * LOGITS_TOLERANCE, "the scaling is not seen by this test"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"rope_type": "yarn"}, "model.rope_type"),
        ({"factor": None}, "model.rope_parameters.factor"),
        ({"high_freq_factor": 1.0}, "model.rope_parameters.high_freq_factor"),
        ({"original_max_position_embeddings": None}, "model.rope_parameters.original_max_position_embeddings"),
        ({"partial_rotary_factor": 0.5}, "model.partial_rotary_factor"),
    ],
)
def test_a_scaling_of_rope_that_cannot_be_computed_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], field: str
) -> None:
    folder = make_family(tmp_path / "model", "llama")
    edit_config(folder, rope_parameters=LLAMA3 | changes)
    with pytest.raises(ConfigError, match=f"^{field} = "):
        model.read_shape(folder)


def test_an_old_llama_folder_is_read_with_the_defaults_of_its_family(tmp_path: Path) -> None:
    folder = make_family(tmp_path / "model", "llama", kv_heads=6, head_dim=8)
    expected = model.read_shape(folder)
    config = json.loads((folder / "config.json").read_text())
    for name in ("num_key_value_heads", "head_dim", "rope_theta", "rope_parameters"):
        del config[name]
    (folder / "config.json").write_text(json.dumps(config))
    assert model.read_shape(folder) == expected
    assert (expected.num_key_value_heads, expected.head_dim, expected.rope.theta) == (6, 8, 10000.0)


def test_a_folder_without_a_model_is_refused(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config.json"):
        model.read_shape(tmp_path / "nowhere")
    built = make(folder)
    (folder / "model.safetensors").write_bytes(b"not a safetensors file")
    with pytest.raises(ConfigError, match="cannot be read"):
        hf_bridge.load_hf(built, folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"has no model.safetensors"):
        hf_bridge.load_hf(built, folder)


def test_one_mask_is_kept_however_many_widths_there_were() -> None:
    for width in (3, 17, 9, 12):
        mask = model.causal_mask(width)
        assert mask is not None
        assert torch.equal(mask[0, 0], torch.ones(width, width, dtype=torch.bool).triu(1))
    assert len(model._mask) == 1


def test_padding_behind_a_sequence_changes_nothing_in_it(folder: Path) -> None:
    built = make(folder)
    tokens = torch.randint(len(WORDS), (1, 20), generator=torch.Generator().manual_seed(2))
    padded = torch.cat([tokens, torch.zeros(1, 30, dtype=torch.long)], 1)
    difference = (logits_of(built, padded)[:, :20] - logits_of(built, tokens)).abs().max()
    assert difference <= 1e-5


def test_a_tiny_model_is_a_function_of_its_arguments(tmp_path: Path) -> None:
    folders = [
        Path(tiny_model.create_qwen3(str(tmp_path / name), **SHAPE | {"seed": seed}))
        for name, seed in (("a", 3), ("b", 3), ("c", 4))
    ]
    for file in ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"):
        a, b, c = ((folder / file).read_bytes() for folder in folders)
        assert a == b
        assert (a == c) == (file != "model.safetensors")


def test_the_tiny_tokenizer_maps_words_to_their_indices(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.encode("w3 w60 w0", add_special_tokens=False) == [3, 60, 0]
    assert tokenizer.decode([5, 6]) == "w5 w6"
    assert len(tokenizer) == len(WORDS)


TWO_RANKS = """
import sys, torch
from megatron_rlplugin import model
from megatron_rlplugin.weights import hf_bridge as bridge
from megatron_rlplugin import parallel_layout as parallel
rank, port, folder, out = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
torch.set_num_threads(1)
parallel.initialize_parallel(parallel.ParallelLayout(tensor=2), rank, 2, f"file://{port}")
(built,) = model.build_model(model.read_shape(folder), "float32", parallel.ParallelLayout(tensor=2), parallel_output=False)
bridge.load_hf(built, folder)
tokens = torch.arange(24).view(2, 12)
with torch.no_grad():
    logits = built(tokens, torch.arange(12).expand(2, 12), model.causal_mask(12))
torch.save({"logits": logits, "weights": dict(bridge.export_hf(built))}, f"{out}/rank{rank}.pt")
"""


def test_two_tensor_parallel_ranks_hold_the_same_model(tmp_path: Path) -> None:
    words = [f"w{index}" for index in range(60)]
    folder = Path(tiny_model.create_qwen3(str(tmp_path / "model"), **SHAPE | {"vocabulary": words}))
    arguments = [str(tmp_path / "rendezvous"), str(folder), str(tmp_path)]
    ended = wait_for_all([ForkedRank("-c", TWO_RANKS, str(rank), *arguments) for rank in range(2)], 120)
    assert [rank.code for rank in ended] == [0, 0], ended
    expected = logits_of(make(folder), torch.arange(24).view(2, 12))
    weights = load_file(folder / "model.safetensors")
    for index in range(2):
        found = torch.load(tmp_path / f"rank{index}.pt", weights_only=True)
        assert (found["logits"] - expected).abs().max() <= LOGITS_TOLERANCE
        assert found["weights"].keys() == weights.keys()
        assert all(torch.equal(found["weights"][name], value) for name, value in weights.items())


@pytest.mark.parametrize(
    ("family", "layout", "message"),
    [
        ("qwen3", {"tensor": 2}, r"^model.vocab_size = 61: must be a multiple of TP = 2"),
        ("qwen3", {"tensor": 3}, r"^model.vocab_size = 61: must be a multiple of TP = 3"),
        ("qwen3", {"pipeline": 2}, r"^model.num_hidden_layers = 3: must be a multiple of the 2 pipeline stages"),
        ("qwen3", {"expert": 2}, r"^layout.expert = 2: Qwen3ForCausalLM has no experts"),
        ("moe", {"expert": 2}, r"^model.num_experts = 5: must be a multiple of EP = 2"),
        ("moe-60", {"tensor": 2}, r"^layout.sequence = False: a mixture of experts with tensor parallelism"),
        ("qwen3-60", {"tensor": 4}, r"^model.num_key_value_heads = 2: must be a multiple of TP = 4"),
    ],
)
def test_a_layout_that_does_not_fit_the_model_is_refused(
    tmp_path: Path, family: str, layout: dict[str, int], message: str
) -> None:
    family, _, words = family.partition("-")
    folder = make_family(tmp_path / "model", family, vocabulary=WORDS[: int(words or 61)])
    with pytest.raises(ConfigError, match=message):
        model.build_model(model.read_shape(folder), "float32", parallel_layout.ParallelLayout(**layout))


@pytest.mark.parametrize(
    ("layout", "field"),
    [
        ({"tensor": 0}, "layout.tensor"),
        ({"virtual": 2}, "layout.virtual"),
        ({"pipeline": 2, "virtual": 1}, "layout.virtual"),
        ({"sequence": True}, "layout.sequence"),
    ],
)
def test_a_layout_that_contradicts_itself_is_refused(layout: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field} = "):
        parallel_layout.ParallelLayout(**layout)


def test_a_piece_speaks_of_any_tensor_shaped_as_its_parameter(tmp_path: Path) -> None:
    folder = make_family(tmp_path / "model", "qwen2")
    built = make(folder)
    files = load_file(folder / "model.safetensors")
    held = {piece.name: piece for piece in tensor_places.tensor_pieces(built)}
    assert held.keys() == files.keys()
    for name, piece in held.items():
        assert (piece.dim, piece.start, piece.stop, piece.replicated, piece.holder) == (
            -1,
            0,
            files[name].shape[0],
            (),
            (0, 1),
        )
        assert torch.equal(piece.cut_from(-piece.parameter.detach()), -files[name])
        piece.write(files[name] + 1)
        assert torch.equal(piece.read(), files[name] + 1)
        with pytest.raises(ValueError, match=name):
            piece.write(torch.zeros(3, 3, 3))


def test_a_parameter_without_a_place_is_refused_by_name(folder: Path) -> None:
    built = make(folder)
    built.decoder.layers[1].mlp.register_parameter("extra", torch.nn.Parameter(torch.zeros(2)))
    with pytest.raises(ConfigError, match=r"^model = .*decoder.layers.1.mlp.extra.*no Hugging Face place"):
        list(tensor_places.tensor_pieces(built))
