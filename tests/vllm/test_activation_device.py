"""Weights that leave a CUDA device while an engine is inactive: vLLM's own sleep mode, on a stand-in of its C extension where
a test's name says so (tests/support/sleep_twins.py), with a real vLLM engine and a real relay."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi")

from orchestrator.api import ConfigError, RetryableError, RunError
from orchestrator.hooks.tested_versions import VLLM, InstalledComponent
from tests.support import sleep_twins
from tests.vllm.test_activation import finished, play, turn
from vllm_rlplugin import command_flags
from vllm_rlplugin.kvpool.engine.pool_engine import pool_path
from vllm_rlplugin.options import PluginOptions
from vllm_rlplugin.sleep import cuda_sleep, sleep_options

ROOT = Path(__file__).parents[2]
ROLLOUT = PluginOptions(kv_pool="p")


# -- how it is started -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "on_cpu", "expected"),
    [
        (ROLLOUT, False, {"enable_sleep_mode": True}),
        (ROLLOUT, True, {}),
        (PluginOptions(kv_pool="p", kv_pool_role="serving"), False, {}),
        (PluginOptions(), False, {}),
    ],
)
def test_a_rollout_engine_of_a_pool_on_a_gpu_is_started_with_sleep_mode_and_no_other(
    options: PluginOptions, on_cpu: bool, expected: dict[str, Any]
) -> None:
    assert sleep_options.sleep_mode_arguments(options, {}, on_cpu=on_cpu) == expected


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_expandable_segments_end_its_start_with_the_variable_named(name: str) -> None:
    value = "max_split_size_mb:512,expandable_segments:True"
    model = SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=True))
    for start in (
        lambda: sleep_options.sleep_mode_arguments(ROLLOUT, {name: value}, on_cpu=False),
        lambda: sleep_options.check_sleep_mode(ROLLOUT, model, {name: value}),
    ):
        with pytest.raises(ConfigError, match="take expandable_segments out") as caught:
            start()
        assert (caught.value.field, caught.value.value) == (name, value)
    assert sleep_options.sleep_mode_arguments(ROLLOUT, {name: "max_split_size_mb:512"}, on_cpu=False)
    sleep_options.check_sleep_mode(PluginOptions(kv_pool="p", kv_pool_role="serving"), model, {name: value})


def test_vllm_serve_sets_it_for_a_cuda_build_only(monkeypatch: pytest.MonkeyPatch) -> None:
    import argparse

    from vllm_rlplugin import is_cpu_build

    for version, expected in (("0.32.0", True), ("0.32.0+cpu", None)):
        installed = InstalledComponent(VLLM, "vllm", version)
        monkeypatch.setattr(command_flags, "check_version", lambda _, found=installed: found)
        monkeypatch.setattr(command_flags, "activate", lambda **_: None)
        monkeypatch.setattr(command_flags, "_applied", False)
        monkeypatch.setenv(command_flags.ALLOWED, command_flags.PLUGIN)
        given = argparse.Namespace(plugin=[command_flags.PLUGIN], rl_kv_pool="p")
        command_flags._apply(given)
        assert is_cpu_build(installed) is (expected is None)
        assert getattr(given, "enable_sleep_mode", None) is expected


def test_an_engine_without_sleep_mode_or_with_another_kind_says_why_its_weights_stay() -> None:
    def worker(**config: Any) -> Any:
        found = {"enable_sleep_mode": True, "sleep_mode_backend": "cumem", **config}
        return SimpleNamespace(vllm_config=SimpleNamespace(model_config=SimpleNamespace(**found)))

    assert cuda_sleep.sleep_mode_obstacle(worker()) == ""
    assert "--enable-sleep-mode" in cuda_sleep.sleep_mode_obstacle(worker(enable_sleep_mode=False))
    assert "--sleep-mode-backend criu" in cuda_sleep.sleep_mode_obstacle(worker(sleep_mode_backend="criu"))


# -- the front end -----------------------------------------------------------------------------------------------------


def test_without_room_for_the_weights_it_stays_inactive_gives_its_pages_back_and_waits_for_some() -> None:
    async def scenario(server: Any, worker: Any) -> None:
        activation, client = server.control.activation, server.client
        told = await activation.deactivate()
        assert told["process_bytes"] == 2000
        client.room = False
        with pytest.raises(RetryableError, match="cannot be activated now: no room"):
            await worker.add([turn("a")])
        assert (activation.state, client.asleep) == ("inactive", True)
        assert client.calls[-2:] == ["rl_weights_back", "deactivate"]
        client.room = True
        await worker.add([turn("a")])
        assert await finished(worker, "a") == "length"

    play(scenario)


# -- vLLM's worker -----------------------------------------------------------------------------------------------------


class Weights:
    """In the place of our weight-transfer engine: knows what the weights must be."""

    def __init__(self, model: Any, mapped: bool) -> None:
        self.damage = self.fallback = ""
        self.mapped, self._model = mapped, model
        self.expected = [item.clone() for item in model.parameters()]

    def verify(self) -> list[str]:
        import torch

        live = zip(self._model.parameters(), self.expected, strict=True)
        return ["a weight"] if not all(torch.equal(one, other) for one, other in live) else []

    def make_plan(self) -> Any:
        return SimpleNamespace(mapping=object() if self.mapped else None)

    def stop_reading(self, *, dropped: bool) -> None:
        self.dropped = dropped


@dataclass
class Held:
    """A worker of vLLM's GPU kind with two layers that share a weight, and a buffer, on a device of its own."""

    device: sleep_twins.Device
    allocator: Any
    worker: Any
    model: Any
    total: int

    def away(self, *, kept: bool, mapped: bool = True) -> tuple[cuda_sleep.CudaSleep, Weights]:
        weights: Any = Weights(self.model, mapped)
        return cuda_sleep.CudaSleep(self.worker, weights, kept), weights


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    pytest.importorskip("vllm")
    import torch
    from vllm.v1.worker.gpu_worker import Worker

    model: Any = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    model[1].weight = model[0].weight
    model.register_buffer("rope", torch.arange(1000.0))
    config = SimpleNamespace(
        sleep_mode_backend="cumem", sleep_preserve_parameter_names=[], enable_nccl_comm_suspend=False
    )
    worker: Any = object.__new__(Worker)
    worker.model_runner = SimpleNamespace(get_model=lambda: model, model=model, get_draft_model=lambda: None)
    worker.model_config, worker.vllm_config = config, SimpleNamespace(model_config=config)
    worker.synchronize_device, worker._sleep_mode_backend = (lambda: None), None
    worker._sleep_saved_buffers, worker._sleep_saved_parameters, worker._sleep_saved_draft_buffers = {}, {}, {}
    device = sleep_twins.Device()
    allocator = sleep_twins.install(device, monkeypatch)
    sleep_twins.put_on(device, allocator, worker)
    device.allocate(allocator, 4096, "workspace")
    yield Held(device, allocator, worker, model, device.used)
    for item in allocator.pointer_to_data.values():  # tensors over it die later
        if item.is_asleep:
            device.others = 0
            device.map(*item.handle)


