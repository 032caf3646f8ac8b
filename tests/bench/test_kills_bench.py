"""The bench of kills and hangs: what it would miss, it would call fine, so its eyes are tested on their own."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from orchestrator.api import RunError, TrainBatch, TrainSample
from orchestrator.config import parse_config, to_json
from orchestrator.transfer import RelayEndpoint
from scripts.bench.micro import fault_run, small_disk
from scripts.bench.micro.engine_twins import TwinTrainer, TwinWorker
from scripts.bench.micro.fault_events import EVENTS
from scripts.bench.micro.fault_run import MARK, FaultRun, Setting, books_of
from scripts.bench.micro.kills import (
    LEAST,
    LEAST_REAL,
    QUICK,
    SETTINGS,
    Kills,
    clock_variables,
    faketime,
    lines_of,
    table_of,
)
from scripts.bench.micro.power_cuts import config_of, play
from scripts.bench.micro.victims import RedisProcess, alive, descendants, identity, marked

pytestmark = pytest.mark.skipif(shutil.which("redis-server") is None, reason="redis-server is not installed")
SLEEP = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
TWINS = Setting("twins", False, (), 1, 1.0, {})


@contextmanager
def family(**variables: str) -> Iterator[tuple[int, int]]:
    """A process and its child, which outlives it."""
    code = f"{SLEEP}; print('up', flush=True); time.sleep(60)"
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env={**os.environ, **variables})
    assert parent.stdout is not None
    parent.stdout.readline()
    [child] = descendants(parent.pid)
    try:
        yield parent.pid, child
    finally:
        for pid in (child, parent.pid):
            if alive(pid):
                os.kill(pid, 9)
        parent.wait()


def test_who_outlives_its_run_is_found_by_its_mark_and_as_a_descendant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = FaultRun(tmp_path, TWINS, Path(), (), {})
    lives = tmp_path / "twins" / "lives.jsonl"

    def died(mark: str, before: float, **more: Any) -> None:
        rows = [{"mark": mark}, {"mark": mark, "died": time.time() - before, **more}]
        lives.write_text("".join(json.dumps(row) + "\n" for row in rows))

    with family(**{MARK: "here"}) as (parent, child):
        assert set(marked(MARK, "here")) == {parent, child}
        assert marked(MARK, "her") == {}
        died("here", 10.0)
        assert run.leftovers() == [], "Ray's agents may take a minute"
        died("here", 1000.0)
        [life] = run.leftovers()
        assert {line.split()[0] for line in life["left"]} == {str(parent), str(child)}
        assert [life["left"] for life in run.leftovers()] == [life["left"]], "said once, and kept"
    with family() as (parent, child):
        name = identity(child)
        died("unmarked", 1000.0, descendants={str(child): name, str(parent): "1 another start time"})
        assert [line.split()[0] for life in run.leftovers() for line in life["left"]] == [str(child)]
        died("gone", 1000.0, descendants={str(child): name})
        deadline = time.monotonic() + 10
        while alive(child) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert [life["left"] for life in run.leftovers()] == [[]]
    monkeypatch.setattr(fault_run, "END_LIMIT", 0.1)
    with family(**{MARK: "late"}):
        died("late", 0.0)
        assert len(run.leftovers(wait=True)[0]["left"]) == 2


def test_a_run_that_is_killed_after_its_end_has_completed_and_none_other(tmp_path: Path) -> None:
    """Its ``--resume`` is refused: the bench would wait for its next step in vain."""
    run = FaultRun(tmp_path, TWINS, Path(), (), {})
    run.path.mkdir()
    assert not run.completed

    def last(kind: str, status: str = "completed") -> None:
        run.log.write_text(
            json.dumps({"kind": "run_start"}) + "\n" + json.dumps({"kind": kind, "status": status}) + "\n"
        )

    run.process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    last("run_end")
    assert not run.completed, "it is still there"
    run.end()
    assert run.completed
    last("step")
    assert not run.completed
    last("run_end", "failed")
    assert not run.completed


def rows(outcome: str = "continued", real: int = LEAST_REAL, count: int = LEAST) -> list[dict[str, Any]]:
    common = {"outcome": outcome, "seconds": 2.0, "run": "run-001"}
    kinds = list(EVENTS)
    return [
        {"kind": kinds[at % len(kinds)], "setting": "real" if at < real else "twins", "real": at < real, **common}
        for at in range(count)
    ]


SOUND: dict[str, Any] = {"run": "run-001", "unaccounted": 0, "wrong": []}


@pytest.mark.parametrize(
    ("found", "end", "left", "holds"),
    [
        (rows(), SOUND, [], True),
        (rows("resumed"), SOUND, [], True),
        (rows(), SOUND | {"unaccounted": 1}, [], False),
        (rows(), SOUND | {"wrong": ["step 3: lag {'2': 1}"]}, [], False),
        (rows(), SOUND, ["7 raylet"], False),
        (rows(), SOUND | {"run": "run-002"}, [], False),
        (rows(count=LEAST - 1), SOUND, [], False),
        (rows(real=LEAST_REAL - 1), SOUND, [], False),
        ([*rows(), {**rows()[0], "damaged": ["step-000001"]}], SOUND, [], False),
    ],
)
def test_a_lost_trajectory_a_leftover_or_too_few_events_is_no_success(
    tmp_path: Path, found: list[dict[str, Any]], end: dict[str, Any], left: list[str], holds: bool
) -> None:
    bench = Kills(tmp_path, SETTINGS, 0)
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    for name in ("real", "twins"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "ends.jsonl").write_text(json.dumps(end if name == "twins" else SOUND) + "\n")
        life = {"mark": name, "left": left if name == "twins" else [], "gone_after": 1.0}
        (tmp_path / name / "lives.jsonl").write_text(json.dumps(life) + "\n")
    result = bench.result(quick=False, nonce="n")
    assert result["holds"] is holds
    assert sum(row["count"] for row in result["detail"]["table"]) == len(found)


def test_the_table_has_a_row_a_kind_with_median_and_worst() -> None:
    one = {"kind": "trainer killed", "real": True, "outcome": "continued", "run": "run-001"}
    found = table_of([{**one, "seconds": 9.0}, {**one, "seconds": 1.0}, {**one, "seconds": 2.0, "real": False}])
    assert [(row["engines"], row["count"], row["median_seconds"], row["worst_seconds"]) for row in found] == [
        ("real", 2, 5.0, 9.0),
        ("twins", 1, 2.0, 2.0),
    ]


def test_the_page_has_the_table_of_the_result() -> None:
    root = Path(__file__).parents[2]
    found = json.loads((root / "docs/results/kills.json").read_text())
    lines = lines_of(found["detail"]["table"])
    assert sum(row["count"] for row in found["detail"]["table"]) == found["reference_value"]
    assert "\n".join(lines) in (root / "docs/recovery.md").read_text()


def test_the_schedule_has_what_was_asked_for_and_every_kind_exists() -> None:
    counts = [sum(setting.events.values()) for setting in SETTINGS]
    assert sum(counts) >= LEAST
    assert sum(count for count, setting in zip(counts, SETTINGS, strict=True) if setting.real) >= LEAST_REAL
    assert {kind for setting in (*SETTINGS, *QUICK) for kind in setting.events} == set(EVENTS)


def test_books_find_a_trajectory_that_no_end_was_written_for(tmp_path: Path) -> None:
    from orchestrator.run_folder import RunFolder

    config = config_of(1, str(tmp_path))
    folder = RunFolder.create(config)
    play(folder, config, False, None, "books")
    folder.unlock()
    assert books_of(folder.path, real=False)["wrong"] == []
    lines = folder.ledger_file.read_text().splitlines()
    last = max(at for at, line in enumerate(lines) if '"state":"trained"' in line)
    folder.ledger_file.write_text("\n".join([*lines[:last], *lines[last + 1 :]]) + "\n")
    books = books_of(folder.path, real=False)
    assert books["unaccounted"] > 0
    assert "lines are missing" in books["wrong"][0]


def said(server: RedisProcess, line: str) -> str:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(f"{line}\r\n".encode())
        return connection.makefile().readline().strip()


def test_a_redis_that_was_killed_or_failed_over_is_there_again_with_what_it_had(tmp_path: Path) -> None:
    server = RedisProcess(tmp_path)
    try:
        assert said(server, "SET key value") == "+OK"
        server.kill()
        assert not alive(server.pid)
        server.start()
        assert said(server, "GET key") == "$5"
        before = server.pid
        server.fail_over()
        assert not alive(before)
        assert said(server, "GET key") == "$5"
        assert said(server, "SET other value") == "+OK"
        server.kill()
        server.start()
        assert said(server, "GET other") == "$5"
    finally:
        server.kill()


@pytest.mark.skipif(not small_disk.available(), reason="this user may not mount")
@pytest.mark.parametrize("what", ["file", "folder"])
def test_a_small_disk_is_full_for_one_command_and_its_files_stay(tmp_path: Path, what: str) -> None:
    place = tmp_path / "place"
    file = place if what == "file" else place / "old"
    file.parent.mkdir(exist_ok=True)
    file.write_text("before\n")
    script = f"yes 2>/dev/null >> {file}; echo $? {'; rm ' + str(file) if what == 'folder' else ''}; exit 3"
    command = small_disk.on_small_disk(place, 8192, tmp_path / "disk", ["sh", "-c", script])
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (3, "1")
    assert list((tmp_path / "disk").iterdir()) == [], "nobody else sees it"
    if what == "file":
        assert 4096 < file.stat().st_size <= 16384
        assert file.read_text().startswith("before\ny\n")
    else:
        assert list(place.iterdir()) == []


@pytest.mark.skipif(not faketime(), reason="libfaketime is not installed")
def test_the_clock_of_a_process_jumps_and_its_durations_do_not(tmp_path: Path) -> None:
    file = tmp_path / "clock"
    file.write_text("+0")
    code = "import time; a, b = time.time(), time.monotonic(); print('up', flush=True)\n"
    code += "while time.time() - a < 3000 and time.monotonic() - b < 30: time.sleep(0.1)\n"
    code += "print(time.time() - a, time.monotonic() - b)"
    environment = {**os.environ, **clock_variables(file)}
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        file.write_text("+3600")
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    wall, monotonic = map(float, out.split())
    assert 3600 < wall < 3640
    assert monotonic < 30


def test_a_twin_has_the_weights_of_the_relay_and_trains_nothing_twice(tmp_path: Path) -> None:
    config = to_json(parse_config({"sim": {"publish_seconds": 0.0}}))
    relay = RelayEndpoint(job="twins", kind="memory", master=str(tmp_path), bucket_bytes=1 << 20).to_dict()
    trainer, worker = TwinTrainer(config, relay), TwinWorker(config, relay, "vllm-0")
    sample = TrainSample("t-1", "g-1", (1,), (1,), (-1.0,), ((0, 1),), 0.0)

    async def play_on() -> None:
        await trainer.publish()
        await worker.prepare(0)
        await worker.suspend()
        await worker.update(0)
        await trainer.train_step(TrainBatch(0, 0, (sample,)))
        await trainer.publish()
        trainer.version = 7
        await trainer.publish()
        await worker.prepare(7)
        with pytest.raises(RunError, match=r"trained before: \['t-1'\]"):
            await trainer.train_step(TrainBatch(1, 7, (sample,)))
        worker._weights.put(1)
        assert worker._subscriber is not None
        assert {bytes(data[:1]) for _, data in worker._subscriber.fetch(worker._subscriber.manifest(7))} == {b"\x07"}

    asyncio.run(play_on())
    asyncio.run(trainer.save(str(tmp_path)))
    assert asyncio.run(trainer.load(str(tmp_path))) == 7
    state = json.loads((tmp_path / "trainer.json").read_text())
    (tmp_path / "trainer.json").write_text(json.dumps(state | {"version": 6}))
    with pytest.raises(RunError, match="holds the weights of another version than 6"):
        asyncio.run(trainer.load(str(tmp_path)))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_run_with_twins_survives_a_kill_and_a_stop(tmp_path: Path) -> None:
    bench = Kills(tmp_path, QUICK, seed=1)
    assert bench.measure(800.0)
    result = bench.result(quick=True, nonce="")
    assert (result["value"], result["reference_value"]) == (0, 2)
    assert result["detail"]["surprises"] == []
    assert result["detail"]["wrong"] == []
