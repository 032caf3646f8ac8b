"""The power fails at 20 moments of a real run (stock vLLM and Megatron-Core, tiny model), as in `power-cuts`; it is resumed.

What the orchestrator's process does to the run folder is recorded, the trainer's files as they are at its sync. Each state that
is rebuilt is opened by the code that a resume runs (:class:`orchestrator.runtime.run_records.RunRecords`): at least at the step
that was committed, the ledger closes, nothing that the checkpoint saw is lost. Some are resumed by ``rl-coserve train --resume``
itself and run to their end, which is at least one more step; then the books of the whole run are looked at.

``python -m scripts.bench.micro.real_cuts FOLDER --resumes N`` records and continues in FOLDER; what it prints is
``detail.real_runs`` of ``docs/results/power-cuts.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

from orchestrator.api import ConfigError, RunError
from orchestrator.checkpoint import Checkpoints, CheckpointState
from orchestrator.events import read_events
from orchestrator.ledger import LIVE_STATES
from orchestrator.run_folder import RunFolder
from orchestrator.runtime import run_records
from orchestrator.runtime.run_records import RunRecords
from scripts.bench.micro.crash_states import Disk
from scripts.bench.micro.fault_run import books_of
from scripts.bench.micro.file_trace import Operation, recorded
from scripts.bench.micro.power_cuts import Committed, InlineWriter, Life, find_faults, kind_of
from scripts.bench.result import now, source

CUTS, RESUMES = 20, 4
STEPS = 5
_LIMIT = 420.0  # seconds for a run
_SMALL = (
    "run.name=cut",
    f"run.steps={STEPS}",
    "run.minutes=600",
    "run.sync_seconds=0.5",
    "rollout.groups_per_step=4",
    "rollout.dynamic_sampling=false",
    "rollout.environments=32",
    "trainer.micro_batch_size=8",
    "checkpoint.every=1",
    "evaluation.prompts=8",
    "evaluation.every=0",
    "warmup.steps=5",
)


def record(folder: Path) -> None:
    """A run in this process, from its start to its end; the trace is in ``folder``."""
    from orchestrator import cli

    root = folder / "runs"
    root.mkdir()
    commit = Checkpoints.commit
    with recorded(root) as trace:

        def marked(self: Checkpoints, partial: Path, state: CheckpointState) -> Path:
            final = commit(self, partial, state)
            held = tuple(one.id for one in state.buffer)
            trace.mark(Committed(state.step, state.journal_sequence, held))
            return final

        Checkpoints.commit = marked  # type: ignore[method-assign]
        with patch.object(run_records, "RecordWriter", InlineWriter):  # a process of its own is not recorded
            code = cli.main(["train", "examples/frozenlake.toml", *_SMALL, f'run.folder="{root}"'])
    if code:
        raise RunError(f"the run ended with code {code}")
    with (folder / ".trace").open("wb") as stream:
        pickle.dump(trace.operations, stream)
    (folder / ".trace").replace(folder / "trace")


def choose(operations: Sequence[Operation], number: int, rng: random.Random) -> list[int]:
    """Places of so many operations, of as many kinds of file and operation as there are; all but one in five after the first
    checkpoint, and none so late that there is no step left to train."""
    commits = [at for at, one in enumerate(operations) if one.kind == "mark"]
    last = next(at for at in commits if operations[at].mark.step == STEPS)
    named = next(
        at for at, one in enumerate(operations) if one.kind == "rename" and one.to.endswith(f"step-{STEPS:06d}")
    )
    early = [rng.randrange(1, commits[0]) for _ in range(number // 5)]
    by_kind: dict[tuple[str, str], list[int]] = {}
    for at in range(commits[0] + 1, last):
        if operations[at].kind != "mark":
            by_kind.setdefault(kind_of(operations[at]), []).append(at)
    chosen: list[int] = []
    kinds = sorted(by_kind)
    rng.shuffle(kinds)
    while len(chosen) < number - len(early):
        chosen += [rng.choice(by_kind[kind]) for kind in kinds]
    return [min(at, named - 1) for at in early + chosen[: number - len(early)]]


def try_cut(operations: Sequence[Operation], at: int, seed: str, folder: Path, whole: bool) -> dict[str, Any]:
    """One state; ``whole``: resumed by the command, and run to its end."""
    before = [one for one in operations[:at] if one.kind != "mark"]
    marks = [one.mark for one in operations[:at] if one.kind == "mark"]
    committed: Committed | None = marks[-1] if marks else None
    disk = Disk(before)
    journal = disk.content("cut-001/ledger.jsonl").decode().splitlines()
    started = {json.loads(line)["id"] for line in journal if line.endswith("}")}
    ids = list(dict.fromkeys(json.loads(line)["id"] for line in journal[: committed.sequence if committed else 0]))
    row: dict[str, Any] = {
        "operation": at,
        "of": " ".join(kind_of(operations[at])),
        "committed_step": committed.step if committed else None,
        "seen": len(ids),
    }
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        root = Path(scratch)
        disk.cut(random.Random(seed), root)
        try:
            life = _reopen(RunFolder.open(root / "cut-001"))
        except (ConfigError, RunError) as error:
            refused = str(error).replace(f"{root}/", "")[:300]
            missing = len(ids) if committed else 0
            return row | {
                "resumed_at": None,
                "refused": refused,
                "lost": missing,
                "wrong": [refused] if committed else [],
            }
        row |= {"resumed_at": life.step, "repairs": life.records.repairs}
        lost, wrong = _look(root / "cut-001", life, committed, ids)
    if whole:
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            root = Path(scratch)
            disk.cut(random.Random(seed), root)
            more, found = _resume(root / "cut-001", life, committed, ids, started, row)
            lost |= more
            wrong += found
    return row | {"lost": len(lost), "wrong": wrong}


def _reopen(folder: RunFolder) -> Life:
    """As a resume opens it; closed again."""
    folder.lock()
    config = folder.config()
    try:
        with RunRecords.open(folder, config, time.monotonic, datetime.now(UTC), resume=True) as records:
            assert records.resumed is not None
            position = records.resumed.position
            records.ledger.check()
            held = frozenset(one.id for one in position.buffered)
            return Life(records, position.step, position.trajectories, held)
    finally:
        folder.unlock()


def _look(run: Path, life: Life, committed: Committed | None, ids: Sequence[str]) -> tuple[set[str], list[str]]:
    """What of the ``ids`` is lost in a run that has not continued yet."""
    lines = RunFolder(run).lines(run / "ledger.jsonl")
    last = {}
    for line in lines:
        one = json.loads(line)
        last[one["id"]] = one
    lost = {name for name in ids if name not in last}
    wrong = []
    if committed is not None and life.step < committed.step:
        wrong.append(f"resumed at step {life.step}, {committed.step} was committed")
        lost.update(ids)
    lost |= {name for name in ids if name in last and last[name]["state"] in LIVE_STATES and name not in life.buffered}
    if committed is not None and life.step == committed.step:
        lost |= set(committed.buffered) - life.buffered
    return lost, wrong


def _resume(
    run: Path, life: Life, committed: Committed | None, ids: list[str], started: set[str], row: dict[str, Any]
) -> tuple[set[str], list[str]]:
    """By the command, to the end of the run."""
    begun = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "orchestrator.cli", "train", "--resume", str(run)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "NO_COLOR": "1"},
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=_LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        said, _ = process.communicate()
    row |= {"code": process.returncode, "seconds": round(time.monotonic() - begun, 1)}
    if process.returncode:
        return set(ids), [f"train --resume: {process.returncode}: {said[-300:]}"]
    events = list(read_events(run / "events.jsonl"))
    at = max(number for number, event in enumerate(events) if event["kind"] == "run_start")
    row["steps_trained"] = sum(event["kind"] == "step" for event in events[at:])
    counts = events[-1]["ledger"]
    folder, books = RunFolder(run), books_of(run, real=True)
    own = SimpleNamespace(ledger=SimpleNamespace(counts=SimpleNamespace(as_dict=lambda: counts)))
    ended = Life(cast(RunRecords, own), life.step, life.trajectories, life.buffered)
    lost, wrong = find_faults(folder, ended, committed, ids, started)
    if books["unaccounted"]:
        wrong.append(f"{books['unaccounted']} trajectories unaccounted for")
    if events[at]["resumed_from"] != life.step:
        wrong.append(f"resumed from {events[at]['resumed_from']}, expected {life.step}")
    if not row["steps_trained"]:
        wrong.append("no step was trained")
    return lost, wrong + books["wrong"]


def summary_of(rows: Sequence[Mapping[str, Any]], operations: Sequence[Operation]) -> dict[str, Any]:
    """What the result says of real runs."""
    whole = [row for row in rows if "code" in row]
    return {
        "kind": "real run (vLLM, Megatron-Core, tiny model); simulated power",
        "cuts": len(rows),
        "lost": sum(row["lost"] for row in rows),
        "seen": sum(row["seen"] for row in rows),
        "wrong": [text for row in rows for text in row["wrong"]],
        "resumed_by_train_resume_to_the_end": len(whole),
        "steps_trained_by_those": [row["steps_trained"] for row in whole if "steps_trained" in row],
        "operations": len(operations),
        "by_kind": dict(sorted(Counter(row["of"] for row in rows).items())),
        "rows": list(rows),
        "source": source("power-cuts"),
        "ended": now(),
    }


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cuts", type=int, default=CUTS)
    parser.add_argument("--resumes", type=int, default=RESUMES, help="of these, by the command")
    parser.add_argument("--record", action="store_true", help="only record, in this process")
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if options.record:
        record(folder)
        return 0
    if not (folder / "trace").exists():
        subprocess.run([sys.executable, "-m", __spec__.name, str(folder), "--record"], check=True, stdout=sys.stderr)
    with (folder / "trace").open("rb") as stream:
        operations: list[Operation] = pickle.load(stream)  # our own
    places = choose(operations, options.cuts, random.Random("real cuts"))
    resumed = sorted(random.Random("resumes").sample(range(options.cuts // 5, options.cuts), options.resumes))
    for number, at in enumerate(places):
        file = folder / f"cut-{number:02d}.json"
        whole = number in resumed
        if file.exists() and ("code" in json.loads(file.read_text(encoding="utf-8")) or not whole):
            continue
        row = try_cut(operations, at, f"real cut {number}", folder, whole)
        file.write_text(json.dumps(row), encoding="utf-8")
        print(f"{number + 1}/{len(places)} {row}", file=sys.stderr, flush=True)
    rows = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("cut-*.json"))]
    found = summary_of(rows, operations)
    print(json.dumps(found, indent=2))
    return 1 if found["lost"] or found["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
