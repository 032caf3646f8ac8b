"""The plan of memory: what is counted, what a real step of a small model would take, what is over and what cures it."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from megatron_rlplugin import model, tiny_model  # noqa: E402
from megatron_rlplugin.memory import trainer_plan  # noqa: E402
from megatron_rlplugin.memory.rank_memory import PUBLISHED, RankMemory, StepRequest, optimizer_bytes  # noqa: E402
from megatron_rlplugin.memory.storage_ledger import StorageLedger  # noqa: E402
from megatron_rlplugin.memory.trainer_plan import GB, answer_of, plan_trainer  # noqa: E402
from megatron_rlplugin.model_families import read_shape  # noqa: E402
from megatron_rlplugin.parallel_layout import ParallelLayout  # noqa: E402
from orchestrator import cli  # noqa: E402
from orchestrator.api import ConfigError, RunError  # noqa: E402
from orchestrator.config import Config, load_config  # noqa: E402
from orchestrator.runtime import memory_plan, model_defaults, preflight  # noqa: E402
from tests.support.forked_ranks import ForkedRank, wait_for_all  # noqa: E402
from tests.support.megatron_training import NEWEST, ROOT  # noqa: E402

WORDS = [f"w{index}" for index in range(512)]
SIZES: dict[str, Any] = {
    "hidden_size": 64, "layers": 2, "heads": 4, "kv_heads": 2, "vocabulary": WORDS, "max_positions": 256, "seed": 0,
}  # fmt: skip


def dense(folder: Path, dtype: str = "bfloat16", **more: Any) -> str:
    return tiny_model.create_qwen3(
        str(folder), **{**SIZES, "intermediate_size": 128, "head_dim": 16, "dtype": dtype, **more}
    )


def experts(folder: Path) -> str:
    sizes = {"head_dim": 16, "dtype": "bfloat16", "experts": 4, "experts_per_token": 2, "expert_intermediate_size": 96}
    return tiny_model.create_qwen3_moe(str(folder), **SIZES, **sizes)


# -- counting --------------------------------------------------------------------------------------------------------


def test_a_storage_is_counted_once_until_its_last_view_ends() -> None:
    with FakeTensorMode(), StorageLedger("a") as ledger:
        first = torch.empty(1000, dtype=torch.float32)
        view = first[10:]
        with ledger.tag("b"):
            second = first + 1
        with ledger.tag(StorageLedger.HOST):
            kept = torch.empty(7000)
        assert dict(ledger.now) == {"a": 4000, "b": 4000, "host": 28000}
        assert ledger.peak == 8000  # of the device
        del first
        assert ledger.now["a"] == 4000  # the view holds it
        ledger.move_to_tag([view], "c")
        del view, second
        assert ledger.now["a"] == ledger.now["c"] == ledger.now["b"] == 0
        assert ledger.at_peak["b"] == 4000
        ledger.restart_peak()
        assert ledger.peak == 0
        assert kept.numel() == 7000


@pytest.mark.parametrize(
    ("options", "dtype", "device", "host"),
    [
        ({}, "bfloat16", 12, 0),
        ({}, "float32", 8, 0),
        ({"use_precision_aware_optimizer": True}, "bfloat16", 2 + 8, 0),
        ({"use_precision_aware_optimizer": True, "store_param_remainders": False}, "bfloat16", 12, 0),
        (
            {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "float16"},
            "bfloat16",
            2 + 2 + 2,
            0,
        ),
        ({"use_precision_aware_optimizer": True, "main_params_dtype": "float16"}, "bfloat16", 2 + 8, 0),
        ({"optimizer_cpu_offload": True}, "bfloat16", 12, 0),  # Megatron-Core's own fraction is 0
        ({"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}, "bfloat16", 0, 16),
        ({"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}, "bfloat16", 6, 8),
    ],
)
def test_the_optimizer_is_counted_by_its_bytes_a_parameter(
    options: Mapping[str, Any], dtype: str, device: int, host: int
) -> None:
    assert optimizer_bytes(options, 1000, dtype) == (device * 1000, host * 1000)


def test_the_parameters_of_a_shape_are_those_of_its_files(tmp_path: Path) -> None:
    from safetensors import safe_open

    makers = {
        "dense": dense(tmp_path / "dense"),
        "tied": dense(tmp_path / "tied", tied=True),
        "experts": experts(tmp_path / "experts"),
        "bias": tiny_model.create_qwen2(str(tmp_path / "bias"), **SIZES, intermediate_size=128, dtype="float32"),
    }
    for name, folder in makers.items():
        count = 0
        for file in Path(folder).glob("*.safetensors"):
            with safe_open(file, framework="pt") as tensors:
                count += sum(tensors.get_tensor(key).numel() for key in tensors.keys())  # noqa: SIM118
        assert read_shape(folder).parameters == count, name


# -- a planned step --------------------------------------------------------------------------------------------------


@pytest.mark.engine
def test_a_planned_step_has_the_bytes_that_arithmetic_says(tmp_path: Path) -> None:
    """Two tensor-parallel ranks, a pipeline of two with experts, and a vocabulary that cannot be cut, each in its process."""
    folder, mixture, odd = dense(tmp_path / "d"), experts(tmp_path / "e"), dense(tmp_path / "o", vocabulary=WORDS[:511])
    tensor = StepRequest(
        folder, {"tensor_parallel": 2, "kl_coefficient": 0.1, "lr_warmup_steps": 5}, "bfloat16", 1, 2, 64
    )
    stage = {"pipeline_parallel": 2, "expert_parallel": 2, "data_parallel": 2, "distributed_optimizer": True}
    piped = StepRequest(mixture, stage, "bfloat16", 3, 4, 64, imbalance=1.0)
    ppo = replace(tensor, settings={**tensor.settings, "objective": "ppo"})
    asked = [tensor, replace(tensor, rows=2, differences=True), piped, replace(piped, imbalance=2.0)]
    asked += [replace(tensor, folder=odd), ppo, replace(piped, resting=True), replace(tensor, overlap=True)]
    asked += [
        replace(tensor, folder=odd, settings=each, world=each.get("context_parallel", 1), rank=0)
        for each in ({}, {"context_parallel": 2})
    ]

    ended = [run_forked(request) for request in asked]
    with pytest.raises(ConfigError) as refused:
        answer_of(ended[4].out)
    one, two, even, uneven, critic, resting, beside, alone, shared = (
        answer_of(each.out) for each in [*ended[:4], *ended[5:]]
    )

    hidden = 64  # a rank has half of the vocabulary and of the layers, and all norms
    layer = (64 * (2 * 64 + 2 * 32) + 3 * 64 * 128) // 2 + 2 * hidden + 2 * 16
    parameters = 2 * (512 // 2) * hidden + 2 * layer + hidden
    assert one.parameters == parameters
    assert 2 * parameters <= one.device["weights"] < 2 * parameters + 5000  # beside them: RoPE's frequencies, a mask
    assert one.device["gradients"] == pytest.approx(4 * parameters, rel=0.01)  # padded buffers
    assert one.device["optimizer"] == pytest.approx(12 * parameters, rel=0.01)
    assert one.device["copies"] == 0
    assert one.host["copies"] == 2 * 2 * parameters  # the reference and the version before
    assert alone.host["copies"] == 2 * (alone.parameters + 2 * hidden)  # of 511 tokens, pinned as 512 would be
    assert one.phase == "forward and backward"
    assert one.total == one.phases[one.phase]
    assert one.phases["optimizer step"] >= 18 * parameters
    assert two.device["activations"] > 1.8 * one.device["activations"]  # of twice the rows
    stepping = [found.phases["optimizer step"] - found.device["weights"] for found in (one, two)]
    copied = stepping[1] - stepping[0]  # what it publishes: of the norms not all
    assert 0.99 * 2 * parameters < copied < 2 * parameters
    assert two.host[PUBLISHED] == copied == beside.host[PUBLISHED]  # of the version before, or that is being sent
    assert beside.device == one.device
    assert [shared.device[part] for part in ("weights", "gradients", "optimizer")] == [
        pytest.approx(alone.device[part], rel=0.001) for part in ("weights", "gradients", "optimizer")
    ]
    assert shared.device["activations"] < 0.6 * alone.device["activations"]  # of half of each row
    assert PUBLISHED not in one.host
    assert [two.device[name] for name in ("gradients", "optimizer")] == [
        one.device["gradients"],
        one.device["optimizer"],
    ]
    assert (
        critic.parameters == 2 * parameters - 256 * hidden + hidden + 1
    )  # a critic has a number, and its bias, in place of the vocabulary
    assert critic.device["gradients"] == pytest.approx(4 * critic.parameters, rel=0.02)
    assert even.parameters == uneven.parameters == read_shape(mixture).parameters - 512 * 64 - _other_stage(mixture)
    assert uneven.device["activations"] > even.device["activations"]
    kept = ("weights", "gradients", "optimizer")
    assert [resting.device[part] for part in kept] == [pytest.approx(even.device[part], rel=0.001) for part in kept]
    assert resting.total == sum(resting.device[part] for part in kept)
    assert refused.value.field == "model.vocab_size"
    assert refused.value.value == "511"


def run_forked(request: StepRequest) -> Any:
    """The program, in a process that has Megatron-Core imported."""
    (ended,) = wait_for_all(
        [ForkedRank("-m", "megatron_rlplugin.memory.planned_step", json.dumps(asdict(request)))], 200
    )
    assert ended.code == 0, ended.err
    return ended


@pytest.mark.engine
@pytest.mark.long
@pytest.mark.skipif(not NEWEST.is_dir(), reason="the wheel of Megatron-Core 0.19.2 is not unpacked")
def test_another_megatron_core_takes_the_same_memory(tmp_path: Path) -> None:
    tensor = {"tensor_parallel": 2, "arguments": "--sequence-parallel --recompute-granularity selective"}
    stage = {"pipeline_parallel": 2, "expert_parallel": 2, "data_parallel": 2, "distributed_optimizer": True}
    environment = os.environ | {"PYTHONPATH": f"{NEWEST}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    for folder, settings, rank, world in (
        (dense(tmp_path / "dense"), tensor, 1, 2),
        (experts(tmp_path / "experts"), stage, 3, 4),
    ):
        request = StepRequest(folder, settings, "bfloat16", rank, world, 64, rows=2)
        installed = answer_of(run_forked(request).out)
        words = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "megatron_rlplugin.memory.planned_step",
            json.dumps(asdict(request)),
        ]
        ended = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=200, check=False)
        assert ended.returncode == 0, ended.stderr[-3000:]
        newest = answer_of(ended.stdout)
        print(installed.device, newest.device)
        assert newest.parameters == installed.parameters
        for part in ("weights", "gradients", "optimizer", "activations"):
            assert newest.device[part] == pytest.approx(installed.device[part], rel=0.05), part


def _other_stage(folder: str) -> int:
    """The parameters of one layer, and those of the other layer's experts that another rank has."""
    shape = read_shape(folder)
    expert = 3 * shape.hidden_size * shape.moe_intermediate_size
    layer = (shape.parameters - shape.embedding_parameters - shape.hidden_size) // 2
    return layer + 2 * expert


