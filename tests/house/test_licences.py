"""The licences of what this package depends on: known, allowed, and as docs/security.md says."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("licences", ROOT / "scripts" / "licences.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


licences = _script()


def test_every_dependency_that_is_installed_has_a_licence_that_is_allowed() -> None:
    wrong = []
    for name in {licences.name_of(one) for wanted in licences.requirements().values() for one in wanted}:
        try:
            licence = licences.licence_of(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if not licences.is_allowed(licence) and name not in licences.EXCEPTIONS:
            wrong.append(f"{name}: {licence}")
    assert wrong == []


def test_the_page_lists_every_dependency() -> None:
    page = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `([a-z0-9-]+)` \| [^|]+ \| [^|]+ \|$", page, re.MULTILINE))
    assert listed == {licences.name_of(one) for wanted in licences.requirements().values() for one in wanted}


@pytest.mark.parametrize(
    ("licence", "allowed"),
    [
        ("MIT", True), ("Apache-2.0 OR GPL-3.0", True), ("BSD License or GNU General Public License v3", True),
        ("LGPL-3.0-only", True), ("GNU Lesser General Public License v3 (LGPLv3)", True), ("MPL-2.0", True),
        ("GPL-3.0-only", False), ("AGPL-3.0", False), ("GNU Affero General Public License v3", False),
        ("GNU General Public License v2 (GPLv2)", False), ("Other/Proprietary License", False), ("", False),
    ],
)  # fmt: skip
def test_a_licence_is_allowed_or_not(licence: str, allowed: bool) -> None:
    assert licences.is_allowed(licence) is allowed


def test_a_bill_of_materials_with_an_unknown_licence_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "sbom.json"
    good = {"name": "x", "version": "1", "licenses": [{"license": {"id": "MIT"}}]}
    bad = {"name": "no-such-distribution", "version": "2"}
    file.write_text(json.dumps({"components": [good]}))
    assert licences.main([str(file)]) == 0
    file.write_text(json.dumps({"components": [good, bad]}))
    assert licences.main([str(file)]) == 1
    assert "no-such-distribution 2: no licence is stated" in capsys.readouterr().out
