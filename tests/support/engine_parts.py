"""What stands for a process of an engine over several nodes: it keeps what it was told."""

from __future__ import annotations

import asyncio
from typing import Any


class Part:
    """Never ends by itself."""

    def __init__(self, **options: Any) -> None:
        self.options = options

    def told(self) -> dict[str, Any]:
        return self.options

    async def ended(self) -> None:
        await asyncio.Event().wait()
