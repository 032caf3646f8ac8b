"""The rollout side for training loops of others: alone, and behind verl's own classes where verl is installed.

verl needs a transformers of its own, so that it is in no environment of ours: the tests of its own classes are skipped there, and
what they call is held by the recorded signatures.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import itertools
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import orchestrator.adapters.verl as adapter
from orchestrator.adapters.rollout_side import RolloutSide, SideSettings, sampling_of
from orchestrator.api import ConfigError, RunError
from orchestrator.hooks import tested_versions
from orchestrator.transfer import RelayEndpoint, Subscriber
from tests.support.page_blocks import page_block

TESTS = Path(__file__).parents[1] / "support"
HAS_VERL = importlib.util.find_spec("verl") is not None
needs_verl = pytest.mark.skipif(
    not HAS_VERL, reason="verl is not installed (pip install 'verl>=0.9.1,<0.10', its own venv)"
)
NUMBERS = itertools.count()
SAMPLING = {"temperature": 0.5, "top_p": 0.9, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True, "max_tokens": 4}


@pytest.fixture
def workers() -> Iterator[ModuleType]:
    """The module that makes workers, importable by its name as a user's is."""
    spec = importlib.util.spec_from_file_location("adapter_workers", TESTS / "adapter_workers.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["adapter_workers"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["adapter_workers"]


def settings(**more: Any) -> dict[str, Any]:
    relay = {"job": "adapter", "kind": "memory", "master": f"adapter-{next(NUMBERS)}", "metadata": "memory"}
    return {"relay": relay, "stop_token_ids": [1], "workers": "adapter_workers:scripted", **more}


def with_side(
    scenario: Callable[[RolloutSide, Any], Coroutine[Any, Any, None]], workers: ModuleType, **more: Any
) -> None:
    async def run() -> None:
        side = RolloutSide(settings(**more))
        try:
            async with asyncio.timeout(20):
                await side.move_to(0)
                await scenario(side, workers.MADE[-1])
        finally:
            await side.close()

    asyncio.run(run())


def test_a_turn_goes_to_a_worker_with_its_priority_and_says_its_versions(workers: ModuleType) -> None:
    async def scenario(side: RolloutSide, worker: Any) -> None:
        worker.hold.clear()
        asked = [asyncio.create_task(side.generate(f"t{n}", [5, 6 + n], SAMPLING, priority=-n)) for n in range(3)]
        while len(worker.requests) < 3:
            await asyncio.sleep(0.001)
        assert [request.priority for request in worker.requests] == [0, -1, -2]
        sampling = worker.requests[0].sampling
        assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.stop_token_ids) == (
            4,
            0.5,
            0.9,
            (1,),
        )
        worker.hold.set()
        first = (await asyncio.gather(*asked))[0]
        assert first == {
            "token_ids": [6, 1], "logprobs": [-0.5, -0.25], "versions": [[0, 2]], "finish_reason": "stop", "error": "",
        }  # fmt: skip
        assert await side.move_to(3) == 3
        assert (await side.generate("t0", [5], SAMPLING))["versions"] == [[3, 2]]
        assert (await side.stats())["version"] == 3

    with_side(scenario, workers)


def test_a_trajectory_that_spans_too_many_versions_is_told_so_and_others_go_on(workers: ModuleType) -> None:
    async def scenario(side: RolloutSide, worker: Any) -> None:
        await side.generate("old", [5], SAMPLING)
        await side.move_to(2)
        assert (await side.generate("old", [5], SAMPLING))["finish_reason"] == "stop"
        await side.move_to(3)
        stale = await side.generate("old", [5], SAMPLING)
        assert (stale["finish_reason"], stale["token_ids"]) == ("stale", [])
        assert (await side.generate("new", [5], SAMPLING))["finish_reason"] == "stop"

    with_side(scenario, workers, alpha=2)


