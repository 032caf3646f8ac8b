"""Watches the event loop of a real ``vllm serve`` from inside: an endpoint plugin on vLLM's own hook, loaded by name.

:func:`installed` writes the entry point into a folder that the server has on its path; with ``VLLM_PLUGINS`` naming it, vLLM
loads it as any other, and ``GET /stalls`` says what held the loop up since the last call.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

NAME = "stall-watch"


def installed(folder: Path) -> str:
    """The folder for PYTHONPATH, this file's among it."""
    info = folder / "stall_watch-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stall-watch\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[vllm.endpoint_plugins]\n{NAME} = stall_server:StallPlugin\n")
    return f"{folder}:{Path(__file__).parent}"


class StallPlugin:
    """See vLLM's ``EndpointPlugin``."""

    name = NAME
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self.watch: Any = None

    def attach_router(self, app: Any) -> None:
        async def stalls() -> list[dict[str, Any]]:
            found = [stall.to_dict() for stall in self.watch.found()]
            self.watch.stalls.clear()
            return found

        app.add_api_route("/stalls", stalls)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        from scripts.bench.micro.stalls import StallWatch

        self.watch = StallWatch().start()
