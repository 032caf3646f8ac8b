"""What a view shows of a run: the same however it was read, bounded however long the run is, and no trajectory in a label."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from orchestrator.events import EventLog, MemorySink, read_events
from orchestrator.observe.run_figures import INCIDENTS, POINTS, STAGES, Curve
from orchestrator.observe.view import run_metrics
from orchestrator.observe.view.folder_follower import Follower
from orchestrator.observe.view.live_sample import Sampler, read_record
from orchestrator.observe.view.run_state import RunState
from orchestrator.observe.view.top import screen
from tests.support import view_runs as runs

ROOT = Path(__file__).parents[2]
METRIC = re.compile(r"rl_coserve:\w+")
LIVE: dict[str, Any] = runs.LIVE


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    folder: Path = runs.write_run(tmp_path / "frozenlake-001", steps=40)
    return folder


def folded(folder: Path) -> RunState:
    state, follower = RunState(folder), Follower(folder)
    while follower.behind:
        for event in follower.events():
            state.take(event)
    return state


def test_a_run_that_is_followed_looks_at_its_end_as_one_that_is_read_at_once(finished: Path, tmp_path: Path) -> None:
    text = (finished / "events.jsonl").read_bytes()
    growing = tmp_path / "growing"
    growing.mkdir()
    state, follower = RunState(growing), Follower(growing)
    assert list(follower.events()) == []  # there is nothing yet
    for begin in range(0, len(text), 777):  # lines are cut anywhere
        with (growing / "events.jsonl").open("ab") as stream:
            stream.write(text[begin : begin + 777])
        for event in follower.events():
            state.take(event)
    at_once = folded(finished).shown()
    assert state.shown() == at_once
    assert at_once["step"] == 40
    assert at_once["run"]["status"] == "completed"
    assert sum(at_once["ledger"].values()) == 2 * at_once["ledger"]["started"]  # it closes


def test_the_picture_of_a_long_run_with_many_trajectories_is_small(tmp_path: Path) -> None:
    state = RunState(tmp_path)
    state.take({"kind": "run_start", "t": 0, "mode": "async", "alpha": 1, "steps": 9, "name": "x", "simulated": False})
    for number in range(20_000):
        state.take(
            {"kind": "stage", "t": number, "stage": "train_step", "step": number, "start": number, "end": number + 1}
        )
        state.take({"kind": "fault", "t": number, "what": "w" * 500, "cause": f"cause {number}", "detail": "d" * 9000})
        if number % 4 == 0:
            state.take({**STEP, "t": number, "step": number})
    state.figures.take_live(LIVE)
    picture = json.dumps(state.shown(), allow_nan=False)
    assert len(picture) < 120_000
    shown = state.shown()
    assert len(shown["curves"][0]["points"]) <= POINTS + 1
    assert shown["curves"][0]["points"][-1][0] == 19_997
    assert len(shown["incidents"]) == INCIDENTS
    assert sum(map(len, shown["timeline"]["lanes"].values())) <= 3 * STAGES
    assert len(state.figures.incidents_total) <= 51


def test_of_a_large_fleet_those_that_are_down_are_counted_and_shown_first(tmp_path: Path) -> None:
    def worker(number: int) -> SimpleNamespace:
        facts = {"alive": number < 100, "removed": False, "lent": False, "loading": False, "parked": False}
        return SimpleNamespace(worker=SimpleNamespace(name=f"vllm-{number:03d}"), version=3, sent={}, **facts)

    proxy = SimpleNamespace(states=[worker(number) for number in range(200)], tokens=0, version=3)
    rollout = SimpleNamespace(proxy=proxy, episodes={}, in_flight=0, buffer=SimpleNamespace(scored=0))
    ledger = SimpleNamespace(counts=SimpleNamespace(as_dict=dict))
    sampler = Sampler(tmp_path, EventLog(MemorySink(), lambda: 1.0), print)
    sampler.pipeline = SimpleNamespace(rollout=rollout, waiting_for="", parts=SimpleNamespace(ledger=ledger))  # type: ignore[assignment]
    state = RunState(tmp_path)
    state.take({"kind": "run_start", "t": 0, "mode": "async", "alpha": 1, "steps": 9, "name": "x", "simulated": False})
    for number in range(200):  # as at the last weight update, when all were there
        row = {"running": 1, "waiting": 0, "kv_used": 1, "kv_capacity": 9, "preemptions": 0, "tokens_per_s": 5.0}
        state.take({"kind": "worker", "t": 0.5, "name": f"vllm-{number:03d}", "version": 3, **row})
    state.figures.take_live(read_record(json.dumps(sampler.record()).encode()))
    shown = state.shown()
    assert (shown["workers_up"], shown["workers_known"]) == (100, 200)
    assert [row["state"] for row in shown["workers"][:101]] == ["coming back"] * 100 + ["up"]
    assert len(shown["workers"]) == 128
    up = re.findall(r"run_worker_up\{worker=\S+ (\S+)", run_metrics.exposition(state).decode())
    assert (len(up), up.count("0.0")) == (200, 100)
    console = Console(width=120, force_terminal=False, color_system=None)
    with console.capture() as capture:
        console.print(screen(shown))
    assert re.search(r"and 192 more\s+100 of 200 workers are up", capture.get())


STEP: dict[str, Any] = {
    "kind": "step", "version": 1, "trained": 8, "tokens": 80, "reward_mean": float("nan"), "success": 0.5,
    "lag": {"0": 4, "1": 4}, "lag_trained": {"0": 8}, "versions_mixed": 0, "seconds": 1.0,
    "metrics": {"loss": float("nan"), "ess": 1.0}, "ledger": {"started": 8, "trained": 8},
}  # fmt: skip


def test_not_a_number_is_shown_as_nothing(tmp_path: Path) -> None:
    state = RunState(tmp_path)
    state.take({**STEP, "t": 1.0, "step": 0})
    assert json.loads(json.dumps(state.shown(), allow_nan=False))["curves"][0]["points"] == [[1, None]]


def test_a_curve_keeps_its_ends_and_forgets_what_was_rolled_back() -> None:
    curve = Curve()
    for step in range(5000):
        curve.add(step, step / 5000)
    shown = curve.shown()
    assert shown[0] == [0, 0.0]
    assert shown[-1] == [4999, 0.9998]
    assert len(curve._points) <= 2 * POINTS  # of a run that lasts for months, too
    assert len(shown) <= POINTS + 1
    curve.add(100, 0.5)
    assert curve.shown()[-1] == [100, 0.5]
    assert all(point[0] is not None and point[0] <= 100 for point in curve.shown())


def test_a_resume_takes_the_run_back_to_its_checkpoint(finished: Path) -> None:
    state = folded(finished)
    state.take(
        {"kind": "run_start", "t": 500.0, "mode": "async", "alpha": 1, "steps": 40, "name": "frozenlake-001",
         "simulated": False, "resumed_from": 30}
    )  # fmt: skip
    shown = state.shown()
    assert shown["run"]["status"] == "unfinished"
    assert shown["run"]["resumed_from"] == 30
    assert shown["step"] == 30


def test_stages_under_way_are_on_the_timeline(finished: Path) -> None:
    state = folded(finished)
    state.figures.status = "unfinished"
    state.figures.take_live(
        {**LIVE, "t": state.figures.seconds + 5.0, "stages": [["train_step", 40, state.figures.seconds + 1.0]]}
    )
    trainer = state.shown()["timeline"]["lanes"]["trainer"]
    assert trainer[-1][0] == "train"
    assert trainer[-1][3] == "under way"


def test_the_event_log_knows_which_stages_are_open_and_tells_listeners() -> None:
    heard: list[str] = []
    log = EventLog(MemorySink(), lambda: 7.0)
    log.listen(lambda event: heard.append(event["kind"]))
    with log.stage("get_batch", 3), log.stage("feed", 3):
        assert log.open_stages() == [("get_batch", 3, 0.0), ("feed", 3, 0.0)]
    assert log.open_stages() == []
    assert heard == ["stage", "stage"]


# -- metrics -----------------------------------------------------------------------------------------------------------


def scrape(state: RunState) -> dict[str, list[Any]]:
    """Samples by name, read by Prometheus' own parser."""
    found: dict[str, list[Any]] = {}
    for family in text_string_to_metric_families(run_metrics.exposition(state).decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


def test_the_metrics_say_what_the_log_says(finished: Path) -> None:
    state = folded(finished)
    state.figures.status = "unfinished"
    state.figures.take_live(LIVE)
    found = scrape(state)
    steps = [json.loads(line) for line in (finished / "events.jsonl").read_text().splitlines() if '"step"' in line]
    made = [event for event in steps if event["kind"] == "step"]

    def value(name: str, **labels: str) -> float:
        return float(next(s.value for s in found[f"rl_coserve:run_{name}"] if s.labels == labels))

    assert value("steps_total") == 40
    assert value("trained_tokens_total") == sum(event["tokens"] for event in made)
    assert value("lag_bucket", le="0") == sum(event["lag"].get("0", 0) for event in made)
    assert value("lag_bucket", le="+Inf") == value("lag_count") == sum(sum(event["lag"].values()) for event in made)
    assert value("waiting", reason="environment step") == LIVE["reasons"]["environment step"]
    assert value("worker_kv_used_ratio", worker="vllm-0") == pytest.approx(0.25)
    assert value("weight_update_seconds_count") > 0
    assert value("worker_slo_slack_seconds", worker="served-0", slo="tpot") == -0.0312
    assert value("worker_slo_late_tokens_total", worker="served-0", slo="ttft") == 3
    assert value("worker_lent_pages", worker="served-0") == 37
    assert value("trajectories", end="failed") == LIVE["ledger"]["failed"]


def test_no_metric_has_a_label_with_a_trajectory_in_it(finished: Path) -> None:
    state = folded(finished)
    state.figures.status = "unfinished"
    state.figures.take_live(LIVE)
    samples = [sample for group in scrape(state).values() for sample in group]
    assert not [sample for sample in samples if any(re.search(r"\bt\d{4,}", text) for text in sample.labels.values())]
    assert len(samples) < 300


def test_every_metric_that_the_dashboard_asks_for_is_in_a_scrape(finished: Path) -> None:
    state = folded(finished)
    state.figures.status = "unfinished"
    state.figures.take_live(LIVE)
    found = scrape(state)
    dashboard = (ROOT / "examples" / "grafana" / "rl-coserve.json").read_text()
    panels = json.loads(dashboard)["panels"]
    asked = {name for panel in panels for target in panel["targets"] for name in METRIC.findall(target["expr"])}
    assert len(asked) > 20
    assert asked - set(found) == set()
    labels = {
        label
        for panel in panels
        for target in panel["targets"]
        for label in re.findall(r"{{(\w+)}}", target["legendFormat"])
    }
    assert labels <= {name for _, names, _ in run_metrics.TABLE.values() for name in names}
    assert METRIC.findall(json.loads(dashboard)["templating"]["list"][0]["query"]["query"])[0] in found


def test_the_dashboard_shows_runs_whose_steps_take_half_an_hour_and_the_first_fault_of_a_kind() -> None:
    """What moves once a step is empty over five minutes; `increase` does not count what a new series begins with."""
    panels = json.loads((ROOT / "examples" / "grafana" / "rl-coserve.json").read_text())["panels"]
    asked = [target["expr"] for panel in panels for target in panel["targets"]]
    windows = {window for expression in asked for window in re.findall(r"rate\([^\[]*\[(\w+)\]", expression)}
    assert windows == {"1h"}
    assert not [expression for expression in asked if "increase(" in expression]


def test_the_limits_of_the_lags_are_the_same_however_large_they_become(finished: Path) -> None:
    """In `areal` nothing bounds them; and a limit that appears while a run is followed has no rate."""
    state = folded(finished)
    before = {sample.labels["le"] for sample in scrape(state)["rl_coserve:run_lag_bucket"]}
    step = next(event for event in read_events(finished / "events.jsonl") if event["kind"] == "step")
    for number in range(300):
        state.take({**step, "step": 40 + number, "lag": {str(number): 1}})
    buckets = {
        sample.labels["le"]: sample.value - old.value
        for sample, old in zip(
            scrape(state)["rl_coserve:run_lag_bucket"],
            scrape(folded(finished))["rl_coserve:run_lag_bucket"],
            strict=True,
        )
    }
    assert set(buckets) == before
    assert (buckets["0"], buckets["6"], buckets["128"], buckets["+Inf"]) == (1, 7, 129, 300)


def test_what_to_page_on_asks_for_metrics_labels_and_alarms_that_there_are(finished: Path) -> None:
    state = folded(finished)
    state.figures.status = "unfinished"
    state.figures.take_live(LIVE)
    found = scrape(state)
    rules = yaml.safe_load((ROOT / "deploy" / "prometheus" / "rules.yaml").read_text())["groups"][0]["rules"]
    assert len({rule["alert"] for rule in rules}) == len(rules) >= 10
    code = "".join(path.read_text() for path in (ROOT / "orchestrator").rglob("*.py"))
    for rule in rules:
        assert set(METRIC.findall(rule["expr"])) <= set(found), rule["alert"]
        for name, given in re.findall(r"rl_coserve:run_(\w+){([^}]*)}", rule["expr"]):
            for label, values in re.findall(r'(\w+)=~?"([^"]*)"', given):
                shown = {sample.labels[label] for sample in found[f"rl_coserve:run_{name}"]}
                assert set(values.split("|")) <= shown, (
                    rule["alert"],
                    "also before the first, or its increase is none",
                )
    for what in run_metrics.ALARMS:
        assert f'emit("alarm", what="{what}"' in code or f'Alarm("{what}"' in code, what


def test_a_run_that_says_nothing_is_told_from_one_that_runs(finished: Path) -> None:
    """`rl-coserve view` outlives a run that was killed with its machine: it never said that it ended."""
    state = folded(finished)
    state.figures.status = "unfinished"
    values = {
        sample.name: sample.value
        for family in text_string_to_metric_families(run_metrics.exposition(state, silent=75).decode())
        for sample in family.samples
        if not sample.labels
    }
    assert (values["rl_coserve:run_up"], values["rl_coserve:run_silent_seconds"]) == (1.0, 75.0)


def test_the_page_of_the_documentation_has_every_metric_and_no_other(finished: Path) -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (.*?) \| (.*?) \|$", (ROOT / "docs" / "seeing.md").read_text(), re.M)
    said = {
        name.removesuffix("_total"): (kind, tuple(re.findall(r"`(\w+)`", labels)), text)
        for name, kind, labels, text in rows
    }
    assert said == run_metrics.TABLE
    state = folded(finished)
    state.figures.status = "unfinished"
    state.figures.take_live(LIVE)
    families = {family.name for family in text_string_to_metric_families(run_metrics.exposition(state).decode())}
    assert families == {run_metrics.PREFIX + name for name in run_metrics.TABLE}


def test_a_foreign_text_with_half_of_a_surrogate_pair_hides_no_event(tmp_path: Path) -> None:
    with (tmp_path / "events.jsonl").open("w") as stream:
        log = EventLog(stream, lambda: 0.0)
        log.emit("fault", what="run", detail="cut \ud83d, whole \U0001f600")
        log.emit("run_end", status="failed", reason="no file \udcff")
    fault, end = read_events(tmp_path / "events.jsonl")
    assert (fault["detail"], end["status"]) == ("cut ?, whole \U0001f600", "failed")
