"""The page of a run: nothing without the token, no secret in it, at most one picture a second, and a run that it cannot hurt."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from orchestrator.api import ConfigError, SharedDevice, WorkerStats
from orchestrator.build import build_pipeline
from orchestrator.components import Components
from orchestrator.config import Config, parse_config, to_json
from orchestrator.events import EventLog, MemorySink
from orchestrator.ledger import Ledger
from orchestrator.observe import run_view
from orchestrator.observe.view import folder_follower
from orchestrator.observe.view import live_sample as sampling
from orchestrator.observe.view import runs_page as listing
from orchestrator.observe.view.live_sample import Sampler
from orchestrator.observe.view.turn_spans import Spans
from orchestrator.observe.view.view_program import read_token, serve_run
from orchestrator.observe.view.view_server import WATCHERS, Hub, Server
from orchestrator.run_folder import RunFolder
from orchestrator.sim.crash_remains import CrashRemains, SimStore
from orchestrator.sim.run_audit import RunAudit
from orchestrator.sim.simulated_worker import SimWeights, SimWorker
from orchestrator.sim.twins import SimDisplay, SimReward, SimTask, SimTrainer
from tests.support import view_runs as runs

TOKEN = "token-of-this-test-1234"


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[tuple[Hub, str, aiohttp.ClientSession]]:
    """(hub, base URL, a client without the token)."""
    hub = Hub(folder)
    server = Server(hub, TOKEN)
    await server.start()
    following = asyncio.create_task(hub.run())
    try:
        async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as client:
            yield hub, server.url.split("?")[0], client
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await server.close()


async def pictures(answer: aiohttp.ClientResponse, count: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    async with asyncio.timeout(60):
        while len(found) < count:
            line = await answer.content.readline()
            if line.startswith(b"data: "):
                found.append(json.loads(line[6:]))
    return found


def test_without_the_token_nothing_is_said(tmp_path: Path) -> None:
    async def main() -> None:
        async with served(runs.write_unfinished(tmp_path / "secret-name-001")) as (_, url, client):
            for path in ("", "?token=wrong", "stream", "state.json", "metrics", "view.js", "nothing"):
                for headers in ({}, {"Authorization": "Bearer wrong"}, {"Cookie": "rl_coserve_view=x"}):
                    async with client.get(url + path, headers=headers) as answer:
                        assert answer.status == 401, path
                        assert "secret-name" not in await answer.text()
            async with client.get(f"{url}metrics?token={TOKEN}") as answer:
                assert answer.status == 401  # in a URL it would end in logs: only the page's first one has it

    asyncio.run(main())


def test_the_tokens_url_gives_a_cookie_that_opens_the_page_and_nothing_else_is_loaded(tmp_path: Path) -> None:
    async def main() -> None:
        async with served(runs.write_unfinished(tmp_path / "run-001")) as (_, url, client):
            async with client.get(f"{url}?token={TOKEN}", allow_redirects=False) as answer:
                assert answer.status == 303
                cookie = answer.headers["Set-Cookie"]
                assert "HttpOnly" in cookie
                assert "SameSite=Strict" in cookie
            async with client.get(url) as answer:
                assert answer.status == 200
                page = await answer.text()
                policy = answer.headers["Content-Security-Policy"]
            assert "default-src 'none'" in policy
            assert "frame-ancestors 'none'" in policy
            assert "unsafe" not in policy
            assert not re.search(r"https?://", page)
            assert not re.search(
                r"<script(?![^>]*src=)|\son\w+=|style=", page
            )  # nothing inline, which the policy forbids
            for path in re.findall(r'(?:href|src)="([^"]+)"', page):
                async with client.get(url + path) as answer:
                    assert answer.status == 200, path
                    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", await answer.text())

    asyncio.run(main())


def test_at_most_one_picture_a_second_is_sent_however_fast_events_come(tmp_path: Path) -> None:
    folder = runs.write_unfinished(tmp_path / "run-001")

    async def main() -> None:
        async with served(folder) as (_, url, client):

            async def write() -> None:
                with (folder / "events.jsonl").open("a") as stream:
                    for number in range(10_000):
                        stream.write(
                            json.dumps({"kind": "fault", "t": 900.0 + number, "what": "x", "detail": ""}) + "\n"
                        )
                        stream.flush()
                        await asyncio.sleep(0.002)

            headers = {"Authorization": f"Bearer {TOKEN}"}
            writing = asyncio.create_task(write())
            loop = asyncio.get_running_loop()
            async with client.get(url + "stream", headers=headers) as answer:
                await pictures(answer, 1)
                begun = loop.time()
                found = await pictures(answer, 3)
                seconds = loop.time() - begun
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
        assert seconds > 1.8  # the first may be due at once; a slow machine only makes it longer
        assert found[0]["incidents"][0]["t"] < found[2]["incidents"][0]["t"]

    asyncio.run(main())


@pytest.mark.long
def test_too_many_pages_are_refused_and_one_that_leaves_makes_room(tmp_path: Path) -> None:
    folder = runs.write_unfinished(tmp_path / "run-001")

    async def main() -> None:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with served(folder) as (_, url, client):
            connector = aiohttp.TCPConnector(limit=0)
            async with aiohttp.ClientSession(headers=headers, connector=connector) as crowd:
                answers = [await crowd.get(url + "stream") for _ in range(WATCHERS)]
                assert {answer.status for answer in answers} == {200}
                assert [len(await pictures(answer, 1)) for answer in answers] == [1] * WATCHERS
                async with client.get(url + "stream", headers=headers) as answer:
                    assert answer.status == 503
                answers[0].close()
                for _ in range(200):  # the server notices when it writes
                    (folder / "live.json").write_text(json.dumps({**runs.LIVE, "t": 5000.0 + _}))
                    async with client.get(url + "stream", headers=headers) as answer:
                        if answer.status == 200:
                            break
                    await asyncio.sleep(0.1)
                assert answer.status == 200
                for left in answers[1:]:
                    left.close()

    asyncio.run(main())


def test_a_run_that_says_nothing_any_more_is_shown_as_silent(tmp_path: Path) -> None:
    folder = runs.write_unfinished(tmp_path / "run-001")
    os.utime(folder / "live.json", (1_000_000_000, 1_000_000_000))

    async def main() -> dict[str, Any]:
        hub = Hub(folder)
        await hub.look()
        shown: dict[str, Any] = json.loads(hub.picture)
        return shown

    assert asyncio.run(main())["silent"] > 10_000


def test_a_file_server_whose_clock_is_another_makes_no_run_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The viewer's clock says how long it saw nothing new; a record is taken for old at once only beyond any skew."""
    folder, clock = runs.write_unfinished(tmp_path / "run-001"), [1000.0]
    written = (folder / "live.json").stat().st_mtime

    class Time:
        monotonic = staticmethod(lambda: clock[0])
        time = staticmethod(lambda: written + 120.0 + clock[0] - 1000.0)  # two minutes ahead of the file server

    monkeypatch.setattr(folder_follower, "time", Time)

    async def main() -> None:
        hub = Hub(folder)
        found = []
        for seconds, alive in ((0.0, True), (5.0, True), (8.0, False), (4.0, False), (1.0, True)):
            clock[0] += seconds
            if alive:
                os.utime(folder / "live.json", (written + clock[0] - 1000.0,) * 2)
            await hub.look()
            found.append(hub.silent())
        assert found == [0, 0, 0, 12, 0]
        (folder / "live.json").unlink()  # a file server that does not answer is no sign of life either
        clock[0] += 30.0
        await hub.look()
        assert hub.silent() == 30

    asyncio.run(main())


