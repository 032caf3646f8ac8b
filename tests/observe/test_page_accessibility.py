"""Every page in a real browser, on a phone, a tablet and a desk, in light and dark: nothing beside the screen, nothing cut, and
axe-core has nothing to object to (WCAG 2.1, A and AA: contrast, labels, names, the keyboard)."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from orchestrator.api import Prompt, Trajectory, Turn
from orchestrator.observe.report.report_page import write_report
from orchestrator.observe.view import view_server
from orchestrator.observe.view.runs_page import Runs
from orchestrator.observe.view.view_server import Server
from orchestrator.store import TrajectoryStore
from tests.support import view_browser as chromium
from tests.support import view_runs as runs

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(chromium.PROGRAM is None, reason=chromium.MISSING),
    pytest.mark.skipif(not chromium.AXE.is_file(), reason=chromium.NO_AXE),
]
TOKEN = "token-of-this-test-1234"
SIZES = ((360, 740), (768, 1024), (1280, 900))
BEYOND = """[...document.querySelectorAll("body *")]
  .filter((one) => !one.closest(".scroll") && !(one instanceof SVGElement)
    && one.checkVisibility() && one.getBoundingClientRect().right > window.innerWidth + 1)
  .map((one) => one.outerHTML.slice(0, 120))"""
SCROLLED = """[...document.querySelectorAll(".scroll")].filter((one) => one.scrollWidth > one.clientWidth + 1)
  .map((one) => `${one.ariaLabel}: ${one.scrollWidth} of ${one.clientWidth}`)"""
DRAWN = {  # page -> its address behind the server's, and what is true once it is there
    "runs": ("", "document.querySelectorAll('#runs tbody tr').length === 2"),
    "live": ("run/alpha-001/", "document.body.dataset.drawn === '40'"),
    "trajectories": ("run/alpha-001/trajectories", "document.querySelectorAll('tbody a').length > 20"),
    "trajectory": ("run/alpha-001/trajectories#id=t010", "document.querySelectorAll('.turn').length === 2"),
    "report": ("", "document.querySelectorAll('svg').length > 2"),
    "comparison": ("", "document.querySelectorAll('svg').length > 2"),
}


def write_runs(folder: Path) -> None:
    """Two runs that are under way; the first has trajectories, of which some failed."""
    for name in ("alpha-001", "beta-002"):
        runs.write_unfinished(folder / name)
        (folder / name / "config.json").write_text("{}")
    store = TrajectoryStore(folder / "alpha-001" / "trajectories")
    for number in range(30):
        versions = tuple((version, 2) for version in range(6))  # one of each colour; axe looks at no single character
        said = Turn((1, 3), (1, 2) * 6, (-1.0,) * 12, versions, number % 3 - 1.0)
        made = Trajectory(
            *(f"t{number:03d}", f"g{number // 8}", "frozenlake", Prompt("key", "frozenlake", number, "SFFH" * 20)),
            *((said, said), number / 30, "1", 1, False, (), 1.0, 2.0, 3.0),
        )
        store.append(made, 39, "trained" if number % 2 else "failed: env_timeout")
    store.close()


@asynccontextmanager
async def address_of(name: str, folder: Path) -> AsyncIterator[tuple[str, str]]:
    """Where to get the token's cookie, and the page itself; a report is a file."""
    if name in ("report", "comparison"):
        of = ["alpha-001", "beta-002"] if name == "comparison" else ["alpha-001"]
        file = write_report([folder / one for one in of]).as_uri()
        yield file, file
        return
    shown = Runs(folder)
    server = Server(shown, TOKEN, hubs=lambda: shown.hubs)
    await server.start()
    following = asyncio.create_task(shown.run())
    try:
        yield server.url, server.url.split("?")[0] + DRAWN[name][0]
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await server.close()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("name", DRAWN)
def test_a_page_fits_every_screen_and_everyone_can_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, dark: bool
) -> None:
    monkeypatch.setattr(view_server, "SILENT_SECONDS", 3600.0)  # nobody writes these runs any more
    write_runs(tmp_path)
    pictures = Path(os.environ.get("VIEW_PICTURES", tmp_path))

    async def main() -> dict[str, list[str]]:
        found = {}
        async with address_of(name, tmp_path) as (first, url), chromium.browser(dark=dark) as page:
            await page.go(first)
            await page.until("document.title")
            if url != first:
                await page.go(url)
            await page.until(DRAWN[name][1])
            for width, height in SIZES:
                await page.resize(width, height)
                await asyncio.sleep(1.5)  # what is drawn again every second is drawn for this width
                assert await page.value("window.innerWidth") == width
                await page.value("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
                if await page.value("document.documentElement.scrollWidth > window.innerWidth"):
                    found[f"{width} beside the screen"] = await page.value(BEYOND)
                if url != first or name == "runs":  # a report's widest tables are scrolled
                    found[f"{width} beside a table"] = await page.value(SCROLLED)
                found[f"{width} cut"] = await page.value(chromium.CUT)
                found[f"{width} axe"] = await page.axe()
                await page.picture(pictures / f"{name}-{width}{'-dark' if dark else ''}.png")
            found["complaints"] = page.complaints
        return {where: what for where, what in found.items() if what}

    found = asyncio.run(main())
    assert not found, json.dumps(found, indent=1)
