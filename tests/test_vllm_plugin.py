"""The plugin as vLLM loads it: idle it changes nothing, and it refuses what was not tested."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

import vllm_rlplugin
from orchestrator.api import ConfigError
from orchestrator.hooks import signature_mismatches, versions
from vllm_rlplugin.engine import prepare_process
from vllm_rlplugin.patches import REGISTER

_IDLE = """
import json, os, sys
os.environ["VLLM_PLUGINS"] = "lora_filesystem_resolver,lora_hf_hub_resolver"  # vLLM's own, without ours
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
import random
from pathlib import Path
from vllm_rlplugin.recompute_probe import write_tiny_qwen3
import vllm_rlplugin
folder = Path(sys.argv[1])
write_tiny_qwen3(folder, 3)
imported_by_probe = "vllm" in sys.modules
import vllm.plugins
from vllm import SamplingParams
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as factory
from vllm.engine.arg_utils import EngineArgs
from vllm.inputs import tokens_input
from vllm.v1.engine.llm_engine import LLMEngine

def serve():
    engine = LLMEngine.from_engine_args(EngineArgs(
        model=str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=128, block_size=32,
        kv_cache_memory_bytes=4 << 20, enforce_eager=True, seed=0))
    rng = random.Random(0)
    for index in range(12):
        prompt = [rng.randrange(64) for _ in range(rng.randint(5, 60))]
        engine.add_request(f"r{index}", tokens_input(prompt), SamplingParams(
            max_tokens=20, temperature=(index % 3) / 2, seed=index, logprobs=2, ignore_eos=True, detokenize=False))
    outputs = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                one = output.outputs[0]
                logprobs = [sorted((t, p.logprob) for t, p in step.items()) for step in one.logprobs]
                outputs[output.request_id] = (list(one.token_ids), logprobs)
    engine.engine_core.shutdown()
    return outputs, vllm_rlplugin.status(), sorted(factory._registry)

without = serve()
del os.environ["VLLM_PLUGINS"]
vllm.plugins.plugins_loaded = False
with_plugin = serve()
print(json.dumps({
    "same": without[0] == with_plugin[0], "requests": len(without[0]), "before": without[1], "after": with_plugin[1],
    "added": [name for name in with_plugin[2] if name not in without[2]], "imported_early": imported_by_probe,
}))
"""


@pytest.mark.engine
def test_an_idle_plugin_changes_no_token_and_no_logprob(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    done = subprocess.run(
        [sys.executable, "-c", _IDLE, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert result["same"]
    assert result["requests"] == 12
    # The comparison was one: absent before, loaded through its entry point after, and live in the measured process.
    assert (result["before"]["entry_point"], result["after"]["entry_point"]) == (False, True)
    assert (result["before"]["backend_registered"], result["after"]["backend_registered"]) == (False, True)
    assert result["added"] == [vllm_rlplugin.BACKEND]
    assert not any(result["after"]["patches"].values())
    assert not result["imported_early"]


@pytest.mark.engine
def test_all_hook_targets_have_the_tested_signatures() -> None:
    prepare_process(1)  # this may be the first import of vLLM in the test process
    assert [str(mismatch) for mismatch in signature_mismatches(vllm_rlplugin.HOOKS)] == []


def test_importing_the_plugin_imports_neither_vllm_nor_torch() -> None:
    code = "import sys, vllm_rlplugin; print([m for m in ('vllm', 'torch', 'ray', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_there_is_no_patch_of_vllm() -> None:
    assert len(REGISTER) == 0
    assert REGISTER.apply() == ()


def test_an_unknown_vllm_leaves_the_plugin_inert_and_is_refused_when_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(versions, "installed_version", lambda names: ("vllm", "0.99.0"))
    monkeypatch.setattr(vllm_rlplugin, "_process", vllm_rlplugin._Process())
    with caplog.at_level(logging.WARNING):
        vllm_rlplugin.register()
        vllm_rlplugin.register()
    assert [
        record.message for record in caplog.records if "inert" in record.message and ">=0.32,<0.34" in record.message
    ]
    assert len(caplog.records) == 1
    status = vllm_rlplugin.status()
    assert ">=0.32,<0.34" in status["inert"]
    assert status["vllm"] == {"distribution": "vllm", "version": "0.99.0"}

    from vllm_rlplugin.worker import EngineWorker

    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"not tested.*>=0\.32,<0\.34"):
        EngineWorker(model=str(tmp_path))


def test_wrong_worker_options_are_config_errors_that_name_the_field(tmp_path: Path) -> None:
    from vllm_rlplugin.worker import EngineWorker

    with pytest.raises(ConfigError, match="Hugging Face model folder") as caught:
        EngineWorker(model=str(tmp_path / "nothing"))
    assert caught.value.field == "model"
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="at least 1") as caught:
        EngineWorker(model=str(tmp_path), max_num_seqs=0)
    assert caught.value.field == "max_num_seqs"
