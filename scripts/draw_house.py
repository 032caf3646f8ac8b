#!/usr/bin/env python3
"""Draws docs/images/house.svg: the rooms of the house and what imports what, from the code itself.

python scripts/draw_house.py            # is the file what the code says? exit code 1: no
python scripts/draw_house.py --write

An arrow is at least one import, in a function or not; one that a longer way says too is left out, and so are the arrows onto the
ground, on which every room may stand. The exceptions that the contracts in pyproject.toml list are no arrows. Fails where rooms
import each other in a circle, where an arrow would point up, and where a room has no place.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FIGURE = ROOT / "docs" / "images" / "house.svg"
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


# Room -> middle, row, colour, and what it is for. A room is a folder of the orchestrator, or a module in its root.
ROOMS: dict[str, tuple[int, int, str, str]] = {
    "cli": (430, 0, "grey", "the command"),
    "ops": (430, 1, "grey", "doctor, profile, cost"),
    "adapters": (90, 2, "grey", "verl, others' trainers"),
    "sim": (330, 2, "orange", "runs in virtual time"),
    "runtime": (520, 2, "orange", "real processes"),
    "observe": (215, 3, "violet", "pages and reports"),
    "build": (400, 3, "orange", "config into parts"),
    "tasks": (560, 3, "green", "what is learned"),
    "cluster": (700, 3, "grey", "processes by role"),
    "resources": (700, 4, "green", "who has which GPU"),
    "agents": (490, 4, "green", "agents of others"),
    "manager_shards": (280, 4, "green", "other processes"),
    "borrowing": (90, 6, "green", "servers of others"),
    "colocation": (240, 6, "green", "one GPU, two roles"),
    "parallelism": (420, 6, "green", "degrees of engines"),
    "environments": (590, 6, "green", "episodes, tools"),
    "placement": (350, 7, "green", "which worker, when"),
    "profiler": (500, 7, "green", "what steps cost"),
    "rewards": (690, 7, "green", "functions, judges"),
    "proxy": (240, 8, "green", "turns to engines"),
    "sandbox": (778, 8, "green", "code of models"),
    "records": (430, 9, "green", "events, store, folder"),
    "config": (430, 10, "green", "what a run may say"),
    "megatron_rlplugin": (130, 10, "red", "inside Megatron-Core"),
    "vllm_rlplugin": (730, 10, "red", "inside vLLM"),
}
LOOP = (
    *("pipeline", "rollout", "buffer", "ledger", "envs", "evaluation", "tail_batching", "weight_sync"),
    *("train_samples", "trainer_calls", "components"),
)
RECORDS = ("checkpoint", "child_process", "durable_files", "events", "process_watcher", "run_folder", "shards", "store")
GROUND = ("hooks", "policies", "settings", "transfer", "api")
WIDTH, TALL, PITCH, TOP = 136, 44, 68, 16


def room_of(module: str) -> str:
    """The room in which a module is; "": none that is drawn."""
    package, *rest = module.split(".")
    if package != "orchestrator":
        return package if package in ROOMS else ""
    if not rest:
        return ""
    return "loop" if rest[0] in LOOP else "records" if rest[0] in RECORDS else rest[0]


def excepted() -> set[tuple[str, str]]:
    """Imports that the contracts list as exceptions."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    listed = (line for contract in contracts if contract["type"] == "layers" for line in contract["ignore_imports"])
    pairs = [tuple(line.split(" -> ")) for line in listed]
    return {(who, what) for who, what in pairs} | {(who, what.rpartition(".")[0]) for who, what in pairs}


def arrows() -> dict[str, list[str]]:
    """Room -> rooms that it imports, without what a longer way says too. Raises ValueError for a circle."""
    graph: dict[str, set[str]] = defaultdict(set)
    left_out = excepted()
    for module, imports in import_graph().items():
        for name in imports:
            room, other = room_of(module), room_of(name)
            if room and other and room != other and (module, name) not in left_out:
                graph[room].add(other)
    below = {room: _below(graph, room) for room in graph}
    if circles := sorted(room for room in graph if room in below[room]):
        raise ValueError(f"these rooms import each other: {circles}")
    return {
        room: sorted(other for other in graph[room] if not any(other in below.get(way, set()) for way in graph[room]))
        for room in sorted(graph)
    }


def _below(graph: Mapping[str, set[str]], room: str) -> set[str]:
    found: set[str] = set()
    waiting = [room]
    while waiting:
        new = graph.get(waiting.pop(), set()) - found
        found |= new
        waiting += new
    return found


def house() -> str:
    """The figure. Raises ValueError where the code no longer fits it."""
    d = drawing("The rooms of the house: each arrow is an import, and every arrow points down", 860, 898)
    places = {name: (x, TOP + PITCH * row) for name, (x, row, _, _) in ROOMS.items()}
    places["loop"] = (430, TOP + PITCH * 5)
    for room, others in arrows().items():
        for other in others:
            if other in GROUND or room in GROUND:
                continue
            if room not in places or other not in places:
                raise ValueError(f"no place for {room} or {other}: give it one in ROOMS, LOOP, RECORDS or GROUND")
            (x, y), (to, end) = places[room], places[other]
            if end <= y:
                raise ValueError(f"{room} imports {other}, which is drawn above it")
            reach = 150 if room == "loop" else 40
            into = 150 if other == "loop" else 40
            d.arrow(
                (x + max(-reach, min(reach, (to - x) * 0.3)), y + TALL),
                (to + max(-into, min(into, (x - to) * 0.5)), end - 2),
            )
    for plugin in ("megatron_rlplugin", "vllm_rlplugin"):
        x, y = places[plugin]
        d.arrow((x, y + TALL), (x, TOP + PITCH * 11 - 2))
    for name, (x, row, colour, text) in ROOMS.items():
        wide = WIDTH + (30 if "plugin" in name else 0)
        d.box(x - wide / 2, TOP + PITCH * row, wide, TALL, colour, name, text)
    d.box(
        230,
        TOP + PITCH * 5,
        400,
        TALL,
        "blue",
        "the loop",
        "pipeline, rollout, buffer, ledger, evaluation, weight_sync",
    )
    base = TOP + PITCH * 11
    d.box(20, base, 820, 118, "grey")
    for place, name in enumerate(GROUND[:-1]):
        d.text(125 + 203 * place, base + 30, name, "ink bold", "middle")
    for place, text in enumerate(
        ("versions, patches", "decisions, pure", "keys of both sides", "weights, KV on the wire")
    ):
        d.text(125 + 203 * place, base + 48, text, "ink small", "middle")
    d.line(40, base + 64, 820, base + 64)
    d.text(430, base + 86, "api", "ink bold", "middle")
    d.text(
        430,
        base + 104,
        "types, ports, errors: the standard library alone. Every room may stand on this ground.",
        "ink small",
        "middle",
    )
    return str(d.svg())


def drawing(title: str, width: int, height: int) -> Any:
    """The canvas of the other figures."""
    spec = importlib.util.spec_from_file_location("draw_concepts", ROOT / "scripts" / "draw_concepts.py")
    assert spec is not None
    assert spec.loader is not None
    concepts = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(concepts)
    return concepts.Drawing(title, width, height)


def main() -> int:
    text = house()
    if "--write" in sys.argv[1:]:
        FIGURE.write_text(text, encoding="utf-8")
    elif not FIGURE.is_file() or FIGURE.read_text(encoding="utf-8") != text:
        print(f"{FIGURE.name} is not what the code says: scripts/draw_house.py --write", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
