"""Every supported Megatron-Core has the hooks that we use, and trains a tiny model to the same weights.

The installed one, and those that ``make venv`` unpacked beside it; each in a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from megatron_rlplugin import (  # noqa: E402
    hookpoints,
    tiny_model,
)
from orchestrator.api import ConfigError  # noqa: E402
from orchestrator.hooks import tested_versions  # noqa: E402
from orchestrator.hooks.tested_versions import MEGATRON_CORE, find_version  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron")]
BESIDE = {folder.name.rsplit("-", 1)[-1]: folder for folder in Path(sys.prefix).glob("alternates/megatron-core-*")}
INSTALLED = (find_version(MEGATRON_CORE) or ("", ""))[1]
SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "vocabulary": [f"w{index}" for index in range(40)],
    "max_positions": 32,
    "dtype": "float32",
    "seed": 5,
}

TRAIN = """
import json, sys, torch
from megatron_rlplugin import hookpoints, model
from megatron_rlplugin.weights import hf_bridge as bridge
from megatron_rlplugin import parallel_layout as parallel
version = hookpoints.require_megatron()
parallel.initialize_parallel()
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
torch.set_num_threads(1)
tokens = torch.randint(40, (3, 11), generator=torch.Generator().manual_seed(1))


def forward_step(iterator, chunk):
    part = next(iterator)
    inputs, labels = part[:, :-1], part[:, 1:]
    output = chunk(inputs, torch.arange(10).expand_as(inputs), model.causal_mask(10), labels=labels)
    return output, lambda losses: (losses.sum(), torch.tensor(losses.numel(), dtype=torch.int), {"loss": losses.sum()})


for folder, out in json.loads(sys.argv[1]):
    (built,) = model.build_model(model.read_shape(folder), "float32")
    bridge.load_hf(built, folder)
    with torch.no_grad():
        logits = built(tokens[:, :-1], torch.arange(10).expand(3, 10), model.causal_mask(10))
    config = model.unwrap(built).config
    chunk = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), built)
    settings = OptimizerConfig(optimizer="adam", lr=1e-3, weight_decay=0.0, clip_grad=1.0, params_dtype=torch.float32)
    optimizer = get_megatron_optimizer(settings, [chunk], use_gloo_process_groups=False)
    config.finalize_model_grads_func = finalize_model_grads
    chunk.zero_grad_buffer()
    get_forward_backward_func()(
        forward_step_func=forward_step, data_iterator=iter(tokens.split(1)), model=chunk, num_microbatches=3,
        seq_length=10, micro_batch_size=1, forward_only=False,
    )
    taken, norm, _ = optimizer.step()
    assert taken
    torch.save({"logits": logits, "norm": float(norm), "weights": dict(bridge.export_hf(built))}, out)
print("ANSWER " + json.dumps({"version": version, "hooks": hookpoints.engine_status()}))
"""


def make_folders(path: Path) -> dict[str, str]:
    return {
        "qwen2": tiny_model.create_qwen2(str(path / "qwen2"), **SHAPE, intermediate_size=48, tied=True),
        "qwen3": tiny_model.create_qwen3(str(path / "qwen3"), **SHAPE, intermediate_size=48, head_dim=8),
        "llama": tiny_model.create_llama(str(path / "llama"), **SHAPE, intermediate_size=48, head_dim=8, tied=True),
        "moe": tiny_model.create_qwen3_moe(
            str(path / "moe"), **SHAPE, head_dim=8, expert_intermediate_size=24, experts=4, experts_per_token=2
        ),
    }


def train(folders: dict[str, str], path: Path, beside: Path | None) -> dict[str, Any]:
    """What one version says of itself, and for each model its logits, gradient norm and weights after a step."""
    path.mkdir()
    todo = [(folder, str(path / f"{name}.pt")) for name, folder in folders.items()]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | ({"PYTHONPATH": str(beside)} if beside else {})
    command = [sys.executable, "-W", "ignore", "-c", TRAIN, json.dumps(todo)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    answer: dict[str, Any] = json.loads(line.removeprefix("ANSWER "))
    answer["models"] = {name: torch.load(path / f"{name}.pt", weights_only=True) for name in folders}
    return answer


@pytest.mark.skipif(not BESIDE, reason="no other Megatron-Core beside the installed one; `make venv` unpacks it")
def test_all_versions_have_our_hooks_and_train_to_the_same_weights(tmp_path: Path) -> None:
    folders = make_folders(tmp_path)
    here = train(folders, tmp_path / "installed", None)
    assert here["version"] == INSTALLED
    assert here["hooks"]["hook_mismatches"] == []
    for version, folder in BESIDE.items():
        there = train(folders, tmp_path / version, folder)
        assert there["version"] == version
        assert there["hooks"]["hook_mismatches"] == []
        for name, mine in here["models"].items():
            other = there["models"][name]
            assert mine["logits"].abs().max() > 1
            assert torch.allclose(mine["logits"], other["logits"], rtol=0, atol=1e-6), name
            assert mine["norm"] == pytest.approx(other["norm"], rel=1e-6)
            for tensor, value in mine["weights"].items():
                assert torch.allclose(value, other["weights"][tensor], rtol=0, atol=1e-6), (name, tensor)


@pytest.mark.parametrize("version", ["0.16.0", "0.17.1", "0.18.2", "0.19.1", "0.20.0"])
def test_a_version_that_was_not_tested_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(tested_versions, "installed_version", lambda names: (names[0], version))
    with pytest.raises(ConfigError, match="not tested") as caught:
        hookpoints.require_megatron()
    assert (caught.value.field, caught.value.value) == ("Megatron-Core", version)
    assert str(MEGATRON_CORE.tested) in str(caught.value)


def test_a_hook_that_moved_is_refused_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = "megatron.core.transformer.transformer_layer:TransformerLayer.no_such_attribute"
    monkeypatch.setattr(hookpoints, "ATTRIBUTES", (*hookpoints.ATTRIBUTES, gone))
    moved = "megatron.core.optimizer:get_megatron_optimizer"
    monkeypatch.setitem(hookpoints.HOOK_POINTS, moved, ("config", "no_such_parameter"))
    with pytest.raises(ConfigError, match="its interfaces are not those of") as caught:
        hookpoints.require_megatron()
    assert gone in str(caught.value)
    assert moved in str(caught.value)


def test_every_version_beside_the_installed_one_is_in_the_tested_range() -> None:
    assert INSTALLED in MEGATRON_CORE.tested
    assert all(version in MEGATRON_CORE.tested for version in BESIDE)
