"""Lines that a user writes, counted by one rule: those that hold code, neither blank nor only comment or docstring.

Counted is what joins a game to a trainer. The game itself (the lake, its words and maps, ``FrozenLakeEnv``) is the same file for
both and counted for neither, nor is what only measures, nor demonstrations for a warm-up, which both are spared here.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterable, Mapping
from pathlib import Path

_NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
ROOT = Path(__file__).parents[3]
OURS = {
    "scripts/bench/peers/frozenlake.toml": None,
    "orchestrator/tasks/frozenlake.py": ("FrozenLakeTask", "_prompt"),
    "orchestrator/tasks/rewards.py": ("frozenlake_success", "_replayed"),
}
TRL = {"scripts/bench/peers/trl_frozenlake.py": None}
LEFT_OUT = {"demonstrations"}


def code_lines(text: str, names: Iterable[str] | None = None) -> int:
    """Of a Python module: of all of it, or of what it defines under ``names`` at its top."""
    tree = ast.parse(text)
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if ast.get_docstring(node, clean=False) is not None:
                code -= _lines(node.body[0])
            if getattr(node, "name", "") in LEFT_OUT:
                code -= _lines(node)
    if names is None:
        return len(code)
    wanted = [node for node in tree.body if getattr(node, "name", None) in set(names)]
    return len(code & set[int]().union(*(_lines(node) for node in wanted)))


def toml_lines(text: str) -> int:
    """Of a TOML file."""
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in text.splitlines())


def counted(files: Mapping[str, tuple[str, ...] | None]) -> dict[str, int]:
    """Lines by file."""
    found = {}
    for file, names in files.items():
        text = (ROOT / file).read_text(encoding="utf-8")
        found[file] = toml_lines(text) if file.endswith(".toml") else code_lines(text, names)
    return found


def _lines(node: ast.AST) -> set[int]:
    found = set(range(getattr(node, "lineno", 1), (getattr(node, "end_lineno", None) or 1) + 1))
    return found.union(*(range(one.lineno, one.lineno + 1) for one in getattr(node, "decorator_list", ())))
