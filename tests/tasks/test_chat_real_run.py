"""A Llama with a learned tokenizer trains in a real run: vLLM, Megatron-Core, Ray, Mooncake, the function host."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

from megatron_rlplugin import tiny_model  # noqa: E402
from orchestrator.agents.chat_template import ModelChat  # noqa: E402
from orchestrator.events import read_events  # noqa: E402
from orchestrator.store import read_trajectories  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_model(folder: Path) -> None:
    """Random weights, and a byte-level BPE tokenizer with a chat template."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=None))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|im_start|>", "<|im_end|>", "<|pad|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    made.train_from_iterator(["a0 a1 a2 b3 b4 c5 c6 d7 user assistant system, a move in one word"] * 40, trainer)
    shape = {"hidden_size": 96, "intermediate_size": 128, "layers": 2, "heads": 3, "kv_heads": 1, "head_dim": 32}
    words = [f"w{index}" for index in range(made.get_vocab_size())]
    tiny_model.create_llama(
        str(folder), vocabulary=words, max_positions=256, dtype="float32", seed=0, tied=True, **shape
    )
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|pad|>")
    fast.chat_template = CHATML
    fast.save_pretrained(folder)


def test_a_llama_trains_on_a_task_in_its_own_tokens(tmp_path: Path) -> None:
    model = tmp_path / "model"
    make_model(model)
    settings = [
        "run.name=t", "run.steps=3", f'run.folder="{tmp_path}"', f'model.path="{model}"', "task.name=nim",
        f'task.chat.tokenizer="{model}"', "task.chat.answer=[a-d][0-7]", "task.chat.response_tokens=6",
        "task.heldout_maps=10", "evaluation.prompts=10", "warmup.steps=30", "warmup.learning_rate=3e-3", "warmup.skill=0.5",
        "rollout.groups_per_step=4", "rollout.group_size=4", "rollout.environments=16", "rollout.engine.max_model_len=128",
    ]  # fmt: skip
    with (tmp_path / "output").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "orchestrator.cli", "train", "examples/frozenlake_long.toml", *settings],
            cwd=ROOT, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(timeout=500)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    assert code == 0, (tmp_path / "output").read_text()
    run = tmp_path / "t-001"
    steps = [event for event in read_events(run / "events.jsonl") if event["kind"] == "step"]
    assert len(steps) == 3
    assert not steps[-1]["ledger"]["failed_by_cause"]
    assert max(step["metrics"]["logprob_gap_mean"] for step in (steps[0], steps[-1])) < 1e-3
    chat = ModelChat(str(model))
    rows = [row for row in read_trajectories(run / "trajectories").to_pylist() if row["outcome"] == "trained"]
    assert len(rows) == 3 * 4 * 4
    opening, closing = chat.encode("<|im_start|>user\n"), chat.encode("<|im_end|>\n<|im_start|>assistant\n")
    for row in rows:
        [turn] = row["turns"]
        seen = tuple(turn["observation_ids"])
        assert (seen[: len(opening)], seen[-len(closing) :]) == (opening, closing)
