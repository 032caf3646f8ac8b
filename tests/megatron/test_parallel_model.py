"""Cut over ranks, the model stays the model: every layout has the logits, gradients and weights of transformers.

Ranks are processes that talk gloo. One start of the ranks runs several cases, one after the other.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")
transformers = pytest.importorskip("transformers")

from megatron_rlplugin import tiny_model  # noqa: E402
from tests.support.family_models import file_tensors, gradients_of, write_family  # noqa: E402
from tests.support.forked_ranks import ForkedRank, wait_for_all  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron")]
# fp32; the two sides sum in another order. Measured: logits (of size 4) to 4e-6, gradients (relative to the largest
# element of the tensor) to 5e-6.
LOGITS_TOLERANCE = 1e-4
GRADIENT_TOLERANCE = 1e-4
LENGTH = 12  # a multiple of 2: sequence parallelism cuts it
BATCH = 4

SHAPE: dict[str, Any] = {
    "hidden_size": 48,
    "layers": 4,
    "heads": 6,
    "kv_heads": 2,
    "vocabulary": [f"w{index}" for index in range(60)],
    "max_positions": 32,
    "dtype": "float32",
    "seed": 7,
}
MIXTURE = {"head_dim": 16, "expert_intermediate_size": 24, "experts": 4, "experts_per_token": 2}

RANK = """
import json, sys, torch
import torch.distributed as dist
from megatron_rlplugin import model
from megatron_rlplugin.weights import hf_bridge as bridge
from megatron_rlplugin import parallel_layout as parallel
from megatron_rlplugin.weights import tensor_places as places
rank, world, cases, out = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]), sys.argv[4]
torch.set_num_threads(1)
BATCH, LENGTH = 4, 12