@pytest.mark.parametrize(
    ("kept", "mapped", "level"), [(True, True, 1), (True, False, 1), (False, True, 2), (False, False, 1)]
)
def test_all_of_a_worker_leaves_and_comes_back_even_when_there_is_no_room_at_first_on_a_stand_in(
    held: Held, kept: bool, mapped: bool, level: int
) -> None:
    away, weights = held.away(kept=kept, mapped=mapped)
    rope, places = held.model.rope.clone(), [item.data_ptr() for item in held.model.parameters()]
    away.offload()
    assert (away.level, away.left, away.freed, held.device.used) == (level, 0, held.total, 0)
    assert away.bytes == sum(item.nbytes for item in held.model.parameters())
    assert weights.dropped is not kept
    held.device.others = held.device.room - held.total // 2
    with pytest.raises(cuda_sleep.NoDeviceRoom, match="out of memory"):
        away.restore()
    assert held.device.used == 0, "all of it is away, not a part"
    held.device.others = 0
    away.restore()
    assert held.device.used == held.total
    assert [item.data_ptr() for item in held.model.parameters()] == places
    assert held.model.rope.equal(rope)
    assert bool(weights.verify()) is (level == 2), "dropped, they are not what they were"
    assert bool(weights.damage) is not kept


def test_what_others_take_of_the_device_meanwhile_is_no_failure_on_a_stand_in(held: Held) -> None:
    """vLLM's own last look is at the free memory of the whole device, and raises AssertionError."""
    away, _ = held.away(kept=True)
    held.device.greedy = 1 << 20
    away.offload()
    assert (away.left, away.freed, held.device.used) == (0, 0, 0)


