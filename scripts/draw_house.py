#!/usr/bin/env python3
"""Draws docs/images/house.svg: the rooms of the house and what imports what, from the code itself.

python scripts/draw_house.py            # is the file what the code says? exit code 1: no
python scripts/draw_house.py --write

The order of the rooms is that of the import contracts in pyproject.toml; an arrow is at least one import, in a function or not.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Where the modules of a package lie.
PACKAGES = {
    "orchestrator": "orchestrator",
    "vllm_rlplugin": "vllm_rlplugin",
    "vllm_rlplugin.patches": "patches/vllm",
    "megatron_rlplugin": "megatron_rlplugin",
    "megatron_rlplugin.patches": "patches/megatron",
    "scripts": "scripts",
}


def modules() -> dict[str, Path]:
    """Every module of the tree by its name; a package is its ``__init__.py``."""
    found = {}
    for package, folder in PACKAGES.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = [package, *path.relative_to(ROOT / folder).with_suffix("").parts]
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(tree: ast.Module) -> Iterator[str]:
    """Names that a module imports, those in functions too. ``from a import b`` may mean ``a.b``, and runs ``a``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise ValueError(f"a relative import, which is not followed: {ast.unparse(node)}")
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def import_graph() -> dict[str, set[str]]:
    """Module -> our modules that it imports."""
    ours = modules()
    return {
        name: {item for item in imported(ast.parse(path.read_text(encoding="utf-8"))) if item in ours and item != name}
        for name, path in ours.items()
    }
