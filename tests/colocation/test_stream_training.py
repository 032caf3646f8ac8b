"""Rollout and training on the same devices in a whole run, with twins in virtual time: streamed where it pays, always trained."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from orchestrator.api import (
    ConfigError,
    ReleaseResult,
    ResidencyResult,
    RetryableError,
    TrainBatch,
    TrainMetrics,
    TrainSample,
)
from orchestrator.build import training_units
from orchestrator.colocation.stream_training import StreamTraining, kv_bytes_per_token
from orchestrator.config import Config, load_config
from orchestrator.policies.batching.stream_trigger import KvLimit, StreamTrigger, TriggerDecision
from orchestrator.sim import device_sharing
from orchestrator.sim import simulated_run as sim_run
from orchestrator.sim.run_audit import RunAudit
from orchestrator.sim.simulated_worker import SimWeights
from scripts.bench.virtual_run import run

OWNERS: dict[int, list[str]] = {}  # device -> who holds it


def take(device: int, owner: str) -> None:
    OWNERS.setdefault(device, [])
    if owner not in OWNERS[device]:
        OWNERS[device].append(owner)
    assert len(OWNERS[device]) == 1, f"device {device} is held by {OWNERS[device]}"


def leave(device: int, owner: str) -> None:
    OWNERS[device] = [other for other in OWNERS.get(device, []) if other != owner]


class LendingWorker(device_sharing.LendingSimWorker):
    """With a device of its own, whose owner is checked."""

    def __init__(self, name: str, *arguments: Any, **keywords: Any) -> None:
        super().__init__(name, *arguments, **keywords)
        self.device = int(name.rsplit("-", 1)[1])

    async def release(self, level: str) -> ReleaseResult:
        result = await super().release(level)
        leave(self.device, self.name)
        return result

    async def reclaim(self) -> None:
        await super().reclaim()
        take(self.device, self.name)

    async def resume(self) -> None:
        await super().resume()
        take(self.device, self.name)


class ResidentTrainer(device_sharing.ResidentSimTrainer):
    """Replica i is on device i."""

    replicas = 4
    fails = ""  # the level that does not come through, once
    stream_steps = 0

    async def residency(self, level: str, replicas: Sequence[int] | None = None) -> ResidencyResult:
        for device in range(self.replicas) if level == "away" or replicas is None else replicas:
            (leave if level == "away" else take)(device, "trainer")
        type(self).stream_steps += level == "stream"
        if level == type(self).fails:
            type(self).fails = ""
            raise RetryableError("no room")
        return await super().residency(level, replicas)

    async def feed(self, samples: Sequence[TrainSample], version: int) -> None:
        assert self.level == "stream"
        await super().feed(samples, version)

    async def train_step(self, batch: TrainBatch) -> TrainMetrics:
        assert self.level == "step"
        assert all(OWNERS[device] == ["trainer"] for device in range(self.replicas))
        return await super().train_step(batch)

    async def save(self, folder: str) -> None:
        assert self.level == "step"
        await super().save(folder)


@pytest.fixture
def twins(monkeypatch: pytest.MonkeyPatch) -> list[LendingWorker]:
    """The workers of the latest simulation."""
    made: list[LendingWorker] = []

    def worker(name: str, *arguments: Any, **keywords: Any) -> LendingWorker:
        made.append(LendingWorker(name, *arguments, **keywords))
        return made[-1]

    OWNERS.clear()
    monkeypatch.setattr(ResidentTrainer, "stream_steps", 0)
    monkeypatch.setattr(ResidentTrainer, "fails", "")
    monkeypatch.setattr(sim_run, "LendingSimWorker", worker)
    monkeypatch.setattr(sim_run, "ResidentSimTrainer", ResidentTrainer)
    return made


def colocated(layers: int = 2, mode: str = "sync_plus", enabled: bool = True, **colocation: Any) -> Config:
    return Config.model_validate(
        {
            "run": {"steps": 4, "mode": mode},
            "model": {"layers": layers},
            "rollout": {
                "workers": 4,
                "alpha": 0,
                "environments": 64,
                "group_size": 4,
                "groups_per_step": 12,
                "engine": {"kv_cache_mb": 4},
                "colocation": {"enabled": enabled, **colocation},
            },
            "trainer": {"stream": True, "data_parallel": 4},
            "sim": {"train_seconds_per_token": 2e-3},
            "evaluation": {"every": 0, "prompts": 4},
            "checkpoint": {"every": 2},
        }
    )


def events_of(result: Any, kind: str) -> list[dict[str, Any]]:
    return [event for event in map(json.loads, result.events.decode().splitlines()) if event["kind"] == kind]


def test_half_of_the_engines_are_freed_within_a_step_and_come_back_with_the_new_weights(
    twins: list[LendingWorker],
) -> None:
    result = sim_run.simulate(colocated())
    assert result.violations == []
    attempts = events_of(result, "stream_trigger")
    freed = [attempt for attempt in attempts if attempt["freed"]]
    assert len(freed) == 4, "once a step"
    for attempt in freed:
        assert 0.2 <= attempt["fraction"] <= 0.5
        assert attempt["peak"] <= 1.0
        assert len(attempt["freed"]) == 2
    moves = [event for event in events_of(result, "handover") if event["what"] == "release" and event["moved"]]
    assert moves, "requests in flight migrated"
    assert all(event["error"] == "" for event in events_of(result, "handover"))
    assert ResidentTrainer.stream_steps == 4
    steps = events_of(result, "step")
    assert [step["version"] for step in steps] == [1, 2, 3, 4]
    assert all(0 < step["metrics"]["stream_fed"] <= 1 for step in steps), (
        "and gradients of finished groups were taken there"
    )
    assert all(step["metrics"]["stream_restarts"] == 0 for step in steps)
    assert {name for name, owners in OWNERS.items() if owners != [f"sim-{name}"]} == set(), "all came back"
    assert all(worker._batch.version == 4 for worker in twins)


def test_streaming_shortens_the_step_of_a_long_tail(twins: list[LendingWorker]) -> None:
    streamed = events_of(sim_run.simulate(colocated()), "step")
    OWNERS.clear()
    plain = events_of(sim_run.simulate(colocated(high=0.0, low=0.0)), "step")
    assert ResidentTrainer.stream_steps == 4, "the second run freed nothing"
    assert streamed[-1]["t"] < plain[-1]["t"]


def test_nothing_is_freed_while_the_projected_kv_would_not_fit(twins: list[LendingWorker]) -> None:
    result = sim_run.simulate(colocated(layers=64))
    attempts = events_of(result, "stream_trigger")
    assert attempts
    assert all(attempt["freed"] == [] and "projected KV" in attempt["reason"] for attempt in attempts)
    assert ResidentTrainer.stream_steps == 0
    steps = events_of(result, "step")
    assert [step["fed"] for step in steps] == [0, 0, 0, 0], "the steps are trained all the same"


def test_a_trainer_that_finds_no_room_leaves_a_step_unstreamed_and_nothing_lost(twins: list[LendingWorker]) -> None:
    ResidentTrainer.fails = "stream"
    result = sim_run.simulate(colocated())
    steps = events_of(result, "step")
    assert steps[0]["metrics"]["stream_fed"] == steps[0]["fed"] == 0
    assert all(step["metrics"]["stream_fed"] > 0 for step in steps[1:])
    failed = [(event["what"], event["error"]) for event in events_of(result, "handover") if event["error"]]
    assert failed == [("residency stream", "no room")]


@pytest.mark.long
def test_a_step_whose_devices_do_not_come_at_once_is_tried_again(twins: list[LendingWorker]) -> None:
    ResidentTrainer.fails = "step"
    result = sim_run.simulate(colocated())
    assert len(events_of(result, "step")) == 4


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, list[list[int]]]]:
    """What the trigger was asked with, whenever a response ended: requests of its step, finished ones, contexts by engine."""
    seen: list[tuple[int, int, list[list[int]]]] = []

    def spy(trigger: StreamTrigger, finished: int, held: Sequence[Sequence[int]]) -> TriggerDecision | None:
        seen.append((trigger.requests, finished, [list(lengths) for lengths in held]))
        return None

    monkeypatch.setattr(StreamTrigger, "due", lambda trigger, finished: True)
    monkeypatch.setattr(StreamTrigger, "observe", spy)
    return seen


def test_engines_are_asked_what_they_hold_at_milestones_only(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, held = [], StreamTraining._held

    async def noted(self: StreamTraining) -> list[list[int]]:
        asked.append(1)
        return await held(self)

    monkeypatch.setattr(StreamTraining, "_held", noted)
    result = sim_run.simulate(colocated())
    attempts = events_of(result, "stream_trigger")
    assert 0 < len(asked) == len(attempts), "each call asks every engine, and 48 responses end in a step"


def test_a_trajectory_whose_turn_is_with_a_tool_counts_in_the_projection(
    looks: list[tuple[int, int, list[list[int]]]],
) -> None:
    config = colocated().model_dump()
    config["sim"] |= {"environment_seconds_mean": 2.0, "turns_max": 8}
    sim_run.simulate(Config.model_validate(config))
    assert len(looks) > 100
    assert {finished + sum(map(len, held)) for _, finished, held in looks} == {48}, (
        "none of those under way is left out"
    )
    assert any(length for _, finished, held in looks for length in held[0] if finished > 24), (
        "with the context they have"
    )


def test_engines_of_several_devices_are_freed_as_a_whole_and_cut_anew_between_steps() -> None:
    config = colocated().model_dump()
    degrees = {"enabled": True, "start": [2, 1, 1], "speeds": {"1": 1.0, "2": 0.7, "4": 0.6}}
    config["rollout"] |= {"prediction": {"enabled": True}, "placement": {"enabled": True, "degrees": degrees}}
    result = sim_run.simulate(Config.model_validate(config))
    assert result.violations == []
    freed = [set(event["freed"]) for event in events_of(result, "stream_trigger") if event["freed"]]
    assert len(freed) == 4
    assert freed[0] in ({0, 1}, {2, 3}), "the engine of devices 0 and 1, or the two others"
    assert events_of(result, "reshape"), "and then others"
    assert all(step["metrics"]["stream_fed"] > 0 for step in events_of(result, "step"))


def test_a_long_round_is_measured_by_what_it_launches(looks: list[tuple[int, int, list[list[int]]]]) -> None:
    config = colocated().model_dump()
    config["run"]["steps"] = 6
    config["rollout"] |= {"environments": 80, "rounds": {"enabled": True}}
    result = sim_run.simulate(Config.model_validate(config))
    kinds = {event["round"] for event in events_of(result, "round")}
    assert kinds == {"short", "long"}
    assert {requests for requests, _, _ in looks} == {75, 48}, "15 x 5 with speculation, 12 x 4 in a long round"


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ({"mode": "async", "alpha": 1}, "sync_plus"),
        ({"stream": False}, "set trainer.stream to true"),
        ({"ranks": 8}, "8 trainer ranks need as many devices"),
        ({"pools": {"H800": 8}}, "leave one of the two out"),
        ({"weights": "collective"}, "workers whose memory is lent to the trainer cannot receive"),
        ({"low": 0.6}, "low must not be above high"),
    ],
)
def test_what_cannot_share_devices_is_refused_with_its_fix(
    overrides: dict[str, Any], told: str, tmp_path: Path
) -> None:
    given = {"mode": "sync_plus", "alpha": 0, "stream": True, "ranks": 4, "pools": {}, "weights": "relay", "low": 0.2}
    given |= overrides
    lines = [
        f'[run]\nmode = "{given["mode"]}"',
        f'[rollout]\nworkers = 4\nalpha = {given["alpha"]}\nweights = "{given["weights"]}"',
    ]
    lines += [f"[rollout.colocation]\nenabled = true\nlow = {given['low']}"]
    lines += [f"[trainer]\nstream = {str(given['stream']).lower()}\ndata_parallel = {given['ranks']}"]
    lines += [f"[resources.pools]\n{name} = {count}" for name, count in given["pools"].items()]
    (tmp_path / "c.toml").write_text("\n".join(lines) + "\n")
    with pytest.raises(ConfigError) as refused:
        load_config(tmp_path / "c.toml")
    assert told in str(refused.value)


def test_the_simulators_own_twins_stream_without_these_checks() -> None:
    result = sim_run.simulate(colocated())
    assert result.violations == [], "the audit hears of turns that moved as wholes"
    assert sum(event.get("moved", 0) for event in events_of(result, "handover")) > 0
    assert all(step["metrics"]["stream_fed"] > 0 for step in events_of(result, "step"))


def test_half_of_the_replicas_take_twice_as_long_and_none_without_a_device() -> None:
    config = colocated()
    sample = TrainSample("t", "g", (1, 2, 3), (0, 1, 1), (0.0, -1.0, -1.0), ((0, 2),), 1.0)

    async def seconds(level: str, replicas: Sequence[int] | None) -> float:
        trainer = device_sharing.ResidentSimTrainer(config, SimWeights(), RunAudit(config))
        await trainer.residency(level, replicas)
        begun = asyncio.get_running_loop().time()
        await trainer.feed([sample], 0)
        return asyncio.get_running_loop().time() - begun

    whole = run(seconds("step", None))
    assert whole > 0
    assert run(seconds("stream", [0, 1])) == pytest.approx(2 * whole)
    with pytest.raises(RetryableError):
        run(seconds("away", None))


def test_replicas_and_footprints_are_those_of_the_models_layout() -> None:
    trainer = {"tensor_parallel": 2, "pipeline_parallel": 2, "data_parallel": 2}
    config = Config.model_validate({"trainer": trainer})
    assert training_units(config) == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert training_units(Config.model_validate({"trainer": {"data_parallel": 3}})) == [(0,), (1,), (2,)]
    shape = {"num_hidden_layers": 28, "num_key_value_heads": 4, "hidden_size": 3584, "num_attention_heads": 28}
    assert kv_bytes_per_token(shape, "bfloat16") == 57344, "Qwen2.5-7B"
    latent = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_key_value_heads": 128, "num_attention_heads": 128}
    deepseek = {"num_hidden_layers": 61, "hidden_size": 7168, **latent}
    assert kv_bytes_per_token(deepseek, "bfloat16") == 61 * 576 * 2, "DeepSeek-V3: no key or value of any head is kept"
    assert KvLimit(kv_bytes_per_token(shape, "bfloat16"), 1, 16).bytes_of(1) == 16 * 57344