# -- what is over ----------------------------------------------------------------------------------------------------


def twin(full: int, recomputed: int, sharded: int = 4 * GB) -> Any:
    """In place of the program: activations with and without recomputation."""
    seen = []

    def run(request: StepRequest) -> RankMemory:
        seen.append(request)
        megatron = request.settings.get("megatron", {})
        device, host = optimizer_bytes(megatron, sharded, request.dtype)
        activations = recomputed if "recompute_granularity" in megatron else full
        activations = 0 if request.resting else activations
        parts = {"weights": 8 * GB, "gradients": 16 * GB, "optimizer": device, "activations": activations, "logits": 0}
        return RankMemory(request.rank, 4 * GB, {**parts, "copies": 0}, {"optimizer": host}, "forward", sharded)

    run.seen = seen  # type: ignore[attr-defined]
    return run


RECOMPUTE = ("recompute_granularity", "recompute_method", "recompute_num_layers")
PRECISE = ("use_precision_aware_optimizer", "exp_avg_dtype", "exp_avg_sq_dtype")
OFFLOAD = ("optimizer_cpu_offload", "optimizer_offload_fraction")


@pytest.mark.parametrize(
    ("full", "recomputed", "cure"),
    [
        (1 * GB, 1 * GB, ()),
        (40 * GB, 1 * GB, RECOMPUTE),
        (40 * GB, 20 * GB, (*RECOMPUTE, *PRECISE)),
        (60 * GB, 45 * GB, (*RECOMPUTE, *PRECISE, *OFFLOAD)),
        (90 * GB, 70 * GB, None),
    ],
)
def test_the_cheapest_options_that_cure_it_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: int, recomputed: int, cure: tuple[str, ...] | None
) -> None:
    run = twin(full, recomputed)
    monkeypatch.setattr(trainer_plan, "run_request", run)
    settings = {"distributed_optimizer": True, "data_parallel": 2}
    plan = plan_trainer(dense(tmp_path / "m"), settings, "bfloat16", 128, 80 * GB)
    if cure is None:
        assert plan.cure == "more devices a replica: raise trainer.tensor_parallel or trainer.pipeline_parallel"
    else:
        assert re.findall(r"trainer\.megatron\.(\w+) = ", plan.cure) == list(cure)
    assert plan.cured <= 80 * GB
    assert bool(plan.cured) == bool(cure)
    assert len(run.seen) == (1 if full == GB else 2)  # the optimizer's variants need no run of their own
    assert {(request.tokens, request.rows) for request in run.seen} == {(128, 64)}


