"""The plugin as vLLM loads it: idle it changes nothing, asked for it is live, and it refuses what was not tested."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import vllm_rlplugin
from orchestrator.api import ConfigError
from orchestrator.hooks import tested_versions
from vllm_rlplugin.patches.register import REGISTER

PATCHES = ("cli_flag", "engine_command", "cpu_keep_weights", "kv_range")

# One process with a real engine, made from a command line as `vllm bench` does; prints what it was and what it generated.
_ENGINE = """
import dataclasses, json, os, random, sys
from pathlib import Path
from scripts.bench.probes.vllm.recompute_probe import write_tiny_qwen3
folder = Path(sys.argv[1])
if not (folder / "config.json").exists():
    write_tiny_qwen3(folder, 3)
early = "vllm" in sys.modules
from vllm import SamplingParams
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as factory
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.inputs import tokens_input
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.llm_engine import LLMEngine

def plain(value):
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value) if field.name != "instance_id"]  # drawn at random
        return {name: plain(getattr(value, name)) for name in names if hasattr(value, name)}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return repr(value) if not hasattr(value, "to_dict") else plain(value.to_dict())

parser = FlexibleArgumentParser()
AsyncEngineArgs.add_cli_args(parser)
args = parser.parse_args(["--model", str(folder), "--skip-tokenizer-init", "--dtype", "float32", "--max-model-len", "128",
    "--block-size", "32", "--kv-cache-memory-bytes", str(4 << 20), "--enforce-eager", "--seed", "0"])
engine = LLMEngine.from_engine_args(EngineArgs.from_cli_args(args))
core = engine.engine_core.engine_core

def serve(seed):
    rng = random.Random(0)
    for index in range(64):
        prompt = [rng.randrange(64) for _ in range(rng.randint(5, 60))]
        engine.add_request(f"{seed}-{index}", tokens_input(prompt), SamplingParams(max_tokens=20, logprobs=2,
            temperature=(index % 3) / 2, seed=seed + index, ignore_eos=True, detokenize=False))
    outputs = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                one = output.outputs[0]
                logprobs = [sorted((token, p.logprob.hex()) for token, p in step.items()) for step in one.logprobs]
                outputs[output.request_id] = (list(one.token_ids), logprobs)
    return [outputs[f"{seed}-{index}"] for index in range(64)]

