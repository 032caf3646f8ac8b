#!/usr/bin/env python3
"""Takes the pictures of pages in docs/images from a real run that has ended: its live page in light and dark, and its report.

    python scripts/page_pictures.py RUN

Needs Chromium. Pictures have 128 colours, which these pages do with: a quarter of the bytes.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from PIL import Image  # noqa: E402

from orchestrator.observe.report.report_page import write_report  # noqa: E402
from orchestrator.observe.view.view_server import Hub, Server  # noqa: E402
from tests.support.view_browser import browser  # noqa: E402

IMAGES = ROOT / "docs" / "images"
WIDTH, HEIGHT = 1160, 1500  # of the page, from its top
COLOURS = 128


async def take(run: Path) -> None:
    """All three."""
    hub = Hub(run)
    server = Server(hub, "token-for-the-pictures")
    await server.start()
    following = asyncio.create_task(hub.run())
    try:
        for name, dark in (("view.png", False), ("view-dark.png", True)):
            await shoot(server.url, "document.body.dataset.drawn > 0", name, dark)
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await server.close()
    await shoot(write_report(run).as_uri(), "document.querySelector('svg')", "report.png", False)


async def shoot(url: str, drawn: str, name: str, dark: bool) -> None:
    """One page, when the expression ``drawn`` is true of it."""
    async with browser(width=WIDTH, height=HEIGHT, dark=dark) as page:
        await page.go(url)
        await page.until(drawn)
        await asyncio.sleep(1)  # lines that are drawn with a transition
        await page.picture(IMAGES / name)
    with Image.open(IMAGES / name) as file:
        whole = file.convert("RGB")
    part = whole.crop((0, 0, WIDTH, min(HEIGHT, whole.height)))
    part.quantize(COLOURS, dither=Image.Dither.NONE).save(IMAGES / name, optimize=True)
    print(f"docs/images/{name}: {(IMAGES / name).stat().st_size // 1000} kB")


if __name__ == "__main__":
    if len(sys.argv) != 2 or not (Path(sys.argv[1]) / "summary.json").is_file():
        sys.exit("usage: scripts/page_pictures.py RUN, the folder of a run that has ended")
    asyncio.run(take(Path(sys.argv[1]).resolve()))
