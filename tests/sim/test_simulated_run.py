"""Whole simulated runs: same seed same bytes, every trajectory accounted for under faults, and losses are caught.

The mutation tests break one part of the system on purpose. Each must be found by the audit or by the system's own checks;
a mutation that goes unnoticed means that the tests above it prove nothing.
"""

import asyncio
import hashlib
import io
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import orchestrator.envs
from orchestrator.api import Completion, GenerationRequest, Prompt, RunError, Trajectory, Turn
from orchestrator.buffer import SampleBuffer, Taken
from orchestrator.checkpoint import CheckpointState
from orchestrator.cli import main
from orchestrator.components import Components
from orchestrator.config import Config, load_config
from orchestrator.ledger import Ledger
from orchestrator.observe.occupancy import SAMPLE_SECONDS
from orchestrator.pipeline import Pipeline
from orchestrator.policies.batching.staleness import StalenessBound
from orchestrator.sim import simulated_run
from orchestrator.sim.cost_model import FETCH_SHARE
from orchestrator.sim.crash_remains import SimCheckpoints, SimStore
from orchestrator.sim.seeded_draws import random_stream
from orchestrator.sim.simulated_run import SimResult, SimulationFailed, simulate
from orchestrator.sim.simulated_worker import SimWorker, TurnMoves
from orchestrator.sim.twins import SimTask, SimTrainer
from scripts.bench.micro import ledger_faults

SEEDS = [
    pytest.param(range(10), id="few"),
    pytest.param(range(10, 40), id="some", marks=pytest.mark.slow),
    pytest.param(range(40, 240), id="many", marks=pytest.mark.long),
]


def config(*overrides: str) -> Config:
    small = [
        "run.steps=4",
        "rollout.workers=2",
        "rollout.groups_per_step=3",
        "rollout.group_size=3",
        "rollout.environments=18",
        "evaluation.prompts=4",
    ]
    return load_config(None, [*small, *overrides])


def slow_trainer(*overrides: str) -> Config:
    """Trajectories outlive versions: some episodes take many times a training step."""
    return config(
        "run.steps=8",
        "sim.environment_seconds_mean=8",
        "sim.environment_seconds_sigma=1.5",
        "rollout.environment_step_timeout=1000",
        "rollout.trajectory_timeout=1000",
        "rollout.redundant_groups=3",
        "rollout.environments=60",
        *overrides,
    )


# -- the same bytes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("faults", [0.0, 0.03])
def test_same_seed_same_events_other_seed_other_events(faults: float) -> None:
    first = simulate(config(f"sim.fault_rate={faults}", "run.seed=5"))
    again = simulate(config(f"sim.fault_rate={faults}", "run.seed=5"))
    other = simulate(config(f"sim.fault_rate={faults}", "run.seed=6"))
    assert first.events == again.events
    assert first.journal == again.journal
    assert first.summary == again.summary
    assert first.events != other.events
    for line in first.events.decode().splitlines():
        record = json.loads(line)
        assert line == json.dumps(record, sort_keys=True, separators=(",", ":"))


_PRINT_EVENTS = """
import sys
from scripts.bench.micro.ledger_faults import config_of
from orchestrator.sim.simulated_run import simulate
for seed in range(6):
    result = simulate(config_of(seed))
    sys.stdout.buffer.write(result.events + result.journal)
"""