def test_when_no_worker_is_left_every_turn_ends_with_the_reason(workers: ModuleType) -> None:
    async def scenario(side: RolloutSide, worker: Any) -> None:
        worker.hold.clear()
        asked = asyncio.create_task(side.generate("t", [5], SAMPLING))
        while not worker.requests:
            await asyncio.sleep(0.001)
        worker.dead = True
        with pytest.raises(RunError, match="no rollout worker left"):
            await asked
        with pytest.raises(RunError, match="no rollout worker left"):
            await side.generate("u", [5], SAMPLING)

    with_side(scenario, workers, rollout={"worker_restarts": 0})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"relay": None}, r"here\.relay"),
        ({"relay": {"job": "x", "kind": "pigeon"}}, r"relay\.kind"),
        ({"stop_token_ids": []}, r"here\.stop_token_ids"),
        ({"stop_token_ids": ["<end>"]}, r"here\.stop_token_ids"),
        ({"alpha": -1}, r"here\.alpha"),
        ({"workers": ""}, r"here\.rollout\.served"),
        ({"rollout": {"servd": []}}, "no such key"),
        ({"reley": {}}, r"here\.reley"),
    ],
)
def test_settings_that_make_no_sense_are_one_error_that_names_them(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        RolloutSide({**settings(), **change}, "here")


@pytest.mark.parametrize("name", ["top_k", "min_p", "repetition_penalty", "stop", "logit_bias", "min_tokens"])
def test_a_sampling_parameter_that_is_not_served_is_refused_and_never_ignored(name: str) -> None:
    with pytest.raises(ConfigError, match=f"sampling_params.{name}"):
        sampling_of({"max_tokens": 3, name: 0.5}, (1,))


def test_sampling_needs_a_limit_and_keeps_the_callers_own_stops() -> None:
    with pytest.raises(ConfigError, match=r"sampling_params\.max_tokens"):
        sampling_of({"temperature": 1.0}, (1,))
    found = sampling_of({"max_new_tokens": 3, "stop_token_ids": [7, 1], "seed": 4, "top_k": None}, (1,))
    assert (found.max_tokens, found.stop_token_ids, found.seed) == (3, (1, 7), 4)


# ------------------------------------------------------------------------------------------------------ verl, recorded

# Of verl 0.9.1: what the adapter defines, calls or replaces there.
RECORDED = {
    "verl.workers.rollout.llm_server:LLMServerClient.__init__": ["self", "config", "load_balancer_handle", "kwargs"],
    "verl.workers.rollout.llm_server:LLMServerClient.generate": [
        *("self", "request_id", "prompt_ids", "sampling_params", "image_data", "video_data", "audio_data"),
        *("mm_processor_kwargs", "kwargs"),
    ],
    "verl.experimental.agent_loop:AgentLoopManager.__init__": [
        *("self", "config", "llm_client", "teacher_client", "reward_loop_worker_handles"),
    ],
    "verl.checkpoint_engine:CheckpointEngineManager.__init__": ["self", "config", "actor_wg", "replicas"],
    "verl.checkpoint_engine:CheckpointEngineManager.update_weights": ["self", "global_steps"],
    "verl.checkpoint_engine:CheckpointEngine.send_weights": ["self", "weights", "global_steps"],
    "verl.workers.rollout.replica:RolloutReplica.init_hybrid": ["self", "worker_group"],
    "verl.workers.rollout.replica:RolloutReplica.init_hybrid_colocated": ["self", "worker_group", "resource_pool"],
    "verl.workers.rollout.replica:RolloutReplica.init_standalone": ["self"],
    "verl.workers.rollout.replica:RolloutReplica.launch_servers": ["self"],
    "verl.workers.rollout.base:BaseRollout.resume": ["self", "tags"],
    "verl.workers.rollout.base:BaseRollout.release": ["self"],
}
OURS: dict[str, Any] = {
    "CheckpointEngine": adapter.EngineMethods,
    "RolloutReplica": adapter.ReplicaMethods,
    "BaseRollout": adapter.WorkerMethods,
}


def test_what_we_put_in_the_place_of_verls_methods_takes_what_they_take() -> None:
    for target, names in RECORDED.items():
        owner, _, method = target.partition(":")[2].partition(".")
        if owner in OURS:
            assert list(inspect.signature(getattr(OURS[owner], method)).parameters) == names, target
    ours = inspect.signature(adapter.ClientMethods.generate)
    call = dict.fromkeys(RECORDED["verl.workers.rollout.llm_server:LLMServerClient.generate"][2:-1])
    ours.bind(None, "request", **call, priority=3, mm_processor_output=None)


@needs_verl
def test_the_installed_verl_has_the_recorded_signatures() -> None:
    for target, names in RECORDED.items():
        module, _, path = target.partition(":")
        owner, _, method = path.partition(".")
        found = getattr(getattr(importlib.import_module(module), owner), method)
        assert list(inspect.signature(found).parameters) == names, target


def test_a_verl_that_was_not_tested_is_left_alone_and_its_names_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in adapter._MAKERS:
        monkeypatch.delitem(vars(adapter), name, raising=False)
    for installed in (None, ("verl", "0.8.0"), ("verl", "0.10.0"), ("verl", "1.0")):
        monkeypatch.setattr(tested_versions, "find_version", lambda _, found=installed: found)
        assert adapter.register_with_verl() is False
        for name in adapter._MAKERS:
            with pytest.raises(ConfigError, match=r">=0\.9\.1,<0\.10"):
                getattr(adapter, name)
    with pytest.raises(AttributeError):
        _ = adapter.Nothing


def verl_config(**rollout: Any) -> Any:
    section = {"prompt_length": 8, "response_length": 6, "max_model_len": 12, **rollout}
    as_verls = type("Section", (dict,), {"__getattr__": dict.__getitem__})
    return SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=as_verls(section)))


