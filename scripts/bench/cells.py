"""Parts of a figure that are measured one by one: a file each, with what it was measured on.

Guarantees: a part that is there is not measured again; a part begun and not finished leaves nothing; parts of different sources,
or of a tree with changes, are never put together.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestrator.api import ConfigError
from orchestrator.durable_files import write_durably
from scripts.bench.result import source


class Cells:
    """The parts of figure ``name`` in ``folder``; ``recipe``: what all of them were asked for, in the files' names."""

    def __init__(self, folder: Path, name: str, recipe: str = "") -> None:
        self.folder, self._name = folder, name
        self._prefix = f"kept-{recipe}-" if recipe else "kept-"

    def has(self, key: str) -> bool:
        """Whether the part was measured."""
        return self._file(key).exists()

    def keep(self, key: str, found: Any) -> None:
        """Write one down."""
        self.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"source": source(self._name), "found": found}) + "\n"
        write_durably(self._file(key), text)

    def found(self) -> list[Any]:
        """All that there are, in the order of their names. Raises ConfigError where they are not of one clean source."""
        files = sorted(self.folder.glob(f"{self._prefix}*.json"))
        cells = [json.loads(file.read_text(encoding="utf-8")) for file in files]
        check_agreement(dict(zip((file.name for file in files), (cell["source"] for cell in cells), strict=True)))
        return [cell["found"] for cell in cells]

    def _file(self, key: str) -> Path:
        return self.folder / f"{self._prefix}{key}.json"


def check_agreement(sources: Mapping[str, Mapping[str, Any]]) -> None:
    """All parts were measured on the same sources, as they were committed. Raises ConfigError, which names one that was not."""
    changed = next((name for name, one in sources.items() if not one["clean"]), None)
    if changed is not None:
        raise ConfigError("cells", changed, "was measured on a tree with changes: commit them, and measure it again")
    first = next(iter(sources.items()), None)
    for name, one in sources.items():
        if first is not None and one["sources"] != first[1]["sources"]:
            fix = f"was measured on other sources than {first[0]}: remove it, and measure it again"
            raise ConfigError("cells", name, fix)
