"""Whole runs with real engines: vLLM, Megatron-Core, Ray, Mooncake, HTTP rewards. Small, but nothing is replaced.

Each test starts the command a user starts, and reads what the user gets. Processes are killed with SIGKILL.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from orchestrator.events import read_events
from orchestrator.ledger import recount
from orchestrator.sim.run_audit import account_epochs
from scripts.bench.papers.run_figures import epochs_done
from tests.support.forked_ranks import ForkedRank, wait_for_all
from tests.support.real_runs import of

pytestmark = [pytest.mark.engine, pytest.mark.timeout(420)]

ROOT = Path(__file__).parents[2]
EPOCH = 14  # prompts, of which the 10 steps of 4 train each twice at least
SMALL = [
    "model.hidden_size=64",
    "model.intermediate_size=128",
    "rollout.groups_per_step=4",
    "rollout.dynamic_sampling=false",
    "rollout.environments=32",
    "trainer.micro_batch_size=8",
    "checkpoint.every=1",
    "evaluation.prompts=40",
    "evaluation.every=0",
    "warmup.steps=5",
]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "orchestrator.cli", *arguments]


def started(folder: Path, *overrides: str) -> subprocess.Popen[str]:
    place = [f'run.folder="{folder}"', "run.name=t"]
    return launch(command("train", "examples/frozenlake.toml", *SMALL, *place, *overrides))


def launch(arguments: list[str]) -> subprocess.Popen[str]:
    environment = {**os.environ, "NO_COLOR": "1"}
    return subprocess.Popen(
        arguments,
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
    )


@contextmanager
def running(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def finish(process: subprocess.Popen[str], seconds: float = 240) -> str:
    output, _ = process.communicate(timeout=seconds)
    return output


def wait_for(run: Path, kind: str, count: int, process: subprocess.Popen[str], seconds: float = 180) -> None:
    """Wait until the event log has ``count`` events of a kind."""
    deadline = time.monotonic() + seconds
    events = run / "events.jsonl"
    while time.monotonic() < deadline:
        if events.exists() and sum(event["kind"] == kind for event in read_events(events)) >= count:
            return
        if process.poll() is not None:
            raise AssertionError(f"the run ended early:\n{process.communicate()[0]}")
        time.sleep(0.1)
    raise AssertionError(f"no {count} {kind} events after {seconds} s")


def process_of(run: Path, name: str) -> int:
    rows = dict(line.split() for line in (run / "processes").read_text().splitlines())
    return int(rows[name])


def check_books(run: Path, steps: int) -> dict[str, Any]:
    """The ledger closes, an independent recount agrees, Parquet agrees, no bound was passed. Returns the summary."""
    done = subprocess.run(command("report", str(run), "--json"), capture_output=True, text=True, cwd=ROOT, check=True)
    summary: dict[str, Any] = json.loads(done.stdout)
    ledger = summary["ledger"]
    ends = ("trained", "evicted_stale", "aborted_redundant", "deferred", "filtered", "failed", "in_flight")
    assert ledger["started"] == sum(ledger[name] for name in ends)
    counted = recount((run / "ledger.jsonl").read_text().splitlines())
    assert {name: counted[name] for name in ("started", *ends)} == {name: ledger[name] for name in ("started", *ends)}
    from orchestrator.store import count_by_outcome

    assert count_by_outcome(run / "trajectories").get("trained", 0) == ledger["trained"]
    by_step = {event["step"]: event for event in of(run, "step")}
    assert sorted(by_step) == list(range(steps))
    assert summary["steps"] == steps
    alpha = summary["alpha"]
    for event in by_step.values():
        assert max(map(int, event["lag"])) <= alpha
        assert max(map(int, event["lag_trained"])) <= alpha + 1
        assert event["metrics"]["logprob_gap_mean"] < 1e-3  # fp32 on both sides
    return summary


def groups_trained(run: Path) -> set[str]:
    import pyarrow.parquet as parquet

    files = sorted((run / "trajectories").rglob("*.parquet"))
    rows = [row for file in files for row in parquet.read_table(file, columns=["group_id", "outcome"]).to_pylist()]
    return {row["group_id"] for row in rows if row["outcome"] == "trained"}


def check_streamed(run: Path) -> None:
    """What was fed is what the feed stages say, none of it beside a training step, and the trainer used it."""
    feeds = [stage for stage in of(run, "stage") if stage["stage"] == "feed"]
    steps = of(run, "step")
    assert sum(step["fed"] for step in steps) == sum(feed["samples"] for feed in feeds) > 0
    assert sum(step["metrics"]["stream_fed"] for step in steps) > 0
    assert sum(step["metrics"]["stream_restarts"] for step in steps) == 0
    trained = [stage for stage in of(run, "stage") if stage["stage"] in ("train_step", "checkpoint")]
    assert not [f for f in feeds for t in trained if f["start"] < t["end"] and t["start"] < f["end"]]


@pytest.fixture(scope="module")
def asynchronous(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of the demo's kind, small, with all its checkpoints."""
    folder = tmp_path_factory.mktemp("asynchronous")
    with running(started(folder, "run.steps=4", "checkpoint.keep=9")) as process:
        output = finish(process)
    assert process.returncode == 0, output
    return folder / "t-001"