def test_an_answer_is_as_long_as_verl_would_let_it_be() -> None:
    config = verl_config()
    assert adapter.tokens_left(config, 4, {}) == 6  # its response
    assert adapter.tokens_left(config, 9, {}) == 3  # what the context leaves
    assert adapter.tokens_left(config, 4, {"max_tokens": 2}) == 2
    assert adapter.tokens_left(config, 4, {"max_new_tokens": 99}) == 8
    with pytest.raises(ConfigError, match="max_model_len"):
        adapter.tokens_left(config, 12, {})


def test_images_are_refused_by_name() -> None:
    client = adapter.ClientMethods()
    with pytest.raises(ConfigError, match="image_data"):
        asyncio.run(client.generate("r", prompt_ids=[1], sampling_params={}, image_data=["x"]))


def test_a_checkpoint_engine_publishes_from_rank_0_and_never_twice() -> None:
    torch = pytest.importorskip("torch")
    relay = settings()["relay"]
    endpoint = RelayEndpoint.from_dict(relay)
    taken: list[str] = []

    def weights(rank: str) -> Iterator[tuple[str, Any]]:
        for index in range(3):
            taken.append(f"{rank}{index}")
            yield f"layer.{index}", torch.full((2, 3), float(index), dtype=torch.bfloat16).t()

    engines = [adapter.EngineMethods(1, is_master=rank == 0, relay=relay) for rank in range(2)]

    async def run() -> None:
        for version in (0, 0, 5):
            for rank, engine in zip("ab", engines, strict=True):
                await engine.send_weights(weights(rank), global_steps=version)

    asyncio.run(run())
    assert taken == [f"{rank}{index}" for _ in range(2) for rank in "ab" for index in range(3)]
    subscriber = Subscriber(endpoint)
    assert subscriber.latest_version() == 5
    manifest = subscriber.manifest(5)
    found = {shard.tensor: (shard.dtype, bytes(data)) for shard, data in subscriber.fetch(manifest)}
    assert set(found) == {"layer.0", "layer.1", "layer.2"}
    want = torch.full((6,), 2.0, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
    assert found["layer.2"] == ("bfloat16", want)
    subscriber.close()


def test_a_checkpoint_engine_without_its_relay_says_where_to_put_it() -> None:
    for kwargs in ({}, {"relay": {"job": "x"}, "relais": 1}):
        with pytest.raises(ConfigError, match=r"engine_kwargs\.coserve"):
            adapter.EngineMethods(**kwargs)


# --------------------------------------------------------------------------------------------------- verl's own classes


class Remote:
    """A method as Ray's handles have them, without Ray."""

    def __init__(self, method: Any) -> None:
        self.remote = method


@pytest.fixture
def verls_config(tmp_path: Path) -> Any:
    """verl's own default config for a model that has a tokenizer, and no weights."""
    hydra, omegaconf = pytest.importorskip("hydra"), pytest.importorskip("omegaconf")
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    import verl

    made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=None))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet, marks = tokenizers.pre_tokenizers.ByteLevel.alphabet(), ["<|im_start|>", "<|im_end|>", "<|pad|>"]
    made.train_from_iterator([], tokenizers.trainers.BpeTrainer(special_tokens=marks, initial_alphabet=alphabet))
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token=marks[1], pad_token=marks[2])
    fast.chat_template = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    fast.save_pretrained(tmp_path)
    transformers.Qwen3Config(
        vocab_size=320, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, architectures=["Qwen3ForCausalLM"]
    ).save_pretrained(tmp_path)
    rollout = "actor_rollout_ref.rollout"
    with hydra.initialize_config_dir(str(Path(verl.__file__).parent / "trainer/config"), version_base=None):
        config = hydra.compose(
            "ppo_trainer",
            overrides=[
                *(f"actor_rollout_ref.model.path={tmp_path}", f"{rollout}.name=coserve", f"{rollout}.prompt_length=64"),
                *(f"{rollout}.response_length=16", f"{rollout}.calculate_log_probs=true", f"{rollout}.nnodes=1"),
                *(f"{rollout}.n_gpus_per_node=2", f"{rollout}.tensor_model_parallel_size=1"),
                *(f"{rollout}.checkpoint_engine.backend=coserve",),
            ],
        )
    with omegaconf.open_dict(config):
        config.actor_rollout_ref.rollout.custom = {"coserve": settings(stop_token_ids=[fast.eos_token_id], alpha=4)}
    return config


