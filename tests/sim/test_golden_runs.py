"""Seeded simulated runs write what they wrote before, byte for byte: ``scripts/golden_runs.py``, some of its runs and all."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.golden_runs import BUILD, RUNS

SCRIPT = Path(__file__).parents[2] / "scripts" / "golden_runs.py"
DIGESTS = RUNS.with_name("digests.json")
RECORDED = json.loads(DIGESTS.read_text())["build"]
# Each mode, each kind of fault, and each feature that changes what a run does; some four seconds together.
SOME = (
    "plain-", "minutes", "buffer-limit", "context-restart", "context-summary", "disaggregation-faults",
    "experts-fixed", "faults-areal-348", "faults-cancel", "faults-delay", "faults-duplicate", "filters-balance",
    "kv-", "overlong", "planner-linear", "pool-sync", "prediction-history", "redundancy", "rollart-rewards",
    "rollpacker-colocation", "rose-exchange-market", "rose-spot-faults", "rounds-areal", "routing-",
    "staleness-areal", "stream-areal", "timeouts", "tools", "trace",
)  # fmt: skip


def compared(digests: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "compare", str(digests), *options]
    return subprocess.run(command, cwd=SCRIPT.parents[1], capture_output=True, text=True, timeout=280, check=False)


@pytest.mark.slow
@pytest.mark.skipif(RECORDED != BUILD, reason=f"the digests are of {RECORDED}, and this is {BUILD}")
@pytest.mark.parametrize("runs", [SOME, pytest.param((), marks=pytest.mark.long)], ids=["some", "all"])
def test_seeded_runs_write_the_same_bytes_as_before(runs: tuple[str, ...]) -> None:
    done = compared(DIGESTS, *(("--only", *runs) if runs else ()))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("0 of ")
    assert int(done.stdout.split()[2]) >= 30


def test_a_run_that_writes_something_else_is_named(tmp_path: Path) -> None:
    kept = json.loads(DIGESTS.read_text())
    kept["runs"]["plain-sync"]["ledger.jsonl"] = "0" * 64
    (tmp_path / "digests.json").write_text(json.dumps(kept))
    done = compared(tmp_path / "digests.json", "--only", "plain-sync")
    assert done.returncode == 1
    assert "plain-sync: ledger.jsonl" in done.stdout or BUILD != RECORDED
