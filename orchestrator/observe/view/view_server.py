"""The web page of a run, or of the runs of a folder with a page for each: served on loopback (elsewhere with TLS only), behind a
token, fed by server-sent events.

Guarantees: what is sent is made at most once a second (the last of a run at once), once for all who look, and is bounded in
size; who reads slowly misses pictures and holds nobody up; a request without the token learns nothing; nothing outside of this
server is loaded by the page (the content security policy forbids it) and no page of others may frame it. The token stands in
the URL that is printed, then in a cookie that scripts cannot read; it is in no page and no event. ``/metrics`` takes it as a
bearer token.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Awaitable, Callable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from orchestrator.api import bearer
from orchestrator.api.listener_limits import LISTENERS, SERVER_OPTIONS, HttpListener
from orchestrator.api.tls import SYSTEM, Tls, check_listener
from orchestrator.observe.view.folder_follower import Follower
from orchestrator.observe.view.run_metrics import exposition
from orchestrator.observe.view.run_state import RunState
from orchestrator.observe.view.trajectory_routes import TrajectoryRoutes

SECONDS = 1.0  # between two pictures, at least
LOOK_SECONDS = 0.5  # between two looks at the folder
SILENT_SECONDS = 10.0  # a run that says nothing for so long is shown as silent
WATCHERS = 16  # pages at a time
_KEEP_ALIVE = 15.0  # seconds
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_REFUSED = "This page needs the URL with the token that the command printed, or the token as a bearer token.\n"
_FILES = {
    "report.css": ("orchestrator.observe.report", "page.css", "text/css"),
    "view.css": ("orchestrator.observe.view", "view.css", "text/css"),
    "view.js": ("orchestrator.observe.view", "view.js", "text/javascript"),
    "draw.js": ("orchestrator.observe.view", "draw.js", "text/javascript"),
    "trajectories.js": ("orchestrator.observe.view", "trajectories.js", "text/javascript"),
    "runs.js": ("orchestrator.observe.view", "runs.js", "text/javascript"),
}
Answer = TypeVar("Answer", bound=web.StreamResponse)
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class PictureFeed:
    """What a page is fed from: the newest picture, as JSON, for all who look."""

    page: str  # the file

    def __init__(self) -> None:
        self.picture = b""  # the newest
        self.number = 0  # counts pictures
        self._changed = asyncio.Condition()

    async def draw(self, shown: Mapping[str, Any]) -> None:
        """Wake those who wait, when it is another picture."""
        picture = json.dumps(shown, separators=(",", ":"), allow_nan=False).encode()
        if picture != self.picture:
            async with self._changed:
                self.picture, self.number = picture, self.number + 1
                self._changed.notify_all()

    async def newer_than(self, seen: int) -> tuple[int, bytes]:
        """The newest picture and its number, once that is another than ``seen``."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.number != seen)
            return self.number, self.picture


class Hub(PictureFeed):
    """Follows one run folder for all who look. ``take`` is given every event, too: for exporters."""

    page = "page.html"

    def __init__(self, folder: Path, take: Callable[[dict[str, Any]], None] | None = None) -> None:
        super().__init__()
        self.folder = folder
        self.state = RunState(folder)
        self.follower = Follower(folder)
        self.trajectories = TrajectoryRoutes(folder)
        self.reading: int | None = 0  # percent of the log, the first time that it is read; None: it has been
        self._take = take
        self._dirty = self._drawn_over = False
        self._drawn_at = float("-inf")

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_SECONDS)

    async def look(self) -> None:
        """Read what is new; make a picture of it, once a second at most. While a long log is first read, pictures say so."""
        loop = asyncio.get_running_loop()
        changed = False
        while True:
            for event in self.follower.events():
                changed = True
                self.state.take(event)
                if self._take is not None:
                    self._take(event)
            if not self.follower.behind:
                break
            if self.reading is not None:
                self.reading = self.follower.percent()
                if loop.time() - self._drawn_at >= SECONDS:
                    self._drawn_at = loop.time()
                    await self.draw(self.state.shown() | {"silent": 0, "reading": self.reading})
            await asyncio.sleep(0)
        first, self.reading = self.reading is not None, None
        if (record := self.follower.live()) is not None:
            changed = True
            self.state.figures.take_live(record)
        silent = self.silent()
        now = loop.time()
        self._dirty = changed or self._dirty or silent > 0
        ended = (
            self.state.figures.over and not self._drawn_over
        )  # the last picture is not waited for: who made it may be gone then
        if first or (self._dirty and (ended or now - self._drawn_at >= SECONDS)):
            self._drawn_at, self._dirty, self._drawn_over = now, False, self.state.figures.over
            await self.draw(self.state.shown() | {"silent": silent})

    def silent(self) -> int:
        """Seconds without a sign of life of a run that has not ended; 0: there are some, or it never gave any."""
        seconds = None if self.state.figures.over else self.follower.silent_for
        return int(seconds) if seconds is not None and seconds >= SILENT_SECONDS else 0


