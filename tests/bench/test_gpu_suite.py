"""``scripts/gpu/suite.sh`` without a GPU: what it does with parts that fail, hang or lack something, by a stand-in of Python."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SUITE = ROOT / "scripts" / "gpu" / "suite.sh"

# Says that there is a GPU and every package but those of $MISSING; what a part does is a line of the file $PLAN.
STAND_IN = """#!/bin/sh
case "$*" in
    *device_count*) echo 1; exit 0 ;;
    *find_spec*) for name in $MISSING; do case "$*" in *"'$name'"*) exit 1 ;; esac; done; exit 0 ;;
    -|*setup.py*|*native.library*) exit 0 ;;
esac
echo "$*" >>"$RAN"
while IFS='|' read -r pattern action; do
    case "$*" in *"$pattern"*) eval "$action"; exit $? ;; esac
done <"$PLAN"
echo '{"fine": true}'
"""
Play = Callable[..., tuple[int, dict[str, tuple[str, str]], list[str]]]


@pytest.fixture
def play(tmp_path: Path) -> Play:
    python = tmp_path / "python"
    python.write_text(STAND_IN)
    python.chmod(0o755)

    def run(
        plan: str = "", *parts: str, missing: str = "", seconds: int = 1500
    ) -> tuple[int, dict[str, tuple[str, str]], list[str]]:
        """(exit code, state and why of each part, what was started)."""
        (tmp_path / "plan").write_text(plan)
        (tmp_path / "ran").write_text("")
        (tmp_path / "out" / "parts.tsv").unlink(missing_ok=True)
        environment = {
            **os.environ,
            "PYTHON": str(python),
            "PLAN": str(tmp_path / "plan"),
            "RAN": str(tmp_path / "ran"),
            "MISSING": missing,
            "SUITE_SECONDS": str(seconds),
        }
        command = ["bash", str(SUITE), str(tmp_path / "out"), *parts]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
        lines = [line.split("\t") for line in (tmp_path / "out" / "parts.tsv").read_text().splitlines()]
        return (
            done.returncode,
            {name: (state, why) for name, state, _, why in lines},
            (tmp_path / "ran").read_text().splitlines(),
        )

    return run


def test_a_part_that_fails_or_lacks_a_package_does_not_keep_the_others_from_running(play: Play, tmp_path: Path) -> None:
    code, parts, ran = play("--kind created|echo no kernel >&2; false\n", missing="vllm megatron")
    assert code == 1
    assert parts["remap-created"] == ("FAILED", "exit code 1: no kernel")
    assert parts["engines"] == parts["activation"] == parts["judge"] == ("left out", "needs vllm")
    assert parts["stream"] == ("left out", "needs megatron")
    assert {name for name, (state, _) in parts.items() if state == "ok"} >= {"remap", "pages", "digests"}
    assert json.loads((tmp_path / "out" / "remap.json").read_text()) == {"fine": True}
    assert not (tmp_path / "out" / "remap-created.json").exists()
    assert "remap_probe" in ran[0], "what needs nothing but the driver, and has a bar, comes first"
    assert not [line for line in ran if line.endswith("-m engine") or "equality_probe" in line]


def test_a_part_that_hangs_is_ended_and_what_has_no_time_left_is_said(play: Play) -> None:
    code, parts, _ = play("--kind kept|exec sleep 60\n", seconds=3)
    assert code == 1, parts
    state, why = parts["remap"]
    assert (state, why) == ("FAILED", "took longer than 3 s")
    assert {state for name, (state, _) in parts.items() if name != "remap"} == {"left out"}
    assert parts["digests"][1] == "no time left of 3 s"


def test_parts_can_be_named_and_all_together_their_limits_are_told(play: Play) -> None:
    code, parts, ran = play("", "remap-created", "digests")
    assert (code, list(parts), len(ran)) == (0, ["remap-created", "digests"], 2)


def test_every_file_with_tests_of_a_gpu_is_in_a_part() -> None:
    text = SUITE.read_text()
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    marked = [str(path.relative_to(ROOT)) for path in files if re.search(r"mark\.gpu\b", path.read_text())]
    assert marked
    assert not [name for name in marked if name not in text]
    for name in re.findall(r"tests/[\w/]+\.py", text):
        assert (ROOT / name).is_file(), name
    short = [int(limit) for limit in re.findall(r"^(?:part|tests) [\w-]+ (\d+)", text, re.MULTILINE)]
    assert sum(short[:4]) <= 600, "what needs PyTorch alone is over in ten minutes at the worst"


@pytest.mark.long
@pytest.mark.timeout(900)
def test_each_part_starts_and_its_tests_can_be_collected_without_a_gpu(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    pytest.importorskip("megatron.core")
    environment = {**os.environ, "PYTHON": sys.executable, "SUITE_CHECK": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", str(SUITE), str(tmp_path)], env=environment, capture_output=True, text=True, timeout=850, check=False
    )
    assert done.returncode == 0, done.stdout
    assert "left out" not in done.stdout