@pytest.mark.slow
def test_events_do_not_depend_on_the_hash_seed_or_the_process() -> None:
    outputs = []
    for hash_seed in ("1", "4242"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        command = [sys.executable, "-c", _PRINT_EVENTS]
        outputs.append(subprocess.run(command, env=environment, capture_output=True, check=True, timeout=120).stdout)
    assert len(outputs[0]) > 10_000
    assert hashlib.sha256(outputs[0]).hexdigest() == hashlib.sha256(outputs[1]).hexdigest()


def test_the_global_random_generator_is_not_touched() -> None:
    import random

    before = random.getstate()
    simulate(config("sim.fault_rate=0.03"))
    assert random.getstate() == before


# -- what a run leaves -------------------------------------------------------------------------------------------------


def test_no_context_is_remembered_of_what_is_over_evaluations_included(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 32,000 tokens takes 128 KiB of the orchestrator."""
    asked: set[str] = set()
    remembered: list[str] = []

    async def add(worker: SimWorker, requests: Sequence[GenerationRequest]) -> None:
        asked.update(request.trajectory_id for request in requests)
        await adds(worker, requests)

    async def close(worker: SimWorker) -> None:
        remembered.extend(worker.session._sent)
        await closes(worker)

    adds, closes = SimWorker.add, SimWorker.close
    monkeypatch.setattr(SimWorker, "add", add)
    monkeypatch.setattr(SimWorker, "close", close)
    simulate(config("evaluation.every=2"))
    assert sum(name.startswith("eval-") for name in asked) == 3 * 4
    assert remembered == []


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_run_whose_time_is_over_leaves_its_last_step_in_a_checkpoint(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who extends it trains no step again, and what it exports is what the checkpoint holds."""
    saved: list[int] = []

    def commit(checkpoints: SimCheckpoints, partial: Path, state: CheckpointState) -> Path:
        saved.append(state.step)
        return real(checkpoints, partial, state)

    real = SimCheckpoints.commit
    monkeypatch.setattr(SimCheckpoints, "commit", commit)
    rare = ("checkpoint.every=1000", "checkpoint.minutes=0", "sim.fault_rate=0.001", 'sim.faults=["delay"]')
    more = () if mode == "async" else ("rollout.alpha=0",)
    result = simulate(config("run.steps=1000", "run.minutes=2", f"run.mode={mode}", *rare, *more))
    steps = [json.loads(line)["step"] for line in result.events.decode().splitlines() if '"kind":"step"' in line]
    assert result.summary["reason"] == "completed"
    assert 3 < len(steps) < 1000
    assert saved == [0, steps[-1] + 1]


ASKED = [
    pytest.param(("run.mode=async",), id="async"),
    pytest.param(("run.mode=async", "rollout.alpha=2", "rollout.weights_overlap=true"), id="weights beside a step"),
    pytest.param(("run.mode=sync", "rollout.alpha=0"), id="sync"),
    pytest.param(
        ("run.mode=sync_plus", "rollout.alpha=0", "trainer.stream=true", "rollout.colocation.enabled=true"),
        id="devices change hands",
    ),
]


def asked_to_end(monkeypatch: pytest.MonkeyPatch, more: Sequence[str], grace: float, *after: float) -> SimResult:
    """A run that takes no checkpoint of its own, and whose first life is asked to end after so many seconds."""
    lives: list[Pipeline] = []
    kept: list[SimCheckpoints] = []

    def kept_by(*given: Any) -> SimCheckpoints:
        kept.append(SimCheckpoints(*given))
        return kept[-1]

    def with_checkpoints(*given: Any) -> Components:
        return replace(Components(*given), checkpoints=kept[-1])

    async def run(pipeline: Pipeline) -> str:
        if not lives:
            for seconds in after:
                asyncio.get_running_loop().call_later(seconds, pipeline.stop, "interrupted", grace)
        lives.append(pipeline)
        return await runs(pipeline)

    runs = Pipeline.run
    with monkeypatch.context() as patched:
        patched.setattr(Pipeline, "run", run)
        patched.setattr(simulated_run, "SimCheckpoints", kept_by)
        patched.setattr(simulated_run, "Components", with_checkpoints)
        patched.setattr(simulated_run._Simulation, "_damage", lambda *_: None)
        result = simulate(config("run.steps=8", "checkpoint.every=1000", "checkpoint.minutes=0", *more), strict=False)
    assert (result.unaccounted, result.violations) == (0, [])
    assert result.summary["reason"] == "completed"
    return result


def steps_of(result: SimResult) -> list[int]:
    return [json.loads(line)["step"] for line in result.events.decode().splitlines() if '"kind":"step"' in line]


@pytest.mark.parametrize("more", ASKED)
def test_a_run_that_is_asked_to_end_trains_no_step_again(
    more: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever that is: what waits for the trainer is in the checkpoint, and what it trains is trained."""
    whole = [json.loads(line) for line in asked_to_end(monkeypatch, more, 1e4).events.decode().splitlines()]
    stages = [one for one in whole if one["kind"] == "stage" and one["step"] in (3, 4) and one["start"] < one["end"]]
    assert len(stages) > 5
    for stage in stages:
        result = asked_to_end(monkeypatch, more, 1e4, (stage["start"] + stage["end"]) / 2)
        begins = [json.loads(line) for line in result.events.decode().splitlines() if '"run_start"' in line]
        assert [begin["resumed_from"] in (3, 4, 5) for begin in begins[1:]] == [True], stage
        assert steps_of(result) == list(range(8)), stage
        assert "rolled_back" not in result.ledger["failed_by_cause"], stage  # nothing that was scored is lost either


def test_who_asks_again_and_who_leaves_no_time_ends_at_once_without_a_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    more = ("run.mode=async",)
    events = [json.loads(line) for line in asked_to_end(monkeypatch, more, 1e4).events.decode().splitlines()]
    (step,) = [event for event in events if event.get("stage") == "train_step" and event["step"] == 4]
    during = (step["start"] + step["end"]) / 2
    for grace, after, why in (
        (1e4, (during, during + 0.01), "it was asked to end at once"),
        (0.01, (during,), "it took more than 0.01 s"),
    ):
        result = asked_to_end(monkeypatch, more, grace, *after)
        steps, events = steps_of(result), [json.loads(line) for line in result.events.decode().splitlines()]
        assert (result.lives, steps.count(0)) == (2, 2)
        (fault,) = [event for event in events if event["kind"] == "fault"]
        assert fault["what"] == "checkpoint"
        assert fault["detail"] == f"the steps since the last one are not saved: {why}"
        (end,) = [event for event in events if event["kind"] == "run_end" and event["status"] == "interrupted"]
        assert end["t"] < during + 0.02


def test_a_resumed_run_keeps_nothing_of_the_checkpoint_that_it_came_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """What its buffer held would keep a file of it mapped, which a file server cannot remove then."""
    held: list[tuple[int, int]] = []

    async def prepare(pipeline: Pipeline) -> None:
        before = len(pipeline.position.buffered)
        await real(pipeline)
        held.append((before, len(pipeline.position.buffered)))

    real = Pipeline._prepare
    monkeypatch.setattr(Pipeline, "_prepare", prepare)
    for seed in range(8):
        simulate(
            config(
                "run.steps=8", "checkpoint.every=1", "sim.fault_rate=0.02", 'sim.faults=["crash"]', f"run.seed={seed}"
            )
        )
    assert max(before for before, _ in held) > 0
    assert {after for _, after in held} == {0}


def test_a_resume_starts_the_groups_again_that_it_lost_and_draws_on_behind_them() -> None:
    """Of a data set's epoch no row is left out because a run was killed."""
    again = 0
    for seed in range(6):
        given = ("run.steps=8", "checkpoint.every=3", "sim.fault_rate=0.02", 'sim.faults=["crash"]', f"run.seed={seed}")
        result = simulate(config(*given))
        lines = result.journal.decode().splitlines()
        groups = list(dict.fromkeys(record["group"] for line in lines if "group" in (record := json.loads(line))))
        numbers = [int(group[1:].partition("-")[0]) for group in groups]
        assert len(set(groups)) == len(groups)
        assert set(numbers) == set(range(max(numbers) + 1)), "each prompt has a group"
        ledger = Ledger(io.StringIO(), lambda: 0.0)
        ledger.restore(lines, result.summary["steps"], ())
        assert ledger.groups_lost == ()
        again += len(numbers) - len(set(numbers))
    assert again > 10


@pytest.mark.parametrize("mode", [("sync", 0), ("async", 1), ("async", 3)])
def test_a_run_without_faults_completes_and_accounts_for_everything(mode: tuple[str, int]) -> None:
    result = simulate(config(f"run.mode={mode[0]}", f"rollout.alpha={mode[1]}"))
    ledger = result.ledger
    assert result.summary["reason"] == "completed"
    assert result.summary["steps"] == 4
    assert result.lives == 1
    assert ledger["in_flight"] == 0
    assert ledger["failed"] == 0
    assert ledger["trained"] >= 4 * 3 * 2
    ends = ("trained", "evicted_stale", "aborted_redundant", "deferred", "filtered", "failed")
    assert ledger["started"] == sum(ledger[name] for name in ends)
    assert max(map(int, result.summary["staleness"])) <= mode[1]


@pytest.mark.parametrize("mode", [("sync", 0), ("async", 1)])
def test_workers_fetch_new_weights_before_they_stand_still(mode: tuple[str, int]) -> None:
    result = simulate(config(f"run.mode={mode[0]}", f"rollout.alpha={mode[1]}", "sim.update_seconds=4.0"))
    events = [json.loads(line) for line in result.events.decode().splitlines()]
    wanted = ("prepare", "suspend", "update", "resume")
    stages = [event for event in events if event["kind"] == "stage" and event["stage"] in wanted]
    assert len(stages) >= 4 * 4
    for index in range(0, len(stages), 4):
        group = stages[index : index + 4]
        assert tuple(stage["stage"] for stage in group) == wanted
        prepare, _, update, _ = group
        assert "from the relay" in prepare["waiting_for"]
        assert prepare["end"] - prepare["start"] == pytest.approx(FETCH_SHARE * 4.0)
        assert update["end"] - update["start"] == pytest.approx((1 - FETCH_SHARE) * 4.0)


def test_a_run_without_faults_that_ends_with_an_error_does_not_pass_for_one() -> None:
    """As where each step takes longer than ``rollout.stall_timeout``: no worker is left, and nothing was trained."""
    slow = config("sim.decode_seconds_per_step=100", "rollout.stall_timeout=5", "rollout.first_token_timeout=5")
    with pytest.raises(SimulationFailed, match="no rollout worker left"):
        simulate(slow)


def test_a_worker_in_the_middle_of_a_long_answer_is_not_taken_for_dead() -> None:
    """Its steps are crossed in leaps that take longer than ``rollout.stall_timeout``; a real engine's counters move meanwhile."""
    long = ("sim.response_tokens_mean=200", "rollout.stall_timeout=5", "rollout.first_token_timeout=5")
    decoding = simulate(config(*long, "sim.decode_seconds_per_step=1", "rollout.trajectory_timeout=100000"))
    assert b'"what":"worker' not in decoding.events
    assert decoding.ledger["failed"] == 0
    assert decoding.summary["seconds"] > 1000


def test_asynchronous_training_is_faster_than_synchronous() -> None:
    """The reason for the protocol, and a check that the twins' times mean something."""
    costs = ("sim.train_seconds_per_token=0.01", "run.steps=6")
    sync = simulate(config("run.mode=sync", "rollout.alpha=0", *costs)).summary
    other = simulate(config("run.mode=async", "rollout.alpha=1", *costs)).summary
    assert other["seconds"] < sync["seconds"]


def test_a_folder_gets_everything_that_a_run_leaves(tmp_path: Path) -> None:
    lines: list[str] = []
    result = simulate(config(), tmp_path / "run", lines.append)
    assert (tmp_path / "run" / "events.jsonl").read_bytes() == result.events == "".join(lines).encode()
    assert (tmp_path / "run" / "ledger.jsonl").read_bytes() == result.journal
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["ledger"] == result.ledger


def test_a_steps_figures_are_those_of_its_trajectories() -> None:
    result = simulate(config())
    events = [json.loads(line) for line in result.events.decode().splitlines()]
    steps = [event for event in events if event["kind"] == "step"]
    assert len(steps) == 4
    for step in steps:
        figures = step["metrics"]
        assert figures["response_tokens_mean"] * step["trained"] == pytest.approx(step["tokens"], abs=1e-3)
        assert figures["response_tokens_mean"] <= figures["response_tokens_p95"] <= figures["response_tokens_max"]
        assert 0.0 <= figures["truncated_share"] <= 1.0
    assert any("prompts_repeated" in step["metrics"] for step in steps)


def test_a_run_whose_groups_agree_past_its_half_ends_as_completed_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = {"loss": 0.0, "groups_silent_share": 0.9, "grad_norm": 0.1}

    async def train_step(self: Any, batch: Any) -> Any:
        return replace(await trained(self, batch), values=silent)

    trained = SimTrainer.train_step
    monkeypatch.setattr(SimTrainer, "train_step", train_step)
    ran = [simulate(config("run.steps=50", f"run.signal_share={share}")) for share in (0.3, 0.1)]
    ends = [[one for one in map(json.loads, result.events.splitlines()) if one["kind"] == "run_end"] for result in ran]
    said = [[one for one in map(json.loads, result.events.splitlines()) if one["kind"] == "alarm"] for result in ran]
    done = [sum(b'"kind":"step"' in line for line in result.events.splitlines()) for result in ran]
    assert [end[-1]["status"] for end in ends] == ["completed", "completed"]
    assert 25 <= done[0] <= 27  # one more is under way when it is known
    assert done[1] == 50
    assert [one["what"] for one in said[0]] == ["signal"]
    assert said[1] == []


# -- faults ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("seeds", SEEDS)
def test_every_trajectory_is_accounted_for_in_seeded_fault_runs(seeds: range) -> None:
    """Seeds of runs of many shapes, each with crashes, delays, drops, duplicates, cancellations, kills and resumes."""
    wrong: list[str] = []
    kinds: Counter[str] = Counter()
    lives, started = 0, 0
    for seed in seeds:
        result = simulate(ledger_faults.config_of(seed), strict=False)
        wrong += [f"seed {seed}: {line}" for line in result.violations]
        kinds.update(result.injected)
        lives += result.lives
        started += result.ledger["started"]
        assert result.unaccounted == 0, wrong[-5:]
        assert result.summary["reason"] == "completed", wrong[-5:]
    assert not wrong, "\n".join(wrong[:20])
    assert started > 20 * len(seeds)
    assert lives > len(seeds), "nothing was ever killed and resumed"
    for kind in ("crash", "delay", "drop", "duplicate", "cancel", "lose"):
        assert sum(count for name, count in kinds.items() if name.startswith(f"{kind} ")) > len(seeds) / 4, kind


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["crash", "delay", "drop", "duplicate", "cancel", "lose", "evict", "damage"])
def test_each_kind_of_fault_alone_is_survived(kind: str) -> None:
    for seed in range(4):
        result = simulate(config("sim.fault_rate=0.1", f'sim.faults=["{kind}"]', f"run.seed={seed}"))
        injected = {name.split(" ")[0] for name in result.injected}
        assert injected == {kind}
        events = [json.loads(line) for line in result.events.decode().splitlines() if line]
        logged = [event for event in events if event["kind"] == "injected"]
        assert len(logged) == sum(result.injected.values()) or result.lives > 1
        assert all(event["what"] == kind and event["where"] and event["t"] >= 0 for event in logged)
        if kind == "lose":  # no more and no less than those whose shards were lost
            assert result.ledger["failed_by_cause"]["reference_lost"] == result.injected["lose shard"]
        resent = [event for event in events if event["kind"] == "contexts_resent"]
        assert bool(resent) is (kind in ("evict", "damage")), kind


# -- mutations: each must be caught ------------------------------------------------------------------------------------


def failures(settings: Config) -> str:
    with pytest.raises(SimulationFailed) as caught:
        simulate(settings)
    return str(caught.value)


def test_a_trajectory_that_the_buffer_loses_is_caught() -> None:
    result = ledger_faults.run_that_loses_one(3)
    assert result.unaccounted == 1
    assert "in flight" in "\n".join(result.violations)


def test_a_trajectory_that_the_ledger_forgets_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Ledger.end
    skipped: list[str] = []

    def end(self: Ledger, trajectory_id: str, state: str, cause: str = "", step: int = -1) -> None:
        if state == "trained" and not skipped:
            skipped.append(trajectory_id)
            return
        honest(self, trajectory_id, state, cause, step)

    monkeypatch.setattr(Ledger, "end", end)
    assert "in flight" in failures(config())


def test_a_total_that_is_counted_wrong_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Ledger._count_end

    def count(self: Ledger, state: str, cause: str) -> None:
        honest(self, "trained" if state == "aborted_redundant" else state, cause)

    monkeypatch.setattr(Ledger, "_count_end", count)
    assert "aborted_redundant" in failures(config("run.mode=sync", "rollout.alpha=0", "rollout.redundant_groups=2"))


def test_a_journal_line_that_is_not_written_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Ledger._write
    skipped: list[str] = []

    def write(self: Ledger, record: dict[str, Any]) -> None:
        if record["state"] == "scoring" and not skipped:
            skipped.append(record["id"])
            self.sequence += 1
            return
        honest(self, record)

    monkeypatch.setattr(Ledger, "_write", write)
    assert "journal" in failures(config())


def test_a_staleness_check_that_is_removed_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    evicted = 0
    for seed in range(3):
        evicted += simulate(slow_trainer(f"run.seed={seed}")).ledger["evicted_stale"]
    assert evicted, "the check never does anything in this workload"
    monkeypatch.setattr(StalenessBound, "admissible", lambda self, trainer, first: True)
    found = "".join("\n".join(simulate(slow_trainer(f"run.seed={seed}"), strict=False).violations) for seed in range(3))
    assert "was taken with lag 2" in found


def test_a_batch_that_is_trained_twice_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = SampleBuffer.hand_over

    def hand_over(self: SampleBuffer) -> list[Taken]:
        kept = dict(list(self._taken.items())[:1])
        batch = honest(self)
        self._taken.update(kept)
        return batch

    monkeypatch.setattr(SampleBuffer, "hand_over", hand_over)
    assert "trained" in failures(config())


def test_versions_that_are_recorded_wrong_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def newest_only(**fields: Any) -> Turn:
        versions = fields["versions"]
        return Turn(**{**fields, "versions": ((versions[-1][0], sum(count for _, count in versions)),)})

    monkeypatch.setattr(orchestrator.envs, "Turn", newest_only)
    settings = slow_trainer(
        "sim.decode_seconds_per_step=1.0", "rollout.alpha=2"
    )  # with 1 those of two versions are stale
    assert "are not those of the engine" in failures(settings)


def _swap_tokens(item: Completion) -> Completion:
    return replace(item, token_ids=item.token_ids[::-1])


def _lose_a_token(item: Completion) -> Completion:
    return replace(item, token_ids=item.token_ids[1:])


@pytest.mark.parametrize("damage", [_swap_tokens, _lose_a_token])
def test_tokens_that_are_damaged_on_the_way_are_caught(
    damage: Callable[[Completion], Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = SimWorker.completions

    async def completions(self: SimWorker) -> list[Completion]:
        return [damage(item) if len(item.token_ids) > 2 else item for item in await honest(self)]

    monkeypatch.setattr(SimWorker, "completions", completions)
    assert failures(config())


def test_a_resume_that_trains_on_what_was_trained_before_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that also holds the trajectories trained in it: the next life gets them again."""
    honest = SampleBuffer.stored
    trained: list[Trajectory] = []
    hand_over = SampleBuffer.hand_over

    def remember(self: SampleBuffer) -> list[Taken]:
        batch = hand_over(self)
        trained.extend(item.trajectory for item in batch)
        return batch

    def stored(self: SampleBuffer) -> list[Trajectory]:
        return [*honest(self), *trained]

    restore = Ledger.restore

    def blind(self: Ledger, lines: Any, checkpoint_step: int, held: Any) -> list[str]:
        restore(self, lines, checkpoint_step, held)
        return list(held)

    monkeypatch.setattr(SampleBuffer, "hand_over", remember)
    monkeypatch.setattr(SampleBuffer, "stored", stored)
    monkeypatch.setattr(Ledger, "restore", blind)
    found: list[str] = []
    for seed in range(12):
        trained.clear()
        found += simulate(config("sim.fault_rate=0.02", f"run.seed={seed}"), strict=False).violations
        if found:
            return
    raise AssertionError("not noticed")


def test_a_hang_is_found_and_says_what_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(self: SampleBuffer, *args: Any, **kwargs: Any) -> list[Taken]:
        import asyncio

        await asyncio.get_running_loop().create_future()
        return []

    monkeypatch.setattr(SampleBuffer, "get_batch", never)
    result: SimResult = simulate(config(), strict=False)
    assert result.deadlocks == 1
    assert result.unaccounted > 0
    text = "\n".join(result.violations)
    assert "StandstillError" in text
    assert "Pipeline._get_batch" in text


def test_events_carry_virtual_time() -> None:
    """No event is stamped by another clock: their times never go back within a life and end with the run."""
    result = simulate(config())
    times = [json.loads(line)["t"] for line in result.events.decode().splitlines()]
    assert times == sorted(times)
    assert times[-1] == result.summary["seconds"]


def test_what_is_known_of_turns_does_not_grow_with_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.sim.simulated_worker.TURNS", 3)
    moves = TurnMoves()
    for number in range(10):
        assert moves.open_turn(str(number), number) == number
        assert moves.open_turn(str(number), number + 7) == number
    assert list(moves.opened) == ["7", "8", "9"]


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_while_the_store_is_behind_no_group_starts_and_no_batch_trains_and_the_wait_has_a_name(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is slow for an hour: what is in flight plays to its end, the run waits, and nothing is lost."""
    since, hour = 20.0, 3600.0

    def behind(_: SimStore) -> str:
        begun = asyncio.get_running_loop().time()
        return "the trajectory store: 1024 MiB" if since <= begun < since + hour else ""

    named, note = dict[str, None](), Pipeline._note_store

    def noted(self: Pipeline) -> str:
        found = note(self)
        if found:
            named[self.waiting_for] = None
        return found

    monkeypatch.setattr(SimStore, "behind", behind)
    monkeypatch.setattr(Pipeline, "_note_store", noted)
    result = simulate(
        config("run.steps=6", f"run.mode={mode}", f"rollout.alpha={2 * (mode == 'async')}", "rollout.environments=36")
    )
    assert (result.summary["seconds"] > hour, result.unaccounted, result.violations) == (True, 0, [])
    events = [json.loads(line) for line in result.events.decode().splitlines()]
    (alarm,) = (event for event in events if event["kind"] == "alarm" and event["what"] == "store")
    assert since <= alarm["t"] <= since + SAMPLE_SECONDS
    assert alarm["detail"] == "starts and training wait for the trajectory store: 1024 MiB"
    assert list(named) == ["the trajectory store: 1024 MiB"], "what the terminal, `top` and the page show"
    (over,) = (event for event in events if event["kind"] == "recovered" and event["what"] == "store")
    waits = [event for event in events if event["kind"] == "stage" and event["stage"] == "wait_store"]
    assert [one["waiting_for"] for one in waits] == ["the trajectory store: 1024 MiB"] * (
        mode == "async"
    )  # a batch was whole
    stages = [event for event in events if event["kind"] == "stage"]
    assert not [one for one in stages if one["stage"] == "train_step" and alarm["t"] < one["start"] < since + hour]
    started = [json.loads(line) for line in result.journal.decode().splitlines()]
    assert [one["t"] for one in started if one["state"] == "running" and alarm["t"] < one["t"] < over["t"]] == []


@pytest.mark.parametrize("seed", [0, 1, 2, 3, 5, 6, 9])  # each with a store that is behind; rounds, streaming, shards
def test_whatever_a_run_is_a_store_that_is_behind_now_and_then_loses_nothing_and_stops_nothing(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under faults, kills and resumes too."""

    def behind(_: SimStore) -> str:
        spell = int(asyncio.get_running_loop().time() // 15)
        return "the trajectory store" if random_stream(seed, "behind", spell).random() < 0.5 else ""

    monkeypatch.setattr(SimStore, "behind", behind)
    result = simulate(ledger_faults.config_of(seed), strict=False)
    assert (result.unaccounted, result.violations) == (0, [])
    assert b"starts and training wait for the trajectory store" in result.events


@pytest.mark.parametrize(
    "more",
    [
        pytest.param(
            ("run.mode=sync_plus", "rollout.alpha=0", "trainer.stream=true", "rollout.colocation.enabled=true"),
            id="devices change hands",
        ),
        pytest.param(
            ("run.mode=async", "rollout.alpha=2", "rollout.weights_overlap=true"), id="weights travel beside a step"
        ),
    ],
)
def test_a_run_that_is_stopped_while_it_waits_for_the_store_ends_and_accounts_for_all(
    more: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next life finishes it."""
    note, stopped = Pipeline._note_store, list[float]()

    def noted(self: Pipeline) -> str:
        if (now := asyncio.get_running_loop().time()) > 600 and not stopped:
            stopped.append(now)
            self.stop("asked to")
        return note(self)

    def behind(_: SimStore) -> str:
        return "the trajectory store" if asyncio.get_running_loop().time() > 20 and not stopped else ""

    monkeypatch.setattr(SimStore, "behind", behind)
    monkeypatch.setattr(Pipeline, "_note_store", noted)
    result = simulate(config("run.steps=8", *more), strict=False)
    assert (result.unaccounted, result.violations, result.lives) == (0, [], 2)
    ends = [json.loads(line) for line in result.events.decode().splitlines() if '"run_end"' in line]
    assert [one["status"] for one in ends] == ["interrupted", "completed"]
    assert 0 <= ends[0]["t"] - stopped[0] < 60


# -- what it does not simulate -----------------------------------------------------------------------------------------


def test_a_task_of_the_config_is_said_not_to_be_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    few = ["run.steps=1", "rollout.groups_per_step=2", "rollout.environments=16", "evaluation.prompts=1"]
    for overrides, notes in (([], 0), (["task.name=nim"], 1)):
        assert main(["sim", "--json", *few, *overrides]) == 0
        out, err = capsys.readouterr()
        assert json.loads(out)["steps"] == 1
        assert err.count("note: [task] is not simulated") == notes


# -- code of others --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [False, True])
def test_a_task_that_fails_to_give_a_prompt_ends_the_run_by_its_name(
    rounds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = SimTask.prompts

    def broken(task: SimTask, split: str, seed: int) -> Iterator[Prompt]:
        for number, prompt in enumerate(prompts(task, split, seed)):
            if split == "train" and number == 7:
                raise KeyError("row 7")
            yield prompt

    monkeypatch.setattr(SimTask, "prompts", broken)
    with pytest.raises(
        RunError, match=r"RunError: task sim: its next training prompt cannot be drawn: KeyError\('row 7'\)"
    ):
        simulate(config(f"rollout.rounds.enabled={str(rounds).lower()}"))
