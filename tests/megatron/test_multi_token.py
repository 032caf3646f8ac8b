"""Heads that predict several tokens: what transformers' layers compute of DeepSeek-V3's formula, beside any objective."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")
transformers = pytest.importorskip("transformers")

from safetensors.torch import save_file  # noqa: E402

from megatron_rlplugin import model, parallel_layout  # noqa: E402
from megatron_rlplugin.megatron_options import sort_options  # noqa: E402
from megatron_rlplugin.memory.planned_step import StepRequest  # noqa: E402
from megatron_rlplugin.memory.trainer_plan import answer_of  # noqa: E402
from megatron_rlplugin.trainer.learner import Learner, Rendezvous, check_trainer  # noqa: E402
from megatron_rlplugin.trainer.megatron_trainer import MegatronTrainer  # noqa: E402
from megatron_rlplugin.trainer.micro_batches import MicroBatchLimits, micro_batch, supervised_row  # noqa: E402
from megatron_rlplugin.weights import hf_bridge  # noqa: E402
from megatron_rlplugin.weights.tensor_places import tensor_pieces  # noqa: E402
from megatron_rlplugin.weights.weight_export import serving_keys  # noqa: E402
from orchestrator.api import ConfigError, TrainBatch  # noqa: E402
from orchestrator.settings.trainer_settings import TrainerSection, TrainerSettings  # noqa: E402
from scripts.bench.probes.megatron.trainer_probe import make_batch  # noqa: E402
from tests.support.family_models import VOCABULARY, file_tensors, gradients_of, write_heads  # noqa: E402
from tests.support.forked_ranks import ForkedRank, wait_for_all  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron")]
NEWEST = Path(sys.prefix) / "alternates" / "megatron-core-0.19.2"
LAYERS, LENGTHS, FACTOR = 2, (17, 9, 12, 5), 0.3
TOLERANCE = 1e-4  # of a gradient, relative to the largest of its tensor; fp32. Measured: see the print


@pytest.fixture(autouse=True)
def process_groups() -> Iterator[None]:
    yield
    parallel_layout.shutdown_parallel()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """See ``write_heads``: one head."""
    return write_heads(tmp_path_factory.mktemp("models"), "glm", 1, LAYERS)


def heads_of(count: int) -> dict[str, Any]:
    return {"mtp_num_layers": count, "mtp_loss_scaling_factor": FACTOR}


def token_ids() -> list[list[int]]:
    draw = torch.Generator().manual_seed(3)
    return [torch.randint(VOCABULARY, (length,), generator=draw).tolist() for length in LENGTHS]


def mask_of(ids: Sequence[int]) -> list[int]:
    """Of several turns: a hole in the policy's tokens."""
    return [0] * 3 + [0 if place == 4 else 1 for place in range(3, len(ids))]


def measure(
    folder: str, heads: int, given: dict[str, Any], pack: bool = False, ranks: Rendezvous | None = None
) -> list[Any]:
    """The merged gradients of what this rank holds, of the heads' loss alone."""
    from megatron.core import parallel_state

    megatron = {**heads_of(heads), **given.get("megatron", {})}
    settings = TrainerSettings(**{key: value for key, value in given.items() if key != "megatron"})
    learner = Learner(folder, settings, 4, "float32", ranks, options=sort_options(megatron))
    rows = [supervised_row(ids, mask_of(ids)) for ids in token_ids()]
    limits = MicroBatchLimits(2, pack_tokens=32 if pack else None, multiple=learner.layout.row_multiple)
    batches = [micro_batch(rows, members, limits, settings.loss_mean) for members in ((0, 1), (2, 3))]

    def loss(output: Any, batch: Any) -> Any:
        return learner.heads_loss(output, batch)

    replica, count = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    learner.begin_step()
    learner.feed(batches[replica::count], loss)
    learner.stream.merge_gradients()
    return [
        (piece.name, piece.shape, piece.dim, piece.start, piece.stop, piece.cut_from(piece.parameter.main_grad))
        for piece in tensor_pieces(learner.chunks, heads=True)
        if not piece.keeps_dtype
    ]