def test_while_a_long_log_is_first_read_the_page_says_so_and_metrics_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_follower, "CHUNK", 4096)
    folder = runs.write_unfinished(tmp_path / "run-001")
    headers = {"Authorization": f"Bearer {TOKEN}"}

    async def main() -> None:
        hub = Hub(folder)
        server = Server(hub, TOKEN)
        await server.start()
        url = server.url.split("?")[0]
        try:
            async with aiohttp.ClientSession(headers=headers) as client:
                for path in ("metrics", "state.json"):  # nothing is read yet
                    async with client.get(url + path) as answer:
                        assert answer.status == 503
                        assert "reading the log, 0 %" in await answer.text()
                looking = asyncio.create_task(hub.look())
                await asyncio.sleep(0)
                reading = json.loads(hub.picture)["reading"]
                assert 0 < reading < 100
                assert hub.reading is not None
                assert listing.run_row("run-001", hub)["state"] == "reading the log"
                await looking
                assert "reading" not in json.loads(hub.picture)
                async with client.get(url + "metrics") as answer:
                    assert answer.status == 200
                    assert "run_steps_total 40.0" in await answer.text()
        finally:
            await server.close()

    asyncio.run(main())


def test_nothing_of_the_config_of_an_older_run_matters_to_who_looks_at_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = runs.write_unfinished(tmp_path / "run-001")
    old = {
        "removed_section": {"removed": 1},
        "view": {"host": "0.0.0.0"},
        "tls": {"certificate": "/gone", "key": "/gone"},
    }
    (folder / "config.json").write_text(json.dumps(old))

    async def main() -> None:
        showing = asyncio.create_task(serve_run(folder, TOKEN))
        said = ""
        async with asyncio.timeout(30):
            while "view:" not in said and not showing.done():
                await asyncio.sleep(0.01)
                said += capsys.readouterr().out
        assert said.startswith("view: http://127.0.0.1:")
        showing.cancel()
        await asyncio.gather(showing, return_exceptions=True)

    asyncio.run(main())