class Server:
    """``port`` 0: a free one; then :attr:`url` says where. On loopback; on another ``host`` only with TLS, else ConfigError.
    ``token``: see :class:`orchestrator.api.bearer.Token`. ``hubs``: of runs by name, each of which has a page of its own under
    ``run/NAME/``."""

    def __init__(
        self,
        shown: PictureFeed,
        token: str,
        port: int = 0,
        host: str = "127.0.0.1",
        tls: Tls = SYSTEM,
        *,
        hubs: Callable[[], Mapping[str, Hub]] = dict,
    ) -> None:
        self._top, self._hubs = shown, hubs
        self._token, self.port, self._host = bearer.Token(token, "view.token_file"), port, host
        self._context = check_listener(host, tls, "view.host")
        self._listener = HttpListener(LISTENERS["live page"])
        self._watchers = 0
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Raises OSError when the port is taken."""
        app = web.Application(middlewares=[self._listener.middleware, self._guard])
        for place in ("/", "/run/{run}/"):
            app.router.add_get(place, self._page)
            app.router.add_get(f"{place}stream", self._stream)
            app.router.add_get(f"{place}state.json", self._state)
            app.router.add_get(f"{place}metrics", self._metrics)
            app.router.add_get(f"{place}trajectories", self._trajectories)
            app.router.add_get(f"{place}trajectories.json", self._lines)
            app.router.add_get(f"{place}trajectory.json", self._trajectory)
            for name in _FILES:
                app.router.add_get(f"{place}{name}", self._file)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5, **SERVER_OPTIONS)
        await self._runner.setup()
        assert self._runner.server is not None
        server = await self._listener.listen(self._runner.server, self._host, self.port, context=self._context)
        self.port = server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Idempotent."""
        self._listener.close()
        if self._runner is not None:
            await self._runner.cleanup()

    @property
    def url(self) -> str:
        """With the token: for the eyes of whoever started this."""
        return f"{page_url(self._host, self.port, self._context is not None)}?token={self._token.current()}"

    @property
    def _cookie(self) -> str:
        return f"rl_coserve_view_{self.port}"  # cookies know hosts, not ports

    @web.middleware
    async def _guard(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        given = request.query.get("token", "")
        if given and self._token.matches(given) and request.path == "/":
            home, secure = web.Response(status=303, headers={"Location": "/"}), self._context is not None
            home.set_cookie(self._cookie, given, httponly=True, samesite="Strict", secure=secure)
            return _headed(home)
        shown = self._token.matches(request.cookies.get(self._cookie, ""))
        if not (shown or self._token.admits(request.headers.get("Authorization"))):
            return _headed(web.Response(status=401, text=_REFUSED))
        try:
            answer = await handler(request)
        except web.HTTPException as error:
            _headed(error)
            raise
        return answer if answer.prepared else _headed(answer)

    def _shown(self, request: web.Request) -> PictureFeed:
        """What the address means. Raises HTTPNotFound for a run that is not there."""
        if "run" not in request.match_info:
            return self._top
        found = self._hubs().get(request.match_info["run"])
        if found is None:
            raise web.HTTPNotFound(text="There is no such run.\n")
        return found

    async def _page(self, request: web.Request) -> web.Response:
        return web.Response(
            text=_text("orchestrator.observe.view", self._shown(request).page), content_type="text/html"
        )

    async def _file(self, request: web.Request) -> web.Response:
        package, name, kind = _FILES[request.path.rpartition("/")[2]]
        return web.Response(text=_text(package, name), content_type=kind)

    async def _state(self, request: web.Request) -> web.Response:
        picture = self._shown(request).picture
        if not picture:
            return _not_read(0)
        return web.Response(body=picture, content_type="application/json")

    async def _metrics(self, request: web.Request) -> web.Response:
        hub = self._run(request)
        if hub.reading is not None:  # counters of half a log would be taken for a run that is fast
            return _not_read(hub.reading)
        free = shutil.disk_usage(hub.folder).free if hub.folder.exists() else 0
        body = exposition(hub.state, hub.silent(), free)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _trajectories(self, request: web.Request) -> web.Response:
        self._run(request)
        return web.Response(text=_text("orchestrator.observe.view", "trajectories.html"), content_type="text/html")

    async def _lines(self, request: web.Request) -> web.Response:
        return web.json_response(await self._run(request).trajectories.lines(request.query))

    async def _trajectory(self, request: web.Request) -> web.Response:
        return web.json_response(await self._run(request).trajectories.one(request.query.get("id", "")))

    def _run(self, request: web.Request) -> Hub:
        """Raises HTTPNotFound where the address means no single run."""
        shown = self._shown(request)
        if not isinstance(shown, Hub):
            last = request.path.rpartition("/")[2]
            raise web.HTTPNotFound(text=f"Each run has its own: run/NAME/{last}\n")
        return shown

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        shown = self._shown(request)
        if self._watchers >= WATCHERS:
            return web.Response(status=503, text=f"{WATCHERS} pages look at this already\n")
        self._watchers += 1
        try:
            answer = _headed(web.StreamResponse(headers={"Content-Type": "text/event-stream"}))
            await answer.prepare(request)
            number = 0  # there is none yet
            while True:
                try:
                    async with asyncio.timeout(_KEEP_ALIVE):
                        number, picture = await shown.newer_than(number)
                    await answer.write(b"data: " + picture + b"\n\n")
                except TimeoutError:
                    await answer.write(b": nothing new\n\n")
        except ConnectionResetError:  # the page was closed
            return answer
        finally:
            self._watchers -= 1


def page_url(host: str, port: int, tls: bool) -> str:
    """Where a page is."""
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}/"


def _not_read(percent: int) -> web.Response:
    return web.Response(status=503, text=f"reading the log, {percent} %; ask again\n")


def _headed(answer: Answer) -> Answer:
    answer.headers.update(_HEADERS)
    return answer


def _text(package: str, name: str) -> str:
    return files(package).joinpath(name).read_text(encoding="utf-8")