def test_first_and_last_stage_and_both_imbalances_are_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = twin(GB, GB)
    monkeypatch.setattr(trainer_plan, "run_request", run)
    settings = {"pipeline_parallel": 2, "expert_parallel": 2, "data_parallel": 4, "micro_batch_tokens": 300}
    plan = plan_trainer(experts(tmp_path / "m"), settings, "bfloat16", 100, None)
    found = [(rank.stage, rank.memory.rank, rank.imbalance) for rank in plan.ranks]
    assert found == [("first stage", 0, 1.0), ("first stage", 0, 2.0), ("last stage", 7, 1.0), ("last stage", 7, 2.0)]
    assert {request.rows for request in run.seen} == {3}
    groups = 3  # pipeline, data, experts
    assert plan.fullest.reserve == round(0.6 * GB + groups * 0.3 * GB + 0.04 * GB)
    shared = plan_trainer(dense(tmp_path / "d"), {"context_parallel": 2}, "bfloat16", 100, None)
    assert shared.fullest.reserve == round(0.6 * GB + 0.3 * GB + 0.04 * GB)


def planned(monkeypatch: pytest.MonkeyPatch, activations: int) -> None:
    monkeypatch.setattr(trainer_plan, "run_request", twin(activations, activations))


def large(tmp_path: Path, *more: str) -> Config:
    """A folder whose config says 7 billion parameters; there are no weights."""
    folder = tmp_path / "large"
    folder.mkdir(exist_ok=True)
    shape = {
        "architectures": ["Qwen2ForCausalLM"], "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944,
        "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "max_position_embeddings": 32768,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(shape))
    return load_config(None, [f"model.path={folder}", "model.dtype=bfloat16", *more])


POOLS = ("resources.pools={H800=8,H20=8}", "rollout.engine.gpu_memory_utilization=0.8")


def test_a_model_that_does_not_fit_its_devices_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned(monkeypatch, 70 * GB)
    with pytest.raises(
        ConfigError, match=r"does not fit: trainer \(1 rank\).*GB of 80.0 on H800.*over by .* raise trainer.tensor"
    ):
        memory_plan.check(large(tmp_path, *POOLS))
    memory_plan.check(large(tmp_path, *POOLS, "resources.memory_gb={H800=200}"))
    memory_plan.check(large(tmp_path))  # nobody knows the device
    planned(monkeypatch, GB)
    assert memory_plan.check(large(tmp_path, *POOLS)) == []


def test_a_start_waits_for_no_plan_that_takes_minutes_and_needs_no_megatron_where_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(request: StepRequest) -> Any:
        raise RunError("there is no Megatron-Core")

    monkeypatch.setattr(trainer_plan, "run_request", run)
    (said,) = memory_plan.check(large(tmp_path, *POOLS))
    assert "was not planned (there is no Megatron-Core)" in said
    config = large(tmp_path, *POOLS)
    file = Path(config.model.path) / "config.json"
    experts = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 64, "num_experts_per_tok": 8, "head_dim": 128}
    file.write_text(json.dumps(json.loads(file.read_text()) | experts | {"moe_intermediate_size": 768}))
    (said,) = memory_plan.check(config)
    assert "was not planned (there is no Megatron-Core)" in said
    step = twin(70 * GB, 70 * GB, sharded=2 * GB)
    monkeypatch.setattr(trainer_plan, "run_request", step)
    (said,) = memory_plan.check(config)
    assert "a step of this mixture of experts was not planned, which takes minutes" in said
    assert [request.resting for request in step.seen] == [True]
    monkeypatch.setattr(trainer_plan, "run_request", twin(0, 0, sharded=6 * GB))
    with pytest.raises(ConfigError, match=r"does not fit: trainer.*over by .* before any step"):
        memory_plan.check(config)