def run(name, folder, layout):
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func

    chunks = model.build_model(model.read_shape(folder), "float32", layout)
    bridge.load_hf(chunks, folder)
    exported = dict(bridge.export_hf(chunks))
    config = model.unwrap(chunks[0]).config
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    wrapped = [DistributedDataParallel(config, ddp, chunk) for chunk in chunks]
    config.finalize_model_grads_func = finalize_model_grads
    tokens = torch.randint(60, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    replicas = parallel_state.get_data_parallel_world_size()
    mine = tokens.chunk(replicas)[parallel_state.get_data_parallel_rank()].split(1)  # micro-batches of one
    logits = []

    def forward_step(iterator, chunk, with_labels):
        part = next(iterator)
        inputs, labels = part[:, :-1], part[:, 1:]
        positions = torch.arange(LENGTH).expand_as(inputs)
        output = chunk(inputs, positions, model.causal_mask(LENGTH), labels=labels if with_labels else None)
        if not with_labels:
            return output, lambda value, non_loss_data=True: logits.append(value.detach().clone())
        return output, lambda losses: (losses.sum(), torch.tensor(losses.numel(), dtype=torch.int), {})

    def schedule(with_labels):
        iterators = [iter(mine) for _ in chunks]
        get_forward_backward_func()(
            forward_step_func=lambda iterator, chunk: forward_step(iterator, chunk, with_labels),
            data_iterator=iterators if len(chunks) > 1 else iterators[0], model=wrapped, num_microbatches=len(mine),
            seq_length=LENGTH, micro_batch_size=1, forward_only=not with_labels, collect_non_loss_data=not with_labels,
        )

    schedule(False)
    for chunk in wrapped:
        chunk.zero_grad_buffer()
    schedule(True)
    settings = OptimizerConfig(optimizer="adam", lr=1e-3, clip_grad=1.0, params_dtype=torch.float32)
    optimizer = get_megatron_optimizer(settings, wrapped, use_gloo_process_groups=False)
    optimizer.prepare_grads()
    held = [
        {"name": p.name, "dim": p.dim, "start": p.start, "stop": p.stop, "holder": p.holder, "shape": p.shape,
         "replicated": p.replicated, "gradient": None if p.keeps_dtype else p.cut_from(p.parameter.main_grad)}
        for p in places.tensor_pieces(chunks)
    ]
    torch.save({
        "logits": torch.cat(logits) if logits else None,
        "norm": optimizer.get_grad_norm(), "tensor": parallel_state.get_tensor_model_parallel_rank(),
        "data": parallel_state.get_data_parallel_rank(),
        "weights": exported, "pieces": held,
    }, f"{out}/{name}.rank{rank}.pt")


for index, (name, folder, options) in enumerate(cases):
    layout = parallel.ParallelLayout(**options)
    init = f"file://{out}/rendezvous"
    parallel.initialize_parallel(layout, rank, world, init)
    run(name, folder, layout)
    dist.barrier()
    parallel.leave_parallel()
"""


def make_folders(path: Path) -> dict[str, str]:
    folders = {}
    for tied in (False, True):
        suffix = "-tied" if tied else ""
        qwen2 = {**SHAPE, "intermediate_size": 80, "tied": tied}
        folders["qwen2" + suffix] = tiny_model.create_qwen2(str(path / f"qwen2{suffix}"), **qwen2)
        qwen3 = {**qwen2, "head_dim": 16}
        folders["qwen3" + suffix] = tiny_model.create_qwen3(str(path / f"qwen3{suffix}"), **qwen3)
        folders["llama" + suffix] = tiny_model.create_llama(str(path / f"llama{suffix}"), **qwen3)
    for normalize in (True, False):
        name = "moe" if normalize else "moe-unscaled"
        folders[name] = tiny_model.create_qwen3_moe(str(path / name), **SHAPE, **MIXTURE, normalize=normalize)
    return folders


def by_transformers(folder: str) -> tuple[Any, dict[str, Any]]:
    """Logits [BATCH, LENGTH, vocabulary] and the gradient of the mean cross-entropy, by Hugging Face name."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    tokens = torch.randint(60, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    logits = theirs(tokens[:, :-1]).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    return logits.detach(), gradients_of(theirs)


def run_ranks(world: int, cases: list[tuple[str, str, dict[str, Any]]], out: Path, beside: Path | None = None) -> None:
    """``beside``: the folder of another Megatron-Core, in place of the installed one."""
    arguments = [str(world), json.dumps(cases), str(out)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | ({"PYTHONPATH": str(beside)} if beside else {})
    if beside is None:
        ended = wait_for_all(
            [ForkedRank("-c", RANK, str(rank), *arguments, env=environment) for rank in range(world)], 270
        )
        assert [rank.code for rank in ended] == [0] * world, ended
        return
    ranks = [
        subprocess.Popen([sys.executable, "-W", "ignore", "-c", RANK, str(rank), *arguments], env=environment)
        for rank in range(world)
    ]
    try:
        assert [rank.wait(270) for rank in ranks] == [0] * world
    finally:
        for rank in ranks:
            rank.kill()


def check(folder: str, ranks: list[dict[str, Any]]) -> dict[str, float]:
    """Against transformers and the files: logits, exported weights, gradients of all pieces, who holds what."""
    logits, gradients = by_transformers(folder)
    files = file_tensors(Path(folder))
    last = sorted((r for r in ranks if r["logits"] is not None), key=lambda r: (r["data"], r["tensor"]))
    replicas = [[r["logits"] for r in last if r["data"] == index] for index in sorted({r["data"] for r in last})]
    got = torch.cat([torch.cat(parts, -1) for parts in replicas])
    assert got.shape == logits.shape
    worst = {"logits": float((got - logits).abs().max()), "gradient": 0.0}
    norm = float(torch.stack([value.norm() for value in gradients.values()]).norm())
    worst["norm"] = max(abs(rank["norm"] - norm) / norm for rank in ranks)  # what clipping divides by
    holders: dict[tuple[str, int, int], list[tuple[int, int]]] = {}
    for rank in ranks:
        assert rank["weights"].keys() == files.keys()
        assert all(torch.equal(rank["weights"][name], value) for name, value in files.items())
        for piece in rank["pieces"]:
            held = (piece["name"], piece["start"], piece["stop"])
            holders.setdefault(held, []).append(tuple(piece["holder"]))
            assert (piece["holder"][1] > 1) == bool(piece["replicated"])
            if piece["gradient"] is None:  # a router's bias
                continue
            whole = gradients[piece["name"]]
            assert piece["shape"] == tuple(whole.shape)
            start, stop = piece["start"], piece["stop"]
            expected = whole if piece["dim"] < 0 else whole.narrow(piece["dim"], start, stop - start)
            assert expected.shape == piece["gradient"].shape
            gap = float((piece["gradient"] - expected).abs().max() / whole.abs().max())
            worst["gradient"] = max(worst["gradient"], gap)
    for name, shape in ((name, value.shape) for name, value in files.items()):
        parts = sorted((start, stop) for part, start, stop in holders if part == name)
        assert parts[0][0] == 0
        assert all(a[1] == b[0] for a, b in pairwise(parts))
        assert parts[-1][1] in shape
    for held in holders.values():  # every holder has a number of its own
        assert sorted(held) == [(index, len(held)) for index in range(len(held))]
    return worst


DENSE = [
    ("tensor-qwen2", "qwen2", {"tensor": 2}),
    ("tensor-qwen3", "qwen3", {"tensor": 2}),
    ("sequence-qwen2-tied", "qwen2-tied", {"tensor": 2, "sequence": True}),
    ("tensor-llama-tied", "llama-tied", {"tensor": 2}),
    ("pipeline-qwen3", "qwen3", {"pipeline": 2}),
    ("pipeline-qwen2-tied", "qwen2-tied", {"pipeline": 2}),
    ("virtual-qwen3-tied", "qwen3-tied", {"pipeline": 2, "virtual": 2}),
]
MIXTURES = [
    ("sequence-moe", "moe", {"tensor": 2, "sequence": True}),
    ("pipeline-moe", "moe-unscaled", {"pipeline": 2}),
    ("expert-moe", "moe", {"expert": 2}),
    ("data-moe", "moe-unscaled", {}),
]
FAMILIES = [  # beyond those above; the folders are transformers'
    ("tensor-gemma3", "gemma3", {"tensor": 2, "sequence": True}),
    ("pipeline-gemma3", "gemma3", {"pipeline": 2}),
    ("tensor-mistral", "mistral-window", {"tensor": 2}),
    ("tensor-glm", "glm", {"tensor": 2, "sequence": True}),
    ("tensor-qwen2-moe", "qwen2-moe", {"tensor": 2, "sequence": True}),
    ("expert-deepseek", "deepseek-v3", {"expert": 2}),
    ("pipeline-deepseek", "deepseek-v3", {"pipeline": 2}),
    ("expert-gpt-oss", "gpt-oss", {"expert": 2}),
    ("pipeline-gpt-oss", "gpt-oss", {"pipeline": 2}),
    ("virtual-qwen3-moe-dense", "qwen3-moe-dense", {"pipeline": 2, "virtual": 2}),
]
FOUR = [
    ("tensor-pipeline-qwen3", "qwen3", {"tensor": 2, "pipeline": 2}),
    ("tensor-pipeline-qwen2-tied", "qwen2-tied", {"tensor": 2, "pipeline": 2, "sequence": True}),
    ("tensor-expert-moe", "moe", {"tensor": 2, "expert": 2, "sequence": True}),
    ("pipeline-expert-moe", "moe", {"pipeline": 2, "expert": 2}),
]
OTHER = [DENSE[2], DENSE[3], DENSE[6], MIXTURES[0], MIXTURES[2]]


@pytest.mark.parametrize(
    ("version", "world", "cases"),
    [
        pytest.param("", 2, DENSE, id="dense"),
        pytest.param("", 2, MIXTURES, id="mixtures"),
        pytest.param("", 2, FAMILIES, id="families"),
        pytest.param("", 4, FOUR, id="four-ranks", marks=pytest.mark.long),
        pytest.param("0.19.2", 2, OTHER, id="0.19.2"),
        pytest.param("0.19.2", 2, FAMILIES, id="families-0.19.2", marks=pytest.mark.long),
    ],
)
def test_every_layout_computes_what_transformers_computes(
    tmp_path: Path, version: str, world: int, cases: list[tuple[str, str, dict[str, Any]]]
) -> None:
    beside = Path(sys.prefix) / "alternates" / f"megatron-core-{version}" if version else None
    if beside is not None and not beside.is_dir():
        pytest.skip(f"Megatron-Core {version} is not beside the installed one; `make venv` unpacks it")
    folders = make_folders(tmp_path)
    for family in {family for _, family, _ in cases} - folders.keys():
        folders[family] = str(write_family(tmp_path / family, family))
    run_ranks(world, [(name, folders[family], options) for name, family, options in cases], tmp_path, beside)
    report = {}
    for name, family, _ in cases:
        ranks = [torch.load(tmp_path / f"{name}.rank{rank}.pt", weights_only=True) for rank in range(world)]
        report[name] = check(folders[family], ranks)
    print({name: {key: f"{value:.1e}" for key, value in worst.items()} for name, worst in report.items()})
    for name, worst in report.items():
        assert worst["logits"] <= LOGITS_TOLERANCE, (name, worst)
        assert worst["gradient"] <= GRADIENT_TOLERANCE, (name, worst)
        assert worst["norm"] <= GRADIENT_TOLERANCE, (name, worst)
