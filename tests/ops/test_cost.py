"""Environment-bound or engine-bound, how many environments, and what a config costs."""

import asyncio
import json
import subprocess
import sys
import threading
import types
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config import Config, load_config
from orchestrator.observe.occupancy import SAMPLE_SECONDS, Occupancy, nvml
from orchestrator.observe.report.bottleneck_analysis import Analysis, analyse_bottleneck
from orchestrator.observe.report.report_page import render_report
from orchestrator.observe.report.run_log import load_run
from orchestrator.observe.report.summary import summarize
from orchestrator.ops.cost import SIMULATED_STEPS, estimate_cost
from orchestrator.policies.episodes.run_bottleneck import (
    bottleneck_of,
    environments_to_try,
    environments_wanted,
    generation_ratio,
)
from orchestrator.sim.simulated_run import simulate
from orchestrator.sim.simulated_worker import SimWorker


def config(*overrides: str) -> Config:
    small = ["run.steps=4", "rollout.groups_per_step=4", "rollout.group_size=4", "rollout.environments=32"]
    return load_config(None, [*small, "evaluation.prompts=2", *overrides])


SLOW_ENVIRONMENTS = ("sim.environment_seconds_mean=9", "rollout.environment_step_timeout=1000", "rollout.environments=4",
                     "rollout.trajectory_timeout=9000", "sim.response_tokens_mean=4", "sim.response_tokens_max=16")  # fmt: skip
SLOW_GPUS = ("sim.environment_seconds_mean=0.01", "sim.decode_seconds_per_step=0.3", "sim.reward_seconds=0")


def analysed(folder: Path, *overrides: str) -> Analysis:
    simulate(config(*overrides), folder)
    found = analyse_bottleneck(load_run(folder))
    assert found is not None
    return found


# -- the arithmetic of the notes ---------------------------------------------------------------------------------------


def test_the_example_of_the_notes() -> None:
    """4.3: 5 s of environment and 0.2 s of generation a step: at least 26 environments, one keeps a GPU busy for 3.8 %."""
    assert environments_wanted(20 * 0.2, 20 * 5.0, workers=1) == 26
    assert environments_wanted(20 * 0.2, 20 * 5.0, workers=4) == 104
    assert environments_wanted(0.0, 5.0, workers=1) is None


def test_the_borders_of_the_notes() -> None:
    assert [bottleneck_of(share) for share in (0.038, 0.49, 0.5, 0.8, 0.81)] == [
        "environment-bound", "environment-bound", "balanced", "balanced", "engine-bound"
    ]  # fmt: skip


def test_more_environments_are_suggested_only_where_they_are_the_bottleneck_and_never_more_than_fill_the_engines() -> (
    None
):
    assert environments_to_try(0.9, 64, 26, 500) == 64
    assert environments_to_try(0.2, 8, 26, 500) == 32
    assert environments_to_try(0.2, 8, 26, 30) == 30
    assert environments_to_try(0.001, 8, 26, 500) == 500
    assert environments_to_try(0.4, 64, 3, 500) == 128
    assert generation_ratio(0.0, 5.0) is None
    assert generation_ratio(2.0, 5.0) == 2.5


def test_moments_without_a_trajectory_in_flight_say_nothing_about_environments() -> None:
    occupancy = Occupancy()
    for in_flight, loads in ((4, [2, 0]), (0, [0, 0]), (2, [1, 1])):
        occupancy.sample(in_flight, loads, [0.5, 1.0])
    found = occupancy.take(())
    assert (found["samples"], found["in_flight"], found["busy"], found["usable"], found["requests"]) == (2, 6, 3, 4, 4)
    assert (found["gpu"], found["gpu_samples"]) == (3.0, 4)
    assert occupancy.take(())["samples"] == 0


# -- NVML --------------------------------------------------------------------------------------------------------------


class NvmlError(Exception):
    pass


