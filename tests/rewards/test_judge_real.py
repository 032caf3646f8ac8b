"""A whole run (vLLM, Megatron-Core, Ray, Mooncake) scored by a judge with streamed layers, which the run starts itself and which
is killed meanwhile (RollPacker 4.3). On a CPU; the judge is made of nothing, and says one of two scores."""

from __future__ import annotations

import os
import signal
import string
import subprocess
import sys
import time
from pathlib import Path

import pytest

from orchestrator.ledger import recount
from orchestrator.store import read_trajectories
from tests.support.real_runs import of

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
LAYERS = 8
SETTINGS = [
    "run.name=t",
    "run.steps=3",
    "run.mode=sync_plus",
    "rollout.alpha=0",
    "model.hidden_size=64",
    "model.intermediate_size=128",
    "rollout.groups_per_step=4",
    "rollout.group_size=4",
    "rollout.redundant_groups=1.0",
    "rollout.environments=16",
    "trainer.micro_batch_size=8",
    "evaluation.prompts=4",
    "evaluation.every=0",
    "warmup.steps=5",
    "reward.timeout=60",
    'reward.judge.criterion="It is good."',
    'reward.judge.template="{criterion} {episode} {form}"',
    "reward.judge.max_tokens=8",
    "reward.judge.streamed.dtype=float32",
]


def test_a_run_starts_its_streamed_judge_and_brings_it_back_when_it_is_killed(tmp_path: Path) -> None:
    judge = write_judge(tmp_path / "judge")
    own = [f'reward.judge.path="{judge}"', "reward.judge.streamed.memory_mb=12", f'run.folder="{tmp_path}"']
    run = tmp_path / "t-001"
    with (tmp_path / "output").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "orchestrator.cli", "train", "examples/frozenlake.toml", *SETTINGS, *own],
            cwd=ROOT,
            stdout=output,
            stderr=output,
            env={**os.environ, "NO_COLOR": "1", "CUDA_VISIBLE_DEVICES": ""},
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + 300
        while not of(run, "step"):
            assert process.poll() is None, (tmp_path / "output").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        pids = dict(line.split() for line in (run / "processes").read_text().splitlines())
        os.kill(int(pids["judge"]), signal.SIGKILL)
        code = process.wait(timeout=200)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    said = (tmp_path / "output").read_text()
    assert code == 0, said
    (started,) = of(run, "judge")
    assert (started["device"], started["layers"], started["mps"]) == ("cpu", LAYERS, False)
    assert "no GPU" in started["why"]
    assert [event["what"] for event in of(run, "recovered")] == ["judge"]
    scored = of(run, "rewards")
    assert [event["judge_layers"] for event in scored] == [LAYERS] * 3
    assert all(0 <= event["judge_resident"] < LAYERS for event in scored), "memory for all layers: nothing was streamed"
    assert all((event["failed"], event["unreadable"]) == (0, 0) for event in scored)
    counts = recount((run / "ledger.jsonl").read_text().splitlines())
    assert (counts["trained"], counts["failed"]) == (3 * 16, 0)
    rows = read_trajectories(run / "trajectories", ["total_reward", "outcome"]).to_pylist()
    assert {round(row["total_reward"], 6) for row in rows if row["outcome"] == "trained"} <= {0.3, 0.7}
    assert not _alive(int(pids["judge"]))


def write_judge(folder: Path, scores: tuple[int, ...] = (3, 7)) -> str:
    """A Qwen3 whose first word after any prompt is a score, and whose second is the end: a Hugging Face folder of 8 layers of
    1.4 MB (float32). Which of the scores it says depends on all of its layers."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    said = [f"Score: {score}" for score in scores]
    words = ["<end>", "<unk>", *said, *string.printable]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", unk_token="<unk>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)

    shape = Qwen3Config(
        vocab_size=len(words),
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=4096,
        eos_token_id=0,
        tie_word_embeddings=False,
    )
    torch.manual_seed(3)
    model = Qwen3ForCausalLM(shape).float()
    with torch.no_grad():
        rows, head = model.model.embed_tokens.weight, model.lm_head.weight
        rows.normal_(0, 0.3)
        head.zero_()
        rows[:, 0], rows[:, 1] = 4.0, 0.0  # the first two directions of the stream: after a word, after a score
        head[2 : 2 + len(said), 0] = 1.0
        for index in range(len(said)):
            rows[2 + index, 0], rows[2 + index, 1] = 0.0, 4.0
            head[2 + index, 2:].normal_(0, 0.02)
        head[0, 1] = 1.0
    model.save_pretrained(folder)
    return str(folder)


def _alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
