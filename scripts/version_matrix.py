"""The table of versions in docs/install.md, made from :mod:`orchestrator.hooks.tested_versions`.

``scripts/version_matrix.py docs/install.md`` writes it anew between its two markers; a test holds the two together.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from orchestrator.hooks.tested_versions import COMPONENTS, TORCH, TriedVersion

START = "<!-- made by: scripts/version_matrix.py docs/install.md -->"
END = "<!-- end of it -->"


def version_table() -> str:
    """Markdown: what is accepted, and which of it was tried how."""
    rows = [("", "accepted", "version", "what was tested")]
    for component in sorted(COMPONENTS, key=lambda component: component.name == "Python"):
        rows += _rows(component.name, str(component.tested), component.tried)
    rows += _rows("PyTorch", "as the engines pin it", (TORCH,))
    lines = [f"| {' | '.join(row)} |".replace("|  |", "| |") for row in rows]
    return "\n".join([lines[0], "| --- | --- | --- | --- |", *lines[1:]])


def _rows(name: str, accepted: str, tried: Sequence[TriedVersion]) -> list[tuple[str, str, str, str]]:
    """Versions that were tried alike share a row."""
    return [
        (name, accepted.replace(">=", "≥ ").replace(",<", ", < "), ", ".join(_version(item) for item in group), how)
        for how, group in groupby(tried, key=lambda item: item.how)
    ]


def _version(tried: TriedVersion) -> str:
    return f"{tried.version} ({tried.build})" if tried.build else tried.version


def replace_table(page: str) -> str:
    """The page with the table of now. Raises ValueError where the markers are not there."""
    before, start, rest = page.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise ValueError(f"the page needs the lines {START!r} and {END!r}")
    return f"{before}{START}\n\n{version_table()}\n\n{END}{after}"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        Path(name).write_text(replace_table(Path(name).read_text(encoding="utf-8")), encoding="utf-8")
