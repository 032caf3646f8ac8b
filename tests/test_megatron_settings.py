"""The trainer's settings, the hook points and the CPU shims, without starting Megatron's groups."""

from __future__ import annotations

import dataclasses
import importlib

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from megatron_rlplugin import cpu, hookpoints  # noqa: E402
from megatron_rlplugin.patches import REGISTER  # noqa: E402
from megatron_rlplugin.settings import TrainerSettings  # noqa: E402
from orchestrator.api import ConfigError  # noqa: E402
from orchestrator.config import TrainerSection  # noqa: E402


def test_the_settings_are_those_of_the_orchestrators_section() -> None:
    ours = {field.name: field.default for field in dataclasses.fields(TrainerSettings)}
    assert ours == TrainerSection().model_dump()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("learning_rat", 1.0),
        ("learning_rate", 0.0),
        ("loss", "median"),
        ("minibatches", 0),
        ("clip_low", 1.0),
        ("final_learning_rate", 0.1),
    ],
)
def test_a_wrong_setting_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^trainer.{field} = "):
        TrainerSettings.from_dict({field: value})


def test_a_warm_up_of_the_learning_rate_must_fit_into_the_run() -> None:
    with pytest.raises(ConfigError, match=r"^trainer.lr_warmup_steps = 5: must be below run.steps = 5"):
        TrainerSettings(lr_warmup_steps=5).check_schedule(5)


def test_the_installed_megatron_has_the_hook_points_that_were_tested() -> None:
    assert hookpoints.hook_mismatches() == ()
    assert hookpoints.require_megatron() in REGISTER.component.tested
    assert hookpoints.engine_status()["hook_mismatches"] == []


def test_a_moved_interface_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(hookpoints.HOOK_POINTS, "megatron.core.optimizer:get_megatron_optimizer", ("config", "gone"))
    with pytest.raises(ConfigError, match="get_megatron_optimizer"):
        hookpoints.require_megatron()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the shims are for machines without CUDA")
def test_the_shims_reach_only_the_modules_that_need_them_and_go_again() -> None:
    was_active = cpu.is_active()
    assert cpu.activate()
    assert cpu.activate()  # a second time changes nothing
    schedules = importlib.import_module("megatron.core.pipeline_parallel.schedules")
    assert schedules.torch.zeros([], device="cuda").device.type == "cpu"
    assert schedules.torch.cuda is torch.cuda
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
