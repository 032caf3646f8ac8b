"""Time to write trajectories and to read an answer; `make bench` times it, on the rows of ``rl-coserve bench store``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow.compute as pc
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from orchestrator.store import read_trajectories
from scripts.bench.micro import store

ROWS, FILES = 400, 8


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[Path]:
    return (tmp_path / str(number) for number in range(1000))


def test_trajectories_are_written(benchmark: BenchmarkFixture, folders: Iterator[Path]) -> None:
    written: list[Path] = []

    def fresh() -> tuple[tuple[Path, int, int, int, str], dict[str, object]]:
        written.append(next(folders))
        return (written[-1], 0, ROWS, FILES, "fixed"), {}

    benchmark.pedantic(store.write, setup=fresh, rounds=5)
    assert len(store.snapshot(written[-1])) == FILES


def test_one_tasks_rows_are_read(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    store.write(tmp_path, 0, ROWS, FILES, "fixed")
    where = (pc.field("task") == "maths") & (pc.field("total_reward") > 0.5)
    found = benchmark.pedantic(read_trajectories, (tmp_path, ["total_reward"], where), rounds=10, warmup_rounds=1)
    assert 0 < len(found) < ROWS / 4
