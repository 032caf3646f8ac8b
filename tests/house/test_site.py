"""The documentation as a site: every link leads somewhere, nothing is fetched from elsewhere, what is generated is up to date."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"
PLAIN_KEYS = {"sim", "cost"}  # sections whose names say it all, for those who know the simulator


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Fetched(HTMLParser):
    """What a browser fetches of its own accord for a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in ("script", "img", "iframe", "source", "video", "audio", "embed"):
            self.found.append(given.get("src") or "")
        if tag == "link" and given.get("rel") != "canonical":
            self.found.append(given.get("href") or "")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocstrings", reason="pip install 'rl-coserve[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def test_the_site_is_built_with_every_page_and_link_checked(site: Path) -> None:
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in ROOT.glob("docs/**/*.md")}
    named = {page.with_name("index.html") if page.name == "README.html" else page for page in pages}
    assert {str(page) for page in named if not (site / page).is_file()} == set()


def test_a_reader_of_the_site_fetches_nothing_from_elsewhere(site: Path) -> None:
    elsewhere = set()
    for page in site.glob("**/*.html"):
        parser = Fetched()
        parser.feed(page.read_text(encoding="utf-8"))
        elsewhere |= {f"{page.name}: {link}" for link in parser.found if re.match(r"(https?:)?//", link)}
    for sheet in site.glob("**/*.css"):
        text = sheet.read_text(encoding="utf-8")
        elsewhere |= set(re.findall(r"@import[^;]*//[^;]*|url\([\"']?(?:https?:)?//[^)]*\)", text))
    assert elsewhere == set()


@pytest.mark.parametrize(
    "name", ["Pipeline", "RolloutWorker", "Trajectory", "ConfigError", "TurnRouter", "StalenessBound"]
)
def test_the_reference_has_what_the_docstrings_say(site: Path, name: str) -> None:
    text = "".join((site / "api" / page).read_text(encoding="utf-8") for page in ("contracts.html", "policies.html"))
    assert (f".{name}" in text) == (name != "Pipeline")  # the loop is no contract and no policy


def test_a_link_into_nothing_would_end_the_build(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("mkdocstrings", reason="pip install 'rl-coserve[docs]'")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config
    from mkdocs.exceptions import Abort

    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "index.md"
    where = {"docs_dir": str(tmp_path / "docs"), "site_dir": str(tmp_path / "site"), "nav": ["index.md"], "plugins": []}
    for link, sound in (("[here](index.md)", True), ("[gone](gone.md)", False), ("[part](index.md#gone)", False)):
        page.write_text(f"# A page\n\n{link}\n")
        config = load_config(str(ROOT / "mkdocs.yml"), **where)
        with caplog.at_level(logging.WARNING, "mkdocs"):
            if sound:
                build(config)
            else:
                with pytest.raises(Abort):
                    build(config)


@pytest.mark.parametrize("name", ["config_reference", "draw_concepts", "draw_house", "draw_step"])
def test_what_is_generated_is_what_the_code_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [name])
    assert script(name).main() == 0


def test_every_key_of_a_config_has_a_meaning() -> None:
    rows, section = [], ""
    for text in script("config_reference").pages().values():
        for line in text.splitlines():
            section = line[3:] if line.startswith("## ") else section
            if line.startswith("| `"):
                rows.append((section, re.split(r"(?<!\\)\|", line)))
    assert len(rows) > 250
    assert [(name, row[1]) for name, row in rows if not row[4].strip() and name.split(".")[0] not in PLAIN_KEYS] == []


@pytest.mark.parametrize("figure", sorted(IMAGES.glob("*.svg")), ids=lambda path: path.name)
def test_every_figure_is_whole_says_what_it_shows_and_knows_dark_readers(figure: Path) -> None:
    text = figure.read_text(encoding="utf-8")
    tree = ElementTree.fromstring(text)
    assert tree.findtext("{http://www.w3.org/2000/svg}title")
    assert "prefers-color-scheme: dark" in text
    assert not re.search(r"href=|url\((?!#)|@import", text)
    width = float(tree.attrib["width"])
    for box in tree.iter("{http://www.w3.org/2000/svg}rect"):
        assert float(box.attrib.get("x", 0)) + float(box.attrib["width"]) <= width
    for line in tree.iter("{http://www.w3.org/2000/svg}text"):
        room = {"start": width - float(line.attrib["x"]), "middle": width, "end": float(line.attrib["x"])}
        assert (
            8.5 * len(line.text or "") * (0.8 if "small" in line.attrib["class"] else 1)
            <= room[line.attrib["text-anchor"]]
        )


def features() -> list[str]:
    """The pages below *Features* in the navigation."""
    part = (
        (ROOT / "mkdocs.yml")
        .read_text(encoding="utf-8")
        .partition("  - Features:\n")[2]
        .partition("  - Reference:\n")[0]
    )
    return re.findall(r": (\w+\.md)$", part, re.M)


@pytest.mark.parametrize("page", features())
def test_every_page_of_a_feature_says_in_short_when_how_well_and_what_not(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    table = text.partition("| in short | |\n")[2].partition("\n\n")[0]
    rows = dict(re.findall(r"^\| ([a-z ]+) \| (.+) \|$", table, re.M))
    assert {"when", "measured", "limits", "watch"} <= set(rows) <= {"when", "not when", "measured", "limits", "watch"}
    assert re.search(r"\b(real|simulated|paper|none|no figure)\b", rows["measured"])
    named = re.findall(r"see \*([^*]+)\*", rows["limits"])
    assert all(re.search(rf"^#+ {re.escape(name)}$", text, re.M) for name in named)


def test_lists_and_tables_are_set_apart_so_that_every_reader_of_markdown_sees_them() -> None:
    run_on = []
    for page in sorted(ROOT.glob("docs/**/*.md")):
        inside, before = False, ""
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
            inside ^= line.startswith("```")
            item, table = re.match(r"([-*]|\d+\.) ", line), line.startswith("|")
            goes_on = re.match(r"\s*([-*]|\d+\.) |\s+\S", before) if item else before.startswith("|")
            if not inside and (item or table) and before.strip() and not goes_on:
                run_on.append(f"{page.name}:{number}: {line[:40]}")
            before = line
    assert run_on == []
