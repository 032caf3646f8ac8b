"""The trainer's settings, the hook points and the CPU shims, without starting Megatron's groups."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from megatron_rlplugin import cpu, hookpoints  # noqa: E402
from megatron_rlplugin.patches import REGISTER  # noqa: E402
from orchestrator.api import ConfigError  # noqa: E402
from orchestrator.config import parse_config  # noqa: E402
from orchestrator.hooks.signatures import SourceTree  # noqa: E402
from orchestrator.settings.trainer_settings import TrainerSettings  # noqa: E402


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("learning_rat", 1.0),
        ("learning_rate", 0.0),
        ("loss", "median"),
        ("minibatches", 0),
        ("clip_low", 1.0),
        ("final_learning_rate", 0.1),
        ("objective", "trpo"),
        ("kl_estimator", "k4"),
        ("kl_coefficient", -0.1),
        ("gamma", 0.0),
        ("gae_lambda", 1.5),
        ("value_clip", 0.0),
        ("value_learning_rate", 0.0),
        ("max_token_lag", -1),
        ("micro_batch_order", "random"),
        ("pack_tokens", 0),
        ("tensor_parallel", 0),
    ],
)
def test_a_wrong_setting_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^trainer.{field} = "):
        TrainerSettings.from_dict({field: value})


KL = {"kl_coefficient": 0.1}
IN_REWARD = {**KL, "kl_in_reward": True, "kl_estimator": "k1"}


@pytest.mark.parametrize(
    ("field", "given", "says"),
    [
        ("kl_in_reward", IN_REWARD, "rewards per token"),
        ("kl_in_reward", {"objective": "ppo", "kl_in_reward": True, "kl_estimator": "k1"}, "kl_coefficient above 0"),
        ("kl_estimator", {**IN_REWARD, "objective": "ppo", "kl_estimator": "k3"}, "must be 'k1'"),
        ("kl_estimator", {**KL, "kl_estimator": "k1"}, "mean 0"),
        ("loss", {"objective": "gspo", "loss": "token-mean"}, "whole sequences"),
        ("gamma", {"gamma": 0.9}, "ppo and reinforce\\+\\+ only"),
        ("gae_lambda", {"objective": "reinforce++", "gae_lambda": 0.9}, "ppo only"),
        ("value_clip", {"value_clip": 0.3}, "ppo only"),
        ("value_learning_rate", {"value_learning_rate": 0.01}, "ppo only"),
        ("stream", {"objective": "reinforce++", "stream": True}, "whole batch"),
        ("normalize_advantage", {"objective": "ppo", "stream": True}, "whiten"),
        ("minibatches", {"stream": True, "minibatches": 2}, "must be 1"),
        ("grad_offload", {"grad_offload": True}, "set trainer.stream"),
    ],
)
def test_settings_that_contradict_each_other_are_refused_by_name(
    field: str, given: dict[str, object], says: str
) -> None:
    with pytest.raises(ConfigError, match=f"^trainer.{field} = .*{says}") as ours:
        TrainerSettings.from_dict(given)
    with pytest.raises(ConfigError) as theirs:
        parse_config({"trainer": given})
    assert (theirs.value.field, str(theirs.value)) == (ours.value.field, str(ours.value))


@pytest.mark.parametrize(
    "given",
    [
        {"objective": "ppo", "stream": True, "normalize_advantage": False, "grad_offload": True, "gamma": 0.9},
        {"objective": "reinforce++", **IN_REWARD, "gamma": 0.99},
        {"objective": "gspo", "loss": "sequence-mean", **KL, "kl_estimator": "k2"},
        {"objective": "dapo", "loss": "sequence-sum", "stream": True},
        {"objective": "rloo", "max_token_lag": 0, "minibatches": 4},
    ],
)
def test_what_fits_together_is_accepted_by_plugin_and_config(given: dict[str, object]) -> None:
    TrainerSettings.from_dict(given)
    parse_config({"trainer": given})


def test_what_is_left_out_is_the_objectives_own() -> None:
    dapo = TrainerSettings(objective="dapo")
    assert (dapo.clip_range, dapo.loss_mean, dapo.needs_critic, dapo.needs_reference) == (
        (0.2, 0.28),
        "token-mean",
        False,
        False,
    )
    ppo = TrainerSettings(objective="ppo", loss="sequence-mean", clip_high=0.4, kl_coefficient=0.1, learning_rate=0.01)
    assert (ppo.clip_range, ppo.loss_mean, ppo.needs_critic, ppo.needs_reference) == (
        (0.2, 0.4),
        "sequence-mean",
        True,
        True,
    )
    assert ppo.value_rate == 0.01
    assert TrainerSettings(objective="ppo", value_learning_rate=0.02).value_rate == 0.02
    assert TrainerSettings(stream=True).order == "arrival"
    assert TrainerSettings().order == "length"


def test_a_warm_up_of_the_learning_rate_must_fit_into_the_run() -> None:
    with pytest.raises(ConfigError, match=r"^trainer.lr_warmup_steps = 5: must be below run.steps = 5"):
        TrainerSettings(lr_warmup_steps=5).check_schedule(5)


def test_the_installed_megatron_has_the_hook_points_that_were_tested() -> None:
    assert hookpoints.hook_mismatches() == ()
    assert hookpoints.require_megatron() in REGISTER.component.tested
    assert hookpoints.engine_status()["hook_mismatches"] == []


def test_the_sources_are_read_once_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every trainer looks when it is made, and whenever it is asked for its status: 0.3 s, when it parsed them anew."""
    hookpoints.hook_mismatches()
    monkeypatch.setattr(SourceTree, "installed", lambda folder: pytest.fail("the sources are read again"))
    assert hookpoints.engine_status()["hook_mismatches"] == []


