"""The trajectory store as others see it: DuckDB, Polars and datasets read the folder, filters read only what they need."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from orchestrator.api import Prompt, Trajectory, Turn
from orchestrator.store import SCHEMA, TrajectoryStore, count_by_outcome, read_trajectories

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs/trajectories.md"
EPOCH = datetime(2026, 1, 31, 23, 59, 30, tzinfo=UTC)


def trajectory(number: int, task: str, version: int, tokens: int = 6, turns: int = 1) -> Trajectory:
    rng = random.Random(number)

    def turn() -> Turn:
        said = tuple(rng.randrange(30_000) for _ in range(tokens))
        return Turn(tuple(range(tokens)), said, tuple(-rng.random() for _ in said), ((version, tokens),))

    prompt = Prompt(f"k{number % 3}", task, number, "")
    times = {"started_at": float(number), "finished_at": number + 0.5, "scored_at": number + 0.75}
    made = tuple(turn() for _ in range(turns))
    return Trajectory(
        f"t{number:08d}", f"g{number // 2}", task, prompt, made, float(number % 2), "1", 0, False, **times
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 trajectories of two tasks and three versions, half of them after midnight, trained but for every fifth."""
    where = tmp_path_factory.mktemp("store")
    store = TrajectoryStore(where, epoch=EPOCH)
    for number in range(60):
        outcome = "filtered: truncated" if number % 5 == 4 else "trained"
        store.append(trajectory(number, ("maths", "märz 1")[number % 2], number // 20), number // 20, outcome)
    store.close()
    return where


def test_the_day_is_that_of_the_episodes_end(folder: Path) -> None:
    days = {path.parts[-3] for path in folder.rglob("*.parquet")}
    assert days == {"date=2026-01-31", "date=2026-02-01"}
    table = read_trajectories(folder, columns=["date", "finished_at"])
    assert {(row["finished_at"] < 30.0, row["date"]) for row in table.to_pylist()} == {
        (True, "2026-01-31"),
        (False, "2026-02-01"),
    }


def test_duckdb_reads_the_folder_as_one_table(folder: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
    source = f"read_parquet('{folder}/task=*/date=*/version=*/*.parquet', hive_partitioning = true)"
    counted = dict(duckdb.sql(f"select outcome, count(*) from {source} group by outcome").fetchall())
    assert counted == count_by_outcome(folder)
    query = f"""select task, cast(date as varchar), version, avg(total_reward), sum(len(turns[1].action_ids)) from {source}
                where outcome = 'trained' and version = 2 group by all order by all"""
    assert duckdb.sql(query).fetchall() == [("maths", "2026-02-01", 2, 0.0, 48), ("märz 1", "2026-02-01", 2, 1.0, 48)]


def test_polars_reads_the_folder_as_one_table(folder: Path) -> None:
    polars = pytest.importorskip("polars")
    frame = polars.scan_parquet(f"{folder}/task=*/date=*/version=*/*.parquet", hive_partitioning=True)
    trained = frame.filter((polars.col("outcome") == "trained") & (polars.col("version") == 2))
    found = trained.group_by("task").agg(polars.col("total_reward").mean(), polars.len()).sort("task").collect()
    assert found.rows() == [("maths", 0.0, 8), ("märz 1", 1.0, 8)]
    turns = frame.filter(polars.col("trajectory_id") == "t00000007").select("turns").collect()["turns"][0]
    assert tuple(turns[0]["action_ids"]) == trajectory(7, "maths", 0).turns[0].action_ids


def test_the_page_reads_a_folder_that_two_versions_wrote(folder: Path, tmp_path: Path) -> None:
    """The one before wrote a column ``advantage``, and a later one may write one more: a resume adds files to the old ones."""
    duckdb, polars = pytest.importorskip("duckdb"), pytest.importorskip("polars")
    where = tmp_path / "trajectories"
    shutil.copytree(folder, where)
    first = min(where.rglob("*.parquet"))
    older = pq.ParquetFile(first).read()
    pq.write_table(older.append_column("advantage", pa.nulls(len(older), pa.float64())), first)
    page = PAGE.read_text().replace("runs/latest/trajectories", str(where))
    (query,) = re.findall(r"duckdb: +(select .*?)\n\w+:", page, re.DOTALL)
    assert len(duckdb.sql(query).fetchall()) == 6
    (source,) = re.findall(r"from (read_parquet\(.*?\))\n", page, re.DOTALL)
    assert len(duckdb.sql(f"select * from {source}").fetchall()) == 60
    (scan,) = re.findall(r"polars: +(pl.scan_parquet.*?\))\n\w+:", page, re.DOTALL)
    assert len(eval(scan, {"pl": polars}).collect()) == 60
    assert len(read_trajectories(where)) == 60


def test_every_column_is_on_the_page_with_its_type() -> None:
    listed = dict(re.findall(r"^\| `(\w+)` \| ([^|]+?) \|", PAGE.read_text().split("## The store")[1], re.MULTILINE))
    names = {
        "double": "float64",
        "bool": "true or false",
        "string": "text",
        "map<string, double>": "map of text to float64",
    }
    for column in SCHEMA:
        kind = str(column.type)
        assert listed.get(column.name) == (
            "list" if kind.startswith("list") and column.name != "errors" else
            "list of text" if column.name == "errors" else names.get(kind, kind)
        ), column.name  # fmt: skip


_DATASETS = """
import json, sys
from datasets import load_dataset
data = load_dataset("parquet", data_files=sys.argv[1], split="train", cache_dir=sys.argv[2])
row = data.filter(lambda row: row["trajectory_id"] == "t00000007")[0]
print(json.dumps([len(data), row["turns"][0]["action_ids"], row["total_reward"]]))
"""


def test_datasets_reads_the_folder(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    back = tmp_path / "trajectories"
    shutil.copytree(folder, back)
    assert TrajectoryStore(back, epoch=EPOCH).discard_after(2) == 2  # it has no rule for names that begin with one _
    pattern = f"{back}/task=*/date=*/version=*/*.parquet"
    command = [sys.executable, "-c", _DATASETS, pattern, str(tmp_path / "cache")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200)
    expected = trajectory(7, "maths", 0)
    assert json.loads(done.stdout.splitlines()[-1]) == [44, list(expected.turns[0].action_ids), expected.reward]


# -- what is read ----------------------------------------------------------------------------------------------------


def bytes_read(work: Any) -> int:
    """What this process reads from files while it works (system calls, page cache included)."""
    read = lambda: int(Path("/proc/self/io").read_text().split()[1])  # noqa: E731
    before = read()
    work()
    return read() - before


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2,000 trajectories of two turns of 200 tokens each way, in 8 versions."""
    where = tmp_path_factory.mktemp("large")
    store = TrajectoryStore(where, rows_per_file=1000)
    for number in range(2000):
        store.append(trajectory(number, "maths", number // 250, tokens=200, turns=2), number // 250, "trained")
    store.close()
    return where


def test_a_filter_reads_the_columns_it_needs_and_no_token(large: Path) -> None:
    stored = sum(path.stat().st_size for path in large.rglob("*.parquet"))
    good = (pc.field("total_reward") > 0.5) & ~pc.field("truncated")
    chosen: list[str] = []

    def select() -> None:
        chosen.extend(read_trajectories(large, ["trajectory_id"], good)["trajectory_id"].to_pylist())

    columns = bytes_read(select)
    assert len(chosen) == 1000
    everything = bytes_read(lambda: read_trajectories(large))
    assert everything > 0.9 * stored > 5_000_000
    assert columns < 0.1 * everything  # footers, of which pyarrow reads 64 KB a file, and three narrow columns


def test_a_filter_on_a_partition_opens_no_file_of_another(large: Path) -> None:
    whole = bytes_read(lambda: read_trajectories(large))
    one = bytes_read(
        lambda: read_trajectories(large, filter=(pc.field("version") == 3) & (pc.field("task") == "maths"))
    )
    assert one < 0.2 * whole
    none = bytes_read(lambda: read_trajectories(large, filter=pc.field("date") > "2020-01-01"))
    assert none < 0.01 * whole
