"""The live page in a real browser: what a person sees, in light and dark, and that the browser has nothing to object to."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from orchestrator.api import Prompt, Trajectory, Turn
from orchestrator.observe.report.report_page import write_report
from orchestrator.observe.view import view_server as server
from orchestrator.observe.view.runs_page import Runs
from orchestrator.observe.view.view_server import Hub, Server
from orchestrator.store import TrajectoryStore
from tests.support import view_browser as chromium
from tests.support import view_runs as runs

TOKEN = "token-of-this-test-1234"


pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(chromium.PROGRAM is None, reason=chromium.MISSING),
]
# A name that would run as a script if it were ever taken for markup.
EVIL = '<img src=x onerror="document.title=1">'


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs here write nothing more, and on a busy machine a browser takes longer to start than a run may be silent."""
    monkeypatch.setattr(server, "SILENT_SECONDS", 3600.0)


def test_the_page_shows_the_run_in_light_and_dark_and_follows_it(tmp_path: Path) -> None:
    folder = runs.write_unfinished(tmp_path / "run-001")
    live = json.loads((folder / "live.json").read_text())
    live["trajectories"][0]["waits"] = EVIL
    live["reasons"][EVIL] = 1
    (folder / "live.json").write_text(json.dumps(live))
    pictures = Path(os.environ.get("VIEW_PICTURES", tmp_path))  # where to keep what it looked like

    async def main() -> None:
        hub = Hub(folder)
        server = Server(hub, TOKEN)
        await server.start()
        following = asyncio.create_task(hub.run())
        try:
            grounds = []
            for dark in (False, True):
                async with chromium.browser(dark=dark) as page:
                    await page.go(server.url)
                    await page.until("document.body.dataset.drawn === '40'")
                    text = await page.value("document.body.innerText")
                    for words in (
                        "step 40",
                        "Waiting for:",
                        "generation",
                        "vllm-0",
                        "coming back",
                        "closes",
                        "vllm-1",
                        "24 · 18.4",
                        "25 % · 40 %",
                        "Beside serving",
                        "0.41 s",
                        "-0.031 s",
                        "3 of 940 · 1",
                    ):
                        assert words.lower() in text.lower(), words
                    assert EVIL in text  # as text
                    assert await page.value("document.querySelectorAll('img').length") == 0
                    assert await page.value("document.querySelectorAll('#timeline rect.piece').length") > 10
                    assert await page.value("document.documentElement.scrollWidth <= window.innerWidth")
                    assert TOKEN not in await page.value("document.documentElement.outerHTML")
                    assert TOKEN not in await page.value("location.href + document.cookie")
                    assert all(url.startswith(server.url.split("?")[0]) for url in page.requested)
                    assert page.complaints == []
                    grounds.append(await page.value("getComputedStyle(document.body).backgroundColor"))
                    await page.picture(pictures / ("view-dark.png" if dark else "view.png"))
                    if dark:
                        end = {
                            "kind": "run_end",
                            "t": 999.0,
                            "status": "failed",
                            "reason": "no worker left",
                            "ledger": {},
                        }
                        with (folder / "events.jsonl").open("a") as stream:
                            stream.write(json.dumps(end) + "\n")
                        await page.until("document.getElementById('notice').innerText.includes('no worker left')")
                        assert await page.value("document.getElementById('status').innerText") == "failed"
            assert len(set(grounds)) == 2
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            await server.close()

    asyncio.run(main())


def test_a_page_more_than_the_server_serves_is_shown_too_says_so_and_asks_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "WATCHERS", 0)

    async def main() -> None:
        hub = Hub(runs.write_unfinished(tmp_path / "run-001"))
        await hub.look()
        serving = Server(hub, TOKEN)
        await serving.start()
        try:
            async with chromium.browser() as page:
                await page.go(serving.url)
                said = "document.getElementById('connection').innerText"
                await page.until(f"{said}.includes('every 5 seconds')")
                assert await page.value("document.body.dataset.drawn") == "40"
                monkeypatch.setattr(server, "WATCHERS", 16)
                await page.until(f"{said} === 'Connected.'")
        finally:
            await serving.close()

    asyncio.run(main())