def test_an_error_of_the_driver_that_is_no_lack_of_room_is_raised_as_it_is_on_a_stand_in(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.device_allocator import cumem

    away, _ = held.away(kept=True)
    away.offload()

    def broken(*_: int) -> None:
        raise RuntimeError("CUDA Error: an illegal memory access was encountered")

    with monkeypatch.context() as patch:
        patch.setattr(cumem, "python_create_and_map", broken)
        with pytest.raises(RuntimeError, match="illegal"):
            away.restore()


def test_a_buffer_that_changed_meanwhile_is_noticed_on_a_stand_in(held: Held) -> None:
    away, _ = held.away(kept=True)
    away.offload()
    of = held.model.rope.data_ptr()
    held.allocator.pointer_to_data[of].cpu_backup_tensor[0] ^= 1
    with pytest.raises(RunError, match=r"not what they were: \['rope'\]"):
        away.restore()


def test_tensors_that_no_update_brings_back_are_kept_and_a_kv_cache_in_vllms_memory_is_refused_on_a_stand_in(
    held: Held,
) -> None:
    import ctypes

    import torch

    address = held.device.allocate(held.allocator, 4096, "weights")
    array = (ctypes.c_uint8 * 4096).from_address(address)
    held.model[0].tables = {"one": [torch.frombuffer(array, dtype=torch.uint8)]}
    away, _ = held.away(kept=False)
    assert (away.level, "0.tables['one'][0] is no parameter" in away.how) == (1, True)
    held.device.allocate(held.allocator, 4096, "kv_cache")
    with pytest.raises(RunError, match="not in the pool"):
        held.away(kept=True)


def test_without_memory_for_them_on_the_host_the_weights_stay_on_a_stand_in(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_sleep.Path, "read_text", lambda *_, **__: "MemAvailable:  8 kB\n")
    with pytest.raises(RunError, match=r'host has 8192 bytes available.*"kept": false'):
        held.away(kept=True)
    assert held.device.used == held.total


# -- a real engine -----------------------------------------------------------------------------------------------------

_ENGINE = """
import json, os, sys, time
from pathlib import Path
folder, name = Path(sys.argv[1]), sys.argv[2]
from orchestrator.api import GenerationRequest, Sampling
from orchestrator.transfer import Publisher, RelayEndpoint
from tests.support import sleep_twins
from vllm_rlplugin.sleep import cuda_sleep as asleep
from vllm_rlplugin.worker.inprocess_engine import EngineOptions, InprocessEngine
from scripts.bench.probes.vllm.recompute_probe import publish, write_tiny_qwen3

first, second = (write_tiny_qwen3(folder / f"model{seed}", seed) for seed in (1, 2))
endpoint = RelayEndpoint(job="activation", kind="fsspec", master=f"file://{folder / 'relay'}",
                         metadata=str(folder / "metadata.sqlite"))
publisher = Publisher(endpoint)
publisher.reset()
for version, tensors in ((1, second), (2, first)):
    publish(publisher, version, tensors)
plugin = {"kv_pool": name, "kv_pool_mib": 4, "kv_pool_page_kib": 32, "kv_pool_budget_mib": 4}
engine = InprocessEngine(EngineOptions(model=str(folder / "model1"), kv_cache_mb=2, relay=endpoint.to_dict(), plugin=plugin),
                time.monotonic)
core = engine._core
worker = core.model_executor.driver_worker.worker
model, transfer = worker.model_runner.get_model(), worker.weight_transfer_engine
device = sleep_twins.Device()
allocator = sleep_twins.install(device, sleep_twins.pytest.MonkeyPatch())
sleep_twins.put_on(device, allocator, worker)
scratch = device.allocate(allocator, 4096, "workspace")
runtime = sleep_twins.torch.frombuffer((sleep_twins.ctypes.c_uint8 * 4096).from_address(
    device.allocate(allocator, 4096, "runtime")), dtype=sleep_twins.torch.uint8)
runtime.fill_(7)
all_of_it = device.used

def answers(tag):
    sleep_twins.compute_with_live_weights(model)
    found = []
    for number in range(2):
        prompt = tuple((7 * at + 13 * number) % 60 for at in range(40 + 20 * number))
        engine.add(GenerationRequest(f"{tag}{number}", "t", 0, prompt, Sampling(16, temperature=0.0), "test"),
                   time.monotonic())
        while engine.has_work:
            found += [[list(done.token_ids), list(done.logprobs)] for done in engine.step(time.monotonic())]
    return found

def places():
    return [item.data_ptr() for item in (*model.parameters(), *model.buffers())]

def without_access():
    "Of the places, how many have no memory behind them, by the kernel."
    rows = [row.split()[:2] for row in Path("/proc/self/maps").read_text().splitlines()]
    spans = [(*(int(part, 16) for part in span.split("-")), how) for span, how in rows]
    return sum(any(a <= at < b and how.startswith("---") for a, b, how in spans) for at in places())

def sleep(kept):
    engine.pause(time.monotonic())
    refused = core.rl_coserve("deactivate", {}).get("refused", "")
    (report,) = engine._rpc("rl_weights_away", (kept,))
    return {"refused": refused, "report": report, "used": device.used, "gone": without_access(), "level": worker.rl_away.level}

def wake():
    found = core.rl_coserve("activate", {})
    (report,) = engine._rpc("rl_weights_back")
    told = {"report": report, "used": device.used, "runtime": bool((runtime == 7).all()) if device.used else None}
    return told | ({} if report["no_room"] else {"verified": engine._rpc("rl_verify")[0]["state"]})

where = places()
out = {"total": all_of_it, "places": len(where), "bytes": sum(item.nbytes for item in model.parameters()), "first": answers("a")}
out["slept"] = sleep(True)
out["woke"] = wake()
engine.resume()
out["again"] = answers("b")
engine.pause(time.monotonic()); engine.update(1); engine.resume()
out["second"] = answers("c")
device.greedy = 1 << 20  # serving takes what is free while it falls asleep: vLLM's last assertion fails
out["slept_beside"] = sleep(True)
device.room = device.others + all_of_it // 2
out["no_room"] = [wake(), without_access(), core.rl_coserve("deactivate", {"stepped": False}).get("refused", "")]
device.others = device.greedy = 0
device.room = 1 << 30
out["woke_beside"] = wake()
engine.resume()
out["second_again"] = answers("d")
out["slept_dropped"] = sleep(False)
device.room = device.others + all_of_it // 2
out["no_room_dropped"] = [wake(), without_access()]
device.room = 1 << 30
out["woke_dropped"] = wake()
engine.update(2); engine.resume()
out["third"] = answers("e")
out["same_places"] = places() == where
transfer._layout = transfer._plan = None  # as of a quantised model: no mapping
transfer._loaded = None
out["slept_unmapped"] = sleep(True)
out["woke_unmapped"] = wake()
engine.resume()
out["fourth"] = answers("f")
out["slept_unmapped_dropped"] = sleep(False)
out["woke_unmapped_dropped"] = wake()
transfer.damage = ""
engine.resume()
sleep(True)
next(item for item in allocator.pointer_to_data.values() if item.tag == "weights").cpu_backup_tensor[5] ^= 1
out["damaged"] = wake()
print("answer " + json.dumps(out))
"""


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    name = f"test-asleep-{os.getpid()}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "VLLM_LOGGING_LEVEL": "ERROR"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ENGINE, str(tmp_path_factory.mktemp("asleep")), name],
            capture_output=True, text=True, env=environment, timeout=280, check=False, cwd=ROOT,
        )  # fmt: skip
    finally:
        pool_path(name).unlink(missing_ok=True)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [row for row in done.stdout.splitlines() if row.startswith("answer ")]
    return dict(json.loads(line.removeprefix("answer ")))


