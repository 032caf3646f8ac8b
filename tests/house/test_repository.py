"""What the repository promises about itself: documentation names what exists, files stay short, nothing is machine-bound."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from functools import cache
from pathlib import Path

import pytest

from orchestrator.cli import _parser
from orchestrator.config import load_config

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    "README.md",
    "CONTRIBUTING.md",
    "AGENTS.md",
    "SECURITY.md",
    "CHANGELOG.md",
    "csrc/README.md",
    *sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("docs/**/*.md")),
]
PACKAGES = ("orchestrator", "vllm_rlplugin", "megatron_rlplugin", "patches")
LONGEST = 1000  # lines: one role a file, however long, but no longer than a reader can hold
TEXT = {".py", ".sh", ".md", ".toml", ".yml", ".yaml", ".cfg", ".html", ".css", ".js", ".json", ".txt", ".log", ""}

# Written in pieces, so that this file does not contain what it looks for.
MACHINE_PATHS = ["/" + path for path in ("work/", "opt/wheels", "root/", "opt/pypi")]
PACKAGE_HOSTS = ["pypi" + ".org", "python" + "hosted.org", "deb." + "debian.org", "registry." + "npmjs.org"]


@cache
def tracked() -> tuple[Path, ...]:
    """Files of the repository: as git sees them (new ones too), or all when this is no git checkout."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.CalledProcessError):
        files = [path for path in ROOT.rglob("*") if not {".git", ".venv", "runs"} & set(path.relative_to(ROOT).parts)]
    else:
        files = [ROOT / name for name in listed.stdout.split("\0") if name]
    return tuple(sorted(path for path in files if path.is_file()))


def texts() -> list[Path]:
    return [path for path in tracked() if path.suffix in TEXT]


def quoted(document: str) -> list[str]:
    """What a page sets in backticks, outside of code blocks."""
    text = re.sub(r"^```.*?^```", "", (ROOT / document).read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"`([^`\n]+)`", text)


@cache
def top_names() -> set[str]:
    return {path.relative_to(ROOT).parts[0] for path in tracked()} - {".gitignore"}


def missing_path(name: str) -> bool:
    """Whether this is written like a file of the repository, and is none."""
    looks = re.fullmatch(r"[\w./-]+", name) and (
        name.split("/")[0] in top_names() or name.endswith((".py", ".sh", ".toml", ".md"))
    )
    return bool(looks) and not (ROOT / name).exists()


def missing_module(name: str) -> bool:
    """Whether this is written like one of our modules (with or without a name in it), and is none."""
    if not re.fullmatch(rf"({'|'.join(PACKAGES)})(\.\w+)+(:\w+)?", name):
        return False
    parts = name.replace(":", ".").split(".")
    if parts[0] in ("vllm_rlplugin", "megatron_rlplugin") and parts[1] == "patches":
        parts[:2] = ["patches", parts[0].removesuffix("_rlplugin")]
    for cut in range(len(parts), 0, -1):
        stem = ROOT.joinpath(*parts[:cut])
        for file in (stem.with_suffix(".py"), stem / "__init__.py"):
            if file.is_file():
                inside = parts[cut:]
                source = file.read_text(encoding="utf-8")
                return not all(re.search(rf"^\s*(?:(?:async )?def |class )?{part}\b", source, re.M) for part in inside)
    return True


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_file_and_module_that_a_page_names_exists(document: str) -> None:
    names = quoted(document)
    assert [name for name in names if missing_path(name) or missing_module(name)] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_link_between_pages_leads_somewhere(document: str) -> None:
    page = ROOT / document
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
    local = [link for link in links if not link.startswith(("http://", "https://"))]
    assert [link for link in local if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_command_that_a_page_tells_to_run_exists(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    named = set(re.findall(r"(?:^|`)make ([a-z][a-z-]*)", text, re.M))
    assert named <= targets
    commands = next(action.choices for action in _parser()._actions if action.choices)
    assert set(re.findall(r"(?:^|`|bin/)rl-coserve ([a-z][a-z-]*)", text, re.M)) <= set(commands)


def test_no_file_is_longer_than_a_reader_can_hold() -> None:
    lengths = {
        str(p.relative_to(ROOT)): len(p.read_bytes().splitlines()) for p in texts() if p.suffix in (".py", ".sh", ".md")
    }
    assert {name: lines for name, lines in lengths.items() if lines > LONGEST} == {}


@pytest.mark.parametrize("needle", MACHINE_PATHS + PACKAGE_HOSTS)
def test_no_file_is_bound_to_a_machine_or_to_a_package_host(needle: str) -> None:
    ours = [path for path in texts() if path.parent.name != "repositories"]  # the sources of others, as they are
    found = [str(p.relative_to(ROOT)) for p in ours if needle in p.read_text(encoding="utf-8", errors="replace")]
    assert found == []


@pytest.mark.parametrize("path", sorted(ROOT.glob("examples/**/*.toml")), ids=lambda path: path.name)
def test_every_example_is_a_valid_config(path: Path) -> None:
    load_config(path)


def test_every_package_is_installed() -> None:
    """``setup.py`` looks for folders with an ``__init__.py``: one without would be left out of the wheel."""
    ours = [path.relative_to(ROOT).parent for path in tracked() if path.suffix == ".py"]
    folders = {
        folder for folder in ours if folder.parts and folder.parts[0] in PACKAGES and folder.parts != ("patches",)
    }
    assert [str(folder) for folder in sorted(folders) if not (ROOT / folder / "__init__.py").is_file()] == []
    mapped = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["package-dir"]
    text = (ROOT / "setup.py").read_text(encoding="utf-8")
    assert [name for name in mapped if f'"{name}"' not in text] == []


def test_every_module_opens_with_what_it_is_for() -> None:
    silent = []
    for path in tracked():
        if path.suffix == ".py" and path.relative_to(ROOT).parts[0] in PACKAGES:
            source = path.read_text(encoding="utf-8")
            if source.strip() and not ast.get_docstring(ast.parse(source)):
                silent.append(str(path.relative_to(ROOT)))
    assert silent == []


def test_the_licence_is_apache_2_in_full() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert len(text.splitlines()) > 170


def test_the_readme_is_short_enough_to_be_read() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(re.findall(r"[^\s|]*\w[^\s|]*", text)) <= 550
