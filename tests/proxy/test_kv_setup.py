"""What a run tells its workers about KV that moves: nothing when it is off, one fresh token for all when it is on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orchestrator.api import ConfigError
from orchestrator.config import parse_config
from orchestrator.runtime.kv_setup import kv_arguments
from scripts import bench
from scripts.bench.micro.kv_migrate import longest
from scripts.bench.probes.vllm.kv_probe import describe_model


def test_off_there_is_nothing_and_on_there_is_a_token_of_this_start() -> None:
    assert kv_arguments(parse_config({})) == {}
    config = parse_config({"rollout": {"kv_transfer": {"enabled": True, "staging_mb": 64}}})
    first, second = kv_arguments(config), kv_arguments(config)
    assert first["plugin"] == {"kv_transfer": True, "kv_staging_mb": 64}
    assert first["kv"]["host"] == "127.0.0.1"
    assert len(first["kv"]["token"]) >= 32
    assert first["kv"]["token"] != second["kv"]["token"]


def test_with_servers_all_have_the_servers_token(monkeypatch: pytest.MonkeyPatch) -> None:
    data = {"rollout": {"kv_transfer": {"enabled": True}, "served": ["http://127.0.0.1:1"], "workers": 1}}
    monkeypatch.setenv("RL_COSERVE_TOKEN", "the-servers-token")
    assert kv_arguments(parse_config(data))["kv"]["token"] == "the-servers-token"
    monkeypatch.delenv("RL_COSERVE_TOKEN")
    with pytest.raises(ConfigError, match="served_token_file"):
        kv_arguments(parse_config(data))


def test_a_benchmark_refuses_a_model_that_it_cannot_take_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="routing is not measured with a model of yours"):
        bench.run("routing", quick=True, nonce="", model=str(tmp_path))
    with pytest.raises(ConfigError, match=r"bench --model = .*no Hugging Face folder"):
        bench.run("kv-migrate", quick=False, nonce="", model=str(tmp_path))
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 2048}')
    assert longest(tmp_path) == 2048 - 64


def test_what_a_figure_says_of_a_model_is_read_from_its_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--model = .*no Hugging Face folder"):
        describe_model(tmp_path)
    config = {"num_hidden_layers": 30, "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3}
    more = {"vocab_size": 49152, "max_position_embeddings": 8192, "_model_name_or_path": "/somewhere/else/small"}
    (tmp_path / "config.json").write_text(json.dumps({**config, **more}))
    about = describe_model(tmp_path)
    assert (about["head_dim"], about["kv_bytes_per_token"]) == (64, 46080)
    assert about["name"] == "small", "no path of a machine is in a figure"