def test_engine_relay_and_colocation_have_their_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned(monkeypatch, GB)
    config = large(tmp_path, *POOLS)
    trainer, host, engine, beside = memory_plan.memory_rows(config, config.model.path)
    shape = read_shape(config.model.path)
    assert shape.parameters == 7_615_616_512  # as its model card says: 7.61 billion
    assert trainer.capacity == 80 * GB
    assert host.parts["relay"] == round(shape.parameters * 2 * 3 * 1.1)
    assert host.parts["checkpoint"] == (8 + 12 * 4) * GB  # weights, masters and moments while they are written
    assert engine.hardware == "H20"
    assert engine.total == round(0.8 * 96 * GB)
    assert engine.parts["weights"] == 2 * shape.parameters
    assert (beside.hardware, beside.parts) == ("host", {"next version": 2 * shape.parameters})
    config = large(tmp_path, *POOLS, "resources.memory_gb={H20=18}")
    line = memory_plan.describe(memory_plan.memory_rows(config, config.model.path))[2]
    assert "over by 0.8: raise rollout.engine.tensor_parallel_size" in line or "over" not in line
    more = ("run.mode=async", "rollout.weights_overlap=true", "trainer.kl_coefficient=0.1", "trainer.data_parallel=2")
    offload = "trainer.megatron={optimizer_cpu_offload=true, optimizer_offload_fraction=1.0}"
    run = twin(GB, GB)
    monkeypatch.setattr(trainer_plan, "run_request", run)
    config = large(tmp_path, *more, offload)
    assert memory_plan.memory_rows(config, config.model.path)[1].parts["checkpoint"] == (2 * 8 + 12 * 4) * GB
    assert [(request.overlap, request.differences) for request in run.seen] == [(True, False)]
    shared = ("rollout.colocation.enabled=true", "run.mode=sync", "rollout.alpha=0", "trainer.stream=true")
    config = large(tmp_path, "resources.memory_gb={GPU=80}", *shared)
    trainer, _, engine, _ = memory_plan.memory_rows(config, config.model.path)
    assert trainer.parts["an engine asleep"] == engine.parts["a trainer away"] == memory_plan.CONTEXT
    sites = "relay.sites={rack={workers=['vllm-0'], cache='10.0.0.5:7100'}}", "relay.site_token_file=token"
    cache = memory_plan.memory_rows(large(tmp_path, *sites), config.model.path)[-1]
    assert memory_plan.describe([cache]) == ["cache of site rack: 45.7 GB in host memory (versions 45.7)"]
    cache = memory_plan.memory_rows(large(tmp_path, *sites, "relay.snapshot_every=16"), config.model.path)[-1]
    assert cache.parts == {"a snapshot": 2 * shape.parameters}
    with pytest.raises(ConfigError, match=r"relay.segment_mb = 100: is too small for 3 versions.*at least 479"):
        memory_plan.check(large(tmp_path, "relay.segment_mb=100"))


