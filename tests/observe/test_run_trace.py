"""Traces and the terminal view: what Perfetto opens, from a run with measured turns and one without, and a screen of a run."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import pty
import random
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from orchestrator.api import ConfigError, Prompt, Trajectory, Turn
from orchestrator.cli import main
from orchestrator.observe.view import folder_follower
from orchestrator.observe.view import run_trace as tracing
from orchestrator.observe.view.run_trace import write_trace
from orchestrator.observe.view.top import screen
from orchestrator.observe.view.view_server import Hub
from orchestrator.store import TrajectoryStore
from tests.support import view_runs as runs

EVIL = "[red]not markup[/red]"


def with_trajectories(folder: Path, count: int, measured: int) -> Path:
    """A run with stored trajectories, of which the first ``measured`` have their turns in the turns' file, too."""
    draw = random.Random(7)
    runs.write_run(folder, steps=12)
    store = TrajectoryStore(folder / "trajectories")
    lines = []
    for number in range(count):
        started = draw.uniform(45.0, 90.0)
        at, turns = started + draw.uniform(0.0, 0.5), []
        for place in range(draw.randint(1, 5)):
            generated, stepped = draw.uniform(0.05, 0.6), draw.uniform(0.01, 0.3)
            if number < measured:
                times = [at, at + generated, at + generated, at + generated + stepped]
                lines.append(json.dumps([f"t{number:08d}", place, f"vllm-{number % 2}", *times]))
            at += generated + stepped
            turns.append(Turn((1,), (2,), (-0.5,), ((0, 1),), generate_seconds=generated, environment_seconds=stepped))
        prompt = Prompt("k", "frozenlake", 0, "")
        item = Trajectory(
            f"t{number:08d}", "g", "frozenlake", prompt, tuple(turns), 1.0, "1", 0, False,
            started_at=started, finished_at=at, scored_at=at + 0.02,
        )  # fmt: skip
        store.append(item, 3, "trained")
    store.close()
    (folder / "turns.jsonl").write_text("\n".join([*lines, '["t0000']))  # the last one was cut by a kill
    return folder


def events_of(file: Path) -> list[dict[str, Any]]:
    """Every event of a trace, after the rules of the format were checked."""
    with gzip.open(file, "rt") if file.suffix == ".gz" else file.open() as stream:
        found = json.load(stream)["traceEvents"]
    named = {(row["pid"], row["tid"]) for row in found if row["ph"] == "M" and row["name"] == "thread_name"}
    assert {row["ph"] for row in found} <= {"M", "X", "C", "i"}
    tracks: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for row in found:
        assert isinstance(row["name"], str)
        assert isinstance(row["ts"], int)
        assert row["ts"] >= 0
        if row["ph"] == "X":
            assert row["dur"] >= 0
            tracks.setdefault((row["pid"], row["tid"]), []).append(row)
    assert set(tracks) <= named
    for rows in tracks.values():
        check_nesting(rows)
    return list(found)


def check_nesting(rows: Sequence[dict[str, Any]]) -> None:
    """Slices of one track lie beside each other or one within the other: Perfetto refuses what overlaps otherwise."""
    open_until: list[int] = []
    for row in sorted(rows, key=lambda row: (row["ts"], -row["dur"])):
        while open_until and open_until[-1] <= row["ts"]:
            open_until.pop()
        assert not open_until or row["ts"] + row["dur"] <= open_until[-1], row
        open_until.append(row["ts"] + row["dur"])


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_trace_is_in_the_format_and_has_every_trajectory_stage_and_call(tmp_path: Path, name: str) -> None:
    folder = with_trajectories(tmp_path / "run-001", 60, measured=30)
    written = write_trace(folder, tmp_path / name)
    events = events_of(tmp_path / name)
    assert written.events == len(events)
    assert written.trajectories == 60
    slices = [row for row in events if row["ph"] == "X"]
    assert {row["cat"] for row in slices} == {"stage", "trajectory", "environment", "reward", "generation"}
    stages = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert sum(row["cat"] == "stage" for row in slices) == sum(event["kind"] == "stage" for event in stages)
    assert len({row["name"] for row in slices if row["cat"] == "trajectory" and row["name"].startswith("t0")}) == 60
    processes = {row["args"]["name"] for row in events if row["name"] == "process_name"}
    assert {"the loop", "trajectories", "environment calls", "worker vllm-0", "worker vllm-1"} <= processes
    assert any("which one was not recorded" in text for text in processes)  # of those without measured turns