def fake_nvml(monkeypatch: pytest.MonkeyPatch, devices: int, driver: bool = True) -> Any:
    """No GPU here: the calls that are made, answered as pynvml does."""
    module = types.ModuleType("pynvml")

    def init() -> None:
        if not driver:
            raise NvmlError("driver not loaded")

    def rates(handle: int) -> Any:
        if handle == 1:
            raise NvmlError("not supported")
        return types.SimpleNamespace(gpu=30)

    module.NVMLError = NvmlError  # type: ignore[attr-defined]
    module.nvmlInit = init  # type: ignore[attr-defined]
    module.nvmlDeviceGetCount = lambda: devices  # type: ignore[attr-defined]
    module.nvmlDeviceGetHandleByIndex = lambda index: index  # type: ignore[attr-defined]
    module.nvmlDeviceGetUtilizationRates = rates  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pynvml", module)


def test_a_fake_nvml_is_read_and_a_gpu_that_does_not_tell_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml(monkeypatch, 3)
    read = nvml()
    assert read is not None
    assert asyncio.run(read()) == [0.3, 0.3]


def test_a_driver_that_takes_its_time_holds_up_no_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml(monkeypatch, 1)
    over = threading.Event()

    def rates(handle: int) -> Any:
        assert over.wait(2), "the loop stood still"
        return types.SimpleNamespace(gpu=30)

    monkeypatch.setattr(sys.modules["pynvml"], "nvmlDeviceGetUtilizationRates", rates)
    read = nvml()
    assert read is not None

    async def ask() -> list[float]:
        asked = asyncio.ensure_future(read())
        await asyncio.sleep(0)
        over.set()
        return list(await asked)

    assert asyncio.run(ask()) == [0.3]


