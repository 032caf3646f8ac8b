"""Whatever a file of a run holds: the same result, or the one documented error; never anything else, never silently less."""

from __future__ import annotations

import io
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from rich.console import Console

from orchestrator.api import ConfigError, Prompt, RunError, Trajectory, Turn
from orchestrator.checkpoint import FORMAT, Checkpoints, CheckpointState, verify
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
from tests.fuzz import inputs
from tests.fuzz.harness import Drawn, harness
from tests.support import view_runs

ROOT = Path(__file__).parents[2]


# -- the journal -----------------------------------------------------------------------------------------------------------


def valid_journal() -> list[str]:
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
    lines = valid_journal()
    whole = "\n".join(lines).encode() + b"\n"
    records = [json.loads(line) for line in lines]

    def joined(found: list[Any]) -> bytes | None:
        made = [inputs.as_json(record) for record in found]
        return None if None in made else b"\n".join(made)

    return st.one_of(
        inputs.damaged(whole),
        inputs.altered(records)
        .filter(lambda made: isinstance(made, list))
        .map(joined)
        .filter(lambda made: made is not None),
        st.lists(st.sampled_from([line.encode() for line in lines]), max_size=30).map(b"\n".join),
        st.sampled_from([b"\n".join((lines[0].encode(), text)) for text in inputs.hostile_json()]),
    )


@harness("orchestrator/ledger.py", "orchestrator/sim/run_audit.py", refuses="RunError")
def journal(folder: Path) -> Drawn:
    """A journal is restored with started = ended + in flight, or refused."""
    same = _restored(valid_journal())

    def check(data: bytes) -> None:
        lines = data.decode("utf-8", "replace").split("\n")
        found = inputs.survives(lambda: _restored(lines), RunError)
        if found is not None:  # both counts of one journal agree, whatever it says
            ends = sum(found[state] for state in END_STATES)
            assert found["started"] == ends + found["in_flight"]
        counted = inputs.survives(lambda: recount(lines), RunError)
        assert counted is None or counted["started"] >= 0
        said = inputs.survives(lambda: run_audit.account_epochs(lines, 2, left=[1]), RunError)
        assert said is None or isinstance(said.violations, list)

    yield journals(), check
    assert _restored(valid_journal()) == same