# Elements with text of their own whose colour is less than 4.5 to 1 (large text: 3 to 1) against what lies behind them.
PALE = """
(() => {
  const linear = (v) => (v <= 10.02 ? v / 3294.6 : ((v / 255 + 0.055) / 1.055) ** 2.4);
  const light = (c) => { const f = c.map(linear);
    return 0.2126 * f[0] + 0.7152 * f[1] + 0.0722 * f[2]; };
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const behind = (one) => {
    for (; one; one = one.parentElement) {
      const [r, g, b, a] = rgb(getComputedStyle(one).backgroundColor);
      if (a === undefined || a > 0.99) return [r, g, b];
    }
    return [255, 255, 255];
  };
  return [...document.querySelectorAll("main *")].filter((one) => !(one instanceof SVGElement) && one.checkVisibility()
      && [...one.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim())).map((one) => {
    const style = getComputedStyle(one), [a, b] = [light(rgb(style.color).slice(0, 3)), light(behind(one))].sort((x, y) => y - x);
    const large = parseFloat(style.fontSize) >= 24 || (parseFloat(style.fontSize) >= 18.66 && style.fontWeight >= 700);
    return [(a + 0.05) / (b + 0.05), large ? 3 : 4.5, one.className || one.tagName, one.innerText.slice(0, 30)];
  }).filter(([ratio, least]) => ratio < least).map((found) => found.join(" "));
})()
"""


@pytest.mark.parametrize("dark", [False, True])
def test_on_a_phone_no_value_is_cut_and_all_text_can_be_read(tmp_path: Path, dark: bool) -> None:
    folder = runs.write_unfinished(tmp_path / "run-001")
    report = write_report(runs.write_run(tmp_path / "run-002", steps=20))
    pictures = Path(os.environ.get("VIEW_PICTURES", tmp_path))

    async def main() -> None:
        hub = Hub(folder)
        server = Server(hub, TOKEN)
        await server.start()
        following = asyncio.create_task(hub.run())
        try:
            async with chromium.browser(dark=dark, width=360, height=740) as page:
                for url, drawn in (
                    (server.url, "document.body.dataset.drawn === '40'"),
                    (report.as_uri(), "document.title"),
                ):
                    await page.go(url)
                    await page.until(drawn)
                    assert await page.value(chromium.CUT) == []
                    assert await page.value("document.documentElement.scrollWidth <= window.innerWidth")
                    assert await page.value(PALE) == []
                    await page.picture(
                        pictures
                        / f"phone-{'report' if url == report.as_uri() else 'live'}{'-dark' if dark else ''}.png"
                    )
                await page.go(server.url)
                await page.until("document.body.dataset.drawn === '40'")
                beyond = "[...document.querySelectorAll('.scroll')].filter((one) => one.scrollWidth > one.clientWidth + 1).length"
                assert await page.value(beyond) == 0
                labels = await page.value("[...document.querySelectorAll('.card-label')].map((one) => one.innerText)")
                assert labels[:2] == ["Reward", "Success"]
                headings = await page.value("[...document.querySelectorAll('h2')].map((one) => one.innerText)")
                assert headings[:2] == ["How it learns", "What is under way"]
                assert await page.value("document.getElementById('notice').hidden")  # waiting is no alarm
                assert (await page.value("document.getElementById('waiting').innerText")).startswith("Waiting for: ")
                assert page.complaints == []
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            await server.close()

    asyncio.run(main())


def test_the_runs_of_a_folder_are_on_one_page_and_each_leads_to_its_own(tmp_path: Path) -> None:
    for name in ("alpha-001", "beta-002"):
        runs.write_unfinished(tmp_path / name)
        (tmp_path / name / "config.json").write_text("{}")
    pictures = Path(os.environ.get("VIEW_PICTURES", tmp_path))

    async def main() -> None:
        shown = Runs(tmp_path)
        server = Server(shown, TOKEN, hubs=lambda: shown.hubs)
        await server.start()
        following = asyncio.create_task(shown.run())
        try:
            async with chromium.browser(height=420) as page:
                await page.go(server.url)
                await page.until("document.querySelectorAll('#runs tbody tr').length === 2")
                await page.until("document.body.innerText.includes('40 of 80')")
                text = await page.value("document.body.innerText")
                assert "2 of 2 running" in text
                assert "64" in text  # trajectories in flight
                await page.picture(pictures / "runs.png")
                runs.write_unfinished(tmp_path / "gamma-003")
                (tmp_path / "gamma-003" / "config.json").write_text("{}")
                await page.until("document.body.innerText.includes('gamma-003')")
                await page.value("document.querySelector('a[href=\"run/beta-002/\"]').click()")
                await page.until("document.body.dataset.drawn === '40'")
                assert (await page.value("location.href")).endswith("/run/beta-002/")
                assert "vllm-0" in await page.value("document.body.innerText")
                assert page.complaints == []
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            await server.close()

    asyncio.run(main())