def test_a_token_file_that_holds_no_token_is_an_error_with_a_fix(tmp_path: Path) -> None:
    for text in ("", "short", "with spaces in it, long enough", "ü" * 30):
        (tmp_path / "token").write_text(text)
        with pytest.raises(ConfigError, match=r"view\.token_file.*at least 16"):
            read_token(str(tmp_path / "token"))
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    assert read_token(str(tmp_path / "token")) == f"file:{tmp_path}/token"
    assert read_token("") != read_token("")


# -- what a run writes for it --------------------------------------------------------------------------------------------


def small() -> Config:
    return parse_config(
        {
            "run": {"name": "small", "steps": 2},
            "rollout": {"workers": 2, "environments": 16, "group_size": 4, "groups_per_step": 2},
            "evaluation": {"prompts": 1},
            "sim": {
                "environment_seconds_mean": 0.1,
                "train_seconds_per_token": 1e-5,
                "turns_max": 3,
                "response_tokens_mean": 8,
                "response_tokens_max": 16,
                "decode_seconds_per_step": 0.005,
                "publish_seconds": 0.05,
                "update_seconds": 0.05,
            },
        }
    )


async def run_sampled(folder: Path, config: Config, broken: bool = False) -> tuple[list[dict[str, Any]], list[str]]:
    """A pipeline on the real event loop, engines simulated; returns the live records that were there, and what was said."""
    sink, said = MemorySink(), []
    loop = asyncio.get_running_loop()
    with (folder / "events.jsonl").open("w", buffering=1) as stream:
        events = EventLog(stream, loop.time)
        audit = RunAudit(config)
        ledger = Ledger(sink, events.time)
        weights = SimWeights()
        workers = [SimWorker(f"sim-{index}", config, weights) for index in range(2)]
        trainer = SimTrainer(config, weights, audit)
        store, display = SimStore(CrashRemains(audit)), SimDisplay()
        parts = Components(SimTask(config), list(workers), trainer, SimReward(config), events, ledger, store, display)
        pipeline = build_pipeline(config, parts)
        sampler = Sampler(folder / "missing" if broken else folder, events, said.append)
        sampler.start()
        await asyncio.sleep(0.05)
        sampler.pipeline = pipeline
        (folder / "turns.jsonl").write_text('["t000000')  # of a life that was killed
        spans = Spans(folder, events, pipeline.rollout.proxy, 1 << 20)
        pipeline.rollout.environments.on_turn = spans.turn
        records: list[dict[str, Any]] = []

        async def read() -> None:
            while True:
                await asyncio.sleep(0.1)
                if (folder / "live.json").exists():
                    records.append(json.loads((folder / "live.json").read_text()))

        reading = asyncio.create_task(read())
        try:
            assert await pipeline.run() == "completed"
        finally:
            reading.cancel()
            await sampler.close()
            spans.close()
            for worker in workers:
                await worker.close()
            await trainer.close()
    return records, said


