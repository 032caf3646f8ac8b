"""Whatever a file of a run holds: the same result, or the one documented error; never anything else, never silently less."""

from __future__ import annotations

import io
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from rich.console import Console

from orchestrator.api import ConfigError, Prompt, RunError, Trajectory, Turn
from orchestrator.checkpoint import Checkpoints, CheckpointState, verify
from orchestrator.config import apply_override, load_config, parse_config, to_json
from orchestrator.events import MemorySink, read_events
from orchestrator.ledger import END_STATES, Ledger, recount
from orchestrator.observe.report.run_log import load_run
from orchestrator.observe.view.folder_follower import Follower
from orchestrator.observe.view.run_metrics import exposition
from orchestrator.observe.view.run_state import RunState as Shown
from orchestrator.observe.view.run_trace import _measured
from orchestrator.observe.view.top import screen
from orchestrator.policies.batching.round_planner import RoundPlanner, RoundRules
from orchestrator.policies.parallelism.engine_profile import EngineLayout, EngineShape, ProfilePoint
from orchestrator.profiler.profile_file import ProfileFile, ProfileKey, load_profile
from orchestrator.run_folder import RunFolder
from orchestrator.sim import run_audit
from tests.support import fuzzing, view_runs

EXAMPLES = pytest.mark.parametrize("examples", fuzzing.EXAMPLES)
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def files_need_not_outlive_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands are written here, and each sync of one waits milliseconds for the disk."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


# -- the journal -----------------------------------------------------------------------------------------------------------


