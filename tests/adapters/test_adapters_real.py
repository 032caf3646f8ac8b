"""verl's own managers over Ray, a real vLLM engine behind our proxy, weights over a real relay. Where verl is installed."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import orchestrator.adapters.verl as adapter

TESTS = Path(__file__).parents[1] / "support"
pytestmark = [
    pytest.mark.engine,
    pytest.mark.long,
    pytest.mark.skipif(
        importlib.util.find_spec("verl") is None,
        reason="verl is not installed (pip install 'verl>=0.9.1,<0.10', its own venv)",
    ),
]
ROLLOUT = "actor_rollout_ref.rollout"
COUNT = 4
MARKS = ["<|im_start|>", "<|im_end|>", "<|pad|>"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_model(folder: Path) -> int:
    """A tiny Qwen3 with a byte-level tokenizer and a chat template; returns the id that ends an answer."""
    import tokenizers
    import transformers

    from megatron_rlplugin.tiny_model import create_qwen3

    made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=None))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator([], tokenizers.trainers.BpeTrainer(special_tokens=MARKS, initial_alphabet=alphabet))
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token=MARKS[1], pad_token=MARKS[2])
    fast.chat_template = TEMPLATE
    words = fast.convert_ids_to_tokens(range(len(fast)))
    words += [f"<unused{number}>" for number in range(-len(words) % 32)]
    sizes = {"hidden_size": 64, "intermediate_size": 128, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 32}
    options: dict[str, Any] = {**sizes, "max_positions": 256, "dtype": "float32", "seed": 0}
    create_qwen3(str(folder), vocabulary=words, **options)
    fast.save_pretrained(folder)
    return int(fast.eos_token_id)


def config_of(model: Path, relay: dict[str, Any], end: int) -> Any:
    import hydra
    import verl
    from omegaconf import open_dict

    with hydra.initialize_config_dir(str(Path(verl.__file__).parent / "trainer/config"), version_base=None):
        given = {
            "actor_rollout_ref.model.path": model,
            **{f"{ROLLOUT}.{name}": 1 for name in ("nnodes", "n_gpus_per_node", "tensor_model_parallel_size")},
            f"{ROLLOUT}.prompt_length": 64,
            f"{ROLLOUT}.response_length": 16,
            f"{ROLLOUT}.max_model_len": 200,
            f"{ROLLOUT}.name": "coserve",
            f"{ROLLOUT}.checkpoint_engine.backend": "coserve",
            f"{ROLLOUT}.calculate_log_probs": "true",
            f"{ROLLOUT}.agent.num_workers": 1,
        }
        config = hydra.compose("ppo_trainer", overrides=[f"{name}={value}" for name, value in given.items()])
    rollout = config.actor_rollout_ref.rollout
    with open_dict(config):
        own = {"relay": relay, "stop_token_ids": [end], "workers": "adapter_workers:engine"}
        rollout.custom = {"coserve": own}
        rollout.checkpoint_engine.engine_kwargs = {"coserve": {"relay": relay}}
    return config


class Trainer:
    """Stands where verl's group of trainers is: publishes through verl's checkpoint engine, as its worker does."""

    world_size = 1

    def __init__(self, engine: Any, weights: dict[str, Any]) -> None:
        self.engine, self.weights = engine, weights

    def update_weights(self, global_steps: int, mode: str) -> list[Any]:
        import ray

        def send() -> None:
            asyncio.run(self.engine.send_weights(iter(self.weights.items()), global_steps=global_steps))

        thread = threading.Thread(target=send)  # a worker of verl's is another process
        thread.start()
        thread.join()
        return [ray.put({})]


def prompts() -> Any:
    from verl import DataProto

    def column(values: list[Any]) -> Any:
        found = np.empty(COUNT, dtype=object)
        found[:] = values
        return found

    batch = {
        "raw_prompt": column([[{"role": "user", "content": f"the cat {number}"}] for number in range(COUNT)]),
        "agent_name": column(["single_turn_agent"] * COUNT),
        "data_source": column(["x"] * COUNT),
        "reward_model": column([{"style": "rule", "ground_truth": "x"}] * COUNT),
        "index": np.arange(COUNT),
    }
    return DataProto(batch=None, non_tensor_batch=batch, meta_info={})


def test_verl_samples_from_our_engine_and_its_weights_reach_it(tmp_path: Path) -> None:
    import ray
    from safetensors.torch import load_file
    from verl.checkpoint_engine import CheckpointEngineRegistry
    from verl.utils.config import omega_conf_to_dataclass
    from verl.utils.import_utils import load_class_from_fqn
    from verl.workers.rollout.llm_server import LLMServerManager

    assert adapter.register_with_verl()
    model = tmp_path / "model"
    end = make_model(model)
    place = {"master": f"file://{tmp_path}/relay", "metadata": str(tmp_path / "metadata.sqlite")}
    relay = {"job": "verl", "kind": "fsspec", **place}
    config = config_of(model, relay, end)
    variables = {
        "PYTHONPATH": os.pathsep.join([str(TESTS.parents[1]), str(TESTS)]),
        "ADAPTER_MODEL": str(model),
        "OMP_NUM_THREADS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    ray.init(
        address="local", num_cpus=4, include_dashboard=False, logging_level="ERROR", runtime_env={"env_vars": variables}
    )
    try:
        servers = LLMServerManager.create(config=config)
        assert servers.get_addresses() == ["coserve-0"]
        loops = load_class_from_fqn("orchestrator.adapters.verl.CoserveAgentLoopManager").create(
            config=config, llm_client=servers.get_client()
        )
        engine = CheckpointEngineRegistry.new("coserve", is_master=True, bucket_size=1, relay=relay)
        trainer = Trainer(engine, load_file(str(model / "model.safetensors")))
        manager = load_class_from_fqn("orchestrator.adapters.verl.CoserveCheckpointManager")(
            config=omega_conf_to_dataclass(config.actor_rollout_ref.rollout.checkpoint_engine),
            actor_wg=trainer,
            replicas=servers.get_replicas(),
        )
        manager.sleep_replicas()
        for version in (0, 3):
            manager.update_weights(version)
            out = loops.generate_sequences(prompts())
            assert out.non_tensor_batch["min_global_steps"].tolist() == [version] * COUNT
            said = out.batch["response_mask"].bool()
            assert out.batch["responses"][said].max() < 320
            assert (out.batch["rollout_log_probs"][said] < 0).all()
            assert (out.batch["rollout_log_probs"][~said] == 0).all()
        # An embedding of zeros makes every token equally likely: the engine has the weights that were published.
        ends = ("embed_tokens.weight", "lm_head.weight")
        flat = {name: value * (not name.endswith(ends)) for name, value in trainer.weights.items()}
        trainer.weights = flat
        manager.update_weights(4)
        out = loops.generate_sequences(prompts())
        said = out.batch["response_mask"].bool()
        rows = next(value for name, value in flat.items() if "embed_tokens" in name).shape[0]
        assert np.allclose(out.batch["rollout_log_probs"][said].numpy(), -np.log(rows), atol=1e-4)
        actor = ray.get_actor(adapter.ACTOR)
        assert ray.get(actor.stats.remote())["version"] == 4
        ray.get(actor.close.remote())
    finally:
        ray.shutdown()
