"""A real headless Chromium for the tests of pages, driven over its DevTools socket: nothing but aiohttp is needed."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

PROGRAM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
MISSING = "no Chromium is installed (Debian: apt-get install chromium)"
AXE = Path(os.environ.get("AXE_CORE") or Path(__file__).parents[2] / "node_modules" / "axe-core" / "axe.min.js")
NO_AXE = "no axe-core: `npm install --no-save axe-core` here, or AXE_CORE=/path/to/axe.min.js"
# Whole values that are not all to be seen.
CUT = """[...document.querySelectorAll(".card-value, .card-label, .card-detail, .bars span, dd, td")]
  .filter((one) => one.checkVisibility() && one.scrollWidth > one.clientWidth + 1 && getComputedStyle(one).display !== "inline")
  .map((one) => one.innerText)"""
_AXE_RUN = """axe.run(document, {runOnly: ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]}).then((found) => found.violations.flatMap(
  (rule) => rule.nodes.map((node) => `${rule.id} ${node.target}: ${node.failureSummary}`)))"""


class Page:
    """One tab. ``complaints``: what the browser wrote to its console, security violations included, and uncaught errors;
    ``requested``: every address that it asked for."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._session = ""
        self.complaints: list[str] = []
        self.requested: list[str] = []

    async def listen(self) -> None:
        async for message in self._socket:
            said = json.loads(message.data)
            if (waiting := self._answers.pop(said.get("id", 0), None)) is not None:
                waiting.set_result(said)
            elif said.get("method") == "Runtime.exceptionThrown":
                self.complaints.append(str(said["params"]["exceptionDetails"]))
            elif said.get("method") == "Log.entryAdded":
                self.complaints.append(str(said["params"]["entry"]["text"]))
            elif said.get("method") == "Network.requestWillBeSent":
                self.requested.append(str(said["params"]["request"]["url"]))

    async def tell(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": parameters}
        await self._socket.send_json(message | ({"sessionId": self._session} if self._session else {}))
        async with asyncio.timeout(60):
            found = await answer
        assert "error" not in found, found
        result: dict[str, Any] = found["result"]
        return result

    async def open(self, width: int, height: int, dark: bool) -> None:
        target = (await self.tell("Target.createTarget", url="about:blank"))["targetId"]
        self._session = (await self.tell("Target.attachToTarget", targetId=target, flatten=True))["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.tell(f"{domain}.enable")
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        await self.tell("Emulation.setEmulatedMedia", features=scheme)
        await self.resize(width, height)

    async def resize(self, width: int, height: int) -> None:
        await self.tell(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )

    async def go(self, url: str) -> None:
        await self.tell("Page.navigate", url=url)

    async def value(self, expression: str) -> Any:
        """Of a promise, what it comes to."""
        found = await self.tell("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def until(self, expression: str, seconds: float = 60.0) -> None:
        """Until the expression is true. Fails after ``seconds``, with what the page says."""
        try:
            async with asyncio.timeout(seconds):
                while not await self.value(f"document.body !== null && Boolean({expression})"):
                    await asyncio.sleep(0.05)
        except TimeoutError:
            text = await self.value("document.body ? document.body.innerText : ''")
            raise AssertionError(f"never true: {expression}\n{self.complaints}\n{text}") from None

    async def axe(self) -> list[str]:
        """What breaks WCAG 2.1 A or AA, as axe-core finds it, in words."""
        await self.value(f"void 0;\n{AXE.read_text(encoding='utf-8')};\nvoid 0")
        found: list[str] = await self.value(_AXE_RUN)
        return found

    async def picture(self, file: Path) -> None:
        """Of the whole page, as PNG."""
        shot = await self.tell("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(shot["data"]))


@asynccontextmanager
async def browser(*, width: int = 1160, height: int = 900, dark: bool = False) -> AsyncIterator[Page]:
    """A tab of a browser of its own, which is gone afterwards."""
    assert PROGRAM is not None, MISSING
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            *(PROGRAM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
            *("--remote-debugging-port=0", f"--user-data-dir={profile}", "--hide-scrollbars", "about:blank"),
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(60):
                port_file = Path(profile) / "DevToolsActivePort"
                while not port_file.exists() or len(port_file.read_text().split()) < 2:
                    await asyncio.sleep(0.05)
            port, path = port_file.read_text().split()
            async with (
                aiohttp.ClientSession() as session,
                session.ws_connect(f"ws://127.0.0.1:{port}{path}", max_msg_size=64 << 20) as socket,
            ):
                page = Page(socket)
                listening = asyncio.create_task(page.listen())
                try:
                    await page.open(width, height, dark)
                    yield page
                finally:
                    listening.cancel()
                    await asyncio.gather(listening, return_exceptions=True)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