def test_an_asynchronous_run_trains_publishes_and_accounts(asynchronous: Path) -> None:
    run = asynchronous
    summary = check_books(run, 4)
    assert (summary["mode"], summary["alpha"], summary["kind"], summary["status"]) == ("async", 1, "real", "completed")
    ledger = summary["ledger"]
    # Four groups of eight a step; how many members turn stale first depends on the machine, and each one is accounted for.
    assert 4 * 4 * 8 - ledger["evicted_stale"] <= ledger["trained"] <= 4 * 4 * 8
    assert len(groups_trained(run)) == 4 * 4
    assert ledger["in_flight"] == 0
    assert [event["version"] for event in of(run, "step")] == [1, 2, 3, 4]
    stages = {event["stage"] for event in of(run, "stage")}
    assert {"get_batch", "suspend", "update", "resume", "train_step", "publish", "evaluate", "checkpoint"} <= stages
    assert [event["phase"] for event in of(run, "evaluation")] == ["start", "end"]
    check_streamed(run)
    overlapped = [
        (train["start"], train["end"])
        for train in of(run, "stage")
        if train["stage"] in ("train_step", "feed")
        for batch in of(run, "stage")
        if batch["stage"] == "get_batch" and batch["start"] < train["end"] and train["start"] < batch["end"]
    ]
    assert overlapped, "nothing was trained beside get_batch"
    assert (run / "report.html").stat().st_size > 10_000
    assert (run.parent / "latest").resolve() == run.resolve()


_REPLAY = """
import asyncio, itertools, json, sys
from pathlib import Path
from megatron_rlplugin.trainer.recorded_rows import read_batches
from megatron_rlplugin.trainer.megatron_trainer import MegatronTrainer
from orchestrator.config import parse_config

async def replay(run, stream, target):
    config = json.loads((run / "config.json").read_text())
    trainer = MegatronTrainer(
        model=str(run / "model"), settings=config["trainer"] | {"stream": stream, "micro_batch_order": "arrival"},
        total_steps=config["run"]["steps"], seed=config["run"]["seed"], dtype=config["model"]["dtype"],
        temperature=config["rollout"]["temperature"], batch_size=parse_config(config).batch_trajectories,
    )
    version = await trainer.load(str(run / "checkpoints" / "step-000000" / "trainer"))
    fed = []
    for batch in read_batches(run, first_version=version):
        for _, group in itertools.groupby(batch.samples, lambda sample: sample.group_id):
            await trainer.feed(list(group), batch.version)
        metrics = await trainer.train_step(batch)
        fed.append(metrics.values.get("stream_fed", 0.0))
    target.mkdir()
    await trainer.export(str(target))
    print(json.dumps(fed))

asyncio.run(replay(Path(sys.argv[1]), sys.argv[2] == "stream", Path(sys.argv[3])))
"""


