"""Engines that round weights or KV: what is refused before anything starts, and what a dry run and the doctor say."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from orchestrator.api import ConfigError
from orchestrator.config import load_config
from orchestrator.ops.check import Check
from orchestrator.ops.doctor_config import checks_for_config
from orchestrator.resources import quantised_rollouts
from orchestrator.runtime import preflight

FP8 = "rollout.engine.quantization='fp8_per_block'"
METHODS = ("fp8_per_tensor", "fp8_per_block", "online")


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM 0.32 says them, wherever this runs."""
    monkeypatch.setattr(quantised_rollouts, "online_methods", lambda: METHODS)


def said(*overrides: str) -> str:
    (line,) = quantised_rollouts.check(load_config(None, overrides))
    return line


def test_a_method_that_takes_no_version_in_full_precision_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match=r"with as it loads: fp8_per_tensor, fp8_per_block, online") as caught:
        quantised_rollouts.check(load_config(None, ["rollout.engine.quantization='fp8'"]))
    assert (caught.value.field, caught.value.value) == ("rollout.engine.quantization", "fp8")
    config = load_config("examples/frozenlake.toml", ["rollout.engine.quantization='awq'"])
    with pytest.raises(ConfigError, match=r"rollout\.engine\.quantization = 'awq'"):
        preflight.check(config, preflight.make_task(config))
    servers = ["rollout.workers=0", "rollout.served=['http://127.0.0.1:1']", "rollout.engine.quantization='fp8'"]
    assert quantised_rollouts.check(load_config(None, servers)) == []  # their owners' engines say it


def test_vllms_own_transfer_is_refused_for_them() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.weights = 'nccl'.*take 'relay' or 'collective'"):
        quantised_rollouts.check(load_config(None, [FP8, "rollout.weights='nccl'"]))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ([FP8], ("quantization = 'fp8_per_block'", "importance weights against it are on, trainer.tis_cap = 2")),
        ([FP8, "trainer.tis_cap=4"], ("trainer.tis_cap = 4",)),
        ([FP8, "trainer.ratio_to='rollout'"], ("the clipped ratio is to it",)),
        (["rollout.engine.kv_cache_dtype='fp8'"], ("kv_cache_dtype = 'fp8'", "trainer.logprob_gap_alarm = 0.02")),
        (["rollout.engine.quantization_config={linear='fp8_per_block'}"], ("quantization_config", "rounded policy")),
    ],
)
def test_it_is_said_what_corrects_for_a_rounded_policy(more: list[str], words: tuple[str, ...]) -> None:
    line = said(*more)
    assert all(word in line for word in words)


def test_a_dry_run_and_the_doctor_say_it() -> None:
    config = load_config("examples/frozenlake.toml", [FP8])
    (line,) = quantised_rollouts.check(config)
    assert line in preflight.check(config, preflight.make_task(config))
    (check,) = [one for one in checks_for_config(list[Check](), config) if one.name == "rounded rollouts"]
    assert (check.run().status, check.run().detail) == ("ok", line)


def test_engines_that_round_nothing_are_not_mentioned() -> None:
    assert quantised_rollouts.check(load_config(None, ["rollout.engine.kv_cache_dtype='bfloat16'"])) == []


@pytest.mark.engine
def test_the_methods_are_those_of_the_installed_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    from vllm.config.quantization import ONLINE_QUANT_SHORTHAND_NAMES

    assert quantised_rollouts.online_methods() == ONLINE_QUANT_SHORTHAND_NAMES


def test_without_vllm_nothing_is_refused_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    quantised_rollouts.online_methods.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        assert quantised_rollouts.check(load_config(None, ["rollout.engine.quantization='fp8'"]))
    quantised_rollouts.online_methods.cache_clear()


def test_the_plan_counts_what_engines_hold_in_fewer_bits_and_what_arrives_in_full(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from orchestrator.runtime import memory_plan
    from tests.megatron.test_memory_plan import large

    def row(where: str, *more: str) -> dict[str, Any]:
        config = large(tmp_path, "resources.pools={H800=1, H20=1}", "rollout.workers=1", *more)
        rows = memory_plan._engines(config, config.model.path)
        return next(dict(one.parts) for one in rows if one.owner.startswith("engine") and one.hardware == where)

    plain, rounded = row("H20"), row("H20", FP8)
    embedding = 2 * 2 * 152064 * 3584  # Qwen2.5-7B: input and output, in bfloat16
    assert rounded["weights"] - embedding == (plain["weights"] - embedding) // 2
    assert row("H20", "rollout.engine.quantization='nvfp4_per_token'")["weights"] == plain["weights"]
    assert set(row("host")) == {"next version"}
    assert row("host", FP8) == {
        "two layers of the next version": pytest.approx((plain["weights"] - embedding) / 14, 0.01)
    }