def expected_gradients(folder: Path, deep: Path, heads: int, mean: str) -> dict[str, Any]:
    """By transformers: DeepSeek-V3 (2412.19437), equations 21 to 25, each trajectory alone."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(deep, dtype=torch.float32, attn_implementation="eager")
    base, files = theirs.model, file_tensors(folder)
    own = {
        f"model.layers.{LAYERS + head}.{name}.weight": files[f"model.layers.{LAYERS + head}.{name}.weight"]
        for head in range(heads)
        for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    }
    for value in own.values():
        value.requires_grad_()
    epsilon = base.config.rms_norm_eps

    def norm(name: str, value: Any) -> Any:
        return torch.nn.functional.rms_norm(value, value.shape[-1:], own[name], epsilon)

    def run(layer: int, hidden: Any) -> Any:
        length = hidden.shape[1]
        place = torch.arange(length)[None]
        mask = torch.triu(torch.full((1, 1, length, length), -torch.inf), 1)
        turned = base.rotary_emb(hidden, place)
        answer = base.layers[layer](hidden, attention_mask=mask, position_ids=place, position_embeddings=turned)
        return answer if isinstance(answer, torch.Tensor) else answer[0]

    total, denominator = torch.zeros(()), 0.0
    for ids in token_ids():
        wanted, tokens = torch.tensor(mask_of(ids)), torch.tensor(ids)
        count = int(wanted.sum())
        weight = 1.0 if mean == "token-mean" else 1.0 / count
        denominator += count if mean == "token-mean" else 1
        hidden = base.embed_tokens(tokens[None, :-1])
        for layer in range(LAYERS):
            hidden = run(layer, hidden)
        hidden = base.norm(hidden)
        for head in range(heads):
            at, length = f"model.layers.{LAYERS + head}.", len(ids) - 2 - head
            ahead = base.embed_tokens(tokens[None, 1 + head : 1 + head + length])
            joined = torch.cat([norm(f"{at}enorm.weight", ahead), norm(f"{at}hnorm.weight", hidden[:, :length])], -1)
            hidden = norm(f"{at}shared_head.norm.weight", run(LAYERS + head, joined @ own[f"{at}eh_proj.weight"].T))
            logp = theirs.lm_head(hidden)[0].log_softmax(-1)
            targets = tokens[2 + head :]
            loss = -(logp.gather(-1, targets[:, None])[:, 0] * wanted[2 + head :]).sum()
            total = total + FACTOR / heads * weight * loss
    (total / denominator).backward()
    return gradients_of(theirs) | {name: value.grad for name, value in own.items()}


@pytest.mark.parametrize(
    ("family", "heads", "mean", "pack"),
    [
        ("glm", 2, "token-mean", False),
        pytest.param("glm", 1, "sequence-sum", True, marks=pytest.mark.long),
        pytest.param("deepseek-v3", 1, "sequence-mean", False, marks=pytest.mark.long),
    ],
)
def test_heads_have_the_gradients_of_transformers(
    tmp_path: Path, family: str, heads: int, mean: str, pack: bool
) -> None:
    folder, deep = write_heads(tmp_path, family, heads, LAYERS)
    found = measure(str(folder), heads, {"loss": mean}, pack)
    expected, worst = expected_gradients(folder, deep, heads, mean), 0.0
    for name, _, dim, start, stop, gradient in found:
        whole = expected[name]
        wanted = whole if dim < 0 else whole.narrow(dim, start, stop - start)
        worst = max(worst, float((gradient - wanted).abs().max() / whole.abs().max().clamp(min=1e-6)))
    print(family, f"{worst:.1e}")
    assert worst <= TOLERANCE
    assert {name for name, *_ in found} == expected.keys()
    assert all(float(value.abs().max()) > 0 for name, value in expected.items() if "eh_proj" in name or "embed" in name)


REST: list[dict[str, Any]] = [
    *({"objective": name} for name in ("dapo", "reinforce++", "rloo", "gspo", "cispo")),
    {"objective": "ppo", "normalize_advantage": False},
    {"objective": "distillation"},
]
ALONE = {"learning_rate": 1e-3, "logprob_gap_samples": 0, "micro_batch_size": 3, "micro_batch_order": "arrival"}


@pytest.mark.parametrize(
    "given",
    [{"objective": "grpo"}, *(pytest.param(one, marks=pytest.mark.long) for one in REST)],
    ids=lambda given: given["objective"],
)
def test_heads_are_trained_beside_every_objective(models: tuple[Path, Path], given: dict[str, Any]) -> None:
    folder, _ = models
    settings = {**ALONE, **given, "megatron": heads_of(1)}
    if given["objective"] == "distillation":
        settings["reference_path"] = str(folder)
    name, ends = f"model.layers.{LAYERS}.eh_proj.weight", {}
    for stream in (False, True) if given["objective"] != "reinforce++" else (False,):  # that one cannot be streamed
        trainer = MegatronTrainer(model=str(folder), settings={**settings, "stream": stream}, total_steps=2)
        before = dict(hf_bridge.export_hf(trainer._learner.chunks))[name].clone()
        batch = make_batch(0, groups=2)
        if stream:
            asyncio.run(trainer.feed(batch.samples[:3], 0))
        said = asyncio.run(trainer.train_step(batch))
        ends[stream] = dict(hf_bridge.export_hf(trainer._learner.chunks))
        assert said.values["mtp_loss"] > 2.0  # a random model knows nothing of 60 tokens
        assert not torch.equal(ends[stream][name], before)
        parallel_layout.shutdown_parallel()
    for key, value in ends.get(True, {}).items():
        assert torch.equal(value, ends[False][key]), key


def test_heads_come_back_bit_for_bit_and_no_engine_is_sent_them(tmp_path: Path) -> None:
    folder, _ = write_heads(tmp_path, "glm", 2, LAYERS)
    parallel_layout.initialize_parallel()
    chunks = model.build_model(model.read_shape(folder), "float32", options=heads_of(2))
    hf_bridge.load_hf(chunks, folder)
    files = file_tensors(folder)
    copies = {
        name for name in files if name.endswith((".head.weight", "s.2.embed_tokens.weight", "s.3.embed_tokens.weight"))
    }
    exported = dict(hf_bridge.export_hf(chunks))
    assert len(copies) == 4
    assert exported.keys() == files.keys() - copies
    assert all(torch.equal(value, files[name]) for name, value in exported.items())
    sent = {key.tensor for key in serving_keys(chunks)}
    assert sent == {name for name in exported if not name.startswith(("model.layers.2.", "model.layers.3."))}
    files[f"model.layers.{LAYERS}.shared_head.head.weight"] += 1
    save_file(files, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"^model.layers.2.shared_head.head.weight = .*is not lm_head.weight: a head"):
        hf_bridge.load_hf(chunks, folder)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"megatron": {"mtp_num_layers": 2}},
            r"^trainer.megatron.mtp_num_layers = 2: must be from 1 to 1: the model's",
        ),
        (
            {"megatron": {"mtp_loss_scaling_factor": 0.1}},
            r"^trainer.megatron.mtp_loss_scaling_factor = 0.1: goes with mtp_num_layers",
        ),
        (
            {"megatron": {"mtp_num_layers": 1}, "context_parallel": 2},
            r"^trainer.context_parallel = 2: must be unset with trainer.megatron.mtp_num_layers",
        ),
        (
            {"megatron": {"mtp_num_layers": 1, "moe_router_bias_update_rate": 0.1}},
            r"^trainer.megatron.moe_router_bias_update_rate = 0.1: must be unset with mtp_num_layers",
        ),
        (
            {"megatron": {"mtp_num_layers": 1, "mtp_detach_heads": True}},
            r"^trainer.megatron.mtp_detach_heads = True: must be unset",
        ),
    ],
)
def test_heads_that_cannot_be_trained_are_refused(
    models: tuple[Path, Path], settings: dict[str, Any], message: str
) -> None:
    folder, deep = models
    with pytest.raises(ConfigError, match=message):
        check_trainer(str(folder), TrainerSection.from_dict(settings), "float32")
    with pytest.raises(ConfigError, match=r"mtp_num_layers = 1: the model's folder has 0 such layers"):
        check_trainer(str(deep), TrainerSection.from_dict({"megatron": {"mtp_num_layers": 1}}), "float32")


@pytest.mark.long
def test_a_checkpoint_has_the_heads(models: tuple[Path, Path], tmp_path: Path) -> None:
    folder, _ = models
    settings = {"megatron": heads_of(1), "learning_rate": 1e-3, "logprob_gap_samples": 0}

    def made() -> MegatronTrainer:
        parallel_layout.shutdown_parallel()
        return MegatronTrainer(model=str(folder), settings=settings, total_steps=4)

    def step(trainer: MegatronTrainer, number: int) -> None:
        batch = make_batch(number, groups=2)
        asyncio.run(trainer.train_step(TrainBatch(number, number, batch.samples)))

    trainer = made()
    step(trainer, 0)
    asyncio.run(trainer.save(str(tmp_path / "kept")))
    asyncio.run(trainer.saved())
    step(trainer, 1)
    expected = dict(hf_bridge.export_hf(trainer._learner.chunks))
    again = made()
    assert asyncio.run(again.load(str(tmp_path / "kept"))) == 1
    step(again, 1)
    for name, value in hf_bridge.export_hf(again._learner.chunks):
        assert torch.equal(value, expected[name]), name


RANK = """
import json, sys, torch
from megatron_rlplugin.trainer.learner import Rendezvous
from tests.megatron.test_multi_token import measure
rank, world, folder, given, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4]), sys.argv[5]
torch.set_num_threads(1)
torch.save(measure(folder, 1, given, ranks=Rendezvous(rank, world, f"file://{out}/meet")), f"{out}/{rank}.pt")
"""
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "0.19.2": (1, {}),
    "data": (2, {"data_parallel": 2}),
    "tensor": (2, {"tensor_parallel": 2, "megatron": {"sequence_parallel": True}}),
    "pipeline": (2, {"pipeline_parallel": 2}),
    "expert, recomputed": (
        2,
        {
            "expert_parallel": 2,
            "data_parallel": 2,
            "megatron": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        },
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("case", LAYOUTS)
def test_every_layout_has_the_gradients_of_one_rank(models: tuple[Path, Path], tmp_path: Path, case: str) -> None:
    world, given = LAYOUTS[case]
    if not world - 1 and not NEWEST.is_dir():
        pytest.skip("the wheel of Megatron-Core 0.19.2 is not unpacked")
    folder, _ = models
    alone: dict[str, Any] = {}
    for name, shape, dim, start, stop, gradient in measure(str(folder), 1, {}):
        place = alone.setdefault(name, torch.zeros(shape))
        (place if dim < 0 else place.narrow(dim, start, stop - start)).copy_(gradient)
    words = (str(folder), json.dumps(given), str(tmp_path))
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if world == 1:
        beside = environment | {"PYTHONPATH": os.pathsep.join([str(NEWEST), os.getcwd()])}
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", RANK, "0", "1", *words], env=beside, check=True, timeout=200
        )
    else:
        ranks = [ForkedRank("-c", RANK, str(rank), str(world), *words, env=environment) for rank in range(world)]
        ended = wait_for_all(ranks, 200)
        assert [rank.code for rank in ended] == [0] * world, ended
    seen = set()
    for rank in range(world):
        for name, _, dim, start, stop, gradient in torch.load(tmp_path / f"{rank}.pt", weights_only=True):
            wanted = alone[name] if dim < 0 else alone[name].narrow(dim, start, stop - start)
            scale = alone[name].abs().max().clamp(min=1e-6)
            assert float((gradient - wanted).abs().max() / scale) <= 1e-5, name
            seen.add(name)
    assert seen == alone.keys()


@pytest.mark.long
def test_a_plan_of_memory_counts_the_heads(models: tuple[Path, Path]) -> None:
    def planned(options: dict[str, Any]) -> Any:
        request = StepRequest(str(models[0]), {"megatron": options}, "bfloat16", 0, 1, 64)
        program = ("-m", "megatron_rlplugin.memory.planned_step", json.dumps(asdict(request)))
        (ended,) = wait_for_all([ForkedRank(*program)], 200)
        assert ended.code == 0, ended.err
        return answer_of(ended.out)

    without, heads = planned({}), planned(heads_of(1))
    hidden = 128
    assert heads.parameters - without.parameters > 2 * hidden * hidden  # the projection of a head, and its layer
    assert heads.device["activations"] > without.device["activations"]