def test_a_trajectory_is_chosen_and_read_and_its_text_stays_text(tmp_path: Path) -> None:
    folder = runs.write_unfinished(tmp_path / "run-001")
    vocabulary = {word: token for token, word in enumerate(("<end>", "left", EVIL, "x" * 400))}
    (folder / "model").mkdir()
    (folder / "model" / "tokenizer.json").write_text(json.dumps({"model": {"type": "WordLevel", "vocab": vocabulary}}))
    store = TrajectoryStore(folder / "trajectories")
    for number in range(250):
        turn = Turn((1, 3), (1, 2, 0), (-1.0, -1.0, -1.0), ((5, 1), (6, 2)), 1.0)
        prompt = Prompt("key", "frozenlake", number, "SFFH")
        made = (
            f"t{number:03d}",
            f"g{number // 8}",
            "frozenlake",
            prompt,
            (turn,),
            number / 250,
            "1",
            1,
            False,
            (),
            1.0,
            2.0,
            3.0,
        )
        store.append(Trajectory(*made), 0, "trained" if number % 2 else "failed: env_timeout")
    store.close()
    pictures = Path(os.environ.get("VIEW_PICTURES", tmp_path))

    async def main() -> None:
        server = Server(Hub(folder), TOKEN)
        await server.start()
        try:
            for dark, width in ((False, 1280), (True, 400)):
                async with chromium.browser(dark=dark, width=width) as page:
                    await page.go(server.url)
                    await page.go(server.url.split("?")[0] + "trajectories#order=best")
                    await page.until("document.body.dataset.drawn === '#order=best'")
                    assert "1 to 50 of 250 trajectories" in await page.value("document.body.innerText")
                    assert await page.value("document.querySelector('tbody a').innerText") == "t249"
                    await page.value(
                        "document.querySelector('[name=cause]').value = 'failed'; document.forms[0].requestSubmit()"
                    )
                    await page.until("document.getElementById('title').innerText.includes('of 125')")
                    await page.value("document.querySelector('#pages a').click()")
                    await page.until("document.getElementById('title').innerText.startsWith('51 to 100')")
                    await page.value("document.querySelector('#pages a').click()")
                    await page.until("document.getElementById('title').innerText.startsWith('1 to 50')")
                    await page.value("document.querySelector('tbody a').click()")
                    await page.until("document.querySelectorAll('.turn').length === 1")
                    text = await page.value("document.getElementById('one').innerText")
                    for words in ("t248 failed: env_timeout", "Its group of 2", f"left {EVIL} <end>", "version 6"):
                        assert words in text, (words, text)
                    colours = "[...document.querySelectorAll('.said')].map((span) => getComputedStyle(span).color)"
                    assert len(set(await page.value(colours))) == 2
                    assert await page.value("document.querySelectorAll('img').length") == 0
                    assert await page.value("document.documentElement.scrollWidth <= window.innerWidth")
                    assert page.complaints == []
                    await page.picture(pictures / ("trajectories-dark.png" if dark else "trajectories.png"))
        finally:
            await server.close()

    asyncio.run(main())


def test_a_report_compares_runs_in_the_browser_with_a_curve_of_each(tmp_path: Path) -> None:
    folders = []
    for name, steps in (("alpha-001", 20), ("beta-002", 40)):
        run = runs.SyntheticRun(tmp_path / name, steps=steps)
        run.start()
        run.loop(0, steps)
        run.write()
        folders.append(tmp_path / name)
    written = write_report(folders)

    async def main() -> None:
        for dark in (False, True):
            async with chromium.browser(dark=dark) as page:
                await page.go(written.as_uri())
                await page.until("document.querySelectorAll('svg polyline, svg path').length >= 4")
                text = await page.value("document.body.innerText")
                assert "alpha-001" in text
                assert "beta-002" in text
                assert await page.value("document.documentElement.scrollWidth <= window.innerWidth")
                assert page.complaints == []
                assert all(url.startswith("file:") for url in page.requested)

    asyncio.run(main())
