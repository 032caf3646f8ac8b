"""A public class has its name to itself: whoever searches for it finds one thing."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("orchestrator", "vllm_rlplugin", "megatron_rlplugin", "patches")

TWO_SIDES = {  # of a port: the same idea
    "Market": "the port through which servers are exchanged, and what implements it over HTTP",
}


def shared_names(root: Path) -> dict[str, list[str]]:
    """The files of each public class whose name occurs more than once at the top level of a module."""
    files: dict[str, list[str]] = defaultdict(list)
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    files[node.name].append(str(path.relative_to(root)))
    return {name: where for name, where in files.items() if len(where) > 1}


def test_no_two_public_classes_have_one_name_but_those_that_are_listed_with_a_reason() -> None:
    assert {name: where for name, where in shared_names(ROOT).items() if name not in TWO_SIDES} == {}


def test_the_list_names_only_what_is_there_twice() -> None:
    assert TWO_SIDES.keys() - shared_names(ROOT).keys() == set()


def test_a_second_class_of_a_name_is_seen_across_packages(tmp_path: Path) -> None:
    sources = ("class Plan: ...", "class Plan: ...", "class _Plan: ...", "class Other: ...")
    for package, source in zip(PACKAGES, sources, strict=True):
        (tmp_path / package).mkdir()
        (tmp_path / package / "plans.py").write_text(source, encoding="utf-8")
    assert shared_names(tmp_path) == {"Plan": ["orchestrator/plans.py", "vllm_rlplugin/plans.py"]}