def test_what_a_run_takes_in_all_counts_every_rank_of_every_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four engines of two devices and one of four: twelve times what is on a device, and their hosts."""
    planned(monkeypatch, GB)
    groups = '[{count=4, hardware="H20", tensor_parallel_size=2}, {hardware="H800", tensor_parallel_size=4}]'
    config = large(tmp_path, "resources.pools={H800=8,H20=8}", "trainer.data_parallel=4", f"rollout.engines={groups}")
    config, _ = model_defaults.choose(config)
    rows = memory_plan.memory_rows(config, config.model.path)
    weights = 2 * read_shape(config.model.path).parameters
    engines = 8 * 0.9 * 96 * GB + 4 * 0.9 * 80 * GB + 5 * weights  # each has the next version once on its hosts
    assert memory_plan.describe(rows)[3].endswith(f"; 8 on a node: {4 * weights / GB:.1f} GB")
    wanted = 4 * (rows[0].total + rows[1].total) + engines
    assert memory_plan.about(config, rows) == f"5 engines, 4 trainers, about {wanted / GB:.1f} GB"


KEPT = ("model.dtype=bfloat16", "trainer.learning_rate=1e-5", "trainer.micro_batch_tokens=4096")


def keys(said: Sequence[str]) -> list[str]:
    return [line.partition(" = ")[0] for line in said]


def test_a_large_model_has_defaults_of_its_own_and_a_set_key_wins(tmp_path: Path) -> None:
    path = f"model.path={large(tmp_path).model.path}"
    config, said = model_defaults.choose(load_config(None, [path, "trainer.data_parallel=2"]))
    trainer = config.trainer
    assert (config.model.dtype, trainer.learning_rate, trainer.distributed_optimizer) == ("bfloat16", 1e-6, True)
    assert trainer.micro_batch_tokens == max(8192, config.rollout.widest_context)
    rest = [f"trainer.{name}" for name in ("learning_rate", "micro_batch_tokens", "distributed_optimizer")]
    assert keys(said) == ["model.dtype", *rest]
    assert "7.6 billion parameters" in said[0]
    assert model_defaults.choose(config) == (config, [])  # what was chosen is as if it had been written
    own = load_config(None, [path, *KEPT])
    assert model_defaults.choose(own) == (own, [])
    argued, said = model_defaults.choose(load_config(None, [path, 'trainer.arguments="--lr 2e-6"']))
    assert argued.trainer.learning_rate == 2e-6
    assert keys(said) == ["model.dtype", "trainer.micro_batch_tokens"]


def test_the_engines_of_a_large_model_have_the_kv_that_vllm_finds_free(tmp_path: Path) -> None:
    """64 MiB, the key's default for the demo, hold 2,300 tokens of a 7B model on a device of 80 GB, or no engine starts."""
    pools = "resources.pools={H800=8,H20=8,L20=8}"
    config, said = model_defaults.choose(large(tmp_path, *KEPT, pools))
    assert keys(said) == ["rollout.engine.kv_cache_mb"]
    assert config.rollout.engine.kv_cache_mb == 0
    assert model_defaults.choose(config) == (config, [])
    groups = '[{hardware="H20"}, {hardware="L20", kv_cache_mb=4096}, {hardware="L20", gpu_memory_utilization=0.5}]'
    config, said = model_defaults.choose(large(tmp_path, *KEPT, pools, f"rollout.engines={groups}"))
    assert keys(said) == ["rollout.engines.0.kv_cache_mb"]
    assert [group.kv_cache_mb for group in config.rollout.engines] == [0, 4096, 0]
    assert keys(model_defaults.choose(large(tmp_path, *KEPT, "ray.address=10.0.0.1:6379"))[1]) == [
        "rollout.engine.kv_cache_mb"
    ]
    shared = ("rollout.colocation.enabled=true", "run.mode=sync", "rollout.alpha=0", "trainer.stream=true")
    alone = large(tmp_path, *KEPT, "ray.address=10.0.0.1:6379", *shared)
    assert model_defaults.choose(alone)[1] == []  # it plans with a size


