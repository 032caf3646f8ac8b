"""``scripts/gpu/first_day.sh`` without a GPU: its dry mode, and what it does with steps that fail, hang or lack something."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.bench.probes.vllm.first_day_probe import STEPS, engine
from tests.support import fake_cuda

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "gpu" / "first_day.sh"

# One step hangs, one fails, one lacks something, one ends without a result, others log something after theirs; the small programs
# of the script are run.
STAND_IN = """#!/bin/sh
case "$*" in
    "-m scripts.bench.probes.vllm.first_day_probe")
        printf '%s\\n' "one 20" "hangs 1" "fails 20" "lacks 20" "silent 20" "last 20"; exit 0 ;;
    *"first_day_probe hangs"*) exec sleep 60 ;;
    *"first_day_probe fails"*) echo "begun"; echo "no such kernel" >&2; exit 1 ;;
    *"first_day_probe lacks"*) echo "2 GPUs" >&2; exit 3 ;;
    *"first_day_probe silent"*) echo "loading"; exit 0 ;;
    *first_day_probe*) echo "loading"; echo '{"args": "'"$*"'"}'; echo "INFO the engine has ended"; exit 0 ;;
esac
exec PYTHON "$@"
"""


def run(folder: Path, *arguments: str, python: str = sys.executable) -> tuple[int, dict[str, dict[str, Any]], str]:
    """Exit code, what steps.jsonl says of each step, and what is printed."""
    environment = {**os.environ, "PYTHON": python}
    done = subprocess.run(
        ["bash", str(SCRIPT), *arguments], env=environment, capture_output=True, text=True, timeout=1500, check=False
    )
    file = folder / "steps.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    return done.returncode, {row["step"]: row for row in rows}, done.stdout + done.stderr


def test_a_step_that_hangs_fails_or_lacks_something_keeps_no_other_from_running(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(STAND_IN.replace("PYTHON", sys.executable))
    python.chmod(0o755)
    code, steps, printed = run(tmp_path / "out", "--dry", str(tmp_path / "out"), python=str(python))
    assert code == 3, printed
    assert {name: (row["state"], row["why"]) for name, row in steps.items()} == {
        "one": ("ok", ""),
        "hangs": ("failed", "took longer than 1 s"),
        "fails": ("failed", "exit code 1: no such kernel"),
        "lacks": ("left out", "needs 2 GPUs"),
        "silent": ("failed", "it printed no result"),
        "last": ("ok", ""),
    }
    assert steps["last"]["result"] == {"args": "-m scripts.bench.probes.vllm.first_day_probe last --dry"}
    assert steps["fails"]["result"] is None


def test_without_a_gpu_nothing_is_run_and_a_step_that_there_is_not_is_named(tmp_path: Path) -> None:
    code, steps, printed = run(tmp_path, "--dry", str(tmp_path), "driver", "warp")
    assert (code, steps) == (2, {})
    assert "warp is no step: driver pages engine" in printed
    if not os.path.exists("/dev/nvidiactl"):
        code, steps, printed = run(tmp_path, str(tmp_path))
        assert (code, steps) == (2, {})
        assert "no driver" in printed


def rehearse(folder: Path, *names: str) -> dict[str, Any]:
    code, steps, printed = run(folder, "--dry", str(folder), *names)
    told = {file.name: file.read_text()[-1500:] for file in folder.glob("*.err")}
    assert code == 0, (printed, told)
    assert list(steps) == list(names or STEPS)
    assert {row["state"] for row in steps.values()} == {"ok"}
    return {name: row["result"] for name, row in steps.items()}


@pytest.mark.engine
@pytest.mark.timeout(600)
@pytest.mark.skipif(fake_cuda.COMPILER is None, reason="no C compiler here")
def test_its_dry_mode_is_green(tmp_path: Path) -> None:
    """One step of each kind of program, the one with an engine of its own in this process; all of them: below."""
    found = rehearse(tmp_path, "driver", "pages", "pool", "mps")
    assert found["driver"]["devices"] == [{"name": "a fake device", "pages": True}]
    assert found["pages"]["kept"]["rounds"] == 2
    assert found["pool"]["modes"]["none"]["rollout_tokens_per_s"] > 0
    assert found["mps"]["health"]["daemon"]
    assert len(engine(dry=True)["update_seconds"]) == 2


@pytest.mark.long
@pytest.mark.engine
@pytest.mark.timeout(1600)
@pytest.mark.skipif(fake_cuda.COMPILER is None, reason="no C compiler here")
def test_every_step_of_its_dry_mode_is_green(tmp_path: Path) -> None:
    found = rehearse(tmp_path)
    assert found["sleep"]["equal"]
    assert found["update"]["ways"]["overlapped"]["tokens_lost"] == 0