@needs_verl
def test_verls_own_agent_loop_gets_its_tokens_from_our_workers(verls_config: Any, workers: ModuleType) -> None:
    from verl import DataProto
    from verl.experimental.agent_loop.agent_loop import AgentLoopWorker

    count = 4

    def column(values: list[Any]) -> Any:
        found = np.empty(count, dtype=object)
        found[:] = values
        return found

    async def run() -> Any:
        side = RolloutSide(adapter.section_of(verls_config))
        handle = SimpleNamespace(generate=Remote(side.generate))
        await side.move_to(7)
        loop = AgentLoopWorker(verls_config, adapter.CoserveClient(verls_config, handle))
        batch = {
            "raw_prompt": column([[{"role": "user", "content": f"the cat {n}"}] for n in range(count)]),
            "agent_name": column(["single_turn_agent"] * count),
            "data_source": column(["x"] * count),
            "reward_model": column([{"style": "rule", "ground_truth": "x"}] * count),
            "index": np.arange(count),
            "priority": np.arange(count)[::-1].copy(),
        }
        try:
            return await loop.generate_sequences(DataProto(batch=None, non_tensor_batch=batch, meta_info={}))
        finally:
            await side.close()

    out = asyncio.run(run())
    requests = sorted(workers.MADE[-1].requests, key=lambda request: -request.priority)
    assert [request.priority for request in requests] == [3, 2, 1, 0]
    assert len({request.trajectory_id for request in requests}) == count
    assert {request.sampling.max_tokens for request in requests} == {16}
    for row, request in enumerate(requests):
        shown = out.batch["prompts"][row][-len(request.token_ids) :].tolist()
        assert shown == list(request.token_ids)
        assert out.batch["responses"][row][:2].tolist() == [request.token_ids[-1], 1]
        assert out.batch["response_mask"][row].sum() == 2
        assert out.batch["rollout_log_probs"][row][:2].tolist() == [-0.5, -0.25]
    for name in ("global_steps", "min_global_steps", "max_global_steps"):
        assert out.non_tensor_batch[name].tolist() == [7] * count


@needs_verl
def test_verl_finds_every_name_of_the_page_and_starts_no_server_of_its_own(verls_config: Any) -> None:
    import pickle

    from verl.checkpoint_engine import CheckpointEngineRegistry
    from verl.utils.import_utils import load_class_from_fqn
    from verl.workers.rollout.base import get_rollout_class
    from verl.workers.rollout.replica import get_rollout_replica_class

    assert adapter.register_with_verl()
    assert CheckpointEngineRegistry.get("coserve") is adapter.CoserveCheckpointEngine
    assert get_rollout_class("coserve") is adapter.CoserveRollout
    queue = importlib.util.find_spec("transfer_queue") is not None  # of verl's v1 trainers
    for name in adapter._MAKERS if queue else [name for name in adapter._MAKERS if not name.endswith("TQ")]:
        found = load_class_from_fqn(f"orchestrator.adapters.verl.{name}")
        assert pickle.loads(pickle.dumps(found)) is found
    section = verls_config.actor_rollout_ref
    replica = get_rollout_replica_class("coserve")(0, section.rollout, section.model, gpus_per_node=1)
    asyncio.run(replica.init_hybrid(None))
    assert (replica.server_address, replica.server_handle, replica.servers) == ("coserve-0", None, [])


def test_the_settings_of_the_page_are_read() -> None:
    yaml = pytest.importorskip("yaml")
    page = yaml.safe_load(page_block("docs/adapters.md", "actor_rollout_ref", "yaml"))["actor_rollout_ref"]["rollout"]
    given = page["custom"]["coserve"]
    side = SideSettings.model_validate(given)
    assert (side.alpha, side.config().rollout.served) == (2, ("http://127.0.0.1:8000", "http://127.0.0.1:8001"))
    assert RelayEndpoint.from_dict(given["relay"]).kind == "fsspec"
    assert page["checkpoint_engine"]["engine_kwargs"]["coserve"]["relay"] == given["relay"]
    named = (page["agent"]["agent_loop_manager_class"], page["checkpoint_manager_class"])
    assert {name.partition("adapters.verl.")[2] for name in named} <= set(adapter._MAKERS)
    assert SideSettings.model_validate(settings()).config().rollout.workers == 1
    served = settings(workers="", rollout={"served": ["http://127.0.0.1:8000"]})
    assert SideSettings.model_validate(served).config().rollout.served == ("http://127.0.0.1:8000",)