def test_measured_turns_are_where_they_were_and_others_say_that_they_are_not_measured(tmp_path: Path) -> None:
    folder = with_trajectories(tmp_path / "run-001", 20, measured=10)
    write_trace(folder, tmp_path / "trace.json")
    rows = [row for row in events_of(tmp_path / "trace.json") if row["ph"] == "X" and row["cat"] == "generation"]
    measured = {
        tuple(json.loads(line)[:2]): json.loads(line) for line in (folder / "turns.jsonl").read_text().splitlines()[:-1]
    }
    on_workers = [row for row in rows if re.fullmatch(r"t\d+/\d+", row["name"])]
    assert sum(row["args"]["measured"] for row in on_workers) == len(measured)
    for row in on_workers:
        key = row["args"]["trajectory"], row["args"]["turn"]
        if row["args"]["measured"]:
            assert row["ts"] == round(measured[key][3] * 1e6)
        else:
            assert key not in measured


def test_only_some_steps_can_be_asked_for(tmp_path: Path) -> None:
    folder = with_trajectories(tmp_path / "run-001", 5, measured=5)
    everything = write_trace(folder, tmp_path / "all.json")
    some = write_trace(folder, tmp_path / "some.json", "4-6")
    assert 0 < some.events < everything.events / 2
    steps = {row["args"]["step"] for row in events_of(tmp_path / "some.json") if row.get("cat") == "stage"}
    assert steps <= set(range(2, 8))
    for wrong in ("6-4", "x", "1-"):
        with pytest.raises(ConfigError, match="--steps"):
            write_trace(folder, tmp_path / "no.json", wrong)
    with pytest.raises(ConfigError, match=r"--steps = .*no such step yet: 12 are done"):
        write_trace(folder, tmp_path / "no.json", "900-910")
    assert not (tmp_path / "no.json").exists()


def test_what_does_not_fit_is_left_out_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "MOST", 7)
    written = write_trace(with_trajectories(tmp_path / "run-001", 20, measured=0), tmp_path / "trace.json")
    assert written.trajectories == 7
    assert "the newest 7 are in it" in written.note


def test_the_command_says_where_the_trace_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = with_trajectories(tmp_path / "run-001", 3, measured=3)
    assert main(["trace", str(folder), "--out", str(tmp_path / "t.json")]) == 0
    assert str(tmp_path / "t.json") in capsys.readouterr().out
    assert main(["trace", str(folder), "--out", str(tmp_path / "no" / "t.json")]) == 2


# -- the terminal ----------------------------------------------------------------------------------------------------------


def test_the_terminals_screen_needs_80_columns_and_cuts_no_value(tmp_path: Path) -> None:
    hub = Hub(runs.write_unfinished(tmp_path / "frozenlake-001"))
    asyncio.run(hub.look())
    narrow, wide = (drawn(json.loads(hub.picture), width) for width in (80, 400))
    folded = sum(line.startswith("           ") for line in narrow)  # a long value goes on below itself
    assert len(narrow) - folded <= len(wide)
    assert not any("…" in line for line in narrow)
    place = {line.split()[0]: number for number, line in reversed([*enumerate(narrow)]) if line.strip()}
    assert place["reward"] < place["success"] < place["rollout"]


def test_what_happened_is_told_with_its_time_and_kind_in_80_columns(tmp_path: Path) -> None:
    hub = Hub(runs.write_unfinished(tmp_path / "frozenlake-001"))
    asyncio.run(hub.look())
    detail = "4 of 8 groups of step 2 have equal rewards: rollout.max_filtered_groups = 24 was reached"
    row = {"t": 118.0, "kind": "alarm", "what": "dynamic_sampling", "detail": detail}
    said = drawn(json.loads(hub.picture) | {"incidents": [row, row | {"detail": detail * 9}]}, 80)
    at = next(number for number, line in enumerate(said) if line.startswith("when"))
    assert said[at + 1].split()[:3] == ["1:58", "alarm", "dynamic_sampling"]
    assert " ".join(" ".join(line.split()[-12:]) for line in said[at + 1 : at + 3]).endswith("= 24 was reached")
    assert any("…" in line for line in said[at:]), "a long story is cut"
    assert len(said) - at < 10