def test_a_kv_cache_that_cannot_hold_one_sequence_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned(monkeypatch, GB)
    longest = "rollout.engine.max_model_len=32768"
    with pytest.raises(ConfigError, match=r"kv_cache_mb = 64: one sequence of .*32768 takes 1.9 GB.* or at least 1792"):
        memory_plan.check(large(tmp_path, longest))  # 28 layers x 2 x 4 heads x 128 x 2 bytes x 32768
    memory_plan.check(large(tmp_path, longest, "rollout.engine.kv_cache_mb=1792"))
    memory_plan.check(
        large(tmp_path, longest, "rollout.engine.kv_cache_mb=896", "rollout.engine.tensor_parallel_size=2")
    )
    memory_plan.check(large(tmp_path, longest, "rollout.engine.kv_cache_mb=896", "rollout.engine.kv_cache_dtype=fp8"))
    memory_plan.check(large(tmp_path, longest, "rollout.workers=0", "rollout.served=['http://127.0.0.1:1']"))
    with pytest.raises(ConfigError, match=r"max_model_len = 32768: .*beside the weights 1.0 GB are left: raise"):
        memory_plan.check(large(tmp_path, *POOLS, longest, "resources.memory_gb={H20=20.3}"))


def test_the_demo_and_small_models_keep_the_defaults_of_the_keys(tmp_path: Path) -> None:
    for more in ([], [f"model.path={dense(tmp_path / 'small')}"], [f"model.path={tmp_path / 'nowhere'}"]):
        config = load_config(None, more)
        assert model_defaults.choose(config) == (config, [])


