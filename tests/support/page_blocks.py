"""Code of the pages, for tests that run it as it stands."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def page_block(page: str, having: str, language: str = "python") -> str:
    """The one block of a page (from the repository's root) that has these words."""
    text = (ROOT / page).read_text(encoding="utf-8")
    (found,) = (one for one in re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL) if having in one)
    return str(found)
