"""Parts of a figure that are measured one by one: a file each, with what it was measured on.

Guarantees: a part that is there is not measured again; a part begun and not finished leaves nothing; one is kept only where the
sources are still those that it began with; parts of different sources, or of a tree with changes, are never put together.
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
    """The parts of figure ``name`` in ``folder``; ``recipe``: what all of them were asked for, in the files' names. ``source``:
    what is measured, from now on."""

    def __init__(self, folder: Path, name: str, recipe: str = "") -> None:
        self.folder, self._name = folder, name
        self._prefix = f"kept-{recipe}-" if recipe else "kept-"
        self.source = source(name)

    def has(self, key: str) -> bool:
        """Whether the part was measured."""
        return self._file(key).exists()

    def keep(self, key: str, found: Any) -> None:
        """Write one down. Raises ConfigError where the sources changed since this was made."""
        now = source(self._name)
        if (now["sources"], now["clean"]) != (self.source["sources"], self.source["clean"]):
            raise ConfigError("cells", key, "the sources changed while it was measured: start again, it is not kept")
        self.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"source": self.source, "found": found}) + "\n"
        write_durably(self._file(key), text)

    def found(self) -> list[Any]:
        """All that there are, in the order of their names. Raises ConfigError where they are not of one clean source."""
        cells = self._kept()
        check_agreement({name: cell["source"] for name, cell in cells.items()})
        return [cell["found"] for cell in cells.values()]

    def measured_on(self) -> dict[str, Any]:
        """The source of all that there are: the first one's commit. Raises ConfigError as :meth:`found`, and where there are
        none."""
        cells = self._kept()
        check_agreement({name: cell["source"] for name, cell in cells.items()})
        first = next(iter(cells.values()), None)
        if first is None:
            raise ConfigError("cells", str(self.folder), f"has no part of {self._name}: measure them first")
        return dict(first["source"])

    def check_current(self) -> None:
        """More can be added to what there is. Raises ConfigError: the tree has changes, or is not the one of the others."""
        kept = {name: one["source"] for name, one in self._kept().items()}
        check_agreement({"the tree as it is": self.source} | kept)

    def _kept(self) -> dict[str, Any]:
        files = sorted(self.folder.glob(f"{self._prefix}*.json"))
        return {file.name: json.loads(file.read_text(encoding="utf-8")) for file in files}

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
