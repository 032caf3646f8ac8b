"""The live page in a real browser: what a person sees, in light and dark, and that the browser has nothing to object to."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from orchestrator.view.server import Hub, Server

TOKEN = "token-of-this-test-1234"


def _helper(name: str) -> ModuleType:
    """A module beside this one; pytest's importlib mode puts no folder of tests on the path."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


runs = _helper("view_runs")
chromium = _helper("view_browser")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(chromium.PROGRAM is None, reason=chromium.MISSING),
]
# A name that would run as a script if it were ever taken for markup.
EVIL = '<img src=x onerror="document.title=1">'


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
                    for words in ("step 40", "Waiting for:", "generation", "vllm-0", "coming back", "closes", "vllm-1",
                                  "24 · 18.4 · 32", "25 % · 40 %", "Beside serving", "0.41 s", "−0.031 s", "3 of 940, 1"):
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