def test_a_run_says_what_is_under_way_and_its_page_shows_the_last_of_it_when_it_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "SECONDS", 0.1)
    records, said = asyncio.run(run_sampled(tmp_path, small()))
    assert said == []
    busy = [record for record in records if record.get("in_flight")]
    assert busy
    for record in busy:
        assert sum(record["reasons"].values()) == record["in_flight"]
        assert len(record["trajectories"]) == min(record["in_flight"], sampling.TRAJECTORIES)
        assert {row["name"] for row in record["workers"]} == {"sim-0", "sim-1"}
        assert all(row["waits"] for row in record["trajectories"])  # each by a name
        for reason, count in record["reasons"].items():  # all are listed one by one: there are few
            assert sum(row["waits"] == reason for row in record["trajectories"]) == count
        assert record["queue"] == record["reasons"].get("a free worker", 0)
    assert any("kv_capacity" in row for record in busy for row in record["workers"])
    assert any(record["stages"] for record in records)
    turns = [json.loads(line) for line in (tmp_path / "turns.jsonl").read_text().splitlines()[1:]]
    assert {worker for _, _, worker, *_ in turns} == {"sim-0", "sim-1"}
    assert all(times == sorted(times) and times[0] > 0 for _, _, _, *times in turns)
    assert len({(name, turn) for name, turn, *_ in turns}) == len(turns)
    last = json.loads((tmp_path / "live.json").read_text())
    assert last["in_flight"] == 0
    assert last["ledger"]["in_flight"] == 0

    async def main() -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with served(tmp_path) as (_, url, client), client.get(url + "stream", headers=headers) as answer:
            return (await pictures(answer, 1))[0]

    shown = asyncio.run(main())
    assert shown["step"] == 2
    assert shown["ledger"]["started"] == sum(n for name, n in shown["ledger"].items() if name != "started") > 0
    assert [row["name"] for row in shown["workers"]] == ["sim-0", "sim-1"]


def test_a_worker_that_is_asked_between_two_steps_is_shown_with_what_its_steps_were_like() -> None:
    idle = WorkerStats(0, 0, 0, 128, 0, 50.0, 3)
    answers = [replace(idle, steps=100 + n, step_requests=3000 + 24 * n, step_kv=9000 + 64 * n) for n in (0, 10, 20)]
    row = sampling.worker_row(answers)
    assert (row["running"], row["running_mean"], row["kv_used"], row["kv_mean"]) == (0, 24.0, 0, 0.5)
    assert sampling.worker_row(answers[:1])["running_mean"] == 30.0, "of the first answer: since the start"
    assert "running_mean" not in sampling.worker_row([answers[0], answers[0]]), "no step since"
    assert "budget" not in row
    beside = SharedDevice(12, 16, 2 << 20, ttft_slack=-0.25, firsts=9, late_first=2)
    row = sampling.worker_row([replace(answers[0], shared=beside)])
    assert (row["pages"], row["budget"], row["ttft_slack"], row["late_first"]) == (12, 16, -0.25, 2)
    assert "tpot_slack" not in row, "nothing decodes"
    record = {"t": 1.0, "stages": [], "workers": [{"name": "w", "state": "up", "version": 3, "requests": 0, **row}]}
    assert sampling.read_record(json.dumps(record).encode()) == record


@pytest.mark.long
def test_a_sample_that_cannot_be_written_is_said_once_and_the_run_goes_on(tmp_path: Path) -> None:
    records, said = asyncio.run(run_sampled(tmp_path, small(), broken=True))
    assert records == []
    assert len(said) == 1
    assert "live.json cannot be written" in said[0]


def test_what_is_under_way_is_shown_again_when_its_folder_is_back(tmp_path: Path) -> None:
    """A file server that is away for a second of a week."""
    folder, said = tmp_path / "away", list[str]()

    async def sampled() -> None:
        sampler = Sampler(folder, EventLog(io.StringIO(), asyncio.get_running_loop().time), said.append)
        for _ in range(2):
            await sampler._write()
        folder.mkdir()
        await sampler._write()

    asyncio.run(sampled())
    assert len(said) == 1
    assert (folder / "live.json").exists()


def test_the_process_beside_a_run_shows_it_to_its_end_and_then_ends(tmp_path: Path) -> None:
    folder = RunFolder(runs.write_unfinished(tmp_path / "run-001"))
    folder.logs.mkdir()
    said: list[str] = []

    async def main() -> None:
        view = run_view.ViewProcess(parse_config({"view": {"enabled": True}}), folder, said.append)
        await view.open()
        assert said[0].startswith("view: http://127.0.0.1:")
        assert view.token in said[0]
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {view.token}"}) as client:
            async with client.get(view.base_url + "/stream") as answer:
                assert (await pictures(answer, 1))[0]["run"]["status"] == "unfinished"
                end = {"kind": "run_end", "t": 999.0, "status": "completed", "reason": "completed", "ledger": {}}
                with folder.events_file.open("a") as stream:
                    stream.write(json.dumps(end) + "\n")
                assert (await pictures(answer, 1))[0]["run"]["status"] == "completed"
            async with client.get(view.base_url + "/metrics") as answer:
                assert "rl_coserve:run_up 0.0" in await answer.text()
        process = view._process
        assert process is not None
        await view.stop()
        assert process.returncode == 0
        token = view.token
        for file in folder.path.rglob("*"):
            assert not file.is_file() or token not in file.read_text(), file

    asyncio.run(main())