result = {
    "early": early, "greedy_and_sampled": serve(0), "other_seed": serve(1000),
    "scheduler": f"{type(core.scheduler).__module__}.{type(core.scheduler).__name__}",
    "backends": sorted(factory._registry), "core": sorted(vars(EngineCore)), "config": plain(core.vllm_config),
    "environment": {name: value for name, value in os.environ.items() if name.startswith(("VLLM", "RL_COSERVE"))},
    "plugin_loaded": "vllm_rlplugin.patches.cli_flag" in sys.modules,
}
import vllm_rlplugin
print(json.dumps(result | {"status": vllm_rlplugin.status()}))
"""


def _run_engine(model: Path, plugins: str | None) -> dict[str, Any]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "RL_COSERVE"))}
    environment = {
        **kept,
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
    } | ({} if plugins is None else {"VLLM_PLUGINS": plugins})
    done = subprocess.run(
        [sys.executable, "-c", _ENGINE, str(model)], env=environment, capture_output=True, text=True, timeout=140
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


@pytest.fixture(scope="module")
def stock_and_idle(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """An engine of stock vLLM, no plugin loaded; one with ours loaded, as it is after pip install."""
    model = tmp_path_factory.mktemp("model")
    return _run_engine(model, ""), _run_engine(model, None)


Engines = tuple[dict[str, Any], dict[str, Any]]


@pytest.mark.engine
def test_an_idle_plugin_changes_no_token_and_no_bit_of_a_logprob(stock_and_idle: Engines) -> None:
    stock, idle = stock_and_idle
    assert (stock["plugin_loaded"], idle["plugin_loaded"]) == (False, True)  # else it would be no comparison
    assert (stock["status"]["entry_point"], idle["status"]["entry_point"]) == (False, True)
    assert not stock["early"]
    assert len(stock["greedy_and_sampled"]) == 64
    assert all(len(tokens) == 20 for tokens, _ in stock["greedy_and_sampled"])
    assert stock["other_seed"] != stock["greedy_and_sampled"]  # differences are seen
    assert idle["greedy_and_sampled"] == stock["greedy_and_sampled"]
    assert idle["other_seed"] == stock["other_seed"]


@pytest.mark.engine
def test_an_idle_plugin_changes_no_class_and_no_setting_of_the_engine(stock_and_idle: Engines) -> None:
    stock, idle = stock_and_idle
    assert idle["scheduler"] == stock["scheduler"] == "vllm.v1.core.sched.scheduler.Scheduler"
    assert idle["core"] == stock["core"]
    assert idle["config"] == stock["config"]
    assert len(json.dumps(stock["config"])) > 10_000  # the whole configuration, nested
    assert set(idle["backends"]) - set(stock["backends"]) == {vllm_rlplugin.BACKEND}
    assert {*idle["environment"], "VLLM_PLUGINS"} == {*stock["environment"]}


@pytest.mark.engine
def test_an_idle_plugin_applies_no_patch_but_that_of_the_parser(stock_and_idle: Engines) -> None:
    stock, idle = stock_and_idle
    assert stock["status"]["patches"] == dict.fromkeys(PATCHES, False)
    assert idle["status"]["patches"] == dict.fromkeys(PATCHES, False) | {"cli_flag": True}
    assert not idle["status"]["active"]
    assert idle["status"]["inert"] == ""


@pytest.mark.engine
def test_status_checks_the_hooks_of_what_the_process_has_imported(stock_and_idle: Engines) -> None:
    status = stock_and_idle[1]["status"]
    assert status["signatures_checked"]
    assert 50 < status["hooks_checked"] < status["hooks"]
    assert status["signature_mismatches"] == []


_PROCESSES = """
import json, os, sys, time
import vllm.entrypoints.cli.serve  # as it is when a `vllm` command loads the plugins
from importlib.metadata import entry_points
before = set(sys.modules)
(point,) = [point for point in entry_points(group="vllm.general_plugins") if point.name == "rl-coserve"]
register = point.load()
register(); register()
import vllm_rlplugin
new = sorted({name.split(".")[0] for name in set(sys.modules) - before})
idle = vllm_rlplugin.status()["patches"]
vllm_rlplugin.activate(); vllm_rlplugin.activate()
copied = os.environ["VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"]
print(json.dumps({"new": new, "idle": idle, "active": vllm_rlplugin.status(), "copied": copied}))
"""


@pytest.mark.engine
def test_loading_brings_no_module_but_ours_and_activating_prepares_the_process() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "RL_COSERVE"))}
    environment["VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"] = "MINE"
    done = subprocess.run(
        [sys.executable, "-c", _PROCESSES], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["new"] == ["orchestrator", "vllm_rlplugin"]
    assert result["idle"] == dict.fromkeys(PATCHES, False) | {"cli_flag": True}
    assert result["active"]["active"]
    assert result["active"]["patches"]["cpu_keep_weights"]  # on vLLM's CPU build, which is what is tested here
    assert result["copied"] == "MINE,RL_COSERVE_ACTIVE"


def test_importing_the_plugin_imports_neither_vllm_nor_torch() -> None:
    code = "import sys, vllm_rlplugin; print([m for m in ('vllm', 'torch', 'ray', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_every_patch_says_why_it_exists_and_when_it_goes() -> None:
    assert [patch.name for patch in REGISTER] == list(PATCHES)
    for patch in REGISTER:
        assert str(patch.tested) == str(tested_versions.VLLM.tested)
        assert all((patch.target, patch.reason, patch.upstream, patch.remove_when))


def test_an_unknown_vllm_leaves_the_plugin_inert_and_is_refused_when_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(tested_versions, "installed_version", lambda names: ("vllm", "0.99.0"))
    monkeypatch.setattr(vllm_rlplugin, "_process", vllm_rlplugin._Process())
    monkeypatch.setattr(sys, "argv", ["train.py"])
    applied = REGISTER.status()
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
    assert status["patches"] == applied
    with pytest.raises(ConfigError, match="not tested"):
        vllm_rlplugin.activate()

    from vllm_rlplugin.worker.inprocess_worker import EngineWorker

    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"not tested.*>=0\.32,<0\.34"):
        EngineWorker(model=str(tmp_path))


def test_an_untested_vllm_ends_the_command_that_asks_with_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tested_versions, "installed_version", lambda names: ("vllm", "0.99.0"))
    monkeypatch.setattr(vllm_rlplugin, "_process", vllm_rlplugin._Process())
    monkeypatch.setattr(sys, "argv", ["/usr/bin/vllm", "serve", "model", "--plugin", "rl-coserve"])
    with pytest.raises(SystemExit) as ended:
        vllm_rlplugin.register()
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert ">=0.32,<0.34" in line


def test_wrong_worker_options_are_config_errors_that_name_the_field(tmp_path: Path) -> None:
    from vllm_rlplugin.worker.inprocess_worker import EngineWorker

    with pytest.raises(ConfigError, match="Hugging Face model folder") as caught:
        EngineWorker(model=str(tmp_path / "nothing"))
    assert caught.value.field == "model"
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="more than 0") as caught:
        EngineWorker(model=str(tmp_path), max_num_seqs=0)
    assert caught.value.field == "rollout.engine.max_num_seqs"
    with pytest.raises(ConfigError, match="did you mean 'quantization'") as caught:
        EngineWorker(model=str(tmp_path), quantisation="fp8")
    assert caught.value.field == "rollout.engine.quantisation"
    with pytest.raises(ConfigError, match="vLLM refuses"):  # a value that only vLLM itself can judge
        EngineWorker(model=str(tmp_path), kv_cache_dtype="fp7")