def drawn(now: dict[str, Any], width: int) -> list[str]:
    console = Console(width=width, force_terminal=False, color_system=None)
    with console.capture() as capture:
        console.print(screen(now))
    return capture.get().splitlines()


def test_top_shows_one_picture_and_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = runs.write_unfinished(tmp_path / "run-001")
    assert main(["top", str(folder), "--once"]) == 0
    said = capsys.readouterr().out
    for words in ("run-001", "running", "step 40 of 80", "waiting for", "5 of 8 groups", "vllm-0", "coming back", "40 %", "18.4",
                  "environment step", "started ="):  # fmt: skip
        assert words in said, words
    assert main(["top", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 40


def test_while_a_long_log_is_first_read_top_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = runs.write_unfinished(tmp_path / "run-001")
    assert main(["top", str(folder), "--json"]) == 0
    whole = capsys.readouterr()
    assert whole.err == ""
    monkeypatch.setattr(folder_follower, "CHUNK", 4096)
    assert main(["top", str(folder), "--json"]) == 0
    said = capsys.readouterr()
    assert re.fullmatch(r"(reading the log, \d+ %\n)+", said.err)
    assert said.out == whole.out
    half = "\n".join(drawn(json.loads(said.out) | {"reading": 43}, 100))
    assert "reading the log" in half
    assert "43 % of it is read" in half


@pytest.mark.parametrize("width", [60, 100, 220])
def test_top_fits_the_terminal_and_takes_nothing_for_markup(
    tmp_path: Path, width: int, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = runs.write_unfinished(tmp_path / "run-001")
    assert main(["top", str(folder), "--json"]) == 0
    now = json.loads(capsys.readouterr().out)
    now["reasons"][EVIL] = 3
    now["workers"] = [dict(now["workers"][1], name=f"{EVIL}-{number}") for number in range(30)]
    now["workers_known"] = 30
    now["incidents"] = [{"kind": "fault", "t": 1.0, "what": EVIL, "detail": EVIL * 40}] * 40
    lines = drawn(now, width)
    assert max(map(len, lines)) <= width
    assert len(lines) < 120
    assert "[red]" in "\n".join(lines)
    assert width < 200 or re.search(re.escape(EVIL) + r"\s+3\b", "\n".join(lines))  # a reason
    assert width < 200 or sum(EVIL in line for line in lines) == 1 + 8 + 8  # and workers, and faults
    assert any("and 22" in line for line in lines)


def test_what_a_run_says_steers_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = runs.write_unfinished(tmp_path / "run-001")
    assert main(["top", str(folder), "--json"]) == 0
    now = json.loads(capsys.readouterr().out)
    steers = "\x1b]0;owned\x07\x9b31m\x1b[2J"
    now["reasons"][steers] = 3
    now["run"]["name"] = now["waiting_for"] = steers
    now["workers"] = [dict(now["workers"][0], name=steers)]
    now["incidents"] = [{"kind": steers, "t": 1.0, "what": steers, "detail": steers}]
    text = "\n".join(drawn(now, 200))
    assert "]0;owned" in text
    assert [sign for sign in text if not sign.isprintable() and sign != "\n"] == []


@pytest.mark.long
def test_top_follows_a_run_on_a_terminal_and_ends_with_it(tmp_path: Path) -> None:
    folder = runs.write_unfinished(tmp_path / "run-001")
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "orchestrator.cli", "top", str(folder)],
        cwd=Path(__file__).parents[2],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "60"},
    )
    os.close(theirs)
    shown = ""
    try:
        while True:
            shown += os.read(ours, 65536).decode(errors="replace")
            if "running" in shown and "no worker left" not in (folder / "events.jsonl").read_text():
                end = {"kind": "run_end", "t": 999.0, "status": "failed", "reason": "no worker left", "ledger": {}}
                with (folder / "events.jsonl").open("a") as stream:
                    stream.write(json.dumps(end) + "\n")
    except OSError:  # the other end is closed: it has ended
        pass
    finally:
        os.close(ours)
    assert process.wait(timeout=60) == 0, shown
    assert "no worker left" in shown.split("\x1b[?1049l")[-1]  # the last picture stays when the screen is given back
