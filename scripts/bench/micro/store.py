"""Share of a million-row trajectory store that a filtered read touches: bytes read over bytes stored.

Real store, made-up trajectories: 1,000,000 rows of two short turns (``--quick``: 20,000) in four tasks over 50 versions, written
by the production writer, a file a task and version. Then DuckDB, Polars and pyarrow each ask for the mean reward of one task's
rows of some versions above a reward, which needs one column and a fraction of the files. Bytes are those that the kernel
counts as read by the process (``rchar``), each reader's in one of its own; Polars maps files, and what it reads that way is
not counted. Rows that are appended afterwards change no byte of what was there: every file is compared by inode, size,
time and digest.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from array import array
from pathlib import Path
from typing import Any

import xxhash

from orchestrator.api import Prompt, RunError, Trajectory, Turn
from orchestrator.store import TrajectoryStore
from scripts.bench.result import frame, now

NAME = "store"
_BAR = 0.02
_ROWS, _QUICK = 1_000_000, 20_000
_TASKS = ("coding", "frozenlake", "household", "maths")
_VERSIONS = 50
_FILES, _QUICK_FILES = 200, 80  # of the first rows, one a task and version
_ASKED = "frozenlake", 10, 20  # task, first and last version

_DUCKDB = """
import duckdb
print(duckdb.sql(f"select count(*), avg(total_reward) from read_parquet('{folder}/task=*/date=*/version=*/*.parquet', "
    f"hive_partitioning=true) where task='{task}' and version between {low} and {high} and total_reward > 0.5").fetchone())
"""
_POLARS = """
import polars as pl
rows = pl.scan_parquet(f"{folder}/**/*.parquet", hive_partitioning=True)
rows = rows.filter((pl.col("task") == task) & pl.col("version").is_between(low, high) & (pl.col("total_reward") > 0.5))
print(rows.select(pl.len(), pl.col("total_reward").mean()).collect().row(0))
"""
_ARROW = """
import pyarrow.compute as pc
from orchestrator.store import read_trajectories
f = pc.field
where = (f("task") == task) & (f("version") >= low) & (f("version") <= high) & (f("total_reward") > 0.5)
found = read_trajectories(folder, ["total_reward"], where)["total_reward"]
print((len(found), pc.mean(found).as_py()))
"""
READERS = {"duckdb": _DUCKDB, "polars": _POLARS, "pyarrow": _ARROW}
_AROUND = """
import json, sys, time
folder, task, low, high = {given}
def read():
    with open("/proc/self/io") as file:
        return int(file.readline().split()[1])
import importlib
for name in {imports}:
    importlib.import_module(name)
before, begun = read(), time.perf_counter()
{body}
print(json.dumps([read() - before, time.perf_counter() - begun]))
"""
_IMPORTS = {"duckdb": ["duckdb"], "polars": ["polars"], "pyarrow": ["pyarrow.dataset", "orchestrator.store"]}


def run(quick: bool, nonce: str) -> dict[str, Any]:
    """Measure. Raises RunError when a reader fails or they do not agree."""
    begun = now()
    rows, files = (_QUICK, _QUICK_FILES) if quick else (_ROWS, _FILES)
    with tempfile.TemporaryDirectory(prefix="rl-coserve-store-") as name:
        folder = Path(name) / "trajectories"
        since = time.perf_counter()
        write(folder, 0, rows, files, nonce)
        seconds = time.perf_counter() - since
        before = snapshot(folder)
        readers = {reader: ask(reader, folder) for reader in READERS}
        write(folder, rows, rows // 100, 4, nonce)
        after = snapshot(folder)
    stored = sum(facts[1] for facts in before.values())
    changed = [path for path, facts in before.items() if after.get(path) != facts]
    answers = {tuple(row["answer"]) for row in readers.values()}
    if len({count for count, _ in answers}) != 1 or max(m for _, m in answers) - min(m for _, m in answers) > 1e-9:
        raise RunError(f"the readers do not agree: {readers}")
    for row in readers.values():
        row["share"] = row["bytes"] / stored
    value = max(row["share"] for row in readers.values())
    return frame(
        NAME,
        "real",
        value=value,
        unit="bytes read over bytes stored, worst reader",
        reference="bytes stored",
        reference_value=stored,
        bar=f"<= {_BAR:g} in {_ROWS:,} rows; no file changed by appending",
        holds=None if quick and not changed else value <= _BAR and not changed,
        detail={
            "rows": rows,
            "files": len(before),
            "bytes": stored,
            "bytes_a_row": round(stored / rows, 1),
            "write_seconds": round(seconds, 1),
            "rows_written_per_second": round(rows / seconds),
            "question": "count and mean of total_reward > 0.5 of task {} in versions {} to {}".format(*_ASKED),
            "readers": readers,
            "appended_rows": rows // 100,
            "files_after": len(after),
            "files_changed": changed,
            "load_average": os.getloadavg()[0],
            "samples": rows,
        },
        quick=quick,
        nonce=nonce,
        begun=begun,
    )


def write(folder: Path, first: int, count: int, files: int, nonce: str) -> None:
    """``count`` rows with ids from ``first`` on, in so many files."""
    draw = random.Random(f"{nonce}/{first}")
    store = TrajectoryStore(folder, rows_per_file=max(1, count // files))
    for number in range(first, first + count):
        place = (number - first) * files // count
        task, version = _TASKS[place % len(_TASKS)], place // len(_TASKS) % _VERSIONS
        turns = _turns(draw, version)
        name = f"t{number:08d}"
        store.append(
            Trajectory(
                id=name,
                group_id=f"g{number // 8:07d}",
                task=task,
                prompt=Prompt(name, task, number, ""),
                turns=turns,
                reward=draw.random(),
                env_version="1",
                env_seed=number,
                truncated=False,
                started_at=1.0 * version,
                finished_at=1.0 * version + 1,
                scored_at=1.0 * version + 2,
            ),
            version,
            "trained",
        )
    store.close()


def _turns(draw: random.Random, version: int) -> tuple[Turn, ...]:
    """Noise, which does not compress."""
    made = []
    for _ in range(2):
        noise = array("H", draw.randbytes(64))
        said = tuple(noise[8:20])
        logprobs = tuple([-value / 65536 for value in noise[20:32]])
        made.append(Turn(tuple(noise[:8]), said, logprobs, ((version, len(said)),)))
    return tuple(made)


def snapshot(folder: Path) -> dict[str, tuple[int, int, int, str]]:
    """(inode, bytes, time of the last change in ns, digest) of each file."""
    found = {}
    for file in sorted(folder.rglob("*.parquet")):
        facts = file.stat()
        digest = xxhash.xxh3_64(file.read_bytes()).hexdigest()
        found[str(file.relative_to(folder))] = (facts.st_ino, facts.st_size, facts.st_mtime_ns, digest)
    return found


def ask(reader: str, folder: Path) -> dict[str, Any]:
    """What one reader answers, in how many bytes and seconds. Raises RunError when it fails."""
    program = _AROUND.format(given=repr((str(folder), *_ASKED)), imports=repr(_IMPORTS[reader]), body=READERS[reader])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=600)
    if done.returncode:
        raise RunError(f"{reader}: {done.stderr[-800:]}")
    answer, facts = done.stdout.strip().splitlines()
    count, mean = answer.strip("()").split(",")
    read, seconds = json.loads(facts)
    return {"answer": [int(count), float(mean)], "bytes": read, "seconds": round(seconds, 3)}