@pytest.mark.parametrize(
    ("full", "recomputed", "more", "chosen"),
    [
        (1 * GB, 1 * GB, POOLS, ()),  # it fits
        (60 * GB, 1 * GB, POOLS, RECOMPUTE),
        (60 * GB, 1 * GB, (), ()),  # nobody knows the device
        (60 * GB, 1 * GB, (*POOLS, 'trainer.megatron={recompute_granularity="selective"}'), ()),
        (90 * GB, 50 * GB, POOLS, ()),  # recomputation alone does not cure it: the check says what does
    ],
)
def test_what_the_plan_says_is_recomputed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    full: int,
    recomputed: int,
    more: Sequence[str],
    chosen: Sequence[str],
) -> None:
    monkeypatch.setattr(trainer_plan, "run_request", twin(full, recomputed))
    config, said = model_defaults.choose(large(tmp_path, *KEPT, *more))
    assert keys(said) == [f"trainer.megatron.{name}" for name in chosen]
    assert all("of 80.0 GB without" in line for line in said)
    if chosen:
        assert config.trainer.megatron["recompute_granularity"] == "full"


def test_a_plan_and_a_run_begin_with_what_was_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trainer_plan, "run_request", twin(60 * GB, GB))
    path = f"model.path={large(tmp_path).model.path}"
    assert cli.main(["plan", "--memory", path, *POOLS]) == 0
    shown = capsys.readouterr()
    assert 'trainer.megatron.recompute_granularity = "full": a step would take' in shown.err
    assert "over by" not in shown.out.partition("engine")[0]

    class Reached(Exception):
        pass

    def check(config: Config, task: Any) -> list[str]:
        assert config.trainer.megatron["recompute_granularity"] == "full"
        assert config.model.dtype == "bfloat16"
        raise Reached

    monkeypatch.setattr(preflight, "check", check)
    with pytest.raises(Reached):
        cli.main(["train", "--dry-run", path, *POOLS])


def test_rope_is_one_kernel_where_transformer_engine_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its unfused form reads the lengths of packed rows back from the device in every layer."""
    shape, layout = read_shape(dense(tmp_path / "m")), ParallelLayout()
    assert not model.transformer_config(shape, torch.float32, layout).apply_rope_fusion
    monkeypatch.setattr(model, "uses_transformer_engine", lambda: True)
    with pytest.raises(ValueError, match="apply_rope_fusion is not available"):  # Megatron-Core is asked for it
        model.transformer_config(shape, torch.float32, layout)


@pytest.mark.engine
def test_the_command_prints_the_plan_of_the_demo(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--memory", "--json", "resources.memory_gb={GPU=1}"]) == 0
    rows = json.loads(capsys.readouterr().out)["memory"]
    assert [row["owner"] for row in rows] == [
        *("trainer (1 rank)", "trainer, each rank"),
        *("engine (1 rank)", "engine (1 rank), each rank"),
    ]
    assert rows[0]["parts"]["weights"] > 0
    assert [row["over"] for row in rows] == [0, 0, 0, 0]


def test_a_plan_names_no_device_where_the_run_named_none() -> None:
    row = memory_plan.MemoryRow("engine (1 rank)", "", {"weights": 2 * memory_plan.GB})
    assert memory_plan.describe([row]) == ["engine (1 rank): 2.0 GB (weights 2.0)"]
    known = dataclasses.replace(row, capacity=80 * memory_plan.GB)
    assert memory_plan.describe([known]) == ["engine (1 rank): 2.0 GB of 80.0 on its device (weights 2.0)"]


def test_who_asks_for_a_plan_imports_no_torch(tmp_path: Path) -> None:
    """The program that answers does, beside what else is checked."""
    words = "from megatron_rlplugin import tiny_model; from megatron_rlplugin.memory import trainer_plan; import json, sys; "
    words += f"sizes = json.loads('''{json.dumps({**SIZES, 'head_dim': 16, 'intermediate_size': 128, 'dtype': 'float32'})}'''); "
    words += "folder = tiny_model.create_qwen3(sys.argv[1], **sizes, weights=False); "
    words += "trainer_plan.run_request = lambda request: sys.exit('torch' in sys.modules); "
    words += "trainer_plan.plan_trainer(folder, {'tensor_parallel': 2}, 'float32', 64)"
    assert subprocess.run([sys.executable, "-c", words, str(tmp_path)], cwd=ROOT, check=False).returncode == 0
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]
