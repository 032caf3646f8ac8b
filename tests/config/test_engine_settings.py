"""The engine's keys are written once: ours are shared by config and plugin, vLLM's own are passed on and checked against it."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from orchestrator.api import ConfigError
from orchestrator.config import load_config, parse_config, to_json
from orchestrator.runtime import pool_requests, preflight
from orchestrator.settings import engine_settings
from orchestrator.settings.engine_settings import OWNED, EngineSettings, vllm_options

ENGINE = "rollout.engine."


def engine(*options: str) -> EngineSettings:
    return load_config(None, [ENGINE + option for option in options]).rollout.engine


def test_any_option_of_vllm_is_passed_on_beside_our_own_keys() -> None:
    found = engine(
        "tensor_parallel_size=2",
        "quantization='fp8'",
        "enable_expert_parallel=true",
        "max_num_batched_tokens=512",
        "compilation_config={mode=0}",
        "cudagraph_capture_sizes=[1, 2]",
        "cpu_offload_gb=1",  # an integer where vLLM has a number
    )
    assert found.ranks == 2
    assert found.vllm_arguments() == {
        "max_num_seqs": 64,
        "max_model_len": 256,
        "block_size": 32,
        "kv_cache_memory_bytes": 64 << 20,
        "gpu_memory_utilization": 0.01,
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 1,
        "quantization": "fp8",
        "enable_expert_parallel": True,
        "max_num_batched_tokens": 512,
        "compilation_config": {"mode": 0},
        "cudagraph_capture_sizes": [1, 2],
        "cpu_offload_gb": 1,
    }
    assert EngineSettings.from_dict(found.model_dump()) == found  # as a run's folder keeps it, and an engine gets it


def test_a_share_of_the_memory_takes_the_place_of_a_size() -> None:
    found = engine("gpu_memory_utilization=0.9")
    assert "kv_cache_memory_bytes" not in found.vllm_arguments()
    assert EngineSettings.from_dict(found.model_dump()) == found


@pytest.mark.engine
def test_an_engine_with_a_kv_cache_of_a_size_starts_beside_a_trainer_that_holds_most_of_the_device() -> None:
    """By vLLM's own rule for a device's free memory, which looks at the share whatever the size is."""
    pytest.importorskip("vllm")
    from types import SimpleNamespace

    from vllm.v1.worker.utils import request_memory

    device = SimpleNamespace(total_memory=80 << 30, free_memory=20 << 30, device_="cuda:0", cuda_memory=60 << 30)
    share = engine("kv_cache_mb=1024").vllm_arguments()["gpu_memory_utilization"]
    request_memory(device, SimpleNamespace(gpu_memory_utilization=share))
    with pytest.raises(ValueError, match="Free memory"):
        request_memory(device, SimpleNamespace(gpu_memory_utilization=0.92))


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("quantisation='fp8'", "did you mean 'quantization'"),
        ("max_num_seq=8", "did you mean 'max_num_seqs'"),
        ("scheduler_clas='x'", "is not an option of the installed vLLM"),
        ("enable_expert_parallel=1", "is bool"),
        ("max_num_batched_tokens='many'", "is int | None"),
        ("max_num_batched_tokens=true", "is int | None"),
        ("data_parallel_size=2", "raise rollout.workers"),
        ("scheduler_cls='mine.Scheduler'", "plugin's own"),
        ("weight_transfer_config={backend='nccl'}", "plugin's own"),
        ("kv_transfer_config={kv_connector='x'}", "rollout.kv_transfer"),
        ("dtype='float16'", "model.dtype"),
        ("nnodes=2", "is `nodes`"),
        ("nodes=2", "1 is not a multiple of it"),
        ("block_size=16", "multiple of 32"),
    ],
)
def test_what_the_engine_cannot_take_is_refused_by_name(option: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint.replace("|", r"\|")) as caught:
        engine(option)
    assert caught.value.field == ENGINE + option.partition("=")[0]


def test_a_share_and_a_size_of_the_memory_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="no effect beside kv_cache_mb = 64"):
        engine("gpu_memory_utilization=0.9", "kv_cache_mb=64")


@pytest.mark.parametrize(
    "cut",
    ["rollout.planner.enabled=true", "rollout.colocation.enabled=true", "rollout.disaggregation.degrees={vllm-0=2}"],
)
def test_only_one_says_over_how_many_devices_an_engine_runs(cut: str) -> None:
    with pytest.raises(ConfigError, match="sets how many devices each engine has"):
        load_config(None, [f"{ENGINE}tensor_parallel_size=2", cut])


@pytest.mark.parametrize("more", ["rollout.kv_transfer.enabled=true", "rollout.weights=collective"])
def test_an_engine_over_nodes_excludes_what_lies_within_one(more: str) -> None:
    wide = [f"{ENGINE}tensor_parallel_size=4", f"{ENGINE}nodes=2"]
    assert load_config(None, wide).rollout.engine.nodes == 2
    with pytest.raises(ConfigError, match=r"over the relay only|of one node each only") as caught:
        load_config(None, [*wide, more])
    assert caught.value.field == "rollout.engine.nodes"


GROUPS = (
    "rollout.engines=[{count=2, tensor_parallel_size=2, quantization='fp8'}, {max_num_seqs=8, hardware='L20'}]",
    "resources.pools={H800=1, H20=4, L20=1}",
)


def test_groups_of_engines_have_options_and_classes_of_their_own() -> None:
    config = load_config(None, GROUPS)
    rollout = config.rollout
    assert rollout.workers == 3
    assert [rollout.group_of(number) for number in range(7)] == [
        0,
        0,
        1,
        0,
        1,
        0,
        1,
    ]  # from the fourth on: added to a run
    wide, _, narrow = (rollout.engine_of(number) for number in range(3))
    assert (wide.ranks, wide.max_num_seqs, narrow.ranks, narrow.max_num_seqs) == (2, 64, 1, 8)
    assert wide.vllm_arguments()["quantization"] == "fp8"
    assert (
        EngineSettings.from_dict(wide.options()).vllm_arguments() == wide.vllm_arguments()
    )  # as its process gets them
    assert "quantization" not in narrow.vllm_arguments()
    assert [pool_requests.engine_wish(config, number) for number in range(5)] == [
        ("vllm-0", "H20", 2),
        ("vllm-1", "H20", 2),
        ("vllm-2", "L20", 1),
        ("vllm-3", "H20", 2),
        ("vllm-4", "L20", 1),
    ]
    assert parse_config(json.loads(to_json(config))) == config  # as a resume reads it


@pytest.mark.parametrize(
    ("more", "field", "words"),
    [
        ("rollout.engine.max_num_seqs=8", "engines", "leave one of the two out"),
        ("rollout.workers=4", "workers", "the groups of rollout.engines have 3"),
        ("rollout.engines=[{quantisation='fp8'}]", "engines.0.quantisation", "did you mean 'quantization'"),
        ("rollout.engines=[{cuont=2}]", "engines.0.cuont", "did you mean 'count'"),
        ("rollout.engines=[{count=0}]", "engines.0.count", "must be more than 0"),
        ("rollout.colocation.enabled=true", "engines", "so does rollout.colocation"),
        ("rollout.placement.profile='x'", "placement.profile", "is for identical engines"),
    ],
)
def test_groups_exclude_what_is_said_of_all_engines(more: str, field: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        load_config(None, [*GROUPS, more])
    assert caught.value.field == f"rollout.{field}"


def test_a_class_of_a_group_needs_pools_and_is_said_once() -> None:
    with pytest.raises(ConfigError, match="name the pools too"):
        load_config(None, GROUPS[:1])
    with pytest.raises(ConfigError, match="says the class of each group"):
        load_config(None, [*GROUPS, "resources.rollout={H20=3}"])


def test_the_shortest_context_of_a_group_is_what_a_trajectory_may_have() -> None:
    config = load_config(None, ["rollout.engines=[{max_model_len=512}, {max_model_len=8}]"])
    assert config.rollout.longest_context == 8
    with pytest.raises(ConfigError, match="a trajectory of task frozenlake may have") as caught:
        preflight.check(config, preflight.make_task(config))
    assert caught.value.field == "rollout.engines.max_model_len"


def test_without_vllm_options_are_accepted_and_named_as_unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_settings, "vllm_options", lambda: None)
    overrides = [f"{ENGINE}quantisation='fp8'", "ray.address='auto'"]
    config = load_config("examples/frozenlake.toml", overrides)
    assert config.rollout.engine.unchecked == ("quantisation",)
    (note,) = preflight.check(config, preflight.make_task(config))
    assert "quantisation could not be checked" in note
    with pytest.raises(ConfigError, match=r"raise rollout\.workers"):  # what is ours to refuse needs no vLLM
        engine("data_parallel_size=2")


@pytest.mark.engine
def test_the_options_are_the_fields_of_the_installed_engine_arguments() -> None:
    from vllm.engine.arg_utils import EngineArgs

    public = {field.name for field in dataclasses.fields(EngineArgs) if not field.name.startswith("_")}
    assert set(vllm_options() or ()) == public
    stale: Any = OWNED.keys() - public
    assert not stale
