"""The threat model of docs/security.md can be checked: every line that somebody is held by names tests, and they are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
NAMED = re.compile(r"`(tests/[\w/.]+\.py)(?:::(\w+))?`")
TRUSTED = "whoever starts the run"


def rows(heading: str) -> list[list[str]]:
    """Cells of the first table below a heading."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def collected(file: Path) -> set[str]:
    """Tests that pytest finds in a file."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {node.name for node in functions if node.name.startswith("test_")}


@pytest.mark.parametrize("row", rows("Who could do harm"), ids=lambda row: row[0][:40])
def test_whoever_could_do_harm_is_held_by_tests(row: list[str]) -> None:
    who, holds, worst, held = row
    assert holds
    assert worst
    named = NAMED.findall(held)
    assert all(test for _, test in named), f"{who}: name the tests, not their files"
    assert bool(named) != who.startswith(TRUSTED), who


@pytest.mark.parametrize("row", rows("What holds"), ids=lambda row: row[0][:40])
def test_each_border_names_tests(row: list[str]) -> None:
    assert NAMED.findall(" ".join(row)), row[0]


def test_every_test_that_the_page_names_is_collected() -> None:
    named = NAMED.findall(PAGE)
    assert len([test for _, test in named if test]) >= 30
    for file, test in named:
        found = collected(ROOT / file) if (ROOT / file).name.startswith("test_") and (ROOT / file).is_file() else set()
        if test:
            assert test in found, f"{file}::{test}"
        else:
            assert (ROOT / file).is_file(), file


def test_the_advice_for_who_finds_a_hole_names_no_address() -> None:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    assert "private advisory" in text
    assert "@" not in text
    assert "://" not in text