@pytest.mark.parametrize(("devices", "driver"), [(0, True), (2, False)])
def test_without_a_gpu_or_a_driver_there_is_no_nvml(
    devices: int, driver: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_nvml(monkeypatch, devices, driver)
    assert nvml() is None


def test_without_pynvml_there_is_no_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvml() is None


def test_where_a_gpu_was_seen_it_decides(tmp_path: Path) -> None:
    simulate(config(*SLOW_GPUS), tmp_path)
    run = load_run(tmp_path)
    for found in run.occupancy:
        found |= {"gpu": 0.2 * found["samples"], "gpu_samples": found["samples"]}
    seen = analyse_bottleneck(run)
    assert seen is not None
    assert (seen.verdict, seen.measured_by, seen.gpu_busy) == ("environment-bound", "NVML", 0.2)
    assert seen.engine_busy > 0.8


# -- from the events of a run ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_slow_environments_are_named_and_the_suggested_number_of_them_cures_it(tmp_path: Path) -> None:
    before = analysed(tmp_path / "before", *SLOW_ENVIRONMENTS)
    assert before.verdict == "environment-bound"
    assert before.engine_busy < 0.5
    assert before.environment_seconds > before.generate_seconds
    assert before.measured_by == "share of the time with a request"
    assert before.environments_suggested > 4
    more = [
        f"rollout.environments={before.environments_suggested}",
        "rollout.groups_per_step=64",
        "rollout.redundant_groups=1.5",
    ]
    after = analysed(tmp_path / "after", *SLOW_ENVIRONMENTS, *more)
    assert after.engine_busy >= 0.5


@pytest.mark.parametrize("mode", [("async", 1), ("sync_plus", 0)])
def test_slow_gpus_are_named_in_synchronous_modes_too(mode: tuple[str, int], tmp_path: Path) -> None:
    """Where the rollout stands while the trainer works: that is no sign of slow environments."""
    wait = "sim.train_seconds_per_token=0.1"
    found = analysed(tmp_path, *SLOW_GPUS, wait, f"run.mode={mode[0]}", f"rollout.alpha={mode[1]}")
    assert found.verdict == "engine-bound"
    assert found.environments_suggested == found.environments
    assert found.trainer_busy > 0
    assert found.generation_to_training is not None


def test_the_sampled_share_is_the_simulated_engines_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two environments, one engine that counts its own busy seconds."""
    honest, workers = SimWorker.__init__, []

    def init(self: SimWorker, *arguments: Any) -> None:
        honest(self, *arguments)
        workers.append(self)

    monkeypatch.setattr(SimWorker, "__init__", init)
    found = analysed(tmp_path, *SLOW_ENVIRONMENTS, "rollout.environments=2", "rollout.group_size=2", "run.steps=6",
                     "sim.reward_seconds=0", "sim.response_tokens_mean=200", "sim.response_tokens_max=200",
                     "rollout.engine.max_model_len=4096")  # fmt: skip
    occupied = sum(item["samples"] for item in load_run(tmp_path).occupancy) * SAMPLE_SECONDS
    assert found.engine_busy == pytest.approx(workers[0].busy_seconds / occupied, abs=0.04)
    assert 0.1 < found.engine_busy < 0.9


def test_the_report_and_the_summary_say_it(tmp_path: Path) -> None:
    found = analysed(tmp_path, *SLOW_ENVIRONMENTS)
    page = render_report(load_run(tmp_path))
    assert "environment-bound; share of the time with a request" in page
    assert 'href="#bottleneck"' in page
    assert summarize(tmp_path)["analysis"] == asdict(found)


# -- the bill ----------------------------------------------------------------------------------------------------------


def test_the_bill_adds_up_and_grows_with_steps_and_gpus() -> None:
    base = ("run.steps=100", "rollout.workers=2")
    one, more = (
        estimate_cost(config(*base)),
        estimate_cost(config(*base, "cost.gpus_per_worker=4", "trainer.tensor_parallel=2")),
    )
    twice = estimate_cost(config("run.steps=200", "rollout.workers=2"))
    items = {item.name: item for item in one.items}
    assert one.total == pytest.approx(sum(item.amount * item.price for item in one.items))
    assert one.simulated_steps == SIMULATED_STEPS
    assert one.hours == pytest.approx(100 * one.seconds_per_step / 3600)
    assert items["trainer"].amount == pytest.approx(one.hours)
    assert items["rollout"].amount == pytest.approx(2 * one.hours)
    assert 0 < items["environments"].amount <= 32 * one.hours
    assert items["reward calls"].amount >= 100 * 16
    assert {item.name: item.amount for item in more.items}["rollout"] == pytest.approx(8 * more.hours)
    assert {item.name: item.amount for item in more.items}["trainer"] == pytest.approx(2 * more.hours)
    assert twice.total == pytest.approx(2 * one.total)


def test_prices_that_nobody_gave_are_labelled_as_assumptions() -> None:
    found = {item.name: item for item in estimate_cost(config("cost.rollout_gpu_hour=4.0")).items}
    assert (found["rollout"].price, found["rollout"].assumed) == (4.0, False)
    assert found["trainer"].assumed
    text = estimate_cost(config("cost.rollout_gpu_hour=4.0")).text().splitlines()
    assert [("assumed" in line) for line in text if "GPU-hours" in line] == [True, False]


def test_servers_of_others_are_counted_apart_and_cost_nothing_unless_said() -> None:
    found = {item.name: item for item in estimate_cost(config('rollout.served=["http://127.0.0.1:1"]')).items}
    assert found["served"].amount > 0
    assert found["served"].total == 0


@pytest.mark.slow
def test_the_command_prints_it_and_bad_input_is_one_line() -> None:
    command = [sys.executable, "-m", "orchestrator.cli", "cost"]
    root = Path(__file__).parents[2]
    done = subprocess.run([*command, str(root / "examples" / "sim.toml"), "--json"], capture_output=True, text=True,
                          check=True, cwd=root, timeout=120)  # fmt: skip
    bill = json.loads(done.stdout)
    assert bill["kind"] == "simulated"
    assert bill["total"] == pytest.approx(sum(item["total"] for item in bill["items"]), rel=1e-4)
    wrong = subprocess.run([*command, str(root / "examples" / "sim.toml"), "cost.trainer_gpu_hour=-1"], capture_output=True,
                           text=True, check=False, cwd=root, timeout=120)  # fmt: skip
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("error: cost.trainer_gpu_hour = -1")