def journal() -> list[str]:
    """Of two groups: trained ones, a failed one, one in the buffer, one under way."""
    sink = MemorySink()
    ledger = Ledger(sink, lambda: 1.5)
    for number in range(6):
        ledger.start(f"t{number}", f"g{number // 3}", prompt=number // 3)
    for number in range(4):
        ledger.move(f"t{number}", "scoring")
        ledger.move(f"t{number}", "buffered")
    for number in range(3):
        ledger.move(f"t{number}", "taken")
    ledger.end("t0", "trained", step=0)
    ledger.end("t1", "trained", step=0)
    ledger.end("t2", "filtered", "zero_variance")
    ledger.end("t4", "failed", "environment_timeout")
    ledger.check()
    return "".join(sink.lines).splitlines()


def _restored(lines: list[str]) -> dict[str, Any]:
    ledger = Ledger(MemorySink(), lambda: 2.0)
    ledger.restore(lines, 1, {"t3"})
    ledger.check()
    return ledger.counts.as_dict()


def journals() -> st.SearchStrategy[bytes]:
    """Damaged anywhere; or one record altered; or whole lines lost, repeated or swapped."""
    lines = journal()
    whole = "\n".join(lines).encode() + b"\n"
    records = [json.loads(line) for line in lines]

    def joined(found: list[Any]) -> bytes | None:
        made = [fuzzing.as_json(record) for record in found]
        return None if None in made else b"\n".join(made)

    return st.one_of(
        fuzzing.damaged(whole),
        fuzzing.altered(records)
        .filter(lambda made: isinstance(made, list))
        .map(joined)
        .filter(lambda made: made is not None),
        st.lists(st.sampled_from([line.encode() for line in lines]), max_size=30).map(b"\n".join),
        st.sampled_from([b"\n".join((lines[0].encode(), text)) for text in fuzzing.hostile_json()]),
    )


@EXAMPLES
def test_a_damaged_journal_is_restored_closed_or_refused(examples: int) -> None:
    same = _restored(journal())

    def check(data: bytes) -> None:
        lines = data.decode("utf-8", "replace").split("\n")
        found = fuzzing.survives(lambda: _restored(lines), RunError)
        if found is not None:  # both counts of one journal agree, whatever it says
            ends = sum(found[state] for state in END_STATES)
            assert found["started"] == ends + found["in_flight"]
        counted = fuzzing.survives(lambda: recount(lines), RunError)
        assert counted is None or counted["started"] >= 0
        said = fuzzing.survives(lambda: run_audit.account_epochs(lines, 2, left=[1]), RunError)
        assert said is None or isinstance(said.violations, list)

    fuzzing.fuzz(examples, journals(), check)
    assert _restored(journal()) == same


def test_a_line_that_is_missing_in_the_middle_of_a_journal_is_noticed() -> None:
    lines = journal()
    for place in range(len(lines) - 1):
        with pytest.raises(RunError, match="journal"):
            _restored(lines[:place] + lines[place + 1 :])
        with pytest.raises(RunError, match="journal"):
            _restored([*lines[: place + 1], lines[place], *lines[place + 1 :]])
    cut = [*lines[:-1], lines[-1][: len(lines[-1]) // 2]]
    assert _restored(cut)["started"] == 6  # the last line was being written when the process was killed


# -- events and what is under way ---------------------------------------------------------------------------------------------


@EXAMPLES
def test_a_damaged_event_log_is_shown_and_reported_without_what_is_unreadable(examples: int, tmp_path: Path) -> None:
    folder: Path = view_runs.write_unfinished(tmp_path / "run", steps=4)
    lines = (folder / "events.jsonl").read_bytes().splitlines()
    live = json.loads((folder / "live.json").read_text())
    console = Console(file=io.StringIO(), width=120)
    kinds: dict[str, Any] = {}
    for line in lines:
        kinds.setdefault(json.loads(line)["kind"], json.loads(line))

    def check(drawn: tuple[bytes, bytes]) -> None:
        event, under_way = drawn
        (folder / "events.jsonl").write_bytes(b"\n".join((lines[0], event, *lines[1:], event)) + b"\n")
        (folder / "live.json").write_bytes(under_way)
        with fuzzing.bounded():
            follower, state = Follower(folder), Shown(folder)
            for found in follower.events():
                state.take(found)
            if (record := follower.live()) is not None:
                state.figures.take_live(record)
            json.dumps(state.shown() | {"silent": 0}, allow_nan=False)
            console.print(screen(state.shown() | {"silent": 0}))
            exposition(state)
            log = load_run(folder)
            assert log.steps, "one damaged line must not hide the others"
            read_events(folder / "events.jsonl")

    drawn = st.tuples(
        st.one_of(*(fuzzing.texts(event).map(lambda data: data.replace(b"\n", b"")) for event in kinds.values())),
        fuzzing.texts(live),
    )
    fuzzing.fuzz(examples // 4, drawn, check)  # each draws a whole page


@EXAMPLES
def test_a_damaged_record_of_turns_is_left_out_of_a_trace(examples: int, tmp_path: Path) -> None:
    file = tmp_path / "turns.jsonl"

    def check(data: bytes) -> None:
        good = b'["t1", 0, "vllm-0", 1.0, 2.0, 1.1, 1.9]'
        file.write_bytes(good + b"\n" + data.replace(b"\n", b"") + b"\n" + good.replace(b"t1", b"t2") + b"\n")
        with fuzzing.bounded():
            found = _measured(file, 0.0)
        assert {("t1", 0), ("t2", 0)} <= set(found)
        for (name, turn), (worker, *times) in found.items():
            assert (type(name), type(turn), type(worker)) == (str, int, str)
            assert all(abs(time) < float("inf") for time in times)

    fuzzing.fuzz(examples, fuzzing.texts(["t0", 3, "vllm-1", 1.0, 2.0, 1.25, 1.75]), check)


# -- checkpoints and the queue of rounds ----------------------------------------------------------------------------------------


def state_of(planner: RoundPlanner) -> CheckpointState:
    turn = Turn((2, 3), (4,), (-0.5,), ((3, 1),), 0.5, True)
    trajectory = Trajectory("t3", "g1", "nim", Prompt("k", "nim", 1, ""), (turn,), 1.0, "v", 3, False)
    return CheckpointState(4, 5, 20, 12.5, (trajectory,), ((2, 0.5),), {"planner": planner.state()}, {"nim/k": [0.5]})


def planner() -> RoundPlanner:
    made = RoundPlanner(RoundRules(4, 2, epoch=12))
    made.begin_round()
    for _ in range(4):
        made.launch_next()
    made.mark_ready(0)
    made.defer(1, "")
    return made


@EXAMPLES
def test_a_damaged_checkpoint_is_skipped_or_refused(examples: int, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (3, 4):
        partial = checkpoints.begin(step)
        (partial / "trainer" / "weights.bin").write_bytes(bytes(range(200)))
        checkpoints.commit(partial, CheckpointState(**{**vars(state_of(planner())), "step": step}))
    newest = tmp_path / "step-000004"
    kept = {file: file.read_bytes() for file in newest.rglob("*") if file.is_file()}

    def check(drawn: tuple[Path, bytes]) -> None:
        file, data = drawn
        for name, whole in kept.items():
            name.write_bytes(data if name == file else whole)
        try:
            with fuzzing.bounded():
                found = checkpoints.newest()
        except RunError as error:
            if "this version reads 1" not in str(
                error
            ):  # a digit made it one of a newer version: nothing is gone back on
                raise
            return
        assert found is not None
        folder, state, _ = found
        assert (folder.name, state.step) in (("step-000004", 4), ("step-000003", 3))
        if folder == newest:  # then it holds what it held
            assert verify(folder) == ""
            assert state == CheckpointState(**{**vars(state_of(planner())), "step": 4})

    drawn = st.one_of(*(st.tuples(st.just(file), fuzzing.damaged(whole)) for file, whole in kept.items()))
    fuzzing.fuzz(examples, drawn, check)
    for file, whole in kept.items():
        file.write_bytes(whole)
    files = json.loads((newest / "files.json").read_bytes())
    drawn = st.tuples(st.just(newest / "files.json"), fuzzing.texts(files))
    fuzzing.fuzz(examples, drawn, check)


@EXAMPLES
def test_a_checkpoints_state_that_was_altered_knowingly_is_a_state_or_refused(examples: int, tmp_path: Path) -> None:
    """With digests that fit: of another version, or made by hand."""
    checkpoints = Checkpoints(tmp_path, keep=2)
    valid = json.loads(json.dumps(asdict(state_of(planner()))))

    def check(data: bytes) -> None:
        partial = checkpoints.begin(4)
        final = checkpoints.commit(partial, state_of(planner()))
        (final / "state.json").write_bytes(data)
        _seal(final)
        found = fuzzing.survives(checkpoints.newest, RunError)
        if found is None:
            return
        state = found[1]
        assert all(type(number) is int for number in (state.step, state.version, state.journal_sequence))
        assert all(isinstance(one, Trajectory) and one.turns is not None for one in state.buffer)
        for one in state.buffer:
            assert (
                len(one.action_ids) == sum(count for _, count in one.versions) if hasattr(one, "action_ids") else True
            )
        if state.rounds is not None:
            made = RoundPlanner(RoundRules(4, 2, epoch=12))
            fuzzing.survives(lambda: made.restore(state.rounds.get("planner")), ValueError)

    fuzzing.fuzz(examples, fuzzing.texts({"format": 1, **valid}), check)


def _seal(folder: Path) -> None:
    from orchestrator.checkpoint import _digest

    said = json.loads((folder / "files.json").read_bytes())
    files = said.get("files", said)
    file = folder / "state.json"
    files["state.json"] = [file.stat().st_size, _digest(file)]
    (folder / "files.json").write_text(json.dumps(said))


# -- configs ---------------------------------------------------------------------------------------------------------------


@EXAMPLES
def test_a_damaged_config_is_a_config_or_one_config_error(examples: int, tmp_path: Path) -> None:
    file, folder = tmp_path / "config.toml", tmp_path / "run"
    folder.mkdir()
    valid = (ROOT / "examples" / "frozenlake.toml").read_bytes()
    hostile = (b"a = " + b"[" * fuzzing.DEEP, b"[" * 5000, b"a." * 2000 + b"b = 1", b"x = " + b"9" * 10000,
               b"\xef\xbb\xbf", b"[run]\nsteps = 1e400", b"[run]\nsteps = nan", b'[run]\nname = "\\ud800"',
               b"[rollout]\nalpha = -1", b"run = 3", b"[[run]]", b"[run.name]", b"[a]\nb = 1")  # fmt: skip

    def check(drawn: tuple[str, bytes]) -> None:
        kind, data = drawn
        if kind == "toml":
            file.write_bytes(data)
            found = fuzzing.survives(lambda: load_config(file), ConfigError)
        elif kind == "override":
            text = data.decode("utf-8", "replace")
            tree: dict[str, Any] = {"run": {"steps": 3}}
            found = fuzzing.survives(lambda: (apply_override(tree, text), parse_config(tree))[1], ConfigError)
        else:
            (folder / "config.json").write_bytes(data)
            found = fuzzing.survives(lambda: RunFolder.open(folder).config(), ConfigError)
        if found is not None:  # what is kept with the run is this config
            assert parse_config(json.loads(to_json(found))) == found

    resolved = json.loads(to_json(load_config(ROOT / "examples" / "frozenlake.toml")))
    overrides = st.one_of(
        *(fuzzing.damaged(text) for text in (b"rollout.alpha=2", b"run.name='x'", b"resources.pools.H800=[0]")),
        st.sampled_from((b"a" + b".a" * 2000 + b"=1", b"run.steps=" + b"[" * fuzzing.DEEP, b"=", b".=1", b"run.=1")),
    )
    drawn = st.one_of(
        st.tuples(st.just("toml"), st.one_of(fuzzing.damaged(valid), st.sampled_from(hostile))),
        st.tuples(st.just("override"), overrides),
        st.tuples(st.just("json"), fuzzing.texts(resolved)),
    )
    fuzzing.fuzz(examples, drawn, check)


# -- profiles, predictors ------------------------------------------------------------------------------------------------------


def profile(path: Path) -> ProfileFile:
    layout = EngineLayout(2, 1)
    made = ProfileFile(path, ProfileKey("m", "e", "d"))
    for batch in (1, 4):
        made.add(ProfilePoint("prefill", layout, batch, 128, 0.5))
        made.add(ProfilePoint("decode", layout, batch, 128, 0.01, 0.1))
    made.shapes[layout] = EngineShape(layout, 1000.0, 5000, 10**9, 12.0)
    made.skipped["decode", layout, 64, 128] = "no room"
    made.seconds = 3.0
    made.save()
    return made


@EXAMPLES
def test_a_damaged_profile_is_a_profile_or_one_config_error(examples: int, tmp_path: Path) -> None:
    from vllm_rlplugin.kvpool.engine import step_costs

    file = tmp_path / "profile.json"
    profile(file)
    valid = json.loads(file.read_text())

    def check(data: bytes) -> None:
        file.write_bytes(data)
        found = fuzzing.survives(lambda: load_profile(file), ConfigError)
        if found is not None:
            for layout in found.profile.layouts:
                assert 0 <= found.profile.decode_seconds(2, 100, layout) < float("inf")
                assert 0 <= found.profile.prefill_seconds(100, 2, layout) < float("inf")
            for shape in found.shapes.values():
                numbers = (shape.kv_bytes_per_token, shape.kv_tokens, shape.weight_bytes, shape.start_seconds)
                assert all(0 <= number < float("inf") for number in numbers)
            assert 0 <= found.seconds < float("inf")
            assert all(isinstance(getattr(found.key, name), str) for name in ("model", "engine", "device"))
        fuzzing.survives(lambda: step_costs._read(file), ConfigError)

    fuzzing.fuzz(examples, fuzzing.texts(valid), check)


@EXAMPLES
def test_a_damaged_state_of_the_predictor_is_refused_and_it_stays_as_it_was(examples: int) -> None:
    from orchestrator.policies.prediction.length_predictor import ProgressivePredictor

    policy = ProgressivePredictor(100.0)
    whole = policy.dump()

    def check(data: bytes) -> None:
        other = ProgressivePredictor(100.0)
        fuzzing.survives(lambda: other.load(data) or True, ValueError)

    fuzzing.fuzz(examples, fuzzing.damaged(whole), check)


@EXAMPLES
def test_a_line_of_the_predictor_is_a_forecast_or_nonsense(examples: int) -> None:
    from orchestrator.placement.predictor_client import read_forecast

    valid = {"id": 3, "tokens": 5.0, "low": 1.0, "high": 9.0, "turns": 2.0, "total": 8.0, "kind": "x"}

    def check(data: bytes) -> None:
        found = fuzzing.survives(lambda: read_forecast(data), ValueError)
        if found is not None:
            for name, field in found[1].__dataclass_fields__.items():
                if field.type in ("float", "int"):
                    assert abs(getattr(found[1], name)) < float("inf")

    fuzzing.fuzz(examples, fuzzing.texts(valid), check)


# -- trajectories --------------------------------------------------------------------------------------------------------------


@EXAMPLES
def test_a_damaged_file_of_trajectories_is_refused_or_says_the_same(examples: int, tmp_path: Path) -> None:
    """Every page has a checksum; what is outside of pages (the footer) is compared in what it leads to."""
    from megatron_rlplugin.trainer import recorded_rows as of_trainer
    from orchestrator.runtime.recorded_batches import Recording
    from orchestrator.sim.recorded_traces import load_traces
    from orchestrator.store import TrajectoryStore, read_trajectories, to_trajectory

    store = TrajectoryStore(tmp_path / "run" / "trajectories")
    kept = [_trajectory(number) for number in range(4)]
    for number, trajectory in enumerate(kept):
        store.append(trajectory, 0, "trained", 0.5, position=number)
    store.close()
    (file,) = (tmp_path / "run").rglob("part-*.parquet")
    whole, folder = file.read_bytes(), tmp_path / "run"
    footer = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    traces = load_traces(folder, 10)
    samples = of_trainer._rows(file, 0)

    def trajectories() -> list[Any]:
        return [to_trajectory(row) for row in read_trajectories(folder / "trajectories").to_pylist()]

    def check(drawn: tuple[bool, bytes]) -> None:
        pages, data = drawn
        file.write_bytes(data)
        errors = (ConfigError, TypeError, KeyError, ValueError) if not pages else (ConfigError,)
        for read, same in (
            (trajectories, kept),
            (lambda: load_traces(folder, 10), traces),
            (lambda: of_trainer._rows(file, 0), samples),
        ):
            found = fuzzing.survives(read, *errors)
            assert not pages or found is None or found == same
        fuzzing.survives(lambda: list(Recording(folder).steps()), *errors)

    damaged_pages = fuzzing.damaged(whole[4:footer]).filter(lambda data: len(data) == footer - 4)
    drawn = st.one_of(
        st.tuples(st.just(True), damaged_pages.map(lambda data: whole[:4] + data + whole[footer:])),
        st.tuples(st.just(False), fuzzing.damaged(whole[footer:]).map(lambda data: whole[:footer] + data)),
        st.tuples(st.just(True), st.integers(0, len(whole) - 1).map(lambda at: whole[:at])),
    )
    fuzzing.fuzz(examples, drawn, check)


def _trajectory(number: int) -> Trajectory:
    turn = Turn((2, 3, number), (4, 5), (-0.5, -0.25), ((3, 1), (4, 1)), 0.5, True, 0.5, 0.25)
    prompt = Prompt(f"k{number}", "nim", number, "")
    return Trajectory(f"t{number}", "g1", "nim", prompt, (turn,), 1.0, "v", 3, False, (), 1.0, 2.0, 3.0)