def check_missing_lines() -> None:
    """A line that is missing in the middle of a journal, or stands there twice, is noticed; half a one at its end is left out."""
    lines = valid_journal()
    for place in range(len(lines) - 1):
        with pytest.raises(RunError, match="journal"):
            _restored(lines[:place] + lines[place + 1 :])
        with pytest.raises(RunError, match="journal"):
            _restored([*lines[: place + 1], lines[place], *lines[place + 1 :]])
    cut = [*lines[:-1], lines[-1][: len(lines[-1]) // 2]]
    assert _restored(cut)["started"] == 6  # the last line was being written when the process was killed


# -- events and what is under way ---------------------------------------------------------------------------------------------


@harness(
    "orchestrator/observe/event_records.py",
    "orchestrator/observe/run_figures.py",
    "orchestrator/observe/view/live_sample.py",
    "orchestrator/observe/view/run_state.py",
    "orchestrator/observe/report/run_log.py",
    "orchestrator/observe/view/folder_follower.py",
    "orchestrator/events.py",
    refuses="left out, counted",
)
def events(folder: Path) -> Drawn:
    """Page, terminal, metrics and report are made of what is readable; one damaged line hides no other."""
    run: Path = view_runs.write_unfinished(folder / "run", steps=4)
    lines = (run / "events.jsonl").read_bytes().splitlines()
    live = json.loads((run / "live.json").read_text())
    console = Console(file=io.StringIO(), width=120)
    kinds: dict[str, Any] = {}
    for line in lines:
        kinds.setdefault(json.loads(line)["kind"], json.loads(line))

    def check(drawn: tuple[bytes, bytes]) -> None:
        event, under_way = drawn
        (run / "events.jsonl").write_bytes(b"\n".join((lines[0], event, *lines[1:], event)) + b"\n")
        (run / "live.json").write_bytes(under_way)
        with inputs.bounded():
            follower, state = Follower(run), Shown(run)
            for found in follower.events():
                state.take(found)
            if (record := follower.live()) is not None:
                state.figures.take_live(record)
            json.dumps(state.shown() | {"silent": 0}, allow_nan=False)
            console.print(screen(state.shown() | {"silent": 0}))
            exposition(state)
            log = load_run(run)
            assert log.steps, "one damaged line must not hide the others"
            read_events(run / "events.jsonl")

    drawn = st.tuples(
        st.one_of(*(inputs.texts(event).map(lambda data: data.replace(b"\n", b"")) for event in kinds.values())),
        inputs.texts(live),
    )
    yield drawn, check


@harness("orchestrator/observe/turn_lines.py", "orchestrator/observe/view/run_trace.py", refuses="left out")
def turns(folder: Path) -> Drawn:
    """A trace has the turns whose lines are sound, with finite times."""
    file = folder / "turns.jsonl"

    def check(data: bytes) -> None:
        good = b'["t1", 0, "vllm-0", 1.0, 2.0, 1.1, 1.9]'
        file.write_bytes(good + b"\n" + data.replace(b"\n", b"") + b"\n" + good.replace(b"t1", b"t2") + b"\n")
        with inputs.bounded():
            found = _measured(file, 0.0)
        assert {("t1", 0), ("t2", 0)} <= set(found)
        for (name, turn), (worker, *times) in found.items():
            assert (type(name), type(turn), type(worker)) == (str, int, str)
            assert all(abs(time) < float("inf") for time in times)

    yield inputs.texts(["t0", 3, "vllm-1", 1.0, 2.0, 1.25, 1.75]), check


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


@harness("orchestrator/checkpoint.py", refuses="skipped; RunError")
def checkpoint(folder: Path) -> Drawn:
    """The newest checkpoint that is found is one that was written, bit for bit."""
    checkpoints = Checkpoints(folder, keep=2)
    for step in (3, 4):
        partial = checkpoints.begin(step)
        (partial / "trainer" / "weights.bin").write_bytes(bytes(range(200)))
        checkpoints.commit(partial, CheckpointState(**{**vars(state_of(planner())), "step": step}))
    newest = folder / "step-000004"
    kept = {str(file.relative_to(newest)): file.read_bytes() for file in newest.rglob("*") if file.is_file()}

    def check(drawn: tuple[str, bytes]) -> None:
        file, data = drawn
        for name, whole in kept.items():
            (newest / name).write_bytes(data if name == file else whole)
        try:
            with inputs.bounded():
                found = checkpoints.newest()
        except RunError as error:
            if f"this version reads {FORMAT}" not in str(error):  # a digit made it a newer one: nothing is gone back on
                raise
            return
        assert found is not None
        where, state, _ = found
        assert (where.name, state.step) in (("step-000004", 4), ("step-000003", 3))
        if where == newest:  # then it holds what it held
            assert verify(where) == ""
            assert state == CheckpointState(**{**vars(state_of(planner())), "step": 4})

    damaged = (st.tuples(st.just(file), inputs.damaged(whole)) for file, whole in kept.items())
    listed = st.tuples(st.just("files.json"), inputs.texts(json.loads(kept["files.json"])))
    yield st.one_of(*damaged, listed), check


@harness(
    "orchestrator/checkpoint.py", "orchestrator/policies/batching/round_planner.py", refuses="RunError, ValueError"
)
def checkpoint_state(folder: Path) -> Drawn:
    """A state with digests that fit has the types of a state, or is refused."""
    checkpoints = Checkpoints(folder, keep=2)
    valid = json.loads(json.dumps(asdict(state_of(planner()))))

    def check(data: bytes) -> None:
        partial = checkpoints.begin(4)
        final = checkpoints.commit(partial, state_of(planner()))
        (final / "state.json").write_bytes(data)
        _seal(final)
        found = inputs.survives(checkpoints.newest, RunError)
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
            inputs.survives(lambda: made.restore(state.rounds.get("planner")), ValueError)

    yield inputs.texts({"format": 1, **valid}), check


def _seal(folder: Path) -> None:
    from orchestrator.checkpoint import _digest

    said = json.loads((folder / "files.json").read_bytes())
    files = said.get("files", said)
    file = folder / "state.json"
    files["state.json"] = [file.stat().st_size, _digest(file)]
    (folder / "files.json").write_text(json.dumps(said))


# -- configs ---------------------------------------------------------------------------------------------------------------


@harness("orchestrator/config/run_config.py", "orchestrator/run_folder.py", refuses="ConfigError")
def config(folder: Path) -> Drawn:
    """TOML, overrides and the kept JSON give a config that is kept and read back the same, or one error."""
    file, run = folder / "config.toml", folder / "run"
    run.mkdir()
    valid = (ROOT / "examples" / "frozenlake.toml").read_bytes()
    hostile = (b"a = " + b"[" * inputs.DEEP, b"[" * 5000, b"a." * 2000 + b"b = 1", b"x = " + b"9" * 10000,
               b"\xef\xbb\xbf", b"[run]\nsteps = 1e400", b"[run]\nsteps = nan", b'[run]\nname = "\\ud800"',
               b"[rollout]\nalpha = -1", b"run = 3", b"[[run]]", b"[run.name]", b"[a]\nb = 1")  # fmt: skip

    def check(drawn: tuple[str, bytes]) -> None:
        kind, data = drawn
        if kind == "toml":
            file.write_bytes(data)
            found = inputs.survives(lambda: load_config(file), ConfigError)
        elif kind == "override":
            text = data.decode("utf-8", "replace")
            tree: dict[str, Any] = {"run": {"steps": 3}}
            found = inputs.survives(lambda: (apply_override(tree, text), parse_config(tree))[1], ConfigError)
        else:
            (run / "config.json").write_bytes(data)
            found = inputs.survives(lambda: RunFolder.open(run).config(), ConfigError)
        if found is not None:  # what is kept with the run is this config
            assert parse_config(json.loads(to_json(found))) == found

    resolved = json.loads(to_json(load_config(ROOT / "examples" / "frozenlake.toml")))
    overrides = st.one_of(
        *(inputs.damaged(text) for text in (b"rollout.alpha=2", b"run.name='x'", b"resources.pools.H800=[0]")),
        st.sampled_from((b"a" + b".a" * 2000 + b"=1", b"run.steps=" + b"[" * inputs.DEEP, b"=", b".=1", b"run.=1")),
    )
    drawn = st.one_of(
        st.tuples(st.just("toml"), st.one_of(inputs.damaged(valid), st.sampled_from(hostile))),
        st.tuples(st.just("override"), overrides),
        st.tuples(st.just("json"), inputs.texts(resolved)),
    )
    yield drawn, check


# -- profiles, predictors ------------------------------------------------------------------------------------------------------


def valid_profile(path: Path) -> ProfileFile:
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


@harness("orchestrator/profiler/profile_file.py", "vllm_rlplugin/kvpool/engine/step_costs.py", refuses="ConfigError")
def profile(folder: Path) -> Drawn:
    """A profile has finite costs of at least 0 at every point, or is refused."""
    from vllm_rlplugin.kvpool.engine import step_costs

    file = folder / "profile.json"
    valid_profile(file)
    valid = json.loads(file.read_text())

    def check(data: bytes) -> None:
        file.write_bytes(data)
        found = inputs.survives(lambda: load_profile(file), ConfigError)
        if found is not None:
            for layout in found.profile.layouts:
                assert 0 <= found.profile.decode_seconds(2, 100, layout) < float("inf")
                assert 0 <= found.profile.prefill_seconds(100, 2, layout) < float("inf")
            for shape in found.shapes.values():
                numbers = (shape.kv_bytes_per_token, shape.kv_tokens, shape.weight_bytes, shape.start_seconds)
                assert all(0 <= number < float("inf") for number in numbers)
            assert 0 <= found.seconds < float("inf")
            assert all(isinstance(getattr(found.key, name), str) for name in ("model", "engine", "device"))
        inputs.survives(lambda: step_costs._read(file), ConfigError)

    yield inputs.texts(valid), check


@harness("orchestrator/policies/prediction/length_predictor.py", refuses="ValueError")
def predictor_state(folder: Path) -> Drawn:
    """A predictor's state is loaded whole, or refused."""
    from orchestrator.policies.prediction.length_predictor import ProgressivePredictor

    policy = ProgressivePredictor(100.0)
    whole = policy.dump()

    def check(data: bytes) -> None:
        other = ProgressivePredictor(100.0)
        inputs.survives(lambda: other.load(data) or True, ValueError)

    yield inputs.damaged(whole), check


@harness("orchestrator/placement/predictor_client.py", refuses="ValueError")
def predictor_line(folder: Path) -> Drawn:
    """A line of the predictor's process is a forecast of finite numbers, or refused."""
    from orchestrator.placement.predictor_client import read_forecast

    valid = {"id": 3, "tokens": 5.0, "low": 1.0, "high": 9.0, "turns": 2.0, "total": 8.0, "kind": "x"}

    def check(data: bytes) -> None:
        found = inputs.survives(lambda: read_forecast(data), ValueError)
        if found is not None:
            for name, field in found[1].__dataclass_fields__.items():
                if field.type in ("float", "int"):
                    assert abs(getattr(found[1], name)) < float("inf")

    yield inputs.texts(valid), check


# -- trajectories --------------------------------------------------------------------------------------------------------------


@harness(
    "orchestrator/store.py",
    "orchestrator/sim/recorded_traces.py",
    "megatron_rlplugin/trainer/recorded_rows.py",
    refuses="ConfigError",
)
def trajectories(folder: Path) -> Drawn:
    """Damaged pages of a Parquet file are noticed; what is read from it says the same."""
    from megatron_rlplugin.trainer import recorded_rows as of_trainer
    from orchestrator.runtime.recorded_batches import Recording
    from orchestrator.sim.recorded_traces import load_traces
    from orchestrator.store import TrajectoryStore, read_trajectories, to_trajectory

    store = TrajectoryStore(folder / "run" / "trajectories")
    kept = [_trajectory(number) for number in range(4)]
    for number, trajectory in enumerate(kept):
        store.append(trajectory, 0, "trained", position=number)
    store.close()
    (file,) = (folder / "run").rglob("part-*.parquet")
    whole, run = file.read_bytes(), folder / "run"
    footer = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    traces = load_traces(run, 10)
    samples = of_trainer._rows(file, 0)

    def trajectories() -> list[Any]:
        return [to_trajectory(row) for row in read_trajectories(run / "trajectories").to_pylist()]

    def check(drawn: tuple[bool, bytes]) -> None:
        pages, data = drawn
        file.write_bytes(data)
        errors = (ConfigError, TypeError, KeyError, ValueError) if not pages else (ConfigError,)
        for read, same in (
            (trajectories, kept),
            (lambda: load_traces(run, 10), traces),
            (lambda: of_trainer._rows(file, 0), samples),
        ):
            found = inputs.survives(read, *errors)
            assert not pages or found is None or found == same
        inputs.survives(lambda: list(Recording(run).steps()), *errors)

    damaged_pages = inputs.damaged(whole[4:footer]).filter(lambda data: len(data) == footer - 4)
    drawn = st.one_of(
        st.tuples(st.just(True), damaged_pages.map(lambda data: whole[:4] + data + whole[footer:])),
        st.tuples(st.just(False), inputs.damaged(whole[footer:]).map(lambda data: whole[:footer] + data)),
        st.tuples(st.just(True), st.integers(0, len(whole) - 1).map(lambda at: whole[:at])),
    )
    yield drawn, check


def _trajectory(number: int) -> Trajectory:
    turn = Turn((2, 3, number), (4, 5), (-0.5, -0.25), ((3, 1), (4, 1)), 0.5, True, 0.5, 0.25)
    prompt = Prompt(f"k{number}", "nim", number, "")
    return Trajectory(f"t{number}", "g1", "nim", prompt, (turn,), 1.0, "v", 3, False, (), 1.0, 2.0, 3.0)


@harness("orchestrator/sim/trace_files.py", refuses="ConfigError")
def trace_file(folder: Path) -> Drawn:
    """A damaged trace gives turns of at least one token with finite times, or one error."""
    from orchestrator.sim.trace_files import DrawnTimes, read_arrivals, read_lengths, read_tools

    columns = "arrival_seconds,trajectory,group,task,prompt_tokens,response_tokens,seconds,reward"
    rows = [f"{at}.5,t{at // 2},g{at // 4},maths,{20 * (1 + at % 2)},{3 + at},0.25,1" for at in range(8)]
    names = columns.split(",")
    objects = [json.dumps(dict(zip(names, map(_number, row.split(",")), strict=True))) for row in rows]
    times = DrawnTimes(1, 1.0, 0.5)

    def check(drawn: tuple[str, bytes]) -> None:
        ending, data = drawn
        file = folder / f"trace{ending}"
        file.write_bytes(data)
        lengths = inputs.survives(lambda: read_lengths(file, 100, 2, times), ConfigError)
        if lengths is not None:
            turns = [turn for one in lengths.episodes for turn in one.turns]
            assert all(turn.observation >= 1 and turn.response >= 1 for turn in turns)
            assert all(0 <= turn.environment_seconds < float("inf") for turn in turns)
            assert sorted(number for group in lengths.groups for number in group) == list(range(len(lengths.episodes)))
        arrivals = inputs.survives(lambda: read_arrivals(file), ConfigError)
        if arrivals is not None:
            assert [row[0] for row in arrivals] == sorted(row[0] for row in arrivals)
        tools = inputs.survives(lambda: read_tools(file), ConfigError)
        if tools is not None:
            assert 0 <= tools.draw("maths", 1) < float("inf")

    whole = {".csv": "\n".join([columns, *rows]) + "\n", ".jsonl": "\n".join(objects) + "\n"}
    kinds = [st.tuples(st.just(ending), inputs.damaged(text.encode())) for ending, text in whole.items()]
    yield st.one_of(kinds), check


def _number(word: str) -> float | str:
    try:
        return float(word)
    except ValueError:
        return word
