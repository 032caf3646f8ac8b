"""Curves for others: TensorBoard's files as TensorBoard reads them, W&B offline, a collector; none of them can hurt a run."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from orchestrator.api import ConfigError
from orchestrator.config import parse_config
from orchestrator.config.view_keys import LoggingSection
from orchestrator.events import EventLog, MemorySink
from orchestrator.observe import run_view
from orchestrator.observe.view import exporters
from orchestrator.observe.view.exporter_queue import Beside, Event
from orchestrator.observe.view.scalars import KINDS, scalars
from orchestrator.observe.view.tensorboard import TensorBoard
from orchestrator.run_folder import RunFolder
from tests.support import view_runs as runs

DATE = "2026-11-21T21:06:18+00:00"


@pytest.fixture
def events(tmp_path: Path) -> list[dict[str, Any]]:
    folder = runs.write_run(tmp_path / "run-001", steps=6)
    found = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    for event in found:
        if event["kind"] == "run_start":
            event["started"] = DATE
    return found


# -- TensorBoard -----------------------------------------------------------------------------------------------------------


def test_curves_are_written_as_the_log_has_them(tmp_path: Path, events: list[dict[str, Any]]) -> None:
    board = TensorBoard(tmp_path, pytest.fail)
    for event in events:
        board.take(event)
    reader = EventAccumulator(str(tmp_path / "tensorboard"))
    reader.Reload()  # before it is closed: what was taken is in the file
    board.close()
    steps = events_of("step", events)
    points = reader.Scalars("train/reward")
    assert {point.step: point.value for point in points} == pytest.approx(
        {event["step"] + 1: event["reward_mean"] for event in steps}
    )
    assert [point.step for point in reader.Scalars("eval/success")] == [0, 6]
    assert {
        "train/entropy",
        "batch/lag_mean",
        "weights/seconds",
        "worker/vllm-0/kv_used_ratio",
        "ledger/trained",
    } <= set(reader.Tags()["scalars"])
    began = datetime.fromisoformat(DATE).timestamp() - events[0]["t"]  # the run's date, not the machine's
    assert [point.wall_time for point in points] == pytest.approx([began + event["t"] for event in steps], abs=1e-3)


def test_what_a_resume_took_back_is_forgotten(tmp_path: Path, events: list[dict[str, Any]]) -> None:
    for life in (events, [{**events[0], "resumed_from": 3}, *(event for event in events if event.get("step") == 3)]):
        board = TensorBoard(tmp_path, pytest.fail)
        for event in life:
            board.take(event)
        board.close()
    reader = EventAccumulator(str(tmp_path / "tensorboard"))
    reader.Reload()
    assert [item.step for item in reader.Scalars("train/reward")] == [1, 2, 3, 4]


def test_without_the_package_a_run_says_so_once_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_view, "is_installed", lambda module: False)
    said: list[str] = []

    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            folder = RunFolder.create(parse_config({"run": {"folder": str(tmp_path / "run")}}))
            await run_view.show_run(parse_config({}), folder, EventLog(MemorySink(), lambda: 1.0), said.append, stack)

    asyncio.run(scenario())
    assert len(said) == 1
    assert "rl-coserve[tensorboard]" in said[0]


def events_of(kind: str, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["kind"] == kind]


def test_a_run_writes_them_while_it_logs_and_a_full_disk_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    log = EventLog(MemorySink(), lambda: 1.0)
    board = TensorBoard(tmp_path, said.append)
    log.listen(board.take)
    log.emit("run_start", started=DATE, resumed_from=None)
    log.emit("evaluation", step=1, success=0.5, low=0.4, high=0.6)

    def full(writer: Any, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tensorboard.summary.writer.record_writer.RecordWriter.write", full)
    for step in range(3):
        log.emit("evaluation", step=step, success=0.5, low=0.4, high=0.6)
    assert len(said) == 1
    assert "No space left" in said[0]


def test_no_curve_is_named_after_a_trajectory_and_none_is_not_finite(events: list[dict[str, Any]]) -> None:
    names = {name for event in events for name in scalars(event)[1]}
    assert 20 < len(names) < 60
    event = {**events_of("step", events)[0], "reward_mean": float("nan"), "metrics": {"loss": float("inf")}}
    assert not {"train/reward", "train/loss"} & set(scalars(event)[1])


def test_what_an_evaluation_gives_to_draw() -> None:
    older = {"kind": "evaluation", "step": 3, "success": 0.5, "low": 0.4, "high": 0.6}
    assert scalars(older) == (3, {"eval/success": 0.5, "eval/low": 0.4, "eval/high": 0.6})
    event = older | {"solved": 0.75, "reward": None, "tokens": 9.5, "truncated": 0.0, "tasks": {"nim": 0.25}}
    more = {"eval/solved": 0.75, "eval/tokens": 9.5, "eval/truncated": 0.0, "eval/nim/success": 0.25}
    assert scalars(event) == (3, scalars(older)[1] | more)


# -- behind the queue --------------------------------------------------------------------------------------------------


class Sent:
    """An exporter that keeps what it gets, after ``before`` was called."""

    name = "test"
    kinds = KINDS

    def __init__(self, before: Callable[[], object] = lambda: None) -> None:
        self.before = before
        self.events: list[Event] = []
        self.closed = False

    def take(self, event: Event) -> None:
        self.before()
        self.events.append(event)

    def close(self) -> None:
        self.closed = True


def step(number: int) -> Mapping[str, Any]:
    return {"kind": "step", "step": number}


def test_everything_that_an_exporter_wants_reaches_it_before_the_end() -> None:
    said: list[str] = []
    sent = Sent()
    beside = Beside("test", KINDS, lambda: sent, said.append)
    for number in range(500):
        beside.take(step(number))
        beside.take({"kind": "stage"})
    beside.close()
    assert sent.events == [step(number) for number in range(500)]
    assert sent.closed
    assert said == []


def test_an_exporter_that_hangs_holds_nobody_up_and_is_said_once() -> None:
    said: list[str] = []
    release = threading.Event()
    beside = Beside("test", KINDS, lambda: Sent(release.wait), said.append, limit=50)
    begun = time.monotonic()
    for number in range(100_000):
        beside.take(step(number))
    beside.close(0.2)
    assert time.monotonic() - begun < 30  # each of these would have waited for ever
    assert said == ["test does not keep up; some of its events are left out"]
    release.set()


@pytest.mark.parametrize("where", ["start", "take"])
def test_an_exporter_that_fails_is_said_once_and_asked_no_more(where: str) -> None:
    said: list[str] = []

    def fail() -> Any:
        raise ValueError("no such project\nand a long story")

    beside = Beside("test", KINDS, fail if where == "start" else lambda: Sent(fail), said.append)
    for number in range(100):
        beside.take(step(number))
        time.sleep(0.001)
    beside.close(5)
    assert said == ["test failed (ValueError: no such project); the run continues without it"]


def test_nothing_of_this_machine_is_given_to_others() -> None:
    places = {"run": {"folder": "/secret/place"}, "rollout": {"served_token_file": "/secret/file"}}
    assert "secret" not in json.dumps(exporters.config_to_share(parse_config(places)))
    shared = exporters.config_to_share(
        parse_config({"model": {"path": "/data/secret/model"}, "trainer": {"loss": "token-mean"}})
    )
    assert "secret" not in json.dumps(shared)
    assert (shared["trainer"]["loss"], "rollout" in shared) == ("token-mean", True)


def test_an_endpoint_with_a_password_in_it_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"logging\.otlp\.endpoint"):
        parse_config({"logging": {"otlp": {"endpoint": "https://user:password@collector:4318"}}})


# -- the real libraries ------------------------------------------------------------------------------------------------


@contextmanager
def collector() -> Iterator[tuple[str, dict[str, list[bytes]]]]:
    """(URL, what it got by path): speaks as much HTTP as a collector has to."""
    got: dict[str, list[bytes]] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.setdefault(self.path, []).append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", got
    finally:
        server.shutdown()


def test_a_collector_gets_stages_as_spans_and_curves_as_gauges(tmp_path: Path, events: list[dict[str, Any]]) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the OTLP exporter is not installed")
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    said: list[str] = []
    with collector() as (url, got):
        settings = LoggingSection.model_validate({"otlp": {"endpoint": url}})
        [beside] = exporters.start_exporters(settings, tmp_path / "run-001", {}, said.append)
        for event in events:
            beside.take(event)
        beside.close(60)
    assert said == []
    spans = [
        span
        for body in got["/v1/traces"]
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    stages = events_of("stage", events)
    assert sum(span.name in {stage["stage"] for stage in stages} for span in spans) == len(stages)
    first = next(span for span in spans if span.name == "train_step")
    stage = next(stage for stage in stages if stage["stage"] == "train_step")
    assert (first.end_time_unix_nano - first.start_time_unix_nano) / 1e9 == pytest.approx(
        stage["end"] - stage["start"], abs=1e-5
    )
    gauges = {
        metric.name: metric.gauge.data_points[0].as_double
        for body in got["/v1/metrics"]
        for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }
    assert gauges["rl_coserve.train.reward"] == pytest.approx(events_of("step", events)[-1]["reward_mean"])


@pytest.mark.long
def test_a_collector_that_is_away_is_said_once(tmp_path: Path, events: list[dict[str, Any]]) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the OTLP exporter is not installed")
    said: list[str] = []
    settings = LoggingSection.model_validate({"otlp": {"endpoint": "http://127.0.0.1:1"}})
    [beside] = exporters.start_exporters(settings, tmp_path / "run-001", {}, said.append)
    for event in events:
        beside.take(event)
    beside.close(60)
    assert len(said) == 1
    assert "127.0.0.1:1" in said[0]


@pytest.mark.long
def test_weights_and_biases_takes_the_curves_offline(
    tmp_path: Path, events: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_SILENT", "true")
    said: list[str] = []
    settings = LoggingSection.model_validate({"wandb": {"enabled": True, "mode": "offline"}})
    [beside] = exporters.start_exporters(settings, tmp_path, {"run": {"steps": 6}}, said.append)
    for event in events:
        beside.take(event)
    beside.close(90)
    assert said == []
    identity = (tmp_path / "wandb-id").read_text().strip()
    [file] = (tmp_path / "wandb").glob(f"offline-run-*/run-{identity}.wandb")
    assert b"train/reward" in file.read_bytes()
