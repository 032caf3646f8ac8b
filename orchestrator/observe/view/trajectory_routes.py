"""The trajectories of a run on its page: a list that is asked for by task, step, end and reward, and one of them turn by turn.

Guarantees: the store is read beside the event loop, for one page at a time; what is sent is bounded in lines and characters; a
question that makes no sense is 400 with the reason, a trajectory that is not there 404.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from aiohttp import web

from orchestrator.api import ConfigError
from orchestrator.observe.trajectory_reader import TrajectoryChoice, TrajectoryReader

LINES = 50  # of a list, at most


class TrajectoryRoutes:
    """Answers for one run folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._one = asyncio.Lock()
        self._reader: TrajectoryReader | None = None

    async def lines(self, query: Mapping[str, str]) -> dict[str, Any]:
        """Of the query's ``task``, ``step``, ``cause``, ``least``, ``most``, ``order`` and ``first``. Raises HTTPBadRequest."""
        try:
            chosen = TrajectoryChoice(
                query.get("task", ""),
                int(query["step"]) if query.get("step") else None,
                query.get("cause", ""),
                least=float(query["least"]) if query.get("least") else None,
                most=float(query["most"]) if query.get("most") else None,
            )
            first = max(0, int(query.get("first") or 0))
            async with self._one:
                found, total = await asyncio.to_thread(self._read, chosen, query.get("order") or "newest", first)
        except (ConfigError, ValueError, OverflowError) as error:  # the last: of a step with many digits
            raise web.HTTPBadRequest(text=f"{error}\n") from error
        return {"trajectories": found, "total": total, "first": first, "most": LINES}

    async def one(self, identity: str) -> dict[str, Any]:
        """A trajectory turn by turn. Raises HTTPNotFound."""
        try:
            async with self._one:
                return await asyncio.to_thread(self._show, identity)
        except ConfigError as error:
            raise web.HTTPNotFound(text=f"{error}\n") from error

    def _read(self, chosen: TrajectoryChoice, order: str, first: int) -> tuple[list[dict[str, Any]], int]:
        return self._made().lines(chosen, order, first, LINES)

    def _show(self, identity: str) -> dict[str, Any]:
        reader = self._made()
        return {**asdict(reader.read(reader.find(identity))), "missing": reader.tokens.missing}

    def _made(self) -> TrajectoryReader:
        """Anew while there is no tokenizer: a run that begins writes it later."""
        if self._reader is None or self._reader.tokens.missing:
            self._reader = TrajectoryReader(self._folder)
        return self._reader
