"""The profiler around a real vLLM on a tiny random Qwen3: what it measures is there, and what does not fit is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orchestrator.cli import main
from orchestrator.policies.parallelism.engine_profile import EngineLayout
from orchestrator.profiler.profile_file import load_profile
from scripts.bench.probes.vllm.recompute_probe import write_tiny_qwen3
from vllm_rlplugin.engine_profiler import EngineProfiler, identity

pytestmark = pytest.mark.engine
KV_BYTES = 2 * 2 * 32 * 4  # a token: key and value of 2 layers, one head of 32, float32


def test_points_of_a_real_engine_and_what_does_not_fit_into_it(tmp_path: Path) -> None:
    write_tiny_qwen3(tmp_path, 1)
    profiler = EngineProfiler(model=str(tmp_path), max_num_seqs=8, max_model_len=256, kv_cache_mb=1, block_size=32)
    try:
        shape = profiler.shape()
        assert shape["kv_bytes_per_token"] == KV_BYTES
        assert 0 < (1 << 20) - shape["kv_tokens"] * KV_BYTES <= 2 * 32 * KV_BYTES, (
            "all of the memory but vLLM's null block"
        )
        assert shape["weight_bytes"] >= 4 * 2 * (64 * 128 * 3 + 64 * 64 * 2)
        before = profiler._engine.counts()
        for phase, batch, tokens in (("prefill", 2, 40), ("decode", 4, 100)):
            found = profiler.measure(phase, batch, tokens)
            assert set(found) == {"seconds", "spread"}
            assert 0 < found["seconds"] < 60
        after = profiler._engine.counts()
        assert after.prefix_hits == before.prefix_hits, "no prompt was seen before"
        assert after.generated - before.generated >= 3 * 2 + 4 * 18
        assert (after.running, after.waiting, after.kv_used) == (0, 0, 0), "nothing is left behind"
        assert profiler.measure("decode", 9, 32) == {"why": "max_num_seqs is 8"}
        assert "max_model_len is 256" in profiler.measure("decode", 1, 255)["why"]
        assert "the KV cache holds 2016 tokens" in profiler.measure("prefill", 8, 255)["why"]
    finally:
        profiler.close()
    assert identity(1)["engine"].startswith("vLLM 0.")


@pytest.mark.long
def test_the_command_measures_two_layouts_and_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))  # for the actors
    write_tiny_qwen3(tmp_path / "model", 1)
    engine = ["max_num_seqs=4", "max_model_len=128", "kv_cache_mb=1", "threads=1"]
    command = ["profile", "--out", str(tmp_path / "p.json"), "--json", "--batch", "1,4", "--length", "32,64"]
    (tmp_path / "c.toml").write_text(f"[model]\npath = {json.dumps(str(tmp_path / 'model'))}\n[ray]\ncpus = 2\n")
    words = [str(tmp_path / "c.toml"), *(f"rollout.engine.{item}" for item in engine)]
    assert main([*command, *words, "--tp", "1"]) == 0
    first = load_profile(tmp_path / "p.json")
    assert (len(first.points), list(first.shapes)) == (8, [EngineLayout(1)])
    assert main([*command, *words, "--tp", "1,2"]) == 0
    both = load_profile(tmp_path / "p.json", key=first.key)
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["points"] == 16
    assert both.profile.layouts == (EngineLayout(1), EngineLayout(2))
    assert all(both.points[place] == point for place, point in first.points.items()), "not measured again"
    assert both.shapes[EngineLayout(2)].kv_bytes_per_token == 2 * KV_BYTES, "both ranks keep the one head"
    assert main([*command, *words, "model.dtype=bfloat16"]) == 2
    assert "float32" in (message := capsys.readouterr().err)
    assert "bfloat16" in message
