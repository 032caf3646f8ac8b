"""What contributors are told is so: hooks are the Makefile's checks, links lead somewhere, the changelog knows this version."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import orchestrator

ROOT = Path(__file__).parents[2]
PAGES = ["CONTRIBUTING.md", "AGENTS.md", "SECURITY.md", "CHANGELOG.md"]


def recipe(target: str) -> set[str]:
    """What `make TARGET` runs, with the folder of the environment spelled out."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    found = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", text, re.M)
    assert found is not None
    return {line.strip().lstrip("@").replace("$(BIN)", ".venv/bin") for line in found[1].splitlines()}


def test_the_hooks_before_a_commit_are_the_checks_of_make() -> None:
    yaml = pytest.importorskip("yaml")
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    assert repository["repo"] == "local"
    assert {hook["entry"] for hook in repository["hooks"]} == recipe("lint") | recipe("types")
    assert all(hook["language"] == "system" and hook["pass_filenames"] is False for hook in repository["hooks"])


def test_the_hooks_are_a_config_that_pre_commit_takes() -> None:
    pytest.importorskip("pre_commit", reason="pip install 'rl-coserve[dev]'")
    command = [sys.executable, "-m", "pre_commit", "validate-config", str(ROOT / ".pre-commit-config.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", PAGES)
def test_every_link_of_a_page_for_contributors_leads_somewhere(page: str) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", (ROOT / page).read_text(encoding="utf-8"))
    assert links
    assert [link for link in links if not link.startswith("http") and not (ROOT / link).exists()] == []


def test_the_changelog_begins_with_this_version() -> None:
    versions = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert versions[0] == orchestrator.__version__


def test_every_place_that_the_guide_names_exists() -> None:
    text = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
    table = text.partition("## Where things are")[2].partition("\n## ")[0]
    named = re.findall(r"`([\w./]+)`", table)
    assert len(named) > 10
    assert [name for name in named if not (ROOT / name).exists()] == []