@pytest.mark.engine
@pytest.mark.timeout(300)
def test_weights_leave_the_device_and_come_back_bit_for_bit_on_a_stand_in_of_vllms_extension(
    played: dict[str, Any],
) -> None:
    """Tokens and log-probs, at the same addresses; nothing of the engine is on the device meanwhile."""
    assert played["again"] == played["first"]
    assert played["second"] != played["first"]
    assert played["second_again"] == played["second"]
    for slept, woke in (("slept", "woke"), ("slept_beside", "woke_beside")):
        asleep_, awake = played[slept], played[woke]
        assert (asleep_["refused"], asleep_["level"], asleep_["used"]) == ("", 1, 0)
        assert asleep_["gone"] == played["places"], "whoever read them now would end"
        assert (asleep_["report"]["left"], asleep_["report"]["bytes"]) == (0, played["bytes"])
        assert "level 1: the weights are in host memory" in asleep_["report"]["how"]
        assert awake["report"]["error"] == awake["report"]["no_room"] == awake["report"]["damage"] == ""
        assert (awake["used"], awake["runtime"], awake["verified"]) == (played["total"], True, "intact")
    assert played["slept"]["report"]["freed"] == played["total"]
    assert played["slept"]["report"]["memory"]["device_free_bytes"] == 1 << 30
    assert played["same_places"]


