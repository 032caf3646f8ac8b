"""The runs of a folder on one page: ``rl-coserve view RUNS``.

Guarantees: each run is read as its own page reads it, and nothing but read; one that begins while this goes on appears by itself;
those that go on come first, then the newest; at most ``RUNS`` of a folder, those that said something last; a folder that is no
run, or is gone, is left out. What is sent of the list is made once a second at most, and bounded in size.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from orchestrator.observe.curves import HEADLINES
from orchestrator.observe.run_figures import lag_mean, number
from orchestrator.observe.view.view_server import SECONDS, Hub, PictureFeed

RUNS = 100  # that are shown
TEXT = 200  # characters of a reason
_LOOK_SECONDS = 1.0  # between two looks at the folders


def runs_in(folder: Path) -> list[Path]:
    """The run folders in a folder, the one that said something last first; the link to the newest is none."""
    try:
        found = [(_spoke(path), path) for path in folder.iterdir() if _is_run(path)]
    except OSError:
        return []
    return [path for _, path in sorted(found, key=lambda item: (-item[0], item[1].name))]


def _is_run(path: Path) -> bool:
    """Not one that this account may not look into: others are still shown."""
    try:
        return not path.is_symlink() and (path / "config.json").is_file()
    except OSError:
        return False


def _spoke(folder: Path) -> float:
    """When a run wrote its log last, in seconds of the wall clock; 0: never."""
    try:
        return (folder / "events.jsonl").stat().st_mtime
    except OSError:
        return 0.0


class Runs(PictureFeed):
    """Follows the runs of one folder for all who look. As a :class:`Hub`, with one for each run in :attr:`hubs`, by name."""

    page = "runs.html"

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.hubs: dict[str, Hub] = {}
        self._folder = folder
        self._older = 0  # runs that are not shown
        self._drawn_at = float("-inf")

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(_LOOK_SECONDS)

    async def look(self) -> None:
        """Read what is new of each; the list is there from the first look on, and fills up while long logs are read."""
        found = await asyncio.to_thread(runs_in, self._folder)
        self._older = max(0, len(found) - RUNS)
        self.hubs = {path.name: self.hubs.get(path.name) or Hub(path) for path in found[:RUNS]}
        await self._draw()
        for hub in list(self.hubs.values()):
            await hub.look()
            await self._draw()
            await asyncio.sleep(0)
        self._drawn_at = float("-inf")
        await self._draw()

    async def _draw(self) -> None:
        now = asyncio.get_running_loop().time()
        if self.picture and now - self._drawn_at < SECONDS:
            return
        self._drawn_at = now
        rows = sorted((run_row(name, hub) for name, hub in self.hubs.items()), key=_order)
        await self.draw({"folder": self._folder.name, "older": self._older, "runs": rows})


def run_row(name: str, hub: Hub) -> dict[str, Any]:
    """One run in the list. ``folder`` is what its page is asked for by."""
    figures, silent = hub.state.figures, hub.silent()
    start = figures.start
    return {
        "folder": name,
        "state": _state(hub, silent),
        "reason": figures.reason[:TEXT],
        "silent": silent,
        "mode": figures.mode,
        "kind": figures.kind,
        "started": start.started if start else "",
        "t": round(figures.seconds, 1),
        "step": figures.step,
        "steps": figures.planned_steps,
        **{name: figures.curves[name].last for name in HEADLINES},
        "in_flight": int(figures.live.get("in_flight", 0)),
        "lag": number(lag_mean(figures.lag)),
        "faults": figures.incident_count("alarm", "fault"),
    }


def _state(hub: Hub, silent: int) -> str:
    figures = hub.state.figures
    if hub.reading is not None:
        return "reading the log"
    if figures.over:
        return figures.status
    return "silent" if silent else "running" if figures.start else "starting"


def _order(found: dict[str, Any]) -> tuple[bool, list[int], str]:
    """Those that go on first, then the newest."""
    return found["state"] not in ("running", "starting"), [-ord(sign) for sign in found["started"]], found["folder"]
