"""Pages, configs and messages keep to the words that CONTRIBUTING.md asks for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "SECURITY.md", "CHANGELOG.md"]
PAGES += sorted(
    str(path.relative_to(ROOT))
    for pattern in ("docs/*.md", "docs/recipes/*.md", "examples/*.toml", "orchestrator/config/*_keys.py")
    for path in ROOT.glob(pattern)
)
PAGES += ["orchestrator/ops/help_text.py", "orchestrator/cli.py", "orchestrator/observe/view/view.js"]
PAGES += sorted(
    str(path.relative_to(ROOT))
    for pattern in ("orchestrator/ops/templates/*", "orchestrator/observe/report/templates/*.html")
    for path in ROOT.glob(pattern)
)


def avoided() -> list[str]:
    table = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("\n## Words\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("|")][2:]
    return [phrase for row in rows for phrase in re.findall(r"`([^`]+)`", row)]


def found_in(text: str) -> list[str]:
    plain = re.sub(r"\s+", " ", text)
    return [phrase for phrase in avoided() if re.search(rf"(?<![\w.`]){re.escape(phrase)}\b", plain, re.I)]


def test_the_list_finds_what_it_names() -> None:
    assert len(avoided()) > 10
    assert found_in("Its users' /v1 goes\non; 40 tokens a second") == ["goes on", "tokens a second"]
    assert found_in("It continues at 40 tokens per second; a logon") == []


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_plain_english(page: str) -> None:
    assert found_in((ROOT / page).read_text(encoding="utf-8")) == []
