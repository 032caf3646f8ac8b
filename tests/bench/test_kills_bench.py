"""The bench that kills processes of real runs: what it would miss, it would call fine, so its eyes are tested on their own."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from scripts.bench.micro import kills
from scripts.bench.micro.kills import KINDS, PER_KIND, QUICK_KINDS, Kills
from scripts.bench.micro.victims import RedisProcess, alive, descendants, identity, marked

pytestmark = pytest.mark.skipif(shutil.which("redis-server") is None, reason="redis-server is not installed")
SLEEP = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"


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


def test_who_outlives_its_parent_is_found_by_its_mark_and_as_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kills, "END_LIMIT", 0.2)
    with family(BENCH_TEST_MARK="here") as (parent, child):
        assert set(marked("BENCH_TEST_MARK", "here")) == {parent, child}
        assert marked("BENCH_TEST_MARK", "her") == {}
        known = {child: identity(child)}
        os.kill(parent, 9)
        assert [line.split()[0] for line in kills._gone(known)] == [str(child)]
        os.kill(child, 9)
        assert kills._gone(known) == []
        assert kills._gone({os.getpid(): "another start time"}) == [], "its process id is somebody else's now"


def rows(outcome: str = "went on", orphans: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    common = {"outcome": outcome, "error": "", "seconds": 2.0, "orphans": [*orphans]}
    return [{"kind": kind, **common} for kind in KINDS for _ in range(PER_KIND)]


@pytest.mark.parametrize(
    ("found", "unaccounted", "left", "holds"),
    [
        (rows(), 0, [], True),
        (rows("resumed"), 0, [], True),
        (rows(), 1, [], False),
        (rows(), 0, ["7 raylet"], False),
        (rows(orphans=("8 worker",)), 0, [], False),
        (rows()[1:], 0, [], False),
    ],
)
def test_a_lost_trajectory_a_leftover_or_too_few_kills_is_no_success(
    tmp_path: Path, found: list[dict[str, Any]], unaccounted: int, left: list[str], holds: bool
) -> None:
    bench = Kills(tmp_path, KINDS, PER_KIND, 0)
    (tmp_path / "kills.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    ends = [{"unaccounted": 0, "orphans": []}, {"unaccounted": unaccounted, "orphans": left}]
    (tmp_path / "ends.jsonl").write_text("".join(json.dumps(end) + "\n" for end in ends))
    result = bench.result(quick=False, nonce="n")
    assert result["holds"] is holds
    assert result["detail"]["kinds"]["engine"]["median_seconds"] == 2.0


def said(server: RedisProcess, line: str) -> str:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(f"{line}\r\n".encode())
        return connection.makefile().readline().strip()


def test_a_redis_that_was_killed_is_there_again_with_what_it_had(tmp_path: Path) -> None:
    server = RedisProcess(tmp_path)
    try:
        assert said(server, "SET key value") == "+OK"
        server.kill()
        assert not alive(server.pid)
        server.start()
        assert said(server, "GET key") == "$5"
    finally:
        server.kill()


@pytest.mark.long
@pytest.mark.engine
@pytest.mark.timeout(900)
def test_a_real_run_survives_the_kills_that_cost_no_engine(tmp_path: Path) -> None:
    bench = Kills(tmp_path, QUICK_KINDS, 1, seed=1)
    assert bench.measure(800.0)
    result = bench.result(quick=True, nonce="")
    assert (result["value"], result["reference_value"]) == (0, 3)
    assert {kind["went_on"] for kind in result["detail"]["kinds"].values()} == {1}
