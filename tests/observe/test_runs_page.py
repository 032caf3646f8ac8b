"""The page of the runs of a folder: found while they come, in order, behind the token, and bounded."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http.cookiejar import CookieJar
from pathlib import Path

import aiohttp
import pytest

from orchestrator.cli import main as cli
from orchestrator.observe.view import runs_page as listing
from orchestrator.observe.view.folder_follower import Follower
from orchestrator.observe.view.runs_page import Runs, runs_in
from orchestrator.observe.view.view_server import Server
from tests.support import view_runs

TOKEN = "token-of-this-test-1234"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}


def run_in(folder: Path, name: str, end: str = "", spoke: float = 0.0) -> Path:
    """A run of 40 steps; ``end``: how it ended; ``spoke``: so many seconds ago it said something last."""
    made: Path = view_runs.write_unfinished(folder / name)
    (made / "config.json").write_text("{}")
    if end:
        event = {"kind": "run_end", "t": 999.0, "status": end, "reason": "no worker left", "ledger": {}}
        with (made / "events.jsonl").open("a") as stream:
            stream.write(json.dumps(event) + "\n")
    for file in ("events.jsonl", "live.json"):
        at = (made / file).stat().st_mtime - spoke
        os.utime(made / file, (at, at))
    return made


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[tuple[Runs, str, aiohttp.ClientSession]]:
    """(the runs, base URL, a client without the token)."""
    runs = Runs(folder)
    server = Server(runs, TOKEN, hubs=lambda: runs.hubs)
    await server.start()
    try:
        async with aiohttp.ClientSession() as client:
            yield runs, server.url.split("?")[0], client
    finally:
        await server.close()


def test_the_list_says_of_each_run_how_it_is_and_those_that_go_on_come_first(tmp_path: Path) -> None:
    run_in(tmp_path, "done-001", "completed")
    run_in(tmp_path, "failed-002", "failed")
    run_in(tmp_path, "gone-003", spoke=3600.0)
    run_in(tmp_path, "live-004")
    (tmp_path / "no-run").mkdir()
    (tmp_path / "latest").symlink_to("live-004")

    async def main() -> None:
        runs = Runs(tmp_path)
        await runs.look()
        found = json.loads(runs.picture)["runs"]
        assert found[0]["folder"] == "live-004"
        rows = {row["folder"]: row for row in found}
        assert set(rows) == {"done-001", "failed-002", "gone-003", "live-004"}
        states = {name: row["state"] for name, row in rows.items()}
        assert states == {"done-001": "completed", "failed-002": "failed", "gone-003": "silent", "live-004": "running"}
        assert (rows["live-004"]["step"], rows["live-004"]["steps"], rows["live-004"]["in_flight"]) == (40, 80, 64)
        assert rows["failed-002"]["reason"] == "no worker left"
        assert rows["done-001"]["in_flight"] == 0
        assert rows["gone-003"]["silent"] >= 3600
        assert 0 <= rows["live-004"]["lag"] < 5
        assert 0 <= rows["live-004"]["success"] <= 1
        log = tmp_path / "live-004" / "events.jsonl"
        before = rows["live-004"]["faults"]
        fault = {"kind": "fault", "t": 900.0, "what": "worker x", "cause": "worker", "detail": ""}
        with log.open("a") as stream:
            stream.write(json.dumps(fault) + "\n" + json.dumps({**fault, "kind": "recovered"}) + "\n")
        run_in(tmp_path, "new-005")
        await runs.look()
        rows = {row["folder"]: row for row in json.loads(runs.picture)["runs"]}
        assert rows["live-004"]["faults"] == before + 1
        assert rows["new-005"]["state"] == "running"

    asyncio.run(main())


def test_only_the_runs_that_spoke_last_are_shown_and_the_others_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "RUNS", 2)
    for number in range(4):
        folder = tmp_path / f"run-{number:03d}"
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "events.jsonl").write_text("")
        os.utime(folder / "events.jsonl", (1000.0 + number, 1000.0 + number))

    async def main() -> None:
        runs = Runs(tmp_path)
        await runs.look()
        picture = json.loads(runs.picture)
        assert ({row["folder"] for row in picture["runs"]}, picture["older"]) == ({"run-003", "run-002"}, 2)
        assert {row["state"] for row in picture["runs"]} == {"starting"}

    asyncio.run(main())


def test_each_run_has_its_own_page_and_metrics_behind_the_same_token_and_no_other_path_is_one(tmp_path: Path) -> None:
    run_in(tmp_path / "runs", "live-001")
    run_in(tmp_path, "secret-002")

    async def main() -> None:
        async with served(tmp_path / "runs") as (runs, url, client):
            await runs.look()
            for path in ("", "stream", "state.json", "run/live-001/", "run/live-001/state.json", "runs.js"):
                async with client.get(url + path) as answer:
                    assert answer.status == 401, path
            for path, expected in (
                ("", "runs.js"),
                ("state.json", '"folder":"live-001"'),
                ("run/live-001/", "view.js"),
                ("run/live-001/draw.js", "EventSource"),
                ("run/live-001/state.json", '"reasons"'),
                ("run/live-001/metrics", 'rl_coserve:run_worker_up{worker="vllm-0"} 1.0'),
            ):
                async with client.get(url + path, headers=HEADERS) as answer:
                    assert answer.status == 200, path
                    assert expected in await answer.text(), path
            for path in ("metrics", "run/other/", "run/..%2Fsecret-002/", "run/..%2Fsecret-002/state.json", "run/"):
                async with client.get(url + path, headers=HEADERS) as answer:
                    assert answer.status == 404, path
                    assert "vllm-0" not in await answer.text()
            async with client.get(url + "run/live-001/stream", headers=HEADERS) as answer:
                line = await answer.content.readline()
                assert json.loads(line.removeprefix(b"data: "))["step"] == 40

    asyncio.run(main())


def test_the_command_shows_a_folder_of_runs_until_it_is_stopped(tmp_path: Path) -> None:
    run_in(tmp_path, "live-001")
    token = tmp_path / "token"
    token.write_text(TOKEN)
    arguments = ["-m", "orchestrator.cli", "view", str(tmp_path), "--token-file", str(token)]
    with subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True) as command:
        try:
            assert command.stdout is not None
            url = command.stdout.readline().removeprefix("view: ").strip()
            opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
            assert "runs.js" in opener.open(url, timeout=30).read().decode()
            with pytest.raises(urllib.error.HTTPError, match="401"):
                urllib.request.urlopen(url.split("?")[0], timeout=30)
        finally:
            command.send_signal(signal.SIGINT)
        assert command.wait(30) == 0


def test_a_folder_without_runs_is_one_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert runs_in(tmp_path) == runs_in(tmp_path / "missing") == []
    assert cli(["view", str(tmp_path)]) == 2
    assert "is not a run folder" in capsys.readouterr().err


def test_a_run_that_this_account_may_not_look_into_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("mine", "theirs"):
        run_in(tmp_path, name)
    real = Path.is_file

    def refused(path: Path) -> bool:
        if path.parent.name == "theirs":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(Path, "is_file", refused)
    assert [path.name for path in runs_in(tmp_path)] == ["mine"]


def test_a_log_that_cannot_be_read_now_is_asked_for_again(tmp_path: Path) -> None:
    run = run_in(tmp_path, "run")
    log = run / "events.jsonl"
    kept = log.read_bytes()
    log.unlink()
    log.mkdir()  # reading it is an error of the system, as of a file server that has lost it
    follower = Follower(run)
    assert (list(follower.events()), follower.behind) == ([], False)
    log.rmdir()
    log.write_bytes(kept)
    assert list(follower.events())
