"""The benchmarks of the trajectory plane: their quick forms run and say what they must; their arithmetic is right."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config import load_config, parse_config
from orchestrator.sim.cost_model import LinearCosts
from orchestrator.sim.recorded_traces import EpisodeTrace, EpisodeTraces, TracedTurn
from orchestrator.sim.simulated_worker import SimWeights, SimWorker
from scripts.bench import virtual_run
from scripts.bench.micro import (
    batch_handover,
    checkpoint_stall,
    environments,
    ledger_faults,
    memory_rise,
    placement_gain,
    store,
    stream_step,
    trajectory_vs_batch,
    turn_cost,
)
from scripts.bench.micro.busy_loop import BusySelector, Durations
from scripts.bench.micro.hold_watch import Beat, HoldWatch
from scripts.bench.papers import learning_parity


def test_a_leak_has_a_slope_and_noise_has_none() -> None:
    leak = [(float(second), 100 + second / 360 + second % 7) for second in range(0, 900, 5)]
    rise, low, high = memory_rise.slope(leak)
    assert low > 5
    assert abs(rise - 10) < 3
    flat = [(float(second), 100 + second * 7919 % 11) for second in range(0, 900, 5)]
    _, low, high = memory_rise.slope(flat)
    assert low < 0 < high
    with pytest.raises(ValueError, match="too few"):
        memory_rise.slope(leak[:5])


def row(variant: int, seed: int, success: float, seconds: float) -> dict[str, Any]:
    name = learning_parity.VARIANTS[variant].name
    curve = [[0, 0.0, 0.3], [10, seconds, 0.75], [20, 2 * seconds, success]]
    return {"variant": name, "seed": seed, "success_end": success, "interval": {"prompts": 400}, "curve": curve}


def test_parity_is_judged_by_the_interval_over_seeds_and_by_the_time_to_the_target() -> None:
    def judged(variants: tuple[int, ...], loss: float, later: float, seeds: int = 5) -> dict[str, Any]:
        """Each variant loses so much in the mean over seeds, of which each is 0.02 off, and is so many seconds later."""
        rows = [
            row(variant, seed, 0.80 - bool(variant) * (loss + 0.02 * (seed % 2 * 2 - 1)), 60.0 + bool(variant) * later)
            for variant in variants
            for seed in range(seeds)
        ]
        return learning_parity.result(rows, False, {})

    found = judged((0, 1, 2), 0.01, -1.0)
    assert found["holds"]
    assert found["value"] == pytest.approx(-0.006)  # three of five seeds are better by 0.02, two worse
    bounds = found["detail"]["table"][1]["difference"]
    assert (bounds["low"], bounds["high"]) == pytest.approx((-0.0332, 0.0212))
    assert not judged((0, 1, 2), 0.01, -1.0, seeds=4)["holds"], "four seeds are too few"
    assert not judged((0, 1, 2), 0.2, -1.0)["holds"]
    assert not judged((0, 1, 2), 0.0, 1.0)["holds"]
    assert judged((0, 3, 4), 0.0, 1.0)["holds"], "the time of on-policy variants is not judged"
    missing = [row(0, seed, 0.8, 60.0) for seed in range(5)] + [row(1, seed, 0.8, 60.0) for seed in range(3)]
    assert learning_parity.result(missing, False, {})["detail"]["seeds"] == [0, 1, 2]


def test_every_variant_of_parity_is_a_config_that_a_run_takes() -> None:
    for variant in learning_parity.VARIANTS:
        config = load_config(
            Path(__file__).parents[2] / "examples" / "frozenlake.toml", [*learning_parity._RECIPE, *variant.overrides]
        )
        assert config.rollout.rounds.enabled == variant.name.startswith("tail batching")
        assert config.rollout.colocation.enabled == (variant.name == "shared devices")
        assert config.trainer.stream, "all variants stream, or the reference is another"


def test_ratios_are_of_the_same_repetition() -> None:
    rows = []
    for number, fast in enumerate((1.0, 2.0, 4.0)):
        for deviation, times in ((0.1, 1.5), (1.0, 2.5)):
            for way, seconds, guess in (("batch", times * fast, 2.7 * fast), ("trajectory", fast, 1.5 * fast)):
                part = {"repetition": number, "deviation": deviation, "way": way}
                rows.append({**part, "seconds": seconds, "predicted": guess})
        rows.append({"repetition": number, "way": "costs", "step": 0.01, "sequence": 0.0, "token": 0.0})
    found = trajectory_vs_batch.result(rows, False, {})
    assert [entry["ratio"] for entry in found["detail"]["table"]] == [1.5, 2.5]
    assert [entry["predicted_off"][0] for entry in found["detail"]["table"]] == [0.2, -0.28]
    assert found["detail"]["predicted_off_most"] == pytest.approx(0.28)
    assert found["detail"]["prediction_holds"] is False
    assert found["holds"]
    assert not trajectory_vs_batch.result([r for r in rows if r.get("deviation") == 0.1], False, {})["holds"]


def test_what_a_simulated_engine_costs_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"step": 0.005, "sequence": 2e-4, "token": 3e-5}
    config = parse_config({"rollout": {"engine": {"max_num_seqs": 128, "max_model_len": 256}}})
    says = EpisodeTraces((EpisodeTrace((TracedTurn(16, 32, 0.0),), 0.0, None),), ((0,),))
    worker = SimWorker("sim-0", config, SimWeights(), traces=says, costs=LinearCosts(**given, update=0.0))
    found = virtual_run.run(trajectory_vs_batch.engine_costs(worker, 0))
    assert {name: found[name] / given[name] for name in given} == pytest.approx(dict.fromkeys(given, 1.0), rel=0.05)


def test_the_policy_that_the_simulator_never_saw_gains_more_as_times_vary_more() -> None:
    load = trajectory_vs_batch.Load(32, 4, 0.5, ())
    costs = {"step": 0.005, "sequence": 1e-4, "token": 1e-5}
    gains = [
        trajectory_vs_batch.predicted(load, deviation, 0, costs, batch=True)
        / trajectory_vs_batch.predicted(load, deviation, 0, costs, batch=False)
        for deviation in (0.1, 1.0)
    ]
    assert 1.0 < gains[0] < 1.3 < gains[1]


def test_placement_gains_where_many_sequences_make_steps_long_and_nothing_where_they_do_not() -> None:
    def gain(sequence: float) -> float:
        costs = placement_gain.Costs(0.002, sequence, 0.0, 0.0, 0.0)
        return placement_gain.predicted(0, costs, False) / placement_gain.predicted(0, costs, True)

    assert 1.1 < gain(3e-5) < 1.4
    assert gain(0.0) == pytest.approx(1.0, abs=0.02)


def test_what_two_simulated_engines_cost_is_found_again_without_placement() -> None:
    given = placement_gain.Costs(0.002, 3e-5, 2e-8, 1e-5, 0.0)
    placement_gain.trained()
    found = virtual_run.run(placement_gain.calibrated(placement_gain.simulated_workers(given), 0))
    assert found.step == pytest.approx(given.step, rel=0.02)
    # A rollout ends with the fuller of two engines, the fit knows their mean.
    assert found.sequence == pytest.approx(given.sequence, rel=0.12)


def test_the_gain_of_placement_is_judged_by_the_pair_that_the_simulator_missed_most() -> None:
    def row(balanced: float, guess: float) -> dict[str, Any]:
        return {
            "balanced": {"seconds": balanced},
            "placed": {"seconds": 1.0},
            "predicted_balanced": guess,
            "predicted_placed": 1.0,
        }

    found = placement_gain.result([row(1.2, 1.26), row(1.0, 1.05), row(1.1, 1.1)], False, {})
    assert (found["value"], found["reference_value"], found["holds"]) == (1.1, 1.1, True)
    assert found["detail"]["gain_interval"] == [1.0, 1.2]
    assert not placement_gain.result([row(1.2, 1.2), row(1.0, 1.12)], False, {})["holds"]


def test_shapes_of_fault_runs_cover_what_there_is() -> None:
    configs = [ledger_faults.config_of(seed) for seed in range(300)]
    assert {config.run.mode for config in configs} == {"sync", "sync_plus", "one_off", "areal", "async"}
    assert {config.environment.backend for config in configs} == {"in-process", "in-process-pool"}
    assert {config.context.strategy for config in configs} == {"keep", "restart", "summarise"}
    assert {config.rollout.weights for config in configs} == {"relay", "collective"}
    assert {config.sim.kinds for config in configs} == {1, 2, 3}
    assert {config.rollout.shards for config in configs} == {1, 2, 3}
    assert any(config.sim.tools and not config.sim.tool_burst for config in configs)
    assert any(config.rollout.group_timeout and config.rollout.redundant_members > 1 for config in configs)


def test_streamed_steps_are_compared_in_pairs_and_the_first_step_is_left_out() -> None:
    def events(seconds: float) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for step, end in enumerate((99.0, 99.0 + seconds, 99.0 + 2 * seconds)):
            found.append({"kind": "stage", "stage": "get_batch", "step": step, "end": end - 0.25})
            found.append({"kind": "step", "step": step, "t": end, "metrics": {"stream_fed": 0.5}, "tokens": 10})
        return found

    assert stream_step.times(events(2.0))["seconds"] == [2.0, 2.0]
    rows = [
        {"streamed": streamed, "pair": pair, **stream_step.times(events(2.0 if streamed else 3.0))}
        for pair in range(3)
        for streamed in (True, False)
    ]
    found = stream_step.result([*rows, {**rows[0], "pair": 7}], False, {})
    assert (found["value"], found["holds"], found["reference_value"]) == (1.5, True, 3.0)
    assert found["detail"]["after_batch"] == {"whole": 0.25, "streamed": 0.25}
    assert not stream_step.result(rows[:4], False, {})["holds"], "two pairs are no figure"


def test_a_loop_is_busy_while_its_callbacks_compute_and_not_while_it_waits() -> None:
    selector = BusySelector()

    async def main() -> None:
        selector.begin()
        for _ in range(20):
            await asyncio.sleep(0.001)
        begun = time.thread_time()
        while time.thread_time() - begun < 0.05:
            pass
        await asyncio.sleep(0)

    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
        runner.run(main())
        found = selector.as_dict()
    assert found["own_ms"]["max"] >= 50
    assert found["own_ms"]["p50"] < 50, "it slept in all other turns"
    assert found["own_ms"]["turns"] == found["waited_ms"]["turns"] > 20


def keeps_the_lock(seconds: float) -> None:
    ended = time.monotonic() + seconds
    while time.monotonic() < ended:
        sum(itertools.repeat(1, 30_000_000))  # in one call, which gives the interpreter's lock to nobody


def test_of_a_held_loop_it_is_told_what_its_thread_and_those_beside_it_did(tmp_path: Path) -> None:
    beat = Beat(tmp_path, "head")
    selector, watch = BusySelector(beat), HoldWatch(tmp_path)

    def sleeps() -> None:
        time.sleep(0.6)

    async def main() -> None:
        while not watch.looks:  # it is up
            await asyncio.sleep(0.05)
        selector.begin()
        sleeps()
        await asyncio.sleep(0.3)
        beside = threading.Thread(target=keeps_the_lock, args=(0.6,))
        beside.start()
        while beside.is_alive():  # not one turn of the loop
            pass
        await asyncio.sleep(0.05)

    try:
        with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
            runner.run(main())
            found = {"loops": {"head": selector.as_dict()}}
    finally:
        beat.close()
        seen = watch.stop()
    slept, kept = sorted(
        environments.with_seen(found, seen)["loops"]["head"]["longest"][:2], key=lambda one: one["began"]
    )
    assert slept["computed"] < 0.1 < 0.5 < slept["neither"]
    assert "sleeps" in slept["seen"]["stacks"]["loop"].split(" < ")[0]
    assert any("S" in place for place in slept["seen"]["kernel"])
    assert any("keeps_the_lock" in stack for stack in kept["seen"]["stacks"].values())
    beside = [spent for name, spent in kept["seen"]["threads"].items() if name != "loop"]
    assert any(spent["computed"] + spent["waited"] > 0.2 for spent in beside)


def test_durations_are_kept_to_two_per_cent() -> None:
    held = Durations()
    for number in range(1, 1001):
        held.add(number / 1e4)
    found = held.as_dict()
    assert found["p50"] == pytest.approx(50.0, rel=0.021)
    assert (found["p99"], found["max"]) == (pytest.approx(99.0, rel=0.021), 100.0)


def test_the_worst_loop_counts_and_less_than_the_whole_size_claims_nothing() -> None:
    def part(sessions: int, seconds: float, p99: float) -> dict[str, Any]:
        loops = {"head": {"own_ms": {"p99": 1.0, "max": 20.0}}, "s0": {"own_ms": {"p99": p99, "max": 9.0}}}
        rest = {"ledger_closes": True, "steps": 60, "memory_slope": {"head": [3.0, -1.0, 7.0]}}
        return {"sessions": sessions, "seconds": seconds, "loops": loops, **rest}

    alone = part(2000, 1800.0, 7.0)
    found = environments.result(part(10_000, 1800.0, 9.0), alone, False, "", "")
    assert (found["value"], found["reference_value"], found["detail"]["most_ms"], found["holds"]) == (
        9.0,
        7.0,
        20.0,
        True,
    )
    for sessions, seconds, p99 in ((4000, 1800.0, 9.0), (10_000, 300.0, 9.0), (10_000, 1800.0, 11.0)):
        assert environments.result(part(sessions, seconds, p99), alone, False, "", "")["holds"] is False
    rising = part(10_000, 1800.0, 9.0) | {"memory_slope": {"s0": [80.0, 70.0, 90.0]}}
    assert not environments.result(rising, alone, False, "", "")["holds"]


@pytest.mark.long
def test_sessions_in_shard_processes_train_and_are_accounted_for() -> None:
    found = environments.run(quick=True, nonce="test")
    assert (found["holds"], found["detail"]["sharded"]["ledger_closes"]) == (None, True)
    for part, loops in (("sharded", {"head", "s0", "s1"}), ("alone", {"head"})):
        assert set(found["detail"][part]["loops"]) == loops
        assert found["detail"][part]["steps"] >= 2
        assert found["detail"][part]["ledger"]["failed"] == 0
        for loop in found["detail"][part]["loops"].values():
            assert loop["longest"][0]["own"] == pytest.approx(loop["own_ms"]["max"] / 1e3, abs=1e-5)
        assert set(found["detail"][part]["priorities"]) >= loops


@pytest.mark.long
def test_the_quick_form_of_the_store_measures_afresh() -> None:
    found = store.run(quick=True, nonce="test")
    assert found["name"] == store.NAME
    assert found["detail"]["nonce"] == "test"
    assert found["detail"]["samples"] > 100
    assert found["detail"]["files_changed"] == []


def test_a_checkpoint_beside_the_loop_is_measured_and_what_it_wrote_is_read_back() -> None:
    found = checkpoint_stall.run(quick=True, nonce="test")
    assert (found["holds"], found["detail"]["nonce"], found["detail"]["deaths"]) == (None, "test", 1)
    assert found["reference_value"] == 64 * 4096
    assert found["detail"]["shard_bytes"] > 8 * 0.8 * found["reference_value"]
    assert set(found["detail"]) >= {"whole", "killed"}


@pytest.mark.long
@pytest.mark.engine
def test_the_handover_of_a_batch_counts_what_ranks_read() -> None:
    found = batch_handover.run(quick=True, nonce="test")
    assert (found["holds"], found["detail"]["all_tokens_read"]) == (None, True)
    assert 1.0 < found["detail"]["copied_over_share"] < 1.2
    assert [len(found["detail"][way]["ranks"]) for way in ("files", "objects")] == [2, 2]


@pytest.mark.long
@pytest.mark.engine
@pytest.mark.parametrize("bench", [trajectory_vs_batch, placement_gain, learning_parity, stream_step])
def test_the_quick_form_runs_on_real_engines(bench: Any) -> None:
    found = bench.run(quick=True, nonce="test")
    assert found["kind"] == "real"
    assert not found["holds"], "a quick run proves nothing"
    assert found["detail"]["samples"] > 0


def test_a_turn_costs_the_wire_the_same_however_long_its_context_is() -> None:
    found = turn_cost.run(True, "n")
    assert found["holds"] is None
    assert 0.99 < found["value"] < 1.01
    assert found["detail"]["ledger_closes"]
    sizes = found["detail"]["bytes_per_turn"]
    assert all(300 * 4 + 150 * 8 < size < 300 * 4 + 150 * 12 + 700 for size in sizes.values())
    assert found["detail"]["shrunk"]


def test_a_turn_that_costs_too_much_misses_the_bar() -> None:
    def played(processor: float, sent: int, closes: bool = True) -> list[turn_cost.Played]:
        return [turn_cost.Played(1000, processor, 1.0, sent, 0, 10, closes)]

    def holds(*three: list[turn_cost.Played]) -> bool:
        return turn_cost.result(dict(zip(turn_cost.CONTEXTS, three, strict=True)), {}, False)["holds"]

    good = played(0.3, 1000)
    assert holds(good, good, good)
    assert holds(good, good, played(0.3, 1100))
    assert not holds(good, good, played(0.3, 1101))
    assert not holds(good, good, played(0.34, 1000))
    assert not holds(good, played(0.3, 1000, closes=False), good)