def test_a_moved_interface_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(hookpoints.HOOK_POINTS, "megatron.core.optimizer:get_megatron_optimizer", ("config", "gone"))
    with pytest.raises(ConfigError, match="get_megatron_optimizer"):
        hookpoints.require_megatron()


@pytest.mark.parametrize(
    ("owner", "method"),
    [
        ("moe.router:TopKRouter", "_apply_expert_bias"),
        ("moe.router:TopKRouter", "apply_z_loss"),
        ("moe.router:TopKRouter", "attach_and_log_load_balancing_loss"),
        ("moe.router_replay:RouterReplay", "get_replay_topk"),
        ("models.gpt:GPTModel", "_postprocess"),
    ],
)
def test_a_version_that_renamed_a_method_replaced_on_objects_is_refused(
    monkeypatch: pytest.MonkeyPatch, owner: str, method: str
) -> None:
    """It would run as if it had never been replaced."""
    module, _, name = owner.partition(":")
    place = "megatron.core." if module.startswith("models") else "megatron.core.transformer."
    monkeypatch.delattr(getattr(importlib.import_module(place + module), name), method)
    with pytest.raises(ConfigError, match=f"{name}.{method}: expected parameters .* found nothing there"):
        hookpoints.require_megatron()


@pytest.mark.parametrize("name", ["router_replay", "expert_bias", "local_tokens_per_expert", "mtp_process"])
def test_a_version_that_renamed_an_attribute_set_on_objects_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def renamed(folder: Path) -> SourceTree:
        def read(path: str) -> str | None:
            file = folder / path
            return file.read_text(encoding="utf-8").replace(f"self.{name}", "self.other") if file.is_file() else None

        return SourceTree(read)

    monkeypatch.setattr(hookpoints, "_in_source", {})
    monkeypatch.setattr(SourceTree, "installed", renamed)
    with pytest.raises(ConfigError, match=f"[a-zA-Z]+.{name}: nothing there"):
        hookpoints.require_megatron()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the shims are for machines without CUDA")
def test_the_shims_reach_only_the_modules_that_need_them_and_go_again() -> None:
    was_active = cpu.is_active()
    assert cpu.activate()
    assert cpu.activate()  # a second time changes nothing
    schedules = importlib.import_module("megatron.core.pipeline_parallel.schedules")
    assert schedules.torch.zeros([], device="cuda").device.type == "cpu"
    assert schedules.torch.cuda.is_available is torch.cuda.is_available
    assert schedules.torch.ones is torch.ones
    with pytest.raises(AssertionError, match="CUDA"):
        torch.zeros([], device="cuda")
    name = torch.zeros(1).type()
    assert name in ("torch.cuda.FloatTensor",)
    assert name == "torch.FloatTensor"
    assert name != "torch.cuda.HalfTensor"
    assert str(name) == f"{name}" == "torch.FloatTensor"
    if not was_active:
        cpu.deactivate()
        assert schedules.torch is torch
        assert type(torch.zeros(1).type()) is str
