"""The experts that a real vLLM chose, used in training: how far engine and trainer are apart with and without.

On a CPU ``tests/support/routed_engine.py`` stands in for the part of vLLM that returns them. All else is the product's path: the
worker's completions, the wire, samples, the trainer, and in a whole run the loop, shards and the store.
"""

from __future__ import annotations

import asyncio
import base64
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")
pytest.importorskip("transformers")

from megatron_rlplugin import parallel_layout  # noqa: E402
from megatron_rlplugin.tiny_model import create_qwen3_moe  # noqa: E402
from megatron_rlplugin.trainer.megatron_trainer import MegatronTrainer  # noqa: E402
from orchestrator.api import TrainSample  # noqa: E402
from orchestrator.config import load_config  # noqa: E402
from orchestrator.hooks.tested_versions import VLLM, find_version  # noqa: E402
from orchestrator.runtime.preflight import make_task  # noqa: E402
from orchestrator.store import read_trajectories, to_trajectory  # noqa: E402
from orchestrator.transfer.turns import decode_completions  # noqa: E402
from tests.megatron.test_families_engine import run  # noqa: E402
from tests.support.family_models import VOCABULARY, write_family  # noqa: E402
from tests.support.megatron_training import ROOT  # noqa: E402
from tests.support.real_runs import of  # noqa: E402

pytestmark = [
    pytest.mark.engine,
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_version(VLLM) is None, reason="vLLM is not installed"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron"),
]

ENGINE = """
import base64, json, sys, time
from orchestrator.api import GenerationRequest, Sampling
from orchestrator.transfer.turns import encode_completions
from tests.support.routed_engine import return_experts
from vllm_rlplugin.worker.inprocess_engine import EngineOptions, InprocessEngine

folder, dtype, prompts, prompt_start = json.loads(sys.argv[1])
options = {"max_model_len": 256, "max_num_seqs": 8, "kv_cache_mb": 32, "enable_prefix_caching": False}
engine = InprocessEngine(EngineOptions.from_dict({"model": folder, "dtype": dtype, **options}), time.monotonic)
return_experts(engine)
for number, prompt in enumerate(prompts):
    sampling = Sampling(40, seed=number)
    request = GenerationRequest(f"r{number}", f"t{number}", 0, tuple(prompt), sampling, "task", experts_from=prompt_start)
    assert engine.add(request, float(number)) is None
done = []
while engine.has_work:
    done += engine.step(time.monotonic())
engine.close()
print("ANSWER " + json.dumps(base64.b64encode(encode_completions(0, done)).decode()))
"""


def generated(folder: Path, dtype: str, prompt_start: int = 0) -> list[TrainSample]:
    draw = torch.Generator().manual_seed(9)
    prompts = [torch.randint(VOCABULARY, (n,), generator=draw).tolist() for n in (21, 33, 5, 48, 17, 9, 40, 26)]
    answer = run(ENGINE, [str(folder), dtype, prompts, prompt_start], "ANSWER ")
    found = []
    for done in decode_completions(base64.b64decode(answer))[1]:
        prompt = prompts[int(done.request_id[1:])]
        assert done.experts is not None
        assert (done.experts.first, done.experts.end) == (prompt_start, len(prompt) + len(done.token_ids) - 1)
        found.append(
            TrainSample(
                done.request_id,
                "g",
                (*prompt, *done.token_ids),
                (0,) * len(prompt) + (1,) * len(done.token_ids),
                (0.0,) * len(prompt) + done.logprobs,
                ((0, len(done.token_ids)),),
                1.0,
                experts=(done.experts,),
            )
        )
    return found


def gap(folder: Path, dtype: str, samples: list[TrainSample]) -> dict[str, float]:
    """By the experts that the rollout chose ("mean"), and by the trainer's own."""
    trainer = MegatronTrainer(model=str(folder), settings={"routing_replay": True}, dtype=dtype, total_steps=4)
    try:
        return asyncio.run(trainer.logprob_gap(samples))
    finally:
        parallel_layout.shutdown_parallel()


WIDE: dict[str, Any] = {
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 6,
}


def test_in_bfloat16_replay_brings_engine_and_trainer_together(tmp_path: Path) -> None:
    folder = write_family(tmp_path / "model", "qwen3-moe", dtype=torch.bfloat16, **WIDE)
    found = gap(folder, "bfloat16", generated(folder, "bfloat16"))
    print({name: f"{value:.2e}" for name, value in found.items()})
    assert found["tokens"] == 320
    assert found["mean"] < 0.8 * found["own_experts"]


@pytest.mark.parametrize("family", ["qwen3-moe", "qwen2-moe", "glm"])
def test_in_float32_the_experts_are_the_same_and_so_is_what_is_said(family: str, tmp_path: Path) -> None:
    folder = write_family(tmp_path / "model", family)
    found = gap(folder, "float32", generated(folder, "float32", prompt_start=2))
    print(family, {name: f"{value:.2e}" for name, value in found.items()})
    assert found["max"] <= 1e-4
    assert found["own_experts"] <= 1e-4


RUN = """
import sys
from orchestrator import cli
from orchestrator.runtime import own_engines

own_engines.WORKER_CLASS = "tests.support.routed_engine:RoutedWorker"
sys.exit(cli.main(sys.argv[1:]))
"""
SMALL = (
    "rollout.groups_per_step=2", "rollout.dynamic_sampling=false",
    "rollout.environments=16", "rollout.engine.enable_prefix_caching=false",
    "trainer.micro_batch_size=8", "trainer.routing_replay=true", "run.steps=3", "warmup.steps=0",
    "evaluation.prompts=4", "evaluation.every=0",
)  # fmt: skip


def train(folder: Path, name: str, *arguments: str) -> Path:
    """A run as a user starts it, with the stand-in in its engines; its folder."""
    words = ["train", "examples/frozenlake.toml", *SMALL, f'run.folder="{folder}"', f"run.name={name}", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", RUN, *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400
    )
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-4000:]
    (run,) = folder.glob(f"{name}-*")
    return run


def test_a_run_trains_by_the_experts_of_its_engines_keeps_them_and_replays_them(tmp_path: Path) -> None:
    task = make_task(load_config(ROOT / "examples/frozenlake.toml"))
    sizes = {"hidden_size": 128, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 32}
    mixture = {"expert_intermediate_size": 32, "experts": 8, "experts_per_token": 2}
    rest = {"vocabulary": list(task.vocabulary), "max_positions": 64, "dtype": "float32", "seed": 0}
    model = f"model.path={create_qwen3_moe(str(tmp_path / 'model'), **sizes, **mixture, **rest)}"
    run = train(tmp_path, "own", model)
    steps = [step["metrics"] for step in of(run, "step")]
    print([(step["routing_replayed"], step["logprob_gap_mean"]) for step in steps])
    assert len(steps) == 3
    assert all(step["routing_replayed"] > 0.95 for step in steps)
    assert all(step["logprob_gap_mean"] < 1e-3 for step in steps)
    rows = read_trajectories(run / "trajectories").to_pylist()
    kept = [to_trajectory(row) for row in rows if row["outcome"] == "trained"]
    assert kept
    for turn in (turn for trajectory in kept for turn in trajectory.turns):
        assert turn.experts is not None
        assert (turn.experts.layers, turn.experts.choices) == (2, 2)
    again = train(tmp_path, "again", model, "--replay", str(run))
    replayed = [step["metrics"]["routing_replayed"] for step in of(again, "step")]
    assert replayed == pytest.approx([step["routing_replayed"] for step in steps])
