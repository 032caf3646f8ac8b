"""Weights that leave an NVIDIA GPU and come back, kept, updated and dropped: a tiny model with a relay. It has not run yet
(docs/coserving.md); a model of real size: scripts/bench/probes/vllm/activation_probe.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.ops.nvidia_driver import find_gpus
from vllm_rlplugin.kvpool.engine.pool_engine import pool_path

ROOT = Path(__file__).parents[2]
THERE = find_gpus()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engine,
    pytest.mark.skipif(bool(THERE.missing), reason=f"needs an NVIDIA GPU: {THERE.missing}"),
]

_ENGINE = """
import json, sys, time
from pathlib import Path
folder, name = Path(sys.argv[1]), sys.argv[2]
from safetensors.torch import load_file
from megatron_rlplugin.tiny_model import create_qwen3
from orchestrator.api import GenerationRequest, Sampling
from orchestrator.transfer import Publisher, RelayEndpoint
from vllm_rlplugin.worker.inprocess_engine import EngineOptions, InprocessEngine
from scripts.bench.probes.vllm.recompute_probe import publish

shape = {"intermediate_size": 512, "head_dim": 64, "hidden_size": 256, "layers": 2, "heads": 4, "kv_heads": 2,
         "max_positions": 512, "dtype": "bfloat16", "vocabulary": [chr(33 + at) for at in range(93)]}
models = [Path(create_qwen3(str(folder / f"model{seed}"), seed=seed, **shape)) for seed in (1, 2)]
endpoint = RelayEndpoint(job="activation", kind="fsspec", master=f"file://{folder / 'relay'}",
                         metadata=str(folder / "metadata.sqlite"))
publisher = Publisher(endpoint)
publisher.reset()
for version, model in ((1, models[1]), (2, models[0])):
    publish(publisher, version, {key: part for file in model.glob("*.safetensors") for key, part in load_file(file).items()})
plugin = {"kv_pool": name, "kv_pool_mib": 32, "kv_pool_budget_mib": 32, "kv_pool_supply": "created"}
engine = InprocessEngine(EngineOptions(model=str(models[0]), dtype="bfloat16", kv_cache_mb=16, relay=endpoint.to_dict(),
                              plugin=plugin, max_num_seqs=8, sleep_mode=True), time.monotonic)
core = engine._core

def answers(tag):
    found = []
    for number in range(3):
        prompt = tuple((7 * at + 13 * number) % 60 for at in range(40 + 20 * number))
        engine.add(GenerationRequest(f"{tag}{number}", "t", 0, prompt, Sampling(24, temperature=0.0), "test"),
                   time.monotonic())
        while engine.has_work:
            found += [[list(done.token_ids), list(done.logprobs)] for done in engine.step(time.monotonic())]
    return found

def asleep(kept):
    engine.pause(time.monotonic())
    refused = core.rl_coserve("deactivate", {}).get("refused", "")
    (report,) = engine._rpc("rl_weights_away", (kept,))
    return {"refused": refused, "report": report}

def awake():
    core.rl_coserve("activate", {})
    (report,) = engine._rpc("rl_weights_back")
    return {"report": report, "verified": engine._rpc("rl_verify")[0]["state"]}

out = {"first": answers("a"), "slept": asleep(True), "woke": awake()}
engine.resume()
out["again"] = answers("b")
engine.pause(time.monotonic()); engine.update(1); engine.resume()
out["second"] = answers("c")
out["slept_updated"] = asleep(True)
out["woke_updated"] = awake()
engine.resume()
out["second_again"] = answers("d")
out["slept_dropped"] = asleep(False)
out["woke_dropped"] = awake()
engine.update(2); engine.resume()
out["third"] = answers("e")
print("answer " + json.dumps(out))
"""


@pytest.mark.timeout(300)
def test_weights_leave_a_device_and_come_back_bit_for_bit_with_captured_graphs_on_a_gpu(tmp_path: Path) -> None:
    name = f"test-activation-gpu-{os.getpid()}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "VLLM_LOGGING_LEVEL": "ERROR"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ENGINE, str(tmp_path), name],
            capture_output=True, text=True, env=environment, timeout=280, check=False,
        )  # fmt: skip
    finally:
        pool_path(name).unlink(missing_ok=True)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [row for row in done.stdout.splitlines() if row.startswith("answer ")]
    found = json.loads(line.removeprefix("answer "))
    for slept, level in (("slept", 1), ("slept_updated", 1), ("slept_dropped", 2)):
        report = found[slept]["report"]
        assert (found[slept]["refused"], report["left"]) == ("", 0)
        assert f"sleep level {level}" in report["how"]
        assert report["freed"] >= report["bytes"]
    for woke in ("woke", "woke_updated"):
        assert (found[woke]["report"]["error"], found[woke]["verified"]) == ("", "intact")
    assert found["woke_dropped"]["verified"] == "unusable"
    assert found["again"] == found["first"]
    assert found["second"] != found["first"]
    assert found["second_again"] == found["second"]
    assert found["third"] == found["first"]
    print(
        json.dumps(
            {"device": THERE.devices[0].name, "inactive": found["slept"]["report"], "woke": found["woke"]["report"]}
        )
    )