def replayed(run: Path, how: str, target: Path) -> list[float]:
    """Train the recorded batches again in a process of its own. Returns the share that was streamed, by step."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    (done,) = wait_for_all([ForkedRank("-c", _REPLAY, str(run), how, str(target), env=environment)], 200)
    assert done.code == 0, done.err
    fed: list[float] = json.loads(done.out.splitlines()[-1])
    return fed


def test_a_replay_with_and_without_streaming_ends_with_the_weights_of_the_run_bit_for_bit(
    asynchronous: Path, tmp_path: Path
) -> None:
    """Fed group by group, as a whole, or as it came in the run: the same weights."""
    fed = replayed(asynchronous, "stream", tmp_path / "streamed")
    unfed = replayed(asynchronous, "whole", tmp_path / "whole")
    assert len(fed) == 4
    assert min(fed) > 0.5
    assert unfed == [0.0] * 4
    weights = {
        folder: (folder / "model.safetensors").read_bytes()
        for folder in (asynchronous / "model-final", tmp_path / "streamed", tmp_path / "whole")
    }
    assert weights[tmp_path / "streamed"] == weights[tmp_path / "whole"]
    assert weights[tmp_path / "streamed"] == weights[asynchronous / "model-final"]
    assert weights[tmp_path / "streamed"] != (asynchronous / "model" / "model.safetensors").read_bytes()


@pytest.mark.long
def test_a_killed_engine_is_restarted_and_the_run_completes(tmp_path: Path) -> None:
    run = tmp_path / "t-001"
    with running(started(tmp_path, "run.steps=6")) as process:
        wait_for(run, "step", 1, process)
        os.kill(process_of(run, "vllm-0"), signal.SIGKILL)
        output = finish(process)
    assert process.returncode == 0, output
    assert of(run, "recovered")
    summary = check_books(run, 6)
    assert summary["ledger"]["failed"] == 0  # its requests were sent again, no trajectory was lost


def test_a_run_survives_its_engine_and_its_trainer_and_resumes_after_its_own_death(tmp_path: Path) -> None:
    """In short and long rounds: what is put off has to survive all of this too."""
    run = tmp_path / "t-001"
    rounds = ["rollout.redundant_groups=1.0", "rollout.rounds.enabled=true", f"rollout.rounds.epoch_prompts={EPOCH}"]
    with running(started(tmp_path, "run.steps=10", *rounds)) as process:
        wait_for(run, "step", 1, process)
        os.kill(process_of(run, "vllm-0"), signal.SIGKILL)
        wait_for(run, "recovered", 1, process)
        before = len(of(run, "step"))
        wait_for(run, "step", before + 1, process)
        os.kill(process_of(run, "trainer"), signal.SIGKILL)
        wait_for(run, "recovered", 2, process)
        wait_for(run, "step", len(of(run, "step")) + 2, process)
        os.killpg(process.pid, signal.SIGKILL)  # the orchestrator itself, with its children
    engine, trainer = of(run, "recovered")
    assert (engine["what"], trainer["what"]) == ("worker vllm-0", "trainer"), "no engine died of it"
    assert "bit for bit" not in trainer["detail"], "what it trained again are the weights that the engines have"

    with running(launch(command("train", "--resume", str(run), "run.steps=11"))) as process:  # and one step more
        output = finish(process)
    assert process.returncode == 0, output
    assert re.search(r"continuing from its checkpoint after step \d+, of 11 steps", output), output
    resumes = [event["resumed_from"] for event in of(run, "run_start")]
    assert (resumes[0], len(resumes)) == (None, 2)
    assert all(isinstance(step, int) and step >= 1 for step in resumes[1:])
    summary = check_books(run, 11)
    assert summary["ledger"]["in_flight"] == 0
    versions = [event["version"] for event in of(run, "step")]
    assert versions[-1] == 11
    check_rounds(run, 11)


def check_rounds(run: Path, steps: int) -> None:
    """Each prompt once an epoch, said by the journal; what is left is what the last checkpoint says."""
    folder = run / "checkpoints" / f"step-{steps:06d}"
    state = json.loads((folder / "state.json").read_text(encoding="utf-8"))["rounds"]["planner"]
    left = [*state["again"], *state["ready"], *(number for number, _ in (*state["queue"], *state["running"]))]
    journal = (run / "ledger.jsonl").read_text(encoding="utf-8").splitlines()
    found = account_epochs(journal, EPOCH, left, state["given_up"], state["next"])
    assert not found.violations
    assert epochs_done(found, EPOCH) >= 1
    rounds = of(run, "round")
    assert {event["round"] for event in rounds} == {"short", "long"}
    assert sum(event["deferred"] for event in rounds) > 0


@pytest.mark.long
def test_a_killed_reward_host_comes_back_and_costs_no_trajectory(tmp_path: Path) -> None:
    run = tmp_path / "t-001"
    with running(started(tmp_path, "run.steps=6")) as process:
        for kill in (1, 2):
            wait_for(run, "step", kill, process)
            os.kill(process_of(run, "reward-host"), signal.SIGKILL)
            wait_for(run, "recovered", kill, process)
            time.sleep(2.0)  # the file of processes is written anew
        output = finish(process)
    assert process.returncode == 0, output
    assert {event["what"] for event in of(run, "recovered")} == {"reward host"}
    assert check_books(run, 6)["ledger"]["failed"] == 0


@pytest.mark.long
@pytest.mark.parametrize("part", ["trainer", "mooncake_master"])
def test_without_restarts_the_death_of_a_part_ends_the_run_with_its_name(tmp_path: Path, part: str) -> None:
    run = tmp_path / "t-001"
    with running(started(tmp_path, "run.steps=40", "run.restarts=0")) as process:
        wait_for(run, "step", 1, process)
        os.kill(process_of(run, part), signal.SIGKILL)
        output = finish(process)
    assert process.returncode == 1, output
    assert part in output
    assert f"--resume {run}" in output
    assert "Traceback" not in output


def test_a_synchronous_run_is_never_stale_and_ctrl_c_stops_it_cleanly(tmp_path: Path) -> None:
    run = tmp_path / "t-001"
    with running(
        started(tmp_path, "run.steps=40", "run.mode=sync", "rollout.alpha=0", "checkpoint.every=1000")
    ) as process:
        wait_for(run, "step", 2, process)
        os.kill(process.pid, signal.SIGINT)
        output = finish(process, 60)
    assert process.returncode == 130, output
    assert "--resume" in output
    assert of(run, "run_end")[-1]["status"] == "interrupted"
    counted = recount((run / "ledger.jsonl").read_text().splitlines())
    assert counted["started"] == sum(
        value
        for name, value in counted.items()
        if name not in ("started", "rolled_back", "failed_by_cause", "ended_by_cause")
    )
    steps = of(run, "step")
    assert len(steps) >= 2
    assert max(step["metrics"]["stream_fed"] for step in steps) > 0  # rows may wait for others of their length
    for event in steps:
        assert set(event["lag_trained"]) == {"0"}
        assert event["versions_mixed"] == 0
    assert (
        max(path.name for path in (run / "checkpoints").iterdir()) == f"step-{len(steps):06d}"
    )  # none is trained again


def test_a_port_in_use_is_named_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with running(started(tmp_path, f"relay.port={port}")) as process:
            output = finish(process, 120)
    assert process.returncode == 2, output
    assert "relay.port" in output
    assert str(port) in output