@pytest.mark.engine
@pytest.mark.timeout(300)
def test_dropped_weights_are_nowhere_and_an_update_brings_them_back_on_a_stand_in_of_vllms_extension(
    played: dict[str, Any],
) -> None:
    assert (played["slept_dropped"]["level"], played["slept_dropped"]["used"]) == (2, 0)
    assert played["woke_dropped"]["verified"] == "unusable"
    assert "were dropped" in played["woke_dropped"]["report"]["damage"]
    assert played["third"] == played["first"], "version 2 is what it was started with, and buffers are what they were"


@pytest.mark.engine
@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", ["no_room", "no_room_dropped"])
def test_without_room_all_of_them_stay_away_and_the_next_attempt_succeeds_on_a_stand_in_of_vllms_extension(
    played: dict[str, Any], case: str
) -> None:
    woke, gone, *refused = played[case]
    assert "out of memory" in woke["report"]["no_room"]
    assert (woke["report"]["error"], woke["used"], gone) == ("", 0, played["places"])
    assert refused in ([""], [])


@pytest.mark.engine
@pytest.mark.timeout(300)
def test_weights_without_a_mapping_move_too_and_are_kept_even_if_they_may_be_dropped_on_a_stand_in(
    played: dict[str, Any],
) -> None:
    """As of quantised layers: whole allocations move; an update through vLLM's reload may not bring back all there is."""
    assert (played["slept_unmapped"]["level"], played["slept_unmapped"]["used"]) == (1, 0)
    assert (played["woke_unmapped"]["report"]["error"], played["woke_unmapped"]["verified"]) == ("", "intact")
    assert played["fourth"] == played["third"]
    assert played["slept_unmapped_dropped"]["level"] == 1
    assert "without a mapping" in played["slept_unmapped_dropped"]["report"]["how"]
    assert played["woke_unmapped_dropped"]["verified"] == "unusable"


@pytest.mark.engine
@pytest.mark.timeout(300)
def test_a_bit_that_changed_meanwhile_is_noticed_by_the_digests_on_a_stand_in_of_vllms_extension(
    played: dict[str, Any],
) -> None:
    assert "not what they were" in played["damaged"]["report"]["error"]
    assert played["damaged"]["verified"] == "unusable"
