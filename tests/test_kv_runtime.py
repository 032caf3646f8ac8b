"""What a run tells its workers about KV that moves: nothing when it is off, one fresh token for all when it is on."""

from __future__ import annotations

import pytest

from orchestrator.api import ConfigError
from orchestrator.config import parse_config
from orchestrator.runtime.kv import kv_arguments


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