@pytest.mark.long
def test_a_view_that_dies_is_said_and_does_not_end_the_run(tmp_path: Path) -> None:
    folder = RunFolder(runs.write_unfinished(tmp_path / "run-001"))
    folder.logs.mkdir()
    said: list[str] = []

    async def main() -> None:
        view = run_view.ViewProcess(parse_config({"view": {"enabled": True}}), folder, said.append)
        await view.open()
        assert view._process is not None
        view._process.kill()
        async with asyncio.timeout(60):
            while len(said) < 2:
                await asyncio.sleep(0.02)
        await view.stop()

    asyncio.run(main())
    assert "the view has ended" in said[1]


@pytest.mark.long
def test_exporters_beside_a_run_get_what_happens_from_its_start_on_and_what_they_say_reaches_people(
    tmp_path: Path,
) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the OTLP exporter is not installed")
    folder = RunFolder(runs.write_unfinished(tmp_path / "run-001"))
    folder.logs.mkdir()
    config = parse_config({"logging": {"otlp": {"endpoint": "http://127.0.0.1:1"}}})  # nobody is there
    folder.config_file.write_text(to_json(config))
    said: list[str] = []
    before = max(json.loads(line)["t"] for line in folder.events_file.read_text().splitlines())

    async def main() -> None:
        view = run_view.ViewProcess(config, folder, said.append, since=before + 1.0)
        await view.open()
        assert said == []  # there is no page to tell of, and nothing of before is sent
        end = {"kind": "run_end", "t": before + 3.0, "status": "completed", "reason": "completed", "ledger": {}}
        fault = {"kind": "fault", "t": before + 2.0, "what": "worker", "cause": "worker", "detail": ""}
        with folder.events_file.open("a") as stream:
            stream.write(json.dumps(fault) + "\n" + json.dumps(end) + "\n")
        await view.stop()

    asyncio.run(main())
    assert len(said) == 1
    assert "the collector does not take what it is sent" in said[0]


TRACKER = """
import json, os
print("imported")
class Tracker:
    def __init__(self, run, config):
        self.file = open(os.environ["TRACKED"], "a")
        print(run, config["run"]["steps"])
        os.system("echo a child of it")
    def log(self, step, values):
        print("logged", step)
        print(json.dumps([step, values]), file=self.file, flush=True)
    def close(self):
        print("over", file=self.file, flush=True)
class Other:
    def __init__(self, run): ...
class Empty:
    def __init__(self, run, config): ...
"""


def test_an_exporter_of_the_users_gets_the_curves_and_may_print(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(TRACKER)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("TRACKED", str(tmp_path / "tracked"))
    folder = RunFolder(runs.write_run(tmp_path / "run-001", steps=6))
    folder.logs.mkdir()
    config = parse_config({"run": {"steps": 6}, "logging": {"exporter": "mine:Tracker"}})
    folder.config_file.write_text(to_json(config))
    said: list[str] = []

    async def main() -> None:
        view = run_view.ViewProcess(config, folder, said.append)
        await view.open()
        await view.stop()

    asyncio.run(main())
    assert said == []
    *lines, over = (tmp_path / "tracked").read_text().splitlines()
    rewards = {step: values["train/reward"] for step, values in map(json.loads, lines) if "train/reward" in values}
    assert list(rewards) == [1, 2, 3, 4, 5, 6]
    assert over == "over"
    assert {"imported", "run-001 6", "a child of it", "logged 6"} <= set(
        (folder.logs / "view.log").read_text().split("\n")
    )


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("absent:Tracker", "absent cannot be imported"),
        ("mine:Other", "is made with the run's name and its config"),
        ("mine:Empty", "has no log and no close"),
    ],
)
def test_an_exporter_that_cannot_be_used_is_said_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, why: str
) -> None:
    (tmp_path / "mine.py").write_text(TRACKER)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    with pytest.raises(ConfigError, match=f"logging.exporter = '{name}': {why}"):
        run_view.check_view(parse_config({"logging": {"exporter": name}}))


def test_a_port_that_is_taken_is_said_before_anything_starts() -> None:
    async def main() -> None:
        server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ConfigError, match=r"view\.port"):
            run_view.check_view(parse_config({"view": {"enabled": True, "port": port}}))
        server.close()

    asyncio.run(main())
